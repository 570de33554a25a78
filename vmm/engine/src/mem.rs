//! Guest memory as instructions reach it: a fast path per access size through the TLB, and slow paths for everything else
//! (misses, page crossings, devices, stores to code, faults).
// Guest memory is one of the rooms where `unsafe` is allowed: see `ram`.
#![allow(unsafe_code)]

use x86::rflags::flag as rf;
use x86::vmx::exits::apic_access;
use x86::watch::{Abort, AccessKind};

use crate::cpu::{Cpu, SS, slot};
use crate::mmu::{self, Access, Paging};
use crate::op::{Done, Op, Reason, Stop};
use crate::tlb::Privilege;
use crate::vmx::apic::Kind;

/// Where a linear address leads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Translated {
    pub gpa: u64,
    /// The byte's host address if it is RAM.
    pub host: Option<*mut u8>,
}

/// Whose rights an access has that is not one of the running instruction's own operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// Descriptor tables and TSS: an implicit supervisor access, at any CPL.
    System,
    /// A stack at this privilege level.
    Stack(u8),
}

/// A span of linear memory within two pages: its first part and, if it crosses, the rest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounce {
    first: Translated,
    split: usize,
    second: Translated,
}

impl Bounce {
    /// The parts of a span of `len` bytes that are not empty, with their lengths.
    pub fn parts(&self, len: usize) -> impl Iterator<Item = (Translated, usize)> + use<> {
        [(self.first, self.split), (self.second, len - self.split)]
            .into_iter()
            .filter(|(_, len)| *len > 0)
    }
}

impl Default for Bounce {
    fn default() -> Bounce {
        let nowhere = Translated { gpa: 0, host: None };
        Bounce {
            first: nowhere,
            split: 0,
            second: nowhere,
        }
    }
}

/// CMPXCHG16B of the host: what was there.
///
/// # Safety
/// The host has the instruction; `p` is 16 aligned bytes that can be written.
unsafe fn exchange16(p: *mut u8, expected: u128, new: u128) -> u128 {
    let (mut low, mut high) = (expected as u64, (expected >> 64) as u64);
    // SAFETY: The caller's promise. RBX, which the compiler keeps to itself, is put back.
    unsafe {
        core::arch::asm!(
            "xchg {b}, rbx",
            "lock cmpxchg16b [{p}]",
            "mov rbx, {b}",
            b = inout(reg) new as u64 => _, p = in(reg) p, in("rcx") (new >> 64) as u64,
            inout("rax") low, inout("rdx") high, options(nostack),
        );
    }
    (high as u128) << 64 | low as u128
}

/// The alignment of an operand by its length (SDM Vol. 3A Table 7-7 "Alignment Requirements by Data Type"). Vectors are left
/// out: parts may check unaligned ones or not (SDM Vol. 2A Table 2-21 "Type 4 Class Exception Conditions"), and ours do not.
fn natural(len: usize) -> u64 {
    match len {
        2 | 14 | 94 => 2,
        4 | 28 | 108 => 4,
        8 | 10 => 8,
        _ => 1,
    }
}

impl Cpu {
    /// Reads `S` bytes at a linear address.
    #[inline(always)]
    pub(crate) fn load<const S: u8>(&mut self, o: &Op, linear: u64) -> Done<u64> {
        let e = self.tlb.entry(linear);
        let x = linear ^ e.read;
        let p = if x <= 0x1000 - S as u64 {
            (e.host + x) as *const u8
        } else {
            // A null check here, rather than a `Result` handed through, keeps the fast path at one compare and one branch.
            let p = cold::load(self, o, linear, S as u32);
            if p.is_null() {
                return Err(Stop);
            }
            p
        };
        // SAFETY: A matching tag means `host` is a page of guest RAM, and the access ends within it; else `load_slow` has put
        // the bytes where it says. Guest memory is never borrowed; unaligned reads are used throughout.
        Ok(unsafe {
            match S {
                1 => *p as u64,
                2 => p.cast::<u16>().read_unaligned() as u64,
                4 => p.cast::<u32>().read_unaligned() as u64,
                _ => p.cast::<u64>().read_unaligned(),
            }
        })
    }

    /// Writes `S` bytes at a linear address.
    #[inline(always)]
    pub(crate) fn store<const S: u8>(&mut self, o: &Op, linear: u64, value: u64) -> Done {
        let e = self.tlb.entry(linear);
        let x = linear ^ e.write;
        if x <= 0x1000 - S as u64 {
            let p = (e.host + x) as *mut u8;
            // SAFETY: As in `load`.
            unsafe {
                match S {
                    1 => *p = value as u8,
                    2 => p.cast::<u16>().write_unaligned(value as u16),
                    4 => p.cast::<u32>().write_unaligned(value as u32),
                    _ => p.cast::<u64>().write_unaligned(value),
                }
            }
            return Ok(());
        }
        if cold::store(self, o, linear, S as u32, value) {
            Ok(())
        } else {
            Err(Stop)
        }
    }

