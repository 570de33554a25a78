//! Which of several faults of one instruction comes (SDM Vol. 3A Table 7-2 "Priority Among Concurrent Events"), and RF in the
//! frames of interrupted instructions (SDM Vol. 3B 19.3.1.1 "Instruction-Breakpoint Exception Condition").

use crate::{bench, rig};
use bench::{Bench, KDATA, handler};
use engine::Exit;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, STACK, TABLES};
use x86::rflags::flag::{IF, RF, TF};

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;

const TS: u64 = 8;
const EM: u64 = 4;
/// Canonical, and mapped nowhere.
const NOWHERE: u64 = 0x7000_0001;
const FAR_OUT: u64 = 0x0000_8000_0000_0000;

// covers: cpu/priorities
#[test]
fn of_several_faults_the_first_in_the_manual_s_order_comes() {
    for (name, code, bits, user, address, vector) in [
        (
            "LOCK before privilege",
            (|a| a.db(&[0xf0, 0xf4])) as Code,
            0u64,
            true,
            0u64,
            6u8,
        ),
        (
            "an undefined form before its operand",
            |a| a.db(&[0xf0, 0x89, 0xc0]),
            0,
            false,
            NOWHERE,
            6,
        ),
        (
            "privilege before the operand: LGDT",
            |a| a.lgdt(ptr(rbx)),
            0,
            true,
            NOWHERE,
            13,
        ),
        (
            "privilege before the operand: LMSW",
            |a| a.lmsw(word_ptr(rbx)),
            0,
            true,
            NOWHERE,
            13,
        ),
        (
            "privilege before the operand: LTR",
            |a| a.ltr(word_ptr(rbx)),
            0,
            true,
            NOWHERE,
            13,
        ),
        (
            "privilege before the operand: INVPCID",
            |a| a.invpcid(rax, xmmword_ptr(rbx)),
            0,
            true,
            NOWHERE,
            13,
        ),
        (
            "the operand before the division",
            |a| a.div(qword_ptr(rbx)),
            0,
            false,
            NOWHERE,
            14,
        ),
        (
            "canonical form before the page",
            |a| a.mov(eax, dword_ptr(rbx)),
            0,
            false,
            FAR_OUT - 2,
            13,
        ),
        (
            "CR0.EM before CR0.TS",
            |a| a.addps(xmm0, xmmword_ptr(rbx)),
            EM | TS,
            false,
            NOWHERE,
            6,
        ),
        (
            "CR0.TS before the operand: x87",
            |a| a.fld(dword_ptr(rbx)),
            TS,
            false,
            NOWHERE,
            7,
        ),
        (
            "CR0.TS before the operand: SSE",
            |a| a.addps(xmm0, xmmword_ptr(rbx)),
            TS,
            false,
            NOWHERE,
            7,
        ),
        (
            "16-byte alignment before the page: MOVAPS",
            |a| a.movaps(xmm0, xmmword_ptr(rbx)),
            0,
            false,
            NOWHERE,
            13,
        ),
        (
            "16-byte alignment before the page: CMPXCHG16B",
            |a| a.cmpxchg16b(xmmword_ptr(rbx)),
            0,
            false,
            NOWHERE,
            13,
        ),
        (
            "no alignment, so the page: MOVUPS",
            |a| a.movups(xmm0, xmmword_ptr(rbx)),
            0,
            false,
            NOWHERE,
            14,
        ),
        ("the page before the port", |a| a.insb(), 0, false, NOWHERE, 14),
        ("IOPL before the page", |a| a.insb(), 0, true, NOWHERE, 13),
        (
            "more than 15 bytes before what they mean",
            |a| a.db(&[0x66; 15]),
            0,
            false,
            0,
            13,
        ),
        (
            "15 bytes are not too many, so what they mean: LOCK MOV",
            |a| {
                a.db(&[
                    0xf0, 0x26, 0x26, 0x26, 0x26, 0x26, 0x26, 0x26, 0xc7, 0x43, 0, 1, 0, 0, 0,
                ])
            },
            0,
            false,
            0,
            6,
        ),
    ] {
        let mut b = Bench::long();
        if user {
            b.user();
        }
        b.state(|s| {
            s.cr0 = (s.cr0.into_bits() | bits).into();
            s.cr4 = (s.cr4.into_bits() | 0x600).into();
            (s.gpr[0], s.gpr[2], s.gpr[3], s.gpr[7]) = (0, 0x60, address, address);
        });
        let got = b.one(code).map_err(|e| e.0);
        assert_eq!(got, Err(vector), "{name}");
    }
    // A pending x87 exception before the operand.
    let mut b = Bench::long();
    b.state(|s| {
        s.cr0 = (s.cr0.into_bits() | 0x22).into();
        s.fpu.cw = 0x37e;
        s.fpu.sw = 0x8081;
        s.gpr[3] = NOWHERE;
    });
    assert_eq!(b.one(|a| a.fld(dword_ptr(rbx))), Err((16, None)));
    // The fetch of the last byte before the instruction's own faults.
    let mut b = Bench::long();
    b.put(TABLES + 0x2000 + 16, 0);
    b.write(0x3f_ffff, &[0x0f]);
    b.state(|s| s.rip = 0x3f_ffff);
    let t = b.trap();
    assert_eq!((t.vector, t.error, b.cpu.state().cr2), (14, Some(0x10), 0x40_0000));
}

