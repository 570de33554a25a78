//! Several CPUs of one model: where each stands, and what CPUID says of it.
//!
//! # Theory
//! An x2APIC ID is a field for the package, one for the core and one for the thread; software learns their widths from CPUID:
//! leaves 0BH and 1FH where the part has them, else leaves 4 and 1. SDM Vol. 3A 9.9 "Programming Considerations for Hardware
//! Multi-Threading Capable Processors", 9.9.3 "Hierarchical ID of Logical Processors in an MP System".
//!
//! # Practice
//! CPU *i* has APIC ID *i*: an arrangement whose IDs would have holes is refused ([`Topology::new`]). Unless a machine is told otherwise
//! every CPU is a core with one thread. A part that has leaf 4 puts up to [`MOST_CORES`] cores into a package, since that leaf's field has
//! six bits; an older part is one CPU a package, as it was. Caches are shared by as many cores as on the part, and a machine of one CPU is
//! what the model's rows say.

use core::fmt;

use super::{CpuModel, TOPOLOGY_LEAVES};
use crate::msr::MSR_CORE_THREAD_COUNT;

/// The most cores of a package: leaf 4's EAX\[31:26\] counts them less one.
pub const MOST_CORES: u32 = 64;
/// The most threads of a core that a part has had.
pub const MOST_THREADS: u32 = 2;

/// CPUID.01H:EDX\[28\]: the package has more than one addressable ID.
const HTT: u32 = 1 << 28;

/// How the CPUs of a machine are arranged: packages of cores of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    cpus: u32,
    /// In a package.
    cores: u32,
    /// In a core.
    threads: u32,
}

/// What is wrong with an arrangement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// The numbers do not fit together.
    #[error("{sockets} packages of {cores} cores of {threads} threads are not {cpus} CPUs")]
    Product {
        /// Packages.
        sockets: u32,
        /// Cores of each.
        cores: u32,
        /// Threads of each core.
        threads: u32,
        /// CPUs of the machine.
        cpus: u32,
    },
    /// A core has one thread, or two.
    #[error("a core has 1 or {MOST_THREADS} threads, not {0}")]
    Threads(u32),
    /// Leaf 4 cannot count them.
    #[error("a package has up to {MOST_CORES} cores, not {0}")]
    Cores(u32),
    /// APIC IDs with holes.
    #[error("{0} cores in each of several packages leave holes between the APIC IDs: take a power of two")]
    Holes(u32),
    /// The part's cores have one.
    #[error("{0}'s cores have one thread each")]
    OneThread(&'static str),
    /// The part is from before CPUID's leaf 4.
    #[error("{0} is one CPU a package: it has no CPUID leaf that tells of cores or threads")]
    OneCpu(&'static str),
}

impl Topology {
    /// So many CPUs, at least one, each a core, in as few packages as they fit into.
    pub const fn of(cpus: u32) -> Self {
        let cpus = if cpus == 0 { 1 } else { cpus };
        let cores = if cpus < MOST_CORES { cpus } else { MOST_CORES };
        Topology {
            cpus,
            cores,
            threads: 1,
        }
    }

    /// So many CPUs in so many packages, with so many cores each, of so many threads each. What is not said follows: one thread, one
    /// package, and as many cores as it takes; with cores alone, as many packages as it takes.
    ///
    /// # Errors
    /// The numbers do not fit together, or no part could be so.
    pub fn new(
        cpus: u32,
        sockets: Option<u32>,
        cores: Option<u32>,
        threads: Option<u32>,
    ) -> Result<Self, TopologyError> {
        let threads = threads.unwrap_or(1);
        if !(1..=MOST_THREADS).contains(&threads) {
            return Err(TopologyError::Threads(threads));
        }
        let of = |parts: Option<u32>| (cpus / threads).checked_div(parts.unwrap_or(1)).unwrap_or(0);
        let cores = cores.unwrap_or_else(|| of(sockets));
        let sockets = sockets.unwrap_or_else(|| of(Some(cores)));
        if sockets.checked_mul(cores).and_then(|cores| cores.checked_mul(threads)) != Some(cpus) || cpus == 0 {
            return Err(TopologyError::Product {
                sockets,
                cores,
                threads,
                cpus,
            });
        }
        if cores > MOST_CORES {
            return Err(TopologyError::Cores(cores));
        }
        if sockets > 1 && !cores.is_power_of_two() {
            return Err(TopologyError::Holes(cores));
        }
        Ok(Topology { cpus, cores, threads })
    }

    /// Whether CPUs of a model can be arranged so.
    ///
    /// # Errors
    /// They cannot, and this is why.
    pub fn check(self, model: &CpuModel) -> Result<(), TopologyError> {
        // Some parts without second threads leave room for their IDs.
        if self.threads > 1 && model.silicon_row(0xB, 0)[1] < self.threads {
            return Err(TopologyError::OneThread(model.name));
        }
        if self != Topology::of(self.cpus) && self.cores > 1 && !has_cores(model) {
            return Err(TopologyError::OneCpu(model.name));
        }
        Ok(())
    }

    /// How many CPUs there are.
    pub fn cpus(self) -> u32 {
        self.cpus
    }

    /// How many packages there are of a model.
    pub fn packages(self, model: &CpuModel) -> u32 {
        self.at(self.cpus - 1).package(model) + 1
    }

    /// One of the CPUs.
    pub fn at(self, cpu: u32) -> CpuPosition {
        CpuPosition { cpu, topology: self }
    }
}

/// As `--cpus` takes it.
impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.cpus)?;
        match *self == Topology::of(self.cpus) {
            true => Ok(()),
            false => write!(f, ",cores={},threads={}", self.cores, self.threads),
        }
    }
}

