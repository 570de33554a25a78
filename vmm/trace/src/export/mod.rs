//! Traces in the forms of other programs.
//!
//! The forms that are made of calls share one decode: each is an [`Export`], and [`mod@calls`] shows the calls of all vCPUs to all of them.
//! [`perf`] and [`raw`] hold packets, and go through the trace in their own way.

mod callgrind;
mod calls;
mod error;
mod file;
mod folded;
mod html;
pub mod perf;
mod perfetto;
pub mod raw;
mod slices;
mod trace_events;

pub use callgrind::Callgrind;
pub use calls::{Export, Job, calls};
pub use error::ExportError;
pub use file::{Folder, OutFile, abandon};
pub use folded::{FlameGraph, Folded};
pub use html::Html;
pub use perfetto::Perfetto;
pub use trace_events::TraceEvents;
