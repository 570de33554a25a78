//! A request: the buffers of one descriptor chain (2.7.5 "The Virtqueue Descriptor Table"), seen as two runs of bytes.

use std::ops::Deref;

use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use super::Nonsense;

/// Guest memory that a device has written: first address and length in bytes.
pub type Written = (u64, u64);

#[derive(Clone, Copy, Debug)]
struct Span {
    address: GuestAddress,
    len: u32,
}

/// A request under way. Offsets count through all buffers of a direction, however they are cut into pieces.
#[derive(Debug)]
pub struct Request<'a> {
    memory: &'a GuestMemoryMmap,
    written: &'a mut Vec<Written>,
    readable: Vec<Span>,
    writable: Vec<Span>,
    readable_len: u64,
    writable_len: u64,
    work: u64,
    now: u64,
}

impl<'a> Request<'a> {
    /// Walks a chain of at most `limit` descriptors to its end.
    ///
    /// # Errors
    /// A chain that is longer, never ends, leaves its table or RAM, or has a buffer to read after one to write.
    pub fn new<M>(
        chain: DescriptorChain<M>,
        limit: u16,
        memory: &'a GuestMemoryMmap,
        written: &'a mut Vec<Written>,
    ) -> Result<Self, Nonsense>
    where
        M: Deref,
        M::Target: GuestMemory,
    {
        let mut request = Request {
            memory,
            written,
            readable: Vec::new(),
            writable: Vec::new(),
            readable_len: 0,
            writable_len: 0,
            // Walking a chain is work, too.
            work: 64,
            now: 0,
        };
        // The iterator just stops at a link that leads nowhere, so that a chain is whole only where its last descriptor says so.
        let mut whole = false;
        for (index, descriptor) in chain.enumerate() {
            if index >= usize::from(limit) {
                return Err(Nonsense("a descriptor chain longer than the queue"));
            }
            let span = Span {
                address: descriptor.addr(),
                len: descriptor.len(),
            };
            let access = if descriptor.is_write_only() {
                Permissions::Write
            } else {
                Permissions::Read
            };
            if span.len > 0 && !memory.check_range(span.address, span.len as usize, access) {
                return Err(Nonsense("a buffer that is not all RAM"));
            }
            if descriptor.is_write_only() {
                request.writable_len += u64::from(span.len);
                request.writable.push(span);
            } else if request.writable.is_empty() {
                request.readable_len += u64::from(span.len);
                request.readable.push(span);
            } else {
                return Err(Nonsense("a buffer to read after one to write"));
            }
            whole = !descriptor.has_next();
        }
        if !whole {
            return Err(Nonsense("a descriptor chain without an end"));
        }
        Ok(request)
    }

    /// The same at a time, in nanoseconds of virtual time.
    pub fn at(self, now: u64) -> Self {
        Request { now, ..self }
    }

    /// When it is carried out, in nanoseconds of virtual time.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Bytes from the driver.
    pub fn readable(&self) -> u64 {
        self.readable_len
    }

    /// Bytes for the driver.
    pub fn writable(&self) -> u64 {
        self.writable_len
    }

    /// The longest of the buffers.
    pub fn longest(&self) -> u32 {
        let all = self.readable.iter().chain(&self.writable);
        all.map(|span| span.len).max().unwrap_or(0)
    }

    /// Counts work that is not moving the request's bytes.
    pub fn add_work(&mut self, bytes: u64) {
        self.work = self.work.saturating_add(bytes);
    }

    /// What it has cost so far, in bytes moved.
    pub fn work(&self) -> u64 {
        self.work
    }

    /// Reads what the driver gave, from `offset` on.
    ///
    /// # Errors
    /// There are not so many bytes.
    pub fn read(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Nonsense> {
        self.add_work(bytes.len() as u64);
        const SHORT: Nonsense = Nonsense("a request that is too short");
        let mut done = 0;
        for (address, len) in pieces(&self.readable, offset, bytes.len()) {
            let part = &mut bytes[done..done + len];
            self.memory.read_slice(part, address).map_err(|_| SHORT)?;
            done += len;
        }
        if done < bytes.len() { Err(SHORT) } else { Ok(()) }
    }

    /// Writes for the driver, from `offset` on.
    ///
    /// # Errors
    /// There is not so much room.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Nonsense> {
        const SHORT: Nonsense = Nonsense("a request with too little room");
        self.add_work(bytes.len() as u64);
        let mut done = 0;
        for (address, len) in pieces(&self.writable, offset, bytes.len()) {
            self.written.push((address.0, len as u64));
            let part = &bytes[done..done + len];
            self.memory.write_slice(part, address).map_err(|_| SHORT)?;
            done += len;
        }
        if done < bytes.len() { Err(SHORT) } else { Ok(()) }
    }
}

/// The parts of memory that `len` bytes from `offset` on lie in; fewer bytes where the spans end before.
fn pieces(spans: &[Span], offset: u64, len: usize) -> impl Iterator<Item = (GuestAddress, usize)> + use<'_> {
    let mut skip = offset;
    let mut left = len as u64;
    spans.iter().filter_map(move |span| {
        let size = u64::from(span.len);
        let from = skip.min(size);
        skip -= from;
        let part = left.min(size - from);
        left -= part;
        // The whole span is RAM, so the sum does not wrap.
        (part > 0).then(|| (GuestAddress(span.address.0.wrapping_add(from)), part as usize))
    })
}
