//! IEEE 754 binary floating point in integers, with the choices that the SDM makes where IEEE 754 leaves them open.
//!
//! # Theory
//! A finite operand is taken apart into sign, exponent and a significand of 64 bits whose top bit is set; an operation yields the
//! exact result, or one that is exact but for a last bit which says that there was more ("sticky"); [`pack`] rounds it once. 128 bits
//! are enough for every intermediate result: a product of two doubles has 106 bits, and a sum loses bits only where the two are so far
//! apart that no more than one leading bit cancels.
//!
//! # Why no crate
//! What is asked for is more than IEEE 754: tininess is detected after rounding as if the exponent had no bounds (SDM Vol. 1 4.9.1.5),
//! FTZ and DAZ, the NaN rules of table 4-7, flags that stay apart for each operand's class, half precision. `rustc_apfloat` has no square
//! root and takes a result for tiny once it is denormal after rounding; Berkeley's SoftFloat is C behind global state.
//!
//! # The quick way
//! Where the precision flag is set already and masked and rounding is to nearest, an operation on normal numbers and zeros whose result is
//! neither huge nor tiny can leave no trace but its result; then the language's own `f32` and `f64` compute it (SSE2's scalar
//! instructions, which every x86-64 host has). A fused operation is composed of them ([`fused`]).

use crate::fpu::state::mxcsr;

/// Invalid operation.
pub const IE: u32 = 1 << 0;
/// Denormal operand.
pub const DE: u32 = 1 << 1;
/// Zero divide.
pub const ZE: u32 = 1 << 2;
/// Overflow.
pub const OE: u32 = 1 << 3;
/// Underflow.
pub const UE: u32 = 1 << 4;
/// Precision.
pub const PE: u32 = 1 << 5;

/// Rounding as MXCSR.RC encodes it. SDM Vol. 1 table 4-8 "Rounding Modes and Encoding of Rounding Control (RC) Field".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest, ties to even.
    Nearest,
    /// Towards minus infinity.
    Down,
    /// Towards plus infinity.
    Up,
    /// Towards zero.
    Zero,
}

impl Rounding {
    /// From the two bits of an RC field.
    pub fn from_bits(bits: u32) -> Rounding {
        match bits & 3 {
            0 => Rounding::Nearest,
            1 => Rounding::Down,
            2 => Rounding::Up,
            _ => Rounding::Zero,
        }
    }
}

/// What an instruction takes from MXCSR, and the flags that it raises.
#[derive(Clone, Copy, Debug)]
pub struct Environment {
    /// How results are rounded.
    pub rounding: Rounding,
    /// Denormal operands are zeros.
    pub daz: bool,
    /// Tiny results become zeros.
    pub ftz: bool,
    /// Tiny results raise UE though they are exact, as underflow is unmasked: of half precision, which FTZ does not concern.
    pub every_tiny: bool,
    /// PE may be raised without anybody's noticing: it is set already and masked.
    pub inexact_known: bool,
    /// The precision exception is masked.
    pub inexact_masked: bool,
    /// The flags raised so far.
    pub raised: u32,
}

impl Environment {
    /// Under these controls. With underflow unmasked every tiny result counts: FTZ then has them all flagged, as in a thunk
    /// ([`crate::fpu::thunk`]), and the result is not stored.
    pub fn new(controls: u32) -> Environment {
        let inexact_masked = controls & (PE << 7) != 0;
        Environment {
            rounding: Rounding::from_bits(controls >> 13),
            daz: controls & mxcsr::DAZ != 0,
            ftz: controls & mxcsr::FTZ != 0 || controls & mxcsr::UM == 0,
            every_tiny: controls & mxcsr::UM == 0,
            inexact_known: inexact_masked && controls & PE != 0,
            inexact_masked,
            raised: 0,
        }
    }

    /// The same, of an instruction that has no underflow exception, or under embedded rounding or SAE, which mask all exceptions.
    pub fn without_underflow(controls: u32) -> Environment {
        Environment::new(controls | mxcsr::UM)
    }

    /// Whether denormal operands of a format are zeros.
    fn daz<F: Float>(&self) -> bool {
        self.daz && F::FLUSHED
    }

    /// Whether tiny results of a format become zeros.
    pub fn ftz<F: Float>(&self) -> bool {
        self.ftz && F::FLUSHED
    }

    fn raise(&mut self, flags: u32) {
        self.raised |= flags;
    }

    /// Whether the quick way may be taken.
    fn quick(&self) -> bool {
        self.rounding == Rounding::Nearest && (self.inexact_known || self.inexact_masked && self.raised & PE != 0)
    }
}

/// A format: how many of its bits are the fraction.
pub trait Float: Copy {
    /// All bits.
    const BITS: u32;
    /// Bits of the fraction, without the leading one.
    const FRACTION: u32;
    /// The exponent's bias.
    const BIAS: i32 = (1 << (Self::BITS - Self::FRACTION - 2)) - 1;
    /// The exponent of infinities and NaNs.
    const TOP: u64 = (1 << (Self::BITS - Self::FRACTION - 1)) - 1;
    /// The sign.
    const SIGN: u64 = 1 << (Self::BITS - 1);
    /// The fraction's bits.
    const MASK: u64 = (1 << Self::FRACTION) - 1;
    /// The bit of a quiet NaN.
    const QUIET: u64 = 1 << (Self::FRACTION - 1);
    /// Plus infinity.
    const INFINITY: u64 = Self::TOP << Self::FRACTION;
    /// The QNaN floating-point indefinite. SDM Vol. 1 table 4-3.
    const INDEFINITE: u64 = Self::SIGN | Self::INFINITY | Self::QUIET;
    /// DAZ concerns operands of this format, and FTZ results.
    const FLUSHED: bool = true;

