//! minivmm on a real kvm-amd, in the lab: guest tests, our units by handover, and Linux.

use guest_tests::lab::{Ended, Guest, Host, Job, Known, chosen, job, jobs, judge_all, without_reason};
use guest_tests::{HELLO, INIT_MARKER, SMP, linux};

const CPU: &str = "QEMU's software CPU under the lab does otherwise than the manual says";
/// VMRUN loads DR7 and arms nothing: what is armed is what the last MOV to a debug register armed, by whomever.
const ARMED: &str = "QEMU's software CPU meets a breakpoint only where no exit came between it and what it is set on";
const TIME: &str = "two exits take longer in the lab than the time that the test waits";
const AMD: &str = "the processor under KVM is AMD's: it takes any address, and 64-bit SYSENTER";
const SHOWN: &str = "QEMU's software CPU executes XBEGIN, and the host's RDTSCP, whatever the guest's CPUID shows";
const TASKS: &str = "KVM switches tasks itself: no T bit, no clearing of DR7's local enables, no task gates";

/// What fails in the lab, and why. `bare.rs` has what QEMU's CPU does otherwise, test by test.
const KNOWN: &[Known] = &[
    ("dr", "any_touched_byte_counts", CPU),
    ("dr", "dr6_shows_the_breakpoints_that_matched", CPU),
    (
        "dr",
        "io_breakpoint_is_a_trap",
        "IN and OUT are exits, and kvm-amd looks for no breakpoint",
    ),
    ("dr", "io_breakpoint_stops_rep_after_an_iteration", CPU),
    ("dr", "breakpoints_are_linear_addresses", ARMED),
    ("dr", "data_breakpoint_in_rep", CPU),
    ("dr", "general_detect", CPU),
    ("dr", "a_faulting_access_is_no_access", CPU),
    ("dr", "execute_breakpoint_after_mov_ss", CPU),
    ("dr", "data_breakpoint_of_mov_ss", CPU),
    ("dr", "data_breakpoint_of_mov_ss_before_a_fault", CPU),
    ("dr", "data_breakpoint_of_mov_ss_before_int", CPU),
    ("dr", "data_breakpoint_of_mov_ss_before_int1", CPU),
    ("dr", "a_step_beats_an_interrupt", CPU),
    ("dr", "int1_and_int3", CPU),
    ("dr", "debug_exceptions_abort_transactions", CPU),
    ("cpuid_msrs", "what_is_not_shown_is_absent", SHOWN),
    ("cpuid_msrs", "canonical_addresses", AMD),
    ("tsc", "it_can_be_written", TIME),
    ("tsc", "rdtscp_has_aux", SHOWN),
    ("task_switch", "the_t_bit_traps_in_the_new_task", TASKS),
    ("task_switch", "a_switch_clears_local_enables", TASKS),
    ("task_switch", "the_t_bit_comes_before_the_first_breakpoint", TASKS),
    ("task_switch", "returning_to_a_task_with_t_traps", TASKS),
    ("task_switch", "a_task_gate_switches", TASKS),
];

/// What runs.
const GUESTS: &[Guest] = &[
    ("dr", "haswell", &[], false),
    ("cpuid_msrs", "haswell", &[], false),
    ("apic", "haswell", &[], false),
    ("tsc", "haswell", &[], false),
    ("bts", "skylake-server", &["--bts=emulated"], true),
    ("pt_packets", "sapphirerapids", &["--pt=emulated"], true),
    ("pt_filters", "broadwell", &["--pt=emulated"], true),
    ("pt_topa", "sapphirerapids", &["--pt=emulated", "--pmu=emulated"], true),
    ("pmu", "skylake-server", &["--pmu=emulated"], true),
    ("pebs", "haswell", &["--pebs=emulated"], true),
    ("arch_lbr", "sapphirerapids", &["--lbr=emulated"], true),
];

// covers: lab/kvm, lab/guests, kvm/handover-unit, kvm/fault-beside, lab/linux, kvm/counters, kvm/engine-auto, kvm/points, kvm/points-own
#[test]
fn guests_and_linux_run_on_a_real_kvm() {
    let guests = chosen(GUESTS.iter(), |guest| guest.0);
    let mut all: Vec<Job> = guests.iter().map(|guest| job(guest, &[])).collect();
    let whole = guests.len() == GUESTS.len();
    if whole {
        all.extend(others());
    }
    let ended = jobs(Host::Amd, &all).unwrap_or_else(|why| panic!("{why}"));
    let mut wrong = judge_all(Host::Amd, &guests, &ended, KNOWN);
    if whole {
        wrong += &judge_others(&ended[guests.len()..]);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// What runs besides guest tests: the measuring engine, several CPUs, Linux, and a debugger's points.
fn others() -> Vec<Job> {
    let cmdline = "console=ttyS0 quiet panic=-1 minivmm.script=nothing";
    let options = "--engine kvm --cpus 2 -m 256M --cpu-model sapphirerapids --stats --cmdline";
    vec![
        Job::new(["-v", "--engine", "auto"]).file("--kernel", HELLO),
        Job::new(["--engine", "kvm", "--cpus", "3", "--cmdline", "3"]).file("--kernel", SMP),
        Job::new(options.split(' ').chain([cmdline]))
            .file("--kernel", &linux().kernel)
            .file("--initrd", &linux().initrd),
        Job::program(env!("CARGO_BIN_EXE_kvm-points"), HELLO),
    ]
}

fn judge_others(ended: &[Ended]) -> String {
    let mut wrong = String::new();
    let [auto, smp, system, points] = ended else {
        panic!("{ended:?}")
    };
    if auto.status != 43 || !auto.said.contains("--engine auto: KVM:") {
        wrong += &format!("auto: {auto:?}\n");
    }
    for fact in [
        "starts 00000002",
        "locked 00003a98",
        "turns 0000003c",
        "tsc.back 00000000",
    ] {
        if smp.status != 1 || !smp.said.contains(fact) {
            wrong += &format!("smp: no {fact}: {smp:?}\n");
        }
    }
    if points.status != 0 || !points.said.contains("KVM delivers ") || !points.said.ends_with("\nall hold\n") {
        wrong += &format!("a debugger's points: {points:?}\n");
    }
    if system.status != 0 || !system.said.contains(INIT_MARKER) {
        wrong += &format!("Linux: {system:?}\n");
    }
    wrong
}

// covers: matrix/labs
#[test]
fn what_fails_in_the_committed_matrix_has_its_reason() {
    let missing = without_reason(Host::Amd, KNOWN);
    assert!(missing.is_empty(), "{missing:?}");
}
