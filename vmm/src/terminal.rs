//! The terminal's mode, and what is only known before `main`.
//!
//! # Why `unsafe` is allowed here
//!
//! `vmm-sys-util` can make a terminal raw, but puts it back by turning three flags on, whatever they were. A terminal is to
//! be left exactly as it was, which takes `tcgetattr` and `tcsetattr`. And the runtime opens /dev/null on standard streams
//! that are closed before `main` runs, so whether they were has to be asked earlier.
#![allow(unsafe_code)]

use std::{
    io,
    mem::MaybeUninit,
    sync::atomic::{AtomicBool, AtomicPtr, Ordering},
};

use libc::{STDERR_FILENO, STDIN_FILENO, TCSANOW, c_int, termios};

/// The mode to go back to, while the terminal is raw. What it points to is never freed, so that a signal's handler that has read the
/// pointer may use it.
static SAVED: AtomicPtr<termios> = AtomicPtr::new(std::ptr::null_mut());

static STDIN_WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// The loader calls this before the runtime touches the standard streams.
extern "C" fn look_at_stdin() {
    // SAFETY: F_GETFD takes no third argument and touches nothing.
    let flags = unsafe { libc::fcntl(STDIN_FILENO, libc::F_GETFD) };
    STDIN_WAS_CLOSED.store(flags < 0, Ordering::Relaxed);
}

// SAFETY: `.init_array` holds pointers to functions of the C calling convention, which the loader calls one by one before
// `main`. The function uses a system call and an atomic, and so needs nothing of the Rust runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STDIN: extern "C" fn() = look_at_stdin;

/// True if the process was started without a standard input.
pub fn stdin_was_closed() -> bool {
    STDIN_WAS_CLOSED.load(Ordering::Relaxed)
}

/// Standard input's terminal is raw as long as this lives.
#[derive(Debug)]
pub struct RawMode(());

impl RawMode {
    /// Makes standard input's terminal raw; `None` if it is no terminal.
    ///
    /// Bytes come one by one and unchanged, and no key is a signal. Output processing stays on, so that lines of ours on
    /// stderr still begin at the left.
    pub fn enter() -> io::Result<Option<RawMode>> {
        let mut mode = MaybeUninit::<termios>::uninit();
        // SAFETY: tcgetattr writes a whole termios, and nothing when it fails.
        if unsafe { libc::tcgetattr(STDIN_FILENO, mode.as_mut_ptr()) } != 0 {
            return Ok(None);
        }
        // SAFETY: tcgetattr has succeeded.
        let saved = unsafe { mode.assume_init() };
        let mut raw = saved;
        // SAFETY: cfmakeraw changes the termios it is given.
        unsafe { libc::cfmakeraw(&mut raw) };
        raw.c_oflag = saved.c_oflag;
        if SAVED.load(Ordering::Acquire).is_null() {
            SAVED.store(Box::into_raw(Box::new(saved)), Ordering::Release);
        }
        // SAFETY: `raw` is a whole termios that is only read.
        if unsafe { libc::tcsetattr(STDIN_FILENO, TCSANOW, &raw) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Some(RawMode(())))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts the terminal back as it was, if it is raw. For ways out on which nothing is dropped, too; may be called by a signal's handler:
/// tcsetattr is among what signal-safety(7) allows.
pub fn restore() {
    let mode = SAVED.swap(std::ptr::null_mut(), Ordering::AcqRel);
    if !mode.is_null() {
        // SAFETY: The pointer is of a box that holds what tcgetattr gave and that nobody frees or changes.
        unsafe { libc::tcsetattr(STDIN_FILENO, TCSANOW, mode) };
    }
}

/// Ends the process at once, with a line on stderr, where that has room for it, and the terminal as it was. May be called by a signal's
/// handler: poll, write and _exit are among what signal-safety(7) allows.
pub fn leave_at_once(line: &[u8], status: c_int) -> ! {
    restore();
    // A full pipe that nobody reads would wait, and may be what the first signal's end waits for.
    let mut room = libc::pollfd {
        fd: STDERR_FILENO,
        events: libc::POLLOUT,
        revents: 0,
    };
    // SAFETY: `room` is one whole pollfd.
    if unsafe { libc::poll(&mut room, 1, 0) } == 1 {
        // SAFETY: The pointer and the length are of one slice, which is only read.
        unsafe { libc::write(STDERR_FILENO, line.as_ptr().cast(), line.len()) };
    }
    // SAFETY: It ends the process, whatever other threads hold.
    unsafe { libc::_exit(status) }
}
