use super::*;

const IDENTITY: Identity = Identity {
    vendor: 0x1af4,
    device: 0x1042,
    revision: 1,
    class: 0x01_00_00,
    subsystem: 0x1100,
};

// covers: devices/pci-config
#[test]
fn the_header_says_what_the_function_is() {
    let space = ConfigSpace::new(IDENTITY);
    for (at, size, value, name) in [
        (0x00, 4, 0x1042_1af4, "device and vendor"),
        (0x00, 2, 0x1af4, "vendor"),
        (0x03, 1, 0x10, "a byte of the device"),
        (0x08, 4, 0x0100_0001, "class and revision"),
        (0x0e, 1, 0, "header type 0, one function"),
        (0x2c, 4, 0x1100_1af4, "subsystem"),
        (0x06, 2, 0, "no capabilities"),
        (0xfc, 4, 0, "nothing"),
        (0x100, 4, u32::MAX, "behind the end: no extended configuration space"),
        (0x01, 2, u32::from(0x42u8) << 8 | 0x1a, "within a double word"),
        (0x03, 2, u32::MAX, "across double words"),
        (0x02, 4, u32::MAX, "misaligned"),
    ] {
        assert_eq!(space.read(at, size), value, "{name}");
    }
}

// covers: devices/pci-config
#[test]
fn what_can_be_written_is_what_was_allowed() {
    let mut space = ConfigSpace::new(IDENTITY);
    space.allow(COMMAND, &(COMMAND_MEMORY | COMMAND_MASTER).to_le_bytes());
    space.set_memory_bar(0, 0x8000, 0xc000_8000);
    space.set_interrupt_pin(17);
    space.write(0, 4, 0);
    assert_eq!(space.read(0, 4), 0x1042_1af4, "the ID stays");
    space.write(u16::from(COMMAND), 2, 0xffff);
    assert_eq!(space.command(), COMMAND_MEMORY | COMMAND_MASTER);
    // 6.2.5.1: all ones are written to learn the size.
    space.write(u16::from(BAR0), 4, u32::MAX);
    assert_eq!(space.read(u16::from(BAR0), 4), 0xffff_8000);
    space.write(u16::from(BAR0), 4, 0xc123_4567);
    assert_eq!(space.bar(0), 0xc123_0000);
    space.write(0x14, 4, u32::MAX);
    assert_eq!(space.read(0x14, 4), 0, "no second address");
    space.write(u16::from(INTERRUPT_LINE), 2, 0xffff);
    assert_eq!(space.read(u16::from(INTERRUPT_LINE), 2), 0x01ff, "line, and pin A");
    let bytes = space.bytes().to_vec();
    let mut other = ConfigSpace::new(IDENTITY);
    other.restore(&bytes);
    assert_eq!(other.command(), 0, "only what can be written is taken back");
    space.write(u16::from(COMMAND), 2, 0);
    space.restore(&bytes);
    assert_eq!(space.command(), COMMAND_MEMORY | COMMAND_MASTER);
}

// covers: devices/pci-config
#[test]
fn capabilities_are_a_list() {
    let mut space = ConfigSpace::new(IDENTITY);
    let first = space.add_capability(0x11, &[1, 2, 3]);
    let second = space.add_capability(0x09, &[4; 14]);
    assert_eq!(space.read(u16::from(STATUS), 2) & 0x10, 0x10);
    assert_eq!(space.read(0x34, 1), u32::from(first));
    assert_eq!(space.read(u16::from(first), 2), u32::from(second) << 8 | 0x11);
    assert_eq!(space.read(u16::from(second), 2), 0x0009, "the last");
    assert!(first.is_multiple_of(4) && second.is_multiple_of(4) && second > first + 4);
}

// covers: devices/pci-config
#[test]
fn the_address_register_names_a_byte() {
    let mut address = ConfigAddress::default();
    assert_eq!(address.place(0), None, "not enabled");
    address.set(u32::MAX);
    assert_eq!(address.get(), 0x80ff_fffc, "reserved bits");
    address.set(0x8001_2345);
    let place = Place {
        bus: 1,
        function: 0x23,
        offset: 0x46,
    };
    assert_eq!(address.place(2), Some(place));
    assert_eq!(ecam_place(0x10_0000 | 0x23 << 12 | 0x46), place);
}
