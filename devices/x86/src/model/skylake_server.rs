//! Skylake-SP: family 6, model 55H, stepping 4.
//!
//! # Theory
//! [`SILICON`] is what a Xeon Platinum 8160 answers (`resources/cpuid/xeon-platinum-8160.txt` has the dump and where it comes from).
//! The MSRs are those of SDM Vol. 4 "MSRs In Intel Xeon Scalable Processor Family". The microcode, 2007006H, has speculation
//! control (200003CH and before are refused by Linux) and PEBS that Linux trusts (2000014H and later). The part does not
//! enumerate its crystal's frequency in leaf 15H; it follows from leaf 16H.

use super::msrs::{self, BANK_REGISTERS, COMMON, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::ds::{DsCaps, PebsCaps, PebsFormat};
use crate::msr::*;
use crate::pmu::{PmuCaps, events};
use crate::pt::PtCaps;
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// Intel Xeon Platinum 8160 (Skylake-SP).
pub const SKYLAKE_SERVER: CpuModel = CpuModel {
    name: "skylake-server",
    description: "Intel Xeon Platinum 8160 (Skylake-SP, 2017): x86-64-v4, PKU, PT, RDT",
    // Leaf 15H: 168 to 2.
    tsc_khz: 84 * CRYSTAL_KHZ,
    apic_timer_khz: CRYSTAL_KHZ,
    microcode: MICROCODE,
    silicon: &SILICON,
    cpuid: &CPUID,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::SKYLAKE),
        lbr: Some(lbr::SKYLAKE),
        ds: Some(DsCaps {
            bts: true,
            bts_predicted: true,
            pebs: Some(PebsCaps {
                format: PebsFormat::Skylake,
                enable: 0xF_0000_000F,
                resets: 4,
                load_latency: true,
                frontend: 0x007F_FFFF,
                qualified: true,
                ..PebsCaps::NONE
            }),
        }),
        pmu: Some(PmuCaps {
            version: 4,
            general: 4,
            general_width: 48,
            fixed: 3,
            fixed_width: 48,
            architectural: 0x7F,
            capabilities: Some(0x33C0),
            select: 0xFFFF_FFFF,
            any_thread: true,
            offcore: [0x3F_FFFF_8FFF, 0x3F_FFFF_8FFF],
            reference: 84,
            slots: 4,
            events: &[
                events::HASWELL,
                events::BRANCHES,
                events::SKYLAKE_CACHES,
                events::SLOTS,
                events::TRANSACTIONS,
            ],
            ..PmuCaps::NONE
        }),
        pt: PtCaps::of(&SILICON, 84 * CRYSTAL_KHZ),
    },
    vmx: Some(VMX),
    ..CpuModel::NONE
};

