//! Debug registers and debug exceptions. SDM Vol. 3B 18.2 "Debug Registers", 18.3 "Debug Exceptions", Vol. 3A 6.8.3 "Masking
//! Exceptions and Interrupts When Switching Stacks".

use alloc::vec;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{self, dr, set_dr};
use rt::debug::{BD, BS, CLEAR, Hit, On, hits, off, set, watch};
use rt::exception::{self, BP, DB, Fault, Frame, GP, RF, TF, UD};
use rt::{apic, call, label, need, paging, user};
use x86::debug::Dr6;

core::arch::global_asm!(
    r#"
    .text
    .globl dr_run, dr_run_here, dr_run_next, dr_run_end
dr_run:
    mov     eax, 1
dr_run_here:
    mov     eax, 2
dr_run_next:
    mov     eax, 3
dr_run_end:
    ret

    .globl dr_store1, dr_store1_next, dr_store2, dr_store4, dr_store8, dr_load1, dr_load2, dr_load4, dr_load8, dr_store16
    # store(address, value), load(address)
dr_store1:
    mov     byte ptr [rdi], sil
dr_store1_next:
    ret
dr_store2:
    mov     word ptr [rdi], si
    ret
dr_store4:
    mov     dword ptr [rdi], esi
    ret
dr_store8:
    mov     qword ptr [rdi], rsi
    ret
dr_store16:
    movups  xmmword ptr [rdi], xmm0
    ret
dr_load1:
    movzx   eax, byte ptr [rdi]
    ret
dr_load2:
    movzx   eax, word ptr [rdi]
    ret
dr_load4:
    mov     eax, dword ptr [rdi]
    ret
dr_load8:
    mov     rax, qword ptr [rdi]
    ret

    .globl dr_fault, dr_fault_here, dr_fault_next
dr_fault:
    xor     eax, eax
dr_fault_here:
    ud2
dr_fault_next:
    ret

    .globl dr_int3, dr_int3_here, dr_int3_next
dr_int3:
    nop
dr_int3_here:
    int3
dr_int3_next:
    ret

    .globl dr_icebp, dr_icebp_next
dr_icebp:
    .byte   0xf1
dr_icebp_next:
    ret

    # INT1 behind prefixes: it is INT1 still. INT 1 is not.
    .globl dr_icebp_66, dr_icebp_3e, dr_icebp_rex, dr_icebp_all, dr_icebp_all_next, dr_int_1
dr_icebp_66:
    .byte   0x66, 0xf1
    ret
dr_icebp_3e:
    .byte   0x3e, 0xf1
    ret
dr_icebp_rex:
    .byte   0x48, 0xf1
    ret
dr_icebp_all:
    .byte   0xf2, 0x67, 0x66, 0x2e, 0x4f, 0xf1
dr_icebp_all_next:
    ret
dr_int_1:
    .byte   0xcd, 1
    ret

    .globl dr_out, dr_out_next, dr_in
dr_out:
    mov     edx, edi
    out     dx, al
dr_out_next:
    ret
dr_in:
    mov     edx, edi
    in      al, dx
    ret

    # outs(port, source, count)
    .globl dr_outs, dr_outs_here, dr_outs_next
dr_outs:
    mov     rcx, rdx
    mov     edx, edi
dr_outs_here:
    rep outsb
dr_outs_next:
    ret

    # movs(target, source, count)
    .globl dr_movs, dr_movs_here, dr_movs_next
dr_movs:
    mov     rcx, rdx
dr_movs_here:
    rep movsb
dr_movs_next:
    ret

    # ss(address of a word with the selector)
    .globl dr_ss, dr_ss_shadow, dr_ss_next, dr_ss_fault, dr_ss_fault_here, dr_ss_fault_next, dr_ss_int, dr_ss_int_next
    .globl dr_ss_int3, dr_ss_int3_next, dr_ss_icebp, dr_ss_icebp_next
dr_ss:
    mov     ss, word ptr [rdi]
dr_ss_shadow:
    mov     eax, 1
dr_ss_next:
    mov     eax, 2
    ret
dr_ss_fault:
    mov     ss, word ptr [rdi]
dr_ss_fault_here:
    ud2
dr_ss_fault_next:
    ret
dr_ss_int:
    mov     ss, word ptr [rdi]
    int     0x41
dr_ss_int_next:
    ret
dr_ss_int3:
    mov     ss, word ptr [rdi]
    int3
dr_ss_int3_next:
    ret
dr_ss_icebp:
    mov     ss, word ptr [rdi]
    .byte   0xf1
dr_ss_icebp_next:
    mov     eax, 1
    ret

    .globl dr_step, dr_step_1, dr_step_2, dr_step_3, dr_step_end
dr_step:
    pushfq
    or      qword ptr [rsp], 0x100
    popfq
dr_step_1:
    nop
dr_step_2:
    jmp     dr_step_3
    nop
dr_step_3:
    pushfq
    and     qword ptr [rsp], -257
    popfq
dr_step_end:
    ret

    .globl dr_step_hlt, dr_step_hlt_next
dr_step_hlt:
    pushfq
    or      qword ptr [rsp], 0x300
    popfq
    hlt
dr_step_hlt_next:
    pushfq
    and     qword ptr [rsp], -769
    popfq
    ret

    .globl dr_step_ss, dr_step_ss_1, dr_step_ss_2, dr_step_ss_3
dr_step_ss:
    mov     eax, ss
    pushfq
    or      qword ptr [rsp], 0x100
    popfq
dr_step_ss_1:
    mov     ss, eax
dr_step_ss_2:
    nop
dr_step_ss_3:
    pushfq
    and     qword ptr [rsp], -257
    popfq
    ret

    .globl dr_step_int, dr_step_int_1, dr_step_int_2, dr_step_int_3
dr_step_int:
    pushfq
    or      qword ptr [rsp], 0x100
    popfq
dr_step_int_1:
    int     0x41
dr_step_int_2:
    nop
dr_step_int_3:
    pushfq
    and     qword ptr [rsp], -257
    popfq
    ret

    # A self IPI under TF with IF set; the ICR's address in RDI, the command in ESI, or ECX, EAX for the x2APIC.
    .globl dr_step_ipi, dr_step_ipi_1, dr_step_ipi_2, dr_step_ipi_3
dr_step_ipi:
    sti
    pushfq
    or      qword ptr [rsp], 0x100
    popfq
dr_step_ipi_1:
    mov     dword ptr [rdi], esi
dr_step_ipi_2:
    nop
    nop
    nop
    nop
dr_step_ipi_3:
    pushfq
    and     qword ptr [rsp], -257
    popfq
    cli
    ret

    .globl dr_user, dr_user_here, dr_user_mov, dr_user_store, dr_user_store_next
dr_user:
    nop
dr_user_here:
    nop
dr_user_store:
    mov     byte ptr [rdi], 5
dr_user_store_next:
    int     0x80
dr_user_mov:
    mov     rax, dr7
    int     0x80

    .globl dr_gd, dr_gd_here, dr_gd_next
dr_gd:
    nop
dr_gd_here:
    mov     rax, dr0
dr_gd_next:
    ret
"#
);

