//! A board whose interrupt controllers somebody else has: a hypervisor in the kernel, with the CPUs' local APICs.
//!
//! The board's own stand idle then, and so does the interval timer: their ports and registers are not here, and the devices'
//! lines lead out of the board.

use std::fmt;

use crate::pci::Message;

/// Where the lines of the devices lead that are left on such a board.
pub trait Lines: fmt::Debug + Send {
    /// A line has changed. Global system interrupts: the ISA lines by their numbers, and from 16 on the IOAPIC's other pins.
    fn set(&self, gsi: u8, asserted: bool);

    /// A device sends a message-signalled interrupt.
    fn message(&self, message: Message);
}

/// The way out of such a board.
#[derive(Debug)]
pub(super) struct Elsewhere {
    lines: Box<dyn Lines>,
    /// Levels of the pins that have no ISA interrupt.
    pins: u32,
    /// See [`super::Platform::take_missed`].
    pub missed: bool,
}

impl Elsewhere {
    pub fn new(lines: Box<dyn Lines>) -> Self {
        Elsewhere {
            lines,
            pins: 0,
            missed: false,
        }
    }

    /// A message-signalled interrupt.
    pub fn message(&self, message: Message) {
        self.lines.message(message);
    }

    /// An ISA line has changed.
    pub fn set_irq(&self, irq: u8, asserted: bool) {
        self.lines.set(irq, asserted);
    }

    /// One of the other pins has this level: a driver's every access says so.
    pub fn set_pin(&mut self, pin: u8, asserted: bool) {
        let bit = 1 << (pin & 31);
        if (self.pins & bit != 0) != asserted {
            self.pins ^= bit;
            self.lines.set(pin, asserted);
        }
    }
}
