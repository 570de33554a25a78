//! Virtio devices (Virtual I/O Device (VIRTIO) Version 1.2) behind a transport: MMIO registers or a PCI function.
//!
//! A request is carried out while the guest's notification is: at one counted instruction. So a run repeats, and the interrupt is
//! there before the next instruction. Where a notification brings more work than [`interface::SLICE`], the rest follows in slices at moments
//! of virtual time, which are counted, too; between them others see to the machine.
//!
//! What a driver may not do is answered as 2.1.2 "Device Requirements: Device Status Field" has it: the device sets
//! DEVICE_NEEDS_RESET and does nothing more until it is reset. Every request is a bounded amount of work, of no more descriptors
//! than the queue has entries and no more bytes than its device takes.

pub mod block;
pub mod console;
pub mod fs;
pub mod interface;
pub mod mmio;
pub mod net;
pub mod pci;
pub mod request;
pub mod rng;

use serde::{Deserialize, Serialize};
use std::fmt;

pub use self::request::Request;
use crate::random::Random;

/// The driver broke the rules in a way that cannot be answered within the request; the text is for a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonsense(pub &'static str);

impl fmt::Display for Nonsense {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Nonsense {}

/// Whether a device can carry out the next request of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// As soon as it is there.
    OnRequest,
    /// It has nothing for the driver: buffers stay in the queue.
    Nothing,
    /// Something waits for the driver's buffers.
    Waiting,
}

/// What came of something from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// The device has taken so many bytes; of 0, it has to be offered again.
    Bytes(usize),
    /// Nobody will ever want it, and nothing has changed by it.
    Dropped,
}

/// What a device is beyond its transport.
pub trait Device: fmt::Debug + Send {
    /// Device ID (5 "Device Types").
    fn id(&self) -> u32;

    /// Feature bits 0 to 23; the transport adds its own.
    fn features(&self) -> u64;

    /// The most entries that each queue may have, a power of 2 for each.
    fn queues(&self) -> &[u16];

    /// The device configuration space.
    fn config(&self) -> Vec<u8>;

    /// Driver and device have agreed on these features.
    fn negotiated(&mut self, features: u64);

    /// Carries out a request. The answer is how many bytes were written, from the first one on.
    ///
    /// # Errors
    /// The request is none that the device could answer.
    fn request(&mut self, queue: usize, request: &mut Request) -> Result<u32, Nonsense>;

    /// Whether the next request of a queue can be carried out. Queues through which the driver is handed what comes from outside say when
    /// there is something.
    fn readiness(&self, _queue: usize) -> Readiness {
        Readiness::OnRequest
    }

    /// Something has come from outside for a port of the device (a network device and a disk have no more than port 0). `live`: the driver
    /// has set the device up.
    fn input(&mut self, _port: u32, _bytes: &[u8], _live: bool) -> Taken {
        Taken::Dropped
    }

    /// The driver has reset the device.
    fn reset(&mut self) {}

    /// What the device has to remember, without what a file holds.
    fn state(&self) -> DeviceState;

    /// Takes a state back. One of another kind of device is left alone.
    fn set_state(&mut self, state: &DeviceState);
}

/// What devices remember beyond the transport's registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceState {
    /// A disk.
    Block {
        /// Every write is flushed before it completes.
        write_through: bool,
        /// A flush has failed.
        failed: bool,
    },
    /// The entropy source.
    Rng(Random),
    /// A shared directory.
    Fs {
        /// The driver has introduced itself.
        begun: bool,
        /// A hash of what the guest has made of the files, where that is kept apart from the host's.
        files: u64,
    },
    /// A console with its ports.
    Console(console::ConsoleState),
    /// A network device.
    Net(net::NetState),
}

#[cfg(test)]
#[path = "virtio_test.rs"]
mod tests;
