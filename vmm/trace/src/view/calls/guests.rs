//! VM entries and VM exits: a second-level guest's frames come and go above those of its VMM.

use super::super::{
    levels::{self, Below, Left},
    names::{Function, Owner, Process},
    threads::Threads,
    window::Here,
};
use super::{After, Calls, MOST_THREADS, Sink};

impl<S: Sink> Calls<'_, S> {
    /// Whose calls are shown: those of a guest are its VMM's.
    pub(super) fn shown(&self) -> Owner {
        self.cpu.below.as_ref().map_or(self.cpu.owner, |below| below.owner)
    }

    /// What follows is of this level.
    pub(super) fn level(&mut self, here: &Here) {
        let level = levels::level(here);
        if self.cpu.below.as_ref().map(|below| below.vmcs) == level {
            return;
        }
        self.vm_exit(here, None);
        if let Some(vmcs) = level {
            self.vm_entry(here, vmcs);
        }
    }

    /// A guest goes on above its VMM.
    pub(super) fn vm_entry(&mut self, here: &Here, vmcs: u64) {
        // Where the trace begins in a guest, nothing is known of its VMM but the thread.
        let thread = self.cpu.owner.thread;
        self.cpu.owner.thread = thread.or_else(|| self.names.thread_at(here.cpu, here.step));
        let lost = self.cpu.after == After::Lost;
        self.show_label(here, self.all_names.vmcs_label(here.state.vmcs));
        let left = self.left.remove(&vmcs).unwrap_or_default();
        let frames = if lost { Vec::new() } else { left.frames };
        // With an event it begins elsewhere.
        self.cpu.after = match (lost, frames.is_empty()) {
            (true, _) => After::Lost,
            (false, true) => After::Nothing,
            (false, false) => After::Entry { resume: left.resume },
        };
        self.cpu.below = Some(Below {
            floor: self.cpu.frames.begin_level(),
            owner: std::mem::replace(&mut self.cpu.owner, left.owner),
            kernel: std::mem::replace(&mut self.cpu.kernel, left.kernel),
            vmcs,
            threads: left.threads,
            cache: left.cache,
            process_label: None,
            lost,
        });
        self.names = self.all_names.guest(here.state.vmcs, here.step);
        self.come_back(here, frames);
    }

    /// A guest's frames go away until its next VM entry, which leads back to `from`.
    pub(super) fn vm_exit(&mut self, here: &Here, from: Option<u64>) {
        if self.cpu.below.is_none() {
            return;
        }
        let kernel = self.cpu.kernel;
        let frames = self.put_aside(here);
        self.end_level(here);
        let Some(below) = self.cpu.below.take() else { return };
        self.names = self.all_names;
        self.cpu.kernel = below.kernel;
        let left = Left {
            owner: std::mem::replace(&mut self.cpu.owner, below.owner),
            kernel,
            frames,
            resume: from.unwrap_or(0),
            threads: below.threads,
            cache: below.cache,
        };
        if self.left.len() >= MOST_THREADS {
            self.left.clear();
        }
        self.left.insert(below.vmcs, left);
        self.hide_label(here);
        let lost = below.lost || self.cpu.after == After::Lost;
        self.cpu.after = if lost { After::Lost } else { After::Nothing };
    }

    /// Below a guest's first frame stands whose process it is.
    pub(super) fn label_process(&mut self, here: &Here) {
        let Some(below) = self.cpu.below.as_ref().filter(|_| self.cpu.frames.is_empty()) else {
            return;
        };
        let label = levels::process_label(self.all_names, self.names, self.cpu.owner, here);
        if label == below.process_label {
            return;
        }
        self.end_level(here);
        if let Some(label) = label {
            self.show_label(here, label);
        }
        self.cpu.frames.begin_level();
        if let Some(below) = &mut self.cpu.below {
            below.process_label = label;
        }
    }

    /// Back to the VMM's frames and the guest's label; the guest has none.
    pub(super) fn end_level(&mut self, here: &Here) {
        let Some(below) = &mut self.cpu.below else { return };
        self.cpu.frames.end_level(below.floor);
        if below.process_label.take().is_some() {
            self.hide_label(here);
        }
    }

    pub(super) fn show_label(&mut self, here: &Here, label: Function) {
        self.cpu.frames.push(levels::label(here, label));
        let (owner, frames) = (self.shown(), self.cpu.frames.whole());
        self.sink.enter(self.all_names, here, owner, frames, false);
    }

    pub(super) fn hide_label(&mut self, here: &Here) {
        let (owner, frames) = (self.shown(), self.cpu.frames.whole());
        self.sink.leave(self.all_names, here, owner, frames, false);
        if let Some(frame) = self.cpu.frames.pop() {
            self.cpu.frames.add_below(&frame);
        }
    }

    /// Threads that wait, of the level that runs.
    pub(super) fn threads(&mut self) -> &mut Threads {
        match &mut self.cpu.below {
            Some(below) => &mut below.threads,
            None => &mut self.threads,
        }
    }

    /// Whose addresses CR3 shows, of the level that runs.
    pub(super) fn process_of(&mut self, cr3: Option<u64>) -> Option<Process> {
        match &mut self.cpu.below {
            Some(below) => below.cache.get(self.names, cr3),
            None => self.cache.get(self.names, cr3),
        }
    }
}
