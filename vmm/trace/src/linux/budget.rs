//! What a look into a guest's memory may cost, whatever lies there.
//!
//! The guest decides what is in its memory, so it decides how far a chain leads and how often something seems to begin. Each look
//! therefore has a number of bytes that it reads and of steps that it makes; then all reads fail, and the look ends with what it has.
//! Both are counts, so that two runs of the same guest end at the same place. Wall time ends a look by [`Memory::is_awaited`] alone.

use super::memory::Memory;

/// How much is read or done between two questions whether the result is still awaited.
const ASK: u64 = 1 << 20;

/// What a look may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes read of the guest's memory.
    pub bytes: u64,
    /// Bytes looked at, symbols made, types visited.
    pub steps: u64,
}

/// Memory, read within a budget.
pub struct Look<'a> {
    memory: &'a mut dyn Memory,
    left: Budget,
    /// What of both was left when it was asked last.
    asked: u64,
    over: bool,
}

impl<'a> Look<'a> {
    /// A look that costs at most this.
    pub fn new(memory: &'a mut dyn Memory, budget: Budget) -> Look<'a> {
        let over = !memory.is_awaited();
        Look {
            memory,
            left: budget,
            asked: budget.bytes.saturating_add(budget.steps),
            over,
        }
    }

    /// Where RAM is.
    pub fn ram(&self) -> Vec<std::ops::Range<u64>> {
        self.memory.ram()
    }

    /// Whether nothing more may be read or done.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Reads guest-physical memory; `false` if not all of it is RAM, or the budget does not allow it.
    pub fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.pay(bytes.len() as u64, 0) && self.memory.read_physical(gpa, bytes)
    }

    /// Bytes of the guest's memory. None are reserved before the budget allows them.
    pub fn bytes(&mut self, gpa: u64, len: u64) -> Option<Vec<u8>> {
        if len > self.left.bytes {
            return None;
        }
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        self.read_physical(gpa, &mut bytes).then_some(bytes)
    }

    /// Takes steps; `false` if there are no more.
    pub fn spend(&mut self, steps: u64) -> bool {
        self.pay(0, steps)
    }

    fn pay(&mut self, bytes: u64, steps: u64) -> bool {
        let paid = self
            .left
            .bytes
            .checked_sub(bytes)
            .zip(self.left.steps.checked_sub(steps));
        let Some((bytes, steps)) = paid.filter(|_| !self.over) else {
            self.over = true;
            return false;
        };
        self.left = Budget { bytes, steps };
        let left = bytes.saturating_add(steps);
        if self.asked - left >= ASK {
            self.asked = left;
            self.over = !self.memory.is_awaited();
        }
        !self.over
    }
}
