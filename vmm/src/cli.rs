//! The command line: options to [`MachineConfig`], and nothing else.

use std::{
    ffi::OsString,
    io::IsTerminal,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{
    ArgGroup, CommandFactory, Parser, Subcommand,
    builder::{OsStringValueParser, TypedValueParser},
};
use x86::model::{MODELS, topology::Topology};

use crate::{
    address::DebugAddress,
    config::{
        BusChoice, ClockMode, ConsoleChoice, DiskConfig, EngineChoice, EpochOptions, InitrdFile, KvmDefects,
        MachineConfig, NetConfig, OnPanic, RecordOptions, RestoreOptions, ReverseOptions, SerialTarget, ShareConfig,
        VIRTUAL_RTC_BASE, VectorChoice,
    },
    error::Error,
    habits, matrix, model,
    parse::*,
    query_options, replay_options,
    timeline::snapshot_file::{SnapshotFile, SnapshotFileError},
    trace_command::TraceCommand,
    unit_options::UnitOptions,
};
use kvm::{
    irqchip::Irqchip,
    probe,
    units::{Unit, UnitRequest},
};

/// The command line as clap sees it.
#[derive(Debug, Parser)]
#[command(
    name = "minivmm",
    version,
    about = "Runs an x86-64 guest with the CPU debug and trace features of the part it claims to be",
    after_help = "Exit status: 0 guest powered off or reset, or Ctrl-A x; (v<<1)|1 guest wrote v to port F4H; 2 wrong command\n\
                  line or file, or ended from outside; 4 guest crashed or halted for good; 6 fault of minivmm; 8 limit reached;\n\
                  10 the guest's Linux panicked.\n\
                  On a terminal, Ctrl-A x quits, Ctrl-A h helps, Ctrl-A Ctrl-A sends Ctrl-A.",
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    group = ArgGroup::new("begins-with").args(["kernel", "restore"]).required(true)
)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Kernel: a Linux bzImage, an ELF64 kernel (by its PVH note, or a vmlinux by its 64-bit entry point), or an ELF32 multiboot 1 image
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Go on from a snapshot, which `minivmm ctl SOCKET snapshot FILE` has written; what the machine is made of comes with it
    #[arg(long, value_name = "FILE", conflicts_with_all = MADE_OF)]
    restore: Option<PathBuf>,
    /// Initial RAM disk; repeated, the archives follow one another. For multiboot and PVH: a module, with the words behind its name
    /// (repeatable)
    #[arg(long, value_name = "FILE[ WORDS]", value_parser = OsStringValueParser::new().try_map(parse_initrd))]
    initrd: Vec<InitrdFile>,
    /// Disk: a raw or qcow2 image, or a block device; the guest may write it, unless it is FILE,readonly or FILE,overlay (repeatable)
    #[arg(long = "disk", value_name = "FILE[,overlay|readonly][,format=raw|qcow2]", value_parser = OsStringValueParser::new().try_map(parse_disk))]
    disks: Vec<DiskConfig>,
    /// A directory of the host that a Linux guest mounts with `mount -t virtiofs TAG /mnt`; files that the guest makes are this user's
    /// (repeatable)
    #[arg(long = "share", value_name = "TAG=DIR[,ro|overlay]", value_parser = OsStringValueParser::new().try_map(parse_share))]
    shares: Vec<ShareConfig>,
    /// Where disks and other virtio devices are: at addresses that the ACPI tables name, or on a PCI bus [default: pci with a disk, else
    /// mmio]
    #[arg(long, value_enum)]
    bus: Option<BusChoice>,
    /// Network: user mode by passt, with ports of the host ([ADDRESS:]HOST, else of 127.0.0.1) that lead to the guest; or a tap interface
    // The text is the program's help first.
    #[allow(rustdoc::broken_intra_doc_links)]
    #[arg(long, value_name = "user[,forward=HOST:GUEST]...|tap=NAME", value_parser = parse_net)]
    net: Option<NetConfig>,
    /// Where the guest finds the console
    #[arg(long, value_enum, default_value_t = ConsoleChoice::Serial)]
    console: ConsoleChoice,
    /// The folder's tree appears below /inject in a Linux guest; an executable DIR/init is run first, in place of /init
    #[arg(long, value_name = "DIR")]
    inject: Option<PathBuf>,
    /// What the guest sends to its second serial port as a cpio archive is unpacked below DIR
    #[arg(long, value_name = "DIR")]
    collect: Option<PathBuf>,
    /// Kernel command line [default: console=ttyS0 for Linux, empty for multiboot]
    #[arg(long, visible_alias = "append", value_name = "STR", allow_hyphen_values = true)]
    cmdline: Option<OsString>,
    /// Guest memory: bytes, or with K, M, G or T
    #[arg(long, short = 'm', value_name = "SIZE", default_value = "512M", value_parser = parse_memory, allow_negative_numbers = true)]
    memory: u64,
    /// Number of CPUs, 1 to 255, and how they are arranged: packages (sockets), cores of each, threads of each core
    #[arg(long, visible_alias = "smp", value_name = "N[,sockets=N][,cores=N][,threads=N]", default_value = "1", value_parser = parse_cpus, allow_negative_numbers = true)]
    cpus: Topology,
    /// CPU model (see `minivmm models`) or a model's file (*.toml), and features to switch: NAME,+feature,-feature [default: westmere]
    #[arg(long, visible_alias = "cpu", value_name = "NAME")]
    cpu_model: Option<String>,
    #[command(flatten)]
    units: UnitOptions,
    /// Frequency of the time-stamp counter [default: the model's]; CPUID leaves 15H and 16H say the same
    #[arg(long, value_name = "N", value_parser = parse_khz, allow_negative_numbers = true)]
    tsc_khz: Option<u32>,
    /// What every CPU's time-stamp counter reads at the start; negative: so much below 2^64
    #[arg(long, value_name = "N", default_value = "0", value_parser = parse_offset, allow_hyphen_values = true)]
    tsc_offset: u64,
    /// What executes the guest
    #[arg(long, value_enum, default_value_t = EngineChoice::Auto)]
    engine: EngineChoice,
    /// On KVM, whose interrupt controllers and interval timer: KVM's own, or this program's, which a machine needs that may move to the
    /// software engine [default: minivmm]
    #[arg(long, value_enum, value_name = "WHOSE")]
    irqchip: Option<Irqchip>,
    /// Whether the software engine makes host code of what runs often: on, off, or `after=N` for what has run N times. A run is the same
    /// either way, but for its time
    #[arg(long, value_name = "HOW", default_value = "on", value_parser = parse_translate)]
    translate: TranslateAfter,
    /// Host code that is kept at most, from 1M to 1G: with more, all of it is forgotten
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_translate_memory, allow_negative_numbers = true)]
    translate_memory: u64,
    /// How the software engine executes vector instructions (MMX to AVX-512, AES and their like): by the host's own, or by tables that need
    /// nothing of the host. A run is the same either way, but for its time [default: host where the host gives executable memory]
    #[arg(long, value_enum, value_name = "HOW")]
    vector: Option<VectorChoice>,
    /// What to do where a trial guest finds that this host's KVM does not do what it accepts (`minivmm probe` lists what it found)
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = KvmDefects::Refuse)]
    kvm_defects: KvmDefects,
    /// Where the serial port leads: stdio, file:PATH or null
    #[arg(long, value_name = "TARGET", default_value = "stdio", value_parser = OsStringValueParser::new().try_map(parse_serial))]
    serial: SerialTarget,
    /// A socket that takes commands while the guest runs, as JSON lines; `minivmm ctl` speaks to it
    #[arg(long, value_name = "unix:PATH", value_parser = OsStringValueParser::new().try_map(parse_control))]
    control: Option<PathBuf>,
    /// A socket that speaks the part of QEMU's machine protocol with which drgn reads a running guest: `drgn --qemu PATH`
    #[arg(long, value_name = "unix:PATH", value_parser = OsStringValueParser::new().try_map(parse_control))]
    qmp: Option<PathBuf>,
    // The brackets are the help's, which says what may be left out.
    #[allow(rustdoc::broken_intra_doc_links)]
    /// Where gdb connects, to debug the guest from outside: tcp:[HOST:]PORT (this host alone, unless HOST says otherwise) or unix:PATH
    #[arg(long, value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(parse_gdb))]
    gdb: Option<DebugAddress>,
    /// The same as --gdb tcp:127.0.0.1:1234
    #[arg(short = 's', conflicts_with = "gdb")]
    usual_gdb: bool,
    /// Let monitor commands of a gdb that is connected over TCP write files, too, as one over a socket may
    #[arg(long)]
    gdb_allow_files: bool,
    /// Stand before the first instruction, until gdb or a command on the control socket lets the guest go on
    #[arg(long, short = 'S')]
    paused: bool,
    /// Give up what the process does not need once the machine is built: capabilities, most system calls, files that are not named here
    #[arg(long, value_enum, default_value_t = crate::jail::Sandbox::On)]
    sandbox: crate::jail::Sandbox,
    /// A folder that may be written to, and read, when a command says so as the guest runs: `monitor trace start DIR` (repeatable)
    #[arg(long, value_name = "DIR")]
    allow_write: Vec<PathBuf>,
    #[command(flatten)]
    trace: crate::trace_options::Arguments,
    /// Keep what it takes to go back to any instruction: gdb's reverse commands work, and disks are overlays
    #[arg(long)]
    reverse: bool,
    /// What --reverse may take of memory
    #[arg(long, value_name = "SIZE", default_value = "1G", requires = "reverse", value_parser = parse_size, allow_negative_numbers = true)]
    reverse_memory: u64,
    /// Record in a new directory what comes from outside; `minivmm replay` runs the session again, and disks are overlays
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    /// What the session's snapshots may take on disk, from which `minivmm replay --jobs` and `minivmm query` begin; 0: it keeps none. When
    /// they take more, every second one goes
    #[arg(long, value_name = "SIZE", default_value = "512M", requires = "record", value_parser = parse_size, allow_negative_numbers = true)]
    record_snapshots: u64,
    /// Steps between two of them
    #[arg(long, value_name = "N", default_value = "67108864", requires = "record", value_parser = parse_count, allow_negative_numbers = true)]
    record_every: u64,
    /// Virtual time follows wall time, or instructions only [default: paced on a terminal, else virtual; virtual with --reverse or --record]
    #[arg(long, value_enum)]
    clock: Option<ClockMode>,
    /// Seed of RDRAND and RDSEED: a number, or `random`
    #[arg(long, value_name = "N", default_value = "0", value_parser = parse_seed, allow_negative_numbers = true)]
    seed: Seed,
    /// Date of the real-time clock at the start: 2024-01-01T00:00:00Z, seconds since 1970, or `now` [default: now if paced, else 2024-01-01T00:00:00Z]
    #[arg(long, value_name = "TIME", value_parser = parse_rtc_base, allow_negative_numbers = true)]
    rtc_base: Option<RtcBase>,
    /// Stop after N instructions, with status 8
    #[arg(long, value_name = "N", value_parser = parse_count, allow_negative_numbers = true)]
    max_instructions: Option<u64>,
    /// Stop after so many seconds of wall time, with status 8
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, allow_negative_numbers = true)]
    timeout: Option<Duration>,
    /// What to do when the guest's Linux panics: `exit`, once its message is out, with status 10; `stop`, where `panic` begins, for gdb or
    /// the control socket; `dump=FILE`, the same as `exit` with a core file of it in a new file. With gdb connected it stops in all
    /// cases [default: what the kernel does, by its panic=]
    #[arg(long, value_name = "exit|stop|dump=FILE", value_parser = OsStringValueParser::new().try_map(parse_on_panic))]
    on_panic: Option<OnPanic>,
    /// Print steps, MIPS, exits, wall and virtual time at the end
    #[arg(long)]
    stats: bool,
    /// Say more on stderr (repeat for more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
}

