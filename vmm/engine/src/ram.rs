//! The map of guest RAM, and what the engine keeps of each page: whether it holds decoded code, a monitored line, or bytes that have
//! been written.
//!
//! All processors of a machine share it. A processor keeps write tags in a TLB of its own; a page whose stores must be heard of
//! from now on is put in a log ([`Ram::retired_writes`]), which each processor reads before it runs on.
// Guest memory is one of the rooms where `unsafe` is allowed: RAM belongs to the guest, is reached by raw pointer, and is
// never borrowed.
#![allow(unsafe_code)]

use std::collections::VecDeque;

use x86::smm::PhysicalRange;

use crate::tlb::Grant;

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

/// Blocks were decoded from the page.
const CODE: u8 = 1;
/// Some TLB may hold a write tag for the page.
const WRITABLE: u8 = 2;
/// The page has a line that MONITOR was given once: stores to it take the slow path, which counts them. It stays so: who
/// monitors a line does so again and again.
const WATCHED: u8 = 4;
/// May have been written since [`Ram::take_dirty`] was last asked.
const DIRTY: u8 = 8;

/// Pages whose write tags are to be held back are remembered up to this many, for processors that have not run since.
const MAX_RETIRED: usize = 1024;

struct Region {
    ram: RamRegion,
    /// Flags of each page.
    pages: Vec<u8>,
}

pub(crate) struct Ram {
    regions: Vec<Region>,
    /// What the processor whose turn it is may not reach: to it, that is no RAM.
    hidden: PhysicalRange,
    /// Host pages whose write tags no TLB may hold any more, in order: each processor holds them back before it runs on.
    retired: VecDeque<u64>,
    /// How many there were before the first that is kept.
    forgotten: u64,
    /// How often the dirty pages have been asked for: each processor holds its write tags back before it runs on.
    pub dirty_asked: u64,
    /// Somebody has run the guest who keeps no account of pages.
    pub all_dirty: bool,
}

impl Ram {
    pub fn new(ram: &[RamRegion]) -> Ram {
        let regions = ram
            .iter()
            .map(|&ram| Region {
                ram,
                pages: vec![0; (ram.len >> 12) as usize],
            })
            .collect();
        Ram {
            regions,
            hidden: PhysicalRange::NONE,
            retired: VecDeque::new(),
            forgotten: 0,
            dirty_asked: 0,
            all_dirty: false,
        }
    }

    /// Hides a range from the processor whose turn it is; what was hidden before.
    pub fn hide(&mut self, range: PhysicalRange) -> PhysicalRange {
        core::mem::replace(&mut self.hidden, range)
    }

    /// The address is in the hidden range: what is read there has a fixed value, and what is written is lost.
    pub fn hides(&self, gpa: u64) -> bool {
        self.hidden.contains(gpa)
    }

    /// The host's address of a guest-physical page, if it is RAM that the processor whose turn it is may reach.
    #[inline]
    pub fn host(&self, gpa: u64) -> Option<*mut u8> {
        if self.hides(gpa) { None } else { self.place(gpa) }
    }

    /// The host's address of a guest-physical page, if it is RAM.
    #[inline]
    pub fn place(&self, gpa: u64) -> Option<*mut u8> {
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
    pub fn stores(&mut self, gpa: u64, allowed: bool) -> Grant {
        match allowed {
            false => Grant::No,
            true if self.claim_write(gpa) => Grant::Yes,
            true => Grant::HeldBack,
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

    /// Reads 1, 4 or 8 bytes of guest-physical memory that need not be RAM: other bytes read as all ones.
    pub fn read_phys(&self, gpa: u64, size: usize) -> u64 {
        match self.host(gpa) {
            Some(host) if (gpa & 0xfff) as usize + size <= 0x1000 => {
                // SAFETY: Within the page that `host` found.
                unsafe {
                    let at = host.add((gpa & 0xfff) as usize);
                    match size {
                        8 => at.cast::<u64>().read_unaligned(),
                        1 => at.read().into(),
                        _ => at.cast::<u32>().read_unaligned().into(),
                    }
                }
            }
            _ => u64::MAX,
        }
    }

    /// Reads RAM. Errors: the first address that is none.
    pub fn read(&self, gpa: u64, bytes: &mut [u8]) -> Result<(), u64> {
        let mut at = 0;
        while at < bytes.len() {
            let (host, n) = self.piece(gpa, at, bytes.len())?;
            // SAFETY: `piece` stays within a page of guest RAM.
            unsafe { core::ptr::copy_nonoverlapping(host, bytes[at..].as_mut_ptr(), n) };
            at += n;
        }
        Ok(())
    }

    /// Writes RAM, all of it or nothing, and nothing else: what follows from a write is for the caller to see to. Errors: the first
    /// address that is no RAM.
    pub fn write(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), u64> {
        for write in [false, true] {
            let mut at = 0;
            while at < bytes.len() {
                let (host, n) = self.piece(gpa, at, bytes.len())?;
                if write {
                    // SAFETY: As in `read`.
                    unsafe { core::ptr::copy_nonoverlapping(bytes[at..].as_ptr(), host, n) };
                }
                at += n;
            }
        }
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

    /// Notes that pages are written.
    pub fn soil(&mut self, gpa: u64, len: u64) {
        let last = gpa.saturating_add(len.max(1) - 1) & !0xfff;
        for page in (gpa & !0xfff..=last).step_by(0x1000) {
            if let Some(flags) = self.flags(page) {
                *flags |= DIRTY;
            }
        }
    }

    /// The page holds code from now on.
    pub fn mark_code(&mut self, gpa: u64) {
        self.hear_stores(gpa, CODE);
    }

    /// The page holds no code any more.
    pub fn clear_code(&mut self, gpa: u64) {
        if let Some(flags) = self.flags(gpa) {
            *flags &= !CODE;
        }
    }

    /// The page has a line that is monitored.
    pub fn mark_watched(&mut self, gpa: u64) {
        self.hear_stores(gpa, WATCHED);
    }

    /// Stores to the page take the slow path, for a reason that is a flag of the page.
    fn hear_stores(&mut self, gpa: u64, reason: u8) {
        let Some(flags) = self.flags(gpa) else { return };
        let was = *flags;
        *flags = was & !WRITABLE | reason;
        if was & WRITABLE != 0 {
            let host = self.place(gpa).map_or(0, |host| host as u64);
            self.retire_writes(host);
        }
    }

    /// Has every processor hold the write tags of a host page back.
    fn retire_writes(&mut self, host: u64) {
        self.retired.push_back(host);
        if self.retired.len() > MAX_RETIRED {
            self.retired.pop_front();
            self.forgotten += 1;
        }
    }

    /// The host pages whose write tags must be held back since a processor looked last, at position `seen`, which moves on;
    /// `None` when there were more than are kept.
    pub fn retired_writes(&self, seen: &mut u64) -> Option<impl Iterator<Item = u64>> {
        let from = seen.checked_sub(self.forgotten);
        *seen = self.forgotten + self.retired.len() as u64;
        from.map(|from| self.retired.iter().skip(from as usize).copied())
    }
}
