use super::*;

/// 1 GHz each, so that without a divider a tick is a nanosecond.
fn caps() -> LapicCaps {
    LapicCaps {
        timer_khz: 1_000_000,
        tsc_khz: 1_000_000,
        x2apic: true,
        tsc_deadline: true,
        cmci: true,
        suppress_eoi_broadcast: true,
        physical_bits: 40,
    }
}

/// Software-enabled, spurious vector FFH.
fn lapic() -> Lapic {
    let mut lapic = Lapic::new(caps(), 3, false);
    put(&mut lapic, 0xf0, 0x1ff);
    lapic
}

fn x2apic() -> Lapic {
    let mut lapic = lapic();
    lapic.write_msr(IA32_APIC_BASE, DEFAULT_BASE | EN | EXTD, 0).unwrap();
    lapic
}

fn get(lapic: &mut Lapic, offset: u64) -> u32 {
    let now = lapic.s.now;
    lapic.read(offset, 4, now) as u32
}

fn put(lapic: &mut Lapic, offset: u64, value: u32) -> Option<Action> {
    let now = lapic.s.now;
    lapic.write(offset, 4, u64::from(value), now)
}

fn fixed(vector: u8, level: bool) -> ApicMessage {
    ApicMessage {
        destination: Destination::Physical(3),
        delivery: Delivery::Fixed,
        vector,
        level,
    }
}

/// ESR as software reads it: write, then read.
fn esr(lapic: &mut Lapic) -> u32 {
    put(lapic, 0x280, 0);
    get(lapic, 0x280)
}

// covers: devices/lapic-xapic
#[test]
fn registers_after_reset() {
    let mut lapic = Lapic::new(caps(), 3, false);
    for (offset, value, name) in [
        (0x020, 0x0300_0000, "ID"),
        (
            0x030,
            0x0106_0015,
            "version: seven LVT entries, EOI broadcasts can be suppressed",
        ),
        (0x080, 0, "TPR"),
        (0x090, 0, "APR"),
        (0x0a0, 0, "PPR"),
        (0x0d0, 0, "LDR"),
        (0x0e0, 0xffff_ffff, "DFR"),
        (0x0f0, 0xff, "SVR"),
        (0x100, 0, "ISR"),
        (0x180, 0, "TMR"),
        (0x200, 0, "IRR"),
        (0x280, 0, "ESR"),
        (0x2f0, 0x1_0000, "LVT CMCI"),
        (0x300, 0, "ICR low"),
        (0x310, 0, "ICR high"),
        (0x320, 0x1_0000, "LVT timer"),
        (0x330, 0x1_0000, "LVT thermal"),
        (0x340, 0x1_0000, "LVT performance"),
        (0x350, 0x1_0000, "LVT LINT0"),
        (0x360, 0x1_0000, "LVT LINT1"),
        (0x370, 0x1_0000, "LVT error"),
        (0x380, 0, "initial count"),
        (0x390, 0, "current count"),
        (0x3e0, 0, "divide configuration"),
    ] {
        assert_eq!(get(&mut lapic, offset), value, "{name}");
    }
    assert_eq!(esr(&mut lapic), 0, "none of them is reserved");
    let mut old = Lapic::new(
        LapicCaps {
            cmci: false,
            suppress_eoi_broadcast: false,
            ..caps()
        },
        0,
        true,
    );
    assert_eq!(get(&mut old, 0x30), 0x0005_0015);
    assert_eq!(get(&mut old, 0x2f0), 0);
    assert_eq!(esr(&mut old), ESR_ILLEGAL_REGISTER, "no CMCI, no register");
}

// covers: devices/lapic-xapic
#[test]
fn writable_bits() {
    for (offset, value, name) in [
        (0x020, 0x0300_0000, "the ID is read-only since Nehalem"),
        (0x030, 0x0106_0015, "version"),
        (0x080, 0xff, "TPR"),
        (0x0d0, 0xff00_0000, "LDR"),
        (0x0e0, 0xffff_ffff, "DFR"),
        (0x0f0, 0x11ff, "SVR: no focus checking"),
        (0x2f0, 0x1_07ff, "LVT CMCI"),
        (0x310, 0xff00_0000, "ICR high"),
        (0x320, 0x7_00ff, "LVT timer"),
        (0x330, 0x1_07ff, "LVT thermal"),
        (0x340, 0x1_07ff, "LVT performance"),
        (0x350, 0x1_a7ff, "LVT LINT0: remote IRR is read-only"),
        (0x360, 0x1_a7ff, "LVT LINT1"),
        (0x370, 0x1_00ff, "LVT error"),
        (0x3e0, 0xb, "divide configuration"),
    ] {
        let mut lapic = lapic();
        assert_eq!(put(&mut lapic, offset, u32::MAX), None, "{name}");
        assert_eq!(get(&mut lapic, offset), value, "{name}");
        assert_eq!(esr(&mut lapic), 0, "{name}");
    }
    let mut lapic = lapic();
    put(&mut lapic, 0xe0, 0);
    assert_eq!(get(&mut lapic, 0xe0), 0x0fff_ffff, "DFR bits 27:0 are ones");
}

