//! `--trace` and its companions on the command line, and the same words in the monitor.

use std::path::{Path, PathBuf};

use clap::Parser;
use trace::{
    directory::sink::RING_LEAST,
    symbols::{SymbolFile, SymbolsError},
};

use crate::{
    error::Error,
    parse::{ValueError, one_line, parse_size, parse_u64},
    recording::{Filter, OnError, RecordingOptions, When},
};

/// The options of the command line.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    /// Record what every CPU executes, from outside, in a new directory; `minivmm trace` reads it
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,
    /// Record only the kernel, user programs, an address space, addresses, or processes of a Linux by name or number, with what the kernel does
    /// for them (repeatable: what all kinds let through; `ip` up to four times)
    #[arg(long = "trace-filter", value_name = "kernel|user|cr3=X|ip=A-B|comm=NAME|pid=N", requires = "trace", value_parser = parse_filter)]
    filters: Vec<Filter>,
    // The brackets are the help's, which says what may be left out.
    #[allow(rustdoc::broken_intra_doc_links)]
    /// Begin when this happens: an address or symbol is executed, instructions=N have retired, `hypercall`, port=P[:VALUE] is written
    #[arg(long = "trace-start", value_name = "WHEN", requires = "trace")]
    start: Option<String>,
    /// Stop when this happens; after that it may begin again
    #[arg(long = "trace-stop", value_name = "WHEN", requires = "trace")]
    stop: Option<String>,
    /// Keep the last SIZE bytes of packets of each CPU
    #[arg(long = "trace-buffer", value_name = "SIZE", requires = "trace", value_parser = parse_buffer)]
    buffer: Option<u64>,
    /// Write at most SIZE bytes of packets, code and sideband, of all CPUs together; then do as --trace-on-error says
    #[arg(long = "trace-limit", value_name = "SIZE", requires = "trace", value_parser = parse_size, allow_negative_numbers = true)]
    limit: Option<u64>,
    /// What to do when the trace cannot be written any more
    #[arg(long = "trace-on-error", value_enum, default_value_t = OnError::Stop, requires = "trace")]
    on_error: OnError,
    /// Replace a trace that is in the directory already
    #[arg(long, requires = "trace")]
    force: bool,
    /// Symbols of the guest's kernel for the monitor and for messages [default: those in its memory]: a vmlinux, a System.map, a copy of its
    /// /proc/kallsyms. Also for --trace-start and --trace-stop: then the kernel must run where the file says (nokaslr)
    #[arg(long, value_name = "FILE")]
    symbols: Option<PathBuf>,
}

/// Bytes of a process's name in Linux: `TASK_COMM_LEN` of include/linux/sched.h, less the 0 at its end.
const LONGEST_COMM: usize = 15;

/// Address ranges that a trace unit has.
const RANGES: usize = 4;

impl Arguments {
    /// The file of symbols.
    pub fn symbols(&self) -> Option<&Path> {
        self.symbols.as_deref()
    }

    /// What they ask for.
    ///
    /// # Errors
    /// They do not go together.
    pub fn options(self) -> Result<Option<RecordingOptions>, Error> {
        let Some(folder) = self.trace else { return Ok(None) };
        let count = |kind: fn(&Filter) -> bool| self.filters.iter().filter(|filter| kind(filter)).count();
        if count(|filter| matches!(filter, Filter::Cr3(_))) > 1 {
            return Err(Error::Usage(
                "--trace-filter cr3=X: only one address space can be chosen".into(),
            ));
        }
        if count(|filter| matches!(filter, Filter::Ip(..))) > RANGES {
            return Err(Error::Usage(format!(
                "--trace-filter ip=A-B: only {RANGES} ranges can be chosen"
            )));
        }
        let when = |option: &str, text: Option<String>| match text {
            None => Ok(None),
            Some(text) => parse_when(&text, self.symbols.as_deref())
                .map(Some)
                .map_err(Error::option(format!("{option} {text}"))),
        };
        Ok(Some(RecordingOptions {
            start: when("--trace-start", self.start)?,
            stop: when("--trace-stop", self.stop)?,
            force: self.force,
            filters: self.filters,
            buffer: self.buffer,
            limit: self.limit,
            on_error: self.on_error,
            ..RecordingOptions::new(folder)
        }))
    }
}

