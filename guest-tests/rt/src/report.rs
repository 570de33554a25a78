//! Runs the table of tests and reports in TAP 14 (testanything.org), then ends the machine.

use core::arch::global_asm;
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::cpu::{self, rdmsr, set_dr, wrmsr};
use crate::{Need, apic, boot, exception, say};
use x86::msr;

/// A test by name.
pub struct Test {
    /// As it is reported.
    pub name: &'static str,
    /// Without these it is skipped.
    pub needs: &'static [Need],
    /// Panics where something is not as the manual says.
    pub run: fn(),
}

/// Where a skip's reason is kept while the test is left.
static mut REASON: &str = "";
/// The test that runs, for the report of a panic.
static mut CURRENT: (usize, &str) = (0, "");
static RUNNING: AtomicBool = AtomicBool::new(false);

const PASSED: u64 = 0;
const FAILED: u64 = 1;
const SKIPPED: u64 = 2;

unsafe extern "Rust" {
    /// The image's table.
    safe fn guest_tests() -> &'static [Test];
}

/// The table of an image whose tests are the 32-bit monitor's.
// SAFETY: the symbol is this crate's alone.
#[unsafe(export_name = "tests_none")]
fn none() -> &'static [Test] {
    &[]
}

/// Where the boot CPU arrives in 64-bit mode.
#[unsafe(no_mangle)]
extern "C" fn boot_cpu() -> ! {
    exception::init();
    exception::load(0);
    // Firmware may have left the interrupt controllers open, on vectors that are exceptions here.
    cpu::outb(0x21, 0xFF);
    cpu::outb(0xA1, 0xFF);
    let words = boot::command_line().split_ascii_whitespace();
    let wanted = words.filter_map(|word| word.strip_prefix("test=")).next();
    let tests = guest_tests();
    let chosen = || {
        tests
            .iter()
            .filter(|test| wanted.is_none_or(|part| test.name.contains(part)))
    };
    say!("TAP version 14\n1..{}", chosen().count());
    let mut failures = 0;
    for (number, test) in (1..).zip(chosen()) {
        let lacking = test.needs.iter().find(|need| !(need.present)());
        let routine = match lacking {
            Some(need) => need.absent,
            None => test.run,
        };
        // SAFETY: one CPU runs tests.
        unsafe { CURRENT = (number, test.name) };
        RUNNING.store(true, Ordering::SeqCst);
        let outcome = crate::call!(guarded(routine as usize));
        RUNNING.store(false, Ordering::SeqCst);
        put_back();
        match (outcome, lacking) {
            (PASSED, None) => say!("ok {number} - {}", test.name),
            (PASSED, Some(need)) => say!("ok {number} - {} # SKIP {}", test.name, need.reason),
            // SAFETY: `skip` wrote it on this CPU.
            (SKIPPED, _) => say!("ok {number} - {} # SKIP {}", test.name, unsafe { REASON }),
            // `failed` has reported it.
            _ => failures += 1,
        }
    }
    end(u8::from(failures > 0))
}

/// Leaves the test that runs: there is nothing to test here.
pub fn skip(reason: &'static str) -> ! {
    // SAFETY: one CPU runs tests.
    unsafe { REASON = reason };
    leave(SKIPPED)
}

/// What a panic comes to: the message, and the test is left.
#[cfg_attr(not(feature = "bare"), allow(dead_code))]
pub(crate) fn failed(info: &PanicInfo) -> ! {
    // First: the message of an unexpected fault shows its frame, where the faults of `quiet` put theirs.
    let text = alloc::format!("{}", info.message());
    quiet();
    // SAFETY: the boot CPU wrote it before the test began.
    let (number, name) = unsafe { CURRENT };
    say!("not ok {number} - {name}\n  ---");
    if let Some(place) = info.location() {
        say!("  at: {}:{}", place.file(), place.line());
    }
    say!("  message: |");
    for line in text.lines() {
        say!("    {line}");
    }
    say!("  ...");
    if !RUNNING.load(Ordering::SeqCst) {
        say!("Bail out! outside of a test");
        end(2);
    }
    leave(FAILED)
}

