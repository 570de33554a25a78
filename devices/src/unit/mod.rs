//! What each virtual CPU has for itself.

pub mod apic_message;
pub mod arch_lbr;
pub mod branch_ring;
#[cfg(test)]
mod branch_test;
#[cfg(test)]
mod branch_units_test;
pub mod cache;
pub mod debugctl;
pub mod dr;
pub mod ds;
pub mod lapic;
pub mod lbr;
pub mod pmu;
pub mod predictor;
pub mod pt;
pub mod rdt;
#[cfg(test)]
mod units_test;

use serde::{Deserialize, Serialize};
use x86::debugctl::DebugCtl;
use x86::ds::DsLayout;
use x86::lbr::ArchLbrLeaf;
use x86::model::CpuModel;
use x86::msr::MsrFault;
use x86::pmu::status;
use x86::watch::{
    Access, BranchRecord, Change, Effects, EventRecord, Far, Flow, Interest, Processor, Range, Recorded, Watch,
};

use arch_lbr::{ArchLbr, ArchLbrState};
use debugctl::{DebugCtlState, DebugCtlUnit};
use dr::Dr;
use ds::area::DsArea;
use ds::bts::{Bts, BtsState};
use lbr::{Gate, Lbr, LbrState};
use pmu::{PebsInputs, Pmu, PmuState};
use pt::{Pt, PtState};
use rdt::{LastLevel, Probe};

/// The debug and trace units of one logical processor.
///
/// # Theory
/// Each unit is a field, because the manual fixes an order among them: a branch is in the last-branch stack before a PEBS
/// record takes its copy, a PEBS record is written before the branch trace, and only then is an interrupt requested, which
/// freezes what IA32_DEBUGCTL says. SDM Vol. 3B 18.4.7 "Freezing LBR and Performance Counters on PMI".
///
/// # Practice
/// Every `Watch` callback goes through all units as consecutive statements; what they want of the machine adds up, and what
/// they want to hear is the union of it.
#[derive(Clone, Debug)]
pub struct Units {
    /// Breakpoints.
    pub dr: Dr,
    /// IA32_DEBUGCTL.
    pub debugctl: Option<DebugCtlUnit>,
    /// Last-branch records of parts that have no architectural ones.
    pub lbr: Option<Lbr>,
    /// Architectural last-branch records.
    pub arch_lbr: Option<ArchLbr>,
    /// IA32_DS_AREA.
    pub ds_area: DsArea,
    /// Branch trace store.
    pub bts: Option<Bts>,
    /// Performance counters, and event-based sampling with them.
    pub pmu: Option<Pmu>,
    /// Processor trace.
    pub pt: Option<Pt>,
    /// Caches and TLBs, from the first time on that something asks what they do: a counter, or whoever owns the last level.
    pub caches: Option<Probe>,
    /// Until this step somebody beside the counters wants all that the caches do: the resource director.
    pub caches_followed: u64,
    model: &'static CpuModel,
    /// What an access to a register owes the machine: the next callback brings it.
    owed: Effects,
    /// Nothing of what they want to hear moves with branches.
    steady: bool,
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    generation: u64,
    /// Generations of the units that `boundaries` and `ranges` are made of.
    parts: [u64; 2],
}

/// The whole state of [`Units`]; DR0 to DR7 are the processor's.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // Named like the units.
#[derive(Serialize, Deserialize)]
pub struct UnitsState {
    pub debugctl: Option<DebugCtlState>,
    pub lbr: Option<LbrState>,
    pub arch_lbr: Option<ArchLbrState>,
    pub ds_area: u64,
    pub bts: Option<BtsState>,
    pub pmu: Option<PmuState>,
    pub pt: Option<PtState>,
    pub owed: Effects,
}

/// Returns what a unit answers, unless the register is none of its own.
macro_rules! claimed {
    ($answer:expr) => {
        match $answer {
            Err(MsrFault::Unclaimed) => {}
            answer => return answer,
        }
    };
}

