//! What the machine keeps for each CPU beside what the engine and the local APIC hold.
//!
//! What the manual calls a core's is a CPU's here, also where two are threads of one core: the MTRRs, the machine-check banks,
//! IA32_MISC_ENABLE. The few registers that the cores of a real package share are kept for each CPU, too: they say the same on
//! all of them, and systems write them alike.

use devices::unit::rdt;
use serde::{Deserialize, Serialize};
use x86::model::{CpuModel, topology::CpuPosition};

/// One CPU's registers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PerCpu {
    /// The model's plain MSRs, in the order of its rows.
    pub msrs: Vec<u64>,
    /// What the TSC is ahead of the clock's ticks, modulo 2^64.
    pub tsc_offset: u64,
    /// IA32_TSC_ADJUST.
    pub tsc_adjust: u64,
    /// The resource director's registers of a logical processor.
    pub rdt: rdt::Thread,
}

impl PerCpu {
    /// The registers as firmware hands them over.
    pub fn new(model: &CpuModel, place: CpuPosition) -> Self {
        PerCpu {
            msrs: (0..model.msrs.len()).map(|index| model.msr_at(index, place)).collect(),
            tsc_offset: 0,
            tsc_adjust: 0,
            rdt: rdt::Thread::new(model),
        }
    }
}
