//! The counting pass: what a run has executed, in numbers that add up over its parts.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use x86::watch::{BranchRecord, EventRecord, Far, Flow};

use crate::observe::{Observer, Place, SystemCall, Wanted};

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Branches that were taken, far transfers and events among them.
    taken: u64,
    /// Conditional branches that were not.
    not_taken: u64,
    /// Near calls.
    calls: u64,
    /// System calls.
    system_calls: u64,
    /// Exceptions and software interrupts by vector.
    exceptions: BTreeMap<u8, u64>,
    /// Interrupts by vector.
    interrupts: BTreeMap<u8, u64>,
}

impl Counts {
    /// Adds those of another part.
    pub fn add(&mut self, other: &Counts) {
        self.taken += other.taken;
        self.not_taken += other.not_taken;
        self.calls += other.calls;
        self.system_calls += other.system_calls;
        for (sum, part) in [
            (&mut self.exceptions, &other.exceptions),
            (&mut self.interrupts, &other.interrupts),
        ] {
            for (vector, count) in part {
                *sum.entry(*vector).or_default() += count;
            }
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            (self.taken, "branches taken"),
            (self.not_taken, "branches not taken"),
            (self.calls, "near calls"),
            (self.system_calls, "system calls"),
        ];
        for (count, what) in rows {
            writeln!(f, "{count:>16} {what}")?;
        }
        for (vectors, what) in [(&self.exceptions, "exceptions"), (&self.interrupts, "interrupts")] {
            for (vector, count) in vectors {
                writeln!(f, "{count:>16} {what} of vector {vector:#04x}")?;
            }
        }
        Ok(())
    }
}

impl Observer for Counts {
    fn wanted(&self) -> Wanted {
        Wanted {
            branches: true,
            events: true,
            system_calls: true,
            ..Wanted::default()
        }
    }

    fn branch(&mut self, _: &Place, branch: &BranchRecord) {
        let Some(flow) = Flow::from_code(branch.flow) else {
            return;
        };
        match flow.taken() {
            true => self.taken += 1,
            false => self.not_taken += 1,
        }
        self.calls += u64::from(matches!(flow, Flow::Call | Flow::CallInd));
    }

    fn event(&mut self, _: &Place, event: &EventRecord) {
        let vectors = match Flow::from_code(event.branch.flow) {
            Some(Flow::Far(Far::Interrupt)) => &mut self.interrupts,
            _ => &mut self.exceptions,
        };
        *vectors.entry(event.vector).or_default() += 1;
    }

    fn system_call(&mut self, _: &Place, _: &SystemCall) {
        self.system_calls += 1;
    }
}
