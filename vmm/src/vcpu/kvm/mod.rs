//! The CPUs of a machine on Linux KVM.
//!
//! # Theory
//! KVM runs the guest's instructions on the host's processor. What an instruction reaches for that is neither RAM nor a
//! register of the core comes out of KVM_RUN as an exit, and is served by the same machine that the software engine uses: KVM
//! has no interrupt controller, no clock and no MSRs here but those of the core.
//!
//! # Practice
//! A CPU's state is either in the software engine or in KVM. [`Hypervisor::run`] begins with all states handed to KVM, runs
//! each CPU on a thread of its own until something asks for the software engine, for another CPU's state, or for an end
//! ([`Why`]), and ends with all of them handed back. While the threads run they share the machine under one lock; the calling
//! thread sees to timers and to the outside.

mod asleep;
mod cpuid;
pub mod guestdbg;
pub mod irqchip;
mod loan;
mod measure;
mod msrs;
mod native;
mod passed;
mod perf;
mod room;
mod state;
mod timers;
mod traced;
pub mod tracer;
mod view;

use std::cell::OnceCell;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use devices::platform::Lines;
use engine::{Activity, CpuState};
use kvm_bindings::{
    KVM_CAP_EXIT_ON_EMULATION_FAILURE, KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_MAX_CPUID_ENTRIES,
    KVM_MSR_EXIT_REASON_FILTER, KVM_MSR_EXIT_REASON_INVAL, KVM_MSR_EXIT_REASON_UNKNOWN, KVM_PMU_CAP_DISABLE,
    KVM_VCPUEVENT_VALID_NMI_PENDING, kvm_enable_cap,
};
use kvm_ioctls::{Cap, Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuFd, VmFd};
use log::info;
use rayon::{ThreadPool, ThreadPoolBuilder};
use x86::debug::Breakpoint;
use x86::model::{CpuModel, CpuidRow, topology};
use x86::msr::{
    IA32_APIC_BASE, IA32_FS_BASE, IA32_PERF_CAPABILITIES, IA32_STAR, IA32_SYSENTER_CS, IA32_TSC_DEADLINE, IA32_XSS,
};

pub use self::cpuid::{narrow, narrowings};
pub use self::loan::UNTIL_PORTABLE;
pub use self::native::{Counts, Native, Shared, Why};
pub use self::passed::Passed;
use self::tracer::{Tracer, Traces};
use self::{guestdbg::Kinds, room::Kick, state::Kept, timers::Timers};
use super::handover;
use crate::irqchip::Irqchip;
use machine::{Machine, memory::Memory};

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

