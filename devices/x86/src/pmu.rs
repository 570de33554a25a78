//! Performance monitoring: registers, events, and what a model can count. SDM Vol. 3B ch. 21 "Performance Monitoring".

pub mod netburst;

use bitfield_struct::bitfield;

use crate::watch::{Abort, Far, Flow};

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
            Flow::Far(Far::Exception | Far::Interrupt | Far::VmExit | Far::Smi) => return false,
            // The instruction has retired under the VMM's controls, and the guest's are loaded by now.
            Flow::Far(Far::VmEntry) => return false,
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
    /// Loads and stores.
    Accesses,
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

/// How true a count is to what a part of that model would have counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fidelity {
    /// The number that the manual says.
    Exact,
    /// The manual leaves it to the part's caches and pipeline; a rule decides it, the same in every run.
    Modelled,
    /// What it is for does not happen here: always 0.
    Zero,
}

impl Count {
    /// How true it is.
    pub const fn fidelity(self) -> Fidelity {
        match self {
            Self::Instructions
            | Self::Branches(_)
            | Self::Stores
            | Self::Loads(Levels::ALL)
            | Self::X87
            | Self::Simd
            | Self::Transactions(_) => Fidelity::Exact,
            Self::Cycles
            | Self::Reference
            | Self::Slots
            | Self::Mispredicted(_)
            | Self::Caches(_)
            | Self::Loads(_)
            | Self::LoadLatency => Fidelity::Modelled,
            Self::Nothing => Fidelity::Zero,
        }
    }
}

/// An event of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventRow {
    /// Event select.
    pub event: u8,
    /// Unit mask.
    pub umask: u8,
    /// Its name in the manual or in the public event lists.
    pub name: &'static str,
    /// What it counts.
    pub count: Count,
    /// PEBS can sample it.
    pub precise: bool,
}

const fn plain(event: u8, umask: u8, name: &'static str, count: Count) -> EventRow {
    EventRow {
        event,
        umask,
        name,
        count,
        precise: false,
    }
}

const fn precise(event: u8, umask: u8, name: &'static str, count: Count) -> EventRow {
    EventRow {
        precise: true,
        ..plain(event, umask, name, count)
    }
}

/// The architectural events in the order of CPUID.0AH:EBX. SDM Vol. 3B Table 21-1 "UMask and Event Select Encodings for
/// Pre-Defined Architectural Performance Events".
pub const ARCHITECTURAL: [EventRow; 8] = [
    plain(0x3C, 0x00, "CPU_CLK_UNHALTED.CORE", Count::Cycles),
    plain(0xC0, 0x00, "INST_RETIRED.ANY_P", Count::Instructions),
    plain(0x3C, 0x01, "CPU_CLK_UNHALTED.REF", Count::Reference),
    plain(
        0x2E,
        0x4F,
        "LONGEST_LAT_CACHE.REFERENCE",
        Count::Caches(Caches::References),
    ),
    plain(0x2E, 0x41, "LONGEST_LAT_CACHE.MISS", Count::Caches(Caches::Misses)),
    plain(
        0xC4,
        0x00,
        "BR_INST_RETIRED.ALL_BRANCHES",
        Count::Branches(Branches::ALL),
    ),
    plain(
        0xC5,
        0x00,
        "BR_MISP_RETIRED.ALL_BRANCHES",
        Count::Mispredicted(Branches::ALL),
    ),
    plain(0xA4, 0x01, "TOPDOWN.SLOTS", Count::Slots),
];

/// Other events, by generation. A row here comes before the architectural event of the same code, so it can make that one
/// precise. SDM Vol. 3B ch. 21, "PEBS Performance Events" of each, and the event lists at perfmon-events.intel.com.
pub mod events {
    use super::{Branches as B, Caches as C, Count::*, EventRow, Levels as L, Transactions as T, plain, precise};

