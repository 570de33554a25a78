//! Segmentation, and the modes of the processor.

use crate::{bench, rig};
use bench::{
    Bench, FREE, GDT, KCODE, KCODE16, KCODE32, KDATA, KDATA16, LDT, LDTR, TR, TSS, UCODE32, UDATA, descriptor,
};
use engine::{CS, DS, ES, Exit, FS, GS, SS, Segment};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, STACK};

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
type Outcome = Result<(), (u8, Option<u32>)>;
const GP0: Outcome = Err((13, Some(0)));
const SS0: Outcome = Err((12, Some(0)));

// covers: cpu/segmentation
#[test]
fn limits_and_rights_of_data_segments() {
    let read: Code = |a| a.mov(eax, dword_ptr(ebx));
    let write: Code = |a| a.mov(dword_ptr(ebx), eax);
    for (name, attributes, limit, offset, code, expected) in [
        ("the last bytes", 0x4093u16, 0xfffu32, 0xffcu64, read, Ok(())),
        ("one too far", 0x4093, 0xfff, 0xffd, read, GP0),
        ("far out", 0x4093, 0xfff, 0xffff_ffff, read, GP0),
        ("across 4 GBytes", 0xc093, u32::MAX, 0xffff_fffe, read, GP0),
        ("a write to data", 0x4093, 0xfff, 0, write, Ok(())),
        ("a write to read-only data", 0x4091, 0xfff, 0, write, GP0),
        ("a read of read-only data", 0x4091, 0xfff, 0, read, Ok(())),
        ("a read of code that may be read", 0x409b, 0xfff, 0, read, Ok(())),
        ("a read of code that may not", 0x4099, 0xfff, 0, read, GP0),
        ("a write to code", 0x409b, 0xfff, 0, write, GP0),
        ("expand-down: at the limit", 0x4097, 0xfff, 0xfff, read, GP0),
        ("expand-down: above it", 0x4097, 0xfff, 0x1000, read, Ok(())),
        ("expand-down, 16 bits: at the top", 0x0097, 0xfff, 0xfffc, read, Ok(())),
        ("expand-down, 16 bits: over the top", 0x0097, 0xfff, 0xfffd, read, GP0),
        ("unusable", 0, 0, 0, read, GP0),
    ] {
        let mut b = Bench::protected();
        b.state(|s| {
            s.segments[DS] = Segment {
                selector: FREE,
                base: 0x30_0000,
                limit,
                attributes,
            };
            s.gpr[3] = offset;
        });
        assert_eq!(b.one(code), expected, "{name}");
    }
    // The stack segment's violations are #SS.
    for (name, limit, sp_value, code, expected) in [
        ("PUSH with room", 0xfffu32, 0x1000u64, (|a| a.push(eax)) as Code, Ok(())),
        ("PUSH beyond", 0xfff, 0x1001, |a| a.push(eax), SS0),
        ("PUSH below 0", 0xfff, 2, |a| a.push(eax), SS0),
        ("POP beyond", 0xfff, 0xffe, |a| a.pop(eax), SS0),
        (
            "a load through EBP",
            0xfff,
            0,
            |a| a.mov(eax, dword_ptr(ebp + 0xffd)),
            SS0,
        ),
        ("RET", 0xfff, 0xffe, |a| a.ret(), SS0),
    ] {
        let mut b = Bench::protected();
        b.state(|s| {
            s.segments[SS] = Segment {
                selector: FREE,
                base: 0x30_0000,
                limit,
                attributes: 0x4093,
            };
            s.gpr[4] = sp_value;
        });
        // The handler needs a stack of its own: come from ring 3.
        b.user();
        b.state(|s| {
            s.segments[SS] = Segment {
                selector: FREE | 3,
                base: 0x30_0000,
                limit,
                attributes: 0x40f3,
            };
        });
        assert_eq!(b.one(code), expected, "{name}");
    }
    // Code: the limit stops fetches and branches.
    let mut b = Bench::protected();
    b.put(GDT + FREE as u64, descriptor(0, (CODE + 0xff) as u32, 0x409b));
    b.state(|s| {
        s.segments[CS] = Segment {
            selector: FREE,
            base: 0,
            limit: (CODE + 0xff) as u32,
            attributes: 0x409b,
        }
    });
    assert_eq!(b.one(|a| a.jmp(CODE + 0x100)), GP0, "a jump beyond the limit");
    let mut b = Bench::protected();
    b.state(|s| {
        s.segments[CS] = Segment {
            selector: KCODE32,
            base: 0,
            limit: (CODE + 0xff) as u32,
            attributes: 0x409b,
        };
        s.rip = CODE + 0xfe;
    });
    b.write(CODE + 0xfe, &[0x90, 0x90, 0x90]);
    let t = b.trap();
    assert_eq!(
        (t.vector, t.error, t.rip),
        (13, Some(0), CODE + 0x100),
        "running off the end"
    );
}

