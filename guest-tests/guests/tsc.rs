//! The time-stamp counter. SDM Vol. 3B 18.17 "Time-Stamp Counter", Vol. 3A 11.5.4.1 "TSC-Deadline Mode".

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{self, leaf, read, tsc, write, wrmsr};
use rt::exception::{self, Fault, GP};
use rt::{apic, label, need, time, user};
use x86::cpuid::Feature;
use x86::msr::{IA32_TIME_STAMP_COUNTER, IA32_TSC_ADJUST, IA32_TSC_AUX, IA32_TSC_DEADLINE, IA32_UMWAIT_CONTROL};

core::arch::global_asm!(
    r#"
    .text
    .globl tsc_user, tsc_user_p, tsc_user_msr
tsc_user:
    rdtsc
    int     0x80
tsc_user_p:
    rdtscp
    int     0x80
tsc_user_msr:
    mov     ecx, 0x10
    rdmsr
    int     0x80
"#
);

/// RDTSCP: the counter and IA32_TSC_AUX.
fn rdtscp() -> (u64, u32) {
    let mut aux = 0;
    // SAFETY: the tests that call it need RDTSCP.
    let value = unsafe { core::arch::x86_64::__rdtscp(&mut aux) };
    (value, aux)
}

/// RDTSC and RDMSR of 10H read one counter, which goes up.
fn it_goes_up() {
    let mut last = tsc();
    for _ in 0..100 {
        let (a, b) = (read(IA32_TIME_STAMP_COUNTER), tsc());
        assert!(last < a && a < b, "{last} {a} {b}");
        last = b;
    }
}

/// RDTSCP: the counter and IA32_TSC_AUX at once.
fn rdtscp_has_aux() {
    write(IA32_TSC_AUX, 0x1234_5678u64);
    let before = tsc();
    let (value, aux) = rdtscp();
    assert_eq!(aux, 0x1234_5678);
    assert!(before < value && value < tsc());
    assert_eq!(wrmsr(IA32_TSC_AUX, 1 << 32), Err(Fault::GP0), "bits 63:32 are reserved");
}

/// RDPID.
fn rdpid_has_aux() {
    write(IA32_TSC_AUX, 0x77u64);
    let value: u64;
    // SAFETY: RDPID RAX writes that register.
    unsafe { core::arch::asm!(".byte 0xf3, 0x0f, 0xc7, 0xf8", out("rax") value) };
    assert_eq!(value, 0x77);
}

static FAULTS: AtomicU64 = AtomicU64::new(0);

fn count_faults() -> impl Fn(u64) -> u64 {
    FAULTS.store(0, SeqCst);
    exception::on(GP, |frame| {
        FAULTS.fetch_add(1, SeqCst);
        // RDTSC and RDMSR have two bytes, RDTSCP three.
        // SAFETY: the bytes of the image's own code.
        let third = unsafe { *((frame.rip + 1) as *const u8) };
        frame.rip += if third == 1 { 3 } else { 2 };
    });
    move |routine| {
        user::run(routine, 0, 0);
        FAULTS.swap(0, SeqCst)
    }
}

/// CR4.TSD keeps rings above 0 out.
fn tsd_keeps_rings_out() {
    let faults = count_faults();
    assert_eq!(faults(label!(tsc_user)), 0);
    cpu::set_cr4(cpu::cr4() | 4);
    assert_eq!(faults(label!(tsc_user)), 1);
    let _ = tsc();
    if cpu::has(Feature::Rdtscp) {
        assert_eq!(faults(label!(tsc_user_p)), 1);
    }
    cpu::set_cr4(cpu::cr4() & !4);
    assert_eq!(faults(label!(tsc_user)), 0);
    assert_eq!(faults(label!(tsc_user_msr)), 1, "RDMSR is for ring 0");
}

static TICKS: AtomicU64 = AtomicU64::new(0);

/// It counts in HLT.
fn it_counts_in_hlt() {
    apic::enable();
    exception::on(0x62, |_| {
        TICKS.fetch_add(1, SeqCst);
        apic::eoi();
    });
    TICKS.store(0, SeqCst);
    // 2 ms by the PIT would be the same; the APIC timer wakes the CPU.
    apic::write(apic::reg::DIVIDE, 0xB);
    apic::write(apic::reg::LVT_TIMER, 0x62);
    let per_ms = time::ticks_per_ms();
    let start = tsc();
    apic::write(apic::reg::INITIAL_COUNT, 1_000_000);
    let mut halts = 0;
    while TICKS.load(SeqCst) == 0 {
        cpu::halt();
        halts += 1;
    }
    let passed = tsc() - start;
    assert_eq!(halts, 1);
    // A million ticks of a timer of 10 MHz to 2 GHz.
    assert!(passed > per_ms / 4, "{passed} of {per_ms} a millisecond");
}

