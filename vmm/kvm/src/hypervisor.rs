//! The CPUs of a machine in KVM.

use std::sync::{Arc, Mutex};

use devices::platform::Lines;
use engine::{Activity, CpuState};
use kvm_bindings::{
    KVM_CAP_EXIT_ON_EMULATION_FAILURE, KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER,
    KVM_MSR_EXIT_REASON_INVAL, KVM_MSR_EXIT_REASON_UNKNOWN, KVM_PMU_CAP_DISABLE, KVM_VCPUEVENT_VALID_NMI_PENDING,
    kvm_enable_cap,
};
use kvm_ioctls::{MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuFd, VmFd};
use log::info;
use machine::{Machine, memory::Memory};
use rayon::{ThreadPool, ThreadPoolBuilder};
use x86::debug::Breakpoint;
use x86::model::{
    CpuModel,
    topology::{CpuPosition, Topology},
};
use x86::msr::{IA32_APIC_BASE, IA32_FS_BASE, IA32_STAR, IA32_SYSENTER_CS, IA32_TSC_DEADLINE, IA32_XSS};

use crate::clock::HostClock;
use crate::error::{KvmError, refused};
use crate::host::Host;
use crate::irqchip::Irqchip;
use crate::msr_filter;
use crate::passed::Passed;
use crate::state::{self, Kept};
use crate::sys::{self, Kick};
use crate::timers::Timers;
use crate::tracer::{Tracer, Traces};
use crate::{cpuid, guest_debug, kernel_irqchip};

/// The core's MSRs, which KVM keeps: first and how many. All others are ours.
const KEPT: [(u32, u32); 4] = [
    (IA32_SYSENTER_CS, 3),
    // With IA32_EFER before it and IA32_FMASK behind.
    (IA32_STAR - 1, 5),
    // With the bases of GS and IA32_TSC_AUX.
    (IA32_FS_BASE, 4),
    (IA32_XSS, 1),
];

/// What KVM keeps besides where the local APICs are its own; their other registers cannot be filtered then.
const KEPT_WITH_APIC: [(u32, u32); 2] = [(IA32_APIC_BASE, 1), (IA32_TSC_DEADLINE, 1)];

/// How far the CPUs run in KVM, if nothing else ends that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// So many times out of KVM_RUN.
    Exits(u64),
    /// The same with single steps, so that most of the times are an instruction's end. KVM's steps are not exact: it takes an
    /// instruction after MOV SS or STI, or a handler's first, together with the one before. One for tests and measurements: the
    /// guest sees RFLAGS.TF in what PUSHF stores.
    Steps(u64),
}

/// A CPU of the machine in KVM.
#[derive(Debug)]
pub(crate) struct Processor {
    pub(crate) vcpu: Mutex<VcpuFd>,
    pub(crate) kick: Kick,
    /// What its time-stamp counter is ahead of the machine's clock, as KVM was last told.
    pub(crate) tsc_offset: Mutex<Option<u64>>,
    /// The host's breakpoints, as KVM was last told.
    pub(crate) armed: Mutex<Vec<Breakpoint>>,
    /// What the host's tracer records of it, while the guest traces itself.
    pub(crate) tracer: Mutex<Option<Box<dyn Tracer>>>,
    /// What KVM holds of it while it is away.
    pub(crate) kept: Mutex<Option<Kept>>,
}

/// The CPUs of a machine in KVM.
#[derive(Debug)]
pub struct Hypervisor {
    /// A thread for each CPU, by its number. KVM wants a vCPU to stay on one: a change costs a grace period of the host's RCU
    /// before Linux 6.12.
    pub(crate) threads: ThreadPool,
    // Before `vm`, whose descriptor theirs hold anyway.
    pub(crate) cpus: Vec<Processor>,
    pub(crate) vm: Arc<VmFd>,
    pub(crate) irqchip: Irqchip,
    /// KVM's own timers, while they stand.
    pub(crate) timers: Option<Timers>,
    pub(crate) model: &'static CpuModel,
    pub(crate) clock: HostClock,
    pub(crate) limit: Option<Limit>,
    /// The host's breakpoints in the CPUs' debug registers.
    pub(crate) points: Vec<Breakpoint>,
    /// A unit of ours may have to see instructions.
    pub(crate) watches: bool,
    /// RDPMC comes out of KVM, by one of the points.
    pub(crate) has_rdpmc: bool,
    /// The host's Intel PT, if the guest's is that.
    pub(crate) traces: Option<Arc<dyn Traces>>,
    /// The mapping that KVM was given, which has to stay.
    pub(crate) memory: Memory,
}