    /// Reads, changes and writes back `S` bytes; `f` may be compiled twice, so keep it small.
    #[inline(always)]
    pub(crate) fn modify<const S: u8>(&mut self, o: &Op, linear: u64, f: impl Fn(&mut Cpu, u64) -> u64) -> Done {
        let e = self.tlb.entry(linear);
        let x = linear ^ e.write;
        if x <= 0x1000 - S as u64 {
            let p = (e.host + x) as *mut u8;
            // SAFETY: As in `load`; `f` computes on registers only, so the page stays where it is.
            unsafe {
                match S {
                    1 => *p = f(self, *p as u64) as u8,
                    2 => p
                        .cast::<u16>()
                        .write_unaligned(f(self, p.cast::<u16>().read_unaligned() as u64) as u16),
                    4 => p
                        .cast::<u32>()
                        .write_unaligned(f(self, p.cast::<u32>().read_unaligned() as u64) as u32),
                    _ => p
                        .cast::<u64>()
                        .write_unaligned(f(self, p.cast::<u64>().read_unaligned())),
                }
            }
            return Ok(());
        }
        if !cold::modify_begin(self, o, linear, S as u32) {
            return Err(Stop);
        }
        let new = f(self, u64::from_le_bytes(self.bounce));
        cold::modify_end(self, o, S as u32, new);
        Ok(())
    }

    /// Reads up to a page at a linear address; the segment in `o` decides between #GP and #SS.
    pub(crate) fn read_bytes(&mut self, o: &Op, linear: u64, bytes: &mut [u8]) -> Done {
        let align = natural(bytes.len());
        self.read_aligned(o, linear, bytes, align)
    }

    /// The same for an operand whose alignment does not follow from its length.
    pub(crate) fn read_aligned(&mut self, o: &Op, linear: u64, bytes: &mut [u8], align: u64) -> Done {
        let span = self.span(o, linear, bytes.len(), Access::Read, align)?;
        self.heard(linear, bytes.len(), AccessKind::Read)?;
        let (a, b) = bytes.split_at_mut(span.split);
        self.get_part(o, span.first, a)?;
        self.get_part(o, span.second, b)?;
        self.note_access(o, linear, bytes.len(), AccessKind::Read);
        Ok(())
    }

    /// Writes up to a page at a linear address, all of it or nothing.
    pub(crate) fn write_bytes(&mut self, o: &Op, linear: u64, bytes: &[u8]) -> Done {
        let align = natural(bytes.len());
        self.write_aligned(o, linear, bytes, align)
    }

    /// The same for an operand whose alignment does not follow from its length.
    pub(crate) fn write_aligned(&mut self, o: &Op, linear: u64, bytes: &[u8], align: u64) -> Done {
        let span = self.span(o, linear, bytes.len(), Access::Write, align)?;
        self.ready(span, bytes.len())?;
        self.heard(linear, bytes.len(), AccessKind::Write)?;
        let (a, b) = bytes.split_at(span.split);
        self.put_part(o, span.first, a);
        self.put_part(o, span.second, b);
        self.note_access(o, linear, bytes.len(), AccessKind::Write);
        Ok(())
    }

    /// First half of a read-modify-write that takes several ops: the operand. `finish` or `finish_locked` writes it back.
    #[inline(always)]
    pub(crate) fn begin<const S: u8>(&mut self, o: &Op, linear: u64) -> Done<u64> {
        let e = self.tlb.entry(linear);
        let x = linear ^ e.write;
        if x <= 0x1000 - S as u64 {
            let p = (e.host + x) as *mut u8;
            self.direct = p;
            // SAFETY: As in `load`.
            return Ok(unsafe {
                match S {
                    1 => *p as u64,
                    2 => p.cast::<u16>().read_unaligned() as u64,
                    4 => p.cast::<u32>().read_unaligned() as u64,
                    _ => p.cast::<u64>().read_unaligned(),
                }
            });
        }
        if !cold::modify_begin(self, o, linear, S as u32) {
            return Err(Stop);
        }
        Ok(u64::from_le_bytes(self.bounce))
    }

    /// Second half: T0 goes back to where `begin` found the operand.
    #[inline(always)]
    pub(crate) fn finish<const S: u8>(&mut self, o: &Op) {
        let (p, value) = (self.direct, self.get::<S>(slot::T0));
        if p.is_null() {
            cold::modify_end(self, o, S as u32, value);
            return;
        }
        // SAFETY: `begin` found a page whose write tag matched; nothing has been run since but ops of the same instruction,
        // which do not touch the TLB.
        unsafe {
            match S {
                1 => *p = value as u8,
                2 => p.cast::<u16>().write_unaligned(value as u16),
                4 => p.cast::<u32>().write_unaligned(value as u32),
                _ => p.cast::<u64>().write_unaligned(value),
            }
        }
    }

