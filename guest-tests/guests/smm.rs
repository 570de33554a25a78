//! System-management mode: SMIs by port and by IPI, the state save area, relocation, and what debug and trace features do across it. SDM
//! Vol. 3C chapter 32 "System Management Mode".

use alloc::vec::Vec;

use pt_packet::Packet;
use rt::cpu::{self, dr, read, set_dr, write};
use rt::exception::Fault;
use rt::need::{self, LbrStack};
use rt::{apic, attempt, call, label, paging};
use x86::cpuid::Feature;
use x86::debugctl::DebugCtl;
use x86::lbr::LbrCtl;
use x86::msr::*;
use x86::pmu::capabilities;
use x86::pt::TopaEntry;
use x86::smm::MTRRCAP_SMRR;
use x86::vmx::controls::Pin;
use x86::vmx::fields::Field;

use crate::bts::Area;
use crate::sampling::{BRANCHES, INSTRUCTIONS, Pebs, counter};
use crate::trace::{ON, Output};
use crate::vmm::{self, Vmm};

core::arch::global_asm!(
    r#"
    .text
    .globl sm_handler, sm_handler_end, sm_request, sm_behind, sm_keeps, sm_guest, sm_guest_behind, sm_branches, sm_b1, sm_b1_to, sm_rep
    .globl sm_rep_behind
    # The handler: what it finds goes to 37000H, MSRs by the list there, 32-bit words are stored as a second list says, and MSRs written as a
    # third one does.
    .code16
sm_handler:
    mov     edi, 0x37000
    inc     dword ptr [edi]
    mov     eax, cr0
    mov     [edi + 4], eax
    mov     eax, cr4
    mov     [edi + 8], eax
    mov     eax, dr7
    mov     [edi + 12], eax
    xor     eax, eax
    mov     ax, cs
    mov     [edi + 16], eax
    lea     esi, [edi + 0x44]
    lea     ebx, [edi + 0x100]
    mov     ebp, [edi + 0x40]
1:  test    ebp, ebp
    jz      2f
    mov     ecx, [esi]
    rdmsr
    mov     [ebx], eax
    mov     [ebx + 4], edx
    add     esi, 4
    add     ebx, 8
    dec     ebp
    jmp     1b
2:  lea     esi, [edi + 0x804]
    mov     ebp, [edi + 0x800]
3:  test    ebp, ebp
    jz      4f
    mov     ebx, [esi]
    mov     eax, [esi + 4]
    mov     [ebx], eax
    add     esi, 8
    dec     ebp
    jmp     3b
4:  lea     esi, [edi + 0xc04]
    mov     ebp, [edi + 0xc00]
5:  test    ebp, ebp
    jz      6f
    mov     ecx, [esi]
    mov     eax, [esi + 4]
    mov     edx, [esi + 8]
    wrmsr
    add     esi, 12
    dec     ebp
    jmp     5b
6:  rsm
sm_handler_end:
    .code64

    # request(AL): RAX as it is afterwards
sm_request:
    mov     rax, rdi
    out     0xb2, al
sm_behind:
    ret

    # Whether an SMI leaves the registers that it can tell of alone: 0
sm_keeps:
    push    rbx
    push    rbp
    push    r12
    push    r15
    mov     rbx, 0x1122334455667788
    mov     rbp, 0x2233445566778899
    mov     r12, 0x33445566778899aa
    mov     r15, 0x445566778899aabb
    mov     rsi, rsp
    stc
    out     0xb2, al
    setnc   al
    movzx   eax, al
    xor     rsi, rsp
    or      rax, rsi
    mov     rcx, 0x1122334455667788
    xor     rcx, rbx
    or      rax, rcx
    mov     rcx, 0x2233445566778899
    xor     rcx, rbp
    or      rax, rcx
    mov     rcx, 0x33445566778899aa
    xor     rcx, r12
    or      rax, rcx
    mov     rcx, 0x445566778899aabb
    xor     rcx, r15
    or      rax, rcx
    pop     r15
    pop     r12
    pop     rbp
    pop     rbx
    ret

    # Two bytes to port B3H by REP OUTSB, which is no request: the third, to B2H, is one
sm_rep:
    push    rsi
    mov     rsi, rdi
    mov     edx, 0xb2
    mov     ecx, 1
    rep outsb
sm_rep_behind:
    mov     rax, rcx
    pop     rsi
    ret

    # In a VMX guest: a request, and out
sm_guest:
    out     0xb2, al
sm_guest_behind:
    vmcall

    # One taken branch, a request, and one more
sm_branches:
    jmp     sm_b1
    nop
sm_b1:
    out     0xb2, al
    jmp     sm_b1_to
    nop
sm_b1_to:
    ret
"#
);

