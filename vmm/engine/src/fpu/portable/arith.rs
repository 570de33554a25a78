//! The tables of floating-point instructions.
//!
//! SDM Vol. 1 11.5 "SIMD Floating-Point Exceptions" and the pages of Vol. 2. All flags of all lanes are collected; what an unmasked
//! exception makes of them is [`super::finish`]'s.

use std::cmp::Ordering;

use iced_x86::Mnemonic as M;

use super::float::{
    self, Environment, F16, F32, F64, Float, Rounding, add, compare, convert, divide, extreme, from_integer, integral,
    multiply, multiply_add, root, subtract, to_integer,
};
use super::lanes::{Inputs, Lane, Vector};
use super::row::flag::{CF, PF, ZF};
use super::row::{Compute, Outcome, Row};

/// A format whose values are lanes.
pub trait Element: Float {
    /// What a lane holds.
    type Bits: Lane;
    /// Its length in bytes.
    const BYTES: usize;
    /// Lane `i`.
    fn get(v: &Vector, i: usize) -> u64;
    /// Replaces it.
    fn set(v: &mut Vector, i: usize, bits: u64);
}

macro_rules! element {
    ($($format:ident $bits:ty;)+) => { $(
        impl Element for $format {
            type Bits = $bits;
            const BYTES: usize = size_of::<$bits>();

            #[inline(always)]
            fn get(v: &Vector, i: usize) -> u64 {
                v.get::<$bits>(i).into()
            }

            #[inline(always)]
            fn set(v: &mut Vector, i: usize, bits: u64) {
                v.set(i, bits as $bits);
            }
        }
    )+ };
}

element! {
    F16 u16;
    F32 u32;
    F64 u64;
}

/// A row's parameter: all lanes, or the lowest alone, with the rest from `a`.
pub(super) const PACKED: u8 = 0;
pub(super) const SCALAR: u8 = 1;

/// How many lanes there are to compute, and what the result has besides.
pub(super) fn lanes<F: Element>(i: &Inputs) -> (usize, Vector) {
    if i.param & SCALAR != 0 {
        (1, *i.a)
    } else {
        (i.bytes / F::BYTES, Vector::ZERO)
    }
}

#[inline(always)]
pub(super) fn each<F: Element>(i: &Inputs, mut f: impl FnMut(usize) -> u64) -> Outcome {
    let (count, mut out) = lanes::<F>(i);
    for k in (0..count).filter(|&k| i.chosen(k)) {
        F::set(&mut out, k, f(k));
    }
    Outcome::value(out)
}

#[inline(always)]
pub(super) fn binary<F: Element>(
    i: &Inputs,
    e: &mut Environment,
    f: impl Fn(u64, u64, &mut Environment) -> u64,
) -> Outcome {
    each::<F>(i, |k| f(F::get(i.a, k), F::get(i.b, k), e))
}

#[inline(always)]
pub(super) fn unary<F: Element>(i: &Inputs, e: &mut Environment, f: impl Fn(u64, &mut Environment) -> u64) -> Outcome {
    each::<F>(i, |k| f(F::get(i.b, k), e))
}

/// The sixteen predicates of CMPPS, EQ to TRUE: bits for less, equal, greater and unordered, lowest first. SDM Vol. 2A table 3-1.
const PREDICATES: [u8; 16] = [
    0b0010, 0b0001, 0b0011, 0b1000, 0b1101, 0b1110, 0b1100, 0b0111, // EQ LT LE UNORD NEQ NLT NLE ORD
    0b1010, 0b1001, 0b1011, 0b0000, 0b0101, 0b0110, 0b0100, 0b1111, // EQ_UQ NGE NGT FALSE NEQ_OQ GE GT TRUE
];

pub(super) fn predicate(control: u8, order: Option<Ordering>) -> bool {
    let bit = match order {
        Some(Ordering::Less) => 0,
        Some(Ordering::Equal) => 1,
        Some(Ordering::Greater) => 2,
        None => 3,
    };
    PREDICATES[usize::from(control & 15)] >> bit & 1 != 0
}

/// Whether a predicate signals quiet NaNs: of each sixteen those of order do, with bit 4 the others.
pub(super) fn signals(control: u8) -> bool {
    matches!(control & 3, 1 | 2) != (control & 16 != 0)
}

fn compare_lanes<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let control = i.imm & 31;
    binary::<F>(i, e, |a, b, e| {
        let order = compare::<F>(a, b, signals(control), e);
        if predicate(control, order) { u64::MAX } else { 0 }
    })
}

/// COMISS and UCOMISS (`param` 1 where QNaNs signal). SDM Vol. 2A "COMISS".
pub(super) fn compare_flags<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let order = compare::<F>(F::get(i.a, 0), F::get(i.b, 0), i.param != 0, e);
    Outcome::flags(match order {
        None => ZF | PF | CF,
        Some(Ordering::Less) => CF,
        Some(Ordering::Equal) => ZF,
        Some(Ordering::Greater) => 0,
    })
}

