//! Whose turn it is.

use crate::view::Process;

/// A vCPU goes over to a process.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// When, in ticks of the time-stamp counter.
    pub ticks: u64,
    /// At which step, where the recording tells.
    pub step: Option<u64>,
    /// The vCPU.
    pub cpu: u32,
    /// The process.
    pub process: Process,
}
