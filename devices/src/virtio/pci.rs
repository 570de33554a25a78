//! Virtio over PCI (4.1 "Virtio Over PCI Bus"): a function whose capabilities say where in its one range of memory the registers are.
//!
//! Interrupts are messages by MSI-X, one for each queue and one for changes if the driver wants that; where it leaves MSI-X off, the
//! function asserts INTA. The transitional interface, by I/O ports, is not there: the device ID is a modern one.

use serde::{Deserialize, Serialize};
use vm_memory::GuestMemoryMmap;

use super::{
    Device, Nonsense, Taken,
    interface::{Access, CHANGED, Interface, TransportState, USED, set_high, set_low},
};
use crate::pci::{COMMAND, COMMAND_INTX_OFF, COMMAND_MASTER, COMMAND_MEMORY, ConfigSpace, Identity, Message};

/// What the function's memory takes.
pub const BAR_SIZE: u32 = 0x8000;
/// Where its parts are.
const COMMON: u64 = 0x0000;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const NOTIFY: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const PENDING: u64 = 0x5000;
const PART: u64 = 0x1000;
/// The common configuration's length, up to queue_reset.
const COMMON_LEN: u32 = 0x3c;
/// The distance between two queues' notification addresses.
const NOTIFY_MULTIPLIER: u32 = 4;

/// 4.1.2.1 "Device Requirements: PCI Device Discovery".
const VENDOR: u16 = 0x1af4;
const FIRST_DEVICE: u16 = 0x1040;
const SUBSYSTEM: u16 = 0x1100;

/// Capability IDs of the PCI specification.
const CAP_VENDOR: u8 = 0x09;
const CAP_MSIX: u8 = 0x11;
/// 4.1.4 "Virtio Structure PCI Capabilities".
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_PCI: u8 = 5;
/// Offsets in the last one's capability: the BAR, where in it, how many bytes, and the data.
const ACCESS_BAR: u8 = 4;
const ACCESS_OFFSET: u8 = 8;
const ACCESS_LENGTH: u8 = 12;
const ACCESS_DATA: u8 = 16;

/// VIRTIO_MSI_NO_VECTOR.
const NO_VECTOR: u16 = 0xffff;
/// Message Control of MSI-X: enabled, and all vectors masked.
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_MASKED: u16 = 1 << 14;
/// Vector Control: masked.
const VECTOR_MASKED: u32 = 1;

/// What a function has to remember beyond its device and queues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionState {
    /// Configuration space.
    pub config: Vec<u8>,
    /// The MSI-X table: address, its upper half, data and vector control.
    pub table: Vec<[u32; 4]>,
    /// Vectors whose message waits for the vector to be unmasked, a bit for each.
    pub pending: u64,
    /// The vector for changes.
    pub config_vector: u16,
    /// The vector of each queue.
    pub queue_vectors: Vec<u16>,
}

/// A device as a PCI function.
#[derive(Debug)]
pub struct Transport {
    interface: Interface,
    config: ConfigSpace,
    msix: u8,
    access: u8,
    isr: u32,
    table: Vec<[u32; 4]>,
    pending: u64,
    config_vector: u16,
    queue_vectors: Vec<u16>,
    /// Messages that nobody has taken.
    messages: Vec<Message>,
}

/// Base class, sub-class and interface of a device, from the highest byte on (PCI Code and ID Assignment Specification).
fn class(id: u32) -> u32 {
    match id {
        1 => 0x02_00_00,
        2 => 0x01_00_00,
        3 => 0x07_80_00,
        26 => 0x01_80_00,
        _ => 0xff_00_00,
    }
}

