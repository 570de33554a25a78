//! AVX and what came with it: who may execute it, what is no encoding of it, alignment, elements that fault one by one.

use crate::{bench, rig};
use std::sync::OnceLock;

use bench::{Bench, EVERYTHING};
use engine::Segment;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::TABLES;
use x86::cpuid::Feature;
use x86::model::{ALDERLAKE, CpuModel, CpuidRow};

const DATA: u64 = 0x30_0000;
/// Nothing is mapped from here on, once `edge` was called.
const EDGE: u64 = 0x60_0000;
const TS: u64 = 1 << 3;
const OSXSAVE: u64 = 1 << 18;
const OSXMMEXCPT: u64 = 1 << 10;

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
type Fault = (u8, Option<u32>);
const UD: Fault = (6, None);
const NM: Fault = (7, None);
const XM: Fault = (19, None);
const GP: Fault = (13, Some(0));

/// The processor of the other tests with AVX2 and its like.
fn vectors() -> &'static CpuModel {
    static MODEL: OnceLock<CpuModel> = OnceLock::new();
    MODEL.get_or_init(|| {
        let mut rows = EVERYTHING.cpuid.to_vec();
        for row in &mut rows {
            match (row.leaf, row.subleaf) {
                // FMA, AVX, F16C.
                (1, _) => row.regs[2] |= 1 << 12 | 1 << 28 | 1 << 29,
                // BMI1, AVX2; AVX-VNNI is in the next.
                (7, Some(0)) => {
                    row.regs[0] = 1;
                    row.regs[1] |= 1 << 3 | 1 << 5;
                }
                _ => {}
            }
        }
        let at = rows.partition_point(|row| (row.leaf, row.subleaf) < (7, Some(1)));
        let vnni = CpuidRow {
            leaf: 7,
            subleaf: Some(1),
            regs: [1 << 4, 0, 0, 0],
        };
        rows.insert(at, vnni);
        CpuModel {
            cpuid: rows.leak(),
            ..EVERYTHING
        }
    })
}

/// 64-bit mode with AVX on, RBX pointing at data.
fn machine() -> Bench {
    let mut b = Bench::long_with(vectors());
    b.state(|s| {
        s.cr4.set_osxsave(true);
        s.xcr0 = 7;
        s.gpr[3] = DATA;
    });
    b
}

/// Takes the memory from `EDGE` away.
fn edge(b: &mut Bench) {
    b.put(TABLES + 0x2000 + (EDGE >> 21) * 8, 0);
}

/// Runs an instruction given by its bytes: the exception, if there is one.
fn bytes(b: &mut Bench, hex: &str) -> Result<(), Fault> {
    let code: Vec<u8> = hex
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    b.one(|a| a.db(&code))
}

// covers: cpu/avx-enabling
#[test]
fn control_registers_and_xcr0_decide_who_may_execute() {
    let vaddps: Code = |a| a.vaddps(ymm1, ymm2, ymm3);
    let scalar: Code = |a| a.vaddsd(xmm1, xmm2, xmm3);
    let load: Code = |a| a.vmovdqu(ymm1, ymmword_ptr(rbx));
    let to_gpr: Code = |a| a.vmovd(eax, xmm1);
    let zero: Code = |a| a.vzeroupper();
    let control: Code = |a| a.vstmxcsr(dword_ptr(rbx));
    let gather: Code = |a| a.vpgatherdd_3(xmm1, dword_ptr(rbx + xmm2), xmm3);
    let masked: Code = |a| a.vmaskmovps(xmm1, xmm2, xmmword_ptr(rbx));
    let vectors = [vaddps, scalar, load, to_gpr, zero, control, gather, masked];
    let (andn, movaps): (Code, Code) = (|a| a.andn(eax, ecx, edx), |a| a.movaps(xmm1, xmm2));
    const EM: u64 = 1 << 2;
    const OSFXSR: u64 = 1 << 9;
    // CR0 bits set, CR4 bits cleared, XCR0; what becomes of AVX, of ANDN, of MOVAPS.
    for (why, set, clear, xcr0, avx, general, legacy) in [
        ("all is on", 0, 0, 7, Ok(()), Ok(()), Ok(())),
        ("no OSXSAVE", 0, OSXSAVE, 7, Err(UD), Ok(()), Ok(())),
        ("no AVX state", 0, 0, 3, Err(UD), Ok(()), Ok(())),
        ("x87 alone", 0, 0, 1, Err(UD), Ok(()), Ok(())),
        ("TS", TS, 0, 7, Err(NM), Ok(()), Err(NM)),
        ("#UD comes before #NM", TS, 0, 3, Err(UD), Ok(()), Err(NM)),
        ("EM is for legacy encodings", EM, 0, 7, Ok(()), Ok(()), Err(UD)),
        ("so is OSFXSR", 0, OSFXSR, 7, Ok(()), Ok(()), Err(UD)),
    ] {
        let run = |code: Code| {
            let mut b = machine();
            b.state(|s| {
                s.cr0 = (s.cr0.into_bits() | set).into();
                s.cr4 = (s.cr4.into_bits() & (!clear)).into();
                s.xcr0 = xcr0;
            });
            b.one(code)
        };
        for code in vectors {
            assert_eq!(run(code), avx, "{why}");
        }
        assert_eq!(run(andn), general, "{why}: ANDN");
        assert_eq!(run(movaps), legacy, "{why}: MOVAPS");
    }
}

