//! `minivmm replay DIR --jobs N`: a session is cut at its snapshots, its parts are replayed side by side, and what comes of them is put
//! together.
//!
//! Each part is replayed by a process of its own, as the cells of a matrix are: it has its own jail, engine and code memory, a fault
//! in one ends no other, and the same words serve other machines (`--shard`). This process looks at nothing that a guest made but to
//! pass it on.

pub mod count;
pub mod part;

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, Write},
    num::NonZero,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use trace::{join, regular};

use self::{count::Counts, part::Done};
use crate::{
    config::SerialTarget,
    error::{Error, Status},
    matrix::cell::program,
    replay_options::{Merge, Part, ReplayOptions},
    timeline::{epochs, session::Session},
};

/// The longest file of a part's that is read.
const LONGEST: u64 = 1 << 20;

/// A part costs about 0.15 s of its own: RAM is read from the snapshots, and code is translated again. So there are no more of them for
/// each job than keep all jobs busy to the end, and the last ones are the shortest.
const PARTS_A_JOB: usize = 4;
/// The same for each shard, which may have several jobs.
const PARTS_A_SHARD: usize = 16;

/// Parts that cannot be replayed or put together.
#[derive(Debug, thiserror::Error)]
pub enum PartsError {
    /// A part ended otherwise than the session.
    #[error("the part {part} failed: {why}")]
    Failed {
        /// The part.
        part: Part,
        /// What it said.
        why: String,
    },
    /// A part is missing.
    #[error(
        "the part that begins at step {0} is missing: the shard that has it has not run, or its directory is not here"
    )]
    Missing(u64),
    /// Parts of several sessions.
    #[error("{} is of another session than the others", .0.display())]
    Another(PathBuf),
    /// A file is no part's.
    #[error("{} is not what a shard wrote", .0.display())]
    NoPart(PathBuf),
    /// A session that a shard cannot cut.
    #[error("the session has no snapshots yet: replay it once with --jobs alone, which leaves them")]
    NoSnapshots,
}

fn say(text: &str) {
    let _ = writeln!(io::stderr(), "minivmm: {}", text.replace(char::is_control, "?"));
}

/// A file of a part in the folder of parts.
fn file(parts: &Path, part: Part, what: &str) -> PathBuf {
    parts.join(format!("{:020}.{what}", part.from))
}

/// Cuts a session at its snapshots, or at some of them, into so many rounds of a part for each worker. A round has half of what is left, and
/// the last one all of it: whoever is late then is late by a short part.
pub(crate) fn cut(snapshots: &[u64], workers: usize, rounds: usize) -> Vec<Part> {
    let epochs = snapshots.len() + 1;
    let mut ends = Vec::new();
    let mut next = 0;
    for round in 1..=rounds {
        let left = epochs - next;
        let taken = if round == rounds { left } else { left / 2 };
        let parts = taken.min(workers);
        ends.extend((1..=parts).map(|part| next + part * taken / parts));
        next += taken;
    }
    // The part that begins with this epoch begins at the snapshot before it.
    let step = |epoch: usize| epoch.checked_sub(1).and_then(|before| snapshots.get(before)).copied();
    let begins = std::iter::once(0).chain(ends.iter().copied());
    begins
        .zip(&ends)
        .map(|(from, &to)| Part {
            from: step(from).unwrap_or(0),
            to: step(to),
        })
        .collect()
}

/// What is wanted of the parts.
struct Wanted<'a> {
    trace: Option<&'a Path>,
    force: bool,
    serial: &'a SerialTarget,
    count: bool,
}

