//! The board: all devices of a virtual machine, the wires between them and the local APICs of its CPUs.
//!
//! ISA interrupts go to the 8259 pair and to the IOAPIC alike, as on a PC; IRQ 0 is pin 2 of the IOAPIC (the tables must say so),
//! and the 8259's output is on pin 0 and on every CPU's LINT0.

pub mod acpi_pm;
pub mod debug_exit;
mod elsewhere;
pub mod i8042;
pub mod ioapic;
pub mod pic;
pub mod pit;
pub mod pvpanic;
pub mod rtc;
pub mod serial;
pub mod smi;
pub mod system_control;

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, Write};

use x86::model::CpuModel;
use x86::msr::MsrFault;

use crate::bus::{AddressMap, MapError, Width, all_ones};
use crate::pci::Message;
use crate::unit::apic_message::{ApicMessage, Delivery, Destination};
use crate::unit::lapic::{Action, Lapic, LapicCaps, LapicState, Signal};
use acpi_pm::AcpiPm;
use debug_exit::DebugExit;
use elsewhere::Elsewhere;
pub use elsewhere::Lines;
use i8042::{I8042, I8042State};
use ioapic::Ioapic;
use pic::Pic;
use pit::Pit;
use pvpanic::Pvpanic;
use rtc::Rtc;
use serial::{Serial, SerialState};
use smi::SmiControl;
use system_control::SystemControl;

/// ISA interrupt lines.
const IRQS: usize = 16;
const IRQ_PIT: u8 = 0;
const IRQ_KEYBOARD: u8 = 1;
/// IRQ of the first serial port.
pub const IRQ_COM1: u8 = 4;
/// IRQ of the second serial port.
pub const IRQ_COM2: u8 = 3;
const IRQ_RTC: u8 = 8;
const IRQ_AUXILIARY: u8 = 12;
/// IOAPIC pin of IRQ 0. MADT: interrupt source override.
pub const GSI_PIT: u8 = 2;
/// IOAPIC pin of the 8259's output.
const PIN_8259: usize = 0;

const IOAPIC_PAGE: u64 = 0x1000;

/// SDM Vol. 3A 11.11.1 "Message Address Register Format": the upper twelve bits, and the destination mode.
const MESSAGE_ADDRESS: u64 = 0xfee0_0000;
const MESSAGE_LOGICAL: u64 = 1 << 2;

/// What the machine has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Effect {
    /// The guest has switched itself off (ACPI S5).
    PowerOff,
    /// The guest has reset itself (reset register, keyboard controller, port 92H).
    Reset,
    /// The guest has written this value to the debug-exit port.
    DebugExit(u32),
    /// The guest's kernel says that it has panicked.
    Panicked,
    /// INIT for a CPU; its local APIC has been reset already.
    Init {
        /// The CPU's index.
        cpu: usize,
    },
    /// Start-up IPI for a CPU, to be ignored unless it waits for one.
    StartUp {
        /// The CPU's index.
        cpu: usize,
        /// The page at which it starts in real mode.
        vector: u8,
    },
    /// System-management interrupt for a CPU.
    Smi {
        /// The CPU's index.
        cpu: usize,
    },
}

/// Who owns a range of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Port {
    Pic1,
    Pic2,
    Elcr,
    Pit,
    I8042Data,
    I8042Command,
    Port61,
    Port92,
    Rtc,
    Serial,
    Serial2,
    PmEvent,
    PmControl,
    PmTimer,
    Apm,
    SmiEnable,
    PciAddress,
    DebugExit,
    Pvpanic,
    Diagnostic,
}

/// The board's ports: the first, how many, how wide an access they take, whose they are.
const PORTS: [(u16, u64, Width, Port); 19] = [
    (pic::PIC1, 2, Width::Byte, Port::Pic1),
    (pit::PIT, 4, Width::Byte, Port::Pit),
    (i8042::DATA, 1, Width::Byte, Port::I8042Data),
    (system_control::PORT61, 1, Width::Byte, Port::Port61),
    (i8042::COMMAND, 1, Width::Byte, Port::I8042Command),
    (rtc::RTC, 2, Width::Byte, Port::Rtc),
    (system_control::DIAGNOSTIC, 1, Width::Byte, Port::Diagnostic),
    (system_control::PORT92, 1, Width::Byte, Port::Port92),
    (pic::PIC2, 2, Width::Byte, Port::Pic2),
    (debug_exit::DEBUG_EXIT, 4, Width::Whole, Port::DebugExit),
    (serial::COM1, 8, Width::Byte, Port::Serial),
    (pic::ELCR, 2, Width::Byte, Port::Elcr),
    (pvpanic::PVPANIC, 1, Width::Byte, Port::Pvpanic),
    (acpi_pm::PM1A_EVENT, 4, Width::Byte, Port::PmEvent),
    (acpi_pm::PM1A_CONTROL, 2, Width::Byte, Port::PmControl),
    (acpi_pm::PM_TIMER, 4, Width::Whole, Port::PmTimer),
    (smi::APM, 2, Width::Byte, Port::Apm),
    (smi::SMI_EN, 4, Width::Byte, Port::SmiEnable),
    // The reset register lies within PCI's address register and is distinguished from it by the size of the access.
    (system_control::CF9 - 1, 4, Width::Whole, Port::PciAddress),
];

