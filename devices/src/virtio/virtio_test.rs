//! A driver made by hand, and what it sees.

use std::{
    io,
    sync::{Arc, Mutex},
};

use virtio_bindings::{virtio_blk::*, virtio_mmio::*};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{
    block::{Block, Medium},
    interface::{Access, PAUSE_NS, SLICE, TransportState},
    mmio::Transport,
    request::Written,
    rng::Rng,
};
use crate::random::Random;

const RAM: u64 = 1 << 20;
const SIZE: u16 = 16;
const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
/// Where requests put their header, their data and their status.
const HEADER: u64 = 0x4000;
const DATA: u64 = 0x5000;
const STATUS: u64 = 0x4100;
const SECTORS: u64 = 64;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

const VERSION_1: u64 = 1 << 32;
const EVENT_IDX: u64 = 1 << 29;
const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;

const OK: u8 = VIRTIO_BLK_S_OK as u8;
const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;

/// What a test sees of its disk, and how it lets it fail.
#[derive(Debug, Default)]
struct Inside {
    bytes: Vec<u8>,
    flushes: u32,
    readonly: bool,
    fail_read: bool,
    fail_write: bool,
    fail_flush: bool,
}

#[derive(Clone, Debug)]
struct Fake(Arc<Mutex<Inside>>);

impl Fake {
    fn new() -> Self {
        let bytes = (0..SECTORS * 512).map(|i| (i / 512) as u8).collect();
        Fake(Arc::new(Mutex::new(Inside {
            bytes,
            ..Inside::default()
        })))
    }

    fn with<T>(&self, f: impl FnOnce(&mut Inside) -> T) -> T {
        f(&mut self.0.lock().unwrap())
    }
}

fn unless(fails: bool) -> io::Result<()> {
    if fails { Err(io::Error::other("fails")) } else { Ok(()) }
}

impl Medium for Fake {
    fn size(&self) -> u64 {
        SECTORS * 512
    }

    fn readonly(&self) -> bool {
        self.with(|d| d.readonly)
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.with(|d| {
            bytes.copy_from_slice(&d.bytes[offset as usize..][..bytes.len()]);
            unless(d.fail_read)
        })
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.with(|d| {
            unless(d.fail_write)?;
            d.bytes[offset as usize..][..bytes.len()].copy_from_slice(bytes);
            Ok(())
        })
    }

    fn zero(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.write(offset, &vec![0; len as usize])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.with(|d| {
            d.flushes += 1;
            unless(d.fail_flush)
        })
    }
}

/// A descriptor: address, length, flags, next.
type Descriptor = (u64, u32, u16, u16);

struct Driver {
    memory: GuestMemoryMmap,
    device: Transport,
    written: Vec<Written>,
    available: u16,
    /// Virtual time.
    now: u64,
}

fn driver_access<'a>(now: u64, memory: &'a GuestMemoryMmap, written: &'a mut Vec<Written>) -> Access<'a> {
    Access { now, memory, written }
}

