//! A machine that goes back, and what it needs for that while it goes on: see [`crate::timeline`].

use std::io;

use log::{debug, trace, warn};

use crate::vm::{End, Vm};
use crate::{
    error::Error,
    front::console::{Console, Stop},
    timeline::{
        History,
        log::{Entry, Moment, What},
        points::{Point, Points},
    },
};
use machine::{disk::Overlay, memory::Digest};

/// Steps between two checks in a recorded session.
const CHECK: u64 = 1 << 24;
/// A point that is no further than this costs less to run from than to keep another one.
const NEAR: u64 = 1 << 12;

/// What is known of a run's past and future.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first step that can be gone back to.
    pub first: u64,
    /// The furthest step that the run has come to.
    pub head: u64,
    /// Points that are kept.
    pub points: usize,
    /// What they cost, in bytes.
    pub bytes: u64,
    /// The run is at its head, and what comes from outside is new.
    pub live: bool,
}

/// Why [`Vm::seek`] and its like cannot go there.
fn no_history(what: &str) -> Error {
    Error::Usage(format!(
        "{what} needs --reverse, and the software engine on the virtual clock"
    ))
}

impl Vm {
    /// Where the run is.
    pub(crate) fn moment(&mut self) -> Moment {
        let steps = self.soft.steps();
        let ticks = self.machine.clock().ticks(steps);
        Moment { steps, ticks }
    }

    /// What is known of the past, if the machine can go back.
    pub fn extent(&self) -> Option<Extent> {
        let history = self.history.as_ref()?;
        let points = history.points.as_ref()?;
        let now = self.soft.steps();
        Some(Extent {
            first: points.iter().next().map_or(now, |point| point.at.steps),
            head: history.head.steps.max(now),
            points: points.count(),
            bytes: points.bytes(),
            live: history.live,
        })
    }

    /// How often the run has been put to another place: whoever collects what it does starts anew when this changes.
    pub fn jumps(&self) -> u64 {
        self.history.as_ref().map_or(0, |history| history.jumps)
    }

    /// A debugger has written to registers or memory. Nothing of what the guest would have done from here on is known any more.
    pub fn changed_by_debugger(&mut self) {
        if let Some(history) = &mut self.history {
            history.changed = true;
        }
    }

    /// Has the run go on from here as if it had never been further: what was typed later is forgotten, and what comes from
    /// outside is new.
    ///
    /// # Errors
    /// The directory of `--record` cannot be written.
    pub fn forget_future(&mut self) -> Result<(), Error> {
        let here = self.moment();
        let Some(history) = &mut self.history else {
            return Ok(());
        };
        history.log.forget_future()?;
        if let Some(points) = &mut history.points {
            points.forget_after(here);
        }
        history.outputs.iter().for_each(|flow| flow.forget_future());
        (history.head, history.live, history.closed) = (here, true, None);
        history.finished = None;
        history.forgotten.push(here);
        Ok(())
    }

    /// Keeps what a debugger has changed, before the run goes anywhere else.
    pub(crate) fn settle_change(&mut self) -> Result<(), Error> {
        if !self
            .history
            .as_mut()
            .is_some_and(|history| std::mem::take(&mut history.changed))
        {
            return Ok(());
        }
        self.forget_future()?;
        let at = self.moment();
        if let Some(history) = &mut self.history {
            let what = What::Changed;
            history.log.push(Entry { at, what })?;
        }
        self.keep_point(true);
        Ok(())
    }

    /// A slice boundary: keeps a point if one is due.
    pub(crate) fn remember(&mut self) {
        let steps = self.soft.steps();
        let due = |points: &Points, spacing: u64| {
            let before = points.before(steps);
            before.is_none_or(|point| steps - point.at.steps >= spacing)
        };
        let Some(history) = &self.history else { return };
        if history
            .points
            .as_ref()
            .is_some_and(|points| due(points, history.spacing))
        {
            self.keep_point(false);
        }
    }

