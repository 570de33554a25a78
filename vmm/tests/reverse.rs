//! Going back: `--reverse`, `--record` and `minivmm replay`.

use crate::common;
use std::{
    fs,
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    process::{Command, Stdio},
    time::Duration,
};

use common::*;
use iced_x86::code_asm::*;
use minivmm::{
    Back, Console, End, MachineConfig, Run, SerialTarget, StopReason,
    debug::{StopCause, WatchKind, Watchpoint},
};

/// A machine that keeps a point every so many steps.
fn open(kernel: &std::path::Path, spacing: u64, more: impl FnOnce(&mut MachineConfig)) -> (Run, Console) {
    let mut config = MachineConfig {
        memory: 2 << 20,
        reverse: Some(minivmm::config::ReverseOptions {
            spacing,
            ..minivmm::config::ReverseOptions::default()
        }),
        ..MachineConfig::new(kernel)
    };
    more(&mut config);
    let vm = Run::new(&config).unwrap();
    let console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    (vm, console)
}

/// Numbers that look random.
fn random(below: u64) -> impl Iterator<Item = u64> {
    let mut state = 7u64;
    std::iter::repeat_with(move || {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % below
    })
}

/// Runs to the end with this typed at these steps, and says how each of some positions looks.
fn whole(vm: &mut Run, console: &mut Console, typed: &[(u64, &str)], every: u64) -> (Vec<(u64, u64)>, End) {
    let mut seen = Vec::new();
    let mut typed = typed.iter();
    let mut next = typed.next();
    loop {
        if let Some((_, text)) = next.filter(|(step, _)| *step <= vm.steps()) {
            console.push_input(text.as_bytes());
            next = typed.next();
        }
        // The first thing that happens at a step is that input comes.
        assert!(vm.run_for(console, 0).unwrap().is_none());
        seen.push((vm.steps(), vm.digest()));
        if let Some(end) = vm.run_for(console, every).unwrap() {
            seen.push((vm.steps(), vm.digest()));
            return (seen, end.end().unwrap());
        }
    }
}

/// To positions in no order, and what was there is there again.
fn wander(vm: &mut Run, console: &mut Console, seen: &[(u64, u64)], times: usize) {
    for at in random(seen.len() as u64).take(times) {
        let (step, digest) = seen[at as usize];
        let from = vm.steps();
        let end = vm.seek(console, step).unwrap();
        assert!(end.is_none() || step == seen.last().unwrap().0, "{end:?}");
        assert_eq!((vm.steps(), vm.digest()), (step, digest), "from {from}");
    }
}

// covers: reverse/seek, reverse/input, reverse/output, reverse/end
#[test]
fn a_guest_with_input_is_at_any_step_what_it_was() {
    let folder = Folder::new();
    for (name, image) in [("polls", echo()), ("sleeps", interrupt_echo())] {
        let kernel = folder.file(name, image);
        for spacing in [1, 700, 1 << 40] {
            let (mut vm, mut console) = open(&kernel, spacing, |_| {});
            let typed = [(0, "a"), (300, "bc"), (1500, "d"), (1501, "efgh"), (4000, "q")];
            // One that sleeps makes no steps until something comes.
            let typed = if name == "sleeps" {
                &[(0, "abcdefghq")][..]
            } else {
                &typed
            };
            let (seen, end) = whole(&mut vm, &mut console, typed, 37);
            assert!(matches!(end, End::PowerOff), "{end:?}");
            assert_eq!(console.take_output(), b"ready\nabcdefghq");
            wander(&mut vm, &mut console, &seen, 60);
            // Whatever is typed now waits, and the way on is the known one: to the same end, and nothing is said twice.
            console.push_input(b"zzz");
            vm.seek(&mut console, 40).unwrap();
            assert!(matches!(
                vm.run(&mut console).unwrap(),
                StopReason::Ended(End::PowerOff)
            ));
            assert_eq!((vm.steps(), vm.digest()), *seen.last().unwrap());
            assert!(
                matches!(vm.run(&mut console).unwrap(), StopReason::Ended(End::PowerOff)),
                "and it stays off"
            );
            assert_eq!(console.take_output(), b"");
            assert_eq!(console.input(), b"zzz");
        }
    }
}

