//! A whole boot of Linux.

use minivmm::StopReason;
use std::process::Command;

use guest_tests::observer::Unit;
use guest_tests::{linux, root};
use minivmm::{Console, End, MachineConfig, Run};
use x86::model::{CpuModel, MODELS};

use crate::judge::{self, Judge, Verdict, WINDOW};

/// ACPI's port by which Linux switches the machine off.
const POWER: u16 = 0x604;

/// What is judged in a boot of its own: a model, and units that can be on together.
type Trial = (&'static CpuModel, Vec<Unit>);

/// The units that a model has, in sets that can be on together: where its trace keeps the last-branch records still, in two.
pub fn sets(model: &CpuModel) -> Vec<Vec<Unit>> {
    let units = &model.units;
    let mut rest = Vec::new();
    if units.lbr.is_some() {
        rest.push(Unit::Lbr);
    }
    if model.features().ds() && units.ds.is_some_and(|ds| ds.bts) {
        rest.push(Unit::Bts);
    }
    // The P6 family has two counters without the fixed ones.
    let counts = units
        .pmu
        .is_some_and(|pmu| pmu.fixed > 0)
        .then_some(Unit::BranchCounter);
    match units.pt {
        None => vec![rest.into_iter().chain(counts).collect()],
        Some(pt) if pt.excludes_lbr => vec![
            rest.into_iter().chain(counts).collect(),
            [Unit::Pt].into_iter().chain(counts).collect(),
        ],
        Some(_) => vec![[Unit::Pt].into_iter().chain(rest).chain(counts).collect()],
    }
}

/// All units on all models that run 64-bit code.
fn trials() -> Vec<Trial> {
    let models = MODELS.iter().copied().filter(|model| model.features().lm());
    models
        .flat_map(|model| sets(model).into_iter().map(move |on| (model, on)))
        .collect()
}

/// All of them, or the one whose turn it is: by the commit, so that it is the same for everybody who looks at that.
fn chosen() -> Vec<Trial> {
    let mut trials = trials();
    if let Ok(name) = std::env::var("MINIVMM_ORACLE") {
        trials.retain(|(model, _)| model.name == name);
        return trials;
    }
    if guest_tests::full() {
        return trials;
    }
    let mut git = Command::new("git");
    let output = git
        .args(["rev-parse", "--short=8", "HEAD"])
        .current_dir(root())
        .output();
    let commit = output.ok().and_then(|output| String::from_utf8(output.stdout).ok());
    let number = commit.and_then(|text| usize::from_str_radix(text.trim(), 16).ok());
    // Without a commit it is the one with the most units.
    let last = trials.len() - 1;
    let turn = number.map_or(last, |number| number % trials.len());
    vec![trials.swap_remove(turn)]
}

fn boot((model, on): &Trial, wanted: std::ops::Range<u64>) -> Verdict {
    let config = MachineConfig {
        initrd: vec![linux().initrd.clone().into()],
        cmdline: Some(b"console=ttyS0 panic=-1 minivmm.script=nothing".to_vec()),
        model,
        ..MachineConfig::new(&linux().kernel)
    };
    let mut vm = Run::new(&config).unwrap();
    let (judge, verdict) = Judge::new(model, on, judge::End::Port(POWER), wanted);
    assert!(vm.machine().observe(0, Some(Box::new(judge))));
    let mut console = Console::open(&config.serial, &[], vm.line()).unwrap();
    let end = vm.run(&mut console).unwrap();
    assert!(
        matches!(end, StopReason::Ended(End::PowerOff)),
        "{}: {end:?}",
        model.name
    );
    vm.machine().observe(0, None);
    std::mem::take(&mut verdict.lock().unwrap())
}

/// Says where the streams differ: the window is run again.
fn diff(trial: &Trial, window: u64) -> String {
    let again = boot(trial, window..window + WINDOW);
    let [log, ours, libipt] = &again.ips;
    [("our decoder", ours), ("libipt", libipt)]
        .map(|(name, other)| {
            let at = log.iter().zip(other).take_while(|(a, b)| a == b).count();
            let around = |ips: &Vec<u64>| {
                format!(
                    "{:x?}",
                    &ips[at.saturating_sub(8).min(ips.len())..(at + 8).min(ips.len())]
                )
            };
            let number = window + at as u64;
            format!(
                "{name}: from instruction {number} on, {} logged, {} decoded\n  logged  {}\n  decoded {}\n",
                log.len(),
                other.len(),
                around(log),
                around(other)
            )
        })
        .concat()
}

// covers: trace/oracle-boot
#[test]
fn a_whole_boot_as_the_units_tell_it_is_what_ran() {
    for trial in chosen() {
        let (model, on) = &trial;
        println!("whole boot on {}: {on:?}", model.name);
        let start = std::time::Instant::now();
        let found = boot(&trial, 0..0);
        let differ = found.differ.map(|window| diff(&trial, window)).unwrap_or_default();
        assert_eq!(found.wrong, None, "{}\n{differ}", model.name);
        println!(
            "{}: {} s, {} instructions, {} taken branches, {} bytes of packets in {} chunks, {} changes of code, {} stacks and {} counts compared",
            model.name,
            start.elapsed().as_secs(),
            found.instructions,
            found.taken,
            found.packets,
            found.chunks,
            found.changes,
            found.stacks,
            found.counts
        );
        assert!(found.ended, "{}: Linux did not switch off", model.name);
        let [log, ours, libipt] = found.hashes;
        if on.contains(&Unit::Pt) {
            assert_eq!([ours, libipt], [log, log], "{}", model.name);
            assert!(
                found.packets > 10_000_000 && found.chunks > 80,
                "{}: {found:?}",
                model.name
            );
        }
        if on.contains(&Unit::Lbr) {
            assert!(found.stacks > 20, "{}: {found:?}", model.name);
        }
        assert!(
            found.instructions > 1_000_000_000 && found.taken > 50_000_000 && found.counts > 20,
            "{}: {found:?}",
            model.name
        );
    }
}
