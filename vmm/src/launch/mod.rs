//! From a configuration to a machine at its first instruction: files are read, memory is laid out, devices and CPUs are made.

mod engine;
mod files;

use std::{
    fs::File,
    io::{self, Write},
    os::{fd::AsFd, unix::fs::OpenOptionsExt},
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
};

use ::engine::{CpuState, EngineOptions, HostLacks, host_vectors};
use devices::virtio::{
    console::{Console, Port},
    fs::{Fs, file_system::FileSystem},
    net::{self, Net},
};
use log::{info, warn};
use machine::{
    Machine, acpi, boot,
    collect::{self, Collector},
    disk::{Disk, DiskMode, temporary_file},
    loader,
    memory::Memory,
    share::{
        ShareMode,
        channel::{self, Channel},
        host::Host,
        lower::{Answers, Lower},
        overlay::Overlay,
    },
};
use x86::model::CpuModel;

use crate::{
    config::{ClockMode, ConsoleChoice, MachineConfig, NetConfig, RestoreOptions},
    error::Error,
    links::Links,
    net::{Plug, USER_MTU, connect},
    serial_line::SerialLine,
    timeline::{
        EpochError, Timeline,
        epochs::{self, Keeper},
        log::{Closed, Entry, Log},
        origin::Origin,
        output_gate::{Flow, OutputGate},
        run::{Beginning, Run},
        session::{Session, Writer},
        snapshot_file::{SnapshotFile, SnapshotFileError},
    },
    vm::{Hosted, Inlet, Moment, Parts, Vm, soft::Soft},
};

/// Why a 64-bit Linux does not run on a 32-bit model.
pub(crate) const NEEDS_LONG_MODE: &str = "this Linux kernel is entered in 64-bit mode, which the model lacks";

