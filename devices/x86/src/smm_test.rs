use super::*;

/// No two things of a map share a byte, and none is where the hidden parts are.
// covers: smm/save-area
#[test]
fn nothing_overlaps() {
    for (wide, map) in [(true, &WIDE[..]), (false, &NARROW[..])] {
        let area = SaveArea::new(wide);
        let mut taken = [None; SIZE];
        for number in 0..10 {
            let at = area.hidden_at(number);
            taken[at..at + 14].fill(Some("hidden"));
        }
        for &(what, offset, size) in map {
            let at = usize::from(offset - FIRST);
            for byte in &mut taken[at..at + usize::from(size)] {
                assert_eq!(byte.replace("named"), None, "{what:?}");
            }
        }
    }
}

/// The offsets that handlers use, as the manual has them: SDM Vol. 3C Tables 32-1 and 32-3.
// covers: smm/save-area
#[test]
fn what_is_set_is_at_the_manuals_offset() {
    for (wide, what, offset, size) in [
        (true, Rip, 0x7fd8, 8),
        (true, Gpr(0), 0x7f5c, 8),
        (true, Gpr(15), 0x7f1c, 8),
        (true, Smbase, 0x7ef8, 4),
        (true, Revision, 0x7efc, 4),
        (true, AutoHalt, 0x7f02, 2),
        (true, IoRip, 0x7de8, 8),
        (false, Rip, 0x7ff0, 4),
        (false, Gpr(0), 0x7fd0, 4),
        (false, Gpr(7), 0x7fec, 4),
        (false, Smbase, 0x7ef8, 4),
    ] {
        let mut area = SaveArea::new(wide);
        area.set(what, 0x1122_3344_5566_7788);
        let at = offset - (area.offset() - ENTRY) as usize;
        let mut seen = [0; 8];
        seen[..size].copy_from_slice(&area.bytes()[at..at + size]);
        let mask = u64::MAX >> (64 - 8 * size);
        assert_eq!(u64::from_le_bytes(seen), 0x1122_3344_5566_7788 & mask, "{what:?}");
        assert_eq!(area.get(what), 0x1122_3344_5566_7788 & mask, "{what:?}");
    }
    let narrow = SaveArea::new(false);
    assert_eq!((narrow.offset(), narrow.bytes().len()), (0xfe00, 0x200));
    let wide = SaveArea::new(true);
    assert_eq!((wide.offset(), wide.bytes().len()), (0xfc00, 0x400));
    let mut area = SaveArea::new(true);
    area.set_table(Table::Gdt, 0xffff_8000_1234_5678);
    assert_eq!(area.get(TableLow(Table::Gdt)), 0x1234_5678);
    assert_eq!(area.table(Table::Gdt), 0xffff_8000_1234_5678);
}

/// SDM Vol. 3A 12.11.2.4 "System-Management Range Register Interface"; the masks are those of 12.11.3 "Example Base and Mask Calculations".
// covers: smm/smrr
#[test]
fn the_system_management_range_is_what_matches_the_base_under_the_mask() {
    // IA32_SMRR_PHYSBASE, IA32_SMRR_PHYSMASK, the first address, the first one behind.
    for (base, mask, first, end) in [
        (0x20_0006, 0xFFE0_0800, 0x20_0000, 0x40_0000),
        (0x3_8000, 0xFFFF_8800, 0x3_8000, 0x4_0000),
        (0x7F80_0006, 0xFF80_0800, 0x7F80_0000, 0x8000_0000u64),
        (0x7F80_0006, 0xFF80_0000, 0, 0),
    ] {
        let mut smrr = Smrr::default();
        assert_eq!(smrr.range(), PhysicalRange::NONE, "after a reset");
        smrr.write_base(base).unwrap();
        smrr.write_mask(mask).unwrap();
        let range = smrr.range();
        assert_eq!(range.contains(first), first != end, "{base:X} {mask:X}");
        assert_eq!(range.contains(end.wrapping_sub(1)), first != end, "{base:X} {mask:X}");
        for outside in [end, first.wrapping_sub(1), first | 1 << 32, first | 1 << 63] {
            assert!(!range.contains(outside), "{base:X} {mask:X}: {outside:X}");
        }
    }
}

/// Figure 12-8 "IA32_SMRR_PHYSBASE and IA32_SMRR_PHYSMASK SMRR Pair", Table 12-8 "Memory Types That Can Be Encoded in MTRRs".
// covers: smm/smrr
#[test]
fn the_system_management_range_registers_refuse_reserved_bits() {
    let mut smrr = Smrr::default();
    for (value, accepted) in [
        (0xFFFF_F006, true),
        (0x1_0000_0006, false),
        (0x106, false),
        (0x802, false),
        (0x3_0002, false),
        (0x3_0003, false),
        (0x3_0000, true),
    ] {
        assert_eq!(smrr.write_base(value).is_ok(), accepted, "base {value:X}");
    }
    for (value, accepted) in [
        (0xFFFF_F800, true),
        (0x1_FFFF_F800, false),
        (0xFFFF_FC00, false),
        (0xFFFF_F801, false),
        (0, true),
    ] {
        assert_eq!(smrr.write_mask(value).is_ok(), accepted, "mask {value:X}");
    }
    assert_eq!((smrr.base, smrr.mask), (0x3_0000, 0));
}
