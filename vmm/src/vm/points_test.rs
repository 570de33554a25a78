use super::*;

const ALL: Kinds = Kinds {
    single_step: true,
    software: false,
    execution: true,
    data: true,
    register_access: true,
    beside: false,
};

fn debugger(breakpoints: &[u64], watchpoints: &[(u64, u64, WatchKind)]) -> Debugger {
    let mut debugger = Debugger::new();
    breakpoints.iter().for_each(|&address| debugger.add_breakpoint(address));
    for &(first, len, kind) in watchpoints {
        debugger.add_watchpoint(Watchpoint::new(first, len, kind).unwrap());
    }
    debugger
}

// covers: kvm/points
#[test]
fn up_to_four_points_that_the_processor_has_are_its_own() {
    use WatchKind::*;
    for (breakpoints, watchpoints, count, why) in [
        (&[][..], &[][..], Some(0), "nothing to stop for"),
        (&[1, 2, 3, 4], &[], Some(4), "four breakpoints"),
        (&[1, 2, 3, 4, 5], &[], None, "five"),
        (
            &[1],
            &[(8, 8, Write), (16, 4, Access), (2, 2, Write)],
            Some(4),
            "both kinds",
        ),
        (
            &[1, 2],
            &[(8, 8, Write), (16, 4, Access), (2, 2, Write)],
            None,
            "both kinds, five",
        ),
        (
            &[],
            &[(8, 8, Write), (8, 8, Write)],
            Some(1),
            "one that is wanted twice",
        ),
        (&[], &[(8, 8, Write), (8, 8, Access)], Some(2), "two at a place"),
        (&[], &[(4, 8, Write)], None, "not aligned"),
        (&[], &[(8, 3, Write)], None, "of no length that there is"),
        (&[], &[(16, 16, Write)], None, "too long"),
        (&[], &[(8, 8, Read)], None, "reads alone"),
        (
            &[u64::MAX],
            &[(u64::MAX, 1, Access)],
            Some(2),
            "at the end of the address space",
        ),
    ] {
        let points = plan(&debugger(breakpoints, watchpoints), ALL);
        assert_eq!(points.ok().map(|points| points.len()), count, "{why}");
    }
    let mut steps = debugger(&[1], &[]);
    steps.step(Some(0));
    assert!(plan(&steps, ALL).is_err());
    let mut catches = debugger(&[1], &[]);
    catches.catch(14, true);
    assert!(plan(&catches, ALL).is_err());
    catches.suspend(true);
    assert_eq!(plan(&catches, ALL), Ok(Vec::new()));
}

// covers: kvm/points
#[test]
fn what_a_kvm_does_not_deliver_is_the_engines() {
    let data = debugger(&[1], &[(8, 8, WatchKind::Write)]);
    let code = debugger(&[1], &[]);
    for (kinds, serves_code, serves_data, why) in [
        (ALL, true, true, "kvm-intel"),
        (Kinds::default(), false, false, "kvm-amd in QEMU"),
        (Kinds { data: false, ..ALL }, true, false, "no watchpoints"),
        (
            Kinds {
                register_access: false,
                ..ALL
            },
            false,
            false,
            "what the guest does to its own would not be seen",
        ),
        (
            Kinds {
                register_access: false,
                beside: true,
                data: false,
                ..ALL
            },
            true,
            false,
            "one that interprets, and looks at both",
        ),
    ] {
        assert_eq!(plan(&code, kinds).is_ok(), serves_code, "{why}");
        assert_eq!(plan(&data, kinds).is_ok(), serves_data, "{why}");
    }
}

/// A machine of two CPUs, in which nothing runs.
fn machine() -> crate::Run {
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [
        0x1bad_b002,
        flags,
        checksum,
        0x10_0000,
        0x10_0000,
        0,
        0,
        0x10_0020,
        0xf4,
    ];
    let image: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let name = format!(
        "minivmm-points-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    );
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, image).unwrap();
    let vm = crate::Run::new(&crate::MachineConfig {
        memory: 4 << 20,
        cpus: 2,
        ..crate::MachineConfig::new(&path)
    });
    std::fs::remove_file(&path).unwrap();
    vm.unwrap()
}

