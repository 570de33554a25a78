//! The stack of last-branch records in MSRs. SDM Vol. 3B 18.4.8 "LBR Stack", 18.5 to 18.14 by microarchitecture.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{read, refuses, write};
use rt::exception::{BP, DB};
use rt::need::{self, LbrStack};
use rt::{apic, call, cpu, exception, label, user};
use x86::lbr::LbrSelect;
use x86::msr::{IA32_DEBUGCTL, MSR_LASTBRANCH_TOS, MSR_LBR_SELECT};

use crate::pattern::{self, Kind};

const LBR: u64 = 1;
/// The address in a FROM or TO register: the bits above hold flags or cycles in some formats.
const ADDRESS: u64 = (1 << 48) - 1;

fn stack() -> LbrStack {
    LbrStack::here().expect("the table says LBR")
}

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    from: u64,
    to: u64,
}

/// The records, newest first.
fn records() -> Vec<Record> {
    let stack = stack();
    let tos = read(MSR_LASTBRANCH_TOS) as u32;
    (0..stack.depth)
        .map(|n| (tos + stack.depth - n) % stack.depth)
        .map(|at| Record {
            from: read(stack.from + at) & ADDRESS,
            to: read(stack.to + at) & ADDRESS,
        })
        .collect()
}

/// Clears the records, as software does.
fn clear() {
    let stack = stack();
    write(IA32_DEBUGCTL, 0u64);
    for n in 0..stack.depth {
        write(stack.from + n, 0u64);
        write(stack.to + n, 0u64);
        if let Some(info) = stack.info {
            write(info + n, 0u64);
        }
    }
}

fn select(value: LbrSelect) {
    if stack().select {
        write(MSR_LBR_SELECT, value.into_bits());
    }
}

/// The registers are `depth` FROMs and TOs and no more; TOS and they can be read and written.
/// Family and model of the Haswell client parts with that register.
const HASWELL: (u32, u32) = (6, 0x3c);

fn registers_by_depth() {
    let stack = stack();
    for n in 0..stack.depth {
        for register in [Some(stack.from), Some(stack.to), stack.info].into_iter().flatten() {
            write(register + n, 0u64);
            assert_eq!(read(register + n), 0);
            write(register + n, 0x1234u64);
            assert_eq!(read(register + n), 0x1234, "{:X}H", register + n);
        }
    }
    // Other registers follow the shorter stacks of some models; westmere's 690H is nothing.
    if stack.depth == 16 {
        // Haswell's 690H is MSR_CORE_PERF_LIMIT_REASONS. SDM Vol. 4, "MSRs in Processors Based on Haswell Microarchitecture".
        if cpu::family_model() != HASWELL {
            cpu::no_msr(stack.from + 16);
        }
        cpu::no_msr(stack.to + 16);
    }
    if let Some(info) = stack.info {
        // Behind the TO registers is the TSC deadline.
        cpu::no_msr(stack.from + 32);
        cpu::no_msr(info + 32);
    }
    assert!(read(MSR_LASTBRANCH_TOS) < u64::from(stack.depth));
}

/// Formats as the model's IA32_PERF_CAPABILITIES\[5:0\] says: addresses are whole and sign-extended.
fn addresses_are_whole() {
    let stack = stack();
    clear();
    select(LbrSelect::new());
    pattern::run(IA32_DEBUGCTL, LBR, 0);
    let tos = read(MSR_LASTBRANCH_TOS) as u32;
    let (from, to) = (read(stack.from + tos), read(stack.to + tos));
    let last = pattern::branches()[6];
    // Bits 63:61 of FROM are flags in formats 3 and 4; bits 63:48 of TO are cycles in format 6.
    assert_eq!(from & !(7 << 61), last.from);
    assert_eq!(to, last.to);
    if !matches!(stack.format, 3 | 4) {
        assert_eq!(from, last.from, "format {}", stack.format);
    }
}

