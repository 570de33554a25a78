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
    assert!(
        !features.vmx() && model.msr(0x480).is_none(),
        "of the software engine alone"
    );
    assert!(narrow(&HASWELL, None, &absent, None, None).unwrap().features().vmx());
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
    let of =
        |units: Backends, rows: &[CpuidRow]| narrow(&HASWELL, Some(rows), &units, Some(2_300_000), Some(&kvm)).unwrap();
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
    let place = topology::Topology::of(4).at(3);
    let cpuid = entries(&HASWELL, place).unwrap();
    let one = cpuid.as_slice().iter().find(|e| e.function == 1).unwrap();
    assert_eq!(one.ebx >> 24, 3);
    assert_eq!(cpuid.as_slice().len(), HASWELL.cpuid.len());
}
