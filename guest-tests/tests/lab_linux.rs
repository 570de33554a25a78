//! Linux on a real kvm-amd, in the lab, with a unit of ours that it turns on: the machine moves to the engine and back.

use std::time::Duration;

use guest_tests::lab::{Host, Job, handovers, jobs};
use guest_tests::{linux, run, scripts_in_linux};

/// Of guest-tests/linux/tools: perf records with Intel PT, decodes, and counts what the program has done.
const SCRIPT: &str = "perf-pt";
const MODEL: &str = "sapphirerapids";

/// What the script says of each of its checks.
fn facts(said: &str) -> Vec<&str> {
    let lines = said.lines().map(str::trim);
    lines
        .filter(|line| line.split_once(": ").is_some_and(|(by, _)| by == SCRIPT))
        .collect()
}

// covers: 6/lab-linux-unit
#[test]
fn linux_traces_with_our_intel_pt_and_goes_on_natively() {
    // After the trace an ordinary script, natively again.
    let cmdline = format!("console=ttyS0 quiet panic=-1 minivmm.script={SCRIPT},nothing");
    let options = format!("--engine kvm --cpus 2 -m 512M --cpu-model {MODEL} --pt=emulated --stats --cmdline");
    let job = Job::new(options.split(' ').map(str::to_string).chain([cmdline]))
        .file("--kernel", &linux().kernel)
        .file("--initrd", &linux().tools);
    let ended = jobs(Host::Amd, &[job]).unwrap_or_else(|why| panic!("{why}"));
    let said = &ended[0].said;
    assert_eq!(ended[0].status, 0, "{said}");
    for script in [SCRIPT, "nothing"] {
        let line = format!("minivmm-guest: script {script} ended with status 0");
        assert!(said.contains(&line), "no '{line}': {said}");
    }
    assert!(handovers(&ended[0]).is_some_and(|count| count > 0), "{said}");

    let ours = run(
        scripts_in_linux(&[SCRIPT]).args(["--cpu-model", MODEL, "--cpus", "2"]),
        Duration::from_secs(300),
    );
    let ours = ours.must_end_with(0);
    assert_eq!(
        facts(said),
        facts(&ours.console),
        "the trace decodes to what the engine's does"
    );
    assert_eq!(facts(said).last(), Some(&"perf-pt: all holds"), "{said}");
}
