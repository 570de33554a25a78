//! Guest memory: one region below 3 GiB, the rest from 4 GiB up.
//!
//! The gap leaves room for the IOAPIC, the local APIC and whatever else answers by address. The regions are private
//! anonymous mappings without reserved swap, so that only pages the guest touches cost anything. In front of each and behind it are
//! addresses that nothing can be mapped at: an access that ran over the end of RAM would end the process, not change it.
//!
//! # Why `unsafe` is allowed here
//!
//! The engine runs on host pointers to the mappings. Here is where they are mapped between their guards and handed over, and where it is
//! argued that they stay good.
#![allow(unsafe_code)]

use std::{io, ops::Range, os::unix::fs::FileExt, sync::Arc};

use engine::{Engine, EngineOptions, HostLacks, RamRegion};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};
use x86::model::CpuModel;

use crate::error::plain;

/// Where RAM below 4 GiB ends at the latest.
pub const LOW_LIMIT: u64 = 3 << 30;
/// Where the rest goes on.
pub const HIGH_START: u64 = 4 << 30;

/// The least that a machine can be given, in bytes.
pub const MEMORY_MIN: u64 = 2 << 20;

const PAGE: usize = 4096;
/// Bytes on each side of a mapping that cannot be accessed: as much as keeps it aligned for huge pages.
const GUARD: usize = 2 << 20;

/// Guest memory of this size is not to be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{size} bytes of guest memory: {reason}")]
pub struct MemoryError {
    /// The size asked for, in bytes.
    pub size: u64,
    /// What is wrong with it.
    pub reason: String,
}

/// An access reached beyond RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at {gpa:#x} are not all RAM")]
pub struct NotRam {
    /// The first guest-physical address of the access.
    pub gpa: u64,
    /// Its length.
    pub len: u64,
}

/// A mapping between two guards. It is unmapped when the last owner is gone.
#[derive(Debug)]
struct Guarded {
    start: usize,
    /// With the guards.
    len: usize,
}

impl Guarded {
    /// `len` bytes of zeroes that can be read and written.
    fn new(len: usize) -> io::Result<Guarded> {
        let whole = len
            .checked_add(2 * GUARD)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: A new mapping at an address of the kernel's choice touches nothing that is there.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), whole, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let guarded = Guarded {
            start: start.expose_provenance(),
            len: whole,
        };
        // SAFETY: These bytes are in the middle of the mapping that was just made, and nobody has a pointer to them yet.
        let changed = unsafe { libc::mprotect(guarded.ram().cast(), len, libc::PROT_READ | libc::PROT_WRITE) };
        match changed {
            0 => Ok(guarded),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The first byte between the guards.
    fn ram(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.start + GUARD)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: The mapping is this one's own, and whoever has pointers into it keeps it alive: `Memory` and `SoftEngine`. It cannot
        // fail for a mapping that is there.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.start), self.len) };
    }
}

/// The RAM of a machine.
#[derive(Clone, Debug)]
pub struct Memory {
    mmap: GuestMemoryMmap,
    size: u64,
    /// What the regions of `mmap` lie in.
    _mappings: Arc<Vec<Guarded>>,
}

impl Memory {
    /// Maps `size` bytes of zeroes, a multiple of 4 KiB.
    pub fn new(size: u64) -> Result<Self, MemoryError> {
        let refused = |reason: String| MemoryError { size, reason };
        if size < MEMORY_MIN || !size.is_multiple_of(PAGE as u64) {
            return Err(refused("has to be at least 2M and a multiple of 4K".into()));
        }
        let low = size.min(LOW_LIMIT);
        let ranges = [(0, low), (HIGH_START, size - low)];
        let mut mappings = Vec::new();
        let regions = ranges.into_iter().filter(|(_, len)| *len > 0).map(|(start, len)| {
            let len = usize::try_from(len).map_err(|_| refused("more than this host can address".into()))?;
            let guarded = Guarded::new(len).map_err(|e| refused(format!("cannot be mapped: {}", plain(&e))))?;
            let (access, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            // SAFETY: So many bytes are mapped there for reading and writing, and stay so as long as this `Memory` or a clone of it is
            // there, which owns what is mapped.
            let mapping = unsafe { MmapRegion::build_raw(guarded.ram(), len, access, flags) }
                .map_err(|e| refused(format!("cannot be mapped: {e}")))?;
            mappings.push(guarded);
            GuestRegionMmap::new(mapping, GuestAddress(start)).ok_or_else(|| refused("wraps the address space".into()))
        });
        let regions = regions.collect::<Result<Vec<_>, _>>()?;
        let mmap = GuestMemoryMmap::from_regions(regions).map_err(|e| refused(format!("cannot be laid out: {e}")))?;
        Ok(Memory {
            mmap,
            size,
            _mappings: Arc::new(mappings),
        })
    }

    /// All RAM, in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The end of RAM below 4 GiB.
    pub fn low_end(&self) -> u64 {
        self.size.min(LOW_LIMIT)
    }

    /// RAM from 4 GiB up, if there is any.
    pub fn high(&self) -> Option<Range<u64>> {
        (self.size > LOW_LIMIT).then(|| HIGH_START..HIGH_START + (self.size - LOW_LIMIT))
    }

    /// The end of the guest-physical address space that has RAM.
    pub fn end(&self) -> u64 {
        self.high().map_or(self.low_end(), |high| high.end)
    }

    /// The mapping, for crates that load into it.
    pub fn mmap(&self) -> &GuestMemoryMmap {
        &self.mmap
    }

    /// Copies `bytes` to RAM.
    pub fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), NotRam> {
        let len = bytes.len() as u64;
        self.mmap
            .write_slice(bytes, GuestAddress(gpa))
            .map_err(|_| NotRam { gpa, len })
    }

