//! The run loop: time, turns, interrupts, idleness, limits.
//!
//! One round of the loop is: take what comes from outside (at slice boundaries), let the devices do what is due, deliver an
//! interrupt if there is one, and let the CPU whose turn it is run until the next thing that is due. On the virtual clock
//! everything in a round is a function of the steps so far and of the input, so a run repeats; wall time decides only how often
//! the outside is looked at.
//!
//! # Turns
//! The CPUs run one after the other on one thread, and one clock counts the steps of all of them. A turn ends when the CPU
//! halts, at PAUSE (somebody else has to do what it waits for), when it has sent an interrupt to another, and after
//! [`TURN`] steps; the next one in a circle that is not halted goes on. Time is skipped only when all are halted.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::unix::ffi::OsStrExt,
    path::Path,
    time::{Duration, Instant},
};

use devices::platform::Effect;
use engine::{Activity, CS, Cpu, CpuState, Engine, Exit, HostLacks, Options};
use libc::c_int;
use log::{debug, info, trace};
use x86::model::CpuModel;

use crate::{
    collect::{self, Collector},
    config::{ClockMode, EngineChoice, MachineConfig},
    console::{Console, Line, Stop, signals},
    control::{self, Command, Control, CpuStatus},
    disk::Disk,
    error::{Error, Status},
    inject,
    loader::{self, Boot, Input},
    machine::{
        Machine, acpi, boot,
        memory::{Digest, Memory, NotRam, SoftEngine},
        walk,
    },
    trace::{self, Recorder},
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
/// Steps between two looks while an NMI waits until the previous one has returned.
const NMI_RETRY: u64 = 64;
/// Commands that are carried out before the guest goes on.
const COMMANDS: usize = 16;
/// The longest turn of a CPU among several, in steps: short beside the microseconds that an interrupt takes between real ones,
/// long beside what a change costs.
const TURN: u64 = 1 << 13;

/// Why a run ended.
#[derive(Debug)]
pub enum End {
    /// The guest switched itself off.
    PowerOff,
    /// The guest reset itself.
    Reset,
    /// The guest wrote this to the debug-exit port.
    DebugExit(u32),
    /// The user typed Ctrl-A x.
    Quit,
    /// A signal came.
    Signal(c_int),
    /// Nobody reads standard output any more.
    OutputClosed,
    /// Triple fault; a report of several lines.
    TripleFault(String),
    /// The guest halted, and nothing can wake it; where and why.
    Halted(String),
    /// `--max-instructions`
    Instructions(u64),
    /// `--timeout`
    Timeout(Duration),
    /// The trace could not be written any more, and `--trace-on-error` says to stop.
    Trace,
    /// A fault of ours.
    Defect(String),
}

impl End {
    /// The exit status that goes with it.
    pub fn status(&self) -> Status {
        match self {
            End::PowerOff | End::Reset | End::Quit => Status::Done,
            End::DebugExit(value) => Status::DebugExit(*value),
            End::Signal(_) | End::OutputClosed | End::Trace => Status::Usage,
            End::TripleFault(_) | End::Halted(_) => Status::Crash,
            End::Instructions(_) | End::Timeout(_) => Status::Limit,
            End::Defect(_) => Status::Internal,
        }
    }

    /// What to tell the operator; nothing where the guest or the user meant it.
    pub fn message(&self) -> Option<String> {
        match self {
            // What went wrong with the trace is said when it is closed.
            End::PowerOff | End::Reset | End::Quit | End::DebugExit(_) | End::Trace => None,
            End::Signal(signal) => Some(format!("ended by {}", signals::name(*signal))),
            End::OutputClosed => Some("--serial stdio: nobody reads standard output any more".into()),
            End::TripleFault(report) => Some(format!("guest crashed: triple fault\n{report}")),
            End::Halted(where_why) => Some(format!("guest halted for good: {where_why}")),
            End::Instructions(limit) => Some(format!("--max-instructions {limit}: reached")),
            End::Timeout(limit) => Some(format!("--timeout {}: reached", limit.as_secs_f64())),
            End::Defect(what) => Some(format!("internal error: {what}")),
        }
    }
}

/// Why the CPU stopped running, how often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exits {
    /// The next event was due.
    pub budget: u64,
    /// An access to a device.
    pub bus: u64,
    /// Interrupts became deliverable.
    pub window: u64,
    /// HLT.
    pub halt: u64,
    /// PAUSE, with other CPUs there.
    pub pause: u64,
    /// Interrupts delivered.
    pub interrupts: u64,
    /// NMIs delivered.
    pub nmis: u64,
}