// covers: cpu/avx-encoding
#[test]
fn what_is_no_vex_encoding_is_invalid() {
    for (hex, expected, why) in [
        ("c5 ec 58 cb", Ok(()), "vaddps ymm1,ymm2,ymm3"),
        ("3e c5 ec 58 cb", Ok(()), "a segment prefix may stand before it"),
        ("f0 c5 ec 58 cb", Err(UD), "LOCK may not"),
        ("66 c5 ec 58 cb", Err(UD), "nor 66H"),
        ("f2 c5 ec 58 cb", Err(UD), "nor F2H"),
        ("f3 c5 ec 58 cb", Err(UD), "nor F3H"),
        ("48 c5 ec 58 cb", Err(UD), "nor REX"),
        ("40 c4 e2 70 f2 c2", Err(UD), "nor REX before ANDN"),
        ("c5 f8 28 ca", Ok(()), "vmovaps xmm1,xmm2"),
        ("c5 e8 28 ca", Err(UD), "vmovaps with VEX.vvvv"),
        ("c5 f8 77", Ok(()), "vzeroupper"),
        ("c5 fc 77", Ok(()), "vzeroall"),
        ("c5 e8 77", Err(UD), "vzeroupper with VEX.vvvv"),
        ("c5 f9 6e c8", Ok(()), "vmovd xmm1,eax"),
        ("c5 fd 6e c8", Err(UD), "vmovd with VEX.L"),
        ("c4 e3 79 63 ca 0c", Ok(()), "vpcmpistri xmm1,xmm2,0Ch"),
        ("c4 e3 7d 63 ca 0c", Err(UD), "vpcmpistri with VEX.L"),
        ("c4 e3 6d 18 ca 01", Ok(()), "vinsertf128 ymm1,ymm2,xmm2,1"),
        ("c4 e3 69 18 ca 01", Err(UD), "vinsertf128 without VEX.L"),
        ("c4 e2 79 18 0b", Ok(()), "vbroadcastss xmm1,[rbx]"),
        ("c4 e2 f9 18 0b", Err(UD), "vbroadcastss with VEX.W"),
        ("c4 e2 61 90 0c 13", Ok(()), "vpgatherdd xmm1,[rbx+xmm2],xmm3"),
        ("c4 e2 69 90 0c 13", Err(UD), "the mask is the index"),
        ("c4 e2 71 90 0c 13", Err(UD), "the mask is the destination"),
        ("c4 e2 61 90 14 13", Err(UD), "the index is the destination"),
        ("c4 e2 61 90 ca", Err(UD), "a gather without memory"),
        ("c4 e2 74 f2 c2", Err(UD), "andn with VEX.L"),
        ("c4 e1 f8 ae 13", Ok(()), "vldmxcsr [rbx], whatever VEX.W"),
        ("c5 f8 ae c2", Err(UD), "vldmxcsr of a register"),
        ("c5 f1 ff c0", Err(UD), "no instruction there"),
    ] {
        let mut b = machine();
        b.state(|s| {
            s.fpu.xmm[2] = 0;
            s.fpu.xmm[3] = 0;
        });
        b.write(DATA, &0x1f80u32.to_le_bytes());
        assert_eq!(bytes(&mut b, hex), expected, "{why}");
    }
}

// covers: cpu/avx-encoding
#[test]
fn there_is_no_vex_in_real_and_virtual_8086_mode() {
    for hex in ["c5 f8 77", "c5 ec 58 cb", "c4 e2 70 f2 c2"] {
        let code: Vec<u8> = hex
            .split(' ')
            .map(|byte| u8::from_str_radix(byte, 16).unwrap())
            .collect();
        for (vm, mut b) in [
            (false, Bench::real_with(vectors())),
            (true, Bench::protected_with(vectors())),
        ] {
            b.state(|s| {
                s.cr4.set_osxsave(true);
                s.xcr0 = 7;
                if vm {
                    s.rflags = (s.rflags.into_bits() | (1 << 17 | 3 << 12)).into();
                    s.cpl = 3;
                    s.segments = [Segment {
                        attributes: 0xf3,
                        ..Segment::real(0x1000)
                    }; 6];
                    s.rip = 0x100;
                }
            });
            let s = b.cpu.state();
            b.write(s.segments[engine::CS].base + s.rip, &code);
            let exit = b.run(1);
            let after = b.cpu.state();
            // The step that is left is the handler's HLT.
            assert_eq!(exit, engine::Exit::Halt, "{hex}, VM {vm}");
            assert_eq!((after.rip - 1 - bench::HANDLERS) / 32, 6, "{hex}, VM {vm}");
        }
    }
    // The opcodes are LES and LDS there.
    let mut b = Bench::real_with(vectors());
    b.state(|s| s.gpr[3] = 0x700);
    b.write(0x700, &[0x34, 0x12, 0, 0x20]);
    let s = b.cpu.state();
    b.write(s.segments[engine::CS].base + s.rip, &[0xc4, 0x07]); // les ax,[bx]
    b.run(1);
    let s = b.cpu.state();
    assert_eq!((s.gpr[0] as u16, s.segments[engine::ES].selector), (0x1234, 0x2000));
}

