//! Snapshots along a run.
//!
//! They share the pages of RAM that did not change in between, so that one costs what was written since the one before. When
//! all together cost more than the limit, those go first whose going leaves the smallest hole for how far away it is: the past
//! stays dense near where the run is and gets sparse further off. When two are too many, the past becomes shorter.

use std::collections::BTreeMap;

use crate::vm::{Moment, Pages, Snapshot};
use machine::{disk::Contents, share::overlay};

/// What a point costs beside pages and translations, about: units, devices, registers.
const REST: u64 = 64 << 10;

/// All there is to go back to.
#[derive(Debug)]
pub struct Point {
    /// When.
    pub at: Moment,
    /// The machine.
    pub state: Snapshot,
    /// Disks with an overlay, in order.
    pub disks: Vec<Contents>,
    /// What the guest has made of shared directories, in order.
    pub shares: Vec<overlay::Contents>,
    /// Entries of the log that had come to pass.
    pub logged: usize,
    /// What the serial ports had sent.
    pub sent: Vec<u64>,
    /// The step at which nothing may enter any more, since something had been delivered there.
    pub closed_to_input: Option<u64>,
    /// A debugger had changed the guest: nothing leads here from an earlier point.
    pub fixed: bool,
}

/// What a run says of its states that have names.
pub(crate) type Named = BTreeMap<String, Kept>;

/// A state, and of which past it is.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(super) point: Point,
    /// How often the future had been forgotten before.
    pub(super) forgotten: usize,
}

/// Points in order of their steps, no two at the same.
#[derive(Debug)]
pub struct Points {
    list: Vec<(Point, u64)>,
    limit: u64,
    bytes: u64,
}

impl Points {
    /// None, and later as many as cost so many bytes.
    pub fn new(limit: u64) -> Self {
        Points {
            list: Vec::new(),
            limit,
            bytes: 0,
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    /// What they cost, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What they may cost, in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Point> {
        self.list.iter().map(|(point, _)| point)
    }

    /// The last one that is no further than so many steps.
    pub fn before(&self, steps: u64) -> Option<&Point> {
        let index = self.list.partition_point(|(point, _)| point.at.steps <= steps);
        Some(&self.list[index.checked_sub(1)?].0)
    }

    /// What one costs that shares nothing with another, in bytes.
    pub fn cost_alone(state: &Snapshot) -> u64 {
        REST + state.bytes_beside_pages() + state.pages.beside(&Pages::default())
    }

    /// Adds one, in place of one at the same step, and makes room for it. `false`: alone it costs more than the limit.
    #[must_use]
    pub fn add(&mut self, point: Point) -> bool {
        let (now, steps) = (point.at.steps, |list: &(Point, u64)| list.0.at.steps);
        let index = self.list.partition_point(|entry| steps(entry) < now);
        if self.list.get(index).is_some_and(|entry| steps(entry) == now) {
            let (_, cost) = self.list.remove(index);
            self.bytes -= cost;
        }
        self.list.insert(index, (point, 0));
        self.count_again(index);
        self.count_again(index + 1);
        while self.bytes > self.limit && (self.thin(now) || self.shorten(now)) {}
        self.bytes <= self.limit || self.list.len() > 1
    }

    /// Takes the one away that is furthest behind; where nothing is behind, the one that is furthest ahead, if something leads there.
    fn shorten(&mut self, now: u64) -> bool {
        let behind = self.list.first().is_some_and(|(first, _)| first.at.steps < now);
        let ahead = self
            .list
            .last()
            .is_some_and(|(last, _)| last.at.steps > now && !last.fixed);
        let at = match (behind, ahead) {
            (true, _) => 0,
            (false, true) => self.list.len() - 1,
            (false, false) => return false,
        };
        let (_, cost) = self.list.remove(at);
        self.bytes -= cost;
        self.count_again(at);
        true
    }

    /// Those later than a moment are gone.
    pub fn forget_after(&mut self, moment: Moment) {
        let index = self.list.partition_point(|(point, _)| point.at <= moment);
        self.bytes -= self.list.drain(index..).map(|(_, cost)| cost).sum::<u64>();
    }

    /// All are gone.
    pub fn clear(&mut self) {
        (self.list, self.bytes) = (Vec::new(), 0);
    }

    /// What a point costs beside the one before it.
    fn count_again(&mut self, index: usize) {
        let Some((point, before)) = self.list.get(index) else {
            return;
        };
        let before_it = index.checked_sub(1).map(|index| &self.list[index].0.state.pages);
        let pages = point.state.pages.beside(before_it.unwrap_or(&Pages::default()));
        // The first shares with nobody: that is what `cost_alone` says.
        let cost = REST + point.state.bytes_beside_pages() + pages;
        self.bytes = self.bytes - before + cost;
        self.list[index].1 = cost;
    }

    /// Takes the one away that is missed least from here. The first one, the last one and those that nothing leads to stay.
    fn thin(&mut self, now: u64) -> bool {
        let steps = |index: usize| self.list[index].0.at.steps;
        let inner = 1..self.list.len().saturating_sub(1);
        let open = inner.filter(|&index| !self.list[index].0.fixed);
        let hole = |index: usize| {
            let far = now.abs_diff(steps(index)).max(1);
            (steps(index + 1) - steps(index - 1)) as f64 / far as f64
        };
        let Some(least) = open.min_by(|&a, &b| hole(a).total_cmp(&hole(b))) else {
            return false;
        };
        let (_, cost) = self.list.remove(least);
        self.bytes -= cost;
        self.count_again(least);
        true
    }
}
