//! Floating point and vectors in their surroundings: who may execute what, what faults come, and that a fault changes nothing.

use crate::{bench, rig};
use bench::{Bench, KCODE, KDATA};
use engine::Exit;
use engine::fpu::state::sw;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::CODE;
use x86::model::{CpuModel, CpuidRow, WESTMERE};

const DATA: u64 = 0x30_0000;
/// Beyond RAM: nothing is mapped at 512 GiB.
const NOWHERE: u64 = 1 << 39;

const MP: u64 = 1 << 1;
const EM: u64 = 1 << 2;
const TS: u64 = 1 << 3;
const NE: u64 = 1 << 5;
const OSFXSR: u64 = 1 << 9;

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
/// Vector and error code.
type Fault = (u8, Option<u32>);

/// A machine at one instruction, RBX pointing at data.
fn at(code: Code) -> Bench {
    let mut b = Bench::long();
    b.state(|s| {
        s.gpr[3] = DATA;
        s.fpu.fninit();
    });
    b.code(code);
    b
}

// covers: cpu/sse, cpu/mmx, cpu/x87, cpu/fxsave, cpu/xsave
#[test]
fn control_registers_decide_who_may_execute() {
    const UD: u8 = 6;
    const NM: u8 = 7;
    const OK: u8 = 0xff;
    let x87: Code = |a| a.fadd_2(st0, st1);
    let fninit: Code = |a| a.fninit();
    let fnstsw: Code = |a| a.fnstsw(ax);
    let wait: Code = |a| a.wait();
    let mmx: Code = |a| a.paddb(mm1, mm2);
    let emms: Code = |a| a.emms();
    let sse: Code = |a| a.addps(xmm1, xmm2);
    let movaps: Code = |a| a.movaps(xmm1, xmmword_ptr(rbx));
    let rcpps: Code = |a| a.rcpps(xmm1, xmm2);
    let cvtpi2ps: Code = |a| a.cvtpi2ps(xmm1, mm2);
    let ldmxcsr: Code = |a| a.stmxcsr(dword_ptr(rbx));
    let fxsave: Code = |a| a.fxsave(ptr(rbx));
    let movnti: Code = |a| a.movnti(dword_ptr(rbx), eax);
    let sfence: Code = |a| a.sfence();
    let prefetch: Code = |a| a.prefetcht0(byte_ptr(rax));
    for (name, code, cr0_set, cr4_clear, vector) in [
        ("fadd", x87, 0, 0, OK),
        ("fadd", x87, TS, 0, NM),
        ("fadd", x87, EM, 0, NM),
        ("fadd", x87, 0, OSFXSR, OK),
        ("fninit", fninit, TS, 0, NM),
        ("fninit", fninit, EM, 0, NM),
        ("fnstsw", fnstsw, TS, 0, NM),
        ("wait", wait, MP | TS, 0, NM),
        ("wait", wait, EM, 0, OK),
        ("paddb", mmx, 0, 0, OK),
        ("paddb", mmx, EM, 0, UD),
        ("paddb", mmx, EM | TS, 0, UD),
        ("paddb", mmx, TS, 0, NM),
        ("paddb", mmx, 0, OSFXSR, OK),
        ("emms", emms, EM, 0, UD),
        ("emms", emms, TS, 0, NM),
        ("addps", sse, 0, 0, OK),
        ("addps", sse, EM, 0, UD),
        ("addps", sse, TS, 0, NM),
        ("addps", sse, 0, OSFXSR, UD),
        ("addps", sse, TS, OSFXSR, UD),
        ("movaps", movaps, EM, 0, UD),
        ("movaps", movaps, TS, 0, NM),
        ("movaps", movaps, 0, OSFXSR, UD),
        ("rcpps", rcpps, TS, 0, NM),
        ("rcpps", rcpps, 0, OSFXSR, UD),
        ("cvtpi2ps", cvtpi2ps, TS, 0, NM),
        ("cvtpi2ps", cvtpi2ps, 0, OSFXSR, UD),
        ("stmxcsr", ldmxcsr, TS, 0, NM),
        ("stmxcsr", ldmxcsr, 0, OSFXSR, UD),
        ("fxsave", fxsave, TS, 0, NM),
        ("fxsave", fxsave, EM, 0, NM),
        ("fxsave", fxsave, 0, OSFXSR, OK),
        ("movnti", movnti, TS | EM, OSFXSR, OK),
        ("sfence", sfence, TS | EM, OSFXSR, OK),
        ("prefetcht0 of nothing", prefetch, TS | EM, OSFXSR, OK),
    ] {
        let mut b = at(code);
        b.state(|s| {
            s.cr0 = (s.cr0.into_bits() & !MP | cr0_set).into();
            s.cr4 = (s.cr4.into_bits() & (!cr4_clear)).into();
            s.gpr[0] = NOWHERE;
        });
        let before = b.cpu.state();
        let why = format!("{name}, CR0 {cr0_set:x}, CR4 without {cr4_clear:x}");
        if vector == OK {
            assert_eq!(b.run(1), Exit::Budget, "{why}");
            assert!(b.cpu.rip() > CODE && b.cpu.rip() < CODE + 16, "{why}");
        } else {
            assert_eq!(b.faults(), (vector, None), "{why}");
            assert_eq!(b.cpu.state().fpu, before.fpu, "{why}");
        }
    }
}

