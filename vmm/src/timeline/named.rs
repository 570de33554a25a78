//! States of the machine that somebody has kept under a name, in memory, and goes back to.
//!
//! A machine that keeps its past and has not left it since goes to the state as to any other step: what came later comes again.
//! From another past (what came later has been forgotten in between) the state is where the run begins anew, as nothing is kept
//! of the way there. Without a past there is the state alone, and everything that follows is new.

use super::log::{Entry, What};
use super::run::Run;
use crate::timeline::points::Kept;
use crate::vm::Moment;

/// Names that are kept at most.
const MOST: usize = 64;

/// Why a state cannot be kept under a name, or gone back to.
#[derive(Debug, thiserror::Error)]
pub enum NamedStateError {
    /// Nobody has the state but KVM.
    #[error("a machine in KVM cannot: `--engine soft` can")]
    InKvm,
    /// What the guest does outside would not go back with it.
    #[error("{0}")]
    Lasting(String),
    /// No more names.
    #[error("{MOST} are kept already: `snapshot drop NAME` makes room")]
    Many,
    /// No such name.
    #[error("there is no snapshot {0:?}: `snapshot list` shows them")]
    None(String),
    /// A trace is being written.
    #[error("a trace only grows: leave out `--trace`, and begin one with `trace start DIR`")]
    Traced,
    /// The session's log cannot be written, or the state does not fit.
    #[error(transparent)]
    Failed(#[from] crate::Error),
}

impl Run {
    /// Why the machine's state cannot be kept and taken on again as it runs, if it cannot.
    pub(super) fn keeps_states(&self) -> Result<(), NamedStateError> {
        if self.vm.is_hosted() {
            return Err(NamedStateError::InKvm);
        }
        match &self.lasting {
            Some(why) if self.timeline.is_none() => Err(NamedStateError::Lasting(why.clone())),
            _ => Ok(()),
        }
    }

    /// Keeps the state under a name, in place of one that has it already.
    ///
    /// # Errors
    /// One line: there are too many, or something of the guest's would not go back with it.
    pub fn keep_state(&mut self, name: &str) -> Result<(), NamedStateError> {
        self.keeps_states()?;
        if self.named.len() >= MOST && !self.named.contains_key(name) {
            return Err(NamedStateError::Many);
        }
        self.keep_change()?;
        let kept = Kept {
            point: self.point(false),
            forgotten: self.timeline.as_ref().map_or(0, |timeline| timeline.forgotten.len()),
        };
        self.named.insert(name.into(), kept);
        Ok(())
    }

    /// The names of the states that are kept, with their steps, in the order of the names.
    pub fn kept_states(&self) -> impl Iterator<Item = (&str, u64)> {
        self.named
            .iter()
            .map(|(name, kept)| (name.as_str(), kept.point.at.steps))
    }

    /// No longer keeps a state; `false` where there is none.
    pub fn drop_state(&mut self, name: &str) -> bool {
        self.named.remove(name).is_some()
    }

    /// Takes on a state that is kept, which stays so. It ends a recording that was begun as the machine ran.
    ///
    /// # Errors
    /// One line: there is none, or it cannot be taken on; nothing has changed then.
    pub fn take_state(&mut self, name: &str) -> Result<(), NamedStateError> {
        self.keeps_states()?;
        if !self.named.contains_key(name) {
            return Err(NamedStateError::None(name.into()));
        }
        if self.vm.recorder().is_some() && !self.vm.recorder_is_late() {
            return Err(NamedStateError::Traced);
        }
        self.keep_change()?;
        let Some(mut kept) = self.named.remove(name) else {
            return Ok(());
        };
        let result = self.take(&mut kept);
        self.named.insert(name.into(), kept);
        Ok(result?)
    }

    fn take(&mut self, kept: &mut Kept) -> Result<(), crate::Error> {
        let here = self.vm.moment();
        let Some(mut timeline) = self.timeline.take() else {
            return self.take_on(&kept.point);
        };
        let since = timeline.forgotten.get(kept.forgotten..).unwrap_or_default();
        let same = since.iter().all(|moment| *moment > kept.point.at);
        let cut = if same { Ok(()) } else { timeline.log.forget_future() };
        let result = cut.and_then(|()| self.put_to(&mut timeline, here, &kept.point));
        self.timeline = Some(timeline);
        result?;
        if !same {
            self.begin_anew(here)?;
            kept.point = self.point(false);
        }
        kept.forgotten = self.timeline.as_ref().map_or(0, |timeline| timeline.forgotten.len());
        Ok(())
    }

    /// The run has a past and a future no more: it begins here. It was at another moment before.
    fn begin_anew(&mut self, before: Moment) -> Result<(), crate::Error> {
        let here = self.vm.moment();
        let Some(timeline) = &mut self.timeline else {
            return Ok(());
        };
        timeline.epochs = None;
        // What has come is no way to here, so for whoever reads the log it ends where the run was.
        timeline.log.go_to(usize::MAX);
        let what = What::Changed;
        timeline.log.push(Entry { at: before, what })?;
        if let Some(points) = &mut timeline.points {
            points.clear();
        }
        timeline.outputs.iter().for_each(|flow| flow.forget_future());
        // No state that was kept before leads here.
        timeline.forgotten.push(Moment::default());
        (timeline.head, timeline.live, timeline.closed) = (here, true, None);
        timeline.finished = None;
        self.keep_point(true)
    }
}
