use super::*;

/// A program that prints `console`, says `errors` and ends with `status`.
fn cell(console: &str, errors: &str, status: i32, pass: PassBy) -> Cell {
    let script = format!("printf '%s' \"$1\"; printf '%s' \"$2\" >&2; exit {status}");
    let arguments = ["-c", &script, "sh", console, errors].map(OsString::from).to_vec();
    let plan = Plan {
        guest: "g".into(),
        model: "m".into(),
        engine: "soft".into(),
        arguments,
        one_of_all: false,
        pass,
        timeout: Duration::from_secs(60),
        command: false,
        input: None,
        skip: None,
    };
    run(Path::new("sh"), &plan)
}

// covers: matrix/verdict
#[test]
fn a_cell_passes_by_tap_or_by_exit_status() {
    const TAP: &str = "TAP version 14\r\n1..2\r\nok 1 - a\r\nok 2 - b # SKIP no b\r\n";
    const FAILS: &str = "TAP version 14\n1..2\nok 1 - a\nnot ok 2 - b\n";
    const NONE: &str = "TAP version 14\n1..1\nok 1 - a # SKIP no a\n";
    let failed = |why: &str| Verdict::Failed(why.to_string());
    let skipped = |why: &str| Verdict::Skipped(why.to_string());
    for (console, errors, status, pass, verdict) in [
        (TAP, "", 1, PassBy::Auto, Verdict::Passed),
        (TAP, "", 0, PassBy::Tap, Verdict::Passed),
        (
            TAP,
            "",
            5,
            PassBy::Auto,
            failed("every test holds, but the guest wrote 2 to the debug-exit port"),
        ),
        (FAILS, "", 3, PassBy::Auto, failed("1 of 2 tests failed")),
        (FAILS, "", 1, PassBy::Auto, failed("1 of 2 tests failed")),
        (FAILS, "", 1, PassBy::Status, Verdict::Passed),
        (NONE, "", 1, PassBy::Auto, skipped("no a")),
        (
            "TAP version 14\n1..0 # SKIP no x\n",
            "",
            1,
            PassBy::Auto,
            skipped("no x"),
        ),
        ("hello\n", "", 0, PassBy::Auto, Verdict::Passed),
        ("hello\n", "", 1, PassBy::Status, Verdict::Passed),
        ("hello\n", "", 0, PassBy::Tap, failed("no TAP on the console")),
        (
            "",
            "",
            43,
            PassBy::Auto,
            failed("the guest wrote 21 to the debug-exit port"),
        ),
        (
            "[    1.0] Kernel panic - not syncing: no init\n",
            "",
            0,
            PassBy::Auto,
            failed("[    1.0] Kernel panic - not syncing: no init"),
        ),
        (
            TAP,
            "minivmm: --max-instructions 9: reached, CPU 0 at 0x1000 (loop+0x2)\n",
            8,
            PassBy::Auto,
            failed("hangs: --max-instructions 9: reached, CPU 0 at 0x1000 (loop+0x2)"),
        ),
        (
            "",
            "warning\nminivmm: guest crashed: triple fault\nRIP 1\n",
            4,
            PassBy::Auto,
            failed("guest crashed: triple fault"),
        ),
        (
            "",
            "minivmm: internal error: x\n",
            6,
            PassBy::Auto,
            failed("minivmm failed: internal error: x"),
        ),
        (
            "",
            "minivmm: --kernel x: no\n",
            2,
            PassBy::Auto,
            failed("minivmm: --kernel x: no"),
        ),
        (
            "",
            "minivmm: --engine kvm: no /dev/kvm\n",
            2,
            PassBy::Auto,
            Verdict::Absent("--engine kvm: no /dev/kvm".into()),
        ),
    ] {
        let cell = cell(console, errors, status, pass);
        assert_eq!(cell.verdict, verdict, "{console:?} {errors:?} {status}");
    }
}

// covers: matrix/long-mode
#[test]
fn of_all_models_those_without_64_bit_mode_skip_a_kernel_that_needs_it() {
    let says = format!("minivmm: --cpu-model p6: {NEEDS_LONG_MODE}: choose a model");
    let plan = |one_of_all| Plan {
        guest: "g".into(),
        model: "p6".into(),
        engine: "soft".into(),
        arguments: ["-c", "echo \"$1\" >&2; exit 2", "sh", &says]
            .map(OsString::from)
            .to_vec(),
        one_of_all,
        pass: PassBy::Auto,
        timeout: Duration::from_secs(60),
        command: false,
        input: None,
        skip: None,
    };
    let skipped = run(Path::new("sh"), &plan(true)).verdict;
    assert_eq!(skipped, Verdict::Skipped("the kernel needs 64-bit mode".into()));
    // Who asks for this very model is told that it cannot be.
    let named = run(Path::new("sh"), &plan(false)).verdict;
    assert!(matches!(named, Verdict::Failed(why) if why.contains(NEEDS_LONG_MODE)));
}

// covers: matrix/crash
#[test]
fn what_a_failed_cell_said_is_kept_also_the_tests_before_its_end() {
    let console = "TAP version 14\n1..3\nok 1 - a\n";
    let dead = cell(
        console,
        "minivmm: guest crashed: triple fault\nRIP 0000000000001234\n",
        4,
        PassBy::Auto,
    );
    assert!(
        dead.log.contains("ok 1 - a") && dead.log.contains("RIP 0000000000001234"),
        "{}",
        dead.log
    );
    assert_eq!((dead.points.len(), dead.counts()), (1, [1, 0, 0]));
    let long = "line\n".repeat(100);
    assert!(
        cell(&long, "", 3, PassBy::Auto)
            .log
            .starts_with("(40 lines before)\nline\n")
    );
    assert_eq!(cell(&long, "", 1, PassBy::Auto).log, "");
}

// covers: matrix/crash
#[test]
fn a_process_that_dies_or_cannot_be_run_fails_its_cell() {
    let plan = Plan {
        guest: "g".into(),
        model: "m".into(),
        engine: "soft".into(),
        arguments: ["-c", "kill -SEGV $$"].map(OsString::from).to_vec(),
        one_of_all: false,
        pass: PassBy::Auto,
        timeout: Duration::from_secs(60),
        command: false,
        input: None,
        skip: None,
    };
    let Verdict::Failed(why) = run(Path::new("sh"), &plan).verdict else {
        panic!("a process that died");
    };
    assert!(why.contains("SIGSEGV"), "{why}");
    let Verdict::Failed(why) = run(Path::new("/nowhere/minivmm"), &plan).verdict else {
        panic!("a program that is not there");
    };
    assert!(why.starts_with("cannot run /nowhere/minivmm"), "{why}");
}
