//! How runs end, and what the options do, seen from outside.

use crate::common;
use std::{
    fs,
    io::{Read, Write},
    process::Stdio,
    time::{Duration, Instant},
};

use common::*;
use iced_x86::code_asm::*;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

// covers: exit-status/0
// covers: exit-status/debug
// covers: exit-status/4
// covers: cli/kernel
// covers: boot/multiboot
#[test]
fn a_guest_ends_the_run_with_its_status() {
    let rows: [(&str, Vec<u8>, i32, &str, &str); 8] = [
        ("power-off", hello(), 0, "hello\n", ""),
        (
            "reset by the reset register",
            guest(|a| {
                out(a, 0xcf9, 2);
                out(a, 0xcf9, 6);
                forever(a);
            }),
            0,
            "",
            "",
        ),
        (
            "reset by the keyboard controller",
            guest(|a| {
                out(a, 0x64, 0xfe);
                forever(a);
            }),
            0,
            "",
            "",
        ),
        ("debug-exit 0", guest(|a| debug_exit(a, 0)), 1, "", ""),
        ("debug-exit 21", guest(|a| debug_exit(a, 0x15)), 43, "", ""),
        ("debug-exit 127", guest(|a| debug_exit(a, 127)), 255, "", ""),
        (
            "triple fault",
            guest(|a| {
                print(a, "going");
                a.mov(ebx, 0x1234_5678u32).unwrap();
                a.ud2().unwrap();
            }),
            4,
            "going",
            "triple fault",
        ),
        (
            "halted for good",
            guest(|a| {
                a.cli().unwrap();
                a.hlt().unwrap();
            }),
            4,
            "",
            "interrupts disabled",
        ),
    ];
    for (what, image, status, output, errors) in rows {
        let result = run_guest(&image, &[]);
        let stderr = text(&result.stderr);
        assert_eq!(result.status.code(), Some(status), "{what}: {stderr}");
        assert_eq!(text(&result.stdout), output, "{what}");
        assert!(
            if errors.is_empty() {
                stderr.is_empty()
            } else {
                stderr.contains(errors)
            },
            "{what}: {stderr}"
        );
        if what == "triple fault" {
            assert!(stderr.contains("RBX 0000000012345678"), "the registers: {stderr}");
            assert!(stderr.contains("[0f] 0b"), "the code at RIP: {stderr}");
            for name in ["RIP", "RSP", "R15", "CS", "GDTR", "CR3", "EFER"] {
                assert!(stderr.contains(name), "{name}: {stderr}");
            }
        }
    }
}

// covers: exit-status/8
// covers: cli/max-instructions
// covers: cli/timeout
#[test]
fn limits_end_the_run_with_status_8() {
    for (options, says) in [
        (&["--max-instructions", "1000"][..], "--max-instructions 1000"),
        (&["--timeout", "0.2"], "--timeout 0.2"),
        (&["--timeout", "0.2", "--clock", "paced"], "--timeout 0.2"),
    ] {
        assert_refused(&run_guest(&spinner(), options), 8, &[says]);
    }
    // An idle guest, too.
    let idle = timer_guest(u32::MAX);
    assert_refused(
        &run_guest(&idle, &["--timeout", "0.2", "--clock", "paced"]),
        8,
        &["--timeout"],
    );
    assert_refused(
        &run_guest(&idle, &["--timeout", "0.2", "--clock", "virtual"]),
        8,
        &["--timeout"],
    );
}

// covers: cli/max-instructions
#[test]
fn the_limit_of_instructions_is_exact() {
    // MOV ESP, three NOPs, then eight instructions to the debug exit.
    let image = guest(|a| {
        for _ in 0..3 {
            a.nop().unwrap();
        }
        debug_exit(a, 3);
    });
    assert_eq!(
        run_guest(&image, &["--max-instructions", "7"]).status.code(),
        Some(7),
        "OUT is the seventh"
    );
    assert_refused(&run_guest(&image, &["--max-instructions", "6"]), 8, &["reached"]);
}

fn stat<'a>(errors: &'a str, name: &str) -> &'a str {
    let line = errors
        .lines()
        .find(|line| line.starts_with(name))
        .unwrap_or_else(|| panic!("no {name}: {errors}"));
    line[name.len()..].trim_start_matches(':').trim()
}

