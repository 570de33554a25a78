//! The machine: memory, tables, devices, and what the CPUs reach through the bus.

pub mod acpi;
pub mod boot;
pub mod clock;
pub mod cpu;
pub mod descriptor;
pub mod memory;
pub mod virtio;
pub mod walk;
pub mod watchers;

use std::io::Write;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use devices::platform::{Effect, Platform, PlatformState, acpi_pm, ioapic, system_control};
pub use devices::random;
use devices::unit::pt::{Pt, Served};
use devices::unit::{Units, UnitsState, cache, rdt};
use devices::virtio::{block::Medium, mmio::TransportState, request::Written};
use engine::bus::{Bus, MsrFault, Processor, Watch};
use log::debug;
use x86::model::{CpuModel, topology::Place};
use x86::msr::IA32_MISC_ENABLE;
use x86::seam::Effects;

use self::{
    acpi::Hardware, clock::Clock, cpu::PerCpu, memory::Memory, random::Random, virtio::Virtio, watchers::Seat,
    watchers::Watchers,
};

/// Local APICs start with their registers here (SDM Vol. 3A 11.4.1 "The Local APIC Block Diagram").
const LAPIC: u32 = 0xfee0_0000;

const IA32_TIME_STAMP_COUNTER: u32 = 0x10;
const IA32_TSC_ADJUST: u32 = 0x3b;
const IA32_BIOS_SIGN_ID: u32 = 0x8b;
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
    com2: false,
    virtio: 0,
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
#[derive(Clone, Debug, PartialEq)]
pub struct MachineState {
    /// The devices.
    pub platform: PlatformState,
    /// Virtual time.
    pub clock: Clock,
    /// What is kept for each CPU.
    pub cpus: Vec<PerCpu>,
    /// The debug and trace units of each CPU.
    pub units: Vec<UnitsState>,
    /// The package's resource director.
    pub rdt: rdt::PackageState,
    /// Its model of the caches, once it runs: the last level, and what each CPU has for itself.
    pub caches: Option<(cache::Shared, Vec<cache::Core>)>,
    /// RDRAND.
    pub random: Random,
    /// The virtio devices, without what the disks hold.
    pub virtio: Vec<TransportState>,
}

/// Everything around the CPUs. As their [`Bus`] it answers the one that [`Machine::select`] names: whoever lets a CPU run says
/// which one it is.
#[derive(Debug)]
pub struct Machine {
    memory: Memory,
    platform: Platform,
    model: &'static CpuModel,
    clock: Clock,
    cpus: Vec<PerCpu>,
    watchers: Vec<Watchers>,
    /// The CPU that the bus answers.
    current: usize,
    rdt: rdt::Package,
    /// Nobody watches.
    unwatched: bool,
    last_level: Option<rdt::LastLevel>,
    random: Random,
    virtio: Virtio,
    second_serial: bool,
    accesses: Accesses,
    restorations: Arc<AtomicU64>,
}

