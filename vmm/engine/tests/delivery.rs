//! Delivery of exceptions and interrupts: gates, stacks, error codes, priorities, windows.

use crate::{bench, rig};
use bench::{
    Bench, FREE, GDT, IDT, KCODE, KCODE32, KDATA, KERNEL_STACK, TR, TSS, UCODE, UDATA, descriptor, gate, handler,
};
use engine::{Activity, CS, DS, Exit, FS, GS, SS};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, STACK};
use x86::rflags::flag::RF;

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
const FAR_OUT: u64 = 0x0000_8000_0000_0000;

// covers: cpu/gates
#[test]
fn an_exception_in_user_code_switches_to_the_kernel_stack_and_iretq_returns() {
    let mut b = Bench::long();
    b.user();
    b.at(handler(6), |a| {
        a.add(qword_ptr(rsp), 2)?;
        a.iretq()
    });
    b.code(|a| {
        a.ud2()?;
        a.inc(eax)?;
        a.int(0x30)
    });
    assert_eq!(b.run(3), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.gpr[0], s.cpl, s.gpr[4]), (1, 3, STACK));
    let t = b.trap();
    assert_eq!((t.vector, t.error), (13, Some(0x30 * 8 + 2)), "the gate's DPL is 0");
}

// covers: cpu/gates
#[test]
fn a_64_bit_gate_sets_up_the_stack_the_frame_and_the_flags() {
    for (name, user, kind, ist, from, base) in [
        (
            "interrupt gate from CPL 0: RSP aligned down",
            false,
            14,
            0u8,
            STACK - 5,
            STACK - 16,
        ),
        ("trap gate from CPL 0", false, 15, 0, STACK, STACK),
        ("interrupt gate from CPL 3: RSP0", true, 14, 0, STACK - 5, KERNEL_STACK),
        ("IST 1 from CPL 0", false, 14, 1, STACK, 0x28_0000),
        ("IST 7 from CPL 3", true, 15, 7, STACK, 0x29_0000),
    ] {
        let mut b = Bench::long();
        b.put(TSS + 0x24, 0x28_0008);
        b.put(TSS + 0x24 + 6 * 8, 0x29_000f);
        b.gate64(0x30, KCODE, handler(0x30), kind, 3, ist);
        if user {
            b.user();
        }
        // Everything that delivery clears: IF (interrupt gates), TF is another test's, NT, RF.
        b.state(|s| {
            s.gpr[4] = from;
            s.rflags = 0x4a97.into();
        });
        b.code(|a| a.int(0x30));
        let before = b.cpu.state();
        let t = b.trap();
        let s = b.cpu.state();
        assert_eq!(s.gpr[4], base - 40, "{name}");
        assert_eq!((t.rip, t.rsp, t.flags), (CODE + 2, from, 0x4a97), "{name}");
        assert_eq!(
            (t.cs, t.ss),
            (before.segments[CS].selector, before.segments[SS].selector),
            "{name}"
        );
        assert_eq!(s.rflags.into_bits(), if kind == 14 { 0x897 } else { 0xa97 }, "{name}");
        assert_eq!(
            s.segments[SS].selector,
            if user { 0 } else { KDATA },
            "{name}: SS is null after a change of CPL"
        );
        assert_eq!((s.cpl, s.segments[CS].selector), (0, KCODE), "{name}");
    }
}

// covers: cpu/exceptions
#[test]
fn frames_hold_the_right_rip_and_rf() {
    for (name, code, vector, error, offset, rf) in [
        ("#DE is a fault", (|a| a.div(ecx)) as Code, 0u8, None, 0u64, RF),
        ("#UD is a fault", |a| a.ud2(), 6, None, 0, RF),
        (
            "#GP is a fault with a code",
            |a| a.mov(rax, qword_ptr(rbx)),
            13,
            Some(0u32),
            0,
            RF,
        ),
        ("#SS likewise", |a| a.push(qword_ptr(rbp)), 12, Some(0), 0, RF),
        ("#PF likewise", |a| a.mov(qword_ptr(rdx), rax), 14, Some(2), 0, RF),
        ("INT3 is a trap", |a| a.int3(), 3, None, 1, 0),
        ("INT n goes on after it", |a| a.int(0x20), 0x20, None, 2, 0),
        ("INT1", |a| a.int1(), 1, None, 1, 0),
    ] {
        let mut b = Bench::long();
        b.state(|s| (s.gpr[3], s.gpr[5], s.gpr[2]) = (FAR_OUT, FAR_OUT, 0x4000_0000_0000));
        b.code(code);
        let t = b.trap();
        assert_eq!((t.vector, t.error), (vector, error), "{name}");
        assert_eq!((t.rip, t.flags), (CODE + offset, 2 | rf), "{name}");
        if vector == 14 {
            assert_eq!(b.cpu.state().cr2, 0x4000_0000_0000);
        }
    }
}

