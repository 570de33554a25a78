//! Several CPUs: start-up, interrupts between them, and what each has of its own. SDM Vol. 3A 9.4 "Multiple-Processor (MP)
//! Initialization", 11.6 "Issuing Interprocessor Interrupts".

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};

use rt::cpu::{self, read, tsc, write};
use rt::need::{self, LbrStack};
use rt::{Cpus, MAX_CPUS, apic, call, debug, exception, label, paging, time};
use x86::debugctl::DebugCtl;
use x86::msr::*;

use crate::pattern;
use crate::sampling::{self, INSTRUCTIONS};
use crate::trace::{self, Output, Step};

/// The vector of the messages.
const MESSAGE: u8 = 0x50;

/// Whom a message reached, by APIC ID.
static REACHED: AtomicU64 = AtomicU64::new(0);
/// Results and arguments of what another CPU runs: it reports nothing itself.
static SEEN: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
static STOP: AtomicBool = AtomicBool::new(false);

fn seen(n: usize) -> u64 {
    SEEN[n].load(SeqCst)
}

fn see(n: usize, value: u64) {
    SEEN[n].store(value, SeqCst);
}

/// Waits for what another CPU does, and not for ever: so many turns are more than any of these takes.
fn until(what: impl Fn() -> bool) -> bool {
    for _ in 0..1_000_000 {
        if what() {
            return true;
        }
        cpu::pause();
    }
    false
}

fn note(_: &mut exception::Frame) {
    REACHED.fetch_or(1 << apic::id(), SeqCst);
    apic::eoi();
}

/// 9.4.3: each CPU has an APIC ID of its own, which CPUID says, too.
fn every_cpu_has_its_id() {
    let cpus = Cpus::start();
    let mut ids = 0u64;
    for n in 0..cpus.count() {
        assert_eq!(ids >> cpus.id(n) & 1, 0, "APIC ID {} twice", cpus.id(n));
        ids |= 1 << cpus.id(n);
    }
    for n in 1..cpus.count() {
        cpus.run(n, || {
            see(0, u64::from(cpu::cpuid(1, 0)[1] >> 24));
            see(1, u64::from(cpu::leaf(0xB, 0)[3]));
            see(2, read(IA32_APIC_BASE));
        });
        assert_eq!(seen(0), u64::from(cpus.id(n)), "CPUID.1:EBX[31:24]");
        if cpu::leaf(0xB, 0)[1] != 0 {
            assert_eq!(seen(1), u64::from(cpus.id(n)), "CPUID.0BH:EDX");
        }
        assert_eq!(seen(2) & 1 << 8, 0, "only the boot CPU is the boot CPU");
    }
}

/// 11.6.1: to one, to all but the sender, to all.
fn messages() {
    let cpus = Cpus::start();
    let all = (0..cpus.count()).fold(0, |all, n| all | 1u64 << cpus.id(n));
    let this = 1u64 << apic::id();
    exception::on(MESSAGE, note);
    let vector = u32::from(MESSAGE);
    for (command, to, reached) in [
        (vector, cpus.id(1), 1 << cpus.id(1)),
        (vector | 3 << 18, 0, all & !this),
        (vector | 2 << 18, 0, all),
        (vector | 1 << 18, 0, this),
    ] {
        REACHED.store(0, SeqCst);
        apic::send(command, to);
        cpu::enable_interrupts();
        until(|| REACHED.load(SeqCst) == reached);
        cpu::disable_interrupts();
        assert_eq!(REACHED.load(SeqCst), reached, "ICR {command:X}H");
    }
}

/// An NMI reaches a CPU with interrupts disabled; a fixed message does not.
fn an_nmi_reaches_masked_interrupts() {
    let cpus = Cpus::start();
    exception::on(2, |_| {
        REACHED.fetch_or(1 << apic::id(), SeqCst);
    });
    exception::on(MESSAGE, note);
    REACHED.store(0, SeqCst);
    STOP.store(false, SeqCst);
    see(0, 0);
    cpus.begin(1, || {
        see(0, 1);
        while !STOP.load(SeqCst) {
            cpu::pause();
        }
    });
    assert!(until(|| seen(0) == 1));
    apic::send(u32::from(MESSAGE), cpus.id(1));
    let fixed = (0..1000).any(|_| {
        cpu::pause();
        REACHED.load(SeqCst) != 0
    });
    apic::send(apic::NMI, cpus.id(1));
    let nmi = until(|| REACHED.load(SeqCst) == 1 << cpus.id(1));
    REACHED.store(0, SeqCst);
    STOP.store(true, SeqCst);
    cpus.wait(1);
    assert!(!fixed && nmi, "fixed {fixed}, NMI {nmi}");
    assert!(
        until(|| REACHED.load(SeqCst) == 1 << cpus.id(1)),
        "the message comes with STI"
    );
}

