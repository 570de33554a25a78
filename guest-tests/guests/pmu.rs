//! Architectural performance monitoring. SDM Vol. 3B 21.2 "Architectural Performance Monitoring".

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{self, leaf, read, refuses, write};
use rt::{apic, call, label, need};
use x86::debugctl::DebugCtl;
use x86::msr::*;
use x86::pmu::{EventSelect, status};

use crate::pattern;
use crate::sampling::*;

core::arch::global_asm!(
    r#"
    .text
    # count(IA32_PERF_GLOBAL_CTRL, times): WRMSR, MOV, a loop of two instructions, then three up to and with the last WRMSR
    .globl pm_count, pm_count_user
pm_count:
    mov     r8, rsi
    mov     ecx, 0x38f
    mov     eax, edi
    mov     rdx, rdi
    shr     rdx, 32
    wrmsr
    mov     rcx, r8
2:  dec     rcx
    jnz     2b
    mov     ecx, 0x38f
    xor     eax, eax
    xor     edx, edx
    wrmsr
    ret
"#
);

/// Table 10-1: power-up enables the general counters in IA32_PERF_GLOBAL_CTRL. First in the table, before anybody writes it.
fn power_up() {
    let general = leaf(0xA, 0)[0] >> 8 & 0xFF;
    let now = read(IA32_PERF_GLOBAL_CTRL);
    let least = (1 << general) - 1;
    assert_eq!(now & least, least, "{now:X}H");
    assert_eq!(now >> 32, 0, "no fixed counter");
}

/// Instructions that `pm_count` retires while it counts: the enabling WRMSR is the first; the last WRMSR is not counted.
const fn instructions(times: u64) -> u64 {
    1 + 1 + 2 * times + 3
}

/// Instructions retired are exact; the WRMSR that enables is the first.
fn instructions_are_exact() {
    for times in [1, 10, 1000] {
        counter(0, INSTRUCTIONS, 0);
        write(IA32_PMC0, 0u64);
        call!(pm_count(1, times));
        let seen = read(IA32_PMC0);
        // Whether the WRMSR that disables counts is the part's own.
        assert!(
            seen == instructions(times) || seen == instructions(times) + 1,
            "{seen} for {times}"
        );
    }
}

/// Branches retired are exact.
fn branches_are_exact() {
    for times in [1u64, 10, 1000] {
        counter(1, BRANCHES, 0);
        write(IA32_PMC0 + 1, 0u64);
        call!(pm_count(2, times));
        assert_eq!(read(IA32_PMC0 + 1), times);
    }
}

/// Fixed counter 0 counts what the event counts.
fn fixed_counters() {
    write(IA32_FIXED_CTR0, 0u64);
    write(IA32_FIXED_CTR_CTRL, 0x333u64);
    counter(0, INSTRUCTIONS, 0);
    write(IA32_PMC0, 0u64);
    write(IA32_FIXED_CTR0 + 1, 0u64);
    call!(pm_count(7u64 << 32 | 1, 100));
    assert_eq!(read(IA32_FIXED_CTR0), read(IA32_PMC0));
    assert!(read(IA32_FIXED_CTR0) >= instructions(100));
    assert_ne!(read(IA32_FIXED_CTR0 + 1), 0, "cycles");
}

/// OS and USR.
fn rings() {
    counter(0, INSTRUCTIONS.with_os(false), 0);
    write(IA32_PMC0, 0u64);
    call!(pm_count(1, 100));
    assert_eq!(read(IA32_PMC0), 0, "nothing in ring 3");
    counter(0, BRANCHES.with_os(false), 0);
    write(IA32_PMC0, 0u64);
    write(IA32_PERF_GLOBAL_CTRL, 1u64);
    pattern::user();
    write(IA32_PERF_GLOBAL_CTRL, 0u64);
    // The ring-3 branches; INT n is a far branch instruction that begins in ring 3.
    let seen = read(IA32_PMC0);
    assert!(
        (pattern::USER as u64..=pattern::USER as u64 + 2).contains(&seen),
        "{seen}"
    );
}

