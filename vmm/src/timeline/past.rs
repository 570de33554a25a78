//! A machine that goes back, and what it needs for that while it goes on: see [`crate::timeline`].

use std::io;

use log::{debug, trace, warn};

use super::{
    log::{Entry, What},
    points::{Point, Points},
    run::Run,
    state::Timeline,
};
use crate::{
    error::Error,
    vm::{End, Moment, Outside, SnapshotError, StopReason, Until},
};
use machine::{disk::Overlay, loader::size_text, share::overlay::Upper};

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

/// Why [`Run::seek`] and its like cannot go there.
fn no_past(what: &str) -> Error {
    Error::Usage(format!(
        "{what} needs --reverse, and the software engine on the virtual clock"
    ))
}

impl Run {
    /// What is known of the past, if the machine can go back.
    pub fn extent(&self) -> Option<Extent> {
        let timeline = self.timeline.as_ref()?;
        let points = timeline.points.as_ref()?;
        let now = self.vm.steps();
        Some(Extent {
            first: points.iter().next().map_or(now, |point| point.at.steps),
            head: timeline.head.steps.max(now),
            points: points.count(),
            bytes: points.bytes(),
            live: timeline.live,
        })
    }

    /// How often the run has been put to another place: whoever collects what it does starts anew when this changes.
    pub fn jumps(&self) -> u64 {
        self.timeline.as_ref().map_or(0, |timeline| timeline.jumps)
    }

    /// Has the run go on from here as if it had never been further: what was typed later is forgotten, and what comes from
    /// outside is new.
    ///
    /// # Errors
    /// The directory of `--record` cannot be written.
    pub fn forget_future(&mut self) -> Result<(), Error> {
        let here = self.vm.moment();
        self.forget_epochs();
        let Some(timeline) = &mut self.timeline else {
            return Ok(());
        };
        timeline.log.forget_future()?;
        if let Some(points) = &mut timeline.points {
            points.forget_after(here);
        }
        timeline.outputs.iter().for_each(|flow| flow.forget_future());
        (timeline.head, timeline.live, timeline.closed) = (here, true, None);
        timeline.finished = None;
        timeline.forgotten.push(here);
        Ok(())
    }

    /// Keeps what a debugger has changed, before the run goes anywhere else.
    pub(crate) fn keep_change(&mut self) -> Result<(), Error> {
        if !self.vm.take_changed() || self.timeline.is_none() {
            return Ok(());
        }
        self.forget_future()?;
        let at = self.vm.moment();
        if let Some(timeline) = &mut self.timeline {
            // A replay ends here.
            timeline.epochs = None;
            let what = What::Changed;
            timeline.log.push(Entry { at, what })?;
        }
        self.keep_point(true)
    }

    /// Keeps a point, unless there is one.
    ///
    /// # Errors
    /// Before the first instruction: the limit is less than one takes.
    pub(crate) fn keep_point(&mut self, fixed: bool) -> Result<(), Error> {
        let at = self.vm.moment();
        let there = |points: &Points| points.before(at.steps).is_some_and(|point| point.at.steps == at.steps);
        let known = self.timeline.as_ref().and_then(|timeline| timeline.points.as_ref());
        if known.is_none_or(|points| !fixed && there(points)) {
            return Ok(());
        }
        let mut point = self.point(fixed);
        if self.vm.is_debugged() {
            // Whoever goes on from here stops at what is here.
            point.state.soft.cpus.iter_mut().for_each(|cpu| cpu.observed = None);
        }
        let alone = Points::cost_alone(&point.state);
        let Some(timeline) = self.timeline.as_mut() else {
            return Ok(());
        };
        if let Some(points) = &mut timeline.points {
            if !points.add(point) {
                if at.steps == 0 {
                    let (limit, alone) = (size_text(points.limit()), size_text(alone));
                    return Err(Error::Usage(format!(
                        "--reverse-memory {limit}: one snapshot of this machine takes {alone} before its first instruction, and more \
                         as the guest writes to its memory: give more than that"
                    )));
                }
                warn!(
                    "--reverse-memory: a snapshot takes {} by now: from step {} on the past is not kept",
                    size_text(alone),
                    at.steps
                );
                timeline.points = None;
                return Ok(());
            }
            trace!(
                "a point at step {}; {} take {} bytes",
                at.steps,
                points.count(),
                points.bytes()
            );
        }
        Ok(())
    }

