//! What one CPU reaches outside itself: ports, device memory, MSRs, CPUID, its units.

use devices::pci::Place;
use devices::unit::Units;
use devices::unit::pt::{Pt, Served};
use engine::bus::{Bus, MsrFault, Processor, Watch};
use log::{debug, info};
use x86::msr::{
    IA32_BIOS_SIGN_ID, IA32_QM_CTR, IA32_QM_EVTSEL, IA32_TIME_STAMP_COUNTER, IA32_TSC_ADJUST, IA32_UMWAIT_CONTROL,
};
use x86::watch::Effects;

use crate::{cpu::PerCpu, machine::Machine, pci::Target};

impl Machine {
    /// Reads configuration space: 1, 2 or 4 bytes.
    fn read_config(&mut self, place: Place, size: u8) -> u32 {
        if (place.bus, place.function) == (0, 0) {
            return self.pci.bridge.read(place.offset, size);
        }
        let value = self.virtio.read_config(place, size);
        self.carry_interrupts();
        value
    }

    /// Writes configuration space, `now` steps into the run.
    fn write_config(&mut self, place: Place, size: u8, value: u32, now: u64) {
        if (place.bus, place.function) == (0, 0) {
            self.pci.bridge.write(place.offset, size, value);
            return;
        }
        let now = self.clock.ns(now);
        self.virtio.write_config(place, size, value, now, self.memory.mmap());
        self.carry_interrupts();
    }

    /// The bus of one CPU.
    ///
    /// # Panics
    /// There is no such CPU: [`Machine::cpu_count`] says how many there are.
    pub fn cpu(&mut self, cpu: usize) -> CpuBus<'_> {
        assert!(cpu < self.cpu_count(), "the machine has no CPU {cpu}");
        CpuBus { machine: self, cpu }
    }
}

/// A machine as one of its CPUs reaches it. What it reaches is the CPU's own (units, local APIC, plain MSRs) or shared by all of
/// them (devices, clock, the resource director's masks).
#[derive(Debug)]
pub struct CpuBus<'m> {
    machine: &'m mut Machine,
    cpu: usize,
}