    /// The operation by the host's own scalar arithmetic, to nearest; of formats that the language has.
    fn quick(_op: Quick, _a: u64, _b: u64) -> Option<u64> {
        None
    }

    /// `a * b + c` by it.
    fn quick_fused(_operands: [u64; 3]) -> Option<u64> {
        None
    }
}

/// What the quick way can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quick {
    Add,
    Subtract,
    Multiply,
    Divide,
    Root,
}

/// Half precision.
#[derive(Clone, Copy, Debug)]
pub struct F16;
/// Single precision.
#[derive(Clone, Copy, Debug)]
pub struct F32;
/// Double precision.
#[derive(Clone, Copy, Debug)]
pub struct F64;

/// SDM Vol. 2C "VCVTPS2PHX", "VCVTPH2PD": denormals of half precision are operands and results like others, whatever MXCSR says.
impl Float for F16 {
    const BITS: u32 = 16;
    const FRACTION: u32 = 10;
    const FLUSHED: bool = false;
}

macro_rules! native {
    ($format:ident, $native:ty, $bits:ty, $all:literal, $fraction:literal, $fused:ident, $least:literal) => {
        impl $format {
            /// The least exponent that a factor or addend may have on the quick way, biased; the greatest is as far from the top.
            const FUSED: u64 = $least;
        }

        impl Float for $format {
            const BITS: u32 = $all;
            const FRACTION: u32 = $fraction;

            #[inline(always)]
            fn quick(op: Quick, a: u64, b: u64) -> Option<u64> {
                // Neither denormal, infinite nor NaN, and a result that is none of these nor near them.
                let (zero_a, zero_b) = (zero::<Self>(a), zero::<Self>(b));
                if !(plain::<Self>(a, 1) || zero_a) || !(plain::<Self>(b, 1) || zero_b) {
                    return None;
                }
                let (x, y) = (<$native>::from_bits(a as $bits), <$native>::from_bits(b as $bits));
                // With a result of zero: whether that is exact.
                let (result, exact) = match op {
                    Quick::Add => (x + y, true),
                    Quick::Subtract => (x - y, true),
                    Quick::Multiply => (x * y, zero_a || zero_b),
                    Quick::Divide if zero_b => return None,
                    Quick::Divide => (x / y, zero_a),
                    Quick::Root if a & Self::SIGN != 0 => return None,
                    Quick::Root => (x.sqrt(), true),
                };
                let result = u64::from(result.to_bits());
                (plain::<Self>(result, 2) || exact && zero::<Self>(result)).then_some(result)
            }

            #[inline(always)]
            fn quick_fused([a, b, c]: [u64; 3]) -> Option<u64> {
                let near = |v: u64| plain::<Self>(v, Self::FUSED) && !plain::<Self>(v, Self::TOP - Self::FUSED);
                if !near(a) || !near(b) || !near(c) && !zero::<Self>(c) {
                    return None;
                }
                let value = |bits: u64| <$native>::from_bits(bits as $bits);
                let result = fused::$fused(value(a), value(b), value(c));
                // Of tiny results the wider format may have had more bits; zero is what two that cancel each other leave.
                let result = u64::from(result?.to_bits());
                (plain::<Self>(result, 2) || result == 0).then_some(result)
            }
        }
    };
}

// A product of singles, and its sum with another, is well inside what doubles have. Doubles within 2^-400 to 2^400 leave room for the
// lowest bit of a product and for what [`fused`] multiplies them with.
native!(F32, f32, u32, 32, 23, single, 1);
native!(F64, f64, u64, 64, 52, double, 623);

/// An exponent from `least` up, and below that of infinities.
#[inline(always)]
fn plain<F: Float>(bits: u64, least: u64) -> bool {
    (bits >> F::FRACTION & F::TOP).wrapping_sub(least) < F::TOP - least
}

#[inline(always)]
fn zero<F: Float>(bits: u64) -> bool {
    bits & !F::SIGN == 0
}

/// Fused multiply-add composed of additions and multiplications: S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded sums:
/// proved algorithms using rounding to odd", IEEE Transactions on Computers 57 (2008), section 5.
mod fused {
    /// `a + b` rounded, and what that leaves out.
    #[inline(always)]
    fn two_sum(a: f64, b: f64) -> (f64, f64) {
        let sum = a + b;
        let of_b = sum - a;
        (sum, (a - (sum - of_b)) + (b - of_b))
    }

    /// `a * b` rounded, and what that leaves out (T. J. Dekker, 1971).
    #[inline(always)]
    fn two_product(a: f64, b: f64) -> (f64, f64) {
        // 26 bits of each, and the rest.
        let split = |x: f64| {
            let large = x * 134_217_729.0;
            let high = large - (large - x);
            (high, x - high)
        };
        let product = a * b;
        let ((a_high, a_low), (b_high, b_low)) = (split(a), split(b));
        let left = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low;
        (product, left)
    }

    /// `a + b`; where that is inexact, the one of its two neighbours whose last bit is set.
    #[inline(always)]
    fn sum_to_odd(a: f64, b: f64) -> f64 {
        let (sum, left) = two_sum(a, b);
        let bits = sum.to_bits();
        if left == 0.0 || bits & 1 != 0 {
            return sum;
        }
        let outwards = (left < 0.0) == (sum < 0.0);
        f64::from_bits(if outwards { bits + 1 } else { bits - 1 })
    }

