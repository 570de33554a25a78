//! System-management mode: where an SMI finds its handler, and the area in which the processor keeps what it has left. SDM Vol. 3C
//! chapter 32 "System Management Mode".

use alloc::boxed::Box;

use serde::{Deserialize, Serialize};

use crate::model::{Check, MsrRow};
use crate::msr::{IA32_SMRR_PHYSBASE, IA32_SMRR_PHYSMASK, MsrFault};

/// SMBASE after a reset. SDM Vol. 3C 32.11 "SMBASE Relocation".
pub const SMBASE: u32 = 0x3_0000;
/// From SMBASE to the handler's first instruction, and to where offsets into the state save area begin. SDM Vol. 3C 32.4 "SMRAM".
pub const ENTRY: u64 = 0x8000;
/// The first offset of the state save area of parts with Intel 64 architecture; it ends with 7FFFH.
pub const FIRST: u16 = 0x7c00;
/// The same of parts without.
pub const FIRST_NARROW: u16 = 0x7e00;
/// The size of the area in bytes, from [`FIRST`] on.
pub const SIZE: usize = 0x400;

/// SMM revision identifiers: in bits 15:0 the format, and that there are I/O restart (16) and SMBASE relocation (17). SDM Vol. 3C 32.9
/// "SMM Revision Identifier".
pub mod revision {
    /// Intel 64 architecture, with I/O state.
    pub const WIDE: u32 = 0x3_0101;
    /// IA-32, with I/O state: 30004H or higher.
    pub const NARROW: u32 = 0x3_0007;
}

/// IA32_MTRRCAP: there are system-management range registers.
pub const MTRRCAP_SMRR: u64 = 1 << 11;

/// The system-management range registers, which keep SMRAM for whoever is in SMM. SDM Vol. 3A 12.11.2.4 "System-Management Range Register
/// Interface".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Smrr {
    /// IA32_SMRR_PHYSBASE: the memory type (7:0), the base (31:12).
    pub base: u64,
    /// IA32_SMRR_PHYSMASK: valid (11), the mask (31:12).
    pub mask: u64,
}

/// The registers as they may be written in SMM.
const PHYSBASE: MsrRow =
    MsrRow::storage(IA32_SMRR_PHYSBASE, "IA32_SMRR_PHYSBASE", 0, 0xFFFF_F0FF).checked(Check::MtrrType);
/// See above.
const PHYSMASK: MsrRow = MsrRow::storage(IA32_SMRR_PHYSMASK, "IA32_SMRR_PHYSMASK", 0, FRAMES | VALID);
/// The base, or the mask.
const FRAMES: u64 = 0xFFFF_F000;
const VALID: u64 = 1 << 11;

impl Smrr {
    /// WRMSR of IA32_SMRR_PHYSBASE in SMM.
    ///
    /// # Errors
    /// #GP(0): a reserved bit, or a memory type that does not exist.
    pub fn write_base(&mut self, value: u64) -> Result<(), MsrFault> {
        self.base = PHYSBASE.write(self.base, value)?;
        Ok(())
    }

    /// WRMSR of IA32_SMRR_PHYSMASK in SMM.
    ///
    /// # Errors
    /// #GP(0): a reserved bit.
    pub fn write_mask(&mut self, value: u64) -> Result<(), MsrFault> {
        self.mask = PHYSMASK.write(self.mask, value)?;
        Ok(())
    }

    /// What is kept for SMM.
    pub fn range(&self) -> PhysicalRange {
        if self.mask & VALID == 0 {
            return PhysicalRange::NONE;
        }
        // The range is below 4 GiB, whatever the mask.
        let mask = self.mask & FRAMES | !0 << 32;
        PhysicalRange {
            base: self.base & FRAMES & mask,
            mask,
        }
    }
}

/// Physical addresses that are a base under a mask. SDM Vol. 3A 12.11.3 "Example Base and Mask Calculations".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhysicalRange {
    base: u64,
    mask: u64,
}

impl PhysicalRange {
    /// No address.
    pub const NONE: Self = Self { base: 1, mask: 0 };

    /// Whether an address is in the range.
    #[inline]
    pub const fn contains(&self, address: u64) -> bool {
        address & self.mask == self.base
    }
}

