use super::*;

const QUIET: u32 = 0x1f80;
const DOWN: u32 = QUIET | 1 << 13;
const UP: u32 = QUIET | 2 << 13;
const ZERO: u32 = QUIET | 3 << 13;
const DAZ: u32 = 1 << 6;
const FTZ: u32 = 1 << 15;

fn random(state: &mut u64) -> u64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    let mixed = (*state ^ *state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 32
}

/// A double whose exponent is near that of one, or anything.
fn double(state: &mut u64) -> u64 {
    let bits = random(state);
    match random(state) % 4 {
        0 => bits,
        1 => bits & 0x800f_ffff_ffff_ffff | (1023 + bits % 5) << 52,
        2 => bits & 0x800f_ffff_ffff_ffff | (bits % 60) << 52,
        _ => bits & 0x800f_ffff_f000_0000 | (960 + bits % 128) << 52,
    }
}

/// IEEE 754 leaves no choice to nearest but the NaNs: the language's arithmetic says the same.
#[test]
fn to_nearest_as_the_language_has_it() {
    let mut state = 1;
    for _ in 0..200_000 {
        let (a, b, c) = (double(&mut state), double(&mut state), double(&mut state));
        let (x, y, z) = (f64::from_bits(a), f64::from_bits(b), f64::from_bits(c));
        let mut e = Environment::new(QUIET);
        let e = &mut e;
        for (name, ours, theirs) in [
            ("add", add_exactly::<F64>(a, b, false, e), x + y),
            ("subtract", add_exactly::<F64>(a, b, true, e), x - y),
            ("multiply", multiply_exactly::<F64>(a, b, e), x * y),
            ("divide", divide_exactly::<F64>(a, b, e), x / y),
            ("root", root::<F64>(a, e), x.sqrt()),
            ("fma", multiply_add::<F64>([a, b, c], false, false, e), x.mul_add(y, z)),
        ] {
            let same = ours == theirs.to_bits() || theirs.is_nan() && f64::from_bits(ours).is_nan();
            assert!(
                same,
                "{name} of {a:#x}, {b:#x}, {c:#x}: {ours:#x}, {:#x}",
                theirs.to_bits()
            );
        }
        let narrow = convert::<F64, F32>(a, e) as u32;
        assert!(narrow == (x as f32).to_bits() || x.is_nan(), "{a:#x}");
        assert_eq!(
            to_integer::<F64>(a, 64, Rounding::Zero, e) as i64,
            indefinite(x, x as i64),
            "{a:#x}"
        );
        assert_eq!(from_integer::<F64>(b as i64, e), (b as i64 as f64).to_bits());
        assert_eq!(from_integer::<F32>(b as i64, e), u64::from((b as i64 as f32).to_bits()));
        let even = integral::<F64>(a, Rounding::Nearest, true, e);
        assert!(even == x.round_ties_even().to_bits() || x.is_nan(), "{a:#x}");
    }
}

/// Out of range it is the integer indefinite, not the nearest end.
fn indefinite(x: f64, value: i64) -> i64 {
    if x.is_nan() || x >= 2f64.powi(63) {
        i64::MIN
    } else {
        value
    }
}

/// The quick way leaves what the other one does.
#[test]
fn quick_and_exact_are_the_same() {
    let mut state = 2;
    for _ in 0..100_000 {
        let (mut a, mut b) = (double(&mut state), double(&mut state));
        // Zeros are on the quick way too.
        match random(&mut state) % 16 {
            0 => a &= F64::SIGN,
            1 => b &= F64::SIGN,
            2 => (a, b) = (a & F64::SIGN, b & F64::SIGN),
            _ => {}
        }
        let (s, t) = (a >> 32, b >> 32);
        let mut quick = Environment::new(QUIET | PE);
        let mut exact = Environment::new(QUIET);
        assert!(quick.quick() && !exact.quick());
        assert_eq!(
            add::<F64>(a, b, &mut quick),
            add_exactly::<F64>(a, b, false, &mut exact)
        );
        assert_eq!(
            subtract::<F64>(a, b, &mut quick),
            add_exactly::<F64>(a, b, true, &mut exact)
        );
        assert_eq!(
            multiply::<F64>(a, b, &mut quick),
            multiply_exactly::<F64>(a, b, &mut exact)
        );
        assert_eq!(divide::<F64>(a, b, &mut quick), divide_exactly::<F64>(a, b, &mut exact));
        assert_eq!(
            multiply::<F32>(s, t, &mut quick),
            multiply_exactly::<F32>(s, t, &mut exact)
        );
        assert_eq!(divide::<F32>(s, t, &mut quick), divide_exactly::<F32>(s, t, &mut exact));
        assert_eq!(quick.raised | PE, exact.raised | PE, "{a:#x} {b:#x}");
    }
}

