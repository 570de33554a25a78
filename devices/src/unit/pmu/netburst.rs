//! The Pentium 4's counters. SDM Vol. 3B 21.6.3 "Performance Monitoring (Processors Based on Intel NetBurst Microarchitecture)".
//!
//! # Theory
//! What an ESCR detects is one of the sources that all counters have ([`Source`]), and what a CCCR makes of it one of their rates
//! ([`Rate`]): a threshold of 0 is one event, and no cycle has two. So only what follows from an overflow is this module's:
//!
//! 1. An overflow, or with FORCE_OVF any increment, sets OVF. A counter whose CCCR has the cascade flag counts as long as the OVF flag of
//!    the one before it is set.
//! 2. With OVF_PMI the interrupt comes with the *next* event of the counter, as the manual says: who wants one after 100 events presets
//!    -99.
//! 3. Counter 16, when IA32_PEBS_ENABLE and its event say so, is armed by an overflow and writes a record with its next event, as later
//!    parts do ([`pebs`](crate::unit::ds::pebs)); then it goes on from the reset value. An interrupt comes when the buffer's index reaches
//!    its threshold.
//!
//! # Practice
//! A micro-operation is an instruction, a load, or a store: `uop_type` tags loads and stores, so that `front_end_event` counts these; an
//! ESCR of an execution unit tags its instructions; a replay is an access that missed or was split, or a branch that was mispredicted.
//! Tags are put while the ESCR's rings say so, whether a counter selects it or not. Nothing that retires is bogus.
//!
//! A CPU here has one thread, so logical processor 1's bits count and interrupt nothing, and of the active-thread field one and any
//! count.
//!
//! # Modelled, not measured
//! Of IA32_PEBS_ENABLE the manual says that bit 24 enables PEBS, and, where there are two logical processors, that bit 25 does and bit 24
//! tags replays; that metrics need bit 24, and that they can be counted with neither. Here bit 25 samples, and replays are tagged unless
//! it is set alone.
//!
//! # Left out
//! Errata: some parts of model 2 send no interrupt from cascaded counters.

use serde::{Deserialize, Serialize};
use x86::msr::{
    IA32_PEBS_ENABLE, MSR_BPU_CCCR0, MSR_BPU_COUNTER0, MSR_PEBS_MATRIX_VERT, MSR_TC_PRECISE_EVENT, MsrFault,
};
use x86::pmu::netburst::{
    self, Cccr, Counts, ESCR_NUMBERS, Escr, Event, FIRST_ESCR, Generation, Memory, SAMPLING, Unit,
};
use x86::pmu::netburst::{matrix_vert, pebs_enable};
use x86::watch::{Effects, Processor};

use super::classify::Classes;
use super::events::{Rate, Source};
use super::plan::{CountRule, Plan};
use super::{Had, PebsInputs, Pmu, each};
use crate::unit::ds::pebs::Sample;

/// The registers that other counters do not have; CCCRs are where they have their IA32_PERFEVTSELx.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetburstState {
    /// The ESCRs, by MSR number from [`FIRST_ESCR`] on.
    pub escrs: Vec<u64>,
    /// MSR_TC_PRECISE_EVENT.
    pub precise_event: u64,
    /// MSR_PEBS_MATRIX_VERT.
    pub matrix_vert: u64,
    /// The last instruction that had a tagged access: its address, and how many had retired.
    pub tagged: [u64; 2],
}

impl Default for NetburstState {
    fn default() -> Self {
        Self {
            escrs: vec![0; ESCR_NUMBERS],
            precise_event: 0,
            matrix_vert: 0,
            tagged: [u64::MAX; 2],
        }
    }
}

/// What a number stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Register {
    Counter(usize),
    Cccr(usize),
    /// By index.
    Escr(usize),
    PreciseEvent,
    PebsEnable,
    MatrixVert,
}

/// What an event with its mask comes to.
enum Detected {
    Counted(Source),
    /// It tags, or is always 0.
    Nothing,
}

impl NetburstState {
    /// The same, as long as it has to be.
    pub fn sized(mut self) -> Self {
        self.escrs.resize(ESCR_NUMBERS, 0);
        self
    }

