//! KVM's own counters, last-branch records and PEBS for a guest: the registers that stay in KVM, and what it has to be told.
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
    fn told(&self, model: &CpuModel) -> Option<u64> {
        self.capabilities.filter(|_| self.pmu && model.features().pdcm())
    }

    /// Tells KVM, which has had the CPU's CPUID.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub fn tell(&self, vcpu: &VcpuFd, model: &CpuModel) -> Result<(), KvmError> {
        let Some(data) = self.told(model) else {
            return Ok(());
        };
        msrs::write(vcpu, &[(IA32_PERF_CAPABILITIES, data)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::model::{HASWELL, P6};

    fn host() -> Pmu {
        Pmu {
            intel: true,
            leaf: [0x0830_0402, 0, 0, 0x603],
            capabilities: Some(0x7c05),
            ..Pmu::default()
        }
    }

    // covers: host-units/pmu-msrs
    #[test]
    fn only_what_is_the_hosts_stays_in_kvm() {
        let absent = Backends::default();
        let none = Passed::of(&host(), &absent);
        assert_eq!((none.registers.clone(), none.pmu), (vec![], false));
        let pmu = Backend::Host;
        let counters = Passed::of(&host(), &absent.with(Unit::Pmu, pmu));
        let within = |passed: &Passed, msr: u32| {
            passed
                .registers
                .iter()
                .any(|&(first, count)| (first..first + count).contains(&msr))
        };
        for msr in [
            0xc1, 0xc8, 0x186, 0x18d, 0x309, 0x30b, 0x345, 0x38d, 0x38e, 0x38f, 0x390, 0x391, 0x4c1, 0x4c8,
        ] {
            assert!(within(&counters, msr), "{msr:#x}");
        }
        for msr in [0x10, 0x1d9, 0x1c8, 0x680, 0x600, 0x3f1, 0x570, 0xc0, 0xc9, 0x1a0] {
            assert!(!within(&counters, msr), "{msr:#x}");
        }
        assert_eq!(counters.capabilities, Some(0x2000), "neither records nor PEBS");
        let lbr = Passed::of(&host(), &absent.with(Unit::Pmu, pmu).with(Unit::Lbr, pmu));
        for msr in [0x1d9, 0x1c8, 0x1c9, 0x680, 0x69f, 0x6c0, 0x6df, 0xdc0, 0xddf] {
            assert!(within(&lbr, msr), "{msr:#x}");
        }
        assert!(!within(&lbr, 0x3f1));
        assert_eq!(lbr.capabilities, Some(0x2005));
        let pebs = Passed::of(&host(), &absent.with(Unit::Pmu, pmu).with(Unit::Pebs, pmu));
        assert!(within(&pebs, 0x600) && within(&pebs, 0x3f1) && within(&pebs, 0x3f2) && !within(&pebs, 0x1d9));
        assert_eq!(pebs.told(&HASWELL), Some(0x6c00));
        assert_eq!((pebs.told(&P6), none.told(&HASWELL)), (None, None), "no such register");
    }
}
