//! What of a part a guest sees: one policy for all models.
//!
//! # Theory
//! A model's rows are the real part's. The machine shows a feature when the part has it and [`ENGINE`] names it: the
//! engine executes it, and the registers it enumerates exist. Everything else is hidden here, with a reason, and nowhere
//! else; so more engine is one more word in [`ENGINE`], and every model of a part that has the feature shows it.
//!
//! # Practice
//! [`narrow`] turns a part's rows into the guest's: features first, then the words that describe what is absent
//! ([`WORDS`]), then leaf 0DH, which follows from the features that remain, then the model's own adjustments. A model with
//! toggles goes the same way with another set of features.

use alloc::vec::Vec;

use super::{CpuidRow, Difference};
use crate::cpuid::Feature::{self, *};
use crate::cpuid::Features;
use crate::cpuid::Register::{self, Eax, Ebx, Ecx, Edx};

/// What the machine executes, or keeps the registers of. x86-64-v3 and what surrounds it.
pub const ENGINE: Features = Features::list(&[
    // The baseline.
    Fpu,
    Vme,
    De,
    Pse,
    Tsc,
    Msr,
    Pae,
    Mce,
    Cx8,
    Apic,
    Sep,
    Mtrr,
    Pge,
    Mca,
    Cmov,
    Pat,
    Pse36,
    Clfsh,
    Mmx,
    Fxsr,
    Sse,
    Sse2,
    Ss,
    Syscall,
    Nx,
    Lm,
    // x86-64-v2.
    Sse3,
    Ssse3,
    Cmpxchg16b,
    Sse41,
    Sse42,
    Popcnt,
    LahfSahf,
    // Beside it.
    Pclmulqdq,
    Aesni,
    Pcid,
    Xsave,
    Rdrand,
    Fsgsbase,
    Monitor,
    Smep,
    Smap,
    Umip,
    Pku,
    Pks,
    La57,
    Invpcid,
    Prefetchw,
    Page1gb,
    Rdtscp,
    Movbe,
    Rdseed,
    Rdpid,
    Clflushopt,
    Clwb,
    Wbnoinvd,
    Cldemote,
    Movdiri,
    Movdir64b,
    Waitpkg,
    Serialize,
    Adx,
    Sha,
    Gfni,
    // x86-64-v3, and what is on 256 bits beside it.
    Bmi1,
    Bmi2,
    Lzcnt,
    Avx,
    Avx2,
    Fma,
    F16c,
    Vaes,
    Vpclmulqdq,
    AvxVnni,
    // x86-64-v4, and what is on 512 bits beside it.
    Avx512f,
    Avx512dq,
    Avx512ifma,
    Avx512cd,
    Avx512bw,
    Avx512vl,
    Avx512vbmi,
    Avx512vbmi2,
    Avx512vnni,
    Avx512bitalg,
    Avx512vpopcntdq,
    Avx512bf16,
    Avx512fp16,
    Xsaveopt,
    Xsavec,
    Xgetbv1,
    Xsaves,
    // Nothing to execute: a hint of speed that holds of this engine as of any.
    Erms,
    Fsrm,
    Fzrm,
    Fsrs,
    Fsrc,
    // The local APIC and the clock.
    X2apic,
    TscDeadline,
    TscAdjust,
    InvariantTsc,
    Arat,
    // The resource director.
    RdtM,
    RdtA,
    // The debug and trace units.
    Ds,
    Dtes64,
    DsCpl,
    Pdcm,
    ArchLbr,
    BusLockDetect,
    // Registers that are plain storage, or commands without an effect that a guest could see.
    EnergyBias,
    SpecCtrl,
    Stibp,
    Ssbd,
    L1dFlush,
    MdClear,
    ArchCapabilities,
    CoreCapabilities,
    // Virtual machines.
    Vmx,
    // The debug and trace units.
    IntelPt,
    // Not the part's: see `CPUID` with EAX = 40000000H.
    Hypervisor,
]);

/// What the machine executes as well, but shows only to who asks for it, whatever the part has; and why.
pub const ON_DEMAND: &[(Feature, &str)] = &[(Rtm, TSX), (RtmAlwaysAbort, TSX)];