// covers: devices/lapic-xapic
#[test]
fn error_status_register() {
    for (offset, why) in [
        (0x000, "000H"),
        (0x010, "010H"),
        (0x040, "040H"),
        (0x290, "290H"),
        (0x3a0, "3A0H"),
        (0x3f0, "3F0H"),
        (0x400, "400H"),
        (0xff0, "FF0H"),
    ] {
        for write in [false, true] {
            let mut lapic = lapic();
            if write {
                put(&mut lapic, offset, 0);
            } else {
                get(&mut lapic, offset);
            }
            assert_eq!(get(&mut lapic, 0x280), 0, "{why}: not visible before a write of ESR");
            assert_eq!(esr(&mut lapic), ESR_ILLEGAL_REGISTER, "{why}");
            assert_eq!(
                get(&mut lapic, 0x280),
                ESR_ILLEGAL_REGISTER,
                "{why}: stays until the next write"
            );
            assert_eq!(esr(&mut lapic), 0, "back-to-back writes clear it");
        }
    }
    let mut lapic = lapic();
    put(&mut lapic, 0x370, 0xe0);
    assert_eq!(lapic.receive(fixed(0x0f, false)), None);
    assert_eq!(
        lapic.pending_vector(),
        Some(0xe0),
        "the error goes through its LVT entry"
    );
    assert_eq!(get(&mut lapic, 0x200), 0, "IRR bits 15:0 are never set");
    assert_eq!(esr(&mut lapic), ESR_RECEIVE_ILLEGAL_VECTOR);
    // ICR with an illegal vector; self-IPI, so that it is received too.
    put(&mut lapic, 0x300, 0x4_0005);
    assert_eq!(esr(&mut lapic), ESR_SEND_ILLEGAL_VECTOR | ESR_RECEIVE_ILLEGAL_VECTOR);
    // An error entry with an illegal vector is itself an error, and that is all.
    put(&mut lapic, 0x370, 0x05);
    lapic.receive(fixed(0x0f, false));
    assert_eq!(esr(&mut lapic), ESR_RECEIVE_ILLEGAL_VECTOR);
}

// covers: devices/tpr-cr8
#[test]
fn priorities() {
    // TPR, vector in service (0: none), PPR; then a vector requested and whether it is delivered.
    for (tpr, serving, ppr, requested, delivered, why) in [
        (0x00, 0x00, 0x00, 0x10, true, "class 1 is the lowest there is"),
        (0x20, 0x00, 0x20, 0x2f, false, "same class as TPR"),
        (0x20, 0x00, 0x20, 0x30, true, "class above TPR"),
        (0x2f, 0x00, 0x2f, 0x30, true, "the sub-class of TPR does not count"),
        (0x00, 0x45, 0x40, 0x4f, false, "same class as in service"),
        (0x00, 0x45, 0x40, 0x50, true, "class above in service"),
        (0x48, 0x45, 0x48, 0x50, true, "equal classes: PPR is TPR"),
        (0x38, 0x45, 0x40, 0x50, true, "lower TPR: PPR is the class in service"),
        (0xf0, 0x00, 0xf0, 0xff, false, "TPR F0H lets nothing through"),
    ] {
        let mut lapic = lapic();
        if serving != 0 {
            lapic.receive(fixed(serving, false));
            assert_eq!(lapic.acknowledge(), serving);
        }
        put(&mut lapic, 0x80, tpr);
        assert_eq!(get(&mut lapic, 0xa0), ppr, "{why}");
        lapic.receive(fixed(requested, false));
        assert_eq!(lapic.pending_vector(), delivered.then_some(requested), "{why}");
    }
}

// covers: devices/tpr-cr8
#[test]
fn cr8_is_the_class_of_tpr() {
    let mut lapic = lapic();
    for class in 0..16 {
        lapic.set_cr8(class);
        assert_eq!(
            get(&mut lapic, 0x80),
            u32::from(class) << 4,
            "MOV CR8 clears the sub-class"
        );
        put(&mut lapic, 0x80, u32::from(class) << 4 | 7);
        assert_eq!(lapic.cr8(), class);
    }
    lapic.set_cr8(5);
    lapic.receive(fixed(0x5f, false));
    assert_eq!(lapic.pending_vector(), None);
    lapic.set_cr8(4);
    assert_eq!(lapic.pending_vector(), Some(0x5f));
}