/// An open /dev/kvm that can do what this driver needs.
#[derive(Debug)]
pub struct Host {
    kvm: Kvm,
    /// What KVM_GET_SUPPORTED_CPUID says; and that the timer has deadlines, which it never says, where they come to us.
    supported: Vec<CpuidRow>,
    /// The guest's time-stamp counter's frequency.
    pub tsc_khz: u32,
    /// What [`Host::virtualizes`] found.
    speed: OnceCell<Result<String, String>>,
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
    pub fn open() -> Result<Self, String> {
        let kvm = Kvm::new().map_err(|error| match error.errno() {
            libc::ENOENT => "/dev/kvm is not there: load kvm-intel or kvm-amd, or use --engine soft".to_string(),
            libc::EACCES | libc::EPERM => {
                "no permission for /dev/kvm: become a member of its group, or use --engine soft".into()
            }
            _ => format!("/dev/kvm: {}", machine::plain(&error.into())),
        })?;
        let version = kvm.get_api_version();
        if version != 12 {
            return Err(format!("/dev/kvm has API version {version}, not 12"));
        }
        if let Some((_, name)) = NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
            return Err(format!(
                "this host's KVM has no {name} (Linux 5.10 has): use --engine soft"
            ));
        }
        let says =
            |what: &str, error: kvm_ioctls::Error| format!("/dev/kvm: {what}: {}", machine::plain(&error.into()));
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(|e| says("KVM_GET_SUPPORTED_CPUID", e))?;
        let vm = kvm.create_vm().map_err(|e| says("KVM_CREATE_VM", e))?;
        let vcpu = vm.create_vcpu(0).map_err(|e| says("KVM_CREATE_VCPU", e))?;
        // The wrapper's error is -1, whatever the call's was.
        let tsc_khz = vcpu
            .get_tsc_khz()
            .map_err(|_| says("KVM_GET_TSC_KHZ", kvm_ioctls::Error::last()))?;
        let mut supported = cpuid::rows(&supported);
        // What fails here fails again where it is told; until then nothing relies on it.
        let exits = measure::deadline_exits(&kvm).unwrap_or(false);
        cpuid::set_deadline(&mut supported, exits);
        Ok(Host {
            supported,
            tsc_khz,
            speed: OnceCell::new(),
            kvm,
        })
    }

    /// Measures whether KVM runs instructions on the processor or interprets them: what it found, as an error if it interprets.
    ///
    /// # Errors
    /// One line: KVM is slower than the software engine, or fails.
    pub fn virtualizes(&self) -> Result<String, String> {
        self.speed.get_or_init(|| self.measure()).clone()
    }

    fn measure(&self) -> Result<String, String> {
        let mips = measure::mips(&self.kvm).map_err(|error| refused("measuring /dev/kvm")(error))?;
        let text = format!("it executes {mips:.0} million instructions per second");
        if mips >= measure::NATIVE_MIPS {
            Ok(text)
        } else {
            Err(format!("KVM interprets here, {text}"))
        }
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
    pub fn bare_exits(&self, count: u16) -> Result<Duration, String> {
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
    pub fn tries_pt(&self) -> Result<Arc<dyn Traces>, String> {
        let perf = perf::Perf::here()?;
        // perf may send it.
        room::take_signal().map_err(refused("taking over a signal"))?;
        // VMXON may come with the first one only.
        let _vm = self.kvm.create_vm().map_err(|e| refused("KVM_CREATE_VM")(e.into()))?;
        perf.try_out()?;
        Ok(Arc::new(perf))
    }

    /// What KVM_SET_GUEST_DEBUG delivers here.
    ///
    /// # Errors
    /// One line: KVM refuses or fails.
    pub fn guest_debug(&self) -> Result<Kinds, String> {
        guestdbg::measure(&self.kvm).map_err(refused("trying KVM_SET_GUEST_DEBUG"))
    }

    /// What KVM_CHECK_EXTENSION says of a capability, by its number.
    pub fn capability(&self, number: u32) -> i32 {
        self.kvm.check_extension_raw(number.into())
    }
}

/// Whether Linux has given up the host's time-stamp counter as a clock. Whenever a CPU of a guest was put aside KVM sets its
/// counter anew then, from what the guest saw last and the wall clock; ours is the host's and an offset that stays.
pub fn host_tsc_is_unstable() -> bool {
    let path = "/sys/devices/system/clocksource/clocksource0/available_clocksource";
    std::fs::read_to_string(path).is_ok_and(|clocks| no_tsc_among(&clocks))
}

fn no_tsc_among(clocks: &str) -> bool {
    !clocks.split_whitespace().any(|clock| clock == "tsc")
}

/// A machine's clock that the host's time-stamp counter moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostClock {
    /// The counter when the clock was at 0.
    base: u64,
    /// It stands, and shows this.
    stands: Option<u64>,
}

impl HostClock {
    /// A clock that shows so many ticks now.
    pub fn at(ticks: u64) -> Self {
        HostClock {
            base: room::host_tsc().wrapping_sub(ticks),
            stands: None,
        }
    }

    /// What it shows.
    pub fn ticks(self) -> u64 {
        self.stands.unwrap_or_else(|| room::host_tsc().wrapping_sub(self.base))
    }

    /// It stands from now on.
    pub fn stop(&mut self) {
        self.stands = Some(self.ticks());
    }

    /// It goes on from where it stands.
    pub fn go_on(&mut self) {
        if let Some(ticks) = self.stands {
            *self = HostClock::at(ticks);
        }
    }
}

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
struct Processor {
    vcpu: Mutex<VcpuFd>,
    kick: Kick,
    /// What its time-stamp counter is ahead of the machine's clock, as KVM was last told.
    tsc_offset: Mutex<Option<u64>>,
    /// The host's breakpoints, as KVM was last told.
    armed: Mutex<Vec<Breakpoint>>,
    /// What the host's tracer records of it, while the guest traces itself.
    tracer: Mutex<Option<Box<dyn Tracer>>>,
    /// What KVM holds of it while it is away.
    kept: Mutex<Option<Kept>>,
}

