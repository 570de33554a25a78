//! Translated blocks against the interpreter: programs that are stopped, interrupted or made to fault at every instruction, that write
//! their own code, and that fill the memory of translations.

use crate::rig;
use engine::{Activity, CpuState, EngineOptions, Exit};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, Rig, STACK, TABLES};
use x86::model::SKYLAKE_SERVER;

const DATA: u64 = 0x30_0000;
/// Pages of 4 KiB that hold nothing else, of which each access to memory of [`mixed`] has its own.
const PAGES: u64 = 0x40_0000;
const IDT: u64 = 0x50_0000;
const HANDLER: u64 = 0x50_2000;
/// Programs end well within this.
const LONG: u64 = 100_000;

type Assembled = Result<(), IcedError>;

fn assembled(at: u64, f: impl FnOnce(&mut CodeAssembler) -> Assembled) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    f(&mut a).unwrap();
    a.assemble(at).unwrap()
}

/// Translated at once, or never.
fn rig(translated: bool) -> Rig {
    rig_with(translated, EngineOptions::default().translated_bytes)
}

fn rig_with(translated: bool, translated_bytes: usize) -> Rig {
    Rig::with_options(
        &SKYLAKE_SERVER,
        EngineOptions {
            translate_after: rig::translate_after().filter(|_| translated),
            translated_bytes,
            ..EngineOptions::default()
        },
    )
}

/// Everything that a program may have changed.
#[derive(PartialEq)]
struct Left {
    state: CpuState,
    memory: Vec<u8>,
}

fn left(rig: &Rig) -> Left {
    let mut memory = Vec::new();
    for page in (CODE..CODE + 0x3000)
        .chain(STACK - 0x1000..STACK + 0x1000)
        .chain(DATA..DATA + 0x1000)
        .chain(PAGES..PAGES + 0x20_000)
        .step_by(0x1000)
    {
        memory.extend(rig.read::<0x1000>(page));
    }
    Left {
        state: rig.cpu.state(),
        memory,
    }
}

fn same(ours: &Left, theirs: &Left, what: &str) {
    assert_eq!(ours.state, theirs.state, "{what}");
    let at = ours.memory.iter().zip(&theirs.memory).position(|(a, b)| a != b);
    assert_eq!(at, None, "{what}: memory differs");
}