// covers: devices/lapic-xapic
#[test]
fn request_service_and_end() {
    let mut lapic = lapic();
    lapic.receive(fixed(0x51, false));
    lapic.receive(fixed(0x92, true));
    assert_eq!(
        (get(&mut lapic, 0x220), get(&mut lapic, 0x240)),
        (1 << 0x11, 1 << 0x12),
        "IRR"
    );
    assert_eq!(get(&mut lapic, 0x1c0), 1 << 0x12, "TMR: 92H is a level");
    assert_eq!(lapic.acknowledge(), 0x92);
    assert_eq!(
        (get(&mut lapic, 0x240), get(&mut lapic, 0x140)),
        (0, 1 << 0x12),
        "from IRR to ISR"
    );
    lapic.receive(fixed(0xa0, false));
    assert_eq!(lapic.acknowledge(), 0xa0, "nested");
    assert_eq!(
        put(&mut lapic, 0xb0, 0),
        None,
        "EOI ends the highest; an edge is not broadcast"
    );
    assert_eq!(put(&mut lapic, 0xb0, 0), Some(Action::Eoi(0x92)), "a level is");
    assert_eq!(lapic.acknowledge(), 0x51);
    put(&mut lapic, 0xb0, 0);
    assert_eq!(put(&mut lapic, 0xb0, 0), None, "nothing in service");
    // Suppressed broadcast.
    put(&mut lapic, 0xf0, 0x11ff);
    lapic.receive(fixed(0x92, true));
    lapic.acknowledge();
    assert_eq!(put(&mut lapic, 0xb0, 0), None, "SVR bit 12");
    put(&mut lapic, 0xf0, 0x1ff);
    lapic.receive(fixed(0x92, false));
    lapic.acknowledge();
    assert_eq!(
        put(&mut lapic, 0xb0, 0),
        None,
        "the same vector as an edge clears its bit in TMR"
    );
}

// covers: devices/lapic-xapic
#[test]
fn spurious_vector_and_software_disable() {
    let mut lapic = lapic();
    put(&mut lapic, 0xf0, 0x1ef);
    lapic.receive(fixed(0x51, false));
    put(&mut lapic, 0x80, 0xf0);
    assert_eq!(lapic.acknowledge(), 0xef, "TPR was raised before the acknowledge");
    assert_eq!(get(&mut lapic, 0x120), 0, "not in service");
    put(&mut lapic, 0x80, 0);
    put(&mut lapic, 0x320, 0x30);
    put(&mut lapic, 0xf0, 0xef);
    assert_eq!(get(&mut lapic, 0x320), 0x1_0030, "disabling masks the LVT");
    put(&mut lapic, 0x320, 0x30);
    assert_eq!(get(&mut lapic, 0x320), 0x1_0030, "and it stays masked");
    lapic.receive(fixed(0x61, false));
    assert_eq!(
        lapic.pending_vector(),
        Some(0x51),
        "what was there is held, what comes is not taken"
    );
    for (delivery, signal) in [
        (Delivery::Smi, Some(Signal::Smi)),
        (Delivery::StartUp, Some(Signal::StartUp(0x61))),
        (Delivery::Init, Some(Signal::Init)),
    ] {
        assert_eq!(
            lapic.receive(ApicMessage {
                delivery,
                ..fixed(0x61, false)
            }),
            signal,
            "taken all the same"
        );
    }
    lapic.receive(ApicMessage {
        delivery: Delivery::Nmi,
        ..fixed(0, false)
    });
    assert!(lapic.take_nmi() && !lapic.nmi_pending());
}

// covers: devices/lapic-xapic
#[test]
fn destinations() {
    const FLAT: u32 = 0xffff_ffff;
    const CLUSTER: u32 = 0x0fff_ffff;
    for (dfr, ldr, destination, taken, why) in [
        (FLAT, 0x00, Destination::Physical(3), true, "its ID"),
        (FLAT, 0x00, Destination::Physical(4), false, "another ID"),
        (FLAT, 0x00, Destination::All, true, "everybody"),
        (FLAT, 0x04, Destination::Logical(0x04), true, "flat: its bit"),
        (FLAT, 0x04, Destination::Logical(0x0b), false, "flat: other bits"),
        (FLAT, 0x04, Destination::Logical(0xff), true, "flat: all bits"),
        (
            CLUSTER,
            0x24,
            Destination::Logical(0x24),
            true,
            "cluster: its cluster, its bit",
        ),
        (
            CLUSTER,
            0x24,
            Destination::Logical(0x14),
            false,
            "cluster: another cluster",
        ),
        (CLUSTER, 0x24, Destination::Logical(0x2b), false, "cluster: another bit"),
        (CLUSTER, 0x24, Destination::Logical(0xff), true, "cluster: broadcast"),
    ] {
        let mut lapic = lapic();
        put(&mut lapic, 0xe0, dfr);
        put(&mut lapic, 0xd0, ldr << 24);
        assert_eq!(lapic.addressed(destination), taken, "{why}");
    }
    let mut lapic = Lapic::new(caps(), 0x25, false);
    lapic.write_msr(IA32_APIC_BASE, DEFAULT_BASE | EN | EXTD, 0).unwrap();
    assert_eq!(
        lapic.read_msr(0x80d, 0),
        Ok(0x0002_0020),
        "x2APIC LDR: cluster 2, bit 5, of ID 25H"
    );
    for (destination, taken, why) in [
        (Destination::Physical(0x25), true, "its ID"),
        (Destination::Physical(0x125), false, "all 32 bits count"),
        (Destination::Logical(0x0002_0020), true, "its cluster and bit"),
        (Destination::Logical(0x0002_0010), false, "another bit"),
        (Destination::Logical(0x0003_0020), false, "another cluster"),
    ] {
        assert_eq!(lapic.addressed(destination), taken, "{why}");
    }
}

