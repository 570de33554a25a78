//! Data breakpoints on what the processor reads and writes for itself. They are apart from `dr` since QEMU's software CPU aborts
//! where a frame meets one.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::debug::{CLEAR, On, hits, off, set, watch};
use rt::exception::{self, Frame, UD};
use rt::{apic, call, label, paging};

core::arch::global_asm!(
    r#"
    .text
    # INT n; a load of ES from the selector in EDI.
    .globl dr_int, dr_int_next, dr_load_es, dr_load_es_next
dr_int:
    int     0x41
dr_int_next:
    ret
dr_load_es:
    mov     eax, es
    mov     es, edi
dr_load_es_next:
    mov     es, eax
    ret

    # The bases of the IDT and GDT, in RAX.
    .globl dr_idt, dr_gdt
dr_idt:
    sub     rsp, 16
    sidt    [rsp]
    mov     rax, [rsp + 2]
    add     rsp, 16
    ret
dr_gdt:
    sub     rsp, 16
    sgdt    [rsp]
    mov     rax, [rsp + 2]
    add     rsp, 16
    ret
"#
);

static SAVED_RIP: AtomicU64 = AtomicU64::new(0);

fn keep(frame: &mut Frame) {
    SAVED_RIP.store(frame.rip, SeqCst);
}

fn rips() -> alloc::vec::Vec<u64> {
    hits().iter().map(|hit| hit.rip).collect()
}

/// The base of the TSS by its descriptor.
fn tss() -> u64 {
    let at = call!(dr_gdt()) + u64::from(exception::selector::TSS);
    let (low, high) = (paging::peek(at), paging::peek(at + 8));
    low >> 16 & 0xFF_FFFF | low >> 32 & 0xFF00_0000 | high << 32
}

/// The top of the stack of an IST entry.
fn ist(n: u64) -> u64 {
    let at = tss() + 0x1C + 8 * n;
    paging::peek(at & !7) >> 32 | paging::peek((at & !7) + 8) << 32
}

/// Frames that the processor pushes meet data breakpoints as an instruction's stores do; the exception comes at the handler's
/// first instruction. XSA-156 "CPU lockup during exception delivery" is about what follows from it.
fn frames_meet_data_breakpoints() {
    exception::on(0x41, keep);
    exception::on(UD, |frame| {
        keep(frame);
        frame.rip += 2;
    });
    // INT n, a fault: where RIP of its frame is.
    watch();
    set(2, ist(2) - 40, On::Write, 8);
    call!(dr_int());
    off();
    assert_eq!(rips(), [exception::entry(0x41)]);
    assert_eq!(hits()[0].dr6, CLEAR | 4);
    assert_eq!(SAVED_RIP.load(SeqCst), label!(dr_int_next));
    watch();
    set(1, ist(1) - 8, On::ReadWrite, 8);
    call!(dr_fault());
    off();
    // Popped by IRET, too.
    assert_eq!(rips(), [exception::entry(UD), label!(dr_fault_next)]);
    assert_eq!(SAVED_RIP.load(SeqCst), label!(dr_fault_here));
    // An interrupt.
    if !apic::x2apic() {
        apic::enable();
        exception::on(0x42, |_| apic::eoi());
        watch();
        set(0, ist(2) - 24, On::Write, 8);
        call!(dr_step_ipi(0xFEE0_0300_u64, u64::from(apic::ICR_SELF | 0x42)));
        off();
        assert!(
            hits()
                .iter()
                .any(|hit| hit.rip == exception::entry(0x42) && hit.dr6 & 0xF == 1)
        );
    }
}

/// So do reads of the IDT, GDT and TSS, whether for an event or by an instruction.
fn tables_meet_data_breakpoints() {
    exception::on(0x41, keep);
    watch();
    set(0, call!(dr_idt()) + 16 * 0x41 + 8, On::ReadWrite, 8);
    call!(dr_int());
    off();
    assert_eq!(rips(), [exception::entry(0x41)], "the IDT");
    watch();
    set(0, call!(dr_gdt()) + 0x20, On::ReadWrite, 8);
    call!(dr_load_es(0x23));
    off();
    assert_eq!(rips(), [label!(dr_load_es_next)], "the GDT");
    watch();
    set(0, tss() + 0x1C + 8 * 2, On::ReadWrite, 4);
    call!(dr_int());
    off();
    assert_eq!(rips(), [exception::entry(0x41)], "the TSS");
    // A write is not a read.
    watch();
    set(0, call!(dr_idt()) + 16 * 0x41, On::Write, 8);
    set(1, tss() + 0x1C + 8 * 2, On::Write, 4);
    call!(dr_int());
    off();
    assert_eq!(hits(), []);
}

rt::tests! {
    "tests_dr_delivery";
    frames_meet_data_breakpoints;
    tables_meet_data_breakpoints;
}
