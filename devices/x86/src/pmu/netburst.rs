//! The Pentium 4's performance monitoring: which event select control register (ESCR) feeds which counter, and what the events
//! are. SDM Vol. 3B 21.6.3 "Performance Monitoring (Processors Based on Intel NetBurst Microarchitecture)"; Vol. 4 "MSRs in the
//! Pentium 4 and Intel Xeon Processors".
//!
//! # Theory
//! A counter has a configuration control register (CCCR) of the same number. Its ESCR select chooses one of the ESCRs that are wired
//! to the counter, and the ESCR says which event of its unit is detected, with which of the event's mask bits, in which rings.

use bitfield_struct::bitfield;

use super::Branches;

/// Counters, and CCCRs.
pub const COUNTERS: usize = 18;
/// Their width in bits.
pub const WIDTH: u8 = 40;
/// MSR_IQ_COUNTER4, the one that samples. SDM Vol. 3B 21.6.3.8 "Processor Event-Based Sampling (PEBS)".
pub const SAMPLING: usize = 16;
/// The first ESCR's MSR number, and how many numbers there are up to the last one's.
pub const FIRST_ESCR: u32 = 0x3A0;
/// See [`FIRST_ESCR`].
pub const ESCR_NUMBERS: usize = 0x42;

/// Which of the parts: they differ in two registers and one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Generation {
    /// Models 0 to 2, which have MSR_IQ_ESCR0 and 1.
    Early,
    /// Later ones, which have `instr_completed`.
    Late,
}

impl Generation {
    /// By the signature, CPUID.1:EAX.
    pub const fn of(signature: u32) -> Self {
        if signature >> 4 & 15 < 3 && signature >> 16 & 15 == 0 {
            Self::Early
        } else {
            Self::Late
        }
    }

    /// Whether the part has this ESCR.
    pub fn has_escr(self, msr: u32) -> bool {
        let pair = ESCRS.iter().find(|pair| msr != 0 && pair.msrs.contains(&msr));
        pair.is_some_and(|pair| pair.unit != Unit::Iq || self == Self::Early)
    }

    /// Whether the part has this event.
    pub fn has(self, event: &Event) -> bool {
        !event.late || self == Self::Late
    }

    /// The event that an ESCR of this unit detects.
    pub fn detected(self, unit: Unit, escr: Escr) -> Option<&'static Event> {
        let is = |row: &&Event| row.unit == unit && row.event == escr.event();
        EVENTS.iter().find(is).filter(|row| self.has(row))
    }
}

/// An event select control register. SDM Vol. 3B 21.6.4.1 "ESCR MSRs", with the bits of logical processor 1.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Escr {
    /// Logical processor 1, CPL 1, 2 and 3.
    pub t1_usr: bool,
    /// Logical processor 1, CPL 0.
    pub t1_os: bool,
    /// Logical processor 0, CPL 1, 2 and 3.
    pub usr: bool,
    /// Logical processor 0, CPL 0.
    pub os: bool,
    /// Micro-operations that have the event are tagged for [`Counts::Execution`].
    pub tag_enable: bool,
    /// The tags.
    #[bits(4)]
    pub tag_value: u8,
    /// Which kinds of the event.
    pub mask: u16,
    /// The event.
    #[bits(6)]
    pub event: u8,
    #[bits(33)]
    __: u64,
}

/// A counter configuration control register. SDM Vol. 3B 21.6.4.2 "CCCR MSRs"; bit 11 is 21.6.3.5.7 "Extended Cascading".
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Cccr {
    #[bits(11)]
    __: u16,
    /// Counts once counter 16 or 17 has overflowed: see [`extended_cascade`].
    pub extended_cascade: bool,
    /// Counts.
    pub enable: bool,
    /// Which of the ESCRs that are wired to the counter.
    #[bits(3)]
    pub select: u8,
    /// Counts while neither (0), one (1), both (2) or any (3) of the logical processors of the core are active.
    #[bits(2)]
    pub active_thread: u8,
    /// Compares the events of a cycle with the threshold.
    pub compare: bool,
    /// Counts cycles with at most so many events instead of cycles with more.
    pub complement: bool,
    /// The threshold.
    #[bits(4)]
    pub threshold: u8,
    /// Counts the cycles in which the comparison becomes true.
    pub edge: bool,
    /// Every increment is an overflow.
    pub force_overflow: bool,
    /// An overflow asks for an interrupt of logical processor 0.
    pub interrupt: bool,
    /// An overflow asks for an interrupt of logical processor 1.
    pub t1_interrupt: bool,
    #[bits(2)]
    __: u8,
    /// Counts once the counter that cascades into this one has overflowed.
    pub cascade: bool,
    /// The counter has overflowed.
    pub overflow: bool,
    #[bits(32)]
    __: u32,
}

