//! Precise event-based sampling, and the table of experiments. SDM Vol. 3B 21.6.2.4 "Processor Event Based Sampling (PEBS)",
//! 21.3.1.1.1 "Processor Event Based Sampling (PEBS)" of Nehalem. The rule of timing is in `devices/src/unit/ds/pebs.rs`.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{self, read, refuses, write};
use rt::need::{self, Need};
use rt::{apic, call, label, paging};
use x86::debugctl::DebugCtl;
use x86::msr::*;
use x86::pmu::status;

use crate::sampling::*;

core::arch::global_asm!(
    r#"
    .text
    # movs(IA32_PERF_GLOBAL_CTRL): ten moves, counting from the WRMSR on; R8 to R15 hold what they say.
    .globl pe_movs, pe_mov_1, pe_mov_2, pe_mov_end
pe_movs:
    push    r12
    push    r13
    push    r14
    push    r15
    mov     r8, 0x808
    mov     r9, 0x909
    movabs  r15, 0x0f0f0f0f00001515
    mov     ecx, 0x38f
    mov     eax, edi
    mov     rdx, rdi
    shr     rdx, 32
    wrmsr
pe_mov_1:
    mov     eax, 1
pe_mov_2:
    mov     eax, 2
    mov     eax, 3
    mov     eax, 4
    mov     eax, 5
    mov     eax, 6
    mov     eax, 7
    mov     eax, 8
    mov     eax, 9
    mov     eax, 10
pe_mov_end:
    mov     ecx, 0x38f
    xor     eax, eax
    xor     edx, edx
    wrmsr
    pop     r15
    pop     r14
    pop     r13
    pop     r12
    ret

    # The same in 32-bit code.
    .globl pe_movs32, pe_mov32_1, pe_mov32_2
pe_movs32:
    push    r15
    movabs  r15, 0x0f0f0f0f00001515
    mov     r8, 0x808
    push    0x18
    lea     rax, [rip + 2f]
    push    rax
    retfq
    .code32
2:  mov     ecx, 0x38f
    mov     eax, edi
    xor     edx, edx
    wrmsr
pe_mov32_1:
    mov     eax, 1
pe_mov32_2:
    mov     eax, 2
    mov     eax, 3
    mov     ecx, 0x38f
    xor     eax, eax
    xor     edx, edx
    wrmsr
    .byte   0xea
    .long   3f
    .word   8
    .code64
3:  pop     r15
    ret

    # jumps(IA32_PERF_GLOBAL_CTRL, IA32_DEBUGCTL): eleven jumps, counting from the WRMSR on
    .globl pe_jumps, pe_jump_1, pe_jump_10, pe_jump_11
pe_jumps:
    mov     ecx, 0x1d9
    mov     eax, esi
    xor     edx, edx
    wrmsr
    mov     ecx, 0x38f
    mov     eax, edi
    wrmsr
pe_jump_1:
    .rept   9
    jmp     7f
7:
    .endr
pe_jump_10:
    jmp     pe_jump_11
pe_jump_11:
    jmp     8f
8:  mov     ecx, 0x38f
    xor     eax, eax
    xor     edx, edx
    wrmsr
    mov     ecx, 0x1d9
    wrmsr
    ret

    # loads(IA32_PERF_GLOBAL_CTRL, address, stride, count); each load through RBX
    .globl pe_loads, pe_loads_here
pe_loads:
    push    rbx
    mov     rbx, rsi
    mov     r8, rdx
    mov     r9, rcx
    mov     ecx, 0x38f
    mov     eax, edi
    xor     edx, edx
    wrmsr
pe_loads_here:
    mov     rax, [rbx]
    add     rbx, r8
    dec     r9
    jnz     pe_loads_here
    mov     ecx, 0x38f
    xor     eax, eax
    xor     edx, edx
    wrmsr
    pop     rbx
    ret
"#
);

