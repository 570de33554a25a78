//! The messages of FUSE, byte for byte: requests are put together here as Linux's `include/uapi/linux/fuse.h` lays them out.

use std::collections::BTreeMap;

use virtio_bindings::virtio_mmio::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{
    Device, Fs,
    abi::opcode,
    file_system::{
        Attributes, Caller, Changes, Entry, Errno, FileSystem, Found, Handle, New, Node, Opened, ROOT, SetTime, Space,
        Time, kind,
    },
};
use crate::virtio::{Nonsense, interface::Access, mmio::Transport};

/// A folder with files in memory, which notes what it is asked.
#[derive(Debug, Default)]
struct Memory {
    files: BTreeMap<Vec<u8>, Vec<u8>>,
    asked: Vec<String>,
}

/// One file system for the device and for the test.
#[derive(Clone, Debug, Default)]
struct Shared(std::sync::Arc<std::sync::Mutex<Memory>>);

const FILE: Attributes = Attributes {
    ino: 77,
    size: 5,
    blocks: 8,
    modified: Time {
        seconds: 100,
        nanoseconds: 7,
    },
    changed: Time {
        seconds: 200,
        nanoseconds: 9,
    },
    mode: kind::FILE | 0o644,
    links: 1,
    uid: 1000,
    gid: 1001,
};

impl Shared {
    fn note(&self, what: String) {
        self.0.lock().unwrap().asked.push(what);
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().asked)
    }
}

impl FileSystem for Shared {
    fn valid(&self) -> u64 {
        3
    }
    fn reset(&mut self) {
        self.note("reset".into());
    }
    fn lookup(&mut self, folder: Node, name: &[u8]) -> Result<Found, Errno> {
        self.note(format!("lookup {folder} {}", String::from_utf8_lossy(name)));
        match self.0.lock().unwrap().files.contains_key(name) {
            true => Ok(Found {
                node: 5,
                attributes: FILE,
            }),
            false => Err(Errno::NO_ENTRY),
        }
    }
    fn forget(&mut self, node: Node, times: u64) {
        self.note(format!("forget {node} {times}"));
    }
    fn attributes(&mut self, node: Node, handle: Option<Handle>) -> Result<Attributes, Errno> {
        self.note(format!("attributes {node} {handle:?}"));
        Ok(FILE)
    }
    fn change(
        &mut self,
        _: &Caller,
        node: Node,
        handle: Option<Handle>,
        changes: &Changes,
    ) -> Result<Attributes, Errno> {
        self.note(format!("change {node} {handle:?} {changes:?}"));
        Ok(FILE)
    }
    fn target(&mut self, _: Node) -> Result<Vec<u8>, Errno> {
        Ok(b"target".to_vec())
    }
    fn make(&mut self, caller: &Caller, folder: Node, name: &[u8], new: New<'_>) -> Result<Found, Errno> {
        let name = String::from_utf8_lossy(name).into_owned();
        self.note(format!("make {} {folder} {name} {new:?}", caller.uid));
        Err(Errno::EXISTS)
    }
    fn create(&mut self, _: &Caller, _: Node, _: &[u8], mode: u32) -> Result<(Found, Opened), Errno> {
        self.note(format!("create {mode:o}"));
        let found = Found {
            node: 6,
            attributes: FILE,
        };
        Ok((
            found,
            Opened {
                handle: 9,
                stream: true,
            },
        ))
    }
    fn remove(&mut self, _: &Caller, _: Node, _: &[u8], is_folder: bool) -> Result<(), Errno> {
        self.note(format!("remove {is_folder}"));
        Ok(())
    }
    fn rename(&mut self, _: &Caller, from: (Node, &[u8]), to: (Node, &[u8]), flags: u32) -> Result<(), Errno> {
        self.note(format!("rename {from:?} {to:?} {flags}"));
        Ok(())
    }
    fn link(&mut self, _: &Caller, node: Node, folder: Node, _: &[u8]) -> Result<Found, Errno> {
        self.note(format!("link {node} {folder}"));
        Err(Errno::NOT_PERMITTED)
    }
    fn open(&mut self, _: Node, flags: u32) -> Result<Opened, Errno> {
        self.note(format!("open {flags:o}"));
        Err(Errno::NOT_IMPLEMENTED)
    }
    fn read(&mut self, _: Node, _: Handle, offset: u64, bytes: &mut [u8]) -> Result<usize, Errno> {
        let files = self.0.lock().unwrap();
        let data = &files.files[&b"file"[..]];
        let from = (offset as usize).min(data.len());
        let count = bytes.len().min(data.len() - from);
        bytes[..count].copy_from_slice(&data[from..from + count]);
        Ok(count)
    }
    fn write(&mut self, _: &Caller, _: Node, _: Handle, offset: u64, bytes: &[u8]) -> Result<(), Errno> {
        let sum: u64 = bytes.iter().map(|byte| u64::from(*byte)).sum();
        self.note(format!("write {offset} {} {sum}", bytes.len()));
        Ok(())
    }
    fn allocate(&mut self, _: &Caller, _: Node, _: Handle, _: u32, _: (u64, u64)) -> Result<(), Errno> {
        Ok(())
    }
    fn sync(&mut self, _: Node, _: Handle) -> Result<(), Errno> {
        Ok(())
    }
    fn close(&mut self, handle: Handle) {
        self.note(format!("close {handle}"));
    }
    fn open_folder(&mut self, _: Node) -> Result<Handle, Errno> {
        Ok(0)
    }
    fn list(&mut self, _: Node, _: Handle, offset: u64, take: &mut dyn FnMut(Entry<'_>) -> bool) -> Result<(), Errno> {
        let names: Vec<_> = self.0.lock().unwrap().files.keys().cloned().collect();
        for (next, name) in (1..).zip(&names).skip(offset as usize) {
            if !take(Entry {
                name,
                ino: 77,
                kind: kind::FILE,
                next,
            }) {
                break;
            }
        }
        Ok(())
    }
    fn close_folder(&mut self, _: Handle) {}
    fn space(&mut self) -> Result<Space, Errno> {
        Ok(Space::default())
    }
    fn fingerprint(&self) -> u64 {
        0
    }
}

/// Bytes of a request or an answer.
fn words(parts: &[&dyn AsRef<[u8]>]) -> Vec<u8> {
    parts.iter().flat_map(|part| part.as_ref().to_vec()).collect()
}

const REQUEST: u64 = 0x10_0000;
const ANSWER: u64 = 0x30_0000;

/// What a driver has: memory, the device behind its registers, and how many requests it has made.
struct Driver {
    memory: GuestMemoryMmap,
    transport: Transport,
    requests: u16,
}

const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;

impl Driver {
    fn new(fs: Fs) -> Self {
        let mut driver = Driver {
            memory: GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap(),
            transport: Transport::new(Box::new(fs)),
            requests: 0,
        };
        driver.start();
        driver
    }

