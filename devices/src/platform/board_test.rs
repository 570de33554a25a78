//! The board as a guest sees it: addresses, wires, effects.

use super::random_test::caps;
use super::*;

const LAPIC: u64 = 0xfee0_0000;

fn board(cpus: usize) -> Platform {
    let mut board = Platform::with_caps(&caps(), cpus, 0, Box::new(io::sink()));
    for cpu in 0..cpus {
        board.mmio_write(cpu, LAPIC + 0xf0, 4, 0x1ff, 0);
    }
    board
}

fn outb(board: &mut Platform, port: u16, value: u8) {
    board.port_write(port, 1, u32::from(value), 0);
}

/// Initializes the 8259s with vectors 20H and 28H and unmasks everything.
fn init_pic(board: &mut Platform) {
    for (port, base, icw3) in [(0x20, 0x20, 0x04), (0xa0, 0x28, 0x02)] {
        outb(board, port, 0x11);
        for value in [base, icw3, 0x01, 0x00] {
            outb(board, port + 1, value);
        }
    }
}

fn program_pin(board: &mut Platform, pin: u64, entry: u64) {
    for (register, half) in [(0x11 + 2 * pin, entry >> 32), (0x10 + 2 * pin, entry & 0xffff_ffff)] {
        board.mmio_write(0, ioapic::IOAPIC, 4, register, 0);
        board.mmio_write(0, ioapic::IOAPIC + 0x10, 4, half, 0);
    }
}

// covers: devices/unclaimed-all-ones
#[test]
fn unclaimed_addresses_read_all_ones() {
    let mut board = board(1);
    for port in [
        0x00, 0x22, 0x62, 0x72, 0x81, 0xed, 0xf0, 0xf1, 0x1f0, 0x2e8, 0x2f8, 0x2ff, 0x378, 0x3d4, 0x3d5, 0x3e8, 0xcf8,
        0xcfc, 0xcfe, 0x60c, 0xffff,
    ] {
        for (size, want) in [(1, 0xff), (2, 0xffff), (4, 0xffff_ffff)] {
            // The four bytes from 62H and F1H reach into devices.
            if size == 4 && matches!(port, 0x62 | 0xf1) {
                continue;
            }
            board.port_write(port, size, 0x1234_5678, 0);
            assert_eq!(board.port_read(port, size, 0), want, "port {port:#x}, {size} bytes");
        }
    }
    assert_eq!(board.effects(), [], "writing there does nothing");
    assert_eq!(board.port_read(0xcf8, 1, 0), 0xff);
    for address in [
        0,
        0xa_0000,
        0xfebf_fff8,
        0xfec0_1000,
        0xfed0_0000,
        0xfee0_1000,
        u64::MAX - 7,
    ] {
        for (size, want) in [(1, 0xff), (2, 0xffff), (4, 0xffff_ffff), (8, u64::MAX)] {
            board.mmio_write(0, address, size, 0, 0);
            assert_eq!(
                board.mmio_read(0, address, size, 0),
                want,
                "address {address:#x}, {size} bytes"
            );
        }
    }
    assert_eq!(board.mmio_read(7, LAPIC, 4, 0), 0xffff_ffff, "a CPU that there is not");
    assert_eq!(board.read_msr(0, 0x8b, 0), Err(MsrFault::Unclaimed));
    // Half claimed: the scratch register and nobody.
    outb(&mut board, 0x3ff, 0x5a);
    assert_eq!(board.port_read(0x3ff, 2, 0), 0xff5a);
}

