use super::*;

// covers: pmu/classes
#[test]
fn opcodes_tell_x87_and_simd_apart() {
    for (bytes, long, class, what) in [
        (&[0xD9, 0xE8][..], true, Class::X87, "FLD1"),
        (&[0x66, 0x41, 0xDD, 0x00], true, Class::X87, "FLD with prefixes"),
        (&[0x41, 0xDD, 0x00], false, Class::Other, "INC ECX, in 32-bit code"),
        (&[0x66, 0x0F, 0xEF, 0xC0], true, Class::Simd, "PXOR"),
        (&[0x0F, 0x58, 0xC1], false, Class::Simd, "ADDPS"),
        (&[0x66, 0x0F, 0x38, 0x00, 0xC1], true, Class::Simd, "PSHUFB"),
        (&[0x0F, 0x38, 0xF0, 0x00], true, Class::Other, "MOVBE"),
        (&[0xC5, 0xF8, 0x77], true, Class::Simd, "VZEROUPPER"),
        (&[0xC5, 0x18], false, Class::Other, "LDS"),
        (&[0x0F, 0xA2], true, Class::Other, "CPUID"),
        (&[0x90], true, Class::Other, "NOP"),
        (&[], true, Class::Other, "nothing"),
    ] {
        assert_eq!(Class::of_bytes(bytes, long), class, "{what}");
    }
}
