//! What a run keeps of where it came from.

use super::{
    epochs::Keeper,
    log::{Closed, Log},
    output_gate::Flow,
    points::Points,
};
use crate::{
    config::ReverseOptions,
    vm::{End, Moment},
};

/// Where a run came from.
#[derive(Debug)]
pub struct Timeline {
    /// What came from outside.
    pub log: Log,
    /// Where it can be gone back to, if it can.
    pub points: Option<Points>,
    /// The step of the snapshot at which the part ends that is replayed.
    pub part_end: Option<u64>,
    /// What keeps the session's snapshots, if that is wanted.
    pub epochs: Option<Keeper>,
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

impl Timeline {
    /// A run at its beginning.
    pub fn new(options: Option<ReverseOptions>, outputs: Vec<Flow>) -> Self {
        Timeline {
            log: Log::default(),
            points: options.map(|options| Points::new(options.memory)),
            part_end: None,
            epochs: None,
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

    /// Whether a snapshot of the session is due at this step. In the past of a run that is recorded there is one already.
    pub fn epoch_is_due(&self, steps: u64) -> bool {
        let there = self.live || self.closed.is_some();
        self.epochs
            .as_ref()
            .is_some_and(|keeper| there && keeper.next() <= steps)
    }

    /// How many steps there are until something may have to be done, from here.
    pub fn until_due(&self, steps: u64) -> u64 {
        let ends = self.closed.as_ref().is_some_and(|closed| closed.reason.is_some());
        let entry = self.log.next().map(|entry| entry.at.steps);
        let head = ends.then_some(self.head.steps);
        let epoch = self.epochs.as_ref().map(Keeper::next);
        let events = entry.into_iter().chain(head).chain(epoch).chain(self.part_end);
        let due = events.filter(|&due| due > steps).min();
        due.map_or(u64::MAX, |due| due - steps)
    }
}
