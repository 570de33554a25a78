//! A machine that a debugger stops again and again does what it does without one.

use guest_tests::SMP;
use guest_tests::bare::image;
use minivmm::debug::{StopCause, WatchKind, Watchpoint};
use minivmm::{Console, End, MachineConfig, Run, StopReason};
use std::collections::BTreeMap;

/// A run of a guest to its end: what it said, where it ended, and everything about that.
#[derive(Debug, PartialEq)]
struct Ran {
    console: String,
    steps: u64,
    digest: u64,
    end: String,
}

fn machine(config: &MachineConfig) -> (Run, Console) {
    let vm = Run::new(config).unwrap();
    let console = Console::open(&config.serial, &[], vm.line()).unwrap();
    (vm, console)
}

fn finish(vm: Run, mut console: Console, end: &End) -> Ran {
    Ran {
        console: String::from_utf8_lossy(&console.take_output()).into_owned(),
        steps: vm.steps(),
        digest: vm.digest(),
        end: format!("{end:?}"),
    }
}

/// Runs to the end; `look` is shown each stop, and whether the machine is to make single steps is its answer.
fn run(config: &MachineConfig, set: impl FnOnce(&mut Run), mut look: impl FnMut(&mut Run, StopCause)) -> Ran {
    let (mut vm, mut console) = machine(config);
    set(&mut vm);
    loop {
        match vm.run(&mut console).unwrap() {
            StopReason::Debugger(stop) => look(&mut vm, stop.why),
            reason => return finish(vm, console, &reason.end().expect("an end")),
        }
    }
}

/// Where a CPU of the guest is every so many steps: instructions that are executed.
fn places(config: &MachineConfig, every: u64) -> Vec<u64> {
    let (mut vm, mut console) = machine(config);
    let mut places = Vec::new();
    while vm.run_for(&mut console, every).unwrap().is_none() {
        let cpu = vm.current_cpu();
        places.push(vm.cpu_state(cpu).unwrap().rip);
    }
    places.sort_unstable();
    places.dedup();
    places
}

/// The guest that checks its own breakpoints, under breakpoints and watchpoints of ours wherever it goes.
// covers: debug/invisible
#[test]
fn a_guest_s_own_breakpoints_work_under_ours() {
    for (guest, model) in [("dr", "westmere"), ("dr", "sapphirerapids"), ("debugctl", "haswell")] {
        let config = MachineConfig {
            model: minivmm::model::find(model).unwrap(),
            memory: 64 << 20,
            ..MachineConfig::new(image(guest))
        };
        let plain = run(&config, |_| {}, |_, why| panic!("{why:?}"));
        assert!(!plain.console.contains("\nnot ok"), "{}", plain.console);
        let places = places(&config, 97);
        assert!(places.len() > 50, "{guest}: {places:x?}");
        let mut met = BTreeMap::new();
        let stopped = run(
            &config,
            |vm| {
                let stack = vm.cpu_state(0).unwrap().gpr[4];
                for &place in &places {
                    vm.debugger().add_breakpoint(place);
                }
                let watchpoint = Watchpoint::new(stack & !0xfff, 24, WatchKind::Access).unwrap();
                vm.debugger().add_watchpoint(watchpoint);
            },
            |vm, why| {
                let StopCause::Breakpoint(address) = why else { return };
                let times = met.entry(address).or_insert(0);
                *times += 1;
                // What is met all the time is known by now.
                if *times == 100 {
                    vm.debugger().remove_breakpoint(address);
                }
            },
        );
        assert_eq!(stopped, plain, "{guest} on {model}");
        assert!(
            met.len() * 2 > places.len(),
            "{guest}: {} of {} were met",
            met.len(),
            places.len()
        );
    }
}

// covers: debug/smp
#[test]
fn cpus_take_their_turns_as_without_a_debugger() {
    let config = MachineConfig {
        cmdline: Some(b"3".to_vec()),
        cpus: 3,
        memory: 64 << 20,
        ..MachineConfig::new(SMP)
    };
    let plain = run(&config, |_| {}, |_, why| panic!("{why:?}"));
    let places = places(&config, 503);
    let (mut met, mut steps, mut cpus) = (BTreeMap::new(), 0, [0; 3]);
    let stopped = run(
        &config,
        |vm| {
            for &place in &places {
                vm.debugger().add_breakpoint(place);
            }
        },
        |vm, why| match why {
            StopCause::Breakpoint(address) => {
                let times = met.entry(address).or_insert(0);
                *times += 1;
                cpus[vm.current_cpu()] += 1;
                if *times == 30 {
                    vm.debugger().remove_breakpoint(address);
                }
                // Some steps of this CPU, and of another one now and then, as a debugger's user makes them.
                let cpu = (vm.current_cpu() + usize::from(*times % 10 == 9)) % 3;
                vm.debugger().step(Some(cpu));
                steps = 0;
            }
            StopCause::Step => {
                steps += 1;
                if steps == 5 {
                    vm.debugger().step(None);
                }
            }
            why => panic!("{why:?}"),
        },
    );
    assert_eq!(stopped, plain);
    assert!(cpus.iter().all(|count| *count > 0), "{cpus:?}");
}

/// The others miss what happens meanwhile.
// covers: debug/smp
#[test]
fn one_cpu_runs_alone_while_the_others_stand_still() {
    let config = MachineConfig {
        cmdline: Some(b"3".to_vec()),
        cpus: 3,
        memory: 64 << 20,
        ..MachineConfig::new(SMP)
    };
    let (mut vm, mut console) = machine(&config);
    let steps = |vm: &Run| [0, 1, 2].map(|cpu| vm.cpu_state(cpu).unwrap().steps);
    while steps(&vm).contains(&0) {
        assert!(vm.run_for(&mut console, 100).unwrap().is_none());
    }
    let before = steps(&vm);
    vm.run_only(Some(0));
    assert!(vm.run_for(&mut console, 30_000).unwrap().is_none());
    assert_eq!(steps(&vm), [before[0] + 30_000, before[1], before[2]]);
    vm.run_only(None);
    vm.debugger().step(Some(1));
    let before = steps(&vm)[1];
    match vm.run(&mut console).unwrap() {
        StopReason::Debugger(stop) => assert_eq!((stop.cpu, stop.why), (1, StopCause::Step)),
        end => panic!("{end:?}"),
    }
    assert_eq!(steps(&vm)[1], before + 1);
}
