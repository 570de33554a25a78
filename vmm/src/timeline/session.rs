//! A recorded session: the directory of `--record`.
//!
//! | file | what is in it |
//! |---|---|
//! | `session.json` | one object: what the session starts from ([`Session`]) |
//! | `initrd` | of `minivmm run`: the initial RAM disk that it had |
//! | `shares` | what was read of shared directories ([`machine::share::lower`]) |
//! | `epochs` | snapshots, from which parts of it are replayed (`epoch_file`) |
//! | `log` | one JSON array a line, in order: steps, ticks, kind, text |
//!
//! Kinds are `input` (the bytes in hexadecimal), `virtio` (the number of a virtio device, its port, and the bytes that came for it: a
//! frame of a network), `check` (a hash of the machine without RAM, which a replay compares), `changed` (a
//! debugger wrote to the guest, which is not recorded: a replay ends there), and at last `guest` (the guest ended the run) or
//! `host` (something else did) with the reason. A log without one of the last two breaks off: the recorder was killed.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::log::{Closed, Entry, LogWriter, What};
use crate::config::{MachineConfig, RecordOptions};
use crate::error::Error;
use crate::vm::{Inlet, Moment};
use trace::regular;

/// The option that names the directory.
const RECORD: &str = "--record";
/// The command that reads it.
const REPLAY: &str = "replay";
/// What the directory's files are called.
const SESSION: &str = "session.json";
const LOG: &str = "log";
const PACKED: &str = "initrd";
/// The version of the directory. Another version of the program may execute otherwise, which the checks find.
const FORMAT: u32 = 3;
/// The longest of either file that is read.
const LONGEST: u64 = 1 << 30;

/// An argument: text, or where it is none, bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Word {
    Text(String),
    Bytes(Vec<u8>),
}

impl From<&OsStr> for Word {
    fn from(word: &OsStr) -> Self {
        match word.to_str() {
            Some(text) => Word::Text(text.into()),
            None => Word::Bytes(word.as_bytes().into()),
        }
    }
}

impl From<&Word> for OsString {
    fn from(word: &Word) -> Self {
        match word {
            Word::Text(text) => text.into(),
            Word::Bytes(bytes) => OsString::from_vec(bytes.clone()),
        }
    }
}

/// A disk as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskWas {
    /// In bytes.
    size: u64,
    /// Nanoseconds since 1970; of a block device 0.
    modified: u64,
}

/// What a session starts from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    #[serde(rename = "minivmm-session")]
    format: u32,
    /// The program's version.
    version: String,
    directory: Word,
    arguments: Vec<Word>,
    /// What `--seed` came to.
    pub seed: u64,
    /// What `--rtc-base` came to.
    pub rtc_base: i64,
    /// The hash of the machine at the start, in hexadecimal.
    start: String,
    disks: Vec<DiskWas>,
}

fn failed(option: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::File { option, path, source }
}