/// A place to watch, in a row of its own.
static mut ROW: [u128; 4] = [0; 4];

fn row() -> u64 {
    // SAFETY: the address only.
    let at = core::ptr::addr_of!(ROW) as u64;
    for n in 0..8 {
        paging::poke(at + 8 * n, 0);
    }
    at
}

fn rips() -> Vec<u64> {
    hits().iter().map(|hit| hit.rip).collect()
}

/// The only hit; fails where there were none or more.
#[track_caller]
fn only() -> Hit {
    let all = hits();
    assert_eq!(all.len(), 1, "{all:X?}");
    all[0]
}

/// SDM 18.2.3: the reset values; the reserved bits read as 1 and 0.
fn reset_values() {
    assert_eq!(dr(6), Ok(CLEAR));
    assert_eq!(dr(7), Ok(0x400));
    for n in 0..4 {
        set_dr(n, 0x1234_5678_9ABC + n as u64).unwrap();
        assert_eq!(dr(n), Ok(0x1234_5678_9ABC + n as u64));
    }
    set_dr(6, 0).unwrap();
    let features = [x86::cpuid::Feature::BusLockDetect, x86::cpuid::Feature::Rtm];
    let shown = features
        .into_iter()
        .filter(|&f| cpu::has(f))
        .fold(x86::cpuid::Features::NONE, |set, f| set.with(f));
    assert_eq!(dr(6), Ok(Dr6::written(0, shown)));
}

