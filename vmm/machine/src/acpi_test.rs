use super::*;

const HARDWARE: Hardware = Hardware {
    lapic: 0xfee0_0000,
    ioapic: 0xfec0_0000,
    ioapic_id: 1,
    cpus: 1,
    pm1a_event: 0x600,
    pm1a_control: 0x604,
    pm_timer: 0x608,
    reset: (0xcf9, 6),
    soft_off: 5,
    sci: 9,
    pvpanic: 0x505,
    com2: true,
    virtio: 2,
    functions: 2,
};

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

fn quad(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn long(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// The table at an address: what its own length says.
fn table(memory: &Memory, address: u64) -> Vec<u8> {
    let mut header = [0; 8];
    memory.read(address, &mut header).unwrap();
    let mut bytes = vec![0; long(&header, 4) as usize];
    memory.read(address, &mut bytes).unwrap();
    bytes
}

fn machine() -> (Memory, Vec<u8>, Vec<u8>) {
    let memory = Memory::new(2 << 20).unwrap();
    let rsdp_at = write(&memory, &HARDWARE).unwrap();
    let mut rsdp = [0; 36];
    memory.read(rsdp_at, &mut rsdp).unwrap();
    assert_eq!(&rsdp[..8], b"RSD PTR ");
    assert_eq!(rsdp_at % 16, 0, "where a scan of the BIOS area looks");
    assert_eq!((sum(&rsdp[..20]), sum(&rsdp), rsdp[15]), (0, 0, 2));
    let xsdt = table(&memory, quad(&rsdp, 24));
    assert_eq!((&xsdt[..4], sum(&xsdt), xsdt.len()), (&b"XSDT"[..], 0, 36 + 24));
    let (fadt, madt) = (table(&memory, quad(&xsdt, 36)), table(&memory, quad(&xsdt, 44)));
    (memory, fadt, madt)
}

// covers: loader/acpi-tables
#[test]
fn the_root_pointer_leads_to_whole_tables() {
    let (memory, fadt, madt) = machine();
    assert_eq!((&fadt[..4], sum(&fadt)), (&b"FACP"[..], 0));
    assert_eq!((&madt[..4], sum(&madt)), (&b"APIC"[..], 0));
    let dsdt = table(&memory, quad(&fadt, 140));
    assert_eq!((&dsdt[..4], sum(&dsdt)), (&b"DSDT"[..], 0));
    assert_eq!(u64::from(long(&fadt, 40)), quad(&fadt, 140), "DSDT and X_DSDT");
    let facs_at = long(&fadt, 36);
    assert_eq!((&table(&memory, facs_at.into())[..4], facs_at % 64), (&b"FACS"[..], 0));
}

#[test]
fn tables_stay_in_the_bios_area_and_apart() {
    let tables = tables(&Hardware { cpus: 64, ..HARDWARE });
    let mut ranges: Vec<_> = tables.iter().map(|(at, bytes)| *at..*at + bytes.len() as u64).collect();
    ranges.sort_by_key(|r| r.start);
    assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start));
    assert!(ranges.iter().all(|r| r.start >= BIOS_START && r.end <= 0x10_0000));
}

// covers: loader/acpi-fadt
#[test]
fn the_fadt_has_power_off_reset_and_the_timer() {
    let (_, fadt, _) = machine();
    assert_eq!((fadt[8], fadt[131], fadt.len()), (6, 5, 276), "ACPI 6.5");
    assert_eq!(u16::from_le_bytes([fadt[46], fadt[47]]), 9, "SCI_INT");
    assert_eq!(long(&fadt, 48), 0, "SMI_CMD: always in ACPI mode");
    assert_eq!((long(&fadt, 56), fadt[88]), (0x600, 4), "PM1a_EVT_BLK");
    assert_eq!((long(&fadt, 64), fadt[89]), (0x604, 2), "PM1a_CNT_BLK");
    assert_eq!((long(&fadt, 76), fadt[91]), (0x608, 4), "PM_TMR_BLK");
    let flags = long(&fadt, 112);
    for (bit, set, name) in [
        (0, true, "WBINVD"),
        (2, true, "PROC_C1"),
        (4, true, "no fixed power button"),
        (5, true, "no fixed sleep button"),
        (8, true, "TMR_VAL_EXT"),
        (10, true, "RESET_REG_SUP"),
        (20, false, "HW_REDUCED_ACPI"),
    ] {
        assert_eq!(flags >> bit & 1 != 0, set, "{name}");
    }
    assert_eq!(fadt[109] & 0b11, 0b11, "IAPC_BOOT_ARCH: legacy devices, 8042");
    assert_eq!(fadt[116..128], [1, 8, 0, 1, 0xf9, 0xc, 0, 0, 0, 0, 0, 0], "RESET_REG");
    assert_eq!(fadt[128], 6, "RESET_VALUE");
    assert_eq!(quad(&fadt, 212), 0x608, "X_PM_TMR_BLK's address");
}