/// Does something with the counters, if there are any, and what other units lend them.
macro_rules! with_pmu {
    ($units:ident, |$pmu:ident, $inputs:ident| $then:expr) => {
        let Units {
            pmu,
            lbr,
            arch_lbr,
            ds_area,
            ..
        } = &mut *$units;
        if let Some($pmu) = pmu {
            let all = std::cell::OnceCell::new();
            let newest = |n: u8| {
                let all: &Vec<_> = all.get_or_init(|| match (&*lbr, &*arch_lbr) {
                    (Some(lbr), _) => lbr.newest().collect(),
                    (_, Some(lbr)) => lbr.newest().collect(),
                    _ => Vec::new(),
                });
                let entry = all.get(usize::from(n));
                entry.map_or([0; 3], |entry| [entry.from, entry.to, entry.info])
            };
            let $inputs = PebsInputs {
                ds_area: ds_area.base(),
                last_branch: &newest,
            };
            $then;
        }
    };
}

impl Units {
    /// The units of a model, as after power-up.
    pub fn new(model: &'static CpuModel) -> Self {
        let (features, bits, caps) = (model.features(), model.linear_bits(), model.units);
        Units {
            dr: Dr::new(),
            debugctl: caps.debugctl.map(|caps| DebugCtlUnit::new(caps, features)),
            lbr: caps
                .lbr
                .filter(|_| !features.arch_lbr())
                .map(|caps| Lbr::new(caps, features, bits)),
            arch_lbr: features.arch_lbr().then(|| {
                ArchLbr::new(
                    ArchLbrLeaf {
                        regs: model.cpuid(0x1C, 0),
                    },
                    bits,
                )
            }),
            ds_area: DsArea::new(features, bits),
            bts: caps
                .ds
                .filter(|ds| features.ds() && ds.bts)
                .map(|ds| Bts::new(DsLayout::of(features), ds.bts_predicted, bits)),
            pmu: Pmu::new(model),
            pt: caps.pt.filter(|_| features.intel_pt()).map(Pt::new),
            caches: None,
            caches_followed: 0,
            model,
            owed: Effects::NONE,
            steady: false,
            boundaries: Vec::new(),
            ranges: Vec::new(),
            generation: 0,
            parts: [0; 2],
        }
    }

    /// The whole state.
    pub fn state(&self) -> UnitsState {
        UnitsState {
            debugctl: self.debugctl.as_ref().map(DebugCtlUnit::state),
            lbr: self.lbr.as_ref().map(Lbr::state),
            arch_lbr: self.arch_lbr.as_ref().map(ArchLbr::state),
            ds_area: self.ds_area.state(),
            bts: self.bts.as_ref().map(Bts::state),
            pmu: self.pmu.as_ref().map(Pmu::state),
            pt: self.pt.as_ref().map(Pt::state),
            owed: self.owed,
        }
    }

    /// [`Units::state`] with the counters as they are at a moment, see [`Pmu::state_at`].
    pub fn state_at(&self, retired: u64, step: u64) -> UnitsState {
        UnitsState {
            pmu: self.pmu.as_ref().map(|pmu| pmu.state_at(retired, step)),
            ..self.state()
        }
    }

    /// Takes on a state that units of the same model gave; parts that this model has not are dropped.
    pub fn set_state(&mut self, state: &UnitsState) {
        if let (Some(unit), Some(state)) = (&mut self.debugctl, state.debugctl) {
            unit.set_state(state);
        }
        if let (Some(unit), Some(state)) = (&mut self.lbr, &state.lbr) {
            unit.set_state(state.clone());
        }
        if let (Some(unit), Some(state)) = (&mut self.arch_lbr, &state.arch_lbr) {
            unit.set_state(state.clone());
        }
        self.ds_area.set_state(state.ds_area);
        if let (Some(unit), Some(state)) = (&mut self.bts, state.bts) {
            unit.set_state(state);
        }
        if let (Some(unit), Some(state)) = (&mut self.pmu, &state.pmu) {
            unit.set_state(state);
        }
        if let (Some(unit), Some(state)) = (&mut self.pt, &state.pt) {
            unit.set_state(state.clone());
        }
        self.owed = state.owed;
        self.want_caches();
    }

