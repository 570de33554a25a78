//! AVX512_FP16: arithmetic on half precision. SDM Vol. 2C, each instruction's "Operation".
//!
//! Rows are those of the wider formats with another element. Denormals are numbers like others here, whatever DAZ and FTZ say
//! ([`Float::FLUSHED`](crate::fpu::portable::float::Float::FLUSHED)); a conversion from or to a wider format obeys the two on that side.

use iced_x86::Mnemonic as M;

use super::float::{
    TRUNCATE, UNSIGNED, classify, compare_mask, from_general_unsigned, from_integers, reduce_lanes, round_lanes,
    to_general, to_integers,
};
use crate::fpu::portable::arith::{
    Element, PACKED, SCALAR, binary, compare_flags, convert_lanes, from_general, lanes, unary,
};
use crate::fpu::portable::float::{self, Environment, F16, F32, F64, Float, convert, divide, multiply_add, root};
use crate::fpu::portable::lanes::{Inputs, Vector};
use crate::fpu::portable::row::{Compute, Outcome, Row};
use crate::fpu::state::mxcsr;

/// Parameters of complex multiplication: the second factor is conjugated; the product is added to the destination.
const CONJUGATE: u8 = 1 << 1;
const ACCUMULATE: u8 = 1 << 2;

/// VFMULCPH and its like, whose lanes are pairs: the real part, then the imaginary one. Products with the second factor's real part come
/// first, and each step is rounded. Where both a factor and what is added to are NaNs, the order is that of VFMADD231PH.
fn complex(i: &Inputs, e: &mut Environment) -> Outcome {
    let scalar = i.param & SCALAR != 0;
    let (count, mut out) = if scalar {
        (1, *i.a)
    } else {
        (i.bytes / F32::BYTES, Vector::ZERO)
    };
    for k in (0..count).filter(|&k| i.chosen(k)) {
        let pair = |v: &Vector| [F16::get(v, 2 * k), F16::get(v, 2 * k + 1)];
        let ([a, b], [c, d], sum) = (pair(i.a), pair(i.b), pair(i.c));
        let mut by_real = |factor: u64, sum: u64| match i.param & ACCUMULATE {
            0 => float::multiply::<F16>(factor, c, e),
            _ => multiply_add::<F16>([factor, c, sum], false, false, e),
        };
        let (real, imaginary) = (by_real(a, sum[0]), by_real(b, sum[1]));
        let conjugate = i.param & CONJUGATE != 0;
        F16::set(&mut out, 2 * k, multiply_add::<F16>([b, d, real], !conjugate, false, e));
        F16::set(
            &mut out,
            2 * k + 1,
            multiply_add::<F16>([a, d, imaginary], conjugate, false, e),
        );
    }
    Outcome::value(out)
}

/// What an approximation is computed in: MXCSR is neither consulted nor updated.
fn own() -> Environment {
    Environment::new(mxcsr::RESET)
}

/// VRCPPH. The manual bounds the relative error by 2^-11 + 2^-14, has powers of two exact, and leaves the other bits open. Chosen: the
/// nearest value.
fn reciprocal(a: u64) -> u64 {
    const ONE: u64 = (F16::BIAS as u64) << F16::FRACTION;
    divide::<F16>(ONE, a, &mut own())
}

/// VRSQRTPH, likewise. Double precision comes nowhere so near the middle of two values as to be rounded to the other.
fn reciprocal_root(a: u64) -> u64 {
    const ONE: u64 = (F64::BIAS as u64) << F64::FRACTION;
    let e = &mut own();
    let wide = convert::<F16, F64>(a, e);
    let root = root::<F64>(wide, e);
    let quotient = divide::<F64>(ONE, root, e);
    convert::<F64, F16>(quotient, e)
}

/// The low word alone, or in place of the first source's.
fn move_word(i: &Inputs) -> Outcome {
    let (_, mut out) = lanes::<F16>(i);
    out.set(0, i.b.get::<u16>(0));
    Outcome::value(out)
}