fn wrong(folder: &Path, why: impl Into<String>) -> Error {
    failed(REPLAY, folder)(io::Error::other(why.into()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let pairs = (0..digits.len()).step_by(2).map(|at| text.get(at..at + 2));
    pairs.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}

/// The disks of a configuration as they are.
pub(super) fn disks(config: &MachineConfig) -> Result<Vec<DiskWas>, Error> {
    let disks = config.disks.iter().map(|disk| {
        let look = || -> io::Result<DiskWas> {
            // A FIFO would wait here for somebody who writes to it; what kind of file a disk may be is said where it is opened.
            let mut file = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
                .open(&disk.path)?;
            let metadata = file.metadata()?;
            let modified = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
            Ok(DiskWas {
                size: file.seek(SeekFrom::End(0))?,
                modified: match metadata.is_file() {
                    true => u64::try_from(modified.as_nanos()).unwrap_or(0),
                    false => 0,
                },
            })
        };
        look().map_err(failed("--disk", &disk.path))
    });
    disks.collect()
}

impl Session {
    /// What a run starts from which has this hash.
    ///
    /// # Errors
    /// A disk, or the working directory, cannot be looked at.
    fn of(config: &MachineConfig, arguments: &[OsString], start: u64) -> Result<Self, Error> {
        let directory = std::env::current_dir().map_err(failed(RECORD, Path::new(".")))?;
        Ok(Session {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            directory: directory.as_os_str().into(),
            arguments: arguments.iter().map(|word| word.as_os_str().into()).collect(),
            seed: config.seed,
            rtc_base: config.rtc_base,
            start: format!("{start:016x}"),
            disks: disks(config)?,
        })
    }

    /// The hash of the machine at the start.
    pub fn start(&self) -> u64 {
        u64::from_str_radix(&self.start, 16).unwrap_or(0)
    }

    /// The directory that the files of the arguments are below.
    pub fn directory(&self) -> PathBuf {
        OsString::from(&self.directory).into()
    }

    /// The command line.
    pub fn arguments(&self) -> Vec<OsString> {
        self.arguments.iter().map(OsString::from).collect()
    }

    /// The initial RAM disk that was put together as a command was given.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn packed(folder: &Path) -> Result<Vec<u8>, Error> {
        let path = folder.join(PACKED);
        let mut bytes = Vec::new();
        let read = regular::open_inside(&path).and_then(|file| file.take(LONGEST).read_to_end(&mut bytes));
        read.map(|_| bytes).map_err(failed(REPLAY, &path))
    }

    /// Whether the disks are what they were.
    ///
    /// # Errors
    /// One is not, or cannot be looked at.
    pub fn check_disks(&self, config: &MachineConfig) -> Result<(), Error> {
        let now = disks(config)?;
        let changed = config.disks.iter().zip(&self.disks).zip(&now);
        for ((disk, was), is) in changed {
            if was != is {
                let text = "has changed since the session was recorded, which cannot be replayed";
                return Err(failed("--disk", &disk.path)(io::Error::other(text)));
            }
        }
        Ok(())
    }

    /// Whether a machine starts from what the session started from, by its hash.
    ///
    /// # Errors
    /// It does not.
    pub fn check_start(&self, folder: &Path, start: u64) -> Result<(), Error> {
        if self.start == format!("{start:016x}") {
            return Ok(());
        }
        Err(wrong(
            folder,
            "the guest starts otherwise than it was recorded: its kernel, initial RAM disk or another file has changed, or this \
             program has",
        ))
    }

    /// Reads a directory: what the session starts from, what came from outside, and the end.
    ///
    /// # Errors
    /// One line: no session, of another version, or damaged.
    pub fn open(folder: &Path) -> Result<(Session, Vec<Entry>, Moment, Closed), Error> {
        let read = |name: &str| -> Result<String, Error> {
            let path = folder.join(name);
            let opened = regular::open_inside(&path).map_err(|e| match e.kind() {
                io::ErrorKind::NotFound if folder.is_dir() => {
                    wrong(folder, format!("no recorded session: it has no {name}"))
                }
                _ => failed(REPLAY, &path)(e),
            })?;
            let mut bytes = Vec::new();
            opened
                .take(LONGEST)
                .read_to_end(&mut bytes)
                .map_err(failed(REPLAY, &path))?;
            String::from_utf8(bytes).map_err(|_| wrong(&path, "not text, so not a recorded session"))
        };
        let text = read(SESSION)?;
        let path = folder.join(SESSION);
        // Of another version only the number has to be there.
        let any: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| wrong(&path, format!("not a recorded session: {e}")))?;
        match any.get("minivmm-session").and_then(serde_json::Value::as_u64) {
            Some(format) if format == u64::from(FORMAT) => {}
            Some(format) => {
                return Err(wrong(
                    &path,
                    format!("recorded by another version of minivmm: its format is {format}, this one reads {FORMAT}"),
                ));
            }
            None => return Err(wrong(&path, "not a recorded session")),
        }
        let session: Session = serde_json::from_str(&text).map_err(|e| wrong(&path, format!("damaged: {e}")))?;
        let (entries, head, closed) = lines(&read(LOG)?).map_err(|why| wrong(&folder.join(LOG), why.to_string()))?;
        Ok((session, entries, head, closed))
    }
}

/// A log that is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
struct LogError {
    /// Counted from 1.
    line: usize,
    /// What is wrong with it.
    why: &'static str,
}

/// What came for a virtio device.
fn virtio(text: &str) -> Option<What> {
    let mut words = text.splitn(3, ' ');
    let (device, port) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some(What::Input(Inlet::Virtio { device, port }, unhex(words.next()?)?))
}

/// A line of the log.
type LogLine = (u64, u64, String, String);

