//! Runs are the same whether vector instructions are the host's own, composed of those that every host has, or computed by tables: what
//! Linux and a program full of them come to, steps, and a hash of memory and of every register of every CPU and unit.

use std::fs;
use std::process::Command;
use std::time::Duration;

use guest_tests::bare::image;
use guest_tests::{Folder, Outcome, in_minivmm, linux_in_minivmm, run, skipped};

const LIMIT: Duration = Duration::from_secs(600);

/// What must be alike of two runs: the console, steps and hashes.
fn left(outcome: &Outcome) -> (String, Vec<String>) {
    let kept = |line: &&str| line.starts_with("state hash:") || line.starts_with("accesses:");
    let mut lines: Vec<String> = outcome.errors.lines().filter(kept).map(str::to_string).collect();
    let steps = outcome.errors.lines().find_map(|line| line.strip_prefix("steps:"));
    // The speed comes behind the numbers.
    lines.extend(steps.and_then(|line| line.split(')').next()).map(str::to_string));
    assert_eq!(lines.len(), 3, "{}", outcome.errors);
    (outcome.console.clone(), lines)
}

/// Runs a guest in each way; the console of the one by tables.
fn same_by_tables(what: &str, command: impl Fn() -> Command) -> String {
    let [host, portable, tables] = ["host", "portable", "tables"].map(|how| {
        let mut command = command();
        run(command.args(["--engine", "soft", "--stats", "--vector", how]), LIMIT)
    });
    for (other, how) in [(&portable, "portable"), (&tables, "tables")] {
        assert_eq!(left(other), left(&host), "{what} {how}");
        assert_eq!(other.status, host.status, "{what} {how}");
    }
    tables.console
}

/// A static program of AVX2, FMA, F16C, AES, PCLMULQDQ and SHA in Linux. In the full form on more models that have these, and on some
/// that have not, where the program gets #UD.
// covers: portable/linux
#[test]
fn linux_and_a_program_of_vectors_leave_the_same_state() {
    let avx2 = std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("sha");
    if !avx2 {
        skipped(
            "linux_and_a_program_of_vectors_leave_the_same_state",
            "this host has not got AVX2 and SHA to compare with",
        );
        return;
    }
    let folder = Folder::new("portable");
    let inject = folder.join("inject");
    fs::create_dir(&inject).unwrap();
    let program = inject.join("vectors");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/portable.c");
    let made = Command::new("gcc")
        .args(["-O3", "-static", "-frounding-math", "-ffp-contract=off"])
        .args(["-mavx2", "-mfma", "-mf16c", "-maes", "-mpclmul", "-msha", "-o"])
        .arg(&program)
        .args([source, "-lm"])
        .status();
    assert!(made.expect("gcc (Debian: gcc)").success());
    let output = Command::new(&program).output().unwrap();
    let native = String::from_utf8(output.stdout).unwrap();
    assert!(native.lines().count() == 25, "{native}");
    folder.script("inject/run", "#!/bin/sh\n/inject/vectors || echo FAILED $?\n");
    let boot = |model: &str| {
        let mut boot = linux_in_minivmm("console=ttyS0 quiet panic=-1");
        boot.args(["--cpu-model", model, "--inject"]).arg(&inject);
        boot
    };
    let with_all: &[&str] = match guest_tests::full() {
        true => &["alderlake", "icelake-server", "sapphirerapids"],
        false => &["alderlake"],
    };
    for model in with_all {
        let console = same_by_tables(model, || boot(model)).replace('\r', "");
        assert!(
            console.contains(&native),
            "{model}: as on the host\n{native}\n{console}"
        );
    }
    if guest_tests::full() {
        for model in ["core2", "westmere", "haswell", "skylake-server", "snowridge"] {
            same_by_tables(model, || boot(model));
        }
    }
}

/// Guests of other kinds, as far as they touch vectors: their start-up code and FXSAVE areas.
// covers: portable/guests
#[test]
fn guest_tests_leave_the_same_state() {
    for (name, model) in [("pebs", "icelake-server"), ("bts", "westmere")] {
        let kernel = image(name);
        same_by_tables(&format!("{name} on {model}"), || {
            let mut command = in_minivmm(&kernel);
            command.args(["--cpu-model", model]);
            command
        });
    }
}
