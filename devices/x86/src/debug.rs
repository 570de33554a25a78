//! Debug registers. SDM Vol. 3B 18.2 "Debug Registers".

use bitfield_struct::bitfield;

use crate::cpuid::Features;

/// DR6. SDM Vol. 3B 18.2.3 "Debug Status Register (DR6)".
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Dr6 {
    /// B0 to B3: the condition of the breakpoint was met.
    #[bits(4)]
    pub breakpoints: u8,
    #[bits(7)]
    __: u8,
    /// BLD, clear when a bus lock was detected; 1 where that cannot be.
    pub no_bus_lock: bool,
    __: bool,
    /// BD: the next instruction accesses a debug register.
    pub register_access: bool,
    /// BS: single-step.
    pub single_step: bool,
    /// BT: task switch.
    pub task_switch: bool,
    /// RTM, clear when the exception came in a transaction; 1 where that cannot be.
    pub no_transaction: bool,
    #[bits(47)]
    __: u64,
}

impl Dr6 {
    /// What stands in it after power-up: SDM Vol. 3A Table 10-1 "IA-32 and Intel 64 Processor States Following Power-up,
    /// Reset, or INIT".
    pub const RESET: u64 = 0xFFFF_0FF0;

    /// The value that a write leaves: reserved bits keep their fixed values. Bits 63:32 have been checked.
    pub fn written(value: u64, features: Features) -> u64 {
        let mut writable = 0xE00F;
        if features.bus_lock_detect() {
            writable |= 1 << 11;
        }
        if features.rtm() {
            writable |= 1 << 16;
        }
        value & writable | Self::RESET & !writable
    }
}

/// What a breakpoint watches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Watched {
    /// Execution of the instruction that begins there (00).
    Execute,
    /// Data writes (01).
    Write,
    /// I/O reads and writes (10, with CR4.DE).
    Port,
    /// Data reads and writes, not instruction fetches (11).
    ReadWrite,
}

/// One of the four breakpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breakpoint {
    /// What it watches for.
    pub watched: Watched,
    /// The first byte (of data and ports: aligned to the length).
    pub first: u64,
    /// Bytes: 1, 2, 4 or 8.
    pub len: u64,
    /// L or G is set.
    pub enabled: bool,
}

impl Breakpoint {
    /// Whether any byte of a span lies within.
    pub fn touches(&self, address: u64, size: u64) -> bool {
        // Spans may wrap at the end of the address space.
        self.first.wrapping_sub(address) < size || address.wrapping_sub(self.first) < self.len
    }
}

/// DR7. SDM Vol. 3B 18.2.4 "Debug Control Register (DR7)".
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Dr7 {
    /// L0, G0, L1 and so on.
    #[bits(8)]
    pub enables: u8,
    /// LE and GE: no longer mean anything.
    #[bits(2)]
    pub exact: u8,
    /// Fixed to 1.
    pub one: bool,
    /// RTM: advanced debugging of transactional regions.
    pub rtm: bool,
    __: bool,
    /// GD: general detect enable.
    pub general_detect: bool,
    #[bits(2)]
    __: u8,
    /// R/W0, LEN0, R/W1 and so on.
    #[bits(16)]
    pub conditions: u16,
    __: u32,
}

impl Dr7 {
    /// What stands in it after power-up.
    pub const RESET: u64 = 0x400;
    /// L0 to L3 and LE, which a task switch clears.
    pub const LOCAL: u64 = 0x155;

    /// The value that a write leaves. Bits 63:32 have been checked.
    pub fn written(value: u64, features: Features) -> u64 {
        let writable = 0xFFFF_23FF | if features.rtm() { 1 << 11 } else { 0 };
        value & writable | Self::RESET
    }

    /// Breakpoint `n` with its address from DR`n`; `None` where R/W is 10 and CR4.DE (`extensions`) is clear, which is undefined.
    pub fn breakpoint(self, n: u8, address: u64, extensions: bool) -> Option<Breakpoint> {
        let condition = self.conditions() >> (n * 4);
        let watched = match condition & 3 {
            0 => Watched::Execute,
            1 => Watched::Write,
            2 if extensions => Watched::Port,
            2 => return None,
            _ => Watched::ReadWrite,
        };
        let len = match (watched, condition >> 2 & 3) {
            // LEN must be 0 there.
            (Watched::Execute, _) => 1,
            (_, 0) => 1,
            (_, 1) => 2,
            (_, 2) => 8,
            _ => 4,
        };
        Some(Breakpoint {
            watched,
            first: address & !(len - 1),
            len,
            enabled: self.enables() >> (n * 2) & 3 != 0,
        })
    }
}

#[cfg(test)]
#[path = "debug_test.rs"]
mod tests;
