//! The one verb of a machine: to run until there is a reason to come back, in the software engine or on KVM.

use std::time::Instant;

use super::{
    end::End,
    hosted_state::stays,
    outside::{Leave, Outside},
    pace::Pace,
    parts::Vm,
    stop_reason::{StopReason, Until},
};
use crate::error::Error;

impl Vm {
    /// Runs until there is a reason to come back.
    ///
    /// # Errors
    /// Output cannot be written, or the system fails.
    pub fn advance(&mut self, until: &Until, outside: &mut dyn Outside) -> Result<StopReason, Error> {
        let started = Instant::now();
        let reason = self.advance_until(until, outside, started);
        // Whoever looks next finds in the recording what has been executed.
        if let Some(recorder) = &self.recorder {
            recorder.settle();
        }
        self.wall += started.elapsed();
        if let Some(clock) = &mut self.host_clock {
            clock.stop();
        }
        // The last lines. If they cannot be written, why the run failed is still the better news.
        let reason = match (outside.flush(), reason) {
            (Err(leave), Ok(StopReason::Ended(End::PowerOff | End::Reset | End::DebugExit(_)))) => Err(leave),
            (_, Ok(StopReason::Ended(end))) => Ok(StopReason::Ended(end)),
            (Err(leave), Ok(_)) => Err(leave),
            (_, reason) => reason,
        };
        reason.or_else(|leave| End::of(leave).map(StopReason::Ended))
    }

    fn advance_until(
        &mut self,
        until: &Until,
        outside: &mut dyn Outside,
        started: Instant,
    ) -> Result<StopReason, Leave> {
        if let Some(clock) = &mut self.host_clock {
            clock.go_on();
        }
        let counts = until.steps.is_some() || until.cpu.is_some();
        // What counts steps is for the engine.
        if counts && self.machine.platform().irqchip_is_external() {
            let end = stays(&self.report(), "only the software engine counts instructions");
            return Ok(StopReason::Ended(end));
        }
        if !counts && let Some(hosted) = self.hosted.take() {
            return self.run_hosted(hosted, until, outside, started);
        }
        let mut pace = Pace::new(self.now(), started, until.deadline);
        loop {
            if let Some(reason) = self.software(until, outside, &mut pace, &mut |_| false)? {
                return Ok(reason);
            }
        }
    }
}
