use super::*;
use x86::model::{HASWELL, SAPPHIRERAPIDS};

fn pt() -> Pt {
    Pt {
        intel: true,
        kvm_intel: true,
        pt_mode: None,
        ept: Some("Y".into()),
        perf: Ok(()),
    }
}

// covers: host-units/pt-probe
#[test]
fn a_host_gives_its_intel_pt_or_says_why_not() {
    assert_eq!(pt().lacks(), None);
    let system = Some("0".to_string());
    assert_eq!(
        Pt {
            pt_mode: system,
            ..pt()
        }
        .lacks(),
        None,
        "pt_mode=0 is what it takes"
    );
    for (host, says) in [
        (Pt { intel: false, ..pt() }, "not Intel's"),
        (
            Pt {
                kvm_intel: false,
                ..pt()
            },
            "under kvm_intel",
        ),
        (
            Pt {
                pt_mode: Some("1".into()),
                ..pt()
            },
            "pt_mode=0",
        ),
        (
            Pt {
                ept: Some("N".into()),
                ..pt()
            },
            "no EPT",
        ),
        (
            Pt {
                perf: Err(PtError::Missing),
                ..pt()
            },
            "no intel_pt",
        ),
    ] {
        let why = host.lacks().unwrap();
        assert!(why.contains(says) && why.lines().count() == 1, "{why}");
    }
}

/// A Haswell whose KVM has counters, and a Sapphire Rapids.
fn pmu() -> Pmu {
    Pmu {
        intel: true,
        leaf: [0x0830_0402, 0, 0, 0x603],
        capabilities: Some(0x2004),
        signature: HASWELL.cpuid(1, 0)[0],
        mediated: false,
    }
}

// covers: host-units/pmu-probe
#[test]
fn kvm_gives_counters_pebs_and_branch_records_or_says_why_not() {
    let host = pmu();
    assert_eq!(
        (host.lacks(), host.lacks_lbr(), host.differs(&HASWELL)),
        (None, None, None)
    );
    assert!(host.lacks_pebs().unwrap().contains("no PEBS on this processor"));
    assert!(host.differs(&SAPPHIRERAPIDS).unwrap().contains("family and model"));
    let icelake = Pmu {
        capabilities: Some(0x7c05 & !0x3f),
        ..pmu()
    };
    assert_eq!(icelake.lacks_pebs(), None);
    assert!(
        icelake.lacks_lbr().unwrap().contains("last-branch records"),
        "arch LBR only"
    );
    let mediated = Pmu {
        capabilities: Some(0x2000),
        mediated: true,
        ..pmu()
    };
    assert_eq!(mediated.lacks(), None);
    assert!(mediated.lacks_lbr().unwrap().contains("mediated"));
    assert!(mediated.lacks_pebs().unwrap().contains("mediated"));
    let none = Pmu {
        leaf: [0; 4],
        capabilities: None,
        ..pmu()
    };
    for why in [none.lacks(), none.lacks_lbr(), none.lacks_pebs()] {
        assert!(why.unwrap().contains("enable_pmu=N"));
    }
    let amd = Pmu { intel: false, ..none };
    assert!(amd.lacks_lbr().unwrap().contains("another vendor's"));
}

// covers: host-units/pmu-cpuid
#[test]
fn a_guest_has_the_counters_that_both_have() {
    let host = pmu();
    // Version 4 with eight counters and seven events; the host version 2, four counters, eight events.
    let narrowed = host.narrow([0x0730_0804, 0x10, 0, 0x603 | 1 << 15]);
    assert_eq!(narrowed, [0x0730_0402, 0x10, 0, 0x603]);
    // An event that the host lacks, and one beyond its vector.
    let few = Pmu {
        leaf: [0x0630_0402, 0x21, 0, 0x602],
        ..pmu()
    };
    assert_eq!(few.narrow([0x0830_0404, 2, 0, 0x604]), [0x0630_0402, 0x23, 0, 0x602]);
    assert_eq!(Pmu::default().narrow([0x0830_0404, 0, 0, 0x603]), [0; 4]);
    assert_eq!(host.guest_capabilities(true, false), 0x2004);
    assert_eq!(host.guest_capabilities(false, true), 0x2000);
    let all = Pmu {
        capabilities: Some(!0),
        ..pmu()
    };
    assert_eq!(
        all.guest_capabilities(true, true),
        0x3f | 0xf << 8 | 0x40 | 0x80 | 0x4000 | 0x2000
    );
}