/// Without its enable in IA32_PERF_GLOBAL_CTRL, or in the select register, a counter stands.
fn two_enables() {
    counter(0, INSTRUCTIONS, 0);
    write(IA32_PMC0, 0u64);
    call!(pm_count(0, 10));
    assert_eq!(read(IA32_PMC0), 0);
    counter(0, INSTRUCTIONS.with_enable(false), 0);
    write(IA32_PMC0, 0u64);
    call!(pm_count(1, 10));
    assert_eq!(read(IA32_PMC0), 0);
}

/// WRMSR of C1H sign-extends bit 31 to the counter's width.
fn writes_are_sign_extended() {
    let width = leaf(0xA, 0)[0] >> 16 & 0xFF;
    write(IA32_PMC0, 0x8000_0000u64);
    assert_eq!(read(IA32_PMC0), (1u64 << width) - (1 << 31));
    write(IA32_PMC0, 0x7FFF_FFFFu64);
    assert_eq!(read(IA32_PMC0), 0x7FFF_FFFF);
}

/// 4C1H on takes the full width.
fn full_width_writes() {
    let width = leaf(0xA, 0)[0] >> 16 & 0xFF;
    let value = (1u64 << width) - 2;
    write(IA32_A_PMC0, value);
    assert_eq!((read(IA32_A_PMC0), read(IA32_PMC0)), (value, value));
    refuses(IA32_A_PMC0, 1 << width);
}

/// An overflow sets the status bit, with INT the PMI comes where the count says; OVF_CTRL clears the bit.
fn overflow() {
    interrupts(note_and_clear);
    counter(0, BRANCHES.with_int(true), 10);
    cpu::enable_interrupts();
    write(IA32_PERF_GLOBAL_CTRL, 1u64);
    pattern::run(0x38F, 1, 0);
    pattern::run(0x38F, 1, 0);
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 1);
    assert_eq!(entry(0).1 & 1, 1);
    assert_eq!(read(IA32_PERF_GLOBAL_STATUS) & 1, 0, "cleared by the handler");
    assert_eq!(entry(0).1 & !1 & !(3 << 58), 0);
}

/// Core cycles pass within repeated string instructions, too, and their overflow is noticed there: 21.2.1.1, and Vol. 2 "REP", which
/// takes interrupts between iterations.
fn cycles_overflow_within_strings() {
    static AFTER: AtomicU64 = AtomicU64::new(0);
    interrupts(|frame| {
        AFTER.store(read(IA32_PMC0), SeqCst);
        note_and_clear(frame);
    });
    counter(0, event(0x3C, 0).with_int(true), 20_000);
    cpu::enable_interrupts();
    write(IA32_PERF_GLOBAL_CTRL, 1u64);
    let mut filled = [0u8; 4096];
    for _ in 0..1000 {
        // SAFETY: So many bytes are there.
        unsafe {
            core::arch::asm!("rep stosb", inout("rdi") filled.as_mut_ptr() => _, inout("rcx") filled.len() => _, in("al") 1u8);
        }
        if COUNT.load(SeqCst) != 0 {
            break;
        }
    }
    write(IA32_PERF_GLOBAL_CTRL, 0u64);
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 1);
    // What the way into the handler takes, and not the rest of a string.
    let after = AFTER.load(SeqCst);
    assert!(after < 1000, "{after} cycles after the overflow");
}

/// Without INT there is only the bit.
fn overflow_without_int() {
    interrupts(note_and_clear);
    counter(0, INSTRUCTIONS, 5);
    cpu::enable_interrupts();
    call!(pm_count(1, 100));
    cpu::disable_interrupts();
    assert_eq!((COUNT.load(SeqCst), read(IA32_PERF_GLOBAL_STATUS) & 1), (0, 1));
    write(IA32_PERF_GLOBAL_OVF_CTRL, 1u64);
    assert_eq!(read(IA32_PERF_GLOBAL_STATUS) & 1, 0);
}