    /// P6. SDM Vol. 3B 21.6.8.2 "PerfEvtSel0 and PerfEvtSel1 MSRs".
    pub const P6: &[EventRow] = &[
        plain(0x79, 0x00, "CPU_CLK_UNHALTED", Cycles),
        plain(0xC0, 0x00, "INST_RETIRED", Instructions),
        plain(0xC2, 0x00, "UOPS_RETIRED", Instructions),
        plain(0xC4, 0x00, "BR_INST_RETIRED", Branches(B::ALL)),
        plain(0xC5, 0x00, "BR_MISS_PRED_RETIRED", Mispredicted(B::ALL)),
        plain(0xC9, 0x00, "BR_TAKEN_RETIRED", Branches(B::ALL_TAKEN)),
        plain(0xCA, 0x00, "BR_MISS_PRED_TAKEN_RET", Mispredicted(B::ALL_TAKEN)),
        plain(0x43, 0x00, "DATA_MEM_REFS", Caches(C::Accesses)),
        plain(0x45, 0x00, "DCU_LINES_IN", Caches(C::DataFills)),
        plain(0x29, 0x0F, "L2_LD", Loads(L::BEYOND_L1)),
        plain(0x2A, 0x0F, "L2_ST", Caches(C::StoreFills)),
        plain(0x28, 0x0F, "L2_IFETCH", Caches(C::FetchMisses)),
        plain(0x25, 0x00, "L2_M_LINES_INM", Nothing),
        plain(0x2E, 0x0F, "L2_RQSTS", Caches(C::References)), // all states
        plain(0x2E, 0x01, "L2_RQSTS", Caches(C::Misses)),     // not there
        plain(0x80, 0x00, "IFU_IFETCH", Caches(C::Fetches)),
        plain(0x81, 0x00, "IFU_IFETCH_MISS", Caches(C::FetchMisses)),
        plain(0x85, 0x00, "ITLB_MISS", Caches(C::FetchTlbMisses)),
    ];

    /// Core 2. SDM Vol. 3B Table 21-86 "PEBS Performance Events for Intel Core Microarchitecture".
    pub const CORE2: &[EventRow] = &[
        precise(0xC0, 0x00, "INST_RETIRED.ANY_P", Instructions),
        precise(0xC1, 0xFE, "X87_OPS_RETIRED.ANY", X87),
        plain(0xC2, 0x0F, "UOPS_RETIRED.ANY", Instructions),
        plain(0xC4, 0x0C, "BR_INST_RETIRED.TAKEN", Branches(B::ALL_TAKEN)),
        precise(0xC5, 0x00, "BR_INST_RETIRED.MISPRED", Mispredicted(B::ALL)),
        precise(0xC7, 0x1F, "SIMD_INST_RETIRED.ANY", Simd),
        precise(0xCB, 0x01, "MEM_LOAD_RETIRED.L1D_MISS", Loads(L::BEYOND_L1)),
        precise(0xCB, 0x02, "MEM_LOAD_RETIRED.L1D_LINE_MISS", Loads(L::BEYOND_L1)),
        precise(0xCB, 0x04, "MEM_LOAD_RETIRED.L2_MISS", Loads(L::BEYOND_L2)),
        precise(0xCB, 0x08, "MEM_LOAD_RETIRED.L2_LINE_MISS", Loads(L::BEYOND_L2)),
        precise(0xCB, 0x10, "MEM_LOAD_RETIRED.DTLB_MISS", Caches(C::LoadWalks)),
        plain(0x08, 0x01, "DTLB_MISSES.ANY", Caches(C::LoadWalks)),
        plain(0x08, 0x02, "DTLB_MISSES.MISS_LD", Caches(C::LoadWalks)),
        plain(0x08, 0x08, "DTLB_MISSES.MISS_ST", Caches(C::StoreWalks)),
        plain(0x29, 0x4F, "L2_LD.SELF.DEMAND.MESI", Caches(C::LoadReferences)),
        plain(0x29, 0x41, "L2_LD.SELF.DEMAND.I_STATE", Caches(C::LoadMisses)),
        plain(0x2A, 0x4F, "L2_ST.SELF.MESI", Caches(C::StoreReferences)),
        plain(0x2A, 0x41, "L2_ST.SELF.I_STATE", Caches(C::StoreMisses)),
        plain(0x40, 0x0F, "L1D_CACHE_LD.MESI", Loads(L::ALL)),
        plain(0x40, 0x01, "L1D_CACHE_LD.I_STATE", Loads(L::BEYOND_L1)),
        plain(0x41, 0x0F, "L1D_CACHE_ST.MESI", Stores),
        plain(0x41, 0x01, "L1D_CACHE_ST.I_STATE", Caches(C::StoreFills)),
        plain(0x45, 0x0F, "L1D_REPL", Caches(C::DataFills)),
        plain(0x4E, 0x10, "L1D_PREFETCH.REQUESTS", Nothing),
        plain(0x80, 0x00, "L1I_READS", Caches(C::Fetches)),
        plain(0x81, 0x00, "L1I_MISSES", Caches(C::FetchMisses)),
        plain(0x82, 0x12, "ITLB.MISSES", Caches(C::FetchWalks)),
    ];

