//! Traces in the forms of other programs.

pub mod callgrind;
mod error;
mod file;
pub mod folded;
pub mod perf;
pub mod perfetto;
pub mod raw;

pub use error::ExportError;
pub use file::{Folder, OutFile};