/// Parameters of the horizontal forms: subtract, or in turn subtract and add.
const SUBTRACT: u8 = 1;

fn horizontal<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let mut out = Vector::ZERO;
    let part = 16 / F::BYTES;
    let f = if i.param == SUBTRACT { subtract::<F> } else { add::<F> };
    for at in (0..i.bytes / F::BYTES).step_by(part) {
        for k in 0..part {
            let from = if k < part / 2 { i.a } else { i.b };
            let pair = at + 2 * k % part;
            let result = f(F::get(from, pair), F::get(from, pair + 1), e);
            F::set(&mut out, at + k, result);
        }
    }
    Outcome::value(out)
}

fn add_and_subtract<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    each::<F>(i, |k| {
        let f = if k % 2 == 0 { subtract::<F> } else { add::<F> };
        f(F::get(i.a, k), F::get(i.b, k), e)
    })
}

/// DPPS and DPPD: products that the immediate's upper half chooses, summed two by two, into lanes that its lower half chooses. SDM
/// Vol. 2A "DPPS". Of several NaNs the order of the addends decides, which the manual leaves open: chosen as an Intel CPU (Cascade Lake)
/// has it, each lane beginning with one of its own pair.
fn dot_product<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let mut out = Vector::ZERO;
    let part = 16 / F::BYTES;
    for at in (0..i.bytes / F::BYTES).step_by(part) {
        let mut products = [0; 4];
        for (k, product) in products[..part].iter_mut().enumerate() {
            if i.imm >> (4 + k) & 1 != 0 {
                *product = multiply::<F>(F::get(i.a, at + k), F::get(i.b, at + k), e);
            }
        }
        let sums: [u64; 4] = if part == 4 {
            let pairs: [u64; 4] = std::array::from_fn(|k| add::<F>(products[k ^ 1], products[k], e));
            std::array::from_fn(|k| add::<F>(pairs[k], pairs[k ^ 2], e))
        } else {
            std::array::from_fn(|k| add::<F>(products[k], products[k ^ 1], e))
        };
        for k in (0..part).filter(|k| i.imm >> k & 1 != 0) {
            F::set(&mut out, at + k, sums[k]);
        }
    }
    Outcome::value(out)
}

/// ROUNDPS: the immediate has its own rounding unless bit 2 takes MXCSR's; bit 3 keeps PE from being raised.
fn round_lanes<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let rounding = if i.imm & 4 != 0 {
        e.rounding
    } else {
        Rounding::from_bits(i.imm.into())
    };
    unary::<F>(i, e, |b, e| integral::<F>(b, rounding, i.imm & 8 != 0, e))
}

/// Parameters of FMA: which of the three operands are factors, in the order of their mnemonics' digits, and what is negated.
mod fma {
    /// Two bits: 132, 213, 231.
    pub const ORDER_SHIFT: u8 = 1;
    /// The product is negated.
    pub const PRODUCT: u8 = 1 << 3;
    /// The addend is subtracted, in odd lanes.
    pub const ODD: u8 = 1 << 4;
    /// In even ones.
    pub const EVEN: u8 = 1 << 5;
}

fn fused<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    each::<F>(i, |k| {
        let [x, y, z] = [i.a, i.b, i.c].map(|v| F::get(v, k));
        let operands = match i.param >> fma::ORDER_SHIFT & 3 {
            0 => [x, z, y],
            1 => [y, x, z],
            _ => [y, z, x],
        };
        let subtracted = i.param & if k % 2 == 0 { fma::EVEN } else { fma::ODD } != 0;
        multiply_add::<F>(operands, i.param & fma::PRODUCT != 0, subtracted, e)
    })
}

/// VFMADD132PS and its like, by the parts of their names.
fn fma_row(mnemonic: M) -> Option<Row> {
    let name = format!("{mnemonic:?}").to_lowercase();
    let name = name.strip_prefix('v')?;
    let (product, name) = match name.strip_prefix("fn") {
        Some(rest) => (fma::PRODUCT, rest),
        None => (0, name.strip_prefix('f')?),
    };
    let (lanes, rest) = [
        ("maddsub", fma::EVEN),
        ("msubadd", fma::ODD),
        ("madd", 0),
        ("msub", fma::EVEN | fma::ODD),
    ]
    .into_iter()
    .find_map(|(verb, lanes)| Some((lanes, name.strip_prefix(verb)?)))?;
    let (digits, suffix) = rest.split_at_checked(3)?;
    let order = ["132", "213", "231"].iter().position(|&d| d == digits)? as u8;
    let (compute, kind): (Compute, u8) = match suffix {
        "ps" => (fused::<F32>, PACKED),
        "pd" => (fused::<F64>, PACKED),
        "ss" => (fused::<F32>, SCALAR),
        "sd" => (fused::<F64>, SCALAR),
        "ph" => (fused::<F16>, PACKED),
        "sh" => (fused::<F16>, SCALAR),
        _ => return None,
    };
    Some(Row::new(compute).with(kind | order << fma::ORDER_SHIFT | product | lanes))
}

