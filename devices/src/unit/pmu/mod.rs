//! Performance counters: P6's two, architectural versions 1 to 5, and the Pentium 4's ([`netburst`]). SDM Vol. 3B 21.2 "Architectural
//! Performance Monitoring".
//!
//! # Theory
//! Nothing is counted one by one. Whatever makes a difference to a counter (a register, the ring, HLT, a freeze) comes with a
//! `Watch` callback or an access to an MSR, so between two of these every counter either counts all the time or not at all,
//! and what the processor's own count of instructions and the machine's step clock have moved on is added then
//! (`Pmu::count_to_now`). Branches come as records, loads and stores as accesses; both are asked for only while a counter wants
//! them. The distance to the next overflow goes into the interest, so that an interrupt comes after the very instruction or
//! branch that overflowed.
//!
//! # Practice
//! The instruction that enables a counter counts, since it retires after it has done so; the one that disables it does not.
//! One cycle is one step of the machine. A step retires one instruction or is a further iteration of a REP, so an event with a
//! counter mask above 1 has no cycles, and INV with it has all of them. Interrupts are [requests](Effects::pmi); what LVTPC
//! makes of them is the local APIC's.
//!
//! # Modelled, not measured
//! Cycles are steps, outside HLT. Mispredicted branches are those of [`Predictor`]. Whatever caches and
//! TLBs do is what the [model of them](super::cache) does, which the caller keeps and asks ([`Pmu::counts_accesses`],
//! [`Pmu::counts_fetches`]): references and misses of the last level, fills, page walks, and the places where loads find their data.
//! MSR_PERF_METRICS has the retired share of the slots and those that mispredicted branches lose, and calls the rest back-end bound.
//!
//! # Left out
//! The uncore, and every event that is not in the model's table: it counts nothing. Events of lock elision count nothing
//! either.

mod classify;
mod events;
mod host_time;
mod netburst;
mod plan;
mod registers;
#[cfg(test)]
#[path = "pmu_test.rs"]
mod tests;

use serde::{Deserialize, Serialize};
use x86::cpuid::Features;
use x86::ds::PebsCaps;
use x86::model::CpuModel;
use x86::msr::MsrFault;
use x86::pmu::{EventSelect, FixedControl, PmuCaps, Transactions, status};
use x86::watch::{Abort, Access, BranchRecord, Change, Effects, EventRecord, Interest, Processor, Recorded};

use super::cache::{Fetched, Memory};
use super::ds::pebs::{Outcome, Pebs, PebsState, Sample};
use super::ds::pebs_trace::TraceRecord;
use super::predictor::{Predictor, Stream};
use classify::Class;
use events::{Rate, Source};
use netburst::NetburstState;
use plan::Plan;

/// General counters at most.
pub const GENERAL: usize = x86::pmu::netburst::COUNTERS;
/// Fixed counters at most.
pub const FIXED: usize = 4;
/// All of them: the general ones first.
const COUNTERS: usize = GENERAL + FIXED;

/// What a unit outside the counters lends them for PEBS records.
#[derive(Clone, Copy)]
pub struct PebsInputs<'a> {
    /// IA32_DS_AREA.
    pub ds_area: u64,
    /// The last-branch record with this number, 0 the newest: source, target, information.
    pub last_branch: &'a dyn Fn(u8) -> [u64; 3],
}

impl PebsInputs<'_> {
    /// Neither.
    pub const NONE: PebsInputs<'static> = PebsInputs {
        ds_area: 0,
        last_branch: &|_| [0; 3],
    };
}

