//! What a command looks at.

use devices::unit::Units;
use engine::CpuState;
use x86::{cpuid::Features, model::CpuModel};

use super::{arguments::number, error::MonitorError};
use crate::front::names::GuestNames;
use crate::vm::LastBranch;
use crate::{front::controls::Controls, vm::Unmapped};
use machine::memory::Memory;
use trace::linux::Task;

/// The machine between two steps, and one of its CPUs.
pub struct Scene<'a, 'r> {
    /// The run.
    pub controls: &'a mut Controls<'r>,
    /// The CPU.
    pub cpu: usize,
    /// Its registers.
    pub state: CpuState,
    /// Whoever asks may name files that are written.
    pub files: bool,
}

/// The CPU runs a guest of a VMM in the machine.
fn runs_guest(state: &CpuState) -> bool {
    state.vmx.as_ref().is_some_and(|vmx| vmx.guest.is_some())
}

impl<'a, 'r> Scene<'a, 'r> {
    /// `None` if there is no such CPU. `files`: whoever asks may name files that are written.
    pub fn new(controls: &'a mut Controls<'r>, cpu: usize, files: bool) -> Option<Self> {
        let state = controls.run.cpu_state(cpu)?;
        Some(Scene {
            controls,
            cpu,
            state,
            files,
        })
    }

    /// Has the run go to a step and stand there. `false`: on KVM nobody counts steps.
    pub fn go_to(&mut self, steps: u64) -> bool {
        let counts = !self.controls.run.is_hosted();
        self.controls.go_to = Some(steps).filter(|_| counts);
        counts
    }

    /// The names, up to date, with the memory and the step that they are of.
    fn looked(&mut self) -> (&mut GuestNames, &Memory, u64) {
        let Controls { run, names, .. } = &mut *self.controls;
        let steps = run.steps();
        let memory = run.machine().memory();
        names.look(memory, steps);
        (names, memory, steps)
    }

    /// The names, up to date.
    pub fn names(&mut self) -> &mut GuestNames {
        self.looked().0
    }

    /// The address as a number, with its name if it has one.
    pub fn describe(&mut self, address: u64) -> String {
        let guest = runs_guest(&self.state);
        self.describe_as(guest, address)
    }

    /// The same where a CPU stands.
    pub fn describe_place(&mut self, state: &CpuState) -> String {
        self.describe_as(runs_guest(state), state.linear_rip())
    }

    /// `guest`: of a guest in VMX non-root operation, at whose addresses the names that are known are of something else.
    fn describe_as(&mut self, guest: bool, address: u64) -> String {
        if guest {
            return format!("{address:#x} of the VMX guest");
        }
        let (names, memory, steps) = self.looked();
        names.describe(memory, steps, address)
    }

    /// The process that a CPU runs, where that is known.
    pub fn task(&mut self, cpu: usize) -> Option<Task> {
        let (names, memory, _) = self.looked();
        names.task(memory, cpu)
    }

    /// An address: a number, or a symbol, with `+NUMBER` behind it or not.
    pub fn address(&mut self, word: &str) -> Result<u64, MonitorError> {
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return number(word);
        }
        let (symbol, offset) = match word.split_once('+') {
            Some((symbol, offset)) => (symbol, number(offset)?),
            None => (word, 0),
        };
        let (names, memory, steps) = self.looked();
        let address = names.address(memory, steps, symbol);
        let address = address.ok_or_else(|| MonitorError::Symbol(symbol.into()))?;
        Ok(address.wrapping_add(offset))
    }

    /// The CPU model.
    pub fn model(&mut self) -> &'static CpuModel {
        self.controls.run.machine().model()
    }

    /// What the model shows.
    pub fn features(&mut self) -> Features {
        self.model().features()
    }

    /// A copy of the CPU's debug and trace units.
    pub fn units(&mut self) -> Units {
        let (cpu, model) = (self.cpu, self.model());
        self.controls
            .run
            .machine()
            .units_of(cpu)
            .unwrap_or_else(|| Units::new(model))
    }

    /// The CPU's last branches, if they are recorded here.
    pub fn last_branches(&mut self) -> Option<Vec<LastBranch>> {
        self.controls.run.last_branches(self.cpu)
    }

    /// An MSR, if the CPU has it.
    pub fn msr(&mut self, msr: u32) -> Option<u64> {
        self.controls.run.peek_msr(self.cpu, msr).ok()
    }

    /// Reads linear memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Unmapped> {
        self.controls.run.read_linear(self.cpu, address, bytes)
    }

    /// A number of `width` bytes in linear memory.
    pub fn word(&self, address: u64, width: u64) -> Result<u64, Unmapped> {
        let mut bytes = [0; 8];
        let len = width.min(8) as usize;
        self.read(address, &mut bytes[..len])?;
        Ok(u64::from_le_bytes(bytes))
    }
}
