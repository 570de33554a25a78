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
use x86::seam::{Access, BranchRecord};

use super::cache::{Core, Fetched, Geometry, Memory, Owner, SharedCache};

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
mod tests {
    use super::*;
    use x86::model::{BROADWELL, ICELAKE_SERVER, MODELS, SAPPHIRERAPIDS, SKYLAKE_SERVER, SNOWRIDGE, WESTMERE};

    /// An L3 in which every RMID has a thousand lines for each of its number, and has moved ten times that.
    struct Full;

    impl Meter for Full {
        fn occupancy(&self, rmid: u32) -> Option<u64> {
            Some(u64::from(rmid) * 1000 * 64)
        }

        fn traffic(&self, rmid: u32) -> Option<u64> {
            Some(u64::from(rmid) * 10_000 * 64)
        }
    }

    fn at_reset(model: &CpuModel) -> (Package, Thread) {
        (Package::new(model), Thread::new(model))
    }

    // covers: rdt/registers
    #[test]
    fn registers_take_what_the_models_cpuid_allows() {
        let ok = Ok(());
        let gp = Err(GP);
        let none = Err(MsrFault::Unclaimed);
        for (model, msr, value, expected) in [
            (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 0xBF, ok),
            (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 0xC0, gp), // above CPUID.0FH.0:EBX
            (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 0xF << 32 | 1, ok),
            (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 0x10 << 32, gp), // above the highest class of all resources
            (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 1 << 63, gp),
            (&SKYLAKE_SERVER, IA32_QM_EVTSEL, 0xBF << 32 | 0xFF, ok),
            (&SKYLAKE_SERVER, IA32_QM_EVTSEL, 0xC0 << 32 | 1, gp),
            (&SKYLAKE_SERVER, IA32_QM_EVTSEL, 0x101, gp),
            (&SKYLAKE_SERVER, IA32_QM_CTR, 0, gp), // read-only
            (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0 + 15, 0x7FF, ok),
            (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0 + 15, 0x800, gp),
            (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0, 0x5, gp), // in two pieces
            (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0, 0, gp),
            (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0 + 16, 1, gp), // above the highest class
            (&SKYLAKE_SERVER, IA32_L3_QOS_CFG, 1, ok),
            (&SKYLAKE_SERVER, IA32_L3_QOS_CFG, 2, gp),
            (&SKYLAKE_SERVER, IA32_L2_QOS_CFG, 1, none),
            (&SKYLAKE_SERVER, IA32_L2_QOS_MASK_0, 1, none),
            (&SKYLAKE_SERVER, IA32_MBA_THRTL_0 + 7, 90, ok),
            (&SKYLAKE_SERVER, IA32_MBA_THRTL_0 + 7, 91, gp),
            (&SKYLAKE_SERVER, IA32_MBA_THRTL_0 + 8, 10, gp),
            (&ICELAKE_SERVER, IA32_L3_QOS_MASK_0 + 14, 0xFFF, ok),
            (&ICELAKE_SERVER, IA32_L3_QOS_MASK_0 + 15, 0xFFF, gp),
            (&ICELAKE_SERVER, IA32_L3_QOS_CFG, 0, none),
            (&SNOWRIDGE, IA32_L2_QOS_MASK_0 + 15, 0x3FFFF, ok),
            (&SNOWRIDGE, IA32_L2_QOS_MASK_0 + 15, 0x40000, gp),
            (&SNOWRIDGE, IA32_L2_QOS_CFG, 1, none),
            (&SNOWRIDGE, IA32_QM_EVTSEL, 1, none), // allocation without monitoring
            (&SNOWRIDGE, IA32_PQR_ASSOC, 0xF << 32, ok),
            (&SNOWRIDGE, IA32_PQR_ASSOC, 1, gp),
            (&SAPPHIRERAPIDS, IA32_L2_QOS_CFG, 1, ok),
            (&BROADWELL, IA32_L3_QOS_MASK_0 + 3, 0xF_FFFF, ok),
            (&BROADWELL, IA32_MBA_THRTL_0, 0, none),
            (&WESTMERE, IA32_PQR_ASSOC, 0, none),
            (&WESTMERE, IA32_L3_QOS_MASK_0, 1, none),
        ] {
            let (mut package, mut thread) = at_reset(model);
            let (before, thread_before) = (package.state(), thread.clone());
            assert_eq!(
                package.write_msr(&mut thread, msr, value),
                expected,
                "{} {msr:#x} {value:#x}",
                model.name
            );
            if expected == ok {
                let read = package.read_msr(&thread, msr, &Unmetered);
                assert_eq!(read, Ok(value), "{} {msr:#x}", model.name);
            } else {
                assert_eq!((package.state(), thread), (before, thread_before), "{msr:#x}");
            }
        }
    }

