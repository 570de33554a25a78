//! Intel Processor Trace: what a model can do, and the registers. SDM Vol. 3C ch. 33 "Intel Processor Trace".
//!
//! A rule that needs only the written value and the model is in `accept`; those that need other registers are the unit's.

use crate::model::CpuidRow;
use crate::msr::MsrFault;
use bitfield_struct::bitfield;
use serde::{Deserialize, Serialize};

/// What a model's processor trace can do: CPUID leaf 14H, and what else decides about its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PtCaps {
    /// CPUID.14H.0:EBX.
    pub ebx: u32,
    /// CPUID.14H.0:ECX.
    pub ecx: u32,
    /// CPUID.14H.1:EAX, 0 where there is no such subleaf.
    pub encodings: u32,
    /// CPUID.14H.1:EBX, 0 where there is no such subleaf.
    pub frequencies: u32,
    /// CPUID.15H:EBX over EAX: TSC ticks to ticks of the core crystal clock. 1 over 1 where the part does not say.
    pub crystal: (u32, u32),
    /// The highest core:bus ratio without turbo, at which the TSC counts.
    pub ratio: u8,
    /// Width of physical addresses in bits.
    pub physical_bits: u8,
    /// Width of linear addresses in bits.
    pub linear_bits: u8,
    /// Last-branch records and TraceEn exclude each other: the first generation.
    pub excludes_lbr: bool,
}

/// The bus clock that CBR counts in, in kHz.
const BUS_KHZ: u32 = 100_000;

