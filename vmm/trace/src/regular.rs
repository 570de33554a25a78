//! Opening files that are to be regular ones.
//!
//! A name can lead to a FIFO, which waits for whoever writes it, to a device, which never ends, or out of a directory that came from
//! somebody else. What a name leads to is asked before anything is read of it.

use std::{
    fs::{File, FileType, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
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
