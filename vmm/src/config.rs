//! What a machine is made of, as plain data: the command line ends here and the machine begins here.

use std::{
    ffi::OsString,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use machine::{
    disk::{DiskFormat, DiskMode},
    share::{ShareMode, channel::Report},
};
use trace::format::GuestSources;
use x86::model::{CpuModel, topology::Topology};

use kvm::tracer::Traces;

/// The real-time clock's date in a run on the virtual clock, unless `--rtc-base` says otherwise: 2024-01-01T00:00:00Z.
pub const VIRTUAL_RTC_BASE: i64 = 1_704_067_200;

/// Which CPU runs the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineChoice {
    /// KVM where it runs instructions on the processor, else the software CPU.
    Auto,
    /// The software CPU.
    Soft,
    /// Linux KVM.
    Kvm,
}

/// How the software engine executes vector instructions. The results are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum VectorChoice {
    /// By the host's own instructions, and as with `portable` what the host has not got
    Host,
    /// By no more of the host than x86-64-v1: AVX by SSE2 on its halves, and by tables what SSE2 cannot do
    Portable,
    /// By the engine's own tables alone
    Tables,
}

impl From<VectorChoice> for engine::Vectors {
    fn from(choice: VectorChoice) -> engine::Vectors {
        match choice {
            VectorChoice::Host => engine::Vectors::Host,
            VectorChoice::Portable => engine::Vectors::Portable,
            VectorChoice::Tables => engine::Vectors::Tables,
        }
    }
}

/// What to do where a trial guest finds that this host's KVM does not do what it accepts ([`kvm::trial`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum KvmDefects {
    /// End with an error that names what was found
    #[default]
    Refuse,
    /// Run all the same: the guest sees what such a KVM shows it
    Accept,
}

/// Where the first serial port leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SerialTarget {
    /// Standard input and output.
    Stdio,
    /// Output to a file (created, or emptied once everything else is in order); no input.
    File(PathBuf),
    /// Nowhere.
    Null,
    /// Output is kept in memory, input comes from the caller: for tests and programs that embed a machine.
    Buffer,
    /// The kernel's messages of a guest that runs a command: kept in memory, and shown on standard error if they are `live`. Input is
    /// standard input, of as many bytes as the guest wants, with its end.
    Command {
        /// What the guest wants.
        report: Arc<Report>,
        /// Messages are shown as they come.
        live: bool,
    },
}

impl std::fmt::Display for SerialTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SerialTarget::Stdio => f.write_str("stdio"),
            SerialTarget::File(path) => write!(f, "file:{}", path.display()),
            SerialTarget::Null => f.write_str("null"),
            SerialTarget::Buffer => f.write_str("buffer"),
            SerialTarget::Command { .. } => f.write_str("command"),
        }
    }
}

/// How virtual time relates to wall time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ClockMode {
    /// Virtual time is kept from running ahead of wall time (an idle guest sleeps) and jumps forward when it lags.
    Paced,
    /// Virtual time is a function of the instructions retired alone: a run repeats to the bit, and idle time costs nothing.
    Virtual,
}

/// Where virtio devices are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum BusChoice {
    /// At fixed addresses that the ACPI tables name (virtio-mmio)
    #[default]
    Mmio,
    /// On a PCI bus (virtio-pci), where the kernels and installers of distributions look for them
    Pci,
}

impl From<BusChoice> for machine::pci::BusKind {
    fn from(choice: BusChoice) -> Self {
        match choice {
            BusChoice::Mmio => machine::pci::BusKind::Mmio,
            BusChoice::Pci => machine::pci::BusKind::Pci,
        }
    }
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// A raw image or a block device.
    pub path: PathBuf,
    /// What may happen to it.
    pub mode: DiskMode,
    /// What is in the file; `None`: sectors one after the other, and a file that looks like something else is refused.
    pub format: Option<DiskFormat>,
}

/// A TCP port of the host that leads to one of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The host's address.
    pub address: IpAddr,
    /// The host's port.
    pub host: u16,
    /// The guest's.
    pub guest: u16,
}

/// What the guest's network device is connected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetConfig {
    /// The host's own sockets, by passt.
    User {
        /// Ports of the host that lead to the guest.
        forwards: Vec<Forward>,
    },
    /// A tap interface of the host.
    Tap(String),
}

/// Where the console is in the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ConsoleChoice {
    /// The first serial port, ttyS0
    #[default]
    Serial,
    /// A virtio console, hvc0; what is sent to the first serial port is shown, too
    Hvc,
}

/// A shared directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareConfig {
    /// What the guest mounts it by: up to 36 bytes.
    pub tag: String,
    /// The directory.
    pub path: PathBuf,
    /// What the guest may do with it.
    pub mode: ShareMode,
}

/// The memory that points take at most, unless `--reverse-memory` says otherwise.
pub const REVERSE_MEMORY: u64 = 1 << 30;
/// Steps between two points as the run goes on: a tenth of a second or two.
const SPACING: u64 = 1 << 23;

