//! Hardware task switches (SDM Vol. 3A chapter 9 "Task Management").

use crate::{bench, rig};
use bench::TR as OLD;
use bench::{
    Bench, FREE, GDT, IDT, KCODE32, KDATA, KERNEL_STACK, LDT, LDTR, TSS, UCODE32, UDATA, descriptor, gate, handler,
};
use engine::{Activity, CS, CpuState, DS, ES, Exit, FS, GS, SS, Segment, Table};
use rig::{CODE, RAM, STACK, TABLES};

/// The new task's TSS descriptor, a task gate to it, and what it runs.
const NEW: u16 = FREE;
const GATE: u16 = FREE + 8;
const NEW_TSS: u64 = 0x9000;
const NEW_CODE: u64 = 0x11_0000;
const NEW_STACK: u64 = 0x21_0000;

const NT: u64 = 1 << 14;
const VM: u64 = 1 << 17;

// Fields of a 32-bit TSS.
const ESP0: u64 = 4;
const SS0: u64 = 8;
const CR3: u64 = 0x1c;
const EIP: u64 = 0x20;
const EFLAGS: u64 = 0x24;
const EAX: u64 = 0x28;
const ESP: u64 = 0x38;
const F_ES: u64 = 0x48;
const F_CS: u64 = 0x4c;
const F_SS: u64 = 0x50;
const F_DS: u64 = 0x54;
const F_FS: u64 = 0x58;
const F_LDT: u64 = 0x60;
const T: u64 = 0x64;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Jmp,
    Call,
    JmpGate,
    CallGate,
    Int,
    Exception,
    External,
    Iret,
}
use Way::*;
use x86::rflags::flag::{IF, RF, TF};

impl Way {
    fn nests(self) -> bool {
        matches!(self, Call | CallGate | Int | Exception | External)
    }
}

fn put32(b: &mut Bench, at: u64, value: u64) {
    b.write(at, &(value as u32).to_le_bytes());
}

fn get32(b: &Bench, at: u64) -> u64 {
    u32::from_le_bytes(b.read(at)) as u64
}

fn get16(b: &Bench, at: u64) -> u64 {
    u16::from_le_bytes(b.read(at)) as u64
}

/// Byte 5 of a descriptor: type, S, DPL, P.
fn access(b: &Bench, selector: u16) -> u8 {
    let [byte] = b.read(GDT + (selector & !7) as u64 + 5);
    byte
}

/// A machine with two tasks: the one that runs, and one whose TSS is filled in for CPL 0, or CPL 3.
fn tasks(user: bool) -> Bench {
    let mut b = Bench::protected();
    b.put(GDT + OLD as u64, descriptor(TSS as u32, 0x67, 0x8b));
    b.put(GDT + NEW as u64, descriptor(NEW_TSS as u32, 0x67, 0x89));
    b.put(GDT + GATE as u64, gate(NEW, 0, 5, 0, 0));
    b.write(NEW_TSS, &[0; 0x68]);
    put32(&mut b, NEW_TSS + ESP0, KERNEL_STACK);
    put32(&mut b, NEW_TSS + SS0, KDATA as u64);
    put32(&mut b, NEW_TSS + EIP, NEW_CODE);
    put32(&mut b, NEW_TSS + EFLAGS, IF | 0x41);
    for i in 0..8 {
        put32(&mut b, NEW_TSS + EAX + i * 4, 0x1111_1111 * (i + 1));
    }
    put32(&mut b, NEW_TSS + ESP, NEW_STACK);
    let (code, data) = if user {
        (UCODE32 | 3, UDATA | 3)
    } else {
        (KCODE32, KDATA)
    };
    for (field, selector) in [(F_ES, data), (F_CS, code), (F_SS, data), (F_DS, data)] {
        put32(&mut b, NEW_TSS + field, selector as u64);
    }
    b.write(NEW_CODE, &[0x90, 0x90, 0xeb, 0xfe]);
    b
}

/// The instruction for a way; FREE selectors go as immediates.
fn instruction(way: Way) -> Vec<u8> {
    let far = |opcode: u8, selector: u16| {
        let [low, high] = selector.to_le_bytes();
        vec![opcode, 0x78, 0x56, 0x34, 0x12, low, high]
    };
    match way {
        Jmp => far(0xea, NEW),
        Call => far(0x9a, NEW),
        JmpGate => far(0xea, GATE),
        CallGate => far(0x9a, GATE),
        Int => vec![0xcd, 0x35],
        Exception => vec![0x0f, 0x0b],
        External => vec![0x90],
        Iret => vec![0xcf],
    }
}

