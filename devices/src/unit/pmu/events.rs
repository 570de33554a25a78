//! What a counter adds up, from what it hears.

use x86::pmu::netburst;
use x86::pmu::{Branches, Caches, Count, EventSelect, Levels, Offcore, Transactions};
use x86::watch::{BranchRecord, Flow, Recorded};

use super::classify::{Class, Classes};
use super::plan::CountRule;
use crate::unit::cache::{Fetched, HitLevel, LINE, Memory, Translation};

/// Where the events come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The processor's count of instructions.
    Instructions,
    /// The step clock.
    Cycles,
    /// The step clock, one event in several steps.
    Reference,
    /// The step clock, several events a step.
    Slots,
    Branches(Branches),
    Mispredicted(Branches),
    Loads(Levels),
    Stores,
    LoadLatency,
    Caches(Caches),
    /// Requests to the last level.
    Offcore(Offcore),
    /// Instructions of these classes, in ring 0 and in the others.
    Classes([Classes; 2]),
    Transactions(Transactions),
    /// Branches that were not taken and predicted (bit 0), not taken and mispredicted (1), taken and predicted (2), taken and
    /// mispredicted (3).
    Outcomes(u8),
    /// What becomes of accesses and fetches, in ring 0 and in the others.
    Memory([netburst::Memory; 2]),
    /// Instructions with such an access, in ring 0 and in the others; or without one.
    Tagged {
        by: [netburst::Memory; 2],
        without: bool,
    },
}

/// How often they count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rate {
    /// Each event; as no cycle has two of them, each cycle with an event, too.
    Events,
    /// Each cycle without one.
    Idle,
    /// Each cycle.
    Cycles,
    /// Not at all.
    Never,
}

/// How far an overflow is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Distance {
    /// At least so many instructions.
    pub instructions: u64,
    /// At least so many branches, where these are what is counted.
    pub branches: Option<u64>,
}

impl Source {
    pub fn is_branch(self) -> bool {
        matches!(
            self,
            Source::Branches(_) | Source::Mispredicted(_) | Source::Outcomes(_)
        )
    }

    /// The branches that must be recorded to count it.
    pub fn recorded(self) -> Recorded {
        const NOT_TAKEN: Flow = Flow::Cond { taken: false };
        match self {
            Source::Branches(kinds) | Source::Mispredicted(kinds) if kinds.has(NOT_TAKEN) => Recorded::All,
            Source::Outcomes(which) if which & 0b11 != 0 => Recorded::All,
            source if source.is_branch() => Recorded::Taken,
            _ => Recorded::All,
        }
    }

    pub fn is_mispredicted(self) -> bool {
        matches!(self, Source::Mispredicted(_) | Source::Outcomes(_))
    }

    pub fn is_access(self) -> bool {
        match self {
            Source::Loads(_) | Source::Stores | Source::LoadLatency | Source::Tagged { .. } => true,
            Source::Memory(what) => what.iter().any(|what| what.of_data()),
            Source::Caches(what) => what.of_data(),
            Source::Offcore(which) => which.loads || which.stores,
            _ => false,
        }
    }

    pub fn is_fetch(self) -> bool {
        match self {
            Source::Caches(what) => what.of_code(),
            Source::Memory(what) => what.iter().any(|what| what.meets(netburst::Memory::OF_CODE)),
            Source::Offcore(which) => which.fetches,
            _ => false,
        }
    }

    pub fn is_class(self) -> bool {
        matches!(self, Source::Classes(_))
    }

    pub fn is_transactions(self) -> bool {
        matches!(self, Source::Transactions(_))
    }

    /// What counts in ring 0 is not what counts in the others.
    pub fn differs_by_ring(self) -> bool {
        match self {
            Source::Classes([zero, others]) => zero != others,
            Source::Memory([zero, others]) | Source::Tagged { by: [zero, others], .. } => zero != others,
            _ => false,
        }
    }

    /// Something in every cycle, or nearly.
    pub fn is_clock(self) -> bool {
        matches!(self, Source::Instructions | Source::Cycles | Source::Slots)
    }

    /// The codes of branches that count, as bits.
    pub fn codes(self) -> u32 {
        let Source::Branches(kinds) = self else { return 0 };
        let all = Flow::ALL.into_iter().filter(|&flow| kinds.has(flow));
        all.fold(0, |codes, flow| codes | 1 << flow.code())
    }

    pub fn has_branch(self, record: &BranchRecord, wrong: bool) -> bool {
        let Some(flow) = Flow::from_code(record.flow) else {
            return false;
        };
        match self {
            Source::Branches(kinds) => kinds.has(flow),
            Source::Mispredicted(kinds) => wrong && kinds.has(flow),
            Source::Outcomes(which) => {
                Branches::ALL.has(flow) && which >> (2 * u8::from(flow.taken()) + u8::from(wrong)) & 1 != 0
            }
            _ => false,
        }
    }

