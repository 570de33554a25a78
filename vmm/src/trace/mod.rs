//! Traces from outside: `--trace DIR` records what every vCPU executes, and this module reads it again.
//!
//! [`format`](mod@format) documents the directory. [`record`] writes it, through an observer of each vCPU beside the guest's own
//! units; [`Trace`] opens it and drives a [`pt_flow::Visitor`] through it, on several threads, with the code as it was when it
//! was executed.

pub mod command;
pub mod export;
pub mod folder;
pub mod format;
mod frames;
mod host;
mod image;
mod info;
mod observer;
pub mod options;
mod packets;
pub mod raw;
mod reader;
pub mod record;
mod sink;
mod state;
pub mod trigger;
pub mod view;

pub use format::Header;
pub use info::{Counts, CpuInfo};
pub use observer::Observer;
pub use options::{Filter, OnError, Options};
pub use reader::{At, Code, Decode, Progress, Summary, Trace, TraceError};
pub use record::Recorder;
pub use state::{Clock, Start, State};
pub use trigger::When;
