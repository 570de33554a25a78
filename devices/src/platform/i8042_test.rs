use super::*;

// covers: devices/i8042-reset
#[test]
fn the_reset_pulse() {
    for command in 0..=255 {
        let mut i8042 = I8042::new();
        i8042.write_command(command);
        // "Pulse output port" pulses the lines whose bit is 0; line 0 is the reset.
        assert_eq!(
            i8042.take_reset(),
            command >= 0xf0 && command & 1 == 0,
            "command {command:#x}"
        );
        assert!(!i8042.take_reset(), "once");
    }
    let mut i8042 = I8042::new();
    for (value, reset) in [(0x03, false), (0x02, true)] {
        i8042.write_command(0xd1);
        i8042.write_data(value);
        assert_eq!(i8042.take_reset(), reset, "output port {value:#x}");
    }
}

// covers: devices/i8042-probe
#[test]
fn what_a_driver_asks() {
    // Command, parameter, answer, status bits with it.
    for (command, parameter, answer, status, why) in [
        (0xaa, None, 0x55, 0, "self test passed"),
        (0xab, None, 0x00, 0, "keyboard interface: no error"),
        (0xa9, None, 0x00, 0, "auxiliary interface: no error"),
        (0x20, None, 0x24, 0, "command byte: system flag, auxiliary device off"),
        (0xd0, None, 0x03, 0, "output port: not in reset, A20"),
        (0xd2, Some(0x5a), 0x5a, 0, "as if from the keyboard"),
        (
            0xd3,
            Some(0x5a),
            0x5a,
            STATUS_AUXILIARY,
            "as if from the auxiliary device",
        ),
        (
            0xd4,
            Some(0xf2),
            0xfe,
            STATUS_AUXILIARY | STATUS_TIMEOUT,
            "no auxiliary device answers",
        ),
    ] {
        let mut i8042 = I8042::new();
        assert_eq!(
            i8042.read_status() & STATUS_OUTPUT_FULL,
            0,
            "nothing to flush at the start"
        );
        i8042.write_command(command);
        assert_eq!(i8042.read_status() & STATUS_COMMAND, STATUS_COMMAND);
        if let Some(parameter) = parameter {
            i8042.write_data(parameter);
        }
        let got = i8042.read_status();
        assert_eq!(got & STATUS_OUTPUT_FULL, STATUS_OUTPUT_FULL, "{why}");
        assert_eq!(got & (STATUS_AUXILIARY | STATUS_TIMEOUT), status, "{why}");
        assert_eq!(got & 0x02, 0, "the input buffer is never full");
        assert_eq!(i8042.read_data(), answer, "{why}");
        assert_eq!(i8042.read_status() & STATUS_OUTPUT_FULL, 0);
    }
    let mut i8042 = I8042::new();
    i8042.write_data(0xf2);
    assert_ne!(i8042.read_status() & STATUS_TIMEOUT, 0, "no keyboard answers");
}

// covers: devices/i8042-probe
#[test]
fn interrupts_follow_the_output_buffer() {
    let mut i8042 = I8042::new();
    i8042.write_command(0x60);
    i8042.write_data(INTERRUPT | AUXILIARY_INTERRUPT);
    i8042.write_command(0xd2);
    i8042.write_data(1);
    i8042.write_command(0xd3);
    i8042.write_data(2);
    assert!(i8042.irq() && !i8042.auxiliary_irq());
    assert_eq!(i8042.read_data(), 1);
    assert!(!i8042.irq() && i8042.auxiliary_irq());
    assert_eq!(i8042.read_data(), 2);
    assert!(!i8042.irq() && !i8042.auxiliary_irq());
    // A guest that never reads does not make the queue grow.
    for _ in 0..1000 {
        i8042.write_command(0xaa);
    }
    assert_eq!(i8042.state().answers.len(), ANSWERS);
}
