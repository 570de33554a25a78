//! Guest-physical addresses in VMX non-root operation: EPT under the guest's own page tables (SDM Vol. 3C 29.3 "The Extended Page
//! Table Mechanism (EPT)").

use x86::vmx::ExitReason;
use x86::vmx::ept::{self, EptAccess, EptFault, EptPage, EptPointer, qualification};

use super::ExitInformation;
use crate::cpu::Cpu;
use crate::mmu::Access;
use crate::op::{Done, Stop};
use crate::ram::Ram;

/// What a walk needs to know of the running guest's EPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nested {
    /// The EPT pointer.
    pub pointer: EptPointer,
    /// The part has execute-only translations.
    pub execute_only: bool,
    /// The part has 1-GByte pages of EPT.
    pub huge: bool,
    /// The physical-address width.
    pub physical_bits: u32,
}

/// A guest-physical address that has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NestedFault {
    /// The address.
    pub gpa: u64,
    /// Why.
    pub fault: EptFault,
    /// Bits of the exit qualification: the access, and whether it is to the page itself.
    pub qualification: u64,
}

impl Nested {
    /// Translates the address of a paging-structure entry that is read, or whose flags are set. `commit`: flags of EPT entries are
    /// set.
    pub(crate) fn structure(&self, ram: &mut Ram, gpa: u64, write: bool, commit: bool) -> Result<u64, NestedFault> {
        // With accessed and dirty flags each access to a paging-structure entry counts as a write (SDM Vol. 3C 29.3.3.2 "EPT
        // Violations").
        let write = write || self.pointer.accessed_dirty();
        let access = if write { EptAccess::Write } else { EptAccess::Read };
        let kind = if write {
            qualification::READ | qualification::WRITE
        } else {
            qualification::READ
        };
        let page = self.walk(ram, gpa, access, commit).map_err(|fault| NestedFault {
            gpa,
            fault,
            qualification: kind,
        })?;
        Ok(page.physical | gpa & 0xfff)
    }

    /// Translates the page that an access is to.
    pub(crate) fn page(&self, ram: &mut Ram, gpa: u64, access: Access, commit: bool) -> Result<EptPage, NestedFault> {
        let (kind, bits) = match access {
            Access::Read => (EptAccess::Read, qualification::READ),
            Access::Write => (EptAccess::Write, qualification::WRITE),
            Access::Fetch => (EptAccess::Fetch, qualification::FETCH),
        };
        self.walk(ram, gpa, kind, commit).map_err(|fault| NestedFault {
            gpa,
            fault,
            qualification: bits | qualification::FINAL,
        })
    }

    fn walk(&self, ram: &mut Ram, gpa: u64, access: EptAccess, commit: bool) -> Result<EptPage, EptFault> {
        let mut flags = [(0, 0); 4];
        let mut count = 0;
        let page = ept::walk(
            self.pointer,
            gpa,
            access,
            self.physical_bits,
            self.execute_only,
            self.huge,
            &mut |at| ram.read_phys(at, 8),
            &mut |at, bits| {
                flags[count] = (at, bits);
                count += 1;
            },
        )?;
        if commit {
            for &(at, bits) in &flags[..count] {
                ram.or_phys(at, 8, bits);
            }
        }
        Ok(page)
    }
}

impl Cpu {
    /// The EPT under the page tables, if there is one.
    pub(crate) fn nested(&self) -> Option<Nested> {
        let pointer = self.guest()?.ept?;
        let caps = self.vmx_caps?;
        Some(Nested {
            pointer,
            execute_only: caps.execute_only,
            huge: caps.huge,
            physical_bits: self.maxphyaddr,
        })
    }

    /// The VM exit that a guest-physical address causes. `linear` is the address that was translated, where there is one.
    #[cold]
    pub(crate) fn nested_exit(&mut self, fault: NestedFault, linear: Option<u64>) -> Stop {
        let reason = match fault.fault {
            EptFault::Violation { .. } => ExitReason::EptViolation,
            EptFault::Misconfiguration => ExitReason::EptMisconfiguration,
        };
        let mut exit = ExitInformation::new(reason);
        exit.physical = fault.gpa;
        if let EptFault::Violation { rights } = fault.fault {
            exit.qualification = fault.qualification | rights << qualification::RIGHTS_SHIFT;
            if linear.is_some() {
                exit.qualification |= qualification::LINEAR_VALID;
            } else {
                exit.qualification &= !qualification::FINAL;
            }
            exit.linear = linear.unwrap_or(0);
        }
        self.vm_exit(exit)
    }

    /// Reads eight bytes of guest-physical memory for the processor itself: PDPTEs.
    pub(crate) fn read_guest_physical(&mut self, gpa: u64) -> Done<u64> {
        let Some(nested) = self.nested() else {
            return Ok(self.shared().ram.read_phys(gpa, 8));
        };
        match nested.structure(&mut self.shared().ram, gpa, false, true) {
            Ok(at) => Ok(self.shared().ram.read_phys(at, 8)),
            Err(fault) => Err(self.nested_exit(fault, None)),
        }
    }
}
