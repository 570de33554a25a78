//! `--collect DIR`: files from the guest.
//!
//! The guest writes a cpio archive ("newc", as `cpio -o -H newc` makes it) to its second serial port, and what is in it is
//! unpacked below the folder as it comes. Several archives may follow one another. A file appears under its name once it is
//! whole. Nothing that the guest sends reaches beyond the folder or replaces a file that it did not send itself: names with
//! `..` and names from the root are refused, symbolic links are neither made nor followed, and there are limits.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    fs::{self, File, OpenOptions, Permissions},
    io::{self, BufWriter, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

use log::{info, warn};

use crate::error::plain;

/// What a guest may put into the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes in all files together.
    pub bytes: u64,
    /// Files and folders.
    pub entries: u64,
}

/// The limits of `--collect`.
pub const LIMITS: Limits = Limits {
    bytes: 4 << 30,
    entries: 1 << 16,
};

/// The header of one file: a magic and 13 numbers of eight hexadecimal digits.
const HEADER: usize = 110;
const MAGIC: &[u8] = b"07070";
/// PATH_MAX, with the NUL.
const NAME_MAX: usize = 4096;
/// More names of files that share their contents are not kept until those come.
const LINKS_MAX: usize = 4096;
/// After so many lines about what is wrong nothing more is said.
const COMPLAINTS: u32 = 8;

const KIND: u32 = 0o170_000;
const KIND_FILE: u32 = 0o100_000;
const KIND_FOLDER: u32 = 0o040_000;

/// The numbers of a header that matter here.
#[derive(Clone, Copy, Debug)]
struct Header {
    inode: (u32, u32, u32),
    mode: u32,
    links: u32,
    time: u32,
    size: u32,
    name: usize,
    /// The sum of all bytes, in the kind of archive that has it.
    sum: Option<u32>,
}

/// A file under way.
#[derive(Debug)]
struct Partial {
    out: BufWriter<File>,
    temporary: PathBuf,
    path: PathBuf,
    header: Header,
    sum: u32,
}

#[derive(Debug)]
enum State {
    /// Between archives, or after a damaged one.
    Seek,
    Header,
    Name(Header),
    /// So many bytes of contents, which go nowhere if there is no file, and of padding.
    Contents(u64, usize, Option<Box<Partial>>),
    /// A limit was reached.
    Closed,
}

/// Takes the stream and makes the files.
#[derive(Debug)]
pub struct Collector {
    folder: PathBuf,
    limits: Limits,
    state: State,
    /// What there is of a header and a name.
    buffer: Vec<u8>,
    /// Files that came from the guest, which it may replace.
    made: HashSet<PathBuf>,
    /// Names that wait for the contents they share: an archive has them with the last name.
    links: HashMap<(u32, u32, u32), Vec<PathBuf>>,
    waiting: usize,
    files: u64,
    complaints: u32,
    garbage: bool,
    serial: u64,
}

/// The file mode creation mask of this process, from proc(5): umask(2) cannot be asked without changing it for all threads.
pub fn umask() -> u32 {
    let mask = || {
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("Umask:"))?;
        u32::from_str_radix(line.trim(), 8).ok()
    };
    mask().unwrap_or(0o077)
}