    fn write(&mut self, register: u32, value: u32) -> Result<(), Nonsense> {
        let mut access = Access {
            now: 0,
            memory: &self.memory,
            written: &mut Vec::new(),
        };
        self.transport.write(u64::from(register), 4, value.into(), &mut access)
    }

    /// Resets the device, agrees on VERSION_1 and sets the second queue up.
    fn start(&mut self) {
        self.requests = 0;
        self.memory.write_obj(0u16, GuestAddress(AVAILABLE + 2)).unwrap();
        for (register, value) in [
            (VIRTIO_MMIO_STATUS, 0),
            (VIRTIO_MMIO_STATUS, 3),
            (VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1),
            (VIRTIO_MMIO_DRIVER_FEATURES, 1),
            (VIRTIO_MMIO_STATUS, 11),
            (VIRTIO_MMIO_QUEUE_SEL, 1),
            (VIRTIO_MMIO_QUEUE_NUM, 16),
            (VIRTIO_MMIO_QUEUE_DESC_LOW, TABLE as u32),
            (VIRTIO_MMIO_QUEUE_AVAIL_LOW, AVAILABLE as u32),
            (VIRTIO_MMIO_QUEUE_USED_LOW, USED as u32),
            (VIRTIO_MMIO_QUEUE_READY, 1),
            (VIRTIO_MMIO_STATUS, 15),
        ] {
            self.write(register, value).unwrap();
        }
    }