/// Puts things in place for a way, and goes it.
fn go(b: &mut Bench, way: Way) {
    match way {
        Int => b.put(IDT + 0x35 * 8, gate(NEW, 0, 5, 0, 0)),
        Exception => b.put(IDT + 6 * 8, gate(NEW, 0, 5, 0, 0)),
        External => b.put(IDT + 0x40 * 8, gate(NEW, 0, 5, 0, 0)),
        Iret => {
            b.write(TSS, &NEW.to_le_bytes());
            let busy = access(b, NEW) | 2;
            b.write(GDT + NEW as u64 + 5, &[busy]);
            b.state(|s| s.rflags.set_nt(true));
        }
        _ => {}
    }
    let code = instruction(way);
    let at = b.cpu.rip();
    b.write(at, &code);
    match way {
        External => b.interrupt(0x40),
        // The exception itself is no step.
        Exception => {
            b.run(1);
        }
        _ => {
            b.run(1);
        }
    }
}

// covers: cpu/task-switch, dr/task-switch
#[test]
fn every_way_to_another_task_saves_one_and_loads_the_other() {
    for way in [Jmp, Call, JmpGate, CallGate, Int, Exception, External, Iret] {
        let mut b = tasks(false);
        b.state(|s| {
            for i in 0..8 {
                s.gpr[i] = 0x100 + i as u64;
            }
            s.gpr[4] = STACK;
            s.rflags = (0x8d7 | IF).into();
            s.dr[7] = 0x7ff;
            s.segments[FS].selector = 0x1234;
            s.segments[GS].selector = 0x4321;
        });
        go(&mut b, way);
        let s = b.cpu.state();

        // What the old task keeps.
        let resumes = match way {
            Exception | External => CODE,
            _ => CODE + instruction(way).len() as u64,
        };
        let flags = 0x8d7 | IF | if way == Exception { RF } else { 0 };
        let saved: Vec<u64> = (0..16).map(|i| get32(&b, TSS + EIP + i * 4)).collect();
        #[rustfmt::skip]
        assert_eq!(
            saved,
            [
                resumes, flags, 0x100, 0x101, 0x102, 0x103, STACK, 0x105, 0x106, 0x107,
                KDATA as u64, KCODE32 as u64, KDATA as u64, KDATA as u64, 0x1234, 0x4321,
            ],
            "{way:?}"
        );

        // What the new one has. UD2 in the run loop leaves one step, the new task's first NOP.
        let nops = (way == Exception) as u64;
        assert_eq!(s.rip, NEW_CODE + nops, "{way:?}");
        let nested = if way.nests() { NT } else { 0 };
        assert_eq!(s.rflags.into_bits(), IF | 0x43 | nested, "{way:?}");
        for i in 0..8 {
            let expected = if i == 4 {
                NEW_STACK
            } else {
                0x1111_1111 * (i as u64 + 1)
            };
            assert_eq!(s.gpr[i], expected, "{way:?}, register {i}");
        }
        assert_eq!(s.segments[CS].selector, KCODE32);
        for seg in [SS, DS, ES] {
            assert_eq!((s.segments[seg].selector, s.segments[seg].limit), (KDATA, u32::MAX));
        }
        for seg in [FS, GS] {
            assert_eq!(s.segments[seg], Segment::default(), "{way:?}: null");
        }
        assert_eq!(
            s.tr,
            Segment {
                selector: NEW,
                base: NEW_TSS,
                limit: 0x67,
                attributes: 0x8b
            }
        );
        assert_eq!(s.ldtr.attributes & 0x80, 0, "{way:?}: no LDT");
        assert_eq!(s.cr0.into_bits() & 8, 8, "{way:?}: TS");
        assert_eq!(s.dr[7], 0x6aa | 0x400, "{way:?}: local breakpoints and LE go");

        // Who is busy, and who is linked to whom.
        assert_eq!(access(&b, NEW), 0x8b, "{way:?}");
        assert_eq!(access(&b, OLD), if way.nests() { 0x8b } else { 0x89 }, "{way:?}");
        assert_eq!(get16(&b, NEW_TSS), if way.nests() { OLD as u64 } else { 0 }, "{way:?}");
    }
}

