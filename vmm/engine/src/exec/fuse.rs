//! A compare and the conditional branch after it as one op: the pair is every tenth instruction of common code, and the
//! second dispatch costs as much as the work.
//!
//! The flags are written all the same. The op stands for two instructions, which matters only to a fault in the first: its
//! `rem` is the compare's, so the budget gets both back.

use crate::cpu::Cpu;
use crate::decode::attempt;
use crate::exec::arith::{Mi, Mr, Ri, Rm, Rr};
use crate::flags::{ADD, AND, CMP, DEC, SUB, TEST, condition};
use crate::op::{Body, Flow, Handler, Op, chain_flow};

/// Where a compare's operands are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    RegReg,
    RegImm,
    RegMem,
    MemReg,
    MemImm,
}

/// What the instruction before was, if a branch may be joined to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compare {
    pub form: Form,
    pub op: u8,
    pub size: u8,
}

/// `B`, then the branch on condition `K` within the page. `aux` holds the target's page offset and, from bit 12, the branch's
/// length.
struct Fused<B, const K: u8>(core::marker::PhantomData<B>);

impl<B: Body, const K: u8> Flow for Fused<B, K> {
    #[inline(always)]
    fn run(c: &mut Cpu, o: &Op) -> *const Op {
        attempt!(c, o, B::run(c, o));
        let taken = condition::<K>(c.nf);
        let next = o.off as u64 + o.len as u64 + (o.aux >> 12) as u64;
        c.follow(o.link(), taken, if taken { o.aux as u64 & 0xfff } else { next })
    }
}

macro_rules! conditions {
    ($k:expr, $b:ty, [$($n:literal)*]) => {
        match $k { $($n => chain_flow::<Fused<$b, $n>> as Handler,)* _ => chain_flow::<Fused<$b, 15>> }
    };
    ($k:expr, $b:ty) => { conditions!($k, $b, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14]) };
}

macro_rules! sizes {
    ($k:expr, $size:expr, $t:ident, $op:expr) => {
        match $size {
            1 => conditions!($k, $t<{ $op }, 1>),
            2 => conditions!($k, $t<{ $op }, 2>),
            4 => conditions!($k, $t<{ $op }, 4>),
            _ => conditions!($k, $t<{ $op }, 8>),
        }
    };
}

/// The handler of a compare joined with a branch on condition `k`; `None` for pairs that are not worth one.
pub(crate) fn handler(compare: Compare, k: u8) -> Option<Handler> {
    let size = compare.size;
    Some(match (compare.form, compare.op) {
        (Form::RegReg, CMP) => sizes!(k, size, Rr, CMP),
        (Form::RegReg, TEST) => sizes!(k, size, Rr, TEST),
        (Form::RegReg, SUB) => sizes!(k, size, Rr, SUB),
        (Form::RegReg, AND) => sizes!(k, size, Rr, AND),
        (Form::RegImm, CMP) => sizes!(k, size, Ri, CMP),
        (Form::RegImm, TEST) => sizes!(k, size, Ri, TEST),
        (Form::RegImm, SUB) => sizes!(k, size, Ri, SUB),
        (Form::RegImm, ADD) => sizes!(k, size, Ri, ADD),
        (Form::RegImm, AND) => sizes!(k, size, Ri, AND),
        (Form::RegImm, DEC) => sizes!(k, size, Ri, DEC),
        (Form::RegMem, CMP) => sizes!(k, size, Rm, CMP),
        (Form::MemReg, CMP) => sizes!(k, size, Mr, CMP),
        (Form::MemReg, TEST) => sizes!(k, size, Mr, TEST),
        (Form::MemImm, CMP) => sizes!(k, size, Mi, CMP),
        (Form::MemImm, TEST) => sizes!(k, size, Mi, TEST),
        _ => return None,
    })
}
