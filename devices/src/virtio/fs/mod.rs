//! The file system device (5.11 "File System Device"): FUSE requests from the guest's kernel, answered in the process.
//!
//! # Theory
//! The guest's kernel is the client of a file server that it cannot tell from one behind `/dev/fuse`: each request is a header, a
//! structure and names or data, each answer likewise (Linux `include/uapi/linux/fuse.h`).
//!
//! # Practice
//! Here are the protocol and its bounds: names are single names, lengths are those of the buffers, numbers are looked up. What the
//! nodes are is the business of a [`FileSystem`]. A request is answered while the guest's notification is carried out, as a disk's is.
//!
//! # Left out
//! The shared-memory window (DAX), notifications from the device, extended attributes, locks (which the guest's kernel keeps itself),
//! device nodes.

pub mod abi;
pub mod file_system;

use virtio_bindings::virtio_ids::VIRTIO_ID_FS;

use self::{
    abi::{Answer, Fields, Header, IN_HEADER, OUT_HEADER, opcode},
    file_system::{Caller, Changes, Errno, FileSystem, Found, New, Opened, SetTime, Time},
};
use super::{Device, DeviceState, Nonsense, Request};

/// The longest tag (5.11.4 "Device configuration layout").
pub const TAG_MAX: usize = 36;
/// Entries of a queue: a request of [`DATA_MAX`] bytes takes a descriptor a page and four more.
const QUEUE: u16 = 512;
/// The queue for FORGET and INTERRUPT, and one for everything else.
const QUEUES: &[u16] = &[QUEUE, QUEUE];
/// The most bytes that a request reads or writes.
pub const DATA_MAX: u32 = 1 << 20;
/// The longest request beside a write's data: two names or a link's target, and a structure; and FORGETs in one request.
const REQUEST_MAX: u64 = 64 << 10;
/// Data is moved in pieces of this size.
const PIECE: u64 = 256 << 10;
/// What a call of the host's system costs, as bytes moved.
const CALL_WORK: u64 = 4 << 10;
/// What a flush costs likewise.
const FLUSH_WORK: u64 = 1 << 20;

const AGREED: u32 = abi::init::ASYNC_READ
    | abi::init::BIG_WRITES
    | abi::init::AUTO_INVAL_DATA
    | abi::init::DO_READDIRPLUS
    | abi::init::READDIRPLUS_AUTO
    | abi::init::ASYNC_DIO
    | abi::init::NO_OPEN_SUPPORT
    | abi::init::PARALLEL_DIROPS
    | abi::init::MAX_PAGES
    | abi::init::CACHE_SYMLINKS
    | abi::init::NO_OPENDIR_SUPPORT;

/// The device.
#[derive(Debug)]
pub struct Fs {
    tag: [u8; TAG_MAX],
    files: Box<dyn FileSystem>,
    /// INIT has been answered.
    begun: bool,
}

impl Fs {
    /// A device that the guest mounts by a tag of at most [`TAG_MAX`] bytes; the rest of a longer one is left out.
    pub fn new(tag: &str, files: Box<dyn FileSystem>) -> Self {
        let mut padded = [0; TAG_MAX];
        for (to, from) in padded.iter_mut().zip(tag.bytes()) {
            *to = from;
        }
        Fs {
            tag: padded,
            files,
            begun: false,
        }
    }

