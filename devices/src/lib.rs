//! Everything a guest programs through a register. Knows no KVM, no decoder, no threads.
//!
//! A device is a struct of registers with a few verbs: `read` and `write` for the guest, `advance(now)` and `next_event()` for
//! time, `state()` and `restore()` for whoever keeps it. `now` is virtual time in nanoseconds and never goes back; a device
//! reads no clock and calls nobody: what should happen is a value that it hands back or a line that the caller reads.
//!
//! The virtio devices also read and write guest memory, which is vm-memory's, and say which of it they have written.

#![forbid(unsafe_code)]

pub mod bus;
pub mod pci;
pub mod platform;
pub mod random;
pub mod unit;
pub mod virtio;

#[cfg(test)]
mod testing;
