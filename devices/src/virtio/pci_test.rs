//! A driver made by hand at a PCI function.

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::random::Random;
use crate::testing::XorShift;
use crate::virtio::rng::Rng;

const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
const DATA: u64 = 0x5000;
const VERSION_1: u64 = 1 << 32;
const MSIX: u16 = 0x40;

struct Driver {
    memory: GuestMemoryMmap,
    function: Transport,
    written: Vec<(u64, u64)>,
    available: u16,
}

impl Driver {
    fn new() -> Self {
        let mut driver = Driver {
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap(),
            function: Transport::new(Box::new(Rng::new(Random::new(1))), 0xc000_0000, 16),
            written: Vec::new(),
            available: 0,
        };
        driver.configure(0x04, 2, 6);
        driver
    }

    fn configure(&mut self, at: u16, size: u8, value: u32) {
        let mut access = Access {
            now: 0,
            memory: &self.memory,
            written: &mut self.written,
        };
        let _ = self.function.write_config(at, size, value, &mut access);
    }

    fn set(&mut self, offset: u64, size: u8, value: u64) {
        let mut access = Access {
            now: 0,
            memory: &self.memory,
            written: &mut self.written,
        };
        let _ = self.function.write(offset, size, value, &mut access);
    }

    /// 3.1.1 "Driver Requirements: Device Initialization", as far as the queue.
    fn start(&mut self) {
        self.set(0x14, 1, 0);
        self.set(0x14, 1, 3);
        for half in [0, 1] {
            self.set(0x08, 4, half);
            self.set(0x0c, 4, VERSION_1 >> (32 * half) & 0xffff_ffff);
        }
        self.set(0x14, 1, 0xb);
        assert_eq!(self.function.read(0x14, 1), 0xb);
        self.set(0x16, 2, 0);
        assert_eq!(
            self.function.read(0x18, 2),
            64,
            "the greatest size, as long as nothing is written"
        );
        self.set(0x18, 2, 16);
        for (at, address) in [(0x20, DESC), (0x28, AVAIL), (0x30, USED)] {
            self.set(at, 4, address);
            self.set(at + 4, 4, 0);
        }
        self.set(0x1c, 2, 1);
        assert_eq!(self.function.read(0x1c, 2), 1);
        self.set(0x14, 1, 0xf);
    }

    /// Asks for eight bytes, and says how many buffers have been used since the start.
    fn request(&mut self) -> u16 {
        self.memory.write_obj(DATA, GuestAddress(DESC)).unwrap();
        self.memory.write_obj(8u32, GuestAddress(DESC + 8)).unwrap();
        self.memory.write_obj(2u32, GuestAddress(DESC + 12)).unwrap();
        self.available += 1;
        self.memory.write_obj(self.available, GuestAddress(AVAIL + 2)).unwrap();
        self.set(0x3000, 2, 0);
        self.memory.read_obj(GuestAddress(USED + 2)).unwrap()
    }

    fn messages(&mut self) -> Vec<Message> {
        self.function.take_messages().collect()
    }
}

// covers: devices/virtio-pci
#[test]
fn the_capabilities_say_where_the_registers_are() {
    let mut driver = Driver::new();
    let mut read = |at: u16, size| driver.function.read_config(at, size);
    assert_eq!(read(0, 4), 0x1044_1af4);
    assert_eq!(read(8, 1), 1, "a revision of 1 or more: no transitional device");
    let (mut at, mut found) = (read(0x34, 1) as u16, Vec::new());
    while at != 0 {
        if read(at, 1) == 9 {
            found.push((read(at + 3, 1), read(at + 4, 1), read(at + 8, 4), read(at + 12, 4)));
        } else {
            assert_eq!((read(at, 1), read(at + 2, 2)), (0x11, 1), "MSI-X of two vectors");
            assert_eq!((read(at + 4, 4), read(at + 8, 4)), (0x4000, 0x5000));
        }
        at = read(at + 1, 1) as u16;
    }
    assert_eq!(
        found,
        [
            (1, 0, 0, 0x3c),
            (3, 0, 0x1000, 1),
            (4, 0, 0x2000, 0x1000),
            (2, 0, 0x3000, 4),
            (5, 0, 0, 0)
        ]
    );
}

// covers: devices/virtio-pci
#[test]
fn without_messages_the_pin_is_asserted_until_isr_is_read() {
    let mut driver = Driver::new();
    driver.start();
    assert!(!driver.function.interrupt());
    assert_eq!(driver.request(), 1);
    assert!(driver.function.interrupt());
    assert_eq!(driver.function.read_config(6, 2) & 8, 8, "Interrupt Status");
    driver.configure(0x04, 2, 0x406);
    assert!(!driver.function.interrupt(), "Interrupt Disable");
    driver.configure(0x04, 2, 6);
    assert!(driver.function.interrupt());
    assert_eq!(driver.function.read(0x1000, 1), 1, "a queue's");
    assert!(!driver.function.interrupt());
    assert_eq!(driver.function.read(0x1000, 1), 0);
    assert!(driver.messages().is_empty());
}

