//! Restricted transactional memory: what commits, what aborts and with which status, and that an abort leaves no trace.
#![allow(unsafe_code)] // The host's own XBEGIN, to compare with.

use crate::{bench, rig};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::OnceLock;

use bench::{Bench, EVERYTHING, KERNEL_STACK, TSS, handler};
use engine::bus::{Processor, Watch};
use engine::{Cpu, CpuState, Exit};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, RAM, STACK, TABLES};
use x86::model::CpuModel;
use x86::msr::IA32_DEBUGCTL;
use x86::watch::{Abort, Access, BranchRecord, Change, Effects, EventRecord, Interest, Range, Recorded};

const DATA: u64 = 0x30_0000;
/// Status bits (SDM Vol. 1 Table 16-1 "RTM Abort Status Definition").
const RETRY: u64 = 2;
const CONFLICT: u64 = 4;
const CAPACITY: u64 = 8;
const DEBUG: u64 = 16;
const NESTED: u64 = 32;

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;

/// The processor of the other tests with transactions, SSE2 and AVX2; 7.EBX and 7.EDX have `first` and `second` beside.
fn part(first: u32, second: u32) -> &'static CpuModel {
    let mut rows = EVERYTHING.cpuid.to_vec();
    for row in &mut rows {
        match (row.leaf, row.subleaf) {
            (1, _) => row.regs[2] |= 1 << 28,
            (7, Some(0)) => {
                row.regs[1] |= 1 << 5 | first;
                row.regs[3] |= second;
            }
            _ => {}
        }
    }
    Box::leak(Box::new(CpuModel {
        cpuid: rows.leak(),
        ..EVERYTHING
    }))
}

fn rtm() -> &'static CpuModel {
    static MODEL: OnceLock<&CpuModel> = OnceLock::new();
    MODEL.get_or_init(|| part(1 << 11, 0))
}

/// 64-bit mode at CPL 0: RBX points at data, RAX has a value of its own, CR4 has OSFXSR and OSXSAVE.
fn machine() -> Bench {
    let mut b = Bench::long_with(rtm());
    b.state(|s| {
        s.cr4 = (s.cr4.into_bits() | (1 << 18 | 1 << 16)).into();
        s.xcr0 = 7;
        (s.gpr[0], s.gpr[3]) = (0xffff_8888_7777_6666, DATA);
        s.fpu.fninit();
    });
    b
}

/// How a transaction ended.
#[derive(Debug, PartialEq)]
enum End {
    Committed,
    /// RAX at the fallback address.
    Aborted(u64),
}

/// XBEGIN, the body, XEND; HLT on both ways. Where that leads.
fn transaction(b: &mut Bench, body: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
    b.code(|a| {
        let mut fallback = a.create_label();
        a.xbegin(fallback)?;
        body(a)?;
        a.xend()?;
        a.hlt()?;
        a.set_label(&mut fallback)?;
        a.nop()?;
        a.cli()?;
        a.hlt()
    });
}

fn end(b: &Bench) -> End {
    let s = b.cpu.state();
    match b.read::<2>(s.rip - 2) {
        [0xfa, 0xf4] => End::Aborted(s.gpr[0]),
        [_, 0xf4] => End::Committed,
        _ => panic!("{s:x?}"),
    }
}

