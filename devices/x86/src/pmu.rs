//! Performance monitoring: registers, events, and what a model can count. SDM Vol. 3B ch. 21 "Performance Monitoring".

use bitfield_struct::bitfield;

use crate::seam::{Abort, Far, Flow};

/// IA32_PERFEVTSELx. SDM Vol. 3B 21.2.1.1 "Architectural Performance Monitoring Version 1 Facilities"; P6 has the same layout
/// in PerfEvtSel0 and 1.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct EventSelect {
    /// Event select.
    pub event: u8,
    /// Unit mask.
    pub umask: u8,
    /// Counts at CPL 1, 2 and 3.
    pub usr: bool,
    /// Counts at CPL 0.
    pub os: bool,
    /// Counts the cycles in which the condition becomes true.
    pub edge: bool,
    /// Toggles a pin that the machine has not got.
    pub pin_control: bool,
    /// An overflow asks for an interrupt.
    pub int: bool,
    /// Counts for all threads of the core, of which there is one.
    pub any: bool,
    /// Counts.
    pub enable: bool,
    /// With a counter mask: fewer than that many events in the cycle.
    pub invert: bool,
    /// Other than 0: counts cycles with at least that many events.
    pub counter_mask: u8,
    /// Counts inside transactions only.
    pub in_tx: bool,
    /// Does not count what an aborted transaction counted.
    pub in_tx_checkpointed: bool,
    /// PEBS records of this counter have the groups of MSR_PEBS_DATA_CFG.
    pub adaptive: bool,
    #[bits(29)]
    __: u64,
}

/// The four bits of IA32_FIXED_CTR_CTRL that belong to one counter, and its bit for adaptive PEBS. SDM Vol. 3B 21.2.2
/// "Architectural Performance Monitoring Version 2".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FixedControl {
    /// Counts at CPL 0.
    pub os: bool,
    /// Counts at CPL 1, 2 and 3.
    pub usr: bool,
    /// An overflow asks for an interrupt.
    pub pmi: bool,
    /// PEBS records of this counter have the groups of MSR_PEBS_DATA_CFG.
    pub adaptive: bool,
}

impl FixedControl {
    /// The field of counter `index` in IA32_FIXED_CTR_CTRL.
    pub const fn of(register: u64, index: u32) -> Self {
        let field = register >> (4 * index);
        Self {
            os: field & 1 != 0,
            usr: field & 2 != 0,
            pmi: field & 8 != 0,
            adaptive: field >> 32 & 1 != 0,
        }
    }

    /// The bits of counter `index` that can be written.
    pub const fn writable(index: u32, any: bool, adaptive: bool) -> u64 {
        let field = 0xB | if any { 4 } else { 0 } | if adaptive { 1 << 32 } else { 0 };
        field << (4 * index)
    }
}

/// Bits of IA32_PERF_GLOBAL_STATUS beside the counters' own (general counters from bit 0, fixed ones from bit 32). SDM Vol. 3B
/// 21.2.4.1 "Enhancement in IA32_PERF_GLOBAL_STATUS".
pub mod status {
    /// The first fixed counter.
    pub const FIXED: u32 = 32;
    /// MSR_PERF_METRICS overflowed.
    pub const METRICS: u64 = 1 << 48;
    /// An output region of the processor trace is full.
    pub const TRACE_TOPA: u64 = 1 << 55;
    /// Last-branch records are frozen.
    pub const LBR_FROZEN: u64 = 1 << 58;
    /// Counters are frozen.
    pub const COUNTERS_FROZEN: u64 = 1 << 59;
    /// The counters may hold what a secure enclave did.
    pub const ENCLAVE: u64 = 1 << 60;
    /// A counter of the uncore.
    pub const UNCORE: u64 = 1 << 61;
    /// The debug-store area's PEBS index has reached the threshold.
    pub const BUFFER: u64 = 1 << 62;
    /// The state of the facility has changed.
    pub const CHANGED: u64 = 1 << 63;
}

/// Fields of IA32_PERF_CAPABILITIES. SDM Vol. 3B Figure 21-67 "Layout of IA32_PERF_CAPABILITIES MSR".
pub mod capabilities {
    /// 5:0, the format of last-branch records.
    pub const LBR_FORMAT: u64 = 0x3F;
    /// PEBS records are written after the instruction, as a trap.
    pub const PEBS_TRAP: u64 = 1 << 6;
    /// PEBS records hold the general-purpose registers.
    pub const PEBS_REGISTERS: u64 = 1 << 7;
    /// 11:8, the format of PEBS records.
    pub const PEBS_FORMAT_SHIFT: u32 = 8;
    /// FREEZE_WHILE_SMM exists.
    pub const FREEZE_WHILE_SMM: u64 = 1 << 12;
    /// Counters can be written in full width at 4C1H on.
    pub const FULL_WIDTH: u64 = 1 << 13;
    /// Every counter can do PEBS, and records are adaptive.
    pub const PEBS_BASELINE: u64 = 1 << 14;
    /// MSR_PERF_METRICS exists.
    pub const METRICS: u64 = 1 << 15;
    /// PEBS records can go to the processor trace.
    pub const PEBS_TO_TRACE: u64 = 1 << 16;
}

/// Kinds of branch instructions, as events choose among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branches(u8);

impl Branches {
    /// Conditional, taken.
    pub const TAKEN: Self = Self(1);
    /// Conditional, not taken.
    pub const NOT_TAKEN: Self = Self(1 << 1);
    /// Direct jumps.
    pub const JUMPS: Self = Self(1 << 2);
    /// Indirect jumps.
    pub const INDIRECT_JUMPS: Self = Self(1 << 3);
    /// Direct near calls.
    pub const DIRECT_CALLS: Self = Self(1 << 4);
    /// Indirect near calls.
    pub const INDIRECT_CALLS: Self = Self(1 << 5);
    /// Near returns.
    pub const RETURNS: Self = Self(1 << 6);
    /// Far branch instructions; neither exceptions nor interrupts, which are no instructions.
    pub const FAR: Self = Self(1 << 7);

