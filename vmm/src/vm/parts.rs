//! What a machine with its CPUs is made of, and looking at it between two steps.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Duration,
};

use engine::{Cpu, CpuState};
use kvm::HostClock;
use machine::{Machine, disk::Overlay, memory::NotRam, share::overlay::Upper, walk, watchers::Seat};
use trace::format::GuestSources;

use super::{
    hosted_state::{Hosted, Served},
    outside::Moment,
    report::report,
    snapshot::Pages,
    soft::Soft,
    stats::Stats,
    stored::{self, Stored},
};
use crate::{config::ClockMode, debug::Debugger, recording::Recorder};

/// No RAM is mapped at this linear address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory is mapped at linear address {0:#x}")]
pub struct Unmapped(pub u64);

/// There is no CPU of this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no CPU {0}")]
pub struct NoCpu(pub usize);

/// A machine with its CPUs, ready to run.
#[derive(Debug)]
pub struct Vm {
    pub(super) soft: Soft,
    /// KVM, where the guest runs natively.
    pub(super) hosted: Option<Hosted>,
    /// The clock that it has there.
    pub(super) host_clock: Option<HostClock>,
    pub(super) machine: Machine,
    pub(super) clock: ClockMode,
    /// Wall time that the guest has run.
    pub(super) wall: Duration,
    pub(super) recorder: Option<Recorder>,
    /// The recording was begun under way.
    pub(super) recorder_is_late: bool,
    pub(super) debugger: Option<Debugger>,
    /// How KVM serves it.
    pub(super) points: Served,
    /// What RAM held when a snapshot was taken or restored last.
    pub(super) kept: Option<Pages>,
    /// Pages that were written since a session's last snapshot, once there was one.
    pub(super) written: Option<BTreeSet<u64>>,
    /// What is on disks that have an overlay, in order.
    pub(super) overlays: Vec<Overlay>,
    /// What the guest makes of shared directories that have an overlay, in order.
    pub(super) shares: Vec<Upper>,
    /// The step at which nothing may enter any more, as something has been delivered there, or tried.
    pub(super) closed_to_input: Option<u64>,
    /// A debugger has changed registers or memory since this was last asked.
    pub(super) changed: bool,
    /// The kernel's file.
    pub(super) kernel: PathBuf,
    /// Where files of the guest are on the host.
    pub(super) files: GuestSources,
    /// A file with the symbols of the guest's kernel.
    pub(super) symbols: Option<PathBuf>,
}

/// What a [`Vm`] is put together from.
pub(crate) struct Parts {
    /// The software engine's CPUs.
    pub soft: Soft,
    /// KVM's.
    pub hosted: Option<Hosted>,
    /// What is around them.
    pub machine: Machine,
    /// How virtual time relates to wall time.
    pub clock: ClockMode,
    /// The overlays of disks that have one, in order.
    pub overlays: Vec<Overlay>,
    /// The overlays of shared directories that have one, in order.
    pub shares: Vec<Upper>,
    /// The kernel's file.
    pub kernel: PathBuf,
    /// Where files of the guest are on the host.
    pub files: GuestSources,
    /// A file with the symbols of the guest's kernel.
    pub symbols: Option<PathBuf>,
}

impl Vm {
    /// A machine at its first instruction.
    pub(crate) fn assemble(parts: Parts) -> Self {
        let host_clock = parts.hosted.as_ref().map(|hosted| hosted.hypervisor.clock());
        Vm {
            soft: parts.soft,
            hosted: parts.hosted,
            host_clock,
            machine: parts.machine,
            clock: parts.clock,
            wall: Duration::ZERO,
            recorder: None,
            recorder_is_late: false,
            debugger: None,
            points: Served::default(),
            kept: None,
            written: None,
            overlays: parts.overlays,
            shares: parts.shares,
            closed_to_input: None,
            changed: false,
            kernel: parts.kernel,
            files: parts.files,
            symbols: parts.symbols,
        }
    }

    /// Where the run is.
    pub fn moment(&mut self) -> Moment {
        let steps = self.soft.steps();
        let ticks = self.machine.clock().ticks(steps);
        Moment { steps, ticks }
    }

    /// Whether the guest runs in KVM, whose clock is the host's and which counts no steps.
    pub fn is_hosted(&self) -> bool {
        self.host_clock.is_some()
    }

    /// What is on disks that have an overlay, in order.
    pub(crate) fn overlays(&self) -> &[Overlay] {
        &self.overlays
    }

    /// What the guest makes of shared directories that have an overlay, in order.
    pub(crate) fn shares(&self) -> &[Upper] {
        &self.shares
    }

    /// The step at which nothing may enter any more, as something has been delivered there, or tried.
    pub(crate) fn closed_to_input(&self) -> Option<u64> {
        self.closed_to_input
    }