/// The second serial port's, where there is one.
const SECOND_SERIAL: (u16, u64, Width, Port) = (serial::COM2, 8, Width::Byte, Port::Serial2);

impl Port {
    /// It goes with the interrupt controllers, to wherever they are: the interval timer does, and port 61H with its gate.
    fn is_the_controllers(self) -> bool {
        matches!(self, Port::Pic1 | Port::Pic2 | Port::Elcr | Port::Pit | Port::Port61)
    }

    /// What the device is, for people.
    fn name(self) -> &'static str {
        match self {
            Port::Pic1 => "8259A interrupt controller, first",
            Port::Pic2 => "8259A interrupt controller, second",
            Port::Elcr => "edge and level control of both",
            Port::Pit => "8254 timer",
            Port::I8042Data => "8042 keyboard controller, data: no keyboard",
            Port::I8042Command => "8042 keyboard controller, command: reset, A20",
            Port::Port61 => "timer channel 2 and its gate",
            Port::Port92 => "A20, fast reset",
            Port::Rtc => "MC146818 real-time clock",
            Port::Serial => "16550A serial port, ttyS0",
            Port::Serial2 => "16550A serial port, ttyS1, with `--collect`",
            Port::PmEvent => "ACPI PM1a event",
            Port::PmControl => "ACPI PM1a control: power off",
            Port::PmTimer => "ACPI timer, 3.579545 MHz",
            Port::Apm => "SMI request (APM_CNT) and its status, once SMI_EN lets it",
            Port::SmiEnable => "SMI_EN",
            Port::PciAddress => "PCI CONFIG_ADDRESS, as a double word; reset control at CF9H",
            Port::DebugExit => "debug exit: ends the run with (v << 1) | 1",
            Port::Pvpanic => "pvpanic: the guest's kernel says that it has panicked",
            Port::Diagnostic => "diagnostic codes: dropped",
        }
    }
}

/// The board's ports as rows of a table, ascending: first, last, what is there.
pub fn port_table() -> Vec<(u16, u16, &'static str)> {
    let mut rows: Vec<_> = PORTS
        .iter()
        .chain([&SECOND_SERIAL])
        .map(|&(first, len, _, owner)| (first, first + (len - 1) as u16, owner.name()))
        .collect();
    rows.sort_unstable();
    rows
}

/// The map of the ports. What is not in it reads all ones: the FPU's F0H and F1H, absent serial ports. PCI's
/// configuration data at CFCH are not the board's.
fn ports() -> Result<AddressMap<Port>, MapError> {
    let mut map = AddressMap::new(0xffff);
    for (first, len, width, owner) in PORTS {
        map.claim(u64::from(first), len, width, owner)?;
    }
    Ok(map)
}

/// Who owns a range of guest-physical addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mmio {
    Ioapic,
}

/// The map of the memory-mapped registers. The local APICs' pages are not in it: each CPU sees its own, where it has put it.
fn mmio() -> Result<AddressMap<Mmio>, MapError> {
    let mut map = AddressMap::new(u64::MAX);
    map.claim(ioapic::IOAPIC, IOAPIC_PAGE, Width::Whole, Mmio::Ioapic)?;
    Ok(map)
}

/// A state that is not of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuCount {
    /// CPUs of this machine.
    pub here: usize,
    /// CPUs in the state.
    pub state: usize,
}

impl fmt::Display for CpuCount {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "the state has {} CPUs, the machine has {}", self.state, self.here)
    }
}

impl std::error::Error for CpuCount {}

