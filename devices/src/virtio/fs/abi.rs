//! The messages of FUSE as bytes, little-endian and laid out as in Linux `include/uapi/linux/fuse.h`.

use super::file_system::{Attributes, Errno, Space, Time};

/// The protocol's version that is spoken.
pub const MAJOR: u32 = 7;
/// Its minor version; the driver takes the lower one of both.
pub const MINOR: u32 = 38;
/// Bytes of a request's header.
pub const IN_HEADER: usize = 40;
/// Bytes of an answer's header.
pub const OUT_HEADER: usize = 16;

/// Requests, by their opcodes.
pub mod opcode {
    #![allow(
        missing_docs,
        reason = "the names are those of fuse.h, whose documentation they have"
    )]
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
}

/// FUSE_INIT's flags that are agreed to where the driver offers them.
pub mod init {
    /// Several reads of a file may be under way.
    pub const ASYNC_READ: u32 = 1 << 0;
    /// Writes may be longer than a page.
    pub const BIG_WRITES: u32 = 1 << 5;
    /// Cached pages of a file are dropped when it has changed.
    pub const AUTO_INVAL_DATA: u32 = 1 << 12;
    /// Names are listed with attributes.
    pub const DO_READDIRPLUS: u32 = 1 << 13;
    /// ... where the driver thinks that they will be asked for.
    pub const READDIRPLUS_AUTO: u32 = 1 << 14;
    /// Direct reads and writes may be under way together.
    pub const ASYNC_DIO: u32 = 1 << 15;
    /// What is written waits in the driver's memory.
    pub const WRITEBACK_CACHE: u32 = 1 << 16;
    /// OPEN may be answered with ENOSYS: files need no opening then.
    pub const NO_OPEN_SUPPORT: u32 = 1 << 17;
    /// Lookups in one folder may be under way together.
    pub const PARALLEL_DIROPS: u32 = 1 << 18;
    /// The longest request is told in pages.
    pub const MAX_PAGES: u32 = 1 << 22;
    /// Targets of symbolic links are kept.
    pub const CACHE_SYMLINKS: u32 = 1 << 23;
    /// OPENDIR may be answered with ENOSYS: folders need no opening then.
    pub const NO_OPENDIR_SUPPORT: u32 = 1 << 24;
}

/// FUSE_SETATTR's bits: what is to change.
pub mod valid {
    /// The mode.
    pub const MODE: u32 = 1 << 0;
    /// The owner.
    pub const UID: u32 = 1 << 1;
    /// The group.
    pub const GID: u32 = 1 << 2;
    /// The length.
    pub const SIZE: u32 = 1 << 3;
    /// The time of the last access.
    pub const ATIME: u32 = 1 << 4;
    /// The time of the last change.
    pub const MTIME: u32 = 1 << 5;
    /// A handle is given.
    pub const FH: u32 = 1 << 6;
    /// The time of the last access is the server's.
    pub const ATIME_NOW: u32 = 1 << 7;
    /// The time of the last change is the server's.
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// FUSE_GETATTR's flag: a handle is given.
pub const GETATTR_FH: u32 = 1;
/// FOPEN_DIRECT_IO: nothing is cached.
pub const OPEN_DIRECT: u32 = 1 << 0;
/// FOPEN_KEEP_CACHE: what is cached stays as the file is opened.
pub const OPEN_KEEP_CACHE: u32 = 1 << 1;
/// FOPEN_NONSEEKABLE | FOPEN_STREAM: no position.
pub const OPEN_STREAM: u32 = 1 << 2 | 1 << 4;

/// A request's header.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// Which request.
    pub opcode: u32,
    /// The number that its answer carries.
    pub unique: u64,
    /// The node that it is about.
    pub node: u64,
    /// Who asks.
    pub uid: u32,
    /// Their group.
    pub gid: u32,
}

