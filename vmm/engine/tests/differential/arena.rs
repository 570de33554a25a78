//! The linear addresses that both machines see: the same pages, with the same rights, at the same place.
//!
//! Everything lies below 2 GiB, so that 64-bit and 32-bit code reach it alike. PebsInputs each area there is nothing: a page that
//! is not present, so that accesses that leave an area, or straddle its end, fault on both sides.

/// Bytes in a page.
pub const PAGE: u64 = 0x1000;
/// Start of the reserved range. Nothing else of the process is in it.
pub const BASE: u64 = 0x1000_0000;
/// End of the reserved range.
pub const END: u64 = BASE + 0x4_0000;

/// Instructions under test: two pages, writable and executable (self-modifying code), then nothing.
pub const CODE: u64 = BASE + 0x4000;
/// Data: two writable pages, a hole, a read-only page, a writable page, then nothing.
pub const DATA: u64 = BASE + 0x1_0000;
/// The page that may only be read.
pub const READ_ONLY: u64 = DATA + 3 * PAGE;
/// The stack: one page between two holes.
pub const STACK: u64 = BASE + 0x2_0000;

/// A run of pages with the same rights.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    /// Name in reports.
    pub name: &'static str,
    /// First linear address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Whether the code under test may write to it.
    pub writable: bool,
    /// Whether it may be executed.
    pub executable: bool,
}

/// All pages that are there.
pub const AREAS: [Area; 5] = [
    Area {
        name: "code",
        start: CODE,
        len: 2 * PAGE,
        writable: true,
        executable: true,
    },
    Area {
        name: "data",
        start: DATA,
        len: 2 * PAGE,
        writable: true,
        executable: false,
    },
    Area {
        name: "read-only",
        start: READ_ONLY,
        len: PAGE,
        writable: false,
        executable: false,
    },
    Area {
        name: "beyond",
        start: READ_ONLY + PAGE,
        len: PAGE,
        writable: true,
        executable: false,
    },
    Area {
        name: "stack",
        start: STACK,
        len: PAGE,
        writable: true,
        executable: false,
    },
];

/// The area that holds `address`.
pub fn area_of(address: u64) -> Option<usize> {
    AREAS
        .iter()
        .position(|area| address.wrapping_sub(area.start) < area.len)
}

/// Whether an access stays inside the reserved range, so that it can hurt nothing of the test process: it hits a page of an
/// area or a hole.
pub fn contained(address: u64, len: u64) -> bool {
    address >= BASE && len <= END - BASE && address <= END - len
}

/// Whether an address is canonical on no CPU that exists, neither with 4 nor with 5 levels of paging.
pub fn never_canonical(address: u64) -> bool {
    let top = address >> 56;
    top != 0 && top != 0xff
}

/// A machine's copy of the areas.
pub trait Memory {
    /// The bytes of an area.
    fn area(&self, index: usize) -> &[u8];
    /// The bytes of an area, to fill them between two runs.
    fn area_mut(&mut self, index: usize) -> &mut [u8];

    /// Writes bytes that may run over the end of an area; what falls outside is dropped.
    fn poke(&mut self, address: u64, bytes: &[u8]) {
        for (index, area) in AREAS.iter().enumerate() {
            let first = address.max(area.start);
            let last = (address + bytes.len() as u64).min(area.start + area.len);
            if first < last {
                let from = (first - address) as usize;
                let n = (last - first) as usize;
                let at = (first - area.start) as usize;
                self.area_mut(index)[at..at + n].copy_from_slice(&bytes[from..from + n]);
            }
        }
    }

    /// Reads bytes; what is outside the areas reads as zero.
    fn peek(&self, address: u64, bytes: &mut [u8]) {
        for (at, byte) in bytes.iter_mut().enumerate() {
            let address = address + at as u64;
            *byte = area_of(address).map_or(0, |index| self.area(index)[(address - AREAS[index].start) as usize]);
        }
    }
}
