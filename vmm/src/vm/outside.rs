//! What reaches a machine from outside while it runs, and who else may have it come back.

use std::sync::{
    Arc,
    atomic::{AtomicU8, Ordering},
};
use std::time::Duration;

use devices::virtio::Taken;
use libc::c_int;
use vmm_sys_util::eventfd::EventFd;

use crate::error::Error;

/// A moment of a run: steps so far, and ticks of the virtual clock. While all CPUs are halted the clock goes on alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Instructions and REP iterations so far, over all CPUs.
    pub steps: u64,
    /// Virtual time.
    pub ticks: u64,
}

/// Where something from outside enters the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inlet {
    /// The first serial port.
    Serial,
    /// A port of a virtio device, by its number among them.
    Virtio {
        /// The device.
        device: u8,
        /// Its port.
        port: u32,
    },
}

/// How a machine takes what enters.
pub type Enter<'a> = &'a mut dyn FnMut(Inlet, &[u8]) -> Taken;

/// Why the world outside ends a run.
#[derive(Debug)]
pub enum Leave {
    /// The user typed Ctrl-A x.
    Quit,
    /// One of the signals that end a process.
    Signal(c_int),
    /// Nobody reads standard output any more.
    OutputClosed,
    /// Output cannot be written, or waiting for events failed.
    Failed(Error),
}

impl From<Error> for Leave {
    fn from(error: Error) -> Self {
        Leave::Failed(error)
    }
}

/// The world outside a running machine: bytes for the first serial port, the wall clock's waits, and reasons to come back.
///
/// Nothing here may touch the machine: whoever wants to do so has [`Vm::advance`](super::Vm::advance) return.
pub trait Outside {
    /// Writes out what the guest has sent.
    ///
    /// # Errors
    /// The run is to end.
    fn flush(&mut self) -> Result<(), Leave>;

    /// Takes in what has arrived, without waiting.
    ///
    /// # Errors
    /// The run is to end.
    fn poll(&mut self) -> Result<(), Leave>;

    /// Waits for input, a request, a signal, or until the time is up; `None`: as long as it takes.
    ///
    /// # Errors
    /// The run is to end.
    fn wait(&mut self, at_most: Option<Duration>) -> Result<(), Leave>;

    /// Has a wait end when this becomes readable, too.
    ///
    /// # Errors
    /// The system refuses to wait for it.
    fn listen(&mut self, wake: EventFd) -> Result<(), Error>;

    /// Input that waits for the serial port.
    fn input(&mut self) -> &[u8];

    /// The serial port has taken the first `count` bytes of the input.
    ///
    /// # Errors
    /// The run is to end.
    fn consume(&mut self, count: usize) -> Result<(), Leave>;

    /// Whether more input may come.
    fn input_open(&mut self) -> bool;

    /// Whether somebody has a request for whoever drives the run. It comes back with [`StopReason::Outside`](super::StopReason::Outside) where
    /// a limit of steps would have it stand: the devices are at this step, and what is due is delivered.
    fn is_requested(&mut self) -> bool {
        false
    }

    /// Called at slice boundaries. `true`: the run is to come back now, with [`StopReason::Outside`](super::StopReason::Outside).
    fn comes_back(&mut self, _here: Moment) -> bool {
        false
    }

    /// Called in every round of the run, at a moment when input may enter: hands it to the machine. `true`: the run is to come back now.
    ///
    /// # Errors
    /// The run is to end.
    fn enter(&mut self, _here: Moment, enter: Enter<'_>) -> Result<bool, Leave> {
        if !self.input().is_empty()
            && let Taken::Bytes(taken) = enter(Inlet::Serial, self.input())
        {
            self.consume(taken)?;
        }
        Ok(false)
    }

    /// Whether something for a device has come that may enter at this moment.
    fn arrived(&mut self, _here: Moment) -> bool {
        false
    }

    /// Whether somebody outside answers in wall time: idle time passes as fast as there, on the virtual clock, too.
    fn follows_wall(&mut self) -> bool {
        false
    }

    /// The tick, later than now, at which something is known to enter before another step is made.
    fn enters_at(&mut self, _here: Moment) -> Option<u64> {
        None
    }

    /// Whether something is known to enter at this very moment, so that a machine that is halted does not wait for it.
    fn enters(&mut self, _here: Moment) -> bool {
        false
    }

    /// Steps from here until something is known to enter, or the run has to come back; `None`: it has to come back now.
    fn due(&mut self, _here: Moment) -> Option<u64> {
        Some(u64::MAX)
    }
}

/// Somebody has a request for whoever drives the run.
const REQUEST: u8 = 1;
/// Somebody wants the guest to stop.
const STOP: u8 = 2;

/// Has a run come back, from any thread: it does so when it looks at the outside next. A machine that may be waiting has to be
/// woken, too. Clones are of the same one.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicU8>);

impl Interrupt {
    /// There is a request for whoever drives the run.
    pub fn request(&self) {
        self.0.fetch_or(REQUEST, Ordering::SeqCst);
    }

    /// The guest is to stop, even one that is on its way back in time.
    pub fn stop(&self) {
        self.0.fetch_or(STOP, Ordering::SeqCst);
    }

    /// Whether there is either.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst) != 0
    }

    /// Whether the guest is to stop.
    pub fn is_stop(&self) -> bool {
        self.0.load(Ordering::SeqCst) & STOP != 0
    }

    /// Whether the guest was to stop; both are taken back.
    pub fn take(&self) -> bool {
        self.0.swap(0, Ordering::SeqCst) & STOP != 0
    }
}
