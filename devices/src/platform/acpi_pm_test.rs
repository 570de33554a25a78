use super::*;

const S: u64 = 1_000_000_000;

fn put_enable(pm: &mut AcpiPm, value: u16, now: u64) {
    let [low, high] = value.to_le_bytes();
    pm.write_event(2, low, now);
    pm.write_event(3, high, now);
}

fn status(pm: &mut AcpiPm, now: u64) -> u16 {
    u16::from_le_bytes([pm.read_event(0, now), pm.read_event(1, now)])
}

// covers: devices/pm-timer-pm1
#[test]
fn the_timer_is_exact() {
    let mut pm = AcpiPm::new();
    for (now, want) in [
        (0, 0),
        (279, 0),
        (280, 1),
        (S, 3_579_545),
        (1000 * S, 3_579_545_000),
        (1200 * S, (1200 * PM_TIMER_HZ - (1 << 32)) as u32),
    ] {
        assert_eq!(pm.read_timer(now), want, "{now} ns");
    }
}

// covers: devices/pm-timer-pm1
#[test]
fn timer_status_is_set_when_bit_31_changes() {
    let mut pm = AcpiPm::new();
    assert_eq!(pm.next_event(), None, "not enabled");
    put_enable(&mut pm, TIMER, 0);
    for k in 1..4_u64 {
        let at = ((u128::from(k) * u128::from(HALF) * NS).div_ceil(u128::from(PM_TIMER_HZ))) as u64;
        assert_eq!(pm.next_event(), Some(at));
        assert_eq!(status(&mut pm, at - 1), 0);
        assert!(!pm.irq());
        assert_eq!(status(&mut pm, at), TIMER);
        assert!(pm.irq(), "SCI");
        pm.write_event(0, 0, at);
        assert!(pm.irq(), "writing 0 clears nothing");
        pm.write_event(0, 1, at);
        assert!(!pm.irq(), "writing 1 does");
    }
}

// covers: devices/pm-timer-pm1
#[test]
fn registers_and_soft_off() {
    let mut pm = AcpiPm::new();
    put_enable(&mut pm, 0xffff, 0);
    assert_eq!(
        u16::from_le_bytes([pm.read_event(2, 0), pm.read_event(3, 0)]),
        0x0721,
        "defined bits"
    );
    pm.press_power_button();
    assert!(pm.irq());
    assert_eq!(status(&mut pm, 0), POWER_BUTTON);
    pm.write_event(1, 1, 0);
    assert!(!pm.irq());
    assert_eq!(pm.read_control(0) & 1, 1, "SCI_EN: always ACPI mode");
    // (the control register, switched off, why)
    for (value, off, why) in [
        (0x1400, false, "SLP_TYP alone"),
        (0x2000, false, "SLP_EN with type 0"),
        (0x2c00, false, "SLP_EN with S3's type, which the tables do not offer"),
        (0x3800, false, "SLP_EN with a type that there is not"),
        (0x3400, true, "SLP_EN with S5's type"),
    ] {
        let mut pm = AcpiPm::new();
        for (offset, byte) in (0..).zip(u16::to_le_bytes(value)) {
            pm.write_control(offset, byte);
        }
        assert_eq!(pm.take_power_off(), off, "{why}");
        assert!(!pm.take_power_off(), "once");
        assert_eq!(pm.read_control(1) & 0x20, 0, "SLP_EN reads 0");
    }
}
