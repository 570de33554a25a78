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