impl Driver {
    fn of(device: Transport) -> Self {
        Driver {
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM as usize)]).unwrap(),
            device,
            written: Vec::new(),
            available: 0,
            now: 0,
        }
    }

    fn disk(fake: &Fake, features: u64) -> Self {
        let mut driver = Driver::of(Transport::new(Box::new(Block::new(
            Box::new(fake.clone()),
            "minivmm-0",
        ))));
        driver.start(features);
        driver
    }

    fn rng(seed: u64) -> Self {
        let mut driver = Driver::of(Transport::new(Box::new(Rng::new(Random::new(seed)))));
        driver.start(VERSION_1);
        driver
    }

    fn get(&self, register: u32) -> u32 {
        self.device.read(register.into(), 4) as u32
    }

    fn set(&mut self, register: u32, value: u32) {
        let mut access = driver_access(self.now, &self.memory, &mut self.written);
        let _ = self.device.write(register.into(), 4, value.into(), &mut access);
    }

    fn negotiate(&mut self, features: u64) -> bool {
        self.set(VIRTIO_MMIO_STATUS, 0);
        self.set(VIRTIO_MMIO_STATUS, 3);
        for half in [0, 1] {
            self.set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
            self.set(VIRTIO_MMIO_DRIVER_FEATURES, (features >> (32 * half)) as u32);
        }
        self.set(VIRTIO_MMIO_STATUS, 0xb);
        self.get(VIRTIO_MMIO_STATUS) & 8 != 0
    }

    fn set_queue(&mut self, size: u32, desc: u64, avail: u64, used: u64) {
        self.set(VIRTIO_MMIO_QUEUE_SEL, 0);
        self.set(VIRTIO_MMIO_QUEUE_NUM, size);
        for (register, address) in [
            (VIRTIO_MMIO_QUEUE_DESC_LOW, desc),
            (VIRTIO_MMIO_QUEUE_AVAIL_LOW, avail),
            (VIRTIO_MMIO_QUEUE_USED_LOW, used),
        ] {
            self.set(register, address as u32);
            self.set(register + 4, (address >> 32) as u32);
        }
        self.set(VIRTIO_MMIO_QUEUE_READY, 1);
    }

    fn start(&mut self, features: u64) {
        assert!(self.negotiate(features));
        self.memory.write_slice(&[0; 0x3000], GuestAddress(DESC)).unwrap();
        self.available = 0;
        self.set_queue(SIZE.into(), DESC, AVAIL, USED);
        self.set(VIRTIO_MMIO_STATUS, 0xf);
        assert_eq!(
            (self.get(VIRTIO_MMIO_STATUS), self.get(VIRTIO_MMIO_QUEUE_READY)),
            (0xf, 1)
        );
    }

    fn put<T: vm_memory::ByteValued>(&self, address: u64, value: T) {
        self.memory.write_obj(value, GuestAddress(address)).unwrap();
    }

    fn descriptor(&self, table: u64, index: u16, (address, len, flags, next): Descriptor) {
        let at = table + 16 * u64::from(index);
        self.put(at, address);
        self.put(at + 8, len);
        self.put(at + 12, flags);
        self.put(at + 14, next);
    }

    /// Makes a head available without a notification.
    fn offer(&mut self, head: u16) {
        self.put(AVAIL + 4 + 2 * u64::from(self.available % SIZE), head);
        self.available += 1;
        self.put(AVAIL + 2, self.available);
    }

    fn kick(&mut self) {
        self.set(VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    }

    /// Sends a chain of buffers: address, length, whether the device writes it.
    fn send(&mut self, buffers: &[(u64, u32, bool)]) {
        let last = buffers.len() - 1;
        for (i, (address, len, write)) in buffers.iter().enumerate() {
            let flags = if *write { WRITE } else { 0 } | if i < last { NEXT } else { 0 };
            self.descriptor(DESC, i as u16, (*address, *len, flags, i as u16 + 1));
        }
        self.offer(0);
        self.kick();
    }

    fn used(&self) -> (u16, u32) {
        let index: u16 = self.memory.read_obj(GuestAddress(USED + 2)).unwrap();
        let at = USED + 4 + 8 * u64::from(index.wrapping_sub(1) % SIZE);
        (index, self.memory.read_obj(GuestAddress(at + 4)).unwrap())
    }

    /// A block request with `data` bytes for the device to read (if `out`) or to write; its status and used length.
    fn request(&mut self, kind: u32, sector: u64, data: u32, out: bool) -> (u8, u32) {
        self.put(HEADER, kind);
        self.put(HEADER + 4, 0u32);
        self.put(HEADER + 8, sector);
        self.put(STATUS, 0xeeu8);
        let before = self.used().0;
        let mut buffers = vec![(HEADER, 16, false), (DATA, data, !out), (STATUS, 1, true)];
        if data == 0 {
            buffers.remove(1);
        }
        self.send(&buffers);
        let (index, len) = self.used();
        assert_eq!(index, before.wrapping_add(1), "the request is answered");
        (self.memory.read_obj(GuestAddress(STATUS)).unwrap(), len)
    }

    fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }
}

// covers: devices/virtio-mmio
#[test]
fn the_registers_say_what_the_device_is() {
    let fake = Fake::new();
    let mut driver = Driver::of(Transport::new(Box::new(Block::new(Box::new(fake), "x"))));
    for (register, value, name) in [
        (VIRTIO_MMIO_MAGIC_VALUE, 0x7472_6976, "MagicValue"),
        (VIRTIO_MMIO_VERSION, 2, "Version"),
        (VIRTIO_MMIO_DEVICE_ID, 2, "DeviceID"),
        (VIRTIO_MMIO_QUEUE_NUM_MAX, 128, "QueueNumMax"),
        (VIRTIO_MMIO_QUEUE_READY, 0, "QueueReady"),
        (VIRTIO_MMIO_STATUS, 0, "Status"),
        (VIRTIO_MMIO_CONFIG_GENERATION, 0, "ConfigGeneration"),
        (VIRTIO_MMIO_SHM_LEN_LOW, u32::MAX, "SHMLenLow"),
        (0x0fc, 0, "reserved"),
    ] {
        assert_eq!(driver.get(register), value, "{name}");
    }
    driver.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
    assert_eq!(driver.get(VIRTIO_MMIO_DEVICE_FEATURES), 1, "VERSION_1");
    driver.set(VIRTIO_MMIO_DEVICE_FEATURES_SEL, 2);
    assert_eq!(driver.get(VIRTIO_MMIO_DEVICE_FEATURES), 0);
    driver.set(VIRTIO_MMIO_QUEUE_SEL, 1);
    assert_eq!(driver.get(VIRTIO_MMIO_QUEUE_NUM_MAX), 0, "one queue");
    // The configuration takes every size: capacity, blk_size.
    for (offset, size, value) in [
        (0, 8, SECTORS),
        (0, 4, SECTORS),
        (0, 1, SECTORS),
        (20, 4, 512),
        (59, 8, 0),
        (0xe00, 4, 0),
    ] {
        assert_eq!(driver.device.read(0x100 + offset, size), value, "{offset}, {size}");
    }
    assert_eq!(driver.device.read(0, 1), 0, "registers have 32 bits");
}