/// The whole state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PmuState {
    /// The counters: general ones from 0, fixed ones from [`GENERAL`].
    pub values: [u64; GENERAL + FIXED],
    /// IA32_PERFEVTSELx.
    pub selects: [u64; GENERAL],
    /// IA32_FIXED_CTR_CTRL.
    pub fixed_control: u64,
    /// IA32_PERF_GLOBAL_CTRL.
    pub global_control: u64,
    /// In system-management mode with IA32_DEBUGCTL.FREEZE_WHILE_SMM: IA32_PERF_GLOBAL_CTRL as RSM brings it back.
    pub frozen_control: Option<u64>,
    /// IA32_PERF_GLOBAL_STATUS.
    pub status: u64,
    /// MSR_OFFCORE_RSP_0 and 1.
    pub offcore: [u64; 2],
    /// MSR_PERF_METRICS as written; slots, instructions and mispredicted branches since.
    pub metrics: [u64; 4],
    /// Instructions and cycles up to which everything has been counted.
    pub counted: [u64; 2],
    /// Cycles that are no steps of the machine's: the guest ran on a processor of the host.
    pub host_cycles: u64,
    /// Privilege level since then.
    pub cpl: u8,
    /// In HLT or MWAIT since then.
    pub halted: bool,
    /// Counters that have counted since then, by number.
    pub live: u32,
    /// The step of the last event of each counter that counts edges.
    pub edges: [u64; GENERAL],
    /// Overflow interrupts that wait for a PEBS record, as bits of IA32_PERF_GLOBAL_STATUS.
    pub waiting: u64,
    /// A second interrupt waits for LVTPC to be unmasked.
    pub queued: bool,
    /// Something to be asked of the machine with the next word.
    pub outbox: Effects,
    /// The instruction that is about to run.
    pub class: Option<Class>,
    /// Linear address of the instruction that is about to run, as far as known.
    pub next_ip: u64,
    /// Sampling.
    pub pebs: PebsState,
    /// The branches that prediction goes by, while a counter counts mispredicted ones.
    pub predictor: Predictor,
    /// In a transaction.
    pub in_transaction: bool,
    /// The counters where the transaction began, for those that an abort takes back.
    pub checkpoint: [u64; GENERAL],
    /// The TX Abort Information of the last transaction.
    pub last_transaction: u64,
    /// The counter whose record waits for the abort that it asks for.
    pub pended: Option<u8>,
    /// The registers of the Pentium 4's counters.
    pub netburst: Option<NetburstState>,
}

/// The counters of one processor.
#[derive(Clone, Debug)]
pub struct Pmu {
    caps: PmuCaps,
    pebs: Pebs,
    /// IA32_PERF_CAPABILITIES.
    capabilities: Option<u64>,
    features: Features,
    s: PmuState,
    plan: Plan,
    /// Records for the processor trace, which takes them at the end of the callback.
    records: Vec<TraceRecord>,
}

/// The bit of a counter in IA32_PERF_GLOBAL_STATUS and IA32_PERF_GLOBAL_CTRL.
const fn bit(counter: usize) -> u64 {
    if counter < GENERAL {
        1 << counter
    } else {
        1 << (status::FIXED as usize + counter - GENERAL)
    }
}

/// The index of a privilege level where ring 0 and the others are told apart.
const fn ring(cpl: u8) -> usize {
    (cpl != 0) as usize
}

/// The counters in a mask.
fn each(mut mask: u32) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let lowest = mask.trailing_zeros() as usize;
        (mask != 0).then(|| {
            mask &= mask - 1;
            lowest
        })
    })
}

impl Pmu {
    /// The counters of a model, at reset; `None` where it has none.
    pub fn new(model: &'static CpuModel) -> Option<Self> {
        Self::with_features(model, model.features())
    }

    /// The same with other features than the model shows.
    fn with_features(model: &'static CpuModel, features: Features) -> Option<Self> {
        let caps = model.units.pmu?;
        if caps.version > 0 && !features.pdcm() {
            return None;
        }
        let pebs: Option<PebsCaps> = model.units.ds.filter(|_| features.ds()).and_then(|ds| ds.pebs);
        let capabilities = caps.capabilities.map(|value| {
            let sampling = x86::pmu::capabilities::PEBS_TRAP
                | x86::pmu::capabilities::PEBS_REGISTERS
                | 0xF << x86::pmu::capabilities::PEBS_FORMAT_SHIFT
                | x86::pmu::capabilities::PEBS_BASELINE
                | x86::pmu::capabilities::PEBS_TO_TRACE;
            let value = if pebs.is_some() { value } else { value & !sampling };
            let value = if features.intel_pt() {
                value
            } else {
                value & !x86::pmu::capabilities::PEBS_TO_TRACE
            };
            value | x86::lbr::perf_capabilities(model.units.lbr) & x86::pmu::capabilities::LBR_FORMAT
        });
        let mut pmu = Self {
            caps,
            pebs: Pebs::new(
                pebs,
                x86::ds::DsLayout::of(features),
                capabilities.is_some_and(|value| value & x86::pmu::capabilities::PEBS_TO_TRACE != 0),
            ),
            records: Vec::new(),
            capabilities,
            features,
            s: PmuState {
                values: [0; COUNTERS],
                selects: [0; GENERAL],
                fixed_control: 0,
                global_control: 0,
                frozen_control: None,
                status: 0,
                offcore: [0; 2],
                metrics: [0; 4],
                counted: [0; 2],
                host_cycles: 0,
                cpl: 0,
                halted: false,
                live: 0,
                edges: [0; GENERAL],
                waiting: 0,
                queued: false,
                outbox: Effects::NONE,
                class: None,
                next_ip: 0,
                pebs: PebsState::default(),
                predictor: Predictor::default(),
                in_transaction: false,
                checkpoint: [0; GENERAL],
                last_transaction: 0,
                pended: None,
                netburst: None,
            },
            plan: Plan::default(),
        };
        pmu.reset();
        Some(pmu)
    }