fn outcome(b: &mut Bench, body: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> End {
    transaction(b, body);
    assert_eq!(b.run(100_000), Exit::Halt, "{:x?}", b.cpu.state());
    assert!(!b.cpu.in_transaction());
    end(b)
}

fn word(b: &Bench, at: u64) -> u64 {
    u64::from_le_bytes(b.read::<8>(at))
}

/// All memory but the page tables, whose accessed and dirty bits stay set.
fn memory(b: &Bench) -> Vec<u8> {
    let mut all = Vec::with_capacity(RAM);
    for page in (0..TABLES).step_by(0x1000) {
        all.extend_from_slice(&b.read::<0x1000>(page));
    }
    all
}

// covers: rtm/commit
#[test]
fn what_a_transaction_writes_is_there_after_xend() {
    let mut b = machine();
    let found = outcome(&mut b, |a| {
        a.mov(qword_ptr(rbx), rbx)?;
        a.add(qword_ptr(rbx), 1)?;
        a.mov(ecx, dword_ptr(rbx))?;
        a.lock().inc(dword_ptr(rbx + 0x1000))
    });
    assert_eq!(found, End::Committed);
    assert_eq!((word(&b, DATA), word(&b, DATA + 0x1000)), (DATA + 1, 1));
    let s = b.cpu.state();
    assert_eq!(
        (s.gpr[0], s.gpr[1]),
        (0xffff_8888_7777_6666, DATA + 1),
        "RAX is not XBEGIN's"
    );
}

// covers: rtm/shown
#[test]
fn where_the_instructions_are() {
    let always = part(0, 1 << 11);
    let code: [(&str, Code); 4] = [
        ("XBEGIN", |a| {
            let mut next = a.create_label();
            a.xbegin(next)?;
            a.set_label(&mut next)?;
            a.nop()
        }),
        ("XEND", |a| a.xend()),
        ("XABORT", |a| a.xabort(1)),
        ("XTEST", |a| a.xtest()),
    ];
    for (name, code) in code {
        let ud = Err((6, None));
        let mut b = Bench::long();
        assert_eq!(b.one(code), ud, "{name}: hidden");
        for model in [rtm(), always] {
            let mut b = Bench::long_with(model);
            let expected = if name == "XEND" { Err((13, Some(0))) } else { Ok(()) };
            assert_eq!(b.one(code), expected, "{name} outside of a transaction");
        }
    }
    for (model, inside) in [(rtm(), true), (always, false)] {
        let mut b = Bench::long_with(model);
        b.state(|s| s.gpr[0] = 0x55);
        let found = outcome(&mut b, |a| a.nop());
        let expected = if inside { End::Committed } else { End::Aborted(0) };
        assert_eq!(found, expected, "an abort at once where RTM_ALWAYS_ABORT says so");
    }
}

// covers: rtm/xtest
#[test]
fn xtest_says_whether_a_transaction_runs() {
    let mut b = machine();
    b.state(|s| s.rflags = (s.rflags.into_bits() | 0x8d5).into());
    b.one(|a| a.xtest()).unwrap();
    assert_eq!(b.cpu.state().rflags.into_bits() & 0x8d5, 0x40, "outside: ZF alone");
    b.state(|s| s.rip = CODE);
    let found = outcome(&mut b, |a| {
        a.xtest()?;
        a.setz(cl)
    });
    assert_eq!((found, b.cpu.state().gpr[1] & 0xff), (End::Committed, 0));
}

// covers: rtm/abort-status, rtm/unfriendly
#[test]
fn what_ends_a_transaction_and_with_which_status() {
    let rows: &[(&str, u64, Code)] = &[
        ("XABORT 0", 1, |a| a.xabort(0)),
        ("XABORT FFH", 0xff00_0001, |a| a.xabort(0xff)),
        ("CPUID", 0, |a| a.cpuid()),
        ("PAUSE", 0, |a| a.pause()),
        ("HLT", 0, |a| a.hlt()),
        ("MONITOR", 0, |a| a.monitor()),
        ("MWAIT", 0, |a| a.mwait()),
        ("CLI", 0, |a| a.cli()),
        ("STI", 0, |a| a.sti()),
        ("POPFQ", 0, |a| a.popfq()),
        ("STAC", 0, |a| a.stac()),
        ("MOV DS", 0, |a| a.mov(ds, cx)),
        ("POP FS", 0, |a| a.pop(fs)),
        ("SWAPGS", 0, |a| a.swapgs()),
        ("WRFSBASE", 0, |a| a.wrfsbase(rbx)),
        ("SGDT", 0, |a| a.sgdt(ptr(rbx))),
        ("LIDT", 0, |a| a.lidt(ptr(rbx))),
        ("STR", 0, |a| a.str(ax)),
        ("MOV CR3", 0, |a| a.mov(cr3, rcx)),
        ("MOV CR8", 0, |a| a.mov(cr8, rcx)),
        ("MOV DR0", 0, |a| a.mov(dr0, rcx)),
        ("CLTS", 0, |a| a.clts()),
        ("LMSW", 0, |a| a.lmsw(cx)),
        ("INVLPG", 0, |a| a.invlpg(byte_ptr(rbx))),
        ("WBINVD", 0, |a| a.wbinvd()),
        ("CLFLUSH", 0, |a| a.clflush(byte_ptr(rbx))),
        ("MOVNTI", 0, |a| a.movnti(dword_ptr(rbx), ecx)),
        ("MOVNTDQ", 0, |a| a.movntdq(xmmword_ptr(rbx), xmm0)),
        ("VZEROUPPER", 0, |a| a.vzeroupper()),
        ("FXSAVE", 0, |a| a.fxsave(ptr(rbx))),
        ("XSAVE", 0, |a| a.xsave(ptr(rbx))),
        ("XSETBV", 0, |a| a.xsetbv()),
        ("IN", 0, |a| a.in_(al, 0x80)),
        ("OUT", 0, |a| a.out(0x80, al)),
        ("RDMSR", 0, |a| a.rdmsr()),
        ("WRMSR", 0, |a| a.wrmsr()),
        ("INT n", 0, |a| a.int(0x80)),
        ("SYSCALL", 0, |a| a.syscall()),
        ("SYSENTER", 0, |a| a.sysenter()),
        ("IRETQ", 0, |a| a.iretq()),
        ("RETF", 0, |a| a.retf()),
        ("far JMP", 0, |a| a.jmp(fword_ptr(rbx))),
        ("UD2", 0, |a| a.ud2()),
        ("INT3", DEBUG, |a| a.int3()),
        ("INT1", DEBUG, |a| a.int1()),
        ("#DE", 0, |a| {
            a.xor(ecx, ecx)?;
            a.div(ecx)
        }),
        ("#PF", 0, |a| {
            a.mov(rcx, 0x4000_0000_0000u64)?;
            a.mov(rax, qword_ptr(rcx))
        }),
        ("#GP", 0, |a| {
            a.mov(rcx, 0x8000_0000_0000u64)?;
            a.mov(rax, qword_ptr(rcx))
        }),
        ("a jump into nothing", 0, |a| {
            a.mov(rcx, 0x4000_0000_0000u64)?;
            a.jmp(rcx)
        }),
        ("a device is read", 0, |a| a.mov(al, byte_ptr(0x1000_0000))),
        ("a device is written", 0, |a| a.mov(byte_ptr(0x1000_0000), al)),
        ("nested", NESTED | 1, |a| {
            let mut next = a.create_label();
            a.xbegin(next)?;
            a.set_label(&mut next)?;
            a.xabort(0)
        }),
    ];
    for (name, status, code) in rows {
        let mut b = machine();
        b.state(|s| s.cr2 = 0x77);
        let before = b.cpu.state();
        let found = outcome(&mut b, |a| {
            a.mov(qword_ptr(rbx + 0x100), rbx)?;
            code(a)
        });
        assert_eq!(found, End::Aborted(*status), "{name}");
        assert_eq!(word(&b, DATA + 0x100), 0, "{name}");
        let s = b.cpu.state();
        assert_eq!(s.gpr[1..], before.gpr[1..], "{name}");
        assert_eq!(s.cr2, 0x77, "{name}: no fault has been");
        assert!(b.world.out.is_empty() && b.world.input.is_empty(), "{name}");
    }
}

// covers: rtm/friendly
#[test]
fn what_does_not_end_a_transaction() {
    let rows: &[(&str, Code)] = &[
        ("RDTSC", |a| a.rdtsc()),
        ("x87", |a| {
            a.fld1()?;
            a.fstp(qword_ptr(rbx))
        }),
        ("MMX", |a| {
            a.movd(mm0, ecx)?;
            a.emms()
        }),
        ("AVX", |a| {
            a.vpxor(ymm1, ymm1, ymm1)?;
            a.vmovdqu(ymmword_ptr(rbx), ymm1)
        }),
        ("LFENCE, MFENCE", |a| {
            a.lfence()?;
            a.mfence()
        }),
        ("PUSHFQ, MOV from CR0", |a| {
            a.pushfq()?;
            a.mov(rcx, cr0)?;
            a.pop(rcx)
        }),
        ("CLD, STD", |a| {
            a.std()?;
            a.cld()
        }),
        ("a hint to elide", |a| a.xacquire().lock().inc(dword_ptr(rbx))),
        ("LOCK CMPXCHG16B", |a| a.lock().cmpxchg16b(xmmword_ptr(rbx))),
        ("a call", |a| {
            let (mut f, mut over) = (a.create_label(), a.create_label());
            a.call(f)?;
            a.jmp(over)?;
            a.set_label(&mut f)?;
            a.ret()?;
            a.set_label(&mut over)?;
            a.nop()
        }),
        ("REP STOSB over lines and pages", |a| {
            a.lea(rdi, ptr(rbx + 0xf00))?;
            a.mov(ecx, 0x400)?;
            a.rep().stosb()
        }),
        ("seven deep", |a| {
            for _ in 0..6 {
                let mut next = a.create_label();
                a.xbegin(next)?;
                a.set_label(&mut next)?;
                a.nop()?;
            }
            for _ in 0..6 {
                a.xend()?;
            }
            a.xtest()?;
            a.setz(cl)
        }),
    ];
    for (name, code) in rows {
        let mut b = machine();
        b.state(|s| (s.gpr[0], s.gpr[1], s.gpr[2]) = (0, 0, 0));
        assert_eq!(outcome(&mut b, code), End::Committed, "{name}");
    }
}

// covers: rtm/nesting
#[test]
fn the_outermost_fallback_is_taken_and_eight_are_too_many() {
    let mut b = machine();
    let found = outcome(&mut b, |a| {
        let mut inner = a.create_label();
        for _ in 0..7 {
            a.xbegin(inner)?;
        }
        a.jmp(inner)?;
        a.set_label(&mut inner)?;
        a.xor(ecx, ecx)
    });
    assert_eq!(found, End::Aborted(NESTED));
}

// covers: rtm/commit
#[test]
fn an_inner_xend_commits_nothing() {
    let mut b = machine();
    let found = outcome(&mut b, |a| {
        let mut next = a.create_label();
        a.xbegin(next)?;
        a.set_label(&mut next)?;
        a.mov(qword_ptr(rbx), rbx)?;
        a.xend()?;
        a.xabort(7)
    });
    assert_eq!((found, word(&b, DATA)), (End::Aborted(0x0700_0001), 0));
}

// covers: rtm/fallback
#[test]
fn the_fallback_must_be_a_place_to_go_to() {
    // 32-bit code in a segment that ends before the fallback.
    let mut b = Bench::protected_with(rtm());
    b.state(|s| s.segments[engine::CS].limit = CODE as u32 + 0xff);
    b.write(CODE, &[0xc7, 0xf8, 0, 2, 0, 0]);
    assert_eq!(b.faults(), (13, Some(0)), "beyond the limit");
    // With a 16-bit operand the address is not cut.
    let mut b = Bench::protected_with(rtm());
    b.write(CODE, &[0x66, 0xc7, 0xf8, 0x10, 0, 0x0f, 0xa2]);
    b.write(CODE + 5 + 0x10, &[0xf4]);
    assert_eq!(b.run(100), Exit::Halt);
    assert_eq!(b.cpu.rip(), CODE + 5 + 0x11);
    let mut b = Bench::real_with(rtm());
    b.write(0x1_0000, &[0xc7, 0xf8, 0x10, 0, 0x0f, 0xa2]);
    b.write(0x1_0000 + 4 + 0x10, &[0xf4]);
    assert_eq!(b.run(100), Exit::Halt);
    assert_eq!(b.cpu.rip(), 4 + 0x11, "real mode has it, too");
}

// covers: rtm/capacity
#[test]
fn a_transaction_writes_no_more_than_the_cache_holds() {
    // Eight lines of each of 64 sets: the ninth line at the same place of its page is too many.
    for (lines, stride, expected) in [
        (8u32, 0x1000, End::Committed),
        (9, 0x1000, End::Aborted(CAPACITY)),
        (512, 64, End::Committed),
        (513, 64, End::Aborted(CAPACITY)),
    ] {
        let mut b = machine();
        let found = outcome(&mut b, |a| {
            let mut again = a.create_label();
            a.mov(ecx, lines)?;
            a.set_label(&mut again)?;
            a.mov(byte_ptr(rbx), 1)?;
            a.add(rbx, stride)?;
            a.dec(ecx)?;
            a.jnz(again)
        });
        assert_eq!(found, expected, "{lines} lines, {stride:#x} apart");
        let written = (0..lines as u64)
            .filter(|i| b.read::<1>(DATA + i * stride as u64) != [0])
            .count();
        assert_eq!(written as u32, if found == End::Committed { lines } else { 0 });
    }
}

// covers: rtm/interrupt
#[test]
fn an_interrupt_comes_at_the_fallback_address() {
    for (nmi, vector) in [(false, 0x40), (true, 2)] {
        let mut b = machine();
        b.state(|s| s.rflags.set_interrupt(true));
        transaction(&mut b, |a| {
            a.mov(qword_ptr(rbx), rbx)?;
            a.mov(eax, 5)?;
            a.nop()
        });
        b.run(3);
        assert!(b.cpu.in_transaction());
        assert_eq!(word(&b, DATA), DATA, "the debugger sees what the transaction sees");
        if nmi {
            b.nmi()
        } else {
            b.interrupt(vector)
        }
        assert!(!b.cpu.in_transaction());
        let t = b.trap();
        assert_eq!((t.vector, b.cpu.state().gpr[0]), (vector, 0));
        assert_eq!(b.read::<1>(t.rip), [0x90], "the fallback");
        assert_ne!(t.flags & 1 << 9, 0);
        assert_eq!(word(&b, DATA), 0);
    }
}

// covers: rtm/conflict
#[test]
fn a_write_from_outside_aborts_and_stays() {
    // Offset from the line that the transaction has written; even what it has nothing to do with, as reads are not followed.
    for offset in [0u64, 4, 0x40, 0x1_0000] {
        let mut b = machine();
        transaction(&mut b, |a| {
            a.mov(qword_ptr(rbx), rbx)?;
            a.nop()
        });
        b.run(2);
        b.write(DATA + offset, &[0xcc; 4]);
        assert_eq!(b.run(100), Exit::Halt);
        assert_eq!(end(&b), End::Aborted(CONFLICT | RETRY), "{offset:#x}");
        let mut expected = [0; 8];
        if offset < 8 {
            expected[offset as usize..][..4].fill(0xcc);
        }
        assert_eq!(b.read::<8>(DATA), expected, "{offset:#x}");
        assert_eq!(b.read::<4>(DATA + offset), [0xcc; 4]);
    }
}

// covers: rtm/turns
#[test]
fn another_processor_never_sees_a_transaction() {
    let mut b = machine();
    transaction(&mut b, |a| {
        a.mov(qword_ptr(rbx), rbx)?;
        a.nop()
    });
    b.run(2);
    assert!(b.cpu.in_transaction());
    // The other one copies what it sees.
    let mut other = Cpu::new(rtm());
    let mut s = b.cpu.state();
    s.transaction = None;
    s.rip = CODE + 0x800;
    other.set_state(&s);
    let saved = b.cpu.state();
    b.at(CODE + 0x800, |a| {
        a.mov(rcx, qword_ptr(rbx))?;
        a.mov(qword_ptr(rbx + 8), rbx)?;
        a.hlt()
    });
    // Writing the code has ended the transaction; it begins anew.
    assert!(b.cpu.state().transaction.is_some_and(|t| t.doomed.is_some()));
    let mut fresh = saved;
    fresh.transaction = None;
    fresh.rip = CODE;
    b.cpu.set_state(&fresh);
    b.run(2);
    assert!(b.cpu.in_transaction() && word(&b, DATA) == DATA);
    let (rig, world) = b.parts();
    assert_eq!(rig.engine.run(&mut other, world, 100), Exit::Halt);
    assert_eq!(other.state().gpr[1], 0, "nothing of it");
    assert_eq!((word(&b, DATA), word(&b, DATA + 8)), (0, DATA));
    assert_eq!(b.run(100), Exit::Halt);
    assert_eq!(end(&b), End::Aborted(CONFLICT | RETRY));
    assert_eq!(word(&b, DATA + 8), DATA, "what the other one has written stays");
}

// covers: rtm/turns
#[test]
fn a_turn_that_goes_on_does_not_end_a_transaction() {
    // Step by step or at once: the same.
    let mut states = Vec::new();
    for budget in [1, 2, 1000] {
        let mut b = machine();
        transaction(&mut b, |a| {
            a.mov(qword_ptr(rbx), rbx)?;
            a.add(qword_ptr(rbx), 1)
        });
        while b.run(budget) != Exit::Halt {}
        assert_eq!(end(&b), End::Committed, "{budget}");
        states.push((b.cpu.state(), memory(&b)));
    }
    assert!(states.windows(2).all(|pair| pair[0] == pair[1]));
}

// covers: rtm/state
#[test]
fn a_state_with_an_open_transaction_goes_round() {
    let mut b = machine();
    transaction(&mut b, |a| {
        a.mov(qword_ptr(rbx), rbx)?;
        a.mov(ecx, 5)?;
        a.xabort(3)
    });
    b.run(2);
    let (state, memory_then) = (b.cpu.state(), memory(&b));
    assert_eq!(state.transaction.as_ref().map(|t| t.lines.len()), Some(1));
    assert_eq!(b.run(100), Exit::Halt);
    let (after, memory_after) = (b.cpu.state(), memory(&b));
    // Another machine takes it up.
    let mut c = Bench::long_with(rtm());
    for (page, bytes) in memory_then.chunks(0x1000).enumerate() {
        c.write(page as u64 * 0x1000, bytes);
    }
    c.cpu.set_state(&state);
    assert_eq!(c.cpu.state(), state);
    assert_eq!(c.run(100), Exit::Halt);
    assert_eq!((end(&c), word(&c, DATA)), (End::Aborted(0x0300_0001), 0));
    assert!(c.cpu.state() == after && memory(&c) == memory_after);
    // A processor whose turn is over is undone at once.
    let mut d = Bench::long_with(rtm());
    for (page, bytes) in memory_then.chunks(0x1000).enumerate() {
        d.write(page as u64 * 0x1000, bytes);
    }
    d.cpu.set_state(&state);
    let (rig, _) = d.parts();
    let rig::Rig { engine, cpu, .. } = rig;
    engine.end_turn(cpu);
    assert_eq!(word(&d, DATA), 0);
    assert_eq!(d.run(100), Exit::Halt);
    assert_eq!(end(&d), End::Aborted(CONFLICT | RETRY));
}

// covers: rtm/smc
#[test]
fn code_that_a_transaction_changes_is_changed_in_it_alone() {
    let mut b = machine();
    // The byte at `patched` is MOV ECX's immediate.
    let patched = CODE + 0x400;
    b.write(patched, &[0xb9, 1, 0, 0, 0, 0xc3]);
    b.state(|s| s.gpr[6] = patched);
    let found = outcome(&mut b, |a| {
        a.call(rsi)?;
        a.mov(edi, ecx)?;
        a.mov(byte_ptr(rsi + 1), 2)?;
        a.call(rsi)?;
        a.cmp(ecx, 2)?;
        let mut wrong = a.create_label();
        a.jne(wrong)?;
        a.xabort(9)?;
        a.set_label(&mut wrong)?;
        a.xabort(1)
    });
    assert_eq!(found, End::Aborted(0x0900_0001), "the second call runs the new code");
    b.state(|s| {
        s.rip = patched;
        s.gpr[4] = STACK;
        s.activity = engine::Activity::Running;
    });
    b.run(1);
    assert_eq!(b.cpu.state().gpr[1], 1, "and after the abort the old");
}

/// Advanced debugging off and on, and what makes the debug exception.
// covers: rtm/debug, rtm/advanced-debug
#[test]
fn debug_exceptions_abort_or_go_back_to_xbegin() {
    let int3: Code = |a| a.int3();
    let int1: Code = |a| a.int1();
    let trap: Code = |a| a.nop();
    for (enable, control, advanced) in [
        (0, 0, false),
        (1 << 11, 0, false),
        (0, 1 << 15, false),
        (1 << 11, 1 << 15, true),
    ] {
        for (name, code, tf) in [("INT3", int3, false), ("INT1", int1, false), ("TF", trap, true)] {
            let mut b = machine();
            b.world.msrs.insert(IA32_DEBUGCTL, control);
            b.state(|s| {
                s.dr[7] = 0x400 | enable;
                s.dr[6] = 0xffff_0ff0;
            });
            transaction(&mut b, |a| {
                a.mov(qword_ptr(rbx), rbx)?;
                code(a)
            });
            let begin = b.cpu.rip();
            if tf {
                b.state(|s| s.rflags.set_tf(true));
            }
            let name = format!("{name}, DR7 {enable:x}, DEBUGCTL {control:x}");
            b.run(if tf { 1 } else { 100 });
            assert!(!b.cpu.in_transaction(), "{name}");
            assert_eq!(word(&b, DATA), 0, "{name}");
            let s = b.cpu.state();
            if advanced {
                b.state(|s| s.rflags.set_tf(false));
                if tf {
                    assert_eq!(s.rip, handler(1), "{name}");
                    b.run(1);
                }
                let t = b.arrived();
                assert_eq!((t.vector, t.rip), (1, begin), "{name}: a #DB at XBEGIN");
                let bs = if tf { 1 << 14 } else { 0 };
                assert_eq!(s.dr[6], 0xfffe_0ff0 | bs, "{name}: RTM is clear");
                assert_eq!(s.gpr[0], 0xffff_8888_7777_6666, "{name}: EAX is XBEGIN's");
                assert_eq!(t.flags & 1 << 8 != 0, tf, "{name}");
            } else {
                assert_eq!(s.gpr[0], DEBUG, "{name}");
                assert_eq!(s.dr[6], 0xffff_0ff0, "{name}: nothing has been");
            }
        }
    }
}

// covers: rtm/debug
#[test]
fn any_other_debug_exception_sets_dr6_rtm() {
    let mut b = machine();
    b.state(|s| {
        s.dr[6] = 0xfffe_0ff0;
        s.rflags.set_tf(true);
    });
    b.code(|a| a.nop());
    b.run(1);
    assert_eq!((b.cpu.rip(), b.cpu.state().dr[6]), (handler(1), 0xffff_4ff0));
}

/// What the units hear of transactions.
#[derive(Default)]
struct Notes {
    interest: Interest,
    ranges: Vec<Range>,
    changes: Vec<Change>,
    branches: Vec<BranchRecord>,
    events: u32,
    /// Answers `access`, and `branches`.
    effects: Effects,
}

#[derive(Clone, Default)]
struct Listener(Rc<RefCell<Notes>>, Vec<Range>);

impl Watch for Listener {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        self.1 = self.0.borrow().ranges.clone();
        self.0.borrow().interest
    }
    fn ranges(&self) -> &[Range] {
        &self.1
    }
    fn access(&mut self, _: &Access, _: &mut dyn Processor) -> Effects {
        self.0.borrow().effects
    }
    fn branches(&mut self, records: &[BranchRecord], _: &mut dyn Processor) -> Effects {
        self.0.borrow_mut().branches.extend_from_slice(records);
        self.0.borrow().effects
    }
    fn event(&mut self, _: &EventRecord, _: &mut dyn Processor) -> Effects {
        self.0.borrow_mut().events += 1;
        Effects::NONE
    }
    fn state(&mut self, change: Change, _: &mut dyn Processor) -> Effects {
        self.0.borrow_mut().changes.push(change);
        Effects::NONE
    }
}