// covers: cpu/task-switch
#[test]
fn a_nested_task_returns_by_iret() {
    for way in [Call, CallGate, Int, Exception, External] {
        let mut b = tasks(false);
        b.write(NEW_CODE, &[0x83, 0xc0, 0x01, 0xcf, 0xeb, 0xfa]); // ADD EAX, 1; IRETD; and again
        b.state(|s| (s.gpr[0], s.rflags) = (0x77, (IF | 2).into()));
        go(&mut b, way);
        b.run(if way == Exception { 1 } else { 2 });
        let s = b.cpu.state();
        let resumes = match way {
            Exception | External => CODE,
            _ => CODE + instruction(way).len() as u64,
        };
        assert_eq!((s.rip, s.gpr[0], s.tr.selector), (resumes, 0x77, OLD), "{way:?}");
        // RF comes back with the old task's flags and holds for the instruction that faulted.
        let rf = if way == Exception { RF } else { 0 };
        assert_eq!(s.rflags.into_bits(), IF | 2 | rf, "{way:?}");
        assert_eq!((access(&b, OLD), access(&b, NEW)), (0x8b, 0x89), "{way:?}");
        // The handler's task goes on behind its IRET next time, with NT clear in its image.
        assert_eq!(get32(&b, NEW_TSS + EIP), NEW_CODE + 4, "{way:?}");
        assert_eq!(get32(&b, NEW_TSS + EFLAGS) & NT, 0, "{way:?}");
        assert_eq!(get32(&b, NEW_TSS + EAX), 0x1111_1112, "{way:?}");
    }
}

// covers: cpu/task-faults
#[test]
fn a_switch_that_cannot_begin_faults_in_the_old_task() {
    const N: u32 = NEW as u32;
    const G: u32 = GATE as u32;
    const O: u32 = OLD as u32;
    fn tss(b: &mut Bench, limit: u32, attributes: u16) {
        b.put(GDT + NEW as u64, descriptor(NEW_TSS as u32, limit, attributes));
    }
    fn names(b: &mut Bench, selector: u16) {
        b.put(GDT + GATE as u64, gate(selector, 0, 5, 0, 0));
        for v in [0x35, 0x40, 6] {
            b.put(IDT + v * 8, gate(selector, 0, 5, 0, 0));
        }
    }
    type Row = (&'static str, &'static [Way], fn(&mut Bench), (u8, u32));
    let rows: &[Row] = &[
        ("busy", &[Jmp, Call], |b| tss(b, 0x67, 0x8b), (13, N)),
        (
            "busy, by gate",
            &[JmpGate, CallGate, Int],
            |b| tss(b, 0x67, 0x8b),
            (13, N),
        ),
        (
            "not present",
            &[Jmp, Call, JmpGate, CallGate, Int],
            |b| tss(b, 0x67, 0x09),
            (11, N),
        ),
        (
            "too short",
            &[Jmp, Call, JmpGate, CallGate, Int],
            |b| tss(b, 0x66, 0x89),
            (10, N),
        ),
        ("16 bits, too short", &[Jmp, Call, Int], |b| tss(b, 0x2a, 0x81), (10, N)),
        ("data", &[JmpGate, CallGate, Int], |b| tss(b, 0x67, 0x93), (13, N)),
        (
            "an LDT",
            &[Jmp, Call, JmpGate, CallGate, Int],
            |b| tss(b, 0x67, 0x82),
            (13, N),
        ),
        (
            "a gate to the LDT's table",
            &[JmpGate, CallGate],
            |b| names(b, NEW | 4),
            (13, N | 4),
        ),
        ("a gate to null", &[JmpGate, CallGate], |b| names(b, 0), (13, 0)),
        (
            "a gate beyond the GDT",
            &[JmpGate, CallGate],
            |b| names(b, 0x800),
            (13, 0x800),
        ),
        (
            "a gate that is not present",
            &[JmpGate, CallGate],
            |b| b.put(GDT + GATE as u64, gate(NEW, 0, 5, 0, 0) & !(1 << 47)),
            (11, G),
        ),
        (
            "the present TSS too short",
            &[Jmp, Call, JmpGate, Int],
            |b| b.state(|s| s.tr.limit = 0x5e),
            (10, O),
        ),
        ("link: not busy", &[Iret], |b| tss(b, 0x67, 0x89), (10, N)),
        ("link: not present", &[Iret], |b| tss(b, 0x67, 0x0b), (11, N)),
        ("link: data", &[Iret], |b| tss(b, 0x67, 0x93), (10, N)),
        ("link: null", &[Iret], |b| b.write(TSS, &[0, 0]), (10, 0)),
        (
            "link: the LDT's table",
            &[Iret],
            |b| b.write(TSS, &[NEW as u8 | 4, 0]),
            (10, N | 4),
        ),
        (
            "link: beyond the GDT",
            &[Iret],
            |b| b.write(TSS, &[0, 0x10]),
            (10, 0x1000),
        ),
        (
            "link: beyond the TSS",
            &[Iret],
            |b| b.state(|s| s.tr.limit = 0),
            (10, O),
        ),
    ];
    for &(name, ways, setup, (vector, error)) in rows {
        for &way in ways {
            let mut b = tasks(false);
            if way == Int {
                b.put(IDT + 0x35 * 8, gate(NEW, 0, 5, 0, 0));
            }
            if way == Iret {
                b.write(TSS, &NEW.to_le_bytes());
                b.state(|s| s.rflags.set_nt(true));
            }
            setup(&mut b);
            let before = b.read::<0x68>(TSS);
            let got = b.one(|a| a.db(&instruction(way)));
            assert_eq!(got, Err((vector, Some(error))), "{name}: {way:?}");
            let s = b.cpu.state();
            assert_eq!(
                (s.tr.selector, s.cr0.into_bits() & 8),
                (OLD, 0),
                "{name}: {way:?}: the old task"
            );
            assert_eq!(b.read::<0x68>(TSS), before, "{name}: {way:?}: nothing is saved");
        }
    }
    // Events carry EXT: an exception through a gate to a TSS that will not do.
    let mut b = tasks(false);
    names(&mut b, NEW);
    tss(&mut b, 0x67, 0x09);
    b.write(CODE, &[0x0f, 0x0b]);
    let t = b.trap();
    assert_eq!((t.vector, t.error), (11, Some(N | 1)));
}

