//! PCI configuration space (PCI Local Bus Specification 3.0, chapter 6): a function's 256 bytes, the bus that finds functions by their
//! numbers, and the host bridge at its head.

use serde::{Deserialize, Serialize};

/// CONFIG_ADDRESS of configuration mechanism #1 (3.2.2.3.2 "Software Generation of Configuration Transactions").
pub const CONFIG_ADDRESS: u16 = 0xcf8;
/// CONFIG_DATA.
pub const CONFIG_DATA: u16 = 0xcfc;

/// Offsets in the header (6.1 "Configuration Space Organization").
pub const COMMAND: u8 = 0x04;
/// The upper half of the same word.
pub const STATUS: u8 = 0x06;
/// The first base address register.
pub const BAR0: u8 = 0x10;
/// Capabilities Pointer.
const CAPABILITIES: u8 = 0x34;
/// Interrupt Line, which is the software's, and Interrupt Pin behind it.
pub const INTERRUPT_LINE: u8 = 0x3c;

/// Command: the function answers at its memory addresses.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command: the function may reach memory, and send messages.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Command: the function does not assert its interrupt pin.
pub const COMMAND_INTX_OFF: u16 = 1 << 10;
/// Status: the function would assert its pin, if it may.
const STATUS_INTERRUPT: u8 = 1 << 3;
/// Status: there is a list of capabilities.
const STATUS_CAPABILITIES: u8 = 1 << 4;

/// A message-signalled interrupt: what is written, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Where it is written.
    pub address: u64,
    /// What is written.
    pub data: u32,
}

/// What a function says that it is.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Revision ID.
    pub revision: u8,
    /// Base class, sub-class and interface, from the highest byte on.
    pub class: u32,
    /// Subsystem ID; its vendor is the same.
    pub subsystem: u16,
}

/// A function's configuration space.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; 256],
    /// Bits that the software can write.
    writable: [u8; 256],
    /// Where the next capability goes, and where the pointer to it is.
    next: u8,
    link: u8,
}

impl ConfigSpace {
    /// A function of header type 0 without base addresses and capabilities.
    pub fn new(identity: Identity) -> Self {
        let mut space = ConfigSpace {
            bytes: [0; 256],
            writable: [0; 256],
            next: 0x40,
            link: CAPABILITIES,
        };
        space.put(0, &identity.vendor.to_le_bytes());
        space.put(2, &identity.device.to_le_bytes());
        space.put(8, &[identity.revision]);
        space.put(9, &identity.class.to_le_bytes()[..3]);
        space.put(0x2c, &identity.vendor.to_le_bytes());
        space.put(0x2e, &identity.subsystem.to_le_bytes());
        space
    }

    /// Sets bytes, whether the software can write them or not. What lies behind the end is left out.
    pub fn put(&mut self, at: u8, bytes: &[u8]) {
        for (to, from) in self.bytes[usize::from(at)..].iter_mut().zip(bytes) {
            *to = *from;
        }
    }

    /// Lets the software write the bits of a mask.
    pub fn allow(&mut self, at: u8, mask: &[u8]) {
        for (to, from) in self.writable[usize::from(at)..].iter_mut().zip(mask) {
            *to = *from;
        }
    }

    /// Gives the function a base address register for `size` bytes of memory, a power of two from 16 on, below 4 GiB, and what the
    /// firmware would write to it.
    pub fn set_memory_bar(&mut self, index: u8, size: u32, address: u32) {
        let at = BAR0 + 4 * index;
        self.put(at, &address.to_le_bytes());
        // What cannot be written is the size: 6.2.5.1 "Address Maps".
        self.allow(at, &(!(size - 1)).to_le_bytes());
    }

    /// Has the function use its interrupt pin INTA.
    pub fn set_interrupt_pin(&mut self, line: u8) {
        self.put(INTERRUPT_LINE, &[line, 1]);
        self.allow(INTERRUPT_LINE, &[0xff]);
    }

    /// Adds a capability with its ID and what follows the pointer to the next one; the answer is where it is.
    pub fn add_capability(&mut self, id: u8, body: &[u8]) -> u8 {
        let at = self.next;
        self.put(self.link, &[at]);
        self.put(at, &[id, 0]);
        self.put(at + 2, body);
        self.bytes[usize::from(STATUS)] |= STATUS_CAPABILITIES;
        self.link = at + 1;
        self.next = (at + 2 + body.len() as u8).next_multiple_of(4);
        at
    }

