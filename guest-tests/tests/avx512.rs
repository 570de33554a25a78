//! AVX-512 by tables against an implementation that is not ours: Bochs's software CPU runs the same program.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Duration;

use guest_tests::lab::bochs::Version;
use guest_tests::wide::{Operands, Output, RESULT_BYTES, disk, image};
use guest_tests::{Folder, full, in_minivmm, lab, run};
use iced_x86::{
    Code, CpuidFeature as F, EncodingKind, Instruction, Mnemonic as M, OpCodeOperandKind, OpKind, Register,
    RoundingControl,
};

const LIMIT: Duration = Duration::from_secs(300);

/// What is compared: instructions, and the Bochs and its part that have them.
struct Subject {
    version: Version,
    part: &'static str,
    has: fn(&[F]) -> bool,
    sets: fn() -> Vec<Operands>,
    deviations: fn(M) -> Deviations,
}

/// AVX-512 but for half precision. Of Bochs 2.7's parts this one has the most of it.
const WIDE: Subject = Subject {
    version: Version::System,
    part: "tigerlake",
    has: |features| features.iter().all(|feature| FEATURES.contains(feature)),
    sets,
    deviations,
};

/// Half precision.
const HALF: Subject = Subject {
    version: Version::WithHalfPrecision,
    part: "sapphire_rapids",
    has: |features| features.contains(&F::AVX512_FP16),
    sets: sets_of_halves,
    deviations: deviations_of_halves,
};

/// What of AVX-512 the former has.
const FEATURES: &[F] = &[
    F::AVX512F,
    F::AVX512VL,
    F::AVX512CD,
    F::AVX512DQ,
    F::AVX512BW,
    F::AVX512_IFMA,
    F::AVX512_VBMI,
    F::AVX512_VBMI2,
    F::AVX512_VNNI,
    F::AVX512_BITALG,
    F::AVX512_VPOPCNTDQ,
    F::GFNI,
    F::VAES,
    F::VPCLMULQDQ,
];

/// What of a result Bochs has otherwise.
#[derive(Clone, Copy, Debug)]
enum Apart {
    /// These flags of MXCSR alone.
    Flags(u32),
    /// Any of it, for the instructions that this says.
    Where(fn(&Instruction, &Operands) -> bool),
}

type Deviations = &'static [(Apart, &'static str)];

const DE: u32 = 1 << 1;
const UE: u32 = 1 << 4;
const PE: u32 = 1 << 5;
const DAZ: u32 = 1 << 6;
const PM: u32 = 1 << 12;
const FTZ: u32 = 1 << 15;