/// A folder that goes away with its owner, unless it is to stay.
struct Scratch {
    folder: PathBuf,
    stays: bool,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.stays {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

fn made(option: &'static str, folder: &Path) -> Result<(), Error> {
    regular::create_private_dir(folder).map_err(|source| Error::File {
        option,
        path: folder.into(),
        source,
    })
}

/// Does what `minivmm replay` asks for with `--jobs` or `--shard`.
///
/// # Errors
/// One line: no session, or a part that failed.
pub fn run(options: &ReplayOptions) -> Result<Status, Error> {
    let session = options.folder();
    let (_, _, head, _) = Session::open(session)?;
    let failed = |source| Error::File {
        option: "replay",
        path: session.into(),
        source,
    };
    let cuts = epochs::list(session).map_err(failed)?;
    let cuts: Vec<u64> = cuts.into_iter().filter(|steps| *steps < head.steps).collect();
    let trace = options.trace.clone().options()?;
    let without = |what: &str| Error::Usage(format!("{what}: a part knows nothing of the others: leave out --jobs"));
    if let Some(trace) = &trace {
        let refused = [
            (trace.start.is_some(), "--trace-start"),
            (trace.stop.is_some(), "--trace-stop"),
            (trace.buffer.is_some(), "--trace-buffer"),
            (trace.limit.is_some(), "--trace-limit"),
        ];
        if let Some((_, option)) = refused.iter().find(|(wanted, _)| *wanted) {
            return Err(without(option));
        }
    }
    let jobs = options.jobs.map_or(1, NonZero::get);
    // The shards of a session are the same whatever the jobs of each.
    let (workers, rounds) = options
        .shard
        .map_or((jobs, PARTS_A_JOB), |shard| (shard.count, PARTS_A_SHARD));
    let all = cut(&cuts, workers, rounds);
    let asked = format!("replay {}", session.display());
    let keep = cuts.is_empty();
    if keep && options.shard.is_some() {
        return Err(Error::option(asked)(PartsError::NoSnapshots));
    }
    if keep {
        say(&format!(
            "{asked}: the session has no snapshots: it is replayed once in series, which leaves them"
        ));
    }
    let scratch = scratch(options, trace.as_ref().map(|trace| trace.folder.as_path()))?;
    let mine = |number: &usize| {
        let shard = options.shard;
        shard.is_none_or(|shard| number % shard.count == shard.index - 1)
    };
    let parts: Vec<Part> = (0..)
        .zip(&all)
        .filter(|(n, _)| mine(n))
        .map(|(_, part)| *part)
        .collect();
    let filters: Option<Vec<String>> = trace
        .as_ref()
        .map(|trace| trace.filters.iter().map(ToString::to_string).collect());
    replay(options, &parts, jobs, filters.as_deref(), keep, &scratch.folder).map_err(Error::option(asked.clone()))?;
    if let Some(shard) = options.shard {
        say(&format!(
            "{asked}: shard {shard}: {} of {} parts",
            parts.len(),
            all.len()
        ));
        return Ok(Status::Done);
    }
    let wanted = Wanted {
        trace: trace.as_ref().map(|trace| trace.folder.as_path()),
        force: trace.as_ref().is_some_and(|trace| trace.force),
        serial: &options.serial,
        count: options.count,
    };
    conclude(&[&scratch.folder], &wanted, &asked)
}

/// Where the parts are: what `--parts` says, or a folder beside the trace, so that files are not copied from one disk to another.
fn scratch(options: &ReplayOptions, trace: Option<&Path>) -> Result<Scratch, Error> {
    if let Some(folder) = &options.parts {
        if !folder.is_dir() {
            made("--parts", folder)?;
        }
        return Ok(Scratch {
            folder: folder.clone(),
            stays: true,
        });
    }
    let name = format!("minivmm-parts-{}", std::process::id());
    let folder = match trace {
        Some(trace) => {
            let mut name: OsString = trace.as_os_str().into();
            name.push(".parts");
            name.into()
        }
        None => std::env::temp_dir().join(name),
    };
    made("--jobs", &folder)?;
    Ok(Scratch { folder, stays: false })
}

/// Replays parts, so many at once.
fn replay(
    options: &ReplayOptions,
    parts: &[Part],
    jobs: usize,
    filters: Option<&[String]>,
    keep: bool,
    folder: &Path,
) -> Result<(), PartsError> {
    let failed = |part: Part| {
        move |error: &dyn std::fmt::Display| PartsError::Failed {
            part,
            why: error.to_string(),
        }
    };
    let one = |part: Part| -> Result<(), PartsError> {
        let program = program().map_err(|error| failed(part)(&error))?;
        let mut command = Command::new(program);
        let mut serial = OsString::from("file:");
        serial.push(file(folder, part, "serial"));
        command.arg("replay").arg(options.folder());
        command.args(["--part", &part.to_string(), "--serial"]).arg(serial);
        command.args(["--sandbox", options.sandbox.name()]);
        if options.count {
            command.arg("--count");
        }
        if keep {
            command.arg("--keep");
        }
        if let Some(filters) = filters {
            command.arg("--trace").arg(file(folder, part, "trace")).arg("--force");
            for filter in filters {
                command.args(["--trace-filter", filter]);
            }
        }
        let output = command.stdin(Stdio::null()).output();
        let output = output.map_err(|error| failed(part)(&error))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let mut said = errors
            .lines()
            .map(|line| line.strip_prefix("minivmm: ").unwrap_or(line));
        if !output.status.success() || output.stdout.is_empty() {
            let why = said.next_back().unwrap_or("it said nothing");
            return Err(failed(part)(&why));
        }
        let done: Done = serde_json::from_slice(&output.stdout).map_err(|error| failed(part)(&error))?;
        if let (Some(_), Some(why)) = (part.to, &done.message) {
            return Err(failed(part)(why));
        }
        said.for_each(say);
        let text = file(folder, part, "json");
        regular::write_private(&text, &output.stdout).map_err(|error| failed(part)(&error))
    };
    let (next, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    // Of those that fail side by side the last one is told: it starts from what the one before it only compares with.
    let last: Mutex<Option<(u64, PartsError)>> = Mutex::new(None);
    let work = || {
        while !over.load(Ordering::Relaxed)
            && let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed))
        {
            if let Err(error) = one(*part) {
                over.store(true, Ordering::Relaxed);
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.as_ref().is_none_or(|(from, _)| *from < part.from) {
                    *last = Some((part.from, error));
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..jobs.min(parts.len()) {
            // Where the system has no more threads, fewer do it.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    match last.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

/// What the parts in a folder came to.
fn read(folder: &Path) -> Result<Vec<(PathBuf, Done)>, Error> {
    let failed = |source| Error::File {
        option: "replay",
        path: folder.into(),
        source,
    };
    let mut parts = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let text = regular::open_inside(&path).and_then(|file| regular::read(file, LONGEST));
        let done = serde_json::from_slice(&text.map_err(failed)?);
        let none = |_| Error::option("replay".to_string())(PartsError::NoPart(path.clone()));
        parts.push((folder.to_path_buf(), done.map_err(none)?));
    }
    Ok(parts)
}

/// Puts parts together that follow each other from the session's beginning to its end.
fn conclude(folders: &[&Path], wanted: &Wanted<'_>, asked: &str) -> Result<Status, Error> {
    let mut all = Vec::new();
    for folder in folders {
        all.extend(read(folder)?);
    }
    all.sort_by_key(|(_, done)| done.part.from);
    all.dedup_by_key(|(_, done)| done.part.from);
    let option = || Error::option(asked.to_string());
    let mut next = Some(0);
    for (folder, done) in &all {
        if done.session != all[0].1.session {
            return Err(option()(PartsError::Another(file(folder, done.part, "json"))));
        }
        match next {
            Some(from) if from == done.part.from => next = done.part.to,
            Some(from) => return Err(option()(PartsError::Missing(from))),
            None => break,
        }
    }
    if let Some(from) = next {
        return Err(option()(PartsError::Missing(from)));
    }
    if let Some(trace) = wanted.trace {
        let parts: Vec<PathBuf> = all
            .iter()
            .map(|(folder, done)| file(folder, done.part, "trace"))
            .collect();
        join::join(&parts, trace, wanted.force).map_err(Error::option(format!("--trace {}", trace.display())))?;
    }
    serial(&all, wanted.serial)?;
    let mut counts = Counts::default();
    all.iter()
        .filter_map(|(_, done)| done.counts.as_ref())
        .for_each(|part| counts.add(part));
    let Some((_, last)) = all.last() else {
        return Ok(Status::Done);
    };
    if wanted.count {
        let text = format!(
            "{:>16} steps\n{:>16} instructions\n{counts}",
            last.steps, last.instructions
        );
        let written = io::stdout().write_all(text.as_bytes());
        written.map_err(|source| Error::File {
            option: "--count",
            path: "/dev/stdout".into(),
            source,
        })?;
    }
    if let Some(message) = &last.message {
        say(message);
    }
    Ok(Status::Command(last.status as u8))
}

/// Passes on what the guest has sent.
fn serial(all: &[(PathBuf, Done)], target: &SerialTarget) -> Result<(), Error> {
    let mut out: Box<dyn Write> = match target {
        SerialTarget::Stdio => Box::new(io::stdout().lock()),
        SerialTarget::File(path) => Box::new(File::create(path).map_err(|source| Error::File {
            option: "--serial",
            path: path.clone(),
            source,
        })?),
        _ => return Ok(()),
    };
    for (folder, done) in all {
        let path = file(folder, done.part, "serial");
        let copied = regular::open_inside(&path).and_then(|mut file| io::copy(&mut file, &mut out));
        match copied {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            copied => copied.map(drop).map_err(|source| Error::File {
                option: "--serial",
                path,
                source,
            })?,
        }
    }
    Ok(())
}

/// Does what `minivmm replay merge` asks for.
///
/// # Errors
/// One line: parts that are missing or damaged.
pub fn merge(options: &Merge) -> Result<Status, Error> {
    let folders: Vec<&Path> = options.parts.iter().map(PathBuf::as_path).collect();
    let wanted = Wanted {
        trace: options.trace.as_deref(),
        force: options.force,
        serial: &options.serial,
        count: options.count,
    };
    conclude(&folders, &wanted, "replay merge")
}

#[cfg(test)]
#[path = "parts_test.rs"]
mod tests;
