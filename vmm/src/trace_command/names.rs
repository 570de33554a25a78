//! The names that go with a trace: of its own, or of a file; and those of the users' programs that are given.

use std::{
    env,
    path::{Path, PathBuf},
};

use trace::{
    Trace,
    format::GuestSources,
    linux::{Recorded, RecordedGuests},
    symbols::{GuestFiles, Origin, SymbolFile, SymbolTable, SymbolsError},
    view::{Names, Program},
};

use super::{arguments::Part, output};
use crate::{error::Error, parse::parse_u64};

/// The folder in the trace's directory.
pub const LINUX: &str = "linux";

/// Opens a trace with its names, and those of the programs that its guest ran.
///
/// # Errors
/// The trace or the symbols cannot be used.
pub fn open_with_programs(dir: &Path, part: &Part) -> Result<(Trace, Names), Error> {
    let (trace, names) = without_guests(dir, part.symbols.as_deref(), &part.programs)?;
    let mut files = GuestFiles::of(&trace.header().files);
    for path in &part.symfs {
        files = match path.metadata() {
            Ok(found) if found.is_dir() => files.with_root(path),
            Ok(_) => files.with_initrd(path),
            Err(source) => {
                return Err(Error::File {
                    option: "--symfs",
                    path: path.clone(),
                    source,
                });
            }
        };
    }
    for dir in debug_dirs() {
        files = files.with_build_ids(&dir);
    }
    let names = with_guests(names, dir, part.symbols_guest.as_deref())?;
    let names = names.with_mappings(trace.mappings(), &mut files);
    for line in &files.complaints {
        output::say(&output::printable(line));
    }
    Ok((trace, names))
}

/// Adds what is known of the guests of a hypervisor in the machine.
fn with_guests(names: Names, dir: &Path, symbols: Option<&Path>) -> Result<Names, Error> {
    let read = RecordedGuests::read(&dir.join(LINUX));
    let mut guests = read.map_err(|source| Error::File {
        option: "trace",
        path: dir.join(LINUX),
        source,
    })?;
    let Some(path) = symbols else {
        return Ok(names.with_guests(guests, SymbolTable::new()));
    };
    let failed = |source| Error::Symbols {
        path: path.into(),
        source,
    };
    let (mut given, mut other) = (0, None);
    for guest in guests.guests.iter_mut().filter(|guest| !guest.banner.is_empty()) {
        let origin = Origin {
            build_id: guest.build_id.as_deref(),
            slide: Some(guest.slide),
            symbols: Some(&guest.symbols),
        };
        // Of several guests some may have another kernel.
        match SymbolFile::read(path).map_err(failed)?.resolve(origin) {
            Ok(symbols) => (guest.symbols, given) = (symbols, given + 1),
            Err(error) => other = Some(error),
        }
    }
    if let Some(error) = other.filter(|_| given == 0) {
        return Err(failed(error));
    }
    let unknown = SymbolFile::read(path).map_err(failed)?;
    let nothing = Origin {
        build_id: None,
        slide: None,
        symbols: None,
    };
    let unknown = unknown.resolve(nothing).map_err(failed)?;
    Ok(names.with_guests(guests, unknown))
}

/// Where symbols are kept by build ID: perf's cache, and what debug packages install.
fn debug_dirs() -> Vec<PathBuf> {
    let home = env::var_os("HOME").map(|home| PathBuf::from(home).join(".debug"));
    home.into_iter().chain([PathBuf::from("/usr/lib/debug")]).collect()
}

/// Folders of programs in a root directory: of the host's own, nothing else is looked at.
const PROGRAMS: [&str; 8] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "opt", "nix/store"];

/// Where a guest's programs are looked for, so that the jail lets it.
pub fn places(sources: &GuestSources, part: &Part) -> Vec<PathBuf> {
    let mut places = part.symfs.clone();
    places.extend(debug_dirs());
    places.extend(sources.initrd.iter().chain(&sources.inject).map(PathBuf::from));
    for share in sources.shares.iter().map(Path::new) {
        match share.parent() {
            Some(_) => places.push(share.into()),
            None => places.extend(PROGRAMS.iter().map(|folder| share.join(folder))),
        }
    }
    places
}