impl Hypervisor {
    /// CPUs of this model that are arranged so, narrowed by [`cpuid::narrow`], on this memory, with these interrupt controllers and these units of
    /// KVM's.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub fn new(
        host: &Host,
        model: &'static CpuModel,
        memory: &Memory,
        topology: Topology,
        watches: bool,
        irqchip: Irqchip,
        passed: &Passed,
    ) -> Result<Self, KvmError> {
        let vm = host.kvm.create_vm().map_err(refused("KVM_CREATE_VM"))?;
        let enable = |cap: u32, argument: u64| {
            let mut request = kvm_enable_cap {
                cap,
                ..Default::default()
            };
            request.args[0] = argument;
            vm.enable_cap(&request)
        };
        let all = KVM_MSR_EXIT_REASON_INVAL | KVM_MSR_EXIT_REASON_UNKNOWN | KVM_MSR_EXIT_REASON_FILTER;
        enable(KVM_CAP_X86_USER_SPACE_MSR, all.into()).map_err(refused("KVM_CAP_X86_USER_SPACE_MSR"))?;
        // Else KVM raises #UD above CPL 0. Only newer ones can be asked.
        if host.capability(KVM_CAP_EXIT_ON_EMULATION_FAILURE) > 0 {
            enable(KVM_CAP_EXIT_ON_EMULATION_FAILURE, 1).map_err(refused("KVM_CAP_EXIT_ON_EMULATION_FAILURE"))?;
        }
        // Where the counters are ours or nobody's, this has RDPMC fault instead of reading the host's.
        if !passed.pmu && host.capability(KVM_CAP_PMU_CAPABILITY) & KVM_PMU_CAP_DISABLE as i32 != 0 {
            enable(KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE.into()).map_err(refused("KVM_CAP_PMU_CAPABILITY"))?;
        }
        let with_apic = match irqchip {
            Irqchip::Minivmm => &[][..],
            Irqchip::Kvm => &KEPT_WITH_APIC,
        };
        let kept = KEPT.iter().chain(with_apic).chain(&passed.registers).copied();
        let kept = msr_filter::allowed(kept);
        let ranges: Vec<MsrFilterRange> = kept
            .iter()
            .map(|range| MsrFilterRange {
                flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
                base: range.base,
                msr_count: range.count,
                bitmap: &range.bitmap,
            })
            .collect();
        vm.set_msr_filter(MsrFilterDefaultAction::DENY, &ranges)
            .map_err(refused("KVM_X86_SET_MSR_FILTER"))?;
        // Three pages that VMX needs for real mode, where this machine has neither RAM nor devices.
        vm.set_tss_address(0xfffb_d000).map_err(refused("KVM_SET_TSS_ADDR"))?;
        if irqchip == Irqchip::Kvm {
            kernel_irqchip::create(&vm)?;
        }
        sys::lend(&vm, memory).map_err(refused("KVM_SET_USER_MEMORY_REGION"))?;
        sys::take_signal().map_err(refused("taking over a signal"))?;
        let count = topology.cpus() as usize;
        let cpus = (0..topology.cpus())
            .map(|cpu| Processor::new(&vm, model, topology.at(cpu), passed))
            .collect::<Result<Vec<_>, _>>()?;
        if irqchip == Irqchip::Kvm {
            kernel_irqchip::set_virtual_wire(&sys::lock(&cpus[0].vcpu))?;
        }
        let threads = ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|cpu| format!("cpu{cpu}"))
            .build()
            .map_err(|error| KvmError::Threads(Arc::new(error)))?;
        Ok(Hypervisor {
            threads,
            cpus,
            vm: Arc::new(vm),
            irqchip,
            timers: None,
            model,
            clock: HostClock::at(0),
            limit: None,
            points: Vec::new(),
            watches,
            has_rdpmc: false,
            traces: None,
            memory: memory.clone(),
        })
    }

    /// Has the guest's Intel PT be the host's where that can do what the guest asks for.
    pub fn trace_with(&mut self, traces: Arc<dyn Traces>) {
        self.traces = Some(traces);
    }

    /// Does this on each thread that runs a CPU of the guest's.
    pub fn on_each_thread<T: Send>(&self, work: impl Fn() -> T + Sync) -> Vec<T> {
        self.threads.broadcast(|_| work())
    }

    /// Whether the guest's Intel PT is the host's at times.
    pub fn has_traces(&self) -> bool {
        self.traces.is_some()
    }

    /// Whether the interrupt controllers are KVM's.
    pub fn has_controllers(&self) -> bool {
        self.irqchip == Irqchip::Kvm
    }

    /// Where the devices' lines lead, if the interrupt controllers are KVM's.
    pub fn lines(&self) -> Option<Box<dyn Lines>> {
        let lines = || Box::new(kernel_irqchip::KernelLines(Arc::clone(&self.vm))) as _;
        self.has_controllers().then(lines)
    }

    /// Has KVM's timers stand until the next run; the CPUs are out of KVM. Ours follow the machine's clock.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub fn stop_timers(&mut self) -> Result<(), KvmError> {
        if self.has_controllers() && self.timers.is_none() {
            let vcpus: Vec<_> = self.cpus.iter().map(|cpu| sys::lock(&cpu.vcpu)).collect();
            self.timers = Some(Timers::stop(&self.vm, vcpus.iter().map(|vcpu| &**vcpu))?);
        }
        Ok(())
    }

    /// The clock that the guest has in KVM.
    pub fn clock(&self) -> HostClock {
        self.clock
    }

    /// Has the clock go on from here: so long the machine stood still.
    pub fn set_clock(&mut self, clock: HostClock) {
        self.clock = clock;
        for cpu in &self.cpus {
            *sys::lock(&cpu.tsc_offset) = None;
        }
    }

    /// Has the CPUs come back after so much; `None`: when something asks for it.
    pub fn set_limit(&mut self, limit: Option<Limit>) {
        self.limit = limit;
    }

    /// Has all CPUs stop at these breakpoints of the host's, four at most, from the next run on: [`crate::Native::hits`]. `has_rdpmc`:
    /// that is how RDPMC comes out, so that counters of time can count here.
    pub fn arm(&mut self, points: Vec<Breakpoint>, has_rdpmc: bool) {
        (self.points, self.has_rdpmc) = (points, has_rdpmc);
    }

    /// Whether they make single steps.
    pub fn single_steps(&self) -> bool {
        matches!(self.limit, Some(Limit::Steps(_)))
    }

    /// Whether they have come to it: something else may have had them come back at the same time.
    pub fn is_at_limit(&self) -> bool {
        matches!(self.limit, Some(Limit::Exits(0) | Limit::Steps(0)))
    }

    /// Hands a CPU over to KVM.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub(crate) fn enter(
        &self,
        index: usize,
        vcpu: &mut VcpuFd,
        state: &CpuState,
        machine: &mut Machine,
    ) -> Result<(), KvmError> {
        let cpu = &self.cpus[index];
        cpu.set_tsc_offset(vcpu, machine.tsc_offset(index), self.clock);
        if let Some(timers) = &self.timers {
            timers.go_on(index, vcpu)?;
        }
        if self.has_controllers() {
            if state.activity == Activity::WaitForSipi {
                // KVM starts it.
                return Ok(());
            }
            kernel_irqchip::set_activity(vcpu, state.activity)?;
        }
        let cr8 = machine.platform().cr8(index).into();
        let run = vcpu.get_kvm_run();
        run.cr8 = cr8;
        // That of the state which it had when it was here last.
        run.ready_for_interrupt_injection = 0;
        let last = sys::lock(&cpu.kept).take();
        state::enter(vcpu, state, last, self.model, |held| {
            held.sregs.cr8 = cr8;
            if self.has_controllers() {
                // An NMI waits here, too.
                held.events.flags &= !KVM_VCPUEVENT_VALID_NMI_PENDING;
            }
        })?;
        let mut armed = sys::lock(&cpu.armed);
        if *armed != self.points {
            guest_debug::arm(vcpu, &self.points).map_err(refused("KVM_SET_GUEST_DEBUG"))?;
            armed.clone_from(&self.points);
        }
        if self.single_steps() {
            // A step is one from where the CPU is when that is asked for.
            cpu.kick.complete_only();
            sys::run(vcpu);
        }
        Ok(())
    }

    /// Takes a CPU back: its state, and the event that KVM is in the middle of delivering. `activity`: by KVM, if the interrupt
    /// controllers are KVM's.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub(crate) fn leave(
        &self,
        index: usize,
        vcpu: &VcpuFd,
        before: &CpuState,
        (activity, halted): (Option<Activity>, bool),
        machine: &mut Machine,
    ) -> Result<(CpuState, Option<engine::Event>), KvmError> {
        let left = state::leave(vcpu, before, self.model)?;
        let mut state = left.state;
        if let Some(activity) = activity {
            // What waits does so in KVM, until the CPU is there again.
            machine.platform().set_cr8(index, left.cr8);
            state.activity = activity;
        } else {
            if left.nmi {
                machine.platform().inject_nmi(index);
            }
            state.activity = match halted {
                true => Activity::Halted,
                false => Activity::Running,
            };
        }
        *sys::lock(&self.cpus[index].kept) = Some(left.kept);
        Ok((state, left.event))
    }
}

