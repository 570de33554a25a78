//! What may be wrong with symbols.

use std::io;

/// Why a file of symbols is of no use.
#[derive(Debug, thiserror::Error)]
pub enum SymbolsError {
    /// It cannot be read.
    #[error("{}", crate::error::plain(.0))]
    File(#[from] io::Error),
    /// It is neither ELF nor a list of symbols.
    #[error("neither an ELF file nor a list of symbols as System.map and /proc/kallsyms are (line {line}: {text})")]
    Format {
        /// The first line that is none.
        line: usize,
        /// Its beginning.
        text: String,
    },
    /// It is an ELF file that cannot be used.
    #[error("{0}")]
    Elf(String),
    /// There are no symbols in it.
    #[error("has no symbols{hint}")]
    Empty {
        /// What to do.
        hint: &'static str,
    },
    /// They are not of the kernel that was traced.
    #[error("symbols of another kernel: {file}, but the trace is of {trace}")]
    OtherKernel {
        /// What tells the file's kernel.
        file: String,
        /// What tells the trace's.
        trace: String,
    },
}