/// Where the handler finds and leaves things.
const MAIL: u64 = 0x3_7000;
const SMBASE: u64 = 0x3_0000;
/// APMC_EN and GBL_SMI_EN of SMI_EN.
const SMI_EN: u16 = 0x630;
const ENABLED: u32 = 0x21;

fn out32(port: u16, value: u32) {
    assert_eq!(attempt!("out dx, eax", in("dx") port, in("eax") value), None);
}

fn in32(port: u16) -> u32 {
    let value: u32;
    assert_eq!(attempt!("in eax, dx", in("dx") port, out("eax") value), None);
    value
}

/// Puts the handler where SMBASE has it, and enables SMIs by port.
fn install_at(base: u64) {
    let (from, end) = (label!(sm_handler), label!(sm_handler_end));
    for at in (0..end - from).step_by(8) {
        paging::poke(base + 0x8000 + at, paging::peek(from + at));
    }
    out32(SMI_EN, ENABLED);
}

fn install() {
    for at in (0..0x1000).step_by(8) {
        paging::poke(MAIL + at, 0);
    }
    install_at(SMBASE);
}

/// The handler reads these MSRs at the next SMI.
fn ask(msrs: &[u32]) {
    paging::poke(
        MAIL + 0x40,
        msrs.len() as u64 | u64::from(msrs.first().copied().unwrap_or(0)) << 32,
    );
    for (n, msr) in msrs.iter().enumerate() {
        poke32(MAIL + 0x44 + 4 * n as u64, *msr);
    }
}

fn poke32(at: u64, value: u32) {
    let high = paging::peek(at) >> 32;
    paging::poke(at, high << 32 | u64::from(value));
}

/// The handler stores these words of 32 bits at the next SMI.
fn store(words: &[(u64, u32)]) {
    poke32(MAIL + 0x800, words.len() as u32);
    for (n, (at, value)) in words.iter().enumerate() {
        poke32(MAIL + 0x804 + 8 * n as u64, *at as u32);
        poke32(MAIL + 0x808 + 8 * n as u64, *value);
    }
}

/// The handler writes these MSRs at the next SMI, after all else.
fn set(msrs: &[(u32, u64)]) {
    poke32(MAIL + 0xc00, msrs.len() as u32);
    for (n, (msr, value)) in msrs.iter().enumerate() {
        let at = MAIL + 0xc04 + 12 * n as u64;
        poke32(at, *msr);
        poke32(at + 4, *value as u32);
        poke32(at + 8, (value >> 32) as u32);
    }
}

/// How many SMIs the handler has seen.
fn seen() -> u32 {
    paging::peek32(MAIL)
}

/// What the handler has found of an MSR.
fn found(n: u64) -> u64 {
    paging::peek(MAIL + 0x100 + 8 * n)
}

/// The field at an offset of the state save area.
fn saved(offset: u64) -> u64 {
    paging::peek(SMBASE + 0x8000 + offset)
}

/// SMIs: where the board has no port for them, or the processor lets them be, there is no SMM to be seen.
const SMM: need::Need = need::Need {
    reason: "no system-management interrupts by port B2H (ICH9's SMI_EN is not at 630H, or nothing takes them)",
    present: || {
        if in32(SMI_EN) != 0 {
            return in32(SMI_EN) == ENABLED && seen() != 0;
        }
        install();
        if in32(SMI_EN) != ENABLED {
            return false;
        }
        call!(sm_request(0));
        seen() == 1
    },
    absent: || {
        // SDM Vol. 2B "RSM": outside system-management mode.
        assert_eq!(attempt!("rsm"), Some(Fault::UD), "RSM");
    },
};

