//! The guest tests on CPU models of the software engine, and in QEMU's software CPU.

use std::fmt::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use guest_tests::bare::{names, on_qemu, on_soft};
use guest_tests::tap::{Point, Report};

/// The models of the quick form: of each kind of record, counter and trace one; and one without 64-bit mode.
const QUICK: &[&str] = &[
    "p6",
    "core2",
    "westmere",
    "broadwell",
    "skylake-server",
    "sapphirerapids",
];

fn models() -> Vec<&'static str> {
    if std::env::var_os("MINIVMM_FULL").is_some() {
        x86::model::MODELS.iter().map(|model| model.name).collect()
    } else {
        QUICK.to_vec()
    }
}

fn failures(who: &str, report: &Report) -> String {
    let mut text = String::new();
    for (name, point) in &report.points {
        if let Point::Failed(diagnostic) = point {
            let _ = write!(text, "{who}: {name}\n{diagnostic}");
        }
    }
    text
}

/// Runs every image on every model, two at a time, and gives the reports in that order.
fn cells(models: &[&'static str]) -> Vec<(&'static str, &'static str, Result<Report, String>)> {
    let all: Vec<_> = names()
        .flat_map(|name| models.iter().map(move |model| (name, *model)))
        .collect();
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&(name, model)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let report = on_soft(name, model);
                    done.lock().unwrap().push((name, model, report));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap();
    done.sort_by_key(|(name, model, _)| all.iter().position(|cell| cell == &(*name, *model)));
    done
}

// covers: 7/guest-rt, 7/guest-needs, 7/guest-dr, 7/guest-debugctl, 7/guest-lbr, 7/guest-bts, 7/guest-tsc, 7/guest-cpuid-msrs, 7/guest-pebs, 7/guest-pmu, 7/guest-arch-lbr, 7/guest-pt-packets, 7/guest-pt-filters, 7/guest-pt-topa, 7/guest-rdt, 7/guest-apic
#[test]
fn every_guest_passes_on_every_model() {
    let mut wrong = String::new();
    for (name, model, report) in cells(&models()) {
        let who = format!("{name} on {model}");
        match report {
            Ok(report) => wrong += &failures(&who, &report),
            Err(why) => {
                let _ = writeln!(wrong, "{who}: {why}");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// A test is skipped where the model lacks what it needs, and nowhere else: each runs on some model of the quick set.
// covers: 7/guest-needs
#[test]
fn every_test_runs_somewhere() {
    let mut never: Vec<(&str, String)> = Vec::new();
    let mut ran: Vec<(&str, String)> = Vec::new();
    for (guest, _, report) in cells(QUICK) {
        for (name, point) in report.map(|report| report.points).unwrap_or_default() {
            match point {
                Point::Skipped(_) => never.push((guest, name)),
                _ => ran.push((guest, name)),
            }
        }
    }
    never.retain(|test| !ran.contains(test) && !NOWHERE.contains(&(test.0, test.1.as_str())));
    assert!(never.is_empty(), "{never:?}");
}

/// What no model of the quick set has.
const NOWHERE: &[(&str, &str)] = &[
    // Transactions are shown by `+rtm` alone.
    ("dr", "debug_exceptions_abort_transactions"),
];

/// What QEMU 7.2's software CPU does otherwise than the manual says. Each was looked into; ours does what the manual says.
const QEMU: &[(&str, &str, &str)] = &[
    (
        "dr",
        "any_touched_byte_counts",
        "takes the address as it stands, where the length masks its low bits (18.2.5)",
    ),
    (
        "dr",
        "dr6_shows_the_breakpoints_that_matched",
        "shows the first that matched",
    ),
    ("dr", "dr6_is_sticky", "clears the bits of the breakpoint before"),
    (
        "dr",
        "io_breakpoint_stops_rep_after_an_iteration",
        "traps with RIP in REP OUTS's next instruction",
    ),
    ("dr", "data_breakpoint_in_rep", "pushes RF as 0 between iterations"),
    ("dr", "general_detect", "has no DR7.GD"),
    ("dr", "a_faulting_access_is_no_access", "pushes RF as 0 with faults"),
    (
        "dr",
        "execute_breakpoint_after_mov_ss",
        "has no shadow of MOV SS for breakpoints",
    ),
    (
        "dr",
        "data_breakpoint_of_mov_ss",
        "has no shadow of MOV SS for breakpoints",
    ),
    (
        "dr",
        "data_breakpoint_of_mov_ss_before_a_fault",
        "has no shadow of MOV SS for breakpoints",
    ),
    (
        "dr",
        "data_breakpoint_of_mov_ss_before_int",
        "has no shadow of MOV SS for breakpoints",
    ),
    ("dr", "int1_and_int3", "has no INT1: F1H is #UD"),
    (
        "dr",
        "debug_exceptions_abort_transactions",
        "executes XBEGIN, as an abort, without showing RTM",
    ),
    (
        "tsc",
        "adjust_starts_at_0",
        "answers 0 for registers that it has not, where the manual has #GP",
    ),
    ("tsc", "it_goes_up", "answers 0 for RDMSR of 10H"),
    ("tsc", "rdtscp_has_aux", "takes any value for IA32_TSC_AUX"),
    ("tsc", "it_can_be_written", "drops WRMSR of 10H"),
    (
        "tsc",
        "adjust_and_tsc_move_together",
        "answers 0 for registers that it has not, where the manual has #GP",
    ),
    (
        "tsc",
        "the_deadline_interrupts",
        "answers 0 for registers that it has not, where the manual has #GP",
    ),
];

// covers: 7/guest-qemu
#[test]
fn qemu_agrees_but_for_what_is_known() {
    for guest in ["dr", "tsc"] {
        let report = on_qemu(guest).unwrap_or_else(|why| panic!("{guest} in QEMU: {why}"));
        let known: Vec<_> = QEMU.iter().filter(|row| row.0 == guest).map(|row| row.1).collect();
        assert_eq!(report.failed(), known, "{}", failures(guest, &report));
    }
}