// covers: cpu/segmentation
// covers: differential/tables
#[test]
fn loads_of_segment_registers_check_the_descriptor() {
    // SDM Vol. 2B "MOV—Move", protected mode exceptions.
    const E: u32 = FREE as u32;
    let gp = Err((13, Some(E)));
    for (name, seg, attributes, rpl, user, expected) in [
        ("DS: data", ds, 0xc093u16, 0u16, false, Ok(())),
        ("DS: read-only data", ds, 0xc091, 0, false, Ok(())),
        ("DS: code that may be read", ds, 0xc09b, 0, false, Ok(())),
        ("DS: code that may not", ds, 0xc099, 0, false, gp),
        ("DS: a system descriptor", ds, 0x0089, 0, false, gp),
        ("DS: not present", ds, 0xc013, 0, false, Err((11, Some(E)))),
        ("DS: DPL 0 from CPL 3", ds, 0xc093, 3, true, gp),
        ("DS: DPL 0 with RPL 3", ds, 0xc093, 3, false, gp),
        ("DS: DPL 3 from CPL 3", ds, 0xc0f3, 3, true, Ok(())),
        ("DS: conforming code from CPL 3", ds, 0xc09f, 3, true, Ok(())),
        ("SS: data", ss, 0xc093, 0, false, Ok(())),
        ("SS: read-only", ss, 0xc091, 0, false, gp),
        ("SS: code", ss, 0xc09b, 0, false, gp),
        ("SS: RPL not CPL", ss, 0xc093, 1, false, gp),
        ("SS: DPL not CPL", ss, 0xc0f3, 0, false, gp),
        ("SS: not present", ss, 0xc013, 0, false, Err((12, Some(E)))),
        ("FS: expand-down data", fs, 0x4097, 0, false, Ok(())),
    ] {
        let mut b = Bench::protected();
        b.put(GDT + FREE as u64, descriptor(0x1234_5678, 0xffff_ffff, attributes));
        if user {
            b.user();
        }
        b.state(|s| s.gpr[0] = (FREE | rpl) as u64);
        assert_eq!(b.one(|a| a.mov(seg, eax)), expected, "{name}");
        let accessed = b.read::<1>(GDT + FREE as u64 + 5)[0] & 1;
        if expected.is_ok() {
            assert_eq!(accessed, 1, "{name}: the accessed bit is set in memory");
            let s = b.cpu.state();
            let i = if seg == ds {
                DS
            } else if seg == ss {
                SS
            } else {
                FS
            };
            assert_eq!(
                (s.segments[i].selector, s.segments[i].base),
                (FREE | rpl, 0x1234_5678),
                "{name}"
            );
            assert_eq!(s.segments[i].attributes, attributes | 1, "{name}");
        } else {
            assert_eq!(accessed as u16, attributes & 1, "{name}");
        }
    }
    for (name, seg, selector, expected) in [
        ("a null DS", ds, 3u64, Ok(())),
        ("a null SS", ss, 0, GP0),
        ("beyond the GDT", ds, 0x2000, Err((13, Some(0x2000)))),
        ("in an LDT", es, 4, Ok(())),
        ("beyond the LDT", es, 0xc, Err((13, Some(0xc)))),
    ] {
        let mut b = Bench::protected();
        b.put(LDT, descriptor(0, 0xfff, 0x4093));
        b.state(|s| {
            s.ldtr = Segment {
                selector: LDTR,
                base: LDT,
                limit: 7,
                attributes: 0x82,
            };
            s.gpr[0] = selector;
        });
        assert_eq!(b.one(|a| a.mov(seg, eax)), expected, "{name}");
    }
    // A null DS can be loaded and not used.
    let mut b = Bench::protected();
    b.state(|s| s.gpr[0] = 0);
    b.one(|a| a.mov(ds, eax)).unwrap();
    assert_eq!(b.one(|a| a.mov(eax, dword_ptr(STACK as u32))), GP0);
    // MOV to CS is no instruction.
    let mut b = Bench::protected();
    assert_eq!(b.one(|a| a.db(&[0x8e, 0xc8])), Err((6, None)));
    // In 64-bit mode a null SS is allowed above CPL 3 when its RPL is the CPL.
    for (selector, user, expected) in [(0u64, false, Ok(())), (1, false, GP0), (3, true, GP0)] {
        let mut b = Bench::long();
        if user {
            b.user();
        }
        b.state(|s| s.gpr[0] = selector);
        assert_eq!(b.one(|a| a.mov(ss, eax)), expected, "null SS {selector}");
    }
}