    /// Power-up reset: all zero, but the general counters enabled in IA32_PERF_GLOBAL_CTRL. INIT leaves everything as it is.
    /// SDM Vol. 3A Table 10-1 "IA-32 and Intel 64 Processor States Following Power-up, Reset, or INIT".
    pub fn reset(&mut self) {
        let (counted, host_cycles, cpl) = (self.s.counted, self.s.host_cycles, self.s.cpl);
        self.s = PmuState {
            values: [0; COUNTERS],
            selects: [0; GENERAL],
            fixed_control: 0,
            global_control: if self.caps.version >= 2 {
                (1 << self.caps.general) - 1
            } else {
                0
            },
            frozen_control: None,
            status: 0,
            offcore: [0; 2],
            metrics: [0; 4],
            counted,
            host_cycles,
            cpl,
            halted: false,
            live: 0,
            edges: [0; GENERAL],
            waiting: 0,
            queued: false,
            outbox: Effects::NONE,
            class: None,
            next_ip: 0,
            pebs: PebsState::default(),
            predictor: Predictor::default(),
            in_transaction: false,
            checkpoint: [0; GENERAL],
            last_transaction: 0,
            pended: None,
            netburst: self.caps.netburst.is_some().then(NetburstState::default),
        };
        self.replan();
    }

    /// The whole state.
    pub fn state(&self) -> PmuState {
        // Where the next instruction is matters to a counter that may write a record, up to where things are counted to one that
        // counts, and privilege level and HLT to one that is programmed. For others they would say when somebody asked last, which is
        // no state of the guest's.
        let next_ip = if self.s.pebs.armed != 0 { self.s.next_ip } else { 0 };
        let counted = if self.s.live != 0 { self.s.counted } else { [0; 2] };
        let programmed = self.plan.rings != [0; 2] || self.plan.metrics;
        PmuState {
            next_ip,
            counted,
            cpl: if programmed { self.s.cpl } else { 0 },
            halted: programmed && self.s.halted,
            ..self.s.clone()
        }
    }

    /// [`Pmu::state`] with the counters of time brought up to a moment: so many instructions of this processor, and so many steps of
    /// all. They are counted when somebody asks, and who asks when is no state of the guest's. An overflow that nobody has heard of yet
    /// is not in it.
    pub fn state_at(&self, retired: u64, step: u64) -> PmuState {
        let mut state = self.state();
        if self.s.live == 0 {
            return state;
        }
        let then = self.s.counted;
        let now = [retired, step.wrapping_add(self.s.host_cycles)];
        let instructions = now[0].wrapping_sub(then[0]);
        let steps = if self.s.halted { 0 } else { now[1].wrapping_sub(then[1]) };
        for counter in each(self.s.live & self.plan.clocks) {
            if let Some(line) = self.plan.counters[counter] {
                let events = line.moved(then, instructions, steps, None, self.caps.slots, self.caps.reference);
                state.values[counter] = state.values[counter].wrapping_add(events) & self.mask(counter);
            }
        }
        if self.plan.metrics {
            state.metrics[1] += steps.saturating_mul(self.caps.slots.into());
            state.metrics[2] += instructions;
        }
        state.counted = now;
        state
    }

    /// Takes on a state of a processor of this model. Values that no register would hold are cut to what it could.
    pub fn set_state(&mut self, state: &PmuState) {
        self.s = state.clone();
        for counter in 0..COUNTERS {
            self.s.values[counter] &= self.mask(counter);
        }
        let netburst = self.s.netburst.take().filter(|_| self.caps.netburst.is_some());
        self.s.netburst = netburst.map(NetburstState::sized);
        self.replan();
    }

    /// What the model counts.
    pub fn caps(&self) -> &PmuCaps {
        &self.caps
    }

