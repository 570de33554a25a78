//! The memory map that a PC's firmware hands over (ACPI 6.5, 15.1 "INT 15H, E820H"), in the form Linux and multiboot share.

use std::ops::Range;

use crate::memory::Memory;

/// Where the extended BIOS data area of a PC begins: conventional memory ends here.
pub const EBDA_START: u64 = 0x9_fc00;
/// Video memory and adapter ROMs of a PC begin here.
pub const VIDEO_START: u64 = 0xa_0000;
/// The system BIOS area: the ACPI tables are here.
pub const BIOS_START: u64 = 0xe_0000;
/// Extended memory begins here.
pub const EXTENDED_START: u64 = 0x10_0000;

/// What a range of addresses is for (ACPI 6.5, table 15.2 "Address Range Types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// AddressRangeMemory
    Usable = 1,
    /// AddressRangeReserved
    Reserved = 2,
}

/// One line of the map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct E820Entry {
    /// The addresses.
    pub range: Range<u64>,
    /// What they are for.
    pub kind: Kind,
}

/// The map of a machine with this memory, in rising order and without overlaps.
pub fn map(memory: &Memory) -> Vec<E820Entry> {
    let mut entries = vec![
        E820Entry {
            range: 0..EBDA_START,
            kind: Kind::Usable,
        },
        E820Entry {
            range: EBDA_START..VIDEO_START,
            kind: Kind::Reserved,
        },
        E820Entry {
            range: BIOS_START..EXTENDED_START,
            kind: Kind::Reserved,
        },
        E820Entry {
            range: EXTENDED_START..memory.low_end(),
            kind: Kind::Usable,
        },
    ];
    entries.extend(memory.high().map(|range| E820Entry {
        range,
        kind: Kind::Usable,
    }));
    entries
}

/// The usable ranges below 4 GiB, which is as far as 32-bit boot protocols reach.
pub fn usable_low(memory: &Memory) -> Vec<Range<u64>> {
    let entries = map(memory)
        .into_iter()
        .filter(|e| e.kind == Kind::Usable && e.range.end <= 1 << 32);
    entries.map(|e| e.range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // covers: loader/e820
    #[test]
    fn the_map_is_sorted_and_its_usable_part_is_ram() {
        for size in [2 << 20, 512 << 20, 3 << 30, (3 << 30) + 4096, 9 << 30] {
            let memory = Memory::new(size).unwrap();
            let map = map(&memory);
            assert!(map.iter().all(|e| e.range.start < e.range.end));
            assert!(map.windows(2).all(|w| w[0].range.end <= w[1].range.start), "{map:x?}");
            let usable: u64 = map
                .iter()
                .filter(|e| e.kind == Kind::Usable)
                .map(|e| e.range.end - e.range.start)
                .sum();
            assert_eq!(
                usable,
                size - (EXTENDED_START - EBDA_START),
                "all RAM but the PC's hole below 1 MiB"
            );
            for entry in map.iter().filter(|e| e.kind == Kind::Usable) {
                memory.write(entry.range.start, &[1]).unwrap();
                memory.write(entry.range.end - 1, &[1]).unwrap();
            }
        }
        assert_eq!(
            usable_low(&Memory::new(5 << 30).unwrap()),
            [0..EBDA_START, EXTENDED_START..3 << 30]
        );
    }
}
