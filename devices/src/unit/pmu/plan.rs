//! What follows from the registers: which counters count what, and what they need to hear for it.

use x86::msr::IA32_PERFEVTSEL0;
use x86::pmu::{Caches, Count, EventSelect, FixedControl, Offcore, status};

use super::events::{Rate, Source};
use super::{COUNTERS, FIXED, GENERAL, Pmu, bit, each, netburst};

/// What follows from the registers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Plan {
    /// What each counter counts, if it is enabled at all.
    pub counters: [Option<CountRule>; COUNTERS],
    /// Counters that are enabled for ring 0, and for the others.
    pub rings: [u32; 2],
    /// Counters that want branch records.
    pub branches: u32,
    /// Counters that want accesses.
    pub accesses: u32,
    /// Counters that want to know what was fetched.
    pub fetches: u32,
    /// Counters that want to see instructions.
    pub classes: u32,
    /// Counters that count in transactions only.
    pub in_tx: u32,
    /// Counters that an abort takes back to where the transaction began.
    pub checkpointed: u32,
    /// Counters of transactions.
    pub transactions: u32,
    /// Counters that count on their own: instructions and steps.
    pub clocks: u32,
    /// Counters of mispredicted branches.
    pub mispredicted: u32,
    /// Some counter counts in one ring and not in the other, or time in HLT must not count.
    pub transfers: bool,
    pub metrics: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct CountRule {
    pub source: Source,
    pub rate: Rate,
    pub edge: bool,
    /// Counts in transactions only.
    pub in_tx: bool,
    /// What an aborted transaction counted is taken back.
    pub checkpointed: bool,
}

impl Plan {
    pub(super) fn put(&mut self, counter: usize, line: CountRule, [os, usr]: [bool; 2]) {
        let own = 1 << counter;
        if !os && !usr || line.rate == Rate::Never {
            return;
        }
        self.counters[counter] = Some(line);
        if os {
            self.rings[0] |= own;
        }
        if usr {
            self.rings[1] |= own;
        }
        self.transfers |= os != usr || line.counts_cycles() || line.source.differs_by_ring();
        if line.source.is_branch() {
            self.branches |= own;
        }
        if line.source.is_mispredicted() {
            self.mispredicted |= own;
        }
        if line.source.is_access() {
            self.accesses |= own;
        }
        if line.source.is_fetch() {
            self.fetches |= own;
        }
        if line.source.is_class() {
            self.classes |= own;
        }
        if line.counts_on_its_own() {
            self.clocks |= own;
        }
        if line.in_tx {
            self.in_tx |= own;
        }
        if line.checkpointed {
            self.checkpointed |= own;
        }
        if line.source.is_transactions() {
            self.transactions |= own;
        }
    }
}

impl Pmu {
    /// The counter's bits.
    pub(super) fn mask(&self, counter: usize) -> u64 {
        let width = if counter < GENERAL {
            self.caps.general_width
        } else {
            self.caps.fixed_width
        };
        u64::MAX >> (64 - u32::from(width).clamp(1, 64))
    }

    pub(super) fn has_metrics(&self) -> bool {
        self.caps.capable(x86::pmu::capabilities::METRICS)
    }

    /// MSR_PERF_METRICS: retiring in the lowest byte, bad speculation in the second, back-end bound in the fourth. A mispredicted branch
    /// loses a cycle's slots. The four are 255 together.
    pub(super) fn metrics(&self) -> u64 {
        let [written, slots, instructions, mispredicted] = self.s.metrics;
        if slots == 0 {
            return written;
        }
        let share = |part: u64| (u128::from(part) * 255 / u128::from(slots)).min(255) as u64;
        let retiring = share(instructions);
        let speculation = share(mispredicted.saturating_mul(self.caps.slots.into())).min(255 - retiring);
        retiring | speculation << 8 | (255 - retiring - speculation) << 24
    }

    /// The event and its mask that a value of an IA32_PERFEVTSELx or a CCCR enables and that counts nothing here: one that is not known, or
    /// whose occasion never comes.
    pub fn counts_nothing(&self, msr: u32, value: u64) -> Option<(u8, u16)> {
        if self.caps.netburst.is_some() {
            return match self.netburst_register(msr)? {
                netburst::Register::Cccr(counter) => self.netburst_counts_nothing(counter, value),
                _ => None,
            };
        }
        let select = EventSelect::from_bits(value);
        let counter = msr.wrapping_sub(IA32_PERFEVTSEL0) < u32::from(self.caps.general);
        let counts = || self.caps.event(select).is_some_and(|row| row.count != Count::Nothing);
        (counter && select.enable() && (select.os() || select.usr()) && !counts())
            .then(|| (select.event(), select.umask().into()))
    }