// covers: cpu/avx-alignment
#[test]
fn only_the_aligned_moves_ask_for_alignment() {
    let rows: [(&str, Code, u64, Result<(), Fault>); 12] = [
        ("vmovaps", |a| a.vmovaps(ymm1, ymmword_ptr(rbx)), 32, Ok(())),
        (
            "vmovaps of 16 in 256 bits",
            |a| a.vmovaps(ymm1, ymmword_ptr(rbx)),
            16,
            Err(GP),
        ),
        (
            "vmovaps of 16 in 128 bits",
            |a| a.vmovaps(xmm1, xmmword_ptr(rbx)),
            16,
            Ok(()),
        ),
        ("vmovdqa store", |a| a.vmovdqa(xmmword_ptr(rbx), xmm1), 8, Err(GP)),
        ("vmovntdq", |a| a.vmovntdq(ymmword_ptr(rbx), ymm1), 16, Err(GP)),
        ("vmovntdqa", |a| a.vmovntdqa(ymm1, ymmword_ptr(rbx)), 16, Err(GP)),
        ("vmovups", |a| a.vmovups(ymm1, ymmword_ptr(rbx)), 1, Ok(())),
        ("vlddqu", |a| a.vlddqu(ymm1, ymmword_ptr(rbx)), 1, Ok(())),
        ("vaddps", |a| a.vaddps(ymm1, ymm2, ymmword_ptr(rbx)), 1, Ok(())),
        ("vpxor", |a| a.vpxor(xmm1, xmm2, xmmword_ptr(rbx)), 1, Ok(())),
        ("vaesenc", |a| a.vaesenc(xmm1, xmm2, xmmword_ptr(rbx)), 1, Ok(())),
        ("addps, for comparison", |a| a.addps(xmm1, xmmword_ptr(rbx)), 8, Err(GP)),
    ];
    for (why, code, offset, expected) in rows {
        let mut b = machine();
        b.state(|s| s.gpr[3] += offset);
        let before = b.cpu.state().fpu;
        assert_eq!(b.one(code), expected, "{why} at {offset}");
        if expected.is_err() {
            assert_eq!(b.cpu.state().fpu, before, "{why}");
        }
    }
}

// covers: cpu/avx-alignment
#[test]
fn alignment_checks_are_for_scalars_and_gathers() {
    const AC: Fault = (17, Some(0));
    let rows: [(&str, Code, Result<(), Fault>); 6] = [
        ("vaddsd", |a| a.vaddsd(xmm1, xmm2, qword_ptr(rbx)), Err(AC)),
        ("vmovd", |a| a.vmovd(dword_ptr(rbx), xmm1), Err(AC)),
        (
            "vpgatherdd",
            |a| a.vpgatherdd_3(xmm1, dword_ptr(rbx + xmm2), xmm3),
            Err(AC),
        ),
        ("vmovups", |a| a.vmovups(ymm1, ymmword_ptr(rbx)), Ok(())),
        ("vmaskmovps", |a| a.vmaskmovps(ymm1, ymm3, ymmword_ptr(rbx)), Ok(())),
        (
            "vmaskmovps store",
            |a| a.vmaskmovps(ymmword_ptr(rbx), ymm3, ymm1),
            Ok(()),
        ),
    ];
    for (why, code, expected) in rows {
        let mut b = machine();
        b.user();
        b.state(|s| {
            s.cr0.set_am(true);
            s.rflags.set_ac(true);
            s.gpr[3] = DATA + 1;
            (s.fpu.xmm[3], s.fpu.ymm_hi[3]) = (!0, !0);
        });
        assert_eq!(b.one(code), expected, "{why}");
    }
}