// covers: cpu/sse, cpu/sse2, cpu/fxsave, cpu/xsave
#[test]
fn operands_must_be_aligned_and_mapped() {
    const GP: Fault = (13, Some(0));
    let pf = |error: u32| (14, Some(error));
    let rows: [(&str, Code, u64, Fault); 18] = [
        ("movaps load", |a| a.movaps(xmm1, xmmword_ptr(rbx)), DATA + 8, GP),
        ("movdqa store", |a| a.movdqa(xmmword_ptr(rbx), xmm1), DATA + 1, GP),
        ("movntdq", |a| a.movntdq(xmmword_ptr(rbx), xmm1), DATA + 4, GP),
        ("addps", |a| a.addps(xmm1, xmmword_ptr(rbx)), DATA + 4, GP),
        ("pshufb", |a| a.pshufb(xmm1, xmmword_ptr(rbx)), DATA + 15, GP),
        ("rsqrtps", |a| a.rsqrtps(xmm1, xmmword_ptr(rbx)), DATA + 8, GP),
        (
            "misaligned goes before unmapped",
            |a| a.movaps(xmm1, xmmword_ptr(rbx)),
            NOWHERE + 8,
            GP,
        ),
        ("fxsave", |a| a.fxsave(ptr(rbx)), DATA + 8, GP),
        ("fxrstor", |a| a.fxrstor(ptr(rbx)), DATA + 8, GP),
        (
            "movaps of nothing",
            |a| a.movaps(xmm1, xmmword_ptr(rbx)),
            NOWHERE,
            pf(0),
        ),
        ("movups store", |a| a.movups(xmmword_ptr(rbx), xmm1), NOWHERE, pf(2)),
        ("mulsd", |a| a.mulsd(xmm1, qword_ptr(rbx)), NOWHERE, pf(0)),
        ("pextrb", |a| a.pextrb(byte_ptr(rbx), xmm1, 3), NOWHERE, pf(2)),
        ("paddb", |a| a.paddb(mm1, qword_ptr(rbx)), NOWHERE, pf(0)),
        ("fld", |a| a.fld(tbyte_ptr(rbx)), NOWHERE, pf(0)),
        ("fstp", |a| a.fstp(dword_ptr(rbx)), NOWHERE, pf(2)),
        ("fnsave", |a| a.fnsave(ptr(rbx)), NOWHERE, pf(2)),
        ("fxrstor of nothing", |a| a.fxrstor(ptr(rbx)), NOWHERE, pf(0)),
    ];
    for (name, code, address, fault) in rows {
        let mut b = at(code);
        b.state(|s| s.gpr[3] = address);
        let before = b.cpu.state();
        assert_eq!(b.faults(), fault, "{name}");
        let after = b.cpu.state();
        assert_eq!(after.fpu, before.fpu, "{name}: nothing changed");
        if fault.0 == 14 {
            // The last byte of an FXSAVE area is looked at first.
            let first = if name == "fxrstor of nothing" { 511 } else { 0 };
            assert_eq!(after.cr2, address + first, "{name}");
        }
    }
    // Whatever the mask: two stores of eight bytes, the upper one first.
    let mut b = at(|a| a.maskmovdqu(xmm1, xmm2));
    b.state(|s| (s.gpr[7], s.fpu.xmm[2]) = (NOWHERE, 0));
    assert_eq!(b.faults(), pf(2), "a masked store of nothing");
    assert_eq!(b.cpu.state().cr2, NOWHERE + 8, "a masked store of nothing");
}

