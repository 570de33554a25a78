//! Groups of MSRs that many models have, and how a model puts its table together.

use super::{Check, MsrRow};
use crate::cpuid::Feature::{self, *};
use crate::cpuid::Features;
use crate::msr::*;

/// Memory type write-back in every byte.
const ALL_WRITE_BACK: u64 = 0x0606_0606_0606_0606;

/// The number of rows in all parts.
pub const fn total(parts: &[&[MsrRow]]) -> usize {
    let (mut rows, mut part) = (0, 0);
    while part < parts.len() {
        rows += parts[part].len();
        part += 1;
    }
    rows
}

/// All rows of all parts, ascending. A number that stands twice does not compile.
pub const fn merge<const N: usize>(parts: &[&[MsrRow]]) -> [MsrRow; N] {
    assert!(N == total(parts), "as many rows as the parts have");
    let mut rows = [MsrRow::read_only(0, "", 0); N];
    let (mut len, mut part) = (0, 0);
    while part < parts.len() {
        let mut i = 0;
        while i < parts[part].len() {
            let row = parts[part][i];
            let mut at = len;
            while at > 0 && rows[at - 1].msr >= row.msr {
                assert!(rows[at - 1].msr != row.msr, "a register with two rows");
                rows[at] = rows[at - 1];
                at -= 1;
            }
            rows[at] = row;
            len += 1;
            i += 1;
        }
        part += 1;
    }
    rows
}

const PHYSICAL: [[&str; 2]; 10] = [
    ["IA32_MTRR_PHYSBASE0", "IA32_MTRR_PHYSMASK0"],
    ["IA32_MTRR_PHYSBASE1", "IA32_MTRR_PHYSMASK1"],
    ["IA32_MTRR_PHYSBASE2", "IA32_MTRR_PHYSMASK2"],
    ["IA32_MTRR_PHYSBASE3", "IA32_MTRR_PHYSMASK3"],
    ["IA32_MTRR_PHYSBASE4", "IA32_MTRR_PHYSMASK4"],
    ["IA32_MTRR_PHYSBASE5", "IA32_MTRR_PHYSMASK5"],
    ["IA32_MTRR_PHYSBASE6", "IA32_MTRR_PHYSMASK6"],
    ["IA32_MTRR_PHYSBASE7", "IA32_MTRR_PHYSMASK7"],
    ["IA32_MTRR_PHYSBASE8", "IA32_MTRR_PHYSMASK8"],
    ["IA32_MTRR_PHYSBASE9", "IA32_MTRR_PHYSMASK9"],
];

/// The variable-range MTRRs, two registers a range, for physical addresses of so many bits. SDM Vol. 3A 12.11.2.3 "Variable
/// Range MTRRs".
pub const fn mtrrs<const REGISTERS: usize>(physical_bits: u32) -> [MsrRow; REGISTERS] {
    let frames = (1 << physical_bits) - 0x1000;
    let mut rows = [MsrRow::read_only(0, "", 0); REGISTERS];
    let mut i = 0;
    while i < REGISTERS {
        let number = IA32_MTRR_PHYSBASE0 + i as u32;
        let name = PHYSICAL[i / 2][i % 2];
        rows[i] = if i % 2 == 0 {
            // Type (7:0) and base.
            MsrRow::storage(number, name, 0, frames | 0xFF).checked(Check::MtrrType)
        } else {
            // Valid (11) and mask.
            MsrRow::storage(number, name, 0, frames | 0x800)
        };
        i += 1;
    }
    rows
}

/// Fixed ranges: firmware makes them write-back. There is no video memory or ROM below 1 MiB whose type would matter.
const fn fixed(msr: u32, name: &'static str) -> MsrRow {
    MsrRow::storage(msr, name, ALL_WRITE_BACK, !0).checked(Check::MtrrTypes)
}