impl CpuBus<'_> {
    /// The machine that all CPUs share.
    pub fn machine(&mut self) -> &mut Machine {
        self.machine
    }

    /// The number of the CPU.
    pub fn index(&self) -> usize {
        self.cpu
    }

    /// Says once of each event that a guest has enabled and that is always 0.
    fn tell_of_event(&mut self, msr: u32, value: u64) {
        let pmu = self.units().pmu.as_ref();
        let Some((event, umask)) = pmu.and_then(|pmu| pmu.counts_nothing(msr, value)) else {
            return;
        };
        if self.machine.silent_events.insert((event, umask)) {
            info!("the guest counts event {event:02X}H with unit mask {umask:02X}H, which is always 0 here");
        }
    }

    /// The debug and trace units of this CPU.
    pub fn units(&mut self) -> &mut Units {
        &mut self.machine.watchers[self.cpu].units
    }

    /// Whether something that watches this CPU has to see each of its instructions. `times`: whoever asks
    /// tells [how long](CpuBus::elapsed) the CPU runs elsewhere, and RDPMC comes here.
    pub fn needs_instructions(&mut self, times: bool, cpu: &mut dyn Processor) -> bool {
        self.units().needs_instructions(times, cpu)
    }

    /// This CPU has run elsewhere for so many cycles, and is in HLT now or not.
    pub fn elapsed(&mut self, cycles: u64, halted: bool, cpu: &mut dyn Processor) {
        self.machine.watchers[self.cpu].units.elapsed(cycles, halted, cpu);
    }

    /// What a host's tracer can do from now on for this CPU.
    pub fn serve_trace(&mut self, served: Option<Served>) {
        if let Some(pt) = &mut self.machine.watchers[self.cpu].units.pt {
            pt.serve(served);
        }
    }

    /// What a host's tracer does with the processor trace of this CPU. An interrupt that this asks for is its
    /// local APIC's.
    pub fn host_trace(&mut self, cpu: &mut dyn Processor, f: impl FnOnce(&mut Pt, &mut dyn Processor) -> Effects) {
        if self.units().host_trace(cpu, f).pmi {
            self.pmi();
        }
    }

    /// Whether a write of this register comes before RDPMC, as far as one can tell.
    pub fn precedes_rdpmc(&self, msr: u32) -> bool {
        self.machine.watchers[self.cpu].units.precedes_rdpmc(msr)
    }

    /// Does what may write the local APIC's LVTPC, and tells the units when that entry has been unmasked.
    fn with_performance_entry<T>(&mut self, f: impl FnOnce(&mut Self) -> T) -> T {
        let masked = |bus: &Self| {
            let lapic = bus.machine.platform.lapic(bus.cpu);
            lapic.is_some_and(|lapic| lapic.performance_masked())
        };
        let before = masked(self);
        let result = f(self);
        if before && !masked(self) && self.units().performance_unmasked().pmi {
            self.pmi();
        }
        result
    }

    /// What is kept for this CPU.
    fn registers(&mut self) -> &mut PerCpu {
        &mut self.machine.cpus[self.cpu]
    }

    /// Adds to the TSC of this CPU, modulo 2^64.
    fn move_tsc(&mut self, added: u64) {
        let cpu = self.registers();
        cpu.tsc_offset = cpu.tsc_offset.wrapping_add(added);
        let offset = cpu.tsc_offset;
        if let Some(lapic) = self.machine.platform.lapic_mut(self.cpu) {
            lapic.set_tsc_offset(offset);
        }
        self.machine.watchers[self.cpu].tsc_offset(offset);
    }

    /// RDMSR, `now` steps into the run.
    pub(crate) fn rdmsr(&mut self, msr: u32, now: u64) -> Result<u64, MsrFault> {
        self.machine.accesses.msrs += 1;
        match msr {
            IA32_TIME_STAMP_COUNTER => return Ok(self.tsc(now)),
            IA32_TSC_ADJUST if self.machine.has_tsc_adjust() => return Ok(self.registers().tsc_adjust),
            _ => {}
        }
        match self
            .machine
            .platform
            .read_msr(self.cpu, msr, self.machine.clock.ns(now))
        {
            Err(MsrFault::Unclaimed) => {}
            answer => return answer,
        }
        let value = self.machine.own_msr(self.cpu, msr);
        if msr == IA32_QM_CTR && value.is_ok() {
            self.looked(now);
        }
        value
    }

    /// The guest has selected or read a count of the resource director.
    fn looked(&mut self, now: u64) {
        let package = self.machine.package(self.cpu);
        self.machine.rdt[package].looked(&mut self.machine.cpus[self.cpu].rdt, now);
        self.machine.share_caches();
    }

    /// What RDMSR would read on this CPU, `view` being that CPU: nothing changes by it. Registers that the
    /// processor holds itself are not among them.
    ///
    /// # Errors
    /// The instruction would be #GP.
    pub fn peek_msr(&self, msr: u32, view: &mut dyn Processor) -> Result<u64, MsrFault> {
        let (cpu, now) = (self.cpu, view.step());
        // A register may bring itself up to date when it is read: a copy does.
        match self.machine.watchers[cpu].units.clone().read_msr(msr, view) {
            Err(MsrFault::Unclaimed) => {}
            answer => return answer,
        }
        match msr {
            IA32_TIME_STAMP_COUNTER => {
                return Ok(self
                    .machine
                    .clock
                    .ticks(now)
                    .wrapping_add(self.machine.cpus[cpu].tsc_offset));
            }
            IA32_TSC_ADJUST if self.machine.has_tsc_adjust() => return Ok(self.machine.cpus[cpu].tsc_adjust),
            _ => {}
        }
        let lapic = self.machine.platform.lapic(cpu).cloned();
        match lapic.map(|mut lapic| lapic.read_msr(msr, self.machine.clock.ns(now))) {
            None | Some(Err(MsrFault::Unclaimed)) => self.machine.own_msr(cpu, msr),
            Some(answer) => answer,
        }
    }

    /// WRMSR.
    pub(crate) fn wrmsr(&mut self, msr: u32, value: u64, now: u64) -> Result<(), MsrFault> {
        self.machine.accesses.msrs += 1;
        match msr {
            // SDM Vol. 3B 18.17.3 "Time-Stamp Counter Adjustment": what is added to one is added to the other.
            IA32_TIME_STAMP_COUNTER => {
                let value = if self.machine.model.tsc_write_is_low_half() {
                    value & 0xFFFF_FFFF
                } else {
                    value
                };
                let added = value.wrapping_sub(self.tsc(now));
                let cpu = self.registers();
                cpu.tsc_adjust = cpu.tsc_adjust.wrapping_add(added);
                self.move_tsc(added);
                return Ok(());
            }
            IA32_TSC_ADJUST if self.machine.has_tsc_adjust() => {
                let added = value.wrapping_sub(self.registers().tsc_adjust);
                self.registers().tsc_adjust = value;
                self.move_tsc(added);
                return Ok(());
            }
            _ => {}
        }
        match self
            .machine
            .platform
            .write_msr(self.cpu, msr, value, self.machine.clock.ns(now))
        {
            Err(MsrFault::Unclaimed) => {}
            answer => return answer,
        }
        let package = self.machine.package(self.cpu);
        match self.machine.rdt[package].write_msr(&mut self.machine.cpus[self.cpu].rdt, msr, value) {
            Err(MsrFault::Unclaimed) => {}
            Ok(()) if msr == IA32_QM_EVTSEL => {
                self.looked(now);
                return Ok(());
            }
            Ok(()) => {
                self.machine.share_caches();
                return Ok(());
            }
            answer => return answer,
        }
        let Some(index) = self.machine.row(msr) else {
            debug!("WRMSR of {value:#x} to {msr:#x}, which the model does not have");
            return Err(MsrFault::GeneralProtection);
        };
        let held = self.registers().msrs[index];
        let written = self.machine.model.msrs[index].write(held, value);
        if written.is_err() {
            debug!(
                "WRMSR of {value:#x} to {}, which refuses it",
                self.machine.model.msrs[index].name
            );
        }
        self.registers().msrs[index] = written?;
        Ok(())
    }
}