// covers: cpu/sse, cpu/mmx, cpu/x87
#[test]
fn the_units_checks_come_before_the_segments() {
    // FS holds no segment: its use alone is #GP.
    let rows: [(&str, Code); 5] = [
        ("fadd", |a| a.fadd(qword_ptr(ebx).fs())),
        ("fnstcw", |a| a.fnstcw(word_ptr(ebx).fs())),
        ("paddb", |a| a.paddb(mm1, qword_ptr(ebx).fs())),
        ("addss", |a| a.addss(xmm1, dword_ptr(ebx).fs())),
        ("stmxcsr", |a| a.stmxcsr(dword_ptr(ebx).fs())),
    ];
    for (name, code) in rows {
        for (ts, fault) in [(0, (13, Some(0))), (TS, (7, None))] {
            let mut b = Bench::protected();
            b.state(|s| {
                s.gpr[3] = DATA;
                s.cr4.set_osfxsr(true);
                s.cr0 = (s.cr0.into_bits() | ts).into();
                s.fpu.fninit();
                s.segments[4] = Default::default();
            });
            b.code(code);
            assert_eq!(b.faults(), fault, "{name}");
        }
    }
}

// covers: cpu/mxcsr-exceptions
#[test]
fn unmasked_simd_exceptions_are_xm_or_ud() {
    for (osxmmexcpt, vector) in [(true, 19), (false, 6)] {
        let mut b = at(|a| a.divps(xmm1, xmm2));
        b.state(|s| {
            s.fpu.mxcsr = 0x1f80 & !0x200;
            s.fpu.xmm[1] = 0x3f80_0000;
            if !osxmmexcpt {
                s.cr4.set_osxmmexcpt(false);
            }
        });
        assert_eq!(b.faults(), (vector, None));
        let s = b.cpu.state();
        assert_eq!(s.fpu.xmm[1], 0x3f80_0000);
        assert_eq!(
            s.fpu.mxcsr,
            0x1f80 & !0x200 | 5,
            "the flags are set all the same: 1/0, 0/0"
        );
    }
    // Flags of a compare are not written either.
    let mut b = at(|a| a.comiss(xmm1, xmm2));
    b.state(|s| {
        s.fpu.mxcsr = 0x1f00;
        s.fpu.xmm[1] = 0x7fc0_0000;
        s.rflags = 2.into();
    });
    assert_eq!(b.trap().flags & 0x8d5, 0);
}

// covers: cpu/mxcsr, cpu/fxsave
#[test]
fn reserved_mxcsr_bits_are_gp() {
    let rows: [(&str, Code, u64); 2] = [
        ("ldmxcsr", |a| a.ldmxcsr(dword_ptr(rbx)), DATA),
        ("fxrstor", |a| a.fxrstor64(ptr(rbx)), DATA + 24),
    ];
    for (name, code, place) in rows {
        let mut b = at(code);
        b.write(place, &0x1_1f80u32.to_le_bytes());
        assert_eq!(b.faults(), (13, Some(0)), "{name}");
        assert_eq!(b.cpu.state().fpu.mxcsr, 0x1f80, "{name}");
    }
}

