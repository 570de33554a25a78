use super::*;
use crate::tracer::PtError;

fn host(vendor: &str, module: &str, pt_mode: Option<&str>) -> Seen {
    Seen {
        vendor: vendor.into(),
        cpu: "a processor".into(),
        nested: false,
        kernel: "6.1.0".into(),
        kvm: Ok(Kvm {
            modules: vec!["kvm".into(), module.into()],
            pt: host_units::Pt {
                intel: vendor == INTEL,
                kvm_intel: module == "kvm_intel",
                pt_mode: pt_mode.map(str::to_string),
                ept: None,
                perf: Err(PtError::Missing),
            },
            pmu: host_units::Pmu {
                intel: vendor == INTEL,
                ..Default::default()
            },
            speed: Ok("it executes 4000 million instructions per second".into()),
            tsc_khz: 2_000_000,
            guest_debug: Ok(Kinds::default()),
            defects: Ok(vec![]),
            irqchip_lacks: None,
            capabilities: vec![("KVM_CAP_XSAVE2", 4096)],
        }),
    }
}

/// A host whose perf and KVM have all.
fn generous(capabilities: u64, mediated: bool) -> Seen {
    let mut seen = host("GenuineIntel", "kvm_intel", None);
    if let Ok(kvm) = &mut seen.kvm {
        kvm.pt.perf = Ok(());
        kvm.pmu = host_units::Pmu {
            intel: true,
            leaf: [0x0830_0402, 0, 0, 0x603],
            capabilities: Some(capabilities),
            signature: 0x0003_06f2,
            mediated,
        };
    }
    seen
}

// covers: host-units/pt-probe, host-units/pmu-probe
#[test]
fn a_host_that_has_them_offers_its_own() {
    let why = |seen: &Seen, unit: &str| row(&rows(seen), unit).why.clone();
    let all = generous(0x7c05, false);
    assert!(why(&all, "pt").contains("--pt=host is the host's, with --experimental"));
    for unit in ["pmu", "lbr", "pebs"] {
        let why = why(&all, unit);
        assert!(
            why.contains(&format!("--{unit}=host")) && why.contains("--irqchip kvm"),
            "{why}"
        );
        assert!(why.contains("handovers"), "{why}");
    }
    assert!(
        rows(&all)
            .iter()
            .all(|row| row.unit == "dr" || row.unit == "tsc" || row.kvm == Some(Backend::Absent))
    );
    let mediated = generous(0x2000, true);
    assert!(why(&mediated, "lbr").contains("mediated") && why(&mediated, "pmu").contains("--pmu=host"));
    let amd = host("AuthenticAMD", "kvm_amd", None);
    assert!(why(&amd, "pmu").contains("another vendor's") && why(&amd, "lbr").contains("another vendor's"));
    let mut nested = host("GenuineIntel", "kvm_intel", None);
    nested.nested = true;
    assert!(why(&nested, "pebs").contains("nested without them"));
    assert!(text(&nested).contains("itself a guest"));
}

fn row<'a>(rows: &'a [Row], unit: &str) -> &'a Row {
    rows.iter().find(|row| row.unit == unit).unwrap()
}

// covers: kvm/probe
#[test]
fn hosts_of_every_kind_get_their_reasons() {
    for (seen, why) in [
        (host("GenuineIntel", "kvm_intel", None), "no intel_pt"),
        (host("GenuineIntel", "kvm_intel", Some("0")), "no intel_pt"),
        (host("GenuineIntel", "kvm_intel", Some("1")), "pt_mode=0"),
        (host("GenuineIntel", "kvm_pvm", None), "under kvm_intel"),
        (host("AuthenticAMD", "kvm_amd", None), "not Intel's"),
    ] {
        let rows = rows(&seen);
        let pt = row(&rows, "pt");
        assert_eq!(pt.kvm, Some(Backend::Absent));
        assert!(pt.why.contains(why) && pt.why.contains("--pt=emulated"), "{}", pt.why);
        assert_eq!(row(&rows, "dr").kvm, Some(Backend::Host));
        assert!(row(&rows, "pmu").why.contains("RDPMC is #GP"));
        let text = text(&seen);
        assert!(
            text.contains("--engine auto is kvm") && text.contains(&seen.vendor),
            "{text}"
        );
        assert!(
            text.contains("--engine kvm has --irqchip minivmm: --irqchip kvm has"),
            "{text}"
        );
    }
}

