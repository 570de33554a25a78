//! Sapphire Rapids: family 6, model 8FH, stepping 8.
//!
//! # Theory
//! [`SILICON`] is a Xeon Platinum 8480+ (`resources/cpuid/xeon-platinum-8480plus.txt` says what comes from where). The MSRs are those of
//! SDM Vol. 4 "MSRs In 4th Generation Intel Xeon Scalable Processor Family".

use super::msrs::{self, BANK_REGISTERS, COMMON, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::ds::{DsCaps, PebsCaps, PebsFormat};
use crate::msr::*;
use crate::pmu::{PmuCaps, events};
use crate::pt::PtCaps;
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// Intel Xeon Platinum 8480+ (Sapphire Rapids).
pub const SAPPHIRERAPIDS: CpuModel = CpuModel {
    name: "sapphirerapids",
    description: "Intel Xeon Platinum 8480+ (Sapphire Rapids, 2023): x86-64-v4, AMX, architectural LBR, PT, RDT",
    // Leaf 15H: 160 to 2.
    tsc_khz: 80 * CRYSTAL_KHZ,
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
            general: 8,
            general_width: 48,
            fixed: 4,
            fixed_width: 48,
            architectural: 0xFF,
            capabilities: Some(0xF4C0),
            select: 0x4_FFDF_FFFF,
            offcore: [0x3F_FFFF_FFFF, 0x3F_FFFF_FFFF],
            reference: 80,
            slots: 6,
            events: &[
                events::GOLDEN_COVE,
                events::HASWELL,
                events::SUNNY_COVE_BRANCHES,
                events::TRANSACTIONS,
            ],
            ..PmuCaps::NONE
        }),
        pt: PtCaps::of(&SILICON, 80 * CRYSTAL_KHZ),
    },
    vmx: Some(VMX),
    ..CpuModel::NONE
};

