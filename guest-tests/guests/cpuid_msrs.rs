//! CPUID and the MSRs that it announces: what is shown is there, what is not shown is absent as the manual says.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{cpuid, family_model, has, leaf, no_msr, rdmsr, read, refuses, write, wrmsr};
use rt::exception::{self, Fault, GP};
use rt::need::{self, Need};
use rt::{label, user};
use x86::cpuid::Feature;
use x86::msr::*;

core::arch::global_asm!(
    r#"
    .text
    .globl id_user_rdmsr, id_user_wrmsr
id_user_rdmsr:
    mov     ecx, edi
    rdmsr
    int     0x80
id_user_wrmsr:
    mov     ecx, edi
    xor     eax, eax
    xor     edx, edx
    wrmsr
    int     0x80
"#
);

/// Leaf 0 names Intel; leaf 80000000H is in its range; leaf 1 has a family.
fn leaves() {
    let [highest, b, c, d] = cpuid(0, 0);
    assert!(highest >= 1);
    assert_eq!([b, d, c], [0x756E_6547, 0x4965_6E69, 0x6C65_746E], "GenuineIntel");
    let extended = cpuid(0x8000_0000, 0)[0];
    assert!((0x8000_0001..0x8000_0100).contains(&extended), "{extended:X}H");
    assert_ne!(cpuid(1, 0)[0], 0);
    let bits = leaf(0x8000_0008, 0)[0];
    assert!((32..=52).contains(&(bits & 0xFF)), "physical address bits");
    assert!(matches!(bits >> 8 & 0xFF, 48 | 57), "linear address bits");
}

/// Vol. 2A CPUID: a basic leaf above the highest answers as the highest does.
fn beyond_the_highest_leaf() {
    let highest = cpuid(0, 0)[0];
    let mut last = cpuid(highest, 0);
    let mut beyond = cpuid(highest + 1, 0);
    // What counts down or names the CPU is left aside: EDX of leaf 0BH and its kind.
    for regs in [&mut last, &mut beyond] {
        regs[3] = 0;
    }
    assert_eq!(beyond, last);
}

/// What a 64-bit part always shows.
fn what_64_bit_mode_implies() {
    for feature in [
        Feature::Lm,
        Feature::Syscall,
        Feature::Msr,
        Feature::Pae,
        Feature::Apic,
        Feature::Fxsr,
        Feature::Sse2,
        Feature::Cx8,
        Feature::Tsc,
        Feature::De,
    ] {
        assert!(has(feature), "{}", feature.name());
    }
    assert_ne!(read(IA32_EFER) & 1 << 10, 0, "IA32_EFER.LMA");
}

/// Every need that CPUID does not show is absent as the manual says; the tests of the other images check the rest.
fn what_is_not_shown_is_absent() {
    for need in [
        need::ARCH_LBR,
        need::DS,
        need::DS_CPL,
        need::PDCM,
        need::PT,
        need::RDTSCP,
        need::RDPID,
        need::TSC_ADJUST,
        need::TSC_DEADLINE,
        need::X2APIC,
        need::RDT_M,
        need::RDT_A,
        need::RTM,
        need::LBR,
        need::LBR_SELECT,
        need::LBR_INFO,
        need::PMU,
        need::PMU2,
        need::PMU4,
        need::FULL_WIDTH,
        need::PEBS,
    ] {
        let Need { present, absent, .. } = need;
        if !present() {
            absent();
        }
    }
}

/// What CPUID shows can be read.
fn what_is_shown_is_there() {
    for (feature, registers) in [
        (Feature::Ds, &[IA32_DS_AREA][..]),
        (Feature::Pdcm, &[IA32_PERF_CAPABILITIES]),
        (Feature::TscAdjust, &[IA32_TSC_ADJUST]),
        (Feature::TscDeadline, &[IA32_TSC_DEADLINE]),
        (Feature::Rdtscp, &[IA32_TSC_AUX]),
        (Feature::IntelPt, &[IA32_RTIT_CTL, IA32_RTIT_STATUS]),
        (Feature::RdtM, &[IA32_QM_EVTSEL, IA32_PQR_ASSOC]),
        (Feature::ArchLbr, &[IA32_LBR_CTL, IA32_LBR_DEPTH]),
        (Feature::Mtrr, &[IA32_MTRRCAP, IA32_MTRR_DEF_TYPE]),
        (Feature::Pat, &[IA32_PAT]),
        (Feature::Mca, &[IA32_MCG_CAP, IA32_MCG_STATUS]),
        (Feature::Apic, &[IA32_APIC_BASE]),
        (Feature::SpecCtrl, &[IA32_SPEC_CTRL]),
        (Feature::ArchCapabilities, &[IA32_ARCH_CAPABILITIES]),
        (Feature::Xsaves, &[IA32_XSS]),
    ] {
        for &register in registers {
            if has(feature) {
                assert!(rdmsr(register).is_ok(), "{} shows {register:X}H", feature.name());
            }
        }
    }
    if need::pmu_version() >= 2 {
        for register in [IA32_PERF_GLOBAL_CTRL, IA32_PERF_GLOBAL_STATUS, IA32_FIXED_CTR_CTRL] {
            assert!(rdmsr(register).is_ok(), "{register:X}H");
        }
    }
}