/// What the area holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // They are the manual's names.
pub enum Saved {
    Cr0,
    Cr3,
    Cr4,
    Rflags,
    Efer,
    Rip,
    Dr6,
    Dr7,
    /// ES, CS, SS, DS, FS, GS, LDTR, TR by number.
    Selector(u8),
    /// A general register by number.
    Gpr(u8),
    /// What I/O instruction the SMI came behind. SDM Vol. 3C 32.7.1 "I/O State Implementation".
    IoState,
    /// The linear address of its memory operand.
    IoMemory,
    /// Its RIP.
    IoRip,
    /// Auto HALT restart: bit 0. SDM Vol. 3C 32.10 "Auto HALT Restart".
    AutoHalt,
    /// I/O instruction restart: FFH. SDM Vol. 3C 32.12 "I/O Instruction Restart".
    IoRestart,
    Revision,
    Smbase,
    /// The "enable EPT" VM-execution control at the SMI.
    EptEnabled,
    /// The EPT pointer, with EPT.
    EptPointer,
    /// Bits 31:0 of the bases of GDTR, IDTR and LDTR.
    TableLow(Table),
    /// Bits 63:32.
    TableHigh(Table),
}

/// A descriptor table of [`Saved`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Table {
    Gdt,
    Idt,
    Ldt,
}

use Saved::*;

/// A row of a map: what is saved, its offset from SMBASE plus 8000H, and its size in bytes.
pub type Row = (Saved, u16, u8);

/// SDM Vol. 3C Table 32-3 "SMRAM State Save Map for Intel 64 Architecture".
pub const WIDE: [Row; 47] = [
    (Cr0, 0x7ff8, 8),
    (Cr3, 0x7ff0, 8),
    (Rflags, 0x7fe8, 8),
    (Efer, 0x7fe0, 8),
    (Rip, 0x7fd8, 8),
    (Dr6, 0x7fd0, 8),
    (Dr7, 0x7fc8, 8),
    (Selector(7), 0x7fc4, 4),
    (Selector(6), 0x7fc0, 4),
    (Selector(5), 0x7fbc, 4),
    (Selector(4), 0x7fb8, 4),
    (Selector(3), 0x7fb4, 4),
    (Selector(2), 0x7fb0, 4),
    (Selector(1), 0x7fac, 4),
    (Selector(0), 0x7fa8, 4),
    (IoState, 0x7fa4, 4),
    (IoMemory, 0x7f9c, 8),
    (Gpr(7), 0x7f94, 8),
    (Gpr(6), 0x7f8c, 8),
    (Gpr(5), 0x7f84, 8),
    (Gpr(4), 0x7f7c, 8),
    (Gpr(3), 0x7f74, 8),
    (Gpr(2), 0x7f6c, 8),
    (Gpr(1), 0x7f64, 8),
    (Gpr(0), 0x7f5c, 8),
    (Gpr(8), 0x7f54, 8),
    (Gpr(9), 0x7f4c, 8),
    (Gpr(10), 0x7f44, 8),
    (Gpr(11), 0x7f3c, 8),
    (Gpr(12), 0x7f34, 8),
    (Gpr(13), 0x7f2c, 8),
    (Gpr(14), 0x7f24, 8),
    (Gpr(15), 0x7f1c, 8),
    (AutoHalt, 0x7f02, 2),
    (IoRestart, 0x7f00, 2),
    (Revision, 0x7efc, 4),
    (Smbase, 0x7ef8, 4),
    (EptEnabled, 0x7ee0, 4),
    (EptPointer, 0x7ed8, 8),
    (TableLow(Table::Ldt), 0x7e9c, 4),
    (TableLow(Table::Idt), 0x7e94, 4),
    (TableLow(Table::Gdt), 0x7e8c, 4),
    (Cr4, 0x7e40, 8),
    (IoRip, 0x7de8, 8),
    (TableHigh(Table::Idt), 0x7dd8, 4),
    (TableHigh(Table::Ldt), 0x7dd4, 4),
    (TableHigh(Table::Gdt), 0x7dd0, 4),
];