// covers: cpu/task-faults
#[test]
fn privilege_decides_who_may_switch() {
    let (n, g) = (NEW as u32, GATE as u32);
    for (name, tss_dpl, gate_dpl, rpl, way, expected) in [
        ("CPL 3, TSS for 0", 0u8, 0u8, 3u16, Jmp, Some((13, Some(n)))),
        ("CPL 3, TSS for 3", 3, 0, 3, Jmp, None),
        ("CPL 3, TSS for 3", 3, 0, 3, Call, None),
        ("CPL 3, gate for 0", 3, 0, 3, JmpGate, Some((13, Some(g)))),
        (
            "CPL 3, gate for 3: the TSS's level does not count",
            0,
            3,
            3,
            CallGate,
            None,
        ),
        ("CPL 3, INT n, gate for 0", 3, 0, 0, Int, Some((13, Some(0x35 * 8 + 2)))),
        ("CPL 3, INT n, gate for 3", 0, 3, 0, Int, None),
    ] {
        let mut b = tasks(false);
        b.put(
            GDT + NEW as u64,
            descriptor(NEW_TSS as u32, 0x67, 0x89 | (tss_dpl as u16) << 5),
        );
        b.put(GDT + GATE as u64, gate(NEW, 0, 5, gate_dpl, 0));
        b.put(IDT + 0x35 * 8, gate(NEW, 0, 5, gate_dpl, 0));
        b.user();
        let mut code = instruction(way);
        if let Some(low) = code.get_mut(5) {
            *low |= rpl as u8;
        }
        assert_eq!(b.one(|a| a.db(&code)).err(), expected, "{name}: {way:?}");
        assert_eq!(
            b.cpu.state().tr.selector & !3 == NEW,
            expected.is_none(),
            "{name}: {way:?}"
        );
    }
    // RPL counts at CPL 0 too.
    let mut b = tasks(false);
    let mut code = instruction(Jmp);
    code[5] |= 1;
    assert_eq!(b.one(|a| a.db(&code)), Err((13, Some(n))));
}

