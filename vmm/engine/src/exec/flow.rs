//! Near branches: Jcc, JMP, CALL, RET, LOOPcc, JCXZ.

use iced_x86::{Code, Mnemonic as M, OpKind};

use crate::cpu::{Cpu, slot};
use crate::decode::{End, Lower, attempt, flow};
use crate::flags::condition;
use crate::op::{Done, Handler, Op, Reason, Stop, chain_flow};

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

/// How a branch reaches its target: within the page, in another page, or in a way that needs checks.
const NEAR: u8 = 0;
const FAR: u8 = 1;
const SLOW: u8 = 2;

#[inline(always)]
fn go<const HOW: u8>(c: &mut Cpu, o: &Op, taken: bool, next: u64) -> *const Op {
    let rel = if taken { o.imm } else { next };
    if HOW == NEAR {
        c.follow(o.link(), taken, rel)
    } else {
        c.follow_far(o, taken, rel)
    }
}

flow! {
    Jcc<K, HOW>(c, o) {
        let taken = condition::<K>(c.nf);
        go::<HOW>(c, o, taken, o.off as u64 + o.len as u64)
    }
    JccSlow<K, S>(c, o) {
        branch_slow::<S>(c, o, condition::<K>(c.nf))
    }
    Jmp<HOW>(c, o) {
        go::<HOW>(c, o, true, 0)
    }
    JmpSlow<S>(c, o) {
        let rip = c.relative::<S>(o.imm);
        go_slow(c, o, rip)
    }
    JmpReg<S>(c, o) {
        let rip = c.get::<S>(o.src);
        let t = c.lookup(rip);
        if t.is_null() {
            return go_slow(c, o, rip);
        }
        c.land(rip, t)
    }
    JmpMem<S>(c, o) {
        let ea = c.ea(o);
        let rip = attempt!(c, o, c.load::<S>(o, ea));
        let t = c.lookup(rip);
        if t.is_null() {
            return go_slow(c, o, rip);
        }
        c.land(rip, t)
    }
    Call<HOW, S>(c, o) {
        let next = c.next_ip(o);
        attempt!(c, o, c.push::<S>(o, next));
        go::<HOW>(c, o, true, 0)
    }
    CallSlow<S>(c, o) {
        let rip = c.relative::<S>(o.imm);
        call_slow::<S>(c, o, rip)
    }
    CallReg<S>(c, o) {
        let rip = c.get::<S>(o.src);
        let t = c.lookup(rip);
        if t.is_null() {
            return call_slow::<S>(c, o, rip);
        }
        let next = c.next_ip(o);
        attempt!(c, o, c.push::<S>(o, next));
        c.land(rip, t)
    }
    CallMem<S>(c, o) {
        let ea = c.ea(o);
        let rip = attempt!(c, o, c.load::<S>(o, ea));
        let t = c.lookup(rip);
        if t.is_null() {
            return call_slow::<S>(c, o, rip);
        }
        let next = c.next_ip(o);
        attempt!(c, o, c.push::<S>(o, next));
        c.land(rip, t)
    }
    Ret<S>(c, o) {
        let rip = attempt!(c, o, c.peek::<S>(o, 0));
        let t = c.lookup(rip);
        if t.is_null() {
            return ret_slow::<S>(c, o, rip);
        }
        c.drop_stack::<S>((S as u64).wrapping_add(o.imm));
        c.land(rip, t)
    }
    /// LOOP, LOOPE (`K` 4), LOOPNE (`K` 5): `K` 16 asks for no condition.
    Loop<K, A, S>(c, o) {
        let old = c.get::<8>(slot::RCX);
        let n = c.count::<A, 1>();
        let taken = n != 0 && match K { 4 => condition::<4>(c.nf), 5 => condition::<5>(c.nf), _ => true };
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
    Jcxz<A, S>(c, o) {
        let taken = c.count::<A, 0>() == 0;
        branch_slow::<S>(c, o, taken)
    }
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
            _ => go::<HOW>(c, o, true, 0),
        }
    }
}