    /// `threshold` is the load latency that has to be exceeded; `None` where the facility is off.
    pub fn has_access(self, memory: &Memory, threshold: Option<u16>) -> bool {
        let place = match memory.place {
            HitLevel::L1 => Levels::L1,
            HitLevel::L2 => Levels::L2,
            HitLevel::L3 => Levels::L3,
            HitLevel::Memory => Levels::MEMORY,
        };
        match self {
            Source::Loads(levels) => memory.load && levels.meets(place),
            Source::Stores => memory.store,
            Source::LoadLatency => memory.load && threshold.is_some_and(|least| memory.latency > least),
            Source::Offcore(which) => {
                // What writes is asked for as something that will be owned.
                let wanted = if memory.store { which.stores } else { which.loads };
                let missed = memory.place == HitLevel::Memory;
                memory.asked && wanted && if missed { which.misses } else { which.hits }
            }
            Source::Caches(what) => {
                let missed = memory.asked && memory.place == HitLevel::Memory;
                match what {
                    Caches::Accesses => memory.load || memory.store,
                    Caches::References => memory.asked,
                    Caches::Misses => missed,
                    Caches::LoadReferences => memory.load && memory.asked,
                    Caches::LoadMisses => memory.load && missed,
                    Caches::StoreReferences => memory.store && memory.asked,
                    Caches::StoreMisses => memory.store && missed,
                    Caches::DataFills => memory.place > HitLevel::L1,
                    Caches::StoreFills => memory.store && memory.place > HitLevel::L1,
                    Caches::LoadTlbMisses => memory.load && memory.translation > Translation::First,
                    Caches::LoadTlbSecond => memory.load && memory.translation == Translation::Second,
                    Caches::LoadWalks => memory.load && memory.translation == Translation::Walk,
                    Caches::StoreTlbMisses => memory.store && memory.translation > Translation::First,
                    Caches::StoreTlbSecond => memory.store && memory.translation == Translation::Second,
                    Caches::StoreWalks => memory.store && memory.translation == Translation::Walk,
                    Caches::Fetches
                    | Caches::FetchMisses
                    | Caches::FetchTlbMisses
                    | Caches::FetchTlbSecond
                    | Caches::FetchWalks
                    | Caches::Offcore(_) => false,
                }
            }
            _ => false,
        }
    }

    /// Events in an access in this ring (0, or 1 for all others).
    pub fn accesses(self, memory: &Memory, threshold: Option<u16>, ring: usize) -> u32 {
        match self {
            Source::Memory(what) => accesses(what[ring], memory),
            Source::Tagged { by, .. } => accesses(by[ring], memory).min(1),
            _ => u32::from(self.has_access(memory, threshold)),
        }
    }

    /// Events in what was fetched in this ring.
    pub fn fetches(self, fetched: &Fetched, ring: usize) -> u32 {
        match self {
            Source::Memory(what) => {
                let walks = fetched.second + fetched.walks;
                let of = |bit, events| if what[ring].meets(bit) { events } else { 0 };
                of(netburst::Memory::FETCH_WALKS, walks)
                    + of(netburst::Memory::FETCH_HITS, fetched.lines.saturating_sub(walks))
                    + of(netburst::Memory::FETCH_MISSES, fetched.missed)
            }
            Source::Caches(Caches::References) => fetched.asked,
            Source::Caches(Caches::Misses) => fetched.memory,
            Source::Caches(Caches::Fetches) => fetched.lines,
            Source::Caches(Caches::FetchMisses) => fetched.missed,
            Source::Caches(Caches::FetchTlbMisses) => fetched.second + fetched.walks,
            Source::Caches(Caches::FetchTlbSecond) => fetched.second,
            Source::Caches(Caches::FetchWalks) => fetched.walks,
            Source::Offcore(which) if which.fetches => {
                let hits = if which.hits { fetched.asked - fetched.memory } else { 0 };
                hits + if which.misses { fetched.memory } else { 0 }
            }
            _ => 0,
        }
    }
}

/// Events of the Pentium 4's in an access: one of each kind for what it loads and for what it stores. The part has one level of TLBs
/// and no third level of caches.
fn accesses(what: netburst::Memory, memory: &Memory) -> u32 {
    use netburst::Memory as M;
    let split = memory.address % LINE + u64::from(memory.size) > LINE;
    let walk = memory.translation > Translation::First;
    let (beyond, missed) = (memory.place > HitLevel::L1, memory.place > HitLevel::L2);
    [
        (M::LOADS, memory.load),
        (M::STORES, memory.store),
        (M::SPLIT_LOADS, memory.load && split),
        (M::SPLIT_STORES, memory.store && split),
        (M::FIRST_LEVEL_LOAD_MISSES, memory.load && beyond),
        (M::SECOND_LEVEL_LOAD_MISSES, memory.load && missed),
        (M::SECOND_LEVEL_HITS, beyond && !missed),
        (M::SECOND_LEVEL_MISSES, missed),
        (M::LOAD_WALKS, memory.load && walk),
        (M::STORE_WALKS, memory.store && walk),
    ]
    .into_iter()
    .filter(|(kind, had)| *had && what.meets(*kind))
    .count() as u32
}

/// Multiples of `unit` passed on the way from `from` by `by`.
fn passed(from: u64, by: u64, unit: u64) -> u64 {
    let phase = from % unit;
    (u128::from(phase) + u128::from(by)).div_euclid(unit.into()) as u64
}

