//! A run's part in its session's snapshots: it keeps them, and says whether it has come to one as it should.

use std::path::Path;

use log::warn;

use super::{epoch_file::EpochError, epochs, run::Run};

impl Run {
    /// Keeps a snapshot here. Where that fails there are no more from here on, and the run goes on.
    pub(super) fn keep_epoch(&mut self) {
        let Some(timeline) = &mut self.timeline else { return };
        let logged = timeline.log.position();
        let Some(keeper) = &mut timeline.epochs else { return };
        match keeper.keep(&mut self.vm, logged) {
            Ok(true) => {}
            Ok(false) => timeline.epochs = None,
            Err(error) => {
                warn!("--record: a snapshot cannot be kept, so there are no more of them: {error}");
                timeline.epochs = None;
            }
        }
    }

    /// The run goes another way from here: what its session has kept of later steps is no more.
    pub(super) fn forget_epochs(&mut self) {
        let steps = self.vm.steps();
        let Some(timeline) = &mut self.timeline else { return };
        if let Some(keeper) = &mut timeline.epochs
            && let Err(error) = keeper.forget_after(steps, &mut self.vm)
        {
            warn!("--record: snapshots cannot be removed: {error}");
            keeper.clear();
            timeline.epochs = None;
        }
    }

    /// How many snapshots the session keeps, and how many bytes they take; `None`: it keeps none.
    pub fn epochs_kept(&self) -> Option<(usize, u64)> {
        Some(self.timeline.as_ref()?.epochs.as_ref()?.kept())
    }

    /// Whether the run, which has come to the step of a session's snapshot, is what it was when that was written.
    ///
    /// # Errors
    /// The snapshot cannot be read.
    pub fn is_at_epoch(&mut self, session: &Path, steps: u64) -> Result<bool, EpochError> {
        epochs::is_at(session, steps, &mut self.vm)
    }
}
