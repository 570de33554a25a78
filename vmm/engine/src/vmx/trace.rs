//! Intel PT with guest-physical addresses: its tables and its output are where EPT has them (SDM Vol. 3C 26.5.4 "Translation of
//! Guest-Physical Addresses Used by Intel Processor Trace").
//!
//! An address that EPT does not translate as it must is a VM exit that is asynchronous to the guest's instructions, before the next of them. The
//! unit holds what it has for that address, and tries again with its next packets.

use x86::vmx::controls::Secondary;
use x86::vmx::ept::{EptPage, qualification};

use super::ExitInformation;
use super::nested::NestedFault;
use crate::cpu::Cpu;
use crate::mmu::Access;

/// A page that Intel PT could not reach.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TraceFault {
    /// The guest-physical address.
    pub address: u64,
    /// It was to be written, not read.
    pub write: bool,
}

impl Cpu {
    /// Intel PT's addresses are guest-physical ones.
    pub(crate) fn trace_translates(&self) -> bool {
        self.guest()
            .is_some_and(|guest| guest.secondary.contains(Secondary::PT_GUEST_PHYSICAL))
    }

    /// Where EPT has what Intel PT reads or writes at an address, within its page; `None`: nowhere, and the guest is about to leave.
    pub(crate) fn trace_address(&mut self, address: u64, write: bool) -> Option<u64> {
        let fault = TraceFault { address, write };
        match self.trace_page(fault, true)? {
            Ok(page) => Some(page.physical | address & 0xfff),
            Err(_) => {
                self.guest_mut()?.trace_fault = Some(fault);
                None
            }
        }
    }

    fn trace_page(&mut self, at: TraceFault, commit: bool) -> Option<Result<EptPage, NestedFault>> {
        let access = if at.write { Access::Write } else { Access::Read };
        let nested = self.nested()?;
        Some(nested.page(&mut self.shared().ram, at.address, access, false, commit))
    }

    /// The VM exit that Intel PT causes before the next instruction: what EPT says of the page now, if it still refuses it.
    pub(super) fn trace_exit(&mut self) -> Option<ExitInformation> {
        let fault = self.guest()?.trace_fault?;
        let refused = self.trace_page(fault, false)?.err()?;
        let mut exit = self.nested_information(refused, None)?;
        exit.qualification |= qualification::ASYNCHRONOUS;
        exit.convertible = false;
        Some(exit)
    }
}
