//! The snapshots of a recorded session: kept as it runs, listed, and gone on from.
//!
//! # Theory
//! What lies between two snapshots can be replayed without what was before: by somebody else, on another core or machine. So a session
//! is cut at them, into *epochs*.
//!
//! # Practice
//! There is one every so many steps. When all of them take more room than they may, every second one goes, and from then on there is
//! one every twice as many steps; its pages go to the next one.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use log::{debug, warn};
use machine::loader::size_text;
use trace::regular;

use super::epoch_file::{self, EpochError, EpochFile, Header, PAGE, hash_of};
use crate::{config::EpochOptions, vm::Vm};

/// The directory in a session's.
const FOLDER: &str = "epochs";
/// The most files that are looked at.
const MOST: usize = 1 << 16;

/// The directory of a session's snapshots.
pub fn folder_of(session: &Path) -> PathBuf {
    session.join(FOLDER)
}

fn path_of(session: &Path, steps: u64) -> PathBuf {
    folder_of(session).join(format!("{steps:020}"))
}

/// The steps of a session's snapshots, in order.
///
/// # Errors
/// The directory is there and cannot be read.
pub fn list(session: &Path) -> io::Result<Vec<u64>> {
    let entries = match fs::read_dir(folder_of(session)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut steps = Vec::new();
    for entry in entries.take(MOST) {
        let name = entry?.file_name();
        // What was being written when the recorder was killed has another name.
        let number = name.to_str().filter(|name| name.len() == 20);
        steps.extend(
            number
                .and_then(|name| name.parse::<u64>().ok())
                .filter(|steps| *steps > 0),
        );
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Puts a machine whose RAM is all zero, and which has not run, to a snapshot of a session with this hash at its start.
///
/// # Errors
/// See [`EpochError`]. The machine cannot be used then.
pub fn restore(session: &Path, hash: u64, steps: u64, vm: &mut Vm) -> Result<Header, EpochError> {
    let before = list(session)?.into_iter().filter(|step| *step <= steps);
    let mut seen = BTreeSet::new();
    let (mut last, mut next) = (None, steps);
    for step in before.rev() {
        if step != next {
            break;
        }
        let file = EpochFile::open(&path_of(session, step))?;
        if file.header.session != hash || file.header.steps != step {
            return Err(EpochError::Session);
        }
        next = file.header.previous;
        let is_new = |page: &&epoch_file::Page| seen.insert(page.gpa) && page.index.is_some();
        let pages: Vec<_> = file.pages.iter().filter(is_new).copied().collect();
        file.read(&pages, |page, bytes| {
            vm.load(page.gpa, bytes).map_err(|_| EpochError::Damaged)
        })?;
        last.get_or_insert(file);
    }
    match last {
        Some(file) if next == 0 => {
            vm.take_exact(&file.state)?;
            Ok(file.header)
        }
        _ => Err(EpochError::Missing(next)),
    }
}

/// Whether a machine that has come to a snapshot's step is what it was when that was written: registers and devices, and the pages that
/// had changed since the snapshot before.
///
/// # Errors
/// See [`EpochError`].
pub fn is_at(session: &Path, steps: u64, vm: &mut Vm) -> Result<bool, EpochError> {
    let file = EpochFile::open(&path_of(session, steps))?;
    vm.bring_up_to_date();
    if (file.header.steps, file.header.hash) != (vm.steps(), vm.hash_unobserved()) {
        return Ok(false);
    }
    let mut bytes = [0; PAGE];
    for page in &file.pages {
        if vm.read_physical(page.gpa, &mut bytes).is_err() || hash_of(&bytes) != page.hash {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Keeps a session's snapshots as it runs.
#[derive(Debug)]
pub struct Keeper {
    session: PathBuf,
    /// The hash of the machine at the session's start.
    start: u64,
    limit: u64,
    spacing: u64,
    /// The step of the next one.
    next: u64,
    /// Those that are there, and their sizes.
    files: BTreeMap<u64, u64>,
}

impl Keeper {
    /// Of a session that begins with this hash; nothing is written before the first snapshot is.
    pub fn new(session: &Path, start: u64, options: EpochOptions) -> Keeper {
        let spacing = options.spacing.max(1);
        Keeper {
            session: session.into(),
            start,
            limit: options.limit,
            spacing,
            next: spacing,
            files: BTreeMap::new(),
        }
    }

    /// The step of the next snapshot.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// How many snapshots there are, and how many bytes they take.
    pub fn kept(&self) -> (usize, u64) {
        (self.files.len(), self.files.values().sum())
    }

    /// No snapshot is to be at this step, or before.
    pub fn pass(&mut self, steps: u64) {
        self.next = (steps / self.spacing + 1).saturating_mul(self.spacing);
    }

    /// Writes the machine's state, and makes room for it. `false`: it takes more room than all of them may, and none is there any more.
    ///
    /// # Errors
    /// The directory cannot be written, or a disk's overlay cannot be read.
    pub fn keep(&mut self, vm: &mut Vm, logged: usize) -> Result<bool, EpochError> {
        vm.bring_up_to_date();
        let steps = vm.steps();
        let header = Header {
            version: env!("CARGO_PKG_VERSION").into(),
            session: self.start,
            steps,
            previous: self.files.keys().next_back().copied().unwrap_or(0),
            logged,
            hash: vm.hash_unobserved(),
        };
        let state = vm.exact_beside_ram()?;
        let first = vm.take_written();
        let memory = vm.machine().memory();
        let pages: BTreeMap<u64, Option<u64>> = match first {
            Some(written) => written.into_iter().map(|gpa| (gpa, None)).collect(),
            None => {
                let mut page = [0; PAGE];
                let touched = memory.touched().into_iter().flat_map(|range| range.step_by(PAGE));
                let mut holds = |gpa: &u64| memory.read(*gpa, &mut page).is_ok() && page != [0; PAGE];
                touched.filter(|gpa| holds(gpa)).map(|gpa| (gpa, None)).collect()
            }
        };
        match regular::create_private_dir(&folder_of(&self.session)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
        let size = epoch_file::write(&path_of(&self.session, steps), &header, &state, &pages, |gpa, bytes| {
            memory.read(gpa, bytes).map_err(|error| io::Error::other(error).into())
        })?;
        self.files.insert(steps, size);
        debug!("a snapshot at step {steps}: {size} bytes");
        while self.kept().1 > self.limit {
            if self.files.len() == 1 {
                warn!(
                    "--record: a snapshot takes {}, and no more than {} may be kept: --record-snapshots allows more",
                    size_text(size),
                    size_text(self.limit)
                );
                self.clear();
                return Ok(false);
            }
            self.thin(vm)?;
        }
        self.pass(steps);
        Ok(true)
    }

    /// Every second one goes.
    fn thin(&mut self, vm: &mut Vm) -> Result<(), EpochError> {
        self.spacing = self.spacing.saturating_mul(2);
        let odd = self.files.keys().filter(|steps| !steps.is_multiple_of(self.spacing));
        for steps in odd.copied().collect::<Vec<_>>() {
            let path = path_of(&self.session, steps);
            let next = self.files.range(steps + 1..).next().map(|(next, _)| *next);
            match next {
                Some(next) => {
                    let size = merge(&path, &path_of(&self.session, next))?;
                    self.files.insert(next, size);
                }
                // The next one that will be written has its pages, too.
                None => {
                    let pages = EpochFile::open(&path)?.pages;
                    vm.give_back_written(pages.into_iter().map(|page| page.gpa));
                }
            }
            fs::remove_file(&path)?;
            self.files.remove(&steps);
        }
        Ok(())
    }

    /// Removes those that are later than a step: the run goes another way from there.
    ///
    /// # Errors
    /// One cannot be read or removed.
    pub fn forget_after(&mut self, steps: u64, vm: &mut Vm) -> Result<(), EpochError> {
        for steps in self.files.split_off(&(steps + 1)).into_keys() {
            let path = path_of(&self.session, steps);
            // Some of its pages may have changed before.
            let pages = EpochFile::open(&path)?.pages;
            vm.give_back_written(pages.into_iter().map(|page| page.gpa));
            fs::remove_file(&path)?;
        }
        self.pass(steps);
        Ok(())
    }

    /// Removes all of them.
    pub fn clear(&mut self) {
        for steps in std::mem::take(&mut self.files).into_keys() {
            let _ = fs::remove_file(path_of(&self.session, steps));
        }
        let _ = fs::remove_dir(folder_of(&self.session));
    }
}

/// Adds the pages of a file to those of the next one, which has later contents of some. Gives that one's size.
fn merge(from: &Path, into: &Path) -> Result<u64, EpochError> {
    let (from, next) = (EpochFile::open(from)?, EpochFile::open(into)?);
    // Which of the two has the page.
    let mut pages = BTreeMap::new();
    for (file, of) in [(&from, &from.pages), (&next, &next.pages)] {
        pages.extend(of.iter().map(|page| (page.gpa, (file, *page))));
    }
    let hashes = pages.iter().map(|(gpa, (_, page))| (*gpa, Some(page.hash)));
    let hashes: BTreeMap<u64, Option<u64>> = hashes.collect();
    let header = Header {
        previous: from.header.previous,
        ..next.header.clone()
    };
    epoch_file::write(into, &header, &next.state, &hashes, |gpa, bytes| {
        bytes.fill(0);
        let Some((file, page)) = pages.get(&gpa) else {
            return Ok(());
        };
        if page.index.is_none() {
            return Ok(());
        }
        file.read(&[*page], |_, contents| {
            bytes.copy_from_slice(contents);
            Ok(())
        })
    })
}