// covers: devices/virtio-mmio
#[test]
fn only_what_was_offered_is_agreed_on() {
    let fake = Fake::new();
    for (features, agreed, why) in [
        (VERSION_1 | FLUSH, true, "a subset"),
        (VERSION_1, true, "the least"),
        (FLUSH, false, "without VERSION_1"),
        (VERSION_1 | 1 << VIRTIO_BLK_F_RO, false, "RO was not offered"),
        (VERSION_1 | 1 << 40, false, "unknown to us"),
        (VERSION_1 | 1 << 34, false, "a packed ring"),
    ] {
        let mut driver = Driver::of(Transport::new(Box::new(Block::new(Box::new(fake.clone()), "x"))));
        assert_eq!(driver.negotiate(features), agreed, "{why}");
    }
}

// covers: devices/virtio-blk
#[test]
fn requests_are_answered() {
    let last = SECTORS - 1;
    // Type, sector, bytes of data, whether they are the driver's; status, used length.
    for (kind, sector, data, out, status, len, why) in [
        (VIRTIO_BLK_T_IN, 3, 512, false, OK, 513, "one sector"),
        (VIRTIO_BLK_T_IN, 0, 4096, false, OK, 4097, "eight sectors"),
        (VIRTIO_BLK_T_IN, last, 512, false, OK, 513, "the last sector"),
        (VIRTIO_BLK_T_IN, last, 1024, false, IOERR, 0, "beyond the end"),
        (VIRTIO_BLK_T_IN, u64::MAX, 512, false, IOERR, 0, "far beyond it"),
        (VIRTIO_BLK_T_IN, 0, 100, false, IOERR, 0, "no whole sectors"),
        (VIRTIO_BLK_T_OUT, last, 512, true, OK, 1, "the last sector"),
        (VIRTIO_BLK_T_OUT, last, 1024, true, IOERR, 1, "beyond the end"),
        (VIRTIO_BLK_T_OUT, u64::MAX - 1, 1024, true, IOERR, 1, "wraps"),
        (VIRTIO_BLK_T_OUT, 0, 1, true, IOERR, 1, "no whole sectors"),
        (VIRTIO_BLK_T_FLUSH, 0, 0, true, OK, 1, "flush"),
        (VIRTIO_BLK_T_GET_ID, 0, 20, false, OK, 21, "serial number"),
        (VIRTIO_BLK_T_GET_ID, 0, 5, false, OK, 6, "a short buffer"),
        (VIRTIO_BLK_T_SCSI_CMD, 0, 512, false, UNSUPP, 0, "a legacy type"),
        (0x8000_0000, 0, 0, true, UNSUPP, 1, "no type at all"),
    ] {
        let mut driver = Driver::disk(&Fake::new(), VERSION_1 | FLUSH);
        assert_eq!(driver.request(kind, sector, data, out), (status, len), "{kind}: {why}");
        assert!(driver.device.interrupt());
        assert_eq!(driver.get(VIRTIO_MMIO_INTERRUPT_STATUS), 1);
        driver.set(VIRTIO_MMIO_INTERRUPT_ACK, 1);
        assert!(!driver.device.interrupt());
    }
}

// covers: devices/virtio-blk
#[test]
fn data_go_where_they_should() {
    let fake = Fake::new();
    let mut driver = Driver::disk(&fake, VERSION_1 | FLUSH);
    driver.written.clear();
    assert_eq!(driver.request(VIRTIO_BLK_T_IN, 7, 1024, false).0, OK);
    assert_eq!(driver.bytes(DATA, 1024), [[7; 512], [8; 512]].concat());
    for range in [(DATA, 1024), (STATUS, 1), (USED, 6 + 8 * u64::from(SIZE))] {
        assert!(driver.written.contains(&range), "{range:x?} in {:x?}", driver.written);
    }
    driver.memory.write_slice(&[0xa5; 512], GuestAddress(DATA)).unwrap();
    assert_eq!(driver.request(VIRTIO_BLK_T_OUT, 9, 512, true).0, OK);
    assert_eq!(
        fake.with(|d| (
            d.bytes[9 * 512 - 1],
            d.bytes[9 * 512],
            d.bytes[10 * 512 - 1],
            d.bytes[10 * 512]
        )),
        (8, 0xa5, 0xa5, 10)
    );
    assert_eq!(driver.request(VIRTIO_BLK_T_GET_ID, 0, 20, false).0, OK);
    assert_eq!(&driver.bytes(DATA, 20), b"minivmm-0\0\0\0\0\0\0\0\0\0\0\0");
}