/// A program of many forms, three times round: arithmetic with and without flags that are read, accesses of all sizes and one that
/// crosses pages, the stack, calls into another page, indirect branches, vectors, and instructions that are not translated.
fn mixed(a: &mut CodeAssembler) -> Assembled {
    let (mut again, mut over, mut deep, mut table) =
        (a.create_label(), a.create_label(), a.create_label(), a.create_label());
    a.mov(rsi, DATA)?;
    a.mov(rdi, PAGES)?;
    a.mov(ecx, 3)?;
    a.mov(rax, 0x1234_5678_9abc_def0u64)?;
    a.set_label(&mut again)?;
    a.mov(qword_ptr(rdi), rax)?;
    a.add(eax, dword_ptr(rdi + 0x1003))?;
    a.adc(rbx, rax)?;
    a.sbb(byte_ptr(rdi + 0x2000), bl)?;
    a.inc(word_ptr(rdi + 0x3000))?;
    a.cmp(rbx, 7)?;
    a.jb(over)?;
    a.mov(dl, ah)?;
    a.set_label(&mut over)?;
    a.lea(r8, qword_ptr(rax + rbx * 4 + 11))?;
    a.push(r8)?;
    a.movzx(r9d, word_ptr(rdi + 0x4ffe))?;
    a.mov(r10, qword_ptr(rdi + 0x6ffd))?;
    a.call(deep)?;
    a.pop(r11)?;
    a.movdqu(xmm1, xmmword_ptr(rdi + 0x8000))?;
    a.paddd(xmm1, xmm1)?;
    a.movups(xmmword_ptr(rdi + 0x9000), xmm1)?;
    a.cvtsi2sd(xmm2, rbx)?;
    a.mulsd(xmm2, qword_ptr(rdi + 0xa000))?;
    a.shl(rbx, 5)?;
    a.ror(eax, cl)?;
    a.sar(r8b, 3)?;
    a.imul_3(r12, rbx, 77)?;
    a.mul(r12)?;
    a.bts(r13, rcx)?;
    a.setc(r14b)?;
    a.cmovc(r15, rbx)?;
    a.xchg(r9, r10)?;
    a.lock().xadd(qword_ptr(rdi + 0xb000), rbx)?;
    a.pushfq()?;
    a.popfq()?;
    a.std()?;
    a.cld()?;
    a.mov(ebp, ecx)?;
    a.mov(rsi, PAGES + 0xc000)?;
    a.lea(rdi, qword_ptr(rdi + 0xd000))?;
    a.mov(ecx, 5)?;
    a.rep().movsb()?;
    a.mov(rdi, PAGES)?;
    a.mov(ecx, ebp)?;
    a.lea(rdx, qword_ptr(table))?;
    a.jmp(rdx)?;
    a.ud2()?;
    a.set_label(&mut table)?;
    a.popcnt(edx, ebx)?;
    a.tzcnt(rdx, rbx)?;
    a.andn(r9, rdx, rax)?;
    a.not(rax)?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.hlt()?;
    // In the next page.
    let here = a.instructions().len();
    for _ in here..2600 {
        a.nop()?;
    }
    a.set_label(&mut deep)?;
    a.add(qword_ptr(rsp + 8), 0x11)?;
    a.bswap(rbx)?;
    a.ret()?;
    Ok(())
}

/// The program is there, data too, and page tables whose smallest pages from [`PAGES`] on can be taken away one by one.
fn load(rig: &mut Rig, code: &[u8]) {
    rig.write(CODE, code);
    for at in (PAGES..PAGES + 0x20_000).step_by(8) {
        rig.write(at, &(at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 3).to_le_bytes());
    }
    const SMALL: u64 = TABLES + 0x4000;
    for page in 0..512 {
        rig.write(SMALL + page * 8, &(PAGES + page * 0x1000 | 7).to_le_bytes());
    }
    rig.write(TABLES + 0x2000 + (PAGES >> 21) * 8, &(SMALL | 7).to_le_bytes());
    // Interrupt gates, whose handler stops.
    for vector in 0..256 {
        let low = 0x8e00_0008_0000u64 | HANDLER & 0xffff | (HANDLER >> 16 & 0xffff) << 48;
        rig.write(IDT + vector * 16, &low.to_le_bytes());
    }
    rig.write(HANDLER, &[0xf4]);
    // The handler's code segment is read again at delivery.
    rig.write(IDT + 0x1000 + 8, &0x00af_9b00_0000_ffffu64.to_le_bytes());
    let mut state = rig.cpu.state();
    (state.idtr.base, state.idtr.limit) = (IDT, 0xfff);
    (state.gdtr.base, state.gdtr.limit) = (IDT + 0x1000, 0xf);
    rig.cpu.set_state(&state);
}

/// From the beginning, with nothing that an earlier run has changed but what is translated.
fn again(rig: &mut Rig, begin: &CpuState, code: &[u8]) {
    load(rig, code);
    rig.write(STACK - 0x1000, &[0; 0x1000]);
    rig.write(DATA, &[0; 0x1000]);
    rig.cpu.set_state(begin);
}