/// Bits of an ESCR that can be written.
pub const ESCR_WRITABLE: u64 = 0x7FFF_FFFF;
/// Bits of a CCCR that can be written, but for the one of [`extended_cascade`].
pub const CCCR_WRITABLE: u64 = 0xCFFF_F000;
/// Bit 11 of a CCCR.
pub const EXTENDED_CASCADE: u64 = 1 << 11;

/// Bits of IA32_PEBS_ENABLE. SDM Vol. 4 "MSRs in the Pentium 4 and Intel Xeon Processors", 3F1H; Vol. 3B "List of Metrics Available for
/// Replay Tagging".
pub mod pebs_enable {
    /// Loads that miss the first-level cache.
    pub const FIRST_LEVEL_MISS: u64 = 1;
    /// Loads that miss the second-level cache.
    pub const SECOND_LEVEL_MISS: u64 = 1 << 1;
    /// Accesses that miss the data TLB.
    pub const DATA_TLB_MISS: u64 = 1 << 2;
    /// Accesses that are split over two lines.
    pub const SPLIT: u64 = 1 << 10;
    /// Branches that were mispredicted: both bits.
    pub const MISPREDICTED: u64 = 3 << 15;
    /// Replays are tagged.
    pub const TAG: u64 = 1 << 24;
    /// This logical processor samples.
    pub const MY_THREAD: u64 = 1 << 25;
    /// The other one does.
    pub const OTHER_THREAD: u64 = 1 << 26;
    /// All that can be written.
    pub const WRITABLE: u64 = 0x1FFF | MISPREDICTED | TAG | MY_THREAD | OTHER_THREAD;
}

/// Bits of MSR_PEBS_MATRIX_VERT: which micro-operations replays are tagged of.
pub mod matrix_vert {
    /// Loads.
    pub const LOADS: u64 = 1;
    /// Stores.
    pub const STORES: u64 = 1 << 1;
    /// Branches.
    pub const BRANCHES: u64 = 1 << 4;
    /// All that can be written.
    pub const WRITABLE: u64 = 0x1FFF;
}

/// The units of the processor that have ESCRs. Most have two, of which the first feeds the first counters of its block and the second the
/// others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named like the registers.
pub enum Unit {
    Bsu,
    Fsb,
    Mob,
    Pmh,
    Bpu,
    Is,
    Itlb,
    Ix,
    Ms,
    Tbpu,
    Tc,
    Firm,
    Flame,
    Dac,
    Saat,
    U2l,
    Cru0,
    Cru2,
    Cru4,
    Iq,
    Rat,
    Ssu,
    Alf,
}

/// Counters that the same ESCRs are wired to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named like the registers.
pub enum Block {
    Bpu,
    Ms,
    Flame,
    Iq,
}

/// A pair of ESCRs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EscrPair {
    /// Whose.
    pub unit: Unit,
    /// Its name in the registers' names: MSR_`name`_ESCR0.
    pub names: [&'static str; 2],
    /// MSR numbers; 0 for a second one that is not there.
    pub msrs: [u32; 2],
    /// The counters that it is wired to.
    pub block: Block,
    /// The ESCR select that chooses it.
    pub select: u8,
}