    /// Keeps a point, unless there is one.
    pub(crate) fn keep_point(&mut self, fixed: bool) {
        let at = self.moment();
        let there = |points: &Points| points.before(at.steps).is_some_and(|point| point.at.steps == at.steps);
        let known = self.history.as_ref().and_then(|history| history.points.as_ref());
        if known.is_none_or(|points| !fixed && there(points)) {
            return;
        }
        let mut point = self.point(fixed);
        if self.debugger.is_some() {
            // Whoever goes on from here stops at what is here.
            point.state.soft.cpus.iter_mut().for_each(|cpu| cpu.observed = None);
        }
        if let Some(points) = self.history.as_mut().and_then(|history| history.points.as_mut()) {
            points.add(point);
            trace!(
                "a point at step {}; {} take {} bytes",
                at.steps,
                points.count(),
                points.bytes()
            );
        }
    }

    /// All there is to this moment.
    pub(crate) fn point(&mut self, fixed: bool) -> Point {
        let at = self.moment();
        let state = self.save();
        let history = self.history.as_ref();
        Point {
            at,
            state,
            disks: self.overlays.iter().map(Overlay::save).collect(),
            logged: history.map_or(0, |history| history.log.position()),
            sent: history.map_or_else(Vec::new, |history| {
                history.outputs.iter().map(|flow| flow.sent()).collect()
            }),
            unsettled: history.and_then(|history| history.unsettled),
            fixed,
        }
    }

    /// Puts the machine to the last point that is no further than so many steps.
    pub(crate) fn put_back(&mut self, steps: u64) -> Result<(), Error> {
        let here = self.moment();
        let Some(mut history) = self.history.take() else {
            return Err(no_history("going back"));
        };
        // It is taken out for the while, and comes back as it was.
        let points = history.points.take();
        let result = match points.as_ref().and_then(|points| points.before(steps)) {
            Some(point) => self.put_to(&mut history, here, point),
            None => Err(no_history("going back")),
        };
        history.points = points;
        self.history = Some(history);
        result
    }

    /// Puts the machine, which is somewhere else, to a point of this past.
    pub(crate) fn put_to(&mut self, history: &mut History, here: Moment, point: &Point) -> Result<(), Error> {
        self.take_on(point)?;
        if std::mem::take(&mut history.live) {
            history.head = history.head.max(here);
        }
        history.log.go_to(point.logged);
        for (flow, sent) in history.outputs.iter().zip(&point.sent) {
            flow.go_to(*sent);
        }
        history.unsettled = point.unsettled;
        history.jumps += 1;
        Ok(())
    }

    /// Takes on a state, and what disks held then. A recording that was begun under way is at its end: it only grows.
    pub(crate) fn take_on(&mut self, point: &Point) -> Result<(), Error> {
        if self.recorder_is_late
            && let Err(error) = self.end_trace("the machine was put to another step")
        {
            warn!("{error}");
        }
        let failed = |why: String| Error::System {
            what: "going back",
            source: io::Error::other(why),
        };
        self.restore(&point.state).map_err(failed)?;
        for (disk, contents) in self.overlays.iter().zip(&point.disks) {
            disk.restore(contents);
        }
        Ok(())
    }

    /// What comes from outside now: what the log has, where the run has been before, and else the console.
    pub(crate) fn enter(&mut self, console: &mut Console) -> Result<Option<End>, Stop> {
        loop {
            let here = self.moment();
            let Some(history) = &mut self.history else {
                return Ok(None);
            };
            // Nothing comes any more to a guest that has ended its run.
            let over = history.finished.is_some_and(|(at, _)| at == here);
            if over || history.unsettled == Some(here.steps) {
                return Ok(None);
            }
            let Some(entry) = history.log.next().filter(|entry| entry.at <= here) else {
                break;
            };
            if entry.at < here {
                return Ok(Some(self.diverged()));
            }
            let what = entry.what.clone();
            history.log.pass();
            let same = match what {
                What::Input(bytes) => self.hand_over(&bytes) == bytes.len(),
                What::Check(hash) => self.hash_of_cpus() == hash,
                What::Changed => {
                    self.put_back(here.steps).map_err(Stop::Output)?;
                    true
                }
            };
            if !same {
                return Ok(Some(self.diverged()));
            }
        }
        let at = self.moment();
        let Some(history) = &mut self.history else {
            return Ok(None);
        };
        history.live |= at >= history.head && history.closed.is_none();
        if !history.live {
            return Ok(None);
        }
        if history.log.is_written() && at.steps >= history.check_at {
            history.check_at = at.steps + CHECK;
            let what = What::Check(self.hash_of_cpus());
            self.note(Entry { at, what })?;
        }
        if console.input().is_empty() {
            return Ok(None);
        }
        let taken = self.hand_over(console.input());
        if taken > 0 {
            let what = What::Input(console.input()[..taken].to_vec());
            self.note(Entry { at, what })?;
            console.consume(taken)?;
        }
        Ok(None)
    }

