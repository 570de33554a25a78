//! UMONITOR, UMWAIT and TPAUSE (SDM Vol. 2B "UMONITOR—User Level Set Up Monitor Address", "UMWAIT—User Level Monitor Wait", "TPAUSE—Timed
//! PAUSE").

use crate::bench;

use bench::{Bench, EVERYTHING, TSC, handler};
use engine::{Activity, Exit};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use x86::model::{CpuModel, CpuidRow};
use x86::msr::IA32_UMWAIT_CONTROL;
use x86::rflags::flag::IF;

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;

/// The monitored line.
const LINE: u64 = 0x28_0040;
/// The carry flag, and all status flags: CF, PF, AF, ZF, SF, OF.
const CF: u64 = 1;
const STATUS: u64 = 0x8D5;

/// The rows of `EVERYTHING` with WAITPKG.
const ROWS: &[CpuidRow] = &{
    let mut rows = [EVERYTHING.cpuid[0]; EVERYTHING.cpuid.len()];
    let mut i = 0;
    while i < rows.len() {
        rows[i] = EVERYTHING.cpuid[i];
        if rows[i].leaf == 7 {
            rows[i].regs[2] |= 1 << 5;
        }
        i += 1;
    }
    rows
};

static WAITS: CpuModel = CpuModel {
    cpuid: ROWS,
    ..EVERYTHING
};

/// Runs the code with a deadline so many ticks after the start in EDX:EAX, RBX at the line and ECX for the state, up to a wait or past
/// it: RDI is 1 then.
fn wait(code: Code, ticks: u64, limit: u64, flags: u64) -> (Bench, Exit) {
    let mut b = Bench::long_with(&WAITS);
    b.world.msrs.insert(IA32_UMWAIT_CONTROL, limit);
    b.code(code);
    let end = b.cpu.state().rip;
    let deadline = (TSC + b.cpu.clock).saturating_add(ticks);
    b.state(|s| {
        s.rflags = (s.rflags.into_bits() | flags).into();
        s.gpr[0] = deadline & 0xFFFF_FFFF;
        s.gpr[2] = deadline >> 32;
        s.gpr[1] = 0;
        s.gpr[3] = LINE + 8;
        s.gpr[7] = 0;
        s.rip = end;
    });
    let mut exit = b.run(100);
    while exit == Exit::Bus {
        exit = b.run(100);
    }
    (b, exit)
}

fn tpause(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.tpause(ecx)?;
    after(a)
}

fn umwait(a: &mut CodeAssembler) -> Result<(), IcedError> {
    // The line's page is in the TLB, writable.
    a.mov(qword_ptr(rbx), rsi)?;
    a.umonitor(rbx)?;
    a.umwait(ecx)?;
    after(a)
}

/// A number, and a loop.
fn after(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(edi, 1)?;
    let mut here = a.create_label();
    a.set_label(&mut here)?;
    a.jmp(here)
}

fn waits(b: &Bench) -> bool {
    b.cpu.activity() == Activity::Waiting
}

fn flags(b: &Bench) -> u64 {
    b.cpu.state().rflags.into_bits() & STATUS
}

// covers: cpu/waitpkg
#[test]
fn waits_end_at_the_deadline_and_the_carry_flag_says_whose_it_was() {
    for (name, code) in [("TPAUSE", tpause as Code), ("UMWAIT", umwait)] {
        for (ticks, limit, ends, carry, why) in [
            (1000, 0, 1000, 0, "no limit: the instruction's deadline"),
            (1000, 400, 400, CF, "the operating system's limit comes first"),
            (1000, 403, 400, CF, "bits 1:0 are no part of it"),
            (400, 1000, 400, 0, "the instruction's deadline comes first"),
            (u64::MAX, 400, 400, CF, "the end of time"),
        ] {
            let (mut b, exit) = wait(code, ticks, limit, STATUS);
            assert_eq!((exit, waits(&b)), (Exit::Halt, true), "{name}, {why}");
            assert_eq!(flags(&b), 0, "{name}: all status flags are cleared");
            let until = b.cpu.waits_until().unwrap();
            let started = until - ends;
            // The limit counts from the instruction, the deadline was made a few before it.
            assert!((TSC..TSC + 16).contains(&started), "{name}, {why}: {started:#x}");
            b.world.skew = until - 1 - TSC - b.cpu.clock;
            assert_eq!(b.run(100), Exit::Halt, "{name}, {why}: one tick is left");
            b.world.skew += 1;
            assert_eq!(b.run(100), Exit::Budget, "{name}, {why}");
            assert_eq!((b.cpu.state().gpr[7], flags(&b)), (1, carry), "{name}, {why}");
            assert_eq!(b.cpu.state().monitor.timed, None);
        }
        // A deadline that has passed, or is now.
        let (b, exit) = wait(code, 0, 400, STATUS);
        assert_eq!((exit, b.cpu.state().gpr[7], flags(&b)), (Exit::Budget, 1, 0), "{name}");
    }
}