/// What `--stats` prints.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Instructions and REP iterations.
    pub steps: u64,
    /// Instructions, each REP once.
    pub instructions: u64,
    /// Steps of each CPU.
    pub cpus: Vec<u64>,
    /// Why the CPU stopped.
    pub exits: Exits,
    /// What the guest reached for.
    pub accesses: crate::machine::Accesses,
    /// Wall time.
    pub wall: Duration,
    /// Virtual time.
    pub virtual_time: Duration,
    /// A hash of memory and registers.
    pub digest: u64,
}

impl std::fmt::Display for Stats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let wall = self.wall.as_secs_f64();
        let mips = if wall > 0.0 {
            self.steps as f64 / wall / 1e6
        } else {
            0.0
        };
        let (exits, accesses) = (&self.exits, &self.accesses);
        let all = exits.budget + exits.bus + exits.window + exits.halt + exits.pause;
        writeln!(
            f,
            "steps:        {} ({} instructions), {mips:.1} MIPS",
            self.steps, self.instructions
        )?;
        if self.cpus.len() > 1 {
            let each: Vec<String> = self.cpus.iter().map(u64::to_string).collect();
            writeln!(f, "by CPU:       {}", each.join(" "))?;
        }
        write!(
            f,
            "exits:        {all}: {} timer or slice, {} device, {} window, {} halt",
            exits.budget, exits.bus, exits.window, exits.halt
        )?;
        if self.cpus.len() > 1 {
            write!(f, ", {} pause", exits.pause)?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "accesses:     {} port, {} memory-mapped, {} MSR",
            accesses.ports, accesses.mmio, accesses.msrs
        )?;
        writeln!(f, "delivered:    {} interrupts, {} NMIs", exits.interrupts, exits.nmis)?;
        writeln!(f, "wall time:    {wall:.3} s")?;
        writeln!(f, "virtual time: {:.9} s", self.virtual_time.as_secs_f64())?;
        write!(f, "state hash:   {:016x}", self.digest)
    }
}

/// No RAM is mapped at this linear address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory is mapped at linear address {0:#x}")]
pub struct Unmapped(pub u64);

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

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    cpu: usize,
    /// The step at which it ends at the latest.
    end: u64,
}

/// A machine with its CPUs, ready to run.
#[derive(Debug)]
pub struct Vm {
    engine: SoftEngine,
    cpus: Vec<Processor>,
    turn: Turn,
    /// Steps so far, over all CPUs in the order they ran.
    steps: u64,
    machine: Machine,
    line: Line,
    clock: ClockMode,
    max_instructions: Option<u64>,
    timeout: Option<Duration>,
    exits: Exits,
    wall: Duration,
    control: Option<Control>,
    paused: bool,
    recorder: Option<Recorder>,
}

/// [`Cpu`] with a `Debug` that is short.
struct Processor(Box<Cpu>);

impl std::fmt::Debug for Processor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cpu at {:#x}", self.0.rip())
    }
}

impl Vm {
    /// Builds the machine: memory, tables, kernel, devices, CPU. Touches no file but for reading, unless it is a disk or the
    /// folder for what is collected.
    pub fn new(config: &MachineConfig) -> Result<Self, Error> {
        choose_engine(config.engine)?;
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

        let entry = load(&memory, config)?;
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
        let mut machine = Machine::new(
            config.model,
            config.cpus,
            memory,
            config.rtc_base,
            config.seed,
            Box::new(line.clone()),
        );
        machine.set_tsc_offset(config.tsc_offset);
        for disk in &config.disks {
            let failed = |source| Error::File {
                option: "--disk",
                path: disk.path.clone(),
                source,
            };
            let medium = Disk::open(&disk.path, disk.mode).map_err(failed)?;
            machine
                .add_disk(Box::new(medium))
                .map_err(|e| failed(io::Error::other(e)))?;
        }
        if let Some(folder) = &config.collect {
            machine.add_second_serial(Box::new(Collector::open(folder, collect::LIMITS)?));
        }
        acpi::write(machine.memory(), &machine.hardware()).map_err(|e| Error::Memory {
            size: config.memory,
            reason: e.to_string(),
        })?;
        let recorder = match &config.trace {
            Some(options) => Some(record(options, config, &mut machine)?),
            None => None,
        };
        let several = machine.cpu_count() > 1;
        let cpus = (0..machine.cpu_count()).map(|index| {
            let mut cpu = Cpu::new(config.model);
            if index == 0 {
                cpu.set_state(&boot::state(config.model, &entry));
            } else {
                // Firmware has had its turn with them.
                cpu.init(false);
            }
            Processor(cpu)
        });
        Ok(Vm {
            engine,
            cpus: cpus.collect(),
            turn: Turn {
                cpu: 0,
                end: if several { TURN } else { u64::MAX },
            },
            steps: 0,
            machine,
            line,
            clock: config.clock,
            max_instructions: config.max_instructions,
            timeout: config.timeout,
            exits: Exits::default(),
            wall: Duration::ZERO,
            control: None,
            paused: false,
            recorder,
        })
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
        self.cpus.len()
    }