    fn escr(&self, msr: u32) -> Escr {
        let index = msr.wrapping_sub(FIRST_ESCR) as usize;
        Escr::from_bits(self.escrs.get(index).copied().unwrap_or(0))
    }

    /// The ESCRs of a unit that are there.
    fn escrs_of(&self, unit: Unit) -> impl Iterator<Item = Escr> + '_ {
        let pair = netburst::ESCRS.iter().find(|pair| pair.unit == unit);
        let msrs = pair.map_or([0; 2], |pair| pair.msrs);
        msrs.into_iter().filter(|msr| *msr != 0).map(|msr| self.escr(msr))
    }

    /// What an ESCR with this event tags, by ring.
    fn tags<T: Copy + Default>(
        &self,
        unit: Unit,
        of: impl Fn(Escr, Counts) -> Option<T>,
        or: impl Fn(T, T) -> T,
    ) -> [T; 2] {
        let mut tags = [T::default(); 2];
        for escr in self.escrs_of(unit) {
            // What tags is the same on all of them.
            let row = Generation::Late.detected(unit, escr);
            let Some(tag) = row.and_then(|row| of(escr, row.counts)) else {
                continue;
            };
            for (ring, on) in [escr.os(), escr.usr()].into_iter().enumerate() {
                if on {
                    tags[ring] = or(tags[ring], tag);
                }
            }
        }
        tags
    }

    /// The accesses that the front end tags.
    fn front_end(&self) -> [Memory; 2] {
        let tagged = |escr: Escr, counts| (counts == Counts::Tags).then(|| loads_and_stores(escr.mask() >> 1));
        self.tags(Unit::Rat, tagged, Memory::or)
    }

    /// The instructions that an execution unit gives one of these tags.
    fn execution(&self, wanted: u8) -> [Classes; 2] {
        let tagged = |escr: Escr, counts| match counts {
            Counts::Operations(operation) if escr.mask() >> 15 != 0 && escr.tag_enable() => {
                (escr.tag_value() & wanted != 0).then(|| Classes::with(operation))
            }
            _ => None,
        };
        self.tags(Unit::Firm, tagged, Classes::or)
    }

    /// What is tagged when it is replayed.
    fn replays(&self, enable: u64) -> Source {
        use pebs_enable::{DATA_TLB_MISS, FIRST_LEVEL_MISS, MISPREDICTED, SECOND_LEVEL_MISS, SPLIT};
        if enable & (pebs_enable::TAG | pebs_enable::MY_THREAD) == pebs_enable::MY_THREAD {
            return Source::Memory([Memory::NONE; 2]);
        }
        let (loads, stores) = (
            self.matrix_vert & matrix_vert::LOADS != 0,
            self.matrix_vert & matrix_vert::STORES != 0,
        );
        // Splits are an event of their own, which has to be selected, too.
        let splits = |event, bit: Memory| {
            let selected = |escr: Escr, counts| match counts {
                Counts::Memory(kinds) if escr.event() == event && escr.mask() & 1 << 1 != 0 => {
                    kinds.iter().any(|(_, kind)| kind.meets(bit)).then_some(bit)
                }
                _ => None,
            };
            self.tags(Unit::Saat, selected, Memory::or)
        };
        let (split_loads, split_stores) = (splits(4, Memory::SPLIT_LOADS), splits(5, Memory::SPLIT_STORES));
        let ring = |ring: usize| {
            [
                (FIRST_LEVEL_MISS, loads, Memory::FIRST_LEVEL_LOAD_MISSES),
                (SECOND_LEVEL_MISS, loads, Memory::SECOND_LEVEL_LOAD_MISSES),
                (DATA_TLB_MISS, loads, Memory::LOAD_WALKS),
                (DATA_TLB_MISS, stores, Memory::STORE_WALKS),
                (SPLIT, loads, split_loads[ring]),
                (SPLIT, stores, split_stores[ring]),
            ]
            .into_iter()
            .filter(|(bit, of, _)| enable & bit != 0 && *of)
            .fold(Memory::NONE, |all, (_, _, kind)| all.or(kind))
        };
        let kinds = [ring(0), ring(1)];
        let branches = enable & MISPREDICTED == MISPREDICTED && self.matrix_vert & matrix_vert::BRANCHES != 0;
        if branches && kinds == [Memory::NONE; 2] {
            return Source::Mispredicted(x86::pmu::Branches::ALL);
        }
        Source::Memory(kinds)
    }

    /// What an event with this mask counts.
    fn detect(&self, counts: Counts, escr: Escr, enable: u64) -> Detected {
        let mask = escr.mask();
        let some = |chosen: u16, source| match mask & chosen {
            0 => Detected::Nothing,
            _ => Detected::Counted(source),
        };
        match counts {
            Counts::Cycles => some(1, Source::Cycles),
            Counts::MicroOps => some(1, Source::Instructions),
            Counts::Instructions => {
                let by = self.front_end();
                match mask & 3 {
                    0 => Detected::Nothing,
                    3 => Detected::Counted(Source::Instructions),
                    1 if by == [Memory::NONE; 2] => Detected::Counted(Source::Instructions),
                    which => Detected::Counted(Source::Tagged {
                        by,
                        without: which == 1,
                    }),
                }
            }
            Counts::Outcomes => some(0xF, Source::Outcomes(mask as u8 & 0xF)),
            Counts::Types => some(0x1E, Source::Branches(netburst::branch_types(mask))),
            Counts::MispredictedTypes => some(0x1E, Source::Mispredicted(netburst::branch_types(mask))),
            Counts::Mispredicted => some(1, Source::Mispredicted(x86::pmu::Branches::ALL)),
            Counts::Operations(operation) => some(1 << 15, Source::Classes([Classes::with(operation); 2])),
            Counts::Memory(kinds) => {
                let chosen = kinds.iter().filter(|(bit, _)| mask >> bit & 1 != 0);
                match chosen.fold(Memory::NONE, |all, (_, kind)| all.or(*kind)) {
                    Memory::NONE => Detected::Nothing,
                    all => Detected::Counted(Source::Memory([all; 2])),
                }
            }
            Counts::FrontEnd => some(1, Source::Memory(self.front_end())),
            Counts::Execution => some(0xF, Source::Classes(self.execution(mask as u8 & 0xF))),
            Counts::Replay => some(1, self.replays(enable)),
            Counts::Tags | Counts::Nothing => Detected::Nothing,
        }
    }
}