// covers: cpu/avx
#[test]
fn operands_reach_over_pages_and_faults_change_nothing() {
    let pattern: [u8; 32] = core::array::from_fn(|i| i as u8 * 5 + 1);
    let half = |from: usize| u128::from_le_bytes(core::array::from_fn(|i| pattern[from + i]));
    for at in [DATA, DATA + 0xfe0, DATA + 0xfe1, DATA + 0xff0, DATA + 0xfff] {
        let mut b = machine();
        b.write(at, &pattern);
        b.state(|s| (s.gpr[3], s.gpr[1]) = (at, at + 0x3000));
        b.code(|a| {
            a.vmovdqu(ymm1, ymmword_ptr(rbx))?;
            a.vpaddb(ymm2, ymm3, ymmword_ptr(rbx))?;
            a.vmovups(ymmword_ptr(rcx), ymm1)?;
            a.vextracti128(xmmword_ptr(rcx + 0x40), ymm2, 1)?;
            a.vmovdqu(xmm4, xmmword_ptr(rbx))?;
            a.vmovq(xmm5, qword_ptr(rbx))?;
            a.vbroadcastss(ymm6, dword_ptr(rbx))
        });
        b.state(|s| (s.fpu.ymm_hi[4], s.fpu.ymm_hi[5]) = (!0, !0));
        assert_eq!(b.run(7), engine::Exit::Budget);
        let f = b.cpu.state().fpu;
        assert_eq!((f.xmm[1], f.ymm_hi[1]), (half(0), half(16)), "{at:x}");
        assert_eq!((f.xmm[2], f.ymm_hi[2]), (half(0), half(16)), "{at:x}");
        assert_eq!((f.xmm[4], f.ymm_hi[4]), (half(0), 0), "{at:x}");
        assert_eq!((f.xmm[5], f.ymm_hi[5]), (half(0) as u64 as u128, 0), "{at:x}");
        assert_eq!(f.ymm_hi[6] as u32, half(0) as u32, "{at:x}");
        assert_eq!(b.read::<32>(at + 0x3000), pattern, "{at:x}");
        assert_eq!(b.read::<16>(at + 0x3040), pattern[16..], "{at:x}");
    }
    let rows: [(&str, Code, u32, u64); 5] = [
        ("load", |a| a.vmovdqu(ymm1, ymmword_ptr(rbx)), 0, EDGE),
        ("store", |a| a.vmovdqu(ymmword_ptr(rbx), ymm1), 2, EDGE),
        ("thunk that loads", |a| a.vaddpd(ymm1, ymm2, ymmword_ptr(rbx)), 0, EDGE),
        (
            "thunk that stores",
            |a| a.vextractf128(xmmword_ptr(rbx), ymm1, 1),
            2,
            EDGE,
        ),
        // Its last byte, on Intel's processors.
        (
            "masked store",
            |a| a.vmaskmovps(ymmword_ptr(rbx), ymm7, ymm1),
            2,
            EDGE + 23,
        ),
    ];
    for (why, code, write, at) in rows {
        let mut b = machine();
        edge(&mut b);
        b.write(EDGE - 8, &[0x77; 8]);
        b.state(|s| {
            s.gpr[3] = EDGE - 8;
            s.fpu.xmm = core::array::from_fn(|i| 0x8000_0000_3f80_0000_8000_0000_3f80_0000 + i as u128);
            (s.fpu.xmm[7], s.fpu.ymm_hi[7]) = (!0, !0);
        });
        let before = b.cpu.state().fpu;
        assert_eq!(b.one(code), Err((14, Some(write))), "{why}");
        assert_eq!((b.cpu.state().fpu, b.cpu.state().cr2), (before, at), "{why}");
        assert_eq!(b.read::<8>(EDGE - 8), [0x77; 8], "{why}");
    }
}

// covers: cpu/f16c
#[test]
fn half_precision_is_converted_before_its_operand_faults() {
    const INEXACT: u32 = 0x20;
    for (masks, vector) in [(0x1f80, 14), (0x0f80, 19)] {
        let mut b = machine();
        edge(&mut b);
        b.write(EDGE - 8, &[0x77; 8]);
        b.state(|s| {
            s.gpr[3] = EDGE - 8;
            s.fpu.mxcsr = masks;
            s.fpu.xmm[1] = 0x3f80_0001;
        });
        let outcome = b.one(|a| a.vcvtps2ph(xmmword_ptr(rbx), ymm1, 0));
        assert_eq!(outcome.map_err(|(vector, _)| vector), Err(vector));
        assert_eq!(b.cpu.state().fpu.mxcsr, masks | INEXACT);
        assert_eq!(b.read::<8>(EDGE - 8), [0x77; 8]);
    }
}

// covers: cpu/avx
#[test]
fn legacy_instructions_keep_upper_halves_and_vex_ones_clear_them() {
    let rows: [(&str, Code, bool); 14] = [
        ("movaps", |a| a.movaps(xmm1, xmm2), true),
        ("addps", |a| a.addps(xmm1, xmm2), true),
        ("movd", |a| a.movd(xmm1, eax), true),
        ("movups", |a| a.movups(xmm1, xmmword_ptr(rbx)), true),
        ("pxor", |a| a.pxor(xmm1, xmm2), true),
        ("vmovaps", |a| a.vmovaps(xmm1, xmm2), false),
        ("vaddps", |a| a.vaddps(xmm1, xmm2, xmm3), false),
        ("vmovd", |a| a.vmovd(xmm1, eax), false),
        ("vmovups", |a| a.vmovups(xmm1, xmmword_ptr(rbx)), false),
        ("vpxor", |a| a.vpxor(xmm1, xmm2, xmm3), false),
        ("vmovss", |a| a.vmovss(xmm1, dword_ptr(rbx)), false),
        ("vmovsd between registers", |a| a.vmovsd_3(xmm1, xmm2, xmm3), false),
        ("vrcpss", |a| a.vrcpss(xmm1, xmm2, xmm3), false),
        ("vmaskmovpd", |a| a.vmaskmovpd(xmm1, xmm2, xmmword_ptr(rbx)), false),
    ];
    for (why, code, kept) in rows {
        let mut b = machine();
        b.state(|s| s.fpu.ymm_hi = [0x55; 16]);
        b.one(code).unwrap();
        let mut expected = [0x55; 16];
        if !kept {
            expected[1] = 0;
        }
        assert_eq!(b.cpu.state().fpu.ymm_hi, expected, "{why}");
    }
    // VZEROUPPER and VZEROALL: outside 64-bit mode there are eight registers.
    for long in [true, false] {
        for all in [false, true] {
            let mut b = if long {
                machine()
            } else {
                Bench::protected_with(vectors())
            };
            b.state(|s| {
                s.cr4.set_osxsave(true);
                s.xcr0 = 7;
                s.fpu.xmm = [1; 16];
                s.fpu.ymm_hi = [2; 16];
            });
            b.one(|a| if all { a.vzeroall() } else { a.vzeroupper() }).unwrap();
            let f = b.cpu.state().fpu;
            for i in 0..16 {
                let reached = long || i < 8;
                assert_eq!(f.ymm_hi[i], if reached { 0 } else { 2 }, "{long} {all} ymm{i}");
                assert_eq!(f.xmm[i], if reached && all { 0 } else { 1 }, "{long} {all} xmm{i}");
            }
        }
    }
}

