//! The transcendental instructions, rounded correctly.
//!
//! Processors differ in the last bits of these results. Chosen: the mathematical result, rounded once to 64 bits as RC says
//! (PC does not apply to them, SDM Vol. 1 8.1.5.2 "Precision Control Field"), with one exception that the manual documents:
//! FSIN, FCOS, FSINCOS and FPTAN reduce their argument with a pi of 66 bits (SDM Vol. 1 8.3.8 "Approximation of Pi"), so the
//! function is that of `x - k * P/2`, taken exactly, which matters near multiples of pi and for large arguments.
//!
//! Operands are finite and not zero here; the special cases are the caller's.

use super::wide::Wide;

/// pi.
pub(crate) const PI: Wide = Wide::new(false, 1, [0x29024e088a67cc74, 0xc4c6628b80dc1cd1, 0xc90fdaa22168c234]);
/// pi / 2.
const HALF_PI: Wide = Wide::new(false, 0, [0x29024e088a67cc74, 0xc4c6628b80dc1cd1, 0xc90fdaa22168c234]);
/// ln 2.
const LN2: Wide = Wide::new(false, -1, [0x40f343267298b62d, 0xc9e3b39803f2f6af, 0xb17217f7d1cf79ab]);
/// 1 / ln 2.
const LOG2E: Wide = Wide::new(false, 0, [0xeb577aa8dd695a58, 0xbe87fed0691d3e88, 0xb8aa3b295c17f0bb]);
/// atan(k / 8) for k from 1 to 8.
const ATAN_EIGHTHS: [Wide; 8] = [
    Wide::new(false, -4, [0x8b3957d95d9ad922, 0xc897989f3e888ef7, 0xfeadd4d5617b6e32]),
    Wide::new(false, -3, [0xaa7fa90388b3836b, 0x6dc79ef5f7a217e5, 0xfadbafc96406eb15]),
    Wide::new(false, -2, [0x3d843977ae5455cc, 0x8aa32122dcfe4483, 0xb7b0ca0f26f78473]),
    Wide::new(false, -2, [0x6e141587261cdf00, 0x6fe445ecbc3a8d03, 0xed63382b0dda7b45]),
    Wide::new(false, -1, [0x918a67e0652b375c, 0x5c835e1665c43747, 0x8f005d5ef7f59f9b]),
    Wide::new(false, -1, [0xe3f08689eeb2b9e7, 0x19a87f2a457dac9e, 0xa4bc7d1934f70924]),
    Wide::new(false, -1, [0x3d7aecc114c79a80, 0xcb2da55210a4443d, 0xb8053e2bc2319e73]),
    Wide::new(false, -1, [0x29024e088a67cc74, 0xc4c6628b80dc1cd1, 0xc90fdaa22168c234]),
];

/// 0.C90FDAA2_2168C234_C * 2^2 in units of 2^-64.
const PI_66: u128 = 0xc_90fd_aa22_168c_234c >> 2;

/// 2^x - 1 for |x| < 1.
pub(crate) fn exp2m1(x: Wide) -> Wide {
    // The sum of z^n / n! from n = 1: the first term dominates, so the relative error stays small.
    let z = x.mul(LN2);
    let mut term = z;
    let mut sum = z;
    for n in 2.. {
        term = term.mul(z).div_small(n);
        if negligible(term, sum) {
            break;
        }
        sum = sum.add(term);
    }
    sum
}

fn negligible(term: Wide, sum: Wide) -> bool {
    term.is_zero() || term.exponent < sum.exponent - 194
}

/// log2((1 + s) / (1 - s)) for |s| < 0.18.
fn log2_ratio(s: Wide) -> Wide {
    let square = s.mul(s);
    let mut power = s;
    let mut sum = s;
    for n in (3..).step_by(2) {
        power = power.mul(square);
        let term = power.div_small(n);
        if negligible(term, sum) {
            break;
        }
        sum = sum.add(term);
    }
    sum.mul(LOG2E).scaled(1)
}

/// log2(x) for x > 0, and whether it is exact.
pub(crate) fn log2(x: Wide) -> (Wide, bool) {
    let mut exponent = x.exponent;
    let mut m = x.scaled(-exponent);
    if m == Wide::ONE {
        return (integer(exponent), true);
    }
    // To [0.7, 1.41): then no cancellation with the exponent.
    if m.smaller(Wide::new(false, 0, [0, 0, 0xb504_f333_f9de_6484])) {
        // Below the square root of 2.
    } else {
        m = m.scaled(-1);
        exponent += 1;
    }
    let fraction = log2_ratio(m.sub(Wide::ONE).div(m.add(Wide::ONE)));
    (integer(exponent).add(fraction), false)
}

fn integer(n: i32) -> Wide {
    Wide::from_integer(n < 0, n.unsigned_abs() as u128, 0)
}

