use super::*;

const NATIVE: fn() -> Result<String, KvmError> = || Ok("fast".into());

// covers: kvm/irqchip-choice
#[test]
fn this_programs_are_taken_unless_kvms_are_asked_for() {
    let base = Wanted::default();
    let none = Backends::default();
    let emulated = none.with(Unit::Pt, Backend::Emulated);
    let gdb = Wanted { debugged: true, ..base };
    let control = Wanted {
        monitored: true,
        ..base
    };
    let slow: fn() -> Result<String, KvmError> = || Err(KvmError::Interprets { mips: 3 });
    for (config, units, lacks, speed, irqchip, why) in [
        (
            &base,
            none,
            None,
            NATIVE,
            Irqchip::Minivmm,
            "--irqchip kvm has KVM's own",
        ),
        (&base, emulated, None, NATIVE, Irqchip::Minivmm, "--pt=emulated"),
        (&gdb, none, None, NATIVE, Irqchip::Minivmm, "--gdb"),
        (&control, none, None, NATIVE, Irqchip::Minivmm, "--control"),
        (&base, none, None, slow, Irqchip::Minivmm, "KVM interprets here"),
        (
            &base,
            none,
            Some("KVM_CAP_PIT2"),
            NATIVE,
            Irqchip::Minivmm,
            "KVM_CAP_PIT2",
        ),
    ] {
        let choice = choose(config, &units, lacks, speed).unwrap();
        assert_eq!(choice.irqchip, irqchip, "{choice:?}");
        assert!(choice.why.contains(why), "{choice:?}");
        // This program's can always be had.
        let asked = Wanted {
            irqchip: Some(Irqchip::Minivmm),
            ..*config
        };
        let choice = choose(&asked, &units, lacks, || panic!("nothing is measured")).unwrap();
        assert_eq!(choice.irqchip, Irqchip::Minivmm);
    }
}

// covers: host-units/pmu-irqchip
#[test]
fn kvms_counters_imply_kvms_controllers_and_a_hosts_trace_this_programs() {
    let base = Wanted::default();
    let host = Backend::Host;
    let none = Backends::default();
    let counters = none.with(Unit::Pmu, host);
    for irqchip in [None, Some(Irqchip::Kvm)] {
        let config = Wanted { irqchip, ..base };
        let choice = choose(&config, &counters, None, || panic!("nothing is measured")).unwrap();
        assert_eq!(choice.irqchip, Irqchip::Kvm);
        assert!(choice.why.contains("--pmu=host"), "{choice:?}");
    }
    let ours = Wanted {
        irqchip: Some(Irqchip::Minivmm),
        ..base
    };
    let gdb = Wanted { debugged: true, ..base };
    for (config, lacks, says) in [
        (&ours, None, "leave --irqchip minivmm out"),
        (&gdb, None, "--gdb excludes"),
        (&base, Some("KVM_CAP_PIT2"), "no KVM_CAP_PIT2"),
    ] {
        let error = choose(config, &counters, lacks, NATIVE).unwrap_err().to_string();
        assert!(error.contains(says) && error.lines().count() == 1, "{error}");
    }
    let trace = none.with(Unit::Pt, host);
    let choice = choose(&base, &trace, None, NATIVE).unwrap();
    assert_eq!(
        (choice.irqchip, choice.why.contains("--pt=host")),
        (Irqchip::Minivmm, true)
    );
    let kvms = Wanted {
        irqchip: Some(Irqchip::Kvm),
        ..base
    };
    assert!(
        choose(&kvms, &trace, None, NATIVE)
            .unwrap_err()
            .to_string()
            .contains("--pt=host has its interrupts")
    );
}

// covers: kvm/irqchip-choice
#[test]
fn kvms_are_taken_where_asked_for_or_refused_with_the_reason() {
    let base = Wanted {
        irqchip: Some(Irqchip::Kvm),
        ..Wanted::default()
    };
    let none = Backends::default();
    let unmeasured = || panic!("nothing is measured");
    let choice = choose(&base, &none, None, unmeasured).unwrap();
    assert_eq!(choice.irqchip, Irqchip::Kvm);
    let lbr = none.with(Unit::Lbr, Backend::Emulated);
    let gdb = Wanted { debugged: true, ..base };
    for (config, units, lacks, says) in [
        (
            &base,
            lbr,
            None,
            "--lbr=emulated has the guest run in the software engine",
        ),
        (&gdb, none, None, "--gdb has the guest run"),
        (&base, none, Some("KVM_CAP_IRQCHIP"), "has no KVM_CAP_IRQCHIP"),
    ] {
        let error = choose(config, &units, lacks, unmeasured).unwrap_err().to_string();
        assert!(
            error.contains(says) && error.ends_with("use --irqchip minivmm"),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1);
    }
    let error = check_soft(&base).unwrap_err().to_string();
    assert!(error.contains("--engine kvm"), "{error}");
    check_soft(&Wanted::default()).unwrap();
}
