//! Virtio over MMIO, version 2 (4.2 "Virtio Over MMIO"): the registers in front of a device.

use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;

use virtio_bindings::{
    virtio_config::{
        VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
    },
    virtio_mmio::*,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT},
};
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use super::{Device, DeviceState, Nonsense, Request, request::Written};

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
/// Anything but 0, which means a placeholder.
const VENDOR: u32 = u32::from_le_bytes(*b"mini");
const DRIVER_OK: u32 = VIRTIO_CONFIG_S_DRIVER_OK;
const FEATURES_OK: u32 = VIRTIO_CONFIG_S_FEATURES_OK;
const NEEDS_RESET: u32 = VIRTIO_CONFIG_S_NEEDS_RESET;
const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
const INDIRECT: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
/// Work that is done at once, in bytes moved; the request that goes beyond it is finished.
pub const SLICE: u64 = 4 << 20;
/// The virtual time from one slice to the next: a disk of 40 GB/s.
pub const PAUSE_NS: u64 = 100_000;
/// Interrupt causes.
const USED: u32 = VIRTIO_MMIO_INT_VRING;
const CHANGED: u32 = VIRTIO_MMIO_INT_CONFIG;

/// The whole state of a transport and its device, but for what a disk's file holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// DeviceFeaturesSel.
    pub device_features_select: u32,
    /// DriverFeaturesSel.
    pub driver_features_select: u32,
    /// DriverFeatures, both halves.
    pub driver_features: u64,
    /// QueueSel.
    pub queue_select: u32,
    /// Status.
    pub status: u32,
    /// InterruptStatus.
    pub interrupt_status: u32,
    /// The queues' registers and positions.
    #[serde(with = "queues")]
    pub queues: Vec<QueueState>,
    /// Queues whose last notification is not carried out in whole, a bit for each.
    pub waiting: u32,
    /// When that goes on, in nanoseconds of virtual time.
    pub due: u64,
    /// The device's own.
    pub device: DeviceState,
}

/// [`TransportState::queues`], whose type another crate has, as they are stored.
mod queues {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use virtio_queue::QueueState;

    #[derive(Serialize, Deserialize)]
    #[serde(remote = "QueueState")]
    struct Fields {
        max_size: u16,
        next_avail: u16,
        next_used: u16,
        event_idx_enabled: bool,
        size: u16,
        ready: bool,
        desc_table: u64,
        avail_ring: u64,
        used_ring: u64,
    }

