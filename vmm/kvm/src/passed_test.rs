use super::*;
use x86::model::{HASWELL, P6};

fn host() -> Pmu {
    Pmu {
        intel: true,
        leaf: [0x0830_0402, 0, 0, 0x603],
        capabilities: Some(0x7c05),
        ..Pmu::default()
    }
}

// covers: host-units/pmu-msrs
#[test]
fn only_what_is_the_hosts_stays_in_kvm() {
    let absent = Backends::default();
    let none = Passed::of(&host(), &absent);
    assert_eq!((none.registers.clone(), none.pmu), (vec![], false));
    let pmu = Backend::Host;
    let counters = Passed::of(&host(), &absent.with(Unit::Pmu, pmu));
    let within = |passed: &Passed, msr: u32| {
        passed
            .registers
            .iter()
            .any(|&(first, count)| (first..first + count).contains(&msr))
    };
    for msr in [
        0xc1, 0xc8, 0x186, 0x18d, 0x309, 0x30b, 0x345, 0x38d, 0x38e, 0x38f, 0x390, 0x391, 0x4c1, 0x4c8,
    ] {
        assert!(within(&counters, msr), "{msr:#x}");
    }
    for msr in [0x10, 0x1d9, 0x1c8, 0x680, 0x600, 0x3f1, 0x570, 0xc0, 0xc9, 0x1a0] {
        assert!(!within(&counters, msr), "{msr:#x}");
    }
    assert_eq!(counters.capabilities, Some(0x2000), "neither records nor PEBS");
    let lbr = Passed::of(&host(), &absent.with(Unit::Pmu, pmu).with(Unit::Lbr, pmu));
    for msr in [0x1d9, 0x1c8, 0x1c9, 0x680, 0x69f, 0x6c0, 0x6df, 0xdc0, 0xddf] {
        assert!(within(&lbr, msr), "{msr:#x}");
    }
    assert!(!within(&lbr, 0x3f1));
    assert_eq!(lbr.capabilities, Some(0x2005));
    let pebs = Passed::of(&host(), &absent.with(Unit::Pmu, pmu).with(Unit::Pebs, pmu));
    assert!(within(&pebs, 0x600) && within(&pebs, 0x3f1) && within(&pebs, 0x3f2) && !within(&pebs, 0x1d9));
    assert_eq!(pebs.perf_capabilities(&HASWELL), Some(0x6c00));
    assert_eq!(
        (pebs.perf_capabilities(&P6), none.perf_capabilities(&HASWELL)),
        (None, None),
        "no such register"
    );
}