/// 18.2.6: bits 63:32 of DR6 and DR7 must be 0.
fn high_halves_are_reserved() {
    assert_eq!(set_dr(6, 1 << 32), Err(Fault::GP0));
    assert_eq!(set_dr(7, 1 << 32 | 0x400), Err(Fault::GP0));
}

/// 18.3.1.1: a fault, before the instruction; the handler's RF lets it run once.
fn execute_breakpoint_is_a_fault() {
    for n in 0..4 {
        watch();
        set(n, label!(dr_run_here), On::Execute, 1);
        assert_eq!(call!(dr_run()), 3);
        off();
        let hit = only();
        assert_eq!((hit.rip, hit.rax, hit.dr6), (label!(dr_run_here), 1, CLEAR | 1 << n));
        // A breakpoint that matches may show though it is not enabled.
        set_dr(n, 0).unwrap();
        assert_eq!(
            hit.rflags & RF,
            0,
            "RF is not pushed by an instruction breakpoint itself"
        );
    }
}

/// 18.2.4: either enable does; neither does nothing.
fn local_and_global_enables() {
    for (enables, count) in [(0, 0), (1, 1), (2, 1), (3, 1)] {
        watch();
        set_dr(0, label!(dr_run_here)).unwrap();
        set_dr(7, 0x400 | enables).unwrap();
        call!(dr_run());
        off();
        assert_eq!(hits().len(), count, "enables {enables}");
    }
}

/// 18.2.5: the address must be the instruction's first byte.
fn execute_breakpoint_wants_the_first_byte() {
    watch();
    set(0, label!(dr_run_here) + 1, On::Execute, 1);
    call!(dr_run());
    off();
    assert_eq!(hits(), []);
}

static LOOPS: AtomicU64 = AtomicU64::new(0);

/// Without RF the instruction faults again and again.
fn rf_stops_the_loop() {
    LOOPS.store(0, SeqCst);
    exception::on(DB, |frame| {
        set_dr(6, CLEAR).unwrap();
        if LOOPS.fetch_add(1, SeqCst) == 4 {
            frame.rflags |= RF;
        }
    });
    set(0, label!(dr_run_here), On::Execute, 1);
    assert_eq!(call!(dr_run()), 3);
    off();
    assert_eq!(LOOPS.load(SeqCst), 5);
}

static SAVED: AtomicU64 = AtomicU64::new(0);
static SAVED_RIP: AtomicU64 = AtomicU64::new(0);

fn keep(frame: &mut Frame) {
    SAVED.store(frame.rflags, SeqCst);
    SAVED_RIP.store(frame.rip, SeqCst);
}

/// 18.3.1.1: RF is pushed as 1 by other faults, so that their return does not meet the breakpoint again.
fn faults_push_rf_set() {
    exception::on(UD, |frame| {
        keep(frame);
        frame.rip += 2;
    });
    watch();
    set(0, label!(dr_fault_here), On::Execute, 1);
    call!(dr_fault());
    off();
    assert_eq!(only().rip, label!(dr_fault_here));
    assert_eq!(SAVED_RIP.load(SeqCst), label!(dr_fault_here));
    assert_ne!(SAVED.load(SeqCst) & RF, 0);
}

/// Traps push RF as it is, which is 0 after an instruction.
fn traps_push_rf_clear() {
    exception::on(BP, keep);
    call!(dr_int3());
    assert_eq!(SAVED_RIP.load(SeqCst), label!(dr_int3_next));
    assert_eq!(SAVED.load(SeqCst) & RF, 0);
}