// covers: cpu/waitpkg
#[test]
fn a_store_to_the_line_ends_umwait_alone() {
    for (name, code, wakes) in [("TPAUSE", tpause as Code, false), ("UMWAIT", umwait, true)] {
        let (mut b, _) = wait(code, 10_000, 0, 0);
        b.engine.written(LINE + 0x40, 8);
        assert_eq!(b.run(100), Exit::Halt, "{name}: the next line");
        b.engine.written(LINE, 1);
        assert_eq!(b.run(100) == Exit::Budget, wakes, "{name}");
        assert_eq!((b.cpu.state().gpr[7], flags(&b)), (wakes.into(), 0), "{name}");
    }
    // Before the wait, and what it takes for one.
    for (name, code, expected) in [
        (
            "a store in between",
            (|a| {
                a.umonitor(rbx)?;
                a.mov(byte_ptr(rbx), 1)?;
                a.umwait(ecx)?;
                after(a)
            }) as Code,
            false,
        ),
        (
            "no UMONITOR",
            |a| {
                a.umwait(ecx)?;
                after(a)
            },
            false,
        ),
        (
            "one UMONITOR for two waits",
            |a| {
                a.umonitor(rbx)?;
                a.mov(byte_ptr(rbx), 1)?;
                a.umwait(ecx)?;
                a.umwait(ecx)?;
                after(a)
            },
            false,
        ),
        (
            "MONITOR is for MWAIT",
            |a| {
                a.xchg(rax, rbx)?;
                a.xchg(rdx, rsi)?;
                a.monitor()?;
                a.xchg(rax, rbx)?;
                a.xchg(rdx, rsi)?;
                a.umwait(ecx)?;
                after(a)
            },
            false,
        ),
        (
            "UMONITOR is not for MWAIT",
            |a| {
                a.umonitor(rbx)?;
                a.mwait()?;
                after(a)
            },
            false,
        ),
        (
            "UMONITOR with a 32-bit address",
            |a| {
                a.mov(rsi, 0xFFu64 << 40)?;
                a.or(rbx, rsi)?;
                // UMONITOR EBX.
                a.db(&[0x67, 0xF3, 0x0F, 0xAE, 0xF3])?;
                a.umwait(ecx)?;
                after(a)
            },
            true,
        ),
    ] {
        let (b, exit) = wait(code, 10_000, 0, 0);
        assert_eq!((exit == Exit::Halt, waits(&b)), (expected, expected), "{name}");
    }
}