    /// Counters that ask for it find a model of the caches; one whose last level is theirs alone, unless they are given another.
    fn want_caches(&mut self) {
        if self.caches.is_none() && self.pmu.as_ref().is_some_and(Pmu::uses_caches) {
            let last = LastLevel::new(self.model);
            self.caches = Some(Probe::new(cache::Core::of(self.model), last));
        }
    }

    /// RDMSR.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`]: no unit has this register. [`MsrFault::GeneralProtection`]: one has, and refuses.
    pub fn read_msr(&mut self, msr: u32, cpu: &mut dyn Processor) -> Result<u64, MsrFault> {
        let gate = self.gate();
        if let Some(unit) = &self.debugctl {
            claimed!(unit.read_msr(msr));
        }
        if let Some(unit) = &mut self.lbr {
            unit.apply_records();
            claimed!(unit.read_msr(msr, gate));
        }
        if let Some(unit) = &mut self.arch_lbr {
            unit.apply_records();
            claimed!(unit.read_msr(msr));
        }
        claimed!(self.ds_area.read_msr(msr));
        if let Some(unit) = &self.pt {
            claimed!(unit.read_msr(msr));
        }
        with_pmu!(self, |pmu, inputs| claimed!(pmu.read_msr(msr, cpu, &inputs)));
        Err(MsrFault::Unclaimed)
    }

    /// WRMSR.
    ///
    /// # Errors
    /// As for [`Units::read_msr`].
    pub fn write_msr(&mut self, msr: u32, value: u64, cpu: &mut dyn Processor) -> Result<(), MsrFault> {
        let gate = self.gate();
        if let Some(unit) = &mut self.debugctl {
            claimed!(unit.write_msr(msr, value));
        }
        if let Some(unit) = &mut self.lbr {
            claimed!(unit.write_msr(msr, value, gate));
        }
        if let Some(unit) = &mut self.arch_lbr {
            claimed!(unit.write_msr(msr, value));
        }
        claimed!(self.ds_area.write_msr(msr, value));
        if let Some(unit) = &mut self.pt {
            match unit.write_msr(msr, value, cpu) {
                Err(MsrFault::Unclaimed) => {}
                Err(fault) => return Err(fault),
                Ok(effects) => {
                    self.owed = self.owed.and(effects);
                    self.trace_may_end(gate);
                    return Ok(());
                }
            }
        }
        with_pmu!(self, |pmu, inputs| match pmu.write_msr(msr, value, cpu, &inputs) {
            Err(MsrFault::Unclaimed) => {}
            answer => {
                self.want_caches();
                return answer;
            }
        });
        Err(MsrFault::Unclaimed)
    }

    /// RDPMC, once the processor has allowed it.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`]: there is no such counter.
    pub fn read_counter(&mut self, index: u32, cpu: &mut dyn Processor) -> Result<u64, MsrFault> {
        with_pmu!(self, |pmu, inputs| return pmu.rdpmc(index, cpu, &inputs));
        Err(MsrFault::GeneralProtection)
    }

    /// XSAVES of a supervisor component: 8 Intel PT, 15 architectural LBR. Fills in the image, which is zero, and says whether
    /// the component differs from its initial configuration. `length` is the instruction's, in bytes.
    pub fn save_component(&mut self, component: u32, image: &mut [u8], length: u8, cpu: &mut dyn Processor) -> bool {
        let gate = self.gate();
        match component {
            8 => {
                let saved = self.pt.as_mut().is_some_and(|pt| {
                    let (initial, effects) = pt.save_component(image, length.into(), cpu);
                    self.owed = self.owed.and(effects);
                    !initial
                });
                self.trace_may_end(gate);
                saved
            }
            15 => self.arch_lbr.as_mut().is_some_and(|lbr| !lbr.save(image)),
            _ => false,
        }
    }