    /// All branch instructions.
    pub const ALL: Self = Self(0xFF);
    /// Conditional branches.
    pub const CONDITIONAL: Self = Self::TAKEN.or(Self::NOT_TAKEN);
    /// Near calls.
    pub const CALLS: Self = Self::DIRECT_CALLS.or(Self::INDIRECT_CALLS);
    /// Near branches through a register or memory, returns aside.
    pub const INDIRECT: Self = Self::INDIRECT_JUMPS.or(Self::INDIRECT_CALLS);
    /// Near branches that went somewhere.
    pub const NEAR_TAKEN: Self = Self(0x7F & !Self::NOT_TAKEN.0);
    /// Branches that went somewhere.
    pub const ALL_TAKEN: Self = Self(0xFF & !Self::NOT_TAKEN.0);

    /// Both.
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether this branch is among them.
    pub const fn has(self, flow: Flow) -> bool {
        let kind = match flow {
            Flow::Cond { taken: true } => Self::TAKEN,
            Flow::Cond { taken: false } => Self::NOT_TAKEN,
            Flow::Jump => Self::JUMPS,
            Flow::JumpInd => Self::INDIRECT_JUMPS,
            Flow::Call => Self::DIRECT_CALLS,
            Flow::CallInd => Self::INDIRECT_CALLS,
            Flow::Ret => Self::RETURNS,
            Flow::Far(Far::Exception | Far::Interrupt) => return false,
            Flow::Far(_) => Self::FAR,
        };
        self.0 & kind.0 != 0
    }
}

/// Where loads found their data, as events choose among the places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels(u8);

impl Levels {
    /// The first-level cache.
    pub const L1: Self = Self(1);
    /// The second-level cache.
    pub const L2: Self = Self(1 << 1);
    /// The last-level cache.
    pub const L3: Self = Self(1 << 2);
    /// Memory.
    pub const MEMORY: Self = Self(1 << 3);
    /// Anywhere.
    pub const ALL: Self = Self(0xF);
    /// Beyond the first-level cache.
    pub const BEYOND_L1: Self = Self(0xE);
    /// Beyond the second-level cache.
    pub const BEYOND_L2: Self = Self(0xC);

    /// Whether any place is in both.
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// What becomes of accesses and fetches in the caches and TLBs, as events choose among it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caches {
    /// Loads, stores and fetches that the last level was asked for.
    References,
    /// Of these, the ones that memory had to serve.
    Misses,
    /// Loads that the last level was asked for.
    LoadReferences,
    /// Of these, the ones that memory had to serve.
    LoadMisses,
    /// Stores that the last level was asked for.
    StoreReferences,
    /// Of these, the ones that memory had to serve.
    StoreMisses,
    /// Lines that loads and stores brought into the first-level data cache.
    DataFills,
    /// Lines that stores brought there.
    StoreFills,
    /// Lines that were fetched.
    Fetches,
    /// Of these, the ones that were not in the first-level instruction cache.
    FetchMisses,
    /// Loads whose translation was not in the first-level TLB.
    LoadTlbMisses,
    /// Loads whose translation the second-level TLB had.
    LoadTlbSecond,
    /// Loads that walked the page tables.
    LoadWalks,
    /// Stores whose translation was not in the first-level TLB.
    StoreTlbMisses,
    /// Stores whose translation the second-level TLB had.
    StoreTlbSecond,
    /// Stores that walked the page tables.
    StoreWalks,
    /// Fetches whose translation was not in the first-level TLB.
    FetchTlbMisses,
    /// Fetches whose translation the second-level TLB had.
    FetchTlbSecond,
    /// Fetches that walked the page tables.
    FetchWalks,
    /// Requests to the last level that MSR_OFFCORE_RSP_0 or 1 chooses, by index.
    Offcore(u8),
}

impl Caches {
    /// Loads and stores have a part in it.
    pub const fn of_data(self) -> bool {
        !self.of_code() || matches!(self, Self::References | Self::Misses | Self::Offcore(_))
    }

    /// Fetches have a part in it.
    pub const fn of_code(self) -> bool {
        use Caches::{FetchMisses, FetchTlbMisses, FetchTlbSecond, FetchWalks, Fetches, Misses, Offcore, References};
        matches!(
            self,
            References | Misses | Fetches | FetchMisses | FetchTlbMisses | FetchTlbSecond | FetchWalks | Offcore(_)
        )
    }
}

/// The requests that MSR_OFFCORE_RSP_0 or 1 chooses: demand loads, stores and fetches, as far as they were served where it says. SDM Vol.
/// 3B 21.3.1.1.3 "Off-core Response Performance Monitoring in the Processor Core" and, for Sandy Bridge and later, 21.3.4.5 "Off-core
/// Response Performance Monitoring".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offcore {
    /// Demand data reads.
    pub loads: bool,
    /// Demand reads for ownership.
    pub stores: bool,
    /// Demand code reads.
    pub fetches: bool,
    /// Those that the last level had.
    pub hits: bool,
    /// Those that memory had to serve.
    pub misses: bool,
}

impl Offcore {
    /// By the register's value and the bits that it has on the part. Neither other processors' caches nor other sockets answer.
    pub const fn of(value: u64, bits: u64) -> Self {
        let (hits, misses) = if bits >> 16 == 0 {
            // Nehalem: UNCORE_HIT; LOCAL_DRAM.
            (value >> 8 & 1 != 0, value >> 14 & 1 != 0)
        } else {
            // Any response; hits M, E, S, F in the last level; local memory, in one of the two bits that parts have for it.
            let any = value >> 16 & 1 != 0;
            (any || value >> 18 & 0xF != 0, any || value & (1 << 22 | 1 << 26) != 0)
        };
        Self {
            loads: value & 1 != 0,
            stores: value & 2 != 0,
            fetches: value & 4 != 0,
            hits,
            misses,
        }
    }
}