    /// Nehalem and Westmere. SDM Vol. 3B 21.3.1.1.2 "Processor Event Based Sampling".
    pub const NEHALEM: &[EventRow] = &[
        precise(0x0B, 0x01, "MEM_INST_RETIRED.LOADS", Loads(L::ALL)),
        precise(0x0B, 0x02, "MEM_INST_RETIRED.STORES", Stores),
        precise(0x0B, 0x10, "MEM_INST_RETIRED.LATENCY_ABOVE_THRESHOLD", LoadLatency),
        precise(0xC0, 0x00, "INST_RETIRED.ANY_P", Instructions),
        precise(0xC0, 0x01, "INST_RETIRED.ANY_P", Instructions),
        precise(0xC0, 0x02, "INST_RETIRED.X87", X87),
        precise(0xC2, 0x01, "UOPS_RETIRED.ANY", Instructions),
        precise(0xC4, 0x00, "BR_INST_RETIRED.ALL_BRANCHES", Branches(B::ALL)),
        precise(0xC4, 0x01, "BR_INST_RETIRED.CONDITIONAL", Branches(B::CONDITIONAL)),
        precise(0xC4, 0x02, "BR_INST_RETIRED.NEAR_CALL", Branches(B::CALLS)),
        precise(0xC4, 0x04, "BR_INST_RETIRED.ALL_BRANCHES", Branches(B::ALL)),
        precise(0xC5, 0x01, "BR_MISP_RETIRED.CONDITIONAL", Mispredicted(B::CONDITIONAL)),
        precise(0xC5, 0x02, "BR_MISP_RETIRED.NEAR_CALL", Mispredicted(B::CALLS)),
        precise(0xC5, 0x04, "BR_MISP_RETIRED.ALL_BRANCHES", Mispredicted(B::ALL)),
        precise(0xC7, 0x1F, "SSEX_UOPS_RETIRED", Simd), // all kinds
        precise(0xCB, 0x01, "MEM_LOAD_RETIRED.L1D_HIT", Loads(L::L1)),
        precise(0xCB, 0x02, "MEM_LOAD_RETIRED.L2_HIT", Loads(L::L2)),
        precise(0xCB, 0x04, "MEM_LOAD_RETIRED.LLC_UNSHARED_HIT", Loads(L::L3)),
        precise(0xCB, 0x10, "MEM_LOAD_RETIRED.LLC_MISS", Loads(L::MEMORY)),
        precise(0xCB, 0x80, "MEM_LOAD_RETIRED.DTLB_MISS", Caches(C::LoadTlbMisses)),
        precise(0x0C, 0x01, "MEM_STORE_RETIRED.DTLB_MISS", Caches(C::StoreTlbMisses)),
        plain(0x08, 0x01, "DTLB_LOAD_MISSES.ANY", Caches(C::LoadTlbMisses)),
        plain(0x08, 0x02, "DTLB_LOAD_MISSES.WALK_COMPLETED", Caches(C::LoadWalks)),
        plain(0x08, 0x10, "DTLB_LOAD_MISSES.STLB_HIT", Caches(C::LoadTlbSecond)),
        plain(0x49, 0x01, "DTLB_MISSES.ANY", Caches(C::StoreTlbMisses)),
        plain(0x4E, 0x01, "L1D_PREFETCH.REQUESTS", Nothing),
        plain(0x4E, 0x02, "L1D_PREFETCH.MISS", Nothing),
        plain(0x51, 0x01, "L1D.REPL", Caches(C::DataFills)),
        plain(0x51, 0x02, "L1D.M_REPL", Caches(C::StoreFills)),
        plain(0x80, 0x02, "L1I.MISSES", Caches(C::FetchMisses)),
        plain(0x80, 0x03, "L1I.READS", Caches(C::Fetches)),
        plain(0x85, 0x01, "ITLB_MISSES.ANY", Caches(C::FetchTlbMisses)),
        plain(0x85, 0x02, "ITLB_MISSES.WALK_COMPLETED", Caches(C::FetchWalks)),
        plain(0xB7, 0x01, "OFF_CORE_RESPONSE_0", Caches(C::Offcore(0))),
        plain(0xBB, 0x01, "OFF_CORE_RESPONSE_1", Caches(C::Offcore(1))),
        plain(0xE8, 0x03, "BPU_CLEARS.ANY", Mispredicted(B::ALL)),
    ];