    /// XRSTORS of such a component, or of its initial configuration.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for an image that the registers would refuse, with nothing changed.
    pub fn load_component(
        &mut self,
        component: u32,
        image: Option<&[u8]>,
        length: u8,
        cpu: &mut dyn Processor,
    ) -> Result<(), MsrFault> {
        match component {
            8 => {
                if let Some(pt) = &mut self.pt {
                    let effects = pt.restore_component(image, length.into(), cpu)?;
                    self.owed = self.owed.and(effects);
                }
                Ok(())
            }
            15 => self.arch_lbr.as_mut().map_or(Ok(()), |lbr| lbr.restore(image)),
            _ => Ok(()),
        }
    }

    /// LVTPC has been unmasked by software.
    pub fn performance_unmasked(&mut self) -> Effects {
        self.pmu.as_mut().map_or(Effects::NONE, Pmu::unmasked)
    }

    /// Something may have cleared Intel PT's TraceEn; `before`: how it was.
    fn trace_may_end(&mut self, before: Gate) {
        if before.tracing
            && !self.gate().tracing
            && let Some(lbr) = &mut self.lbr
        {
            lbr.trace_ended();
        }
    }

    /// What was executed up to these branches has been fetched.
    fn fetch(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        // When branches are handed over must make no difference: each is taken by its own step.
        let records = match self.pmu.as_ref().is_some_and(Pmu::counts_fetches) {
            true => records,
            false => &records[..records.partition_point(|record| record.step < self.caches_followed)],
        };
        let Some(caches) = self.caches.as_mut().filter(|_| !records.is_empty()) else {
            return Effects::NONE;
        };
        let fetched = caches.branches(records, |linear| cpu.physical(linear));
        with_pmu!(self, |pmu, inputs| return pmu.fetched(&fetched, cpu, &inputs));
        Effects::NONE
    }

    /// Whether the last-branch stack records.
    fn gate(&self) -> Gate {
        Gate {
            enabled: self.debugctl.as_ref().is_some_and(DebugCtlUnit::records_branches),
            frozen: self.lbr_frozen(),
            tracing: self.pt.as_ref().is_some_and(Pt::trace_en),
        }
    }

    /// What branch trace store sees of IA32_DEBUGCTL: no TR while Intel PT traces on a part where they exclude each other.
    fn store_control(&self) -> DebugCtl {
        let control = self.debugctl.as_ref().map_or(DebugCtl::new(), DebugCtlUnit::control);
        let excluded = self.lbr.as_ref().is_some_and(Lbr::excluded_by_pt);
        if excluded && self.gate().tracing {
            control.with_tr(false)
        } else {
            control
        }
    }

    fn lbr_frozen(&self) -> bool {
        self.pmu
            .as_ref()
            .is_some_and(|pmu| pmu.status() & status::LBR_FROZEN != 0)
    }

    /// PEBS records that go into the processor trace: the counters made them, and stand where the trace stands now.
    fn trace_samples(&mut self, cpu: &mut dyn Processor) -> Effects {
        let records = self.pmu.as_mut().map_or(Vec::new(), Pmu::take_records);
        let mut effects = Effects::NONE;
        if let Some(pt) = &mut self.pt {
            for record in &records {
                effects = effects.and(pt.pebs(record, cpu));
            }
        }
        effects
    }

