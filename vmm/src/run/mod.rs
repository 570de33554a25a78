//! `minivmm run`: a command in a Linux guest that has the host's files.
//!
//! # Theory
//! The guest's root file system is a shared directory, read-only, below an overlay in the guest's memory; the current directory is
//! shared above it. So nothing has to be installed or packed for a guest, and what it writes elsewhere is gone with it.
//!
//! # Practice
//! The initial RAM disk is put together as the command is given: our first process (`init/init.rs`), the modules that the
//! kernel needs to mount that ([`modules`]), and a list of steps ([`plan`]). Standard output and error and the exit status come back
//! by a shared directory of their own ([`machine::share::channel`]).

mod error;
pub mod modules;
pub mod options;
mod plan;

use std::{
    ffi::OsString,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use clap::ValueEnum;
use log::info;
use machine::share::{ShareMode, channel::Report};

pub use self::error::RunError;
use self::{modules::Modules, options::RunOptions, plan::Plan};
use crate::{
    config::{
        BusChoice, ClockMode, ConsoleChoice, EngineChoice, MachineConfig, RecordOptions, ReverseOptions, SerialTarget,
        ShareConfig, VectorChoice,
    },
    error::Error,
    front::serve,
    model,
    parse::{RtcBase, Seed, check_on_panic, cpus_of, now, random_seed},
    vm::End,
};
use kvm::units::{Unit, UnitRequest};

/// The exit status where minivmm or the guest failed.
pub const FAILED: u8 = 125;
/// The exit status where the command cannot be executed.
const NOT_EXECUTABLE: u8 = 126;
/// The exit status where there is no such command.
const NOT_FOUND: u8 = 127;
/// The first process's file.
const INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/init"));
/// What our first process says before why it cannot go on.
const COMPLAINT: &str = "minivmm-init: ";

/// What every guest needs of its kernel, each module with the option that a kernel has it by. The modules that they need come by
/// themselves.
const MODULES: [(&str, &str); 2] = [("virtiofs", "CONFIG_VIRTIO_FS"), ("overlay", "CONFIG_OVERLAY_FS")];
const VIRTIO_PCI: (&str, &str) = ("virtio_pci", "CONFIG_VIRTIO_PCI");
const VIRTIO_MMIO: (&str, &str) = ("virtio_mmio", "CONFIG_VIRTIO_MMIO");
const VIRTIO_NET: (&str, &str) = ("virtio_net", "CONFIG_VIRTIO_NET");
const VIRTIO_CONSOLE: (&str, &str) = ("virtio_console", "CONFIG_VIRTIO_CONSOLE");

/// Runs a command to its end; the answer is the exit status, and what to say.
///
/// # Errors
/// The guest cannot be built, or fails.
pub fn command(options: &RunOptions) -> Result<(u8, Option<String>), Error> {
    let report = Arc::new(Report::default());
    let config = machine(options, &report, None)?;
    let ended = serve::run(&config)?;
    if let Some(error) = report.error() {
        let name = options.command.first().map(|name| name.to_string_lossy().into_owned());
        let why = machine::plain(&io::Error::from_raw_os_error(error));
        let status = match error {
            libc::ENOENT => NOT_FOUND,
            _ => NOT_EXECUTABLE,
        };
        return Ok((status, Some(format!("run: {}: {why}", name.unwrap_or_default()))));
    }
    if let (Some(status), End::PowerOff | End::Reset) = (report.status(), &ended.end) {
        return Ok((status, None));
    }
    let status = match ended.end {
        End::Signal(signal) => 128u8.wrapping_add(signal as u8),
        _ => FAILED,
    };
    let messages = String::from_utf8_lossy(&ended.messages);
    // A panic alone says less than the kernel's last messages.
    let message = ended.end.message().and_then(|_| ended.message());
    let text = match (message, complaint(&messages)) {
        (_, Some(complaint)) => format!("run: the guest cannot start the command: {complaint}"),
        (Some(message), None) => message,
        (None, None) if matches!(ended.end, End::Quit) => "run: Ctrl-A x".into(),
        (None, None) => {
            // With -v they have been seen.
            let seen = match options.verbose {
                0 => format!(":\n{}", last_lines(&messages)),
                _ => String::new(),
            };
            format!("run: the guest ended before the command did; its last messages{seen}")
        }
    };
    Ok((status, Some(text)))
}

/// Why our first process could not go on, with what a kernel lacks by its name.
fn complaint(messages: &str) -> Option<String> {
    let (_, rest) = messages.rsplit_once(COMPLAINT)?;
    let line = rest.lines().next().unwrap_or_default().trim();
    let lacks = [
        ("virtiofs", "CONFIG_VIRTIO_FS"),
        ("overlay", "CONFIG_OVERLAY_FS"),
        ("devtmpfs", "CONFIG_DEVTMPFS"),
    ];
    let missing = lacks
        .iter()
        .find(|(kind, _)| line.starts_with(&format!("cannot mount {kind} ")));
    if missing.is_some() && line.ends_with("errno 22") && line.starts_with("cannot mount virtiofs ") {
        // EINVAL: the file system is there, and no device that has the tag.
        return Some(
            "its kernel finds no virtio device: it takes one with CONFIG_VIRTIO_PCI, or --bus mmio and one with CONFIG_VIRTIO_MMIO".into(),
        );
    }
    Some(match missing {
        // ENODEV: there is no such file system.
        Some((kind, config)) if line.ends_with("errno 19") => {
            format!("its kernel has no {kind}: it takes one with {config}, or its modules with --modules DIR")
        }
        _ => line.into(),
    })
}

fn last_lines(messages: &str) -> String {
    const LINES: usize = 20;
    let lines: Vec<&str> = messages
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// The guest.
fn machine(options: &RunOptions, report: &Arc<Report>, packed: Option<Vec<u8>>) -> Result<MachineConfig, Error> {
    check_on_panic(options.on_panic.as_ref(), options.gdb.is_some(), "--gdb")?;
    let kernel = kernel(options)?;
    let release = release(&kernel)?;
    info!("kernel {}: Linux {release}", kernel.display());
    let shares = shares(options)?;
    let (archive, bus, console) = match packed {
        // Recorded with the choices that were made: see `spelled_out`.
        Some(packed) => (
            packed,
            options.bus.unwrap_or_default(),
            options.console.unwrap_or_default(),
        ),
        None => archive(options, &kernel, &release, &shares)?,
    };
    let mut cmdline = match options.verbose {
        // The self-tests of its ciphers are a third of a kernel's boot.
        0 => b"console=ttyS0 quiet panic=-1 cryptomgr.notests".to_vec(),
        _ => b"console=ttyS0 panic=-1 cryptomgr.notests".to_vec(),
    };
    if let Some(more) = &options.append {
        cmdline.push(b' ');
        cmdline.extend(std::os::unix::ffi::OsStrExt::as_bytes(more.as_os_str()));
    }
    let units = options.units.0;
    let wants_pt = units[Unit::Pt].is_some_and(|request| request != UnitRequest::Off);
    let model = match &options.cpu_model {
        Some(name) => model::choose(Some(name), wants_pt)?,
        // With Intel PT there is one that is meant, whatever of it is computed by tables.
        None if wants_pt => model::choose(None, wants_pt)?,
        None => model::choose(Some(default_model(options.vector)), wants_pt)?,
    };
    let chosen = Chosen {
        kernel: &kernel,
        model: model.name,
        bus,
        console,
    };
    let terminal = io::IsTerminal::is_terminal(&io::stdin());
    Ok(MachineConfig {
        packed: Some(Arc::new(archive)),
        command: Some(Arc::clone(report)),
        shares,
        bus,
        console,
        net: options.net.clone(),
        cmdline: Some(cmdline),
        memory: options.memory,
        cpus: cpus_of(options.cpus),
        topology: Some(options.cpus),
        model,
        units,
        engine: match (options.engine, options.clock) {
            (EngineChoice::Auto, Some(ClockMode::Virtual)) => EngineChoice::Soft,
            (engine, _) => engine,
        },
        irqchip: None,
        vector: options.vector,
        serial: SerialTarget::Command {
            report: Arc::clone(report),
            live: options.verbose > 0,
        },
        gdb: options.gdb.clone(),
        paused: options.paused,
        sandbox: options.sandbox == crate::jail::Sandbox::On,
        trace: options.trace.clone().options()?,
        reverse: options.reverse.then(ReverseOptions::default),
        record: options.record.as_ref().map(|folder| RecordOptions {
            folder: folder.clone(),
            arguments: spelled_out(std::env::args_os().skip(1).collect(), options, &chosen),
        }),
        clock: options
            .clock
            .unwrap_or(match terminal && !options.reverse && options.record.is_none() {
                true => ClockMode::Paced,
                false => ClockMode::Virtual,
            }),
        seed: match options.seed {
            Seed::Fixed(seed) => seed,
            Seed::Random => random_seed(),
        },
        rtc_base: match options.rtc_base {
            Some(RtcBase::At(seconds)) => seconds,
            Some(RtcBase::Now) | None => now(),
        },
        on_panic: options.on_panic.clone(),
        timeout: options.timeout,
        stats: options.stats,
        ..MachineConfig::new(kernel)
    })
}

/// The initial RAM disk, and what of the machine depends on what the kernel has: where devices are, and what input comes through.
fn archive(
    options: &RunOptions,
    kernel: &Path,
    release: &str,
    shares: &[ShareConfig],
) -> Result<(Vec<u8>, BusChoice, ConsoleChoice), RunError> {
    let found = match folder_of_modules(options, kernel, release)? {
        Some(folder) => {
            info!("modules {}", folder.display());
            let found = Modules::of(&folder).map_err(|source| RunError::File {
                option: "--modules",
                path: folder.clone(),
                source,
            })?;
            Some(found)
        }
        None => {
            info!("no modules for Linux {release} were found: all that is needed has to be built in");
            None
        }
    };
    let has = |module: (&str, _)| found.as_ref().is_some_and(|found| found.has(module.0));
    let bus = options.bus.unwrap_or(match has(VIRTIO_MMIO) && !has(VIRTIO_PCI) {
        true => BusChoice::Mmio,
        false => BusChoice::Pci,
    });
    let console = options.console.unwrap_or(match has(VIRTIO_CONSOLE) {
        true => ConsoleChoice::Hvc,
        false => ConsoleChoice::Serial,
    });
    let mut needed = vec![match bus {
        BusChoice::Pci => VIRTIO_PCI,
        BusChoice::Mmio => VIRTIO_MMIO,
    }];
    needed.extend((console == ConsoleChoice::Hvc).then_some(VIRTIO_CONSOLE));
    needed.extend(options.net.is_some().then_some(VIRTIO_NET));
    needed.extend(MODULES);
    let modules = match &found {
        Some(found) => found.load(&needed)?,
        None => Vec::new(),
    };
    let plan = Plan {
        modules: &modules,
        shares,
        console,
        options,
    };
    Ok((plan.archive(INIT)?, bus, console))
}

/// What of a guest was chosen by what this host has, where no option says it.
struct Chosen<'a> {
    kernel: &'a Path,
    model: &'a str,
    bus: BusChoice,
    console: ConsoleChoice,
}

/// The command line of a session: `arguments`, with what was chosen by what this host has, since a host of another CPU, or this one with another
/// kernel, would choose otherwise when it is run again.
fn spelled_out(mut arguments: Vec<OsString>, options: &RunOptions, chosen: &Chosen) -> Vec<OsString> {
    let behind = arguments.iter().position(|word| word == "run").map_or(0, |at| at + 1);
    let name = |value: Option<clap::builder::PossibleValue>| value.map(|value| value.get_name().into());
    let choices: [(&str, bool, Option<OsString>); 4] = [
        ("--kernel=", options.kernel.is_none(), Some(chosen.kernel.into())),
        ("--cpu-model=", options.cpu_model.is_none(), Some(chosen.model.into())),
        ("--bus=", options.bus.is_none(), name(chosen.bus.to_possible_value())),
        (
            "--console=",
            options.console.is_none(),
            name(chosen.console.to_possible_value()),
        ),
    ];
    for (option, is_open, value) in choices {
        if let (true, Some(value)) = (is_open, value) {
            let mut word = OsString::from(option);
            word.push(value);
            arguments.insert(behind, word);
        }
    }
    arguments
}

/// The machine of a command that was recorded, with the initial RAM disk that it had.
///
/// # Errors
/// A directory or the kernel is not there any more.
pub fn replayed(options: &RunOptions, packed: Vec<u8>) -> Result<MachineConfig, Error> {
    machine(options, &Arc::default(), Some(packed))
}

/// The model of a guest of which nothing is asked: distributions are built for x86-64-v3 (AVX2) by now, and libraries take AVX-512 where
/// they find it, which is slow by tables on hosts without it. alderlake has no AVX-512, nothing hidden of it, and every unit.
/// Where the host lacks some of what it has, a lesser model is faster than one by tables.
fn default_model(vector: Option<VectorChoice>) -> &'static str {
    use std::is_x86_feature_detected as host;
    if matches!(vector, Some(VectorChoice::Portable | VectorChoice::Tables)) {
        return model::DEFAULT_WITH_PT;
    }
    let haswell = host!("avx2") && host!("fma") && host!("f16c");
    match haswell && host!("vaes") && host!("vpclmulqdq") && host!("sha") && host!("gfni") {
        true => model::DEFAULT_WITH_PT,
        false if haswell => "haswell",
        false => model::DEFAULT,
    }
}