/// 18.2.5: any byte in range that an access touches counts; ranges are aligned to their length.
fn any_touched_byte_counts() {
    let at = row();
    // Breakpoint offset and length, access offset and size, hit.
    for (offset, len, from, size, hit) in [
        (8, 1, 8, 1, true),
        (8, 1, 7, 1, false),
        (8, 1, 9, 1, false),
        (8, 1, 7, 2, true),
        (8, 1, 5, 4, true),
        (8, 1, 4, 4, false),
        (8, 1, 1, 8, true),
        (8, 2, 9, 1, true),
        (8, 2, 10, 1, false),
        (9, 2, 8, 1, true),
        (8, 4, 11, 1, true),
        (8, 4, 12, 4, false),
        (8, 4, 5, 4, true),
        (8, 8, 15, 1, true),
        (8, 8, 16, 8, false),
        (8, 8, 1, 8, true),
        (12, 8, 8, 1, true),
        (16, 4, 5, 16, true),
        (21, 1, 5, 16, false),
    ] {
        watch();
        set(1, at + offset, On::Write, len);
        match size {
            1 => call!(dr_store1(at + from, 1)),
            2 => call!(dr_store2(at + from, 1)),
            4 => call!(dr_store4(at + from, 1)),
            8 => call!(dr_store8(at + from, 1)),
            _ => call!(dr_store16(at + from)),
        };
        off();
        let all = hits();
        assert_eq!(
            all.len(),
            usize::from(hit),
            "{len} at {offset}, access of {size} at {from}"
        );
        if hit {
            assert_eq!(all[0].dr6, CLEAR | 2);
        }
    }
}

/// Reads are watched by R/W = 11b alone, writes by both.
fn reads_and_writes() {
    let at = row();
    for (on, read, written) in [(On::Write, false, true), (On::ReadWrite, true, true)] {
        for size in [1, 2, 4, 8] {
            watch();
            set(0, at, on, size);
            match size {
                1 => call!(dr_load1(at)),
                2 => call!(dr_load2(at)),
                4 => call!(dr_load4(at)),
                _ => call!(dr_load8(at)),
            };
            off();
            assert_eq!(hits().len(), usize::from(read), "{on:?}, a load of {size}");
        }
        watch();
        set(0, at, on, 1);
        call!(dr_store1(at, 3));
        off();
        assert_eq!(hits().len(), usize::from(written), "{on:?}, a store");
    }
    // Fetches are no reads.
    watch();
    set(0, label!(dr_run_here), On::ReadWrite, 1);
    call!(dr_run());
    off();
    assert_eq!(hits(), []);
}

/// 18.3.1.2: a trap, after the instruction; the old value is gone.
fn data_breakpoint_is_a_trap() {
    let at = row();
    watch();
    set(3, at, On::Write, 1);
    call!(dr_store1(at, 0x77));
    off();
    let hit = only();
    assert_eq!((hit.rip, hit.dr6), (label!(dr_store1_next), CLEAR | 8));
    assert_eq!(paging::peek(at) as u8, 0x77);
}

/// 18.2.3: once a breakpoint is met, the bits of others that match are set, enabled or not.
fn dr6_shows_the_breakpoints_that_matched() {
    let at = row();
    watch();
    set(0, at, On::Write, 8);
    set(1, at + 4, On::ReadWrite, 4);
    set(2, at + 8, On::Write, 8);
    call!(dr_store4(at + 4, 1));
    off();
    assert_eq!(only().dr6, CLEAR | 3);
}

/// 18.2.3: certain debug exceptions may clear B0 to B3, and the parts do so at each; nothing else in DR6 is ever cleared.
fn breakpoint_bits_are_of_the_last_exception() {
    let at = row();
    exception::on(DB, |frame| {
        keep(frame);
        SAVED.store(dr(6).unwrap(), SeqCst);
    });
    set_dr(6, CLEAR | BS | BD).unwrap();
    set(0, at, On::Write, 1);
    set(1, at + 1, On::Write, 1);
    call!(dr_store1(at, 1));
    assert_eq!(SAVED.load(SeqCst), CLEAR | BS | BD | 1);
    call!(dr_store1(at + 1, 1));
    assert_eq!(SAVED.load(SeqCst), CLEAR | BS | BD | 2);
    off();
    // A single step meets no breakpoint.
    set_dr(6, CLEAR | BD | 0xF).unwrap();
    call!(dr_step());
    assert_eq!(SAVED.load(SeqCst), CLEAR | BS | BD);
}

/// 18.2.5, R/W = 10b with CR4.DE.
fn io_breakpoint_is_a_trap() {
    cpu::set_cr4(cpu::cr4() | 8);
    for len in [1, 2, 4] {
        watch();
        set(2, 0x80, On::Port, len);
        call!(dr_out(0x80));
        let hit = only();
        assert_eq!((hit.rip, hit.dr6), (label!(dr_out_next), CLEAR | 4));
        watch();
        call!(dr_in(0x80));
        call!(dr_out(0x80 + len - 1));
        // A port beyond, and memory at the same address.
        call!(dr_in(0x80 + len));
        call!(dr_load1(0x80));
        off();
        assert_eq!(hits().len(), 2, "length {len}");
    }
}