/// Runs that begin anew, ended as `end` says, on a translated machine and on an interpreted one.
fn compared(f: fn(&mut CodeAssembler) -> Assembled, end: impl Fn(&mut Rig, u64), what: &str) {
    let code = assembled(CODE, f);
    let (mut ours, mut theirs) = (rig(true), rig(false));
    let mut begin = Vec::new();
    for rig in [&mut ours, &mut theirs] {
        load(rig, &code);
        begin.push(rig.cpu.state());
        // Whatever it reaches is translated by then.
        assert_eq!(rig.run(LONG), Exit::Halt);
    }
    let steps = theirs.cpu.steps();
    assert_eq!(ours.cpu.steps(), steps);
    assert!((100..1000).contains(&steps), "{steps} steps");
    for k in 0..=steps {
        for (rig, begin) in [&mut ours, &mut theirs].into_iter().zip(&begin) {
            again(rig, begin, &code);
            end(rig, k);
        }
        same(&left(&ours), &left(&theirs), &format!("{what} {k}"));
    }
    if rig::translate_after().is_some() {
        assert!(ours.engine.translated().is_some_and(|t| t.blocks > 3));
    }
}

// covers: translate/budgets
#[test]
fn a_budget_ends_at_every_instruction() {
    compared(
        mixed,
        |rig, k| {
            rig.run(k);
        },
        "after step",
    );
}

// covers: translate/interrupts
#[test]
fn an_interrupt_comes_before_every_instruction() {
    compared(
        mixed,
        |rig, k| {
            rig.run(k);
            rig.interrupt(0x40);
            assert_eq!(rig.run(LONG), Exit::Halt);
        },
        "interrupted after step",
    );
}

/// The page of an access is away: the fault's RIP, error code, flags and what was done before it.
// covers: translate/faults
#[test]
fn every_access_to_memory_faults() {
    let code = assembled(CODE, mixed);
    let (mut ours, mut theirs) = (rig(true), rig(false));
    let mut begin = Vec::new();
    for rig in [&mut ours, &mut theirs] {
        load(rig, &code);
        begin.push(rig.cpu.state());
        assert_eq!(rig.run(LONG), Exit::Halt);
    }
    let mut faults = 0;
    for page in 0..0xf {
        // Not present, and read-only with CR0.WP set.
        for entry in [0, PAGES + page * 0x1000 | 5] {
            for (rig, begin) in [&mut ours, &mut theirs].into_iter().zip(&begin) {
                again(rig, begin, &code);
                rig.write(TABLES + 0x4000 + page * 8, &u64::to_le_bytes(entry));
                // Translations of addresses are dropped, those of code stay.
                let mut state = begin.clone();
                state.cr0 = (begin.cr0.into_bits() | 1 << 16).into();
                rig.cpu.set_state(&state);
                assert_eq!(rig.run(LONG), Exit::Halt);
            }
            same(&left(&ours), &left(&theirs), &format!("page {page} is {entry:#x}"));
            faults += u32::from(ours.cpu.state().cr2 != 0);
        }
    }
    assert!(faults > 15, "{faults} faults");
}

/// So does the fetch of any instruction, whose page no longer has code: the one that comes next faults, before it has done anything.
// covers: translate/fetch-faults
#[test]
fn every_fetch_faults() {
    const NX: u64 = 1 << 63;
    let faults = core::cell::Cell::new(0);
    compared(
        mixed,
        |rig, k| {
            rig.write(TABLES + 0x2000, &0x87u64.to_le_bytes());
            rig.run(k);
            if rig.cpu.state().activity != Activity::Running {
                return;
            }
            rig.write(TABLES + 0x2000, &(NX | 0x87).to_le_bytes());
            // What is known of page tables is dropped, what is known of code stays.
            let state = rig.cpu.state();
            rig.cpu.set_state(&state);
            assert_eq!(rig.run(LONG), Exit::Halt);
            let after = rig.cpu.state();
            assert_eq!((after.cr2, after.rip), (state.rip, HANDLER + 1));
            faults.set(faults.get() + 1);
        },
        "no fetch after step",
    );
    assert!(faults.get() > 200, "{faults:?} faults");
}

