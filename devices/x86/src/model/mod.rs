//! CPU models as data: one file each.
//!
//! A model's rows are what a real part answers. What a guest sees of them is one policy for all models ([`policy`]): less
//! what this machine does not model yet, plus what a virtual machine adds. [`CpuModel::differences`] lists every change
//! with its reason. A model of a user's own making, or one with features switched on the command line, is an
//! [`OwnedModel`] first.

mod alderlake;
mod broadwell;
mod core2;
mod error;
mod haswell;
mod icelake_server;
pub mod msrs;
mod netburst;
mod owned;
mod p6;
pub mod policy;
mod sandybridge;
mod sapphirerapids;
mod skylake_server;
mod snowridge;
pub mod topology;
mod westmere;

pub use alderlake::ALDERLAKE;
pub use broadwell::BROADWELL;
pub use core2::CORE2;
pub use error::{LeafError, ModelError};
pub use haswell::HASWELL;
pub use icelake_server::ICELAKE_SERVER;
pub use netburst::NETBURST;
pub use owned::{OwnedModel, feature_named};
pub use p6::P6;
pub use sandybridge::SANDYBRIDGE;
pub use sapphirerapids::SAPPHIRERAPIDS;
pub use skylake_server::SKYLAKE_SERVER;
pub use snowridge::SNOWRIDGE;
pub use westmere::WESTMERE;

use alloc::vec::Vec;

use crate::cpuid::{Feature, Features, Register};
use crate::debugctl::DebugCtlCaps;
use crate::ds::DsCaps;
use crate::lbr::LbrCaps;
use crate::msr::MsrFault;
use crate::pmu::PmuCaps;
use crate::pt::PtCaps;
use crate::vmx::VmxCaps;

/// One row of CPUID: what a leaf (and subleaf, where it has any) answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidRow {
    /// EAX on entry.
    pub leaf: u32,
    /// ECX on entry; `None` where the leaf ignores it.
    pub subleaf: Option<u32>,
    /// EAX, EBX, ECX, EDX on return.
    pub regs: [u32; 4],
}

impl CpuidRow {
    /// Whether this row of its leaf answers `subleaf`.
    pub const fn answers(&self, subleaf: u32) -> bool {
        match self.subleaf {
            Some(own) => own == subleaf,
            None => true,
        }
    }
}

/// A row of a leaf that ignores ECX.
const fn leaf(leaf: u32, regs: [u32; 4]) -> CpuidRow {
    CpuidRow {
        leaf,
        subleaf: None,
        regs,
    }
}

/// A row of one subleaf.
const fn subleaf(leaf: u32, subleaf: u32, regs: [u32; 4]) -> CpuidRow {
    CpuidRow {
        leaf,
        subleaf: Some(subleaf),
        regs,
    }
}

/// Where a model's CPUID is not the real part's, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// EAX on entry.
    pub leaf: u32,
    /// ECX on entry; 0 where the leaf ignores it.
    pub subleaf: u32,
    /// The register that differs.
    pub register: Register,
    /// Bits that the part shows and the model does not.
    pub clear: u32,
    /// Bits that the model shows and the part does not.
    pub set: u32,
    /// The feature, if the difference is one.
    pub feature: Option<Feature>,
    /// The reason.
    pub reason: &'static str,
}

/// What a written value must satisfy beyond the writable bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Nothing more.
    None,
    /// Every WRMSR is #GP(0), whatever the value.
    ReadOnly,
    /// Each byte is a memory type that the PAT knows. SDM Vol. 3A 12.12.2 "IA32_PAT MSR".
    PatTypes,
    /// Each byte is a memory type that an MTRR knows. SDM Vol. 3A 12.11.2.2 "Fixed Range MTRRs".
    MtrrTypes,
    /// The lowest byte is a memory type that an MTRR knows. SDM Vol. 3A 12.11.2 "Setting Memory Ranges with MTRRs".
    MtrrType,
    /// All zeros or all ones. SDM Vol. 3B 16.3.2.1 "IA32_MCi_CTL MSRs".
    ZerosOrOnes,
    /// A command: RDMSR is #GP(0), and a WRMSR leaves nothing behind.
    Command,
}

/// One model-specific register that is plain storage: no unit gives it a meaning of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsrRow {
    /// The register's number.
    pub msr: u32,
    /// Its manual name.
    pub name: &'static str,
    /// The value when the machine starts. There is no firmware in the machine, so this is the value that firmware leaves
    /// behind where it changes the reset value (memory types, lock bits); the rows say so.
    pub reset: u64,
    /// Bits that a WRMSR may change. A write that differs from the present value in any other bit is #GP(0), unless
    /// `ignore_reserved`.
    pub writable: u64,
    /// Writes to bits outside `writable` are dropped instead of faulting (`writable` 0 and this: writes are ignored).
    pub ignore_reserved: bool,
    /// What else a written value must satisfy.
    pub check: Check,
}

