use super::*;
use iced_x86::CpuidFeature;

/// What handlers of their own execute, whose encodings thunks could serve as well.
fn own_handler(mnemonic: M) -> bool {
    use M::*;
    matches!(
        mnemonic,
        Movaps
            | Movapd
            | Movups
            | Movupd
            | Movdqa
            | Movdqu
            | Lddqu
            | Movntps
            | Movntpd
            | Movntdq
            | Movntdqa
            | Maskmovq
            | Maskmovdqu
            | Rcpps
            | Rcpss
            | Rsqrtps
            | Rsqrtss
            | Ldmxcsr
            | Stmxcsr
            | Emms
            | Vzeroall
            | Vzeroupper
            | Vmaskmovps
            | Vmaskmovpd
            | Vpmaskmovd
            | Vpmaskmovq
            | Movnti
            | Sfence
            | Lfence
            | Mfence
            | Prefetchnta
            | Prefetcht0
            | Prefetcht1
            | Prefetcht2
            | Pcmpistri
            | Pcmpistrm
            | Pcmpestri
            | Pcmpestrm
            | Pcmpestri64
            | Pcmpestrm64
            | Crc32
    )
}

/// Whatever a thunk would be made of has a row.
// covers: portable/every-form
#[test]
fn every_form_of_a_thunk_has_a_row() {
    let mut missing = Vec::new();
    let mut rows_found = 0;
    for code in Code::values() {
        let op = code.op_code();
        let families: &[CpuidFeature] = match op.encoding() {
            EncodingKind::Legacy => thunk::FAMILIES,
            EncodingKind::VEX => thunk::VEX_FAMILIES,
            _ => continue,
        };
        let features = code.cpuid_features();
        let mnemonic = thunk::legacy(code.mnemonic()).unwrap_or(code.mnemonic());
        let ours = !features.is_empty() && features.iter().all(|f| families.contains(f));
        if !ours || own_handler(mnemonic) || op.op_kinds().iter().any(|kind| format!("{kind:?}").contains("vsib")) {
            continue;
        }
        match rows()[code as usize] {
            Some(_) => rows_found += 1,
            None => missing.push(code),
        }
    }
    assert!(missing.is_empty(), "{missing:?}");
    assert!(rows_found > 800, "{rows_found}");
}

#[test]
fn places_go_through_bytes() {
    for number in 0..16 {
        for place in [
            Place::Mm(number & 7),
            Place::Xmm(number),
            Place::Ymm(number),
            Place::General32(number),
            Place::General64(number),
            Place::Memory,
            Place::None,
        ] {
            assert_eq!(Place::from_bits(place.to_bits()), place);
        }
    }
}

/// SDM Vol. 1 11.5.3.3 "Handling Combinations of Masked and Unmasked Exceptions".
#[test]
fn an_unmasked_invalid_operation_keeps_the_precision_flag_away() {
    let (ie, pe) = (1, 1 << 5);
    let mut controls = 0x1f80;
    assert_eq!(finish(&mut controls, ie | pe), Ok(()));
    assert_eq!(controls, 0x1f80 | ie | pe);
    let mut controls = 0x1f00;
    assert_eq!(finish(&mut controls, ie | pe), Err(SimdException));
    assert_eq!(controls, 0x1f00 | ie);
    let mut controls = 0x0f80;
    assert_eq!(finish(&mut controls, ie | pe), Err(SimdException));
    assert_eq!(controls, 0x0f80 | ie | pe);
}
