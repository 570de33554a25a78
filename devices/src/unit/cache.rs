//! A small deterministic model of the caches and TLBs: where an access finds its data, and whose lines are where.
//!
//! # Theory
//! Nothing here makes a program faster; the caches exist so that counters, load latencies and the resource director have
//! something plausible to tell, the same in every run, and so that what they tell agrees: there is one model, and all of them look at
//! it. Three levels with the sizes of CPUID leaf 4, least recently used within a set, filled by every load, store and fetch, with no
//! prefetch and no traffic between cores; TLBs of two levels before them.
//!
//! # Practice
//! Lines are known by physical address, as [`Processor::physical`](x86::watch::Processor::physical) tells it for the linear one
//! that the executor announces: what two processes share is one line, and an instruction that has changed its own mapping meets
//! the new one. An entry of a TLB is known by its page's linear and physical address, so that a mapping that has changed is met with a
//! page walk, and no instruction need be told that flushes. What is fetched follows from the branches: from where one lands to the next
//! one. The last-level cache is a piece of its own ([`SharedCache`]), so that the cores of a package can have one between them, tags its lines with the RMID that
//! brought them in, and fills only the ways that a capacity mask allows.
//!
//! # Left out
//! The accesses of page walks, large pages in the TLBs, write-backs, inclusion.

use serde::{Deserialize, Serialize};
use x86::model::CpuModel;
use x86::watch::{Access, AccessKind, BranchRecord};

/// Bytes of a line, on every part since the Pentium 4's L2.
pub const LINE: u64 = 64;
/// Sets of the last-level cache at most: a model of a hundred megabytes need not be as large.
const SETS: u32 = 1 << 14;
/// RMIDs at most.
const OWNERS: usize = 1 << 10;

/// Where data was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum HitLevel {
    /// First level.
    #[default]
    L1,
    /// Second level.
    L2,
    /// Last level.
    L3,
    /// Memory.
    Memory,
}

impl HitLevel {
    /// Core cycles from there: plausible ones.
    pub const fn latency(self) -> u16 {
        match self {
            HitLevel::L1 => 4,
            HitLevel::L2 => 12,
            HitLevel::L3 => 40,
            HitLevel::Memory => 200,
        }
    }
}

/// Where a translation was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Translation {
    /// In the first-level TLB.
    #[default]
    First,
    /// In the second-level TLB.
    Second,
    /// In the page tables.
    Walk,
}

/// An access and what became of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Linear address.
    pub address: u64,
    /// Bytes.
    pub size: u32,
    /// It read.
    pub load: bool,
    /// It wrote.
    pub store: bool,
    /// Where the data was.
    pub place: HitLevel,
    /// Where the translation was.
    pub translation: Translation,
    /// The last level was asked for it: the second where there is no third.
    pub asked: bool,
    /// How long it took, in core cycles, once its address was translated.
    pub latency: u16,
}

/// What fetching some code came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Lines that were fetched.
    pub lines: u32,
    /// Lines that were not in the first level.
    pub missed: u32,
    /// Lines that were asked of the last level.
    pub asked: u32,
    /// Lines that came from memory.
    pub memory: u32,
    /// Pages whose translation was in the second-level TLB.
    pub second: u32,
    /// Pages whose translation was in the page tables.
    pub walks: u32,
}

impl Translation {
    /// Core cycles until it is there: plausible ones.
    pub const fn latency(self) -> u16 {
        match self {
            Translation::First => 0,
            Translation::Second => 7,
            Translation::Walk => 30,
        }
    }
}

impl Memory {
    /// The latency of a record: in one number on most parts; since Golden Cove that of the whole instruction in bits 15:0 and that of
    /// the caches alone in bits 47:32. SDM Vol. 3B 21.9.2.2 "Adaptive PEBS Record Format".
    pub const fn latencies(&self, apart: bool) -> u64 {
        let caches = self.latency as u64;
        if apart {
            (self.latency + self.translation.latency()) as u64 | caches << 32
        } else {
            caches
        }
    }

    /// The data source of a record: SDM Vol. 3B Table 21-27 "Data Source Encoding for Load Latency Record", and for stores
    /// Table 21-38 "Layout of Precise Store Information In PEBS Record".
    pub const fn source(&self) -> u8 {
        if !self.load {
            // Bit 0: the store hit the first-level cache.
            return matches!(self.place, HitLevel::L1) as u8 & self.store as u8;
        }
        match self.place {
            HitLevel::L1 => 0x1,
            HitLevel::L2 => 0x3,
            HitLevel::L3 => 0x4,
            // From local memory, shared.
            HitLevel::Memory => 0xA,
        }
    }
}

