//! The software engine's CPUs: turns, interrupts, wakes.
//!
//! # Turns
//! The CPUs run one after the other on one thread, and one clock counts the steps of all of them. A turn ends when the CPU
//! halts, at PAUSE (somebody else has to do what it waits for), when it has sent an interrupt to another, and after
//! [`TURN`] steps; the next one in a circle that is not halted goes on.

use engine::translate::{Listing, Why};
use engine::{Activity, Cpu, CpuState, Engine, Event, Exit, Translations};
use kvm::Cpus;
use machine::{CpuBus, Machine, StateError, exits::Exits, memory::SoftEngine};
use x86::{model::CpuModel, msr::MsrFault};

/// The longest turn of a CPU among several, in steps: short beside the microseconds that an interrupt takes between real ones,
/// long beside what a change costs.
const TURN: u64 = 1 << 13;

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    cpu: usize,
    /// The step at which it ends at the latest.
    end: u64,
}

/// The CPUs of a machine on the software engine.
#[derive(Debug)]
pub struct Soft {
    engine: SoftEngine,
    cpus: Vec<Processor>,
    turn: Turn,
    steps: u64,
    exits: Exits,
    /// No other CPU is to run.
    only: Option<usize>,
}

/// The whole state of the CPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct SoftState {
    /// Their registers.
    pub cpus: Vec<CpuState>,
    /// What they remember of page tables.
    pub translations: Vec<Translations>,
    /// Steps so far, over all of them.
    pub steps: u64,
    /// The CPU whose turn it is, and the step at which that ends.
    pub turn: (usize, u64),
}

/// [`Cpu`] with a `Debug` that is short.
struct Processor(Box<Cpu>);

impl std::fmt::Debug for Processor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cpu at {:#x}", self.0.rip())
    }
}

impl Soft {
    /// So many CPUs: the boot CPU in this state, the others as firmware leaves them, waiting for a start-up IPI.
    pub fn new(engine: SoftEngine, model: &'static CpuModel, count: usize, boot: &CpuState) -> Self {
        let cpus = (0..count).map(|index| {
            let mut cpu = Cpu::new(model);
            if index == 0 {
                cpu.set_state(boot);
            } else {
                // Firmware has had its turn with them.
                cpu.init(false);
            }
            Processor(cpu)
        });
        Soft {
            engine,
            cpus: cpus.collect(),
            turn: Turn {
                cpu: 0,
                end: if count > 1 { TURN } else { u64::MAX },
            },
            steps: 0,
            exits: Exits::default(),
            only: None,
        }
    }

    /// Holds the other CPUs stopped; `None`: holds none. A debugger's request: the guest can tell,
    /// as the others miss time.
    pub fn run_only(&mut self, cpu: Option<usize>) {
        self.only = cpu;
    }

    /// Whether CPUs are held stopped by request.
    pub fn runs_only(&self) -> bool {
        self.only.is_some()
    }

    /// Nobody has said that it is to stand still.
    fn may_run(&self, cpu: usize) -> bool {
        self.only.is_none_or(|only| only == cpu)
    }

    /// How many CPUs there are.
    pub fn count(&self) -> usize {
        self.cpus.len()
    }

    /// The CPU whose turn it is.
    pub fn current(&self) -> usize {
        self.turn.cpu
    }

    /// What the engine has translated, if it does.
    pub fn translated(&self) -> Option<engine::translate::Statistics> {
        self.engine.translated()
    }

    /// The translation of the block that a CPU is about to run, if there is one.
    pub fn translation(&mut self, cpu: usize, machine: &mut Machine) -> Option<Listing> {
        let mut listing = None;
        self.signal(cpu, machine, |engine, cpu, bus| listing = engine.translation(cpu, bus));
        listing
    }

    /// See [`engine::Engine::translate_wrongly`].
    pub fn translate_wrongly(&mut self, gpa: u64) {
        self.engine.get().translate_wrongly(gpa);
    }

    /// What each CPU's state is.
    pub fn states(&self) -> Vec<CpuState> {
        self.cpus().map(|cpu| self.engine.state_of(cpu)).collect()
    }

    /// See [`engine::Engine::not_translated`].
    pub fn not_translated(&self) -> Vec<(String, Why, u64)> {
        self.engine.not_translated()
    }

    /// Instructions and REP iterations so far, over all CPUs in the order they ran.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Why CPUs stopped running, how often.
    pub fn exits(&self) -> Exits {
        self.exits
    }

    /// A CPU, if there is such a CPU.
    pub fn cpu(&self, index: usize) -> Option<&Cpu> {
        Some(&self.cpus.get(index)?.0)
    }

