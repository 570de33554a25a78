//! A debugger's breakpoints and watchpoints in guests on this host's KVM, by the library. Where there is no KVM the tests say so
//! and skip.

use std::process::Command;

use guest_tests::points::Checks;
use guest_tests::{HELLO, SMP, kvm_is_missing};
use minivmm::config::{EngineChoice, KvmDefects};
use minivmm::debug::{DebugStop, StopCause};
use minivmm::kvm::Host;
use minivmm::{Console, MachineConfig, Run, SerialTarget, StopReason};

fn check(test: &str, f: impl FnOnce(&Checks)) {
    if !kvm_is_missing(test) {
        f(&Checks::new(HELLO));
    }
}

// covers: kvm/points, kvm/points-invisible
#[test]
fn a_breakpoint_is_met_by_a_guest_that_runs_in_kvm() {
    check("a breakpoint in KVM", Checks::a_breakpoint_is_met);
}

// covers: kvm/points, kvm/points-invisible
#[test]
fn a_breakpoint_in_a_loop_is_met_once_a_round() {
    check("a breakpoint in a loop in KVM", Checks::a_breakpoint_is_met_each_time);
}

// covers: kvm/points
#[test]
fn watchpoints_are_met() {
    check("watchpoints on KVM", Checks::watchpoints_are_met);
}

// covers: kvm/points
#[test]
fn a_fifth_is_met_by_handover() {
    check("five breakpoints on KVM", Checks::a_fifth_is_met_by_handover);
}

// covers: kvm/points-own
#[test]
fn guest_and_host_both_meet_their_own() {
    check("breakpoints of guest and host on KVM", Checks::both_meet_their_own);
}

// covers: kvm/points-own
#[test]
fn a_guest_steps_itself_beside_the_hosts_breakpoint() {
    check(
        "a guest's steps beside a breakpoint on KVM",
        Checks::the_guest_steps_itself,
    );
}

/// Where the guest of several CPUs has a function or a variable.
fn symbol(name: &str) -> u64 {
    let output = Command::new("nm").arg(SMP).output().expect("binutils has nm");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.split(' ').nth(2) == Some(name));
    let address = line
        .and_then(|line| line.split(' ').next())
        .unwrap_or_else(|| panic!("no {name}: {text}"));
    u64::from_str_radix(address, 16).unwrap()
}

// covers: kvm/points
#[test]
fn each_of_three_cpus_stops_once() {
    if kvm_is_missing("breakpoints of several CPUs in KVM") {
        return;
    }
    let config = MachineConfig {
        engine: EngineChoice::Kvm,
        kvm_defects: KvmDefects::Accept,
        memory: 16 << 20,
        cpus: 3,
        cmdline: Some(b"3".to_vec()),
        ..MachineConfig::new(SMP)
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    let [other, work, after] = ["other_cpu", "work", "reaches"].map(symbol);
    for address in [other, work, after] {
        vm.debugger().add_breakpoint(address);
    }
    let mut stops = Vec::new();
    while stops.last() != Some(&(0, after)) {
        match vm.run(&mut console).unwrap() {
            StopReason::Debugger(DebugStop {
                cpu,
                why: StopCause::Breakpoint(address),
            }) => stops.push((cpu, address)),
            end => panic!("{end:?} after {stops:x?}"),
        }
    }
    stops.sort_unstable();
    let mut expected = [(0, work), (1, work), (2, work), (1, other), (2, other), (0, after)];
    expected.sort_unstable();
    assert_eq!(stops, expected);
    let word = |name: &str| {
        let mut bytes = [0; 4];
        vm.read_physical(symbol(name), &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    };
    assert_eq!((word("locked"), word("turns")), (15_000, 60));
    let native = vm.stats().native.unwrap();
    if Host::open()
        .and_then(|host| host.guest_debug())
        .unwrap()
        .serves_breakpoints()
    {
        assert!(native.watched == 0 && native.exits.debug >= 6, "{native:?}");
    }
}