/// 18.3.1.2: with an I/O breakpoint REP OUTS traps after its first iteration.
fn io_breakpoint_stops_rep_after_an_iteration() {
    cpu::set_cr4(cpu::cr4() | 8);
    watch();
    set(0, 0x80, On::Port, 1);
    call!(dr_outs(0x80, row(), 3));
    off();
    let all = hits();
    assert_eq!(all[0].rip, label!(dr_outs_here));
    assert_eq!(all[0].rcx, 2);
    assert_ne!(all[0].rflags & RF, 0, "RF is pushed as 1 between iterations");
    let last = all[all.len() - 1];
    assert_eq!((last.rip, last.rcx), (label!(dr_outs_next), 0));
    assert_eq!(last.rflags & RF, 0, "and as 0 after the last");
    assert_eq!(all.len(), 3);
}

/// 18.3.1.2: a data breakpoint in REP MOVS is seen at once or at the end of the group of iterations.
fn data_breakpoint_in_rep() {
    let (to, from) = (row(), label!(dr_run));
    watch();
    set(0, to + 5, On::Write, 1);
    call!(dr_movs(to, from, 32));
    off();
    let hit = only();
    assert_eq!(hit.dr6, CLEAR | 1);
    let between = hit.rip == label!(dr_movs_here) && hit.rcx <= 26;
    assert!(between || hit.rip == label!(dr_movs_next) && hit.rcx == 0, "{hit:X?}");
    assert_eq!(hit.rflags & RF != 0, between, "RF between iterations alone");
    for n in 0..4 {
        assert_eq!(
            paging::peek(to + 8 * n),
            paging::peek(from + 8 * n),
            "the copy is whole"
        );
    }
}

/// 18.2.2: DR4 and DR5 are DR6 and DR7, or #UD with CR4.DE.
fn dr4_and_dr5() {
    set_dr(6, CLEAR).unwrap();
    assert_eq!(dr(4), Ok(CLEAR));
    assert_eq!(dr(5), Ok(0x400));
    set_dr(5, 0x400 | 1 << 9).unwrap();
    assert_eq!(dr(7), Ok(0x400 | 1 << 9));
    off();
    cpu::set_cr4(cpu::cr4() | 8);
    for n in [4, 5] {
        assert_eq!(dr(n), Err(Fault::UD));
        assert_eq!(set_dr(n, 0), Err(Fault::UD));
    }
}

/// 18.2.4: the next MOV of a debug register is a #DB with BD before it, and GD is cleared for the handler.
fn general_detect() {
    watch();
    set_dr(0, 0x1234).unwrap();
    set_dr(7, 0x400 | 1 << 13).unwrap();
    assert_eq!(call!(dr_gd()), 0x1234);
    let hit = only();
    assert_eq!((hit.rip, hit.dr6), (label!(dr_gd_here), CLEAR | BD));
    assert_eq!(dr(7), Ok(0x400));
}

/// MOV DR is for ring 0: #GP, before GD.
fn mov_dr_in_ring_3() {
    exception::on(GP, |frame| {
        keep(frame);
        frame.rip += 3;
    });
    watch();
    SAVED_RIP.store(0, SeqCst);
    user::run(label!(dr_user_mov), 0, 0);
    assert_eq!(SAVED_RIP.load(SeqCst), label!(dr_user_mov));
    assert_eq!(hits(), []);
}

/// Breakpoints are linear addresses, at any privilege.
fn breakpoints_in_ring_3() {
    let at = row();
    watch();
    set(0, label!(dr_user_here), On::Execute, 1);
    set(1, at, On::Write, 1);
    user::run(label!(dr_user), at, 0);
    off();
    let seen: Vec<_> = hits().iter().map(|hit| (hit.rip, hit.dr6, hit.cs & 3)).collect();
    let (first, second) = (label!(dr_user_here), label!(dr_user_store_next));
    assert_eq!(seen, [(first, CLEAR | 1, 3), (second, CLEAR | 2, 3)]);
}

