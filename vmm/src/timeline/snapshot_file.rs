//! A machine in a file: `minivmm ctl SOCKET snapshot FILE` writes one, `minivmm --restore FILE` has it go on from there.
//!
//! # Form
//! Numbers are little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 16 | `minivmm snapshot` |
//! | 4 | the version of the form, [`FORMAT`] |
//! | 4, 8, 8 | lengths: of the header and of the state in bytes, of RAM in pages that are not all zero |
//! | 8 | a hash of everything that follows ([`Digest`]) |
//! | | the header, JSON: what the machine is made of ([`Header`]) |
//! | | the state beside RAM (`vm::saved`) |
//! | 8 each | the pages' numbers, ascending |
//! | | zeroes up to a multiple of 4096, and the pages |
//!
//! The hash finds what a disk or a copy has damaged. It keeps nobody from making a file of their own: as with a program, a file from
//! somebody else is theirs to vouch for.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use machine::memory::Digest;
use serde::{Deserialize, Serialize};
use trace::regular;
use x86::model::CpuModel;

use super::{
    named::NamedStateError,
    origin::Origin,
    run::Run,
    session::{DiskWas, Word, disks},
};
use crate::{
    config::MachineConfig,
    error::Error,
    vm::{SavedError, Vm},
};

const MAGIC: &[u8; 16] = b"minivmm snapshot";
/// The version of the form.
const FORMAT: u32 = 1;
/// Magic, version, lengths and hash.
const HEAD: usize = 16 + 4 + 4 + 8 + 8 + 8;
const PAGE: usize = 4096;
/// The longest header: a command line has at most 2 MiB.
const LONGEST_HEADER: u32 = 8 << 20;
/// Bytes of RAM that are read or written at once.
const CHUNK: usize = 1 << 20;

