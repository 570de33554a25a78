//! `--trace DIR`: records what every vCPU executes, in a directory that the crate [`trace`] reads.
//!
//! This is the part of tracing that owns a trace unit and sees the guest's memory: [`Recorder`] and an [`Observer`] of each vCPU
//! beside the guest's own units. What an observer hears goes through a queue to an encoder, which mostly works on another thread. How
//! the directory is written is `trace::directory`'s.

mod code_map;
mod encoder;
mod filter;
mod guest_memory;
mod mapped;
mod observed_code;
mod observed_processes;
mod observer;
pub mod options;
mod queue;
pub mod recorder;
mod standing;
mod state;
pub mod trigger;
pub mod unit;
mod wanted;

pub use filter::Filter;
pub use guest_memory::GuestMemory;
pub use observer::Observer;
pub use options::{OnError, Part, RecordingOptions};
pub use recorder::Recorder;
pub use trigger::When;