// covers: reverse/seek
#[test]
fn a_machine_that_keeps_its_past_runs_as_one_that_does_not() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", hello());
    let (mut plain, mut console) = open(&kernel, 1, |config| config.reverse = None);
    let (mut keeps, mut other) = open(&kernel, 3, |_| {});
    for _ in 0..20 {
        assert!(plain.run_for(&mut console, 1).unwrap().is_none());
        assert!(keeps.run_for(&mut other, 1).unwrap().is_none());
        assert_eq!((plain.steps(), plain.digest()), (keeps.steps(), keeps.digest()));
    }
    assert!(plain.extent().is_none());
    let error = plain.seek(&mut console, 3).unwrap_err().to_string();
    assert!(error.contains("needs --reverse"), "{error}");
    assert!(plain.seek(&mut console, 21).unwrap().is_none(), "forwards it can");
    let extent = keeps.extent().unwrap();
    assert_eq!((extent.first, extent.head, extent.live), (0, 20, true));
    assert!(extent.points > 3 && extent.bytes > 0, "{extent:?}");
}

/// The guest writes pages one after the other, so that a snapshot takes more and more.
// covers: reverse/limit
#[test]
fn the_limit_of_memory_holds_while_the_guest_grows() {
    let folder = Folder::new();
    let image = guest(|a| {
        let mut again = a.create_label();
        a.mov(edi, 0x12_0000u32).unwrap();
        a.set_label(&mut again).unwrap();
        a.mov(dword_ptr(edi), edi).unwrap();
        a.add(edi, 0x1000).unwrap();
        a.cmp(edi, 0x50_0000).unwrap();
        a.jb(again).unwrap();
        forever(a);
    });
    let kernel = folder.file("kernel", image);
    for (limit, keeps) in [(4 << 20, true), (6 << 20, true), (2 << 20, false)] {
        let (mut vm, mut console) = open(&kernel, 50, |config| {
            config.memory = 8 << 20;
            config.reverse.as_mut().unwrap().memory = limit;
        });
        let mut shortened = false;
        for _ in 0..100 {
            assert!(vm.run_for(&mut console, 50).unwrap().is_none());
            let Some(extent) = vm.extent() else { break };
            assert!(extent.bytes <= limit && extent.points > 0, "{extent:?}");
            shortened |= extent.first > 0;
            // What is kept can be gone to, and from there on again.
            let now = vm.steps();
            assert!(vm.seek(&mut console, extent.first).unwrap().is_none());
            assert_eq!(vm.steps(), extent.first);
            assert!(vm.seek(&mut console, now).unwrap().is_none());
            assert!(vm.extent().is_none_or(|extent| extent.bytes <= limit));
        }
        assert_eq!(vm.extent().is_some(), keeps, "{limit}");
        assert!(shortened || limit > 4 << 20, "{limit}: the beginning was to go");
        // Without a past it runs on.
        assert!(vm.run_for(&mut console, 50).unwrap().is_none());
    }
}

// covers: reverse/future
#[test]
fn another_future_begins_where_the_known_one_is_forgotten() {
    let folder = Folder::new();
    let (mut vm, mut console) = open(&folder.file("kernel", echo()), 500, |_| {});
    let (seen, _) = whole(&mut vm, &mut console, &[(0, "one"), (2000, "q")], 100);
    assert_eq!(console.take_output(), b"ready\noneq");
    let (step, digest) = seen[seen.len() / 2];
    vm.seek(&mut console, step).unwrap();
    assert!(!vm.extent().unwrap().live);
    vm.forget_future().unwrap();
    let extent = vm.extent().unwrap();
    assert_eq!((extent.head, extent.live), (step, true));
    assert_eq!(vm.digest(), digest);
    console.push_input(b"twoq");
    assert!(matches!(
        vm.run(&mut console).unwrap(),
        StopReason::Ended(End::PowerOff)
    ));
    assert_eq!(console.take_output(), b"twoq");
    let end = (vm.steps(), vm.digest());
    wander(&mut vm, &mut console, &seen[..seen.len() / 2], 20);
    assert!(matches!(
        vm.run(&mut console).unwrap(),
        StopReason::Ended(End::PowerOff)
    ));
    assert_eq!((vm.steps(), vm.digest()), end, "and this one is known now");
}

