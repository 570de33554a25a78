//! That there is a table for whatever the features promise, and what the masks of each stand for.

use iced_x86::{Code, CpuidFeature as F, EncodingKind, OpCodeOperandKind as K};

use super::{elements, rows};
use iced_x86::Mnemonic as M;

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
    F::AVX512_BF16,
    F::AVX512_FP16,
    F::GFNI,
    F::VAES,
    F::VPCLMULQDQ,
];

/// Instructions of these features, by iced's list, gathers and scatters apart, which the engine does without tables.
fn forms() -> impl Iterator<Item = Code> {
    Code::values().filter(|code| {
        let op = code.op_code();
        let opmask = |kind: &K| matches!(kind, K::k_reg | K::k_rm | K::k_vvvv | K::k_or_mem);
        let encoded = match op.encoding() {
            EncodingKind::EVEX => true,
            EncodingKind::VEX => op.op_kinds().iter().any(opmask),
            _ => false,
        };
        let element = |kind: &K| {
            use K::*;
            matches!(
                kind,
                mem_vsib32x | mem_vsib64x | mem_vsib32y | mem_vsib64y | mem_vsib32z | mem_vsib64z
            )
        };
        encoded
            && code.cpuid_features().iter().all(|feature| FEATURES.contains(feature))
            && !op.op_kinds().iter().any(element)
    })
}

// covers: portable/avx512-forms
#[test]
fn each_form_has_a_row() {
    let without: Vec<_> = forms().filter(|&code| rows()[code as usize].is_none()).collect();
    assert_eq!(without, []);
    assert!(forms().count() > 1700, "{}", forms().count());
}

// covers: portable/avx512-forms
#[test]
fn a_mask_has_a_bit_for_each_element_of_the_result() {
    // Bytes of an element of the result, of the wider of result and source, and whether one alone counts: SDM Vol. 2, "Operation".
    for (mnemonic, expected) in [
        (M::Vaddps, (4, 4, false)),
        (M::Vaddsd, (8, 8, true)),
        (M::Vpminsd, (4, 4, false)),
        (M::Vpabsd, (4, 4, false)),
        (M::Vpdpbusd, (4, 4, false)),
        (M::Vpdpwssds, (4, 4, false)),
        (M::Vpermpd, (8, 8, false)),
        (M::Vfmadd132pd, (8, 8, false)),
        (M::Vfmadd132ss, (4, 4, true)),
        (M::Vbroadcastsd, (8, 8, false)),
        (M::Vbroadcastf64x4, (8, 8, false)),
        (M::Vbroadcastf32x8, (4, 4, false)),
        (M::Vinserti32x4, (4, 4, false)),
        (M::Vmovdqu8, (1, 1, false)),
        (M::Vmovdqu16, (2, 2, false)),
        (M::Vmovdqu32, (4, 4, false)),
        (M::Vmovdqa64, (8, 8, false)),
        (M::Vpunpcklbw, (1, 1, false)),
        (M::Vpunpckhwd, (2, 2, false)),
        (M::Vpunpckhdq, (4, 4, false)),
        (M::Vpunpckhqdq, (8, 8, false)),
        (M::Vpmuludq, (8, 8, false)),
        (M::Vpmaddwd, (4, 4, false)),
        (M::Vpmaddubsw, (2, 2, false)),
        (M::Vpackusdw, (2, 2, false)),
        (M::Vdbpsadbw, (2, 2, false)),
        (M::Vpmovdb, (1, 4, false)),
        (M::Vpmovusqw, (2, 8, false)),
        (M::Vpmovsdw, (2, 4, false)),
        (M::Vpmovsxbq, (8, 8, false)),
        (M::Vcvtpd2ps, (4, 8, false)),
        (M::Vcvttpd2udq, (4, 8, false)),
        (M::Vcvtps2uqq, (8, 8, false)),
        (M::Vcvtuqq2ps, (4, 8, false)),
        (M::Vcvtudq2pd, (8, 8, false)),
        (M::Vcvtps2ph, (2, 4, false)),
        (M::Vcvtph2ps, (4, 4, false)),
        (M::Vcvtneps2bf16, (2, 4, false)),
        (M::Vcvtne2ps2bf16, (2, 2, false)),
        (M::Vdpbf16ps, (4, 4, false)),
        (M::Vaddph, (2, 2, false)),
        (M::Vfnmadd231sh, (2, 2, true)),
        (M::Vfpclassph, (2, 2, false)),
        (M::Vfcmaddcph, (4, 4, false)),
        (M::Vfmulcsh, (4, 4, true)),
        (M::Vcvtph2psx, (4, 4, false)),
        (M::Vcvtps2phx, (2, 4, false)),
        (M::Vcvtph2pd, (8, 8, false)),
        (M::Vcvtpd2ph, (2, 8, false)),
        (M::Vcvtph2uw, (2, 2, false)),
        (M::Vcvtph2dq, (4, 4, false)),
        (M::Vcvttph2uqq, (8, 8, false)),
        (M::Vcvtuw2ph, (2, 2, false)),
        (M::Vcvtudq2ph, (2, 4, false)),
        (M::Vcvtqq2ph, (2, 8, false)),
        (M::Vcvtsh2sd, (8, 8, true)),
        (M::Vmovsh, (2, 2, true)),
        (M::Vgf2p8affineqb, (1, 1, false)),
        (M::Vpalignr, (1, 1, false)),
        (M::Vmovddup, (8, 8, false)),
        (M::Vmovsldup, (4, 4, false)),
    ] {
        assert_eq!(elements(mnemonic), expected, "{mnemonic:?}");
    }
}