    /// Caches and TLBs of Sandy Bridge to Broadwell.
    pub const CACHES: &[EventRow] = &[
        plain(0x08, 0x01, "DTLB_LOAD_MISSES.MISS_CAUSES_A_WALK", Caches(C::LoadWalks)),
        plain(
            0x49,
            0x01,
            "DTLB_STORE_MISSES.MISS_CAUSES_A_WALK",
            Caches(C::StoreWalks),
        ),
        plain(0x49, 0x10, "DTLB_STORE_MISSES.STLB_HIT", Caches(C::StoreTlbSecond)),
        plain(0x4E, 0x02, "HW_PRE_REQ.DL1_MISS", Nothing),
        plain(0x51, 0x01, "L1D.REPLACEMENT", Caches(C::DataFills)),
        plain(0x80, 0x02, "ICACHE.MISSES", Caches(C::FetchMisses)),
        plain(0x85, 0x01, "ITLB_MISSES.MISS_CAUSES_A_WALK", Caches(C::FetchWalks)),
        plain(0x85, 0x10, "ITLB_MISSES.STLB_HIT", Caches(C::FetchTlbSecond)),
        plain(0x85, 0x60, "ITLB_MISSES.STLB_HIT", Caches(C::FetchTlbSecond)), // since Haswell
        plain(0xB7, 0x01, "OFF_CORE_RESPONSE_0", Caches(C::Offcore(0))),
        plain(0xBB, 0x01, "OFF_CORE_RESPONSE_1", Caches(C::Offcore(1))),
    ];

    /// Caches and TLBs of Skylake and Ice Lake.
    pub const SKYLAKE_CACHES: &[EventRow] = &[
        plain(0x08, 0x0E, "DTLB_LOAD_MISSES.WALK_COMPLETED", Caches(C::LoadWalks)),
        plain(0x08, 0x20, "DTLB_LOAD_MISSES.STLB_HIT", Caches(C::LoadTlbSecond)),
        plain(0x49, 0x0E, "DTLB_STORE_MISSES.WALK_COMPLETED", Caches(C::StoreWalks)),
        plain(0x49, 0x20, "DTLB_STORE_MISSES.STLB_HIT", Caches(C::StoreTlbSecond)),
        plain(0x51, 0x01, "L1D.REPLACEMENT", Caches(C::DataFills)),
        plain(0x83, 0x02, "ICACHE_64B.IFTAG_MISS", Caches(C::FetchMisses)),
        plain(0x85, 0x0E, "ITLB_MISSES.WALK_COMPLETED", Caches(C::FetchWalks)),
        plain(0x85, 0x20, "ITLB_MISSES.STLB_HIT", Caches(C::FetchTlbSecond)),
        plain(0xB7, 0x01, "OFFCORE_RESPONSE_0", Caches(C::Offcore(0))),
        plain(0xBB, 0x01, "OFFCORE_RESPONSE_1", Caches(C::Offcore(1))),
    ];

    /// Slots of Sandy Bridge to Skylake, by which top-down analysis parts them.
    pub const SLOTS: &[EventRow] = &[
        plain(0x0D, 0x01, "INT_MISC.RECOVERY_CYCLES", Mispredicted(B::ALL)), // Skylake
        plain(0x0D, 0x03, "INT_MISC.RECOVERY_CYCLES", Mispredicted(B::ALL)),
        plain(0x0E, 0x01, "UOPS_ISSUED.ANY", Instructions),
        plain(0x9C, 0x01, "IDQ_UOPS_NOT_DELIVERED.CORE", Nothing),
    ];