// covers: cpu/task-faults
#[test]
fn what_is_wrong_with_the_new_task_is_its_own_fault() {
    // SDM Vol. 3A Table 9-1 "Exception Conditions Checked During a Task Switch". The new task runs at CPL 3, so that its
    // handler has a stack.
    const X: u16 = FREE + 0x20;
    let x = X as u64 | 3;
    let e = X as u32;
    // Field, its value, the descriptor at X, the exception.
    type Row = (&'static str, u64, u64, u64, (u8, u32));
    let rows: &[Row] = &[
        ("LDT: not an LDT", F_LDT, X as u64, descriptor(0, 0xfff, 0x93), (10, e)),
        ("LDT: in the LDT", F_LDT, X as u64 | 4, 0, (10, e | 4)),
        (
            "LDT: not present",
            F_LDT,
            X as u64,
            descriptor(LDT as u32, 0xfff, 0x02),
            (10, e),
        ),
        ("LDT: beyond the GDT", F_LDT, 0x1000, 0, (10, 0x1000)),
        ("CS: null", F_CS, 3, 0, (10, 0)),
        ("CS: data", F_CS, x, descriptor(0, u32::MAX, 0xc0f3), (10, e)),
        ("CS: DPL is not RPL", F_CS, x, descriptor(0, u32::MAX, 0xc0bb), (10, e)),
        (
            "CS: conforming, DPL above RPL is refused",
            F_CS,
            X as u64 | 1,
            descriptor(0, u32::MAX, 0xc0ff),
            (10, UDATA as u32),
        ),
        ("CS: not present", F_CS, x, descriptor(0, u32::MAX, 0xc07b), (11, e)),
        ("CS: beyond the GDT", F_CS, 0x1003, 0, (10, 0x1000)),
        ("SS: null", F_SS, 3, 0, (10, 0)),
        ("SS: read-only", F_SS, x, descriptor(0, u32::MAX, 0xc0f1), (10, e)),
        ("SS: not present", F_SS, x, descriptor(0, u32::MAX, 0xc073), (12, e)),
        ("SS: DPL", F_SS, x, descriptor(0, u32::MAX, 0xc0b3), (10, e)),
        ("SS: RPL", F_SS, X as u64 | 2, descriptor(0, u32::MAX, 0xc0f3), (10, e)),
        ("DS: a system segment", F_DS, x, descriptor(0, u32::MAX, 0xe2), (10, e)),
        (
            "DS: code that may not be read",
            F_DS,
            x,
            descriptor(0, u32::MAX, 0xc0f9),
            (10, e),
        ),
        ("DS: not present", F_DS, x, descriptor(0, u32::MAX, 0xc073), (11, e)),
        ("ES: for CPL 0", F_ES, x, descriptor(0, u32::MAX, 0xc093), (10, e)),
        ("FS: beyond the GDT", F_FS, 0x1003, 0, (10, 0x1000)),
        (
            "EIP: beyond the segment",
            F_CS,
            x,
            descriptor(0, NEW_CODE as u32 - 1, 0x40fb),
            (13, 0),
        ),
    ];
    for &(name, field, value, entry, (vector, error)) in rows {
        for way in [Jmp, CallGate, Int, External, Iret] {
            let mut b = tasks(true);
            if entry != 0 {
                b.put(GDT + X as u64, entry);
            }
            put32(&mut b, NEW_TSS + field, value);
            if matches!(way, Int | External) {
                b.put(IDT + 0x35 * 8, gate(NEW, 0, 5, 0, 0));
                b.put(IDT + 0x40 * 8, gate(NEW, 0, 5, 0, 0));
            }
            go(&mut b, way);
            b.state(|s| s.activity = Activity::Running);
            b.run(1);
            let s = b.cpu.state();
            assert_eq!(s.tr.selector, NEW, "{name}, {way:?}: the new task: {s:x?}");
            let t = b.arrived();
            // EXT where no instruction asked; the fetch is the new task's own.
            let ext = (way == External && vector != 13) as u32;
            assert_eq!((t.vector, t.error), (vector, Some(error | ext)), "{name}, {way:?}");
            assert_eq!(t.rip, NEW_CODE, "{name}, {way:?}");
            assert_eq!(
                (t.cs as u64, t.ss as u64),
                (
                    if field == F_CS { value } else { UCODE32 as u64 | 3 },
                    if field == F_SS { value } else { UDATA as u64 | 3 },
                ),
                "{name}, {way:?}"
            );
            assert_eq!(access(&b, NEW), 0x8b, "{name}, {way:?}");
        }
    }
}

// covers: cpu/task-switch
#[test]
fn tss_of_16_bits_hold_16_bits() {
    // From a 32-bit task to a 16-bit one and back.
    let mut b = tasks(false);
    b.put(GDT + NEW as u64, descriptor(NEW_TSS as u32, 0x2b, 0x81));
    b.write(NEW_TSS, &[0; 0x2c]);
    let fields: [u16; 15] = [
        0x8000, // IP
        0x0203,
        0x1111,
        0x2222,
        0x3333,
        0x4444,
        0x5555,
        0x6666,
        0x7777,
        0x8888, // FLAGS, AX to DI
        KDATA,
        bench::KCODE16,
        KDATA,
        KDATA,
        0, // ES, CS, SS, DS, LDT
    ];
    for (i, field) in fields.iter().enumerate() {
        b.write(NEW_TSS + 0xe + i as u64 * 2, &field.to_le_bytes());
    }
    b.write(0x8000, &[0xcf]); // IRET
    b.state(|s| {
        s.gpr[0] = 0xaaaa_bbbb;
        s.segments[FS] = s.segments[DS];
    });
    go(&mut b, Call);
    let s = b.cpu.state();
    let general: [u64; 8] = core::array::from_fn(|i| s.gpr[i]);
    assert_eq!(
        general,
        [0x1111, 0x2222, 0x3333, 0x4444, 0x5555, 0x6666, 0x7777, 0x8888]
    );
    assert_eq!(
        (s.rip, s.rflags.into_bits(), s.tr.attributes),
        (0x8000, 0x203 | NT, 0x83)
    );
    assert_eq!(s.segments[FS], Segment::default());
    assert_eq!(get16(&b, NEW_TSS), OLD as u64);
    b.run(1);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.gpr[0], s.tr.selector), (CODE + 7, 0xaaaa_bbbb, OLD));
    assert_eq!(s.segments[FS].selector, KDATA);
    let saved: Vec<u16> = (0..14).map(|i| get16(&b, NEW_TSS + 0xe + i * 2) as u16).collect();
    assert_eq!(saved[0], 0x8001);
    assert_eq!(saved[1], 0x203, "NT is cleared in the image");
    assert_eq!(saved[2..], fields[2..14]);
}