// covers: devices/bus-access-sizes
#[test]
fn accesses_of_every_size() {
    let mut board = board(1);
    // A word to a byte device is two bytes at two ports: CMOS index and data.
    board.port_write(0x70, 2, 0x5a40, 0);
    outb(&mut board, 0x70, 0x40);
    assert_eq!(board.port_read(0x71, 1, 0), 0x5a);
    // The PM timer is a register of four bytes, of which parts can be read.
    let now = 1_000_000_000;
    let whole = board.port_read(acpi_pm::PM_TIMER, 4, now);
    assert_eq!(whole, 3_579_545);
    assert_eq!(board.port_read(acpi_pm::PM_TIMER, 2, now), whole & 0xffff);
    assert_eq!(board.port_read(acpi_pm::PM_TIMER + 2, 2, now), whole >> 16);
    assert_eq!(board.port_read(acpi_pm::PM_TIMER + 1, 1, now), (whole >> 8) & 0xff);
    // IOAPIC: index by byte or word, registers by 32 bits; parts can be read.
    board.mmio_write(0, ioapic::IOAPIC, 1, 1, 0);
    assert_eq!(board.mmio_read(0, ioapic::IOAPIC + 0x10, 4, 0), 0x0017_0020);
    assert_eq!(board.mmio_read(0, ioapic::IOAPIC + 0x12, 1, 0), 0x17);
    // Local APIC: version.
    assert_eq!(board.mmio_read(0, LAPIC + 0x32, 1, 0), 0x06);
    assert_eq!(
        board.mmio_read(0, LAPIC + 0x34, 4, 0),
        0,
        "only the first four of sixteen bytes"
    );
}

// covers: devices/debug-exit
#[test]
fn debug_exit() {
    for (size, value, want) in [(1, 0x1ff, 0xff), (2, 0x1_0042, 0x42), (4, 0xdead_beef, 0xdead_beef)] {
        let mut board = board(1);
        board.port_write(0xf4, size, value, 0);
        assert_eq!(board.effects(), [Effect::DebugExit(want)]);
        assert_eq!(board.effects(), [], "once");
        assert_eq!(board.port_read(0xf4, size, 0), all_ones(size) as u32);
    }
}

// covers: devices/pvpanic
#[test]
fn a_kernel_that_panics_says_so_at_a_port() {
    // QEMU, docs/specs/pvpanic.rst "Bit Definition": what is not known is ignored, and a panic that the guest handles asks for nothing.
    for (size, value, effects, panicked, why) in [
        (1, 0x01, &[Effect::Panicked][..], true, "for the host"),
        (1, 0x02, &[], true, "the guest has a kernel for it"),
        (1, 0x03, &[Effect::Panicked], true, "both"),
        (1, 0x04, &[], false, "a shutdown, which is not offered"),
        (1, 0xfc, &[], false, "no such events"),
        (4, 0xffff_ff01, &[Effect::Panicked], true, "the port is one byte wide"),
    ] {
        let mut board = board(1);
        assert_eq!(board.port_read(0x505, 1, 0), 0x03, "panicked, crash loaded");
        board.port_write(0x505, size, value, 0);
        assert_eq!(
            (board.effects().as_slice(), board.has_panicked()),
            (effects, panicked),
            "{why}"
        );
        assert_eq!(board.effects(), [], "once");
        let mut other = self::board(1);
        other.set_state(&board.state()).unwrap();
        assert_eq!((other.has_panicked(), other.effects().len()), (panicked, 0), "{why}");
    }
}

// covers: devices/i8042-reset
// covers: devices/reset-register
#[test]
fn ways_to_reset_and_to_switch_off() {
    for (port, size, value, effect, why) in [
        (0x64, 1, 0xfe, Some(Effect::Reset), "keyboard controller"),
        (
            0xcf9,
            1,
            0x06,
            Some(Effect::Reset),
            "reset control register, as the FADT has it",
        ),
        (0xcf9, 1, 0x0e, Some(Effect::Reset), "full reset"),
        (0xcf9, 1, 0x02, None, "only says what kind of reset"),
        (
            0xcf8,
            4,
            0x0000_0600,
            None,
            "PCI's address register is another register",
        ),
        (0x92, 1, 0x03, Some(Effect::Reset), "fast reset"),
        (0x92, 1, 0x02, None, "fast A20"),
        (0x604, 2, 0x3400, Some(Effect::PowerOff), "S5"),
        (0x604, 2, 0x2000, None, "S0"),
    ] {
        let mut board = board(1);
        board.port_write(port, size, value, 0);
        assert_eq!(board.effects(), Vec::from_iter(effect), "{why}");
    }
}