// covers: devices/lapic-nmi-self-ipi
#[test]
fn interrupt_command_register() {
    let message = |delivery, destination| ApicMessage {
        destination,
        delivery,
        vector: 0x41,
        level: false,
    };
    let to_5 = Destination::Physical(5);
    for (low, want, why) in [
        (
            0x0_4041,
            Some(Action::Send(message(Delivery::Fixed, to_5))),
            "fixed, physical",
        ),
        (
            0x0_4841,
            Some(Action::Send(message(Delivery::Fixed, Destination::Logical(5)))),
            "fixed, logical",
        ),
        (
            0x0_4141,
            Some(Action::Send(message(Delivery::LowestPriority, to_5))),
            "lowest priority",
        ),
        (0x0_4241, Some(Action::Send(message(Delivery::Smi, to_5))), "SMI"),
        (0x0_4441, Some(Action::Send(message(Delivery::Nmi, to_5))), "NMI"),
        (
            0x0_c541,
            Some(Action::Send(message(Delivery::Init, to_5))),
            "INIT level assert",
        ),
        (0x0_8541, None, "INIT level de-assert is ignored"),
        (
            0x0_4641,
            Some(Action::Send(message(Delivery::StartUp, to_5))),
            "start-up",
        ),
        (0x0_4341, None, "011 is reserved"),
        (0x0_4741, None, "111 is reserved"),
        (
            0x8_4041,
            Some(Action::Send(message(Delivery::Fixed, Destination::All))),
            "all including self",
        ),
        (0x8_4441, None, "all including self: only fixed is valid"),
        (
            0xc_4041,
            Some(Action::SendOthers(message(Delivery::Fixed, Destination::All))),
            "all excluding self",
        ),
        (
            0xc_4441,
            Some(Action::SendOthers(message(Delivery::Nmi, Destination::All))),
            "NMI to the others",
        ),
        (0x4_4441, None, "self: only fixed is valid"),
    ] {
        let mut lapic = lapic();
        put(&mut lapic, 0x310, 5 << 24);
        assert_eq!(put(&mut lapic, 0x300, low), want, "{why}");
        assert_eq!(get(&mut lapic, 0x300) & 0x1000, 0, "{why}: delivery status is idle");
        assert_eq!((lapic.pending_vector(), lapic.nmi_pending()), (None, false), "{why}");
    }
    let mut lapic = lapic();
    assert_eq!(put(&mut lapic, 0x300, 0x4_4041), None);
    assert_eq!(lapic.acknowledge(), 0x41, "self, fixed");
}

// covers: devices/lapic-nmi-self-ipi
#[test]
fn x2apic_ipis() {
    let mut lapic = x2apic();
    for (icr, want, why) in [
        (
            0x0000_0105_0000_4041_u64,
            Action::Send(ApicMessage {
                destination: Destination::Physical(0x105),
                delivery: Delivery::Fixed,
                vector: 0x41,
                level: false,
            }),
            "32 bits of destination",
        ),
        (
            0xffff_ffff_0000_4041,
            Action::Send(ApicMessage {
                destination: Destination::All,
                delivery: Delivery::Fixed,
                vector: 0x41,
                level: false,
            }),
            "broadcast, physical",
        ),
        (
            0xffff_ffff_0000_4841,
            Action::Send(ApicMessage {
                destination: Destination::All,
                delivery: Delivery::Fixed,
                vector: 0x41,
                level: false,
            }),
            "broadcast, logical",
        ),
    ] {
        assert_eq!(lapic.write_msr(0x830, icr, 0), Ok(Some(want)), "{why}");
        assert_eq!(lapic.read_msr(0x830, 0), Ok(icr), "{why}");
    }
    assert_eq!(
        lapic.write_msr(0x830, 0x4141, 0),
        Ok(None),
        "lowest priority is reserved in x2APIC mode"
    );
    lapic.write_msr(0x828, 0, 0).unwrap();
    assert_eq!(lapic.read_msr(0x828, 0), Ok(0x10), "redirectible IPI");
    assert_eq!(lapic.write_msr(0x83f, 0x77, 0), Ok(None));
    assert_eq!(lapic.acknowledge(), 0x77, "SELF IPI");
    assert_eq!(lapic.write_msr(0x83f, 0x07, 0), Ok(None));
    lapic.write_msr(0x828, 0, 0).unwrap();
    assert_eq!(
        lapic.read_msr(0x828, 0),
        Ok(0x60),
        "an illegal vector, sent and received"
    );
    assert_eq!(
        lapic.write_msr(0x83f, 0x177, 0),
        Err(MsrFault::GeneralProtection),
        "reserved bits"
    );
}

// covers: devices/lapic-nmi-self-ipi
#[test]
fn nmi_through_the_pins_and_the_lvt() {
    let mut lapic = lapic();
    put(&mut lapic, 0x360, 0x400);
    lapic.set_lint(1, true);
    assert!(lapic.take_nmi(), "LINT1 as NMI");
    lapic.set_lint(1, true);
    assert!(!lapic.nmi_pending(), "an edge");
    lapic.set_lint(1, false);
    put(&mut lapic, 0x360, 0x1_0400);
    lapic.set_lint(1, true);
    assert!(!lapic.nmi_pending(), "masked");
    lapic.set_lint(1, false);
    lapic.write_msr(IA32_APIC_BASE, DEFAULT_BASE, 0).unwrap();
    lapic.set_lint(1, true);
    assert!(lapic.nmi_pending(), "with the APIC disabled LINT1 is the NMI pin");
}

