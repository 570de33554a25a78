//! The guest tests on CPU models of the software engine, and in QEMU's software CPU.

use std::fmt::Write;
use std::process::Command;
use std::time::Duration;

use guest_tests::bare::{expected, image, matrix, on_qemu};
use guest_tests::{minivmm, run};
use minivmm::matrix::expected::Table;
use minivmm::matrix::tap::{Point, Report};

fn failures(who: &str, report: &Report) -> String {
    let mut text = String::new();
    for (name, point) in &report.points {
        if let Point::Failed(diagnostic) = point {
            let _ = write!(text, "{who}: {name}\n{diagnostic}");
        }
    }
    text
}

/// `UPDATE=1 cargo xtask matrix` writes the table.
// covers: tsc/guest, linux-guest/rt, linux-guest/needs, linux-guest/dr, linux-guest/debugctl, linux-guest/lbr, linux-guest/bts, linux-guest/tsc, linux-guest/cpuid-msrs, linux-guest/pebs, linux-guest/pmu, linux-guest/arch-lbr, linux-guest/pt-packets, linux-guest/pt-filters, linux-guest/pt-topa, linux-guest/rdt, linux-guest/apic
// covers: matrix/quick
#[test]
fn the_matrix_is_as_expected() {
    let mut command = matrix();
    command.arg("--expected").arg(expected());
    let outcome = run(&mut command, Duration::from_secs(900)).must_end_with(0);
    assert!(outcome.console.contains(" 0 failed"), "{}", outcome.console);
}

/// A guest that is stopped is said to be where it was, by the symbols of its image. This one waits for CPUs that are not there.
// covers: matrix/hang
#[test]
fn a_hang_is_told_with_its_symbol() {
    let mut command = Command::new(minivmm());
    command.arg("matrix").arg("--kernel").arg(image("smp"));
    command.args(["--model", "westmere", "--max-instructions", "3000000"]);
    let outcome = run(&mut command, Duration::from_secs(300)).must_end_with(1);
    let line = outcome
        .console
        .lines()
        .find(|line| line.starts_with("smp on westmere (soft): hangs: "));
    let place = line.and_then(|line| line.split_once(" at 0x")?.1.split_once(' '));
    assert!(
        place.is_some_and(|(_, symbol)| symbol.contains("rt")),
        "{}",
        outcome.console
    );
}

/// A test is skipped where the model lacks what it needs, and nowhere else: each runs on some model.
// covers: linux-guest/needs
#[test]
fn every_test_runs_somewhere() {
    let text = std::fs::read_to_string(expected()).unwrap();
    let never = Table::parse(&text).unwrap().never_passed();
    assert!(never.is_empty(), "{never:?}");
}

const ANSWERS_0: &str = "answers 0 for registers that it has not, where the manual has #GP";
const NO_T: &str = "has no TSS.T";

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
    ("dr", "data_breakpoint_of_mov_ss_before_int1", "has no INT1: F1H is #UD"),
    ("dr", "a_step_ends_hlt", "loses the step of HLT"),
    ("dr", "int1_and_int3", "has no INT1: F1H is #UD"),
    (
        "dr",
        "debug_exceptions_abort_transactions",
        "executes XBEGIN, as an abort, without showing RTM",
    ),
    ("tsc", "adjust_starts_at_0", ANSWERS_0),
    ("tsc", "it_goes_up", "answers 0 for RDMSR of 10H"),
    ("tsc", "rdtscp_has_aux", "takes any value for IA32_TSC_AUX"),
    ("tsc", "it_can_be_written", "drops WRMSR of 10H"),
    ("tsc", "adjust_and_tsc_move_together", ANSWERS_0),
    ("tsc", "the_deadline_interrupts", ANSWERS_0),
    ("tsc", "user_waits", ANSWERS_0),
    ("tsc", "interrupts_end_user_waits", ANSWERS_0),
    ("apic", "base", "takes reserved bits of IA32_APIC_BASE"),
    ("apic", "an_interrupt_beside_a_fault", ANSWERS_0),
    ("apic", "x2apic_eoi_takes_0", "takes EXTD without showing x2APIC"),
    ("apic", "x2apic_mode", "takes EXTD without showing x2APIC"),
    ("smp", "adjust_is_of_each_cpu", ANSWERS_0),
    (
        "smp",
        "last_branches_are_of_each_cpu",
        "has no last-branch records of any kind",
    ),
    (
        "smp",
        "the_script_with_the_loop_on_another_cpu",
        "has no last-branch records of any kind",
    ),
    ("smp", "a_pmi_comes_to_its_own_cpu", ANSWERS_0),
    ("smp", "traces_are_of_each_cpu", ANSWERS_0),
    ("smp", "a_trace_goes_on_over_init", ANSWERS_0),
    ("smp", "branch_records_are_of_each_cpu", ANSWERS_0),
    ("smp", "associations_are_of_each_cpu", ANSWERS_0),
    ("task_switch", "the_t_bit_traps_in_the_new_task", NO_T),
    ("task_switch", "a_switch_clears_local_enables", "leaves DR7.LE set"),
    ("task_switch", "the_t_bit_comes_before_the_first_breakpoint", NO_T),
    ("task_switch", "returning_to_a_task_with_t_traps", NO_T),
    ("task_switch", "a_task_gate_switches", NO_T),
];

// covers: linux-guest/qemu
#[test]
fn qemu_agrees_but_for_what_is_known() {
    for guest in ["dr", "tsc", "apic", "smp", "task_switch"] {
        let report = on_qemu(guest).unwrap_or_else(|why| panic!("{guest} in QEMU: {why}"));
        let known: Vec<_> = QEMU.iter().filter(|row| row.0 == guest).map(|row| row.1).collect();
        assert_eq!(report.failed(), known, "{}", failures(guest, &report));
    }
}
