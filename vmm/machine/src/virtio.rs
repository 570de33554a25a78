//! The machine's virtio devices: where they answer, and which interrupt each has.
//!
//! The first is the entropy source, the others are in the order in which they were added: disks in that of the command line. They are all
//! on one [`BusKind`].

use std::vec::Drain;

use devices::{
    pci::{Message, Place},
    random::Random,
    virtio::{
        Device, Nonsense, Taken,
        block::{Block, Medium},
        interface::{Access, TransportState},
        mmio,
        pci::{self, BAR_SIZE},
        request::Written,
        rng::Rng,
    },
};
use log::debug;
use vm_memory::GuestMemoryMmap;

use crate::{
    error::StateError,
    pci::{BusKind, DEVICES, MEMORY, MEMORY_LAST},
};

/// Where the first device's registers are; each has a page.
pub const WINDOW: u64 = 0xfeb0_0000;
/// The distance from one device's registers to the next one's.
pub const SLOT: u64 = 0x1000;
/// The most devices there can be over MMIO.
pub const SLOTS: usize = 64;
/// The IOAPIC's pins that have no ISA interrupt; with more devices than that, some share one.
const FIRST_GSI: u8 = 16;
const GSIS: usize = 8;
/// The entropy source and RDRAND come from one seed, but the bytes of one tell nothing about the other.
const RNG_SALT: u64 = 0x7669_7274_696f_2d34;

/// There is no room for one more device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("one device too many: {} fit into the machine beside the entropy source", .0 - 1)]
pub struct NoSlot(pub usize);

/// Where a device's registers are.
pub fn address(index: usize) -> u64 {
    WINDOW + index as u64 * SLOT
}

/// A device's global system interrupt.
pub fn gsi(index: usize) -> u8 {
    FIRST_GSI + (index % GSIS) as u8
}

/// Where firmware has put the memory of a device's function.
fn function_memory(index: usize) -> u64 {
    MEMORY + index as u64 * u64::from(BAR_SIZE)
}

/// A device behind its transport.
#[derive(Debug)]
enum Slot {
    Mmio(mmio::Transport),
    Pci(Box<pci::Transport>),
}

impl Slot {
    fn new(bus: BusKind, index: usize, device: Box<dyn Device>) -> Self {
        match bus {
            BusKind::Mmio => Slot::Mmio(mmio::Transport::new(device)),
            BusKind::Pci => Slot::Pci(Box::new(pci::Transport::new(
                device,
                function_memory(index) as u32,
                gsi(index),
            ))),
        }
    }

    fn read(&mut self, offset: u64, size: u8) -> u64 {
        match self {
            Slot::Mmio(device) => device.read(offset, size),
            Slot::Pci(device) => device.read(offset, size),
        }
    }

    fn write(&mut self, offset: u64, size: u8, value: u64, access: &mut Access<'_>) -> Result<(), Nonsense> {
        match self {
            Slot::Mmio(device) => device.write(offset, size, value, access),
            Slot::Pci(device) => device.write(offset, size, value, access),
        }
    }

    fn advance(&mut self, access: &mut Access<'_>) -> Result<(), Nonsense> {
        match self {
            Slot::Mmio(device) => device.advance(access),
            Slot::Pci(device) => device.advance(access),
        }
    }

    fn input(&mut self, port: u32, bytes: &[u8], access: &mut Access<'_>) -> Result<Taken, Nonsense> {
        match self {
            Slot::Mmio(device) => device.input(port, bytes, access),
            Slot::Pci(device) => device.input(port, bytes, access),
        }
    }

    fn interrupt(&self) -> bool {
        match self {
            Slot::Mmio(device) => device.interrupt(),
            Slot::Pci(device) => device.interrupt(),
        }
    }

    fn due(&self) -> Option<u64> {
        match self {
            Slot::Mmio(device) => device.due(),
            Slot::Pci(device) => device.due(),
        }
    }

    fn take_work(&mut self) -> u64 {
        match self {
            Slot::Mmio(device) => device.take_work(),
            Slot::Pci(device) => device.take_work(),
        }
    }

    fn state(&self) -> TransportState {
        match self {
            Slot::Mmio(device) => device.state(),
            Slot::Pci(device) => device.state(),
        }
    }

