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
mod tests {
    use super::*;
    use x86::model::{HASWELL, SAPPHIRERAPIDS};
    use x86::msr::IA32_MISC_ENABLE;

    /// A host that has everything but these.
    fn host(model: &CpuModel, without: &[Feature]) -> Vec<CpuidRow> {
        let mut rows = model.silicon.to_vec();
        for feature in without {
            let place = feature.place();
            for row in &mut rows {
                if row.leaf == place.leaf && row.answers(place.subleaf) {
                    row.regs[place.register as usize] &= !(1 << place.bit);
                }
            }
        }
        rows
    }

    // covers: cpu/cpuid-narrowed, kvm/deadline
    #[test]
    fn a_guest_gets_what_model_host_and_units_have() {
        let absent = Backends::default();
        let model = narrow(&HASWELL, Some(&host(&HASWELL, &[Avx2])), &absent, Some(2_300_000), None).unwrap();
        let features = model.features();
        assert!(features.avx() && !features.avx2());
        assert!(features.x2apic() && features.tsc_deadline(), "the APIC is ours");
        let mut rows = host(&HASWELL, &[]);
        set_deadline(&mut rows, false);
        let lost = narrowings(&HASWELL, Some(&rows), &absent);
        assert!(
            lost.iter().any(|(f, why)| *f == TscDeadline && why.contains("forgets")),
            "{lost:?}"
        );
        set_deadline(&mut rows, true);
        assert!(
            narrowings(&HASWELL, Some(&rows), &absent)
                .iter()
                .all(|(f, _)| *f != TscDeadline)
        );
        assert!(!features.ds() && !features.pdcm());
        assert_eq!(model.units.pmu.is_some() as u32 + model.cpuid(0xa, 0)[0], 0);
        assert_eq!((model.units.debugctl, model.units.lbr), (None, None));
        assert_eq!(model.tsc_khz, 2_300_000);

        // Freezes go with the counters.
        for (pmu, writable) in [(Backend::Absent, 0), (Backend::Emulated, 3)] {
            let lbr = Backend::Emulated;
            let units = absent.with(Unit::Lbr, lbr).with(Unit::Pmu, pmu);
            let model = narrow(&HASWELL, None, &units, None, None).unwrap();
            let debugctl = model.units.debugctl.unwrap();
            assert_eq!((debugctl.writable >> 11 & 3, debugctl.writable & 3), (writable, 3));
        }

        let units = absent
            .with(Unit::Pt, Backend::Emulated)
            .with(Unit::Lbr, Backend::Emulated)
            .with(Unit::Pmu, Backend::Emulated);
        let rows = host(&SAPPHIRERAPIDS, &[IntelPt, Pdcm, ArchLbr]);
        let model = narrow(&SAPPHIRERAPIDS, Some(&rows), &units, Some(2_300_000), None).unwrap();
        let features = model.features();
        assert!(
            features.intel_pt() && features.pdcm() && features.arch_lbr(),
            "units need nothing of the host"
        );
        assert!(model.units.pt.is_some() && model.units.pmu.is_some() && model.units.ds.is_none());
        assert!(!features.rdt_m() && !features.ds());
    }

    // covers: host-units/pmu-cpuid
    #[test]
    fn a_guest_with_kvms_counters_has_what_kvm_has_of_them() {
        let absent = Backends::default();
        let pmu = Backend::Host;
        let kvm = Pmu {
            intel: true,
            leaf: [0x0830_0402, 0, 0, 0x8603],
            ..Pmu::default()
        };
        let of = |units: Backends, rows: &[CpuidRow]| {
            narrow(&HASWELL, Some(rows), &units, Some(2_300_000), Some(&kvm)).unwrap()
        };
        let rows = host(&HASWELL, &[]);
        let counters = of(absent.with(Unit::Pmu, pmu), &rows);
        assert_eq!(counters.cpuid(0xa, 0)[0], HASWELL.cpuid(0xa, 0)[0] & !0xffff | 0x402);
        assert!(counters.features().pdcm() && !counters.features().ds());
        assert_eq!((counters.units.pmu, counters.units.lbr), (None, None), "none of ours");
        let lbr = of(absent.with(Unit::Pmu, pmu).with(Unit::Lbr, pmu), &rows);
        assert_eq!((lbr.units.lbr, lbr.units.debugctl), (None, None));
        // PEBS takes a debug store of KVM's, and branch trace store is none of it.
        let pebs = absent.with(Unit::Pmu, pmu).with(Unit::Pebs, pmu);
        let misc_enable = |model: &CpuModel| model.msr(IA32_MISC_ENABLE).map(|row| row.reset >> 11 & 3);
        let model = of(pebs, &rows);
        assert!(model.features().ds() && model.features().dtes64());
        assert_eq!(misc_enable(model), Some(1), "bit 11: no branch trace store");
        assert!(!of(pebs, &host(&HASWELL, &[Ds, Dtes64])).features().ds());
        let bts = absent.with(Unit::Bts, Backend::Emulated);
        assert_eq!(misc_enable(of(bts, &rows)), Some(2), "bit 12: no PEBS");
        assert_eq!(of(absent, &rows).cpuid(0xa, 0), [0; 4]);
    }

    // covers: cpu/cpuid-narrowed
    #[test]
    fn every_narrowing_has_its_reason() {
        let lost = narrowings(
            &SAPPHIRERAPIDS,
            Some(&host(&SAPPHIRERAPIDS, &[Sha])),
            &Backends::default(),
        );
        let why = |feature| lost.iter().find(|(f, _)| *f == feature).map(|(_, why)| *why);
        assert_eq!(why(Sha), Some("KVM does not support it"));
        assert_eq!(why(IntelPt), Some("its unit is absent"));
        assert_eq!(why(Avx2), None);
        let mut rows = host(&SAPPHIRERAPIDS, &[]);
        for row in rows.iter_mut().filter(|row| row.leaf == 0xd && row.subleaf == Some(9)) {
            row.regs[1] = 2432;
        }
        let lost = narrowings(&SAPPHIRERAPIDS, Some(&rows), &Backends::default());
        assert!(lost.iter().any(|(f, why)| *f == Pku && why.contains("XSAVE")));
    }

    // covers: units/resolution
    #[test]
    fn the_software_engine_loses_only_units_that_are_off() {
        let units = Backends::default()
            .with(Unit::Lbr, Backend::Emulated)
            .with(Unit::Bts, Backend::Emulated)
            .with(Unit::Pebs, Backend::Emulated)
            .with(Unit::Pmu, Backend::Emulated)
            .with(Unit::Rdt, Backend::Emulated);
        let model = narrow(&SAPPHIRERAPIDS, None, &units, None, None).unwrap();
        let lost = SAPPHIRERAPIDS.features().minus(model.features());
        assert_eq!(lost.iter().collect::<Vec<_>>(), [IntelPt]);
        assert!(model.units.pt.is_none() && model.units.pmu.is_some());
        assert_eq!(model.tsc_khz, SAPPHIRERAPIDS.tsc_khz);
    }

    // covers: cpu/cpuid-narrowed
    #[test]
    fn each_cpu_has_its_own_ids() {
        let place = topology::CpuPosition { cpu: 3, cpus: 4 };
        let cpuid = entries(&HASWELL, place).unwrap();
        let one = cpuid.as_slice().iter().find(|e| e.function == 1).unwrap();
        assert_eq!(one.ebx >> 24, 3);
        assert_eq!(cpuid.as_slice().len(), HASWELL.cpuid.len());
    }
}
