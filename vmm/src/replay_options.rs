//! What `minivmm replay` takes.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};

use crate::address::DebugAddress;
use crate::config::{OnPanic, SerialTarget};

/// How a session is run again. What the machine is made of comes with it.
#[derive(Clone, Debug, clap::Args)]
pub struct ReplayOptions {
    /// The directory that `--record` made
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
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