    /// Sampling, for those who ask whether it is there.
    pub fn pebs(&self) -> &Pebs {
        &self.pebs
    }

    /// IA32_PERF_GLOBAL_STATUS.
    pub fn status(&self) -> u64 {
        self.s.status
    }

    /// Sets bits of IA32_PERF_GLOBAL_STATUS that belong to other units: [`status::TRACE_TOPA`], [`status::LBR_FROZEN`].
    pub fn set_status(&mut self, bits: u64) {
        self.s.status |= bits;
        self.replan();
    }

    /// A performance-monitoring interrupt was requested with IA32_DEBUGCTL.FREEZE_PERFMON_ON_PMI set: the counters stop. Until
    /// version 3 IA32_PERF_GLOBAL_CTRL is cleared, since version 4 a status bit stops them. SDM Vol. 3B 19.4.7 "Freezing LBR
    /// and Performance Counters on PMI".
    pub fn freeze(&mut self) {
        match self.caps.version {
            0 | 1 => {}
            2 | 3 => self.s.global_control = 0,
            _ => self.s.status |= status::COUNTERS_FROZEN,
        }
        self.replan();
    }

    /// LVTPC has been unmasked: a second interrupt of the same instruction follows, if its cause stands yet. See
    /// [`pebs`](super::ds::pebs).
    pub fn unmasked(&mut self) -> Effects {
        Effects {
            pmi: core::mem::take(&mut self.s.queued) && self.cause_stands(),
            ..Effects::NONE
        }
    }

    /// Records that go into the processor trace, since the last call.
    pub fn take_records(&mut self) -> Vec<TraceRecord> {
        core::mem::take(&mut self.records)
    }

    // ---- The words ---------------------------------------------------------------------------------------------------