/// Where Bochs 2.7 does not do what the manual says: SDM Vol. 2's sections are those of the mnemonics, "Operation" and "SIMD Floating-Point
/// Exceptions".
fn deviations(mnemonic: M) -> Deviations {
    use Apart::{Flags, Where};
    let name = format!("{mnemonic:?}");
    if name.starts_with("Vfm") || name.starts_with("Vfnm") {
        return &[(
            Flags(DE),
            "Vol. 1 4.9.1.2: a denormal operand is one also beside a zero, of which Bochs says nothing",
        )];
    }
    match mnemonic {
        M::Vrsqrt14ps | M::Vrsqrt14pd | M::Vrsqrt14ss | M::Vrsqrt14sd => &[(
            Where(|_, _| true),
            "the relative error is below 2^-14: Bochs has 1 for 2, 8 and so on",
        )],
        M::Vrcp14ps | M::Vrcp14pd | M::Vrcp14ss | M::Vrcp14sd => &[(
            Where(|_, _| true),
            "a denormal result is the result: Bochs loses its leading bit",
        )],
        M::Vcvtps2udq | M::Vcvtpd2udq => &[(
            Flags(PE),
            "flags are those of all elements: Bochs forgets those before an invalid one",
        )],
        M::Vcvttps2udq | M::Vcvttps2uqq | M::Vcvttss2usi => &[(Flags(PE), "2^31 and 2^63 are exact: Bochs flags them")],
        M::Vcvttpd2uqq | M::Vcvttsd2usi => &[(
            Where(|_, _| true),
            "2^64 - 2^11 is an unsigned quadword: Bochs takes it for too large",
        )],
        M::Vcvtuqq2pd => &[(
            Where(|_, _| true),
            "bit 0 of values from 2^63 up counts for rounding: Bochs drops it",
        )],
        M::Vcvtps2ph => &[
            (
                Where(|i, _| i.immediate8() & 7 == 2),
                "what is exact is not rounded up: Bochs does so with denormal results",
            ),
            (
                Where(|i, _| i.suppress_all_exceptions()),
                "SAE suppresses exceptions: Bochs flags them",
            ),
        ],
        M::Vextractps => &[(Where(|_, _| true), "W is ignored: Bochs has #UD for 1")],
        M::Vgetmantpd => &[(
            Where(|_, _| true),
            "of a denormal, too, the significand is in the interval: not in Bochs with a double's lower bits",
        )],
        M::Vgf2p8affineqb | M::Vgf2p8affineinvqb => &[(
            Where(|_, _| true),
            "parity is 1 of an odd number of bits: Bochs has the opposite",
        )],
        M::Vpbroadcastb => &[(
            Where(|i, _| i.op_mask() != Register::None && i.op1_kind() == OpKind::Memory),
            "64 bits of the mask count: Bochs loads nothing under some",
        )],
        M::Vpbroadcastmb2q | M::Vpbroadcastmw2d => &[(
            Where(|_, _| true),
            "bits beyond the vector become zero: they stay in Bochs",
        )],
        M::Vpconflictd | M::Vpconflictq => &[(
            Where(|_, _| true),
            "each earlier element is compared: Bochs leaves some out",
        )],
        M::Vpexpandb | M::Vpexpandw => &[(
            Where(|i, _| i.op1_kind() == OpKind::Memory),
            "elements are next to each other in memory: Bochs loads those whose bits are set",
        )],
        M::Vpmultishiftqb => &[(
            Where(|i, _| i.op_mask() != Register::None),
            "the mask has a bit for each byte: Bochs takes one for each quadword",
        )],
        M::Vpshufbitqmb => &[(Where(|_, _| true), "eight bits of each quadword: Bochs has seven")],
        M::Vrangeps | M::Vrangepd | M::Vrangess | M::Vrangesd => {
            &[(Flags(DE), "a denormal beside a QNaN is not flagged: it is in Bochs")]
        }
        M::Vreduceps | M::Vreducepd | M::Vreducess | M::Vreducesd => &[
            (
                Flags(DE | PE),
                "invalid operation and what the subtraction loses are all it flags, on an Intel CPU (Cascade Lake) as well: Bochs has DE, and \
                 PE for what the rounding takes away",
            ),
            (
                Where(|_, operands| operands.mxcsr & PM == 0),
                "that PE of Bochs is an exception where it is not masked",
            ),
            (
                Where(|i, _| i.suppress_all_exceptions()),
                "SAE is no rounding mode: Bochs takes the bits of the length for one",
            ),
        ],
        M::Vrndscaleps | M::Vrndscalepd | M::Vrndscaless | M::Vrndscalesd => &[(
            Where(|i, _| i.suppress_all_exceptions()),
            "SAE is no rounding mode: Bochs takes the bits of the length for one",
        )],
        M::Vscalefps | M::Vscalefpd | M::Vscalefss | M::Vscalefsd => &[
            (Flags(DE), "a denormal second source is not flagged: it is in Bochs"),
            (
                Flags(UE | PE),
                "a result below the least denormal underflows: Bochs flags nothing where the scale is far below it",
            ),
            (
                Where(|i, _| i.rounding_control() != RoundingControl::None),
                "and is rounded, up to the least denormal: Bochs has zero there",
            ),
            (
                Where(|_, operands| operands.mxcsr & DAZ != 0),
                "DAZ makes a zero of the first source: not in Bochs where the second is zero",
            ),
        ],
        _ => &[],
    }
}

