//! A model that is put together while the program runs: another one with features switched, or a user's own.

mod clock;

use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::error::{LeafError, ModelError};
use super::{CpuModel, CpuidRow, Difference, MsrRow, UnitCaps, msrs, policy};
use crate::cpuid::{Feature, Features};
use crate::msr::*;
use crate::pt::PtCaps;
use crate::smm::MTRRCAP_SMRR;
use crate::vmx::{FEATURE_CONTROL_LOCKED, FEATURE_CONTROL_VMX, VmxCaps};

/// A CPU model that owns its tables. [`OwnedModel::build`] checks it and makes it a [`CpuModel`].
#[derive(Clone, Debug)]
pub struct OwnedModel {
    /// The name on the command line.
    pub name: String,
    /// One line for `minivmm models`.
    pub description: String,
    /// The time-stamp counter's frequency in kHz.
    pub tsc_khz: u32,
    /// The local APIC timer's input frequency in kHz, before the divider.
    pub apic_timer_khz: u32,
    /// Revision of the loaded microcode update.
    pub microcode: u32,
    silicon: Vec<CpuidRow>,
    adjustments: Vec<Difference>,
    added: Features,
    asked: Features,
    removed: Features,
    msrs: Vec<MsrRow>,
    units: UnitCaps,
    vmx: Option<VmxCaps>,
}

/// Registers that a part of the machine holds itself, so that no model has a row for them: the core, the clock, the local
/// APIC, and of the debug and trace units and the resource director those that have one meaning on all parts.
fn held_elsewhere(msr: u32) -> bool {
    matches!(
        msr,
        IA32_TIME_STAMP_COUNTER
            | IA32_APIC_BASE
            | IA32_TSC_ADJUST
            | IA32_SYSENTER_CS
            | IA32_SYSENTER_ESP
            | IA32_SYSENTER_EIP
            | IA32_TSC_DEADLINE
            | IA32_X2APIC_BASE..=0x0000_08FF
            | IA32_EFER..=IA32_FMASK
            | IA32_FS_BASE..=IA32_TSC_AUX
            | IA32_PERFEVTSEL0..=0x0000_018D
            | IA32_DEBUGCTL
            | IA32_FIXED_CTR0..=0x0000_030F
            | MSR_PERF_METRICS
            | IA32_PERF_CAPABILITIES
            | IA32_FIXED_CTR_CTRL..=IA32_PERF_GLOBAL_INUSE
            | IA32_PEBS_ENABLE
            | IA32_A_PMC0..=0x0000_04C8
            | IA32_RTIT_OUTPUT_BASE..=IA32_RTIT_OUTPUT_MASK_PTRS
            | IA32_RTIT_CTL..=IA32_RTIT_CR3_MATCH
            | IA32_RTIT_ADDR0_A..=IA32_RTIT_ADDR3_B
            | IA32_DS_AREA
            | IA32_PKRS
            | IA32_L3_QOS_CFG..=IA32_L2_QOS_CFG
            | IA32_QM_EVTSEL..=IA32_PQR_ASSOC
            | IA32_XSS
            | IA32_LBR_CTL..=IA32_LBR_DEPTH
    )
}

/// Other spellings of features: QEMU's, and both halves of IBRS and IBPB.
const ALIASES: &[(&str, Feature)] = &[
    ("clfsh", Feature::Clfsh),
    ("i64", Feature::Lm),
    ("ibpb", Feature::SpecCtrl),
    ("ibrs", Feature::SpecCtrl),
    ("invtsc", Feature::InvariantTsc),
    ("pclmuldq", Feature::Pclmulqdq),
    ("xd", Feature::Nx),
];

fn plain(name: &str) -> impl Iterator<Item = char> {
    name.chars()
        .filter(|c| !matches!(c, '-' | '_' | '.'))
        .flat_map(char::to_lowercase)
}

/// The feature with this name: that of /proc/cpuinfo, of QEMU or of the manual, in any case, dashes and underscores alike.
pub fn feature_named(name: &str) -> Option<Feature> {
    let same = |other: &str| plain(name).eq(plain(other));
    // No letters, no feature.
    plain(name).next()?;
    let own = |f: &&Feature| same(f.flag()) || same(f.name());
    let alias = || {
        ALIASES
            .iter()
            .find(|(alias, _)| same(alias))
            .map(|(_, feature)| *feature)
    };
    Feature::ALL.iter().find(own).copied().or_else(alias)
}

