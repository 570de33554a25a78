//! Core 2: family 6, model 0FH, stepping 11 (Conroe).
//!
//! # Theory
//! [`SILICON`] is what a Core 2 Duo E6750 answers (`resources/cpuid/core-2-e6750.txt` has the dump and where it comes from).
//! The MSRs are those of SDM Vol. 4 "MSRs In the Intel Core 2 Processor Family".
//!
//! # What the part does not have
//! SSE4, POPCNT, AES, PCID, 1-GiB pages, RDTSCP, x2APIC, an invariant TSC, leaf 0BH. So it is x86-64 without v2.

use super::msrs::{self, BANK_REGISTERS, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::ds::{DsCaps, PebsCaps, PebsFormat};
use crate::msr::*;
use crate::pmu::{PmuCaps, events};
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// Intel Core 2 Duo E6750 (Conroe).
pub const CORE2: CpuModel = CpuModel {
    name: "core2",
    description: "Intel Core 2 Duo E6750 (Conroe, 2007): x86-64, SSSE3, CMPXCHG16B",
    // 8 times the bus clock.
    tsc_khz: 8 * BUS_KHZ,
    apic_timer_khz: BUS_KHZ,
    microcode: MICROCODE,
    silicon: &SILICON,
    cpuid: &CPUID,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::CORE2),
        lbr: Some(lbr::CORE2),
        ds: Some(DsCaps {
            bts: true,
            bts_predicted: false,
            pebs: Some(PebsCaps {
                format: PebsFormat::Core,
                enable: 0x1,
                resets: 1,
                ..PebsCaps::NONE
            }),
        }),
        pmu: Some(PmuCaps {
            version: 2,
            general: 2,
            general_width: 40,
            fixed: 3,
            fixed_width: 40,
            architectural: 0x7F,
            capabilities: Some(0x10C0),
            select: 0xFFDF_FFFF,
            reference: 8,
            slots: 4,
            events: &[events::CORE2],
            ..PmuCaps::NONE
        }),
        ..UnitCaps::NONE
    },
    vmx: Some(VMX),
    ..CpuModel::NONE
};

