//! Against MPFR's results, and against the bounds and special cases of the manual.

use std::collections::BTreeMap;

use iced_x86::{Code, Instruction, OpCodeOperandKind as K, OpKind, Register, RoundingControl};

use crate::Vectors;
use crate::fpu::portable::Vector;
use crate::fpu::state::{FpuState, mxcsr};
use crate::fpu::thunk::{Execution, SimdException, prepare_evex};

const DAZ: u32 = mxcsr::DAZ;
const FTZ: u32 = mxcsr::FTZ;

/// An instruction on the registers 1, 2 and 3 in the order of its operands, or RAX.
fn instruction(code: Code, immediate: u8) -> Instruction {
    let mut i = Instruction::new();
    i.set_code(code);
    for (n, kind) in (0..).zip(code.op_code().op_kinds()) {
        let number = n + 1;
        let register = match kind {
            K::imm8 => {
                i.set_op_kind(n, OpKind::Immediate8);
                i.set_immediate8(immediate);
                continue;
            }
            K::r32_reg | K::r32_or_mem => Register::EAX,
            K::r64_reg | K::r64_or_mem => Register::RAX,
            K::k_reg => Register::K0 + number,
            K::ymm_reg | K::ymm_or_mem => Register::YMM0 + number,
            K::zmm_reg | K::zmm_or_mem => Register::ZMM0 + number,
            _ => Register::XMM0 + number,
        };
        i.set_op_kind(n, OpKind::Register);
        i.set_op_register(n, register);
    }
    i
}

/// Executes by tables: XMM1 to XMM3 and RAX before, XMM1 and RAX after, and MXCSR.
fn execute(insn: &Instruction, xmm: [u128; 3], rax: u64, mxcsr: u32) -> (Result<u128, SimdException>, u64, u32) {
    let mut fpu = FpuState::new();
    fpu.mxcsr = mxcsr;
    fpu.xmm[1..4].copy_from_slice(&xmm);
    let mut general = [rax; 16];
    let thunk = prepare_evex(insn, 8, Vectors::Tables).expect("an instruction with a row");
    let Execution::Table(table) = &thunk.form.execution else {
        panic!("{insn}: not by a table");
    };
    let done = table.run(&mut fpu, &mut general, thunk.places, &Vector::ZERO);
    (done.map(|_| fpu.xmm[1]), general[0], fpu.mxcsr)
}

/// The code of a line's instruction: of those on 128 bits, and with a general register as long as the line's.
fn code_of(name: &str, digits: usize) -> Code {
    let is = |code: &Code| {
        let op = code.op_code();
        let kinds = op.op_kinds();
        let long = kinds.contains(&K::r64_reg) || kinds.contains(&K::r64_or_mem);
        let short = kinds.contains(&K::r32_reg) || kinds.contains(&K::r32_or_mem);
        format!("{:?}", code.mnemonic()).to_lowercase() == name
            && !kinds.iter().any(|kind| matches!(kind, K::ymm_reg | K::zmm_reg))
            && (!long || digits == 16)
            && (!short || digits != 16)
    };
    Code::values().find(is).unwrap_or_else(|| panic!("no {name}"))
}

/// Flags of MXCSR in a line, and the result.
fn expected(word: &str) -> (u64, u32) {
    let (result, flags) = word.split_once('/').expect("a result and flags");
    let number = |text| u64::from_str_radix(text, 16).expect("hexadecimal");
    (number(result), number(flags) as u32)
}

