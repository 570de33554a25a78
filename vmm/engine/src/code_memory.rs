//! Memory that host code is put in and run from: never writable and executable at one address.
//!
//! One memory file is mapped twice, for writing at one address and for running at another. The other way, changing the rights of one
//! mapping back and forth (mprotect), needs a system call for each piece of code, which the process's jail would have to allow for as
//! long as the guest runs; and while the rights are those for writing no other thread can run what is there. Both mappings are made
//! before the jail closes, and nothing about them changes afterwards.
// The engine core is one of the rooms where `unsafe` is allowed: mapping executable memory and writing code to it is what this file is
// for.
#![allow(unsafe_code)]

use core::arch::x86_64::__cpuid;
use core::ffi::CStr;
use std::sync::OnceLock;

/// Where each piece of code begins is a multiple of this: what the host fetches at a time.
const ALIGN: usize = 16;
/// What the processor writes at once lies in one of these.
pub(crate) const LINE: usize = 64;

/// A stretch of executable memory, filled from its beginning.
pub(crate) struct CodeMemory {
    writable: *mut u8,
    executable: *mut u8,
    len: usize,
    used: usize,
}

// SAFETY: Both mappings belong to this value alone and to no thread in particular; writing takes it exclusively.
unsafe impl Send for CodeMemory {}

impl CodeMemory {
    /// Maps `len` bytes, a multiple of 4096; memory is taken as they are filled. `None`: this host gives no executable memory, or not
    /// so much. `name` is what the mappings have in `/proc/PID/maps`.
    pub fn map(name: &CStr, len: usize) -> Option<CodeMemory> {
        // SAFETY: A plain system call.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return None;
        }
        // SAFETY: The descriptor is ours; new mappings, at addresses of the kernel's choice, touch nobody's memory.
        let map =
            |protection| match unsafe { libc::mmap(core::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, 0) } {
                libc::MAP_FAILED => core::ptr::null_mut(),
                at => at.cast::<u8>(),
            };
        let mut memory = CodeMemory {
            writable: core::ptr::null_mut(),
            executable: core::ptr::null_mut(),
            len,
            used: 0,
        };
        // SAFETY: The descriptor is ours.
        if unsafe { libc::ftruncate(fd, len as libc::off_t) } == 0 {
            memory.writable = map(libc::PROT_READ | libc::PROT_WRITE);
            memory.executable = map(libc::PROT_READ | libc::PROT_EXEC);
        }
        // SAFETY: The descriptor is ours, and not used again; mappings outlive it.
        unsafe { libc::close(fd) };
        // One mapping without the other goes with `memory`.
        (!memory.writable.is_null() && !memory.executable.is_null()).then_some(memory)
    }

    /// Where the next piece of code will be run from.
    pub fn next(&self) -> u64 {
        self.executable as u64 + self.used as u64
    }

    /// How many bytes are taken.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Reads code back.
    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(
            at.checked_add(len).is_some_and(|end| end <= self.used),
            "there are no {len} bytes at {at}"
        );
        // SAFETY: The bytes are within the mapping and have been written; only `put` and `patch` write, which take this value
        // exclusively.
        unsafe { core::slice::from_raw_parts(self.writable.add(at), len) }.to_vec()
    }

    /// Forgets all code. Nobody runs any of it, or will.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// Adds a piece of code: where it is run from, for as long as this value is there. `None`: no room is left for it.
    pub fn put(&mut self, code: &[u8]) -> Option<*const u8> {
        let at = self.used;
        let end = at.checked_add(code.len())?.checked_next_multiple_of(ALIGN)?;
        if end > self.len {
            return None;
        }
        // SAFETY: [at, end) is within the mapping. Nobody has been notified of these bytes, so that nobody runs or reads them.
        unsafe { core::ptr::copy_nonoverlapping(code.as_ptr(), self.writable.add(at), code.len()) };
        serialize();
        self.used = end;
        // SAFETY: As above.
        Some(unsafe { self.executable.add(at) })
    }
}

impl CodeMemory {
    /// Replaces the 32-bit distance of a branch that is `at` bytes from the beginning, within a line of the cache: whoever runs it
    /// takes the old or the new one.
    pub fn patch(&mut self, at: usize, distance: i32) {
        assert!(
            at + 4 <= self.used && at % LINE <= LINE - 4,
            "the distance at {at} cannot be replaced in one step"
        );
        // SAFETY: The bytes are within the mapping. The processor writes what does not cross a line at once (SDM Vol. 3A 10.1.1
        // "Guaranteed Atomic Operations"), and this thread reads them nowhere.
        unsafe { self.writable.add(at).cast::<i32>().write_unaligned(distance) };
        serialize();
    }

    /// How far from the beginning a piece of code is that [`CodeMemory::put`] gave.
    pub fn offset_of(&self, code: *const u8) -> usize {
        code as usize - self.executable as usize
    }
}

/// Code that was written at another linear address wants a serializing instruction before it is fetched (SDM Vol. 3A 9.1.3 "Handling
/// Self- and Cross-Modifying Code"). IRET is one, and unlike CPUID no hypervisor intercepts it. QEMU's software CPU, which intercepts
/// nothing, reads the frame of an IRET in ring 3 as the kernel would, so that SMAP refuses it: there it is CPUID.
fn serialize() {
    static BY_CPUID: OnceLock<bool> = OnceLock::new();
    if *BY_CPUID.get_or_init(in_qemus_software_cpu) {
        __cpuid(0);
        return;
    }
    // SAFETY: The frame leads to the next instruction, with everything as it is. The compiler leaves the stack below RSP alone, since
    // nothing says that this does not use it.
    unsafe {
        core::arch::asm!(
            "mov {stack}, rsp",
            "mov {word:e}, ss",
            "push {word}",
            "push {stack}",
            "pushfq",
            "mov {word:e}, cs",
            "push {word}",
            "lea {word}, [rip + 2f]",
            "push {word}",
            "iretq",
            "2:",
            stack = out(reg) _,
            word = out(reg) _,
        );
    }
}

/// As the hypervisor's leaf of CPUID names it.
fn in_qemus_software_cpu() -> bool {
    const HYPERVISOR: u32 = 1 << 31;
    if __cpuid(1).ecx & HYPERVISOR == 0 {
        return false;
    }
    let leaf = __cpuid(0x4000_0000);
    [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).concat() == b"TCGTCGTCGTCG"
}

impl Drop for CodeMemory {
    fn drop(&mut self) {
        for at in [self.writable, self.executable].into_iter().filter(|at| !at.is_null()) {
            // SAFETY: The mapping is ours, `len` bytes long, and whoever was told of code in it has been told for how long.
            unsafe { libc::munmap(at.cast(), self.len) };
        }
    }
}

#[cfg(test)]
#[path = "code_memory_test.rs"]
mod tests;
