//! The machine: memory, tables, devices, and what the CPUs reach through the bus.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::Write;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use devices::platform::{Effect, Platform, PlatformState, acpi_pm, ioapic, pvpanic, system_control};
use devices::random::Random;
use devices::unit::pt::Pt;
use devices::unit::{Units, UnitsState, cache, rdt};
use devices::virtio::{Device, Taken, block::Medium, interface::TransportState, request::Written};
use engine::bus::{MsrFault, Watch};
use log::debug;
use x86::model::{
    CpuModel,
    topology::{CpuPosition, Topology},
};
use x86::msr::IA32_MISC_ENABLE;

use crate::{
    acpi::Hardware,
    clock::Clock,
    cpu::PerCpu,
    error::StateError,
    memory::Memory,
    pci::{self, BusKind, Root},
    virtio::{self, Interrupt, Virtio},
    watchers::{Seat, Watchers},
};

/// Local APICs start with their registers here (SDM Vol. 3A 11.4.1 "The Local APIC Block Diagram").
const LAPIC: u32 = 0xfee0_0000;

/// IA32_MISC_ENABLE: MONITOR and MWAIT are on, and CPUID.1:ECX says so.
const MONITOR_FSM: u64 = 1 << 18;
const CPUID_MONITOR: u32 = 1 << 3;

/// What this machine's ACPI tables say.
pub const HARDWARE: Hardware = Hardware {
    lapic: LAPIC,
    ioapic: ioapic::IOAPIC as u32,
    ioapic_id: 0,
    cpus: 1,
    pm1a_event: acpi_pm::PM1A_EVENT,
    pm1a_control: acpi_pm::PM1A_CONTROL,
    pm_timer: acpi_pm::PM_TIMER,
    // Full reset by a rising RST_CPU with SYS_RST set.
    reset: (system_control::CF9, 0x06),
    soft_off: acpi_pm::S5,
    sci: acpi_pm::SCI,
    pvpanic: pvpanic::PVPANIC,
    com2: false,
    virtio: 0,
    functions: 0,
};

/// How often the guest has reached for what is not RAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    /// IN and OUT, each repetition.
    pub ports: u64,
    /// Reads and writes of addresses that are not RAM.
    pub mmio: u64,
    /// RDMSR and WRMSR that reached the machine.
    pub msrs: u64,
}

/// The whole state of a machine but for RAM and CPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineState {
    /// The devices.
    pub platform: PlatformState,
    /// Virtual time.
    pub clock: Clock,
    /// What is kept for each CPU.
    pub cpus: Vec<PerCpu>,
    /// The debug and trace units of each CPU.
    pub units: Vec<UnitsState>,
    /// The resource director of each package.
    pub rdt: Vec<rdt::PackageState>,
    /// The model of the caches, once it runs: the last level of each package, and what each CPU has for itself.
    pub caches: Option<(Vec<cache::SharedCache>, Vec<cache::Core>)>,
    /// RDRAND.
    pub random: Random,
    /// The virtio devices, without what the disks hold.
    pub virtio: Vec<TransportState>,
    /// The head of the PCI bus.
    pub pci: pci::RootState,
}

/// Everything around the CPUs. Each of them reaches it over a bus of its own, [`Machine::cpu`].
#[derive(Debug)]
pub struct Machine {
    pub(crate) memory: Memory,
    pub(crate) platform: Platform,
    pub(crate) model: &'static CpuModel,
    pub(crate) clock: Clock,
    pub(crate) cpus: Vec<PerCpu>,
    pub(crate) watchers: Vec<Watchers>,
    topology: Topology,
    /// Of each package.
    pub(crate) rdt: Vec<rdt::Package>,
    /// Nobody watches.
    pub(crate) unwatched: bool,
    /// Of each package.
    pub(crate) last_level: Option<Vec<rdt::LastLevel>>,
    /// Events and unit masks that a guest has counted, that are always 0, and of which this has been said.
    pub(crate) silent_events: BTreeSet<(u8, u16)>,
    pub(crate) random: Random,
    pub(crate) virtio: Virtio,
    pub(crate) pci: Root,
    seed: u64,
    pub(crate) second_serial: bool,
    pub(crate) accesses: Accesses,
    pub(crate) restorations: Arc<AtomicU64>,
}

