//! Going back in runs of several CPUs and of Linux, with disks and with units on.

use guest_tests::{SMP, linux};
use minivmm::StopReason;
use minivmm::{Console, End, MachineConfig, Run, Snapshot};
use minivmm::{config::DiskConfig, machine::disk::DiskMode};
use x86::model::SKYLAKE_SERVER;

fn open(config: &MachineConfig) -> (Run, Console) {
    let vm = Run::new(config).unwrap();
    let console = Console::open(&config.serial, &[], vm.line()).unwrap();
    (vm, console)
}

/// Numbers that look random.
fn random(seed: u64, below: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % below
    })
}

/// A Linux that boots and powers off.
fn booting(cpus: u8) -> MachineConfig {
    MachineConfig {
        cpus,
        memory: 256 << 20,
        initrd: vec![linux().initrd.clone().into()],
        cmdline: Some(b"console=ttyS0 panic=-1 minivmm.script=nothing".to_vec()),
        model: &SKYLAKE_SERVER,
        ..MachineConfig::new(&linux().kernel)
    }
}

/// Says where two states differ, but for how far the counters are brought up to date, which is done whenever a run stops.
#[track_caller]
fn same(what: &str, mut a: Snapshot, mut b: Snapshot) {
    for state in [&mut a, &mut b] {
        state.machine.units.clear();
    }
    if a == b {
        return;
    }
    let differ = |a: String, b: String| {
        let (a, b): (Vec<&str>, Vec<&str>) = (a.lines().collect(), b.lines().collect());
        let lines = (0..a.len().min(b.len())).filter(|&line| a[line] != b[line]);
        let show = |line: usize| format!("{} / {}\n", a[line.saturating_sub(2)..=line].concat(), b[line].trim());
        lines.take(6).map(show).collect::<String>()
    };
    let cpus = differ(format!("{:#x?}", a.soft.cpus), format!("{:#x?}", b.soft.cpus));
    let machine = differ(format!("{:#x?}", a.machine), format!("{:#x?}", b.machine));
    let pages = a.pages.iter().chain(b.pages.iter()).map(|(gpa, _)| gpa);
    let pages: Vec<u64> = pages
        .filter(|gpa| a.pages.get(*gpa) != b.pages.get(*gpa))
        .take(8)
        .collect();
    panic!(
        "{what}: steps {} / {}\n{cpus}{machine}pages {pages:x?}",
        a.soft.steps, b.soft.steps
    );
}

fn full() -> bool {
    guest_tests::full()
}

// covers: reverse/determinism
#[test]
fn where_a_run_is_stopped_does_not_matter() {
    let config = booting(2);
    let (parts, part) = if full() { (20, 40_000_000) } else { (3, 20_000_000) };
    let (mut vm, mut console) = open(&config);
    let (mut other, mut second) = open(&config);
    let mut distances = random(3, 200_000);
    for round in 1..=parts {
        assert!(vm.run_for(&mut console, part).unwrap().is_none());
        while other.steps() < vm.steps() {
            let step = distances.next().unwrap().min(vm.steps() - other.steps());
            assert!(other.run_for(&mut second, step).unwrap().is_none());
        }
        same(&format!("part {round}"), other.save(), vm.save());
    }
}

/// A machine that keeps a point every so many steps.
fn keeping(config: &MachineConfig, spacing: u64) -> MachineConfig {
    MachineConfig {
        reverse: Some(minivmm::config::ReverseOptions {
            spacing,
            ..minivmm::config::ReverseOptions::default()
        }),
        ..config.clone()
    }
}

/// To positions in no order: what was there is there again.
fn wander(vm: &mut Run, console: &mut Console, seen: &[(u64, u64)], times: usize) {
    for at in random(11, seen.len() as u64).take(times) {
        let (step, digest) = seen[at as usize];
        let from = vm.steps();
        assert!(vm.seek(console, step).unwrap().is_none());
        assert!((vm.steps(), vm.digest()) == (step, digest), "from {from} to {step}");
    }
}