// covers: cpu/rf
#[test]
fn rf_is_set_in_the_frame_of_an_instruction_that_is_not_over() {
    // REP MOVSB of three elements: an interrupt after so many of them.
    for (steps, expected) in [(0u64, 0u64), (1, RF), (2, RF), (3, 0)] {
        let mut b = Bench::long();
        b.state(|s| {
            s.rflags = (IF | 2).into();
            (s.gpr[1], s.gpr[6], s.gpr[7]) = (3, STACK, STACK + 0x100);
        });
        b.code(|a| a.rep().movsb());
        if steps > 0 {
            b.run(steps);
        }
        b.interrupt(0x40);
        b.run(1);
        let t = b.arrived();
        let at = if steps == 3 { CODE + 2 } else { CODE };
        assert_eq!((t.rip, t.flags & RF), (at, expected), "after {steps}");
    }
    // A fault in the middle, a trap between iterations, and one after the last.
    let mut b = Bench::long();
    b.state(|s| (s.gpr[1], s.gpr[6], s.gpr[7]) = (3, STACK, 0x7f_ffff));
    b.put(TABLES + 0x2000 + 24, 0);
    b.state(|s| s.gpr[7] = 0x5f_ffff);
    b.code(|a| a.rep().movsb());
    let t = b.trap();
    assert_eq!((t.vector, t.rip, t.flags & RF), (14, CODE, RF));
    assert_eq!(b.cpu.state().gpr[1], 2);
    for (count, at, expected) in [(2u64, CODE, RF), (1, CODE + 2, 0)] {
        let mut b = Bench::long();
        b.state(|s| {
            s.rflags = (TF | 2).into();
            (s.gpr[1], s.gpr[6], s.gpr[7]) = (count, STACK, STACK + 0x100);
        });
        b.code(|a| a.rep().movsb());
        let t = b.trap();
        assert_eq!((t.vector, t.rip, t.flags & RF), (1, at, expected), "{count} elements");
    }
    // IRET loads it for one instruction; an interrupt there finds it, one after that does not.
    for (steps, expected) in [(1u64, RF), (2, 0)] {
        let mut b = Bench::long();
        for (i, item) in [CODE + 0x40, bench::KCODE as u64, RF | IF | 2, STACK, KDATA as u64]
            .into_iter()
            .enumerate()
        {
            b.put(STACK - 40 + i as u64 * 8, item);
        }
        b.state(|s| s.gpr[4] = STACK - 40);
        b.code(|a| a.iretq());
        b.at(CODE + 0x40, |a| {
            a.nop()?;
            a.nop()
        });
        assert_eq!(b.run(steps), Exit::Budget);
        b.interrupt(0x40);
        b.run(1);
        let t = b.arrived();
        assert_eq!((t.vector, t.flags & RF), (0x40, expected), "after {steps}");
        assert_eq!(b.cpu.rip(), handler(0x40) + 1);
    }
}