const fn pair(unit: Unit, names: [&'static str; 2], msrs: [u32; 2], block: Block, select: u8) -> EscrPair {
    EscrPair {
        unit,
        names,
        msrs,
        block,
        select,
    }
}

/// All pairs. SDM Vol. 3B "Performance Counter MSRs and Associated CCCR and ESCR MSRs (Processors Based on Intel NetBurst
/// Microarchitecture)".
pub const ESCRS: [EscrPair; 23] = {
    use Block::{Bpu, Flame, Iq, Ms};
    [
        pair(Unit::Bpu, ["BPU_ESCR0", "BPU_ESCR1"], [0x3B2, 0x3B3], Bpu, 0),
        pair(Unit::Is, ["IS_ESCR0", "IS_ESCR1"], [0x3B4, 0x3B5], Bpu, 1),
        pair(Unit::Mob, ["MOB_ESCR0", "MOB_ESCR1"], [0x3AA, 0x3AB], Bpu, 2),
        pair(Unit::Itlb, ["ITLB_ESCR0", "ITLB_ESCR1"], [0x3B6, 0x3B7], Bpu, 3),
        pair(Unit::Pmh, ["PMH_ESCR0", "PMH_ESCR1"], [0x3AC, 0x3AD], Bpu, 4),
        pair(Unit::Ix, ["IX_ESCR0", "IX_ESCR1"], [0x3C8, 0x3C9], Bpu, 5),
        pair(Unit::Fsb, ["FSB_ESCR0", "FSB_ESCR1"], [0x3A2, 0x3A3], Bpu, 6),
        pair(Unit::Bsu, ["BSU_ESCR0", "BSU_ESCR1"], [0x3A0, 0x3A1], Bpu, 7),
        pair(Unit::Ms, ["MS_ESCR0", "MS_ESCR1"], [0x3C0, 0x3C1], Ms, 0),
        pair(Unit::Tc, ["TC_ESCR0", "TC_ESCR1"], [0x3C4, 0x3C5], Ms, 1),
        pair(Unit::Tbpu, ["TBPU_ESCR0", "TBPU_ESCR1"], [0x3C2, 0x3C3], Ms, 2),
        pair(Unit::Flame, ["FLAME_ESCR0", "FLAME_ESCR1"], [0x3A6, 0x3A7], Flame, 0),
        pair(Unit::Firm, ["FIRM_ESCR0", "FIRM_ESCR1"], [0x3A4, 0x3A5], Flame, 1),
        pair(Unit::Saat, ["SAAT_ESCR0", "SAAT_ESCR1"], [0x3AE, 0x3AF], Flame, 2),
        pair(Unit::U2l, ["U2L_ESCR0", "U2L_ESCR1"], [0x3B0, 0x3B1], Flame, 3),
        pair(Unit::Dac, ["DAC_ESCR0", "DAC_ESCR1"], [0x3A8, 0x3A9], Flame, 5),
        pair(Unit::Iq, ["IQ_ESCR0", "IQ_ESCR1"], [0x3BA, 0x3BB], Iq, 0),
        pair(Unit::Alf, ["ALF_ESCR0", "ALF_ESCR1"], [0x3CA, 0x3CB], Iq, 1),
        pair(Unit::Rat, ["RAT_ESCR0", "RAT_ESCR1"], [0x3BC, 0x3BD], Iq, 2),
        pair(Unit::Ssu, ["SSU_ESCR0", ""], [0x3BE, 0], Iq, 3),
        pair(Unit::Cru0, ["CRU_ESCR0", "CRU_ESCR1"], [0x3B8, 0x3B9], Iq, 4),
        pair(Unit::Cru2, ["CRU_ESCR2", "CRU_ESCR3"], [0x3CC, 0x3CD], Iq, 5),
        pair(Unit::Cru4, ["CRU_ESCR4", "CRU_ESCR5"], [0x3E0, 0x3E1], Iq, 6),
    ]
};

/// The block of a counter, and which of each pair of ESCRs is wired to it.
pub const fn wiring(counter: usize) -> (Block, usize) {
    match counter {
        0..=3 => (Block::Bpu, counter >> 1),
        4..=7 => (Block::Ms, (counter - 4) >> 1),
        8..=11 => (Block::Flame, (counter - 8) >> 1),
        12 | 13 | 16 => (Block::Iq, 0),
        _ => (Block::Iq, 1),
    }
}

/// The ESCR that a CCCR of this counter selects: its pair, and its MSR number.
pub fn selected(counter: usize, select: u8) -> Option<(&'static EscrPair, u32)> {
    let (block, second) = wiring(counter);
    let pair = ESCRS.iter().find(|pair| pair.block == block && pair.select == select)?;
    (pair.msrs[second] != 0).then_some((pair, pair.msrs[second]))
}

/// The counter whose overflow starts this one by its cascade flag: the one at the same place in the other pair of the block; counters 16
/// and 17 are started by 14 and 15, and start none. SDM Vol. 3B 21.6.3.5.6 "Cascading Counters".
pub const fn cascade(counter: usize) -> usize {
    match counter {
        16 | 17 => counter - 2,
        _ => counter ^ 2,
    }
}

/// The same by bit 11 of the CCCR, where that is not reserved: CASCNT4INTO0, CASCNT5INTO3, CASCNT5INTO4, CASCNT4INTO5. SDM Vol. 3B
/// "CCR Names and Bit Positions".
pub const fn extended_cascade(counter: usize) -> Option<usize> {
    match counter {
        12 | 17 => Some(16),
        15 | 16 => Some(17),
        _ => None,
    }
}

/// Micro-operations of x87, MMX, SSE and SSE2, as events choose among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Packed single precision.
    PackedSingle,
    /// Packed double precision.
    PackedDouble,
    /// Scalar single precision.
    ScalarSingle,
    /// Scalar double precision.
    ScalarDouble,
    /// Integers in MMX registers.
    Mmx,
    /// Integers in XMM registers.
    Integer,
    /// x87, but for loads, stores and moves.
    X87,
    /// Loads, stores and moves of x87, MMX, SSE and SSE2.
    Move,
}