    /// Branches since Sandy Bridge, up to Skylake.
    pub const BRANCHES: &[EventRow] = &[
        precise(0xC4, 0x00, "BR_INST_RETIRED.ALL_BRANCHES", Branches(B::ALL)),
        precise(0xC4, 0x01, "BR_INST_RETIRED.CONDITIONAL", Branches(B::CONDITIONAL)),
        precise(0xC4, 0x02, "BR_INST_RETIRED.NEAR_CALL", Branches(B::CALLS)),
        precise(0xC4, 0x04, "BR_INST_RETIRED.ALL_BRANCHES_PEBS", Branches(B::ALL)),
        precise(0xC4, 0x08, "BR_INST_RETIRED.NEAR_RETURN", Branches(B::RETURNS)),
        plain(0xC4, 0x10, "BR_INST_RETIRED.NOT_TAKEN", Branches(B::NOT_TAKEN)),
        precise(0xC4, 0x20, "BR_INST_RETIRED.NEAR_TAKEN", Branches(B::NEAR_TAKEN)),
        plain(0xC4, 0x40, "BR_INST_RETIRED.FAR_BRANCH", Branches(B::FAR)),
        precise(0xC5, 0x00, "BR_MISP_RETIRED.ALL_BRANCHES", Mispredicted(B::ALL)),
        precise(0xC5, 0x01, "BR_MISP_RETIRED.CONDITIONAL", Mispredicted(B::CONDITIONAL)),
        precise(0xC5, 0x04, "BR_MISP_RETIRED.ALL_BRANCHES_PEBS", Mispredicted(B::ALL)),
        precise(0xC5, 0x20, "BR_MISP_RETIRED.NEAR_TAKEN", Mispredicted(B::NEAR_TAKEN)),
    ];

    /// Instructions and memory of Sandy Bridge. SDM Vol. 3B 21.3.4.4 "PEBS Support in Sandy Bridge".
    pub const SANDYBRIDGE: &[EventRow] = &[
        plain(0xC0, 0x00, "INST_RETIRED.ANY_P", Instructions),
        precise(0xC0, 0x01, "INST_RETIRED.PREC_DIST", Instructions),
        precise(0xC2, 0x01, "UOPS_RETIRED.ALL", Instructions),
        precise(0xC2, 0x02, "UOPS_RETIRED.RETIRE_SLOTS", Instructions),
        precise(0xCD, 0x01, "MEM_TRANS_RETIRED.LOAD_LATENCY", LoadLatency),
        precise(0xCD, 0x02, "MEM_TRANS_RETIRED.PRECISE_STORE", Stores),
        precise(0xD0, 0x81, "MEM_UOPS_RETIRED.ALL_LOADS", Loads(L::ALL)),
        precise(0xD0, 0x82, "MEM_UOPS_RETIRED.ALL_STORES", Stores),
        precise(0xD0, 0xF1, "MEM_UOPS_RETIRED.LOADS", Loads(L::ALL)), // the same, as Linux asks for them
        precise(0xD0, 0xF2, "MEM_UOPS_RETIRED.STORES", Stores),       // the same
        plain(0x51, 0x08, "L1D.ALL_M_REPLACEMENT", Caches(C::StoreFills)),
        precise(0xD1, 0x01, "MEM_LOAD_UOPS_RETIRED.L1_HIT", Loads(L::L1)),
        precise(0xD1, 0x02, "MEM_LOAD_UOPS_RETIRED.L2_HIT", Loads(L::L2)),
        precise(0xD1, 0x04, "MEM_LOAD_UOPS_RETIRED.LLC_HIT", Loads(L::L3)),
        precise(0xD1, 0x20, "MEM_LOAD_UOPS_RETIRED.LLC_MISS", Loads(L::MEMORY)),
    ];