/// Taken branches are recorded in order, and nothing else; TOS moves before each write.
fn taken_branches_in_order() {
    clear();
    select(LbrSelect::new());
    let before = read(MSR_LASTBRANCH_TOS) as u32;
    pattern::run(IA32_DEBUGCTL, LBR, 0);
    let stack = stack();
    let expected: Vec<_> = pattern::branches().iter().rev().map(|b| (b.from, b.to)).collect();
    let seen: Vec<_> = records().iter().map(|r| (r.from, r.to)).collect();
    let most = expected.len().min(stack.depth as usize);
    assert_eq!(seen[..most], expected[..most]);
    assert!(seen[most..].iter().all(|&(from, to)| from == 0 && to == 0), "{seen:X?}");
    assert_eq!(read(MSR_LASTBRANCH_TOS) as u32, (before + 7) % stack.depth);
}

/// With LBR clear nothing moves.
fn off_is_off() {
    clear();
    let tos = read(MSR_LASTBRANCH_TOS);
    pattern::run(IA32_DEBUGCTL, 0, 0);
    assert_eq!(read(MSR_LASTBRANCH_TOS), tos);
    assert!(records().iter().all(|r| *r == Record { from: 0, to: 0 }));
}

/// The stack is a ring: after many branches it holds the last ones.
fn the_ring_wraps() {
    clear();
    select(LbrSelect::new());
    write(IA32_DEBUGCTL, LBR);
    call!(p_count(100));
    write(IA32_DEBUGCTL, 0u64);
    let own = Record {
        from: label!(p_count_jmp) + 3,
        to: label!(p_count_jmp),
    };
    let own = records().iter().filter(|r| **r == own).count();
    // The return from the routine, and calls and returns around WRMSR, came after it.
    assert!(
        own + 4 >= stack().depth as usize || stack().depth <= 8,
        "{:X?}",
        records()
    );
}

/// Table 18-... "MSR_LBR_SELECT": each bit keeps its kinds out.
fn select_filters_kinds() {
    let every = pattern::branches();
    let rows: [(LbrSelect, &[Kind]); 6] = [
        (LbrSelect::new().with_jcc(true), &[Kind::Cond]),
        (LbrSelect::new().with_near_rel_call(true), &[Kind::Call]),
        (LbrSelect::new().with_near_ind_call(true), &[Kind::CallInd]),
        (LbrSelect::new().with_near_ret(true), &[Kind::Ret]),
        (LbrSelect::new().with_near_ind_jmp(true), &[Kind::JumpInd]),
        (LbrSelect::new().with_near_rel_jmp(true), &[Kind::Jump]),
    ];
    for (select, kinds) in rows {
        clear();
        write(MSR_LBR_SELECT, select.into_bits());
        pattern::run(IA32_DEBUGCTL, LBR, 0);
        let expected: Vec<_> = every.iter().rev().filter(|b| !kinds.contains(&b.kind)).collect();
        let seen = records();
        for (n, branch) in expected.iter().enumerate() {
            assert_eq!(
                (seen[n].from, seen[n].to),
                (branch.from, branch.to),
                "without {kinds:?}, entry {n}"
            );
        }
        assert_eq!(seen[expected.len()].from, 0, "without {kinds:?}");
    }
    // Ring 0 kept out altogether.
    clear();
    write(MSR_LBR_SELECT, LbrSelect::new().with_cpl_eq_0(true).into_bits());
    pattern::run(IA32_DEBUGCTL, LBR, 0);
    assert!(records().iter().all(|r| r.from == 0));
}

/// Its reserved bits.
fn select_reserved_bits() {
    refuses(MSR_LBR_SELECT, 1 << 10);
    refuses(MSR_LBR_SELECT, 1 << 63);
    write(MSR_LBR_SELECT, 0x1FFu64);
    assert_eq!(read(MSR_LBR_SELECT), 0x1FF);
}

/// Ring 3 alone, or ring 0 alone.
fn select_filters_rings() {
    clear();
    write(MSR_LBR_SELECT, LbrSelect::new().with_cpl_eq_0(true).into_bits());
    write(IA32_DEBUGCTL, LBR);
    pattern::user();
    write(IA32_DEBUGCTL, 0u64);
    let seen: Vec<_> = records().into_iter().filter(|r| r.from != 0).collect();
    let near = seen
        .iter()
        .filter(|r| pattern::is_user(r.from) && pattern::is_user(r.to))
        .count();
    assert_eq!(near, pattern::USER, "{seen:X?}");
    // The IRET that went there ends in ring 3; the ring where a branch ends decides.
    assert!(seen.len() <= pattern::USER + 1, "{seen:X?}");
    clear();
    write(MSR_LBR_SELECT, LbrSelect::new().with_cpl_neq_0(true).into_bits());
    write(IA32_DEBUGCTL, LBR);
    pattern::user();
    write(IA32_DEBUGCTL, 0u64);
    assert!(records().iter().all(|r| !pattern::is_user(r.to)));
}