    /// What all callbacks end with: PEBS records in the trace, and what a request for an interrupt freezes.
    fn finish_effects(&mut self, effects: Effects, cpu: &mut dyn Processor) -> Effects {
        let effects = effects.and(self.trace_samples(cpu)).and(std::mem::take(&mut self.owed));
        if self.pt.as_mut().is_some_and(Pt::take_topa_pmi)
            && let Some(pmu) = &mut self.pmu
        {
            pmu.set_status(status::TRACE_TOPA);
        }
        if effects.pmi
            && let Some(debugctl) = &mut self.debugctl
        {
            let frozen = debugctl.freeze_on_pmi();
            if let Some(pmu) = &mut self.pmu {
                if frozen.lbr_status {
                    pmu.set_status(status::LBR_FROZEN);
                }
                if frozen.counters_status || frozen.counters_control {
                    pmu.freeze();
                }
            }
        }
        effects
    }

    /// Puts together what the units want watched.
    fn merge(&mut self) {
        let traced = self.pt.as_ref();
        let parts = [self.dr.generation(), traced.map_or(0, Pt::generation)];
        if parts == self.parts {
            return;
        }
        self.parts = parts;
        self.generation += 1;
        self.boundaries.clear();
        self.boundaries.extend_from_slice(self.dr.boundaries());
        self.boundaries.extend_from_slice(traced.map_or(&[], Pt::boundaries));
        self.boundaries.sort_unstable();
        self.boundaries.dedup();
        self.ranges.clear();
        self.ranges.extend_from_slice(self.dr.ranges());
    }
}

/// Units that need not hear, as things are, of what a processor of the host's executes.
#[derive(Clone, Copy, Default)]
struct Aside {
    /// They count from the time alone.
    counters: bool,
    /// The host traces.
    trace: bool,
}

impl Units {
    /// Whether a unit has to see instructions, but for breakpoints, which a processor of the host's has itself. `times`: whoever
    /// asks tells [how long](Units::elapsed) the processor runs, and RDPMC comes here.
    pub fn needs_instructions(&mut self, times: bool, cpu: &mut dyn Processor) -> bool {
        let aside = Aside {
            counters: times && self.pmu.as_ref().is_some_and(Pmu::time_is_enough),
            trace: self.pt.as_ref().is_some_and(Pt::is_served),
        };
        self.wanted(Interest::NOTHING, aside, cpu) != Interest::NOTHING
    }

    /// What a host's tracer does with the processor trace, and what that wants of the machine.
    pub fn host_trace(
        &mut self,
        cpu: &mut dyn Processor,
        f: impl FnOnce(&mut Pt, &mut dyn Processor) -> Effects,
    ) -> Effects {
        let effects = self.pt.as_mut().map_or(Effects::NONE, |pt| f(pt, cpu));
        self.finish_effects(effects, cpu)
    }

    /// Whether there are counters.
    pub fn has_counters(&self) -> bool {
        self.pmu.is_some()
    }

    /// Cycles that a processor can run elsewhere until a counter overflows, or fewer; `None`: none does.
    pub fn cycles_left(&self) -> Option<u64> {
        self.pmu.as_ref().and_then(Pmu::cycles_left)
    }

    /// The processor has run elsewhere for so many cycles, and is in HLT now or not.
    pub fn elapsed(&mut self, cycles: u64, halted: bool, cpu: &mut dyn Processor) {
        with_pmu!(self, |pmu, inputs| pmu.elapsed(cycles, halted, cpu, &inputs));
    }

    /// Whether whoever writes a register is likely to read counters soon. A processor that runs elsewhere may have no RDPMC that
    /// would come here.
    pub fn precedes_rdpmc(&self, msr: u32) -> bool {
        self.pmu.as_ref().is_some_and(|pmu| pmu.owns(msr))
    }

