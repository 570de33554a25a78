//! NetBurst: family 0FH, model 2, stepping 9 (Northwood), a 32-bit part.
//!
//! # Theory
//! [`SILICON`] is what a Pentium 4 at 2.80 GHz answers (`resources/cpuid/pentium-4-2800.txt` has the dump and where it comes from).
//! The MSRs are those of SDM Vol. 4 "MSRs In the Pentium 4 and Intel Xeon Processors", column "0, 1, 2".
//!
//! # What the part does not have
//! Long mode, NX, SYSCALL; 36 physical address bits by default; leaf 4, x2APIC, an invariant TSC; IA32_PERF_STATUS, which came
//! with model 3. That model (Prescott) has long mode in its later steppings and 16 branch pairs at 680H and 6C0H: it would be
//! a model of its own.

use super::msrs::{self, BANK_REGISTERS, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy};
use crate::ds::{DsCaps, PebsCaps};
use crate::msr::*;
use crate::pmu::PmuCaps;
use crate::{debugctl, lbr};

/// Intel Pentium 4 (Northwood).
pub const NETBURST: CpuModel = CpuModel {
    name: "netburst",
    description: "Intel Pentium 4 2.80 GHz (Northwood, 2002): 32 bits, SSE2, PAE",
    // 14 times the bus clock.
    tsc_khz: 14 * BUS_KHZ,
    apic_timer_khz: BUS_KHZ,
    microcode: MICROCODE,
    silicon: &SILICON,
    cpuid: &CPUID,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::NETBURST),
        lbr: Some(lbr::netburst(SILICON[1].regs[0])),
        ds: Some(DsCaps {
            bts: true,
            bts_predicted: true,
            pebs: Some(PebsCaps::NETBURST),
        }),
        pmu: Some(PmuCaps::NETBURST),
        ..UnitCaps::NONE
    },
    ..CpuModel::NONE
};

/// The bus clock, 200 MHz.
const BUS_KHZ: u32 = 200_000;
const MICROCODE: u32 = 0x2E;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 8] = [
    leaf(0x0, [0x0000_0002, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to 2
    leaf(0x1, [0x0000_0F29, 0x0002_0809, 0x0000_4400, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x665B_5001, 0, 0, 0x007B_7040]),                     // TLB and cache descriptors
    leaf(0x8000_0000, [0x8000_0004, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0, 0]),
    // "              Intel(R) Pentium(R) 4 CPU 2.80GHz"
    leaf(0x8000_0002, [0x2020_2020, 0x2020_2020, 0x2020_2020, 0x6E49_2020]),
    leaf(0x8000_0003, [0x286C_6574, 0x5020_2952, 0x6974_6E65, 0x5228_6D75]),
    leaf(0x8000_0004, [0x2034_2029, 0x2055_5043, 0x3038_2E32, 0x007A_4847]),
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

const PARTS: &[&[MsrRow]] = &[
    &msrs::mtrrs::<16>(36),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &msrs::identity(2, MICROCODE),
    &msrs::banks::<{ 4 * BANK_REGISTERS }>(),
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    MsrRow::read_only(IA32_P5_MC_ADDR, "IA32_P5_MC_ADDR", 0),
    MsrRow::read_only(IA32_P5_MC_TYPE, "IA32_P5_MC_TYPE", 0),
    // The pins of the dumped part.
    MsrRow::read_only(MSR_EBL_CR_POWERON, "MSR_EBC_HARD_POWERON", 0x80),
    MsrRow::storage(MSR_EBC_SOFT_POWERON, "MSR_EBC_SOFT_POWERON", 0, 0x7F),
    // Ratio 14 (31:24), bus of 200 MHz (18:16 is 2).
    MsrRow::read_only(MSR_EBC_FREQUENCY_ID, "MSR_EBC_FREQUENCY_ID", 0x0E12_000E),
    // Eight variable ranges (7:0), fixed ranges (8), write combining (10).
    MsrRow::read_only(IA32_MTRRCAP, "IA32_MTRRCAP", 0x508),
    // Four banks; no global control, and no extended state (9), which would bring 180H on.
    MsrRow::read_only(IA32_MCG_CAP, "IA32_MCG_CAP", 0x4),
    MsrRow::storage(IA32_MCG_STATUS, "IA32_MCG_STATUS", 0, 0),
    MsrRow::storage(IA32_CLOCK_MODULATION, "IA32_CLOCK_MODULATION", 0, 0x1E),
    MsrRow::storage(IA32_THERM_INTERRUPT, "IA32_THERM_INTERRUPT", 0, 0x3),
    MsrRow::storage(IA32_THERM_STATUS, "IA32_THERM_STATUS", 0, 0x2),
    // Fast strings on (0); no third-level cache (6); counters (7), branch trace storage (11) and PEBS (12) are there. Software may write
    // x87 compatibility (2), TM1 (3), split-lock disable (4), LOCK# suppression (8) and the prefetch queue (9) as well.
    MsrRow::storage(IA32_MISC_ENABLE, "IA32_MISC_ENABLE", 0xC1, 0x35D),
];