// covers: cli/stats
// covers: determinism/repeats
#[test]
fn stats_tell_steps_and_times_and_repeat_on_the_virtual_clock() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", echo());
    let once = |options: &[&str]| {
        let mut command = minivmm();
        command
            .arg("--kernel")
            .arg(&kernel)
            .args(["--stats", "--clock", "virtual", "--max-instructions", "300000"]);
        text(&run(command.args(options)).stderr)
    };
    let (first, second) = (once(&[]), once(&[]));
    for name in ["steps", "exits", "accesses", "delivered", "virtual time", "state hash"] {
        let same = |errors: &str| stat(errors, name).split(',').next().unwrap().to_string();
        assert_eq!(same(&first), same(&second), "{name}");
    }
    assert!(stat(&first, "steps").starts_with("300000 "), "{first}");
    assert!(stat(&first, "steps").ends_with("MIPS"), "{first}");
    assert!(stat(&first, "wall time").ends_with(" s"), "{first}");
    assert_ne!(
        stat(&once(&["-m", "64M"]), "state hash"),
        stat(&first, "state hash"),
        "another memory map"
    );
}

// covers: memory/as-touched
#[test]
fn the_end_of_a_run_looks_at_what_was_touched_alone() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", echo());
    let mut command = minivmm();
    command.arg("--kernel").arg(&kernel);
    command.args(["-m", "64G", "--stats", "--max-instructions", "1000"]);
    let errors = text(&run(&mut command).stderr);
    let line = stat(&errors, "memory");
    let (touched, size) = line.split_once(" KiB touched and hashed of ").unwrap();
    assert_eq!(size, "67108864 KiB");
    // A host's large pages are more than what this guest has.
    assert!((1..64 << 10).contains(&touched.parse::<u64>().unwrap()), "{line}");
    assert!(
        errors.contains("--max-instructions 1000: reached, CPU 0 at "),
        "{errors}"
    );
}

// covers: cli/initrd
// covers: cli/cmdline
// covers: cli/memory
#[test]
fn command_line_module_and_memory_reach_the_guest() {
    // Prints the command line, the module, and mem_upper's third byte.
    let image = guest(|a| {
        let print_from_esi = |a: &mut CodeAssembler| {
            let (mut again, mut done) = (a.create_label(), a.create_label());
            a.mov(dx, 0x3f8).unwrap();
            a.set_label(&mut again).unwrap();
            a.mov(al, byte_ptr(esi)).unwrap();
            a.test(al, al).unwrap();
            a.je(done).unwrap();
            a.out(dx, al).unwrap();
            a.inc(esi).unwrap();
            a.jmp(again).unwrap();
            a.set_label(&mut done).unwrap();
        };
        a.mov(esi, dword_ptr(ebx + 16)).unwrap();
        print_from_esi(a);
        print(a, "|");
        a.mov(eax, dword_ptr(ebx + 24)).unwrap();
        a.mov(esi, dword_ptr(eax)).unwrap();
        print_from_esi(a);
        a.mov(eax, dword_ptr(ebx + 8)).unwrap();
        a.shr(eax, 16).unwrap();
        a.mov(dx, 0xf4).unwrap();
        a.out(dx, al).unwrap();
        forever(a);
    });
    let folder = Folder::new();
    let (kernel, module) = (folder.file("kernel", image), folder.file("module", b"the module\0"));
    for (option, memory) in [("--cmdline", "--memory"), ("--append", "-m")] {
        let mut command = minivmm();
        command.arg("--kernel").arg(&kernel).arg("--initrd").arg(&module);
        let result = run(command.args([option, "a=1 b", memory, "1G"]));
        assert_eq!(text(&result.stdout), format!("{} a=1 b|the module", kernel.display()));
        // 1 GiB less 1 MiB is 0FFC00H KiB.
        assert_eq!(result.status.code(), Some(0xf << 1 | 1), "{}", text(&result.stderr));
    }
}

// covers: cli/serial
#[test]
fn the_serial_port_leads_where_it_is_told() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", hello());
    let log = folder.file("log", "an older, longer log");
    let file = format!("file:{}", log.display());
    for (target, expected) in [("stdio", "hello\n"), ("null", ""), (&file, "")] {
        let result = run(minivmm().arg("--kernel").arg(&kernel).args(["--serial", target]));
        assert_eq!(
            (result.status.code(), text(&result.stdout).as_str()),
            (Some(0), expected),
            "{target}"
        );
    }
    assert_eq!(fs::read(&log).unwrap(), b"hello\n");
}

