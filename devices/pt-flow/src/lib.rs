//! From Intel PT packets and the code that ran to the instructions that were executed, in their order, and the events between
//! them. SDM Vol. 3C 33.4 "Trace Packets and Data Types" and 33.7 "Packet Generation Scenarios" tell what packets mean.
//!
//! # How it works
//!
//! A trace tells only what the code does not: which way conditional branches went, where indirect ones led, and what came from
//! outside. The [`Decoder`] walks the code from one such point to the next. Code is asked for once: what lies between two
//! branches becomes a node of a graph, and a TNT bit is then one step along an edge.
//!
//! Walking is lazy: nothing behind the last packet is walked until the next packet is seen, because that may be the FUP of
//! an interrupt that came before the next branch.
//!
//! Code changes. An [`Image`] tells the positions in the trace at which it does, and which pages; their nodes are then made anew.
//!
//! Each PSB resets what packets depend on (last IP, the stack of returns) and is followed by the whole state, so that a trace
//! can be cut there: [`Chunks`] cuts a stream, and [`decode_parallel`] decodes the pieces on several threads and delivers
//! the results in order. Memory is bounded whatever the length of the trace.
//!
//! What cannot be decoded is never left out silently: it is an [`EventKind::Gap`] at its place, and is counted in [`Summary`].
//!
//! # What is left out
//!
//! Instructions that iced-x86 is built without here (XOP, 3DNow!) end the walk with a gap. The blocks of items that carry PEBS records
//! in the trace are skipped.

mod chunk;
mod event;
mod flow;
mod graph;
mod image;
mod parallel;
mod time;

pub use chunk::{Chunk, Chunks};
pub use event::{Block, Blocks, End, Event, EventKind, GapKind, Summary, Visitor};
pub use flow::Decoder;
pub use image::{Change, Context, Image, Position, Sections};
pub use parallel::decode_parallel;
pub use pt_packet::ExecMode;
pub use time::{Time, Timing};