/// What becomes of transactions, as events choose among it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transactions(u8);

impl Transactions {
    /// Transactions that began.
    pub const STARTED: Self = Self(1);
    /// Transactions that were committed.
    pub const COMMITTED: Self = Self(1 << 1);
    /// Aborts for a conflict.
    pub const CONFLICT: Self = Self(1 << 2);
    /// Aborts for want of room.
    pub const CAPACITY: Self = Self(1 << 3);
    /// Aborts for what memory does.
    pub const MEMORY: Self = Self(3 << 2);
    /// Aborts by an instruction that a transaction cannot hold.
    pub const UNFRIENDLY: Self = Self(1 << 4);
    /// Aborts by an access to a device.
    pub const MEMORY_TYPE: Self = Self(1 << 5);
    /// All other aborts.
    pub const EVENTS: Self = Self(1 << 6);
    /// All aborts.
    pub const ABORTED: Self = Self(0x7C);

    /// What an abort is.
    pub const fn of(cause: Abort) -> Self {
        match cause {
            Abort::Conflict => Self::CONFLICT,
            Abort::Capacity => Self::CAPACITY,
            Abort::Instruction => Self::UNFRIENDLY,
            Abort::MemoryType => Self::MEMORY_TYPE,
            Abort::Explicit(_) | Abort::Debug | Abort::Exception | Abort::Event => Self::EVENTS,
        }
    }

    /// Whether anything is in both.
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// What an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Instructions retired, a REP once.
    Instructions,
    /// Cycles outside HLT.
    Cycles,
    /// Cycles of the bus or crystal clock outside HLT.
    Reference,
    /// Issue slots.
    Slots,
    /// Branch instructions retired.
    Branches(Branches),
    /// Of these, the mispredicted ones.
    Mispredicted(Branches),
    /// What the caches and TLBs have to do.
    Caches(Caches),
    /// Loads retired whose data came from there.
    Loads(Levels),
    /// Stores retired.
    Stores,
    /// Loads retired that took longer than MSR_PEBS_LD_LAT.
    LoadLatency,
    /// x87 instructions retired.
    X87,
    /// MMX and SSE instructions retired.
    Simd,
    /// Transactions.
    Transactions(Transactions),
    /// Nothing: what it is for does not happen here.
    Nothing,
}

/// An event of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRow {
    /// Event select.
    pub event: u8,
    /// Unit mask.
    pub umask: u8,
    /// What it counts.
    pub count: Count,
    /// PEBS can sample it.
    pub precise: bool,
}

const fn plain(event: u8, umask: u8, count: Count) -> EventRow {
    EventRow {
        event,
        umask,
        count,
        precise: false,
    }
}

const fn precise(event: u8, umask: u8, count: Count) -> EventRow {
    EventRow {
        precise: true,
        ..plain(event, umask, count)
    }
}

/// The architectural events in the order of CPUID.0AH:EBX. SDM Vol. 3B Table 21-1 "UMask and Event Select Encodings for
/// Pre-Defined Architectural Performance Events".
pub const ARCHITECTURAL: [EventRow; 8] = [
    plain(0x3C, 0x00, Count::Cycles),
    plain(0xC0, 0x00, Count::Instructions),
    plain(0x3C, 0x01, Count::Reference),
    plain(0x2E, 0x4F, Count::Caches(Caches::References)),
    plain(0x2E, 0x41, Count::Caches(Caches::Misses)),
    plain(0xC4, 0x00, Count::Branches(Branches::ALL)),
    plain(0xC5, 0x00, Count::Mispredicted(Branches::ALL)),
    plain(0xA4, 0x01, Count::Slots),
];

/// Other events, by generation. A row here comes before the architectural event of the same code, so it can make that one
/// precise. SDM Vol. 3B ch. 21, "PEBS Performance Events" of each, and the event lists at perfmon-events.intel.com.
pub mod events {
    use super::{Branches as B, Caches as C, Count::*, EventRow, Levels as L, Transactions as T, plain, precise};

    /// P6. SDM Vol. 3B 21.6.8.2 "PerfEvtSel0 and PerfEvtSel1 MSRs".
    pub const P6: &[EventRow] = &[
        plain(0x79, 0x00, Cycles),                     // CPU_CLK_UNHALTED
        plain(0xC0, 0x00, Instructions),               // INST_RETIRED
        plain(0xC2, 0x00, Instructions),               // UOPS_RETIRED
        plain(0xC4, 0x00, Branches(B::ALL)),           // BR_INST_RETIRED
        plain(0xC5, 0x00, Mispredicted(B::ALL)),       // BR_MISS_PRED_RETIRED
        plain(0xC9, 0x00, Branches(B::ALL_TAKEN)),     // BR_TAKEN_RETIRED
        plain(0xCA, 0x00, Mispredicted(B::ALL_TAKEN)), // BR_MISS_PRED_TAKEN_RET
        plain(0x43, 0x00, Loads(L::ALL)),              // DATA_MEM_REFS
        plain(0x45, 0x00, Caches(C::DataFills)),       // DCU_LINES_IN
        plain(0x29, 0x0F, Loads(L::BEYOND_L1)),        // L2_LD
        plain(0x2A, 0x0F, Caches(C::StoreFills)),      // L2_ST
        plain(0x28, 0x0F, Caches(C::FetchMisses)),     // L2_IFETCH
        plain(0x25, 0x00, Nothing),                    // L2_M_LINES_INM
        plain(0x2E, 0x0F, Caches(C::References)),      // L2_RQSTS, all states
        plain(0x2E, 0x01, Caches(C::Misses)),          // L2_RQSTS, not there
        plain(0x80, 0x00, Caches(C::Fetches)),         // IFU_IFETCH
        plain(0x81, 0x00, Caches(C::FetchMisses)),     // IFU_IFETCH_MISS
        plain(0x85, 0x00, Caches(C::FetchTlbMisses)),  // ITLB_MISS
    ];