/// How a run is kept, so that it can be gone back in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReverseOptions {
    /// What points may take of memory, in bytes; about, as the first and the last one are always kept.
    pub memory: u64,
    /// Steps between two points as the run goes on.
    pub spacing: u64,
}

impl Default for ReverseOptions {
    fn default() -> Self {
        ReverseOptions {
            memory: REVERSE_MEMORY,
            spacing: SPACING,
        }
    }
}

/// The room on disk that a session's snapshots take at most, unless `--record-snapshots` says otherwise.
pub const EPOCHS_LIMIT: u64 = 512 << 20;
/// Steps between two snapshots of a session, unless `--record-every` says otherwise: that between two looks of a recorder for the
/// names of a Linux guest.
pub const EPOCHS_SPACING: u64 = 1 << 26;

/// The snapshots that a recorded session keeps on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochOptions {
    /// What they may take together, in bytes.
    pub limit: u64,
    /// Steps between two of them, until they are thinned.
    pub spacing: u64,
}

impl Default for EpochOptions {
    fn default() -> Self {
        EpochOptions {
            limit: EPOCHS_LIMIT,
            spacing: EPOCHS_SPACING,
        }
    }
}

/// A recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordOptions {
    /// The directory, which is made; one that is there has to be empty.
    pub folder: PathBuf,
    /// The command line without the program's name: the replay has the same machine.
    pub arguments: Vec<OsString>,
}

/// A snapshot that a machine goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreOptions {
    /// The file.
    pub file: PathBuf,
    /// The machine has a second serial port, although nothing is collected from it.
    pub second_serial: bool,
}

/// A part of an initial RAM disk, or a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitrdFile {
    /// The file.
    pub path: PathBuf,
    /// The words that a multiboot or PVH kernel gets behind its name.
    pub words: Vec<u8>,
}

impl<P: Into<PathBuf>> From<P> for InitrdFile {
    fn from(path: P) -> Self {
        InitrdFile {
            path: path.into(),
            words: Vec::new(),
        }
    }
}

/// What is done when the guest's Linux panics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnPanic {
    /// The run ends, once the message is out.
    Exit,
    /// The guest is held where `panic` begins.
    Stop,
    /// A core file is written to this path, which is new, and the run ends as with [`OnPanic::Exit`].
    Dump(PathBuf),
}

/// A machine to be built and run.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// The kernel: a bzImage or an ELF32 multiboot image.
    pub kernel: PathBuf,
    /// The parts of Linux's initial RAM disk, or the modules of a multiboot or PVH kernel, in order.
    pub initrd: Vec<InitrdFile>,
    /// A folder whose tree is below /inject in a Linux guest.
    pub inject: Option<PathBuf>,
    /// A folder for the files that the guest sends through its second serial port, which exists if this is given.
    pub collect: Option<PathBuf>,
    /// The disks, in the order in which the guest finds them.
    pub disks: Vec<DiskConfig>,
    /// A part of the initial RAM disk that is no file, behind those that are.
    pub packed: Option<Arc<Vec<u8>>>,
    /// The guest runs a command, and says here what comes of it.
    pub command: Option<Arc<Report>>,
    /// Shared directories, by virtio-fs.
    pub shares: Vec<ShareConfig>,
    /// Where virtio devices are.
    pub bus: BusChoice,
    /// The guest's network, if it has one.
    pub net: Option<NetConfig>,
    /// Where goes what is typed.
    pub console: ConsoleChoice,
    /// The guest's command line; `None`: [`machine::loader::DEFAULT_LINUX_CMDLINE`] for Linux, empty for multiboot.
    pub cmdline: Option<Vec<u8>>,
    /// RAM in bytes.
    pub memory: u64,
    /// How many CPUs, from 1 on; the boot CPU is the first.
    pub cpus: u8,
    /// How they are arranged, in the place of `cpus`; `None`: each is a core.
    pub topology: Option<Topology>,
    /// The CPU model. [`CpuModel::with_tsc_khz`] makes one whose time-stamp counter runs at another frequency.
    pub model: &'static CpuModel,
    /// What every CPU's time-stamp counter reads at the start of the run, modulo 2^64. IA32_TSC_ADJUST is 0 all the same: this
    /// is a host's offset, which no guest sees.
    pub tsc_offset: u64,
    /// Who each debug and trace unit is to be.
    pub units: kvm::units::UnitRequests,
    /// What records a guest on KVM whose Intel PT is the host's; `None`: perf. For tests, with a recording.
    pub host_trace: Option<Arc<dyn Traces>>,
    /// The engine.
    pub engine: EngineChoice,
    /// Whose interrupt controllers a machine on KVM has; `None`: as fits.
    pub irqchip: Option<kvm::irqchip::Irqchip>,
    /// How often the software engine executes a block before it translates it; `None`: it translates none.
    pub translate_after: Option<u32>,
    /// Bytes of translations that it keeps at most.
    pub translate_memory: u64,
    /// How it executes vector instructions; `None`: by the host's, where the host has all that the model shows.
    pub vector: Option<VectorChoice>,
    /// What to do where this host's KVM does not do what it accepts.
    pub kvm_defects: KvmDefects,
    /// Symbols of the guest's kernel, where it does not tell them itself: a vmlinux, a System.map, a copy of its `/proc/kallsyms`.
    pub symbols: Option<PathBuf>,
    /// The first serial port.
    pub serial: SerialTarget,
    /// Where a socket takes commands while the machine runs .
    pub control: Option<PathBuf>,
    /// Where a socket speaks QMP while the machine runs.
    pub qmp: Option<PathBuf>,
    /// Where a debugger connects .
    pub gdb: Option<crate::address::DebugAddress>,
    /// `monitor` commands of a debugger that is connected over TCP may write files.
    pub gdb_allow_files: bool,
    /// The process is jailed once the machine is built: see [`crate::jail`]. It cannot be undone.
    pub sandbox: bool,
    /// Folders that are written to when somebody says so as the machine runs (`monitor trace start DIR`).
    pub allow_write: Vec<PathBuf>,
    /// The guest stands before its first instruction until somebody lets it go on.
    pub paused: bool,
    /// What is recorded from outside, and where to.
    pub trace: Option<crate::recording::RecordingOptions>,
    /// The machine can go back, with this much kept.
    pub reverse: Option<ReverseOptions>,
    /// The session is recorded.
    pub record: Option<RecordOptions>,
    /// A recorded session that the run is to be again, in this directory.
    pub replay: Option<PathBuf>,
    /// The session that is recorded or replayed keeps snapshots.
    pub epochs: Option<EpochOptions>,
    /// The step of the session's snapshot that a replay begins at; its kernel is not loaded then.
    pub epoch: Option<u64>,
    /// The step at which a replay ends, before anything happens at it.
    pub part_end: Option<u64>,
    /// The state that the machine goes on from; its kernel is not loaded then.
    pub restore: Option<RestoreOptions>,
    /// The command line that this configuration is of, without the program's name: a snapshot in a file has it, so that `--restore` can
    /// make the machine again. Empty: there is none.
    pub arguments: Vec<OsString>,
    /// The clock.
    pub clock: ClockMode,
    /// The seed of RDRAND and RDSEED.
    pub seed: u64,
    /// The real-time clock's date when the machine starts, in seconds since 1970-01-01T00:00:00Z.
    pub rtc_base: i64,
    /// What is done when the guest's Linux panics; `None`: what it does itself.
    pub on_panic: Option<OnPanic>,
    /// Stop after so many instructions (REP iterations count).
    pub max_instructions: Option<u64>,
    /// Stop after so much wall time.
    pub timeout: Option<Duration>,
    /// Print figures about the run at its end.
    pub stats: bool,
}

