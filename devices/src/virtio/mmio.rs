//! Virtio over MMIO, version 2 (4.2 "Virtio Over MMIO"): the registers in front of a device.

use virtio_bindings::virtio_mmio::*;
use vm_memory::GuestMemoryMmap;

use super::{
    Device, Nonsense, Taken,
    interface::{Access, CHANGED, Interface, TransportState, USED, set_high, set_low},
};

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
/// Anything but 0, which means a placeholder.
const VENDOR: u32 = u32::from_le_bytes(*b"mini");

/// A device behind its registers.
#[derive(Debug)]
pub struct Transport {
    interface: Interface,
    interrupt_status: u32,
}

impl Transport {
    /// A device at reset.
    pub fn new(device: Box<dyn Device>) -> Self {
        Transport {
            interface: Interface::new(device, false),
            interrupt_status: 0,
        }
    }

    /// The device alone, for another transport.
    pub fn into_device(self) -> Box<dyn Device> {
        self.interface.into_device()
    }

    /// The level of the interrupt line.
    pub fn interrupt(&self) -> bool {
        self.interrupt_status != 0
    }

    /// Reads 1, 2, 4 or 8 bytes at `offset`. The registers are 32 bits wide and answer to nothing else; the configuration
    /// space takes any size.
    pub fn read(&self, offset: u64, size: u8) -> u64 {
        if let Some(at) = offset.checked_sub(VIRTIO_MMIO_CONFIG.into()) {
            return self.interface.read_config(at, size);
        }
        if size != 4 {
            return 0;
        }
        let value = match offset as u32 {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => self.interface.id(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => self.interface.device_features(),
            VIRTIO_MMIO_QUEUE_NUM_MAX => self.interface.queue().map_or(0, |q| q.max_size.into()),
            VIRTIO_MMIO_QUEUE_READY => self.interface.queue_is_ready().into(),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt_status,
            VIRTIO_MMIO_STATUS => self.interface.status(),
            // There is no shared memory: a length and an address of all ones.
            VIRTIO_MMIO_SHM_LEN_LOW | VIRTIO_MMIO_SHM_LEN_HIGH => u32::MAX,
            VIRTIO_MMIO_SHM_BASE_LOW | VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            // ConfigGeneration among them: the configuration never changes.
            _ => 0,
        };
        value.into()
    }

    /// Writes 1, 2, 4 or 8 bytes at `offset`; a notification is answered at once, or its first slice is.
    ///
    /// # Errors
    /// What the driver did wrong, for a log.
    pub fn write(&mut self, offset: u64, size: u8, value: u64, access: &mut Access<'_>) -> Result<(), Nonsense> {
        // Nothing in the configuration space of our devices can be written.
        if size != 4 || offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            return Ok(());
        }
        let value = value as u32;
        let result = match offset as u32 {
            VIRTIO_MMIO_QUEUE_NOTIFY => self.interface.notify(value, access),
            VIRTIO_MMIO_QUEUE_READY => self.interface.set_ready(value & 1 != 0, access.memory),
            register => {
                self.set(register, value);
                Ok(())
            }
        };
        self.take_raised();
        result
    }

    /// Writes a register that has no effect on queues that are at work, but for a reset.
    fn set(&mut self, register: u32, value: u32) {
        match register {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.interface.device_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.interface.driver_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES => self.interface.set_driver_features(value),
            VIRTIO_MMIO_QUEUE_SEL => self.interface.queue_select = value,
            VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt_status &= !value,
            VIRTIO_MMIO_STATUS => {
                if self.interface.set_status(value) {
                    self.interrupt_status = 0;
                }
            }
            _ => {
                if let Some(r) = self.interface.queue_registers() {
                    match register {
                        VIRTIO_MMIO_QUEUE_NUM => r.size = u16::try_from(value).unwrap_or(0),
                        VIRTIO_MMIO_QUEUE_DESC_LOW => set_low(&mut r.desc_table, value),
                        VIRTIO_MMIO_QUEUE_DESC_HIGH => set_high(&mut r.desc_table, value),
                        VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_low(&mut r.avail_ring, value),
                        VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_high(&mut r.avail_ring, value),
                        VIRTIO_MMIO_QUEUE_USED_LOW => set_low(&mut r.used_ring, value),
                        VIRTIO_MMIO_QUEUE_USED_HIGH => set_high(&mut r.used_ring, value),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Shows in InterruptStatus what the device has interrupted for.
    fn take_raised(&mut self) {
        let raised = self.interface.take_raised();
        self.interrupt_status |= if raised.queues != 0 { USED } else { 0 };
        self.interrupt_status |= if raised.changed { CHANGED } else { 0 };
    }

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
        self.take_raised();
        result
    }

    /// Something has come from outside: see [`Device::input`].
    ///
    /// # Errors
    /// What the driver did wrong, for a log.
    pub fn input(&mut self, port: u32, bytes: &[u8], access: &mut Access<'_>) -> Result<Taken, Nonsense> {
        let result = self.interface.input(port, bytes, access);
        self.take_raised();
        result
    }

    /// The whole state.
    pub fn state(&self) -> TransportState {
        TransportState {
            interrupt_status: self.interrupt_status,
            ..self.interface.state()
        }
    }

    /// Takes a state back.
    ///
    /// # Errors
    /// A state of a device with other queues, on another transport, or with queues that are not in this memory; the device is as after
    /// a reset then.
    pub fn set_state(&mut self, state: &TransportState, memory: &GuestMemoryMmap) -> Result<(), Nonsense> {
        self.interrupt_status = 0;
        if state.pci.is_some() {
            return Err(Nonsense("a state of a PCI function"));
        }
        self.interface.set_state(state, memory)?;
        self.interrupt_status = state.interrupt_status;
        Ok(())
    }
}