    /// The CPU that is to execute the next instruction.
    pub fn current_cpu(&self) -> usize {
        self.turn.cpu
    }

    /// Instructions and REP iterations so far, over all CPUs: a position in a run, which a run with the same inputs reaches in
    /// the same state.
    pub fn steps(&self) -> u64 {
        self.steps
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
        recorder.finish();
        let turn = self.turn.cpu;
        for index in 0..self.cpus.len() {
            let cpu = &mut self.cpus[index].0;
            cpu.clock = self.steps;
            self.machine.select(index);
            self.engine.get().ask(cpu, &mut self.machine);
            self.machine.observe(index, None);
        }
        self.machine.select(turn);
        let ticks = self.machine.clock().ticks(self.steps);
        let path = recorder.folder().to_path_buf();
        let memory = self.machine.memory();
        recorder
            .close(reason, memory, self.steps, ticks)
            .map_err(|source| Error::File {
                option: "--trace",
                path,
                source,
            })
    }

    /// What the control socket says of the machine.
    pub fn status(&mut self) -> control::Status {
        control::Status {
            state: if self.paused { "paused" } else { "running" },
            steps: self.steps,
            instructions: self.cpus.iter().map(|cpu| cpu.0.retired()).sum(),
            virtual_ns: self.now(),
            cpus: self.cpus.iter().map(|cpu| cpu.0.as_ref().into()).collect(),
        }
    }

    /// A CPU's state, if there is such a CPU.
    pub fn cpu_state(&self, cpu: usize) -> Option<CpuState> {
        Some(self.cpus.get(cpu)?.0.state())
    }

    /// The machine around the CPU.
    pub fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// A hash of memory and registers: equal for equal runs, on every host.
    pub fn digest(&self) -> u64 {
        let mut digest = Digest::default();
        digest.add(&self.machine.memory().digest().to_le_bytes());
        for cpu in &self.cpus {
            // The text of plain data is plain data.
            digest.add(format!("{:?}", cpu.0.state()).as_bytes());
        }
        digest.value()
    }

    /// Figures about the run so far. Hashes all memory.
    pub fn stats(&mut self) -> Stats {
        Stats {
            steps: self.steps,
            instructions: self.cpus.iter().map(|cpu| cpu.0.retired()).sum(),
            cpus: self.cpus.iter().map(|cpu| cpu.0.steps()).collect(),
            exits: self.exits,
            accesses: self.machine.accesses(),
            wall: self.wall,
            virtual_time: Duration::from_nanos(self.now()),
            digest: self.digest(),
        }
    }

    /// Virtual time in nanoseconds.
    fn now(&mut self) -> u64 {
        let steps = self.steps;
        self.machine.clock().ns(steps)
    }

