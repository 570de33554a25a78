//! The pair of 8259A interrupt controllers, cascaded as on a PC. Intel 8259A data sheet (231468) and, for the edge/level
//! registers, 82371SB (PIIX3) data sheet "ELCR".

use serde::{Deserialize, Serialize};

/// Port of the first controller's command register; its data register follows.
pub const PIC1: u16 = 0x20;
/// Port of the second controller's command register; its data register follows.
pub const PIC2: u16 = 0xa0;
/// Ports of the two edge/level control registers.
pub const ELCR: u16 = 0x4d0;

/// The pin of the first controller to which the second is wired.
const CASCADE: u8 = 2;
/// Lines that may be level-triggered: all but IRQ 0, 1, 2, 8 and 13, which the board drives itself.
const ELCR_WRITABLE: [u8; 2] = [0xf8, 0xde];

/// What the next write to the data port is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Expect {
    Ocw1,
    Icw2,
    Icw3,
    Icw4,
}

/// One 8259A.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Chip {
    /// The input pins.
    lines: u8,
    /// Edges seen and not yet acknowledged.
    edges: u8,
    /// Pins that are level-triggered (ELCR).
    level: u8,
    /// Interrupt mask register.
    imr: u8,
    /// In-service register.
    isr: u8,
    /// ICW2, bits 7:3: the vector of pin 0.
    base: u8,
    /// ICW3: the pins that have a second controller, or the ID of this one.
    icw3: u8,
    /// ICW1 SNGL: no cascade.
    single: bool,
    /// ICW1 IC4: an ICW4 will come.
    wants_icw4: bool,
    expect: Expect,
    /// ICW4 AEOI: an interrupt is out of service as soon as it is acknowledged.
    auto_eoi: bool,
    /// ICW4 SFNM: requests of a second controller nest within its pin.
    special_fully_nested: bool,
    /// OCW2: rotate with every automatic EOI.
    rotate_on_auto_eoi: bool,
    /// The pin with the lowest priority; the one above it has the highest.
    lowest: u8,
    /// OCW3: masked pins in service hold nobody back.
    special_mask: bool,
    /// OCW3: the command port reads ISR instead of IRR.
    read_isr: bool,
    /// OCW3: the next read is an acknowledge.
    poll: bool,
}

impl Chip {
    fn new() -> Chip {
        Chip {
            lines: 0,
            edges: 0,
            level: 0,
            // Before initialization nothing may come out.
            imr: 0xff,
            isr: 0,
            base: 0,
            icw3: 0,
            single: false,
            wants_icw4: false,
            expect: Expect::Ocw1,
            auto_eoi: false,
            special_fully_nested: false,
            rotate_on_auto_eoi: false,
            lowest: 7,
            special_mask: false,
            read_isr: false,
            poll: false,
        }
    }

    /// Interrupt request register.
    fn irr(&self) -> u8 {
        (self.edges & !self.level) | (self.lines & self.level)
    }

    fn set_line(&mut self, pin: u8, high: bool) {
        let bit = 1 << (pin & 7);
        if high {
            self.edges |= bit & !self.lines;
            self.lines |= bit;
        } else {
            // "Edge triggered mode": a request must stay high until its acknowledge. One that falls before is withdrawn.
            self.edges &= !bit;
            self.lines &= !bit;
        }
    }

    /// The set pin of highest priority.
    fn highest(&self, pins: u8) -> Option<u8> {
        (1..=8)
            .map(|i| (self.lowest + i) & 7)
            .find(|pin| pins & (1 << pin) != 0)
    }

    fn rank(&self, pin: u8) -> u8 {
        pin.wrapping_sub(self.lowest).wrapping_sub(1) & 7
    }

    /// The pin for which the INT output is high.
    fn pending(&self) -> Option<u8> {
        let pin = self.highest(self.irr() & !self.imr)?;
        let mut blocking = self.isr;
        if self.special_mask {
            blocking &= !self.imr;
        }
        if self.special_fully_nested && !self.single {
            blocking &= !(self.icw3 & (1 << pin));
        }
        match self.highest(blocking) {
            Some(serving) if self.rank(pin) >= self.rank(serving) => None,
            _ => Some(pin),
        }
    }

    /// INTA: the pin that is now in service.
    fn acknowledge(&mut self) -> Option<u8> {
        let pin = self.pending()?;
        self.edges &= !(1 << pin);
        if self.auto_eoi {
            if self.rotate_on_auto_eoi {
                self.lowest = pin;
            }
        } else {
            self.isr |= 1 << pin;
        }
        Some(pin)
    }

    fn write_command(&mut self, value: u8) {
        if value & 0x10 != 0 {
            self.icw1(value);
        } else if value & 0x08 == 0 {
            self.ocw2(value);
        } else {
            self.ocw3(value);
        }
    }

    /// "Initialization Command Words": clears the edge sense, the mask and the modes. The trigger mode (LTIM) is the ELCR's
    /// business on a PC.
    fn icw1(&mut self, value: u8) {
        self.edges = 0;
        self.imr = 0;
        self.isr = 0;
        self.lowest = 7;
        self.icw3 = 0;
        self.special_mask = false;
        self.read_isr = false;
        self.poll = false;
        self.rotate_on_auto_eoi = false;
        self.auto_eoi = false;
        self.special_fully_nested = false;
        self.single = value & 0x02 != 0;
        self.wants_icw4 = value & 0x01 != 0;
        self.expect = Expect::Icw2;
    }