impl From<&CpuModel> for OwnedModel {
    fn from(model: &CpuModel) -> Self {
        Self {
            name: model.name.to_string(),
            description: model.description.to_string(),
            tsc_khz: model.tsc_khz,
            apic_timer_khz: model.apic_timer_khz,
            microcode: model.microcode,
            silicon: model.silicon.to_vec(),
            adjustments: model.adjustments.to_vec(),
            added: model.added,
            asked: model.asked,
            removed: model.removed,
            msrs: model.msrs.to_vec(),
            units: model.units,
            vmx: model.vmx,
        }
    }
}

impl OwnedModel {
    /// Sets what the part answers for one leaf, or one subleaf of it. The policy decides what of it a guest sees.
    pub fn set_cpuid(&mut self, row: CpuidRow) {
        // A row for all subleaves and rows for single ones do not stand side by side.
        self.silicon
            .retain(|r| r.leaf != row.leaf || row.subleaf.is_some() && r.subleaf.is_some() && r.subleaf != row.subleaf);
        let at = self
            .silicon
            .partition_point(|r| (r.leaf, r.subleaf) < (row.leaf, row.subleaf));
        self.silicon.insert(at, row);
        self.adjustments.retain(|d| d.leaf != row.leaf);
    }

    /// Sets a plain MSR.
    ///
    /// # Errors
    /// A register that a part of the machine holds itself.
    pub fn set_msr(&mut self, row: MsrRow) -> Result<(), ModelError> {
        if held_elsewhere(row.msr) {
            return Err(ModelError::HeldElsewhere(row.msr));
        }
        match self.msrs.binary_search_by_key(&row.msr, |r| r.msr) {
            Ok(at) => self.msrs[at] = row,
            Err(at) => self.msrs.insert(at, row),
        }
        Ok(())
    }

    /// Takes away the plain MSR with this number, if there is one.
    pub fn remove_msr(&mut self, msr: u32) {
        self.msrs.retain(|row| row.msr != msr);
    }

    /// What its debug and trace units can do. Those that CPUID enumerates need their features, too.
    pub fn units_mut(&mut self) -> &mut UnitCaps {
        &mut self.units
    }

    /// Switches features: `+avx,-rdrand`. What needs a feature that goes, goes with it, but for long mode, without which a part is
    /// another part.
    ///
    /// # Errors
    /// One line: a word that is no toggle, an unknown feature, one that the engine does not execute, one that the part has
    /// no leaf for, or one switched both ways.
    pub fn toggle(&mut self, toggles: &str) -> Result<(), ModelError> {
        let part = Features::of(&self.silicon);
        let (mut on, mut off) = (Features::NONE, Features::NONE);
        for toggle in toggles.split(',') {
            let (want, name) = match (toggle.strip_prefix('+'), toggle.strip_prefix('-')) {
                (Some(name), _) => (true, name),
                (_, Some(name)) => (false, name),
                _ => return Err(ModelError::NoToggle(printable(toggle))),
            };
            let Some(feature) = feature_named(name) else {
                return Err(ModelError::UnknownFeature(printable(name)));
            };
            if feature == Feature::Apic {
                return Err(ModelError::Apic);
            }
            if want {
                on = on.with(feature);
                self.may_show(feature, part)?;
            } else {
                off = off.with(feature);
            }
        }
        if let Some(both) = on.and(off).iter().next() {
            return Err(ModelError::BothWays(both));
        }
        let shown = policy::shown(part);
        // Until nothing more goes: there are chains.
        let present = shown.or(self.added).minus(self.removed).minus(on);
        let mut before = Features::NONE;
        while before != off {
            before = off;
            for &(feature, needed) in policy::NEEDS {
                if off.has(needed) && present.has(feature) && feature != Feature::Lm {
                    off = off.with(feature);
                }
            }
        }
        self.asked = self.asked.minus(off).or(on);
        self.added = self.added.minus(off).or(on.minus(shown));
        self.removed = self.removed.minus(on).or(off.and(shown));
        // What an adjustment adds, a toggle takes away as well.
        self.adjustments
            .retain(|d| !d.feature.is_some_and(|feature| off.has(feature)));
        Ok(())
    }