impl Machine {
    /// A machine at reset with so many CPUs, or with CPUs that are arranged so; the first is the boot CPU.
    pub fn new(
        model: &'static CpuModel,
        cpus: impl Into<Topology>,
        memory: Memory,
        rtc_base: i64,
        seed: u64,
        serial_out: Box<dyn Write + Send>,
    ) -> Self {
        let topology = cpus.into();
        let count = topology.cpus();
        let cpus = (0..count).map(|cpu| PerCpu::new(model, topology.at(cpu)));
        let mut platform = Platform::new(model, cpus.len(), rtc_base, serial_out);
        platform.set_virtual_wire();
        Machine {
            memory,
            platform,
            model,
            clock: Clock::new(model.tsc_khz),
            cpus: cpus.collect(),
            watchers: (0..count).map(|_| Watchers::new(model)).collect(),
            topology,
            rdt: (0..topology.packages(model))
                .map(|_| rdt::Package::new(model))
                .collect(),
            unwatched: false,
            last_level: None,
            silent_events: BTreeSet::new(),
            random: Random::new(seed),
            virtio: Virtio::new(seed, BusKind::Mmio),
            pci: Root::default(),
            seed,
            second_serial: false,
            accesses: Accesses::default(),
            restorations: Arc::default(),
        }
    }

    /// Sets what every CPU's time-stamp counter is ahead of the clock, modulo 2^64. It is the host's, as a hypervisor's TSC offset
    /// is: IA32_TSC_ADJUST stays as it is (SDM Vol. 3B 18.17.3 "Time-Stamp Counter Adjustment").
    pub fn set_tsc_offset(&mut self, offset: u64) {
        for (index, cpu) in self.cpus.iter_mut().enumerate() {
            cpu.tsc_offset = offset;
            if let Some(lapic) = self.platform.lapic_mut(index) {
                lapic.set_tsc_offset(offset);
            }
        }
    }

    /// How many CPUs there are.
    pub fn cpu_count(&self) -> usize {
        self.cpus.len()
    }

    /// RAM.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Whether the guest's kernel has said that it has panicked.
    pub fn has_panicked(&self) -> bool {
        self.platform.has_panicked()
    }

    /// The devices.
    pub fn platform(&mut self) -> &mut Platform {
        &mut self.platform
    }

    /// Has the virtio devices be on this bus. To be called before one is added.
    pub fn set_bus(&mut self, bus: BusKind) {
        self.virtio = Virtio::new(self.seed, bus);
    }

    /// Adds a disk; the answer is its number among the virtio devices. It has to be there before the tables are written.
    ///
    /// # Errors
    /// The machine is full.
    pub fn add_disk(&mut self, medium: Box<dyn Medium>) -> Result<usize, virtio::NoSlot> {
        self.virtio.add_disk(medium)
    }

    /// Adds a virtio device; the answer is its number among them. It has to be there before the tables are written.
    ///
    /// # Errors
    /// The machine is full.
    pub fn add_virtio(&mut self, device: Box<dyn Device>) -> Result<usize, virtio::NoSlot> {
        self.virtio.add(device)
    }

    /// Something has come from outside for a port of a virtio device, after so many steps.
    pub fn virtio_input(&mut self, device: usize, port: u32, bytes: &[u8], steps: u64) -> Taken {
        let now = self.clock.ns(steps);
        let taken = self.virtio.input(device, port, bytes, now, self.memory.mmap());
        self.carry_interrupts();
        taken
    }

    /// Carries to the interrupt controllers what the virtio devices have asked of them.
    pub(crate) fn carry_interrupts(&mut self) {
        for interrupt in self.virtio.take_interrupts() {
            match interrupt {
                Interrupt::Line(gsi, level) => self.platform.set_gsi(gsi, level),
                Interrupt::Message(message) => self.platform.message(message),
            }
        }
    }

    /// Adds a second serial port, which sends to `out`. It has to be there before the tables are written.
    pub fn add_second_serial(&mut self, out: Box<dyn Write + Send>) {
        self.platform.add_serial2(out);
        self.second_serial = true;
    }