static SEEN: AtomicU64 = AtomicU64::new(0);

/// 18.4.2: interrupts and exceptions are recorded like branches, from the instruction to the handler.
fn exceptions_are_recorded() {
    clear();
    select(LbrSelect::new());
    SEEN.store(0, SeqCst);
    exception::on(BP, |_| {
        write(IA32_DEBUGCTL, 0u64);
        let at = records()
            .iter()
            .any(|r| r.from == label!(dr_int3_here) && r.to == exception::entry(BP));
        SEEN.store(1 + u64::from(at), SeqCst);
    });
    write(IA32_DEBUGCTL, LBR);
    call!(dr_int3());
    write(IA32_DEBUGCTL, 0u64);
    // The handler's own branches have followed: on a deep stack the record is still there.
    if stack().depth >= 16 {
        assert_eq!(SEEN.load(SeqCst), 2, "INT3 to its handler: {:X?}", records());
    } else {
        assert_ne!(SEEN.load(SeqCst), 0);
    }
}

core::arch::global_asm!(
    r#"
    .text
    .globl lbr_last, lbr_last_jmp, lbr_last_to, lbr_last_not
    # last(): a branch that is taken, one that is not, then UD2, which the handler passes over
lbr_last:
    xor     eax, eax
lbr_last_jmp:
    jz      lbr_last_to
    nop
lbr_last_to:
    nop
lbr_last_not:
    jnz     lbr_last_to
    ud2
    ret
"#
);

/// 18.4.6 "LBR Stack" ff., Vol. 4: MSR_LER_FROM_LIP and MSR_LER_TO_LIP hold the last branch before the last exception or interrupt,
/// whatever MSR_LBR_SELECT keeps out; what follows it leaves them alone.
fn the_branch_before_an_exception() {
    static LAST: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
    const MSR_LER_FROM_LIP: u32 = 0x1DD;
    exception::on(exception::UD, |frame| {
        write(IA32_DEBUGCTL, 0u64);
        LAST[0].store(read(MSR_LER_FROM_LIP), SeqCst);
        LAST[1].store(read(MSR_LER_FROM_LIP + 1), SeqCst);
        frame.rip += 2;
    });
    let filters: &[u64] = if stack().select { &[0, 0x1FF] } else { &[0] };
    for filter in filters {
        clear();
        select(LbrSelect::from_bits(*filter));
        LAST.iter().for_each(|word| word.store(0, SeqCst));
        write(IA32_DEBUGCTL, LBR);
        call!(lbr_last());
        let last = [&LAST[0], &LAST[1]].map(|word| word.load(SeqCst) & ADDRESS);
        assert_eq!(last, [label!(lbr_last_jmp), label!(lbr_last_to)], "filter {filter:X}H");
        pattern::run(IA32_DEBUGCTL, LBR, 0);
        let after = [0, 1].map(|n| read(MSR_LER_FROM_LIP + n) & ADDRESS);
        assert_eq!(after, last, "branches without an exception");
    }
}

/// 18.4.2: a debug exception clears LBR before its handler runs and leaves no record.
fn debug_exceptions_are_not() {
    clear();
    select(LbrSelect::new());
    exception::on(DB, |_| SEEN.store(read(IA32_DEBUGCTL), SeqCst));
    // INT1 is one, whatever prefixes it has.
    let causes: [fn() -> u64; 3] = [|| call!(dr_icebp()), || call!(dr_icebp_66()), || call!(dr_icebp_rex())];
    for cause in causes {
        SEEN.store(u64::MAX, SeqCst);
        write(IA32_DEBUGCTL, LBR);
        cause();
        let after = records();
        assert_eq!(SEEN.load(SeqCst), 0, "IA32_DEBUGCTL in the handler");
        assert_eq!(read(IA32_DEBUGCTL), 0, "and after it");
        assert!(after.iter().all(|r| r.to != exception::entry(DB)), "{after:X?}");
    }
}