/// 32.5.1, Table 32-4: the handler's environment; RSM brings everything back.
fn the_handlers_environment() {
    install();
    assert_eq!(set_dr(7, 0x455), Ok(()));
    ask(&[IA32_EFER]);
    let before = [cpu::cr0(), cpu::cr3(), cpu::cr4(), read(IA32_EFER)];
    assert_eq!(call!(sm_keeps()), 0, "registers and flags");
    assert_eq!(seen(), 1);
    assert_eq!(dr(7), Ok(0x455), "DR7 comes back");
    assert_eq!(set_dr(7, 0x400), Ok(()));
    let now = [cpu::cr0(), cpu::cr3(), cpu::cr4(), read(IA32_EFER)];
    assert_eq!(now, before, "control registers come back");
    assert_eq!(paging::peek32(MAIL + 4) & 0x8000_000D, 0, "PE, EM, TS, PG of CR0");
    assert_eq!(
        u64::from(paging::peek32(MAIL + 4)) | 0x8000_000D,
        before[0] | 0x8000_000D,
        "the rest of CR0"
    );
    assert_eq!(paging::peek32(MAIL + 8), 0, "CR4");
    assert_eq!(paging::peek32(MAIL + 12), 0x400, "DR7");
    assert_eq!(paging::peek32(MAIL + 16), 0x3000, "CS");
    assert_eq!(found(0), 0, "IA32_EFER");
    assert_eq!(attempt!("rsm"), Some(Fault::UD), "RSM outside SMM");
}

/// Table 32-3: what is where.
fn the_state_save_area() {
    install();
    let rax = call!(sm_request(0x1234_5678_9ABC_DE42u64));
    assert_eq!(rax, 0x1234_5678_9ABC_DE42);
    for (offset, value, what) in [
        (0x7FF8, cpu::cr0(), "CR0"),
        (0x7FF0, cpu::cr3(), "CR3"),
        (0x7FE0, read(IA32_EFER), "EFER"),
        (0x7FD8, label!(sm_behind), "RIP"),
        (0x7F5C, rax, "RAX"),
        (0x7F94, rax, "RDI"),
    ] {
        assert_eq!(saved(offset), value, "{what}");
    }
    let (cs, ss) = (rt::exception::selector::CODE, rt::exception::selector::DATA);
    for (offset, value, what) in [
        (0x7FAC, cs.into(), "CS"),
        (0x7FB0, ss.into(), "SS"),
        (0x7EF8, SMBASE as u32, "SMBASE"),
        // 32.7.1: OUT with an immediate port, one byte, B2H.
        (0x7FA4, 0xB2 << 16 | 8 << 4 | 1 << 1 | 1, "I/O state"),
        (0x7F00, 0, "I/O restart, auto HALT restart"),
    ] {
        assert_eq!(saved(offset) as u32, value, "{what}");
    }
    // 32.9: I/O restart and SMBASE relocation.
    assert_eq!(saved(0x7EFC) as u32 >> 16, 3, "revision");
    assert_eq!(saved(0x7DE8), label!(sm_behind) - 2, "IO_RIP");
}

/// What the handler writes to the area is what RSM loads.
fn the_handler_changes_what_it_returns_to() {
    install();
    let area = SMBASE + 0x8000;
    store(&[(area + 0x7F5C, 0x1111_2222), (area + 0x7F60, 0x3333_4444)]);
    assert_eq!(call!(sm_request(7)), 0x3333_4444_1111_2222, "RAX");
}

