//! The tables of floating-point instructions that came with AVX-512. SDM Vol. 2C, each instruction's "Operation".

use std::cmp::Ordering;

use iced_x86::Mnemonic as M;

use super::approximate::{rcp14, rsqrt14};
use crate::fpu::portable::arith::{Element, PACKED, SCALAR, binary, each, predicate, signals, unary};
use crate::fpu::portable::float::{
    self, Environment, F32, F64, Rounding, compare, from_integer, from_unsigned, multiply_add, to_integer, to_unsigned,
};
use crate::fpu::portable::lanes::{Inputs, Vector};
use crate::fpu::portable::row::{Compute, Outcome, Row};
use crate::fpu::state::mxcsr;

/// How many lanes an instruction has, all of them or the lowest alone.
fn count<F: Element>(i: &Inputs) -> usize {
    if i.param & SCALAR != 0 { 1 } else { i.bytes / F::BYTES }
}

/// VCMPPS with an opmask for its destination.
pub(super) fn compare_mask<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let control = i.imm & 31;
    let mut bits = 0_u64;
    for k in (0..count::<F>(i)).filter(|&k| i.chosen(k)) {
        let order: Option<Ordering> = compare::<F>(F::get(i.a, k), F::get(i.b, k), signals(control), e);
        bits |= u64::from(predicate(control, order)) << k;
    }
    Outcome::value(Vector::from_u64(bits))
}

pub(super) fn classify<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let is = |k: usize| float::is_of_class::<F>(F::get(i.b, k), i.imm, e);
    let bits = (0..count::<F>(i)).fold(0, |bits, k| bits | u64::from(is(k)) << k);
    Outcome::value(Vector::from_u64(bits))
}

/// Bits of an immediate that say how to round: its own direction or MXCSR's, and whether PE is raised.
fn rounding(i: &Inputs, e: &Environment) -> (Rounding, bool) {
    let rounding = if i.imm & 4 != 0 {
        e.rounding
    } else {
        Rounding::from_bits(i.imm.into())
    };
    (rounding, i.imm & 8 != 0)
}

pub(super) fn round_lanes<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let (rounding, quiet) = rounding(i, e);
    unary::<F>(i, e, |b, e| float::round_scaled::<F>(b, i.imm >> 4, rounding, quiet, e))
}

pub(super) fn reduce_lanes<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let (rounding, quiet) = rounding(i, e);
    unary::<F>(i, e, |b, e| float::reduce::<F>(b, i.imm >> 4, rounding, quiet, e))
}

fn fix_lanes<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    each::<F>(i, |k| {
        // Of each lane of the table 32 bits count.
        let table = F::get(i.b, k) as u32;
        float::fixed::<F>(F::get(i.c, k), F::get(i.a, k), table, i.imm, e)
    })
}

/// A row's parameter: towards zero, and without a sign.
pub(super) const TRUNCATE: u8 = 1 << 1;
pub(super) const UNSIGNED: u8 = 1 << 2;

fn integer<F: Element>(i: &Inputs, a: u64, bits: u32, e: &mut Environment) -> u64 {
    let rounding = if i.param & TRUNCATE != 0 {
        Rounding::Zero
    } else {
        e.rounding
    };
    if i.param & UNSIGNED != 0 {
        to_unsigned::<F>(a, bits, rounding, e)
    } else {
        to_integer::<F>(a, bits, rounding, e)
    }
}

/// Lanes of `F` to integers as wide as those of `D`.
pub(super) fn to_integers<F: Element, D: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let mut out = Vector::ZERO;
    let count = i.bytes / F::BYTES.max(D::BYTES);
    for k in (0..count).filter(|&k| i.chosen(k)) {
        D::set(&mut out, k, integer::<F>(i, F::get(i.b, k), 8 * D::BYTES as u32, e));
    }
    Outcome::value(out)
}

/// A signed integer of so many bytes.
fn extended(value: u64, bytes: usize) -> i64 {
    let unused = 64 - 8 * bytes as u32;
    (value << unused) as i64 >> unused
}

/// The opposite.
pub(super) fn from_integers<S: Element, F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let mut out = Vector::ZERO;
    let count = i.bytes / F::BYTES.max(S::BYTES);
    for k in (0..count).filter(|&k| i.chosen(k)) {
        let value = S::get(i.b, k);
        let result = match i.param & UNSIGNED != 0 {
            true => from_unsigned::<F>(value, e),
            false => from_integer::<F>(extended(value, S::BYTES), e),
        };
        F::set(&mut out, k, result);
    }
    Outcome::value(out)
}