/// RFLAGS.TF is set before each instruction: one runs, and the trap comes behind it.
// covers: translate/traps
#[test]
fn a_trap_comes_after_every_instruction() {
    compared(
        mixed,
        |rig, k| {
            rig.run(k);
            let mut state = rig.cpu.state();
            if state.activity != Activity::Running {
                return;
            }
            state.rflags = (state.rflags.into_bits() | 1 << 8).into();
            rig.cpu.set_state(&state);
            assert_eq!(rig.run(LONG), Exit::Halt);
        },
        "trapped after step",
    );
}

/// Pushes and pops in rows, before and behind a call, one of them of a register that no host register holds.
fn rows_of_stack(a: &mut CodeAssembler) -> Assembled {
    let (mut again, mut deep) = (a.create_label(), a.create_label());
    a.mov(ecx, 3)?;
    a.set_label(&mut again)?;
    a.push(rax)?;
    a.push(r13)?;
    a.push(rsi)?;
    a.push(rbp)?;
    a.push(r8)?;
    a.call(deep)?;
    a.pop(rsi)?;
    a.pop(rax)?;
    a.pop(r14)?;
    a.pop(r13)?;
    a.pop(rbp)?;
    a.add(rax, rsi)?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.hlt()?;
    a.set_label(&mut deep)?;
    a.push(rbx)?;
    a.push(r15)?;
    a.push(rsp)?;
    a.lea(rbx, qword_ptr(rax + r14 * 2 + 5))?;
    a.pop(r15)?;
    a.add(r15, rbx)?;
    a.pop(r15)?;
    a.pop(rbx)?;
    a.ret()?;
    Ok(())
}

/// Rows of pushes and pops that end in another page than they begin in, which is there, is read-only, or is away, ended by a budget
/// at each step and not ended.
// covers: translate/faults, translate/stack
#[test]
fn pushes_and_pops_cross_pages_at_each_of_them() {
    const MIDDLE: u64 = PAGES + 0x2000;
    const TSS: u64 = IDT + 0x1800;
    let code = assembled(CODE, rows_of_stack);
    let (mut ours, mut theirs) = (rig(true), rig(false));
    let mut begin = Vec::new();
    for rig in [&mut ours, &mut theirs] {
        load(rig, &code);
        begin.push(rig.cpu.state());
        assert_eq!(rig.run(LONG), Exit::Halt);
    }
    let steps = theirs.cpu.steps();
    assert_eq!(ours.cpu.steps(), steps);
    let mut faults = 0;
    for offset in (0..0x60).step_by(4) {
        for (page, entry) in [
            (1, MIDDLE - 0x1000 | 7),
            (1, MIDDLE - 0x1000 | 5),
            (1, 0),
            (2, MIDDLE | 5),
            (2, 0),
        ] {
            let ends = if entry & 7 == 7 { 0..=steps } else { steps..=steps };
            for k in ends {
                for (rig, begin) in [&mut ours, &mut theirs].into_iter().zip(&begin) {
                    again(rig, begin, &code);
                    rig.write(TABLES + 0x4000 + page * 8, &u64::to_le_bytes(entry));
                    // A page fault has a stack of its own: IST 1.
                    rig.write(IDT + 14 * 16 + 4, &[1]);
                    rig.write(TSS + 0x24, &(DATA + 0x1000).to_le_bytes());
                    let mut state = begin.clone();
                    (state.tr.base, state.tr.limit, state.tr.attributes) = (TSS, 0x67, 0x8b);
                    state.cr0 = (begin.cr0.into_bits() | 1 << 16).into();
                    state.gpr[4] = MIDDLE + offset;
                    state.cr2 = 0;
                    rig.cpu.set_state(&state);
                    let exit = rig.run(if k == steps { LONG } else { k });
                    assert!(k < steps || exit == Exit::Halt, "{exit:?}");
                }
                let what = format!("{offset:#x} into a page, page {page} is {entry:#x}, step {k}");
                same(&left(&ours), &left(&theirs), &what);
                faults += u32::from(ours.cpu.state().cr2 != 0);
            }
        }
    }
    assert!(faults > 60, "{faults} faults");
}

