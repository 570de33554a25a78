//! MONITOR and MWAIT (SDM Vol. 2B "MONITOR—Set Up Monitor Address", "MWAIT—Monitor Wait").

use crate::{bench, rig};
use std::cell::RefCell;
use std::rc::Rc;

use bench::{Bench, EVERYTHING, handler};
use engine::bus::{Processor, Watch};
use engine::{Activity, Cpu, Exit};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, STACK};
use x86::model::{CpuModel, CpuidRow};
use x86::rflags::flag::IF;
use x86::watch::{Change, Effects, Interest};

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;

/// The monitored line.
const LINE: u64 = 0x28_0040;
/// Code of the second processor.
const OTHER: u64 = 0x12_0000;

/// The rows of `EVERYTHING` with leaf 5: lines of 64 bytes, interrupts as break events.
const ROWS: &[CpuidRow] = &{
    let mut rows = [CpuidRow {
        leaf: 5,
        subleaf: None,
        regs: [64, 64, 3, 0x1120],
    }; EVERYTHING.cpuid.len() + 1];
    rows[0] = EVERYTHING.cpuid[0];
    rows[1] = EVERYTHING.cpuid[1];
    let mut i = 2;
    while i < EVERYTHING.cpuid.len() {
        rows[i + 1] = EVERYTHING.cpuid[i];
        i += 1;
    }
    rows
};

static WAITS: CpuModel = CpuModel {
    cpuid: ROWS,
    ..EVERYTHING
};

/// MONITOR of LINE, `between`, MWAIT with ECX `extensions`, NOP; runs up to the wait or past it.
fn wait(between: Code, extensions: u32, flags: u64) -> (Bench, Exit) {
    let mut b = Bench::long_with(&WAITS);
    b.code(|a| {
        a.mov(qword_ptr(rbx), rsi)?; // The line's page is in the TLB, writable.
        a.mov(rax, rbx)?;
        a.xor(ecx, ecx)?;
        a.xor(edx, edx)?;
        a.monitor()?;
        between(a)?;
        a.mov(eax, 0x20)?;
        a.mov(ecx, extensions)?;
        a.mwait()?;
        a.mov(edi, 1)?;
        a.jmp(CODE + 0x80)
    });
    b.write(CODE + 0x80, &[0xeb, 0xfe]);
    b.state(|s| {
        s.rflags = (s.rflags.into_bits() | flags).into();
        s.gpr[3] = LINE + 8;
        s.gpr[7] = 0;
    });
    let mut exit = b.run(100);
    // A store to the line ends a run.
    while exit == Exit::Bus {
        exit = b.run(100);
    }
    (b, exit)
}

fn waits(b: &Bench) -> bool {
    b.cpu.activity() == Activity::Waiting
}

// covers: cpu/mwait
#[test]
fn a_store_to_the_line_keeps_mwait_from_waiting() {
    for (name, between, expected) in [
        ("nothing", (|a| a.nop()) as Code, true),
        ("a store to the line", |a| a.mov(byte_ptr(rbx), 1), false),
        ("a store of what is there", |a| a.mov(qword_ptr(rbx), rsi), false),
        (
            "a store that ends in the line",
            |a| a.mov(dword_ptr(rbx - 11), 1),
            false,
        ),
        ("a store before the line", |a| a.mov(qword_ptr(rbx - 16), rsi), true),
        ("a store behind the line", |a| a.mov(qword_ptr(rbx + 56), rsi), true),
        ("a locked one", |a| a.lock().inc(dword_ptr(rbx)), false),
        ("a vector", |a| a.movups(xmmword_ptr(rbx), xmm0), false),
    ] {
        let (b, exit) = wait(between, 0, 0);
        assert_eq!((exit == Exit::Halt, waits(&b)), (expected, expected), "{name}");
        assert_eq!(b.cpu.state().gpr[7], !expected as u64, "{name}");
    }
}