    fn set_state(&mut self, state: &TransportState, memory: &GuestMemoryMmap) -> Result<(), Nonsense> {
        match self {
            Slot::Mmio(device) => device.set_state(state, memory),
            Slot::Pci(device) => device.set_state(state, memory),
        }
    }
}

/// What a device asks of the interrupt controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// A global system interrupt has this level.
    Line(u8, bool),
    /// A message.
    Message(Message),
}

/// The devices.
#[derive(Debug)]
pub struct Virtio {
    bus: BusKind,
    slots: Vec<Slot>,
    written: Vec<Written>,
    interrupts: Vec<Interrupt>,
}

impl Virtio {
    /// The entropy source alone.
    pub fn new(seed: u64, bus: BusKind) -> Self {
        let rng = Rng::new(Random::new(seed ^ RNG_SALT));
        Virtio {
            bus,
            slots: vec![Slot::new(bus, 0, Box::new(rng))],
            written: Vec::new(),
            interrupts: Vec::new(),
        }
    }

    /// Adds a disk, `minivmm-0` by its serial number if it is the first device.
    ///
    /// # Errors
    /// The machine is full.
    pub fn add_disk(&mut self, medium: Box<dyn Medium>) -> Result<usize, NoSlot> {
        let id = format!("minivmm-{}", self.slots.len() - 1);
        self.add(Box::new(Block::new(medium, &id)))
    }

    /// Adds a device; the answer is its number.
    ///
    /// # Errors
    /// The machine is full.
    pub fn add(&mut self, device: Box<dyn Device>) -> Result<usize, NoSlot> {
        let most = match self.bus {
            BusKind::Mmio => SLOTS,
            BusKind::Pci => DEVICES,
        };
        let index = self.slots.len();
        if index == most {
            return Err(NoSlot(most));
        }
        self.slots.push(Slot::new(self.bus, index, device));
        Ok(index)
    }

    /// How many devices there are on a bus.
    pub fn count(&self, bus: BusKind) -> u8 {
        if bus == self.bus { self.slots.len() as u8 } else { 0 }
    }