/// Loads by bit 0, stores by bit 1.
fn loads_and_stores(bits: u16) -> Memory {
    let of = |bit: u16, kind| if bits & bit != 0 { kind } else { Memory::NONE };
    of(1, Memory::LOADS).or(of(2, Memory::STORES))
}

/// How often a CCCR has a source count.
fn rate(source: Source, cccr: Cccr) -> Rate {
    match (cccr.compare(), cccr.threshold(), cccr.complement()) {
        (false, ..) | (true, 0, false) => Rate::Events,
        // No cycle is without a cycle.
        (true, 0, true) if source == Source::Cycles => Rate::Never,
        (true, 0, true) => Rate::Idle,
        (true, _, false) => Rate::Never,
        (true, _, true) => Rate::Cycles,
    }
}

/// What a CCCR makes of a source.
fn rule(source: Source, cccr: Cccr) -> CountRule {
    CountRule {
        source,
        rate: rate(source, cccr),
        edge: cccr.compare() && cccr.edge(),
        in_tx: false,
        checkpointed: false,
    }
}

impl Pmu {
    fn cccr(&self, counter: usize) -> Cccr {
        Cccr::from_bits(self.s.selects[counter])
    }

    /// The ESCR that a counter's CCCR selects, and the event that it detects, if the part has it.
    fn selected(&self, counter: usize, cccr: Cccr) -> Option<(Escr, Option<&'static Event>)> {
        let generation = self.caps.netburst?;
        let (pair, msr) = netburst::selected(counter, cccr.select())?;
        let escr = self.s.netburst.as_ref()?.escr(msr);
        let event = generation.detected(pair.unit, escr);
        generation.has_escr(msr).then_some((escr, event))
    }

