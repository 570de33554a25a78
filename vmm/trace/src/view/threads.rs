//! Threads that do not run at the moment, with their frames.
//!
//! A trace tells when Linux goes over to another thread's stack, and which address space that has, but not which thread it is. All threads
//! wait at the same place. So one is taken that fits, and when it returns to where the one that was taken would not, another is taken
//! instead that fits all that was seen since. Threads that cannot be distinguished in this way have the same frames.

use super::{frame::Frame, names::Process};

/// More threads than this are forgotten, the oldest first.
const MOST: usize = 4096;
/// After so many returns the right thread is no longer doubted.
const DOUBTS: usize = 16;

/// A thread that waits.
#[derive(Clone, Debug, Default)]
pub struct Parked {
    /// Whose it is, if it was seen in user mode.
    pub process: Option<Process>,
    /// What it does.
    pub frames: Vec<Frame>,
    /// Where the kernel's frames begin.
    pub kernel: Option<usize>,
    /// Where it goes on.
    pub resume: u64,
}

/// All threads that wait.
#[derive(Debug, Default)]
pub struct Threads {
    parked: Vec<Parked>,
    doubt: Option<Doubt>,
}

#[derive(Debug)]
struct Doubt {
    /// Where the thread went on.
    resume: u64,
    /// Frames that it has had since before.
    floor: usize,
    /// Those that it had and has left, the innermost first.
    popped: Vec<Frame>,
}

impl Threads {
    /// Puts a thread aside.
    pub fn park(&mut self, thread: Parked) {
        self.doubt = None;
        if thread.frames.is_empty() {
            return;
        }
        if self.parked.len() >= MOST {
            self.parked.remove(0);
        }
        self.parked.push(thread);
    }

    /// A thread that goes on at `resume` in this address space. `left` is that of the thread before: another one can only be a
    /// process's own, the same may be borrowed.
    pub fn resume(&mut self, resume: u64, process: Option<Process>, left: Option<Process>) -> Option<Parked> {
        let fits = |thread: &Parked| thread.resume == resume;
        let own = |thread: &Parked| fits(thread) && thread.process == process;
        let kernel = |thread: &Parked| fits(thread) && thread.process.is_none();
        let found = if process != left {
            self.parked.iter().rposition(own)
        } else {
            self.parked
                .iter()
                .rposition(kernel)
                .or_else(|| self.parked.iter().rposition(own))
        };
        let found = found.or_else(|| self.parked.iter().rposition(fits))?;
        Some(self.parked.remove(found))
    }

    /// The newest thread of a process.
    pub fn of(&mut self, process: Option<Process>) -> Option<Parked> {
        let found = self.parked.iter().rposition(|thread| thread.process == process)?;
        Some(self.parked.remove(found))
    }

    /// A thread with so many frames runs since it went on at `resume`, and may be another.
    pub fn resumed(&mut self, resume: u64, frames: usize) {
        self.doubt = Some(Doubt {
            resume,
            floor: frames,
            popped: Vec::new(),
        });
    }

    /// A frame was left, and so many remain.
    pub fn popped(&mut self, frame: &Frame, left: usize) {
        if let Some(doubt) = &mut self.doubt
            && left < doubt.floor
        {
            doubt.floor = left;
            doubt.popped.push(*frame);
            if doubt.popped.len() > DOUBTS {
                self.doubt = None;
            }
        }
    }

    /// What the thread that runs has left of what it had, and where it went on, if it may be another.
    pub fn mistaken(&mut self) -> Option<(Vec<Frame>, u64)> {
        let doubt = self.doubt.take()?;
        Some((doubt.popped, doubt.resume))
    }

    /// The thread that fits: it went on at `resume`, returned as `popped` did, and then to `ip`. It is given without those frames.
    pub fn instead(&mut self, resume: u64, popped: &[Frame], ip: u64) -> Option<Parked> {
        let fits = |thread: &Parked| {
            let mut frames = thread.frames.iter().rev();
            thread.resume == resume
                && popped
                    .iter()
                    .all(|seen| frames.next().is_some_and(|frame| frame.ret == seen.ret))
                && frames.next().is_some_and(|frame| frame.ret == ip)
        };
        let found = self.parked.iter().rposition(fits)?;
        let mut thread = self.parked.remove(found);
        let left = thread.frames.len() - popped.len() - 1;
        thread.frames.truncate(left);
        thread.kernel = thread.kernel.map(|kernel| kernel.min(left));
        Some(thread)
    }

    /// There is no doubt any more.
    pub fn confirm(&mut self) {
        self.doubt = None;
    }

    /// Instructions are missing: who waits is not known.
    pub fn forget(&mut self) {
        self.parked.clear();
        self.doubt = None;
    }
}