// covers: devices/pit-channel2
#[test]
fn port_61_and_channel_2() {
    let mut board = board(1);
    assert_eq!(board.port_read(0x61, 1, 0) & 0x0f, 0);
    outb(&mut board, 0x61, 0xff);
    assert_eq!(
        board.port_read(0x61, 1, 0) & 0xcf,
        0x0f,
        "bits 3:0 are written, 7 and 6 read 0"
    );
    // Calibration as Linux does it: gate on, speaker off, mode 0, and wait for OUT2.
    outb(&mut board, 0x61, 0x01);
    outb(&mut board, 0x43, 0xb0);
    let count = 1_193_182 / 20;
    outb(&mut board, 0x42, count as u8);
    outb(&mut board, 0x42, (count >> 8) as u8);
    let end = pit::ns_of(u64::from(count as u16) + 1);
    for (now, out2) in [(0, 0x00), (end - 1, 0x00), (end, 0x20), (end + 1_000_000, 0x20)] {
        assert_eq!(board.port_read(0x61, 1, now) & 0x20, out2, "at {now} ns");
    }
    // The gate holds the count.
    let end = end + 2_000_000;
    board.port_write(0x43, 1, 0xb0, end);
    board.port_write(0x42, 1, 0x00, end);
    board.port_write(0x42, 1, 0x10, end);
    let later = end + 1_000_000;
    board.port_write(0x61, 1, 0x00, later);
    let read = |board: &mut Platform, now| board.port_read(0x42, 1, now) | board.port_read(0x42, 1, now) << 8;
    let held = read(&mut board, later);
    assert!(held < 0x1000 && held == read(&mut board, later + 50_000_000));
    // The refresh toggle changes every 18 clocks.
    let toggles: Vec<u32> = (0..100)
        .map(|k| board.port_read(0x61, 1, later + 60_000_000 + pit::ns_of(18 * k)) & 0x10)
        .collect();
    assert!(toggles.windows(2).filter(|w| w[0] != w[1]).count() >= 97, "{toggles:?}");
}

// covers: devices/interrupt-routing
#[test]
fn isa_interrupts_reach_both_controllers() {
    // IRQ 4, through the serial port.
    let mut board = board(1);
    init_pic(&mut board);
    program_pin(&mut board, 4, 0x44);
    outb(&mut board, 0x3fc, 0x08);
    outb(&mut board, 0x3f9, 0x01);
    assert_eq!(board.serial_enqueue(b"x"), 1);
    assert!(board.interrupt_pending(0));
    assert_eq!(board.acknowledge(0), 0x44, "IOAPIC pin 4");
    assert_eq!(board.port_read(0x20, 1, 0), 1 << 4, "and the 8259 has it too");
    assert!(!board.interrupt_pending(0), "LINT0 is masked, so it stays there");
}

// covers: devices/interrupt-routing
#[test]
fn the_timer_is_pin_2() {
    let mut board = board(1);
    init_pic(&mut board);
    program_pin(&mut board, 2, 0x30);
    outb(&mut board, 0x43, 0x34);
    outb(&mut board, 0x40, 0xa9);
    outb(&mut board, 0x40, 0x04);
    let mut last = 0;
    for _ in 0..5 {
        let next = board.next_event().unwrap();
        assert!(next > last);
        last = next;
        board.advance(next);
        if board.interrupt_pending(0) {
            assert_eq!(board.acknowledge(0), 0x30);
            board.mmio_write(0, LAPIC + 0xb0, 4, 0, next);
        }
    }
    // Four periods of 1193 clocks, the first event being the load.
    assert_eq!(last, pit::ns_of(1 + 4 * 1193));
    assert_eq!(board.port_read(0x20, 1, last), 0x01, "IRQ 0 at the 8259");
}