    /// Second half for LOCK: T0 goes back if the operand still is T1, atomically where the host can do that.
    #[inline(always)]
    pub(crate) fn finish_locked<const S: u8>(&mut self, o: &Op) -> bool {
        use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::SeqCst};
        let p = self.direct;
        let (old, value) = (self.get::<S>(slot::T1), self.get::<S>(slot::T0));
        if p.is_null() {
            return cold::modify_end_locked(self, o, S as u32);
        }
        if p as u64 & (S as u64 - 1) != 0 {
            // A split lock: processors take turns on one thread, so nobody comes between.
            self.finish::<S>(o);
            return true;
        }
        // SAFETY: As in `finish`, and aligned.
        unsafe {
            match S {
                1 => AtomicU8::from_ptr(p)
                    .compare_exchange(old as u8, value as u8, SeqCst, SeqCst)
                    .is_ok(),
                2 => AtomicU16::from_ptr(p.cast())
                    .compare_exchange(old as u16, value as u16, SeqCst, SeqCst)
                    .is_ok(),
                4 => AtomicU32::from_ptr(p.cast())
                    .compare_exchange(old as u32, value as u32, SeqCst, SeqCst)
                    .is_ok(),
                _ => AtomicU64::from_ptr(p.cast())
                    .compare_exchange(old, value, SeqCst, SeqCst)
                    .is_ok(),
            }
        }
    }

    /// First half of a read-modify-write: checks that the operand can be written, remembers where it is, and reads it.
    #[cold]
    #[inline(never)]
    pub(crate) fn modify_begin(&mut self, o: &Op, linear: u64, size: usize) -> Done<u64> {
        let span = self.span(o, linear, size, Access::Write, natural(size))?;
        self.check_apic_place(o, span.first, size, Kind::Modify)?;
        self.ready(span, size)?;
        self.heard(linear, size, AccessKind::ReadWrite)?;
        self.note_access(o, linear, size, AccessKind::ReadWrite);
        let mut bytes = [0; 8];
        let (a, b) = bytes[..size].split_at_mut(span.split);
        self.get_part(o, span.first, a)?;
        self.get_part(o, span.second, b)?;
        self.bounce_to = span;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Second half: writes the operand where `modify_begin` found it.
    #[cold]
    #[inline(never)]
    pub(crate) fn modify_end(&mut self, o: &Op, size: usize, value: u64) {
        let span = self.bounce_to;
        let bytes = value.to_le_bytes();
        let (a, b) = bytes[..size].split_at(span.split);
        self.put_part(o, span.first, a);
        self.put_part(o, span.second, b);
    }

    /// Before a locked access of `o.aux` bytes that would be a debug exception if it took the bus lock: it does if the operand
    /// crosses a line, or is where there is no write-back memory, which are the devices' pages here. SDM Vol. 3A 9.1.2.3
    /// "Features to Disable Bus Locks". The instruction needs a block of its own then, so that the exception comes right
    /// after it.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_bus_lock(&mut self, o: &Op) -> Done {
        const LINE: u64 = 64;
        let (linear, size) = (self.ea(o), o.aux as u64);
        // CMPXCHG16B has an alignment of its own, whose fault is not this op's.
        let split = linear & (LINE - 1) > LINE - size && size < 16;
        if !split {
            let span = self.span(o, linear, size as usize, Access::Write, natural(size as usize))?;
            // The virtual-APIC page, to which the APIC-access page leads, is write-back memory.
            if span.first.host.is_some() || span.first.gpa & !0xfff == self.apic_access_page() {
                return Ok(());
            }
        }
        self.need_solo()?;
        self.watched.bus_lock = true;
        Ok(())
    }

    /// CMPXCHG16B at an aligned address: what was there. Memory is written in any case.
    pub(crate) fn exchange16(&mut self, o: &Op, linear: u64, expected: u128, new: u128) -> Done<u128> {
        let e = self.tlb.entry(linear);
        let x = linear ^ e.write;
        if x <= 0x1000 - 16 && std::is_x86_feature_detected!("cmpxchg16b") {
            // SAFETY: As in `store`; the caller has checked the alignment.
            return Ok(unsafe { exchange16((e.host + x) as *mut u8, expected, new) });
        }
        let span = self.span(o, linear, 16, Access::Write, 1)?;
        self.ready(span, 16)?;
        self.heard(linear, 16, AccessKind::ReadWrite)?;
        self.note_access(o, linear, 16, AccessKind::ReadWrite);
        if let Some(p) = span.first.host
            && std::is_x86_feature_detected!("cmpxchg16b")
        {
            self.stored(span.first.gpa, 16);
            if self.shared().blocks.covers(span.first.gpa, 16) {
                self.shared().invalidate_page(span.first.gpa);
            }
            // SAFETY: The host has the instruction; `p` is 16 aligned bytes of guest RAM.
            return Ok(unsafe { exchange16(p, expected, new) });
        }
        let mut bytes = [0; 16];
        self.get_part(o, span.first, &mut bytes)?;
        let old = u128::from_le_bytes(bytes);
        let value = if old == expected { new } else { old };
        self.put_part(o, span.first, &value.to_le_bytes());
        Ok(old)
    }

    /// Checks that `len` bytes can be written at a linear address, without writing.
    pub(crate) fn probe_write(&mut self, o: &Op, linear: u64, len: usize) -> Done {
        self.probe_aligned(o, linear, len, natural(len))
    }

    /// The same for an operand whose alignment does not follow from its length.
    pub(crate) fn probe_aligned(&mut self, o: &Op, linear: u64, len: usize, align: u64) -> Done {
        let span = self.span(o, linear, len, Access::Write, align)?;
        self.heard(linear, len, AccessKind::Write)?;
        self.ready(span, len)
    }

    /// Copies as many of `max` elements of `S` bytes as lie in the first page of both, upwards, each before the next as MOVS
    /// does. Pages that the TLB does not lead to at once are left alone. The number of elements copied.
    pub(crate) fn copy_run<const S: u8>(&mut self, from: u64, to: u64, max: u64) -> u64 {
        let (size, last) = (S as u64, 0x1000 - S as u64);
        let (e, f) = (self.tlb.entry(from), self.tlb.entry(to));
        let (x, y) = (from ^ e.read, to ^ f.write);
        if x > last || y > last {
            return 0;
        }
        let n = max.min((0x1000 - x) / size).min((0x1000 - y) / size);
        let (src, dst, bytes) = ((e.host + x) as *const u8, (f.host + y) as *mut u8, (n * size) as usize);
        let ahead = (dst as usize).wrapping_sub(src as usize);
        // SAFETY: As in `load` and `store`: both runs end within a page of guest RAM.
        unsafe {
            if ahead == 0 || ahead >= bytes {
                core::ptr::copy(src, dst, bytes);
            } else {
                // The destination begins within the source: what has been written is read again further on. Pieces no longer
                // than the distance do not overlap themselves.
                let piece = ahead / S as usize * S as usize;
                if piece == 0 {
                    for i in (0..bytes).step_by(S as usize) {
                        core::ptr::copy(src.add(i), dst.add(i), S as usize);
                    }
                } else {
                    for i in (0..bytes).step_by(piece) {
                        core::ptr::copy_nonoverlapping(src.add(i), dst.add(i), piece.min(bytes - i));
                    }
                }
            }
        }
        n
    }

    /// Stores `value` in as many of `max` elements of `S` bytes as lie in the first page, as `copy_run` does.
    pub(crate) fn fill_run<const S: u8>(&mut self, to: u64, value: u64, max: u64) -> u64 {
        let size = S as u64;
        let f = self.tlb.entry(to);
        let y = to ^ f.write;
        if y > 0x1000 - size {
            return 0;
        }
        let n = max.min((0x1000 - y) / size);
        let dst = (f.host + y) as *mut u8;
        // SAFETY: As in `store`: the run ends within a page of guest RAM.
        unsafe {
            match S {
                1 => dst.write_bytes(value as u8, n as usize),
                2 => (0..n as usize).for_each(|i| dst.cast::<u16>().add(i).write_unaligned(value as u16)),
                4 => (0..n as usize).for_each(|i| dst.cast::<u32>().add(i).write_unaligned(value as u32)),
                _ => (0..n as usize).for_each(|i| dst.cast::<u64>().add(i).write_unaligned(value)),
            }
        }
        n
    }

    fn get_part(&mut self, o: &Op, place: Translated, bytes: &mut [u8]) -> Done {
        if bytes.is_empty() {
            return Ok(());
        }
        match place.host {
            // SAFETY: `span` keeps each part within one page of guest RAM.
            Some(p) => unsafe { core::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), bytes.len()) },
            None if self.transaction.is_some() => return Err(self.abort(Abort::MemoryType)),
            None if place.gpa & !0xfff == self.apic_access_page() => self.read_virtual_apic(place.gpa & 0xfff, bytes),
            None if self.shared().ram.hides(place.gpa) => bytes.fill(0xff),
            None => {
                self.need_solo()?;
                let now = self.now(o);
                self.bus_used = true;
                let mut at = place.gpa;
                for part in bytes.chunks_mut(8) {
                    let size = part.len().next_power_of_two().min(8);
                    let value = self.bus().read(at, size as u8, now);
                    part.copy_from_slice(&value.to_le_bytes()[..part.len()]);
                    at += part.len() as u64;
                }
            }
        }
        Ok(())
    }

    /// Makes sure that a store may go ahead: device accesses, stores to code and to monitored lines need a block of their own.
    fn ready(&mut self, span: Bounce, len: usize) -> Done {
        if self.transaction.is_some() {
            self.keep_lines(&span, len)?;
        }
        for (place, len) in span.parts(len) {
            let (gpa, len) = (place.gpa, len as u64);
            if place.host.is_none() || self.shared().blocks.covers(gpa, len) || self.shared().lines.touch(gpa, len) {
                self.need_solo()?;
            }
        }
        Ok(())
    }

    fn put_part(&mut self, o: &Op, place: Translated, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        match place.host {
            Some(p) => {
                self.stored(place.gpa, bytes.len() as u64);
                if self.shared().blocks.covers(place.gpa, bytes.len() as u64) {
                    self.shared().invalidate_page(place.gpa);
                }
                // SAFETY: As in `get_part`.
                unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), p, bytes.len()) }
            }
            None if place.gpa & !0xfff == self.apic_access_page() => self.write_virtual_apic(place.gpa & 0xfff, bytes),
            None if self.shared().ram.hides(place.gpa) => {}
            None => {
                let now = self.now(o);
                self.bus_used = true;
                let mut at = place.gpa;
                for part in bytes.chunks(8) {
                    let mut value = [0; 8];
                    value[..part.len()].copy_from_slice(part);
                    let size = part.len().next_power_of_two().min(8);
                    self.bus().write(at, size as u8, u64::from_le_bytes(value), now);
                    at += part.len() as u64;
                }
            }
        }
    }

    /// Notes a store of the slow path. One to a monitored line ends the run, so that whoever waits for it goes on from this step,
    /// wherever the run would have ended otherwise.
    fn stored(&mut self, gpa: u64, len: u64) {
        self.bus_used |= self.shared().lines.touch(gpa, len);
        self.shared().stored(gpa, len);
    }

    /// The instruction must be the only one of its block from here on.
    pub(crate) fn need_solo(&mut self) -> Done {
        if self.solo {
            return Ok(());
        }
        self.stop = Reason::Replay;
        Err(Stop)
    }

    /// Finds both parts of a span; nothing changes but A and D bits. Where alignment is checked, a multiple of `align` is asked
    /// for, last of all (SDM Vol. 3A Table 7-2 "Priority Among Concurrent Events").
    fn span(&mut self, o: &Op, linear: u64, len: usize, access: Access, align: u64) -> Done<Bounce> {
        debug_assert!(len <= 0x1000);
        self.reach_canonical(o, linear, len)?;
        let first = self.translate(linear, access)?;
        self.check_apic_place(o, first, len, access.into())?;
        let room = 0x1000 - (linear & 0xfff) as usize;
        if len <= room {
            self.check_alignment(linear, align)?;
            return Ok(Bounce {
                first,
                split: len,
                second: first,
            });
        }
        let mut next = linear.wrapping_add(room as u64);
        if !self.is64() {
            next &= 0xffff_ffff;
        }
        let second = self.translate(next, access)?;
        self.check_apic_place(o, second, len, access.into())?;
        self.check_alignment(linear, align)?;
        Ok(Bounce {
            first,
            split: room,
            second,
        })
    }

    /// The place is on the APIC-access page: a VM exit unless an access of `len` bytes in all that begins or goes on there is virtualized.
    fn check_apic_place(&mut self, o: &Op, place: Translated, len: usize, kind: Kind) -> Done {
        if place.host.is_some() || place.gpa & !0xfff != self.apic_access_page() {
            return Ok(());
        }
        self.check_apic_access(place.gpa & 0xfff, len, kind, o.len)
    }

    /// Translates the first bytes of a long operand.
    pub(crate) fn reach_first(&mut self, o: &Op, linear: u64, len: usize, access: Access) -> Done {
        self.span(o, linear, len, access, 1).map(|_| ())
    }

    /// #GP or #SS for a long operand that is not canonical, ahead of everything else about it.
    pub(crate) fn reach_canonical(&mut self, o: &Op, linear: u64, len: usize) -> Done {
        if self.canonical_span(linear, len) {
            return Ok(());
        }
        Err(if o.seg == SS as u8 {
            self.fault(12, Some(0))
        } else {
            self.gp(0)
        })
    }

    /// Translates the last byte of a long operand, with which Intel's processors begin where they load or store a whole state: it
    /// is then the one whose fault comes first.
    pub(crate) fn reach_last(&mut self, o: &Op, linear: u64, len: usize, access: Access) -> Done {
        let mut last = linear.wrapping_add(len as u64 - 1);
        if !self.is64() {
            last &= 0xffff_ffff;
        }
        let e = self.tlb.entry(last);
        let tag = if access == Access::Write { e.write } else { e.read };
        if last ^ tag < 0x1000 {
            return Ok(());
        }
        self.span(o, last, 1, access, 1).map(|_| ())
    }

    fn canonical_span(&self, linear: u64, len: usize) -> bool {
        !self.is64() || self.canonical(linear) && self.canonical(linear.wrapping_add(len as u64 - 1))
    }

    /// Bits above the linear-address width are copies of its top bit (SDM Vol. 1 3.3.7.1 "Canonical Addressing").
    #[inline]
    pub(crate) fn canonical(&self, linear: u64) -> bool {
        let shift = if self.cr4.la57() { 7 } else { 16 };
        ((linear << shift) as i64 >> shift) as u64 == linear
    }

    /// An address that a register may hold: segment bases, table bases and the MSRs take what is canonical for the widest
    /// mode of the part, not for the present one (Linux, "KVM: x86: model canonical checks more precisely", from measurements).
    pub(crate) fn canonical_register(&self, linear: u64) -> bool {
        let shift = 64 - self.linear_bits;
        ((linear << shift) as i64 >> shift) as u64 == linear
    }

    /// Alignment is checked: CPL 3, CR0.AM and EFLAGS.AC (SDM Vol. 3A 7.15, "Interrupt 17—Alignment Check Exception (#AC)").
    #[inline]
    pub(crate) fn checks_alignment(&self) -> bool {
        self.cpl == 3 && self.cr0.am() && self.rflags & rf::AC != 0
    }

    /// #AC(0) for an address that is not a multiple of `align`, where that is checked; 0 for one that has been found not to be.
    pub(crate) fn check_alignment(&mut self, linear: u64, align: u64) -> Done {
        if align != 0 && linear & (align - 1) == 0 || !self.checks_alignment() {
            return Ok(());
        }
        Err(self.fault(17, Some(0)))
    }

    /// Translates a data access of the current privilege and enters it in the TLB.
    pub(crate) fn translate(&mut self, linear: u64, access: Access) -> Done<Translated> {
        let linear = if self.is64() { linear } else { linear & 0xffff_ffff };
        if access == Access::Write
            && let Some(set) = self.tlb.is_now(self.pcid(), self.privilege())
            && let Some(place) = self.known_store(set, linear)
        {
            return Ok(place);
        }
        let paging = self.paging(self.cpl == 3);
        match mmu::walk(&mut self.shared().ram, &paging, linear, access) {
            Ok(page) => {
                let host = self.memory(page.gpa);
                if let Some(host) = host {
                    let (read, write) = self.unwatched_rights(linear, page.read, page.write && page.dirty);
                    let write = self.shared().ram.stores(page.gpa, write);
                    let exec = self.silent_fetches(*self.tlb.entry(linear), linear, host as u64, page.exec);
                    self.tlb.fill(linear, host as u64, read, write, exec);
                    self.tlb.note(linear, &page);
                }
                let offset = linear & 0xfff;
                // SAFETY: The offset is within the page.
                let host = host.map(|h| unsafe { h.add(offset as usize) });
                Ok(Translated {
                    gpa: page.gpa + offset,
                    host,
                })
            }
            Err(none) => Err(self.no_page(linear, none)),
        }
    }

    /// The host's address of a page that is RAM and not the APIC-access page, whose accesses all take the slow path.
    fn memory(&mut self, gpa: u64) -> Option<*mut u8> {
        if gpa == self.apic_access_page() {
            return None;
        }
        self.shared().ram.host(gpa)
    }

    /// Where a store leads that the TLB knows how to make, if only by the slow path. It is made, so that it need not be held
    /// back any longer unless the engine must hear of every one.
    fn known_store(&mut self, set: usize, linear: u64) -> Option<Translated> {
        let e = self.tlb.entry_of(set, linear);
        if !e.stores_to(linear) {
            return None;
        }
        let page = self.shared().ram.gpa(e.host)?;
        if self.shared().ram.claim_write(page) {
            self.tlb.let_stores(set, linear);
        }
        let offset = linear & 0xfff;
        Some(Translated {
            gpa: page + offset,
            host: Some((e.host + offset) as *mut u8),
        })
    }

    /// A walk has found no page: the page fault, or the VM exit.
    #[cold]
    pub(crate) fn no_page(&mut self, linear: u64, none: mmu::NoPage) -> Stop {
        match none {
            mmu::NoPage::Fault(code) => self.page_fault(linear, code),
            mmu::NoPage::Nested(fault) => self.nested_exit(fault, Some(linear)),
        }
    }

    #[cold]
    pub(crate) fn page_fault(&mut self, linear: u64, code: u32) -> Stop {
        self.cr2_before = self.cr2;
        self.cr2 = linear;
        self.fault(14, Some(code))
    }

    /// MONITOR or UMONITOR (`user`) of a line: stores to it are counted from now on. Only RAM can be monitored.
    pub(crate) fn arm(&mut self, linear: u64, user: bool) -> Done {
        let place = self.translate(linear, Access::Read)?;
        self.monitor.line = place.host.map(|_| place.gpa & !63);
        if place.host.is_none() && place.gpa & !0xfff == self.apic_access_page() {
            // MONITOR reads a byte. SDM Vol. 3C 30.4.4 "Instruction-Specific Considerations".
            let offset = place.gpa & 0xfff;
            self.check_apic_access(offset, 1, Kind::Read, 0)?;
            let line = self.virtual_apic_page() | offset & !63;
            self.monitor.line = self.shared().ram.host(line).map(|_| line);
        }
        self.monitor.user = user;
        self.monitor_seen = None;
        self.look_at_line();
        Ok(())
    }

    /// Whatever wait of UMWAIT or TPAUSE there is is over, and the line that UMWAIT has waited for is no longer armed. Says whether there was
    /// one.
    pub(crate) fn end_timed_wait(&mut self) -> bool {
        let Some(wait) = self.monitor.timed.take() else {
            return false;
        };
        if wait.line {
            self.monitor.line = None;
        }
        true
    }

    /// Disarms the monitored line if somebody has stored to it.
    pub(crate) fn look_at_line(&mut self) {
        let Some(line) = self.monitor.line else { return };
        let now = self.shared().watch_line(line);
        self.hold_stores_back();
        match self.monitor_seen {
            Some(seen) if seen != now => self.monitor.line = None,
            _ => self.monitor_seen = Some(now),
        }
    }

    /// What the page walk depends on.
    pub(crate) fn paging(&self, user: bool) -> Paging {
        Paging {
            cr0: self.cr0,
            cr3: self.cr3,
            cr4: self.cr4,
            efer: self.efer,
            user,
            smap: !user && self.cr4.smap() && (self.rflags & rf::AC == 0 || self.cpl == 3),
            maxphyaddr: self.maxphyaddr,
            huge: self.huge_pages,
            pkru: self.pkru,
            pkrs: self.msrs.pkrs as u32,
            nested: self.nested(),
        }
    }

    /// Reads a descriptor table, TSS or the like: an implicit supervisor access (SDM Vol. 3A 5.6 "Access Rights").
    pub(crate) fn read_system(&mut self, linear: u64, size: usize) -> Done<u64> {
        let span = self.system_span(linear, size, Access::Read, Who::System)?;
        self.note_implicit(linear, size, AccessKind::Read)?;
        let mut bytes = [0; 8];
        let (a, b) = bytes[..size].split_at_mut(span.split);
        for (place, part) in [(span.first, a), (span.second, b)] {
            match place.host {
                // SAFETY: `system_span` keeps each part within one page of guest RAM.
                Some(p) => unsafe { core::ptr::copy_nonoverlapping(p, part.as_mut_ptr(), part.len()) },
                None if place.gpa & !0xfff == self.apic_access_page() => {
                    self.read_virtual_apic(place.gpa & 0xfff, part)
                }
                None => part.fill(0xff),
            }
        }
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes a descriptor or TSS field as an implicit supervisor access, all of it or nothing.
    pub(crate) fn write_system(&mut self, linear: u64, bytes: &[u8]) -> Done {
        self.write_as(linear, bytes, Who::System)
    }

    /// Writes to a stack with the rights of a privilege level that need not be the present one, all of it or nothing.
    pub(crate) fn write_as(&mut self, linear: u64, bytes: &[u8], who: Who) -> Done {
        let span = self.system_span(linear, bytes.len(), Access::Write, who)?;
        if self.transaction.is_some() {
            self.keep_lines(&span, bytes.len())?;
        }
        self.note_implicit(linear, bytes.len(), AccessKind::Write)?;
        let (a, b) = bytes.split_at(span.split);
        for (place, part) in [(span.first, a), (span.second, b)] {
            if let Some(p) = place.host
                && !part.is_empty()
            {
                self.stored(place.gpa, part.len() as u64);
                if self.shared().blocks.covers(place.gpa, part.len() as u64) {
                    self.shared().invalidate_page(place.gpa);
                }
                // SAFETY: As in `read_system`.
                unsafe { core::ptr::copy_nonoverlapping(part.as_ptr(), p, part.len()) }
            }
        }
        Ok(())
    }

    /// Checks that `write_as` would succeed.
    pub(crate) fn probe_as(&mut self, linear: u64, len: usize, who: Who) -> Done {
        self.system_span(linear, len, Access::Write, who)?;
        self.heard_implicit(linear, len, AccessKind::Write).map(|_| ())
    }

    /// Both parts of a span for accesses that are not those of the running instruction's own operands.
    fn system_span(&mut self, linear: u64, len: usize, access: Access, who: Who) -> Done<Bounce> {
        let first = self.system_place(linear, len, access, who)?;
        let room = 0x1000 - (linear & 0xfff) as usize;
        if len <= room {
            return Ok(Bounce {
                first,
                split: len,
                second: first,
            });
        }
        let second = self.system_place(linear.wrapping_add(room as u64), len, access, who)?;
        Ok(Bounce {
            first,
            split: room,
            second,
        })
    }

    /// Where an access of `len` bytes in all begins or goes on.
    fn system_place(&mut self, linear: u64, len: usize, access: Access, who: Who) -> Done<Translated> {
        let linear = if self.efer.lma() {
            if !self.canonical(linear) {
                return Err(self.gp(0));
            }
            linear
        } else {
            linear & 0xffff_ffff
        };
        let mut paging = self.paging(who == Who::Stack(3));
        // Implicit accesses ignore EFLAGS.AC.
        if who == Who::System {
            paging.smap = self.cr4.smap();
        }
        let privilege = match (paging.user, paging.smap) {
            (true, _) => Privilege::User,
            (false, true) => Privilege::Guarded,
            (false, false) => Privilege::Supervisor,
        };
        let offset = linear & 0xfff;
        let set = self.tlb.find(self.pcid(), privilege);
        if let Some(set) = set {
            if access == Access::Write
                && let Some(place) = self.known_store(set, linear)
            {
                return Ok(place);
            }
            let e = self.tlb.entry_of(set, linear);
            if access != Access::Write && e.read == linear & !0xfff {
                // A read does not ask whether there is code: any page without it will do.
                return Ok(Translated {
                    gpa: !0xfff,
                    host: Some((e.host + offset) as *mut u8),
                });
            }
        }
        match mmu::walk(&mut self.shared().ram, &paging, linear, access) {
            Ok(page) => {
                if page.gpa == self.apic_access_page() {
                    if access == Access::Write {
                        return Err(self.apic_access_exit(offset, apic_access::WRITE, 0));
                    }
                    self.check_apic_access(offset, len, Kind::Read, 0)?;
                }
                let host = self.memory(page.gpa);
                if let (Some(set), Some(host)) = (set, host) {
                    let (read, write) = self.unwatched_rights(linear, page.read, page.write && page.dirty);
                    let write = self.shared().ram.stores(page.gpa, write);
                    let known = self.tlb.entry_of(set, linear);
                    let exec = self.silent_fetches(known, linear, host as u64, page.exec);
                    self.tlb.fill_in(set, linear, host as u64, read, write, exec);
                    self.tlb.note(linear, &page);
                }
                // SAFETY: The offset is within the page.
                let host = host.map(|h| unsafe { h.add(offset as usize) });
                Ok(Translated {
                    gpa: page.gpa + offset,
                    host,
                })
            }
            Err(none) => Err(self.no_page(linear, none)),
        }
    }

    /// The present address space's number.
    fn pcid(&self) -> u16 {
        if self.cr4.pcide() { (self.cr3 & 0xfff) as u16 } else { 0 }
    }

    /// Chooses the TLB set for the present address space and privilege: call after CR3, CPL, EFLAGS.AC or CR4 change.
    pub(crate) fn select_tlb(&mut self) {
        let (pcid, privilege) = (self.pcid(), self.privilege());
        self.tlb.select(pcid, privilege);
        if self.watched.interest.code != 0 {
            // What is announced is announced of an address space. That an entry outlives its number there is no guest's right.
            let root = self.cr3 & !0x1f;
            self.tlb.root(root);
        }
    }

    /// The privilege whose TLB set the present one is.
    fn privilege(&self) -> Privilege {
        let privilege = if self.checks_alignment() {
            Privilege::Aligned
        } else if self.cpl == 3 {
            Privilege::User
        } else if self.cr4.smap() && self.rflags & rf::AC == 0 {
            Privilege::Guarded
        } else {
            Privilege::Supervisor
        };
        if self.transaction.is_some() {
            privilege.in_transaction()
        } else {
            privilege
        }
    }

    /// Holds the write tags back of pages that became code since this processor last looked, and all of them if the dirty pages
    /// have been asked for.
    pub(crate) fn hold_stores_back(&mut self) {
        let mut seen = self.code_seen;
        match self
            .shared()
            .ram
            .retired_writes(&mut seen)
            .map(|new| new.collect::<Vec<u64>>())
        {
            Some(new) => new.into_iter().for_each(|host| self.tlb.hold_back(host)),
            None => self.tlb.hold_all_back(),
        }
        self.code_seen = seen;
        let asked = self.shared().ram.dirty_asked;
        if self.dirty_asked != asked {
            self.dirty_asked = asked;
            self.tlb.hold_all_back();
        }
    }
}

