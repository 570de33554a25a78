//! `minivmm replay DIR`: the machine of a recorded session, with what comes from outside taken from the directory.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};

use crate::address::DebugAddress;
use crate::cli::{self, Job};
use crate::config::{MachineConfig, SerialTarget};
use crate::error::Error;
use crate::timeline::session::Session;

/// How a session is run again. What the machine is made of comes with it.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The directory that `--record` made
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Where the serial port's output goes: stdio, file:PATH or null; what comes in is the session's
    #[arg(long, value_name = "TARGET", default_value = "stdio", value_parser = OsStringValueParser::new().try_map(crate::parse::parse_serial))]
    serial: SerialTarget,
    /// A socket that takes commands while the guest runs
    #[arg(long, value_name = "unix:PATH", value_parser = OsStringValueParser::new().try_map(crate::parse::parse_control))]
    control: Option<PathBuf>,
    /// Keep what it takes to go back to any instruction
    #[arg(long)]
    reverse: bool,
    /// What --reverse may take of memory
    #[arg(long, value_name = "SIZE", default_value = "1G", requires = "reverse", value_parser = crate::parse::parse_size, allow_negative_numbers = true)]
    reverse_memory: u64,
    /// Where gdb can connect: tcp:[HOST:]PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(crate::parse::parse_gdb))]
    gdb: Option<DebugAddress>,
    /// Wait for gdb before the first instruction
    #[arg(long, requires = "gdb")]
    paused: bool,
    #[command(flatten)]
    trace: crate::trace::options::Arguments,
    /// Stop after N instructions, with status 8
    #[arg(long, value_name = "N", value_parser = crate::parse::parse_count, allow_negative_numbers = true)]
    max_instructions: Option<u64>,
    /// Stop after so many seconds of wall time, with status 8
    #[arg(long, value_name = "SECONDS", value_parser = crate::parse::parse_seconds, allow_negative_numbers = true)]
    timeout: Option<Duration>,
    /// Print steps, MIPS, exits, wall and virtual time at the end
    #[arg(long)]
    stats: bool,
    /// Say more on stderr (repeat for more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// The session's machine. The process is in the directory then that the session was recorded in: the guest sees its kernel's
/// name as it was given.
///
/// # Errors
/// One line: the directory is no recorded session, or one that this program cannot run.
pub fn prepare(options: &Options) -> Result<MachineConfig, Error> {
    let failed = |source| Error::File {
        option: "replay",
        path: options.folder.clone(),
        source,
    };
    let absolute = |path: &PathBuf| std::path::absolute(path).map_err(failed);
    let (session, ..) = Session::open(&options.folder)?;
    let replay = absolute(&options.folder)?;
    let serial = match &options.serial {
        SerialTarget::File(path) => SerialTarget::File(absolute(path)?),
        other => other.clone(),
    };
    let control = options.control.as_ref().map(absolute).transpose()?;
    let gdb = match &options.gdb {
        Some(DebugAddress::Unix(path)) => Some(DebugAddress::Unix(absolute(path)?)),
        other => other.clone(),
    };
    let mut trace = options.trace.clone().options()?;
    if let Some(trace) = &mut trace {
        trace.folder = absolute(&trace.folder)?;
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
        _ => return Err(not_ours("it runs no machine")),
    };
    Ok(MachineConfig {
        serial,
        control,
        trace,
        gdb,
        paused: options.paused,
        replay: Some(replay),
        record: None,
        reverse: options.reverse.then(|| crate::config::ReverseOptions {
            memory: options.reverse_memory,
            ..crate::config::ReverseOptions::default()
        }),
        seed: session.seed,
        rtc_base: session.rtc_base,
        max_instructions: options.max_instructions,
        timeout: options.timeout,
        stats: options.stats,
        ..*config
    })
}