impl From<u8> for Topology {
    fn from(cpus: u8) -> Self {
        Topology::of(cpus.into())
    }
}

/// Whether the part's CPUID can tell of several cores in a package.
fn has_cores(model: &CpuModel) -> bool {
    model.answering(4) == 4 && model.cpuid(4, 0)[0] & 0x1F != 0
}

/// One CPU among its like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuPosition {
    /// Which one, from 0: its APIC ID.
    pub cpu: u32,
    /// How all of them are arranged.
    pub topology: Topology,
}

impl CpuPosition {
    /// The only CPU.
    pub const ALONE: CpuPosition = CpuPosition {
        cpu: 0,
        topology: Topology::of(1),
    };

    /// Bits of the APIC ID below the core's.
    fn thread_bits(self) -> u32 {
        self.topology.threads.trailing_zeros()
    }

    /// Bits of the APIC ID below the package's.
    fn package_bits(self, model: &CpuModel) -> u32 {
        if !has_cores(model) {
            return 0;
        }
        self.topology.cores.next_power_of_two().trailing_zeros() + self.thread_bits()
    }

    /// The package that it is in, from 0.
    pub fn package(self, model: &CpuModel) -> u32 {
        self.cpu >> self.package_bits(model)
    }

    /// How many CPUs there are in this one's package.
    fn in_package(self, model: &CpuModel) -> u32 {
        let bits = self.package_bits(model);
        let before = self.cpu >> bits << bits;
        self.topology.cpus.saturating_sub(before).clamp(1, 1 << bits)
    }

    fn is_alone(self) -> bool {
        self.topology.cpus == 1
    }
}

impl CpuModel {
    /// What CPUID answers on one CPU of a machine: as [`CpuModel::cpuid`], with the topology filled in.
    pub fn cpuid_at(&self, leaf: u32, subleaf: u32, place: CpuPosition) -> [u32; 4] {
        let [mut eax, mut ebx, ecx, mut edx] = self.cpuid(leaf, subleaf);
        let (threads, bits) = (place.thread_bits(), place.package_bits(self));
        match self.answering(leaf) {
            1 => {
                ebx = ebx & 0x00FF_FFFF | place.cpu << 24;
                if bits > 0 {
                    ebx = ebx & 0xFF00_FFFF | 1 << bits << 16;
                    edx |= HTT;
                }
            }
            4 if eax & 0x1F != 0 && !place.is_alone() => {
                let sharers = (self.sharing_cores(subleaf) << threads).min(1 << bits);
                eax = eax & 0x3FFF | ((1 << (bits - threads)) - 1) << 26 | (sharers - 1) << 14;
            }
            leaf if TOPOLOGY_LEAVES.contains(&leaf) => {
                edx = place.cpu;
                // Level types: 1 is threads, 2 is cores.
                match ecx >> 8 & 0xFF {
                    1 => (eax, ebx) = (threads, place.topology.threads),
                    2 if !place.is_alone() => (eax, ebx) = (bits, place.in_package(self)),
                    _ => {}
                }
            }
            _ => {}
        }
        [eax, ebx, ecx, edx]
    }

    /// What the part's own CPUID answers, before anything is hidden.
    fn silicon_row(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let mut rows = self.silicon.iter().filter(|row| row.leaf == leaf);
        rows.find(|row| row.answers(subleaf)).map_or([0; 4], |row| row.regs)
    }

    /// How many cores of the part share a cache of leaf 4, rounded up to a power of two.
    fn sharing_cores(&self, subleaf: u32) -> u32 {
        let ids = |subleaf: u32| (self.silicon_row(4, subleaf)[0] >> 14 & 0xFFF) + 1;
        // A core has the IDs that share the first-level data cache; some parts leave it more than it has threads.
        let of_a_core = ids(0).max(1 << (self.silicon_row(0xB, 0)[0] & 0x1F));
        (ids(subleaf) / of_a_core).max(1).next_power_of_two()
    }

    /// What a plain MSR holds when the machine starts, on one CPU of it.
    pub fn msr_at(&self, index: usize, place: CpuPosition) -> u64 {
        let row = &self.msrs[index];
        match row.msr {
            MSR_CORE_THREAD_COUNT if !place.is_alone() => {
                let threads = u64::from(place.in_package(self));
                threads >> place.thread_bits() << 16 | threads
            }
            _ => row.reset,
        }
    }
}

#[cfg(test)]
#[path = "topology_test.rs"]
mod tests;
