//! What the host's files were when a guest looked at them first.
//!
//! # Theory
//! A run that is recorded, or goes back, needs the same answers again, whatever has become of the files by then. So each question about a
//! file (what is it, which names are in it, where does it lead, which bytes are there) is asked of the host once, and its answer is kept. An
//! answer does not depend on when it was asked for, so that going back does not have to take anything back.
//!
//! # Practice
//! Answers are kept in a file, one behind the other: that of the recorded session, or one without a name. What files hold is kept in pieces
//! of 64 KiB, each of them once, however many files have it. A record is its length (4 bytes, little-endian), a byte for its kind, and
//! bytes: of a piece, or of a share's number, a question and its answer as postcard encodes them.

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    fs::File,
    hash::Hasher,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use devices::virtio::fs::file_system::{Attributes, Errno, kind};
use log::warn;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::{Listed, attributes, errno, identity, io_errno, is_kernels, is_shown, look, open_beneath, read_names};

/// Bytes of a piece of a file.
pub const PIECE: u64 = 64 << 10;
/// The longest record that is read: a listing of ten million names.
const RECORD_MAX: u32 = 1 << 30;
const CONTENTS: u8 = 0;
const ANSWER: u8 = 1;

/// A question about a file, by its path below the share, which is empty for the share itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Question {
    /// What it is.
    Attributes(Vec<u8>),
    /// Which names are in it.
    Names(Vec<u8>),
    /// Where it leads.
    Target(Vec<u8>),
    /// Its bytes, from a multiple of [`PIECE`] on.
    Piece(Vec<u8>, u64),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Answer {
    Attributes(Attributes),
    Names(Vec<Listed>),
    Target(Vec<u8>),
    /// By its number among the pieces that are kept.
    Piece(u32),
}

/// The answers about all shares of a machine. Clones are of the same ones.
#[derive(Clone, Debug)]
pub struct Answers(Arc<Mutex<Kept>>);

#[derive(Debug)]
struct Kept {
    file: File,
    end: u64,
    /// Where each piece is, and how long.
    pieces: Vec<(u64, u32)>,
    by_hash: HashMap<u64, Vec<u32>>,
    answers: HashMap<(u32, Question), Result<Answer, i32>>,
    /// The host is not asked: what is not among the answers was never asked for.
    replays: bool,
}

impl Answers {
    /// None yet, to be kept in this file.
    pub fn new(file: File) -> Self {
        Answers(Arc::new(Mutex::new(Kept {
            file,
            end: 0,
            pieces: Vec::new(),
            by_hash: HashMap::new(),
            answers: HashMap::new(),
            replays: false,
        })))
    }

    /// Those of an earlier run. What is torn at the end was being written when it was killed.
    ///
    /// # Errors
    /// The file cannot be read, or holds something else.
    pub fn of(file: File) -> io::Result<Self> {
        let answers = Answers::new(file);
        let mut kept = answers.kept();
        kept.replays = true;
        let len = kept.file.metadata()?.len();
        let damaged = || io::Error::other("damaged");
        while kept.end + 5 <= len {
            let mut head = [0; 5];
            kept.file.read_exact_at(&mut head, kept.end)?;
            let size = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
            let at = kept.end + 5;
            if at + u64::from(size) > len {
                break;
            }
            match head[4] {
                CONTENTS if u64::from(size) <= PIECE => kept.pieces.push((at, size)),
                ANSWER if size <= RECORD_MAX => {
                    let mut bytes = vec![0; size as usize];
                    kept.file.read_exact_at(&mut bytes, at)?;
                    let (share, question, answer) = postcard::from_bytes(&bytes).map_err(|_| damaged())?;
                    kept.answers.insert((share, question), answer);
                }
                _ => return Err(damaged()),
            }
            kept.end = at + u64::from(size);
        }
        drop(kept);
        Ok(answers)
    }

    /// Keeps answers in this file instead. None must have been given yet.
    pub fn keep_in(&self, file: File) {
        let mut kept = self.kept();
        debug_assert_eq!(kept.end, 0, "what is kept elsewhere would be lost");
        kept.file = file;
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that the answers take.
    pub fn size(&self) -> u64 {
        self.kept().end
    }
}

impl Kept {
    fn write(&mut self, kind: u8, bytes: &[u8]) -> Result<u64, Errno> {
        let size = u32::try_from(bytes.len()).map_err(|_| Errno::TOO_BIG)?;
        let at = self.end + 5;
        let record = [&size.to_le_bytes()[..], &[kind], bytes].concat();
        self.file.write_all_at(&record, self.end).map_err(|e| {
            warn!(
                "--share: what the guest reads cannot be kept: {}; it sees an I/O error",
                crate::plain(&e)
            );
            io_errno(&e)
        })?;
        self.end = at + bytes.len() as u64;
        Ok(at)
    }

    /// Keeps a piece, unless it is there.
    fn keep(&mut self, bytes: &[u8]) -> Result<u32, Errno> {
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        let hash = hasher.finish();
        for number in self.by_hash.get(&hash).into_iter().flatten() {
            if self.piece(*number)? == bytes {
                return Ok(*number);
            }
        }
        let at = self.write(CONTENTS, bytes)?;
        let number = u32::try_from(self.pieces.len()).map_err(|_| Errno::NO_SPACE)?;
        self.pieces.push((at, bytes.len() as u32));
        self.by_hash.entry(hash).or_default().push(number);
        Ok(number)
    }

