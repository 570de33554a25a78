//! The library from outside: the example, and machines beside each other.

#[path = "../examples/branches.rs"]
mod example;

use crate::common;
use common::*;
use iced_x86::code_asm::*;
use minivmm::StopReason;
use minivmm::{Console, End, MachineConfig, Run, SerialTarget};
use x86::model::{CpuModel, SAPPHIRERAPIDS, WESTMERE};
use x86::watch::Flow;

/// mov ecx, 3; top: loop top; call f; f: debug exit
fn branching() -> Vec<u8> {
    guest(|a| {
        let (mut top, mut f) = (a.create_label(), a.create_label());
        a.mov(ecx, 3u32).unwrap();
        a.set_label(&mut top).unwrap();
        a.loop_(top).unwrap();
        a.call(f).unwrap();
        a.set_label(&mut f).unwrap();
        debug_exit(a, 1);
    })
}

// covers: library/branches
#[test]
fn the_example_sees_the_first_branches() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", branching());
    let all = example::first(kernel.clone().into(), 1000).unwrap();
    let flows: Vec<Flow> = all.iter().map(|branch| Flow::from_code(branch.flow).unwrap()).collect();
    let cond = |taken| Flow::Cond { taken };
    assert_eq!(flows[..4], [cond(true), cond(true), cond(false), Flow::Call], "{all:?}");
    let at = all[0].from;
    for (branch, from, to) in [
        (all[0], at, at),
        (all[1], at, at),
        (all[2], at, at + 2),
        (all[3], at + 2, at + 7),
    ] {
        assert_eq!((branch.from, branch.to), (from, to));
    }
    assert!(all.windows(2).all(|pair| pair[0].step < pair[1].step));
    assert_eq!(example::first(kernel.into(), 2).unwrap(), all[..2]);
    let spinning = folder.file("spinner", spinner());
    assert_eq!(example::first(spinning.into(), 1000).unwrap().len(), 1000);
}

// covers: library/last-branches
#[test]
fn the_last_branches_of_a_guest_are_values() {
    let folder = Folder::new();
    let kernel = guest(|a| {
        let (mut top, mut f) = (a.create_label(), a.create_label());
        // IA32_DEBUGCTL.LBR.
        a.mov(ecx, 0x1d9u32).unwrap();
        a.mov(eax, 1u32).unwrap();
        a.xor(edx, edx).unwrap();
        a.wrmsr().unwrap();
        a.mov(ecx, 3u32).unwrap();
        a.set_label(&mut top).unwrap();
        a.loop_(top).unwrap();
        a.call(f).unwrap();
        a.set_label(&mut f).unwrap();
        debug_exit(a, 1);
    });
    for name in ["westmere", "haswell", "alderlake"] {
        let config = MachineConfig {
            memory: 4 << 20,
            model: minivmm::model::find(name).unwrap(),
            ..MachineConfig::new(folder.file("kernel", kernel.clone()))
        };
        let mut vm = Run::new(&config).unwrap();
        assert_eq!(
            vm.last_branches(0),
            vm.last_branches(1).or(Some(Vec::new())),
            "{name}: none yet"
        );
        assert_eq!(vm.last_branches(1), None, "{name}: no such CPU");
        let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
        let end = vm.run(&mut console).unwrap();
        assert!(matches!(end, StopReason::Ended(End::DebugExit(1))), "{end:?}");
        let branches = vm.last_branches(0).unwrap();
        if name == "alderlake" {
            // Its architectural records are switched on elsewhere.
            assert_eq!(branches, []);
            continue;
        }
        let at = branches[2].from;
        let ways: Vec<(u64, u64)> = branches.iter().map(|branch| (branch.from, branch.to)).collect();
        assert_eq!(ways, [(at + 2, at + 7), (at, at), (at, at)], "{name}: the newest first");
        assert!(branches.iter().all(|branch| branch.mispredicted.is_some()), "{name}");
        assert_eq!(branches[0].in_transaction.is_some(), name == "haswell", "{name}");
    }
}

