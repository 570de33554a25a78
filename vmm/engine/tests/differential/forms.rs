//! Which instruction forms there are to compare, and which family each belongs to.

use std::collections::BTreeMap;

use iced_x86::{Code, CpuidFeature, EncodingKind, Mnemonic, OpCodeOperandKind};

/// A group of forms that has a test of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Family {
    Mov,
    Alu,
    Shift,
    MulDiv,
    Bit,
    String,
    Stack,
    Flow,
    Cond,
    Flags,
    Xchg,
    Bcd,
    Segment,
    System,
    Nop,
    X87,
    Mmx,
    Sse,
    Sse2,
    Sse3,
    Ssse3,
    Sse41,
    Sse42,
    Aes,
    Pclmul,
    Xsave,
    Bmi,
    Sha,
    Gfni,
    Avx,
    Avx2,
    Fma,
    F16c,
    Vaes,
    Xstate,
    Opmask,
    Avx512f,
    Avx512bw,
    Avx512dq,
    Avx512more,
    Avx512half,
}

impl Family {
    /// Whether it is AVX-512's, and compared on a guest that has it.
    pub fn wide(self) -> bool {
        self >= Family::Opmask
    }
}

/// An instruction form in a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Form {
    /// iced's name for the form.
    pub code: Code,
    /// 16, 32 or 64: the mode of the code segment.
    pub bits: u32,
}

