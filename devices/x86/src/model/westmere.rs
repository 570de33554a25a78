//! Westmere-EP: family 6, model 2CH, stepping 2.
//!
//! # Theory
//! [`SILICON`] is what a Xeon X5650 answers, read on real parts (`resources/cpuid/xeon-x5650.txt` has the dump and where it
//! comes from). The MSRs are those of SDM Vol. 4 "MSRs In the Intel Microarchitecture Code Name Nehalem" and "Additional
//! MSRs Supported by the Intel Xeon Processor 5600 Series".
//!
//! # Practice
//! [`super::policy`] takes away what the machine does not model yet and adds what a virtual machine needs;
//! [`ADJUSTMENTS`] is where this model departs from it.
//!
//! # What the part does not have
//! FSGSBASE, INVPCID, RDRAND, XSAVE, SMEP and SMAP exist in the engine and not here: they came with later parts, so this
//! model does not show them and they are #UD. The microcode is of 2013, before speculation control: no IA32_SPEC_CTRL.

use super::msrs::{self, BANK_REGISTERS, MTRR_FIXED};
use super::{Check, CpuModel, CpuidRow, Difference, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::cpuid::{Feature, Register};
use crate::ds::{DsCaps, PebsCaps, PebsFormat};
use crate::msr::*;
use crate::pmu::{PmuCaps, events};
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// Intel Xeon X5650 "Westmere-EP".
pub const WESTMERE: CpuModel = CpuModel {
    name: "westmere",
    description: "Intel Xeon X5650 (Westmere-EP, 2010): x86-64-v2, AES, PCLMULQDQ, PCID, 1-GiB pages",
    // The ratio in MSR_PLATFORM_INFO times the bus clock, so that 20 TSC ticks are one tick of the APIC timer.
    tsc_khz: 20 * BUS_KHZ,
    apic_timer_khz: BUS_KHZ,
    microcode: 0x1A,
    silicon: &SILICON,
    cpuid: &CPUID,
    adjustments: ADJUSTMENTS,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::NEHALEM),
        lbr: Some(lbr::NEHALEM),
        ds: Some(DsCaps {
            bts: true,
            bts_predicted: true,
            pebs: Some(PebsCaps {
                format: PebsFormat::Nehalem,
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
            architectural: 0x7B,
            capabilities: Some(0x11C0),
            select: 0xFFFF_FFFF,
            any_thread: true,
            offcore: [0xF7FF, 0xF7FF],
            reference: 20,
            slots: 4,
            events: &[events::NEHALEM],
            ..PmuCaps::NONE
        }),
        ..UnitCaps::NONE
    },
    vmx: Some(VMX),
    ..CpuModel::NONE
};

/// The bus clock of the 5600 series, 133.33 MHz.
const BUS_KHZ: u32 = 133_333;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, ADJUSTMENTS);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 26] = [
    leaf(0x0, [0x0000_000B, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to 0BH
    leaf(0x1, [0x0002_06C2, 0x0020_0800, 0x029E_E3FF, 0xBFEB_FBFF]), // signature, CLFLUSH 64 bytes, features
    // TLBs and prefetch: 55H 03H 5AH F0H B0H CAH; FFH: caches are in leaf 4.
    leaf(0x2, [0x5503_5A01, 0x00F0_B0FF, 0x0000_0000, 0x00CA_0000]),
    leaf(0x3, [0, 0, 0, 0]),                                               // no serial number
    subleaf(0x4, 0, [0x3C00_4121, 0x01C0_003F, 0x0000_003F, 0x0000_0000]), // L1D 32 KiB, 8 ways
    subleaf(0x4, 1, [0x3C00_4122, 0x00C0_003F, 0x0000_007F, 0x0000_0000]), // L1I 32 KiB, 4 ways
    subleaf(0x4, 2, [0x3C00_4143, 0x01C0_003F, 0x0000_01FF, 0x0000_0000]), // L2 256 KiB, 8 ways
    subleaf(0x4, 3, [0x3C07_C163, 0x03C0_003F, 0x0000_2FFF, 0x0000_0002]), // L3 12 MiB, 16 ways, inclusive
    subleaf(0x4, 4, [0, 0, 0, 0]),                                         // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x0000_1120]),       // MONITOR/MWAIT
    leaf(0x6, [0x0000_0007, 0x0000_0002, 0x0000_0009, 0x0000_0000]),       // thermal and power
    leaf(0x7, [0, 0, 0, 0]),                                               // no structured extended features
    leaf(0x8, [0, 0, 0, 0]),
    leaf(0x9, [0, 0, 0, 0]),                                               // DCA capabilities
    leaf(0xA, [0x0730_0403, 0x0000_0004, 0x0000_0000, 0x0000_0603]),       // performance monitoring, version 3
    subleaf(0xB, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0x0000_0000]), // threads
    subleaf(0xB, 1, [0x0000_0005, 0x0000_000C, 0x0000_0201, 0x0000_0000]), // cores
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0x0000_0000, 0x0000_0000, 0x0000_0001, 0x2C10_0800]),
    // "Intel(R) Xeon(R) CPU           X5650  @ 2.67GHz"
    leaf(0x8000_0002, [0x6574_6E49, 0x2952_286C, 0x6F65_5820, 0x2952_286E]),
    leaf(0x8000_0003, [0x5550_4320, 0x2020_2020, 0x2020_2020, 0x5820_2020]),
    leaf(0x8000_0004, [0x3035_3635, 0x2040_2020, 0x3736_2E32, 0x007A_4847]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0x0000_0000, 0x0000_0000, 0x0100_6040, 0x0000_0000]), // L2 once more
    leaf(0x8000_0007, [0x0000_0000, 0x0000_0000, 0x0000_0000, 0x0000_0100]), // invariant TSC
    leaf(0x8000_0008, [0x0000_3028, 0x0000_0000, 0x0000_0000, 0x0000_0000]), // 40 physical, 48 linear bits
];

