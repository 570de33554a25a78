//! CPU models as data: one file each.
//!
//! A model's CPUID is what a real part answers, less what this machine does not model yet, plus what a virtual machine
//! adds. The rows hold the result; [`CpuModel::differences`] lists every change with its reason.

mod westmere;

pub use westmere::WESTMERE;

use crate::cpuid::{Features, Register};
use crate::msr::MsrFault;

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
    /// The feature and the reason.
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
            Check::None => true,
            Check::ReadOnly => false,
            Check::PatTypes => value
                .to_le_bytes()
                .iter()
                .all(|&t| is_mtrr_type(t) || t == UNCACHED_MINUS),
            Check::MtrrTypes => value.to_le_bytes().iter().all(|&t| is_mtrr_type(t)),
            Check::MtrrType => is_mtrr_type(value.to_le_bytes()[0]),
        };
        let reserved = (value ^ current) & !self.writable != 0 && !self.ignore_reserved;
        if !accepted || reserved {
            return Err(MsrFault::GeneralProtection);
        }
        Ok(current & !self.writable | value & self.writable)
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
    /// CPUID, in ascending order of leaf and subleaf.
    pub cpuid: &'static [CpuidRow],
    /// Where `cpuid` is not what the real part answers.
    pub differences: &'static [Difference],
    /// The plain MSRs, in ascending order.
    pub msrs: &'static [MsrRow],
}

impl CpuModel {
    /// What CPUID answers: `[eax, ebx, ecx, edx]` for EAX = `leaf` and ECX = `subleaf`.
    ///
    /// A leaf above the highest of its range answers as the highest basic leaf does, ECX honoured; an absent leaf below
    /// the highest answers zeros. SDM Vol. 2A "CPUID—CPU Identification". What depends on the state of the core or on the
    /// number of CPUs (OSXSAVE, APIC IDs, SYSCALL outside 64-bit mode) is for the caller to fill in.
    pub fn cpuid(&self, leaf: u32, subleaf: u32) -> [u32; 4] {
        let highest = |first: u32| self.rows(first).first().map_or(0, |row| row.regs[0]);
        let known = [0, HYPERVISOR_LEAVES, EXTENDED_LEAVES]
            .iter()
            .any(|&first| (first..=first | 0xFFFF).contains(&leaf) && leaf <= highest(first));
        let leaf = if known { leaf } else { highest(0) };

        let rows = self.rows(leaf);
        match rows.iter().find(|row| row.subleaf.is_none_or(|s| s == subleaf)) {
            Some(row) => row.regs,
            // An invalid level: ECX[7:0] comes back, EDX is the x2APIC ID all the same.
            None if leaf == TOPOLOGY_LEAF => [0, 0, subleaf & 0xFF, rows.first().map_or(0, |row| row.regs[3])],
            None => [0; 4],
        }
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

    /// The width of physical addresses in bits: CPUID.80000008H:EAX[7:0].
    pub fn physical_bits(&self) -> u32 {
        self.cpuid(0x8000_0008, 0)[0] & 0xFF
    }

    /// The width of linear addresses in bits: CPUID.80000008H:EAX[15:8].
    pub fn linear_bits(&self) -> u32 {
        self.cpuid(0x8000_0008, 0)[0] >> 8 & 0xFF
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
const TOPOLOGY_LEAF: u32 = 0xB;

/// The part's rows with the differences applied, at compile time. A difference without a row does not compile.
const fn apply<const N: usize>(mut rows: [CpuidRow; N], differences: &[Difference]) -> [CpuidRow; N] {
    let mut d = 0;
    while d < differences.len() {
        let difference = &differences[d];
        let mut found = false;
        let mut r = 0;
        while r < N {
            let subleaf = match rows[r].subleaf {
                Some(subleaf) => subleaf,
                None => 0,
            };
            if rows[r].leaf == difference.leaf && subleaf == difference.subleaf {
                let register = difference.register as usize;
                let was = rows[r].regs[register];
                assert!(
                    was & difference.clear == difference.clear,
                    "the part does not show what is to be hidden"
                );
                assert!(
                    was & difference.set & !difference.clear == 0,
                    "the part shows what is to be added"
                );
                rows[r].regs[register] = was & !difference.clear | difference.set;
                found = true;
            }
            r += 1;
        }
        assert!(found, "a difference names a leaf without a row");
        d += 1;
    }
    rows
}

/// All models, oldest first.
pub const MODELS: &[&CpuModel] = &[&WESTMERE];

/// The model with this name.
pub fn by_name(name: &str) -> Option<&'static CpuModel> {
    MODELS
        .iter()
        .find(|model| model.name.eq_ignore_ascii_case(name))
        .copied()
}

#[cfg(test)]
mod tests;
