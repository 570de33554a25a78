//! What a guest sends, once: bytes that it sends again after going back have been seen.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard};

/// How much a device has sent, and how much of it has been let through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    sent: u64,
    shown: u64,
}

/// The handle of a [`OutputGate`]. Clones are of the same one.
#[derive(Clone, Debug, Default)]
pub struct Flow(Arc<Mutex<Counts>>);

impl Flow {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Bytes that the guest has sent.
    pub fn sent(&self) -> u64 {
        self.counts().sent
    }

    /// The guest is where it had sent so many.
    pub fn go_to(&self, sent: u64) {
        self.counts().sent = sent;
    }

    /// What the guest sends from here on has never been sent, even if it was somewhere further on before.
    pub fn forget_future(&self) {
        let mut counts = self.counts();
        counts.shown = counts.sent;
    }
}

/// A sink that lets through what has not been let through yet.
pub struct OutputGate {
    flow: Flow,
    out: Box<dyn Write + Send>,
}

impl OutputGate {
    /// A gate before `out`, and its handle.
    pub fn new(out: Box<dyn Write + Send>) -> (Self, Flow) {
        let flow = Flow::default();
        let gate = OutputGate {
            flow: flow.clone(),
            out,
        };
        (gate, flow)
    }
}

impl Write for OutputGate {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut counts = self.flow.counts();
        let known = counts.shown.saturating_sub(counts.sent);
        counts.sent += bytes.len() as u64;
        counts.shown = counts.shown.max(counts.sent);
        drop(counts);
        let known = usize::try_from(known).unwrap_or(usize::MAX).min(bytes.len());
        self.out.write_all(&bytes[known..])?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
#[path = "output_gate_test.rs"]
mod tests;