// covers: devices/virtio-blk
#[test]
fn the_framing_is_the_drivers_choice() {
    // 2.7.4 "Message Framing": header, data and status may be cut anywhere.
    let fake = Fake::new();
    let mut driver = Driver::disk(&fake, VERSION_1 | FLUSH);
    driver.put(HEADER, VIRTIO_BLK_T_IN);
    driver.put(HEADER + 8, 5u64);
    let data = [(DATA, 100, true), (DATA + 0x800, 0, true), (DATA + 0x1000, 413, true)];
    driver.send(&[&[(HEADER, 3, false), (HEADER + 3, 13, false)], &data[..]].concat());
    assert_eq!(driver.used(), (1, 513));
    assert_eq!(driver.bytes(DATA, 101), [&[5; 100][..], &[0]].concat());
    assert_eq!(driver.bytes(DATA + 0x1000, 413), [&[5; 412][..], &[OK]].concat());
    // The same through an indirect table.
    driver.descriptor(0x8000, 0, (HEADER, 16, NEXT, 1));
    driver.descriptor(0x8000, 1, (DATA + 0x3000, 513, WRITE, 0));
    driver.descriptor(DESC, 4, (0x8000, 32, INDIRECT, 0));
    driver.offer(4);
    driver.kick();
    assert_eq!(driver.used(), (2, 513));
    assert_eq!(driver.bytes(DATA + 0x3000, 513), [&[5; 512][..], &[OK]].concat());
}

// covers: devices/virtio-blk
#[test]
fn discards_and_zeroes_leave_zeroes() {
    for (kind, flags, sector, count, bytes, status, why) in [
        (VIRTIO_BLK_T_WRITE_ZEROES, 0, 3, 2, 16, OK, "zeroes"),
        (
            VIRTIO_BLK_T_WRITE_ZEROES,
            1,
            3,
            2,
            16,
            OK,
            "zeroes, and give the space back",
        ),
        (VIRTIO_BLK_T_DISCARD, 0, 3, 2, 16, OK, "discard"),
        (VIRTIO_BLK_T_DISCARD, 1, 3, 2, 16, UNSUPP, "a discard has no flags"),
        (VIRTIO_BLK_T_WRITE_ZEROES, 2, 3, 2, 16, UNSUPP, "reserved flag"),
        (
            VIRTIO_BLK_T_WRITE_ZEROES,
            0,
            SECTORS - 1,
            2,
            16,
            IOERR,
            "beyond the end",
        ),
        (
            VIRTIO_BLK_T_DISCARD,
            0,
            3,
            u32::MAX,
            16,
            IOERR,
            "more than max_discard_sectors",
        ),
        (
            VIRTIO_BLK_T_DISCARD,
            0,
            3,
            2,
            32,
            IOERR,
            "two ranges, where max_discard_seg is 1",
        ),
        (VIRTIO_BLK_T_DISCARD, 0, 3, 2, 15, IOERR, "less than a range"),
    ] {
        let fake = Fake::new();
        let mut driver = Driver::disk(&fake, VERSION_1 | FLUSH);
        driver.put(DATA, sector);
        driver.put(DATA + 8, count);
        driver.put(DATA + 12, flags);
        assert_eq!(driver.request(kind, 0, bytes, true).0, status, "{why}");
        let zeroed = fake.with(|d| d.bytes[3 * 512..5 * 512].iter().all(|b| *b == 0));
        assert_eq!(zeroed, status == OK, "{why}");
        assert_eq!(fake.with(|d| (d.bytes[2 * 512], d.bytes[5 * 512])), (2, 5));
    }
}

// covers: devices/virtio-blk-overlay-readonly
#[test]
fn a_readonly_disk_takes_no_writes() {
    let fake = Fake::new();
    fake.with(|d| d.readonly = true);
    let mut driver = Driver::disk(&fake, VERSION_1 | FLUSH | 1 << VIRTIO_BLK_F_RO);
    driver.put(DATA, 3u64);
    driver.put(DATA + 8, 1u64);
    assert_eq!(driver.request(VIRTIO_BLK_T_OUT, 3, 512, true).0, IOERR);
    assert_eq!(driver.request(VIRTIO_BLK_T_DISCARD, 0, 16, true).0, IOERR);
    assert_eq!(driver.request(VIRTIO_BLK_T_IN, 3, 512, false).0, OK);
    assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, 0, true).0, OK);
    assert_eq!(fake.with(|d| d.bytes[3 * 512]), 3);
    assert!(!driver.negotiate(VERSION_1 | 1 << VIRTIO_BLK_F_DISCARD), "not offered");
}