// covers: cpu/avx-exceptions
#[test]
fn unmasked_exceptions_stop_the_instruction() {
    let one = 0x3f80_0000_3f80_0000_3f80_0000_3f80_0000u128;
    let three = 0x4040_0000_4040_0000_4040_0000_4040_0000u128;
    let unmask = |flag: u32| 0x1f80 & !(flag << 7);
    let divide: Code = |a| a.vdivps(ymm1, ymm2, ymm3);
    let fused: Code = |a| a.vfmadd213ps(ymm1, ymm2, ymm3);
    let to_half: Code = |a| a.vcvtps2ph(xmm1, ymm2, 0);
    let compare: Code = |a| a.vcomiss(xmm2, xmm3);
    let [ie, ze, ue, pe] = [1, 4, 16, 32];
    // YMM2 and YMM3, MXCSR; the exception, and the flags that are raised.
    for (why, code, a, b, control, enabled, expected, raised) in [
        ("1/0 masked", divide, one, 0, 0x1f80, OSXMMEXCPT, Ok(()), ze),
        ("1/0", divide, one, 0, unmask(ze), OSXMMEXCPT, Err(XM), ze),
        ("1/0 without OSXMMEXCPT", divide, one, 0, unmask(ze), 0, Err(UD), ze),
        (
            "an infinity times 0",
            fused,
            0x7f80_0000,
            0,
            unmask(ie),
            OSXMMEXCPT,
            Err(XM),
            ie,
        ),
        ("1/3 is inexact", divide, one, three, 0x1f80, OSXMMEXCPT, Ok(()), pe),
        ("an SNaN", compare, 0x7f80_0001, 0, unmask(ie), OSXMMEXCPT, Err(XM), ie),
        (
            "2^-20 is tiny and exact",
            to_half,
            0x3580_0000,
            0,
            0x1f80,
            OSXMMEXCPT,
            Ok(()),
            0,
        ),
        (
            "which counts when it is unmasked",
            to_half,
            0x3580_0000,
            0,
            unmask(ue),
            OSXMMEXCPT,
            Err(XM),
            ue,
        ),
        (
            "2^-14 is not tiny",
            to_half,
            0x3880_0000,
            0,
            unmask(ue),
            OSXMMEXCPT,
            Ok(()),
            0,
        ),
        (
            "2^-14 and a bit is inexact",
            to_half,
            0x3880_0001,
            0,
            unmask(ue),
            OSXMMEXCPT,
            Ok(()),
            pe,
        ),
        (
            "an SNaN beside it comes first",
            to_half,
            0x3580_0000_7f80_0001,
            0,
            unmask(ue | ie),
            OSXMMEXCPT,
            Err(XM),
            ie,
        ),
    ] {
        let mut bench = machine();
        bench.state(|s| {
            s.cr4 = (s.cr4.into_bits() & !OSXMMEXCPT | enabled).into();
            s.fpu.mxcsr = control;
            (s.fpu.xmm[2], s.fpu.xmm[3]) = (a, b);
            // The upper halves are ones: no flags.
            (s.fpu.ymm_hi[2], s.fpu.ymm_hi[3]) = (one, one);
            s.fpu.ymm_hi[1] = one;
            s.fpu.xmm[1] = 0;
        });
        let before = bench.cpu.state().fpu;
        assert_eq!(bench.one(code), expected, "{why}");
        let after = bench.cpu.state().fpu;
        assert_eq!(after.mxcsr, control | raised, "{why}: MXCSR");
        if expected.is_err() {
            assert_eq!((after.xmm, after.ymm_hi), (before.xmm, before.ymm_hi), "{why}");
        }
    }
}