    /// Whether an overflow asks for an interrupt.
    pub(super) fn interrupts(&self, counter: usize) -> bool {
        if counter < GENERAL {
            EventSelect::from_bits(self.s.selects[counter]).int()
        } else {
            FixedControl::of(self.s.fixed_control, (counter - GENERAL) as u32).pmi
        }
    }

    /// Whether an overflow arms PEBS: it is enabled for the counter, and the event can do it.
    pub(super) fn samples(&self, counter: usize) -> bool {
        if self.caps.netburst.is_some() {
            return self.netburst_samples(counter);
        }
        let Some(caps) = self.pebs.caps() else { return false };
        if self.s.pebs.enable & bit(counter) == 0 {
            return false;
        }
        if counter >= GENERAL {
            return true;
        }
        let select = EventSelect::from_bits(self.s.selects[counter]);
        let precise = self.caps.event(select).is_some_and(|row| row.precise);
        // The precise store of Sandy Bridge has an enable of its own.
        if (select.event(), select.umask()) == (0xCD, 2) && !self.pebs.precise_store(&self.s.pebs) {
            return false;
        }
        let qualified = select.invert() || select.counter_mask() != 0;
        (precise || caps.any_event) && !select.edge() && !select.any() && (caps.qualified || !qualified)
    }

    pub(super) fn cause_stands(&self) -> bool {
        let overflows = (0..COUNTERS).any(|c| self.s.status & bit(c) != 0 && self.interrupts(c));
        overflows || self.s.status & status::BUFFER != 0
    }

    /// After a change of registers.
    pub(super) fn replan(&mut self) {
        let plan = if self.caps.netburst.is_some() {
            self.netburst_plan()
        } else {
            self.architectural_plan()
        };
        if plan.mispredicted == 0 && !plan.metrics {
            self.s.predictor.reset();
        }
        if plan.classes == 0 {
            self.s.class = None;
        }
        self.plan = plan;
        self.relive();
    }

    /// Which counters count what, on all parts but the Pentium 4.
    fn architectural_plan(&self) -> Plan {
        let mut plan = Plan::default();
        let frozen = self.s.status & status::COUNTERS_FROZEN != 0;
        for counter in 0..usize::from(self.caps.general) {
            let select = EventSelect::from_bits(self.s.selects[counter]);
            // One enable for both of P6. SDM Vol. 3B 21.6.8.2 "PerfEvtSel0 and PerfEvtSel1 MSRs".
            let enabled = match self.caps.version {
                0 => EventSelect::from_bits(self.s.selects[0]).enable(),
                1 => select.enable(),
                _ => select.enable() && self.s.global_control & bit(counter) != 0,
            };
            let Some(row) = self.caps.event(select).filter(|_| enabled) else {
                continue;
            };
            let mut line = CountRule::new(row.count, select);
            if let Count::Caches(Caches::Offcore(index)) = row.count {
                let index = usize::from(index & 1);
                line.source = Source::Offcore(Offcore::of(self.s.offcore[index], self.caps.offcore[index]));
            }
            plan.put(counter, line, [select.os(), select.usr()]);
        }
        const COUNTS: [Count; FIXED] = [Count::Instructions, Count::Cycles, Count::Cycles, Count::Slots];
        for (index, &count) in COUNTS.iter().enumerate().take(self.caps.fixed.into()) {
            let (counter, control) = (GENERAL + index, FixedControl::of(self.s.fixed_control, index as u32));
            if self.s.global_control & bit(counter) != 0 {
                let line = CountRule::new(count, EventSelect::new());
                plan.put(counter, line, [control.os, control.usr]);
            }
        }
        let slots = GENERAL + FIXED - 1;
        plan.metrics =
            self.has_metrics() && self.s.global_control & status::METRICS != 0 && plan.counters[slots].is_some();
        if frozen { Plan::default() } else { plan }
    }

    /// After a change of registers, ring or HLT: which counters count from here on.
    pub(super) fn relive(&mut self) {
        let ring = self.plan.rings[usize::from(self.s.cpl != 0)];
        let live = if self.s.halted { 0 } else { ring };
        let live = if self.s.in_transaction {
            live
        } else {
            live & !self.plan.in_tx
        };
        let rising = live & !core::mem::replace(&mut self.s.live, live);
        for counter in each(rising) {
            // What is true in every cycle becomes true now.
            if let Some(CountRule {
                edge: true,
                source,
                rate,
                ..
            }) = self.plan.counters[counter]
                && (source.is_clock() && rate == Rate::Events || rate == Rate::Cycles)
            {
                self.s.values[counter] = self.s.values[counter].wrapping_add(1) & self.mask(counter);
            }
        }
    }
}