    /// Core 2. SDM Vol. 3B Table 21-86 "PEBS Performance Events for Intel Core Microarchitecture".
    pub const CORE2: &[EventRow] = &[
        precise(0xC0, 0x00, Instructions),             // INST_RETIRED.ANY_P
        precise(0xC1, 0xFE, X87),                      // X87_OPS_RETIRED.ANY
        plain(0xC2, 0x0F, Instructions),               // UOPS_RETIRED.ANY
        plain(0xC4, 0x0C, Branches(B::ALL_TAKEN)),     // BR_INST_RETIRED.TAKEN
        precise(0xC5, 0x00, Mispredicted(B::ALL)),     // BR_INST_RETIRED.MISPRED
        precise(0xC7, 0x1F, Simd),                     // SIMD_INST_RETIRED.ANY
        precise(0xCB, 0x01, Loads(L::BEYOND_L1)),      // MEM_LOAD_RETIRED.L1D_MISS
        precise(0xCB, 0x02, Loads(L::BEYOND_L1)),      // MEM_LOAD_RETIRED.L1D_LINE_MISS
        precise(0xCB, 0x04, Loads(L::BEYOND_L2)),      // MEM_LOAD_RETIRED.L2_MISS
        precise(0xCB, 0x08, Loads(L::BEYOND_L2)),      // MEM_LOAD_RETIRED.L2_LINE_MISS
        precise(0xCB, 0x10, Caches(C::LoadWalks)),     // MEM_LOAD_RETIRED.DTLB_MISS
        plain(0x08, 0x01, Caches(C::LoadWalks)),       // DTLB_MISSES.ANY
        plain(0x08, 0x02, Caches(C::LoadWalks)),       // DTLB_MISSES.MISS_LD
        plain(0x08, 0x08, Caches(C::StoreWalks)),      // DTLB_MISSES.MISS_ST
        plain(0x29, 0x4F, Caches(C::LoadReferences)),  // L2_LD.SELF.DEMAND.MESI
        plain(0x29, 0x41, Caches(C::LoadMisses)),      // L2_LD.SELF.DEMAND.I_STATE
        plain(0x2A, 0x4F, Caches(C::StoreReferences)), // L2_ST.SELF.MESI
        plain(0x2A, 0x41, Caches(C::StoreMisses)),     // L2_ST.SELF.I_STATE
        plain(0x40, 0x0F, Loads(L::ALL)),              // L1D_CACHE_LD.MESI
        plain(0x40, 0x01, Loads(L::BEYOND_L1)),        // L1D_CACHE_LD.I_STATE
        plain(0x41, 0x0F, Stores),                     // L1D_CACHE_ST.MESI
        plain(0x41, 0x01, Caches(C::StoreFills)),      // L1D_CACHE_ST.I_STATE
        plain(0x45, 0x0F, Caches(C::DataFills)),       // L1D_REPL
        plain(0x4E, 0x10, Nothing),                    // L1D_PREFETCH.REQUESTS
        plain(0x80, 0x00, Caches(C::Fetches)),         // L1I_READS
        plain(0x81, 0x00, Caches(C::FetchMisses)),     // L1I_MISSES
        plain(0x82, 0x12, Caches(C::FetchWalks)),      // ITLB.MISSES
    ];

    /// Nehalem and Westmere. SDM Vol. 3B 21.3.1.1.2 "Processor Event Based Sampling".
    pub const NEHALEM: &[EventRow] = &[
        precise(0x0B, 0x01, Loads(L::ALL)), // MEM_INST_RETIRED.LOADS
        precise(0x0B, 0x02, Stores),        // MEM_INST_RETIRED.STORES
        precise(0x0B, 0x10, LoadLatency),   // MEM_INST_RETIRED.LATENCY_ABOVE_THRESHOLD
        precise(0xC0, 0x00, Instructions),
        precise(0xC0, 0x01, Instructions), // INST_RETIRED.ANY_P
        precise(0xC0, 0x02, X87),          // INST_RETIRED.X87
        precise(0xC2, 0x01, Instructions), // UOPS_RETIRED.ANY
        precise(0xC4, 0x00, Branches(B::ALL)),
        precise(0xC4, 0x01, Branches(B::CONDITIONAL)), // BR_INST_RETIRED.CONDITIONAL
        precise(0xC4, 0x02, Branches(B::CALLS)),       // BR_INST_RETIRED.NEAR_CALL
        precise(0xC4, 0x04, Branches(B::ALL)),         // BR_INST_RETIRED.ALL_BRANCHES
        precise(0xC5, 0x01, Mispredicted(B::CONDITIONAL)),
        precise(0xC5, 0x02, Mispredicted(B::CALLS)), // BR_MISP_RETIRED.NEAR_CALL
        precise(0xC5, 0x04, Mispredicted(B::ALL)),   // BR_MISP_RETIRED.ALL_BRANCHES
        precise(0xC7, 0x1F, Simd),                   // SSEX_UOPS_RETIRED, all kinds
        precise(0xCB, 0x01, Loads(L::L1)),           // MEM_LOAD_RETIRED.L1D_HIT
        precise(0xCB, 0x02, Loads(L::L2)),           // MEM_LOAD_RETIRED.L2_HIT
        precise(0xCB, 0x04, Loads(L::L3)),           // MEM_LOAD_RETIRED.LLC_UNSHARED_HIT
        precise(0xCB, 0x10, Loads(L::MEMORY)),       // MEM_LOAD_RETIRED.LLC_MISS
        precise(0xCB, 0x80, Caches(C::LoadTlbMisses)), // MEM_LOAD_RETIRED.DTLB_MISS
        precise(0x0C, 0x01, Caches(C::StoreTlbMisses)), // MEM_STORE_RETIRED.DTLB_MISS
        plain(0x08, 0x01, Caches(C::LoadTlbMisses)), // DTLB_LOAD_MISSES.ANY
        plain(0x08, 0x02, Caches(C::LoadWalks)),     // DTLB_LOAD_MISSES.WALK_COMPLETED
        plain(0x08, 0x10, Caches(C::LoadTlbSecond)), // DTLB_LOAD_MISSES.STLB_HIT
        plain(0x49, 0x01, Caches(C::StoreTlbMisses)), // DTLB_MISSES.ANY
        plain(0x4E, 0x01, Nothing),                  // L1D_PREFETCH.REQUESTS
        plain(0x4E, 0x02, Nothing),                  // L1D_PREFETCH.MISS
        plain(0x51, 0x01, Caches(C::DataFills)),     // L1D.REPL
        plain(0x51, 0x02, Caches(C::StoreFills)),    // L1D.M_REPL
        plain(0x80, 0x02, Caches(C::FetchMisses)),   // L1I.MISSES
        plain(0x80, 0x03, Caches(C::Fetches)),       // L1I.READS
        plain(0x85, 0x01, Caches(C::FetchTlbMisses)), // ITLB_MISSES.ANY
        plain(0x85, 0x02, Caches(C::FetchWalks)),    // ITLB_MISSES.WALK_COMPLETED
        plain(0xB7, 0x01, Caches(C::Offcore(0))),    // OFF_CORE_RESPONSE_0
        plain(0xBB, 0x01, Caches(C::Offcore(1))),    // OFF_CORE_RESPONSE_1
        plain(0xE8, 0x03, Mispredicted(B::ALL)),     // BPU_CLEARS.ANY
    ];

