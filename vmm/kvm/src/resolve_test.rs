use super::*;
use crate::host_units::Pt;
use crate::tracer::PtError;

fn host() -> Traits {
    Traits {
        pt: Pt {
            intel: true,
            kvm_intel: true,
            pt_mode: None,
            ept: None,
            perf: Err(PtError::Missing),
        },
        pmu: Pmu {
            intel: true,
            ..Default::default()
        },
    }
}

/// A host whose perf and KVM have all.
fn generous() -> Traits {
    let mut host = host();
    host.pt.perf = Ok(());
    host.pmu = Pmu {
        intel: true,
        leaf: [0x0830_0402, 0, 0, 0x603],
        capabilities: Some(0x7c05),
        signature: 0x0003_06f2,
        mediated: false,
    };
    host
}

fn of(host: &Traits, requests: &[(Unit, UnitRequest)]) -> Result<Backends, UnitError> {
    let mut all = UnitRequests::default();
    for &(unit, request) in requests {
        all[unit] = Some(request);
    }
    on_kvm(host, &all)
}

// covers: units/resolution, host-units/pmu-probe
#[test]
fn requests_for_the_hosts_units_go_together_or_are_refused() {
    use UnitRequest::{Emulated, Host, Off};
    let host = generous();
    for (request, units) in [
        (Unit::Lbr, vec![Unit::Lbr, Unit::Pmu]),
        (Unit::Pebs, vec![Unit::Pebs, Unit::Pmu]),
        (Unit::Pt, vec![Unit::Pt]),
    ] {
        let backends = of(&host, &[(request, Host)]).unwrap();
        for unit in [Unit::Lbr, Unit::Bts, Unit::Pebs, Unit::Pmu, Unit::Pt, Unit::Rdt] {
            let there = backends[unit] == Backend::Host;
            assert_eq!(there, units.contains(&unit), "{unit:?} with {request:?}");
        }
    }
    for (requests, says) in [
        (
            vec![(Unit::Lbr, Host), (Unit::Pmu, Off)],
            "--lbr=host: KVM has it with its counters",
        ),
        (
            vec![(Unit::Pebs, Host), (Unit::Pmu, Emulated)],
            "--pebs=host: KVM has it with",
        ),
        (
            vec![(Unit::Pmu, Host), (Unit::Pt, Emulated)],
            "--pmu=host and --pt=emulated: the interrupts",
        ),
        (
            vec![(Unit::Pmu, Host), (Unit::Pt, Host)],
            "--pmu=host and --pt=host: the interrupts",
        ),
        (vec![(Unit::Bts, Host)], "--bts=host: no KVM virtualizes it"),
    ] {
        let error = of(&host, &requests).unwrap_err().to_string();
        assert!(error.contains(says) && error.lines().count() == 1, "{error}");
    }
}

// covers: units/resolution
#[test]
fn a_request_is_met_or_refused_with_the_reason() {
    use UnitRequest::{Emulated, Host, Off};
    let host = host();
    let none = of(&host, &[]).unwrap();
    for (row, backend) in none.each() {
        let own = ["dr", "tsc"].contains(&row.name);
        assert_eq!(
            backend,
            if own { Backend::Host } else { Backend::Absent },
            "{}",
            row.name
        );
    }
    let requests = [
        (Unit::Pt, Emulated),
        (Unit::Lbr, Emulated),
        (Unit::Bts, Off),
        (Unit::Pebs, Emulated),
    ];
    let backends = of(&host, &requests).unwrap();
    for (unit, backend) in [
        (Unit::Pt, Backend::Emulated),
        (Unit::Lbr, Backend::Emulated),
        (Unit::Bts, Backend::Absent),
        (Unit::Pebs, Backend::Emulated),
        // Its records are of counters that overflow.
        (Unit::Pmu, Backend::Emulated),
    ] {
        assert_eq!(backends[unit], backend, "{unit:?}");
    }
    for (requests, says) in [
        (vec![(Unit::Pt, Host)], "--pt=host: perf has no intel_pt"),
        (
            vec![(Unit::Pebs, Emulated), (Unit::Pmu, Off)],
            "--pebs=emulated: samples are of counters, so --pmu=emulated is needed too",
        ),
        (vec![(Unit::Dr, Off)], "--dr=off: every processor"),
        (
            vec![(Unit::Tsc, Emulated)],
            "--tsc=emulated: RDTSC does not come out of KVM",
        ),
    ] {
        let error = of(&host, &requests).unwrap_err().to_string();
        assert!(error.contains(says) && error.lines().count() == 1, "{error}");
    }
}

// covers: units/resolution
#[test]
fn the_software_engine_has_units_of_ours_alone() {
    let requests = |unit, request| UnitRequests::default().with(unit, Some(request));
    let backends = in_software(&requests(Unit::Rdt, UnitRequest::Off)).unwrap();
    assert_eq!(
        (backends[Unit::Rdt], backends[Unit::Lbr]),
        (Backend::Absent, Backend::Emulated)
    );
    for (unit, request, says) in [
        (
            Unit::Pt,
            UnitRequest::Host,
            "--pt=host: the software engine has no unit of the host's",
        ),
        (Unit::Tsc, UnitRequest::Off, "--tsc=off: every processor has it"),
    ] {
        let error = in_software(&requests(unit, request)).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