impl Run {
    /// Builds the machine: memory, tables, kernel, devices, CPU. Touches no file but for reading, unless it is a disk or the
    /// folder for what is collected.
    pub fn new(config: &MachineConfig) -> Result<Self, Error> {
        let host = engine::choose(config)?;
        if host.is_some() && kvm::clock::host_tsc_is_unstable() {
            warn!(
                "the host holds its time-stamp counter for unstable, so KVM moves the guest's, which may go back: boot the host \
                 with tsc=reliable if it is not so, or use --engine soft"
            );
        }
        let (model, irqchip) = match &host {
            Some(host) => {
                let irqchip = engine::irqchip(config, host)?;
                (engine::model(config, host, irqchip)?, irqchip)
            }
            None => {
                engine::check_soft(config)?;
                (engine::soft_model(config)?, kvm::irqchip::Irqchip::Minivmm)
            }
        };
        let config = &MachineConfig {
            model,
            ..config.clone()
        };
        let limit = 1u64.checked_shl(config.model.physical_bits()).unwrap_or(u64::MAX);
        let arranged = config.topology().check(config.model);
        arranged.map_err(Error::option(format!("--cpus {}", config.topology())))?;
        let memory = Memory::new(config.memory)?;
        if memory.end() > limit {
            let reason = format!("the model addresses {} bits of it", config.model.physical_bits());
            return Err(Error::Memory {
                size: config.memory,
                reason,
            });
        }
        let engine = memory
            .engine(
                config.model,
                EngineOptions {
                    vectors: engine::vectors(config.vector, config.model, host_vectors(config.model)),
                    translate_after: config.translate_after,
                    translated_bytes: config.translate_memory as usize,
                    ..EngineOptions::default()
                },
            )
            .map_err(|lacks| host_lacks(config.model, &lacks))?;
        if config.translate_after.is_some() && engine.translated().is_none() {
            info!(
                "this host gives no executable memory for translations (see `ulimit -f`): the software engine interprets"
            );
        }

        let snapshot = match &config.restore {
            Some(restore) => Some((restore, open_snapshot(restore, config)?)),
            None => None,
        };
        let session = match &config.replay {
            Some(folder) => Some(Session::open(folder)?),
            None => None,
        };
        let entry = match snapshot.is_some() || config.epoch.is_some() {
            true => None,
            false => Some(files::load(&memory, config)?),
        };
        if matches!(entry, Some(loader::Entry::Linux64 { .. })) && !config.model.features().lm() {
            return Err(Error::Engine {
                option: format!("--cpu-model {}", config.model.name),
                reason: format!("{NEEDS_LONG_MODE}: choose a model that has it (see `minivmm models`)"),
            });
        }
        info!(
            "CPU model {}: {}, Intel PT: {}",
            config.model.name,
            config.model.description,
            if config.model.features().intel_pt() {
                "yes"
            } else {
                "no"
            }
        );
        if let Some(entry) = &entry {
            info!("entering the kernel: {entry:x?}");
        }

        let line = SerialLine::default();
        let keeps = keeps_history(config)?;
        let (mut outputs, mut overlays) = (Vec::new(), Vec::new());
        let mut once = |out: Box<dyn Write + Send>| -> Box<dyn Write + Send> {
            match keeps {
                true => {
                    let (gate, flow) = OutputGate::new(out);
                    outputs.push(flow);
                    Box::new(gate)
                }
                false => out,
            }
        };
        let mut machine = Machine::new(
            config.model,
            config.topology(),
            memory,
            config.rtc_base,
            config.seed,
            once(Box::new(line.clone())),
        );
        machine.set_tsc_offset(config.tsc_offset);
        machine.set_bus(config.bus.into());
        for disk in &config.disks {
            let failed = |source| Error::File {
                option: "--disk",
                path: disk.path.clone(),
                source,
            };
            let mode = match disk.mode {
                DiskMode::ReadWrite if keeps => DiskMode::Overlay,
                mode => mode,
            };
            let medium = Disk::open(&disk.path, mode, disk.format).map_err(failed)?;
            overlays.extend(medium.overlay());
            machine
                .add_disk(Box::new(medium))
                .map_err(|e| failed(io::Error::other(e)))?;
        }
        let (mut shares, mut answers) = (Vec::new(), None);
        for share in &config.shares {
            let failed = |source| Error::File {
                option: "--share",
                path: share.path.clone(),
                source,
            };
            let files: Box<dyn FileSystem> = match share.mode {
                ShareMode::ReadWrite | ShareMode::WriteBack | ShareMode::ReadOnly if !keeps => {
                    Box::new(Host::open(&share.path, share.mode).map_err(failed)?)
                }
                _ => {
                    let answers = match &answers {
                        Some(answers) => Answers::clone(answers),
                        None => answers.insert(answers_of(config).map_err(failed)?).clone(),
                    };
                    let lower = Lower::new(&share.path, shares.len() as u32, answers).map_err(failed)?;
                    let overlay = Overlay::new(lower, config.rtc_base, share.mode == ShareMode::ReadOnly);
                    shares.push(overlay.upper());
                    Box::new(overlay)
                }
            };
            machine
                .add_virtio(Box::new(Fs::new(&share.tag, files)))
                .map_err(|e| failed(io::Error::other(e)))?;
        }
        if let Some(report) = &config.command {
            let stream = |which: io::Result<std::os::fd::OwnedFd>| {
                let file = which.map(File::from).map_err(|source| Error::System {
                    what: "opening the standard streams",
                    source,
                })?;
                Ok::<Box<dyn Write + Send>, Error>(Box::new(file))
            };
            let (stdout, stderr) = (
                stream(io::stdout().as_fd().try_clone_to_owned())?,
                stream(io::stderr().as_fd().try_clone_to_owned())?,
            );
            let channel = Channel::new(once(stdout), once(stderr), Arc::clone(report));
            machine
                .add_virtio(Box::new(Fs::new(channel::TAG, Box::new(channel))))
                .map_err(|e| Error::Usage(e.to_string()))?;
        }
        let mut ports = Vec::new();
        if config.console == ConsoleChoice::Hvc {
            // A command that `minivmm run` runs is sent its input through a port, and says nothing there.
            ports.push(match config.command {
                Some(_) => Port {
                    name: "input".into(),
                    console: false,
                    out: Box::new(io::sink()),
                },
                None => Port {
                    name: "console".into(),
                    console: true,
                    out: once(Box::new(line.clone())),
                },
            });
        }
        if let Some(folder) = &config.collect {
            let out: Box<dyn Write + Send> = match config.replay {
                // It has all been unpacked.
                Some(_) => Box::new(io::sink()),
                None => Box::new(Collector::open(folder, collect::LIMITS).map_err(|source| Error::File {
                    option: "--collect",
                    path: folder.clone(),
                    source,
                })?),
            };
            let out = SharedOutput::new(out);
            if config.console == ConsoleChoice::Hvc {
                ports.push(Port {
                    name: "collect".into(),
                    console: false,
                    out: once(Box::new(out.clone())),
                });
            }
            machine.add_second_serial(once(Box::new(out)));
        } else if config.restore.as_ref().is_some_and(|restore| restore.second_serial) {
            machine.add_second_serial(once(Box::new(io::sink())));
        }
        let mut links = Links::new().map_err(event_failed)?;
        let mut typed = Inlet::Serial;
        if config.console == ConsoleChoice::Hvc {
            let device = machine
                .add_virtio(Box::new(Console::new(ports, None)))
                .map_err(|e| Error::Usage(e.to_string()))?;
            typed = inlet(device);
        }
        if let Some(net) = &config.net {
            add_net(&mut machine, net, config, &mut links, &mut once)?;
        }
        if entry.is_some() {
            acpi::write(machine.memory(), &machine.hardware()).map_err(|e| Error::Memory {
                size: config.memory,
                reason: e.to_string(),
            })?;
        }
        let boot = match &entry {
            Some(entry) => boot::state(config.model, entry),
            None => CpuState::reset(config.model),
        };
        let hosted = match &host {
            Some(host) => Some(Hosted::new(engine::hypervisor(
                config,
                host,
                irqchip,
                machine.memory(),
            )?)?),
            None => None,
        };
        if let Some(lines) = hosted.as_ref().and_then(|hosted| hosted.hypervisor.lines()) {
            machine.platform().give_away_controllers(lines);
        }
        let soft = Soft::new(engine, config.model, machine.cpu_count(), &boot);
        let clock = match hosted {
            Some(_) => ClockMode::Paced,
            None => config.clock,
        };
        let mut vm = Vm::assemble(Parts {
            soft,
            hosted,
            machine,
            clock,
            overlays,
            shares,
            kernel: config.kernel.clone(),
            files: config.guest_files(),
            symbols: config.symbols.clone(),
        });
        let origin = match snapshot {
            Some((restore, snapshot)) => {
                let origin = snapshot.origin();
                snapshot.restore(&mut vm).map_err(restore_failed(restore))?;
                info!("{} goes on from step {}", restore.file.display(), vm.steps());
                origin
            }
            None => Origin::of(config)?,
        };
        let logged = match (&config.replay, &session, config.epoch) {
            (Some(folder), Some((session, ..)), Some(steps)) => {
                let restored = epochs::restore(folder, session.start(), steps, &mut vm);
                Some(restored.map_err(epoch_failed(folder, steps))?.logged)
            }
            _ => None,
        };
        if let Some(options) = &config.trace {
            vm.record_from_the_start(options)?;
            if options.part.continues {
                vm.go_on_recording();
            }
        }
        let timeline = match keeps {
            true => {
                let timeline = begin_timeline(config, &vm, outputs, answers.as_ref(), session, logged)?;
                Some(Box::new(timeline))
            }
            false => None,
        };
        if let Some(host) = &host {
            engine::warn_of_slowness(config, host);
        }
        Ok(Run::begin(Beginning {
            vm,
            timeline,
            lasting: lasting(config),
            origin,
            max_instructions: config.max_instructions,
            timeout: config.timeout,
            line,
            console: typed,
            links: Some(links).filter(|links| !links.is_empty()),
        }))
    }
}

