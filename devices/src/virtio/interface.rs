//! What every transport gives a driver: a device's features, status and queues (2 "Basic Facilities of a Virtio Device"). A transport adds
//! where they are in the address space, and how an interrupt is raised.

use serde::{Deserialize, Serialize};
use std::sync::atomic::Ordering;

use virtio_bindings::{
    virtio_config::{
        VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
    },
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT},
};
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use super::{Device, DeviceState, Nonsense, Readiness, Request, Taken, pci::FunctionState, request::Written};

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
/// Why a device interrupts, as the transports' status registers have it (4.1.4.5 "ISR status capability", 4.2.2 "InterruptStatus").
pub const USED: u32 = 1;
/// The same: the device's status or configuration has changed.
pub const CHANGED: u32 = 2;

/// The whole state of a transport and its device, but for what a disk's file holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// Which half of the device's features is read.
    pub device_features_select: u32,
    /// Which half of the driver's features is written.
    pub driver_features_select: u32,
    /// The driver's features, both halves.
    pub driver_features: u64,
    /// The queue whose registers are written and read.
    pub queue_select: u32,
    /// Device status.
    pub status: u32,
    /// InterruptStatus, or ISR status.
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
    /// The PCI function's own registers, if it is one.
    pub pci: Option<FunctionState>,
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

/// What a device has interrupted for since its transport asked last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Raised {
    /// Queues with used buffers, a bit for each.
    pub queues: u32,
    /// The status has changed.
    pub changed: bool,
}

/// Where a device reaches the guest's memory, and when it does.
#[derive(Debug)]
pub struct Access<'a> {
    /// Nanoseconds of virtual time into the run.
    pub now: u64,
    /// The guest's memory.
    pub memory: &'a GuestMemoryMmap,
    /// What the device writes is noted here.
    pub written: &'a mut Vec<Written>,
}

/// A device with its features, status and queues.
#[derive(Debug)]
pub struct Interface {
    device: Box<dyn Device>,
    /// Which half of the device's features is read.
    pub device_features_select: u32,
    /// Which half of the driver's features is written.
    pub driver_features_select: u32,
    driver_features: u64,
    /// The queue whose registers are written and read.
    pub queue_select: u32,
    status: u32,
    waiting: u32,
    due: u64,
    /// What was done since it was asked last.
    work: u64,
    queues: Vec<VirtQueue>,
    raised: Raised,
    /// A queue has its greatest size until the driver says otherwise.
    preset: bool,
}

/// A queue's registers as they were written, which may be nonsense, and the queue itself once they have been found good.
#[derive(Debug)]
struct VirtQueue {
    registers: QueueState,
    queue: Option<Queue>,
}