    /// All CPUs, in order.
    pub fn cpus(&self) -> impl ExactSizeIterator<Item = &Cpu> {
        self.cpus.iter().map(|cpu| &*cpu.0)
    }

    /// The first CPU that something watches which has to see each of its instructions. `times` as for
    /// [`CpuBus::needs_instructions`].
    pub fn needs_instructions(&mut self, times: bool, machine: &mut Machine) -> Option<usize> {
        let look = |bus: &mut CpuBus<'_>, cpu: &mut dyn engine::bus::Processor| bus.needs_instructions(times, cpu);
        (0..self.cpus.len()).find(|&cpu| self.look(cpu, machine, look) == Some(true))
    }

    /// Looks at a CPU between two steps, as its units see it; `None` if there is no such CPU.
    pub fn look<T>(
        &mut self,
        cpu: usize,
        machine: &mut Machine,
        f: impl FnOnce(&mut CpuBus<'_>, &mut dyn engine::bus::Processor) -> T,
    ) -> Option<T> {
        let mut seen = None;
        self.signal(cpu, machine, |engine, cpu, bus| seen = Some(engine.look(cpu, bus, f)));
        seen
    }

    /// WRMSR on a CPU between two steps.
    ///
    /// # Errors
    /// The instruction would be #GP, or there is no such CPU.
    pub fn write_msr(&mut self, cpu: usize, msr: u32, value: u64, machine: &mut Machine) -> Result<(), MsrFault> {
        let mut written = Err(MsrFault::GeneralProtection);
        self.signal(cpu, machine, |engine, cpu, bus| {
            written = engine.write_msr(cpu, bus, msr, value);
        });
        written
    }

    /// Puts a CPU into a state, if there is such a CPU.
    pub fn put(&mut self, cpu: usize, state: &CpuState) {
        if let Some(cpu) = self.cpus.get_mut(cpu) {
            cpu.0.set_state(state);
        }
    }

    /// Somebody else has run the guest: whatever is known of its code may be wrong.
    pub fn forget_code(&mut self) {
        self.engine.get().forget_code();
    }

    /// Delivers an event that was under way to a CPU.
    pub fn raise(&mut self, cpu: usize, event: Event, machine: &mut Machine) {
        self.signal(cpu, machine, |engine, cpu, bus| engine.raise(cpu, bus, event));
    }

    /// Gives the turn to this CPU, if there is such a CPU.
    pub fn take_turn(&mut self, cpu: usize) {
        if cpu < self.cpus.len() {
            self.engine.get().end_turn(&self.cpus[self.turn.cpu].0);
            self.cpus[cpu].0.clock = self.steps;
            self.turn.cpu = cpu;
            if self.cpus.len() > 1 {
                self.turn.end = self.steps + TURN;
            }
        }
    }

    /// Somebody else has written RAM, this many bytes at this address.
    pub fn written(&mut self, gpa: u64, len: u64) {
        self.engine.get().written(gpa, len);
    }

    /// The pages of RAM that have been written since this was last asked, ascending.
    pub fn take_dirty(&mut self) -> Vec<u64> {
        self.engine.get().take_dirty()
    }

    /// The whole state.
    pub fn state(&mut self, machine: &mut Machine) -> SoftState {
        for cpu in 0..self.cpus.len() {
            self.signal(cpu, machine, |engine, cpu, bus| engine.look_at_line(cpu, bus));
        }
        let engine = self.engine.get();
        SoftState {
            cpus: self.cpus.iter().map(|cpu| cpu.0.state()).collect(),
            translations: self.cpus.iter().map(|cpu| engine.translations(&cpu.0)).collect(),
            steps: self.steps,
            turn: self.turn(),
        }
    }

    /// The CPU whose turn it is, and the step at which that ends.
    pub fn turn(&self) -> (usize, u64) {
        (self.turn.cpu, self.turn.end)
    }

    /// Takes on a state that as many CPUs of the same model gave. RAM is still to be written then.
    ///
    /// # Errors
    /// The state is not of so many CPUs, and nothing has changed.
    pub fn set_state(&mut self, state: &SoftState) -> Result<(), StateError> {
        let count = self.cpus.len();
        let (cpu, end) = state.turn;
        if (state.cpus.len(), state.translations.len()) != (count, count) || cpu >= count {
            return Err(StateError::Cpus {
                state: state.cpus.len(),
                machine: count,
            });
        }
        let engine = self.engine.get();
        for ((cpu, registers), translations) in self.cpus.iter_mut().zip(&state.cpus).zip(&state.translations) {
            cpu.0.set_state(registers);
            engine.set_translations(&mut cpu.0, translations);
            cpu.0.clock = state.steps;
        }
        self.steps = state.steps;
        self.turn = Turn { cpu, end };
        Ok(())
    }

    /// Asks the watchers of a CPU anew what they want to hear, and hands over what waits for them.
    pub fn ask(&mut self, cpu: usize, machine: &mut Machine) {
        self.signal(cpu, machine, |engine, cpu, bus| engine.ask(cpu, bus));
    }

    /// INIT for a CPU, which waits for a start-up IPI then. Says whether it was initialized: it may hold INIT off, or its VMM get it.
    pub fn init(&mut self, cpu: usize, machine: &mut Machine) -> bool {
        let mut done = false;
        self.signal(cpu, machine, |engine, cpu, bus| done = engine.init(cpu, bus, false));
        done
    }

    /// A CPU that holds INIT off no longer, and has one that waits.
    pub fn init_due(&self) -> Option<usize> {
        self.cpus.iter().position(|cpu| cpu.0.init_due())
    }

    /// A start-up IPI.
    pub fn start(&mut self, cpu: usize, vector: u8, machine: &mut Machine) {
        self.signal(cpu, machine, |engine, cpu, bus| engine.start(cpu, bus, vector));
    }

    /// Has something done to a CPU whose turn it need not be, if there is such a CPU.
    fn signal(&mut self, cpu: usize, machine: &mut Machine, f: impl FnOnce(&mut Engine, &mut Cpu, &mut CpuBus<'_>)) {
        let Some(target) = self.cpus.get_mut(cpu) else { return };
        target.0.clock = self.steps;
        f(self.engine.get(), &mut target.0, &mut machine.cpu(cpu));
    }

    /// The turn is over: it has been long enough, or the CPU cannot use it.
    pub fn turn_is_over(&mut self, machine: &mut Machine) -> bool {
        self.steps >= self.turn.end || !self.can_run(self.turn.cpu, machine)
    }

    /// Gives the turn to the next CPU that can run, at last the one that has had it. Says whether there is one.
    pub fn next_turn(&mut self, machine: &mut Machine) -> bool {
        let (count, last) = (self.cpus.len(), self.turn.cpu);
        let next = (1..=count)
            .map(|step| (last + step) % count)
            .find(|&cpu| self.can_run(cpu, machine));
        let Some(cpu) = next else { return false };
        if cpu != last {
            self.engine.get().end_turn(&self.cpus[last].0);
        }
        self.cpus[cpu].0.clock = self.steps;
        self.turn.cpu = cpu;
        if count > 1 {
            self.turn.end = self.steps + TURN;
        }
        true
    }

    /// The CPU runs, or something is pending that it lets in while halted.
    fn can_run(&mut self, index: usize, machine: &mut Machine) -> bool {
        if !self.may_run(index) {
            return false;
        }
        if self.cpus[index].0.activity() == Activity::Waiting {
            self.signal(index, machine, |engine, cpu, bus| {
                engine.wake(cpu, bus);
            });
        }
        let tsc = self.tsc(index, machine);
        let cpu = &self.cpus[index].0;
        let platform = machine.platform();
        cpu.activity() == Activity::Running
            || cpu.takes_virtual_interrupt()
            || cpu.wakes_at().is_some_and(|at| at <= tsc)
            || cpu.smi_due()
            || platform.nmi_pending(index) && cpu.nmi_deliverable()
            || platform.interrupt_pending(index) && cpu.interrupt_wakes()
    }

    /// A CPU's time-stamp counter.
    fn tsc(&self, index: usize, machine: &mut Machine) -> u64 {
        let now = machine.clock().ticks(self.steps);
        now.wrapping_add(machine.tsc_offset(index))
    }

    /// Ticks of the clock until the first CPU that executes nothing goes on by itself ([`Cpu::wakes_at`]), if any will.
    pub fn ticks_to_deadline(&self, machine: &mut Machine) -> Option<u64> {
        let left = |(index, cpu): (usize, &Processor)| {
            let deadline = cpu.0.wakes_at().filter(|_| self.may_run(index))?;
            Some(deadline.saturating_sub(self.tsc(index, machine)))
        };
        self.cpus.iter().enumerate().filter_map(left).min()
    }

    /// Ends the waits of UMWAIT and TPAUSE whose deadline has come. Somebody looks at the very step of each, so that what CPUs do does not
    /// depend on when else anybody looks.
    pub fn end_timed_waits(&mut self, machine: &mut Machine) {
        if self.cpus.iter().all(|cpu| cpu.0.waits_until().is_none()) {
            return;
        }
        for index in 0..self.cpus.len() {
            let tsc = self.tsc(index, machine);
            let over = self.cpus[index].0.waits_until().is_some_and(|deadline| deadline <= tsc);
            if over && self.may_run(index) {
                self.signal(index, machine, |engine, cpu, bus| {
                    engine.wake(cpu, bus);
                });
            }
        }
    }

    /// An SMI has come for a CPU, which takes it at its turn.
    pub fn request_smi(&mut self, cpu: usize) {
        if let Some(Processor(cpu, ..)) = self.cpus.get_mut(cpu) {
            cpu.request_smi();
        }
    }

    /// Delivers NMIs to the CPUs whose turn it is not: each is between two instructions, where it takes one. It would be lost in
    /// the next one, if that came before its turn.
    pub fn deliver_nmis(&mut self, machine: &mut Machine) {
        for index in 0..self.cpus.len() {
            let takes = index != self.turn.cpu
                && machine.platform().nmi_pending(index)
                && self.may_run(index)
                && self.cpus[index].0.nmi_deliverable();
            if takes {
                machine.platform().take_nmi(index);
                self.signal(index, machine, |engine, cpu, bus| engine.nmi(cpu, bus));
                self.exits.nmis += 1;
            }
        }
    }

    /// Delivers an NMI or an interrupt to the CPU whose turn it is, if it lets it in. The answer is how many steps later to try
    /// again, at the latest.
    pub fn deliver(&mut self, machine: &mut Machine) -> u64 {
        let index = self.turn.cpu;
        let mut retry = u64::MAX;
        if !self.may_run(index) {
            return retry;
        }
        let cpu = &mut self.cpus[index].0;
        if cpu.smi_due() {
            self.engine.get().smi(cpu, &mut machine.cpu(index));
        } else if cpu.smi_pending() {
            // A shadow lasts one instruction.
            retry = 1;
        }
        if machine.platform().nmi_pending(index) {
            if cpu.nmi_deliverable() {
                machine.platform().take_nmi(index);
                self.engine.get().nmi(cpu, &mut machine.cpu(index));
                self.exits.nmis += 1;
            } else if !cpu.nmi_blocked() {
                // A shadow lasts one instruction.
                retry = 1;
            }
        }
        cpu.want_nmi = machine.platform().nmi_pending(index);
        let pending = machine.platform().interrupt_pending(index);
        cpu.want_window = false;
        if pending && cpu.interruptible() && cpu.exits_unacknowledged() {
            // The VMM that the guest is takes the interrupt itself, once it lets it in.
            self.engine.get().interrupt_exit(cpu, &mut machine.cpu(index));
            cpu.want_window = true;
        } else if pending && cpu.interruptible() {
            let vector = machine.platform().acknowledge(index);
            self.engine.get().interrupt(cpu, &mut machine.cpu(index), vector);
            self.exits.interrupts += 1;
            // There may be another one, of a higher class.
            cpu.want_window = machine.platform().interrupt_pending(index);
        } else if pending {
            cpu.want_window = true;
        }
        retry
    }

    /// Lets the CPU whose turn it is run for so many steps at most, and no further than its turn goes.
    pub fn run(&mut self, machine: &mut Machine, budget: u64) -> Exit {
        let turn = self.turn;
        if !self.may_run(turn.cpu) {
            // The one that may is halted.
            return Exit::Halt;
        }
        let alone = !(0..self.cpus.len()).any(|cpu| cpu != turn.cpu && self.can_run(cpu, machine));
        let cpu = &mut self.cpus[turn.cpu].0;
        // Who waits for a device, and for nobody else, does not have to leave the engine.
        cpu.yield_on_pause = !alone;
        let budget = budget.min(turn.end.saturating_sub(self.steps));
        let exit = self.engine.get().run(cpu, &mut machine.cpu(turn.cpu), budget);
        self.steps = cpu.clock;
        self.exits.count(&exit);
        exit
    }
}

impl Cpus for Soft {
    fn count(&self) -> usize {
        self.count()
    }

    fn cpu(&self, cpu: usize) -> Option<&Cpu> {
        self.cpu(cpu)
    }

    fn steps(&self) -> u64 {
        self.steps()
    }

    fn put(&mut self, cpu: usize, state: &CpuState) {
        self.put(cpu, state);
    }

    fn forget_code(&mut self) {
        self.forget_code();
    }

    fn raise(&mut self, cpu: usize, event: Event, machine: &mut Machine) {
        self.raise(cpu, event, machine);
    }

    fn take_turn(&mut self, cpu: usize) {
        self.take_turn(cpu);
    }

    fn run(&mut self, machine: &mut Machine, budget: u64) -> Exit {
        self.run(machine, budget)
    }
}
