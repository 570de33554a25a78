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
mod tests {
    use super::*;

    // covers: cpu/sse
    #[test]
    fn special_operands_are_as_the_manual_has_them() {
        let bits = f32::to_bits;
        for (x, reciprocal, root, why) in [
            (bits(0.0), bits(f32::INFINITY), bits(f32::INFINITY), "+0"),
            (bits(-0.0), bits(f32::NEG_INFINITY), bits(f32::NEG_INFINITY), "-0"),
            (1, bits(f32::INFINITY), bits(f32::INFINITY), "denormals count as zero"),
            (
                0x8000_0001,
                bits(f32::NEG_INFINITY),
                bits(f32::NEG_INFINITY),
                "so do negative ones",
            ),
            (bits(f32::INFINITY), 0, 0, "+inf"),
            (bits(f32::NEG_INFINITY), bits(-0.0), 0xffc0_0000, "-inf"),
            (0x7f80_0001, 0x7fc0_0001, 0x7fc0_0001, "SNaN becomes quiet"),
            (0xffc1_2345, 0xffc1_2345, 0xffc1_2345, "QNaN stays"),
            (bits(-1.0), bits(-0.999_755_86), 0xffc0_0000, "negative"),
            (bits(1.0), bits(0.999_755_86), bits(0.999_755_86), "one"),
            (bits(4.0), bits(0.249_938_96), bits(0.499_877_93), "four"),
            (0x7f7f_ffff, 0, 0x1f80_0800, "the largest: a tiny reciprocal is flushed"),
            (0x0080_0000, 0x7e7f_f000, 0x5eff_f000, "the smallest normal"),
        ] {
            assert_eq!(rcp(x), reciprocal, "rcp {why}: {:x}", rcp(x));
            assert_eq!(rsqrt(x), root, "rsqrt {why}: {:x}", rsqrt(x));
        }
    }

    // covers: cpu/sse
    #[test]
    fn errors_stay_within_the_bound() {
        let bound = 1.5 / 4096.0;
        let (mut worst_rcp, mut worst_root) = (0f64, 0f64);
        // Every interval of the tables at both ends and in between, at exponents odd and even, near and far.
        for exponent in [2, 63, 64, 126, 127, 128, 129, 200, 251] {
            for fraction in (0..1 << 23).step_by(61).chain((0..1 << 12).map(|i| (i << 11) + 0x7ff)) {
                let x = exponent << 23 | fraction;
                let value = f32::from_bits(x) as f64;
                worst_rcp = worst_rcp.max((f32::from_bits(rcp(x)) as f64 * value - 1.0).abs());
                worst_root = worst_root.max((f32::from_bits(rsqrt(x)) as f64 * value.sqrt() - 1.0).abs());
            }
        }
        assert!(
            worst_rcp <= bound && worst_root <= bound,
            "{worst_rcp} {worst_root} {bound}"
        );
        assert!(
            worst_rcp > bound / 8.0 && worst_root > bound / 8.0,
            "an approximation, as software expects"
        );
    }
}