    /// Copies RAM to `bytes`.
    pub fn read(&self, gpa: u64, bytes: &mut [u8]) -> Result<(), NotRam> {
        let len = bytes.len() as u64;
        self.mmap
            .read_slice(bytes, GuestAddress(gpa))
            .map_err(|_| NotRam { gpa, len })
    }

    /// Zeroes `len` bytes, and leaves pages alone that are zero: they may never have been touched.
    pub fn zero(&self, gpa: u64, len: u64) -> Result<(), NotRam> {
        let end = gpa.checked_add(len).ok_or(NotRam { gpa, len })?;
        let (mut at, mut page) = (gpa, [0; PAGE]);
        while at < end {
            let part = (end - at).min(PAGE as u64 - at % PAGE as u64) as usize;
            self.read(at, &mut page[..part])?;
            if page[..part].iter().any(|b| *b != 0) {
                self.write(at, &[0; PAGE][..part])?;
            }
            at += part as u64;
        }
        Ok(())
    }

    /// A software CPU that runs on this memory.
    pub fn engine(&self, model: &'static CpuModel, options: EngineOptions) -> Result<SoftEngine, HostLacks> {
        let regions = self.mmap.iter().map(|region| RamRegion {
            gpa: region.start_addr().0,
            host: region.get_mmap().as_ptr(),
            len: region.len(),
        });
        // SAFETY: The pointers are to mappings that are readable, writable and aligned to pages, as their guest addresses
        // are. `keep` holds the mappings as long as the engine lives. Everybody else reaches them through vm-memory's
        // volatile copies, which hold no references.
        let engine = unsafe { Engine::new(regions.collect(), model, options) }?;
        Ok(SoftEngine {
            engine,
            _keep: self.clone(),
        })
    }

    /// Where RAM may hold anything but zeroes: pages that were written to, or read, by whoever it was. In ascending order.
    ///
    /// The host knows: /proc/PID/pagemap of proc_pid_pagemap(5), "pagemap, from the userspace perspective" of Linux's
    /// Documentation/admin-guide/mm/pagemap.rst. Where it does not tell, this is all of RAM.
    pub fn touched(&self) -> Vec<Range<u64>> {
        let ram = || std::iter::once(0..self.low_end()).chain(self.high());
        let mut touched = Vec::new();
        let told = std::fs::File::open("/proc/self/pagemap").and_then(|file| {
            for region in self.mmap.iter() {
                let host = region.get_mmap().as_ptr().addr() as u64;
                pages(&file, host, region.start_addr().0, region.len(), &mut touched)?;
            }
            Ok(())
        });
        match told {
            Ok(()) => touched,
            Err(_) => ram().collect(),
        }
    }

    /// A 64-bit hash of all RAM, the same for the same contents on every host. Zero pages do not count, so that it does not
    /// matter whether a page was ever touched.
    pub fn digest(&self) -> u64 {
        let mut digest = Digest::default();
        let mut page = [0; PAGE];
        for range in self.touched() {
            for gpa in range.step_by(PAGE) {
                if self.read(gpa, &mut page).is_ok() && page.iter().any(|b| *b != 0) {
                    digest.add(&gpa.to_le_bytes());
                    digest.add(&page);
                }
            }
        }
        digest.value()
    }
}

/// Adds the pages of a mapping that are present or swapped out (bits 63 and 62 of their entries), as ranges.
fn pages(file: &std::fs::File, host: u64, gpa: u64, len: u64, touched: &mut Vec<Range<u64>>) -> io::Result<()> {
    const ENTRIES: u64 = 1 << 17;
    let (page, count) = (PAGE as u64, len / PAGE as u64);
    let mut entries = vec![0; 8 * ENTRIES.min(count) as usize];
    let mut first = 0;
    while first < count {
        let part = ENTRIES.min(count - first);
        let entries = &mut entries[..8 * part as usize];
        file.read_exact_at(entries, (host / page + first) * 8)?;
        for (n, entry) in entries.chunks_exact(8).enumerate() {
            // The highest two bits of a little-endian word.
            if entry[7] & 0xc0 == 0 {
                continue;
            }
            let at = gpa + (first + n as u64) * page;
            match touched.last_mut() {
                Some(last) if last.end == at => last.end += page,
                _ => touched.push(at..at + page),
            }
        }
        first += part;
    }
    Ok(())
}

/// The engine together with the memory it runs on.
pub struct SoftEngine {
    engine: Engine,
    _keep: Memory,
}

impl std::fmt::Debug for SoftEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SoftEngine")
    }
}

impl SoftEngine {
    /// What it has translated, if it does.
    pub fn translated(&self) -> Option<engine::translate::Statistics> {
        self.engine.translated()
    }

    /// See [`Engine::state_of`].
    pub fn state_of(&self, cpu: &engine::Cpu) -> engine::CpuState {
        self.engine.state_of(cpu)
    }

    /// See [`engine::Engine::not_translated`].
    pub fn not_translated(&self) -> Vec<(String, engine::translate::Why, u64)> {
        self.engine.not_translated()
    }

    /// The engine. It cannot be moved out, so it does not outlive the memory.
    pub fn get(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

/// FNV-1a over 64-bit words, stirred at the end. Finds differences; keeps no secrets.
#[derive(Clone, Copy, Debug)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Digest(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Takes more bytes in.
    pub fn add(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = (self.0 ^ u64::from_le_bytes(word))
                .wrapping_mul(0x0000_0100_0000_01b3)
                .rotate_left(23);
        }
    }

    /// The hash so far.
    pub fn value(self) -> u64 {
        let x = (self.0 ^ (self.0 >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        x ^ (x >> 32)
    }
}

#[cfg(test)]
#[path = "memory_test.rs"]
mod tests;
