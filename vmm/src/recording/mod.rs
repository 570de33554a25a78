//! `--trace DIR`: records what every vCPU executes, in a directory that the crate [`trace`] reads.
//!
//! This is the part of tracing that owns a trace unit and sees the guest's memory: [`Recorder`] and an [`Observer`] of each vCPU
//! beside the guest's own units. How the directory is written is `trace::directory`'s.

mod code_map;
mod guest_memory;
mod host;
mod mapped;
mod observed_code;
mod observed_processes;
mod observer;
pub mod options;
pub mod recorder;
mod state;
pub mod trigger;
pub mod unit;
mod wanted;

pub use guest_memory::GuestMemory;
pub use observer::Observer;
pub use options::{Filter, OnError, Part, RecordingOptions};
pub use recorder::Recorder;
pub use trigger::When;