// covers: devices/lapic-lvtpc
#[test]
fn lvtpc_masks_itself() {
    let mut lapic = lapic();
    assert!(!lapic.pmi(), "masked at reset");
    put(&mut lapic, 0x340, 0x00fe);
    assert!(lapic.pmi());
    assert_eq!(lapic.acknowledge(), 0xfe);
    assert_eq!(get(&mut lapic, 0x340), 0x1_00fe, "delivery sets the mask");
    assert!(!lapic.pmi());
    put(&mut lapic, 0x340, 0x0400);
    assert!(lapic.pmi() && lapic.take_nmi(), "as NMI");
    assert_eq!(get(&mut lapic, 0x340), 0x1_0400);
    for (lvt, offset) in [(Lvt::Thermal, 0x330), (Lvt::Cmci, 0x2f0), (Lvt::Error, 0x370)] {
        put(&mut lapic, offset, 0x00ee);
        assert!(lapic.raise(lvt));
        assert_eq!(get(&mut lapic, offset), 0x00ee, "the others do not");
    }
}

// covers: devices/lapic-xapic
#[test]
fn lint0() {
    let mut lapic = lapic();
    put(&mut lapic, 0x350, 0x700);
    assert!(!lapic.ext_int_pending());
    lapic.set_lint(0, true);
    assert!(lapic.ext_int_pending(), "virtual wire");
    put(&mut lapic, 0x80, 0xf0);
    assert!(lapic.ext_int_pending(), "ExtINT bypasses priorities");
    put(&mut lapic, 0x80, 0);
    put(&mut lapic, 0x350, 0x1_0700);
    assert!(!lapic.ext_int_pending(), "masked");
    // Fixed and level-triggered: remote IRR until the EOI, and again while the pin is high.
    put(&mut lapic, 0x350, 0x8052);
    assert_eq!(lapic.acknowledge(), 0x52);
    assert_eq!(get(&mut lapic, 0x350), 0xc052, "remote IRR");
    assert_eq!(
        put(&mut lapic, 0xb0, 0),
        None,
        "the EOI is for the pin, not for an IOAPIC"
    );
    assert_eq!(lapic.acknowledge(), 0x52);
    lapic.set_lint(0, false);
    put(&mut lapic, 0xb0, 0);
    assert_eq!(lapic.pending_vector(), None);
    assert_eq!(get(&mut lapic, 0x350), 0x8052);
    lapic.write_msr(IA32_APIC_BASE, DEFAULT_BASE, 0).unwrap();
    lapic.set_lint(0, true);
    assert!(lapic.ext_int_pending(), "with the APIC disabled LINT0 is INTR");
}

// covers: devices/lapic-x2apic
#[test]
fn modes_and_their_transitions() {
    const DISABLED: u64 = DEFAULT_BASE;
    const XAPIC: u64 = DEFAULT_BASE | EN;
    const X2APIC: u64 = DEFAULT_BASE | EN | EXTD;
    const INVALID: u64 = DEFAULT_BASE | EXTD;
    // Figure 11-27.
    for (from, to, legal) in [
        (XAPIC, XAPIC, true),
        (XAPIC, X2APIC, true),
        (XAPIC, DISABLED, true),
        (XAPIC, INVALID, false),
        (X2APIC, X2APIC, true),
        (X2APIC, DISABLED, true),
        (X2APIC, XAPIC, false),
        (X2APIC, INVALID, false),
        (DISABLED, DISABLED, true),
        (DISABLED, XAPIC, true),
        (DISABLED, X2APIC, false),
        (DISABLED, INVALID, false),
    ] {
        let mut lapic = lapic();
        lapic.write_msr(IA32_APIC_BASE, from, 0).unwrap();
        let got = lapic.write_msr(IA32_APIC_BASE, to, 0);
        assert_eq!(
            got,
            if legal {
                Ok(None)
            } else {
                Err(MsrFault::GeneralProtection)
            },
            "{from:#x} to {to:#x}"
        );
        assert_eq!(lapic.read_msr(IA32_APIC_BASE, 0), Ok(if legal { to } else { from }));
    }
    for (value, why) in [
        (XAPIC | 1, "bits 7:0"),
        (XAPIC | 1 << 9, "bit 9"),
        (XAPIC | 1 << 40, "above MAXPHYADDR"),
    ] {
        assert_eq!(
            lapic().write_msr(IA32_APIC_BASE, value, 0),
            Err(MsrFault::GeneralProtection),
            "{why}"
        );
    }
    let mut old = Lapic::new(
        LapicCaps {
            x2apic: false,
            ..caps()
        },
        0,
        true,
    );
    assert_eq!(
        old.read_msr(IA32_APIC_BASE, 0),
        Ok(0xfee0_0900),
        "the boot CPU after reset"
    );
    assert_eq!(
        old.write_msr(IA32_APIC_BASE, X2APIC, 0),
        Err(MsrFault::GeneralProtection),
        "no x2APIC"
    );
}