/// 32.11: the next SMI finds its handler, and leaves its state, above the new SMBASE.
fn smbase_is_relocated() {
    const OTHER: u64 = 0x5_0000;
    install();
    install_at(OTHER);
    store(&[(SMBASE + 0xFEF8, OTHER as u32)]);
    call!(sm_request(1));
    assert_eq!(paging::peek32(MAIL + 16), 0x3000, "CS of the first");
    paging::poke(SMBASE + 0xFFD8, 0);
    store(&[(OTHER + 0xFEF8, SMBASE as u32)]);
    call!(sm_request(2));
    assert_eq!(paging::peek32(MAIL + 16), 0x5000, "CS of the second");
    assert_eq!(paging::peek(OTHER + 0xFFD8), label!(sm_behind), "RIP");
    assert_eq!(saved(0x7FD8), 0, "nothing where it was before");
    store(&[]);
    call!(sm_request(3));
    assert_eq!((seen(), paging::peek32(MAIL + 16)), (3, 0x3000));
}

/// 11.6.1: delivery mode 010.
fn an_ipi_is_an_smi() {
    install();
    apic::send(2 << 8 | 1 << 14, apic::id());
    for _ in 0..1000 {
        if seen() != 0 {
            break;
        }
        cpu::pause();
    }
    assert_eq!(seen(), 1);
}

/// 32.12: FFH in the field has the instruction be executed again.
fn an_io_instruction_is_restarted() {
    install();
    let bytes = paging::pages(1);
    // Once: the handler takes the word of its list that would ask again away.
    store(&[(SMBASE + 0xFF00, 0xFF), (MAIL + 0x800, 0)]);
    assert_eq!(call!(sm_rep(bytes)), 0, "RCX");
    assert_eq!(seen(), 2, "REP OUTSB and once more");
    assert_eq!(saved(0x7DE8), label!(sm_rep_behind) - 2, "IO_RIP");
    // REP OUTS, one byte, and where it was read.
    assert_eq!(saved(0x7FA4) as u32, 0xB2 << 16 | 6 << 4 | 1 << 1 | 1);
    assert_eq!(saved(0x7F9C), bytes);
    assert_eq!(saved(0x7F8C), bytes + 1, "RSI, moved once");
}

/// MSR_SMI_COUNT.
fn smis_are_counted() {
    let Ok(before) = cpu::rdmsr(MSR_SMI_COUNT) else { return };
    install();
    ask(&[MSR_SMI_COUNT]);
    call!(sm_request(1));
    assert_eq!(found(0), before + 1, "in the handler");
    call!(sm_request(1));
    assert_eq!(read(MSR_SMI_COUNT), before + 2);
    cpu::refuses(MSR_SMI_COUNT, 0);
}

/// SMRR: IA32_MTRRCAP\[11\].
const SMRR: need::Need = need::Need {
    reason: "no system-management range registers (IA32_MTRRCAP[11] is 0)",
    present: || cpu::has(Feature::Mtrr) && read(IA32_MTRRCAP) & MTRRCAP_SMRR != 0,
    absent: || {
        // Vol. 3A 12.11.2.4: "reads from or writes to registers cause general-protection exceptions".
        for msr in [IA32_SMRR_PHYSBASE, IA32_SMRR_PHYSMASK] {
            assert_eq!(cpu::rdmsr(msr), Err(Fault::GP0), "{msr:X}");
            assert_eq!(cpu::wrmsr(msr, 0), Err(Fault::GP0), "{msr:X}");
        }
    },
};

/// Valid, and the mask of a range of so many bytes.
const fn smrr_mask(bytes: u64) -> u64 {
    0xffff_ffff & !(bytes - 1) | 1 << 11
}

/// Vol. 3A 12.11.2.4: the registers are written in SMM, and read everywhere.
fn smrr_is_written_in_smm_alone() {
    install();
    let base = paging::pages(1);
    for msr in [IA32_SMRR_PHYSBASE, IA32_SMRR_PHYSMASK] {
        assert_eq!(read(msr), 0, "nobody has set it");
        cpu::refuses(msr, 0);
    }
    // Not valid: nothing is kept.
    let mask = smrr_mask(0x1000) & !(1 << 11);
    set(&[(IA32_SMRR_PHYSBASE, base | 6), (IA32_SMRR_PHYSMASK, mask)]);
    call!(sm_request(0));
    assert_eq!((read(IA32_SMRR_PHYSBASE), read(IA32_SMRR_PHYSMASK)), (base | 6, mask));
    cpu::refuses(IA32_SMRR_PHYSMASK, 0);
    paging::poke(base, 0x1234);
    assert_eq!(paging::peek(base), 0x1234);
    set(&[(IA32_SMRR_PHYSBASE, 0), (IA32_SMRR_PHYSMASK, 0)]);
    call!(sm_request(0));
    assert_eq!((read(IA32_SMRR_PHYSBASE), read(IA32_SMRR_PHYSMASK)), (0, 0));
}