/// A feature and one that it is nothing without.
pub const NEEDS: &[(Feature, Feature)] = &[
    (Sse, Fxsr),
    (Sse2, Sse),
    (Sse3, Sse2),
    (Ssse3, Sse3),
    (Sse41, Ssse3),
    (Sse42, Sse41),
    (Pclmulqdq, Sse2),
    (Aesni, Sse2),
    (Sha, Ssse3),
    (Gfni, Sse2),
    (Mmx, Fpu),
    (Fxsr, Fpu),
    (Lm, Pae),
    (Lm, Fxsr),
    (Lm, Sse2),
    (Lm, Cx8),
    (Lm, Cmov),
    (Lm, Syscall),
    (Lm, Msr),
    (Lm, Nx),
    (Nx, Pae),
    (Syscall, Lm),
    (LahfSahf, Lm),
    (Cmpxchg16b, Lm),
    (Page1gb, Lm),
    (Fsgsbase, Lm),
    (Pcid, Lm),
    (Invpcid, Pcid),
    (La57, Lm),
    (Pku, Lm),
    (Pks, Lm),
    (Rdtscp, Tsc),
    (TscAdjust, Tsc),
    (TscDeadline, Apic),
    (TscDeadline, Tsc),
    (X2apic, Apic),
    (Arat, Apic),
    (Mca, Mce),
    (Xsaveopt, Xsave),
    (Xsavec, Xsave),
    (Xgetbv1, Xsave),
    (Xsaves, Xsavec),
    (Xfd, Xsave),
    (Avx, Xsave),
    (Avx, Sse42),
    (Pku, Xsave),
    (Mpx, Xsave),
    (Fma, Avx),
    (F16c, Avx),
    (Avx2, Avx),
    (AvxVnni, Avx2),
    (Vaes, Avx),
    (Vpclmulqdq, Avx),
    (Avx512f, Avx2),
    (Avx512f, Fma),
    (Avx512cd, Avx512f),
    (Avx512dq, Avx512f),
    (Avx512bw, Avx512f),
    (Avx512vl, Avx512f),
    (Avx512ifma, Avx512f),
    (Avx512vbmi, Avx512bw),
    (Avx512vbmi2, Avx512bw),
    (Avx512vnni, Avx512f),
    (Avx512bitalg, Avx512bw),
    (Avx512vpopcntdq, Avx512f),
    (Avx512vp2intersect, Avx512f),
    (Avx512bf16, Avx512bw),
    (Avx512fp16, Avx512bw),
    (AmxTile, Xfd),
    (AmxBf16, AmxTile),
    (AmxInt8, AmxTile),
    (Stibp, SpecCtrl),
    (Ssbd, SpecCtrl),
    (SgxLc, Sgx),
    (Tsxldtrk, Rtm),
    (Dtes64, Ds),
    (DsCpl, Ds),
];

const PERFORMANCE: &str = "no performance counters without PDCM";
const POWER: &str = "nothing to model: power, heat and frequencies do not exist here";
const TRACE: &str = "processor trace is hidden";
const RDT: &str = "no cache or memory bandwidth resources";
const AMX: &str = "not modelled: AMX";
const TSX: &str = "off by default, as microcode updates have it: +rtm or +rtm_always_abort shows it";
const ELISION: &str = "not modelled: lock elision and the switches of transactions";
const SECURE: &str = "not modelled: enclaves, measured launch and memory encryption";
const HYBRID: &str = "all cores are of one kind";
const LAST_BRANCHES: &str = "no architectural last-branch records";

/// Why a feature outside [`ENGINE`] is hidden. A feature of a part that is in neither list fails a test.
pub const HIDDEN: &[(Feature, &str)] = &[
    (Enqcmd, "not modelled: no device takes enqueued commands"),
    (Avx512vp2intersect, "not modelled: no part has it that has a model here"),
    (AmxTile, AMX),
    (AmxBf16, AMX),
    (AmxInt8, AMX),
    (Xfd, AMX),
    (Hle, ELISION),
    (Rtm, TSX),
    (RtmAlwaysAbort, TSX),
    (TsxForceAbort, ELISION),
    (Tsxldtrk, ELISION),
    (Mpx, "not modelled: MPX, which no later part has"),
    (
        FdpExceptionOnly,
        "the engine keeps the x87 data pointer of every instruction",
    ),
    (NoFcsFds, "the engine keeps FCS and FDS"),
    (CetSs, "not modelled: control-flow enforcement"),
    (CetIbt, "not modelled: control-flow enforcement"),
    (Uintr, "not modelled: user interrupts"),
    (KeyLocker, "not modelled: Key Locker"),
    (Hreset, HYBRID),
    (Hybrid, HYBRID),
    (Smx, SECURE),
    (Sgx, SECURE),
    (SgxLc, SECURE),
    (SgxKeys, SECURE),
    (Tme, SECURE),
    (Pconfig, SECURE),
    (
        SrbdsCtrl,
        "IA32_MCU_OPT_CTRL would switch a mitigation that the engine has no need of",
    ),
    (Sdbg, "no silicon debug interface"),
    (Eist, POWER),
    (Tm, POWER),
    (Tm2, POWER),
    (Acpi, POWER),
    (Dts, POWER),
    (TurboBoost, POWER),
    (Hwp, POWER),
    (HardwareCoordination, POWER),
    (Pbe, "no FERR# and STPCLK# pins"),
    (XtprUpdate, "no chipset listens to task priorities"),
    (Dca, "no device prefetches into the caches"),
    (CnxtId, "no cache whose mode firmware could choose"),
    (Psn, "the serial number is disabled, as firmware leaves it"),
    (Htt, "one logical processor, unless the machine has more of them"),
];

