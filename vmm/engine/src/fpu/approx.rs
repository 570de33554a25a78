//! RCPPS, RCPSS, RSQRTPS and RSQRTSS, whose results differ between vendors.
//!
//! The manual bounds the relative error by 1.5 * 2^-12 and leaves the bits open. Chosen: the hardware's classic scheme, a
//! table indexed by the leading bits of the operand that holds the function at the middle of the interval, to 12 bits after
//! the leading one. 1.0 gives 0.99975586 for both, as on Intel's processors. The entries are computed, not stored. MXCSR is
//! neither used nor changed: operands that are denormal count as zero, tiny results are flushed, whatever DAZ and FTZ say.
//! SDM Vol. 2B "RCPPS", "RSQRTPS".

/// One element of RCPPS: bits of a single-precision value to bits of its approximate reciprocal.
pub fn rcp(x: u32) -> u32 {
    let sign = x & 0x8000_0000;
    let (exponent, fraction) = (x >> 23 & 0xff, x & 0x7f_ffff);
    match exponent {
        0xff if fraction != 0 => return x | 0x40_0000,
        0xff => return sign,
        0 => return sign | 0x7f80_0000,
        _ => {}
    }
    // The middle of the interval of 1 + fraction, in units of 2^-12: odd, so never a power of two.
    let middle = (1 << 12 | fraction >> 12 << 1 | 1) as u64;
    // 2^12 / middle lies in (1/2, 1): to units of 2^-13, which is 12 bits after the leading one.
    let quotient = ((2 << 24) + middle / 2) / middle;
    // The value is quotient * 2^-13 * 2^(127 - exponent), and quotient has 13 bits: 2^12 < quotient < 2^13.
    let result = 253 - exponent as i32;
    if result <= 0 {
        return sign;
    }
    sign | (result as u32) << 23 | (quotient as u32 & 0xfff) << 11
}

/// One element of RSQRTPS: bits of a single-precision value to bits of its approximate reciprocal square root.
pub fn rsqrt(x: u32) -> u32 {
    let sign = x & 0x8000_0000;
    let (exponent, fraction) = (x >> 23 & 0xff, x & 0x7f_ffff);
    match exponent {
        0xff if fraction != 0 => return x | 0x40_0000,
        0 => return sign | 0x7f80_0000,
        _ if sign != 0 => return 0xffc0_0000,
        0xff => return 0,
        _ => {}
    }
    // x = m * 4^k with m in [1, 4); the table is indexed by the low bit of the exponent and ten bits of the fraction.
    let odd = exponent & 1 == 0;
    let k = (exponent as i32 - 127 - odd as i32) / 2;
    // The middle in units of 2^-11, then m * 2^60 (2^49 * 2^11).
    let middle = (1 << 11 | fraction >> 13 << 1 | 1) as u128;
    let m = middle << (49 + odd as u32);
    // r = 2^13 / sqrt(m * 2^-60), rounded: the largest r with (2r - 1)^2 * m <= 4 * 2^26 * 2^60.
    let mut quotient = 0u128;
    for bit in (0..14).rev() {
        let r = quotient | 1 << bit;
        if (2 * r - 1) * (2 * r - 1) * m <= 1 << 88 {
            quotient = r;
        }
    }
    // 2^12 < quotient < 2^13: the value is quotient * 2^-13 * 2^-k.
    ((126 - k) as u32) << 23 | (quotient as u32 & 0xfff) << 11
}

#[cfg(test)]
#[path = "approx_test.rs"]
mod tests;