/// It has the frequency that leaf 15H says, within a hundredth, measured against the PIT: by one of many measurements, as a
/// hypervisor's host may run something else in the middle of any, and a wrong frequency passes none.
fn frequency_of_leaf_15h() {
    let [denominator, numerator, crystal, _] = leaf(0x15, 0);
    if denominator == 0 || numerator == 0 || crystal == 0 {
        rt::report::skip("CPUID.15H does not tell the frequency");
    }
    let says = u64::from(crystal) * u64::from(numerator) / u64::from(denominator) / 1000;
    let mut is = 0;
    for _ in 0..50 {
        is = time::measure();
        if is.abs_diff(says) < says / 100 {
            return;
        }
    }
    panic!("{is} ticks a millisecond, CPUID.15H says {says}");
}

/// WRMSR sets it, wholly on every part with 64-bit mode; the parts of before family 0FH model 3 and family 6 model 0EH clear
/// the upper half.
fn it_can_be_written() {
    let signature = leaf(1, 0)[0];
    let (family, model) = (signature >> 8 & 0xF, signature >> 4 & 0xF | signature >> 12 & 0xF0);
    let whole = if family == 6 { model >= 0xE } else { model >= 3 };
    let before = tsc();
    write(IA32_TIME_STAMP_COUNTER, 0x1234_5678_9ABC_0000u64);
    let now = tsc();
    write(IA32_TIME_STAMP_COUNTER, before);
    let expected = if whole { 0x1234_5678_9ABC_0000 } else { 0x9ABC_0000 };
    assert!(now.wrapping_sub(expected) < 1 << 24, "{now:X}H");
}

/// 18.17.3 "Time-Stamp Counter Adjustment": both move together, and ADJUST never by itself.
fn adjust_and_tsc_move_together() {
    let start = read(IA32_TSC_ADJUST);
    let step = 1u64 << 40;
    let before = tsc();
    write(IA32_TSC_ADJUST, start.wrapping_add(step));
    assert!(
        tsc().wrapping_sub(before).wrapping_sub(step) < 1 << 24,
        "the TSC has moved by as much"
    );
    let now = tsc();
    write(IA32_TIME_STAMP_COUNTER, now.wrapping_sub(step));
    let moved = start.wrapping_add(step).wrapping_sub(read(IA32_TSC_ADJUST));
    assert!(
        moved.abs_diff(step) < 1 << 24,
        "ADJUST has moved back by as much: {moved:X}H"
    );
    let adjust = read(IA32_TSC_ADJUST);
    time::wait(500);
    assert_eq!(read(IA32_TSC_ADJUST), adjust, "it does not move by itself");
    write(IA32_TSC_ADJUST, start);
    assert_eq!(read(IA32_TSC_ADJUST), start);
}

/// Reset gives 0; nobody has written it before the first test of this image that does.
fn adjust_starts_at_0() {
    assert_eq!(read(IA32_TSC_ADJUST), 0);
}

/// The deadline interrupts once, at its time, and reads 0 then; a write of 0 disarms it.
fn the_deadline_interrupts() {
    /// In milliseconds: it is to be later than the next accesses, which take a tenth of one each under a slow hypervisor.
    const FAR: u64 = 20;
    static AT: AtomicU64 = AtomicU64::new(0);
    apic::enable();
    exception::on(0x63, |_| {
        AT.store(tsc(), SeqCst);
        TICKS.fetch_add(1, SeqCst);
        apic::eoi();
    });
    TICKS.store(0, SeqCst);
    apic::write(apic::reg::LVT_TIMER, 2 << 17 | 0x63);
    let per_ms = time::ticks_per_ms();
    let start = tsc();
    let deadline = start + FAR * per_ms;
    write(IA32_TSC_DEADLINE, deadline);
    let held = read(IA32_TSC_DEADLINE);
    assert_eq!(
        held,
        deadline,
        "from {start}, {per_ms} to a ms, now {}, TICKS {}",
        tsc(),
        TICKS.load(SeqCst)
    );
    cpu::halt();
    assert_eq!(TICKS.load(SeqCst), 1);
    assert!(AT.load(SeqCst) >= deadline);
    assert_eq!(read(IA32_TSC_DEADLINE), 0);
    // Disarmed before its time.
    let end = tsc() + FAR * time::ticks_per_ms();
    write(IA32_TSC_DEADLINE, end);
    write(IA32_TSC_DEADLINE, 0u64);
    cpu::enable_interrupts();
    while tsc() < end + 1000 {
        cpu::pause();
    }
    cpu::disable_interrupts();
    assert_eq!(TICKS.load(SeqCst), 1);
    // One that has passed comes at once; in another mode of the timer the register reads 0 and drops writes.
    write(IA32_TSC_DEADLINE, 1u64);
    cpu::enable_interrupts();
    cpu::pause();
    cpu::pause();
    cpu::disable_interrupts();
    assert_eq!(TICKS.load(SeqCst), 2);
    apic::write(apic::reg::LVT_TIMER, 0x63);
    write(IA32_TSC_DEADLINE, tsc() + 1_000_000);
    assert_eq!(read(IA32_TSC_DEADLINE), 0);
}

/// Invariant TSC is a promise of CPUID alone; where it is made, it is made with RDTSCP.
fn invariant_tsc_comes_with_rdtscp() {
    if cpu::has(Feature::InvariantTsc) {
        assert!(cpu::has(Feature::Rdtscp));
    }
}

