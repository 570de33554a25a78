//! The calls into perf for Intel PT, which are `unsafe`.
//!
//! UNSAFETY: A system call that takes a structure has no wrapper of the kind that is wanted here (the crates with a safe one build
//! the kernel's headers' bindings with libclang, or have no AUX area), and two mappings are shared with the kernel. This is the
//! second module of this crate with `unsafe` code, beside `sys`.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use devices::unit::pt::Served;
use libc::{c_int, c_ulong, c_void};
use perf_event_open_sys::bindings::{
    PERF_AUX_FLAG_PARTIAL, PERF_AUX_FLAG_TRUNCATED, PERF_FLAG_FD_CLOEXEC, PERF_RECORD_AUX, perf_event_attr,
    perf_event_mmap_page,
};
use vmm_sys_util::signal::SIGRTMIN;
use x86::pt::{PtCaps, RtitCtl};

use crate::tracer::{IntelPt, PMU, PtError, Taken, Tracer, Traces};

/// Sizes of the buffer for packets, in pages: the first that the kernel lets have. Whoever has neither CAP_IPC_LOCK nor a
/// generous perf_event_mlock_kb gets less.
const PAGES: [usize; 4] = [1024, 256, 64, 16];
/// Pages of the kernel's own records.
const RECORDS: usize = 2;
const PAGE: usize = 4096;
/// PERF_RECORD_AUX: its header, the offset, the size, and then flags.
const FLAGS: usize = 24;

/// Intel PT of perf.
#[derive(Clone, Debug)]
pub struct Perf {
    pmu: IntelPt,
}

impl Perf {
    /// This host's.
    ///
    /// # Errors
    /// One line: perf has none.
    pub fn here() -> Result<Self, PtError> {
        IntelPt::read(Path::new(PMU)).map(|pmu| Perf { pmu })
    }

    /// Tries whether it records at all, while KVM has a virtual machine.
    ///
    /// # Errors
    /// One line: why not.
    pub fn try_out(&self) -> Result<(), PtError> {
        if is_paranoid(std::fs::read_to_string(PARANOID).unwrap_or_default().trim()) {
            return Err(PtError::Paranoid);
        }
        let ctl = RtitCtl::new().with_os(true).with_user(true).with_branch_en(true);
        let mut event = Event::open(&self.pmu, ctl, &[]).map_err(why)?;
        let mut bytes = Vec::new();
        event.stop().map_err(why)?;
        event.take(&mut bytes);
        match (event.partial, bytes.is_empty()) {
            (true, _) => Err(PtError::NotInGuests),
            (false, true) => Err(PtError::Nothing),
            (false, false) => Ok(()),
        }
    }
}

/// Who may use perf.
const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";

/// Whether the level is one at which CAP_PERFMON, which the jail leaves, is not enough: Linux ends with 2.
fn is_paranoid(level: &str) -> bool {
    level.parse().is_ok_and(|level: i32| level > 2)
}

/// Why perf refuses an event.
fn why(error: io::Error) -> PtError {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => PtError::Permission,
        Some(libc::EBUSY) => PtError::LastBranches,
        _ => PtError::Perf(Arc::new(error)),
    }
}

impl Traces for Perf {
    fn served(&self, caps: &PtCaps) -> Served {
        self.pmu.served(caps)
    }

    fn start(&self, ctl: RtitCtl, filter: &[(u64, u64)]) -> io::Result<Box<dyn Tracer>> {
        Ok(Box::new(Event::open(&self.pmu, ctl, filter)?))
    }
}

