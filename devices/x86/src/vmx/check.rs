//! What VM entry checks, in the manual's order: a row of a table for each rule.
//!
//! SDM Vol. 3C 27.2 "Checks on VMX Controls and Host-State Area", 27.3 "Checking and Loading Guest State". A rule is broken or not by
//! a VMCS on a processor ([`Processor`]); nothing here changes either.

mod controls;
mod guest;
mod host;

pub use controls::{CONTROLS, bad_ept_pointer};
pub use guest::GUEST;
pub use host::HOST;

use super::controls::{Entry, Exit, Pin, Primary, Secondary};
use super::fields::{Field, Vmcs};
use super::{InstructionError, VmxCaps};
use crate::cpuid::Features;
use crate::lbr::ArchLbrLeaf;
use crate::model::CpuModel;

/// What of the processor the rules depend on.
pub struct Processor<'a> {
    /// What it can do in VMX operation.
    pub caps: &'a VmxCaps,
    /// Its features.
    pub features: Features,
    /// The width of physical addresses.
    pub physical_bits: u32,
    /// The width of linear addresses.
    pub linear_bits: u32,
    /// IA32_EFER.LMA now.
    pub long_mode: bool,
    /// Bits that IA32_DEBUGCTL can hold.
    pub debugctl: u64,
    /// Bits that IA32_PERF_GLOBAL_CTRL can hold.
    pub perf_global_ctrl: u64,
    /// What its units can do.
    pub model: &'a CpuModel,
    /// Intel PT is on: IA32_RTIT_CTL.TraceEn.
    pub tracing: bool,
    /// Reads eight bytes of physical memory.
    pub read: &'a dyn Fn(u64) -> u64,
}

/// A rule.
pub struct Rule {
    /// The manual's section.
    pub section: &'static str,
    /// What the rule asks for.
    pub name: &'static str,
    /// The exit qualification when a rule on guest state is broken: see [`super::exits::failure`].
    pub qualification: u64,
    /// Whether it is broken.
    pub broken: fn(&Vmcs, &Processor<'_>) -> bool,
}

impl core::fmt::Debug for Rule {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}: {}", self.section, self.name)
    }
}

/// The table of the rules of a section: `rules! { "27.2.1.1", "what it asks for" => |v, p| whether it is broken; }`.
macro_rules! rules {
    ($($section:literal $(($qualification:expr))? $name:literal => $broken:expr;)*) => {
        &[$($crate::vmx::check::Rule {
            section: $section,
            name: $name,
            qualification: { let q = 0; $(let _ = q; let q = $qualification;)? q },
            broken: $broken,
        },)*]
    };
}
pub(crate) use rules;

/// The first rule of a table that a VMCS breaks.
pub fn first_broken(rules: &'static [Rule], vmcs: &Vmcs, processor: &Processor<'_>) -> Option<&'static Rule> {
    rules.iter().find(|rule| (rule.broken)(vmcs, processor))
}

/// The checks that make VM entry fail as an instruction: on controls, then on host state.
///
/// # Errors
/// The number for the VM-instruction error field, with the rule.
pub fn instruction(vmcs: &Vmcs, processor: &Processor<'_>) -> Result<(), (InstructionError, &'static Rule)> {
    if let Some(rule) = first_broken(CONTROLS, vmcs, processor) {
        return Err((InstructionError::Controls, rule));
    }
    match first_broken(HOST, vmcs, processor) {
        Some(rule) => Err((InstructionError::HostState, rule)),
        None => Ok(()),
    }
}

/// The checks on guest state, which make VM entry fail with exit reason 33.
///
/// # Errors
/// The rule, which has the exit qualification.
pub fn guest_state(vmcs: &Vmcs, processor: &Processor<'_>) -> Result<(), &'static Rule> {
    first_broken(GUEST, vmcs, processor).map_or(Ok(()), Err)
}

// What more than one table asks.

impl Vmcs {
    /// The pin-based controls.
    pub fn pin(&self) -> Pin {
        Pin(self.get32(Field::PIN_CONTROLS))
    }

    /// The primary processor-based controls.
    pub fn primary(&self) -> Primary {
        Primary(self.get32(Field::PRIMARY_CONTROLS))
    }

    /// The secondary processor-based controls as they count: none unless they are activated.
    pub fn secondary(&self) -> Secondary {
        if self.primary().contains(Primary::SECONDARY) {
            Secondary(self.get32(Field::SECONDARY_CONTROLS))
        } else {
            Secondary::NONE
        }
    }

    /// The VM-exit controls.
    pub fn exit_controls(&self) -> Exit {
        Exit(self.get32(Field::EXIT_CONTROLS))
    }

    /// The VM-entry controls.
    pub fn entry_controls(&self) -> Entry {
        Entry(self.get32(Field::ENTRY_CONTROLS))
    }
}

impl Processor<'_> {
    /// Bits that IA32_LBR_CTL can hold.
    pub(crate) fn lbr_ctl(&self) -> u64 {
        let regs = self.model.cpuid(0x1c, 0);
        ArchLbrLeaf { regs }.control()
    }

    /// A physical address has bits beyond the width.
    pub(crate) fn beyond(&self, address: u64) -> bool {
        self.physical_bits < 64 && address >> self.physical_bits != 0
    }

    /// An address that is not a multiple of `align`, or beyond the width.
    pub(crate) fn misplaced(&self, address: u64, align: u64) -> bool {
        address & (align - 1) != 0 || self.beyond(address)
    }

    /// An address is canonical.
    pub(crate) fn canonical(&self, address: u64) -> bool {
        let shift = 64 - self.linear_bits.clamp(1, 64);
        ((address << shift) as i64 >> shift) as u64 == address
    }

    /// An MSR list cannot be where it is. SDM Vol. 3C 27.2.1.2 "VM-Exit Control Fields".
    pub(crate) fn list_misplaced(&self, address: u64, count: u64) -> bool {
        let Some(more) = (16 * u128::from(count)).checked_sub(1) else {
            return false;
        };
        let last = u64::try_from(u128::from(address) + more);
        self.misplaced(address, 16) || last.map_or(true, |last| self.beyond(last))
    }

    /// Control bits that must be 1 and are not, or must be 0 and are not.
    pub(crate) fn reserved(value: u32, must: u32, can: u32) -> bool {
        value & must != must || value & !(must | can) != 0
    }

    /// IA32_PAT holds a type that is reserved.
    pub(crate) fn bad_pat(value: u64) -> bool {
        value.to_le_bytes().iter().any(|&kind| !matches!(kind, 0 | 1 | 4..=7))
    }

    /// Bits that IA32_EFER has not got.
    pub(crate) fn bad_efer(&self, value: u64) -> bool {
        value & crate::cr::Efer::reserved(self.features) != 0
    }
}

#[cfg(test)]
#[path = "check_test.rs"]
mod tests;