/// Simultaneous overflows are one PMI.
fn simultaneous_overflows_are_one_interrupt() {
    interrupts(note_and_clear);
    counter(0, INSTRUCTIONS.with_int(true), 20);
    counter(1, INSTRUCTIONS.with_int(true), 20);
    cpu::enable_interrupts();
    call!(pm_count(3, 100));
    cpu::disable_interrupts();
    assert_eq!((COUNT.load(SeqCst), entry(0).1 & 3), (1, 3));
}

/// Delivery masks LVTPC; until it is opened no other PMI comes, and the status stays.
fn delivery_masks_lvtpc() {
    interrupts(|frame| {
        note(frame);
        apic::eoi();
    });
    counter(0, INSTRUCTIONS.with_int(true), 20);
    counter(1, INSTRUCTIONS.with_int(true), 100);
    cpu::enable_interrupts();
    call!(pm_count(3, 200));
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 1);
    assert_ne!(apic::read(apic::reg::LVT_PC) & apic::MASKED, 0);
    assert_eq!(read(IA32_PERF_GLOBAL_STATUS) & 3, 3);
}

/// The PMI as NMI.
fn a_pmi_may_be_an_nmi() {
    static NMIS: AtomicU64 = AtomicU64::new(0);
    NMIS.store(0, SeqCst);
    interrupts(note);
    rt::exception::on(2, |_| {
        NMIS.fetch_add(1, SeqCst);
        write(IA32_PERF_GLOBAL_OVF_CTRL, 1u64);
    });
    apic::write(apic::reg::LVT_PC, apic::NMI);
    counter(0, INSTRUCTIONS.with_int(true), 20);
    call!(pm_count(1, 100));
    assert_eq!((NMIS.load(SeqCst), COUNT.load(SeqCst)), (1, 0), "with IF clear");
}

fn note(frame: &mut rt::exception::Frame) {
    crate::sampling::note(frame);
}

/// 18.4.7, legacy: the PMI clears IA32_PERF_GLOBAL_CTRL and DEBUGCTL.LBR.
fn legacy_freezes() {
    interrupts(|frame| {
        note(frame);
        CONTROL.store(read(IA32_PERF_GLOBAL_CTRL), SeqCst);
        DEBUG.store(read(IA32_DEBUGCTL), SeqCst);
        apic::eoi();
    });
    let frozen = DebugCtl::new()
        .with_freeze_lbrs_on_pmi(true)
        .with_freeze_perfmon_on_pmi(true);
    write(IA32_DEBUGCTL, frozen.with_lbr(true));
    counter(0, INSTRUCTIONS.with_int(true), 20);
    cpu::enable_interrupts();
    call!(pm_count(1, 100));
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 1);
    assert_eq!((CONTROL.load(SeqCst), DEBUG.load(SeqCst)), (0, frozen.into_bits()));
}

static CONTROL: AtomicU64 = AtomicU64::new(0);
static DEBUG: AtomicU64 = AtomicU64::new(0);

/// Version 4: status bits instead; clearing them in IA32_PERF_GLOBAL_STATUS_RESET goes on.
fn streamlined_freezes() {
    interrupts(|frame| {
        note(frame);
        CONTROL.store(read(IA32_PERF_GLOBAL_CTRL), SeqCst);
        let (one, two) = (read(IA32_PMC0 + 1), read(IA32_PMC0 + 1));
        DEBUG.store(two - one, SeqCst);
        write(IA32_PERF_GLOBAL_OVF_CTRL, read(IA32_PERF_GLOBAL_STATUS));
        apic::eoi();
    });
    write(
        IA32_DEBUGCTL,
        DebugCtl::new()
            .with_freeze_lbrs_on_pmi(true)
            .with_freeze_perfmon_on_pmi(true),
    );
    counter(0, INSTRUCTIONS.with_int(true), 20);
    counter(1, INSTRUCTIONS, 0);
    cpu::enable_interrupts();
    call!(pm_count(3, 100));
    cpu::disable_interrupts();
    let bits = status::LBR_FROZEN | status::COUNTERS_FROZEN;
    assert_eq!(entry(0).1 & (bits | 1), bits | 1);
    assert_eq!(CONTROL.load(SeqCst), 3, "IA32_PERF_GLOBAL_CTRL stays");
    assert_eq!(DEBUG.load(SeqCst), 0, "counters stand in the handler");
    assert_eq!(read(IA32_PERF_GLOBAL_STATUS) & bits, 0);
}