    /// RAM that the devices have written since the last call.
    pub fn take_written(&mut self) -> Drain<'_, Written> {
        self.written.drain(..)
    }

    /// What they have asked of the interrupt controllers since the last call.
    pub fn take_interrupts(&mut self) -> Drain<'_, Interrupt> {
        self.interrupts.drain(..)
    }

    /// Which device answers an address, and at which offset.
    fn find(&self, gpa: u64) -> Option<(usize, u64)> {
        if self.bus == BusKind::Mmio {
            let offset = gpa.checked_sub(WINDOW)?;
            let index = usize::try_from(offset / SLOT).ok()?;
            return (index < self.slots.len()).then_some((index, offset % SLOT));
        }
        if !(MEMORY..=MEMORY_LAST).contains(&gpa) {
            return None;
        }
        let answers = |index: usize| {
            let Some(Slot::Pci(function)) = self.slots.get(index) else {
                return None;
            };
            let offset = gpa.checked_sub(function.memory()?)?;
            (offset < u64::from(BAR_SIZE)).then_some((index, offset))
        };
        // Where firmware has put it, as long as nobody has moved it.
        let usual = (gpa - MEMORY) / u64::from(BAR_SIZE);
        answers(usual as usize).or_else(|| (0..self.slots.len()).find_map(answers))
    }

    /// Reads a register; `None` where no device answers.
    pub fn read(&mut self, gpa: u64, size: u8) -> Option<u64> {
        let (index, offset) = self.find(gpa)?;
        let value = self.slots[index].read(offset, size);
        if self.bus == BusKind::Pci {
            // Reading ISR status takes an interrupt back.
            self.interrupt(index);
        }
        Some(value)
    }

    /// Does something with a device that may reach memory.
    fn with<T>(
        &mut self,
        index: usize,
        now: u64,
        memory: &GuestMemoryMmap,
        f: impl FnOnce(&mut Slot, &mut Access<'_>) -> Result<T, Nonsense>,
    ) -> Option<T> {
        let written = &mut self.written;
        let mut access = Access { now, memory, written };
        let result = f(&mut self.slots[index], &mut access);
        self.interrupt(index);
        result
            .inspect_err(|nonsense| debug!("virtio device {index} needs a reset: {nonsense}"))
            .ok()
    }

    /// Writes a register at a time of the virtual clock, in nanoseconds; `false` where no device answers.
    pub fn write(&mut self, gpa: u64, size: u8, value: u64, now: u64, memory: &GuestMemoryMmap) -> bool {
        let Some((index, offset)) = self.find(gpa) else {
            return false;
        };
        self.with(index, now, memory, |slot, access| {
            slot.write(offset, size, value, access)
        });
        true
    }

    /// The function of a place in configuration space.
    fn function(&self, place: Place) -> Option<usize> {
        // Device 0 is the host bridge, and no device has more than one function.
        let device = usize::from(place.function >> 3).checked_sub(1)?;
        (place.bus == 0 && place.function & 7 == 0 && self.bus == BusKind::Pci && device < self.slots.len())
            .then_some(device)
    }

    /// Reads a function's configuration space; all ones where there is no function.
    pub fn read_config(&mut self, place: Place, size: u8) -> u32 {
        let Some(index) = self.function(place) else {
            return u32::MAX;
        };
        match &mut self.slots[index] {
            Slot::Pci(function) => {
                let value = function.read_config(place.offset, size);
                self.interrupt(index);
                value
            }
            Slot::Mmio(_) => u32::MAX,
        }
    }

    /// Writes a function's configuration space.
    pub fn write_config(&mut self, place: Place, size: u8, value: u32, now: u64, memory: &GuestMemoryMmap) {
        let Some(index) = self.function(place) else { return };
        self.with(index, now, memory, |slot, access| match slot {
            Slot::Pci(function) => function.write_config(place.offset, size, value, access),
            Slot::Mmio(_) => Ok(()),
        });
    }

    /// Something has come from outside for a device's port, at a time of the virtual clock.
    pub fn input(&mut self, index: usize, port: u32, bytes: &[u8], now: u64, memory: &GuestMemoryMmap) -> Taken {
        if index >= self.slots.len() {
            return Taken::Dropped;
        }
        let taken = self.with(index, now, memory, |slot, access| slot.input(port, bytes, access));
        taken.unwrap_or(Taken::Dropped)
    }

    /// A device may have changed its line, or have sent messages.
    fn interrupt(&mut self, index: usize) {
        if let Slot::Pci(function) = &mut self.slots[index] {
            self.interrupts.extend(function.take_messages().map(Interrupt::Message));
        }
        let mut sharing = self.slots.iter().skip(index % GSIS).step_by(GSIS);
        let level = sharing.any(Slot::interrupt);
        self.interrupts.push(Interrupt::Line(gsi(index), level));
    }

    /// Goes on with what was put off until now.
    pub fn advance(&mut self, now: u64, memory: &GuestMemoryMmap) {
        for index in 0..self.slots.len() {
            if self.slots[index].due().is_some_and(|due| now >= due) {
                self.with(index, now, memory, Slot::advance);
            }
        }
    }

    /// When something that was put off goes on, in nanoseconds of the virtual clock.
    pub fn next_event(&self) -> Option<u64> {
        self.slots.iter().filter_map(Slot::due).min()
    }

    /// What the devices have done since the last call, in bytes moved.
    pub fn take_work(&mut self) -> u64 {
        self.slots.iter_mut().map(Slot::take_work).sum()
    }

    /// The whole state, without what the disks hold.
    pub fn state(&self) -> Vec<TransportState> {
        self.slots.iter().map(Slot::state).collect()
    }

    /// Takes a state of a machine with the same devices back.
    ///
    /// # Errors
    /// It is of a machine with others.
    pub fn set_state(&mut self, states: &[TransportState], memory: &GuestMemoryMmap) -> Result<(), StateError> {
        if states.len() != self.slots.len() {
            return Err(StateError::Virtio {
                state: states.len(),
                machine: self.slots.len(),
            });
        }
        for (index, (slot, state)) in self.slots.iter_mut().zip(states).enumerate() {
            slot.set_state(state, memory)
                .map_err(|source| StateError::Queues { index, source })?;
        }
        self.interrupts.clear();
        Ok(())
    }
}

#[cfg(test)]
#[path = "virtio_test.rs"]
mod tests;
