//! Back to the last stop: the debugger's breakpoints, watchpoints and catches, met in the past.

use super::run::Run;
use crate::{
    debug::{DebugStop, StopCause},
    error::Error,
    vm::{End, Outside, StopReason},
};

/// Where going back has led.
#[derive(Debug)]
pub enum Back {
    /// To a stop.
    Stopped(DebugStop),
    /// To the beginning: there was none.
    Beginning,
    /// Nowhere: something from outside ended the run meanwhile.
    Ended(End),
}

impl Run {
    /// Goes back to the last step before this one at which a stop of the debugger's would have ended the run. That is before the
    /// instruction of a breakpoint, before the one whose access a watchpoint is for (so that what it wrote is not written
    /// yet), at the handler of an interrupt that is caught, and before the instruction whose exception is.
    ///
    /// # Errors
    /// As [`Run::seek`].
    pub fn back(&mut self, world: &mut dyn Outside) -> Result<Back, Error> {
        self.keep_change()?;
        let now = self.vm.steps();
        let mut until = now;
        while let Some(from) = until.checked_sub(1).and_then(|last| self.point_before(last)) {
            self.put_back(from)?;
            let mut last = None;
            while self.vm.steps() < until {
                match self.run_until(world, until, true)? {
                    None => break,
                    Some(StopReason::Debugger(stop)) => {
                        let at = match stop.why {
                            StopCause::Watch { .. } => self.vm.steps().saturating_sub(1),
                            _ => self.vm.steps(),
                        };
                        if at < now {
                            last = Some((at, stop));
                        }
                    }
                    Some(StopReason::Ended(end)) if !end.is_the_guests() => return Ok(Back::Ended(end)),
                    Some(_) => break,
                }
            }
            if let Some((at, stop)) = last {
                let mut reason = self.seek(world, at)?.map(StopReason::Ended);
                if reason.is_none() && matches!(stop.why, StopCause::Breakpoint(_)) {
                    // It stops here again, and then no more when it goes on.
                    reason = self.run_until(world, at + 1, true)?;
                }
                return Ok(match reason {
                    Some(StopReason::Ended(end)) if !end.is_the_guests() => Back::Ended(end),
                    _ => Back::Stopped(stop),
                });
            }
            if self.interrupt().is_stop() {
                let cpu = self.vm.current_cpu();
                return Ok(match self.seek(world, now)? {
                    Some(end) if !end.is_the_guests() => Back::Ended(end),
                    _ => Back::Stopped(DebugStop {
                        cpu,
                        why: StopCause::Asked,
                    }),
                });
            }
            until = from;
        }
        let first = self
            .point_before(now)
            .map_or(0, |_| self.extent().map_or(0, |extent| extent.first));
        Ok(match self.seek(world, first)? {
            Some(end) => Back::Ended(end),
            None => Back::Beginning,
        })
    }
}