/// The whole state of the board and the local APICs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlatformState {
    /// Serial port.
    pub serial: SerialState,
    /// Second serial port, if there is one.
    pub serial2: Option<SerialState>,
    /// Keyboard controller.
    pub i8042: I8042State,
    /// Real-time clock.
    pub rtc: Rtc,
    /// Interrupt controllers.
    pub pic: Pic,
    /// Interval timer.
    pub pit: Pit,
    /// I/O APIC.
    pub ioapic: Ioapic,
    /// Power management.
    pub acpi_pm: AcpiPm,
    /// Requests of system-management interrupts.
    pub smi: SmiControl,
    /// Board's own ports.
    pub system_control: SystemControl,
    /// Debug exit.
    pub debug_exit: DebugExit,
    /// What the guest has said of its panics.
    pub pvpanic: Pvpanic,
    /// Local APICs, by CPU.
    pub lapics: Vec<LapicState>,
    /// Levels of the ISA interrupt lines.
    pub irqs: [bool; IRQS],
    /// Level of the 8259's output.
    pub intr: bool,
    /// What has not been fetched by [`Platform::effects`].
    pub effects: Vec<Effect>,
    /// What [`Platform::take_sent`] has not been asked for.
    pub sent: bool,
}

/// The board.
#[derive(Debug)]
pub struct Platform {
    ports: AddressMap<Port>,
    mmio: AddressMap<Mmio>,
    serial: Serial,
    serial2: Option<Serial>,
    i8042: I8042,
    rtc: Rtc,
    pic: Pic,
    pit: Pit,
    ioapic: Ioapic,
    acpi_pm: AcpiPm,
    smi: SmiControl,
    system_control: SystemControl,
    debug_exit: DebugExit,
    pvpanic: Pvpanic,
    lapics: Vec<Lapic>,
    irqs: [bool; IRQS],
    intr: bool,
    effects: Vec<Effect>,
    /// See [`Platform::take_sent`].
    sent: bool,
    /// The interrupt controllers are not the board's own.
    elsewhere: Option<Elsewhere>,
}

impl Platform {
    /// A board at reset with `cpus` CPUs (at least one) of a model; CPU `i` has APIC ID `i`, CPU 0 is the boot CPU. The clock
    /// shows `rtc_base` (seconds from 1970-01-01 UTC) at 0 ns; the serial port sends to `serial_out`.
    pub fn new(model: &CpuModel, cpus: usize, rtc_base: i64, serial_out: Box<dyn Write + Send>) -> Platform {
        let caps = LapicCaps::of(model);
        Platform::with_caps(&caps, cpus, rtc_base, serial_out)
    }

    fn with_caps(caps: &LapicCaps, cpus: usize, rtc_base: i64, serial_out: Box<dyn Write + Send>) -> Platform {
        Platform {
            ports: ports().expect("the board's ports do not overlap"),
            mmio: mmio().expect("the board's registers do not overlap"),
            serial: Serial::new(serial_out),
            serial2: None,
            i8042: I8042::new(),
            rtc: Rtc::new(rtc_base),
            pic: Pic::new(),
            pit: Pit::new(),
            ioapic: Ioapic::new(),
            acpi_pm: AcpiPm::new(),
            smi: SmiControl::default(),
            system_control: SystemControl::new(),
            debug_exit: DebugExit::new(),
            pvpanic: Pvpanic::new(),
            lapics: (0..cpus.max(1))
                .map(|i| Lapic::new(caps.clone(), i as u32, i == 0))
                .collect(),
            irqs: [false; IRQS],
            intr: false,
            effects: Vec::new(),
            sent: false,
            elsewhere: None,
        }
    }

    /// Has somebody else be the interrupt controllers, local APICs and interval timer from now on: the board's own stand idle, and
    /// its devices' lines lead there. To be called before anything has run.
    pub fn give_away_controllers(&mut self, lines: Box<dyn Lines>) {
        self.elsewhere = Some(Elsewhere::new(lines));
    }

    /// Whether somebody else has the interrupt controllers.
    pub fn irqchip_is_external(&self) -> bool {
        self.elsewhere.is_some()
    }

    /// Whether something was reached for since the last call that is elsewhere. No part of the state: the answer was all ones, or
    /// #GP.
    pub fn take_missed(&mut self) -> bool {
        let elsewhere = self.elsewhere.as_mut();
        elsewhere.is_some_and(|elsewhere| std::mem::take(&mut elsewhere.missed))
    }

    /// What is reached for is elsewhere, if anything is.
    fn misses(&mut self) -> bool {
        if let Some(elsewhere) = &mut self.elsewhere {
            elsewhere.missed = true;
        }
        self.elsewhere.is_some()
    }

    /// Adds the second serial port, which sends to `out`.
    pub fn add_serial2(&mut self, out: Box<dyn Write + Send>) {
        if self.serial2.replace(Serial::new(out)).is_none() {
            let (first, len, width, owner) = SECOND_SERIAL;
            let claimed = self.ports.claim(u64::from(first), len, width, owner);
            claimed.expect("the board's ports do not overlap");
        }
    }