pub(super) fn to_general<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let bits = 8 * i.destination as u32;
    Outcome::value(Vector::from_u64(integer::<F>(i, F::get(i.b, 0), bits, e)))
}

pub(super) fn from_general_unsigned<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let mut out = *i.a;
    F::set(&mut out, 0, from_unsigned::<F>(i.b.get(0), e));
    Outcome::value(out)
}

/// VCVTNEPS2BF16.
fn to_bfloat16(i: &Inputs) -> Outcome {
    let mut out = Vector::ZERO;
    for k in 0..i.bytes / 4 {
        out.set(k, float::to_bfloat16(F32::get(i.b, k)) as u16);
    }
    Outcome::value(out)
}

/// VCVTNE2PS2BF16: the second source's lanes are the lower half.
fn two_to_bfloat16(i: &Inputs) -> Outcome {
    let half = i.bytes / 4;
    Outcome::value(Vector::from_lanes::<u16>(i.bytes, |k| {
        let a = if k < half {
            F32::get(i.b, k)
        } else {
            F32::get(i.a, k - half)
        };
        float::to_bfloat16(a) as u16
    }))
}

/// VDPBF16PS: the product of the upper halves, then that of the lower ones, each added with one rounding. MXCSR is neither consulted nor
/// updated; denormals are zeros.
fn dot_product(i: &Inputs) -> Outcome {
    let mut e = Environment::new(mxcsr::RESET | mxcsr::DAZ | mxcsr::FTZ);
    each::<F32>(i, |k| {
        let (a, b) = (F32::get(i.a, k), F32::get(i.b, k));
        let (upper, lower) = (|v: u64| v & 0xffff_0000, |v: u64| v << 16 & 0xffff_0000);
        let sum = multiply_add::<F32>([upper(a), upper(b), F32::get(i.c, k)], false, false, &mut e);
        multiply_add::<F32>([lower(a), lower(b), sum], false, false, &mut e)
    })
}

