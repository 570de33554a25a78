//! Numbers with a 192-bit significand, and their rounding to the 80-bit format.
//!
//! Enough for transcendental functions of 64-bit operands to be rounded correctly: results come no closer to a rounding
//! boundary than about 2^-130, relative, unless they are exact, and an operation here is wrong by a few 2^-190.

use super::state::sw;

/// `(-1)^negative * m / 2^191 * 2^exponent`; the top bit of `m` (least significant limb first) is set, or all of it is zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Wide {
    pub negative: bool,
    pub exponent: i32,
    m: [u64; 3],
}

impl Wide {
    pub const ZERO: Wide = Wide::new(false, 0, [0; 3]);
    pub const ONE: Wide = Wide::new(false, 0, [0, 0, 1 << 63]);

    /// From parts that are normalised already.
    pub const fn new(negative: bool, exponent: i32, m: [u64; 3]) -> Wide {
        Wide { negative, exponent, m }
    }

    /// `value * 2^scale`.
    pub fn from_integer(negative: bool, value: u128, scale: i32) -> Wide {
        if value == 0 {
            return Wide::ZERO;
        }
        let shift = value.leading_zeros();
        let m = value << shift;
        Wide::new(negative, scale + 127 - shift as i32, [0, m as u64, (m >> 64) as u64])
    }

    /// A finite value of the 80-bit format.
    pub fn from_f80(x: u128) -> Wide {
        let exponent = ((x >> 64) as i32 & 0x7fff).max(1);
        Wide::from_integer(x >> 79 & 1 != 0, x as u64 as u128, exponent - 16383 - 63)
    }

    pub fn is_zero(self) -> bool {
        self.m[2] == 0
    }

    pub fn neg(self) -> Wide {
        Wide {
            negative: !self.negative,
            ..self
        }
    }

    pub fn abs(self) -> Wide {
        Wide {
            negative: false,
            ..self
        }
    }

    /// `self * 2^n`.
    pub fn scaled(self, n: i32) -> Wide {
        Wide {
            exponent: self.exponent + n,
            ..self
        }
    }

    /// |self| < |other|.
    pub fn smaller(self, other: Wide) -> bool {
        if self.is_zero() || other.is_zero() {
            return self.is_zero() && !other.is_zero();
        }
        (self.exponent, self.m[2], self.m[1], self.m[0]) < (other.exponent, other.m[2], other.m[1], other.m[0])
    }

    pub fn mul(self, other: Wide) -> Wide {
        if self.is_zero() || other.is_zero() {
            return Wide::ZERO;
        }
        let mut product = [0u64; 6];
        for i in 0..3 {
            let mut carry = 0u128;
            for j in 0..3 {
                let sum = product[i + j] as u128 + self.m[i] as u128 * other.m[j] as u128 + carry;
                product[i + j] = sum as u64;
                carry = sum >> 64;
            }
            product[i + 3] = carry as u64;
        }
        let mut exponent = self.exponent + other.exponent + 1;
        let mut m = [product[3], product[4], product[5]];
        if m[2] >> 63 == 0 {
            m = [
                m[0] << 1 | product[2] >> 63,
                m[1] << 1 | m[0] >> 63,
                m[2] << 1 | m[1] >> 63,
            ];
            exponent -= 1;
        }
        Wide::new(self.negative != other.negative, exponent, m)
    }

    /// By a small integer.
    pub fn div_small(self, divisor: u64) -> Wide {
        let mut quotient = [0u64; 4];
        let mut remainder = 0u128;
        for (i, limb) in [self.m[2], self.m[1], self.m[0], 0].into_iter().enumerate() {
            let part = remainder << 64 | limb as u128;
            quotient[3 - i] = (part / divisor as u128) as u64;
            remainder = part % divisor as u128;
        }
        Wide::normalise(self.negative, self.exponent, quotient)
    }

    /// Four limbs, of which the upper three have the weight of `m`.
    fn normalise(negative: bool, exponent: i32, mut q: [u64; 4]) -> Wide {
        let mut exponent = exponent;
        while q[3] == 0 {
            if q == [0; 4] {
                return Wide::ZERO;
            }
            q = [0, q[0], q[1], q[2]];
            exponent -= 64;
        }
        let shift = q[3].leading_zeros();
        if shift != 0 {
            for i in (1..4).rev() {
                q[i] = q[i] << shift | q[i - 1] >> (64 - shift);
            }
            exponent -= shift as i32;
        }
        Wide::new(negative, exponent, [q[1], q[2], q[3]])
    }

    pub fn div(self, other: Wide) -> Wide {
        debug_assert!(!other.is_zero());
        if self.is_zero() {
            return Wide::ZERO;
        }
        // Restoring division, one bit a step; the remainder is below the divisor, so one bit more than 192 is enough.
        let mut remainder = self.m;
        let mut extra = 0u64;
        let mut quotient = [0u64; 3];
        let mut exponent = self.exponent - other.exponent;
        let less = |a: [u64; 3], b: [u64; 3]| (a[2], a[1], a[0]) < (b[2], b[1], b[0]);
        let double = |r: &mut [u64; 3]| {
            let out = r[2] >> 63;
            *r = [r[0] << 1, r[1] << 1 | r[0] >> 63, r[2] << 1 | r[1] >> 63];
            out
        };
        if less(remainder, other.m) {
            extra = double(&mut remainder);
            exponent -= 1;
        }
        for _ in 0..192 {
            double(&mut quotient);
            if extra != 0 || !less(remainder, other.m) {
                remainder = sub3(remainder, other.m);
                quotient[0] |= 1;
            }
            extra = double(&mut remainder);
        }
        Wide::new(self.negative != other.negative, exponent, quotient)
    }