// covers: loader/acpi-madt
#[test]
fn the_madt_has_the_interrupt_controllers() {
    let (_, _, madt) = machine();
    assert_eq!(
        (long(&madt, 36), long(&madt, 40)),
        (0xfee0_0000, 1),
        "local APIC, PCAT_COMPAT"
    );
    let (mut at, mut structures) = (44, Vec::new());
    while at < madt.len() {
        let len = usize::from(madt[at + 1]);
        structures.push(&madt[at..at + len]);
        at += len;
    }
    assert_eq!(
        structures,
        [
            &[0, 8, 0, 0, 1, 0, 0, 0][..],
            &[1, 12, 1, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0],
            &[2, 10, 0, 0, 2, 0, 0, 0, 0, 0],
            &[2, 10, 0, 9, 9, 0, 0, 0, 13, 0],
            &[4, 6, 0xff, 0, 0, 1],
        ]
    );
}

// covers: loader/acpi-dsdt
#[test]
fn the_dsdt_has_soft_off_and_the_legacy_devices() {
    let (memory, fadt, _) = machine();
    let dsdt = table(&memory, quad(&fadt, 140));
    let has = |needle: &[u8]| dsdt.windows(needle.len()).any(|w| w == needle);
    assert!(
        has(b"\x08\\_S5_\x12\x07\x04\x0a\x05\x00\x00\x00"),
        "Name (\\_S5, Package () {{ 5, 0, 0, 0 }})"
    );
    for name in [b"PIC_", b"TMR_", b"SPKR", b"RTC_", b"KBD_", b"COM1"] {
        assert!(has(name));
    }
    // COM1: ports 3F8H to 3FFH, IRQ 4.
    assert!(has(&[0x47, 1, 0xf8, 3, 0xf8, 3, 1, 8, 0x22, 0x10, 0, 0x79]));
}

// covers: devices/pvpanic
#[test]
fn the_dsdt_has_the_panic_device() {
    let (memory, fadt, _) = machine();
    let dsdt = table(&memory, quad(&fadt, 140));
    let has = |needle: &[u8]| dsdt.windows(needle.len()).any(|w| w == needle);
    // ACPI 6.5, 20.2.5 "Term Objects Encoding", as iasl has it of QEMU's device of that name.
    for (bytes, what) in [
        (&b"PEVT\x08_HID\x0dQEMU0001\0\x08_STA\x0a\x0b"[..], "_HID and _STA"),
        (&[0x47, 1, 5, 5, 5, 5, 1, 1, 0x79], "_CRS: port 505H"),
        (
            b"\x5b\x80PEOR\x01\x0b\x05\x05\x01",
            "OperationRegion (PEOR, SystemIO, 0x505, One)",
        ),
        (
            b"\x5b\x81\x0bPEOR\x01PEPT\x08",
            "Field (PEOR, ByteAcc, NoLock, Preserve) {{ PEPT, 8 }}",
        ),
        (b"\x14\x0bRDPT\0\xa4PEPT", "Method (RDPT) {{ Return (PEPT) }}"),
        (b"\x14\x0cWRPT\x01\x70hPEPT", "Method (WRPT, 1) {{ PEPT = Arg0 }}"),
    ] {
        assert!(has(bytes), "{what}");
    }
}

// covers: devices/virtio-acpi
#[test]
fn the_dsdt_has_what_this_machine_has() {
    let with = |com2: bool, virtio: u8| {
        let hardware = Hardware {
            com2,
            virtio,
            ..HARDWARE
        };
        tables(&hardware)[2].1.clone()
    };
    let has = |dsdt: &[u8], needle: &[u8]| dsdt.windows(needle.len()).any(|w| w == needle);
    let two = with(true, 2);
    assert_eq!((&two[..4], sum(&two)), (&b"DSDT"[..], 0));
    // COM2: ports 2F8H to 2FFH, IRQ 3.
    assert!(has(&two, b"COM2") && has(&two, &[0x47, 1, 0xf8, 2, 0xf8, 2, 1, 8, 0x22, 0x08, 0, 0x79]));
    assert!(has(&two, b"VI00\x08_HID\x0dLNRO0005\0\x08_UID\x00"));
    // Memory32Fixed of a page, read-write; a level interrupt, active high, shared: ACPI 6.5, 6.4.3.4 and 6.4.3.6.
    let registers = [0x86, 9, 0, 1, 0, 0x10, 0xb0, 0xfe, 0, 0x10, 0, 0];
    let interrupt = [0x89, 6, 0, 0b1001, 1, 17, 0, 0, 0, 0x79];
    assert!(has(&two, b"VI01") && has(&two, &[&registers[..], &interrupt].concat()));
    let none = with(false, 0);
    assert!(!has(&none, b"COM2") && !has(&none, b"LNRO0005"));
    // All that there can be still fits below 1 MiB.
    let (at, last) = tables(&Hardware { virtio: 64, ..HARDWARE }).pop().unwrap();
    assert!(at + (last.len() as u64) < 1 << 20);
}