// covers: cpu/x87-exceptions
#[test]
fn a_pending_exception_waits_for_the_next_waiting_instruction() {
    // fldz; fld1; fdivrp with ZM clear: nothing happens yet.
    let waiting: [(&str, Code); 6] = [
        ("fld1", |a| a.fld1()),
        ("wait", |a| a.wait()),
        ("fldcw", |a| a.fldcw(word_ptr(rbx))),
        ("fnop", |a| a.fnop()),
        ("paddb", |a| a.paddb(mm0, mm1)),
        ("emms", |a| a.emms()),
    ];
    let patient: [(&str, Code); 6] = [
        ("fnstsw", |a| a.fnstsw(ax)),
        ("fnclex", |a| a.fnclex()),
        ("fninit", |a| a.fninit()),
        ("fnstcw", |a| a.fnstcw(word_ptr(rbx))),
        ("fxsave", |a| a.fxsave(ptr(rbx))),
        ("movaps", |a| a.movaps(xmm1, xmm2)),
    ];
    let prepare = |next: Code| {
        let mut b = Bench::long();
        b.state(|s| {
            s.gpr[3] = DATA;
            s.fpu.fninit();
            s.fpu.cw &= !sw::ZE;
            s.cr0 = (s.cr0.into_bits() | (NE | MP)).into();
        });
        b.code(|a| {
            a.fldz()?;
            a.fld1()?;
            a.fdivrp(st1, st0)?;
            next(a)
        });
        assert_eq!(b.run(3), Exit::Budget);
        let s = b.cpu.state();
        assert!(s.fpu.pending() && s.fpu.sw & sw::ZE != 0);
        assert_eq!(s.fpu.top(), 6, "not popped: a zero divide comes before the computation");
        b
    };
    for (name, next) in waiting {
        let mut b = prepare(next);
        assert_eq!(b.faults(), (16, None), "{name}");
        // With NE clear nobody listens to FERR#.
        let mut b = prepare(next);
        b.state(|s| s.cr0.set_ne(false));
        assert_eq!(b.run(1), Exit::Budget, "{name}");
        assert!(b.cpu.rip() < CODE + 32, "{name}");
    }
    for (name, next) in patient {
        let mut b = prepare(next);
        assert_eq!(b.run(1), Exit::Budget, "{name}");
        assert!(b.cpu.rip() > CODE && b.cpu.rip() < CODE + 32, "{name}");
    }
}

// covers: cpu/x87
#[test]
fn pointers_and_opcode_are_those_of_the_last_computing_instruction() {
    let mut b = at(|a| {
        a.fld1()?;
        a.fadd(qword_ptr(rbx + 0x40))?;
        a.fnstsw(ax)?;
        a.fxsave64(ptr(rbx + 0x80))
    });
    b.run(2);
    let s = b.cpu.state();
    assert_eq!((s.fpu.fip, s.fpu.fdp), (CODE + 2, DATA + 0x40));
    assert_eq!((s.fpu.fcs, s.fpu.fds), (KCODE, KDATA));
    assert_eq!(s.fpu.fop, 0x443, "DC /0, [rbx+disp8]");
    b.run(2);
    let image: [u8; 24] = b.read(DATA + 0x80);
    assert_eq!(
        image[6..16],
        [0x43, 4, 2, 0, 0x10, 0, 0, 0, 0, 0],
        "FNSTSW and FXSAVE do not count"
    );
}

