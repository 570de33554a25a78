//! Call gates, conforming code, far returns, LDTs (SDM Vol. 3A 6.8 "Privilege Level Checking When Transferring Program
//! Control Between Code Segments").

use crate::{bench, rig};
use bench::{
    Bench, FREE, GDT, KCODE, KCODE32, KDATA, KERNEL_STACK, LDT, LDTR, TSS, UCODE, UCODE32, UDATA, descriptor, gate,
};
use engine::{CS, DS, ES, Exit, FS, GS, SS, Segment};
use rig::{CODE, STACK};

/// The gate, and segments beside it.
const GATE: u16 = FREE;
const X: u16 = FREE + 0x20;
const TARGET: u64 = 0x10_8000;

fn far(opcode: u8, selector: u16) -> Vec<u8> {
    let [low, high] = selector.to_le_bytes();
    vec![opcode, 0x78, 0x56, 0x34, 0x12, low, high]
}

fn dwords(b: &Bench, at: u64, n: u64) -> Vec<u32> {
    (0..n).map(|i| u32::from_le_bytes(b.read(at + i * 4))).collect()
}

fn words(b: &Bench, at: u64, n: u64) -> Vec<u16> {
    (0..n).map(|i| u16::from_le_bytes(b.read(at + i * 2))).collect()
}

// covers: cpu/call-gates
#[test]
fn a_call_gate_checks_itself_its_target_and_the_new_stack() {
    type Row = (
        &'static str,
        u64,
        u64,
        u16,
        bool,
        Result<(), (u8, Option<u32>)>,
        Result<(), (u8, Option<u32>)>,
    );
    let g = Err((13, Some(GATE as u32)));
    let x = Err((13, Some(X as u32)));
    let code = |attributes| descriptor(0, u32::MAX, attributes);
    let to = |selector, dpl| gate(selector, TARGET, 12, dpl, 0);
    // Gate, descriptor at X, RPL of the gate's selector, from CPL 3; what CALL and what JMP come to.
    let rows: &[Row] = &[
        (
            "inner code",
            to(KCODE32, 3),
            0,
            3,
            true,
            Ok(()),
            Err((13, Some(KCODE32 as u32))),
        ),
        ("same level", to(UCODE32, 3), 0, 3, true, Ok(()), Ok(())),
        (
            "the RPL of the target does not count",
            to(UCODE32 | 1, 3),
            0,
            3,
            true,
            Ok(()),
            Ok(()),
        ),
        ("conforming code", to(X, 3), code(0xc09f), 3, true, Ok(()), Ok(())),
        ("gate below CPL", to(KCODE32, 2), 0, 3, true, g, g),
        ("gate below RPL", to(KCODE32, 0), 0, 1, false, g, g),
        (
            "not present",
            to(UCODE32, 3) & !(1 << 47),
            0,
            3,
            true,
            Err((11, Some(GATE as u32))),
            Err((11, Some(GATE as u32))),
        ),
        (
            "null target",
            to(0, 3),
            0,
            3,
            true,
            Err((13, Some(0))),
            Err((13, Some(0))),
        ),
        (
            "target beyond the GDT",
            to(0x1000, 3),
            0,
            3,
            true,
            Err((13, Some(0x1000))),
            Err((13, Some(0x1000))),
        ),
        ("target is data", to(X, 3), code(0xc0f3), 3, true, x, x),
        (
            "target is less privileged",
            to(UCODE32, 0),
            0,
            0,
            false,
            Err((13, Some(UCODE32 as u32))),
            Err((13, Some(UCODE32 as u32))),
        ),
        (
            "target not present",
            to(X, 3),
            code(0xc07b),
            3,
            true,
            Err((11, Some(X as u32))),
            Err((11, Some(X as u32))),
        ),
        (
            "offset beyond the segment",
            to(X, 3),
            descriptor(0, 0xfff, 0x40fb),
            3,
            true,
            Err((13, Some(0))),
            Err((13, Some(0))),
        ),
        ("an interrupt gate", gate(KCODE32, TARGET, 14, 3, 0), 0, 3, true, g, g),
        ("a reserved type", gate(KCODE32, TARGET, 13, 3, 0), 0, 3, true, g, g),
    ];
    for &(name, entry, other, rpl, user, call, jump) in rows {
        for (opcode, expected) in [(0x9a, call), (0xea, jump)] {
            let mut b = Bench::protected();
            b.put(GDT + GATE as u64, entry);
            b.put(GDT + X as u64, other);
            if user {
                b.user();
            }
            assert_eq!(
                b.one(|a| a.db(&far(opcode, GATE | rpl))),
                expected,
                "{name}, {opcode:x}"
            );
            if expected.is_ok() {
                assert_eq!(
                    b.cpu.rip(),
                    TARGET,
                    "{name}, {opcode:x}: the instruction's own offset does not count"
                );
            }
        }
    }
    // The new stack: from the TSS, #TS for what is wrong with its selector, #SS for what is wrong with its room.
    for (name, selector, entry, limit, expected) in [
        ("null", 0u16, 0, 0x67, (10, 0)),
        ("beyond the GDT", 0x1000, 0, 0x67, (10, 0x1000)),
        ("read-only", X, descriptor(0, u32::MAX, 0xc091), 0x67, (10, X as u32)),
        ("DPL", X, descriptor(0, u32::MAX, 0xc0b3), 0x67, (10, X as u32)),
        ("RPL", KDATA | 1, 0, 0x67, (10, KDATA as u32)),
        ("not present", X, descriptor(0, u32::MAX, 0xc013), 0x67, (12, X as u32)),
        ("TSS too short", KDATA, 0, 0x7, (10, bench::TR as u32)),
        ("no room", X, descriptor(0, 0xfff, 0x4093), 0x67, (12, X as u32)),
    ] {
        let mut b = Bench::protected();
        b.put(GDT + GATE as u64, to(KCODE32, 3));
        b.put(GDT + X as u64, entry);
        b.put(TSS + 4, KERNEL_STACK | (selector as u64) << 32);
        b.state(|s| s.tr.limit = limit);
        // The handlers are conforming code here, so that they need no other stack.
        b.put(GDT + KCODE32 as u64 + 0x80, descriptor(0, u32::MAX, 0xc09f));
        for v in [10u64, 12] {
            b.put(
                bench::IDT + v * 8,
                gate(KCODE32 + 0x80, bench::handler(v as u8), 14, 0, 0),
            );
        }
        b.user();
        b.write(CODE, &far(0x9a, GATE | 3));
        // HLT of a conforming handler at CPL 3 would be another fault: one step to get there is all.
        b.write(bench::handler(expected.0), &[0x90]);
        b.run(1);
        let s = b.cpu.state();
        assert_eq!((s.rip, s.cpl), (bench::handler(expected.0) + 1, 3), "{name}");
        assert_eq!(dwords(&b, s.gpr[4], 2), [expected.1, CODE as u32], "{name}");
    }
}