// covers: kvm/probe
#[test]
fn a_kvm_that_is_none_or_interprets_leaves_auto_with_the_software_engine() {
    let mut seen = host("GenuineIntel", "kvm_pvm", None);
    seen.nested = true;
    if let Ok(kvm) = &mut seen.kvm {
        kvm.speed = Err(KvmError::Interprets { mips: 2 });
    }
    let said = text(&seen);
    assert!(
        said.contains("--engine auto is soft") && said.contains("2 million"),
        "{said}"
    );
    assert!(said.contains("itself a guest"));
    assert!(said.contains("--irqchip minivmm: KVM interprets here"), "{said}");
    assert!(row(&rows(&seen), "dr").why.contains("interprets"));
    for error in [KvmError::Missing, KvmError::Permission] {
        let why = error.to_string();
        seen.kvm = Err(error);
        let said = text(&seen);
        assert!(said.contains(&why) && said.contains("--engine auto is soft"), "{said}");
        assert!(rows(&seen).iter().all(|row| row.kvm.is_none() && row.why == why));
    }
}

// covers: linux-guest/debug-probe
#[test]
fn what_a_debugger_gets_is_told() {
    let intel = Kinds {
        single_step: true,
        execution: true,
        data: true,
        register_access: true,
        ..Kinds::default()
    };
    let interprets = Kinds {
        execution: true,
        beside: true,
        ..Kinds::default()
    };
    for (found, says) in [
        (
            Ok(intel),
            "watchpoints, MOV DR: four of gdb's breakpoints and watchpoints are the processor's",
        ),
        (
            Ok(interprets),
            "four of gdb's breakpoints are KVM's, watchpoints by handover",
        ),
        (
            Ok(Kinds::default()),
            "KVM delivers nothing: gdb's breakpoints and watchpoints by handover",
        ),
        (Err(KvmError::NoMsr(0x10)), "by handover: KVM_GET_MSRS: KVM has no 0x10"),
    ] {
        let mut seen = host("GenuineIntel", "kvm_intel", None);
        if let Ok(kvm) = &mut seen.kvm {
            kvm.guest_debug = found;
        }
        let said = text(&seen);
        let line = said.lines().find(|line| line.starts_with("debug ")).unwrap();
        assert!(line.contains(says), "{line}");
    }
    assert!(
        json(&host("GenuineIntel", "kvm_intel", None))
            .to_string()
            .contains("\"guest_debug\":{\"Ok\":{")
    );
}

// covers: kvm/probe
#[test]
fn json_says_the_same() {
    let seen = host("AuthenticAMD", "kvm_amd", None);
    let value = json(&seen);
    assert_eq!(value["host"]["vendor"], "AuthenticAMD");
    assert_eq!(value["irqchip"]["irqchip"], "minivmm");
    assert_eq!(value["units"][5]["unit"], "pt");
    assert_eq!(value["units"][5]["kvm"], "absent");
}

// covers: kvm/trial
#[test]
fn a_kvm_that_does_not_do_what_it_accepts_is_shown_as_such() {
    let mut seen = host("GenuineIntel", "kvm_intel", None);
    let said = text(&seen);
    assert!(said.contains("--engine auto is kvm\n"), "{said}");
    assert!(!said.contains("is refused"), "{said}");
    if let Ok(kvm) = &mut seen.kvm {
        kvm.defects = Ok(vec![Defect::TscOffset]);
    }
    let said = text(&seen);
    assert!(said.contains("trial    a guest's RDTSC shows the host's"), "{said}");
    assert!(said.contains("--engine auto is soft\n"), "{said}");
    assert!(
        said.contains("--engine kvm is refused, unless with --kvm-defects accept\n"),
        "{said}"
    );
    assert!(row(&rows(&seen), "tsc").why.contains("whatever the offset"));
    assert!(json(&seen).to_string().contains("whatever the offset"));
}
