//! Alder Lake, a performance core (Golden Cove): family 6, model 97H, stepping 2.
//!
//! # Theory
//! [`SILICON`] is what a performance core of a Core i9-12900K answers (`resources/cpuid/core-i9-12900k.txt` has the dump and where it comes
//! from). The MSRs are those of SDM Vol. 4 "MSRs In 12th Generation Intel Core Processor Family". All cores of the machine are
//! performance cores, so it is no hybrid part.

use super::msrs::{self, BANK_REGISTERS, COMMON, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::ds::{DsCaps, PebsCaps, PebsFormat};
use crate::msr::*;
use crate::pmu::{PmuCaps, events};
use crate::pt::PtCaps;
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// A performance core of an Intel Core i9-12900K (Alder Lake-S).
pub const ALDERLAKE: CpuModel = CpuModel {
    name: "alderlake",
    description: "Intel Core i9-12900K performance core (Alder Lake-S, 2021): x86-64-v3, SHA, architectural LBR, PT",
    // Leaf 15H: 166 to 2.
    tsc_khz: 83 * CRYSTAL_KHZ,
    apic_timer_khz: CRYSTAL_KHZ,
    microcode: MICROCODE,
    silicon: &SILICON,
    cpuid: &CPUID,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::ARCHITECTURAL),
        lbr: Some(lbr::ARCHITECTURAL),
        ds: Some(DsCaps {
            bts: true,
            bts_predicted: true,
            pebs: Some(PebsCaps {
                format: PebsFormat::Adaptive,
                enable: 0xF_0000_00FF,
                resets: 12,
                load_latency: true,
                cache_latency: true,
                frontend: 0x007F_FFFF,
                data_cfg: 0xFF00_000F,
                qualified: true,
                any_event: true,
            }),
        }),
        pmu: Some(PmuCaps {
            version: 5,
            // Leaf 0AH shows what both kinds of cores have; a performance core has eight and four, and MSR_PERF_METRICS.
            general: 8,
            general_width: 48,
            fixed: 4,
            fixed_width: 48,
            architectural: 0x7F,
            capabilities: Some(0xF4C0),
            select: 0x4_FFDF_FFFF,
            offcore: [0x3F_FFFF_FFFF, 0x3F_FFFF_FFFF],
            reference: 83,
            slots: 6,
            events: &[events::GOLDEN_COVE, events::HASWELL, events::SUNNY_COVE_BRANCHES],
            ..PmuCaps::NONE
        }),
        pt: PtCaps::of(&SILICON, 83 * CRYSTAL_KHZ),
    },
    vmx: Some(VMX),
    ..CpuModel::NONE
};