/// A file that cannot be written, or that no machine can go on from.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFileError {
    /// The machine's state cannot be kept.
    #[error(transparent)]
    Unkept(#[from] NamedStateError),
    /// A pipe, a socket or a device.
    #[error("not a regular file")]
    NotAFile,
    /// Reading or writing fails.
    #[error("{}", machine::plain(.0))]
    Io(#[from] io::Error),
    /// Something else.
    #[error("not a snapshot of minivmm's")]
    NotASnapshot,
    /// Of another version.
    #[error("written by another version of minivmm ({0}): this one is {this}", this = this_version())]
    Version(String),
    /// It ends early, or has more than it says.
    #[error("{is} bytes where there should be {should}: cut short, or not written to its end")]
    Length {
        /// Its length.
        is: u64,
        /// What it should be.
        should: u64,
    },
    /// A hash does not fit.
    #[error("damaged: its contents are not what was written")]
    Damaged,
    /// The program that wrote it is one of the library's, so nobody knows how to make its machine.
    #[error("it has no command line: the program that wrote it has to restore it")]
    NoCommandLine,
    /// The command line is none.
    #[error("its command line is none that this program takes: {0}")]
    CommandLine(Box<Error>),
    /// The model is defined otherwise.
    #[error("it is of a machine of model {0}, which is another here")]
    Model(String),
    /// RAM of another size.
    #[error("it is of a machine with {0} bytes of RAM")]
    Memory(u64),
    /// A disk's file has changed.
    #[error("{}: has changed since the snapshot was written", .0.display())]
    Disk(PathBuf),
    /// The state is another machine's.
    #[error(transparent)]
    State(#[from] SavedError),
}

fn this_version() -> String {
    format!("{}, form {FORMAT}", env!("CARGO_PKG_VERSION"))
}

/// What a machine is made of, as a file says it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    version: String,
    directory: Word,
    arguments: Vec<Word>,
    model: String,
    model_hash: String,
    memory: u64,
    steps: u64,
    disks: Vec<DiskWas>,
}

fn hash_of(model: &CpuModel) -> String {
    let mut digest = Digest::default();
    digest.add(format!("{model:?}").as_bytes());
    format!("{:016x}", digest.value())
}

/// The pages that are not all zero, as runs of bytes from a guest-physical address.
fn runs(vm: &mut Vm) -> Vec<std::ops::Range<u64>> {
    let memory = vm.machine().memory();
    let (mut runs, mut page): (Vec<std::ops::Range<u64>>, _) = (Vec::new(), [0; PAGE]);
    for gpa in memory.touched().into_iter().flat_map(|range| range.step_by(PAGE)) {
        if memory.read(gpa, &mut page).is_err() || page == [0; PAGE] {
            continue;
        }
        let end = gpa + PAGE as u64;
        match runs.last_mut() {
            Some(last) if last.end == gpa => last.end = end,
            _ => runs.push(gpa..end),
        }
    }
    runs
}

/// Pieces of a run that are read or written at once.
fn pieces(run: &std::ops::Range<u64>) -> impl Iterator<Item = (u64, usize)> + use<> {
    let end = run.end;
    (run.start..end)
        .step_by(CHUNK)
        .map(move |gpa| (gpa, CHUNK.min((end - gpa) as usize)))
}

impl Run {
    /// Writes the machine's state in place of what a file holds, and gives the file's size in bytes.
    ///
    /// # Errors
    /// The state cannot be kept (KVM has it, or a disk is written to), or the file cannot be written: it is empty then.
    pub fn write_snapshot(&mut self, file: &File) -> Result<u64, SnapshotFileError> {
        self.keeps_states()?;
        if !self.vm.shares().is_empty() {
            let why = "what the guest has made of shared directories is not written to a file: leave out --share";
            return Err(NamedStateError::Lasting(why.into()).into());
        }
        if !file.metadata()?.is_file() {
            return Err(SnapshotFileError::NotAFile);
        }
        file.set_len(0)?;
        let written = self.write_to(file);
        if written.is_err() {
            let _ = file.set_len(0);
        }
        Ok(written?)
    }

    fn write_to(&mut self, file: &File) -> io::Result<u64> {
        let model = self.vm.machine().model();
        let header = Header {
            version: env!("CARGO_PKG_VERSION").into(),
            directory: self.origin.directory.as_os_str().into(),
            arguments: self
                .origin
                .arguments
                .iter()
                .map(|word| word.as_os_str().into())
                .collect(),
            model: model.name.into(),
            model_hash: hash_of(model),
            memory: self.vm.machine().memory().size(),
            steps: self.vm.steps(),
            disks: self.origin.disks.clone(),
        };
        let header = serde_json::to_vec(&header)?;
        let state = self.vm.saved_beside_ram()?;
        let runs = runs(&mut self.vm);
        let numbers = runs.iter().cloned().flat_map(|run| run.step_by(PAGE));
        let numbers: Vec<u8> = numbers.flat_map(|gpa| (gpa / PAGE as u64).to_le_bytes()).collect();
        let mut digest = Digest::default();
        [&header, &state, &numbers]
            .into_iter()
            .for_each(|part| digest.add(part));
        let before = HEAD + header.len() + state.len() + numbers.len();
        let padding = vec![0; before.next_multiple_of(PAGE) - before];
        let mut out = BufWriter::with_capacity(CHUNK, file);
        out.seek(SeekFrom::Start(0))?;
        // The head comes last, when the hash is known: a file that breaks off has none.
        for part in [&vec![0; HEAD], &header, &state, &numbers, &padding] {
            out.write_all(part)?;
        }
        let mut bytes = vec![0; CHUNK];
        let memory = self.vm.machine().memory();
        for (gpa, len) in runs.iter().flat_map(pieces) {
            let bytes = &mut bytes[..len];
            memory.read(gpa, bytes).map_err(io::Error::other)?;
            digest.add(bytes);
            out.write_all(bytes)?;
        }
        let end = out.stream_position()?;
        out.seek(SeekFrom::Start(0))?;
        out.write_all(MAGIC)?;
        for word in [FORMAT, header.len() as u32] {
            out.write_all(&word.to_le_bytes())?;
        }
        for word in [state.len() as u64, numbers.len() as u64 / 8, digest.value()] {
            out.write_all(&word.to_le_bytes())?;
        }
        out.flush()?;
        Ok(end)
    }
}

/// A file that was opened: what its machine is made of, and the state that is still to be read.
#[derive(Debug)]
pub struct SnapshotFile {
    file: File,
    header: Header,
    state: Vec<u8>,
    numbers: Vec<u8>,
    digest: Digest,
    hash: u64,
}

impl SnapshotFile {
    /// Opens a file, and reads everything but RAM.
    ///
    /// # Errors
    /// See [`SnapshotFileError`].
    pub fn open(path: &Path) -> Result<SnapshotFile, SnapshotFileError> {
        let mut file = regular::open(path)?;
        let is = file.metadata()?.len();
        let mut head = [0; HEAD];
        if is < HEAD as u64 {
            return Err(SnapshotFileError::NotASnapshot);
        }
        file.read_exact(&mut head)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if &head[..16] != MAGIC {
            return Err(SnapshotFileError::NotASnapshot);
        }
        if word(16) != FORMAT {
            return Err(SnapshotFileError::Version(format!("form {}", word(16))));
        }
        let (header_len, state_len, pages, hash) = (word(20), long(24), long(32), long(40));
        let length = || {
            let before = (HEAD as u64)
                .checked_add(header_len.into())?
                .checked_add(state_len)?
                .checked_add(pages.checked_mul(8)?)?
                .checked_next_multiple_of(PAGE as u64)?;
            before.checked_add(pages.checked_mul(PAGE as u64)?)
        };
        let should = length().ok_or(SnapshotFileError::Damaged)?;
        if is != should {
            return Err(SnapshotFileError::Length { is, should });
        }
        if header_len > LONGEST_HEADER {
            return Err(SnapshotFileError::Damaged);
        }
        // No length is more than the file's now.
        let mut part = |len: u64| -> io::Result<Vec<u8>> {
            let mut bytes = vec![0; len as usize];
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        let (header, state, numbers) = (part(header_len.into())?, part(state_len)?, part(pages * 8)?);
        let mut digest = Digest::default();
        [&header, &state, &numbers]
            .into_iter()
            .for_each(|part| digest.add(part));
        let header: Header = serde_json::from_slice(&header).map_err(|_| SnapshotFileError::Damaged)?;
        if header.version != env!("CARGO_PKG_VERSION") {
            return Err(SnapshotFileError::Version(header.version));
        }
        let pages_at = should - pages * PAGE as u64;
        file.seek(SeekFrom::Start(pages_at))?;
        Ok(SnapshotFile {
            file,
            header,
            state,
            numbers,
            digest,
            hash,
        })
    }

    /// The directory that the files of the arguments are below.
    pub fn directory(&self) -> PathBuf {
        OsString::from(&self.header.directory).into()
    }

    /// The name of the machine's CPU model.
    pub fn model(&self) -> &str {
        &self.header.model
    }

    /// Whether the machine is of this model, as it is defined here.
    pub fn is_of(&self, model: &CpuModel) -> bool {
        (self.header.model.as_str(), &self.header.model_hash) == (model.name, &hash_of(model))
    }

    /// The machine's steps so far.
    pub fn steps(&self) -> u64 {
        self.header.steps
    }

    /// The command line that made the machine.
    pub fn arguments(&self) -> Vec<OsString> {
        self.header.arguments.iter().map(OsString::from).collect()
    }

    /// Where machines that go on from here say they come from: the same, so that a snapshot of theirs is like this one.
    pub(crate) fn origin(&self) -> Origin {
        Origin {
            directory: self.directory(),
            arguments: self.arguments(),
            disks: self.header.disks.clone(),
        }
    }

    /// Whether the disks of a configuration are what they were.
    ///
    /// # Errors
    /// One is not, or cannot be looked at.
    pub fn check_disks(&self, config: &MachineConfig) -> Result<(), SnapshotFileError> {
        let now = disks(config).map_err(|error| SnapshotFileError::CommandLine(Box::new(error)))?;
        let pairs = config.disks.iter().zip(self.header.disks.iter().zip(&now));
        match pairs.into_iter().find(|(_, (was, is))| was != is) {
            Some((disk, _)) => Err(SnapshotFileError::Disk(disk.path.clone())),
            None => Ok(()),
        }
    }

    /// Puts a machine that has not run into the state.
    ///
    /// # Errors
    /// The machine is another, or the file is damaged. The machine cannot be used then.
    pub(crate) fn restore(mut self, vm: &mut Vm) -> Result<(), SnapshotFileError> {
        let model = vm.machine().model();
        if (self.header.model.as_str(), self.header.model_hash) != (model.name, hash_of(model)) {
            return Err(SnapshotFileError::Model(self.header.model));
        }
        if self.header.memory != vm.machine().memory().size() {
            return Err(SnapshotFileError::Memory(self.header.memory));
        }
        let mut bytes = vec![0; CHUNK];
        let numbers = self.numbers.chunks_exact(8).map(|word| {
            let word: [u8; 8] = word.try_into().unwrap_or_default();
            u64::from_le_bytes(word).saturating_mul(PAGE as u64)
        });
        let (mut run, mut ranges): (Option<std::ops::Range<u64>>, Vec<_>) = (None, Vec::new());
        for gpa in numbers {
            let end = gpa.saturating_add(PAGE as u64);
            match &mut run {
                Some(run) if run.end == gpa => run.end = end,
                _ => ranges.extend(run.replace(gpa..end)),
            }
        }
        ranges.extend(run);
        for (gpa, len) in ranges.iter().flat_map(pieces) {
            let bytes = &mut bytes[..len];
            self.file.read_exact(bytes)?;
            self.digest.add(bytes);
            vm.load(gpa, bytes).map_err(|_| SnapshotFileError::Damaged)?;
        }
        if self.digest.value() != self.hash {
            return Err(SnapshotFileError::Damaged);
        }
        vm.take_saved(&self.state)?;
        Ok(())
    }
}

#[cfg(test)]
#[path = "snapshot_file_test.rs"]
mod tests;