/// SDM Vol. 3C Table 32-1 "SMRAM State Save Map".
pub const NARROW: [Row; 29] = [
    (Cr0, 0x7ffc, 4),
    (Cr3, 0x7ff8, 4),
    (Rflags, 0x7ff4, 4),
    (Rip, 0x7ff0, 4),
    (Gpr(7), 0x7fec, 4),
    (Gpr(6), 0x7fe8, 4),
    (Gpr(5), 0x7fe4, 4),
    (Gpr(4), 0x7fe0, 4),
    (Gpr(3), 0x7fdc, 4),
    (Gpr(2), 0x7fd8, 4),
    (Gpr(1), 0x7fd4, 4),
    (Gpr(0), 0x7fd0, 4),
    (Dr6, 0x7fcc, 4),
    (Dr7, 0x7fc8, 4),
    (Selector(7), 0x7fc4, 4),
    (Selector(5), 0x7fbc, 4),
    (Selector(4), 0x7fb8, 4),
    (Selector(3), 0x7fb4, 4),
    (Selector(2), 0x7fb0, 4),
    (Selector(1), 0x7fac, 4),
    (Selector(0), 0x7fa8, 4),
    (IoState, 0x7fa4, 4),
    (IoMemory, 0x7fa0, 4),
    (AutoHalt, 0x7f02, 2),
    (IoRestart, 0x7f00, 2),
    (Revision, 0x7efc, 4),
    (Smbase, 0x7ef8, 4),
    // Reserved in the manual, where "CR4 and the hidden part of segment registers are saved, but not readable".
    (Cr4, 0x7eac, 4),
    (IoRip, 0x7eb0, 4),
];

/// The state save area.
#[derive(Clone, PartialEq, Eq)]
pub struct SaveArea {
    bytes: Box<[u8; SIZE]>,
    wide: bool,
}

impl SaveArea {
    /// An area of zeros; `wide`: of a part with Intel 64 architecture.
    pub fn new(wide: bool) -> Self {
        SaveArea {
            bytes: Box::new([0; SIZE]),
            wide,
        }
    }

    /// The offset from SMBASE of the first byte of [`SaveArea::bytes`].
    pub fn offset(&self) -> u64 {
        ENTRY + u64::from(self.first())
    }

    /// It is that of a part with Intel 64 architecture.
    pub fn wide(&self) -> bool {
        self.wide
    }

    fn first(&self) -> u16 {
        if self.wide { FIRST } else { FIRST_NARROW }
    }

    /// The bytes, as they are in memory.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[usize::from(self.first() - FIRST)..]
    }

    /// The same, to be filled from memory.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let first = usize::from(self.first() - FIRST);
        &mut self.bytes[first..]
    }

    fn place(&self, what: Saved) -> Option<(usize, usize)> {
        let map: &[Row] = if self.wide { &WIDE } else { &NARROW };
        let (_, offset, size) = map.iter().find(|row| row.0 == what)?;
        Some((usize::from(offset - FIRST), usize::from(*size)))
    }

    /// What is there; 0 where the part's area has no place for it.
    pub fn get(&self, what: Saved) -> u64 {
        self.place(what).map_or(0, |(at, size)| self.read(at, size))
    }

    /// Puts it there, if the part's area has a place for it.
    pub fn set(&mut self, what: Saved, value: u64) {
        if let Some((at, size)) = self.place(what) {
            self.write(at, size, value);
        }
    }

    /// The base of a descriptor table.
    pub fn table(&self, table: Table) -> u64 {
        self.get(TableHigh(table)) << 32 | self.get(TableLow(table))
    }

    /// Puts the base of a descriptor table there.
    pub fn set_table(&mut self, table: Table, base: u64) {
        self.set(TableLow(table), base & 0xffff_ffff);
        self.set(TableHigh(table), base >> 32);
    }

    /// The part of a segment register that software cannot read: base, limit and attributes. ES, CS, SS, DS, FS, GS, LDTR, TR, then GDTR
    /// and IDTR by number. The manual has it in what is reserved of the area.
    pub fn hidden(&self, number: u8) -> (u64, u32, u16) {
        let at = self.hidden_at(number);
        (
            self.read(at, 8),
            self.read(at + 8, 4) as u32,
            self.read(at + 12, 2) as u16,
        )
    }

    /// Puts it there.
    pub fn set_hidden(&mut self, number: u8, (base, limit, attributes): (u64, u32, u16)) {
        let at = self.hidden_at(number);
        self.write(at, 8, base);
        self.write(at + 8, 4, limit.into());
        self.write(at + 12, 2, attributes.into());
    }

    fn hidden_at(&self, number: u8) -> usize {
        usize::from(self.first() - FIRST) + 16 * usize::from(number.min(9))
    }

    fn read(&self, at: usize, size: usize) -> u64 {
        let mut value = [0; 8];
        value[..size].copy_from_slice(&self.bytes[at..at + size]);
        u64::from_le_bytes(value)
    }

    fn write(&mut self, at: usize, size: usize, value: u64) {
        self.bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[..size]);
    }
}

#[cfg(test)]
#[path = "smm_test.rs"]
mod tests;