/// The row of an instruction on half precision; of fused multiply-add [`crate::fpu::portable::arith`] has it.
#[rustfmt::skip] // A table.
pub fn row(mnemonic: M) -> Option<Row> {
    let packed = |compute: Compute| Row::new(compute).with(PACKED);
    let scalar = |compute: Compute| Row::new(compute).with(SCALAR);
    let with = |compute: Compute, param: u8| Row::new(compute).with(param);
    macro_rules! two {
        ($op:ident) => { |i, e| binary::<F16>(i, e, float::$op::<F16>) };
    }
    macro_rules! one {
        ($op:ident) => { |i, e| unary::<F16>(i, e, float::$op::<F16>) };
    }
    macro_rules! extreme {
        ($least:literal) => { |i, e| binary::<F16>(i, e, |a, b, e| float::extreme::<F16>(a, b, $least, e)) };
    }
    macro_rules! approximate {
        ($f:ident) => { |i, e| unary::<F16>(i, e, |b, _| $f(b)) };
    }
    let mantissas: Compute = |i, e| unary::<F16>(i, e, |b, e| float::mantissa::<F16>(b, i.imm, e));
    Some(match mnemonic {
        M::Vaddph => packed(two!(add)),
        M::Vaddsh => scalar(two!(add)),
        M::Vsubph => packed(two!(subtract)),
        M::Vsubsh => scalar(two!(subtract)),
        M::Vmulph => packed(two!(multiply)),
        M::Vmulsh => scalar(two!(multiply)),
        M::Vdivph => packed(two!(divide)),
        M::Vdivsh => scalar(two!(divide)),
        M::Vsqrtph => packed(one!(root)),
        M::Vsqrtsh => scalar(one!(root)),
        M::Vminph => packed(extreme!(true)),
        M::Vminsh => scalar(extreme!(true)),
        M::Vmaxph => packed(extreme!(false)),
        M::Vmaxsh => scalar(extreme!(false)),
        M::Vcmpph => packed(compare_mask::<F16>),
        M::Vcmpsh => scalar(compare_mask::<F16>),
        M::Vcomish => with(compare_flags::<F16>, 1),
        M::Vucomish => packed(compare_flags::<F16>),
        M::Vfpclassph => packed(classify::<F16>),
        M::Vfpclasssh => scalar(classify::<F16>),
        M::Vrndscaleph => packed(round_lanes::<F16>),
        M::Vrndscalesh => scalar(round_lanes::<F16>),
        M::Vreduceph => packed(reduce_lanes::<F16>),
        M::Vreducesh => scalar(reduce_lanes::<F16>),
        M::Vscalefph => packed(two!(scale)),
        M::Vscalefsh => scalar(two!(scale)),
        M::Vgetexpph => packed(one!(exponent)),
        M::Vgetexpsh => scalar(one!(exponent)),
        M::Vgetmantph => packed(mantissas),
        M::Vgetmantsh => scalar(mantissas),
        M::Vrcpph => packed(approximate!(reciprocal)),
        M::Vrcpsh => scalar(approximate!(reciprocal)),
        M::Vrsqrtph => packed(approximate!(reciprocal_root)),
        M::Vrsqrtsh => scalar(approximate!(reciprocal_root)),
        M::Vfmulcph => packed(complex),
        M::Vfmulcsh => scalar(complex),
        M::Vfcmulcph => with(complex, CONJUGATE),
        M::Vfcmulcsh => with(complex, CONJUGATE | SCALAR),
        M::Vfmaddcph => with(complex, ACCUMULATE),
        M::Vfmaddcsh => with(complex, ACCUMULATE | SCALAR),
        M::Vfcmaddcph => with(complex, ACCUMULATE | CONJUGATE),
        M::Vfcmaddcsh => with(complex, ACCUMULATE | CONJUGATE | SCALAR),
        M::Vcvtph2psx => packed(convert_lanes::<F16, F32>),
        M::Vcvtps2phx => packed(convert_lanes::<F32, F16>),
        M::Vcvtph2pd => packed(convert_lanes::<F16, F64>),
        M::Vcvtpd2ph => packed(convert_lanes::<F64, F16>),
        M::Vcvtsh2ss => scalar(convert_lanes::<F16, F32>),
        M::Vcvtss2sh => scalar(convert_lanes::<F32, F16>),
        M::Vcvtsh2sd => scalar(convert_lanes::<F16, F64>),
        M::Vcvtsd2sh => scalar(convert_lanes::<F64, F16>),
        M::Vcvtph2w => packed(to_integers::<F16, F16>),
        M::Vcvttph2w => with(to_integers::<F16, F16>, TRUNCATE),
        M::Vcvtph2uw => with(to_integers::<F16, F16>, UNSIGNED),
        M::Vcvttph2uw => with(to_integers::<F16, F16>, UNSIGNED | TRUNCATE),
        M::Vcvtph2dq => packed(to_integers::<F16, F32>),
        M::Vcvttph2dq => with(to_integers::<F16, F32>, TRUNCATE),
        M::Vcvtph2udq => with(to_integers::<F16, F32>, UNSIGNED),
        M::Vcvttph2udq => with(to_integers::<F16, F32>, UNSIGNED | TRUNCATE),
        M::Vcvtph2qq => packed(to_integers::<F16, F64>),
        M::Vcvttph2qq => with(to_integers::<F16, F64>, TRUNCATE),
        M::Vcvtph2uqq => with(to_integers::<F16, F64>, UNSIGNED),
        M::Vcvttph2uqq => with(to_integers::<F16, F64>, UNSIGNED | TRUNCATE),
        M::Vcvtw2ph => packed(from_integers::<F16, F16>),
        M::Vcvtuw2ph => with(from_integers::<F16, F16>, UNSIGNED),
        M::Vcvtdq2ph => packed(from_integers::<F32, F16>),
        M::Vcvtudq2ph => with(from_integers::<F32, F16>, UNSIGNED),
        M::Vcvtqq2ph => packed(from_integers::<F64, F16>),
        M::Vcvtuqq2ph => with(from_integers::<F64, F16>, UNSIGNED),
        M::Vcvtsh2si => packed(to_general::<F16>),
        M::Vcvttsh2si => with(to_general::<F16>, TRUNCATE),
        M::Vcvtsh2usi => with(to_general::<F16>, UNSIGNED),
        M::Vcvttsh2usi => with(to_general::<F16>, UNSIGNED | TRUNCATE),
        M::Vcvtsi2sh => packed(from_general::<F16>),
        M::Vcvtusi2sh => packed(from_general_unsigned::<F16>),
        M::Vmovsh => scalar(|i, _| move_word(i)),
        M::Vmovw => packed(|i, _| move_word(i)),
        _ => return None,
    })
}

#[cfg(test)]
#[path = "half_test.rs"]
mod tests;
