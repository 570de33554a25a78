//! The recorder: an observer of each vCPU that writes what a decoder needs.
//!
//! # Theory
//! The observer's own trace unit makes the packets; the guest's is another one and may do what it likes. Packets tell the way
//! through the code, so the code has to be there, too, as it was when it was executed. The engine says which pages it
//! translates for fetching and which bytes it decodes. A page that was never seen at its address is reported as soon as it is
//! fetched from: that is true for all time before, since nothing was executed there. A page whose bytes, when they are decoded
//! or translated anew, are not those that were reported last has changed: that is true from this instruction on. So before a
//! change is reported the pending TNT bits are sent and a PSB with the whole state; the change stands at that PSB, where any
//! decoder can change its image.
//!
//! # Practice
//! vCPUs share memory, so the last contents of each physical page are shared ([`Pool`](super::state::Pool)); a vCPU that gets its turn hears which
//! of them changed while others had theirs, and tells its own stream before it executes anything. Where a translation leads to
//! another page than before, the TLB forgets the old one in all its address spaces, so that addresses above bit 63 can count as
//! one space for all CR3s, as operating systems have it, and stay exact for guests that do otherwise.
//!
//! Packets carry virtual time instead of the guest's TSC.
//!
//! Where Linux goes over to another thread (`__switch_to`, whose second argument is the thread's `task_struct`) there are a PSB and a record
//! that says which: packets tell address spaces, which threads share and kernel threads borrow.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use log::warn;
use machine::memory::Memory;
use trace::directory::folder;
use trace::format::{Header, HeaderEnd};
use x86::model::CpuModel;

use super::encoder::Encoder;
use super::guest_memory::GuestMemory;
use super::observer::Observer;
use super::options::{OnError, Part, RecordingOptions};
use super::queue::{EncodingThread, Queue};
use super::state::{LinuxWatch, RecordingState, lock};
use crate::signals;

/// Steps between two looks for symbols, modules and processes of a Linux guest.
const LOOK: u64 = 64 << 20;
/// After so many looks for a kernel they become fewer.
const PATIENCE: u64 = 16;
/// How long the last look may take where the run was to end now.
const LAST_LOOK: Duration = Duration::from_secs(2);

/// Records a machine.
#[derive(Debug)]
pub struct Recorder {
    folder: PathBuf,
    header: Header,
    /// Another part is behind it, which looks at its beginning.
    goes_on: bool,
    /// Steps at which segments begin.
    cuts: Vec<u64>,
    state: Arc<RecordingState>,
    /// One for each vCPU.
    queues: Vec<Arc<Mutex<Queue>>>,
}

/// Segments with fewer bytes end so often that a thread would mostly be waited for.
const SMALL_SEGMENT: u64 = 16 << 20;

/// Whether packets are made on a thread: see [`super::queue`].
fn is_threaded(options: &RecordingOptions, encoder: &Encoder) -> bool {
    let whole = options.part == Part::default();
    let free = options.filters.is_empty() && options.limit.is_none() && encoder.segment() >= SMALL_SEGMENT;
    options.threaded && whole && free
}