/// Offsets in records of formats 0 to 3. SDM Vol. 3B Table 21-3 "PEBS Record Format for Nehalem".
mod offset {
    pub const IP: u64 = 0x08;
    pub const RAX: u64 = 0x10;
    pub const RBX: u64 = 0x18;
    pub const RSP: u64 = 0x48;
    pub const R8: u64 = 0x50;
    pub const R15: u64 = 0x88;
    pub const STATUS: u64 = 0x90;
    pub const ADDRESS: u64 = 0x98;
    pub const SOURCE: u64 = 0xA0;
    pub const LATENCY: u64 = 0xA8;
}

/// Instructions retired can be sampled on counter 0: Core, Nehalem, Westmere.
const INSTRUCTIONS_PRECISE: Need = Need {
    reason: "INST_RETIRED.ANY_P is not a precise event of counter 0 here",
    present: || {
        need::pebs()
            && matches!(
                cpu::family_model(),
                (6, 0x0F | 0x17 | 0x1A | 0x1E | 0x1F | 0x2E | 0x25 | 0x2C | 0x2F)
            )
    },
    absent: || {},
};

/// Records of format 1: Nehalem and Westmere, with load latency through event 0BH.
const FORMAT_1: Need = Need {
    reason: "PEBS records are not those of Nehalem and Westmere",
    present: || need::pebs() && matches!(cpu::family_model(), (6, 0x1A | 0x1E | 0x1F | 0x2E | 0x25 | 0x2C | 0x2F)),
    absent: || {},
};

/// Records of format 0 to 3.
const FIXED_FORMAT: Need = Need {
    reason: "no PEBS records of formats 0 to 3",
    present: || need::pebs() && need::pebs_format() < 4,
    absent: || {},
};

/// Records of format 4 and later.
const ADAPTIVE: Need = Need {
    reason: "no adaptive PEBS records (IA32_PERF_CAPABILITIES[11:8] below 4)",
    present: || need::pebs() && need::pebs_format() >= 4,
    absent: || cpu::no_msr(MSR_PEBS_DATA_CFG),
};

fn enable(counters: u64) {
    write(IA32_PEBS_ENABLE, counters);
}

/// Experiment: counter preset to -1.
fn one_record_at_the_next_event() {
    let pebs = Pebs::new(8, 8);
    counter(0, INSTRUCTIONS, 1);
    enable(1);
    call!(pe_movs(1));
    assert_eq!(pebs.written(), 1);
    assert_eq!(pebs.field(0, offset::RAX), 1);
    assert_eq!(pebs.field(0, offset::IP), label!(pe_mov_2), "trap style");
    assert_eq!(pebs.field(0, offset::R8), 0x808);
    assert_eq!(pebs.field(0, offset::R15), 0x0F0F_0F0F_0000_1515);
    let rsp = pebs.field(0, offset::RSP);
    let here = core::ptr::addr_of!(pebs) as u64;
    assert!(
        rsp < here && here - rsp < 4096,
        "RSP is the whole stack pointer: {rsp:X}H"
    );
    assert_eq!(read(IA32_PERF_GLOBAL_STATUS) & 1, 0, "live");
    if need::pebs_format() >= 1 {
        assert_eq!(pebs.size, if need::pebs_format() == 1 { 0xB0 } else { pebs.size });
        assert_eq!(pebs.field(0, offset::STATUS) & 1, 1, "in the record");
    }
}

/// The same in 32-bit code: R8 to R15 are valid, too.
fn one_record_in_32_bit_code() {
    let pebs = Pebs::new(8, 8);
    counter(0, INSTRUCTIONS, 1);
    enable(1);
    call!(pe_movs32(1));
    assert_eq!(pebs.written(), 1);
    assert_eq!(
        (pebs.field(0, offset::RAX), pebs.field(0, offset::IP)),
        (1, label!(pe_mov32_2))
    );
    assert_eq!(pebs.field(0, offset::R8), 0x808);
    assert_eq!(pebs.field(0, offset::R15), 0x0F0F_0F0F_0000_1515);
}

/// Preset -3: the record is at the third move.
fn the_record_comes_at_the_third_move() {
    let pebs = Pebs::new(8, 8);
    counter(0, INSTRUCTIONS, 3);
    enable(1);
    call!(pe_movs(1));
    assert_eq!(pebs.written(), 1);
    assert_eq!(pebs.field(0, offset::RAX), 3);
    assert_eq!(pebs.field(0, offset::IP), label!(pe_mov_1) + 15);
}