/// Figure 18-... "MSR_LBR_INFO": mispredicted, cycles since the last record.
fn info_has_cycles() {
    let stack = stack();
    clear();
    select(LbrSelect::new());
    pattern::run(IA32_DEBUGCTL, LBR, 0);
    let tos = read(MSR_LASTBRANCH_TOS) as u32;
    let info = stack.info.expect("the table says INFO");
    for n in 0..6 {
        let value = read(info + (tos + stack.depth - n) % stack.depth);
        assert_eq!(
            value & !(1 << 63) & !0xFFFF,
            0,
            "no transactions, reserved bits 0: {value:X}H"
        );
        assert_ne!(value & 0xFFFF, 0, "cycles");
    }
}

core::arch::global_asm!(
    r#"
    .text
    .globl lbr_calls, lbr_calls_1, lbr_calls_2, lbr_calls_a, lbr_calls_b, lbr_calls_end
    # In call-stack mode: two calls deep, one leaf called and returned from.
lbr_calls:
    mov     ecx, 0x1d9
    mov     eax, edi
    xor     edx, edx
    wrmsr
lbr_calls_1:
    call    lbr_calls_a
    ret
lbr_calls_a:
    call    p_call_to
    jmp     lbr_calls_2
    nop
lbr_calls_2:
    call    lbr_calls_b
    ret
lbr_calls_b:
    mov     ecx, 0x1d9
    xor     eax, eax
    xor     edx, edx
    wrmsr
    ret
"#
);

/// 18.11 "Last Branch, Call Stack...": calls push, returns pop.
fn call_stack_mode() {
    clear();
    let filter = LbrSelect::new()
        .with_cpl_neq_0(true)
        .with_jcc(true)
        .with_near_ind_jmp(true)
        .with_near_rel_jmp(true)
        .with_far_branch(true)
        .with_en_callstack(true);
    write(MSR_LBR_SELECT, filter.into_bits());
    call!(lbr_calls(LBR));
    let seen = records();
    assert_eq!((seen[0].from, seen[0].to), (label!(lbr_calls_2), label!(lbr_calls_b)));
    assert_eq!((seen[1].from, seen[1].to), (label!(lbr_calls_1), label!(lbr_calls_a)));
    assert_eq!(seen[2].from, 0, "the leaf has been popped: {seen:X?}");
}

/// The script that people run: ring 3 spins in `while (1) i++`, ring 0 is kept out, and every record is the loop's jump.
fn the_script() {
    clear();
    select(LbrSelect::new().with_cpl_eq_0(true));
    apic::enable();
    static BAD: AtomicU64 = AtomicU64::new(0);
    BAD.store(u64::MAX, SeqCst);
    exception::on(0x60, |frame| {
        let all = records();
        let own = Record {
            from: label!(p_spin_jmp),
            to: label!(p_spin),
        };
        BAD.store(all.iter().filter(|r| **r != own).count() as u64, SeqCst);
        write(IA32_DEBUGCTL, 0u64);
        apic::eoi();
        // Out of the loop.
        frame.rip = label!(p_user);
    });
    apic::write(apic::reg::DIVIDE, 0xB);
    apic::write(apic::reg::LVT_TIMER, 0x60);
    write(IA32_DEBUGCTL, LBR);
    apic::write(apic::reg::INITIAL_COUNT, 100_000);
    user::run(label!(p_spin), 0, exception::IF);
    assert_eq!(BAD.load(SeqCst), 0, "records that are not the loop's jump");
}

rt::tests! {
    "tests_lbr";
    registers_by_depth: need::LBR;
    addresses_are_whole: need::LBR;
    taken_branches_in_order: need::LBR;
    off_is_off: need::LBR;
    the_ring_wraps: need::LBR;
    select_filters_kinds: need::LBR_SELECT;
    select_reserved_bits: need::LBR_SELECT;
    select_filters_rings: need::LBR_SELECT;
    exceptions_are_recorded: need::LBR;
    the_branch_before_an_exception: need::LBR;
    debug_exceptions_are_not: need::LBR;
    info_has_cycles: need::LBR_INFO;
    call_stack_mode: need::LBR_CALL_STACK;
    the_script: need::LBR_SELECT;
}
