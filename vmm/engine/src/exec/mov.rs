//! MOV, MOVZX, MOVSX, LEA, PUSH, POP, XCHG, LEAVE, NOP.

use iced_x86::{Mnemonic as M, OpKind, Register};

use crate::cpu::{Cpu, SS, mode, slot};
use crate::lower::{End, Lower, body, sized, sized_wide};
use crate::op::{Done, Op, chain};
use crate::translate::Form;

impl Cpu {
    /// Where `size` bytes would be pushed: the linear address and the new stack pointer.
    #[inline]
    pub(crate) fn push_place(&mut self, size: u64) -> Done<(u64, u64)> {
        let rsp = self.get::<8>(slot::RSP);
        if self.is64() {
            let sp = rsp.wrapping_sub(size);
            return Ok((sp, sp));
        }
        let sp = rsp.wrapping_sub(size) & self.stack_mask();
        Ok((self.segmented(SS, sp, size, true)?, sp))
    }

    /// The bits of RSP that a push or pop uses.
    #[inline]
    pub(crate) fn stack_mask(&self) -> u64 {
        if self.is64() {
            u64::MAX
        } else if self.mode & mode::STACK32 != 0 {
            0xffff_ffff
        } else {
            0xffff
        }
    }

    /// Sets the part of RSP that the stack's size covers.
    #[inline]
    pub(crate) fn set_sp(&mut self, sp: u64) {
        if self.is64() {
            self.set::<8>(slot::RSP, sp);
        } else if self.mode & mode::STACK32 != 0 {
            self.set::<4>(slot::RSP, sp);
        } else {
            self.set::<2>(slot::RSP, sp);
        }
    }

    /// Pushes `S` bytes.
    #[inline(always)]
    pub(crate) fn push<const S: u8>(&mut self, o: &Op, value: u64) -> Done {
        if S == 8 {
            let sp = self.get::<8>(slot::RSP).wrapping_sub(8);
            self.store::<8>(o, sp, value)?;
            self.set::<8>(slot::RSP, sp);
            return Ok(());
        }
        let (linear, sp) = self.push_place(S as u64)?;
        self.store::<S>(o, linear, value)?;
        self.set_sp(sp);
        Ok(())
    }

    /// Reads `S` bytes at the stack pointer plus `skip`, without moving it.
    #[inline(always)]
    pub(crate) fn peek<const S: u8>(&mut self, o: &Op, skip: u64) -> Done<u64> {
        let rsp = self.get::<8>(slot::RSP);
        // Eight bytes are popped in 64-bit mode only, and little else is there.
        if S == 8 || self.is64() {
            return self.load::<S>(o, rsp.wrapping_add(skip));
        }
        let sp = rsp.wrapping_add(skip) & self.stack_mask();
        let linear = self.segmented(SS, sp, S as u64, false)?;
        self.load::<S>(o, linear)
    }

    /// Moves the stack pointer up, in an instruction that pops `S` bytes at a time.
    #[inline(always)]
    pub(crate) fn drop_stack<const S: u8>(&mut self, bytes: u64) {
        let sp = self.get::<8>(slot::RSP).wrapping_add(bytes);
        if S == 8 {
            self.set::<8>(slot::RSP, sp);
        } else {
            self.set_sp(sp);
        }
    }
}