    /// Instructions and memory since Haswell.
    pub const HASWELL: &[EventRow] = &[
        plain(0xC0, 0x00, "INST_RETIRED.ANY_P", Instructions),
        precise(0xC0, 0x01, "INST_RETIRED.PREC_DIST", Instructions),
        precise(0xC2, 0x01, "UOPS_RETIRED.ALL", Instructions),
        precise(0xC2, 0x02, "UOPS_RETIRED.RETIRE_SLOTS", Instructions),
        precise(0xCD, 0x01, "MEM_TRANS_RETIRED.LOAD_LATENCY", LoadLatency),
        precise(0xD0, 0x81, "MEM_UOPS_RETIRED.ALL_LOADS", Loads(L::ALL)),
        precise(0xD0, 0x82, "MEM_UOPS_RETIRED.ALL_STORES", Stores),
        precise(0xD1, 0x01, "MEM_LOAD_UOPS_RETIRED.L1_HIT", Loads(L::L1)),
        precise(0xD1, 0x02, "MEM_LOAD_UOPS_RETIRED.L2_HIT", Loads(L::L2)),
        precise(0xD1, 0x04, "MEM_LOAD_UOPS_RETIRED.L3_HIT", Loads(L::L3)),
        precise(0xD1, 0x08, "MEM_LOAD_UOPS_RETIRED.L1_MISS", Loads(L::BEYOND_L1)),
        precise(0xD1, 0x10, "MEM_LOAD_UOPS_RETIRED.L2_MISS", Loads(L::BEYOND_L2)),
        precise(0xD1, 0x20, "MEM_LOAD_UOPS_RETIRED.L3_MISS", Loads(L::MEMORY)),
    ];

    /// Transactions since Haswell, whose names are Skylake's. There are none unless the machine shows RTM.
    pub const TRANSACTIONS: &[EventRow] = &[
        plain(0x54, 0x01, "TX_MEM.ABORT_CONFLICT", Transactions(T::CONFLICT)),
        plain(0x54, 0x02, "TX_MEM.ABORT_CAPACITY", Transactions(T::CAPACITY)),
        plain(0xC9, 0x01, "RTM_RETIRED.START", Transactions(T::STARTED)),
        plain(0xC9, 0x02, "RTM_RETIRED.COMMIT", Transactions(T::COMMITTED)),
        precise(0xC9, 0x04, "RTM_RETIRED.ABORTED", Transactions(T::ABORTED)),
        plain(0xC9, 0x08, "RTM_RETIRED.ABORTED_MEM", Transactions(T::MEMORY)),
        plain(
            0xC9,
            0x20,
            "RTM_RETIRED.ABORTED_UNFRIENDLY",
            Transactions(T::UNFRIENDLY),
        ),
        plain(0xC9, 0x40, "RTM_RETIRED.ABORTED_MEMTYPE", Transactions(T::MEMORY_TYPE)),
        plain(0xC9, 0x80, "RTM_RETIRED.ABORTED_EVENTS", Transactions(T::EVENTS)),
    ];

    /// Branches since Ice Lake, in codes of their own.
    pub const SUNNY_COVE_BRANCHES: &[EventRow] = &[
        precise(0xC4, 0x00, "BR_INST_RETIRED.ALL_BRANCHES", Branches(B::ALL)),
        precise(0xC4, 0x01, "BR_INST_RETIRED.COND_TAKEN", Branches(B::TAKEN)),
        precise(0xC4, 0x02, "BR_INST_RETIRED.NEAR_CALL", Branches(B::CALLS)),
        precise(0xC4, 0x08, "BR_INST_RETIRED.NEAR_RETURN", Branches(B::RETURNS)),
        precise(0xC4, 0x10, "BR_INST_RETIRED.COND_NTAKEN", Branches(B::NOT_TAKEN)),
        precise(0xC4, 0x11, "BR_INST_RETIRED.COND", Branches(B::CONDITIONAL)),
        precise(0xC4, 0x20, "BR_INST_RETIRED.NEAR_TAKEN", Branches(B::NEAR_TAKEN)),
        precise(0xC4, 0x40, "BR_INST_RETIRED.FAR_BRANCH", Branches(B::FAR)),
        precise(0xC4, 0x80, "BR_INST_RETIRED.INDIRECT", Branches(B::INDIRECT)),
        precise(0xC5, 0x00, "BR_MISP_RETIRED.ALL_BRANCHES", Mispredicted(B::ALL)),
        precise(0xC5, 0x11, "BR_MISP_RETIRED.COND", Mispredicted(B::CONDITIONAL)),
        precise(0xC5, 0x20, "BR_MISP_RETIRED.NEAR_TAKEN", Mispredicted(B::NEAR_TAKEN)),
        precise(0xC5, 0x80, "BR_MISP_RETIRED.INDIRECT", Mispredicted(B::INDIRECT)),
    ];

