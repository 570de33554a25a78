//! What a client can ask of a history, and why it may not be had.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What gdb can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Blocks.
    Bts,
    /// Packets of Intel PT.
    Pt,
}

/// What of a history is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Annex {
    /// All of it.
    All,
    /// All of it, if there is anything new.
    New,
    /// What was not read before.
    Delta,
}

/// Why there is no history to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unread {
    /// Nobody asked for one.
    #[error("Branch tracing is not on for this CPU.")]
    Off,
    /// What was not read before cannot be distinguished from the rest; all of it can be read.
    #[error("The history does not go on where it was read before.")]
    Gap,
    /// A part of the history that the protocol does not have.
    #[error("Histories are read as all, new or delta.")]
    Annex,
    /// A part of the configuration, which is one whole.
    #[error("The configuration has no parts.")]
    Parts,
}