body! {
    Nop(_c, _o) [Form::Nop] {
        Ok(())
    }
    MovRr<S>(c, o) [Form::MoveReg(S)] {
        let v = c.get::<S>(o.src);
        c.set::<S>(o.dst, v);
        Ok(())
    }
    MovRi<S>(c, o) [Form::MoveImm(S)] {
        c.set::<S>(o.dst, o.imm);
        Ok(())
    }
    MovRm<X, S>(c, o) [Form::Load(S)] {
        let ea = c.ea_with::<X>(o);
        let v = c.load::<S>(o, ea)?;
        c.set::<S>(o.dst, v);
        Ok(())
    }
    MovMr<X, S>(c, o) [Form::Store(S)] {
        let ea = c.ea_with::<X>(o);
        let v = c.get::<S>(o.src);
        c.store::<S>(o, ea, v)
    }
    MovMi<S>(c, o) [Form::StoreImm(S)] {
        let ea = c.ea(o);
        c.store::<S>(o, ea, o.imm)
    }
    /// From `F` to `S` bytes, zero-extended.
    ZeroRr<F, S>(c, o) [Form::ZeroReg(F, S)] {
        let v = c.get::<F>(o.src);
        c.set::<S>(o.dst, v);
        Ok(())
    }
    ZeroRm<F, S>(c, o) [Form::ZeroLoad(F, S)] {
        let ea = c.ea(o);
        let v = c.load::<F>(o, ea)?;
        c.set::<S>(o.dst, v);
        Ok(())
    }
    /// From `F` to `S` bytes, sign-extended.
    SignRr<F, S>(c, o) [Form::SignReg(F, S)] {
        let v = extend::<F>(c.get::<F>(o.src));
        c.set::<S>(o.dst, v);
        Ok(())
    }
    SignRm<F, S>(c, o) [Form::SignLoad(F, S)] {
        let ea = c.ea(o);
        let v = extend::<F>(c.load::<F>(o, ea)?);
        c.set::<S>(o.dst, v);
        Ok(())
    }
    /// LEA with an address size of `A` bytes.
    Lea<A, S>(c, o) [Form::Lea(A, S)] {
        let ea = c.ea(o);
        c.set::<S>(o.dst, match A { 2 => ea & 0xffff, 4 => ea & 0xffff_ffff, _ => ea });
        Ok(())
    }
    PushR<S>(c, o) [Form::PushReg(S)] {
        let v = c.get::<S>(o.src);
        c.push::<S>(o, v)
    }
    PushI<S>(c, o) [Form::PushImm(S)] {
        c.push::<S>(o, o.imm)
    }
    PopR<S>(c, o) [Form::PopReg(S)] {
        let v = c.peek::<S>(o, 0)?;
        c.drop_stack::<S>(S as u64);
        c.set::<S>(o.dst, v);
        Ok(())
    }
    /// POP to memory, first half: the address is computed with the stack pointer already moved (SDM Vol. 2B "POP"), which
    /// `disp` of the store accounts for.
    PeekT0<S>(c, o) {
        let v = c.peek::<S>(o, 0)?;
        c.set::<8>(slot::T0, v);
        Ok(())
    }
    DropStack<S>(c, _o) {
        c.drop_stack::<S>(S as u64);
        Ok(())
    }
    XchgRr<S>(c, o) [Form::Exchange(S)] {
        let (a, b) = (c.get::<S>(o.dst), c.get::<S>(o.src));
        c.set::<S>(o.dst, b);
        c.set::<S>(o.src, a);
        Ok(())
    }
    /// XCHG's second half: what was loaded goes to the register, the register's value to T0.
    SwapT0<S>(c, o) {
        let (old, new) = (c.get::<S>(slot::T0), c.get::<S>(o.src));
        c.set::<8>(slot::T0, new);
        c.set::<8>(slot::EA, old);
        Ok(())
    }
    FromEa<S>(c, o) {
        let v = c.get::<S>(slot::EA);
        c.set::<S>(o.dst, v);
        Ok(())
    }
    /// LEAVE with operands of `S` bytes.
    Leave<S>(c, o) {
        let bp = c.get::<8>(slot::RBP) & if S == 8 { u64::MAX } else { c.stack_mask() };
        let linear = if S == 8 || c.is64() { bp } else { c.segmented(SS, bp, S as u64, false)? };
        let v = c.load::<S>(o, linear)?;
        c.set_sp(bp.wrapping_add(S as u64));
        c.set::<S>(slot::RBP, v);
        Ok(())
    }
}

#[inline(always)]
pub(crate) fn extend<const F: u8>(v: u64) -> u64 {
    match F {
        1 => v as i8 as i64 as u64,
        2 => v as i16 as i64 as u64,
        4 => v as i32 as i64 as u64,
        _ => v,
    }
}

/// The operand size of a stack instruction.
pub(crate) fn stack_size(l: &Lower) -> u8 {
    match l.i.stack_pointer_increment().unsigned_abs() {
        2 => 2,
        4 => 4,
        _ => 8,
    }
}

pub(crate) fn lower(l: &mut Lower) -> End {
    match l.i.mnemonic() {
        M::Nop => l.emit(chain::<Nop>(), |_| ()),
        M::Mov => mov(l),
        M::Movzx | M::Movsx | M::Movsxd => widen(l),
        M::Lea => {
            let (dst, size, address) = (l.reg(0), l.size(0), l.address_size());
            let m = l.sum();
            let f = match address {
                2 => sized_wide!(size, Lea, 2),
                4 => sized_wide!(size, Lea, 4),
                _ => sized_wide!(size, Lea, 8),
            };
            l.emit_mem(f, m, |o| o.dst = dst);
        }
        M::Push => return push(l),
        M::Pop => return pop(l),
        M::Xchg => xchg(l),
        _ => {
            let size = stack_size_of_leave(l);
            l.emit(sized_wide!(size, Leave), |o| o.seg = SS as u8);
        }
    }
    End::Open
}

fn stack_size_of_leave(l: &Lower) -> u8 {
    match l.i.code() {
        iced_x86::Code::Leavew => 2,
        iced_x86::Code::Leaved => 4,
        _ => 8,
    }
}

fn is_special(r: Register) -> bool {
    r.is_segment_register() || r.is_cr() || r.is_dr() || r.is_tr()
}