/// The fixed-range MTRRs.
pub const MTRR_FIXED: [MsrRow; 11] = [
    fixed(IA32_MTRR_FIX64K_00000, "IA32_MTRR_FIX64K_00000"),
    fixed(IA32_MTRR_FIX16K_80000, "IA32_MTRR_FIX16K_80000"),
    fixed(IA32_MTRR_FIX16K_A0000, "IA32_MTRR_FIX16K_A0000"),
    fixed(IA32_MTRR_FIX4K_C0000, "IA32_MTRR_FIX4K_C0000"),
    fixed(IA32_MTRR_FIX4K_C8000, "IA32_MTRR_FIX4K_C8000"),
    fixed(IA32_MTRR_FIX4K_D0000, "IA32_MTRR_FIX4K_D0000"),
    fixed(IA32_MTRR_FIX4K_D8000, "IA32_MTRR_FIX4K_D8000"),
    fixed(IA32_MTRR_FIX4K_E0000, "IA32_MTRR_FIX4K_E0000"),
    fixed(IA32_MTRR_FIX4K_E8000, "IA32_MTRR_FIX4K_E8000"),
    fixed(IA32_MTRR_FIX4K_F0000, "IA32_MTRR_FIX4K_F0000"),
    fixed(IA32_MTRR_FIX4K_F8000, "IA32_MTRR_FIX4K_F8000"),
];

/// What goes with the MTRRs on every part: the default type and the PAT.
///
/// The PAT holds WB, WT, UC-, UC, twice: the reset value (SDM Vol. 3A Table 12-12). Firmware turns the MTRRs on (11, 10)
/// with write-back (6) by default, without which Linux leaves the PAT alone.
pub const MEMORY_TYPES: [MsrRow; 2] = [
    MsrRow::storage(IA32_PAT, "IA32_PAT", 0x0007_0406_0007_0406, !0).checked(Check::PatTypes),
    MsrRow::storage(IA32_MTRR_DEF_TYPE, "IA32_MTRR_DEF_TYPE", 0xC06, 0xCFF).checked(Check::MtrrType),
];

/// The registers of one machine-check bank.
pub const BANK_REGISTERS: usize = 4;

macro_rules! bank_names {
    ($($n:literal)*) => {
        const BANKS: &[[&str; BANK_REGISTERS]] = &[$([
            concat!("IA32_MC", $n, "_CTL"),
            concat!("IA32_MC", $n, "_STATUS"),
            concat!("IA32_MC", $n, "_ADDR"),
            concat!("IA32_MC", $n, "_MISC"),
        ],)*];
        const CONTROL2: &[&str] = &[$(concat!("IA32_MC", $n, "_CTL2"),)*];
    };
}

bank_names!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);

/// Machine-check banks: `REGISTERS` is four times their number. Nothing raises a machine check.
///
/// IA32_MCi_CTL takes any combination of error enables. Software clears IA32_MCi_STATUS, ADDR and MISC by writing 0;
/// writing anything else is #GP. SDM Vol. 3B 16.3.2.2 "IA32_MCi_STATUS MSRS".
pub const fn banks<const REGISTERS: usize>() -> [MsrRow; REGISTERS] {
    let mut rows = [MsrRow::read_only(0, "", 0); REGISTERS];
    let mut i = 0;
    while i < REGISTERS {
        let name = BANKS[i / BANK_REGISTERS][i % BANK_REGISTERS];
        let writable = if i % BANK_REGISTERS == 0 { !0 } else { 0 };
        rows[i] = MsrRow::storage(IA32_MC0_CTL + i as u32, name, 0, writable);
        i += 1;
    }
    rows
}

/// The same banks on the P6 family, whose MCi_CTL takes all ones or all zeros. SDM Vol. 3B 16.3.2.1 "IA32_MCi_CTL MSRs".
pub const fn banks_of_p6<const REGISTERS: usize>() -> [MsrRow; REGISTERS] {
    let mut rows = banks::<REGISTERS>();
    let mut i = 0;
    while i < REGISTERS {
        rows[i] = rows[i].checked(Check::ZerosOrOnes);
        i += BANK_REGISTERS;
    }
    rows
}

/// IA32_MCi_CTL2 of so many banks: enable (30) and threshold (14:0) of the corrected-error interrupt. SDM Vol. 3B 16.3.2.5
/// "IA32_MCi_CTL2 MSRs".
pub const fn corrected<const BANKS: usize>() -> [MsrRow; BANKS] {
    let mut rows = [MsrRow::read_only(0, "", 0); BANKS];
    let mut i = 0;
    while i < BANKS {
        rows[i] = MsrRow::storage(IA32_MC0_CTL2 + i as u32, CONTROL2[i], 0, 0x4000_7FFF);
        i += 1;
    }
    rows
}