// covers: cpu/call-gates
#[test]
fn gates_of_both_sizes_copy_their_parameters_and_returns_take_them_back() {
    for (name, kind, count, size) in [
        ("32 bits, none", 12u8, 0u8, 4u64),
        ("32 bits, 31", 12, 31, 4),
        ("16 bits, none", 4, 0, 2),
        ("16 bits, 3", 4, 3, 2),
        ("bits 7:5 are not the count's", 12, 0xe1, 4),
    ] {
        let n = count as u64 & 31;
        let mut b = Bench::protected();
        let target = if size == 4 { TARGET } else { 0x8000 };
        b.put(GDT + GATE as u64, gate(KCODE32, target, kind, 3, count));
        // RET n with the gate's operand size.
        let mut ret = vec![0xca, (n * size) as u8, 0];
        if size == 2 {
            ret.insert(0, 0x66);
        }
        b.write(target, &ret);
        let sp = STACK - n * size;
        for i in 0..n {
            // The one pushed last is the lowest.
            b.write(sp + i * size, &(0x1000 + i).to_le_bytes()[..size as usize]);
        }
        // A 16-bit return needs 16 bits of address: the caller is below 64 KiB.
        b.state(|s| {
            s.rip = 0x9000;
            s.gpr[4] = sp;
        });
        b.user();
        b.write(0x9000, &far(0x9a, GATE | 3));
        b.run(1);
        let s = b.cpu.state();
        assert_eq!(
            (s.rip, s.cpl, s.gpr[4]),
            (target, 0, KERNEL_STACK - (4 + n) * size),
            "{name}"
        );
        let mut expected = vec![0x9007u32, UCODE32 as u32 | 3];
        expected.extend((0..n as u32).map(|i| 0x1000 + i));
        expected.extend([sp as u32, UDATA as u32 | 3]);
        if size == 4 {
            assert_eq!(dwords(&b, s.gpr[4], 4 + n), expected, "{name}");
        } else {
            let expected: Vec<u16> = expected.into_iter().map(|v| v as u16).collect();
            assert_eq!(words(&b, s.gpr[4], 4 + n), expected, "{name}");
        }
        // Segments that the caller may not have go with the return.
        b.state(|s| {
            s.segments[ES] = Segment {
                selector: KDATA,
                base: 0,
                limit: u32::MAX,
                attributes: 0xc093,
            };
            s.segments[FS] = Segment {
                selector: X,
                base: 0,
                limit: u32::MAX,
                attributes: 0xc09f,
            };
            s.segments[GS] = Segment {
                selector: KCODE32,
                base: 0,
                limit: u32::MAX,
                attributes: 0xc09b,
            };
        });
        b.run(1);
        let s = b.cpu.state();
        assert_eq!((s.rip, s.cpl), (0x9007, 3), "{name}");
        let stack = if size == 4 { STACK } else { STACK & 0xffff };
        assert_eq!(s.gpr[4], stack, "{name}: the outer stack loses the parameters too");
        assert_eq!(s.segments[DS].selector, UDATA | 3, "{name}: its own stays");
        assert_eq!(s.segments[FS].selector, X, "{name}: conforming code stays");
        for seg in [ES, GS] {
            assert_eq!(
                (s.segments[seg].selector, s.segments[seg].present()),
                (0, false),
                "{name}"
            );
        }
    }
}