// covers: cpu/exceptions
// covers: differential/tables
#[test]
fn gates_that_do_not_work_name_themselves_in_the_error_code() {
    // SDM Vol. 2A "INT n", exceptions in 64-bit mode; 7.13 "Error Code": bit 1 IDT, bit 0 EXT.
    const V: u8 = 0x40;
    let bad = V as u32 * 8 + 2;
    type Change = fn(&mut Bench);
    let rows: [(&str, Change, u8, u32); 15] = [
        (
            "beyond the limit",
            |b| b.state(|s| s.idtr.limit = 0x40 * 16 + 14),
            13,
            bad,
        ),
        (
            "not present",
            |b| b.put(IDT + 0x400, gate(KCODE, 0x6800, 14, 3, 0) & !(1 << 47)),
            11,
            bad,
        ),
        (
            "a data segment",
            |b| b.put(IDT + 0x400, gate(KCODE, 0x6800, 0x12, 3, 0)),
            13,
            bad,
        ),
        (
            "a call gate",
            |b| b.put(IDT + 0x400, gate(KCODE, 0x6800, 12, 3, 0)),
            13,
            bad,
        ),
        (
            "a task gate",
            |b| b.put(IDT + 0x400, gate(KCODE, 0x6800, 5, 3, 0)),
            13,
            bad,
        ),
        (
            "a 16-bit gate",
            |b| b.put(IDT + 0x400, gate(KCODE, 0x6800, 6, 3, 0)),
            13,
            bad,
        ),
        ("a null selector", |b| b.gate64(V, 0, 0x6800, 14, 3, 0), 13, 0),
        (
            "a selector beyond the GDT",
            |b| b.gate64(V, 0x2000, 0x6800, 14, 3, 0),
            13,
            0x2000,
        ),
        (
            "a data selector",
            |b| b.gate64(V, KDATA, 0x6800, 14, 3, 0),
            13,
            KDATA as u32,
        ),
        (
            "32-bit code",
            |b| b.gate64(V, KCODE32, 0x6800, 14, 3, 0),
            13,
            KCODE32 as u32,
        ),
        (
            "code that is not present",
            |b| {
                b.put(GDT + FREE as u64, descriptor(0, u32::MAX, 0xa01b));
                b.gate64(V, FREE, 0x6800, 14, 3, 0)
            },
            11,
            FREE as u32,
        ),
        (
            "a target that is not canonical",
            |b| b.gate64(V, KCODE, FAR_OUT, 14, 3, 0),
            13,
            0,
        ),
        (
            "a TSS without the IST",
            |b| {
                b.gate64(V, KCODE, 0x6800, 14, 3, 7);
                b.state(|s| s.tr.limit = 0x53)
            },
            10,
            TR as u32,
        ),
        (
            "an IST that is not canonical",
            |b| {
                b.put(TSS + 0x24, FAR_OUT + 0x10_0000);
                b.gate64(V, KCODE, 0x6800, 14, 3, 1)
            },
            12,
            0,
        ),
        (
            "an IST that is not mapped",
            |b| {
                b.put(TSS + 0x24, 0x4000_0000_0000);
                b.gate64(V, KCODE, 0x6800, 14, 3, 1)
            },
            14,
            2,
        ),
    ];
    for (name, change, vector, error) in rows {
        for external in [false, true] {
            let mut b = Bench::long();
            b.gate64(V, KCODE, handler(V), 14, 3, 0);
            change(&mut b);
            b.code(|a| a.int(0x40));
            if external {
                b.interrupt(V);
            }
            let t = b.trap();
            // EXT, unless it is a page fault's code.
            let ext = (external && vector != 14) as u32;
            assert_eq!(
                (t.vector, t.error),
                (vector, Some(error | ext)),
                "{name}, external {external}"
            );
            assert_eq!(t.rip, CODE, "{name}: the frame holds the INT instruction itself");
        }
    }
    // The privilege check is for software interrupts only.
    for (name, dpl, code, expected) in [
        ("INT n", 0u8, (|a| a.int(0x40)) as Code, (13u8, Some(bad))),
        ("INT n, DPL 3", 3, |a| a.int(0x40), (0x40, None)),
        ("INT3", 0, |a| a.int3(), (13, Some(3 * 8 + 2))),
        ("INT1 needs no privilege", 0, |a| a.int1(), (1, None)),
        ("an exception needs none", 0, |a| a.ud2(), (6, None)),
    ] {
        let mut b = Bench::long();
        b.gate64(V, KCODE, handler(V), 14, dpl, 0);
        b.user();
        b.code(code);
        let t = b.trap();
        assert_eq!((t.vector, t.error), expected, "{name}");
    }
}