/// A single whose exponent is near that of one, or anything, or zero.
fn single(state: &mut u64) -> u64 {
    let bits = random(state) & 0xffff_ffff;
    match random(state) % 8 {
        0 => bits,
        1 => bits & 0x8000_0000,
        2 => bits & 0x807f_ffff | (bits % 254 + 1) << 23,
        3 => bits & 0x807f_f000 | (120 + bits % 16) << 23,
        _ => bits & 0x807f_ffff | (120 + bits % 16) << 23,
    }
}

/// Fused operations that are composed are those that IEEE 754 has: the language's, and the exact ones with their flags. Addends that
/// cancel the product, all of it or but for its end, are the hard ones.
#[test]
fn a_fused_operation_composed_of_others_is_rounded_once() {
    let mut state = 3;
    let (mut doubles, mut singles) = (0, 0);
    for round in 0..400_000_u64 {
        let (a, b, mut c) = (double(&mut state), double(&mut state), double(&mut state));
        let (s, t, mut u) = (single(&mut state), single(&mut state), single(&mut state));
        let (x, y) = (f64::from_bits(a), f64::from_bits(b));
        let (v, w) = (f32::from_bits(s as u32), f32::from_bits(t as u32));
        match round % 4 {
            0 => {}
            1 => (c, u) = ((-(x * y)).to_bits(), u64::from((-(v * w)).to_bits())),
            // The product's neighbours, and what is half a unit in its last place.
            2 => {
                let by = round / 4 % 5;
                c = (-(x * y)).to_bits().wrapping_add(by).wrapping_sub(2);
                u = u64::from((-(v * w)).to_bits().wrapping_add(by as u32).wrapping_sub(2));
            }
            _ => {
                let (half, quarter) = (2f64.powi(-53), 2f32.powi(-24));
                c = (x * y * half).to_bits() & !0 << (round / 4 % 53);
                u = u64::from((v * w * quarter).to_bits());
            }
        }
        if let Some(result) = F64::quick_fused([a, b, c]) {
            doubles += 1;
            let mut exact = Environment::new(QUIET);
            let expected = multiply_add_exactly::<F64>([a, b, c], false, false, &mut exact);
            assert_eq!(
                result,
                x.mul_add(y, f64::from_bits(c)).to_bits(),
                "{a:#x} {b:#x} {c:#x}"
            );
            assert_eq!((result, exact.raised & !PE), (expected, 0), "{a:#x} {b:#x} {c:#x}");
        }
        if let Some(result) = F32::quick_fused([s, t, u]) {
            singles += 1;
            let mut exact = Environment::new(QUIET);
            let expected = multiply_add_exactly::<F32>([s, t, u], false, false, &mut exact);
            let theirs = v.mul_add(w, f32::from_bits(u as u32)).to_bits();
            assert_eq!(result, u64::from(theirs), "{s:#x} {t:#x} {u:#x}");
            assert_eq!((result, exact.raised & !PE), (expected, 0), "{s:#x} {t:#x} {u:#x}");
        }
    }
    assert!(doubles > 50_000 && singles > 100_000, "{doubles} {singles}");
}

const ONE: u64 = 0x3f80_0000;
const LEAST: u64 = 0x0080_0000;
const SNAN: u64 = 0x7f80_0001;
const QNAN: u64 = 0x7fc0_1234;

