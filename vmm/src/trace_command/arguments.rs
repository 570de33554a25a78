//! The subcommands of `minivmm trace` and their options.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The subcommands.
// There is one of it in a process.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, Subcommand)]
pub enum TraceCommand {
    /// Say what a trace is of, how long it is, and what is missing in it; the exit status is 1 if it is damaged
    Info(Info),
    /// Print what was executed: blocks and events, or calls, as text or JSON lines
    #[command(after_help = AFTER_DECODE)]
    Decode(Decode),
    /// Write a trace in the form of another program
    #[command(after_help = AFTER_EXPORT)]
    Export(Export),
    /// Write the symbols of the traced kernel, where KASLR put them, for gdb and perf
    Symbols(Symbols),
}

const AFTER_DECODE: &str = "WHEN is a step of the machine (1000000), a virtual time (1.5s, 20ms, 300us, 7ns), an address (0xffffffff81000000), or a\n\
    function's name: the first time that it is executed. Times and steps of lines are exact where the trace tells them, and in between\n\
    count an instruction as a step.\n\
    JSON: every line is an object with `type`: block, event, gap, call, return or summary. The guide, \"Traces\", has the schema.\n\
    Gaps and overflows stand where instructions are missing, and are counted in the summary.";

const AFTER_EXPORT: &str = "WHEN is as for `minivmm trace decode`. Several forms can be written at once.\n\
    perf:       perf script -i DIR --itrace=i1ie     (with --from and --to: perf decodes a window of a few million instructions in seconds)\n\
    perfetto:   ui.perfetto.dev\n\
    folded:     one line for each stack, for flame graph tools\n\
    flamegraph: SVG for a browser\n\
    html:       a browser, without a network\n\
    callgrind:  callgrind_annotate FILE, kcachegrind FILE";

/// What of a trace is looked at.
#[derive(Clone, Debug, Default, Args)]
pub struct Part {
    /// Begin here: a step, a time, an address or a function
    #[arg(long, value_name = "WHEN")]
    pub from: Option<String>,
    /// End here
    #[arg(long, value_name = "WHEN")]
    pub to: Option<String>,
    /// Only this vCPU, counted from 0
    #[arg(long, value_name = "N")]
    pub vcpu: Option<usize>,
    /// Symbols of the traced kernel: a vmlinux, a System.map, a copy of its /proc/kallsyms [default: those kept with the trace]
    #[arg(long, value_name = "FILE")]
    pub symbols: Option<PathBuf>,
    /// Symbols of the kernel that a hypervisor in the machine runs as its guest, in the same forms [default: those kept with the trace]
    #[arg(long, value_name = "FILE")]
    pub symbols_guest: Option<PathBuf>,
    /// A copy of the guest's root directory, or an initial RAM disk of it, where its programs are looked for before where the trace says
    /// (repeatable)
    #[arg(long, value_name = "PATH")]
    pub symfs: Vec<PathBuf>,
    /// Symbols of a user's program, an ELF file, for the processes of its name, instead of those of the files that it has mapped; of a
    /// position-independent one with the address of its first mapping (repeatable)
    #[arg(long = "symbols-user", value_name = "FILE[,name=COMM][,at=ADDRESS]")]
    pub programs: Vec<String>,
    /// Threads that decode [default: one for each CPU]
    #[arg(long, value_name = "N", default_value = "0", hide_default_value = true)]
    pub threads: usize,
}

/// `trace info`.
#[derive(Clone, Debug, Args)]
pub struct Info {
    /// The directory that `--trace` wrote
    #[arg(value_name = "DIR")]
    pub trace: PathBuf,
    /// As JSON, in one line
    #[arg(long)]
    pub json: bool,
    /// Symbols of the traced kernel, as for `decode`: whether they are its own, and how many
    #[arg(long, value_name = "FILE")]
    pub symbols: Option<PathBuf>,
}

/// `trace decode`.
#[derive(Clone, Debug, Args)]
pub struct Decode {
    /// The directory that `--trace` wrote
    #[arg(value_name = "DIR")]
    pub trace: PathBuf,
    /// A JSON object in each line
    #[arg(long)]
    pub json: bool,
    /// The calls, as an indented tree
    #[arg(long)]
    pub calls: bool,
    /// The instructions of each block, as they were when they were executed
    #[arg(long)]
    pub disasm: bool,
    /// What of it.
    #[command(flatten)]
    pub part: Part,
}

/// `trace export`.
#[derive(Clone, Debug, Default, Args)]
#[command(group = clap::ArgGroup::new("form").required(true).multiple(true))]
pub struct Export {
    /// The directory that `--trace` wrote
    #[arg(value_name = "DIR")]
    pub trace: PathBuf,
    /// A perf.data directory with the packets, the kernel's code and its symbols
    #[arg(long, value_name = "DIR", group = "form")]
    pub perf: Option<PathBuf>,
    /// Calls over time, by process and thread, for ui.perfetto.dev and trace_processor
    #[arg(long, value_name = "FILE", group = "form")]
    pub perfetto: Option<PathBuf>,
    /// The same as JSON in the Trace Event Format, for about:tracing and others: ten times as large
    #[arg(long, value_name = "FILE", group = "form")]
    pub trace_events: Option<PathBuf>,
    /// What the file of --trace-events may take; more is an error, and no file
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = crate::parse::parse_size, allow_negative_numbers = true)]
    pub trace_events_limit: u64,
    /// Instructions by stack
    #[arg(long, value_name = "FILE", group = "form")]
    pub folded: Option<PathBuf>,
    /// Instructions by stack, as a picture
    #[arg(long, value_name = "FILE", group = "form")]
    pub flamegraph: Option<PathBuf>,
    /// One page for a browser: when each thread ran, instructions by stack with zoom and search, functions
    #[arg(long, value_name = "FILE", group = "form")]
    pub html: Option<PathBuf>,
    /// Instructions by function and call
    #[arg(long, value_name = "FILE", group = "form")]
    pub callgrind: Option<PathBuf>,
    /// Packets and pages of code in files of their own, for users of libipt: always the whole trace
    #[arg(long, value_name = "DIR", group = "form", conflicts_with_all = ["from", "to", "vcpu"])]
    pub raw: Option<PathBuf>,
    /// Of calls over time leave those out that have fewer instructions
    #[arg(long, value_name = "N", default_value = "0")]
    pub least: u64,
    /// Replace files that are there
    #[arg(long)]
    pub force: bool,
    /// What of it.
    #[command(flatten)]
    pub part: Part,
}

/// `trace symbols`.
#[derive(Clone, Debug, Args)]
pub struct Symbols {
    /// The directory that `--trace` wrote
    #[arg(value_name = "DIR")]
    pub trace: PathBuf,
    /// An ELF file with the symbols and without code
    #[arg(long, value_name = "FILE")]
    pub elf: PathBuf,
    /// Symbols of the traced kernel, as for `decode`
    #[arg(long, value_name = "FILE")]
    pub symbols: Option<PathBuf>,
    /// Replace the file if it is there
    #[arg(long)]
    pub force: bool,
}
