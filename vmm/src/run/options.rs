//! What `minivmm run` takes.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::builder::{OsStringValueParser, TypedValueParser};
use x86::model::topology::Topology;

use crate::{
    address::DebugAddress,
    config::{BusChoice, ClockMode, ConsoleChoice, EngineChoice, NetConfig, OnPanic, VectorChoice},
    parse::*,
    unit_options::UnitOptions,
};

/// A command, and the guest that it runs in.
#[derive(Clone, Debug, clap::Args)]
#[command(
    after_help = "The guest reads what you can read, below --root, and writes in the current directory and below --rw; what else it \
                        writes is gone with it.\nExit status: the command's; 125 minivmm or the guest failed; 126 the command cannot be \
                        executed; 127 it is not there; 128+N it was ended by signal N."
)]
pub struct RunOptions {
    /// The command and its arguments, looked for in PATH
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) command: Vec<OsString>,
    /// Kernel: a 64-bit Linux [default: the host's own, /boot/vmlinuz-RELEASE, or the one of `cargo xtask guest`]
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// The kernel's modules: lib/modules/RELEASE, or the directory that RELEASE is in [default: beside the kernel, or the host's]
    #[arg(long, value_name = "DIR")]
    pub(crate) modules: Option<PathBuf>,
    /// The guest's root directory, which stays as it is
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
    /// One more directory that the guest reads and writes, at its own place (repeatable)
    #[arg(long, value_name = "DIR")]
    pub(crate) rw: Vec<PathBuf>,
    /// One more directory that the guest reads, at its own place (repeatable)
    #[arg(long, value_name = "DIR")]
    pub(crate) ro: Vec<PathBuf>,
    /// Where the guest's devices are [default: pci, where the kernel has virtio-pci, else mmio]
    #[arg(long, value_enum)]
    pub(crate) bus: Option<BusChoice>,
    /// What the command's input comes through: a port of a virtio console, or the serial port [default: hvc, where the kernel has it]
    #[arg(long, value_enum)]
    pub(crate) console: Option<ConsoleChoice>,
    /// Network, as for a machine: with `user` the guest is set up, reaches what you reach, and the host's loopback as 10.0.2.2; a tap
    /// interface is the command's to set up
    #[arg(long, value_name = "user[,forward=HOST:GUEST]...|tap=NAME", value_parser = parse_net)]
    pub(crate) net: Option<NetConfig>,
    /// More words for the kernel's command line
    #[arg(long, visible_alias = "cmdline", value_name = "STR", allow_hyphen_values = true)]
    pub(crate) append: Option<OsString>,
    /// Guest memory: bytes, or with K, M, G or T
    #[arg(long, short = 'm', value_name = "SIZE", default_value = "1G", value_parser = parse_memory, allow_negative_numbers = true)]
    pub(crate) memory: u64,
    /// Number of CPUs, 1 to 255
    #[arg(long, visible_alias = "smp", value_name = "N[,sockets=N][,cores=N][,threads=N]", default_value = "1", value_parser = parse_cpus, allow_negative_numbers = true)]
    pub(crate) cpus: Topology,
    /// CPU model, as for a machine [default: alderlake, where this host has what it takes, else haswell or westmere]
    #[arg(long, visible_alias = "cpu", value_name = "NAME")]
    pub(crate) cpu_model: Option<String>,
    #[command(flatten)]
    pub(crate) units: UnitOptions,
    /// What executes the guest
    #[arg(long, value_enum, default_value_t = EngineChoice::Auto)]
    pub(crate) engine: EngineChoice,
    /// How the software engine executes vector instructions, as for a machine; with portable the model is alderlake on every host
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) vector: Option<VectorChoice>,
    /// Where gdb connects, to debug the guest from outside: tcp:[HOST:]PORT or unix:PATH
    // The text is the program's help first.
    #[allow(rustdoc::broken_intra_doc_links)]
    #[arg(long, value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(parse_gdb))]
    pub(crate) gdb: Option<DebugAddress>,
    /// Stand before the first instruction, until gdb lets the guest go on
    #[arg(long, short = 'S', requires = "gdb")]
    pub(crate) paused: bool,
    /// Give up what the process does not need once the guest is built: capabilities, most system calls, files that are not shared
    #[arg(long, value_enum, default_value_t = crate::jail::Sandbox::On)]
    pub(crate) sandbox: crate::jail::Sandbox,
    #[command(flatten)]
    pub(crate) trace: crate::trace_options::Arguments,
    /// Keep what it takes to go back to any instruction: gdb's reverse commands work, and nothing is written on the host
    #[arg(long)]
    pub(crate) reverse: bool,
    /// Record in a new directory what comes from outside, and what is read of files; `minivmm replay` runs it again, and nothing is written on
    /// the host but there
    #[arg(long, value_name = "DIR")]
    pub(crate) record: Option<PathBuf>,
    /// Virtual time follows wall time, or instructions only [default: paced on a terminal, else virtual; virtual with --reverse or --record]
    #[arg(long, value_enum)]
    pub(crate) clock: Option<ClockMode>,
    /// Seed of RDRAND and RDSEED: a number, or `random`
    #[arg(long, value_name = "N", default_value = "0", value_parser = parse_seed, allow_negative_numbers = true)]
    pub(crate) seed: Seed,
    /// Date of the real-time clock at the start, as for a machine [default: now]
    #[arg(long, value_name = "TIME", value_parser = parse_rtc_base, allow_negative_numbers = true)]
    pub(crate) rtc_base: Option<RtcBase>,
    /// Stop after so many seconds of wall time
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, allow_negative_numbers = true)]
    pub(crate) timeout: Option<Duration>,
    /// What to do when the guest's kernel panics, as for a machine: `dump=FILE` leaves a core file of it in a new file; `stop` is for
    /// --gdb [default: the guest ends]
    #[arg(long, value_name = "exit|stop|dump=FILE", value_parser = OsStringValueParser::new().try_map(parse_on_panic))]
    pub(crate) on_panic: Option<OnPanic>,
    /// Print steps, MIPS, exits, wall and virtual time at the end
    #[arg(long)]
    pub(crate) stats: bool,
    /// Show the kernel's messages and say more on stderr (repeat for more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
}
