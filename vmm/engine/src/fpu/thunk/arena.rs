//! Where the machine code of thunks lives: one arena a process, mapped twice.
#![allow(unsafe_code)] // Mapping executable memory and writing code to it is what this file is for.

use super::{Entry, NoThunk};
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

/// Room for every form with every immediate, several times over; touched as it fills.
const ARENA: usize = 8 << 20;

/// The code of all thunks, at two addresses.
struct Arena {
    writable: *mut u8,
    executable: *const u8,
    used: usize,
    known: HashMap<Vec<u8>, usize>,
}

// SAFETY: the mappings are process-wide and never unmapped; the pointers are used under the mutex.
unsafe impl Send for Arena {}

/// The process's one arena; none where the system gives no executable memory.
fn shared() -> Option<&'static Mutex<Arena>> {
    static SHARED: OnceLock<Option<Mutex<Arena>>> = OnceLock::new();
    SHARED.get_or_init(|| Arena::map().map(Mutex::new)).as_ref()
}

/// Whether thunks can be made here: to be asked before a guest runs, which could only be told #UD.
pub fn available() -> bool {
    shared().is_some()
}

/// The address of `code` in the arena, added if it is new.
pub(super) fn entry(code: &[u8]) -> Result<Entry, NoThunk> {
    let arena = shared().ok_or(NoThunk::NoMemory)?;
    // A panic cannot leave an entry half made: the table is written last.
    let mut arena = arena.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    arena.entry(code)
}

impl Arena {
    fn map() -> Option<Arena> {
        // SAFETY: plain system calls on a descriptor that we own; the results are checked.
        unsafe {
            let fd = libc::memfd_create(c"engine-thunks".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return None;
            }
            let map = |protection| {
                let at = libc::mmap(std::ptr::null_mut(), ARENA, protection, libc::MAP_SHARED, fd, 0);
                if at == libc::MAP_FAILED {
                    None
                } else {
                    Some(at.cast::<u8>())
                }
            };
            let arena = if libc::ftruncate(fd, ARENA as libc::off_t) == 0 {
                match (
                    map(libc::PROT_READ | libc::PROT_WRITE),
                    map(libc::PROT_READ | libc::PROT_EXEC),
                ) {
                    (Some(writable), Some(executable)) => Some(Arena {
                        writable,
                        executable,
                        used: 0,
                        known: HashMap::new(),
                    }),
                    _ => None,
                }
            } else {
                None
            };
            libc::close(fd);
            arena
        }
    }

    fn entry(&mut self, code: &[u8]) -> Result<Entry, NoThunk> {
        let at = match self.known.get(code) {
            Some(&at) => at,
            None => {
                let at = self.used;
                let end = at + code.len().next_multiple_of(16);
                if end > ARENA {
                    return Err(NoThunk::NoMemory);
                }
                // SAFETY: [at, end) lies within the mapping, and nothing has been told of these bytes yet.
                unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), self.writable.add(at), code.len()) };
                // Code written through another linear address wants a serialising instruction before it is fetched
                // (SDM Vol. 3A 8.1.3 "Handling Self- and Cross-Modifying Code").
                std::arch::x86_64::__cpuid(0);
                self.used = end;
                self.known.insert(code.to_vec(), at);
                at
            }
        };
        // SAFETY: complete code of this signature stands there, and the arena is never unmapped or overwritten.
        Ok(unsafe { std::mem::transmute::<*const u8, Entry>(self.executable.add(at)) })
    }
}
