//! Which instructions have a thunk, and what there is to know of each besides its operands.

use iced_x86::{CpuidFeature, EncodingKind, Instruction, Mnemonic, OpKind};
use std::collections::HashMap;
use std::sync::OnceLock;

/// The CPUID features of the legacy-encoded instructions that thunks execute.
pub(crate) const FAMILIES: &[CpuidFeature] = &[
    CpuidFeature::MMX,
    CpuidFeature::SSE,
    CpuidFeature::SSE2,
    CpuidFeature::SSE3,
    CpuidFeature::SSSE3,
    CpuidFeature::SSE4_1,
    CpuidFeature::SSE4_2,
    CpuidFeature::AES,
    CpuidFeature::PCLMULQDQ,
    CpuidFeature::SHA,
    CpuidFeature::GFNI,
];

/// The same for VEX-encoded instructions.
pub(crate) const VEX_FAMILIES: &[CpuidFeature] = &[
    CpuidFeature::AVX,
    CpuidFeature::AVX2,
    CpuidFeature::FMA,
    CpuidFeature::F16C,
    CpuidFeature::AES,
    CpuidFeature::PCLMULQDQ,
    CpuidFeature::VAES,
    CpuidFeature::VPCLMULQDQ,
    CpuidFeature::GFNI,
];

/// Instructions that hosts execute differently, on which a run is not to depend: approximations whose bits the manual leaves open; the
/// dot products, of which AMD's and Intel's CPUs give different NaNs; and the reductions, whose precision flag is known of Intel's
/// alone.
fn differs(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Dpps | Dppd
            | Vdpps
            | Vdppd
            | Vrcpph
            | Vrcpsh
            | Vrsqrtph
            | Vrsqrtsh
            | Vreduceps
            | Vreducepd
            | Vreducess
            | Vreducesd
            | Vreduceph
            | Vreducesh
    )
}

/// Whether every host of x86-64-v1 has these features of vector instructions.
pub(super) fn everywhere(features: &[CpuidFeature]) -> bool {
    use CpuidFeature as F;
    features
        .iter()
        .all(|feature| matches!(feature, F::MMX | F::SSE | F::SSE2))
}

/// Whether every host of x86-64-v1 executes a vector instruction, and as every other does.
pub(crate) fn every_host_executes(insn: &Instruction) -> bool {
    everywhere(insn.cpuid_features()) && !differs(insn.mnemonic())
}

/// Whether this host executes a vector instruction as every other does.
pub(crate) fn host_executes(insn: &Instruction) -> bool {
    use CpuidFeature as F;
    use std::arch::is_x86_feature_detected as host;
    let features = insn.cpuid_features();
    let has = features.iter().all(|feature| match feature {
        F::MMX | F::SSE | F::SSE2 => true,
        F::SSE3 => host!("sse3"),
        F::SSSE3 => host!("ssse3"),
        F::SSE4_1 => host!("sse4.1"),
        F::SSE4_2 => host!("sse4.2"),
        F::AES => host!("aes"),
        F::PCLMULQDQ => host!("pclmulqdq"),
        F::SHA => host!("sha"),
        F::GFNI => host!("gfni"),
        F::AVX => host!("avx"),
        F::AVX2 => host!("avx2"),
        F::FMA => host!("fma"),
        F::F16C => host!("f16c"),
        F::VAES => host!("vaes"),
        F::VPCLMULQDQ => host!("vpclmulqdq"),
        F::AVX512F => host!("avx512f"),
        F::AVX512BW => host!("avx512bw"),
        F::AVX512DQ => host!("avx512dq"),
        F::AVX512VL => host!("avx512vl"),
        F::AVX512CD => host!("avx512cd"),
        F::AVX512_IFMA => host!("avx512ifma"),
        F::AVX512_VBMI => host!("avx512vbmi"),
        F::AVX512_VBMI2 => host!("avx512vbmi2"),
        F::AVX512_VNNI => host!("avx512vnni"),
        F::AVX512_BITALG => host!("avx512bitalg"),
        F::AVX512_VPOPCNTDQ => host!("avx512vpopcntdq"),
        F::AVX512_BF16 => host!("avx512bf16"),
        F::AVX512_FP16 => host!("avx512fp16"),
        _ => false,
    });
    has && !differs(insn.mnemonic())
}