/// Vector instructions, in place where the controls of MXCSR are the usual ones: in the second round they round up and flush to zero,
/// in the third an inexact result is an exception.
fn vectors(a: &mut CodeAssembler) -> Assembled {
    let mut again = a.create_label();
    a.mov(rdi, PAGES)?;
    a.mov(rsi, DATA)?;
    a.mov(dword_ptr(rsi), 0x1f80)?;
    a.mov(dword_ptr(rsi + 4), 0xdf80)?;
    a.mov(dword_ptr(rsi + 8), 0x0f80)?;
    a.mov(ecx, 3)?;
    a.set_label(&mut again)?;
    a.ldmxcsr(dword_ptr(rsi))?;
    a.add(rsi, 4)?;
    a.movdqa(xmm1, xmmword_ptr(rdi))?;
    a.cvtdq2pd(xmm2, xmm1)?;
    a.movdqu(xmm3, xmmword_ptr(rdi + 0x1008))?;
    a.cvtsi2sd(xmm4, ebx)?;
    a.addpd(xmm2, xmm2)?;
    a.stmxcsr(dword_ptr(rsi + 0x20))?;
    a.pshufd(xmm5, xmm1, 0x1b)?;
    a.pmovmskb(r9d, xmm5)?;
    a.pmovmskb(ebx, xmm1)?;
    a.pinsrw(xmm5, ebx, 3)?;
    a.pextrw(r10d, xmm5, 1)?;
    a.pextrq(r13, xmm5, 1)?;
    a.movaps(xmm0, xmm3)?;
    a.pblendvb(xmm5, xmm1)?;
    a.comisd(xmm2, xmm4)?;
    a.setbe(al)?;
    a.comisd(xmm2, qword_ptr(rdi + 0x2000))?;
    a.adc(rdx, 0x55)?;
    a.ptest(xmm1, xmm5)?;
    a.sbb(r8, rdx)?;
    a.paddq(xmm1, xmmword_ptr(rdi + 0x3000))?;
    a.mulsd(xmm2, qword_ptr(rdi + 0x4000))?;
    a.divsd(xmm4, xmm2)?;
    a.cvttsd2si(r11, xmm2)?;
    a.cvtsd2ss(xmm6, xmm4)?;
    a.movups(xmmword_ptr(rdi + 0x5000), xmm6)?;
    a.movhps(qword_ptr(rdi + 0x6000), xmm2)?;
    a.sqrtsd(xmm7, xmm4)?;
    a.minps(xmm1, xmm6)?;
    a.pshufb(xmm3, xmm1)?;
    a.mulps(xmm6, xmm3)?;
    a.cvtps2pd(xmm3, xmm6)?;
    a.stmxcsr(dword_ptr(rsi + 0x24))?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.hlt()
}

// covers: translate/vectors
#[test]
fn vector_instructions_leave_the_same_at_every_step() {
    compared(
        vectors,
        |rig, k| {
            rig.run(k);
        },
        "after step",
    );
}

/// Writes the operand of an instruction ahead in its own block, of one behind, and of one in the next page.
fn writes_itself(a: &mut CodeAssembler) -> Assembled {
    let (mut again, mut ahead, mut far) = (a.create_label(), a.create_label(), a.create_label());
    a.mov(ecx, 20)?;
    a.lea(r8, qword_ptr(ahead))?;
    a.lea(r9, qword_ptr(again))?;
    a.set_label(&mut again)?;
    a.add(eax, 0x1111_1111)?;
    a.inc(dword_ptr(r8 + 1))?;
    a.add(ebx, eax)?;
    a.set_label(&mut ahead)?;
    a.add(eax, 0x0101_0101)?;
    a.add(byte_ptr(r9 + 2), cl)?;
    a.lea(rdx, qword_ptr(far))?;
    a.mov(dword_ptr(rdx + 1), ebx)?;
    a.call(far)?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.hlt()?;
    let here = a.instructions().len();
    for _ in here..4100 {
        a.nop()?;
    }
    a.set_label(&mut far)?;
    a.mov(esi, 0x7777_7777)?;
    a.add(edi, esi)?;
    a.ret()?;
    Ok(())
}

