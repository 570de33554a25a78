//! What people look into a machine with, in a guest: Debian's own perf, gdb and msr-tools, in Debian's own kernel.
//!
//! The scripts are in guest-tests/linux/tools; each checks what its tool says, and says it again here.

use guest_tests::{Outcome, linux, run, scripts_in_linux, scripts_in_linux_with};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(900);

/// Boots with these options, runs the scripts, and fails unless all of them hold and the kernel has nothing to complain of.
fn hold(options: &[&str], scripts: &[&str]) -> Outcome {
    let guest = run(scripts_in_linux(scripts).args(options), LIMIT).must_end_with(0);
    guest.must_hold(scripts);
    for word in ["Oops", "BUG:", "WARNING:", "Call Trace", "unchecked MSR access"] {
        assert!(!guest.console.contains(word), "{word}\n{}", guest.console);
    }
    guest
}

/// A demo that takes long to fetch is none.
// covers: linux-guest/tools
#[test]
fn the_tools_are_less_than_100_mb() {
    let len = std::fs::metadata(&linux().tools).unwrap().len();
    assert!(len < 100_000_000, "{len} bytes");
}

/// The demo's trace, exact counts, last branches and Intel PT, with the model that `--pt` takes by itself.
// covers: pt/option
// covers: pt/guest-perf
// covers: pt/demo
// covers: linux-guest/tools
// covers: linux-guest/perf-stat
// covers: linux-guest/perf-lbr
// covers: linux-guest/perf-pt
#[test]
fn perf_counts_and_traces_on_the_model_of_pt() {
    let scripts = ["trace", "perf-stat", "perf-lbr", "perf-pt", "perf-ptwrite"];
    let guest = hold(&["--pt", "-v"], &scripts);
    assert!(guest.errors.contains("CPU model alderlake"), "{}", guest.errors);
    assert_eq!(guest.fact("perf-pt: instructions:"), Some("99"), "{}", guest.console);
    let steps = "steps: even odd even odd even even even even";
    assert!(guest.console.contains(steps), "{}", guest.console);
}

/// The script that people run, and what a model of sixteen pairs says to it.
// covers: linux-guest/msr-lbr
#[test]
fn a_loop_s_last_branches_are_read_with_msr_tools_from_another_cpu() {
    hold(
        &["--cpu-model", "skylake-server", "--cpus", "2"],
        &["msr-lbr", "perf-stat", "perf-lbr", "perf-pebs"],
    );
    if guest_tests::full() {
        hold(&["--cpu-model", "westmere"], &["msr-gp"]);
    }
}

/// Branch trace store, event-based sampling and load latency. On parts with Meltdown Linux has no intel_bts event while page
/// tables are isolated.
// covers: linux-guest/perf-bts
// covers: linux-guest/perf-pebs
// covers: linux-guest/perf-mem
// covers: linux-guest/perf-pt
// covers: linux-guest/perf-caches, pmu/llc, pmu/caches, pmu/offcore, pmu/linux-events
// covers: linux-guest/gdb
#[test]
fn branches_samples_loads_and_gdb() {
    hold(
        &["--pt"],
        &[
            "perf-bts",
            "perf-pebs",
            "perf-mem",
            "perf-caches",
            "perf-pt-kernel",
            "gdb-watch",
        ],
    );
    if !guest_tests::full() {
        println!(
            "left out: the same on westmere, and without isolated page tables on skylake-server, which the full form runs"
        );
        return;
    }
    hold(
        &["--cpu-model", "westmere"],
        &["perf-stat", "perf-pebs", "perf-caches", "gdb-watch"],
    );
    for model in ["haswell", "skylake-server", "sapphirerapids"] {
        hold(&["--cpu-model", model], &["perf-caches", "perf-mem"]);
    }
    let scripts = ["perf-bts", "perf-pt", "perf-lbr", "perf-pebs"];
    let mut nopti = scripts_in_linux_with("nopti", &scripts);
    let guest = run(nopti.args(["--cpu-model", "skylake-server"]), LIMIT);
    guest.must_end_with(0).must_hold(&scripts);
}

/// Debian's rr. On haswell Linux itself, from 6.1.11x and 6.11 on, refuses the period of 1 with which rr up to 5.8 tries the counters (HSW11
/// and its like), on silicon as here.
// covers: linux-guest/rr
#[test]
fn rr_records_replays_and_goes_back() {
    let rr = guest_tests::target().join("guest/rr");
    let rr = rr.to_str().unwrap();
    let models = match guest_tests::full() {
        true => &["westmere", "sandybridge", "broadwell", "skylake-server", "icelake-server", "alderlake"][..],
        false => &["skylake-server"],
    };
    for model in models {
        hold(&["--cpu-model", model, "--memory", "1G", "--inject", rr], &["rr"]);
    }
}

/// The resource director's numbers are plausible, and the same in two runs.
// covers: rdt/guest
// covers: linux-guest/resctrl
#[test]
fn resctrl_shows_what_tasks_hold_of_the_cache() {
    let numbers = || {
        let guest = hold(&["--cpu-model", "icelake-server"], &["resctrl"]);
        let lines = guest.console.lines().filter(|line| line.starts_with("resctrl: "));
        lines.map(str::to_string).collect::<Vec<_>>()
    };
    let first = numbers();
    assert!(first.iter().any(|line| line.contains("occupancy")), "{first:?}");
    if guest_tests::full() {
        assert_eq!(first, numbers());
    } else {
        println!("left out: a second run, which has the same numbers, in the full form");
    }
}