/// On whose behalf a line is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Resource monitoring ID.
    pub rmid: u16,
    /// Ways of the last-level cache that may be filled.
    pub ways: u32,
    /// Ways of the second level that may be filled.
    pub second: u32,
}

impl Owner {
    /// RMID 0, all ways.
    pub const ANYBODY: Self = Self {
        rmid: 0,
        ways: !0,
        second: !0,
    };
}

/// The shape of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Sets.
    pub sets: u32,
    /// Ways.
    pub ways: u32,
}

impl Geometry {
    /// The data or unified cache of this level by CPUID leaf 4, or what a part without the leaf may have.
    pub fn of(model: &CpuModel, level: u32) -> Self {
        Self::kind(model, level, 1)
    }

    /// The instruction cache of the first level.
    pub fn code(model: &CpuModel) -> Self {
        Self::kind(model, 1, 2)
    }

    /// A cache of this type, or a unified one.
    fn kind(model: &CpuModel, level: u32, kind: u32) -> Self {
        for subleaf in 0..8 {
            let [eax, ebx, ecx, _] = model.cpuid(4, subleaf);
            if (eax & 0x1F == kind || eax & 0x1F == 3) && eax >> 5 & 7 == level {
                return Self {
                    sets: ecx.saturating_add(1),
                    ways: (ebx >> 22) + 1,
                };
            }
        }
        match level {
            1 => Self { sets: 64, ways: 8 },
            2 => Self { sets: 512, ways: 8 },
            // Without a third level the second is the last: an access that misses there goes to memory.
            _ => Self { sets: 0, ways: 0 },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CacheLine {
    /// Physical address in lines; [`EMPTY`] for none.
    number: u64,
    used: u32,
    rmid: u16,
}

const EMPTY: u64 = u64::MAX;
const NO_LINE: CacheLine = CacheLine {
    number: EMPTY,
    used: 0,
    rmid: 0,
};

/// One cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    sets: u32,
    ways: u32,
    clock: u32,
    lines: Vec<CacheLine>,
}

/// What an access to one cache came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// It was there.
    pub hit: bool,
    /// The owner of the line that had to go.
    pub evicted: Option<u16>,
    /// It is there now: a mask without ways fills nothing.
    pub filled: bool,
}

impl Cache {
    fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// Empties it.
    fn clear(&mut self) {
        self.lines.fill(NO_LINE);
        self.clock = 0;
    }

    /// An empty cache, of at most so many sets.
    pub fn new(geometry: Geometry, most: u32) -> Self {
        let (sets, ways) = (geometry.sets.min(most), geometry.ways.min(32));
        Self {
            sets,
            ways,
            clock: 0,
            lines: vec![NO_LINE; (sets * ways) as usize],
        }
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.lines.len() as u64 * LINE
    }

    /// Looks a line up by its number, and fills it in for its owner if it is not there.
    pub fn access(&mut self, number: u64, owner: Owner) -> Found {
        if self.lines.is_empty() {
            return Found {
                hit: false,
                evicted: None,
                filled: false,
            };
        }
        self.clock = match self.clock.checked_add(1) {
            Some(clock) => clock,
            None => {
                // Once in four billion accesses everybody is equally old.
                self.lines.iter_mut().for_each(|line| line.used = 0);
                1
            }
        };
        let set = (number % u64::from(self.sets)) as usize * self.ways as usize;
        let lines = &mut self.lines[set..][..self.ways as usize];
        if let Some(line) = lines.iter_mut().find(|line| line.number == number) {
            line.used = self.clock;
            return Found {
                hit: true,
                evicted: None,
                filled: true,
            };
        }
        let allowed = |way: usize| owner.ways >> way & 1 != 0;
        let victim = (0..lines.len())
            .filter(|&way| allowed(way))
            .min_by_key(|&way| (lines[way].number != EMPTY, lines[way].used));
        let Some(way) = victim else {
            return Found {
                hit: false,
                evicted: None,
                filled: false,
            };
        };
        let old = std::mem::replace(
            &mut lines[way],
            CacheLine {
                number,
                used: self.clock,
                rmid: owner.rmid,
            },
        );
        Found {
            hit: false,
            evicted: (old.number != EMPTY).then_some(old.rmid),
            filled: true,
        }
    }
}

/// What a core has for itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Core {
    l1: Cache,
    l1i: Cache,
    l2: Cache,
    tlb: Cache,
    code_tlb: Cache,
    second_tlb: Cache,
    /// The step of the last access, and where the code goes on that has been fetched up to there.
    last: u64,
    next: Option<u64>,
}