/// The row of a floating-point instruction whose VEX form, where there is one, does something else.
#[rustfmt::skip] // A table.
pub fn row(mnemonic: M) -> Option<Row> {
    let packed = |compute: Compute| Some(Row::new(compute).with(PACKED));
    let scalar = |compute: Compute| Some(Row::new(compute).with(SCALAR));
    let with = |compute: Compute, param: u8| Some(Row::new(compute).with(param));
    macro_rules! two {
        ($f:ident, $op:ident) => { |i, e| binary::<$f>(i, e, float::$op::<$f>) };
    }
    macro_rules! one {
        ($f:ident, $op:ident) => { |i, e| unary::<$f>(i, e, float::$op::<$f>) };
    }
    macro_rules! control {
        ($f:ident, two $op:ident) => { |i, e| binary::<$f>(i, e, |a, b, e| float::$op::<$f>(a, b, i.imm, e)) };
        ($f:ident, one $op:ident) => { |i, e| unary::<$f>(i, e, |b, e| float::$op::<$f>(b, i.imm, e)) };
    }
    macro_rules! approximate {
        ($f:ident, $op:ident) => { |i, e| unary::<$f>(i, e, |b, e| $op::<$f>(b, e)) };
    }
    match mnemonic {
        M::Vcmpps => packed(compare_mask::<F32>),
        M::Vcmppd => packed(compare_mask::<F64>),
        M::Vcmpss => scalar(compare_mask::<F32>),
        M::Vcmpsd => scalar(compare_mask::<F64>),
        M::Vfpclassps => packed(classify::<F32>),
        M::Vfpclasspd => packed(classify::<F64>),
        M::Vfpclassss => scalar(classify::<F32>),
        M::Vfpclasssd => scalar(classify::<F64>),
        M::Vrndscaleps => packed(round_lanes::<F32>),
        M::Vrndscalepd => packed(round_lanes::<F64>),
        M::Vrndscaless => scalar(round_lanes::<F32>),
        M::Vrndscalesd => scalar(round_lanes::<F64>),
        M::Vreduceps => packed(reduce_lanes::<F32>),
        M::Vreducepd => packed(reduce_lanes::<F64>),
        M::Vreducess => scalar(reduce_lanes::<F32>),
        M::Vreducesd => scalar(reduce_lanes::<F64>),
        M::Vfixupimmps => packed(fix_lanes::<F32>),
        M::Vfixupimmpd => packed(fix_lanes::<F64>),
        M::Vfixupimmss => scalar(fix_lanes::<F32>),
        M::Vfixupimmsd => scalar(fix_lanes::<F64>),
        M::Vscalefps => packed(two!(F32, scale)),
        M::Vscalefpd => packed(two!(F64, scale)),
        M::Vscalefss => scalar(two!(F32, scale)),
        M::Vscalefsd => scalar(two!(F64, scale)),
        M::Vgetexpps => packed(one!(F32, exponent)),
        M::Vgetexppd => packed(one!(F64, exponent)),
        M::Vgetexpss => scalar(one!(F32, exponent)),
        M::Vgetexpsd => scalar(one!(F64, exponent)),
        M::Vgetmantps => packed(control!(F32, one mantissa)),
        M::Vgetmantpd => packed(control!(F64, one mantissa)),
        M::Vgetmantss => scalar(control!(F32, one mantissa)),
        M::Vgetmantsd => scalar(control!(F64, one mantissa)),
        M::Vrangeps => packed(control!(F32, two range)),
        M::Vrangepd => packed(control!(F64, two range)),
        M::Vrangess => scalar(control!(F32, two range)),
        M::Vrangesd => scalar(control!(F64, two range)),
        M::Vrcp14ps => packed(approximate!(F32, rcp14)),
        M::Vrcp14pd => packed(approximate!(F64, rcp14)),
        M::Vrcp14ss => scalar(approximate!(F32, rcp14)),
        M::Vrcp14sd => scalar(approximate!(F64, rcp14)),
        M::Vrsqrt14ps => packed(approximate!(F32, rsqrt14)),
        M::Vrsqrt14pd => packed(approximate!(F64, rsqrt14)),
        M::Vrsqrt14ss => scalar(approximate!(F32, rsqrt14)),
        M::Vrsqrt14sd => scalar(approximate!(F64, rsqrt14)),
        M::Vcvtps2udq => with(to_integers::<F32, F32>, UNSIGNED),
        M::Vcvttps2udq => with(to_integers::<F32, F32>, UNSIGNED | TRUNCATE),
        M::Vcvtpd2udq => with(to_integers::<F64, F32>, UNSIGNED),
        M::Vcvttpd2udq => with(to_integers::<F64, F32>, UNSIGNED | TRUNCATE),
        M::Vcvtps2qq => with(to_integers::<F32, F64>, 0),
        M::Vcvttps2qq => with(to_integers::<F32, F64>, TRUNCATE),
        M::Vcvtps2uqq => with(to_integers::<F32, F64>, UNSIGNED),
        M::Vcvttps2uqq => with(to_integers::<F32, F64>, UNSIGNED | TRUNCATE),
        M::Vcvtpd2qq => with(to_integers::<F64, F64>, 0),
        M::Vcvttpd2qq => with(to_integers::<F64, F64>, TRUNCATE),
        M::Vcvtpd2uqq => with(to_integers::<F64, F64>, UNSIGNED),
        M::Vcvttpd2uqq => with(to_integers::<F64, F64>, UNSIGNED | TRUNCATE),
        M::Vcvtudq2ps => with(from_integers::<F32, F32>, UNSIGNED),
        M::Vcvtudq2pd => with(from_integers::<F32, F64>, UNSIGNED),
        M::Vcvtqq2ps => with(from_integers::<F64, F32>, 0),
        M::Vcvtqq2pd => with(from_integers::<F64, F64>, 0),
        M::Vcvtuqq2ps => with(from_integers::<F64, F32>, UNSIGNED),
        M::Vcvtuqq2pd => with(from_integers::<F64, F64>, UNSIGNED),
        M::Vcvtss2usi => with(to_general::<F32>, UNSIGNED),
        M::Vcvtsd2usi => with(to_general::<F64>, UNSIGNED),
        M::Vcvttss2usi => with(to_general::<F32>, UNSIGNED | TRUNCATE),
        M::Vcvttsd2usi => with(to_general::<F64>, UNSIGNED | TRUNCATE),
        M::Vcvtusi2ss => packed(from_general_unsigned::<F32>),
        M::Vcvtusi2sd => packed(from_general_unsigned::<F64>),
        M::Vcvtneps2bf16 => packed(|i, _| to_bfloat16(i)),
        M::Vcvtne2ps2bf16 => packed(|i, _| two_to_bfloat16(i)),
        M::Vdpbf16ps => packed(|i, _| dot_product(i)),
        _ => None,
    }
}