// covers: portable/half-precision
#[test]
fn results_and_flags_are_those_of_mpfr() {
    let (mut rows, mut codes) = (BTreeMap::new(), BTreeMap::new());
    for line in include_str!("../../../../tests/data/half-precision.txt").lines() {
        if line.starts_with('#') {
            continue;
        }
        let words: Vec<&str> = line.split(' ').collect();
        let (name, sources, results) = (words[0], &words[1..words.len() - 4], &words[words.len() - 4..]);
        let mut values: Vec<u128> = sources
            .iter()
            .map(|word| u128::from_str_radix(word, 16).expect("hexadecimal"))
            .collect();
        let digits = sources[0].len().max(results[0].find('/').unwrap_or(0));
        let code = *codes.entry((name, digits)).or_insert_with(|| code_of(name, digits));
        // MXCSR's rounding rather than the immediate's.
        let immediate = if name == "vrndscalesh" {
            values.pop().map_or(0, |fraction| fraction as u8) << 4 | 4
        } else {
            0
        };
        let mut insn = instruction(code, immediate);
        let (mut xmm, mut rax) = ([0; 3], 0);
        if insn.op1_register() == Register::EAX || insn.op2_register().is_gpr() {
            rax = values[0] as u64;
        } else if let [factor, other, addend] = values[..] {
            xmm = [addend, factor, other];
        } else {
            let operands = (0..3).filter(|&n| insn.op_register(n) != Register::None).count();
            xmm[operands - values.len()..operands].copy_from_slice(&values);
        }
        let general = insn.op0_register().is_gpr();
        let of = |(value, rax, mxcsr): (Result<u128, SimdException>, u64, u32), digits: usize| {
            let value = value.expect("all exceptions are masked") as u64;
            let result = if general { rax } else { value };
            (result & u64::MAX >> (64 - 4 * digits), mxcsr & mxcsr::FLAGS)
        };
        for (rc, word) in (0..).zip(results) {
            let digits = word.find('/').unwrap_or(0);
            let controls = mxcsr::RESET | rc << 13;
            let (result, flags) = expected(word);
            let ours = of(execute(&insn, xmm, rax, controls), digits);
            assert_eq!(ours, (result, flags), "{line}: rc {rc}, {:x}/{:02x}", ours.0, ours.1);
            // Neither DAZ nor FTZ concerns half precision; the former does the wider formats.
            let flush = if ["vcvtss2sh", "vcvtsd2sh"].contains(&name) {
                FTZ
            } else {
                DAZ | FTZ
            };
            let ours = of(execute(&insn, xmm, rax, controls | flush), digits);
            assert_eq!(ours, (result, flags), "{line}: rc {rc}, MXCSR {flush:x}");
        }
        // The same by embedded rounding, under which nothing is flagged.
        if code.op_code().can_use_rounding_control() {
            for (rounding, word) in [
                RoundingControl::RoundToNearest,
                RoundingControl::RoundDown,
                RoundingControl::RoundUp,
                RoundingControl::RoundTowardZero,
            ]
            .into_iter()
            .zip(results)
            {
                insn.set_rounding_control(rounding);
                let digits = word.find('/').unwrap_or(0);
                let ours = of(execute(&insn, xmm, rax, 3 << 13), digits);
                assert_eq!(ours, (expected(word).0, 0), "{line}: {rounding:?}");
            }
        }
        *rows.entry(name.to_string()).or_insert(0) += 1;
    }
    assert_eq!(rows.len(), 25, "{rows:?}");
    assert!(rows.values().all(|&n| n >= 20), "{rows:?}");
}

const ONE: u64 = 0x3c00;
const INFINITY: u64 = 0x7c00;
const INDEFINITE: u64 = 0xfe00;

/// The value of a finite number.
fn value(bits: u64) -> f64 {
    let (exponent, fraction) = (bits >> 10 & 31, (bits & 0x3ff) as f64);
    let magnitude = match exponent {
        0 => fraction / 1024.0 * 2f64.powi(-14),
        _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent as i32 - 15),
    };
    if bits & 0x8000 != 0 { -magnitude } else { magnitude }
}

/// The bits of a power of two that is a normal number.
fn power(exponent: i32) -> u64 {
    ((exponent + 15) as u64) << 10
}

/// Executes on one element, under controls: the result's low word, and what MXCSR has besides.
fn word(code: Code, sources: [u64; 2], immediate: u8, controls: u32) -> (u64, u32) {
    let xmm = [0, sources[0].into(), sources[1].into()];
    let (result, _, after) = execute(&instruction(code, immediate), xmm, 0, controls);
    (result.expect("no exception") as u64 & 0xffff, after & !controls)
}