    fn may_show(&self, feature: Feature, part: Features) -> Result<(), ModelError> {
        if !policy::executes(feature) {
            let why = policy::why_hidden(feature).unwrap_or("not modelled");
            return Err(ModelError::NotExecuted { feature, why });
        }
        if feature == Feature::Vmx && self.vmx.is_none() {
            return Err(ModelError::NoVmx(self.name.clone()));
        }
        let place = feature.place();
        let highest = |first: u32| self.part_row(first, 0).map_or(0, |row| row.regs[0]);
        let listed =
            place.leaf <= highest(place.leaf & 0x8000_0000) && self.part_row(place.leaf, place.subleaf).is_some();
        // AVX-512 is nothing without the components of its state.
        const XSAVE: u32 = 0xd;
        let state = |component| self.part_row(XSAVE, component).is_some_and(|row| row.regs[0] != 0);
        let stateless = feature == Feature::Avx512f && !(5..8).all(state);
        if part.has(feature) || listed && !stateless {
            Ok(())
        } else {
            Err(ModelError::NoLeaf {
                feature,
                model: self.name.clone(),
                leaf: if listed { XSAVE } else { place.leaf },
            })
        }
    }

    /// Has IA32_MISC_ENABLE say that branch trace store (bit 11) or PEBS (bit 12) is not there, whatever CPUID says of the debug
    /// store that they share.
    pub fn set_unavailable(&mut self, branch_trace_store: bool, pebs: bool) {
        let bits = u64::from(branch_trace_store) << 11 | u64::from(pebs) << 12;
        for row in self.msrs.iter_mut().filter(|row| row.msr == IA32_MISC_ENABLE) {
            row.reset |= bits;
        }
    }

    /// The part's row for a leaf and subleaf, if it has one.
    pub fn part_row(&self, leaf: u32, subleaf: u32) -> Option<&CpuidRow> {
        self.silicon.iter().find(|row| row.leaf == leaf && row.answers(subleaf))
    }

    /// Checks the tables and makes them a model that lives as long as the program.
    ///
    /// # Errors
    /// One line: features that contradict each other, leaves that do not fit together, registers that would not accept
    /// their own values.
    pub fn build(self) -> Result<&'static CpuModel, ModelError> {
        let features = policy::shown(Features::of(&self.silicon))
            .or(self.added)
            .minus(self.removed);
        let wrong = policy::contradictions(features);
        if !wrong.is_empty() {
            return Err(ModelError::Contradiction(wrong));
        }
        self.check_leaves().map_err(ModelError::Leaf)?;
        let signature = self.part_row(1, 0).map_or(0, |row| row.regs[0]);
        let (silicon, mut cpuid) = (self.silicon.clone(), self.silicon);
        let at = cpuid.partition_point(|row| row.leaf < policy::HYPERVISOR.leaf);
        cpuid.insert(at, policy::HYPERVISOR);
        policy::narrow_rows(&mut cpuid, features);
        policy::adjust(&mut cpuid, &self.adjustments);

