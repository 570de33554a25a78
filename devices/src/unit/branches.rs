//! The units that watch branches, joined: IA32_DEBUGCTL, last-branch records, the debug-store area and branch trace store.
//!
//! # Practice
//! One field a unit, and the order in which they hear a word is the order of the statements here. Last-branch records come
//! before branch trace store, since on the parts that have both the message is taken from the stack. What other units have a
//! say in comes in as [`Outside`], what these ask of others goes out as [`Effects`] and [`Frozen`].

use x86::cpuid::Features;
use x86::debugctl::DebugCtl;
use x86::ds::DsLayout;
use x86::lbr::{ArchLbrLeaf, LbrLayout, image};
use x86::model::CpuModel;
use x86::msr::MsrFault;
use x86::seam::{Appetite, BranchRecord, Change, Effects, EventRecord, Processor};

use super::arch_lbr::{ArchLbr, ArchLbrState};
use super::branch_ring::Entry;
use super::debugctl::{DebugCtlState, DebugCtlUnit, Frozen};
use super::ds::area::DsArea;
use super::ds::bts::{Bts, BtsState};
use super::lbr::{Gate, Lbr, LbrState};

/// The XSAVE component of architectural last-branch records.
pub const COMPONENT: u8 = 15;

/// What other units' registers say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outside {
    /// IA32_PERF_GLOBAL_STATUS.LBR_FRZ.
    pub lbr_frozen: bool,
    /// IA32_RTIT_CTL.TraceEn.
    pub tracing: bool,
}

/// Last-branch records of either kind.
#[derive(Clone, Debug)]
pub enum LastBranches {
    /// None.
    Absent,
    /// A model's own.
    Legacy(Lbr),
    /// Architectural ones.
    Architectural(ArchLbr),
}

/// The units of one logical processor that watch branches.
#[derive(Clone, Debug)]
pub struct Branches {
    /// IA32_DEBUGCTL.
    pub debugctl: Option<DebugCtlUnit>,
    /// Last-branch records.
    pub lbr: LastBranches,
    /// IA32_DS_AREA.
    pub ds_area: DsArea,
    /// Branch trace store.
    pub bts: Option<Bts>,
}

/// The whole state of [`Branches`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchesState {
    /// IA32_DEBUGCTL.
    pub debugctl: Option<DebugCtlState>,
    /// A model's own last-branch records.
    pub lbr: Option<LbrState>,
    /// Architectural last-branch records.
    pub arch_lbr: Option<ArchLbrState>,
    /// IA32_DS_AREA.
    pub ds_area: u64,
    /// Branch trace store.
    pub bts: Option<BtsState>,
}

impl Branches {
    /// The units of a model, as far as these features show them.
    pub fn new(model: &CpuModel, features: Features) -> Self {
        let linear_bits = model.linear_bits();
        let lbr = match model.units.lbr {
            Some(caps) if caps.layout != LbrLayout::Architectural => {
                LastBranches::Legacy(Lbr::new(caps, features, linear_bits))
            }
            Some(_) if features.arch_lbr() => {
                let regs = model
                    .silicon
                    .iter()
                    .find(|row| row.leaf == 0x1C)
                    .map_or([0; 4], |row| row.regs);
                LastBranches::Architectural(ArchLbr::new(ArchLbrLeaf { regs }, linear_bits))
            }
            _ => LastBranches::Absent,
        };
        let bts = model.units.ds.filter(|ds| ds.bts && features.ds());
        Self {
            debugctl: model.units.debugctl.map(|caps| DebugCtlUnit::new(caps, features)),
            lbr,
            ds_area: DsArea::new(features, linear_bits),
            bts: bts.map(|ds| Bts::new(DsLayout::of(features), ds.bts_predicted, linear_bits)),
        }
    }

