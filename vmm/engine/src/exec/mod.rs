//! Instructions, one file a family. Each has its bodies and a `lower` that picks among them.

pub(crate) mod arith;
pub(crate) mod flow;
pub(crate) mod fuse;
pub(crate) mod mov;
pub(crate) mod simd;

use iced_x86::Mnemonic as M;

use crate::decode::{End, Lower};

/// Emits the ops of one instruction.
pub(crate) fn lower(l: &mut Lower) -> End {
    match l.i.mnemonic() {
        M::Add
        | M::Or
        | M::Adc
        | M::Sbb
        | M::And
        | M::Sub
        | M::Xor
        | M::Cmp
        | M::Test
        | M::Inc
        | M::Dec
        | M::Neg
        | M::Not => arith::lower(l),
        M::Mov | M::Movzx | M::Movsx | M::Movsxd | M::Lea | M::Push | M::Pop | M::Nop | M::Xchg | M::Leave => {
            mov::lower(l)
        }
        M::Jmp | M::Call | M::Ret | M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz => flow::lower(l),
        _ if l.i.is_jcc_short_or_near() => flow::lower(l),
        _ if simd::handles(l.i) => simd::lower(l),
        _ => l.ud(),
    }
}