/// Buffer of one record: the handler is entered twice at the same place.
fn a_buffer_of_one_record() {
    interrupts(note_and_unmask);
    let pebs = Pebs::new(1, 1);
    counter(0, INSTRUCTIONS.with_int(true), 1);
    enable(1);
    cpu::enable_interrupts();
    call!(pe_movs(1));
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 2);
    let (first, second) = (entry(0), entry(1));
    assert_eq!(first.0, label!(pe_mov_2));
    assert_eq!(second.0, first.0, "the same place");
    assert_ne!(
        first.1 & status::BUFFER,
        0,
        "OvfBuffer stands at the first entry: {:X}H",
        first.1
    );
    assert_eq!(first.2, pebs.base + pebs.size, "and the record is there");
    assert_eq!(pebs.written(), 1);
}

/// OVF_CTRL bit 62 and a reset index clear the second request.
fn the_second_request_can_be_cleared() {
    interrupts(|frame| {
        note(frame);
        let area = read(IA32_DS_AREA);
        write(IA32_PERF_GLOBAL_OVF_CTRL, status::BUFFER);
        paging::poke(area + 40, paging::peek(area + 32));
        apic::write(apic::reg::LVT_PC, u32::from(PMI));
        apic::eoi();
    });
    let _pebs = Pebs::new(1, 1);
    counter(0, INSTRUCTIONS.with_int(true), 1);
    enable(1);
    cpu::enable_interrupts();
    call!(pe_movs(1));
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 1);
    assert_eq!(read(IA32_PERF_GLOBAL_STATUS) & status::BUFFER, 0);
}

/// PMC0 plain, PMC1 PEBS: the PMI of PMC0 comes, both bits are set, and there is no record while its handler runs.
fn a_plain_counter_before_a_pebs_counter() {
    interrupts(|frame| {
        note(frame);
        apic::eoi();
    });
    let pebs = Pebs::new(8, 8);
    counter(0, INSTRUCTIONS.with_int(true), 1);
    counter(1, INSTRUCTIONS, 1);
    enable(2);
    cpu::enable_interrupts();
    call!(pe_movs(3));
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 1);
    let (_, at_entry, index) = entry(0);
    assert_eq!(at_entry & 3, 3, "both overflow bits");
    assert_eq!(index, pebs.base, "no record");
}

/// PMC0 PEBS, PMC1 plain: the record is written, and GLOBAL_STATUS then reads 2.
fn a_pebs_counter_before_a_plain_counter() {
    interrupts(|frame| {
        note(frame);
        apic::eoi();
    });
    let pebs = Pebs::new(8, 8);
    counter(0, INSTRUCTIONS, 1);
    counter(1, INSTRUCTIONS.with_int(true), 1);
    enable(1);
    cpu::enable_interrupts();
    call!(pe_movs(3));
    cpu::disable_interrupts();
    assert_eq!(pebs.written(), 1);
    assert_eq!(COUNT.load(SeqCst), 1);
    let (_, at_entry, index) = entry(0);
    assert_eq!((at_entry & 3, index), (2, pebs.base + pebs.size));
}

