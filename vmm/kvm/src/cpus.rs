//! The software engine's CPUs as this driver needs them: it takes their states to KVM, brings them back, and has an instruction
//! executed that KVM cannot execute.

use engine::{Cpu, CpuState, Event, Exit};
use machine::Machine;

/// The CPUs of a machine in the software engine.
pub trait Cpus {
    /// How many there are.
    fn count(&self) -> usize;
    /// One of them, if there is such a CPU.
    fn cpu(&self, cpu: usize) -> Option<&Cpu>;
    /// Instructions and REP iterations so far, over all CPUs.
    fn steps(&self) -> u64;
    /// Puts a CPU into a state.
    fn put(&mut self, cpu: usize, state: &CpuState);
    /// Somebody else has run the guest: whatever is known of its code may be wrong.
    fn forget_code(&mut self);
    /// Delivers an event that was under way to a CPU.
    fn raise(&mut self, cpu: usize, event: Event, machine: &mut Machine);
    /// Has a CPU be the one that [`Cpus::run`] runs.
    fn take_turn(&mut self, cpu: usize);
    /// Runs the CPU whose turn it is for so many steps at most.
    fn run(&mut self, machine: &mut Machine, budget: u64) -> Exit;
}
