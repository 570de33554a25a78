//! `--share`: folders of the host that a guest mounts.
//!
//! # Theory
//! The guest's kernel asks for names within folders and for bytes within files. Nothing that it says is a path, so that nothing leads
//! out of the folder: each name is looked up in a folder that is open, by openat2(2) with RESOLVE_BENEATH, and no link is followed
//! here; the guest's kernel follows them by its own names.
//!
//! # Practice
//! [`host`] serves the files as they are on the host, [`overlay`] as they were when the guest looked at them first ([`lower`]), with what the guest writes
//! above them: that is what a run needs that is recorded or goes back.

pub mod channel;
pub mod host;
pub mod lower;
pub mod overlay;

use std::{io, os::fd::OwnedFd, path::Path};

use devices::virtio::fs::file_system::{Attributes, Errno, Time, kind};
use rustix::fs::{Mode, OFlags, ResolveFlags, Statx, StatxFlags};

/// What a guest may do with a shared folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShareMode {
    /// Read and write, and everyone sees at once what is written.
    ReadWrite,
    /// Read and write, and what is written waits in the guest's memory until the file is closed or synced.
    WriteBack,
    /// Read.
    ReadOnly,
    /// Read and write, and what is written is kept in memory for as long as the machine runs.
    Overlay,
}

/// Nothing leads out of a folder, through a link, or through a link of /proc that is none.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);

/// Opens a folder that is to be shared.
///
/// # Errors
/// It is none, or cannot be opened.
pub fn open_root(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno(error.raw_os_error())
}

fn io_errno(error: &io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(Errno::IO.0))
}

/// Opens what is below a folder.
fn open_beneath(folder: &OwnedFd, name: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::NONBLOCK;
    // O_PATH takes few flags along.
    let flags = match flags.contains(OFlags::PATH) {
        true => flags & (OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::DIRECTORY),
        false => flags,
    };
    loop {
        match rustix::fs::openat2(folder, name, flags, mode, BENEATH) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            result => return result.map_err(errno),
        }
    }
}

/// The types of file that the guest sees: device nodes are none of them.
fn is_shown(mode: u32) -> bool {
    matches!(
        mode & kind::MASK,
        kind::FILE | kind::FOLDER | kind::LINK | kind::FIFO | kind::SOCKET
    )
}

/// A file's identity on the host.
type Identity = (u64, u64);

fn identity(found: &Statx) -> Identity {
    let device = u64::from(found.stx_dev_major) << 32 | u64::from(found.stx_dev_minor);
    (device, found.stx_ino)
}

fn time(at: &rustix::fs::StatxTimestamp) -> Time {
    Time {
        seconds: at.tv_sec,
        nanoseconds: at.tv_nsec,
    }
}

/// What the guest is told of a file, whose folder is shared from the device `root`. Inode numbers are the host's; those of other file
/// systems below are moved aside, as the guest sees one.
fn attributes(found: &Statx, root: u64) -> Attributes {
    let (device, ino) = identity(found);
    let aside = (device ^ root).wrapping_mul(0x9e37_79b9_7f4a_7c15) & !0xffff_ffff;
    Attributes {
        ino: ino.wrapping_add(aside),
        size: found.stx_size,
        blocks: found.stx_blocks,
        modified: time(&found.stx_mtime),
        changed: time(&found.stx_ctime),
        mode: found.stx_mode.into(),
        links: found.stx_nlink,
        uid: found.stx_uid,
        gid: found.stx_gid,
    }
}

/// What a name in an open folder is; an empty name: the folder itself.
fn look(folder: &OwnedFd, name: &[u8]) -> Result<Statx, Errno> {
    use rustix::fs::AtFlags;
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT;
    rustix::fs::statx(folder, name, flags, StatxFlags::BASIC_STATS).map_err(errno)
}

/// Whether an open folder is on a file system whose files are not stored but made by the kernel, for this process among others: the
/// guest has its own, and is shown an empty folder.
fn is_kernels(folder: &OwnedFd) -> bool {
    // Linux include/uapi/linux/magic.h: proc, sysfs, cgroup and cgroup2, debugfs, tracefs, securityfs, selinuxfs, bpf, pstore,
    // efivarfs, binfmt_misc, configfs, devpts, mqueue, nsfs, fusectl.
    const MAGIC: [u32; 17] = [
        0x9fa0,
        0x6265_6572,
        0x0027_e0eb,
        0x6367_7270,
        0x6462_6720,
        0x7472_6163,
        0x7363_6673,
        0xf97c_ff8c,
        0xcafe_4a11,
        0x6165_676c,
        0xde5e_81e4,
        0x4249_4e4d,
        0x6265_6570,
        0x1cd1,
        0x1980_0202,
        0x6e73_6673,
        0x6573_5543,
    ];
    rustix::fs::fstatfs(folder).is_ok_and(|found| MAGIC.contains(&(found.f_type as u32)))
}

/// A name in a listing of a folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Listed {
    /// The name.
    pub name: Box<[u8]>,
    /// The inode number.
    pub ino: u64,
    /// The type, or 0.
    pub kind: u32,
}

/// The most bytes that the names of one folder may take: of about ten million files.
const NAMES_MAX: usize = 1 << 30;

/// The names in a folder that is open for reading, without `.` and `..`, in the order of their bytes.
fn read_names(folder: OwnedFd) -> Result<Vec<Listed>, Errno> {
    use rustix::fs::FileType;
    let mut names = Vec::new();
    let mut bytes = 0usize;
    for entry in rustix::fs::Dir::new(folder).map_err(errno)? {
        let entry = entry.map_err(errno)?;
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::CharacterDevice | FileType::BlockDevice => continue,
            FileType::RegularFile => kind::FILE,
            FileType::Directory => kind::FOLDER,
            FileType::Symlink => kind::LINK,
            FileType::Fifo => kind::FIFO,
            FileType::Socket => kind::SOCKET,
            _ => 0,
        };
        bytes = bytes.saturating_add(name.len() + size_of::<Listed>());
        if bytes > NAMES_MAX {
            return Err(Errno::NO_MEMORY);
        }
        names.push(Listed {
            name: name.into(),
            ino: entry.ino(),
            kind,
        });
    }
    names.sort();
    Ok(names)
}

/// How many files this process may have open for its shares: all that the system allows it but for a few that it needs otherwise.
fn raise_open_files() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    const OTHERS: u64 = 256;
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limit.maximum.or(Some(1 << 20)),
        maximum: limit.maximum,
    };
    // Where that is refused, it stays as it was.
    let _ = setrlimit(Resource::Nofile, wanted);
    let now = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
    usize::try_from(now.saturating_sub(OTHERS).max(64))
        .unwrap_or(1 << 16)
        .min(1 << 16)
}
