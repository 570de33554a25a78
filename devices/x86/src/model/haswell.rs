//! Haswell: family 6, model 3CH, stepping 3.
//!
//! # Theory
//! [`SILICON`] is what a Core i7-4770 answers (`resources/cpuid/core-i7-4770.txt` has the dump and where it comes from). The MSRs are
//! those of SDM Vol. 4 "MSRs In the 4th Generation Intel Core Processors (Based on Haswell Microarchitecture)". The microcode,
//! 28H, has speculation control (23H and before are refused by Linux) and no transactions.

use super::msrs::{self, BANK_REGISTERS, COMMON, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::ds::{DsCaps, PebsCaps, PebsFormat};
use crate::msr::*;
use crate::pmu::{PmuCaps, events};
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// Intel Core i7-4770 (Haswell).
pub const HASWELL: CpuModel = CpuModel {
    name: "haswell",
    description: "Intel Core i7-4770 (Haswell, 2013): x86-64-v3, INVPCID, FSGSBASE",
    // The ratio in MSR_PLATFORM_INFO times the bus clock.
    tsc_khz: 34 * BUS_KHZ,
    apic_timer_khz: BUS_KHZ,
    microcode: MICROCODE,
    silicon: &SILICON,
    cpuid: &CPUID,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::NEHALEM),
        lbr: Some(lbr::HASWELL),
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
            reference: 34,
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
        ..UnitCaps::NONE
    },
    vmx: Some(VMX),
    ..CpuModel::NONE
};

/// The bus clock, 100 MHz, which drives the APIC timer.
const BUS_KHZ: u32 = 100_000;
/// Machine-check banks.
const BANKS: usize = 9;
const MICROCODE: u32 = 0x28;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 30] = [
    leaf(0x0, [0x0000_000D, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to DH
    leaf(0x1, [0x0003_06C3, 0x0010_0800, 0x7FFA_FBFF, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x7603_6301, 0x00F0_B5FF, 0, 0x00C1_0000]),           // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
    subleaf(0x4, 0, [0x1C00_4121, 0x01C0_003F, 0x0000_003F, 0]),     // L1D 32 KiB, 8 ways
    subleaf(0x4, 1, [0x1C00_4122, 0x01C0_003F, 0x0000_003F, 0]),     // L1I 32 KiB, 8 ways
    subleaf(0x4, 2, [0x1C00_4143, 0x01C0_003F, 0x0000_01FF, 0]),     // L2 256 KiB, 8 ways
    subleaf(0x4, 3, [0x1C03_C163, 0x03C0_003F, 0x0000_1FFF, 0x0000_0006]), // L3 8 MiB, 16 ways
    subleaf(0x4, 4, [0, 0, 0, 0]),                                   // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x0004_2120]), // MONITOR/MWAIT
    leaf(0x6, [0x0000_0075, 0x0000_0002, 0x0000_0009, 0]),           // thermal and power
    subleaf(0x7, 0, [0, 0x0000_27AB, 0, 0x9C00_0400]),               // extended features
    leaf(0x8, [0, 0, 0, 0]),
    leaf(0x9, [0, 0, 0, 0]),
    leaf(0xA, [0x0730_0403, 0, 0, 0x0000_0603]), // performance monitoring, version 3
    subleaf(0xB, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0]), // threads
    subleaf(0xB, 1, [0x0000_0004, 0x0000_0008, 0x0000_0201, 0]), // cores
    leaf(0xC, [0, 0, 0, 0]),
    subleaf(0xD, 0, [0x0000_0007, 0x0000_0340, 0x0000_0340, 0]), // XCR0 and the area for it
    subleaf(0xD, 1, [0x0000_0001, 0, 0, 0]),                     // XSAVE features, IA32_XSS
    subleaf(0xD, 2, [0x0000_0100, 0x0000_0240, 0, 0]),           // AVX
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0x0000_0021, 0x2C10_0800]),
    // "Intel(R) Core(TM) i7-4770 CPU @ 3.40GHz"
    leaf(0x8000_0002, [0x6574_6E49, 0x2952_286C, 0x726F_4320, 0x4D54_2865]),
    leaf(0x8000_0003, [0x3769_2029, 0x3737_342D, 0x5043_2030, 0x2040_2055]),
    leaf(0x8000_0004, [0x3034_2E33, 0x007A_4847, 0, 0]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0, 0, 0x0100_6040, 0]), // L2 once more
    leaf(0x8000_0007, [0, 0, 0, 0x0000_0100]), // invariant TSC
    leaf(0x8000_0008, [0x0000_3027, 0, 0, 0]), // 39 physical, 48 linear bits
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::HASWELL;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<20>(39),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &COMMON,
    &msrs::RESIDENCIES,
    &msrs::POWER,
    &msrs::identity(1, MICROCODE),
    &msrs::ratios(34, 8),
    &msrs::banks::<{ BANKS * BANK_REGISTERS }>(),
    &msrs::corrected::<BANKS>(),
    &msrs::SPECULATION,
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    msrs::machine_check(BANKS as u64, 0),
    msrs::MISC_FEATURE_ENABLES,
    // Nothing holds a frequency down, and software can only clear the logs.
    MsrRow::storage(MSR_CORE_PERF_LIMIT_REASONS, "MSR_CORE_PERF_LIMIT_REASONS", 0, 0),
    MsrRow::storage(MSR_GRAPHICS_PERF_LIMIT_REASONS, "MSR_GRAPHICS_PERF_LIMIT_REASONS", 0, 0),
    MsrRow::storage(MSR_RING_PERF_LIMIT_REASONS, "MSR_RING_PERF_LIMIT_REASONS", 0, 0),
];
