//! The library from outside: the example, and machines beside each other.

mod common;
#[path = "../examples/branches.rs"]
mod example;

use common::*;
use iced_x86::code_asm::*;
use minivmm::{Console, End, MachineConfig, SerialTarget, Vm};
use x86::seam::Flow;

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

// covers: 3/library-branches
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

// covers: 3/library-run-step-inspect
#[test]
fn two_machines_run_beside_each_other_and_stop_where_they_are_told() {
    let folder = Folder::new();
    let config = MachineConfig {
        memory: 4 << 20,
        cpus: 2,
        ..MachineConfig::new(folder.file("kernel", hello()))
    };
    let mut machines: Vec<(Vm, Console)> = (0..2)
        .map(|_| {
            let vm = Vm::new(&config).unwrap();
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
        assert!(matches!(vm.run(console).unwrap(), End::PowerOff));
        assert_eq!(console.take_output(), b"hello\n");
    }
    assert_eq!(machines[0].0.digest(), machines[1].0.digest());
}
