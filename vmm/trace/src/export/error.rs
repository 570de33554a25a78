//! Why a trace could not be written in the form of another program.

use std::{io, path::PathBuf};

use crate::{error::plain, reader::TraceError};

/// Why an export failed.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// There is something of this name, and it is not to be replaced.
    #[error("{}: exists already", .0.display())]
    Exists(PathBuf),
    /// What is there is not a directory of this export, and is not removed.
    #[error("{}: is not what this option writes, and is not replaced", .0.display())]
    NotOurs(PathBuf),
    /// A file cannot be written.
    #[error("{}: {}", path.display(), plain(source))]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file would be larger than it may be.
    #[error("{}: would be larger than {limit} bytes; `--trace-events-limit` allows more, `--least` leaves out short calls, `--perfetto` takes a tenth", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// What it may have, in bytes.
        limit: u64,
    },
    /// perf finds the kernel's code by its symbols.
    #[error("{}: perf needs the symbols of a Linux kernel, and the trace has none", .0.display())]
    NoKernelSymbols(PathBuf),
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
}
