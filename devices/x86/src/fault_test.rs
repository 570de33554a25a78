use super::*;

// covers: cpu/error-codes
#[test]
fn error_codes_are_laid_out_as_the_manual_draws_them() {
    for (code, expected, why) in [
        (
            PageFaultCode::new().with_user(true),
            0x4,
            "a user read of a page that is not there",
        ),
        (
            PageFaultCode::new().with_present(true).with_write(true),
            0x3,
            "a supervisor write to a read-only page",
        ),
        (
            PageFaultCode::new().with_present(true).with_reserved(true),
            0x9,
            "a reserved bit",
        ),
        (
            PageFaultCode::new().with_present(true).with_user(true).with_fetch(true),
            0x15,
            "a user fetch, no execute",
        ),
        (PageFaultCode::new().with_protection_key(true), 0x20, "PK"),
        (PageFaultCode::new().with_shadow_stack(true), 0x40, "SS"),
        (PageFaultCode::new().with_sgx(true), 0x8000, "SGX"),
    ] {
        assert_eq!(code.into_bits(), expected, "{why}");
    }
    for (code, expected, why) in [
        (SelectorError::of_selector(0x002B, false), 0x28, "RPL 3 is dropped"),
        (SelectorError::of_selector(0x002B, true), 0x29, "EXT takes its place"),
        (SelectorError::of_selector(0x000F, false), 0x0C, "TI stays"),
        (SelectorError::of_selector(0xFFFF, false), 0xFFFC, "the highest index"),
        (SelectorError::of_vector(0x80, false), 0x402, "vector 80H"),
        (SelectorError::of_vector(0xFF, true), 0x7FB, "the last vector, external"),
    ] {
        assert_eq!(code.into_bits(), expected, "{why}");
    }
    assert!(SelectorError::from_bits(0x0C).ldt());
}