/// The CPUs of a machine in KVM.
#[derive(Debug)]
pub struct Hypervisor {
    /// A thread for each CPU, by its number. KVM wants a vCPU to stay on one: a change costs a grace period of the host's RCU
    /// before Linux 6.12.
    threads: ThreadPool,
    // Before `vm`, whose descriptor theirs hold anyway.
    cpus: Vec<Processor>,
    vm: Arc<VmFd>,
    irqchip: Irqchip,
    /// KVM's own timers, while they stand.
    timers: Option<Timers>,
    model: &'static CpuModel,
    clock: HostClock,
    limit: Option<Limit>,
    /// The host's breakpoints in the CPUs' debug registers.
    points: Vec<Breakpoint>,
    /// A unit of ours may have to see instructions.
    watches: bool,
    /// RDPMC comes out of KVM, by one of the points.
    has_rdpmc: bool,
    /// The host's Intel PT, if the guest's is that.
    traces: Option<Arc<dyn Traces>>,
    /// The mapping that KVM was given, which has to stay.
    memory: Memory,
}

fn refused(what: &'static str) -> impl Fn(io::Error) -> String {
    move |error| format!("{what}: {}", machine::plain(&error))
}

impl Hypervisor {
    /// So many CPUs of this model, narrowed by [`narrow`], on this memory, with these interrupt controllers and these units of
    /// KVM's.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub fn new(
        host: &Host,
        model: &'static CpuModel,
        memory: &Memory,
        count: usize,
        watches: bool,
        irqchip: Irqchip,
        passed: &Passed,
    ) -> Result<Self, String> {
        let vm = host.kvm.create_vm().map_err(|e| refused("KVM_CREATE_VM")(e.into()))?;
        let enable = |cap: u32, argument: u64| {
            let mut request = kvm_enable_cap {
                cap,
                ..Default::default()
            };
            request.args[0] = argument;
            vm.enable_cap(&request)
        };
        let all = KVM_MSR_EXIT_REASON_INVAL | KVM_MSR_EXIT_REASON_UNKNOWN | KVM_MSR_EXIT_REASON_FILTER;
        enable(KVM_CAP_X86_USER_SPACE_MSR, all.into()).map_err(|e| refused("KVM_CAP_X86_USER_SPACE_MSR")(e.into()))?;
        // Else KVM raises #UD above CPL 0. Only newer ones can be asked.
        if host.capability(KVM_CAP_EXIT_ON_EMULATION_FAILURE) > 0 {
            enable(KVM_CAP_EXIT_ON_EMULATION_FAILURE, 1)
                .map_err(|e| refused("KVM_CAP_EXIT_ON_EMULATION_FAILURE")(e.into()))?;
        }
        // Where the counters are ours or nobody's, this has RDPMC fault instead of reading the host's.
        if !passed.pmu && host.capability(KVM_CAP_PMU_CAPABILITY) & KVM_PMU_CAP_DISABLE as i32 != 0 {
            enable(KVM_CAP_PMU_CAPABILITY, KVM_PMU_CAP_DISABLE.into())
                .map_err(|e| refused("KVM_CAP_PMU_CAPABILITY")(e.into()))?;
        }
        let bitmap = [0xff; 8];
        let with_apic = match irqchip {
            Irqchip::Minivmm => &[][..],
            Irqchip::Kvm => &KEPT_WITH_APIC,
        };
        let passed_on = passed.registers();
        let ranges: Vec<MsrFilterRange> = KEPT
            .iter()
            .chain(with_apic)
            .chain(&passed_on)
            .map(|&(base, msr_count)| MsrFilterRange {
                flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
                base,
                msr_count,
                bitmap: &bitmap,
            })
            .collect();
        vm.set_msr_filter(MsrFilterDefaultAction::DENY, &ranges)
            .map_err(|e| refused("KVM_X86_SET_MSR_FILTER")(e.into()))?;
        // Three pages that VMX needs for real mode, where this machine has neither RAM nor devices.
        vm.set_tss_address(0xfffb_d000)
            .map_err(|e| refused("KVM_SET_TSS_ADDR")(e.into()))?;
        if irqchip == Irqchip::Kvm {
            irqchip::create(&vm)?;
        }
        room::lend(&vm, memory).map_err(refused("KVM_SET_USER_MEMORY_REGION"))?;
        room::take_signal().map_err(refused("taking over a signal"))?;
        let cpus = (0..count)
            .map(|cpu| Processor::new(&vm, model, cpu, count, passed))
            .collect::<Result<Vec<_>, _>>()?;
        if irqchip == Irqchip::Kvm {
            irqchip::set_virtual_wire(&room::lock(&cpus[0].vcpu))?;
        }
        let threads = ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|cpu| format!("cpu{cpu}"))
            .build()
            .map_err(|error| format!("starting a thread for each CPU: {error}"))?;
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

    /// Whether the interrupt controllers are KVM's.
    pub fn has_controllers(&self) -> bool {
        self.irqchip == Irqchip::Kvm
    }

    /// Where the devices' lines lead, if the interrupt controllers are KVM's.
    pub fn lines(&self) -> Option<Box<dyn Lines>> {
        let lines = || Box::new(irqchip::KernelLines(Arc::clone(&self.vm))) as _;
        self.has_controllers().then(lines)
    }

    /// Has KVM's timers stand until the next run; the CPUs are out of KVM. Ours follow the machine's clock.
    ///
    /// # Errors
    /// One line: what KVM refused.
    pub fn stop_timers(&mut self) -> Result<(), String> {
        if self.has_controllers() && self.timers.is_none() {
            let vcpus: Vec<_> = self.cpus.iter().map(|cpu| room::lock(&cpu.vcpu)).collect();
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
            *room::lock(&cpu.tsc_offset) = None;
        }
    }

    /// Has the CPUs come back after so much; `None`: when something asks for it.
    pub fn set_limit(&mut self, limit: Option<Limit>) {
        self.limit = limit;
    }

    /// Has all CPUs stop at these breakpoints of the host's, four at most, from the next run on: [`Native::hits`]. `has_rdpmc`:
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
    fn enter(&self, index: usize, vcpu: &mut VcpuFd, state: &CpuState, machine: &mut Machine) -> Result<(), String> {
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
            irqchip::set_activity(vcpu, state.activity)?;
        }
        let cr8 = machine.platform().cr8(index).into();
        let run = vcpu.get_kvm_run();
        run.cr8 = cr8;
        // That of the state which it had when it was here last.
        run.ready_for_interrupt_injection = 0;
        let last = room::lock(&cpu.kept).take();
        state::enter(vcpu, state, last, self.model, |held| {
            held.sregs.cr8 = cr8;
            if self.has_controllers() {
                // An NMI waits here, too.
                held.events.flags &= !KVM_VCPUEVENT_VALID_NMI_PENDING;
            }
        })?;
        let mut armed = room::lock(&cpu.armed);
        if *armed != self.points {
            guestdbg::arm(vcpu, &self.points).map_err(refused("KVM_SET_GUEST_DEBUG"))?;
            armed.clone_from(&self.points);
        }
        if self.single_steps() {
            // A step is one from where the CPU is when that is asked for.
            cpu.kick.complete_only();
            room::run(vcpu);
        }
        Ok(())
    }

    /// Takes a CPU back: its state, and the event that KVM is in the middle of delivering. `activity`: by KVM, if the interrupt
    /// controllers are KVM's.
    ///
    /// # Errors
    /// One line: what KVM refused.
    fn leave(
        &self,
        index: usize,
        vcpu: &VcpuFd,
        before: &CpuState,
        (activity, halted): (Option<Activity>, bool),
        machine: &mut Machine,
    ) -> Result<(CpuState, Option<engine::Event>), String> {
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
        *room::lock(&self.cpus[index].kept) = Some(left.kept);
        Ok((state, left.event))
    }
}