impl Collector {
    /// A collector for this folder, which is made if it is not there.
    ///
    /// # Errors
    /// There is something else of this name, or nothing can be made in it.
    pub fn open(folder: &Path, limits: Limits) -> io::Result<Self> {
        match fs::metadata(folder) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Err(io::Error::other("is not a directory")),
            Err(e) if e.kind() == io::ErrorKind::NotFound => fs::create_dir(folder)?,
            Err(e) => return Err(e),
        }
        let mut collector = Collector {
            folder: folder.into(),
            limits,
            state: State::Seek,
            buffer: Vec::new(),
            made: HashSet::new(),
            links: HashMap::new(),
            waiting: 0,
            files: 0,
            complaints: 0,
            garbage: false,
            serial: 0,
        };
        // Better now than after the guest's work.
        let (_, trial) = collector.temporary()?;
        fs::remove_file(trial)?;
        Ok(collector)
    }

    fn temporary(&mut self) -> io::Result<(File, PathBuf)> {
        self.serial += 1;
        let name = format!(".minivmm-{}-{}.part", std::process::id(), self.serial);
        let path = self.folder.join(name);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        Ok((file, path))
    }

    /// Says what is wrong, a few times.
    fn complain(&mut self, text: &str) {
        self.complaints = self.complaints.saturating_add(1);
        let folder = self.folder.display();
        let text = text.replace(char::is_control, "?");
        match self.complaints {
            0..COMPLAINTS => warn!("--collect {folder}: {text}"),
            COMPLAINTS => warn!("--collect {folder}: {text}; no more of this is said"),
            _ => {}
        }
    }

    fn damaged(&mut self, text: &str) {
        let state = std::mem::replace(&mut self.state, State::Seek);
        self.buffer.clear();
        let mut lost = String::new();
        if let State::Contents(_, _, Some(partial)) = state {
            lost = format!(" in the middle of {}", partial.path.display());
            discard(*partial);
        }
        self.complain(&format!(
            "damaged archive{lost}: {text} (has the guest said `stty -F /dev/ttyS1 raw`?)"
        ));
    }

    fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let used = match &mut self.state {
                State::Closed => bytes.len(),
                State::Seek => self.seek(bytes[0]),
                State::Header => self.fill(bytes, HEADER),
                State::Name(header) => {
                    let whole = (HEADER + header.name).next_multiple_of(4);
                    self.fill(bytes, whole)
                }
                State::Contents(left @ 1.., _, partial) => {
                    let part = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    *left -= part as u64;
                    let failure = partial.as_mut().and_then(|p| {
                        let sum = bytes[..part]
                            .iter()
                            .fold(p.sum, |sum, b| sum.wrapping_add(u32::from(*b)));
                        p.sum = sum;
                        p.out.write_all(&bytes[..part]).err()
                    });
                    if let Some(error) = failure {
                        self.give_up_file(&error);
                    }
                    part
                }
                State::Contents(0, padding, _) => {
                    let part = (*padding).min(bytes.len());
                    *padding -= part;
                    part
                }
            };
            bytes = &bytes[used..];
            if let State::Contents(0, 0, _) = self.state {
                self.finish_file();
            }
        }
    }

    /// Looks for the start of an archive. Zeroes between archives are nothing to mention.
    fn seek(&mut self, byte: u8) -> usize {
        self.buffer.push(byte);
        while !self.buffer.is_empty() && !MAGIC.starts_with(&self.buffer) {
            let dropped = self.buffer.remove(0);
            if dropped != 0 && !std::mem::replace(&mut self.garbage, true) {
                self.complain(
                    "what comes is no cpio archive (`cpio -o -H newc` makes one); waiting for the start of one",
                );
            }
        }
        if self.buffer == MAGIC {
            self.state = State::Header;
        }
        1
    }

    /// Collects a header or name of `whole` bytes and goes on once it is there.
    fn fill(&mut self, bytes: &[u8], whole: usize) -> usize {
        let part = (whole - self.buffer.len()).min(bytes.len());
        self.buffer.extend_from_slice(&bytes[..part]);
        if self.buffer.len() == whole {
            match self.state {
                State::Name(header) => self.start(header),
                _ => match parse(&self.buffer) {
                    Some(header) => self.state = State::Name(header),
                    None => self.damaged("a header that is none"),
                },
            }
        }
        part
    }

    /// A header and its name are there.
    fn start(&mut self, header: Header) {
        let mut name = std::mem::take(&mut self.buffer);
        name.truncate(HEADER + header.name);
        let name = &name[HEADER..];
        let Some(name) = name.strip_suffix(&[0]).filter(|name| !name.contains(&0)) else {
            self.damaged("a name without an end");
            return;
        };
        if name == b"TRAILER!!!" {
            self.links.clear();
            self.waiting = 0;
            self.garbage = false;
            self.state = State::Seek;
            info!("--collect {}: an archive is complete", self.folder.display());
            return;
        }
        let partial = match self.accept(name, header) {
            Ok(partial) => partial,
            Err(Refusal::Skip(why)) => {
                self.complain(&format!("{}: {why}; left out", OsStr::from_bytes(name).display()));
                None
            }
            Err(Refusal::Limit(what)) => {
                self.complain(&format!("{what}: the rest of what the guest sends is dropped"));
                self.state = State::Closed;
                return;
            }
        };
        let padding = (4 - header.size as usize % 4) % 4;
        self.state = State::Contents(header.size.into(), padding, partial.map(Box::new));
        if header.size == 0 {
            self.finish_file();
        }
    }

    fn accept(&mut self, name: &[u8], header: Header) -> Result<Option<Partial>, Refusal> {
        let kind = header.mode & KIND;
        if name.starts_with(b"/") {
            return Err(Refusal::Skip("a name from the root".into()));
        }
        let mut parts: Vec<&[u8]> = name
            .split(|b| *b == b'/')
            .filter(|part| !matches!(part, [] | [b'.']))
            .collect();
        if parts.iter().any(|part| *part == b"..") {
            return Err(Refusal::Skip("a name with ..".into()));
        }
        if kind != KIND_FILE && kind != KIND_FOLDER {
            return Err(Refusal::Skip("neither a file nor a folder".into()));
        }
        let mode = header.mode & 0o777;
        let last = if kind == KIND_FILE { parts.pop() } else { None };
        let mut path = self.folder.clone();
        for part in parts {
            path.push(OsStr::from_bytes(part));
            self.make_folder(&path, if kind == KIND_FOLDER { mode | 0o700 } else { 0o755 })?;
        }
        if kind == KIND_FOLDER {
            return Ok(None);
        }
        let Some(last) = last else {
            return Err(Refusal::Skip("a file without a name".into()));
        };
        path.push(OsStr::from_bytes(last));
        self.check_free(&path)?;
        self.count_entry()?;
        self.count_bytes(header.size.into())?;
        let (file, temporary) = self.temporary()?;
        Ok(Some(Partial {
            out: BufWriter::new(file),
            temporary,
            path,
            header,
            sum: 0,
        }))
    }

    fn count_entry(&mut self) -> Result<(), Refusal> {
        let left = self.limits.entries.checked_sub(1);
        self.limits.entries = left.ok_or(Refusal::Limit("too many files"))?;
        Ok(())
    }

    fn count_bytes(&mut self, bytes: u64) -> Result<(), Refusal> {
        let left = self.limits.bytes.checked_sub(bytes);
        self.limits.bytes = left.ok_or(Refusal::Limit("too many bytes"))?;
        Ok(())
    }

    /// Makes a folder where there is nothing yet.
    fn make_folder(&mut self, path: &Path, mode: u32) -> Result<(), Refusal> {
        match fs::symlink_metadata(path) {
            Ok(there) if there.is_dir() => Ok(()),
            Ok(_) => Err(Refusal::Skip(format!("{} is there and is no folder", path.display()))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.count_entry()?;
                Ok(fs::DirBuilder::new().mode(mode).create(path)?)
            }
            Err(e) => Err(e.into()),
        }
    }

    /// A file may go where there is nothing, or a file that came from the guest, too.
    fn check_free(&self, path: &Path) -> Result<(), Refusal> {
        match fs::symlink_metadata(path) {
            Ok(there) if there.is_file() && self.made.contains(path) => Ok(()),
            Ok(_) => Err(Refusal::Skip(
                "there already is something of that name on the host".into(),
            )),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// The host cannot take the file: the archive goes on without it.
    fn give_up_file(&mut self, error: &io::Error) {
        if let State::Contents(_, _, partial) = &mut self.state
            && let Some(partial) = partial.take()
        {
            self.complain(&format!("{}: {}; left out", partial.path.display(), plain(error)));
            discard(*partial);
        }
    }

    /// All bytes of a file are there.
    fn finish_file(&mut self) {
        let State::Contents(_, _, partial) = std::mem::replace(&mut self.state, State::Header) else {
            return;
        };
        let Some(mut partial) = partial else { return };
        if partial.header.sum.is_some_and(|sum| sum != partial.sum) {
            let path = partial.path.display().to_string();
            discard(*partial);
            self.damaged(&format!("the sum of {path} does not hold"));
            return;
        }
        let finished = partial
            .out
            .flush()
            .map_err(Refusal::from)
            .and_then(|()| self.check_free(&partial.path))
            .and_then(|()| {
                let file = partial.out.get_ref();
                file.set_permissions(Permissions::from_mode(partial.header.mode & 0o777 & !umask()))?;
                file.set_modified(UNIX_EPOCH + Duration::from_secs(partial.header.time.into()))?;
                Ok(fs::rename(&partial.temporary, &partial.path)?)
            });
        match finished {
            Ok(()) => {
                self.files += 1;
                self.made.insert(partial.path.clone());
                self.share(&partial.path, partial.header);
            }
            Err(Refusal::Skip(why)) => {
                self.complain(&format!("{}: {why}; left out", partial.path.display()));
                discard(*partial);
            }
            Err(Refusal::Limit(_)) => discard(*partial),
        }
    }

    /// Files that share their contents come without them, but for the last one.
    fn share(&mut self, path: &Path, header: Header) {
        if header.links < 2 {
            return;
        }
        if header.size == 0 {
            if self.waiting < LINKS_MAX {
                self.waiting += 1;
                self.links.entry(header.inode).or_default().push(path.into());
            }
            return;
        }
        for other in self.links.remove(&header.inode).unwrap_or_default() {
            self.waiting -= 1;
            let copied = self
                .count_bytes(header.size.into())
                .and_then(|()| self.check_free(&other))
                .and_then(|()| Ok(fs::copy(path, &other)?));
            if copied.is_err() {
                self.complain(&format!("{}: left empty", other.display()));
            }
        }
    }
}

/// Why an entry is not unpacked.
enum Refusal {
    Skip(String),
    Limit(&'static str),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Refusal::Skip(plain(&error))
    }
}

/// Takes back what there is of a file.
fn discard(partial: Partial) {
    // What is in the buffer is not worth writing any more.
    let (file, _) = partial.out.into_parts();
    drop(file);
    // Nothing more can be done about a file that cannot be removed.
    let _ = fs::remove_file(partial.temporary);
}

/// Reads a header; `None` if it is none.
fn parse(bytes: &[u8]) -> Option<Header> {
    let number = |index: usize| {
        let digits = bytes.get(6 + index * 8..14 + index * 8)?;
        if !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let sum = match bytes.get(5)? {
        b'1' => None,
        b'2' => Some(number(12)?),
        _ => return None,
    };
    let name = usize::try_from(number(11)?).ok()?;
    (1..=NAME_MAX).contains(&name).then_some(Header {
        inode: (number(0)?, number(7)?, number(8)?),
        mode: number(1)?,
        links: number(4)?,
        time: number(5)?,
        size: number(6)?,
        name,
        sum,
    })
}

impl Write for Collector {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let files = self.files;
        match std::mem::replace(&mut self.state, State::Closed) {
            State::Contents(_, _, Some(partial)) => {
                let name = partial.path.display().to_string();
                discard(*partial);
                self.complain(&format!(
                    "the guest ended in the middle of {name}; {files} files are whole"
                ));
            }
            State::Header | State::Name(_) | State::Contents(..) => {
                self.complain(&format!(
                    "the guest ended in the middle of an archive; {files} files are whole"
                ));
            }
            State::Seek | State::Closed => info!("--collect {}: {files} files", self.folder.display()),
        }
    }
}

#[cfg(test)]
#[path = "collect_test.rs"]
mod tests;