// covers: cpu/double-fault
#[test]
fn a_second_exception_makes_a_double_fault_or_is_handled_in_turn() {
    // SDM Vol. 3A Tables 7-4 and 7-5. The first exception's gate leads to the second: #GP by a null selector, #NP by a gate
    // that is not present, #PF by a stack that is not mapped.
    let gp: fn(&mut Bench, u8) = |b, v| b.gate64(v, 0, 0x6800, 14, 3, 0);
    let np: fn(&mut Bench, u8) = |b, v| b.put(IDT + v as u64 * 16, gate(KCODE, 0x6800, 14, 3, 0) & !(1 << 47));
    let pf: fn(&mut Bench, u8) = |b, v| b.gate64(v, KCODE, handler(v), 14, 3, 2);
    let de: Code = |a| a.div(ecx);
    let ud: Code = |a| a.ud2();
    let fault: Code = |a| a.mov(rax, qword_ptr(rdx));
    for (name, code, first, second, expected, error) in [
        ("benign, then #GP: #GP", ud, 6u8, gp, 13u8, 1u32),
        ("benign, then #PF: #PF", ud, 6, pf, 14, 2),
        ("contributory, then contributory: #DF", de, 0, gp, 8, 0),
        ("contributory, then #NP: #DF", de, 0, np, 8, 0),
        ("contributory, then #PF: #PF", de, 0, pf, 14, 2),
        ("#PF, then contributory: #DF", fault, 14, np, 8, 0),
        ("#PF, then #PF: #DF", fault, 14, pf, 8, 0),
    ] {
        let mut b = Bench::long();
        b.put(TSS + 0x2c, 0x4000_0000_0000);
        b.state(|s| s.gpr[2] = 0x4000_0000_1000);
        second(&mut b, first);
        b.code(code);
        let t = b.trap();
        assert_eq!((t.vector, t.error), (expected, Some(error)), "{name}");
        assert_eq!(t.rip, CODE, "{name}");
    }
    // An exception while #DF is delivered shuts the processor down.
    for (name, change) in [
        ("an empty IDT", (|b| b.state(|s| s.idtr.limit = 0)) as fn(&mut Bench)),
        ("a #DF gate that is not present", |b| {
            b.put(IDT + 0x60, 0);
            b.put(IDT + 0x80, 0);
            b.put(IDT + 0xd0, 0);
            b.put(IDT + 0xb0, 0);
        }),
    ] {
        let mut b = Bench::long();
        change(&mut b);
        b.code(|a| a.ud2());
        assert_eq!(b.run(100), Exit::Shutdown, "{name}");
        assert_eq!(
            (b.cpu.activity(), b.cpu.rip(), b.cpu.steps()),
            (Activity::Shutdown, CODE, 0),
            "{name}"
        );
        assert_eq!(b.run(100), Exit::Shutdown, "{name}: it stays down");
    }
}

// covers: cpu/gates
#[test]
fn protected_mode_gates_are_16_or_32_bits_wide() {
    for (name, kind, user, frame, flags_after) in [
        ("32-bit interrupt gate", 14u8, false, 12u64, 0x893u64),
        ("32-bit trap gate", 15, false, 12, 0xa93),
        ("16-bit interrupt gate", 6, false, 6, 0x893),
        ("16-bit trap gate", 7, false, 6, 0xa93),
        ("32-bit interrupt gate to CPL 0", 14, true, 20, 0x893),
        ("16-bit interrupt gate to CPL 0", 6, true, 10, 0x893),
    ] {
        let mut b = Bench::protected();
        b.put(IDT + 0x30 * 8, gate(KCODE32, handler(0x30), kind, 3, 0));
        if user {
            b.user();
        }
        b.state(|s| s.rflags = 0x4a93.into());
        b.code(|a| a.int(0x30));
        assert_eq!(b.run(1), Exit::Budget);
        let s = b.cpu.state();
        assert_eq!(s.rip, handler(0x30), "{name}");
        let top = if user { KERNEL_STACK } else { STACK };
        assert_eq!(s.gpr[4], top - frame, "{name}");
        assert_eq!(
            (s.rflags.into_bits(), s.cpl, s.segments[SS].selector),
            (flags_after, 0, KDATA),
            "{name}"
        );
        let code = if user { bench::UCODE32 | 3 } else { KCODE32 } as u64;
        let mut expected = vec![CODE + 2, code, 0x4a93];
        if user {
            expected.extend([STACK, UDATA as u64 | 3]);
        }
        let size = if kind & 8 != 0 { 4 } else { 2 };
        for (i, &value) in expected.iter().enumerate() {
            let mut item = [0; 8];
            item[..size].copy_from_slice(&b.read::<4>(s.gpr[4] + (i * size) as u64)[..size]);
            let mask = u64::MAX >> (64 - 8 * size);
            assert_eq!(u64::from_le_bytes(item), value & mask, "{name}: item {i}");
        }
    }
}