    /// Answers a request with at most `room` bytes; `None`: it has no answer.
    fn answer(&mut self, header: &Header, request: &mut Request, room: u64) -> Result<Option<Answer>, Failure> {
        let caller = Caller {
            uid: header.uid,
            gid: header.gid,
            now: request.now(),
        };
        let node = header.node;
        let len = request.readable() - IN_HEADER as u64;
        if header.opcode == opcode::WRITE {
            return self.write(&caller, node, request).map(Some);
        }
        if len > REQUEST_MAX {
            return Err(Errno::INVALID.into());
        }
        let mut bytes = vec![0; len as usize];
        request.read(IN_HEADER as u64, &mut bytes)?;
        let mut fields = Fields::new(&bytes);
        let mut answer = Answer::default();
        if header.opcode == opcode::INIT {
            self.init(&mut fields, &mut answer)?;
            return Ok(Some(answer));
        }
        request.add_work(CALL_WORK);
        let files = self.files.as_mut();
        let valid = files.valid();
        match header.opcode {
            opcode::FORGET => {
                files.forget(node, fields.u64()?);
                return Ok(None);
            }
            opcode::BATCH_FORGET => {
                let count = fields.u32()?;
                fields.u32()?;
                for _ in 0..count {
                    // A count that is too high ends where the request does.
                    let (node, times) = (fields.u64()?, fields.u64()?);
                    files.forget(node, times);
                }
                return Ok(None);
            }
            opcode::INTERRUPT => return Ok(None),
            _ if !self.begun => return Err(Errno::IO.into()),
            opcode::DESTROY => files.reset(),
            opcode::LOOKUP => {
                let found = files.lookup(node, fields.name()?)?;
                answer.entry(found.node, &found.attributes, valid);
            }
            opcode::GETATTR => {
                let flags = fields.u32()?;
                fields.u32()?;
                let handle = fields.u64()?;
                let handle = (flags & abi::GETATTR_FH != 0).then_some(handle);
                answer.attributes_out(&files.attributes(node, handle)?, valid);
            }
            opcode::SETATTR => {
                let (handle, changes) = changes(&mut fields)?;
                answer.attributes_out(&files.change(&caller, node, handle, &changes)?, valid);
            }
            opcode::READLINK => answer.0 = files.target(node)?,
            opcode::SYMLINK => {
                let name = fields.name()?;
                let target = fields.string()?;
                let found = files.make(&caller, node, name, New::Link(target))?;
                answer.entry(found.node, &found.attributes, valid);
            }
            opcode::MKNOD => {
                let mode = fields.u32()?;
                // Device number, umask, padding.
                fields.u32()?;
                fields.u64()?;
                let found = files.make(&caller, node, fields.name()?, New::File(mode))?;
                answer.entry(found.node, &found.attributes, valid);
            }
            opcode::MKDIR => {
                let mode = fields.u32()?;
                fields.u32()?;
                let found = files.make(&caller, node, fields.name()?, New::Folder(mode))?;
                answer.entry(found.node, &found.attributes, valid);
            }
            opcode::UNLINK | opcode::RMDIR => {
                files.remove(&caller, node, fields.name()?, header.opcode == opcode::RMDIR)?;
            }
            opcode::RENAME | opcode::RENAME2 => {
                let to = fields.u64()?;
                let flags = match header.opcode {
                    opcode::RENAME2 => {
                        let flags = fields.u32()?;
                        fields.u32()?;
                        flags
                    }
                    _ => 0,
                };
                let (old, new) = (fields.name()?, fields.name()?);
                files.rename(&caller, (node, old), (to, new), flags)?;
            }
            opcode::LINK => {
                let linked = fields.u64()?;
                let found = files.link(&caller, linked, node, fields.name()?)?;
                answer.entry(found.node, &found.attributes, valid);
            }
            opcode::OPEN => {
                let flags = fields.u32()?;
                let opened = files.open(node, flags)?;
                answer.opened(opened.handle, open_flags(opened));
            }
            opcode::CREATE => {
                // Flags, mode, umask, flags of the open.
                fields.u32()?;
                let mode = fields.u32()?;
                fields.u64()?;
                let (Found { node, attributes }, opened) = files.create(&caller, node, fields.name()?, mode)?;
                answer.entry(node, &attributes, valid);
                answer.opened(opened.handle, open_flags(opened));
            }
            opcode::READ => {
                let (handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
                let size = u64::from(size.min(DATA_MAX)).min(room);
                answer.0 = vec![0; size as usize];
                let filled = files.read(node, handle, offset, &mut answer.0)?;
                answer.0.truncate(filled);
            }
            opcode::STATFS => answer.space(&files.space()?),
            opcode::RELEASE => files.close(fields.u64()?),
            opcode::FSYNC => {
                request.add_work(FLUSH_WORK);
                files.sync(node, fields.u64()?)?;
            }
            opcode::FSYNCDIR => {}
            opcode::OPENDIR => {
                // Flags, of which none mean anything for folders, and padding.
                fields.u64()?;
                let handle = files.open_folder(node)?;
                answer.opened(handle, 0);
            }
            opcode::READDIR | opcode::READDIRPLUS => {
                let (handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
                let size = u64::from(size.min(DATA_MAX)).min(room) as usize;
                let plus = header.opcode == opcode::READDIRPLUS;
                let calls = list(files, node, handle, offset, size, plus, &mut answer)?;
                request.add_work(CALL_WORK.saturating_mul(calls));
            }
            opcode::RELEASEDIR => files.close_folder(fields.u64()?),
            opcode::FALLOCATE => {
                let (handle, offset, len, mode) = (fields.u64()?, fields.u64()?, fields.u64()?, fields.u32()?);
                request.add_work(len.min(FLUSH_WORK));
                files.allocate(&caller, node, handle, mode, (offset, len))?;
            }
            // Among them extended attributes, locks, polls and copies within the server: the guest's kernel does without.
            _ => return Err(Errno::NOT_IMPLEMENTED.into()),
        }
        Ok(Some(answer))
    }

    fn init(&mut self, fields: &mut Fields<'_>, answer: &mut Answer) -> Result<(), Errno> {
        let (major, _, readahead, flags) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
        if major < abi::MAJOR {
            // EPROTO: no driver of virtio-fs is so old.
            return Err(Errno(71));
        }
        self.begun = true;
        self.files.reset();
        answer.u32(abi::MAJOR);
        answer.u32(abi::MINOR);
        answer.u32(readahead);
        let write_back = match self.files.write_back() {
            true => abi::init::WRITEBACK_CACHE,
            false => 0,
        };
        answer.u32(flags & (AGREED | write_back));
        // Requests in the background, and how many of them are many.
        answer.u16(64);
        answer.u16(48);
        answer.u32(DATA_MAX);
        // Times are in nanoseconds.
        answer.u32(1);
        answer.u16((DATA_MAX / 4096) as u16);
        answer.0.resize(64, 0);
        Ok(())
    }

    fn write(&mut self, caller: &Caller, node: u64, request: &mut Request) -> Result<Answer, Failure> {
        const FIXED: u64 = 40;
        if !self.begun {
            return Err(Errno::IO.into());
        }
        if request.readable() < IN_HEADER as u64 + FIXED {
            return Err(Errno::INVALID.into());
        }
        let mut bytes = [0; FIXED as usize];
        request.read(IN_HEADER as u64, &mut bytes)?;
        let mut fields = Fields::new(&bytes);
        let (handle, offset, size) = (fields.u64()?, fields.u64()?, fields.u32()?);
        let first = IN_HEADER as u64 + FIXED;
        if size > DATA_MAX || u64::from(size) > request.readable() - first {
            return Err(Errno::INVALID.into());
        }
        request.add_work(CALL_WORK);
        let mut buffer = vec![0; u64::from(size).min(PIECE) as usize];
        let mut done = 0;
        while done < u64::from(size) {
            let piece = &mut buffer[..(u64::from(size) - done).min(PIECE) as usize];
            request.read(first + done, piece)?;
            let at = offset.checked_add(done).ok_or(Errno::TOO_BIG)?;
            match self.files.write(caller, node, handle, at, piece) {
                Ok(()) => done += piece.len() as u64,
                // What is written is written.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error.into()),
            }
        }
        let mut answer = Answer::default();
        answer.u32(done as u32);
        answer.u32(0);
        Ok(answer)
    }
}

/// Why a request is not answered as it wishes.
enum Failure {
    /// The guest's program hears of it.
    Errno(Errno),
    /// The driver has broken the rules.
    Nonsense(Nonsense),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Failure::Errno(errno)
    }
}

impl From<Nonsense> for Failure {
    fn from(nonsense: Nonsense) -> Self {
        Failure::Nonsense(nonsense)
    }
}

fn open_flags(opened: Opened) -> u32 {
    match opened.stream {
        true => abi::OPEN_DIRECT | abi::OPEN_STREAM,
        // AUTO_INVAL_DATA drops what has changed.
        false => abi::OPEN_KEEP_CACHE,
    }
}

/// `struct fuse_setattr_in`.
fn changes(fields: &mut Fields<'_>) -> Result<(Option<u64>, Changes), Errno> {
    use abi::valid;
    let bits = fields.u32()?;
    fields.u32()?;
    let has = |bit| bits & bit != 0;
    let (handle, size) = (fields.u64()?, fields.u64()?);
    fields.u64()?;
    let (accessed, modified) = (fields.u64()?, fields.u64()?);
    fields.u64()?;
    let (accessed_ns, modified_ns) = (fields.u32()?, fields.u32()?);
    fields.u32()?;
    let mode = fields.u32()?;
    fields.u32()?;
    let (uid, gid) = (fields.u32()?, fields.u32()?);
    let time = |seconds: u64, nanoseconds: u32, now, at| match (has(now), has(at)) {
        (true, _) => Some(SetTime::Now),
        (false, true) => Some(SetTime::At(Time {
            seconds: seconds as i64,
            nanoseconds: nanoseconds.min(999_999_999),
        })),
        (false, false) => None,
    };
    let changes = Changes {
        mode: has(valid::MODE).then_some(mode & 0o7777),
        uid: has(valid::UID).then_some(uid),
        gid: has(valid::GID).then_some(gid),
        size: has(valid::SIZE).then_some(size),
        accessed: time(accessed, accessed_ns, valid::ATIME_NOW, valid::ATIME),
        modified: time(modified, modified_ns, valid::MTIME_NOW, valid::MTIME),
    };
    Ok((has(valid::FH).then_some(handle), changes))
}

/// Lists names, with what they lead to if `plus` says so; the answer is how many names were looked at.
fn list(
    files: &mut dyn FileSystem,
    node: u64,
    handle: u64,
    offset: u64,
    size: usize,
    plus: bool,
    answer: &mut Answer,
) -> Result<u64, Errno> {
    const ENTRY: usize = 128;
    const NAME: usize = 24;
    let valid = files.valid();
    let mut names: Vec<(Vec<u8>, u64, u32, u64)> = Vec::new();
    let mut len = 0;
    files.list(node, handle, offset, &mut |entry| {
        let next = len + NAME + entry.name.len().next_multiple_of(8) + if plus { ENTRY } else { 0 };
        let fits = next <= size;
        if fits {
            len = next;
            names.push((entry.name.to_vec(), entry.ino, entry.kind, entry.next));
        }
        fits
    })?;
    for (name, ino, kind, next) in &names {
        if plus {
            // `.` and `..` are not looked up (fuse_readdirplus in Linux's fs/fuse/readdir.c), and what is gone by now has no node.
            let found = match name.as_slice() {
                b"." | b".." => None,
                name => files.lookup(node, name).ok(),
            };
            match found {
                Some(Found { node, attributes }) => answer.entry(node, &attributes, valid),
                None => answer.0.resize(answer.0.len() + ENTRY, 0),
            }
        }
        answer.name(*ino, *next, *kind, name);
    }
    Ok(names.len() as u64)
}

impl Device for Fs {
    fn id(&self) -> u32 {
        VIRTIO_ID_FS
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&self) -> &[u16] {
        QUEUES
    }