/// BTS threshold, PEBS record and PEBS threshold together: counter -10, eleven jumps, a buffer of one record.
fn three_conditions_at_once() {
    static BTS: AtomicU64 = AtomicU64::new(0);
    interrupts(|frame| {
        // The interrupt's own branches are left out.
        write(IA32_DEBUGCTL, 0u64);
        if COUNT.load(SeqCst) == 0 {
            BTS.store(paging::peek(read(IA32_DS_AREA) + 8), SeqCst);
        }
        note_and_unmask(frame);
    });
    let pebs = Pebs::new(1, 1);
    let bts = paging::peek(pebs.at);
    paging::poke(pebs.at + 24, bts + 10 * 24);
    counter(0, INSTRUCTIONS.with_int(true), 10);
    enable(1);
    cpu::enable_interrupts();
    call!(pe_jumps(
        1,
        DebugCtl::new()
            .with_tr(true)
            .with_bts(true)
            .with_btint(true)
            .into_bits()
    ));
    cpu::disable_interrupts();
    assert_eq!(pebs.written(), 1);
    assert_eq!(
        pebs.field(0, offset::IP),
        label!(pe_jump_11),
        "the tenth jump writes the record"
    );
    assert_eq!(COUNT.load(SeqCst), 2, "entries of the handler");
    let (rip, at_entry, index) = entry(0);
    assert_eq!(rip, label!(pe_jump_11));
    assert_ne!(at_entry & status::BUFFER, 0, "the PEBS threshold");
    assert_eq!(index, pebs.base + pebs.size, "the PEBS record");
    assert!(BTS.load(SeqCst) >= bts + 10 * 24, "the BTS threshold");
    assert_eq!(paging::peek(bts + 9 * 24), label!(pe_jump_10));
}

/// Load latency: event 0BH umask 10H, MSR_PEBS_LD_LAT = 3, LL_EN.
fn load_latency() {
    let pebs = Pebs::new(20, 20);
    let memory = paging::pages(256);
    counter(0, event(0x0B, 0x10), 1);
    pebs.reset(0, u64::MAX >> 16);
    write(MSR_PEBS_LD_LAT, 3u64);
    enable(1 | 1 << 32);
    call!(pe_loads(1, memory, 4096u64, 64u64));
    assert!(pebs.written() > 0, "some loads are sampled");
    for n in 0..pebs.written() {
        let address = pebs.field(n, offset::ADDRESS);
        assert_eq!(pebs.field(n, offset::RBX), address, "the register that the load used");
        assert!((memory..memory + 256 * 4096).contains(&address));
        assert!(pebs.field(n, offset::LATENCY) > 3);
        assert!(pebs.field(n, offset::SOURCE) <= 0xF, "a data source code");
    }
}

/// A counter on an event that cannot do PEBS: an ordinary overflow PMI.
fn an_event_that_cannot() {
    interrupts(note_and_clear);
    let pebs = Pebs::new(8, 8);
    // Unhalted cycles.
    counter(0, event(0x3C, 0).with_int(true), 5);
    enable(1);
    cpu::enable_interrupts();
    call!(pe_movs(1));
    cpu::disable_interrupts();
    assert_eq!((COUNT.load(SeqCst), pebs.written()), (1, 0));
    assert_eq!(entry(0).1 & 1, 1);
}

/// Branches can be sampled on every part with PEBS since Nehalem: the jump after the one that overflows.
fn branches_are_sampled() {
    let pebs = Pebs::new(8, 8);
    counter(0, BRANCHES, 4);
    enable(1);
    call!(pe_jumps(1, 0));
    assert_eq!(pebs.written(), 1);
    // Jumps of two bytes: the fifth ends where the sixth begins.
    assert_eq!(pebs.field(0, offset::IP), label!(pe_jump_1) + 10);
}

/// The reset value makes the next period; the reset is of PEBS counters alone.
fn counter_resets() {
    let pebs = Pebs::new(8, 8);
    counter(0, BRANCHES, 1);
    pebs.reset(0, (-2i64 as u64) & 0xFFFF_FFFF_FFFF);
    counter(1, BRANCHES, 5);
    pebs.reset(1, 7);
    enable(1);
    call!(pe_jumps(3, 0));
    // Overflow at 1, record at 2; then overflow at 4, record at 5; 7, 8; 10, 11.
    assert_eq!(pebs.written(), 4);
    for n in 0..3 {
        assert_eq!(pebs.field(n, offset::IP), label!(pe_jump_1) + 4 + 6 * n, "record {n}");
    }
    assert_eq!(pebs.field(3, offset::IP), label!(pe_jump_11) + 2);
    assert_eq!(read(IA32_PMC0 + 1), 6, "counter 1 is not reset");
}