/// log2(1 + x) for x > -1, and whether it is exact.
pub(crate) fn log2_1p(x: Wide) -> (Wide, bool) {
    if x.exponent < -2 {
        return (log2_ratio(x.div(x.add(Wide::ONE.scaled(1)))), false);
    }
    // 1 + x is exact up to here: x has 64 bits, the lowest no less than 2^-65. Far above, the one is lost.
    let (value, exact) = log2(x.add(Wide::ONE));
    (value, exact && x.exponent < 100)
}

/// The angle of the point (x, y), in (-pi, pi]. Neither is zero.
pub(crate) fn atan2(y: Wide, x: Wide) -> Wide {
    let swapped = x.smaller(y);
    let ratio = if swapped {
        x.abs().div(y.abs())
    } else {
        y.abs().div(x.abs())
    };
    let mut angle = atan(ratio);
    if swapped {
        angle = if x.negative {
            HALF_PI.add(angle)
        } else {
            HALF_PI.sub(angle)
        };
    } else if x.negative {
        angle = PI.sub(angle);
    }
    if y.negative { angle.neg() } else { angle }
}

/// atan(t) for 0 < t <= 1.
fn atan(t: Wide) -> Wide {
    // atan(t) = atan(c) + atan((t - c) / (1 + t * c)) with c the nearest multiple of 1/8.
    let eighths = nearest_eighth(t);
    if eighths == 0 {
        return atan_series(t);
    }
    let c = Wide::from_integer(false, eighths as u128, -3);
    let rest = t.sub(c);
    if rest.is_zero() {
        return ATAN_EIGHTHS[eighths - 1];
    }
    ATAN_EIGHTHS[eighths - 1].add(atan_series(rest.div(Wide::ONE.add(t.mul(c)))))
}

fn nearest_eighth(t: Wide) -> usize {
    let mut nearest = 0;
    for k in 1..=8 {
        // Above the middle between k - 1 and k.
        if !t.smaller(Wide::from_integer(false, 2 * k - 1, -4)) {
            nearest = k as usize;
        }
    }
    nearest
}

fn atan_series(t: Wide) -> Wide {
    let square = t.mul(t).neg();
    let mut power = t;
    let mut sum = t;
    for n in (3..).step_by(2) {
        power = power.mul(square);
        let term = power.div_small(n);
        sum = sum.add(term);
        if negligible(term, sum) {
            break;
        }
    }
    sum
}

/// An argument reduced to |r| <= P/4, and the quadrant it was in.
pub(crate) struct Reduced {
    r: Wide,
    quadrant: u8,
}

/// Reduces a value of the 80-bit format, |x| < 2^63.
pub(crate) fn reduce(x: u128) -> Reduced {
    let value = Wide::from_f80(x);
    // In units of 2^-65, of which P/2 has an integral number.
    let quarter = Wide::from_integer(false, PI_66, -66);
    if value.smaller(quarter) {
        return Reduced { r: value, quadrant: 0 };
    }
    // The value is at least 0.78, so its lowest bit is 2^-64 or higher.
    let units = (x as u64 as u128) << (value.exponent + 2);
    let (mut k, mut rest) = (units / PI_66, units % PI_66);
    let mut negative = value.negative;
    if rest > PI_66 / 2 {
        k += 1;
        rest = PI_66 - rest;
        negative = !negative;
    }
    let quadrant = (k & 3) as u8;
    Reduced {
        r: Wide::from_integer(negative, rest, -65),
        quadrant: if value.negative { (4 - quadrant) & 3 } else { quadrant },
    }
}

impl Reduced {
    pub fn sin(&self) -> Wide {
        match self.quadrant & 3 {
            0 => sin(self.r),
            1 => cos(self.r),
            2 => sin(self.r).neg(),
            _ => cos(self.r).neg(),
        }
    }

    pub fn cos(&self) -> Wide {
        match self.quadrant & 3 {
            0 => cos(self.r),
            1 => sin(self.r).neg(),
            2 => cos(self.r).neg(),
            _ => sin(self.r),
        }
    }

    pub fn tan(&self) -> Wide {
        let odd = self.quadrant & 1 != 0;
        if self.r.exponent < -60 {
            // r + r^3 / 3: the quotient of two results that are both a little too small would not know its direction.
            let tan = self.r.add(self.r.mul(self.r).mul(self.r).div_small(3));
            return if odd { Wide::ONE.div(tan).neg() } else { tan };
        }
        let (s, c) = (sin(self.r), cos(self.r));
        if odd { c.div(s).neg() } else { s.div(c) }
    }
}

/// The series of sine and cosine: `first`, then each term from the one before by `-r^2 / (n * (n + 1))`, n from `start`.
fn alternating(first: Wide, r: Wide, start: u64) -> Wide {
    let square = r.mul(r).neg();
    let mut term = first;
    let mut sum = first;
    for n in (start..).step_by(2) {
        term = term.mul(square).div_small(n * (n + 1));
        // The first term is always taken: it says on which side of `first` the result lies.
        sum = sum.add(term);
        if negligible(term, sum) {
            break;
        }
    }
    sum
}

fn sin(r: Wide) -> Wide {
    alternating(r, r, 2)
}

fn cos(r: Wide) -> Wide {
    alternating(Wide::ONE, r, 1)
}