/// IA32_PERF_GLOBAL_STATUS_SET, and IA32_PERF_GLOBAL_INUSE.
fn status_set_and_inuse() {
    write(IA32_PERF_GLOBAL_STATUS_SET, 2u64);
    assert_eq!(read(IA32_PERF_GLOBAL_STATUS) & 3, 2);
    write(IA32_PERF_GLOBAL_OVF_CTRL, 2u64);
    assert_eq!(read(IA32_PERF_GLOBAL_STATUS) & 3, 0);
    counter(1, INSTRUCTIONS, 0);
    assert_eq!(read(IA32_PERF_GLOBAL_INUSE) & 3, 2);
}

/// RDPMC in ring 0 reads general counters, and fixed ones with bit 30.
fn rdpmc() {
    write(IA32_PMC0, 0x1234u64);
    write(IA32_FIXED_CTR0, 0x4321u64);
    for (index, value) in [(0u32, 0x1234u32), (1 << 30, 0x4321)] {
        let low: u32;
        let fault = rt::attempt!("rdpmc", in("ecx") index, out("eax") low, out("edx") _);
        assert_eq!((fault, low), (None, value));
    }
    let fault = rt::attempt!("rdpmc", in("ecx") 100, out("eax") _, out("edx") _);
    assert_eq!(fault, Some(rt::exception::Fault::GP0));
}

/// Counting of loops that retire far more than a slice.
fn long_runs_are_exact() {
    counter(0, BRANCHES, 0);
    write(IA32_PMC0, 0u64);
    write(IA32_PERF_GLOBAL_CTRL, 1u64);
    let before = read(IA32_PMC0);
    call!(p_count(1_000_000));
    let passed = read(IA32_PMC0) - before;
    assert!((1_000_000..1_000_040).contains(&passed), "{passed}");
    let _ = label!(p_count);
}

/// 21.2.1.1, 21.2.2: unhalted core cycles, of a general counter and a fixed one, do not pass in HLT; the time-stamp counter goes on.
fn cycles_stop_in_hlt() {
    const CYCLES: EventSelect = event(0x3C, 0);
    static WOKEN: AtomicU64 = AtomicU64::new(0);
    apic::enable();
    rt::exception::on(0x62, |_| {
        WOKEN.fetch_add(1, SeqCst);
        apic::eoi();
    });
    WOKEN.store(0, SeqCst);
    counter(0, CYCLES, 0);
    write(IA32_PMC0, 0u64);
    write(IA32_FIXED_CTR0 + 1, 0u64);
    write(IA32_FIXED_CTR_CTRL, 0x030u64);
    apic::write(apic::reg::DIVIDE, 0xB);
    apic::write(apic::reg::LVT_TIMER, 0x62);
    let start = cpu::tsc();
    apic::write(apic::reg::INITIAL_COUNT, 1_000_000);
    write(IA32_PERF_GLOBAL_CTRL, 2 << 32 | 1u64);
    while WOKEN.load(SeqCst) == 0 {
        cpu::halt();
    }
    write(IA32_PERF_GLOBAL_CTRL, 0u64);
    let passed = cpu::tsc() - start;
    for count in [read(IA32_PMC0), read(IA32_FIXED_CTR0 + 1)] {
        assert!(count > 0 && count < passed / 10, "{count} cycles of {passed}");
    }
}