// covers: cpu/task-trap, dr/task-switch
#[test]
fn the_t_flag_of_a_tss_traps_before_the_first_instruction() {
    for (name, way, trap, flags, expected) in [
        ("no T", Jmp, 0, 0, None),
        ("T", Jmp, 1, 0, Some(1 << 15)),
        ("T", Int, 1, 0, Some(1 << 15)),
        ("T", External, 1, 0, Some(1 << 15)),
        ("T, and TF in its flags", Call, 1, TF, Some(1 << 15)),
    ] {
        let mut b = tasks(false);
        put32(&mut b, NEW_TSS + T, trap);
        put32(&mut b, NEW_TSS + EFLAGS, flags | 2);
        go(&mut b, way);
        let s = b.cpu.state();
        let Some(bits) = expected else {
            assert_eq!((s.rip, s.dr[6]), (NEW_CODE, 0xffff_0ff0), "{name}");
            continue;
        };
        assert_eq!((s.rip, s.dr[6]), (handler(1), 0xffff_0ff0 | bits), "{name}, {way:?}");
        assert_eq!(get32(&b, s.gpr[4]), NEW_CODE, "{name}, {way:?}");
    }
    // TF in the new task's flags: a trap after its first instruction, not after the switch.
    let mut b = tasks(false);
    put32(&mut b, NEW_TSS + EFLAGS, TF | 2);
    go(&mut b, Jmp);
    assert_eq!(b.cpu.rip(), NEW_CODE);
    b.run(1);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.dr[6] & 0xf00f), (handler(1), 1 << 14));
    assert_eq!(get32(&b, s.gpr[4]), NEW_CODE + 1);
    // TF in the old task's flags does not trap in the new one.
    let mut b = tasks(false);
    b.state(|s| s.rflags.set_tf(true));
    go(&mut b, Jmp);
    b.run(1);
    assert_eq!(b.cpu.rip(), NEW_CODE + 1);
}

