use super::*;

// covers: devices/reset-register
#[test]
fn a_reset_starts_when_its_bit_rises() {
    let mut control = SystemControl::new();
    for (value, reset) in [
        (0x02, false),
        (0x06, true),
        (0x06, false),
        (0x02, false),
        (0x06, true),
        (0x00, false),
    ] {
        control.write_cf9(value);
        assert_eq!(control.take_reset(), reset, "CF9H: {value:#x}");
        assert_eq!(control.read_cf9(), value);
    }
    for (value, reset) in [(0x02, false), (0x03, true), (0x03, false), (0x02, false), (0x01, true)] {
        control.write_92(value);
        assert_eq!(control.take_reset(), reset, "92H: {value:#x}");
        assert_eq!(control.read_92(), value);
    }
}