/// How far from `from` the multiple number `n` of `unit` is.
pub(super) fn until(from: u64, n: u64, unit: u64) -> u64 {
    n.saturating_mul(unit).saturating_sub(from % unit).max(1)
}

/// Lines that may be fetched from one branch to the next: as many as a run of 4 KiB touches.
const LINES: u64 = 65;

impl CountRule {
    /// Every event adds one, and nothing else does.
    pub fn plain(&self) -> bool {
        self.rate == Rate::Events && !self.edge
    }

    /// What a counter with these qualifiers adds up.
    pub fn new(count: Count, select: EventSelect) -> Self {
        let source = match count {
            // Nothing is counted by its rate.
            Count::Instructions | Count::Nothing => Source::Instructions,
            Count::Caches(what) => Source::Caches(what),
            Count::Cycles => Source::Cycles,
            Count::Reference => Source::Reference,
            Count::Slots => Source::Slots,
            Count::Branches(kinds) => Source::Branches(kinds),
            Count::Mispredicted(kinds) => Source::Mispredicted(kinds),
            Count::Loads(levels) => Source::Loads(levels),
            Count::Stores => Source::Stores,
            Count::LoadLatency => Source::LoadLatency,
            Count::X87 => Source::Classes([Classes::X87; 2]),
            Count::Simd => Source::Classes([Classes::SIMD; 2]),
            Count::Transactions(which) => Source::Transactions(which),
        };
        // INV means nothing without a counter mask. SDM Vol. 3B 21.2.1.1 "Architectural Performance Monitoring Version 1
        // Facilities".
        let rate = match (select.counter_mask(), select.invert()) {
            (0, _) | (1, false) => Rate::Events,
            (1, true) => Rate::Idle,
            (_, false) => Rate::Never,
            (_, true) => Rate::Cycles,
        };
        let rate = if count == Count::Nothing { Rate::Never } else { rate };
        // There are slots in every cycle.
        let (source, rate) = match (source, rate, select.counter_mask()) {
            (Source::Slots, Rate::Events, 1..) => (Source::Cycles, Rate::Events),
            (_, Rate::Idle, _) if matches!(source, Source::Cycles | Source::Slots) => (source, Rate::Never),
            _ => (source, rate),
        };
        CountRule {
            source,
            rate,
            edge: select.edge(),
            in_tx: select.in_tx(),
            checkpointed: select.in_tx_checkpointed(),
        }
    }

    pub fn counts_cycles(self) -> bool {
        matches!(self.source, Source::Cycles | Source::Reference | Source::Slots)
            || matches!(self.rate, Rate::Idle | Rate::Cycles)
    }

    /// Something is added when instructions and steps have moved on.
    pub fn counts_on_its_own(self) -> bool {
        self.counts_cycles() || matches!(self.source, Source::Instructions | Source::Tagged { without: true, .. })
    }

    /// Events in so many instructions and steps from `then`; `class` is the one instruction's, and the ring that it ran in.
    pub fn moved(
        self,
        then: [u64; 2],
        instructions: u64,
        steps: u64,
        class: Option<(Class, usize)>,
        slots: u32,
        reference: u32,
    ) -> u64 {
        let always = self.source.is_clock() && self.rate == Rate::Events || self.rate == Rate::Cycles;
        if self.edge && always {
            // True in every cycle: it becomes so only when the counter starts, see `Pmu::relive`.
            return 0;
        }
        let events = match self.source {
            // Those that turn out to have one are taken off.
            Source::Instructions | Source::Tagged { without: true, .. } => instructions,
            Source::Cycles => steps,
            Source::Reference => passed(then[1], steps, reference.max(1).into()),
            Source::Slots => steps.saturating_mul(slots.into()),
            Source::Classes(own) => u64::from(class.is_some_and(|(class, ring)| own[ring].has(class))),
            // Heard of singly.
            _ => 0,
        };
        match self.rate {
            Rate::Events => events,
            Rate::Idle if self.edge => 0,
            Rate::Idle => steps.saturating_sub(events),
            Rate::Cycles => steps,
            Rate::Never => 0,
        }
    }

    /// How far the overflow is away that takes `left` more, from where counting stands.
    pub fn distance(self, left: u64) -> Distance {
        let branches = if self.source.is_branch() {
            Some(left)
        } else {
            self.source.is_fetch().then_some((left / LINES).max(1))
        };
        let none = Distance {
            instructions: u64::MAX,
            branches,
        };
        if matches!(self.rate, Rate::Idle | Rate::Cycles) {
            // At most one a cycle, and an instruction takes at least one.
            return Distance {
                instructions: left,
                branches: branches.map(|_| u64::MAX),
            };
        }
        let instructions = match self.source {
            _ if self.rate == Rate::Never => u64::MAX,
            Source::Instructions | Source::Cycles | Source::Reference | Source::Tagged { without: true, .. } => left,
            Source::Slots => left.div_ceil(8).max(1),
            _ => return none,
        };
        Distance { instructions, ..none }
    }
}

#[cfg(test)]
#[path = "events_test.rs"]
mod tests;