    /// Caches and TLBs of Sandy Bridge to Broadwell.
    pub const CACHES: &[EventRow] = &[
        plain(0x08, 0x01, Caches(C::LoadWalks)),  // DTLB_LOAD_MISSES.MISS_CAUSES_A_WALK
        plain(0x49, 0x01, Caches(C::StoreWalks)), // DTLB_STORE_MISSES.MISS_CAUSES_A_WALK
        plain(0x49, 0x10, Caches(C::StoreTlbSecond)), // DTLB_STORE_MISSES.STLB_HIT
        plain(0x4E, 0x02, Nothing),               // HW_PRE_REQ.DL1_MISS
        plain(0x51, 0x01, Caches(C::DataFills)),  // L1D.REPLACEMENT
        plain(0x80, 0x02, Caches(C::FetchMisses)), // ICACHE.MISSES
        plain(0x85, 0x01, Caches(C::FetchWalks)), // ITLB_MISSES.MISS_CAUSES_A_WALK
        plain(0x85, 0x10, Caches(C::FetchTlbSecond)), // ITLB_MISSES.STLB_HIT
        plain(0x85, 0x60, Caches(C::FetchTlbSecond)), // ITLB_MISSES.STLB_HIT, since Haswell
        plain(0xB7, 0x01, Caches(C::Offcore(0))), // OFF_CORE_RESPONSE_0
        plain(0xBB, 0x01, Caches(C::Offcore(1))), // OFF_CORE_RESPONSE_1
    ];

    /// Caches and TLBs of Skylake and Ice Lake.
    pub const SKYLAKE_CACHES: &[EventRow] = &[
        plain(0x08, 0x0E, Caches(C::LoadWalks)),      // DTLB_LOAD_MISSES.WALK_COMPLETED
        plain(0x08, 0x20, Caches(C::LoadTlbSecond)),  // DTLB_LOAD_MISSES.STLB_HIT
        plain(0x49, 0x0E, Caches(C::StoreWalks)),     // DTLB_STORE_MISSES.WALK_COMPLETED
        plain(0x49, 0x20, Caches(C::StoreTlbSecond)), // DTLB_STORE_MISSES.STLB_HIT
        plain(0x51, 0x01, Caches(C::DataFills)),      // L1D.REPLACEMENT
        plain(0x83, 0x02, Caches(C::FetchMisses)),    // ICACHE_64B.IFTAG_MISS
        plain(0x85, 0x0E, Caches(C::FetchWalks)),     // ITLB_MISSES.WALK_COMPLETED
        plain(0x85, 0x20, Caches(C::FetchTlbSecond)), // ITLB_MISSES.STLB_HIT
        plain(0xB7, 0x01, Caches(C::Offcore(0))),     // OFFCORE_RESPONSE_0
        plain(0xBB, 0x01, Caches(C::Offcore(1))),     // OFFCORE_RESPONSE_1
    ];

    /// Slots of Sandy Bridge to Skylake, by which top-down analysis parts them.
    pub const SLOTS: &[EventRow] = &[
        plain(0x0D, 0x01, Mispredicted(B::ALL)), // INT_MISC.RECOVERY_CYCLES, Skylake
        plain(0x0D, 0x03, Mispredicted(B::ALL)), // INT_MISC.RECOVERY_CYCLES
        plain(0x0E, 0x01, Instructions),         // UOPS_ISSUED.ANY
        plain(0x9C, 0x01, Nothing),              // IDQ_UOPS_NOT_DELIVERED.CORE
    ];

