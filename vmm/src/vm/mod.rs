//! The run loop: time, turns, interrupts, idleness, limits.
//!
//! One round of the loop is: take what comes from outside (at slice boundaries), let the devices do what is due, deliver an
//! interrupt if there is one, and let the CPU whose turn it is run until the next thing that is due. On the virtual clock
//! everything in a round is a function of the steps so far and of the input, so a run repeats; wall time decides only how often
//! the outside is looked at. Time is skipped only when all CPUs are halted.

mod end;
mod files;
mod hosted;
mod inspect;
mod pace;
mod points;
mod rdpmc;
mod report;
pub mod soft;
mod stats;

mod snapshot;

pub use snapshot::{Pages, Snapshot};

use std::{
    io::{self, Write},
    path::PathBuf,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use devices::platform::Effect;
use engine::{Activity, Cpu, CpuState, HostLacks, Options};
use log::{debug, info, warn};
use x86::model::CpuModel;

pub use self::{
    end::{End, Ended},
    stats::{Native, Stats},
};
use self::{hosted::Hosted, pace::Pace, report::report};
use crate::timeline::named::Named;
use crate::{
    config::{ClockMode, EngineChoice, MachineConfig},
    debug::{self, Debugger, Why},
    error::Error,
    front::{
        console::{Console, Line, Stop},
        control::{self, Command, Control, CpuStatus, Reply, Request},
        gdb,
        monitor::{self, Names},
        place,
    },
    timeline::{self, History, output_gate::Valve, session::Session},
    trace::{self, Recorder},
    vm::soft::Soft,
};
use engine::Exit;
use kvm::{
    self, HostClock,
    irqchip::{self, Irqchip},
};
use machine::{
    Machine, acpi, boot,
    collect::{self, Collector},
    disk::{Disk, DiskMode, Overlay},
    loader,
    memory::{Digest, Memory, NotRam},
    walk,
    watchers::Seat,
};

/// Steps between two looks outside, on the virtual clock: a millisecond or two.
const SLICE: u64 = 1 << 18;
/// The same when paced, where a slice is also how finely virtual time follows wall time.
const PACED_SLICE: u64 = 1 << 14;
/// Time that a warp over idle time counts for the slice, in steps, so that a guest that only sleeps is interrupted, too.
const WARP: u64 = 1 << 12;
/// The furthest that virtual time jumps at once when paced.
const JUMP_NS: u64 = 10_000_000;
/// The same while an interrupt waits until the guest lets it in: a tick that fires twice before it is served is lost.
const PENDING_JUMP_NS: u64 = 100_000;
/// So much virtual time a CPU may be halted with interrupts off before it counts as halted for good. Only an NMI could end
/// that, and none takes this long.
const DEAD_HALT_NS: u64 = 10_000_000_000;
/// Commands that are carried out before the guest goes on.
const COMMANDS: usize = 16;

/// No RAM is mapped at this linear address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory is mapped at linear address {0:#x}")]
pub struct Unmapped(pub u64);

/// There is no CPU of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no CPU {0}")]
pub struct NoCpu(pub usize);

impl From<&Cpu> for CpuStatus {
    fn from(cpu: &Cpu) -> Self {
        CpuStatus {
            rip: format!("{:#x}", cpu.rip()),
            activity: match cpu.activity() {
                Activity::Running => "running",
                Activity::Halted => "halted",
                Activity::Waiting => "waiting",
                Activity::WaitForSipi => "wait-for-sipi",
                Activity::Shutdown => "shutdown",
            },
            steps: cpu.steps(),
        }
    }
}

/// A machine with its CPUs, ready to run.
#[derive(Debug)]
pub struct Vm {
    pub(crate) soft: Soft,
    /// KVM, where the guest runs natively.
    pub(crate) hosted: Option<Hosted>,
    /// The clock that it has there.
    pub(crate) host_clock: Option<HostClock>,
    pub(crate) machine: Machine,
    pub(crate) line: Line,
    pub(crate) clock: ClockMode,
    pub(crate) max_instructions: Option<u64>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) wall: Duration,
    pub(crate) control: Option<Control>,
    /// A command that has been taken from it and not been carried out.
    pub(crate) requested: Option<Request>,
    pub(crate) paused: bool,
    /// A debugger looks.
    pub(crate) held: bool,
    pub(crate) recorder: Option<Recorder>,
    pub(crate) debugger: Option<Debugger>,
    /// How KVM serves it.
    pub(crate) points: points::Points,
    /// What RAM held when a snapshot was taken or restored last.
    pub(crate) kept: Option<Pages>,
    /// What the monitor knows by name.
    pub(crate) names: Names,
    /// Where the run came from, if that is kept.
    pub(crate) history: Option<Box<History>>,
    /// The run goes to a step, and hears nothing from outside but what ends it.
    pub(crate) seeking: bool,
    /// The step that somebody wants it to go to.
    pub(crate) wanted: Option<u64>,
    /// It ends as by a limit when this CPU has made so many steps.
    pub(crate) until_cpu: Option<(usize, u64)>,
    /// States that are kept under a name.
    pub(crate) named: Named,
    /// What is on disks that have an overlay, in order.
    pub(crate) overlays: Vec<Overlay>,
    /// What of the guest's would not go back to a state that was kept, in a machine that does not keep its past.
    pub(crate) lasting: Option<String>,
    /// The recording was begun under way.
    pub(crate) recorder_is_late: bool,
    /// The kernel's file.
    pub(crate) kernel: PathBuf,
}

