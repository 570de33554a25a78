//! What the processors of a machine share: the map of guest RAM and the cache of decoded code.
// Guest memory is one of the rooms where `unsafe` is allowed: RAM belongs to the guest, is reached by raw pointer, and is
// never borrowed.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use crate::op::{Op, Run};
use crate::tlb::Stores;
use crate::transaction::Shared;

/// A range of guest-physical memory that is plain RAM.
#[derive(Clone, Copy, Debug)]
pub struct RamRegion {
    /// Guest-physical address, 4-KiB aligned.
    pub gpa: u64,
    /// Where the host has it.
    pub host: *mut u8,
    /// Length in bytes, a multiple of 4096.
    pub len: u64,
}

/// A page's state as far as the engine cares.
const CODE: u8 = 1;
/// Some TLB may hold a write tag for the page.
const WRITABLE: u8 = 2;
/// The page has a line that MONITOR was given once: stores to it take the slow path, which counts them. It stays so: who
/// monitors a line does so again and again.
const WATCHED: u8 = 4;
/// May have been written since [`Core::take_dirty`] was last asked.
const DIRTY: u8 = 8;
/// Monitored lines remembered.
const LINES: usize = 64;

struct Region {
    ram: RamRegion,
    pages: Vec<u8>,
}

/// Decoded code of one guest page.
#[derive(Default)]
struct CodePage {
    /// One bit for each 64 bytes that blocks were decoded from.
    chunks: u64,
    blocks: Vec<(Key, *mut Op)>,
}

/// Multiplicative hashing: keys are page addresses and mode bits, and nobody attacks them.
#[derive(Default, Clone, Copy)]
pub(crate) struct PlainHasher(u64);