    /// All there is to this moment.
    pub(crate) fn point(&mut self, fixed: bool) -> Point {
        let at = self.vm.moment();
        let state = self.vm.save();
        let timeline = self.timeline.as_ref();
        Point {
            at,
            state,
            disks: self.vm.overlays().iter().map(Overlay::save).collect(),
            shares: self.vm.shares().iter().map(Upper::save).collect(),
            logged: timeline.map_or(0, |timeline| timeline.log.position()),
            sent: timeline.map_or_else(Vec::new, |timeline| {
                timeline.outputs.iter().map(|flow| flow.sent()).collect()
            }),
            closed_to_input: self.vm.closed_to_input(),
            fixed,
        }
    }

    /// Puts the machine to the last point that is no further than so many steps.
    pub(crate) fn put_back(&mut self, steps: u64) -> Result<(), Error> {
        let here = self.vm.moment();
        let Some(mut timeline) = self.timeline.take() else {
            return Err(no_past("going back"));
        };
        // It is taken out for the while, and comes back as it was.
        let points = timeline.points.take();
        let result = match points.as_ref().and_then(|points| points.before(steps)) {
            Some(point) => self.put_to(&mut timeline, here, point),
            None => Err(no_past("going back")),
        };
        timeline.points = points;
        self.timeline = Some(timeline);
        result
    }

    /// Puts the machine, which is somewhere else, to a point of this past.
    pub(crate) fn put_to(&mut self, timeline: &mut Timeline, here: Moment, point: &Point) -> Result<(), Error> {
        self.take_on(point)?;
        if std::mem::take(&mut timeline.live) {
            timeline.head = timeline.head.max(here);
        }
        timeline.log.go_to(point.logged);
        for (flow, sent) in timeline.outputs.iter().zip(&point.sent) {
            flow.go_to(*sent);
        }
        self.vm.set_closed_to_input(point.closed_to_input);
        timeline.jumps += 1;
        Ok(())
    }

    /// Takes on a state, and what disks held then. A recording that was begun under way is at its end: it only grows.
    pub(crate) fn take_on(&mut self, point: &Point) -> Result<(), Error> {
        if self.vm.recorder_is_late()
            && let Err(error) = self.vm.end_trace("the machine was put to another step")
        {
            warn!("{error}");
        }
        let failed = |why: SnapshotError| Error::System {
            what: "going back",
            source: io::Error::other(why),
        };
        self.vm.set_state(&point.state).map_err(failed)?;
        for (disk, contents) in self.vm.overlays().iter().zip(&point.disks) {
            disk.restore(contents);
        }
        for (share, contents) in self.vm.shares().iter().zip(&point.shares) {
            share.restore(contents);
        }
        Ok(())
    }

    /// The run has gone another way than it did before.
    pub(super) fn diverged(&self) -> End {
        let steps = self.vm.steps();
        match self.timeline.as_ref().is_some_and(|timeline| timeline.closed.is_some()) {
            true => End::Diverged(steps),
            false => End::Defect(format!(
                "the past is not what it was at step {steps}\n{}",
                self.vm.report()
            )),
        }
    }

    /// The end of a recorded session, where something from outside ended it.
    pub(crate) fn session_is_over(&mut self) -> Option<End> {
        let here = self.vm.moment();
        let timeline = self.timeline.as_ref()?;
        let closed = timeline.closed.as_ref().filter(|_| here >= timeline.head)?;
        let reason = closed.reason.clone()?;
        Some(End::Replayed {
            steps: here.steps,
            reason,
            broken: closed.broken,
        })
    }

    /// Writes down why the run ended, if it is recorded.
    ///
    /// # Errors
    /// The directory of `--record` cannot be written.
    pub fn end_recording(&mut self, end: &Result<End, Error>) -> Result<(), Error> {
        let here = self.vm.moment();
        let Some(timeline) = &mut self.timeline else {
            return Ok(());
        };
        let at = if timeline.live { here } else { timeline.head.max(here) };
        let (guest, reason) = match end {
            Ok(end) => (
                end.is_the_guests() && timeline.live,
                end.message().unwrap_or_else(|| format!("{end:?}")),
            ),
            Err(error) => (false, error.to_string()),
        };
        let line = reason.lines().next().unwrap_or_default();
        timeline.log.end(at, guest, line)
    }