/// A mapping of the event's file.
#[derive(Debug)]
struct Mapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: It is memory, that any thread may reach through the one owner.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(file: &File, offset: usize, len: usize) -> io::Result<Self> {
        let (access, offset) = (libc::PROT_READ | libc::PROT_WRITE, offset as libc::off_t);
        // SAFETY: A new mapping, at a place of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), offset) };
        match base {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            base => Ok(Mapping { base, len }),
        }
    }

    /// Appends the bytes from `from` to `to`, two counts of bytes that have gone through the `size` bytes at `at`, a power of two.
    /// They are no more than that many.
    fn copy(&self, at: usize, size: usize, from: u64, to: u64, into: &mut Vec<u8>) {
        assert!(at + size <= self.len && size.is_power_of_two());
        let len = (to.wrapping_sub(from) as usize).min(size);
        let first = from as usize & (size - 1);
        for (start, len) in [(first, len.min(size - first)), (0, len.saturating_sub(size - first))] {
            // SAFETY: Within the mapping, by the assertion above. The kernel does not write there before the tail has been moved
            // behind these bytes, which is this thread's to do.
            let part = unsafe { std::slice::from_raw_parts(self.base.cast::<u8>().add(at + start), len) };
            into.extend_from_slice(part);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: Ours, and nobody has a reference into it.
        unsafe { libc::munmap(self.base, self.len) };
    }
}

/// A counter of the mapping's first page, that one side moves and the other reads.
fn counter(field: *mut u64) -> &'static AtomicU64 {
    // SAFETY: The field is in the event's first page, which lives as long as the event, and the reference is used within its
    // methods only; kernel and program access it as an atomic.
    unsafe { AtomicU64::from_ptr(field) }
}

/// An event on the thread that has opened it.
#[derive(Debug)]
struct Event {
    // The AUX area goes first: the kernel unmaps in that order.
    packets: Mapping,
    records: Mapping,
    file: File,
    stopped: bool,
    /// perf has said that it could not trace for a while.
    partial: bool,
}