    /// Leaves the interrupt controllers as firmware hands them over: the boot CPU's APIC in virtual-wire mode.
    pub fn set_virtual_wire(&mut self) {
        self.lapics[0].set_virtual_wire();
    }

    /// The local APIC of a CPU.
    pub fn lapic(&self, cpu: usize) -> Option<&Lapic> {
        self.lapics.get(cpu)
    }

    /// The local APIC of a CPU, for the units that raise interrupts through it.
    pub fn lapic_mut(&mut self, cpu: usize) -> Option<&mut Lapic> {
        self.lapics.get_mut(cpu)
    }

    // ---- Ports -------------------------------------------------------------------------------------------------------

    /// IN of 1, 2 or 4 bytes.
    pub fn port_read(&mut self, port: u16, size: u8, now: u64) -> u32 {
        self.advance(now);
        let size = size.clamp(1, 4);
        let mut value = 0;
        for i in self.ports.pieces(u64::from(port), size) {
            let part = match i.owner {
                Some((owner, offset)) => self.port_read_piece(owner, offset, i.size, now),
                None => all_ones(i.size) as u32,
            };
            value |= part << i.shift;
        }
        self.update_irqs();
        value
    }

    fn port_read_piece(&mut self, owner: Port, offset: u64, size: u8, now: u64) -> u32 {
        let ones = all_ones(size) as u32;
        if owner.is_the_controllers() && self.misses() {
            return ones;
        }
        let byte = match owner {
            Port::Pic1 => self.pic.read(false, offset == 1),
            Port::Pic2 => self.pic.read(true, offset == 1),
            Port::Elcr => self.pic.read_elcr(offset == 1),
            Port::Pit => self.pit.read(offset as u8, now),
            Port::I8042Data => self.i8042.read_data(),
            Port::I8042Command => self.i8042.read_status(),
            Port::Port61 => self.system_control.read_61(self.pit.out(2), self.pit.refresh()),
            Port::Port92 => self.system_control.read_92(),
            Port::Rtc => self.rtc.read(offset as u8, now),
            Port::Serial => self.serial.read(offset as u8),
            Port::Serial2 => self.serial2.as_mut().map_or(0xff, |serial| serial.read(offset as u8)),
            Port::PmEvent => self.acpi_pm.read_event(offset, now),
            Port::PmControl => self.acpi_pm.read_control(offset),
            Port::Apm => self.smi.read_apm(offset),
            Port::SmiEnable => self.smi.read_enable(offset),
            Port::Pvpanic => self.pvpanic.read(),
            Port::Diagnostic => self.system_control.diagnostic(),
            Port::PmTimer => return (self.acpi_pm.read_timer(now) >> (8 * (offset & 3))) & ones,
            Port::PciAddress if (offset, size) == (1, 1) => self.system_control.read_cf9(),
            Port::PciAddress | Port::DebugExit => return ones,
        };
        u32::from(byte)
    }

    /// OUT of 1, 2 or 4 bytes.
    pub fn port_write(&mut self, port: u16, size: u8, value: u32, now: u64) {
        self.advance(now);
        let size = size.clamp(1, 4);
        for i in self.ports.pieces(u64::from(port), size) {
            if let Some((owner, offset)) = i.owner {
                let part = (value >> i.shift) & all_ones(i.size) as u32;
                self.port_write_piece(owner, offset, i.size, part, now);
            }
        }
        self.update_irqs();
    }

    fn port_write_piece(&mut self, owner: Port, offset: u64, size: u8, value: u32, now: u64) {
        let byte = value as u8;
        if owner.is_the_controllers() && self.misses() {
            return;
        }
        match owner {
            Port::Pic1 => self.pic.write(false, offset == 1, byte),
            Port::Pic2 => self.pic.write(true, offset == 1, byte),
            Port::Elcr => self.pic.write_elcr(offset == 1, byte),
            Port::Pit => self.pit.write(offset as u8, byte, now),
            Port::I8042Data => self.i8042.write_data(byte),
            Port::I8042Command => self.i8042.write_command(byte),
            Port::Port61 => {
                self.system_control.write_61(byte);
                self.pit.set_gate2(self.system_control.gate2(), now);
            }
            Port::Port92 => self.system_control.write_92(byte),
            Port::Rtc => self.rtc.write(offset as u8, byte, now),
            Port::Serial => self.serial.write(offset as u8, byte),
            Port::Serial2 => {
                if let Some(serial) = &mut self.serial2 {
                    serial.write(offset as u8, byte);
                }
            }
            Port::PmEvent => self.acpi_pm.write_event(offset, byte, now),
            Port::PmControl => self.acpi_pm.write_control(offset, byte),
            Port::PmTimer => {}
            Port::Apm => {
                if self.smi.write_apm(offset, byte) {
                    (0..self.lapics.len()).for_each(|cpu| self.effect(Effect::Smi { cpu }));
                }
            }
            Port::SmiEnable => self.smi.write_enable(offset, byte),
            Port::PciAddress if (offset, size) == (1, 1) => self.system_control.write_cf9(byte),
            Port::PciAddress => {}
            Port::DebugExit if offset == 0 => self.debug_exit.write(value),
            Port::DebugExit => {}
            Port::Pvpanic => self.pvpanic.write(byte),
            Port::Diagnostic => self.system_control.write_diagnostic(byte),
        }
    }