/// The low 32 bits as a signed integer.
fn signed(v: &Vector, k: usize) -> i64 {
    i64::from(v.get::<i32>(k))
}

/// From 32-bit integers: as many as there are lanes; of CVTPI2PS two, into the lower half of `a`.
fn from_integers<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let (count, mut out) = if i.param == INTO_HALF {
        (2, *i.a)
    } else {
        (i.bytes / F::BYTES, Vector::ZERO)
    };
    for k in (0..count).filter(|&k| i.chosen(k)) {
        F::set(&mut out, k, from_integer::<F>(signed(i.b, k), e));
    }
    Outcome::value(out)
}

const INTO_HALF: u8 = 1;

/// To 32-bit integers, rounded as MXCSR says or (`param` 1) towards zero; what is left of the destination is zero.
fn to_integers<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let rounding = rounding(i, e);
    let mut out = Vector::ZERO;
    // CVTPS2PI's 64 bits take two.
    let count = if i.param & TO_MMX != 0 { 2 } else { i.bytes / F::BYTES };
    for k in (0..count).filter(|&k| i.chosen(k)) {
        out.set(k, to_integer::<F>(F::get(i.b, k), 32, rounding, e) as u32);
    }
    Outcome::value(out)
}

const TRUNCATE: u8 = 1;
const TO_MMX: u8 = 2;

fn rounding(i: &Inputs, e: &Environment) -> Rounding {
    if i.param & TRUNCATE != 0 {
        Rounding::Zero
    } else {
        e.rounding
    }
}

pub(super) fn from_general<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let value = if i.source == 8 {
        i.b.get::<i64>(0)
    } else {
        signed(i.b, 0)
    };
    let mut out = *i.a;
    F::set(&mut out, 0, from_integer::<F>(value, e));
    Outcome::value(out)
}

fn to_general<F: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let bits = 8 * i.destination as u32;
    Outcome::value(Vector::from_u64(to_integer::<F>(
        F::get(i.b, 0),
        bits,
        rounding(i, e),
        e,
    )))
}

pub(super) fn convert_lanes<S: Element, D: Element>(i: &Inputs, e: &mut Environment) -> Outcome {
    let (count, mut out) = if i.param & SCALAR != 0 {
        (1, *i.a)
    } else {
        (i.bytes / S::BYTES.max(D::BYTES), Vector::ZERO)
    };
    for k in (0..count).filter(|&k| i.chosen(k)) {
        D::set(&mut out, k, convert::<S, D>(S::get(i.b, k), e));
    }
    Outcome::value(out)
}

/// VCVTPH2PS: denormal operands are not flagged. SDM Vol. 2C.
fn from_half(i: &Inputs, e: &mut Environment) -> Outcome {
    let mut own = *e;
    let outcome = convert_lanes::<F16, F32>(i, &mut own);
    e.raised |= own.raised & float::IE;
    outcome
}

/// VCVTPS2PH: the immediate may have its own rounding. SDM Vol. 2C.
fn to_half(i: &Inputs, e: &mut Environment) -> Outcome {
    let rounding = if i.imm & 4 != 0 {
        e.rounding
    } else {
        Rounding::from_bits(i.imm.into())
    };
    let mut own = Environment { rounding, ..*e };
    let outcome = convert_lanes::<F32, F16>(i, &mut own);
    e.raised |= own.raised;
    outcome
}