fn listen(b: &mut Bench, interest: Interest) -> Rc<RefCell<Notes>> {
    let listener = Listener::default();
    listener.0.borrow_mut().interest = interest;
    let notes = listener.0.clone();
    b.world.watch = Some(Box::new(listener));
    notes
}

// covers: rtm/callbacks
#[test]
fn the_units_hear_of_every_transaction() {
    // Who wants nothing hears of transactions all the same.
    for interest in [
        Interest::NOTHING,
        Interest {
            branches: Recorded::All,
            ..Interest::NOTHING
        },
    ] {
        let mut b = machine();
        let notes = listen(&mut b, interest);
        let begin = CODE;
        assert_eq!(outcome(&mut b, |a| a.nop()), End::Committed);
        let found = notes.take_changes();
        // The assembler's XBEGIN has five bytes.
        let at = begin + 6;
        assert_eq!(
            found,
            [
                Change::TransactionBegin { at: begin },
                Change::TransactionCommit { at, steps: 2 }
            ]
        );
        b.state(|s| {
            s.rip = CODE;
            s.activity = engine::Activity::Running;
        });
        let found = outcome(&mut b, |a| {
            let mut next = a.create_label();
            a.jmp(next)?;
            a.set_label(&mut next)?;
            a.xabort(2)
        });
        assert_eq!(found, End::Aborted(0x0200_0001));
        let branches = notes.borrow().branches.len();
        assert_eq!(
            branches,
            usize::from(interest.branches.any()),
            "what was aborted has been seen"
        );
        assert_eq!(
            notes.take_changes(),
            [
                Change::TransactionBegin { at: begin },
                Change::TransactionAbort {
                    from: begin + 7,
                    cause: Abort::Explicit(2),
                    steps: 2,
                }
            ]
        );
    }
}