// covers: cpu/task-switch
#[test]
fn an_error_code_goes_on_the_new_task_s_stack() {
    for (name, attributes, limit, size) in [("32 bits", 0x89, 0x67, 4), ("16 bits", 0x81, 0x2b, 2)] {
        let mut b = tasks(false);
        b.put(GDT + NEW as u64, descriptor(NEW_TSS as u32, limit, attributes));
        if size == 2 {
            b.write(NEW_TSS, &[0; 0x2c]);
            for (at, value) in [(0xe, 0x9800u16), (0x1a, 0xa000), (0x24, bench::KCODE16), (0x26, KDATA)] {
                b.write(NEW_TSS + at, &value.to_le_bytes());
            }
        }
        b.put(IDT + 13 * 8, gate(NEW, 0, 5, 0, 0));
        b.put(IDT + 14 * 8, gate(NEW, 0, 5, 0, 0));
        // MOV FS, AX with a selector beyond the GDT.
        b.write(CODE, &[0x8e, 0xe0]);
        b.write(0x9800, &[0x90]);
        b.state(|s| s.gpr[0] = 0x1230);
        b.run(1);
        let s = b.cpu.state();
        let top = if size == 4 { NEW_STACK } else { 0xa000 };
        assert_eq!((s.tr.selector, s.gpr[4]), (NEW, top - size), "{name}");
        let code = if size == 4 {
            get32(&b, s.gpr[4])
        } else {
            get16(&b, s.gpr[4])
        };
        assert_eq!(code, 0x1230, "{name}");
    }
    // A stack that cannot take it: #SS in the new task; two faults in a row make a double fault.
    let mut b = tasks(true);
    b.put(GDT + FREE as u64 + 0x20, descriptor(0, 0xfff, 0x40f3));
    put32(&mut b, NEW_TSS + F_SS, FREE as u64 + 0x23);
    b.put(IDT + 13 * 8, gate(NEW, 0, 5, 0, 0));
    b.write(CODE, &[0x8e, 0xe0]);
    b.state(|s| s.gpr[0] = 0x1230);
    let t = b.trap();
    assert_eq!((t.vector, t.error, t.rip), (8, Some(0), NEW_CODE));
    assert_eq!(b.cpu.state().tr.selector, NEW);
}

// covers: cpu/task-switch, cpu/vm86
#[test]
fn a_task_may_be_a_virtual_8086_program() {
    let mut b = tasks(false);
    put32(&mut b, NEW_TSS + EFLAGS, VM | 0x3002);
    put32(&mut b, NEW_TSS + EIP, 0x100);
    put32(&mut b, NEW_TSS + ESP, 0x800);
    for (i, selector) in [0x3000u64, 0x1000, 0x2000, 0x3100, 0x3200, 0x3300]
        .into_iter()
        .enumerate()
    {
        put32(&mut b, NEW_TSS + F_ES + i as u64 * 4, selector);
    }
    b.write(0x10100, &[0x1e, 0xcd, 0x35]); // PUSH DS; INT 35H
    b.put(IDT + 0x35 * 8, gate(OLD, 0, 5, 3, 0));
    go(&mut b, Jmp);
    let s = b.cpu.state();
    assert_eq!((s.cpl, s.rip, s.rflags.into_bits() & VM), (3, 0x100, VM));
    for seg in s.segments {
        assert_eq!((seg.base, seg.limit), ((seg.selector as u64) << 4, 0xffff));
    }
    b.run(1);
    assert_eq!(get16(&b, 0x207fe), 0x3100);
    // Back through a task gate: VM is in the image, and in nothing else.
    b.run(1);
    let s = b.cpu.state();
    assert_eq!(
        (s.tr.selector, s.cpl, s.rip, s.rflags.into_bits() & (VM | NT)),
        (OLD, 0, CODE + 7, NT)
    );
    assert_eq!(get32(&b, NEW_TSS + EFLAGS) & VM, VM);
    assert_eq!(get32(&b, NEW_TSS + EIP), 0x103);
    let saved: Vec<u64> = (0..6).map(|i| get32(&b, NEW_TSS + F_ES + i * 4)).collect();
    assert_eq!(saved, [0x3000, 0x1000, 0x2000, 0x3100, 0x3200, 0x3300]);
    // EIP beyond 64 KiB.
    let mut b = tasks(false);
    put32(&mut b, NEW_TSS + EFLAGS, VM | 0x3002);
    put32(&mut b, NEW_TSS + EIP, 0x1_0000);
    go(&mut b, Jmp);
    let t = b.trap();
    assert_eq!((t.vector, t.error, t.rip), (13, Some(0), 0x1_0000));
}