    /// Goes to a step, forwards or backwards. `None`: it is there; else the run ended before. What is going on outside is not
    /// heard of on the way, but for what ends a run.
    ///
    /// # Errors
    /// As [`Run::run`]; it is a step back and the machine does not keep its past.
    pub fn seek(&mut self, world: &mut dyn Outside, steps: u64) -> Result<Option<End>, Error> {
        self.keep_change()?;
        let now = self.vm.steps();
        let points = self.timeline.as_ref().and_then(|timeline| timeline.points.as_ref());
        let nearest = points
            .and_then(|points| points.before(steps))
            .map(|point| point.at.steps);
        let back = steps < now;
        if back || nearest.is_some_and(|nearest| nearest > now) {
            if nearest.is_none() {
                return Err(no_past(&format!("going back to step {steps}")));
            }
            debug!("from step {now} to {steps}, over {nearest:?}");
            self.put_back(steps)?;
        }
        while back && steps.saturating_sub(self.vm.steps()) > NEAR {
            let middle = steps - (steps - self.vm.steps()) / 2;
            if let Some(end) = self.run_until(world, middle, false)?.and_then(StopReason::end) {
                return Ok(Some(end));
            }
            self.keep_point(false)?;
        }
        Ok(self.run_until(world, steps, false)?.and_then(StopReason::end))
    }

    /// Goes to where a CPU has the last instruction (of a REP, the last iteration) that it has executed still to execute.
    /// `false`: it has executed none that is known, and nothing has changed.
    ///
    /// # Errors
    /// As [`Run::seek`].
    pub fn step_back(&mut self, world: &mut dyn Outside, cpu: usize) -> Result<bool, Error> {
        self.keep_change()?;
        let now = self.vm.steps();
        let target = self.vm.steps_of(cpu);
        let points = self.timeline.as_ref().and_then(|timeline| timeline.points.as_ref());
        let Some(points) = points else {
            return Err(no_past("a step back"));
        };
        let fewer = |point: &&Point| {
            let steps = point.state.soft.cpus.get(cpu).map_or(0, |cpu| cpu.steps);
            point.at.steps < now && steps < target
        };
        let Some(from) = points.iter().rev().find(fewer).map(|point| point.at.steps) else {
            return Ok(false);
        };
        if self.vm.cpu_count() > 1 {
            // The others may have made steps since.
            self.put_back(from)?;
            let until = Until {
                steps: Some(now),
                cpu: Some((cpu, target)),
                ..Until::default()
            };
            self.go(world, &until, false)?;
        }
        let last = self.vm.steps();
        self.seek(world, last.saturating_sub(1))?;
        Ok(true)
    }

    /// The step of the last point that is no further than so many steps.
    pub(crate) fn point_before(&self, steps: u64) -> Option<u64> {
        let points = self.timeline.as_ref()?.points.as_ref()?;
        points.before(steps).map(|point| point.at.steps)
    }

    /// Runs to a step that is not behind, and hears nothing from outside but what ends a run. Whether a debugger's stops end it is
    /// said by `stops`. `None`: it is there.
    pub(super) fn run_until(
        &mut self,
        world: &mut dyn Outside,
        steps: u64,
        stops: bool,
    ) -> Result<Option<StopReason>, Error> {
        let until = Until {
            steps: Some(steps),
            ..Until::default()
        };
        self.go(world, &until, stops)
    }

    /// The same for a step of one CPU, and with the run's own limits.
    fn go(&mut self, world: &mut dyn Outside, until: &Until, stops: bool) -> Result<Option<StopReason>, Error> {
        let (limit, deadline) = (self.max_instructions(), self.deadline());
        let bounded = Until {
            steps: limit.into_iter().chain(until.steps).min(),
            deadline: deadline.map(|(deadline, _)| deadline),
            ..*until
        };
        self.vm.ignore_stops(!stops);
        let reason = self.advance(world, &bounded, false);
        self.vm.ignore_stops(false);
        let short = until.steps.is_some_and(|steps| self.vm.steps() < steps);
        Ok(match (reason?, limit, deadline) {
            (StopReason::Reached, Some(limit), _) if short && limit == self.vm.steps() => {
                Some(StopReason::Ended(End::Instructions(limit)))
            }
            (StopReason::Reached, ..) => None,
            // The end of a part is where it was to go.
            (StopReason::Ended(End::Instructions(at)), ..) if !short && until.steps == Some(at) => None,
            (StopReason::Deadline, _, Some((_, timeout))) => Some(StopReason::Ended(End::Timeout(timeout))),
            (reason, ..) => Some(reason),
        })
    }
}
