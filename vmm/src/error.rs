//! The messages for the operator when something goes wrong, and the exit statuses.
//!
//! Every message is one line that says what, where and what to do; the guest's own faults are ordinary values elsewhere.

use std::{io, path::PathBuf};

use machine::{
    MemoryError,
    inject::InjectError,
    loader::{LoadError, size_text},
    plain, plain_of,
};

/// How a run ended, as the process's exit status tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The guest powered off or reset, or the user left with Ctrl-A x: 0.
    Done,
    /// The guest wrote `v` to the debug-exit port: `(v << 1) | 1`, of which the system keeps the low eight bits.
    DebugExit(u32),
    /// The command line or one of its files is wrong, or the outside world (a signal, a closed stream) ended the run: 2.
    Usage,
    /// The guest crashed (triple fault), or halted in a way that nothing can end: 4.
    Crash,
    /// A fault of ours: 6.
    Internal,
    /// `--max-instructions` or `--timeout` was reached: 8.
    Limit,
    /// The guest's Linux has panicked: 10.
    Panicked,
    /// Of `minivmm run`: what the command ended with, or what stands for it.
    Command(u8),
    /// Of `minivmm matrix`: something is not as expected. Of `minivmm trace info`: the trace is damaged. 1.
    Differs,
}

impl Status {
    /// The exit status of the process.
    pub fn code(self) -> i32 {
        match self {
            Status::Done => 0,
            Status::DebugExit(v) => i32::from((v as u8) << 1 | 1),
            Status::Usage => 2,
            Status::Crash => 4,
            Status::Internal => 6,
            Status::Limit => 8,
            Status::Panicked => 10,
            Status::Command(status) => status.into(),
            Status::Differs => 1,
        }
    }
}

/// Why a machine could not be built or could not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line does not parse; the text names the option.
    #[error("{0}")]
    Usage(String),
    /// The process cannot be jailed.
    #[error("--sandbox on: {0}; --sandbox off goes without")]
    Sandbox(#[from] crate::jail::JailError),
    /// A file could not be opened, read or written.
    #[error("{option} {}: {}", path.display(), plain_of(source, path))]
    File {
        /// The option that named the file.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file is there, but is not what its option needs.
    #[error("{option} {}: {source}", path.display())]
    Image {
        /// The option that named the file.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: LoadError,
    },
    /// Guest memory of this size is not to be had.
    #[error("--memory {}: {reason}", size_text(*size))]
    Memory {
        /// The size asked for, in bytes.
        size: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// The command line for the guest does not fit.
    #[error("--cmdline: {0}")]
    Cmdline(LoadError),
    /// No such CPU model.
    #[error("--cpu-model {name}: no such CPU model; known models: {known} (see `minivmm models`)")]
    Model {
        /// The name asked for.
        name: String,
        /// All names, comma-separated.
        known: String,
    },
    /// What an option asks for cannot be had, for a reason that another part gives.
    #[error("{option}: {source}")]
    Option {
        /// The option with its value.
        option: String,
        /// Why not, and what to do.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The units that were asked for cannot be had together, or here.
    #[error(transparent)]
    Unit(#[from] kvm::resolve::UnitError),
    /// The engine cannot be had, or cannot run this model here.
    #[error("{option}: {reason}")]
    Engine {
        /// The option with its value.
        option: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// The guest's network cannot be had.
    #[error("--net {option}: {reason}")]
    Net {
        /// The option's value.
        option: String,
        /// What is missing or taken, and what to do.
        reason: String,
    },
    /// A debugger cannot connect there.
    #[error("--gdb {address}: {reason}")]
    Gdb {
        /// The option's value.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A trace cannot be read.
    #[error(transparent)]
    Trace(#[from] trace::TraceError),
    /// A trace cannot be written in the form of another program.
    #[error("{option} {source}{}", export_hint(source))]
    Export {
        /// The option that named the file.
        option: &'static str,
        /// What is wrong.
        source: trace::export::ExportError,
    },
    /// The console cannot be used.
    #[error("--serial {target}: {reason}")]
    Serial {
        /// The option's value.
        target: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A file of symbols cannot be used.
    #[error("--symbols {}: {source}", path.display())]
    Symbols {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: trace::symbols::SymbolsError,
    },
    /// A program's symbols cannot be used.
    #[error("--symbols-user {}: {source}", path.display())]
    ProgramSymbols {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: trace::symbols::SymbolsError,
    },
    /// The guest has panicked, and its core file cannot be written.
    #[error("--on-panic dump={}: the guest has panicked, and no dump is left of it: {}", path.display(), dump_text(source))]
    PanicDump {
        /// The file, which is gone.
        path: PathBuf,
        /// Why not.
        source: machine::vmcore::VmcoreError,
    },
    /// A system call of ours failed where it never should.
    #[error("internal error: {what}: {}", plain(source))]
    System {
        /// What was being done.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: the reason that a part gives why what this option asks for cannot be had.
    pub(crate) fn option<E: std::error::Error + Send + Sync + 'static>(
        option: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let option = option.into();
        move |error| Error::Option {
            option,
            source: error.into(),
        }
    }
}

impl From<MemoryError> for Error {
    fn from(error: MemoryError) -> Self {
        let MemoryError { size, reason } = error;
        Error::Memory { size, reason }
    }
}

impl From<InjectError> for Error {
    fn from(error: InjectError) -> Self {
        let option = "--inject";
        match error {
            InjectError::File { path, source } => Error::File { option, path, source },
            InjectError::TooBig { path, source } => Error::Image { option, path, source },
        }
    }
}

/// Why a dump could not be written whose file is gone.
fn dump_text(error: &machine::vmcore::VmcoreError) -> String {
    match error {
        machine::vmcore::VmcoreError::Write(source) => plain(source),
        other => other.to_string(),
    }
}

/// What the operator can do about an export that failed.
fn export_hint(error: &trace::export::ExportError) -> &'static str {
    match error {
        trace::export::ExportError::Exists(_) => " (--force replaces it)",
        trace::export::ExportError::NoKernelSymbols(_) => ": give some with --symbols",
        _ => "",
    }
}

impl Error {
    /// The exit status that goes with this error.
    pub fn status(&self) -> Status {
        match self {
            Error::System { .. } => Status::Internal,
            _ => Status::Usage,
        }
    }
}

#[cfg(test)]
#[path = "error_test.rs"]
mod tests;
