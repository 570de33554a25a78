//! `--sandbox`: what this process may do once it looks at what a guest, a trace or a client made.
//!
//! # Theory
//! Whoever finds a fault in the engine, in a device or in a decoder, and makes it run code of theirs, has what the process has. So the
//! process gives away what it does not need once everything that needs it is open: capabilities, new privileges by execve(2), core
//! dumps, all system calls but those of a table ([`calls::CALLS`], seccomp(2)), and all files but those that the command line names for
//! writing (landlock(7)).
//!
//! # Practice
//! [`enter`] is called by a thread for itself, and holds for the threads that it starts. The threads that serve clients call it as they
//! begin and may open nothing at all; the thread of the machine calls it when disks, sockets and KVM are open. The threads that
//! run CPUs in KVM are there by then and call it, too. A call that is not in the table fails with EPERM.

pub mod calls;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::{
    process::{Resource, Rlimit, setrlimit},
    thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};

use self::calls::{CALLS, Only, threads};

/// The newest version of Landlock that is asked for; older kernels give what they have.
const NEWEST: ABI = ABI::V6;

/// The process is to be jailed: threads that serve clients look at it.
static WANTED: AtomicBool = AtomicBool::new(false);

/// `--sandbox`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Sandbox {
    /// The process is jailed.
    #[default]
    On,
    /// It is not.
    Off,
}

impl Sandbox {
    /// What the command line calls it.
    pub fn name(self) -> &'static str {
        match self {
            Sandbox::On => "on",
            Sandbox::Off => "off",
        }
    }
}

/// Why a thread cannot be jailed.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// A part of it, which every kernel has that this program runs on.
    #[error("{0} cannot be set: {1}")]
    System(&'static str, rustix::io::Errno),
    /// The filter of system calls.
    #[error("system calls cannot be filtered: {0}")]
    Filter(#[from] seccompiler::Error),
    /// What files may be used.
    #[error("files cannot be fenced: {0}")]
    Files(#[from] landlock::RulesetError),
}

impl From<seccompiler::BackendError> for JailError {
    fn from(error: seccompiler::BackendError) -> Self {
        JailError::Filter(error.into())
    }
}

/// What a thread may do with files.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Read these, and what is below them.
    pub read: Vec<PathBuf>,
    /// Everything with these, and with what is below them, but to execute them.
    pub write: Vec<PathBuf>,
    /// Everything but to execute files and to make device nodes: shared directories.
    pub share: Vec<PathBuf>,
    /// Remove files that are in these: sockets, at the end.
    pub remove: Vec<PathBuf>,
}

/// What holds for a thread that is jailed.
#[derive(Clone, Copy, Debug)]
pub struct Jailed {
    /// So many system calls can be made.
    pub calls: usize,
    /// What files can be used.
    pub files: &'static str,
}

impl fmt::Display for Jailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Jailed { calls, files } = self;
        write!(
            f,
            "{calls} system calls, no capabilities, no core dumps; files: {files}"
        )
    }
}

/// The folder that a file is in.
pub fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.into(),
        _ => ".".into(),
    }
}

/// The process is to be jailed.
pub fn want() {
    WANTED.store(true, Ordering::SeqCst);
}

/// Starts a thread that serves clients, and is jailed before it does: it opens no file, and makes no connection.
///
/// # Errors
/// The system has no thread to give; or the thread cannot be jailed, and is over.
pub fn start_for_clients(name: &str, serve: impl FnOnce() + Send + 'static) -> io::Result<Result<(), JailError>> {
    let (send, jailed) = mpsc::channel();
    let begin = move || {
        let entered = match WANTED.load(Ordering::SeqCst) {
            true => enter(threads::CLIENTS, &Files::default()).map(drop),
            false => Ok(()),
        };
        let serves = entered.is_ok();
        // Whoever started it waits.
        let _ = send.send(entered);
        if serves {
            serve();
        }
    };
    thread::Builder::new().name(name.into()).spawn(begin)?;
    jailed.recv().map_err(io::Error::other)
}

/// Jails this thread and those that it starts: `who` is a bit of [`threads`].
///
/// # Errors
/// The system's. Some of it may hold all the same.
pub fn enter(who: u8, files: &Files) -> Result<Jailed, JailError> {
    // What a core dump would hold is the guest's memory.
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none).map_err(|error| JailError::System("the limit of core dumps", error))?;
    set_no_new_privs(true).map_err(|error| JailError::System("no_new_privs", error))?;
    let files = fence(files)?;
    let failed = |error| JailError::System("capabilities", error);
    let kept = match who & threads::HOST_PT {
        0 => CapabilitySet::empty(),
        _ => capabilities(None).map_err(failed)?.permitted & CapabilitySet::PERFMON,
    };
    let kept = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, kept).map_err(failed)?;
    let (fallback, table) = filters(who)?;
    apply_filter(&fallback)?;
    apply_filter(&table)?;
    let calls: BTreeSet<_> = CALLS
        .iter()
        .filter(|row| row.who & who != 0)
        .map(|row| row.call)
        .collect();
    Ok(Jailed {
        calls: calls.len(),
        files,
    })
}

