//! minivmm on a real kvm-intel, which runs on minivmm's own software CPU with VMX, and so with counters, branch records, PEBS and
//! Intel PT under KVM: what KVM gives a guest of them, the guest tests and Linux's perf judge by what is known to have been executed.

use guest_tests::lab::{Ended, Guest, Host, Job, Known, chosen, job, jobs, judge_all};
use guest_tests::{HELLO, INIT_MARKER, linux};

/// The parts that the host is; the first one where the lab has one alone.
const MODELS: [&str; 4] = ["icelake-server", "sapphirerapids", "skylake-server", "haswell"];

const OURS: &[&str] = &["--irqchip=minivmm"];
const PMU: &[&str] = &["--pmu=host"];
const LBR: &[&str] = &["--pmu=host", "--lbr=host"];
const PEBS: &[&str] = &["--pmu=host", "--pebs=host"];
const PT: &[&str] = &["--pt=host"];

/// Whether this KVM, of Linux 6.1, gives a guest the unit on a part.
fn gives(model: &str, options: &[&str]) -> bool {
    match options {
        // Not the architectural ones.
        LBR => model != "sapphirerapids",
        // Where a missing EPT translation of the buffer does no harm, and Linux knows of it.
        PEBS => model == "icelake-server",
        PT => model != "haswell",
        _ => true,
    }
}

/// What runs on a host of this model.
fn guests(model: &'static str) -> Vec<Guest> {
    let all: [Guest; 8] = [
        ("tsc", "haswell", OURS, false),
        ("apic", "haswell", OURS, false),
        ("cpuid_msrs", "haswell", OURS, false),
        ("dr", "haswell", OURS, false),
        ("pmu", model, PMU, false),
        ("lbr", model, LBR, false),
        ("pebs", model, PEBS, false),
        ("pt_packets", model, PT, false),
    ];
    // On a haswell Linux lets no counter overflow before 128 instructions or 32 other events (its erratum HSW11), and the guest's are fewer.
    let early = |guest: &Guest| (guest.0, model) == ("pmu", "haswell");
    // What has no unit of the host's is the same on all parts.
    let here = |guest: &Guest| guest.2 != OURS || model == MODELS[0];
    let all = all.into_iter().filter(|guest| gives(model, guest.2) && here(guest));
    all.filter(|guest| !early(guest)).collect()
}

/// Debian with perf: the script, CPUs, options. Not with PEBS: `instructions:pp` needs adaptive records, which KVM no longer gives.
const LINUX: [(&str, u32, &[&str]); 4] = [
    ("nothing", 2, OURS),
    ("perf-stat", 1, PMU),
    ("perf-lbr", 1, LBR),
    ("perf-pt", 1, PT),
];

const POWER_UP: &str = "IA32_PERF_GLOBAL_CTRL of KVM's counters is 0 at power-up";
const FREEZE: &str = "KVM's counters do not freeze on PMI, and there are no branch records without --lbr=host";
const LER: &str = "KVM has no last-exception records";
const LATENCY: &str = "KVM has no MSR_PEBS_LD_LAT";
const PRECISE: &str =
    "KVM counts an event that PEBS cannot sample without a record, and the guest's own PMI comes instead";
const RETURNS: &str =
    "the host's trace has returns that are not compressed: the host's calls would stand among the guest's";
const PSBS: &str = "PSBs come where the host's come";
const TIME: &str = "packets that tell the time come while the host runs, too";
const PORTS: &str = "IN and OUT are exits, and KVM looks for no breakpoint";
const STORE: &str = "the store to the APIC is an exit, behind which KVM forgets the step";
const DEADLINE: &str = "KVM takes writes of IA32_TSC_DEADLINE and forgets them, instead of #GP";
const RDPID: &str = "the processor has RDPID, which KVM lets a guest execute that has RDTSCP";

/// What fails in the lab, and why.
const KNOWN: &[Known] = &[
    ("pmu", "power_up", POWER_UP),
    ("pmu", "legacy_freezes", FREEZE),
    ("lbr", "the_branch_before_an_exception", LER),
    ("pebs", "load_latency", LATENCY),
    ("pebs", "an_event_that_cannot", PRECISE),
    ("pt_packets", "packets_of_each_branch", RETURNS),
    ("pt_packets", "a_trace_begins_with_psb", PSBS),
    ("pt_packets", "psb_comes_every_period", PSBS),
    ("pt_packets", "a_pending_psb_is_injected", PSBS),
    ("pt_packets", "a_run_repeats", TIME),
    ("pt_packets", "mtc_ticks_from_tma_on", TIME),
    ("dr", "io_breakpoint_is_a_trap", PORTS),
    ("dr", "io_breakpoint_stops_rep_after_an_iteration", PORTS),
    ("dr", "a_step_beats_an_interrupt", STORE),
    ("tsc", "the_deadline_interrupts", DEADLINE),
    ("tsc", "rdpid_has_aux", RDPID),
    ("cpuid_msrs", "what_is_not_shown_is_absent", RDPID),
];

fn linux_job(model: &str, (script, cpus, units): (&str, u32, &[&str])) -> Job {
    let cmdline = format!("console=ttyS0 quiet panic=-1 nowatchdog minivmm.script={script}");
    let options = format!("--engine kvm --cpus {cpus} -m 384M --cpu-model {model} --stats --cmdline");
    let units = units.iter().map(|unit| unit.to_string());
    Job::new(options.split(' ').map(str::to_string).chain([cmdline]).chain(units))
        .file("--kernel", &linux().kernel)
        .file("--initrd", &linux().tools)
}