/// IA32_SPEC_CTRL: IBRS (0), STIBP (1), SSBD (2). They change the speed of a part and nothing that the engine does.
pub const SPEC_CTRL: MsrRow = MsrRow::storage(IA32_SPEC_CTRL, "IA32_SPEC_CTRL", 0, 0x7);
/// IA32_PRED_CMD: IBPB (0).
pub const PRED_CMD: MsrRow = MsrRow::command(IA32_PRED_CMD, "IA32_PRED_CMD", 0x1);
/// IA32_FLUSH_CMD: L1D_FLUSH (0).
pub const FLUSH_CMD: MsrRow = MsrRow::command(IA32_FLUSH_CMD, "IA32_FLUSH_CMD", 0x1);
/// Speculation control as microcode of 2018 brought it to parts without IA32_ARCH_CAPABILITIES.
pub const SPECULATION: [MsrRow; 3] = [SPEC_CTRL, PRED_CMD, FLUSH_CMD];
/// IA32_CORE_CAPABILITIES: no #AC for split locks (5).
pub const CORE_CAPABILITIES: MsrRow = MsrRow::read_only(IA32_CORE_CAPABILITIES, "IA32_CORE_CAPABILITIES", 0);

/// IA32_UMWAIT_CONTROL: no limit at reset, and both states. SDM Vol. 4 Table 2-2.
pub const UMWAIT_CONTROL: MsrRow = MsrRow::storage(IA32_UMWAIT_CONTROL, "IA32_UMWAIT_CONTROL", 0, 0xFFFF_FFFD);

/// IA32_ARCH_CAPABILITIES. SDM Vol. 4 Table 2-2.
pub const fn arch_capabilities(value: u64) -> MsrRow {
    MsrRow::read_only(IA32_ARCH_CAPABILITIES, "IA32_ARCH_CAPABILITIES", value)
}

/// The system-management range registers of every part since Nehalem, not valid yet: nobody but SMM writes them, where the software engine
/// has [`Smrr`](crate::smm::Smrr) for it. SDM Vol. 4 Table 2-2.
pub const SMRR: [MsrRow; 2] = [
    MsrRow::read_only(IA32_SMRR_PHYSBASE, "IA32_SMRR_PHYSBASE", 0),
    MsrRow::read_only(IA32_SMRR_PHYSMASK, "IA32_SMRR_PHYSMASK", 0),
];