/// The crystal of leaf 15H, 38.4 MHz, which drives the APIC timer.
const CRYSTAL_KHZ: u32 = 38_400;
/// Machine-check banks. IA32_MCG_CAP of this part is not in any public record that we know; the count is a plausible one.
const BANKS: usize = 14;
const MICROCODE: u32 = 0x2E;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 70] = [
    leaf(0x0, [0x0000_0020, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to 20H
    leaf(0x1, [0x0009_0672, 0x0080_0800, 0x7FFA_FBFF, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x00FE_FF01, 0x0000_00F0, 0, 0]),                     // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
    subleaf(0x4, 0, [0xFC00_4121, 0x02C0_003F, 0x0000_003F, 0]),     // L1D 48 KiB, 12 ways
    subleaf(0x4, 1, [0xFC00_4122, 0x01C0_003F, 0x0000_003F, 0]),     // L1I 32 KiB, 8 ways
    subleaf(0x4, 2, [0xFC01_C143, 0x0240_003F, 0x0000_07FF, 0]),     // L2 1280 KiB, 10 ways
    subleaf(0x4, 3, [0xFC1F_C163, 0x02C0_003F, 0x0000_9FFF, 0x0000_0004]), // L3 30 MiB, 12 ways
    subleaf(0x4, 4, [0, 0, 0, 0]),                                   // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x1010_2020]), // MONITOR/MWAIT
    leaf(0x6, [0x00DF_CFF7, 0x0000_0002, 0x0000_0409, 0x0000_0003]), // thermal and power
    subleaf(0x7, 0, [0x0000_0001, 0x239C_A7EB, 0x98C0_27AC, 0xFC1C_C410]), // extended features
    subleaf(0x7, 1, [0x0040_0810, 0, 0, 0]),                         // more extended features
    leaf(0x8, [0, 0, 0, 0]),
    leaf(0x9, [0, 0, 0, 0]),
    leaf(0xA, [0x0730_0605, 0, 0x0000_0007, 0x0000_8603]), // performance monitoring, version 5
    subleaf(0xB, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0]), // threads
    subleaf(0xB, 1, [0x0000_0007, 0x0000_0018, 0x0000_0201, 0]), // cores
    leaf(0xC, [0, 0, 0, 0]),
    subleaf(0xD, 0, [0x0000_0207, 0x0000_0340, 0x0000_0A88, 0]), // XCR0 and the area for it
    subleaf(0xD, 1, [0x0000_000F, 0x0000_03D0, 0x0001_9900, 0]), // XSAVE features, IA32_XSS
    subleaf(0xD, 2, [0x0000_0100, 0x0000_0240, 0, 0]),           // AVX
    subleaf(0xD, 8, [0x0000_0080, 0, 0x0000_0001, 0]),           // PT
    subleaf(0xD, 9, [0x0000_0008, 0x0000_0A80, 0, 0]),           // PKRU
    subleaf(0xD, 0xB, [0x0000_0010, 0, 0x0000_0001, 0]),         // CET user
    subleaf(0xD, 0xC, [0x0000_0018, 0, 0x0000_0001, 0]),         // CET supervisor
    subleaf(0xD, 0xF, [0x0000_0328, 0, 0x0000_0001, 0]),         // LBR
    subleaf(0xD, 0x10, [0x0000_0008, 0, 0x0000_0001, 0]),        // HWP
    leaf(0xE, [0, 0, 0, 0]),
    subleaf(0xF, 0, [0, 0, 0, 0]),
    subleaf(0xF, 1, [0, 0, 0, 0]),
    subleaf(0x10, 0, [0, 0x0000_0004, 0, 0]), // allocation
    subleaf(0x10, 1, [0, 0, 0, 0]),
    subleaf(0x10, 2, [0x0000_0009, 0, 0x0000_0004, 0x0000_0007]), // level-2 allocation
    leaf(0x11, [0, 0, 0, 0]),
    subleaf(0x12, 0, [0, 0, 0, 0]),
    subleaf(0x12, 1, [0, 0, 0, 0]),
    leaf(0x13, [0, 0, 0, 0]),
    subleaf(0x14, 0, [0x0000_0001, 0x0000_005F, 0x0000_0007, 0]), // processor trace
    subleaf(0x14, 1, [0x0249_0002, 0x003F_003F, 0, 0]),           // processor trace: encodings
    leaf(0x15, [0x0000_0002, 0x0000_00A6, 0x0249_F000, 0]),       // TSC over crystal: 166/2, crystal 38400000 Hz
    leaf(0x16, [0x0000_0C80, 0x0000_1450, 0x0000_0064, 0]),       // base 3200 MHz, most 5200, bus 100
    subleaf(0x17, 0, [0, 0, 0, 0]),
    subleaf(0x18, 0, [0x0000_0008, 0, 0, 0]), // TLBs
    subleaf(0x18, 1, [0, 0x0008_0001, 0x0000_0020, 0x0000_4022]),
    subleaf(0x18, 2, [0, 0x0008_0006, 0x0000_0004, 0x0000_4022]),
    subleaf(0x18, 3, [0, 0x0010_000F, 0x0000_0001, 0x0000_4125]),
    subleaf(0x18, 4, [0, 0x0004_0001, 0x0000_0010, 0x0000_4024]),
    subleaf(0x18, 5, [0, 0x0004_0006, 0x0000_0008, 0x0000_4024]),
    subleaf(0x18, 6, [0, 0x0008_0008, 0x0000_0001, 0x0000_4124]),
    subleaf(0x18, 7, [0, 0x0008_0007, 0x0000_0080, 0x0000_4043]),
    subleaf(0x18, 8, [0, 0x0008_0009, 0x0000_0080, 0x0000_4043]),
    leaf(0x19, [0x0000_0007, 0x0000_0014, 0x0000_0003, 0]), // key locker
    subleaf(0x1A, 0, [0x4000_0001, 0, 0, 0]),               // hybrid: core type
    subleaf(0x1B, 0, [0x0000_0001, 0x0000_0001, 0, 0]),     // PCONFIG
    leaf(0x1C, [0x4000_000B, 0x0000_0007, 0x0000_0007, 0]), // architectural LBR
    subleaf(0x1D, 0, [0, 0, 0, 0]),
    subleaf(0x1E, 0, [0, 0, 0, 0]),
    subleaf(0x1F, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0]), // threads
    subleaf(0x1F, 1, [0x0000_0007, 0x0000_0018, 0x0000_0201, 0]), // cores
    subleaf(0x20, 0, [0, 0x0000_0001, 0, 0]),                     // HRESET
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0x0000_0121, 0x2C10_0800]),
    // "12th Gen Intel(R) Core(TM) i9-12900K"
    leaf(0x8000_0002, [0x6874_3231, 0x6E65_4720, 0x746E_4920, 0x5228_6C65]),
    leaf(0x8000_0003, [0x6F43_2029, 0x5428_6572, 0x6920_294D, 0x3231_2D39]),
    leaf(0x8000_0004, [0x4B30_3039, 0, 0, 0]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0, 0, 0x0500_7040, 0]), // L2 once more
    leaf(0x8000_0007, [0, 0, 0, 0x0000_0100]), // invariant TSC
    leaf(0x8000_0008, [0x0000_302E, 0, 0, 0]), // 46 physical, 48 linear bits
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::ALDERLAKE;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<20>(46),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &COMMON,
    &msrs::RESIDENCIES,
    &msrs::POWER,
    &msrs::identity(2, MICROCODE),
    &msrs::ratios(32, 4),
    &msrs::banks::<{ BANKS * BANK_REGISTERS }>(),
    &msrs::corrected::<BANKS>(),
    &msrs::SPECULATION,
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    msrs::machine_check(BANKS as u64, 0),
    msrs::MISC_FEATURE_ENABLES,
    msrs::UMWAIT_CONTROL,
    // RDCL_NO (0), IBRS_ALL (1), SKIP_L1DFL_VMENTRY (3), MDS_NO (5), IF_PSCHANGE_MC_NO (6), TAA_NO (8), SBDR_SSDP_NO (13),
    // FBSDP_NO (14), PSDP_NO (15).
    msrs::arch_capabilities(0xE16B),
    msrs::CORE_CAPABILITIES,
    // Deeper states of the package than other parts have, which are never entered either.
    MsrRow::read_only(MSR_PKG_C8_RESIDENCY, "MSR_PKG_C8_RESIDENCY", 0),
    MsrRow::read_only(MSR_PKG_C9_RESIDENCY, "MSR_PKG_C9_RESIDENCY", 0),
    MsrRow::read_only(MSR_PKG_C10_RESIDENCY, "MSR_PKG_C10_RESIDENCY", 0),
    MsrRow::storage(MSR_PKGC8_IRTL, "MSR_PKGC8_IRTL", 0, 0x9FFF),
    MsrRow::storage(MSR_PKGC9_IRTL, "MSR_PKGC9_IRTL", 0, 0x9FFF),
    MsrRow::storage(MSR_PKGC10_IRTL, "MSR_PKGC10_IRTL", 0, 0x9FFF),
    // Times in C0 by package, which turbostat takes for granted: not measured, like energies.
    MsrRow::read_only(MSR_WEIGHTED_CORE_C0, "MSR_WEIGHTED_CORE_C0", 0),
    MsrRow::read_only(MSR_ANY_CORE_C0, "MSR_ANY_CORE_C0", 0),
    MsrRow::read_only(MSR_ANY_GFXE_C0, "MSR_ANY_GFXE_C0", 0),
    MsrRow::read_only(MSR_CORE_GFXE_OVERLAP_C0, "MSR_CORE_GFXE_OVERLAP_C0", 0),
];