// covers: devices/interrupt-routing
#[test]
fn virtual_wire() {
    let mut board = Platform::with_caps(&caps(), 2, 0, Box::new(io::sink()));
    board.set_virtual_wire();
    init_pic(&mut board);
    // The keyboard controller's loop-back interrupts.
    outb(&mut board, 0x64, 0x60);
    outb(&mut board, 0x60, 0x01);
    outb(&mut board, 0x64, 0xd2);
    outb(&mut board, 0x60, 0x1c);
    assert!(
        board.interrupt_pending(0) && !board.interrupt_pending(1),
        "the boot CPU alone"
    );
    board.set_cr8(0, 15);
    assert!(board.interrupt_pending(0), "priorities do not hold an ExtINT back");
    assert_eq!(board.acknowledge(0), 0x21);
    assert!(!board.interrupt_pending(0));
    outb(&mut board, 0x20, 0x20);
    // Raised and withdrawn between: spurious.
    outb(&mut board, 0x64, 0xd2);
    outb(&mut board, 0x60, 0x1c);
    assert_eq!(board.port_read(0x60, 1, 0), 0x1c);
    assert_eq!(board.port_read(0x60, 1, 0), 0x1c);
    assert!(!board.interrupt_pending(0));
    assert_eq!(board.acknowledge(0), 0xff, "nothing: the APIC's spurious vector");
}

// covers: devices/interrupt-routing
#[test]
fn the_8259_through_the_ioapic() {
    let mut board = board(1);
    // Automatic EOI: INT would stay high, and pin 0, an edge, would not see the second request.
    for (port, base, icw3) in [(0x20, 0x20, 0x04), (0xa0, 0x28, 0x02)] {
        outb(&mut board, port, 0x11);
        for value in [base, icw3, 0x03, 0x00] {
            outb(&mut board, port + 1, value);
        }
    }
    program_pin(&mut board, 0, 0x700);
    outb(&mut board, 0x64, 0x60);
    outb(&mut board, 0x60, 0x01);
    outb(&mut board, 0x64, 0xd2);
    outb(&mut board, 0x60, 0x1c);
    board.press_power_button();
    board.port_write(acpi_pm::PM1A_EVENT + 2, 2, 0x0100, 0);
    for vector in [0x21, 0x29] {
        assert!(board.interrupt_pending(0));
        assert_eq!(board.acknowledge(0), vector);
    }
    assert!(!board.interrupt_pending(0));
}

// covers: devices/ioapic-edge-level-eoi
#[test]
fn a_level_comes_back_with_the_eoi_until_it_is_served() {
    let mut board = board(1);
    program_pin(&mut board, 9, 0x8059);
    // SCI: power button, enabled.
    board.port_write(acpi_pm::PM1A_EVENT + 2, 2, 0x0100, 0);
    board.press_power_button();
    for _ in 0..3 {
        assert_eq!(board.acknowledge(0), 0x59);
        assert!(!board.interrupt_pending(0));
        board.mmio_write(0, LAPIC + 0xb0, 4, 0, 0);
        assert!(board.interrupt_pending(0), "still asserted");
    }
    assert_eq!(board.acknowledge(0), 0x59);
    board.port_write(acpi_pm::PM1A_EVENT, 2, 0x0100, 0);
    board.mmio_write(0, LAPIC + 0xb0, 4, 0, 0);
    assert!(!board.interrupt_pending(0));
    // Pins above the ISA interrupts.
    program_pin(&mut board, 20, 0x60);
    board.set_gsi(20, true);
    assert_eq!(board.acknowledge(0), 0x60);
    board.set_gsi(4, true);
    board.set_gsi(99, true);
    assert!(!board.interrupt_pending(0));
}

