//! Guests on this host's KVM. Where there is none the tests say so and skip.

use guest_tests::bare::{image, on_kvm};
use guest_tests::{HELLO, SMP, in_minivmm_on_kvm, run, skipped};
use minivmm::kvm::Host;
use minivmm::matrix::tap::{Point, Report};
use std::process::Command;
use std::time::Duration;

/// What a KVM is like.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// It runs instructions on the processor.
    Native,
    /// It interprets them, and lacks some.
    Interprets,
}

/// This host's; where there is none, that has been said.
fn kvm(test: &str) -> Option<Kind> {
    match Host::open() {
        Ok(host) if host.virtualizes().is_ok() => Some(Kind::Native),
        Ok(_) => Some(Kind::Interprets),
        Err(why) => {
            skipped(test, &why.to_string());
            None
        }
    }
}

const DATA: &str = "it has no data and I/O breakpoints";
const RING_3: &str = "it cannot run code in ring 3";
const WINDOW: &str = "it looks for interrupts less often than at each instruction, and misses STI before CLI";
const CPUID: &str = "it shows IA32_ARCH_CAPABILITIES in CPUID, whatever it was told to show";
const OFFSET: &str = "it gives the guest the host's own time-stamp counter, whatever the offset";
const UNITS: &str = "the units are absent, and the guest knows by the part's signature that it has them";

/// What fails on a KVM that interprets, and why.
const INTERPRETED: &[(&str, &str, &str)] = &[
    ("apic", "an_ipi_to_itself", WINDOW),
    ("apic", "priorities", WINDOW),
    ("apic", "task_priority", WINDOW),
    ("apic", "the_timer", WINDOW),
    ("apic", "an_interrupt_beside_a_fault", WINDOW),
    ("apic", "an_nmi_to_itself", WINDOW),
    ("apic", "x2apic_mode", WINDOW),
    (
        "cpuid_msrs",
        "canonical_addresses",
        "it takes any value for IA32_SYSENTER_EIP",
    ),
    ("cpuid_msrs", "rdmsr_and_wrmsr_in_ring_3", RING_3),
    ("cpuid_msrs", "what_is_shown_is_there", CPUID),
    ("cpuid_msrs", "read_only_registers", CPUID),
    ("dr", "any_touched_byte_counts", DATA),
    ("dr", "reads_and_writes", DATA),
    ("dr", "data_breakpoint_is_a_trap", DATA),
    ("dr", "dr6_shows_the_breakpoints_that_matched", DATA),
    ("dr", "breakpoint_bits_are_of_the_last_exception", DATA),
    ("dr", "io_breakpoint_is_a_trap", DATA),
    ("dr", "io_breakpoint_stops_rep_after_an_iteration", DATA),
    ("dr", "data_breakpoint_in_rep", DATA),
    ("dr", "mov_dr_in_ring_3", RING_3),
    ("dr", "breakpoints_in_ring_3", RING_3),
    ("dr", "breakpoints_are_linear_addresses", DATA),
    ("dr", "a_faulting_access_is_no_access", DATA),
    ("dr", "data_breakpoint_of_mov_ss", DATA),
    ("dr", "data_breakpoint_of_mov_ss_before_a_fault", DATA),
    ("dr", "data_breakpoint_of_mov_ss_before_int", DATA),
    (
        "dr",
        "no_step_after_mov_ss",
        "it has no shadow of MOV SS for single steps",
    ),
    ("dr", "a_step_ends_hlt", "it loses the step of HLT"),
    ("dr", "a_step_beats_an_interrupt", WINDOW),
    ("dr", "debug_exceptions_abort_transactions", "it executes XBEGIN as #UD"),
    ("tsc", "it_goes_up", OFFSET),
    ("tsc", "tsd_keeps_rings_out", RING_3),
    ("tsc", "it_can_be_written", OFFSET),
    ("tsc", "adjust_and_tsc_move_together", OFFSET),
    ("tsc", "the_deadline_interrupts", OFFSET),
    ("tsc", "invariant_tsc_comes_with_rdtscp", "it has no RDTSCP"),
];

/// What fails on any KVM.
const ANYWHERE: &[(&str, &str, &str)] = &[("cpuid_msrs", "what_is_not_shown_is_absent", UNITS)];

/// What fails with any KVM's own local APIC.
const KVMS_APIC: &[(&str, &str, &str)] = &[
    (
        "apic",
        "task_priority_beyond_cr8",
        "KVM makes its TPR of CR8 at each exit, which has four bits of it",
    ),
    ("apic", "x2apic_eoi_takes_0", "KVM's EOI takes any value"),
];

fn known(kind: Kind, guest: &str, test: &str) -> bool {
    let rows = match kind {
        Kind::Native => &[][..],
        Kind::Interprets => INTERPRETED,
    };
    rows.iter().chain(ANYWHERE).any(|row| (row.0, row.1) == (guest, test))
}