// covers: cpu/mwait
#[test]
fn interrupts_end_the_wait() {
    // An interrupt that IF lets in.
    let (mut b, _) = wait(|a| a.nop(), 0, IF);
    assert!(b.cpu.interruptible() && b.cpu.interrupt_wakes());
    b.at(handler(0x40), |a| a.iretq());
    b.interrupt(0x40);
    assert_eq!(b.run(100), Exit::Budget);
    assert_eq!(b.cpu.state().gpr[7], 1);

    // One that it does not: only where ECX asked.
    for (extensions, wakes) in [(0, false), (1, true)] {
        let (mut b, exit) = wait(|a| a.nop(), extensions, 0);
        assert_eq!(exit, Exit::Halt);
        assert_eq!((b.cpu.interruptible(), b.cpu.interrupt_wakes()), (false, wakes));
        // Nothing pending: it waits on.
        assert_eq!(b.run(100), Exit::Halt);
        b.cpu.want_window = true;
        assert_eq!(b.run(100) == Exit::Budget, wakes, "ECX {extensions}");
        assert_eq!(b.cpu.state().gpr[7], wakes as u64);
    }

    // A non-maskable one.
    let (mut b, _) = wait(|a| a.nop(), 0, 0);
    b.at(handler(2), |a| a.iretq());
    assert!(b.cpu.nmi_deliverable());
    b.nmi();
    b.run(100);
    assert_eq!(b.cpu.state().gpr[7], 1);
}

// covers: cpu/mwait
#[test]
fn stores_of_others_end_the_wait() {
    // Another processor, which has written the page before, so that its TLB has it.
    for (name, off, wakes) in [
        ("the line", 0u64, true),
        ("its end", 55, true),
        ("the next line", 56, false),
    ] {
        let mut b = Bench::long_with(&WAITS);
        let mut other = Cpu::new(&WAITS);
        let mut s = b.cpu.state();
        b.at(OTHER, |a| {
            a.mov(byte_ptr(rbx + 0x100), 1)?;
            a.mov(byte_ptr(rbx + off), 1)
        });
        s.rip = OTHER;
        s.gpr[3] = LINE + 8;
        other.set_state(&s);
        {
            let World { rig, world } = parts(&mut b);
            assert_eq!(rig.engine.run(&mut other, world, 1), Exit::Budget);
        }
        b.code(|a| {
            a.mov(rax, rbx)?;
            a.xor(ecx, ecx)?;
            a.monitor()?;
            a.mwait()?;
            a.jmp(CODE + 0x80)
        });
        b.write(CODE + 0x80, &[0xeb, 0xfe]);
        b.state(|s| s.gpr[3] = LINE + 8);
        assert_eq!(b.run(100), Exit::Halt);
        // The whole state can be taken out and put back.
        let saved = b.cpu.state();
        assert_eq!((saved.activity, saved.monitor.line), (Activity::Waiting, Some(LINE)));
        b.cpu.set_state(&saved);
        assert_eq!(b.run(1), Exit::Halt);
        let World { rig, world } = parts(&mut b);
        rig.engine.run(&mut other, world, 1);
        assert_eq!(rig.engine.wake(&mut rig.cpu, world), wakes, "{name}");
        assert_eq!(b.cpu.activity() == Activity::Running, wakes, "{name}");
        assert_eq!(b.run(10) == Exit::Budget, wakes, "{name}");
    }
    // A device.
    let (mut b, _) = wait(|a| a.nop(), 0, 0);
    b.engine.written(LINE + 0x40, 0x1000);
    assert_eq!(b.run(100), Exit::Halt);
    b.engine.written(LINE - 0x1000, 0x1001);
    assert_eq!(b.run(100), Exit::Budget);
    assert_eq!(b.cpu.state().gpr[7], 1);
}

/// Notes how each wait ended.
struct Wakes(Rc<RefCell<Vec<bool>>>);

impl Watch for Wakes {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            transfers: true,
            ..Interest::NOTHING
        }
    }

    fn state(&mut self, change: Change, _: &mut dyn Processor) -> Effects {
        if let Change::Wake { store } = change {
            self.0.borrow_mut().push(store);
        }
        Effects::NONE
    }
}