// covers: devices/lapic-nmi-self-ipi
#[test]
fn ipis_between_cpus() {
    // ICR high and low of CPU 1, then who gets vector 55H, an NMI, an effect.
    let none: [bool; 3] = [false; 3];
    let init = |cpu| Effect::Init { cpu };
    let start = |cpu| Effect::StartUp { cpu, vector: 0x55 };
    for (high, low, vector, nmi, effects, why) in [
        (2, 0x0_4055, [false, false, true], none, vec![], "fixed, physical"),
        (0xff, 0x0_4055, [true; 3], none, vec![], "fixed, broadcast"),
        (0, 0x4_4055, [false, true, false], none, vec![], "self"),
        (0, 0x8_4055, [true; 3], none, vec![], "all including self"),
        (0, 0xc_4055, [true, false, true], none, vec![], "all excluding self"),
        (
            0x05,
            0x0_4855,
            [true, false, true],
            none,
            vec![],
            "logical, bits 0 and 2",
        ),
        (
            0x06,
            0x0_4955,
            [false, false, true],
            none,
            vec![],
            "lowest priority of 1 and 2: 1 is busier",
        ),
        (0, 0x0_4400, none, [true, false, false], vec![], "NMI"),
        (0, 0xc_4400, none, [true, false, true], vec![], "NMI to the others"),
        (2, 0x0_4500, none, none, vec![init(2)], "INIT"),
        (0, 0xc_4500, none, none, vec![init(0), init(2)], "INIT to the others"),
        (2, 0x0_4655, none, none, vec![start(2)], "start-up"),
        (2, 0x0_4200, none, none, vec![Effect::Smi { cpu: 2 }], "SMI"),
        (9, 0x0_4055, none, none, vec![], "nobody"),
    ] {
        let mut board = board(3);
        for cpu in 0..3 {
            board.mmio_write(cpu, LAPIC + 0xd0, 4, 1 << (24 + cpu), 0);
        }
        board.set_cr8(1, 2);
        board.mmio_write(1, LAPIC + 0x310, 4, high << 24, 0);
        board.mmio_write(1, LAPIC + 0x300, 4, low, 0);
        let got: Vec<bool> = (0..3).map(|cpu| board.interrupt_pending(cpu)).collect();
        assert_eq!(got, vector, "{why}");
        let got: Vec<bool> = (0..3).map(|cpu| board.take_nmi(cpu)).collect();
        assert_eq!(got, nmi, "{why}");
        assert_eq!(board.effects(), effects, "{why}");
        for cpu in (0..3).filter(|cpu| vector[*cpu]) {
            assert_eq!(board.acknowledge(cpu), 0x55, "{why}");
        }
    }
    let mut board = board(2);
    board.inject_nmi(1);
    assert!(!board.nmi_pending(0) && board.nmi_pending(1) && board.take_nmi(1) && !board.nmi_pending(1));
}

/// The lines of a board whose controllers are elsewhere: what has been said of them.
#[derive(Clone, Debug, Default)]
struct Heard(std::sync::Arc<std::sync::Mutex<Vec<(u8, bool)>>>);

impl Lines for Heard {
    fn set(&self, gsi: u8, asserted: bool) {
        self.0.lock().unwrap().push((gsi, asserted));
    }

    fn message(&self, message: Message) {
        self.0.lock().unwrap().push((message.data as u8, true));
    }
}

