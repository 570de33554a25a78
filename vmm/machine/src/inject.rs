//! `--inject DIR`: a folder's tree as an archive behind the initial RAM disk.
//!
//! Linux unpacks one archive after the other into the same root, so that the tree is below `/inject` by the time the first
//! process runs. A file `init` at its top takes that process's place (`rdinit=/inject/init` on the command line), and may go
//! on with `exec /init`.

use std::{
    fs::{self, DirEntry, File, Metadata},
    io::{self, Read},
    os::unix::{
        ffi::OsStrExt,
        fs::{FileTypeExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use crate::{
    error::plain,
    loader::{self, DEFAULT_LINUX_CMDLINE, LoadError},
    newc::Archive,
};

/// Where the tree is in the guest.
const ROOT: &str = "inject";
/// What the kernel runs first if the tree has it.
const HOOK: &str = "rdinit=/inject/init";

/// Why a tree cannot be packed.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// Something in it cannot be read, or is of a kind that an archive does not take.
    #[error("{}: {}", path.display(), plain(source))]
    File {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// The tree up to this file is larger than guest memory.
    #[error("{}: {source}", path.display())]
    TooBig {
        /// The first file that does not fit.
        path: PathBuf,
        /// How much fits.
        source: LoadError,
    },
}

/// The tree as an archive.
#[derive(Debug)]
pub struct Injection {
    /// A whole newc archive.
    pub archive: Vec<u8>,
    /// The word for the kernel's command line, where the tree has an `init`.
    pub hook: Option<&'static str>,
}

/// Packs the folder's tree, in the order of names and without times and owners, so that the same files make the same bytes.
/// At most `limit` bytes, since more does not fit into the guest.
pub fn pack(folder: &Path, limit: u64) -> Result<Injection, InjectError> {
    let failed = |path: &Path, source| InjectError::File {
        path: path.into(),
        source,
    };
    let metadata = fs::metadata(folder).map_err(|e| failed(folder, e))?;
    if !metadata.is_dir() {
        return Err(failed(folder, io::Error::other("is not a directory")));
    }
    let mut tree = Tree {
        archive: Archive::default(),
        left: limit,
        limit,
    };
    tree.archive.folder(ROOT);
    tree.add(folder, ROOT.as_bytes())?;
    let hook = match fs::metadata(folder.join("init")) {
        Ok(init) if init.permissions().mode() & 0o111 == 0 => {
            return Err(failed(&folder.join("init"), io::Error::other("is not executable")));
        }
        Ok(_) => Some(HOOK),
        Err(_) => None,
    };
    Ok(Injection {
        archive: tree.archive.finish(),
        hook,
    })
}

/// The command line with the hook, unless it names a first process itself.
pub fn hooked(cmdline: Option<Vec<u8>>, hook: Option<&str>) -> Option<Vec<u8>> {
    let Some(hook) = hook else { return cmdline };
    let mut words = cmdline.unwrap_or_else(|| DEFAULT_LINUX_CMDLINE.into());
    if !words
        .split(u8::is_ascii_whitespace)
        .any(|word| word.starts_with(b"rdinit="))
    {
        // What follows -- is for the first process.
        let end = words.windows(4).position(|w| w == b" -- ").unwrap_or(words.len());
        words.splice(end..end, [b" ", hook.as_bytes()].concat());
    }
    Some(words)
}

struct Tree {
    archive: Archive,
    left: u64,
    limit: u64,
}

impl Tree {
    /// Adds what is in a folder that has this path in the archive.
    fn add(&mut self, folder: &Path, inside: &[u8]) -> Result<(), InjectError> {
        let failed = |path: &Path, source| InjectError::File {
            path: path.into(),
            source,
        };
        let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<DirEntry>>>);
        let mut paths: Vec<PathBuf> = entries
            .map_err(|e| failed(folder, e))?
            .iter()
            .map(DirEntry::path)
            .collect();
        paths.sort_unstable();
        for path in paths {
            let name = path.file_name().unwrap_or_default().as_bytes();
            let inside = [inside, b"/", name].concat();
            let metadata = fs::symlink_metadata(&path).map_err(|e| failed(&path, e))?;
            let mode = metadata.permissions().mode() & 0o7777;
            // A header and padding.
            self.take(inside.len() as u64 + 120, &path)?;
            match metadata.file_type() {
                kind if kind.is_dir() => {
                    self.archive.folder_with(&inside, mode);
                    self.add(&path, &inside)?;
                }
                kind if kind.is_symlink() => {
                    let target = fs::read_link(&path).map_err(|e| failed(&path, e))?;
                    self.archive.link(&inside, target.as_os_str().as_bytes());
                }
                kind if kind.is_file() => {
                    self.take(metadata.len(), &path)?;
                    let contents = read(&path, &metadata).map_err(|e| failed(&path, e))?;
                    self.archive.file(&inside, mode, &contents);
                }
                kind => {
                    let what = if kind.is_fifo() {
                        "a FIFO"
                    } else if kind.is_socket() {
                        "a socket"
                    } else {
                        "a device"
                    };
                    let text = format!("is {what}; only files, folders and symbolic links can be injected");
                    return Err(failed(&path, io::Error::other(text)));
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, bytes: u64, path: &Path) -> Result<(), InjectError> {
        match self.left.checked_sub(bytes) {
            Some(left) => self.left = left,
            None => {
                return Err(InjectError::TooBig {
                    path: path.into(),
                    source: loader::too_big_file("the tree up to here", None, self.limit),
                });
            }
        }
        Ok(())
    }
}

/// Reads a file that must not change meanwhile: its length has been counted.
fn read(path: &Path, metadata: &Metadata) -> io::Result<Vec<u8>> {
    let file: File = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
        .open(path)?;
    let mut contents = Vec::new();
    file.take(metadata.len() + 1).read_to_end(&mut contents)?;
    if contents.len() as u64 != metadata.len() {
        return Err(io::Error::other("changes while it is read"));
    }
    Ok(contents)
}

#[cfg(test)]
#[path = "inject_test.rs"]
mod tests;
