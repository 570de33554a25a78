//! A run of a machine: the machine, where it came from if that is kept, and the states of it that have names.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use devices::virtio::Taken;
use vmm_sys_util::eventfd::EventFd;

use super::{
    log::{Entry, What},
    origin::Origin,
    points::Named,
    state::Timeline,
};
use crate::{
    error::Error,
    links::Links,
    serial_line::SerialLine,
    vm::{End, Enter, Inlet, Interrupt, Leave, Moment, Outside, StopReason, Until, Vm},
};

/// Steps between two checks in a recorded session.
const CHECK: u64 = 1 << 24;

/// A machine, the way it came, and the ways it can be had go: on, so many steps, to a step, back to the last stop.
///
/// It dereferences to its [`Vm`] for everything that only looks at the machine. What a debugger changes there is noticed before
/// the run goes anywhere else.
#[derive(Debug)]
pub struct Run {
    pub(super) vm: Vm,
    /// Where it came from, if that is kept.
    pub(super) timeline: Option<Box<Timeline>>,
    /// States that are kept under a name.
    pub(super) named: Named,
    /// What of the guest's would not go back to a state that was kept, in a machine that does not keep its past.
    pub(super) lasting: Option<String>,
    /// For snapshots that go to files.
    pub(super) origin: Origin,
    max_instructions: Option<u64>,
    timeout: Option<Duration>,
    interrupt: Interrupt,
    line: SerialLine,
    /// Where goes what is typed.
    console: Inlet,
    /// What else comes from outside.
    links: Option<Links>,
}

impl Deref for Run {
    type Target = Vm;

    fn deref(&self) -> &Vm {
        &self.vm
    }
}

impl DerefMut for Run {
    fn deref_mut(&mut self) -> &mut Vm {
        &mut self.vm
    }
}

/// What a [`Run`] is made of.
pub(crate) struct Beginning {
    /// The machine.
    pub vm: Vm,
    /// Its past, if that is to be kept.
    pub timeline: Option<Box<Timeline>>,
    /// What of the guest's would not go back to a state that was kept.
    pub lasting: Option<String>,
    /// What the machine is made of.
    pub origin: Origin,
    /// It ends after so many steps.
    pub max_instructions: Option<u64>,
    /// It ends after so much wall time.
    pub timeout: Option<Duration>,
    /// What its first serial port sends.
    pub line: SerialLine,
    /// Where goes what is typed.
    pub console: Inlet,
    /// What else comes from outside, if anything does.
    pub links: Option<Links>,
}

/// Why the run came back from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// A point is to be kept.
    Point,
    /// The next entry of the log is for the machine as a whole.
    Entry,
    /// A recorded session is to be given the machine's hash.
    Check,
    /// A recorded session is to be given the machine's state.
    Epoch,
    /// The part of a session that is replayed is at its end.
    PartEnd,
    /// A recorded session is at its end.
    Over,
    /// The run has gone another way than it did before.
    Diverged,
}

/// The world outside as a run sees it: what the log has, where the run has been before, and else what comes.
struct Entrance<'a> {
    world: &'a mut dyn Outside,
    timeline: Option<&'a mut Timeline>,
    /// Where goes what is typed.
    console: Inlet,
    /// What else comes.
    links: Option<&'a mut Links>,
    /// Requests are heard.
    hears: Option<&'a Interrupt>,
    event: Option<Event>,
}

impl Entrance<'_> {
    fn live(&self) -> bool {
        self.timeline.as_ref().is_none_or(|timeline| timeline.live)
    }

    /// What the log has for here.
    fn known(&mut self, here: Moment, enter: Enter<'_>) -> Option<Event> {
        let timeline = self.timeline.as_deref_mut()?;
        // Before what comes at this moment, which a run that begins here lets in.
        if timeline.part_end.is_some_and(|end| end <= here.steps) {
            return Some(Event::PartEnd);
        }
        if timeline.epoch_is_due(here.steps) {
            return Some(Event::Epoch);
        }
        while let Some(entry) = timeline.log.next().filter(|entry| entry.at <= here) {
            if entry.at < here {
                return Some(Event::Diverged);
            }
            let What::Input(inlet, bytes) = &entry.what else {
                return Some(Event::Entry);
            };
            let same = enter(*inlet, bytes) == Taken::Bytes(bytes.len());
            timeline.log.pass();
            if !same {
                return Some(Event::Diverged);
            }
        }
        timeline.live |= here >= timeline.head && timeline.closed.is_none();
        let checks = timeline.live && timeline.log.is_written() && here.steps >= timeline.check_at;
        checks.then_some(Event::Check)
    }
}

