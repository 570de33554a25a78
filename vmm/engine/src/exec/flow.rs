//! Near branches: Jcc, JMP, CALL, RET, LOOPcc, JCXZ.

use iced_x86::{Code, Mnemonic as M, OpKind};

use crate::cpu::{Cpu, slot};
use crate::flags::condition;
use crate::lower::{End, Lower, attempt, flow};
use crate::op::{Done, Op, Reason, Stop, chain_flow};
use crate::translate::form::{Form, reach};
use x86::watch::Flow;

/// Where an instruction goes in a code segment that is not flat, or with 16-bit operands: checked against the limit, and
/// found through the jump cache.
#[cold]
#[inline(never)]
fn go_slow(c: &mut Cpu, o: &Op, rip: u64) -> *const Op {
    attempt!(c, o, c.check_target(rip));
    c.jump(rip)
}

/// A conditional branch there. One that is not taken is checked as the fetch of the next instruction.
#[cold]
#[inline(never)]
fn branch_slow<const S: u8>(c: &mut Cpu, o: &Op, taken: bool) -> *const Op {
    if taken {
        let rip = c.relative::<S>(o.imm);
        return go_slow(c, o, rip);
    }
    let next = c.next_ip(o);
    c.jump(next)
}

#[cold]
#[inline(never)]
fn call_slow<const S: u8>(c: &mut Cpu, o: &Op, rip: u64) -> *const Op {
    attempt!(c, o, c.check_target(rip));
    let next = c.next_ip(o);
    attempt!(c, o, c.push::<S>(o, next));
    c.end(rip, Reason::Resolve)
}

#[cold]
#[inline(never)]
fn ret_slow<const S: u8>(c: &mut Cpu, o: &Op, rip: u64) -> *const Op {
    attempt!(c, o, c.check_target(rip));
    c.drop_stack::<S>((S as u64).wrapping_add(o.imm));
    c.end(rip, Reason::Resolve)
}

impl Cpu {
    /// A near branch's target must be canonical, or within the code segment.
    #[inline]
    pub(crate) fn check_target(&mut self, rip: u64) -> Done {
        let fine = if self.is64() {
            self.canonical(rip)
        } else {
            rip <= self.seg[crate::cpu::CS].limit as u64
        };
        if fine { Ok(()) } else { Err(self.gp(0)) }
    }

    /// A target that is relative to the running page, cut to an operand size of `S` bytes.
    #[inline(always)]
    fn relative<const S: u8>(&self, rel: u64) -> u64 {
        let rip = self.page_ip().wrapping_add(rel);
        match S {
            2 => rip & 0xffff,
            4 => rip & 0xffff_ffff,
            _ => rip,
        }
    }

    /// LOOP's and JCXZ's count register of `A` bytes, decremented first if `DEC`.
    #[inline(always)]
    fn count<const A: u8, const DEC: u8>(&mut self) -> u64 {
        let n = self.get::<A>(slot::RCX).wrapping_sub(DEC as u64);
        if DEC != 0 {
            self.set::<A>(slot::RCX, n);
        }
        match A {
            2 => n & 0xffff,
            4 => n & 0xffff_ffff,
            _ => n,
        }
    }
}

/// Codes of [`x86::watch::Flow`].
const JUMP: u8 = Flow::Jump.code();
const JUMP_IND: u8 = Flow::JumpInd.code();
const CALL: u8 = Flow::Call.code();
const CALL_IND: u8 = Flow::CallInd.code();
const RET: u8 = Flow::Ret.code();

/// Ends the chain after a recorded branch to `rip`: the buffer is full. The caller returns null itself, so that this is its
/// last call.
#[cold]
#[inline(never)]
pub(crate) fn full(c: &mut Cpu, o: &Op, rip: u64) {
    if c.is64() && !c.canonical(rip) {
        c.unrecord();
        let Stop = c.gp(0);
        c.leave(o);
        return;
    }
    c.end(rip, Reason::Look);
}

