//! What `--trace` and its companions ask for.

use std::path::PathBuf;

use super::format::Header;
use super::record::CTL;
use crate::error::Error;

/// What is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// CPL 0.
    Kernel,
    /// CPL 1 to 3.
    User,
    /// One address space: CR3 without bits 4:0.
    Cr3(u64),
    /// Linear addresses, both inclusive.
    Ip(u64, u64),
}

impl std::fmt::Display for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Filter::Kernel => f.write_str("kernel"),
            Filter::User => f.write_str("user"),
            Filter::Cr3(cr3) => write!(f, "cr3={cr3:#x}"),
            Filter::Ip(first, last) => write!(f, "ip={first:#x}-{last:#x}"),
        }
    }
}

/// What happens when the directory cannot be written any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OnError {
    /// The run ends.
    #[default]
    Stop,
    /// The guest goes on without being recorded.
    Continue,
}

/// A recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The directory, which is made.
    pub folder: PathBuf,
    /// A trace that is there already is replaced.
    pub force: bool,
    /// What is traced; everything without any.
    pub filters: Vec<Filter>,
    /// Of each vCPU, so many bytes of packets are kept: the last.
    pub buffer: Option<u64>,
    /// What happens when the directory cannot be written any more.
    pub on_error: OnError,
}

impl Options {
    /// What the trace's header says before the recording ends.
    pub fn header(&self, config: &crate::MachineConfig) -> Header {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Header {
            model: config.model.name.into(),
            tsc_khz: config.model.tsc_khz,
            cpus: usize::from(config.cpus.max(1)),
            kernel: config.kernel.display().to_string(),
            began: since.map_or(0, |since| since.as_secs()),
            filters: self.filters.iter().map(ToString::to_string).collect(),
            start: None,
            stop: None,
            buffer: self.buffer,
            rtit_ctl: CTL.into_bits(),
            end: None,
        }
    }

    /// A recording of everything.
    pub fn new(folder: impl Into<PathBuf>) -> Options {
        Options {
            folder: folder.into(),
            force: false,
            filters: Vec::new(),
            buffer: None,
            on_error: OnError::Stop,
        }
    }
}

/// The options of the command line.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    /// Record what every CPU executes, from outside, in a new directory; `minivmm trace` reads it
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,
    /// Replace a trace that is in the directory already
    #[arg(long, requires = "trace")]
    force: bool,
}

impl Arguments {
    /// What they ask for.
    ///
    /// # Errors
    /// They do not go together.
    pub fn options(self) -> Result<Option<Options>, Error> {
        let Some(folder) = self.trace else { return Ok(None) };
        Ok(Some(Options {
            force: self.force,
            ..Options::new(folder)
        }))
    }
}
