//! Snow Ridge: family 6, model 86H, stepping 5 (Tremont cores).
//!
//! # Theory
//! [`SILICON`] is an Atom P5942B as far as it is public (`resources/cpuid/atom-p5942b.txt` says what comes from where). The MSRs are
//! those of SDM Vol. 4 "MSRs In Intel Atom Processors Based on Tremont Microarchitecture".

use super::msrs::{self, BANK_REGISTERS, COMMON, MEMORY_TYPES, MTRR_FIXED};
use super::{CpuModel, CpuidRow, MsrRow, UnitCaps, leaf, policy, subleaf};
use crate::ds::{DsCaps, PebsCaps, PebsFormat};
use crate::pmu::{PmuCaps, events};
use crate::pt::PtCaps;
use crate::vmx::{self, VmxCaps};
use crate::{debugctl, lbr};

/// Intel Atom P5942B (Snow Ridge).
pub const SNOWRIDGE: CpuModel = CpuModel {
    name: "snowridge",
    description: "Intel Atom P5942B (Snow Ridge, 2020): x86-64-v2, SHA, GFNI, PEBS by PT",
    // Leaf 15H: 176 to 2.
    tsc_khz: 88 * CRYSTAL_KHZ,
    apic_timer_khz: CRYSTAL_KHZ,
    microcode: MICROCODE,
    silicon: &SILICON,
    cpuid: &CPUID,
    msrs: &MSRS,
    units: UnitCaps {
        debugctl: Some(debugctl::SKYLAKE),
        lbr: Some(lbr::TREMONT),
        ds: Some(DsCaps {
            bts: true,
            bts_predicted: false,
            pebs: Some(PebsCaps {
                format: PebsFormat::Adaptive,
                enable: 0x7_0000_000F,
                resets: 11,
                data_cfg: 0xFF00_000F,
                qualified: true,
                any_event: true,
                ..PebsCaps::NONE
            }),
        }),
        pmu: Some(PmuCaps {
            version: 5,
            general: 4,
            general_width: 48,
            fixed: 3,
            fixed_width: 48,
            architectural: 0x7F,
            capabilities: Some(0x1_74C0),
            select: 0x4_FFDF_FFFF,
            offcore: [0x3F_FFFF_FFFF, 0x3F_FFFF_FFFF],
            reference: 88,
            slots: 4,
            events: &[events::TREMONT],
            ..PmuCaps::NONE
        }),
        pt: PtCaps::of(&SILICON, 88 * CRYSTAL_KHZ),
    },
    vmx: Some(VMX),
    ..CpuModel::NONE
};

/// The crystal of leaf 15H, 25 MHz, which drives the APIC timer.
const CRYSTAL_KHZ: u32 = 25_000;
/// Machine-check banks. IA32_MCG_CAP of this part is not in any public record that we know; the count is a plausible one.
const BANKS: usize = 8;
const MICROCODE: u32 = 0x4C00_0023;

/// What the guest sees.
static CPUID: [CpuidRow; SILICON.len() + 1] = policy::narrow(&SILICON, &[]);

