//! `minivmm replay DIR`: the machine of a recorded session, with what comes from outside taken from the directory.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use crate::address::DebugAddress;
use crate::cli::{self, Job};
use crate::config::{MachineConfig, OnPanic, SerialTarget};
use crate::error::Error;
use crate::parse::check_on_panic;
use crate::replay_options::ReplayOptions;
use crate::run;
use crate::timeline::{epochs, session::Session};

/// The session's machine. The process is in the directory then that the session was recorded in: the guest sees its kernel's
/// name as it was given.
///
/// # Errors
/// One line: the directory is no recorded session, or one that this program cannot run.
pub fn prepare(options: &ReplayOptions) -> Result<MachineConfig, Error> {
    let failed = |source| Error::File {
        option: "replay",
        path: options.folder().into(),
        source,
    };
    let absolute = |path: &PathBuf| std::path::absolute(path).map_err(failed);
    let looked_at = options.gdb.is_some() || options.control.is_some();
    check_on_panic(options.on_panic.as_ref(), looked_at, "--gdb or --control")?;
    let (session, ..) = Session::open(options.folder())?;
    let replay = absolute(&options.folder().to_path_buf())?;
    let serial = match &options.serial {
        SerialTarget::File(path) => SerialTarget::File(absolute(path)?),
        other => other.clone(),
    };
    let control = options.control.as_ref().map(absolute).transpose()?;
    let qmp = options.qmp.as_ref().map(absolute).transpose()?;
    let gdb = match &options.gdb {
        Some(DebugAddress::Unix(path)) => Some(DebugAddress::Unix(absolute(path)?)),
        other => other.clone(),
    };
    let on_panic = match &options.on_panic {
        Some(OnPanic::Dump(path)) => Some(OnPanic::Dump(absolute(path)?)),
        other => other.clone(),
    };
    let symbols = options.trace.symbols().map(Path::to_path_buf);
    let symbols = symbols.as_ref().map(absolute).transpose()?;
    let mut trace = options.trace.clone().options()?;
    if let Some(trace) = &mut trace {
        trace.folder = absolute(&trace.folder)?;
        // So that parts of it, joined, are the same.
        trace.cuts = epochs::list(options.folder()).map_err(failed)?;
    }
    let directory = session.directory();
    env::set_current_dir(&directory).map_err(|source| {
        let directory = directory.display();
        failed(io::Error::other(format!(
            "recorded in {directory}, where this program cannot go: {source}"
        )))
    })?;
    let words = std::iter::once(OsString::from("minivmm")).chain(session.arguments());
    let not_ours = |why: &str| {
        failed(io::Error::other(format!(
            "its command line is none that this program takes: {why}"
        )))
    };
    let config = match cli::parse(words).map_err(|error| not_ours(&error.to_string()))? {
        Job::Run { config, .. } => config,
        Job::Command(command) => Box::new(run::replayed(&command, Session::packed(&replay)?)?),
        _ => return Err(not_ours("it runs no machine")),
    };
    Ok(MachineConfig {
        symbols: symbols.or_else(|| config.symbols.clone()),
        serial,
        control,
        qmp,
        trace,
        gdb,
        sandbox: options.sandbox == crate::jail::Sandbox::On,
        allow_write: options.allow_write.iter().map(absolute).collect::<Result<_, _>>()?,
        gdb_allow_files: options.gdb_allow_files,
        paused: options.paused,
        replay: Some(replay),
        record: None,
        epochs: None,
        reverse: options.reverse.then(|| crate::config::ReverseOptions {
            memory: options.reverse_memory,
            ..crate::config::ReverseOptions::default()
        }),
        seed: session.seed,
        rtc_base: session.rtc_base,
        on_panic,
        max_instructions: options.max_instructions,
        timeout: options.timeout,
        stats: options.stats,
        ..*config
    })
}

/// The hash of a session's machine at its start.
///
/// # Errors
/// The directory is no recorded session.
pub fn start_of(folder: &Path) -> Result<u64, Error> {
    Session::open(folder).map(|(session, ..)| session.start())
}
