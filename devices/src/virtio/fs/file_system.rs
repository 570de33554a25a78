//! What a file system has to answer to be served: nodes with attributes, names in folders, bytes of files.

use std::fmt;

/// A file, folder or other thing by its number; the root is [`ROOT`].
pub type Node = u64;
/// The folder that the guest mounts.
pub const ROOT: Node = 1;
/// An open file or folder by its number.
pub type Handle = u64;

/// An error as Linux numbers it (`include/uapi/asm-generic/errno.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// The errors that this side of the device says itself.
impl Errno {
    /// EPERM
    pub const NOT_PERMITTED: Errno = Errno(1);
    /// ENOENT
    pub const NO_ENTRY: Errno = Errno(2);
    /// EIO
    pub const IO: Errno = Errno(5);
    /// EBADF
    pub const BAD_HANDLE: Errno = Errno(9);
    /// ENOMEM
    pub const NO_MEMORY: Errno = Errno(12);
    /// EACCES
    pub const ACCESS: Errno = Errno(13);
    /// EEXIST
    pub const EXISTS: Errno = Errno(17);
    /// ENOTDIR
    pub const NOT_A_FOLDER: Errno = Errno(20);
    /// EISDIR
    pub const IS_A_FOLDER: Errno = Errno(21);
    /// EINVAL
    pub const INVALID: Errno = Errno(22);
    /// ENFILE
    pub const TOO_MANY_OPEN: Errno = Errno(23);
    /// EFBIG
    pub const TOO_BIG: Errno = Errno(27);
    /// ENOSPC
    pub const NO_SPACE: Errno = Errno(28);
    /// EROFS
    pub const READ_ONLY: Errno = Errno(30);
    /// EMLINK
    pub const TOO_MANY_LINKS: Errno = Errno(31);
    /// EPIPE
    pub const BROKEN_PIPE: Errno = Errno(32);
    /// ENAMETOOLONG
    pub const NAME_TOO_LONG: Errno = Errno(36);
    /// ENOSYS
    pub const NOT_IMPLEMENTED: Errno = Errno(38);
    /// ENOTEMPTY
    pub const NOT_EMPTY: Errno = Errno(39);
    /// EOPNOTSUPP
    pub const NOT_SUPPORTED: Errno = Errno(95);
    /// ESTALE
    pub const STALE: Errno = Errno(116);
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "errno {}", self.0)
    }
}

impl std::error::Error for Errno {}

/// The type of a node in its mode (inode(7)).
pub mod kind {
    /// The bits that hold it.
    pub const MASK: u32 = 0o170_000;
    /// A socket.
    pub const SOCKET: u32 = 0o140_000;
    /// A symbolic link.
    pub const LINK: u32 = 0o120_000;
    /// A regular file.
    pub const FILE: u32 = 0o100_000;
    /// A folder.
    pub const FOLDER: u32 = 0o040_000;
    /// A FIFO.
    pub const FIFO: u32 = 0o010_000;
}

/// A time since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Time {
    /// Seconds, negative before 1970.
    pub seconds: i64,
    /// Nanoseconds within the second.
    pub nanoseconds: u32,
}

/// What a node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Attributes {
    /// The inode number that programs see.
    pub ino: u64,
    /// In bytes.
    pub size: u64,
    /// Units of 512 bytes that it takes.
    pub blocks: u64,
    /// When it was changed last.
    pub modified: Time,
    /// When it or its attributes were changed last.
    pub changed: Time,
    /// Its type and who may do what with it.
    pub mode: u32,
    /// Names that it has.
    pub links: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// What a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The node, which the guest knows from now on until it forgets it.
    pub node: Node,
    /// What it is.
    pub attributes: Attributes,
}

/// Who asks, and when.
#[derive(Clone, Copy, Debug, Default)]
pub struct Caller {
    /// The user, as the guest numbers them.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Nanoseconds of virtual time.
    pub now: u64,
}

/// A time that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// To this.
    At(Time),
    /// To the time at which the request is served.
    Now,
}

/// What is to change of a node's attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The bits 0 to 11 of the mode.
    pub mode: Option<u32>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// The length in bytes.
    pub size: Option<u64>,
    /// When it was read last, which no file system here keeps, but which can be set on a file of the host.
    pub accessed: Option<SetTime>,
    /// When it was changed last.
    pub modified: Option<SetTime>,
}

/// What is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum New<'a> {
    /// A regular file, FIFO or socket, with its type and mode.
    File(u32),
    /// A folder with its mode.
    Folder(u32),
    /// A symbolic link that leads there.
    Link(&'a [u8]),
}

/// What an open file is like for the guest's kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// Its number.
    pub handle: Handle,
    /// A stream: neither cached nor with a position, as a pipe is.
    pub stream: bool,
}

/// A name in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The name.
    pub name: &'a [u8],
    /// The inode number that programs see.
    pub ino: u64,
    /// The type, or 0 where nobody has looked.
    pub kind: u32,
    /// Where the listing goes on behind this name.
    pub next: u64,
}

/// How full a file system is (statvfs(3)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes of a block.
    pub block: u32,
    /// Blocks.
    pub blocks: u64,
    /// Blocks that are free.
    pub free: u64,
    /// Blocks that are free for everyone.
    pub available: u64,
    /// Inodes.
    pub files: u64,
    /// Inodes that are free.
    pub files_free: u64,
}

