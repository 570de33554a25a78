//! One decode for all forms that are made of calls.

use std::fmt;

use pt_flow::{Block, Event};

use super::error::ExportError;
use crate::{
    reader::{Trace, TraceError},
    view::{Calls, Frame, Here, Names, Owner, Sink, Totals, Window, view},
};

/// A file in the form of another program that is made of calls. It hears of those of all vCPUs, in the order of the machine's steps.
///
/// Of each frame a form may keep a number, [`Frame::tags`] at the index that [`Export::begin`] was given.
pub trait Export: fmt::Debug {
    /// Before everything else: where its numbers in frames are.
    fn begin(&mut self, _tag: usize) {}
    /// The last frame was entered, or came back with its thread.
    fn enter(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], back: bool);
    /// The last frame is left, or goes away with its thread.
    fn leave(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame]);
    /// The last frame runs.
    fn run(&mut self, here: &Here, stack: &[Frame], block: &Block);
    /// Something else happens.
    fn event(&mut self, _here: &Here, _event: &Event) {}
    /// Finishes the file; returns what is to be printed beside it, if anything is.
    ///
    /// # Errors
    /// The file cannot be written.
    fn finish(self: Box<Self>, names: &Names) -> Result<Option<String>, ExportError>;
}

/// What is shown to the forms.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// Names of functions and processes.
    pub names: &'a Names,
    /// The part of it.
    pub window: Window,
    /// The vCPUs.
    pub cpus: &'a [usize],
}

/// Shows the calls to all forms. `progress` hears how many bytes of packets are done, of how many.
///
/// # Errors
/// The trace cannot be read.
///
/// # Panics
/// There are more forms than frames have numbers for, [`Frame::TAGS`].
pub fn calls(
    job: &Job<'_>,
    forms: &mut [Box<dyn Export>],
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Totals, TraceError> {
    assert!(forms.len() <= Frame::TAGS, "more forms than frames have numbers for");
    for (tag, form) in forms.iter_mut().enumerate() {
        form.begin(tag);
    }
    let mut calls = Calls::new(job.names, All(&mut *forms));
    view(job.trace, job.cpus, &job.window, &mut calls, progress)
}

/// All forms.
struct All<'a>(&'a mut [Box<dyn Export>]);

impl Sink for All<'_> {
    fn enter(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], back: bool) {
        for form in &mut *self.0 {
            form.enter(names, here, owner, stack, back);
        }
    }

    fn leave(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], _: bool) {
        for form in &mut *self.0 {
            form.leave(names, here, owner, stack);
        }
    }

    fn run(&mut self, _: &Names, here: &Here, stack: &mut [Frame], block: &Block, _: &[u8]) {
        for form in &mut *self.0 {
            form.run(here, stack, block);
        }
    }

    fn event(&mut self, _: &Names, here: &Here, _: &[Frame], event: &Event) {
        for form in &mut *self.0 {
            form.event(here, event);
        }
    }
}