/// What every part since Sandy Bridge has, and firmware sets up in the same way. The registers of the debug and trace units
/// are the units' own.
///
/// Absent, so #GP, because what enumerates them is hidden: 480H on (VMX), IA32_MPERF and IA32_APERF (CPUID.06H:ECX\[0\], which KVM hides,
/// too), MSR_PPIN_CTL (bit 23 of MSR_PLATFORM_INFO is 0), MSR_TEST_CTRL (no split-lock faults).
pub const COMMON: [MsrRow; 21] = [
    MsrRow::storage(IA32_MONITOR_FILTER_SIZE, "IA32_MONITOR_FILTER_SIZE", 0, 0xFFFF),
    MsrRow::read_only(IA32_P5_MC_ADDR, "IA32_P5_MC_ADDR", 0),
    MsrRow::read_only(IA32_P5_MC_TYPE, "IA32_P5_MC_TYPE", 0),
    MsrRow::read_only(MSR_SMI_COUNT, "MSR_SMI_COUNT", 0),
    // One core of one thread.
    MsrRow::read_only(MSR_CORE_THREAD_COUNT, "MSR_CORE_THREAD_COUNT", 0x1_0001),
    // Locked with VMX on; a write to the locked register is #GP.
    MsrRow::read_only(IA32_FEATURE_CONTROL, "IA32_FEATURE_CONTROL", 0x5),
    // Locked (15), package C-states off; C1 and C3 auto demotion and undemotion (28:25) stay the system's.
    MsrRow::storage(
        MSR_PKG_CST_CONFIG_CONTROL,
        "MSR_PKG_CST_CONFIG_CONTROL",
        0x8000,
        0x1E00_0000,
    ),
    // Ten variable ranges (7:0), fixed ranges (8), write combining (10), SMRR (11).
    MsrRow::read_only(IA32_MTRRCAP, "IA32_MTRRCAP", 0xD0A),
    SMRR[0],
    SMRR[1],
    // Locked with AES on.
    MsrRow::read_only(MSR_FEATURE_CONFIG, "MSR_FEATURE_CONFIG", 0x1),
    // Software can only clear it, and nothing sets it.
    MsrRow::storage(IA32_MCG_STATUS, "IA32_MCG_STATUS", 0, 0),
    MsrRow::storage(IA32_CLOCK_MODULATION, "IA32_CLOCK_MODULATION", 0, 0x1F),
    MsrRow::storage(IA32_THERM_INTERRUPT, "IA32_THERM_INTERRUPT", 0, 0x01FF_FF1F),
    // 31 valid, 30:27 resolution 1, 22:16 degrees below PROCHOT#: cool for ever.
    MsrRow {
        ignore_reserved: true,
        ..MsrRow::storage(IA32_THERM_STATUS, "IA32_THERM_STATUS", 0x8840_0000, 0)
    },
    // Fast strings on (0), performance monitoring there (7); neither branch trace storage (11) nor PEBS (12) unavailable;
    // MONITOR on (18). Changing 18, setting 22 (limit CPUID) or 34 (no XD) would change CPUID and is #GP here.
    MsrRow::storage(IA32_MISC_ENABLE, "IA32_MISC_ENABLE", 0x4_0081, 0x4_0009),
    // C1E (1), BD PROCHOT# (0): the idle states differ in nothing here.
    MsrRow::storage(MSR_POWER_CTL, "MSR_POWER_CTL", 0, 0x3),
    MsrRow::read_only(MSR_TEMPERATURE_TARGET, "MSR_TEMPERATURE_TARGET", 0x0064_0000), // 100 degrees
    MsrRow::storage(MSR_MISC_PWR_MGMT, "MSR_MISC_PWR_MGMT", 0, 0x3),
    MsrRow::storage(IA32_ENERGY_PERF_BIAS, "IA32_ENERGY_PERF_BIAS", 0, 0xF),
    // The part's own prefetchers: all on.
    MsrRow::storage(MSR_MISC_FEATURE_CONTROL, "MSR_MISC_FEATURE_CONTROL", 0, 0xF),
];

/// Of memory bandwidth allocation with more than eight classes: whether a core takes the largest delay of its threads or the smallest
/// (0). A core has one thread here. SDM Vol. 4 has no such register; Intel's pqos reads it on all parts with so many classes.
pub const MBA_CONFIGURATION: MsrRow = MsrRow::storage(MBA_CFG, "MBA_CFG", 0, 0x1);

/// Times in idle states deeper than C1, on every part since Nehalem: always 0, since package C-states are locked off and MWAIT has C1
/// alone. SDM Vol. 4, MSR_PKG_Cn_RESIDENCY and MSR_CORE_Cn_RESIDENCY.
pub const RESIDENCIES: [MsrRow; 6] = [
    MsrRow::read_only(MSR_PKG_C3_RESIDENCY, "MSR_PKG_C3_RESIDENCY", 0),
    MsrRow::read_only(MSR_PKG_C6_RESIDENCY, "MSR_PKG_C6_RESIDENCY", 0),
    MsrRow::read_only(MSR_PKG_C7_RESIDENCY, "MSR_PKG_C7_RESIDENCY", 0),
    MsrRow::read_only(MSR_CORE_C3_RESIDENCY, "MSR_CORE_C3_RESIDENCY", 0),
    MsrRow::read_only(MSR_CORE_C6_RESIDENCY, "MSR_CORE_C6_RESIDENCY", 0),
    MsrRow::read_only(MSR_CORE_C7_RESIDENCY, "MSR_CORE_C7_RESIDENCY", 0),
];