    /// Hands input to the UART; how many bytes it took.
    pub(crate) fn hand_over(&mut self, bytes: &[u8]) -> usize {
        let now = self.now();
        self.machine.platform().advance(now);
        let taken = self.machine.platform().serial_enqueue(bytes);
        if taken > 0 {
            trace!("{taken} bytes of input at step {}", self.soft.steps());
        }
        taken
    }

    fn note(&mut self, entry: Entry) -> Result<(), Stop> {
        match &mut self.history {
            Some(history) => history.log.push(entry).map_err(Stop::Output),
            None => Ok(()),
        }
    }

    /// The run has gone another way than it did before.
    fn diverged(&self) -> End {
        let steps = self.soft.steps();
        match self.history.as_ref().is_some_and(|history| history.closed.is_some()) {
            true => End::Diverged(steps),
            false => End::Defect(format!(
                "the past is not what it was at step {steps}\n{}",
                self.report()
            )),
        }
    }

    fn hash_of_cpus(&self) -> u64 {
        let mut digest = Digest::default();
        for cpu in self.soft.cpus() {
            digest.add(format!("{:?}", cpu.state()).as_bytes());
        }
        digest.value()
    }

    /// The end of a recorded session, where something from outside ended it.
    pub(crate) fn session_is_over(&mut self) -> Option<End> {
        let here = self.moment();
        let history = self.history.as_ref()?;
        let closed = history.closed.as_ref().filter(|_| here >= history.head)?;
        let reason = closed.reason.clone()?;
        Some(End::Replayed {
            steps: here.steps,
            reason,
            broken: closed.broken,
        })
    }

    /// Steps until something comes to pass, and the end if that is now.
    pub(crate) fn until_due(&mut self, steps: u64) -> (u64, Option<End>) {
        match &self.history {
            None => (u64::MAX, None),
            Some(history) => {
                let due = history.until_due(steps);
                let cpu = self.until_cpu.and_then(|(cpu, until)| {
                    let left = until.saturating_sub(self.soft.cpu(cpu)?.steps());
                    Some((left, cpu == self.soft.current()))
                });
                match cpu {
                    Some((0, _)) => (due, Some(End::Instructions(steps))),
                    Some((left, true)) => (due.min(left), self.session_is_over()),
                    _ => (due, self.session_is_over()),
                }
            }
        }
    }

    /// Something has been delivered at this step, or tried: what comes from outside waits for the next.
    pub(crate) fn unsettle(&mut self, step: u64) {
        if let Some(history) = &mut self.history {
            history.unsettled = Some(step);
        }
    }

    /// Writes down why the run ended, if it is recorded.
    ///
    /// # Errors
    /// The directory of `--record` cannot be written.
    pub fn end_recording(&mut self, end: &Result<End, Error>) -> Result<(), Error> {
        let here = self.moment();
        let Some(history) = &mut self.history else {
            return Ok(());
        };
        let at = if history.live { here } else { history.head.max(here) };
        let (guest, reason) = match end {
            Ok(end) => (
                end.is_the_guests() && history.live,
                end.message().unwrap_or_else(|| format!("{end:?}")),
            ),
            Err(error) => (false, error.to_string()),
        };
        let line = reason.lines().next().unwrap_or_default();
        history.log.end(at, guest, line)
    }

