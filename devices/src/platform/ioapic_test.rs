use super::*;

fn program(ioapic: &mut Ioapic, pin: u8, entry: u64) -> Vec<ApicMessage> {
    let mut sent = Vec::new();
    // The high half first, as a driver does, so that nothing goes to the wrong CPU.
    for (register, half) in [(0x11 + 2 * pin, (entry >> 32) as u32), (0x10 + 2 * pin, entry as u32)] {
        sent.extend(ioapic.write(0x00, u32::from(register)));
        sent.extend(ioapic.write(0x10, half));
    }
    sent
}

fn read(ioapic: &mut Ioapic, register: u8) -> u32 {
    assert!(ioapic.write(0x00, u32::from(register)).is_empty());
    ioapic.read(0x10)
}

// covers: devices/ioapic-edge-level-eoi
#[test]
fn registers() {
    let mut ioapic = Ioapic::new();
    assert_eq!(read(&mut ioapic, 1), 0x0017_0020, "24 entries, version 20H");
    let _ = ioapic.write(0x00, 0);
    let _ = ioapic.write(0x10, u32::MAX);
    assert_eq!(read(&mut ioapic, 0), 0x0f00_0000, "four bits of ID");
    assert_eq!(
        read(&mut ioapic, 2),
        0x0f00_0000,
        "the arbitration ID is loaded with it"
    );
    for pin in 0..24 {
        assert_eq!(read(&mut ioapic, 0x10 + 2 * pin), 0x0001_0000, "masked at reset");
        program(&mut ioapic, pin, u64::MAX);
        assert_eq!(
            read(&mut ioapic, 0x10 + 2 * pin),
            0x0001_afff,
            "delivery status and remote IRR are read-only"
        );
        assert_eq!(read(&mut ioapic, 0x11 + 2 * pin), 0xff00_0000);
    }
    assert_eq!(read(&mut ioapic, 0x40), 0);
    assert_eq!(ioapic.read(0), 0x40, "the index reads back");
}

// covers: devices/ioapic-edge-level-eoi
#[test]
fn messages() {
    let fixed = |vector, destination| ApicMessage {
        destination,
        delivery: Delivery::Fixed,
        vector,
        level: false,
    };
    for (entry, want, why) in [
        (
            0x0300_0000_0000_0031,
            Some(fixed(0x31, Destination::Physical(3))),
            "physical",
        ),
        (
            0x0300_0000_0000_0831,
            Some(fixed(0x31, Destination::Logical(3))),
            "logical",
        ),
        (
            0xff00_0000_0000_0031,
            Some(fixed(0x31, Destination::All)),
            "physical FFH is everybody",
        ),
        (0x0000_0000_0001_0031, None, "masked"),
        (0x0000_0000_0000_0331, None, "delivery mode 011 is reserved"),
        (0x0000_0000_0000_0631, None, "an IOAPIC has no start-up"),
    ] {
        let mut ioapic = Ioapic::new();
        assert!(program(&mut ioapic, 5, entry).is_empty());
        assert_eq!(ioapic.set_pin(5, true), want, "{why}");
    }
    for (bits, delivery) in [
        (1, Delivery::LowestPriority),
        (2, Delivery::Smi),
        (4, Delivery::Nmi),
        (5, Delivery::Init),
        (7, Delivery::ExtInt),
    ] {
        let mut ioapic = Ioapic::new();
        program(&mut ioapic, 5, bits << 8 | 0x40);
        assert_eq!(ioapic.set_pin(5, true).map(|m| m.delivery), Some(delivery));
    }
}

// covers: devices/ioapic-edge-level-eoi
#[test]
fn an_edge_goes_out_once_and_is_lost_while_masked() {
    let mut ioapic = Ioapic::new();
    program(&mut ioapic, 4, 0x34);
    assert!(ioapic.set_pin(4, true).is_some());
    assert!(ioapic.set_pin(4, true).is_none(), "no new edge");
    assert!(ioapic.eoi(0x34).is_empty(), "an EOI means nothing to an edge");
    assert!(ioapic.set_pin(4, false).is_none());
    program(&mut ioapic, 4, 0x1_0034);
    assert!(ioapic.set_pin(4, true).is_none());
    assert!(
        program(&mut ioapic, 4, 0x34).is_empty(),
        "signaled while masked: not held pending"
    );
}

// covers: devices/ioapic-edge-level-eoi
#[test]
fn a_level_waits_for_its_eoi() {
    const LEVEL_50: u64 = 0x8050;
    let remote_irr = |ioapic: &Ioapic| ioapic.entry(9).unwrap() & REMOTE_IRR != 0;
    let mut ioapic = Ioapic::new();
    program(&mut ioapic, 9, LEVEL_50);
    let sent = ioapic.set_pin(9, true).unwrap();
    assert!(sent.level && remote_irr(&ioapic));
    assert!(ioapic.set_pin(9, true).is_none(), "taken and not yet ended");
    assert!(ioapic.eoi(0x51).is_empty(), "another vector's EOI");
    assert!(remote_irr(&ioapic));
    assert_eq!(ioapic.eoi(0x50), [sent], "still asserted: it comes again");
    assert!(ioapic.set_pin(9, false).is_none());
    assert!(ioapic.eoi(0x50).is_empty() && !remote_irr(&ioapic), "now it is done");
    // Masked and asserted, then unmasked: a level is seen whenever one looks.
    program(&mut ioapic, 9, LEVEL_50 | MASKED);
    assert!(ioapic.set_pin(9, true).is_none());
    assert_eq!(program(&mut ioapic, 9, LEVEL_50), [sent]);
    // The EOI register of version 20H.
    assert_eq!(ioapic.write(0x40, 0x50), [sent]);
    // Drivers of older parts drop remote IRR by making the pin an edge for a moment.
    program(&mut ioapic, 9, 0x50 | MASKED);
    assert!(!remote_irr(&ioapic));
    assert_eq!(program(&mut ioapic, 9, LEVEL_50), [sent]);
}
