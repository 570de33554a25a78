//! What `--trace` and its companions ask for.

use std::path::{Path, PathBuf};

use clap::Parser;
use trace::directory::sink::RING_LEAST;
use trace::format::Header;
use x86::model::CpuModel;

use super::recorder::CTL;
use super::trigger::When;
use crate::error::Error;
use crate::parse::{one_line, parse_size, parse_u64};

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
    /// When it begins; at once without.
    pub start: Option<When>,
    /// When it stops.
    pub stop: Option<When>,
    /// Of each vCPU, so many bytes of packets are kept: the last.
    pub buffer: Option<u64>,
    /// What happens when the directory cannot be written any more.
    pub on_error: OnError,
}

impl Options {
    /// What the trace's header says before the recording ends.
    pub fn header(&self, model: &CpuModel, cpus: usize, kernel: &Path) -> Header {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Header {
            model: model.name.into(),
            tsc_khz: model.tsc_khz,
            cpus,
            kernel: kernel.display().to_string(),
            began: since.map_or(0, |since| since.as_secs()),
            filters: self.filters.iter().map(ToString::to_string).collect(),
            start: self.start.as_ref().map(ToString::to_string),
            stop: self.stop.as_ref().map(ToString::to_string),
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
            start: None,
            stop: None,
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
    /// Record only the kernel, user programs, an address space or addresses (repeatable: what all of them let through; `ip` up to four times)
    #[arg(long = "trace-filter", value_name = "kernel|user|cr3=X|ip=A-B", requires = "trace", value_parser = parse_filter)]
    filters: Vec<Filter>,
    /// Begin when this happens: an address or symbol is executed, instructions=N have retired, `hypercall`, port=P[:VALUE] is written
    #[arg(long = "trace-start", value_name = "WHEN", requires = "trace")]
    start: Option<String>,
    /// Stop when this happens; after that it may begin again
    #[arg(long = "trace-stop", value_name = "WHEN", requires = "trace")]
    stop: Option<String>,
    /// Keep the last SIZE bytes of packets of each CPU
    #[arg(long = "trace-buffer", value_name = "SIZE", requires = "trace", value_parser = parse_buffer)]
    buffer: Option<u64>,
    /// What to do when the trace cannot be written any more
    #[arg(long = "trace-on-error", value_enum, default_value_t = OnError::Stop, requires = "trace")]
    on_error: OnError,
    /// Replace a trace that is in the directory already
    #[arg(long, requires = "trace")]
    force: bool,
    /// Symbols for --trace-start and --trace-stop: a vmlinux or System.map; the kernel must run where it was linked (nokaslr)
    #[arg(long, value_name = "FILE", requires = "trace")]
    symbols: Option<PathBuf>,
}

/// A line of the monitor's.
#[derive(clap::Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Line {
    #[command(flatten)]
    arguments: Arguments,
}

impl Options {
    /// A recording that the monitor begins: a directory, and options as on the command line. The guest goes on if it cannot be
    /// written any more.
    ///
    /// # Errors
    /// One line: what is wrong with them.
    pub fn of_words(folder: &str, options: &[&str]) -> Result<Options, String> {
        let words = ["--trace", folder, "--trace-on-error", "continue"];
        let line = Line::try_parse_from(words.iter().chain(options)).map_err(|e| one_line(&e.to_string()))?;
        let options = line.arguments.options().map_err(|e| e.to_string())?;
        options.ok_or_else(|| "no directory".into())
    }
}

/// Address ranges that a trace unit has.
const RANGES: usize = 4;

impl Arguments {
    /// What they ask for.
    ///
    /// # Errors
    /// They do not go together.
    pub fn options(self) -> Result<Option<Options>, Error> {
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
            Some(text) => When::parse(&text, self.symbols.as_deref())
                .map(Some)
                .map_err(|reason| Error::Usage(format!("{option} {text}: {reason}"))),
        };
        Ok(Some(Options {
            start: when("--trace-start", self.start)?,
            stop: when("--trace-stop", self.stop)?,
            force: self.force,
            filters: self.filters,
            buffer: self.buffer,
            on_error: self.on_error,
            ..Options::new(folder)
        }))
    }
}

fn parse_filter(text: &str) -> Result<Filter, String> {
    let number = |text: &str| parse_u64(text).ok_or_else(|| format!("{text} is not a number of 64 bits"));
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
            return Err("the range ends before it begins".into());
        }
        return Ok(Filter::Ip(first, last));
    }
    Err("not kernel, user, cr3=X or ip=A-B".into())
}

fn parse_buffer(text: &str) -> Result<u64, String> {
    let size = parse_size(text)?;
    if size < RING_LEAST {
        return Err(format!("less than {}K", RING_LEAST >> 10));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &[&str]) -> Result<Option<Options>, String> {
        let line = Line::try_parse_from(text).map_err(|error| error.to_string())?;
        line.arguments.options().map_err(|error| error.to_string())
    }

    // covers: trace/options
    #[test]
    fn options_reach_the_recorder_and_bad_ones_are_told() {
        assert_eq!(options(&[]), Ok(None));
        assert_eq!(options(&["--trace", "d"]), Ok(Some(Options::new("d"))));
        let all = [
            "--trace",
            "d",
            "--trace-filter",
            "kernel",
            "--trace-filter",
            "cr3=0x1000",
            "--trace-filter",
            "ip=0x10-0x20",
            "--trace-start",
            "0x1234",
            "--trace-stop",
            "hypercall",
            "--trace-buffer",
            "1M",
            "--trace-on-error",
            "continue",
            "--force",
        ];
        let expected = Options {
            force: true,
            filters: vec![Filter::Kernel, Filter::Cr3(0x1000), Filter::Ip(16, 32)],
            start: Some(When::Address(0x1234)),
            stop: Some(When::Hypercall),
            buffer: Some(1 << 20),
            on_error: OnError::Continue,
            ..Options::new("d")
        };
        assert_eq!(options(&all), Ok(Some(expected)));
        let ip = ["--trace-filter", "ip=1-2"];
        for (text, says) in [
            (&["--trace-filter", "kernel"][..], "--trace <DIR>"),
            (&["--force"], "--trace <DIR>"),
            (&["--trace", "d", "--trace-filter", "rust"], "cr3=X"),
            (&["--trace", "d", "--trace-filter", "ip=2-1"], "ends before"),
            (&["--trace", "d", "--trace-filter", "ip=2"], "ip=A-B"),
            (&["--trace", "d", "--trace-filter", "cr3=x"], "not a number"),
            (
                &["--trace", "d", "--trace-filter", "cr3=1", "--trace-filter", "cr3=2"],
                "only one",
            ),
            (&[&["--trace", "d"], &ip[..], &ip, &ip, &ip, &ip].concat(), "only 4"),
            (&["--trace", "d", "--trace-buffer", "1K"], "less than 512K"),
            (&["--trace", "d", "--trace-buffer", "x"], "not a size"),
            (&["--trace", "d", "--trace-start", "main"], "--symbols"),
            (&["--trace", "d", "--trace-on-error", "ignore"], "--trace-on-error"),
        ] {
            let error = options(text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }
}
