//! A run on KVM: natively as long as nothing needs the software engine, and in the engine as long as something does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use engine::{Cpu, CpuState};
use log::{debug, info};
use vmm_sys_util::eventfd::EventFd;
use x86::model::CpuModel;

use super::{End, Vm, pace::Pace, rdpmc, report::report, stats::Native};
use crate::{
    config::MachineConfig,
    debug::{self, Debugger},
    error::Error,
    front::{
        console::{Console, Stop},
        control::Control,
    },
};
use engine::Exit;
use kvm::{
    self, Counts, Host, Hypervisor, Limit, Passed, Shared, UNTIL_PORTABLE, Why,
    irqchip::{self, Irqchip},
    probe,
    tracer::Traces,
    units::{Resolution, Resolved, Wish, never_off},
    vcpu_state::portable,
};
use machine::memory::Memory;

/// So long nothing has to need the engine before the machine goes back to KVM: turning a unit off and on again is common, and
/// a handover costs more than the engine does in this time.
const HYSTERESIS: Duration = Duration::from_millis(10);
/// And so many steps, or so long, where the engine is slow: a handler of an interrupt turns counters off, reads them, and turns
/// them on.
const STEPS: u64 = 200_000;
const SLOW_HYSTERESIS: Duration = Duration::from_millis(100);
/// The longest that the outside is not looked at.
const LOOK: Duration = Duration::from_millis(5);
/// The longest that it is not looked at while all CPUs are halted and input wakes the look.
const IDLE_LOOK: Duration = Duration::from_millis(500);

/// The KVM side of a machine.
#[derive(Debug)]
pub(crate) struct Hosted {
    pub hypervisor: Hypervisor,
    wake: EventFd,
    /// The console listens to it.
    listened: bool,
    counts: Counts,
    /// Handovers to the engine because of a unit.
    pub watched: u64,
}

impl Hosted {
    /// The CPUs of a machine of a model that [`model`] gave.
    pub fn new(config: &MachineConfig, host: &Host, irqchip: Irqchip, memory: &Memory) -> Result<Self, Error> {
        let units = units(config, host)?;
        let watches = units.pt == Resolved::Host || units.each().iter().any(|(_, how)| *how == Resolved::Emulated);
        let passed = Passed::of(&probe::Traits::of(host).pmu, &units);
        let count = config.cpus.max(1).into();
        let mut hypervisor =
            Hypervisor::new(host, config.model, memory, count, watches, irqchip, &passed).map_err(refused)?;
        if let Some(traces) = traces(config, host, &units)? {
            hypervisor.trace_with(traces);
        }
        let wake = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(|source| Error::System {
            what: "creating an event",
            source,
        })?;
        Ok(Hosted {
            hypervisor,
            wake,
            listened: false,
            counts: Counts::default(),
            watched: 0,
        })
    }

    /// Figures for `--stats`.
    pub fn stats(&self) -> Native {
        Native {
            exits: self.counts.exits(),
            emulated: self.counts.emulated.load(Ordering::Relaxed),
            watched: self.watched,
            in_engine: Duration::from_nanos(self.counts.in_engine.load(Ordering::Relaxed)),
        }
    }
}

fn refused(reason: String) -> Error {
    Error::Engine {
        option: "--engine kvm".into(),
        reason,
    }
}

/// Who is each unit of a machine on KVM.
fn units(config: &MachineConfig, host: &Host) -> Result<Resolution, Error> {
    let mut traits = probe::Traits::of(host);
    if config.host_trace.is_some() {
        // Whose recording it is does not matter.
        (traits.pt.intel, traits.pt.kvm_intel, traits.pt.pt_mode, traits.pt.ept) = (true, true, None, None);
    }
    let units = probe::resolve(&traits, &config.units).map_err(Error::Usage)?;
    let wrong = |unit: &str, why: String| Err(Error::Usage(format!("--{unit}=host: {why}")));
    if units.pt == Resolved::Host && !config.experimental {
        let why = "it is experimental, and has run on no hardware yet: say --experimental, too";
        return wrong("pt", why.into());
    }
    for (unit, how) in [("lbr", units.lbr), ("pebs", units.pebs)] {
        if how == Resolved::Host
            && let Some(why) = traits.pmu.differs(config.model)
        {
            return wrong(unit, why);
        }
    }
    Ok(units)
}