// covers: bad-input/disk-io-error
#[test]
fn a_failing_disk_is_an_error_to_the_guest_and_no_write_is_lost() {
    let fake = Fake::new();
    let mut driver = Driver::disk(&fake, VERSION_1 | FLUSH);
    fake.with(|d| d.fail_read = true);
    assert_eq!(driver.request(VIRTIO_BLK_T_IN, 0, 512, false), (IOERR, 0));
    fake.with(|d| (d.fail_read, d.fail_write) = (false, true));
    assert_eq!(driver.request(VIRTIO_BLK_T_OUT, 0, 512, true).0, IOERR);
    fake.with(|d| d.fail_write = false);
    assert_eq!(driver.request(VIRTIO_BLK_T_OUT, 0, 512, true).0, OK);
    assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, 0, true).0, OK);
    // A failed flush: nobody knows what is lost, so no later success may hide it.
    fake.with(|d| d.fail_flush = true);
    assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, 0, true).0, IOERR);
    fake.with(|d| d.fail_flush = false);
    assert_eq!(driver.request(VIRTIO_BLK_T_FLUSH, 0, 0, true).0, IOERR);
    assert_eq!(driver.request(VIRTIO_BLK_T_OUT, 0, 512, true).0, IOERR);
    assert_eq!(
        driver.request(VIRTIO_BLK_T_IN, 1, 512, false).0,
        OK,
        "what can be read is"
    );
    driver.start(VERSION_1 | FLUSH);
    assert_eq!(
        driver.request(VIRTIO_BLK_T_FLUSH, 0, 0, true).0,
        IOERR,
        "a reset mends nothing"
    );
}

// covers: devices/virtio-blk
#[test]
fn a_driver_without_flush_gets_every_write_flushed() {
    for (features, flushes) in [(VERSION_1, 2), (VERSION_1 | FLUSH, 0)] {
        let fake = Fake::new();
        let mut driver = Driver::disk(&fake, features);
        driver.request(VIRTIO_BLK_T_OUT, 0, 512, true);
        driver.request(VIRTIO_BLK_T_OUT, 1, 512, true);
        assert_eq!(fake.with(|d| d.flushes), flushes);
    }
}

// covers: bad-input/virtqueue
#[test]
fn nonsense_in_a_queue_asks_for_a_reset() {
    let header = (HEADER, 16, NEXT, 1);
    let rows: &[(&str, &[Descriptor], u16)] = &[
        ("a chain that is a loop", &[header, (DATA, 512, WRITE | NEXT, 1)], 0),
        ("a loop of one", &[(HEADER, 16, NEXT, 0)], 0),
        ("a link out of the table", &[(HEADER, 16, NEXT, SIZE)], 0),
        ("a head out of the table", &[], SIZE),
        ("a head far out of it", &[], u16::MAX),
        (
            "a buffer beyond RAM",
            &[header, (RAM, 512, WRITE | NEXT, 2), (STATUS, 1, WRITE, 0)],
            0,
        ),
        (
            "a buffer over RAM's end",
            &[header, (RAM - 1, 2, WRITE | NEXT, 2), (STATUS, 1, WRITE, 0)],
            0,
        ),
        (
            "a buffer that wraps",
            &[header, (u64::MAX - 1, 512, WRITE | NEXT, 2), (STATUS, 1, WRITE, 0)],
            0,
        ),
        (
            "4 GiB at once",
            &[header, (DATA, u32::MAX, WRITE | NEXT, 2), (STATUS, 1, WRITE, 0)],
            0,
        ),
        ("a status beyond RAM", &[header, (RAM + 5, 1, WRITE, 0)], 0),
        ("a header beyond RAM", &[(RAM, 16, NEXT, 1), (STATUS, 1, WRITE, 0)], 0),
        (
            "to be read after to be written",
            &[(STATUS, 1, WRITE | NEXT, 1), (HEADER, 16, 0, 0)],
            0,
        ),
        ("no status", &[(HEADER, 16, 0, 0)], 0),
        ("a short header", &[(HEADER, 15, NEXT, 1), (STATUS, 1, WRITE, 0)], 0),
        ("nothing at all", &[(HEADER, 0, 0, 0)], 0),
        ("an indirect table of an odd length", &[(DATA, 17, INDIRECT, 0)], 0),
        ("an empty indirect table", &[(DATA, 0, INDIRECT, 0)], 0),
        ("an indirect table beyond RAM", &[(RAM - 8, 16, INDIRECT, 0)], 0),
        ("an indirect table of megabytes", &[(0, 16 * 70_000, INDIRECT, 0)], 0),
    ];
    for (why, descriptors, head) in rows {
        let fake = Fake::new();
        let mut driver = Driver::disk(&fake, VERSION_1 | FLUSH);
        driver.put(HEADER, VIRTIO_BLK_T_IN);
        for (i, descriptor) in descriptors.iter().enumerate() {
            driver.descriptor(DESC, i as u16, *descriptor);
        }
        driver.offer(*head);
        driver.kick();
        assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0x4f, "{why}: DEVICE_NEEDS_RESET");
        assert_eq!(
            driver.get(VIRTIO_MMIO_INTERRUPT_STATUS),
            2,
            "{why}: the driver learns it"
        );
        assert_eq!(driver.used().0, 0, "{why}");
        // Nothing more happens, until a reset makes all good.
        driver.kick();
        driver.set(VIRTIO_MMIO_STATUS, 0xf);
        assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0x4f, "{why}");
        driver.start(VERSION_1 | FLUSH);
        assert_eq!(driver.request(VIRTIO_BLK_T_IN, 0, 512, false).0, OK, "{why}");
    }
}

