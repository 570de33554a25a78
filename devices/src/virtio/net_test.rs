//! A driver made by hand, over MMIO.

use std::sync::{Arc, Mutex};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::*;
use crate::virtio::{interface::Access, mmio::Transport};

const RINGS: [u64; 2] = [0x1000, 0x8000];
const DATA: u64 = 0x2_0000;
const BASIC: u64 = 1 << 32 | F_MAC;

#[derive(Clone, Default)]
struct Sent(Arc<Mutex<Vec<Vec<u8>>>>);

impl Write for Sent {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().push(bytes.to_vec());
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
    available: [u16; 2],
    sent: Sent,
}

impl Driver {
    fn new(trusted: bool) -> Self {
        let sent = Sent::default();
        let options = Options {
            mac: [2, 0, 0, 0, 0, 9],
            mtu: Some(9000),
            trusted,
            out: Box::new(sent.clone()),
        };
        Driver {
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap(),
            device: Transport::new(Box::new(Net::new(options))),
            written: Vec::new(),
            available: [0; 2],
            sent,
        }
    }

    fn set(&mut self, register: u64, value: u64) {
        let mut access = Access {
            now: 0,
            memory: &self.memory,
            written: &mut self.written,
        };
        let _ = self.device.write(register, 4, value, &mut access);
    }

    fn start(&mut self, features: u64) {
        self.set(0x70, 0);
        self.set(0x70, 3);
        for half in [0, 1] {
            self.set(0x24, half);
            self.set(0x20, features >> (32 * half) & 0xffff_ffff);
        }
        self.set(0x70, 0xb);
        assert_eq!(self.device.read(0x70, 4), 0xb, "{features:#x}");
        for (queue, ring) in [0, 1].into_iter().zip(RINGS) {
            self.set(0x30, queue);
            self.set(0x38, 8);
            for (register, address) in [(0x80, ring), (0x90, ring + 0x1000), (0xa0, ring + 0x2000)] {
                self.set(register, address);
            }
            self.set(0x44, 1);
        }
        self.set(0x70, 0xf);
    }

    /// Makes a buffer available: to receive into (queue 0), or with a header and a frame.
    fn offer(&mut self, queue: usize, at: u64, len: u32) {
        let slot = self.available[queue] % 8;
        let descriptor = RINGS[queue] + 16 * u64::from(slot);
        self.memory.write_obj(at, GuestAddress(descriptor)).unwrap();
        self.memory.write_obj(len, GuestAddress(descriptor + 8)).unwrap();
        let flags = if queue == 0 { 2u16 } else { 0 };
        self.memory.write_obj(flags, GuestAddress(descriptor + 12)).unwrap();
        let ring = RINGS[queue] + 0x1000;
        self.memory
            .write_obj(slot, GuestAddress(ring + 4 + 2 * u64::from(slot)))
            .unwrap();
        self.available[queue] += 1;
        self.memory
            .write_obj(self.available[queue], GuestAddress(ring + 2))
            .unwrap();
        self.set(0x50, queue as u64);
    }

    fn send(&mut self, header: [u8; HEADER], frame: &[u8]) {
        self.memory.write_slice(&header, GuestAddress(DATA)).unwrap();
        self.memory
            .write_slice(frame, GuestAddress(DATA + HEADER as u64))
            .unwrap();
        self.offer(1, DATA, (HEADER + frame.len()) as u32);
    }

    fn used(&self, queue: usize) -> (u16, u32) {
        let ring = RINGS[queue] + 0x2000;
        let count: u16 = self.memory.read_obj(GuestAddress(ring + 2)).unwrap();
        let entry = ring + 4 + 8 * u64::from(count.wrapping_sub(1) % 8);
        (count, self.memory.read_obj(GuestAddress(entry + 4)).unwrap())
    }

    fn input(&mut self, frame: &[u8]) -> Taken {
        let mut access = Access {
            now: 0,
            memory: &self.memory,
            written: &mut self.written,
        };
        self.device.input(0, frame, &mut access).unwrap()
    }
}

// covers: devices/virtio-net
#[test]
fn the_configuration_has_address_link_and_mtu() {
    let driver = Driver::new(true);
    assert_eq!(driver.device.read(0x8, 4), 1);
    let config: Vec<u64> = (0..12).map(|i| driver.device.read(0x100 + i, 1)).collect();
    assert_eq!(config, [2, 0, 0, 0, 0, 9, 1, 0, 1, 0, 0x28, 0x23]);
}

