//! Why a CPU model cannot be made.

use alloc::string::String;
use alloc::vec::Vec;

use crate::cpuid::Feature;

/// What is wrong with a model, or with a change of one. Each is one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// A row for a register that the core or a unit holds.
    #[error("MSR {0:X}H is not a plain one: the machine itself holds it")]
    HeldElsewhere(u32),
    /// Neither `+feature` nor `-feature`.
    #[error("`{0}` is no toggle: write +feature or -feature")]
    NoToggle(String),
    /// No feature has this name.
    #[error("unknown feature `{0}`")]
    UnknownFeature(String),
    /// `apic`, without which there is no machine.
    #[error("apic is the machine's interrupt controller and cannot be switched")]
    Apic,
    /// One feature on and off at once.
    #[error("{} is switched both on and off", .0.flag())]
    BothWays(Feature),
    /// The engine does not execute it.
    #[error("{}: the engine does not have it ({why})", feature.flag())]
    NotExecuted {
        /// What was switched on.
        feature: Feature,
        /// Why it is not there.
        why: &'static str,
    },
    /// The part's CPUID ends before it.
    #[error("{}: {model} has no CPUID leaf {leaf:X}H to show it in", feature.flag())]
    NoLeaf {
        /// What was switched on.
        feature: Feature,
        /// The model's name.
        model: String,
        /// Where CPUID would enumerate it.
        leaf: u32,
    },
    /// VMX on a part that has none.
    #[error("vmx: {0} has no virtual-machine extensions; core2 and all later models have them")]
    NoVmx(String),
    /// Features without those that they need.
    #[error("{}", pairs(.0))]
    Contradiction(Vec<(Feature, Feature)>),
    /// CPUID leaves that do not fit together.
    #[error("CPUID leaf {0}")]
    Leaf(LeafError),
    /// A register whose own value its check would refuse.
    #[error("MSR {msr:X}H ({name}) would refuse its own value {value:X}H")]
    OwnValue {
        /// The register.
        msr: u32,
        /// Its name.
        name: &'static str,
        /// The value that it begins with.
        value: u64,
    },
    /// IA32_MTRRCAP and the registers differ.
    #[error("IA32_MTRRCAP counts {0} variable ranges, and not all of them have registers")]
    Mtrrs(u64),
    /// IA32_MTRRCAP\[11\] and the system-management range registers differ.
    #[error("IA32_MTRRCAP[11] is {}, and IA32_SMRR_PHYSBASE and IA32_SMRR_PHYSMASK are not there just where it is 1", u8::from(*.0))]
    Smrr(bool),
    /// IA32_MCG_CAP and the registers differ.
    #[error("IA32_MCG_CAP counts {0} banks, and not all of them have registers")]
    Banks(u64),
    /// A time-stamp counter out of range.
    #[error("tsc_khz is {0}, not between 1000 and 10000000")]
    TscKhz(u32),
    /// An APIC timer out of range.
    #[error("apic_timer_khz is {0}, not between 1000 and tsc_khz")]
    ApicTimerKhz(u32),
    /// A frequency of the time-stamp counter that this model does not take.
    #[error("{model} takes {least} (its APIC timer's clock) to 10000000")]
    TscRange {
        /// The model's name.
        model: String,
        /// The least that it takes, in kHz.
        least: u32,
    },
    /// A frequency that leaf 15H cannot say.
    #[error(
        "{model} tells guests a ratio to its crystal of {crystal} kHz, and they compute in 32 bits: give a multiple of 100, as {near}"
    )]
    TscRatio {
        /// The model's name.
        model: String,
        /// The crystal's frequency in kHz.
        crystal: u32,
        /// A frequency near by that can be said, in kHz.
        near: u32,
    },
    /// A frequency of the APIC timer that this model does not take.
    #[error("an APIC timer of {khz} kHz: {why}")]
    ApicTimer {
        /// What was asked for, in kHz.
        khz: u32,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// What is wrong with the leaves of CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeafError {
    /// Leaf 0 or leaf 1 is missing.
    #[error("0 must name a highest leaf, and there must be a leaf 1")]
    First,
    /// A number in none of the two ranges.
    #[error("{0:X}H is neither a basic nor an extended one")]
    Range(u32),
    /// A leaf above the one that is said to be the highest.
    #[error("{leaf:X}H is above the highest, {highest:X}H")]
    AboveHighest {
        /// The leaf.
        leaf: u32,
        /// What leaf 0 or 80000000H says.
        highest: u32,
    },
    /// Widths of addresses that no part has.
    #[error("80000008H: {physical} physical and {linear} linear address bits")]
    Widths {
        /// Bits of a physical address.
        physical: u32,
        /// Bits of a linear address.
        linear: u32,
    },
    /// A component of XSAVE out of reach.
    #[error("0DH: a component beyond 64 KiB")]
    Component,
}

fn pairs(wrong: &[(Feature, Feature)]) -> String {
    let mut text = String::new();
    for (feature, needed) in wrong {
        if !text.is_empty() {
            text += "; ";
        }
        text += feature.flag();
        text += " needs ";
        text += needed.flag();
    }
    text
}