core::arch::global_asm!(
    r#"
    .text
    .globl pm_guess
    # guess(times): a branch forward that goes by the bits of a number, so that half of them are guessed wrong
pm_guess:
    mov     eax, 1
2:  imul    eax, eax, 0x41c64e6d
    add     eax, 0x3039
    bt      eax, 20
    jc      3f
    nop
3:  dec     edi
    jnz     2b
    ret
"#
);

/// MSR_PERF_METRICS: IA32_PERF_CAPABILITIES\[15\].
const METRICS: need::Need = need::Need {
    reason: "no MSR_PERF_METRICS (IA32_PERF_CAPABILITIES[15] is 0)",
    present: || need::perf_capabilities() & x86::pmu::capabilities::METRICS != 0,
    absent: || cpu::no_msr(MSR_PERF_METRICS),
};

/// The slots of some code, its instructions, and the four shares: retiring, bad speculation, front-end and back-end bound.
fn slots(code: impl Fn()) -> (u64, u64, [u64; 4]) {
    write(IA32_PERF_GLOBAL_CTRL, 0u64);
    write(IA32_FIXED_CTR_CTRL, 0x3003u64);
    for register in [IA32_FIXED_CTR0, IA32_FIXED_CTR0 + 3, MSR_PERF_METRICS] {
        write(register, 0u64);
    }
    write(IA32_PERF_GLOBAL_CTRL, 1 << 48 | 1 << 35 | 1u64 << 32);
    code();
    write(IA32_PERF_GLOBAL_CTRL, 0u64);
    let metrics = read(MSR_PERF_METRICS);
    let shares = core::array::from_fn(|n| metrics >> (8 * n) & 0xFF);
    (read(IA32_FIXED_CTR0 + 3), read(IA32_FIXED_CTR0), shares)
}

/// 21.3.9.3 "Fixed Counter 3", "Performance Metrics": the slots are shared out in parts of 255 that add up, and branches that are
/// guessed wrong lose some.
fn slots_are_shared_out() {
    let (all, instructions, even) = slots(|| _ = call!(p_count(100_000)));
    assert!(
        instructions > 200_000 && all >= instructions,
        "{all} for {instructions}"
    );
    let (.., uneven) = slots(|| _ = call!(pm_guess(100_000)));
    for shares in [even, uneven] {
        let sum: u64 = shares.iter().sum();
        assert!((250..=258).contains(&sum), "{shares:?}");
        assert_ne!(shares[0], 0, "{shares:?}");
    }
    assert!(uneven[1] > even[1] + 10, "bad speculation: {even:?} and {uneven:?}");
}

/// Reserved bits.
fn reserved_bits() {
    refuses(IA32_PERFEVTSEL0, 1 << 40);
    refuses(IA32_PERF_GLOBAL_CTRL, 1 << 20);
    refuses(IA32_FIXED_CTR_CTRL, 1 << 31);
    refuses(IA32_PERF_GLOBAL_STATUS, 0);
}

rt::tests! {
    "tests_pmu";
    power_up: need::PMU2;
    instructions_are_exact: need::PMU2;
    branches_are_exact: need::PMU2;
    fixed_counters: need::PMU2;
    rings: need::PMU2;
    two_enables: need::PMU2;
    writes_are_sign_extended: need::PMU;
    full_width_writes: need::FULL_WIDTH;
    overflow: need::PMU2;
    overflow_without_int: need::PMU2;
    cycles_overflow_within_strings: need::PMU2;
    simultaneous_overflows_are_one_interrupt: need::PMU2;
    delivery_masks_lvtpc: need::PMU2;
    a_pmi_may_be_an_nmi: need::PMU2;
    legacy_freezes: need::LEGACY_FREEZE, need::LBR;
    streamlined_freezes: need::PMU4;
    status_set_and_inuse: need::PMU4;
    rdpmc: need::PMU2;
    long_runs_are_exact: need::PMU2;
    reserved_bits: need::PMU2;
    cycles_stop_in_hlt: need::PMU2;
    slots_are_shared_out: METRICS;
}