// covers: cpu/segmentation
#[test]
fn pointers_and_selectors_are_stored_and_loaded() {
    let mut b = Bench::protected();
    b.write(STACK, &[0x78, 0x56, 0x34, 0x12, KDATA as u8, 0]);
    for (name, code, seg) in [
        ("LDS", (|a| a.lds(eax, fword_ptr(STACK as u32))) as Code, DS),
        ("LES", |a| a.les(eax, fword_ptr(STACK as u32)), ES),
        ("LFS", |a| a.lfs(eax, fword_ptr(STACK as u32)), FS),
        ("LGS", |a| a.lgs(eax, fword_ptr(STACK as u32)), GS),
        ("LSS", |a| a.lss(eax, fword_ptr(STACK as u32)), SS),
    ] {
        b.state(|s| s.gpr[0] = 0);
        b.one(code).unwrap();
        let s = b.cpu.state();
        assert_eq!(
            (s.gpr[0], s.segments[seg].selector, s.segments[seg].limit),
            (0x1234_5678, KDATA, u32::MAX),
            "{name}"
        );
    }
    // PUSH of a segment register moves by the operand size; like MOV to memory it writes two bytes whatever it says.
    b.write(STACK - 4, &[0xff; 8]);
    b.one(|a| a.push(ds)).unwrap();
    assert_eq!(
        (b.cpu.state().gpr[4], b.read::<4>(STACK - 4)),
        (STACK - 4, [KDATA as u8, 0, 0xff, 0xff])
    );
    b.one(|a| a.mov(word_ptr(STACK as u32), ds)).unwrap();
    assert_eq!(b.read::<4>(STACK), [KDATA as u8, 0, 0xff, 0xff]);
    b.one(|a| a.pop(gs)).unwrap();
    assert_eq!(
        (b.cpu.state().gpr[4], b.cpu.state().segments[GS].selector),
        (STACK, KDATA)
    );
    // Tables: six bytes in protected mode, ten in 64-bit mode.
    b.one(|a| a.sgdt(ptr(STACK as u32))).unwrap();
    assert_eq!(b.read::<6>(STACK), [0xff, 0x07, 0, 0x30, 0, 0]);
    let mut b = Bench::long();
    b.one(|a| a.sidt(ptr(STACK))).unwrap();
    assert_eq!(b.read::<10>(STACK), [0xff, 0x0f, 0, 0x40, 0, 0, 0, 0, 0, 0]);
    b.write(STACK, &[0x34, 0x12, 0, 0, 0, 0, 0, 0x80, 0xff, 0xff]);
    b.one(|a| a.lgdt(ptr(STACK))).unwrap();
    let s = b.cpu.state();
    assert_eq!((s.gdtr.base, s.gdtr.limit), (0xffff_8000_0000_0000, 0x1234));
}

