//! MOVS, STOS, LODS, CMPS, SCAS, and their repetition.
//!
//! # Theory
//! A repeated instruction is a loop of iterations, each complete in registers and memory, between which faults, traps and
//! interrupts may come (SDM Vol. 2B "REP/REPE/REPZ/REPNE/REPNZ—Repeat String Operation Prefix"); the last iteration
//! retires the instruction.
//!
//! # Practice
//! Every iteration is a step of the budget, the last one being the instruction's own: `n` iterations are `n` steps, and a
//! count of 0 is one. So there is never a state in which all iterations are done and the instruction is not, which the
//! registers could not tell (a REPE that ended on a difference would compare again). Where pages allow, REP MOVS and STOS
//! upwards take many iterations at once.
//!
//! The flags of CMPS and SCAS are written when the instruction is done. Whatever comes between two iterations finds them as they
//! were before the instruction: the manual says so of page faults, and on Intel's processors it is so for traps as well.

use iced_x86::Mnemonic as M;
use x86::rflags::flag as rf;

use crate::cpu::{Cpu, ES, slot};
use crate::flags::{CMP, ZF, alu};
use crate::lower::{End, Lower, body, flow, sized};
use crate::op::{Done, Op, Reason, Stop, chain_flow};

const MOVS: u8 = 0;
const STOS: u8 = 1;
const LODS: u8 = 2;
const CMPS: u8 = 3;
const SCAS: u8 = 4;

/// How an iteration's end decides on another one, in `Op::dst`.
const ALWAYS: u8 = 0;
const WHILE_EQUAL: u8 = 1;
const WHILE_NOT_EQUAL: u8 = 2;

// In the op: `src` the source's segment, `imm` the bits that the address size leaves of rSI, rDI and rCX.

impl Cpu {
    /// Sets the part of an index or count register that the address size covers.
    #[inline(always)]
    fn set_index(&mut self, at: u8, mask: u64, value: u64) {
        match mask {
            0xffff => self.set::<2>(at, value),
            0xffff_ffff => self.set::<4>(at, value),
            _ => self.set::<8>(at, value),
        }
    }

    #[inline(always)]
    fn advance(&mut self, at: u8, mask: u64, by: u64) {
        let v = self.get::<8>(at).wrapping_add(by);
        self.set_index(at, mask, v);
    }
}

/// One iteration.
#[inline(always)]
fn once<const K: u8, const S: u8>(c: &mut Cpu, o: &Op) -> Done {
    let (size, mask) = (S as u64, o.imm);
    let by = if c.rflags & rf::DF != 0 {
        size.wrapping_neg()
    } else {
        size
    };
    let mut from = 0;
    let mut to = 0;
    // CMPS reads its second operand first.
    if matches!(K, CMPS | SCAS) {
        let offset = c.get::<8>(slot::RDI) & mask;
        let linear = c.segmented(ES, offset, size, false)?;
        to = c.load::<S>(o, linear)?;
    }
    if matches!(K, MOVS | LODS | CMPS) {
        let offset = c.get::<8>(slot::RSI) & mask;
        let linear = c.segmented(o.src as usize, offset, size, false)?;
        from = c.load::<S>(o, linear)?;
    }
    match K {
        MOVS | STOS => {
            let offset = c.get::<8>(slot::RDI) & mask;
            let linear = c.segmented(ES, offset, size, true)?;
            let v = if K == MOVS { from } else { c.get::<S>(slot::RAX) };
            c.store::<S>(o, linear, v)?;
        }
        LODS => c.set::<S>(slot::RAX, from),
        _ => {
            let first = if K == SCAS { c.get::<S>(slot::RAX) } else { from };
            c.nf = alu::<CMP, S>(first, to, c.nf).1;
        }
    }
    if K != LODS {
        c.advance(slot::RDI, mask, by);
    }
    if matches!(K, MOVS | LODS | CMPS) {
        c.advance(slot::RSI, mask, by);
    }
    Ok(())
}

#[inline(never)]
fn single<const K: u8, const S: u8>(c: &mut Cpu, o: &Op) -> Done {
    once::<K, S>(c, o)
}

/// Up to `max` iterations of MOVS or STOS upwards at once; 0 where the next one needs a closer look.
#[inline(always)]
fn many<const K: u8, const S: u8>(c: &mut Cpu, o: &Op, max: u64) -> u64 {
    let (size, mask) = (S as u64, o.imm);
    let (from, to) = (c.get::<8>(slot::RSI) & mask, c.get::<8>(slot::RDI) & mask);
    // No further than the offsets go without wrapping, nor a page.
    let mut n = max.min((mask - to) / size).min(0x1000 / size);
    if K == MOVS {
        n = n.min((mask - from) / size);
    }
    if n == 0 {
        return 0;
    }
    let bytes = n * size;
    let Some(linear_to) = c.within(ES, to, bytes, true) else {
        return 0;
    };
    if K == STOS {
        let v = c.get::<S>(slot::RAX);
        n = c.fill_run::<S>(linear_to, v, n);
        if n == 0 {
            return 0;
        }
    } else {
        let Some(linear_from) = c.within(o.src as usize, from, bytes, false) else {
            return 0;
        };
        n = c.copy_run::<S>(linear_from, linear_to, n);
        if n == 0 {
            return 0;
        }
        c.advance(slot::RSI, mask, n * size);
    }
    c.advance(slot::RDI, mask, n * size);
    n
}

