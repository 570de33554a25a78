//! Resource Director Technology: who may fill which ways of the caches, and what each has in them.
//!
//! # Theory
//! A logical processor says in IA32_PQR_ASSOC on whose behalf it runs: an RMID, which what it brings into the L3 is tagged
//! with, and a class of service, which says where in the caches it may bring it. Masks and counters belong to the package
//! ([`Package`]); the association, the selected event and the L2's masks to the logical processor ([`Thread`]).
//!
//! # Practice
//! Registers are routed here by number. What the counters count comes from a model of the L3 ([`Meter`]), which a machine
//! starts with the first association or selection that is not zero ([`Package::in_use`]) and feeds with what each logical
//! processor accesses ([`Probe`]); before, the answer is "Unavailable", as of a part that has no data for an RMID yet.
//!
//! # What is modelled
//! Occupancy and bandwidth are those of a small deterministic cache, not of a part's. Masks of the L3 and the L2 limit what may be
//! filled there, of code and of data each by its own where code and data prioritisation is on. All memory is local, so local and
//! total bandwidth are one number. Delays of bandwidth allocation are kept and change nothing: time is a count of steps.

use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, PoisonError};

use x86::model::CpuModel;
use x86::msr::{
    IA32_L2_QOS_CFG, IA32_L2_QOS_MASK_0, IA32_L3_QOS_CFG, IA32_L3_QOS_MASK_0, IA32_MBA_THRTL_0, IA32_PQR_ASSOC,
    IA32_QM_CTR, IA32_QM_EVTSEL, MsrFault,
};
use x86::rdt::{CacheAllocation, Event, RdtCaps};
use x86::watch::{Access, BranchRecord};

use super::cache::{Core, Fetched, Geometry, Memory, Owner, SLICE, SharedCache};

/// IA32_QM_CTR: an unsupported event or RMID is selected.
const ERROR: u64 = 1 << 63;
/// IA32_QM_CTR: no data for this RMID.
const UNAVAILABLE: u64 = 1 << 62;

/// What measures the L3 by RMID.
pub trait Meter {
    /// Bytes that the RMID has in the L3; `None` while nothing is measured.
    fn occupancy(&self, rmid: u32) -> Option<u64>;
    /// Bytes that have moved between the L3 and memory for the RMID; `None` while nothing is measured.
    fn traffic(&self, rmid: u32) -> Option<u64>;
}

/// A package without a model of its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmetered;

impl Meter for Unmetered {
    fn occupancy(&self, _: u32) -> Option<u64> {
        None
    }

    fn traffic(&self, _: u32) -> Option<u64> {
        None
    }
}

/// The package's last-level cache, which its logical processors fill.
#[derive(Clone, Debug)]
pub struct LastLevel(Arc<Mutex<SharedCache>>);

impl LastLevel {
    /// The model's, empty.
    pub fn new(model: &CpuModel) -> Self {
        Self::with(SharedCache::of(model))
    }

    /// One with these contents.
    pub fn with(contents: SharedCache) -> Self {
        Self(Arc::new(Mutex::new(contents)))
    }

    /// What is in it and has gone through it.
    pub fn contents(&self) -> SharedCache {
        self.shared(|shared| shared.clone())
    }

    /// Nothing that panics is done under the lock.
    fn shared<T>(&self, f: impl FnOnce(&mut SharedCache) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Meter for LastLevel {
    fn occupancy(&self, rmid: u32) -> Option<u64> {
        Some(self.shared(|shared| shared.occupancy(rmid)))
    }

    fn traffic(&self, rmid: u32) -> Option<u64> {
        Some(self.shared(|shared| shared.traffic(rmid)))
    }
}

/// On whose behalf a logical processor fills caches: with data, and with code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owners {
    /// Loads and stores.
    pub data: Owner,
    /// Fetches.
    pub code: Owner,
}

/// The caches as one logical processor reaches them: its own, the package's last level, and on whose behalf it runs.
#[derive(Clone, Debug)]
pub struct Probe {
    core: Core,
    last: LastLevel,
    owners: Owners,
}

impl Probe {
    /// With these caches of its own, on behalf of nobody yet.
    pub fn new(core: Core, last: LastLevel) -> Self {
        Self {
            core,
            last,
            owners: Owners {
                data: Owner::ANYBODY,
                code: Owner::ANYBODY,
            },
        }
    }

    /// Its own caches.
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// On whose behalf it runs from now on.
    pub fn set_owners(&mut self, owners: Owners) {
        self.owners = owners;
    }