// covers: devices/lapic-x2apic
#[test]
fn state_across_modes() {
    let mut lapic = lapic();
    put(&mut lapic, 0x80, 0x20);
    put(&mut lapic, 0xd0, 0x0400_0000);
    put(&mut lapic, 0x310, 0x0500_0000);
    put(&mut lapic, 0x340, 0x4fe);
    lapic.write_msr(IA32_APIC_BASE, DEFAULT_BASE | EN | EXTD, 0).unwrap();
    assert_eq!(lapic.page(), None, "no page in x2APIC mode");
    for (msr, value, why) in [
        (0x802, 3, "32 bits of ID"),
        (0x808, 0x20, "TPR is kept"),
        (0x80d, 0x8, "LDR comes from the ID"),
        (0x80f, 0x1ff, "SVR is kept"),
        (0x830, 0, "the high half of ICR is not"),
        (0x834, 0x4fe, "LVTPC is kept"),
    ] {
        assert_eq!(lapic.read_msr(msr, 0), Ok(value), "{why}");
    }
    assert_eq!(
        lapic.receive(ApicMessage {
            delivery: Delivery::Init,
            ..fixed(0, false)
        }),
        Some(Signal::Init)
    );
    assert_eq!(lapic.read_msr(0x80f, 0), Ok(0x1ff), "the processor may hold it off");
    lapic.init();
    assert!(lapic.x2apic(), "INIT keeps the mode");
    assert_eq!(
        (lapic.read_msr(0x802, 0), lapic.read_msr(0x80f, 0)),
        (Ok(3), Ok(0xff)),
        "and the ID, and no more"
    );
    lapic.write_msr(IA32_APIC_BASE, 0xfee1_0000, 0).unwrap();
    assert_eq!(
        lapic.read_msr(0x802, 0),
        Err(MsrFault::GeneralProtection),
        "not in x2APIC mode"
    );
    lapic.write_msr(IA32_APIC_BASE, 0xfee1_0000 | EN, 0).unwrap();
    assert_eq!(lapic.page(), Some(0xfee1_0000), "the page has moved");
    assert_eq!(get(&mut lapic, 0x20), 0x0300_0000);
}

// covers: devices/lapic-x2apic
#[test]
fn x2apic_registers() {
    let gp = Err(MsrFault::GeneralProtection);
    // Table 11-6: MSR, readable, a value that may be written, one that may not.
    for (msr, readable, good, bad, name) in [
        (0x802, true, None, Some(0), "ID is read-only"),
        (0x803, true, None, Some(0), "version is read-only"),
        (0x808, true, Some(0xff), Some(0x100), "TPR"),
        (0x809, false, None, Some(0), "no APR"),
        (0x80a, true, None, Some(0), "PPR is read-only"),
        (0x80b, false, Some(0), Some(1), "EOI is write-only and takes 0"),
        (0x80c, false, None, Some(0), "no remote read"),
        (0x80d, true, None, Some(0), "LDR is read-only"),
        (0x80e, false, None, Some(0), "no DFR"),
        (0x80f, true, Some(0x11ff), Some(0x200), "SVR"),
        (0x810, true, None, Some(0), "ISR"),
        (0x817, true, None, Some(0), "ISR"),
        (0x818, true, None, Some(0), "TMR"),
        (0x827, true, None, Some(0), "IRR"),
        (0x828, true, Some(0), Some(1), "ESR takes 0"),
        (0x829, false, None, Some(0), "reserved"),
        (0x82f, true, Some(0x1_07ff), Some(0x2000), "LVT CMCI"),
        (0x830, true, Some(0x4_4030), Some(0x1_0000), "ICR"),
        (0x831, false, None, Some(0), "no upper half of ICR"),
        (0x832, true, Some(0x2_00ff), Some(0x100), "LVT timer"),
        (0x833, true, Some(0x1_07ff), Some(0x800), "LVT thermal"),
        (0x834, true, Some(0x1_07ff), Some(0x800), "LVT performance"),
        (0x835, true, Some(0x1_a7ff), Some(0x800), "LVT LINT0"),
        (0x836, true, Some(0x1_a7ff), Some(0x2_0000), "LVT LINT1"),
        (0x837, true, Some(0x1_00ff), Some(0x100), "LVT error"),
        (0x838, true, Some(0xffff_ffff), Some(0x1_0000_0000), "initial count"),
        (0x839, true, None, Some(0), "current count is read-only"),
        (0x83a, false, None, Some(0), "reserved"),
        (0x83e, true, Some(0xb), Some(0x4), "divide configuration"),
        (0x83f, false, Some(0xff), Some(0x100), "SELF IPI is write-only"),
        (0x840, false, None, Some(0), "reserved"),
        (0x8ff, false, None, Some(0), "reserved"),
    ] {
        let mut lapic = x2apic();
        assert_eq!(lapic.read_msr(msr, 0).is_ok(), readable, "{name}");
        if let Some(good) = good {
            assert!(lapic.write_msr(msr, good, 0).is_ok(), "{name}");
        }
        if let Some(bad) = bad {
            assert_eq!(lapic.write_msr(msr, bad, 0), gp, "{name}");
        }
        assert_eq!(
            lapic.write_msr(msr, 1 << 63, 0).is_ok(),
            msr == 0x830,
            "{name}: only ICR has an upper half"
        );
    }
    let mut lapic = lapic();
    assert_eq!(
        lapic.read_msr(0x802, 0),
        Err(MsrFault::GeneralProtection),
        "not in xAPIC mode"
    );
    assert_eq!(lapic.read_msr(0x10, 0), Err(MsrFault::Unclaimed));
}