    /// What the units but for the breakpoints want to hear, on top of this.
    fn wanted(&mut self, mut interest: Interest, aside: Aside, cpu: &mut dyn Processor) -> Interest {
        let (gate, frozen) = (self.gate(), self.lbr_frozen());
        let store = self.store_control();
        let followed = cpu.step() < self.caches_followed;
        interest.every_access |= followed;
        interest.branches = interest.branches.max(Recorded::All.when(followed));
        // What counts branches, or has room for so many of them, wants something else after each batch; the last-branch records do not.
        let mut steady = !followed;
        let mut with = |interest: Interest, other: Interest| {
            steady &= other == Interest::NOTHING;
            interest.and(other)
        };
        if let Some(debugctl) = &self.debugctl {
            let control = debugctl.control();
            interest.step_on_branches = control.btf();
            interest.bus_locks = control.bus_lock_detect();
            if let Some(bts) = &mut self.bts {
                interest = with(interest, bts.interest(store, self.ds_area.base(), cpu));
            }
            // A debug exception changes the register.
            interest.transfers |= control.lbr() || control.btf();
        }
        if let Some(lbr) = &mut self.lbr {
            interest = interest.and(lbr.interest(gate, || cpu.context()));
        }
        if let Some(lbr) = &mut self.arch_lbr {
            interest = interest.and(lbr.interest(frozen, || cpu.context()));
        }
        if !aside.counters {
            with_pmu!(self, |pmu, inputs| interest =
                with(interest, pmu.interest(cpu, &inputs)));
        }
        let sampled = self.trace_samples(cpu);
        self.owed = self.owed.and(sampled);
        if let Some(pt) = self.pt.as_ref().filter(|_| !aside.trace) {
            interest = with(interest, pt.interest(cpu.step()));
        }
        if self.owed != Effects::NONE {
            interest.instructions = 1;
        }
        self.steady = steady && self.owed == Effects::NONE && !interest.step_on_branches;
        interest
    }
}

/// A VM entry, a VM exit, an SMI or RSM, which come alone. Branch records and the branch trace store are of one side of them: what a VMM or a
/// handler did before it is nobody's business on the other, and no record of a KVM guest's has an address of the host's.
fn is_transition(records: &[BranchRecord]) -> bool {
    let [record] = records else { return false };
    let transitions = [Far::VmEntry, Far::VmExit, Far::Smi, Far::Rsm];
    transitions.into_iter().any(|far| record.flow == Flow::Far(far).code())
}