// covers: bad-input/virtqueue
#[test]
fn an_indirect_table_inside_an_indirect_table_is_nonsense() {
    let mut driver = Driver::disk(&Fake::new(), VERSION_1 | FLUSH);
    driver.descriptor(0x8000, 0, (0x8000, 16, INDIRECT, 0));
    driver.descriptor(DESC, 0, (0x8000, 16, INDIRECT, 0));
    driver.offer(0);
    driver.kick();
    assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0x4f);
    // A loop inside the table ends, too, and a chain may not be longer than the queue.
    driver.start(VERSION_1 | FLUSH);
    for i in 0..200 {
        driver.descriptor(0x8000, i, (HEADER, 1, NEXT, (i + 1) % 200));
    }
    driver.descriptor(DESC, 0, (0x8000, 16 * 200, INDIRECT, 0));
    driver.offer(0);
    driver.kick();
    assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0x4f);
}

// covers: bad-input/virtqueue
#[test]
fn more_requests_than_entries_are_nonsense() {
    let mut driver = Driver::disk(&Fake::new(), VERSION_1 | FLUSH);
    driver.put(AVAIL + 2, SIZE + 1);
    driver.kick();
    assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0x4f);
}

// covers: bad-input/virtqueue
#[test]
fn a_queue_has_to_be_a_queue_in_ram() {
    for (size, desc, avail, used, ready, why) in [
        (16, DESC, AVAIL, USED, 1, "as it should be"),
        (1, DESC, AVAIL, USED, 1, "the least"),
        (128, DESC, AVAIL, USED, 1, "the most"),
        (0, DESC, AVAIL, USED, 0, "no entries"),
        (3, DESC, AVAIL, USED, 0, "not a power of 2"),
        (256, DESC, AVAIL, USED, 0, "more than QueueNumMax"),
        (65536 + 16, DESC, AVAIL, USED, 0, "more than 16 bits"),
        (16, DESC + 8, AVAIL, USED, 0, "misaligned descriptors"),
        (16, DESC, AVAIL + 1, USED, 0, "misaligned available ring"),
        (16, DESC, AVAIL, USED + 2, 0, "misaligned used ring"),
        (16, RAM, AVAIL, USED, 0, "descriptors beyond RAM"),
        (16, DESC, RAM - 16, USED, 0, "available ring over RAM's end"),
        (16, DESC, AVAIL, u64::MAX & !3, 0, "used ring that wraps"),
        (16, DESC, 0, USED, 0, "an available ring that was never set"),
    ] {
        let mut driver = Driver::of(Transport::new(Box::new(Block::new(Box::new(Fake::new()), "x"))));
        assert!(driver.negotiate(VERSION_1));
        driver.set_queue(size, desc, avail, used);
        assert_eq!(driver.get(VIRTIO_MMIO_QUEUE_READY), ready, "{why}");
        assert_eq!(
            driver.get(VIRTIO_MMIO_STATUS),
            if ready == 1 { 0xb } else { 0x4b },
            "{why}"
        );
        driver.kick();
    }
}

// covers: bad-input/virtqueue
#[test]
fn a_request_that_overwrites_its_own_rings_ends() {
    let fake = Fake::new();
    fake.with(|d| d.bytes.fill(0xff));
    let mut driver = Driver::disk(&fake, VERSION_1 | FLUSH | EVENT_IDX);
    driver.put(HEADER, VIRTIO_BLK_T_IN);
    driver.put(HEADER + 8, 0u64);
    // The disk's contents replace the descriptors and both rings.
    for i in 0..SIZE {
        driver.descriptor(DESC, i, (HEADER, 16, NEXT, SIZE - 1));
    }
    driver.descriptor(DESC, SIZE - 1, (DESC, 0x2001, WRITE, 0));
    for _ in 0..SIZE - 1 {
        driver.offer(0);
    }
    driver.kick();
    assert_eq!(driver.get(VIRTIO_MMIO_STATUS) & 0x40, 0x40);
}