/// Calls into the slow paths that cost the caller nothing unless they are taken.
///
/// To the compiler an ordinary call in a cold branch still means that the handler's operands must survive it: it saves and
/// restores registers on the hot path too. These calls preserve every general register, so handlers stay leaves.
mod cold {
    use crate::cpu::{Cpu, slot};
    use crate::op::Op;

    extern "C" fn load_slow(c: &mut Cpu, o: &Op, linear: u64, size: u32) -> *const u8 {
        let mut bytes = [0; 8];
        if c.read_bytes(o, linear, &mut bytes[..size as usize]).is_err() {
            return core::ptr::null();
        }
        c.bounce = bytes;
        c.bounce.as_ptr()
    }

    extern "C" fn store_slow(c: &mut Cpu, o: &Op, linear: u64, size: u32, value: u64) -> bool {
        c.write_bytes(o, linear, &value.to_le_bytes()[..size as usize]).is_ok()
    }

    extern "C" fn modify_begin_slow(c: &mut Cpu, o: &Op, linear: u64, size: u32) -> bool {
        let Ok(value) = c.modify_begin(o, linear, size as usize) else {
            return false;
        };
        c.bounce = value.to_le_bytes();
        c.direct = core::ptr::null_mut();
        true
    }

    /// Processors take turns on one thread, so what is no plain RAM needs no atomic access.
    extern "C" fn modify_end_locked_slow(c: &mut Cpu, o: &Op, _linear: u64, size: u32) -> bool {
        let value = c.get::<8>(slot::T0);
        c.modify_end(o, size as usize, value);
        true
    }

