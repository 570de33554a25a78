//! Intel PT with guest-physical addresses: its tables and its output are where EPT has them (SDM Vol. 3C 26.5.4 "Translation of
//! Guest-Physical Addresses Used by Intel Processor Trace").
//!
//! An address that EPT does not translate as it must is a VM exit that is asynchronous to the guest's instructions, before the next of them. The
//! unit holds what it has for that address, and tries again with its next packets.

use core::ops::Range;

use x86::vmx::controls::Secondary;
use x86::watch::BadPhys;

use super::ExitInformation;
use super::nested::NestedFault;
use crate::cpu::Cpu;
use crate::mmu::Access;

/// Parts of memory that are each in one page: physical addresses, and what of the bytes is there.
type Parts = Vec<(u64, Range<usize>)>;

/// A page that Intel PT could not reach: the guest-physical address, and what the VM exit tells.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TraceFault {
    /// The guest-physical address.
    pub address: u64,
    /// It was to be written, not read.
    pub write: bool,
}

impl Cpu {
    /// Where `len` bytes are which Intel PT reads or writes at an address that software gave it.
    ///
    /// # Errors
    /// The first address that EPT does not translate: the guest is about to leave then.
    pub(crate) fn trace_pages(&mut self, pa: u64, len: usize, write: bool) -> Result<Parts, BadPhys> {
        let translated = self
            .guest()
            .is_some_and(|guest| guest.secondary.contains(Secondary::PT_GUEST_PHYSICAL));
        let nested = if translated { self.nested() } else { None };
        let Some(nested) = nested else {
            return Ok(vec![(pa, 0..len)]);
        };
        let mut parts = Vec::new();
        let mut at = 0;
        while at < len {
            let here = pa.wrapping_add(at as u64);
            let part = (0x1000 - (here & 0xfff) as usize).min(len - at);
            let access = if write { Access::Write } else { Access::Read };
            match nested.page(&mut self.shared().ram, here, access, false, true) {
                Ok(page) => parts.push((page.physical | here & 0xfff, at..at + part)),
                Err(_) => {
                    if let Some(guest) = self.guest_mut() {
                        guest.trace_fault = Some(TraceFault { address: here, write });
                    }
                    return Err(BadPhys { address: here });
                }
            }
            at += part;
        }
        Ok(parts)
    }

    /// The VM exit that Intel PT causes before the next instruction: what EPT says of the page now, if it still refuses it.
    pub(super) fn trace_exit(&mut self) -> Option<ExitInformation> {
        let fault = self.guest()?.trace_fault?;
        let nested = self.nested()?;
        let access = if fault.write { Access::Write } else { Access::Read };
        let refused: NestedFault = nested
            .page(&mut self.shared().ram, fault.address, access, false, false)
            .err()?;
        let mut exit = self.nested_information(refused, None)?;
        exit.qualification |= x86::vmx::ept::qualification::ASYNCHRONOUS;
        exit.convertible = false;
        Some(exit)
    }
}