/// A breakpoint is met through any mapping of its linear address, and through no other linear address of the page.
fn breakpoints_are_linear_addresses() {
    let page = paging::pages(1);
    paging::map(paging::FREE, page, paging::P | paging::W);
    watch();
    set(0, paging::FREE + 16, On::Write, 8);
    call!(dr_store8(page + 16, 1));
    assert_eq!(hits(), []);
    call!(dr_store8(paging::FREE + 16, 2));
    off();
    assert_eq!(hits().len(), 1);
    assert_eq!(paging::peek(page + 16), 2);
}

/// An access that faults has not happened: no data breakpoint.
fn a_faulting_access_is_no_access() {
    let page = paging::pages(1);
    paging::map(paging::FREE, page, 0);
    exception::on(exception::PF, |frame| {
        keep(frame);
        paging::map(
            paging::FREE,
            cpu::cr2() & 0xFFF | SAVED_PAGE.load(SeqCst),
            paging::P | paging::W,
        );
    });
    SAVED_PAGE.store(page, SeqCst);
    watch();
    set(0, paging::FREE, On::Write, 8);
    call!(dr_store8(paging::FREE, 3));
    off();
    assert_ne!(SAVED.load(SeqCst) & RF, 0, "the page fault pushes RF");
    assert_eq!(hits().len(), 1, "once, when it was done again");
}

static SAVED_PAGE: AtomicU64 = AtomicU64::new(0);

/// A word that holds the stack segment's selector.
static STACK_SELECTOR: AtomicU64 = AtomicU64::new(0x10);

fn selector() -> u64 {
    core::ptr::addr_of!(STACK_SELECTOR) as u64
}

/// 6.8.3: an instruction breakpoint right after MOV SS is suppressed.
fn execute_breakpoint_after_mov_ss() {
    watch();
    set(0, label!(dr_ss_shadow), On::Execute, 1);
    assert_eq!(call!(dr_ss(selector())), 2);
    off();
    assert_eq!(hits(), []);
    watch();
    set(0, label!(dr_ss_next), On::Execute, 1);
    call!(dr_ss(selector()));
    off();
    assert_eq!(rips(), [label!(dr_ss_next)]);
}

/// 6.8.3: the data breakpoint of MOV SS itself comes after the next instruction.
fn data_breakpoint_of_mov_ss() {
    watch();
    set(0, selector(), On::ReadWrite, 2);
    call!(dr_ss(selector()));
    off();
    let hit = only();
    assert_eq!((hit.rip, hit.rax, hit.dr6), (label!(dr_ss_next), 1, CLEAR | 1));
}

/// It is lost if that instruction faults.
fn data_breakpoint_of_mov_ss_before_a_fault() {
    exception::on(UD, |frame| {
        keep(frame);
        frame.rip += 2;
    });
    watch();
    set(0, selector(), On::ReadWrite, 2);
    call!(dr_ss_fault(selector()));
    off();
    assert_eq!(SAVED_RIP.load(SeqCst), label!(dr_ss_fault_here));
    assert_eq!(hits(), []);
}

/// Before INT n and INT3 it comes at the handler's first instruction. SDM Vol. 3A 6.8.3.
fn data_breakpoint_of_mov_ss_before_int() {
    exception::on(0x41, keep);
    watch();
    set(0, selector(), On::ReadWrite, 2);
    call!(dr_ss_int(selector()));
    off();
    assert_eq!(SAVED_RIP.load(SeqCst), label!(dr_ss_int_next));
    assert_eq!(rips(), [exception::entry(0x41)]);
    exception::on(BP, keep);
    watch();
    set(0, selector(), On::ReadWrite, 2);
    call!(dr_ss_int3(selector()));
    off();
    assert_eq!(SAVED_RIP.load(SeqCst), label!(dr_ss_int3_next));
    assert_eq!(rips(), [exception::entry(BP)]);
}

/// INT1 drops it: there is one #DB, which shows no breakpoint (`tools/testing/selftests/x86/mov_ss_trap.c` of Linux has what
/// the parts do).
fn data_breakpoint_of_mov_ss_before_int1() {
    watch();
    set(0, selector(), On::ReadWrite, 2);
    call!(dr_ss_icebp(selector()));
    off();
    let hit = only();
    assert_eq!((hit.rip, hit.dr6), (label!(dr_ss_icebp_next), CLEAR));
}