// covers: cpu/gates
#[test]
fn a_stack_switch_checks_the_new_stack() {
    // SDM Vol. 2A "INT n", inter-privilege-level interrupt, protected mode.
    type Change = fn(&mut Bench);
    let rows: [(&str, Change, u8, u32); 8] = [
        (
            "a TSS that is too short",
            |b| b.state(|s| s.tr.limit = 7),
            10,
            TR as u32,
        ),
        ("a null SS", |b| b.put(TSS + 4, KERNEL_STACK), 10, 0),
        (
            "an SS beyond the GDT",
            |b| b.put(TSS + 4, 0x2000 << 32 | KERNEL_STACK),
            10,
            0x2000,
        ),
        (
            "an SS whose RPL is not the level",
            |b| b.put(TSS + 4, 0x11 << 32 | KERNEL_STACK),
            10,
            0x10,
        ),
        (
            "an SS whose DPL is not the level",
            |b| b.put(TSS + 4, (UDATA as u64) << 32 | KERNEL_STACK),
            10,
            UDATA as u32,
        ),
        (
            "an SS that is code",
            |b| b.put(TSS + 4, (KCODE32 as u64) << 32 | KERNEL_STACK),
            10,
            KCODE32 as u32,
        ),
        (
            "an SS that is not present",
            |b| {
                b.put(GDT + FREE as u64, descriptor(0, u32::MAX, 0xc013));
                b.put(TSS + 4, (FREE as u64) << 32 | KERNEL_STACK)
            },
            12,
            FREE as u32,
        ),
        (
            "an SS without room",
            |b| {
                b.put(GDT + FREE as u64, descriptor(0, 15, 0x4093));
                b.put(TSS + 4, (FREE as u64) << 32 | 16)
            },
            12,
            FREE as u32,
        ),
    ];
    for (name, change, vector, error) in rows {
        let mut b = Bench::protected();
        b.put(IDT + 0x30 * 8, gate(KCODE32, handler(0x30), 14, 3, 0));
        // What goes wrong is handled on the ring-3 stack, by conforming code: it needs no other.
        b.put(GDT + 0x90, descriptor(0, u32::MAX, 0xc09f));
        for v in [10, 11, 12, 13] {
            b.put(IDT + v * 8, gate(0x90, handler(v as u8), 14, 0, 0));
            b.at(handler(v as u8), |a| a.db(&[0xeb, 0xfe]));
        }
        b.user();
        change(&mut b);
        b.code(|a| a.int(0x30));
        assert_eq!(b.run(1), Exit::Budget, "{name}");
        let s = b.cpu.state();
        assert_eq!(s.rip, handler(vector), "{name}");
        let frame: [u8; 8] = b.read(STACK - 16);
        let [e, rip] = [0, 4].map(|i| u32::from_le_bytes([frame[i], frame[i + 1], frame[i + 2], frame[i + 3]]));
        assert_eq!((e, rip as u64), (error, CODE), "{name}");
    }
}

// covers: cpu/exceptions
#[test]
fn exceptions_without_end_do_not_keep_the_run_loop() {
    // #UD whose handler is #UD, on a stack that wraps around: no instruction ever retires.
    let mut b = Bench::real();
    b.write(handler(6), &[0x0f, 0x0b]);
    b.state(|s| s.segments[SS] = engine::Segment::real(0x5000));
    b.code(|a| a.ud2());
    for _ in 0..3 {
        assert_eq!(b.run(100), Exit::Bus);
        assert_eq!((b.cpu.steps(), b.cpu.rip()), (0, handler(6)));
    }
}

// covers: cpu/gates
#[test]
fn real_mode_delivers_through_the_vector_table() {
    let mut b = Bench::real();
    b.state(|s| s.rflags = 0x4_0a97.into());
    b.code(|a| a.int(0x21));
    assert_eq!(b.run(1), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.segments[CS].selector, s.segments[CS].base),
        (handler(0x21), 0, 0)
    );
    assert_eq!(
        (s.gpr[4], s.rflags.into_bits()),
        (0x8000 - 6, 0x897),
        "IF, TF and AC are clear"
    );
    assert_eq!(b.read::<6>(0x8000 - 6), [2, 0, 0, 0x10, 0x97, 0x0a]);
    b.at(handler(0x21), |a| a.iret());
    assert_eq!(b.run(1), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.segments[CS].selector, s.gpr[4], s.rflags.into_bits()),
        (2, 0x1000, 0x8000, 0xa97)
    );
    // No error codes, and a table that is too short leads to the double fault and to shutdown.
    let mut b = Bench::real();
    b.state(|s| s.gpr[3] = 0xffff);
    b.code(|a| a.mov(ax, word_ptr(bx)));
    assert_eq!(b.run(1), Exit::Halt);
    assert_eq!((b.cpu.rip(), b.cpu.state().gpr[4]), (handler(13) + 1, 0x8000 - 6));
    b.state(|s| {
        s.activity = Activity::Running;
        (s.rip, s.segments[CS].base, s.idtr.limit) = (0, 0x10000, 9 * 4 + 3);
    });
    b.code(|a| a.int(0x21));
    assert_eq!(b.run(2), Exit::Halt);
    assert_eq!(b.cpu.rip(), handler(8) + 1, "#GP cannot be delivered: #DF");
    b.state(|s| {
        s.activity = Activity::Running;
        (s.rip, s.segments[CS].base, s.idtr.limit) = (0, 0x10000, 3);
    });
    assert_eq!(b.run(2), Exit::Shutdown);
}