impl Vm {
    /// Builds the machine: memory, tables, kernel, devices, CPU. Touches no file but for reading, unless it is a disk or the
    /// folder for what is collected.
    pub fn new(config: &MachineConfig) -> Result<Self, Error> {
        let host = choose_engine(config)?;
        if host.is_some() && kvm::clock::host_tsc_is_unstable() {
            warn!(
                "the host holds its time-stamp counter for unstable, so KVM moves the guest's, which may go back: boot the host \
                 with tsc=reliable if it is not so, or use --engine soft"
            );
        }
        let (model, irqchip) = match &host {
            Some(host) => {
                let irqchip = hosted::irqchip(config, host)?;
                (hosted::model(config, host, irqchip)?, irqchip)
            }
            None => {
                irqchip::check_soft(&hosted::wanted(config)).map_err(hosted::irqchip_refused)?;
                (hosted::soft_model(config)?, Irqchip::Minivmm)
            }
        };
        let config = &MachineConfig {
            model,
            ..config.clone()
        };
        let limit = 1u64.checked_shl(config.model.physical_bits()).unwrap_or(u64::MAX);
        let memory = Memory::new(config.memory)?;
        if memory.end() > limit {
            let reason = format!("the model addresses {} bits of it", config.model.physical_bits());
            return Err(Error::Memory {
                size: config.memory,
                reason,
            });
        }
        let engine = memory
            .engine(config.model, Options::default())
            .map_err(|lacks| host_lacks(config.model, &lacks))?;

        let entry = files::load(&memory, config)?;
        if matches!(entry, loader::Entry::Linux64 { .. }) && !config.model.features().lm() {
            return Err(Error::Engine {
                option: format!("--cpu-model {}", config.model.name),
                reason: "this Linux kernel is entered in 64-bit mode, which the model lacks: choose a model that has it (see `minivmm models`)".into(),
            });
        }
        info!(
            "CPU model {}: {}, Intel PT: {}",
            config.model.name,
            config.model.description,
            if config.model.features().intel_pt() {
                "yes"
            } else {
                "no"
            }
        );
        info!("entering the kernel: {entry:x?}");

        let line = Line::default();
        let keeps = keeps_history(config)?;
        let (mut outputs, mut overlays) = (Vec::new(), Vec::new());
        let mut once = |out: Box<dyn Write + Send>| match keeps {
            true => {
                let (valve, flow) = Valve::new(out);
                outputs.push(flow);
                Box::new(valve)
            }
            false => out,
        };
        let mut machine = Machine::new(
            config.model,
            config.cpus,
            memory,
            config.rtc_base,
            config.seed,
            once(Box::new(line.clone())),
        );
        machine.set_tsc_offset(config.tsc_offset);
        for disk in &config.disks {
            let failed = |source| Error::File {
                option: "--disk",
                path: disk.path.clone(),
                source,
            };
            let mode = match disk.mode {
                DiskMode::ReadWrite if keeps => DiskMode::Overlay,
                mode => mode,
            };
            let medium = Disk::open(&disk.path, mode).map_err(failed)?;
            overlays.extend(medium.overlay());
            machine
                .add_disk(Box::new(medium))
                .map_err(|e| failed(io::Error::other(e)))?;
        }
        if let Some(folder) = &config.collect {
            let out: Box<dyn Write + Send> = match config.replay {
                // It has all been unpacked.
                Some(_) => Box::new(io::sink()),
                None => Box::new(Collector::open(folder, collect::LIMITS).map_err(|source| Error::File {
                    option: "--collect",
                    path: folder.clone(),
                    source,
                })?),
            };
            machine.add_second_serial(once(out));
        }
        acpi::write(machine.memory(), &machine.hardware()).map_err(|e| Error::Memory {
            size: config.memory,
            reason: e.to_string(),
        })?;
        let recorder = match &config.trace {
            Some(options) => {
                let header = options.header(config.model, machine.cpu_count(), &config.kernel);
                Some(record(options, header, config.model, &mut machine)?)
            }
            None => None,
        };
        let boot = boot::state(config.model, &entry);
        let hosted = match &host {
            Some(host) => Some(Hosted::new(config, host, irqchip, machine.memory())?),
            None => None,
        };
        if let Some(lines) = hosted.as_ref().and_then(|hosted| hosted.hypervisor.lines()) {
            machine.platform().give_away_controllers(lines);
        }
        let soft = Soft::new(engine, config.model, machine.cpu_count(), &boot);
        let history = keeps.then(|| Box::new(History::new(config.reverse, outputs)));
        let mut vm = Vm {
            soft,
            host_clock: hosted.as_ref().map(|hosted| hosted.hypervisor.clock()),
            clock: if hosted.is_some() {
                ClockMode::Paced
            } else {
                config.clock
            },
            hosted,
            machine,
            line,
            max_instructions: config.max_instructions,
            timeout: config.timeout,
            wall: Duration::ZERO,
            control: None,
            requested: None,
            paused: config.paused,
            held: false,
            recorder,
            debugger: None,
            points: points::Points::default(),
            kept: None,
            names: Names::of(&config.kernel),
            history,
            seeking: false,
            wanted: None,
            until_cpu: None,
            named: Named::new(),
            overlays,
            lasting: lasting(config),
            recorder_is_late: false,
            kernel: config.kernel.clone(),
        };
        vm.begin_history(config)?;
        Ok(vm)
    }

    /// What a session is recorded from, or replayed.
    fn begin_history(&mut self, config: &MachineConfig) -> Result<(), Error> {
        if self.history.is_none() || config.record.is_none() && config.replay.is_none() {
            return Ok(());
        }
        let start = self.digest();
        let Some(history) = &mut self.history else {
            return Ok(());
        };
        if let Some(options) = &config.record {
            history
                .log
                .write_to(timeline::session::Writer::create(options, config, start)?);
        }
        if let Some(folder) = &config.replay {
            let (session, entries, head, closed) = Session::open(folder)?;
            session.check_disks(config)?;
            session.check_start(folder, start)?;
            history.log = timeline::log::Log::of(entries);
            (history.head, history.closed, history.live) = (head, Some(closed), false);
        }
        Ok(())
    }

    /// The UART's line, for [`Console::open`].
    pub fn line(&self) -> Line {
        self.line.clone()
    }

    /// Takes commands from a socket while it runs.
    pub fn set_control(&mut self, control: Control) {
        self.control = Some(control);
    }

    /// How many CPUs there are.
    pub fn cpu_count(&self) -> usize {
        self.soft.count()
    }

    /// The CPU that is to execute the next instruction.
    pub fn current_cpu(&self) -> usize {
        self.soft.current()
    }

    /// Instructions and REP iterations so far, over all CPUs: a position in a run, which a run with the same inputs reaches in
    /// the same state.
    pub fn steps(&self) -> u64 {
        self.soft.steps()
    }

    /// Whether a debugger may stop it.
    pub(crate) fn is_debugged(&self) -> bool {
        self.debugger.is_some()
    }

