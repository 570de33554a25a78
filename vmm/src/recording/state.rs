//! What the observers of a machine's vCPUs share with its recorder.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use trace::directory::sink::{Hashing, Room};
use trace::format::PAGE;
use trace::linux::{Guests, Recording};

use super::options::{OnError, RecordingOptions};
use super::trigger::When;

/// Changed pages that are remembered for vCPUs that have not run since.
pub(super) const CHANGES: usize = 1 << 16;

/// The last contents of physical pages that code was executed from.
#[derive(Debug, Default)]
pub(super) struct Pool {
    pub pages: HashMap<u64, Arc<Content>>,
    /// Pages that changed, in order, and how many were dropped before the first.
    pub changes: VecDeque<u64>,
    pub dropped: u64,
}

/// A page's bytes.
#[derive(Debug)]
pub(super) struct Content {
    pub bytes: [u8; PAGE],
    pub hash: u128,
}

/// The state of a recording: which code was reported, what is waited for, what went wrong.
#[derive(Debug)]
pub(super) struct RecordingState {
    pub pool: Mutex<Pool>,
    /// Changes ever, as a number that can be looked at for little.
    pub changed: AtomicU64,
    pub hashing: Hashing,
    /// The recording is to end.
    pub finish: AtomicBool,
    /// How many of the steps have come at which segments begin.
    pub cuts: AtomicUsize,
    /// Writing failed.
    pub failed: AtomicBool,
    pub error: Mutex<Option<io::Error>>,
    pub on_error: OnError,
    /// What may be written yet.
    pub room: Room,
    /// Something is recorded now.
    pub on: AtomicBool,
    start: Option<When>,
    stop: Option<When>,
    /// Conditions that hold once have held.
    spent: [AtomicBool; 2],
    /// Instructions that each vCPU has retired, as far as it has said.
    pub retired: Vec<AtomicU64>,
    pub linux: Mutex<LinuxWatch>,
    /// Where Linux goes over to another thread; 0 as long as that is not known.
    pub thread_switch_at: AtomicU64,
    /// Where a process begins to run another program, with its name; 0 as long as that is not known.
    pub exec_at: AtomicU64,
    /// [`Guests::finds`].
    pub guests_found: AtomicU64,
}

/// What is found out about the Linux in the guest, and when it is looked for again.
#[derive(Debug, Default)]
pub(super) struct LinuxWatch {
    pub recording: Recording,
    /// The guests of a hypervisor in the machine.
    pub guests: Guests,
    /// The step of the next look.
    pub due: u64,
    /// When the run is to end, as far as it is known.
    pub deadline: Option<Instant>,
    /// There is something new to write.
    pub new: bool,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RecordingState {
    /// Of a recording that begins; a Linux is looked for at a step.
    pub fn new(options: &RecordingOptions, cpus: usize, look: u64) -> RecordingState {
        RecordingState {
            pool: Mutex::default(),
            changed: AtomicU64::new(0),
            hashing: Hashing::default(),
            finish: AtomicBool::new(false),
            cuts: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            on_error: options.on_error,
            room: Room::new(options.limit),
            on: AtomicBool::new(options.start.is_none()),
            start: options.start.clone(),
            stop: options.stop.clone(),
            spent: Default::default(),
            retired: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            linux: Mutex::new(LinuxWatch {
                due: look,
                ..LinuxWatch::default()
            }),
            thread_switch_at: AtomicU64::new(0),
            exec_at: AtomicU64::new(0),
            guests_found: AtomicU64::new(0),
        }
    }

    pub fn fail(&self, error: io::Error) {
        lock(&self.error).get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// What is waited for now.
    pub fn trigger(&self) -> Option<&When> {
        let on = self.on.load(Ordering::Relaxed);
        let when = if on { &self.stop } else { &self.start };
        when.as_ref()
            .filter(|_| !self.spent[usize::from(on)].load(Ordering::Relaxed))
    }

    /// It has happened.
    pub fn pull(&self, when: &When) {
        let on = self.on.load(Ordering::Relaxed);
        if matches!(when, When::Instructions(_)) {
            self.spent[usize::from(on)].store(true, Ordering::Relaxed);
        }
        self.switch(!on);
    }

    /// Begins or stops recording.
    pub fn switch(&self, on: bool) {
        if on {
            // What was executed meanwhile was not announced.
            lock(&self.pool).pages.clear();
        }
        self.on.store(on, Ordering::Relaxed);
    }

    /// Where Linux goes over to another thread, once that is known.
    pub fn thread_switch(&self) -> Option<u64> {
        match self.thread_switch_at.load(Ordering::Relaxed) {
            0 => None,
            at => Some(at),
        }
    }

    /// Where a process begins to run another program, once that is known.
    pub fn exec(&self) -> Option<u64> {
        match self.exec_at.load(Ordering::Relaxed) {
            0 => None,
            at => Some(at),
        }
    }

    pub fn retired(&self) -> u64 {
        self.retired.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}
