//! CPU models as data: one file each.

mod westmere;

pub use westmere::WESTMERE;

/// One row of CPUID: what a leaf (and subleaf, where it has any) answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidRow {
    /// EAX on entry.
    pub leaf: u32,
    /// ECX on entry; `None` where the leaf ignores it.
    pub subleaf: Option<u32>,
    /// EAX, EBX, ECX, EDX on return.
    pub regs: [u32; 4],
}

/// One model-specific register that is plain storage: no unit gives it a meaning of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsrRow {
    /// The register's number.
    pub msr: u32,
    /// Its manual name.
    pub name: &'static str,
    /// The value after reset.
    pub reset: u64,
    /// Bits that a WRMSR may change. A write that differs from the present value in any other bit is #GP(0), unless
    /// `ignore_reserved`.
    pub writable: u64,
    /// Writes to bits outside `writable` are dropped instead of faulting (`writable` 0 and this: writes are ignored).
    pub ignore_reserved: bool,
}

/// A CPU as software sees it.
#[derive(Debug)]
pub struct CpuModel {
    /// The name on the command line.
    pub name: &'static str,
    /// One line for `minivmm models`.
    pub description: &'static str,
    /// The time-stamp counter's frequency in kHz.
    pub tsc_khz: u32,
    /// The local APIC timer's input frequency in kHz, before the divider.
    pub apic_timer_khz: u32,
    /// CPUID.
    pub cpuid: &'static [CpuidRow],
    /// The plain MSRs.
    pub msrs: &'static [MsrRow],
}

/// All models, oldest first.
pub const MODELS: &[&CpuModel] = &[&WESTMERE];