/// TPAUSE ECX with a deadline: the carry flag.
fn tpause(deadline: u64) -> bool {
    let carry: u8;
    // SAFETY: the tests that call it need WAITPKG; it changes flags alone.
    unsafe {
        core::arch::asm!(
            ".byte 0x66, 0x0f, 0xae, 0xf1",
            "setc {carry}",
            in("ecx") 0,
            in("eax") deadline as u32,
            in("edx") (deadline >> 32) as u32,
            carry = out(reg_byte) carry,
        );
    }
    carry != 0
}

/// UMONITOR of a line, a store to it if that is asked for, UMWAIT ECX with a deadline: the carry flag.
fn umwait(line: &AtomicU64, stores: bool, deadline: u64) -> bool {
    let carry: u8;
    // SAFETY: the tests that call it need WAITPKG; RDI is the address of a static.
    unsafe {
        core::arch::asm!(
            ".byte 0xf3, 0x0f, 0xae, 0xf7",
            "test {stores}, {stores}",
            "jz 2f",
            "mov qword ptr [rdi], 1",
            "2:",
            ".byte 0xf2, 0x0f, 0xae, 0xf1",
            "setc {carry}",
            stores = in(reg) u64::from(stores),
            in("rdi") line.as_ptr(),
            in("ecx") 1,
            in("eax") deadline as u32,
            in("edx") (deadline >> 32) as u32,
            carry = out(reg_byte) carry,
        );
    }
    carry != 0
}

static LINE: AtomicU64 = AtomicU64::new(0);

/// TPAUSE and UMWAIT wait for the deadline in EDX:EAX, or for the operating system's limit, which sets the carry flag.
fn user_waits() {
    let waited = |wait: &dyn Fn(u64) -> bool, ticks: u64, limit: u64| {
        write(IA32_UMWAIT_CONTROL, limit);
        let before = tsc();
        let carry = wait(before + ticks);
        (carry, tsc() - before)
    };
    for wait in [&tpause as &dyn Fn(u64) -> bool, &|deadline| {
        umwait(&LINE, false, deadline)
    }] {
        let (carry, took) = waited(wait, 100_000, 0);
        assert!(!carry && took >= 100_000, "{carry} {took}");
        let (carry, took) = waited(wait, 10_000_000, 50_000);
        assert!(
            carry && (50_000..10_000_000).contains(&took),
            "the limit: {carry} {took}"
        );
        let (carry, took) = waited(wait, 50_000, 10_000_000);
        assert!(!carry && (50_000..10_000_000).contains(&took), "{carry} {took}");
        let (carry, _) = waited(wait, 0, 0);
        assert!(!carry);
    }
    let (carry, took) = waited(&|deadline| umwait(&LINE, true, deadline), 1_000_000_000, 0);
    assert!(!carry && took < 1_000_000_000, "a store: {took}");
    cpu::refuses(IA32_UMWAIT_CONTROL, 1 << 1);
    cpu::refuses(IA32_UMWAIT_CONTROL, 1 << 32);
    write(IA32_UMWAIT_CONTROL, 0u64);
    let fault = rt::attempt!(".byte 0x66, 0x0f, 0xae, 0xf1", in("ecx") 2, in("eax") 0, in("edx") 0);
    assert_eq!(fault, Some(Fault::GP0), "a reserved bit of the state");
}

/// The APIC's timer ends a wait, whether IF lets its interrupt in or not.
fn interrupts_end_user_waits() {
    apic::enable();
    exception::on(0x63, |_| {
        TICKS.fetch_add(1, SeqCst);
        apic::eoi();
    });
    apic::write(apic::reg::LVT_TIMER, 2 << 17 | 0x63);
    write(IA32_UMWAIT_CONTROL, 0u64);
    for enabled in [true, false] {
        TICKS.store(0, SeqCst);
        let start = tsc();
        let end = start + 1000 * time::ticks_per_ms();
        write(IA32_TSC_DEADLINE, start + time::ticks_per_ms());
        if enabled {
            cpu::enable_interrupts();
        }
        let carry = tpause(end);
        assert!(tsc() < end && !carry, "long before its own deadline");
        assert_eq!(TICKS.load(SeqCst), u64::from(enabled), "delivered only if it is let in");
        cpu::enable_interrupts();
        cpu::pause();
        cpu::disable_interrupts();
        assert_eq!(TICKS.load(SeqCst), 1);
    }
}

rt::tests! {
    "tests_tsc";
    adjust_starts_at_0: need::TSC_ADJUST;
    it_goes_up;
    rdtscp_has_aux: need::RDTSCP;
    rdpid_has_aux: need::RDPID;
    tsd_keeps_rings_out;
    it_counts_in_hlt;
    frequency_of_leaf_15h;
    it_can_be_written;
    adjust_and_tsc_move_together: need::TSC_ADJUST;
    the_deadline_interrupts: need::TSC_DEADLINE;
    invariant_tsc_comes_with_rdtscp;
    user_waits: need::WAITPKG;
    interrupts_end_user_waits: need::WAITPKG;
}