        let enumerated = |msr: u32| {
            let row = msrs::ENUMERATED.iter().find(|(number, _)| *number == msr);
            let smrr = matches!(msr, IA32_SMRR_PHYSBASE | IA32_SMRR_PHYSMASK);
            (!smrr || features.mtrr()) && row.is_none_or(|(_, by)| by.iter().any(|&feature| features.has(feature)))
        };
        // The capability MSRs of VMX follow from what is shown.
        let kept = |row: &MsrRow| enumerated(row.msr) && !(IA32_VMX_BASIC..=IA32_VMX_BASIC + 0x11).contains(&row.msr);
        let mut registers: Vec<MsrRow> = self.msrs.into_iter().filter(kept).collect();
        for &row in msrs::ADDED {
            if enumerated(row.msr)
                && let Err(at) = registers.binary_search_by_key(&row.msr, |r| r.msr)
            {
                registers.insert(at, row);
            }
        }
        if let Some(caps) = self.vmx.filter(|_| features.vmx()) {
            for row in caps.shown(features).msrs(features) {
                if let Err(at) = registers.binary_search_by_key(&row.msr, |r| r.msr) {
                    registers.insert(at, row);
                }
            }
        }
        for row in &mut registers {
            match row.msr {
                // As firmware leaves it.
                IA32_FEATURE_CONTROL if features.vmx() => row.reset |= FEATURE_CONTROL_LOCKED | FEATURE_CONTROL_VMX,
                IA32_FEATURE_CONTROL => row.reset &= !FEATURE_CONTROL_VMX,
                IA32_BIOS_SIGN_ID => row.reset = u64::from(self.microcode) << 32,
                IA32_MISC_ENABLE => {
                    let netburst = self.units.pmu.is_some_and(|caps| caps.netburst.is_some());
                    row.reset = msrs::misc_enable(row.reset, features, netburst);
                }
                _ => {}
            }
        }
        check_registers(&registers, features)?;
        if !(1_000..=10_000_000).contains(&self.tsc_khz) {
            return Err(ModelError::TscKhz(self.tsc_khz));
        }
        if !(1_000..=self.tsc_khz).contains(&self.apic_timer_khz) {
            return Err(ModelError::ApicTimerKhz(self.apic_timer_khz));
        }
        let silicon: &'static [CpuidRow] = silicon.leak();
        Ok(Box::leak(Box::new(CpuModel {
            name: self.name.leak(),
            description: self.description.leak(),
            tsc_khz: self.tsc_khz,
            apic_timer_khz: self.apic_timer_khz,
            microcode: self.microcode,
            silicon,
            cpuid: cpuid.leak(),
            adjustments: self.adjustments.leak(),
            added: self.added,
            asked: self.asked,
            removed: self.removed,
            msrs: registers.leak(),
            units: UnitCaps {
                lbr: self.units.lbr.map(|caps| caps.with_signature(signature)),
                pmu: self.units.pmu.map(|caps| caps.with_signature(signature)),
                // A user's rows decide here too, and a part without the feature has no unit.
                pt: if Features::of(silicon).intel_pt() && !self.removed.intel_pt() {
                    PtCaps::of(silicon, self.tsc_khz)
                } else {
                    None
                },
                ..self.units
            },
            vmx: self.vmx,
        })))
    }

    fn check_leaves(&self) -> Result<(), LeafError> {
        let highest = self.part_row(0, 0).map_or(0, |row| row.regs[0]);
        if highest == 0 || highest > 0xFFFF || self.part_row(1, 0).is_none() {
            return Err(LeafError::First);
        }
        for row in &self.silicon {
            let first = row.leaf & 0x8000_0000;
            if row.leaf & 0x4000_0000 != 0 || row.leaf & 0xFFFF != row.leaf & 0x3FFF_FFFF {
                return Err(LeafError::Range(row.leaf));
            }
            let highest = self.part_row(first, 0).map_or(0, |row| row.regs[0]);
            if row.leaf > highest {
                return Err(LeafError::AboveHighest {
                    leaf: row.leaf,
                    highest,
                });
            }
        }
        if let Some(widths) = self.part_row(0x8000_0008, 0) {
            let (physical, linear) = (widths.regs[0] & 0xFF, widths.regs[0] >> 8 & 0xFF);
            if !(32..=52).contains(&physical) || !matches!(linear, 32 | 48 | 57) {
                return Err(LeafError::Widths { physical, linear });
            }
        }
        for row in self
            .silicon
            .iter()
            .filter(|row| row.leaf == 0xD && row.subleaf >= Some(2))
        {
            let [size, offset, ..] = row.regs;
            if size > 0x1_0000 || offset > 0x1_0000 {
                return Err(LeafError::Component);
            }
        }
        Ok(())
    }
}

fn check_registers(rows: &[MsrRow], features: Features) -> Result<(), ModelError> {
    for row in rows {
        let accepts = row.check == super::Check::ReadOnly || row.write(row.reset, row.reset).is_ok();
        if !accepts {
            return Err(ModelError::OwnValue {
                msr: row.msr,
                name: row.name,
                value: row.reset,
            });
        }
    }
    let whole = |msr: u32| rows.iter().find(|row| row.msr == msr).map_or(0, |row| row.reset);
    let value = |msr: u32| whole(msr) & 0xFF;
    let has = |msr: u64| rows.iter().any(|row| u64::from(row.msr) == msr);
    if features.mtrr() {
        let pairs = value(IA32_MTRRCAP);
        if pairs > 16 || !(0..2 * pairs).all(|i| has(u64::from(IA32_MTRR_PHYSBASE0) + i)) {
            return Err(ModelError::Mtrrs(pairs));
        }
        let smrr = whole(IA32_MTRRCAP) & MTRRCAP_SMRR != 0;
        if [IA32_SMRR_PHYSBASE, IA32_SMRR_PHYSMASK]
            .iter()
            .any(|&msr| has(msr.into()) != smrr)
        {
            return Err(ModelError::Smrr(smrr));
        }
    }
    let banks = value(IA32_MCG_CAP);
    if banks > 32 || !(0..banks).all(|i| (0..4).all(|r| has(u64::from(IA32_MC0_CTL) + 4 * i + r))) {
        return Err(ModelError::Banks(banks));
    }
    Ok(())
}

/// `text` with what would upset a terminal replaced.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

impl CpuModel {
    /// This model with features switched: `+avx,-rdrand`. The model lives as long as the program.
    ///
    /// # Errors
    /// One line that says what is unknown, missing or contradictory.
    pub fn with_toggles(&self, toggles: &str) -> Result<&'static CpuModel, ModelError> {
        let mut owned = OwnedModel::from(self);
        owned.toggle(toggles)?;
        owned.build()
    }
}
