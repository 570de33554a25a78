//! Opens a trace directory and decodes it.

pub mod image;
mod info;
mod mappings;
mod state;
mod threads;
mod trace;

pub use image::MappedFile;
pub use info::{Counts, CpuInfo};
pub use mappings::{Mapping, Mappings};
pub use state::{Start, State, StepClock};
pub use threads::{Thread, ThreadId, ThreadSwitches};
pub use trace::{At, Code, Decode, Progress, Summary, Trace, TraceError};