// covers: cpu/avx2-gather
#[test]
fn a_gather_that_faults_goes_on_where_it_stopped() {
    let word = |n: u128, i: u32| (n >> (32 * i)) as u32;
    let mut b = machine();
    edge(&mut b);
    for i in 0..8u32 {
        b.write(DATA + 16 * i as u64, &(0x100 + i).to_le_bytes());
    }
    // Elements 0, 1, 2 at DATA, 5 at the unmapped page; 3 and 4 are not asked for.
    let far = ((EDGE - DATA) / 16) as u128;
    let low = 0u128 | 1 << 32 | 2 << 64 | far << 96;
    let high = far | far << 32 | 6 << 64 | 7 << 96;
    let ask = 0x8000_0000u128;
    let mask = (ask | ask << 32 | ask << 64, ask << 32 | ask << 64 | ask << 96);
    b.state(|s| {
        (s.fpu.xmm[2], s.fpu.ymm_hi[2]) = (low, high);
        (s.fpu.xmm[3], s.fpu.ymm_hi[3]) = mask;
        (s.fpu.xmm[1], s.fpu.ymm_hi[1]) = (!0, !0);
        // The scale is 8; the elements are 16 apart.
        s.fpu.xmm[2] <<= 1;
        s.fpu.ymm_hi[2] <<= 1;
    });
    let gather: Code = |a| a.vpgatherdd_3(ymm1, dword_ptr(rbx + ymm2 * 8), ymm3);
    let s = b.cpu.state();
    assert_eq!(b.one(gather), Err((14, Some(0))));
    assert_eq!(b.cpu.state().cr2, EDGE);
    let f = b.cpu.state().fpu;
    let got: Vec<u32> = (0..4)
        .map(|i| word(f.xmm[1], i))
        .chain((0..4).map(|i| word(f.ymm_hi[1], i)))
        .collect();
    assert_eq!(
        got,
        [0x100, 0x101, 0x102, !0, !0, !0, !0, !0],
        "what came before the fault is there"
    );
    let left: Vec<bool> = (0..4)
        .map(|i| word(f.xmm[3], i))
        .chain((0..4).map(|i| word(f.ymm_hi[3], i)))
        .map(|m| m >> 31 != 0)
        .collect();
    assert_eq!(
        left,
        [false, false, false, false, false, true, true, true],
        "and is not asked for again"
    );

    // With the page in place the instruction goes on. What it has got it does not read again.
    let old = b.cpu.state();
    b.put(TABLES + 0x2000 + (EDGE >> 21) * 8, EDGE | 0x87);
    b.write(EDGE, &0x77u32.to_le_bytes());
    b.write(DATA, &0x999u32.to_le_bytes());
    b.state(|now| {
        *now = s.clone();
        now.fpu = old.fpu.clone();
    });
    b.one(gather).unwrap();
    let f = b.cpu.state().fpu;
    let got: Vec<u32> = (0..4)
        .map(|i| word(f.xmm[1], i))
        .chain((0..4).map(|i| word(f.ymm_hi[1], i)))
        .collect();
    assert_eq!(got, [0x100, 0x101, 0x102, !0, !0, 0x77, 0x106, 0x107]);
    assert_eq!((f.xmm[3], f.ymm_hi[3]), (0, 0), "the mask is cleared");
}

// covers: cpu/avx2-gather
#[test]
fn gathers_of_every_shape() {
    // 64 quadwords that say where they are.
    let data = |i: u64| 0x0101_0101_0101_0101 * i;
    let rows: [(&str, Code, [u64; 4], [u64; 4]); 4] = [
        (
            "dwords by dwords, 128 bits",
            |a| a.vpgatherdd_3(xmm1, dword_ptr(rbx + xmm2 * 8), xmm3),
            [3 | 5 << 32, 7 | 9 << 32, 0, 0],
            [0x0303_0303 | 0x0505_0505 << 32, 0x0707_0707 | 0x0909_0909 << 32, 0, 0],
        ),
        (
            "qwords by dwords, 256 bits",
            |a| a.vgatherdpd_3(ymm1, qword_ptr(rbx + xmm2 * 8), ymm3),
            [3 | 5 << 32, 7 | 9 << 32, 0, 0],
            [data(3), data(5), data(7), data(9)],
        ),
        (
            "dwords by qwords, 256 bits of indices: the result has 128",
            |a| a.vgatherqps_3(xmm1, dword_ptr(rbx + ymm2 * 8), xmm3),
            [3, 5, 7, 9],
            [0x0303_0303 | 0x0505_0505 << 32, 0x0707_0707 | 0x0909_0909 << 32, 0, 0],
        ),
        (
            "qwords by qwords, an index below 0",
            |a| a.vpgatherqq_3(xmm1, qword_ptr(rbx + xmm2 * 8 + 80), xmm3),
            [(-8i64) as u64, 1, 0, 0],
            [data(2), data(11), 0, 0],
        ),
    ];
    for (why, code, index, expected) in rows {
        let mut b = machine();
        for i in 0..64 {
            b.put(DATA + 8 * i, data(i));
        }
        let pair = |v: [u64; 4], i: usize| v[i] as u128 | (v[i + 1] as u128) << 64;
        b.state(|s| {
            (s.fpu.xmm[2], s.fpu.ymm_hi[2]) = (pair(index, 0), pair(index, 2));
            (s.fpu.xmm[3], s.fpu.ymm_hi[3]) = (!0, !0);
            (s.fpu.xmm[1], s.fpu.ymm_hi[1]) = (!0, !0);
        });
        b.one(code).unwrap();
        let f = b.cpu.state().fpu;
        assert_eq!((f.xmm[1], f.ymm_hi[1]), (pair(expected, 0), pair(expected, 2)), "{why}");
        assert_eq!((f.xmm[3], f.ymm_hi[3]), (0, 0), "{why}: the mask");
    }
}