// covers: devices/virtio-net
#[test]
fn frames_wait_for_buffers_and_come_in_order() {
    let mut driver = Driver::new(false);
    let frame = |n: u8| vec![n; 60];
    assert_eq!(driver.input(&frame(1)), Taken::Dropped, "there is no driver");
    driver.start(BASIC);
    assert_eq!(driver.input(&frame(2)), Taken::Bytes(60));
    assert!(!driver.device.interrupt() && driver.used(0).0 == 0);
    driver.offer(0, DATA, 100);
    assert_eq!(driver.used(0), (1, 72));
    assert!(driver.device.interrupt());
    let mut whole = [0; 72];
    driver.memory.read_slice(&mut whole, GuestAddress(DATA)).unwrap();
    assert_eq!(
        (&whole[..HEADER], &whole[HEADER..]),
        (&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0][..], &frame(2)[..])
    );
    driver.offer(0, DATA, 100);
    driver.offer(0, DATA + 100, 100);
    assert_eq!(driver.used(0).0, 1, "buffers without a frame stay");
    driver.input(&frame(3));
    assert_eq!(driver.used(0).0, 2);
    assert!(driver.written.contains(&(DATA + HEADER as u64, 60)));
    // Of a frame that does not fit, the buffer comes back empty.
    driver.input(&[4; 90]);
    assert_eq!(driver.used(0), (3, 0));
    for (frame, why) in [
        (vec![5; 13], "no header"),
        (vec![5; FRAME_MAX + 1], "longer than any frame"),
    ] {
        assert_eq!(driver.input(&frame), Taken::Dropped, "{why}");
    }
}

// covers: bad-input/net-flood
#[test]
fn a_guest_that_takes_nothing_is_offered_no_more_than_so_much() {
    let mut driver = Driver::new(false);
    driver.start(BASIC);
    let frame = vec![0; 1000];
    let taken = (0..2000)
        .take_while(|_| driver.input(&frame) == Taken::Bytes(1000))
        .count();
    assert_eq!(taken, WAITING / 1000);
    let state = driver.device.state();
    let mut other = Driver::new(false);
    other.device.set_state(&state, &driver.memory).unwrap();
    assert_eq!(other.device.state(), state);
    driver.set(0x70, 0);
    driver.start(BASIC);
    assert_eq!(driver.input(&frame), Taken::Bytes(1000), "a reset drops what waits");
}

// covers: devices/virtio-net-checksum
#[test]
fn checksums_are_filled_in_and_vouched_for() {
    let mut driver = Driver::new(true);
    driver.start(BASIC | F_CSUM | F_GUEST_CSUM);
    // The example of RFC 1071, section 3: 0001 f203 f4f5 f6f7 add up to ddf2, behind a place for the checksum.
    let mut frame = vec![0xee; ETHERNET];
    frame.extend([0, 0, 0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7]);
    let mut header = [0; HEADER];
    (header[0], header[6], header[8]) = (NEEDS_CSUM, ETHERNET as u8, 0);
    driver.send(header, &frame);
    let sent = driver.sent.0.lock().unwrap().pop().unwrap();
    assert_eq!(sent[ETHERNET..ETHERNET + 2], (!0xddf2u16).to_be_bytes());
    assert_eq!(sent[..ETHERNET], frame[..ETHERNET]);
    driver.send([0; HEADER], &frame);
    assert_eq!(driver.sent.0.lock().unwrap().pop().unwrap(), frame, "not asked for");
    driver.offer(0, DATA + 0x1000, 2000);
    driver.input(&frame);
    let flags: u8 = driver.memory.read_obj(GuestAddress(DATA + 0x1000)).unwrap();
    assert_eq!(flags, DATA_VALID);
}

// covers: bad-input/net-rings
#[test]
fn what_no_driver_sends_needs_a_reset() {
    for (header, len, why) in [
        ([0; HEADER], 4, "no header"),
        (
            [NEEDS_CSUM, 0, 0, 0, 0, 0, 200, 0, 200, 0, 0, 0],
            60,
            "a checksum outside",
        ),
        (
            [NEEDS_CSUM, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0],
            60,
            "the furthest one",
        ),
        ([0; HEADER], (FRAME_MAX + HEADER + 1) as u32, "too long"),
    ] {
        let mut driver = Driver::new(false);
        driver.start(BASIC | F_CSUM);
        driver.memory.write_slice(&header, GuestAddress(DATA)).unwrap();
        driver.offer(1, DATA, len);
        assert_eq!(driver.device.read(0x70, 4) & 0x40, 0x40, "{why}");
        assert!(driver.sent.0.lock().unwrap().is_empty(), "{why}");
    }
}