/// The same: outside SMM "write accesses are ignored and read accesses return a fixed value for each byte".
fn smrr_keeps_memory_for_smm() {
    install();
    let pages = paging::pages(4);
    // Two pages of the four that are a range.
    let base = pages + 0x1000 & !0x1fff;
    let words = [base, base + 0x8, base + 0x1ff8];
    for (n, at) in words.iter().enumerate() {
        paging::poke(*at, 0x1111_1111_2222_2222 * (n as u64 + 1));
    }
    let behind = if base == pages { base + 0x2000 } else { pages };
    paging::poke(behind, 7);
    set(&[(IA32_SMRR_PHYSBASE, base | 6), (IA32_SMRR_PHYSMASK, smrr_mask(0x2000))]);
    call!(sm_request(0));
    let fixed = paging::peek32(base) as u8;
    for at in words {
        assert_eq!(paging::peek(at), u64::from_le_bytes([fixed; 8]), "{at:X}");
        paging::poke(at, 0x5555);
        assert_eq!(paging::peek(at), u64::from_le_bytes([fixed; 8]), "{at:X}, written to");
    }
    assert_eq!(paging::peek(behind), 7, "the page beside it");
    // SMM reaches it.
    store(&[(words[1], 0x7777_8888)]);
    set(&[]);
    call!(sm_request(0));
    assert_eq!(paging::peek(words[1]), u64::from_le_bytes([fixed; 8]), "still kept");
    store(&[]);
    set(&[(IA32_SMRR_PHYSMASK, 0), (IA32_SMRR_PHYSBASE, 0)]);
    call!(sm_request(0));
    assert_eq!(
        words.map(paging::peek),
        [0x1111_1111_2222_2222, 0x2222_2222_7777_8888, 0x3333_3333_6666_6666]
    );
    paging::poke(base, 3);
    assert_eq!(paging::peek(base), 3, "not kept any more");
}

/// 32.4.2.1: what SMRR is for. Handler and state save area are out of reach, and SMIs are handled.
fn smrr_keeps_the_handler_and_what_it_saves() {
    install();
    set(&[
        (IA32_SMRR_PHYSBASE, SMBASE + 0x8000),
        (IA32_SMRR_PHYSMASK, smrr_mask(0x8000)),
    ]);
    call!(sm_request(0));
    set(&[]);
    let code = paging::peek(label!(sm_handler));
    assert_ne!(paging::peek(SMBASE + 0x8000), code);
    paging::poke(SMBASE + 0x8000, 0);
    let fixed = saved(0x7F5C);
    let rax = call!(sm_request(0x1234_5678_9ABC_DE42u64));
    assert_eq!(
        (rax, seen()),
        (0x1234_5678_9ABC_DE42, 2),
        "the handler was not overwritten"
    );
    assert_eq!(saved(0x7F5C), fixed, "RAX cannot be seen");
    set(&[(IA32_SMRR_PHYSMASK, 0), (IA32_SMRR_PHYSBASE, 0)]);
    call!(sm_request(9));
    assert_eq!((saved(0x7F5C), paging::peek(SMBASE + 0x8000)), (9, code));
}

/// FREEZE_WHILE_SMM: IA32_PERF_CAPABILITIES\[12\].
const FREEZES: need::Need = need::Need {
    reason: "no FREEZE_WHILE_SMM (IA32_PERF_CAPABILITIES[12] is 0)",
    present: || need::perf_capabilities() & capabilities::FREEZE_WHILE_SMM != 0 && need::pmu_version() >= 2,
    absent: || {},
};