// covers: cpu/waitpkg
#[test]
fn interrupts_end_the_wait_enabled_or_not() {
    for (name, code) in [("TPAUSE", tpause as Code), ("UMWAIT", umwait)] {
        // Enabled: delivered, and the frame has CF clear.
        let (mut b, _) = wait(code, 10_000, 400, IF);
        assert!(b.cpu.interruptible() && b.cpu.interrupt_wakes(), "{name}");
        b.at(handler(0x40), |a| a.iretq());
        b.interrupt(0x40);
        assert_eq!(b.run(100), Exit::Budget);
        assert_eq!((b.cpu.state().gpr[7], flags(&b)), (1, 0), "{name}: it does not wait on");
        // Disabled: execution goes on behind the instruction.
        let (mut b, _) = wait(code, 10_000, 400, 0);
        assert!(!b.cpu.interruptible() && b.cpu.interrupt_wakes(), "{name}");
        b.cpu.want_window = true;
        assert_eq!(b.run(100), Exit::Budget);
        assert_eq!((b.cpu.state().gpr[7], flags(&b)), (1, 0), "{name}");
        // NMI.
        let (mut b, _) = wait(code, 10_000, 400, 0);
        b.at(handler(2), |a| a.iretq());
        b.nmi();
        b.run(100);
        assert_eq!((b.cpu.state().gpr[7], flags(&b)), (1, 0), "{name}");
        // The whole state can be taken out and put back.
        let (mut b, _) = wait(code, 10_000, 400, 0);
        let saved = b.cpu.state();
        b.cpu.set_state(&saved);
        assert_eq!(b.run(1), Exit::Halt, "{name}");
        b.world.skew = 400;
        b.run(10);
        assert_eq!((b.cpu.state().gpr[7], flags(&b)), (1, CF), "{name}");
    }
}

// covers: cpu/waitpkg
#[test]
fn what_the_three_instructions_check() {
    let umonitor: Code = |a| a.umonitor(rbx);
    let umwait: Code = |a| a.umwait(ecx);
    let tpause: Code = |a| a.tpause(ecx);
    let (ud, gp) = (Err((6, None)), Err((13, Some(0))));
    for (name, code, model, user, tsd, address, control, expected) in [
        ("UMONITOR", umonitor, &WAITS, false, false, LINE, 0, Ok(())),
        ("UMONITOR, TSD", umonitor, &WAITS, false, true, LINE, 0, Ok(())),
        (
            "UMONITOR, not canonical",
            umonitor,
            &WAITS,
            false,
            false,
            1 << 47,
            0,
            gp,
        ),
        (
            "UMONITOR, not mapped",
            umonitor,
            &WAITS,
            false,
            false,
            0x7000_0000,
            0,
            Err((14, Some(0))),
        ),
        (
            "UMONITOR, a part without it",
            umonitor,
            &EVERYTHING,
            false,
            false,
            LINE,
            0,
            ud,
        ),
        ("UMWAIT at CPL 3", umwait, &WAITS, true, false, LINE, 0, Ok(())),
        ("UMWAIT at CPL 3, TSD", umwait, &WAITS, true, true, LINE, 0, gp),
        ("UMWAIT, TSD", umwait, &WAITS, false, true, LINE, 0, Ok(())),
        ("UMWAIT, C0.1", umwait, &WAITS, false, false, LINE, 1, Ok(())),
        ("UMWAIT, a reserved bit", umwait, &WAITS, false, false, LINE, 2, gp),
        (
            "UMWAIT, the last reserved bit",
            umwait,
            &WAITS,
            false,
            false,
            LINE,
            1 << 31,
            gp,
        ),
        (
            "UMWAIT, a part without it",
            umwait,
            &EVERYTHING,
            false,
            false,
            LINE,
            0,
            ud,
        ),
        ("TPAUSE at CPL 3", tpause, &WAITS, true, false, LINE, 0, Ok(())),
        ("TPAUSE at CPL 3, TSD", tpause, &WAITS, true, true, LINE, 0, gp),
        ("TPAUSE, C0.1", tpause, &WAITS, false, false, LINE, 1, Ok(())),
        ("TPAUSE, a reserved bit", tpause, &WAITS, false, false, LINE, 4, gp),
        (
            "TPAUSE, a part without it",
            tpause,
            &EVERYTHING,
            false,
            false,
            LINE,
            0,
            ud,
        ),
    ] {
        let mut b = Bench::long_with(model);
        if user {
            b.user();
        }
        b.state(|s| {
            // A deadline that has passed.
            (s.gpr[0], s.gpr[1], s.gpr[2], s.gpr[3]) = (0, control, 0, address);
            s.gpr[4] = crate::rig::STACK;
            s.cr4 = s.cr4.with_tsd(tsd);
        });
        assert_eq!(b.one(code), expected, "{name}");
    }
}