    /// Branches since Sandy Bridge, up to Skylake.
    pub const BRANCHES: &[EventRow] = &[
        precise(0xC4, 0x00, Branches(B::ALL)),
        precise(0xC4, 0x01, Branches(B::CONDITIONAL)), // BR_INST_RETIRED.CONDITIONAL
        precise(0xC4, 0x02, Branches(B::CALLS)),       // BR_INST_RETIRED.NEAR_CALL
        precise(0xC4, 0x04, Branches(B::ALL)),         // BR_INST_RETIRED.ALL_BRANCHES_PEBS
        precise(0xC4, 0x08, Branches(B::RETURNS)),     // BR_INST_RETIRED.NEAR_RETURN
        plain(0xC4, 0x10, Branches(B::NOT_TAKEN)),     // BR_INST_RETIRED.NOT_TAKEN
        precise(0xC4, 0x20, Branches(B::NEAR_TAKEN)),  // BR_INST_RETIRED.NEAR_TAKEN
        plain(0xC4, 0x40, Branches(B::FAR)),           // BR_INST_RETIRED.FAR_BRANCH
        precise(0xC5, 0x00, Mispredicted(B::ALL)),
        precise(0xC5, 0x01, Mispredicted(B::CONDITIONAL)),
        precise(0xC5, 0x04, Mispredicted(B::ALL)), // BR_MISP_RETIRED.ALL_BRANCHES_PEBS
        precise(0xC5, 0x20, Mispredicted(B::NEAR_TAKEN)),
    ];

    /// Instructions and memory of Sandy Bridge. SDM Vol. 3B 21.3.4.4 "PEBS Support in Sandy Bridge".
    pub const SANDYBRIDGE: &[EventRow] = &[
        plain(0xC0, 0x00, Instructions),
        precise(0xC0, 0x01, Instructions),        // INST_RETIRED.PREC_DIST
        precise(0xC2, 0x01, Instructions),        // UOPS_RETIRED.ALL
        precise(0xC2, 0x02, Instructions),        // UOPS_RETIRED.RETIRE_SLOTS
        precise(0xCD, 0x01, LoadLatency),         // MEM_TRANS_RETIRED.LOAD_LATENCY
        precise(0xCD, 0x02, Stores),              // MEM_TRANS_RETIRED.PRECISE_STORE
        precise(0xD0, 0x81, Loads(L::ALL)),       // MEM_UOPS_RETIRED.ALL_LOADS
        precise(0xD0, 0x82, Stores),              // MEM_UOPS_RETIRED.ALL_STORES
        precise(0xD0, 0xF1, Loads(L::ALL)),       // the same, as Linux asks for them
        precise(0xD0, 0xF2, Stores),              // the same
        plain(0x51, 0x08, Caches(C::StoreFills)), // L1D.ALL_M_REPLACEMENT
        precise(0xD1, 0x01, Loads(L::L1)),        // MEM_LOAD_UOPS_RETIRED.L1_HIT
        precise(0xD1, 0x02, Loads(L::L2)),        // MEM_LOAD_UOPS_RETIRED.L2_HIT
        precise(0xD1, 0x04, Loads(L::L3)),        // MEM_LOAD_UOPS_RETIRED.LLC_HIT
        precise(0xD1, 0x20, Loads(L::MEMORY)),    // MEM_LOAD_UOPS_RETIRED.LLC_MISS
    ];

    /// Instructions and memory since Haswell.
    pub const HASWELL: &[EventRow] = &[
        plain(0xC0, 0x00, Instructions),
        precise(0xC0, 0x01, Instructions),        // INST_RETIRED.PREC_DIST
        precise(0xC2, 0x01, Instructions),        // UOPS_RETIRED.ALL
        precise(0xC2, 0x02, Instructions),        // UOPS_RETIRED.RETIRE_SLOTS
        precise(0xCD, 0x01, LoadLatency),         // MEM_TRANS_RETIRED.LOAD_LATENCY
        precise(0xD0, 0x81, Loads(L::ALL)),       // MEM_UOPS_RETIRED.ALL_LOADS
        precise(0xD0, 0x82, Stores),              // MEM_UOPS_RETIRED.ALL_STORES
        precise(0xD1, 0x01, Loads(L::L1)),        // MEM_LOAD_UOPS_RETIRED.L1_HIT
        precise(0xD1, 0x02, Loads(L::L2)),        // MEM_LOAD_UOPS_RETIRED.L2_HIT
        precise(0xD1, 0x04, Loads(L::L3)),        // MEM_LOAD_UOPS_RETIRED.L3_HIT
        precise(0xD1, 0x08, Loads(L::BEYOND_L1)), // MEM_LOAD_UOPS_RETIRED.L1_MISS
        precise(0xD1, 0x10, Loads(L::BEYOND_L2)), // MEM_LOAD_UOPS_RETIRED.L2_MISS
        precise(0xD1, 0x20, Loads(L::MEMORY)),    // MEM_LOAD_UOPS_RETIRED.L3_MISS
    ];

    /// Transactions since Haswell, whose names are Skylake's. There are none unless the machine shows RTM.
    pub const TRANSACTIONS: &[EventRow] = &[
        plain(0x54, 0x01, Transactions(T::CONFLICT)),    // TX_MEM.ABORT_CONFLICT
        plain(0x54, 0x02, Transactions(T::CAPACITY)),    // TX_MEM.ABORT_CAPACITY
        plain(0xC9, 0x01, Transactions(T::STARTED)),     // RTM_RETIRED.START
        plain(0xC9, 0x02, Transactions(T::COMMITTED)),   // RTM_RETIRED.COMMIT
        precise(0xC9, 0x04, Transactions(T::ABORTED)),   // RTM_RETIRED.ABORTED
        plain(0xC9, 0x08, Transactions(T::MEMORY)),      // RTM_RETIRED.ABORTED_MEM
        plain(0xC9, 0x20, Transactions(T::UNFRIENDLY)),  // RTM_RETIRED.ABORTED_UNFRIENDLY
        plain(0xC9, 0x40, Transactions(T::MEMORY_TYPE)), // RTM_RETIRED.ABORTED_MEMTYPE
        plain(0xC9, 0x80, Transactions(T::EVENTS)),      // RTM_RETIRED.ABORTED_EVENTS
    ];