impl Header {
    /// Reads it.
    pub fn parse(bytes: &[u8; IN_HEADER]) -> Self {
        let mut fields = Fields::new(bytes);
        // Its length, which the descriptors say, too.
        let _ = fields.u32();
        Header {
            opcode: fields.u32().unwrap_or(0),
            unique: fields.u64().unwrap_or(0),
            node: fields.u64().unwrap_or(0),
            uid: fields.u32().unwrap_or(0),
            gid: fields.u32().unwrap_or(0),
        }
    }
}

/// The fields of a message, from the first one on.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// Of these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Fields(bytes)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (first, rest) = self.0.split_first_chunk().ok_or(Errno::INVALID)?;
        self.0 = rest;
        Ok(*first)
    }

    /// The next 4 bytes.
    pub fn u32(&mut self) -> Result<u32, Errno> {
        self.take().map(u32::from_le_bytes)
    }

    /// The next 8 bytes.
    pub fn u64(&mut self) -> Result<u64, Errno> {
        self.take().map(u64::from_le_bytes)
    }

    /// Bytes up to the next NUL, which is left out.
    pub fn string(&mut self) -> Result<&'a [u8], Errno> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or(Errno::INVALID)?;
        let (string, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        Ok(string)
    }

    /// A name in a folder.
    pub fn name(&mut self) -> Result<&'a [u8], Errno> {
        let name = self.string()?;
        match name {
            _ if name.len() > 255 => Err(Errno::NAME_TOO_LONG),
            b"" | b"." | b".." => Err(Errno::INVALID),
            _ if name.contains(&b'/') => Err(Errno::INVALID),
            _ => Ok(name),
        }
    }
}

/// An answer that is put together.
#[derive(Debug, Default)]
pub struct Answer(pub Vec<u8>);

impl Answer {
    /// Adds 2 bytes.
    pub fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    /// Adds 4 bytes.
    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    /// Adds 8 bytes.
    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// `struct fuse_attr`.
    pub fn attributes(&mut self, a: &Attributes) {
        let Time { seconds, nanoseconds } = a.modified;
        self.u64(a.ino);
        self.u64(a.size);
        self.u64(a.blocks);
        // When a file was read last is not kept: that would differ from run to run. It is said to be when it was changed.
        self.u64(seconds as u64);
        self.u64(seconds as u64);
        self.u64(a.changed.seconds as u64);
        self.u32(nanoseconds);
        self.u32(nanoseconds);
        self.u32(a.changed.nanoseconds);
        self.u32(a.mode);
        self.u32(a.links);
        self.u32(a.uid);
        self.u32(a.gid);
        // No device numbers, the size of blocks, no flags.
        self.u32(0);
        self.u32(4096);
        self.u32(0);
    }

    /// `struct fuse_entry_out`.
    pub fn entry(&mut self, node: u64, attributes: &Attributes, valid: u64) {
        self.u64(node);
        // Node numbers are not used again, so that there is one generation of them.
        self.u64(0);
        self.u64(valid);
        self.u64(valid);
        self.u64(0);
        self.attributes(attributes);
    }

    /// `struct fuse_attr_out`.
    pub fn attributes_out(&mut self, attributes: &Attributes, valid: u64) {
        self.u64(valid);
        self.u64(0);
        self.attributes(attributes);
    }

    /// `struct fuse_open_out`.
    pub fn opened(&mut self, handle: u64, flags: u32) {
        self.u64(handle);
        self.u32(flags);
        self.u32(0);
    }

    /// `struct fuse_statfs_out`.
    pub fn space(&mut self, space: &Space) {
        for count in [space.blocks, space.free, space.available, space.files, space.files_free] {
            self.u64(count);
        }
        self.u32(space.block);
        self.u32(255);
        self.u32(space.block);
        self.0.resize(self.0.len() + 7 * 4, 0);
    }

    /// `struct fuse_dirent` with its name, padded.
    pub fn name(&mut self, ino: u64, next: u64, kind: u32, name: &[u8]) {
        self.u64(ino);
        self.u64(next);
        self.u32(name.len() as u32);
        // DT_ types are the mode's, shifted (readdir(3)).
        self.u32(kind >> 12);
        self.0.extend(name);
        self.0.resize(self.0.len().next_multiple_of(8), 0);
    }
}