/// The legacy instruction that an AVX instruction is the VEX form of: VADDPS's is ADDPS. AVX's own have none.
pub(crate) fn legacy(mnemonic: Mnemonic) -> Option<Mnemonic> {
    static TWINS: OnceLock<HashMap<Mnemonic, Mnemonic>> = OnceLock::new();
    let twins = TWINS.get_or_init(|| {
        let by_name: HashMap<String, Mnemonic> = Mnemonic::values()
            .map(|m| (format!("{m:?}").to_lowercase(), m))
            .collect();
        by_name
            .iter()
            .filter_map(|(name, &m)| Some((m, *by_name.get(name.strip_prefix('v')?)?)))
            .collect()
    });
    twins.get(&mnemonic).copied()
}

/// Fused multiply-add and the conversions between half and single precision, which came with VEX.
fn vex_arithmetic(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Vcvtph2ps
            | Vcvtps2ph
            | Vfmadd132ps
            | Vfmadd132pd
            | Vfmadd132ss
            | Vfmadd132sd
            | Vfmadd213ps
            | Vfmadd213pd
            | Vfmadd213ss
            | Vfmadd213sd
            | Vfmadd231ps
            | Vfmadd231pd
            | Vfmadd231ss
            | Vfmadd231sd
            | Vfmaddsub132ps
            | Vfmaddsub132pd
            | Vfmaddsub213ps
            | Vfmaddsub213pd
            | Vfmaddsub231ps
            | Vfmaddsub231pd
            | Vfmsub132ps
            | Vfmsub132pd
            | Vfmsub132ss
            | Vfmsub132sd
            | Vfmsub213ps
            | Vfmsub213pd
            | Vfmsub213ss
            | Vfmsub213sd
            | Vfmsub231ps
            | Vfmsub231pd
            | Vfmsub231ss
            | Vfmsub231sd
            | Vfmsubadd132ps
            | Vfmsubadd132pd
            | Vfmsubadd213ps
            | Vfmsubadd213pd
            | Vfmsubadd231ps
            | Vfmsubadd231pd
            | Vfnmadd132ps
            | Vfnmadd132pd
            | Vfnmadd132ss
            | Vfnmadd132sd
            | Vfnmadd213ps
            | Vfnmadd213pd
            | Vfnmadd213ss
            | Vfnmadd213sd
            | Vfnmadd231ps
            | Vfnmadd231pd
            | Vfnmadd231ss
            | Vfnmadd231sd
            | Vfnmsub132ps
            | Vfnmsub132pd
            | Vfnmsub132ss
            | Vfnmsub132sd
            | Vfnmsub213ps
            | Vfnmsub213pd
            | Vfnmsub213ss
            | Vfnmsub213sd
            | Vfnmsub231ps
            | Vfnmsub231pd
            | Vfnmsub231ss
            | Vfnmsub231sd
    )
}

/// Vector instructions that are arithmetic on floating-point values: they obey MXCSR's controls and set its flags.
/// SDM Vol. 1 11.5.1 "SIMD Floating-Point Exceptions" and the exception lists of Vol. 2.
pub fn uses_mxcsr(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    if let Some(twin) = legacy(mnemonic) {
        return uses_mxcsr(twin);
    }
    if vex_arithmetic(mnemonic) {
        return true;
    }
    matches!(
        mnemonic,
        Addps
            | Addss
            | Addpd
            | Addsd
            | Addsubps
            | Addsubpd
            | Subps
            | Subss
            | Subpd
            | Subsd
            | Mulps
            | Mulss
            | Mulpd
            | Mulsd
            | Divps
            | Divss
            | Divpd
            | Divsd
            | Sqrtps
            | Sqrtss
            | Sqrtpd
            | Sqrtsd
            | Maxps
            | Maxss
            | Maxpd
            | Maxsd
            | Minps
            | Minss
            | Minpd
            | Minsd
            | Haddps
            | Haddpd
            | Hsubps
            | Hsubpd
            | Cmpps
            | Cmpss
            | Cmppd
            | Cmpsd
            | Comiss
            | Comisd
            | Ucomiss
            | Ucomisd
            | Dpps
            | Dppd
            | Roundps
            | Roundss
            | Roundpd
            | Roundsd
            | Cvtdq2ps
            | Cvtpi2ps
            | Cvtsi2ss
            | Cvtsi2sd
            | Cvtps2dq
            | Cvttps2dq
            | Cvtpd2dq
            | Cvttpd2dq
            | Cvtps2pi
            | Cvttps2pi
            | Cvtpd2pi
            | Cvttpd2pi
            | Cvtss2si
            | Cvttss2si
            | Cvtsd2si
            | Cvttsd2si
            | Cvtps2pd
            | Cvtss2sd
            | Cvtpd2ps
            | Cvtsd2ss
    )
}