/// A file system that a guest mounts. Names are single ones, never empty, `.` or `..`, without `/` and NUL, and no longer than 255 bytes.
pub trait FileSystem: fmt::Debug + Send {
    /// For how many seconds the guest may believe what it was told of names and attributes.
    fn valid(&self) -> u64;

    /// Whether the guest may keep what it writes in its memory until a file is closed or synced. Then the guest does not notice that the host
    /// makes a file longer or shorter as long as it knows it.
    fn write_back(&self) -> bool {
        false
    }

    /// The driver has begun anew: it knows the root alone.
    fn reset(&mut self);

    /// What a name leads to. The guest knows the node once more, and says so when it does not any longer.
    ///
    /// # Errors
    /// As of `lstat`.
    fn lookup(&mut self, folder: Node, name: &[u8]) -> Result<Found, Errno>;

    /// The guest does not know the node any longer as often as it has been told of it.
    fn forget(&mut self, node: Node, times: u64);

    /// What a node is.
    ///
    /// # Errors
    /// As of `fstat`.
    fn attributes(&mut self, node: Node, handle: Option<Handle>) -> Result<Attributes, Errno>;

    /// Changes what a node is.
    ///
    /// # Errors
    /// As of `chmod`, `chown`, `truncate`, `utimensat`: what comes before the one that fails may have been done.
    fn change(
        &mut self,
        caller: &Caller,
        node: Node,
        handle: Option<Handle>,
        changes: &Changes,
    ) -> Result<Attributes, Errno>;

    /// Where a symbolic link leads.
    ///
    /// # Errors
    /// As of `readlink`.
    fn target(&mut self, node: Node) -> Result<Vec<u8>, Errno>;

    /// Makes something that is not there yet; the guest knows it.
    ///
    /// # Errors
    /// As of `mknod`, `mkdir`, `symlink`.
    fn make(&mut self, caller: &Caller, folder: Node, name: &[u8], new: New<'_>) -> Result<Found, Errno>;

    /// Makes a regular file that is not there yet and opens it for reading and writing; the guest knows it.
    ///
    /// # Errors
    /// As of `open`; ENOSYS: [`FileSystem::make`] does that.
    fn create(&mut self, caller: &Caller, folder: Node, name: &[u8], mode: u32) -> Result<(Found, Opened), Errno>;

    /// Takes a name away, of an empty folder or of anything else.
    ///
    /// # Errors
    /// As of `rmdir`, `unlink`.
    fn remove(&mut self, caller: &Caller, folder: Node, name: &[u8], is_folder: bool) -> Result<(), Errno>;

    /// Gives another name, with the flags of renameat2(2).
    ///
    /// # Errors
    /// As of `renameat2`.
    fn rename(&mut self, caller: &Caller, from: (Node, &[u8]), to: (Node, &[u8]), flags: u32) -> Result<(), Errno>;

    /// Gives one more name; the guest knows the node once more.
    ///
    /// # Errors
    /// As of `link`.
    fn link(&mut self, caller: &Caller, node: Node, folder: Node, name: &[u8]) -> Result<Found, Errno>;

    /// Opens a regular file, with the flags of open(2).
    ///
    /// # Errors
    /// As of `open`; ENOSYS: files need no opening, then their handle is 0.
    fn open(&mut self, node: Node, flags: u32) -> Result<Opened, Errno>;

    /// Fills `bytes` from `offset` on; less than all is the end.
    ///
    /// # Errors
    /// As of `pread`.
    fn read(&mut self, node: Node, handle: Handle, offset: u64, bytes: &mut [u8]) -> Result<usize, Errno>;

    /// Writes all of `bytes` from `offset` on.
    ///
    /// # Errors
    /// As of `pwrite`.
    fn write(&mut self, caller: &Caller, node: Node, handle: Handle, offset: u64, bytes: &[u8]) -> Result<(), Errno>;

    /// Reserves, frees or zeroes a range, by the mode of fallocate(2).
    ///
    /// # Errors
    /// As of `fallocate`.
    fn allocate(
        &mut self,
        caller: &Caller,
        node: Node,
        handle: Handle,
        mode: u32,
        range: (u64, u64),
    ) -> Result<(), Errno>;

    /// What was written outlives a power cut.
    ///
    /// # Errors
    /// As of `fsync`.
    fn sync(&mut self, node: Node, handle: Handle) -> Result<(), Errno>;

    /// An open file is closed for good.
    fn close(&mut self, handle: Handle);

    /// Opens a folder.
    ///
    /// # Errors
    /// As of `opendir`; ENOSYS: folders need no opening, then their handle is 0.
    fn open_folder(&mut self, node: Node) -> Result<Handle, Errno>;

    /// Hands on the names of a folder from `offset` on, 0 for the first one, until `take` says no more or none is left.
    ///
    /// # Errors
    /// As of `getdents`.
    fn list(
        &mut self,
        node: Node,
        handle: Handle,
        offset: u64,
        take: &mut dyn FnMut(Entry<'_>) -> bool,
    ) -> Result<(), Errno>;

    /// An open folder is closed.
    fn close_folder(&mut self, handle: Handle);

    /// How full it is.
    ///
    /// # Errors
    /// As of `statfs`.
    fn space(&mut self) -> Result<Space, Errno>;

    /// A hash of what is not on the host: equal for equal runs.
    fn fingerprint(&self) -> u64;
}
