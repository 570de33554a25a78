//! VRCP14PS, VRSQRT14PS and their like, as Intel has published them: "Reference Implementations for IA Approximation Instructions VRCP14,
//! VRSQRT14, VRCP28, VRSQRT28, and VEXP2".
//!
//! The operand's leading bits choose a segment, in which the function is a straight line through the segment's middle `y`: its value there
//! is in a table, its slope is the derivative there, to the odd number next to it. The result is cut to 16 bits after the leading one.

use crate::fpu::portable::float::{Environment, Float, Parts, parts};

/// RCP14: `2^18` times the line's value in the middle of each 64th from 1 to 2.
static RECIPROCALS: [u32; 64] = [
    260119, 256148, 252296, 248558, 244929, 241405, 237981, 234652, 231416, 228266, 225202, 222220, 219314, 216485,
    213727, 211038, 208417, 205859, 203364, 200929, 198551, 196229, 193960, 191743, 189576, 187458, 185387, 183360,
    181377, 179439, 177540, 175681, 173860, 172077, 170330, 168618, 166940, 165295, 163682, 162101, 160550, 159027,
    157535, 156069, 154631, 153219, 151832, 150470, 149133, 147819, 146528, 145260, 144012, 142787, 141582, 140397,
    139232, 138085, 136959, 135853, 134763, 133689, 132631, 131589,
];

/// RSQRT14: `2^19` times the same of each 32nd from 1 to 2, then of each 16th from 2 to 4.
static ROOTS: [[u32; 32]; 2] = [
    [
        520261, 512437, 504953, 497790, 490922, 484331, 478001, 471909, 466046, 460397, 454947, 449688, 444606, 439694,
        434939, 430335, 425875, 421551, 417355, 413284, 409329, 405487, 401748, 398111, 394571, 391127, 387770, 384498,
        381307, 378194, 375155, 372190,
    ],
    [
        367881, 362349, 357056, 351992, 347136, 342475, 337997, 333693, 329545, 325551, 321697, 317977, 314385, 310910,
        307549, 304295, 301139, 298079, 295115, 292237, 289439, 286722, 284080, 281508, 279006, 276569, 274195, 271882,
        269625, 267425, 265276, 263178,
    ],
];

/// `2^16` times the reciprocal of `1 + fraction / 2^16`, cut: below `2^17`, which the reciprocal of 1 would be.
fn reciprocal_of(fraction: u32) -> u32 {
    let segment = fraction >> 10;
    let middle = 129 + 2 * segment;
    // Half of 2^10 / y^2 with y = middle / 128.
    let slope = 2 * ((512 << 14) / (middle * middle)) + 1;
    let distance = i64::from(1 << 16 | fraction) - i64::from(middle << 9);
    let value = i64::from(RECIPROCALS[segment as usize & 63] << 8) - i64::from(slope) * distance;
    (value >> 9) as u32
}

/// `2^17` times the reciprocal square root of `1 + fraction / 2^15`, or (`odd`) of twice that, cut.
fn root_of(fraction: u32, odd: bool) -> u32 {
    let segment = fraction >> 10;
    let middle = u64::from(65 + 2 * segment);
    // Half of 2^10 * y^-1.5 with y = middle / 64; above 2 the middle counts in 32nds and the slope in 2^11ths.
    let scale: u64 = if odd { 1 << 35 } else { 1 << 36 };
    let slope = 2 * (scale / (middle * middle * middle)).isqrt() + 1;
    let distance = i64::from(1 << 15 | fraction) - (middle << 9) as i64;
    let value = i64::from(ROOTS[usize::from(odd)][segment as usize & 31] << 7) - slope as i64 * distance;
    (value >> 9) as u32
}

/// An approximate reciprocal. Denormal operands are zeros under DAZ, denormal results are under FTZ; nothing is flagged.
pub fn rcp14<F: Float>(a: u64, e: &Environment) -> u64 {
    let sign = a & F::SIGN;
    let (exponent, significand) = match parts::<F>(a, e) {
        Parts::Nan => return a | F::QUIET,
        Parts::Infinity => return sign,
        Parts::Zero => return sign | F::INFINITY,
        Parts::Finite { exponent, significand } => (exponent, significand),
    };
    let fraction = significand << 1;
    let (exponent, value) = if fraction == 0 {
        (-exponent, 1 << 16)
    } else {
        (-exponent - 1, reciprocal_of((fraction >> 48) as u32))
    };
    let biased = exponent + F::BIAS;
    let significand = u64::from(value) << (F::FRACTION - 16);
    if biased >= F::TOP as i32 {
        return sign | F::INFINITY;
    }
    if biased > 0 {
        return sign | (biased as u64) << F::FRACTION | significand & F::MASK;
    }
    if e.ftz::<F>() {
        return sign;
    }
    sign | significand >> (1 - biased)
}

/// An approximate reciprocal square root. Denormal operands are zeros under DAZ; nothing is flagged.
pub fn rsqrt14<F: Float>(a: u64, e: &Environment) -> u64 {
    let sign = a & F::SIGN;
    let (exponent, significand) = match parts::<F>(a, e) {
        Parts::Nan => return a | F::QUIET,
        Parts::Zero => return sign | F::INFINITY,
        _ if sign != 0 => return F::INDEFINITE,
        Parts::Infinity => return 0,
        Parts::Finite { exponent, significand } => (exponent, significand),
    };
    let (fraction, odd, half) = (significand << 1, exponent & 1 != 0, exponent >> 1);
    let (exponent, value) = if fraction == 0 && !odd {
        (-half, 1 << 16)
    } else {
        (-half - 1, root_of((fraction >> 49) as u32, odd))
    };
    let significand = u64::from(value) << (F::FRACTION - 16);
    ((exponent + F::BIAS) as u64) << F::FRACTION | significand & F::MASK
}

#[cfg(test)]
#[path = "approximate_test.rs"]
mod tests;
