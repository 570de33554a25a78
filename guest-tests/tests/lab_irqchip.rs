//! KVM's own interrupt controllers on a real kvm-amd, in the lab.

use guest_tests::bare::image;
use guest_tests::lab::{Ended, Host, Job, Known, Tally, jobs, judge};
use guest_tests::{INIT_MARKER, SMP, full, linux};

const UNITS: &str = "the units are absent, and the guest knows by the part's signature that it has them";

/// What fails, and why.
const KNOWN: &[Known] = &[
    (
        "apic",
        "task_priority_beyond_cr8",
        "KVM makes its TPR of CR8 at each exit, which has four bits of it",
    ),
    ("apic", "x2apic_eoi_takes_0", "KVM's EOI takes any value"),
    ("smp", "last_branches_are_of_each_cpu", UNITS),
    ("smp", "the_script_with_the_loop_on_another_cpu", UNITS),
];

/// Neither HLT nor interrupts came out of KVM, and no instruction left it.
const IN_KERNEL: [&str; 2] = [
    "0 window, 0 halt, 0 debug; 0 interrupts, 0 NMIs",
    "0 for an instruction, 0 for a unit",
];

/// Linux, without its check of the interval timer: it counts ticks for 40 ms by the time-stamp counter, which goes on while a busy host runs something
/// else, and KVM then delivers the ticks that were due as one. Where Linux finds KVM's signature in CPUID it leaves the check out by itself
/// (`paravirt_ops_setup` in arch/x86/kernel/kvm.c).
fn linux_on(cpus: u32) -> Job {
    let cmdline = "console=ttyS0 quiet panic=-1 no_timer_check minivmm.script=nothing";
    let options =
        format!("--engine kvm --irqchip kvm --cpus {cpus} -m 256M --cpu-model sapphirerapids --stats --cmdline");
    let words: Vec<String> = options.split(' ').chain([cmdline]).map(str::to_string).collect();
    Job::new(words)
        .file("--kernel", &linux().kernel)
        .file("--initrd", &linux().initrd)
        // Seconds on a quiet host, but the lab's time is that of the wall.
        .within(120)
}

// covers: lab/irqchip-kvm
#[test]
fn guests_run_with_kvms_own_controllers() {
    let kvms = |cpus: u32| {
        let options = format!("--engine kvm --irqchip kvm --stats --cpu-model haswell --cpus {cpus}");
        Job::new(options.split(' ').map(str::to_string)).within(90)
    };
    let mut messages = kvms(3);
    // Another `smp.elf` is beside it.
    messages
        .arguments
        .extend(["--kernel".into(), "/lab/bare/smp.elf".into()]);
    messages.files.insert("bare/smp.elf".into(), image("smp"));
    let mut turns = kvms(3).file("--kernel", SMP);
    turns.arguments.extend(["--cmdline".into(), "3".into()]);
    let all = [kvms(1).file("--kernel", image("apic")), messages, turns];
    let mut ended = jobs(Host::Amd, &all).unwrap_or_else(|why| panic!("{why}"));
    ended.push(linux_ended(1));
    if full() {
        ended.push(linux_ended(2));
    }
    let wrong = judged(&ended);
    assert!(wrong.is_empty(), "{wrong}");
}

/// How Linux ended. QEMU 7.2 loses an interrupt of its nested guest at times, so that the Linux waits for its timer for ever where it
/// tries it out ("Mount-cache" is the last that it says): it has three hosts to boot in, and is said to have needed them. Two faults of that QEMU
/// which have been mended since fit: `helper_vmrun` and `do_vmexit` change `interrupt_request` without the lock under which devices set it, and
/// VMRUN forgets the interrupt shadow, so that after STI an interrupt may come before the HLT that was to wait for it.
fn linux_ended(cpus: u32) -> Ended {
    let mut last = None;
    for attempt in 1..=3 {
        let ended = jobs(Host::Amd, &[linux_on(cpus)]).unwrap_or_else(|why| panic!("{why}"));
        let ended = ended.into_iter().next().expect("one job");
        if ended.status == 0 {
            return ended;
        }
        println!(
            "Linux with {cpus} CPUs has hung, attempt {attempt} of 3: {}",
            ended.said
        );
        last = Some(ended);
    }
    last.expect("three attempts")
}

fn judged(ended: &[Ended]) -> String {
    let mut wrong = String::new();
    let [apic, messages, turns, systems @ ..] = ended else {
        panic!("{ended:?}")
    };
    for (guest, ended) in [("apic", apic), ("smp", messages)] {
        wrong += &judge(guest, ended, KNOWN, true, &mut Tally::default());
    }
    for fact in [
        "starts 00000002",
        "locked 00003a98",
        "turns 0000003c",
        "tsc.back 00000000",
    ] {
        if turns.status != 1 || !turns.said.contains(fact) {
            wrong += &format!("turns: no {fact}: {turns:?}\n");
        }
    }
    for system in systems {
        if system.status != 0 || !system.said.contains(INIT_MARKER) {
            wrong += &format!("Linux: {system:?}\n");
        }
    }
    for ended in ended {
        if !IN_KERNEL.iter().all(|says| ended.said.contains(says)) {
            wrong += &format!("KVM's controllers did not do it all: {ended:?}\n");
        }
    }
    wrong
}

// covers: lab/irqchip-kvm-intel
#[test]
fn guests_run_with_the_controllers_of_kvm_intel() {
    if !full() {
        return;
    }
    let guest = |name: &str, cpus: u32| {
        let options = format!("--engine kvm --irqchip kvm --cpu-model haswell --cpus {cpus}");
        let job = Job::new(options.split(' ').map(str::to_string)).within(90);
        job.file("--kernel", image(name))
    };
    let guests = [("apic", 1), ("tsc", 1), ("smp", 3)];
    let ended = jobs(Host::Intel, &guests.map(|(name, cpus)| guest(name, cpus))).unwrap_or_else(|why| panic!("{why}"));
    // VMX keeps all of TPR.
    let known: Vec<Known> = KNOWN
        .iter()
        .copied()
        .filter(|row| row.1 != "task_priority_beyond_cr8")
        .collect();
    let wrong: String = guests
        .iter()
        .zip(&ended)
        .map(|((name, _), ended)| judge(name, ended, &known, true, &mut Tally::default()))
        .collect();
    assert!(wrong.is_empty(), "{wrong}");
}