/// Forms by family.
pub type Families = BTreeMap<Family, Vec<Form>>;
/// Forms that are not compared, each with the reason.
pub type LeftOut = Vec<(Form, &'static str)>;

/// What x86-64-v2 has, and AES, PCLMULQDQ and FXSAVE, which every CPU of that level has.
const FEATURES: &[CpuidFeature] = &[
    CpuidFeature::INTEL8086,
    CpuidFeature::INTEL186,
    CpuidFeature::INTEL286,
    CpuidFeature::INTEL386,
    CpuidFeature::INTEL486,
    CpuidFeature::X64,
    CpuidFeature::CMOV,
    CpuidFeature::CX8,
    CpuidFeature::CMPXCHG16B,
    CpuidFeature::FPU,
    CpuidFeature::FPU287,
    CpuidFeature::FPU387,
    CpuidFeature::MMX,
    CpuidFeature::SSE,
    CpuidFeature::SSE2,
    CpuidFeature::SSE3,
    CpuidFeature::SSSE3,
    CpuidFeature::SSE4_1,
    CpuidFeature::SSE4_2,
    CpuidFeature::POPCNT,
    CpuidFeature::AES,
    CpuidFeature::PCLMULQDQ,
    CpuidFeature::FXSR,
    CpuidFeature::CLFSH,
    CpuidFeature::PAUSE,
    CpuidFeature::MULTIBYTENOP,
    CpuidFeature::CPUID,
    CpuidFeature::TSC,
    CpuidFeature::MSR,
    CpuidFeature::SYSCALL,
    CpuidFeature::SEP,
    CpuidFeature::RDPMC,
    CpuidFeature::SMM,
];

type Borrowed = (&'static str, fn() -> bool, CpuidFeature);

/// What goes beyond that level: the toggle that takes it from the guest's model, whether this host has it, and iced's name.
pub const BORROWED: &[Borrowed] = &[
    ("-bmi1", || std::is_x86_feature_detected!("bmi1"), CpuidFeature::BMI1),
    ("-bmi2", || std::is_x86_feature_detected!("bmi2"), CpuidFeature::BMI2),
    ("-abm", || std::is_x86_feature_detected!("lzcnt"), CpuidFeature::LZCNT),
    ("-adx", || std::is_x86_feature_detected!("adx"), CpuidFeature::ADX),
    ("-movbe", || std::is_x86_feature_detected!("movbe"), CpuidFeature::MOVBE),
    ("-sha_ni", || std::is_x86_feature_detected!("sha"), CpuidFeature::SHA),
    ("-gfni", || std::is_x86_feature_detected!("gfni"), CpuidFeature::GFNI),
    ("-xsave", || std::is_x86_feature_detected!("xsave"), CpuidFeature::XSAVE),
    (
        "-xsaveopt",
        || std::is_x86_feature_detected!("xsaveopt"),
        CpuidFeature::XSAVEOPT,
    ),
    (
        "-xsavec",
        || std::is_x86_feature_detected!("xsavec"),
        CpuidFeature::XSAVEC,
    ),
    ("-avx", || std::is_x86_feature_detected!("avx"), CpuidFeature::AVX),
    ("-avx2", || std::is_x86_feature_detected!("avx2"), CpuidFeature::AVX2),
    ("-fma", || std::is_x86_feature_detected!("fma"), CpuidFeature::FMA),
    ("-f16c", || std::is_x86_feature_detected!("f16c"), CpuidFeature::F16C),
    ("-vaes", || std::is_x86_feature_detected!("vaes"), CpuidFeature::VAES),
    (
        "-vpclmulqdq",
        || std::is_x86_feature_detected!("vpclmulqdq"),
        CpuidFeature::VPCLMULQDQ,
    ),
    (
        "-avx_vnni",
        || std::is_x86_feature_detected!("avxvnni"),
        CpuidFeature::AVX_VNNI,
    ),
    ("-clflushopt", clflushopt, CpuidFeature::CLFLUSHOPT),
    ("-clwb", clwb, CpuidFeature::CLWB),
];

/// What AVX-512 is made of, in the same way. The first row is nothing without the three that follow.
pub const WIDE: &[Borrowed] = &[
    ("-avx512f", wide, CpuidFeature::AVX512F),
    ("-avx512vl", wide, CpuidFeature::AVX512VL),
    ("-avx512bw", wide, CpuidFeature::AVX512BW),
    ("-avx512dq", wide, CpuidFeature::AVX512DQ),
    (
        "-avx512cd",
        || std::is_x86_feature_detected!("avx512cd"),
        CpuidFeature::AVX512CD,
    ),
    (
        "-avx512ifma",
        || std::is_x86_feature_detected!("avx512ifma"),
        CpuidFeature::AVX512_IFMA,
    ),
    (
        "-avx512vbmi",
        || std::is_x86_feature_detected!("avx512vbmi"),
        CpuidFeature::AVX512_VBMI,
    ),
    (
        "-avx512_vbmi2",
        || std::is_x86_feature_detected!("avx512vbmi2"),
        CpuidFeature::AVX512_VBMI2,
    ),
    (
        "-avx512_vnni",
        || std::is_x86_feature_detected!("avx512vnni"),
        CpuidFeature::AVX512_VNNI,
    ),
    (
        "-avx512_bitalg",
        || std::is_x86_feature_detected!("avx512bitalg"),
        CpuidFeature::AVX512_BITALG,
    ),
    (
        "-avx512_vpopcntdq",
        || std::is_x86_feature_detected!("avx512vpopcntdq"),
        CpuidFeature::AVX512_VPOPCNTDQ,
    ),
    (
        "-avx512_bf16",
        || std::is_x86_feature_detected!("avx512bf16"),
        CpuidFeature::AVX512_BF16,
    ),
    (
        "-avx512_fp16",
        || std::is_x86_feature_detected!("avx512fp16"),
        CpuidFeature::AVX512_FP16,
    ),
];

/// Whether this host has what the engine asks for before it shows any of AVX-512.
pub fn wide() -> bool {
    std::is_x86_feature_detected!("avx512f")
        && std::is_x86_feature_detected!("avx512vl")
        && std::is_x86_feature_detected!("avx512bw")
        && std::is_x86_feature_detected!("avx512dq")
}

fn clflushopt() -> bool {
    std::arch::x86_64::__cpuid_count(7, 0).ebx >> 23 & 1 != 0
}

fn clwb() -> bool {
    std::arch::x86_64::__cpuid_count(7, 0).ebx >> 24 & 1 != 0
}

/// Whether this host can be asked for the form.
fn comparable(code: Code) -> bool {
    let here = |feature: &CpuidFeature| {
        FEATURES.contains(feature)
            || BORROWED
                .iter()
                .chain(WIDE)
                .any(|(_, present, name)| name == feature && present())
    };
    code.cpuid_features().iter().all(here)
}

/// A gather or a scatter.
pub fn is_gather(code: Code) -> bool {
    use OpCodeOperandKind as K;
    let vsib = |kind: &K| {
        matches!(
            kind,
            K::mem_vsib32x | K::mem_vsib64x | K::mem_vsib32y | K::mem_vsib64y | K::mem_vsib32z | K::mem_vsib64z
        )
    };
    code.op_code().op_kinds().iter().any(vsib)
}

/// Why a form of those features is not compared. Everything not excluded here must be executed (`every_form_is_executed`).
pub fn excluded(code: Code, amd: bool) -> Option<&'static str> {
    use Mnemonic as M;
    let op = code.op_code();
    if op.fwait() {
        return Some("two instructions to the CPU: WAIT and the form without it");
    }
    if format!("{code:?}").starts_with("Reservednop") {
        return Some("another name of encodings that are listed as NOP and PREFETCH");
    }
    match code.mnemonic() {
        M::Xgetbv => Some("answers belong to the host's kernel: tables"),
        M::Syscall | M::Sysenter => Some("enters the host's kernel"),
        M::Cpuid | M::Rdtsc | M::Rdtscp | M::Rdpmc => Some("answers belong to the CPU model and the clock"),
        M::Sgdt | M::Sidt | M::Sldt | M::Str | M::Smsw => Some("under UMIP the host's kernel answers: tables"),
        M::Lar | M::Lsl | M::Verr | M::Verw => Some("answers belong to the host kernel's GDT: tables"),
        M::Sysexit | M::Sysexitq | M::Sysret | M::Sysretq | M::Rsm => {
            Some("whether it is #UD or #GP in ring 3 is the vendor's: tables")
        }
        M::Fldenv | M::Frstor if op.operand_size() == 16 => {
            Some("loads only 16 bits of state that FNSTENV forms compare")
        }
        M::Fdisi | M::Feni | M::Fndisi | M::Fneni | M::Fsetpm | M::Fnsetpm => {
            Some("8087 and 287 no-operations: tables")
        }
        M::Jmpe => Some("Itanium"),
        M::Lss | M::Lfs | M::Lgs | M::Jmp | M::Call if amd && format!("{code:?}").ends_with("m1664") => {
            Some("AMD has no 64-bit far pointers in memory")
        }
        M::Int1 => Some("virtual machines report it before the instruction or after it: tables"),
        M::Vrcpph | M::Vrcpsh | M::Vrsqrtph | M::Vrsqrtsh => {
            Some("approximations whose bits the manual leaves open: their bound is tested")
        }
        M::Ud0 if amd => Some("AMD's UD0 has no ModRM byte"),
        _ => None,
    }
}

/// All forms of a mode that the features have, by family, and those left out with the reason.
pub fn forms(bits: u32, amd: bool) -> (Families, LeftOut) {
    let mut families = Families::new();
    let mut left_out = Vec::new();
    for code in Code::values() {
        let op = code.op_code();
        let here = match bits {
            64 => op.mode64() && op.intel_decoder64(),
            32 => op.mode32() && op.intel_decoder32(),
            _ => op.mode16() && op.intel_decoder16(),
        };
        let encoded = matches!(
            op.encoding(),
            EncodingKind::Legacy | EncodingKind::VEX | EncodingKind::EVEX
        );
        if !op.is_instruction() || !encoded || !here {
            continue;
        }
        if !comparable(code) {
            // FCMOV and FISTTP name two features each, both listed; anything else is beyond the level.
            continue;
        }
        let form = Form { code, bits };
        if bits == 16 && is_gather(code) {
            left_out.push((form, "has 32-bit addresses: compared in 32-bit mode"));
            continue;
        }
        match excluded(code, amd) {
            Some(reason) => left_out.push((form, reason)),
            None => families.entry(family(code)).or_default().push(form),
        }
    }
    (families, left_out)
}

/// Sorts a form into its family.
pub fn family(code: Code) -> Family {
    use CpuidFeature as C;
    use Mnemonic as M;
    let op = code.op_code();
    let features = code.cpuid_features();
    let has = |feature| features.contains(&feature);
    let mmx_operand = op.op_kinds().iter().any(|kind| {
        matches!(
            kind,
            OpCodeOperandKind::mm_reg | OpCodeOperandKind::mm_rm | OpCodeOperandKind::mm_or_mem
        )
    });
    if has(C::FPU) || has(C::FPU287) || has(C::FPU387) {
        return Family::X87;
    }
    if mmx_operand || has(C::MMX) {
        return Family::Mmx;
    }
    let opmask = |kind: &OpCodeOperandKind| {
        use OpCodeOperandKind as K;
        matches!(kind, K::k_reg | K::k_rm | K::k_vvvv | K::k_or_mem)
    };
    if op.encoding() == EncodingKind::VEX && op.op_kinds().iter().any(opmask) {
        return Family::Opmask;
    }
    if op.encoding() == EncodingKind::EVEX {
        let more = |feature: &C| {
            !matches!(
                feature,
                C::AVX512F | C::AVX512VL | C::AVX512BW | C::AVX512DQ | C::AVX512CD
            )
        };
        return match () {
            () if has(C::AVX512_FP16) => Family::Avx512half,
            () if features.iter().any(more) => Family::Avx512more,
            () if has(C::AVX512BW) => Family::Avx512bw,
            () if has(C::AVX512DQ) => Family::Avx512dq,
            () => Family::Avx512f,
        };
    }
    for (feature, family) in [
        (C::XSAVE, Family::Xstate),
        (C::XSAVEOPT, Family::Xstate),
        (C::XSAVEC, Family::Xstate),
        (C::BMI1, Family::Bmi),
        (C::BMI2, Family::Bmi),
        (C::ADX, Family::Bmi),
        (C::SHA, Family::Sha),
        (C::GFNI, Family::Gfni),
        (C::VAES, Family::Vaes),
        (C::VPCLMULQDQ, Family::Vaes),
        (C::FMA, Family::Fma),
        (C::F16C, Family::F16c),
        (C::AVX2, Family::Avx2),
        (C::AVX_VNNI, Family::Avx2),
        (C::AVX, Family::Avx),
        (C::SSE, Family::Sse),
        (C::SSE2, Family::Sse2),
        (C::SSE3, Family::Sse3),
        (C::SSSE3, Family::Ssse3),
        (C::SSE4_1, Family::Sse41),
        (C::SSE4_2, Family::Sse42),
        (C::AES, Family::Aes),
        (C::PCLMULQDQ, Family::Pclmul),
        (C::FXSR, Family::Xsave),
        (C::CMOV, Family::Cond),
    ] {
        if has(feature) {
            return family;
        }
    }
    if code.is_privileged() || has(C::MSR) {
        return Family::System;
    }
    match code.mnemonic() {
        M::Add
        | M::Or
        | M::Adc
        | M::Sbb
        | M::And
        | M::Sub
        | M::Xor
        | M::Cmp
        | M::Test
        | M::Not
        | M::Neg
        | M::Inc
        | M::Dec => Family::Alu,
        M::Rol | M::Ror | M::Rcl | M::Rcr | M::Shl | M::Shr | M::Sal | M::Sar | M::Shld | M::Shrd => Family::Shift,
        M::Mul | M::Imul | M::Div | M::Idiv => Family::MulDiv,
        M::Bt | M::Bts | M::Btr | M::Btc | M::Bsf | M::Bsr | M::Popcnt | M::Bswap => Family::Bit,
        M::Lzcnt | M::Movbe => Family::Bit,
        M::Movsb | M::Movsw | M::Movsq | M::Cmpsb | M::Cmpsw | M::Cmpsq | M::Stosb | M::Stosw | M::Stosd | M::Stosq => {
            Family::String
        }
        // MOVSD and CMPSD are SSE2 mnemonics too; those were taken above.
        M::Movsd | M::Cmpsd | M::Lodsb | M::Lodsw | M::Lodsd | M::Lodsq | M::Scasb | M::Scasw | M::Scasd | M::Scasq => {
            Family::String
        }
        M::Push | M::Pop | M::Pusha | M::Popa | M::Pushad | M::Popad | M::Enter | M::Leave => Family::Stack,
        M::Pushf | M::Pushfd | M::Pushfq | M::Popf | M::Popfd | M::Popfq => Family::Flags,
        M::Clc | M::Stc | M::Cmc | M::Cld | M::Std | M::Lahf | M::Sahf | M::Salc => Family::Flags,
        M::Xchg | M::Cmpxchg | M::Cmpxchg8b | M::Cmpxchg16b | M::Xadd => Family::Xchg,
        M::Daa | M::Das | M::Aaa | M::Aas | M::Aam | M::Aad => Family::Bcd,
        M::Lds | M::Les | M::Lss | M::Lfs | M::Lgs | M::Arpl => Family::Segment,
        M::Nop | M::Pause | M::Clflush | M::Clflushopt | M::Clwb => Family::Nop,
        M::Call
        | M::Jmp
        | M::Ret
        | M::Retf
        | M::Iret
        | M::Iretd
        | M::Iretq
        | M::Int
        | M::Int1
        | M::Int3
        | M::Into
        | M::Bound => Family::Flow,
        M::Ud0 | M::Ud1 | M::Ud2 => Family::Flow,
        _ if code.is_jcc_short_or_near() || code.is_loop() || code.is_loopcc() || code.is_jcx_short() => Family::Flow,
        _ if code.condition_code() != iced_x86::ConditionCode::None => Family::Cond,
        _ => match op.op_kinds() {
            [OpCodeOperandKind::seg_reg, _] => Family::Segment,
            _ => Family::Mov,
        },
    }
}

/// The vector that is all a form can come to in ring 3; `None` for forms that can be executed.
pub fn only_faults(code: Code) -> Option<u8> {
    match code.mnemonic() {
        Mnemonic::Ud0 | Mnemonic::Ud1 | Mnemonic::Ud2 => Some(6),
        Mnemonic::Xsetbv => Some(13),
        _ if family(code) == Family::System => Some(13),
        // Ring 3 has one stack segment, which it already uses: the null selector and all others are refused.
        _ => None,
    }
}