    // ---- Memory-mapped registers and MSRs ----------------------------------------------------------------------------

    /// A CPU reads 1, 2, 4 or 8 bytes of a guest-physical address that is not RAM. Its own APIC's page wins over all else.
    pub fn mmio_read(&mut self, cpu: usize, address: u64, size: u8, now: u64) -> u64 {
        if self.is_a_controllers(cpu, address) && self.misses() {
            return all_ones(size);
        }
        if let Some(offset) = self.lapic_offset(cpu, address) {
            let value = self.lapics[cpu].read(offset, size, now);
            self.collect(cpu);
            return value;
        }
        let mut value = 0;
        for i in self.mmio.pieces(address, size) {
            let part = match i.owner {
                Some((Mmio::Ioapic, offset)) => u64::from(self.ioapic.read(offset & !3)) >> (8 * (offset & 3)),
                None => u64::MAX,
            };
            value |= (part & all_ones(i.size)) << i.shift;
        }
        value
    }

    /// A CPU writes 1, 2, 4 or 8 bytes to a guest-physical address that is not RAM.
    pub fn mmio_write(&mut self, cpu: usize, address: u64, size: u8, value: u64, now: u64) {
        if self.is_a_controllers(cpu, address) && self.misses() {
            return;
        }
        if let Some(offset) = self.lapic_offset(cpu, address) {
            let action = self.lapics[cpu].write(offset, size, value, now);
            self.act(cpu, action);
            return;
        }
        for i in self.mmio.pieces(address, size) {
            match i.owner {
                // The index register has eight bits and may be written so; the others are 32 bits wide.
                Some((Mmio::Ioapic, offset)) if i.size >= 4 && offset & 3 == 0 || offset == 0 => {
                    let messages = self.ioapic.write(offset, (value >> i.shift) as u32);
                    self.deliver_all(messages);
                }
                _ => {}
            }
        }
    }

    /// Whether a guest-physical address is a register of an interrupt controller.
    fn is_a_controllers(&self, cpu: usize, address: u64) -> bool {
        address & !(IOAPIC_PAGE - 1) == ioapic::IOAPIC || self.lapic_offset(cpu, address).is_some()
    }

    fn lapic_offset(&self, cpu: usize, address: u64) -> Option<u64> {
        let page = self.lapics.get(cpu)?.page()?;
        (address & !0xfff == page).then_some(address & 0xfff)
    }

    /// A CPU reads an MSR of its local APIC: IA32_APIC_BASE, IA32_TSC_DEADLINE, 800H to 8FFH.
    ///
    /// # Errors
    /// #GP where the manual has it; unclaimed for any other register.
    pub fn read_msr(&mut self, cpu: usize, msr: u32, now: u64) -> Result<u64, MsrFault> {
        let value = self.lapics.get_mut(cpu).ok_or(MsrFault::Unclaimed)?.read_msr(msr, now);
        if value != Err(MsrFault::Unclaimed) && self.misses() {
            return Err(MsrFault::GeneralProtection);
        }
        self.collect(cpu);
        value
    }

    /// A CPU writes an MSR of its local APIC.
    ///
    /// # Errors
    /// As [`Platform::read_msr`].
    pub fn write_msr(&mut self, cpu: usize, msr: u32, value: u64, now: u64) -> Result<(), MsrFault> {
        let lapic = self.lapics.get_mut(cpu).ok_or(MsrFault::Unclaimed)?;
        if self.elsewhere.is_some() {
            // Of a copy: it is only asked whose the register is.
            if lapic.clone().read_msr(msr, now) == Err(MsrFault::Unclaimed) {
                return Err(MsrFault::Unclaimed);
            }
            self.misses();
            return Err(MsrFault::GeneralProtection);
        }
        let action = lapic.write_msr(msr, value, now)?;
        self.act(cpu, action);
        Ok(())
    }

