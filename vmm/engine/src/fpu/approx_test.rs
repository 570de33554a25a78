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