/// Vol. 3B 18.4.1: counters stand still in SMM, and count on after RSM.
fn counters_freeze() {
    let count = |freeze: bool| {
        install();
        ask(&[IA32_PERF_GLOBAL_CTRL, IA32_DEBUGCTL]);
        write(IA32_DEBUGCTL, DebugCtl::new().with_freeze_while_smm(freeze).into_bits());
        // Instructions retired, in both rings.
        write(IA32_PERFEVTSEL0, 0x43_00C0u64);
        write(IA32_PMC0, 0u64);
        write(IA32_PERF_GLOBAL_CTRL, 1u64);
        call!(sm_request(0));
        let control = read(IA32_PERF_GLOBAL_CTRL);
        write(IA32_PERF_GLOBAL_CTRL, 0u64);
        write(IA32_DEBUGCTL, 0u64);
        assert_eq!(control, 1, "after RSM");
        (read(IA32_PMC0), found(0), found(1))
    };
    let (running, control, _) = count(false);
    assert_eq!(control, 1, "without the bit all goes on");
    let (frozen, control, debugctl) = count(true);
    assert_eq!(control, 0, "IA32_PERF_GLOBAL_CTRL in SMM");
    assert_eq!(debugctl, 1 << 14, "IA32_DEBUGCTL in SMM");
    // The handler has 35 instructions and more: thirteen before its loops, and ten for each MSR.
    assert!(running >= frozen + 30, "{running} and {frozen}");
}

/// The same: the stack has the branches of what was interrupted alone, and records on.
fn last_branches_freeze() {
    let Some(stack) = LbrStack::here() else { return };
    let freeze = DebugCtl::new().with_freeze_while_smm(true);
    install();
    ask(&[IA32_DEBUGCTL]);
    write(IA32_DEBUGCTL, freeze.with_lbr(true).into_bits());
    call!(sm_branches());
    let control = read(IA32_DEBUGCTL);
    write(IA32_DEBUGCTL, 0u64);
    assert_eq!(control, freeze.with_lbr(true).into_bits(), "after RSM");
    assert_eq!(found(0), freeze.into_bits(), "in SMM");
    let sources: Vec<u64> = (0..stack.depth).map(|n| read(stack.from + n) & !0 >> 16).collect();
    assert!(!sources.iter().any(|from| handlers(*from)), "{sources:X?}");
    // Of four records none is left of them by now.
    assert!(
        stack.depth <= 4 || sources.contains(&(label!(sm_b1) + 2)),
        "{sources:X?}"
    );
}

/// Vol. 3B 18.4.1: FREEZE_WHILE_SMM has the processor "disable LBR, BTF, TR, and BTS fields" and nothing else; "the saved copy" comes back. Without
/// it all bits are as they were.
fn debugctl_is_saved() {
    let _area = Area::new(100, 100);
    let lbr = !cpu::has(Feature::ArchLbr) && LbrStack::here().is_some();
    let stopped = DebugCtl::new()
        .with_lbr(lbr)
        .with_btf(true)
        .with_tr(true)
        .with_bts(true);
    let kept = DebugCtl::new().with_freeze_while_smm(true).with_btint(true).into_bits();
    for (before, inside) in [
        (stopped.into_bits() | kept, kept),
        // BTS alone would store the handler's branches.
        (
            DebugCtl::new().with_lbr(lbr).with_btf(true).into_bits(),
            DebugCtl::new().with_lbr(lbr).with_btf(true).into_bits(),
        ),
    ] {
        install();
        ask(&[IA32_DEBUGCTL]);
        write(IA32_DEBUGCTL, before);
        call!(sm_request(0));
        let after = read(IA32_DEBUGCTL);
        write(IA32_DEBUGCTL, 0u64);
        assert_eq!((found(0), after), (inside, before));
    }
}

/// Whether an address is the handler's.
fn handlers(address: u64) -> bool {
    (SMBASE + 0x8000..SMBASE + 0x9000).contains(&address)
}