    /// Branches since Ice Lake, in codes of their own.
    pub const SUNNY_COVE_BRANCHES: &[EventRow] = &[
        precise(0xC4, 0x00, Branches(B::ALL)),
        precise(0xC4, 0x01, Branches(B::TAKEN)),     // BR_INST_RETIRED.COND_TAKEN
        precise(0xC4, 0x02, Branches(B::CALLS)),     // BR_INST_RETIRED.NEAR_CALL
        precise(0xC4, 0x08, Branches(B::RETURNS)),   // BR_INST_RETIRED.NEAR_RETURN
        precise(0xC4, 0x10, Branches(B::NOT_TAKEN)), // BR_INST_RETIRED.COND_NTAKEN
        precise(0xC4, 0x11, Branches(B::CONDITIONAL)), // BR_INST_RETIRED.COND
        precise(0xC4, 0x20, Branches(B::NEAR_TAKEN)), // BR_INST_RETIRED.NEAR_TAKEN
        precise(0xC4, 0x40, Branches(B::FAR)),       // BR_INST_RETIRED.FAR_BRANCH
        precise(0xC4, 0x80, Branches(B::INDIRECT)),  // BR_INST_RETIRED.INDIRECT
        precise(0xC5, 0x00, Mispredicted(B::ALL)),
        precise(0xC5, 0x11, Mispredicted(B::CONDITIONAL)),
        precise(0xC5, 0x20, Mispredicted(B::NEAR_TAKEN)),
        precise(0xC5, 0x80, Mispredicted(B::INDIRECT)),
    ];

    /// Memory since Golden Cove, beside [`HASWELL`].
    pub const GOLDEN_COVE: &[EventRow] = &[
        precise(0xCD, 0x02, Stores),                  // MEM_TRANS_RETIRED.STORE_SAMPLE
        precise(0xC4, 0x04, Branches(B::ALL)),        // as Linux asks for branches
        precise(0xC5, 0x04, Mispredicted(B::ALL)),    // and for mispredicted ones
        plain(0x11, 0x0E, Caches(C::FetchWalks)),     // ITLB_MISSES.WALK_COMPLETED
        plain(0x11, 0x20, Caches(C::FetchTlbSecond)), // ITLB_MISSES.STLB_HIT
        plain(0x12, 0x0E, Caches(C::LoadWalks)),      // DTLB_LOAD_MISSES.WALK_COMPLETED
        plain(0x12, 0x20, Caches(C::LoadTlbSecond)),  // DTLB_LOAD_MISSES.STLB_HIT
        plain(0x13, 0x0E, Caches(C::StoreWalks)),     // DTLB_STORE_MISSES.WALK_COMPLETED
        plain(0x13, 0x20, Caches(C::StoreTlbSecond)), // DTLB_STORE_MISSES.STLB_HIT
        plain(0x24, 0xE1, Loads(L::BEYOND_L1)),       // L2_RQSTS.ALL_DEMAND_DATA_RD
        plain(0x24, 0xE4, Caches(C::FetchMisses)),    // L2_RQSTS.ALL_CODE_RD
        plain(0x2A, 0x01, Caches(C::Offcore(0))),     // OCR
        plain(0x2B, 0x01, Caches(C::Offcore(1))),     // OCR
        plain(0x51, 0x01, Caches(C::DataFills)),      // L1D.REPLACEMENT
    ];

    /// Tremont.
    pub const TREMONT: &[EventRow] = &[
        precise(0xC0, 0x00, Instructions), // INST_RETIRED.ANY_P
        precise(0xC2, 0x00, Instructions), // TOPDOWN_RETIRING.ALL
        precise(0xC4, 0x00, Branches(B::ALL)),
        precise(0xC4, 0x7E, Branches(B::CONDITIONAL)), // BR_INST_RETIRED.JCC
        precise(0xC4, 0xFE, Branches(B::TAKEN)),       // BR_INST_RETIRED.TAKEN_JCC
        precise(0xC4, 0xF9, Branches(B::CALLS)),       // BR_INST_RETIRED.CALL
        precise(0xC4, 0xF7, Branches(B::RETURNS)),     // BR_INST_RETIRED.RETURN
        precise(0xC4, 0xEB, Branches(B::INDIRECT.or(B::RETURNS))), // BR_INST_RETIRED.NON_RETURN_IND and returns
        precise(0xC4, 0xBF, Branches(B::FAR)),         // BR_INST_RETIRED.FAR_BRANCH
        precise(0xC5, 0x00, Mispredicted(B::ALL)),
        precise(0xC5, 0x7E, Mispredicted(B::CONDITIONAL)),
        precise(0xD0, 0x81, Loads(L::ALL)),           // MEM_UOPS_RETIRED.ALL_LOADS
        precise(0xD0, 0x82, Stores),                  // MEM_UOPS_RETIRED.ALL_STORES
        precise(0xD1, 0x01, Loads(L::L1)),            // MEM_LOAD_UOPS_RETIRED.L1_HIT
        precise(0xD1, 0x02, Loads(L::L2)),            // MEM_LOAD_UOPS_RETIRED.L2_HIT
        precise(0xD1, 0x04, Loads(L::L3)),            // MEM_LOAD_UOPS_RETIRED.L3_HIT
        precise(0xD1, 0x08, Loads(L::BEYOND_L1)),     // MEM_LOAD_UOPS_RETIRED.L1_MISS
        precise(0xD1, 0x10, Loads(L::BEYOND_L2)),     // MEM_LOAD_UOPS_RETIRED.L2_MISS
        plain(0x08, 0x0E, Caches(C::LoadWalks)),      // DTLB_LOAD_MISSES.WALK_COMPLETED
        plain(0x49, 0x0E, Caches(C::StoreWalks)),     // DTLB_STORE_MISSES.WALK_COMPLETED
        plain(0x80, 0x02, Caches(C::FetchMisses)),    // ICACHE.MISSES
        plain(0x80, 0x03, Caches(C::Fetches)),        // ICACHE.ACCESSES
        plain(0x81, 0x04, Caches(C::FetchTlbMisses)), // ITLB.FILLS
        plain(0x85, 0x0E, Caches(C::FetchWalks)),     // ITLB_MISSES.WALK_COMPLETED
        plain(0xB7, 0x01, Caches(C::Offcore(0))),     // OCR
        plain(0xB7, 0x02, Caches(C::Offcore(1))),     // OCR
        plain(0x0E, 0x00, Instructions),              // UOPS_ISSUED.ANY
        plain(0x9C, 0x00, Nothing),                   // UOPS_NOT_DELIVERED.ANY
        plain(0xCA, 0x02, Mispredicted(B::ALL)),      // ISSUE_SLOTS_NOT_CONSUMED.RECOVERY
    ];
}

