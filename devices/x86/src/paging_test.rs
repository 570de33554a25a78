//! Tables of every mode, laid out by the figures of SDM Vol. 3A chapter 5 "Paging".

use super::*;
extern crate std;
use std::collections::BTreeMap;
use std::vec::Vec;

// covers: engine/page-walk
#[test]
fn all_paging_modes() {
    let mut memory: BTreeMap<u64, u8> = (0x1000..0x9000).map(|at| (at, 0)).collect();
    let mut put = |at: u64, entry: u64| memory.extend((at..).zip(entry.to_le_bytes()));
    // 4-level: PML4 at 1000H, PDPT 2000H, PD 3000H, PT 4000H.
    put(0x1000 + 511 * 8, 0x2000 | PRESENT);
    put(0x2000, 0x3000 | PRESENT);
    put(0x2008, 0x4000_0000 | PRESENT | LARGE);
    put(0x2010, 0x20_0000 | PRESENT);
    put(0x3000, 0x4000 | PRESENT);
    put(0x3008, 0x60_0000 | PRESENT | LARGE);
    put(0x4008, (1 << 63) | 0x12_3000 | PRESENT);
    // 32-bit: directory at 5000H, table 6000H; entry 1 maps 4 MByte at 4 GByte and 4 MByte.
    put(
        0x5000,
        0x6000 | PRESENT | (0x0040_0000 | 1 << 13 | PRESENT | LARGE) << 32,
    );
    put(0x6000, (0x7000 | PRESENT) << 32);
    // PML5 at 8000H.
    put(0x8000 + 511 * 8, 0x1000 | PRESENT);
    let mut read = |at: u64, bytes: &mut [u8]| {
        bytes.iter_mut().zip(at..).all(|(byte, at)| {
            let known = memory.get(&at);
            *byte = known.copied().unwrap_or_default();
            known.is_some()
        })
    };

    let on = Cr0::new().with_pg(true);
    let (pse, pae, long) = (
        Cr4::new().with_pse(true),
        Cr4::new().with_pae(true),
        Efer::new().with_lma(true),
    );
    let off = Paging::new(Cr0::new(), 0, Cr4::new(), Efer::new());
    let legacy = Paging::new(on, 0x5000, pse, Efer::new());
    let small = Paging::new(on, 0x5000, Cr4::new(), Efer::new());
    let three = Paging::new(on, 0x2000, pae, Efer::new());
    let four = Paging::new(on, 0x1000, pae, long);
    let five = Paging::new(on, 0x8000, pae.with_la57(true), long);
    let top = 0xFFFF_FF80_0000_0000;
    for (paging, linear, expected, entries, what) in [
        (off, 0x1234, Some((0x1234, 0xDCC)), 0, "no paging"),
        (legacy, 0x1ABC, Some((0x7ABC, 0x544)), 2, "32-bit, 4 KiB"),
        (
            legacy,
            0x40_0ABC,
            Some((0x1_0040_0ABC, 0x3F_F544)),
            1,
            "32-bit, 4 MiB above 4 GiB",
        ),
        (
            small,
            0x40_0ABC,
            None,
            2,
            "32-bit without PSE: a table, where no memory is",
        ),
        (legacy, 0x2000, None, 2, "32-bit, not present"),
        (three, 0x1ABC, Some((0x12_3ABC, 0x544)), 3, "PAE, 4 KiB"),
        (three, 0x20_0ABC, Some((0x60_0ABC, 0x1F_F544)), 2, "PAE, 2 MiB"),
        (four, top + 0x1ABC, Some((0x12_3ABC, 0x544)), 4, "4-level, 4 KiB"),
        (four, top + 0x20_0ABC, Some((0x60_0ABC, 0x1F_F544)), 3, "4-level, 2 MiB"),
        (
            four,
            top + 0x4012_3456,
            Some((0x4012_3456, 0x3FED_CBAA)),
            2,
            "4-level, 1 GiB",
        ),
        (four, 0x1000, None, 1, "4-level, not present"),
        (four, top + 0x8000_0000, None, 3, "4-level, a table where no memory is"),
        (four, top + 0x1ABC & !(1 << 63), None, 0, "4-level, not canonical"),
        (five, top + 0x1ABC, Some((0x12_3ABC, 0x544)), 5, "5-level, 4 KiB"),
        (five, 0xFF00_0000_0000_0000, None, 1, "5-level, not present"),
    ] {
        let expected = expected.map(|(physical, rest)| Mapped { physical, rest });
        assert_eq!(paging.translate(&mut read, linear), expected, "{what}");
        let mut steps = Vec::new();
        assert_eq!(paging.walk(&mut read, linear, &mut |step| steps.push(step)), expected);
        assert_eq!(steps.len(), entries, "{what}");
        let missing = steps.iter().any(|step| step.entry.is_none());
        assert_eq!(missing, what.ends_with("no memory is"), "{what}");
    }
}