    /// The recording, if there is one.
    pub(crate) fn recorder(&self) -> Option<&Recorder> {
        self.recorder.as_ref()
    }

    /// What the monitor knows by name.
    pub(crate) fn names(&mut self) -> &mut Names {
        &mut self.names
    }

    /// Virtual time in nanoseconds.
    pub fn virtual_ns(&mut self) -> u64 {
        self.now()
    }

    /// Reads guest-physical memory.
    ///
    /// # Errors
    /// Not all of it is RAM.
    pub fn read_physical(&self, gpa: u64, bytes: &mut [u8]) -> Result<(), NotRam> {
        self.machine.memory().read(gpa, bytes)
    }

    /// Reads memory at a linear address, through the page tables that a CPU has in use; sets no accessed bits and asks for no
    /// rights.
    ///
    /// # Errors
    /// The first address at which no RAM is mapped; there is no such CPU.
    pub fn read_linear(&self, cpu: usize, gva: u64, bytes: &mut [u8]) -> Result<(), Unmapped> {
        let state = self.cpu_state(cpu).ok_or(Unmapped(gva))?;
        for (byte, at) in bytes.iter_mut().zip(0..) {
            let linear = gva.wrapping_add(at);
            *byte = walk::read_byte(self.machine.memory(), &state, linear).ok_or(Unmapped(linear))?;
        }
        Ok(())
    }

    /// Ends the recording, if there is one: what was executed so far is in the directory, whole.
    ///
    /// # Errors
    /// What went wrong first while it was written. What was written before that can be read.
    pub fn end_trace(&mut self, reason: &str) -> Result<(), Error> {
        let Some(recorder) = self.recorder.take() else {
            return Ok(());
        };
        self.recorder_is_late = false;
        recorder.finish();
        for cpu in 0..self.soft.count() {
            self.soft.ask(cpu, &mut self.machine);
            self.machine.observe(cpu, None);
        }
        let steps = self.soft.steps();
        let ticks = self.machine.clock().ticks(steps);
        let path = recorder.folder().to_path_buf();
        let memory = self.machine.memory();
        recorder
            .close(reason, memory, steps, ticks)
            .map_err(|source| Error::File {
                option: "--trace",
                path,
                source,
            })
    }

    /// Begins a recording here and now.
    ///
    /// # Errors
    /// There is one already, or the directory cannot be made; KVM executes what nobody sees.
    pub fn begin_trace(&mut self, options: &trace::Options) -> Result<(), Error> {
        let refused = |why: &str| Err(Error::Usage(format!("trace start: {why}")));
        if self.host_clock.is_some() {
            return refused("what runs in KVM is not seen: `--engine soft` is");
        }
        if self.recorder.is_some() {
            return refused("there is a recording already");
        }
        let model = self.machine.model();
        let header = options.header(model, self.soft.count(), &self.kernel);
        self.recorder = Some(record(options, header, model, &mut self.machine)?);
        self.recorder_is_late = true;
        Ok(())
    }

    /// Whether the recording, if there is one, was begun by [`Vm::begin_trace`].
    pub(crate) fn recorder_is_late(&self) -> bool {
        self.recorder_is_late
    }

    /// What the control socket says of the machine.
    pub fn status(&mut self) -> control::Status {
        control::Status {
            state: if self.paused || self.held { "paused" } else { "running" },
            steps: self.soft.steps(),
            instructions: self.soft.cpus().map(Cpu::retired).sum(),
            virtual_ns: self.now(),
            cpus: self.soft.cpus().map(CpuStatus::from).collect(),
        }
    }

    /// A CPU's state, if there is such a CPU.
    pub fn cpu_state(&self, cpu: usize) -> Option<CpuState> {
        Some(self.soft.cpu(cpu)?.state())
    }

    /// What stops the machine for a look. From the first call on a run may end with [`End::Stopped`], and a triple fault does so
    /// once before it ends the machine. A machine on KVM is in the software engine as long as there is anything to stop for that
    /// this KVM does not serve.
    pub fn debugger(&mut self) -> &mut Debugger {
        let Vm { debugger, machine, .. } = self;
        debugger.get_or_insert_with(|| {
            let debugger = Debugger::new();
            for cpu in 0..machine.cpu_count() {
                machine.seat(cpu, Seat::Debugger, Some(debugger.watcher(cpu)));
            }
            debugger
        })
    }

    /// Nothing stops the machine any more.
    pub fn end_debugging(&mut self) {
        self.soft.run_only(None);
        if self.debugger.take().is_none() {
            return;
        }
        for cpu in 0..self.soft.count() {
            self.soft.ask(cpu, &mut self.machine);
            self.machine.seat(cpu, Seat::Debugger, None);
        }
    }

    /// Pauses the guest, as a command over the control socket does, or lets it go on.
    pub fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Has the guest stand, whoever lets it go on, until a stop is [asked](debug::Asker::ask) for; or no longer.
    pub(crate) fn hold(&mut self, held: bool) {
        self.held = held;
    }

    /// Has the other CPUs stand still while the machine runs; `None`: none has to. The guest can tell, so a machine that keeps its
    /// past lets them all run.
    pub fn run_only(&mut self, cpu: Option<usize>) {
        if self.history.is_none() {
            self.soft.run_only(cpu);
        }
    }

    /// Puts a CPU into another state, as a debugger's user wishes.
    ///
    /// # Errors
    /// There is no such CPU.
    pub fn set_cpu_state(&mut self, cpu: usize, state: &CpuState) -> Result<(), NoCpu> {
        if cpu >= self.soft.count() {
            return Err(NoCpu(cpu));
        }
        let mut state = state.clone();
        let linear = |state: &CpuState| state.segments[engine::CS].base.wrapping_add(state.rip);
        if self.cpu_state(cpu).is_some_and(|old| linear(&old) != linear(&state)) {
            // Nobody has been told of what comes next now.
            state.observed = None;
        }
        self.soft.put(cpu, &state);
        self.changed_by_debugger();
        Ok(())
    }

    /// Writes guest-physical memory, as a debugger's user wishes.
    ///
    /// # Errors
    /// Not all of it is RAM: nothing has been written.
    pub fn write_physical(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), NotRam> {
        let memory = self.machine.memory();
        memory.read(gpa, &mut vec![0; bytes.len()])?;
        memory.write(gpa, bytes)?;
        self.soft.written(gpa, bytes.len() as u64);
        self.changed_by_debugger();
        Ok(())
    }