    extern "C" fn modify_end_slow(c: &mut Cpu, o: &Op, _linear: u64, size: u32, value: u64) {
        c.modify_end(o, size as usize, value);
    }

    #[cfg(not(miri))]
    macro_rules! stub {
        ($stub:ident, $target:ident) => {
            /// Arguments as in the C ABI, the return address in R11; saves what a C function may not preserve.
            #[unsafe(naked)]
            extern "C" fn $stub() {
                core::arch::naked_asm!(
                    // The handler is a leaf: what lies below its stack pointer may be in use.
                    "lea rsp, [rsp - 128]",
                    "push r11",
                    "push rbp",
                    "mov rbp, rsp",
                    "push rdi",
                    "push rsi",
                    "push rdx",
                    "push rcx",
                    "push r8",
                    "push r9",
                    "push r10",
                    "and rsp, -16",
                    "call {f}",
                    "lea rsp, [rbp - 56]",
                    "pop r10",
                    "pop r9",
                    "pop r8",
                    "pop rcx",
                    "pop rdx",
                    "pop rsi",
                    "pop rdi",
                    "pop rbp",
                    "pop r11",
                    "lea rsp, [rsp + 128]",
                    "jmp r11",
                    f = sym $target,
                )
            }
        };
    }

    #[cfg(not(miri))]
    macro_rules! call {
        ($stub:ident, $c:expr, $o:expr, $linear:expr, $size:expr, $value:expr) => {{
            let rax: u64;
            // SAFETY: The stub preserves all general registers but RAX and R11 and steps over the red zone; the references are
            // valid for the call, which does not unwind (`extern "C"` aborts).
            unsafe {
                core::arch::asm!(
                    "lea r11, [rip + 2f]",
                    "jmp {stub}",
                    "2:",
                    stub = sym $stub,
                    in("rdi") core::ptr::from_mut($c), in("rsi") core::ptr::from_ref($o), in("rdx") $linear, in("ecx") $size, in("r8") $value,
                    out("r11") _, out("rax") rax,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                    out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _, out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                    options(nostack),
                );
            }
            rax
        }};
    }

