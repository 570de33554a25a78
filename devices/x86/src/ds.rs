//! The debug-store area: branch trace store and processor-event-based sampling. SDM Vol. 3B 18.4.9 "BTS and DS Save Area".

use crate::cpuid::Features;

/// What a model stores in the debug-store area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DsCaps {
    /// IA32_MISC_ENABLE\[11\] clear: branch trace store is there.
    pub bts: bool,
    /// Bit 4 of a branch record's flags says whether the branch was predicted. The Core and Atom microarchitectures leave it
    /// 0. SDM Vol. 3B 18.4.9.1 "64 Bit Format of the DS Save Area".
    pub bts_predicted: bool,
    /// IA32_MISC_ENABLE\[12\] clear: processor-event-based sampling is there.
    pub pebs: Option<PebsCaps>,
}

/// What a model samples. SDM Vol. 3B 21.6.2.4 "Processor Event Based Sampling (PEBS)" and the sections of each
/// microarchitecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PebsCaps {
    /// The format of the records: IA32_PERF_CAPABILITIES\[11:8\].
    pub format: PebsFormat,
    /// Bits of IA32_PEBS_ENABLE that can be written: general counters from bit 0; from bit 32 fixed counters where records
    /// are adaptive, else load latency.
    pub enable: u64,
    /// Counter-reset fields in the debug-store area.
    pub resets: u8,
    /// MSR_PEBS_LD_LAT exists.
    pub load_latency: bool,
    /// A record has the latency of the caches apart from the instruction's.
    pub cache_latency: bool,
    /// MSR_PEBS_FRONTEND exists: the bits that can be written, else 0.
    pub frontend: u64,
    /// Bits of MSR_PEBS_DATA_CFG that can be written; 0 where the register is absent.
    pub data_cfg: u64,
    /// Events with INV and CMASK can be sampled.
    pub qualified: bool,
    /// Every event can be sampled, not only the precise ones.
    pub any_event: bool,
}

impl PebsCaps {
    /// Nothing beyond records of the first format: what a model's row leaves out.
    pub const NONE: Self = Self {
        format: PebsFormat::Core,
        enable: 0,
        resets: 0,
        load_latency: false,
        cache_latency: false,
        frontend: 0,
        data_cfg: 0,
        qualified: false,
        any_event: false,
    };

    /// The Pentium 4's, whose IA32_PEBS_ENABLE is none of counters. SDM Vol. 3B 21.6.3.8 "Processor Event-Based Sampling (PEBS)".
    pub const NETBURST: Self = Self {
        enable: crate::pmu::netburst::pebs_enable::WRITABLE,
        resets: 1,
        ..Self::NONE
    };
}

/// PEBS_EN bit 63 of Sandy Bridge: precise store on counter 3.
pub const PRECISE_STORE: u64 = 1 << 63;

/// The formats of PEBS records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PebsFormat {
    /// Flags, IP and the general-purpose registers. SDM Vol. 3B 19.4.9.2 "Setting Up the DS Save Area".
    Core = 0,
    /// And status, data address, source and latency. SDM Vol. 3B Table 21-26 "PEBS Record Format for Intel Core i7 Processor
    /// Family".
    Nehalem = 1,
    /// And the eventing IP and what happened to a transaction. SDM Vol. 3B Table 21-46 "PEBS Record Format for 4th Generation
    /// Intel Core Processor Family".
    Haswell = 2,
    /// And the time-stamp counter. SDM Vol. 3B Table 21-58 "PEBS Record Format for 6th Generation, 7th Generation and 8th
    /// Generation Intel Core Processor Families".
    Skylake = 3,
    /// A basic group and others by MSR_PEBS_DATA_CFG. SDM Vol. 3B 21.9.2 "Adaptive PEBS".
    Adaptive = 4,
}

impl PebsFormat {
    /// The size of a record in bytes; of an adaptive one, the basic group alone.
    pub const fn size(self) -> u64 {
        match self {
            PebsFormat::Core => 0x90,
            PebsFormat::Nehalem => 0xB0,
            PebsFormat::Haswell => 0xC0,
            PebsFormat::Skylake => 0xC8,
            PebsFormat::Adaptive => 0x20,
        }
    }
}

/// MSR_PEBS_DATA_CFG. SDM Vol. 3B 21.9.2.3 "MSR_PEBS_DATA_CFG".
pub mod data_cfg {
    /// Data address, source, latency, transaction.
    pub const MEMORY: u64 = 1;
    /// Flags, IP, general-purpose registers.
    pub const GPRS: u64 = 1 << 1;
    /// XMM0 to XMM15.
    pub const XMMS: u64 = 1 << 2;
    /// Last-branch records, as many as bits 31:24 say, and one.
    pub const LBRS: u64 = 1 << 3;
    /// The lowest bit of the number of last-branch records, less one.
    pub const LBR_ENTRIES: u32 = 24;

    /// The size in bytes of a record with these groups. SDM Vol. 3B 21.9.2.2 "Adaptive PEBS Record Format".
    pub const fn size(value: u64) -> u64 {
        let mut size = 0x20;
        if value & MEMORY != 0 {
            size += 0x20;
        }
        if value & GPRS != 0 {
            size += 18 * 8;
        }
        if value & XMMS != 0 {
            size += 16 * 16;
        }
        if value & LBRS != 0 {
            size += 24 * ((value >> LBR_ENTRIES & 0xFF) + 1);
        }
        size
    }
}

/// How wide the fields of the area are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DsLayout {
    /// Doublewords. SDM Vol. 3B Figure 18-5 "DS Save Area".
    Bits32,
    /// Quadwords. SDM Vol. 3B Figure 18-8 "IA-32e Mode DS Save Area".
    Bits64,
}

impl DsLayout {
    /// The layout for what CPUID shows: a part with DTES64 uses the 64-bit one in every mode. SDM Vol. 3B 18.4.9.1 "64 Bit
    /// Format of the DS Save Area".
    pub const fn of(features: Features) -> Self {
        if features.dtes64() { Self::Bits64 } else { Self::Bits32 }
    }

    /// Bytes of a field of the management area.
    pub const fn field(self) -> u64 {
        match self {
            Self::Bits32 => 4,
            Self::Bits64 => 8,
        }
    }

    /// Bytes of a branch record: from, to, flags.
    pub const fn branch_record(self) -> u64 {
        3 * self.field()
    }
}

/// The branch trace store's fields of the management area, each so many fields from its start. Those of sampling follow.
pub mod management {
    /// BTS buffer base: linear address of the first record.
    pub const BTS_BASE: u64 = 0;
    /// BTS index: where the next record goes.
    pub const BTS_INDEX: u64 = 1;
    /// BTS absolute maximum: the byte after the buffer.
    pub const BTS_MAXIMUM: u64 = 2;
    /// BTS interrupt threshold.
    pub const BTS_THRESHOLD: u64 = 3;
}

/// Bit 4 of a branch record's flags: the branch was predicted.
pub const BRANCH_PREDICTED: u64 = 1 << 4;

#[cfg(test)]
#[path = "ds_test.rs"]
mod tests;