// covers: cpu/gates
#[test]
fn iret_loads_what_the_level_may_change() {
    // SDM Vol. 2A "IRET/IRETD/IRETQ", 64-bit mode. The image of RFLAGS has every bit set but TF and NT.
    const IMAGE: u64 = 0xffff_beff & !0x4000;
    for (name, user, iopl, expected) in [
        ("from CPL 0", false, 0u64, 0x3d_3ed7u64),
        ("from CPL 3", true, 0, 0x25_0cd7),
        ("from CPL 3 with IOPL 3", true, 3, 0x25_3ed7),
    ] {
        let mut b = Bench::long();
        if user {
            b.user();
        }
        let (code, data) = if user { (UCODE | 3, UDATA | 3) } else { (KCODE, KDATA) };
        for (i, v) in [0x10_9000, code as u64, IMAGE, STACK + 0x123, data as u64]
            .iter()
            .enumerate()
        {
            b.put(STACK - 40 + i as u64 * 8, *v);
        }
        b.state(|s| {
            s.gpr[4] = STACK - 40;
            s.rflags = (2 | iopl << 12).into();
        });
        b.one(|a| a.iretq()).unwrap();
        let s = b.cpu.state();
        assert_eq!(
            (s.rip, s.gpr[4], s.rflags.into_bits()),
            (0x10_9000, STACK + 0x123, expected),
            "{name}"
        );
    }
}

// covers: cpu/gates
#[test]
fn iret_checks_what_it_returns_to() {
    const GPU: u32 = UCODE as u32;
    let good = [CODE, UCODE as u64 | 3, 0x202, STACK, UDATA as u64 | 3];
    let with = |i: usize, v: u64| {
        let mut f = good;
        f[i] = v;
        f
    };
    for (name, frame, user, expected) in [
        ("to ring 3", good, false, Ok(())),
        ("RIP not canonical", with(0, FAR_OUT), false, Err((13, Some(0)))),
        ("CS null", with(1, 0), false, Err((13, Some(0)))),
        ("CS beyond the GDT", with(1, 0x2003), false, Err((13, Some(0x2000)))),
        (
            "CS data",
            with(1, UDATA as u64 | 3),
            false,
            Err((13, Some(UDATA as u32))),
        ),
        (
            "CS DPL above its RPL",
            with(1, UCODE as u64),
            false,
            Err((13, Some(GPU))),
        ),
        ("CS inward", with(1, KCODE as u64), true, Err((13, Some(KCODE as u32)))),
        ("SS null for ring 3", with(4, 3), false, Err((13, Some(0)))),
        (
            "SS of ring 0 for ring 3",
            with(4, KDATA as u64),
            false,
            Err((13, Some(KDATA as u32))),
        ),
        ("SS code", with(4, UCODE as u64 | 3), false, Err((13, Some(GPU)))),
        (
            "to ring 0 with a null SS",
            [CODE, KCODE as u64, 2, STACK, 0],
            false,
            Ok(()),
        ),
        (
            "to ring 0 with a null SS of RPL 1",
            [CODE, KCODE as u64, 2, STACK, 1],
            false,
            Err((13, Some(0))),
        ),
        ("to 32-bit code", with(1, bench::UCODE32 as u64 | 3), false, Ok(())),
        (
            "to 32-bit code with a null SS",
            [CODE, KCODE32 as u64, 2, STACK, 0],
            false,
            Err((13, Some(0))),
        ),
    ] {
        let mut b = Bench::long();
        if user {
            b.user();
        }
        for (i, v) in frame.iter().enumerate() {
            b.put(STACK - 40 + i as u64 * 8, *v);
        }
        b.state(|s| s.gpr[4] = STACK - 40);
        assert_eq!(b.one(|a| a.iretq()), expected, "{name}");
        if expected.is_ok() {
            let s = b.cpu.state();
            assert_eq!(
                (s.rip, s.segments[CS].selector as u64, s.segments[SS].selector as u64),
                (frame[0], frame[1], frame[4])
            );
        }
    }
    // Selectors that are not present: #NP for CS, #SS for SS.
    for (at, i, expected) in [
        (FREE, 1, (11, Some(FREE as u32))),
        (FREE + 8, 4, (12, Some(FREE as u32 + 8))),
    ] {
        let mut b = Bench::long();
        b.put(GDT + FREE as u64, descriptor(0, u32::MAX, 0xa07b));
        b.put(GDT + FREE as u64 + 8, descriptor(0, u32::MAX, 0xc073));
        for (k, v) in with(i, at as u64 | 3).iter().enumerate() {
            b.put(STACK - 40 + k as u64 * 8, *v);
        }
        b.state(|s| s.gpr[4] = STACK - 40);
        assert_eq!(b.one(|a| a.iretq()), Err(expected));
    }
    // NT asks for a task return: #GP(0) in IA-32e mode, #TS for a link to no task.
    let mut b = Bench::long();
    b.state(|s| s.rflags = 0x4002.into());
    assert_eq!(b.one(|a| a.iretq()), Err((13, Some(0))));
    let mut b = Bench::protected();
    b.state(|s| s.rflags = 0x4002.into());
    assert_eq!(b.one(|a| a.iretd()), Err((10, Some(0))));
}