// covers: portable/half-approximations
#[test]
fn approximations_are_within_the_manuals_bound() {
    const BOUND: f64 = 1.0 / 2048.0 + 1.0 / 16384.0;
    let reciprocal = |a| word(Code::EVEX_Vrcpsh_xmm_k1z_xmm_xmmm16, [0, a], 0, DAZ | FTZ);
    let root = |a| word(Code::EVEX_Vrsqrtsh_xmm_k1z_xmm_xmmm16, [0, a], 0, DAZ | FTZ);
    for a in 0..0x1_0000_u64 {
        let (magnitude, sign) = (a & 0x7fff, a & 0x8000);
        let ((of, flags), (of_root, root_flags)) = (reciprocal(a), root(a));
        assert_eq!(
            (flags, root_flags),
            (0, 0),
            "{a:x}: neither consults MXCSR nor updates it"
        );
        if magnitude > INFINITY {
            assert_eq!((of, of_root), (a | 0x200, a | 0x200), "{a:x}: a NaN, made quiet");
            continue;
        }
        // SDM Vol. 2C table 5-28 "VRCPPH/VRCPSH Special Cases".
        match magnitude {
            INFINITY => assert_eq!(of, sign, "{a:x}"),
            0..=0x100 => assert_eq!(of, sign | INFINITY, "{a:x}: at most 2^-16"),
            // What is above 2^14 has a denormal reciprocal, whose last bit is 2^-24.
            0x7401.. => assert!((value(of) - 1.0 / value(a)).abs() <= 2f64.powi(-25), "{a:x}: {of:x}"),
            _ => assert!((value(of) * value(a) - 1.0).abs() < BOUND, "{a:x}: {of:x}"),
        }
        // Table 5-38 "VRSQRTPH/VRSQRTSH Special Cases".
        match magnitude {
            0 => assert_eq!(of_root, sign | INFINITY, "{a:x}"),
            _ if sign != 0 => assert_eq!(of_root, INDEFINITE, "{a:x}"),
            INFINITY => assert_eq!(of_root, 0),
            _ => assert!(
                (value(of_root) * value(a).sqrt() - 1.0).abs() < BOUND,
                "{a:x}: {of_root:x}"
            ),
        }
    }
    for n in -14..=14 {
        assert_eq!(reciprocal(power(n)).0, power(-n), "2^{n}");
        assert_eq!(reciprocal(0x8000 | power(n)).0, 0x8000 | power(-n), "-2^{n}");
    }
    for n in -7..=7 {
        assert_eq!(root(power(2 * n)).0, power(-n), "2^{}", 2 * n);
    }
    assert_eq!(root(1).0, power(12), "2^-24, the least denormal");
}

const IE: u32 = 1;
const DE: u32 = 2;
const UE: u32 = 16;
const PE: u32 = 32;