    // covers: rdt/registers
    #[test]
    fn masks_allow_everything_at_reset_and_models_without_rdt_have_no_registers() {
        for model in MODELS {
            let (package, thread) = at_reset(model);
            for msr in [IA32_PQR_ASSOC, IA32_QM_EVTSEL, IA32_L3_QOS_MASK_0, IA32_L2_QOS_MASK_0] {
                let expected = match (RdtCaps::of(model), msr) {
                    (Some(_), IA32_PQR_ASSOC) => Ok(0),
                    (Some(caps), IA32_QM_EVTSEL) if caps.max_rmid.is_some() => Ok(0),
                    (Some(caps), IA32_L3_QOS_MASK_0) if caps.l3.is_some() => Ok(caps.l3.unwrap().full()),
                    (Some(caps), IA32_L2_QOS_MASK_0) if caps.l2.is_some() => Ok(caps.l2.unwrap().full()),
                    _ => Err(MsrFault::Unclaimed),
                };
                assert_eq!(
                    package.read_msr(&thread, msr, &Full),
                    expected,
                    "{} {msr:#x}",
                    model.name
                );
            }
        }
        assert!(MODELS.iter().filter(|model| RdtCaps::of(model).is_some()).count() >= 6);
    }

    // covers: rdt/counter
    #[test]
    fn the_counter_answers_for_the_selected_rmid_and_event() {
        let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
        let unit = 0x18000;
        for (event, rmid, expected) in [
            (0, 1, ERROR), // no monitoring
            (4, 1, ERROR), // reserved
            (1, 5, 5 * 64_000 / unit),
            (2, 5, 5 * 640_000 / unit),
            (3, 5, 5 * 640_000 / unit),
            (1, 0, 0),
        ] {
            package
                .write_msr(&mut thread, IA32_QM_EVTSEL, rmid << 32 | event)
                .unwrap();
            let read = package.read_msr(&thread, IA32_QM_CTR, &Full);
            assert_eq!(read, Ok(expected), "event {event}, RMID {rmid}");
            if expected != ERROR {
                assert_eq!(package.read_msr(&thread, IA32_QM_CTR, &Unmetered), Ok(UNAVAILABLE));
            }
        }
        // An RMID that IA32_QM_EVTSEL takes, but the L3 does not monitor.
        let mut narrow = *package.caps().unwrap();
        narrow.l3_monitor.as_mut().unwrap().max_rmid = 3;
        package.caps = Some(narrow);
        package.write_msr(&mut thread, IA32_QM_EVTSEL, 4 << 32 | 1).unwrap();
        assert_eq!(package.read_msr(&thread, IA32_QM_CTR, &Full), Ok(ERROR));
    }

    // covers: rdt/counter
    #[test]
    fn bandwidth_counters_wrap_at_their_width() {
        struct Wide;
        impl Meter for Wide {
            fn occupancy(&self, _: u32) -> Option<u64> {
                None
            }
            fn traffic(&self, _: u32) -> Option<u64> {
                Some(((1 << 24) + 3) * 0x12000)
            }
        }
        // 24 bits, in units of 72 KiB.
        let (mut package, mut thread) = at_reset(&BROADWELL);
        package.write_msr(&mut thread, IA32_QM_EVTSEL, 1 << 32 | 2).unwrap();
        assert_eq!(package.read_msr(&thread, IA32_QM_CTR, &Wide), Ok(3));
    }

    /// A processor that walks over so many lines, from this one on.
    fn walk(probe: &mut Probe, from: u64, lines: u64) {
        for line in from..from + lines {
            let access = Access {
                address: line * 64,
                size: 8,
                kind: x86::seam::AccessKind::Read,
                ip: 0,
            };
            probe.access(&access, 0, Some);
        }
    }

