//! A Linux guest that panics: the run's status, and `--on-panic`.

use guest_tests::{Folder, in_minivmm, linux, minivmm, run, start};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(300);
const SAYS: &str = "Kernel panic - not syncing: VFS: Unable to mount root fs";

/// The guest's kernel, which finds no root file system.
fn boot(cmdline: &str) -> Command {
    let mut command = in_minivmm(&linux().kernel);
    command.args(["--cmdline", &format!("console=ttyS0 quiet {cmdline}")]);
    command
}

// covers: panic/status
#[test]
fn a_panic_that_resets_the_machine_has_a_status_of_its_own() {
    let guest = run(&mut boot("panic=-1"), LIMIT).must_end_with(10);
    assert!(guest.console.contains(SAYS), "{}", guest.console);
    assert_eq!(guest.errors, "minivmm: the guest's Linux has panicked, on CPU 0\n");
    // A limit that ends a guest that has panicked says so, too.
    let limited = run(boot("panic=0").args(["--max-instructions", "2500000000"]), LIMIT).must_end_with(10);
    assert!(
        limited
            .errors
            .contains("the guest's Linux has panicked, on CPU 0; --max-instructions 2500000000: reached"),
        "{}",
        limited.errors
    );
    // And one that has not yet has its own.
    let early = run(boot("panic=0").args(["--max-instructions", "1000000000"]), LIMIT).must_end_with(8);
    assert!(!early.errors.contains("panicked"), "{}", early.errors);
}

// covers: panic/exit
#[test]
fn a_panic_that_would_stand_for_ever_ends_the_run_once_its_message_is_out() {
    let guest = run(boot("panic=0").args(["--on-panic", "exit"]), LIMIT).must_end_with(10);
    assert!(guest.console.contains(SAYS), "{}", guest.console);
    assert!(guest.console.contains("---[ end Kernel panic"), "{}", guest.console);
    assert_eq!(guest.errors, "minivmm: the guest's Linux has panicked, on CPU 0\n");
}

// covers: panic/stop
#[test]
fn a_guest_that_panics_is_held_where_panic_begins() {
    let folder = Folder::new("on-panic");
    let socket = folder.join("control");
    let mut command = boot("panic=-1");
    command
        .args(["--on-panic", "stop", "--control"])
        .arg(format!("unix:{}", socket.display()));
    let guest = start(&mut command, LIMIT);
    let ctl = |line: &str| -> Output {
        Command::new(minivmm())
            .arg("ctl")
            .arg(&socket)
            .arg(line)
            .output()
            .unwrap()
    };
    let begin = Instant::now();
    let paused = || String::from_utf8_lossy(&ctl("status").stdout).contains("\"paused\"");
    while !paused() {
        assert!(begin.elapsed() < LIMIT, "it does not panic");
        std::thread::sleep(Duration::from_millis(200));
    }
    let info = String::from_utf8(ctl("monitor info").stdout).unwrap();
    assert!(info.contains(" panic, CPL 0"), "{info}");
    ctl("quit");
    let guest = guest.finish();
    assert!(!guest.console.contains("Kernel panic"), "{}", guest.console);
    assert!(
        guest
            .errors
            .contains("minivmm: the guest's Linux panics: it is held where `panic` begins"),
        "{}",
        guest.errors
    );
}