/// What becomes of accesses and fetches, as events choose among it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory(u16);

impl Memory {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Loads.
    pub const LOADS: Self = Self(1);
    /// Stores.
    pub const STORES: Self = Self(1 << 1);
    /// Loads that are split over two lines.
    pub const SPLIT_LOADS: Self = Self(1 << 2);
    /// Stores that are split over two lines.
    pub const SPLIT_STORES: Self = Self(1 << 3);
    /// Loads that miss the first-level cache.
    pub const FIRST_LEVEL_LOAD_MISSES: Self = Self(1 << 4);
    /// Loads that miss the second-level cache.
    pub const SECOND_LEVEL_LOAD_MISSES: Self = Self(1 << 5);
    /// Loads and reads for ownership that the second-level cache has.
    pub const SECOND_LEVEL_HITS: Self = Self(1 << 6);
    /// Loads and reads for ownership that it has not.
    pub const SECOND_LEVEL_MISSES: Self = Self(1 << 7);
    /// Loads that miss the data TLB.
    pub const LOAD_WALKS: Self = Self(1 << 8);
    /// Stores that miss the data TLB.
    pub const STORE_WALKS: Self = Self(1 << 9);
    /// Fetches that miss the instruction TLB.
    pub const FETCH_WALKS: Self = Self(1 << 10);
    /// Fetches whose translation is in the instruction TLB.
    pub const FETCH_HITS: Self = Self(1 << 11);
    /// Lines that are fetched from beyond the first level.
    pub const FETCH_MISSES: Self = Self(1 << 12);
    /// All that fetches have a part in.
    pub const OF_CODE: Self = Self(7 << 10);

    /// What it is, in words.
    pub fn text(self) -> alloc::string::String {
        const NAMES: [&str; 13] = [
            "loads",
            "stores",
            "loads split over two lines",
            "stores split over two lines",
            "loads that miss L1",
            "loads that miss L2",
            "loads and stores that L2 serves",
            "loads and stores that miss L2",
            "loads that miss the TLB",
            "stores that miss the TLB",
            "pages fetched from that miss the TLB",
            "lines fetched whose page is in the TLB",
            "lines fetched that are not in L1I",
        ];
        let bits = NAMES.iter().enumerate().filter(|(bit, _)| self.0 >> bit & 1 != 0);
        bits.map(|(_, name)| *name).collect::<alloc::vec::Vec<_>>().join(", ")
    }

    /// Both.
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether anything is in both.
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Loads and stores have a part in it.
    pub const fn of_data(self) -> bool {
        self.0 & !Self::OF_CODE.0 != 0
    }
}

