//! What people look into a machine with, in a guest: Debian's own perf, gdb, msr-tools, turbostat, cpupower and pqos, in Debian's own
//! kernel; and programs whose output does not depend on the machine.
//!
//! The scripts are in guest-tests/linux/tools; each checks what its tool says, and says it again here.

use guest_tests::{Outcome, linux, linux_work, run, scripts_in_linux_of, scripts_in_linux_with};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(900);

/// Boots with these options, runs the scripts, and fails unless all of them hold and the kernel has nothing to complain of.
fn hold(options: &[&str], scripts: &[&str]) -> Outcome {
    hold_of(&linux().tools, options, scripts)
}

/// The same with another initramfs.
fn hold_of(initrd: &Path, options: &[&str], scripts: &[&str]) -> Outcome {
    let guest = run(scripts_in_linux_of(initrd, "", scripts).args(options), LIMIT).must_end_with(0);
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
        // Twice the last level of sapphirerapids is 210 MiB.
        hold(&["--cpu-model", model, "--memory", "1G"], &["perf-caches", "perf-mem"]);
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
        true => &[
            "westmere",
            "sandybridge",
            "broadwell",
            "skylake-server",
            "icelake-server",
            "alderlake",
        ][..],
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
        hold(&["--cpu-model", "icelake-server", "--cpus", "2"], &["resctrl"]);
    } else {
        println!("left out: a second run, which has the same numbers, and two CPUs, in the full form");
    }
}

/// Every model with long mode.
fn models_of_64_bits() -> impl Iterator<Item = &'static str> {
    let models = x86::model::MODELS.iter();
    models.filter(|model| model.features().lm()).map(|model| model.name)
}

/// turbostat and cpupower find the registers that they take for granted on a model, pqos those of the resource director.
// covers: linux-guest/turbostat, cpu/power-msrs
// covers: linux-guest/cpupower
// covers: linux-guest/pqos
#[test]
fn power_and_cache_tools_find_their_registers() {
    hold(&["--cpu-model", "icelake-server"], &["turbostat", "cpupower", "pqos"]);
    if !guest_tests::full() {
        println!(
            "left out: turbostat and cpupower on the other models since westmere, and pqos on those with an L3 mask, in the full form"
        );
        return;
    }
    for model in ["broadwell", "skylake-server", "sapphirerapids"] {
        hold(&["--cpu-model", model], &["turbostat", "cpupower", "pqos"]);
    }
    for model in ["westmere", "sandybridge", "haswell", "snowridge", "alderlake"] {
        hold(&["--cpu-model", model], &["turbostat", "cpupower"]);
    }
}

/// What the compiler, the assembler and OpenSSL make in a guest is what the same programs make on the host, whose processor is another:
/// they choose their code by CPUID.
// covers: linux-guest/compute
#[test]
fn a_compilation_and_digests_are_those_of_the_host() {
    if !guest_tests::full() {
        println!("left out: a compilation and digests on every 64-bit model, in the full form");
        return;
    }
    let (initrd, root) = linux_work();
    let expected = on_host(&root);
    assert_eq!(expected.len(), 22, "{expected:?}");
    for model in models_of_64_bits() {
        let guest = hold_of(&initrd, &["--cpu-model", model, "-m", "1G"], &["compute"]);
        for line in &expected {
            let lines: Vec<_> = guest.console.lines().collect();
            assert!(lines.contains(&line.as_str()), "{model}: no {line}\n{}", guest.console);
        }
    }
}

/// What the script `compute` says, by the same programs on this host.
fn on_host(root: &Path) -> Vec<String> {
    let folder = std::env::temp_dir().join(format!("minivmm-compute-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(root.join("work/image.i"), folder.join("image.i")).unwrap();
    let program = |name: &str, arguments: &[&str]| {
        let mut command = Command::new(root.join("lib64/ld-linux-x86-64.so.2"));
        command
            .args(["--inhibit-cache", "--library-path"])
            .arg(root.join("usr/lib/x86_64-linux-gnu"));
        command.arg(root.join("usr/bin").join(name)).args(arguments);
        let output = command
            .env("OPENSSL_CONF", "/dev/null")
            .current_dir(&folder)
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    program("cc1", &["-quiet", "-fpreprocessed", "-O2", "image.i", "-o", "image.s"]);
    program("as", &["image.s", "-o", "image.o"]);
    let digest = |kind: &str, file: &str| {
        let line = program("openssl", &["dgst", "-r", &format!("-{kind}"), file]);
        let value = line.split(' ').next().unwrap_or_default();
        format!("compute: {kind} of {file} {value}")
    };
    let mut lines = Vec::new();
    for file in ["image.i", "image.s", "image.o"] {
        for kind in ["md5", "sha1", "sha256", "sha512", "sha3-256", "blake2b512", "sm3"] {
            lines.push(digest(kind, file));
        }
    }
    let key = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    let iv = "0123456789abcdef0123456789abcdef";
    let files = ["-in", "image.o", "-out", "image.aes"];
    program(
        "openssl",
        &[&["enc", "-aes-256-ctr", "-K", key, "-iv", iv][..], &files].concat(),
    );
    lines.push(digest("sha256", "image.aes"));
    std::fs::remove_dir_all(&folder).unwrap();
    lines
}

/// stress-ng's stressors of the CPU find what they compute to be right. They are functions for several parts, one of which GCC's run-time
/// library chooses by family and model, so that they would be SIGILL on a model that hid what the part of its number has.
// covers: linux-guest/stress
#[test]
fn stressors_verify_what_they_compute() {
    if !guest_tests::full() {
        println!("left out: stress-ng on every 64-bit model, in the full form");
        return;
    }
    let (initrd, _) = linux_work();
    for model in models_of_64_bits() {
        hold_of(&initrd, &["--cpu-model", model, "-m", "1G"], &["stress"]);
    }
}