/// The capability MSRs of a part's VMX, as far as its features are shown.
macro_rules! vmx_capabilities {
    ($caps:expr, $silicon:expr) => {{
        const SHOWN: $crate::cpuid::Features = policy::shown($crate::cpuid::Features::of(&$silicon));
        const ROWS: &([MsrRow; 18], usize) = &$caps.shown(SHOWN).rows(SHOWN);
        ROWS.0.split_at(ROWS.1).0
    }};
}
pub(super) use vmx_capabilities;

/// A limit of RAPL with its lock bit, or a policy that goes with one: firmware has locked it, and writes are ignored until the next
/// reset. SDM Vol. 3B 16.10.3 "Package RAPL Domain", 16.10.4 "PP0/PP1 RAPL Domains".
const fn locked(msr: u32, name: &'static str, lock: u64) -> MsrRow {
    MsrRow {
        ignore_reserved: true,
        ..MsrRow::storage(msr, name, lock, 0)
    }
}

/// Power on every part since Sandy Bridge, which is not modelled. Units and energies are 0, as KVM shows them to its guests; so is what
/// KVM has not got and tools take for granted beside them: times held back are 0, limits are off and locked.
/// SDM Vol. 3B 16.10 "Platform Specific Power Management Support".
pub const POWER: [MsrRow; 20] = [
    locked(MSR_VR_CURRENT_CONFIG, "MSR_VR_CURRENT_CONFIG", 1 << 31),
    // Valid (15), unit (12:10) and limit (9:0) for states that are never entered.
    MsrRow::storage(MSR_PKGC3_IRTL, "MSR_PKGC3_IRTL", 0, 0x9FFF),
    MsrRow::storage(MSR_PKGC6_IRTL, "MSR_PKGC6_IRTL", 0, 0x9FFF),
    MsrRow::storage(MSR_PKGC7_IRTL, "MSR_PKGC7_IRTL", 0, 0x9FFF),
    MsrRow::read_only(MSR_PKG_C2_RESIDENCY, "MSR_PKG_C2_RESIDENCY", 0),
    MsrRow::read_only(MSR_RAPL_POWER_UNIT, "MSR_RAPL_POWER_UNIT", 0),
    locked(MSR_PKG_POWER_LIMIT, "MSR_PKG_POWER_LIMIT", 1 << 63),
    MsrRow::read_only(MSR_PKG_ENERGY_STATUS, "MSR_PKG_ENERGY_STATUS", 0),
    MsrRow::read_only(MSR_PKG_PERF_STATUS, "MSR_PKG_PERF_STATUS", 0),
    // Thermal specification power (14:0): 100 W of every model, since tools divide by it.
    MsrRow::read_only(MSR_PKG_POWER_INFO, "MSR_PKG_POWER_INFO", 100),
    locked(MSR_DRAM_POWER_LIMIT, "MSR_DRAM_POWER_LIMIT", 1 << 31),
    MsrRow::read_only(MSR_DRAM_ENERGY_STATUS, "MSR_DRAM_ENERGY_STATUS", 0),
    MsrRow::read_only(MSR_DRAM_PERF_STATUS, "MSR_DRAM_PERF_STATUS", 0),
    MsrRow::read_only(MSR_DRAM_POWER_INFO, "MSR_DRAM_POWER_INFO", 0),
    locked(MSR_PP0_POWER_LIMIT, "MSR_PP0_POWER_LIMIT", 1 << 31),
    MsrRow::read_only(MSR_PP0_ENERGY_STATUS, "MSR_PP0_ENERGY_STATUS", 0),
    locked(MSR_PP0_POLICY, "MSR_PP0_POLICY", 0),
    locked(MSR_PP1_POWER_LIMIT, "MSR_PP1_POWER_LIMIT", 1 << 31),
    MsrRow::read_only(MSR_PP1_ENERGY_STATUS, "MSR_PP1_ENERGY_STATUS", 0),
    locked(MSR_PP1_POLICY, "MSR_PP1_POLICY", 0),
];