/// What an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// Cycles outside HLT.
    Cycles,
    /// Instructions retired: those without a tagged micro-operation (bit 0), those with one (bit 1).
    Instructions,
    /// Micro-operations retired (bit 0): one an instruction.
    MicroOps,
    /// Branches retired: not taken and predicted (bit 0), not taken and mispredicted (1), taken and predicted (2), taken and
    /// mispredicted (3).
    Outcomes,
    /// Branches retired, by kind ([`branch_types`]).
    Types,
    /// The mispredicted ones of these.
    MispredictedTypes,
    /// Mispredicted branches retired (bit 0).
    Mispredicted,
    /// Such operations (bit 15).
    Operations(Operation),
    /// By bit, what becomes of accesses and fetches.
    Memory(&'static [(u8, Memory)]),
    /// Loads (bit 1) and stores (bit 2) are tagged for [`Counts::FrontEnd`]; nothing is counted.
    Tags,
    /// Micro-operations retired that the front end has tagged (bit 0).
    FrontEnd,
    /// Micro-operations retired that have one of the tags that an ESCR with a tag value gave (bits 0 to 3).
    Execution,
    /// Micro-operations retired that were tagged when they were replayed, as IA32_PEBS_ENABLE and MSR_PEBS_MATRIX_VERT say (bit 0).
    Replay,
    /// What it is for does not happen here.
    Nothing,
}

impl Counts {
    /// Whether it can be sampled. SDM Vol. 3B 21.6.3.8 "Processor Event-Based Sampling (PEBS)".
    pub const fn sampled(self) -> bool {
        matches!(self, Self::FrontEnd | Self::Execution | Self::Replay)
    }
}

/// The kinds of branches that the mask of [`Counts::Types`] chooses: conditional (bit 1), calls (2), returns (3), and all indirect near
/// ones, returns and indirect calls among them (4). An unconditional direct jump is none of these.
pub const fn branch_types(mask: u16) -> Branches {
    let mut kinds = Branches(0);
    if mask & 1 << 1 != 0 {
        kinds = kinds.or(Branches::CONDITIONAL);
    }
    if mask & 1 << 2 != 0 {
        kinds = kinds.or(Branches::CALLS);
    }
    if mask & 1 << 3 != 0 {
        kinds = kinds.or(Branches::RETURNS);
    }
    if mask & 1 << 4 != 0 {
        kinds = kinds.or(Branches::INDIRECT).or(Branches::RETURNS);
    }
    kinds
}

/// An event of one of the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The unit whose ESCRs detect it.
    pub unit: Unit,
    /// Event select.
    pub event: u8,
    /// Its manual name.
    pub name: &'static str,
    /// What it counts.
    pub counts: Counts,
    /// Models 0 to 2 do not have it.
    pub late: bool,
}

const fn event(unit: Unit, event: u8, name: &'static str, counts: Counts) -> Event {
    Event {
        unit,
        event,
        name,
        counts,
        late: false,
    }
}

