//! Guest-physical addresses in VMX non-root operation: EPT under the guest's own page tables (SDM Vol. 3C 29.3 "The Extended Page
//! Table Mechanism (EPT)").

use x86::vmx::ExitReason;
use x86::vmx::controls::Secondary;
use x86::vmx::ept::{self, DIRTY, EptAccess, EptFault, EptPage, EptPaging, qualification, rights};
use x86::vmx::exits::{apic_access, virtualization_exception as area};
use x86::vmx::fields::Field;

use super::ExitInformation;
use crate::cpu::{Cpu, Event, Source};
use crate::mmu::Access;
use crate::op::{Done, Stop};
use crate::ram::Ram;

/// What a walk needs to know of the running guest's EPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nested {
    /// The EPT.
    pub paging: EptPaging,
    /// Page-modification logging, if it is on.
    pub log: Option<PageLog>,
    /// The APIC-access address; no page's where accesses to it are not virtualized.
    pub apic_access: u64,
}

/// The page-modification log. SDM Vol. 3C 29.3.6 "Page-Modification Logging".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageLog {
    /// The physical address of its 512 entries.
    pub table: u64,
    /// The physical address of the PML index: its slot in the region of the VMCS.
    pub index: u64,
}

/// Entries of a page-modification log.
const LOG: u64 = 512;

/// A guest-physical address that has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NestedFault {
    /// The address.
    pub gpa: u64,
    /// Why.
    pub fault: Refusal,
    /// Bits of the exit qualification: the access, and whether it is to the page itself.
    pub qualification: u64,
}

/// Why a guest-physical access is not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The EPT has it so.
    Ept(EptFault),
    /// A paging-structure entry is on the APIC-access page. SDM Vol. 3C 30.4.6.1 "Guest-Physical Accesses to the APIC-Access Page".
    ApicAccess,
}

impl PageLog {
    /// Logs a page whose dirty flag is about to be set: `false` where the log is full.
    fn log(&self, ram: &mut Ram, gpa: u64) -> bool {
        let index = ram.read_phys(self.index, 8) & 0xffff;
        if index >= LOG {
            return false;
        }
        // A log that is no RAM takes nothing.
        let at = self.table + 8 * index;
        for (at, value) in [(at, gpa & !0xfff), (self.index, index.wrapping_sub(1) & 0xffff)] {
            if ram.write(at, &value.to_le_bytes()).is_ok() {
                ram.soil(at, 8);
            }
        }
        true
    }
}

impl Nested {
    /// Translates the address of a paging-structure entry that is read, or whose flags are set. `commit`: flags of EPT entries are
    /// set.
    pub(crate) fn structure(&self, ram: &mut Ram, gpa: u64, write: bool, commit: bool) -> Result<u64, NestedFault> {
        // With accessed and dirty flags each access to a paging-structure entry counts as a write (SDM Vol. 3C 29.3.3.2 "EPT
        // Violations").
        let write = write || self.paging.pointer.accessed_dirty();
        let access = if write { EptAccess::Write } else { EptAccess::Read };
        let kind = if write {
            qualification::READ | qualification::WRITE
        } else {
            qualification::READ
        };
        let refused = |fault| NestedFault {
            gpa,
            fault,
            qualification: kind,
        };
        let page = self
            .walk(ram, gpa, access, commit)
            .map_err(|fault| refused(Refusal::Ept(fault)))?;
        if page.physical == self.apic_access {
            return Err(refused(Refusal::ApicAccess));
        }
        Ok(page.physical | gpa & 0xfff)
    }

    /// Translates the page that an access is to; `user`: of a user-mode linear address.
    pub(crate) fn page(
        &self,
        ram: &mut Ram,
        gpa: u64,
        access: Access,
        user: bool,
        commit: bool,
    ) -> Result<EptPage, NestedFault> {
        let (kind, bits) = match access {
            Access::Read => (EptAccess::Read, qualification::READ),
            Access::Write => (EptAccess::Write, qualification::WRITE),
            Access::Fetch if user => (EptAccess::UserFetch, qualification::FETCH),
            Access::Fetch => (EptAccess::Fetch, qualification::FETCH),
        };
        self.walk(ram, gpa, kind, commit).map_err(|fault| NestedFault {
            gpa,
            fault: Refusal::Ept(fault),
            qualification: bits | qualification::FINAL,
        })
    }

    /// Whether these rights let a linear address of this kind be fetched from.
    pub(crate) fn executes(&self, found: u64, user: bool) -> bool {
        let right = if user && self.paging.mode_based {
            rights::USER_EXECUTE
        } else {
            rights::EXECUTE
        };
        found & right != 0
    }