    /// A CPU's CR8.
    pub fn cr8(&self, cpu: usize) -> u8 {
        self.lapics.get(cpu).map_or(0, Lapic::cr8)
    }

    /// MOV to CR8 by a CPU; only the low four bits count.
    pub fn set_cr8(&mut self, cpu: usize, class: u8) {
        if let Some(lapic) = self.lapics.get_mut(cpu) {
            lapic.set_cr8(class & 0xf);
        }
    }

    // ---- Interrupts --------------------------------------------------------------------------------------------------

    /// Whether a CPU has an interrupt to take once it lets interrupts in.
    pub fn interrupt_pending(&self, cpu: usize) -> bool {
        self.lapics
            .get(cpu)
            .is_some_and(|l| l.ext_int_pending() || l.pending_vector().is_some())
    }

    /// The CPU takes the interrupt: its vector, from the 8259 for an ExtINT, else from the local APIC. Without a pending one it
    /// is the spurious vector.
    pub fn acknowledge(&mut self, cpu: usize) -> u8 {
        let Some(lapic) = self.lapics.get_mut(cpu) else {
            return 0xff;
        };
        if !lapic.ext_int_pending() {
            return lapic.acknowledge();
        }
        lapic.acknowledge_ext_int();
        let vector = self.pic.acknowledge();
        // INT falls at INTA: a further request is a new edge at whatever listens for edges.
        self.set_intr(false);
        self.update_irqs();
        vector
    }

    /// A CPU has its local APIC's EOI register written to without an access of its own: SDM Vol. 3C 30.6 "Posted-Interrupt Processing".
    pub fn end_of_interrupt(&mut self, cpu: usize) {
        if let Some(lapic) = self.lapics.get_mut(cpu) {
            let action = lapic.end_of_interrupt();
            self.act(cpu, action);
        }
    }

    /// Whether a CPU has sent another one an interrupt through its ICR since the last call. No part of the state: whoever runs the CPUs asks
    /// after every access.
    pub fn take_sent(&mut self) -> bool {
        std::mem::take(&mut self.sent)
    }

    /// Whether a CPU has an NMI to take.
    pub fn nmi_pending(&self, cpu: usize) -> bool {
        self.lapics.get(cpu).is_some_and(Lapic::nmi_pending)
    }

    /// The CPU takes its NMI.
    pub fn take_nmi(&mut self, cpu: usize) -> bool {
        self.lapics.get_mut(cpu).is_some_and(Lapic::take_nmi)
    }

    /// An NMI from outside (a debugger, a watchdog).
    pub fn inject_nmi(&mut self, cpu: usize) {
        if let Some(lapic) = self.lapics.get_mut(cpu) {
            lapic.inject_nmi();
        }
    }

    /// Drives an IOAPIC pin that has no ISA interrupt: 16 to 23.
    pub fn set_gsi(&mut self, gsi: u8, asserted: bool) {
        if usize::from(gsi) >= IRQS {
            if let Some(elsewhere) = &mut self.elsewhere {
                return elsewhere.set_pin(gsi, asserted);
            }
            let message = self.ioapic.set_pin(usize::from(gsi), asserted);
            self.deliver_all(message);
        }
    }

    /// A device's message-signalled interrupt. SDM Vol. 3A 11.11 "Message Signalled Interrupts".
    pub fn message(&mut self, message: Message) {
        if let Some(elsewhere) = &self.elsewhere {
            return elsewhere.message(message);
        }
        // Anywhere else it would be a write of memory, which no driver has a device do.
        if message.address & !0xf_ffff != MESSAGE_ADDRESS {
            return;
        }
        let logical = message.address & MESSAGE_LOGICAL != 0;
        let Some(delivery) = Delivery::from_bits(message.data >> 8) else {
            return;
        };
        self.deliver(
            ApicMessage {
                destination: Destination::from_u8((message.address >> 12) as u8, logical),
                delivery,
                vector: message.data as u8,
                // "Edge" and "level" differ for an IOAPIC that waits for the EOI, of which there is none here.
                level: false,
            },
            None,
        );
    }

    fn act(&mut self, cpu: usize, action: Option<Action>) {
        match action {
            Some(Action::Send(message)) => {
                let takers = self.deliver(message, None);
                self.sent |= takers.iter().any(|&taker| taker != cpu);
            }
            Some(Action::SendOthers(message)) => {
                self.sent |= !self.deliver(message, Some(cpu)).is_empty();
            }
            Some(Action::Eoi(vector)) => {
                let messages = self.ioapic.eoi(vector);
                self.deliver_all(messages);
            }
            None => {}
        }
        self.collect(cpu);
    }