// covers: cpu/segmentation
#[test]
fn ltr_and_lldt_load_system_segments() {
    let available = descriptor(TSS as u32, 0x67, 0x89);
    for (name, low, high, code, expected) in [
        ("LTR", available, 0xffff_8000u64, (|a| a.ltr(ax)) as Code, Ok(())),
        (
            "LTR of a busy TSS",
            available | 2 << 40,
            0,
            |a| a.ltr(ax),
            Err((13, Some(FREE as u32))),
        ),
        (
            "LTR of a 16-bit TSS in IA-32e mode",
            descriptor(0, 0x67, 0x81),
            0,
            |a| a.ltr(ax),
            Err((13, Some(FREE as u32))),
        ),
        (
            "LTR, not present",
            descriptor(0, 0x67, 0x09),
            0,
            |a| a.ltr(ax),
            Err((11, Some(FREE as u32))),
        ),
        (
            "LTR, upper type not 0",
            available,
            1 << 40,
            |a| a.ltr(ax),
            Err((13, Some(FREE as u32))),
        ),
        ("LLDT", descriptor(LDT as u32, 0xff, 0x82), 0, |a| a.lldt(ax), Ok(())),
        (
            "LLDT of a TSS",
            available,
            0,
            |a| a.lldt(ax),
            Err((13, Some(FREE as u32))),
        ),
    ] {
        let mut b = Bench::long();
        b.put(GDT + FREE as u64, low);
        b.put(GDT + FREE as u64 + 8, high);
        b.state(|s| s.gpr[0] = FREE as u64);
        assert_eq!(b.one(code), expected, "{name}");
        if name == "LTR" {
            let s = b.cpu.state();
            assert_eq!((s.tr.base, s.tr.attributes & 0xf), (0xffff_8000_0000_0000 | TSS, 0xb));
            assert_eq!(b.read::<1>(GDT + FREE as u64 + 5), [0x8b], "busy in memory too");
        }
    }
    let mut b = Bench::long();
    b.state(|s| s.gpr[0] = 0);
    assert_eq!(b.one(|a| a.ltr(ax)), GP0);
    b.state(|s| (s.rip, s.gpr[0]) = (CODE, 0));
    b.one(|a| a.lldt(ax)).unwrap();
    b.one(|a| a.str(ebx)).unwrap();
    b.one(|a| a.sldt(rcx)).unwrap();
    let s = b.cpu.state();
    assert_eq!((s.gpr[3], s.gpr[1], s.ldtr.present()), (TR as u64, 0, false));
    for code in [
        (|a| a.ltr(ax)) as Code,
        |a| a.sldt(ax),
        |a| a.lar(eax, eax),
        |a| a.verr(ax),
    ] {
        let mut b = Bench::real();
        b.code(code);
        assert_eq!(b.run(1), Exit::Halt, "no such instruction in real mode");
        assert_eq!(b.cpu.rip(), bench::handler(6) + 1);
    }
}