    fn piece(&self, number: u32) -> Result<Vec<u8>, Errno> {
        let (at, len) = *self.pieces.get(number as usize).ok_or(Errno::IO)?;
        let mut bytes = vec![0; len as usize];
        self.file.read_exact_at(&mut bytes, at).map_err(|e| io_errno(&e))?;
        Ok(bytes)
    }
}

/// The files of one share.
#[derive(Debug)]
pub struct Lower {
    share: u32,
    answers: Answers,
    /// `None` where an earlier run has had all answers.
    root: Option<OwnedFd>,
    device: u64,
    /// The file that was read last, and the piece.
    open: Option<(Vec<u8>, File)>,
    last: Option<(Vec<u8>, u64, Arc<Vec<u8>>)>,
}

impl Lower {
    /// The files below a folder, as the share of this number.
    ///
    /// # Errors
    /// The folder cannot be looked at.
    pub fn new(path: &Path, share: u32, answers: Answers) -> io::Result<Self> {
        let root = match answers.kept().replays {
            true => None,
            false => Some(super::open_root(path)?),
        };
        let device = match &root {
            Some(root) => identity(&look(root, b"").map_err(|Errno(errno)| io::Error::from_raw_os_error(errno))?).0,
            None => 0,
        };
        Ok(Lower {
            share,
            answers,
            root,
            device,
            open: None,
            last: None,
        })
    }

    /// What is kept of all shares' answers.
    pub fn answers(&self) -> Answers {
        self.answers.clone()
    }

    /// The answer to a question, from the host where it has not been asked before.
    fn ask(&mut self, question: Question) -> Result<Answer, Errno> {
        let key = (self.share, question);
        {
            let kept = self.answers.kept();
            if let Some(answer) = kept.answers.get(&key) {
                return answer.clone().map_err(Errno);
            }
            if kept.replays {
                return Err(Errno::IO);
            }
        }
        let answer = self.look_up(&key.1).map_err(|Errno(errno)| errno);
        let record = postcard::to_allocvec(&(key.0, &key.1, &answer)).map_err(|_| Errno::IO)?;
        let mut kept = self.answers.kept();
        kept.write(ANSWER, &record)?;
        kept.answers.insert(key, answer.clone());
        answer.map_err(Errno)
    }

    fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        let root = self.root.as_ref().ok_or(Errno::IO)?;
        match path.is_empty() {
            true => open_beneath(root, b".", flags, Mode::empty()),
            false => open_beneath(root, path, flags, Mode::empty()),
        }
    }

    fn look_up(&mut self, question: &Question) -> Result<Answer, Errno> {
        Ok(match question {
            Question::Attributes(path) => {
                let found = look(&self.open(path, OFlags::PATH)?, b"")?;
                if !is_shown(found.stx_mode.into()) {
                    return Err(Errno::NO_ENTRY);
                }
                Answer::Attributes(attributes(&found, self.device))
            }
            Question::Names(path) => {
                let place = self.open(path, OFlags::PATH | OFlags::DIRECTORY)?;
                Answer::Names(match is_kernels(&place) {
                    true => Vec::new(),
                    false => read_names(self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)?)?,
                })
            }
            Question::Target(path) => {
                let place = self.open(path, OFlags::PATH)?;
                let target = rustix::fs::readlinkat(&place, c"", Vec::new()).map_err(errno)?;
                Answer::Target(target.into_bytes())
            }
            Question::Piece(path, number) => {
                let known = matches!(&self.open, Some((open, _)) if open == path);
                if !known {
                    let opened = self.open(path, OFlags::RDONLY)?;
                    if u32::from(look(&opened, b"")?.stx_mode) & kind::MASK != kind::FILE {
                        return Err(Errno::ACCESS);
                    }
                    self.open = Some((path.clone(), opened.into()));
                }
                let (_, file) = self.open.as_ref().ok_or(Errno::IO)?;
                let mut bytes = vec![0; PIECE as usize];
                let mut done = 0;
                while done < bytes.len() {
                    match file.read_at(&mut bytes[done..], number * PIECE + done as u64) {
                        Ok(0) => break,
                        Ok(count) => done += count,
                        Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                        Err(e) => return Err(io_errno(&e)),
                    }
                }
                bytes.truncate(done);
                Answer::Piece(self.answers.kept().keep(&bytes)?)
            }
        })
    }

    /// What is at a path.
    ///
    /// # Errors
    /// The host's, or EIO where a replay asks for what was not asked for.
    pub fn attributes(&mut self, path: &[u8]) -> Result<Attributes, Errno> {
        match self.ask(Question::Attributes(path.into()))? {
            Answer::Attributes(attributes) => Ok(attributes),
            _ => Err(Errno::IO),
        }
    }

    /// The names in a folder.
    ///
    /// # Errors
    /// As for [`Lower::attributes`].
    pub fn names(&mut self, path: &[u8]) -> Result<Vec<Listed>, Errno> {
        match self.ask(Question::Names(path.into()))? {
            Answer::Names(names) => Ok(names),
            _ => Err(Errno::IO),
        }
    }

    /// Where a link leads.
    ///
    /// # Errors
    /// As for [`Lower::attributes`].
    pub fn target(&mut self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        match self.ask(Question::Target(path.into()))? {
            Answer::Target(target) => Ok(target),
            _ => Err(Errno::IO),
        }
    }

    /// Bytes of a file, from a multiple of [`PIECE`] on; fewer than that at its end.
    ///
    /// # Errors
    /// As for [`Lower::attributes`].
    pub fn piece(&mut self, path: &[u8], number: u64) -> Result<Arc<Vec<u8>>, Errno> {
        if let Some((last, at, bytes)) = &self.last
            && *at == number
            && last == path
        {
            return Ok(Arc::clone(bytes));
        }
        let Answer::Piece(kept) = self.ask(Question::Piece(path.into(), number))? else {
            return Err(Errno::IO);
        };
        let bytes = Arc::new(self.answers.kept().piece(kept)?);
        self.last = Some((path.into(), number, Arc::clone(&bytes)));
        Ok(bytes)
    }
}