// covers: devices/lapic-timer-modes
#[test]
fn one_shot() {
    let mut lapic = lapic();
    put(&mut lapic, 0x3e0, 0xb);
    put(&mut lapic, 0x320, 0x30);
    put(&mut lapic, 0x380, 1000);
    assert_eq!(lapic.next_event(), Some(1000));
    lapic.advance(400);
    assert_eq!((get(&mut lapic, 0x390), get(&mut lapic, 0x380)), (600, 1000));
    lapic.advance(999);
    assert_eq!(lapic.pending_vector(), None);
    lapic.advance(1000);
    assert_eq!(lapic.acknowledge(), 0x30);
    assert_eq!((get(&mut lapic, 0x390), lapic.next_event()), (0, None));
    lapic.advance(1_000_000);
    assert_eq!(lapic.pending_vector(), None, "once");
    put(&mut lapic, 0x380, 500);
    lapic.advance(1_000_100);
    put(&mut lapic, 0x380, 500);
    assert_eq!(lapic.next_event(), Some(1_000_600), "a write restarts the count");
    put(&mut lapic, 0x380, 0);
    assert_eq!(
        (lapic.next_event(), get(&mut lapic, 0x390)),
        (None, 0),
        "a write of 0 stops it"
    );
}

// covers: devices/lapic-timer-modes
#[test]
fn periodic_is_exact() {
    // 133.333 MHz does not divide into nanoseconds; the millionth period is where it belongs all the same.
    let mut lapic = Lapic::new(
        LapicCaps {
            timer_khz: 133_333,
            ..caps()
        },
        0,
        true,
    );
    put(&mut lapic, 0xf0, 0x1ff);
    put(&mut lapic, 0x3e0, 0x3);
    put(&mut lapic, 0x320, 0x2_0030);
    put(&mut lapic, 0x380, 8333);
    for k in 1..=1000_u128 {
        let want = (k * 8333 * 16 * 1_000_000).div_ceil(133_333) as u64;
        assert_eq!(lapic.next_event(), Some(want), "period {k}");
        lapic.advance(want - 1);
        assert_eq!(lapic.pending_vector(), None);
        assert_eq!(get(&mut lapic, 0x390), 1, "the last tick");
        lapic.advance(want);
        assert_eq!(get(&mut lapic, 0x390), 8333, "reloaded");
        assert_eq!(lapic.acknowledge(), 0x30);
        put(&mut lapic, 0xb0, 0);
    }
    let k = 1_000_000_u128;
    let late = ((k * 8333 * 16 * 1_000_000).div_ceil(133_333)) as u64;
    lapic.advance(late - 1);
    assert_eq!(lapic.acknowledge(), 0x30, "missed periods are one interrupt");
    put(&mut lapic, 0xb0, 0);
    assert_eq!(lapic.next_event(), Some(late));
}

// covers: devices/lapic-timer-modes
#[test]
fn divider() {
    // Figure 11-10: bits 3, 1 and 0.
    for (configuration, divider) in [
        (0x0, 2),
        (0x1, 4),
        (0x2, 8),
        (0x3, 16),
        (0x8, 32),
        (0x9, 64),
        (0xa, 128),
        (0xb, 1),
    ] {
        let mut lapic = lapic();
        put(&mut lapic, 0x320, 0x30);
        put(&mut lapic, 0x3e0, configuration);
        put(&mut lapic, 0x380, 1000);
        assert_eq!(lapic.next_event(), Some(1000 * divider));
        lapic.advance(10 * divider);
        assert_eq!(get(&mut lapic, 0x390), 990);
        put(&mut lapic, 0x3e0, 0xb);
        assert_eq!(
            lapic.next_event(),
            Some(10 * divider + 990),
            "the count goes on at the new rate"
        );
    }
}

