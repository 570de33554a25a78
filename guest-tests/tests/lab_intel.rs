//! minivmm on a real kvm-intel, in the lab: guest tests, and our units by handover.

use guest_tests::lab::{Ended, Guest, Host, Job, Known, chosen, job, jobs, judge_all, share_in_engine, without_reason};
use guest_tests::{HELLO, INIT_MARKER, linux};

const PORTS: &str = "IN and OUT are exits, and KVM looks for no breakpoint";
/// It has not been looked into which of the two it is.
const SHADOW: &str = "Bochs or KVM loses the #DB between MOV SS and INT n, or RF between the iterations of REP";
const INT1: &str = "Bochs shows the data breakpoint that MOV SS has met with the #DB of INT1";
const STORE: &str = "the store to the APIC is an exit, behind which KVM forgets the step";
const DEADLINE: &str = "KVM takes writes of IA32_TSC_DEADLINE and forgets them, instead of #GP";
const TASKS: &str = "KVM switches tasks itself, and looks at no T bit";
const UNITS: &str = "the units are absent, and the guest knows by the part's signature that it has them";

const NMIS: &str = "an NMI that comes while another waits for a CPU that is in KVM is the same one, as in a local APIC";
const LATE: &str =
    "a counter of cycles alone counts while the guest is in KVM, where its overflow comes with a timer of the host's";

/// What fails in the lab, and why.
const KNOWN: &[Known] = &[
    ("dr", "io_breakpoint_is_a_trap", PORTS),
    ("dr", "io_breakpoint_stops_rep_after_an_iteration", PORTS),
    ("dr", "data_breakpoint_in_rep", SHADOW),
    ("dr", "data_breakpoint_of_mov_ss_before_int", SHADOW),
    ("dr", "data_breakpoint_of_mov_ss_before_int1", INT1),
    ("dr", "a_step_beats_an_interrupt", STORE),
    ("tsc", "the_deadline_interrupts", DEADLINE),
    ("cpuid_msrs", "what_is_not_shown_is_absent", DEADLINE),
    ("debugctl", "tr_alone_and_the_stack", UNITS),
    ("pmu", "cycles_overflow_within_strings", LATE),
    ("smp", "nmis_of_two_senders_are_two", NMIS),
    ("smp", "last_branches_are_of_each_cpu", UNITS),
    ("smp", "the_script_with_the_loop_on_another_cpu", UNITS),
    ("task_switch", "the_t_bit_traps_in_the_new_task", TASKS),
    ("task_switch", "the_t_bit_comes_before_the_first_breakpoint", TASKS),
    ("task_switch", "returning_to_a_task_with_t_traps", TASKS),
    ("task_switch", "a_task_gate_switches", TASKS),
];

/// How many of them the short form runs: Bochs takes its time.
const SHORT: usize = 2;

/// This program's interrupt controllers; KVM's own run in the lab with kvm-amd.
const OURS: &[&str] = &["--irqchip=minivmm"];

/// What runs.
const GUESTS: &[Guest] = &[
    ("tsc", "haswell", OURS, false),
    ("dr", "haswell", OURS, false),
    ("apic", "haswell", OURS, false),
    ("cpuid_msrs", "haswell", OURS, false),
    ("bts", "skylake-server", &["--bts=emulated"], true),
    ("arch_lbr", "sapphirerapids", &["--lbr=emulated"], true),
    ("pt_packets", "sapphirerapids", &["--pt=emulated"], true),
    ("debugctl", "haswell", &["--lbr=emulated", "--bts=emulated"], true),
    ("smp", "haswell", &["--irqchip=minivmm", "--cpus=3"], false),
    ("pt_filters", "broadwell", &["--pt=emulated"], true),
    ("pt_topa", "sapphirerapids", &["--pt=emulated", "--pmu=emulated"], true),
    ("pmu", "skylake-server", &["--pmu=emulated"], true),
    ("pebs", "haswell", &["--pebs=emulated"], true),
    ("rdt", "icelake-server", &["--rdt=emulated"], true),
    ("task_switch", "haswell", OURS, false),
];