    /// Runs for so many steps at most. `None`: it has made them all.
    ///
    /// # Errors
    /// As [`Vm::run`].
    pub fn run_for(&mut self, console: &mut Console, steps: u64) -> Result<Option<End>, Error> {
        let whole = self.max_instructions;
        let until = self.steps.saturating_add(steps);
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
        let end = match self.run_until_end(console, started) {
            Ok(end) => Ok(end),
            Err(stop) => self.stopped(stop),
        };
        self.wall = before + started.elapsed();
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
        let mut pace = Pace {
            started,
            base: self.now(),
            paused: Duration::ZERO,
            timeout: self.timeout,
            looked: started,
            dead_since: (u64::MAX, 0),
        };
        let slice = if self.clock == ClockMode::Paced {
            PACED_SLICE
        } else {
            SLICE
        };
        let mut look_at = 0;
        loop {
            if self.steps >= look_at {
                look_at = self.steps + slice;
                if let Some(recorder) = &self.recorder {
                    if recorder.stops() {
                        return Ok(End::Trace);
                    }
                    recorder.look(self.machine.memory(), self.steps);
                }
                if let Some(end) = self.look_outside(console, &mut pace)? {
                    return Ok(end);
                }
            }
            self.feed(console)?;
            let now = self.steps;
            for effect in self.machine.advance(now) {
                if let Some(end) = self.take_effect(effect) {
                    return Ok(end);
                }
            }
            if self.machine.platform().take_sent() || now >= self.turn.end || !self.can_run(self.turn.cpu) {
                self.next_turn();
            }
            let retry = self.deliver();

            let Some(left) = self
                .max_instructions
                .map_or(Some(u64::MAX), |max| max.checked_sub(now + 1))
            else {
                return Ok(End::Instructions(self.max_instructions.unwrap_or(0)));
            };
            let until_event = match self.machine.platform().next_event() {
                Some(ns) => self.machine.clock().steps_until(ns, now).max(1),
                None => u64::MAX,
            };
            let budget = (look_at - now)
                .min(left.saturating_add(1))
                .min(until_event)
                .min(retry)
                .min(self.turn.end.saturating_sub(now));
            for (gpa, len) in self.machine.take_written() {
                self.engine.get().written(gpa, len);
            }
            let alone = !(0..self.cpus.len()).any(|cpu| cpu != self.turn.cpu && self.can_run(cpu));
            let cpu = &mut self.cpus[self.turn.cpu].0;
            // Who waits for a device, and for nobody else, does not have to leave the engine.
            cpu.yield_on_pause = !alone;
            let exit = self.engine.get().run(cpu, &mut self.machine, budget);
            self.steps = cpu.clock;
            match exit {
                Exit::Budget => self.exits.budget += 1,
                Exit::Bus => {
                    self.exits.bus += 1;
                    if self.steps == now {
                        // Exceptions without end: no step is made, so no time passes, and somebody has to look all the same.
                        look_at = look_at.saturating_sub(WARP);
                        self.next_turn();
                    }
                }
                Exit::Window => self.exits.window += 1,
                Exit::Pause => {
                    self.exits.pause += 1;
                    self.next_turn();
                }
                Exit::Halt => {
                    self.exits.halt += 1;
                    // Looks outside do not depend on steps alone here, but only what they find can matter to the guest.
                    look_at = look_at.saturating_sub(WARP);
                    if let Some(end) = self.obey(console, &mut pace)? {
                        return Ok(end);
                    }
                    if !self.next_turn()
                        && let Some(end) = self.idle(console, &mut pace)?
                    {
                        return Ok(end);
                    }
                }
                Exit::Shutdown => return Ok(End::TripleFault(self.report())),
                Exit::Defect(what) => return Ok(End::Defect(format!("{what}\n{}", self.report()))),
            }
        }
    }

    /// Has something done to a CPU whose turn it need not be, if there is such a CPU.
    fn signal(&mut self, cpu: usize, f: impl FnOnce(&mut Engine, &mut Cpu, &mut Machine)) {
        let Some(target) = self.cpus.get_mut(cpu) else { return };
        target.0.clock = self.steps;
        self.machine.select(cpu);
        f(self.engine.get(), &mut target.0, &mut self.machine);
        self.machine.select(self.turn.cpu);
    }

    /// Gives the turn to the next CPU that can run, at last the one that has had it. Says whether there is one.
    fn next_turn(&mut self) -> bool {
        let (count, last) = (self.cpus.len(), self.turn.cpu);
        let next = (1..=count)
            .map(|step| (last + step) % count)
            .find(|&cpu| self.can_run(cpu));
        let Some(cpu) = next else { return false };
        if cpu != last {
            self.engine.get().end_turn(&self.cpus[last].0);
        }
        self.machine.select(cpu);
        self.cpus[cpu].0.clock = self.steps;
        self.turn.cpu = cpu;
        if count > 1 {
            self.turn.end = self.steps + TURN;
        }
        true
    }

