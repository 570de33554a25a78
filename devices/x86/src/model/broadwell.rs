//! Broadwell-EP: family 6, model 4FH, stepping 1.
//!
//! # Theory
//! [`SILICON`] is what a Xeon E5-2697 v4 answers (`resources/cpuid/xeon-e5-2697-v4.txt` has the dump and where it comes from). The
//! MSRs are those of SDM Vol. 4 "MSRs In Intel Xeon E5 v4 Family". The microcode, 0B000040H, has speculation control (0B000025H
//! and before are refused by Linux) and PEBS that Linux trusts (0B000014H and later).

use super::msrs::{self, BANK_REGISTERS, COMMON, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::ds::{DsCaps, PebsCaps, PebsFormat};
use crate::msr::*;
use crate::pmu::{PmuCaps, events};
use crate::pt::PtCaps;
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// Intel Xeon E5-2697 v4 (Broadwell-EP).
pub const BROADWELL: CpuModel = CpuModel {
    name: "broadwell",
    description: "Intel Xeon E5-2697 v4 (Broadwell-EP, 2016): x86-64-v3, ADX, RDSEED, SMAP, PT, RDT",
    // The ratio in MSR_PLATFORM_INFO times the bus clock.
    tsc_khz: 23 * BUS_KHZ,
    apic_timer_khz: BUS_KHZ,
    microcode: MICROCODE,
    silicon: &SILICON,
    cpuid: &CPUID,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::NEHALEM),
        lbr: Some(lbr::BROADWELL),
        ds: Some(DsCaps {
            bts: true,
            bts_predicted: true,
            pebs: Some(PebsCaps {
                format: PebsFormat::Haswell,
                enable: 0xF_0000_000F,
                resets: 4,
                load_latency: true,
                qualified: true,
                ..PebsCaps::NONE
            }),
        }),
        pmu: Some(PmuCaps {
            version: 3,
            general: 4,
            general_width: 48,
            fixed: 3,
            fixed_width: 48,
            architectural: 0x7F,
            capabilities: Some(0x32C0),
            select: 0xFFFF_FFFF,
            any_thread: true,
            offcore: [0x3F_FFFF_8FFF, 0x3F_FFFF_8FFF],
            reference: 23,
            slots: 4,
            events: &[
                events::HASWELL,
                events::BRANCHES,
                events::CACHES,
                events::SLOTS,
                events::TRANSACTIONS,
            ],
            ..PmuCaps::NONE
        }),
        pt: PtCaps::of(&SILICON, 23 * BUS_KHZ),
    },
    vmx: Some(VMX),
    ..CpuModel::NONE
};

/// The bus clock, 100 MHz, which drives the APIC timer.
const BUS_KHZ: u32 = 100_000;
/// Machine-check banks.
const BANKS: usize = 22;
const MICROCODE: u32 = 0x0B00_0040;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 40] = [
    leaf(0x0, [0x0000_0014, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to 14H
    leaf(0x1, [0x0004_06F1, 0x0040_0800, 0x7FFE_FBFF, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x7603_6301, 0x00F0_B5FF, 0, 0x00C3_0000]),           // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
    subleaf(0x4, 0, [0x7C00_4121, 0x01C0_003F, 0x0000_003F, 0]),     // L1D 32 KiB, 8 ways
    subleaf(0x4, 1, [0x7C00_4122, 0x01C0_003F, 0x0000_003F, 0]),     // L1I 32 KiB, 8 ways
    subleaf(0x4, 2, [0x7C00_4143, 0x01C0_003F, 0x0000_01FF, 0]),     // L2 256 KiB, 8 ways
    subleaf(0x4, 3, [0x7C0F_C163, 0x04C0_003F, 0x0000_8FFF, 0x0000_0006]), // L3 45 MiB, 20 ways
    subleaf(0x4, 4, [0, 0, 0, 0]),                                   // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x0000_2120]), // MONITOR/MWAIT
    leaf(0x6, [0x0000_0077, 0x0000_0002, 0x0000_0009, 0]),           // thermal and power
    subleaf(0x7, 0, [0, 0x021C_BFBB, 0, 0x9C00_0400]),               // extended features
    leaf(0x8, [0, 0, 0, 0]),
    leaf(0x9, [0x0000_0001, 0, 0, 0]),                           // DCA capabilities
    leaf(0xA, [0x0730_0403, 0, 0, 0x0000_0603]),                 // performance monitoring, version 3
    subleaf(0xB, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0]), // threads
    subleaf(0xB, 1, [0x0000_0006, 0x0000_0024, 0x0000_0201, 0]), // cores
    leaf(0xC, [0, 0, 0, 0]),
    subleaf(0xD, 0, [0x0000_0007, 0x0000_0340, 0x0000_0340, 0]), // XCR0 and the area for it
    subleaf(0xD, 1, [0x0000_0001, 0, 0, 0]),                     // XSAVE features, IA32_XSS
    subleaf(0xD, 2, [0x0000_0100, 0x0000_0240, 0, 0]),           // AVX
    leaf(0xE, [0, 0, 0, 0]),
    subleaf(0xF, 0, [0, 0x0000_008F, 0, 0x0000_0002]), // monitoring: highest RMID
    subleaf(0xF, 1, [0, 0x0001_2000, 0x0000_008F, 0x0000_0007]), // level-3 monitoring
    subleaf(0x10, 0, [0, 0x0000_0002, 0, 0]),          // allocation
    subleaf(0x10, 1, [0x0000_0013, 0x000C_0000, 0x0000_0004, 0x0000_000F]), // level-3 allocation
    leaf(0x11, [0, 0, 0, 0]),
    subleaf(0x12, 0, [0, 0, 0, 0]),
    subleaf(0x12, 1, [0, 0, 0, 0]),
    leaf(0x13, [0, 0, 0, 0]),
    subleaf(0x14, 0, [0, 0x0000_0001, 0x0000_0001, 0]), // processor trace
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0x0000_0121, 0x2C10_0800]),
    // "Intel(R) Xeon(R) CPU E5-2697 v4 @ 2.30GHz"
    leaf(0x8000_0002, [0x6574_6E49, 0x2952_286C, 0x6F65_5820, 0x2952_286E]),
    leaf(0x8000_0003, [0x5550_4320, 0x2D35_4520, 0x3739_3632, 0x2034_7620]),
    leaf(0x8000_0004, [0x2E32_2040, 0x4847_3033, 0x0000_007A, 0]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0, 0, 0x0100_6040, 0]), // L2 once more
    leaf(0x8000_0007, [0, 0, 0, 0x0000_0100]), // invariant TSC
    leaf(0x8000_0008, [0x0000_302E, 0, 0, 0]), // 46 physical, 48 linear bits
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::BROADWELL;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<20>(46),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &COMMON,
    &msrs::RESIDENCIES,
    &msrs::POWER,
    &msrs::identity(0, MICROCODE),
    &msrs::ratios(23, 12),
    &msrs::banks::<{ BANKS * BANK_REGISTERS }>(),
    &msrs::corrected::<BANKS>(),
    &msrs::SPECULATION,
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    msrs::machine_check(BANKS as u64, 1 << 24),
    msrs::MISC_FEATURE_ENABLES,
    // Ratios with 9 to 16 and with more cores active.
    MsrRow::read_only(MSR_TURBO_RATIO_LIMIT1, "MSR_TURBO_RATIO_LIMIT1", 0x1717_1717_1717_1717),
    MsrRow::read_only(MSR_TURBO_RATIO_LIMIT2, "MSR_TURBO_RATIO_LIMIT2", 0x1717_1717_1717_1717),
];