/// A word whose bits are no features: what of it stays.
#[derive(Clone, Copy, Debug)]
pub struct Word {
    /// EAX on entry.
    pub leaf: u32,
    /// ECX on entry; `None` for every subleaf.
    pub subleaf: Option<u32>,
    /// The register on return.
    pub register: Register,
    /// The bits that stay.
    pub keep: u32,
    /// The bits that stand there instead, where the part shows anything of what goes.
    pub set: u32,
    /// The condition: this feature is hidden. `None` for always.
    pub without: Option<Feature>,
    /// Why.
    pub reason: &'static str,
}

const fn word(leaf: u32, subleaf: Option<u32>, register: Register, keep: u32, reason: &'static str) -> Word {
    Word {
        leaf,
        subleaf,
        register,
        keep,
        set: 0,
        without: None,
        reason,
    }
}

const fn one(leaf: u32, subleaf: Option<u32>, register: Register, keep: u32, set: u32, reason: &'static str) -> Word {
    Word {
        set,
        ..word(leaf, subleaf, register, keep, reason)
    }
}

const fn unless(feature: Feature, leaf: u32, register: Register, reason: &'static str) -> Word {
    Word {
        without: Some(feature),
        ..word(leaf, None, register, 0, reason)
    }
}

/// The words that go with features, and the topology: one thread of one core of one package. For a machine with more
/// CPUs [`super::topology`] fills in the numbers.
pub const WORDS: &[Word] = &[
    one(0x1, None, Ebx, 0xFF00_FFFF, 0x0001_0000, "one APIC ID a package"),
    word(0x1, None, Ecx, !(1 << 27), "OSXSAVE: the core shows CR4.OSXSAVE here"),
    word(0x4, None, Eax, 0x3FFF, "one core, every cache shared by one thread"),
    unless(Monitor, 0x5, Eax, "MONITOR is hidden"),
    unless(Monitor, 0x5, Ebx, "MONITOR is hidden"),
    unless(Monitor, 0x5, Ecx, "MONITOR is hidden"),
    unless(Monitor, 0x5, Edx, "MONITOR is hidden: no C-states"),
    // ARAT stays: the timer never stops.
    word(0x6, None, Eax, 0x7, POWER),
    word(0x6, None, Ebx, 0, POWER),
    word(0x6, None, Ecx, 0x9, POWER),
    word(0x6, None, Edx, 0, POWER),
    // MAWAU, the width of MPX addresses; bit 4, OSPKE.
    word(
        0x7,
        Some(0),
        Ecx,
        0xFFC1_FFEF,
        "OSPKE: the core shows CR4.PKE here; no MPX addresses",
    ),
    word(0x9, None, Eax, 0, "no device prefetches into the caches"),
    unless(Pdcm, 0xA, Eax, PERFORMANCE),
    unless(Pdcm, 0xA, Ebx, PERFORMANCE),
    unless(Pdcm, 0xA, Ecx, PERFORMANCE),
    unless(Pdcm, 0xA, Edx, PERFORMANCE),
    word(0xB, None, Eax, 0, "no bit of the x2APIC ID selects a thread or a core"),
    one(0xB, None, Ebx, 0, 1, "one thread of one core"),
    word(0x1F, None, Eax, 0, "no bit of the x2APIC ID selects a thread or a core"),
    one(0x1F, None, Ebx, 0, 1, "one thread of one core"),
    unless(RdtM, 0xF, Eax, RDT),
    unless(RdtM, 0xF, Ebx, RDT),
    unless(RdtM, 0xF, Ecx, RDT),
    unless(RdtM, 0xF, Edx, RDT),
    unless(RdtA, 0x10, Eax, RDT),
    unless(RdtA, 0x10, Ebx, RDT),
    unless(RdtA, 0x10, Ecx, RDT),
    unless(RdtA, 0x10, Edx, RDT),
    unless(IntelPt, 0x14, Eax, TRACE),
    unless(IntelPt, 0x14, Ebx, TRACE),
    unless(IntelPt, 0x14, Ecx, TRACE),
    unless(IntelPt, 0x14, Edx, TRACE),
    unless(KeyLocker, 0x19, Eax, "Key Locker is hidden"),
    unless(KeyLocker, 0x19, Ebx, "Key Locker is hidden"),
    unless(KeyLocker, 0x19, Ecx, "Key Locker is hidden"),
    unless(Hybrid, 0x1A, Eax, HYBRID),
    unless(Pconfig, 0x1B, Eax, "PCONFIG is hidden"),
    unless(Pconfig, 0x1B, Ebx, "PCONFIG is hidden"),
    unless(ArchLbr, 0x1C, Eax, LAST_BRANCHES),
    unless(ArchLbr, 0x1C, Ebx, LAST_BRANCHES),
    unless(ArchLbr, 0x1C, Ecx, LAST_BRANCHES),
    unless(AmxTile, 0x1D, Eax, AMX),
    unless(AmxTile, 0x1D, Ebx, AMX),
    unless(AmxTile, 0x1D, Ecx, AMX),
    unless(AmxTile, 0x1E, Ebx, AMX),
    unless(Hreset, 0x20, Ebx, HYBRID),
];