    /// A load or store at a step, with what tells physical addresses; `None` for ports.
    pub fn access(&mut self, access: &Access, step: u64, physical: impl FnMut(u64) -> Option<u64>) -> Option<Memory> {
        let Self { core, last, owners } = self;
        last.shared(|shared| core.access(access, step, physical, shared, owners.data))
    }

    /// Branches: what was fetched between them.
    pub fn branches(&mut self, records: &[BranchRecord], physical: impl FnMut(u64) -> Option<u64>) -> Fetched {
        let Self { core, last, owners } = self;
        last.shared(|shared| core.branches(records, physical, shared, owners.code))
    }
}

/// One logical processor's registers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thread {
    /// IA32_PQR_ASSOC.
    pub association: u64,
    /// IA32_QM_EVTSEL.
    pub select: u64,
    /// The step until which what the caches do is followed for who has selected and read counts.
    pub followed: u64,
    /// IA32_L2_QOS_CFG.
    pub l2_config: u64,
    /// IA32_L2_QOS_MASK_n.
    pub l2_masks: Vec<u64>,
}

impl Thread {
    /// A logical processor at reset.
    pub fn new(model: &CpuModel) -> Self {
        Self {
            l2_masks: masks(RdtCaps::of(model).and_then(|caps| caps.l2)),
            ..Self::default()
        }
    }

    /// The RMID that it runs on behalf of.
    pub fn rmid(&self) -> u32 {
        self.association as u32
    }

    /// Its class of service.
    pub fn cos(&self) -> u32 {
        (self.association >> 32) as u32
    }
}

/// The package's registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    caps: Option<RdtCaps>,
    state: PackageState,
}

/// What a [`Package`] holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackageState {
    /// IA32_L3_QOS_CFG.
    pub l3_config: u64,
    /// IA32_L3_QOS_MASK_n.
    pub l3_masks: Vec<u64>,
    /// IA32_L2_QoS_Ext_BW_Thrtl_n.
    pub delays: Vec<u64>,
}

/// Every mask at reset.
fn masks(cache: Option<CacheAllocation>) -> Vec<u64> {
    cache.map_or(Vec::new(), |cache| vec![cache.full(); cache.max_cos as usize + 1])
}

const GP: MsrFault = MsrFault::GeneralProtection;

impl Package {
    /// A package at reset.
    pub fn new(model: &CpuModel) -> Self {
        let caps = RdtCaps::of(model);
        let bandwidth = caps.and_then(|caps| caps.bandwidth);
        Self {
            caps,
            state: PackageState {
                l3_config: 0,
                l3_masks: masks(caps.and_then(|caps| caps.l3)),
                delays: bandwidth.map_or(Vec::new(), |b| vec![0; b.max_cos as usize + 1]),
            },
        }
    }

    /// What the model's CPUID says there is.
    pub fn caps(&self) -> Option<&RdtCaps> {
        self.caps.as_ref()
    }

    /// The whole state.
    pub fn state(&self) -> PackageState {
        self.state.clone()
    }

