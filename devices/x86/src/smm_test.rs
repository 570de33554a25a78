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