/// The points of a debugger, on a KVM that delivers all that they need.
fn judge_points(ended: &Ended) {
    assert_eq!(ended.status, 0, "{}", ended.said);
    let delivers = "KVM delivers single steps, INT3, execution breakpoints, watchpoints, MOV DR\nall hold\n";
    assert_eq!(ended.said, delivers);
}

// covers: lab/intel, lab/intel-guests, kvm/handover-unit, linux-guest/debug-probe, kvm/points, kvm/points-own
#[test]
fn guests_run_on_a_real_kvm_intel() {
    let mut guests = chosen(GUESTS.iter(), |guest| guest.0);
    let all_are = guests.len() == GUESTS.len();
    if all_are && !guest_tests::full() {
        println!("left out: all guests but the first {SHORT}, which the full form runs");
        guests.truncate(SHORT);
    }
    // The statistics hash all memory, which is to be little: the host executes a hundred million instructions per second.
    let mut all: Vec<Job> = guests.iter().map(|guest| job(guest, &["-m", "32M"])).collect();
    if all_are {
        all.push(Job::program(env!("CARGO_BIN_EXE_kvm-points"), HELLO));
    }
    let mut ended = jobs(Host::Intel, &all).unwrap_or_else(|why| panic!("{why}"));
    if all_are {
        judge_points(&ended.split_off(guests.len())[0]);
    }
    let wrong = judge_all(Host::Intel, &guests, &ended, KNOWN);
    assert!(wrong.is_empty(), "{wrong}");
}

/// The host's timer is one of VMX, and its deadlines are not ours: the guest has a timer without.
// covers: lab/intel-linux
#[test]
fn linux_boots_on_a_real_kvm_intel() {
    if !guest_tests::full() {
        println!("left out: Debian in Bochs, which the full form boots");
        return;
    }
    let cmdline = "console=ttyS0 quiet panic=-1 minivmm.script=nothing";
    let options = "--engine kvm -m 256M --cpu-model haswell -v --cmdline";
    let job = Job::new(options.split(' ').chain([cmdline]))
        .file("--kernel", &linux().kernel)
        .file("--initrd", &linux().initrd);
    let ended = jobs(Host::Intel, &[job]).unwrap_or_else(|why| panic!("{why}"));
    let Ended { status, said } = &ended[0];
    assert!(*status == 0 && said.contains(INIT_MARKER), "status {status}: {said}");
    assert!(said.contains("KVM forgets what the guest writes"), "{said}");
}

/// Its counter counts cycles of all rings, so it counts in KVM; its interrupts are the engine's, and RDPMC in their handler.
// covers: lab/watchdog
#[test]
fn linux_with_its_lockup_watchdog_stays_in_kvm() {
    if !guest_tests::full() {
        println!("left out: the watchdog in Bochs, which the full form runs");
        return;
    }
    let cmdline = "console=ttyS0 quiet panic=-1 minivmm.script=watchdog";
    let options = "--engine kvm -m 128M --cpu-model haswell --pmu=emulated --stats --cmdline";
    let job = Job::new(options.split(' ').chain([cmdline]))
        .file("--kernel", &linux().kernel)
        .file("--initrd", &linux().initrd);
    let ended = jobs(Host::Intel, &[job]).unwrap_or_else(|why| panic!("{why}"));
    let Ended { status, said } = &ended[0];
    assert!(
        *status == 0 && said.contains("watchdog: all holds"),
        "status {status}: {said}"
    );
    let share = share_in_engine(&ended[0]).unwrap_or_else(|| panic!("no statistics: {said}"));
    println!("{:.1} % of the time in the engine", share * 100.0);
    assert!(share <= 0.05, "{share}: {said}");
}

// covers: matrix/labs
#[test]
fn what_fails_in_the_committed_matrix_has_its_reason() {
    let missing = without_reason(Host::Intel, KNOWN);
    assert!(missing.is_empty(), "{missing:?}");
}