/// What records the guest for its Intel PT, if that is the host's.
fn traces(config: &MachineConfig, host: &Host, units: &Resolution) -> Result<Option<Arc<dyn Traces>>, Error> {
    match (units.pt, &config.host_trace) {
        (Resolved::Host, Some(traces)) => Ok(Some(Arc::clone(traces))),
        (Resolved::Host, None) => {
            let refused = |why| Error::Usage(format!("--pt=host: {why}"));
            host.tries_pt().map(Some).map_err(refused)
        }
        _ => Ok(None),
    }
}

/// The configuration's model as the software engine has it: without the units that are not wanted.
pub(super) fn soft_model(config: &MachineConfig) -> Result<&'static CpuModel, Error> {
    let units = config.units.try_map(|unit, wish| match (wish, never_off(unit)) {
        (Some(Wish::Host), _) => Err(Error::Usage(format!(
            "--{unit}=host: the software engine has no unit of the host's: use --engine kvm"
        ))),
        (Some(Wish::Off), Some(why)) => Err(Error::Usage(format!("--{unit}=off: {why}"))),
        (Some(Wish::Off), None) => Ok(Resolved::Absent),
        (Some(Wish::Emulated) | None, _) => Ok(Resolved::Emulated),
    })?;
    if !units.each().iter().any(|(_, unit)| *unit == Resolved::Absent) {
        return Ok(config.model);
    }
    kvm::cpuid::narrow(config.model, None, &units, None, None).map_err(Error::Usage)
}

/// Whose interrupt controllers a machine on this host's KVM has.
pub(super) fn irqchip(config: &MachineConfig, host: &Host) -> Result<Irqchip, Error> {
    let choice = irqchip::choose(
        &wanted(config),
        &units(config, host)?,
        kvm::kernel_irqchip::lacks(host),
        || host.virtualizes(),
    );
    let choice = choice.map_err(irqchip_refused)?;
    info!("--irqchip {}: {}", choice.irqchip.name(), choice.why);
    Ok(choice.irqchip)
}

/// A wish for interrupt controllers cannot be met.
pub(super) fn irqchip_refused(reason: String) -> Error {
    Error::Engine {
        option: "--irqchip kvm".into(),
        reason,
    }
}

/// The configuration's model as a guest on this host's KVM sees it.
pub(super) fn model(config: &MachineConfig, host: &Host, irqchip: Irqchip) -> Result<&'static CpuModel, Error> {
    let units = units(config, host)?;
    let supported = host.rows(irqchip);
    for (feature, why) in kvm::cpuid::narrowings(config.model, Some(&supported), &units) {
        info!("{} has no {}: {why}", config.model.name, feature.name());
    }
    if host.tsc_khz != config.model.tsc_khz {
        info!(
            "the time-stamp counter runs at the host's {} kHz, not the model's {}",
            host.tsc_khz, config.model.tsc_khz
        );
    }
    let model = {
        let pmu = probe::Traits::of(host).pmu;
        kvm::cpuid::narrow(config.model, Some(&supported), &units, Some(host.tsc_khz), Some(&pmu)).map_err(refused)?
    };
    if irqchip == Irqchip::Minivmm {
        return Ok(model);
    }
    Ok(model
        .with_apic_timer_khz(kvm::kernel_irqchip::APIC_TIMER_KHZ)
        .unwrap_or_else(|why| {
            info!("CPUID does not tell the clock of KVM's APIC timers: {why}");
            model
        }))
}

/// Why a machine on KVM is in the software engine.
enum Stay {
    /// It is not.
    Native,
    /// This CPU's next instruction is for the engine.
    Step(usize),
    /// A unit of a CPU has to see instructions.
    Watched,
}

/// What of a configuration needs the software engine alone: the option, and what it does there.
pub(super) fn needs_soft(config: &MachineConfig) -> Option<(&'static str, &'static str)> {
    const COUNTS: &str = "counts instructions, which KVM does not";
    match config {
        MachineConfig {
            max_instructions: Some(_),
            ..
        } => Some(("--max-instructions", COUNTS)),
        MachineConfig { trace: Some(_), .. } => Some(("--trace", COUNTS)),
        MachineConfig { reverse: Some(_), .. } => Some(("--reverse", COUNTS)),
        MachineConfig { record: Some(_), .. } => Some(("--record", COUNTS)),
        MachineConfig { replay: Some(_), .. } => Some(("replay", COUNTS)),
        _ => None,
    }
}

/// Why a configuration is better off in the software engine, where it has the choice.
pub(super) fn wants_ours(config: &MachineConfig) -> Option<&'static str> {
    let ours = |wish: Option<Wish>| wish == Some(Wish::Emulated);
    if config.units.each().iter().any(|(_, wish)| ours(*wish)) {
        return Some("a unit of ours is wanted, and there it has all the others beside it");
    }
    let gdb = config.gdb.is_some();
    gdb.then_some("a debugger's guest stops and steps there, and its runs repeat")
}