/// The same of Bochs 3.0 and half precision.
fn deviations_of_halves(mnemonic: M) -> Deviations {
    use Apart::{Flags, Where};
    // VCVTPH2PD, VCVTPS2PHX: denormals of half precision are operands and results like others.
    const FLUSHED: (Apart, &str) = (
        Where(|_, operands| operands.mxcsr & (DAZ | FTZ) != 0),
        "DAZ and FTZ do not concern half precision: they do in Bochs",
    );
    const BESIDE_ZERO: (Apart, &str) = (
        Flags(DE),
        "Vol. 1 4.9.1.2: a denormal operand is one also beside a zero, of which Bochs says nothing",
    );
    let name = format!("{mnemonic:?}");
    if name.starts_with("Vf") && name.contains("c") && !name.starts_with("Vfpclass") {
        return &[
            FLUSHED,
            BESIDE_ZERO,
            (
                Where(|_, operands| !operands.mxcsr & 0x1f80 != 0),
                "exceptions are masked, whatever MXCSR says: Bochs has #XM",
            ),
        ];
    }
    if name.starts_with("Vfm") || name.starts_with("Vfnm") {
        return &[FLUSHED, BESIDE_ZERO];
    }
    match mnemonic {
        M::Vcvtph2w
        | M::Vcvtph2uw
        | M::Vcvtph2dq
        | M::Vcvtph2udq
        | M::Vcvtph2qq
        | M::Vcvtph2uqq
        | M::Vcvtsh2si
        | M::Vcvtsh2usi => &[
            FLUSHED,
            (
                Where(|i, operands| match i.rounding_control() {
                    RoundingControl::None => matches!(operands.mxcsr >> 13 & 3, 1 | 2),
                    rounding => matches!(rounding, RoundingControl::RoundDown | RoundingControl::RoundUp),
                }),
                "a denormal is rounded up to 1, and down to -1: Bochs has zero",
            ),
        ],
        M::Vcvttph2dq | M::Vcvttph2udq | M::Vcvttph2qq | M::Vcvttph2uqq => &[(
            Where(|_, _| true),
            "truncation is towards zero: Bochs rounds as MXCSR says",
        )],
        M::Vgetmantph | M::Vgetmantsh => &[(
            Where(|_, _| true),
            "the significand of zero and of infinity is 1: infinity in Bochs",
        )],
        M::Vrcpph | M::Vrcpsh | M::Vrsqrtph | M::Vrsqrtsh => &[(
            Where(|_, _| true),
            "approximations, of which the manual has a bound alone",
        )],
        M::Vreduceph | M::Vreducesh | M::Vrndscaleph | M::Vrndscalesh => &[(
            Where(|_, _| true),
            "less than half of a unit is rounded to zero: Bochs makes a unit of what is just below 2^-15",
        )],
        M::Vscalefph | M::Vscalefsh => &[(
            Where(|_, _| true),
            "the tables of special cases have IE for an SNaN scale of a QNaN, and DE is one of the exceptions: Bochs has neither",
        )],
        _ => &[FLUSHED],
    }
}

/// Whether Bochs deviates from the manual in all by which two results differ.
fn explained(rules: Deviations, case: &Instruction, operands: &Operands, ours: &str, theirs: &str) -> bool {
    let word = |text: &str, n: usize| u64::from_str_radix(text.get(16 * n..16 * n + 16).unwrap_or(""), 16).ok();
    let anything = |(apart, _): &(Apart, &str)| matches!(apart, Apart::Where(is) if is(case, operands));
    if rules.iter().any(anything) {
        return true;
    }
    let flags = rules.iter().fold(0, |all, (apart, _)| match apart {
        Apart::Flags(flags) => all | flags,
        Apart::Where(_) => all,
    });
    (0..RESULT_BYTES / 8).all(|n| match (word(ours, n), word(theirs, n)) {
        (Some(a), Some(b)) => (a ^ b) & !if n == MXCSR { u64::from(flags) } else { 0 } == 0,
        _ => false,
    })
}

/// The quadword of a result that has MXCSR and flags.
const MXCSR: usize = 20;

/// An instruction's variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Register,
    Memory,
    Broadcast,
}

