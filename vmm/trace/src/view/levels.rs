//! The frames of two levels: those of a second-level guest stand on those of the VMM that runs it.
//!
//! In VMX non-root operation a guest's functions call each other, and nothing below is theirs. So all that is done with frames is done with
//! those of the level that runs, while whoever hears of calls sees all of them: the VMM's up to its VM entry, a label with the
//! VMCS, a label with the guest's process, and the guest's own.

use std::ops::{Deref, DerefMut};

use super::{
    frame::{Frame, FrameKind},
    names::{Function, Names, Owner, ProcessCache},
    threads::Threads,
    window::Here,
};

/// Frames, as a slice of those of the level that runs.
#[derive(Debug, Default)]
pub struct Frames {
    all: Vec<Frame>,
    /// Where they begin.
    floor: usize,
}

impl Frames {
    /// Adds the innermost.
    pub fn push(&mut self, frame: Frame) {
        self.all.push(frame);
    }

    /// Takes the innermost of this level.
    pub fn pop(&mut self) -> Option<Frame> {
        if self.all.len() > self.floor {
            self.all.pop()
        } else {
            None
        }
    }

    /// The innermost of all levels has called one that was left.
    pub fn add_below(&mut self, left: &Frame) {
        if let Some(frame) = self.all.last_mut() {
            frame.below += left.own + left.below;
        }
    }

    /// Those of all levels.
    pub fn whole(&mut self) -> &mut [Frame] {
        &mut self.all
    }

    /// What is pushed from here on is of the next level; gives where this one's begin.
    pub fn begin_level(&mut self) -> usize {
        std::mem::replace(&mut self.floor, self.all.len())
    }

    /// Back to the level whose frames begin there; the labels of the one above are on it.
    pub fn end_level(&mut self, floor: usize) {
        self.floor = floor;
    }
}

impl Deref for Frames {
    type Target = [Frame];

    fn deref(&self) -> &[Frame] {
        &self.all[self.floor..]
    }
}

impl DerefMut for Frames {
    fn deref_mut(&mut self) -> &mut [Frame] {
        &mut self.all[self.floor..]
    }
}

/// The VMM below a guest that runs.
#[derive(Debug)]
pub struct Below {
    /// Where its frames begin.
    pub floor: usize,
    /// Its owner.
    pub owner: Owner,
    /// Where its kernel's frames begin.
    pub kernel: Option<usize>,
    /// The VMCS of the guest above.
    pub vmcs: u64,
    /// Threads of the guest that wait.
    pub threads: Threads,
    /// The guest's processes by their CR3.
    pub cache: ProcessCache,
    /// The label of the guest's process.
    pub process_label: Option<Function>,
    /// Instructions are missing since before the guest ran.
    pub lost: bool,
}

/// A guest's processor that does not run at the moment.
#[derive(Debug, Default)]
pub struct Left {
    /// Whose frames they are.
    pub owner: Owner,
    /// What it does.
    pub frames: Vec<Frame>,
    /// Where its kernel's frames begin.
    pub kernel: Option<usize>,
    /// Where it goes on.
    pub resume: u64,
    /// Its threads that wait.
    pub threads: Threads,
    /// Its processes by their CR3.
    pub cache: ProcessCache,
}

/// A VMCS that nobody has named.
pub const UNKNOWN: u64 = u64::MAX;

/// Which level the code is of that runs: the VMCS of the guest, if it is a guest's.
pub fn level(here: &Here) -> Option<u64> {
    here.state.non_root.then(|| here.state.vmcs.unwrap_or(UNKNOWN))
}

/// A frame that says whose those above are.
pub fn label(here: &Here, function: Function) -> Frame {
    Frame {
        function,
        ip: 0,
        ret: 0,
        kind: FrameKind::Entry,
        since: here.instructions,
        since_ns: here.ns(),
        own: 0,
        below: 0,
        inner: false,
        tags: [0; Frame::TAGS],
        start: 0,
        end: 0,
    }
}

/// The label of a guest's process, of the guest's names: none where no Linux was found in it.
pub fn process_label(all: &Names, guest: &Names, owner: Owner, here: &Here) -> Option<Function> {
    let linux = !guest.linux().banner.is_empty();
    linux.then(|| all.label(guest.owner_name(owner, here.step)))
}