impl Outside for Entrance<'_> {
    fn flush(&mut self) -> Result<(), Leave> {
        self.world.flush()
    }

    fn poll(&mut self) -> Result<(), Leave> {
        self.world.poll()
    }

    fn wait(&mut self, at_most: Option<Duration>) -> Result<(), Leave> {
        self.world.wait(at_most)
    }

    fn listen(&mut self, wake: EventFd) -> Result<(), Error> {
        self.world.listen(wake)
    }

    fn input(&mut self) -> &[u8] {
        match self.live() {
            true => self.world.input(),
            false => &[],
        }
    }

    fn consume(&mut self, count: usize) -> Result<(), Leave> {
        self.world.consume(count)
    }

    fn input_open(&mut self) -> bool {
        self.live() && (self.world.input_open() || self.links.as_ref().is_some_and(|links| links.are_open()))
    }

    fn is_requested(&mut self) -> bool {
        self.event = None;
        self.hears.is_some_and(Interrupt::is_set)
    }

    fn comes_back(&mut self, here: Moment) -> bool {
        let timeline = self.timeline.as_deref();
        let point = timeline.is_some_and(|timeline| timeline.point_is_due(here.steps));
        self.event = point.then_some(Event::Point);
        point
    }

    fn enter(&mut self, here: Moment, enter: Enter<'_>) -> Result<bool, Leave> {
        let finished = self.timeline.as_ref().and_then(|timeline| timeline.finished.as_ref());
        if finished.is_some_and(|(at, _)| *at == here) {
            // Nothing comes any more to a guest that has ended its run.
            return Ok(false);
        }
        self.event = self.known(here, enter);
        if self.event.is_some() {
            return Ok(true);
        }
        if !self.live() {
            return Ok(false);
        }
        let console = self.console;
        if !self.world.input().is_empty()
            && let Taken::Bytes(taken @ 1..) = enter(console, self.world.input())
        {
            if let Some(timeline) = self.timeline.as_deref_mut() {
                let what = What::Input(console, self.world.input()[..taken].to_vec());
                timeline.log.push(Entry { at: here, what })?;
            }
            self.world.consume(taken)?;
        }
        let Some(links) = self.links.as_deref_mut() else {
            return Ok(false);
        };
        let mut timeline = self.timeline.as_deref_mut();
        links.offer(here.steps, |inlet, bytes| {
            let taken = match enter(inlet, bytes) {
                Taken::Bytes(taken) => taken,
                Taken::Dropped => return Ok(None),
            };
            // An end, which is no bytes, is taken whole.
            if let Some(timeline) = timeline.as_deref_mut()
                && (taken > 0 || bytes.is_empty())
            {
                let what = What::Input(inlet, bytes[..taken].to_vec());
                timeline.log.push(Entry { at: here, what })?;
            }
            Ok::<_, Leave>(Some(taken))
        })?;
        Ok(false)
    }

    fn arrived(&mut self, here: Moment) -> bool {
        self.live() && self.links.as_ref().is_some_and(|links| links.arrived(here.steps))
    }

    fn follows_wall(&mut self) -> bool {
        self.live() && self.links.as_ref().is_some_and(|links| links.network())
    }

    fn enters_at(&mut self, here: Moment) -> Option<u64> {
        let entry = self.timeline.as_ref()?.log.next()?;
        (entry.at.steps == here.steps && entry.at.ticks > here.ticks).then_some(entry.at.ticks)
    }

    fn enters(&mut self, here: Moment) -> bool {
        let next = self.timeline.as_ref().and_then(|timeline| timeline.log.next());
        next.is_some_and(|entry| entry.at <= here)
    }

    fn due(&mut self, here: Moment) -> Option<u64> {
        let Some(timeline) = &self.timeline else {
            return Some(u64::MAX);
        };
        if timeline.is_over(here) {
            self.event = Some(Event::Over);
            return None;
        }
        Some(timeline.until_due(here.steps))
    }
}

