//! SIGINT, SIGTERM, SIGHUP and SIGQUIT end a run in good order.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        OnceLock,
        atomic::{AtomicI32, Ordering},
    },
};

use libc::{EFD_CLOEXEC, EFD_NONBLOCK, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ, c_int, c_void, siginfo_t};
use vmm_sys_util::{eventfd::EventFd, signal::register_signal_handler};

/// The first signal that came; 0 for none.
static PENDING: AtomicI32 = AtomicI32::new(0);
/// Wakes whoever waits for events.
static WAKE: OnceLock<EventFd> = OnceLock::new();

/// Does nothing, so that the system call fails with its error instead of ending the process.
extern "C" fn pass(_: c_int, _: *mut siginfo_t, _: *mut c_void) {}

extern "C" fn note(signal: c_int, _: *mut siginfo_t, _: *mut c_void) {
    // An atomic and a write(2): both are safe in a handler.
    let _ = PENDING.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
    if let Some(wake) = WAKE.get() {
        let _ = wake.write(1);
    }
}

/// Takes the signals over. System calls that wait are interrupted by them, not restarted.
pub fn install() -> io::Result<()> {
    if WAKE.get().is_none() {
        let _ = WAKE.set(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
    }
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
        register_signal_handler(signal, note).map_err(io::Error::from)?;
    }
    // A write to a disk that the limit of file sizes forbids is an I/O error of the guest's.
    register_signal_handler(SIGXFSZ, pass).map_err(io::Error::from)?;
    Ok(())
}

/// The first signal that came.
pub fn pending() -> Option<c_int> {
    Some(PENDING.load(Ordering::Relaxed)).filter(|signal| *signal != 0)
}

/// What is readable once a signal came, if the signals were taken over.
pub fn wake_fd() -> Option<RawFd> {
    WAKE.get().map(AsRawFd::as_raw_fd)
}

/// The signal's name.
pub fn name(signal: c_int) -> &'static str {
    match signal {
        SIGINT => "SIGINT",
        SIGTERM => "SIGTERM",
        SIGHUP => "SIGHUP",
        SIGQUIT => "SIGQUIT",
        _ => "a signal",
    }
}