    /// Writes memory at a linear address, through the page tables that a CPU has in use, whatever rights they give; sets no
    /// accessed or dirty bits.
    ///
    /// # Errors
    /// The first address at which no RAM is mapped: what is before it has been written. There is no such CPU.
    pub fn write_linear(&mut self, cpu: usize, gva: u64, bytes: &[u8]) -> Result<(), Unmapped> {
        let state = self.cpu_state(cpu).ok_or(Unmapped(gva))?;
        for (byte, at) in bytes.iter().zip(0..) {
            let linear = gva.wrapping_add(at);
            let gpa = walk::translate(self.machine.memory(), &state, linear).ok_or(Unmapped(linear))?;
            self.write_physical(gpa, &[*byte]).map_err(|_| Unmapped(linear))?;
        }
        Ok(())
    }

    /// The machine around the CPU.
    pub fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// A hash of memory and registers: equal for equal runs, on every host.
    pub fn digest(&self) -> u64 {
        let mut digest = Digest::default();
        digest.add(&self.machine.memory().digest().to_le_bytes());
        for cpu in self.soft.cpus() {
            // The text of plain data is plain data.
            digest.add(format!("{:?}", cpu.state()).as_bytes());
        }
        digest.value()
    }

    /// Figures about the run so far. Hashes all memory.
    pub fn stats(&mut self) -> Stats {
        Stats {
            steps: self.soft.steps(),
            instructions: self.soft.cpus().map(Cpu::retired).sum(),
            cpus: self.soft.cpus().map(Cpu::steps).collect(),
            exits: self.soft.exits(),
            native: self.hosted.as_ref().map(Hosted::stats),
            accesses: self.machine.accesses(),
            wall: self.wall,
            virtual_time: Duration::from_nanos(self.now()),
            digest: self.digest(),
        }
    }

    /// Virtual time in nanoseconds.
    pub(crate) fn now(&mut self) -> u64 {
        let steps = self.soft.steps();
        self.machine.clock().ns(steps)
    }

    /// Runs for so many steps at most. `None`: it has made them all.
    ///
    /// # Errors
    /// As [`Vm::run`].
    pub fn run_for(&mut self, console: &mut Console, steps: u64) -> Result<Option<End>, Error> {
        let whole = self.max_instructions;
        let until = self.soft.steps().saturating_add(steps);
        if whole.is_some_and(|whole| whole <= until) {
            return self.run(console).map(Some);
        }
        self.max_instructions = Some(until);
        let end = self.run(console);
        self.max_instructions = whole;
        match end? {
            End::Instructions(_) => Ok(None),
            end => Ok(Some(end)),
        }
    }

    /// Executes the next instruction (of a REP, one iteration), on [`Vm::current_cpu`] unless that changes first.
    ///
    /// # Errors
    /// As [`Vm::run`].
    pub fn step(&mut self, console: &mut Console) -> Result<Option<End>, Error> {
        self.run_for(console, 1)
    }

    /// Runs until something ends it. What ended by a limit can be run on.
    ///
    /// # Errors
    /// The console or the system fails.
    pub fn run(&mut self, console: &mut Console) -> Result<End, Error> {
        let started = Instant::now();
        let before = self.wall;
        self.settle_change()?;
        let here = self.moment();
        let finished = self.history.as_ref().and_then(|history| history.finished);
        let finished = finished.filter(|(at, _)| *at == here && !self.held);
        if let Some((_, effect)) = finished
            && let Some(end) = self.take_effect(effect)
        {
            return Ok(end);
        }
        let end = match self.run_until_end(console, started) {
            Ok(end) => Ok(end),
            Err(stop) => self.stopped(stop),
        };
        self.wall = before + started.elapsed();
        if let Some(clock) = &mut self.host_clock {
            clock.stop();
        }
        // The last lines. If they cannot be written, why it ended is still the better news.
        match (console.flush(), end) {
            (Err(stop), Ok(End::PowerOff | End::Reset | End::DebugExit(_))) => self.stopped(stop),
            (_, end) => end,
        }
    }

    fn stopped(&self, stop: Stop) -> Result<End, Error> {
        match stop {
            Stop::Quit => Ok(End::Quit),
            Stop::Signal(signal) => Ok(End::Signal(signal)),
            Stop::OutputClosed => Ok(End::OutputClosed),
            Stop::Output(error) | Stop::Events(error) => Err(error),
        }
    }

    fn run_until_end(&mut self, console: &mut Console, started: Instant) -> Result<End, Stop> {
        if let Some(clock) = &mut self.host_clock {
            clock.go_on();
        }
        // What counts steps is for the engine.
        if self.max_instructions.is_some() && self.machine.platform().controllers_are_elsewhere() {
            return Ok(hosted::stays(self, "only the software engine counts instructions"));
        }
        if self.max_instructions.is_none()
            && let Some(hosted) = self.hosted.take()
        {
            return self.run_hosted(hosted, console, started);
        }
        let mut pace = Pace::new(self.now(), started, self.timeout);
        loop {
            if let Some(end) = self.software(console, &mut pace, &mut |_| false)? {
                return Ok(end);
            }
        }
    }