/// The options that say what a machine is made of, which a snapshot says itself.
const MADE_OF: [&str; 24] = [
    "kernel",
    "initrd",
    "disks",
    "bus",
    "shares",
    "console",
    "inject",
    "cmdline",
    "memory",
    "cpus",
    "cpu_model",
    "tsc_khz",
    "tsc_offset",
    "irqchip",
    "seed",
    "rtc_base",
    "dr",
    "lbr",
    "bts",
    "pebs",
    "pmu",
    "pt",
    "tsc",
    "rdt",
];

#[derive(Debug, Subcommand)]
enum Command {
    /// List the CPU models, or say what one shows and hides, and why
    Models {
        /// A model, as `--cpu-model` takes it
        name: Option<String>,
    },
    /// Say what this host can give a guest, unit by unit, and why
    Probe {
        /// As one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Send a command to a running machine's control socket: status, pause, resume, quit, dump FILE, snapshot FILE, or "monitor LINE"
    Ctl {
        /// The socket's path, as `--control` got it
        path: PathBuf,
        /// The command, or a JSON object of it
        command: String,
        /// Of dump, the new file, an ELF core file that crash, drgn and gdb read; of snapshot, the new file, for --restore
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Look at a trace that `--trace` recorded
    Trace {
        /// Give up what the process does not need to read the trace and to write what is asked for
        #[arg(long, value_enum, global = true, default_value_t = crate::jail::Sandbox::On)]
        sandbox: crate::jail::Sandbox,
        #[command(subcommand)]
        command: Box<TraceCommand>,
    },
    /// Run a session again that `--record` recorded, to the instruction
    Replay(Box<replay_options::ReplayOptions>),
    /// Ask a recorded session who wrote to memory, or who called a function
    Query(Box<query_options::QueryOptions>),
    /// Ask a part of a session, for `minivmm query`
    #[command(hide = true)]
    QueryPart(Box<query_options::QueryPartOptions>),
    /// Run a command in a Linux guest that has this host's files, with its arguments, environment, directory and streams
    Run(Box<crate::run::options::RunOptions>),
    /// Run guests on CPU models, each in a process of its own, and show one table
    Matrix(Box<matrix::MatrixOptions>),
    /// Print what makes a shell complete this command line: `source <(minivmm completions bash)`
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages, one for each subcommand, into a directory: `man -l DIR/minivmm.1`
    Man {
        /// The directory, made if it is missing
        dir: PathBuf,
    },
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Job {
    /// Run a machine.
    Run {
        /// The machine.
        config: Box<MachineConfig>,
        /// How often `-v` was given.
        verbose: u8,
    },
    /// Run a recorded session again.
    Replay(Box<replay_options::ReplayOptions>),
    /// Ask a recorded session.
    Query(Box<query_options::QueryOptions>),
    /// Ask a part of one.
    QueryPart(Box<query_options::QueryPartOptions>),
    /// Send this command to a control socket.
    Control {
        /// The socket.
        path: PathBuf,
        /// The command.
        command: String,
        /// The file that a dump is written to.
        file: Option<PathBuf>,
    },
    /// Look at a trace.
    Trace {
        /// What to do with it.
        command: Box<TraceCommand>,
        /// The process is jailed before it reads the trace.
        sandbox: bool,
    },
    /// Run guests on CPU models.
    Matrix(Box<matrix::MatrixOptions>),
    /// Run a command in a guest.
    Command(Box<crate::run::options::RunOptions>),
    /// Print this text on standard output: help, version or the list of models.
    Print(String),
    /// Write the manual pages into this directory.
    Man(PathBuf),
}

/// Writes the manual pages into a directory, which is made if it is missing.
///
/// # Errors
/// The directory cannot be written.
pub fn write_manual(dir: &Path) -> Result<(), Error> {
    let mut command = Cli::command();
    command.build();
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(command.disable_help_subcommand(true), dir))
        .map_err(|source| Error::File {
            option: "man",
            path: dir.into(),
            source,
        })
}

/// Reads the command line. `args` starts with the program's name.
pub fn parse<I, T>(args: I) -> Result<Job, Error>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let args = habits::translated(&Cli::command(), args)?;
    let arguments = args.get(1..).unwrap_or_default().to_vec();
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => return Ok(Job::Print(error.render().to_string())),
        Err(error) => return Err(habits::explained(&error, arguments.is_empty())),
    };
    match cli.command {
        Some(Command::Models { name: Some(name) }) => return Ok(Job::Print(model::details(model::find(&name)?))),
        Some(Command::Models { name: None }) => return Ok(Job::Print(models())),
        Some(Command::Probe { json }) => {
            let seen = probe::Seen::here();
            let sandbox = crate::jail::Available::here();
            if json {
                let mut all = probe::json(&seen);
                all["sandbox"] = serde_json::json!(sandbox);
                return Ok(Job::Print(format!("{all}\n")));
            }
            return Ok(Job::Print(format!("{}\n{}", probe::text(&seen), sandbox.text())));
        }
        Some(Command::Ctl { path, command, file }) => {
            let path = crate::address::unix(path.as_os_str().as_bytes()).unwrap_or(path);
            return Ok(Job::Control { path, command, file });
        }
        Some(Command::Trace { sandbox, command }) => {
            let sandbox = sandbox == crate::jail::Sandbox::On;
            return Ok(Job::Trace { command, sandbox });
        }
        Some(Command::Replay(options)) => return Ok(Job::Replay(options)),
        Some(Command::Query(options)) => return Ok(Job::Query(options)),
        Some(Command::QueryPart(options)) => return Ok(Job::QueryPart(options)),
        Some(Command::Matrix(options)) => return Ok(Job::Matrix(options)),
        Some(Command::Completions { shell }) => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "minivmm", &mut text);
            return Ok(Job::Print(String::from_utf8_lossy(&text).into_owned()));
        }
        Some(Command::Man { dir }) => return Ok(Job::Man(dir)),
        Some(Command::Run(options)) => return Ok(Job::Command(options)),
        None => {}
    }
    let (cli, restore, made_by) = match cli.restore.clone() {
        Some(file) => restored(cli, file)?,
        None => (cli, None, arguments.clone()),
    };
    let Some(kernel) = cli.kernel else {
        return Err(Error::Usage("--kernel FILE is missing".into()));
    };
    let clock = cli.clock.unwrap_or_else(|| {
        let interactive = cli.serial == SerialTarget::Stdio && std::io::stdin().is_terminal();
        let repeats = cli.reverse || cli.record.is_some();
        if interactive && !repeats {
            ClockMode::Paced
        } else {
            ClockMode::Virtual
        }
    });
    let rtc_base = match (cli.rtc_base, clock) {
        (Some(RtcBase::At(seconds)), _) => seconds,
        (Some(RtcBase::Now), _) | (None, ClockMode::Paced) => now(),
        (None, ClockMode::Virtual) => VIRTUAL_RTC_BASE,
    };
    let units = cli.units.0;
    let wants_pt = units[Unit::Pt].is_some_and(|request| request != UnitRequest::Off);
    let mut model = model::choose(cli.cpu_model.as_deref(), wants_pt)?;
    if let Some(khz) = cli.tsc_khz {
        model = model
            .with_tsc_khz(khz)
            .map_err(Error::option(format!("--tsc-khz {khz}")))?;
    }
    let debugged = cli.gdb.is_some() || cli.usual_gdb;
    if cli.paused && !debugged && cli.control.is_none() && cli.qmp.is_none() {
        return Err(Error::Usage(
            "--paused: nobody could let the guest go on: give --gdb, --control or --qmp, too".into(),
        ));
    }
    let looked_at = debugged || cli.control.is_some();
    check_on_panic(cli.on_panic.as_ref(), looked_at, "--gdb or --control")?;
    if cli.gdb_allow_files && !debugged {
        return Err(Error::Usage("--gdb-allow-files: needs --gdb or -s".into()));
    }
    let epochs = cli.record.is_some().then_some(EpochOptions {
        limit: cli.record_snapshots,
        spacing: cli.record_every,
    });
    let config = MachineConfig {
        kernel,
        initrd: cli.initrd,
        inject: cli.inject,
        collect: cli.collect,
        bus: cli.bus.unwrap_or(match cli.disks.is_empty() {
            true => BusChoice::Mmio,
            // The kernels of disk images have the drivers of PCI devices.
            false => BusChoice::Pci,
        }),
        disks: cli.disks,
        packed: None,
        command: None,
        shares: cli.shares,
        net: cli.net,
        console: cli.console,
        cmdline: cli.cmdline.map(OsStringExt::into_vec),
        memory: cli.memory,
        cpus: cpus_of(cli.cpus),
        topology: Some(cli.cpus),
        model,
        tsc_offset: cli.tsc_offset,
        units,
        engine: match (cli.engine, cli.clock) {
            // Only the software engine has that clock.
            (EngineChoice::Auto, Some(ClockMode::Virtual)) => EngineChoice::Soft,
            (engine, _) => engine,
        },
        irqchip: cli.irqchip,
        translate_after: cli.translate.0,
        translate_memory: cli.translate_memory,
        vector: cli.vector,
        kvm_defects: cli.kvm_defects,
        host_trace: None,
        symbols: cli.trace.symbols().map(Path::to_path_buf),
        serial: cli.serial,
        control: cli.control,
        qmp: cli.qmp,
        gdb: cli.gdb.or(cli.usual_gdb.then_some(DebugAddress::USUAL)),
        sandbox: cli.sandbox == crate::jail::Sandbox::On,
        allow_write: cli.allow_write,
        gdb_allow_files: cli.gdb_allow_files,
        paused: cli.paused,
        trace: cli.trace.options()?,
        reverse: cli.reverse.then(|| ReverseOptions {
            memory: cli.reverse_memory,
            ..ReverseOptions::default()
        }),
        record: cli.record.map(|folder| RecordOptions { folder, arguments }),
        replay: None,
        epochs: epochs.filter(|options| options.limit > 0),
        epoch: None,
        part_end: None,
        restore,
        arguments: made_by,
        clock,
        seed: match cli.seed {
            Seed::Fixed(seed) => seed,
            Seed::Random => random_seed(),
        },
        rtc_base,
        on_panic: cli.on_panic,
        max_instructions: cli.max_instructions,
        timeout: cli.timeout,
        stats: cli.stats,
    };
    Ok(Job::Run {
        config: Box::new(config),
        verbose: cli.verbose,
    })
}