    #[derive(Serialize, Deserialize)]
    struct Stored(#[serde(with = "Fields")] QueueState);

    pub fn serialize<S: Serializer>(queues: &[QueueState], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(queues.iter().copied().map(Stored))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<QueueState>, D::Error> {
        let stored = Vec::<Stored>::deserialize(from)?;
        Ok(stored.into_iter().map(|Stored(queue)| queue).collect())
    }
}

/// A device behind its registers.
#[derive(Debug)]
pub struct Transport {
    device: Box<dyn Device>,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    status: u32,
    interrupt_status: u32,
    waiting: u32,
    due: u64,
    /// What was done since it was asked last.
    work: u64,
    queues: Vec<VirtQueue>,
}

/// A queue's registers as they were written, which may be nonsense, and the queue itself once they have been found good.
#[derive(Debug)]
struct VirtQueue {
    registers: QueueState,
    queue: Option<Queue>,
}

impl VirtQueue {
    fn new(max_size: u16) -> Self {
        let registers = QueueState {
            max_size,
            ..QueueState::default()
        };
        VirtQueue { registers, queue: None }
    }

    fn state(&self) -> QueueState {
        self.queue.as_ref().map_or(self.registers, Queue::state)
    }

    /// QueueReady is written with 1.
    fn start(&mut self, event_idx: bool, memory: &GuestMemoryMmap) -> Result<(), Nonsense> {
        let state = QueueState {
            ready: true,
            event_idx_enabled: event_idx,
            next_avail: 0,
            next_used: 0,
            ..self.registers
        };
        self.resume(state, memory)
    }

    fn resume(&mut self, state: QueueState, memory: &GuestMemoryMmap) -> Result<(), Nonsense> {
        let queue = Queue::try_from(state).map_err(|_| Nonsense("a queue of an impossible size or misaligned"))?;
        let size = usize::from(state.size);
        // 2.7 "Split Virtqueues": 16 bytes a descriptor; 2 bytes an available and 8 a used entry, and 6 around them.
        for (address, len, access) in [
            (state.desc_table, 16 * size, Permissions::Read),
            (state.avail_ring, 2 * size + 6, Permissions::Read),
            (state.used_ring, 8 * size + 6, Permissions::Write),
        ] {
            // virtio-queue takes an available ring at 0 for a queue that was never set up.
            if address == 0 || !memory.check_range(GuestAddress(address), len, access) {
                return Err(Nonsense("a queue that is not all RAM"));
            }
        }
        self.queue = Some(queue);
        Ok(())
    }
}

impl Transport {
    /// A device at reset.
    pub fn new(device: Box<dyn Device>) -> Self {
        let queues = device.queues().iter().map(|max| VirtQueue::new(*max)).collect();
        Transport {
            device,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            status: 0,
            interrupt_status: 0,
            waiting: 0,
            due: 0,
            work: 0,
            queues,
        }
    }

    /// The level of the interrupt line.
    pub fn interrupt(&self) -> bool {
        self.interrupt_status != 0
    }

    fn features(&self) -> u64 {
        self.device.features() | VERSION_1 | EVENT_IDX | INDIRECT
    }

    fn queue(&self) -> Option<&VirtQueue> {
        self.queues.get(self.queue_select as usize)
    }

    /// Reads 1, 2, 4 or 8 bytes at `offset`. The registers are 32 bits wide and answer to nothing else; the configuration
    /// space takes any size.
    pub fn read(&self, offset: u64, size: u8) -> u64 {
        if offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            let (config, at) = (self.device.config(), offset - u64::from(VIRTIO_MMIO_CONFIG));
            let byte = |i: u64| at.checked_add(i).and_then(|at| config.get(usize::try_from(at).ok()?));
            return (0..u64::from(size.min(8)))
                .fold(0, |value, i| value | u64::from(*byte(i).unwrap_or(&0)) << (8 * i));
        }
        if size != 4 {
            return 0;
        }
        let value = match offset as u32 {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => self.device.id(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.features(), self.device_features_select),
            VIRTIO_MMIO_QUEUE_NUM_MAX => self.queue().map_or(0, |q| q.registers.max_size.into()),
            VIRTIO_MMIO_QUEUE_READY => self.queue().is_some_and(|q| q.queue.is_some()).into(),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt_status,
            VIRTIO_MMIO_STATUS => self.status,
            // There is no shared memory: a length and an address of all ones.
            VIRTIO_MMIO_SHM_LEN_LOW | VIRTIO_MMIO_SHM_LEN_HIGH => u32::MAX,
            VIRTIO_MMIO_SHM_BASE_LOW | VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            // ConfigGeneration among them: the configuration never changes.
            _ => 0,
        };
        value.into()
    }

    /// Writes 1, 2, 4 or 8 bytes at `offset`, `now` nanoseconds of virtual time into the run; a notification is answered at once, or
    /// its first slice is. What is written to memory on the way goes to the end of `written`. The answer is what the driver did wrong,
    /// for a log.
    pub fn write(
        &mut self,
        offset: u64,
        size: u8,
        value: u64,
        now: u64,
        memory: &GuestMemoryMmap,
        written: &mut Vec<Written>,
    ) -> Result<(), Nonsense> {
        // Nothing in the configuration space of our devices can be written.
        if size != 4 || offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            return Ok(());
        }
        let value = value as u32;
        match offset as u32 {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.device_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES if self.status & FEATURES_OK == 0 => {
                let features = &mut self.driver_features;
                match self.driver_features_select {
                    0 => *features = *features & !0xffff_ffff | u64::from(value),
                    1 => *features = *features & 0xffff_ffff | u64::from(value) << 32,
                    _ => {}
                }
            }
            VIRTIO_MMIO_QUEUE_SEL => self.queue_select = value,
            VIRTIO_MMIO_QUEUE_NOTIFY => return self.notify(value, now, memory, written),
            VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt_status &= !value,
            VIRTIO_MMIO_STATUS => self.set_status(value),
            VIRTIO_MMIO_QUEUE_READY => return self.set_ready(value, memory),
            register => self.set_up_queue(register, value),
        }
        Ok(())
    }

