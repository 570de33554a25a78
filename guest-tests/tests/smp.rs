//! Several CPUs: interrupts between them in every mode, and Linux on all of them.

use guest_tests::{Outcome, SMP, in_minivmm, in_qemu, linux, linux_in_minivmm, run};
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);

/// Whom a message reached, as a bitmap of three CPUs, and the same in QEMU where QEMU has it.
struct Row(&'static str, u32, InQemu);

#[derive(PartialEq)]
enum InQemu {
    Same,
    /// Not modelled there, or chosen otherwise where the manual leaves the choice.
    No,
}
use InQemu::{No, Same};

/// SDM Vol. 3A 11.6.1 "Interrupt Command Register (ICR)", 11.6.2 "Determining IPI Destination".
const XAPIC: &[Row] = &[
    Row("boot", 1, Same),
    Row("id", 0, Same),
    Row("starts", 2, Same),
    Row("locked", 15000, Same),
    Row("turns", 60, Same),
    Row("tsc.back", 0, No),
    Row("xapic.physical", 0b010, Same),
    Row("xapic.physical.self", 0b001, Same),
    Row("xapic.physical.nobody", 0, Same),
    Row("xapic.physical.broadcast", 0b111, Same),
    Row("xapic.shorthand.self", 0b001, Same),
    Row("xapic.shorthand.all", 0b111, Same),
    Row("xapic.shorthand.others", 0b110, Same),
    Row("xapic.nmi", 0b100, Same),
    Row("xapic.nmi.others", 0b110, Same),
    Row("xapic.flat.one", 0b010, Same),
    Row("xapic.flat.two", 0b110, Same),
    Row("xapic.flat.all", 0b111, Same),
    Row("xapic.flat.nobody", 0, Same),
    Row("xapic.flat.nmi", 0b100, Same),
    Row("xapic.lowest", 0b100, No),
    Row("xapic.lowest.physical", 0b010, Same),
    Row("xapic.cluster.first", 0b011, Same),
    Row("xapic.cluster.member", 0b010, Same),
    Row("xapic.cluster.second", 0b100, Same),
    Row("xapic.cluster.all", 0b111, No),
    Row("init.deaf", 0, Same),
    Row("init.started", 0b010, Same),
    Row("start.running", 0, Same),
];

/// 11.12.9 "ICR Operation in x2APIC Mode", 11.12.10 "Determining IPI Destination in x2APIC Mode", 11.12.11 "SELF IPI Register".
const X2APIC: &[Row] = &[
    Row("x2apic.physical", 0b010, No),
    Row("x2apic.physical.broadcast", 0b111, No),
    Row("x2apic.physical.nobody", 0, No),
    Row("x2apic.logical.one", 0b010, No),
    Row("x2apic.logical.two", 0b110, No),
    Row("x2apic.logical.nobody", 0, No),
    Row("x2apic.shorthand.self", 0b001, No),
    Row("x2apic.shorthand.all", 0b111, No),
    Row("x2apic.shorthand.others", 0b110, No),
    Row("x2apic.nmi", 0b100, No),
    Row("x2apic.self", 0b001, No),
];

#[track_caller]
fn holds(outcome: &Outcome, rows: &[Row], who: &str) {
    for Row(name, value, _) in rows {
        let said = outcome.fact(name);
        assert_eq!(
            said,
            Some(&*format!("{value:08x}")),
            "{name} on {who}\n{}",
            outcome.console
        );
    }
}

/// The guest is guest-tests/guests/smp.c.
// covers: smp/ipi, smp/init-sipi, smp/tsc, smp/turns
#[test]
fn interrupts_reach_whom_they_name_on_every_kind_of_apic() {
    for (model, x2apic) in [
        ("p6", false),
        ("netburst", false),
        ("core2", false),
        ("westmere", true),
        ("snowridge", true),
        ("sapphirerapids", true),
    ] {
        let mut command = in_minivmm(SMP);
        command.args(["--cpus", "3", "--cmdline", "3", "--cpu-model", model]);
        let guest = run(&mut command, LIMIT).must_end_with(1);
        holds(&guest, XAPIC, model);
        match x2apic {
            true => holds(&guest, X2APIC, model),
            false => assert_eq!(guest.fact("x2apic.physical"), None, "{model} has no x2APIC"),
        }
    }
    let guest = run(in_qemu(SMP).args(["-smp", "3", "-append", "3"]), LIMIT).must_end_with(1);
    let theirs: Vec<Row> = XAPIC
        .iter()
        .filter(|row| row.2 == Same)
        .map(|Row(name, value, _)| Row(name, *value, Same))
        .collect();
    holds(&guest, &theirs, "QEMU");
}

// covers: smp/option
#[test]
fn there_may_be_255_cpus() {
    for (model, cpus) in [("p6", 255), ("haswell", 64), ("sapphirerapids", 255)] {
        let count = cpus.to_string();
        let mut command = in_minivmm(SMP);
        command.args(["--cpus", &count, "--cmdline", &count, "--cpu-model", model]);
        let guest = run(&mut command, LIMIT).must_end_with(1);
        for (fact, value) in [
            ("starts", cpus - 1),
            ("locked", cpus * 5000),
            ("turns", cpus * 20),
            ("tsc.back", 0),
            ("others", cpus - 1),
        ] {
            assert_eq!(guest.fact(fact), Some(&*format!("{value:08x}")), "{fact} on {model}");
        }
    }
}

fn boot(model: &str, cpus: u32) -> Outcome {
    let mut command = linux_in_minivmm("console=ttyS0 panic=-1 minivmm.script=smp");
    command.args(["--cpu-model", model, "--cpus", &cpus.to_string(), "--stats"]);
    run(&mut command, LIMIT).must_end_with(0)
}

/// The script's own lines are in guest-tests/linux/scripts/smp.
fn debian(model: &str, cpus: u32) {
    let guest = boot(model, cpus);
    let console = &guest.console;
    let host = Command::new("md5sum").arg(&linux().sample).output().unwrap();
    let md5 = String::from_utf8(host.stdout).unwrap();
    let md5 = md5.split(' ').next().unwrap();
    assert!(
        console.contains(&format!("smp: Brought up 1 node, {cpus} CPUs\n")),
        "{model}\n{console}"
    );
    assert_eq!(guest.fact("smp: cpus"), Some(&*cpus.to_string()), "{model}\n{console}");
    for cpu in 0..cpus {
        let line = format!("smp: cpu {cpu} computes {md5}\n");
        assert!(console.contains(&line), "{model}: {line}{console}");
    }
    assert!(console.contains("smp: all holds\n"), "{model}\n{console}");
    assert!(
        console.contains("minivmm-guest: script smp ended with status 0\n"),
        "{model}\n{console}"
    );
    // One core each, in one package, and nobody's clock is another than the others'.
    assert!(
        console.contains(&format!("{cpus} cpu cores\t: {cpus}\n")),
        "{model}\n{console}"
    );
    for cpu in 0..cpus {
        assert!(
            console.contains(&format!("1 apicid\t\t: {cpu}\n")),
            "{model}\n{console}"
        );
    }
    assert!(console.contains("\ntsc\n"), "the clock source of {model}\n{console}");
    for word in [
        "Oops",
        "BUG:",
        "WARNING:",
        "Kernel panic",
        "Call Trace",
        "unstable",
        "skew",
        "[Firmware Bug]",
    ] {
        assert!(!console.contains(word), "{word} on {model}\n{console}");
    }
    // Every CPU has had interrupts of its timer and calls from the others.
    for name in ["LOC:", "CAL:"] {
        let line = guest.fact(&format!(" {name}")).or_else(|| guest.fact(name));
        let counts: Vec<&str> = line
            .unwrap_or_default()
            .split_whitespace()
            .take(cpus as usize)
            .collect();
        assert_eq!(counts.len(), cpus as usize, "{name} on {model}\n{console}");
        assert!(
            counts.iter().all(|count| count.parse::<u64>().is_ok_and(|n| n > 0)),
            "{name} {counts:?} on {model}"
        );
    }
}

/// Westmere has no leaf 15H: the kernel calibrates its clocks against the PIT.
// covers: smp/debian
#[test]
fn debian_runs_on_several_cpus_of_westmere() {
    debian("westmere", 2);
    debian("westmere", 4);
}

// covers: smp/debian
#[test]
fn debian_runs_on_several_cpus_of_skylake_server() {
    debian("skylake-server", 2);
    debian("skylake-server", 4);
}

// covers: smp/debian
#[test]
fn debian_runs_on_several_cpus_of_sapphirerapids() {
    debian("sapphirerapids", 2);
    debian("sapphirerapids", 4);
}

// covers: smp/determinism
#[test]
fn a_run_with_several_cpus_repeats_to_the_bit() {
    let hash = |guest: &Outcome| {
        let line = guest.errors.lines().find(|line| line.starts_with("state hash:"));
        line.map(str::to_string).unwrap_or_else(|| panic!("{}", guest.errors))
    };
    let (first, second) = (boot("haswell", 3), boot("haswell", 3));
    assert!(first.console.contains("smp: all holds"), "{}", first.console);
    assert_eq!(first.console, second.console);
    assert_eq!(hash(&first), hash(&second));
    let steps = |guest: &Outcome| {
        let line = guest.errors.lines().find(|line| line.starts_with("by CPU:"));
        line.map(str::to_string).unwrap_or_default()
    };
    assert_eq!(steps(&first), steps(&second));
    assert_eq!(steps(&first).split_whitespace().count(), 2 + 3, "{}", steps(&first));
}