// covers: devices/lapic-timer-modes
#[test]
fn mode_changes_and_the_mask() {
    let mut lapic = lapic();
    put(&mut lapic, 0x3e0, 0xb);
    put(&mut lapic, 0x320, 0x30);
    put(&mut lapic, 0x380, 1000);
    lapic.advance(600);
    put(&mut lapic, 0x320, 0x2_0030);
    assert_eq!(get(&mut lapic, 0x390), 400, "one-shot to periodic: the count goes on");
    lapic.advance(1000);
    assert_eq!(
        (lapic.acknowledge(), lapic.next_event()),
        (0x30, Some(2000)),
        "and is then reloaded"
    );
    put(&mut lapic, 0xb0, 0);
    put(&mut lapic, 0x320, 0x3_0030);
    assert_eq!(lapic.next_event(), None, "masked");
    lapic.advance(2500);
    assert_eq!(
        (lapic.pending_vector(), get(&mut lapic, 0x390)),
        (None, 500),
        "but counting"
    );
    put(&mut lapic, 0x320, 0x2_0030);
    assert_eq!(lapic.next_event(), Some(3000));
    put(&mut lapic, 0x320, 0x4_0030);
    assert_eq!(
        (lapic.next_event(), get(&mut lapic, 0x390)),
        (None, 0),
        "to TSC-deadline: disarmed"
    );
}

// covers: devices/lapic-timer-modes
#[test]
fn tsc_deadline() {
    let mut lapic = lapic();
    lapic.set_tsc_offset(5000);
    lapic.write_msr(IA32_TSC_DEADLINE, 6000, 0).unwrap();
    assert_eq!(
        lapic.read_msr(IA32_TSC_DEADLINE, 0),
        Ok(0),
        "in other modes it reads 0 and ignores writes"
    );
    put(&mut lapic, 0x320, 0x4_0030);
    put(&mut lapic, 0x380, 1000);
    assert_eq!(
        (get(&mut lapic, 0x380), lapic.next_event()),
        (0, None),
        "the initial count is ignored"
    );
    lapic.write_msr(IA32_TSC_DEADLINE, 6000, 0).unwrap();
    assert_eq!(lapic.next_event(), Some(1000), "the guest's TSC is 5000 ahead");
    lapic.advance(999);
    assert_eq!(
        (lapic.pending_vector(), lapic.read_msr(IA32_TSC_DEADLINE, 999)),
        (None, Ok(6000))
    );
    lapic.advance(1000);
    assert_eq!(lapic.acknowledge(), 0x30);
    put(&mut lapic, 0xb0, 0);
    assert_eq!(lapic.read_msr(IA32_TSC_DEADLINE, 1000), Ok(0), "disarmed");
    lapic.write_msr(IA32_TSC_DEADLINE, 17, 1000).unwrap();
    assert_eq!(lapic.acknowledge(), 0x30, "a deadline in the past fires at once");
    put(&mut lapic, 0xb0, 0);
    lapic.write_msr(IA32_TSC_DEADLINE, 9000, 1000).unwrap();
    lapic.write_msr(IA32_TSC_DEADLINE, 0, 1000).unwrap();
    assert_eq!(lapic.next_event(), None, "0 disarms");
    lapic.write_msr(IA32_TSC_DEADLINE, 9000, 1000).unwrap();
    put(&mut lapic, 0x320, 0x0_0030);
    put(&mut lapic, 0x320, 0x4_0030);
    assert_eq!(lapic.next_event(), None, "a change of mode disarms");
    lapic.write_msr(IA32_TSC_DEADLINE, u64::MAX, 1000).unwrap();
    assert_eq!(lapic.next_event(), Some(u64::MAX - 5000), "further than anybody waits");
    // Not an instant early, whatever the ratio of TSC to nanoseconds.
    for (khz, deadline) in [(2_666_667, 1_000_001), (2_933_437, 123_456_789), (1_000, 7)] {
        let mut lapic = Lapic::new(LapicCaps { tsc_khz: khz, ..caps() }, 0, true);
        put(&mut lapic, 0xf0, 0x1ff);
        put(&mut lapic, 0x320, 0x4_0030);
        lapic.write_msr(IA32_TSC_DEADLINE, deadline, 0).unwrap();
        let at = lapic.next_event().unwrap();
        let tsc = |ns: u64| u128::from(ns) * u128::from(khz) / 1_000_000;
        assert!(
            tsc(at) >= u128::from(deadline) && tsc(at - 1) < u128::from(deadline),
            "{khz} kHz"
        );
        lapic.advance(at);
        assert_eq!(lapic.pending_vector(), Some(0x30));
    }
    let mut old = Lapic::new(
        LapicCaps {
            tsc_deadline: false,
            ..caps()
        },
        0,
        true,
    );
    assert_eq!(old.read_msr(IA32_TSC_DEADLINE, 0), Err(MsrFault::Unclaimed));
    put(&mut old, 0x320, u32::MAX);
    assert_eq!(get(&mut old, 0x320), 0x3_00ff, "bit 18 is reserved without it");
}

// covers: devices/lapic-xapic
#[test]
fn capabilities_of_the_models() {
    for model in x86::model::MODELS {
        let caps = LapicCaps::of(model);
        assert_eq!((caps.timer_khz, caps.tsc_khz), (model.apic_timer_khz, model.tsc_khz));
        let features = model.cpuid(1, 0)[2];
        assert_eq!(
            (caps.x2apic, caps.tsc_deadline),
            (features & 1 << 21 != 0, features & 1 << 24 != 0)
        );
        assert_eq!(caps.physical_bits, model.physical_bits());
    }
}
