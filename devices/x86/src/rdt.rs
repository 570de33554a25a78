//! Resource Director Technology: monitoring and allocation of caches and memory bandwidth. SDM Vol. 3B 18.18 "Intel
//! Resource Director Technology (Intel RDT) Monitoring Features", 18.19 "Intel Resource Director Technology (Intel RDT)
//! Allocation Features".
//!
//! What a part can do stands in its CPUID leaves 0FH and 10H and nowhere else, so a model of a user's own making has its
//! resources by its rows alone.

use crate::model::CpuModel;

/// IA32_QM_EVTSEL's event IDs. SDM Vol. 3B Table 18-19 "Monitoring Supported Event IDs".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// What the RMID has in the L3, now.
    Occupancy,
    /// Bytes between the L3 and the next level.
    TotalBandwidth,
    /// Those of them that went to this package's own memory.
    LocalBandwidth,
}

impl Event {
    /// The event with this ID.
    pub fn from_id(id: u8) -> Option<Self> {
        match id {
            1 => Some(Event::Occupancy),
            2 => Some(Event::TotalBandwidth),
            3 => Some(Event::LocalBandwidth),
            _ => None,
        }
    }

    /// Its bit in CPUID.0FH.1:EDX.
    pub const fn bit(self) -> u32 {
        match self {
            Event::Occupancy => 1,
            Event::TotalBandwidth => 2,
            Event::LocalBandwidth => 4,
        }
    }
}

/// Monitoring of the L3: CPUID.0FH.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L3Monitor {
    /// EBX: bytes that one count stands for.
    pub unit: u32,
    /// ECX: the highest RMID that is monitored.
    pub max_rmid: u32,
    /// EDX: [`Event::bit`]s.
    pub events: u32,
    /// EAX\[7:0\] + 24: the width of the bandwidth counters in bits.
    pub width: u32,
}

/// Allocation of a cache: CPUID.10H.1 (L3) and 10H.2 (L2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheAllocation {
    /// EAX\[4:0\] + 1: bits of a capacity mask.
    pub length: u32,
    /// ECX\[2\]: code and data prioritisation.
    pub cdp: bool,
    /// ECX\[3\]: masks need not be contiguous.
    pub sparse: bool,
    /// EDX\[15:0\]: the highest class of service.
    pub max_cos: u32,
}

impl CacheAllocation {
    /// The mask that allows everything, which is every mask's value at reset.
    pub const fn full(&self) -> u64 {
        (1 << self.length) - 1
    }

    /// Whether a mask is one: within the length, not empty, in one piece.
    pub const fn accepts(&self, mask: u64) -> bool {
        let low = mask & mask.wrapping_neg();
        let one_piece = mask.wrapping_add(low) & mask == 0;
        mask != 0 && mask & !self.full() == 0 && (one_piece || self.sparse)
    }
}

/// Throttling of memory bandwidth: CPUID.10H.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BandwidthAllocation {
    /// EAX\[11:0\] + 1: the largest delay.
    pub max_delay: u32,
    /// ECX\[2\]: delays are percentages, in steps of 100 less the largest one.
    pub linear: bool,
    /// EDX\[15:0\]: the highest class of service.
    pub max_cos: u32,
}

impl BandwidthAllocation {
    /// The delay that the part takes for the one that is written: the next lower step. SDM Vol. 3B 18.19.7.2 "Memory
    /// Bandwidth Allocation Configuration".
    pub const fn step(&self, delay: u64) -> u64 {
        let unit = match 100u64.checked_sub(self.max_delay as u64) {
            Some(unit @ 1..) if self.linear => unit,
            _ => 1,
        };
        delay - delay % unit
    }
}

/// What a model monitors and allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdtCaps {
    /// The highest RMID of all resources: CPUID.0FH.0:EBX; `None` where nothing is monitored.
    pub max_rmid: Option<u32>,
    /// Monitoring of the L3.
    pub l3_monitor: Option<L3Monitor>,
    /// Allocation of the L3.
    pub l3: Option<CacheAllocation>,
    /// Allocation of the L2.
    pub l2: Option<CacheAllocation>,
    /// Throttling of memory bandwidth.
    pub bandwidth: Option<BandwidthAllocation>,
}

impl RdtCaps {
    /// What a model's CPUID says; `None` where it has none of it.
    pub fn of(model: &CpuModel) -> Option<Self> {
        let features = model.features();
        let (monitors, allocates) = (features.rdt_m(), features.rdt_a());
        let resources = model.cpuid(0x10, 0)[1];
        let row = |bit: u32| (allocates && resources >> bit & 1 != 0).then(|| model.cpuid(0x10, bit));
        let cache = |[eax, _, ecx, edx]: [u32; 4]| CacheAllocation {
            length: (eax & 0x1F) + 1,
            cdp: ecx & 4 != 0,
            sparse: ecx & 8 != 0,
            max_cos: edx & 0xFFFF,
        };
        let [_, max_rmid, _, l3] = model.cpuid(0xF, 0);
        (monitors || allocates).then(|| RdtCaps {
            max_rmid: monitors.then_some(max_rmid),
            l3_monitor: (monitors && l3 & 2 != 0).then(|| {
                let [eax, unit, max_rmid, events] = model.cpuid(0xF, 1);
                L3Monitor {
                    unit,
                    max_rmid,
                    events,
                    width: (eax & 0xFF) + 24,
                }
            }),
            l3: row(1).map(cache),
            l2: row(2).map(cache),
            bandwidth: row(3).map(|[eax, _, ecx, edx]| BandwidthAllocation {
                max_delay: (eax & 0xFFF) + 1,
                linear: ecx & 4 != 0,
                max_cos: edx & 0xFFFF,
            }),
        })
    }

    /// The highest class of service that any resource knows, which IA32_PQR_ASSOC takes.
    pub fn max_cos(&self) -> Option<u32> {
        let caches = self.l3.iter().chain(&self.l2).map(|cache| cache.max_cos);
        caches.chain(self.bandwidth.iter().map(|b| b.max_cos)).max()
    }

    /// The bits of IA32_PQR_ASSOC and IA32_QM_EVTSEL that hold an RMID: Ceil(log2(1 + the highest)).
    pub fn rmid_bits(&self) -> u32 {
        self.max_rmid.map_or(0, |max| u32::BITS - max.leading_zeros())
    }
}

#[cfg(test)]
#[path = "rdt_test.rs"]
mod tests;
