//! States that are kept under a name, with a past and without one.

use crate::common;
use minivmm::StopReason;
use std::fs;

use common::*;
use minivmm::{
    Console, End, MachineConfig, Run, SerialTarget,
    front::{controls::Controls, monitor},
};
use minivmm::{config::DiskConfig, machine::disk::DiskMode};

fn open(kernel: &std::path::Path, more: impl FnOnce(&mut MachineConfig)) -> (Run, Console) {
    let mut config = MachineConfig {
        memory: 4 << 20,
        ..MachineConfig::new(kernel)
    };
    more(&mut config);
    let vm = Run::new(&config).unwrap();
    let console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    (vm, console)
}

fn keeps_past(config: &mut MachineConfig) {
    config.reverse = Some(minivmm::config::ReverseOptions {
        spacing: 300,
        ..minivmm::config::ReverseOptions::default()
    });
}

/// Where a machine is, and everything about that.
fn at(vm: &Run) -> (u64, u64) {
    (vm.steps(), vm.digest())
}

fn say(vm: &mut Run, line: &str) -> String {
    monitor::answer(&mut Controls::new(vm), 0, line).unwrap_or_else(|why| panic!("{line}: {why}"))
}

fn refused(vm: &mut Run, line: &str) -> String {
    let why = monitor::answer(&mut Controls::new(vm), 0, line)
        .expect_err(line)
        .to_string();
    assert_eq!(why.trim_end().lines().count(), 1, "{why}");
    why
}

fn go(vm: &mut Run, console: &mut Console, steps: u64) {
    assert!(vm.run_for(console, steps).unwrap().is_none());
}

// covers: monitor/snapshot
#[test]
fn a_state_is_taken_on_again_and_everything_after_it_is_new() {
    let folder = Folder::new();
    let (mut vm, mut console) = open(&folder.file("kernel", echo()), |_| {});
    console.push_input(b"ab");
    assert_eq!(say(&mut vm, "snapshot list"), "there are none\n");
    assert!(vm.run_for(&mut console, 400).unwrap().is_none());
    let first = at(&vm);
    let reported = say(&mut vm, "snapshot save first");
    assert!(
        reported.starts_with(&format!("first: step {}, in memory", first.0)),
        "{reported}"
    );
    let mut ends = Vec::new();
    for typed in ["cq", "xyzq", "cq"] {
        console.push_input(typed.as_bytes());
        assert!(matches!(
            vm.run(&mut console).unwrap(),
            StopReason::Ended(End::PowerOff)
        ));
        let said = String::from_utf8(console.take_output()).unwrap();
        ends.push((at(&vm), said));
        let reported = say(&mut vm, "snapshot load first");
        assert!(reported.contains(&format!(" to step {};", first.0)), "{reported}");
        assert_eq!(at(&vm), first, "{reported}");
    }
    assert!(
        ends[0].1.starts_with("ready\nab") && ends[0].1.ends_with("cq"),
        "{ends:?}"
    );
    assert_eq!((ends[1].1.as_str(), ends[2].1.as_str()), ("xyzq", "cq"));
    assert_eq!(ends[0].0, ends[2].0, "the same again");
    // Several have names, and one takes another's place.
    say(&mut vm, "snapshot save second");
    go(&mut vm, &mut console, 50);
    say(&mut vm, "snap save second");
    let second = vm.steps();
    assert_eq!(
        say(&mut vm, "snapshot"),
        format!("first: step {}\nsecond: step {second}\n", first.0)
    );
    say(&mut vm, "snapshot drop first");
    for (line, says) in [
        ("snapshot load first", "there is no snapshot \"first\""),
        ("snapshot drop first", "there is no snapshot"),
        ("snapshot save", "save NAME, load NAME"),
        ("snapshot save a b", "save NAME, load NAME"),
        ("snapshot keep a", "save NAME, load NAME"),
    ] {
        let why = refused(&mut vm, line);
        assert!(why.contains(says), "{why}");
    }
    assert!(refused(&mut vm, &format!("snapshot save {}", "x".repeat(65))).contains("64 bytes"));
    for number in 0..63 {
        say(&mut vm, &format!("snapshot save {number}"));
    }
    assert!(refused(&mut vm, "snapshot save more").contains("snapshot drop"));
    say(&mut vm, "snapshot save 5");
}

// covers: monitor/snapshot
#[test]
fn with_a_past_it_is_a_place_in_it() {
    let folder = Folder::new();
    let (mut vm, mut console) = open(&folder.file("kernel", echo()), keeps_past);
    console.push_input(b"abc");
    go(&mut vm, &mut console, 1000);
    let kept = at(&vm);
    say(&mut vm, "snapshot save here");
    go(&mut vm, &mut console, 10);
    console.push_input(b"de");
    go(&mut vm, &mut console, 990);
    let later = at(&vm);
    assert_eq!(console.take_output(), b"ready\nabcde");
    say(&mut vm, "snapshot load here");
    assert_eq!(at(&vm), kept);
    let extent = vm.extent().unwrap();
    assert_eq!((extent.first, extent.head, extent.live), (0, later.0, false));
    // What came then comes again, and is not shown twice.
    vm.seek(&mut console, 500).unwrap();
    vm.seek(&mut console, later.0).unwrap();
    assert_eq!((at(&vm), console.take_output()), (later, Vec::new()));
    // Forwards, too.
    vm.seek(&mut console, 10).unwrap();
    say(&mut vm, "snapshot load here");
    assert_eq!(at(&vm), kept);
    assert!(vm.step_back(&mut console, 0).unwrap());
    assert_eq!(vm.steps(), kept.0 - 1);
    go(&mut vm, &mut console, 1);
    assert_eq!(at(&vm), kept);
}