    /// Runs in the software engine until something ends it, or `leave` says so at the end of a slice.
    fn software(
        &mut self,
        console: &mut Console,
        pace: &mut Pace,
        leave: &mut dyn FnMut(&mut Vm) -> bool,
    ) -> Result<Option<End>, Stop> {
        let slice = if self.clock == ClockMode::Paced {
            PACED_SLICE
        } else {
            SLICE
        };
        let mut look_at = 0;
        loop {
            // Further off than a slice: the run has been put back.
            if self.soft.steps() >= look_at || look_at - self.soft.steps() > slice {
                if look_at > 0 && leave(self) {
                    return Ok(None);
                }
                self.remember();
                look_at = self.soft.steps() + slice;
                if let Some(recorder) = &self.recorder {
                    if recorder.stops() {
                        return Ok(Some(End::Trace));
                    }
                    recorder.look(self.machine.memory(), self.soft.steps());
                }
                if let Some(end) = self.look_outside(console, pace)? {
                    return Ok(Some(end));
                }
            }
            if let Some(end) = self.feed(console)? {
                return Ok(Some(end));
            }
            let now = self.soft.steps();
            for effect in self.machine.advance(now) {
                if let Some(end) = self.take_effect(effect) {
                    return Ok(Some(end));
                }
            }
            if self.machine.platform().take_sent() || self.soft.turn_is_over(&mut self.machine) {
                self.soft.next_turn(&mut self.machine);
            }
            let before = self.soft.exits().delivered();
            let retry = self.soft.deliver(&mut self.machine);
            if self.soft.exits().delivered() != before {
                self.unsettle(now);
            }

            let Some(left) = self
                .max_instructions
                .map_or(Some(u64::MAX), |max| max.checked_sub(now + 1))
            else {
                return Ok(Some(End::Instructions(self.max_instructions.unwrap_or(0))));
            };
            let (until_due, ends) = self.until_due(now);
            if let Some(end) = ends {
                return Ok(Some(end));
            }
            let until_event = match self.machine.platform().next_event() {
                Some(ns) => self.machine.clock().steps_until(ns, now).max(1),
                None => u64::MAX,
            };
            let budget = (look_at - now)
                .min(left.saturating_add(1))
                .min(until_event)
                .min(until_due)
                .min(retry);
            for (gpa, len) in self.machine.take_written() {
                self.soft.written(gpa, len);
            }
            let cpu = self.soft.current();
            let stepping = self.debugger.as_ref().is_some_and(|d| d.stepping() == Some(cpu));
            let exit = self
                .soft
                .run(&mut self.machine, if stepping { budget.min(1) } else { budget });
            if self.soft.steps() == now && exit != Exit::Halt {
                self.unsettle(now);
            }
            let stepped = stepping && self.soft.steps() > now;
            if let Some(stop) = self.stop(cpu, &exit, stepped) {
                if matches!(exit, Exit::Pause | Exit::Stop { pause: true }) {
                    self.soft.next_turn(&mut self.machine);
                }
                return Ok(Some(End::Stopped(stop)));
            }
            match exit {
                Exit::Budget | Exit::Window | Exit::Stop { pause: false } => {}
                Exit::Bus => {
                    if self.soft.steps() == now {
                        // Exceptions without end: no step is made, so no time passes, and somebody has to look all the same.
                        look_at = look_at.saturating_sub(WARP);
                        self.soft.next_turn(&mut self.machine);
                    }
                }
                Exit::Pause | Exit::Stop { pause: true } => {
                    self.soft.next_turn(&mut self.machine);
                }
                Exit::Halt => {
                    // Looks outside do not depend on steps alone here, but only what they find can matter to the guest.
                    look_at = look_at.saturating_sub(WARP);
                    let here = (self.moment(), self.machine.restorations().load(Ordering::Relaxed));
                    if let Some(end) = self.obey(console, pace)? {
                        return Ok(Some(end));
                    }
                    if here != (self.moment(), self.machine.restorations().load(Ordering::Relaxed)) {
                        // It has been put to another step, where this CPU may not be halted.
                        continue;
                    }
                    if !self.soft.next_turn(&mut self.machine)
                        && let Some(end) = self.idle(console, pace)?
                    {
                        return Ok(Some(end));
                    }
                }
                Exit::Shutdown => return Ok(Some(End::TripleFault(self.report()))),
                Exit::Defect(what) => return Ok(Some(End::Defect(format!("{what}\n{}", self.report())))),
            }
        }
    }

    /// Whether a CPU's leaving the engine is a debugger's stop.
    fn stop(&mut self, cpu: usize, exit: &Exit, stepped: bool) -> Option<debug::Stop> {
        let rip = self.soft.cpu(cpu).map_or(0, Cpu::rip);
        let debugger = self.debugger.as_mut()?;
        let stepped = stepped && !debugger.steps_on(rip);
        match exit {
            Exit::Stop { .. } => debugger.take_stop().map(|stop| stop.why),
            Exit::Shutdown if !debugger.is_suspended() && debugger.shutdown() => Some(Why::TripleFault),
            Exit::Shutdown | Exit::Defect(_) => None,
            _ => stepped.then_some(Why::Step),
        }
        .map(|why| debug::Stop { cpu, why })
    }

    /// What a device, or another CPU, asks of the machine.
    fn take_effect(&mut self, effect: Effect) -> Option<End> {
        let at = self.moment();
        if let Some(history) = &mut self.history
            && matches!(
                effect,
                Effect::PowerOff | Effect::Reset | Effect::DebugExit(_) | Effect::Init { cpu: 0 }
            )
        {
            history.finished = Some((at, effect));
        }
        match effect {
            Effect::PowerOff => return Some(End::PowerOff),
            Effect::Reset => return Some(End::Reset),
            Effect::DebugExit(value) => return Some(End::DebugExit(value)),
            // The boot CPU would go on in firmware, which is a reset.
            Effect::Init { cpu: 0 } => return Some(End::Reset),
            Effect::Init { cpu } => self.soft.init(cpu, &mut self.machine),
            Effect::StartUp { cpu, vector } => self.soft.start(cpu, vector, &mut self.machine),
            Effect::Smi { .. } => debug!("nobody there for {effect:?}"),
        }
        None
    }

    /// A slice boundary: input, output, signals, the time limit, and wall time.
    fn look_outside(&mut self, console: &mut Console, pace: &mut Pace) -> Result<Option<End>, Stop> {
        if let Some(end) = self.obey(console, pace)? {
            return Ok(Some(end));
        }
        if self.clock == ClockMode::Paced {
            let wall = self.wall(pace);
            self.catch_up(wall);
            // The clock is looked at far more often than the outside has to be.
            if !pace.outside_is_due() {
                return Ok(None);
            }
        }
        console.flush()?;
        console.poll()?;
        Ok(pace.time_is_up().map(End::Timeout))
    }

