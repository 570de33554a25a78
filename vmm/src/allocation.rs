//! Memory that the system does not give: one line and status 6, where the runtime would abort.
//!
//! # Why `unsafe` is allowed here
//!
//! Guest RAM and what a file may make large is asked for by calls that can fail, and whoever asks says which option to change. For
//! everything else (a vector that grows, a thread's name) there is nobody to tell, and the runtime's own answer to a failed
//! allocation is SIGABRT, with a core dump that holds guest memory. A global allocator is an unsafe trait, so this one passes every
//! call on to the system's as it is and looks at the pointer that comes back, no more. It is the program's alone: a program that uses the
//! library chooses its own.
#![allow(unsafe_code)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    io::Write,
};

use crate::{error::Status, terminal};

/// The system's allocator, which ends the program where there is no memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct OrExit;

/// Passes on what there is.
fn checked(pointer: *mut u8, size: usize) -> *mut u8 {
    if pointer.is_null() {
        // On the stack: there may be no more memory at all.
        let mut line = [0; 128];
        let mut rest = &mut line[..];
        let _ = writeln!(
            rest,
            "minivmm: out of memory: the system did not give {size} bytes more (see `ulimit -v`)"
        );
        let left = rest.len();
        terminal::leave_at_once(&line[..line.len() - left], Status::Internal.code());
    }
    pointer
}

// SAFETY: Every function passes its arguments to the function of the same name of `System`, so what the caller promises of them is
// promised there, and what `System` promises of the pointer holds for the caller. No function allocates on its way out, and none unwinds.
unsafe impl GlobalAlloc for OrExit {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: The caller's promise about `layout` is the one that `System` asks for.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: As above.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: The pointer came from `System` by one of the other functions, with this layout: the caller promises it.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: As for `dealloc`, and the caller promises that `size` is one that the layout's alignment allows.
        checked(unsafe { System.realloc(pointer, layout, size) }, size)
    }
}