fn leave(outcome: u64) -> ! {
    crate::call!(abandon(outcome));
    unreachable!("the test was left")
}

/// Ends the machine through the debug-exit port: the status of the process is `value * 2 + 1`.
pub fn end(value: u8) -> ! {
    cpu::outb(0xF4, value);
    loop {
        cpu::disable_interrupts();
        cpu::halt();
    }
}

/// Switches off whatever watches instructions, so that a report is not part of the test.
fn quiet() {
    let _ = set_dr(7, 0x400);
    for register in [
        msr::IA32_DEBUGCTL,
        msr::IA32_PERF_GLOBAL_CTRL,
        msr::IA32_RTIT_CTL,
        msr::IA32_LBR_CTL,
    ] {
        let _ = wrmsr(register, 0);
    }
}

/// Puts back what tests change.
fn put_back() {
    cpu::disable_interrupts();
    quiet();
    exception::forget();
    let _ = set_dr(6, 0xFFFF_0FF0);
    for n in 0..4 {
        let _ = set_dr(n, 0);
    }
    for n in 0..8 {
        let _ = wrmsr(msr::IA32_PERFEVTSEL0 + n, 0);
        let _ = wrmsr(msr::IA32_PMC0 + n, 0);
    }
    for n in 0..4 {
        let _ = wrmsr(msr::IA32_FIXED_CTR0 + n, 0);
    }
    for register in [
        msr::IA32_FIXED_CTR_CTRL,
        msr::IA32_PEBS_ENABLE,
        msr::IA32_DS_AREA,
        msr::IA32_RTIT_STATUS,
        msr::MSR_LBR_SELECT,
        msr::IA32_PQR_ASSOC,
        msr::IA32_RTIT_CR3_MATCH,
    ] {
        let _ = wrmsr(register, 0);
    }
    if let Ok(status) = rdmsr(msr::IA32_PERF_GLOBAL_STATUS) {
        let _ = wrmsr(msr::IA32_PERF_GLOBAL_OVF_CTRL, status);
    }
    // A test that is left in VMX operation has CR4.VMXE fixed.
    if cpu::cr4() >> 13 & 1 != 0 {
        let _ = crate::attempt!("vmxoff");
    }
    let _ = cpu::set_cr3(boot::pml4());
    let _ = cpu::set_cr4(0x620);
    let _ = cpu::set_cr8(0);
    // An APIC that a test has switched off stays so; it has no registers then.
    if cpu::read(msr::IA32_APIC_BASE) & apic::EN != 0 {
        apic::enable();
        apic::write(apic::reg::LVT_PC, apic::MASKED);
        apic::write(apic::reg::LVT_TIMER, apic::MASKED);
        drain();
    }
}

/// Takes interrupts that a test has left pending.
fn drain() {
    for vector in 0x20..=0xFF {
        exception::on(vector, |_| apic::eoi());
    }
    cpu::enable_interrupts();
    cpu::pause();
    cpu::disable_interrupts();
    // What was in service when a test was left.
    for _ in 0..16 {
        apic::eoi();
    }
    exception::forget();
}

global_asm!(
    r#"
    .text
    .globl  guarded, abandon
guarded:
    push    rbx
    push    rbp
    push    r12
    push    r13
    push    r14
    push    r15
    sub     rsp, 8
    mov     [rip + guarded_stack], rsp
    call    rdi
    xor     eax, eax
    jmp     2f
abandon:
    mov     rsp, [rip + guarded_stack]
    mov     rax, rdi
    mov     ecx, 0x10
    mov     ds, ecx
    mov     es, ecx
    mov     ss, ecx
2:  add     rsp, 8
    pop     r15
    pop     r14
    pop     r13
    pop     r12
    pop     rbp
    pop     rbx
    ret
    .bss
    .balign 8
guarded_stack:
    .skip   8
    .text
"#
);
