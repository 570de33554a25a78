//! What a trace shows: its blocks and events with the moment of each, the names of addresses and processes, and the calls.

mod calls;
mod frame;
mod levels;
mod names;
mod threads;
mod user_code;
mod window;

pub use calls::{Calls, Sink};
pub use frame::{Frame, FrameKind};
pub use names::{Function, Names, Owner, Process, ProcessCache, Program};
pub use window::{Bound, Here, Totals, Viewer, Window, view};