impl Recorder {
    /// Makes the directory and its files, and the observers, one for each vCPU.
    ///
    /// # Errors
    /// The directory is there already, or something cannot be made.
    pub fn new(options: &RecordingOptions, header: Header, model: &CpuModel) -> io::Result<(Recorder, Vec<Observer>)> {
        folder::prepare(&options.folder, options.force)?;
        // Where another part has ended there may be something to be found at once.
        let first = if options.part.continues { 0 } else { LOOK };
        let state = Arc::new(RecordingState::new(options, header.cpus, first));
        let thread = Arc::new(EncodingThread::default());
        let mut queues = Vec::new();
        for cpu in 0..header.cpus {
            let encoder = Encoder::new(cpu, options, &state, model)?;
            let thread = is_threaded(options, &encoder).then(|| thread.clone());
            queues.push(Arc::new(Mutex::new(Queue::new(encoder, thread))));
        }
        let observers = (0..).zip(&queues);
        let observers = observers
            .map(|(cpu, queue)| Observer::new(cpu, options, state.clone(), queue.clone(), model))
            .collect();
        let recorder = Recorder {
            folder: options.folder.clone(),
            goes_on: options.part.goes_on,
            cuts: options.cuts.clone(),
            header,
            state,
            queues,
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
        self.state.failed.load(Ordering::Relaxed) && self.state.on_error == OnError::Stop
    }

    /// Whether something is recorded.
    pub fn is_on(&self) -> bool {
        self.state.on.load(Ordering::Relaxed)
    }

    /// Begins or stops recording with the guest's next instruction, whatever else it waits for; `false` if it is so already.
    pub fn switch(&self, on: bool) -> bool {
        let changes = self.is_on() != on;
        if changes {
            self.state.switch(on);
        }
        changes
    }

    /// The step of the next look, or of the next cut.
    pub fn due(&self) -> u64 {
        let cut = self.cuts.get(self.state.cuts.load(Ordering::Relaxed));
        let look = lock(&self.state.linux).due;
        cut.map_or(look, |cut| look.min(*cut))
    }

    /// Whether segments are to begin here, on all CPUs: from the next time on that their observers are asked what they want.
    pub fn cut(&self, steps: u64) -> bool {
        let before = self.state.cuts.load(Ordering::Relaxed);
        let passed = self.cuts.partition_point(|cut| *cut <= steps);
        self.state.cuts.store(passed, Ordering::Relaxed);
        if passed > before {
            // A part that begins here knows of no code that ran before.
            lock(&self.state.pool).pages.clear();
        }
        passed > before
    }

    /// Looks for what is new of a Linux in the guest, if it is time for that.
    /// The run is to end at the deadline.
    pub fn look(&self, memory: &Memory, steps: u64, deadline: Option<Instant>) {
        let mut linux = lock(&self.state.linux);
        linux.deadline = deadline;
        if steps >= linux.due {
            self.look_now(&mut linux, GuestMemory::new(memory).until(deadline), steps);
            // Looks are at multiples of their distance, so that those of a recording's parts are those of the whole. The kernel is
            // looked for in all memory, which may not be Linux's: later less often.
            let patient = linux.recording.kernel().is_none() && steps >= PATIENCE * LOOK;
            let wait = if patient { steps } else { LOOK };
            linux.due = ((steps + wait) / LOOK * LOOK).max(steps + 1);
        }
    }

    fn look_now(&self, linux: &mut LinuxWatch, mut memory: GuestMemory<'_>, steps: u64) {
        linux.new |= linux.recording.look(&mut memory, steps);
        linux.new |= linux.guests.look(&mut memory, steps);
        let switch = linux.recording.switch_address().unwrap_or(0);
        self.state.thread_switch_at.store(switch, Ordering::Relaxed);
        let exec = linux.recording.exec_address().unwrap_or(0);
        self.state.exec_at.store(exec, Ordering::Relaxed);
        self.state.guests_found.store(linux.guests.finds(), Ordering::Relaxed);
        self.write_new(linux);
    }

    fn write_new(&self, linux: &mut LinuxWatch) {
        if std::mem::take(&mut linux.new)
            && let Err(error) = self.write_linux(linux)
        {
            self.state.fail(error);
        }
    }

    fn write_linux(&self, linux: &mut LinuxWatch) -> io::Result<()> {
        let folder = self.folder.join(folder::LINUX);
        linux.recording.write(&folder)?;
        linux.guests.write(&folder)
    }

    /// Waits until packets have been made of everything so far.
    pub fn settle(&self) {
        for queue in &self.queues {
            let mut queue = lock(queue);
            queue.settle();
            if let Some(error) = queue.take_error() {
                self.state.fail(error);
            }
        }
    }

    /// From the next time that the observers are asked what they want, the recording is over.
    pub fn finish(&self) {
        self.state.finish.store(true, Ordering::Relaxed);
    }

    /// Once all observers have finished: says in the header how it ended.
    ///
    /// # Errors
    /// What went wrong first while recording.
    pub fn close(mut self, reason: &str, memory: &Memory, steps: u64, ticks: u64) -> io::Result<()> {
        let mut linux = lock(&self.state.linux);
        let now = Instant::now();
        let hurried = signals::pending().is_some() || linux.deadline.is_some_and(|deadline| now >= deadline);
        let mut last = GuestMemory::new(memory)
            .at_the_end()
            .until(hurried.then(|| now + LAST_LOOK));
        if !self.goes_on {
            linux.new |= linux.recording.last_look(&mut last, steps);
            linux.new |= linux.guests.look(&mut last, steps);
        }
        self.write_new(&mut linux);
        let of_process = |filter: &&String| filter.starts_with("comm=") || filter.starts_with("pid=");
        if let Some(filter) = self.header.filters.iter().find(of_process)
            && !linux.recording.names_processes()
        {
            warn!(
                "--trace-filter {filter}: nothing is recorded: no Linux with names of processes (64-bit, with BTF) was found in the guest"
            );
        }
        drop(linux);
        let error = lock(&self.state.error).take();
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