/// What of a configuration decides whose interrupt controllers a machine on KVM has.
pub(super) fn wanted(config: &MachineConfig) -> irqchip::Wanted {
    irqchip::Wanted {
        irqchip: config.irqchip,
        debugged: config.gdb.is_some(),
        monitored: config.control.is_some(),
    }
}

/// The end of a machine that cannot leave KVM, whose interrupt controllers it has, and would have to.
pub(super) fn stays(vm: &Vm, why: &str) -> End {
    End::Kvm(format!(
        "the interrupt controllers are KVM's, and {why}: use --irqchip minivmm\n{}",
        vm.report()
    ))
}

impl Vm {
    /// [`Vm::run`] of a machine on KVM.
    pub(super) fn run_hosted(
        &mut self,
        mut hosted: Hosted,
        console: &mut Console,
        started: Instant,
    ) -> Result<End, Stop> {
        let end = self.hosted_until_end(&mut hosted, console, started);
        // Until the next run, if there is one.
        let stood = hosted.hypervisor.stop_timers();
        let end = match (&end, stood) {
            (Ok(End::Kvm(_)) | Err(_), _) | (_, Ok(())) => end,
            (_, Err(what)) => Ok(End::Kvm(what)),
        };
        self.hosted = Some(hosted);
        end
    }

    fn hosted_until_end(&mut self, hosted: &mut Hosted, console: &mut Console, started: Instant) -> Result<End, Stop> {
        if !std::mem::replace(&mut hosted.listened, true) {
            let wake = hosted.wake.try_clone().map_err(|source| {
                Stop::Events(Error::System {
                    what: "waiting for CPUs",
                    source,
                })
            })?;
            console.listen(wake).map_err(Stop::Events)?;
        }
        let mut pace = Pace::new(self.now(), started, self.timeout);
        let mut stay = match self.needs_engine() {
            true => Stay::Watched,
            false => Stay::Native,
        };
        loop {
            let since = Instant::now();
            let end = match stay {
                Stay::Native => None,
                Stay::Step(cpu) => {
                    hosted.counts.emulated.fetch_add(1, Ordering::Relaxed);
                    self.step_for_kvm(cpu)
                }
                Stay::Watched if hosted.hypervisor.has_controllers() => {
                    Some(stays(self, "what was asked for is the software engine's to see"))
                }
                Stay::Watched => {
                    hosted.watched += 1;
                    self.watch_for_kvm(console, &mut pace)?
                }
            };
            if !matches!(stay, Stay::Native) {
                hosted.counts.add_in_engine(since.elapsed());
            }
            if let Some(end) = end {
                return Ok(end);
            }
            if self.requested.is_some()
                && let Err(what) = hosted.hypervisor.stop_timers()
            {
                return Ok(End::Kvm(what));
            }
            if let Some(end) = self.obey(console, &mut pace)? {
                return Ok(end);
            }
            if let Some(clock) = self.host_clock
                && clock != hosted.hypervisor.clock()
            {
                hosted.hypervisor.set_clock(clock);
            }
            stay = match self.native(hosted, console, &mut pace)? {
                Ok(end) => return Ok(end),
                Err(stay) => stay,
            };
        }
    }

    /// Whether there is something that only the engine does: a unit or an observer that has to see instructions, something
    /// that a debugger wants to stop for, CPUs that are to stand still.
    fn needs_engine(&mut self) -> bool {
        let Ok(points) = self.points() else { return true };
        self.soft.runs_only() || self.machine.is_observed() || {
            let times = self.rdpmc_handlers(points.len()).is_some();
            self.soft.needs_instructions(times, &mut self.machine).is_some()
        }
    }

    /// Runs a machine on KVM until it has come out of the guest so often, or something ends the run before. `None`: it has come
    /// to that. A machine that is not on KVM, or whose next instructions have to be the engine's, runs as in [`Vm::run`].
    ///
    /// # Errors
    /// As [`Vm::run`].
    pub fn run_native(&mut self, console: &mut Console, limit: Limit) -> Result<Option<End>, Error> {
        let set = |vm: &mut Vm, limit| {
            if let Some(hosted) = &mut vm.hosted {
                hosted.hypervisor.set_limit(limit);
            }
        };
        set(self, Some(limit));
        let end = self.run(console);
        set(self, None);
        Ok(Some(end?).filter(|end| !matches!(end, End::Instructions(_))))
    }

