//! Runs are the same whether blocks are translated or not: steps, and a hash of memory and of every register of every CPU and unit.

use guest_tests::bare::{folder, image};
use guest_tests::{Outcome, in_minivmm, linux_in_minivmm, run};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);

/// What must be alike of two runs: the console, and what `--stats` says of the guest.
fn left(outcome: &Outcome) -> (String, Vec<String>) {
    let kept = |line: &&str| {
        ["state hash:", "accesses:", "delivered:"]
            .iter()
            .any(|head| line.starts_with(head))
    };
    let mut lines: Vec<String> = outcome.errors.lines().filter(kept).map(str::to_string).collect();
    let steps = outcome.errors.lines().find_map(|line| line.strip_prefix("steps:"));
    // The speed comes behind the numbers.
    lines.extend(steps.and_then(|line| line.split(')').next()).map(str::to_string));
    assert_eq!(lines.len(), 4, "{}", outcome.errors);
    (outcome.console.clone(), lines)
}

/// Runs a guest with the translator off, as it is by itself, and with whatever has run once translated.
fn same_however_translated(what: &str, command: impl Fn() -> Command) {
    let run_with = |how: &str| run(command().args(["--stats", "--translate", how]), LIMIT);
    let off = run_with("off");
    assert!(!off.errors.contains("translated:"), "{}", off.errors);
    for how in ["on", "after=1"] {
        let on = run_with(how);
        assert!(on.errors.contains("translated:"), "{}", on.errors);
        assert_eq!(left(&on), left(&off), "{what}, --translate {how}");
        assert_eq!(on.status, off.status, "{what}, --translate {how}");
    }
}

/// Guests of each kind by default, all of them on all 64-bit models in the full form.
// covers: translate/guests
#[test]
fn guest_tests_leave_the_same_state() {
    const MODELS: [&str; 6] = [
        "haswell",
        "skylake-server",
        "sapphirerapids",
        "westmere",
        "snowridge",
        "alderlake",
    ];
    const SOME: [(&str, &str); 6] = [
        ("dr", "haswell"),
        ("lbr", "skylake-server"),
        ("pebs", "icelake-server"),
        ("pt_packets", "sapphirerapids"),
        ("pmu", "alderlake"),
        ("bts", "westmere"),
    ];
    let of = |name: &str, model: &str| {
        let kernel = image(name);
        same_however_translated(&format!("{name} on {model}"), || {
            let mut command = in_minivmm(&kernel);
            command.args(["--engine", "soft", "--cpu-model", model]);
            command
        });
    };
    if !guest_tests::full() {
        println!("left out: all guests on six models, which the full form runs");
        return SOME.iter().for_each(|(name, model)| of(name, model));
    }
    let mut names: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "elf"))
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_string()))
        // Those wait for CPUs that are not there.
        .filter(|name| !name.contains("smp"))
        .collect();
    names.sort();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        MODELS.iter().for_each(|model| of(&name, model));
    }
}

/// Two CPUs, whose turns end at steps.
// covers: translate/smp
#[test]
fn several_cpus_leave_the_same_state() {
    let kernel = image("smp");
    same_however_translated("smp", || {
        let mut command = in_minivmm(&kernel);
        command.args(["--engine", "soft", "--cpu-model", "skylake-server", "--cpus", "3"]);
        command
    });
}

/// A whole boot; on every 64-bit model in the full form.
// covers: translate/boot
#[test]
fn a_boot_of_linux_leaves_the_same_state() {
    let models: &[&str] = match guest_tests::full() {
        true => &[
            "core2",
            "westmere",
            "sandybridge",
            "haswell",
            "skylake-server",
            "icelake-server",
            "snowridge",
            "alderlake",
        ],
        false => &["sapphirerapids"],
    };
    for model in models {
        same_however_translated(model, || {
            let mut command = linux_in_minivmm("console=ttyS0 panic=-1 quiet minivmm.script=nothing");
            command.args(["--engine", "soft", "--cpu-model", model]);
            command
        });
    }
}
