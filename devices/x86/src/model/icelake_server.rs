//! Ice Lake-SP: family 6, model 6AH, stepping 6.
//!
//! # Theory
//! [`SILICON`] is what a Xeon Platinum 8351N answers (`resources/cpuid/xeon-platinum-8351n.txt` has the dump and where it comes from).
//! The MSRs are those of SDM Vol. 4 "MSRs In 3rd Generation Intel Xeon Scalable Processor Family". The part does not enumerate
//! its crystal's frequency in leaf 15H; it follows from leaf 16H.

use super::msrs::{self, BANK_REGISTERS, COMMON, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::ds::{DsCaps, PebsCaps, PebsFormat};
use crate::msr::*;
use crate::pmu::{PmuCaps, events};
use crate::pt::PtCaps;
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// Intel Xeon Platinum 8351N (Ice Lake-SP).
pub const ICELAKE_SERVER: CpuModel = CpuModel {
    name: "icelake-server",
    description: "Intel Xeon Platinum 8351N (Ice Lake-SP, 2021): x86-64-v4, SHA, UMIP, LA57, PT, RDT",
    // Leaf 15H: 192 to 2.
    tsc_khz: 96 * CRYSTAL_KHZ,
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
                format: PebsFormat::Adaptive,
                enable: 0xF_0000_00FF,
                resets: 12,
                load_latency: true,
                cache_latency: false,
                frontend: 0x007F_FFFF,
                data_cfg: 0xFF00_000F,
                qualified: true,
                any_event: true,
            }),
        }),
        pmu: Some(PmuCaps {
            version: 5,
            general: 8,
            general_width: 48,
            fixed: 4,
            fixed_width: 48,
            architectural: 0xFF,
            capabilities: Some(0xF4C0),
            select: 0x4_FFDF_FFFF,
            offcore: [0x3F_FFFF_FFFF, 0x3F_FFFF_FFFF],
            reference: 96,
            slots: 5,
            events: &[
                events::HASWELL,
                events::SUNNY_COVE_BRANCHES,
                events::SKYLAKE_CACHES,
                events::SLOTS,
                events::TRANSACTIONS,
            ],
            ..PmuCaps::NONE
        }),
        pt: PtCaps::of(&SILICON, 96 * CRYSTAL_KHZ),
    },
    vmx: Some(VMX),
    ..CpuModel::NONE
};