/// The counters of all CPUs go together: reads in turn never go back.
fn tsc_goes_on_from_cpu_to_cpu() {
    static TURN: AtomicU64 = AtomicU64::new(0);
    static LAST: AtomicU64 = AtomicU64::new(0);
    static BACK: AtomicU64 = AtomicU64::new(0);
    const ROUNDS: u64 = 200;
    fn turns(odd: u64) {
        for n in 0..ROUNDS {
            while TURN.load(SeqCst) != 2 * n + odd {
                cpu::pause();
            }
            let now = tsc();
            if now < LAST.swap(now, SeqCst) {
                BACK.fetch_add(1, SeqCst);
            }
            TURN.fetch_add(1, SeqCst);
        }
    }
    let cpus = Cpus::start();
    TURN.store(0, SeqCst);
    cpus.begin(1, || turns(1));
    turns(0);
    cpus.wait(1);
    assert_eq!(BACK.load(SeqCst), 0, "steps back");
}

/// IA32_TSC_ADJUST is of each logical processor.
fn adjust_is_of_each_cpu() {
    let cpus = Cpus::start();
    let own = read(IA32_TSC_ADJUST);
    cpus.run(1, || {
        let before = read(IA32_TSC_ADJUST);
        write(IA32_TSC_ADJUST, before.wrapping_add(1 << 50));
        see(0, tsc());
        write(IA32_TSC_ADJUST, before);
        see(1, tsc());
    });
    assert_eq!(read(IA32_TSC_ADJUST), own);
    assert!(seen(0) >> 50 > 0 && seen(1) >> 50 == 0 && tsc() >> 50 == 0);
}

/// A breakpoint is of the CPU that set it.
fn breakpoints_are_of_each_cpu() {
    static WORD: AtomicU32 = AtomicU32::new(0);
    let cpus = Cpus::start();
    debug::watch();
    debug::set(0, WORD.as_ptr() as u64, debug::On::Write, 4);
    cpus.run(1, || {
        WORD.store(1, SeqCst);
        see(0, cpu::dr(7).unwrap_or(0));
    });
    assert_eq!(debug::hits().len(), 0, "the other CPU's write is no hit");
    assert_eq!(seen(0) & 0xFF, 0, "its DR7");
    WORD.store(2, SeqCst);
    debug::off();
    assert_eq!(debug::hits().len(), 1);
}

/// Last-branch records: on one CPU only, and only that one's branches.
fn last_branches_are_of_each_cpu() {
    let cpus = Cpus::start();
    let stack = LbrStack::here().expect("the test needs it");
    let tos = read(MSR_LASTBRANCH_TOS);
    let before = read(stack.from + tos as u32);
    cpus.run(1, || {
        write(IA32_DEBUGCTL, 1u64);
        call!(p_count(200));
        write(IA32_DEBUGCTL, 0u64);
        let stack = LbrStack::here().expect("the test needs it");
        let own = label!(p_count_jmp) + 3;
        let loops = (0..stack.depth)
            .filter(|n| read(stack.from + n) & !(7 << 61) == own)
            .count();
        see(0, loops as u64);
    });
    assert!(seen(0) > 0, "the loop's jump");
    assert_eq!((read(MSR_LASTBRANCH_TOS), read(stack.from + tos as u32)), (tos, before));
}

/// The script that people run: a loop in ring 3 on CPU 1, switched on and read through an interrupt there; each record is the loop's
/// own jump.
fn the_script_with_the_loop_on_another_cpu() {
    let cpus = Cpus::start();
    // wrmsr -p1 1C9..., 1D9 1, 1C8 1, then rdmsr -p1: an interrupt on the CPU that loops.
    exception::on(MESSAGE, |frame| {
        let stack = LbrStack::here().expect("the test needs it");
        match REACHED.fetch_add(1, SeqCst) {
            0 => {
                write(MSR_LBR_SELECT, 1u64);
                write(IA32_DEBUGCTL, 1u64);
            }
            _ => {
                let (from, to) = (label!(p_spin_jmp), label!(p_spin));
                let here =
                    |n: &u32| read(stack.from + n) & !(7 << 61) == from && read(stack.to + n) & !(0xFFFF << 48) == to;
                see(0, (0..stack.depth).filter(here).count() as u64);
                write(IA32_DEBUGCTL, 0u64);
                write(MSR_LBR_SELECT, 0u64);
                // Out of the loop.
                frame.rip = label!(p_leave);
            }
        }
        apic::eoi();
    });
    REACHED.store(0, SeqCst);
    cpus.begin(1, || {
        rt::user::run(label!(p_spin), 0, exception::IF);
    });
    for n in 1..=2 {
        for _ in 0..1000 {
            cpu::pause();
        }
        apic::send(u32::from(MESSAGE), cpus.id(1));
        assert!(until(|| REACHED.load(SeqCst) == n), "message {n}");
    }
    cpus.wait(1);
    let depth = LbrStack::here().map_or(0, |stack| stack.depth);
    assert_eq!(seen(0), u64::from(depth), "every record");
}

