//! What a command looks at.

use devices::unit::Units;
use engine::CpuState;
use x86::{cpuid::Features, model::CpuModel};

use super::{Names, number};
use crate::{
    linux::Task,
    vm::{Unmapped, Vm},
};

/// The machine between two steps, and one of its CPUs.
pub struct Scene<'a> {
    /// The machine.
    pub vm: &'a mut Vm,
    /// The CPU.
    pub cpu: usize,
    /// Its registers.
    pub state: CpuState,
    names: Names,
}

impl<'a> Scene<'a> {
    /// `None` if there is no such CPU.
    pub fn new(vm: &'a mut Vm, cpu: usize) -> Option<Self> {
        let state = vm.cpu_state(cpu)?;
        let names = std::mem::take(vm.names());
        Some(Scene { vm, cpu, state, names })
    }

    /// The names, up to date.
    pub fn names(&mut self) -> &mut Names {
        let steps = self.vm.steps();
        self.names.look(self.vm.machine().memory(), steps);
        &mut self.names
    }

    /// The address as a number, with its name if it has one.
    pub fn describe(&mut self, address: u64) -> String {
        let steps = self.vm.steps();
        let memory = self.vm.machine().memory();
        self.names.look(memory, steps);
        self.names.describe(memory, steps, address)
    }

    /// The process that a CPU runs, where that is known.
    pub fn task(&mut self, cpu: usize) -> Option<Task> {
        let steps = self.vm.steps();
        let memory = self.vm.machine().memory();
        self.names.look(memory, steps);
        self.names.task(memory, cpu)
    }

    /// An address: a number, or a symbol, with `+NUMBER` behind it or not.
    pub fn address(&mut self, word: &str) -> Result<u64, String> {
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            return number(word);
        }
        let (symbol, offset) = match word.split_once('+') {
            Some((symbol, offset)) => (symbol, number(offset)?),
            None => (word, 0),
        };
        let steps = self.vm.steps();
        let memory = self.vm.machine().memory();
        self.names.look(memory, steps);
        let address = self.names.address(memory, steps, symbol);
        let address =
            address.ok_or_else(|| format!("{symbol:?} is neither a number nor a symbol that is known here"))?;
        Ok(address.wrapping_add(offset))
    }

    /// The CPU model.
    pub fn model(&mut self) -> &'static CpuModel {
        self.vm.machine().model()
    }

    /// What the model shows.
    pub fn features(&mut self) -> Features {
        self.model().features()
    }

    /// A copy of the CPU's debug and trace units.
    pub fn units(&mut self) -> Units {
        let (cpu, model) = (self.cpu, self.model());
        self.vm.machine().units_of(cpu).unwrap_or_else(|| Units::new(model))
    }

    /// An MSR, if the CPU has it.
    pub fn msr(&mut self, msr: u32) -> Option<u64> {
        self.vm.peek_msr(self.cpu, msr).ok()
    }

    /// Reads linear memory.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Unmapped> {
        self.vm.read_linear(self.cpu, address, bytes)
    }

    /// A number of `width` bytes in linear memory.
    pub fn word(&self, address: u64, width: u64) -> Result<u64, String> {
        let mut bytes = [0; 8];
        let len = width.min(8) as usize;
        self.read(address, &mut bytes[..len]).map_err(|e| e.to_string())?;
        Ok(u64::from_le_bytes(bytes))
    }
}

impl Drop for Scene<'_> {
    fn drop(&mut self) {
        *self.vm.names() = std::mem::take(&mut self.names);
    }
}
