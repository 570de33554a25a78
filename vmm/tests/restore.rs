//! `minivmm ctl SOCKET snapshot FILE` and `minivmm --restore FILE` as a user runs them.

use crate::common;
use std::{
    fs,
    os::unix::net::UnixStream,
    path::Path,
    process::{Output, Stdio},
    time::{Duration, Instant},
};

use common::*;

/// A machine with a control socket `control` in the folder.
fn start(folder: &Path, options: &[&str]) -> Watched {
    let mut command = minivmm();
    command.current_dir(folder).args(options).args([
        "--serial",
        "null",
        "--control",
        "unix:control",
        "--clock",
        "virtual",
    ]);
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let process = Watched::new(child);
    let limit = Instant::now() + Duration::from_secs(120);
    while UnixStream::connect(folder.join("control")).is_err() {
        assert!(Instant::now() < limit, "no socket");
        std::thread::sleep(Duration::from_millis(10));
    }
    process
}

fn ctl(folder: &Path, words: &[&str]) -> Output {
    run(minivmm().current_dir(folder).args(["ctl", "control"]).args(words))
}

/// The steps of a machine that stands.
fn steps(folder: &Path) -> u64 {
    let said = ctl(folder, &["status"]).stdout;
    let status: serde_json::Value = serde_json::from_slice(&said).unwrap();
    status["steps"].as_u64().unwrap()
}

fn end(folder: &Path, mut process: Watched) {
    assert!(ctl(folder, &["quit"]).status.success());
    assert!(process.wait().success());
}