trait Taken {
    fn take_changes(&self) -> Vec<Change>;
}

impl Taken for Rc<RefCell<Notes>> {
    /// Those of transactions, since the last time.
    fn take_changes(&self) -> Vec<Change> {
        let mut changes = std::mem::take(&mut self.borrow_mut().changes);
        changes.retain(|c| {
            matches!(
                c,
                Change::TransactionBegin { .. } | Change::TransactionCommit { .. } | Change::TransactionAbort { .. }
            )
        });
        changes
    }
}

// covers: rtm/debug
#[test]
fn a_data_breakpoint_and_a_unit_s_wish_abort() {
    let debug = Effects {
        debug: Some(1),
        ..Effects::NONE
    };
    let unknown = Effects {
        abort: true,
        ..Effects::NONE
    };
    for (effects, status) in [(debug, DEBUG), (unknown, 0)] {
        let mut b = machine();
        let interest = Interest {
            ranges: true,
            ..Interest::NOTHING
        };
        let notes = listen(&mut b, interest);
        notes.borrow_mut().ranges = vec![Range {
            first: DATA,
            last: DATA + 7,
            ports: false,
            reads: false,
            writes: true,
        }];
        notes.borrow_mut().effects = effects;
        let found = outcome(&mut b, |a| {
            a.mov(qword_ptr(rbx + 64), rbx)?;
            a.mov(dword_ptr(rbx + 4), ebx)?;
            a.nop()
        });
        assert_eq!(found, End::Aborted(status));
        assert_eq!((word(&b, DATA), word(&b, DATA + 64)), (0, 0));
        assert_eq!(notes.borrow().events, 0, "no exception was delivered");
        assert_eq!(b.cpu.state().dr[6] & 1, 0);
    }
}

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16) % bound
    }
}