impl MachineConfig {
    /// Where files of the guest are on the host, as a trace has it: so that the guest's programs are found when it is read.
    pub fn guest_files(&self) -> GuestSources {
        let text = |path: &Path| std::path::absolute(path).map(|path| path.display().to_string()).ok();
        GuestSources {
            initrd: self.initrd.iter().filter_map(|part| text(&part.path)).collect(),
            inject: self.inject.as_deref().and_then(text),
            shares: self.shares.iter().filter_map(|share| text(&share.path)).collect(),
        }
    }

    /// How the machine's CPUs are arranged.
    pub fn topology(&self) -> Topology {
        self.topology.unwrap_or(Topology::from(self.cpus))
    }

    /// A machine with the defaults of the command line, a deterministic clock and an in-memory console. On KVM it has this
    /// program's interrupt controllers, so that it can be stepped.
    pub fn new(kernel: impl Into<PathBuf>) -> Self {
        MachineConfig {
            kernel: kernel.into(),
            initrd: Vec::new(),
            inject: None,
            collect: None,
            disks: Vec::new(),
            packed: None,
            command: None,
            shares: Vec::new(),
            bus: BusChoice::Mmio,
            net: None,
            console: ConsoleChoice::Serial,
            cmdline: None,
            memory: 512 << 20,
            cpus: 1,
            topology: None,
            model: &x86::model::WESTMERE,
            tsc_offset: 0,
            units: kvm::units::UnitRequests::default(),
            host_trace: None,
            engine: EngineChoice::Soft,
            irqchip: Some(kvm::irqchip::Irqchip::Minivmm),
            translate_after: Some(engine::TRANSLATE_AFTER),
            translate_memory: engine::TRANSLATED_BYTES as u64,
            vector: None,
            kvm_defects: KvmDefects::Refuse,
            symbols: None,
            serial: SerialTarget::Buffer,
            control: None,
            qmp: None,
            gdb: None,
            gdb_allow_files: false,
            sandbox: false,
            allow_write: Vec::new(),
            paused: false,
            trace: None,
            reverse: None,
            record: None,
            replay: None,
            epochs: None,
            epoch: None,
            part_end: None,
            restore: None,
            arguments: Vec::new(),
            clock: ClockMode::Virtual,
            seed: 0,
            rtc_base: VIRTUAL_RTC_BASE,
            on_panic: None,
            max_instructions: None,
            timeout: None,
            stats: false,
        }
    }
}