    /// What the number stands for.
    pub(super) fn netburst_register(&self, msr: u32) -> Option<Register> {
        let within = |first: u32, count: usize| Some(msr.checked_sub(first)? as usize).filter(|index| *index < count);
        if let Some(counter) = within(MSR_BPU_COUNTER0, netburst::COUNTERS) {
            return Some(Register::Counter(counter));
        }
        if let Some(counter) = within(MSR_BPU_CCCR0, netburst::COUNTERS) {
            return Some(Register::Cccr(counter));
        }
        if self.caps.netburst.is_some_and(|generation| generation.has_escr(msr)) {
            return Some(Register::Escr((msr - FIRST_ESCR) as usize));
        }
        let samples = self.pebs.caps().is_some();
        match msr {
            MSR_TC_PRECISE_EVENT => Some(Register::PreciseEvent),
            IA32_PEBS_ENABLE if samples => Some(Register::PebsEnable),
            MSR_PEBS_MATRIX_VERT if samples => Some(Register::MatrixVert),
            _ => None,
        }
    }

    /// RDMSR.
    pub(super) fn read_netburst(&self, register: Register) -> u64 {
        let own = |of: fn(&NetburstState) -> u64| self.s.netburst.as_ref().map_or(0, of);
        match register {
            Register::Counter(counter) => self.s.values[counter],
            Register::Cccr(counter) => self.s.selects[counter],
            Register::Escr(index) => {
                let registers = self.s.netburst.as_ref();
                registers.and_then(|own| own.escrs.get(index).copied()).unwrap_or(0)
            }
            Register::PreciseEvent => own(|own| own.precise_event),
            Register::PebsEnable => self.s.pebs.enable,
            Register::MatrixVert => own(|own| own.matrix_vert),
        }
    }

    /// WRMSR, once all is counted.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`]: a reserved bit.
    pub(super) fn write_netburst(&mut self, register: Register, value: u64) -> Result<(), MsrFault> {
        let writable = match register {
            // What is beyond its 40 bits is dropped: software writes negative numbers of 64.
            Register::Counter(_) => u64::MAX,
            Register::Cccr(counter) if netburst::extended_cascade(counter).is_some() => {
                netburst::CCCR_WRITABLE | netburst::EXTENDED_CASCADE
            }
            Register::Cccr(_) => netburst::CCCR_WRITABLE,
            Register::Escr(_) => netburst::ESCR_WRITABLE,
            // No event that the manual has makes use of it.
            Register::PreciseEvent => 0xFFFF_FFFF,
            Register::PebsEnable => pebs_enable::WRITABLE,
            Register::MatrixVert => matrix_vert::WRITABLE,
        };
        if value & !writable != 0 {
            return Err(MsrFault::GeneralProtection);
        }
        let registers = self.s.netburst.get_or_insert_default();
        match register {
            Register::Counter(counter) => self.s.values[counter] = value & self.mask(counter),
            Register::Cccr(counter) => {
                self.s.selects[counter] = value;
                self.s.edges[counter] = 0;
                // Software has dealt with the overflow.
                if !Cccr::from_bits(value).overflow() {
                    self.s.waiting &= !(1 << counter);
                }
            }
            Register::Escr(index) => {
                if let Some(escr) = registers.escrs.get_mut(index) {
                    *escr = value;
                }
            }
            Register::PreciseEvent => registers.precise_event = value,
            Register::PebsEnable => {
                self.s.pebs.enable = value;
                if value & pebs_enable::MY_THREAD == 0 {
                    self.s.pebs.armed = 0;
                }
            }
            Register::MatrixVert => registers.matrix_vert = value,
        }
        Ok(())
    }

    /// Which counters count what.
    pub(super) fn netburst_plan(&self) -> Plan {
        let mut plan = Plan::default();
        let Some(registers) = &self.s.netburst else { return plan };
        for counter in 0..netburst::COUNTERS {
            let cccr = self.cccr(counter);
            // One thread, so either none of them is active or one.
            if !(cccr.enable() || self.is_started(counter, cccr)) || !matches!(cccr.active_thread(), 1 | 3) {
                continue;
            }
            // SDM Vol. 3B "Non-Sleep Clockticks": what is met in every cycle overrides all that the ESCR says.
            if rate(Source::Instructions, cccr) == Rate::Cycles {
                plan.put(counter, rule(Source::Cycles, cccr), [true; 2]);
                continue;
            }
            let Some((escr, Some(row))) = self.selected(counter, cccr) else {
                continue;
            };
            if let Detected::Counted(source) = registers.detect(row.counts, escr, self.s.pebs.enable) {
                plan.put(counter, rule(source, cccr), [escr.os(), escr.usr()]);
            }
        }
        plan
    }