// covers: reverse/smp, reverse/stepi
#[test]
fn several_cpus_go_back_together_and_each_by_its_own_instructions() {
    let config = MachineConfig {
        cpus: 3,
        memory: 8 << 20,
        cmdline: Some(b"3".to_vec()),
        model: &SKYLAKE_SERVER,
        ..MachineConfig::new(SMP)
    };
    let (mut vm, mut console) = open(&keeping(&config, 30_000));
    let (mut straight, mut other) = open(&config);
    let mut seen = Vec::new();
    // Odd distances, so that no turn's end is always met.
    while vm.run_for(&mut console, 4001).unwrap().is_none() {
        assert!(straight.run_for(&mut other, 4001).unwrap().is_none());
        assert_eq!(vm.digest(), straight.digest());
        seen.push((vm.steps(), vm.digest()));
    }
    assert!(seen.len() > 30, "{}", seen.len());
    wander(&mut vm, &mut console, &seen, 40);
    let steps = |vm: &Run, cpu| vm.cpu_state(cpu).unwrap().steps;
    for (cpu, at) in [(0, 10), (1, 15), (2, 20), (1, 29), (2, 29)] {
        vm.seek(&mut console, seen[at].0).unwrap();
        for _ in 0..20 {
            let (now, made) = (vm.steps(), steps(&vm, cpu));
            assert!(vm.step_back(&mut console, cpu).unwrap());
            assert_eq!((vm.current_cpu(), steps(&vm, cpu)), (cpu, made - 1), "from {now}");
            let back = vm.steps();
            // Nothing of this CPU's came in between.
            assert!(vm.step(&mut console).unwrap().is_none());
            assert_eq!(steps(&vm, cpu), made);
            vm.seek(&mut console, now).unwrap();
            assert_eq!(steps(&vm, cpu), made);
            vm.seek(&mut console, back).unwrap();
        }
    }
}

/// What the guest does with its disk, and with what is typed.
const SCRIPT: &str = "#!/bin/sh
dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>/dev/null
sum=$(md5sum </dev/vda)
echo ask me
read word
dd if=/dev/zero of=/dev/vda bs=4k seek=3 count=9 conv=fsync 2>/dev/null
echo \"$word: $sum\"
";

// covers: reverse/linux, reverse/disks, reverse/input, reverse/output
#[test]
fn a_linux_with_a_disk_goes_back_to_any_step() {
    use std::os::unix::fs::PermissionsExt;
    let folder = std::env::temp_dir().join(format!("minivmm-reverse-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let (script, disk) = (folder.join("run"), folder.join("disk"));
    std::fs::write(&script, SCRIPT).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let contents = vec![0x5a; 2 << 20];
    std::fs::write(&disk, &contents).unwrap();
    let config = MachineConfig {
        inject: Some(script.parent().unwrap().into()),
        cmdline: Some(b"console=ttyS0 panic=-1 quiet".to_vec()),
        ..booting(2)
    };
    // The folder that is injected has the disk's file in it as well, which does no harm.
    let config = MachineConfig {
        disks: vec![DiskConfig {
            path: disk.clone(),
            mode: DiskMode::ReadWrite,
            format: None,
        }],
        ..config
    };
    let (mut vm, mut console) = open(&keeping(&config, 1 << 24));
    let (mut seen, mut said, mut asked) = (Vec::new(), String::new(), false);
    let end = loop {
        let end = vm.run_for(&mut console, 10_000_001).unwrap();
        said += &String::from_utf8(console.take_output()).unwrap();
        if end.is_some() {
            break end;
        }
        if said.contains("ask me") && !asked {
            console.push_input(b"swordfish\n");
            asked = true;
            // It enters here: who comes back finds it in the serial port.
            continue;
        }
        // Every digest reads all of memory.
        if full() || asked || seen.len() < 3 {
            seen.push((vm.steps(), vm.digest()));
        }
    };
    assert!(matches!(end, Some(StopReason::Ended(End::PowerOff))), "{end:?}\n{said}");
    assert!(said.contains("swordfish: "), "{said}");
    let last = (vm.steps(), vm.digest());
    let extent = vm.extent().unwrap();
    assert!(extent.bytes <= minivmm::config::REVERSE_MEMORY, "{extent:?}");
    wander(&mut vm, &mut console, &seen, if full() { 40 } else { 5 });
    for _ in 0..10 {
        let now = vm.steps();
        assert!(vm.step_back(&mut console, vm.current_cpu()).unwrap());
        assert!(vm.steps() < now);
    }
    assert!(matches!(
        vm.run(&mut console).unwrap(),
        StopReason::Ended(End::PowerOff)
    ));
    assert_eq!((vm.steps(), vm.digest()), last, "what the disk said is the same, too");
    assert_eq!(console.take_output(), b"", "nothing is said twice");
    assert!(
        std::fs::read(&disk).unwrap() == contents,
        "the user's file is as it was"
    );
    std::fs::remove_dir_all(&folder).unwrap();
}