    /// One instruction of a CPU, and what it takes until KVM can go on from there.
    fn step_for_kvm(&mut self, cpu: usize) -> Option<End> {
        self.soft.take_turn(cpu);
        self.machine.platform().take_missed();
        for _ in 0..UNTIL_PORTABLE {
            let steps = self.soft.steps();
            if let Some(clock) = self.host_clock {
                self.machine.clock().follow(clock.ticks(), steps);
            }
            let exit = self.soft.run(&mut self.machine, 1);
            if let Some(stop) = self.stop(cpu, &exit, false) {
                return Some(End::Stopped(stop));
            }
            let steps = self.soft.steps();
            for effect in self.machine.advance(steps) {
                if let Some(end) = self.take_effect(effect) {
                    return Some(end);
                }
            }
            if self.machine.platform().take_missed() {
                return Some(stays(self, "it cannot execute an instruction that reaches for them"));
            }
            match exit {
                Exit::Shutdown => return Some(End::TripleFault(self.report())),
                Exit::Defect(what) => return Some(End::Defect(format!("{what}\n{}", self.report()))),
                _ => {}
            }
            if self.cpu_state(cpu).is_none_or(|state| portable(&state)) {
                break;
            }
        }
        None
    }

    /// The whole machine in the engine, until no unit has needed it for a while.
    fn watch_for_kvm(&mut self, console: &mut Console, pace: &mut Pace) -> Result<Option<End>, Stop> {
        debug!("in the engine from step {}", self.soft.steps());
        let mut needed = (Instant::now(), self.soft.steps());
        let end = self.software(console, pace, &mut |vm| {
            if vm.needs_engine() {
                needed = (Instant::now(), vm.soft.steps());
            }
            let portable = |cpu: &Cpu| portable(&cpu.state());
            let (time, steps) = (needed.0.elapsed(), vm.soft.steps() - needed.1);
            let long = time >= HYSTERESIS && steps >= STEPS || time >= SLOW_HYSTERESIS;
            long && vm.soft.cpus().all(portable)
        })?;
        debug!("back to KVM at step {}", self.soft.steps());
        Ok(end)
    }

