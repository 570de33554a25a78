//! P6: family 6, model 8, stepping 3 (Coppermine), a 32-bit part.
//!
//! # Theory
//! [`SILICON`] is what a Pentium III at 733 MHz answers (`resources/cpuid/pentium-iii-733.txt` has the dump and where it comes from).
//! The MSRs are those of SDM Vol. 4 "MSRs In P6 Family Processors".
//!
//! # What the part does not have
//! Long mode, NX and SYSCALL, so no IA32_EFER; leaf 80000000H, so no brand string and 36 physical address bits by default;
//! SSE2, CLFLUSH, XSAVE, IA32_MISC_ENABLE, x2APIC, an invariant TSC. WRMSR writes the low half of the TSC only.

use super::msrs::{self, BANK_REGISTERS, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, Difference, MsrRow, UnitCaps, leaf, policy};
use crate::cpuid::Register;
use crate::msr::*;
use crate::pmu::{PmuCaps, events};
use crate::{debugctl, lbr};

/// Intel Pentium III (Coppermine).
pub const P6: CpuModel = CpuModel {
    name: "p6",
    description: "Intel Pentium III 733 MHz (Coppermine, 1999): 32 bits, SSE, PAE",
    // 5.5 times the bus clock.
    tsc_khz: 11 * BUS_KHZ / 2,
    apic_timer_khz: BUS_KHZ,
    microcode: MICROCODE,
    silicon: &SILICON,
    cpuid: &CPUID,
    adjustments: ADJUSTMENTS,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::P6),
        lbr: Some(lbr::P6),
        pmu: Some(PmuCaps {
            general: 2,
            general_width: 40,
            select: 0xFFDF_FFFF,
            reference: 1,
            slots: 1,
            events: &[events::P6],
            ..PmuCaps::NONE
        }),
        ..UnitCaps::NONE
    },
    ..CpuModel::NONE
};

/// The bus clock, 133.33 MHz.
const BUS_KHZ: u32 = 133_333;
const MICROCODE: u32 = 0x13;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, ADJUSTMENTS);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 4] = [
    leaf(0x0, [0x0000_0003, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to 3
    leaf(0x1, [0x0000_0683, 0x0000_0002, 0, 0x0387_FBFF]),           // signature, features
    leaf(0x2, [0x0302_0101, 0, 0, 0x0C04_0882]),                     // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
];

/// Where the guest's part departs from the policy: with the serial number disabled there is no leaf 3.
const ADJUSTMENTS: &[Difference] = &[Difference {
    leaf: 0x0,
    subleaf: 0,
    register: Register::Eax,
    clear: 0x1,
    set: 0,
    feature: None,
    reason: "no leaf 3: the serial number is disabled",
}];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

const PARTS: &[&[MsrRow]] = &[
    &msrs::mtrrs::<16>(36),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &msrs::identity(0, MICROCODE),
    // Banks 3 and 4 stand in the other order in the manual: MC4 at 40CH, MC3 at 410H.
    &msrs::banks_of_p6::<{ 5 * BANK_REGISTERS }>(),
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    MsrRow::read_only(IA32_P5_MC_ADDR, "IA32_P5_MC_ADDR", 0),
    MsrRow::read_only(IA32_P5_MC_TYPE, "IA32_P5_MC_TYPE", 0),
    // The pins of the dumped part, ratio 5.5 (25:22); error checks (4:1) and read-only write-through (26) can be written.
    MsrRow::storage(MSR_EBL_CR_POWERON, "MSR_EBL_CR_POWERON", 0xC514_0000, 0x0400_001E),
    // Streaming buffers off (30), LOCK# off (31).
    MsrRow::storage(MSR_TEST_CTRL, "MSR_TEST_CTRL", 0, 0xC000_0000),
    // Eight variable ranges (7:0), fixed ranges (8), write combining (10).
    MsrRow::read_only(IA32_MTRRCAP, "IA32_MTRRCAP", 0x508),
    // The serial number is disabled (21), which only a reset undoes.
    MsrRow::storage(MSR_BBL_CR_CTL, "MSR_BBL_CR_CTL", 0x20_0000, 0),
    // The level-2 cache of the dumped part: on (8), as firmware leaves it.
    MsrRow::storage(MSR_BBL_CR_CTL3, "MSR_BBL_CR_CTL3", 0x0074_27E1, 0),
    // Five banks and the global control (8).
    MsrRow::read_only(IA32_MCG_CAP, "IA32_MCG_CAP", 0x105),
    MsrRow::storage(IA32_MCG_STATUS, "IA32_MCG_STATUS", 0, 0),
    MsrRow::storage(IA32_MCG_CTL, "IA32_MCG_CTL", 0, !0),
    // Fast strings (2) on.
    MsrRow::storage(ROB_CR_BKUPTMPDR6, "ROB_CR_BKUPTMPDR6", 0x4, 0x4),
];
