//! Traces of what a machine executed: `minivmm --trace DIR` records them, and this crate reads them again.
//!
//! [`format`](mod@format) documents the directory. [`Trace`] opens one and drives a [`pt_flow::Visitor`] through it, on several
//! threads, with the code as it was when it was executed. [`view`] shows blocks and calls with the names of functions and
//! processes, [`export`] writes them as other programs take them. [`symbols`] reads and writes symbols; [`linux`] finds a Linux
//! in a machine's memory.
//!
//! The recorder is not here: it owns a trace unit and sees the guest's memory. It writes the directory with
//! [`directory::sink`]; what the parts of a run have recorded is put together by [`join`].

pub mod directory;
mod error;
pub mod export;
pub mod join;
pub mod linux;
pub mod reader;
pub mod regular;
pub mod symbols;
pub mod view;

pub use directory::format;
pub use directory::format::Header;
pub use export::raw;
pub use reader::{
    At, Code, Counts, CpuInfo, Decode, Progress, Start, State, StepClock, Summary, Thread, ThreadId, ThreadSwitches,
    Trace, TraceError,
};