    /// RDMSR.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] as the unit says; [`MsrFault::Unclaimed`] for a register of none of these units.
    pub fn read_msr(&self, msr: u32, outside: Outside) -> Result<u64, MsrFault> {
        let debugctl = self.debugctl.as_ref().map(|unit| unit.read_msr(msr));
        let claimed = |answer: &Result<u64, MsrFault>| *answer != Err(MsrFault::Unclaimed);
        if let Some(answer) = debugctl.filter(claimed) {
            return answer;
        }
        let lbr = match &self.lbr {
            LastBranches::Absent => Err(MsrFault::Unclaimed),
            LastBranches::Legacy(unit) => unit.read_msr(msr, self.gate(outside)),
            LastBranches::Architectural(unit) => unit.read_msr(msr),
        };
        match lbr {
            Err(MsrFault::Unclaimed) => self.ds_area.read_msr(msr),
            answer => answer,
        }
    }

    /// WRMSR.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] as the unit says; [`MsrFault::Unclaimed`] for a register of none of these units.
    pub fn write_msr(&mut self, msr: u32, value: u64, outside: Outside) -> Result<(), MsrFault> {
        let debugctl = self.debugctl.as_mut().map(|unit| unit.write_msr(msr, value));
        let claimed = |answer: &Result<(), MsrFault>| *answer != Err(MsrFault::Unclaimed);
        if let Some(answer) = debugctl.filter(claimed) {
            return answer;
        }
        let gate = self.gate(outside);
        let lbr = match &mut self.lbr {
            LastBranches::Absent => Err(MsrFault::Unclaimed),
            LastBranches::Legacy(unit) => unit.write_msr(msr, value, gate),
            LastBranches::Architectural(unit) => unit.write_msr(msr, value),
        };
        match lbr {
            Err(MsrFault::Unclaimed) => self.ds_area.write_msr(msr, value),
            answer => answer,
        }
    }

    /// What IA32_DEBUGCTL says; all clear where there is none.
    pub fn control(&self) -> DebugCtl {
        self.debugctl.as_ref().map_or(DebugCtl::new(), DebugCtlUnit::control)
    }

    /// What the executor has to say. To be asked as [`x86::seam::Watch::appetite`] is.
    pub fn appetite(&mut self, outside: Outside, cpu: &mut dyn Processor) -> Appetite {
        let code = cpu.context();
        let gate = self.gate(outside);
        let control = self.control();
        let stepping = Appetite {
            step_on_branches: control.btf(),
            ..Appetite::NOTHING
        };
        let lbr = match &mut self.lbr {
            LastBranches::Absent => Appetite::NOTHING,
            LastBranches::Legacy(unit) => unit.appetite(gate, code),
            LastBranches::Architectural(unit) => unit.appetite(outside.lbr_frozen, code),
        };
        let area = self.ds_area.base();
        let bts = match &mut self.bts {
            Some(unit) => unit.appetite(paused(control, &self.lbr, outside), area, cpu),
            None => Appetite::NOTHING,
        };
        stepping.and(lbr).and(bts)
    }

    /// A word of the seam: branches have retired.
    pub fn branches(&mut self, records: &[BranchRecord], outside: Outside, cpu: &mut dyn Processor) -> Effects {
        let code = cpu.context();
        let gate = self.gate(outside);
        match &mut self.lbr {
            LastBranches::Absent => {}
            LastBranches::Legacy(unit) => unit.branches(records, gate, code),
            LastBranches::Architectural(unit) => unit.branches(records, outside.lbr_frozen, code),
        }
        let control = paused(self.control(), &self.lbr, outside);
        let area = self.ds_area.base();
        match &mut self.bts {
            Some(unit) => unit.branches(records, control, area, cpu),
            None => Effects::NONE,
        }
    }

    /// A word of the seam: an interrupt or exception was delivered.
    pub fn event(&mut self, event: &EventRecord, outside: Outside, cpu: &mut dyn Processor) -> Effects {
        if let Some(unit) = &mut self.debugctl {
            unit.event(event);
        }
        let code = cpu.context();
        let gate = self.gate(outside);
        match &mut self.lbr {
            LastBranches::Absent => {}
            LastBranches::Legacy(unit) => unit.event(event, gate, code),
            LastBranches::Architectural(unit) => unit.event(event, outside.lbr_frozen, code),
        }
        let control = paused(self.control(), &self.lbr, outside);
        let area = self.ds_area.base();
        match &mut self.bts {
            Some(unit) => unit.event(event, control, area, cpu),
            None => Effects::NONE,
        }
    }