// covers: cpu/gates
#[test]
fn going_outward_takes_away_the_segments_of_the_inner_level() {
    let mut b = Bench::long();
    for (i, v) in [CODE + 0x100, UCODE as u64 | 3, 2, STACK, UDATA as u64 | 3]
        .iter()
        .enumerate()
    {
        b.put(STACK - 40 + i as u64 * 8, *v);
    }
    b.state(|s| {
        s.gpr[4] = STACK - 40;
        // DS of ring 0; FS null with a base, as a kernel leaves it; GS of ring 3.
        s.segments[FS] = engine::Segment {
            base: 0x1234,
            ..Default::default()
        };
        s.segments[GS] = s.segments[DS];
        s.segments[GS].selector = UDATA;
        s.segments[GS].attributes = 0xc0f3;
    });
    b.one(|a| a.iretq()).unwrap();
    let s = b.cpu.state();
    assert_eq!(s.segments[DS].selector, 0);
    assert_eq!(s.segments[FS].base, 0x1234);
    assert_eq!(s.segments[GS].selector, UDATA);
}

// covers: cpu/nmi
#[test]
fn nmis_are_blocked_until_iret_even_one_that_faults() {
    let mut b = Bench::long();
    b.at(handler(2), |a| {
        a.inc(eax)?;
        a.iretq()
    });
    b.code(|a| {
        a.nop()?;
        a.nop()
    });
    assert!(b.cpu.nmi_deliverable());
    b.nmi();
    assert!(!b.cpu.nmi_deliverable());
    assert!(b.cpu.state().nmi_blocked);
    b.run(1);
    assert!(!b.cpu.nmi_deliverable(), "in the handler");
    b.run(1);
    assert!(b.cpu.nmi_deliverable(), "after IRET");
    assert_eq!(b.cpu.rip(), CODE);
    let mut b = Bench::long();
    b.nmi();
    b.state(|s| (s.rip, s.gpr[4]) = (CODE, FAR_OUT));
    b.gate64(12, KCODE, handler(12), 14, 0, 1);
    b.put(TSS + 0x24, KERNEL_STACK);
    assert_eq!(b.one(|a| a.iretq()), Err((12, Some(0))));
    assert!(b.cpu.nmi_deliverable());
    // NMIs wake from HLT, whatever IF says.
    let mut b = Bench::long();
    b.code(|a| a.hlt());
    assert_eq!(b.run(9), Exit::Halt);
    assert!(b.cpu.nmi_deliverable() && !b.cpu.interruptible());
    b.nmi();
    assert_eq!(b.cpu.rip(), handler(2));
}

// covers: cpu/windows
#[test]
fn a_window_is_told_at_the_instruction_that_opens_it() {
    let frame = |b: &mut Bench| {
        for (i, v) in [CODE + 0x40, KCODE as u64, 0x202, STACK, KDATA as u64]
            .iter()
            .enumerate()
        {
            b.put(STACK - 40 + i as u64 * 8, *v);
        }
        b.put(STACK - 48, 0x202);
        b.state(|s| s.gpr[4] = STACK - 40);
    };
    for (name, code, steps, rip) in [
        // STI holds interrupts off for one more instruction.
        (
            "STI",
            (|a| {
                a.sti()?;
                a.nop()?;
                a.nop()
            }) as Code,
            2u64,
            CODE + 2,
        ),
        (
            "STI then CLI",
            |a| {
                a.sti()?;
                a.cli()?;
                a.sti()?;
                a.sti()?;
                a.nop()
            },
            4,
            CODE + 4,
        ),
        (
            "POPF",
            |a| {
                a.lea(rsp, qword_ptr(rsp - 8))?;
                a.popfq()?;
                a.nop()
            },
            2,
            CODE + 6,
        ),
        (
            "IRET",
            |a| {
                a.iretq()?;
                a.nop()
            },
            1,
            CODE + 0x40,
        ),
    ] {
        let mut b = Bench::long();
        frame(&mut b);
        b.code(code);
        b.cpu.want_window = true;
        assert_eq!(b.run(100), Exit::Window, "{name}");
        assert_eq!((b.cpu.steps(), b.cpu.rip()), (steps, rip), "{name}");
        assert!(b.cpu.interruptible(), "{name}");
        // Without anyone waiting nothing ends the run.
        let mut b = Bench::long();
        frame(&mut b);
        b.code(code);
        assert_eq!(b.run(steps), Exit::Budget, "{name}");
        assert_eq!(b.cpu.rip(), rip, "{name}");
    }
    // One that is open already is reported at once.
    let mut b = Bench::long();
    b.state(|s| s.rflags = 0x202.into());
    b.cpu.want_window = true;
    assert_eq!((b.run(100), b.cpu.steps()), (Exit::Window, 0));
}