impl Transport {
    /// A device at reset whose memory firmware has put at `address`, with its interrupt line.
    pub fn new(device: Box<dyn Device>, address: u32, line: u8) -> Self {
        let interface = Interface::new(device, true);
        let id = interface.id();
        let mut config = ConfigSpace::new(Identity {
            vendor: VENDOR,
            device: FIRST_DEVICE + id as u16,
            revision: 1,
            class: class(id),
            subsystem: SUBSYSTEM,
        });
        config.allow(
            COMMAND,
            &(COMMAND_MEMORY | COMMAND_MASTER | COMMAND_INTX_OFF).to_le_bytes(),
        );
        config.set_memory_bar(0, BAR_SIZE, address);
        config.set_interrupt_pin(line);
        let vectors = interface.queue_count() + 1;
        // 6.8.2.3 "Message Control for MSI-X": the size is one less than the number of vectors.
        let mut body = ((vectors - 1) as u16).to_le_bytes().to_vec();
        body.extend((TABLE as u32).to_le_bytes());
        body.extend((PENDING as u32).to_le_bytes());
        let msix = config.add_capability(CAP_MSIX, &body);
        config.allow(msix + 2, &(MSIX_ENABLE | MSIX_MASKED).to_le_bytes());
        let mut add = |kind: u8, at: u64, len: u32, more: &[u8]| {
            let whole = 16 + more.len() as u8;
            // Length of the capability, kind, BAR, ID, two bytes of padding, offset, length.
            let mut body = vec![whole, kind, 0, 0, 0, 0];
            body.extend((at as u32).to_le_bytes());
            body.extend(len.to_le_bytes());
            body.extend(more);
            config.add_capability(CAP_VENDOR, &body)
        };
        add(CFG_COMMON, COMMON, COMMON_LEN, &[]);
        add(CFG_ISR, ISR, 1, &[]);
        add(CFG_DEVICE, DEVICE, PART as u32, &[]);
        let notify = NOTIFY_MULTIPLIER * interface.queue_count() as u32;
        add(CFG_NOTIFY, NOTIFY, notify, &NOTIFY_MULTIPLIER.to_le_bytes());
        let access = add(CFG_PCI, 0, 0, &[0; 4]);
        config.allow(access + ACCESS_BAR, &[0xff]);
        config.allow(access + ACCESS_OFFSET, &[0xff; 8]);
        let queues = interface.queue_count();
        Transport {
            interface,
            config,
            msix,
            access,
            isr: 0,
            table: vec![[0, 0, 0, VECTOR_MASKED]; vectors],
            pending: 0,
            config_vector: NO_VECTOR,
            queue_vectors: vec![NO_VECTOR; queues],
            messages: Vec::new(),
        }
    }

    /// The address at which the function's memory answers, if it does.
    pub fn memory(&self) -> Option<u64> {
        (self.config.command() & COMMAND_MEMORY != 0).then(|| self.config.bar(0).into())
    }

    /// The level of its interrupt pin.
    pub fn interrupt(&self) -> bool {
        self.isr != 0 && !self.uses_messages() && self.config.command() & COMMAND_INTX_OFF == 0
    }