/// Random instructions that write registers of all kinds and memory around RBX, RSP and RSI.
fn anything(a: &mut CodeAssembler, seed: u64) -> Result<(), IcedError> {
    let mut random = Random(seed * 2 + 1);
    let general = [rax, rcx, rdx, rbp, r8, r9, r10, r11, r12, r13, r14, r15];
    let vector = [xmm0, xmm1, xmm2, xmm7, xmm8, xmm15];
    let wide = [ymm0, ymm3, ymm9, ymm15];
    for _ in 0..40 {
        let (x, y) = (general[random.below(12) as usize], general[random.below(12) as usize]);
        let (v, w) = (vector[random.below(6) as usize], wide[random.below(4) as usize]);
        let at = random.below(0x3000) as i32;
        match random.below(22) {
            0 => a.mov(qword_ptr(rbx + at), x)?,
            1 => a.add(dword_ptr(rbx + at), 0x1234)?,
            2 => a.lock().xadd(qword_ptr(rbx + at), x)?,
            3 => a.push(x)?,
            4 => a.pop(x)?,
            5 => a.imul_2(x, y)?,
            6 => a.bts(qword_ptr(rbx + at), random.below(64) as u32)?,
            7 => a.movups(xmmword_ptr(rbx + at), v)?,
            8 => a.movups(v, xmmword_ptr(rbx + at))?,
            9 => a.vmovups(ymmword_ptr(rbx + at), w)?,
            10 => a.vpaddd(w, w, ymmword_ptr(rbx + at))?,
            11 => {
                a.fld(qword_ptr(rbx + at))?;
                a.fstp(tword_ptr(rbx + at + 8))?;
            }
            12 => {
                a.lea(rdi, ptr(rbx + at))?;
                a.mov(ecx, random.below(200) as u32)?;
                a.rep().stosb()?;
            }
            13 => a.xchg(qword_ptr(rbx + at), x)?,
            14 => a.cmpxchg(dword_ptr(rbx + at), ecx)?,
            15 => a.mov(byte_ptr(rbx + at), 0x5a)?,
            16 => a.lea(x, ptr(y + 0x77))?,
            17 => a.std()?,
            18 => a.cld()?,
            19 => a.ldmxcsr(dword_ptr(rsi))?,
            20 => a.movq(mm3, x)?,
            _ => a.mov(x, qword_ptr(rbx + at))?,
        }
        // Strings go upwards, and x87 has a free stack.
        if random.below(4) == 0 {
            a.cld()?;
            a.emms()?;
        }
    }
    a.cld()
}