    /// Of doubles: no intermediate result is huge or tiny.
    #[inline(always)]
    pub fn double(a: f64, b: f64, c: f64) -> Option<f64> {
        let (product, product_low) = two_product(a, b);
        let (low, low_left) = two_sum(c, product_low);
        let (high, high_left) = two_sum(product, low);
        Some(high + sum_to_odd(low_left, high_left))
    }

    /// Of singles: a double has the whole product, and the sum with enough bits to be rounded again.
    #[inline(always)]
    pub fn single(a: f32, b: f32, c: f32) -> Option<f32> {
        let sum = sum_to_odd(f64::from(a) * f64::from(b), c.into());
        let result = sum as f32;
        // What is zero only as a single has underflowed.
        (result != 0.0 || sum == 0.0).then_some(result)
    }
}

/// A value that is no NaN, taken apart.
#[derive(Clone, Copy, Debug)]
struct Number {
    negative: bool,
    kind: Kind,
    /// The value is `significand / 2^63 * 2^exponent`.
    exponent: i32,
    /// Of finite values other than zero: its top bit is set.
    significand: u64,
    /// It is a denormal number, and DAZ is clear.
    denormal: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Zero,
    Finite,
    Infinity,
}

/// A value taken apart, for whoever computes with its significand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// A NaN.
    Nan,
    /// An infinity.
    Infinity,
    /// Zero, or under DAZ a denormal.
    Zero,
    /// `significand / 2^63 * 2^exponent`, the significand's top bit set.
    Finite { exponent: i32, significand: u64 },
}

/// Takes a value apart.
pub fn parts<F: Float>(bits: u64, e: &Environment) -> Parts {
    if is_nan::<F>(bits) {
        return Parts::Nan;
    }
    let x = number::<F>(bits, e);
    match x.kind {
        Kind::Zero => Parts::Zero,
        Kind::Infinity => Parts::Infinity,
        Kind::Finite => Parts::Finite {
            exponent: x.exponent,
            significand: x.significand,
        },
    }
}

fn is_nan<F: Float>(bits: u64) -> bool {
    bits & !F::SIGN > F::INFINITY
}

fn is_signaling<F: Float>(bits: u64) -> bool {
    is_nan::<F>(bits) && bits & F::QUIET == 0
}

/// Takes apart what is no NaN.
fn number<F: Float>(bits: u64, e: &Environment) -> Number {
    let negative = bits & F::SIGN != 0;
    let (exponent, fraction) = (bits >> F::FRACTION & F::TOP, bits & F::MASK);
    let of = |kind, exponent, significand, denormal| Number {
        negative,
        kind,
        exponent,
        significand,
        denormal,
    };
    if exponent == F::TOP {
        return of(Kind::Infinity, 0, 0, false);
    }
    if exponent == 0 {
        if fraction == 0 || e.daz::<F>() {
            return of(Kind::Zero, 0, 0, false);
        }
        let shift = fraction.leading_zeros();
        // The fraction's top bit would have the weight of the least exponent's half.
        let exponent = 1 - F::BIAS - (shift as i32 - (63 - F::FRACTION as i32));
        return of(Kind::Finite, exponent, fraction << shift, true);
    }
    let significand = (fraction | 1 << F::FRACTION) << (63 - F::FRACTION);
    of(Kind::Finite, exponent as i32 - F::BIAS, significand, false)
}

/// The result where an operand is a NaN: the first that is, made quiet; IE where any of them signals. SDM Vol. 1 table 4-7 "Rules for
/// Handling NaNs", of SSE instructions.
fn nan<F: Float>(operands: &[u64], e: &mut Environment) -> Option<u64> {
    let first = operands.iter().copied().find(|&bits| is_nan::<F>(bits))?;
    if operands.iter().any(|&bits| is_signaling::<F>(bits)) {
        e.raise(IE);
    }
    Some(first | F::QUIET)
}

fn invalid<F: Float>(e: &mut Environment) -> u64 {
    e.raise(IE);
    F::INDEFINITE
}

fn sign<F: Float>(negative: bool) -> u64 {
    if negative { F::SIGN } else { 0 }
}

/// Shifts right; what is lost is kept as the last bit.
fn jam(value: u128, by: u32) -> u128 {
    match by {
        0 => value,
        1..128 => value >> by | u128::from(value << (128 - by) != 0),
        _ => u128::from(value != 0),
    }
}

/// Rounds away the lowest `drop` bits (1 to 63): what is left, and whether it is inexact.
fn round(significand: u64, drop: u32, negative: bool, rounding: Rounding) -> (u64, bool) {
    let (kept, rest) = (significand >> drop, significand & ((1 << drop) - 1));
    let half = 1 << (drop - 1);
    let up = match rounding {
        Rounding::Nearest => rest > half || rest == half && kept & 1 != 0,
        Rounding::Down => negative && rest != 0,
        Rounding::Up => !negative && rest != 0,
        Rounding::Zero => false,
    };
    (kept + u64::from(up), rest != 0)
}

