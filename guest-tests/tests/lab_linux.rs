//! Linux on a real kvm-amd, in the lab, with a unit of ours that it turns on: the machine moves to the engine and back.

use std::time::Duration;

use guest_tests::lab::{Host, Job, handovers, jobs, share_in_engine};
use guest_tests::{linux, run, scripts_in_linux};

/// A script of guest-tests/linux/tools that has perf record with a unit and checks what it has, the model and the units. The short
/// form runs the first.
const CASES: [(&str, &str, &[&str]); 3] = [
    ("perf-pt", "sapphirerapids", &["--pt=emulated"]),
    ("perf-lbr", "haswell", &["--lbr=emulated", "--pmu=emulated"]),
    // On parts with Meltdown Linux has no intel_bts while page tables are isolated.
    (
        "perf-bts",
        "sapphirerapids",
        &["--bts=emulated", "--pmu=emulated", "--pt=emulated"],
    ),
];

/// What a script says of each of its checks.
fn facts<'a>(said: &'a str, script: &str) -> Vec<&'a str> {
    let lines = said.lines().map(str::trim);
    lines
        .filter(|line| line.split_once(": ").is_some_and(|(by, _)| by == script))
        .collect()
}

// covers: lab/linux-unit
#[test]
fn linux_records_with_our_units_and_goes_on_natively() {
    let job = |&(script, model, units): &(&str, &str, &[&str])| {
        // After the records an ordinary script, natively again. This KVM delivers no breakpoints, so that the watchdog's counter
        // would keep the guest in the engine.
        let cmdline = format!("console=ttyS0 quiet panic=-1 nowatchdog minivmm.script={script},nothing");
        let options = format!("--engine kvm --cpus 2 -m 512M --cpu-model {model} --stats --cmdline");
        let units = units.iter().map(|unit| unit.to_string());
        Job::new(options.split(' ').map(str::to_string).chain([cmdline]).chain(units))
            .file("--kernel", &linux().kernel)
            .file("--initrd", &linux().tools)
    };
    let cases = match guest_tests::full() {
        true => &CASES[..],
        false => {
            println!("left out: LBR and BTS, which the full form has");
            &CASES[..1]
        }
    };
    let all: Vec<Job> = cases.iter().map(job).collect();
    let ended = jobs(Host::Amd, &all).unwrap_or_else(|why| panic!("{why}"));
    for ((script, model, _), ended) in cases.iter().zip(&ended) {
        let said = &ended.said;
        assert_eq!(ended.status, 0, "{said}");
        for script in [script, "nothing"] {
            let line = format!("minivmm-guest: script {script} ended with status 0");
            assert!(said.contains(&line), "no '{line}': {said}");
        }
        assert!(handovers(ended).is_some_and(|count| count > 0), "{said}");
        let share = share_in_engine(ended).unwrap_or(1.0);
        println!("{script}: {:.1} % of the time in the engine", share * 100.0);
        let ours = run(
            scripts_in_linux(&[script]).args(["--cpu-model", model, "--cpus", "2"]),
            Duration::from_secs(300),
        );
        let ours = ours.must_end_with(0);
        assert_eq!(
            facts(said, script),
            facts(&ours.console, script),
            "{script}: the records are those of the engine's run"
        );
        assert_eq!(
            facts(said, script).last(),
            Some(&&*format!("{script}: all holds")),
            "{said}"
        );
    }
}
