//! What the system says of a failed call, as people read it, and why a state is not taken on.

use std::io;

use devices::{platform::CpuCount, virtio::Nonsense};

/// The system's sentence without Rust's "(os error N)".
pub fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error") {
        Some((sentence, _)) => sentence.to_lowercase(),
        None => text,
    }
}

/// Why a machine does not take on a state: it is one of another machine. Nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// Of so many CPUs.
    #[error("the state has {state} CPUs, the machine has {machine}")]
    Cpus {
        /// CPUs of the state.
        state: usize,
        /// CPUs of the machine.
        machine: usize,
    },
    /// Of a model with other registers.
    #[error("the state has {state} plain MSRs, the model {model}")]
    Msrs {
        /// Registers of the state.
        state: usize,
        /// Registers of the model.
        model: usize,
    },
    /// Of a machine with other serial ports.
    #[error("one of state and machine has a second serial port, the other has none")]
    SecondSerial,
    /// Of a machine with other interrupt controllers.
    #[error(transparent)]
    Platform(#[from] CpuCount),
    /// Of a machine with other disks.
    #[error("the state has {state} virtio devices, the machine {machine}")]
    Virtio {
        /// Devices of the state.
        state: usize,
        /// Devices of the machine.
        machine: usize,
    },
    /// With queues that no driver can have made.
    #[error("virtio device {index}: {source}")]
    Queues {
        /// Which device.
        index: usize,
        /// What is wrong.
        source: Nonsense,
    },
    /// Of a package with another resource director.
    #[error("{0}")]
    Rdt(&'static str),
}