/// Rounds `significand / 2^63 * 2^exponent`, whose top bit is set and whose last may be sticky. SDM Vol. 1 4.9.1.4 to 4.9.1.6, and 10.2.3.3
/// "Flush-To-Zero".
fn pack<F: Float>(negative: bool, exponent: i32, significand: u64, e: &mut Environment) -> u64 {
    let drop = 63 - F::FRACTION;
    let (rounded, inexact) = round(significand, drop, negative, e.rounding);
    let carry = (rounded >> (F::FRACTION + 1)) as i32;
    let biased = exponent + carry + F::BIAS;
    if biased >= F::TOP as i32 {
        e.raise(OE | PE);
        let infinite = match e.rounding {
            Rounding::Nearest => true,
            Rounding::Down => negative,
            Rounding::Up => !negative,
            Rounding::Zero => false,
        };
        return sign::<F>(negative) | if infinite { F::INFINITY } else { F::INFINITY - 1 };
    }
    // Tiny is what would be below the least normal number with an exponent without bounds.
    if biased <= 0 {
        if e.ftz::<F>() {
            e.raise(UE | PE);
            return sign::<F>(negative);
        }
        let by = (1 - F::BIAS - exponent) as u32;
        let shifted = jam(u128::from(significand), by) as u64;
        let (rounded, inexact) = round(shifted, drop, negative, e.rounding);
        if inexact {
            e.raise(UE | PE);
        } else if e.every_tiny {
            e.raise(UE);
        }
        return sign::<F>(negative) | rounded;
    }
    if inexact {
        e.raise(PE);
    }
    // A carry leaves zeros below the leading one.
    sign::<F>(negative) | (biased as u64) << F::FRACTION | if carry != 0 { 0 } else { rounded & F::MASK }
}

/// `pack` of `significand / 2^127 * 2^exponent`, which is not zero.
fn normalize<F: Float>(negative: bool, exponent: i32, significand: u128, e: &mut Environment) -> u64 {
    let shift = significand.leading_zeros();
    let significand = jam(significand << shift, 64) as u64;
    pack::<F>(negative, exponent - shift as i32, significand, e)
}

/// The sum of two finite numbers that are not zero, given as [`normalize`] takes them, with a bit to spare at the top.
fn sum<F: Float>(
    (negative, exponent, significand): (bool, i32, u128),
    (other_negative, other_exponent, other): (bool, i32, u128),
    e: &mut Environment,
) -> u64 {
    let distance = exponent - other_exponent;
    let (exponent, x, y) = if distance >= 0 {
        (exponent, significand, jam(other, distance.unsigned_abs()))
    } else {
        (other_exponent, jam(significand, distance.unsigned_abs()), other)
    };
    if negative == other_negative {
        return normalize::<F>(negative, exponent, x + y, e);
    }
    match x.cmp(&y) {
        std::cmp::Ordering::Equal => sign::<F>(e.rounding == Rounding::Down),
        std::cmp::Ordering::Greater => normalize::<F>(negative, exponent, x - y, e),
        std::cmp::Ordering::Less => normalize::<F>(other_negative, exponent, y - x, e),
    }
}

/// A zero, of two that are added.
fn zero_sum<F: Float>(a: bool, b: bool, e: &Environment) -> u64 {
    sign::<F>(if a == b { a } else { e.rounding == Rounding::Down })
}

/// `a + b`.
#[inline]
pub fn add<F: Float>(a: u64, b: u64, e: &mut Environment) -> u64 {
    if e.quick()
        && let Some(result) = F::quick(Quick::Add, a, b)
    {
        return result;
    }
    add_exactly::<F>(a, b, false, e)
}

/// `a - b`.
#[inline]
pub fn subtract<F: Float>(a: u64, b: u64, e: &mut Environment) -> u64 {
    if e.quick()
        && let Some(result) = F::quick(Quick::Subtract, a, b)
    {
        return result;
    }
    add_exactly::<F>(a, b, true, e)
}

fn add_exactly<F: Float>(a: u64, b: u64, negate: bool, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<F>(&[a, b], e) {
        return nan;
    }
    let (x, mut y) = (number::<F>(a, e), number::<F>(b, e));
    y.negative ^= negate;
    if x.kind == Kind::Infinity && y.kind == Kind::Infinity && x.negative != y.negative {
        return invalid::<F>(e);
    }
    denormals(&[x, y], e);
    match (x.kind, y.kind) {
        (Kind::Infinity, _) => sign::<F>(x.negative) | F::INFINITY,
        (_, Kind::Infinity) => sign::<F>(y.negative) | F::INFINITY,
        (Kind::Zero, Kind::Zero) => zero_sum::<F>(x.negative, y.negative, e),
        // What is denormal may have to be flushed.
        (Kind::Zero, _) => pack::<F>(y.negative, y.exponent, y.significand, e),
        (_, Kind::Zero) => pack::<F>(x.negative, x.exponent, x.significand, e),
        _ => {
            let part = |n: Number| (n.negative, n.exponent + 1, u128::from(n.significand) << 63);
            sum::<F>(part(x), part(y), e)
        }
    }
}

fn denormals(operands: &[Number], e: &mut Environment) {
    if operands.iter().any(|n| n.denormal) {
        e.raise(DE);
    }
}

/// `a * b`.
#[inline]
pub fn multiply<F: Float>(a: u64, b: u64, e: &mut Environment) -> u64 {
    if e.quick()
        && let Some(result) = F::quick(Quick::Multiply, a, b)
    {
        return result;
    }
    multiply_exactly::<F>(a, b, e)
}

fn multiply_exactly<F: Float>(a: u64, b: u64, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<F>(&[a, b], e) {
        return nan;
    }
    let (x, y) = (number::<F>(a, e), number::<F>(b, e));
    let negative = x.negative != y.negative;
    match (x.kind, y.kind) {
        (Kind::Infinity, Kind::Zero) | (Kind::Zero, Kind::Infinity) => return invalid::<F>(e),
        _ => denormals(&[x, y], e),
    }
    match (x.kind, y.kind) {
        (Kind::Infinity, _) | (_, Kind::Infinity) => sign::<F>(negative) | F::INFINITY,
        (Kind::Zero, _) | (_, Kind::Zero) => sign::<F>(negative),
        _ => {
            let product = u128::from(x.significand) * u128::from(y.significand);
            normalize::<F>(negative, x.exponent + y.exponent + 1, product, e)
        }
    }
}