    #[cfg(not(miri))]
    mod fast {
        use super::*;

        stub!(load_stub, load_slow);
        stub!(store_stub, store_slow);
        stub!(modify_begin_stub, modify_begin_slow);
        stub!(modify_end_stub, modify_end_slow);
        stub!(modify_end_locked_stub, modify_end_locked_slow);

        /// The host address of the bytes; null when the access stops.
        #[inline(always)]
        pub fn load(c: &mut Cpu, o: &Op, linear: u64, size: u32) -> *const u8 {
            call!(load_stub, c, o, linear, size, 0u64) as *const u8
        }

        /// Whether the store was made.
        #[inline(always)]
        pub fn store(c: &mut Cpu, o: &Op, linear: u64, size: u32, value: u64) -> bool {
            call!(store_stub, c, o, linear, size, value) as u8 != 0
        }

        /// Whether the operand was read, into `Cpu::bounce`.
        #[inline(always)]
        pub fn modify_begin(c: &mut Cpu, o: &Op, linear: u64, size: u32) -> bool {
            call!(modify_begin_stub, c, o, linear, size, 0u64) as u8 != 0
        }

        #[inline(always)]
        pub fn modify_end(c: &mut Cpu, o: &Op, size: u32, value: u64) {
            call!(modify_end_stub, c, o, 0u64, size, value);
        }

        /// Whether T0 was written.
        #[inline(always)]
        pub fn modify_end_locked(c: &mut Cpu, o: &Op, size: u32) -> bool {
            call!(modify_end_locked_stub, c, o, 0u64, size, 0u64) as u8 != 0
        }
    }

    #[cfg(miri)]
    mod fast {
        use super::*;

        pub fn load(c: &mut Cpu, o: &Op, linear: u64, size: u32) -> *const u8 {
            load_slow(c, o, linear, size)
        }
        pub fn store(c: &mut Cpu, o: &Op, linear: u64, size: u32, value: u64) -> bool {
            store_slow(c, o, linear, size, value)
        }
        pub fn modify_begin(c: &mut Cpu, o: &Op, linear: u64, size: u32) -> bool {
            modify_begin_slow(c, o, linear, size)
        }
        pub fn modify_end(c: &mut Cpu, o: &Op, size: u32, value: u64) {
            modify_end_slow(c, o, 0, size, value)
        }
        pub fn modify_end_locked(c: &mut Cpu, o: &Op, size: u32) -> bool {
            modify_end_locked_slow(c, o, 0, size)
        }
    }

    pub(super) use fast::*;
}