    fn set_status(&mut self, value: u32) {
        if value == 0 {
            self.reset();
            return;
        }
        let mut status = value & 0xff & !NEEDS_RESET | self.status & NEEDS_RESET;
        if status & FEATURES_OK & !self.status != 0 {
            // 2.2 "Feature Bits", 6 "Reserved Feature Bits": nothing that was not offered, and not without VERSION_1.
            if self.driver_features & !self.features() != 0 || self.driver_features & VERSION_1 == 0 {
                status &= !FEATURES_OK;
            } else {
                self.device.negotiated(self.driver_features);
            }
        }
        self.status = status;
    }

    fn reset(&mut self) {
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        self.status = 0;
        self.interrupt_status = 0;
        (self.waiting, self.due) = (0, 0);
        for queue in &mut self.queues {
            *queue = VirtQueue::new(queue.registers.max_size);
        }
    }

    /// The registers that describe a queue; 4.2.2.2: they are not written while the queue is ready.
    fn set_up_queue(&mut self, register: u32, value: u32) {
        let Some(queue) = self
            .queues
            .get_mut(self.queue_select as usize)
            .filter(|q| q.queue.is_none())
        else {
            return;
        };
        let r = &mut queue.registers;
        let low = |address: &mut u64| *address = *address & !0xffff_ffff | u64::from(value);
        let high = |address: &mut u64| *address = *address & 0xffff_ffff | u64::from(value) << 32;
        match register {
            VIRTIO_MMIO_QUEUE_NUM => r.size = u16::try_from(value).unwrap_or(0),
            VIRTIO_MMIO_QUEUE_DESC_LOW => low(&mut r.desc_table),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => high(&mut r.desc_table),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => low(&mut r.avail_ring),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => high(&mut r.avail_ring),
            VIRTIO_MMIO_QUEUE_USED_LOW => low(&mut r.used_ring),
            VIRTIO_MMIO_QUEUE_USED_HIGH => high(&mut r.used_ring),
            _ => {}
        }
    }

    fn set_ready(&mut self, value: u32, memory: &GuestMemoryMmap) -> Result<(), Nonsense> {
        let event_idx = self.driver_features & EVENT_IDX != 0;
        let Some(queue) = self.queues.get_mut(self.queue_select as usize) else {
            return Ok(());
        };
        match value & 1 {
            0 => {
                queue.queue = None;
                Ok(())
            }
            _ if queue.queue.is_some() => Ok(()),
            _ => {
                let started = queue.start(event_idx, memory);
                self.answer(started)
            }
        }
    }

    /// Passes a result on, and asks for a reset where it is an error.
    fn answer(&mut self, result: Result<(), Nonsense>) -> Result<(), Nonsense> {
        if result.is_err() {
            self.waiting = 0;
            self.status |= NEEDS_RESET;
            if self.status & DRIVER_OK != 0 {
                self.interrupt_status |= CHANGED;
            }
        }
        result
    }

    /// When work that was put off goes on, in nanoseconds of virtual time.
    pub fn due(&self) -> Option<u64> {
        (self.waiting != 0).then_some(self.due)
    }

    /// What was done since the last call, in bytes moved.
    pub fn take_work(&mut self) -> u64 {
        std::mem::take(&mut self.work)
    }

    /// Goes on with work that was put off, if it is time for that.
    ///
    /// # Errors
    /// What the driver did wrong, for a log.
    pub fn advance(&mut self, now: u64, memory: &GuestMemoryMmap, written: &mut Vec<Written>) -> Result<(), Nonsense> {
        if self.due().is_none_or(|due| now < due) {
            return Ok(());
        }
        let index = self.waiting.trailing_zeros();
        self.waiting &= !(1 << index);
        self.notify(index, now, memory, written)
    }

    fn notify(
        &mut self,
        index: u32,
        now: u64,
        memory: &GuestMemoryMmap,
        written: &mut Vec<Written>,
    ) -> Result<(), Nonsense> {
        const LIVE: u32 = DRIVER_OK | FEATURES_OK;
        if self.status & (LIVE | NEEDS_RESET) != LIVE {
            return Ok(());
        }
        let bit = 1u32.checked_shl(index).unwrap_or(0);
        if self.waiting & bit != 0 {
            return Ok(());
        }
        let index = index as usize;
        let Some(queue) = self.queues.get_mut(index).and_then(|q| q.queue.as_mut()) else {
            return Ok(());
        };
        let result = serve(self.device.as_mut(), index, queue, now, memory, written, &mut self.work);
        if let Ok(Served { interrupt, more }) = result {
            self.interrupt_status |= if interrupt { USED } else { 0 };
            self.waiting |= if more { bit } else { 0 };
        }
        if self.waiting != 0 {
            self.due = now.saturating_add(PAUSE_NS);
        }
        self.answer(result.map(drop))
    }

