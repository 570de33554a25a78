//! What a guest of `minivmm run` is connected to its command by: a shared directory whose files are the host's.
//!
//! | file | what is written to it |
//! |---|---|
//! | `stdout`, `stderr` | what the command says, byte for byte |
//! | `status` | its exit status, in decimal digits |
//! | `want` | of how many more bytes of input there is room, as 4 bytes, little-endian |
//! | `failed` | why the command cannot be executed, an error number in decimal digits |
//!
//! Input itself enters as all input does, over the serial port: at a step that is counted.

use std::{
    fmt,
    io::Write,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use devices::virtio::fs::file_system::{
    Attributes, Caller, Changes, Entry, Errno, FileSystem, Found, Handle, New, Node, Opened, ROOT, Space, kind,
};

/// What the guest mounts it by.
pub const TAG: &str = "minivmm-command";

/// What a command has come to, as far as the guest has said.
#[derive(Debug, Default)]
pub struct Report {
    /// Bytes of input that the guest has room for.
    credit: AtomicU64,
    said: Mutex<Said>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Said {
    status: Option<u8>,
    error: Option<i32>,
}

impl PartialEq for Report {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Report {}

impl Report {
    fn said(&self) -> std::sync::MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The command's exit status, once it has ended.
    pub fn status(&self) -> Option<u8> {
        self.said().status
    }

    /// Why the command could not be executed, as an error number, if so.
    pub fn error(&self) -> Option<i32> {
        self.said().error
    }

    /// Bytes of input that may be sent.
    pub fn credit(&self) -> usize {
        usize::try_from(self.credit.load(Ordering::Relaxed)).unwrap_or(usize::MAX)
    }

    /// So many were sent.
    pub fn spend(&self, bytes: usize) {
        let less = |credit: u64| Some(credit.saturating_sub(bytes as u64));
        // It always says some number.
        let _ = self.credit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

/// The directory.
pub struct Channel {
    out: [Box<dyn Write + Send>; 2],
    report: Arc<Report>,
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Channel")
    }
}

const NAMES: [&[u8]; 5] = [b"stdout", b"stderr", b"status", b"want", b"failed"];
const FIRST: Node = ROOT + 1;
const STDERR: Node = FIRST + 1;
const STATUS: Node = FIRST + 2;
const WANT: Node = FIRST + 3;
const FAILED: Node = FIRST + 4;

impl Channel {
    /// Standard output and standard error, and what the command comes to.
    pub fn new(stdout: Box<dyn Write + Send>, stderr: Box<dyn Write + Send>, report: Arc<Report>) -> Self {
        Channel {
            out: [stdout, stderr],
            report,
        }
    }

    fn found(node: Node) -> Result<Attributes, Errno> {
        let mode = match node {
            ROOT => kind::FOLDER | 0o555,
            FIRST..=FAILED => kind::FILE | 0o666,
            _ => return Err(Errno::STALE),
        };
        Ok(Attributes {
            ino: node,
            mode,
            links: 1,
            ..Attributes::default()
        })
    }
}

fn digits(bytes: &[u8]) -> Result<i32, Errno> {
    let text = std::str::from_utf8(bytes).map_err(|_| Errno::INVALID)?;
    text.trim().parse().map_err(|_| Errno::INVALID)
}

impl FileSystem for Channel {
    fn valid(&self) -> u64 {
        1 << 30
    }

    fn reset(&mut self) {}

    fn lookup(&mut self, folder: Node, name: &[u8]) -> Result<Found, Errno> {
        let index = NAMES.iter().position(|known| *known == name && folder == ROOT);
        let node = FIRST + index.ok_or(Errno::NO_ENTRY)? as Node;
        let attributes = Self::found(node)?;
        Ok(Found { node, attributes })
    }

    fn forget(&mut self, _: Node, _: u64) {}

    fn attributes(&mut self, node: Node, _: Option<Handle>) -> Result<Attributes, Errno> {
        Self::found(node)
    }

    // A program that opens its standard output anew may cut it, too: as with a pipe, nothing happens.
    fn change(&mut self, _: &Caller, node: Node, _: Option<Handle>, _: &Changes) -> Result<Attributes, Errno> {
        Self::found(node)
    }

    fn target(&mut self, _: Node) -> Result<Vec<u8>, Errno> {
        Err(Errno::INVALID)
    }

    fn make(&mut self, _: &Caller, _: Node, _: &[u8], _: New<'_>) -> Result<Found, Errno> {
        Err(Errno::READ_ONLY)
    }

    fn create(&mut self, _: &Caller, _: Node, _: &[u8], _: u32) -> Result<(Found, Opened), Errno> {
        Err(Errno::READ_ONLY)
    }

    fn remove(&mut self, _: &Caller, _: Node, _: &[u8], _: bool) -> Result<(), Errno> {
        Err(Errno::READ_ONLY)
    }

    fn rename(&mut self, _: &Caller, _: (Node, &[u8]), _: (Node, &[u8]), _: u32) -> Result<(), Errno> {
        Err(Errno::READ_ONLY)
    }

    fn link(&mut self, _: &Caller, _: Node, _: Node, _: &[u8]) -> Result<Found, Errno> {
        Err(Errno::READ_ONLY)
    }

    fn open(&mut self, node: Node, _: u32) -> Result<Opened, Errno> {
        match node {
            FIRST..=FAILED => Ok(Opened {
                handle: node,
                stream: true,
            }),
            _ => Err(Errno::IS_A_FOLDER),
        }
    }

    fn read(&mut self, _: Node, _: Handle, _: u64, _: &mut [u8]) -> Result<usize, Errno> {
        Ok(0)
    }

    fn write(&mut self, _: &Caller, node: Node, _: Handle, _: u64, bytes: &[u8]) -> Result<(), Errno> {
        match node {
            FIRST | STDERR => {
                let out = &mut self.out[(node - FIRST) as usize];
                let written = out.write_all(bytes).and_then(|()| out.flush());
                written.map_err(|e| match e.kind() {
                    std::io::ErrorKind::BrokenPipe => Errno::BROKEN_PIPE,
                    _ => super::io_errno(&e),
                })
            }
            STATUS => {
                self.report.said().status = Some(digits(bytes)? as u8);
                Ok(())
            }
            WANT => {
                let bytes: [u8; 4] = bytes.try_into().map_err(|_| Errno::INVALID)?;
                let more = u64::from(u32::from_le_bytes(bytes)).min(1 << 16);
                self.report.credit.fetch_add(more, Ordering::Relaxed);
                Ok(())
            }
            FAILED => {
                self.report.said().error = Some(digits(bytes)?);
                Ok(())
            }
            _ => Err(Errno::BAD_HANDLE),
        }
    }

    fn allocate(&mut self, _: &Caller, _: Node, _: Handle, _: u32, _: (u64, u64)) -> Result<(), Errno> {
        Err(Errno::NOT_SUPPORTED)
    }

    fn sync(&mut self, _: Node, _: Handle) -> Result<(), Errno> {
        Ok(())
    }

    fn close(&mut self, _: Handle) {}

    fn open_folder(&mut self, node: Node) -> Result<Handle, Errno> {
        match node {
            ROOT => Ok(0),
            _ => Err(Errno::NOT_A_FOLDER),
        }
    }

    fn list(&mut self, _: Node, _: Handle, offset: u64, take: &mut dyn FnMut(Entry<'_>) -> bool) -> Result<(), Errno> {
        let names = (FIRST..).zip(NAMES).skip(usize::try_from(offset).unwrap_or(usize::MAX));
        for (ino, name) in names {
            let next = ino - ROOT;
            if !take(Entry {
                name,
                ino,
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
        Ok(Space {
            block: 4096,
            ..Space::default()
        })
    }

    fn fingerprint(&self) -> u64 {
        0
    }
}