/// The snapshot that a machine goes on from.
fn open_snapshot(restore: &RestoreOptions, config: &MachineConfig) -> Result<SnapshotFile, Error> {
    let failed = restore_failed(restore);
    let snapshot = SnapshotFile::open(&restore.file);
    let snapshot = snapshot.and_then(|snapshot| snapshot.check_disks(config).map(|()| snapshot));
    snapshot.map_err(failed)
}

/// What is wrong with the snapshot that a machine was to go on from.
fn restore_failed(restore: &RestoreOptions) -> impl FnOnce(SnapshotFileError) -> Error {
    Error::option(format!("--restore {}", restore.file.display()))
}

/// What is wrong with the snapshot that a part of a session was to begin at.
fn epoch_failed(folder: &Path, steps: u64) -> impl FnOnce(EpochError) -> Error {
    Error::option(format!("replay {}: its snapshot at step {steps}", folder.display()))
}

/// An output that several devices have. A guest uses one of them at a time.
#[derive(Clone)]
struct SharedOutput(Arc<Mutex<Box<dyn Write + Send>>>);

impl SharedOutput {
    fn new(out: Box<dyn Write + Send>) -> Self {
        SharedOutput(Arc::new(Mutex::new(out)))
    }

    fn out(&self) -> MutexGuard<'_, Box<dyn Write + Send>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Write for SharedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out().flush()
    }
}