// covers: portable/half-precision
#[test]
fn special_values_are_those_of_the_manuals_tables() {
    let scale = Code::EVEX_Vscalefsh_xmm_k1z_xmm_xmmm16_er;
    let exponent = Code::EVEX_Vgetexpsh_xmm_k1z_xmm_xmmm16_sae;
    let mantissa = Code::EVEX_Vgetmantsh_xmm_k1z_xmm_xmmm16_imm8_sae;
    let reduce = Code::EVEX_Vreducesh_xmm_k1z_xmm_xmmm16_imm8_sae;
    let round = Code::EVEX_Vrndscalesh_xmm_k1z_xmm_xmmm16_imm8_sae;
    let least = Code::EVEX_Vminsh_xmm_k1z_xmm_xmmm16_sae;
    let greatest = Code::EVEX_Vmaxsh_xmm_k1z_xmm_xmmm16_sae;
    let (qnan, snan, minus) = (0x7e12, 0x7d12, 0x8000);
    #[rustfmt::skip] // A table.
    let rows = [
        // SDM Vol. 2C, "VSCALEFPH/VSCALEFSH Special Cases".
        (scale, [qnan, minus | qnan], 0, qnan, 0, "scale: QNaN by QNaN"),
        (scale, [qnan, INFINITY], 0, INFINITY, 0, "scale: QNaN by infinity"),
        (scale, [qnan, minus | INFINITY], 0, 0, 0, "scale: QNaN by minus infinity"),
        (scale, [qnan, snan], 0, qnan, IE, "scale: QNaN by SNaN"),
        (scale, [snan, INFINITY], 0, snan | 0x200, IE, "scale: SNaN by infinity"),
        (scale, [INFINITY, qnan], 0, qnan, 0, "scale: infinity by QNaN"),
        (scale, [minus | INFINITY, INFINITY], 0, minus | INFINITY, 0, "scale: infinity by infinity"),
        (scale, [INFINITY, minus | INFINITY], 0, INDEFINITE, IE, "scale: infinity by minus infinity"),
        (scale, [minus, INFINITY], 0, INDEFINITE, IE, "scale: zero by infinity"),
        (scale, [minus, minus | INFINITY], 0, minus, 0, "scale: zero by minus infinity"),
        (scale, [minus | ONE, INFINITY], 0, minus | INFINITY, 0, "scale: -1 by infinity"),
        (scale, [minus | ONE, minus | INFINITY], 0, minus, 0, "scale: -1 by minus infinity"),
        (scale, [ONE, 1], 0, ONE, 0, "scale: a denormal scale is no denormal operand"),
        // "VGETEXPPH/VGETEXPSH Special Cases".
        (exponent, [0, snan], 0, snan | 0x200, IE, "exponent of an SNaN"),
        (exponent, [0, minus | INFINITY], 0, INFINITY, 0, "exponent of an infinity"),
        (exponent, [0, minus], 0, minus | INFINITY, 0, "exponent of zero"),
        (exponent, [0, minus | ONE], 0, 0, 0, "exponent of -1"),
        (exponent, [0, 0x7bff], 0, 0x4b80, 0, "exponent of the greatest: 15"),
        (exponent, [0, 1], 0, 0xce00, DE, "exponent of the least denormal: -24"),
        // "GetMant() Special Float Values Behavior".
        (mantissa, [0, snan], 8, snan | 0x200, IE, "mantissa of an SNaN"),
        (mantissa, [0, INFINITY], 2, ONE, 0, "mantissa of infinity: 1 in any interval"),
        (mantissa, [0, 0], 2, ONE, 0, "mantissa of zero"),
        (mantissa, [0, minus], 0, minus | ONE, 0, "mantissa of -0"),
        (mantissa, [0, minus], 4, ONE, 0, "mantissa of -0 without its sign"),
        (mantissa, [0, minus | INFINITY], 8, INDEFINITE, IE, "mantissa of minus infinity, refused"),
        (mantissa, [0, minus | ONE], 8, INDEFINITE, IE, "mantissa of -1, refused"),
        (mantissa, [0, minus | 0x4248], 0, minus | 0x3e48, 0, "mantissa from 1 to 2"),
        (mantissa, [0, 0x4248], 1, 0x3a48, 0, "mantissa from 1/2 to 2, of an odd exponent"),
        (mantissa, [0, 0x4648], 1, 0x3e48, 0, "mantissa from 1/2 to 2, of an even one"),
        (mantissa, [0, 0x4248], 2, 0x3a48, 0, "mantissa from 1/2 to 1"),
        (mantissa, [0, 0x4248], 3, 0x3a48, 0, "mantissa from 3/4 to 3/2, above"),
        (mantissa, [0, 0x4048], 3, 0x3c48, 0, "mantissa from 3/4 to 3/2, below"),
        (mantissa, [0, 3], 0, 0x3e00, DE, "mantissa of a denormal"),
        // "VREDUCEPH/VREDUCESH Special Cases"; the rounding is the immediate's.
        (reduce, [0, minus], 0, 0, 0, "reduced -0"),
        (reduce, [0, minus], 1, minus, 0, "reduced -0, rounded down"),
        (reduce, [0, 0x4200], 1, minus, 0, "reduced 3, rounded down"),
        (reduce, [0, minus | INFINITY], 1, 0, 0, "reduced minus infinity"),
        (reduce, [0, snan], 0, snan | 0x200, IE, "reduced SNaN"),
        (reduce, [0, 0x3c01], 3, 0x1400, 0, "reduced 1 + 2^-10, which is exact"),
        (reduce, [0, 1], 3, 1, 0, "a denormal is no denormal operand, and what is left no underflow"),
        (reduce, [0, minus | 1], 1, 0x3bff, PE, "reduced from below zero: 1 - 2^-24, rounded down as well"),
        (reduce, [0, minus | 1], 9, 0x3bff, 0, "the same with precision suppressed"),
        // "VRNDSCALEPH/VRNDSCALESH Special Cases", and its description: UE without PE.
        (round, [0, snan], 0, snan | 0x200, IE, "rounded SNaN"),
        (round, [0, minus | INFINITY], 0, minus | INFINITY, 0, "rounded minus infinity"),
        (round, [0, minus], 0, minus, 0, "rounded -0"),
        (round, [0, 0x1ff], 0xf0, 0x200, UE | PE, "2^-15 less a unit, to a multiple of 2^-15"),
        (round, [0, 0x1ff], 0xf8, 0x200, UE, "the same with precision suppressed"),
        (round, [0, 0x200], 0xf0, 0x200, 0, "2^-15 itself"),
        (round, [0, 1], 2, ONE, PE, "the least denormal, rounded up"),
        // Vol. 2A "MINPS": the second of two zeros, of NaNs.
        (least, [0, minus], 0, minus, 0, "least of zeros"),
        (greatest, [minus, 0], 0, 0, 0, "greatest of zeros"),
        (least, [qnan, ONE], 0, ONE, IE, "least of a QNaN and 1"),
        (greatest, [ONE, snan], 0, snan, IE, "greatest of 1 and an SNaN"),
        (least, [1, minus | 1], 0, minus | 1, DE, "least of denormals"),
        (greatest, [1, ONE], 0, ONE, DE, "greatest of a denormal and 1"),
    ];
    for (code, sources, immediate, result, flags, why) in rows {
        // DAZ and FTZ make no difference.
        for controls in [mxcsr::RESET, mxcsr::RESET | DAZ | FTZ] {
            let ours = word(code, sources, immediate, controls);
            assert_eq!(ours, (result, flags), "{why}: {:x}, {:x}", ours.0, ours.1);
        }
    }
}

