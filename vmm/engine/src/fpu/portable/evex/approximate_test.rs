//! Against the bound of the manual, and against values that Intel's reference implementation gives.

use super::{rcp14, rsqrt14};
use crate::fpu::portable::float::{Environment, F32, F64};
use crate::fpu::state::mxcsr;

const BOUND: f64 = 1.0 / 16384.0;

// covers: cpu/avx512-approximations
#[test]
fn the_relative_error_is_below_2_to_the_minus_14() {
    let e = Environment::new(mxcsr::RESET);
    // Each segment of both tables, its beginning, its end and places between.
    for step in 0..8192_u64 {
        for exponent in [-3, -2, 0, 1, 5] {
            let x = (1.0 + step as f64 / 8192.0 + 1.0e-5) * 2f64.powi(exponent);
            let single = f64::from(x as f32);
            for (what, of, exact) in [
                ("rcp14", f64::from_bits(rcp14::<F64>(x.to_bits(), &e)), 1.0 / x),
                (
                    "rsqrt14",
                    f64::from_bits(rsqrt14::<F64>(x.to_bits(), &e)),
                    1.0 / x.sqrt(),
                ),
                (
                    "rcp14 of single precision",
                    f32::from_bits(rcp14::<F32>((x as f32).to_bits().into(), &e) as u32).into(),
                    1.0 / single,
                ),
                (
                    "rsqrt14 of single precision",
                    f32::from_bits(rsqrt14::<F32>((x as f32).to_bits().into(), &e) as u32).into(),
                    1.0 / single.sqrt(),
                ),
            ] {
                assert!((of / exact - 1.0).abs() < BOUND, "{what} of {x}: {of}");
            }
        }
    }
}

// covers: cpu/avx512-approximations
#[test]
fn special_operands_are_as_in_the_manual() {
    let (plain, flush, daz) = (mxcsr::RESET, mxcsr::RESET | mxcsr::FTZ, mxcsr::RESET | mxcsr::DAZ);
    // SDM Vol. 2C tables "VRCP14PS/VRCP14SS Special Cases" and "VRSQRT14PS Special Cases".
    for (controls, operand, reciprocal, root, why) in [
        (plain, 0x0000_0000_u32, 0x7f80_0000_u32, 0x7f80_0000_u32, "+0"),
        (plain, 0x8000_0000, 0xff80_0000, 0xff80_0000, "-0"),
        (plain, 0x7f80_0000, 0x0000_0000, 0x0000_0000, "plus infinity"),
        (plain, 0xff80_0000, 0x8000_0000, 0xffc0_0000, "minus infinity"),
        (plain, 0x7f80_0001, 0x7fc0_0001, 0x7fc0_0001, "a signaling NaN"),
        (plain, 0xc000_0000, 0xbf00_0000, 0xffc0_0000, "-2"),
        (plain, 0x4080_0000, 0x3e80_0000, 0x3f00_0000, "4"),
        (
            plain,
            0x0020_0000,
            0x7f80_0000,
            0x5f80_0000,
            "2^-128, whose reciprocal overflows",
        ),
        (plain, 0x0040_0000, 0x7f00_0000, 0x5f35_0280, "2^-127"),
        (daz, 0x0040_0000, 0x7f80_0000, 0x7f80_0000, "2^-127 under DAZ"),
        (plain, 0x7e80_0000, 0x0080_0000, 0x2000_0000, "2^126"),
        (plain, 0x7f00_0000, 0x0040_0000, 0x1fb5_0280, "2^127"),
        (flush, 0xff00_0000, 0x8000_0000, 0xffc0_0000, "-2^127 under FTZ"),
    ] {
        let e = Environment::without_underflow(controls);
        assert_eq!(rcp14::<F32>(operand.into(), &e) as u32, reciprocal, "{why}: rcp14");
        assert_eq!(rsqrt14::<F32>(operand.into(), &e) as u32, root, "{why}: rsqrt14");
    }
}
