//! The i8042 keyboard controller: the reset pulse as vm-superio has it, and around it as much of the controller as a driver
//! probes, with nothing plugged into either port. IBM PS/2 Hardware Interface Technical Reference "Keyboard and Auxiliary
//! Device Controller".
//!
//! A driver that gets no answer waits half a second for each of its questions, so an absent keyboard says that it is absent.

use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::VecDeque;
use std::convert::Infallible;

use vm_superio::{I8042Device, Trigger};

/// Data port.
pub const DATA: u16 = 0x60;
/// Status and command port.
pub const COMMAND: u16 = 0x64;

/// vm-superio's offset of the command port.
const SUPERIO_COMMAND: u8 = 4;
const RESET: u8 = 0xfe;

const STATUS_OUTPUT_FULL: u8 = 0x01;
const STATUS_SYSTEM: u8 = 0x04;
const STATUS_COMMAND: u8 = 0x08;
/// The keyboard's lock is open.
const STATUS_UNLOCKED: u8 = 0x10;
const STATUS_AUXILIARY: u8 = 0x20;
const STATUS_TIMEOUT: u8 = 0x40;

/// Command byte: interrupt on output from the keyboard, and from the auxiliary device.
const INTERRUPT: u8 = 0x01;
const AUXILIARY_INTERRUPT: u8 = 0x02;
const KEYBOARD_OFF: u8 = 0x10;
const AUXILIARY_OFF: u8 = 0x20;

/// Output port: the reset line (low is reset), the A20 gate.
const OUT_NOT_RESET: u8 = 0x01;
const OUT_A20: u8 = 0x02;

/// What the controller sends when a device does not answer.
const RESEND: u8 = 0xfe;
/// More answers than any driver leaves lying about; a guest that never reads cannot make it grow.
const ANSWERS: usize = 16;

/// Remembers that vm-superio's device pulled the reset line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ResetLine(Cell<bool>);

impl Trigger for ResetLine {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.0.set(true);
        Ok(())
    }
}

/// A byte for the output buffer and the status bits that go with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    value: u8,
    status: u8,
}

/// The controller's registers: its whole state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct I8042State {
    /// Controller RAM; byte 0 is the command byte.
    ram: [u8; 32],
    output_port: u8,
    /// The command whose parameter comes next at the data port.
    command: Option<u8>,
    last_was_command: bool,
    answers: VecDeque<Answer>,
}

/// The controller.
#[derive(Debug)]
pub struct I8042 {
    superio: I8042Device<ResetLine>,
    s: I8042State,
}

impl Default for I8042 {
    fn default() -> Self {
        I8042::new()
    }
}

impl I8042 {
    /// A controller as the firmware leaves it: tested, both ports without interrupts.
    pub fn new() -> I8042 {
        let mut ram = [0; 32];
        ram[0] = STATUS_SYSTEM | AUXILIARY_OFF;
        I8042 {
            superio: I8042Device::new(ResetLine(Cell::new(false))),
            s: I8042State {
                ram,
                output_port: OUT_NOT_RESET | OUT_A20,
                command: None,
                last_was_command: false,
                answers: VecDeque::new(),
            },
        }
    }

    /// Whether the guest has pulled the reset line since the last call.
    pub fn take_reset(&mut self) -> bool {
        self.superio.reset_evt().0.replace(false)
    }

    /// The level of IRQ 1.
    pub fn irq(&self) -> bool {
        self.s.ram[0] & INTERRUPT != 0 && self.s.answers.front().is_some_and(|a| a.status & STATUS_AUXILIARY == 0)
    }

    /// The level of IRQ 12.
    pub fn auxiliary_irq(&self) -> bool {
        self.s.ram[0] & AUXILIARY_INTERRUPT != 0
            && self.s.answers.front().is_some_and(|a| a.status & STATUS_AUXILIARY != 0)
    }

    fn answer(&mut self, value: u8, status: u8) {
        if self.s.answers.len() < ANSWERS {
            self.s.answers.push_back(Answer { value, status });
        }
    }

    /// Reads the data port.
    pub fn read_data(&mut self) -> u8 {
        self.s.answers.pop_front().map_or(0, |a| a.value)
    }

    /// Reads the status port. The input buffer is never full: commands are carried out at once.
    pub fn read_status(&self) -> u8 {
        let mut status = STATUS_UNLOCKED | (self.s.ram[0] & STATUS_SYSTEM);
        if self.s.last_was_command {
            status |= STATUS_COMMAND;
        }
        if let Some(answer) = self.s.answers.front() {
            status |= STATUS_OUTPUT_FULL | answer.status;
        }
        status
    }

    fn pull_reset(&mut self) {
        match self.superio.write(SUPERIO_COMMAND, RESET) {
            Ok(()) => {}
            Err(never) => match never {},
        }
    }

    /// Writes the command port.
    pub fn write_command(&mut self, value: u8) {
        self.s.last_was_command = true;
        self.s.command = None;
        match value {
            0x20..=0x3f => self.answer(self.s.ram[usize::from(value & 0x1f)], 0),
            0x60..=0x7f | 0xd1..=0xd4 => self.s.command = Some(value),
            0xa7 => self.s.ram[0] |= AUXILIARY_OFF,
            0xa8 => self.s.ram[0] &= !AUXILIARY_OFF,
            // The interfaces' own tests: no error.
            0xa9 | 0xab => self.answer(0x00, 0),
            0xaa => {
                self.s.ram[0] |= STATUS_SYSTEM;
                self.answer(0x55, 0);
            }
            0xad => self.s.ram[0] |= KEYBOARD_OFF,
            0xae => self.s.ram[0] &= !KEYBOARD_OFF,
            // Input port: the lock is open.
            0xc0 => self.answer(0x80, 0),
            0xd0 => {
                let full = if self.s.answers.is_empty() { 0 } else { 0x10 };
                self.answer(self.s.output_port | full, 0);
            }
            // "Pulse output port": bits 3:0 low pulse their line; line 0 is the reset.
            0xf0..=0xff if value & 1 == 0 => self.pull_reset(),
            _ => {}
        }
    }

    /// Writes the data port.
    pub fn write_data(&mut self, value: u8) {
        self.s.last_was_command = false;
        match self.s.command.take() {
            Some(command @ 0x60..=0x7f) => self.s.ram[usize::from(command & 0x1f)] = value,
            Some(0xd1) => {
                self.s.output_port = value | OUT_NOT_RESET;
                if value & OUT_NOT_RESET == 0 {
                    self.pull_reset();
                }
            }
            Some(0xd2) => self.answer(value, 0),
            Some(0xd3) => self.answer(value, STATUS_AUXILIARY),
            Some(0xd4) => self.answer(RESEND, STATUS_AUXILIARY | STATUS_TIMEOUT),
            // A byte for the keyboard.
            _ => self.answer(RESEND, STATUS_TIMEOUT),
        }
    }

    /// The whole state.
    pub fn state(&self) -> I8042State {
        self.s.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &I8042State) {
        self.s.clone_from(state);
    }
}

#[cfg(test)]
#[path = "i8042_test.rs"]
mod tests;
