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
mod tests {
    use super::*;

    const NON_SPECIFIC_EOI: u8 = 0x20;
    const READ_IRR: u8 = 0x0a;
    const READ_ISR: u8 = 0x0b;
    const POLL: u8 = 0x0c;
    const SET_SPECIAL_MASK: u8 = 0x68;

    /// Initialized as PC firmware does it: vectors 08H and 70H, cascade on pin 2, nothing masked.
    fn pic() -> Pic {
        pic_with_icw4(0x01)
    }

    fn pic_with_icw4(icw4: u8) -> Pic {
        let mut pic = Pic::new();
        for (second, base, icw3) in [(false, 0x08, 0x04), (true, 0x70, 0x02)] {
            pic.write(second, false, 0x11);
            pic.write(second, true, base);
            pic.write(second, true, icw3);
            pic.write(second, true, icw4);
            pic.write(second, true, 0);
        }
        pic
    }

    fn isr(pic: &mut Pic, second: bool) -> u8 {
        pic.write(second, false, READ_ISR);
        pic.read(second, false)
    }

    fn irr(pic: &mut Pic, second: bool) -> u8 {
        pic.write(second, false, READ_IRR);
        pic.read(second, false)
    }

    // covers: devices/pic
    #[test]
    fn every_line_has_its_vector() {
        for irq in (0..16).filter(|irq| *irq != CASCADE) {
            let mut pic = pic();
            assert!(!pic.intr());
            pic.set_irq(irq, true);
            assert!(pic.intr(), "IRQ {irq}");
            let second = irq >= 8;
            assert_eq!(irr(&mut pic, second), 1 << (irq & 7));
            assert_eq!(pic.acknowledge(), if second { 0x70 + irq - 8 } else { 0x08 + irq });
            assert_eq!(isr(&mut pic, second), 1 << (irq & 7));
            assert_eq!(irr(&mut pic, second), 0, "the acknowledge takes an edge");
            assert_eq!(
                isr(&mut pic, false) & 1 << CASCADE,
                if second { 1 << CASCADE } else { 0 }
            );
            assert!(!pic.intr());
        }
    }

    // covers: devices/pic
    #[test]
    fn fully_nested_mode() {
        for (serving, request, delivered, why) in [
            (4, 4, false, "the same level waits"),
            (4, 5, false, "a lower level waits"),
            (4, 3, true, "a higher level interrupts"),
            (4, 0, true, "IRQ 0 is the highest"),
            (4, 8, true, "the second controller sits at level 2"),
            (1, 8, false, "and so below level 1"),
            (8, 3, false, "and above level 3"),
            (
                12,
                9,
                false,
                "not in special fully nested mode: its own pin is in service",
            ),
        ] {
            let mut pic = pic();
            pic.set_irq(serving, true);
            pic.acknowledge();
            pic.set_irq(serving, false);
            pic.set_irq(request, true);
            assert_eq!(pic.intr(), delivered, "{request} while {serving}: {why}");
        }
        let mut pic = pic_with_icw4(0x11);
        pic.set_irq(12, true);
        pic.acknowledge();
        pic.set_irq(9, true);
        assert!(
            pic.intr(),
            "special fully nested mode lets a higher request of the same controller through"
        );
        assert_eq!(pic.acknowledge(), 0x71);
    }

    // covers: devices/pic
    #[test]
    fn end_of_interrupt_and_rotation() {
        // (levels in service, OCW2, levels left in service, the level that now has the lowest priority)
        for (serving, ocw2, left, lowest, why) in [
            (
                0b0001_1000,
                NON_SPECIFIC_EOI,
                0b0001_0000,
                7,
                "non-specific EOI ends the highest",
            ),
            (
                0b0001_1000,
                0x60 | 4,
                0b0000_1000,
                7,
                "specific EOI ends the one it names",
            ),
            (0b0001_1000, 0xa0, 0b0001_0000, 3, "rotate on non-specific EOI"),
            (0b0001_1000, 0xe0 | 4, 0b0000_1000, 4, "rotate on specific EOI"),
            (0b0001_1000, 0xc0 | 5, 0b0001_1000, 5, "set priority ends nothing"),
            (0b0001_1000, 0x40, 0b0001_1000, 7, "no operation"),
        ] {
            let mut pic = pic();
            for level in (0..8).rev().filter(|l| serving & (1 << l) != 0) {
                pic.set_irq(level, true);
                pic.acknowledge();
                pic.set_irq(level, false);
            }
            assert_eq!(isr(&mut pic, false), serving);
            pic.write(false, false, ocw2);
            assert_eq!(isr(&mut pic, false), left, "{why}");
            // End all, then ask with all: the level above the lowest comes first.
            for level in 0..8 {
                pic.write(false, false, 0x60 | level);
            }
            for level in [0, 1, 3, 4, 5, 6, 7] {
                pic.set_irq(level, true);
            }
            let first = if (lowest + 1) & 7 == CASCADE {
                3
            } else {
                (lowest + 1) & 7
            };
            assert_eq!(pic.acknowledge(), 0x08 + first, "{why}");
        }
    }

    // covers: devices/pic
    #[test]
    fn automatic_end_of_interrupt() {
        let mut pic = pic_with_icw4(0x03);
        pic.set_irq(4, true);
        pic.set_irq(5, true);
        assert_eq!((pic.acknowledge(), isr(&mut pic, false)), (0x0c, 0));
        assert!(pic.intr(), "nothing is in service, so level 5 comes");
        pic.write(false, false, 0x80);
        assert_eq!(pic.acknowledge(), 0x0d);
        for level in [5, 6] {
            pic.set_irq(level, false);
            pic.set_irq(level, true);
        }
        assert_eq!(
            pic.acknowledge(),
            0x0e,
            "rotate in automatic EOI mode: 5 was served last and is lowest"
        );
    }

