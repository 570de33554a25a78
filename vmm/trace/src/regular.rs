//! Opening files that are to be regular ones.
//!
//! A name can lead to a FIFO, which waits for whoever writes it, to a device, which never ends, or out of a directory that came from
//! somebody else. What a name leads to is asked before anything is read of it.

use std::{
    fs::{DirBuilder, File, FileType, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt},
    path::Path,
};

/// What a file is that is no regular one.
fn kind(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_dir() => "is a directory",
        kind if kind.is_fifo() => "is a FIFO, not a regular file",
        kind if kind.is_socket() => "is a socket, not a regular file",
        kind if kind.is_symlink() => "is a symbolic link, not a regular file",
        _ => "is a device, not a regular file",
    }
}

/// The kind of file does not fit.
///
/// # Errors
/// It is no regular file; the text says what it is.
pub fn check(file: &std::fs::Metadata) -> io::Result<()> {
    match file.file_type() {
        regular if regular.is_file() => Ok(()),
        other => Err(io::Error::other(kind(other))),
    }
}

fn open_checked(path: &Path, flags: i32) -> io::Result<File> {
    // Opening alone does something to some devices, so the name is looked at first; and it may lead elsewhere by now.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | flags)
        .open(path)?;
    check(&file.metadata()?)?;
    Ok(file)
}

/// Opens a file that a user has named for reading; symbolic links lead where they lead.
///
/// # Errors
/// It cannot be opened, or is no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    check(&std::fs::metadata(path)?)?;
    open_checked(path, 0)
}

/// Opens a file of a directory that may come from somebody else: a symbolic link in it could lead anywhere.
///
/// # Errors
/// It cannot be opened, or is no regular file, or a symbolic link.
pub fn open_inside(path: &Path) -> io::Result<File> {
    check(&std::fs::symlink_metadata(path)?)?;
    open_checked(path, libc::O_NOFOLLOW)
}

/// The bytes of a file that was opened, of which there are at most so many.
///
/// # Errors
/// It has more, or cannot be read.
pub fn read(file: File, most: u64) -> io::Result<Vec<u8>> {
    let len = file.metadata()?.len();
    if len > most {
        return Err(io::Error::other(format!(
            "has {len} bytes, more than the {most} that it can have"
        )));
    }
    let mut bytes = Vec::new();
    let reserved = usize::try_from(len).is_ok_and(|len| bytes.try_reserve_exact(len).is_ok());
    if !reserved {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    file.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text of a file that a user has named.
///
/// # Errors
/// It cannot be opened or read, is no regular file, has more bytes than that, or is not UTF-8.
pub fn text(path: &Path, most: u64) -> io::Result<String> {
    let bytes = open(path).and_then(|file| read(file, most))?;
    String::from_utf8(bytes).map_err(|_| io::Error::other("is not UTF-8"))
}

/// Makes a file that holds what a guest had in memory or what was typed into it: its owner alone may read it.
///
/// # Errors
/// There is something of that name, or the system's.
pub fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Writes such a file, in place of one that is there.
///
/// # Errors
/// The system's.
pub fn write_private(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)?.write_all(text)
}

/// Makes a directory for such files.
///
/// # Errors
/// There is something of that name, or the system's.
pub fn create_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}