/// The instruction on registers 1 to 3 in the order of its operands, RAX and memory at RBX; none where it has no such form.
fn instruction(code: Code, last: Last, masked: bool, zeroes: bool, immediate: u8) -> Option<Instruction> {
    let op = code.op_code();
    let mut i = Instruction::new();
    i.set_code(code);
    let mut memory = false;
    for (n, kind) in op.op_kinds().iter().enumerate() {
        let name = format!("{kind:?}");
        let number = n as u32 + 1;
        let n = n as u32;
        if *kind == OpCodeOperandKind::imm8 {
            i.set_op_kind(n, OpKind::Immediate8);
            i.set_immediate8(immediate);
            continue;
        }
        if name == "mem" || name.ends_with("_or_mem") && last != Last::Register {
            i.set_op_kind(n, OpKind::Memory);
            i.set_memory_base(Register::RBX);
            memory = true;
            continue;
        }
        let register = match name.split('_').next()? {
            "xmm" => Register::XMM0 + number,
            "ymm" => Register::YMM0 + number,
            "zmm" => Register::ZMM0 + number,
            // k1 is the writemask.
            "k" if n == 0 => Register::K2,
            "k" => Register::K3,
            "r32" => Register::EAX,
            "r64" => Register::RAX,
            _ => return None,
        };
        i.set_op_kind(n, OpKind::Register);
        i.set_op_register(n, register);
    }
    if memory != (last != Last::Register) {
        return None;
    }
    if last == Last::Broadcast {
        if !op.can_broadcast() {
            return None;
        }
        i.set_is_broadcast(true);
    }
    if masked {
        if !op.can_use_op_mask_register() {
            return None;
        }
        i.set_op_mask(Register::K1);
    }
    if zeroes {
        if !op.can_use_zeroing_masking() || i.op_kind(0) == OpKind::Memory {
            return None;
        }
        i.set_zeroing_masking(true);
    }
    Some(i)
}

/// All forms of an instruction.
fn variants(code: Code, cases: &mut Vec<Instruction>) {
    let op = code.op_code();
    let immediates = [0x00, 0xe4, 0x1b, 0x9d, 0x4f, 0x72];
    let has_immediate = op.op_kinds().contains(&OpCodeOperandKind::imm8);
    let turn = code as usize;
    let immediate = |n: usize| immediates[(turn + n) % immediates.len()];
    let plain = if has_immediate { immediates.len() } else { 1 };
    for value in &immediates[..plain] {
        cases.extend(instruction(code, Last::Register, false, false, *value));
    }
    for (n, last, masked, zeroes) in [
        (0, Last::Register, true, false),
        (1, Last::Register, true, true),
        (2, Last::Memory, false, false),
        (3, Last::Memory, true, false),
        (4, Last::Broadcast, true, true),
        (5, Last::Broadcast, false, false),
    ] {
        cases.extend(instruction(code, last, masked, zeroes, immediate(n)));
    }
    let Some(register) = instruction(code, Last::Register, true, false, immediate(1)) else {
        return;
    };
    if op.can_suppress_all_exceptions() && !op.can_use_rounding_control() {
        let mut i = register;
        i.set_suppress_all_exceptions(true);
        cases.push(i);
    }
    if op.can_use_rounding_control() {
        for rounding in [
            RoundingControl::RoundToNearest,
            RoundingControl::RoundDown,
            RoundingControl::RoundUp,
            RoundingControl::RoundTowardZero,
        ] {
            let mut i = register;
            i.set_rounding_control(rounding);
            cases.push(i);
        }
    }
}

/// Every form that Bochs's part has, gathers and scatters apart.
fn cases(subject: &Subject) -> Vec<Instruction> {
    let mut cases = Vec::new();
    for code in Code::values() {
        let op = code.op_code();
        let opmask = |kind: &OpCodeOperandKind| {
            use OpCodeOperandKind as K;
            matches!(kind, K::k_reg | K::k_rm | K::k_vvvv | K::k_or_mem)
        };
        let wide = match op.encoding() {
            EncodingKind::EVEX => true,
            EncodingKind::VEX => op.op_kinds().iter().any(opmask),
            _ => false,
        };
        if wide && op.mode64() && (subject.has)(code.cpuid_features()) {
            variants(code, &mut cases);
        }
    }
    cases
}

/// Numbers that follow from a seed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        // xorshift64*, by Vigna.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn vector(&mut self) -> [u8; 64] {
        let mut v = [0; 64];
        for part in v.chunks_exact_mut(8) {
            part.copy_from_slice(&self.next().to_le_bytes());
        }
        v
    }

    fn of<const N: usize>(&mut self, values: &[[u8; N]]) -> [u8; 64] {
        let mut v = [0; 64];
        for part in v.chunks_exact_mut(N) {
            part.copy_from_slice(&values[self.next() as usize % values.len()]);
        }
        v
    }
}