/// At index = absolute maximum nothing is written, silently; so it is where the bounds make no sense.
fn a_full_buffer_writes_nothing() {
    let pebs = Pebs::new(2, 20);
    counter(0, BRANCHES, 1);
    pebs.reset(0, (-1i64 as u64) & 0xFFFF_FFFF_FFFF);
    enable(1);
    call!(pe_jumps(1, 0));
    assert_eq!(pebs.written(), 2);
    assert_eq!(pebs.field(2, offset::IP), 0);
    let broken = Pebs::new(4, 4);
    paging::poke(broken.at + 40, broken.base + 5 * broken.size);
    counter(0, BRANCHES, 1);
    call!(pe_jumps(1, 0));
    assert_eq!(broken.written(), 5);
}

/// With INT clear only the threshold interrupts.
fn without_int_the_threshold_interrupts() {
    interrupts(note_and_clear);
    let pebs = Pebs::new(8, 2);
    counter(0, BRANCHES, 1);
    pebs.reset(0, (-1i64 as u64) & 0xFFFF_FFFF_FFFF);
    enable(1);
    cpu::enable_interrupts();
    call!(pe_jumps(1, 0));
    cpu::disable_interrupts();
    let (rip, at_entry, index) = entry(0);
    assert!(COUNT.load(SeqCst) >= 1);
    // Records at the second and the fourth jump; the handler's own branches are sampled after them.
    assert_eq!(
        (at_entry & status::BUFFER, rip),
        (status::BUFFER, label!(pe_jump_1) + 8)
    );
    assert!(index >= pebs.base + 2 * pebs.size);
}

/// IF=0 leaves one PMI pending in IRR; a masked LVTPC drops it; the status bits stay either way.
fn if_0_and_a_masked_lvtpc() {
    interrupts(note_and_clear);
    let _pebs = Pebs::new(8, 1);
    counter(0, BRANCHES, 1);
    enable(1);
    call!(pe_jumps(1, 0));
    assert!(apic::bit(apic::reg::IRR, PMI));
    assert_ne!(read(IA32_PERF_GLOBAL_STATUS) & status::BUFFER, 0);
    cpu::enable_interrupts();
    cpu::pause();
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 1);
    apic::write(apic::reg::LVT_PC, u32::from(PMI) | apic::MASKED);
    let _pebs = Pebs::new(8, 1);
    counter(0, BRANCHES, 1);
    call!(pe_jumps(1, 0));
    assert!(!apic::bit(apic::reg::IRR, PMI));
    assert_ne!(read(IA32_PERF_GLOBAL_STATUS) & status::BUFFER, 0);
}

/// Adaptive records: the basic group alone, then with the registers. SDM Vol. 3B 21.9.2 "PEBS Record Format".
fn adaptive_records() {
    for (data_cfg, size) in [(0u64, 0x20u64), (2, 0x20 + 0x90)] {
        let pebs = Pebs::new(8, 8);
        paging::poke(pebs.at + 48, pebs.base + 8 * 0x100);
        paging::poke(pebs.at + 56, pebs.base + 8 * 0x100);
        write(MSR_PEBS_DATA_CFG, data_cfg);
        counter(0, BRANCHES.with_adaptive(data_cfg != 0), 4);
        enable(1);
        call!(pe_jumps(1, 0));
        assert_eq!(paging::peek(pebs.at + 40) - pebs.base, size);
        assert_eq!(paging::peek(pebs.base) >> 48, size, "the size in the record");
        assert_eq!(paging::peek(pebs.base + 0x10) & 1, 1, "the counter");
        // The eventing IP is the jump itself.
        assert_eq!(paging::peek(pebs.base + 8), label!(pe_jump_1) + 8);
    }
}

/// Records of format 0: Core 2.
const FORMAT_0: Need = Need {
    reason: "PEBS records are not those of Core 2",
    present: || need::pebs() && need::pebs_format() == 0,
    absent: || {},
};

/// 21.6.2.4: with EDGE, INV or CMASK the event is none that can be sampled. From Nehalem on they may be set.
fn edge_inv_and_cmask_are_not_sampled() {
    for select in [
        INSTRUCTIONS.with_edge(true),
        INSTRUCTIONS.with_counter_mask(1),
        INSTRUCTIONS.with_counter_mask(20).with_invert(true),
    ] {
        let pebs = Pebs::new(8, 8);
        counter(0, select, 1);
        enable(1);
        call!(pe_movs(1));
        assert_eq!(pebs.written(), 0, "{select:?}");
    }
}