    /// Whether the counter before it has started this one.
    fn is_started(&self, counter: usize, cccr: Cccr) -> bool {
        let overflowed = |counter| self.cccr(counter).overflow();
        let extended = netburst::extended_cascade(counter).filter(|_| cccr.extended_cascade());
        cccr.cascade() && overflowed(netburst::cascade(counter)) || extended.is_some_and(overflowed)
    }

    /// Whether counter 16 samples.
    pub(super) fn netburst_samples(&self, counter: usize) -> bool {
        let row = self.selected(counter, self.cccr(counter)).and_then(|(_, row)| row);
        counter == SAMPLING
            && self.pebs.caps().is_some()
            && self.s.pebs.enable & pebs_enable::MY_THREAD != 0
            && row.is_some_and(|row| row.counts.sampled())
    }

    /// Whether the next event of a counter has consequences, wherever it stands: an interrupt or a record is due, or every event is an
    /// overflow.
    pub(super) fn netburst_is_due(&self, counter: usize) -> bool {
        (self.s.waiting | self.s.pebs.armed) >> counter & 1 != 0 || self.cccr(counter).force_overflow()
    }

    /// The event and mask that a value of a CCCR enables and that count nothing.
    pub(super) fn netburst_counts_nothing(&self, counter: usize, value: u64) -> Option<(u8, u16)> {
        let cccr = Cccr::from_bits(value);
        let (escr, row) = self.selected(counter, cccr)?;
        let registers = self.s.netburst.as_ref()?;
        let silent = match row {
            None => true,
            Some(row) => matches!(
                registers.detect(row.counts, escr, self.s.pebs.enable),
                Detected::Nothing
            ),
        };
        (cccr.enable() && (escr.os() || escr.usr()) && silent).then(|| (escr.event(), escr.mask()))
    }

    /// Whether an access is the first tagged one of its instruction: an instruction counts once, however many it has.
    pub(super) fn is_first_tagged(&mut self, ip: u64, retired: u64) -> bool {
        let registers = self.s.netburst.get_or_insert_default();
        let [last_ip, last] = core::mem::replace(&mut registers.tagged, [ip, retired]);
        // A REP retires with its last iteration.
        last_ip != ip || retired.wrapping_sub(last) > 1
    }

    /// What follows from events: overflows, records, interrupts.
    pub(super) fn serve_netburst(
        &mut self,
        had: Had,
        sample: Sample,
        cpu: &mut dyn Processor,
        inputs: &PebsInputs<'_>,
    ) {
        let armed = self.s.pebs.armed;
        let mut pmi = false;
        let mut overflowed = false;
        for counter in each(had.any) {
            let (own, cccr) = (1 << counter, self.cccr(counter));
            let due = self.s.waiting & own != 0;
            pmi |= due;
            self.s.waiting &= !own;
            if had.overflow >> counter & 1 == 0 && !cccr.force_overflow() {
                continue;
            }
            overflowed |= !cccr.overflow();
            self.s.selects[counter] |= Cccr::new().with_overflow(true).into_bits();
            if self.netburst_samples(counter) {
                self.s.pebs.armed |= own;
            } else if cccr.interrupt() {
                // The batch may have had the next event, too.
                if had.beyond >> counter & 1 != 0 {
                    pmi = true;
                } else {
                    self.s.waiting |= own;
                }
            }
        }
        let own = 1 << SAMPLING;
        let beyond = u64::from(had.beyond) & self.s.pebs.armed;
        if u64::from(had.any) & (armed & self.s.pebs.armed | beyond) & own != 0 {
            // The reset field is the first one.
            match self.pebs.record(&self.s.pebs, 0, &sample, cpu, inputs) {
                Ok((outcome, reset)) => {
                    self.s.pebs.armed &= !own;
                    if let Some(reset) = reset {
                        self.s.values[SAMPLING] = reset & self.mask(SAMPLING);
                    }
                    pmi |= outcome.buffer;
                }
                Err(fault) => {
                    self.s.outbox = self.s.outbox.and(Effects {
                        fault: Some(fault),
                        ..Effects::NONE
                    });
                }
            }
        }
        self.s.outbox.pmi |= pmi;
        if overflowed {
            // Others may be started by it.
            self.replan();
        }
    }
}