/// An opmask as an instruction on XMM2 and XMM3, or XMM2 alone, leaves it in k1; and the flags.
fn mask(code: Code, sources: [u64; 2], immediate: u8, controls: u32) -> (u64, u32) {
    let mut fpu = FpuState::new();
    fpu.mxcsr = controls;
    fpu.xmm[2..4].copy_from_slice(&sources.map(u128::from));
    let thunk = prepare_evex(&instruction(code, immediate), 8, Vectors::Tables).expect("a comparison");
    let Execution::Table(table) = &thunk.form.execution else {
        panic!("not by a table");
    };
    let done = table.run(&mut fpu, &mut [0; 16], thunk.places, &Vector::ZERO);
    assert!(done.is_ok());
    (fpu.avx512.k[1], fpu.mxcsr & !controls)
}

// covers: portable/half-precision
#[test]
fn comparisons_and_classes_are_the_manuals() {
    let classify = Code::EVEX_Vfpclasssh_kr_k1_xmmm16_imm8;
    for (class, bits) in [
        (0x01, 0x7e00),
        (0x01, 0xffff),
        (0x02, 0x0000),
        (0x04, 0x8000),
        (0x08, 0x7c00),
        (0x10, 0xfc00),
        (0x20, 0x0001),
        (0x60, 0x83ff),
        (0x40, 0x8400),
        (0x40, 0xfbff),
        (0x80, 0x7c01),
        (0x80, 0xfdff),
        (0x00, 0x3c00),
    ] {
        for bit in 0..8 {
            let is = u64::from(class >> bit & 1 != 0);
            // Denormals are a class of their own also under DAZ.
            let ours = mask(classify, [bits, 0], 1 << bit, mxcsr::RESET | DAZ);
            assert_eq!(ours, (is, 0), "{bits:x}: bit {bit}");
        }
    }
    let compare = Code::EVEX_Vcmpsh_kr_k1_xmm_xmmm16_imm8_sae;
    for (a, b, predicate, holds, flags, why) in [
        (1, 0, 0, 0, DE, "a denormal is not zero, under DAZ neither"),
        (0x8000, 0, 0, 1, 0, "-0 equals 0"),
        (0x8001, 1, 1, 1, DE, "less"),
        (0x7e00, 0, 0, 0, 0, "EQ_OQ does not signal"),
        (0x7e00, 0, 0x10, 0, IE, "EQ_OS does"),
        (0x7e00, 1, 3, 1, 0, "UNORD_Q: a NaN hides a denormal"),
        (0x7d00, 0, 3, 1, IE, "an SNaN signals"),
        (0xfbff, 0xfc00, 0x0e, 1, 0, "GT_OS"),
    ] {
        let ours = mask(compare, [a, b], predicate, mxcsr::RESET | DAZ);
        assert_eq!(ours, (holds, flags), "{why}");
    }
}