/// The bus clock, 333.33 MHz.
const BUS_KHZ: u32 = 333_333;
const MICROCODE: u32 = 0xB3;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 23] = [
    leaf(0x0, [0x0000_000A, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to AH
    leaf(0x1, [0x0000_06FB, 0x0002_0800, 0x0000_E3FD, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x05B0_B101, 0x0056_57F0, 0, 0x2CB4_3049]),           // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
    subleaf(0x4, 0, [0x0400_0121, 0x01C0_003F, 0x0000_003F, 0x0000_0001]), // L1D 32 KiB, 8 ways
    subleaf(0x4, 1, [0x0400_0122, 0x01C0_003F, 0x0000_003F, 0x0000_0001]), // L1I 32 KiB, 8 ways
    subleaf(0x4, 2, [0x0400_4143, 0x03C0_003F, 0x0000_0FFF, 0x0000_0001]), // L2 4 MiB, 16 ways
    subleaf(0x4, 3, [0, 0, 0, 0]),                                   // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x0000_0220]), // MONITOR/MWAIT
    leaf(0x6, [0x0000_0001, 0x0000_0002, 0x0000_0001, 0]),           // thermal and power
    subleaf(0x7, 0, [0, 0, 0, 0]),                                   // extended features
    leaf(0x8, [0x0000_0400, 0, 0, 0]),
    leaf(0x9, [0, 0, 0, 0]),
    leaf(0xA, [0x0728_0202, 0, 0, 0x0000_0503]), // performance monitoring, version 2
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0x0000_0001, 0x2010_0800]),
    // "Intel(R) Core(TM)2 Duo CPU     E6750  @ 2.66GHz"
    leaf(0x8000_0002, [0x6574_6E49, 0x2952_286C, 0x726F_4320, 0x4D54_2865]),
    leaf(0x8000_0003, [0x4420_3229, 0x4320_6F75, 0x2020_5550, 0x4520_2020]),
    leaf(0x8000_0004, [0x3035_3736, 0x2040_2020, 0x3636_2E32, 0x007A_4847]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0, 0, 0x1000_8040, 0]), // L2 once more
    leaf(0x8000_0007, [0, 0, 0, 0]),           // no invariant TSC
    leaf(0x8000_0008, [0x0000_3024, 0, 0, 0]), // 36 physical, 48 linear bits
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::CORE2;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<16>(36),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    // Banks 3 to 5 have other names in the manual: MC4 at 40CH, MC3 at 410H.
    &msrs::banks::<{ 6 * BANK_REGISTERS }>(),
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    MsrRow::read_only(IA32_P5_MC_ADDR, "IA32_P5_MC_ADDR", 0),
    MsrRow::read_only(IA32_P5_MC_TYPE, "IA32_P5_MC_TYPE", 0),
    // Ratio 8 (12:8) on platform 0.
    MsrRow::read_only(IA32_PLATFORM_ID, "IA32_PLATFORM_ID", 0x8800_8824),
    // The pins of the dumped part.
    MsrRow::read_only(MSR_EBL_CR_POWERON, "MSR_EBL_CR_POWERON", 0x4208_0000),
    // Firmware leaves it locked with VMX on; a write to the locked register is #GP.
    MsrRow::read_only(IA32_FEATURE_CONTROL, "IA32_FEATURE_CONTROL", 0x5),
    // Software writes 0, executes CPUID leaf 1, which loads `microcode`, and reads.
    MsrRow::storage(IA32_BIOS_SIGN_ID, "IA32_BIOS_SIGN_ID", (MICROCODE as u64) << 32, !0),
    // 333 MHz (2:0 is 4).
    MsrRow::read_only(MSR_FSB_FREQ, "MSR_FSB_FREQ", 0x804),
    // Eight variable ranges (7:0), fixed ranges (8), write combining (10). No SMRR (11): the part's own registers, A0H and A1H, are there where
    // IA32_FEATURE_CONTROL[3] is set, which firmware leaves clear here.
    MsrRow::read_only(IA32_MTRRCAP, "IA32_MTRRCAP", 0x508),
    // The level-2 cache of the dumped part: present (23) and on (8).
    MsrRow::storage(MSR_BBL_CR_CTL3, "MSR_BBL_CR_CTL3", 0xBE70_2109, 0),
    // Six banks, threshold-based status (11); no global control and no CMCI.
    MsrRow::read_only(IA32_MCG_CAP, "IA32_MCG_CAP", 0x806),
    MsrRow::storage(IA32_MCG_STATUS, "IA32_MCG_STATUS", 0, 0),
    // Ratio 8 and voltage of the dumped part, in every field.
    MsrRow::read_only(IA32_PERF_STATUS, "IA32_PERF_STATUS", 0x0824_0824_0600_0824),
    MsrRow::storage(IA32_PERF_CTL, "IA32_PERF_CTL", 0x824, 0xFFFF),
    MsrRow::storage(IA32_CLOCK_MODULATION, "IA32_CLOCK_MODULATION", 0, 0x1E),
    MsrRow::storage(IA32_THERM_INTERRUPT, "IA32_THERM_INTERRUPT", 0, 0x00FF_FF1F),
    // 31 valid, 30:27 resolution 1, 22:16 degrees below PROCHOT#: cool for ever.
    MsrRow {
        ignore_reserved: true,
        ..MsrRow::storage(IA32_THERM_STATUS, "IA32_THERM_STATUS", 0x8834_0000, 0)
    },
    // Fast strings on (0), performance monitoring there (7); neither branch trace storage (11) nor PEBS (12) unavailable; the
    // four prefetchers (9, 19, 37, 39) on.
    // MONITOR on (18). Changing 18, setting 22 (limit CPUID) or 34 (no XD) would change CPUID and is #GP here.
    MsrRow::storage(IA32_MISC_ENABLE, "IA32_MISC_ENABLE", 0x4_0081, 0x00A0_000C_0209),
    MsrRow::storage(IA32_MONITOR_FILTER_SIZE, "IA32_MONITOR_FILTER_SIZE", 0, 0xFFFF),
];
