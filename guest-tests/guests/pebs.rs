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
    /// Then the source and the latency.
    pub const ADDRESS: u64 = 0x98;
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

/// Records of format 4 and later. KVM's are so without being adaptive.
const ADAPTIVE: Need = Need {
    reason: "no adaptive PEBS records (IA32_PERF_CAPABILITIES[14] is 0)",
    present: || need::pebs() && need::pebs_format() >= 4 && need::perf_capabilities() >> 14 & 1 != 0,
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

/// Load latency exists: since Nehalem, but on cores of the Atom line.
const LOAD_LATENCY: Need = Need {
    reason: "no load latency (MSR_PEBS_LD_LAT)",
    present: || need::pebs() && need::pebs_format() >= 1 && !matches!(cpu::family_model(), (6, 0x86 | 0x96 | 0x9C)),
    absent: || {},
};

/// The shape of a data or unified cache: sets and ways, by CPUID leaf 4.
fn shape(level: u32) -> (u64, u64) {
    let of_level = |leaf: &[u32; 4]| matches!(leaf[0] & 0x1F, 1 | 3) && leaf[0] >> 5 & 7 == level;
    let leaf = (0..8).map(|n| cpu::leaf(4, n)).find(of_level).expect("the part has it");
    (u64::from(leaf[2]) + 1, u64::from(leaf[1] >> 22) + 1)
}

/// Load latency: MEM_INST_RETIRED.LATENCY_ABOVE_THRESHOLD of Nehalem, MEM_TRANS_RETIRED.LOAD_LATENCY since Sandy Bridge, above 3 cycles.
/// A cold line comes from memory, a warm one from the first level, and one that other lines have driven out of the first two levels
/// from the last one, which it is in yet. Sources are those of SDM Vol. 3B Table 21-27 "Data Source Encoding for Load Latency Record".
fn load_latency() {
    const COUNTER: u32 = 3;
    let adaptive = need::pebs_format() >= 4;
    let select = if (FORMAT_1.present)() {
        event(0x0B, 0x10)
    } else {
        event(0xCD, 0x01).with_adaptive(adaptive)
    };
    // LL_EN, where records are not adaptive.
    let sampling = 1u64 << COUNTER | if adaptive { 0 } else { 1 << (32 + COUNTER) };
    let apart = matches!(cpu::family_model(), (6, 0x8F | 0x97 | 0x9A));
    let (sets, ways) = shape(2);
    let (stride, lines) = (sets * 64, ways.max(shape(1).1) + 2);
    let memory = paging::pages((stride * (lines + 1)).div_ceil(4096) as usize + 1);
    let (line, other) = (memory, memory + stride * lines + 2048);
    write(MSR_PEBS_LD_LAT, 3u64);
    if adaptive {
        // Data address, source, latency.
        write(MSR_PEBS_DATA_CFG, 1u64);
    }
    let walk = |from: u64, stride: u64, count: u64| {
        counter(COUNTER, select, 1 << 30);
        write(IA32_PEBS_ENABLE, if adaptive { 0 } else { 1u64 << (32 + COUNTER) });
        call!(pe_loads(1u64 << COUNTER, from, stride, count));
    };
    // A load that overflows, and the one that is recorded.
    let sample = |level: &str, source: u64, latency: u64| {
        let pebs = Pebs::new(4, 4);
        counter(COUNTER, select, 1);
        write(IA32_PERF_GLOBAL_OVF_CTRL, 1u64 << COUNTER);
        write(IA32_PEBS_ENABLE, sampling);
        call!(pe_loads(1u64 << COUNTER, other, line.wrapping_sub(other), 2u64));
        write(IA32_PEBS_ENABLE, 0u64);
        assert_ne!(paging::peek(pebs.at + 40), pebs.base, "{level}: a record");
        let first = if adaptive { 0x20 } else { offset::ADDRESS };
        let [address, from, took] = [0, 8, 16].map(|n| pebs.field(0, first + n));
        assert_eq!((address, from), (line, source), "{level}");
        if !adaptive {
            assert_eq!(pebs.field(0, offset::RBX), address, "the register that the load used");
        }
        // The latency of the caches; and of the instruction, which the caches' is a part of.
        let (caches, whole) = if apart {
            (took >> 32, took & 0xFFFF)
        } else {
            (took, took)
        };
        assert_eq!(caches, latency, "{level}");
        assert!(whole >= caches && whole < 2 * caches + 40, "{level}: {took:X}H");
    };
    walk(other, 0, 1);
    sample("memory", 0xA, 200);
    sample("the first level", 0x1, 4);
    walk(memory + stride, stride, lines - 1);
    sample("the last level", 0x4, 40);
}

/// Everything that an adaptive record may have, in its order: SDM Vol. 3B 21.9.2.2 "Adaptive PEBS Record Format".
fn all_adaptive_groups() {
    const ENTRIES: u64 = 8;
    let pebs = Pebs::new(32, 32);
    write(MSR_PEBS_DATA_CFG, 0xF | (ENTRIES - 1) << 24);
    let architectural = cpu::has(x86::cpuid::Feature::ArchLbr);
    if architectural {
        // Every branch, in every ring.
        write(IA32_LBR_CTL, 0x7F_0007u64);
    }
    counter(0, BRANCHES.with_adaptive(true), 4);
    enable(1);
    call!(pe_jumps(1, u64::from(!architectural)));
    if architectural {
        write(IA32_LBR_CTL, 0u64);
    }
    let size = 0x20 + 0x20 + 18 * 8 + 16 * 16 + ENTRIES * 24;
    assert_eq!(paging::peek(pebs.at + 40) - pebs.base, size);
    let word = |offset: u64| paging::peek(pebs.base + offset);
    assert_eq!(
        (word(0) & 0xFFFF_FFFF_FFFF, word(0) >> 48),
        (0xF | (ENTRIES - 1) << 24, size)
    );
    let jump = label!(pe_jump_1) + 8;
    assert_eq!((word(8), word(16) & 1), (jump, 1), "the jump, the counter");
    assert_eq!([word(0x20), word(0x28), word(0x30)], [0; 3], "a jump accesses nothing");
    assert_eq!(
        (word(0x40) & 2, word(0x48)),
        (2, jump + 2),
        "flags, and where execution goes on"
    );
    let here = core::ptr::addr_of!(pebs) as u64;
    let rsp = word(0x50 + 4 * 8);
    assert!(rsp < here && here - rsp < 4096, "RSP is the fifth register: {rsp:X}H");
    let branches = 0x20 + 0x20 + 18 * 8 + 16 * 16;
    for n in 0..4 {
        // The newest one first: this jump, and those before it, of two bytes each.
        let [from, to] = [word(branches + 24 * n), word(branches + 24 * n + 8)];
        assert_eq!((from, to), (jump - 2 * n, jump - 2 * n + 2), "branch {n}");
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
    load_latency: LOAD_LATENCY;
    all_adaptive_groups: ADAPTIVE;
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