// covers: cli/rtc-base
#[test]
fn the_clock_starts_when_it_is_told() {
    // The year, from CMOS register 9, is BCD.
    let image = guest(|a| {
        out(a, 0x70, 9);
        a.in_(al, 0x71).unwrap();
        a.mov(dx, 0xf4).unwrap();
        a.out(dx, al).unwrap();
        forever(a);
    });
    for (time, year) in [
        ("1999-12-31T23:59:59Z", 0x99),
        ("2031-06-01", 0x31),
        ("1704067200", 0x24),
    ] {
        let result = run_guest(&image, &["--rtc-base", time]);
        assert_eq!(
            result.status.code(),
            Some((year << 1 | 1) & 0xff),
            "{time}: {}",
            text(&result.stderr)
        );
    }
}

// covers: cli/clock
#[test]
fn a_paced_guest_takes_wall_time_and_a_virtual_one_does_not() {
    // Waits half a second by the PM timer.
    let image = guest(|a| {
        a.mov(dx, 0x608).unwrap();
        a.in_(eax, dx).unwrap();
        a.mov(ebx, eax).unwrap();
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.in_(eax, dx).unwrap();
        a.sub(eax, ebx).unwrap();
        a.cmp(eax, 3_579_545 / 2).unwrap();
        a.jb(again).unwrap();
        power_off(a);
    });
    let time = |clock: &str| {
        let started = Instant::now();
        let result = run_guest(&image, &["--clock", clock, "--stats"]);
        assert_eq!(result.status.code(), Some(0), "{}", text(&result.stderr));
        let errors = text(&result.stderr);
        let seconds: f64 = stat(&errors, "virtual time").trim_end_matches(" s").parse().unwrap();
        assert!((0.5..0.6).contains(&seconds) || clock == "paced", "{seconds}");
        (started.elapsed(), seconds)
    };
    time("virtual");
    let (_, seconds) = time("paced");
    assert!(seconds >= 0.5, "{seconds}");
}

// covers: cli/clock
#[test]
fn an_idle_paced_guest_sleeps_until_its_timer_fires() {
    // 20 periods of the PIT at its slowest are 1.1 s.
    let image = timer_guest(20);
    let started = Instant::now();
    let result = run_guest(&image, &["--clock", "paced"]);
    assert_eq!(result.status.code(), Some(0), "{}", text(&result.stderr));
    assert!(
        started.elapsed() >= Duration::from_millis(1000),
        "{:?}",
        started.elapsed()
    );
}

/// Counts interrupts of the PIT, at 18.2 Hz, with HLT, then powers off.
fn timer_guest(count: u32) -> Vec<u8> {
    interrupt_guest(
        0xfe,
        0x20,
        |a| {
            out(a, 0x43, 0x34);
            out(a, 0x40, 0);
            out(a, 0x40, 0);
            a.xor(esi, esi).unwrap();
        },
        |a, quit| {
            a.inc(esi).unwrap();
            a.cmp(esi, count as i32).unwrap();
            a.je(quit).unwrap();
        },
    )
}

// covers: devices/stdin-events
#[test]
fn input_from_a_pipe_reaches_the_guest_whole() {
    let folder = Folder::new();
    // Much more than a FIFO and a queue hold.
    let mut input: Vec<u8> = (0..20_000u32).map(|n| b'a' + (n % 16) as u8).collect();
    input.push(b'q');
    for (name, image) in [("echo", echo()), ("interrupt-echo", interrupt_echo())] {
        let kernel = folder.file(name, image);
        for clock in ["virtual", "paced"] {
            let mut command = minivmm();
            command.arg("--kernel").arg(&kernel).args(["--clock", clock]);
            let child = command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut child = Watched::new(child);
            let mut stdin = child.child.stdin.take().unwrap();
            let bytes = input.clone();
            let writer = std::thread::spawn(move || stdin.write_all(&bytes));
            let result = child.output();
            writer.join().unwrap().unwrap();
            assert_eq!(
                result.status.code(),
                Some(0),
                "{name} {clock}: {}",
                text(&result.stderr)
            );
            let expected = [&b"ready\n"[..], &input].concat();
            assert!(
                result.stdout == expected,
                "{name} {clock}: {} bytes came back",
                result.stdout.len()
            );
        }
        // From a file, which cannot be waited for.
        let file = folder.file("input", &input);
        let mut command = minivmm();
        command
            .arg("--kernel")
            .arg(&kernel)
            .stdin(fs::File::open(file).unwrap());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let result = Watched::new(child).output();
        assert_eq!(result.status.code(), Some(0), "{name}: {}", text(&result.stderr));
        assert_eq!(result.stdout.len(), 6 + input.len(), "{name}");
    }
}