/// All that runs on a model, and what is wrong with it.
fn runs_on(model: &'static str) -> String {
    let guests = guests(model);
    let chosen = chosen(guests.iter(), |guest| guest.0);
    let whole = chosen.len() == guests.len();
    let mut all = vec![Job::new(["probe"])];
    all.extend(chosen.iter().map(|guest| job(guest, &["-m", "32M"])));
    let scripts = LINUX.into_iter().filter(|row| whole && gives(model, row.2));
    let scripts: Vec<_> = scripts.collect();
    all.extend(scripts.iter().map(|row| linux_job(model, *row)));
    let ended = jobs(Host::Own(model), &all).unwrap_or_else(|why| panic!("{why}"));
    let (probe, ended) = ended.split_first().expect("there is the probe");
    let mut wrong = judge_all(Host::Own(model), &chosen, &ended[..chosen.len()], KNOWN);
    if probe.status != 0 || !probe.said.contains("--engine auto is kvm") {
        wrong += &format!("probe: status {}\n{}\n", probe.status, probe.said);
    }
    for ((script, ..), Ended { status, said }) in scripts.iter().zip(&ended[chosen.len()..]) {
        let line = format!("minivmm-guest: script {script} ended with status 0");
        if *status != 0 || !said.contains(&line) {
            wrong += &format!("{script}: status {status}\n{said}\n");
        }
    }
    match wrong.is_empty() {
        true => wrong,
        false => format!("{model}\n{wrong}"),
    }
}

/// What kvm_intel says of APIC virtualization: it uses it where the processor has APIC-register virtualization, virtual-interrupt delivery and
/// posted interrupts.
fn apicv() -> Job {
    let busybox = guest_tests::target().join("guest/busybox");
    Job::other(busybox, ["cat", "/sys/module/kvm_intel/parameters/enable_apicv"])
}

/// The same guest on a part that has none of it but the TPR shadow and virtualized APIC accesses.
// covers: lab/own-apicv
#[test]
fn kvm_does_without_apic_virtualization_on_a_part_that_lacks_it() {
    let hello = Job::new(["--engine", "kvm", "-m", "32M"]).file("--kernel", HELLO);
    let ended = jobs(Host::Own("haswell"), &[hello, apicv()]).unwrap_or_else(|why| panic!("{why}"));
    let [hello, apicv] = &ended[..] else {
        panic!("{} jobs", ended.len())
    };
    assert!(hello.said.contains("Hello from a multiboot guest."), "{}", hello.said);
    assert_eq!(apicv.said.trim(), "N", "enable_apicv of kvm_intel");
}

// covers: lab/own, lab/own-linux, lab/own-apicv
#[test]
fn debian_boots_in_debians_kvm_on_our_own_vmx() {
    let hello = Job::new(["--engine", "kvm", "-m", "32M"]).file("--kernel", HELLO);
    let cmdline = "console=ttyS0 quiet panic=-1 minivmm.script=nothing";
    let options = "--engine kvm -m 128M --cpu-model westmere --cmdline";
    let debian = Job::new(options.split(' ').chain([cmdline]))
        .file("--kernel", &linux().kernel)
        .file("--initrd", &linux().initrd);
    // Counters of the processor's, exact to the instruction.
    let pmu = job(&("pmu", MODELS[0], PMU, false), &["-m", "32M"]);
    let ended = jobs(Host::OWN, &[hello, debian, pmu, apicv()]).unwrap_or_else(|why| panic!("{why}"));
    let [hello, debian, pmu, apicv] = &ended[..] else {
        panic!("{} jobs", ended.len())
    };
    // Both guests have had KVM's interrupt controllers, and so the processor's virtual APIC.
    assert_eq!(apicv.said.trim(), "Y", "enable_apicv of kvm_intel");
    assert!(hello.said.contains("Hello from a multiboot guest."), "{}", hello.said);
    let Ended { status, said } = debian;
    assert_eq!(*status, 0, "{said}");
    for line in [INIT_MARKER, "minivmm-guest: script nothing ended with status 0"] {
        assert!(said.contains(line), "no '{line}': {said}");
    }
    let wrong = judge_all(
        Host::OWN,
        &[&("pmu", MODELS[0], PMU, false)],
        std::slice::from_ref(pmu),
        KNOWN,
    );
    assert!(wrong.is_empty(), "{wrong}");
}

/// `cargo xtask lab --own` has the first model, with `--full` all of them.
// covers: lab/own-guests, lab/own-host-units, lab/own-perf
#[test]
fn guests_and_perf_have_the_hosts_own_units() {
    let whole = std::env::var_os("MINIVMM_LAB_WHOLE").is_some();
    let models = match (guest_tests::full(), whole) {
        (true, _) => &MODELS[..],
        (false, true) => &MODELS[..1],
        _ => {
            println!("left out: guests and perf with the host's own units, which `cargo xtask lab --own` runs");
            return;
        }
    };
    let wrong: String = models.iter().map(|model| runs_on(model)).collect();
    assert!(wrong.is_empty(), "{wrong}");
}