// covers: interest/changes
#[test]
fn the_units_hear_what_ended_a_wait() {
    type End = fn(&mut Bench);
    let ends: [(&str, u32, End, bool); 3] = [
        ("a device's store", 0, |b| b.engine.written(LINE, 1), true),
        ("a masked interrupt", 1, |b| b.cpu.want_window = true, false),
        ("an NMI", 0, |b| b.nmi(), false),
    ];
    for (what, extensions, end, store) in ends {
        let (mut b, _) = wait(|a| a.nop(), extensions, 0);
        let wakes = Rc::new(RefCell::new(Vec::new()));
        b.world.watch = Some(Box::new(Wakes(wakes.clone())));
        assert_eq!(b.run(100), Exit::Halt, "{what}");
        end(&mut b);
        b.run(10);
        assert_eq!(*wakes.borrow(), [store], "{what}");
    }
}

/// A waiting state is taken on by a processor whose units wanted to hear nothing before: they hear the end of the wait.
// covers: interest/changes
#[test]
fn the_units_hear_the_end_of_a_wait_that_has_been_taken_on() {
    let (mut b, _) = wait(|a| a.nop(), 0, 0);
    let (saved, translations) = (b.cpu.state(), b.engine.translations(&b.cpu));
    let wakes = Rc::new(RefCell::new(Vec::new()));
    b.world.watch = Some(Box::new(Wakes(wakes.clone())));
    let World { rig, world } = parts(&mut b);
    rig.cpu.set_state(&saved);
    rig.engine.set_translations(&mut rig.cpu, &translations);
    assert!(!rig.engine.wake(&mut rig.cpu, world));
    rig.engine.written(LINE, 1);
    assert!(rig.engine.wake(&mut rig.cpu, world));
    assert_eq!(*wakes.borrow(), [true]);
}

struct World<'a> {
    rig: &'a mut rig::Rig,
    world: &'a mut bench::World,
}

fn parts(b: &mut Bench) -> World<'_> {
    let (rig, world) = b.parts();
    World { rig, world }
}

// covers: cpu/mwait
#[test]
fn what_monitor_and_mwait_check() {
    let monitor: Code = |a| a.monitor();
    let mwait: Code = |a| a.mwait();
    let (ud, gp) = (Err((6, None)), Err((13, Some(0))));
    for (name, code, model, user, address, extensions, expected) in [
        ("MONITOR", monitor, &WAITS, false, LINE, 0u64, Ok(())),
        ("MONITOR at CPL 3", monitor, &WAITS, true, LINE, 0, ud),
        ("MONITOR with ECX", monitor, &WAITS, false, LINE, 1, gp),
        ("MONITOR, not canonical", monitor, &WAITS, false, 1 << 47, 0, gp),
        (
            "MONITOR, not mapped",
            monitor,
            &WAITS,
            false,
            0x7000_0000,
            0,
            Err((14, Some(0))),
        ),
        ("MWAIT without MONITOR", mwait, &WAITS, false, LINE, 0, Ok(())),
        ("MWAIT at CPL 3", mwait, &WAITS, true, LINE, 0, ud),
        ("MWAIT with ECX 2", mwait, &WAITS, false, LINE, 2, gp),
        ("MWAIT with ECX 1", mwait, &WAITS, false, LINE, 1, Ok(())),
        (
            "MWAIT with ECX 1, leaf 5 without it",
            mwait,
            &EVERYTHING,
            false,
            LINE,
            1,
            gp,
        ),
        (
            "MONITOR, a part without it",
            monitor,
            &x86::model::P6,
            false,
            LINE,
            0,
            ud,
        ),
    ] {
        // P6 has no 64-bit mode, but what it decodes is the same.
        let mut b = Bench::long_with(model);
        if user {
            b.user();
        }
        b.state(|s| (s.gpr[0], s.gpr[1], s.gpr[4]) = (address, extensions, STACK));
        assert_eq!(b.one(code), expected, "{name}");
    }
}
