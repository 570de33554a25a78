//! What the system says of a failed call, as people read it, and why a state is not taken on.

use std::{io, path::Path};

use devices::{platform::CpuCount, virtio::Nonsense};

/// The system's sentence without Rust's "(os error N)".
pub fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error") {
        Some((sentence, _)) => sentence.to_lowercase(),
        None => text,
    }
}

/// The same of a file that could not be opened or made, with the folder that is missing, if that is the reason.
pub fn plain_of(error: &io::Error, path: &Path) -> String {
    let missing = |folder: &&Path| {
        let looked = std::fs::metadata(folder);
        looked.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    let folders = path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty());
    match folders.take_while(missing).last() {
        Some(folder) if error.kind() == io::ErrorKind::NotFound => {
            format!("{}: there is no folder {}", plain(error), folder.display())
        }
        _ => plain(error),
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
    /// Of CPUs in so many packages.
    #[error("the state has {state} packages of CPUs, the machine has {machine}")]
    Packages {
        /// Packages of the state.
        state: usize,
        /// Packages of the machine.
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
