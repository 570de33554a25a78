//! KVM's own counters, last-branch records and PEBS for a guest: the registers that stay in KVM, and what KVM is to be set to for them.
//!
//! KVM gives a guest what its CPUID leaf 0AH says (as far as `narrow` leaves it), and the rest by IA32_PERF_CAPABILITIES, which the
//! guest cannot write and which KVM takes only after CPUID: a format of last-branch records has to be the processor's own, and so
//! has all that is about PEBS. The state of these registers is KVM's alone: the software engine, which runs single instructions
//! here, has no counters then.

use kvm_ioctls::VcpuFd;
use x86::model::CpuModel;
use x86::msr::*;

use crate::error::KvmError;
use crate::host_units::Pmu;
use crate::msrs;
use crate::units::{Backend, Backends, Unit};

/// What is passed through to a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// The counters.
    pub pmu: bool,
    /// The registers that stay in KVM for it: the first, and how many.
    pub registers: Vec<(u32, u32)>,
    /// IA32_PERF_CAPABILITIES, where KVM has that.
    capabilities: Option<u64>,
}

impl Passed {
    /// What these units take of KVM's.
    pub fn of(pmu: &Pmu, backends: &Backends) -> Self {
        let host = |unit: Unit| backends[unit] == Backend::Host;
        let (lbr, pebs) = (host(Unit::Lbr), host(Unit::Pebs));
        let units = backends.each().filter(|(_, backend)| *backend == Backend::Host);
        Passed {
            pmu: host(Unit::Pmu),
            registers: units.flat_map(|(row, _)| row.passed).copied().collect(),
            capabilities: pmu.capabilities.map(|_| pmu.guest_capabilities(lbr, pebs)),
        }
    }

    /// What IA32_PERF_CAPABILITIES of a CPU of this model is to be, if it has that register.
    fn perf_capabilities(&self, model: &CpuModel) -> Option<u64> {
        self.capabilities.filter(|_| self.pmu && model.features().pdcm())
    }

    /// Writes it to KVM, which has had the CPU's CPUID.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub fn tell(&self, vcpu: &VcpuFd, model: &CpuModel) -> Result<(), KvmError> {
        let Some(data) = self.perf_capabilities(model) else {
            return Ok(());
        };
        msrs::write(vcpu, &[(IA32_PERF_CAPABILITIES, data)])
    }
}

#[cfg(test)]
#[path = "passed_test.rs"]
mod tests;