// covers: reverse/stepi
#[test]
fn one_instruction_back_undoes_one_step() {
    let folder = Folder::new();
    let (mut vm, mut console) = open(&folder.file("kernel", echo()), 1 << 40, |_| {});
    console.push_input(b"xyz");
    // What is typed enters with the next step.
    assert!(vm.step(&mut console).unwrap().is_none());
    let mut seen = Vec::new();
    for _ in 0..300 {
        seen.push((vm.steps(), vm.digest()));
        assert!(vm.step(&mut console).unwrap().is_none());
    }
    for known in seen.iter().rev() {
        assert!(vm.step_back(&mut console, 0).unwrap());
        assert_eq!((vm.steps(), vm.digest()), *known);
    }
    assert!(vm.step_back(&mut console, 0).unwrap());
    assert!(
        !vm.step_back(&mut console, 0).unwrap(),
        "there is nothing before the beginning"
    );
    assert_eq!(vm.steps(), 0);
}

// covers: reverse/memory
#[test]
fn points_are_thinned_by_the_limit_and_all_of_the_past_stays() {
    // Writes all over two megabytes, for ever.
    let kernel = guest(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.imul_3(ebx, ebx, 1_103_515_245).unwrap();
        a.add(ebx, 12345).unwrap();
        a.mov(eax, ebx).unwrap();
        a.and(eax, 0x1f_fffc).unwrap();
        a.add(dword_ptr(eax + 0x20_0000), ebx).unwrap();
        a.jmp(again).unwrap();
    });
    let folder = Folder::new();
    let limit = 12 << 20;
    let (mut vm, mut console) = open(&folder.file("kernel", kernel), 3000, |config| {
        config.memory = 8 << 20;
        config.reverse.as_mut().unwrap().memory = limit;
    });
    let mut seen = Vec::new();
    for _ in 0..300 {
        assert!(vm.run_for(&mut console, 3100).unwrap().is_none());
        seen.push((vm.steps(), vm.digest()));
        let extent = vm.extent().unwrap();
        assert!(extent.bytes <= limit, "{extent:?}");
    }
    let extent = vm.extent().unwrap();
    assert!((5..150).contains(&extent.points), "{extent:?}");
    wander(&mut vm, &mut console, &seen, 40);
    assert!(vm.extent().unwrap().bytes <= limit);
}

// covers: reverse/refused
#[test]
fn what_cannot_go_back_is_refused_in_one_line() {
    let folder = Folder::new();
    folder.file("kernel", hello());
    fs::create_dir(folder.path().join("full")).unwrap();
    folder.file("full/file", "");
    for (words, says) in [
        (&["--reverse", "--clock", "paced"][..], "--clock paced"),
        (&["--record", "r", "--clock", "paced"], "--clock paced"),
        (&["--reverse", "--trace", "t"], "leave out --trace"),
        (
            &["--reverse", "--engine", "kvm", "--kvm-defects", "accept"],
            "--reverse counts instructions",
        ),
        (
            &["--record", "r", "--engine", "kvm", "--kvm-defects", "accept"],
            "--record counts instructions",
        ),
        (&["--reverse-memory", "1G"], "--reverse"),
        (&["--reverse", "--reverse-memory", "much"], "--reverse-memory"),
        (
            &["--reverse", "--reverse-memory", "4K"],
            "--reverse-memory 4K: one snapshot of this machine takes ",
        ),
        (&["--record", "full"], "not empty"),
        (&["--record", "no/where"], "--record"),
    ] {
        let output = run(minivmm()
            .current_dir(folder.path())
            .args(["--kernel", "kernel"])
            .args(words));
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {text}");
        assert!(text.contains(says) && text.lines().count() == 1, "{words:?}: {text}");
    }
}