// covers: cpu/avx-maskmov
#[test]
fn elements_that_are_masked_off_do_not_fault() {
    let ask = 0x8000_0000_0000_0000u128;
    for (why, mask, expected) in [
        ("the first two", (ask | ask << 64, 0), Ok(())),
        ("the third too", (ask | ask << 64, ask), Err(EDGE)),
        ("the last alone", (0, ask << 64), Err(EDGE + 8)),
        ("none", (0, 0), Ok(())),
    ] {
        for store in [false, true] {
            let mut b = machine();
            edge(&mut b);
            b.put(EDGE - 16, 0x1111);
            b.put(EDGE - 8, 0x2222);
            b.state(|s| {
                s.gpr[3] = EDGE - 16;
                (s.fpu.xmm[2], s.fpu.ymm_hi[2]) = mask;
                (s.fpu.xmm[1], s.fpu.ymm_hi[1]) = (0x77 | 0x88 << 64, 0x99);
            });
            let before = b.cpu.state().fpu;
            let outcome = if store {
                b.one(|a| a.vpmaskmovq(ymmword_ptr(rbx), ymm2, ymm1))
            } else {
                b.one(|a| a.vpmaskmovq(ymm1, ymm2, ymmword_ptr(rbx)))
            };
            let after = b.cpu.state();
            match expected {
                Err(at) => {
                    assert_eq!(outcome, Err((14, Some(if store { 2 } else { 0 }))), "{why}");
                    // Of a store that begins in the page before, Intel's processors tell the last byte.
                    let at = if store && mask.0 != 0 { EDGE + 7 } else { at };
                    assert_eq!((after.cr2, &after.fpu), (at, &before), "{why}");
                }
                Ok(()) => assert_eq!(outcome, Ok(()), "{why}"),
            }
            let memory = [b.read::<8>(EDGE - 16), b.read::<8>(EDGE - 8)].map(u64::from_le_bytes);
            let chosen = expected.is_ok() && mask.0 != 0;
            assert_eq!(
                memory,
                if store && chosen {
                    [0x77, 0x88]
                } else {
                    [0x1111, 0x2222]
                },
                "{why}"
            );
            if !store && expected.is_ok() {
                let loaded = if chosen { 0x1111 | 0x2222 << 64 } else { 0 };
                assert_eq!((after.fpu.xmm[1], after.fpu.ymm_hi[1]), (loaded, 0), "{why}");
            }
        }
    }
}

// covers: cpu/avx-vnni
#[test]
fn dot_products_of_bytes_and_words() {
    let bytes = |v: [i16; 4]| v.iter().rev().fold(0u128, |all, &b| all << 8 | (b as u8) as u128);
    let words = |v: [i32; 2]| (v[1] as u16 as u128) << 16 | v[0] as u16 as u128;
    let bu: Code = |a| a.db(&[0xc4, 0xe2, 0x69, 0x50, 0xcb]); // vpdpbusd xmm1,xmm2,xmm3
    let bus: Code = |a| a.db(&[0xc4, 0xe2, 0x69, 0x51, 0xcb]);
    let w: Code = |a| a.db(&[0xc4, 0xe2, 0x69, 0x52, 0xcb]);
    let ws: Code = |a| a.db(&[0xc4, 0xe2, 0x69, 0x53, 0xcb]);
    for (why, code, acc, a, b, expected) in [
        (
            "unsigned by signed bytes",
            bu,
            10,
            bytes([200, 1, 2, 3]),
            bytes([-2, 4, -5, 6]),
            10 - 400 + 4 - 10 + 18,
        ),
        (
            "wraps",
            bu,
            i32::MAX,
            bytes([1, 0, 0, 0]),
            bytes([1, 0, 0, 0]),
            i32::MIN,
        ),
        (
            "saturates",
            bus,
            i32::MAX,
            bytes([1, 0, 0, 0]),
            bytes([1, 0, 0, 0]),
            i32::MAX,
        ),
        (
            "saturates below",
            bus,
            i32::MIN,
            bytes([1, 0, 0, 0]),
            bytes([-1, 0, 0, 0]),
            i32::MIN,
        ),
        ("words", w, -3, words([300, -7]), words([-2, 9]), -3 - 600 - 63),
        (
            "the largest products",
            w,
            0,
            words([-32768, -32768]),
            words([-32768, -32768]),
            i32::MIN,
        ),
        (
            "saturate",
            ws,
            0,
            words([-32768, -32768]),
            words([-32768, -32768]),
            i32::MAX,
        ),
    ] {
        let mut m = machine();
        m.state(|s| {
            (s.fpu.xmm[1], s.fpu.xmm[2], s.fpu.xmm[3]) = (acc as u32 as u128, a, b);
            s.fpu.ymm_hi[1] = 5;
        });
        m.one(code).unwrap();
        let f = m.cpu.state().fpu;
        assert_eq!((f.xmm[1] as u32 as i32, f.ymm_hi[1]), (expected, 0), "{why}");
    }
    // 256 bits from memory.
    let mut m = machine();
    m.write(DATA, &[1; 32]);
    m.state(|s| (s.fpu.xmm[2], s.fpu.ymm_hi[2]) = (u128::MAX, u128::MAX));
    m.one(|a| a.db(&[0xc4, 0xe2, 0x6d, 0x50, 0x0b])).unwrap(); // vpdpbusd ymm1,ymm2,[rbx]
    let f = m.cpu.state().fpu;
    let each = 4 * 255 * 0x1_0000_0001_0000_0001_0000_0001u128;
    assert_eq!((f.xmm[1], f.ymm_hi[1]), (each, each));
}