fn event_failed(source: io::Error) -> Error {
    Error::System {
        what: "creating an event",
        source,
    }
}

/// The first port of a virtio device.
fn inlet(device: usize) -> Inlet {
    Inlet::Virtio {
        // There are fewer than 256.
        device: device as u8,
        port: 0,
    }
}

/// Adds the network device, and connects it. In a replay nobody is at the other end: what came is known, and what the guest sends has
/// been sent.
fn add_net(
    machine: &mut Machine,
    net: &NetConfig,
    config: &MachineConfig,
    links: &mut Links,
    once: &mut dyn FnMut(Box<dyn Write + Send>) -> Box<dyn Write + Send>,
) -> Result<(), Error> {
    /// A locally administered address; there is one machine at the end of each cable.
    const MAC: [u8; 6] = [0x52, 0x54, 0x00, 0x12, 0x34, 0x56];
    let (cable, plug) = Plug::new();
    let user = matches!(net, NetConfig::User { .. });
    let device = Net::new(net::Options {
        mac: MAC,
        mtu: user.then_some(USER_MTU),
        // What passt sends has come through the host's sockets, which have looked at it.
        trusted: user,
        out: once(Box::new(cable)),
    });
    let device = machine
        .add_virtio(Box::new(device))
        .map_err(|e| Error::Usage(e.to_string()))?;
    if config.replay.is_none() {
        let sender = links.add(inlet(device), true).map_err(event_failed)?;
        plug.connect(connect(net, sender)?);
    }
    Ok(())
}

