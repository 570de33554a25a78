//! A snapshot of a recorded session in a file: where a replay of a part of it begins.
//!
//! # Form
//! The directory `epochs` of a session has a file for each, named by its step. A file has the pages that have changed since the one
//! before, so that RAM at a snapshot is the pages of its file, and of those before it the pages that no later one has. Numbers are
//! little-endian.
//!
//! | bytes | what |
//! |---|---|
//! | 16 | `minivmm epoch`, and zeroes |
//! | 4 | the version of the form, [`FORMAT`] |
//! | 4, 8, 8 | lengths: of the header and of the state in bytes, of the table in entries |
//! | 8 | a hash of header, state and table ([`Digest`]) |
//! | | the header, JSON ([`Header`]) |
//! | | the state beside RAM (`vm::saved`) |
//! | 16 each | pages: number, with bit 63 set where all of the page is zero, and a hash of the page |
//! | | zeroes up to a multiple of 4096, and the pages that are not zero |
//!
//! Each page has a hash of its own, so that a file whose predecessor goes can take over that one's pages unread.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    path::Path,
};

use machine::memory::Digest;
use serde::{Deserialize, Serialize};
use trace::regular;

const MAGIC: &[u8; 16] = b"minivmm epoch\0\0\0";
/// The version of the form.
const FORMAT: u32 = 1;
/// Magic, version, lengths and hash.
const HEAD: usize = 16 + 4 + 4 + 8 + 8 + 8;
/// Bytes of an entry of the table.
const ENTRY: usize = 16;
/// Bytes of a page.
pub const PAGE: usize = 4096;
/// All of the page is zero, and not in the file.
const ZERO: u64 = 1 << 63;
/// The longest header.
const LONGEST_HEADER: u32 = 1 << 16;
/// Pages that are read at once.
const CHUNK: usize = 256;

/// A file that is none, or not this session's.
#[derive(Debug, thiserror::Error)]
pub enum EpochError {
    /// Reading or writing fails.
    #[error("{}", machine::plain(.0))]
    Io(#[from] io::Error),
    /// Something else, or damaged.
    #[error("damaged: its contents are not what was written")]
    Damaged,
    /// Of another version.
    #[error("written by another version of minivmm ({0})")]
    Version(String),
    /// One that it builds on is not there.
    #[error("it builds on the one at step {0}, which is missing")]
    Missing(u64),
    /// Of another session.
    #[error("of another session")]
    Session,
    /// The state is another machine's.
    #[error(transparent)]
    State(#[from] crate::vm::SavedError),
}

/// What a file says of its moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The program's version.
    pub version: String,
    /// The hash of the machine at the session's start.
    pub session: u64,
    /// When.
    pub steps: u64,
    /// The step of the snapshot before, whose pages it builds on; 0: it builds on none.
    pub previous: u64,
    /// Entries of the log that had come to pass.
    pub logged: usize,
    /// The hash of the machine without RAM.
    pub hash: u64,
}

/// The hash of a page.
pub fn hash_of(page: &[u8]) -> u64 {
    let mut digest = Digest::default();
    digest.add(page);
    digest.value()
}

/// A page of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Guest-physical address.
    pub gpa: u64,
    /// Of its contents.
    pub hash: u64,
    /// Where it is among the file's pages; `None`: it is zero.
    pub index: Option<u64>,
}

/// A file that was opened.
#[derive(Debug)]
pub struct EpochFile {
    file: File,
    /// What it says of its moment.
    pub header: Header,
    /// The state beside RAM.
    pub state: Vec<u8>,
    /// The pages that had changed.
    pub pages: Vec<Page>,
    /// Where the contents of pages begin.
    contents: u64,
}

impl EpochFile {
    /// Opens a file, and reads everything but pages.
    ///
    /// # Errors
    /// See [`EpochError`].
    pub fn open(path: &Path) -> Result<EpochFile, EpochError> {
        let mut file = regular::open_inside(path)?;
        let is = file.metadata()?.len();
        let mut head = [0; HEAD];
        if is < HEAD as u64 {
            return Err(EpochError::Damaged);
        }
        file.read_exact(&mut head)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if &head[..16] != MAGIC {
            return Err(EpochError::Damaged);
        }
        if word(16) != FORMAT {
            return Err(EpochError::Version(format!("form {}", word(16))));
        }
        let (header_len, state_len, entries, hash) = (word(20), long(24), long(32), long(40));
        let end_of_table = (|| {
            (HEAD as u64)
                .checked_add(header_len.into())?
                .checked_add(state_len)?
                .checked_add(entries.checked_mul(ENTRY as u64)?)
        })();
        // No length is more than the file's from here on.
        let end_of_table = end_of_table.filter(|end| *end <= is && header_len <= LONGEST_HEADER);
        let contents = end_of_table.ok_or(EpochError::Damaged)?.next_multiple_of(PAGE as u64);
        let mut part = |len: u64| -> io::Result<Vec<u8>> {
            let mut bytes = vec![0; len as usize];
            file.read_exact(&mut bytes)?;
            Ok(bytes)
        };
        let (header, state) = (part(header_len.into())?, part(state_len)?);
        let table = part(entries * ENTRY as u64)?;
        let mut digest = Digest::default();
        [&header, &state, &table].into_iter().for_each(|part| digest.add(part));
        if digest.value() != hash {
            return Err(EpochError::Damaged);
        }
        let header: Header = serde_json::from_slice(&header).map_err(|_| EpochError::Damaged)?;
        if header.version != env!("CARGO_PKG_VERSION") {
            return Err(EpochError::Version(header.version));
        }
        let pages = read_table(&table);
        let there = pages.iter().filter(|page| page.index.is_some()).count() as u64;
        if is != contents + there * PAGE as u64 {
            return Err(EpochError::Damaged);
        }
        Ok(EpochFile {
            file,
            header,
            state,
            pages,
            contents,
        })
    }

