use super::*;
use crate::{Machine, memory::Memory};
use devices::virtio::block::Medium;
use engine::bus::Bus;
use std::io;
use x86::model::WESTMERE;

#[derive(Debug)]
struct Zeroes;

impl Medium for Zeroes {
    fn size(&self) -> u64 {
        4096
    }

    fn readonly(&self) -> bool {
        false
    }

    fn read(&mut self, _: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.fill(0);
        Ok(())
    }

    fn write(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn zero(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn machine(disks: usize) -> Machine {
    let memory = Memory::new(2 << 20).unwrap();
    let mut machine = Machine::new(&WESTMERE, 1, memory, 0, 7, Box::new(io::sink()));
    for _ in 0..disks {
        machine.add_disk(Box::new(Zeroes)).unwrap();
    }
    machine
}

// covers: devices/virtio-mmio
#[test]
fn each_device_has_a_page_and_the_rest_is_empty() {
    let mut machine = machine(2);
    assert_eq!(machine.hardware().virtio, 3);
    for (index, id) in [(0, 4), (1, 2), (2, 2)] {
        assert_eq!(machine.cpu(0).read(address(index), 4, 0), 0x7472_6976);
        assert_eq!(machine.cpu(0).read(address(index) + 8, 4, 0), id);
    }
    for gpa in [address(3), WINDOW - 4] {
        assert_eq!(machine.cpu(0).read(gpa, 4, 0), 0xffff_ffff, "{gpa:#x}");
    }
}

// covers: bad-input/disk-too-many
#[test]
fn the_pages_are_used_up_at_some_point() {
    let mut machine = machine(SLOTS - 1);
    let error = machine.add_disk(Box::new(Zeroes)).unwrap_err().to_string();
    assert!(error.contains("63 fit"), "{error}");
    assert!(address(SLOTS - 1) + SLOT <= 0xfec0_0000, "below the IOAPIC");
}

// covers: devices/virtio-mmio
#[test]
fn devices_that_share_a_pin_keep_it_up_until_all_are_silent() {
    let mut virtio = Virtio::new(0, BusKind::Mmio);
    for _ in 0..GSIS + 1 {
        virtio.add_disk(Box::new(Zeroes)).unwrap();
    }
    let memory = Memory::new(2 << 20).unwrap();
    let (first, second) = (1, 1 + GSIS);
    assert_eq!(gsi(first), gsi(second));
    let mut set = |index: usize, register: u64, value: u64| {
        assert!(virtio.write(address(index) + register, 4, value, 0, memory.mmap()));
        virtio.take_interrupts().next_back()
    };
    // A queue at 0 is nonsense, of which a driver that is at work learns by an interrupt.
    for index in [first, second] {
        set(index, 0x070, 15);
        assert_eq!(set(index, 0x044, 1), Some(Interrupt::Line(gsi(first), true)));
    }
    assert_eq!(set(first, 0x064, 3), Some(Interrupt::Line(gsi(first), true)));
    assert_eq!(set(second, 0x064, 3), Some(Interrupt::Line(gsi(first), false)));
}

// covers: devices/virtio-state
#[test]
fn a_machine_s_state_has_its_devices() {
    let mut a = machine(1);
    a.cpu(0).write(address(1) + 0x070, 4, 3, 0);
    let mut b = machine(1);
    assert_ne!(a.state(), b.state());
    b.set_state(&a.state()).unwrap();
    assert_eq!(a.state(), b.state());
    let error = machine(2).set_state(&a.state()).unwrap_err();
    assert!(error.to_string().contains("2 virtio devices, the machine 3"), "{error}");
    let mut c = machine(1);
    c.add_second_serial(Box::new(io::sink()));
    c.cpu(0).port_write(0x2ff, 1, 0x5a, 0);
    assert_eq!(c.cpu(0).port_read(0x2ff, 1, 0), 0x5a, "the scratch register");
    c.set_state(&a.state()).unwrap_err();
    let mut d = machine(1);
    d.add_second_serial(Box::new(io::sink()));
    d.set_state(&c.state()).unwrap();
    assert_eq!(d.cpu(0).port_read(0x2ff, 1, 0), 0x5a);
}

/// What configuration mechanism #1 reads.
fn config_read(machine: &mut Machine, device: u8, at: u8) -> u32 {
    let address = 0x8000_0000 | u32::from(device) << 11 | u32::from(at & 0xfc);
    machine.cpu(0).port_write(0xcf8, 4, address, 0);
    machine.cpu(0).port_read(0xcfc, 4, 0)
}

fn machine_over_mmio() -> Machine {
    machine(1)
}

fn pci_machine(disks: usize) -> Machine {
    let memory = Memory::new(2 << 20).unwrap();
    let mut machine = Machine::new(&WESTMERE, 1, memory, 0, 7, Box::new(io::sink()));
    machine.set_bus(BusKind::Pci);
    for _ in 0..disks {
        machine.add_disk(Box::new(Zeroes)).unwrap();
    }
    machine
}

// covers: devices/pci-host-bridge
#[test]
fn every_machine_has_a_host_bridge() {
    for mut machine in [machine(1), pci_machine(1)] {
        assert_eq!(config_read(&mut machine, 0, 0), 0x0008_1b36);
        assert_eq!(config_read(&mut machine, 0, 8), 0x0600_0000);
        assert_eq!(machine.cpu(0).port_read(0xcf8, 4, 0), 0x8000_0008);
        assert_eq!(machine.cpu(0).port_read(0xcff, 1, 0), 6, "a byte of the double word");
        assert_eq!(config_read(&mut machine, 31, 0), u32::MAX);
        machine.cpu(0).port_write(0xcf8, 4, 8, 0);
        assert_eq!(machine.cpu(0).port_read(0xcfc, 4, 0), u32::MAX, "not enabled");
        let ecam = machine.cpu(0).read(crate::pci::ECAM, 4, 0);
        assert_eq!(ecam, 0x0008_1b36, "by memory");
        assert_eq!(
            machine.cpu(0).read(crate::pci::ECAM + 8, 8, 0),
            0x0600_0000,
            "two at once"
        );
    }
}

// covers: devices/virtio-pci
#[test]
fn devices_are_functions_whose_memory_follows_the_base_address() {
    let mut machine = pci_machine(1);
    assert_eq!((machine.hardware().virtio, machine.hardware().functions), (0, 2));
    assert_eq!(machine.cpu(0).read(address(0), 4, 0), 0xffff_ffff, "nothing over MMIO");
    assert_eq!(config_read(&mut machine, 1, 0), 0x1044_1af4, "entropy");
    assert_eq!(config_read(&mut machine, 2, 0), 0x1042_1af4, "disk");
    let bar = u64::from(config_read(&mut machine, 2, 0x10));
    assert_eq!(machine.cpu(0).read(bar + 0x12, 2, 0), 0xffff, "memory is off");
    let ecam = crate::pci::ECAM + (2 << 15);
    machine.cpu(0).write(ecam + 4, 2, 2, 0);
    assert_eq!(machine.cpu(0).read(bar + 0x12, 2, 0), 1, "num_queues");
    machine.cpu(0).write(ecam + 0x10, 4, 0xd000_0000, 0);
    assert_eq!(machine.cpu(0).read(bar + 0x12, 2, 0), 0xffff, "it has moved");
    assert_eq!(machine.cpu(0).read(0xd000_0012, 2, 0), 1);
    let state = machine.state();
    let mut other = pci_machine(1);
    other.set_state(&state).unwrap();
    assert_eq!(other.state(), state);
    assert_eq!(other.cpu(0).read(0xd000_0012, 2, 0), 1);
    let mut over_mmio = machine_over_mmio();
    over_mmio.set_state(&state).unwrap_err();
}

// covers: bad-input/disk-too-many
#[test]
fn the_bus_is_full_at_some_point() {
    let mut machine = pci_machine(DEVICES - 1);
    let error = machine.add_disk(Box::new(Zeroes)).unwrap_err().to_string();
    assert!(error.contains("30 fit"), "{error}");
}