impl Machine {
    /// A machine at reset with so many CPUs, at least one; the first is the boot CPU, and the bus answers it.
    pub fn new(
        model: &'static CpuModel,
        cpus: u8,
        memory: Memory,
        rtc_base: i64,
        seed: u64,
        serial_out: Box<dyn Write + Send>,
    ) -> Self {
        let count = cpus.max(1).into();
        let cpus = (0..count).map(|cpu| PerCpu::new(model, Place { cpu, cpus: count }));
        let mut platform = Platform::new(model, cpus.len(), rtc_base, serial_out);
        platform.set_virtual_wire();
        Machine {
            memory,
            platform,
            model,
            clock: Clock::new(model.tsc_khz),
            cpus: cpus.collect(),
            watchers: (0..count).map(|_| Watchers::new(model)).collect(),
            current: 0,
            rdt: rdt::Package::new(model),
            unwatched: false,
            last_level: None,
            random: Random::new(seed),
            virtio: Virtio::new(seed),
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

    /// Has the bus answer this CPU from now on. One that is not there changes nothing.
    pub fn select(&mut self, cpu: usize) {
        if cpu < self.cpus.len() {
            self.current = cpu;
        }
    }

    /// The CPU that the bus answers.
    pub fn current(&self) -> usize {
        self.current
    }

    /// RAM.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The devices.
    pub fn platform(&mut self) -> &mut Platform {
        &mut self.platform
    }

    /// Adds a disk. It has to be there before the tables are written.
    pub fn add_disk(&mut self, medium: Box<dyn Medium>) -> Result<(), virtio::NoSlot> {
        self.virtio.add_disk(medium)
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
            virtio: self.virtio.count(),
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
        self.platform.advance(self.clock.ns(steps));
        self.platform.effects()
    }

    /// The whole state but for RAM and CPUs.
    pub fn state(&self) -> MachineState {
        MachineState {
            platform: self.platform.state(),
            clock: self.clock,
            cpus: self.cpus.clone(),
            units: self.watchers.iter().map(|watchers| watchers.units.state()).collect(),
            rdt: self.rdt.state(),
            caches: self.last_level.as_ref().map(|last| {
                let own = self.watchers.iter().filter_map(|watchers| watchers.probe.as_ref());
                (last.contents(), own.map(|probe| probe.core().clone()).collect())
            }),
            random: self.random,
            virtio: self.virtio.state(),
        }
    }

    /// The model of its CPUs.
    pub fn model(&self) -> &'static CpuModel {
        self.model
    }

    /// Takes on a state of a machine of this model. A state of another shape says so, and nothing has changed then.
    pub fn set_state(&mut self, state: &MachineState) -> Result<(), String> {
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

    fn take_on(&mut self, state: &MachineState) -> Result<(), String> {
        if state.cpus.len() != self.cpus.len() {
            return Err(format!(
                "the state has {} CPUs, the machine has {}",
                state.cpus.len(),
                self.cpus.len()
            ));
        }
        let rows = self.model.msrs.len();
        if let Some(cpu) = state.cpus.iter().find(|cpu| cpu.msrs.len() != rows) {
            return Err(format!("the state has {} plain MSRs, the model {rows}", cpu.msrs.len()));
        }
        if state.platform.serial2.is_some() != self.second_serial {
            return Err("one of state and machine has a second serial port, the other has none".into());
        }
        self.platform.restore(&state.platform).map_err(|e| e.to_string())?;
        self.virtio.restore(&state.virtio, self.memory.mmap())?;
        self.rdt.restore(&state.rdt)?;
        self.restorations.fetch_add(1, Ordering::Relaxed);
        self.clock = state.clock;
        self.cpus.clone_from(&state.cpus);
        for (watchers, state) in self.watchers.iter_mut().zip(&state.units) {
            watchers.units.set_state(state);
        }
        self.last_level = None;
        self.watchers.iter_mut().for_each(|watchers| watchers.probe = None);
        if let Some((last, own)) = &state.caches {
            self.measure(rdt::LastLevel::with(last.clone()), own.iter().cloned());
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

    /// Starts the model of the caches.
    fn measure(&mut self, last: rdt::LastLevel, own: impl Iterator<Item = cache::Core>) {
        for (watchers, core) in self.watchers.iter_mut().zip(own) {
            watchers.probe = Some(rdt::Probe::new(core, last.clone()));
        }
        self.last_level = Some(last);
        self.associate();
    }

    /// Tells the model of the caches on whose behalf each CPU runs.
    fn associate(&mut self) {
        let ways = cache::Geometry::of(self.model, 3).ways;
        for (watchers, cpu) in self.watchers.iter_mut().zip(&self.cpus) {
            if let Some(probe) = &mut watchers.probe {
                probe.set_owner(self.rdt.owner(&cpu.rdt, ways));
            }
        }
    }

    /// Where a CPU stands among its like.
    fn place(&self, cpu: usize) -> Place {
        Place {
            cpu: cpu as u32,
            cpus: self.cpus.len() as u32,
        }
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

    /// The debug and trace units of the CPU that the bus answers.
    pub fn units(&mut self) -> &mut Units {
        &mut self.watchers[self.current].units
    }

    /// A copy of a CPU's debug and trace units, for looking at them.
    pub fn units_of(&self, cpu: usize) -> Option<Units> {
        Some(self.watchers.get(cpu)?.units.clone())
    }

    /// The registers of a CPU that the machine keeps.
    pub fn per_cpu(&self, cpu: usize) -> Option<&PerCpu> {
        self.cpus.get(cpu)
    }

    /// The resource director.
    pub fn rdt(&self) -> &rdt::Package {
        &self.rdt
    }

    /// Whether something that watches the CPU that the bus answers has to see each of its instructions. `times`: whoever asks
    /// tells [how long](Machine::elapsed) the CPU runs elsewhere, and RDPMC comes here.
    pub fn needs_instructions(&mut self, times: bool, cpu: &mut dyn Processor) -> bool {
        let watchers = &mut self.watchers[self.current];
        watchers.probe.is_some() || watchers.units.needs_instructions(times, cpu)
    }

    /// Whether the CPUs have counters of ours.
    pub fn has_counters(&self) -> bool {
        self.watchers.iter().any(|watchers| watchers.units.has_counters())
    }

    /// Cycles that a CPU can run elsewhere until one of its counters overflows, or fewer; `None`: none does.
    pub fn cycles_left(&self, cpu: usize) -> Option<u64> {
        self.watchers.get(cpu)?.units.cycles_left()
    }

    /// The CPU that the bus answers has run elsewhere for so many cycles, and is in HLT now or not.
    pub fn elapsed(&mut self, cycles: u64, halted: bool, cpu: &mut dyn Processor) {
        self.watchers[self.current].units.elapsed(cycles, halted, cpu);
    }

    /// The processor trace of the CPU that the bus answers.
    pub fn processor_trace(&self) -> Option<&Pt> {
        self.watchers[self.current].units.pt.as_ref()
    }

    /// What a host's tracer can do from now on for the CPU that the bus answers.
    pub fn serve_trace(&mut self, served: Option<Served>) {
        if let Some(pt) = &mut self.watchers[self.current].units.pt {
            pt.serve(served);
        }
    }

    /// What a host's tracer does with the processor trace of the CPU that the bus answers. An interrupt that this asks for is its
    /// local APIC's.
    pub fn host_trace(&mut self, cpu: &mut dyn Processor, f: impl FnOnce(&mut Pt, &mut dyn Processor) -> Effects) {
        if self.units().host_trace(cpu, f).pmi {
            self.pmi();
        }
    }

    /// Whether a write of this register comes before RDPMC, as far as one can tell.
    pub fn precedes_rdpmc(&self, msr: u32) -> bool {
        self.watchers[self.current].units.precedes_rdpmc(msr)
    }

    /// What a CPU's time-stamp counter is ahead of the clock's ticks, modulo 2^64.
    pub fn tsc_offset(&self, cpu: usize) -> u64 {
        self.cpus.get(cpu).map_or(0, |cpu| cpu.tsc_offset)
    }

    /// Does what may write the local APIC's LVTPC, and tells the units when that entry has been unmasked.
    fn with_performance_entry<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        let masked = |machine: &Self| {
            let lapic = machine.platform.lapic(machine.current);
            lapic.is_some_and(|lapic| lapic.performance_masked())
        };
        let before = masked(self);
        let result = f(self);
        if before && !masked(self) && self.units().performance_unmasked().pmi {
            self.pmi();
        }
        result
    }

    /// What is kept for the CPU that the bus answers.
    fn cpu(&mut self) -> &mut PerCpu {
        &mut self.cpus[self.current]
    }

    /// Adds to the TSC of the CPU that the bus answers, modulo 2^64.
    fn move_tsc(&mut self, added: u64) {
        let cpu = self.cpu();
        cpu.tsc_offset = cpu.tsc_offset.wrapping_add(added);
        let offset = cpu.tsc_offset;
        if let Some(lapic) = self.platform.lapic_mut(self.current) {
            lapic.set_tsc_offset(offset);
        }
        self.watchers[self.current].tsc_offset(offset);
    }

    fn has_tsc_adjust(&self) -> bool {
        self.model.features().tsc_adjust()
    }

    fn row(&self, msr: u32) -> Option<usize> {
        self.model.msrs.binary_search_by_key(&msr, |row| row.msr).ok()
    }
}

impl Machine {
    /// RDMSR, `now` steps into the run.
    fn rdmsr(&mut self, msr: u32, now: u64) -> Result<u64, MsrFault> {
        self.accesses.msrs += 1;
        match msr {
            IA32_TIME_STAMP_COUNTER => return Ok(self.tsc(now)),
            IA32_TSC_ADJUST if self.has_tsc_adjust() => return Ok(self.cpu().tsc_adjust),
            _ => {}
        }
        match self.platform.read_msr(self.current, msr, self.clock.ns(now)) {
            Err(MsrFault::Unclaimed) => {}
            answer => return answer,
        }
        self.own_msr(self.current, msr)
    }

    /// RDMSR of what is neither a unit's nor the local APIC's.
    fn own_msr(&self, cpu: usize, msr: u32) -> Result<u64, MsrFault> {
        let own = &self.cpus[cpu];
        let meter: &dyn rdt::Meter = match &self.last_level {
            Some(last) => last,
            None => &rdt::Unmetered,
        };
        match self.rdt.read_msr(&own.rdt, msr, meter) {
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

    fn monitor_on(&self, cpu: usize) -> bool {
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

    /// What RDMSR would read on the CPU that the bus answers, `view` being that CPU: nothing changes by it. Registers that the
    /// processor holds itself are not among them.
    ///
    /// # Errors
    /// The instruction would be #GP.
    pub fn peek_msr(&self, msr: u32, view: &mut dyn Processor) -> Result<u64, MsrFault> {
        let (cpu, now) = (self.current, view.step());
        // A register may bring itself up to date when it is read: a copy does.
        match self.watchers[cpu].units.clone().read_msr(msr, view) {
            Err(MsrFault::Unclaimed) => {}
            answer => return answer,
        }
        match msr {
            IA32_TIME_STAMP_COUNTER => return Ok(self.clock.ticks(now).wrapping_add(self.cpus[cpu].tsc_offset)),
            IA32_TSC_ADJUST if self.has_tsc_adjust() => return Ok(self.cpus[cpu].tsc_adjust),
            _ => {}
        }
        let lapic = self.platform.lapic(cpu).cloned();
        match lapic.map(|mut lapic| lapic.read_msr(msr, self.clock.ns(now))) {
            None | Some(Err(MsrFault::Unclaimed)) => self.own_msr(cpu, msr),
            Some(answer) => answer,
        }
    }

    /// WRMSR.
    fn wrmsr(&mut self, msr: u32, value: u64, now: u64) -> Result<(), MsrFault> {
        self.accesses.msrs += 1;
        match msr {
            // SDM Vol. 3B 18.17.3 "Time-Stamp Counter Adjustment": what is added to one is added to the other.
            IA32_TIME_STAMP_COUNTER => {
                let value = if self.model.tsc_write_is_low_half() {
                    value & 0xFFFF_FFFF
                } else {
                    value
                };
                let added = value.wrapping_sub(self.tsc(now));
                let cpu = self.cpu();
                cpu.tsc_adjust = cpu.tsc_adjust.wrapping_add(added);
                self.move_tsc(added);
                return Ok(());
            }
            IA32_TSC_ADJUST if self.has_tsc_adjust() => {
                let added = value.wrapping_sub(self.cpu().tsc_adjust);
                self.cpu().tsc_adjust = value;
                self.move_tsc(added);
                return Ok(());
            }
            _ => {}
        }
        match self.platform.write_msr(self.current, msr, value, self.clock.ns(now)) {
            Err(MsrFault::Unclaimed) => {}
            answer => return answer,
        }
        match self.rdt.write_msr(&mut self.cpus[self.current].rdt, msr, value) {
            Err(MsrFault::Unclaimed) => {}
            Ok(()) => {
                if self.last_level.is_some() {
                    self.associate();
                } else if self.rdt.in_use(&self.cpus[self.current].rdt) {
                    let own = cache::Core::of(self.model);
                    self.measure(rdt::LastLevel::new(self.model), std::iter::repeat(own));
                }
                return Ok(());
            }
            answer => return answer,
        }
        let Some(index) = self.row(msr) else {
            debug!("WRMSR of {value:#x} to {msr:#x}, which the model does not have");
            return Err(MsrFault::GeneralProtection);
        };
        let held = self.cpu().msrs[index];
        let written = self.model.msrs[index].write(held, value);
        if written.is_err() {
            debug!(
                "WRMSR of {value:#x} to {}, which refuses it",
                self.model.msrs[index].name
            );
        }
        self.cpu().msrs[index] = written?;
        Ok(())
    }
}

impl Bus for Machine {
    fn read(&mut self, gpa: u64, size: u8, now: u64) -> u64 {
        self.accesses.mmio += 1;
        if let Some(value) = self.virtio.read(gpa, size) {
            return value;
        }
        self.platform.mmio_read(self.current, gpa, size, self.clock.ns(now))
    }

    fn write(&mut self, gpa: u64, size: u8, value: u64, now: u64) {
        self.accesses.mmio += 1;
        if let Some((gsi, level)) = self.virtio.write(gpa, size, value, self.memory.mmap()) {
            self.platform.set_gsi(gsi, level);
            return;
        }
        self.with_performance_entry(|machine| {
            machine
                .platform
                .mmio_write(machine.current, gpa, size, value, machine.clock.ns(now));
        });
    }

    fn port_read(&mut self, port: u16, size: u8, now: u64) -> u32 {
        self.accesses.ports += 1;
        self.clock.port_access();
        self.platform.port_read(port, size, self.clock.ns(now))
    }

    fn port_write(&mut self, port: u16, size: u8, value: u32, now: u64) {
        self.accesses.ports += 1;
        self.clock.port_access();
        self.platform.port_write(port, size, value, self.clock.ns(now));
    }

    fn read_msr(&mut self, msr: u32, cpu: &mut dyn Processor) -> Result<u64, MsrFault> {
        match self.units().read_msr(msr, cpu) {
            Err(MsrFault::Unclaimed) => self.rdmsr(msr, cpu.step()),
            answer => {
                self.accesses.msrs += 1;
                answer
            }
        }
    }

    fn write_msr(&mut self, msr: u32, value: u64, cpu: &mut dyn Processor) -> Result<(), MsrFault> {
        match self.units().write_msr(msr, value, cpu) {
            Err(MsrFault::Unclaimed) => self.with_performance_entry(|machine| machine.wrmsr(msr, value, cpu.step())),
            answer => {
                self.accesses.msrs += 1;
                answer
            }
        }
    }

    fn read_counter(&mut self, index: u32, cpu: &mut dyn Processor) -> Result<u64, MsrFault> {
        self.units().read_counter(index, cpu)
    }

    fn watch(&mut self) -> Option<&mut dyn Watch> {
        let watchers = &mut self.watchers[self.current];
        (!self.unwatched).then_some(watchers as _)
    }

    fn pmi(&mut self) {
        if let Some(lapic) = self.platform.lapic_mut(self.current) {
            lapic.pmi();
        }
    }

    fn save_component(&mut self, component: u32, image: &mut [u8], length: u8, cpu: &mut dyn Processor) -> bool {
        self.units().save_component(component, image, length, cpu)
    }

    fn load_component(
        &mut self,
        component: u32,
        image: Option<&[u8]>,
        length: u8,
        cpu: &mut dyn Processor,
    ) -> Result<(), MsrFault> {
        self.units().load_component(component, image, length, cpu)
    }

    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4] {
        if leaf == 1 {
            // Loads the microcode revision (SDM Vol. 3A 10.11.7.1 "Determining the Signature").
            if let Some(index) = self.row(IA32_BIOS_SIGN_ID) {
                self.cpu().msrs[index] = u64::from(self.model.microcode) << 32;
            }
        }
        self.peek_cpuid(self.current, leaf, subleaf)
    }

    fn monitor_enabled(&mut self) -> bool {
        self.monitor_on(self.current)
    }

    fn tsc(&mut self, now: u64) -> u64 {
        self.clock.ticks(now).wrapping_add(self.cpu().tsc_offset)
    }

    fn cr8(&mut self) -> u64 {
        self.platform.cr8(self.current).into()
    }

    fn set_cr8(&mut self, value: u64) {
        self.platform.set_cr8(self.current, value as u8);
    }

    fn random(&mut self) -> u64 {
        self.random.draw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::model::{HASWELL, SKYLAKE_SERVER, WESTMERE};
    use x86::msr::{IA32_PQR_ASSOC, IA32_QM_CTR, IA32_QM_EVTSEL};
    use x86::seam::{Access, AccessKind};

    fn machine() -> Machine {
        Machine::new(
            &WESTMERE,
            1,
            Memory::new(2 << 20).unwrap(),
            0,
            7,
            Box::new(std::io::sink()),
        )
    }

    // covers: 2/devices-unclaimed
    #[test]
    fn unclaimed_ports_and_addresses_read_all_ones() {
        let mut machine = machine();
        for (size, ones) in [(1, 0xff), (2, 0xffff), (4, 0xffff_ffff)] {
            assert_eq!(machine.port_read(0x2f8, size, 0), ones);
            assert_eq!(machine.read(0xd000_0000, size, 0), u64::from(ones));
        }
        assert_eq!(machine.read(0xd000_0000, 8, 0), u64::MAX);
        machine.write(0xd000_0000, 8, 1, 0);
        machine.port_write(0x2f8, 1, 1, 0);
        assert_eq!(
            machine.accesses(),
            Accesses {
                ports: 4,
                mmio: 5,
                msrs: 0
            }
        );
    }

    // covers: 2/cpu-msr
    #[test]
    fn msrs_come_from_the_apic_the_model_or_fault() {
        const GP: MsrFault = MsrFault::GeneralProtection;
        let mut machine = machine();
        assert_eq!(machine.rdmsr(0x1b, 0).unwrap() & !0xfff, 0xfee0_0000, "IA32_APIC_BASE");
        for (index, row) in WESTMERE.msrs.iter().enumerate() {
            if row.msr != IA32_BIOS_SIGN_ID {
                assert_eq!(machine.rdmsr(row.msr, 0), Ok(row.reset), "{} ({index})", row.name);
            }
        }
        assert_eq!(machine.rdmsr(0x277, 0), Ok(0x0007_0406_0007_0406), "IA32_PAT");
        machine.wrmsr(0x277, 0x0606, 0).unwrap();
        assert_eq!(machine.rdmsr(0x277, 0), Ok(0x0606));
        assert_eq!(machine.wrmsr(0x277, 2, 0), Err(GP), "no such memory type");
        assert_eq!(machine.wrmsr(0xfe, 0, 0), Err(GP), "IA32_MTRRCAP is read-only");
        for absent in [0x3b, 0x48, 0x6e0, 0xc001_1029, 0xffff_ffff] {
            assert_eq!(machine.rdmsr(absent, 0), Err(GP), "{absent:#x}");
            assert_eq!(machine.wrmsr(absent, 0, 0), Err(GP), "{absent:#x}");
        }
    }

    // covers: 2/cpu-msr
    #[test]
    fn the_tsc_counts_steps_from_where_it_was_set() {
        let mut machine = machine();
        assert_eq!(machine.tsc(1000), 1000);
        machine.wrmsr(IA32_TIME_STAMP_COUNTER, 5, 1000).unwrap();
        assert_eq!(machine.tsc(1000), 5);
        assert_eq!(machine.rdmsr(IA32_TIME_STAMP_COUNTER, 1010), Ok(15));
        machine.port_read(0x80, 1, 1010);
        let microsecond = u64::from(WESTMERE.tsc_khz).div_ceil(1000);
        assert_eq!(machine.tsc(1010), 15 + microsecond, "what a port access takes");
    }

    // covers: 4/tsc-low-half
    #[test]
    fn the_oldest_parts_write_half_of_the_tsc() {
        for (model, reads) in [
            (&x86::model::P6, 0x9ABC),
            (&x86::model::NETBURST, 0x9ABC),
            (&WESTMERE, 0x1234_0000_9ABC),
        ] {
            let memory = Memory::new(2 << 20).unwrap();
            let mut machine = Machine::new(model, 1, memory, 0, 1, Box::new(std::io::sink()));
            machine.wrmsr(IA32_TIME_STAMP_COUNTER, 0x1234_0000_9ABC, 10).unwrap();
            assert_eq!(machine.tsc(10), reads, "{}", model.name);
        }
    }

    // covers: 4/tsc-offset
    #[test]
    fn an_offset_of_the_hosts_is_no_adjustment_of_the_guests() {
        let memory = Memory::new(2 << 20).unwrap();
        let mut machine = Machine::new(&HASWELL, 2, memory, 0, 1, Box::new(std::io::sink()));
        machine.set_tsc_offset(u64::MAX - 9);
        for cpu in 0..2 {
            machine.select(cpu);
            assert_eq!((machine.tsc(0), machine.tsc(10)), (u64::MAX - 9, 0), "it wraps");
            assert_eq!(machine.rdmsr(IA32_TSC_ADJUST, 10), Ok(0));
            // What the guest adds stands on top of it.
            machine.wrmsr(IA32_TSC_ADJUST, 5, 10).unwrap();
            assert_eq!(machine.tsc(10), 5);
            machine.wrmsr(IA32_TIME_STAMP_COUNTER, 100, 10).unwrap();
            assert_eq!(machine.rdmsr(IA32_TSC_ADJUST, 10), Ok(100));
            machine.wrmsr(IA32_TSC_ADJUST, 0, 10).unwrap();
            assert_eq!(machine.tsc(10), 0);
        }
    }

    // covers: 2/cpu-cpuid
    #[test]
    fn cpuid_is_the_models_with_the_apics_state() {
        let mut machine = machine();
        for row in WESTMERE.cpuid.iter().filter(|row| row.leaf != 1) {
            assert_eq!(machine.cpuid(row.leaf, row.subleaf.unwrap_or(0)), row.regs);
        }
        assert_eq!(machine.cpuid(1, 0)[3] >> 9 & 1, 1);
        machine.wrmsr(IA32_BIOS_SIGN_ID, 0, 0).unwrap();
        machine.cpuid(1, 0);
        assert_eq!(
            machine.rdmsr(IA32_BIOS_SIGN_ID, 0),
            Ok(u64::from(WESTMERE.microcode) << 32)
        );
        // IA32_APIC_BASE.EN off.
        let base = machine.rdmsr(0x1b, 0).unwrap();
        machine.wrmsr(0x1b, base & !(1 << 11), 0).unwrap();
        assert_eq!(machine.cpuid(1, 0)[3] >> 9 & 1, 0);
    }

    #[test]
    fn the_state_goes_out_and_comes_back() {
        let mut a = machine();
        a.wrmsr(IA32_TIME_STAMP_COUNTER, 1 << 40, 10).unwrap();
        a.wrmsr(0x277, 0x0606, 0).unwrap();
        a.port_write(0x43, 1, 0x36, 20);
        a.random();
        let mut b = Machine::new(
            &WESTMERE,
            1,
            Memory::new(2 << 20).unwrap(),
            99,
            1,
            Box::new(std::io::sink()),
        );
        b.set_state(&a.state()).unwrap();
        assert_eq!(a.state(), b.state());
        assert_eq!((a.random(), a.tsc(50)), (b.random(), b.tsc(50)));
        let state = a.state();
        for cpus in [
            vec![],
            vec![state.cpus[0].clone(); 2],
            vec![PerCpu::new(&HASWELL, Place::ALONE)],
        ] {
            b.set_state(&MachineState { cpus, ..state.clone() }).unwrap_err();
        }
    }

    // covers: 4/rdt-occupancy
    #[test]
    fn the_caches_are_modelled_from_the_first_association_on() {
        let new = || {
            let memory = Memory::new(2 << 20).unwrap();
            Machine::new(&SKYLAKE_SERVER, 2, memory, 0, 1, Box::new(std::io::sink()))
        };
        let (mut a, mut b) = (new(), new());
        a.wrmsr(IA32_PQR_ASSOC, 0, 0).unwrap();
        a.wrmsr(IA32_QM_EVTSEL, 0, 0).unwrap();
        assert!(a.state().caches.is_none());
        a.select(1);
        a.wrmsr(IA32_QM_EVTSEL, 3 << 32 | 1, 0).unwrap();
        assert_eq!(a.rdmsr(IA32_QM_CTR, 0), Ok(0));
        a.wrmsr(IA32_PQR_ASSOC, 3, 0).unwrap();
        let access = |line: u64| Access {
            address: line * 64,
            size: 8,
            kind: AccessKind::Read,
            ip: 0,
        };
        for line in 0..0x18000 / 64 * 5 {
            a.watchers[1].probe.as_mut().unwrap().access(&access(line), Some);
        }
        assert_eq!(a.rdmsr(IA32_QM_CTR, 0), Ok(5));
        b.set_state(&a.state()).unwrap();
        b.select(1);
        assert_eq!(b.rdmsr(IA32_QM_CTR, 0), Ok(5));
        assert_eq!(a.state(), b.state());
        b.set_state(&new().state()).unwrap();
        assert_eq!(b.state(), new().state());
    }

    // covers: 2/loader-acpi-power
    #[test]
    fn what_the_tables_say_powers_off_and_resets() {
        let mut machine = machine();
        let sleep = u32::from(HARDWARE.soft_off) << 10 | 1 << 13;
        machine.port_write(HARDWARE.pm1a_control, 2, sleep, 0);
        assert_eq!(machine.advance(0), [Effect::PowerOff]);
        let (port, value) = HARDWARE.reset;
        machine.port_write(port, 1, value.into(), 0);
        assert_eq!(machine.advance(0), [Effect::Reset]);
        let first = machine.port_read(HARDWARE.pm_timer, 4, 0);
        let later = machine.port_read(HARDWARE.pm_timer, 4, u64::from(WESTMERE.tsc_khz) * 1000);
        assert!(
            (3_579_540..3_579_560).contains(&(later - first)),
            "3.579545 MHz: {}",
            later - first
        );
    }
}