// covers: cpu/call-gates
#[test]
fn gates_of_ia_32e_mode_are_16_bytes_and_lead_to_64_bit_code() {
    let low = |selector, dpl| gate(selector, TARGET, 12, dpl, 0);
    for (name, entry, high, other, expected) in [
        ("64-bit code", low(KCODE, 3), 0u64, 0, Ok(())),
        ("32-bit code", low(KCODE32, 3), 0, 0, Err((13, Some(KCODE32 as u32)))),
        (
            "L and D",
            low(X, 3),
            0,
            descriptor(0, u32::MAX, 0xe09b),
            Err((13, Some(X as u32))),
        ),
        (
            "the upper half has a type",
            low(KCODE, 3),
            0xc00 << 32,
            0,
            Err((13, Some(GATE as u32))),
        ),
        (
            "a 16-bit gate",
            gate(KCODE, TARGET, 4, 3, 0),
            0,
            0,
            Err((13, Some(GATE as u32))),
        ),
        (
            "offset not canonical",
            low(KCODE, 3),
            0x8000_0000,
            0,
            Err((13, Some(0))),
        ),
    ] {
        let mut b = Bench::long();
        b.put(GDT + GATE as u64, entry);
        b.put(GDT + GATE as u64 + 8, high);
        b.put(GDT + X as u64, other);
        b.write(STACK, &[0, 0, 0, 0, GATE as u8 | 3, 0]);
        b.user();
        b.state(|s| s.gpr[3] = STACK);
        // CALL FAR [RBX]
        let got = b.one(|a| a.db(&[0xff, 0x1b]));
        assert_eq!(got, expected, "{name}");
        if got.is_ok() {
            let s = b.cpu.state();
            assert_eq!((s.rip, s.cpl, s.gpr[4]), (TARGET, 0, KERNEL_STACK - 32), "{name}");
            let frame: Vec<u64> = (0..4).map(|i| u64::from_le_bytes(b.read(s.gpr[4] + i * 8))).collect();
            assert_eq!(frame, [CODE + 2, UCODE as u64 | 3, STACK, UDATA as u64 | 3]);
            assert_eq!(s.segments[SS].selector, 0, "a null SS of the new level");
        }
    }
}

