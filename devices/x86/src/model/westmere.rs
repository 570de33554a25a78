//! Westmere-EP.

use super::CpuModel;

/// Intel Xeon X5650 "Westmere-EP".
pub const WESTMERE: CpuModel = CpuModel {
    name: "westmere",
    description: "Intel Xeon X5650 (Westmere-EP)",
    tsc_khz: 2_666_000,
    apic_timer_khz: 133_000,
    cpuid: &[],
    msrs: &[],
};