/// What a repetition without an iteration changes, because its count is 0 or its first iteration faults: 32-bit counts and
/// indices are written all the same, so in 64-bit mode they lose their upper halves. So Intel's processors with the count always
/// and with the indices of MOVS and STOS.
#[cold]
fn started<const K: u8>(c: &mut Cpu, mask: u64) {
    let mut cut = |at: u8| {
        let v = c.get::<8>(at);
        c.set_index(at, mask, v);
    };
    cut(slot::RCX);
    if matches!(K, MOVS | STOS) {
        cut(slot::RDI);
    }
    if K == MOVS {
        cut(slot::RSI);
    }
}

/// Runs iterations; whether the instruction has retired.
#[inline(never)]
fn repeat<const K: u8, const S: u8>(c: &mut Cpu, o: &Op) -> bool {
    let mask = o.imm;
    let flags = c.nf;
    loop {
        let count = c.get::<8>(slot::RCX) & mask;
        if count == 0 {
            started::<K>(c, mask);
            return true;
        }
        let trap = c.rflags & rf::TF != 0;
        // The block's budget covers one step already.
        let max = count.min(c.budget as u64 + 1);
        let mut n = 0;
        if matches!(K, MOVS | STOS) && c.rflags & rf::DF == 0 && !trap {
            n = many::<K, S>(c, o, max);
        }
        if n == 0 {
            if let Err(Stop) = once::<K, S>(c, o) {
                started::<K>(c, mask);
                c.nf = flags;
                c.leave(o);
                return false;
            }
            n = 1;
        }
        c.set_index(slot::RCX, mask, count - n);
        c.budget -= n as i64 - 1;
        c.iterations += n - 1;
        let more = match o.dst {
            ALWAYS => true,
            WHILE_EQUAL => c.nf & ZF != 0,
            _ => c.nf & ZF == 0,
        };
        if count == n || !more {
            return true;
        }
        c.iterations += 1;
        // Between iterations, with the registers as they are now, whoever waits has his turn; what is delivered here saves RF
        // set.
        if c.budget == 0 || trap || c.bus_used || !c.watched.accesses.is_empty() {
            c.nf = flags;
            c.rf_at = c.steps_after(o);
            c.end(c.ip(o), Reason::Look);
            return false;
        }
        c.budget -= 1;
    }
}

body! {
    Once<K, S>(c, o) {
        single::<K, S>(c, o)
    }
}

flow! {
    /// Repeated, followed by an instruction of the same page.
    Rep<K, S>(c, o) {
        if repeat::<K, S>(c, o) {
            return c.follow(o.link(), false, o.off as u64 + o.len as u64);
        }
        core::ptr::null()
    }
    /// Repeated, followed by one of another page or in a code segment that is not flat.
    RepFar<K, S>(c, o) {
        if repeat::<K, S>(c, o) {
            let next = c.next_ip(o);
            return c.jump(next);
        }
        core::ptr::null()
    }
}

fn operation(l: &Lower) -> Option<u8> {
    if !l.i.is_string_instruction() {
        return None;
    }
    Some(match l.i.mnemonic() {
        M::Movsb | M::Movsw | M::Movsd | M::Movsq => MOVS,
        M::Stosb | M::Stosw | M::Stosd | M::Stosq => STOS,
        M::Lodsb | M::Lodsw | M::Lodsd | M::Lodsq => LODS,
        M::Cmpsb | M::Cmpsw | M::Cmpsd | M::Cmpsq => CMPS,
        M::Scasb | M::Scasw | M::Scasd | M::Scasq => SCAS,
        _ => return None,
    })
}

/// Whether the instruction is one of this file: the mnemonics alone do not tell MOVSD from the vector instruction.
pub(crate) fn is(l: &Lower) -> bool {
    operation(l).is_some()
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let Some(kind) = operation(l) else {
        return l.ud();
    };
    let size = l.i.memory_size().size() as u8;
    let seg = l.segment();
    let mask = match l.address_size() {
        2 => 0xffff,
        4 => 0xffff_ffff,
        _ => u64::MAX,
    };
    let compares = matches!(kind, CMPS | SCAS);
    let until = match (l.i.has_rep_prefix(), l.i.has_repne_prefix()) {
        (false, false) => None,
        // REPNE before one that does not compare is REP.
        _ if !compares => Some(ALWAYS),
        (true, _) => Some(WHILE_EQUAL),
        _ => Some(WHILE_NOT_EQUAL),
    };
    macro_rules! by_kind {
        ($pick:ident, $t:ident) => {
            match kind {
                MOVS => $pick!(size, $t, MOVS),
                STOS => $pick!(size, $t, STOS),
                LODS => $pick!(size, $t, LODS),
                CMPS => $pick!(size, $t, CMPS),
                _ => $pick!(size, $t, SCAS),
            }
        };
    }
    macro_rules! flow_sized {
        ($size:expr, $t:ident, $k:expr) => {
            match $size {
                1 => chain_flow::<$t<{ $k }, 1>>(),
                2 => chain_flow::<$t<{ $k }, 2>>(),
                4 => chain_flow::<$t<{ $k }, 4>>(),
                _ => chain_flow::<$t<{ $k }, 8>>(),
            }
        };
    }
    let set = |o: &mut Op| {
        (o.src, o.imm, o.dst) = (seg, mask, until.unwrap_or(ALWAYS));
    };
    match until {
        None => {
            l.emit(by_kind!(sized, Once), set);
            End::Open
        }
        Some(_) if l.flat_code() && l.next() < 0x1000 => l.flow(by_kind!(flow_sized, Rep), set),
        Some(_) => l.flow(by_kind!(flow_sized, RepFar), set),
    }
}