/// 18.3.1.4: the instruction that sets TF is not stepped; each after it is, the one that clears it included.
fn single_step() {
    watch();
    call!(dr_step());
    let all = hits();
    assert!(all.iter().all(|hit| hit.dr6 == CLEAR | BS), "{all:X?}");
    let end = label!(dr_step_end);
    let pops = end - 1;
    let expected = vec![label!(dr_step_2), label!(dr_step_3), label!(dr_step_3) + 1, pops, end];
    assert_eq!(rips(), expected);
}

/// Delivery clears TF.
fn delivery_clears_tf() {
    static INSIDE: AtomicU64 = AtomicU64::new(0);
    exception::on(DB, |frame| {
        INSIDE.fetch_or(cpu::flags(), SeqCst);
        SAVED.fetch_or(frame.rflags, SeqCst);
    });
    SAVED.store(0, SeqCst);
    call!(dr_step());
    assert_eq!(INSIDE.load(SeqCst) & TF, 0);
    assert_ne!(SAVED.load(SeqCst) & TF, 0);
}

/// Vol. 2A "HLT": a debug exception ends it, as an interrupt does; the frame holds the next instruction.
fn a_step_ends_hlt() {
    static TIMER: AtomicU64 = AtomicU64::new(0);
    // Where no #DB ends it, this does; where hypervisors are slow it may come behind.
    apic::enable();
    exception::on(0x43, |_| {
        TIMER.store(hits().len() as u64 + 1, SeqCst);
        apic::eoi();
    });
    apic::write(apic::reg::DIVIDE, 0xB);
    apic::write(apic::reg::LVT_TIMER, 0x43);
    watch();
    apic::write(apic::reg::INITIAL_COUNT, 20_000_000);
    call!(dr_step_hlt());
    apic::write(apic::reg::INITIAL_COUNT, 0);
    let all = hits();
    assert_ne!(TIMER.load(SeqCst), 1, "the timer has ended it");
    assert_eq!((all[0].rip, all[0].dr6), (label!(dr_step_hlt_next), CLEAR | BS));
    assert_eq!(all.len(), 4, "and the next instruction is stepped");
}

/// No step right after MOV SS.
fn no_step_after_mov_ss() {
    watch();
    call!(dr_step_ss());
    let seen = rips();
    assert_eq!(seen[..2], [label!(dr_step_ss_3), label!(dr_step_ss_3) + 1]);
}

/// INT n clears TF: neither it nor its handler is stepped, and IRET's TF takes effect one instruction later.
fn int_n_is_not_stepped() {
    exception::on(0x41, keep);
    watch();
    call!(dr_step_int());
    assert_ne!(SAVED.load(SeqCst) & TF, 0, "pushed as it was");
    assert_eq!(rips()[0], label!(dr_step_int_3));
}

/// The step comes before the pending interrupt, whose handler is not stepped.
fn a_step_beats_an_interrupt() {
    static ORDER: AtomicU64 = AtomicU64::new(0);
    static BEFORE: AtomicU64 = AtomicU64::new(0);
    if apic::x2apic() {
        rt::report::skip("the APIC is in x2APIC mode, where no store writes the ICR");
    }
    apic::enable();
    exception::on(0x42, |frame| {
        ORDER.store(frame.rip, SeqCst);
        BEFORE.store(hits().len() as u64, SeqCst);
        apic::eoi();
    });
    watch();
    call!(dr_step_ipi(0xFEE0_0300_u64, u64::from(apic::ICR_SELF | 0x42)));
    let interrupted = ORDER.load(SeqCst);
    assert!(
        (label!(dr_step_ipi_2)..=label!(dr_step_ipi_3)).contains(&interrupted),
        "{interrupted:X}H"
    );
    let all = rips();
    assert_eq!(all[0], label!(dr_step_ipi_2));
    // The step of the instruction before the interrupt was delivered first, and all are in the routine.
    assert_eq!(all[BEFORE.load(SeqCst) as usize - 1], interrupted);
    assert!(
        all.iter().all(|rip| (label!(dr_step_ipi)..label!(dr_gd)).contains(rip)),
        "{all:X?}"
    );
}

