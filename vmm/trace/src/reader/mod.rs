//! Opens a trace directory and decodes it.

pub mod image;
mod info;
mod state;
mod trace;

pub use info::{Counts, CpuInfo};
pub use state::{Start, State, StepClock};
pub use trace::{At, Code, Decode, Progress, Summary, Trace, TraceError};
