//! The machine's virtio devices: where they answer, and which interrupt each has.
//!
//! The first is the entropy source, the others are the disks in the order of the command line.

use std::vec::Drain;

use devices::{
    random::Random,
    virtio::{
        block::{Block, Medium},
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
#[error("one disk too many: {} fit into the machine", SLOTS - 1)]
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

    /// Writes a register; the answer is an interrupt with its level, or `None` where no device answers.
    pub fn write(&mut self, gpa: u64, size: u8, value: u64, memory: &GuestMemoryMmap) -> Option<(u8, bool)> {
        let (index, offset) = self.find(gpa)?;
        if let Err(nonsense) = self.transports[index].write(offset, size, value, memory, &mut self.written) {
            debug!("virtio device {index} needs a reset: {nonsense}");
        }
        let sharing = self.transports.iter().skip(index % GSIS).step_by(GSIS);
        Some((gsi(index), sharing.into_iter().any(Transport::interrupt)))
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
mod tests {
    use super::*;
    use crate::{Machine, memory::Memory};
    use devices::virtio::block::Medium;
    use engine::bus::Bus;
    use std::io;
    use x86::model::WESTMERE;

    #[derive(Debug)]
    struct Zeroes;

    impl Medium for Zeroes {
        fn size(&self) -> u64 {
            4096
        }

        fn readonly(&self) -> bool {
            false
        }

        fn read(&mut self, _: u64, bytes: &mut [u8]) -> io::Result<()> {
            bytes.fill(0);
            Ok(())
        }

        fn write(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn zero(&mut self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn machine(disks: usize) -> Machine {
        let memory = Memory::new(2 << 20).unwrap();
        let mut machine = Machine::new(&WESTMERE, 1, memory, 0, 7, Box::new(io::sink()));
        for _ in 0..disks {
            machine.add_disk(Box::new(Zeroes)).unwrap();
        }
        machine
    }

    // covers: devices/virtio-mmio
    #[test]
    fn each_device_has_a_page_and_the_rest_is_empty() {
        let mut machine = machine(2);
        assert_eq!(machine.hardware().virtio, 3);
        for (index, id) in [(0, 4), (1, 2), (2, 2)] {
            assert_eq!(machine.cpu(0).read(address(index), 4, 0), 0x7472_6976);
            assert_eq!(machine.cpu(0).read(address(index) + 8, 4, 0), id);
        }
        for gpa in [address(3), WINDOW - 4] {
            assert_eq!(machine.cpu(0).read(gpa, 4, 0), 0xffff_ffff, "{gpa:#x}");
        }
    }

    // covers: bad-input/disk-too-many
    #[test]
    fn the_pages_are_used_up_at_some_point() {
        let mut machine = machine(SLOTS - 1);
        let error = machine.add_disk(Box::new(Zeroes)).unwrap_err().to_string();
        assert!(error.contains("63 fit"), "{error}");
        assert!(address(SLOTS - 1) + SLOT <= 0xfec0_0000, "below the IOAPIC");
    }

    // covers: devices/virtio-mmio
    #[test]
    fn devices_that_share_a_pin_keep_it_up_until_all_are_silent() {
        let mut virtio = Virtio::new(0);
        for _ in 0..GSIS + 1 {
            virtio.add_disk(Box::new(Zeroes)).unwrap();
        }
        let memory = Memory::new(2 << 20).unwrap();
        let (first, second) = (1, 1 + GSIS);
        assert_eq!(gsi(first), gsi(second));
        let mut set =
            |index: usize, register: u64, value: u64| virtio.write(address(index) + register, 4, value, memory.mmap());
        // A queue at 0 is nonsense, of which a driver that is at work is told by an interrupt.
        for index in [first, second] {
            set(index, 0x070, 15);
            assert_eq!(set(index, 0x044, 1), Some((gsi(first), true)));
        }
        assert_eq!(set(first, 0x064, 3), Some((gsi(first), true)));
        assert_eq!(set(second, 0x064, 3), Some((gsi(first), false)));
    }

    // covers: devices/virtio-state
    #[test]
    fn a_machine_s_state_has_its_devices() {
        let mut a = machine(1);
        a.cpu(0).write(address(1) + 0x070, 4, 3, 0);
        let mut b = machine(1);
        assert_ne!(a.state(), b.state());
        b.set_state(&a.state()).unwrap();
        assert_eq!(a.state(), b.state());
        let error = machine(2).set_state(&a.state()).unwrap_err();
        assert!(error.to_string().contains("2 virtio devices, the machine 3"), "{error}");
        let mut c = machine(1);
        c.add_second_serial(Box::new(io::sink()));
        c.cpu(0).port_write(0x2ff, 1, 0x5a, 0);
        assert_eq!(c.cpu(0).port_read(0x2ff, 1, 0), 0x5a, "the scratch register");
        c.set_state(&a.state()).unwrap_err();
        let mut d = machine(1);
        d.add_second_serial(Box::new(io::sink()));
        d.set_state(&c.state()).unwrap();
        assert_eq!(d.cpu(0).port_read(0x2ff, 1, 0), 0x5a);
    }
}