    fn deliver_all(&mut self, messages: impl IntoIterator<Item = ApicMessage>) {
        for message in messages {
            self.deliver(message, None);
        }
    }

    /// Hands a message to the CPUs that it is addressed to, and says which they are.
    fn deliver(&mut self, message: ApicMessage, but: Option<usize>) -> Vec<usize> {
        let addressed = |(i, lapic): &(usize, &Lapic)| Some(*i) != but && lapic.addressed(message.destination);
        if message.delivery == Delivery::LowestPriority {
            // SDM Vol. 3A 11.6.2.4 "Lowest Priority Delivery Mode"; among equals, the first.
            let lowest = self
                .lapics
                .iter()
                .enumerate()
                .filter(addressed)
                .min_by_key(|(_, l)| l.ppr());
            let taker = lowest.map(|(i, _)| i);
            if let Some(cpu) = taker {
                self.receive(cpu, message);
            }
            return taker.into_iter().collect();
        }
        let takers: Vec<usize> = self
            .lapics
            .iter()
            .enumerate()
            .filter(addressed)
            .map(|(i, _)| i)
            .collect();
        for &cpu in &takers {
            self.receive(cpu, message);
        }
        takers
    }

    fn receive(&mut self, cpu: usize, message: ApicMessage) {
        let signal = self.lapics[cpu].receive(message);
        self.signal(cpu, signal);
        self.collect(cpu);
    }

    fn signal(&mut self, cpu: usize, signal: Option<Signal>) {
        match signal {
            Some(Signal::Init) => self.effect(Effect::Init { cpu }),
            Some(Signal::StartUp(vector)) => self.effect(Effect::StartUp { cpu, vector }),
            Some(Signal::Smi) => self.effect(Effect::Smi { cpu }),
            None => {}
        }
    }

    /// A CPU has taken an INIT, which its local APIC has told of.
    pub fn init_apic(&mut self, cpu: usize) {
        if let Some(lapic) = self.lapics.get_mut(cpu) {
            lapic.init();
        }
    }

    /// Fetches what a CPU's local sources have raised.
    fn collect(&mut self, cpu: usize) {
        while let Some(signal) = self.lapics.get_mut(cpu).and_then(Lapic::take_signal) {
            self.signal(cpu, Some(signal));
        }
    }

    /// Repeats say nothing new, so the list stays short however long nobody fetches it.
    fn effect(&mut self, effect: Effect) {
        if !self.effects.contains(&effect) {
            self.effects.push(effect);
        }
    }

    /// Carries the levels of the devices' interrupt lines to the controllers, and collects what devices ask of the machine.
    fn update_irqs(&mut self) {
        // An interval timer elsewhere has its line there, too.
        let own = self.elsewhere.is_none();
        if own && self.pit.take_edge() {
            // It may have been high before, and low in between.
            self.set_irq(IRQ_PIT, false);
            self.set_irq(IRQ_PIT, true);
        }
        for (irq, level) in [
            (IRQ_PIT, own && self.pit.out(0)),
            (IRQ_KEYBOARD, self.i8042.irq()),
            (IRQ_COM1, self.serial.irq()),
            (IRQ_COM2, self.serial2.as_ref().is_some_and(Serial::irq)),
            (IRQ_RTC, self.rtc.irq()),
            (acpi_pm::SCI, self.acpi_pm.irq()),
            (IRQ_AUXILIARY, self.i8042.auxiliary_irq()),
        ] {
            self.set_irq(irq, level);
        }
        if own {
            self.set_intr(self.pic.intr());
        }
        if self.acpi_pm.take_power_off() {
            self.effect(Effect::PowerOff);
        }
        if self.i8042.take_reset() | self.system_control.take_reset() {
            self.effect(Effect::Reset);
        }
        if let Some(value) = self.debug_exit.take() {
            self.effect(Effect::DebugExit(value));
        }
        if self.pvpanic.take() {
            self.effect(Effect::Panicked);
        }
    }

    fn set_irq(&mut self, irq: u8, level: bool) {
        let line = &mut self.irqs[usize::from(irq)];
        if std::mem::replace(line, level) == level {
            return;
        }
        if let Some(elsewhere) = &self.elsewhere {
            return elsewhere.set_irq(irq, level);
        }
        self.pic.set_irq(irq, level);
        let pin = if irq == IRQ_PIT { GSI_PIT } else { irq };
        let message = self.ioapic.set_pin(usize::from(pin), level);
        self.deliver_all(message);
    }