/// The crystal of leaf 15H, 25 MHz, which drives the APIC timer.
const CRYSTAL_KHZ: u32 = 25_000;
/// Machine-check banks.
const BANKS: usize = 20;
const MICROCODE: u32 = 0x0200_7006;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 51] = [
    leaf(0x0, [0x0000_0016, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to 16H
    leaf(0x1, [0x0005_0654, 0x0040_0800, 0x7FFE_FBFF, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x7603_6301, 0x00F0_B5FF, 0, 0x00C3_0000]),           // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
    subleaf(0x4, 0, [0x7C00_4121, 0x01C0_003F, 0x0000_003F, 0]),     // L1D 32 KiB, 8 ways
    subleaf(0x4, 1, [0x7C00_4122, 0x01C0_003F, 0x0000_003F, 0]),     // L1I 32 KiB, 8 ways
    subleaf(0x4, 2, [0x7C00_4143, 0x03C0_003F, 0x0000_03FF, 0]),     // L2 1 MiB, 16 ways
    subleaf(0x4, 3, [0x7C0F_C163, 0x0280_003F, 0x0000_BFFF, 0x0000_0004]), // L3 33 MiB, 11 ways
    subleaf(0x4, 4, [0, 0, 0, 0]),                                   // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x0000_2020]), // MONITOR/MWAIT
    leaf(0x6, [0x0000_0EF5, 0x0000_0002, 0x0000_0009, 0]),           // thermal and power
    subleaf(0x7, 0, [0, 0xD39F_FFFB, 0x0000_0008, 0x9C00_2400]),     // extended features
    leaf(0x8, [0, 0, 0, 0]),
    leaf(0x9, [0, 0, 0, 0]),
    leaf(0xA, [0x0730_0404, 0, 0, 0x0000_0603]), // performance monitoring, version 4
    subleaf(0xB, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0]), // threads
    subleaf(0xB, 1, [0x0000_0006, 0x0000_0030, 0x0000_0201, 0]), // cores
    leaf(0xC, [0, 0, 0, 0]),
    subleaf(0xD, 0, [0x0000_02FF, 0x0000_0A80, 0x0000_0A88, 0]), // XCR0 and the area for it
    subleaf(0xD, 1, [0x0000_000F, 0x0000_0A80, 0x0000_0100, 0]), // XSAVE features, IA32_XSS
    subleaf(0xD, 2, [0x0000_0100, 0x0000_0240, 0, 0]),           // AVX
    subleaf(0xD, 3, [0x0000_0040, 0x0000_03C0, 0, 0]),           // MPX bounds
    subleaf(0xD, 4, [0x0000_0040, 0x0000_0400, 0, 0]),           // MPX configuration
    subleaf(0xD, 5, [0x0000_0040, 0x0000_0440, 0, 0]),           // AVX-512 masks
    subleaf(0xD, 6, [0x0000_0200, 0x0000_0480, 0, 0]),           // AVX-512 upper halves
    subleaf(0xD, 7, [0x0000_0400, 0x0000_0680, 0, 0]),           // AVX-512 upper registers
    subleaf(0xD, 8, [0x0000_0080, 0, 0x0000_0001, 0]),           // PT
    subleaf(0xD, 9, [0x0000_0008, 0x0000_0A80, 0, 0]),           // PKRU
    leaf(0xE, [0, 0, 0, 0]),
    subleaf(0xF, 0, [0, 0x0000_00BF, 0, 0x0000_0002]), // monitoring: highest RMID
    subleaf(0xF, 1, [0, 0x0001_8000, 0x0000_00BF, 0x0000_0007]), // level-3 monitoring
    subleaf(0x10, 0, [0, 0x0000_000A, 0, 0]),          // allocation
    subleaf(0x10, 1, [0x0000_000A, 0x0000_0600, 0x0000_0004, 0x0000_000F]), // level-3 allocation
    subleaf(0x10, 3, [0x0000_0059, 0, 0x0000_0004, 0x0000_0007]), // memory bandwidth allocation
    leaf(0x11, [0, 0, 0, 0]),
    subleaf(0x12, 0, [0, 0, 0, 0]),
    subleaf(0x12, 1, [0, 0, 0, 0]),
    leaf(0x13, [0, 0, 0, 0]),
    subleaf(0x14, 0, [0x0000_0001, 0x0000_000F, 0x0000_0007, 0]), // processor trace
    subleaf(0x14, 1, [0x0249_0002, 0x003F_3FFF, 0, 0]),           // processor trace: encodings
    leaf(0x15, [0x0000_0002, 0x0000_00A8, 0, 0]),                 // TSC over crystal: 168/2
    leaf(0x16, [0x0000_0834, 0x0000_0E74, 0x0000_0064, 0]),       // base 2100 MHz, most 3700, bus 100
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0x0000_0121, 0x2C10_0800]),
    // "Intel(R) Xeon(R) Platinum 8160 CPU @ 2.10GHz"
    leaf(0x8000_0002, [0x6574_6E49, 0x2952_286C, 0x6F65_5820, 0x2952_286E]),
    leaf(0x8000_0003, [0x616C_5020, 0x756E_6974, 0x3138_206D, 0x4320_3036]),
    leaf(0x8000_0004, [0x4020_5550, 0x312E_3220, 0x7A48_4730, 0]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0, 0, 0x0100_6040, 0]), // L2 once more
    leaf(0x8000_0007, [0, 0, 0, 0x0000_0100]), // invariant TSC
    leaf(0x8000_0008, [0x0000_302E, 0, 0, 0]), // 46 physical, 48 linear bits
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::SKYLAKE_SERVER;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<20>(46),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &COMMON,
    &msrs::RESIDENCIES,
    &msrs::POWER,
    &msrs::identity(0, MICROCODE),
    &msrs::ratios(21, 8),
    &msrs::banks::<{ BANKS * BANK_REGISTERS }>(),
    &msrs::corrected::<BANKS>(),
    &msrs::SPECULATION,
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    msrs::machine_check(BANKS as u64, 1 << 24),
    msrs::MISC_FEATURE_ENABLES,
    // The numbers of active cores that the ratios of 1ADH hold for: eight groups.
    MsrRow::read_only(
        MSR_TURBO_RATIO_LIMIT1,
        "MSR_TURBO_RATIO_LIMIT_CORES",
        0x1814_100C_0804_0201,
    ),
];