/// The kernel: the one that is given, the host's own, or the one that was fetched for guests.
fn kernel(options: &RunOptions) -> Result<PathBuf, RunError> {
    if let Some(kernel) = &options.kernel {
        return Ok(kernel.clone());
    }
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let own = PathBuf::from(format!("/boot/vmlinuz-{release}"));
    if fs::File::open(&own).is_ok() {
        return Ok(own);
    }
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))
        .map(|cache| cache.join("minivmm/vmlinuz"));
    // target/PROFILE/minivmm, and target/guest/vmlinuz.
    let built = std::env::current_exe().ok().and_then(|program| {
        let target = program.parent()?.parent()?;
        Some(target.join("guest/vmlinuz"))
    });
    let found = [cache, built].into_iter().flatten().find(|path| path.is_file());
    let found = found.ok_or(RunError::NoKernel { tried: own.clone() })?;
    info!("{} cannot be read: the kernel is {}", own.display(), found.display());
    Ok(found)
}

/// A kernel's release, from its boot header (Linux Documentation/arch/x86/boot.rst, "kernel_version").
///
/// # Errors
/// The file cannot be read, or is no Linux.
pub fn release(kernel: &Path) -> Result<String, RunError> {
    let failed = |source| RunError::File {
        option: "--kernel",
        path: kernel.into(),
        source,
    };
    let not_linux = || RunError::NotLinux { path: kernel.into() };
    let mut head = Vec::new();
    let file = trace::regular::open(kernel).map_err(failed)?;
    file.take(64 << 10).read_to_end(&mut head).map_err(failed)?;
    if head.get(0x202..0x206) != Some(b"HdrS") {
        return Err(not_linux());
    }
    let at = u16::from_le_bytes([head[0x20e], *head.get(0x20f).ok_or_else(not_linux)?]);
    let text = head.get(usize::from(at) + 0x200..).ok_or_else(not_linux)?;
    let end = text.iter().take(256).position(|byte| matches!(byte, 0 | b' '));
    let text = &text[..end.ok_or_else(not_linux)?];
    let release = String::from_utf8(text.to_vec()).map_err(|_| not_linux())?;
    match release.is_empty() || release.contains('/') {
        true => Err(not_linux()),
        false => Ok(release),
    }
}

