//! Exception vectors and their error codes. SDM Vol. 3A 7.13 "Error Code", 7.15 "Exception and Interrupt Reference".

use bitfield_struct::bitfield;
use serde::{Deserialize, Serialize};

/// The error code of #PF. SDM Vol. 3A 5.7 "Page-Fault Exceptions".
#[bitfield(u32)]
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub struct PageFaultCode {
    /// P: the page was present, so a protection was violated.
    pub present: bool,
    /// W/R: the access was a write.
    pub write: bool,
    /// U/S: the access was a user-mode access.
    pub user: bool,
    /// RSVD: a reserved bit was set in a paging-structure entry.
    pub reserved: bool,
    /// I/D: the access was an instruction fetch. Stays 0 unless NX or SMEP is on.
    pub fetch: bool,
    /// PK: a protection key forbids the access.
    pub protection_key: bool,
    /// SS: the access was a shadow-stack access.
    pub shadow_stack: bool,
    #[bits(8)]
    __: u8,
    /// SGX: an enclave's access rules were violated.
    pub sgx: bool,
    __: u16,
}

/// The error code of #TS, #NP, #SS and #GP when a selector is to blame, and of #DF and #AC, where it is 0.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct SelectorError {
    /// EXT: the fault came while an event external to the program was delivered.
    pub external: bool,
    /// IDT: the index is an interrupt vector.
    pub idt: bool,
    /// TI: the index is in the LDT. Counts only without `idt`.
    pub ldt: bool,
    /// Index of the descriptor.
    #[bits(13)]
    pub index: u16,
    __: u16,
}

impl SelectorError {
    /// The code for a selector: its RPL gives way to EXT.
    pub const fn of_selector(selector: u16, external: bool) -> Self {
        Self::from_bits(selector as u32 & 0xFFFC).with_external(external)
    }

    /// The code for an IDT entry.
    pub const fn of_vector(vector: u8, external: bool) -> Self {
        Self::new()
            .with_idt(true)
            .with_index(vector as u16)
            .with_external(external)
    }
}

/// Vectors of the architecture's own exceptions. SDM Vol. 3A Table 7-1 "Protected-Mode Exceptions and Interrupts".
pub mod vector {
    /// #DE, divide error.
    pub const DE: u8 = 0;
    /// #DB, debug exception.
    pub const DB: u8 = 1;
    /// Non-maskable interrupt.
    pub const NMI: u8 = 2;
    /// #BP, breakpoint.
    pub const BP: u8 = 3;
    /// #OF, overflow.
    pub const OF: u8 = 4;
    /// #BR, bound range exceeded.
    pub const BR: u8 = 5;
    /// #UD, invalid opcode.
    pub const UD: u8 = 6;
    /// #NM, device not available.
    pub const NM: u8 = 7;
    /// #DF, double fault.
    pub const DF: u8 = 8;
    /// #TS, invalid TSS.
    pub const TS: u8 = 10;
    /// #NP, segment not present.
    pub const NP: u8 = 11;
    /// #SS, stack fault.
    pub const SS: u8 = 12;
    /// #GP, general protection.
    pub const GP: u8 = 13;
    /// #PF, page fault.
    pub const PF: u8 = 14;
    /// #MF, x87 floating-point error.
    pub const MF: u8 = 16;
    /// #AC, alignment check.
    pub const AC: u8 = 17;
    /// #MC, machine check.
    pub const MC: u8 = 18;
    /// #XM, SIMD floating-point exception.
    pub const XM: u8 = 19;
}

#[cfg(test)]
#[path = "fault_test.rs"]
mod tests;