/// Why leaf 0DH is what it is.
pub const XSAVE_REASON: &str = "leaf 0DH follows from the features that remain; the core fills in what XCR0 asks for";

/// The components of the XSAVE area that a feature stands for, by bit of XCR0. Bits 0 and 1, x87 and SSE, come with XSAVE.
pub const COMPONENTS: &[(u32, Feature)] = &[
    (2, Avx),
    (3, Mpx),
    (4, Mpx),
    (5, Avx512f),
    (6, Avx512f),
    (7, Avx512f),
    (9, Pku),
    (17, AmxTile),
    (18, AmxTile),
];

/// The components that XSAVES alone reaches, by bit of IA32_XSS.
pub const SUPERVISOR_COMPONENTS: &[(u32, Feature)] = &[(8, IntelPt), (15, ArchLbr)];

/// The x87 and SSE state and the header. SDM Vol. 1 13.4 "XSAVE Area".
pub const XSAVE_LEGACY: u32 = 576;

/// The row that a machine adds: the range that the architecture leaves to hypervisors. An own name, so that no guest looks
/// for another hypervisor's interface.
pub const HYPERVISOR: CpuidRow = CpuidRow {
    leaf: super::HYPERVISOR_LEAVES,
    subleaf: None,
    regs: [
        super::HYPERVISOR_LEAVES,
        u32::from_le_bytes(*b"mini"),
        u32::from_le_bytes(*b"vmm "),
        u32::from_le_bytes(*b"    "),
    ],
};

/// Whether the machine executes it, by default or on demand.
pub fn executes(feature: Feature) -> bool {
    ENGINE.has(feature) || ON_DEMAND.iter().any(|(other, _)| *other == feature)
}

/// What of a part with these features is shown.
pub const fn shown(part: Features) -> Features {
    part.and(ENGINE).with(Hypervisor)
}

/// The guest's rows: the part's with [`HYPERVISOR`] among them, [narrowed](narrow_rows), and the model's own adjustments.
/// A difference without a row does not compile.
pub const fn narrow<const N: usize, const M: usize>(
    silicon: &[CpuidRow; N],
    adjustments: &[Difference],
) -> [CpuidRow; M] {
    assert!(M == N + 1, "one row more than the part has");
    let mut rows = [HYPERVISOR; M];
    let (mut from, mut to) = (0, 0);
    while from < N {
        if to == from && silicon[from].leaf > HYPERVISOR.leaf {
            to += 1;
        }
        rows[to] = silicon[from];
        from += 1;
        to += 1;
    }
    narrow_rows(&mut rows, shown(Features::of(silicon)));
    adjust(&mut rows, adjustments);
    rows
}

