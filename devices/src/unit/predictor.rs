//! What a branch record says of prediction: a small model, since nothing here predicts branches to run faster.
//!
//! # Theory
//! Hardware reports whether its own predictor was right. This machine has none, and a guest's profiler still wants plausible
//! answers, the same in every run. So:
//!
//! - direct jumps and calls, returns and far transfers are always predicted (a return by the return stack);
//! - a conditional or indirect branch goes where it went the last time, if that was among the last [`WINDOW`] branches;
//! - else a conditional branch is predicted taken if it goes backward and not taken if it goes forward, and an indirect one
//!   is not predicted.
//!
//! # Practice
//! The answer for a branch depends on the branches right before it alone, however they were handed over. That is what makes
//! it cheap: a unit that keeps the last 32 of a batch of thousands asks for those 32 only.

use serde::{Deserialize, Serialize};
use x86::watch::{BranchRecord, Flow};

/// How many branches back the predictor remembers.
pub const WINDOW: usize = 16;

const NOT_TAKEN: u8 = Flow::Cond { taken: false }.code();
const TAKEN: u8 = Flow::Cond { taken: true }.code();
const JUMP_IND: u8 = Flow::JumpInd.code();
const CALL_IND: u8 = Flow::CallInd.code();

/// The branches before the batch at hand, oldest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Predictor {
    recent: [(u64, u64); WINDOW],
    len: u8,
}

impl Predictor {
    /// Whether `records[index]` was predicted, `records` being what follows the branches remembered.
    pub fn predicts(&self, records: &[BranchRecord], index: usize) -> bool {
        let Some((record, before)) = records.get(index).zip(records.get(..index)) else {
            return false;
        };
        let conditional = match record.flow {
            NOT_TAKEN | TAKEN => true,
            JUMP_IND | CALL_IND => false,
            _ => return true,
        };
        let last = if let Some(window) = before.last_chunk::<WINDOW>() {
            newest(window.iter().map(|r| r.from == record.from)).map(|i| window[i].to)
        } else {
            let rest = (WINDOW - before.len()).min(usize::from(self.len));
            let remembered = &self.remembered()[usize::from(self.len) - rest..];
            newest(before.iter().map(|r| r.from == record.from))
                .map(|i| before[i].to)
                .or_else(|| newest(remembered.iter().map(|r| r.0 == record.from)).map(|i| remembered[i].1))
        };
        match last {
            Some(to) => to == record.to,
            None => guess(record, conditional),
        }
    }

    /// The batch is over: remembers its end.
    pub fn advance(&mut self, records: &[BranchRecord]) {
        let new = &records[records.len().saturating_sub(WINDOW)..];
        let kept = usize::from(self.len).min(WINDOW - new.len());
        let start = usize::from(self.len) - kept;
        self.recent.copy_within(start..start + kept, 0);
        for (slot, record) in self.recent[kept..].iter_mut().zip(new) {
            *slot = (record.from, record.to);
        }
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
/// A table says where each branch was met last. A place in it that another branch has taken within the window says nothing;
/// then all of the window is looked at.
pub struct Stream<'a> {
    predictor: &'a Predictor,
    records: &'a [BranchRecord],
    /// One more than the index of the last branch met at the place; 0 for none.
    met: [u32; PLACES],
    next: usize,
}

/// Places of a [`Stream`]'s table.
const PLACES: usize = 128;

impl<'a> Stream<'a> {
    /// For `records`, which follow what the predictor remembers.
    pub fn new(predictor: &'a Predictor, records: &'a [BranchRecord]) -> Self {
        Self {
            predictor,
            records,
            met: [0; PLACES],
            next: 0,
        }
    }

    fn place(from: u64) -> usize {
        (from ^ from >> 7) as usize & (PLACES - 1)
    }

    /// Whether `records[index]` was predicted; to be asked in ascending order.
    pub fn predicts(&mut self, index: usize) -> bool {
        while self.next < index {
            self.met[Self::place(self.records[self.next].from)] = self.next as u32 + 1;
            self.next += 1;
        }
        let record = &self.records[index];
        let conditional = match record.flow {
            NOT_TAKEN | TAKEN => true,
            JUMP_IND | CALL_IND => false,
            _ => return true,
        };
        let met = self.met[Self::place(record.from)] as usize;
        if index < WINDOW {
            return self.predictor.predicts(self.records, index);
        }
        if met + WINDOW <= index {
            return guess(record, conditional);
        }
        let last = &self.records[met - 1];
        if last.from == record.from {
            return last.to == record.to;
        }
        self.predictor.predicts(self.records, index)
    }
}

/// For a branch that was not met lately. What one that was not taken would have done is not in its record: it counts as
/// predicted.
#[inline(always)]
fn guess(record: &BranchRecord, conditional: bool) -> bool {
    conditional && (record.flow == NOT_TAKEN || record.to <= record.from)
}

/// The last of at most [`WINDOW`] that hits, found without a branch for each.
#[inline(always)]
fn newest(hits: impl Iterator<Item = bool>) -> Option<usize> {
    let mask = hits.zip(0..).fold(0u32, |mask, (hit, i)| mask | u32::from(hit) << i);
    mask.checked_ilog2().map(|i| i as usize)
}

#[cfg(test)]
#[path = "predictor_test.rs"]
mod tests;