/// Sets and ways of the TLBs: as large as most parts have them.
const TLB: Geometry = Geometry { sets: 16, ways: 4 };
const CODE_TLB: Geometry = Geometry { sets: 16, ways: 8 };
const SECOND_TLB: Geometry = Geometry { sets: 128, ways: 12 };

/// Steps after which a core's own caches hold nothing of its program any more, if nobody has asked for its accesses: about a time
/// slice of an operating system. A counter that is stopped for an interrupt and started again finds them as they were.
pub const SLICE: u64 = 4_000_000;

/// The longest run of code that is fetched between two branches; what is said to be longer has been elsewhere.
const RUN: u64 = 1 << 12;

/// What the cores of a package share: the last level, and who has how much of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedCache {
    l3: Cache,
    /// Lines in the cache, by RMID.
    lines: Vec<u64>,
    /// Lines from memory, by RMID.
    traffic: Vec<u64>,
}

impl Core {
    /// What its state takes of the host's memory, in bytes.
    pub fn bytes(&self) -> usize {
        let caches = [
            &self.l1,
            &self.l1i,
            &self.l2,
            &self.tlb,
            &self.code_tlb,
            &self.second_tlb,
        ];
        caches.into_iter().map(Cache::bytes).sum()
    }
}

impl SharedCache {
    /// What its state takes of the host's memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.l3.bytes() + size_of_val(&*self.lines) + size_of_val(&*self.traffic)
    }

    /// The model's last level, empty.
    pub fn of(model: &CpuModel) -> Self {
        Self {
            l3: Cache::new(Geometry::of(model, 3), SETS),
            lines: Vec::new(),
            traffic: Vec::new(),
        }
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.l3.size()
    }

    /// The level before the last one.
    fn before(&self) -> HitLevel {
        if self.l3.lines.is_empty() {
            HitLevel::L1
        } else {
            HitLevel::L2
        }
    }

    /// Bytes that this RMID has in the cache.
    pub fn occupancy(&self, rmid: u32) -> u64 {
        self.lines.get(rmid as usize).copied().unwrap_or(0) * LINE
    }

    /// Bytes that have come from memory for this RMID.
    pub fn traffic(&self, rmid: u32) -> u64 {
        self.traffic.get(rmid as usize).copied().unwrap_or(0).wrapping_mul(LINE)
    }

    fn access(&mut self, line: u64, owner: Owner) -> HitLevel {
        let found = self.l3.access(line, owner);
        if found.hit {
            return HitLevel::L3;
        }
        let own = usize::from(owner.rmid).min(OWNERS - 1);
        if self.lines.len() <= own {
            self.lines.resize(own + 1, 0);
            self.traffic.resize(own + 1, 0);
        }
        self.traffic[own] = self.traffic[own].wrapping_add(1);
        self.lines[own] += u64::from(found.filled);
        if let Some(lines) = found
            .evicted
            .and_then(|rmid| self.lines.get_mut(usize::from(rmid).min(OWNERS - 1)))
        {
            *lines = lines.saturating_sub(1);
        }
        HitLevel::Memory
    }
}

impl Core {
    /// The model's first two levels and its TLBs, empty.
    pub fn of(model: &CpuModel) -> Self {
        Self {
            l1: Cache::new(Geometry::of(model, 1), SETS),
            l1i: Cache::new(Geometry::code(model), SETS),
            l2: Cache::new(Geometry::of(model, 2), SETS),
            tlb: Cache::new(TLB, SETS),
            code_tlb: Cache::new(CODE_TLB, SETS),
            second_tlb: Cache::new(SECOND_TLB, SETS),
            last: 0,
            next: None,
        }
    }

    /// Something is accessed at this step. What was there a time slice ago has gone since, unless accesses were heard of all the time.
    fn now(&mut self, step: u64) {
        if step.wrapping_sub(self.last) > SLICE {
            let Self {
                l1,
                l1i,
                l2,
                tlb,
                code_tlb,
                second_tlb,
                ..
            } = self;
            [l1, l1i, l2, tlb, code_tlb, second_tlb]
                .into_iter()
                .for_each(Cache::clear);
            self.next = None;
        }
        self.last = step;
    }