    /// What the tables have to say about this machine.
    pub fn hardware(&self) -> Hardware {
        Hardware {
            com2: self.second_serial,
            virtio: self.virtio.count(BusKind::Mmio),
            functions: self.virtio.count(BusKind::Pci),
            cpus: u8::try_from(self.cpus.len()).unwrap_or(u8::MAX),
            ..HARDWARE
        }
    }

    /// RAM that devices have written since the last call: address and length in bytes. The engine has to hear of it before
    /// it runs on.
    pub fn take_written(&mut self) -> std::vec::Drain<'_, Written> {
        self.virtio.take_written()
    }

    /// Virtual time.
    pub fn clock(&mut self) -> &mut Clock {
        &mut self.clock
    }

    /// What the guest has reached for so far.
    pub fn accesses(&self) -> Accesses {
        self.accesses
    }

    /// Lets the devices do what is due after so many steps, and says what they want of the machine.
    pub fn advance(&mut self, steps: u64) -> Vec<Effect> {
        let now = self.clock.ns(steps);
        self.virtio.advance(now, self.memory.mmap());
        self.carry_interrupts();
        self.platform.advance(now);
        self.platform.effects()
    }

    /// The nanosecond of virtual time of the next thing that will happen by itself.
    pub fn next_event(&self) -> Option<u64> {
        self.platform
            .next_event()
            .into_iter()
            .chain(self.virtio.next_event())
            .min()
    }

    /// What the disks have done since the last call, in bytes moved.
    pub fn take_work(&mut self) -> u64 {
        self.virtio.take_work()
    }

    /// The whole state but for RAM and CPUs.
    pub fn state(&self) -> MachineState {
        MachineState {
            platform: self.platform.state(),
            clock: self.clock,
            cpus: self.cpus.clone(),
            units: self.watchers.iter().map(|watchers| watchers.units.state()).collect(),
            rdt: self.rdt.iter().map(rdt::Package::state).collect(),
            caches: self.last_level.as_ref().map(|packages| {
                let own = self
                    .watchers
                    .iter()
                    .filter_map(|watchers| watchers.units.caches.as_ref());
                let last = packages.iter().map(rdt::LastLevel::contents);
                (last.collect(), own.map(|probe| probe.core().clone()).collect())
            }),
            random: self.random,
            virtio: self.virtio.state(),
            pci: self.pci.state(),
        }
    }

    /// [`Machine::state`] with the counters of each CPU as they are at a moment: so many instructions of that CPU, and so many steps of
    /// all.
    pub fn state_at(&self, retired: impl Iterator<Item = u64>, step: u64) -> MachineState {
        let each = self.watchers.iter().zip(retired);
        MachineState {
            units: each
                .map(|(watchers, retired)| watchers.units.state_at(retired, step))
                .collect(),
            ..self.state()
        }
    }

    /// The model of its CPUs.
    pub fn model(&self) -> &'static CpuModel {
        self.model
    }

    /// Takes on a state of a machine of this model. A state of another shape says so, and nothing has changed then.
    pub fn set_state(&mut self, state: &MachineState) -> Result<(), StateError> {
        let before = self.state();
        self.take_on(state).inspect_err(|_| {
            // It came from this machine.
            let _ = self.take_on(&before);
        })
    }

    /// How often the machine has been put into another state: what an observer has heard before belongs to another past.
    pub fn restorations(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.restorations)
    }

    fn take_on(&mut self, state: &MachineState) -> Result<(), StateError> {
        if state.cpus.len() != self.cpus.len() {
            return Err(StateError::Cpus {
                state: state.cpus.len(),
                machine: self.cpus.len(),
            });
        }
        let rows = self.model.msrs.len();
        if let Some(cpu) = state.cpus.iter().find(|cpu| cpu.msrs.len() != rows) {
            return Err(StateError::Msrs {
                state: cpu.msrs.len(),
                model: rows,
            });
        }
        if state.platform.serial2.is_some() != self.second_serial {
            return Err(StateError::SecondSerial);
        }
        self.platform.set_state(&state.platform)?;
        self.virtio.set_state(&state.virtio, self.memory.mmap())?;
        self.pci.set_state(&state.pci);
        let packages = self.rdt.len();
        if state.rdt.len() != packages || state.caches.as_ref().is_some_and(|(last, _)| last.len() != packages) {
            return Err(StateError::Packages {
                state: state.rdt.len(),
                machine: packages,
            });
        }
        for (package, state) in self.rdt.iter_mut().zip(&state.rdt) {
            package.set_state(state).map_err(StateError::Rdt)?;
        }
        self.restorations.fetch_add(1, Ordering::Relaxed);
        self.clock = state.clock;
        self.cpus.clone_from(&state.cpus);
        for (watchers, state) in self.watchers.iter_mut().zip(&state.units) {
            watchers.units.set_state(state);
        }
        self.last_level = None;
        self.watchers
            .iter_mut()
            .for_each(|watchers| watchers.units.caches = None);
        if let Some((last, own)) = &state.caches {
            let last = last.iter().cloned().map(rdt::LastLevel::with);
            self.measure(last.collect(), own.iter().cloned());
        } else {
            self.share_caches();
        }
        self.random = state.random;
        for (index, cpu) in self.cpus.iter().enumerate() {
            if let Some(lapic) = self.platform.lapic_mut(index) {
                lapic.set_tsc_offset(cpu.tsc_offset);
            }
            self.watchers[index].tsc_offset(cpu.tsc_offset);
        }
        Ok(())
    }

    /// Whether the resource director asks what the caches do.
    fn is_measured(&self) -> bool {
        (0..self.cpus.len()).any(|cpu| self.rdt[self.package(cpu)].in_use(&self.cpus[cpu].rdt))
    }

    /// After a write to a register: starts the model of the caches, which all CPUs share, if one of them asks what it does, and tells it
    /// on whose behalf each CPU runs.
    pub(crate) fn share_caches(&mut self) {
        let asked = self.watchers.iter().any(|watchers| watchers.units.caches.is_some());
        if self.last_level.is_none() && (asked || self.is_measured()) {
            let own = cache::Core::of(self.model);
            let last = self.rdt.iter().map(|_| rdt::LastLevel::new(self.model));
            self.measure(last.collect(), std::iter::repeat(own));
        } else if self.last_level.is_some() {
            self.associate();
        }
    }

    /// Starts the model of the caches.
    pub(crate) fn measure(&mut self, last: Vec<rdt::LastLevel>, own: impl Iterator<Item = cache::Core>) {
        for (cpu, core) in (0..self.watchers.len()).zip(own) {
            let last = last[self.package(cpu)].clone();
            self.watchers[cpu].units.caches = Some(rdt::Probe::new(core, last));
        }
        self.last_level = Some(last);
        self.associate();
    }

    /// Tells the model of the caches on whose behalf each CPU runs.
    pub(crate) fn associate(&mut self) {
        let followed = (0..self.cpus.len()).map(|cpu| self.rdt[self.package(cpu)].followed(&self.cpus[cpu].rdt));
        let followed = followed.max().unwrap_or(0);
        for cpu in 0..self.cpus.len() {
            let owners = self.rdt[self.package(cpu)].owners(&self.cpus[cpu].rdt, self.model);
            let units = &mut self.watchers[cpu].units;
            units.caches_followed = followed;
            if let Some(probe) = &mut units.caches {
                probe.set_owners(owners);
            }
        }
    }

    /// Where a CPU stands among its like.
    fn place(&self, cpu: usize) -> CpuPosition {
        self.topology.at(cpu as u32)
    }

    /// The package that a CPU is in.
    pub(crate) fn package(&self, cpu: usize) -> usize {
        self.place(cpu).package(self.model) as usize
    }

    /// Has the host watch a CPU from [`Seat::Trace`], too, or no longer; `false` if there is no such CPU.
    pub fn observe(&mut self, cpu: usize, observer: Option<Box<dyn Watch + Send>>) -> bool {
        self.seat(cpu, Seat::Trace, observer)
    }

    /// Has the host watch a CPU from any seat, or no longer; `false` if there is no such CPU.
    pub fn seat(&mut self, cpu: usize, seat: Seat, observer: Option<Box<dyn Watch + Send>>) -> bool {
        let (Some(watchers), Some(own)) = (self.watchers.get_mut(cpu), self.cpus.get(cpu)) else {
            return false;
        };
        watchers.observe(seat, observer);
        watchers.tsc_offset(own.tsc_offset);
        true
    }

    /// Whether the host watches a CPU in a way that has to see whatever is executed.
    pub fn is_observed(&self) -> bool {
        self.watchers.iter().any(Watchers::is_observed)
    }

    /// Leaves out what watches, the guest's own units among it: for measuring what they cost while they are off. A guest that
    /// switches a unit on finds that nothing happens.
    pub fn leave_out_units(&mut self) {
        self.unwatched = true;
    }

    /// A CPU's debug and trace units; `None` if there is no such CPU.
    pub fn units(&mut self, cpu: usize) -> Option<&mut Units> {
        Some(&mut self.watchers.get_mut(cpu)?.units)
    }

    /// A copy of a CPU's debug and trace units, for looking at them.
    pub fn units_of(&self, cpu: usize) -> Option<Units> {
        Some(self.watchers.get(cpu)?.units.clone())
    }

    /// The registers of a CPU that the machine keeps.
    pub fn per_cpu(&self, cpu: usize) -> Option<&PerCpu> {
        self.cpus.get(cpu)
    }

    /// The resource director of a CPU's package; `None` if there is no such CPU.
    pub fn rdt(&self, cpu: usize) -> Option<&rdt::Package> {
        self.rdt.get(self.package(cpu))
    }

    /// The processor trace of a CPU, if there is such a CPU and its model has one.
    pub fn processor_trace(&self, cpu: usize) -> Option<&Pt> {
        self.watchers.get(cpu)?.units.pt.as_ref()
    }

    /// Whether the CPUs have counters of ours.
    pub fn has_counters(&self) -> bool {
        self.watchers.iter().any(|watchers| watchers.units.has_counters())
    }

    /// Cycles that a CPU can run elsewhere until one of its counters overflows, or fewer; `None`: none does.
    pub fn cycles_left(&self, cpu: usize) -> Option<u64> {
        self.watchers.get(cpu)?.units.cycles_left()
    }

    /// What a CPU's time-stamp counter is ahead of the clock's ticks, modulo 2^64.
    pub fn tsc_offset(&self, cpu: usize) -> u64 {
        self.cpus.get(cpu).map_or(0, |cpu| cpu.tsc_offset)
    }

    pub(crate) fn has_tsc_adjust(&self) -> bool {
        self.model.features().tsc_adjust()
    }

    pub(crate) fn row(&self, msr: u32) -> Option<usize> {
        self.model.msrs.binary_search_by_key(&msr, |row| row.msr).ok()
    }

    /// RDMSR of what is neither a unit's nor the local APIC's.
    pub(crate) fn own_msr(&self, cpu: usize, msr: u32) -> Result<u64, MsrFault> {
        let (own, package) = (&self.cpus[cpu], self.package(cpu));
        let meter: &dyn rdt::Meter = match &self.last_level {
            Some(last) if self.is_measured() => &last[package],
            _ => &rdt::Unmetered,
        };
        match self.rdt[package].read_msr(&own.rdt, msr, meter) {
            Err(MsrFault::Unclaimed) => {}
            answer => return answer,
        }
        match self.row(msr) {
            Some(index) => self.model.msrs[index].read(own.msrs[index]),
            None => {
                debug!("RDMSR of {msr:#x}, which the model does not have");
                Err(MsrFault::GeneralProtection)
            }
        }
    }

    pub(crate) fn monitor_on(&self, cpu: usize) -> bool {
        let row = self.row(IA32_MISC_ENABLE);
        row.is_none_or(|row| self.cpus[cpu].msrs[row] & MONITOR_FSM != 0)
    }

    /// What CPUID shows on a CPU, but for bits that follow the processor's registers.
    pub fn peek_cpuid(&self, cpu: usize, leaf: u32, subleaf: u32) -> [u32; 4] {
        let mut regs = self.model.cpuid_at(leaf, subleaf, self.place(cpu));
        if leaf == 1 {
            let enabled = self.platform.lapic(cpu).is_some_and(|lapic| lapic.enabled());
            regs[3] = regs[3] & !(1 << 9) | u32::from(enabled) << 9;
            if !self.monitor_on(cpu) {
                regs[2] &= !CPUID_MONITOR;
            }
        }
        regs
    }
}

#[cfg(test)]
#[path = "machine_test.rs"]
mod tests;