    /// Has the device answer one message with so much room: its error and what follows the header.
    fn ask(&mut self, message: &[u8], room: u32) -> Result<Option<(i32, Vec<u8>)>, Nonsense> {
        self.memory.write_slice(message, GuestAddress(REQUEST)).unwrap();
        // A descriptor: address, length, flags (1: another one follows, 2: to be written), the next one.
        let has_room = room > 0;
        let mut table = REQUEST.to_le_bytes().to_vec();
        table.extend((message.len() as u32).to_le_bytes());
        table.extend([u8::from(has_room), 0, 1, 0]);
        table.extend(ANSWER.to_le_bytes());
        table.extend(room.to_le_bytes());
        table.extend([2, 0, 0, 0]);
        self.memory.write_slice(&table, GuestAddress(TABLE)).unwrap();
        let slot = u64::from(self.requests % 16);
        self.memory
            .write_obj(0u16, GuestAddress(AVAILABLE + 4 + 2 * slot))
            .unwrap();
        self.requests += 1;
        self.memory
            .write_obj(self.requests, GuestAddress(AVAILABLE + 2))
            .unwrap();
        self.write(VIRTIO_MMIO_QUEUE_NOTIFY, 1)?;
        let len: u32 = self.memory.read_obj(GuestAddress(USED + 4 + 8 * slot + 4)).unwrap();
        if len == 0 {
            return Ok(None);
        }
        let mut answer = vec![0; len as usize];
        self.memory.read_slice(&mut answer, GuestAddress(ANSWER)).unwrap();
        assert_eq!(answer[..4], len.to_le_bytes());
        assert_eq!(answer[8..16], 42u64.to_le_bytes());
        let error = i32::from_le_bytes(answer[4..8].try_into().unwrap());
        Ok(Some((error, answer[16..].to_vec())))
    }
}

fn ask(driver: &mut Driver, message: &[u8], room: u32) -> Result<Option<(i32, Vec<u8>)>, Nonsense> {
    driver.ask(message, room)
}

/// A message: the header for a node, and what follows.
fn message(opcode: u32, node: u64, rest: &[&dyn AsRef<[u8]>]) -> Vec<u8> {
    let rest = words(rest);
    let len = (40 + rest.len() as u32).to_le_bytes();
    let ids = [1000u32, 1001, 1].map(u32::to_le_bytes).concat();
    words(&[
        &len,
        &opcode.to_le_bytes(),
        &42u64.to_le_bytes(),
        &node.to_le_bytes(),
        &ids,
        &[0; 4],
        &rest,
    ])
}

fn begun() -> (Driver, Shared) {
    let shared = Shared::default();
    let file = (b"file".to_vec(), b"hello".to_vec());
    shared.0.lock().unwrap().files.extend([file]);
    let fs = Fs::new("tag", Box::new(shared.clone()));
    assert_eq!(fs.id(), 26);
    assert_eq!(fs.config()[..4], *b"tag\0");
    assert_eq!(fs.config()[36..], 1u32.to_le_bytes());
    let mut fs = Driver::new(fs);
    // Version 7.38, 128 KiB of read-ahead, and all flags that there are.
    let init = [7u32, 38, 0x2_0000, u32::MAX].map(u32::to_le_bytes).concat();
    let (error, answer) = ask(&mut fs, &message(opcode::INIT, 0, &[&init]), 256).unwrap().unwrap();
    assert_eq!((error, answer.len()), (0, 64));
    assert_eq!(answer[..8], [7u32, 38].map(u32::to_le_bytes).concat());
    shared.asked();
    (fs, shared)
}

// covers: share/protocol
#[test]
fn messages_are_laid_out_as_linux_has_them() {
    let (mut fs, shared) = begun();
    let (error, answer) = ask(&mut fs, &message(opcode::LOOKUP, ROOT, &[b"file\0"]), 144)
        .unwrap()
        .unwrap();
    let attributes = |valid: &[u8]| {
        words(&[
            &valid,
            &[77u64, 5, 8, 100, 100, 200].map(u64::to_le_bytes).concat(),
            &[7u32, 7, 9, 0o100_644, 1, 1000, 1001, 0, 4096, 0]
                .map(u32::to_le_bytes)
                .concat(),
        ])
    };
    let entry = attributes(&[5u64, 0, 3, 3, 0].map(u64::to_le_bytes).concat());
    assert_eq!((error, answer.len()), (0, 128));
    assert_eq!(answer, entry);
    let missing = ask(&mut fs, &message(opcode::LOOKUP, ROOT, &[b"none\0"]), 144)
        .unwrap()
        .unwrap();
    assert_eq!(missing, (-2, Vec::new()));
    shared.asked();

    let handle = words(&[&1u32.to_le_bytes(), &[0; 4], &9u64.to_le_bytes()]);
    let (_, answer) = ask(&mut fs, &message(opcode::GETATTR, 5, &[&handle]), 120)
        .unwrap()
        .unwrap();
    assert_eq!(answer, attributes(&[3u64, 0].map(u64::to_le_bytes).concat()));
    assert_eq!(shared.asked(), ["attributes 5 Some(9)"]);

    // Mode, length, the time of the last change, and now for the last access.
    let valid = 1u32 | 1 << 3 | 1 << 5 | 1 << 4 | 1 << 7;
    let change = words(&[
        &valid.to_le_bytes(),
        &[0; 4],
        &[0u64, 123, 0, 1, 2, 3].map(u64::to_le_bytes).concat(),
        &[10u32, 20, 30, 0o100_600, 0, 1, 2, 0].map(u32::to_le_bytes).concat(),
    ]);
    assert_eq!(change.len(), 88);
    ask(&mut fs, &message(opcode::SETATTR, 5, &[&change]), 120).unwrap();
    let expected = Changes {
        mode: Some(0o600),
        size: Some(123),
        accessed: Some(SetTime::Now),
        modified: Some(SetTime::At(Time {
            seconds: 2,
            nanoseconds: 20,
        })),
        ..Changes::default()
    };
    assert_eq!(shared.asked(), [format!("change 5 None {expected:?}")]);

    let read = words(&[
        &[0u64, 1].map(u64::to_le_bytes).concat(),
        &100u32.to_le_bytes(),
        &[0; 20],
    ]);
    let (_, answer) = ask(&mut fs, &message(opcode::READ, 5, &[&read]), 116).unwrap().unwrap();
    assert_eq!(answer, b"ello");

    let data = vec![1u8; 600_000];
    let write = words(&[
        &[9u64, 10].map(u64::to_le_bytes).concat(),
        &(data.len() as u32).to_le_bytes(),
        &[0; 20],
        &data,
    ]);
    let (_, answer) = ask(&mut fs, &message(opcode::WRITE, 5, &[&write]), 24)
        .unwrap()
        .unwrap();
    assert_eq!(answer, words(&[&600_000u32.to_le_bytes(), &[0; 4]]));
    let pieces = [
        "write 10 262144 262144",
        "write 262154 262144 262144",
        "write 524298 75712 75712",
    ];
    assert_eq!(shared.asked(), pieces);

    let create = words(&[
        &[0o1102u32, 0o100_644, 0o22, 0].map(u32::to_le_bytes).concat(),
        b"new\0",
    ]);
    let (_, answer) = ask(&mut fs, &message(opcode::CREATE, ROOT, &[&create]), 160)
        .unwrap()
        .unwrap();
    // FOPEN_DIRECT_IO, FOPEN_NONSEEKABLE and FOPEN_STREAM.
    assert_eq!(
        answer[128..],
        words(&[&9u64.to_le_bytes(), &0x15u32.to_le_bytes(), &[0; 4]])
    );
    assert_eq!(shared.asked(), ["create 100644"]);

    let rename = words(&[&7u64.to_le_bytes(), &2u32.to_le_bytes(), &[0; 4], b"old\0new\0"]);
    ask(&mut fs, &message(opcode::RENAME2, ROOT, &[&rename]), 16).unwrap();
    let expected = format!("rename {:?} {:?} 2", (1u64, b"old"), (7u64, b"new"));
    assert_eq!(shared.asked(), [expected]);

    let list = words(&[
        &[0u64, 0].map(u64::to_le_bytes).concat(),
        &4096u32.to_le_bytes(),
        &[0; 20],
    ]);
    let (_, answer) = ask(&mut fs, &message(opcode::READDIR, ROOT, &[&list]), 4112)
        .unwrap()
        .unwrap();
    let name = words(&[
        &[77u64, 1].map(u64::to_le_bytes).concat(),
        &[4u32, 8].map(u32::to_le_bytes).concat(),
        b"file\0\0\0\0",
    ]);
    assert_eq!(answer, name);
    let (_, answer) = ask(&mut fs, &message(opcode::READDIRPLUS, ROOT, &[&list]), 4112)
        .unwrap()
        .unwrap();
    assert_eq!(answer, words(&[&entry, &name]));
    shared.asked();

    // FORGET has no answer, and neither have several.
    let none = ask(&mut fs, &message(opcode::FORGET, 5, &[&3u64.to_le_bytes()]), 0).unwrap();
    assert_eq!(none, None);
    let several = words(&[
        &[2u32, 0].map(u32::to_le_bytes).concat(),
        &[5u64, 1, 6, 2].map(u64::to_le_bytes).concat(),
    ]);
    ask(&mut fs, &message(opcode::BATCH_FORGET, 0, &[&several]), 0).unwrap();
    assert_eq!(shared.asked(), ["forget 5 3", "forget 5 1", "forget 6 2"]);
}

// covers: share/hostile
#[test]
fn requests_that_no_driver_makes_are_errors() {
    let (mut fs, shared) = begun();
    let mut error = |opcode, rest: &[u8], room| {
        let answer = ask(&mut fs, &message(opcode, ROOT, &[&rest]), room).unwrap();
        answer.map(|(error, _)| error)
    };
    const INVALID: Option<i32> = Some(-22);
    for name in [&b"..\0"[..], b".\0", b"\0", b"a/b\0", b"no end", b""] {
        assert_eq!(error(opcode::LOOKUP, name, 144), INVALID, "{name:?}");
        assert_eq!(error(opcode::UNLINK, name, 144), INVALID, "{name:?}");
    }
    let long = [vec![b'x'; 256], vec![0]].concat();
    assert_eq!(error(opcode::LOOKUP, &long, 144), Some(-36));
    // Structures that are cut short.
    for opcode in 1..=60 {
        if !matches!(
            opcode,
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::FSYNCDIR
        ) {
            let answer = error(opcode, b"", 4096).unwrap_or(0);
            assert!(
                answer < 0 || matches!(opcode, opcode::READLINK | opcode::STATFS | opcode::DESTROY),
                "{opcode}"
            );
        }
    }
    // More forgotten than the message has, a write of more than it brings, a request without end.
    let many = words(&[
        &[u32::MAX, 0].map(u32::to_le_bytes).concat(),
        &[5u64, 1].map(u64::to_le_bytes).concat(),
    ]);
    assert_eq!(error(opcode::BATCH_FORGET, &many, 0), None);
    let write = words(&[
        &[9u64, u64::MAX].map(u64::to_le_bytes).concat(),
        &u32::MAX.to_le_bytes(),
        &[0; 20],
        b"x",
    ]);
    assert_eq!(error(opcode::WRITE, &write, 24), INVALID);
    assert_eq!(error(opcode::LOOKUP, &vec![b'x'; 100_000], 144), INVALID);
    // An opcode that there is not.
    assert_eq!(error(4711, b"", 16), Some(-38));
    // A read of all there can be is bounded by the room for it.
    let read = words(&[
        &[0u64, 0].map(u64::to_le_bytes).concat(),
        &u32::MAX.to_le_bytes(),
        &[0; 20],
    ]);
    assert_eq!(error(opcode::READ, &read, 20), Some(0));
    // No room for an answer, and no whole header: the device asks for a reset.
    assert!(ask(&mut fs, &message(opcode::LOOKUP, ROOT, &[b"file\0"]), 20).is_err());
    fs.start();
    assert!(ask(&mut fs, &[0; 39], 200).is_err());
    shared.asked();
    // Nothing is answered before the driver has introduced itself.
    fs.start();
    let early = ask(&mut fs, &message(opcode::LOOKUP, ROOT, &[b"file\0"]), 144).unwrap();
    assert_eq!(early, Some((-5, Vec::new())));
    let old = [6u32, 0, 0, 0].map(u32::to_le_bytes).concat();
    assert_eq!(
        ask(&mut fs, &message(opcode::INIT, 0, &[&old]), 256).unwrap(),
        Some((-71, Vec::new()))
    );
}
