//! `--control` and `minivmm ctl` on running machines.

use crate::common;
use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::{Duration, Instant},
};

use common::*;
use iced_x86::code_asm::*;
use serde_json::Value;

/// A guest with a control socket.
struct Guest {
    folder: Folder,
    socket: PathBuf,
    process: Watched,
}

impl Guest {
    fn start(image: &[u8], options: &[&str]) -> Guest {
        let folder = Folder::new();
        folder.file("kernel", image);
        let socket = folder.path().join("control");
        let mut command = minivmm();
        // The guest finds the kernel's name on its command line: it is the same for all.
        command
            .current_dir(folder.path())
            .args(["--kernel", "kernel", "--serial", "null", "--control"]);
        command.arg(format!("unix:{}", socket.display())).args(options);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let guest = Guest {
            folder,
            socket,
            process: Watched::new(child),
        };
        let limit = Instant::now() + Duration::from_secs(120);
        while UnixStream::connect(&guest.socket).is_err() {
            assert!(Instant::now() < limit, "no socket");
            std::thread::sleep(Duration::from_millis(10));
        }
        guest
    }

    fn client(&self) -> Client {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        Client(BufReader::new(stream))
    }

    fn end(mut self) -> i32 {
        let status = self.process.wait();
        assert!(!self.socket.exists(), "the socket is removed");
        assert!(self.folder.path().exists());
        status.code().unwrap()
    }
}

struct Client(BufReader<UnixStream>);

impl Client {
    fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"))
    }

    #[track_caller]
    fn ask(&mut self, command: &str) -> Value {
        self.send(format!("{{\"command\":\"{command}\"}}\n").as_bytes());
        let answer = self.answer();
        assert_eq!(answer["ok"], true, "{command}: {answer}");
        answer
    }

    #[track_caller]
    fn refused(&mut self, line: &[u8], says: &str) {
        self.send(line);
        let answer = self.answer();
        assert_eq!(answer["ok"], false, "{answer}");
        let error = answer["error"].as_str().unwrap();
        assert!(error.contains(says), "{error}");
    }
}

fn steps(status: &Value) -> u64 {
    status["steps"].as_u64().unwrap()
}

/// Waits until the guest has gone on from `before`.
fn goes_on(client: &mut Client, before: u64) {
    let limit = Instant::now() + Duration::from_secs(120);
    while steps(&client.ask("status")) == before {
        assert!(Instant::now() < limit, "the guest stands still");
    }
}

fn ctl(socket: &Path, command: &str) -> Output {
    run(minivmm().arg("ctl").arg(socket).arg(command))
}

// covers: control/pause, control/status, control/quit
#[test]
fn a_guest_is_paused_resumed_and_ended() {
    for (clock, cpus) in [("virtual", "1"), ("paced", "1"), ("virtual", "3")] {
        let guest = Guest::start(&spinner(), &["--clock", clock, "--cpus", cpus]);
        let mut client = guest.client();
        let first = client.ask("status");
        assert_eq!(first["state"], "running");
        goes_on(&mut client, steps(&first));
        let paused = client.ask("pause");
        assert_eq!(paused["state"], "paused");
        std::thread::sleep(Duration::from_millis(50));
        let mut other = guest.client();
        let still = other.ask("status");
        assert_eq!(still, paused, "nothing moves, not even the clock");
        assert_eq!(client.ask("pause"), paused, "again is no error");
        let all = still["cpus"].as_array().unwrap();
        assert_eq!(all.len().to_string(), cpus);
        assert!(all[0]["rip"].as_str().unwrap().starts_with("0x10"), "{still}");
        assert_eq!(all[0]["activity"], "running");
        assert!(all[1..].iter().all(|cpu| cpu["activity"] == "wait-for-sipi"), "{still}");
        assert_eq!(other.ask("resume")["state"], "running");
        goes_on(&mut client, steps(&paused));
        client.ask("quit");
        assert_eq!(guest.end(), 0, "{clock}");
    }
}

/// A guest that waits for its interrupts is reached as well, and a timer does not fire while it is paused.
// covers: control/pause
#[test]
fn an_idle_guest_answers() {
    for clock in ["virtual", "paced"] {
        // The PIT as slow as it goes: 18 interrupts a second.
        let timer = |a: &mut CodeAssembler| {
            for (port, value) in [(0x43, 0x34), (0x40, 0), (0x40, 0)] {
                out(a, port, value);
            }
        };
        let image = interrupt_guest(0xfe, 0x20, timer, |_, _| {});
        let guest = Guest::start(&image, &["--clock", clock]);
        let mut client = guest.client();
        client.ask("status");
        let paused = client.ask("pause");
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(client.ask("status"), paused);
        client.ask("resume");
        client.ask("quit");
        assert_eq!(guest.end(), 0);
    }
}