impl Processor {
    fn new(vm: &VmFd, model: &'static CpuModel, cpu: usize, count: usize, passed: &Passed) -> Result<Self, String> {
        let mut vcpu = vm
            .create_vcpu(cpu as u64)
            .map_err(|e| refused("KVM_CREATE_VCPU")(e.into()))?;
        let place = topology::Place {
            cpu: cpu as u32,
            cpus: count as u32,
        };
        vcpu.set_cpuid2(&cpuid::entries(model, place)?)
            .map_err(|e| refused("KVM_SET_CPUID2")(e.into()))?;
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
    fn set_tsc_offset(&self, vcpu: &VcpuFd, offset: u64, clock: HostClock) {
        let mut told = room::lock(&self.tsc_offset);
        if *told == Some(offset) {
            return;
        }
        if let Err(error) = room::set_tsc_offset(vcpu, offset.wrapping_sub(clock.base)) {
            info!("KVM takes no offset of the time-stamp counter: {error}");
        }
        *told = Some(offset);
    }
}

/// Whether a CPU can be handed over to KVM as it is.
pub fn portable(state: &CpuState) -> bool {
    handover::portable(state) && state.activity != Activity::Shutdown
}

#[cfg(test)]
mod tests {
    use super::*;

    // covers: 6/clock-unstable
    #[test]
    fn a_tsc_that_linux_gave_up_is_no_clocksource() {
        assert!(no_tsc_among("kvm-clock hpet acpi_pm\n"));
        assert!(no_tsc_among("tsc-early\n"));
        assert!(!no_tsc_among("tsc kvm-clock \n"));
    }
}