// covers: devices/virtio-mmio
#[test]
fn interrupts_come_as_the_driver_asks() {
    // VIRTQ_AVAIL_F_NO_INTERRUPT, without EVENT_IDX.
    let mut driver = Driver::disk(&Fake::new(), VERSION_1 | FLUSH);
    driver.put(AVAIL, 1u16);
    driver.request(VIRTIO_BLK_T_FLUSH, 0, 0, true);
    assert!(!driver.device.interrupt());
    driver.put(AVAIL, 0u16);
    driver.kick();
    assert!(!driver.device.interrupt(), "nothing was available");
    driver.request(VIRTIO_BLK_T_FLUSH, 0, 0, true);
    assert!(driver.device.interrupt());
    // used_event: an interrupt for the third request; avail_event: a notification for each.
    let mut driver = Driver::disk(&Fake::new(), VERSION_1 | FLUSH | EVENT_IDX);
    driver.put(AVAIL + 4 + 2 * u64::from(SIZE), 2u16);
    for (n, interrupt) in [(1u16, false), (2, false), (3, true)] {
        driver.request(VIRTIO_BLK_T_FLUSH, 0, 0, true);
        assert_eq!(driver.device.interrupt(), interrupt, "{n}");
        let event: u16 = driver
            .memory
            .read_obj(GuestAddress(USED + 4 + 8 * u64::from(SIZE)))
            .unwrap();
        assert_eq!(event, n);
    }
}

// covers: devices/virtio-rng
#[test]
fn entropy_is_a_function_of_the_seed() {
    let take = |seed| {
        let mut driver = Driver::rng(seed);
        driver.send(&[(DATA, 13, true), (DATA + 0x100, 100, true)]);
        assert_eq!(driver.used(), (1, 113));
        [driver.bytes(DATA, 13), driver.bytes(DATA + 0x100, 100)].concat()
    };
    assert_eq!(take(1), take(1));
    assert_ne!(take(1), take(2));
    let mut sorted = take(1);
    sorted.sort_unstable();
    sorted.dedup();
    assert!(sorted.len() > 50, "{} different bytes", sorted.len());
    // A request gets what one notification may cost, and says how much that is.
    let mut driver = Driver::rng(3);
    driver.send(&[(DATA, 0x8_0000, true)]);
    assert_eq!(driver.used(), (1, 64 << 10));
    driver.send(&[(DATA, 8, false), (DATA, 8, true)]);
    assert_eq!(driver.get(VIRTIO_MMIO_STATUS), 0x4f, "nothing is read");
}

// covers: devices/virtio-state
#[test]
fn the_state_goes_out_and_comes_back() {
    let fake = Fake::new();
    let mut driver = Driver::disk(&fake, VERSION_1 | FLUSH | EVENT_IDX);
    driver.request(VIRTIO_BLK_T_IN, 5, 512, false);
    fake.with(|d| d.fail_flush = true);
    driver.request(VIRTIO_BLK_T_FLUSH, 0, 0, true);
    let state = driver.device.state();
    let mut other = Transport::new(Box::new(Block::new(Box::new(fake.clone()), "minivmm-0")));
    other.set_state(&state, &driver.memory).unwrap();
    assert_eq!(other.state(), state);
    assert!(other.interrupt());
    driver.device = other;
    assert_eq!(
        driver.request(VIRTIO_BLK_T_IN, 6, 512, false).0,
        OK,
        "it goes on where it was"
    );
    assert_eq!(
        driver.request(VIRTIO_BLK_T_OUT, 6, 512, true).0,
        IOERR,
        "the flush is still a failed one"
    );

    let mut rng = Driver::rng(9);
    rng.send(&[(DATA, 5, true)]);
    let mut copy = Driver::rng(1);
    copy.memory = rng.memory.clone();
    copy.device.set_state(&rng.device.state(), &rng.memory).unwrap();
    assert_eq!(copy.device.state(), rng.device.state());

    // States that are none of this device's.
    for spoil in [
        |s: &mut TransportState| s.queues.clear(),
        |s: &mut TransportState| s.queues[0].max_size = 64,
        |s: &mut TransportState| s.queues[0].size = 3,
        |s: &mut TransportState| s.queues[0].used_ring = RAM,
    ] {
        let mut bad = state.clone();
        spoil(&mut bad);
        let mut other = Transport::new(Box::new(Block::new(Box::new(fake.clone()), "x")));
        other.set_state(&bad, &driver.memory).unwrap_err();
        assert_eq!(other.read(VIRTIO_MMIO_STATUS.into(), 4), 0);
    }
}

