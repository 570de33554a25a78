//! A VMM in a guest as whoever debugs it sees it: its VM exits are caught, and its VMCS is shown; and the guest tests of VMX.

use guest_tests::{VMX_LOOP, bare, run};
use minivmm::debug::StopCause;
use minivmm::front::{controls::Controls, monitor};
use minivmm::{Console, End, MachineConfig, Run, SerialTarget, StopReason};
use std::time::Duration;
use x86::model::HASWELL;

fn machine(exits: &str) -> (Run, Console) {
    let config = MachineConfig {
        memory: 64 << 20,
        model: &HASWELL,
        cmdline: Some(exits.into()),
        ..MachineConfig::new(VMX_LOOP)
    };
    let vm = Run::new(&config).unwrap();
    let console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    (vm, console)
}

// covers: monitor/catch-vmexit, monitor/vmcs
#[test]
fn vm_exits_are_caught_by_reason_and_the_vmcs_is_shown() {
    let (mut vm, mut console) = machine("3");
    vm.debugger();
    let say = |vm: &mut Run, line: &str| monitor::run(&mut Controls::new(vm), 0, line);
    assert_eq!(say(&mut vm, "vmcs"), "outside VMX operation\n");
    for (line, says) in [
        ("catch vmexit hlt", "VM exit 12 (HLT) is caught\n"),
        ("catch vmexit 10", "VM exit 10 (CPUID) is caught\n"),
        ("catch vmexit cpuid", "VM exit 10 (CPUID) is caught already\n"),
        ("catch 14", "14 (#PF) is caught\n"),
        ("catch", "caught: 14 (#PF), VM exit 10 (CPUID), VM exit 12 (HLT)\n"),
        (
            "catch vmexit nothing",
            "\"nothing\" is no exit reason: a number as SDM Vol. 3D Appendix C has it, or a part of its name, as `CPUID` or `EPT`\n",
        ),
        (
            "catch vmexit 5000",
            "\"5000\" is no exit reason: a number as SDM Vol. 3D Appendix C has it, or a part of its name, as `CPUID` or `EPT`\n",
        ),
    ] {
        assert_eq!(say(&mut vm, line), says, "{line}");
    }
    let mut rips = Vec::new();
    for _ in 0..2 {
        let end = vm.run(&mut console).unwrap();
        assert!(
            matches!(end, StopReason::Debugger(stop) if stop.why == StopCause::VmExit { reason: 10 }),
            "{end:?}"
        );
        rips.push(vm.cpu_state(0).unwrap().rip);
    }
    assert_eq!(rips[0], rips[1], "at the VMM's first instruction");
    let shown = say(&mut vm, "vmcs exit reason");
    assert!(shown.starts_with("VMX root operation\ncurrent VMCS at 0x"), "{shown}");
    assert!(shown.contains(", launched\n"), "{shown}");
    let line = shown.lines().last().unwrap_or_default();
    assert!(
        line.starts_with("4402H Exit reason ") && line.ends_with(" 0000000a  CPUID"),
        "{shown}"
    );
    let host = say(&mut vm, "vmcs host rip");
    assert!(host.ends_with(&format!("{:016x}\n", rips[0])), "{host}");
    let shown = say(&mut vm, "vmcs vm-exit controls");
    assert!(shown.contains("Host address-space size"), "{shown}");
    assert!(say(&mut vm, "vmcs no such field").contains("`vmcs` alone lists all"));
    say(&mut vm, "catch none");
    let end = vm.run(&mut console).unwrap();
    assert!(matches!(end, StopReason::Ended(End::DebugExit(0))), "{end:?}");
}

// covers: monitor/catch-vmexit, monitor/vmcs
#[test]
fn without_vmx_there_is_nothing_to_catch_or_show() {
    let config = MachineConfig {
        memory: 64 << 20,
        model: HASWELL.with_toggles("-vmx").unwrap(),
        ..MachineConfig::new(VMX_LOOP)
    };
    let mut vm = Run::new(&config).unwrap();
    vm.debugger();
    for line in ["vmcs", "catch vmexit"] {
        let said = monitor::run(&mut Controls::new(&mut vm), 0, line);
        assert_eq!(
            said, "this CPU model shows no VMX: core2 and all later models do, unless `-vmx` takes it away\n",
            "{line}"
        );
    }
}

// covers: vmx/guest
#[test]
fn the_guest_tests_of_vmx_pass_on_every_generation() {
    let mut command = bare::vmx_matrix(&[
        "core2",
        "westmere",
        "haswell",
        "broadwell",
        "skylake-server",
        "icelake-server",
        "alderlake",
        "sapphirerapids",
    ]);
    let outcome = run(&mut command, Duration::from_secs(600)).must_end_with(0);
    assert!(outcome.console.contains(" 0 failed"), "{}", outcome.console);
}

/// A test has passed on a model, or was skipped there.
fn assert_passes(model: &str, said: &str, test: &str, runs: bool) {
    let line = said.lines().find(|line| line.contains(test)).unwrap_or_default();
    assert!(
        line.starts_with("ok ") && line.contains("SKIP") != runs,
        "{model}: {said}"
    );
}

/// What came with later parts is there on those, and not before.
// covers: vmx/pt-guest-physical, vmx/lbr-switch, vmx/user-wait
#[test]
fn later_parts_run_the_guest_tests_of_what_they_have() {
    for (model, trace, others) in [
        ("skylake-server", false, false),
        ("icelake-server", true, false),
        ("alderlake", true, true),
        ("sapphirerapids", true, true),
    ] {
        let mut command = std::process::Command::new(guest_tests::minivmm());
        command.args(["--cpu-model", model, "--cpus", "2", "--max-instructions", "2000000000"]);
        let outcome = run(command.arg("--kernel").arg(bare::vmx()), Duration::from_secs(120));
        let said = &outcome.console;
        for (test, runs) in [
            ("trace_of_the_guest_alone", trace),
            ("architectural_last_branches_of_the_guest_alone", others),
            ("user_wait", others),
        ] {
            assert_passes(model, said, test, runs);
        }
    }
}

/// Those tests of it that need VMX run where the model has it.
// covers: smm/guest
#[test]
fn the_guest_tests_of_smm_pass_in_vmx_operation() {
    for (model, timer) in [("core2", false), ("haswell", true), ("sapphirerapids", true)] {
        let mut command = std::process::Command::new(guest_tests::minivmm());
        command.args(["--cpu-model", model, "--max-instructions", "500000000", "--kernel"]);
        let outcome = run(command.arg(bare::image("smm")), Duration::from_secs(120));
        let said = &outcome.console;
        assert!(!said.contains("not ok"), "{model}: {said}");
        for (vmx, runs) in [
            ("a_vmx_guest_is_interrupted_without_a_vm_exit", true),
            ("vmx_root_operation_is_left_and_entered", true),
            ("the_preemption_timer_counts_in_smm", timer),
        ] {
            assert_passes(model, said, vmx, runs);
        }
    }
}