// covers: console/stdin-eof
#[test]
fn an_idle_guest_costs_nothing_at_the_end_of_standard_input() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", timer_guest(u32::MAX));
    for stdin in ["null", "closed pipe", "file"] {
        let mut command = minivmm();
        command
            .arg("--kernel")
            .arg(&kernel)
            .args(["--clock", "paced", "--timeout", "1.5"]);
        match stdin {
            "null" => command.stdin(Stdio::null()),
            "file" => command.stdin(fs::File::open(folder.file("input", "abc")).unwrap()),
            _ => command.stdin(Stdio::piped()),
        };
        let mut child = Watched::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
        drop(child.child.stdin.take());
        std::thread::sleep(Duration::from_millis(1200));
        // Fields 14 and 15 of proc(5)'s stat: user and system time, in hundredths of a second.
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.child.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        let ticks: u32 = fields[11].parse::<u32>().unwrap() + fields[12].parse::<u32>().unwrap();
        assert!(ticks < 60, "{stdin}: {ticks} hundredths of a second of CPU time");
        let result = child.output();
        assert_eq!(result.status.code(), Some(8), "{stdin}: {}", text(&result.stderr));
    }
}

// covers: cli/models
#[test]
fn models_are_listed() {
    let result = run(minivmm().arg("models"));
    assert_eq!(result.status.code(), Some(0));
    assert!(
        text(&result.stdout).lines().any(|line| line.starts_with("westmere ")),
        "{}",
        text(&result.stdout)
    );
    assert!(result.stderr.is_empty());
}

// covers: cli/verbose
// covers: cli/engine
// covers: cli/cpu-model
#[test]
fn verbose_runs_say_which_engine_they_took_and_why() {
    for (options, says) in [
        (&["-v"][..], true),
        (&["-v", "--engine", "auto", "--cpu", "westmere"], true),
        (&["-v", "--engine", "soft", "--cpu-model", "westmere"], false),
        (&[], false),
    ] {
        let result = run_guest(&hello(), options);
        assert_eq!(result.status.code(), Some(0));
        assert_eq!(text(&result.stderr).contains("--engine auto: "), says, "{options:?}");
    }
}

// covers: cli/verbose, pmu/always-zero
#[test]
fn verbose_runs_say_once_which_events_of_a_guest_are_always_0() {
    let kernel = guest(|a| {
        // IA32_PERFEVTSEL0: enabled, both rings. DIV.ACTIVE_CYCLES, which is not modelled, twice; L1D_PREFETCH.REQUESTS; instructions.
        for event in [0x0114, 0x0114, 0x014E, 0x00C0] {
            a.mov(ecx, 0x186).unwrap();
            a.xor(edx, edx).unwrap();
            a.mov(eax, 0x43_0000 | event).unwrap();
            a.wrmsr().unwrap();
        }
        power_off(a);
    });
    let result = run_guest(&kernel, &["-v", "--engine", "soft", "--cpu-model", "westmere"]);
    assert_eq!(result.status.code(), Some(0));
    let said: Vec<_> = text(&result.stderr)
        .lines()
        .filter_map(|line| {
            line.split_once("the guest counts event ")
                .map(|(_, rest)| rest.to_string())
        })
        .collect();
    assert_eq!(
        said,
        [
            "14H with unit mask 01H, which is always 0 here",
            "4EH with unit mask 01H, which is always 0 here"
        ]
    );
    let quiet = run_guest(&kernel, &["--engine", "soft", "--cpu-model", "westmere"]);
    assert!(!text(&quiet.stderr).contains("event"));
}

#[test]
fn a_reader_that_goes_away_ends_the_run() {
    let folder = Folder::new();
    let kernel = folder.file(
        "kernel",
        guest(|a| {
            let mut again = a.create_label();
            a.set_label(&mut again).unwrap();
            print(a, "y\n");
            a.jmp(again).unwrap();
        }),
    );
    let mut command = minivmm();
    command
        .arg("--kernel")
        .arg(&kernel)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = Watched::new(command.spawn().unwrap());
    let mut stdout = child.child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 100]).unwrap();
    drop(stdout);
    assert_refused(&child.output(), 2, &["standard output"]);
}