/// Rows of SDM Vol. 1: 4.8.4 "Rounding", 4.9.1.5 "Numeric Underflow Exception", tables 4-7 and 4-9, 10.2.3.3 and 10.2.3.4.
// covers: portable/arithmetic
#[test]
fn flags_and_results_of_single_precision() {
    type Row = (
        &'static str,
        fn(u64, u64, &mut Environment) -> u64,
        [u64; 2],
        u32,
        u64,
        u32,
    );
    let rows: &[Row] = &[
        (
            "1 / 3 to nearest",
            divide::<F32>,
            [ONE, 0x4040_0000],
            QUIET,
            0x3eaa_aaab,
            PE,
        ),
        ("1 / 3 down", divide::<F32>, [ONE, 0x4040_0000], DOWN, 0x3eaa_aaaa, PE),
        (
            "-1 / 3 down",
            divide::<F32>,
            [0xbf80_0000, 0x4040_0000],
            DOWN,
            0xbeaa_aaab,
            PE,
        ),
        ("1 / 3 up", divide::<F32>, [ONE, 0x4040_0000], UP, 0x3eaa_aaab, PE),
        (
            "1 / 3 to zero",
            divide::<F32>,
            [ONE, 0x4040_0000],
            ZERO,
            0x3eaa_aaaa,
            PE,
        ),
        ("1 / 0", divide::<F32>, [ONE, 0x8000_0000], QUIET, 0xff80_0000, ZE),
        (
            "denormal / 0: ZE comes first",
            divide::<F32>,
            [1, 0],
            QUIET,
            0x7f80_0000,
            ZE,
        ),
        ("0 / 0", divide::<F32>, [0, 0], QUIET, 0xffc0_0000, IE),
        (
            "denormal / 0 with DAZ",
            divide::<F32>,
            [1, 0],
            QUIET | DAZ,
            0xffc0_0000,
            IE,
        ),
        (
            "largest twice, to nearest",
            add::<F32>,
            [0x7f7f_ffff, 0x7f7f_ffff],
            QUIET,
            0x7f80_0000,
            OE | PE,
        ),
        (
            "largest twice, to zero",
            add::<F32>,
            [0x7f7f_ffff, 0x7f7f_ffff],
            ZERO,
            0x7f7f_ffff,
            OE | PE,
        ),
        (
            "infinity less infinity",
            subtract::<F32>,
            [0x7f80_0000, 0x7f80_0000],
            QUIET,
            0xffc0_0000,
            IE,
        ),
        ("x less x", subtract::<F32>, [ONE, ONE], QUIET, 0, 0),
        ("x less x, down", subtract::<F32>, [ONE, ONE], DOWN, 0x8000_0000, 0),
        (
            "half of the least: exact, so no underflow",
            multiply::<F32>,
            [LEAST, 0x3f00_0000],
            QUIET,
            0x0040_0000,
            0,
        ),
        (
            "half of the least, flushed",
            multiply::<F32>,
            [LEAST, 0x3f00_0000],
            QUIET | FTZ,
            0,
            UE | PE,
        ),
        (
            "a third of the least",
            divide::<F32>,
            [LEAST, 0x4040_0000],
            QUIET,
            0x002a_aaab,
            UE | PE,
        ),
        // The least less a quarter of a unit: rounds to the least; tiny with 24 bits, and so with an exponent without bounds.
        (
            "just below the least",
            multiply::<F32>,
            [LEAST, 0x3f7f_ffff],
            QUIET,
            LEAST,
            UE | PE,
        ),
        ("first NaN of two", add::<F32>, [QNAN, SNAN], QUIET, QNAN, IE),
        (
            "a signaling one made quiet",
            add::<F32>,
            [SNAN, QNAN],
            QUIET,
            SNAN | 0x40_0000,
            IE,
        ),
        ("a quiet one", multiply::<F32>, [ONE, QNAN], QUIET, QNAN, 0),
        ("a NaN hides a denormal", multiply::<F32>, [1, QNAN], QUIET, QNAN, 0),
        ("a denormal", multiply::<F32>, [1, ONE], QUIET, 1, DE),
        (
            "a denormal with DAZ",
            multiply::<F32>,
            [0x8000_0001, ONE],
            QUIET | DAZ,
            0x8000_0000,
            0,
        ),
    ];
    for (name, f, [a, b], controls, result, raised) in rows {
        let mut e = Environment::new(*controls);
        assert_eq!((f(*a, *b, &mut e), e.raised), (*result, *raised), "{name}");
    }
}

/// SDM Vol. 2A "MAXSD" and 2C "VCVTPS2PH": the second of equal operands, of NaNs; half precision's ends.
#[test]
fn choices_and_half_precision() {
    let e = &mut Environment::new(QUIET);
    assert_eq!(extreme::<F32>(0, 0x8000_0000, false, e), 0x8000_0000);
    assert_eq!(extreme::<F32>(QNAN, ONE, true, e), ONE);
    assert_eq!(extreme::<F32>(ONE, SNAN, true, e), SNAN);
    assert_eq!(e.raised, IE);
    for (single, half, raised) in [
        (0x477f_e000, 0x7bff, 0),
        (0x477f_f000, 0x7c00, OE | PE),
        (0x3380_0000, 0x0001, 0),
        (0x3300_0000, 0x0000, UE | PE),
        (0x7fc0_2000, 0x7e01, 0),
    ] {
        let e = &mut Environment::new(QUIET);
        assert_eq!(
            (convert::<F32, F16>(single, e), e.raised),
            (half, raised),
            "{single:#x}"
        );
    }
    for half in 0..0x7c00u64 {
        let e = &mut Environment::new(QUIET);
        let single = convert::<F16, F32>(half, e);
        assert_eq!(convert::<F32, F16>(single, e), half);
    }
}