    // covers: devices/pic
    #[test]
    fn special_mask_mode() {
        let mut pic = pic();
        pic.set_irq(3, true);
        pic.acknowledge();
        pic.set_irq(5, true);
        assert!(!pic.intr(), "3 is in service");
        pic.write(false, true, 1 << 3);
        assert!(!pic.intr(), "masking 3 does not help in normal mode");
        pic.write(false, false, SET_SPECIAL_MASK);
        assert!(pic.intr(), "it does in special mask mode");
        assert_eq!(pic.acknowledge(), 0x0d);
        pic.write(false, false, NON_SPECIFIC_EOI);
        assert_eq!(
            isr(&mut pic, false),
            1 << 3,
            "a non-specific EOI passes over the masked level"
        );
        pic.write(false, false, NON_SPECIFIC_EOI);
        assert_eq!(isr(&mut pic, false), 1 << 3);
    }

    // covers: devices/pic
    #[test]
    fn poll_command() {
        let mut pic = pic();
        pic.write(false, false, POLL);
        assert_eq!(pic.read(false, false) & 0x80, 0, "no request");
        pic.set_irq(6, true);
        pic.write(false, false, POLL);
        assert_eq!(pic.read(false, false), 0x86, "a request at level 6");
        assert_eq!(isr(&mut pic, false), 1 << 6, "which the read has acknowledged");
        assert_eq!(pic.read(false, true), 0, "one read only: this is the mask");
    }

    // covers: devices/pic
    #[test]
    fn a_request_that_is_withdrawn_is_spurious() {
        for (irq, vector, first_isr) in [(3, 0x0f, 0), (11, 0x77, 1 << CASCADE)] {
            let mut pic = pic();
            pic.set_irq(irq, true);
            if irq < 8 {
                pic.set_irq(irq, false);
            } else {
                // Gone between the two INTA cycles: the first controller has its request, the second has none.
                pic.chips[1].set_line(irq & 7, false);
            }
            assert_eq!(pic.acknowledge(), vector, "IRQ {irq}");
            assert_eq!(isr(&mut pic, false), first_isr);
            assert_eq!(isr(&mut pic, true), 0, "a spurious interrupt is not in service");
        }
    }

    // covers: devices/pic
    #[test]
    fn edge_and_level() {
        for (elcr, again, why) in [
            (0x00, false, "an edge is taken once"),
            (0x20, true, "a level asks until it falls"),
        ] {
            let mut pic = pic();
            pic.write_elcr(false, elcr);
            pic.set_irq(5, true);
            pic.acknowledge();
            pic.write(false, false, NON_SPECIFIC_EOI);
            assert_eq!(pic.intr(), again, "{why}");
            pic.set_irq(5, false);
            assert!(!pic.intr());
            pic.set_irq(5, true);
            assert!(pic.intr());
        }
        let mut pic = pic();
        pic.write_elcr(false, 0xff);
        pic.write_elcr(true, 0xff);
        assert_eq!(
            (pic.read_elcr(false), pic.read_elcr(true)),
            (0xf8, 0xde),
            "IRQ 0, 1, 2, 8, 13 are always edges"
        );
    }

    // covers: devices/pic
    #[test]
    fn initialization() {
        let mut pic = pic();
        pic.write(false, true, 0xaa);
        assert_eq!(pic.read(false, true), 0xaa, "OCW1 reads back");
        pic.set_irq(4, true);
        pic.write(false, false, 0x11);
        pic.write(false, true, 0x20);
        pic.write(false, true, 0x04);
        pic.write(false, true, 0x01);
        assert_eq!(pic.read(false, true), 0, "ICW1 clears the mask");
        assert!(!pic.intr(), "and the edge sense: a line that is high must fall first");
        pic.set_irq(4, false);
        pic.set_irq(4, true);
        assert_eq!(pic.acknowledge(), 0x24, "ICW2 is the new base");
        // Without ICW4 and without a cascade, OCW1 comes right after ICW2.
        pic.write(false, false, 0x12);
        pic.write(false, true, 0x40);
        pic.write(false, true, 0x5a);
        assert_eq!(pic.read(false, true), 0x5a);
    }

    // covers: devices/pic
    #[test]
    fn requests_of_the_second_controller_follow_one_another() {
        let mut pic = pic();
        pic.set_irq(9, true);
        pic.set_irq(14, true);
        assert_eq!(pic.acknowledge(), 0x71);
        assert!(!pic.intr(), "14 is lower than 9");
        pic.write(true, false, NON_SPECIFIC_EOI);
        pic.write(false, false, NON_SPECIFIC_EOI);
        assert!(pic.intr(), "14's turn, a new edge at the cascade pin");
        assert_eq!(pic.acknowledge(), 0x76);
        // With automatic EOI the second controller asks again at once: its INT must fall in between to be an edge.
        let mut pic = pic_with_icw4(0x03);
        pic.set_irq(9, true);
        pic.set_irq(14, true);
        assert_eq!(
            (pic.acknowledge(), pic.intr(), pic.acknowledge(), pic.intr()),
            (0x71, true, 0x76, false)
        );
    }
}