    /// Reads pages of the table that are not zero, in the order of the file, and hands over each with its contents.
    ///
    /// # Errors
    /// A page is not what was written, or `take` fails.
    pub fn read(
        &self,
        pages: &[Page],
        mut take: impl FnMut(&Page, &[u8]) -> Result<(), EpochError>,
    ) -> Result<(), EpochError> {
        let mut bytes = vec![0; CHUNK * PAGE];
        let mut file = &self.file;
        let follows = |a: &Page, b: &Page| a.index.map(|index| index + 1) == b.index;
        for run in pages.chunk_by(follows).flat_map(|run| run.chunks(CHUNK)) {
            let Some(first) = run.first().and_then(|page| page.index) else {
                continue;
            };
            let bytes = &mut bytes[..run.len() * PAGE];
            file.seek(SeekFrom::Start(self.contents + first * PAGE as u64))?;
            file.read_exact(bytes)?;
            for (page, contents) in run.iter().zip(bytes.chunks_exact(PAGE)) {
                if hash_of(contents) != page.hash {
                    return Err(EpochError::Damaged);
                }
                take(page, contents)?;
            }
        }
        Ok(())
    }
}

fn read_table(table: &[u8]) -> Vec<Page> {
    let mut count = 0;
    let entries = table.chunks_exact(ENTRY).map(|entry| {
        let long = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap_or_default());
        let zero = long(0) & ZERO != 0;
        let index = (!zero).then_some(count);
        count += u64::from(!zero);
        Page {
            gpa: (long(0) & !ZERO).saturating_mul(PAGE as u64),
            hash: long(8),
            index,
        }
    });
    entries.collect()
}

/// Writes a file in place of what is there. `read` fills in the contents of the page at an address, and is asked for each once.
/// Gives the file's size.
///
/// # Errors
/// The system's. What was there is there.
pub fn write(
    path: &Path,
    header: &Header,
    state: &[u8],
    pages: &BTreeMap<u64, Option<u64>>,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), EpochError>,
) -> Result<u64, EpochError> {
    let header = serde_json::to_vec(header).map_err(io::Error::from)?;
    let table = pages.len() * ENTRY;
    let contents = (HEAD + header.len() + state.len() + table).next_multiple_of(PAGE);
    let new = path.with_extension("new");
    // What is left of a recorder that was killed.
    let _ = std::fs::remove_file(&new);
    let file = regular::create_private(&new)?;
    let mut out = BufWriter::with_capacity(1 << 20, &file);
    let written = (|| {
        out.seek(SeekFrom::Start(contents as u64))?;
        let (mut entries, mut page) = (Vec::with_capacity(table), [0; PAGE]);
        for (gpa, known) in pages {
            read(*gpa, &mut page)?;
            let zero = page == [0; PAGE];
            let number = gpa / PAGE as u64 | if zero { ZERO } else { 0 };
            let hash = known.unwrap_or_else(|| hash_of(&page));
            entries.extend_from_slice(&number.to_le_bytes());
            entries.extend_from_slice(&hash.to_le_bytes());
            if !zero {
                out.write_all(&page)?;
            }
        }
        let end = out.stream_position()?;
        let mut digest = Digest::default();
        [&header[..], state, &entries]
            .into_iter()
            .for_each(|part| digest.add(part));
        out.seek(SeekFrom::Start(0))?;
        out.write_all(MAGIC)?;
        for word in [FORMAT, header.len() as u32] {
            out.write_all(&word.to_le_bytes())?;
        }
        for word in [state.len() as u64, pages.len() as u64, digest.value()] {
            out.write_all(&word.to_le_bytes())?;
        }
        for part in [&header[..], state, &entries] {
            out.write_all(part)?;
        }
        out.flush()?;
        // A table without pages behind it ends where they would begin.
        file.set_len(end.max(contents as u64))?;
        Ok(end)
    })();
    match written {
        Ok(end) => {
            std::fs::rename(&new, path)?;
            Ok(end)
        }
        Err(error) => {
            let _ = std::fs::remove_file(&new);
            Err(error)
        }
    }
}

#[cfg(test)]
#[path = "epoch_file_test.rs"]
mod tests;
