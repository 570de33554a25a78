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
use x86::seam::{BranchRecord, Flow};

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
mod tests {
    use super::*;

    fn branch(flow: Flow, from: u64, to: u64) -> BranchRecord {
        BranchRecord {
            from,
            to,
            flow: flow.code(),
            ..BranchRecord::default()
        }
    }

    const TAKEN: Flow = Flow::Cond { taken: true };
    const NOT: Flow = Flow::Cond { taken: false };

    // covers: lbr/mispredict
    #[test]
    fn what_is_predicted() {
        for (earlier, branch, predicted, why) in [
            (vec![], branch(TAKEN, 0x20, 0x10), true, "backward: taken"),
            (vec![], branch(TAKEN, 0x20, 0x30), false, "forward: not taken"),
            (
                vec![branch(TAKEN, 0x20, 0x30)],
                branch(TAKEN, 0x20, 0x30),
                true,
                "as the last time",
            ),
            (
                vec![branch(NOT, 0x20, 0x22)],
                branch(TAKEN, 0x20, 0x10),
                false,
                "not as the last time",
            ),
            (
                vec![branch(TAKEN, 0x20, 0x10), branch(NOT, 0x20, 0x22)],
                branch(NOT, 0x20, 0x22),
                true,
                "the last time counts, not the one before",
            ),
            (vec![], branch(Flow::JumpInd, 0x20, 0x30), false, "a target never seen"),
            (
                vec![branch(Flow::CallInd, 0x20, 0x30)],
                branch(Flow::CallInd, 0x20, 0x30),
                true,
                "the same target",
            ),
            (
                vec![branch(Flow::CallInd, 0x20, 0x30)],
                branch(Flow::CallInd, 0x20, 0x40),
                false,
                "another target",
            ),
            (vec![], branch(Flow::Jump, 0x20, 0x90), true, "direct"),
            (vec![], branch(Flow::Call, 0x20, 0x90), true, "direct"),
            (vec![], branch(Flow::Ret, 0x20, 0x90), true, "the return stack"),
        ] {
            let mut records = earlier.clone();
            records.push(branch);
            let fresh = Predictor::default();
            assert_eq!(fresh.predicts(&records, earlier.len()), predicted, "{why}");
            // The same, had the earlier ones come in a batch of their own.
            let mut later = Predictor::default();
            later.advance(&earlier);
            assert_eq!(later.predicts(&[branch], 0), predicted, "{why}: in two batches");
        }
    }

    // covers: lbr/mispredict
    #[test]
    fn answers_do_not_depend_on_the_batches() {
        let mut x = 1u64;
        let records: Vec<_> = (0..500)
            .map(|_| {
                x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Some share a place of the table.
                let from = 0x1000 + (x >> 60) % 8 * 4 + (x >> 63) * 0x4081;
                branch(Flow::ALL[(x >> 40) as usize % 6], from, 0x1000 + (x >> 50) % 3 * 8)
            })
            .collect();
        let whole: Vec<_> = (0..records.len())
            .map(|i| Predictor::default().predicts(&records, i))
            .collect();
        assert!(whole.iter().any(|&p| p) && whole.iter().any(|&p| !p));
        let fresh = Predictor::default();
        let mut stream = Stream::new(&fresh, &records);
        let streamed: Vec<_> = (0..records.len()).map(|i| stream.predicts(i)).collect();
        assert_eq!(streamed, whole);
        // Asked for some of them only.
        let mut stream = Stream::new(&fresh, &records);
        for i in (0..records.len()).step_by(7) {
            assert_eq!(stream.predicts(i), whole[i], "{i}");
        }
        for size in [1, 2, 7, 15, 16, 17, 100] {
            let mut predictor = Predictor::default();
            let mut answers = Vec::new();
            for batch in records.chunks(size) {
                let mut stream = Stream::new(&predictor, batch);
                for i in 0..batch.len() {
                    assert_eq!(stream.predicts(i), predictor.predicts(batch, i));
                    answers.push(predictor.predicts(batch, i));
                }
                predictor.advance(batch);
            }
            assert_eq!(answers, whole, "batches of {size}");
        }
    }
}
