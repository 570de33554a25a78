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

/// The most cores of a package: leaf 4's EAX[31:26] counts them less one.
pub const MOST_CORES: u32 = 64;

/// CPUID.01H:EDX[28]: the package has more than one addressable ID.
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
mod tests {
    use alloc::format;

    use super::*;
    use crate::model::{CORE2, HASWELL, ICELAKE_SERVER, MODELS, NETBURST, P6, SAPPHIRERAPIDS, SNOWRIDGE, WESTMERE};

    // covers: smp/cpuid
    #[test]
    fn alone_a_cpu_is_what_the_rows_say() {
        for model in MODELS {
            for row in model.cpuid {
                let subleaf = row.subleaf.unwrap_or(0);
                assert_eq!(
                    model.cpuid_at(row.leaf, subleaf, CpuPosition::ALONE),
                    model.cpuid(row.leaf, subleaf),
                    "{}",
                    model.name
                );
            }
            for (index, row) in model.msrs.iter().enumerate() {
                assert_eq!(model.msr_at(index, CpuPosition::ALONE), row.reset);
            }
        }
    }

    // covers: smp/cpuid
    #[test]
    fn each_cpu_finds_its_ids_and_its_package() {
        // CPU, CPUs; then: IDs a package in leaf 1, HTT, bits of the core field and CPUs of the package in leaf 0BH.
        for (model, cpu, cpus, ids, htt, bits, package) in [
            (&WESTMERE, 0, 2, 2, 1, 1, 2),
            (&WESTMERE, 1, 2, 2, 1, 1, 2),
            (&WESTMERE, 2, 3, 4, 1, 2, 3),
            (&HASWELL, 3, 4, 4, 1, 2, 4),
            (&SAPPHIRERAPIDS, 63, 64, 64, 1, 6, 64),
            (&SAPPHIRERAPIDS, 64, 65, 64, 1, 6, 1),
            (&ICELAKE_SERVER, 254, 255, 64, 1, 6, 63),
            (&SNOWRIDGE, 127, 255, 64, 1, 6, 64),
        ] {
            let place = CpuPosition { cpu, cpus };
            let name = format!("{} {place:?}", model.name);
            let [_, ebx, _, edx] = model.cpuid_at(1, 0, place);
            assert_eq!(
                (ebx >> 24, ebx >> 16 & 0xFF, edx >> 28 & 1),
                (cpu, ids, htt),
                "leaf 1 of {name}"
            );
            assert_eq!(model.cpuid_at(0xB, 0, place), [0, 1, 0x100, cpu], "threads of {name}");
            assert_eq!(
                model.cpuid_at(0xB, 1, place),
                [bits, package, 0x201, cpu],
                "cores of {name}"
            );
            assert_eq!(model.cpuid_at(0xB, 2, place)[3], cpu, "no such level of {name}");
        }
        let place = CpuPosition { cpu: 5, cpus: 6 };
        let topology = WESTMERE.cpuid_at(0xB, 1, place);
        assert_eq!(
            WESTMERE.cpuid_at(0x7FFF_FFFF, 1, place),
            topology,
            "above the highest leaf"
        );
        assert_eq!(SAPPHIRERAPIDS.cpuid_at(0x1F, 1, place), [3, 6, 0x201, 5]);
        let index = HASWELL
            .msrs
            .iter()
            .position(|row| row.msr == MSR_CORE_THREAD_COUNT)
            .unwrap();
        assert_eq!(HASWELL.msr_at(index, place), 0x6_0006);
    }

    // covers: smp/cpuid
    #[test]
    fn parts_without_leaf_4_are_a_package_each() {
        for model in [&P6, &NETBURST] {
            let place = CpuPosition { cpu: 1, cpus: 2 };
            let [_, ebx, _, edx] = model.cpuid_at(1, 0, place);
            assert_eq!((ebx >> 24, edx >> 28 & 1), (1, 0), "{}", model.name);
            assert_eq!(ebx & 0x00FF_FFFF, model.cpuid(1, 0)[1] & 0x00FF_FFFF, "{}", model.name);
        }
    }

    // covers: smp/cpuid
    #[test]
    fn caches_are_shared_as_on_the_part() {
        // Cores that share L1D, L1I, L2, L3; cores of the package.
        for (model, cpus, sharers, cores) in [
            (&CORE2, 4, &[1, 1, 2][..], 4),
            (&WESTMERE, 4, &[1, 1, 1, 4], 4),
            (&WESTMERE, 64, &[1, 1, 1, 16], 64),
            (&SNOWRIDGE, 8, &[1, 1, 4, 8], 8),
            (&SAPPHIRERAPIDS, 3, &[1, 1, 1, 4], 4),
        ] {
            for (subleaf, sharers) in (0..).zip(sharers) {
                let place = CpuPosition { cpu: 0, cpus };
                let eax = model.cpuid_at(4, subleaf, place)[0];
                let found = ((eax >> 14 & 0xFFF) + 1, (eax >> 26) + 1);
                assert_eq!(found, (*sharers, cores), "{}: cache {subleaf}", model.name);
                assert_eq!(eax & 0x3FFF, model.cpuid(4, subleaf)[0] & 0x3FFF);
            }
            assert_eq!(
                model.cpuid_at(4, 5, CpuPosition { cpu: 0, cpus }),
                [0; 4],
                "no more caches"
            );
        }
    }
}