    /// The whole state.
    pub fn state(&self) -> TransportState {
        TransportState {
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            driver_features: self.driver_features,
            queue_select: self.queue_select,
            status: self.status,
            interrupt_status: self.interrupt_status,
            queues: self.queues.iter().map(VirtQueue::state).collect(),
            waiting: self.waiting,
            due: self.due,
            device: self.device.state(),
        }
    }

    /// Takes a state back.
    ///
    /// # Errors
    /// A state of a device with other queues, or with queues that are not in this memory; the device is as after a reset then.
    pub fn set_state(&mut self, state: &TransportState, memory: &GuestMemoryMmap) -> Result<(), Nonsense> {
        self.reset();
        let same = |(queue, state): (&VirtQueue, &QueueState)| queue.registers.max_size == state.max_size;
        if state.queues.len() != self.queues.len() || !self.queues.iter().zip(&state.queues).all(same) {
            return Err(Nonsense("a state of another device"));
        }
        for (queue, state) in self.queues.iter_mut().zip(&state.queues) {
            queue.registers = QueueState { ready: false, ..*state };
            if state.ready
                && let Err(error) = queue.resume(*state, memory)
            {
                self.reset();
                return Err(error);
            }
        }
        self.device_features_select = state.device_features_select;
        self.driver_features_select = state.driver_features_select;
        self.driver_features = state.driver_features;
        self.queue_select = state.queue_select;
        self.status = state.status;
        self.interrupt_status = state.interrupt_status;
        let known = 1u32.checked_shl(self.queues.len() as u32).unwrap_or(0).wrapping_sub(1);
        (self.waiting, self.due) = (state.waiting & known, state.due);
        self.device.set_state(&state.device);
        Ok(())
    }
}

/// One half of the feature bits; there are 64.
fn half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// What came of a slice of work.
struct Served {
    /// The driver wants an interrupt for what was done.
    interrupt: bool,
    /// There is more to do.
    more: bool,
}

/// Carries out what is available, or a slice of it.
fn serve(
    device: &mut dyn Device,
    index: usize,
    queue: &mut Queue,
    now: u64,
    memory: &GuestMemoryMmap,
    written: &mut Vec<Written>,
    work: &mut u64,
) -> Result<Served, Nonsense> {
    const LOST: Nonsense = Nonsense("a queue whose rings cannot be used");
    let state = queue.state();
    // Read once: a request may well write to the ring, and a notification has to end.
    let end = queue.avail_idx(memory, Ordering::Acquire).map_err(|_| LOST)?.0;
    let count = end.wrapping_sub(state.next_avail);
    if count > state.size {
        return Err(Nonsense("more requests available than the queue has entries"));
    }
    written.push((state.used_ring, 8 * u64::from(state.size) + 6));
    let (mut done, mut spent) = (0, 0u64);
    while done < count && spent < SLICE {
        let Some(chain) = queue.pop_descriptor_chain(memory) else {
            return Err(LOST);
        };
        let head = chain.head_index();
        if head >= state.size {
            return Err(Nonsense("a descriptor beyond the queue"));
        }
        let mut request = Request::new(chain, state.size, memory, written)?.at(now);
        let answer = device.request(index, &mut request);
        spent = spent.saturating_add(request.work());
        *work = work.saturating_add(request.work());
        let len = answer?;
        done += 1;
        queue.add_used(memory, head, len).map_err(|_| LOST)?;
    }
    let more = done < count;
    // Without EVENT_IDX there is nothing to ask for: notifications are never switched off.
    if state.event_idx_enabled && !more {
        queue.enable_notification(memory).map_err(|_| LOST)?;
    }
    if count == 0 {
        return Ok(Served { interrupt: false, more });
    }
    let flags: u16 = memory.read_obj(GuestAddress(state.avail_ring)).map_err(|_| LOST)?;
    let silent = !state.event_idx_enabled && u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT != 0;
    let interrupt = !silent && queue.needs_notification(memory).map_err(|_| LOST)?;
    Ok(Served { interrupt, more })
}