    /// The machine has been put to a state in which this was so.
    pub(crate) fn set_closed_to_input(&mut self, step: Option<u64>) {
        self.closed_to_input = step;
    }

    /// Whether a debugger has changed registers or memory since this was last asked.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Steps that a CPU has made.
    pub(crate) fn steps_of(&self, cpu: usize) -> u64 {
        self.soft.cpu(cpu).map_or(0, Cpu::steps)
    }

    /// A CPU of the software engine, if there is such a CPU.
    pub(crate) fn cpu(&self, cpu: usize) -> Option<&Cpu> {
        self.soft.cpu(cpu)
    }

    /// Instructions so far, over all CPUs, each REP once.
    pub fn instructions(&self) -> u64 {
        self.soft.cpus().map(Cpu::retired).sum()
    }

    /// Has the other CPUs stand still while the machine runs; `None`: none has to. The guest can tell.
    pub fn run_only(&mut self, cpu: Option<usize>) {
        self.soft.run_only(cpu);
    }

    /// The state in the form in which it is written down, RAM aside.
    pub(super) fn stored(&self) -> Stored {
        Stored {
            format: stored::FORMAT,
            model: self.machine.model().name.into(),
            memory: self.machine.memory().size(),
            cpus: self.soft.states(),
            steps: self.soft.steps(),
            turn: self.soft.turn(),
            machine: self
                .machine
                .state_at(self.soft.cpus().map(Cpu::retired), self.soft.steps()),
        }
    }

    /// Moves the devices' own clocks to this moment, as the next round of the run does anyway: a state is of the same moment then, whenever
    /// the last round was. How often a machine that waits for a network goes round depends on the host.
    pub(crate) fn bring_up_to_date(&mut self) {
        let now = self.now();
        self.machine.platform().advance(now);
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

    /// The kernel's file.
    pub(crate) fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// A file with the symbols of the guest's kernel, if one was given.
    pub(crate) fn symbols(&self) -> Option<&Path> {
        self.symbols.as_deref()
    }

    /// Whether a debugger may stop it.
    pub(crate) fn is_debugged(&self) -> bool {
        self.debugger.is_some()
    }

    /// The recording, if there is one.
    pub(crate) fn recorder(&self) -> Option<&Recorder> {
        self.recorder.as_ref()
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

    /// A CPU's state, if there is such a CPU.
    pub fn cpu_state(&self, cpu: usize) -> Option<CpuState> {
        Some(self.soft.cpu(cpu)?.state())
    }

    /// What stops the machine for a look. From the first call on a run may end with [`StopReason::Debugger`](super::stop_reason::StopReason::Debugger), and a triple fault does so
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

    /// Puts a CPU into another state, on a debugger's request.
    ///
    /// # Errors
    /// There is no such CPU.
    pub fn set_cpu_state(&mut self, cpu: usize, state: &CpuState) -> Result<(), NoCpu> {
        if cpu >= self.soft.count() {
            return Err(NoCpu(cpu));
        }
        let mut state = state.clone();
        if self
            .cpu_state(cpu)
            .is_some_and(|old| old.linear_rip() != state.linear_rip())
        {
            // Nobody has been notified of what comes next now.
            state.observed = None;
        }
        self.soft.put(cpu, &state);
        self.changed = true;
        Ok(())
    }

    /// Writes guest-physical memory, on a debugger's request.
    ///
    /// # Errors
    /// Not all of it is RAM: nothing has been written.
    pub fn write_physical(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), NotRam> {
        let memory = self.machine.memory();
        memory.read(gpa, &mut vec![0; bytes.len()])?;
        memory.write(gpa, bytes)?;
        self.soft.written(gpa, bytes.len() as u64);
        self.changed = true;
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

    /// The translation of the block that a CPU is about to run, if there is one.
    pub fn translation(&mut self, cpu: usize) -> Option<engine::translate::Listing> {
        self.soft.translation(cpu, &mut self.machine)
    }

    /// See [`engine::Engine::translate_wrongly`].
    #[doc(hidden)]
    pub fn translate_wrongly(&mut self, gpa: u64) {
        self.soft.translate_wrongly(gpa);
    }

    /// The machine around the CPU.
    pub fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// A hash of the whole machine, in the form in which its state is stored: equal for equal runs, on every host.
    pub fn digest(&self) -> u64 {
        let mut digest = self.stored().hash();
        digest.add(&self.machine.memory().digest().to_le_bytes());
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
            touched: {
                let memory = self.machine.memory();
                let touched = memory.touched().iter().map(|range| range.end - range.start).sum();
                (touched, memory.size())
            },
            translated: self.soft.translated(),
            not_translated: self.soft.not_translated(),
            digest: self.digest(),
        }
    }

    /// Virtual time in nanoseconds.
    pub(crate) fn now(&mut self) -> u64 {
        let steps = self.soft.steps();
        self.machine.clock().ns(steps)
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
