//! What `minivmm replay` takes.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use serde::{Deserialize, Serialize};

use crate::address::DebugAddress;
use crate::config::{OnPanic, SerialTarget};
use crate::matrix::plan::{Shard, parse_shard};

/// The options of a replay that has one machine, from its beginning to its end.
const WHOLE: [&str; 9] = [
    "control",
    "qmp",
    "reverse",
    "gdb",
    "paused",
    "on_panic",
    "max_instructions",
    "timeout",
    "stats",
];

/// Steps of a session: `FROM-TO`, or `FROM-` to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Of the snapshot at which it begins; 0: at the session's beginning.
    pub from: u64,
    /// Of the snapshot at which it ends.
    pub to: Option<u64>,
}

/// No part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not FROM-TO or FROM-, in steps")]
pub struct NoPart;

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.to {
            Some(to) => write!(f, "{}-{to}", self.from),
            None => write!(f, "{}-", self.from),
        }
    }
}

/// Reads a part.
///
/// # Errors
/// It is none.
pub fn parse_part(text: &str) -> Result<Part, NoPart> {
    let (from, to) = text.split_once('-').ok_or(NoPart)?;
    let from = from.parse().map_err(|_| NoPart)?;
    let to = match to {
        "" => None,
        to => Some(to.parse().ok().filter(|to| *to > from).ok_or(NoPart)?),
    };
    Ok(Part { from, to })
}

/// What `minivmm replay` does besides replaying.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum ReplayCommand {
    /// Put together what shards have left: the trace, the counts, what the guest has sent
    Merge(Merge),
}

/// What `minivmm replay merge` takes.
#[derive(Clone, Debug, clap::Args)]
pub struct Merge {
    /// Directories of `--parts`, which are taken apart
    #[arg(required = true, value_name = "DIR")]
    pub(crate) parts: Vec<PathBuf>,
    /// The trace of the whole session, a new directory, where the shards had --trace
    #[arg(long, value_name = "DIR")]
    pub(crate) trace: Option<PathBuf>,
    /// Replace a trace that is in the directory already
    #[arg(long, requires = "trace")]
    pub(crate) force: bool,
    /// Where what the guest has sent goes: stdio, file:PATH or null
    #[arg(long, value_name = "TARGET", default_value = "stdio", value_parser = OsStringValueParser::new().try_map(crate::parse::parse_serial))]
    pub(crate) serial: SerialTarget,
    /// Print what was counted, where the shards had --count
    #[arg(long)]
    pub(crate) count: bool,
}

/// How a session is run again. What the machine is made of comes with it.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct ReplayOptions {
    /// What is done besides replaying.
    #[command(subcommand)]
    pub command: Option<ReplayCommand>,
    /// The directory that `--record` made
    #[arg(value_name = "DIR", required = true)]
    folder: Option<PathBuf>,
    /// Cut the session at its snapshots, and replay so many of its parts at once
    #[arg(long, short = 'j', value_name = "N", conflicts_with_all = WHOLE)]
    pub(crate) jobs: Option<NonZero<usize>>,
    /// Replay the Kth of N shares of the parts only, as 2/5, and leave what comes of them in --parts, for `minivmm replay merge`
    #[arg(long, value_name = "K/N", value_parser = parse_shard, requires = "parts", conflicts_with_all = WHOLE)]
    pub(crate) shard: Option<Shard>,
    /// Where what comes of the parts is left
    #[arg(long, value_name = "DIR", conflicts_with_all = WHOLE)]
    pub(crate) parts: Option<PathBuf>,
    /// Count what is executed: branches, calls, system calls, exceptions and interrupts by vector
    #[arg(long, conflicts_with = "trace", conflicts_with_all = WHOLE)]
    pub(crate) count: bool,
    /// Replay this part, in steps
    #[arg(long, value_name = "FROM-TO", hide = true, value_parser = parse_part)]
    pub part: Option<Part>,
    /// Leave snapshots in the session
    #[arg(long, hide = true)]
    pub(crate) keep: bool,
    /// Where the serial port's output goes: stdio, file:PATH or null; what comes in is the session's
    #[arg(long, value_name = "TARGET", default_value = "stdio", value_parser = OsStringValueParser::new().try_map(crate::parse::parse_serial))]
    pub(crate) serial: SerialTarget,
    /// A socket that takes commands while the guest runs
    #[arg(long, value_name = "unix:PATH", value_parser = OsStringValueParser::new().try_map(crate::parse::parse_control))]
    pub(crate) control: Option<PathBuf>,
    /// A socket that speaks QMP, for drgn
    #[arg(long, value_name = "unix:PATH", value_parser = OsStringValueParser::new().try_map(crate::parse::parse_control))]
    pub(crate) qmp: Option<PathBuf>,
    /// Keep what it takes to go back to any instruction
    #[arg(long)]
    pub(crate) reverse: bool,
    /// What --reverse may take of memory
    #[arg(long, value_name = "SIZE", default_value = "1G", requires = "reverse", value_parser = crate::parse::parse_size, allow_negative_numbers = true)]
    pub(crate) reverse_memory: u64,
    // The brackets are the help's, which says what may be left out.
    #[allow(rustdoc::broken_intra_doc_links)]
    /// Where gdb can connect: tcp:[HOST:]PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(crate::parse::parse_gdb))]
    pub(crate) gdb: Option<DebugAddress>,
    /// Let monitor commands of a gdb that is connected over TCP write files, too, as one over a socket may
    #[arg(long, requires = "gdb")]
    pub(crate) gdb_allow_files: bool,
    /// Wait for gdb before the first instruction
    #[arg(long, requires = "gdb")]
    pub(crate) paused: bool,
    /// Give up what the process does not need once the machine is built
    #[arg(long, value_enum, default_value_t = crate::jail::Sandbox::On)]
    pub(crate) sandbox: crate::jail::Sandbox,
    /// A folder that may be written to, and read, when a command says so as the guest runs (repeatable)
    #[arg(long, value_name = "DIR")]
    pub(crate) allow_write: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) trace: crate::trace_options::Arguments,
    /// What to do when the guest's Linux panics, as for a machine; what the session was recorded with is not asked
    #[arg(long, value_name = "exit|stop|dump=FILE", value_parser = OsStringValueParser::new().try_map(crate::parse::parse_on_panic))]
    pub(crate) on_panic: Option<OnPanic>,
    /// Stop after N instructions, with status 8
    #[arg(long, value_name = "N", value_parser = crate::parse::parse_count, allow_negative_numbers = true)]
    pub(crate) max_instructions: Option<u64>,
    /// Stop after so many seconds of wall time, with status 8
    #[arg(long, value_name = "SECONDS", value_parser = crate::parse::parse_seconds, allow_negative_numbers = true)]
    pub(crate) timeout: Option<Duration>,
    /// Print steps, MIPS, exits, wall and virtual time at the end
    #[arg(long)]
    pub(crate) stats: bool,
    /// Say more on stderr (repeat for more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

impl ReplayOptions {
    /// The session's directory.
    pub fn folder(&self) -> &Path {
        self.folder.as_deref().unwrap_or(Path::new(""))
    }

    /// The session is cut into parts.
    pub fn is_cut(&self) -> bool {
        self.jobs.is_some() || self.shard.is_some() || self.parts.is_some() || self.count
    }
}