/// Where the kernel's modules are.
fn folder_of_modules(options: &RunOptions, kernel: &Path, release: &str) -> Result<Option<PathBuf>, RunError> {
    let has = |folder: &PathBuf| folder.join("kernel").is_dir();
    if let Some(given) = &options.modules {
        let found = [
            given.clone(),
            given.join(release),
            given.join("lib/modules").join(release),
            given.join("usr/lib/modules").join(release),
        ];
        let found = found.into_iter().find(has);
        return found.map(Some).ok_or_else(|| RunError::NoModules {
            path: given.clone(),
            release: release.into(),
        });
    }
    let beside = crate::jail::folder_of(kernel);
    // Debian's packages have them below /usr since 13.
    let places = [
        beside.join("../lib/modules"),
        beside.join("../usr/lib/modules"),
        beside.join("lib/modules"),
        "/lib/modules".into(),
    ];
    Ok(places.into_iter().map(|place| place.join(release)).find(has))
}

/// The directories that the guest has: the root first, and each before what is below it.
fn shares(options: &RunOptions) -> Result<Vec<ShareConfig>, RunError> {
    let canonical = |option: &'static str, path: &Path| {
        let failed = |source| RunError::File {
            option,
            path: path.into(),
            source,
        };
        let canonical = path.canonicalize().map_err(failed)?;
        match canonical.is_dir() {
            true => Ok(canonical),
            false => Err(failed(io::ErrorKind::NotADirectory.into())),
        }
    };
    let root = canonical("--root", &options.root)?;
    let mut below: Vec<(PathBuf, ShareMode)> = Vec::new();
    let here = canonical("run", Path::new("."))?;
    match here.parent() {
        Some(_) => below.push((here, ShareMode::WriteBack)),
        None => info!("the current directory is /: what the guest writes there is gone with it"),
    }
    for path in &options.rw {
        below.push((canonical("--rw", path)?, ShareMode::WriteBack));
    }
    for path in &options.ro {
        below.push((canonical("--ro", path)?, ShareMode::ReadOnly));
    }
    // What is given twice is as it was said last.
    let mut each: Vec<(PathBuf, ShareMode)> = Vec::new();
    for (path, mode) in below {
        match each.iter_mut().find(|(known, _)| *known == path) {
            Some(known) => known.1 = mode,
            None => each.push((path, mode)),
        }
    }
    each.sort();
    let root = ShareConfig {
        tag: "root".into(),
        path: root,
        mode: ShareMode::ReadOnly,
    };
    let others = each.into_iter().enumerate().map(|(index, (path, mode))| ShareConfig {
        tag: format!("share{index}"),
        path,
        mode,
    });
    Ok(std::iter::once(root).chain(others).collect())
}

#[cfg(test)]
#[path = "run_test.rs"]
mod tests;