// covers: cpu/shadows
#[test]
fn sti_and_loads_of_ss_hold_interrupts_off_for_one_instruction() {
    for (name, rflags, code, shadow, nmi) in [
        ("STI", 2u64, (|a| a.sti()) as Code, true, true),
        ("STI with IF set already", 0x202, |a| a.sti(), false, false),
        ("MOV SS", 0x202, |a| a.mov(ss, eax), true, true),
        ("POP SS", 0x202, |a| a.pop(ss), true, true),
        ("MOV DS", 0x202, |a| a.mov(ds, eax), false, false),
    ] {
        let mut b = if name == "POP SS" {
            Bench::protected()
        } else {
            Bench::long()
        };
        b.put(STACK - 8, KDATA as u64);
        b.state(|s| (s.rflags, s.gpr[0], s.gpr[4]) = (rflags.into(), KDATA as u64, STACK - 8));
        b.code(|a| {
            code(a)?;
            a.nop()?;
            a.nop()
        });
        b.run(1);
        assert_eq!(b.cpu.state().shadow, shadow, "{name}");
        assert_eq!(b.cpu.interruptible(), !shadow, "{name}");
        assert_eq!(b.cpu.nmi_deliverable(), !nmi, "{name}");
        b.run(1);
        assert!(
            b.cpu.interruptible() && b.cpu.nmi_deliverable(),
            "{name}: one instruction later"
        );
    }
    // The shadow of a state that is taken on holds too.
    let mut b = Bench::long();
    b.code(|a| {
        a.sti()?;
        a.nop()?;
        a.nop()
    });
    b.run(1);
    let s = b.cpu.state();
    b.cpu.set_state(&s);
    assert!(!b.cpu.interruptible());
    b.cpu.want_window = true;
    assert_eq!((b.run(100), b.cpu.steps()), (Exit::Window, 2));
}

// covers: cpu/exceptions
#[test]
fn single_step_traps_after_each_instruction_but_not_in_a_shadow() {
    let mut b = Bench::long();
    b.at(handler(1), |a| a.iretq());
    b.code(|a| {
        a.nop()?;
        a.mov(ss, eax)?;
        a.nop()?;
        a.jmp(CODE + 0x40)
    });
    b.at(CODE + 0x40, |a| a.syscall());
    b.at(0x10_8000, |a| a.nop());
    b.state(|s| {
        (s.rflags, s.gpr[0]) = (0x102.into(), KDATA as u64);
        (s.msrs.star, s.msrs.lstar, s.msrs.fmask) = ((KCODE as u64) << 32, 0x10_8000, 0x100);
    });
    let mut seen = Vec::new();
    for _ in 0..20 {
        b.run(1);
        let s = b.cpu.state();
        if s.rip == handler(1) {
            seen.push(u64::from_le_bytes(b.read(s.gpr[4])) - CODE);
            assert_eq!(s.dr[6], 0xffff_4ff0, "DR6.BS");
            assert_eq!(s.rflags.into_bits() & 0x100, 0, "the handler does not step");
        }
        if s.rip == 0x10_8000 {
            break;
        }
    }
    // No trap between MOV SS and the NOP; none after SYSCALL, which masked TF.
    assert_eq!(seen, [1, 4, 0x40]);
    // SYSRET traps right after it loaded TF; IRET lets one instruction run first.
    let mut b = Bench::long();
    b.state(|s| {
        s.msrs.star = 0x1b << 48;
        (s.gpr[1], s.gpr[11]) = (CODE + 0x40, 0x102);
    });
    b.code(|a| a.sysretq());
    let t = b.trap();
    assert_eq!((t.vector, t.rip, t.cs), (1, CODE + 0x40, UCODE | 3));
    let mut b = Bench::long();
    for (i, v) in [CODE + 0x40, KCODE as u64, 0x102, STACK, KDATA as u64]
        .iter()
        .enumerate()
    {
        b.put(STACK - 40 + i as u64 * 8, *v);
    }
    b.state(|s| s.gpr[4] = STACK - 40);
    b.at(CODE + 0x40, |a| a.nop());
    b.code(|a| a.iretq());
    let t = b.trap();
    assert_eq!((t.vector, t.rip), (1, CODE + 0x41));
}

// covers: cpu/gates
#[test]
fn call_gates_go_inward_and_copy_parameters() {
    // Protected mode: a 32-bit gate with two parameters, from ring 3 to ring 0 and back.
    let mut b = Bench::protected();
    b.put(GDT + FREE as u64, gate(KCODE32, 0x10_8000, 12, 3, 2));
    b.at(0x10_8000, |a| a.retf_1(8));
    b.user();
    b.code(|a| {
        a.push(0x1111)?;
        a.push(0x2222)?;
        a.db(&[0x9a, 0, 0, 0, 0, FREE as u8 | 3, 0])
    });
    assert_eq!(b.run(3), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.cpl, s.gpr[4]), (0x10_8000, 0, KERNEL_STACK - 24));
    assert_eq!((s.segments[CS].selector, s.segments[SS].selector), (KCODE32, KDATA));
    let words: [u8; 24] = b.read(s.gpr[4]);
    let words: Vec<u32> = words
        .chunks(4)
        .map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]))
        .collect();
    assert_eq!(
        words,
        [
            CODE as u32 + 17,
            bench::UCODE32 as u32 | 3,
            0x2222,
            0x1111,
            STACK as u32 - 8,
            UDATA as u32 | 3
        ]
    );
    b.run(1);
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.cpl, s.gpr[4]),
        (CODE + 17, 3, STACK),
        "both stacks lose the parameters"
    );

    // 64-bit: sixteen-byte gate, no parameters, null SS.
    let mut b = Bench::long();
    b.put(GDT + FREE as u64, gate(KCODE, 0x10_8000, 12, 3, 0));
    b.put(GDT + FREE as u64 + 8, 0);
    b.write(STACK, &[0, 0, 0, 0, FREE as u8 | 3, 0]);
    b.at(0x10_8000, |a| a.db(&[0x48, 0xcb]));
    b.user();
    b.state(|s| s.gpr[3] = STACK);
    b.code(|a| a.call(fword_ptr(rbx)));
    let length = 2;
    assert_eq!(b.run(1), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.cpl, s.gpr[4], s.segments[SS].selector),
        (0x10_8000, 0, KERNEL_STACK - 32, 0)
    );
    let frame: Vec<u64> = (0..4).map(|i| u64::from_le_bytes(b.read(s.gpr[4] + i * 8))).collect();
    assert_eq!(frame, [CODE + length, UCODE as u64 | 3, STACK, UDATA as u64 | 3]);
    b.run(1);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.cpl, s.gpr[4]), (CODE + length, 3, STACK));
}

