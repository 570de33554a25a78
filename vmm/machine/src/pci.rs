//! The PCI bus: where configuration space and the functions' memory are, and which register of which function an access leads to.
//!
//! There is one bus without bridges below it. Its head is there in every machine, so that a kernel finds configuration space; the virtio
//! devices are functions on it if the machine's [`BusKind`] is [`BusKind::Pci`].

use devices::pci::{CONFIG_ADDRESS, CONFIG_DATA, ConfigAddress, ConfigSpace, Place, ecam_place, host_bridge};
use serde::{Deserialize, Serialize};

/// Where the virtio devices are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BusKind {
    /// At fixed addresses that the ACPI tables name: virtio over MMIO.
    #[default]
    Mmio,
    /// On the PCI bus.
    Pci,
}

/// The functions' memory: 512 MiB from 3 GiB on.
pub const MEMORY: u64 = 0xc000_0000;
/// The last address of it.
pub const MEMORY_LAST: u64 = 0xdfff_ffff;
/// Memory-mapped configuration space of bus 0 (ECAM).
pub const ECAM: u64 = 0xe000_0000;
/// Its length: 4 KiB for each of 256 functions.
pub const ECAM_LEN: u64 = 1 << 20;
/// The most devices on the bus beside the host bridge.
pub const DEVICES: usize = 31;

/// The state of the bus's head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootState {
    /// CONFIG_ADDRESS.
    pub address: ConfigAddress,
    /// The host bridge's configuration space.
    pub bridge: Vec<u8>,
}

/// What an access of a port or an address leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// CONFIG_ADDRESS itself.
    Address,
    /// A register in configuration space.
    Config(Place),
    /// A configuration cycle that nobody answers.
    Nobody,
}

/// The head of the bus.
#[derive(Debug)]
pub struct Root {
    /// CONFIG_ADDRESS.
    pub address: ConfigAddress,
    /// The host bridge's configuration space.
    pub bridge: ConfigSpace,
}

impl Default for Root {
    fn default() -> Self {
        Root {
            address: ConfigAddress::default(),
            bridge: host_bridge(),
        }
    }
}

impl Root {
    /// What an access of a port leads to; `None`: the port is not the bus's. Only whole double words reach CONFIG_ADDRESS: what is narrower
    /// is for the ports that lie there (PCI Local Bus Specification 3.0, 3.2.2.3.2).
    pub fn port(&self, port: u16, size: u8) -> Option<Target> {
        match port {
            CONFIG_ADDRESS if size == 4 => Some(Target::Address),
            CONFIG_DATA..=0xcff => Some(match self.address.place(port - CONFIG_DATA) {
                Some(place) => Target::Config(place),
                None => Target::Nobody,
            }),
            _ => None,
        }
    }

    /// The register that an address leads to; `None`: the address is not configuration space.
    pub fn ecam(&self, gpa: u64) -> Option<Place> {
        let offset = gpa.checked_sub(ECAM).filter(|offset| *offset < ECAM_LEN)?;
        Some(ecam_place(offset))
    }

    /// The whole state.
    pub fn state(&self) -> RootState {
        RootState {
            address: self.address,
            bridge: self.bridge.bytes().to_vec(),
        }
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &RootState) {
        self.address = state.address;
        self.bridge.restore(&state.bridge);
    }
}