/// `a / b`.
#[inline]
pub fn divide<F: Float>(a: u64, b: u64, e: &mut Environment) -> u64 {
    if e.quick()
        && let Some(result) = F::quick(Quick::Divide, a, b)
    {
        return result;
    }
    divide_exactly::<F>(a, b, e)
}

fn divide_exactly<F: Float>(a: u64, b: u64, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<F>(&[a, b], e) {
        return nan;
    }
    let (x, y) = (number::<F>(a, e), number::<F>(b, e));
    let negative = x.negative != y.negative;
    match (x.kind, y.kind) {
        (Kind::Infinity, Kind::Infinity) | (Kind::Zero, Kind::Zero) => return invalid::<F>(e),
        (Kind::Finite, Kind::Zero) => {
            // A zero divide comes before a denormal operand (SDM Vol. 1 4.9.2).
            e.raise(ZE);
            return sign::<F>(negative) | F::INFINITY;
        }
        _ => denormals(&[x, y], e),
    }
    match (x.kind, y.kind) {
        (Kind::Infinity, _) => sign::<F>(negative) | F::INFINITY,
        (Kind::Zero, _) | (_, Kind::Infinity) => sign::<F>(negative),
        _ => {
            // The quotient lies between 2^63 and 2^65, exclusively: in 128 bits, with its last one sticky.
            let (dividend, divisor) = (u128::from(x.significand) << 64, u128::from(y.significand));
            let (quotient, rest) = (dividend / divisor, dividend % divisor);
            let quotient = quotient << 1 | u128::from(rest != 0);
            normalize::<F>(negative, x.exponent - y.exponent + 62, quotient, e)
        }
    }
}

/// The square root.
#[inline]
pub fn root<F: Float>(a: u64, e: &mut Environment) -> u64 {
    if e.quick()
        && let Some(result) = F::quick(Quick::Root, a, a)
    {
        return result;
    }
    if let Some(nan) = nan::<F>(&[a], e) {
        return nan;
    }
    let x = number::<F>(a, e);
    match x.kind {
        Kind::Zero => return sign::<F>(x.negative),
        _ if x.negative => return invalid::<F>(e),
        Kind::Infinity => return a,
        Kind::Finite => denormals(&[x], e),
    }
    // With an even exponent and a radicand of 127 or 128 bits the root has 64.
    let odd = x.exponent & 1;
    let radicand = u128::from(x.significand) << (63 + odd);
    let whole = radicand.isqrt();
    let significand = whole << 1 | u128::from(whole * whole != radicand);
    normalize::<F>(false, (x.exponent - odd) / 2 + 63, significand, e)
}

/// `a * b + c`, rounded once, with the product or the addend negated. SDM Vol. 1 14.5.1 "FMA Instruction Operand Order and Arithmetic
/// Behavior".
#[inline]
pub fn multiply_add<F: Float>([a, b, c]: [u64; 3], product: bool, addend: bool, e: &mut Environment) -> u64 {
    if e.quick()
        && let Some(result) = F::quick_fused([a ^ sign::<F>(product), b, c ^ sign::<F>(addend)])
    {
        return result;
    }
    multiply_add_exactly::<F>([a, b, c], product, addend, e)
}

fn multiply_add_exactly<F: Float>([a, b, c]: [u64; 3], product: bool, addend: bool, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<F>(&[a, b, c], e) {
        return nan;
    }
    let (x, y, mut z) = (number::<F>(a, e), number::<F>(b, e), number::<F>(c, e));
    let negative = x.negative ^ y.negative ^ product;
    z.negative ^= addend;
    let infinite = x.kind == Kind::Infinity || y.kind == Kind::Infinity;
    let zero = x.kind == Kind::Zero || y.kind == Kind::Zero;
    if infinite && (zero || z.kind == Kind::Infinity && z.negative != negative) {
        return invalid::<F>(e);
    }
    denormals(&[x, y, z], e);
    match (infinite, zero, z.kind) {
        (true, ..) => sign::<F>(negative) | F::INFINITY,
        (_, _, Kind::Infinity) => sign::<F>(z.negative) | F::INFINITY,
        (_, true, Kind::Zero) => zero_sum::<F>(negative, z.negative, e),
        (_, true, _) => pack::<F>(z.negative, z.exponent, z.significand, e),
        (_, _, kind) => {
            let exact = u128::from(x.significand) * u128::from(y.significand);
            let exponent = x.exponent + y.exponent + 1;
            if kind == Kind::Zero {
                return normalize::<F>(negative, exponent, exact, e);
            }
            // The product has 106 bits of a double's, below its top 22 are zeros: one of them makes room.
            let shift = exact.leading_zeros();
            let product = (negative, exponent - shift as i32 + 1, exact << shift >> 1);
            sum::<F>(
                product,
                (z.negative, z.exponent + 1, u128::from(z.significand) << 63),
                e,
            )
        }
    }
}

/// How two numbers compare; `None`: unordered.
pub fn order<F: Float>(a: u64, b: u64, e: &Environment) -> Option<std::cmp::Ordering> {
    if is_nan::<F>(a) || is_nan::<F>(b) {
        return None;
    }
    let key = |bits: u64| {
        let tiny = bits & F::INFINITY == 0 && (bits & F::MASK == 0 || e.daz::<F>());
        let magnitude = if tiny { 0 } else { (bits & !F::SIGN) as i64 };
        if bits & F::SIGN != 0 { -magnitude } else { magnitude }
    };
    Some(key(a).cmp(&key(b)))
}

