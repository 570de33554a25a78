//! An open /dev/kvm, and what it has been found to do.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Cap, Kvm};
use x86::model::CpuidRow;
use x86::msr::IA32_PERF_CAPABILITIES;

use crate::error::{KvmError, refused};
use crate::guest_debug::{self, Kinds};
use crate::irqchip::Irqchip;
use crate::tracer::{PtError, Traces};
use crate::trial::{self, Defect};
use crate::{cpuid, measure, msrs, perf, sys};

/// An open /dev/kvm that can do what this driver needs.
#[derive(Debug)]
pub struct Host {
    pub(crate) kvm: Kvm,
    /// What KVM_GET_SUPPORTED_CPUID says; and that the timer has deadlines, which it never says, where they come to us.
    supported: Vec<CpuidRow>,
    /// The guest's time-stamp counter's frequency.
    pub tsc_khz: u32,
    /// What [`Host::virtualizes`] found.
    speed: OnceCell<Result<String, KvmError>>,
    /// What [`Host::defects`] found.
    defects: OnceCell<Result<Vec<Defect>, KvmError>>,
}

/// What this driver cannot do without.
const NEEDED: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
    (Cap::X86UserSpaceMsr, "KVM_CAP_X86_USER_SPACE_MSR"),
    (Cap::X86MsrFilter, "KVM_CAP_X86_MSR_FILTER"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
    (Cap::Xsave, "KVM_CAP_XSAVE"),
    (Cap::Xcrs, "KVM_CAP_XCRS"),
    (Cap::GetTscKhz, "KVM_CAP_GET_TSC_KHZ"),
    (Cap::SyncRegs, "KVM_CAP_SYNC_REGS"),
];

impl Host {
    /// Opens /dev/kvm.
    ///
    /// # Errors
    /// One line: why there is no KVM for us, and what to do.
    pub fn open() -> Result<Self, KvmError> {
        let kvm = Kvm::new().map_err(|error| match error.errno() {
            libc::ENOENT => KvmError::Missing,
            libc::EACCES | libc::EPERM => KvmError::Permission,
            _ => refused("/dev/kvm")(error),
        })?;
        let version = kvm.get_api_version();
        if version != 12 {
            return Err(KvmError::ApiVersion(version));
        }
        if let Some((_, name)) = NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
            return Err(KvmError::Capability(name));
        }
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(refused("/dev/kvm: KVM_GET_SUPPORTED_CPUID"))?;
        let vm = kvm.create_vm().map_err(refused("/dev/kvm: KVM_CREATE_VM"))?;
        let vcpu = vm.create_vcpu(0).map_err(refused("/dev/kvm: KVM_CREATE_VCPU"))?;
        // The wrapper's error is -1, whatever the call's was.
        let tsc_khz = vcpu
            .get_tsc_khz()
            .map_err(|_| refused("/dev/kvm: KVM_GET_TSC_KHZ")(kvm_ioctls::Error::last()))?;
        let mut supported = cpuid::rows(&supported);
        // What fails here fails again where it is reported; until then nothing relies on it.
        let exits = measure::deadline_exits(&kvm).unwrap_or(false);
        cpuid::set_deadline(&mut supported, exits);
        Ok(Host {
            supported,
            tsc_khz,
            speed: OnceCell::new(),
            defects: OnceCell::new(),
            kvm,
        })
    }

    /// Measures whether KVM runs instructions on the processor or interprets them: what it found, as an error if it interprets.
    ///
    /// # Errors
    /// One line: KVM is slower than the software engine, or fails.
    pub fn virtualizes(&self) -> Result<String, KvmError> {
        self.speed.get_or_init(|| self.measure()).clone()
    }

    fn measure(&self) -> Result<String, KvmError> {
        let mips = measure::mips(&self.kvm).map_err(refused("measuring /dev/kvm"))?;
        if mips >= measure::NATIVE_MIPS {
            Ok(format!("it executes {mips:.0} million instructions per second"))
        } else {
            Err(KvmError::Interprets {
                mips: mips.round() as u64,
            })
        }
    }

    /// What this KVM accepts and does not do, as a trial guest finds it.
    ///
    /// # Errors
    /// One line: KVM refuses or fails.
    pub fn defects(&self) -> Result<&[Defect], KvmError> {
        let found = self
            .defects
            .get_or_init(|| trial::defects(&self.kvm).map_err(refused("trying CPUID and RDTSC in /dev/kvm")));
        found.as_deref().map_err(Clone::clone)
    }

    /// What KVM supports of a guest with these interrupt controllers: its own timers take every deadline.
    pub fn rows(&self, irqchip: Irqchip) -> Vec<CpuidRow> {
        let mut rows = self.supported.clone();
        if irqchip == Irqchip::Kvm {
            cpuid::set_deadline(&mut rows, true);
        }
        rows
    }

    /// How long so many exits take that are answered at once: what whatever this program does in one is measured against.
    ///
    /// # Errors
    /// One line: KVM refuses or fails.
    pub fn bare_exits(&self, count: u16) -> Result<Duration, KvmError> {
        measure::exits(&self.kvm, count).map_err(refused("measuring exits of /dev/kvm"))
    }

    /// IA32_PERF_CAPABILITIES of what KVM supports, if it has that register for guests.
    pub fn perf_capabilities(&self) -> Option<u64> {
        let list = self.kvm.get_msr_feature_index_list().ok()?;
        if !list.as_slice().contains(&IA32_PERF_CAPABILITIES) {
            return None;
        }
        let values = msrs::read(|list| self.kvm.get_msrs(list), &[IA32_PERF_CAPABILITIES]);
        values.ok()?.first().copied()
    }

    /// A row of what KVM supports of CPUID; zeros where there is none.
    pub fn supported(&self, leaf: u32) -> [u32; 4] {
        let row = self.supported.iter().find(|row| row.leaf == leaf);
        row.map_or([0; 4], |row| row.regs)
    }

    /// Tries whether perf's Intel PT records while KVM has a virtual machine.
    ///
    /// # Errors
    /// One line: why not.
    pub fn tries_pt(&self) -> Result<Arc<dyn Traces>, PtError> {
        let perf = perf::Perf::here()?;
        // perf may send it.
        sys::take_signal().map_err(refused("taking over a signal"))?;
        // VMXON may come with the first one only.
        let _vm = self.kvm.create_vm().map_err(refused("KVM_CREATE_VM"))?;
        perf.try_out()?;
        Ok(Arc::new(perf))
    }

    /// What KVM_SET_GUEST_DEBUG delivers here.
    ///
    /// # Errors
    /// One line: KVM refuses or fails.
    pub fn guest_debug(&self) -> Result<Kinds, KvmError> {
        guest_debug::measure(&self.kvm).map_err(refused("trying KVM_SET_GUEST_DEBUG"))
    }

    /// What KVM_CHECK_EXTENSION says of a capability, by its number.
    pub fn capability(&self, number: u32) -> i32 {
        self.kvm.check_extension_raw(number.into())
    }
}