/// Opens a trace with its names.
///
/// # Errors
/// The trace or the symbols cannot be used.
pub fn open(dir: &Path, symbols: Option<&Path>, programs: &[String]) -> Result<(Trace, Names), Error> {
    let (trace, names) = without_guests(dir, symbols, programs)?;
    Ok((trace, with_guests(names, dir, None)?))
}

fn without_guests(dir: &Path, symbols: Option<&Path>, programs: &[String]) -> Result<(Trace, Names), Error> {
    let trace = Trace::open(dir)?;
    let recorded = Recorded::read(&dir.join(LINUX)).map_err(|source| Error::File {
        option: "trace",
        path: dir.join(LINUX),
        source,
    })?;
    let mut recorded = recorded.unwrap_or_default();
    let own = std::mem::take(&mut recorded.symbols);
    let programs = programs
        .iter()
        .map(|text| program(text))
        .collect::<Result<Vec<_>, _>>()?;
    if !programs.is_empty() && recorded.tasks.is_empty() {
        return Err(Error::Usage(
            "--symbols-user: the trace has no names of processes (of a Linux guest with BTF it would)".into(),
        ));
    }
    let symbols = match symbols {
        None => own,
        Some(path) => {
            let linux = !recorded.banner.is_empty();
            let origin = Origin {
                build_id: recorded.build_id.as_deref(),
                slide: linux.then_some(recorded.slide),
                symbols: linux.then_some(&own),
            };
            let resolved = SymbolFile::read(path).and_then(|file| file.resolve(origin));
            resolved.map_err(|source| Error::Symbols {
                path: path.into(),
                source,
            })?
        }
    };
    let switches = trace.thread_switches();
    let names = Names::new(symbols, recorded)
        .with_programs(programs)
        .with_threads(switches);
    Ok((trace, names))
}

/// What `--symbols-user` names.
#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    path: PathBuf,
    comm: String,
    at: Option<u64>,
}

/// Bytes of a process's name in Linux, less the 0 at its end.
const COMM: usize = 15;

/// What is wrong with a value of `--symbols-user`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum WantedError {
    #[error("at={0}: not an address")]
    Address(String),
    #[error("names no file")]
    NoFile,
}

impl Wanted {
    fn parse(text: &str) -> Result<Wanted, WantedError> {
        let (mut rest, mut comm, mut at) = (text, None, None);
        while let Some((before, option)) = rest.rsplit_once(',') {
            if let Some(name) = option.strip_prefix("name=") {
                comm = Some(name);
            } else if let Some(address) = option.strip_prefix("at=") {
                at = Some(parse_u64(address).ok_or_else(|| WantedError::Address(address.into()))?);
            } else {
                break;
            }
            rest = before;
        }
        let path = PathBuf::from(rest);
        let file = path.file_name().ok_or(WantedError::NoFile)?;
        let name = comm.map_or(file.to_string_lossy(), Into::into);
        let bytes = name.char_indices().map(|(at, c)| at + c.len_utf8());
        let len = bytes.take_while(|end| *end <= COMM).last().unwrap_or(0);
        Ok(Wanted {
            comm: name[..len].into(),
            path,
            at,
        })
    }
}

/// The file that a value of `--symbols-user` names.
pub fn path_of(text: &str) -> Option<PathBuf> {
    Wanted::parse(text).ok().map(|wanted| wanted.path)
}

fn program(text: &str) -> Result<Program, Error> {
    let wanted = Wanted::parse(text).map_err(Error::option(format!("--symbols-user {text}")))?;
    let failed = |source: SymbolsError| Error::ProgramSymbols {
        path: wanted.path.clone(),
        source,
    };
    let file = wanted.path.file_name().unwrap_or_default().to_string_lossy();
    let symbols = SymbolFile::read_program(&wanted.path, wanted.at, &file).map_err(failed)?;
    Ok(Program {
        comm: wanted.comm,
        symbols,
    })
}

#[cfg(test)]
#[path = "names_test.rs"]
mod tests;