impl Bus for CpuBus<'_> {
    fn read(&mut self, gpa: u64, size: u8, now: u64) -> u64 {
        self.machine.accesses.mmio += 1;
        if let Some(value) = self.machine.virtio.read(gpa, size) {
            self.machine.carry_interrupts();
            return value;
        }
        if let Some(place) = self.machine.pci.ecam(gpa) {
            // One of 64 bits is two cycles.
            let low = u64::from(self.machine.read_config(place, size.min(4)));
            let high = || Place {
                offset: place.offset + 4,
                ..place
            };
            return match size {
                8 => low | u64::from(self.machine.read_config(high(), 4)) << 32,
                _ => low,
            };
        }
        self.machine
            .platform
            .mmio_read(self.cpu, gpa, size, self.machine.clock.ns(now))
    }

    fn write(&mut self, gpa: u64, size: u8, value: u64, now: u64) {
        self.machine.accesses.mmio += 1;
        let (at, memory) = (self.machine.clock.ns(now), self.machine.memory.mmap());
        if self.machine.virtio.write(gpa, size, value, at, memory) {
            self.machine.carry_interrupts();
            return;
        }
        if let Some(place) = self.machine.pci.ecam(gpa) {
            self.machine.write_config(place, size.min(4), value as u32, now);
            if size == 8 {
                let high = Place {
                    offset: place.offset + 4,
                    ..place
                };
                self.machine.write_config(high, 4, (value >> 32) as u32, now);
            }
            return;
        }
        self.with_performance_entry(|bus| {
            let now = bus.machine.clock.ns(now);
            bus.machine.platform.mmio_write(bus.cpu, gpa, size, value, now);
        });
    }

    fn port_read(&mut self, port: u16, size: u8, now: u64) -> u32 {
        self.machine.accesses.ports += 1;
        self.machine.clock.port_access();
        match self.machine.pci.port(port, size) {
            Some(Target::Address) => self.machine.pci.address.get(),
            Some(Target::Config(place)) => self.machine.read_config(place, size),
            Some(Target::Nobody) => u32::MAX,
            None => self.machine.platform.port_read(port, size, self.machine.clock.ns(now)),
        }
    }

    fn port_write(&mut self, port: u16, size: u8, value: u32, now: u64) {
        self.machine.accesses.ports += 1;
        self.machine.clock.port_access();
        match self.machine.pci.port(port, size) {
            Some(Target::Address) => self.machine.pci.address.set(value),
            Some(Target::Config(place)) => self.machine.write_config(place, size, value, now),
            Some(Target::Nobody) => {}
            None => {
                let now = self.machine.clock.ns(now);
                self.machine.platform.port_write(port, size, value, now);
            }
        }
    }

    fn read_msr(&mut self, msr: u32, cpu: &mut dyn Processor) -> Result<u64, MsrFault> {
        match self.units().read_msr(msr, cpu) {
            Err(MsrFault::Unclaimed) => self.rdmsr(msr, cpu.step()),
            answer => {
                self.machine.accesses.msrs += 1;
                answer
            }
        }
    }

    fn write_msr(&mut self, msr: u32, value: u64, cpu: &mut dyn Processor) -> Result<(), MsrFault> {
        match self.units().write_msr(msr, value, cpu) {
            Err(MsrFault::Unclaimed) => self.with_performance_entry(|bus| bus.wrmsr(msr, value, cpu.step())),
            answer => {
                self.machine.accesses.msrs += 1;
                if answer.is_ok() {
                    self.tell_of_event(msr, value);
                }
                if self.units().caches.is_some() && self.machine.last_level.is_none() {
                    self.machine.share_caches();
                }
                answer
            }
        }
    }

    fn read_counter(&mut self, index: u32, cpu: &mut dyn Processor) -> Result<u64, MsrFault> {
        self.units().read_counter(index, cpu)
    }

    fn watch(&mut self) -> Option<&mut dyn Watch> {
        let watchers = &mut self.machine.watchers[self.cpu];
        (!self.machine.unwatched).then_some(watchers as _)
    }

    fn pmi(&mut self) {
        if let Some(lapic) = self.machine.platform.lapic_mut(self.cpu) {
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
            if let Some(index) = self.machine.row(IA32_BIOS_SIGN_ID) {
                self.registers().msrs[index] = u64::from(self.machine.model.microcode) << 32;
            }
        }
        self.machine.peek_cpuid(self.cpu, leaf, subleaf)
    }

    fn monitor_enabled(&mut self) -> bool {
        self.machine.monitor_on(self.cpu)
    }

    fn user_wait_control(&mut self) -> u64 {
        let row = self.machine.row(IA32_UMWAIT_CONTROL);
        row.map_or(0, |row| self.registers().msrs[row])
    }

    fn tsc(&mut self, now: u64) -> u64 {
        self.machine.clock.ticks(now).wrapping_add(self.registers().tsc_offset)
    }

    fn cr8(&mut self) -> u64 {
        self.machine.platform.cr8(self.cpu).into()
    }

    fn set_cr8(&mut self, value: u64) {
        self.machine.platform.set_cr8(self.cpu, value as u8);
    }

    fn end_of_interrupt(&mut self) {
        self.machine.platform.end_of_interrupt(self.cpu);
    }

    fn random(&mut self) -> u64 {
        self.machine.random.draw()
    }
}