/// A counter counts on its CPU, and its interrupt comes there.
fn a_pmi_comes_to_its_own_cpu() {
    let cpus = Cpus::start();
    exception::on(sampling::PMI, |_| {
        REACHED.fetch_or(1 << apic::id(), SeqCst);
        write(IA32_PERF_GLOBAL_OVF_CTRL, read(IA32_PERF_GLOBAL_STATUS));
        apic::eoi();
    });
    REACHED.store(0, SeqCst);
    cpus.run(1, || {
        apic::write(apic::reg::LVT_PC, u32::from(sampling::PMI));
        sampling::counter(0, INSTRUCTIONS.with_int(true), 100);
        write(IA32_PERF_GLOBAL_CTRL, 1u64);
        cpu::enable_interrupts();
        call!(p_count(200));
        cpu::disable_interrupts();
        write(IA32_PERF_GLOBAL_CTRL, 0u64);
        write(IA32_PERFEVTSEL0, 0u64);
        apic::write(apic::reg::LVT_PC, apic::MASKED);
    });
    assert_eq!(REACHED.load(SeqCst), 1 << cpus.id(1));
    assert_eq!(read(IA32_PERFEVTSEL0), 0, "ours");
}

/// Two CPUs trace at once, each into its own table: each trace has the seven branches once.
fn traces_are_of_each_cpu() {
    let cpus = Cpus::start();
    let outputs = [
        Output::new(1, 2, Default::default()),
        Output::new(1, 2, Default::default()),
    ];
    see(0, outputs[1].table);
    see(1, 0);
    cpus.begin(1, || {
        write(IA32_RTIT_STATUS, 0u64);
        write(IA32_RTIT_OUTPUT_BASE, seen(0));
        write(IA32_RTIT_OUTPUT_MASK_PTRS, 0x7Fu64);
        for _ in 0..10 {
            pattern::run(IA32_RTIT_CTL, trace::ON.into_bits(), 0);
            cpu::pause();
        }
        see(1, read(IA32_RTIT_OUTPUT_MASK_PTRS) >> 32);
    });
    outputs[0].rewind();
    for _ in 0..10 {
        pattern::run(IA32_RTIT_CTL, trace::ON.into_bits(), 0);
        cpu::pause();
    }
    cpus.wait(1);
    let theirs: alloc::vec::Vec<u8> = (0..seen(1))
        .map(|at| paging::peek(outputs[1].regions[0] + at) as u8)
        .collect();
    for (who, bytes) in [("the boot CPU", outputs[0].bytes()), ("the other", theirs)] {
        let tips = trace::flow(&trace::packets(&bytes));
        let calls = tips
            .iter()
            .filter(|step| **step == Step::Tip(label!(p_icall_to)))
            .count();
        assert_eq!(calls, 10, "{who}: {tips:X?}");
    }
}

/// 33.2.8.1, 33.7: INIT is no reset of Intel PT. All registers stay, TraceEn with them, and the trace goes on: it shows where the
/// CPU was and where it starts again.
fn a_trace_goes_on_over_init() {
    let cpus = Cpus::start();
    let output = Output::new(1, 4, Default::default());
    see(0, output.table);
    see(1, 0);
    cpus.begin(1, || {
        write(IA32_RTIT_STATUS, 0u64);
        write(IA32_RTIT_OUTPUT_BASE, seen(0));
        write(IA32_RTIT_OUTPUT_MASK_PTRS, 0x7Fu64);
        see(1, 1);
        write(IA32_RTIT_CTL, trace::ON.into_bits());
        call!(p_spin());
    });
    assert!(until(|| seen(1) == 1), "CPU 1 spins");
    // It has said so before it does.
    time::wait(5000);
    cpus.restart(1);
    cpus.run(1, || {
        see(2, read(IA32_RTIT_CTL));
        see(3, read(IA32_RTIT_OUTPUT_BASE));
        write(IA32_RTIT_CTL, 0u64);
        see(1, read(IA32_RTIT_OUTPUT_MASK_PTRS) >> 32);
        write(IA32_RTIT_STATUS, 0u64);
    });
    assert_eq!((seen(2), seen(3)), (trace::ON.into_bits(), output.table));
    let bytes: alloc::vec::Vec<u8> = (0..seen(1))
        .map(|at| paging::peek(output.regions[0] + at) as u8)
        .collect();
    let steps = trace::flow(&trace::packets(&bytes));
    let at = steps.iter().position(|step| matches!(step, Step::Fup(_)));
    let at = at.unwrap_or_else(|| panic!("no FUP: {steps:X?}"));
    let spins = [label!(p_spin), label!(p_spin_jmp)].map(Step::Fup);
    assert!(spins.contains(&steps[at]), "{steps:X?}");
    // The start-up IPI's page is CS; addresses are offsets in it, or linear by CPUID.14H.0:ECX[31].
    let linear = cpu::leaf(0x14, 0)[2] >> 31 != 0;
    let start = if linear { rt::START_PAGE } else { 0 };
    assert_eq!(steps[at + 1], Step::Tip(start), "{steps:X?}");
}