/// What is wrong with an option of a recording.
#[derive(Debug, thiserror::Error)]
pub enum TraceOptionError {
    /// A filter's number.
    #[error("{0} is not a number of 64 bits")]
    Number(String),
    /// A filter's range.
    #[error("the range ends before it begins")]
    Range,
    /// No filter.
    #[error("not kernel, user, cr3=X, ip=A-B, comm=NAME or pid=N")]
    Filter,
    /// The name of a process.
    #[error("Linux has names of processes of 1 to {LONGEST_COMM} bytes: {0} is none")]
    Comm(String),
    /// The number of a process.
    #[error("{0} is not the number of a process, from 1 on")]
    Pid(String),
    /// A buffer's size.
    #[error(transparent)]
    Size(#[from] ValueError),
    /// A buffer that holds no two synchronization points.
    #[error("less than {}K", RING_LEAST >> 10)]
    Buffer,
    /// Options that do not parse, in clap's words.
    #[error("{0}")]
    Line(String),
    /// Options that do not go together.
    #[error(transparent)]
    Together(#[from] Box<Error>),
    /// No directory.
    #[error("no directory")]
    NoDirectory,
    /// A number of instructions.
    #[error("{0} is not a number of instructions, from 1 on")]
    Count(String),
    /// A port.
    #[error("port= needs a port from 0 to 0xffff, as port=0x80 or port=0x80:1")]
    Port,
    /// What is written to a port.
    #[error("what is written to a port has at most 32 bits")]
    PortValue,
    /// An address.
    #[error("{0} is not an address")]
    Address(String),
    /// Nothing that a recording can wait for.
    #[error("{0} is not an address, instructions=N, hypercall or port=P[:VALUE]; for a symbol give --symbols FILE")]
    When(String),
    /// The symbols cannot be read.
    #[error("--symbols {}: {source}", path.display())]
    Symbols {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: SymbolsError,
    },
    /// The symbols lack this one.
    #[error("there is no symbol {name} in {}", path.display())]
    NoSymbol {
        /// The symbol.
        name: String,
        /// The file.
        path: PathBuf,
    },
}

fn parse_filter(text: &str) -> Result<Filter, TraceOptionError> {
    let number = |text: &str| parse_u64(text).ok_or_else(|| TraceOptionError::Number(text.into()));
    match text {
        "kernel" => return Ok(Filter::Kernel),
        "user" => return Ok(Filter::User),
        _ => {}
    }
    if let Some(cr3) = text.strip_prefix("cr3=") {
        return Ok(Filter::Cr3(number(cr3)?));
    }
    if let Some((first, last)) = text.strip_prefix("ip=").and_then(|range| range.split_once('-')) {
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(TraceOptionError::Range);
        }
        return Ok(Filter::Ip(first, last));
    }
    if let Some(name) = text.strip_prefix("comm=") {
        // A longer one would fit no process.
        return match name.len() {
            1..=LONGEST_COMM => Ok(Filter::Comm(name.into())),
            _ => Err(TraceOptionError::Comm(name.into())),
        };
    }
    if let Some(number) = text.strip_prefix("pid=") {
        return match number.parse() {
            Ok(number @ 1..) => Ok(Filter::Pid(number)),
            _ => Err(TraceOptionError::Pid(number.into())),
        };
    }
    Err(TraceOptionError::Filter)
}

fn parse_buffer(text: &str) -> Result<u64, TraceOptionError> {
    let size = parse_size(text)?;
    if size < RING_LEAST {
        return Err(TraceOptionError::Buffer);
    }
    Ok(size)
}

/// A line of the monitor's `trace start`.
#[derive(clap::Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct MonitorLine {
    #[command(flatten)]
    arguments: Arguments,
}

/// A recording that the monitor begins: a directory, and options as on the command line. The guest goes on if it cannot be written any
/// more.
///
/// # Errors
/// One line: what is wrong with them.
pub fn of_words(folder: &str, options: &[&str]) -> Result<RecordingOptions, TraceOptionError> {
    let words = ["--trace", folder, "--trace-on-error", "continue"];
    let line = MonitorLine::try_parse_from(words.iter().chain(options))
        .map_err(|e| TraceOptionError::Line(one_line(&e.to_string())))?;
    let options = line.arguments.options().map_err(Box::new)?;
    options.ok_or(TraceOptionError::NoDirectory)
}

/// When something begins or stops; names are looked up in `symbols`. The error says what is wrong with it.
fn parse_when(text: &str, symbols: Option<&Path>) -> Result<When, TraceOptionError> {
    if text == "hypercall" {
        return Ok(When::Hypercall);
    }
    if let Some(count) = text.strip_prefix("instructions=") {
        return match parse_u64(count) {
            Some(count @ 1..) => Ok(When::Instructions(count)),
            _ => Err(TraceOptionError::Count(count.into())),
        };
    }
    if let Some(port) = text.strip_prefix("port=") {
        let (port, value) = port
            .split_once(':')
            .map_or((port, None), |(port, value)| (port, Some(value)));
        let port = parse_u64(port).and_then(|port| u16::try_from(port).ok());
        let port = port.ok_or(TraceOptionError::Port)?;
        let value = match value {
            None => None,
            Some(value) => Some(
                parse_u64(value)
                    .and_then(|value| u32::try_from(value).ok())
                    .ok_or(TraceOptionError::PortValue)?,
            ),
        };
        return Ok(When::Port(port, value));
    }
    if text.starts_with(|first: char| first.is_ascii_digit()) {
        return parse_u64(text)
            .map(When::Address)
            .ok_or_else(|| TraceOptionError::Address(text.into()));
    }
    let Some(file) = symbols else {
        return Err(TraceOptionError::When(text.into()));
    };
    let symbols = SymbolFile::read(file).map_err(|source| TraceOptionError::Symbols {
        path: file.into(),
        source,
    })?;
    let address = symbols.symbols.address(text);
    address.map(When::Address).ok_or_else(|| TraceOptionError::NoSymbol {
        name: text.into(),
        path: file.into(),
    })
}

#[cfg(test)]
#[path = "trace_options_test.rs"]
mod trace_options_test;