/// The command line of a machine that goes on from a snapshot: what it is made of is the snapshot's, all else is as given here.
fn restored(here: Cli, file: PathBuf) -> Result<(Cli, Option<RestoreOptions>, Vec<OsString>), Error> {
    let option = || Error::option(format!("--restore {}", file.display()));
    let snapshot = SnapshotFile::open(&file).map_err(option())?;
    let arguments = snapshot.arguments();
    if arguments.is_empty() {
        return Err(option()(SnapshotFileError::NoCommandLine));
    }
    let words = std::iter::once("minivmm".into()).chain(arguments.iter().cloned());
    let there = Cli::try_parse_from(words).map_err(|error| {
        let error = Error::Usage(one_line(&error.to_string()));
        option()(SnapshotFileError::CommandLine(Box::new(error)))
    })?;
    let absolute = |path: PathBuf| snapshot.directory().join(path);
    let model = |spec: String| match spec.split(',').next() {
        Some(name) if name.ends_with(".toml") => absolute(spec.into()).to_string_lossy().into_owned(),
        _ => spec,
    };
    let disks = there.disks.into_iter().map(|disk| DiskConfig {
        path: absolute(disk.path),
        ..disk
    });
    let restore = RestoreOptions {
        second_serial: here.collect.is_none() && there.collect.is_some(),
        file,
    };
    let cli = Cli {
        kernel: there.kernel.map(absolute),
        disks: disks.collect(),
        bus: there.bus,
        console: there.console,
        memory: there.memory,
        cpus: there.cpus,
        cpu_model: there.cpu_model.map(model),
        units: there.units,
        tsc_khz: there.tsc_khz,
        tsc_offset: there.tsc_offset,
        seed: there.seed,
        rtc_base: there.rtc_base,
        clock: here.clock.or(there.clock),
        engine: match here.engine {
            EngineChoice::Auto => EngineChoice::Soft,
            engine => engine,
        },
        ..here
    };
    Ok((cli, Some(restore), arguments))
}

/// The list of `minivmm models`.
pub fn models() -> String {
    let width = MODELS.iter().map(|m| m.name.len()).max().unwrap_or(0);
    let list: String = MODELS
        .iter()
        .map(|m| format!("{:width$}  {}\n", m.name, m.description))
        .collect();
    format!(
        "{list}\nNo model shows AMX, and transactions only with +rtm; `minivmm models NAME` says what else of a part is hidden, and why.\n"
    )
}

#[cfg(test)]
#[path = "cli_test.rs"]
mod tests;
