//! A driver made by hand, over MMIO, as Linux's drivers/char/virtio_console.c speaks.

use std::sync::{Arc, Mutex};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::virtio::{interface::Access, mmio::Transport};

const DATA: u64 = 0x8_0000;

#[derive(Clone, Default)]
struct Shown(Arc<Mutex<Vec<u8>>>);

impl Write for Shown {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct Driver {
    memory: GuestMemoryMmap,
    device: Transport,
    written: Vec<(u64, u64)>,
    available: Vec<u16>,
    shown: [Shown; 2],
}

fn ring(queue: usize) -> u64 {
    0x1_0000 * (queue as u64 + 1)
}

impl Driver {
    fn new(multiport: bool) -> Self {
        let shown = [Shown::default(), Shown::default()];
        let port = |name: &str, console, out: &Shown| Port {
            name: name.into(),
            console,
            out: Box::new(out.clone()),
        };
        let ports = vec![port("console", true, &shown[0]), port("files", false, &shown[1])];
        let mut driver = Driver {
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap(),
            device: Transport::new(Box::new(Console::new(ports, Some((80, 25))))),
            written: Vec::new(),
            available: vec![0; 6],
            shown,
        };
        driver.start(multiport);
        driver
    }

    fn set(&mut self, register: u64, value: u64) {
        let mut access = Access {
            now: 0,
            memory: &self.memory,
            written: &mut self.written,
        };
        let _ = self.device.write(register, 4, value, &mut access);
    }

    fn start(&mut self, multiport: bool) {
        let features = 1u64 << 32 | F_SIZE | if multiport { F_MULTIPORT } else { 0 };
        self.set(0x70, 0);
        self.set(0x70, 3);
        for half in [0, 1] {
            self.set(0x24, half);
            self.set(0x20, features >> (32 * half) & 0xffff_ffff);
        }
        self.set(0x70, 0xb);
        for queue in 0..if multiport { 6 } else { 2 } {
            self.available[queue] = 0;
            self.memory
                .write_slice(&[0; 0x3000], GuestAddress(ring(queue)))
                .unwrap();
            self.set(0x30, queue as u64);
            self.set(0x38, 16);
            for (register, offset) in [(0x80, 0), (0x90, 0x1000), (0xa0, 0x2000)] {
                self.set(register, ring(queue) + offset);
            }
            self.set(0x44, 1);
        }
        self.set(0x70, 0xf);
    }

    fn offer(&mut self, queue: usize, at: u64, len: u32) {
        let slot = self.available[queue] % 16;
        let descriptor = ring(queue) + 16 * u64::from(slot);
        self.memory.write_obj(at, GuestAddress(descriptor)).unwrap();
        self.memory.write_obj(len, GuestAddress(descriptor + 8)).unwrap();
        let flags = if queue.is_multiple_of(2) { 2u16 } else { 0 };
        self.memory.write_obj(flags, GuestAddress(descriptor + 12)).unwrap();
        let available = ring(queue) + 0x1000;
        self.memory
            .write_obj(slot, GuestAddress(available + 4 + 2 * u64::from(slot)))
            .unwrap();
        self.available[queue] += 1;
        self.memory
            .write_obj(self.available[queue], GuestAddress(available + 2))
            .unwrap();
        self.set(0x50, queue as u64);
    }

    fn send(&mut self, queue: usize, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(DATA)).unwrap();
        self.offer(queue, DATA, bytes.len() as u32);
    }

    /// What the device puts into a buffer of 64 bytes; `None`: it keeps the buffer.
    fn receive(&mut self, queue: usize) -> Option<Vec<u8>> {
        let used = ring(queue) + 0x2000;
        let before: u16 = self.memory.read_obj(GuestAddress(used + 2)).unwrap();
        self.offer(queue, DATA + 0x1000, 64);
        let after: u16 = self.memory.read_obj(GuestAddress(used + 2)).unwrap();
        if before == after {
            return None;
        }
        let len: u32 = self
            .memory
            .read_obj(GuestAddress(used + 8 + 8 * u64::from(before % 16)))
            .unwrap();
        let mut bytes = vec![0; len as usize];
        self.memory.read_slice(&mut bytes, GuestAddress(DATA + 0x1000)).unwrap();
        Some(bytes)
    }