/// What a pause does not change: where the guest is after so many instructions, and in what state.
// covers: control/pause
#[test]
fn a_pause_leaves_no_trace_in_the_guest() {
    let hash = |pauses: u32| {
        let guest = Guest::start(
            &spinner(),
            &["--clock", "virtual", "--max-instructions", "300000000", "--stats"],
        );
        let mut client = guest.client();
        for _ in 0..pauses {
            client.ask("pause");
            client.ask("resume");
        }
        drop(client);
        let output = guest.process.output();
        assert_eq!(output.status.code(), Some(8));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let line = errors.lines().find(|line| line.starts_with("state hash:"));
        line.unwrap_or_else(|| panic!("{errors}")).to_string()
    };
    assert_eq!(hash(0), hash(5));
}

// covers: panic/pvpanic-stop
#[test]
fn a_guest_that_says_that_it_has_panicked_is_held_at_that_step() {
    let image = guest(|a| {
        out(a, 0x505, 1);
        forever(a);
    });
    let held = Guest::start(&image, &["--on-panic", "stop"]);
    let mut client = held.client();
    let limit = Instant::now() + Duration::from_secs(120);
    let status = loop {
        let status = client.ask("status");
        if status["state"] == "paused" {
            break status;
        }
        assert!(Instant::now() < limit, "it is not held: {status}");
    };
    // MOV ESP, two MOVs, and the OUT.
    assert_eq!(steps(&status), 4);
    client.ask("resume");
    goes_on(&mut client, 4);
    assert_eq!(client.ask("status")["state"], "running", "once");
    client.ask("quit");
    assert_eq!(held.end(), 0);
    // With nothing asked for the guest goes on; what it was in is said at its end.
    for (options, status) in [
        (&["--max-instructions", "1000"][..], 10),
        (&["--max-instructions", "3"], 8),
        (&["--on-panic", "exit"], 10),
    ] {
        let result = run_guest(&image, options);
        let errors = String::from_utf8_lossy(&result.stderr).into_owned();
        assert_eq!(result.status.code(), Some(status), "{errors}");
        assert_eq!(
            errors.contains("the guest's kernel has panicked"),
            status == 10,
            "{errors}"
        );
    }
}

// covers: control/garbage, control/oversized
#[test]
fn what_is_no_command_is_answered_and_the_guest_runs_on() {
    let guest = Guest::start(&spinner(), &[]);
    let mut client = guest.client();
    for (line, says) in [
        (&b"status\n"[..], "not a command"),
        (
            b"{}\n",
            "an object without \"command\": there are status, pause, resume, quit",
        ),
        (
            b"{\"command\":\"explode\"}\n",
            "no command \"explode\": there are status, pause, resume, quit, ",
        ),
        (b"{\"command\":7}\n", "not a command"),
        (b"[1,2\n", "not a command"),
        (b"\xff\xfe\x00\n", "not a command"),
        (b"{\"command\":\"status\"} trailing\n", "not a command"),
        (&[&vec![b'['; 4000][..], b"\n"].concat(), "not a command"),
    ] {
        client.refused(line, says);
    }
    // Blank lines are nothing, and the connection still works.
    client.send(b"\n  \r\n");
    client.ask("status");
    client.refused(&vec![b' '; 5000], "more than 4096 bytes");
    let mut rest = Vec::new();
    assert!(
        matches!(client.0.read_to_end(&mut rest), Ok(0) | Err(_)),
        "then it is closed"
    );
    // An unfinished line, and a client that goes away without reading its answers.
    guest.client().send(b"{\"command\":\"sta");
    guest.client().send(&b"{\"command\":\"status\"}\n".repeat(50));
    let mut client = guest.client();
    let before = steps(&client.ask("status"));
    goes_on(&mut client, before);
    client.ask("quit");
    assert_eq!(guest.end(), 0);
}