/// Numbers that are no register.
fn no_register_there() {
    for number in [0x4000_0000, 0xC000_0200, 0xFFFF_FFFF, 0x0000_FFFF, 0x1F00] {
        no_msr(number);
    }
}

/// Read-only registers.
fn read_only_registers() {
    if has(Feature::Pdcm) {
        refuses(IA32_PERF_CAPABILITIES, 0);
    }
    refuses(IA32_MTRRCAP, 0);
    refuses(IA32_MCG_CAP, 0);
    if has(Feature::ArchCapabilities) {
        refuses(IA32_ARCH_CAPABILITIES, 0);
    }
}

/// Reserved bits.
fn reserved_bits() {
    refuses(IA32_EFER, read(IA32_EFER) | 1 << 1);
    refuses(IA32_EFER, read(IA32_EFER) | 1 << 63);
    refuses(IA32_APIC_BASE, read(IA32_APIC_BASE) | 1);
    refuses(IA32_APIC_BASE, read(IA32_APIC_BASE) | 1 << 62);
    refuses(IA32_PAT, 2);
    refuses(IA32_MTRR_DEF_TYPE, 2);
}

/// Addresses that must be canonical.
fn canonical_addresses() {
    for register in [
        IA32_LSTAR,
        IA32_FS_BASE,
        IA32_GS_BASE,
        IA32_KERNEL_GS_BASE,
        IA32_SYSENTER_EIP,
    ] {
        refuses(register, 0x8000_0000_0000_0000);
        let before = read(register);
        write(register, 0xFFFF_8000_1234_5678u64);
        assert_eq!(read(register), 0xFFFF_8000_1234_5678, "{register:X}H");
        write(register, before);
    }
}

static FAULTS: AtomicU64 = AtomicU64::new(0);

/// RDMSR and WRMSR are for ring 0, whatever the register.
fn rdmsr_and_wrmsr_in_ring_3() {
    exception::on(GP, |frame| {
        FAULTS.fetch_add(1, SeqCst);
        frame.rip += 2;
    });
    FAULTS.store(0, SeqCst);
    let registers = [
        IA32_TIME_STAMP_COUNTER,
        IA32_DEBUGCTL,
        IA32_PMC0,
        IA32_APIC_BASE,
        0x4000_0000,
    ];
    for register in registers {
        user::run(label!(id_user_rdmsr), u64::from(register), 0);
        user::run(label!(id_user_wrmsr), u64::from(register), 0);
    }
    assert_eq!(FAULTS.load(SeqCst), 2 * registers.len() as u64);
}

/// The debug store, PEBS and its format agree with each other. SDM Vol. 4, IA32_MISC_ENABLE\[12:11\].
fn the_debug_store_agrees() {
    let unavailable = read(IA32_MISC_ENABLE) >> 11 & 3;
    if !has(Feature::Ds) {
        assert_eq!(unavailable, 3, "neither BTS nor PEBS without a debug store");
        return;
    }
    if has(Feature::DsCpl) || has(Feature::Dtes64) {
        assert!(has(Feature::Ds));
    }
    assert_eq!(unavailable & 1, 0, "BTS");
}

/// CPUID.0AH: widths, lengths and counts make sense, and there are exactly so many counters.
fn counters_by_leaf_0ah() {
    let [eax, ebx, _, edx] = leaf(0xA, 0);
    let (version, general, width, events) = (eax & 0xFF, eax >> 8 & 0xFF, eax >> 16 & 0xFF, eax >> 24);
    assert!((1..=5).contains(&version), "version {version}");
    assert!((2..=8).contains(&general), "{general} counters");
    assert!((40..=48).contains(&width), "of {width} bits");
    assert!(events >= 7 && ebx >> events == 0, "{events} events, {ebx:X}H");
    for n in 0..general {
        assert!(
            rdmsr(IA32_PERFEVTSEL0 + n).is_ok() && rdmsr(IA32_PMC0 + n).is_ok(),
            "counter {n}"
        );
    }
    // A hybrid part's leaf counts what both its kinds of core have; this kind may have more. Other registers may follow, but no
    // counter.
    let hybrid = matches!(family_model(), (6, 0x97 | 0x9A | 0xB7 | 0xBA));
    if general < 8 && !hybrid {
        assert_eq!(wrmsr(IA32_PERFEVTSEL0 + general, 1 << 22), Err(Fault::GP0));
    }
    let fixed = if version >= 2 { edx & 0x1F } else { 0 };
    for n in 0..fixed {
        assert!(rdmsr(IA32_FIXED_CTR0 + n).is_ok(), "fixed counter {n}");
    }
    no_msr(IA32_FIXED_CTR0 + fixed.max(1) + 3);
}

rt::tests! {
    "tests_cpuid_msrs";
    leaves;
    beyond_the_highest_leaf;
    what_64_bit_mode_implies;
    what_is_not_shown_is_absent;
    what_is_shown_is_there;
    no_register_there;
    read_only_registers;
    reserved_bits;
    canonical_addresses;
    rdmsr_and_wrmsr_in_ring_3;
    the_debug_store_agrees;
    counters_by_leaf_0ah: need::PMU;
}