/// The same: the handler's branches are not stored, and those behind RSM are.
fn branch_trace_store_freezes() {
    let area = Area::new(150, 150);
    install();
    ask(&[IA32_EFER; 3]);
    let on = DebugCtl::new().with_freeze_while_smm(true).with_tr(true).with_bts(true);
    write(IA32_DEBUGCTL, on.into_bits());
    call!(sm_branches());
    write(IA32_DEBUGCTL, 0u64);
    let records = area.records();
    assert_eq!(seen(), 1);
    assert!(
        records.iter().all(|(from, to)| !handlers(*from) && !handlers(*to)),
        "{records:X?}"
    );
    for branch in [
        (label!(sm_branches), label!(sm_b1)),
        (label!(sm_b1) + 2, label!(sm_b1_to)),
    ] {
        assert!(records.contains(&branch), "{branch:X?} of {records:X?}");
    }
}

/// The same: a PEBS counter stands still with the others, so that no record is of the handler.
fn precise_events_freeze() {
    let pebs = Pebs::new(64, 64);
    install();
    ask(&[IA32_EFER; 3]);
    // A record at each branch, or at each instruction where branches are not precise: of Core.
    let each = if need::pebs_format() == 0 {
        INSTRUCTIONS
    } else {
        BRANCHES
    };
    pebs.reset(0, (-1i64 as u64) & 0xFFFF_FFFF_FFFF);
    counter(0, each, 1);
    write(IA32_DEBUGCTL, DebugCtl::new().with_freeze_while_smm(true).into_bits());
    write(IA32_PEBS_ENABLE, 1u64);
    write(IA32_PERF_GLOBAL_CTRL, 1u64);
    call!(sm_branches());
    write(IA32_PERF_GLOBAL_CTRL, 0u64);
    write(IA32_PEBS_ENABLE, 0u64);
    write(IA32_DEBUGCTL, 0u64);
    assert_eq!(seen(), 1);
    let of: Vec<u64> = (0..pebs.written()).map(|n| pebs.field(n, 8)).collect();
    assert!(!of.iter().any(|ip| handlers(*ip)), "{of:X?}");
    // Behind RSM there are the jump, RET, and what the caller does.
    let behind = of.iter().filter(|ip| **ip > label!(sm_b1)).count();
    assert!(behind >= 2, "{of:X?}");
}

/// Nothing in Table 32-4 is about IA32_PQR_ASSOC: the handler runs with the class and the RMID of what it interrupts.
fn resource_associations_stay() {
    install();
    ask(&[IA32_PQR_ASSOC]);
    let value = 1 << 32 | u64::from(cpu::has(Feature::RdtM));
    write(IA32_PQR_ASSOC, value);
    call!(sm_request(0));
    assert_eq!((found(0), read(IA32_PQR_ASSOC)), (value, value));
}

/// Vol. 3B 19.1.4: an SMI saves LBREn and clears it.
fn architectural_last_branches_stop() {
    install();
    ask(&[IA32_LBR_CTL]);
    // Every kind, ring 0.
    let on = LbrCtl::from_bits(0x7F_0003);
    write(IA32_LBR_CTL, on.into_bits());
    call!(sm_branches());
    assert_eq!(read(IA32_LBR_CTL), on.into_bits(), "after RSM");
    write(IA32_LBR_CTL, 0u64);
    assert_eq!(found(0), on.with_lbr_en(false).into_bits(), "in SMM");
}

/// 33.2.9.3: an SMI clears TraceEn, RSM brings it back; nothing of the handler is in the trace.
fn traces_stop() {
    let out = Output::new(1, 4, TopaEntry::new());
    install();
    ask(&[IA32_RTIT_CTL]);
    write(IA32_RTIT_CTL, ON.into_bits());
    call!(sm_branches());
    let control = read(IA32_RTIT_CTL);
    write(IA32_RTIT_CTL, 0u64);
    assert_eq!(control, ON.into_bits(), "after RSM");
    assert_eq!(found(0), ON.with_trace_en(false).into_bits(), "in SMM");
    let packets = out.packets();
    let behind = label!(sm_b1) + 2;
    let stops = [Packet::Fup(Some(behind)), Packet::TipPgd(None)];
    assert!(packets.windows(2).any(|two| two == stops), "{packets:X?}");
    let goes_on = packets.iter().filter(|packet| **packet == Packet::TipPge(Some(behind)));
    assert_eq!(goes_on.count(), 1, "{packets:X?}");
    let of_handler = |packet: &&Packet| matches!(packet, Packet::Tip(Some(ip)) | Packet::TipPge(Some(ip)) | Packet::Fup(Some(ip)) if *ip < 0x10_0000);
    assert_eq!(packets.iter().find(of_handler), None);
}