// covers: library/run-step-inspect
#[test]
fn two_machines_run_beside_each_other_and_stop_where_they_are_told() {
    let folder = Folder::new();
    let config = MachineConfig {
        memory: 4 << 20,
        cpus: 2,
        ..MachineConfig::new(folder.file("kernel", hello()))
    };
    let mut machines: Vec<(Run, Console)> = (0..2)
        .map(|_| {
            let vm = Run::new(&config).unwrap();
            let console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
            (vm, console)
        })
        .collect();
    // One goes step by step, the other at once; in between they are in the same state at the same step.
    for _ in 0..5 {
        let (vm, console) = &mut machines[0];
        assert!(vm.step(console).unwrap().is_none());
    }
    let (vm, console) = &mut machines[1];
    assert!(vm.run_for(console, 5).unwrap().is_none());
    assert_eq!(machines[0].0.digest(), machines[1].0.digest());
    for (vm, console) in &mut machines {
        assert!(matches!(vm.run(console).unwrap(), StopReason::Ended(End::PowerOff)));
        assert_eq!(console.take_output(), b"hello\n");
    }
    assert_eq!(machines[0].0.digest(), machines[1].0.digest());
}

/// RDTSC, then leaves 15H and 16H, then IA32_TSC_ADJUST where `adjust`, to the data page.
fn clock_reader(adjust: bool) -> Vec<u8> {
    guest(|a| {
        let data = u64::from(DATA);
        a.rdtsc().unwrap();
        a.mov(dword_ptr(data), eax).unwrap();
        a.mov(dword_ptr(data + 4), edx).unwrap();
        for (leaf, at) in [(0x15, data + 16), (0x16, data + 32)] {
            a.mov(eax, leaf).unwrap();
            a.cpuid().unwrap();
            for (register, at) in [eax, ebx, ecx, edx].into_iter().zip((at..).step_by(4)) {
                a.mov(dword_ptr(at), register).unwrap();
            }
        }
        if adjust {
            a.mov(ecx, 0x3bu32).unwrap();
            a.rdmsr().unwrap();
            a.mov(dword_ptr(data + 8), eax).unwrap();
            a.mov(dword_ptr(data + 12), edx).unwrap();
        }
        debug_exit(a, 0);
    })
}

// covers: tsc/khz, tsc/offset
#[test]
fn a_guest_reads_the_frequency_and_the_start_that_were_asked_for() {
    let folder = Folder::new();
    let look = |model: &'static CpuModel, khz: u32, offset: u64| {
        let kernel = folder.file("kernel", clock_reader(model.features().tsc_adjust()));
        let config = MachineConfig {
            memory: 4 << 20,
            model: model.with_tsc_khz(khz).unwrap(),
            tsc_offset: offset,
            ..MachineConfig::new(kernel)
        };
        let mut vm = Run::new(&config).unwrap();
        let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
        // Nothing but instructions up to the first access to a port.
        assert!(vm.run_for(&mut console, 10).unwrap().is_none());
        assert_eq!(
            vm.virtual_ns(),
            10 * 1_000_000 / u64::from(khz),
            "ten steps are ten ticks"
        );
        assert!(matches!(
            vm.run(&mut console).unwrap(),
            StopReason::Ended(End::DebugExit(0))
        ));
        let mut bytes = [0; 48];
        vm.read_physical(u64::from(DATA), &mut bytes).unwrap();
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let quad = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        (quad(0).wrapping_sub(offset), quad(8), [16, 20, 24, 32].map(word))
    };
    // The second instruction of the guest reads it.
    for offset in [0, 1 << 40, u64::MAX] {
        let (tsc, adjust, [denominator, numerator, crystal, base]) = look(&SAPPHIRERAPIDS, 2_345_600, offset);
        assert!(tsc <= 2, "{tsc}");
        assert_eq!((adjust, base), (0, 2346));
        assert_eq!(
            u64::from(crystal) * u64::from(numerator),
            2_345_600_000 * u64::from(denominator)
        );
    }
    assert!(
        look(&WESTMERE, 1_234_567, 77).0 <= 2,
        "any frequency where no leaf has to say it"
    );
}