    fn control(&mut self, port: u32, event: u16, value: u16) {
        let mut message = port.to_le_bytes().to_vec();
        message.extend(event.to_le_bytes());
        message.extend(value.to_le_bytes());
        self.send(3, &message);
    }

    fn told(&mut self) -> (u32, u16, u16, Vec<u8>) {
        let message = self.receive(2).expect("a message");
        let port = u32::from_le_bytes(message[..4].try_into().unwrap());
        let half = |at: usize| u16::from_le_bytes([message[at], message[at + 1]]);
        (port, half(4), half(6), message[8..].to_vec())
    }

    fn input(&mut self, port: u32, bytes: &[u8]) -> Taken {
        let mut access = Access {
            now: 0,
            memory: &self.memory,
            written: &mut self.written,
        };
        self.device.input(port, bytes, &mut access).unwrap()
    }
}

// covers: devices/virtio-console
#[test]
fn a_driver_of_one_port_has_the_first() {
    let mut driver = Driver::new(false);
    assert_eq!(
        driver.device.read(0x100, 8),
        80 | 25 << 16 | 2 << 32,
        "columns, rows, ports"
    );
    assert_eq!(driver.input(0, b"hello"), Taken::Bytes(5), "it waits for a buffer");
    assert_eq!(driver.receive(0).as_deref(), Some(&b"hello"[..]));
    assert_eq!(driver.receive(0), None);
    driver.send(1, b"shown");
    assert_eq!(*driver.shown[0].0.lock().unwrap(), b"shown");
    assert_eq!(driver.input(7, b"x"), Taken::Dropped, "no such port");
}

// covers: devices/virtio-console-ports
#[test]
fn ports_are_found_by_their_names_and_heard_once_they_are_open() {
    let mut driver = Driver::new(true);
    driver.control(u32::MAX, DEVICE_READY, 1);
    assert_eq!(driver.told(), (0, DEVICE_ADD, 0, vec![]));
    assert_eq!(driver.told(), (1, DEVICE_ADD, 0, vec![]));
    driver.control(0, PORT_READY, 1);
    assert_eq!(driver.told(), (0, CONSOLE_PORT, 1, vec![]));
    assert_eq!(driver.told(), (0, PORT_NAME, 1, b"console".to_vec()));
    assert_eq!(driver.told(), (0, PORT_OPEN, 1, vec![]));
    driver.control(1, PORT_READY, 1);
    assert_eq!(driver.told(), (1, PORT_NAME, 1, b"files".to_vec()));
    assert_eq!(driver.told(), (1, PORT_OPEN, 1, vec![]));
    driver.input(1, b"early");
    assert_eq!(driver.receive(4), None, "the guest has not opened it");
    driver.control(1, PORT_OPEN, 1);
    assert_eq!(driver.input(1, &[]), Taken::Bytes(0), "nothing comes behind it");
    driver.send(5, b"out");
    assert_eq!(*driver.shown[1].0.lock().unwrap(), b"out");
    // The buffer from before was used when the port was opened.
    let bytes: [u8; 5] = driver.memory.read_obj(GuestAddress(DATA + 0x1000)).unwrap();
    assert_eq!(&bytes, b"early");
    assert_eq!(driver.told(), (1, PORT_OPEN, 0, vec![]), "the end");
    let state = driver.device.state();
    let mut other = Driver::new(true);
    other.device.set_state(&state, &driver.memory).unwrap();
    assert_eq!(other.device.state(), state);
}

// covers: bad-input/console-ports
#[test]
fn what_no_driver_says_changes_nothing() {
    let mut driver = Driver::new(true);
    for (port, event, value) in [
        (9, PORT_READY, 1),
        (u32::MAX, PORT_OPEN, 1),
        (0, 99, 1),
        (0, DEVICE_READY, 0),
    ] {
        driver.control(port, event, value);
    }
    assert_eq!(driver.receive(2), None);
    for _ in 0..1000 {
        driver.control(0, DEVICE_READY, 1);
    }
    let DeviceState::Console(state) = driver.device.state().device else {
        panic!("a console");
    };
    assert!(state.messages.len() <= MESSAGES, "{}", state.messages.len());
    let many = vec![0; 2 * WAITING];
    assert_eq!(driver.input(1, &many), Taken::Bytes(WAITING));
    assert_eq!(driver.input(1, &many), Taken::Bytes(0));
}