/// Narrows a part's rows to `features`.
pub const fn narrow_rows(rows: &mut [CpuidRow], features: Features) {
    let mut f = 0;
    while f < Feature::ALL.len() {
        let place = Feature::ALL[f].place();
        let mut r = 0;
        while r < rows.len() {
            if rows[r].leaf == place.leaf && rows[r].answers(place.subleaf) {
                let regs = &mut rows[r].regs;
                let bit = 1 << place.bit;
                if features.has(Feature::ALL[f]) {
                    regs[place.register as usize] |= bit;
                } else {
                    regs[place.register as usize] &= !bit;
                }
            }
            r += 1;
        }
        f += 1;
    }
    let mut w = 0;
    while w < WORDS.len() {
        let mut r = 0;
        while r < rows.len() {
            if WORDS[w].applies(&rows[r], features) {
                let was = rows[r].regs[WORDS[w].register as usize];
                if was & !WORDS[w].keep != 0 {
                    rows[r].regs[WORDS[w].register as usize] = was & WORDS[w].keep | WORDS[w].set;
                }
            }
            r += 1;
        }
        w += 1;
    }
    xsave(rows, features);
}

impl Word {
    /// Whether it speaks of `row` when these features are shown.
    pub const fn applies(&self, row: &CpuidRow, features: Features) -> bool {
        let here = match (self.subleaf, row.subleaf) {
            (Some(word), Some(row)) => word == row,
            _ => true,
        };
        let now = match self.without {
            Some(feature) => !features.has(feature),
            None => true,
        };
        self.leaf == row.leaf && here && now
    }
}

/// Leaf 0DH. SDM Vol. 1 13.2 "Enumeration of CPU Support for XSAVE Instructions and XSAVE-Supported Features".
const fn xsave(rows: &mut [CpuidRow], features: Features) {
    const LEAF: u32 = 0xD;
    let user = if features.has(Xsave) {
        0b11 | supported_components(rows, features, COMPONENTS)
    } else {
        0
    };
    let supervisor = if features.has(Xsaves) {
        supported_components(rows, features, SUPERVISOR_COMPONENTS)
    } else {
        0
    };
    let mut size = XSAVE_LEGACY;
    let mut r = 0;
    while r < rows.len() {
        if let (LEAF, Some(component @ 2..)) = (rows[r].leaf, rows[r].subleaf) {
            if component < 32 && user >> component & 1 != 0 {
                let end = rows[r].regs[0] + rows[r].regs[1];
                if end > size {
                    size = end;
                }
            } else if component >= 32 || supervisor >> component & 1 == 0 {
                rows[r].regs = [0; 4];
            }
        }
        r += 1;
    }
    r = 0;
    while r < rows.len() {
        if rows[r].leaf == LEAF {
            match rows[r].subleaf {
                Some(0) if features.has(Xsave) => rows[r].regs = [user, XSAVE_LEGACY, size, 0],
                Some(1) if features.has(Xsave) => {
                    let compacted = features.has(Xsavec);
                    rows[r].regs = [rows[r].regs[0], if compacted { XSAVE_LEGACY } else { 0 }, supervisor, 0];
                }
                Some(0 | 1) => rows[r].regs = [0; 4],
                _ => {}
            }
        }
        r += 1;
    }
}

/// The bits of those components that the rows have one for and `features` a feature.
const fn supported_components(rows: &[CpuidRow], features: Features, components: &[(u32, Feature)]) -> u32 {
    let mut supported = 0;
    let mut c = 0;
    while c < components.len() {
        let (bit, feature) = components[c];
        let mut r = 0;
        while r < rows.len() {
            let here = rows[r].leaf == 0xD && rows[r].subleaf.is_some() && rows[r].answers(bit);
            if here && features.has(feature) && rows[r].regs[0] != 0 {
                supported |= 1 << bit;
            }
            r += 1;
        }
        c += 1;
    }
    supported
}

/// Applies a model's own adjustments.
pub(super) const fn adjust(rows: &mut [CpuidRow], adjustments: &[Difference]) {
    let mut d = 0;
    while d < adjustments.len() {
        let difference = &adjustments[d];
        let mut found = false;
        let mut r = 0;
        while r < rows.len() {
            if rows[r].leaf == difference.leaf && rows[r].answers(difference.subleaf) {
                let register = difference.register as usize;
                let was = rows[r].regs[register];
                rows[r].regs[register] = was & !difference.clear | difference.set;
                found = true;
            }
            r += 1;
        }
        assert!(found, "an adjustment names a leaf without a row");
        d += 1;
    }
}

/// Why `feature`, which the part shows, is hidden.
pub fn why_hidden(feature: Feature) -> Option<&'static str> {
    HIDDEN
        .iter()
        .find(|(hidden, _)| *hidden == feature)
        .map(|(_, why)| *why)
}

/// The contradictions in a set of features: a feature, and what it needs and has not.
pub fn contradictions(features: Features) -> Vec<(Feature, Feature)> {
    NEEDS
        .iter()
        .filter(|(feature, needed)| features.has(*feature) && !features.has(*needed))
        .copied()
        .collect()
}
