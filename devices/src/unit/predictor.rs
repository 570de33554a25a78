//! What a branch record says of prediction: a small model, since nothing here predicts branches to run faster.
//!
//! # Theory
//! Hardware reports whether its own predictor was right. This machine has none, and a guest's profiler still wants plausible
//! answers, the same in every run. So:
//!
//! - direct jumps and calls, returns and far transfers are always predicted (a return by the return stack);
//! - the last [`WINDOW`] branches that were taken are in a branch target buffer, and a conditional or indirect branch that is in it
//!   is predicted to go there;
//! - else a conditional branch is predicted taken if it goes backward and not taken if it goes forward, and an indirect one
//!   is not predicted.
//!
//! # Practice
//! The answer for a branch depends on the taken branches right before it alone, however they were handed over, and whether those
//! between them were recorded. That is what makes it cheap: a unit that keeps the last 32 of a batch of thousands asks for those 32
//! only, and one that records taken branches needs no others.

use serde::{Deserialize, Serialize};
use x86::watch::{BranchRecord, Flow};

/// How many taken branches back the predictor remembers.
pub const WINDOW: usize = 16;

const NOT_TAKEN: u8 = Flow::Cond { taken: false }.code();
const TAKEN: u8 = Flow::Cond { taken: true }.code();
const JUMP_IND: u8 = Flow::JumpInd.code();
const CALL_IND: u8 = Flow::CallInd.code();

/// The taken branches before the batch at hand, oldest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Predictor {
    recent: [(u64, u64); WINDOW],
    len: u8,
}

impl Predictor {
    /// Whether `records[index]` was predicted, `records` being what follows the branches remembered.
    #[inline(never)]
    pub fn predicts(&self, records: &[BranchRecord], index: usize) -> bool {
        let Some((record, before)) = records.get(index).zip(records.get(..index)) else {
            return false;
        };
        let conditional = match record.flow {
            NOT_TAKEN | TAKEN => true,
            JUMP_IND | CALL_IND => false,
            _ => return true,
        };
        let known = self.last_target(before, record.from);
        judge(record, known, conditional)
    }

    /// Where a branch of `before` and what is remembered went that was taken among the last [`WINDOW`].
    fn last_target(&self, before: &[BranchRecord], from: u64) -> Option<u64> {
        let known = before.iter().rev().filter(|r| is_taken(r)).map(|r| (r.from, r.to));
        let remembered = self.remembered().iter().rev().copied();
        let mut window = known.chain(remembered).take(WINDOW);
        window.find(|known| known.0 == from).map(|known| known.1)
    }

    /// The batch is over: remembers its end.
    pub fn advance(&mut self, records: &[BranchRecord]) {
        let mut new = [(0, 0); WINDOW];
        let mut first = WINDOW;
        for record in records.iter().rev().filter(|r| is_taken(r)).take(WINDOW) {
            first -= 1;
            new[first] = (record.from, record.to);
        }
        let new = &new[first..];
        let kept = usize::from(self.len).min(WINDOW - new.len());
        let start = usize::from(self.len) - kept;
        self.recent.copy_within(start..start + kept, 0);
        self.recent[kept..kept + new.len()].copy_from_slice(new);
        self.len = (kept + new.len()) as u8;
        // What is not remembered is zero, so that equal states compare equal.
        self.recent[usize::from(self.len)..].fill((0, 0));
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    fn remembered(&self) -> &[(u64, u64)] {
        &self.recent[..usize::from(self.len).min(WINDOW)]
    }
}

/// [`Predictor::predicts`] for one branch after the other, which is cheaper than asking for each.
///
/// A table says where each branch was taken last. A place in it that another branch has taken within the window says nothing;
/// then all of the window is looked at.
pub struct Stream<'a> {
    predictor: &'a Predictor,
    records: &'a [BranchRecord],
    /// Of the last branch that was taken at the place: one more than its index, 0 for none, and how many were taken before it.
    met: [(u32, u32); PLACES],
    next: usize,
    /// Branches that were taken before the next.
    taken: u32,
}

/// Places of a [`Stream`]'s table.
const PLACES: usize = 128;

impl<'a> Stream<'a> {
    /// For `records`, which follow what the predictor remembers.
    pub fn new(predictor: &'a Predictor, records: &'a [BranchRecord]) -> Self {
        Self {
            predictor,
            records,
            met: [(0, 0); PLACES],
            next: 0,
            taken: 0,
        }
    }

    fn place(from: u64) -> usize {
        (from ^ from >> 7) as usize & (PLACES - 1)
    }

    /// Whether `records[index]` was predicted; to be asked in ascending order.
    #[inline(always)]
    pub fn predicts(&mut self, index: usize) -> bool {
        while self.next < index {
            let record = &self.records[self.next];
            self.next += 1;
            if is_taken(record) {
                self.met[Self::place(record.from)] = (self.next as u32, self.taken);
                self.taken += 1;
            }
        }
        let record = &self.records[index];
        let conditional = match record.flow {
            NOT_TAKEN | TAKEN => true,
            JUMP_IND | CALL_IND => false,
            _ => return true,
        };
        let (met, at) = self.met[Self::place(record.from)];
        if self.taken < WINDOW as u32 {
            return self.predictor.predicts(self.records, index);
        }
        if met == 0 || at + (WINDOW as u32) < self.taken {
            return judge(record, None, conditional);
        }
        let last = &self.records[met as usize - 1];
        if last.from == record.from {
            return judge(record, Some(last.to), conditional);
        }
        self.predictor.predicts(self.records, index)
    }
}

#[inline(always)]
fn is_taken(record: &BranchRecord) -> bool {
    record.flow != NOT_TAKEN
}

/// Whether a branch was predicted that went to `known` when it was last taken. Of one that was not taken, where it would have gone is not
/// in its record: unless it is known, it counts as predicted.
#[inline(always)]
fn judge(record: &BranchRecord, known: Option<u64>, conditional: bool) -> bool {
    match known {
        Some(to) => record.flow != NOT_TAKEN && to == record.to,
        None => conditional && (record.flow == NOT_TAKEN || record.to <= record.from),
    }
}

#[cfg(test)]
#[path = "predictor_test.rs"]
mod tests;