/// A disk with room for everything, which counts what is moved.
#[derive(Clone, Debug, Default)]
struct Vast(Arc<Mutex<u64>>);

impl Vast {
    fn moved(&self) -> u64 {
        *self.0.lock().unwrap()
    }

    fn count(&self, len: u64) -> io::Result<()> {
        *self.0.lock().unwrap() += len;
        Ok(())
    }
}

impl Medium for Vast {
    fn size(&self) -> u64 {
        1 << 50
    }

    fn readonly(&self) -> bool {
        false
    }

    fn read(&mut self, _: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.count(bytes.len() as u64)
    }

    fn write(&mut self, _: u64, bytes: &[u8]) -> io::Result<()> {
        self.count(bytes.len() as u64)
    }

    fn zero(&mut self, _: u64, len: u64) -> io::Result<()> {
        self.count(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const BUFFER: u32 = 64 << 10;
const BUFFERS: u16 = 13;

/// Fills the queue with requests that are as large as it takes them: all of the same buffer.
fn vast_driver(vast: &Vast) -> Driver {
    let mut driver = Driver::of(Transport::new(Box::new(Block::new(Box::new(vast.clone()), "x"))));
    driver.start(VERSION_1 | FLUSH);
    driver.put(HEADER, VIRTIO_BLK_T_IN);
    driver.descriptor(0x8000, 0, (HEADER, 16, NEXT, 1));
    for n in 1..=BUFFERS {
        driver.descriptor(0x8000, n, (0x1_0000, BUFFER, NEXT | WRITE, n + 1));
    }
    driver.descriptor(0x8000, BUFFERS + 1, (STATUS, 1, WRITE, 0));
    for head in 0..SIZE {
        driver.descriptor(DESC, head, (0x8000, 16 * u32::from(BUFFERS + 2), INDIRECT, 0));
        driver.offer(head);
    }
    driver
}

// covers: devices/virtio-slices
#[test]
fn a_notification_is_served_in_slices() {
    let one = u64::from(BUFFER) * u64::from(BUFFERS);
    let vast = Vast::default();
    let mut driver = vast_driver(&vast);
    assert_eq!(driver.device.due(), None);
    driver.now = 1000;
    driver.kick();
    let first = vast.moved();
    assert!((SLICE..SLICE + one).contains(&first), "{first} bytes at once");
    assert_eq!(u64::from(driver.used().0) * one, first);
    assert!(driver.device.interrupt(), "for what is done");
    assert_eq!(driver.device.due(), Some(1000 + PAUSE_NS));
    assert!(driver.device.take_work() >= first);
    // A second notification brings nothing forward.
    driver.kick();
    assert_eq!(vast.moved(), first);
    // What is put off is part of the state.
    let mut other = Transport::new(Box::new(Block::new(Box::new(vast.clone()), "x")));
    other.set_state(&driver.device.state(), &driver.memory).unwrap();
    assert_eq!(other.state(), driver.device.state());
    driver.device = other;
    let mut slices = 1;
    while let Some(due) = driver.device.due() {
        let before = vast.moved();
        driver
            .device
            .advance(&mut driver_access(due - 1, &driver.memory, &mut driver.written))
            .unwrap();
        assert_eq!(vast.moved(), before, "not before it is time");
        driver
            .device
            .advance(&mut driver_access(due, &driver.memory, &mut driver.written))
            .unwrap();
        assert!((1..SLICE + one).contains(&(vast.moved() - before)));
        slices += 1;
    }
    assert_eq!((driver.used().0, vast.moved()), (SIZE, u64::from(SIZE) * one));
    assert_eq!(slices, (u64::from(SIZE) * one).div_ceil(first));
    // A reset forgets it.
    let mut driver = vast_driver(&vast);
    driver.kick();
    driver.set(VIRTIO_MMIO_STATUS, 0);
    assert_eq!(driver.device.due(), None);
}

// covers: devices/virtio-slices
#[test]
fn a_buffer_that_is_longer_than_was_said_is_an_error() {
    let vast = Vast::default();
    let mut driver = Driver::of(Transport::new(Box::new(Block::new(Box::new(vast.clone()), "x"))));
    driver.start(VERSION_1 | FLUSH);
    for kind in [VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT] {
        let out = kind == VIRTIO_BLK_T_OUT;
        assert_eq!(driver.request(kind, 0, BUFFER, out).0, OK);
        let moved = vast.moved();
        assert_eq!(driver.request(kind, 0, 2 * BUFFER, out).0, IOERR);
        assert_eq!(driver.request(kind, u64::MAX, 512, out).0, IOERR, "no place wraps");
        assert_eq!(driver.request(kind, u64::MAX / 512 + 1, 512, out).0, IOERR);
        assert_eq!(vast.moved(), moved);
    }
}
