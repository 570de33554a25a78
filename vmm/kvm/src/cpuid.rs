//! The CPU model that a guest on KVM sees: the part's, less what the host's KVM cannot give it.
//!
//! The narrowed model is a [`CpuModel`] like any other, and the units, the machine and the software engine are built of it, so
//! that nothing changes for the guest when it is handed over.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use x86::cpuid::Feature::{self, *};
use x86::cpuid::Features;
use x86::debugctl::DebugCtl;
use x86::model::{CpuModel, CpuidRow, ModelError, OwnedModel, topology};

use crate::error::KvmError;
use crate::host_units::Pmu;
use crate::units::{Backend, Backends, Shown, Unit};

/// What this machine does itself, whatever KVM has: the APIC, the clock, and registers that are exits to us.
const OURS: Features = Features::list(&[
    Apic,
    X2apic,
    TscAdjust,
    InvariantTsc,
    Arat,
    Hypervisor,
    Mtrr,
    Mca,
    Mce,
    EnergyBias,
    SpecCtrl,
    Stibp,
    Ssbd,
    L1dFlush,
    MdClear,
    ArchCapabilities,
    CoreCapabilities,
]);

/// KVM's answer as rows in ascending order.
pub fn rows(cpuid: &CpuId) -> Vec<CpuidRow> {
    let mut rows: Vec<CpuidRow> = cpuid
        .as_slice()
        .iter()
        .map(|entry| CpuidRow {
            leaf: entry.function,
            subleaf: (entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0).then_some(entry.index),
            regs: [entry.eax, entry.ebx, entry.ecx, entry.edx],
        })
        .collect();
    rows.sort_by_key(|row| (row.leaf, row.subleaf));
    rows
}

/// Has KVM's rows say whether a guest's deadlines of the timer come to whoever has the timer.
pub fn set_deadline(rows: &mut [CpuidRow], there: bool) {
    const SHOWN: u32 = 1 << 24;
    if let Some(row) = rows.iter_mut().find(|row| row.leaf == 1) {
        row.regs[2] = row.regs[2] & !SHOWN | if there { SHOWN } else { 0 };
    }
}

/// A feature that the model has and the guest does not get, and why.
pub type Narrowing = (Feature, &'static str);

/// What a guest loses of a model with these units on a KVM with these rows; `None` for the software engine.
pub fn narrowings(model: &CpuModel, supported: Option<&[CpuidRow]>, units: &Backends) -> Vec<Narrowing> {
    let host = supported.map_or(Features::all(), Features::of);
    // The engine and KVM have to find PKRU at the same place of an XSAVE area.
    let own = |leaf: u32, subleaf: u32| -> Option<[u32; 4]> {
        let row = supported?.iter().find(|row| row.leaf == leaf && row.answers(subleaf));
        Some(row.map_or([0; 4], |row| row.regs))
    };
    let elsewhere = own(0xd, 9).is_some_and(|own| own[1] != model.cpuid(0xd, 9)[1]);
    model
        .features()
        .iter()
        .filter_map(|feature| match (feature, units.shown(feature)) {
            (_, Some(Shown::Never)) => Some((feature, "its unit is absent")),
            (_, Some(Shown::Always)) => None,
            (Vmx, _) if supported.is_some() => Some((feature, "virtual machines in the guest are for `--engine soft`")),
            (Waitpkg, _) if supported.is_some() => Some((feature, "IA32_UMWAIT_CONTROL would be KVM's alone")),
            (Pku, _) if elsewhere => Some((feature, "the host keeps PKRU elsewhere in an XSAVE area")),
            _ if OURS.has(feature) || host.has(feature) => None,
            (TscDeadline, _) => Some((feature, "KVM forgets what the guest writes to its register")),
            _ => Some((feature, "KVM does not support it")),
        })
        .collect()
}

/// The model as a guest on this KVM sees it, with the host's frequency of the time-stamp counter; without both, as a guest of
/// the software engine sees it. `pmu`: KVM's counters, if they are to be the guest's.
///
/// # Errors
/// One line: what is left does not make a processor.
pub fn narrow(
    model: &CpuModel,
    supported: Option<&[CpuidRow]>,
    units: &Backends,
    tsc_khz: Option<u32>,
    pmu: Option<&Pmu>,
) -> Result<&'static CpuModel, ModelError> {
    let mut owned = OwnedModel::from(model);
    let toggles: Vec<String> = narrowings(model, supported, units)
        .into_iter()
        .map(|(feature, _)| format!("-{}", feature.flag()))
        .collect();
    if !toggles.is_empty() {
        owned.toggle(&toggles.join(","))?;
    }
    let emulated = |unit: Unit| units[unit] == Backend::Emulated;
    let caps = owned.units_mut();
    for (row, backend) in units.each() {
        if backend != Backend::Emulated {
            (row.remove)(caps);
        }
    }
    // Registers that several units share.
    caps.ds = caps.ds.filter(|_| emulated(Unit::Bts) || emulated(Unit::Pebs));
    caps.debugctl = caps.debugctl.filter(|_| units.has_branches() || emulated(Unit::Pmu));
    if let Some(debugctl) = caps.debugctl.as_mut().filter(|_| !emulated(Unit::Pmu)) {
        // CPUID.0AH says that they are there. SDM Vol. 3B 18.4.7 "Freezing LBR and Performance Counters on PMI".
        let freezes = DebugCtl::new()
            .with_freeze_lbrs_on_pmi(true)
            .with_freeze_perfmon_on_pmi(true);
        debugctl.writable &= !u64::from(freezes);
    }
    // The units that are off say so where CPUID has one bit for two.
    owned.set_unavailable(!emulated(Unit::Bts), units[Unit::Pebs] == Backend::Absent);
    if !emulated(Unit::Pmu)
        && let Some(row) = owned.part_row(0xa, 0).copied()
    {
        let passed = pmu.filter(|_| units[Unit::Pmu] == Backend::Host);
        owned.set_cpuid(CpuidRow {
            leaf: 0xa,
            subleaf: None,
            regs: passed.map_or([0; 4], |pmu| pmu.narrow(row.regs)),
        });
    }
    let model = owned.build()?;
    let Some(tsc_khz) = tsc_khz else {
        return Ok(model);
    };
    // Not every frequency can be said in leaf 15H; one that is off by less than 50 parts in a million can.
    model
        .with_tsc_khz(tsc_khz)
        .or_else(|_| model.with_tsc_khz((tsc_khz + 50) / 100 * 100))
}

/// What KVM_SET_CPUID2 is given for one CPU among so many.
///
/// # Errors
/// More rows than KVM takes.
pub fn entries(model: &CpuModel, place: topology::CpuPosition) -> Result<CpuId, KvmError> {
    let entries: Vec<kvm_cpuid_entry2> = model
        .cpuid
        .iter()
        .map(|row| {
            let [eax, ebx, ecx, edx] = model.cpuid_at(row.leaf, row.subleaf.unwrap_or(0), place);
            kvm_cpuid_entry2 {
                function: row.leaf,
                index: row.subleaf.unwrap_or(0),
                flags: if row.subleaf.is_some() {
                    KVM_CPUID_FLAG_SIGNIFCANT_INDEX
                } else {
                    0
                },
                eax,
                ebx,
                ecx,
                edx,
                padding: [0; 3],
            }
        })
        .collect();
    CpuId::from_entries(&entries).map_err(|_| KvmError::List("KVM_SET_CPUID2"))
}

#[cfg(test)]
#[path = "cpuid_test.rs"]
mod tests;
