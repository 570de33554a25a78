//! SIGINT, SIGTERM, SIGHUP and SIGQUIT end a run in good order; a second one but SIGHUP ends it at once.
//!
//! timeout(1) sends its signal to the process and again to its group, so the same signal counts as a second one only after a while.

use std::{
    io,
    os::fd::{AsRawFd, RawFd},
    sync::{
        OnceLock,
        atomic::{AtomicI32, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use libc::{EFD_CLOEXEC, EFD_NONBLOCK, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ, c_int, c_void, siginfo_t};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::EventFd,
    signal::register_signal_handler,
};

use crate::{error::Status, terminal};

/// The first signal that came; 0 for none.
static PENDING: AtomicI32 = AtomicI32::new(0);
/// When it came, in milliseconds from [`STARTED`].
static CAME: AtomicU64 = AtomicU64::new(0);
/// When the signals were taken over.
static STARTED: OnceLock<Instant> = OnceLock::new();
/// The same signal so soon after the first is a repetition of it, as timeout(1) sends one.
const AGAIN: Duration = Duration::from_millis(250);
/// Wakes whoever waits for events.
static WAKE: OnceLock<EventFd> = OnceLock::new();

/// Does nothing, so that the system call fails with its error instead of ending the process.
extern "C" fn pass(_: c_int, _: *mut siginfo_t, _: *mut c_void) {}

extern "C" fn note(signal: c_int, _: *mut siginfo_t, _: *mut c_void) {
    // Atomics, clock_gettime(2) and write(2): all are safe in a handler.
    let now = STARTED.get().map_or(Duration::ZERO, Instant::elapsed);
    let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    match PENDING.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => CAME.store(now, Ordering::Relaxed),
        Err(_) if signal == SIGHUP => {}
        Err(first) => {
            let again = now.saturating_sub(CAME.load(Ordering::Relaxed)) >= AGAIN.as_millis() as u64;
            if first != signal || again {
                let line = match signal {
                    SIGINT => &b"minivmm: SIGINT after another signal: ended at once\n"[..],
                    SIGTERM => b"minivmm: SIGTERM after another signal: ended at once\n",
                    _ => b"minivmm: SIGQUIT after another signal: ended at once\n",
                };
                terminal::leave_at_once(line, Status::Usage.code());
            }
        }
    }
    if let Some(wake) = WAKE.get() {
        let _ = wake.write(1);
    }
}

/// Takes the signals over. System calls that wait are interrupted by them, not restarted.
pub fn install() -> io::Result<()> {
    if WAKE.get().is_none() {
        let _ = WAKE.set(EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?);
    }
    let _ = STARTED.set(Instant::now());
    for signal in [SIGINT, SIGTERM, SIGHUP, SIGQUIT] {
        register_signal_handler(signal, note).map_err(io::Error::from)?;
    }
    // A write to a disk that the limit of file sizes forbids is an I/O error of the guest's.
    register_signal_handler(SIGXFSZ, pass).map_err(io::Error::from)?;
    Ok(())
}

/// Takes the signals over for work that looks at none: the first one has `end` called, on a thread of its own.
///
/// # Errors
/// The system's.
pub fn at_first(end: impl FnOnce(c_int) + Send + 'static) -> io::Result<()> {
    install()?;
    let epoll = Epoll::new()?;
    if let Some(wake) = wake_fd() {
        epoll.ctl(ControlOperation::Add, wake, EpollEvent::new(EventSet::IN, 0))?;
    }
    let wait = move || {
        let mut events = [EpollEvent::default()];
        loop {
            let _ = epoll.wait(-1, &mut events);
            if let Some(signal) = pending() {
                return end(signal);
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait).map(drop)
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
