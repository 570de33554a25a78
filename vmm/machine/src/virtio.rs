//! The machine's virtio devices: where they answer, and which interrupt each has.
//!
//! The first is the entropy source, then come the disks in the order of the command line, and then shared directories likewise.

use std::vec::Drain;

use devices::{
    random::Random,
    virtio::{
        block::{Block, Medium},
        fs::{Fs, file_system::FileSystem},
        mmio::{Transport, TransportState},
        request::Written,
        rng::Rng,
    },
};
use log::debug;
use vm_memory::GuestMemoryMmap;

use crate::error::StateError;

/// Where the first device's registers are; each has a page.
pub const WINDOW: u64 = 0xfeb0_0000;
/// The distance from one device's registers to the next one's.
pub const SLOT: u64 = 0x1000;
/// The most devices there can be.
pub const SLOTS: usize = 64;
/// The IOAPIC's pins that have no ISA interrupt; with more devices than that, some share one.
const FIRST_GSI: u8 = 16;
const GSIS: usize = 8;
/// The entropy source and RDRAND come from one seed, but the bytes of one tell nothing about the other.
const RNG_SALT: u64 = 0x7669_7274_696f_2d34;

/// There is no room for one more device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("one device too many: {} fit into the machine, disks and shared directories", SLOTS - 1)]
pub struct NoSlot;

/// Where a device's registers are.
pub fn address(index: usize) -> u64 {
    WINDOW + index as u64 * SLOT
}

/// A device's global system interrupt.
pub fn gsi(index: usize) -> u8 {
    FIRST_GSI + (index % GSIS) as u8
}

/// The devices.
#[derive(Debug)]
pub struct Virtio {
    transports: Vec<Transport>,
    written: Vec<Written>,
}

impl Virtio {
    /// The entropy source alone.
    pub fn new(seed: u64) -> Self {
        let rng = Rng::new(Random::new(seed ^ RNG_SALT));
        Virtio {
            transports: vec![Transport::new(Box::new(rng))],
            written: Vec::new(),
        }
    }

    /// Adds a disk, `minivmm-0` by its serial number if it is the first.
    pub fn add_disk(&mut self, medium: Box<dyn Medium>) -> Result<(), NoSlot> {
        if self.transports.len() == SLOTS {
            return Err(NoSlot);
        }
        let id = format!("minivmm-{}", self.transports.len() - 1);
        self.transports.push(Transport::new(Box::new(Block::new(medium, &id))));
        Ok(())
    }

    /// Adds a shared directory, which a guest mounts by its tag.
    pub fn add_share(&mut self, tag: &str, files: Box<dyn FileSystem>) -> Result<(), NoSlot> {
        if self.transports.len() == SLOTS {
            return Err(NoSlot);
        }
        self.transports.push(Transport::new(Box::new(Fs::new(tag, files))));
        Ok(())
    }

    /// How many devices there are.
    pub fn count(&self) -> u8 {
        self.transports.len() as u8
    }

    /// RAM that the devices have written since the last call.
    pub fn take_written(&mut self) -> Drain<'_, Written> {
        self.written.drain(..)
    }

    /// Which device answers an address, and at which offset.
    fn find(&self, gpa: u64) -> Option<(usize, u64)> {
        let offset = gpa.checked_sub(WINDOW)?;
        let index = usize::try_from(offset / SLOT).ok()?;
        (index < self.transports.len()).then_some((index, offset % SLOT))
    }

    /// Reads a register; `None` where no device answers.
    pub fn read(&self, gpa: u64, size: u8) -> Option<u64> {
        let (index, offset) = self.find(gpa)?;
        Some(self.transports[index].read(offset, size))
    }

    /// Writes a register at a time of the virtual clock, in nanoseconds; the answer is an interrupt with its level, or `None` where no device answers.
    pub fn write(&mut self, gpa: u64, size: u8, value: u64, now: u64, memory: &GuestMemoryMmap) -> Option<(u8, bool)> {
        let (index, offset) = self.find(gpa)?;
        if let Err(nonsense) = self.transports[index].write(offset, size, value, now, memory, &mut self.written) {
            debug!("virtio device {index} needs a reset: {nonsense}");
        }
        Some(self.line(index))
    }

    /// A device's interrupt with its level.
    fn line(&self, index: usize) -> (u8, bool) {
        let mut sharing = self.transports.iter().skip(index % GSIS).step_by(GSIS);
        (gsi(index), sharing.any(Transport::interrupt))
    }

    /// Goes on with what was put off until now; the answer is interrupts with their levels.
    pub fn advance(&mut self, now: u64, memory: &GuestMemoryMmap) -> Vec<(u8, bool)> {
        let mut lines = Vec::new();
        for index in 0..self.transports.len() {
            let transport = &mut self.transports[index];
            if transport.due().is_none_or(|due| now < due) {
                continue;
            }
            if let Err(nonsense) = transport.advance(now, memory, &mut self.written) {
                debug!("virtio device {index} needs a reset: {nonsense}");
            }
            lines.push(self.line(index));
        }
        lines
    }

    /// When something that was put off goes on, in nanoseconds of the virtual clock.
    pub fn next_event(&self) -> Option<u64> {
        self.transports.iter().filter_map(Transport::due).min()
    }

    /// What the devices have done since the last call, in bytes moved.
    pub fn take_work(&mut self) -> u64 {
        self.transports.iter_mut().map(Transport::take_work).sum()
    }

    /// The whole state, without what the disks hold.
    pub fn state(&self) -> Vec<TransportState> {
        self.transports.iter().map(Transport::state).collect()
    }

    /// Takes a state of a machine with the same devices back.
    pub fn set_state(&mut self, states: &[TransportState], memory: &GuestMemoryMmap) -> Result<(), StateError> {
        if states.len() != self.transports.len() {
            return Err(StateError::Virtio {
                state: states.len(),
                machine: self.transports.len(),
            });
        }
        for (index, (transport, state)) in self.transports.iter_mut().zip(states).enumerate() {
            transport
                .set_state(state, memory)
                .map_err(|source| StateError::Queues { index, source })?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "virtio_test.rs"]
mod tests;