// covers: cpu/segmentation
#[test]
fn lar_lsl_verr_and_verw_tell_what_may_be_reached() {
    let user_data = descriptor(0, 0x12345, 0x40f3);
    let kernel_data = descriptor(0, 0xffff_ffff, 0xc093);
    let tss = descriptor(0, 0x67, 0x8b);
    let call_gate = descriptor(0, 0, 0x00ec);
    let interrupt_gate = descriptor(0, 0, 0x00ee);
    let code_only = descriptor(0, 0xfff, 0x40f9);
    for (name, d, user, lar, lsl, verr, verw) in [
        (
            "data",
            user_data,
            true,
            Some(0x41_f300u64),
            Some(0x12345u64),
            true,
            true,
        ),
        (
            "the kernel's data from CPL 3",
            kernel_data,
            true,
            None,
            None,
            false,
            false,
        ),
        (
            "the kernel's data from CPL 0",
            kernel_data,
            false,
            Some(0xcf_9300),
            Some(0xffff_ffff),
            true,
            true,
        ),
        ("a TSS", tss, false, Some(0x00_8b00), Some(0x67), false, false),
        (
            "a call gate has no limit",
            call_gate,
            false,
            Some(0x00_ec00),
            None,
            false,
            false,
        ),
        (
            "an interrupt gate has nothing",
            interrupt_gate,
            false,
            None,
            None,
            false,
            false,
        ),
        (
            "code that may not be read",
            code_only,
            true,
            Some(0x40_f900),
            Some(0xfff),
            false,
            false,
        ),
    ] {
        let mut b = Bench::protected();
        b.put(GDT + FREE as u64, d);
        if user {
            b.user();
        }
        let mut ask = |code: Code| {
            b.state(|s| {
                s.rip = CODE;
                (s.gpr[0], s.gpr[1], s.rflags) = (FREE as u64, 0x55, (0x8d7 ^ 0x40).into());
            });
            b.one(code).unwrap();
            let s = b.cpu.state();
            let zf = s.rflags.into_bits() & 0x40 != 0;
            assert_eq!(s.rflags.into_bits() | 0x40, 0x8d7, "{name}: only ZF changes");
            (zf, s.gpr[1])
        };
        let reported = |v: Option<u64>| (v.is_some(), v.unwrap_or(0x55));
        // The limit's upper bits show in LAR's answer.
        let mask = |(zf, v): (bool, u64)| (zf, if zf { v & 0xf0_ff00 } else { v });
        assert_eq!(mask(ask(|a| a.lar(ecx, eax))), mask(reported(lar)), "LAR {name}");
        assert_eq!(ask(|a| a.lsl(ecx, eax)), reported(lsl), "LSL {name}");
        assert_eq!(ask(|a| a.verr(ax)).0, verr, "VERR {name}");
        assert_eq!(ask(|a| a.verw(ax)).0, verw, "VERW {name}");
    }
    for (dst, src, expected, zf) in [
        (0x10u64, 3u64, 0x13u64, true),
        (0x13, 0, 0x13, false),
        (0x11, 1, 0x11, false),
    ] {
        let mut b = Bench::protected();
        b.state(|s| (s.gpr[0], s.gpr[1]) = (dst, src));
        b.one(|a| a.arpl(ax, cx)).unwrap();
        let s = b.cpu.state();
        assert_eq!((s.gpr[0], s.rflags.into_bits() & 0x40 != 0), (expected, zf));
    }
}

/// Assembles for 16, 32 or 64 bits.
fn assemble(bits: u32, at: u64, f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    let mut a = CodeAssembler::new(bits).unwrap();
    f(&mut a).unwrap();
    a.assemble(at).unwrap()
}