/// The alignment that the memory operand of a vector instruction must have; 1 for none. With legacy encoding every 16-byte
/// operand must be aligned but those of the instructions made for unaligned ones; with VEX none must but those of the aligned and
/// the non-temporal moves, to their own size. SDM Vol. 2A 2.4 "AVX and SSE Instruction Exception Classification".
pub fn needs_alignment(insn: &Instruction) -> u8 {
    use Mnemonic::*;
    if insn.encoding() == EncodingKind::VEX {
        let aligned = matches!(
            insn.mnemonic(),
            Vmovaps | Vmovapd | Vmovdqa | Vmovntps | Vmovntpd | Vmovntdq | Vmovntdqa
        );
        return if aligned { insn.memory_size().size() as u8 } else { 1 };
    }
    let exempt = matches!(
        insn.mnemonic(),
        Movups
            | Movupd
            | Movdqu
            | Lddqu
            | Pcmpestri
            | Pcmpestri64
            | Pcmpestrm
            | Pcmpestrm64
            | Pcmpistri
            | Pcmpistrm
            | Maskmovdqu
    );
    if insn.memory_size().size() == 16 && !exempt {
        16
    } else {
        1
    }
}

/// CVTSS2SI and its like, whose form with a memory operand names no vector register.
pub fn scalar_to_integer(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        legacy(mnemonic).unwrap_or(mnemonic),
        Cvtss2si | Cvttss2si | Cvtsd2si | Cvttsd2si
    )
}

/// Whether a thunk can do this instruction.
pub(crate) fn supported(insn: &Instruction) -> bool {
    use Mnemonic::*;
    let mnemonic = insn.mnemonic();
    let elsewhere = matches!(
        legacy(mnemonic).unwrap_or(mnemonic),
        Ldmxcsr | Stmxcsr | Maskmovq | Maskmovdqu | Rcpps | Rcpss | Rsqrtps | Rsqrtss | Movnti
    ) || matches!(mnemonic, Vmaskmovps | Vmaskmovpd | Vpmaskmovd | Vpmaskmovq)
        || insn.is_vsib();
    let families = match insn.encoding() {
        EncodingKind::Legacy => FAMILIES,
        EncodingKind::VEX => VEX_FAMILIES,
        _ => return false,
    };
    let features = insn.cpuid_features();
    let vector = |i: u32| {
        let register = insn.op_register(i);
        insn.op_kind(i) == OpKind::Register && (register.is_xmm() || register.is_ymm() || register.is_mm())
    };
    !elsewhere
        && !features.is_empty()
        && features.iter().all(|f| families.contains(f))
        && (scalar_to_integer(mnemonic) || (0..insn.op_count()).any(vector))
}

/// Implicit operands of the string compares and the variable blends.
pub(super) struct Implicit {
    /// XMM0 is the mask of a variable blend, or holds words of SHA256RNDS2. (The blends of AVX name their mask.)
    pub reads_xmm0: bool,
    /// PCMPxSTRM leaves its mask in XMM0.
    pub writes_xmm0: bool,
    /// PCMPESTRx takes lengths from RAX and RDX.
    pub lengths: bool,
    /// PCMPxSTRI leaves its index in RCX.
    pub index: bool,
}

impl Implicit {
    pub fn of(mnemonic: Mnemonic) -> Implicit {
        use Mnemonic::*;
        let reads_xmm0 = matches!(mnemonic, Blendvps | Blendvpd | Pblendvb | Sha256rnds2);
        let mnemonic = legacy(mnemonic).unwrap_or(mnemonic);
        Implicit {
            reads_xmm0,
            writes_xmm0: matches!(mnemonic, Pcmpestrm | Pcmpestrm64 | Pcmpistrm),
            lengths: matches!(mnemonic, Pcmpestrm | Pcmpestrm64 | Pcmpestri | Pcmpestri64),
            index: matches!(mnemonic, Pcmpestri | Pcmpestri64 | Pcmpistri),
        }
    }
}

pub(crate) fn writes_flags(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        legacy(mnemonic).unwrap_or(mnemonic),
        Kortestb
            | Kortestw
            | Kortestd
            | Kortestq
            | Ktestb
            | Ktestw
            | Ktestd
            | Ktestq
            | Vtestps
            | Vtestpd
            | Vcomish
            | Vucomish
            | Comiss
            | Comisd
            | Ucomiss
            | Ucomisd
            | Ptest
            | Pcmpestri
            | Pcmpestri64
            | Pcmpestrm
            | Pcmpestrm64
            | Pcmpistri
            | Pcmpistrm
    )
}