    // covers: rdt/occupancy
    #[test]
    fn occupancy_and_traffic_follow_the_association_and_the_capacity_mask() {
        let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
        assert!(!package.in_use(&thread));
        package.write_msr(&mut thread, IA32_PQR_ASSOC, 1 << 32 | 7).unwrap();
        assert!(package.in_use(&thread));
        let ways = Geometry::of(&SKYLAKE_SERVER, 3).ways;
        let last = LastLevel::new(&SKYLAKE_SERVER);
        let mut probe = Probe::new(Core::of(&SKYLAKE_SERVER), last.clone());
        probe.set_owners(package.owners(&thread, &SKYLAKE_SERVER));
        // Half a megabyte for RMID 7, twice: the second time it is there.
        walk(&mut probe, 0, 8192);
        walk(&mut probe, 0, 8192);
        assert_eq!((last.occupancy(7), last.traffic(7)), (Some(8192 * 64), Some(8192 * 64)));
        assert_eq!(last.occupancy(0), Some(0));
        // One way of eleven is all that class 1 may fill: what is walked over twice its size does not stay.
        package.write_msr(&mut thread, IA32_L3_QOS_MASK_0 + 1, 1).unwrap();
        package.write_msr(&mut thread, IA32_PQR_ASSOC, 1 << 32 | 8).unwrap();
        probe.set_owners(package.owners(&thread, &SKYLAKE_SERVER));
        let way = last.contents().size() / 64 / u64::from(ways);
        walk(&mut probe, 1 << 30, 2 * way);
        assert_eq!(last.occupancy(8), Some(way * 64));
        assert_eq!(last.traffic(8), Some(2 * way * 64));
        package.write_msr(&mut thread, IA32_QM_EVTSEL, 8 << 32 | 1).unwrap();
        let counted = package.read_msr(&thread, IA32_QM_CTR, &last).unwrap();
        assert_eq!(counted, way * 64 / 0x18000);
    }

    // covers: rdt/masks
    #[test]
    fn a_mask_of_another_length_than_the_cache_has_ways_stands_for_shares() {
        let l3 = RdtCaps::of(&SKYLAKE_SERVER).unwrap().l3;
        assert_eq!(l3.unwrap().length, 11);
        for (ways, expected) in [(11, 0b11), (22, 0b1111), (1, 1), (0, 0), (32, 0b11_1111)] {
            assert_eq!(share(0b11, l3, ways), expected, "{ways} ways");
        }
        let (package, thread) = at_reset(&WESTMERE);
        let owners = package.owners(&thread, &WESTMERE);
        assert_eq!(
            (owners.data.ways, owners.data.second),
            (0xFFFF, 0xFF),
            "no masks, no limit"
        );
    }

    // covers: rdt/cdp
    #[test]
    fn with_cdp_even_masks_are_for_data_and_odd_ones_for_code() {
        let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
        for n in 0..16 {
            let mask = 1 << (n % 11);
            package.write_msr(&mut thread, IA32_L3_QOS_MASK_0 + n, mask).unwrap();
        }
        for code in [false, true] {
            assert_eq!(package.l3_mask(3, code), 1 << 3);
        }
        package.write_msr(&mut thread, IA32_L3_QOS_CFG, 1).unwrap();
        assert_eq!((package.l3_mask(3, false), package.l3_mask(3, true)), (1 << 6, 1 << 7));
        assert_eq!(package.l3_mask(8, false), 0x7FF, "a class that CDP leaves no masks for");
    }

    /// Code that is executed from here, a jump a line, over so many lines.
    fn run(probe: &mut Probe, from: u64, lines: u64) {
        for line in from..from + lines {
            let record = BranchRecord {
                from: line * 64,
                to: line * 64 + 64,
                ..BranchRecord::default()
            };
            probe.branches(&[record], Some);
        }
    }

