//! Instructions on opmask registers. SDM Vol. 2A "KADDW/KADDB/KADDQ/KADDD" and what follows it.

use iced_x86::Mnemonic as M;

use crate::fpu::portable::lanes::{Inputs, Vector};
use crate::fpu::portable::row::flag::{CF, ZF};
use crate::fpu::portable::row::{Outcome, Row};

/// The bits of a mask of `param` bits.
fn all(i: &Inputs) -> u64 {
    u64::MAX >> (64 - u32::from(i.param))
}

/// From the masks of both sources.
macro_rules! mask {
    (|$i:ident, $a:ident, $b:ident| $v:expr) => {
        |$i, _| {
            let all = all($i);
            let ($a, $b) = ($i.a.get::<u64>(0) & all, $i.b.get::<u64>(0) & all);
            let value: u64 = $v;
            Outcome::value(Vector::from_u64(value & all))
        }
    };
}

/// ZF and CF, by what is zero.
fn flags(zero: bool, carry: bool) -> Outcome {
    Outcome::flags(if zero { ZF } else { 0 } | if carry { CF } else { 0 })
}

/// KORTEST: ZF where no bit is set in either, CF where each is.
fn or_test(i: &Inputs) -> Outcome {
    let both = (i.a.get::<u64>(0) | i.b.get::<u64>(0)) & all(i);
    flags(both == 0, both == all(i))
}

/// KTEST: ZF where no bit is set in both, CF where the first has all that the second has.
fn and_test(i: &Inputs) -> Outcome {
    let (a, b) = (i.a.get::<u64>(0), i.b.get::<u64>(0));
    flags(a & b & all(i) == 0, !a & b & all(i) == 0)
}

/// The row of an instruction on opmasks.
#[rustfmt::skip] // A table.
pub fn row(mnemonic: M) -> Option<Row> {
    let of = |compute, bits| Some(Row::new(compute).with(bits));
    match mnemonic {
        M::Kmovb => of(mask!(|_i, _a, b| b), 8),
        M::Kmovw => of(mask!(|_i, _a, b| b), 16),
        M::Kmovd => of(mask!(|_i, _a, b| b), 32),
        M::Kmovq => of(mask!(|_i, _a, b| b), 64),
        M::Kaddb => of(mask!(|_i, a, b| a.wrapping_add(b)), 8),
        M::Kaddw => of(mask!(|_i, a, b| a.wrapping_add(b)), 16),
        M::Kaddd => of(mask!(|_i, a, b| a.wrapping_add(b)), 32),
        M::Kaddq => of(mask!(|_i, a, b| a.wrapping_add(b)), 64),
        M::Kandb => of(mask!(|_i, a, b| a & b), 8),
        M::Kandw => of(mask!(|_i, a, b| a & b), 16),
        M::Kandd => of(mask!(|_i, a, b| a & b), 32),
        M::Kandq => of(mask!(|_i, a, b| a & b), 64),
        M::Kandnb => of(mask!(|_i, a, b| !a & b), 8),
        M::Kandnw => of(mask!(|_i, a, b| !a & b), 16),
        M::Kandnd => of(mask!(|_i, a, b| !a & b), 32),
        M::Kandnq => of(mask!(|_i, a, b| !a & b), 64),
        M::Korb => of(mask!(|_i, a, b| a | b), 8),
        M::Korw => of(mask!(|_i, a, b| a | b), 16),
        M::Kord => of(mask!(|_i, a, b| a | b), 32),
        M::Korq => of(mask!(|_i, a, b| a | b), 64),
        M::Kxorb => of(mask!(|_i, a, b| a ^ b), 8),
        M::Kxorw => of(mask!(|_i, a, b| a ^ b), 16),
        M::Kxord => of(mask!(|_i, a, b| a ^ b), 32),
        M::Kxorq => of(mask!(|_i, a, b| a ^ b), 64),
        M::Kxnorb => of(mask!(|_i, a, b| !(a ^ b)), 8),
        M::Kxnorw => of(mask!(|_i, a, b| !(a ^ b)), 16),
        M::Kxnord => of(mask!(|_i, a, b| !(a ^ b)), 32),
        M::Kxnorq => of(mask!(|_i, a, b| !(a ^ b)), 64),
        M::Knotb => of(mask!(|_i, _a, b| !b), 8),
        M::Knotw => of(mask!(|_i, _a, b| !b), 16),
        M::Knotd => of(mask!(|_i, _a, b| !b), 32),
        M::Knotq => of(mask!(|_i, _a, b| !b), 64),
        M::Kshiftlb => of(mask!(|i, _a, b| b.checked_shl(i.imm.into()).unwrap_or(0)), 8),
        M::Kshiftlw => of(mask!(|i, _a, b| b.checked_shl(i.imm.into()).unwrap_or(0)), 16),
        M::Kshiftld => of(mask!(|i, _a, b| b.checked_shl(i.imm.into()).unwrap_or(0)), 32),
        M::Kshiftlq => of(mask!(|i, _a, b| b.checked_shl(i.imm.into()).unwrap_or(0)), 64),
        M::Kshiftrb => of(mask!(|i, _a, b| b.checked_shr(i.imm.into()).unwrap_or(0)), 8),
        M::Kshiftrw => of(mask!(|i, _a, b| b.checked_shr(i.imm.into()).unwrap_or(0)), 16),
        M::Kshiftrd => of(mask!(|i, _a, b| b.checked_shr(i.imm.into()).unwrap_or(0)), 32),
        M::Kshiftrq => of(mask!(|i, _a, b| b.checked_shr(i.imm.into()).unwrap_or(0)), 64),
        M::Kunpckbw => of(mask!(|_i, a, b| a << 8 | b & 0xff), 16),
        M::Kunpckwd => of(mask!(|_i, a, b| a << 16 | b & 0xffff), 32),
        M::Kunpckdq => of(mask!(|_i, a, b| a << 32 | b & 0xffff_ffff), 64),
        M::Kortestb => of(|i, _| or_test(i), 8),
        M::Kortestw => of(|i, _| or_test(i), 16),
        M::Kortestd => of(|i, _| or_test(i), 32),
        M::Kortestq => of(|i, _| or_test(i), 64),
        M::Ktestb => of(|i, _| and_test(i), 8),
        M::Ktestw => of(|i, _| and_test(i), 16),
        M::Ktestd => of(|i, _| and_test(i), 32),
        M::Ktestq => of(|i, _| and_test(i), 64),
        _ => None,
    }
}