/// Tables of operands: integers, and values of each class in single and double precision, under controls of all kinds.
fn sets() -> Vec<Operands> {
    let single: Vec<[u8; 4]> = [
        0x0000_0000_u32,
        0x8000_0000,
        0x0000_0001,
        0x807f_ffff,
        0x0080_0000,
        0x3f80_0000,
        0xbf80_0000,
        0x3f80_0001,
        0x4049_0fdb,
        0xc2f6_e979,
        0x4b00_0001,
        0x4f00_0000,
        0xcf00_0000,
        0x4f7f_ffff,
        0x5f00_0000,
        0x7f7f_ffff,
        0xff7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0001,
        0x7f80_0001,
        0xffbf_ffff,
        0x3eaa_aaab,
        0x3f00_0000,
        0xbfc0_0000,
        0x4020_0000,
        0x3300_0000,
        0x387f_e000,
        0x3380_0001,
        0x477f_e000,
        0x4780_0000,
        0xc0e0_0000,
        0x42fe_0000,
        0xc316_0000,
    ]
    .map(u32::to_le_bytes)
    .to_vec();
    let double: Vec<[u8; 8]> = [
        0x0000_0000_0000_0000_u64,
        0x8000_0000_0000_0000,
        0x0000_0000_0000_0001,
        0x800f_ffff_ffff_ffff,
        0x0010_0000_0000_0000,
        0x3ff0_0000_0000_0000,
        0xbff0_0000_0000_0000,
        0x3ff0_0000_0000_0001,
        0x4009_21fb_5444_2d18,
        0xc05e_dd2f_1a9f_be77,
        0x4330_0000_0000_0001,
        0x41e0_0000_0000_0000,
        0xc3e0_0000_0000_0000,
        0x43ef_ffff_ffff_ffff,
        0x7fef_ffff_ffff_ffff,
        0xffef_ffff_ffff_ffff,
        0x7ff0_0000_0000_0000,
        0xfff0_0000_0000_0000,
        0x7ff8_0000_0000_0001,
        0x7ff0_0000_0000_0001,
        0x3fd5_5555_5555_5555,
        0x3fe0_0000_0000_0000,
        0xbff8_0000_0000_0000,
        0x4004_0000_0000_0000,
        0x36a0_0000_0000_0001,
        0x47ef_ffff_f000_0000,
        0x3810_0000_0000_0001,
        0xc01c_0000_0000_0000,
        0x4092_c000_0000_0000,
        0xc090_c800_0000_0000,
    ]
    .map(u64::to_le_bytes)
    .to_vec();
    let near: Vec<[u8; 4]> = [
        1.0_f32, 1.5, -2.25, 0.1, 3.7, -0.3, 100.125, 7.0, -1.0e-3, 12345.678, 0.75, -65504.0,
    ]
    .map(f32::to_le_bytes)
    .to_vec();
    let near_double: Vec<[u8; 8]> = [
        1.0_f64, 1.5, -2.25, 0.1, 3.7, -0.3, 100.125, 7.0, -1.0e-3, 12345.678, 1.0e18, -9.0e9,
    ]
    .map(f64::to_le_bytes)
    .to_vec();
    const DOWN: u32 = 1 << 13;
    const UP: u32 = 2 << 13;
    const ZERO: u32 = 3 << 13;
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let mut all = Vec::new();
    for (kind, mxcsr) in [
        (0, 0x1f80),
        (0, 0x1f80 | UP),
        (1, 0x1f80),
        (1, 0x1f80),
        (1, 0x1f80 | DAZ | FTZ),
        (1, 0x1f80 | DOWN),
        (1, 0x1f80 | UP),
        (2, 0x1f80),
        (2, 0x1f80),
        (2, 0x1f80 | DAZ | FTZ),
        (2, 0x1f80 | DOWN),
        (2, 0x1f80 | ZERO),
        (3, 0x1f80),
        (3, 0x1f80 | UP),
        (4, 0x1f80),
        (4, 0x1f80 | DOWN),
        // Precision and invalid operation are not masked.
        (3, 0x0f00),
        (4, 0x0f00),
    ] {
        let mut vector = || match kind {
            0 => numbers.vector(),
            1 => numbers.of(&single),
            2 => numbers.of(&double),
            3 => numbers.of(&near),
            _ => numbers.of(&near_double),
        };
        let (vectors, memory) = ([vector(), vector(), vector()], vector());
        all.push(Operands {
            vectors,
            memory,
            masks: [numbers.next(), numbers.next(), numbers.next()],
            rax: numbers.next(),
            mxcsr,
        });
    }
    all
}