/// IA32_PLATFORM_ID of platform `platform`; IA32_BIOS_SIGN_ID after loading microcode `revision`: software writes 0, executes
/// CPUID leaf 1, which loads it, and reads.
pub const fn identity(platform: u64, revision: u32) -> [MsrRow; 2] {
    [
        MsrRow::read_only(IA32_PLATFORM_ID, "IA32_PLATFORM_ID", platform << 50),
        MsrRow::storage(IA32_BIOS_SIGN_ID, "IA32_BIOS_SIGN_ID", (revision as u64) << 32, !0),
    ]
}

/// The frequency registers of a part with one frequency: `ratio` times the bus clock, at least `lowest` times. No Turbo
/// Boost and nothing to program (MSR_PLATFORM_INFO 28 and 29), no CPUID faulting (31).
pub const fn ratios(ratio: u64, lowest: u64) -> [MsrRow; 4] {
    [
        MsrRow::read_only(MSR_PLATFORM_INFO, "MSR_PLATFORM_INFO", lowest << 40 | ratio << 8),
        MsrRow::read_only(IA32_PERF_STATUS, "IA32_PERF_STATUS", ratio << 8),
        // Target ratio (15:0), turbo disengaged (32).
        MsrRow::storage(IA32_PERF_CTL, "IA32_PERF_CTL", ratio << 8, 0x1_0000_FFFF),
        // The same ratio with any number of cores active.
        MsrRow::read_only(
            MSR_TURBO_RATIO_LIMIT,
            "MSR_TURBO_RATIO_LIMIT",
            ratio * 0x0101_0101_0101_0101,
        ),
    ]
}

/// MSR_MISC_FEATURE_ENABLES: neither CPUID faulting (0) nor MWAIT in ring 3 (1).
pub const MISC_FEATURE_ENABLES: MsrRow = MsrRow::storage(MSR_MISC_FEATURE_ENABLES, "MSR_MISC_FEATURE_ENABLES", 0, 0);

/// IA32_MCG_CAP: the number of banks (7:0), corrected-error interrupts (10) and threshold-based status (11); `more` is what
/// else the part has.
pub const fn machine_check(banks: u64, more: u64) -> MsrRow {
    MsrRow::read_only(IA32_MCG_CAP, "IA32_MCG_CAP", banks | 0xC00 | more)
}

/// The registers that exist where one of some features is shown, and nowhere else.
pub const ENUMERATED: &[(u32, &[Feature])] = &[
    (IA32_SPEC_CTRL, &[SpecCtrl, Stibp, Ssbd]),
    (IA32_PRED_CMD, &[SpecCtrl]),
    (IA32_CORE_CAPABILITIES, &[CoreCapabilities]),
    (IA32_ARCH_CAPABILITIES, &[ArchCapabilities]),
    (IA32_FLUSH_CMD, &[L1dFlush]),
    (IA32_MONITOR_FILTER_SIZE, &[Monitor]),
    (IA32_MTRRCAP, &[Mtrr]),
    (IA32_MTRR_DEF_TYPE, &[Mtrr]),
    (IA32_PAT, &[Pat]),
    (IA32_MCG_CAP, &[Mca]),
    (IA32_MCG_STATUS, &[Mca]),
    (IA32_ENERGY_PERF_BIAS, &[EnergyBias]),
    (IA32_UMWAIT_CONTROL, &[Waitpkg]),
];

/// IA32_MISC_ENABLE of a part with these features, where `value` is the model's: bit 7, performance monitoring is available,
/// bits 11 and 12, branch trace storage and PEBS are not. The Pentium 4's counters (`netburst`) come without PDCM. SDM Vol. 4 Table 2-2.
pub const fn misc_enable(value: u64, features: Features, netburst: bool) -> u64 {
    let counters = features.pdcm() || netburst;
    let value = if counters { value } else { value & !(1 << 7) };
    if features.ds() { value } else { value | 3 << 11 }
}

/// The register that comes with a feature added to a part that has not got it, where one does.
pub const ADDED: &[MsrRow] = &[
    SPEC_CTRL,
    PRED_CMD,
    FLUSH_CMD,
    CORE_CAPABILITIES,
    UMWAIT_CONTROL,
    MsrRow::storage(IA32_ENERGY_PERF_BIAS, "IA32_ENERGY_PERF_BIAS", 0, 0xF),
];
