//! Back to the last stop: the debugger's breakpoints, watchpoints and catches, met in the past.

use crate::vm::{End, Vm};
use crate::{
    debug::{Debugger, Stop, Why},
    error::Error,
    front::console::Console,
};

/// Where going back has led.
#[derive(Debug)]
pub enum Back {
    /// To a stop.
    Stopped(Stop),
    /// To the beginning: there was none.
    Beginning,
    /// Nowhere: something from outside ended the run meanwhile.
    Ended(End),
}

impl Vm {
    /// Goes back to the last step before this one at which a stop of the debugger's would have ended the run. That is before the
    /// instruction of a breakpoint, before the one whose access a watchpoint is for (so that what it wrote is not written
    /// yet), at the handler of an interrupt that is caught, and before the instruction whose exception is.
    ///
    /// # Errors
    /// As [`Vm::seek`].
    pub fn back(&mut self, console: &mut Console) -> Result<Back, Error> {
        self.settle_change()?;
        let now = self.steps();
        let mut until = now;
        while let Some(from) = until.checked_sub(1).and_then(|last| self.point_before(last)) {
            self.put_back(from)?;
            let mut last = None;
            while self.steps() < until {
                match self.run_until(console, until, true)? {
                    None => break,
                    Some(End::Stopped(stop)) => {
                        let at = match stop.why {
                            Why::Watch { .. } => self.steps().saturating_sub(1),
                            _ => self.steps(),
                        };
                        if at < now {
                            last = Some((at, stop));
                        }
                    }
                    Some(end) if end.is_the_guests() => break,
                    Some(end) => return Ok(Back::Ended(end)),
                }
            }
            if let Some((at, stop)) = last {
                let mut end = self.seek(console, at)?;
                if end.is_none() && matches!(stop.why, Why::Breakpoint(_)) {
                    // It stops here again, and then no more when it goes on.
                    end = self.run_until(console, at + 1, true)?;
                }
                return Ok(match end {
                    Some(End::Stopped(_)) | None => Back::Stopped(stop),
                    Some(end) if end.is_the_guests() => Back::Stopped(stop),
                    Some(end) => Back::Ended(end),
                });
            }
            if self.debugger.as_mut().is_some_and(Debugger::take_asked) {
                let cpu = self.current_cpu();
                return Ok(match self.seek(console, now)? {
                    Some(end) if !end.is_the_guests() => Back::Ended(end),
                    _ => Back::Stopped(Stop { cpu, why: Why::Asked }),
                });
            }
            until = from;
        }
        let first = self
            .point_before(now)
            .map_or(0, |_| self.extent().map_or(0, |extent| extent.first));
        Ok(match self.seek(console, first)? {
            Some(end) => Back::Ended(end),
            None => Back::Beginning,
        })
    }
}