/// Tables of operands for half precision: values of each class, integers, and values of the other formats that are near those of halves.
fn sets_of_halves() -> Vec<Operands> {
    let half: Vec<[u8; 2]> = [
        0x0000_u16, 0x8000, 0x0001, 0x83ff, 0x0200, 0x01ff, 0x0400, 0x8401, 0x3c00, 0xbc00, 0x3c01, 0x3bff, 0x4248,
        0xc248, 0x6400, 0x63ff, 0x77ff, 0x7800, 0xf800, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e01, 0x7d01, 0xfd23, 0x3555,
        0x3800, 0xbe00, 0x4100, 0x1400, 0xcc80,
    ]
    .map(u16::to_le_bytes)
    .to_vec();
    let near: Vec<[u8; 2]> = [
        0x3c00_u16, 0x3e00, 0xc080, 0x2e66, 0x4366, 0xb4cd, 0x5642, 0x4700, 0x9419, 0x7207, 0x3a00, 0xfbff, 0x0c01,
        0x6c35,
    ]
    .map(u16::to_le_bytes)
    .to_vec();
    // At halves, in the middle of two, and next to both; the ends; wider formats' own denormals.
    let reals = [
        1.0,
        1.0 + 2f64.powi(-11),
        1.0 + 2f64.powi(-11) + 2f64.powi(-20),
        1.0 + 3.0 * 2f64.powi(-11),
        2f64.powi(-24),
        2f64.powi(-25),
        2f64.powi(-25) + 2f64.powi(-40),
        -(2f64.powi(-14) - 2f64.powi(-25)),
        -(2f64.powi(-14) - 2f64.powi(-26)),
        65504.0,
        65519.0,
        -65520.0,
        1.0e9,
        1.0e-20,
        -0.0,
        f64::INFINITY,
        -1234.56789,
        1.0 / 3.0,
        1.0e-40,
    ];
    let single: Vec<[u8; 4]> = reals
        .map(|value| (value as f32).to_bits())
        .into_iter()
        .chain([0x7fc0_2001, 0x7f80_2001, 0xff80_0001])
        .map(u32::to_le_bytes)
        .collect();
    let double: Vec<[u8; 8]> = reals
        .map(f64::to_bits)
        .into_iter()
        .chain([0x7ff8_0400_0000_0001, 0x7ff0_0400_0000_0001, 1])
        .map(u64::to_le_bytes)
        .collect();
    const ROUNDINGS: [u32; 4] = [0, 1 << 13, 2 << 13, 3 << 13];
    const ALL: u32 = 0x1f80;
    let mut numbers = Numbers(0x2545_f491_4f6c_dd1d);
    let mut all = Vec::new();
    let masked = ROUNDINGS.map(|rounding| [0, 1, 1, 2, 3, 4].map(|kind| (kind, ALL | rounding)));
    let flushed = [1, 2, 3, 4].map(|kind| (kind, ALL | DAZ | FTZ));
    // Precision and invalid operation are not masked; underflow; denormals.
    let unmasked = [
        (2, 0x0f00),
        (3, 0x0f00),
        (4, 0x0f00),
        (1, 0x1780),
        (2, 0x1780),
        (3, 0x1780),
        (1, 0x1e80),
        (2, 0x1e80),
    ];
    for (kind, mxcsr) in masked.concat().into_iter().chain(flushed).chain(unmasked) {
        let mut vector = || match kind {
            0 => numbers.vector(),
            1 => numbers.of(&half),
            2 => numbers.of(&near),
            3 => numbers.of(&single),
            _ => numbers.of(&double),
        };
        let (vectors, memory) = ([vector(), vector(), vector()], vector());
        all.push(Operands {
            vectors,
            memory,
            masks: [numbers.next(), numbers.next(), numbers.next()],
            rax: numbers.next() >> (numbers.next() & 63),
            mxcsr,
        });
    }
    all
}