/// The part's own answers, on the thread with APIC ID 0.
const SILICON: [CpuidRow; 51] = [
    leaf(0x0, [0x0000_001B, 0x756E_6547, 0x6C65_746E, 0x4965_6E69]), // "GenuineIntel", basic leaves to 1BH
    leaf(0x1, [0x0008_0665, 0x0080_0800, 0x4FF8_EBBF, 0xBFEB_FBFF]), // signature, features
    leaf(0x2, [0x00FE_FF01, 0, 0, 0]),                               // TLB and cache descriptors
    leaf(0x3, [0, 0, 0, 0]),                                         // serial number
    subleaf(0x4, 0, [0xFC00_0121, 0x01C0_003F, 0x0000_003F, 0]),     // L1D 32 KiB, 8 ways
    subleaf(0x4, 1, [0xFC00_0122, 0x01C0_003F, 0x0000_003F, 0]),     // L1I 32 KiB, 8 ways
    subleaf(0x4, 2, [0xFC01_C143, 0x0440_003F, 0x0000_0FFF, 0]),     // L2 4608 KiB, 18 ways
    subleaf(0x4, 3, [0xFC1F_C163, 0x04C0_003F, 0x0000_2FFF, 0x0000_0004]), // L3 15 MiB, 20 ways
    subleaf(0x4, 4, [0, 0, 0, 0]),                                   // no more caches
    leaf(0x5, [0x0000_0040, 0x0000_0040, 0x0000_0003, 0x1112_2020]), // MONITOR/MWAIT
    leaf(0x6, [0x0000_0075, 0x0000_0002, 0x0000_0009, 0]),           // thermal and power
    subleaf(0x7, 0, [0, 0x2394_A2C3, 0x1A40_0124, 0xFC00_0400]),     // extended features
    leaf(0x8, [0, 0, 0, 0]),
    leaf(0x9, [0, 0, 0, 0]),
    leaf(0xA, [0x0730_0405, 0, 0x0000_0007, 0x0000_8603]), // performance monitoring, version 5
    subleaf(0xB, 0, [0x0000_0001, 0x0000_0001, 0x0000_0100, 0]), // threads
    subleaf(0xB, 1, [0x0000_0007, 0x0000_0018, 0x0000_0201, 0]), // cores
    leaf(0xC, [0, 0, 0, 0]),
    subleaf(0xD, 0, [0x0000_0003, 0x0000_0240, 0x0000_0240, 0]), // XCR0 and the area for it
    subleaf(0xD, 1, [0x0000_000F, 0x0000_02C0, 0x0000_0100, 0]), // XSAVE features, IA32_XSS
    subleaf(0xD, 8, [0x0000_0080, 0, 0x0000_0001, 0]),           // PT
    leaf(0xE, [0, 0, 0, 0]),
    subleaf(0xF, 0, [0, 0, 0, 0]),
    subleaf(0x10, 0, [0, 0x0000_0004, 0, 0]),           // allocation
    subleaf(0x10, 2, [0x0000_0011, 0, 0, 0x0000_000F]), // level-2 allocation
    leaf(0x11, [0, 0, 0, 0]),
    subleaf(0x12, 0, [0, 0, 0, 0]),
    leaf(0x13, [0, 0, 0, 0]),
    subleaf(0x14, 0, [0x0000_0001, 0x0000_007F, 0x8000_0007, 0]), // processor trace
    subleaf(0x14, 1, [0x0249_0002, 0x003F_3FFF, 0, 0]),           // processor trace: encodings
    leaf(0x15, [0x0000_0002, 0x0000_00B0, 0x017D_7840, 0]),       // TSC over crystal: 176/2, crystal 25000000 Hz
    leaf(0x16, [0x0000_0898, 0x0000_0898, 0x0000_0064, 0]),       // base 2200 MHz, most 2200, bus 100
    subleaf(0x17, 0, [0, 0, 0, 0]),
    subleaf(0x18, 0, [0x0000_0005, 0, 0, 0]), // TLBs
    subleaf(0x18, 1, [0, 0x0030_0001, 0x0000_0001, 0x0000_0121]),
    subleaf(0x18, 2, [0, 0x0004_0001, 0x0000_0100, 0x0000_0043]),
    subleaf(0x18, 3, [0, 0x0004_0006, 0x0000_0010, 0x0000_0043]),
    subleaf(0x18, 4, [0, 0x0030_0001, 0x0000_0001, 0x0000_0122]),
    subleaf(0x18, 5, [0, 0, 0, 0]),
    leaf(0x19, [0, 0, 0, 0]),
    subleaf(0x1A, 0, [0, 0, 0, 0]),
    subleaf(0x1B, 0, [0, 0, 0, 0]),
    leaf(0x8000_0000, [0x8000_0008, 0, 0, 0]),
    leaf(0x8000_0001, [0, 0, 0x0000_0101, 0x2C10_0800]),
    // "Intel Atom(R) P5942B Processor @ 2.20GHz"
    leaf(0x8000_0002, [0x6574_6E49, 0x7441_206C, 0x5228_6D6F, 0x3550_2029]),
    leaf(0x8000_0003, [0x4232_3439, 0x6F72_5020, 0x7373_6563, 0x4020_726F]),
    leaf(0x8000_0004, [0x322E_3220, 0x7A48_4730, 0, 0]),
    leaf(0x8000_0005, [0, 0, 0, 0]),
    leaf(0x8000_0006, [0, 0, 0x1200_8040, 0]), // L2 once more
    leaf(0x8000_0007, [0, 0, 0, 0x0000_0100]), // invariant TSC
    leaf(0x8000_0008, [0x0000_302A, 0, 0, 0]), // 42 physical, 48 linear bits
];

/// The plain MSRs.
static MSRS: [MsrRow; msrs::total(PARTS)] = msrs::merge(PARTS);

/// What the part can do in VMX operation.
const VMX: VmxCaps = vmx::caps::SKYLAKE_SERVER;

const PARTS: &[&[MsrRow]] = &[
    msrs::vmx_capabilities!(VMX, SILICON),
    &msrs::mtrrs::<20>(42),
    &MTRR_FIXED,
    &MEMORY_TYPES,
    &COMMON,
    &msrs::RESIDENCIES,
    &msrs::POWER,
    &msrs::identity(0, MICROCODE),
    &msrs::ratios(22, 8),
    &msrs::banks::<{ BANKS * BANK_REGISTERS }>(),
    &msrs::corrected::<BANKS>(),
    &msrs::SPECULATION,
    PLAIN,
];

const PLAIN: &[MsrRow] = &[
    msrs::machine_check(BANKS as u64, 0),
    msrs::MISC_FEATURE_ENABLES,
    msrs::UMWAIT_CONTROL,
    // RDCL_NO (0), IBRS_ALL (1), SKIP_L1DFL_VMENTRY (3), MDS_NO (5), FB_CLEAR (17).
    msrs::arch_capabilities(0x2_002B),
    msrs::CORE_CAPABILITIES,
];
