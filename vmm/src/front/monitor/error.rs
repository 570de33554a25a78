//! What is wrong with a command, or why it cannot be carried out.

use crate::{timeline::named::NamedStateError, trace_options::TraceOptionError, vm::Unmapped};

/// Why the monitor refuses a line. Each is one line.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// No command begins like this.
    #[error("{0:?} is no monitor command: try `help`")]
    NoCommand(String),
    /// Several do.
    #[error("{0:?} may be {1}")]
    Ambiguous(String, String),
    /// The machine has fewer.
    #[error("there is no CPU {0}")]
    NoCpu(usize),
    /// More words than the command takes.
    #[error("{0:?} is one word too many")]
    TooMany(String),
    /// Not what the command takes: what it does.
    #[error("{0}")]
    Usage(&'static str),
    /// It cannot be done to this machine: why, and what would help.
    #[error("{0}")]
    Impossible(&'static str),
    /// A word that is to be a number.
    #[error("{0:?} is no number: 10 and 0x10 are")]
    Number(String),
    /// Neither a vector nor the name of an exception.
    #[error("{0:?} is no exception: a vector from 0 to 255, or one of {1}")]
    NoException(String, String),
    /// Neither the number of a VM exit's reason nor a part of its name.
    #[error(
        "{0:?} is no exit reason: a number as SDM Vol. 3D Appendix C has it, or a part of its name, as `CPUID` or `EPT`"
    )]
    NoExitReason(String),
    /// A number out of its range.
    #[error("{0}: {1}")]
    Range(String, &'static str),
    /// Neither a number nor a name.
    #[error("{0:?} is neither a number nor a symbol that is known here")]
    Symbol(String),
    /// Neither a number nor a name.
    #[error("{0:?} is neither a number nor the manual's name of an MSR that is known here")]
    MsrName(String),
    /// The model has no such part.
    #[error("model {0} has no {1}")]
    Lacks(&'static str, &'static str),
    /// No translation.
    #[error("{0} is not mapped")]
    NotMapped(String),
    /// No translation in user mode, as page-table isolation keeps the kernel's tables apart.
    #[error(
        "{0} is not mapped in user mode (page-table isolation); by the kernel's page tables, CR3 without bit 12, it is at physical {1:#x}"
    )]
    Isolated(String, u64),
    /// What the command would read is not mapped.
    #[error(transparent)]
    Unmapped(#[from] Unmapped),
    /// The debug-store area is not mapped.
    #[error("IA32_DS_AREA {0:#x}: {1}")]
    DebugStore(u64, Unmapped),
    /// The register cannot be read.
    #[error("RDMSR of {0:#x} is #GP here")]
    Rdmsr(u32),
    /// The register does not take the value.
    #[error("WRMSR of {value:#x} to {msr:#x} is #GP here; nothing is written")]
    Wrmsr {
        /// The register.
        msr: u32,
        /// The value.
        value: u64,
    },
    /// A step that has passed, and no past is kept.
    #[error("step {step} is behind, at step {now}: `--reverse` at the start makes going back possible")]
    Behind {
        /// Where it should go.
        step: u64,
        /// Where it is.
        now: u64,
    },
    /// A step before the past that is kept.
    #[error(
        "step {step} is before the past that is kept, which begins at step {first}; a larger `--reverse-memory` keeps more of it"
    )]
    Forgotten {
        /// Where it should go.
        step: u64,
        /// Where the past begins.
        first: u64,
    },
    /// The name of a snapshot is too long.
    #[error("a name of more than {0} bytes")]
    LongName(usize),
    /// No snapshot has this name.
    #[error("there is no snapshot {0:?}: `snapshot list` shows them")]
    NoSnapshot(String),
    /// A snapshot cannot be made or taken on.
    #[error(transparent)]
    State(#[from] NamedStateError),
    /// No Linux, or one whose symbols cannot be read.
    #[error(transparent)]
    NoLinux(#[from] trace::linux::NotFound),
    /// The options of a recording.
    #[error(transparent)]
    TraceOption(#[from] TraceOptionError),
    /// The command names files, and came over TCP.
    #[error(
        "{0} writes files, which a debugger over TCP may not do: connect it by --gdb unix:PATH, or start with --gdb-allow-files"
    )]
    Files(&'static str),
    /// A recording cannot begin.
    #[error(transparent)]
    Trace(#[from] crate::Error),
    /// A recording has ended badly.
    #[error("{0}; the trace is not complete")]
    Incomplete(crate::Error),
    /// It is as it should become.
    #[error("recording is {0} already")]
    Already(&'static str),
}