impl VirtQueue {
    fn new(max_size: u16, preset: bool) -> Self {
        let registers = QueueState {
            max_size,
            size: if preset { max_size } else { 0 },
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

impl Interface {
    /// A device at reset. `preset`: a queue has its greatest size until the driver says otherwise.
    pub fn new(device: Box<dyn Device>, preset: bool) -> Self {
        let queues = device.queues().iter().map(|max| VirtQueue::new(*max, preset)).collect();
        Interface {
            device,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            status: 0,
            waiting: 0,
            due: 0,
            work: 0,
            queues,
            raised: Raised::default(),
            preset,
        }
    }

    /// The device alone, for another transport.
    pub fn into_device(self) -> Box<dyn Device> {
        self.device
    }

    /// The device's ID.
    pub fn id(&self) -> u32 {
        self.device.id()
    }

    /// How many queues the device has.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Device status.
    pub fn status(&self) -> u32 {
        self.status
    }

    /// What it has interrupted for since the last call.
    pub fn take_raised(&mut self) -> Raised {
        std::mem::take(&mut self.raised)
    }

    fn features(&self) -> u64 {
        self.device.features() | VERSION_1 | EVENT_IDX | INDIRECT
    }

    /// The half of the device's features that is selected.
    pub fn device_features(&self) -> u32 {
        half(self.features(), self.device_features_select)
    }

    /// The half of the driver's features that is selected.
    pub fn driver_features(&self) -> u32 {
        half(self.driver_features, self.driver_features_select)
    }

    /// The driver says which features it takes, the half that is selected.
    pub fn set_driver_features(&mut self, value: u32) {
        if self.status & FEATURES_OK != 0 {
            return;
        }
        let features = &mut self.driver_features;
        match self.driver_features_select {
            0 => set_low(features, value),
            1 => set_high(features, value),
            _ => {}
        }
    }

    /// Reads 1 to 8 bytes of the device's configuration; 0 behind its end.
    pub fn read_config(&self, at: u64, size: u8) -> u64 {
        let config = self.device.config();
        let byte = |i: u64| at.checked_add(i).and_then(|at| config.get(usize::try_from(at).ok()?));
        (0..u64::from(size.min(8))).fold(0, |value, i| value | u64::from(*byte(i).unwrap_or(&0)) << (8 * i))
    }

    /// The driver sets the status. `true`: that was a reset.
    pub fn set_status(&mut self, value: u32) -> bool {
        if value == 0 {
            self.reset();
            return true;
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
        false
    }

    fn reset(&mut self) {
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        self.status = 0;
        self.raised = Raised::default();
        (self.waiting, self.due) = (0, 0);
        for queue in &mut self.queues {
            *queue = VirtQueue::new(queue.registers.max_size, self.preset);
        }
        self.device.reset();
    }

    /// The selected queue as it is; `None`: there is no such queue.
    pub fn queue(&self) -> Option<QueueState> {
        self.queues.get(self.queue_select as usize).map(VirtQueue::state)
    }

    /// Whether the selected queue has been started.
    pub fn queue_is_ready(&self) -> bool {
        let queue = self.queues.get(self.queue_select as usize);
        queue.is_some_and(|queue| queue.queue.is_some())
    }

    /// The registers of the selected queue, for the driver to write; they do not change while the queue is ready.
    pub fn queue_registers(&mut self) -> Option<&mut QueueState> {
        let queue = self.queues.get_mut(self.queue_select as usize)?;
        queue.queue.is_none().then_some(&mut queue.registers)
    }

    /// Starts or stops the selected queue.
    ///
    /// # Errors
    /// The queue is impossible: the device needs a reset.
    pub fn set_ready(&mut self, ready: bool, memory: &GuestMemoryMmap) -> Result<(), Nonsense> {
        let event_idx = self.driver_features & EVENT_IDX != 0;
        let Some(queue) = self.queues.get_mut(self.queue_select as usize) else {
            return Ok(());
        };
        match ready {
            false => {
                queue.queue = None;
                Ok(())
            }
            true if queue.queue.is_some() => Ok(()),
            true => {
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
                self.raised.changed = true;
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
    pub fn advance(&mut self, access: &mut Access<'_>) -> Result<(), Nonsense> {
        if self.due().is_none_or(|due| access.now < due) {
            return Ok(());
        }
        let index = self.waiting.trailing_zeros();
        self.waiting &= !(1 << index);
        self.notify(index, access)
    }

    /// Whether the driver has set the device up.
    fn is_live(&self) -> bool {
        const LIVE: u32 = DRIVER_OK | FEATURES_OK;
        self.status & (LIVE | NEEDS_RESET) == LIVE
    }

    /// Something has come from outside for a port of the device: see [`Device::input`].
    ///
    /// # Errors
    /// What the driver did wrong, for a log.
    pub fn input(&mut self, port: u32, bytes: &[u8], access: &mut Access<'_>) -> Result<Taken, Nonsense> {
        let taken = self.device.input(port, bytes, self.is_live());
        self.serve_waiting(access)?;
        Ok(taken)
    }

    /// The driver has made buffers available in a queue: they are used at once, or the first slice is.
    ///
    /// # Errors
    /// What the driver did wrong, for a log.
    pub fn notify(&mut self, index: u32, access: &mut Access<'_>) -> Result<(), Nonsense> {
        self.serve_queue(index, access)?;
        self.serve_waiting(access)
    }

    /// Hands over what waits for the driver's buffers.
    fn serve_waiting(&mut self, access: &mut Access<'_>) -> Result<(), Nonsense> {
        for index in 0..self.queues.len() {
            if self.device.readiness(index) == Readiness::Waiting {
                self.serve_queue(index as u32, access)?;
            }
        }
        Ok(())
    }

    fn serve_queue(&mut self, index: u32, access: &mut Access<'_>) -> Result<(), Nonsense> {
        if !self.is_live() {
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
        let result = serve(
            self.device.as_mut(),
            index,
            queue,
            access.now,
            access.memory,
            access.written,
            &mut self.work,
        );
        if let Ok(Served { interrupt, more }) = result {
            self.raised.queues |= if interrupt { bit } else { 0 };
            self.waiting |= if more { bit } else { 0 };
        }
        if self.waiting != 0 {
            self.due = access.now.saturating_add(PAUSE_NS);
        }
        self.answer(result.map(drop))
    }

    /// The whole state, without what the transport has of its own.
    pub fn state(&self) -> TransportState {
        TransportState {
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            driver_features: self.driver_features,
            queue_select: self.queue_select,
            status: self.status,
            interrupt_status: 0,
            queues: self.queues.iter().map(VirtQueue::state).collect(),
            waiting: self.waiting,
            due: self.due,
            device: self.device.state(),
            pci: None,
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
        let known = 1u32.checked_shl(self.queues.len() as u32).unwrap_or(0).wrapping_sub(1);
        (self.waiting, self.due) = (state.waiting & known, state.due);
        self.device.set_state(&state.device);
        Ok(())
    }
}

/// Replaces the low half.
pub fn set_low(whole: &mut u64, value: u32) {
    *whole = *whole & !0xffff_ffff | u64::from(value);
}

/// Replaces the high half.
pub fn set_high(whole: &mut u64, value: u32) {
    *whole = *whole & 0xffff_ffff | u64::from(value) << 32;
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
    while done < count && spent < SLICE && device.readiness(index) != Readiness::Nothing {
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
    // Buffers that the device has nothing for stay where they are.
    let more = done < count && device.readiness(index) != Readiness::Nothing;
    // Without EVENT_IDX there is nothing to ask for: notifications are never switched off.
    if state.event_idx_enabled && !more {
        queue.enable_notification(memory).map_err(|_| LOST)?;
    }
    if done == 0 {
        return Ok(Served { interrupt: false, more });
    }
    let flags: u16 = memory.read_obj(GuestAddress(state.avail_ring)).map_err(|_| LOST)?;
    let silent = !state.event_idx_enabled && u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT != 0;
    let interrupt = !silent && queue.needs_notification(memory).map_err(|_| LOST)?;
    Ok(Served { interrupt, more })
}