/// 32.14.1, 32.14.2: the default treatment in root operation.
fn vmx_root_operation_is_left_and_entered() {
    let vmm = Vmm::new(label!(sm_guest));
    install();
    let cr4 = cpu::cr4();
    call!(sm_request(0));
    assert_eq!(seen(), 1);
    assert_eq!(paging::peek32(MAIL + 8) >> 13 & 1, 0, "CR4.VMXE in SMM");
    assert_eq!(cpu::cr4(), cr4, "CR4 after RSM");
    assert_eq!(vmm.get(Field::GUEST_RIP), label!(sm_guest), "the VMCS is current again");
    assert_eq!(vmm::vmxon(vmm.vmxon), Err(vmm::Fail::Error(15)), "in root operation");
}

/// The same in non-root operation: neither a VM exit nor a VM entry.
fn a_vmx_guest_is_interrupted_without_a_vm_exit() {
    let mut vmm = Vmm::new(label!(sm_guest));
    install();
    let exited = vmm.enter();
    assert_eq!(seen(), 1);
    assert_eq!((exited.reason, exited.rip), (18, label!(sm_guest_behind)), "VMCALL");
    assert_eq!(saved(0x7FD8), label!(sm_guest_behind), "RIP of the guest");
}

/// 26.5.1: with the default treatment the VMX-preemption timer counts across an SMI, and "if the timer expires during SMI, in SMM, or during
/// RSM, a timer-induced VM exit occurs immediately after RSM".
fn the_preemption_timer_counts_in_smm() {
    let mut vmm = Vmm::new(label!(sm_guest));
    install();
    // Ten instructions each.
    ask(&[IA32_EFER; 250]);
    vmm.pin(Pin::PREEMPTION_TIMER);
    vmm.set(Field::PREEMPTION_TIMER, 1000 >> (read(0x485) & 31));
    let exited = vmm.enter();
    assert_eq!(seen(), 1);
    assert_eq!((exited.reason, exited.rip), (52, label!(sm_guest_behind)));
}

const NOT_ARCHITECTURAL: need::Need = need::Need {
    reason: "no last-branch stack (IA32_PERF_CAPABILITIES[5:0], family and model)",
    present: || !cpu::has(Feature::ArchLbr) && LbrStack::here().is_some(),
    absent: || {},
};

rt::tests! {
    "tests_smm";
    the_handlers_environment: SMM;
    the_state_save_area: SMM;
    the_handler_changes_what_it_returns_to: SMM;
    smbase_is_relocated: SMM;
    an_ipi_is_an_smi: SMM;
    an_io_instruction_is_restarted: SMM;
    smis_are_counted: SMM;
    smrr_is_written_in_smm_alone: SMM, SMRR;
    smrr_keeps_memory_for_smm: SMM, SMRR;
    smrr_keeps_the_handler_and_what_it_saves: SMM, SMRR;
    counters_freeze: SMM, FREEZES;
    last_branches_freeze: SMM, FREEZES, NOT_ARCHITECTURAL;
    debugctl_is_saved: SMM, FREEZES, need::BTS;
    branch_trace_store_freezes: SMM, FREEZES, need::BTS;
    precise_events_freeze: SMM, FREEZES, need::PEBS;
    resource_associations_stay: SMM, need::RDT_A;
    architectural_last_branches_stop: SMM, need::ARCH_LBR;
    traces_stop: SMM, need::PT;
    vmx_root_operation_is_left_and_entered: SMM, vmm::VMX;
    a_vmx_guest_is_interrupted_without_a_vm_exit: SMM, vmm::VMX;
    the_preemption_timer_counts_in_smm: SMM, vmm::VMX, vmm::TIMER;
}