/// The past of a machine at its beginning: what a session is recorded from, or replayed.
fn begin_timeline(
    config: &MachineConfig,
    vm: &Vm,
    outputs: Vec<Flow>,
    answers: Option<&Answers>,
    session: Option<(Session, Vec<Entry>, Moment, Closed)>,
    logged: Option<usize>,
) -> Result<Timeline, Error> {
    let mut timeline = Timeline::new(config.reverse, outputs);
    if config.record.is_none() && config.replay.is_none() {
        return Ok(timeline);
    }
    // At a snapshot, which is the session's, nothing is left of the files that it began from but the disks.
    let start = match (&session, logged) {
        (Some((session, ..)), Some(_)) => session.start(),
        _ => vm.digest(),
    };
    if let Some(options) = &config.record {
        timeline.log.write_to(Box::new(Writer::create(options, config, start)?));
        if let Some(answers) = answers {
            let path = options.folder.join(SHARES);
            let file = create_readable(&path).map_err(|source| Error::File {
                option: "--record",
                path: path.clone(),
                source,
            })?;
            answers.keep_in(file);
        }
    }
    if let (Some(folder), Some((session, entries, head, closed))) = (&config.replay, session) {
        session.check_disks(config)?;
        session.check_start(folder, start)?;
        timeline.log = Log::of(entries);
        timeline.log.go_to(logged.unwrap_or(0));
        timeline.part_end = config.part_end;
        (timeline.head, timeline.closed, timeline.live) = (head, Some(closed), false);
    }
    let folder = config.record.as_ref().map(|record| &record.folder);
    if let (Some(options), Some(folder)) = (config.epochs, folder.or(config.replay.as_ref())) {
        match vm.shares().is_empty() && config.command.is_none() {
            true => timeline.epochs = Some(Keeper::new(folder, start, options)),
            false => info!("no snapshots are kept: what a guest has made of shared directories is in none"),
        }
    }
    Ok(timeline)
}

/// The file of a recorded session that has what a guest has read of shared directories.
const SHARES: &str = "shares";

/// What the host answers about shared directories, or has answered.
fn answers_of(config: &MachineConfig) -> io::Result<Answers> {
    match &config.replay {
        Some(folder) => Answers::of(trace::regular::open_inside(&folder.join(SHARES))?),
        None => Ok(Answers::new(temporary_file()?)),
    }
}

/// Makes a file for this user alone that is read, too.
fn create_readable(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path)
}

/// What of a machine does not go back to a state that was kept, unless it keeps its past.
fn lasting(config: &MachineConfig) -> Option<String> {
    let host = |share: &&crate::config::ShareConfig| share.mode != ShareMode::Overlay;
    if let Some(share) = config.shares.iter().find(host) {
        let path = share.path.display();
        return Some(format!(
            "what the guest knows and writes of the shared directory {path} would not go back: give it as TAG={path},overlay, or use `--reverse`"
        ));
    }
    let written = |disk: &&crate::config::DiskConfig| disk.mode == DiskMode::ReadWrite;
    if let Some(disk) = config.disks.iter().find(written) {
        let path = disk.path.display();
        return Some(format!(
            "what the guest writes to {path} would not go back: give the disk as {path},overlay, or use `--reverse`"
        ));
    }
    let what = "what the guest has sent to `--collect` would not go back: `--reverse` copes with that";
    config.collect.as_ref().map(|_| what.into())
}

/// Whether a machine keeps where it came from.
///
/// # Errors
/// An option that going back and recording exclude.
fn keeps_history(config: &MachineConfig) -> Result<bool, Error> {
    let options = [
        (config.reverse.is_some(), "--reverse"),
        (config.record.is_some(), "--record"),
        (config.replay.is_some(), "replay"),
    ];
    let Some((_, option)) = options.into_iter().find(|(wanted, _)| *wanted) else {
        return Ok(false);
    };
    let refused = |why: &str| Err(Error::Usage(format!("{option}: {why}")));
    if config.clock == ClockMode::Paced {
        return refused("a run whose clock follows wall time does not repeat: leave out --clock paced");
    }
    if config.reverse.is_some() && config.trace.is_some() {
        return refused("a trace only grows: leave out --trace, or record with --record and trace the replay");
    }
    if config.record.is_some() && config.replay.is_some() {
        return refused("a session that is replayed has been recorded");
    }
    Ok(true)
}

/// The model has instructions that are executed by the host's own, which it has not got.
fn host_lacks(model: &CpuModel, lacks: &HostLacks) -> Error {
    Error::Engine {
        option: format!("--cpu-model {}", model.name),
        reason: format!("{lacks}, which the model needs: leave out --vector host, or choose another model or host"),
    }
}

#[cfg(test)]
#[path = "launch_test.rs"]
mod tests;