/// The row of a floating-point instruction, by its legacy name where it has one.
#[rustfmt::skip] // A table.
pub fn row(mnemonic: M) -> Option<Row> {
    let packed = |compute: Compute| Row::new(compute);
    let scalar = |compute: Compute| Row::new(compute).with(SCALAR);
    let with = |compute: Compute, param: u8| Row::new(compute).with(param);
    macro_rules! of {
        ($shape:ident::<$f:ident>, $op:ident) => { |i, e| $shape::<$f>(i, e, $op::<$f>) };
    }
    macro_rules! extreme {
        ($f:ident, $least:literal) => { |i, e| binary::<$f>(i, e, |a, b, e| extreme::<$f>(a, b, $least, e)) };
    }
    Some(match mnemonic {
        M::Addps => packed(of!(binary::<F32>, add)),
        M::Addpd => packed(of!(binary::<F64>, add)),
        M::Addss => scalar(of!(binary::<F32>, add)),
        M::Addsd => scalar(of!(binary::<F64>, add)),
        M::Subps => packed(of!(binary::<F32>, subtract)),
        M::Subpd => packed(of!(binary::<F64>, subtract)),
        M::Subss => scalar(of!(binary::<F32>, subtract)),
        M::Subsd => scalar(of!(binary::<F64>, subtract)),
        M::Mulps => packed(of!(binary::<F32>, multiply)),
        M::Mulpd => packed(of!(binary::<F64>, multiply)),
        M::Mulss => scalar(of!(binary::<F32>, multiply)),
        M::Mulsd => scalar(of!(binary::<F64>, multiply)),
        M::Divps => packed(of!(binary::<F32>, divide)),
        M::Divpd => packed(of!(binary::<F64>, divide)),
        M::Divss => scalar(of!(binary::<F32>, divide)),
        M::Divsd => scalar(of!(binary::<F64>, divide)),
        M::Sqrtps => packed(of!(unary::<F32>, root)),
        M::Sqrtpd => packed(of!(unary::<F64>, root)),
        M::Sqrtss => scalar(of!(unary::<F32>, root)),
        M::Sqrtsd => scalar(of!(unary::<F64>, root)),
        M::Minps => packed(extreme!(F32, true)),
        M::Minpd => packed(extreme!(F64, true)),
        M::Minss => scalar(extreme!(F32, true)),
        M::Minsd => scalar(extreme!(F64, true)),
        M::Maxps => packed(extreme!(F32, false)),
        M::Maxpd => packed(extreme!(F64, false)),
        M::Maxss => scalar(extreme!(F32, false)),
        M::Maxsd => scalar(extreme!(F64, false)),
        M::Cmpps => packed(compare_lanes::<F32>),
        M::Cmppd => packed(compare_lanes::<F64>),
        M::Cmpss => scalar(compare_lanes::<F32>),
        M::Cmpsd => scalar(compare_lanes::<F64>),
        M::Comiss => with(compare_flags::<F32>, 1),
        M::Comisd => with(compare_flags::<F64>, 1),
        M::Ucomiss => packed(compare_flags::<F32>),
        M::Ucomisd => packed(compare_flags::<F64>),
        M::Haddps => packed(horizontal::<F32>),
        M::Haddpd => packed(horizontal::<F64>),
        M::Hsubps => with(horizontal::<F32>, SUBTRACT),
        M::Hsubpd => with(horizontal::<F64>, SUBTRACT),
        M::Addsubps => packed(add_and_subtract::<F32>),
        M::Addsubpd => packed(add_and_subtract::<F64>),
        M::Dpps => packed(dot_product::<F32>),
        M::Dppd => packed(dot_product::<F64>),
        M::Roundps => packed(round_lanes::<F32>),
        M::Roundpd => packed(round_lanes::<F64>),
        M::Roundss => scalar(round_lanes::<F32>),
        M::Roundsd => scalar(round_lanes::<F64>),
        M::Cvtdq2ps => packed(from_integers::<F32>),
        M::Cvtdq2pd => packed(from_integers::<F64>),
        M::Cvtpi2ps => with(from_integers::<F32>, INTO_HALF),
        M::Cvtpi2pd => packed(from_integers::<F64>),
        M::Cvtps2dq => packed(to_integers::<F32>),
        M::Cvtpd2dq => packed(to_integers::<F64>),
        M::Cvttps2dq => with(to_integers::<F32>, TRUNCATE),
        M::Cvttpd2dq => with(to_integers::<F64>, TRUNCATE),
        M::Cvtps2pi => with(to_integers::<F32>, TO_MMX),
        M::Cvtpd2pi => with(to_integers::<F64>, TO_MMX),
        M::Cvttps2pi => with(to_integers::<F32>, TO_MMX | TRUNCATE),
        M::Cvttpd2pi => with(to_integers::<F64>, TO_MMX | TRUNCATE),
        M::Cvtsi2ss => packed(from_general::<F32>),
        M::Cvtsi2sd => packed(from_general::<F64>),
        M::Cvtss2si => packed(to_general::<F32>),
        M::Cvtsd2si => packed(to_general::<F64>),
        M::Cvttss2si => with(to_general::<F32>, TRUNCATE),
        M::Cvttsd2si => with(to_general::<F64>, TRUNCATE),
        M::Cvtps2pd => packed(convert_lanes::<F32, F64>),
        M::Cvtpd2ps => packed(convert_lanes::<F64, F32>),
        M::Cvtss2sd => scalar(convert_lanes::<F32, F64>),
        M::Cvtsd2ss => scalar(convert_lanes::<F64, F32>),
        M::Vcvtph2ps => packed(from_half),
        M::Vcvtps2ph => packed(to_half),
        _ => return fma_row(mnemonic),
    })
}