// covers: kvm/guests, kvm/skip, kvm/irqchip-kvm-guests
#[test]
fn guests_of_ring_0_pass_but_for_what_this_kvm_lacks() {
    let Some(kind) = kvm("guests on KVM") else { return };
    let mut wrong = String::new();
    // How many points have to pass at least: a guest that dies early has none.
    for (guest, least) in [("dr", 12), ("cpuid_msrs", 5), ("apic", 2), ("tsc", 1)] {
        for (model, irqchip) in [
            ("westmere", "minivmm"),
            ("haswell", "minivmm"),
            ("haswell", "kvm"),
            ("skylake-server", "minivmm"),
        ] {
            let own = |name: &str| {
                let row = |row: &(&str, &str, &str)| (row.0, row.1) == (guest, name);
                irqchip == "kvm" && KVMS_APIC.iter().any(row)
            };
            let report: Report = match on_kvm(guest, model, &["--irqchip", irqchip]) {
                Ok(report) => report,
                Err(why) => {
                    wrong += &format!("{guest} on {model}, {irqchip}: {why}\n");
                    continue;
                }
            };
            let mut passed = 0;
            for (name, point) in &report.points {
                match point {
                    Point::Passed => passed += 1,
                    Point::Failed(why) if !known(kind, guest, name) && !own(name) => {
                        wrong += &format!("{guest} on {model}, {irqchip}: {name}\n{why}\n");
                    }
                    _ => {}
                }
            }
            if passed < least {
                wrong += &format!("{guest} on {model}, {irqchip}: only {passed} tests passed\n");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

// covers: kvm/guests
#[test]
fn a_guest_prints_and_ends_with_its_status() {
    if kvm("hello on KVM").is_none() {
        return;
    }
    let mut command = in_minivmm_on_kvm(HELLO);
    let guest = run(command.arg("--stats"), Duration::from_secs(60));
    assert_eq!(guest.status, Some(43), "{}\n{}", guest.console, guest.errors);
    assert_eq!(guest.console.trim(), "Hello from a multiboot guest.");
    assert!(guest.errors.contains("KVM exits:"), "{}", guest.errors);
}

// covers: kvm/smp
#[test]
fn three_cpus_start_lock_and_take_turns() {
    if kvm("SMP on KVM").is_none() {
        return;
    }
    let mut command = in_minivmm_on_kvm(SMP);
    command.args(["--cpus", "3", "--cmdline", "3", "--cpu-model", "westmere"]);
    let guest = run(&mut command, Duration::from_secs(120)).must_end_with(1);
    // The rest of what it prints is who has had an interrupt within so many instructions, and the host decides that.
    for (fact, value) in [("boot", 1), ("starts", 2), ("locked", 15000), ("turns", 60)] {
        let value = format!("{value:08x}");
        assert_eq!(guest.fact(fact), Some(value.as_str()), "{fact}\n{}", guest.console);
    }
}

/// The first CPU of the host that this process may run on.
fn a_cpu() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let list = list.unwrap_or("0").trim();
    list.split([',', '-']).next().unwrap_or("0").to_string()
}

/// CPU 1 knows of an interrupt that it will let in later when the NMI comes. With one CPU of the host for all, nothing else takes it
/// out of KVM.
// covers: kvm/nmi
#[test]
fn an_nmi_reaches_a_cpu_that_lets_no_interrupt_in() {
    if kvm("NMI on KVM").is_none() {
        return;
    }
    let program = in_minivmm_on_kvm(image("smp"));
    let mut command = Command::new("taskset");
    command
        .args(["-c", &a_cpu()])
        .arg(program.get_program())
        .args(program.get_args());
    command.args(["--cpus", "3", "--cpu-model", "westmere"]);
    let guest = run(&mut command, Duration::from_secs(120));
    let report = Report::read(&guest.console);
    let point = report
        .as_ref()
        .and_then(|report| report.point("an_nmi_reaches_masked_interrupts"));
    assert_eq!(point, Some(&Point::Passed), "{}\n{}", guest.console, guest.errors);
}

// covers: kvm/irqchip-kvm-smp
#[test]
fn kvm_starts_the_cpus_and_takes_messages_between_them() {
    if kvm("SMP with KVM's interrupt controllers").is_none() {
        return;
    }
    let mut command = in_minivmm_on_kvm(image("smp"));
    command
        .args(["--irqchip", "kvm"])
        .args(["--cpus", "3", "--cpu-model", "westmere", "--stats"]);
    let guest = run(&mut command, Duration::from_secs(120));
    let report = Report::read(&guest.console);
    for test in ["every_cpu_has_its_id", "messages", "an_nmi_reaches_masked_interrupts"] {
        let point = report.as_ref().and_then(|report| report.point(test));
        assert_eq!(
            point,
            Some(&Point::Passed),
            "{test}: {}\n{}",
            guest.console,
            guest.errors
        );
    }
    // Neither HLT nor interrupts come to us.
    assert!(
        guest.errors.contains("0 window, 0 halt, 0 debug; 0 interrupts, 0 NMIs"),
        "{}",
        guest.errors
    );
}