/// The crystal of leaf 15H, 25 MHz, which drives the APIC timer.
const CRYSTAL_KHZ: u32 = 25_000;
/// Machine-check banks. IA32_MCG_CAP of this part is not in any public record that we know; the count is a plausible one.
const BANKS: usize = 28;
const MICROCODE: u32 = 0x0D00_03A5;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 61] = [
    leaf(0x0, [0x0000_001B, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to 1BH
    leaf(0x1, [0x0006_06A6, 0x0080_0800, 0x7FFE_FBFF, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x00FE_FF01, 0x0000_00F0, 0, 0]),                     // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
    subleaf(0x4, 0, [0xFC00_4121, 0x02C0_003F, 0x0000_003F, 0]),     // L1D 48 KiB, 12 ways
    subleaf(0x4, 1, [0xFC00_4122, 0x01C0_003F, 0x0000_003F, 0]),     // L1I 32 KiB, 8 ways
    subleaf(0x4, 2, [0xFC00_4143, 0x04C0_003F, 0x0000_03FF, 0]),     // L2 1280 KiB, 20 ways
    subleaf(0x4, 3, [0xFC1F_C163, 0x02C0_003F, 0x0001_1FFF, 0x0000_0004]), // L3 54 MiB, 12 ways
    subleaf(0x4, 4, [0, 0, 0, 0]),                                   // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x0000_1020]), // MONITOR/MWAIT
    leaf(0x6, [0x0000_0077, 0x0000_0002, 0x0000_0009, 0]),           // thermal and power
    subleaf(0x7, 0, [0, 0xF3BF_BFFF, 0x4041_7F4E, 0xBC04_0412]),     // extended features
    leaf(0x8, [0, 0, 0, 0]),
    leaf(0x9, [0, 0, 0, 0]),
    leaf(0xA, [0x0830_0805, 0, 0x0000_000F, 0x0000_8604]), // performance monitoring, version 5
    subleaf(0xB, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0]), // threads
    subleaf(0xB, 1, [0x0000_0007, 0x0000_0048, 0x0000_0201, 0]), // cores
    leaf(0xC, [0, 0, 0, 0]),
    subleaf(0xD, 0, [0x0000_02E7, 0x0000_0A80, 0x0000_0A88, 0]), // XCR0 and the area for it
    subleaf(0xD, 1, [0x0000_000F, 0x0000_0A00, 0x0000_0100, 0]), // XSAVE features, IA32_XSS
    subleaf(0xD, 2, [0x0000_0100, 0x0000_0240, 0, 0]),           // AVX
    subleaf(0xD, 5, [0x0000_0040, 0x0000_0440, 0, 0]),           // AVX-512 masks
    subleaf(0xD, 6, [0x0000_0200, 0x0000_0480, 0, 0]),           // AVX-512 upper halves
    subleaf(0xD, 7, [0x0000_0400, 0x0000_0680, 0, 0]),           // AVX-512 upper registers
    subleaf(0xD, 8, [0x0000_0080, 0, 0x0000_0001, 0]),           // PT
    subleaf(0xD, 9, [0x0000_0008, 0x0000_0A80, 0, 0]),           // PKRU
    leaf(0xE, [0, 0, 0, 0]),
    subleaf(0xF, 0, [0, 0x0000_011F, 0, 0x0000_0002]), // monitoring: highest RMID
    subleaf(0xF, 1, [0x0000_0008, 0x0001_2000, 0x0000_011F, 0x0000_0007]), // level-3 monitoring
    subleaf(0x10, 0, [0, 0x0000_000A, 0, 0]),          // allocation
    subleaf(0x10, 1, [0x0000_000B, 0x0000_0C00, 0, 0x0000_000E]), // level-3 allocation
    subleaf(0x10, 3, [0x0000_0059, 0, 0x0000_0004, 0x0000_000E]), // memory bandwidth allocation
    leaf(0x11, [0, 0, 0, 0]),
    subleaf(0x12, 0, [0, 0, 0, 0]),
    subleaf(0x12, 1, [0, 0, 0, 0]),
    leaf(0x13, [0, 0, 0, 0]),
    subleaf(0x14, 0, [0x0000_0001, 0x0000_000F, 0x0000_0007, 0]), // processor trace
    subleaf(0x14, 1, [0x0249_0002, 0x003F_1FFF, 0, 0]),           // processor trace: encodings
    leaf(0x15, [0x0000_0002, 0x0000_00C0, 0, 0]),                 // TSC over crystal: 192/2
    leaf(0x16, [0x0000_0960, 0x0000_0DAC, 0x0000_0064, 0]),       // base 2400 MHz, most 3500, bus 100
    subleaf(0x17, 0, [0, 0, 0, 0]),
    subleaf(0x18, 0, [0x0000_0007, 0, 0, 0]), // TLBs
    subleaf(0x18, 1, [0, 0x0008_0007, 0x0000_0001, 0x0000_4122]),
    subleaf(0x18, 2, [0, 0x0010_000F, 0x0000_0001, 0x0000_4125]),
    subleaf(0x18, 3, [0, 0x0004_0001, 0x0000_0010, 0x0000_4024]),
    subleaf(0x18, 4, [0, 0x0004_0006, 0x0000_0008, 0x0000_4024]),
    subleaf(0x18, 5, [0, 0x0008_0008, 0x0000_0001, 0x0000_4124]),
    subleaf(0x18, 6, [0, 0x0008_0007, 0x0000_0080, 0x0000_4043]),
    subleaf(0x18, 7, [0, 0x0008_0009, 0x0000_0080, 0x0000_4043]),
    leaf(0x19, [0, 0, 0, 0]),
    subleaf(0x1A, 0, [0, 0, 0, 0]),
    subleaf(0x1B, 0, [0x0000_0001, 0x0000_0001, 0, 0]), // PCONFIG
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0x0000_0121, 0x2C10_0800]),
    // "Intel(R) Xeon(R) Platinum 8351N CPU @ 2.40GHz"
    leaf(0x8000_0002, [0x6574_6E49, 0x2952_286C, 0x6F65_5820, 0x2952_286E]),
    leaf(0x8000_0003, [0x616C_5020, 0x756E_6974, 0x3338_206D, 0x204E_3135]),
    leaf(0x8000_0004, [0x2055_5043, 0x2E32_2040, 0x4847_3034, 0x0000_007A]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0, 0, 0x0100_6040, 0]),           // L2 once more
    leaf(0x8000_0007, [0, 0, 0, 0x0000_0100]),           // invariant TSC
    leaf(0x8000_0008, [0x0000_392E, 0x0000_0200, 0, 0]), // 46 physical, 57 linear bits
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::ICELAKE_SERVER;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<20>(46),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &COMMON,
    &msrs::RESIDENCIES,
    &msrs::POWER,
    &msrs::identity(0, MICROCODE),
    &msrs::ratios(24, 8),
    &msrs::banks::<{ BANKS * BANK_REGISTERS }>(),
    &msrs::corrected::<BANKS>(),
    &msrs::SPECULATION,
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    msrs::MBA_CONFIGURATION,
    msrs::machine_check(BANKS as u64, 1 << 24),
    msrs::MISC_FEATURE_ENABLES,
    // RDCL_NO (0), IBRS_ALL (1), SKIP_L1DFL_VMENTRY (3), MDS_NO (5), IF_PSCHANGE_MC_NO (6), FB_CLEAR (17). The part has
    // IA32_TSX_CTRL (7), MISC_PACKAGE_CTLS (10) and ENERGY_FILTERING_CTL (11) too, whose registers are not modelled.
    msrs::arch_capabilities(0x2_006B),
    // The numbers of active cores that the ratios of 1ADH hold for: eight groups.
    MsrRow::read_only(
        MSR_TURBO_RATIO_LIMIT1,
        "MSR_TURBO_RATIO_LIMIT_CORES",
        0x2420_1C18_100C_0804,
    ),
];