impl Processor {
    pub(crate) fn new(
        vm: &VmFd,
        model: &'static CpuModel,
        place: CpuPosition,
        passed: &Passed,
    ) -> Result<Self, KvmError> {
        let mut vcpu = vm.create_vcpu(place.cpu.into()).map_err(refused("KVM_CREATE_VCPU"))?;
        vcpu.set_cpuid2(&cpuid::entries(model, place)?)
            .map_err(refused("KVM_SET_CPUID2"))?;
        passed.tell(&vcpu, model)?;
        Ok(Processor {
            kick: Kick::new(&mut vcpu),
            vcpu: Mutex::new(vcpu),
            tsc_offset: Mutex::new(None),
            armed: Mutex::new(Vec::new()),
            tracer: Mutex::new(None),
            kept: Mutex::new(None),
        })
    }

    /// Tells KVM what the time-stamp counter is ahead of the machine's clock, if that has changed.
    pub(crate) fn set_tsc_offset(&self, vcpu: &VcpuFd, offset: u64, clock: HostClock) {
        let mut written = sys::lock(&self.tsc_offset);
        if *written == Some(offset) {
            return;
        }
        if let Err(error) = sys::set_tsc_offset(vcpu, offset.wrapping_sub(clock.base)) {
            info!("KVM takes no offset of the time-stamp counter: {error}");
        }
        *written = Some(offset);
    }
}