// covers: control/flood
#[test]
fn a_flood_of_commands_does_not_stop_the_guest() {
    let guest = Guest::start(&spinner(), &[]);
    let mut clients: Vec<Client> = (0..7).map(|_| guest.client()).collect();
    let line = b"{\"command\":\"status\"}\n";
    let before = steps(&clients[0].ask("status"));
    for client in &mut clients {
        client.send(&line.repeat(200));
    }
    let mut last = before;
    for round in 0..200 {
        for client in &mut clients {
            let answer = client.answer();
            assert_eq!(answer["ok"], true, "round {round}: {answer}");
            last = last.max(steps(&answer));
        }
    }
    assert!(last > before, "the guest has run on in between");
    // More clients than there is room for take the places of those that have been idle for longest, which are told so.
    let mut more: Vec<Client> = (0..9).map(|_| guest.client()).collect();
    let mut refused = 0;
    for client in more.iter_mut().chain(&mut clients) {
        // Where the door is closed already, the write may fail and the answer is there all the same.
        let _ = client.0.get_mut().write_all(line);
        let answer = client.answer();
        if answer["ok"] == false {
            assert!(answer["error"].as_str().unwrap().contains("idle"), "{answer}");
            refused += 1;
            let mut rest = Vec::new();
            assert!(
                matches!(client.0.read_to_end(&mut rest), Ok(0) | Err(_)),
                "then it is closed"
            );
        }
    }
    assert_eq!(refused, 8, "of 16 clients 8 stay");
    drop((clients, more));
    let limit = Instant::now() + Duration::from_secs(120);
    while ctl(&guest.socket, "quit").status.code() != Some(0) {
        assert!(Instant::now() < limit, "nobody is let in any more");
    }
    assert_eq!(guest.end(), 0);
}

// covers: control/ctl
#[test]
fn ctl_sends_a_command_and_prints_the_answer() {
    let guest = Guest::start(&spinner(), &[]);
    let output = ctl(&guest.socket, "status");
    assert_eq!(output.status.code(), Some(0));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["ok"], &answer["state"]), (&true.into(), &"running".into()));
    let prefixed = PathBuf::from(format!("unix:{}", guest.socket.display()));
    assert_eq!(ctl(&prefixed, "pause").status.code(), Some(0));
    assert_eq!(ctl(&guest.socket, "{\"command\":\"resume\"}").status.code(), Some(0));
    assert_refused(
        &ctl(&guest.socket, "explode"),
        2,
        &["ctl", "no command \"explode\": there are status"],
    );
    assert_eq!(ctl(&guest.socket, "quit").status.code(), Some(0));
    let socket = guest.socket.clone();
    assert_eq!(guest.end(), 0);
    assert_refused(&ctl(&socket, "status"), 2, &["ctl", "no such file"]);
}

// covers: monitor/control
#[test]
fn the_monitor_answers_over_the_socket() {
    let guest = Guest::start(&spinner(), &["--cpus", "2"]);
    let output = ctl(&guest.socket, "monitor help");
    assert_eq!(output.status.code(), Some(0));
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    for command in minivmm::front::monitor::COMMANDS {
        let line = help.lines().find(|line| line.split(' ').next() == Some(command.name));
        assert!(line.is_some_and(|line| line.ends_with(command.help)), "{help}");
    }
    let mut client = guest.client();
    let rip = client.ask("pause")["cpus"][0]["rip"].as_str().unwrap().to_string();
    client.send(b"{\"command\":\"monitor\",\"line\":\"info\"}\n");
    let answer = client.answer();
    let text = answer["text"].as_str().unwrap_or_else(|| panic!("{answer}"));
    assert!(
        text.starts_with("paused: ") && text.contains(&format!("* CPU 0 at {rip}, CPL 0\n")),
        "{text}"
    );
    client.send(b"{\"command\":\"monitor\",\"line\":\"msr read IA32_APIC_BASE\",\"cpu\":1}\n");
    assert_eq!(client.answer()["text"], "0x1b IA32_APIC_BASE 0xfee00800\n");
    client.refused(b"{\"command\":\"monitor\",\"line\":\"info\",\"cpu\":2}\n", "no CPU 2");
    client.refused(
        b"{\"command\":\"monitor\",\"line\":\"explode\"}\n",
        "no monitor command",
    );
    client.refused(b"{\"command\":\"monitor\"}\n", "missing field `line`");
    assert_refused(&ctl(&guest.socket, "monitor lbr x"), 2, &["ctl", "\"x\" is no number"]);
    client.ask("quit");
    assert_eq!(guest.end(), 0);
}

// covers: monitor/hash
#[test]
fn the_hash_is_the_one_that_stats_print() {
    let guest = Guest::start(&spinner(), &["--paused", "--stats"]);
    let mut client = guest.client();
    let mut monitor = |line: &str| {
        client.send(format!("{{\"command\":\"monitor\",\"line\":\"{line}\"}}\n").as_bytes());
        client.answer()["text"].as_str().unwrap().to_string()
    };
    let first = monitor("hash");
    assert!(first.ends_with(" at step 0\n"), "{first}");
    monitor("run-to 1000");
    let second = monitor("hash");
    let (hash, step) = second.split_once(' ').unwrap();
    assert_eq!(step, "at step 1000\n");
    assert!(hash.len() == 16 && !first.starts_with(hash), "{first}{second}");
    assert_eq!(monitor("hash"), second);
    client.ask("quit");
    let output = guest.process.output();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(errors.contains(&format!("state hash:   {hash}")), "{errors}");
}