// covers: devices/virtio-pci-msix
#[test]
fn messages_are_sent_or_wait_for_their_vector() {
    let mut driver = Driver::new();
    driver.start();
    driver.configure(MSIX + 2, 2, 0x8000);
    driver.set(0x4010, 4, 0xfee0_1000);
    driver.set(0x4018, 8, 0x41);
    driver.set(0x16, 2, 0);
    driver.set(0x1a, 2, 1);
    assert_eq!(driver.function.read(0x1a, 2), 1);
    driver.set(0x1a, 2, 2);
    assert_eq!(driver.function.read(0x1a, 2), 0xffff, "there is no third vector");
    driver.request();
    assert!(driver.messages().is_empty(), "no vector");
    driver.set(0x1a, 2, 1);
    driver.request();
    let message = Message {
        address: 0xfee0_1000,
        data: 0x41,
    };
    assert_eq!(driver.messages(), [message]);
    assert!(!driver.function.interrupt());
    // The vector's mask, the function's, and no mastery: each has it wait.
    driver.set(0x401c, 4, 1);
    driver.request();
    assert!(driver.messages().is_empty());
    assert_eq!(driver.function.read(0x5000, 4), 2, "pending");
    driver.configure(MSIX + 2, 2, 0xc000);
    driver.set(0x401c, 4, 0);
    assert!(driver.messages().is_empty(), "the function is masked");
    driver.configure(MSIX + 2, 2, 0x8000);
    assert_eq!(driver.messages(), [message]);
    assert_eq!(driver.function.read(0x5000, 8), 0);
    driver.configure(0x04, 2, 2);
    let used: u16 = driver.memory.read_obj(GuestAddress(USED + 2)).unwrap();
    assert_eq!(driver.request(), used, "a function that is no master reaches no memory");
}

// covers: devices/virtio-pci
#[test]
fn registers_are_reached_through_configuration_space_too() {
    let mut driver = Driver::new();
    let at = (0x40..0x100)
        .step_by(4)
        .find(|at| driver.function.read_config(*at, 4) >> 24 == 5 && driver.function.read_config(*at, 1) == 9);
    let at = at.unwrap();
    driver.configure(at + 8, 4, 0x14);
    driver.configure(at + 12, 4, 1);
    driver.configure(at + 16, 1, 3);
    assert_eq!(driver.function.read(0x14, 1), 3);
    assert_eq!(driver.function.read_config(at + 16, 1), 3);
    driver.configure(at + 8, 4, 0xffff_fffc);
    assert_eq!(
        driver.function.read_config(at + 16, 1),
        3,
        "outside of the memory nothing is read"
    );
}

// covers: devices/virtio-pci-state
#[test]
fn a_state_is_taken_back() {
    let mut driver = Driver::new();
    driver.start();
    driver.configure(MSIX + 2, 2, 0x8000);
    driver.set(0x4010, 4, 0xfee0_0000);
    driver.set(0x1a, 2, 1);
    driver.request();
    let state = driver.function.state();
    assert_eq!(state.pci.as_ref().unwrap().pending, 2);
    let mut other = Driver::new();
    other.function.set_state(&state, &driver.memory).unwrap();
    assert_eq!(other.function.state(), state);
    assert_eq!(other.function.memory(), Some(0xc000_0000));
    let mut none = state.clone();
    none.pci = None;
    other.function.set_state(&none, &driver.memory).unwrap_err();
}

// covers: bad-input/pci-registers
#[test]
fn whatever_is_written_the_function_goes_on() {
    let mut random = XorShift(0x5eed);
    for _ in 0..200 {
        let mut driver = Driver::new();
        driver.start();
        for _ in 0..300 {
            let size = 1 << random.below(4);
            let value = match random.below(3) {
                0 => random.below(16),
                1 => u64::MAX,
                _ => random.next(),
            };
            if random.below(4) == 0 {
                let at = random.below(0x120) as u16;
                driver.configure(at, size.min(4), value as u32);
                driver.function.read_config(at, size.min(4));
            } else {
                let offset = random.below(6) * 0x1000 + random.below(0x48);
                driver.set(offset, size, value);
                driver.function.read(offset, size);
            }
            driver.function.interrupt();
            driver.messages();
        }
        assert!(driver.written.iter().all(|(gpa, len)| gpa + len <= 1 << 20));
        let state = driver.function.state();
        driver.function.set_state(&state, &driver.memory).unwrap();
        assert_eq!(driver.function.state(), state);
    }
}
