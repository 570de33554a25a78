//! What comes from outside for devices: frames of a network, bytes for a console's port.
//!
//! A thread reads each source and leaves what it has read in a queue of the link; the run takes it from there at a counted step. A queue
//! that is full has its thread wait, and so whoever sends.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::vm::Inlet;

/// Bytes that wait in a queue before its thread has to.
const WAITING: usize = 4 << 20;

/// A link's queue, shared with the thread that fills it.
#[derive(Debug, Default)]
struct Queue {
    items: Mutex<VecDeque<Vec<u8>>>,
    room: Condvar,
    /// Bytes in the queue.
    bytes: AtomicUsize,
    /// Nothing comes any more.
    closed: AtomicBool,
    /// Nobody takes anything any more.
    gone: AtomicBool,
}

impl Queue {
    fn items(&self) -> MutexGuard<'_, VecDeque<Vec<u8>>> {
        self.items.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The end of a link that a thread fills.
#[derive(Debug)]
pub struct Sender {
    queue: Arc<Queue>,
    waiting: Arc<AtomicUsize>,
    wake: EventFd,
}

impl Sender {
    /// Leaves something for the device, and waits for room before that. `false`: nobody will take it.
    pub fn send(&self, item: Vec<u8>) -> bool {
        let mut items = self.queue.items();
        while self.queue.bytes.load(Ordering::Relaxed) >= WAITING && !self.queue.gone.load(Ordering::Relaxed) {
            items = self
                .queue
                .room
                .wait(items)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        if self.queue.gone.load(Ordering::Relaxed) {
            return false;
        }
        self.queue.bytes.fetch_add(item.len(), Ordering::Relaxed);
        items.push_back(item);
        drop(items);
        self.waiting.fetch_add(1, Ordering::Release);
        // A counter that is full wakes, too.
        let _ = self.wake.write(1);
        true
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.queue.closed.store(true, Ordering::Release);
        let _ = self.wake.write(1);
    }
}

/// A link as the run sees it.
#[derive(Debug)]
struct Link {
    inlet: Inlet,
    queue: Arc<Queue>,
    /// What was taken out of the queue, and not by the device yet.
    held: Option<Vec<u8>>,
    /// The step at which the device took nothing.
    refused_at: Option<u64>,
    /// There is somebody at the other end who answers in wall time.
    network: bool,
}

/// All links of a machine.
#[derive(Debug)]
pub struct Links {
    links: Vec<Link>,
    /// How many items wait, in all queues.
    waiting: Arc<AtomicUsize>,
    wake: EventFd,
}

impl Links {
    /// No links.
    ///
    /// # Errors
    /// The system has no eventfd to give.
    pub fn new() -> io::Result<Self> {
        Ok(Links {
            links: Vec::new(),
            waiting: Arc::default(),
            wake: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// A new link to a device's port. `network`: with somebody at the other end who answers in wall time.
    ///
    /// # Errors
    /// The system has no descriptor to give.
    pub fn add(&mut self, inlet: Inlet, network: bool) -> io::Result<Sender> {
        let queue = Arc::<Queue>::default();
        self.links.push(Link {
            inlet,
            queue: Arc::clone(&queue),
            held: None,
            refused_at: None,
            network,
        });
        Ok(Sender {
            queue,
            waiting: Arc::clone(&self.waiting),
            wake: self.wake.try_clone()?,
        })
    }

    /// Becomes readable when something has come.
    ///
    /// # Errors
    /// The system has no descriptor to give.
    pub fn wake(&self) -> io::Result<EventFd> {
        self.wake.try_clone()
    }

    /// Whether there are any.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// Whether something may come.
    pub fn are_open(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
            || self.links.iter().any(|link| !link.queue.closed.load(Ordering::Acquire))
    }

    /// Whether somebody answers in wall time.
    pub fn network(&self) -> bool {
        let open = |link: &Link| link.network && !link.queue.closed.load(Ordering::Acquire);
        self.links.iter().any(open)
    }

    /// Whether something waits that no device has refused at this step.
    pub fn arrived(&self, step: u64) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
            && self.links.iter().any(|link| {
                let some = link.held.is_some() || link.queue.bytes.load(Ordering::Relaxed) > 0;
                some && link.refused_at != Some(step)
            })
    }

    /// Offers what waits at this step, link by link. `offer` says how many bytes a device has taken, or nothing where it wants none of it
    /// ever; what it has taken 0 bytes of is offered again at another step.
    ///
    /// # Errors
    /// What `offer` fails with.
    pub fn offer<E>(
        &mut self,
        step: u64,
        mut offer: impl FnMut(Inlet, &[u8]) -> Result<Option<usize>, E>,
    ) -> Result<(), E> {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        for link in &mut self.links {
            if link.refused_at == Some(step) {
                continue;
            }
            link.refused_at = None;
            loop {
                if link.held.is_none() {
                    link.held = link.queue.items().pop_front();
                }
                let Some(held) = &mut link.held else { break };
                let len = held.len();
                match offer(link.inlet, held)? {
                    Some(0) if len > 0 => {
                        link.refused_at = Some(step);
                        break;
                    }
                    Some(taken) if taken < len => {
                        held.drain(..taken);
                        link.queue.bytes.fetch_sub(taken, Ordering::Relaxed);
                    }
                    _ => {
                        link.held = None;
                        link.queue.bytes.fetch_sub(len, Ordering::Relaxed);
                        self.waiting.fetch_sub(1, Ordering::Release);
                        link.queue.room.notify_one();
                    }
                }
            }
        }
        Ok(())
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        for link in &self.links {
            link.queue.gone.store(true, Ordering::Relaxed);
            // Under the lock, so that nobody is between looking and waiting.
            let _items = link.queue.items();
            link.queue.room.notify_all();
        }
    }
}

#[cfg(test)]
#[path = "links_test.rs"]
mod tests;
