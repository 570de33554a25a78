//! A function that runs, and how it came to.

use super::names::Function;

/// How a function came to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// It was running already.
    Root,
    /// By a call.
    Call,
    /// By a jump at the end of another.
    Jump,
    /// By an interrupt or an exception.
    Interrupt,
    /// By a system call or the like.
    Entry,
    /// As a handler of a signal; it returns to where the signal came.
    Signal,
}

/// A function that runs.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Which.
    pub function: Function,
    /// Its first instruction that ran.
    pub ip: u64,
    /// Where it returns to; 0 if that is not known.
    pub ret: u64,
    /// How it came to run.
    pub kind: FrameKind,
    /// Instructions of the vCPU when it was entered, or came back with its thread.
    pub since: u64,
    /// Virtual time then, in nanoseconds.
    pub since_ns: Option<u64>,
    /// Instructions of its own since then.
    pub own: u64,
    /// Instructions of what it called since then.
    pub below: u64,
    /// It is the middle of the function that called it, as in retpolines and where return predictions are filled: the two are one function,
    /// and no sink hears that it is entered or left.
    pub inner: bool,
    /// Numbers for the sink's use, 0 when the frame is entered first.
    pub tags: [u64; Frame::TAGS],
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Frame {
    /// Numbers that a frame has for its sink.
    pub const TAGS: usize = 6;

    /// Where its function begins.
    pub fn start(&self) -> u64 {
        self.start
    }
}