/// A machine whose registers and memory are all in use.
fn full(seed: u64) -> Bench {
    let mut b = machine();
    let mut random = Random(seed * 2 + 9);
    let bytes: Vec<u8> = (0..0x6000).map(|_| random.below(256) as u8).collect();
    b.write(DATA, &bytes);
    b.write(STACK - 0x1000, &bytes[..0x2000]);
    b.write(DATA - 0x100, &0x1fa0u32.to_le_bytes());
    b.state(|s| {
        for (i, r) in s.gpr.iter_mut().enumerate().filter(|(i, _)| !matches!(i, 3 | 4)) {
            *r = 0x0101_0101_0101 * (i as u64 + 1) + seed;
        }
        s.gpr[6] = DATA - 0x100;
        s.fpu.xmm = core::array::from_fn(|i| 0x11_0000_0000_0000_0000 * (i as u128 + 1) + seed as u128);
        s.fpu.ymm_hi = core::array::from_fn(|i| 0x22_0000_0000_0000_0000 * (i as u128 + 1));
        s.rflags = (s.rflags.into_bits() | (seed & 0x8d5)).into();
    });
    b
}

// covers: rtm/undo
#[test]
fn an_abort_leaves_nothing_but_rip_and_eax() {
    for seed in 0..20 {
        let mut b = full(seed);
        transaction(&mut b, |a| {
            anything(a, seed)?;
            a.xabort(0x44)
        });
        let (before, memory_before) = (b.cpu.state(), memory(&b));
        assert_eq!(b.run(100_000), Exit::Halt, "{seed}");
        assert_eq!(end(&b), End::Aborted(0x4400_0001), "{seed}");
        let after = b.cpu.state();
        let expected = CpuState {
            rip: after.rip,
            gpr: {
                let mut gpr = before.gpr;
                gpr[0] = 0x4400_0001;
                gpr
            },
            activity: after.activity,
            steps: after.steps,
            iterations: after.iterations,
            ..before
        };
        assert!(after == expected, "{seed}: {after:x?}\n{expected:x?}");
        assert!(memory(&b) == memory_before, "{seed}");
    }
}

