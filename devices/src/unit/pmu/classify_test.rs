use super::*;

// covers: pmu/classes
#[test]
fn opcodes_tell_x87_and_simd_apart() {
    for (bytes, long, class, what) in [
        (&[0xD9, 0xE8][..], true, Class::X87Move, "FLD1"),
        (&[0x66, 0x41, 0xDD, 0x00], true, Class::X87Move, "FLD with prefixes"),
        (&[0xD9, 0xE0], true, Class::X87, "FCHS"),
        (&[0xD9, 0x28], true, Class::X87, "FLDCW"),
        (&[0xDE, 0xC1], false, Class::X87, "FADDP"),
        (&[0xDB, 0x2F], false, Class::X87Move, "FLD of 80 bits"),
        (&[0x41, 0xDD, 0x00], false, Class::Other, "INC ECX, in 32-bit code"),
        (&[0x66, 0x0F, 0xEF, 0xC0], true, Class::Integer, "PXOR"),
        (&[0x0F, 0xEF, 0xC0], true, Class::Mmx, "PXOR of MMX"),
        (&[0x0F, 0x58, 0xC1], false, Class::PackedSingle, "ADDPS"),
        (&[0x66, 0x0F, 0x58, 0xC1], false, Class::PackedDouble, "ADDPD"),
        (&[0xF3, 0x0F, 0x58, 0xC1], false, Class::ScalarSingle, "ADDSS"),
        (&[0xF2, 0x44, 0x0F, 0x58, 0xC1], true, Class::ScalarDouble, "ADDSD"),
        (&[0x66, 0x0F, 0x2E, 0xC1], false, Class::ScalarDouble, "UCOMISD"),
        (&[0x0F, 0x2F, 0xC1], false, Class::ScalarSingle, "COMISS"),
        (&[0x0F, 0x28, 0xC1], false, Class::SimdMove, "MOVAPS"),
        (&[0xF3, 0x0F, 0x6F, 0x00], false, Class::SimdMove, "MOVDQU"),
        (&[0xF2, 0x0F, 0x70, 0xC1, 0], false, Class::Integer, "PSHUFLW"),
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

// covers: pmu/classes
#[test]
fn a_set_of_classes_is_what_an_event_counts() {
    for (set, class, among) in [
        (Classes::X87, Class::X87, true),
        (Classes::X87, Class::X87Move, true),
        (Classes::X87, Class::Mmx, false),
        (Classes::SIMD, Class::Mmx, true),
        (Classes::SIMD, Class::SimdMove, true),
        (Classes::SIMD, Class::Simd, true),
        (Classes::SIMD, Class::X87Move, false),
        (Classes::SIMD, Class::Other, false),
        (Classes::with(Operation::X87), Class::X87Move, false),
        (Classes::with(Operation::Move), Class::SimdMove, true),
    ] {
        assert_eq!(set.has(class), among, "{class:?}");
    }
}