// covers: cpu/gates
#[test]
fn far_transfers_check_their_target() {
    let np = descriptor(0, u32::MAX, 0xa01b);
    let conforming = descriptor(0, u32::MAX, 0xa09f);
    let both = descriptor(0, u32::MAX, 0xe09b);
    for (name, put, selector, offset, user, expected) in [
        ("64-bit code", 0u64, KCODE, CODE, false, Ok(())),
        ("null", 0, 3, CODE, false, Err((13, Some(0)))),
        ("beyond the GDT", 0, 0x2000, CODE, false, Err((13, Some(0x2000)))),
        ("data", 0, KDATA, CODE, false, Err((13, Some(KDATA as u32)))),
        (
            "more privileged code",
            0,
            KCODE,
            CODE,
            true,
            Err((13, Some(KCODE as u32))),
        ),
        (
            "less privileged code",
            0,
            UCODE | 3,
            CODE,
            false,
            Err((13, Some(UCODE as u32))),
        ),
        (
            "RPL above CPL",
            0,
            KCODE | 1,
            CODE,
            false,
            Err((13, Some(KCODE as u32))),
        ),
        ("not present", np, FREE, CODE, false, Err((11, Some(FREE as u32)))),
        ("conforming code from ring 3", conforming, FREE, CODE, true, Ok(())),
        ("L and D both", both, FREE, CODE, false, Err((13, Some(FREE as u32)))),
        ("not canonical", 0, KCODE, FAR_OUT, false, Err((13, Some(0)))),
        ("a TSS", 0, TR, CODE, false, Err((13, Some(TR as u32)))),
        ("an LDT beyond its limit", 0, 0xc, CODE, false, Err((13, Some(0xc)))),
    ] {
        for call in [false, true] {
            let mut b = Bench::long();
            if put != 0 {
                b.put(GDT + FREE as u64, put);
            }
            b.state(|s| s.ldtr.limit = 7);
            b.put(STACK + 0x100, offset);
            b.write(STACK + 0x108, &selector.to_le_bytes());
            if user {
                b.user();
            }
            b.state(|s| s.gpr[3] = STACK + 0x100);
            // REX.W FF /3 and /5 take 64-bit offsets.
            b.write(CODE, &[0x48, 0xff, if call { 0x1b } else { 0x2b }]);
            let r = b.one(|a| a.db(&[0x48, 0xff, if call { 0x1b } else { 0x2b }]));
            assert_eq!(r, expected, "{name}, call {call}");
            if expected.is_ok() {
                let s = b.cpu.state();
                assert_eq!(
                    (s.rip, s.segments[CS].selector),
                    (offset, selector & !3 | if user { 3 } else { 0 }),
                    "{name}"
                );
                assert_eq!(s.gpr[4], if call { STACK - 16 } else { STACK }, "{name}");
            }
        }
    }
}

/// A run ends right at a branch whose target has not been looked up yet; what comes in between is not the branch's target.
// covers: cpu/gates
#[test]
fn an_interrupt_between_two_runs_leaves_the_branch_before_it_alone() {
    for user in [false, true] {
        let mut b = Bench::long();
        if user {
            b.user();
        }
        b.state(|s| s.rflags.set_interrupt(true));
        b.at(handler(0x40), |a| {
            a.inc(rcx)?;
            a.iretq()
        });
        b.code(|a| {
            let (mut top, mut next) = (a.create_label(), a.create_label());
            a.set_label(&mut top)?;
            a.inc(rax)?;
            a.jmp(next)?;
            a.nop()?;
            a.set_label(&mut next)?;
            a.add(rbx, rax)?;
            a.jmp(top)
        });
        assert_eq!(b.run(2), Exit::Budget);
        for round in 1..=3 {
            b.interrupt(0x40);
            assert_eq!(b.run(2 + 4), Exit::Budget);
            let s = b.cpu.state();
            assert_eq!(
                (s.gpr[0], s.gpr[1], s.gpr[3]),
                (round + 1, round, round * (round + 1) / 2)
            );
        }
    }
}