    fn set_intr(&mut self, intr: bool) {
        if std::mem::replace(&mut self.intr, intr) == intr {
            return;
        }
        for cpu in 0..self.lapics.len() {
            self.lapics[cpu].set_lint(0, intr);
            self.collect(cpu);
        }
        let message = self.ioapic.set_pin(PIN_8259, intr);
        self.deliver_all(message);
    }

    // ---- Time and the outside ----------------------------------------------------------------------------------------

    /// Moves all devices to `now` ns.
    pub fn advance(&mut self, now: u64) {
        self.rtc.advance(now);
        self.acpi_pm.advance(now);
        if self.elsewhere.is_none() {
            self.pit.advance(now);
            for cpu in 0..self.lapics.len() {
                self.lapics[cpu].advance(now);
                self.collect(cpu);
            }
        }
        self.update_irqs();
    }

    /// The ns of the next thing that will happen by itself; always later than the last `advance`.
    pub fn next_event(&self) -> Option<u64> {
        let board = [self.rtc.next_event(), self.acpi_pm.next_event()];
        let own = self.elsewhere.is_none();
        let timers = std::iter::once(self.pit.next_event()).chain(self.lapics.iter().map(Lapic::next_event));
        board.into_iter().chain(timers.filter(|_| own)).flatten().min()
    }

    /// What the machine has to do since the last call.
    pub fn effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Hands received bytes to the serial port; how many fitted.
    pub fn serial_enqueue(&mut self, bytes: &[u8]) -> usize {
        let fitted = self.serial.enqueue(bytes);
        self.update_irqs();
        fitted
    }

    /// How many received bytes the serial port would take.
    pub fn serial_capacity(&self) -> usize {
        self.serial.capacity()
    }

    /// The first error that the serial port's sink has met since the last call.
    pub fn serial_error(&mut self) -> Option<io::Error> {
        self.serial.take_error()
    }

    /// Somebody presses the power button.
    pub fn press_power_button(&mut self) {
        self.acpi_pm.press_power_button();
        self.update_irqs();
    }

    /// Whether the guest's kernel has said that it has panicked.
    pub fn has_panicked(&self) -> bool {
        self.pvpanic.has_panicked()
    }

    /// The last byte that the guest wrote to port 80H.
    pub fn diagnostic(&self) -> u8 {
        self.system_control.diagnostic()
    }

    /// The whole state.
    pub fn state(&self) -> PlatformState {
        PlatformState {
            serial: self.serial.state(),
            serial2: self.serial2.as_ref().map(Serial::state),
            i8042: self.i8042.state(),
            rtc: self.rtc.state(),
            pic: self.pic.state(),
            pit: self.pit.state(),
            ioapic: self.ioapic.state(),
            acpi_pm: self.acpi_pm.state(),
            smi: self.smi.state(),
            system_control: self.system_control.state(),
            debug_exit: self.debug_exit.state(),
            pvpanic: self.pvpanic.state(),
            lapics: self.lapics.iter().map(Lapic::state).collect(),
            irqs: self.irqs,
            intr: self.intr,
            effects: self.effects.clone(),
            sent: self.sent,
        }
    }

    /// Takes a state back; the serial port's sink and the CPU model stay.
    ///
    /// # Errors
    /// A state with another number of CPUs, of which nothing is taken.
    pub fn set_state(&mut self, state: &PlatformState) -> Result<(), CpuCount> {
        if state.lapics.len() != self.lapics.len() {
            return Err(CpuCount {
                here: self.lapics.len(),
                state: state.lapics.len(),
            });
        }
        self.serial.set_state(&state.serial);
        // Where the ends of the line are is the machine's affair: a port that one side lacks is left alone.
        if let (Some(serial), Some(state)) = (&mut self.serial2, &state.serial2) {
            serial.set_state(state);
        }
        self.i8042.set_state(&state.i8042);
        self.rtc.set_state(&state.rtc);
        self.pic.set_state(&state.pic);
        self.pit.set_state(&state.pit);
        self.ioapic.set_state(&state.ioapic);
        self.acpi_pm.set_state(&state.acpi_pm);
        self.smi.set_state(&state.smi);
        self.system_control.set_state(&state.system_control);
        self.debug_exit.set_state(&state.debug_exit);
        self.pvpanic.set_state(&state.pvpanic);
        for (lapic, state) in self.lapics.iter_mut().zip(&state.lapics) {
            lapic.set_state(state);
        }
        self.irqs = state.irqs;
        self.intr = state.intr;
        self.effects.clone_from(&state.effects);
        self.sent = state.sent;
        Ok(())
    }
}

#[cfg(test)]
mod board_test;
#[cfg(test)]
mod random_test;