/// A comparison's flags: IE of a signaling NaN, or of any where `signals`; DE of denormals, where no operand is a NaN.
pub fn compare<F: Float>(a: u64, b: u64, signals: bool, e: &mut Environment) -> Option<std::cmp::Ordering> {
    let order = order::<F>(a, b, e);
    if order.is_none() {
        if signals || is_signaling::<F>(a) || is_signaling::<F>(b) {
            e.raise(IE);
        }
    } else {
        denormals(&[number::<F>(a, e), number::<F>(b, e)], e);
    }
    order
}

/// MINSD's result (`least`) or MAXSD's: the second operand where they are equal or one is a NaN. SDM Vol. 2A "MAXSD".
pub fn extreme<F: Float>(a: u64, b: u64, least: bool, e: &mut Environment) -> u64 {
    use std::cmp::Ordering::{Greater, Less};
    let first = match compare::<F>(a, b, true, e) {
        Some(Less) => least,
        Some(Greater) => !least,
        _ => false,
    };
    flushed::<F>(if first { a } else { b }, e)
}

/// An operand as DAZ has it.
fn flushed<F: Float>(bits: u64, e: &Environment) -> u64 {
    if e.daz::<F>() && bits & F::INFINITY == 0 {
        bits & F::SIGN
    } else {
        bits
    }
}

/// The integral value nearest in a direction, in the same format; `quiet`: inexact results are not flagged. SDM Vol. 2B "ROUNDPD".
pub fn integral<F: Float>(a: u64, rounding: Rounding, quiet: bool, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<F>(&[a], e) {
        return nan;
    }
    let x = number::<F>(a, e);
    if x.kind == Kind::Zero {
        return sign::<F>(x.negative);
    }
    if x.kind == Kind::Infinity || x.exponent >= F::FRACTION as i32 {
        return a;
    }
    let (whole, inexact) = whole(x, rounding);
    if inexact && !quiet {
        e.raise(PE);
    }
    if whole == 0 {
        return sign::<F>(x.negative);
    }
    // An integer of no more bits than the significand has: exact.
    let shift = whole.leading_zeros();
    let mut exactly = *e;
    pack::<F>(x.negative, 63 - shift as i32, whole << shift, &mut exactly)
}

/// The magnitude of a finite number below 2^63 in integers, and whether it is inexact.
fn whole(x: Number, rounding: Rounding) -> (u64, bool) {
    if x.exponent >= 63 {
        return (x.significand, false);
    }
    let fixed = jam(u128::from(x.significand) << 64, (63 - x.exponent) as u32);
    let (kept, rest) = ((fixed >> 64) as u64, fixed as u64);
    let half = 1 << 63;
    let up = match rounding {
        Rounding::Nearest => rest > half || rest == half && kept & 1 != 0,
        Rounding::Down => x.negative && rest != 0,
        Rounding::Up => !x.negative && rest != 0,
        Rounding::Zero => false,
    };
    (kept + u64::from(up), rest != 0)
}

/// The integer that a number is rounded to: whether it is negative, its magnitude, and whether that is inexact. `None`: a NaN, an
/// infinity, or more than 64 bits hold.
fn rounded<F: Float>(a: u64, rounding: Rounding, e: &mut Environment) -> Option<(bool, u64, bool)> {
    if is_nan::<F>(a) {
        return None;
    }
    let x = number::<F>(a, e);
    match x.kind {
        Kind::Zero => Some((x.negative, 0, false)),
        Kind::Infinity => None,
        Kind::Finite if x.exponent > 63 => None,
        Kind::Finite => {
            let (magnitude, inexact) = whole(x, rounding);
            Some((x.negative, magnitude, inexact))
        }
    }
}

/// A signed integer of `bits` (16, 32 or 64), or the integer indefinite. SDM Vol. 1 4.8.3.7 and table 11-1.
pub fn to_integer<F: Float>(a: u64, bits: u32, rounding: Rounding, e: &mut Environment) -> u64 {
    let indefinite = 1 << (bits - 1);
    let Some((negative, magnitude, inexact)) = rounded::<F>(a, rounding, e) else {
        e.raise(IE);
        return indefinite;
    };
    if magnitude > indefinite - u64::from(!negative) {
        e.raise(IE);
        return indefinite;
    }
    if inexact {
        e.raise(PE);
    }
    let value = if negative { magnitude.wrapping_neg() } else { magnitude };
    value & u64::MAX >> (64 - bits)
}

/// From a signed integer.
pub fn from_integer<F: Float>(value: i64, e: &mut Environment) -> u64 {
    if value == 0 {
        return 0;
    }
    let magnitude = value.unsigned_abs();
    let shift = magnitude.leading_zeros();
    pack::<F>(value < 0, 63 - shift as i32, magnitude << shift, e)
}

/// From one format to another. A NaN keeps the upper bits of its payload, and becomes quiet.
pub fn convert<S: Float, D: Float>(a: u64, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<S>(&[a], e) {
        let payload = (nan & S::MASK) << (63 - S::FRACTION) >> (63 - D::FRACTION);
        return sign::<D>(nan & S::SIGN != 0) | D::INFINITY | payload;
    }
    let x = number::<S>(a, e);
    match x.kind {
        Kind::Infinity => sign::<D>(x.negative) | D::INFINITY,
        Kind::Zero => sign::<D>(x.negative),
        Kind::Finite => {
            denormals(&[x], e);
            pack::<D>(x.negative, x.exponent, x.significand, e)
        }
    }
}