impl Heard {
    fn take(&self) -> Vec<(u8, bool)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

// covers: kvm/irqchip-kvm-lines
#[test]
fn lines_lead_to_controllers_elsewhere() {
    let mut board = Platform::with_caps(&caps(), 2, 0, Box::new(io::sink()));
    let heard = Heard::default();
    assert!(!board.irqchip_is_external());
    board.give_away_controllers(Box::new(heard.clone()));
    // COM1: OUT2 and the empty transmitter's interrupt, then the register that acknowledges it.
    outb(&mut board, 0x3fc, 8);
    outb(&mut board, 0x3f9, 2);
    assert_eq!(heard.take(), [(4, true)]);
    board.port_read(0x3fa, 1, 0);
    assert_eq!(heard.take(), [(4, false)]);
    // A device's pin: only changes are reported.
    for level in [true, true, false, false, true] {
        board.set_gsi(17, level);
    }
    assert_eq!(heard.take(), [(17, true), (17, false), (17, true)]);
    assert!(!board.take_missed());
    // What is elsewhere is not here.
    for port in [0x20, 0xa1, 0x40, 0x43, 0x61, 0x4d0] {
        outb(&mut board, port, 0x34);
        assert!(board.take_missed() && !board.take_missed(), "{port:#x}");
        assert_eq!(board.port_read(port, 1, 0), 0xff, "{port:#x}");
        assert!(board.take_missed(), "{port:#x}");
    }
    for address in [LAPIC + 0x20, ioapic::IOAPIC + 0x10] {
        board.mmio_write(0, address, 4, 0, 0);
        assert!(board.take_missed(), "{address:#x}");
        assert_eq!(board.mmio_read(1, address, 4, 0), 0xffff_ffff);
        assert!(board.take_missed(), "{address:#x}");
    }
    for msr in [0x1b, 0x6e0] {
        assert_eq!(board.read_msr(0, msr, 0), Err(MsrFault::GeneralProtection));
        assert_eq!(board.write_msr(0, msr, 0, 0), Err(MsrFault::GeneralProtection));
        assert!(board.take_missed(), "{msr:#x}");
    }
    assert_eq!(board.read_msr(0, 0x10, 0), Err(MsrFault::Unclaimed));
    assert_eq!(board.write_msr(0, 0x10, 0, 0), Err(MsrFault::Unclaimed));
    // The other devices are, with their time, and no timer of an idle controller is waited for.
    assert_eq!(board.port_read(0x3fd, 1, 0) & 0x60, 0x60);
    board.advance(1 << 40);
    assert!(!board.take_missed() && board.next_event().is_none());
    assert!(!board.interrupt_pending(0) && heard.take().is_empty());
}

// covers: devices/lapic-xapic
#[test]
fn the_page_moves_and_goes() {
    let mut board = board(2);
    board.write_msr(0, 0x1b, 0xfef0_0900, 0).unwrap();
    assert_eq!(board.mmio_read(0, LAPIC + 0x20, 4, 0), 0xffff_ffff, "no longer here");
    assert_eq!(board.mmio_read(0, 0xfef0_0020, 4, 0), 0, "but here: ID 0");
    assert_eq!(
        board.mmio_read(1, LAPIC + 0x20, 4, 0),
        1 << 24,
        "the other CPU's has not moved"
    );
    board.write_msr(0, 0x1b, ioapic::IOAPIC | 0x900, 0).unwrap();
    assert_eq!(
        board.mmio_read(0, ioapic::IOAPIC + 0x30, 4, 0),
        0x0106_0015,
        "over the IOAPIC: its own APIC wins"
    );
    board.write_msr(0, 0x1b, 0xfee0_0d00, 0).unwrap();
    assert_eq!(
        board.mmio_read(0, LAPIC + 0x20, 4, 0),
        0xffff_ffff,
        "x2APIC mode has no page"
    );
    assert_eq!(board.read_msr(0, 0x802, 0), Ok(0));
    board.write_msr(0, 0x83f, 0x66, 0).unwrap();
    assert_eq!(board.acknowledge(0), 0x66);
    assert_eq!(board.write_msr(0, 0x80b, 1, 0), Err(MsrFault::GeneralProtection));
}

// covers: devices/tpr-cr8
#[test]
fn cr8_holds_interrupts_back() {
    let mut board = board(1);
    board.set_cr8(0, 6);
    board.mmio_write(0, LAPIC + 0x300, 4, 0x4_4065, 0);
    assert_eq!((board.interrupt_pending(0), board.cr8(0)), (false, 6));
    assert_eq!(board.mmio_read(0, LAPIC + 0x80, 4, 0), 0x60);
    board.set_cr8(0, 5);
    assert!(board.interrupt_pending(0));
    board.set_cr8(0, 0xff);
    assert_eq!(board.cr8(0), 15);
}

// covers: devices/state-round-trip
#[test]
fn a_state_of_another_machine_is_refused() {
    let mut two = board(2);
    let before = two.state();
    let err = two.set_state(&board(3).state()).unwrap_err();
    assert_eq!(err.to_string(), "the state has 3 CPUs, the machine has 2");
    assert_eq!(two.state(), before);
}

#[test]
fn the_board_can_move_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<Platform>();
    is_send::<PlatformState>();
}