    /// An access at a step, with what tells physical addresses. `None` for ports.
    pub fn access(
        &mut self,
        access: &Access,
        step: u64,
        mut physical: impl FnMut(u64) -> Option<u64>,
        shared: &mut SharedCache,
        owner: Owner,
    ) -> Option<Memory> {
        let (load, store) = match access.kind {
            AccessKind::Read => (true, false),
            AccessKind::Write => (false, true),
            AccessKind::ReadWrite => (true, true),
            AccessKind::PortRead | AccessKind::PortWrite => return None,
        };
        self.now(step);
        let last = access.address.wrapping_add(u64::from(access.size.max(1)) - 1);
        let mut one = |linear: u64| {
            // What is mapped no longer counts as where it was reported.
            let physical = physical(linear).unwrap_or(linear);
            let translation = translate(&mut self.tlb, &mut self.second_tlb, linear, physical);
            (
                translation,
                line(&mut self.l1, &mut self.l2, physical / LINE, shared, owner),
            )
        };
        let mut found = one(access.address);
        // The slower line makes the access wait. An access has two at most: what is longer than a line is cut.
        if last / LINE != access.address / LINE {
            let (translation, place) = one(last);
            found = (found.0.max(translation), found.1.max(place));
        }
        let (translation, place) = found;
        Some(Memory {
            address: access.address,
            size: access.size,
            load,
            store,
            place,
            translation,
            asked: place > shared.before(),
            latency: place.latency(),
        })
    }

    /// Branches were executed: what was fetched between them, however they are handed over.
    pub fn branches(
        &mut self,
        records: &[BranchRecord],
        mut physical: impl FnMut(u64) -> Option<u64>,
        shared: &mut SharedCache,
        owner: Owner,
    ) -> Fetched {
        let mut fetched = Fetched::default();
        for record in records {
            self.now(record.step);
            let from = self.next.replace(record.to).unwrap_or(record.from);
            let length = record.from.wrapping_sub(from);
            // Code that was not announced lies between the two.
            let from = if length < RUN { from } else { record.from };
            let (mut page, mut translated) = (None, 0);
            for number in from / LINE..=record.from / LINE {
                let linear = number * LINE;
                if page.replace(linear >> 12) != Some(linear >> 12) {
                    translated = physical(linear).unwrap_or(linear);
                    match translate(&mut self.code_tlb, &mut self.second_tlb, linear, translated) {
                        Translation::First => {}
                        Translation::Second => fetched.second += 1,
                        Translation::Walk => fetched.walks += 1,
                    }
                }
                let place = translated & !0xFFF | linear & 0xFFF;
                let place = line(&mut self.l1i, &mut self.l2, place / LINE, shared, owner);
                fetched.lines += 1;
                fetched.missed += u32::from(place > HitLevel::L1);
                fetched.asked += u32::from(place > shared.before());
                fetched.memory += u32::from(place == HitLevel::Memory);
            }
        }
        fetched
    }
}

/// Looks a translation up, and fills it in.
fn translate(first: &mut Cache, second: &mut Cache, linear: u64, physical: u64) -> Translation {
    let number = linear >> 12 & 0xF_FFFF_FFFF | physical >> 12 << 36;
    if first.access(number, Owner::ANYBODY).hit {
        Translation::First
    } else if second.access(number, Owner::ANYBODY).hit {
        Translation::Second
    } else {
        Translation::Walk
    }
}

/// Looks a line up from its first level on, and fills it in.
fn line(first: &mut Cache, second: &mut Cache, number: u64, shared: &mut SharedCache, owner: Owner) -> HitLevel {
    if first.access(number, Owner::ANYBODY).hit {
        return HitLevel::L1;
    }
    let ways = owner.second;
    if second.access(number, Owner { ways, ..owner }).hit {
        return HitLevel::L2;
    }
    shared.access(number, owner)
}

/// All levels, for one core alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hierarchy {
    core: Core,
    shared: SharedCache,
}

impl Hierarchy {
    /// The model's caches, empty.
    pub fn of(model: &CpuModel) -> Self {
        Self {
            core: Core::of(model),
            shared: SharedCache::of(model),
        }
    }

    /// As [`Core::access`].
    pub fn access(&mut self, access: &Access, physical: impl FnMut(u64) -> Option<u64>) -> Option<Memory> {
        self.core.access(access, 0, physical, &mut self.shared, Owner::ANYBODY)
    }

    /// As [`Core::branches`].
    pub fn branches(&mut self, records: &[BranchRecord], physical: impl FnMut(u64) -> Option<u64>) -> Fetched {
        self.core.branches(records, physical, &mut self.shared, Owner::ANYBODY)
    }
}

#[cfg(test)]
#[path = "cache_test.rs"]
mod tests;
