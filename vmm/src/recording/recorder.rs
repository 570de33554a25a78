//! The recorder: an observer of each vCPU that writes what a decoder needs.
//!
//! # Theory
//! The observer's own trace unit makes the packets; the guest's is another one and may do what it likes. Packets tell the way
//! through the code, so the code has to be there, too, as it was when it was executed. The engine says which pages it
//! translates for fetching and which bytes it decodes. A page that was never seen at its address is told as soon as it is
//! fetched from: that is true for all time before, since nothing was executed there. A page whose bytes, when they are decoded
//! or translated anew, are not those that were told last has changed: that is true from this instruction on. So before a
//! change is told the pending TNT bits are sent and a PSB with the whole state; the change stands at that PSB, where any
//! decoder can change its image.
//!
//! # Practice
//! vCPUs share memory, so the last contents of each physical page are shared ([`Pool`]); a vCPU that gets its turn hears which
//! of them changed while others had theirs, and tells its own stream before it executes anything. Where a translation leads to
//! another page than before, the TLB forgets the old one in all its address spaces, so that addresses above bit 63 can count as
//! one space for all CR3s, as operating systems have it, and stay exact for guests that do otherwise.
//!
//! Packets carry virtual time instead of the guest's TSC.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use machine::memory::Memory;
use trace::directory::folder;
use trace::directory::sink::Hashing;
use trace::format::{Header, HeaderEnd, PAGE};
use trace::linux::Recording;
use x86::model::CpuModel;
use x86::pt::{PtCaps, RtitCtl};

use super::guest_memory::GuestMemory;
use super::observer::Observer;
use super::options::{OnError, Options};
use super::trigger::When;

/// PSBs every 16 KiB.
const PSB_FREQ: u8 = 3;
/// An MTC packet every 32768 steps.
const MTC_FREQ: u8 = 15;

/// Changed pages that are remembered for vCPUs that have not run since.
pub(super) const CHANGES: usize = 1 << 16;

/// What the observers' trace units can do, whatever the model: everything that a decoder is better off with.
pub fn caps(model: &CpuModel) -> PtCaps {
    PtCaps {
        // CR3 filter; PSBFreq and CYC; IP filters; MTC.
        ebx: 0xf,
        // Single range; linear addresses.
        ecx: 1 << 31 | 1 << 2,
        // Four ranges; all values of MTCFreq.
        encodings: 0xffff_0004,
        // All values of PSBFreq and CycThresh.
        frequencies: 0xffff_ffff,
        crystal: (1, 1),
        ratio: u8::try_from(model.tsc_khz / 100_000).unwrap_or(u8::MAX),
        physical_bits: 52,
        linear_bits: 64,
        excludes_lbr: false,
    }
}

/// The control register without filters and TraceEn.
pub const CTL: RtitCtl = RtitCtl::new()
    .with_branch_en(true)
    .with_tsc_en(true)
    .with_mtc_en(true)
    .with_mtc_freq(MTC_FREQ)
    .with_psb_freq(PSB_FREQ);

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

/// What the observers share.
#[derive(Debug)]
pub(super) struct Shared {
    pub pool: Mutex<Pool>,
    /// Changes ever, as a number that can be looked at for little.
    pub changed: AtomicU64,
    pub hashing: Hashing,
    /// The recording is to end.
    pub finish: AtomicBool,
    /// Writing failed.
    pub failed: AtomicBool,
    error: Mutex<Option<io::Error>>,
    on_error: OnError,
    /// Something is recorded now.
    pub on: AtomicBool,
    start: Option<When>,
    stop: Option<When>,
    /// Conditions that hold once have held.
    spent: [AtomicBool; 2],
    /// Instructions that each vCPU has retired, as far as it has said.
    pub retired: Vec<AtomicU64>,
    pub linux: Mutex<Linux>,
}

/// What is found out about the Linux in the guest, and when it is looked for again.
#[derive(Debug, Default)]
pub(super) struct Linux {
    pub recording: Recording,
    /// The step of the next look.
    due: u64,
    /// There is something new to write.
    pub new: bool,
}