    /// Memory since Golden Cove, beside [`HASWELL`].
    pub const GOLDEN_COVE: &[EventRow] = &[
        precise(0xCD, 0x02, "MEM_TRANS_RETIRED.STORE_SAMPLE", Stores),
        precise(0xC4, 0x04, "BR_INST_RETIRED.ALL_BRANCHES", Branches(B::ALL)), // as Linux asks for branches
        precise(0xC5, 0x04, "BR_MISP_RETIRED.ALL_BRANCHES", Mispredicted(B::ALL)), // and for mispredicted ones
        plain(0x11, 0x0E, "ITLB_MISSES.WALK_COMPLETED", Caches(C::FetchWalks)),
        plain(0x11, 0x20, "ITLB_MISSES.STLB_HIT", Caches(C::FetchTlbSecond)),
        plain(0x12, 0x0E, "DTLB_LOAD_MISSES.WALK_COMPLETED", Caches(C::LoadWalks)),
        plain(0x12, 0x20, "DTLB_LOAD_MISSES.STLB_HIT", Caches(C::LoadTlbSecond)),
        plain(0x13, 0x0E, "DTLB_STORE_MISSES.WALK_COMPLETED", Caches(C::StoreWalks)),
        plain(0x13, 0x20, "DTLB_STORE_MISSES.STLB_HIT", Caches(C::StoreTlbSecond)),
        plain(0x24, 0xE1, "L2_RQSTS.ALL_DEMAND_DATA_RD", Loads(L::BEYOND_L1)),
        plain(0x24, 0xE4, "L2_RQSTS.ALL_CODE_RD", Caches(C::FetchMisses)),
        plain(0x2A, 0x01, "OCR", Caches(C::Offcore(0))),
        plain(0x2B, 0x01, "OCR", Caches(C::Offcore(1))),
        plain(0x51, 0x01, "L1D.REPLACEMENT", Caches(C::DataFills)),
    ];