// covers: translate/self-modifying
#[test]
fn code_that_writes_itself_runs_as_it_was_written() {
    compared(
        writes_itself,
        |rig, k| {
            rig.run(k);
        },
        "after step",
    );
}

/// So it does where somebody else writes it, between any two instructions: another CPU, a device.
// covers: translate/self-modifying
#[test]
fn code_that_is_written_from_outside_runs_as_it_was_written() {
    compared(
        mixed,
        |rig, k| {
            rig.run(k);
            // Every instruction of the loop becomes one that stops, and all but the first byte of the program stay as they are.
            let rip = rig.cpu.state().rip;
            rig.write(rip, &[0xf4]);
            assert_eq!(rig.run(LONG), Exit::Halt);
        },
        "written after step",
    );
}

/// One page of code at two linear addresses: what it reaches depends on where it runs.
// covers: translate/aliases
#[test]
fn one_page_runs_at_many_addresses() {
    let code = assembled(CODE, |a| {
        let mut again = a.create_label();
        a.mov(ecx, 40)?;
        a.set_label(&mut again)?;
        a.lea(rdx, qword_ptr(again))?;
        a.add(rbx, rdx)?;
        // The other mapping, and back.
        a.xor(rdx, 0x2000_0000)?;
        a.dec(ecx)?;
        let mut end = a.create_label();
        a.je(end)?;
        a.jmp(rdx)?;
        a.set_label(&mut end)?;
        a.hlt()
    });
    let lefts = [true, false].map(|translated| {
        let mut rig = rig(translated);
        load(&mut rig, &code);
        rig.write(
            TABLES + 0x2000 + ((CODE | 0x2000_0000) >> 21) * 8,
            &0x87u64.to_le_bytes(),
        );
        assert_eq!(rig.run(LONG), Exit::Halt);
        left(&rig)
    });
    same(&lefts[0], &lefts[1], "two mappings");
    // Half of the sums were made there.
    assert!(lefts[0].state.gpr[3] > 10 * 0x2000_0000);
}

/// More code than translations have room for, again and again: all of it is forgotten many times, and the result is the same.
// covers: translate/eviction
#[test]
fn translations_without_room_are_forgotten() {
    const BLOCKS: u64 = 6000;
    let code = assembled(DATA, |a| {
        a.mov(ecx, 4)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        for n in 0..BLOCKS {
            let mut next = a.create_label();
            a.add(rax, n as i32)?;
            a.rol(rax, 7)?;
            a.xor(rbx, rax)?;
            a.jno(next)?;
            a.inc(rbx)?;
            a.set_label(&mut next)?;
        }
        a.dec(ecx)?;
        a.jne(again)?;
        a.hlt()
    });
    let run = |translated, bytes| {
        let mut rig = rig_with(translated, bytes);
        rig.write(DATA, &code);
        let mut state = rig.cpu.state();
        state.rip = DATA;
        rig.cpu.set_state(&state);
        assert_eq!(rig.run(10 * BLOCKS * 5), Exit::Halt);
        (rig.cpu.state(), rig.engine.translated().map_or(0, |t| t.bytes))
    };
    let (interpreted, none) = run(false, 64 << 20);
    assert_eq!(none, 0);
    let (small, bytes) = run(true, 64 << 10);
    assert_eq!(small, interpreted);
    if rig::translate_after().is_some() {
        assert!(bytes > 10 * (64 << 10), "{bytes} bytes were made");
    }
}