/// The crystal of leaf 15H, 25 MHz, which drives the APIC timer.
const CRYSTAL_KHZ: u32 = 25_000;
/// Machine-check banks.
const BANKS: usize = 21;
const MICROCODE: u32 = 0x2B00_04D0;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 77] = [
    leaf(0x0, [0x0000_001F, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to 1FH
    leaf(0x1, [0x0008_06F8, 0x0080_0800, 0x7FFE_FBFF, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x00FE_FF01, 0x0000_00F0, 0, 0]),                     // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
    subleaf(0x4, 0, [0xFC00_4121, 0x02C0_003F, 0x0000_003F, 0]),     // L1D 48 KiB, 12 ways
    subleaf(0x4, 1, [0xFC00_4122, 0x01C0_003F, 0x0000_003F, 0]),     // L1I 32 KiB, 8 ways
    subleaf(0x4, 2, [0xFC00_4143, 0x03C0_003F, 0x0000_07FF, 0]),     // L2 2 MiB, 16 ways
    subleaf(0x4, 3, [0xFC1F_C163, 0x0380_003F, 0x0001_BFFF, 0x0000_0004]), // L3 105 MiB, 15 ways
    subleaf(0x4, 4, [0, 0, 0, 0]),                                   // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x0000_1020]), // MONITOR/MWAIT
    leaf(0x6, [0x004D_0EF7, 0x0000_0002, 0x0000_0009, 0x0037_0003]), // thermal and power
    subleaf(0x7, 0, [0x0000_0001, 0xF3BF_BFEF, 0xFB41_7FFE, 0xFFDD_4432]), // extended features
    subleaf(0x7, 1, [0x0000_1C30, 0, 0, 0]),                         // more extended features
    leaf(0x8, [0, 0, 0, 0]),
    leaf(0x9, [0, 0, 0, 0]),
    leaf(0xA, [0x0830_0805, 0, 0x0000_000F, 0x0000_8604]), // performance monitoring, version 5
    subleaf(0xB, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0]), // threads
    subleaf(0xB, 1, [0x0000_0007, 0x0000_0070, 0x0000_0201, 0]), // cores
    leaf(0xC, [0, 0, 0, 0]),
    subleaf(0xD, 0, [0x0006_02E7, 0x0000_2B00, 0x0000_2B00, 0]), // XCR0 and the area for it
    subleaf(0xD, 1, [0x0000_001F, 0x0000_2D00, 0x0000_DD00, 0]), // XSAVE features, IA32_XSS
    subleaf(0xD, 2, [0x0000_0100, 0x0000_0240, 0, 0]),           // AVX
    subleaf(0xD, 5, [0x0000_0040, 0x0000_0440, 0, 0]),           // AVX-512 masks
    subleaf(0xD, 6, [0x0000_0200, 0x0000_0480, 0, 0]),           // AVX-512 upper halves
    subleaf(0xD, 7, [0x0000_0400, 0x0000_0680, 0, 0]),           // AVX-512 upper registers
    subleaf(0xD, 8, [0x0000_0080, 0, 0x0000_0001, 0]),           // PT
    subleaf(0xD, 9, [0x0000_0008, 0x0000_0A80, 0, 0]),           // PKRU
    subleaf(0xD, 0xA, [0x0000_0008, 0, 0x0000_0001, 0]),         // PASID
    subleaf(0xD, 0xB, [0x0000_0010, 0, 0x0000_0001, 0]),         // CET user
    subleaf(0xD, 0xC, [0x0000_0018, 0, 0x0000_0001, 0]),         // CET supervisor
    subleaf(0xD, 0xE, [0x0000_0030, 0, 0x0000_0001, 0]),         // UINTR
    subleaf(0xD, 0xF, [0x0000_0328, 0, 0x0000_0001, 0]),         // LBR
    subleaf(0xD, 0x11, [0x0000_0040, 0x0000_0AC0, 0x0000_0002, 0]), // AMX tile configuration
    subleaf(0xD, 0x12, [0x0000_2000, 0x0000_0B00, 0x0000_0006, 0]), // AMX tiles
    leaf(0xE, [0, 0, 0, 0]),
    subleaf(0xF, 0, [0, 0x0000_01BF, 0, 0x0000_0002]), // monitoring: highest RMID
    subleaf(0xF, 1, [0x0000_0008, 0x0001_C000, 0x0000_01BF, 0x0000_0007]), // level-3 monitoring
    subleaf(0x10, 0, [0, 0x0000_000E, 0, 0]),          // allocation
    subleaf(0x10, 1, [0x0000_000E, 0x0000_6000, 0x0000_0004, 0x0000_000E]), // level-3 allocation
    subleaf(0x10, 2, [0x0000_000F, 0, 0x0000_0004, 0x0000_0007]), // level-2 allocation
    subleaf(0x10, 3, [0x0000_0059, 0, 0x0000_0004, 0x0000_000E]), // memory bandwidth allocation
    leaf(0x11, [0, 0, 0, 0]),
    subleaf(0x12, 0, [0, 0, 0, 0]),
    leaf(0x13, [0, 0, 0, 0]),
    subleaf(0x14, 0, [0x0000_0001, 0x0000_005F, 0x0000_0007, 0]), // processor trace
    subleaf(0x14, 1, [0x0249_0002, 0x003F_003F, 0, 0]),           // processor trace: encodings
    leaf(0x15, [0x0000_0002, 0x0000_00A0, 0x017D_7840, 0]),       // TSC over crystal: 160/2, crystal 25000000 Hz
    leaf(0x16, [0x0000_07D0, 0x0000_0ED8, 0x0000_0064, 0]),       // base 2000 MHz, most 3800, bus 100
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
    leaf(0x19, [0, 0, 0, 0]),
    subleaf(0x1A, 0, [0, 0, 0, 0]),
    subleaf(0x1B, 0, [0x0000_0001, 0x0000_0001, 0, 0]),     // PCONFIG
    leaf(0x1C, [0x4000_000B, 0x0000_0007, 0x0000_0007, 0]), // architectural LBR
    subleaf(0x1D, 0, [0x0000_0001, 0, 0, 0]),               // AMX tiles
    subleaf(0x1D, 1, [0x0400_2000, 0x0008_0040, 0x0000_0010, 0]), // AMX tiles
    subleaf(0x1E, 0, [0, 0x0000_4010, 0, 0]),               // AMX multiplier
    subleaf(0x1F, 0, [0x0000_0001, 0x0000_0002, 0x0000_0100, 0]), // threads
    subleaf(0x1F, 1, [0x0000_0007, 0x0000_0070, 0x0000_0201, 0]), // cores
    subleaf(0x1F, 2, [0, 0, 0x0000_0002, 0]),               // no more levels
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0x0000_0121, 0x2C10_0800]),
    // "Intel(R) Xeon(R) Platinum 8480+"
    leaf(0x8000_0002, [0x6574_6E49, 0x2952_286C, 0x6F65_5820, 0x2952_286E]),
    leaf(0x8000_0003, [0x616C_5020, 0x756E_6974, 0x3438_206D, 0x002B_3038]),
    leaf(0x8000_0004, [0, 0, 0, 0]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0, 0, 0x0800_7040, 0]),           // L2 once more
    leaf(0x8000_0007, [0, 0, 0, 0x0000_0100]),           // invariant TSC
    leaf(0x8000_0008, [0x0000_3934, 0x0000_0200, 0, 0]), // 52 physical, 57 linear bits
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::SAPPHIRERAPIDS;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<20>(52),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &COMMON,
    &msrs::RESIDENCIES,
    &msrs::POWER,
    &msrs::identity(0, MICROCODE),
    &msrs::ratios(20, 8),
    &msrs::banks::<{ BANKS * BANK_REGISTERS }>(),
    &msrs::corrected::<BANKS>(),
    &msrs::SPECULATION,
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    msrs::machine_check(BANKS as u64, 1 << 24),
    msrs::MISC_FEATURE_ENABLES,
    msrs::UMWAIT_CONTROL,
    msrs::MBA_CONFIGURATION,
    // RDCL_NO (0), IBRS_ALL (1), SKIP_L1DFL_VMENTRY (3), MDS_NO (5), IF_PSCHANGE_MC_NO (6), TAA_NO (8), SBDR_SSDP_NO (13),
    // FBSDP_NO (14), PSDP_NO (15).
    msrs::arch_capabilities(0xE16B),
    msrs::CORE_CAPABILITIES,
    // The numbers of active cores that the ratios of 1ADH hold for: eight groups.
    MsrRow::read_only(
        MSR_TURBO_RATIO_LIMIT1,
        "MSR_TURBO_RATIO_LIMIT_CORES",
        0x3834_302C_2824_1408,
    ),
];