/// Where the guest's Westmere departs from the policy.
const ADJUSTMENTS: &[Difference] = &[Difference {
    leaf: 0x1,
    subleaf: 0,
    register: Register::Ecx,
    clear: 0,
    set: 1 << 21,
    feature: Some(Feature::X2apic),
    reason: "the local APIC unit has it; of this core only the four-socket parts (06_2FH) show it",
}];

/// The plain MSRs.
///
/// The registers of the debug and trace units are the units' own. Absent, so #GP, because what enumerates them is hidden:
/// IA32_SMM_MONITOR_CTL and 480H on (VMX), IA32_MPERF and IA32_APERF (power), IA32_SMRR_* (no SMRR),
/// IA32_MCi_CTL2 (no CMCI entry in the local APIC).
/// Absent, because later parts brought them: IA32_TSC_ADJUST, IA32_SPEC_CTRL, MSR_PPIN_CTL, IA32_ARCH_CAPABILITIES,
/// MSR_MISC_FEATURE_ENABLES, MSR_PPERF, IA32_TSC_DEADLINE; and all of C001_xxxxH, which are another vendor's.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::WESTMERE;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<16>(40),
    &MTRR_FIXED,
    &msrs::banks::<{ 9 * BANK_REGISTERS }>(),
    &msrs::RESIDENCIES,
    &msrs::SMRR,
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    MsrRow::read_only(IA32_P5_MC_ADDR, "IA32_P5_MC_ADDR", 0),
    MsrRow::read_only(IA32_P5_MC_TYPE, "IA32_P5_MC_TYPE", 0),
    // Platform 0; the part's microcode updates are for 0 and 1.
    MsrRow::read_only(IA32_PLATFORM_ID, "IA32_PLATFORM_ID", 0),
    MsrRow::read_only(MSR_SMI_COUNT, "MSR_SMI_COUNT", 0),
    // Firmware leaves it locked with VMX on; a write to the locked register is #GP.
    MsrRow::read_only(IA32_FEATURE_CONTROL, "IA32_FEATURE_CONTROL", 0x5),
    // Software writes 0, executes CPUID leaf 1, which loads `microcode`, and reads.
    MsrRow::storage(IA32_BIOS_SIGN_ID, "IA32_BIOS_SIGN_ID", 0x1A << 32, !0),
    // 15:8 ratio of the TSC to the bus clock, 20. 47:40 lowest ratio, 12. Turbo limits cannot be programmed.
    MsrRow::read_only(MSR_PLATFORM_INFO, "MSR_PLATFORM_INFO", 0x0000_0C00_0000_1400),
    // Firmware leaves it locked (15), package C-states off; C1 and C3 auto demotion and undemotion (28:25) stay the system's.
    MsrRow::storage(
        MSR_PKG_CST_CONFIG_CONTROL,
        "MSR_PKG_CST_CONFIG_CONTROL",
        0x8000,
        0x1E00_0000,
    ),
    // Eight variable ranges (7:0), fixed ranges (8), write combining (10), SMRR (11).
    MsrRow::read_only(IA32_MTRRCAP, "IA32_MTRRCAP", 0xD08),
    // Firmware leaves it locked with AES on.
    MsrRow::read_only(MSR_FEATURE_CONFIG, "MSR_FEATURE_CONFIG", 0x1),
    // Nine banks; no global control, no extended state, no CMCI (the local APIC has no entry for it).
    MsrRow::read_only(IA32_MCG_CAP, "IA32_MCG_CAP", 0x9),
    // Software can only clear it, and nothing sets it.
    MsrRow::storage(IA32_MCG_STATUS, "IA32_MCG_STATUS", 0, 0),
    MsrRow::read_only(IA32_PERF_STATUS, "IA32_PERF_STATUS", 0x14),
    MsrRow::storage(IA32_PERF_CTL, "IA32_PERF_CTL", 0x14, 0x1_0000_FFFF),
    MsrRow::storage(IA32_CLOCK_MODULATION, "IA32_CLOCK_MODULATION", 0, 0x1E),
    MsrRow::storage(IA32_THERM_INTERRUPT, "IA32_THERM_INTERRUPT", 0, 0x00FF_FF17),
    // 31 valid, 30:27 resolution 1, 22:16 degrees below PROCHOT#: cool for ever.
    MsrRow {
        ignore_reserved: true,
        ..MsrRow::storage(IA32_THERM_STATUS, "IA32_THERM_STATUS", 0x8840_0000, 0)
    },
    // Fast strings on (0), performance monitoring there (7); neither branch trace storage (11) nor PEBS (12) unavailable.
    // MONITOR on (18). Setting 22 (limit CPUID) or 34 (no XD) would change CPUID and is #GP here.
    MsrRow::storage(IA32_MISC_ENABLE, "IA32_MISC_ENABLE", 0x4_0081, 0x4_0009),
    MsrRow::storage(IA32_MONITOR_FILTER_SIZE, "IA32_MONITOR_FILTER_SIZE", 0, 0xFFFF),
    // C1E (1), BD PROCHOT# (0): the idle states differ in nothing here.
    MsrRow::storage(MSR_POWER_CTL, "MSR_POWER_CTL", 0, 0x3),
    MsrRow::read_only(MSR_TEMPERATURE_TARGET, "MSR_TEMPERATURE_TARGET", 0x005F_0000), // 95 degrees
    MsrRow::storage(MSR_MISC_PWR_MGMT, "MSR_MISC_PWR_MGMT", 0, 0x3),
    MsrRow::read_only(MSR_TURBO_POWER_CURRENT_LIMIT, "MSR_TURBO_POWER_CURRENT_LIMIT", 0),
    // No Turbo Boost: the TSC's ratio with any number of cores active.
    MsrRow::read_only(MSR_TURBO_RATIO_LIMIT, "MSR_TURBO_RATIO_LIMIT", 0x0000_1414_1414_1414),
    MsrRow::storage(IA32_ENERGY_PERF_BIAS, "IA32_ENERGY_PERF_BIAS", 0, 0xF),
    // WB, WT, UC-, UC, twice: the reset value. SDM Vol. 3A Table 12-12.
    MsrRow::storage(IA32_PAT, "IA32_PAT", 0x0007_0406_0007_0406, !0).checked(Check::PatTypes),
    // Firmware turns the MTRRs on (11, 10) with write-back (6) by default, without which Linux leaves the PAT alone.
    MsrRow::storage(IA32_MTRR_DEF_TYPE, "IA32_MTRR_DEF_TYPE", 0xC06, 0xCFF).checked(Check::MtrrType),
];