    /// What a device, or another CPU, asks of the machine.
    fn take_effect(&mut self, effect: Effect) -> Option<End> {
        match effect {
            Effect::PowerOff => return Some(End::PowerOff),
            Effect::Reset => return Some(End::Reset),
            Effect::DebugExit(value) => return Some(End::DebugExit(value)),
            // The boot CPU would go on in firmware, which is a reset.
            Effect::Init { cpu: 0 } => return Some(End::Reset),
            Effect::Init { cpu } => {
                self.signal(cpu, |engine, cpu, machine| engine.init(cpu, machine, false));
            }
            Effect::StartUp { cpu, vector } => {
                self.signal(cpu, |engine, cpu, machine| engine.start(cpu, machine, vector));
            }
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
            self.catch_up(pace.now());
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
        loop {
            for _ in 0..COMMANDS {
                let Some(request) = self.control.as_ref().and_then(Control::next) else {
                    break;
                };
                debug!("{:?} at step {}", request.command, self.steps);
                let quit = match request.command {
                    Command::Pause => {
                        self.paused = true;
                        false
                    }
                    Command::Resume => {
                        self.paused = false;
                        false
                    }
                    Command::Status => false,
                    Command::Quit => true,
                };
                request.answer(self.status());
                if quit {
                    return Ok(Some(End::Quit));
                }
            }
            if !self.paused {
                return Ok(None);
            }
            let since = Instant::now();
            console.flush()?;
            console.wait(pace.time_left(None))?;
            pace.paused += since.elapsed();
            if let Some(limit) = pace.time_is_up() {
                return Ok(Some(End::Timeout(limit)));
            }
        }
    }

    /// Lets virtual time jump towards wall time, if it lags, but never over an event: guests count the ticks of their timers.
    fn catch_up(&mut self, wall: u64) {
        let (now, steps) = (self.now(), self.steps);
        let count = self.cpus.len();
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
    fn feed(&mut self, console: &mut Console) -> Result<(), Stop> {
        if console.input().is_empty() {
            return Ok(());
        }
        let now = self.now();
        self.machine.platform().advance(now);
        let taken = self.machine.platform().serial_enqueue(console.input());
        if taken > 0 {
            trace!("{taken} bytes of input at step {}", self.steps);
            console.consume(taken)?;
        }
        Ok(())
    }

    /// Delivers an NMI or an interrupt to the CPU whose turn it is, if it lets it in. The answer is how many steps later to try
    /// again, at the latest.
    fn deliver(&mut self) -> u64 {
        let index = self.turn.cpu;
        let (cpu, machine) = (&mut self.cpus[index].0, &mut self.machine);
        let mut retry = u64::MAX;
        if machine.platform().nmi_pending(index) {
            if cpu.nmi_deliverable() {
                machine.platform().take_nmi(index);
                self.engine.get().nmi(cpu, machine);
                self.exits.nmis += 1;
            } else {
                retry = NMI_RETRY;
            }
        }
        let pending = machine.platform().interrupt_pending(index);
        cpu.want_window = false;
        if pending && cpu.interruptible() {
            let vector = machine.platform().acknowledge(index);
            self.engine.get().interrupt(cpu, machine, vector);
            self.exits.interrupts += 1;
            // There may be another one, of a higher class.
            cpu.want_window = machine.platform().interrupt_pending(index);
        } else if pending {
            cpu.want_window = true;
        }
        retry
    }

    /// All CPUs are halted, and nothing is pending that one of them lets in: lets time pass until the next event.
    fn idle(&mut self, console: &mut Console, pace: &mut Pace) -> Result<Option<End>, Stop> {
        let steps = self.steps;
        // An enabled interrupt wakes a CPU; else only an NMI can, and nothing typed is one.
        let enabled = self.cpus.iter().any(|cpu| cpu.0.interrupt_wakes());
        let next = self.machine.platform().next_event();
        let waiting = !console.input().is_empty() && self.machine.platform().serial_capacity() > 0;
        let input = enabled && (waiting || console.input_open());
        match next {
            None if !input => Ok(Some(End::Halted(self.halted(enabled)))),
            None => {
                console.flush()?;
                console.wait(pace.time_left(None))?;
                if self.clock == ClockMode::Paced {
                    self.machine.clock().skip_to(pace.now(), steps);
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
                let wall = pace.now();
                if self.clock == ClockMode::Virtual || ns <= wall {
                    self.machine.clock().skip_to(ns, steps);
                    return Ok(None);
                }
                console.flush()?;
                console.wait(pace.time_left(Some(Duration::from_nanos(ns - wall))))?;
                self.machine.clock().skip_to(pace.now().min(ns), steps);
                Ok(pace.time_is_up().map(End::Timeout))
            }
        }
    }

    /// The CPU runs, or something is pending that it lets in while halted.
    fn can_run(&mut self, index: usize) -> bool {
        let cpu = &mut self.cpus[index].0;
        if cpu.activity() == Activity::Waiting {
            self.engine.get().wake(cpu, &mut self.machine);
        }
        let platform = self.machine.platform();
        cpu.activity() == Activity::Running
            || platform.nmi_pending(index) && cpu.nmi_deliverable()
            || platform.interrupt_pending(index) && cpu.interrupt_wakes()
    }

    fn halted(&self, enabled: bool) -> String {
        let listens = |cpu: &Processor| cpu.0.interrupt_wakes();
        let index = self.cpus.iter().position(listens).unwrap_or(self.turn.cpu);
        let rip = self.cpus[index].0.rip();
        let name = match self.cpus.len() {
            1 => String::new(),
            count => format!("CPU {index}, the last of {count}: "),
        };
        match enabled {
            true => format!("{name}HLT before {rip:#x}, with no timer armed and no more input"),
            false => format!("{name}HLT before {rip:#x} with interrupts disabled"),
        }
    }

    /// Registers and the last code bytes of the CPU whose turn it is.
    fn report(&self) -> String {
        let text = report(self.machine.memory(), &self.cpus[self.turn.cpu].0.state());
        match self.cpus.len() {
            1 => text,
            count => format!("CPU {} of {count}\n{text}", self.turn.cpu),
        }
    }
}

/// Virtual and wall time side by side.
struct Pace {
    started: Instant,
    /// Virtual time at the start.
    base: u64,
    /// Wall time that does not count for the guest.
    paused: Duration,
    timeout: Option<Duration>,
    /// When the outside was last looked at.
    looked: Instant,
    /// The step, and virtual time, since when the CPU has been halted with interrupts off.
    dead_since: (u64, u64),
}

impl Pace {
    /// What virtual time would be if it had followed wall time.
    fn now(&self) -> u64 {
        let elapsed = self.started.elapsed().saturating_sub(self.paused);
        let elapsed = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        self.base.saturating_add(elapsed)
    }

    fn time_is_up(&self) -> Option<Duration> {
        self.timeout.filter(|timeout| self.started.elapsed() >= *timeout)
    }

    /// How long a wait may take that would like to take `wanted`.
    fn time_left(&self, wanted: Option<Duration>) -> Option<Duration> {
        let left = self
            .timeout
            .map(|timeout| timeout.saturating_sub(self.started.elapsed()));
        match (wanted, left) {
            (Some(wanted), Some(left)) => Some(wanted.min(left)),
            (wanted, left) => wanted.or(left),
        }
    }

    /// Since when a CPU that is halted at this step and time has been so.
    fn dead_since(&mut self, step: u64, now: u64) -> u64 {
        if self.dead_since.0 != step {
            self.dead_since = (step, now);
        }
        self.dead_since.1
    }

    fn outside_is_due(&mut self) -> bool {
        let due = self.looked.elapsed() >= Duration::from_millis(1);
        if due {
            self.looked = Instant::now();
        }
        due
    }
}

/// Begins a recording of all CPUs.
fn record(options: &trace::Options, config: &MachineConfig, machine: &mut Machine) -> Result<Recorder, Error> {
    let header = options.header(config);
    let (recorder, observers) = Recorder::new(options, header, config.model).map_err(|source| Error::File {
        option: "--trace",
        path: options.folder.clone(),
        source,
    })?;
    for (cpu, observer) in observers.into_iter().enumerate() {
        machine.observe(cpu, Some(Box::new(observer)));
    }
    Ok(recorder)
}

/// `--engine`: this build has the software CPU only.
fn choose_engine(choice: EngineChoice) -> Result<(), Error> {
    match choice {
        EngineChoice::Soft => Ok(()),
        EngineChoice::Auto => {
            info!("--engine auto: the software CPU, since this build has no other");
            Ok(())
        }
        EngineChoice::Kvm => Err(Error::Engine {
            option: "--engine kvm".into(),
            reason: "this build has the software CPU only; leave the option out, or give soft".into(),
        }),
    }
}

/// The model has instructions that are executed by the host's own, which it has not got.
fn host_lacks(model: &CpuModel, lacks: &HostLacks) -> Error {
    Error::Engine {
        option: format!("--cpu-model {}", model.name),
        reason: format!("{lacks}, which the model needs; choose another model or host"),
    }
}

/// Reads and loads the kernel and the initial RAM disk.
fn load(memory: &Memory, config: &MachineConfig) -> Result<loader::Entry, Error> {
    let kernel = read_file("--kernel", &config.kernel, memory.low_end())?;
    let mut initrd = match &config.initrd {
        Some(path) => Some(read_file("--initrd", path, memory.low_end())?),
        None => None,
    };
    let mut cmdline = config.cmdline.clone();
    if let Some(folder) = &config.inject {
        let unfit = |text| Error::File {
            option: "--inject",
            path: folder.clone(),
            source: io::Error::other(text),
        };
        if !loader::linux::is_bzimage(&kernel) && loader::multiboot::find_header(&kernel).is_some() {
            return Err(unfit(
                "needs a Linux kernel; give a multiboot kernel its module with --initrd",
            ));
        }
        if initrd.as_deref().is_some_and(loader::initrd::is_file_system) {
            return Err(unfit(
                "needs an initial RAM disk that is an archive; this one is a file system",
            ));
        }
        // What the file lacks must not come from the archive behind it.
        if let (Some(bytes), Some(path)) = (&initrd, &config.initrd) {
            loader::initrd::check(bytes).map_err(|source| Error::Image {
                option: "--initrd",
                path: path.clone(),
                source,
            })?;
        }
        let injection = inject::pack(folder, memory.low_end())?;
        cmdline = inject::hooked(cmdline, injection.hook);
        initrd = Some(inject::append(initrd, injection.archive));
    }
    let name = |path: &Path| path.as_os_str().as_bytes().to_vec();
    let initrd_name = config.initrd.as_deref().map(name).unwrap_or_default();
    let request = Boot {
        kernel: &kernel,
        kernel_name: &name(&config.kernel),
        initrd: initrd.as_deref(),
        initrd_name: &initrd_name,
        cmdline: cmdline.as_deref(),
        rsdp: acpi::RSDP,
    };
    loader::load(memory, &request).map_err(|(input, source)| match (input, &config.initrd, &config.inject) {
        (Input::Initrd, Some(path), _) => Error::Image {
            option: "--initrd",
            path: path.clone(),
            source,
        },
        (Input::Initrd, None, Some(path)) => Error::Image {
            option: "--inject",
            path: path.clone(),
            source,
        },
        (Input::Cmdline, ..) => Error::Cmdline(source),
        _ => Error::Image {
            option: "--kernel",
            path: config.kernel.clone(),
            source,
        },
    })
}

/// Reads a whole file of at most `limit` bytes: a larger one cannot fit into memory.
fn read_file(option: &'static str, path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    use std::os::unix::fs::FileTypeExt;
    let failed = |source| Error::File {
        option,
        path: path.into(),
        source,
    };
    let unfit = |text: &str| failed(io::Error::other(text));
    let too_big = |len| {
        let what = if option == "--initrd" {
            "the initial RAM disk"
        } else {
            "the kernel"
        };
        let source = loader::too_big_file(what, len, limit);
        Error::Image {
            option,
            path: path.into(),
            source,
        }
    };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(unfit("is a directory"));
    }
    if kind.is_char_device() || kind.is_block_device() || kind.is_socket() {
        return Err(unfit("is not a regular file"));
    }
    if metadata.len() > limit {
        return Err(too_big(Some(metadata.len())));
    }
    // A pipe has no length to look at first.
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > limit {
        return Err(too_big(None));
    }
    Ok(bytes)
}

/// All registers, and the code around RIP with the byte at RIP in brackets.
fn report(memory: &Memory, state: &CpuState) -> String {
    const NAMES: [&str; 16] = [
        "RAX", "RCX", "RDX", "RBX", "RSP", "RBP", "RSI", "RDI", "R8 ", "R9 ", "R10", "R11", "R12", "R13", "R14", "R15",
    ];
    const SEGMENTS: [&str; 6] = ["ES", "CS", "SS", "DS", "FS", "GS"];
    let mut text = format!(
        "RIP {:016x}  RFLAGS {:08x}  CPL {}\n",
        state.rip, state.rflags, state.cpl
    );
    for (names, values) in NAMES.chunks(4).zip(state.gpr.chunks(4)) {
        let line: Vec<String> = names
            .iter()
            .zip(values)
            .map(|(name, value)| format!("{name} {value:016x}"))
            .collect();
        text += &format!("{}\n", line.join("  "));
    }
    for (name, s) in SEGMENTS
        .iter()
        .copied()
        .zip(&state.segments)
        .chain([("LDTR", &state.ldtr), ("TR", &state.tr)])
    {
        text += &format!(
            "{name:4} {:04x}  base {:016x}  limit {:08x}  attributes {:04x}\n",
            s.selector, s.base, s.limit, s.attributes
        );
    }
    let (gdtr, idtr) = (&state.gdtr, &state.idtr);
    text += &format!(
        "GDTR {:016x} limit {:04x}  IDTR {:016x} limit {:04x}\n",
        gdtr.base, gdtr.limit, idtr.base, idtr.limit
    );
    text += &format!(
        "CR0 {:08x}  CR2 {:016x}  CR3 {:016x}  CR4 {:08x}\n",
        state.cr0, state.cr2, state.cr3, state.cr4
    );
    text += &format!(
        "EFER {:08x}  DR6 {:08x}  DR7 {:08x}\n",
        state.efer, state.dr[6], state.dr[7]
    );
    text += "code";
    let at = state.segments[CS].base.wrapping_add(state.rip);
    for offset in -16i64..16 {
        let byte = walk::read_byte(memory, state, at.wrapping_add_signed(offset));
        let byte = byte.map_or("--".into(), |byte| format!("{byte:02x}"));
        text += &if offset == 0 {
            format!(" [{byte}]")
        } else {
            format!(" {byte}")
        };
    }
    text
}

/// Builds a machine and runs it to its end. Prints what `--stats` asks for on stderr once the terminal is as it was.
pub fn run(config: &MachineConfig) -> Result<End, Error> {
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
    let mut end = vm.run(&mut console);
    drop(vm.control.take());
    drop(console);
    let reason = match &end {
        Ok(end) => end.message().unwrap_or_else(|| format!("{end:?}")),
        Err(error) => error.to_string(),
    };
    let traced = vm.end_trace(reason.lines().next().unwrap_or_default());
    match (&end, traced) {
        // The guest was to go on, and how it ended is what counts.
        (Ok(_), Err(error)) if goes_on => {
            let _ = writeln!(io::stderr(), "minivmm: {error}; the trace is not complete");
        }
        (Ok(_), Err(error)) => end = Err(error),
        _ => {}
    }
    if config.stats {
        // A closed stderr is no reason to fail.
        let _ = writeln!(io::stderr(), "{}", vm.stats());
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SerialTarget;
    use x86::model::WESTMERE;

    // covers: 2/exit-6
    // covers: 2/exit-status-codes
    #[test]
    fn every_end_has_its_status() {
        for (end, code, says) in [
            (End::PowerOff, 0, None),
            (End::Reset, 0, None),
            (End::Quit, 0, None),
            (End::DebugExit(5), 11, None),
            (End::Signal(libc::SIGTERM), 2, Some("SIGTERM")),
            (End::OutputClosed, 2, Some("standard output")),
            (End::TripleFault("RIP 1".into()), 4, Some("triple fault\nRIP 1")),
            (End::Halted("HLT".into()), 4, Some("HLT")),
            (
                End::Defect("block 7 has no end".into()),
                6,
                Some("internal error: block 7 has no end"),
            ),
            (End::Instructions(9), 8, Some("--max-instructions 9")),
            (End::Timeout(Duration::from_millis(1500)), 8, Some("--timeout 1.5")),
        ] {
            assert_eq!(end.status().code(), code, "{end:?}");
            match (end.message(), says) {
                (Some(message), Some(says)) => assert!(message.contains(says), "{message}"),
                (message, says) => assert_eq!(message.as_deref(), says),
            }
        }
        let source = io::Error::from_raw_os_error(libc::EMFILE);
        assert_eq!(
            Error::System {
                what: "creating a timer",
                source
            }
            .status()
            .code(),
            6
        );
    }

    // covers: 2/bad-input-host
    #[test]
    fn a_model_that_the_host_cannot_execute_is_refused_in_one_line() {
        let error = host_lacks(&WESTMERE, &HostLacks(vec!["SSE4.2", "AES"]));
        assert_eq!(error.status().code(), 2);
        let says =
            "--cpu-model westmere: this host lacks SSE4.2, AES, which the model needs; choose another model or host";
        assert_eq!(error.to_string(), says);
    }

    // covers: 2/cli-engine
    #[test]
    fn the_engine_is_the_software_cpu() {
        choose_engine(EngineChoice::Auto).unwrap();
        choose_engine(EngineChoice::Soft).unwrap();
        let error = choose_engine(EngineChoice::Kvm).unwrap_err();
        assert_eq!((error.status().code(), error.to_string().lines().count()), (2, 1));
    }

    #[test]
    fn a_report_has_all_registers_and_the_code() {
        let memory = Memory::new(2 << 20).unwrap();
        memory.write(0x1000, &[0x90, 0x0f, 0x0b, 0xcc]).unwrap();
        let mut state = CpuState::reset(&WESTMERE);
        state.gpr[15] = 0xfeed_f00d;
        state.segments[CS].base = 0;
        state.rip = 0x1001;
        let text = report(&memory, &state);
        assert!(
            text.contains("R15 00000000feedf00d") && text.contains(" 90 [0f] 0b cc 00"),
            "{text}"
        );
        state.segments[CS].base = 0xffff_0000;
        assert!(report(&memory, &state).contains("[--]"), "code that is not in RAM");
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