// covers: cpu/modes-real
// covers: cpu/modes-32
// covers: cpu/modes-64
#[test]
fn a_program_goes_from_real_mode_to_64_bit_mode() {
    let mut b = Bench::real();
    // Identity paging as the rig left it; the GDT as the bench has it in the other modes.
    for (selector, d) in [
        (KCODE, descriptor(0, u32::MAX, 0xa09b)),
        (KDATA, descriptor(0, u32::MAX, 0xc093)),
        (KCODE32, descriptor(0, u32::MAX, 0xc09b)),
    ] {
        b.put(GDT + selector as u64, d);
    }
    b.write(0x9000, &[0xff, 0x07, 0, 0x30, 0, 0]);
    let real = assemble(16, 0, |a| {
        a.cli()?;
        a.mov(ax, 0x1234u32 as i32)?;
        a.mov(es, ax)?;
        a.mov(word_ptr(4).es(), ax)?;
        a.lgdt(fword_ptr(0x9000))?;
        a.mov(eax, cr0)?;
        a.or(al, 1)?;
        a.mov(cr0, eax)?;
        // Far jump to 32-bit code: 66 EA offset selector.
        a.db(&[0x66, 0xea, 0x00, 0x80, 0x01, 0x00, KCODE32 as u8, 0x00])
    });
    b.write(0x1_0000, &real);
    let protected = assemble(32, 0x1_8000, |a| {
        a.mov(eax, KDATA as i32)?;
        a.mov(ds, eax)?;
        a.mov(ss, eax)?;
        a.mov(esp, 0x7000)?;
        a.mov(eax, cr4)?;
        a.or(eax, 0x20)?;
        a.mov(cr4, eax)?;
        a.mov(eax, rig::TABLES as u32)?;
        a.mov(cr3, eax)?;
        a.mov(ecx, 0xc000_0080u32)?;
        a.rdmsr()?;
        a.or(eax, 0x100)?;
        a.wrmsr()?;
        a.mov(eax, cr0)?;
        a.or(eax, 0x8000_0000u32)?;
        a.mov(cr0, eax)?;
        // Still 32-bit code, in compatibility mode.
        a.mov(dword_ptr(0x9100), 0x3232)?;
        a.db(&[0xea, 0x00, 0x90, 0x01, 0x00, KCODE as u8, 0x00])
    });
    b.write(0x1_8000, &protected);
    let long = assemble(64, 0x1_9000, |a| {
        a.mov(r15, 0x1122_3344_5566_7788u64)?;
        a.push(r15)?;
        a.hlt()
    });
    b.write(0x1_9000, &long);
    assert_eq!(b.run(1000), Exit::Halt);
    let s = b.cpu.state();
    assert_eq!(s.gpr[15], 0x1122_3344_5566_7788);
    assert_eq!(
        (
            s.cr0.into_bits() & 0x8000_0001,
            s.efer.into_bits() & 0x500,
            s.segments[CS].attributes
        ),
        (0x8000_0001, 0x500, 0xa09b)
    );
    assert_eq!(b.read::<2>(0x1_2344), [0x34, 0x12], "real mode's segment base");
    assert_eq!(b.read::<4>(0x9100), [0x32, 0x32, 0, 0]);
    assert_eq!(b.read::<8>(0x7000 - 8), 0x1122_3344_5566_7788u64.to_le_bytes());
}