/// What the program prints on our CPU, by tables, and on Bochs's.
fn both(subject: &Subject, cases: &[Instruction], output: Output) -> [Vec<String>; 2] {
    let folder = Folder::new("avx512");
    let kernel = image(cases, &(subject.sets)(), output).unwrap();
    let file = folder.join("kernel");
    fs::write(&file, &kernel).unwrap();
    let mut ours = in_minivmm(&file);
    ours.args(["--cpu-model", "sapphirerapids", "--vector", "tables"]);
    let ours = run(&mut ours, LIMIT);
    let boot = folder.join("disk");
    fs::write(&boot, disk(&kernel).unwrap()).unwrap();
    let mut theirs = lab::bochs::disk(&boot, subject.version, subject.part, &folder, LIMIT).unwrap();
    let theirs = run(&mut theirs, LIMIT);
    [(ours, "minivmm"), (theirs, "Bochs")].map(|(outcome, name)| {
        let lines: Vec<String> = outcome.console.lines().map(str::to_owned).collect();
        let end = lines.iter().position(|line| line == "end");
        let Some(end) = end else {
            let last = lines.iter().rev().take(5).collect::<Vec<_>>();
            let words = lab::bochs::last_words(&folder);
            panic!("{name} did not finish: {last:?}\n{}\n{words}", outcome.errors);
        };
        lines[..end].to_vec()
    })
}

/// The parts of a result that differ.
fn difference(ours: &str, theirs: &str) -> Vec<String> {
    let names = ["k1", "k2", "k3", "RAX", "flags and MXCSR", "vector of the exception"];
    (0..RESULT_BYTES / 8)
        .filter_map(|n| {
            let (a, b) = (ours.get(16 * n..16 * n + 16)?, theirs.get(16 * n..16 * n + 16)?);
            let name = match n {
                0..8 => format!("ZMM1 quadword {n}"),
                8..16 => format!("memory quadword {}", n - 8),
                _ => names.get(n - 16).copied().unwrap_or("rest").into(),
            };
            (a != b).then(|| format!("{name}: {a}, Bochs {b}"))
        })
        .collect()
}

// covers: portable/avx512-bochs
#[test]
fn tables_agree_with_bochs() {
    agree(&WIDE, 8000);
}

// covers: portable/avx512-bochs
#[test]
fn half_precision_agrees_with_bochs() {
    agree(&HALF, 1800);
}

/// Compares at least so many cases.
fn agree(subject: &Subject, least: usize) {
    let cases = cases(subject);
    assert!(cases.len() > least, "{} cases", cases.len());
    let [ours, theirs] = both(subject, &cases, Output::Digests);
    assert_eq!((ours.len(), theirs.len()), (cases.len(), cases.len()));
    let differ: Vec<Instruction> = (0..cases.len())
        .filter(|&n| ours[n] != theirs[n])
        .map(|n| cases[n])
        .collect();
    // What differs is run again and shown as a whole; in the short form one of each instruction that is known to.
    let mut known = BTreeSet::new();
    let mut first = |case: &Instruction| {
        (subject.deviations)(case.mnemonic()).is_empty() || known.insert(format!("{:?}", case.mnemonic()))
    };
    let differ: Vec<Instruction> = match full() {
        true => differ,
        false => differ.into_iter().filter(|case| first(case)).collect(),
    };
    let [ours, theirs] = both(subject, &differ, Output::Everything);
    let sets = (subject.sets)();
    assert_eq!(
        (ours.len(), theirs.len()),
        (differ.len() * sets.len(), differ.len() * sets.len())
    );
    let mut open: BTreeMap<String, (usize, String)> = BTreeMap::new();
    let mut met = BTreeSet::new();
    for (n, case) in differ.iter().enumerate() {
        for (set, operands) in sets.iter().enumerate() {
            let (a, b) = (&ours[n * sets.len() + set], &theirs[n * sets.len() + set]);
            if a == b {
                continue;
            }
            let mnemonic = format!("{:?}", case.mnemonic());
            if explained((subject.deviations)(case.mnemonic()), case, operands, a, b) {
                met.insert(mnemonic);
                continue;
            }
            let (count, shown) = open.entry(mnemonic).or_default();
            *count += 1;
            if *count <= 2 {
                let parts = difference(a, b).join("\n    ");
                *shown += &format!(
                    "{case} ({:?}), set {set}, MXCSR {:x}:\n    {parts}\n",
                    case.code(),
                    operands.mxcsr
                );
            }
        }
    }
    println!("{} cases; Bochs deviates with {met:?}", cases.len());
    let report: String = open
        .values()
        .map(|(count, shown)| format!("{count} of\n{shown}"))
        .collect();
    assert!(open.is_empty(), "{report}");
}