// covers: rtm/commit
#[test]
fn a_transaction_that_commits_does_what_its_instructions_do() {
    for seed in 0..20 {
        let run = |transactional: bool| {
            let mut b = full(seed);
            b.code(|a| {
                let mut fallback = a.create_label();
                if transactional {
                    a.xbegin(fallback)?;
                } else {
                    // As long as XBEGIN, so that FIP is the same.
                    a.nop_1(dword_ptr(rax))?;
                    a.nop()?;
                    a.nop()?;
                }
                anything(a, seed)?;
                if transactional {
                    a.xend()?;
                } else {
                    a.nop_1(dword_ptr(rax))?;
                }
                a.set_label(&mut fallback)?;
                a.hlt()
            });
            assert_eq!(b.run(100_000), Exit::Halt, "{seed}");
            let mut s = b.cpu.state();
            s.steps = 0;
            let mut memory = memory(&b);
            // The code differs.
            memory[CODE as usize..][..0x1000].fill(0);
            (s, memory)
        };
        let (with, without) = (run(true), run(false));
        assert!(with == without, "{seed}: {:x?}\n{:x?}", with.0, without.0);
    }
}

// covers: rtm/user
#[test]
fn a_transaction_in_ring_3_ends_before_the_kernel_sees_it() {
    let mut b = machine();
    b.put(TSS + 4, KERNEL_STACK);
    transaction(&mut b, |a| {
        a.mov(qword_ptr(rbx), rbx)?;
        a.syscall()
    });
    b.user();
    // HLT at the fallback is #GP in ring 3: by then the transaction is over.
    let t = b.trap();
    assert_eq!((t.vector, word(&b, DATA), b.cpu.state().gpr[0]), (13, 0, 0));
}

// covers: rtm/host
#[test]
fn the_host_s_transactions_end_alike() {
    if !std::is_x86_feature_detected!("rtm") {
        println!("the host has no RTM: nothing to compare with");
        return;
    }
    // XABORT's status is the one thing that no implementation may choose.
    let status: u32;
    // SAFETY: The fallback is the next instruction; nothing but EAX changes.
    unsafe {
        core::arch::asm!("mov eax, -1", "xbegin 2f", "xabort 0x5a", "2:", out("eax") status);
    }
    println!("the host's EAX after XABORT 5AH: {status:#x}");
    let host_aborted_explicitly = status & 1 != 0;
    let mut b = machine();
    let End::Aborted(ours) = outcome(&mut b, |a| a.xabort(0x5a)) else {
        panic!("committed");
    };
    if host_aborted_explicitly {
        assert_eq!(ours, status as u64);
    } else {
        println!("the host's transactions always abort");
        assert_eq!(status, 0);
    }
}