/// Records the branch that `slow` carries out, unless `R` is 0; its [`x86::watch::Flow::code`] is `code`.
#[inline(always)]
fn slowly<const R: u8>(c: &mut Cpu, o: &Op, code: u8, slow: impl FnOnce(&mut Cpu, &Op) -> *const Op) -> *const Op {
    if R == 0 {
        return slow(c, o);
    }
    let mark = c.mark(o);
    let next = slow(c, o);
    c.record_after(o, mark, code, next)
}

/// How a branch reaches its target: within the page, in another page, or in a way that needs checks.
const NEAR: u8 = 0;
const FAR: u8 = 1;
const SLOW: u8 = 2;

#[inline(always)]
fn go<const HOW: u8, const R: u8>(c: &mut Cpu, o: &Op, taken: bool, next: u64) -> *const Op {
    if R != 0 && HOW == NEAR {
        return c.follow_recorded(o, taken);
    }
    let rel = if taken { o.imm } else { next };
    if R != 0 {
        // Only flat code gets here, whose page begins at a linear address.
        if c.record_direct::<true>(o.template(taken)) {
            let rip = c.page_ip().wrapping_add(rel);
            full(c, o, rip);
            return core::ptr::null();
        }
    }
    if HOW == NEAR {
        c.follow(o.link(), taken, rel)
    } else {
        c.follow_far::<R>(o, taken, rel)
    }
}

// `R` 1: the form that records, for blocks of the mode that does; 2: that in flat code, where it makes a difference.
flow! {
    Jcc<K, HOW, R>(c, o) [Form::Jcc(K, reach(HOW))] {
        let taken = condition::<K>(c.nf);
        go::<HOW, R>(c, o, taken, o.off as u64 + o.len as u64)
    }
    JccSlow<K, S, R>(c, o) {
        let taken = condition::<K>(c.nf);
        slowly::<R>(c, o, taken as u8, |c, o| branch_slow::<S>(c, o, taken))
    }
    Jmp<HOW, R>(c, o) [Form::Jump(reach(HOW))] {
        go::<HOW, R>(c, o, true, 0)
    }
    JmpSlow<R, S>(c, o) {
        let rip = c.relative::<S>(o.imm);
        slowly::<R>(c, o, JUMP, |c, o| go_slow(c, o, rip))
    }
    JmpReg<R, S>(c, o) [Form::JumpReg(S)] {
        let rip = c.get::<S>(o.src);
        let t = c.lookup(rip);
        if t.is_null() {
            return slowly::<R>(c, o, JUMP_IND, |c, o| go_slow(c, o, rip));
        }
        if R != 0 && c.record_to::<R>(o, JUMP_IND, rip) {
            full(c, o, rip);
            return core::ptr::null();
        }
        c.land(rip, t)
    }
    JmpMem<R, S>(c, o) [Form::JumpMem(S)] {
        let ea = c.ea(o);
        let rip = attempt!(c, o, c.load::<S>(o, ea));
        let t = c.lookup(rip);
        if t.is_null() {
            return slowly::<R>(c, o, JUMP_IND, |c, o| go_slow(c, o, rip));
        }
        if R != 0 && c.record_to::<R>(o, JUMP_IND, rip) {
            full(c, o, rip);
            return core::ptr::null();
        }
        c.land(rip, t)
    }
    Call<HOW, R, S>(c, o) [Form::Call(reach(HOW), S)] {
        let next = c.next_ip(o);
        attempt!(c, o, c.push::<S>(o, next));
        go::<HOW, R>(c, o, true, 0)
    }
    CallSlow<R, S>(c, o) {
        let rip = c.relative::<S>(o.imm);
        slowly::<R>(c, o, CALL, |c, o| call_slow::<S>(c, o, rip))
    }
    CallReg<R, S>(c, o) [Form::CallReg(S)] {
        let rip = c.get::<S>(o.src);
        let t = c.lookup(rip);
        if t.is_null() {
            return slowly::<R>(c, o, CALL_IND, |c, o| call_slow::<S>(c, o, rip));
        }
        let next = c.next_ip(o);
        attempt!(c, o, c.push::<S>(o, next));
        if R != 0 && c.record_to::<R>(o, CALL_IND, rip) {
            full(c, o, rip);
            return core::ptr::null();
        }
        c.land(rip, t)
    }
    CallMem<R, S>(c, o) [Form::CallMem(S)] {
        let ea = c.ea(o);
        let rip = attempt!(c, o, c.load::<S>(o, ea));
        let t = c.lookup(rip);
        if t.is_null() {
            return slowly::<R>(c, o, CALL_IND, |c, o| call_slow::<S>(c, o, rip));
        }
        let next = c.next_ip(o);
        attempt!(c, o, c.push::<S>(o, next));
        if R != 0 && c.record_to::<R>(o, CALL_IND, rip) {
            full(c, o, rip);
            return core::ptr::null();
        }
        c.land(rip, t)
    }
    Ret<R, S>(c, o) [Form::Return(S)] {
        let rip = attempt!(c, o, c.peek::<S>(o, 0));
        let t = c.lookup(rip);
        if t.is_null() {
            return slowly::<R>(c, o, RET, |c, o| ret_slow::<S>(c, o, rip));
        }
        c.drop_stack::<S>((S as u64).wrapping_add(o.imm));
        if R != 0 && c.record_to::<R>(o, RET, rip) {
            full(c, o, rip);
            return core::ptr::null();
        }
        c.land(rip, t)
    }
    /// LOOP, LOOPE (`K` 4), LOOPNE (`K` 5): `K` 16 asks for no condition.
    Loop<K, R, A, S>(c, o) {
        let old = c.get::<8>(slot::RCX);
        let n = c.count::<A, 1>();
        let taken = n != 0 && match K { 4 => condition::<4>(c.nf), 5 => condition::<5>(c.nf), _ => true };
        slowly::<R>(c, o, taken as u8, |c, o| loop_slow::<S>(c, o, taken, old))
    }
    Jcxz<R, A, S>(c, o) {
        let taken = c.count::<A, 0>() == 0;
        slowly::<R>(c, o, taken as u8, |c, o| branch_slow::<S>(c, o, taken))
    }
}

