//! Histories of branches as gdb's `record btrace` takes them, in both of its formats. GDB manual, "General Query Packets",
//! "Branch Trace Format", "Branch Trace Configuration Format".
//!
//! # Theory
//! An observer of its own listens to each CPU that gdb asks a history of. For `bts` it keeps blocks, stretches of code without a
//! branch; for `pt` a trace unit of its own makes packets, and gdb decodes them with libipt and the guest's memory. Both are
//! rings: the newest stays. An instruction that faults or is interrupted has not run and is in neither; the block before it
//! ends with the instruction that did.
//!
//! gdb takes the end of the newest block for the instruction that comes next, and a trace of packets ends before that. So both
//! say the same.
//!
//! # Practice
//! [`Btrace`] knows the packets and nothing of a stub: whoever has one hands it what it does not know itself. gdb asks first for
//! what is new since the last time (`delta`), which `bts` gives as long as it is still there and goes on where gdb has stopped;
//! else, and for `pt` always, it is told to ask for all of it. A machine that was put into another state has a history from
//! there on only.
//!
//! # What is left out
//! Code of 16 and 32 bits is reported by linear addresses, as it runs, but gdb takes it for 64-bit code: `bts` blocks of it are
//! misread there, `pt` ones are not.

mod blocks;
mod observer;
mod packets;
mod session;
mod types;

pub use self::{
    blocks::{Block, Read},
    session::{Btrace, LARGEST, SMALLEST, SUPPORTED},
    types::{Annex, Format, Unread},
};