/// Steps between two looks for symbols, modules and processes of a Linux guest.
const LOOK: u64 = 64 << 20;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
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
    fn switch(&self, on: bool) {
        if on {
            // What was executed meanwhile was not announced.
            lock(&self.pool).pages.clear();
        }
        self.on.store(on, Ordering::Relaxed);
    }

    pub fn retired(&self) -> u64 {
        self.retired.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Records a machine.
#[derive(Debug)]
pub struct Recorder {
    folder: PathBuf,
    header: Header,
    shared: Arc<Shared>,
}

impl Recorder {
    /// Makes the directory and its files, and the observers, one for each vCPU.
    ///
    /// # Errors
    /// The directory is there already, or something cannot be made.
    pub fn new(options: &Options, header: Header, model: &CpuModel) -> io::Result<(Recorder, Vec<Observer>)> {
        folder::prepare(&options.folder, options.force)?;
        let shared = Arc::new(Shared {
            pool: Mutex::default(),
            changed: AtomicU64::new(0),
            hashing: Hashing::default(),
            finish: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            on_error: options.on_error,
            on: AtomicBool::new(options.start.is_none()),
            start: options.start.clone(),
            stop: options.stop.clone(),
            spent: Default::default(),
            retired: (0..header.cpus).map(|_| AtomicU64::new(0)).collect(),
            linux: Mutex::new(Linux {
                due: LOOK,
                ..Linux::default()
            }),
        });
        let observers = (0..header.cpus)
            .map(|cpu| Observer::new(cpu, options, shared.clone(), model))
            .collect::<io::Result<Vec<Observer>>>()?;
        let recorder = Recorder {
            folder: options.folder.clone(),
            header,
            shared,
        };
        recorder.write_header()?;
        Ok((recorder, observers))
    }

    fn write_header(&self) -> io::Result<()> {
        folder::write_header(&self.folder, &self.header)
    }

    /// The directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether writing has failed and the run is to stop for that.
    pub fn stops(&self) -> bool {
        self.shared.failed.load(Ordering::Relaxed) && self.shared.on_error == OnError::Stop
    }

    /// Whether something is recorded.
    pub fn is_on(&self) -> bool {
        self.shared.on.load(Ordering::Relaxed)
    }

    /// Begins or stops recording with the guest's next instruction, whatever else it waits for; `false` if it is so already.
    pub fn switch(&self, on: bool) -> bool {
        let changes = self.is_on() != on;
        if changes {
            self.shared.switch(on);
        }
        changes
    }

    /// Looks for what is new of a Linux in the guest, if it is time for that.
    pub fn look(&self, memory: &Memory, steps: u64) {
        let mut linux = lock(&self.shared.linux);
        if steps >= linux.due {
            self.look_now(&mut linux, memory, steps);
            // The kernel is looked for in all memory, which may not be Linux's.
            let wait = if linux.recording.kernel().is_some() {
                LOOK
            } else {
                LOOK.max(steps)
            };
            linux.due = steps + wait;
        }
    }

    fn look_now(&self, linux: &mut Linux, memory: &Memory, steps: u64) {
        linux.new |= linux.recording.look(&mut GuestMemory(memory), steps);
        if std::mem::take(&mut linux.new)
            && let Err(error) = linux.recording.write(&self.folder.join(folder::LINUX))
        {
            self.shared.fail(error);
        }
    }

    /// From the next time that the observers are asked what they want, the recording is over.
    pub fn finish(&self) {
        self.shared.finish.store(true, Ordering::Relaxed);
    }

    /// Once all observers have finished: says in the header how it ended.
    ///
    /// # Errors
    /// What went wrong first while recording.
    pub fn close(mut self, reason: &str, memory: &Memory, steps: u64, ticks: u64) -> io::Result<()> {
        self.look_now(&mut lock(&self.shared.linux), memory, steps);
        let error = lock(&self.shared.error).take();
        self.header.end = Some(HeaderEnd {
            reason: reason.into(),
            steps,
            ticks,
            complete: error.is_none(),
        });
        let written = self.write_header();
        match error {
            Some(error) => Err(error),
            None => written,
        }
    }
}