    fn walk(&self, ram: &mut Ram, gpa: u64, access: EptAccess, commit: bool) -> Result<EptPage, EptFault> {
        let mut flags = [(0, 0); 4];
        let mut count = 0;
        let page = ept::walk(
            &self.paging,
            gpa,
            access,
            &mut |at| ram.read_phys(at, 8),
            &mut |at, bits| {
                flags[count] = (at, bits);
                count += 1;
            },
        )?;
        if commit {
            let flags = &flags[..count];
            if let Some(log) = &self.log
                && flags.iter().any(|flag| flag.1 & DIRTY != 0)
                && !log.log(ram, gpa)
            {
                return Err(EptFault::LogFull);
            }
            for &(at, bits) in flags {
                ram.or_phys(at, 8, bits);
            }
        }
        Ok(page)
    }
}

impl Cpu {
    /// The EPT under the page tables, if there is one.
    pub(crate) fn nested(&self) -> Option<Nested> {
        let vmx = self.vmx.as_ref()?;
        let guest = vmx.guest.as_ref()?;
        let pointer = guest.ept?;
        let caps = self.vmx_caps?;
        let log = guest.secondary.contains(Secondary::PML).then(|| PageLog {
            table: guest.page_log,
            index: vmx.current.unwrap_or(u64::MAX) + 8 * Field::PML_INDEX.slot() as u64,
        });
        Some(Nested {
            paging: EptPaging {
                pointer,
                execute_only: caps.execute_only,
                huge: caps.huge,
                mode_based: guest.secondary.contains(Secondary::MODE_BASED_EXECUTE),
                physical_bits: self.maxphyaddr,
            },
            log,
            apic_access: guest.apic.access.unwrap_or(u64::MAX),
        })
    }

    /// The VM exit that a guest-physical address causes. `linear` is the address that was translated, where there is one.
    #[cold]
    pub(crate) fn nested_exit(&mut self, fault: NestedFault, linear: Option<u64>) -> Stop {
        match self.nested_information(fault, linear) {
            Some(exit) => self.vm_exit(exit),
            None => self.apic_access_exit(0, apic_access::PHYSICAL, 0),
        }
    }

    /// What that VM exit tells; `None`: it is an APIC access.
    pub(super) fn nested_information(&self, fault: NestedFault, linear: Option<u64>) -> Option<ExitInformation> {
        let refused = match fault.fault {
            Refusal::Ept(refused) => refused,
            Refusal::ApicAccess => return None,
        };
        let reason = match refused {
            EptFault::Violation { .. } => ExitReason::EptViolation,
            EptFault::Misconfiguration => ExitReason::EptMisconfiguration,
            EptFault::LogFull => ExitReason::PageModificationLogFull,
        };
        let mut exit = ExitInformation::new(reason);
        if refused != EptFault::LogFull {
            exit.physical = fault.gpa;
        }
        if let EptFault::Violation { rights, convertible } = refused {
            exit.qualification = fault.qualification | rights << qualification::RIGHTS_SHIFT;
            if linear.is_some() {
                exit.qualification |= qualification::LINEAR_VALID;
            } else {
                exit.qualification &= !qualification::FINAL;
            }
            exit.linear = linear.unwrap_or(0);
            exit.convertible = convertible;
        }
        Some(exit)
    }

    /// The virtualization exception that an EPT violation becomes, whose information is in memory then; `None`: it causes a VM exit. SDM
    /// Vol. 3C 26.5.7 "Virtualization Exceptions".
    pub(crate) fn virtualization_exception(&mut self, exit: &ExitInformation) -> Option<Event> {
        if !exit.convertible || exit.vectoring.is_some() || !self.cr0.pe() {
            return None;
        }
        let guest = self.guest()?;
        if !guest.secondary.contains(Secondary::VIRTUALIZATION_EXCEPTION) {
            return None;
        }
        let (at, index) = (guest.exception_area, guest.ept_index);
        if self.shared().ram.read_phys(at + area::BUSY, 4) != 0 {
            return None;
        }
        let fields: [(u64, &[u8]); 6] = [
            (area::REASON, &u32::from(exit.reason as u16).to_le_bytes()),
            (area::BUSY, &u32::MAX.to_le_bytes()),
            (area::QUALIFICATION, &exit.qualification.to_le_bytes()),
            (area::LINEAR, &exit.linear.to_le_bytes()),
            (area::PHYSICAL, &exit.physical.to_le_bytes()),
            (area::EPTP_INDEX, &index.to_le_bytes()),
        ];
        for (offset, bytes) in fields {
            let _ = self.shared().write_ram(at + offset, bytes);
        }
        Some(Event {
            vector: 20,
            error: None,
            source: Source::Exception,
        })
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