/// Branch trace store: each CPU has its area and its switch.
fn branch_records_are_of_each_cpu() {
    let cpus = Cpus::start();
    let area = paging::pages(2);
    for (field, value) in [area + 4096, area + 4096, area + 4096 + 24 * 100, area + 4096 + 24 * 101]
        .into_iter()
        .enumerate()
    {
        paging::poke(area + 8 * field as u64, value);
    }
    see(0, area);
    cpus.run(1, || {
        write(IA32_DS_AREA, seen(0));
        pattern::run(
            IA32_DEBUGCTL,
            DebugCtl::new().with_tr(true).with_bts(true).into_bits(),
            0,
        );
        write(IA32_DS_AREA, 0u64);
    });
    assert_eq!((paging::peek(area + 8) - area - 4096) / 24, 7);
    assert_eq!(read(IA32_DS_AREA), 0, "ours");
}

/// IA32_PQR_ASSOC is of each logical processor.
fn associations_are_of_each_cpu() {
    let cpus = Cpus::start();
    cpus.run(1, || {
        write(IA32_PQR_ASSOC, 1u64);
        see(0, read(IA32_PQR_ASSOC));
        write(IA32_PQR_ASSOC, 0u64);
    });
    assert_eq!((seen(0), read(IA32_PQR_ASSOC)), (1, 0));
}

const _: () = assert!(MAX_CPUS <= 64, "APIC IDs are bits of a word");

/// NMIs of two senders are two: the first is taken at the next instruction boundary of its target, wherever the senders stand,
/// and one that comes while it is handled waits. SDM Vol. 3A 7.7.1 "Handling Multiple NMIs". Both are awaited before the next round:
/// where processors run side by side a message is under way when its sender goes on, and a third one would be one too many.
fn nmis_of_two_senders_are_two() {
    const ROUNDS: u64 = 200;
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let cpus = Cpus::start();
    exception::on(2, |_| {
        COUNT.fetch_add(1, SeqCst);
    });
    COUNT.store(0, SeqCst);
    STOP.store(false, SeqCst);
    // The round, the round of the other CPU's last NMI, the target.
    see(0, 0);
    see(1, 0);
    see(2, u64::from(apic::id()));
    cpus.begin(1, || {
        for round in 1..=ROUNDS {
            while seen(0) < round && !STOP.load(SeqCst) {
                cpu::pause();
            }
            apic::send(apic::NMI, seen(2) as u32);
            see(1, round);
        }
    });
    let mut counts = [0; 2];
    for round in 1..=ROUNDS {
        see(0, round);
        apic::send(apic::NMI, apic::id());
        if !until(|| seen(1) == round && COUNT.load(SeqCst) >= 2 * round) {
            break;
        }
        counts = [round, COUNT.load(SeqCst)];
    }
    STOP.store(true, SeqCst);
    cpus.wait(1);
    assert_eq!(counts, [ROUNDS, 2 * ROUNDS]);
}

rt::tests! {
    "tests_smp";
    every_cpu_has_its_id: need::OTHER_CPUS;
    messages: need::OTHER_CPUS;
    an_nmi_reaches_masked_interrupts: need::OTHER_CPUS;
    nmis_of_two_senders_are_two: need::OTHER_CPUS;
    tsc_goes_on_from_cpu_to_cpu: need::OTHER_CPUS;
    adjust_is_of_each_cpu: need::OTHER_CPUS, need::TSC_ADJUST;
    breakpoints_are_of_each_cpu: need::OTHER_CPUS;
    last_branches_are_of_each_cpu: need::OTHER_CPUS, need::LBR;
    the_script_with_the_loop_on_another_cpu: need::OTHER_CPUS, need::LBR, need::LBR_SELECT;
    a_pmi_comes_to_its_own_cpu: need::OTHER_CPUS, need::PMU2;
    traces_are_of_each_cpu: need::OTHER_CPUS, need::PT;
    a_trace_goes_on_over_init: need::OTHER_CPUS, need::PT;
    branch_records_are_of_each_cpu: need::OTHER_CPUS, need::BTS;
    associations_are_of_each_cpu: need::OTHER_CPUS, need::RDT_M;
}
