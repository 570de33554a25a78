//! Instructions that KVM cannot execute, while the machine stays there.
//!
//! # Theory
//! A handover of the whole machine puts two threads to sleep and wakes them, which on a processor that was idle costs more than
//! all calls into KVM. A machine with one CPU needs none of it for an instruction: nobody else runs, and the software engine's
//! thread is there, waiting for the outside.
//!
//! # Practice
//! The CPU's thread takes the CPU out of KVM and lends its state; the calling thread executes and returns it
//! ([`Running::execute_lent`]). Each watches for the other for [`WATCH`] before it sleeps, as such instructions come in rows.
//! What is out of the ordinary ends the run.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use engine::{Activity, CpuState, Event, Exit};

use crate::cpus::Cpus;
use crate::shared::{LentState, NativeEnd, Running};
use crate::sys::lock;
use crate::vcpu_state::can_enter;

/// So long a thread watches for what the other does: a few times what it takes to come out of KVM and go back.
const WATCH: Duration = Duration::from_micros(300);
/// Instructions that a CPU may need after one that KVM cannot execute until KVM has a place for all of its state.
pub const UNTIL_PORTABLE: u32 = 64;
/// The CPU that is lent, of a machine that has no other.
const CPU: usize = 0;

impl Running<'_> {
    /// Whether the machine's CPU is lent instead of handed over for an instruction that KVM cannot execute.
    pub(crate) fn lends(&self) -> bool {
        let hypervisor = self.hypervisor;
        self.cpus.len() == 1
            && !hypervisor.has_controllers()
            && hypervisor.points.is_empty()
            && hypervisor.limit.is_none()
    }

    /// Lends the CPU, whose thread this is; its state behind the instruction. If the run ends first: what it was.
    pub(crate) fn lend(&self, state: CpuState, event: Option<Event>) -> (CpuState, Option<Event>) {
        *lock(&self.lent) = LentState::Lent(Box::new(state), event);
        self.is_lent.store(true, Ordering::SeqCst);
        let _ = self.wake.write(1);
        let since = Instant::now();
        while self.is_lent.load(Ordering::SeqCst) && !self.over() {
            if since.elapsed() < WATCH {
                std::thread::yield_now();
                continue;
            }
            let machine = self.machine();
            if self.is_lent.load(Ordering::SeqCst) && !self.over() {
                drop(self.changed.wait(machine));
            }
        }
        // Whoever executes holds the machine meanwhile.
        let machine = self.machine();
        self.is_lent.store(false, Ordering::SeqCst);
        let lent = std::mem::take(&mut *lock(&self.lent));
        drop(machine);
        match lent {
            LentState::Lent(state, event) => (*state, event),
            LentState::Returned(state) => (*state, None),
            LentState::None => unreachable!("only its own thread takes it back"),
        }
    }

    /// Executes the instructions for which the CPU is lent, as long as they come in a row, and for so long at most.
    pub fn execute_lent(&self, soft: &mut dyn Cpus, most: Duration) {
        let begun = Instant::now();
        let mut last = None;
        while !self.over() && begun.elapsed() < most {
            if self.is_lent.load(Ordering::SeqCst) {
                self.execute(soft);
                last = Some(Instant::now());
            } else if last.is_none_or(|last: Instant| last.elapsed() >= WATCH) {
                return;
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Executes the instruction, and what it takes until KVM can go on from there.
    fn execute(&self, soft: &mut dyn Cpus) {
        let begun = Instant::now();
        let mut machine = self.machine();
        let mut lent = lock(&self.lent);
        let LentState::Lent(state, event) = &*lent else { return };
        soft.put(CPU, state);
        soft.forget_code();
        if let Some(event) = *event {
            soft.raise(CPU, event, &mut machine);
        }
        soft.take_turn(CPU);
        let mut state = CpuState::default();
        for _ in 0..UNTIL_PORTABLE {
            machine.clock().follow(self.hypervisor.clock.ticks(), soft.steps());
            let exit = soft.run(&mut machine, 1);
            self.steps.store(soft.steps(), Ordering::SeqCst);
            self.run_due_events(&mut machine, Some(CPU));
            match exit {
                Exit::Shutdown => self.stop_locked(NativeEnd::Shutdown(CPU)),
                Exit::Defect(what) => self.stop_locked(NativeEnd::Defect(CPU, what)),
                _ => {}
            }
            state = soft.cpu(CPU).map(engine::Cpu::state).unwrap_or_default();
            if self.over() || can_enter(&state) {
                break;
            }
        }
        if !can_enter(&state) {
            self.stop_locked(NativeEnd::Asked);
        }
        let local = &self.cpus[CPU];
        let retired = soft.cpu(CPU).map_or(0, engine::Cpu::retired);
        local.retired.store(retired, Ordering::SeqCst);
        local.halted.store(state.activity == Activity::Halted, Ordering::SeqCst);
        local
            .interrupts_masked
            .store(!state.rflags.interrupt(), Ordering::SeqCst);
        *lent = LentState::Returned(Box::new(state));
        self.counts.emulated.fetch_add(1, Ordering::Relaxed);
        self.counts.add_in_engine(begun.elapsed());
        self.is_lent.store(false, Ordering::SeqCst);
        self.changed.notify_all();
    }
}