// covers: cpu/conforming, cpu/ldt
#[test]
fn conforming_code_runs_at_the_caller_s_level_and_an_ldt_serves_as_the_gdt_does() {
    // In the LDT: conforming code at 0, code and data of CPL 3.
    const CONFORMING: u16 = 0x0c;
    let build = || {
        let mut b = Bench::protected();
        b.put(GDT + LDTR as u64, descriptor(LDT as u32, 0x1f, 0x82));
        b.put(LDT + 8, descriptor(0, u32::MAX, 0xc09f));
        b.put(LDT + 0x10, descriptor(0, u32::MAX, 0xc0fb));
        b.put(LDT + 0x18, descriptor(0x1000, 0xfff, 0x40f3));
        b.state(|s| {
            s.ldtr = Segment {
                selector: LDTR,
                base: LDT,
                limit: 0x1f,
                attributes: 0x82,
            };
        });
        b.user();
        b
    };
    let mut b = build();
    b.write(TARGET, &[0xcb]);
    b.write(CODE, &[0x9a, 0, 0x80, 0x10, 0, CONFORMING as u8, 0]);
    assert_eq!(b.run(1), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.cpl, s.segments[CS].selector), (TARGET, 3, CONFORMING | 3));
    b.run(1);
    assert_eq!((b.cpu.rip(), b.cpu.state().cpl), (CODE + 7, 3));
    for (name, selector, expected) in [
        ("code of the LDT", 0x17u16, Ok(())),
        ("data", 0x1f, Err((13, Some(0x1c)))),
        ("beyond the LDT", 0x27, Err((13, Some(0x24)))),
    ] {
        let mut b = build();
        assert_eq!(b.one(|a| a.db(&far(0xea, selector)[..])), expected, "{name}");
    }
    // Without an LDT its selectors lead nowhere.
    let mut b = build();
    b.state(|s| s.ldtr = Segment::default());
    assert_eq!(b.one(|a| a.db(&far(0xea, 0x17))), Err((13, Some(0x14))));
    // Data of the LDT, with its base and limit.
    let mut b = build();
    b.put(0x1010, 0x8877_6655_4433_2211);
    b.state(|s| (s.gpr[0], s.gpr[3]) = (0x1f, 0x10));
    b.write(CODE, &[0x8e, 0xe0, 0x64, 0x8b, 0x0b]); // MOV FS, AX; MOV ECX, FS:[EBX]
    b.run(2);
    assert_eq!(b.cpu.state().gpr[1], 0x4433_2211);
    b.state(|s| s.gpr[3] = 0xffd);
    b.state(|s| s.rip = CODE);
    b.run(1);
    assert_eq!(b.one(|a| a.db(&[0x64, 0x8b, 0x0b])), Err((13, Some(0))));
}

// covers: cpu/call-gates
#[test]
fn a_far_return_outward_checks_where_it_goes() {
    let code = |attributes| descriptor(0, u32::MAX, attributes);
    for (name, cs, ss, other, expected) in [
        ("to CPL 3", UCODE32 | 3, UDATA | 3, 0u64, Ok(())),
        ("CS null", 3, UDATA | 3, 0, Err((13, Some(0)))),
        ("CS is data", UDATA | 3, UDATA | 3, 0, Err((13, Some(UDATA as u32)))),
        (
            "CS: DPL is not RPL",
            UCODE32 | 2,
            UDATA | 3,
            0,
            Err((13, Some(UCODE32 as u32))),
        ),
        (
            "CS: conforming, DPL above RPL",
            X | 1,
            UDATA | 1,
            code(0xc0ff),
            Err((13, Some(X as u32))),
        ),
        (
            "CS: not present",
            X | 3,
            UDATA | 3,
            code(0xc07b),
            Err((11, Some(X as u32))),
        ),
        ("SS null", UCODE32 | 3, 0, 0, Err((13, Some(0)))),
        ("SS: RPL", UCODE32 | 3, UDATA | 1, 0, Err((13, Some(UDATA as u32)))),
        ("SS: DPL", UCODE32 | 3, KDATA | 3, 0, Err((13, Some(KDATA as u32)))),
        (
            "SS: read-only",
            UCODE32 | 3,
            X | 3,
            code(0xc0f1),
            Err((13, Some(X as u32))),
        ),
        (
            "SS: not present",
            UCODE32 | 3,
            X | 3,
            code(0xc073),
            Err((12, Some(X as u32))),
        ),
    ] {
        let mut b = Bench::protected();
        b.put(GDT + X as u64, other);
        let sp = STACK - 16;
        for (i, item) in [TARGET, cs as u64, STACK - 0x100, ss as u64].into_iter().enumerate() {
            b.write(sp + i as u64 * 4, &(item as u32).to_le_bytes());
        }
        b.state(|s| s.gpr[4] = sp);
        assert_eq!(b.one(|a| a.retf()), expected, "{name}");
        let s = b.cpu.state();
        if expected.is_ok() {
            assert_eq!((s.rip, s.cpl, s.gpr[4]), (TARGET, 3, STACK - 0x100), "{name}");
        } else {
            assert_eq!(s.cpl, 0, "{name}");
        }
    }
    // Never inward.
    let mut b = Bench::protected();
    b.user();
    b.put(STACK - 8, TARGET | (KCODE32 as u64) << 32);
    b.state(|s| s.gpr[4] = STACK - 8);
    assert_eq!(b.one(|a| a.retf()), Err((13, Some(KCODE32 as u32))));
}