    /// Goes to a step, forwards or backwards. `None`: it is there; else the run ended before. What is going on outside is not
    /// heard of on the way, but for what ends a run.
    ///
    /// # Errors
    /// As [`Vm::run`]; it is a step back and the machine does not keep its past.
    pub fn seek(&mut self, console: &mut Console, steps: u64) -> Result<Option<End>, Error> {
        self.settle_change()?;
        let now = self.soft.steps();
        let points = self.history.as_ref().and_then(|history| history.points.as_ref());
        let nearest = points
            .and_then(|points| points.before(steps))
            .map(|point| point.at.steps);
        let back = steps < now;
        if back || nearest.is_some_and(|nearest| nearest > now) {
            if nearest.is_none() {
                return Err(no_history(&format!("going back to step {steps}")));
            }
            debug!("from step {now} to {steps}, over {nearest:?}");
            self.put_back(steps)?;
        }
        while back && steps.saturating_sub(self.soft.steps()) > NEAR {
            let middle = steps - (steps - self.soft.steps()) / 2;
            if let Some(end) = self.run_until(console, middle, false)? {
                return Ok(Some(end));
            }
            self.keep_point(false);
        }
        self.run_until(console, steps, false)
    }

    /// Has the machine go to a step when it looks at the outside next, as by [`Vm::seek`], and stand there. `false`: on KVM
    /// nobody counts steps.
    pub fn go_to(&mut self, steps: u64) -> bool {
        let counts = self.host_clock.is_none();
        self.wanted = Some(steps).filter(|_| counts);
        counts
    }

    /// Goes where somebody wants it to.
    pub(crate) fn go(&mut self, console: &mut Console) -> Result<Option<End>, Stop> {
        let Some(steps) = self.wanted.take() else {
            return Ok(None);
        };
        self.paused = true;
        match self.seek(console, steps) {
            // From there one can go back.
            Ok(Some(end)) if end.is_the_guests() && self.extent().is_some() => Ok(None),
            Ok(end) => Ok(end),
            Err(error) => Err(Stop::Output(error)),
        }
    }

    /// Goes to where a CPU has the last instruction (of a REP, the last iteration) that it has executed still to execute.
    /// `false`: it has executed none that is known, and nothing has changed.
    ///
    /// # Errors
    /// As [`Vm::seek`].
    pub fn step_back(&mut self, console: &mut Console, cpu: usize) -> Result<bool, Error> {
        self.settle_change()?;
        let now = self.soft.steps();
        let made = |vm: &Vm| vm.soft.cpu(cpu).map_or(0, engine::Cpu::steps);
        let target = made(self);
        let points = self.history.as_ref().and_then(|history| history.points.as_ref());
        let Some(points) = points else {
            return Err(no_history("a step back"));
        };
        let fewer = |point: &&Point| {
            let steps = point.state.soft.cpus.get(cpu).map_or(0, |cpu| cpu.steps);
            point.at.steps < now && steps < target
        };
        let Some(from) = points.iter().rev().find(fewer).map(|point| point.at.steps) else {
            return Ok(false);
        };
        if self.soft.count() > 1 {
            // The others may have made steps since.
            self.put_back(from)?;
            self.until_cpu = Some((cpu, target));
            let end = self.run_until(console, now, false);
            self.until_cpu = None;
            end?;
        }
        let last = self.soft.steps();
        self.seek(console, last.saturating_sub(1))?;
        Ok(true)
    }

    /// The step of the last point that is no further than so many steps.
    pub(crate) fn point_before(&self, steps: u64) -> Option<u64> {
        let points = self.history.as_ref()?.points.as_ref()?;
        points.before(steps).map(|point| point.at.steps)
    }

    /// Runs to a step that is not behind, and hears nothing from outside but what ends a run. Whether a debugger's stops end it is
    /// said by `stops`.
    pub(crate) fn run_until(&mut self, console: &mut Console, steps: u64, stops: bool) -> Result<Option<End>, Error> {
        if let Some(debugger) = self.debugger.as_mut().filter(|_| !stops) {
            debugger.suspend(true);
        }
        let end = self.run_quietly(console, steps);
        if let Some(debugger) = self.debugger.as_mut().filter(|_| !stops) {
            debugger.suspend(false);
        }
        end
    }

    fn run_quietly(&mut self, console: &mut Console, steps: u64) -> Result<Option<End>, Error> {
        let whole = self.max_instructions;
        self.max_instructions = Some(whole.map_or(steps, |whole| whole.min(steps)));
        let seeking = std::mem::replace(&mut self.seeking, true);
        let end = self.run(console);
        self.seeking = seeking;
        self.max_instructions = whole;
        match end? {
            End::Instructions(_) if self.soft.steps() >= steps || self.until_cpu.is_some() => Ok(None),
            end => Ok(Some(end)),
        }
    }
}
