//! The memory map that a PC's firmware hands over (ACPI 6.5, 15.1 "INT 15H, E820H"), in the form Linux and multiboot share.

use std::ops::Range;

use crate::memory::{Memory, NotRam};

/// Where the extended BIOS data area of a PC begins: conventional memory ends here.
pub const EBDA_START: u64 = 0x9_fc00;
/// Video memory and adapter ROMs of a PC begin here.
pub const VIDEO_START: u64 = 0xa_0000;
/// The system BIOS area: the ACPI tables are here.
pub const BIOS_START: u64 = 0xe_0000;
/// Extended memory begins here.
pub const EXTENDED_START: u64 = 0x10_0000;

/// The BIOS data area: "base memory size in KiB".
const BASE_MEMORY: u64 = 0x413;
/// The BIOS data area: the segment of the extended BIOS data area.
const EBDA_SEGMENT: u64 = 0x40e;

/// Interrupt vectors of real mode.
const VECTORS: u64 = 256;
/// Where every one of them leads: the address of the handler that does nothing in the BIOS of a PC.
const HANDLER: (u16, u16) = (0xf000, 0xff53);
/// Says "not supported" (CF in the flags that IRET takes) and nothing else:
/// `push bp; mov bp, sp; or byte [bp + 6], 1; pop bp; iret`.
const NOT_SUPPORTED: [u8; 9] = [0x55, 0x89, 0xe5, 0x80, 0x4e, 0x06, 0x01, 0x5d, 0xcf];

/// Writes what a PC's firmware leaves in low memory: the size of conventional memory; where the extended BIOS data area is, whose
/// first byte is its own size in KiB; and interrupt vectors. There is no BIOS to call, and a kernel that calls it all the same (Xen
/// does, for a video mode) learns that there is no such service.
pub fn write_bios_data(memory: &Memory) -> Result<(), NotRam> {
    let (segment, offset) = HANDLER;
    let vector = u32::from(segment) << 16 | u32::from(offset);
    memory.write(0, &vector.to_le_bytes().repeat(VECTORS as usize))?;
    memory.write(u64::from(segment) * 16 + u64::from(offset), &NOT_SUPPORTED)?;
    memory.write(BASE_MEMORY, &((EBDA_START >> 10) as u16).to_le_bytes())?;
    memory.write(EBDA_SEGMENT, &((EBDA_START >> 4) as u16).to_le_bytes())?;
    memory.write(EBDA_START, &[((VIDEO_START - EBDA_START) >> 10) as u8])
}

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
#[path = "e820_test.rs"]
mod tests;