// covers: cpu/x87
#[test]
fn programs_compute() {
    // The distance of (3, 4), then pi rounded down and up, then 10 in packed decimal.
    let mut b = at(|a| {
        a.fild(dword_ptr(rbx))?;
        a.fmul_2(st0, st0)?;
        a.fild(word_ptr(rbx + 4))?;
        a.fmul_2(st0, st0)?;
        a.faddp(st1, st0)?;
        a.fsqrt()?;
        a.fld(st0)?;
        a.fistp(qword_ptr(rbx + 8))?;
        a.fadd_2(st0, st0)?;
        a.fbstp(tbyte_ptr(rbx + 16))?;
        a.fldcw(word_ptr(rbx + 6))?;
        a.fldpi()?;
        a.fstp(tbyte_ptr(rbx + 32))?;
        a.fnstenv(ptr(rbx + 64))?;
        a.fldpi()?;
        a.fld1()?;
        a.fcomip(st0, st1)?;
        a.setb(cl)
    });
    b.write(DATA, &[3, 0, 0, 0, 4, 0, 0x7f, 0x0b]);
    assert_eq!(b.run(18), Exit::Budget);
    assert_eq!(b.read::<8>(DATA + 8), 5u64.to_le_bytes());
    assert_eq!(b.read::<10>(DATA + 16), [0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(
        b.read::<10>(DATA + 32),
        [0x35, 0xc2, 0x68, 0x21, 0xa2, 0xda, 0x0f, 0xc9, 0, 0x40],
        "pi, up"
    );
    assert_eq!(
        b.read::<12>(DATA + 64),
        [0x7f, 0x0b, 0xff, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]
    );
    assert_eq!(b.cpu.state().gpr[1] & 0xff, 1);
}

// covers: cpu/x87, cpu/fxsave
#[test]
fn images_follow_the_mode() {
    // 32-bit protected mode: FNSAVE with 32-bit pointers and selectors, FXSAVE with eight XMM registers.
    let mut b = Bench::protected();
    b.state(|s| {
        s.gpr[3] = DATA;
        s.cr4.set_osfxsr(true);
        s.fpu.fninit();
        s.fpu.xmm = [u128::MAX; 16];
    });
    b.code(|a| {
        a.fld1()?;
        a.fld(qword_ptr(ebx + 0x700))?;
        a.fxsave(ptr(ebx))?;
        a.fnsave(ptr(ebx + 0x400))?;
        a.frstor(ptr(ebx + 0x400))
    });
    b.run(3);
    let image: [u8; 512] = b.read(DATA);
    assert_eq!(image[8..14], [2, 0, 0x10, 0, 0x30, 0], "FIP, FCS");
    assert_eq!(image[16..22], [0, 7, 0x30, 0, 0x10, 0], "FDP, FDS");
    assert!(image[160..288].iter().all(|&b| b == 0xff) && image[288..].iter().all(|&b| b == 0));
    b.run(1);
    let image: [u8; 108] = b.read(DATA + 0x400);
    assert_eq!(image[12..20], [2, 0, 0x10, 0, 0x30, 0, 0x83, 5], "FIP, FCS, FOP");
    assert_eq!(image[20..28], [0, 7, 0x30, 0, 0x10, 0, 0xff, 0xff], "FDP, FDS");
    assert_eq!(b.cpu.state().fpu.tag, 0, "FNSAVE initialises");
    b.run(1);
    let s = b.cpu.state();
    assert_eq!(
        (s.fpu.tag, s.fpu.top(), s.fpu.st(1)),
        (0xc0, 6, 0x3fff_8000_0000_0000_0000)
    );

    // Real mode: 16-bit layout, linear pointers.
    let mut b = Bench::real();
    b.state(|s| {
        s.gpr[3] = 0x700;
        s.fpu.fninit();
    });
    b.code(|a| {
        a.fld(dword_ptr(bx))?;
        a.fnstenv(ptr(bx + 0x40))
    });
    assert_eq!(b.run(2), Exit::Budget);
    let image: [u8; 14] = b.read(0x740);
    assert_eq!(
        image,
        [0x7f, 3, 0, 0x38, 0xff, 0x7f, 0, 0, 0x07, 0x11, 0, 7, 0, 0],
        "IP 10000H, opcode 107H, DP 700H"
    );
}

/// Westmere with XSAVE and XSAVEOPT, which its successors have.
fn with_xsave() -> &'static CpuModel {
    let mut rows = WESTMERE.cpuid.to_vec();
    for row in &mut rows {
        match row.leaf {
            0 => row.regs[0] = 0xd,
            1 => row.regs[2] |= 1 << 26,
            _ => {}
        }
    }
    rows.retain(|row| row.leaf != 0xd);
    rows.push(CpuidRow {
        leaf: 0xd,
        subleaf: Some(0),
        regs: [3, 576, 576, 0],
    });
    rows.push(CpuidRow {
        leaf: 0xd,
        subleaf: Some(1),
        regs: [1, 0, 0, 0],
    });
    rows.sort_by_key(|row| (row.leaf, row.subleaf));
    Box::leak(Box::new(CpuModel {
        cpuid: rows.leak(),
        ..WESTMERE
    }))
}

// covers: cpu/xsave
#[test]
fn xsave_and_xrstor_work_through_memory() {
    let machine = |code: Code| {
        let mut b = Bench::long_with(with_xsave());
        b.state(|s| {
            s.gpr[3] = DATA;
            s.cr4.set_osxsave(true);
            s.xcr0 = 3;
            (s.gpr[0], s.gpr[2]) = (u64::MAX, u64::MAX);
            s.fpu.fninit();
            s.fpu.xmm[3] = 0x1234;
        });
        b.code(code);
        b
    };
    let mut b = machine(|a| {
        a.xsave64(ptr(rbx))?;
        a.xorps(xmm3, xmm3)?;
        a.xrstor64(ptr(rbx))?;
        a.xsaveopt(ptr(rbx + 0x400))
    });
    b.write(DATA, &[0xee; 512]);
    b.write(DATA + 0x400, &[0xee; 512]);
    assert_eq!(b.run(4), Exit::Budget);
    assert_eq!(b.cpu.state().fpu.xmm[3], 0x1234);
    assert_eq!(
        b.read::<8>(DATA + 512),
        2u64.to_le_bytes(),
        "x87 is in its initial state"
    );
    assert_eq!(b.read::<2>(DATA), [0x7f, 3], "XSAVE writes it all the same");
    assert_eq!(b.read::<2>(DATA + 0x400), [0xee, 0xee], "XSAVEOPT does not");
    assert_eq!(b.read::<4>(DATA + 0x400 + 160 + 48), [0x34, 0x12, 0, 0]);

    let xsave: Code = |a| a.xsave(ptr(rbx));
    let xrstor: Code = |a| a.xrstor(ptr(rbx));
    type Change = fn(&mut Bench);
    let rows: [(&str, Code, Change, Fault); 7] = [
        (
            "OSXSAVE clear",
            xsave,
            |b| b.state(|s| s.cr4.set_osxsave(false)),
            (6, None),
        ),
        ("TS", xsave, |b| b.state(|s| s.cr0.set_ts(true)), (7, None)),
        (
            "64-byte alignment",
            xsave,
            |b| b.state(|s| s.gpr[3] += 16),
            (13, Some(0)),
        ),
        (
            "64-byte alignment",
            xrstor,
            |b| b.state(|s| s.gpr[3] += 16),
            (13, Some(0)),
        ),
        ("unmapped", xsave, |b| b.state(|s| s.gpr[3] = NOWHERE), (14, Some(2))),
        ("XSTATE_BV beyond XCR0", xrstor, |b| b.put(DATA + 512, 4), (13, Some(0))),
        ("XCOMP_BV", xrstor, |b| b.put(DATA + 520, 1), (13, Some(0))),
    ];
    for (why, code, change, fault) in rows {
        let mut b = machine(code);
        change(&mut b);
        let before = b.cpu.state().fpu;
        assert_eq!(b.faults(), fault, "{why}");
        assert_eq!(b.cpu.state().fpu, before, "{why}");
    }
    // And a model without it has no such instruction.
    if !WESTMERE.features().xsave() {
        assert_eq!(at(xsave).faults(), (6, None));
    }
}