    /// Takes on a state of a package of this model; one of another shape is left alone.
    ///
    /// # Errors
    /// What differs.
    pub fn set_state(&mut self, state: &PackageState) -> Result<(), &'static str> {
        if state.l3_masks.len() != self.state.l3_masks.len() {
            return Err("the number of classes of service of the L3");
        }
        if state.delays.len() != self.state.delays.len() {
            return Err("the number of classes of service of the memory bandwidth");
        }
        self.state = state.clone();
        Ok(())
    }

    /// The ways of the L3 that a class of service may fill, for data or for code. SDM Vol. 3B 18.19.5.1 "Mapping Between L3
    /// CDP Masks and CAT Masks".
    pub fn l3_mask(&self, cos: u32, code: bool) -> u64 {
        let index = if self.state.l3_config & 1 == 0 {
            cos as usize
        } else {
            (cos as usize) << 1 | usize::from(code)
        };
        // A class that the masks do not know has no limit, as the manual leaves it open.
        let full = self.caps.and_then(|caps| caps.l3).map_or(u64::MAX, |l3| l3.full());
        self.state.l3_masks.get(index).copied().unwrap_or(full)
    }

    /// Whether a logical processor asks for something to be measured.
    pub fn in_use(&self, thread: &Thread) -> bool {
        self.caps.is_some() && (thread.association != 0 || thread.select != 0)
    }

    /// The step until which what the caches do has to be followed for a logical processor; 0 for not at all. An association is followed
    /// for as long as it lasts, a selection until nobody has looked at its count for a while: Linux never takes one back.
    pub fn followed(&self, thread: &Thread) -> u64 {
        match (self.caps.is_some(), thread.association) {
            (false, _) => 0,
            (true, 0) => thread.followed,
            (true, _) => u64::MAX,
        }
    }

    /// Somebody has selected or read a count at this step.
    pub fn looked(&self, thread: &mut Thread, step: u64) {
        thread.followed = match (thread.select, (thread.select >> 32) as u32) {
            (0, _) => 0,
            (_, 0) => step.saturating_add(BETWEEN_LOOKS),
            (_, _) => step.saturating_add(SLICE),
        };
    }

    /// The ways of the L2 that a class of service may fill, for data or for code: mapped as those of the L3.
    pub fn l2_mask(&self, thread: &Thread, code: bool) -> u64 {
        let cos = thread.cos() as usize;
        let index = if thread.l2_config & 1 == 0 {
            cos
        } else {
            cos << 1 | usize::from(code)
        };
        let full = self.caps.and_then(|caps| caps.l2).map_or(u64::MAX, |l2| l2.full());
        thread.l2_masks.get(index).copied().unwrap_or(full)
    }

    /// On whose behalf a logical processor fills the caches of a model. A mask whose bits are not one for each way stands for shares
    /// of them.
    pub fn owners(&self, thread: &Thread, model: &CpuModel) -> Owners {
        let [l2, l3] = [2, 3].map(|level| Geometry::of(model, level).ways);
        let caps = |cache: fn(&RdtCaps) -> Option<CacheAllocation>| self.caps.as_ref().and_then(cache);
        let owner = |code| Owner {
            rmid: thread.rmid() as u16,
            ways: share(self.l3_mask(thread.cos(), code), caps(|caps| caps.l3), l3),
            second: share(self.l2_mask(thread, code), caps(|caps| caps.l2), l2),
        };
        Owners {
            data: owner(false),
            code: owner(true),
        }
    }

    /// RDMSR on a logical processor.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`] for a number that is none of these registers or that the model lacks.
    pub fn read_msr(&self, thread: &Thread, msr: u32, meter: &dyn Meter) -> Result<u64, MsrFault> {
        let Some(caps) = &self.caps else {
            return Err(MsrFault::Unclaimed);
        };
        match msr {
            IA32_PQR_ASSOC => Ok(thread.association),
            IA32_QM_EVTSEL if caps.max_rmid.is_some() => Ok(thread.select),
            IA32_QM_CTR if caps.max_rmid.is_some() => Ok(self.count(thread, meter)),
            IA32_L3_QOS_CFG if caps.l3.is_some_and(|l3| l3.cdp) => Ok(self.state.l3_config),
            IA32_L2_QOS_CFG if caps.l2.is_some_and(|l2| l2.cdp) => Ok(thread.l2_config),
            _ => {
                let (bank, index) = self.bank(thread, msr).ok_or(MsrFault::Unclaimed)?;
                bank.get(index).copied().ok_or(GP)
            }
        }
    }

    /// The registers with a number for each class of service that `msr` lies in, and which of them it is.
    fn bank<'a>(&'a self, thread: &'a Thread, msr: u32) -> Option<(&'a [u64], usize)> {
        let caps = self.caps.as_ref()?;
        let at = |first: u32| (msr - first) as usize;
        match msr {
            IA32_L3_QOS_MASK_0..IA32_L2_QOS_MASK_0 if caps.l3.is_some() => {
                Some((&self.state.l3_masks, at(IA32_L3_QOS_MASK_0)))
            }
            IA32_L2_QOS_MASK_0..IA32_MBA_THRTL_0 if caps.l2.is_some() => {
                Some((&thread.l2_masks, at(IA32_L2_QOS_MASK_0)))
            }
            IA32_MBA_THRTL_0..=LAST_DELAY if caps.bandwidth.is_some() => {
                Some((&self.state.delays, at(IA32_MBA_THRTL_0)))
            }
            _ => None,
        }
    }

    /// WRMSR on a logical processor.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for a reserved bit, an RMID or class above the highest, a mask that is none (SDM Vol.
    /// 3B 18.18.8.1 "Monitoring Dynamic Configuration", 18.19.6.1 "Cache Allocation Technology Dynamic Configuration");
    /// [`MsrFault::Unclaimed`] as for reads.
    pub fn write_msr(&mut self, thread: &mut Thread, msr: u32, value: u64) -> Result<(), MsrFault> {
        let Some(caps) = self.caps else {
            return Err(MsrFault::Unclaimed);
        };
        let max_rmid = caps.max_rmid.unwrap_or(0);
        let (low, high) = (value as u32, (value >> 32) as u32);
        let accept = |allowed: bool| if allowed { Ok(()) } else { Err(GP) };
        match msr {
            IA32_PQR_ASSOC => {
                accept(low <= max_rmid && high <= caps.max_cos().unwrap_or(0))?;
                thread.association = value;
            }
            IA32_QM_EVTSEL if caps.max_rmid.is_some() => {
                accept(low <= 0xFF && high <= max_rmid)?;
                thread.select = value;
            }
            IA32_QM_CTR if caps.max_rmid.is_some() => return Err(GP),
            IA32_L3_QOS_CFG if caps.l3.is_some_and(|l3| l3.cdp) => {
                accept(value <= 1)?;
                self.state.l3_config = value;
            }
            IA32_L2_QOS_CFG if caps.l2.is_some_and(|l2| l2.cdp) => {
                accept(value <= 1)?;
                thread.l2_config = value;
            }
            IA32_L3_QOS_MASK_0..IA32_L2_QOS_MASK_0 => {
                let cache = caps.l3.ok_or(MsrFault::Unclaimed)?;
                let mask = self.state.l3_masks.get_mut((msr - IA32_L3_QOS_MASK_0) as usize);
                *mask.filter(|_| cache.accepts(value)).ok_or(GP)? = value;
            }
            IA32_L2_QOS_MASK_0..IA32_MBA_THRTL_0 => {
                let cache = caps.l2.ok_or(MsrFault::Unclaimed)?;
                let mask = thread.l2_masks.get_mut((msr - IA32_L2_QOS_MASK_0) as usize);
                *mask.filter(|_| cache.accepts(value)).ok_or(GP)? = value;
            }
            IA32_MBA_THRTL_0..=LAST_DELAY => {
                let bandwidth = caps.bandwidth.ok_or(MsrFault::Unclaimed)?;
                let delay = self.state.delays.get_mut((msr - IA32_MBA_THRTL_0) as usize);
                let fits = value <= u64::from(bandwidth.max_delay);
                *delay.filter(|_| fits).ok_or(GP)? = bandwidth.step(value);
            }
            _ => return Err(MsrFault::Unclaimed),
        }
        Ok(())
    }

    /// IA32_QM_CTR. SDM Vol. 3B 18.18.6 "Monitoring Resource RMID Association".
    fn count(&self, thread: &Thread, meter: &dyn Meter) -> u64 {
        let rmid = (thread.select >> 32) as u32;
        let Some(l3) = self.caps.and_then(|caps| caps.l3_monitor) else {
            return ERROR;
        };
        let event = Event::from_id(thread.select as u8).filter(|event| l3.events & event.bit() != 0);
        let Some(event) = event.filter(|_| rmid <= l3.max_rmid) else {
            return ERROR;
        };
        let unit = u64::from(l3.unit.max(1));
        match event {
            Event::Occupancy => meter.occupancy(rmid).map_or(UNAVAILABLE, |bytes| bytes / unit),
            Event::TotalBandwidth | Event::LocalBandwidth => meter.traffic(rmid).map_or(UNAVAILABLE, |bytes| {
                let width = l3.width.min(62);
                bytes / unit & ((1 << width) - 1)
            }),
        }
    }
}

/// How long a count of RMID 0, which everybody who has no other one runs on behalf of, is kept up to date after a look: Linux looks at
/// the bandwidth of each group once in a second, and a second is 2.7 thousand million steps on the fastest part. Another RMID's count
/// only falls while nobody is associated with it, as others take its lines, for which a time slice a look is enough.
const BETWEEN_LOOKS: u64 = 3_500_000_000;

/// The ways of a cache that a mask allows.
fn share(mask: u64, cache: Option<CacheAllocation>, ways: u32) -> u32 {
    let ways = ways.min(32);
    let length = cache.map_or(ways, |cache| cache.length).max(1);
    (0..ways)
        .filter(|way| mask >> (way * length / ways) & 1 != 0)
        .fold(0, |all, way| all | 1 << way)
}

/// The last number that the manual leaves for delays.
const LAST_DELAY: u32 = IA32_MBA_THRTL_0 + 0x3F;

#[cfg(test)]
#[path = "rdt_test.rs"]
mod tests;