    /// Carries out what has come over the control socket. While the machine is paused it stays here.
    fn obey(&mut self, console: &mut Console, pace: &mut Pace) -> Result<Option<End>, Stop> {
        if self.seeking {
            return Ok(None);
        }
        loop {
            if self.debugger.as_mut().is_some_and(Debugger::take_asked) {
                let cpu = self.soft.current();
                return Ok(Some(End::Stopped(debug::Stop { cpu, why: Why::Asked })));
            }
            for _ in 0..COMMANDS {
                if let Some(end) = self.go(console)? {
                    return Ok(Some(end));
                }
                let next = || self.control.as_ref().and_then(Control::next);
                let Some(request) = self.requested.take().or_else(next) else {
                    break;
                };
                debug!("{:?} at step {}", request.command, self.soft.steps());
                let mut quit = false;
                let reply = match &request.command {
                    Command::Monitor { line, cpu } => match monitor::answer(self, *cpu, line) {
                        Ok(text) => Reply::Text(text),
                        Err(why) => Reply::Refused(why),
                    },
                    command => {
                        match command {
                            Command::Pause => self.paused = true,
                            Command::Resume => self.paused = false,
                            _ => {}
                        }
                        quit = *command == Command::Quit;
                        Reply::Status(self.status())
                    }
                };
                request.answer(reply);
                if quit {
                    return Ok(Some(End::Quit));
                }
            }
            if !self.paused && !self.held {
                return Ok(None);
            }
            let since = Instant::now();
            console.flush()?;
            self.host_clock.as_mut().map(HostClock::stop);
            console.wait(pace.time_left(None))?;
            self.host_clock.as_mut().map(HostClock::go_on);
            pace.paused += since.elapsed();
            if let Some(limit) = pace.time_is_up() {
                return Ok(Some(End::Timeout(limit)));
            }
        }
    }

    /// What virtual time would be if it had followed wall time, or the clock that the guest has in KVM.
    fn wall(&mut self, pace: &Pace) -> u64 {
        match self.host_clock {
            Some(clock) => self.machine.clock().ns_of(clock.ticks()),
            None => pace.now(),
        }
    }

    /// Lets virtual time jump towards wall time, if it lags, but never over an event: guests count the ticks of their timers.
    fn catch_up(&mut self, wall: u64) {
        let (now, steps) = (self.now(), self.soft.steps());
        let count = self.soft.count();
        let platform = self.machine.platform();
        let furthest = if (0..count).any(|cpu| platform.interrupt_pending(cpu)) {
            PENDING_JUMP_NS
        } else {
            JUMP_NS
        };
        let event = platform.next_event().unwrap_or(u64::MAX);
        let target = wall.min(now.saturating_add(furthest)).min(event);
        self.machine.clock().skip_to(target, steps);
    }

    /// Hands input to the UART, as much as it takes.
    fn feed(&mut self, console: &mut Console) -> Result<Option<End>, Stop> {
        if self.history.is_some() {
            return self.enter(console);
        }
        if !console.input().is_empty() {
            let taken = self.hand_over(console.input());
            console.consume(taken)?;
        }
        Ok(None)
    }

    /// All CPUs are halted, and nothing is pending that one of them lets in: lets time pass until the next event.
    fn idle(&mut self, console: &mut Console, pace: &mut Pace) -> Result<Option<End>, Stop> {
        let steps = self.soft.steps();
        // An enabled interrupt wakes a CPU; else only an NMI can, and nothing typed is one.
        let enabled = self.soft.cpus().any(Cpu::interrupt_wakes);
        let next = self.machine.platform().next_event();
        let waiting = !console.input().is_empty() && self.machine.platform().serial_capacity() > 0;
        let live = self.history.as_ref().is_none_or(|history| history.live);
        let input = enabled && live && (waiting || console.input_open());
        match next {
            None if !input => Ok(Some(End::Halted(self.halted(enabled)))),
            None => {
                console.flush()?;
                console.wait(pace.time_left(None))?;
                if self.clock == ClockMode::Paced {
                    let wall = self.wall(pace);
                    self.machine.clock().skip_to(wall, steps);
                }
                Ok(pace.time_is_up().map(End::Timeout))
            }
            Some(ns) => {
                if !enabled {
                    let since = pace.dead_since(steps, self.machine.clock().ns(steps));
                    if ns.saturating_sub(since) > DEAD_HALT_NS {
                        return Ok(Some(End::Halted(self.halted(enabled))));
                    }
                }
                let wall = self.wall(pace);
                if self.clock == ClockMode::Virtual || ns <= wall {
                    self.machine.clock().skip_to(ns, steps);
                    return Ok(None);
                }
                console.flush()?;
                console.wait(pace.time_left(Some(Duration::from_nanos(ns - wall))))?;
                let wall = self.wall(pace);
                self.machine.clock().skip_to(wall.min(ns), steps);
                Ok(pace.time_is_up().map(End::Timeout))
            }
        }
    }

    fn halted(&self, enabled: bool) -> String {
        let mut cpus = self.soft.cpus();
        let count = cpus.len();
        let index = cpus.position(Cpu::interrupt_wakes).unwrap_or(self.soft.current());
        let rip = self.soft.cpu(index).map_or(0, Cpu::rip);
        let name = match count {
            1 => String::new(),
            count => format!("CPU {index}, the last of {count}: "),
        };
        match enabled {
            true => format!("{name}HLT before {rip:#x}, with no timer armed and no more input"),
            false => format!("{name}HLT before {rip:#x} with interrupts disabled"),
        }
    }

    /// Registers and the last code bytes of the CPU whose turn it is.
    pub(crate) fn report(&self) -> String {
        let current = self.soft.current();
        let state = self.cpu_state(current).unwrap_or_default();
        let text = report(self.machine.memory(), &state);
        match self.soft.count() {
            1 => text,
            count => format!("CPU {current} of {count}\n{text}"),
        }
    }
}

/// Begins a recording of all CPUs.
fn record(
    options: &trace::Options,
    header: trace::Header,
    model: &CpuModel,
    machine: &mut Machine,
) -> Result<Recorder, Error> {
    let (recorder, observers) = Recorder::new(options, header, model).map_err(|source| Error::File {
        option: "--trace",
        path: options.folder.clone(),
        source,
    })?;
    for (cpu, observer) in observers.into_iter().enumerate() {
        machine.observe(cpu, Some(Box::new(observer)));
    }
    Ok(recorder)
}