/// What a model counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmuCaps {
    /// Architectural version: CPUID.0AH:EAX[7:0]; 0 for the P6 family.
    pub version: u8,
    /// General counters: CPUID.0AH:EAX[15:8].
    pub general: u8,
    /// Their width in bits: CPUID.0AH:EAX[23:16].
    pub general_width: u8,
    /// Fixed counters: CPUID.0AH:EDX[4:0].
    pub fixed: u8,
    /// Their width in bits: CPUID.0AH:EDX[12:5].
    pub fixed_width: u8,
    /// The architectural events that are there, by index in [`ARCHITECTURAL`]: CPUID.0AH:EBX, inverted, within its length.
    pub architectural: u8,
    /// IA32_PERF_CAPABILITIES but for the format of last-branch records; `None` where the register is absent.
    pub capabilities: Option<u64>,
    /// Bits of IA32_PERFEVTSELx that can be written; any other is #GP(0).
    pub select: u64,
    /// AnyThread bits of IA32_FIXED_CTR_CTRL can be written.
    pub any_thread: bool,
    /// Bits of MSR_OFFCORE_RSP_0 and 1 that can be written; 0 where the register is absent.
    pub offcore: [u64; 2],
    /// Ticks of the time-stamp counter in one of [`Count::Reference`].
    pub reference: u32,
    /// Issue slots in a cycle.
    pub slots: u32,
    /// Events beside the architectural ones.
    pub events: &'static [&'static [EventRow]],
}

impl PmuCaps {
    /// No counters: what a model's row leaves out.
    pub const NONE: Self = Self {
        version: 0,
        general: 0,
        general_width: 0,
        fixed: 0,
        fixed_width: 0,
        architectural: 0,
        capabilities: None,
        select: 0,
        any_thread: false,
        offcore: [0, 0],
        reference: 1,
        slots: 1,
        events: &[],
    };
}

impl PmuCaps {
    /// The event with this code, if the model has it.
    pub fn event(&self, select: EventSelect) -> Option<&'static EventRow> {
        let is = |row: &&EventRow| (row.event, row.umask) == (select.event(), select.umask());
        let architectural = || {
            let (index, row) = ARCHITECTURAL.iter().enumerate().find(|(_, row)| is(row))?;
            (self.architectural >> index & 1 != 0).then_some(row)
        };
        self.events
            .iter()
            .flat_map(|group| group.iter())
            .find(is)
            .or_else(architectural)
    }

    /// Whether IA32_PERF_CAPABILITIES has this bit.
    pub const fn capable(&self, bit: u64) -> bool {
        match self.capabilities {
            Some(value) => value & bit != 0,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // covers: pmu/select
    #[test]
    fn event_select_has_the_manual_s_layout() {
        let s = |bits| EventSelect::from_bits(bits);
        assert_eq!((s(0x4F2E).event(), s(0x4F2E).umask()), (0x2E, 0x4F));
        for (bit, set) in [
            (16, s(1 << 16).usr()),
            (17, s(1 << 17).os()),
            (18, s(1 << 18).edge()),
            (19, s(1 << 19).pin_control()),
            (20, s(1 << 20).int()),
            (21, s(1 << 21).any()),
            (22, s(1 << 22).enable()),
            (23, s(1 << 23).invert()),
            (32, s(1 << 32).in_tx()),
            (33, s(1 << 33).in_tx_checkpointed()),
            (34, s(1 << 34).adaptive()),
        ] {
            assert!(set, "bit {bit}");
        }
        assert_eq!(s(0xAB << 24).counter_mask(), 0xAB);
    }

    // covers: pmu/fixed
    #[test]
    fn fixed_control_has_four_bits_a_counter_and_one_above() {
        let field = FixedControl::of(0xB0, 1);
        assert!(field.os && field.usr && field.pmi && !field.adaptive);
        assert_eq!(FixedControl::of(0xB0, 0), FixedControl::default());
        assert!(FixedControl::of(1 << 40, 2).adaptive);
        assert_eq!(FixedControl::writable(1, true, false), 0xF0);
        assert_eq!(FixedControl::writable(2, false, true), 0xB00 | 1 << 40);
    }

    // covers: pmu/branches
    #[test]
    fn branch_kinds_choose_among_flows() {
        for (kinds, count, what) in [
            (Branches::ALL, 16, "all but exceptions and interrupts"),
            (Branches::CONDITIONAL, 2, "taken and not"),
            (Branches::CALLS, 2, "direct and indirect"),
            (Branches::INDIRECT, 2, "jump and call"),
            (Branches::RETURNS, 1, "near"),
            (Branches::FAR, 9, "eleven kinds less two"),
            (Branches::NEAR_TAKEN, 6, "seven kinds less one"),
            (Branches::ALL_TAKEN, 15, "all less one"),
        ] {
            assert_eq!(Flow::ALL.iter().filter(|&&f| kinds.has(f)).count(), count, "{what}");
        }
    }
}