    /// The guest in KVM, until something ends that.
    fn native(
        &mut self,
        hosted: &mut Hosted,
        console: &mut Console,
        pace: &mut Pace,
    ) -> Result<Result<End, Stay>, Stop> {
        if hosted.hypervisor.is_at_limit() {
            return Ok(Ok(End::Instructions(0)));
        }
        if let Some(cpu) =
            (0..self.soft.count()).find(|&cpu| self.cpu_state(cpu).is_some_and(|state| !portable(&state)))
        {
            return Ok(Err(Stay::Step(cpu)));
        }
        if let Some(stop) = self.waiting_stop() {
            return Ok(Ok(End::Stopped(stop)));
        }
        let points = match self.points() {
            // Steps have KVM's guest debugging to themselves.
            Ok(points) if points.is_empty() || !hosted.hypervisor.single_steps() => points,
            _ => return Ok(Err(Stay::Watched)),
        };
        if let Some(cpu) = self.passes(&points) {
            return Ok(Err(Stay::Step(cpu)));
        }
        // Steps have KVM's guest debugging to themselves here, too.
        let handlers = match hosted.hypervisor.single_steps() {
            true => None,
            false => self.rdpmc_handlers(points.len()),
        };
        if let Some(cpu) = handlers.as_ref().and_then(|handlers| self.before_handler(handlers)) {
            return Ok(Err(Stay::Step(cpu)));
        }
        let registers = points.iter().map(|point| point.register);
        let catching = rdpmc::breakpoints(handlers.as_deref().unwrap_or_default());
        hosted
            .hypervisor
            .arm(registers.chain(catching).collect(), handlers.is_some());
        let (control, debugger, mut request) = (self.control.as_ref(), self.debugger.as_ref(), None);
        let paced_wait = |wanted: Duration| pace.time_left(Some(wanted)).unwrap_or(wanted);
        let outside = |shared: &Shared, soft: &mut dyn kvm::Cpus| -> Result<Option<End>, Stop> {
            while !shared.over() {
                shared.execute_lent(soft, LOOK);
                let wait = {
                    let mut machine = shared.machine();
                    if !console.input().is_empty() {
                        let taken = machine.platform().serial_enqueue(console.input());
                        console.consume(taken)?;
                    }
                    let next = shared.run_due_events(&mut machine, None);
                    let now = machine.clock().ns(shared.steps());
                    let (idle, listening) = shared.idle(&mut machine);
                    if idle && next.is_none() && !(listening && console.input_open()) && console.input().is_empty() {
                        drop(machine);
                        shared.stop(Why::Halted);
                        break;
                    }
                    shared.look_at(next);
                    let most = if idle || shared.is_quiet() { IDLE_LOOK } else { LOOK };
                    next.map_or(most, |next| Duration::from_nanos(next.saturating_sub(now)).min(most))
                };
                console.flush()?;
                console.wait(Some(paced_wait(wait)))?;
                if let Some(limit) = pace.time_is_up() {
                    return Ok(Some(End::Timeout(limit)));
                }
                request = control.and_then(Control::next);
                if request.is_some() || debugger.is_some_and(Debugger::is_asked) {
                    break;
                }
            }
            Ok(None)
        };
        let native = hosted
            .hypervisor
            .run(&mut self.soft, &mut self.machine, &hosted.wake, &hosted.counts, outside);
        self.requested = request;
        let native = match native {
            Ok(native) => native,
            Err(what) => return Ok(Ok(End::Kvm(format!("{what}\n{}", self.report())))),
        };
        let rdpmc = self.take_back_rdpmc(&native.hits, points.len());
        let met = self.met(&points, &native.hits);
        for effect in native.effects {
            if let Some(end) = self.take_effect(effect) {
                return Ok(Ok(end));
            }
        }
        if let Some(end) = native.outcome? {
            return Ok(Ok(end));
        }
        if let Some(stop) = met {
            return Ok(Ok(End::Stopped(stop)));
        }
        if native.hits.iter().any(|(_, hit)| hit.guest_steps) {
            return Ok(Err(Stay::Watched));
        }
        if let Some(cpu) = rdpmc {
            return Ok(Err(Stay::Step(cpu)));
        }
        Ok(match native.why {
            // A unit may have asked at the same time.
            Why::Asked | Why::Effects => Err(match self.needs_engine() {
                true => Stay::Watched,
                false => Stay::Native,
            }),
            Why::Instructions(cpu) => {
                // A guest that had no handler when it came to KVM may have one by now.
                if self.rdpmc_handlers(points.len()).is_some() && !self.needs_engine() {
                    return Ok(Err(Stay::Native));
                }
                debug!("a unit of CPU {cpu} has to see instructions");
                Err(Stay::Watched)
            }
            Why::Emulation(cpu) if hosted.hypervisor.has_controllers() && self.is_at_reset(cpu) => Ok(End::Reset),
            Why::Emulation(cpu) => Err(Stay::Step(cpu)),
            Why::Shutdown(cpu) => {
                let mut debugger = self.debugger.as_mut().filter(|debugger| !debugger.is_suspended());
                let why = debug::Why::TripleFault;
                Ok(match debugger.as_mut().is_some_and(|debugger| debugger.shutdown()) {
                    true => End::Stopped(debug::Stop { cpu, why }),
                    false => End::TripleFault(self.report_of(cpu)),
                })
            }
            // MOV DR, or INT1.
            Why::Debug(cpu) => Err(Stay::Step(cpu)),
            Why::Limit => Ok(End::Instructions(0)),
            Why::Defect(cpu, what) => Ok(End::Defect(format!("{what}\n{}", self.report_of(cpu)))),
            Why::Halted => {
                let listening = self.soft.cpus().any(Cpu::interrupt_wakes);
                Ok(End::Halted(self.halted(listening)))
            }
            Why::Failed(cpu, what) => Ok(End::Kvm(format!("{what}\n{}", self.report_of(cpu)))),
        })
    }

    /// A CPU is where an INIT puts the boot CPU. KVM with its own interrupt controllers does that itself, and there is no firmware:
    /// for us it is a reset.
    fn is_at_reset(&self, cpu: usize) -> bool {
        let at_reset = |state: CpuState| {
            state.rip == 0xfff0 && state.segments[engine::CS].base == 0xffff_0000 && state.cr0 & 1 == 0
        };
        cpu == 0 && self.cpu_state(cpu).is_some_and(at_reset)
    }

    /// Registers and code of a CPU.
    fn report_of(&self, cpu: usize) -> String {
        let state = self.cpu_state(cpu).unwrap_or_default();
        let text = report(self.machine.memory(), &state);
        match self.soft.count() {
            1 => text,
            count => format!("CPU {cpu} of {count}\n{text}"),
        }
    }
}
