//! Counting while the guest runs on a processor of the host's, of which only the time is known that it ran.
//!
//! One cycle is one tick of the time-stamp counter there, whatever the ring. That is enough for the counters of a lockup
//! watchdog, and for little else: what counts anything but cycles, one ring alone, or samples, has to see instructions.

use x86::watch::{Effects, Processor};

use super::events::{Rate, Source, until};
use super::plan::CountRule;
use super::{PebsInputs, Pmu, each};

impl CountRule {
    fn counts_time(self) -> bool {
        let time = matches!(self.source, Source::Cycles | Source::Reference | Source::Slots);
        time && self.rate == Rate::Events && !self.edge && !self.in_tx && !self.checkpointed
    }
}

impl Pmu {
    /// Whether all that is counted now can be counted from the time that passes, and nothing else is to be done.
    pub fn time_is_enough(&self) -> bool {
        let plan = &self.plan;
        let both = plan.rings[0] == plan.rings[1];
        let time =
            |counter: usize| plan.counters[counter].is_some_and(CountRule::counts_time) && !self.samples(counter);
        let still = self.s.outbox == Effects::NONE && self.s.pebs.armed == 0 && self.s.waiting == 0;
        both && still && !plan.metrics && !self.s.in_transaction && each(plan.rings[0]).all(time)
    }

    /// Cycles outside HLT until the first counter overflows, or fewer; `None`: nothing is counted. For a unit to which
    /// [time is enough](Pmu::time_is_enough).
    pub fn cycles_left(&self) -> Option<u64> {
        let left = |counter: usize| {
            let line = self.plan.counters[counter]?;
            let left = (self.mask(counter) - self.s.values[counter]).saturating_add(1);
            Some(match line.source {
                Source::Reference => until(self.s.counted[1], left, self.caps.reference.max(1).into()),
                Source::Slots => left.div_ceil(self.caps.slots.max(1).into()),
                _ => left,
            })
        };
        each(self.plan.rings[0]).filter_map(left).min()
    }

    /// The guest has run on a processor of the host for so many cycles, and is in HLT now or not.
    pub fn elapsed(&mut self, cycles: u64, halted: bool, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) {
        // What the engine counted last.
        self.count_to_now(cpu, inputs);
        if cycles != 0 {
            self.s.halted = false;
            self.relive();
            self.s.host_cycles = self.s.host_cycles.wrapping_add(cycles);
            self.count_to_now(cpu, inputs);
        }
        self.s.halted = halted;
        self.relive();
    }
}