macro_rules! enumerated {
    ($($(#[$doc:meta])* $name:ident $register:ident $bit:literal;)*) => {
        $($(#[$doc])* #[inline] pub const fn $name(&self) -> bool { self.$register >> $bit & 1 != 0 })*
    };
}

/// SDM Vol. 3C Table 33-11 "CPUID Leaf 14H Enumeration of Intel Processor Trace Capabilities".
impl PtCaps {
    enumerated! {
        /// CR3Filter, and IA32_RTIT_CR3_MATCH.
        cr3_filter ebx 0;
        /// PSBFreq, CYCEn, CycThresh, PacketByteCnt.
        psb_cyc ebx 1;
        /// IP filters and TraceStop; configuration outlives a warm reset.
        ip_filter ebx 2;
        /// MTC packets, and tracing without BranchEn.
        mtc ebx 3;
        /// PTWRITE.
        ptwrite ebx 4;
        /// Power event trace.
        power_events ebx 5;
        /// PendPSB, PendTopaPMI, InjectPsbPmiOnEnable.
        psb_pmi_preservation ebx 6;
        /// Event trace.
        event_trace ebx 7;
        /// DisTNT.
        tnt_disable ebx 8;
        /// Output through a table of physical addresses.
        topa ecx 0;
        /// Such a table may hold more than one region.
        topa_multiple ecx 1;
        /// Output to a single range.
        single_range ecx 2;
        /// Output to a trace transport subsystem.
        fabric ecx 3;
        /// IP payloads are linear addresses, else effective ones.
        lip ecx 31;
    }

    /// What the CPUID rows of a part say; `None` without leaf 14H in them.
    pub const fn of(rows: &[CpuidRow], tsc_khz: u32) -> Option<Self> {
        let [eax, ebx, ecx, _] = find(rows, 0x14, 0);
        if ebx == 0 && ecx == 0 {
            return None;
        }
        let [encodings, frequencies, _, _] = if eax >= 1 { find(rows, 0x14, 1) } else { [0; 4] };
        let [denominator, numerator, _, _] = find(rows, 0x15, 0);
        let [widths, _, _, _] = find(rows, 0x8000_0008, 0);
        let ratio = tsc_khz / BUS_KHZ;
        Some(Self {
            ebx,
            ecx,
            encodings,
            frequencies,
            crystal: if denominator == 0 || numerator == 0 {
                (1, 1)
            } else {
                (numerator, denominator)
            },
            ratio: if ratio > 0xFF { 0xFF } else { ratio as u8 },
            physical_bits: if widths == 0 { 36 } else { widths as u8 },
            linear_bits: if widths == 0 { 32 } else { (widths >> 8) as u8 },
            excludes_lbr: ecx & 2 == 0,
        })
    }

    /// The number of address ranges, 0 to 4.
    pub const fn ranges(&self) -> usize {
        let count = (self.encodings & 7) as usize;
        match (self.ip_filter(), count) {
            (false, _) => 0,
            (true, 0..=3) => count,
            (true, _) => 4,
        }
    }

    /// The values of MTCFreq that there are, one bit each.
    pub const fn mtc_frequencies(&self) -> u16 {
        (self.encodings >> 16) as u16
    }

    /// The values of CycThresh that there are, one bit each.
    pub const fn cyc_thresholds(&self) -> u16 {
        self.frequencies as u16
    }

    /// The values of PSBFreq that there are, one bit each.
    pub const fn psb_frequencies(&self) -> u16 {
        (self.frequencies >> 16) as u16
    }

    /// Bits of a physical address that the part does not have.
    pub const fn beyond_physical(&self) -> u64 {
        if self.physical_bits >= 64 {
            0
        } else {
            !0 << self.physical_bits
        }
    }

    /// Whether an address is one that the part's linear addresses have: sign-extended, or within 32 bits where there are
    /// no more.
    pub const fn canonical(&self, address: u64) -> bool {
        match self.linear_bits {
            0..=32 => address >> 32 == 0,
            64.. => true,
            bits => {
                let up = 64 - bits as u32;
                (address << up) as i64 >> up == address as i64
            }
        }
    }
}

const fn find(rows: &[CpuidRow], leaf: u32, subleaf: u32) -> [u32; 4] {
    let mut i = 0;
    while i < rows.len() {
        if rows[i].leaf == leaf && rows[i].answers(subleaf) {
            return rows[i].regs;
        }
        i += 1;
    }
    [0; 4]
}

/// IA32_RTIT_CTL. SDM Vol. 3C 33.2.8.2 "IA32_RTIT_CTL MSR".
#[bitfield(u64)]
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub struct RtitCtl {
    /// Enables tracing.
    pub trace_en: bool,
    /// CYC packets.
    pub cyc_en: bool,
    /// Trace at CPL 0.
    pub os: bool,
    /// Trace at CPL above 0.
    pub user: bool,
    /// Power events.
    pub pwr_evt_en: bool,
    /// A FUP after each PTW.
    pub fup_on_ptw: bool,
    /// Output to the trace transport subsystem.
    pub fabric_en: bool,
    /// Trace only while CR3 matches.
    pub cr3_filter: bool,
    /// Output by a table of physical addresses.
    pub topa: bool,
    /// MTC packets.
    pub mtc_en: bool,
    /// TSC packets.
    pub tsc_en: bool,
    /// No compression of returns.
    pub dis_retc: bool,
    /// PTW packets.
    pub ptw_en: bool,
    /// Packets about branches.
    pub branch_en: bool,
    /// Which bit of the crystal clock's counter makes an MTC packet.
    #[bits(4)]
    pub mtc_freq: u8,
    __: bool,
    /// Cycles between CYC packets: 0, else 2 to the power of this less 1.
    #[bits(4)]
    pub cyc_thresh: u8,
    __: bool,
    /// Bytes between PSB packets: 2K shifted left by this.
    #[bits(4)]
    pub psb_freq: u8,
    #[bits(3)]
    __: u8,
    /// Event trace.
    pub event_en: bool,
    /// What the address ranges do, four bits each.
    #[bits(16)]
    pub addr_cfg: u16,
    #[bits(7)]
    __: u8,
    /// No TNT packets.
    pub dis_tnt: bool,
    /// PendPSB and PendTopaPMI act.
    pub inject_psb_pmi_on_enable: bool,
    #[bits(7)]
    __: u8,
}

/// What an address range does: ADDRn_CFG.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeUse {
    /// Nothing.
    Unused,
    /// FilterEn is set within it.
    Filter,
    /// Tracing stops when it is entered.
    TraceStop,
}

impl RtitCtl {
    /// What range `n` does; an encoding that [`RtitCtl::accept`] refuses counts as unused.
    pub const fn range_use(self, n: usize) -> RangeUse {
        if n >= 4 {
            return RangeUse::Unused;
        }
        match self.addr_cfg() >> (4 * n) & 15 {
            1 => RangeUse::Filter,
            2 => RangeUse::TraceStop,
            _ => RangeUse::Unused,
        }
    }

    /// The value as WRMSR takes it, as far as it and the model decide.
    ///
    /// # Errors
    /// #GP(0) for a reserved bit, an encoding that the model does not enumerate, or an output scheme that it lacks.
    pub fn accept(value: u64, caps: &PtCaps) -> Result<Self, MsrFault> {
        let ctl = Self::from_bits(value);
        let mut allowed = Self::new()
            .with_trace_en(true)
            .with_os(true)
            .with_user(true)
            .with_tsc_en(true)
            .with_dis_retc(true)
            .with_branch_en(true)
            .with_cr3_filter(caps.cr3_filter())
            .with_topa(caps.topa())
            .with_fabric_en(caps.fabric())
            .with_pwr_evt_en(caps.power_events())
            .with_event_en(caps.event_trace())
            .with_dis_tnt(caps.tnt_disable())
            .with_fup_on_ptw(caps.ptwrite())
            .with_ptw_en(caps.ptwrite())
            .with_inject_psb_pmi_on_enable(caps.psb_pmi_preservation());
        if caps.psb_cyc() {
            allowed = allowed.with_cyc_en(true).with_cyc_thresh(15).with_psb_freq(15);
        }
        if caps.mtc() {
            allowed = allowed.with_mtc_en(true).with_mtc_freq(15);
        }
        allowed.set_addr_cfg(((1u32 << (4 * caps.ranges())) - 1) as u16);
        // Without a bitmap only 0 is enumerated, and 0 is always there.
        let listed = |bitmap: u16, code: u8| code == 0 || bitmap >> code & 1 != 0;
        let refused = value & !allowed.into_bits() != 0
            || !listed(caps.mtc_frequencies(), ctl.mtc_freq())
            || !listed(caps.cyc_thresholds(), ctl.cyc_thresh())
            || !listed(caps.psb_frequencies(), ctl.psb_freq())
            || (0..4).any(|n| ctl.addr_cfg() >> (4 * n) & 15 > 2)
            || ctl.trace_en() && !ctl.topa() && !ctl.fabric_en() && !caps.single_range()
            // Tracing without branches came with MTC.
            || ctl.trace_en() && !ctl.branch_en() && !caps.mtc();
        if refused {
            Err(MsrFault::GeneralProtection)
        } else {
            Ok(ctl)
        }
    }
}

/// IA32_RTIT_STATUS. SDM Vol. 3C 33.2.8.4 "IA32_RTIT_STATUS MSR".
#[bitfield(u64)]
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub struct RtitStatus {
    /// The IP may be traced.
    pub filter_en: bool,
    /// The context may be traced.
    pub context_en: bool,
    /// TraceEn, and neither Stopped nor Error.
    pub trigger_en: bool,
    __: bool,
    /// An operational error has ended the trace.
    pub error: bool,
    /// A STOP region or a TraceStop range has ended the trace.
    pub stopped: bool,
    /// A PSB+ is due.
    pub pend_psb: bool,
    /// The PMI of a region is due.
    pub pend_topa_pmi: bool,
    #[bits(24)]
    __: u32,
    /// Bytes since the last PSB.
    #[bits(17)]
    pub packet_byte_cnt: u32,
    #[bits(15)]
    __: u16,
}

impl RtitStatus {
    /// What WRMSR of `value` makes of the register: writes to the three enables are ignored.
    ///
    /// # Errors
    /// #GP(0) for a reserved bit.
    pub fn accept(self, value: u64, caps: &PtCaps) -> Result<Self, MsrFault> {
        let enables = Self::new()
            .with_filter_en(true)
            .with_context_en(true)
            .with_trigger_en(true);
        let mut writable = Self::new().with_error(true).with_stopped(true);
        if caps.psb_cyc() {
            writable.set_packet_byte_cnt(0x1_FFFF);
        }
        if caps.psb_pmi_preservation() {
            writable = writable.with_pend_psb(true).with_pend_topa_pmi(true);
        }
        let (enables, writable) = (enables.into_bits(), writable.into_bits());
        if value & !(enables | writable) != 0 {
            return Err(MsrFault::GeneralProtection);
        }
        Ok(Self::from_bits(self.into_bits() & enables | value & writable))
    }
}

/// IA32_RTIT_OUTPUT_MASK_PTRS. SDM Vol. 3C 33.2.8.8 "IA32_RTIT_OUTPUT_MASK_PTRS MSR".
#[bitfield(u64)]
#[derive(PartialEq, Eq, Serialize, Deserialize)]
pub struct RtitMaskPtrs {
    /// Forced to 1s.
    #[bits(7)]
    pub lower_mask: u8,
    /// Mask bits 31:7 of a single range, or the index of the current table entry.
    #[bits(25)]
    pub mask_or_table_offset: u32,
    /// The offset of the next byte in the range or region.
    pub output_offset: u32,
}

impl RtitMaskPtrs {
    /// After reset.
    pub const RESET: Self = Self::from_bits(0x7F);

    /// The mask of a single range.
    pub const fn mask(self) -> u32 {
        self.into_bits() as u32
    }
}

/// An entry of a table of physical addresses. SDM Vol. 3C 33.2.7.2 "Table of Physical Addresses (ToPA)".
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct TopaEntry {
    /// The base is that of the next table.
    pub end: bool,
    __: bool,
    /// A PMI when the region is full.
    pub int: bool,
    __: bool,
    /// Tracing stops when the region is full.
    pub stop: bool,
    __: bool,
    /// 4K shifted left by this is the size.
    #[bits(4)]
    pub size_code: u8,
    #[bits(2)]
    __: u8,
    /// Bits 63:12 of the base.
    #[bits(52)]
    pub page: u64,
}

impl TopaEntry {
    /// Reserved bits: 1, 3, 5, 10 and 11.
    pub const RESERVED: u64 = 0xC2A;

    /// The base address.
    pub const fn base(self) -> u64 {
        self.page() << 12
    }

    /// The size of the region in bytes, 4K to 128M.
    pub const fn size(self) -> u32 {
        4096 << self.size_code()
    }

    /// The malformations that the entry alone shows. SDM Vol. 3C 33.2.7.2, "ToPA Errors", 1, 2 and 4a.
    pub const fn malformed(self, caps: &PtCaps) -> bool {
        self.into_bits() & Self::RESERVED != 0
            || self.base() & caps.beyond_physical() != 0
            || if self.end() {
                self.int() || self.stop()
            } else {
                self.base() & (self.size() as u64 - 1) != 0
            }
    }
}
