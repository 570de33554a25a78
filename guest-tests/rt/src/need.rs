//! What a test may need of the CPU, and how the manual says that it is absent.

use crate::cpu::{family_model, has, leaf, no_msr, rdmsr};
use crate::exception::Fault;
use x86::cpuid::Feature;
use x86::msr::*;
use x86::pmu::capabilities;

/// A feature.
#[derive(Clone, Copy)]
pub struct Need {
    /// Why a test is skipped without it.
    pub reason: &'static str,
    /// Whether the CPU says that it is there.
    pub present: fn() -> bool,
    /// Checks that it is absent as the manual says; panics where it is not.
    pub absent: fn(),
}

/// IA32_PERF_CAPABILITIES, 0 where CPUID.1:ECX.PDCM is clear.
pub fn perf_capabilities() -> u64 {
    if has(Feature::Pdcm) {
        crate::cpu::read(IA32_PERF_CAPABILITIES)
    } else {
        0
    }
}

/// The stack of last-branch records in MSRs, as software finds it: by IA32_PERF_CAPABILITIES\[5:0\], and by family and model
/// where that does not tell. SDM Vol. 3B 18.4.8.1 "LBR Stack and Intel 64 Processors", Table 18-5 and 18.5 to 18.14.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbrStack {
    /// The format.
    pub format: u8,
    /// Entries.
    pub depth: u32,
    /// First FROM register.
    pub from: u32,
    /// First TO register.
    pub to: u32,
    /// First INFO register.
    pub info: Option<u32>,
    /// MSR_LBR_SELECT exists.
    pub select: bool,
    /// Bit 9 of it, EN_CALLSTACK, exists.
    pub call_stack: bool,
}

impl LbrStack {
    /// The CPU's.
    pub fn here() -> Option<Self> {
        let format = (perf_capabilities() & capabilities::LBR_FORMAT) as u8;
        let (family, model) = family_model();
        let core2 = family == 6 && matches!(model, 0x0F | 0x16 | 0x17 | 0x1D);
        let atom = family == 6 && matches!(model, 0x1C | 0x26 | 0x27 | 0x35 | 0x36);
        if core2 || atom {
            return Some(Self {
                format,
                depth: if core2 { 4 } else { 8 },
                from: MSR_LASTBRANCH_0_FROM_IP_CORE,
                to: MSR_LASTBRANCH_0_TO_IP_CORE,
                info: None,
                select: false,
                call_stack: false,
            });
        }
        let sixteen = Self {
            format,
            depth: 16,
            from: MSR_LASTBRANCH_0_FROM_IP,
            to: MSR_LASTBRANCH_0_TO_IP,
            info: None,
            select: true,
            call_stack: format >= 4,
        };
        match format {
            3 | 4 => Some(sixteen),
            5 | 7 => Some(Self {
                depth: 32,
                info: Some(MSR_LBR_INFO_0),
                ..sixteen
            }),
            _ => None,
        }
    }
}

/// CPUID.0AH:EAX\[7:0\], the version of architectural performance monitoring.
pub fn pmu_version() -> u32 {
    leaf(0xA, 0)[0] & 0xFF
}

/// PEBS is there: the debug store is, IA32_MISC_ENABLE\[12\] (unavailable) is clear, and there are counters.
pub fn pebs() -> bool {
    has(Feature::Ds) && pmu_version() > 0 && crate::cpu::read(IA32_MISC_ENABLE) & 1 << 12 == 0
}

/// IA32_PERF_CAPABILITIES\[11:8\], the format of PEBS records.
pub fn pebs_format() -> u64 {
    perf_capabilities() >> capabilities::PEBS_FORMAT_SHIFT & 15
}

fn cpuid_says_no(feature: Feature) {
    assert!(!has(feature), "CPUID shows {}", feature.name());
}