/// Reads the log. What is torn at its end was being written when the recorder was killed.
fn lines(text: &str) -> Result<(Vec<Entry>, Moment, Closed), LogError> {
    let (mut entries, mut head) = (Vec::new(), Moment::default());
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for (number, line) in (1..).zip(whole.lines()) {
        let damaged = |why| LogError { line: number, why };
        let parsed: LogLine = serde_json::from_str(line).map_err(|_| damaged("damaged"))?;
        let (steps, ticks, kind, rest) = parsed;
        let at = Moment { steps, ticks };
        if at < head {
            return Err(damaged("earlier than the line before"));
        }
        head = at;
        let what = match kind.as_str() {
            "input" => What::Input(Inlet::Serial, unhex(&rest).ok_or_else(|| damaged("not hexadecimal"))?),
            "virtio" => virtio(&rest).ok_or_else(|| damaged("not a device, a port and hexadecimal"))?,
            "check" => What::Check(u64::from_str_radix(&rest, 16).map_err(|_| damaged("not hexadecimal"))?),
            "changed" | "guest" | "host" => {
                let reason = match kind.as_str() {
                    "guest" => None,
                    "host" => Some(rest),
                    _ => Some("a debugger changed the guest, which is not recorded".into()),
                };
                let closed = Closed { reason, broken: false };
                return Ok((entries, head, closed));
            }
            _ => return Err(damaged("of an unknown kind")),
        };
        entries.push(Entry { at, what });
    }
    let reason = "the recording breaks off".to_string();
    let closed = Closed {
        reason: Some(reason),
        broken: true,
    };
    Ok((entries, head, closed))
}

/// Writes a directory.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
    /// Where each entry begins, and where the next one will.
    starts: Vec<u64>,
    end: u64,
}

impl Writer {
    /// Makes the directory and says what the session starts from.
    ///
    /// # Errors
    /// It is there and not empty, or cannot be written.
    pub fn create(options: &RecordOptions, config: &MachineConfig, start: u64) -> Result<Self, Error> {
        let RecordOptions { folder, arguments } = options;
        let session = Session::of(config, arguments, start)?;
        let make = || -> io::Result<Writer> {
            match regular::create_private_dir(folder) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                result => result?,
            }
            if fs::read_dir(folder)?.next().is_some() {
                return Err(io::Error::other("is not empty; give a directory that is new or empty"));
            }
            let path = folder.join(LOG);
            let file = regular::create_private(&path)?;
            let mut text = serde_json::to_string_pretty(&session)?;
            text.push('\n');
            regular::write_private(&folder.join(SESSION), text.as_bytes())?;
            if let Some(packed) = &config.packed {
                regular::write_private(&folder.join(PACKED), packed)?;
            }
            let (starts, end) = (Vec::new(), 0);
            Ok(Writer {
                path,
                file,
                starts,
                end,
            })
        };
        make().map_err(failed(RECORD, folder))
    }

    fn line(&mut self, at: Moment, kind: &str, rest: &str) -> Result<(), Error> {
        let line: LogLine = (at.steps, at.ticks, kind.into(), rest.into());
        let mut text = serde_json::to_string(&line).unwrap_or_default();
        text.push('\n');
        self.file
            .write_all(text.as_bytes())
            .map_err(failed(RECORD, &self.path))?;
        self.end += text.len() as u64;
        Ok(())
    }
}

impl LogWriter for Writer {
    fn entry(&mut self, entry: &Entry) -> Result<(), Error> {
        self.starts.push(self.end);
        match &entry.what {
            What::Input(Inlet::Serial, bytes) => self.line(entry.at, "input", &hex(bytes)),
            What::Input(Inlet::Virtio { device, port }, bytes) => {
                self.line(entry.at, "virtio", &format!("{device} {port} {}", hex(bytes)))
            }
            What::Check(hash) => self.line(entry.at, "check", &format!("{hash:016x}")),
            What::Changed => self.line(entry.at, "changed", ""),
        }
    }
    fn keep(&mut self, count: usize) -> Result<(), Error> {
        let Some(&start) = self.starts.get(count) else {
            return Ok(());
        };
        self.starts.truncate(count);
        self.end = start;
        let cut = |file: &mut File| {
            file.set_len(start)?;
            file.seek(SeekFrom::Start(start)).map(drop)
        };
        cut(&mut self.file).map_err(failed(RECORD, &self.path))
    }
    fn end(&mut self, at: Moment, by_guest: bool, reason: &str) -> Result<(), Error> {
        self.line(at, if by_guest { "guest" } else { "host" }, reason)
    }
}

#[cfg(test)]
#[path = "session_test.rs"]
mod tests;
