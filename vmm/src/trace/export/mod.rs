//! Traces in the forms of other programs.

pub mod callgrind;
mod file;
pub mod folded;

pub mod perf;
pub mod perfetto;

pub use file::{Folder, OutFile};
