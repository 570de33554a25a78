//! A run that can be gone back in: `--reverse`, `--record` and `minivmm replay`.
//!
//! # Theory
//! On the virtual clock a machine is a function of its steps and of what comes from outside. So whoever keeps the state at some
//! steps, and what came from outside and when, has the state at every step: from the nearest kept one before it the run is made
//! again. Going back by one instruction is going to the step before.
//!
//! From outside come bytes for the first serial port, and nothing else: the date, the seed and the disks are the same at the
//! start, disks do their work at the instruction that asks for it, and the clock counts steps. What quits or pauses a machine
//! does not reach the guest.
//!
//! # Practice
//! - A *moment* ([`Moment`]) is steps and ticks, since time passes without steps while all CPUs are halted. Where no more
//!   input may enter at a step because something has already been delivered there, it waits for the next.
//! - *Points* ([`points::Points`]) are kept every [`ReverseOptions::spacing`] steps as the run goes on, and closer and closer to where
//!   one has gone back to, so that the next step back is near one. They are thinned by a limit of memory.
//! - Running on from the past makes the known way again, with the input that came then. What is typed meanwhile waits until
//!   the run has caught up: nothing is lost and nothing is typed twice. [`Run::forget_future`](run::Run::forget_future) has the
//!   run live from where it is instead. A debugger that writes to registers or memory in the past does the same.
//! - What the guest sends is let through once ([`output_gate`]). What it sends on another way than the first is new.
//! - Disks are overlays, which keep what points need; the user's file is never written.
//! - An observer (`--trace`) would hear the same instructions again, in a file that only grows: so the two are not had together.
//!   A session that was recorded can be traced while it is replayed.
//! - `--collect` hears every byte once, too; what it has unpacked stays when the guest goes back.

pub mod back;
pub mod log;
pub(crate) mod named;
pub mod output_gate;
pub mod past;
pub mod points;
pub mod run;
pub mod session;

use crate::{
    config::ReverseOptions,
    vm::{End, Moment},
};

use self::{log::Log, output_gate::Flow, points::Points};

/// Where a run came from.
#[derive(Debug)]
pub struct Timeline {
    /// What came from outside.
    pub log: Log,
    /// Where it can be gone back to, if it can.
    pub points: Option<Points>,
    /// Steps between two points.
    pub spacing: u64,
    /// What the serial ports send.
    pub outputs: Vec<Flow>,
    /// How far it is known.
    pub head: Moment,
    /// The run is there, and what comes from outside is new.
    pub live: bool,
    /// Nothing is new, ever: a recorded session.
    pub closed: Option<Closed>,
    /// What the guest ended its run with, and when.
    pub finished: Option<(Moment, End)>,
    /// When the next check is due.
    pub check_at: u64,
    /// How often the run has been put to another place.
    pub jumps: u64,
    /// Where it was each time when what comes later was forgotten.
    pub forgotten: Vec<Moment>,
}

/// How a recorded session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    /// From outside, with these words; `None`: the guest ended it, and will again.
    pub reason: Option<String>,
    /// The recording breaks off: nobody has ended it.
    pub broken: bool,
}

impl Timeline {
    /// A run at its beginning.
    pub fn new(options: Option<ReverseOptions>, outputs: Vec<Flow>) -> Self {
        Timeline {
            log: Log::default(),
            points: options.map(|options| Points::new(options.memory)),
            spacing: options.unwrap_or_default().spacing.max(1),
            outputs,
            head: Moment::default(),
            live: true,
            closed: None,
            finished: None,
            check_at: 0,
            jumps: 0,
            forgotten: Vec::new(),
        }
    }

    /// Whether a recorded session is at its end here, where something from outside ended it.
    pub fn is_over(&self, here: Moment) -> bool {
        let ends = self.closed.as_ref().is_some_and(|closed| closed.reason.is_some());
        ends && here >= self.head
    }

    /// Whether a point is due at this step.
    pub fn point_is_due(&self, steps: u64) -> bool {
        self.points.as_ref().is_some_and(|points| {
            let before = points.before(steps);
            before.is_none_or(|point| steps - point.at.steps >= self.spacing)
        })
    }

    /// How many steps there are until something may have to be done, from here.
    pub fn until_due(&self, steps: u64) -> u64 {
        let ends = self.closed.as_ref().is_some_and(|closed| closed.reason.is_some());
        let entry = self.log.next().map(|entry| entry.at.steps);
        let head = ends.then_some(self.head.steps);
        let due = entry.into_iter().chain(head).filter(|&due| due > steps).min();
        due.map_or(u64::MAX, |due| due - steps)
    }
}