impl MsrRow {
    /// A register that reads `value` and faults when written.
    pub const fn read_only(msr: u32, name: &'static str, value: u64) -> Self {
        Self {
            msr,
            name,
            reset: value,
            writable: 0,
            ignore_reserved: false,
            check: Check::ReadOnly,
        }
    }

    /// A register whose `writable` bits are storage and whose other bits must be written as they are.
    pub const fn storage(msr: u32, name: &'static str, reset: u64, writable: u64) -> Self {
        Self {
            msr,
            name,
            reset,
            writable,
            ignore_reserved: false,
            check: Check::None,
        }
    }

    /// A command register: it can only be written, with any of the `writable` bits.
    pub const fn command(msr: u32, name: &'static str, writable: u64) -> Self {
        Self::storage(msr, name, 0, writable).checked(Check::Command)
    }

    /// What RDMSR reads when the register holds `current`.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for a command register.
    pub const fn read(&self, current: u64) -> Result<u64, MsrFault> {
        match self.check {
            Check::Command => Err(MsrFault::GeneralProtection),
            _ => Ok(current),
        }
    }

    /// The same row with a check.
    pub const fn checked(self, check: Check) -> Self {
        Self { check, ..self }
    }

    /// What the register holds after WRMSR of `value` when it held `current`.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] where the manual has #GP(0): a read-only register, a reserved bit, a memory type
    /// that does not exist.
    pub fn write(&self, current: u64, value: u64) -> Result<u64, MsrFault> {
        let accepted = match self.check {
            Check::None | Check::Command => true,
            Check::ReadOnly => false,
            Check::PatTypes => value
                .to_le_bytes()
                .iter()
                .all(|&t| is_mtrr_type(t) || t == UNCACHED_MINUS),
            Check::MtrrTypes => value.to_le_bytes().iter().all(|&t| is_mtrr_type(t)),
            Check::MtrrType => is_mtrr_type(value.to_le_bytes()[0]),
            Check::ZerosOrOnes => matches!(value, 0 | u64::MAX),
        };
        let reserved = (value ^ current) & !self.writable != 0 && !self.ignore_reserved;
        if !accepted || reserved {
            return Err(MsrFault::GeneralProtection);
        }
        match self.check {
            Check::Command => Ok(current),
            _ => Ok(current & !self.writable | value & self.writable),
        }
    }
}

/// UC-, a type of the PAT alone. SDM Vol. 3A Table 12-10 "Memory Types That Can Be Encoded With PAT".
const UNCACHED_MINUS: u8 = 7;

/// UC, WC, WT, WP, WB. SDM Vol. 3A Table 12-8 "Memory Types That Can Be Encoded in MTRRs".
fn is_mtrr_type(byte: u8) -> bool {
    matches!(byte, 0 | 1 | 4 | 5 | 6)
}

/// A CPU as software sees it.
#[derive(Debug)]
pub struct CpuModel {
    /// The name on the command line.
    pub name: &'static str,
    /// One line for `minivmm models`.
    pub description: &'static str,
    /// The time-stamp counter's frequency in kHz.
    pub tsc_khz: u32,
    /// The local APIC timer's input frequency in kHz, before the divider.
    pub apic_timer_khz: u32,
    /// Revision of the loaded microcode update: CPUID with EAX = 1 loads it into bits 63:32 of IA32_BIOS_SIGN_ID.
    /// SDM Vol. 3A 10.11.7.1 "Determining the Signature".
    pub microcode: u32,
    /// What the part's own CPUID answers, on the thread with APIC ID 0.
    pub silicon: &'static [CpuidRow],
    /// What the guest's CPUID answers, in ascending order of leaf and subleaf.
    pub cpuid: &'static [CpuidRow],
    /// Where `cpuid` departs from the policy for all models.
    pub adjustments: &'static [Difference],
    /// Features that were added to the part's by a toggle.
    pub added: Features,
    /// Features that a toggle asked for, added or not.
    pub asked: Features,
    /// Features that were taken from the part's by a toggle.
    pub removed: Features,
    /// The plain MSRs, in ascending order.
    pub msrs: &'static [MsrRow],
    /// What its debug and trace units can do.
    pub units: UnitCaps,
    /// What the part can do in VMX operation, if it has any. A guest sees what [`CpuModel::shown_vmx`] says.
    pub vmx: Option<VmxCaps>,
}

/// What a model's debug and trace units can do; `None` where it has no such unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitCaps {
    /// IA32_DEBUGCTL, or what came before it.
    pub debugctl: Option<DebugCtlCaps>,
    /// Last-branch records.
    pub lbr: Option<LbrCaps>,
    /// Branch trace store and processor-event-based sampling.
    pub ds: Option<DsCaps>,
    /// Performance counters.
    pub pmu: Option<PmuCaps>,
    /// Intel Processor Trace.
    pub pt: Option<PtCaps>,
}