    /// Messages since the last call, in order.
    pub fn take_messages(&mut self) -> impl Iterator<Item = Message> + use<'_> {
        self.messages.drain(..)
    }

    fn control(&self) -> u16 {
        self.config.read(u16::from(self.msix) + 2, 2) as u16
    }

    fn uses_messages(&self) -> bool {
        self.control() & MSIX_ENABLE != 0
    }

    fn may_master(&self) -> bool {
        self.config.command() & COMMAND_MASTER != 0
    }

    // ---- Configuration space -----------------------------------------------------------------------------------------

    /// Reads configuration space; by the last capability also the function's memory.
    pub fn read_config(&mut self, at: u16, size: u8) -> u32 {
        let data = u16::from(self.access + ACCESS_DATA);
        if (data..data + 4).contains(&at)
            && let Some((offset, len)) = self.window()
        {
            let value = self.read(offset, len) as u32;
            self.config.put(self.access + ACCESS_DATA, &value.to_le_bytes());
        }
        self.config.set_interrupt(self.isr != 0 && !self.uses_messages());
        self.config.read(at, size)
    }

    /// Writes configuration space; by the last capability also the function's memory.
    ///
    /// # Errors
    /// What the driver did wrong, for a log.
    pub fn write_config(&mut self, at: u16, size: u8, value: u32, access: &mut Access<'_>) -> Result<(), Nonsense> {
        self.config.write(at, size, value);
        let mut result = Ok(());
        if at == u16::from(self.access + ACCESS_DATA)
            && let Some((offset, len)) = self.window()
            && len == size
        {
            result = self.write(offset, len, value.into(), access);
        }
        self.send_pending();
        result
    }

    /// 4.1.4.9 "PCI configuration access capability": where the last capability leads, and how many bytes.
    fn window(&self) -> Option<(u64, u8)> {
        let field = |at: u8| self.config.read(u16::from(self.access + at), 4);
        let (bar, offset, len) = (field(ACCESS_BAR) as u8, field(ACCESS_OFFSET), field(ACCESS_LENGTH));
        let fits = bar == 0 && matches!(len, 1 | 2 | 4) && offset % len == 0 && offset < BAR_SIZE;
        fits.then_some((offset.into(), len as u8))
    }

    // ---- Memory ------------------------------------------------------------------------------------------------------

    /// Reads 1, 2, 4 or 8 bytes of the function's memory. Reading ISR status takes the interrupt back.
    pub fn read(&mut self, offset: u64, size: u8) -> u64 {
        let at = offset % PART;
        match offset - at {
            COMMON => self.read_common(at, size).into(),
            ISR if at == 0 => std::mem::take(&mut self.isr).into(),
            DEVICE => self.interface.read_config(at, size),
            TABLE => self.read_table(at, size),
            PENDING if at < 8 && at.is_multiple_of(4) => self.pending >> (8 * at),
            _ => 0,
        }
    }

    /// Writes 1, 2, 4 or 8 bytes of the function's memory; a notification is answered at once, or its first slice is.
    ///
    /// # Errors
    /// What the driver did wrong, for a log.
    pub fn write(&mut self, offset: u64, size: u8, value: u64, access: &mut Access<'_>) -> Result<(), Nonsense> {
        let at = offset % PART;
        let result = match offset - at {
            COMMON => self.write_common(at, size, value, access),
            TABLE => {
                self.write_table(at, size, value);
                Ok(())
            }
            // A function that is no master reaches no memory.
            NOTIFY if self.may_master() => {
                let queue = at / u64::from(NOTIFY_MULTIPLIER);
                self.interface.notify(queue as u32, access)
            }
            _ => Ok(()),
        };
        self.raise();
        result
    }

    /// 4.1.4.3 "Common configuration structure layout"; a field is accessed whole, one of 64 bits also by its halves.
    fn read_common(&self, at: u64, size: u8) -> u32 {
        let queue = self.interface.queue();
        let low = |f: fn(&virtio_queue::QueueState) -> u64| queue.as_ref().map_or(0, f) as u32;
        let high = |f: fn(&virtio_queue::QueueState) -> u64| (queue.as_ref().map_or(0, f) >> 32) as u32;
        match (at, size) {
            (0x00, 4) => self.interface.device_features_select,
            (0x04, 4) => self.interface.device_features(),
            (0x08, 4) => self.interface.driver_features_select,
            (0x0c, 4) => self.interface.driver_features(),
            (0x10, 2) => self.config_vector.into(),
            (0x12, 2) => self.interface.queue_count() as u32,
            (0x14, 1) => self.interface.status(),
            // config_generation: the configuration never changes.
            (0x15, 1) => 0,
            (0x16, 2) => self.interface.queue_select,
            (0x18, 2) => queue.map_or(0, |queue| queue.size.into()),
            (0x1a, 2) => self.selected_vector().copied().unwrap_or(NO_VECTOR).into(),
            (0x1c, 2) => self.interface.queue_is_ready().into(),
            (0x1e, 2) => self.interface.queue_select,
            (0x20, 4) => low(|q| q.desc_table),
            (0x24, 4) => high(|q| q.desc_table),
            (0x28, 4) => low(|q| q.avail_ring),
            (0x2c, 4) => high(|q| q.avail_ring),
            (0x30, 4) => low(|q| q.used_ring),
            (0x34, 4) => high(|q| q.used_ring),
            _ => 0,
        }
    }

    fn selected_vector(&self) -> Option<&u16> {
        self.queue_vectors.get(self.interface.queue_select as usize)
    }

    fn write_common(&mut self, at: u64, size: u8, value: u64, access: &mut Access<'_>) -> Result<(), Nonsense> {
        if size == 8 && matches!(at, 0x20 | 0x28 | 0x30) {
            self.set_queue_address(at, value as u32);
            self.set_queue_address(at + 4, (value >> 32) as u32);
            return Ok(());
        }
        let value = value as u32;
        match (at, size) {
            (0x00, 4) => self.interface.device_features_select = value,
            (0x08, 4) => self.interface.driver_features_select = value,
            (0x0c, 4) => self.interface.set_driver_features(value),
            (0x10, 2) => self.config_vector = self.valid_vector(value),
            (0x14, 1) if self.interface.set_status(value & 0xff) => self.reset(),
            (0x14, 1) => {}
            (0x16, 2) => self.interface.queue_select = value & 0xffff,
            (0x18, 2) => {
                if let Some(queue) = self.interface.queue_registers() {
                    queue.size = value as u16;
                }
            }
            (0x1a, 2) => {
                let vector = self.valid_vector(value);
                if let Some(queue) = self.queue_vectors.get_mut(self.interface.queue_select as usize) {
                    *queue = vector;
                }
            }
            // 4.1.4.3.2: "The driver MUST NOT write a 0 to queue_enable."
            (0x1c, 2) if value & 0xffff == 1 => return self.interface.set_ready(true, access.memory),
            (0x20..0x38, 4) => self.set_queue_address(at, value),
            _ => {}
        }
        Ok(())
    }

    /// A vector that there is, or none (4.1.5.1.2.1 "Device Requirements: MSI-X Vector Configuration").
    fn valid_vector(&self, value: u32) -> u16 {
        match usize::try_from(value & 0xffff) {
            Ok(vector) if vector < self.table.len() => vector as u16,
            _ => NO_VECTOR,
        }
    }

    fn set_queue_address(&mut self, at: u64, value: u32) {
        let Some(queue) = self.interface.queue_registers() else {
            return;
        };
        match at {
            0x20 => set_low(&mut queue.desc_table, value),
            0x24 => set_high(&mut queue.desc_table, value),
            0x28 => set_low(&mut queue.avail_ring, value),
            0x2c => set_high(&mut queue.avail_ring, value),
            0x30 => set_low(&mut queue.used_ring, value),
            0x34 => set_high(&mut queue.used_ring, value),
            _ => {}
        }
    }

    /// What the transport forgets when the device is reset; the MSI-X table is PCI's, and stays.
    fn reset(&mut self) {
        self.isr = 0;
        self.config_vector = NO_VECTOR;
        self.queue_vectors.fill(NO_VECTOR);
    }

    // ---- Interrupts --------------------------------------------------------------------------------------------------

    /// 6.8.2 "MSI-X Capability and Table Structures": double words, or pairs of them.
    fn read_table(&self, at: u64, size: u8) -> u64 {
        let word = |at: u64| -> u64 {
            let entry = self.table.get((at / 16) as usize);
            entry.map_or(0, |entry| entry[(at % 16 / 4) as usize].into())
        };
        match size {
            4 if at.is_multiple_of(4) => word(at),
            8 if at.is_multiple_of(8) => word(at) | word(at + 4) << 32,
            _ => 0,
        }
    }

    fn write_table(&mut self, at: u64, size: u8, value: u64) {
        let mut set = |at: u64, value: u32| {
            if let Some(entry) = self.table.get_mut((at / 16) as usize) {
                entry[(at % 16 / 4) as usize] = value;
            }
        };
        match size {
            4 if at.is_multiple_of(4) => set(at, value as u32),
            8 if at.is_multiple_of(8) => {
                set(at, value as u32);
                set(at + 4, (value >> 32) as u32);
            }
            _ => return,
        }
        self.send_pending();
    }

    /// Interrupts for what the device has done.
    fn raise(&mut self) {
        let raised = self.interface.take_raised();
        if raised.changed {
            self.isr |= CHANGED;
            self.signal(self.config_vector);
        }
        if raised.queues != 0 && !self.uses_messages() {
            self.isr |= USED;
        }
        for queue in 0..self.queue_vectors.len() {
            if raised.queues & 1 << queue != 0 {
                self.signal(self.queue_vectors[queue]);
            }
        }
    }

    /// Sends a vector's message, or has it wait where the vector is masked.
    fn signal(&mut self, vector: u16) {
        let Some(&[low, high, data, control]) = self.table.get(usize::from(vector)) else {
            return;
        };
        if !self.uses_messages() {
            return;
        }
        if self.control() & MSIX_MASKED != 0 || control & VECTOR_MASKED != 0 || !self.may_master() {
            self.pending |= 1 << vector;
            return;
        }
        let address = u64::from(low & !3) | u64::from(high) << 32;
        self.messages.push(Message { address, data });
    }

    /// Sends what is not masked any more.
    fn send_pending(&mut self) {
        let mut left = std::mem::take(&mut self.pending);
        while left != 0 {
            let vector = left.trailing_zeros();
            left &= left - 1;
            self.signal(vector as u16);
        }
    }

    // ---- Time and state ----------------------------------------------------------------------------------------------

    /// When work that was put off goes on, in nanoseconds of virtual time.
    pub fn due(&self) -> Option<u64> {
        self.interface.due()
    }

    /// What was done since the last call, in bytes moved.
    pub fn take_work(&mut self) -> u64 {
        self.interface.take_work()
    }

    /// Goes on with work that was put off, if it is time for that.
    ///
    /// # Errors
    /// What the driver did wrong, for a log.
    pub fn advance(&mut self, access: &mut Access<'_>) -> Result<(), Nonsense> {
        let result = self.interface.advance(access);
        self.raise();
        result
    }

    /// Something has come from outside: see [`Device::input`].
    ///
    /// # Errors
    /// What the driver did wrong, for a log.
    pub fn input(&mut self, port: u32, bytes: &[u8], access: &mut Access<'_>) -> Result<Taken, Nonsense> {
        let result = self.interface.input(port, bytes, access);
        self.raise();
        result
    }

    /// The whole state.
    pub fn state(&self) -> TransportState {
        TransportState {
            interrupt_status: self.isr,
            pci: Some(FunctionState {
                config: self.config.bytes().to_vec(),
                table: self.table.clone(),
                pending: self.pending,
                config_vector: self.config_vector,
                queue_vectors: self.queue_vectors.clone(),
            }),
            ..self.interface.state()
        }
    }

    /// Takes a state back.
    ///
    /// # Errors
    /// A state of a device with other queues, on another transport, or with queues that are not in this memory; the device is as after
    /// a reset then.
    pub fn set_state(&mut self, state: &TransportState, memory: &GuestMemoryMmap) -> Result<(), Nonsense> {
        self.reset();
        self.messages.clear();
        let Some(function) = &state.pci else {
            return Err(Nonsense("a state of a device that is no PCI function"));
        };
        if function.table.len() != self.table.len() || function.queue_vectors.len() != self.queue_vectors.len() {
            return Err(Nonsense("a state of another device"));
        }
        self.interface.set_state(state, memory)?;
        self.isr = state.interrupt_status;
        self.config.restore(&function.config);
        self.table.clone_from(&function.table);
        let known = (1u64 << self.table.len()) - 1;
        self.pending = function.pending & known;
        self.config_vector = function.config_vector;
        self.queue_vectors.clone_from(&function.queue_vectors);
        Ok(())
    }
}

#[cfg(test)]
#[path = "pci_test.rs"]
mod tests;