/// What this kernel has of it, for `minivmm probe`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Available {
    /// System calls are filtered.
    pub seccomp: bool,
    /// The version of Landlock, up to the newest that is asked for; 0: files are not fenced.
    pub landlock: u8,
}

impl Available {
    /// Of this host.
    pub fn here() -> Self {
        let actions = std::fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail");
        let has = |version: &ABI| {
            let rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
            let rules = rules.handle_access(AccessFs::from_all(*version));
            // Network since the fourth version, signals and sockets without a name since the sixth.
            let rules = rules.and_then(|rules| match AccessNet::from_all(*version) {
                none if none.is_empty() => Ok(rules),
                access => rules.handle_access(access),
            });
            let rules = rules.and_then(|rules| match Scope::from_all(*version) {
                none if none.is_empty() => Ok(rules),
                scope => rules.scope(scope),
            });
            rules.and_then(Ruleset::create).is_ok()
        };
        let versions = [ABI::V1, ABI::V2, ABI::V3, ABI::V4, ABI::V5, NEWEST];
        Available {
            seccomp: actions.is_ok_and(|has| has.split_whitespace().any(|action| action == "errno")),
            landlock: versions.iter().take_while(|version| has(version)).count() as u8,
        }
    }

    /// As a line of `minivmm probe`.
    pub fn text(&self) -> String {
        let calls = match self.seccomp {
            true => "system calls are filtered",
            false => "no seccomp filters: runs need --sandbox off",
        };
        let files = match self.landlock {
            0 => "no Landlock, files are not fenced".into(),
            version => format!("Landlock {version} fences files"),
        };
        format!("--sandbox: {calls}; {files}\n")
    }
}

/// Sets up Landlock; says what holds.
fn fence(files: &Files) -> Result<&'static str, JailError> {
    let read = AccessFs::from_read(ABI::V1) & !AccessFs::Execute;
    let all = AccessFs::from_all(NEWEST) & !AccessFs::Execute;
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    let nodes = AccessFs::MakeChar | AccessFs::MakeBlock;
    let rows: [(&[PathBuf], BitFlags<AccessFs>); 4] = [
        (&files.read, read),
        (&files.write, all),
        (&files.share, all & !nodes),
        (&files.remove, AccessFs::RemoveFile.into()),
    ];
    for (paths, access) in rows {
        for path in paths {
            // What is not there cannot be used either.
            let Ok(open) = PathFd::new(path) else { continue };
            let access = match path.is_dir() {
                true => access,
                false => access & AccessFs::from_file(NEWEST),
            };
            rules = rules.add_rule(PathBeneath::new(open, access))?;
        }
    }
    Ok(match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => "those of the command line alone",
        RulesetStatus::PartiallyEnforced => "those of the command line alone, as far as this kernel's Landlock goes",
        RulesetStatus::NotEnforced => "all, as this kernel has no Landlock",
    })
}

/// The filters: what tells the C library to start threads by clone, and the table.
fn filters(who: u8) -> Result<(BpfProgram, BpfProgram), JailError> {
    let compile = |rules, others, these| -> Result<BpfProgram, JailError> {
        Ok(SeccompFilter::new(rules, others, these, TargetArch::x86_64)?.try_into()?)
    };
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let fallback = compile(clone3, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?;
    let mut table: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for row in CALLS.iter().filter(|row| row.who & who != 0) {
        table.entry(row.call).or_default().extend(rules(row.only)?);
    }
    let table = compile(table, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)?;
    Ok((fallback, table))
}

fn rules(only: Only) -> Result<Vec<SeccompRule>, JailError> {
    let one = |argument, how, value: u32| -> Result<SeccompRule, JailError> {
        let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, how, value.into())?;
        Ok(SeccompRule::new(vec![condition])?)
    };
    let each = |argument, values: &[u32]| {
        let rules = values.iter().map(|value| one(argument, SeccompCmpOp::Eq, *value));
        rules.collect::<Result<Vec<_>, _>>()
    };
    Ok(match only {
        Only::Any => Vec::new(),
        Only::Bits(argument, bits) => vec![one(argument, SeccompCmpOp::MaskedEq(bits.into()), bits)?],
        Only::OneOf(argument, values) => each(argument, values)?,
        Only::Kind(argument, kind, values) => {
            let mut rules = each(argument, values)?;
            rules.push(one(argument, SeccompCmpOp::MaskedEq(0xff00), u32::from(kind) << 8)?);
            rules
        }
    })
}
