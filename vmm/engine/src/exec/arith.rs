//! ADD, OR, ADC, SBB, AND, SUB, XOR, CMP, TEST, INC, DEC, NEG, NOT.

use iced_x86::{Mnemonic as M, OpKind};

use crate::exec::fuse::Compare;
use crate::flags::{ADC, ADD, AND, CMP, DEC, INC, NEG, OR, SBB, SUB, TEST, XOR, alu};
use crate::lower::{End, Lower, body, sized};
use crate::op::Handler;
use crate::translate::form::{Form, Operands};

const fn writes(op: u8) -> bool {
    !matches!(op, CMP | TEST)
}

body! {
    /// Register with register.
    Rr<O, S>(c, o) [Form::Alu(Operands::RegReg, O, S)] {
        let (a, b) = (c.get::<S>(o.dst), c.get::<S>(o.src));
        let (r, nf) = alu::<O, S>(a, b, c.nf);
        c.nf = nf;
        if writes(O) {
            c.set::<S>(o.dst, r);
        }
        Ok(())
    }
    /// Register with immediate; also the one-operand forms.
    Ri<O, S>(c, o) [Form::Alu(Operands::RegImm, O, S)] {
        let a = c.get::<S>(o.dst);
        let (r, nf) = alu::<O, S>(a, o.imm, c.nf);
        c.nf = nf;
        if writes(O) {
            c.set::<S>(o.dst, r);
        }
        Ok(())
    }
    /// Register with memory.
    Rm<O, S>(c, o) [Form::Alu(Operands::RegMem, O, S)] {
        let ea = c.ea(o);
        let b = c.load::<S>(o, ea)?;
        let a = c.get::<S>(o.dst);
        let (r, nf) = alu::<O, S>(a, b, c.nf);
        c.nf = nf;
        if writes(O) {
            c.set::<S>(o.dst, r);
        }
        Ok(())
    }
    /// Memory with register.
    Mr<O, S>(c, o) [Form::Alu(Operands::MemReg, O, S)] {
        let ea = c.ea(o);
        let b = c.get::<S>(o.src);
        if writes(O) {
            c.modify::<S>(o, ea, |c, a| {
                let (r, nf) = alu::<O, S>(a, b, c.nf);
                c.nf = nf;
                r
            })
        } else {
            let a = c.load::<S>(o, ea)?;
            c.nf = alu::<O, S>(a, b, c.nf).1;
            Ok(())
        }
    }
    /// Memory with immediate; also the one-operand forms.
    Mi<O, S>(c, o) [Form::Alu(Operands::MemImm, O, S)] {
        let ea = c.ea(o);
        if writes(O) {
            let b = o.imm;
            c.modify::<S>(o, ea, |c, a| {
                let (r, nf) = alu::<O, S>(a, b, c.nf);
                c.nf = nf;
                r
            })
        } else {
            let a = c.load::<S>(o, ea)?;
            c.nf = alu::<O, S>(a, o.imm, c.nf).1;
            Ok(())
        }
    }
    /// NOT changes no flag.
    Not<S>(c, o) [Form::Not(S)] {
        let v = !c.get::<S>(o.dst);
        c.set::<S>(o.dst, v);
        Ok(())
    }
}

macro_rules! by_operation {
    ($op:expr, $size:expr, $t:ident) => {
        match $op {
            ADD => sized!($size, $t, ADD),
            OR => sized!($size, $t, OR),
            ADC => sized!($size, $t, ADC),
            SBB => sized!($size, $t, SBB),
            AND => sized!($size, $t, AND),
            SUB => sized!($size, $t, SUB),
            XOR => sized!($size, $t, XOR),
            CMP => sized!($size, $t, CMP),
            TEST => sized!($size, $t, TEST),
            INC => sized!($size, $t, INC),
            DEC => sized!($size, $t, DEC),
            _ => sized!($size, $t, NEG),
        }
    };
}

fn rr(op: u8, size: u8) -> Handler {
    by_operation!(op, size, Rr)
}

fn ri(op: u8, size: u8) -> Handler {
    by_operation!(op, size, Ri)
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let op = match l.i.mnemonic() {
        M::Add => ADD,
        M::Or => OR,
        M::Adc => ADC,
        M::Sbb => SBB,
        M::And => AND,
        M::Sub => SUB,
        M::Xor => XOR,
        M::Cmp => CMP,
        M::Test => TEST,
        M::Inc => INC,
        M::Dec => DEC,
        M::Neg => NEG,
        _ => {
            let size = l.size(0);
            l.modify(0, size, |l, slot| l.emit(sized!(size, Not), |op| op.dst = slot));
            return End::Open;
        }
    };
    let size = l.size(0);
    // The second operand: a register, memory, or an immediate (0 for the one-operand forms).
    let second = if l.i.op_count() > 1 {
        l.i.op_kind(1)
    } else {
        OpKind::Immediate8
    };
    let imm = if l.i.op_count() > 1 && !matches!(second, OpKind::Register | OpKind::Memory) {
        l.imm(1)
    } else {
        0
    };
    if l.i.has_lock_prefix() {
        let src = if second == OpKind::Register {
            Some(l.reg(1))
        } else {
            None
        };
        l.modify(0, size, |l, slot| match src {
            Some(src) => l.emit(rr(op, size), |o| (o.dst, o.src) = (slot, src)),
            None => l.emit(ri(op, size), |o| (o.dst, o.imm) = (slot, imm)),
        });
        return End::Open;
    }
    let form = match (l.is_mem(0), second) {
        (false, OpKind::Register) => {
            let (dst, src) = (l.reg(0), l.reg(1));
            l.emit(rr(op, size), |o| (o.dst, o.src) = (dst, src));
            Operands::RegReg
        }
        (false, OpKind::Memory) => {
            let dst = l.reg(0);
            let m = l.mem(size, false);
            l.emit_mem(by_operation!(op, size, Rm), m, |o| o.dst = dst);
            Operands::RegMem
        }
        (true, OpKind::Register) => {
            let src = l.reg(1);
            let m = l.mem(size, writes(op));
            l.emit_mem(by_operation!(op, size, Mr), m, |o| o.src = src);
            Operands::MemReg
        }
        (true, _) => {
            let m = l.mem(size, writes(op));
            l.emit_mem(by_operation!(op, size, Mi), m, |o| o.imm = imm);
            Operands::MemImm
        }
        (false, _) => {
            let dst = l.reg(0);
            l.emit(ri(op, size), |o| (o.dst, o.imm) = (dst, imm));
            Operands::RegImm
        }
    };
    l.compare = Some(Compare { form, op, size });
    End::Open
}