/// An unsigned integer of `bits` (16, 32 or 64), or all ones where there is none. SDM Vol. 2C "VCVTPS2UDQ".
pub fn to_unsigned<F: Float>(a: u64, bits: u32, rounding: Rounding, e: &mut Environment) -> u64 {
    let indefinite = u64::MAX >> (64 - bits);
    let Some((negative, magnitude, inexact)) = rounded::<F>(a, rounding, e) else {
        e.raise(IE);
        return indefinite;
    };
    if magnitude > indefinite || negative && magnitude != 0 {
        e.raise(IE);
        return indefinite;
    }
    if inexact {
        e.raise(PE);
    }
    magnitude
}

/// From an unsigned integer.
pub fn from_unsigned<F: Float>(value: u64, e: &mut Environment) -> u64 {
    if value == 0 {
        return 0;
    }
    let shift = value.leading_zeros();
    pack::<F>(false, 63 - shift as i32, value << shift, e)
}

/// The multiple of `2^-fraction` that is nearest in a direction; `quiet`: inexact results are not flagged. SDM Vol. 2C "VRNDSCALEPD".
///
/// Of half precision one is denormal, 2^-15: "VRNDSCALEPH" has underflow for it, with PE or without. Chosen: a result of zero is not tiny.
pub fn round_scaled<F: Float>(a: u64, fraction: u8, rounding: Rounding, quiet: bool, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<F>(&[a], e) {
        return nan;
    }
    let x = number::<F>(a, e);
    if x.kind == Kind::Zero {
        return sign::<F>(x.negative);
    }
    let exponent = x.exponent + i32::from(fraction);
    if x.kind == Kind::Infinity || exponent >= F::FRACTION as i32 {
        return a;
    }
    let (whole, inexact) = whole(Number { exponent, ..x }, rounding);
    if inexact && !quiet {
        e.raise(PE);
    }
    if whole == 0 {
        return sign::<F>(x.negative);
    }
    let shift = whole.leading_zeros();
    let mut exactly = *e;
    let exponent = 63 - shift as i32 - i32::from(fraction);
    let result = pack::<F>(x.negative, exponent, whole << shift, &mut exactly);
    if result & F::INFINITY == 0 && (inexact || e.every_tiny) {
        e.raise(UE);
    }
    result
}

/// What [`round_scaled`] takes away. SDM Vol. 2C "VREDUCEPD": of an infinity +0; the subtraction is under the same rounding. Only what
/// the subtraction loses is flagged, not what the rounding takes away, which is the result (so an Intel CPU, Cascade Lake).
pub fn reduce<F: Float>(a: u64, fraction: u8, rounding: Rounding, quiet: bool, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<F>(&[a], e) {
        return nan;
    }
    if a & !F::SIGN == F::INFINITY {
        return 0;
    }
    let scaled = round_scaled::<F>(a, fraction, rounding, true, e);
    let mut own = Environment { rounding, ..*e };
    let difference = subtract::<F>(a, scaled, &mut own);
    if own.raised & PE != 0 && !quiet {
        e.raise(PE);
    }
    difference
}

/// `a * 2^floor(b)`. SDM Vol. 2C "VSCALEFPD" and its table of special cases; a denormal `b` is not flagged.
pub fn scale<F: Float>(a: u64, b: u64, e: &mut Environment) -> u64 {
    if is_nan::<F>(a) && !is_signaling::<F>(a) && b & !F::SIGN == F::INFINITY {
        return if b & F::SIGN == 0 { F::INFINITY } else { 0 };
    }
    if let Some(nan) = nan::<F>(&[a, b], e) {
        return nan;
    }
    let (x, y) = (number::<F>(a, e), number::<F>(b, e));
    if y.kind == Kind::Infinity {
        let opposite = if y.negative { Kind::Infinity } else { Kind::Zero };
        if x.kind == opposite {
            return invalid::<F>(e);
        }
        denormals(&[x], e);
        return sign::<F>(x.negative) | if y.negative { 0 } else { F::INFINITY };
    }
    denormals(&[x], e);
    match x.kind {
        Kind::Zero => sign::<F>(x.negative),
        Kind::Infinity => a,
        Kind::Finite => {
            // More than this leaves nothing of any exponent.
            const FAR: i32 = 1 << 20;
            let by = match y.kind {
                Kind::Zero => 0,
                _ if y.exponent >= 20 => {
                    if y.negative {
                        -FAR
                    } else {
                        FAR
                    }
                }
                _ => {
                    let (magnitude, _) = whole(y, Rounding::Down);
                    let magnitude = magnitude as i32;
                    if y.negative { -magnitude } else { magnitude }
                }
            };
            pack::<F>(x.negative, x.exponent + by, x.significand, e)
        }
    }
}

/// The exponent as a number. SDM Vol. 2C "VGETEXPPD": of zero minus infinity, of infinities plus infinity.
pub fn exponent<F: Float>(a: u64, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<F>(&[a], e) {
        return nan;
    }
    let x = number::<F>(a, e);
    match x.kind {
        Kind::Zero => F::SIGN | F::INFINITY,
        Kind::Infinity => F::INFINITY,
        Kind::Finite => {
            denormals(&[x], e);
            from_integer::<F>(x.exponent.into(), e)
        }
    }
}