    /// What to announce.
    pub fn interest(&mut self, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Interest {
        self.count_to_now(cpu, inputs);
        let plan = &self.plan;
        if plan.rings == [0; 2] && !plan.metrics && self.s.outbox == Effects::NONE {
            return Interest::NOTHING;
        }
        let mut interest = Interest {
            transfers: plan.transfers,
            ..Interest::NOTHING
        };
        for counter in each(self.s.live) {
            let Some(line) = plan.counters[counter] else { continue };
            // What is armed records with its next event, wherever its counter stands.
            let armed = self.s.pebs.armed & bit(counter) != 0;
            let left = if armed || self.caps.netburst.is_some() && self.netburst_is_due(counter) {
                1
            } else {
                (self.mask(counter) - self.s.values[counter]).saturating_add(1)
            };
            let distance = line.distance(left);
            interest.instructions = interest.instructions.min(distance.instructions);
            if let Some(room) = distance.branches {
                interest.branches = interest.branches.max(line.source.recorded());
                interest.branch_room = interest.branch_room.min(u32::try_from(room).unwrap_or(u32::MAX));
            }
            interest.every_access |= line.source.is_access();
            interest.every_instruction |= line.source.is_class();
        }
        // Mispredicted branches are a part of them.
        interest.branches = interest.branches.max(Recorded::All.when(plan.metrics));
        if self.s.outbox != Effects::NONE {
            interest.instructions = 0;
        }
        interest
    }

    /// Whether a counter that is enabled asks for what caches and TLBs do.
    pub fn uses_caches(&self) -> bool {
        (self.plan.accesses | self.plan.fetches) != 0
    }

    /// Whether a counter asks now for what becomes of loads and stores.
    pub fn counts_accesses(&self) -> bool {
        self.s.live & self.plan.accesses != 0
    }

    /// Whether a counter asks now for what becomes of fetches.
    pub fn counts_fetches(&self) -> bool {
        self.s.live & self.plan.fetches != 0
    }

    /// Code has been fetched, up to the branches that were reported last.
    pub fn fetched(&mut self, fetched: &Fetched, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Effects {
        let mut events = self.advance(cpu);
        for counter in each(self.s.live & self.plan.fetches) {
            let Some(line) = self.plan.counters[counter] else {
                continue;
            };
            for _ in 0..line.source.fetches(fetched, ring(self.s.cpl)) {
                events |= self.one_event(counter, cpu.step());
            }
        }
        let ip = self.s.next_ip;
        self.finish(
            events,
            Sample {
                ip,
                ..Sample::default()
            },
            cpu,
            inputs,
        );
        self.take_effects()
    }

    /// Execution is about to run the instruction at this linear address.
    pub fn before(&mut self, address: u64, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Effects {
        self.count_to_now(cpu, inputs);
        self.s.next_ip = address;
        if self.plan.classes != 0 {
            self.s.class = Some(Class::of(address, cpu));
        }
        self.take_effects()
    }

    /// Branches have retired.
    pub fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Effects {
        let counting = self.s.live & self.plan.branches;
        let mut events = self.advance(cpu);
        if counting != 0 {
            // Those that count plain events and are far from their ends count the batch at once.
            let mut singly = counting;
            for counter in each(counting & !self.plan.mispredicted) {
                let codes = self.plan.counters[counter]
                    .filter(|line| line.plain())
                    .map(|line| line.source.codes());
                let Some(codes) = codes else { continue };
                let count = records
                    .iter()
                    .map(|record| u64::from(codes >> (record.flow & 31) & 1))
                    .sum();
                let sum = self.s.values[counter].checked_add(count);
                if sum.is_some_and(|sum| sum <= self.mask(counter)) {
                    events |= self.add(counter, count);
                    singly &= !(1 << counter);
                }
            }
            let predictor = self.s.predictor;
            let mut predictions = Stream::new(&predictor, records);
            for (index, record) in records.iter().enumerate().filter(|_| singly != 0) {
                let wrong = self.plan.mispredicted != 0 && !predictions.predicts(index);
                for counter in each(singly) {
                    let Some(line) = self.plan.counters[counter] else {
                        continue;
                    };
                    if line.source.has_branch(record, wrong) {
                        events |= self.one_event(counter, record.step);
                    }
                }
            }
        }
        if self.plan.metrics && self.s.live & 1 << (COUNTERS - 1) != 0 {
            let predictor = self.s.predictor;
            let mut predictions = Stream::new(&predictor, records);
            let wrong = (0..records.len()).filter(|index| !predictions.predicts(*index)).count();
            self.s.metrics[3] += wrong as u64;
        }
        if self.plan.mispredicted != 0 || self.plan.metrics {
            self.s.predictor.advance(records);
        }
        let ip = records.last().map_or(self.s.next_ip, |record| record.from);
        self.finish(
            events,
            Sample {
                ip,
                ..Sample::default()
            },
            cpu,
            inputs,
        );
        self.take_effects()
    }

    /// Memory was accessed by an instruction, which has retired; with what the caches made of it, if a counter
    /// [asks](Self::counts_accesses).
    pub fn access(
        &mut self,
        access: &Access,
        memory: Option<Memory>,
        cpu: &mut dyn Processor,
        inputs: &PebsInputs<'_>,
    ) -> Effects {
        let counting = self.s.live & self.plan.accesses;
        let mut events = self.advance(cpu);
        let mut sample = Sample {
            ip: access.ip,
            ..Sample::default()
        };
        if let Some(memory) = memory {
            sample.memory = Some(memory);
            let mut first = None;
            for counter in each(counting) {
                let Some(line) = self.plan.counters[counter] else {
                    continue;
                };
                let threshold = self.s.pebs.load_latency_for(counter, &self.pebs);
                let mut had = line.source.accesses(&memory, threshold, ring(self.s.cpl));
                if let (Source::Tagged { without, .. }, 1..) = (line.source, had) {
                    let first = *first.get_or_insert_with(|| self.is_first_tagged(access.ip, cpu.retired()));
                    had = u32::from(first && !without);
                    if first && without {
                        self.take_off(counter, &mut events);
                    }
                }
                for _ in 0..had {
                    events |= self.one_event(counter, cpu.step());
                }
            }
        }
        self.finish(events, sample, cpu, inputs);
        self.take_effects()
    }

    /// An SMI comes while IA32_DEBUGCTL.FREEZE_WHILE_SMM is set: all counters stand still until RSM. SDM Vol. 3B 18.4.1 "IA32_DEBUGCTL MSR".
    pub fn freeze_in_smm(&mut self, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Effects {
        self.count_to_now(cpu, inputs);
        self.s.frozen_control = Some(self.s.global_control);
        self.s.global_control = 0;
        self.replan();
        self.take_effects()
    }

    /// Something has changed.
    pub fn state_change(&mut self, change: Change, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Effects {
        self.count_to_now(cpu, inputs);
        match change {
            Change::Halt | Change::Mwait { .. } => self.s.halted = true,
            Change::Wake { .. } => self.s.halted = false,
            Change::Rsm => {
                if let Some(control) = self.s.frozen_control.take() {
                    self.s.global_control = control;
                    self.replan();
                }
            }
            Change::Reset => {
                self.reset();
                self.s.counted = [cpu.retired(), cpu.step().wrapping_add(self.s.host_cycles)];
            }
            Change::Init { .. } => {
                self.s.halted = false;
                self.s.in_transaction = false;
            }
            Change::TransactionBegin { at } => {
                self.s.checkpoint.copy_from_slice(&self.s.values[..GENERAL]);
                self.transaction(Transactions::STARTED, at, cpu, inputs);
                self.s.in_transaction = true;
            }
            Change::TransactionCommit { at, steps } => {
                self.s.in_transaction = false;
                self.s.last_transaction = steps & 0xFFFF_FFFF;
                self.transaction(Transactions::COMMITTED, at, cpu, inputs);
            }
            Change::TransactionAbort { from, cause, steps } => {
                self.s.in_transaction = false;
                for counter in each(self.plan.checkpointed) {
                    if let Some(value) = self.s.checkpoint.get(counter) {
                        self.s.values[counter] = *value;
                    }
                }
                self.s.last_transaction = steps & 0xFFFF_FFFF | transaction_abort(cause);
                self.transaction(Transactions::of(cause), from, cpu, inputs);
                // Without a record's cause any more.
                self.s.last_transaction &= 0xFFFF_FFFF;
            }
            _ => {}
        }
        self.relive();
        self.take_effects()
    }

    /// Something has become of a transaction, at the instruction at `ip`. A record that an abort was asked for comes after it.
    fn transaction(&mut self, what: Transactions, ip: u64, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) {
        let mut had = Had::default();
        for counter in each(self.s.live & self.plan.transactions) {
            if let Some(Source::Transactions(wanted)) = self.plan.counters[counter].map(|line| line.source)
                && wanted.meets(what)
            {
                had |= self.one_event(counter, cpu.step());
            }
        }
        if let Some(counter) = self.s.pended.take() {
            had.any |= 1 << counter;
        }
        let sample = Sample {
            ip,
            transaction: self.s.last_transaction,
            ..Sample::default()
        };
        self.finish(had, sample, cpu, inputs);
    }

    /// An interrupt or exception has been delivered. INT n and its like are instructions, and branches.
    pub fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Effects {
        self.branches(core::slice::from_ref(&event.branch), cpu, inputs)
    }

    /// Any other word: the end of a run, the number of instructions that the interest asked for.
    pub fn tick(&mut self, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Effects {
        self.count_to_now(cpu, inputs);
        self.take_effects()
    }

    /// RDPMC: general counters from 0, fixed ones from 2^30, MSR_PERF_METRICS at 2^29. That CR4.PCE or CPL allow it is for the
    /// caller to say. SDM Vol. 2B "RDPMC—Read Performance-Monitoring Counters".
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`]: there is no such counter. Bit 31, fast reads, is the Pentium 4's alone.
    pub fn rdpmc(&mut self, index: u32, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) -> Result<u64, MsrFault> {
        self.count_to_now(cpu, inputs);
        let (kind, number) = (index >> 29, (index & 0x1FFF_FFFF) as usize);
        if self.caps.netburst.is_some() {
            // Bit 31 reads 32 bits, which is faster.
            let fast = index >> 31 != 0;
            let value = self.s.values[..x86::pmu::netburst::COUNTERS].get((index & 0x7FFF_FFFF) as usize);
            let value = value.ok_or(MsrFault::GeneralProtection)?;
            return Ok(if fast { value & 0xFFFF_FFFF } else { *value });
        }
        match kind {
            0 if number < usize::from(self.caps.general) => Ok(self.s.values[number]),
            2 if number < usize::from(self.caps.fixed) => Ok(self.s.values[GENERAL + number]),
            1 if number == 0 && self.has_metrics() => Ok(self.metrics()),
            _ => Err(MsrFault::GeneralProtection),
        }
    }

    // ---- Counting ----------------------------------------------------------------------------------------------------

    /// Counts up to now, and does what follows from it. Effects stay in the outbox.
    fn count_to_now(&mut self, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) {
        let ip = self.s.next_ip;
        let events = self.advance(cpu);
        self.finish(
            events,
            Sample {
                ip,
                ..Sample::default()
            },
            cpu,
            inputs,
        );
    }

    /// Adds what instructions and steps have moved on; the counters that had an event.
    fn advance(&mut self, cpu: &mut dyn Processor) -> Had {
        let now = [cpu.retired(), cpu.step().wrapping_add(self.s.host_cycles)];
        let then = core::mem::replace(&mut self.s.counted, now);
        let instructions = now[0].wrapping_sub(then[0]);
        let steps = if self.s.halted { 0 } else { now[1].wrapping_sub(then[1]) };
        let mut had = Had::default();
        if (instructions | steps) == 0 {
            return had;
        }
        let class = if instructions > 0 { self.s.class.take() } else { None };
        let class = class.map(|class| (class, ring(self.s.cpl)));
        if self.s.live != 0 {
            for counter in each(self.s.live & (self.plan.clocks | self.plan.classes)) {
                let Some(line) = self.plan.counters[counter] else {
                    continue;
                };
                let events = line.moved(then, instructions, steps, class, self.caps.slots, self.caps.reference);
                had |= self.add(counter, events);
            }
            if self.plan.metrics {
                self.s.metrics[1] += steps.saturating_mul(self.caps.slots.into());
                self.s.metrics[2] += instructions;
            }
        }
        had
    }

    /// One event of a counter that hears of them singly, at this step.
    fn one_event(&mut self, counter: usize, step: u64) -> Had {
        let Some(line) = self.plan.counters[counter] else {
            return Had::default();
        };
        if line.edge {
            let last = core::mem::replace(&mut self.s.edges[counter], step);
            if step.wrapping_sub(last) <= 1 && last != 0 {
                return Had::default();
            }
        }
        match line.rate {
            Rate::Events => self.add(counter, 1),
            // Counted with the cycles, so it is taken off.
            Rate::Idle if !line.edge => {
                self.s.values[counter] = self.s.values[counter].wrapping_sub(1) & self.mask(counter);
                Had::default()
            }
            Rate::Idle => self.add(counter, 1),
            Rate::Cycles | Rate::Never => Had::default(),
        }
    }

    /// Takes back the event that a counter has had last, and its overflow with it.
    fn take_off(&mut self, counter: usize, had: &mut Had) {
        if self.s.values[counter] == 0 {
            had.overflow &= !(1 << counter);
        }
        self.s.values[counter] = self.s.values[counter].wrapping_sub(1) & self.mask(counter);
    }

    /// Adds to a counter.
    fn add(&mut self, counter: usize, events: u64) -> Had {
        if events == 0 {
            return Had::default();
        }
        let mask = self.mask(counter);
        let (sum, carry) = self.s.values[counter].overflowing_add(events);
        let overflow = carry || sum > mask;
        self.s.values[counter] = sum & mask;
        Had {
            any: 1 << counter,
            overflow: u32::from(overflow) << counter,
            // Events beyond the one that overflowed.
            beyond: u32::from(overflow && sum & mask != 0) << counter,
        }
    }

    /// What follows from events: overflows, records, interrupts, in the order of the counters. The rule is at the head of
    /// [`pebs`](super::ds::pebs).
    fn finish(&mut self, had: Had, sample: Sample, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) {
        if had.any != 0 && self.caps.netburst.is_some() {
            self.serve_netburst(had, sample, cpu, inputs);
        } else if had.any != 0 {
            self.serve(had, sample, cpu, inputs);
        }
        let cpl = cpu.context().cpl;
        if cpl != self.s.cpl {
            self.s.cpl = cpl;
            self.relive();
        }
        if self.s.pebs.armed != 0 {
            let context = cpu.context();
            self.s.next_ip = context.cs_base.wrapping_add(cpu.rip());
        }
    }

    fn serve(&mut self, had: Had, sample: Sample, cpu: &mut dyn Processor, inputs: &PebsInputs<'_>) {
        // Armed by an earlier instruction, so that this one records.
        let due = self.s.pebs.armed;
        let mut overflow_pmi = false;
        let mut buffer_pmi = false;
        for counter in each(had.overflow) {
            self.s.status |= if self.caps.version >= 2 { bit(counter) } else { 0 };
            if self.samples(counter) {
                self.s.pebs.armed |= bit(counter);
            } else if self.interrupts(counter) {
                self.s.waiting |= bit(counter);
            }
        }
        let recording = each(had.any)
            .filter(|&counter| self.s.pebs.armed & bit(counter) != 0)
            .filter(|&counter| due & bit(counter) != 0 || had.beyond >> counter & 1 != 0)
            .find(|&counter| !self.held_off(counter));
        if let Some(counter) = recording.filter(|_| self.s.in_transaction) {
            // SDM Vol. 3B 21.3.6.5.1 "Intel TSX and PEBS Support": the record follows the abort that it makes.
            self.s.pended = Some(counter as u8);
            self.s.outbox.abort = true;
        } else if let Some(counter) = recording {
            match self.record(counter, sample, cpu, inputs) {
                Ok(Outcome { written, buffer }) => {
                    let each = self.pebs.pmi_after_record(&self.s.pebs);
                    overflow_pmi |= written && (each || self.interrupts(counter));
                    buffer_pmi |= buffer;
                }
                Err(fault) => {
                    self.s.outbox = self.s.outbox.and(Effects {
                        fault: Some(fault),
                        ..Effects::NONE
                    });
                }
            }
        }
        // An interrupt waits for the records of lower counters.
        let lowest_armed = self.s.pebs.armed & self.s.pebs.armed.wrapping_neg();
        let ready = if lowest_armed == 0 {
            self.s.waiting
        } else {
            self.s.waiting & (lowest_armed - 1)
        };
        self.s.waiting &= !ready;
        overflow_pmi |= ready != 0;
        if overflow_pmi | buffer_pmi {
            self.s.outbox.pmi = true;
            self.s.queued |= overflow_pmi & buffer_pmi;
        }
    }

    /// Whether a counter's record waits for a lower counter: one that is armed itself, or whose interrupt has not been
    /// acknowledged.
    fn held_off(&self, counter: usize) -> bool {
        let below = bit(counter) - 1;
        let unserved = (0..COUNTERS)
            .filter(|&other| bit(other) & below & self.s.status != 0)
            .any(|other| !self.samples(other) && self.interrupts(other));
        self.s.pebs.armed & below != 0 || unserved
    }

    /// Writes the record of an armed counter.
    fn record(
        &mut self,
        counter: usize,
        mut sample: Sample,
        cpu: &mut dyn Processor,
        inputs: &PebsInputs<'_>,
    ) -> Result<Outcome, x86::watch::PageFault> {
        let own = bit(counter);
        sample.status = self.s.status | own;
        sample.applicable = own;
        sample.adaptive = if counter < GENERAL {
            EventSelect::from_bits(self.s.selects[counter]).adaptive()
        } else {
            FixedControl::of(self.s.fixed_control, (counter - GENERAL) as u32).adaptive
        };
        if !self.plan.counters[counter].is_some_and(|line| line.source.is_access()) {
            sample.memory = None;
        }
        if sample.transaction == 0 {
            sample.transaction = self.s.last_transaction;
        }
        let (outcome, reload) = if self.pebs.traced(&self.s.pebs) {
            let record = self.pebs.trace_record(&self.s.pebs, &sample, cpu, inputs);
            self.records.push(record);
            let written = Outcome {
                written: true,
                buffer: false,
            };
            (written, Some(self.s.pebs.reload[counter]))
        } else {
            self.pebs.record(&self.s.pebs, counter, &sample, cpu, inputs)?
        };
        self.s.pebs.armed &= !own;
        if !self.pebs.pmi_after_record(&self.s.pebs) {
            self.s.status &= !own;
        }
        if let Some(reload) = reload {
            self.s.values[counter] = reload & self.mask(counter);
        }
        if outcome.buffer {
            self.s.status |= status::BUFFER;
        }
        Ok(outcome)
    }

    fn take_effects(&mut self) -> Effects {
        core::mem::take(&mut self.s.outbox)
    }
}

/// TX Abort Information of an abort, but for the cycles. SDM Vol. 3B Table 21-47 "TX Abort Information Field Definition".
fn transaction_abort(cause: Abort) -> u64 {
    const RTM_ABORT: u64 = 1 << 33;
    let status = u64::from(cause.status());
    RTM_ABORT
        | if cause.synchronous() { 1 << 34 } else { 1 << 35 }
        | (status >> 1 & 1) << 36
        | u64::from(cause == Abort::Conflict) << 37
        | u64::from(cause == Abort::Capacity) << 38
}

/// Counters that had events, by number.
#[derive(Clone, Copy, Debug, Default)]
struct Had {
    any: u32,
    overflow: u32,
    beyond: u32,
}

impl core::ops::BitOrAssign for Had {
    fn bitor_assign(&mut self, other: Self) {
        // An event after an overflow of the same batch.
        self.beyond |= other.beyond | self.overflow & other.any & !other.overflow;
        self.any |= other.any;
        self.overflow |= other.overflow;
    }
}
