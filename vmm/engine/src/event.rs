//! Delivery of exceptions and interrupts (SDM Vol. 3A chapter 7 "Interrupt and Exception Handling").

use crate::cpu::{Cpu, Event};
use crate::op::Done;

impl Cpu {
    /// Delivers an event: `Err` with the next exception in `Cpu::event` when delivery itself faults.
    pub(crate) fn deliver(&mut self, event: Event) -> Done {
        let _ = event;
        Err(self.gp(0))
    }
}