impl Watch for Units {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        let breakpoints = self.dr.interest(cpu);
        let interest = self.wanted(breakpoints, Aside::default(), cpu);
        self.merge();
        interest
    }

    fn is_steady(&self) -> bool {
        self.steady
    }

    fn boundaries(&self) -> &[u64] {
        &self.boundaries
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        let mut effects = self.dr.before(address);
        with_pmu!(self, |pmu, inputs| effects =
            effects.and(pmu.before(address, cpu, &inputs)));
        // Of the instruction before this one.
        effects = effects.and(self.trace_samples(cpu));
        // An instruction that a breakpoint holds back does not run now.
        if let (Some(pt), None) = (&mut self.pt, effects.debug) {
            effects = effects.and(pt.before(address, cpu));
        }
        self.finish_effects(effects, cpu)
    }

    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        let mut effects = self.dr.access(access);
        // An access that is announced for another reason is none to them: they hear of all or of none.
        let step = cpu.step();
        let asked = step < self.caches_followed || self.pmu.as_ref().is_some_and(Pmu::counts_accesses);
        let caches = self.caches.as_mut().filter(|_| asked);
        let memory = caches.and_then(|caches| caches.access(access, step, |linear| cpu.physical(linear)));
        with_pmu!(self, |pmu, inputs| effects =
            effects.and(pmu.access(access, memory, cpu, &inputs)));
        self.finish_effects(effects, cpu)
    }

    fn implicit_access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        let effects = self.dr.access(access);
        self.finish_effects(effects, cpu)
    }

    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        let (gate, frozen, context) = (self.gate(), self.lbr_frozen(), cpu.context());
        let mut effects = Effects::NONE;
        let branches = !is_transition(records);
        if let Some(lbr) = self.lbr.as_mut().filter(|_| branches) {
            lbr.comes(cpu.recorded());
            lbr.branches(records, gate, context);
        }
        if let Some(lbr) = self.arch_lbr.as_mut().filter(|_| branches) {
            lbr.comes(cpu.recorded());
            lbr.branches(records, frozen, context);
        }
        with_pmu!(self, |pmu, inputs| effects =
            effects.and(pmu.branches(records, cpu, &inputs)));
        effects = effects.and(self.fetch(records, cpu));
        let store = self.store_control();
        if let Some(bts) = self.bts.as_mut().filter(|_| branches) {
            effects = effects.and(bts.branches(records, store, self.ds_area.base(), cpu));
        }
        if let Some(pt) = &mut self.pt {
            effects = effects.and(pt.branches(records, cpu));
        }
        self.finish_effects(effects, cpu)
    }

    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        let mut effects = Effects::NONE;
        if let Some(debugctl) = &mut self.debugctl {
            debugctl.event(event);
        }
        let (gate, frozen, context) = (self.gate(), self.lbr_frozen(), cpu.context());
        if let Some(lbr) = &mut self.lbr {
            lbr.event(event, gate, context);
        }
        if let Some(lbr) = &mut self.arch_lbr {
            lbr.event(event, frozen, context);
        }
        with_pmu!(self, |pmu, inputs| effects =
            effects.and(pmu.event(event, cpu, &inputs)));
        effects = effects.and(self.fetch(core::slice::from_ref(&event.branch), cpu));
        let store = self.store_control();
        if let Some(bts) = &mut self.bts {
            effects = effects.and(bts.event(event, store, self.ds_area.base(), cpu));
        }
        if let Some(pt) = &mut self.pt {
            effects = effects.and(pt.event(event, cpu));
        }
        self.finish_effects(effects, cpu)
    }

    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        let (gate, frozen, context) = (self.gate(), self.lbr_frozen(), cpu.context());
        let mut effects = Effects::NONE;
        let abort = match change {
            Change::TransactionAbort { from, .. } => {
                Some(branch_ring::abort_record(from, cpu.step(), cpu.rip(), context))
            }
            _ => None,
        };
        let freezes =
            matches!(change, Change::Smi { .. }) && self.debugctl.as_ref().is_some_and(DebugCtlUnit::freezes_in_smm);
        if let Some(debugctl) = &mut self.debugctl {
            debugctl.state_changed(change);
        }
        if let Some(lbr) = &mut self.lbr {
            if let Some(abort) = &abort {
                lbr.transaction_aborted(abort, gate, context);
            }
            lbr.state_changed(change, context);
        }
        if let Some(lbr) = &mut self.arch_lbr {
            if let Some(abort) = &abort {
                lbr.transaction_aborted(abort, frozen, context);
            }
            lbr.state_changed(change, context);
        }
        self.ds_area.state_changed(change);
        if let (Some(bts), Change::Reset) = (&mut self.bts, change) {
            bts.reset();
        }
        with_pmu!(self, |pmu, inputs| effects =
            effects.and(pmu.state_change(change, cpu, &inputs)));
        if freezes {
            with_pmu!(self, |pmu, inputs| effects =
                effects.and(pmu.freeze_in_smm(cpu, &inputs)));
        }
        let store = self.store_control();
        if let (Some(bts), Some(abort)) = (&mut self.bts, abort) {
            effects = effects.and(bts.branches(&[abort], store, self.ds_area.base(), cpu));
        }
        if let Some(pt) = &mut self.pt {
            effects = effects.and(pt.change(change, cpu));
        }
        self.finish_effects(effects, cpu)
    }

    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        let mut effects = Effects::NONE;
        with_pmu!(self, |pmu, inputs| effects = effects.and(pmu.tick(cpu, &inputs)));
        if let Some(pt) = &mut self.pt {
            effects = effects.and(pt.tick(cpu));
        }
        self.finish_effects(effects, cpu)
    }
}