/// Runs a command with this on its standard input, at once or once it has printed a line and had the time to fall asleep: status,
/// output and errors.
fn typed(command: &mut Command, text: &str, late: bool) -> (i32, String, String) {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    if late {
        said.read_line(&mut line).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    // A replay may be over before it gets a command.
    let written = child.stdin.take().unwrap().write_all(text.as_bytes());
    assert!(written.is_ok() || written.unwrap_err().kind() == ErrorKind::BrokenPipe);
    said.read_to_string(&mut line).unwrap();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), line, errors)
}

/// The digest that `--stats` prints.
fn digest(errors: &str) -> &str {
    let line = errors.lines().find(|line| line.starts_with("state hash"));
    line.unwrap_or_else(|| panic!("{errors}"))
}

// covers: reverse/record, reverse/replay
#[test]
fn a_recorded_session_is_run_again_from_anywhere() {
    let folder = Folder::new();
    for (name, image, late) in [
        ("polls", echo(), false),
        ("sleeps", interrupt_echo(), false),
        ("slept", interrupt_echo(), true),
    ] {
        folder.file(name, image);
        let record = format!("{name}-session");
        let words = [
            "--kernel", name, "-m", "4M", "--stats", "--seed", "random", "--record", &record,
        ];
        let (status, said, errors) = typed(minivmm().current_dir(folder.path()).args(words), "hello there q", late);
        assert_eq!((status, said.as_str()), (0, "ready\nhello there q"), "{errors}");
        let first = digest(&errors).to_string();
        for options in [&[][..], &["--reverse"], &["--trace", "trace"]] {
            let replay = folder.path().join(&record);
            let elsewhere = std::env::temp_dir();
            let trace = folder.path().join(name);
            let mut command = minivmm();
            command.current_dir(&elsewhere).arg("replay").arg(replay).arg("--stats");
            for word in options {
                match *word {
                    "trace" => command.arg(trace.with_extension("trace")),
                    word => command.arg(word),
                };
            }
            // What is typed now is not for the guest.
            let (status, said, errors) = typed(&mut command, "other words q", false);
            assert_eq!(
                (status, said.as_str()),
                (0, "ready\nhello there q"),
                "{options:?}: {errors}"
            );
            assert_eq!(digest(&errors), first, "{options:?}");
        }
    }
}

// covers: reverse/replay
#[test]
fn a_replay_ends_where_the_session_was_ended_from_outside() {
    let folder = Folder::new();
    folder.file("kernel", spinner());
    let words = ["--kernel", "kernel", "-m", "4M", "--record", "s", "--stats"];
    let (status, _, errors) = typed(
        minivmm()
            .current_dir(folder.path())
            .args(words)
            .args(["--max-instructions", "123456"]),
        "",
        false,
    );
    assert_eq!(status, 8, "{errors}");
    let first = digest(&errors).to_string();
    let (status, said, errors) = typed(
        minivmm().current_dir(folder.path()).args(["replay", "s", "--stats"]),
        "",
        false,
    );
    assert_eq!((status, said.as_str()), (0, "spinning\n"), "{errors}");
    assert!(
        errors.contains("the session ends at step 123456: --max-instructions 123456: reached"),
        "{errors}"
    );
    assert_eq!(digest(&errors), first);
    // Of a recorder that was killed there is what it had written.
    let log = folder.path().join("s/log");
    let text = fs::read_to_string(&log).unwrap();
    fs::write(&log, &text[..text.len() - 3]).unwrap();
    let (status, _, errors) = typed(minivmm().current_dir(folder.path()).args(["replay", "s"]), "", false);
    assert_eq!(status, 2, "{errors}");
    assert!(errors.contains("breaks off") && errors.lines().count() == 1, "{errors}");
}