// covers: cpu/task-switch
#[test]
fn a_task_brings_its_address_space_and_its_ldt() {
    let mut b = tasks(false);
    // Two page directories of 4-MByte pages; the second maps 4 MiB and up the other way round.
    let other = TABLES + 0x1000;
    for (table, swap) in [(TABLES, false), (other, true)] {
        b.write(table, &[0; 4096]);
        for i in 0..2u64 {
            put32(&mut b, table + i * 4, i << 22 | 0x83);
        }
        put32(&mut b, table + 8, if swap { 0x83 } else { 0x40_0083 });
    }
    put32(&mut b, NEW_TSS + CR3, other);
    put32(&mut b, NEW_TSS + F_LDT, LDTR as u64);
    put32(&mut b, NEW_TSS + F_DS, 0xc);
    b.put(GDT + LDTR as u64, descriptor(LDT as u32, 0xf, 0x82));
    b.put(LDT + 8, descriptor(0x80_0000, 0xfff, 0x4093));
    b.put(0x700, 0x1122_3344);
    b.put(0x40_0700, 0x5566_7788);
    b.write(NEW_CODE, &[0xa1, 0x00, 0x07, 0, 0]); // MOV EAX, [700H]
    b.state(|s| {
        s.cr3 = TABLES;
        s.cr4 = 0x10.into();
        s.cr0.set_pg(true);
        s.gdtr = Table {
            base: GDT,
            limit: 0x7ff,
        };
    });
    go(&mut b, Jmp);
    let s = b.cpu.state();
    assert_eq!((s.cr3, s.ldtr.selector, s.ldtr.base), (other, LDTR, LDT));
    assert_eq!((s.segments[DS].selector, s.segments[DS].base), (0xc, 0x80_0000));
    b.run(1);
    assert_eq!(b.cpu.state().gpr[0], 0x1122_3344, "8 MiB is 0 in the new address space");
    const { assert!(RAM >= 8 << 20) };

    // A TSS that is not mapped: #PF in the old task, nothing changed.
    let mut b = tasks(false);
    b.write(TABLES, &[0; 4096]);
    for i in 0..2u64 {
        put32(&mut b, TABLES + i * 4, i << 22 | 0x83);
    }
    b.put(GDT + NEW as u64, descriptor(0x80_0000 - 0x20, 0x67, 0x89));
    b.state(|s| {
        s.cr3 = TABLES;
        s.cr4 = 0x10.into();
        s.cr0.set_pg(true);
    });
    let before = b.read::<0x68>(TSS);
    assert_eq!(b.one(|a| a.db(&instruction(Call))), Err((14, Some(0))));
    let s = b.cpu.state();
    assert_eq!((s.cr2, s.tr.selector, access(&b, NEW)), (0x80_0000, OLD, 0x89));
    assert_eq!(b.read::<0x68>(TSS), before);

    // Without paging CR3 is left alone.
    let mut b = tasks(false);
    put32(&mut b, NEW_TSS + CR3, 0x1234_5000);
    let cr3 = b.cpu.state().cr3;
    go(&mut b, Jmp);
    assert_eq!(b.cpu.state().cr3, cr3);
}

// covers: cpu/task-switch
#[test]
fn ia_32e_mode_has_no_tasks() {
    for (name, entry) in [
        ("a TSS", descriptor(NEW_TSS as u32, 0x67, 0x89)),
        ("a 16-bit TSS", descriptor(NEW_TSS as u32, 0x67, 0x81)),
        ("a task gate", gate(OLD, 0, 5, 0, 0)),
    ] {
        let mut b = Bench::long();
        b.put(GDT + NEW as u64, entry);
        b.put(STACK + 0x100, CODE | (NEW as u64) << 32);
        b.state(|s: &mut CpuState| s.gpr[3] = STACK + 0x100);
        for code in [[0xff, 0x1b], [0xff, 0x2b]] {
            assert_eq!(b.one(|a| a.db(&code)), Err((13, Some(NEW as u32))), "{name}");
            b.state(|s| (s.rip, s.gpr[4]) = (CODE, STACK));
        }
    }
    let mut b = Bench::long();
    b.gate64(0x35, OLD, 0, 5, 3, 0);
    assert_eq!(b.one(|a| a.int(0x35)), Err((13, Some(0x35 * 8 + 2))));
    assert!(matches!(b.cpu.activity(), Activity::Halted));
    assert_eq!(b.run(1), Exit::Halt);
}