// covers: cpu/modes-real
#[test]
fn real_mode_segments_wrap_and_keep_their_limits() {
    for (name, code, expected) in [
        ("the last word", (|a| a.mov(ax, word_ptr(0xfffe))) as Code, None),
        ("across the limit", |a| a.mov(ax, word_ptr(0xffff)), Some(13)),
        (
            "a 32-bit offset beyond the limit",
            |a| a.mov(ax, word_ptr(ebx)),
            Some(13),
        ),
        ("the stack's limit", |a| a.push(ax), Some(12)),
    ] {
        let mut b = Bench::real();
        b.state(|s| (s.gpr[3], s.gpr[4]) = (0x1_0000, if expected == Some(12) { 1 } else { 0x8000 }));
        if expected == Some(12) {
            // A push that cannot be made cannot be delivered either: the processor goes down.
            b.code(code);
            assert_eq!(b.run(1), Exit::Shutdown, "{name}");
            continue;
        }
        b.code(code);
        match expected {
            None => assert_eq!(
                (b.run(1), b.cpu.state().segments[CS].selector),
                (Exit::Budget, 0x1000),
                "{name}"
            ),
            Some(v) => {
                assert_eq!(b.run(1), Exit::Halt, "{name}");
                assert_eq!(b.cpu.rip(), bench::handler(v) + 1, "{name}");
            }
        }
    }
    // SP wraps from 0 to FFFEH, and a far call and return find their way.
    let mut b = Bench::real();
    b.state(|s| {
        s.gpr[4] = 0x1234_0000;
        s.segments[SS] = Segment::real(0x4000);
    });
    b.code(|a| a.db(&[0x9a, 0x10, 0x00, 0x00, 0x20]));
    b.write(0x2_0010, &[0xcb]);
    b.run(1);
    let s = b.cpu.state();
    assert_eq!((s.gpr[4], s.segments[CS].base, s.rip), (0x1234_fffc, 0x2_0000, 0x10));
    assert_eq!(b.read::<4>(0x4_fffc), [5, 0, 0, 0x10]);
    b.run(1);
    let s = b.cpu.state();
    assert_eq!((s.gpr[4], s.segments[CS].base, s.rip), (0x1234_0000, 0x1_0000, 5));
    // A limit that protected mode left stays when real mode loads the segment.
    let mut b = Bench::real();
    b.state(|s| {
        s.segments[DS].limit = u32::MAX;
        (s.gpr[0], s.gpr[3]) = (0, 0x20_0000);
    });
    b.put(0x20_0000, 0x77);
    b.code(|a| {
        a.mov(ds, ax)?;
        a.mov(al, byte_ptr(ebx))
    });
    b.run(2);
    assert_eq!(b.cpu.state().gpr[0], 0x77);
}

// covers: cpu/modes-16
#[test]
fn sixteen_bit_protected_mode_has_16_bit_addresses_and_stacks() {
    let mut b = Bench::protected();
    let code = assemble(16, 0x100, |a| {
        a.mov(ax, 0x1234)?;
        a.push(ax)?;
        a.mov(word_ptr(bx + si + 2), ax)?;
        a.mov(ecx, 0x8765_4321u32)?;
        a.mov(dword_ptr(ebx + 0x40), ecx)?;
        a.call(0x200)?;
        a.hlt()
    });
    b.write(0x30_0100, &code);
    b.write(
        0x30_0200,
        &assemble(16, 0x200, |a| {
            a.inc(dx)?;
            a.ret()
        }),
    );
    b.state(|s| {
        s.segments[CS] = Segment {
            selector: KCODE16,
            base: 0x30_0000,
            limit: 0xffff,
            attributes: 0x9b,
        };
        for seg in [DS, SS, ES] {
            s.segments[seg] = Segment {
                selector: KDATA16,
                base: 0x31_0000,
                limit: 0xffff,
                attributes: 0x93,
            };
        }
        s.rip = 0x100;
        // BX + SI + 2 wraps at 64 KiB.
        (s.gpr[3], s.gpr[6], s.gpr[4], s.gpr[2]) = (0xff00, 0x200, 0xabcd_0100, 0x5555_ffff);
    });
    assert_eq!(b.run(100), Exit::Halt);
    let s = b.cpu.state();
    assert_eq!((s.gpr[4], s.gpr[2], s.gpr[1]), (0xabcd_00fe, 0x5555_0000, 0x8765_4321));
    assert_eq!(b.read::<2>(0x31_0102), [0x34, 0x12]);
    assert_eq!(b.read::<2>(0x31_00fe), [0x34, 0x12]);
    assert_eq!(b.read::<4>(0x31_ff40), [0x21, 0x43, 0x65, 0x87]);
}