/// What of a machine does not go back to a state that was kept, unless it keeps its past.
fn lasting(config: &MachineConfig) -> Option<String> {
    let written = |disk: &&crate::config::DiskConfig| disk.mode == DiskMode::ReadWrite;
    if let Some(disk) = config.disks.iter().find(written) {
        let path = disk.path.display();
        return Some(format!(
            "what the guest writes to {path} would not go back: give the disk as {path},overlay, or use `--reverse`"
        ));
    }
    let what = "what the guest has sent to `--collect` would not go back: `--reverse` copes with that";
    config.collect.as_ref().map(|_| what.into())
}

/// Whether a machine keeps where it came from.
///
/// # Errors
/// It could not.
fn keeps_history(config: &MachineConfig) -> Result<bool, Error> {
    let options = [
        (config.reverse.is_some(), "--reverse"),
        (config.record.is_some(), "--record"),
        (config.replay.is_some(), "replay"),
    ];
    let Some((_, option)) = options.into_iter().find(|(wanted, _)| *wanted) else {
        return Ok(false);
    };
    let refused = |why: &str| Err(Error::Usage(format!("{option}: {why}")));
    if config.clock == ClockMode::Paced {
        return refused("a run whose clock follows wall time does not repeat: leave out --clock paced");
    }
    if config.reverse.is_some() && config.trace.is_some() {
        return refused("a trace only grows: leave out --trace, or record with --record and trace the replay");
    }
    if config.record.is_some() && config.replay.is_some() {
        return refused("a session that is replayed has been recorded");
    }
    Ok(true)
}

/// `--engine`: KVM, opened, or the software engine.
fn choose_engine(config: &MachineConfig) -> Result<Option<kvm::Host>, Error> {
    let refused = |reason: String| Error::Engine {
        option: "--engine kvm".into(),
        reason,
    };
    let only_soft = hosted::needs_soft(config);
    match (config.engine, only_soft) {
        (EngineChoice::Soft, _) => Ok(None),
        (EngineChoice::Kvm, Some((option, does))) => {
            Err(refused(format!("{option} {does}: leave it out, or use --engine soft")))
        }
        (EngineChoice::Kvm, None) => kvm::Host::open().map(Some).map_err(refused),
        (EngineChoice::Auto, Some((option, does))) => {
            info!("--engine auto: the software engine, since {option} {does}");
            Ok(None)
        }
        (EngineChoice::Auto, None) => {
            let chosen = hosted::wants_ours(config)
                .map_or(Ok(()), |why| Err(why.to_string()))
                .and_then(|()| kvm::Host::open())
                .and_then(|host| host.virtualizes().map(|why| (host, why)));
            match chosen {
                Ok((host, why)) => {
                    info!("--engine auto: KVM: {why}");
                    Ok(Some(host))
                }
                Err(why) => {
                    info!("--engine auto: the software engine: {why}");
                    Ok(None)
                }
            }
        }
    }
}

/// The model has instructions that are executed by the host's own, which it has not got.
fn host_lacks(model: &CpuModel, lacks: &HostLacks) -> Error {
    Error::Engine {
        option: format!("--cpu-model {}", model.name),
        reason: format!("{lacks}, which the model needs; choose another model or host"),
    }
}