    /// Tremont.
    pub const TREMONT: &[EventRow] = &[
        precise(0xC0, 0x00, "INST_RETIRED.ANY_P", Instructions),
        precise(0xC2, 0x00, "TOPDOWN_RETIRING.ALL", Instructions),
        precise(0xC4, 0x00, "BR_INST_RETIRED.ALL_BRANCHES", Branches(B::ALL)),
        precise(0xC4, 0x7E, "BR_INST_RETIRED.JCC", Branches(B::CONDITIONAL)),
        precise(0xC4, 0xFE, "BR_INST_RETIRED.TAKEN_JCC", Branches(B::TAKEN)),
        precise(0xC4, 0xF9, "BR_INST_RETIRED.CALL", Branches(B::CALLS)),
        precise(0xC4, 0xF7, "BR_INST_RETIRED.RETURN", Branches(B::RETURNS)),
        precise(
            0xC4,
            0xEB,
            "BR_INST_RETIRED.NON_RETURN_IND",
            Branches(B::INDIRECT.or(B::RETURNS)),
        ), // and returns
        precise(0xC4, 0xBF, "BR_INST_RETIRED.FAR_BRANCH", Branches(B::FAR)),
        precise(0xC5, 0x00, "BR_MISP_RETIRED.ALL_BRANCHES", Mispredicted(B::ALL)),
        precise(0xC5, 0x7E, "BR_MISP_RETIRED.JCC", Mispredicted(B::CONDITIONAL)),
        precise(0xD0, 0x81, "MEM_UOPS_RETIRED.ALL_LOADS", Loads(L::ALL)),
        precise(0xD0, 0x82, "MEM_UOPS_RETIRED.ALL_STORES", Stores),
        precise(0xD1, 0x01, "MEM_LOAD_UOPS_RETIRED.L1_HIT", Loads(L::L1)),
        precise(0xD1, 0x02, "MEM_LOAD_UOPS_RETIRED.L2_HIT", Loads(L::L2)),
        precise(0xD1, 0x04, "MEM_LOAD_UOPS_RETIRED.L3_HIT", Loads(L::L3)),
        precise(0xD1, 0x08, "MEM_LOAD_UOPS_RETIRED.L1_MISS", Loads(L::BEYOND_L1)),
        precise(0xD1, 0x10, "MEM_LOAD_UOPS_RETIRED.L2_MISS", Loads(L::BEYOND_L2)),
        plain(0x08, 0x0E, "DTLB_LOAD_MISSES.WALK_COMPLETED", Caches(C::LoadWalks)),
        plain(0x49, 0x0E, "DTLB_STORE_MISSES.WALK_COMPLETED", Caches(C::StoreWalks)),
        plain(0x80, 0x02, "ICACHE.MISSES", Caches(C::FetchMisses)),
        plain(0x80, 0x03, "ICACHE.ACCESSES", Caches(C::Fetches)),
        plain(0x81, 0x04, "ITLB.FILLS", Caches(C::FetchTlbMisses)),
        plain(0x85, 0x0E, "ITLB_MISSES.WALK_COMPLETED", Caches(C::FetchWalks)),
        plain(0xB7, 0x01, "OCR", Caches(C::Offcore(0))),
        plain(0xB7, 0x02, "OCR", Caches(C::Offcore(1))),
        plain(0x0E, 0x00, "UOPS_ISSUED.ANY", Instructions),
        plain(0x9C, 0x00, "UOPS_NOT_DELIVERED.ANY", Nothing),
        plain(0xCA, 0x02, "ISSUE_SLOTS_NOT_CONSUMED.RECOVERY", Mispredicted(B::ALL)),
    ];
}

impl EventRow {
    /// How true its count is. Micro-operations are no parts of instructions here: each has one.
    pub fn fidelity(&self) -> Fidelity {
        match self.count.fidelity() {
            Fidelity::Exact if self.name.contains("UOPS_") && !self.name.starts_with("MEM_") => Fidelity::Modelled,
            Fidelity::Exact if self.name.starts_with("TOPDOWN") => Fidelity::Modelled,
            fidelity => fidelity,
        }
    }
}

/// What a model counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmuCaps {
    /// Architectural version: CPUID.0AH:EAX\[7:0\]; 0 for the P6 family and the Pentium 4.
    pub version: u8,
    /// General counters: CPUID.0AH:EAX\[15:8\].
    pub general: u8,
    /// Their width in bits: CPUID.0AH:EAX\[23:16\].
    pub general_width: u8,
    /// Fixed counters: CPUID.0AH:EDX\[4:0\].
    pub fixed: u8,
    /// Their width in bits: CPUID.0AH:EDX\[12:5\].
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
    /// The counters are the Pentium 4's ([`netburst`]), and none of the registers above is there.
    pub netburst: Option<netburst::Generation>,
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
        netburst: None,
    };

    /// The Pentium 4's.
    pub const NETBURST: Self = Self {
        general: netburst::COUNTERS as u8,
        general_width: netburst::WIDTH,
        netburst: Some(netburst::Generation::Early),
        ..Self::NONE
    };

    /// The same on a part with another CPUID signature, by which the Pentium 4's registers go.
    pub const fn with_signature(self, signature: u32) -> Self {
        match self.netburst {
            Some(_) => Self {
                netburst: Some(netburst::Generation::of(signature)),
                ..self
            },
            None => self,
        }
    }
}

impl PmuCaps {
    /// All events that it knows.
    pub fn all_events(&self) -> impl Iterator<Item = &'static EventRow> {
        let own = self.events.iter().flat_map(|group| group.iter());
        own.chain(ARCHITECTURAL.iter()).filter(|row| {
            let select = EventSelect::new().with_event(row.event).with_umask(row.umask);
            // Of two rows with a code the first one counts.
            self.event(select) == Some(*row)
        })
    }

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
#[path = "pmu_test.rs"]
mod tests;