/// The significand, in the interval and with the sign that an immediate says. SDM Vol. 2C "VGETMANTPD".
pub fn mantissa<F: Float>(a: u64, control: u8, e: &mut Environment) -> u64 {
    if let Some(nan) = nan::<F>(&[a], e) {
        return nan;
    }
    let x = number::<F>(a, e);
    let (clear, refuse) = (control & 4 != 0, control & 8 != 0);
    let bias = F::BIAS as u64;
    let of_sign = sign::<F>(x.negative && !clear);
    if x.kind == Kind::Zero {
        return of_sign | bias << F::FRACTION;
    }
    if x.negative && refuse {
        return invalid::<F>(e);
    }
    if x.kind == Kind::Infinity {
        return of_sign | bias << F::FRACTION;
    }
    denormals(&[x], e);
    let fraction = x.significand >> (63 - F::FRACTION) & F::MASK;
    let half = match control & 3 {
        0 => false,
        1 => x.exponent & 1 != 0,
        2 => true,
        _ => fraction & F::QUIET != 0,
    };
    of_sign | (bias - u64::from(half)) << F::FRACTION | fraction
}

/// The lesser or the greater of two, by value or by magnitude, with a sign that the immediate chooses. SDM Vol. 2C "VRANGEPD".
pub fn range<F: Float>(a: u64, b: u64, control: u8, e: &mut Environment) -> u64 {
    for operand in [a, b] {
        if is_signaling::<F>(operand) {
            e.raise(IE);
            return operand | F::QUIET;
        }
    }
    let (x, y) = (flushed::<F>(a, e), flushed::<F>(b, e));
    let chosen = if is_nan::<F>(b) {
        x
    } else if is_nan::<F>(a) {
        y
    } else {
        denormals(&[number::<F>(a, e), number::<F>(b, e)], e);
        let (greater, magnitude) = (control & 1 != 0, control & 2 != 0);
        // By value a zero of either sign is the same; the manual's tables have the negative one of two that are equal for the lesser.
        let key = |bits: u64| {
            let size = (bits & !F::SIGN) as i64;
            let negative = bits & F::SIGN != 0;
            let value = if magnitude || !negative { size } else { -size };
            (value, !negative)
        };
        if (key(x) <= key(y)) != greater { x } else { y }
    };
    match control >> 2 & 3 {
        0 => x & F::SIGN | chosen & !F::SIGN,
        1 => chosen,
        2 => chosen & !F::SIGN,
        _ => chosen | F::SIGN,
    }
}

/// Whether a value is of one of the classes that the immediate names. SDM Vol. 2C "VFPCLASSPD".
pub fn is_of_class<F: Float>(a: u64, classes: u8, e: &Environment) -> bool {
    let negative = a & F::SIGN != 0;
    if is_nan::<F>(a) {
        let class = if is_signaling::<F>(a) { 0x80 } else { 0x01 };
        return classes & class != 0;
    }
    let x = number::<F>(a, e);
    let class = match x.kind {
        Kind::Zero if negative => 0x04,
        Kind::Zero => 0x02,
        Kind::Infinity if negative => 0x10,
        Kind::Infinity => 0x08,
        Kind::Finite => {
            let denormal = if x.denormal { 0x20 } else { 0 };
            denormal | if negative { 0x40 } else { 0 }
        }
    };
    classes & class != 0
}

/// VFIXUPIMMPD: what a table has for the class of `a`; `kept` is the destination's, `control` says which classes raise what. SDM Vol. 2C
/// "VFIXUPIMMPD".
pub fn fixed<F: Float>(kept: u64, a: u64, table: u32, control: u8, e: &mut Environment) -> u64 {
    // A denormal that counts as zero is +0 for the response that passes the source on.
    let a = if e.daz::<F>() && a & F::INFINITY == 0 && a & F::MASK != 0 {
        a & F::SIGN
    } else {
        a
    };
    let negative = a & F::SIGN != 0;
    let one = (F::BIAS as u64) << F::FRACTION;
    let (token, zero_divide, invalid) = if is_nan::<F>(a) {
        if is_signaling::<F>(a) { (1, 0, 0x10) } else { (0, 0, 0) }
    } else if a & !F::SIGN == 0 {
        (2, 0x01, 0x02)
    } else if a == one {
        (3, 0x04, 0x08)
    } else if a & !F::SIGN == F::INFINITY {
        if negative { (4, 0, 0x20) } else { (5, 0, 0x80) }
    } else if negative {
        (6, 0, 0x40)
    } else {
        (7, 0, 0)
    };
    if control & zero_divide != 0 {
        e.raise(ZE);
    }
    if control & invalid != 0 {
        e.raise(IE);
    }
    // A constant of the format from one of double precision.
    let constant = |value: f64| {
        let mut own = Environment::new(mxcsr::RESET);
        convert::<F64, F>(value.to_bits(), &mut own)
    };
    match table >> (4 * token) & 15 {
        0 => kept,
        1 => a,
        2 => a | F::INFINITY | F::QUIET,
        3 => F::INDEFINITE,
        4 => F::SIGN | F::INFINITY,
        5 => F::INFINITY,
        6 => sign::<F>(negative) | F::INFINITY,
        7 => F::SIGN,
        8 => 0,
        9 => F::SIGN | one,
        10 => one,
        11 => constant(0.5),
        12 => constant(90.0),
        13 => constant(std::f64::consts::FRAC_PI_2),
        14 => F::INFINITY - 1,
        _ => F::SIGN | (F::INFINITY - 1),
    }
}

/// Single precision to bfloat16: to nearest, denormals are zeros of their sign, NaNs become quiet. SDM Vol. 2C "VCVTNEPS2BF16".
pub fn to_bfloat16(a: u64) -> u64 {
    if is_nan::<F32>(a) {
        return a >> 16 | 0x40;
    }
    if a & F32::INFINITY == 0 {
        return a >> 16 & 0x8000;
    }
    (a + 0x7fff + (a >> 16 & 1)) >> 16
}

#[cfg(test)]
#[path = "float_test.rs"]
mod tests;
