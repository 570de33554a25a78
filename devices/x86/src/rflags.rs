//! RFLAGS. SDM Vol. 1 3.4.3 "EFLAGS Register".

use bitfield_struct::bitfield;
use serde::{Deserialize, Serialize};

/// RFLAGS.
#[bitfield(u64)]
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub struct RFlags {
    /// Carry.
    pub cf: bool,
    /// Always 1.
    pub always_one: bool,
    /// Parity of the lowest byte: even.
    pub pf: bool,
    __: bool,
    /// Auxiliary carry: out of bit 3.
    pub af: bool,
    __: bool,
    /// Zero.
    pub zf: bool,
    /// Sign.
    pub sf: bool,
    /// Trap: #DB after each instruction.
    pub tf: bool,
    /// Interrupt enable.
    pub interrupt: bool,
    /// Direction: strings go down.
    pub df: bool,
    /// Overflow.
    pub of: bool,
    /// I/O privilege level.
    #[bits(2)]
    pub iopl: u8,
    /// Nested task.
    pub nt: bool,
    __: bool,
    /// Resume: the next instruction's breakpoint does not count.
    pub rf: bool,
    /// Virtual-8086 mode.
    pub vm: bool,
    /// Alignment check; with SMAP, access to user pages.
    pub ac: bool,
    /// Virtual interrupt flag.
    pub vif: bool,
    /// Virtual interrupt pending.
    pub vip: bool,
    /// Can be changed: there is CPUID.
    pub id: bool,
    #[bits(42)]
    __: u64,
}

impl RFlags {
    /// After reset. SDM Vol. 3A Table 10-1.
    pub const RESET: u64 = 0x2;
    /// CF, PF, AF, ZF, SF and OF: what arithmetic writes.
    pub const STATUS: u64 = 0x8D5;
    /// Every bit that is a flag. The others read 0, but for bit 1, which reads 1.
    pub const IMPLEMENTED: u64 = 0x3F_7FD5;

    /// `value` with every bit that is no flag put to what it always reads.
    pub const fn canonical(value: u64) -> u64 {
        value & Self::IMPLEMENTED | Self::RESET
    }
}

/// Masks of flags, for what is moved and merged as a word.
pub mod flag {
    use super::RFlags;

    /// Trap.
    pub const TF: u64 = RFlags::new().with_tf(true).into_bits();
    /// Interrupt enable.
    pub const IF: u64 = RFlags::new().with_interrupt(true).into_bits();
    /// Direction.
    pub const DF: u64 = RFlags::new().with_df(true).into_bits();
    /// I/O privilege level.
    pub const IOPL: u64 = RFlags::new().with_iopl(3).into_bits();
    /// Nested task.
    pub const NT: u64 = RFlags::new().with_nt(true).into_bits();
    /// Resume.
    pub const RF: u64 = RFlags::new().with_rf(true).into_bits();
    /// Virtual-8086 mode.
    pub const VM: u64 = RFlags::new().with_vm(true).into_bits();
    /// Alignment check.
    pub const AC: u64 = RFlags::new().with_ac(true).into_bits();
    /// Virtual interrupt flag.
    pub const VIF: u64 = RFlags::new().with_vif(true).into_bits();
    /// Virtual interrupt pending.
    pub const VIP: u64 = RFlags::new().with_vip(true).into_bits();
    /// Can be changed.
    pub const ID: u64 = RFlags::new().with_id(true).into_bits();
}

#[cfg(test)]
#[path = "rflags_test.rs"]
mod tests;