// covers: reverse/replay-bad-input
#[test]
fn a_directory_that_is_no_session_is_refused_in_one_line() {
    let folder = Folder::new();
    let disk = folder.file("disk", vec![0; 4096]);
    let kernel = folder.file("kernel", echo());
    let words = ["--kernel", "kernel", "--disk", "disk", "-m", "4M", "--record", "s"];
    let (status, _, errors) = typed(minivmm().current_dir(folder.path()).args(words), "abc q", false);
    assert_eq!(status, 0, "{errors}");
    let path = |name: &str| folder.path().join("s").join(name);
    let session = fs::read_to_string(path("session.json")).unwrap();
    let log = fs::read_to_string(path("log")).unwrap();
    assert!(log.lines().count() >= 3, "{log}");
    let refused = |says: &str| {
        let (status, said, errors) = typed(minivmm().current_dir(folder.path()).args(["replay", "s"]), "", false);
        assert_eq!((status, said.as_str()), (2, ""), "{says}: {errors}");
        assert!(errors.contains(says) && errors.lines().count() == 1, "{says}: {errors}");
    };
    for (text, says) in [
        ("", "not a recorded session"),
        ("{\"a\": 1}", "not a recorded session"),
        (&session[..session.len() / 2], "not a recorded session"),
        (
            &session.replace("session\": 3", "session\": 2"),
            "another version of minivmm",
        ),
        (&session.replace("\"seed\"", "\"seeds\""), "damaged"),
        (&session.replace("\"-m\"", "\"--memoirs\""), "--memoirs"),
        (&session.replace("\"4M\"", "\"5M\""), "the guest starts otherwise"),
        (&session.replace("directory\": \"", "directory\": \"/no"), "cannot go"),
    ] {
        fs::write(path("session.json"), text).unwrap();
        refused(says);
    }
    fs::write(path("session.json"), &session).unwrap();
    for (text, says) in [
        ("[1,\n", "line 1: damaged"),
        (&log.replace("input", "inputs"), "unknown kind"),
    ] {
        fs::write(path("log"), text).unwrap();
        refused(says);
    }
    fs::remove_file(path("log")).unwrap();
    refused("no recorded session: it has no log");
    // Input at a step at which no round of the machine can be, and a check that is not met.
    for (text, says) in [
        ("[0,0,\"check\",\"1\"]\n[9,9,\"guest\",\"\"]\n", "gone another way"),
        (
            "[5,9999999,\"input\",\"61\"]\n[99,99999999,\"guest\",\"\"]\n",
            "gone another way",
        ),
    ] {
        fs::write(path("log"), text).unwrap();
        let (status, _, errors) = typed(minivmm().current_dir(folder.path()).args(["replay", "s"]), "", false);
        assert_eq!(status, 2, "{errors}");
        assert!(errors.contains(says) && errors.lines().count() == 1, "{errors}");
    }
    fs::write(path("log"), &log).unwrap();
    fs::write(&kernel, hello()).unwrap();
    refused("the guest starts otherwise");
    fs::write(&disk, vec![0; 4096]).unwrap();
    refused("has changed since the session was recorded");
    fs::remove_file(&disk).unwrap();
    refused("--disk disk");
    let other = |name: &str| typed(minivmm().current_dir(folder.path()).args(["replay", name]), "", false).2;
    assert!(other("nowhere").contains("no such file"), "{}", other("nowhere"));
    assert!(other("kernel").contains("not a directory"), "{}", other("kernel"));
}

// covers: reverse/record
#[test]
fn what_a_debugger_changes_is_known_from_there_on_and_ends_a_recording() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", echo());
    let record = minivmm::config::RecordOptions {
        folder: folder.path().join("s"),
        arguments: Vec::new(),
    };
    let (mut vm, mut console) = open(&kernel, 300, |config| {
        (config.memory, config.record) = (4 << 20, Some(record));
    });
    console.push_input(b"ab");
    assert!(vm.run_for(&mut console, 1000).unwrap().is_none());
    let before = vm.digest();
    let write = |vm: &mut Run, byte: u8| {
        vm.write_physical(0x30_0000, &[byte]).unwrap();
    };
    write(&mut vm, 1);
    write(&mut vm, 2);
    assert!(vm.run_for(&mut console, 500).unwrap().is_none());
    let later = (vm.steps(), vm.digest());
    // The change is crossed in both directions.
    for _ in 0..3 {
        vm.seek(&mut console, 900).unwrap();
        let mut byte = [9];
        vm.read_physical(0x30_0000, &mut byte).unwrap();
        assert_eq!(byte, [0]);
        vm.seek(&mut console, later.0).unwrap();
        assert_eq!((vm.steps(), vm.digest()), later);
    }
    assert_ne!(later.1, before);
    // In the past it begins another future.
    vm.seek(&mut console, 500).unwrap();
    write(&mut vm, 3);
    assert!(vm.run_for(&mut console, 100).unwrap().is_none());
    assert_eq!(vm.extent().unwrap().head, 600);
    assert!(vm.run_for(&mut console, 1000).unwrap().is_none());
    let mut byte = [9];
    vm.read_physical(0x30_0000, &mut byte).unwrap();
    assert_eq!(byte, [3]);
    let log = fs::read_to_string(folder.path().join("s/log")).unwrap();
    assert_eq!(log.matches("changed").count(), 1, "{log}");
}