/// 32-bit code with flat segments, which calls, pushes, and reaches memory through a segment with a base.
fn narrow() -> Vec<u8> {
    let mut a = CodeAssembler::new(32).unwrap();
    let mut build = || -> Assembled {
        let (mut again, mut sub) = (a.create_label(), a.create_label());
        a.mov(ecx, 5)?;
        a.mov(esi, DATA as u32)?;
        a.set_label(&mut again)?;
        a.push(ecx)?;
        a.call(sub)?;
        a.pop(edx)?;
        a.add(dword_ptr(esi + ecx * 4), eax)?;
        // Addresses wrap at 4 GiB.
        a.lea(edi, dword_ptr(esi + ecx * 8 + 0x7000_0000))?;
        a.mov(ebx, dword_ptr(edi + 0x9000_0000u32 as i32))?;
        a.mov(ebp, dword_ptr(esi - 4).fs())?;
        a.mov(dword_ptr(0xffff_fff0u32 as i32).fs(), ebx)?;
        a.sar(al, 1)?;
        a.bsf(ebx, eax)?;
        a.dec(ecx)?;
        a.jne(again)?;
        a.hlt()?;
        a.set_label(&mut sub)?;
        a.imul_3(eax, ecx, 0x1_2345)?;
        a.movd(xmm0, eax)?;
        a.paddd(xmm1, xmm0)?;
        a.movd(eax, xmm1)?;
        a.ret_1(0)
    };
    build().unwrap();
    a.assemble(CODE).unwrap()
}

/// The state of 32-bit protected mode without paging.
fn in_32_bits(begin: &CpuState) -> CpuState {
    let mut state = begin.clone();
    state.cr0 = 0x31.into();
    state.efer = 0.into();
    state.segments[engine::CS].attributes = 0xc09b;
    state.segments[engine::FS] = state.segments[engine::DS];
    state.segments[engine::FS].base = DATA + 0x100;
    state.gpr[4] = STACK;
    state
}

// covers: translate/32-bit
#[test]
fn flat_32_bit_code_is_the_same_at_every_step() {
    let code = narrow();
    let (mut ours, mut theirs) = (rig(true), rig(false));
    let mut begin = Vec::new();
    for rig in [&mut ours, &mut theirs] {
        load(rig, &code);
        let state = in_32_bits(&rig.cpu.state());
        rig.cpu.set_state(&state);
        begin.push(rig.cpu.state());
        assert_eq!(rig.run(LONG), Exit::Halt);
    }
    for k in 0..=theirs.cpu.steps() {
        for (rig, begin) in [&mut ours, &mut theirs].into_iter().zip(&begin) {
            again(rig, begin, &code);
            rig.run(k);
        }
        same(&left(&ours), &left(&theirs), &format!("after step {k}"));
    }
    if rig::translate_after().is_some() {
        let made = ours.engine.translated().unwrap();
        assert!(made.ops > 2 * made.called, "{made:?}");
    }
}

/// Blocks of 64-bit code, and of the same bytes as 32-bit code, in turn.
// covers: translate/modes
#[test]
fn modes_in_turn_each_have_their_own_translation() {
    // 48h is DEC EAX in 32-bit code, and REX.W before the addition in 64-bit code.
    let code = [0x48, 0x01, 0xd8, 0xff, 0xc1, 0xf4];
    let lefts = [true, false].map(|translated| {
        let mut rig = rig(translated);
        load(&mut rig, &code);
        let wide = rig.cpu.state();
        let mut all = Vec::new();
        for round in 0..20u64 {
            let mut state = if round % 2 == 0 {
                wide.clone()
            } else {
                in_32_bits(&wide)
            };
            (state.gpr[0], state.gpr[3]) = (round, 1 << 33 | 5);
            rig.cpu.set_state(&state);
            assert_eq!(rig.run(LONG), Exit::Halt);
            all.push(rig.cpu.state().gpr[0]);
        }
        all
    });
    assert_eq!(lefts[0], lefts[1]);
    assert_eq!(lefts[0][..4], [1 << 33 | 5, 5, (1 << 33 | 5) + 2, 7]);
}