    /// The tag, and how many queues there are beside the first.
    fn config(&self) -> Vec<u8> {
        let mut config = self.tag.to_vec();
        config.extend(1u32.to_le_bytes());
        config
    }

    fn negotiated(&mut self, _: u64) {}

    fn reset(&mut self) {
        self.begun = false;
        self.files.reset();
    }

    fn request(&mut self, _: usize, request: &mut Request) -> Result<u32, Nonsense> {
        let mut header = [0; IN_HEADER];
        request.read(0, &mut header)?;
        let header = Header::parse(&header);
        let room = request.writable().saturating_sub(OUT_HEADER as u64);
        let (error, answer) = match self.answer(&header, request, room) {
            Ok(Some(answer)) => (0, answer.0),
            Ok(None) => return Ok(0),
            Err(Failure::Errno(Errno(errno))) => (-errno, Vec::new()),
            Err(Failure::Nonsense(nonsense)) => return Err(nonsense),
        };
        if request.writable() == 0 {
            // Nobody waits for it.
            return Ok(0);
        }
        if answer.len() as u64 > room {
            return Err(Nonsense("a file system request with too little room for its answer"));
        }
        let len = (OUT_HEADER + answer.len()) as u32;
        let mut out = Answer::default();
        out.u32(len);
        out.u32(error as u32);
        out.u64(header.unique);
        request.write(0, &out.0)?;
        request.write(OUT_HEADER as u64, &answer)?;
        Ok(len)
    }

    fn state(&self) -> DeviceState {
        DeviceState::Fs {
            begun: self.begun,
            files: self.files.fingerprint(),
        }
    }

    fn set_state(&mut self, state: &DeviceState) {
        // The files themselves are put back by whoever keeps them.
        if let DeviceState::Fs { begun, .. } = *state {
            self.begun = begun;
        }
    }
}

#[cfg(test)]
#[path = "fs_test.rs"]
mod tests;