impl Run {
    /// A run at its beginning.
    pub(crate) fn begin(beginning: Beginning) -> Self {
        Run {
            vm: beginning.vm,
            timeline: beginning.timeline,
            named: Named::new(),
            lasting: beginning.lasting,
            origin: beginning.origin,
            max_instructions: beginning.max_instructions,
            timeout: beginning.timeout,
            interrupt: Interrupt::default(),
            line: beginning.line,
            console: beginning.console,
            links: beginning.links,
        }
    }

    /// What the first serial port sends, for whoever writes it out.
    pub fn line(&self) -> SerialLine {
        self.line.clone()
    }

    /// Becomes readable when something has come for a device; `None`: nothing will.
    ///
    /// # Errors
    /// The system has no descriptor to give.
    pub fn links_wake(&self) -> std::io::Result<Option<EventFd>> {
        self.links.as_ref().map(Links::wake).transpose()
    }

    /// The step at which the run ends, by `--max-instructions`.
    pub(super) fn max_instructions(&self) -> Option<u64> {
        self.max_instructions
    }

    /// What has the run come back, from any thread.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// When the run is to have ended that begins now, by `--timeout`; and what that was.
    pub(crate) fn deadline(&self) -> Option<(Instant, Duration)> {
        let timeout = self.timeout?;
        Some((Instant::now().checked_add(timeout)?, timeout))
    }

    /// Runs until something ends it, the debugger stops it, or somebody has a request. What ended by a limit can be run on.
    ///
    /// # Errors
    /// The console or the system fails.
    pub fn run(&mut self, world: &mut dyn Outside) -> Result<StopReason, Error> {
        let deadline = self.deadline();
        self.run_until_deadline(world, deadline, None)
    }

    /// The same with a point in wall time at which it ends, and the timeout that this is; and with another at which it comes back for
    /// who watches for a panic, as it does when the guest says that it has panicked.
    pub(crate) fn run_until_deadline(
        &mut self,
        world: &mut dyn Outside,
        deadline: Option<(Instant, Duration)>,
        slice: Option<Instant>,
    ) -> Result<StopReason, Error> {
        let end = deadline.map(|(deadline, _)| deadline);
        let first = end.into_iter().chain(slice).min();
        let until = Until {
            steps: self.max_instructions,
            deadline: first,
            panic: slice.is_some(),
            ..Until::default()
        };
        let reason = self.advance_heard(world, &until)?;
        let deadline = deadline.filter(|_| first == end);
        Ok(match (reason, deadline) {
            (StopReason::Reached, _) => StopReason::Ended(End::Instructions(self.max_instructions.unwrap_or(0))),
            (StopReason::Deadline, Some((_, timeout))) => StopReason::Ended(End::Timeout(timeout)),
            (reason, _) => reason,
        })
    }

    /// Runs for so many steps at most. `None`: it has made them all.
    ///
    /// # Errors
    /// As [`Run::run`].
    pub fn run_for(&mut self, world: &mut dyn Outside, steps: u64) -> Result<Option<StopReason>, Error> {
        let steps = self.vm.steps().saturating_add(steps);
        if self.max_instructions.is_some_and(|whole| whole <= steps) {
            return self.run(world).map(Some);
        }
        let deadline = self.deadline();
        let until = Until {
            steps: Some(steps),
            deadline: deadline.map(|(deadline, _)| deadline),
            ..Until::default()
        };
        Ok(match (self.advance_heard(world, &until)?, deadline) {
            (StopReason::Reached, _) => None,
            (StopReason::Deadline, Some((_, timeout))) => Some(StopReason::Ended(End::Timeout(timeout))),
            (reason, _) => Some(reason),
        })
    }

    /// Executes the next instruction (of a REP, one iteration), on [`Vm::current_cpu`] unless that changes first.
    ///
    /// # Errors
    /// As [`Run::run`].
    pub fn step(&mut self, world: &mut dyn Outside) -> Result<Option<StopReason>, Error> {
        self.run_for(world, 1)
    }

    /// Runs a machine on KVM until it has come out of the guest so often, or something ends the run before. `None`: it has come
    /// to that. A machine that is not on KVM, or whose next instructions have to be the engine's, runs as in [`Run::run`].
    ///
    /// # Errors
    /// As [`Run::run`].
    pub fn run_native(&mut self, world: &mut dyn Outside, limit: kvm::Limit) -> Result<Option<StopReason>, Error> {
        let deadline = self.deadline();
        let until = Until {
            steps: self.max_instructions,
            deadline: deadline.map(|(deadline, _)| deadline),
            exits: Some(limit),
            ..Until::default()
        };
        Ok(Some(self.advance_heard(world, &until)?).filter(|reason| !matches!(reason, StopReason::Reached)))
    }