// covers: cpu/modes-compatibility
// covers: cpu/modes-64
#[test]
fn compatibility_mode_is_32_bits_within_ia_32e_mode() {
    let mut b = Bench::long();
    // From 64-bit user code by a far return to 32-bit code, and back by a far jump.
    b.user();
    b.put(STACK - 16, 0x10_2000);
    b.put(STACK - 8, UCODE32 as u64 | 3);
    b.state(|s| {
        s.gpr[4] = STACK - 16;
        s.gpr[0] = 0xffff_ffff_ffff_ffff;
        s.gpr[8] = 0x8888_8888_8888_8888;
    });
    b.code(|a| a.db(&[0x48, 0xcb]));
    let code = assemble(32, 0x10_2000, |a| {
        // 40H is INC EAX here, not a REX prefix.
        a.db(&[0x40])?;
        a.push(ebx)?;
        a.mov(ecx, dword_ptr(esp))?;
        a.db(&[0xea, 0x00, 0x30, 0x10, 0x00, bench::UCODE as u8 | 3, 0x00])
    });
    b.write(0x10_2000, &code);
    b.write(0x10_3000, &assemble(64, 0x10_3000, |a| a.mov(r9, r8)));
    assert_eq!(b.run(1), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.segments[CS].attributes, s.efer.into_bits() & 0x400),
        (0x10_2000, 0xc0fb, 0x400)
    );
    assert_eq!(b.run(5), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!(
        (s.gpr[0], s.gpr[4], s.gpr[9]),
        (0, STACK - 4, 0x8888_8888_8888_8888),
        "R8 survived"
    );
    assert_eq!(s.segments[CS].attributes, 0xa0fb);
    // An interrupt from compatibility mode pushes a 64-bit frame, and IRETQ goes back to it.
    b.at(bench::handler(6), |a| a.iretq());
    b.write(0x10_2000, &[0x0f, 0x0b]);
    b.state(|s| {
        s.rip = 0x10_2000;
        s.segments[CS] = Segment {
            selector: UCODE32 | 3,
            base: 0,
            limit: u32::MAX,
            attributes: 0xc0fb,
        };
        s.segments[SS].selector = UDATA | 3;
    });
    assert_eq!(b.run(1), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.segments[CS].selector, s.cpl), (0x10_2000, UCODE32 | 3, 3));
}

// covers: cpu/modes-64
#[test]
fn instructions_that_64_bit_mode_lacks_are_undefined() {
    for (name, bytes) in [
        ("PUSH ES", &[0x06][..]),
        ("POP DS", &[0x1f]),
        ("DAA", &[0x27]),
        ("INTO", &[0xce]),
        ("LES", &[0xc4, 0x03]),
        ("CALL ptr16:32", &[0x9a, 0, 0, 0, 0, 8, 0]),
        ("JMP ptr16:32", &[0xea, 0, 0, 0, 0, 8, 0]),
        ("BOUND", &[0x62, 0x03]),
        ("PUSHA", &[0x60]),
        ("LOCK NOP", &[0xf0, 0x90]),
    ] {
        let mut b = Bench::long();
        assert_eq!(b.one(|a| a.db(bytes)), Err((6, None)), "{name}");
    }
    // Segment bases and limits of ES, CS, SS and DS do not count; those of FS and GS do.
    let mut b = Bench::long();
    b.state(|s| {
        s.segments[DS] = Segment {
            selector: 0,
            base: 0x1000,
            limit: 0,
            attributes: 0,
        };
        s.segments[GS] = Segment {
            selector: 0,
            base: 0x1000,
            limit: 0,
            attributes: 0,
        };
        s.gpr[3] = STACK;
    });
    b.put(STACK, 5);
    b.put(STACK + 0x1000, 6);
    b.one(|a| a.mov(rax, qword_ptr(rbx))).unwrap();
    b.one(|a| a.mov(rcx, qword_ptr(rbx).gs())).unwrap();
    assert_eq!((b.cpu.state().gpr[0], b.cpu.state().gpr[1]), (5, 6));
}
