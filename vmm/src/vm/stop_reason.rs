//! How far a machine is to run, and why it came back.

use std::time::Instant;

use engine::Cpu;
use kvm::Limit;

use super::{end::End, soft::Soft};
use crate::debug;

/// How far a machine is to run, if nothing else has it come back before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Until {
    /// So many steps, over all CPUs, counted from the machine's start.
    pub steps: Option<u64>,
    /// So many steps of this CPU.
    pub cpu: Option<(usize, u64)>,
    /// This point in wall time.
    pub deadline: Option<Instant>,
    /// So often out of KVM, of a machine whose guest is there.
    pub exits: Option<Limit>,
    /// The moment at which the guest's kernel says that it has panicked.
    pub panic: bool,
}

impl Until {
    /// Steps that the CPU whose turn it is may make; `None`: none, the machine is there.
    pub(super) fn left(&self, soft: &Soft) -> Option<u64> {
        let whole = match self.steps {
            Some(steps) => steps.checked_sub(soft.steps()).filter(|left| *left > 0)?,
            None => u64::MAX,
        };
        let Some((cpu, steps)) = self.cpu else {
            return Some(whole);
        };
        let made = soft.cpu(cpu).map_or(0, Cpu::steps);
        let own = steps.checked_sub(made).filter(|left| *left > 0)?;
        Some(if cpu == soft.current() { whole.min(own) } else { whole })
    }
}

/// Why a machine came back from running. It can be run on from there unless the guest has ended its run.
#[derive(Debug)]
pub enum StopReason {
    /// It has come as far as it was to.
    Reached,
    /// The point in wall time has passed.
    Deadline,
    /// The guest's kernel has just said that it has panicked, which was waited for.
    Panicked,
    /// A debugger's stop.
    Debugger(debug::DebugStop),
    /// [`Outside`](super::outside::Outside) had it come back, or somebody has a request.
    Outside,
    /// The run is over.
    Ended(End),
}

impl StopReason {
    /// How the run has ended, if it has.
    pub fn end(self) -> Option<End> {
        match self {
            StopReason::Ended(end) => Some(end),
            _ => None,
        }
    }
}
