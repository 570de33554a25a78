//! A compare and the conditional branch after it as one op: the pair is every tenth instruction of common code, and the
//! second dispatch costs as much as the work.
//!
//! The flags are written all the same. The op stands for two instructions, which matters only to a fault in the first: its
//! `rem` is the compare's, so the budget gets both back.

use crate::cpu::Cpu;
use crate::exec::arith::{Mi, Mr, Ri, Rm, Rr};
use crate::flags::{ADD, AND, CMP, DEC, SUB, TEST, condition};
use crate::lower::attempt;
use crate::op::{Body, Flow, Handler, Op, chain_flow};
use crate::translate::form::{Form, Operands};

/// What the instruction before was, if a branch may be joined to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compare {
    pub form: Operands,
    pub op: u8,
    pub size: u8,
}

/// `B`, then the branch on condition `K` within the page; `R` 1 records it. `aux` holds the target's page offset and, from bit
/// 12, the branch's length.
struct Fused<B, const K: u8, const R: u8>(core::marker::PhantomData<B>);

impl<B: Body, const K: u8, const R: u8> Flow for Fused<B, K, R> {
    const FORM: Form = match B::FORM {
        Form::Alu(operands, op, size) => Form::Fused(operands, op, size, K),
        _ => Form::Other,
    };

    #[inline(always)]
    fn run(c: &mut Cpu, o: &Op) -> *const Op {
        attempt!(c, o, B::run(c, o));
        let taken = condition::<K>(c.nf);
        if R != 0 {
            return c.follow_recorded(o, taken);
        }
        let branch = o.off as u64 + o.len as u64;
        let (next, target) = (branch + (o.aux >> 12) as u64, o.aux as u64 & 0xfff);
        c.follow(o.link(), taken, if taken { target } else { next })
    }
}

macro_rules! conditions {
    ($k:expr, $r:literal, $b:ty, [$($n:literal)*]) => {
        match $k { $($n => chain_flow::<Fused<$b, $n, $r>>(),)* _ => chain_flow::<Fused<$b, 15, $r>>() }
    };
    ($k:expr, $r:literal, $b:ty) => { conditions!($k, $r, $b, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14]) };
}

macro_rules! sizes {
    (($k:expr, $recorded:expr), $size:expr, $t:ident, $op:expr) => {
        match ($size, $recorded) {
            (1, false) => conditions!($k, 0, $t<{ $op }, 1>),
            (2, false) => conditions!($k, 0, $t<{ $op }, 2>),
            (4, false) => conditions!($k, 0, $t<{ $op }, 4>),
            (_, false) => conditions!($k, 0, $t<{ $op }, 8>),
            (1, true) => conditions!($k, 1, $t<{ $op }, 1>),
            (2, true) => conditions!($k, 1, $t<{ $op }, 2>),
            (4, true) => conditions!($k, 1, $t<{ $op }, 4>),
            (_, true) => conditions!($k, 1, $t<{ $op }, 8>),
        }
    };
}

/// The handler of a compare joined with a branch on condition `k`; `None` for pairs that are not worth one.
pub(crate) fn handler(compare: Compare, k: u8, recorded: bool) -> Option<Handler> {
    let size = compare.size;
    Some(match (compare.form, compare.op) {
        (Operands::RegReg, CMP) => sizes!((k, recorded), size, Rr, CMP),
        (Operands::RegReg, TEST) => sizes!((k, recorded), size, Rr, TEST),
        (Operands::RegReg, SUB) => sizes!((k, recorded), size, Rr, SUB),
        (Operands::RegReg, AND) => sizes!((k, recorded), size, Rr, AND),
        (Operands::RegImm, CMP) => sizes!((k, recorded), size, Ri, CMP),
        (Operands::RegImm, TEST) => sizes!((k, recorded), size, Ri, TEST),
        (Operands::RegImm, SUB) => sizes!((k, recorded), size, Ri, SUB),
        (Operands::RegImm, ADD) => sizes!((k, recorded), size, Ri, ADD),
        (Operands::RegImm, AND) => sizes!((k, recorded), size, Ri, AND),
        (Operands::RegImm, DEC) => sizes!((k, recorded), size, Ri, DEC),
        (Operands::RegMem, CMP) => sizes!((k, recorded), size, Rm, CMP),
        (Operands::MemReg, CMP) => sizes!((k, recorded), size, Mr, CMP),
        (Operands::MemReg, TEST) => sizes!((k, recorded), size, Mr, TEST),
        (Operands::MemImm, CMP) => sizes!((k, recorded), size, Mi, CMP),
        (Operands::MemImm, TEST) => sizes!((k, recorded), size, Mi, TEST),
        _ => return None,
    })
}