/// Builds a machine and runs it to its end. Prints what `--stats` asks for on stderr once the terminal is as it was.
pub fn run(config: &MachineConfig) -> Result<Ended, Error> {
    let mut vm = Vm::new(config)?;
    let mut keep = vec![config.kernel.as_path()];
    keep.extend(config.initrd.as_deref());
    keep.extend(config.disks.iter().map(|disk| disk.path.as_path()));
    let mut console = Console::open(&config.serial, &keep, vm.line())?;
    if let Some(path) = &config.control {
        let control = Control::open(path)?;
        let wake = control.wake().map_err(|source| Error::System {
            what: "listening for commands",
            source,
        })?;
        console.listen(wake)?;
        vm.set_control(control);
    }
    let goes_on = config
        .trace
        .as_ref()
        .is_some_and(|trace| trace.on_error == trace::OnError::Continue);
    let door = match &config.gdb {
        Some(address) => {
            let door = gdb::Door::open(address, vm.debugger().asker())?;
            if config.paused {
                let _ = writeln!(
                    io::stderr(),
                    "minivmm: paused until gdb connects: target remote {}",
                    door.address()
                );
            }
            Some(door)
        }
        None => None,
    };
    let mut end = match &door {
        Some(door) => gdb::run(&mut vm, &mut console, door),
        // Without a debugger nobody looks.
        None => loop {
            match vm.run(&mut console) {
                Ok(End::Stopped(_)) => {}
                end => break end,
            }
        },
    };
    drop(door);
    let recorded = vm.end_recording(&end);
    drop(vm.control.take());
    drop(console);
    let reason = match &end {
        Ok(end) => end.reason(),
        Err(error) => error.to_string(),
    };
    let traced = vm.end_trace(&reason);
    match (&end, traced) {
        // The guest was to go on, and how it ended is what counts.
        (Ok(_), Err(error)) if goes_on => {
            let _ = writeln!(io::stderr(), "minivmm: {error}; the trace is not complete");
        }
        (Ok(_), Err(error)) => end = Err(error),
        _ => {}
    }
    if let (Ok(_), Err(error)) = (&end, recorded) {
        end = Err(error);
    }
    if config.stats {
        // A closed stderr is no reason to fail.
        let _ = writeln!(io::stderr(), "{}", vm.stats());
    }
    let end = end?;
    let place = match end {
        End::Instructions(_) | End::Timeout(_) | End::Halted(_) => Some(place::describe(&mut vm, &config.kernel)),
        _ => None,
    };
    Ok(Ended { end, place })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SerialTarget;
    use x86::model::WESTMERE;

    // covers: 2/bad-input-host
    #[test]
    fn a_model_that_the_host_cannot_execute_is_refused_in_one_line() {
        let error = host_lacks(&WESTMERE, &HostLacks(vec!["SSE4.2", "AES"]));
        assert_eq!(error.status().code(), 2);
        let says =
            "--cpu-model westmere: this host lacks SSE4.2, AES, which the model needs; choose another model or host";
        assert_eq!(error.to_string(), says);
    }

    /// A flat multiboot image of this code, loaded at 1 MiB.
    fn image(code: &[u8]) -> Vec<u8> {
        let flags = 1u32 << 16;
        let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
        let words = [0x1bad_b002, flags, checksum, 0x10_0000, 0x10_0000, 0, 0, 0x10_0020];
        words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .chain(code.iter().copied())
            .collect()
    }

    fn vm(code: &[u8], config: impl FnOnce(&mut MachineConfig)) -> (Vm, Console) {
        let name = format!("minivmm-run-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, image(code)).unwrap();
        let mut machine = MachineConfig {
            memory: 4 << 20,
            ..MachineConfig::new(&path)
        };
        config(&mut machine);
        let vm = Vm::new(&machine).unwrap();
        std::fs::remove_file(&path).unwrap();
        let console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
        (vm, console)
    }

    // covers: 2/determinism
    #[test]
    fn a_run_repeats_and_may_be_stopped_in_between() {
        // mov eax, 1; again: lea ecx, [ecx + eax*2]; mov [ecx + 200000H], eax; jmp again
        let code = [
            0xb8, 1, 0, 0, 0, 0x8d, 0x0c, 0x41, 0x89, 0x81, 0, 0, 0x20, 0, 0xeb, 0xf5,
        ];
        let whole = {
            let (mut vm, mut console) = vm(&code, |c| c.max_instructions = Some(300_001));
            assert!(matches!(vm.run(&mut console), Ok(End::Instructions(300_001))));
            assert_eq!(vm.stats().steps, 300_001);
            (vm.digest(), vm.cpu_state(0))
        };
        let (mut vm, mut console) = vm(&code, |c| c.max_instructions = Some(1));
        for limit in [1, 2, 777, 100_000, 300_001] {
            vm.max_instructions = Some(limit);
            assert!(matches!(vm.run(&mut console), Ok(End::Instructions(_))));
            assert_eq!(vm.stats().steps, limit);
        }
        assert_eq!((vm.digest(), vm.cpu_state(0)), whole);
    }

    // covers: 3/library-run-step-inspect
    #[test]
    fn a_machine_is_run_step_by_step_and_looked_at() {
        // mov eax, 1; again: inc eax; mov [200000H], eax; cmp eax, 5; jne again; mov al, 0; out F4H, al
        let code = [
            0xb8, 1, 0, 0, 0, 0x40, 0xa3, 0, 0, 0x20, 0, 0x83, 0xf8, 5, 0x75, 0xf5, 0xb0, 0, 0xe6, 0xf4,
        ];
        let (mut vm, mut console) = vm(&code, |_| {});
        let rip = |vm: &Vm| vm.cpu_state(0).unwrap().rip;
        let start = rip(&vm);
        for (steps, offset, eax) in [(1, 5, 1), (2, 6, 2), (3, 11, 2), (4, 14, 2), (5, 5, 2), (6, 6, 3)] {
            assert!(vm.step(&mut console).unwrap().is_none());
            assert_eq!((vm.steps(), rip(&vm) - start), (steps, offset));
            assert_eq!(vm.cpu_state(0).unwrap().gpr[0], eax);
        }
        assert!(vm.run_for(&mut console, 3).unwrap().is_none());
        assert_eq!((vm.steps(), vm.current_cpu(), vm.cpu_count()), (9, 0, 1));
        let mut bytes = [0; 4];
        vm.read_physical(0x20_0000, &mut bytes).unwrap();
        assert_eq!(bytes, [3, 0, 0, 0]);
        vm.read_linear(0, start, &mut bytes).unwrap();
        assert_eq!(bytes, code[..4]);
        assert_eq!(vm.read_linear(0, (4 << 20) - 2, &mut bytes), Err(Unmapped(4 << 20)));
        assert_eq!(
            vm.read_linear(1, start, &mut bytes),
            Err(Unmapped(start)),
            "no such CPU"
        );
        assert!(vm.read_physical(u64::MAX, &mut bytes).is_err() && vm.cpu_state(1).is_none());
        assert!(vm.virtual_ns() > 0);
        // What ends the run comes out of either, and a limit of the configuration's is kept.
        assert!(matches!(vm.run_for(&mut console, 1000), Ok(Some(End::DebugExit(0)))));
        let (mut vm, mut console) = self::vm(&code, |c| c.max_instructions = Some(7));
        assert!(vm.run_for(&mut console, 6).unwrap().is_none());
        assert!(matches!(vm.run_for(&mut console, 6), Ok(Some(End::Instructions(7)))));
    }

    // covers: 2/cli-clock
    #[test]
    fn paced_time_catches_up_without_losing_ticks() {
        const SECOND: u64 = 1_000_000_000;
        let (mut vm, _) = vm(&[0xeb, 0xfe], |c| c.clock = ClockMode::Paced);
        let platform = vm.machine.platform();
        // The 8259 with vectors from 20H and IRQ 0 alone; the PIT every 1193 of its ticks, a millisecond.
        for (port, value) in [(0x20, 0x11), (0x21, 0x20), (0x21, 4), (0x21, 1), (0x21, 0xfe)] {
            platform.port_write(port, 1, value, 0);
        }
        for (port, value) in [(0x43, 0x34), (0x40, 1193 & 0xff), (0x40, 1193 >> 8)] {
            platform.port_write(port, 1, value, 0);
        }
        let mut ticks = 0;
        for _ in 0..20 {
            let event = vm.machine.platform().next_event().unwrap();
            vm.catch_up(SECOND);
            vm.catch_up(SECOND);
            assert!(
                vm.now() >= event && vm.now() < event + 2,
                "to the event and no further: {} {event}",
                vm.now()
            );
            vm.machine.advance(0);
            if vm.machine.platform().interrupt_pending(0) {
                let before = vm.now();
                vm.catch_up(SECOND);
                assert!(
                    vm.now() - before <= PENDING_JUMP_NS + 1,
                    "time all but waits for the guest"
                );
                assert_eq!(vm.machine.platform().acknowledge(0), 0x20);
                let now = vm.now();
                vm.machine.platform().port_write(0x20, 1, 0x20, now);
                ticks += 1;
            }
        }
        assert!(ticks >= 9, "{ticks}");
        let now = vm.now();
        vm.catch_up(now - 1);
        assert_eq!(vm.now(), now, "never back");
    }
}
