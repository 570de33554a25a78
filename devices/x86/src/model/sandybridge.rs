//! Sandy Bridge: family 6, model 2AH, stepping 7.
//!
//! # Theory
//! [`SILICON`] is what a Core i7-2600 answers (`resources/cpuid/core-i7-2600.txt` has the dump and where it comes from). The MSRs
//! are those of SDM Vol. 4 "MSRs In Intel Processor Family Based on Intel Microarchitecture Code Name Sandy Bridge". The
//! microcode, 2FH, is recent enough for PEBS (28H) and has speculation control.

use super::msrs::{self, BANK_REGISTERS, COMMON, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::ds::{DsCaps, PRECISE_STORE, PebsCaps, PebsFormat};
use crate::pmu::{PmuCaps, events};
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// Intel Core i7-2600 (Sandy Bridge).
pub const SANDYBRIDGE: CpuModel = CpuModel {
    name: "sandybridge",
    description: "Intel Core i7-2600 (Sandy Bridge, 2011): x86-64-v2, AVX, XSAVE, TSC deadline",
    // The ratio in MSR_PLATFORM_INFO times the bus clock.
    tsc_khz: 34 * BUS_KHZ,
    apic_timer_khz: BUS_KHZ,
    microcode: MICROCODE,
    silicon: &SILICON,
    cpuid: &CPUID,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::NEHALEM),
        lbr: Some(lbr::NEHALEM),
        ds: Some(DsCaps {
            bts: true,
            bts_predicted: true,
            pebs: Some(PebsCaps {
                format: PebsFormat::Nehalem,
                enable: PRECISE_STORE | 0xF_0000_000F,
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
            capabilities: Some(0x31C0),
            select: 0xFFFF_FFFF,
            any_thread: true,
            offcore: [0x3F_FFFF_8FFF, 0x3F_FFFF_8FFF],
            reference: 34,
            slots: 4,
            events: &[events::SANDYBRIDGE, events::BRANCHES, events::CACHES, events::SLOTS],
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
const MICROCODE: u32 = 0x2F;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 30] = [
    leaf(0x0, [0x0000_000D, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to DH
    leaf(0x1, [0x0002_06A7, 0x0010_0800, 0x1FBA_E3FF, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x7603_5A01, 0x00F0_B2FF, 0, 0x00CA_0000]),           // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
    subleaf(0x4, 0, [0x1C00_4121, 0x01C0_003F, 0x0000_003F, 0]),     // L1D 32 KiB, 8 ways
    subleaf(0x4, 1, [0x1C00_4122, 0x01C0_003F, 0x0000_003F, 0]),     // L1I 32 KiB, 8 ways
    subleaf(0x4, 2, [0x1C00_4143, 0x01C0_003F, 0x0000_01FF, 0]),     // L2 256 KiB, 8 ways
    subleaf(0x4, 3, [0x1C03_C163, 0x03C0_003F, 0x0000_1FFF, 0x0000_0006]), // L3 8 MiB, 16 ways
    subleaf(0x4, 4, [0, 0, 0, 0]),                                   // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x0000_1120]), // MONITOR/MWAIT
    leaf(0x6, [0x0000_0075, 0x0000_0002, 0x0000_0009, 0]),           // thermal and power
    subleaf(0x7, 0, [0, 0, 0, 0x9C00_0400]),                         // extended features
    leaf(0x8, [0, 0, 0, 0]),
    leaf(0x9, [0, 0, 0, 0]),
    leaf(0xA, [0x0730_0403, 0, 0, 0x0000_0603]), // performance monitoring, version 3
    subleaf(0xB, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0]), // threads
    subleaf(0xB, 1, [0x0000_0004, 0x0000_0008, 0x0000_0201, 0]), // cores
    leaf(0xC, [0, 0, 0, 0]),
    subleaf(0xD, 0, [0x0000_0007, 0x0000_0240, 0x0000_0340, 0]), // XCR0 and the area for it
    subleaf(0xD, 1, [0x0000_0001, 0, 0, 0]),                     // XSAVE features, IA32_XSS
    subleaf(0xD, 2, [0x0000_0100, 0x0000_0240, 0, 0]),           // AVX
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0x0000_0001, 0x2810_0800]),
    // "        Intel(R) Core(TM) i7-2600 CPU @ 3.40GHz"
    leaf(0x8000_0002, [0x2020_2020, 0x2020_2020, 0x6574_6E49, 0x2952_286C]),
    leaf(0x8000_0003, [0x726F_4320, 0x4D54_2865, 0x3769_2029, 0x3036_322D]),
    leaf(0x8000_0004, [0x5043_2030, 0x2040_2055, 0x3034_2E33, 0x007A_4847]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0, 0, 0x0100_6040, 0]), // L2 once more
    leaf(0x8000_0007, [0, 0, 0, 0x0000_0100]), // invariant TSC
    leaf(0x8000_0008, [0x0000_3024, 0, 0, 0]), // 36 physical, 48 linear bits
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::WESTMERE;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<20>(36),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &COMMON,
    &msrs::RESIDENCIES,
    &msrs::POWER,
    &msrs::identity(1, MICROCODE),
    &msrs::ratios(34, 16),
    &msrs::banks::<{ BANKS * BANK_REGISTERS }>(),
    &msrs::corrected::<BANKS>(),
    &msrs::SPECULATION,
    PLAIN,
];

const PLAIN: &[MsrRow] = &[msrs::machine_check(BANKS as u64, 0)];
