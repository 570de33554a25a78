use super::*;

#[test]
fn a_run_has_its_status_and_both_streams() {
    let mut shell = Command::new("sh");
    shell.args(["-c", "printf 'a 1\\r\\nb  2\\n'; echo no >&2; exit 43"]);
    let outcome = run(&mut shell, Duration::from_secs(20)).must_end_with(43);
    assert_eq!(
        (outcome.fact("a"), outcome.fact("b"), outcome.fact("c")),
        (Some("1"), Some("2"), None)
    );
    assert_eq!(outcome.errors, "no\n");
}

#[test]
fn a_run_ends_at_the_limit() {
    let outcome = run(Command::new("sleep").arg("60"), Duration::from_millis(50));
    assert_eq!(outcome.status, None);
    assert!(outcome.time < Duration::from_secs(30));
}

#[test]
fn a_test_that_fails_leaves_no_process() {
    let running = start(Command::new("sleep").arg("60"), Duration::from_secs(60));
    let process = PathBuf::from(format!("/proc/{}", running.id()));
    assert!(process.exists());
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _guest = running;
        panic!("on purpose");
    }));
    assert!(failed.is_err() && !process.exists());
}

#[test]
fn a_marker_is_waited_for() {
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo here; sleep 60"]);
    let mut running = start(&mut shell, Duration::from_secs(20));
    assert!(running.wait_for("here\n").is_some());
    assert!(running.peak_memory().is_some_and(|bytes| bytes > 4096));
    running.kill();
    let mut cat = start_with_input(&mut Command::new("cat"), Duration::from_secs(20));
    cat.enter("a line");
    assert!(cat.wait_for("a line\n").is_some());
    cat.finish().must_end_with(0);
    let mut running = start(Command::new("echo").arg("there"), Duration::from_secs(20));
    assert!(running.wait_for("here\nx").is_none());
}