/// The legacy freeze comes with the PEBS threshold, too: it clears IA32_DEBUGCTL.LBR, or the counters' enables.
fn the_threshold_freezes() {
    for (ctl, what) in [
        (DebugCtl::new().with_lbr(true).with_freeze_lbrs_on_pmi(true), 1),
        (DebugCtl::new().with_freeze_perfmon_on_pmi(true), 0),
    ] {
        let _pebs = Pebs::new(8, 1);
        counter(0, BRANCHES, 1);
        enable(1);
        apic::enable();
        apic::write(apic::reg::LVT_PC, u32::from(PMI));
        write(IA32_DEBUGCTL, ctl.into_bits());
        write(IA32_PERF_GLOBAL_CTRL, 1u64);
        call!(p_count(20));
        let (debugctl, global) = (read(IA32_DEBUGCTL), read(IA32_PERF_GLOBAL_CTRL));
        write(IA32_PERF_GLOBAL_CTRL, 0u64);
        write(IA32_DEBUGCTL, 0u64);
        assert_ne!(read(IA32_PERF_GLOBAL_STATUS) & status::BUFFER, 0);
        match what {
            1 => assert_eq!((debugctl & 1, global), (0, 1), "FREEZE_LBRS_ON_PMI"),
            _ => assert_eq!(global, 0, "FREEZE_PERFMON_ON_PMI"),
        }
        write(IA32_PERF_GLOBAL_OVF_CTRL, read(IA32_PERF_GLOBAL_STATUS));
    }
}

/// Bits that the part has no counter for.
fn reserved_bits() {
    refuses(IA32_PEBS_ENABLE, 1 << 31);
    refuses(IA32_PEBS_ENABLE, 1 << 62);
}

rt::tests! {
    "tests_pebs";
    one_record_at_the_next_event: INSTRUCTIONS_PRECISE;
    one_record_in_32_bit_code: INSTRUCTIONS_PRECISE;
    the_record_comes_at_the_third_move: INSTRUCTIONS_PRECISE;
    a_buffer_of_one_record: FORMAT_1;
    the_second_request_can_be_cleared: FORMAT_1;
    a_plain_counter_before_a_pebs_counter: FORMAT_1;
    a_pebs_counter_before_a_plain_counter: FORMAT_1;
    three_conditions_at_once: FORMAT_1;
    load_latency: FORMAT_1;
    an_event_that_cannot: need::PEBS, need::PMU2, PRECISE_ONLY;
    branches_are_sampled: FIXED_FORMAT, BRANCHES_PRECISE;
    counter_resets: FIXED_FORMAT, BRANCHES_PRECISE;
    a_full_buffer_writes_nothing: FIXED_FORMAT, BRANCHES_PRECISE;
    without_int_the_threshold_interrupts: FIXED_FORMAT, BRANCHES_PRECISE;
    if_0_and_a_masked_lvtpc: FIXED_FORMAT, BRANCHES_PRECISE;
    adaptive_records: ADAPTIVE;
    edge_inv_and_cmask_are_not_sampled: FORMAT_0;
    the_threshold_freezes: FIXED_FORMAT, BRANCHES_PRECISE, need::LEGACY_FREEZE;
    reserved_bits: need::PEBS;
}

/// Events must be precise: without IA32_PERF_CAPABILITIES.PEBS_BASELINE.
const PRECISE_ONLY: Need = Need {
    reason: "every event can be sampled (IA32_PERF_CAPABILITIES[14] is 1)",
    present: || need::perf_capabilities() >> 14 & 1 == 0,
    absent: || assert!(need::pebs_format() >= 4),
};

/// Branches retired can be sampled on counter 0.
const BRANCHES_PRECISE: Need = Need {
    reason: "BR_INST_RETIRED.ALL_BRANCHES is not a precise event here",
    present: || need::pebs() && !matches!(cpu::family_model(), (6, 0x0F | 0x17)),
    absent: || {},
};