// covers: reverse/continue
#[test]
fn from_a_crash_back_to_the_store_that_caused_it() {
    let folder = Folder::new();
    let (cell, counter) = (u64::from(DATA) + 16, u64::from(DATA));
    let kernel = guest(|a| {
        let (mut top, mut fine) = (a.create_label(), a.create_label());
        a.mov(ecx, 1000u32).unwrap();
        a.set_label(&mut top).unwrap();
        a.inc(dword_ptr(counter)).unwrap();
        a.cmp(ecx, 77).unwrap();
        a.jne(fine).unwrap();
        // Where the next jump leads, which is nowhere.
        a.mov(dword_ptr(cell), 0xdead_0000u32).unwrap();
        a.set_label(&mut fine).unwrap();
        a.loop_(top).unwrap();
        a.mov(eax, dword_ptr(cell)).unwrap();
        a.jmp(eax).unwrap();
    });
    let kernel = folder.file("kernel", kernel);
    // MOV ESP and MOV ECX are before it.
    let top = u64::from(BASE) + 32 + 10;
    let read = |vm: &Run, at: u64| {
        let mut bytes = [0; 4];
        vm.read_physical(at, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    };
    for spacing in [97, 1 << 40] {
        let (mut vm, mut console) = open(&kernel, spacing, |_| {});
        vm.debugger();
        let end = vm.run(&mut console).unwrap();
        assert!(
            matches!(&end, StopReason::Debugger(stop) if stop.why == StopCause::TripleFault),
            "{end:?}"
        );
        let crash = vm.steps();
        let watched = Watchpoint::new(cell, 4, WatchKind::Write).unwrap();
        vm.debugger().add_watchpoint(watched);
        let back = vm.back(&mut console).unwrap();
        let met = |back: &Back| matches!(back, Back::Stopped(stop) if matches!(stop.why, StopCause::Watch { address, .. } if address == cell));
        assert!(met(&back), "{back:?}");
        let state = vm.cpu_state(0).unwrap();
        assert_eq!((state.gpr[1], read(&vm, cell), read(&vm, counter)), (77, 0, 924));
        // Forwards it is made, and the machine stops behind it.
        let end = vm.run(&mut console).unwrap();
        assert!(
            matches!(&end, StopReason::Debugger(stop) if matches!(stop.why, StopCause::Watch { .. })),
            "{end:?}"
        );
        assert_eq!(read(&vm, cell), 0xdead_0000);
        assert!(met(&vm.back(&mut console).unwrap()));
        // Nobody has written it before.
        assert!(matches!(vm.back(&mut console).unwrap(), Back::Beginning));
        assert_eq!((vm.steps(), read(&vm, counter)), (0, 0));
        vm.debugger().remove_watchpoint(&watched);

        // A breakpoint is met again and again, one round earlier each time.
        vm.debugger().add_breakpoint(top);
        assert!(
            vm.seek(&mut console, crash).unwrap().is_none(),
            "a seek stops nowhere on its way"
        );
        for round in 1..=30 {
            let back = vm.back(&mut console).unwrap();
            assert!(
                matches!(&back, Back::Stopped(stop) if stop.why == StopCause::Breakpoint(top)),
                "{back:?}"
            );
            let state = vm.cpu_state(0).unwrap();
            assert_eq!((state.rip, state.gpr[1]), (top, round));
        }
        let end = vm.run(&mut console).unwrap();
        assert!(
            matches!(&end, StopReason::Debugger(stop) if stop.why == StopCause::Breakpoint(top)),
            "{end:?}"
        );
        assert_eq!(vm.cpu_state(0).unwrap().gpr[1], 29);
        vm.seek(&mut console, 3).unwrap();
        assert!(matches!(vm.back(&mut console).unwrap(), Back::Stopped(_)));
        assert_eq!(vm.steps(), 2);
        assert!(matches!(vm.back(&mut console).unwrap(), Back::Beginning));
    }
}

// covers: reverse/run-to
#[test]
fn run_to_goes_to_a_step_in_either_direction_and_stands_there() {
    let folder = Folder::new();
    folder.file("kernel", spinner());
    let socket = folder.path().join("control");
    let words = [
        "--kernel",
        "kernel",
        "-m",
        "4M",
        "--serial",
        "null",
        "--reverse",
        "--control",
        "unix:control",
    ];
    let mut child = minivmm()
        .current_dir(folder.path())
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let ctl = |command: &str| {
        let output = run(minivmm().arg("ctl").arg(&socket).arg(command));
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    };
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !socket.exists() {
        assert!(std::time::Instant::now() < end, "no socket");
        std::thread::sleep(Duration::from_millis(5));
    }
    let monitor = |line: &str| ctl(&format!("{{\"command\":\"monitor\",\"line\":\"{line}\"}}"));
    for step in [1_234_567, 10, 7_000_001, 9, 0] {
        let said = monitor(&format!("run-to {step}"));
        assert!(said.contains(&format!("to step {step}")), "{said}");
        let status = ctl("status");
        assert!(
            status.contains(&format!("\"steps\":{step},")) && status.contains("paused"),
            "{status}"
        );
    }
    assert!(monitor("run-to").contains("step 0 of 0 to "), "{}", monitor("run-to"));
    assert!(monitor("run-to x").contains("no number"));
    // A state of another past, and nothing is kept of the way there.
    assert!(monitor("run-to 5000").contains("to step 5000"));
    monitor("snapshot save one");
    assert!(monitor("run-to 100").contains("to step 100"));
    monitor("msr write 0x10 0");
    monitor("snapshot load one");
    let first = monitor("run-to");
    assert!(first.contains("step 5000 of 5000 to 5000"), "{first}");
    let before = monitor("run-to 4999");
    assert!(
        before.contains("step 4999 is before the past that is kept, which begins at step 5000"),
        "{before}"
    );
    let status = ctl("status");
    assert!(status.contains("\"steps\":5000,"), "the run goes on: {status}");
    ctl("quit");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

// covers: reverse/replay-stops
#[test]
fn a_replay_is_the_session_wherever_it_is_stopped() {
    let folder = Folder::new();
    folder.file("kernel", spinner());
    let at = folder.path();
    // Checks are 2^24 steps apart: there are two behind the first stop.
    let record = [
        "--kernel",
        "kernel",
        "--serial",
        "null",
        "--record",
        "s",
        "--max-instructions",
        "40000000",
    ];
    let output = run(minivmm().current_dir(at).args(record).stdin(Stdio::null()));
    assert_eq!(
        output.status.code(),
        Some(8),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut replay = minivmm();
    replay.current_dir(at).args([
        "replay",
        "s",
        "--serial",
        "null",
        "--gdb",
        "unix:gdb",
        "--control",
        "unix:control",
        "--paused",
    ]);
    replay
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let process = Watched::new(replay.spawn().unwrap());
    let ctl = |command: &str| run(minivmm().current_dir(at).args(["ctl", "control", command]));
    while !ctl("status").status.success() {
        std::thread::sleep(Duration::from_millis(20));
    }
    for step in ["1000003", "16777215", "16777217", "39000001"] {
        let output = ctl(&format!("monitor run-to {step}"));
        assert!(
            output.status.success(),
            "{step}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let status = String::from_utf8(ctl("status").stdout).unwrap();
        assert!(status.contains(&format!("\"steps\":{step}")), "{step}: {status}");
    }
    assert!(ctl("quit").status.success());
    assert!(process.output().status.success());
}
