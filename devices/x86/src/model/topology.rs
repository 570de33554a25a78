//! Several CPUs of one model: where each stands, and what CPUID says of it.
//!
//! # Theory
//! An x2APIC ID is a field for the package, one for the core and one for the thread; software learns their widths from CPUID:
//! leaves 0BH and 1FH where the part has them, else leaves 4 and 1. SDM Vol. 3A 9.9 "Programming Considerations for Hardware
//! Multi-Threading Capable Processors", 9.9.3 "Hierarchical ID of Logical Processors in an MP System".
//!
//! # Practice
//! Every CPU is a core with one thread, and CPU *i* has APIC ID *i*. A part that has leaf 4 puts up to [`MOST_CORES`] cores
//! into a package, since that leaf's field has six bits; an older part is one CPU a package, as it was. Caches are shared by
//! as many cores as on the part, and a machine of one CPU is what the model's rows say.

use super::{CpuModel, TOPOLOGY_LEAVES};
use crate::msr::MSR_CORE_THREAD_COUNT;

/// The most cores of a package: leaf 4's EAX\[31:26\] counts them less one.
pub const MOST_CORES: u32 = 64;

/// CPUID.01H:EDX\[28\]: the package has more than one addressable ID.
const HTT: u32 = 1 << 28;

/// One CPU among its like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuPosition {
    /// Which one, from 0: its APIC ID.
    pub cpu: u32,
    /// How many there are.
    pub cpus: u32,
}

impl CpuPosition {
    /// The only CPU.
    pub const ALONE: CpuPosition = CpuPosition { cpu: 0, cpus: 1 };

    /// Bits of the APIC ID below the package's.
    fn core_bits(self, model: &CpuModel) -> u32 {
        if model.answering(4) != 4 || model.cpuid(4, 0)[0] & 0x1F == 0 {
            return 0;
        }
        self.cpus.clamp(1, MOST_CORES).next_power_of_two().trailing_zeros()
    }

    /// How many CPUs there are in this one's package.
    fn in_package(self, model: &CpuModel) -> u32 {
        let bits = self.core_bits(model);
        let before = self.cpu >> bits << bits;
        self.cpus.saturating_sub(before).clamp(1, 1 << bits)
    }
}

impl CpuModel {
    /// What CPUID answers on one CPU of a machine: as [`CpuModel::cpuid`], with the topology filled in.
    pub fn cpuid_at(&self, leaf: u32, subleaf: u32, place: CpuPosition) -> [u32; 4] {
        let [mut eax, mut ebx, ecx, mut edx] = self.cpuid(leaf, subleaf);
        let bits = place.core_bits(self);
        match self.answering(leaf) {
            1 => {
                ebx = ebx & 0x00FF_FFFF | place.cpu << 24;
                if bits > 0 {
                    ebx = ebx & 0xFF00_FFFF | 1 << bits << 16;
                    edx |= HTT;
                }
            }
            4 if eax & 0x1F != 0 && place.cpus > 1 => {
                let sharers = self.sharing_cores(subleaf).min(1 << bits);
                eax = eax & 0x3FFF | ((1 << bits) - 1) << 26 | (sharers - 1) << 14;
            }
            leaf if TOPOLOGY_LEAVES.contains(&leaf) => {
                edx = place.cpu;
                // Level types: 1 is threads, 2 is cores.
                if ecx >> 8 & 0xFF == 2 && place.cpus > 1 {
                    (eax, ebx) = (bits, place.in_package(self));
                }
            }
            _ => {}
        }
        [eax, ebx, ecx, edx]
    }

    /// How many cores of the part share a cache of leaf 4, rounded up to a power of two.
    fn sharing_cores(&self, subleaf: u32) -> u32 {
        let row = |leaf: u32, subleaf: u32| {
            let mut rows = self.silicon.iter().filter(|row| row.leaf == leaf);
            rows.find(|row| row.answers(subleaf)).map_or(0, |row| row.regs[0])
        };
        let ids = |subleaf: u32| (row(4, subleaf) >> 14 & 0xFFF) + 1;
        // A core has the IDs that share the first-level data cache; some parts leave it more than it has threads.
        let of_a_core = ids(0).max(1 << (row(0xB, 0) & 0x1F));
        (ids(subleaf) / of_a_core).max(1).next_power_of_two()
    }

    /// What a plain MSR holds when the machine starts, on one CPU of it.
    pub fn msr_at(&self, index: usize, place: CpuPosition) -> u64 {
        let row = &self.msrs[index];
        match row.msr {
            MSR_CORE_THREAD_COUNT if place.cpus > 1 => {
                let cores = u64::from(place.in_package(self));
                cores << 16 | cores
            }
            _ => row.reset,
        }
    }
}

#[cfg(test)]
#[path = "topology_test.rs"]
mod tests;