    /// SDM Vol. 3B 18.19.5.1 "Mapping Between L3 CDP Masks and CAT Masks": code and data of one class have masks of their own.
    // covers: rdt/cdp, rdt/l2-masks
    #[test]
    fn code_and_data_stay_in_the_ways_of_their_masks() {
        let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
        let mut write = |package: &mut Package, msr, value| package.write_msr(&mut thread, msr, value).unwrap();
        write(&mut package, IA32_PQR_ASSOC, 1 << 32 | 5);
        write(&mut package, IA32_L3_QOS_CFG, 1);
        // Class 1: one way for data, two for code.
        write(&mut package, IA32_L3_QOS_MASK_0 + 2, 1);
        write(&mut package, IA32_L3_QOS_MASK_0 + 3, 6);
        let last = LastLevel::new(&SKYLAKE_SERVER);
        let mut probe = Probe::new(Core::of(&SKYLAKE_SERVER), last.clone());
        probe.set_owners(package.owners(&thread, &SKYLAKE_SERVER));
        let way = last.contents().size() / 64 / u64::from(Geometry::of(&SKYLAKE_SERVER, 3).ways);
        walk(&mut probe, 1 << 30, 4 * way);
        assert_eq!(last.occupancy(5), Some(way * 64), "data");
        run(&mut probe, 1 << 31, 4 * way);
        assert_eq!(last.occupancy(5), Some(3 * way * 64), "and code beside it");
        // The other way about, data throws code out.
        package.write_msr(&mut thread, IA32_L3_QOS_CFG, 0).unwrap();
        package.write_msr(&mut thread, IA32_L3_QOS_MASK_0 + 1, 3).unwrap();
        probe.set_owners(package.owners(&thread, &SKYLAKE_SERVER));
        walk(&mut probe, 1 << 32, 4 * way);
        assert_eq!(
            last.occupancy(5),
            Some(3 * way * 64),
            "without CDP one mask is for both"
        );
        assert_eq!(last.traffic(5), Some(12 * way * 64));
    }

    // covers: rdt/l2-masks
    #[test]
    fn l2_masks_limit_what_stays_in_the_l2() {
        let (mut package, mut thread) = at_reset(&SNOWRIDGE);
        let l2 = Geometry::of(&SNOWRIDGE, 2);
        package.write_msr(&mut thread, IA32_PQR_ASSOC, 1 << 32).unwrap();
        let way = u64::from(l2.sets);
        let mut found = Vec::new();
        for ways in [1, l2.ways] {
            let mask = (1 << RdtCaps::of(&SNOWRIDGE).unwrap().l2.unwrap().length) - 1;
            let mask = if ways == 1 { 1 } else { mask };
            package.write_msr(&mut thread, IA32_L2_QOS_MASK_0 + 1, mask).unwrap();
            let mut probe = Probe::new(Core::of(&SNOWRIDGE), LastLevel::new(&SNOWRIDGE));
            probe.set_owners(package.owners(&thread, &SNOWRIDGE));
            // Half of the cache, twice.
            let lines = way * u64::from(l2.ways) / 2;
            walk(&mut probe, 0, lines);
            let read = |line: u64| Access {
                address: line * 64,
                size: 8,
                kind: x86::seam::AccessKind::Read,
                ip: 0,
            };
            let places = (0..lines).map(|line| probe.access(&read(line), 0, Some).unwrap().place);
            found.push(
                places
                    .filter(|place| *place == super::super::cache::HitLevel::L2)
                    .count() as u64,
            );
        }
        assert_eq!(found[0], 0, "one way does not hold half of it: {found:?}");
        assert!(found[1] > way * u64::from(l2.ways) / 4, "all ways do: {found:?}");
    }

    // covers: rdt/mba
    #[test]
    fn a_linear_delay_reads_back_as_the_step_that_it_becomes() {
        let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
        package.write_msr(&mut thread, IA32_MBA_THRTL_0 + 1, 55).unwrap();
        assert_eq!(package.read_msr(&thread, IA32_MBA_THRTL_0 + 1, &Unmetered), Ok(50));
    }

    // covers: rdt/registers
    #[test]
    fn the_state_goes_out_and_comes_back_to_a_package_of_its_shape() {
        let (mut a, mut thread) = at_reset(&SKYLAKE_SERVER);
        a.write_msr(&mut thread, IA32_L3_QOS_MASK_0 + 2, 0x70).unwrap();
        a.write_msr(&mut thread, IA32_MBA_THRTL_0, 30).unwrap();
        let mut b = Package::new(&SKYLAKE_SERVER);
        b.set_state(&a.state()).unwrap();
        assert_eq!(a, b);
        let mut other = Package::new(&WESTMERE);
        other.set_state(&a.state()).unwrap_err();
        assert_eq!(other, Package::new(&WESTMERE));
    }
}
