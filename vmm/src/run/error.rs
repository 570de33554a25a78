//! What is wrong where a command cannot be run.

use std::{io, path::PathBuf};

use super::modules::ModuleError;
use crate::error::Error;

/// Why a command cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// There is no kernel.
    #[error(
        "no kernel: {} cannot be read, and `cargo xtask guest` has made none; give one with --kernel",
        tried.display()
    )]
    NoKernel {
        /// Where the host's own is.
        tried: PathBuf,
    },
    /// A kernel that is none.
    #[error("not a Linux bzImage for x86-64, which `run` needs")]
    NotLinux {
        /// The file.
        path: PathBuf,
    },
    /// There are no modules for it.
    #[error("has no kernel modules for Linux {release}")]
    NoModules {
        /// The folder.
        path: PathBuf,
        /// The kernel's release.
        release: String,
    },
    /// A module cannot be had.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// A file or folder cannot be used.
    #[error("{option} {}: {}", path.display(), machine::plain(source))]
    File {
        /// The option.
        option: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl From<RunError> for Error {
    fn from(error: RunError) -> Self {
        let option = match error {
            RunError::File { option, path, source } => return Error::File { option, path, source },
            RunError::NotLinux { ref path } => format!("--kernel {}", path.display()),
            RunError::NoModules { ref path, .. } => format!("--modules {}", path.display()),
            RunError::Module(_) => "--modules".into(),
            RunError::NoKernel { .. } => "run".into(),
        };
        Error::Option {
            option,
            source: error.into(),
        }
    }
}