    /// Reads 1, 2 or 4 bytes; all ones where they do not lie within an aligned double word.
    pub fn read(&self, at: u16, size: u8) -> u32 {
        let Some(range) = range(at, size) else {
            return u32::MAX;
        };
        let bytes = self.bytes[range].iter().rev();
        bytes.fold(0, |value, byte| value << 8 | u32::from(*byte))
    }

    /// Writes the bits that can be written of 1, 2 or 4 bytes.
    pub fn write(&mut self, at: u16, size: u8, value: u32) {
        let Some(range) = range(at, size) else { return };
        for (index, new) in range.zip(value.to_le_bytes()) {
            let mask = self.writable[index];
            self.bytes[index] = self.bytes[index] & !mask | new & mask;
        }
    }

    /// The command register.
    pub fn command(&self) -> u16 {
        u16::from_le_bytes([self.bytes[usize::from(COMMAND)], self.bytes[usize::from(COMMAND) + 1]])
    }

    /// The address in a base address register for memory.
    pub fn bar(&self, index: u8) -> u32 {
        self.read(u16::from(BAR0 + 4 * index), 4) & !0xf
    }

    /// Shows in the status register whether the function asks for an interrupt by its pin.
    pub fn set_interrupt(&mut self, asserted: bool) {
        let status = &mut self.bytes[usize::from(STATUS)];
        *status = *status & !STATUS_INTERRUPT | if asserted { STATUS_INTERRUPT } else { 0 };
    }

    /// All bytes, as they are kept.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Takes back what the software had written.
    pub fn restore(&mut self, bytes: &[u8]) {
        for ((to, mask), from) in self.bytes.iter_mut().zip(&self.writable).zip(bytes) {
            *to = *to & !mask | from & mask;
        }
    }
}

/// The bytes of an access within an aligned double word.
fn range(at: u16, size: u8) -> Option<std::ops::Range<usize>> {
    let (at, size) = (usize::from(at), usize::from(size));
    (matches!(size, 1 | 2 | 4) && at % 4 + size <= 4 && at + size <= 256).then(|| at..at + size)
}

/// The host bridge: a function that says no more than that there is a bus.
pub fn host_bridge() -> ConfigSpace {
    let mut space = ConfigSpace::new(Identity {
        // "QEMU PCIe Host bridge" of the PCI ID database (vendor Red Hat), which no driver has quirks for.
        vendor: 0x1b36,
        device: 0x0008,
        revision: 0,
        class: 0x06_00_00,
        subsystem: 0x1100,
    });
    space.allow(
        COMMAND,
        &(COMMAND_MEMORY | COMMAND_MASTER | COMMAND_INTX_OFF).to_le_bytes(),
    );
    space
}

/// CONFIG_ADDRESS: which double word of which function CONFIG_DATA leads to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigAddress(u32);

/// A place in configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The bus.
    pub bus: u8,
    /// Device (bits 7:3) and function (2:0).
    pub function: u8,
    /// The byte.
    pub offset: u16,
}

impl ConfigAddress {
    /// Writes the register; reserved bits stay 0.
    pub fn set(&mut self, value: u32) {
        self.0 = value & 0x80ff_fffc;
    }

    /// Reads it.
    pub fn get(self) -> u32 {
        self.0
    }

    /// Where a byte of CONFIG_DATA leads; `None`: accesses of CONFIG_DATA are no configuration cycles.
    pub fn place(self, byte: u16) -> Option<Place> {
        let [offset, function, bus, enabled] = self.0.to_le_bytes();
        (enabled & 0x80 != 0).then(|| Place {
            bus,
            function,
            offset: u16::from(offset) + (byte & 3),
        })
    }
}

/// Where a byte of the memory-mapped configuration space leads (PCI Express Base Specification, "PCI Express Enhanced Configuration Access
/// Mechanism (ECAM)").
pub fn ecam_place(offset: u64) -> Place {
    Place {
        bus: (offset >> 20) as u8,
        function: (offset >> 12) as u8,
        offset: (offset & 0xfff) as u16,
    }
}

#[cfg(test)]
#[path = "pci_test.rs"]
mod tests;
