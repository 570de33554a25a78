//! Lines of memory that MONITOR was given, and how often they have been stored to (SDM Vol. 2B "MONITOR—Set Up Monitor Address").

use std::collections::VecDeque;

/// Monitored lines remembered.
const LINES: usize = 64;
/// Bytes in a line.
const LINE: u64 = 64;

/// The lines that processors of a machine monitor or have monitored. All of them share the count.
#[derive(Default)]
pub(crate) struct MonitoredLines {
    /// Guest-physical address, and the count at the last store to it.
    lines: VecDeque<(u64, u64)>,
    /// Grows with each store to a line and each new line.
    stores: u64,
}

impl MonitoredLines {
    /// The count at the last store to a line, if it is known.
    pub fn known(&self, line: u64) -> Option<u64> {
        let (_, stores) = self.lines.iter().find(|(known, _)| *known == line)?;
        Some(*stores)
    }

    /// Counts stores to a line from now on: what the count is, which never says the same for two lines.
    pub fn add(&mut self, line: u64) -> u64 {
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        self.stores += 1;
        self.lines.push_back((line, self.stores));
        self.stores
    }

    /// Whether a span of memory has a byte of a line.
    pub fn touch(&self, gpa: u64, len: u64) -> bool {
        self.lines.iter().any(|&(line, _)| overlap(line, gpa, len))
    }

    /// A store has been made.
    pub fn stored(&mut self, gpa: u64, len: u64) {
        for (line, stores) in &mut self.lines {
            if overlap(*line, gpa, len) {
                self.stores += 1;
                *stores = self.stores;
            }
        }
    }
}

fn overlap(line: u64, gpa: u64, len: u64) -> bool {
    gpa < line + LINE && line < gpa.saturating_add(len)
}