impl Hasher for PlainHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64(*b as u64);
        }
    }
    fn write_u32(&mut self, v: u32) {
        self.write_u64(v as u64);
    }
    fn write_u64(&mut self, v: u64) {
        self.0 = (self.0 ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

/// A block's key: where it begins, and the mode it was decoded for.
type Key = (u64, u32);

type Map<K, V> = HashMap<K, V, BuildHasherDefault<PlainHasher>>;

/// Pages that became code are remembered up to this many, for processors that have not run since.
const MAX_NEW_CODE: usize = 1024;

/// Ops kept before the cache is emptied: 64 MiB of them.
const MAX_OPS: usize = 2 << 20;
/// Code segments that are told apart at a time.
const RECENT_CODES: usize = 64;
/// Numbers given to code segments before the cache is emptied: they must fit in the blocks' keys, with room for those that
/// are given before the run loop gets to look.
const MAX_CODES: u32 = 0x8000;
/// Sets of boundaries that are told apart, for the same reason.
const MAX_BOUNDARY_SETS: usize = 255;

/// The 64-byte chunks of its page that a span touches.
fn chunks(gpa: u64, len: u64) -> std::ops::RangeInclusive<u64> {
    let from = gpa & 0xfff;
    from >> 6..=(from + len.max(1) - 1).min(0xfff) >> 6
}

pub(crate) struct Core {
    regions: Vec<Region>,
    blocks: Map<Key, *mut Op>,
    pages: Map<u64, CodePage>,
    /// Where ops live; each chunk keeps its address.
    arena: Vec<Vec<Op>>,
    ops: usize,
    /// Grows by one whenever the whole cache is emptied.
    pub generation: u64,
    /// Host pages that became code, in order: each processor holds their write tags back before it runs on.
    new_code: VecDeque<u64>,
    /// How many there were before the first that is kept.
    old_code: u64,
    /// Base, limit and number of the code segments met last; the flat one stays first.
    codes: Vec<(u64, u32, u32)>,
    next_code: u32,
    /// Sets of boundaries that blocks were decoded for.
    boundaries: Vec<Box<[u64]>>,
    /// Monitored lines and how often they have been stored to.
    lines: VecDeque<(u64, u64)>,
    /// Grows with each store to a line and each new line.
    stores: u64,
    /// How often the dirty pages have been asked for: each processor holds its write tags back before it runs on.
    pub dirty_asked: u64,
    /// Somebody has run the guest who keeps no account of pages.
    pub all_dirty: bool,
    /// The transaction that is open: of the processor that ran last.
    pub transaction: Option<Shared>,
}

impl Core {
    pub fn new(ram: &[RamRegion]) -> Core {
        let regions = ram
            .iter()
            .map(|&ram| Region {
                ram,
                pages: vec![0; (ram.len >> 12) as usize],
            })
            .collect();
        Core {
            regions,
            blocks: Map::default(),
            pages: Map::default(),
            arena: Vec::new(),
            ops: 0,
            generation: 0,
            new_code: VecDeque::new(),
            old_code: 0,
            codes: vec![(0, u32::MAX, 0)],
            next_code: 1,
            boundaries: Vec::new(),
            lines: VecDeque::new(),
            stores: 0,
            dirty_asked: 0,
            all_dirty: false,
            transaction: None,
        }
    }

    /// The host's address of a guest-physical page, if it is RAM.
    #[inline]
    pub fn host(&self, gpa: u64) -> Option<*mut u8> {
        let page = gpa & !0xfff;
        self.regions
            .iter()
            .find(|r| page.wrapping_sub(r.ram.gpa) < r.ram.len)
            // SAFETY: The offset lies within the region, whose owner promised `len` bytes at `host` in `Engine::new`.
            .map(|r| unsafe { r.ram.host.add((page - r.ram.gpa) as usize) })
    }

    /// The guest-physical address of a host page that `host` has answered.
    #[inline]
    pub fn gpa(&self, host: u64) -> Option<u64> {
        let offset = |r: &Region| host.wrapping_sub(r.ram.host as u64);
        self.regions
            .iter()
            .find(|r| offset(r) < r.ram.len)
            .map(|r| r.ram.gpa + offset(r))
    }

    fn flags(&mut self, gpa: u64) -> Option<&mut u8> {
        let page = gpa & !0xfff;
        let r = self
            .regions
            .iter_mut()
            .find(|r| page.wrapping_sub(r.ram.gpa) < r.ram.len)?;
        r.pages.get_mut(((page - r.ram.gpa) >> 12) as usize)
    }

    /// Whether stores to the page may go straight to memory; notes that a TLB will hold its write tag if so.
    pub fn claim_write(&mut self, gpa: u64) -> bool {
        match self.flags(gpa) {
            Some(f) if *f & (CODE | WATCHED) == 0 => {
                *f |= WRITABLE | DIRTY;
                true
            }
            _ => false,
        }
    }

    /// What a TLB entry may be stored through that the page tables let be stored through.
    pub fn stores(&mut self, gpa: u64, allowed: bool) -> Stores {
        match allowed {
            false => Stores::No,
            true if self.claim_write(gpa) => Stores::Yes,
            true => Stores::HeldBack,
        }
    }

    /// The pages that may have been written since this was last asked, at first all that were ever written by a processor,
    /// ascending. The processors' write tags have to be held back before they run on.
    pub fn take_dirty(&mut self) -> Vec<u64> {
        self.dirty_asked += 1;
        let mut dirty = Vec::new();
        for Region { ram, pages } in &mut self.regions {
            for (flags, gpa) in pages.iter_mut().zip((ram.gpa..).step_by(0x1000)) {
                if *flags & DIRTY != 0 || self.all_dirty {
                    *flags &= !DIRTY;
                    dirty.push(gpa);
                }
            }
        }
        self.all_dirty = false;
        dirty
    }

    /// Reads guest-physical memory that need not be RAM: other bytes read as all ones.
    pub fn read_phys(&self, gpa: u64, size: usize) -> u64 {
        match self.host(gpa) {
            Some(host) if (gpa & 0xfff) as usize + size <= 0x1000 => {
                let mut bytes = [0u8; 8];
                // SAFETY: Within the page that `host` found.
                unsafe {
                    core::ptr::copy_nonoverlapping(host.add((gpa & 0xfff) as usize), bytes.as_mut_ptr(), size.min(8))
                };
                u64::from_le_bytes(bytes)
            }
            _ => u64::MAX,
        }
    }

    /// Reads RAM. Errors: the first address that is none.
    pub fn read_ram(&self, gpa: u64, bytes: &mut [u8]) -> Result<(), u64> {
        let mut at = 0;
        while at < bytes.len() {
            let (host, n) = self.piece(gpa, at, bytes.len())?;
            // SAFETY: `piece` stays within a page of guest RAM.
            unsafe { core::ptr::copy_nonoverlapping(host, bytes[at..].as_mut_ptr(), n) };
            at += n;
        }
        Ok(())
    }

    /// Writes RAM on behalf of a unit, all of it or nothing; code decoded from it is dropped. Errors: the first address that
    /// is no RAM.
    pub fn write_ram(&mut self, gpa: u64, bytes: &[u8], stale: Run) -> Result<(), u64> {
        for write in [false, true] {
            let mut at = 0;
            while at < bytes.len() {
                let (host, n) = self.piece(gpa, at, bytes.len())?;
                if write {
                    // SAFETY: As in `read_ram`.
                    unsafe { core::ptr::copy_nonoverlapping(bytes[at..].as_ptr(), host, n) };
                }
                at += n;
            }
        }
        self.keep_written(gpa, bytes);
        self.written(gpa, bytes.len() as u64, stale);
        Ok(())
    }

    /// The host address of byte `at` of `len` at a guest-physical address, and how many follow it in its page.
    fn piece(&self, gpa: u64, at: usize, len: usize) -> Result<(*mut u8, usize), u64> {
        let here = gpa.checked_add(at as u64).ok_or(gpa)?;
        let offset = (here & 0xfff) as usize;
        let host = self.host(here).ok_or(here)?;
        // SAFETY: The offset is within the page.
        Ok((unsafe { host.add(offset) }, (0x1000 - offset).min(len - at)))
    }

    /// Sets bits in a paging-structure entry, atomically, as the processor does for A and D.
    pub fn or_phys(&mut self, gpa: u64, size: usize, bits: u64) {
        use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
        let Some(host) = self.host(gpa) else { return };
        self.soil(gpa, 1);
        // SAFETY: Entries are naturally aligned, so they lie within the page; host pages are 4-KiB aligned.
        unsafe {
            let p = host.add((gpa & 0xfff) as usize);
            if size == 8 {
                AtomicU64::from_ptr(p.cast()).fetch_or(bits, SeqCst);
            } else {
                AtomicU32::from_ptr(p.cast()).fetch_or(bits as u32, SeqCst);
            }
        }
    }

    /// A small number that stands for a code segment's base and limit; 0 is the flat one.
    pub fn code_number(&mut self, base: u64, limit: u32) -> u32 {
        if let Some(&(_, _, i)) = self.codes.iter().find(|c| (c.0, c.1) == (base, limit)) {
            return i;
        }
        let i = self.next_code;
        self.next_code += 1;
        if self.codes.len() == RECENT_CODES {
            // The oldest but the flat one: should it come back it gets a new number, and its blocks are decoded again.
            self.codes.remove(1);
        }
        self.codes.push((base, limit, i));
        i
    }

    /// A small number, never 0, that stands for a set of boundaries. Only between chains: the cache is emptied when the
    /// numbers are used up.
    pub fn boundary_number(&mut self, set: &[u64]) -> u32 {
        if let Some(i) = self.boundaries.iter().position(|known| known[..] == *set) {
            return i as u32 + 1;
        }
        if self.boundaries.len() == MAX_BOUNDARY_SETS {
            self.flush();
        }
        self.boundaries.push(set.into());
        self.boundaries.len() as u32
    }

    /// The block that begins at a guest-physical address.
    #[inline]
    pub fn block(&self, gpa: u64, mode: u32) -> Option<*mut Op> {
        self.blocks.get(&(gpa, mode)).copied()
    }

    /// Keeps a block. `bytes` is the length of its code within the first page; `second` the guest-physical address of the page
    /// that its last instruction runs into, and how far.
    pub fn insert(&mut self, gpa: u64, mode: u32, ops: &[Op], bytes: u64, second: Option<(u64, u64)>) -> *mut Op {
        if self.arena.last().is_none_or(|a| a.capacity() - a.len() < ops.len()) {
            self.arena.push(Vec::with_capacity(ops.len().max(16384)));
        }
        let chunk = self.arena.last_mut().expect("just pushed");
        let at = chunk.len();
        chunk.extend_from_slice(ops);
        // SAFETY: `at` is within the chunk, whose capacity was enough, so it never moves.
        let first = unsafe { chunk.as_mut_ptr().add(at) };
        self.ops += ops.len();
        let key = (gpa, mode);
        self.blocks.insert(key, first);
        self.mark(gpa, bytes, key, first);
        if let Some((gpa, bytes)) = second {
            self.mark(gpa & !0xfff, bytes, key, first);
        }
        first
    }

    fn mark(&mut self, gpa: u64, bytes: u64, key: Key, first: *mut Op) {
        self.mark_bytes(gpa, bytes);
        self.pages.entry(gpa & !0xfff).or_default().blocks.push((key, first));
    }

    /// Has stores to these bytes take the slow path, which asks for a block of their own: they are about to be executed.
    pub fn mark_bytes(&mut self, gpa: u64, bytes: u64) {
        let page = self.pages.entry(gpa & !0xfff).or_default();
        for chunk in chunks(gpa, bytes) {
            page.chunks |= 1 << chunk;
        }
        let Some(flags) = self.flags(gpa) else { return };
        let was = *flags;
        *flags = *flags & (WATCHED | DIRTY) | CODE;
        if was & CODE == 0 && was & WRITABLE != 0 {
            let host = self.host(gpa).map_or(0, |h| h as u64);
            self.retire_writes(host);
        }
    }

    /// Counts stores to a line from now on: how many there have been, in a count that never says the same for two of them.
    pub fn watch_line(&mut self, line: u64) -> u64 {
        if let Some(&(_, stores)) = self.lines.iter().find(|(l, _)| *l == line) {
            return stores;
        }
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        self.stores += 1;
        let stores = self.stores;
        self.lines.push_back((line, stores));
        if let Some(flags) = self.flags(line) {
            let was = *flags;
            *flags = was & !WRITABLE | WATCHED;
            if was & WRITABLE != 0 {
                let host = self.host(line).map_or(0, |h| h as u64);
                self.retire_writes(host);
            }
        }
        stores
    }

    /// Notes that pages are written.
    fn soil(&mut self, gpa: u64, len: u64) {
        let last = gpa.saturating_add(len.max(1) - 1) & !0xfff;
        for page in (gpa & !0xfff..=last).step_by(0x1000) {
            if let Some(flags) = self.flags(page) {
                *flags |= DIRTY;
            }
        }
    }

    /// Whether a store touches a line that a processor monitors, or has monitored.
    pub fn is_line(&self, gpa: u64, len: u64) -> bool {
        let touches = |line: u64| gpa < line + 64 && line < gpa.saturating_add(len);
        self.lines.iter().any(|&(line, _)| touches(line))
    }

    /// Somebody stores to guest memory by the slow path.
    pub fn stored(&mut self, gpa: u64, len: u64) {
        self.soil(gpa, len);
        for (line, stores) in &mut self.lines {
            if gpa < *line + 64 && *line < gpa.saturating_add(len) {
                self.stores += 1;
                *stores = self.stores;
            }
        }
    }

    /// Has every processor hold the write tags of a host page back.
    fn retire_writes(&mut self, host: u64) {
        self.new_code.push_back(host);
        if self.new_code.len() > MAX_NEW_CODE {
            self.new_code.pop_front();
            self.old_code += 1;
        }
    }

    /// The host pages that became code since a processor looked last, at position `seen`, which moves on; `None` when there
    /// were more than are kept.
    pub fn new_code(&self, seen: &mut u64) -> Option<impl Iterator<Item = u64>> {
        let from = seen.checked_sub(self.old_code);
        *seen = self.old_code + self.new_code.len() as u64;
        from.map(|from| self.new_code.iter().skip(from as usize).copied())
    }

    /// Whether a store touches bytes that blocks were decoded from.
    pub fn is_code(&self, gpa: u64, len: u64) -> bool {
        let Some(page) = self.pages.get(&(gpa & !0xfff)) else {
            return false;
        };
        chunks(gpa, len).any(|chunk| page.chunks >> chunk & 1 != 0)
    }

    /// Drops the blocks of a page: whoever still leads to one of them finds its first op replaced.
    pub fn invalidate_page(&mut self, gpa: u64, stale: Run) {
        if let Some(page) = self.pages.remove(&(gpa & !0xfff)) {
            for (key, first) in page.blocks {
                if self.blocks.get(&key) == Some(&first) {
                    self.blocks.remove(&key);
                }
                // SAFETY: Blocks stay allocated until `flush`, which empties the pages' lists too.
                unsafe { (*first).f = stale };
            }
        }
        if let Some(f) = self.flags(gpa) {
            *f &= !CODE;
        }
    }

    /// Drops one block: it will be decoded anew.
    pub fn forget(&mut self, gpa: u64, mode: u32) {
        self.blocks.remove(&(gpa, mode));
    }

    /// Somebody outside wrote guest memory.
    pub fn written(&mut self, gpa: u64, len: u64, stale: Run) {
        self.stored(gpa, len);
        let mut page = gpa & !0xfff;
        let end = gpa.saturating_add(len);
        while page < end {
            let from = page.max(gpa);
            if self.is_code(from, (page + 0x1000).min(end) - from) {
                self.invalidate_page(page, stale);
            }
            page += 0x1000;
        }
    }

    /// The cache is as large as it may get.
    pub fn full(&self) -> bool {
        self.ops > MAX_OPS || self.next_code > MAX_CODES
    }

    /// Frees all blocks. Only between chains.
    pub fn flush(&mut self) {
        let pages: Vec<u64> = self.pages.keys().copied().collect();
        for gpa in pages {
            if let Some(f) = self.flags(gpa) {
                *f &= !CODE;
            }
        }
        self.pages.clear();
        self.blocks.clear();
        self.arena.clear();
        self.ops = 0;
        self.codes.truncate(1);
        self.next_code = 1;
        self.boundaries.clear();
        self.generation += 1;
    }

    /// Makes one entry of a block's link slot, unless the cache was emptied since the link was asked for.
    pub fn set_link(&mut self, link: *mut *const Op, to: *const Op, host: u64) {
        // SAFETY: `link` points at `taken` or `next` of a `Link` in the arena; the host page is two words further.
        unsafe {
            *link = to;
            link.add(2).cast::<u64>().write(host);
        }
    }
}
