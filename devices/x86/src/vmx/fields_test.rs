extern crate std;

use std::collections::BTreeSet;
use std::vec::Vec;

use super::*;

// covers: vmx/field-encodings
#[test]
fn every_field_has_a_slot_of_its_own_in_the_region() {
    let mut slots = BTreeSet::new();
    for row in FIELDS {
        let slot = row.field.slot();
        assert!((HEAD..SLOTS).contains(&slot), "{} at {slot}", row.name);
        assert!(slots.insert(slot), "{} shares slot {slot}", row.name);
        // The index leaves the room of its kind alone.
        let (width, kind) = ((row.field.0 >> 13 & 3) as usize, (row.field.0 >> 10 & 3) as usize);
        assert!(
            ((row.field.0 >> 1 & 0x1ff) as usize) < ROOM[width][kind],
            "{}",
            row.name
        );
    }
    assert_eq!(HEAD + ROOM.iter().flatten().sum::<usize>(), 242);
}

#[test]
fn the_table_ascends_and_uses_no_reserved_bit_of_an_encoding() {
    assert!(FIELDS.windows(2).all(|pair| pair[0].field < pair[1].field));
    // SDM Vol. 3C Table 25-21: bits 31:15 and 12 are reserved, bit 0 is the access type.
    let reserved: Vec<_> = FIELDS.iter().filter(|row| row.field.0 & 0xffff_9001 != 0).collect();
    assert!(reserved.is_empty(), "{reserved:?}");
}

#[test]
fn a_field_holds_as_many_bits_as_it_is_wide() {
    for (field, held) in [
        (Field::VPID, 0xffff),
        (Field::EXIT_REASON, 0xffff_ffff),
        (Field::EPT_POINTER, u64::MAX),
        (Field::GUEST_RIP, u64::MAX),
    ] {
        let mut vmcs = Vmcs::default();
        vmcs.set(field, u64::MAX);
        assert_eq!(vmcs.get(field), held);
        assert_eq!(Vmcs::from_bytes(&vmcs.to_bytes()), vmcs);
    }
}

#[test]
fn encodings_name_fields_and_the_upper_halves_of_the_64_bit_ones_alone() {
    for (encoding, found) in [
        (0x4402, Some((Field::EXIT_REASON, false))),
        (0x201A, Some((Field::EPT_POINTER, false))),
        (0x201B, Some((Field::EPT_POINTER, true))),
        (0x4403, None),        // a 32-bit field has no upper half
        (0x681F, None),        // nor has one of natural width
        (0x1_0000_4402, None), // bits 63:32 count in 64-bit mode
        (0x20FE, None),        // nothing there
    ] {
        let row = Field::of_encoding(encoding).map(|(row, high)| (row.field, high));
        assert_eq!(row, found, "{encoding:#x}");
    }
}