// covers: snapshot/options
#[test]
fn what_the_machine_is_made_of_comes_with_the_file() {
    let folder = Folder::new();
    folder.file("kernel", spinner());
    let at = folder.path();
    let made_of = [
        "--kernel",
        "kernel",
        "--memory",
        "8M",
        "--cpus",
        "2",
        "--cpu-model",
        "haswell,-rdrand",
    ];
    let process = start(at, &made_of);
    assert!(ctl(at, &["pause"]).status.success());
    let here = steps(at);
    let output = ctl(at, &["snapshot", "file"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        said.starts_with(&format!("step {here}: ")),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_refused(&ctl(at, &["snapshot", "file"]), 2, &["snapshot file: exists already"]);
    assert_refused(&ctl(at, &["snapshot"]), 2, &["minivmm ctl SOCKET snapshot FILE"]);
    end(at, process);
    // The kernel is not needed any more, and a folder deeper the file leads to the same machine.
    fs::remove_file(at.join("kernel")).unwrap();
    let process = start(at, &["--restore", "file", "--paused"]);
    assert_eq!(steps(at), here);
    let info = String::from_utf8(ctl(at, &["monitor info"]).stdout).unwrap();
    assert!(
        info.contains("8 MiB") && info.contains("haswell") && info.contains("CPU 1 "),
        "{info}"
    );
    assert!(ctl(at, &["resume"]).status.success());
    let limit = Instant::now() + Duration::from_secs(60);
    while steps(at) == here {
        assert!(Instant::now() < limit, "it stands still");
    }
    // Of one that went on from a file there is a file, too; with a past, the past begins there.
    assert!(ctl(at, &["snapshot", "second"]).status.success());
    end(at, process);
    let process = start(at, &["--restore", "second", "--paused", "--reverse"]);
    let there = steps(at);
    assert!(there > here);
    let to = format!("monitor run-to {}", there + 100_000);
    assert!(ctl(at, &[&to]).status.success());
    let back = format!("monitor run-to {there}");
    assert!(ctl(at, &[&back]).status.success());
    assert_eq!(steps(at), there);
    let before = ctl(at, &[&format!("monitor run-to {}", there - 1)]);
    assert!(!before.status.success(), "{}", String::from_utf8_lossy(&before.stdout));
    end(at, process);
}

// covers: snapshot/options, snapshot/bad-file
#[test]
fn options_beside_it_and_files_that_are_none_are_refused() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", spinner());
    let at = folder.path();
    let process = start(at, &["--kernel", "kernel", "--memory", "8M"]);
    assert!(ctl(at, &["snapshot", "file"]).status.success());
    end(at, process);
    let from = |options: &[&str]| run(minivmm().current_dir(at).args(["--restore", "file"]).args(options));
    for option in [
        &["--memory", "8M"][..],
        &["--cpus", "1"],
        &["--cpu-model", "westmere"],
        &["--kernel", "kernel"],
        &["--lbr=off"],
        &["--seed", "3"],
    ] {
        assert_refused(&from(option), 2, &["--restore", option[0].split('=').next().unwrap()]);
    }
    let none = run(minivmm().current_dir(at).arg("--restore").arg(&kernel));
    assert_refused(&none, 2, &["--restore", "not a snapshot of minivmm's"]);
    let none = run(minivmm().current_dir(at).args(["--restore", "missing"]));
    assert_refused(&none, 2, &["--restore missing: no such file"]);
    let bytes = fs::read(at.join("file")).unwrap();
    fs::write(at.join("file"), &bytes[..bytes.len() / 2]).unwrap();
    assert_refused(&from(&[]), 2, &["--restore file: ", "cut short"]);
}

/// Waits for a byte at its serial port, and ends with 0 written to the debug-exit port if it is a `p`, else with 1.
fn listener() -> Vec<u8> {
    use iced_x86::code_asm::*;
    guest(|a| {
        let (mut wait, mut fails) = (a.create_label(), a.create_label());
        a.set_label(&mut wait).unwrap();
        a.mov(dx, 0x3fd).unwrap();
        a.in_(al, dx).unwrap();
        a.test(al, 1).unwrap();
        a.je(wait).unwrap();
        a.mov(dx, 0x3f8).unwrap();
        a.in_(al, dx).unwrap();
        a.cmp(al, i32::from(b'p')).unwrap();
        a.jne(fails).unwrap();
        out(a, 0xf4, 0);
        a.set_label(&mut fails).unwrap();
        debug_exit(a, 1);
    })
}

// covers: matrix/from
#[test]
fn cells_of_a_matrix_go_on_from_a_snapshot() {
    let folder = Folder::new();
    folder.file("kernel", listener());
    let at = folder.path();
    let process = start(at, &["--kernel", "kernel", "--memory", "8M", "--cpu-model", "haswell"]);
    assert!(ctl(at, &["pause"]).status.success());
    let output = ctl(at, &["snapshot", "waiting"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    end(at, process);
    folder.file("passes", "p");
    folder.file("fails", "f");
    let matrix = |options: &[&str]| run(minivmm().current_dir(at).arg("matrix").args(options));
    let from = |input: &str| matrix(&["--from", "waiting", "--input", input, "--max-instructions", "10000000"]);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let passes = from("passes");
    let said = text(&passes.stdout);
    assert_eq!(passes.status.code(), Some(0), "{said}{}", text(&passes.stderr));
    assert!(
        said.contains("1 passed, 0 failed") && said.contains("waiting"),
        "{said}"
    );
    assert!(said.contains("the snapshot is of a machine of model haswell"), "{said}");
    let fails = from("fails");
    assert_eq!(fails.status.code(), Some(1));
    assert!(
        text(&fails.stdout).contains("waiting on haswell (soft): the guest wrote 1 to the debug-exit port"),
        "{}",
        text(&fails.stdout)
    );
    // The models that it is not of are not run.
    let other = text(&matrix(&["--from", "waiting", "--model", "core2", "westmere"]).stdout);
    assert!(other.contains("2 cells: 0 passed, 0 failed, 2 skipped"), "{other}");
    for (options, words) in [
        (&["--from", "missing"][..], "--from missing: no such file"),
        (&["--from", "kernel"], "--from kernel: not a snapshot of minivmm's"),
        (
            &["--from", "waiting", "--input", "missing"],
            "--input missing: no such file",
        ),
        (&["--from", "waiting", "--kernel", "kernel"], "--from"),
        (&["--from", "waiting", "--memory", "8M"], "--from"),
        (&["--kernel", "kernel", "--input", "passes"], "--input"),
    ] {
        assert_refused(&matrix(options), 2, &[words]);
    }
    let bytes = fs::read(at.join("waiting")).unwrap();
    fs::write(at.join("waiting"), &bytes[..bytes.len() - 1]).unwrap();
    assert_refused(&matrix(&["--from", "waiting"]), 2, &["--from waiting: ", "cut short"]);
}