/// All events. SDM Vol. 3B "Performance Monitoring Events Supported by Intel NetBurst Microarchitecture for
/// Non-Retirement Counting" and "... for At-Retirement Counting".
pub const EVENTS: &[Event] = {
    use Counts::{
        Cycles, Execution, FrontEnd, Instructions, MicroOps, Mispredicted, MispredictedTypes, Nothing, Operations,
        Outcomes, Replay, Tags, Types,
    };
    use Memory as M;
    &[
        event(Unit::Tc, 0x01, "TC_deliver_mode", Nothing),
        event(
            Unit::Bpu,
            0x03,
            "BPU_fetch_request",
            Counts::Memory(&[(0, M::FETCH_MISSES)]),
        ),
        event(
            Unit::Itlb,
            0x18,
            "ITLB_reference",
            Counts::Memory(&[(0, M::FETCH_HITS), (1, M::FETCH_WALKS)]),
        ),
        event(Unit::Dac, 0x02, "memory_cancel", Nothing),
        event(
            Unit::Saat,
            0x08,
            "memory_complete",
            Counts::Memory(&[(0, M::SPLIT_LOADS), (1, M::SPLIT_STORES)]),
        ),
        event(
            Unit::Saat,
            0x04,
            "load_port_replay",
            Counts::Memory(&[(1, M::SPLIT_LOADS)]),
        ),
        event(
            Unit::Saat,
            0x05,
            "store_port_replay",
            Counts::Memory(&[(1, M::SPLIT_STORES)]),
        ),
        event(Unit::Mob, 0x03, "MOB_load_replay", Nothing),
        event(
            Unit::Pmh,
            0x01,
            "page_walk_type",
            Counts::Memory(&[(0, M::LOAD_WALKS.or(M::STORE_WALKS)), (1, M::FETCH_WALKS)]),
        ),
        event(
            Unit::Bsu,
            0x0C,
            "BSQ_cache_reference",
            // The model of the caches has no states: what the second level has is exclusive (bit 1). There is no third level, and
            // no write goes to the second level but by a line that is written back.
            Counts::Memory(&[(1, M::SECOND_LEVEL_HITS), (8, M::SECOND_LEVEL_MISSES)]),
        ),
        event(Unit::Fsb, 0x03, "IOQ_allocation", Nothing),
        event(Unit::Fsb, 0x1A, "IOQ_active_entries", Nothing),
        event(Unit::Fsb, 0x17, "FSB_data_activity", Nothing),
        event(Unit::Bsu, 0x05, "BSQ_allocation", Nothing),
        event(Unit::Bsu, 0x06, "BSQ_active_entries", Nothing),
        event(Unit::Firm, 0x34, "SSE_input_assist", Nothing),
        event(Unit::Firm, 0x08, "packed_SP_uop", Operations(Operation::PackedSingle)),
        event(Unit::Firm, 0x0C, "packed_DP_uop", Operations(Operation::PackedDouble)),
        event(Unit::Firm, 0x0A, "scalar_SP_uop", Operations(Operation::ScalarSingle)),
        event(Unit::Firm, 0x0E, "scalar_DP_uop", Operations(Operation::ScalarDouble)),
        event(Unit::Firm, 0x02, "64bit_MMX_uop", Operations(Operation::Mmx)),
        event(Unit::Firm, 0x1A, "128bit_MMX_uop", Operations(Operation::Integer)),
        event(Unit::Firm, 0x04, "x87_FP_uop", Operations(Operation::X87)),
        event(Unit::Firm, 0x2E, "x87_SIMD_moves_uop", Operations(Operation::Move)),
        event(Unit::Tc, 0x06, "TC_misc", Nothing),
        event(Unit::Fsb, 0x13, "global_power_events", Cycles),
        event(Unit::Ms, 0x05, "tc_ms_xfer", Nothing),
        event(Unit::Ms, 0x09, "uop_queue_writes", Nothing),
        event(Unit::Tbpu, 0x05, "retired_mispred_branch_type", MispredictedTypes),
        event(Unit::Tbpu, 0x04, "retired_branch_type", Types),
        event(Unit::Alf, 0x01, "resource_stall", Nothing),
        event(Unit::Dac, 0x05, "WC_Buffer", Nothing),
        event(Unit::Fsb, 0x16, "b2b_cycles", Nothing),
        event(Unit::Fsb, 0x08, "bnr", Nothing),
        event(Unit::Fsb, 0x06, "snoop", Nothing),
        event(Unit::Fsb, 0x04, "Response", Nothing),
        event(Unit::Cru2, 0x08, "front_end_event", FrontEnd),
        event(Unit::Cru2, 0x0C, "execution_event", Execution),
        event(Unit::Cru2, 0x09, "replay_event", Replay),
        event(Unit::Cru0, 0x02, "instr_retired", Instructions),
        event(Unit::Cru0, 0x01, "uops_retired", MicroOps),
        event(Unit::Rat, 0x02, "uop_type", Tags),
        event(Unit::Cru2, 0x06, "branch_retired", Outcomes),
        event(Unit::Cru0, 0x03, "mispred_branch_retired", Mispredicted),
        event(Unit::Cru2, 0x03, "x87_assist", Nothing),
        event(Unit::Cru2, 0x02, "machine_clear", Nothing),
        Event {
            late: true,
            ..event(Unit::Cru0, 0x07, "instr_completed", MicroOps)
        },
    ]
};

#[cfg(test)]
#[path = "netburst_test.rs"]
mod tests;