fn hit(points: u8) -> Hit {
    Hit {
        points,
        guest_steps: false,
    }
}

// covers: kvm/points
#[test]
fn what_several_cpus_meet_at_once_is_told_one_by_one() {
    let mut vm = machine();
    let here = linear(&vm.cpu_state(0).unwrap());
    let watchpoint = Watchpoint::new(0x20_0000, 8, WatchKind::Write).unwrap();
    vm.debugger().add_breakpoint(here);
    vm.debugger().add_watchpoint(watchpoint);
    let points = plan(vm.debugger(), ALL).unwrap();
    let watched = |cpu| {
        let why = debug::StopCause::Watch {
            watchpoint,
            address: 0x20_0000,
            ip: None,
        };
        Some(debug::DebugStop { cpu, why })
    };
    let broken = Some(debug::DebugStop {
        cpu: 0,
        why: debug::StopCause::Breakpoint(here),
    });
    // The accesses have been made; the breakpoint is met again.
    assert_eq!(vm.met(&points, &[(0, hit(1)), (1, hit(2)), (0, hit(3))]), watched(1));
    assert_eq!(vm.passes(&points), None);
    vm.run_only(Some(1));
    assert_eq!(
        vm.waiting_stop(),
        None,
        "one CPU is to run, and none other's stop is reported"
    );
    vm.run_only(None);
    assert_eq!((vm.waiting_stop(), vm.waiting_stop()), (watched(0), None));
    assert_eq!(vm.met(&points, &[(0, hit(1))]), broken);
    assert_eq!(vm.passes(&points), Some(0));
    // Of one that is gone nothing is reported.
    vm.met(&points, &[(0, hit(2)), (1, hit(2))]);
    vm.debugger().remove_watchpoint(&watchpoint);
    assert_eq!(vm.waiting_stop(), None);
    assert_eq!(vm.met(&points, &[]), None);
}

// covers: kvm/points-own
#[test]
fn the_guests_own_breakpoint_comes_before_the_hosts() {
    let mut vm = machine();
    let mut state = vm.cpu_state(0).unwrap();
    let here = linear(&state);
    vm.debugger().add_breakpoint(here);
    let points = plan(vm.debugger(), ALL).unwrap();
    let mut meets = |dr7: u64, rflags: u64| {
        (state.dr[0], state.dr[7], state.rflags, state.observed) = (here, dr7, rflags.into(), None);
        vm.set_cpu_state(0, &state).unwrap();
        vm.met(&points, &[(0, hit(1))]).is_some()
    };
    assert!(meets(0x400, 2), "it has none");
    assert!(!meets(0x401, 2));
    assert!(meets(0x401, 2 | x86::rflags::flag::RF), "its handler has returned");
    assert!(meets(0x1_0401, 2), "its own watches stores");
}

// covers: kvm/points-own
#[test]
fn a_guest_with_breakpoints_of_its_own_is_the_engines_unless_kvm_looks_at_both() {
    let mut vm = machine();
    vm.debugger().add_breakpoint(1);
    for (dr7, kinds, native) in [
        (0x400, ALL, true),
        (0x401, ALL, false),
        (0x480, ALL, false),
        (0x2400, ALL, false),
        (0x401, Kinds { beside: true, ..ALL }, true),
    ] {
        let mut state = vm.cpu_state(1).unwrap();
        state.dr[7] = dr7;
        vm.set_cpu_state(1, &state).unwrap();
        vm.points.kinds = Some(kinds);
        assert_eq!(vm.points().is_ok(), native, "{dr7:x}");
        assert_eq!(vm.how_points_are_served().unwrap().contains("1 of 4"), native);
    }
    vm.debugger().remove_breakpoint(1);
    assert!(vm.points().is_ok(), "there is nothing to stop for");
}
