//! From linear to physical addresses, for those who look and change nothing: no rights are checked, and no accessed or dirty bits
//! set. SDM Vol. 3A chapter 5 "Paging".

use crate::cr::{Cr0, Cr3, Cr4, Efer};

/// The entry leads somewhere.
const PRESENT: u64 = 1 << 0;
/// The entry maps a page where others lead to a table (PS).
const LARGE: u64 = 1 << 7;
/// The address in an entry of eight bytes.
pub const ADDRESS: u64 = 0x000F_FFFF_FFFF_F000;

/// How linear addresses are translated. SDM Vol. 3A 5.1.1 "Four Paging Modes".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They are physical addresses.
    Off,
    /// Two levels with entries of four bytes; `large`: pages of 4 MByte (CR4.PSE).
    Bits32 {
        /// CR4.PSE.
        large: bool,
    },
    /// Three levels, the first with four entries.
    Pae,
    /// Four or five levels: the number of them.
    Long(u32),
}

/// A mode, and where its first table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paging {
    /// The mode.
    pub mode: Mode,
    /// Physical address of the first table.
    pub top: u64,
}

/// An entry on the way to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which table it is in, by the name of its entries.
    pub table: &'static str,
    /// Where it is, physically.
    pub at: u64,
    /// The entry; `None` where no memory is.
    pub entry: Option<u64>,
}

/// Where an address leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// The physical address.
    pub physical: u64,
    /// Bytes of the page from there on.
    pub rest: u64,
}

/// Reads physical memory; `false`: not all of it is there.
pub type Read<'a> = dyn FnMut(u64, &mut [u8]) -> bool + 'a;

impl Paging {
    /// As the control registers have it.
    pub const fn new(cr0: Cr0, cr3: u64, cr4: Cr4, efer: Efer) -> Paging {
        let cr3 = Cr3::from_bits(cr3);
        let (mode, top) = if !cr0.pg() {
            (Mode::Off, 0)
        } else if !cr4.pae() {
            let large = cr4.pse();
            (Mode::Bits32 { large }, cr3.base() & 0xFFFF_F000)
        } else if !efer.lma() {
            (Mode::Pae, cr3.pae_base())
        } else {
            (Mode::Long(if cr4.la57() { 5 } else { 4 }), cr3.base())
        };
        Paging { mode, top }
    }

    /// Where a linear address leads; `None` if nothing is mapped there.
    pub fn translate(&self, read: &mut Read<'_>, linear: u64) -> Option<Mapped> {
        self.walk(read, linear, &mut |_| ())
    }

    /// The same; `tell` hears each entry on the way, and none without paging.
    pub fn walk(&self, read: &mut Read<'_>, linear: u64, tell: &mut dyn FnMut(Step)) -> Option<Mapped> {
        let levels = match self.mode {
            Mode::Off => {
                let physical = linear & 0xFFFF_FFFF;
                let rest = 0x1000 - (physical & 0xFFF);
                return Some(Mapped { physical, rest });
            }
            Mode::Bits32 { large } => return self.walk_32(read, linear as u32, large, tell),
            Mode::Pae => 3,
            Mode::Long(levels) => levels,
        };
        let long = self.mode != Mode::Pae;
        if long {
            // Not canonical: nothing can be mapped there.
            let unused = 64 - (12 + 9 * levels);
            if (linear as i64) << unused >> unused != linear as i64 {
                return None;
            }
        }
        let mut table = self.top;
        for level in (0..levels).rev() {
            let shift = 12 + 9 * level;
            let index = linear >> shift & if !long && level == 2 { 3 } else { 511 };
            let at = table + index * 8;
            let mut bytes = [0; 8];
            let entry = read(at, &mut bytes).then(|| u64::from_le_bytes(bytes));
            tell(Step {
                table: ["PTE", "PDE", "PDPTE", "PML4E", "PML5E"][level as usize],
                at,
                entry,
            });
            let entry = entry.filter(|entry| entry & PRESENT != 0)?;
            if level == 0 || entry & LARGE != 0 && (level == 1 || level == 2 && long) {
                return Some(mapped(entry & ADDRESS, linear, shift));
            }
            table = entry & ADDRESS;
        }
        None
    }

    /// SDM Vol. 3A 5.3 "32-Bit Paging".
    fn walk_32(&self, read: &mut Read<'_>, linear: u32, large: bool, tell: &mut dyn FnMut(Step)) -> Option<Mapped> {
        let mut entry = |table, at| {
            let mut bytes = [0; 4];
            let entry = read(at, &mut bytes).then(|| u64::from(u32::from_le_bytes(bytes)));
            tell(Step { table, at, entry });
            entry.filter(|entry| entry & PRESENT != 0)
        };
        let pde = entry("PDE", self.top + u64::from(linear >> 22) * 4)?;
        if pde & LARGE != 0 && large {
            // Table 5-4: bits 20:13 of the entry are bits 39:32 of the address.
            let high = (pde >> 13 & 0xFF) << 32;
            return Some(mapped(high | pde & 0xFFC0_0000, linear.into(), 22));
        }
        let pte = entry("PTE", (pde & 0xFFFF_F000) + u64::from(linear >> 12 & 0x3FF) * 4)?;
        Some(mapped(pte & 0xFFFF_F000, linear.into(), 12))
    }
}

/// A page of 2^`shift` bytes is mapped; `frame` may have other bits below.
fn mapped(frame: u64, linear: u64, shift: u32) -> Mapped {
    let offset = linear & ((1 << shift) - 1);
    Mapped {
        physical: frame >> shift << shift | offset,
        rest: (1 << shift) - offset,
    }
}

#[cfg(test)]
#[path = "paging_test.rs"]
mod tests;