impl Event {
    fn open(pmu: &IntelPt, ctl: RtitCtl, filter: &[(u64, u64)]) -> io::Result<Self> {
        let mut attributes = perf_event_attr {
            type_: pmu.kind,
            size: size_of::<perf_event_attr>() as u32,
            config: pmu.config(ctl),
            aux_watermark: (PAGES[PAGES.len() - 1] * PAGE / 2) as u32,
            ..Default::default()
        };
        attributes.set_disabled(1);
        attributes.set_exclude_host(1);
        attributes.set_exclude_hv(1);
        let (thread, any_cpu, no_group) = (0, -1, -1);
        let flags = c_ulong::from(PERF_FLAG_FD_CLOEXEC);
        // SAFETY: The structure is as long as it says, and the kernel reads no more of it.
        let fd = unsafe { perf_event_open_sys::perf_event_open(&mut attributes, thread, any_cpu, no_group, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: A new descriptor, that nobody else has.
        let file = unsafe { File::from_raw_fd(fd) };
        if !filter.is_empty() {
            let text = CString::new(IntelPt::filters(filter)).unwrap_or_default();
            // SAFETY: The argument is a string that ends in 0, and the kernel copies it.
            let done = unsafe { perf_event_open_sys::ioctls::SET_FILTER(fd, text.as_ptr().cast_mut()) };
            succeeded(done)?;
        }
        let records = Mapping::new(&file, 0, (1 + RECORDS) * PAGE)?;
        let page = records.base.cast::<perf_event_mmap_page>();
        let offset = records.len;
        let mut packets = Err(io::ErrorKind::OutOfMemory.into());
        for pages in PAGES {
            // SAFETY: Fields of the first page, which are the program's to set before it maps the area.
            unsafe {
                (*page).aux_offset = offset as u64;
                (*page).aux_size = (pages * PAGE) as u64;
            }
            packets = Mapping::new(&file, offset, pages * PAGE);
            if packets.is_ok() {
                break;
            }
        }
        wake(fd)?;
        let mut event = Event {
            packets: packets?,
            records,
            file,
            stopped: true,
            partial: false,
        };
        event.enable()?;
        Ok(event)
    }

    fn page(&self) -> *mut perf_event_mmap_page {
        self.records.base.cast()
    }

    fn enable(&mut self) -> io::Result<()> {
        // SAFETY: It takes a number.
        succeeded(unsafe { perf_event_open_sys::ioctls::ENABLE(self.file.as_raw_fd(), 0) })?;
        self.stopped = false;
        Ok(())
    }

    /// Reads the kernel's records: whether packets are lost.
    fn read_records(&mut self) -> bool {
        let page = self.page();
        // SAFETY: Addresses of fields of the first page; nothing is read through them here.
        let (head, tail) = unsafe { (counter(&raw mut (*page).data_head), counter(&raw mut (*page).data_tail)) };
        let (from, to) = (tail.load(Ordering::Relaxed), head.load(Ordering::Acquire));
        let mut bytes = Vec::new();
        self.records.copy(PAGE, RECORDS * PAGE, from, to, &mut bytes);
        tail.store(to, Ordering::Release);
        let flags = aux_flags(&bytes);
        self.partial |= flags & u64::from(PERF_AUX_FLAG_PARTIAL) != 0;
        flags & u64::from(PERF_AUX_FLAG_TRUNCATED | PERF_AUX_FLAG_PARTIAL) != 0
    }
}

/// The flags of all PERF_RECORD_AUX among these records.
fn aux_flags(mut records: &[u8]) -> u64 {
    let mut all = 0;
    while let Some((header, _)) = records.split_first_chunk::<8>() {
        let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        let size = usize::from(u16::from_le_bytes([header[6], header[7]])).max(8);
        let Some((record, rest)) = records.split_at_checked(size) else {
            break;
        };
        if kind == PERF_RECORD_AUX
            && let Some(flags) = record.get(FLAGS..FLAGS + 8).and_then(|flags| flags.first_chunk())
        {
            all |= u64::from_le_bytes(*flags);
        }
        records = rest;
    }
    all
}

fn succeeded(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has the event send the calling thread the signal that gets a vCPU out of the guest whenever packets wait.
fn wake(fd: c_int) -> io::Result<()> {
    // From <fcntl.h>, of GNU's extensions.
    const F_SETSIG: c_int = 10;
    const F_SETOWN_EX: c_int = 15;
    #[repr(C)]
    struct Owner {
        kind: c_int,
        pid: libc::pid_t,
    }
    // SAFETY: It has no preconditions.
    let pid = unsafe { libc::gettid() };
    // F_OWNER_TID is 0.
    let owner = Owner { kind: 0, pid };
    // SAFETY: The argument is of the type that this command reads.
    succeeded(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
    // SAFETY: They take numbers.
    unsafe {
        succeeded(libc::fcntl(fd, F_SETSIG, SIGRTMIN()))?;
        succeeded(libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC))
    }
}

impl Tracer for Event {
    fn take(&mut self, into: &mut Vec<u8>) -> Taken {
        let page = self.page();
        // SAFETY: Addresses of fields of the first page; nothing is read through them here.
        let (head, tail) = unsafe { (counter(&raw mut (*page).aux_head), counter(&raw mut (*page).aux_tail)) };
        let lost = self.read_records();
        let (from, to) = (tail.load(Ordering::Relaxed), head.load(Ordering::Acquire));
        self.packets.copy(0, self.packets.len, from, to, into);
        tail.store(to, Ordering::Release);
        if lost && !self.stopped {
            // A full buffer has stopped it. Where it cannot go on the packets are missing, which the guest is told.
            let _ = self.enable();
        }
        Taken { lost }
    }

    fn stop(&mut self) -> io::Result<()> {
        // SAFETY: It takes a number.
        succeeded(unsafe { perf_event_open_sys::ioctls::DISABLE(self.file.as_raw_fd(), 0) })?;
        self.stopped = true;
        Ok(())
    }
}

#[cfg(test)]
#[path = "perf_test.rs"]
mod tests;