/// Alder Lake as far as this host can execute it.
fn alderlake() -> &'static CpuModel {
    let lacks: Vec<&str> = [
        ("-sha_ni", std::is_x86_feature_detected!("sha")),
        ("-gfni", std::is_x86_feature_detected!("gfni")),
        ("-vaes", std::is_x86_feature_detected!("vaes")),
        ("-vpclmulqdq", std::is_x86_feature_detected!("vpclmulqdq")),
    ]
    .into_iter()
    .filter_map(|(toggle, present)| (!present).then_some(toggle))
    .collect();
    if lacks.is_empty() {
        &ALDERLAKE
    } else {
        ALDERLAKE.with_toggles(&lacks.join(",")).unwrap()
    }
}

// covers: cpu/avx-toggles, cpu/cache-line, cpu/rdseed-rdpid, cpu/movbe
#[test]
fn what_a_model_does_not_show_is_undefined() {
    use Feature::*;
    let whole = alderlake();
    for (feature, hex, why) in [
        (Avx, "c5 ec 58 cb", "vaddps ymm1,ymm2,ymm3"),
        (Avx, "c5 f8 77", "vzeroupper"),
        (Avx, "c4 e2 79 db ca", "vaesimc xmm1,xmm2"),
        (Avx2, "c5 ed fc cb", "vpaddb ymm1,ymm2,ymm3"),
        (Avx2, "c4 e2 61 90 0c 13", "vpgatherdd xmm1,[rbx+xmm2],xmm3"),
        (Fma, "c4 e2 6d b8 cb", "vfmadd231ps ymm1,ymm2,ymm3"),
        (F16c, "c4 e2 7d 13 ca", "vcvtph2ps ymm1,xmm2"),
        (AvxVnni, "c4 e2 69 50 cb", "vpdpbusd xmm1,xmm2,xmm3"),
        (Vaes, "c4 e2 6d dc cb", "vaesenc ymm1,ymm2,ymm3"),
        (Vpclmulqdq, "c4 e3 6d 44 cb 00", "vpclmulqdq ymm1,ymm2,ymm3,0"),
        (Gfni, "66 0f 38 cf ca", "gf2p8mulb xmm1,xmm2"),
        (Sha, "0f 38 c8 ca", "sha1nexte xmm1,xmm2"),
        (Bmi1, "c4 e2 70 f2 c2", "andn eax,ecx,edx"),
        (Bmi2, "c4 e2 71 f7 c2", "shlx eax,edx,ecx"),
        (Adx, "66 0f 38 f6 c1", "adcx eax,ecx"),
        (Movbe, "0f 38 f0 03", "movbe eax,[rbx]"),
        (Rdseed, "0f c7 f8", "rdseed eax"),
        (Rdpid, "f3 0f c7 f8", "rdpid rax"),
        (Clflushopt, "66 0f ae 3b", "clflushopt [rbx]"),
        (Clwb, "66 0f ae 33", "clwb [rbx]"),
        (Movdiri, "0f 38 f9 03", "movdiri [rbx],eax"),
        (Movdir64b, "66 0f 38 f8 0b", "movdir64b rcx,[rbx]"),
        (Serialize, "0f 01 e8", "serialize"),
        (Xsaveopt, "0f ae 33", "xsaveopt [rbx]"),
        (Xsavec, "0f c7 23", "xsavec [rbx]"),
        (Xsaves, "0f c7 2b", "xsaves [rbx]"),
    ] {
        let run = |model: &'static CpuModel| {
            let mut b = Bench::long_with(model);
            b.state(|s| {
                s.cr4.set_osxsave(true);
                s.xcr0 = 3 | if model.features().avx() { 4 } else { 0 };
                s.gpr[3] = DATA;
                s.gpr[1] = DATA + 0x40;
                s.fpu.xmm = [0; 16];
            });
            bytes(&mut b, hex)
        };
        if whole.features().has(feature) {
            assert_eq!(run(whole), Ok(()), "{why}");
            let less = whole.with_toggles(&format!("-{}", feature.flag())).unwrap();
            assert_eq!(run(less), Err(UD), "{why} without {}", feature.name());
        } else {
            println!("{why}: this host has no {}", feature.name());
            assert_eq!(run(whole), Err(UD), "{why}");
        }
    }
    // Without their features these are other instructions.
    let less = whole.with_toggles("-bmi1,-abm,-wbnoinvd").unwrap();
    for (hex, with, without, why) in [
        ("f3 0f bc c1", 4, 4, "tzcnt of 10H, and bsf"),
        ("f3 0f bd c1", 27, 4, "lzcnt of 10H, and bsr"),
        ("f3 0f 09", 0, 0, "wbnoinvd, and wbinvd"),
    ] {
        for (model, expected) in [(whole, with), (less, without)] {
            let mut b = Bench::long_with(model);
            b.state(|s| (s.gpr[0], s.gpr[1]) = (0, 0x10));
            assert_eq!(bytes(&mut b, hex), Ok(()), "{why}");
            assert_eq!(b.cpu.state().gpr[0], expected, "{why}");
        }
    }
}