fn mov(l: &mut Lower) {
    let size = l.size(0);
    let imm = if matches!(l.i.op_kind(1), OpKind::Register | OpKind::Memory) {
        0
    } else {
        l.imm(1)
    };
    match (l.is_mem(0), l.i.op_kind(1)) {
        (false, OpKind::Register) => {
            let (dst, src) = (l.reg(0), l.reg(1));
            l.emit(sized!(size, MovRr), |o| (o.dst, o.src) = (dst, src));
        }
        (false, OpKind::Memory) => {
            let dst = l.reg(0);
            let m = l.mem(size, false);
            let f = match m.idx {
                slot::ZERO => sized!(size, MovRm, 0),
                _ => sized!(size, MovRm, 1),
            };
            l.emit_mem(f, m, |o| o.dst = dst);
        }
        (true, OpKind::Register) => {
            let src = l.reg(1);
            let m = l.mem(size, true);
            let f = match m.idx {
                slot::ZERO => sized!(size, MovMr, 0),
                _ => sized!(size, MovMr, 1),
            };
            l.emit_mem(f, m, |o| o.src = src);
        }
        (true, _) => {
            let m = l.mem(size, true);
            l.emit_mem(sized!(size, MovMi), m, |o| o.imm = imm);
        }
        (false, _) => {
            let dst = l.reg(0);
            l.emit(sized!(size, MovRi), |o| (o.dst, o.imm) = (dst, imm));
        }
    }
}

/// A MOV that involves a segment, control or debug register is a system instruction.
pub(crate) fn is_system_mov(l: &Lower) -> bool {
    (0..2).any(|n| l.is_reg(n) && is_special(l.i.op_register(n)))
}

fn widen(l: &mut Lower) {
    let (to, from, dst) = (l.size(0), l.size(1), l.reg(0));
    let zero = l.i.mnemonic() == M::Movzx;
    if l.is_reg(1) {
        let src = l.reg(1);
        let f = match (zero, from) {
            (true, 1) => sized_wide!(to, ZeroRr, 1),
            (true, _) => sized_wide!(to, ZeroRr, 2),
            (false, 1) => sized_wide!(to, SignRr, 1),
            (false, 2) => sized_wide!(to, SignRr, 2),
            (false, _) => sized_wide!(to, SignRr, 4),
        };
        l.emit(f, |o| (o.dst, o.src) = (dst, src));
    } else {
        let m = l.mem(from, false);
        let f = match (zero, from) {
            (true, 1) => sized_wide!(to, ZeroRm, 1),
            (true, _) => sized_wide!(to, ZeroRm, 2),
            (false, 1) => sized_wide!(to, SignRm, 1),
            (false, 2) => sized_wide!(to, SignRm, 2),
            (false, _) => sized_wide!(to, SignRm, 4),
        };
        l.emit_mem(f, m, |o| o.dst = dst);
    }
}

fn push(l: &mut Lower) -> End {
    let size = stack_size(l);
    match l.i.op_kind(0) {
        OpKind::Register if l.i.op_register(0).is_segment_register() => return l.ud(),
        OpKind::Register | OpKind::Memory => {
            let src = l.read(0, size);
            l.emit(sized_wide!(size, PushR), |o| (o.src, o.seg) = (src, SS as u8));
        }
        _ => {
            let imm = l.imm(0);
            l.emit(sized_wide!(size, PushI), |o| (o.imm, o.seg) = (imm, SS as u8));
        }
    }
    End::Open
}

fn pop(l: &mut Lower) -> End {
    let size = stack_size(l);
    if l.is_reg(0) {
        if l.i.op_register(0).is_segment_register() {
            return l.ud();
        }
        let dst = l.reg(0);
        l.emit(sized_wide!(size, PopR), |o| (o.dst, o.seg) = (dst, SS as u8));
        return End::Open;
    }
    l.emit(sized_wide!(size, PeekT0), |o| o.seg = SS as u8);
    // If the store faults RSP has not moved.
    l.pop_store(size);
    l.emit(sized_wide!(size, DropStack), |_| ());
    End::Open
}

fn xchg(l: &mut Lower) {
    let size = l.size(0);
    if l.is_reg(0) && l.is_reg(1) {
        let (dst, src) = (l.reg(0), l.reg(1));
        l.emit(sized!(size, XchgRr), |o| (o.dst, o.src) = (dst, src));
        return;
    }
    // With memory XCHG is locked, prefix or not (SDM Vol. 2C "XCHG"); the register changes only once memory has.
    let (memory, register) = if l.is_mem(0) { (0, 1) } else { (1, 0) };
    let reg = l.reg(register);
    l.modify_locked(memory, size, |l| l.emit(sized!(size, SwapT0), |o| o.src = reg));
    l.emit(sized!(size, FromEa), |o| o.dst = reg);
}