    /// Has the other CPUs stand still while the machine runs; `None`: none has to. The guest can tell, so a machine that keeps its
    /// past lets them all run.
    pub fn run_only(&mut self, cpu: Option<usize>) {
        if self.timeline.is_none() {
            self.vm.run_only(cpu);
        }
    }

    /// Ends at another step than it was to. For tests.
    #[cfg(test)]
    pub(crate) fn set_max_instructions(&mut self, steps: Option<u64>) {
        self.max_instructions = steps;
    }

    fn advance_heard(&mut self, world: &mut dyn Outside, until: &Until) -> Result<StopReason, Error> {
        self.advance(world, until, true)
    }

    /// Runs the machine, lets in what the log has for it, and keeps points on the way. `hears`: requests have it come back.
    pub(super) fn advance(&mut self, world: &mut dyn Outside, until: &Until, hears: bool) -> Result<StopReason, Error> {
        self.keep_change()?;
        if let Some(end) = self.finished_here() {
            return Ok(StopReason::Ended(end));
        }
        loop {
            let mut entrance = Entrance {
                world: &mut *world,
                timeline: self.timeline.as_deref_mut(),
                console: self.console,
                links: self.links.as_mut(),
                hears: hears.then_some(&self.interrupt),
                event: None,
            };
            let reason = self.vm.advance(until, &mut entrance)?;
            let event = entrance.event;
            match (reason, event) {
                (StopReason::Outside, Some(Event::Point)) => self.keep_point(false)?,
                (StopReason::Outside, Some(Event::Entry)) => {
                    if !self.pass_entry()? {
                        return Ok(StopReason::Ended(self.diverged()));
                    }
                }
                (StopReason::Outside, Some(Event::Check)) => self.write_check()?,
                (StopReason::Outside, Some(Event::Epoch)) => self.keep_epoch(),
                (StopReason::Outside, Some(Event::PartEnd)) => {
                    return Ok(StopReason::Ended(End::Instructions(self.vm.steps())));
                }
                (StopReason::Outside, Some(Event::Over)) => {
                    if let Some(end) = self.session_is_over() {
                        return Ok(StopReason::Ended(end));
                    }
                }
                (StopReason::Outside, Some(Event::Diverged)) => return Ok(StopReason::Ended(self.diverged())),
                (StopReason::Ended(end), _) => {
                    self.remember_end(&end);
                    return Ok(StopReason::Ended(end));
                }
                (reason, _) => return Ok(reason),
            }
        }
    }

    /// What the guest has ended its run with, if the machine is where it did.
    fn finished_here(&mut self) -> Option<End> {
        let here = self.vm.moment();
        let (at, end) = self.timeline.as_ref()?.finished.as_ref()?;
        (*at == here).then(|| end.clone())
    }

    fn remember_end(&mut self, end: &End) {
        let here = self.vm.moment();
        if let Some(timeline) = &mut self.timeline
            && matches!(end, End::PowerOff | End::Reset | End::DebugExit(_))
        {
            timeline.finished = Some((here, end.clone()));
        }
    }

    /// The next entry of the log is for the machine as a whole. `false`: the machine is not as it was.
    fn pass_entry(&mut self) -> Result<bool, Error> {
        let steps = self.vm.steps();
        self.vm.bring_up_to_date();
        let hash = self.vm.hash_unobserved();
        let Some(timeline) = &mut self.timeline else {
            return Ok(true);
        };
        let what = timeline.log.next().map(|entry| entry.what.clone());
        timeline.log.pass();
        match what {
            Some(What::Check(was)) => Ok(was == hash),
            Some(What::Changed) => {
                self.put_back(steps)?;
                Ok(true)
            }
            Some(What::Input(..)) | None => Ok(true),
        }
    }

    fn write_check(&mut self) -> Result<(), Error> {
        self.vm.bring_up_to_date();
        let (at, hash) = (self.vm.moment(), self.vm.hash_unobserved());
        let Some(timeline) = &mut self.timeline else {
            return Ok(());
        };
        timeline.check_at = at.steps + CHECK;
        let what = What::Check(hash);
        timeline.log.push(Entry { at, what })
    }
}

#[cfg(test)]
#[path = "run_test.rs"]
mod tests;
