//! The local APIC of the CPU that asks, in the mode that it is in. SDM Vol. 3A chapter 11 "Advanced Programmable Interrupt
//! Controller (APIC)".

use crate::cpu;
use x86::msr::{IA32_APIC_BASE, IA32_X2APIC_BASE};

/// Registers by number: MMIO offset / 16, MSR - 800H. Table 11-1 "Local APIC Register Address Map".
pub mod reg {
    /// Local APIC ID.
    pub const ID: u32 = 0x02;
    /// Version.
    pub const VERSION: u32 = 0x03;
    /// Task priority.
    pub const TPR: u32 = 0x08;
    /// Processor priority.
    pub const PPR: u32 = 0x0A;
    /// End of interrupt.
    pub const EOI: u32 = 0x0B;
    /// Logical destination.
    pub const LDR: u32 = 0x0D;
    /// Destination format.
    pub const DFR: u32 = 0x0E;
    /// Spurious-interrupt vector.
    pub const SVR: u32 = 0x0F;
    /// In service, eight registers.
    pub const ISR: u32 = 0x10;
    /// Requested, eight registers.
    pub const IRR: u32 = 0x20;
    /// Error status.
    pub const ESR: u32 = 0x28;
    /// Interrupt command.
    pub const ICR: u32 = 0x30;
    /// Interrupt command, high half (xAPIC).
    pub const ICR_HIGH: u32 = 0x31;
    /// LVT: timer.
    pub const LVT_TIMER: u32 = 0x32;
    /// LVT: performance counters.
    pub const LVT_PC: u32 = 0x34;
    /// LVT: LINT0.
    pub const LVT_LINT0: u32 = 0x35;
    /// LVT: error.
    pub const LVT_ERROR: u32 = 0x37;
    /// Timer: initial count.
    pub const INITIAL_COUNT: u32 = 0x38;
    /// Timer: current count.
    pub const CURRENT_COUNT: u32 = 0x39;
    /// Timer: divide configuration.
    pub const DIVIDE: u32 = 0x3E;
    /// Self IPI (x2APIC).
    pub const SELF_IPI: u32 = 0x3F;
}

/// IA32_APIC_BASE: enabled.
pub const EN: u64 = 1 << 11;
/// IA32_APIC_BASE: x2APIC mode.
pub const EXTD: u64 = 1 << 10;
/// An LVT entry's mask.
pub const MASKED: u32 = 1 << 16;
/// An LVT entry or ICR: delivery as NMI.
pub const NMI: u32 = 4 << 8;
/// ICR: INIT, edge, asserted.
pub const ICR_INIT: u32 = 0x4500;
/// ICR: start-up, with the page number as vector.
pub const ICR_STARTUP: u32 = 0x4600;
/// ICR: to the CPU itself.
pub const ICR_SELF: u32 = 1 << 18;

const PAGE: u64 = 0xFEE0_0000;

/// Whether the APIC is in x2APIC mode.
pub fn x2apic() -> bool {
    cpu::read(IA32_APIC_BASE) & EXTD != 0
}

/// Reads a register.
pub fn read(register: u32) -> u32 {
    if x2apic() {
        cpu::read(IA32_X2APIC_BASE + register) as u32
    } else {
        // SAFETY: the page is mapped uncached; registers are read as aligned words of 32 bits.
        unsafe { ((PAGE + u64::from(register) * 16) as *const u32).read_volatile() }
    }
}

/// Writes a register.
pub fn write(register: u32, value: u32) {
    if x2apic() {
        cpu::write(IA32_X2APIC_BASE + register, value);
    } else {
        // SAFETY: as for reading.
        unsafe { ((PAGE + u64::from(register) * 16) as *mut u32).write_volatile(value) };
    }
}

/// Enables it by software, with FFH as spurious vector.
pub fn enable() {
    write(reg::SVR, 0x1FF);
}

/// The local APIC ID.
pub fn id() -> u32 {
    if x2apic() { read(reg::ID) } else { read(reg::ID) >> 24 }
}

/// Ends an interrupt.
pub fn eoi() {
    write(reg::EOI, 0);
}

/// Sends an interrupt command to a physical destination.
pub fn send(command: u32, destination: u32) {
    if x2apic() {
        cpu::write(
            IA32_X2APIC_BASE + reg::ICR,
            u64::from(destination) << 32 | u64::from(command),
        );
    } else {
        write(reg::ICR_HIGH, destination << 24);
        write(reg::ICR, command);
        while read(reg::ICR) & 1 << 12 != 0 {
            cpu::pause();
        }
    }
}

/// Whether a vector's bit is set in eight registers from `first` on: [`reg::IRR`] or [`reg::ISR`].
pub fn bit(first: u32, vector: u8) -> bool {
    read(first + u32::from(vector) / 32) >> (vector % 32) & 1 != 0
}