    pub fn add(self, other: Wide) -> Wide {
        let (a, b) = if self.smaller(other) {
            (other, self)
        } else {
            (self, other)
        };
        if b.is_zero() {
            return a;
        }
        let shift = (a.exponent - b.exponent) as u32;
        let (shifted, lost) = shift_right(b.m, shift);
        if a.negative == b.negative {
            let (m0, c0) = a.m[0].overflowing_add(shifted[0]);
            let sum = a.m[1] as u128 + shifted[1] as u128 + c0 as u128;
            let top = a.m[2] as u128 + shifted[2] as u128 + (sum >> 64);
            let (m1, m2) = (sum as u64, top as u64);
            if top >> 64 == 0 {
                return Wide::new(a.negative, a.exponent, [m0, m1, m2]);
            }
            return Wide::new(
                a.negative,
                a.exponent + 1,
                [m0 >> 1 | m1 << 63, m1 >> 1 | m2 << 63, m2 >> 1 | 1 << 63],
            );
        }
        let mut m = sub3(a.m, shifted);
        // What was shifted out is subtracted as one unit, so that a - tiny is below a.
        if lost {
            m = sub3(m, [1, 0, 0]);
        }
        Wide::normalise(a.negative, a.exponent, [0, m[0], m[1], m[2]])
    }

    pub fn sub(self, other: Wide) -> Wide {
        self.add(other.neg())
    }

    /// Rounds to the 80-bit format under a control word (its rounding control and underflow and overflow masks; the precision
    /// control does not apply to the functions that end here). `exact`: nothing was lost on the way. Returns the value and
    /// the status bits: OE, UE, PE, C1.
    pub fn round(self, cw: u16, exact: bool) -> (u128, u16) {
        let sign = (self.negative as u128) << 79;
        if self.is_zero() {
            return (sign, 0);
        }
        let sticky = (self.m[0] != 0 || !exact) as u128;
        let significand = (self.m[2] as u128) << 64 | self.m[1] as u128 | sticky;
        let biased = self.exponent + 16383;
        let (rounded, inexact, up) = round_128(significand, self.negative, cw);
        let carried = biased + (rounded >> 64) as i32;
        let inexactly = |status: u16, inexact: bool, up: bool| {
            status | if inexact { sw::PE } else { 0 } | if up { sw::C1 } else { 0 }
        };
        // Tiny and huge are judged after rounding as if the exponent had no bounds.
        if carried <= 0 {
            if cw & sw::UE == 0 {
                return (sign | pack(rounded, carried + 24576), inexactly(sw::UE, inexact, up));
            }
            let shift = (1 - biased) as u32;
            let denormal = if shift >= 128 {
                1
            } else {
                significand >> shift | (significand << (128 - shift) != 0) as u128
            };
            let (rounded, inexact, up) = round_128(denormal, self.negative, cw);
            let exponent = (rounded >> 63) as i32;
            let underflow = if inexact { sw::UE } else { 0 };
            return (
                sign | (exponent as u128) << 64 | rounded,
                inexactly(underflow, inexact, up),
            );
        }
        if carried >= 0x7fff {
            if cw & sw::OE == 0 {
                return (sign | pack(rounded, carried - 24576), inexactly(sw::OE, inexact, up));
            }
            let to_infinity = match cw >> 10 & 3 {
                0 => true,
                1 => self.negative,
                2 => !self.negative,
                _ => false,
            };
            let value = if to_infinity {
                0x7fff_8000_0000_0000_0000
            } else {
                0x7ffe_ffff_ffff_ffff_ffff
            };
            return (sign | value, inexactly(sw::OE, true, to_infinity));
        }
        (sign | pack(rounded, carried), inexactly(0, inexact, up))
    }
}

fn sub3(a: [u64; 3], b: [u64; 3]) -> [u64; 3] {
    let (m0, b0) = a[0].overflowing_sub(b[0]);
    let (m1, b1) = a[1].overflowing_sub(b[1]);
    let (m1, b2) = m1.overflowing_sub(b0 as u64);
    [m0, m1, a[2].wrapping_sub(b[2]).wrapping_sub((b1 | b2) as u64)]
}

fn shift_right(m: [u64; 3], shift: u32) -> ([u64; 3], bool) {
    if shift >= 192 {
        return ([0; 3], true);
    }
    let (limbs, bits) = ((shift / 64) as usize, shift % 64);
    let mut out = [0; 3];
    for i in 0..3 - limbs {
        out[i] = m[i + limbs] >> bits;
        if bits != 0 && i + limbs + 1 < 3 {
            out[i] |= m[i + limbs + 1] << (64 - bits);
        }
    }
    let lost = m[..limbs].iter().any(|&limb| limb != 0) || bits != 0 && m[limbs] << (64 - bits) != 0;
    (out, lost)
}

/// Rounds away the lower 64 bits: the upper ones (with a carry in bit 64), whether anything was lost, whether it went up.
fn round_128(significand: u128, negative: bool, cw: u16) -> (u128, bool, bool) {
    let (kept, rest) = (significand >> 64, significand as u64);
    let up = rest != 0
        && match cw >> 10 & 3 {
            0 => rest > 1 << 63 || rest == 1 << 63 && kept & 1 != 0,
            1 => negative,
            2 => !negative,
            _ => false,
        };
    (kept + up as u128, rest != 0, up)
}

fn pack(rounded: u128, biased: i32) -> u128 {
    let significand = if rounded >> 64 != 0 { 1 << 63 } else { rounded };
    // Far beyond the range even of wrapped exponents: FSCALE's like do not come here, so it cannot happen.
    (biased.clamp(0, 0x7fff) as u128) << 64 | significand
}