/// Wherever a pause falls, the machine stands at that step as one does that comes there by going back and forth.
// covers: reverse/pause
#[test]
fn a_pause_stands_where_going_back_and_forth_does() {
    // Counts the timer's interrupts.
    let setup = |a: &mut CodeAssembler| {
        for (port, value) in [(0x43, 0x36), (0x40, 0), (0x40, 0x10)] {
            out(a, port, value);
        }
    };
    let image = interrupt_guest(0xfe, 0x20, setup, |a, _| a.inc(dword_ptr(0x20_0000)).unwrap());
    for image in [image, spinner()] {
        let guest = Guest::start(&image, &["--reverse", "-m", "8M"]);
        let mut client = guest.client();
        for round in 0..5 {
            std::thread::sleep(Duration::from_millis(30));
            let at = steps(&client.ask("pause"));
            let mut monitor = |line: &str| {
                client.send(format!("{{\"command\":\"monitor\",\"line\":\"{line}\"}}\n").as_bytes());
                client.answer()["text"].as_str().unwrap().to_string()
            };
            let here = monitor("hash");
            assert!(here.ends_with(&format!("at step {at}\n")), "{here}");
            for step in [at.saturating_sub(77), at] {
                monitor(&format!("run-to {step}"));
            }
            assert_eq!(monitor("hash"), here, "round {round}");
            client.ask("resume");
        }
        client.ask("quit");
        assert_eq!(guest.end(), 0);
    }
}

// covers: monitor/trace
#[test]
fn the_monitor_begins_and_stops_a_recording() {
    // It spins with conditions, of which there are packets.
    let image = guest(|a| {
        let mut top = a.create_label();
        a.set_label(&mut top).unwrap();
        a.inc(eax).unwrap();
        a.jnz(top).unwrap();
        a.jmp(top).unwrap();
    });
    let guest = Guest::start(
        &image,
        &["--trace", "recorded", "--trace-start", "instructions=1000000000000"],
    );
    let ask = |line: &str| {
        let output = ctl(&guest.socket, &format!("monitor trace{line}"));
        assert_eq!(output.status.code(), Some(0), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(ask(""), "recorded: recording is off\n");
    assert_refused(
        &ctl(&guest.socket, "monitor trace stop"),
        2,
        &["recording is off already"],
    );
    let mut client = guest.client();
    for _ in 0..2 {
        assert!(ask(" start").starts_with("recorded: recording is on from step "));
        assert_refused(
            &ctl(&guest.socket, "monitor trace start"),
            2,
            &["recording is on already"],
        );
        let before = steps(&client.ask("status"));
        goes_on(&mut client, before);
        assert!(ask(" stop").starts_with("recorded: recording is off from step "));
        let before = steps(&client.ask("status"));
        goes_on(&mut client, before);
    }
    client.ask("quit");
    let trace = guest.folder.path().join("recorded");
    let Guest { mut process, .. } = guest;
    assert_eq!(process.wait().code(), Some(0));
    let trace = trace::Trace::open(&trace).unwrap();
    assert_eq!(trace.info(0).starts, 2);
    let (counts, summary) = trace.count(0, &trace::Decode::default(), |_| ()).unwrap();
    assert!(
        counts.conditional > 1000 && summary.damage.is_empty(),
        "{counts:?} {summary:?}"
    );
}

// covers: control/path
#[test]
fn a_socket_that_cannot_be_made_is_one_line() {
    let folder = Folder::new();
    let taken = folder.file("taken", "something");
    let long = folder.path().join("x".repeat(200));
    for (path, says) in [
        (taken.clone(), "exists already"),
        (folder.path().join("missing/control"), "no such file"),
        (long, "path"),
    ] {
        let address = format!("unix:{}", path.display());
        let output = run_guest(&hello(), &["--serial", "null", "--control", &address]);
        assert_refused(&output, 2, &["--control", says]);
    }
    assert_eq!(fs::read(&taken).unwrap(), b"something", "what was there is left alone");
    for address in ["tcp:1234", "unix:", "/tmp/x"] {
        assert_refused(
            &run_guest(&hello(), &["--control", address]),
            2,
            &["--control", "unix:"],
        );
    }
}

// covers: control/path
#[test]
fn the_socket_goes_when_the_guest_or_a_signal_ends_the_run() {
    let guest = Guest::start(&spinner(), &[]);
    kill(&guest.process.child, "TERM");
    assert_eq!(guest.end(), 2);
    let guest = Guest::start(&spinner(), &["--timeout", "1"]);
    let mut client = guest.client();
    client.ask("pause");
    assert_eq!(guest.end(), 8, "the time limit holds while the guest is paused");
    let mut rest = String::new();
    assert!(matches!(client.0.read_to_string(&mut rest), Ok(0) | Err(_)), "{rest}");
}