/// INT1 is a #DB that has no bit in DR6 and shows no breakpoint there, INT3 a #BP; both after the instruction.
fn int1_and_int3() {
    watch();
    call!(dr_icebp());
    let hit = only();
    assert_eq!((hit.rip, hit.dr6), (label!(dr_icebp_next), CLEAR));
    watch();
    set_dr(6, CLEAR | BS | 5).unwrap();
    call!(dr_icebp());
    assert_eq!(only().dr6, CLEAR | BS);
    watch();
    call!(dr_icebp_all());
    assert_eq!(only().rip, label!(dr_icebp_all_next), "with prefixes");
    exception::on(BP, keep);
    call!(dr_int3());
    assert_eq!(SAVED_RIP.load(SeqCst), label!(dr_int3_next));
}

/// One instruction, several conditions: one #DB with all bits.
fn step_and_breakpoint_together() {
    watch();
    set(0, label!(dr_step_2), On::Execute, 1);
    call!(dr_step());
    off();
    let all = hits();
    // The trap of the instruction before comes first; it, too, is delivered at this address.
    assert_eq!(all[0].rip, label!(dr_step_2));
    assert_ne!(all[0].dr6 & BS, 0);
    let at_it = all.iter().filter(|hit| hit.rip == label!(dr_step_2));
    let bits = at_it.fold(0, |bits, hit| bits | hit.dr6 & 0xF);
    assert_eq!(bits, 1);
}

core::arch::global_asm!(
    r#"
    .text
    .globl dr_rtm_int3, dr_rtm_store
    # Both return EAX of the abort, or FFFFFFFFH where the transaction commits.
dr_rtm_int3:
    mov     eax, -1
    .byte   0xc7, 0xf8
    .long   2f - 1f
1:  int3
    .byte   0x0f, 0x01, 0xd5
2:  ret
dr_rtm_store:
    mov     eax, -1
    .byte   0xc7, 0xf8
    .long   2f - 1f
1:  mov     byte ptr [rdi], 9
    .byte   0x0f, 0x01, 0xd5
2:  ret
"#
);

/// 18.3.3: a #DB or #BP in a transaction aborts it with EAX\[4\] and is not delivered.
fn debug_exceptions_abort_transactions() {
    let at = row();
    watch();
    exception::on(BP, keep);
    SAVED_RIP.store(0, SeqCst);
    let status = call!(dr_rtm_int3()) as u32;
    assert_eq!(status & 1 << 4, 1 << 4, "{status:X}H");
    assert_eq!(SAVED_RIP.load(SeqCst), 0);
    set(0, at, On::Write, 1);
    let status = call!(dr_rtm_store(at)) as u32;
    off();
    assert_eq!(status & 1 << 4, 1 << 4, "{status:X}H");
    assert_eq!((hits().len(), paging::peek(at)), (0, 0));
}

rt::tests! {
    "tests_dr";
    reset_values;
    high_halves_are_reserved;
    execute_breakpoint_is_a_fault;
    local_and_global_enables;
    execute_breakpoint_wants_the_first_byte;
    rf_stops_the_loop;
    faults_push_rf_set;
    traps_push_rf_clear;
    any_touched_byte_counts;
    reads_and_writes;
    data_breakpoint_is_a_trap;
    dr6_shows_the_breakpoints_that_matched;
    breakpoint_bits_are_of_the_last_exception;
    io_breakpoint_is_a_trap;
    io_breakpoint_stops_rep_after_an_iteration;
    data_breakpoint_in_rep;
    dr4_and_dr5;
    general_detect;
    mov_dr_in_ring_3;
    breakpoints_in_ring_3;
    breakpoints_are_linear_addresses;
    a_faulting_access_is_no_access;
    execute_breakpoint_after_mov_ss;
    data_breakpoint_of_mov_ss;
    data_breakpoint_of_mov_ss_before_a_fault;
    data_breakpoint_of_mov_ss_before_int;
    data_breakpoint_of_mov_ss_before_int1;
    single_step;
    delivery_clears_tf;
    a_step_ends_hlt;
    no_step_after_mov_ss;
    int_n_is_not_stepped;
    a_step_beats_an_interrupt;
    int1_and_int3;
    step_and_breakpoint_together;
    debug_exceptions_abort_transactions: need::RTM;
}