/// LOOP once it has counted down from `old`.
#[inline(always)]
fn loop_slow<const S: u8>(c: &mut Cpu, o: &Op, taken: bool, old: u64) -> *const Op {
    if !taken {
        let next = c.next_ip(o);
        return c.jump(next);
    }
    let rip = c.relative::<S>(o.imm);
    if let Err(Stop) = c.check_target(rip) {
        c.set::<8>(slot::RCX, old);
        return c.abandon(o);
    }
    c.jump(rip)
}

flow! {
    /// PAUSE: goes on, or ends the processor's turn where somebody else may hold what it waits for.
    Pause<HOW>(c, o) {
        let next = c.next_ip(o);
        if c.yield_on_pause {
            c.paused = true;
            return c.end(next, Reason::Look);
        }
        match HOW {
            SLOW => c.jump(next),
            _ => go::<HOW, 0>(c, o, true, 0),
        }
    }
}

macro_rules! by_condition {
    ($k:expr, $recorded:expr, $t:ident, $second:expr, $($n:literal)*) => {
        match ($k, $recorded) {
            $(($n, false) => chain_flow::<$t<$n, { $second }, 0>>(),)*
            $(($n, true) => chain_flow::<$t<$n, { $second }, 1>>(),)*
            (_, false) => chain_flow::<$t<15, { $second }, 0>>(),
            (_, true) => chain_flow::<$t<15, { $second }, 1>>(),
        }
    };
    ($k:expr, $recorded:expr, $t:ident, $second:expr) => {
        by_condition!($k, $recorded, $t, $second, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    };
}

/// Picks the form that records, or the one that does not, with the parameters that come before and after.
macro_rules! recorded {
    ($recorded:expr, $size:expr, $t:ident $(, $c:expr)*; $($d:expr),*) => {
        match $recorded {
            false => flow_sized!($size, $t $(, $c)*, 0 $(, $d)*),
            true => flow_sized!($size, $t $(, $c)*, 1 $(, $d)*),
        }
    };
    ($recorded:expr, $size:expr, $t:ident $(, $c:expr)*) => {
        recorded!($recorded, $size, $t $(, $c)*;)
    };
}

/// The same for branches to an address that they compute: 2 is the form that records in flat code.
macro_rules! indirect {
    ($way:expr, $size:expr, $t:ident) => {
        match $way {
            0 => flow_sized!($size, $t, 0),
            1 => flow_sized!($size, $t, 1),
            _ => flow_sized!($size, $t, 2),
        }
    };
}

macro_rules! flow_sized {
    ($size:expr, $t:ident $(, $c:expr)*) => {
        match $size {
            2 => chain_flow::<$t<$({ $c },)* 2>>(),
            4 => chain_flow::<$t<$({ $c },)* 4>>(),
            _ => chain_flow::<$t<$({ $c },)* 8>>(),
        }
    };
}

/// The size in bytes that a near branch cuts RIP to.
fn operand(l: &Lower) -> u8 {
    match l.i.op_kind(0) {
        // Its only operand is an immediate, or none.
        _ if l.i.mnemonic() == M::Ret => match l.i.code() {
            Code::Retnw | Code::Retnw_imm16 => 2,
            Code::Retnd | Code::Retnd_imm16 => 4,
            _ => 8,
        },
        OpKind::NearBranch16 => 2,
        OpKind::NearBranch32 => 4,
        OpKind::NearBranch64 => 8,
        OpKind::Register | OpKind::Memory => l.size(0),
        _ if l.is64() => 8,
        _ => 4,
    }
}

/// Whether every place a direct branch may go to is in the page, and the plain link suffices.
fn how(l: &Lower, conditional: bool) -> u8 {
    let near = l.target() < 0x1000 && (!conditional || l.next() < 0x1000);
    if near { NEAR } else { FAR }
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let size = operand(l);
    let recorded = l.recorded();
    let way = recorded as u8 * (1 + l.flat_code() as u8);
    let simple = l.is64() && size == 8 || l.flat_code() && size == 4;
    match l.i.mnemonic() {
        M::Pause => {
            let next = l.next();
            let f = match (l.flat_code(), next < 0x1000) {
                (true, true) => chain_flow::<Pause<NEAR>>(),
                (true, false) => chain_flow::<Pause<FAR>>(),
                _ => chain_flow::<Pause<SLOW>>(),
            };
            l.flow(f, |o| o.imm = next)
        }
        M::Jmp | M::Call if matches!(l.i.op_kind(0), OpKind::FarBranch16 | OpKind::FarBranch32) => l.ud(),
        M::Jmp => match l.i.op_kind(0) {
            OpKind::Register => {
                let src = l.reg(0);
                let end = l.flow(indirect!(way, size, JmpReg), |o| o.src = src);
                l.templates(Flow::JumpInd, 0);
                end
            }
            OpKind::Memory => {
                let m = l.mem(size, false);
                let end = l.flow_mem(indirect!(way, size, JmpMem), m, |_| ());
                l.templates(Flow::JumpInd, 0);
                end
            }
            _ => {
                let target = l.target();
                let f = match (simple, how(l, false), recorded) {
                    (true, NEAR, false) => chain_flow::<Jmp<NEAR, 0>>(),
                    (true, NEAR, true) => chain_flow::<Jmp<NEAR, 1>>(),
                    (true, _, false) => chain_flow::<Jmp<FAR, 0>>(),
                    (true, _, true) => chain_flow::<Jmp<FAR, 1>>(),
                    (_, _, false) => flow_sized!(size, JmpSlow, 0),
                    (_, _, true) => flow_sized!(size, JmpSlow, 1),
                };
                let end = l.flow(f, |o| o.imm = target);
                l.templates(Flow::Jump, target);
                end
            }
        },
        M::Call => match l.i.op_kind(0) {
            OpKind::Register => {
                let src = l.reg(0);
                let end = l.flow(indirect!(way, size, CallReg), |o| (o.src, o.seg) = (src, 2));
                l.templates(Flow::CallInd, 0);
                end
            }
            OpKind::Memory => {
                let m = l.mem(size, false);
                let end = l.flow_mem(indirect!(way, size, CallMem), m, |_| ());
                l.templates(Flow::CallInd, 0);
                end
            }
            _ => {
                let target = l.target();
                let f = match (simple, how(l, false)) {
                    (true, NEAR) => recorded!(recorded, size, Call, NEAR),
                    (true, _) => recorded!(recorded, size, Call, FAR),
                    _ => recorded!(recorded, size, CallSlow),
                };
                let end = l.flow(f, |o| (o.imm, o.seg) = (target, 2));
                l.templates(Flow::Call, target);
                end
            }
        },
        M::Ret => {
            let extra = if l.i.op_count() > 0 { l.imm(0) & 0xffff } else { 0 };
            let end = l.flow(indirect!(way, size, Ret), |o| (o.imm, o.seg) = (extra, 2));
            l.templates(Flow::Ret, 0);
            end
        }
        M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz => {
            let target = l.target();
            let address = count_size(l);
            macro_rules! by_address {
                ($t:ident $(, $c:expr)*) => {
                    match address {
                        2 => recorded!(recorded, size, $t $(, $c)*; 2),
                        4 => recorded!(recorded, size, $t $(, $c)*; 4),
                        _ => recorded!(recorded, size, $t $(, $c)*; 8),
                    }
                };
            }
            let f = match l.i.mnemonic() {
                M::Loop => by_address!(Loop, 16),
                M::Loope => by_address!(Loop, 4),
                M::Loopne => by_address!(Loop, 5),
                _ => by_address!(Jcxz),
            };
            l.flow(f, |o| o.imm = target)
        }
        _ => {
            let k = l.i.condition_code() as u8 - 1;
            let target = l.target();
            if simple
                && how(l, true) == NEAR
                && let Some(end) = l.fuse(k)
            {
                return end;
            }
            let f = match (simple, how(l, true)) {
                (true, NEAR) => by_condition!(k, recorded, Jcc, NEAR),
                (true, _) => by_condition!(k, recorded, Jcc, FAR),
                _ => match size {
                    2 => by_condition!(k, recorded, JccSlow, 2),
                    4 => by_condition!(k, recorded, JccSlow, 4),
                    _ => by_condition!(k, recorded, JccSlow, 8),
                },
            };
            let end = l.flow(f, |o| o.imm = target);
            l.templates(Flow::Cond { taken: true }, target);
            end
        }
    }
}

/// The size of the count register, which the address size decides.
fn count_size(l: &Lower) -> u8 {
    use iced_x86::Code as C;
    match l.i.code() {
        C::Loop_rel8_16_CX
        | C::Loop_rel8_32_CX
        | C::Loope_rel8_16_CX
        | C::Loope_rel8_32_CX
        | C::Loopne_rel8_16_CX
        | C::Loopne_rel8_32_CX
        | C::Jcxz_rel8_16
        | C::Jcxz_rel8_32 => 2,
        C::Loop_rel8_16_RCX
        | C::Loop_rel8_64_RCX
        | C::Loope_rel8_16_RCX
        | C::Loope_rel8_64_RCX
        | C::Loopne_rel8_16_RCX
        | C::Loopne_rel8_64_RCX
        | C::Jrcxz_rel8_16
        | C::Jrcxz_rel8_64 => 8,
        _ => 4,
    }
}