    /// A word of the seam: something that is no branch has changed.
    pub fn state_changed(&mut self, change: Change, cpu: &mut dyn Processor) {
        if let Some(unit) = &mut self.debugctl {
            unit.state_changed(change);
        }
        self.ds_area.state_changed(change);
        let code = cpu.context();
        match &mut self.lbr {
            LastBranches::Absent => {}
            LastBranches::Legacy(unit) => unit.state_changed(change, code),
            LastBranches::Architectural(unit) => unit.state_changed(change, code),
        }
        if let (Change::Reset, Some(unit)) = (change, &mut self.bts) {
            unit.reset();
        }
    }

    /// A performance-monitoring interrupt is about to be requested: stops what IA32_DEBUGCTL says, and says what the
    /// counters' unit must stop.
    pub fn freeze_on_pmi(&mut self) -> Frozen {
        self.debugctl
            .as_mut()
            .map_or(Frozen::default(), DebugCtlUnit::freeze_on_pmi)
    }

    /// XSAVES of component 15 into an image of zeros: whether it is in use. `None`: there is no such component.
    pub fn save_component(&mut self, component: u8, area: &mut [u8]) -> Option<bool> {
        match &mut self.lbr {
            LastBranches::Architectural(unit) if component == COMPONENT => Some(!unit.save(area)),
            _ => None,
        }
    }

    /// XRSTORS of component 15, from an image or to its initial state.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for an image that the registers would refuse, [`MsrFault::Unclaimed`] if there is no
    /// such component.
    pub fn restore_component(&mut self, component: u8, area: Option<&[u8]>) -> Result<(), MsrFault> {
        match &mut self.lbr {
            LastBranches::Architectural(unit) if component == COMPONENT => {
                unit.restore(area.map(|area| &area[..area.len().min(image::SIZE)]))
            }
            _ => Err(MsrFault::Unclaimed),
        }
    }

    /// The last-branch record that is `age` older than the newest, for PEBS records: zeros where there is none.
    pub fn last_branch(&self, age: u8) -> Entry {
        match &self.lbr {
            LastBranches::Absent => None,
            LastBranches::Legacy(unit) => unit.newest().nth(age.into()),
            LastBranches::Architectural(unit) => unit.newest().nth(age.into()),
        }
        .copied()
        .unwrap_or_default()
    }

    /// The whole state.
    pub fn state(&self) -> BranchesState {
        let (lbr, arch_lbr) = match &self.lbr {
            LastBranches::Absent => (None, None),
            LastBranches::Legacy(unit) => (Some(unit.state()), None),
            LastBranches::Architectural(unit) => (None, Some(unit.state())),
        };
        BranchesState {
            debugctl: self.debugctl.as_ref().map(DebugCtlUnit::state),
            lbr,
            arch_lbr,
            ds_area: self.ds_area.state(),
            bts: self.bts.as_ref().map(Bts::state),
        }
    }

    /// Takes a whole state back; what this model has not is dropped.
    pub fn set_state(&mut self, state: BranchesState) {
        if let (Some(unit), Some(state)) = (&mut self.debugctl, state.debugctl) {
            unit.set_state(state);
        }
        match (&mut self.lbr, state.lbr, state.arch_lbr) {
            (LastBranches::Legacy(unit), Some(state), _) => unit.set_state(state),
            (LastBranches::Architectural(unit), _, Some(state)) => unit.set_state(state),
            _ => {}
        }
        self.ds_area.set_state(state.ds_area);
        if let (Some(unit), Some(state)) = (&mut self.bts, state.bts) {
            unit.set_state(state);
        }
    }

    fn gate(&self, outside: Outside) -> Gate {
        Gate {
            enabled: self.debugctl.as_ref().is_some_and(DebugCtlUnit::records_branches),
            frozen: outside.lbr_frozen,
            tracing: outside.tracing,
        }
    }
}

/// What branch trace store sees of IA32_DEBUGCTL: nothing while Intel PT traces on a part where they exclude each other.
fn paused(control: DebugCtl, lbr: &LastBranches, outside: Outside) -> DebugCtl {
    match lbr {
        LastBranches::Legacy(unit) if outside.tracing && unit.excluded_by_pt() => control.with_tr(false),
        _ => control,
    }
}

#[cfg(test)]
#[path = "branches_test.rs"]
mod tests;
