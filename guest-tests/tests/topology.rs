//! How Linux, lscpu and hwloc see the CPUs of a machine that is told how they are arranged.

use std::process::{Command, Stdio};

use guest_tests::{linux, minivmm, skipped};

/// What a program of the host's says in a guest with CPUs that are arranged so.
fn in_a_guest(cpus: &str, model: &str, command: &[&str]) -> String {
    let mut run = Command::new(minivmm());
    run.args(["run", "--cpus", cpus, "--cpu-model", model, "--kernel"])
        .arg(&linux().kernel);
    let output = run.arg("--").args(command).stdin(Stdio::null()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

// covers: smp/topology
#[test]
fn lscpu_tells_packages_cores_and_threads_and_their_caches() {
    let said = in_a_guest(
        "8,sockets=2,cores=2,threads=2",
        "icelake-server",
        &["lscpu", "-p=CPU,CORE,SOCKET,CACHE"],
    );
    let rows: Vec<&str> = said.lines().filter(|line| !line.starts_with('#')).collect();
    // L1d, L1i and L2 of a core, L3 of a package.
    let expected: Vec<String> = (0..8)
        .map(|cpu| {
            let (core, package) = (cpu / 2, cpu / 4);
            format!("{cpu},{core},{package},,{core},{core},{core},{package}")
        })
        .collect();
    assert_eq!(rows, expected, "{said}");
}

// covers: smp/topology
#[test]
fn hwloc_draws_the_tree() {
    const TEST: &str = "hwloc_draws_the_tree";
    const LSTOPO: &str = "/usr/bin/lstopo-no-graphics";
    if !std::path::Path::new(LSTOPO).is_file() {
        return skipped(TEST, "there is no lstopo-no-graphics here");
    }
    let tree = ["--of", "console", "--no-io", "--no-collapse"];
    let said = in_a_guest(
        "8,cores=4,threads=2,sockets=1",
        "haswell",
        &[&[LSTOPO], &tree[..]].concat(),
    );
    let count = |what: &str| said.matches(what).count();
    assert_eq!(
        [
            count("Package L#"),
            count("L3 L#"),
            count("L2 L#"),
            count("Core L#"),
            count("PU L#")
        ],
        [1, 1, 4, 4, 8],
        "{said}"
    );
    let said = in_a_guest("4,sockets=2", "core2", &[&[LSTOPO], &tree[..]].concat());
    let count = |what: &str| said.matches(what).count();
    // Two cores share a second level, and there is no third.
    assert_eq!(
        [
            count("Package L#"),
            count("L3 L#"),
            count("L2 L#"),
            count("Core L#"),
            count("PU L#")
        ],
        [2, 0, 2, 4, 4],
        "{said}"
    );
}