macro_rules! by_condition {
    ($k:expr, $t:ident, $second:expr, [$($n:literal)*]) => {
        match $k { $($n => chain_flow::<$t<$n, { $second }>> as Handler,)* _ => chain_flow::<$t<15, { $second }>> }
    };
}

macro_rules! flow_sized {
    ($size:expr, $t:ident $(, $c:expr)*) => {
        match $size {
            2 => chain_flow::<$t<$({ $c },)* 2>> as Handler,
            4 => chain_flow::<$t<$({ $c },)* 4>>,
            _ => chain_flow::<$t<$({ $c },)* 8>>,
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
    let simple = l.is64() && size == 8 || l.flat_code() && size == 4;
    match l.i.mnemonic() {
        M::Pause => {
            let next = l.next();
            let f = match (l.flat_code(), next < 0x1000) {
                (true, true) => chain_flow::<Pause<NEAR>> as Handler,
                (true, false) => chain_flow::<Pause<FAR>>,
                _ => chain_flow::<Pause<SLOW>>,
            };
            l.flow(f, |o| o.imm = next)
        }
        M::Jmp | M::Call if matches!(l.i.op_kind(0), OpKind::FarBranch16 | OpKind::FarBranch32) => l.ud(),
        M::Jmp => match l.i.op_kind(0) {
            OpKind::Register => {
                let src = l.reg(0);
                l.flow(flow_sized!(size, JmpReg), |o| o.src = src)
            }
            OpKind::Memory => {
                let m = l.mem(size, false);
                l.flow_mem(flow_sized!(size, JmpMem), m, |_| ())
            }
            _ => {
                let target = l.target();
                let f = match (simple, how(l, false)) {
                    (true, NEAR) => chain_flow::<Jmp<NEAR>> as Handler,
                    (true, _) => chain_flow::<Jmp<FAR>>,
                    _ => flow_sized!(size, JmpSlow),
                };
                l.flow(f, |o| o.imm = target)
            }
        },
        M::Call => match l.i.op_kind(0) {
            OpKind::Register => {
                let src = l.reg(0);
                l.flow(flow_sized!(size, CallReg), |o| (o.src, o.seg) = (src, 2))
            }
            OpKind::Memory => {
                let m = l.mem(size, false);
                l.flow_mem(flow_sized!(size, CallMem), m, |_| ())
            }
            _ => {
                let target = l.target();
                let f = match (simple, how(l, false)) {
                    (true, NEAR) => flow_sized!(size, Call, NEAR),
                    (true, _) => flow_sized!(size, Call, FAR),
                    _ => flow_sized!(size, CallSlow),
                };
                l.flow(f, |o| (o.imm, o.seg) = (target, 2))
            }
        },
        M::Ret => {
            let extra = if l.i.op_count() > 0 { l.imm(0) & 0xffff } else { 0 };
            l.flow(flow_sized!(size, Ret), |o| (o.imm, o.seg) = (extra, 2))
        }
        M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz => {
            let target = l.target();
            let address = count_size(l);
            macro_rules! by_address {
                ($t:ident $(, $c:expr)*) => {
                    match address {
                        2 => flow_sized!(size, $t $(, $c)*, 2),
                        4 => flow_sized!(size, $t $(, $c)*, 4),
                        _ => flow_sized!(size, $t $(, $c)*, 8),
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
                (true, NEAR) => by_condition!(k, Jcc, NEAR, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]),
                (true, _) => by_condition!(k, Jcc, FAR, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]),
                _ => match size {
                    2 => by_condition!(k, JccSlow, 2, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]),
                    4 => by_condition!(k, JccSlow, 4, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]),
                    _ => by_condition!(k, JccSlow, 8, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15]),
                },
            };
            l.flow(f, |o| o.imm = target)
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