impl UnitCaps {
    /// None of them.
    pub const NONE: Self = Self {
        debugctl: None,
        lbr: None,
        ds: None,
        pmu: None,
        pt: None,
    };
}

impl CpuModel {
    /// A part without anything: what a model's row leaves out.
    pub const NONE: Self = Self {
        name: "",
        description: "",
        tsc_khz: 0,
        apic_timer_khz: 0,
        microcode: 0,
        silicon: &[],
        cpuid: &[],
        adjustments: &[],
        added: Features::NONE,
        asked: Features::NONE,
        removed: Features::NONE,
        msrs: &[],
        units: UnitCaps::NONE,
        vmx: None,
    };

    /// What CPUID answers: `[eax, ebx, ecx, edx]` for EAX = `leaf` and ECX = `subleaf`.
    ///
    /// A leaf above the highest of its range answers as the highest basic leaf does, ECX honoured; an absent leaf below
    /// the highest answers zeros. SDM Vol. 2A "CPUID—CPU Identification". What depends on the state of the core or on the
    /// number of CPUs (OSXSAVE, APIC IDs, SYSCALL outside 64-bit mode) is for the caller to fill in.
    pub fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let leaf = self.answering(leaf);
        let rows = self.rows(leaf);
        match rows.iter().find(|row| row.subleaf.is_none_or(|s| s == subleaf)) {
            Some(row) => row.regs,
            // An invalid level: ECX[7:0] comes back, EDX is the x2APIC ID all the same.
            None if TOPOLOGY_LEAVES.contains(&leaf) && !rows.is_empty() => {
                [0, 0, subleaf & 0xFF, rows.first().map_or(0, |row| row.regs[3])]
            }
            None => [0; 4],
        }
    }

    /// The leaf whose rows answer for a leaf: itself, or the highest basic one.
    fn answering(&self, leaf: u32) -> u32 {
        let highest = |first: u32| self.rows(first).first().map_or(0, |row| row.regs[0]);
        let known = [0, HYPERVISOR_LEAVES, EXTENDED_LEAVES]
            .iter()
            .any(|&first| (first..=first | 0xFFFF).contains(&leaf) && leaf <= highest(first));
        if known { leaf } else { highest(0) }
    }

    /// The plain MSR with this number.
    pub fn msr(&self, msr: u32) -> Option<&'static MsrRow> {
        let index = self.msrs.binary_search_by_key(&msr, |row| row.msr).ok()?;
        self.msrs.get(index)
    }

    /// What the model's CPUID says it can do.
    pub fn features(&self) -> Features {
        Features::of(self.cpuid)
    }

    /// What a guest sees of VMX: `None` where CPUID does not show it.
    pub fn shown_vmx(&self) -> Option<VmxCaps> {
        let features = self.features();
        self.vmx.filter(|_| features.vmx()).map(|caps| caps.shown(features))
    }

    /// What the part's CPUID says it can do.
    pub fn part_features(&self) -> Features {
        Features::of(self.silicon)
    }

    /// WRMSR of the time-stamp counter writes its low half and clears the high one: on family 6 before model 0EH and family 15
    /// before model 3. SDM Vol. 3B 18.17 "Time-Stamp Counter"; Vol. 4 "MSRs in the Pentium 4 and Intel Xeon Processors", 10H.
    pub fn tsc_write_is_low_half(&self) -> bool {
        let signature = self.cpuid(1, 0)[0];
        let (family, model) = (signature >> 8 & 15, signature >> 4 & 15 | signature >> 12 & 0xF0);
        match family {
            15 => signature >> 20 & 0xFF == 0 && model < 3,
            6 => model < 0xE,
            _ => family < 6,
        }
    }

    /// The width of physical addresses in bits: CPUID.80000008H:EAX\[7:0\], or what a part without that leaf has. SDM Vol. 3A
    /// 4.1.4 "Enumeration of Paging Features by CPUID".
    pub fn physical_bits(&self) -> u32 {
        match self.widths() {
            Some(eax) => eax & 0xFF,
            None if self.features().pae() || self.features().pse36() => 36,
            None => 32,
        }
    }

    /// The width of linear addresses in bits: CPUID.80000008H:EAX\[15:8\], or 32 where the part has no such leaf.
    pub fn linear_bits(&self) -> u32 {
        self.widths().map_or(32, |eax| eax >> 8 & 0xFF)
    }

    /// CPUID.80000008H:EAX, if there is such a leaf.
    fn widths(&self) -> Option<u32> {
        let row = self.rows(0x8000_0008).first()?;
        Some(row.regs[0])
    }

    /// The size in bytes of the XSAVE area for the components in `mask` (XCR0, or XCR0 and IA32_XSS), in the standard or the
    /// compacted format: CPUID.0DH.0:EBX and 0DH.1:EBX. SDM Vol. 1 13.4 "XSAVE Area".
    pub fn xsave_area(&self, mask: u64, compacted: bool) -> u32 {
        let mut end = policy::XSAVE_LEGACY;
        for row in self.rows(0xD) {
            let Some(component @ 2..64) = row.subleaf else { continue };
            let [size, offset, flags, _] = row.regs;
            if mask >> component & 1 == 0 {
                continue;
            }
            end = if compacted {
                let start = if flags & 2 != 0 { end.next_multiple_of(64) } else { end };
                start.saturating_add(size)
            } else {
                end.max(offset.saturating_add(size))
            };
        }
        end
    }

    /// Every bit in which the guest's CPUID is not the part's, with its reason, in the order of the rows.
    pub fn differences(&self) -> Vec<Difference> {
        let shown = self.features();
        let mut differences = Vec::new();
        for row in self.cpuid {
            let subleaf = row.subleaf.unwrap_or(0);
            let part = self
                .silicon
                .iter()
                .find(|part| (part.leaf, part.subleaf) == (row.leaf, row.subleaf));
            for register in [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx] {
                let was = part.map_or(0, |part| part.regs[register as usize]);
                let now = row.regs[register as usize];
                let mut left = was ^ now;
                let mut take = |bits: u32, feature, reason| {
                    let bits = bits & left;
                    left &= !bits;
                    if bits != 0 {
                        differences.push(Difference {
                            leaf: row.leaf,
                            subleaf,
                            register,
                            clear: was & bits,
                            set: now & bits,
                            feature,
                            reason,
                        });
                    }
                };
                for d in self.adjustments {
                    if (d.leaf, d.subleaf, d.register) == (row.leaf, subleaf, register) {
                        take(d.clear | d.set, d.feature, d.reason);
                    }
                }
                for &feature in Feature::ALL {
                    let place = feature.place();
                    if place.leaf == row.leaf && row.answers(place.subleaf) && place.register == register {
                        take(1 << place.bit, Some(feature), self.why(feature));
                    }
                }
                for word in policy::WORDS {
                    if word.register == register && word.applies(row, shown) {
                        take(!word.keep | word.set, None, word.reason);
                    }
                }
                match row.leaf {
                    0xD => take(!0, None, policy::XSAVE_REASON),
                    HYPERVISOR_LEAVES => take(!0, None, "the range that the architecture leaves to hypervisors"),
                    _ => take(!0, None, UNEXPLAINED),
                }
            }
        }
        differences
    }

    /// Why a feature is shown that the part has not, or hidden that it has.
    fn why(&self, feature: Feature) -> &'static str {
        if self.removed.has(feature) || self.added.has(feature) {
            "asked for"
        } else if feature == Feature::Hypervisor {
            "guests then leave uncore, microcode and RAPL registers alone"
        } else {
            policy::why_hidden(feature).unwrap_or(UNEXPLAINED)
        }
    }

    /// All rows of one leaf.
    fn rows(&self, leaf: u32) -> &'static [CpuidRow] {
        let start = self.cpuid.partition_point(|row| row.leaf < leaf);
        let end = self.cpuid.partition_point(|row| row.leaf <= leaf);
        &self.cpuid[start..end]
    }
}

/// The first leaf of the range that the architecture leaves to hypervisors.
const HYPERVISOR_LEAVES: u32 = 0x4000_0000;
/// The first extended leaf.
const EXTENDED_LEAVES: u32 = 0x8000_0000;
/// Extended topology enumeration, whose invalid levels answer more than zeros.
const TOPOLOGY_LEAVES: [u32; 2] = [0xB, 0x1F];

/// What a difference says that no rule explains: a test fails on it.
const UNEXPLAINED: &str = "unexplained";

/// All models, oldest first.
pub const MODELS: &[&CpuModel] = &[
    &P6,
    &NETBURST,
    &CORE2,
    &WESTMERE,
    &SANDYBRIDGE,
    &HASWELL,
    &BROADWELL,
    &SKYLAKE_SERVER,
    &ICELAKE_SERVER,
    &SNOWRIDGE,
    &SAPPHIRERAPIDS,
    &ALDERLAKE,
];

/// The model with this name.
pub fn by_name(name: &str) -> Option<&'static CpuModel> {
    MODELS
        .iter()
        .find(|model| model.name.eq_ignore_ascii_case(name))
        .copied()
}

#[cfg(test)]
mod table;
#[cfg(test)]
#[path = "model_test.rs"]
mod tests;