// covers: monitor/snapshot
#[test]
fn from_another_past_it_is_a_beginning() {
    let folder = Folder::new();
    let (mut vm, mut console) = open(&folder.file("kernel", echo()), keeps_past);
    console.push_input(b"abc");
    go(&mut vm, &mut console, 1000);
    let kept = at(&vm);
    say(&mut vm, "snapshot save here");
    go(&mut vm, &mut console, 1000);
    console.take_output();
    // A debugger changes the past: what was kept is of another one.
    vm.seek(&mut console, 600).unwrap();
    vm.write_physical(0x30_0000, &[7]).unwrap();
    go(&mut vm, &mut console, 1700);
    say(&mut vm, "snapshot load here");
    assert_eq!(at(&vm), kept);
    let extent = vm.extent().unwrap();
    assert_eq!((extent.first, extent.head, extent.live), (kept.0, kept.0, true));
    assert!(!vm.step_back(&mut console, 0).unwrap(), "nothing leads here");
    console.push_input(b"xyq");
    assert!(matches!(
        vm.run(&mut console).unwrap(),
        StopReason::Ended(End::PowerOff)
    ));
    let end = at(&vm);
    assert_eq!(console.take_output(), b"xyq");
    // And from here on it is as ever.
    for steps in [kept.0, kept.0 + 20, kept.0 + 1] {
        vm.seek(&mut console, steps).unwrap();
        assert_eq!(vm.steps(), steps);
        let mut byte = [9];
        vm.read_physical(0x30_0000, &mut byte).unwrap();
        assert_eq!(byte, [0]);
    }
    say(&mut vm, "snapshot load here");
    assert_eq!((at(&vm), vm.extent().unwrap().head), (kept, end.0));
    assert!(matches!(
        vm.run(&mut console).unwrap(),
        StopReason::Ended(End::PowerOff)
    ));
    assert_eq!((at(&vm), console.take_output()), (end, Vec::new()));
}

// covers: monitor/snapshot
#[test]
fn what_would_not_go_back_is_said_before() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", spinner());
    let disk = folder.file("disk", vec![0; 4096]);
    let with = |mode| DiskConfig {
        path: disk.clone(),
        mode,
        format: None,
    };
    let (mut vm, _) = open(&kernel, |config| config.disks = vec![with(DiskMode::ReadWrite)]);
    let why = refused(&mut vm, "snapshot save a");
    assert!(why.contains("disk,overlay"), "{why}");
    drop(vm);
    for mode in [DiskMode::Overlay, DiskMode::ReadOnly] {
        let (mut vm, _) = open(&kernel, |config| config.disks = vec![with(mode)]);
        say(&mut vm, "snapshot save a");
    }
    let (mut vm, _) = open(&kernel, |config| config.collect = Some(folder.path().join("out")));
    assert!(refused(&mut vm, "snapshot save a").contains("--collect"));
    let trace = minivmm::recording::RecordingOptions::new(folder.path().join("trace"));
    let (mut vm, mut console) = open(&kernel, |config| config.trace = Some(trace));
    say(&mut vm, "snapshot save a");
    go(&mut vm, &mut console, 10);
    assert!(refused(&mut vm, "snapshot load a").contains("a trace only grows"));
    assert_eq!(vm.steps(), 10);
    assert_eq!(fs::read(&disk).unwrap(), vec![0; 4096]);
}

// covers: monitor/trace-late
#[test]
fn a_recording_begins_and_ends_under_way() {
    let folder = Folder::new();
    let (mut vm, mut console) = open(&folder.file("kernel", echo()), keeps_past);
    assert_eq!(say(&mut vm, "trace"), "nothing is recorded\n");
    for line in ["trace stop", "trace start"] {
        assert!(refused(&mut vm, line).contains("trace start DIR"), "{line}");
    }
    go(&mut vm, &mut console, 700);
    let dir = |name: &str| folder.path().join(name).display().to_string();
    let (one, two) = (dir("one"), dir("two"));
    for (options, says) in [
        ("--trace-filter rust", "--trace-filter"),
        ("--nonsense", "--nonsense"),
        ("--trace-buffer 1", "less than"),
        ("--trace-start nowhere", "--trace-start nowhere"),
        ("more", "more"),
    ] {
        let why = refused(&mut vm, &format!("trace start {one} {options}"));
        assert!(why.contains(says), "{why}");
    }
    let reported = say(&mut vm, &format!("trace start {one} --trace-filter kernel"));
    assert_eq!(reported, format!("{one}: recording from step 700\n"));
    assert!(refused(&mut vm, &format!("trace start {two}")).contains("a recording already"));
    go(&mut vm, &mut console, 900);
    assert_eq!(say(&mut vm, "trace"), format!("{one}: recording is on\n"));
    assert_eq!(say(&mut vm, "trace stop"), format!("{one}: recorded up to step 1600\n"));
    // Each instruction is one of a loop without devices' interrupts.
    let count = |dir: &str| {
        let trace = trace::Trace::open(std::path::Path::new(dir)).unwrap();
        let (_, summary) = trace.count(0, &trace::Decode::default(), |_| ()).unwrap();
        assert!(summary.damage.is_empty(), "{summary:?}");
        summary.flow.instructions
    };
    let counted = count(&one);
    assert!((890..=900).contains(&counted), "{counted}");
    // What is there is not written over, and going elsewhere is an end.
    assert!(refused(&mut vm, &format!("trace start {one}")).contains("one"));
    say(&mut vm, &format!("trace start {two}"));
    go(&mut vm, &mut console, 500);
    vm.seek(&mut console, 100).unwrap();
    assert_eq!(say(&mut vm, "trace"), "nothing is recorded\n");
    let counted = count(&two);
    assert!((490..=500).contains(&counted), "{counted}");
}