macro_rules! by_cpuid {
    ($($(#[$doc:meta])* $name:ident $feature:ident $reason:literal, $absent:expr;)*) => {$(
        $(#[$doc])*
        pub const $name: Need = Need {
            reason: $reason,
            present: || has(Feature::$feature),
            absent: || {
                cpuid_says_no(Feature::$feature);
                let absent: fn() = $absent;
                absent();
            },
        };
    )*};
}

by_cpuid! {
    /// Architectural last-branch records.
    ARCH_LBR ArchLbr "no architectural LBR (CPUID.7:EDX[19] is 0)", || {
        no_msr(IA32_LBR_CTL);
        no_msr(IA32_LBR_DEPTH);
        no_msr(IA32_LBR_0_FROM_IP);
        no_msr(IA32_LBR_0_TO_IP);
        no_msr(IA32_LBR_0_INFO);
    };
    /// The debug store.
    DS Ds "no debug store (CPUID.1:EDX[21] is 0)", || no_msr(IA32_DS_AREA);
    /// BTS_OFF_OS and BTS_OFF_USR.
    DS_CPL DsCpl "no CPL-qualified debug store (CPUID.1:ECX[4] is 0)", || {
        assert_eq!(crate::cpu::wrmsr(IA32_DEBUGCTL, 1 << 9), Err(Fault::GP0), "BTS_OFF_OS");
        assert_eq!(crate::cpu::wrmsr(IA32_DEBUGCTL, 1 << 10), Err(Fault::GP0), "BTS_OFF_USR");
    };
    /// IA32_PERF_CAPABILITIES.
    PDCM Pdcm "no IA32_PERF_CAPABILITIES (CPUID.1:ECX[15] is 0)", || no_msr(IA32_PERF_CAPABILITIES);
    /// Intel Processor Trace.
    PT IntelPt "no Intel PT (CPUID.7:EBX[25] is 0)", || {
        for register in [IA32_RTIT_CTL, IA32_RTIT_STATUS, IA32_RTIT_OUTPUT_BASE, IA32_RTIT_OUTPUT_MASK_PTRS,
            IA32_RTIT_CR3_MATCH, IA32_RTIT_ADDR0_A, IA32_RTIT_ADDR3_B] {
            no_msr(register);
        }
        assert_eq!(leaf(0x14, 0), [0; 4], "CPUID.14H");
    };
    /// RDTSCP and IA32_TSC_AUX.
    RDTSCP Rdtscp "no RDTSCP (CPUID.80000001H:EDX[27] is 0)", || {
        let fault = crate::attempt!("rdtscp", out("eax") _, out("ecx") _, out("edx") _);
        assert_eq!(fault, Some(Fault::UD), "RDTSCP");
    };
    /// RDPID.
    RDPID Rdpid "no RDPID (CPUID.7:ECX[22] is 0)", || {
        assert_eq!(crate::attempt!(".byte 0xf3, 0x0f, 0xc7, 0xf8", out("rax") _), Some(Fault::UD), "RDPID");
    };
    /// UMONITOR, UMWAIT and TPAUSE.
    WAITPKG Waitpkg "no user wait instructions (CPUID.7:ECX[5] is 0)", || {
        // Not the instructions: a processor that ignores prefixes of fences has one in their place, and no KVM hears of it.
        no_msr(IA32_UMWAIT_CONTROL);
    };
    /// IA32_TSC_ADJUST.
    TSC_ADJUST TscAdjust "no IA32_TSC_ADJUST (CPUID.7:EBX[1] is 0)", || no_msr(IA32_TSC_ADJUST);
    /// The APIC timer's deadline mode.
    TSC_DEADLINE TscDeadline "no TSC deadline (CPUID.1:ECX[24] is 0)", || no_msr(IA32_TSC_DEADLINE);
    /// The x2APIC.
    X2APIC X2apic "no x2APIC (CPUID.1:ECX[21] is 0)", || {
        let base = crate::cpu::read(IA32_APIC_BASE);
        assert_eq!(crate::cpu::wrmsr(IA32_APIC_BASE, base | crate::apic::EXTD), Err(Fault::GP0), "EXTD");
        assert_eq!(rdmsr(IA32_X2APIC_BASE + 2), Err(Fault::GP0), "the ID register as MSR 802H");
    };
    /// Monitoring of shared resources.
    RDT_M RdtM "no resource monitoring (CPUID.7:EBX[12] is 0)", || {
        no_msr(IA32_QM_EVTSEL);
        assert_eq!(rdmsr(IA32_QM_CTR), Err(Fault::GP0), "IA32_QM_CTR");
        assert_eq!(leaf(0xF, 0), [0; 4], "CPUID.0FH");
    };
    /// Allocation of shared resources.
    RDT_A RdtA "no resource allocation (CPUID.7:EBX[15] is 0)", || {
        no_msr(IA32_L3_QOS_MASK_0);
        no_msr(IA32_L2_QOS_MASK_0);
        assert_eq!(leaf(0x10, 0), [0; 4], "CPUID.10H");
    };
    /// Restricted transactional memory.
    RTM Rtm "no transactions (CPUID.7:EBX[11] is 0)", || {
        let fault = crate::attempt!(".byte 0xc7, 0xf8, 0, 0, 0, 0", out("rax") _);
        assert_eq!(fault, Some(Fault::UD), "XBEGIN");
        assert_eq!(crate::cpu::wrmsr(IA32_DEBUGCTL, 1 << 15), Err(Fault::GP0), "IA32_DEBUGCTL.RTM");
    };
}

/// A stack of last-branch records in MSRs.
pub const LBR: Need = Need {
    reason: "no LBR stack in MSRs (architectural LBR instead)",
    present: || LbrStack::here().is_some(),
    absent: || {
        assert!(has(Feature::ArchLbr), "neither kind of last-branch records");
        no_msr(MSR_LASTBRANCH_TOS);
        no_msr(MSR_LASTBRANCH_0_FROM_IP);
        no_msr(MSR_LASTBRANCH_0_TO_IP);
        no_msr(MSR_LBR_INFO_0);
    },
};

/// MSR_LBR_SELECT.
pub const LBR_SELECT: Need = Need {
    reason: "no MSR_LBR_SELECT",
    present: || LbrStack::here().is_some_and(|stack| stack.select),
    absent: || no_msr(MSR_LBR_SELECT),
};

/// INFO registers of the stack.
pub const LBR_INFO: Need = Need {
    reason: "no MSR_LBR_INFO registers (LBR format below 5)",
    present: || LbrStack::here().is_some_and(|stack| stack.info.is_some()),
    absent: || no_msr(MSR_LBR_INFO_0),
};

/// Call-stack mode of the stack.
pub const LBR_CALL_STACK: Need = Need {
    reason: "no EN_CALLSTACK in MSR_LBR_SELECT (LBR format below 4)",
    present: || LbrStack::here().is_some_and(|stack| stack.call_stack),
    absent: || {
        if LbrStack::here().is_some_and(|stack| stack.select) {
            crate::cpu::refuses(MSR_LBR_SELECT, 1 << 9);
        }
    },
};

/// Branch trace store: CPUID.1:EDX.DS and IA32_MISC_ENABLE\[11\] clear. SDM Vol. 3B 18.4.5 "Branch Trace Store (BTS)".
pub const BTS: Need = Need {
    reason: "no BTS (IA32_MISC_ENABLE[11] is 1, or no debug store)",
    present: || has(Feature::Ds) && crate::cpu::read(IA32_MISC_ENABLE) & 1 << 11 == 0,
    absent: || {
        if !has(Feature::Ds) {
            no_msr(IA32_DS_AREA);
        }
    },
};

/// PEBS.
pub const PEBS: Need = Need {
    reason: "no PEBS (IA32_MISC_ENABLE[12] is 1, or no debug store)",
    present: pebs,
    absent: || no_msr(IA32_PEBS_ENABLE),
};

/// Architectural performance monitoring.
pub const PMU: Need = Need {
    reason: "no architectural performance monitoring (CPUID.0AH:EAX[7:0] is 0)",
    present: || pmu_version() >= 1,
    absent: || no_msr(IA32_PERF_GLOBAL_CTRL),
};

/// Version 2 of it: fixed counters and the global registers.
pub const PMU2: Need = Need {
    reason: "performance monitoring below version 2",
    present: || pmu_version() >= 2,
    absent: || no_msr(IA32_PERF_GLOBAL_CTRL),
};

/// Version 4 of it: streamlined freezes, STATUS_SET, INUSE.
pub const PMU4: Need = Need {
    reason: "performance monitoring below version 4",
    present: || pmu_version() >= 4,
    absent: || {
        no_msr(IA32_PERF_GLOBAL_STATUS_SET);
        assert_eq!(rdmsr(IA32_PERF_GLOBAL_INUSE), Err(Fault::GP0));
    },
};

/// Version 2 or 3: the legacy freezes.
pub const LEGACY_FREEZE: Need = Need {
    reason: "performance monitoring from version 4 on freezes by status bits",
    present: || (2..4).contains(&pmu_version()),
    absent: || assert!(pmu_version() >= 4 || pmu_version() < 2),
};

/// Counters in full width at 4C1H on.
pub const FULL_WIDTH: Need = Need {
    reason: "no full-width counter writes (IA32_PERF_CAPABILITIES[13] is 0)",
    present: || perf_capabilities() & capabilities::FULL_WIDTH != 0,
    absent: || no_msr(IA32_A_PMC0),
};

/// Another CPU beside the boot CPU.
pub const OTHER_CPUS: Need = Need {
    reason: "one CPU only",
    present: || crate::Cpus::start().count() > 1,
    absent: || {},
};