    fn ocw2(&mut self, value: u8) {
        let pin = value & 7;
        match value >> 5 {
            0b000 => self.rotate_on_auto_eoi = false,
            0b100 => self.rotate_on_auto_eoi = true,
            0b001 => {
                self.end_highest();
            }
            0b101 => {
                if let Some(ended) = self.end_highest() {
                    self.lowest = ended;
                }
            }
            0b011 => self.isr &= !(1 << pin),
            0b111 => {
                self.isr &= !(1 << pin);
                self.lowest = pin;
            }
            0b110 => self.lowest = pin,
            _ => {}
        }
    }

    /// Non-specific EOI. In special mask mode it passes over pins that are masked.
    fn end_highest(&mut self) -> Option<u8> {
        let candidates = if self.special_mask {
            self.isr & !self.imr
        } else {
            self.isr
        };
        let pin = self.highest(candidates)?;
        self.isr &= !(1 << pin);
        Some(pin)
    }

    fn ocw3(&mut self, value: u8) {
        if value & 0x40 != 0 {
            self.special_mask = value & 0x20 != 0;
        }
        if value & 0x04 != 0 {
            self.poll = true;
        } else if value & 0x02 != 0 {
            self.read_isr = value & 0x01 != 0;
        }
    }

    fn write_data(&mut self, value: u8) {
        match self.expect {
            Expect::Ocw1 => self.imr = value,
            Expect::Icw2 => {
                self.base = value & 0xf8;
                self.expect = match (self.single, self.wants_icw4) {
                    (false, _) => Expect::Icw3,
                    (true, true) => Expect::Icw4,
                    (true, false) => Expect::Ocw1,
                };
            }
            Expect::Icw3 => {
                self.icw3 = value;
                self.expect = if self.wants_icw4 { Expect::Icw4 } else { Expect::Ocw1 };
            }
            Expect::Icw4 => {
                self.auto_eoi = value & 0x02 != 0;
                self.special_fully_nested = value & 0x10 != 0;
                self.expect = Expect::Ocw1;
            }
        }
    }

    fn read(&mut self, data: bool) -> u8 {
        if std::mem::take(&mut self.poll) {
            // "Poll Command": bit 7 says that there was a request, bits 2:0 which.
            return self.acknowledge().map_or(7, |pin| 0x80 | pin);
        }
        match (data, self.read_isr) {
            (true, _) => self.imr,
            (false, true) => self.isr,
            (false, false) => self.irr(),
        }
    }
}

/// Both controllers: IRQ 0 to 7 on the first, 8 to 15 on the second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pic {
    chips: [Chip; 2],
}

impl Default for Pic {
    fn default() -> Self {
        Pic::new()
    }
}

impl Pic {
    /// Uninitialized controllers with everything masked.
    pub fn new() -> Pic {
        Pic {
            chips: [Chip::new(), Chip::new()],
        }
    }

    /// Drives the line of IRQ 0 to 15. IRQ 2 is the cascade and has no line.
    pub fn set_irq(&mut self, irq: u8, high: bool) {
        if irq != CASCADE && irq < 16 {
            self.chips[usize::from(irq >> 3)].set_line(irq & 7, high);
            self.cascade();
        }
    }

    /// The INT output of the pair.
    pub fn intr(&self) -> bool {
        self.chips[0].pending().is_some()
    }

    /// The CPU's two INTA cycles: the vector. A request that is gone by now becomes a spurious one on pin 7, which is not in
    /// service afterwards.
    pub fn acknowledge(&mut self) -> u8 {
        let Some(pin) = self.chips[0].acknowledge() else {
            return self.chips[0].base | 7;
        };
        if pin != CASCADE {
            return self.chips[0].base | pin;
        }
        let pin = self.chips[1].acknowledge().unwrap_or(7);
        // INT falls at INTA, so that a further request of the second controller is a new edge.
        self.chips[0].set_line(CASCADE, false);
        self.cascade();
        self.chips[1].base | pin
    }

    /// Reads a command (`data` false) or data register of controller 0 or 1.
    pub fn read(&mut self, second: bool, data: bool) -> u8 {
        let value = self.chips[usize::from(second)].read(data);
        self.cascade();
        value
    }

    /// Writes a command (`data` false) or data register of controller 0 or 1.
    pub fn write(&mut self, second: bool, data: bool, value: u8) {
        let chip = &mut self.chips[usize::from(second)];
        if data {
            chip.write_data(value);
        } else {
            chip.write_command(value);
        }
        self.cascade();
    }

    /// Reads ELCR 1 or 2.
    pub fn read_elcr(&self, second: bool) -> u8 {
        self.chips[usize::from(second)].level
    }

    /// Writes ELCR 1 or 2. The lines that the board drives itself stay edge-triggered.
    pub fn write_elcr(&mut self, second: bool, value: u8) {
        let i = usize::from(second);
        self.chips[i].level = value & ELCR_WRITABLE[i];
        self.cascade();
    }

    /// The whole state: the pair is registers only.
    pub fn state(&self) -> Pic {
        self.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &Pic) {
        self.clone_from(state);
    }

    fn cascade(&mut self) {
        let int = self.chips[1].pending().is_some();
        self.chips[0].set_line(CASCADE, int);
    }
}

#[cfg(test)]
#[path = "pic_test.rs"]
mod tests;