// covers: portable/half-exceptions
#[test]
fn exceptions_that_are_not_masked_stop_all_but_complex_multiplication() {
    let add = Code::EVEX_Vaddsh_xmm_k1z_xmm_xmmm16_er;
    let multiply = Code::EVEX_Vmulsh_xmm_k1z_xmm_xmmm16_er;
    let narrow = Code::EVEX_Vcvtss2sh_xmm_k1z_xmm_xmmm32_er;
    let round = Code::EVEX_Vrndscalesh_xmm_k1z_xmm_xmmm16_imm8_sae;
    let reduce = Code::EVEX_Vreducesh_xmm_k1z_xmm_xmmm16_imm8_sae;
    let unmasked = |flag: u32| mxcsr::RESET & !(flag << 7);
    const KEPT: u128 = 0x1234;
    #[rustfmt::skip] // A table.
    let rows = [
        (add, [1, 0], 0, unmasked(DE) | DAZ, DE, "a denormal operand, also under DAZ"),
        (add, [ONE, 0x0c00], 0, unmasked(PE), PE, "an inexact sum"),
        (multiply, [0x0400, 0x3800], 0, unmasked(UE), UE, "tiny, though exact"),
        (multiply, [0x0400, 0x3800], 0, unmasked(UE) | FTZ, UE, "the same under FTZ"),
        (narrow, [0, 0x3380_0000], 0, unmasked(UE), UE, "2^-24 of single precision: tiny and exact"),
        (round, [0, 0x200], 0xf0, unmasked(UE), UE, "2^-15 rounded to itself: tiny and exact"),
    ];
    for (code, sources, immediate, controls, flags, why) in rows {
        let xmm = [KEPT, sources[0].into(), sources[1].into()];
        let insn = instruction(code, immediate);
        let (result, _, after) = execute(&insn, xmm, 0, controls);
        assert_eq!((result, after & !controls), (Err(SimdException), flags), "{why}");
    }
    // SDM Vol. 2C "VREDUCEPH": no underflow exception, even if unmasked.
    assert_eq!(word(reduce, [0, 1], 3, unmasked(UE)), (1, 0));
    // "VFMULCPH": as if all exceptions were masked; flags are set.
    let complex = Code::EVEX_Vfmulcsh_xmm_k1z_xmm_xmmm32_er;
    let overflow = execute(&instruction(complex, 0), [KEPT, 0x7bff, 0x7bff], 0, 0);
    assert_eq!((overflow.0, overflow.2), (Ok(INFINITY.into()), 0x28));
    let invalid = execute(&instruction(complex, 0), [KEPT, 0x7c00, 0x0001], 0, 0);
    assert_eq!((invalid.0, invalid.2), (Ok(0xfe00_7c00), IE | DE));
}
