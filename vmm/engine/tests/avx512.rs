//! AVX-512: who may execute it, what is no encoding of it, masks that keep elements from faulting, restarts of gathers and scatters,
//! rounding, and the state in XSAVE areas. What the instructions compute is compared with the host in `differential`.

use crate::skip::skipped;
use crate::{bench, rig};
use bench::Bench;
use engine::{Segment, Vectors};
use iced_x86::code_asm::*;
use iced_x86::{IcedError, Instruction, OpCodeOperandKind, OpKind, Register};
use rig::TABLES;
use x86::model::{ICELAKE_SERVER, SAPPHIRERAPIDS};

const DATA: u64 = 0x30_0000;
/// Nothing is mapped from here on, once `edge` was called.
const EDGE: u64 = 0x60_0000;
const ALL: u64 = 0xe7;

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
type Fault = (u8, Option<u32>);
const UD: Fault = (6, None);
const NM: Fault = (7, None);
const XM: Fault = (19, None);
const GP: Fault = (13, Some(0));

/// The ways to execute: by the host's instructions as far as it has them, and by tables alone.
const WAYS: [Vectors; 2] = [Vectors::Host, Vectors::Portable];

/// 64-bit mode with AVX-512 on, RBX pointing at data.
fn machine(vectors: Vectors) -> Bench {
    let mut b = Bench::long_by(&SAPPHIRERAPIDS, vectors);
    b.state(|s| {
        s.cr4.set_osxsave(true);
        s.xcr0 = ALL;
        s.gpr[3] = DATA;
    });
    b
}

/// The same in 32-bit protected mode.
fn protected(vectors: Vectors) -> Bench {
    let mut b = Bench::protected_by(&SAPPHIRERAPIDS, vectors);
    b.state(|s| {
        s.cr4.set_osxsave(true);
        s.xcr0 = ALL;
        s.gpr[3] = DATA;
    });
    b
}

/// Takes the memory from `EDGE` away.
fn edge(b: &mut Bench) {
    b.put(TABLES + 0x2000 + (EDGE >> 21) * 8, 0);
}

fn bytes(b: &mut Bench, hex: &str) -> Result<(), Fault> {
    let code: Vec<u8> = hex
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    b.one(|a| a.db(&code))
}

/// Four doublewords in a quarter.
fn quarter(n: u32) -> u128 {
    (0..4).map(|i| u128::from(n * 4 + i) << (32 * i)).sum()
}

/// A register whose doublewords are 0 to 15, and 100H more.
fn counted(from: u32) -> [u128; 4] {
    [0, 1, 2, 3].map(|n| quarter(n) + from as u128 * 0x1_00000001_00000001_00000001)
}

fn word(register: [u128; 4], i: usize) -> u32 {
    (register[i / 4] >> (32 * (i % 4))) as u32
}

// covers: cpu/avx512-enabling
#[test]
fn control_registers_and_xcr0_decide_who_may_execute() {
    for vectors in WAYS {
        let add: Code = |a| a.vaddps(zmm1, zmm2, zmm3);
        let short: Code = |a| a.evex().vpaddd(xmm17, xmm2, xmm3);
        let load: Code = |a| a.vmovdqu32(zmm1.k1(), zmmword_ptr(rbx));
        let gather: Code = |a| a.vpgatherdd(zmm1.k1(), dword_ptr(rbx + zmm2));
        let opmask: Code = |a| a.kmovw(eax, k1);
        let test: Code = |a| a.kortestw(k1, k1);
        let vex: Code = |a| a.vaddps(ymm1, ymm2, ymm3);
        for (why, ts, osxsave, xcr0, expected, avx) in [
            ("all is on", false, true, ALL, Ok(()), Ok(())),
            ("no OSXSAVE", false, false, ALL, Err(UD), Err(UD)),
            ("no AVX-512 state", false, true, 7, Err(UD), Ok(())),
            ("TS", true, true, ALL, Err(NM), Err(NM)),
            ("#UD comes before #NM", true, true, 7, Err(UD), Err(NM)),
        ] {
            for (code, expected) in [add, short, load, gather, opmask, test]
                .into_iter()
                .map(|code| (code, expected))
                .chain([(vex, avx)])
            {
                let mut b = machine(vectors);
                b.state(|s| {
                    s.cr0.set_ts(ts);
                    s.cr4.set_osxsave(osxsave);
                    s.xcr0 = xcr0;
                });
                assert_eq!(b.one(code), expected, "{why}");
            }
        }
    }
}

// covers: cpu/avx512-encoding
#[test]
fn what_the_manual_reserves_is_no_instruction() {
    for vectors in WAYS {
        for (why, hex, expected) in [
            ("vaddps zmm1 {k1}{z}, zmm2, zmm3", "62 f1 6c c9 58 cb", Ok(())),
            ("zeroing without a mask", "62 f1 6c c8 58 cb", Err(UD)),
            ("a vector length of 3", "62 f1 6c 69 58 0b", Err(UD)),
            ("vmovups zmm1, zmm2", "62 f1 7c 48 10 ca", Ok(())),
            ("vvvv where there is no such operand", "62 f1 6c 48 10 ca", Err(UD)),
            ("V' where there is no such operand", "62 f1 7c 40 10 ca", Err(UD)),
            ("vmovups [rbx] {k1}, zmm1", "62 f1 7c 49 11 0b", Ok(())),
            ("zeroing of memory", "62 f1 7c c9 11 0b", Err(UD)),
            ("broadcast of what is moved whole", "62 f1 7c 58 10 0b", Err(UD)),
            ("vpgatherdd zmm1 {k1}, [rbx + zmm2]", "62 f2 7d 49 90 0c 13", Ok(())),
            ("a gather without a mask", "62 f2 7d 48 90 0c 13", Err(UD)),
            ("a gather over its indices", "62 f2 7d 49 90 14 13", Err(UD)),
            ("a gather that zeroes", "62 f2 7d c9 90 0c 13", Err(UD)),
            ("LOCK", "f0 62 f1 6c 49 58 cb", Err(UD)),
            ("an operand size", "66 62 f1 6c 49 58 cb", Err(UD)),
            ("REX", "48 62 f1 6c 49 58 cb", Err(UD)),
            ("vp2intersectd, which no part here has", "62 f2 6f 48 68 cb", Err(UD)),
            ("vcvtph2uw zmm1, zmm2", "62 f5 7c 48 7d ca", Ok(())),
            ("vaddph zmm1, zmm2, zmm3 with W", "62 f5 ec 48 58 cb", Err(UD)),
            ("vfmulcph zmm1, zmm2, zmm3", "62 f6 6e 48 d6 cb", Ok(())),
            ("vfmulcph over its first source", "62 f6 6e 48 d6 d3", Err(UD)),
            ("vfmulcph over its second source", "62 f6 6e 48 d6 db", Err(UD)),
            ("vfcmaddcsh over its second source", "62 f6 6f 08 57 db", Err(UD)),
            ("vmovw xmm1, eax", "62 f5 7d 08 6e c8", Ok(())),
            ("vmovw with a mask", "62 f5 7d 09 6e c8", Err(UD)),
            ("vmovw of 256 bits", "62 f5 7d 28 6e c8", Err(UD)),
        ] {
            let mut b = machine(vectors);
            assert_eq!(bytes(&mut b, hex), expected, "{why}");
        }
        // A part without half precision.
        let mut b = Bench::long_by(&ICELAKE_SERVER, vectors);
        b.state(|s| {
            s.cr4.set_osxsave(true);
            s.xcr0 = ALL;
        });
        let half: Code = |a| a.vaddph(zmm1, zmm2, zmm3);
        let single: Code = |a| a.vaddps(zmm1, zmm2, zmm3);
        assert_eq!((b.one(half), b.one(single)), (Err(UD), Ok(())));
    }
}

// covers: cpu/avx512-encoding
#[test]
fn a_short_displacement_counts_in_operands() {
    for vectors in WAYS {
        let mut b = machine(vectors);
        for (at, value) in [(64, 0x11_u8), (4, 0x22), (32, 0x33)] {
            b.write(DATA + at, &[value; 4]);
        }
        // vmovups zmm1, [rbx+1*64]; vaddps zmm2, zmm3, [rbx+1*4]{1to16}; vmovups ymm3, [rbx+1*32].
        for (hex, register, expected) in [
            ("62 f1 7c 48 10 4b 01", 1, 0x1111_1111),
            ("62 f1 64 58 58 53 01", 2, 0x2222_2222),
            ("62 f1 7c 28 10 5b 01", 3, 0x3333_3333),
            // vmovsh xmm4, [rbx+2*2]; vcvtph2uw zmm5, [rbx+1*64]; vcvtph2udq zmm6, [rbx+2*2]{1to16}; vfmulcph zmm7, zmm3, [rbx+1*4]{1to16}.
            ("62 f5 7e 08 10 63 02", 4, 0x2222),
            ("62 f5 7c 48 7d 6b 01", 5, 0),
            ("62 f5 7c 58 79 73 02", 6, 0),
            ("62 f6 66 58 d6 7b 01", 7, 0x1d85_0005),
        ] {
            assert_eq!(bytes(&mut b, hex), Ok(()), "{hex}");
            assert_eq!(word(b.cpu.state().fpu.zmm(register), 0), expected, "{hex}");
        }
    }
}

// covers: cpu/avx512-faults
#[test]
fn an_element_that_the_mask_leaves_out_cannot_fault() {
    for vectors in WAYS {
        let load: Code = |a| a.vmovdqu32(zmm1.k1(), zmmword_ptr(rbx));
        let add: Code = |a| a.vpaddd(zmm1.k1(), zmm2, zmmword_ptr(rbx));
        let broadcast: Code = |a| a.vpaddd(zmm1.k1(), zmm2, dword_bcst(rbx));
        let store: Code = |a| a.vmovdqu32(zmmword_ptr(rbx).k1(), zmm2);
        let expand: Code = |a| a.vpexpandd(zmm1.k1(), zmmword_ptr(rbx));
        let compress: Code = |a| a.vpcompressd(zmmword_ptr(rbx).k1(), zmm2);
        let widen: Code = |a| a.vpmovzxbd(zmm1.k1(), xmmword_ptr(rbx));
        let narrow: Code = |a| a.vpmovdb(xmmword_ptr(rbx).k1(), zmm2);
        let scalar: Code = |a| a.evex().vaddss(xmm1.k1(), xmm2, dword_ptr(rbx));
        let half: Code = |a| a.vaddph(zmm1.k1(), zmm2, zmmword_ptr(rbx));
        let half_broadcast: Code = |a| a.vaddph(zmm1.k1(), zmm2, word_bcst(rbx));
        let half_to_double: Code = |a| a.vcvtph2pd(zmm1.k1(), xmmword_ptr(rbx));
        let double_to_half: Code = |a| a.vcvtpd2ph(xmm1.k1(), zmmword_ptr(rbx));
        let complex: Code = |a| a.vfcmaddcph(zmm1.k1(), zmm2, zmmword_ptr(rbx));
        let half_store: Code = |a| a.vmovsh(word_ptr(rbx).k1(), xmm2);
        let whole: Code = |a| a.vpermd(zmm1.k1(), zmm2, zmmword_ptr(rbx));
        // Instruction; bytes before the edge; mask; the address that faults, and whether that is a write.
        for (why, code, before, k, fault) in [
            ("load below the edge", load, 32, 0x00ff_u64, None),
            ("load over it", load, 32, 0x01ff, Some((EDGE, false))),
            ("load of its last element", load, 32, 0x8000, Some((EDGE + 28, false))),
            ("load of nothing", load, 0, 0, None),
            ("bits beyond the elements", load, 0, 0xffff_0000, None),
            ("arithmetic", add, 60, 0x7fff, None),
            ("arithmetic over it", add, 60, 0xffff, Some((EDGE, false))),
            ("a broadcast nobody takes", broadcast, 0, 0, None),
            ("a broadcast one takes", broadcast, 0, 0x400, Some((EDGE, false))),
            ("store", store, 4, 1, None),
            // Of a store across the edge it is the last byte, as an Intel CPU (Cascade Lake) has it.
            ("store over it", store, 4, 3, Some((EDGE + 3, true))),
            ("store behind it", store, 4, 0xc, Some((EDGE + 4, true))),
            ("expand of three elements", expand, 12, 0x8101, None),
            ("expand of four", expand, 12, 0x8301, Some((EDGE, false))),
            ("compress of three", compress, 12, 0x8101, None),
            ("compress of four", compress, 12, 0x8301, Some((EDGE + 3, true))),
            ("sixteen bytes to doublewords", widen, 3, 7, None),
            ("and one more", widen, 3, 8, Some((EDGE, false))),
            ("doublewords to bytes", narrow, 1, 1, None),
            ("and one more", narrow, 1, 3, Some((EDGE, true))),
            ("a scalar that is left out", scalar, 0, 0xfe, None),
            ("a scalar", scalar, 0, 1, Some((EDGE, false))),
            ("half precision", half, 62, 0x7fff_ffff, None),
            ("half precision over it", half, 62, 0x8000_0000, Some((EDGE, false))),
            ("a word that nobody takes", half_broadcast, 0, 0, None),
            (
                "a word that the last takes",
                half_broadcast,
                0,
                1 << 31,
                Some((EDGE, false)),
            ),
            ("halves to doubles", half_to_double, 14, 0x7f, None),
            ("and one more", half_to_double, 14, 0x80, Some((EDGE, false))),
            ("doubles to halves", double_to_half, 56, 0x7f, None),
            ("and one more", double_to_half, 56, 0x80, Some((EDGE, false))),
            ("complex numbers", complex, 60, 0x7fff, None),
            ("and one more", complex, 60, 0x8000, Some((EDGE, false))),
            ("a word that is left out", half_store, 0, 2, None),
            ("a word", half_store, 0, 1, Some((EDGE, true))),
            ("a permutation reads all", whole, 32, 1, Some((EDGE, false))),
        ] {
            let mut b = machine(vectors);
            edge(&mut b);
            b.write(EDGE - 64, &[0x77; 64]);
            b.state(|s| {
                s.gpr[3] = EDGE - before;
                s.fpu.avx512.k[1] = k;
                s.fpu.set_zmm(1, counted(0x100));
                s.fpu.set_zmm(2, counted(0x200));
            });
            let expected = fault.map_or(Ok(()), |(_, write)| Err((14, Some(if write { 2 } else { 0 }))));
            assert_eq!(b.one(code), expected, "{why}");
            let state = b.cpu.state();
            if let Some((address, write)) = fault {
                assert_eq!(state.cr2, address, "{why}");
                assert_eq!(state.fpu.zmm(1), counted(0x100), "{why}: the destination");
                if write {
                    assert_eq!(b.read::<64>(EDGE - 64), [0x77; 64], "{why}: nothing is stored");
                }
            }
        }
    }
}

// covers: cpu/avx512-faults
#[test]
fn a_masked_store_over_two_pages_leaves_the_rest_alone() {
    for vectors in WAYS {
        let mut b = machine(vectors);
        let at = DATA + 0xfe0;
        b.write(at, &[0xaa; 64]);
        b.state(|s| {
            s.gpr[3] = at;
            s.fpu.avx512.k[1] = 0b1000_0001_0100_0110;
            s.fpu.set_zmm(20, counted(0x5000));
        });
        let store: Code = |a| a.vmovdqu32(zmmword_ptr(rbx).k1(), zmm20);
        assert_eq!(b.one(store), Ok(()));
        for (i, bytes) in b.read::<64>(at).chunks_exact(4).enumerate() {
            let value = u32::from_le_bytes(bytes.try_into().unwrap());
            let chosen = 0b1000_0001_0100_0110 >> i & 1 != 0;
            assert_eq!(
                value,
                if chosen { 0x5000 + i as u32 } else { 0xaaaa_aaaa },
                "element {i}"
            );
        }
    }
}

// covers: cpu/avx512-faults
#[test]
fn segments_are_checked_element_by_element() {
    for vectors in WAYS {
        let load: Code = |a| a.vmovdqu32(zmm1.k1(), zmmword_ptr(ebx));
        for (k, expected) in [(0xff_u64, Ok(())), (0x1ff, Err(GP))] {
            let mut b = protected(vectors);
            b.state(|s| {
                s.segments[engine::DS] = Segment {
                    limit: 0xfff,
                    attributes: 0x40f3,
                    ..s.segments[engine::DS]
                };
                s.gpr[3] = 0xfe0;
                s.fpu.avx512.k[1] = k;
            });
            assert_eq!(b.one(load), expected, "{k:x}");
        }
    }
}

// covers: cpu/avx512-gather
#[test]
fn gathers_and_scatters_go_on_where_they_stopped() {
    for vectors in WAYS {
        let gather: Code = |a| a.vpgatherdd(zmm1.k1(), dword_ptr(rbx + zmm2 * 4));
        let scatter: Code = |a| a.vpscatterdd(dword_ptr(rbx + zmm2 * 4).k1(), zmm1);
        let reach = |element: usize, to: u32| {
            // Element `element` is `to` doublewords away, the others are at their own number.
            let mut indices = counted(0);
            let shift = 32 * (element % 4);
            indices[element / 4] = indices[element / 4] & !(0xffff_ffff << shift) | u128::from(to) << shift;
            indices
        };
        let away = ((EDGE - DATA) / 4) as u32;
        for (code, scattered) in [(gather, false), (scatter, true)] {
            let mut b = machine(vectors);
            edge(&mut b);
            let pattern: Vec<u8> = (0..16_u32).flat_map(|i| (0x900 + i).to_le_bytes()).collect();
            b.write(DATA, &pattern);
            b.state(|s| {
                s.fpu.set_zmm(1, counted(0x100));
                s.fpu.set_zmm(2, reach(6, away));
                s.fpu.avx512.k[1] = 0xffff_0000_0000_faf1;
            });
            let error = if scattered { 2 } else { 0 };
            assert_eq!(b.one(code), Err((14, Some(error))));
            let state = b.cpu.state();
            assert_eq!(state.cr2, EDGE);
            // Elements 0, 4 and 5 are done, 6 faults.
            assert_eq!(state.fpu.avx512.k[1], 0xffff_0000_0000_fac0, "the rest of the mask");
            let element = |b: &Bench, i: usize| match scattered {
                true => u32::from_le_bytes(b.read::<4>(DATA + 4 * i as u64)),
                false => word(b.cpu.state().fpu.zmm(1), i),
            };
            let (moved, kept) = if scattered { (0x100, 0x900) } else { (0x900, 0x100) };
            for i in 0..16 {
                let done = [0, 4, 5].contains(&i);
                let expected = if done { moved } else { kept } + i as u32;
                assert_eq!(element(&b, i), expected, "element {i}");
            }
            // The page comes, and the instruction goes on.
            b.state(|s| s.fpu.set_zmm(2, counted(0)));
            assert_eq!(b.one(code), Ok(()));
            assert_eq!(b.cpu.state().fpu.avx512.k[1], 0, "the mask of a finished instruction");
            for i in 0..16 {
                let expected = if 0xfaf1 >> i & 1 != 0 { moved } else { kept } + i as u32;
                assert_eq!(element(&b, i), expected, "element {i}");
            }
        }
    }
}

// covers: cpu/avx512-gather
#[test]
fn the_last_of_two_scattered_elements_stays() {
    for vectors in WAYS {
        let mut b = machine(vectors);
        b.state(|s| {
            s.fpu.set_zmm(1, counted(0x100));
            s.fpu.set_zmm(2, [0; 4]);
            s.fpu.avx512.k[1] = 0x0ff0;
        });
        let scatter: Code = |a| a.vpscatterdd(dword_ptr(rbx + zmm2 * 4).k1(), zmm1);
        assert_eq!(b.one(scatter), Ok(()));
        assert_eq!(u32::from_le_bytes(b.read::<4>(DATA)), 0x10b);
    }
}

// covers: cpu/avx512-rounding
#[test]
fn embedded_rounding_overrides_mxcsr_and_suppresses_exceptions() {
    for vectors in WAYS {
        const ONE: u128 = 0x3f80_0000;
        const TINY: u128 = 0x2f80_0000;
        const NEXT: u128 = 0x3f80_0001;
        let plain: Code = |a| a.vaddss(xmm1, xmm2, xmm3);
        let up: Code = |a| a.evex().vaddss(xmm1, xmm2, xmm3.ru_sae());
        let down: Code = |a| a.evex().vaddss(xmm1, xmm2, xmm3.rd_sae());
        // MXCSR before; the sum of 1 and 2^-32; MXCSR after, or the exception.
        for (why, code, mxcsr, sum, after) in [
            ("to nearest", plain, 0x1f80, ONE, Ok(0x1fa0)),
            ("MXCSR rounds up", plain, 0x5f80, NEXT, Ok(0x5fa0)),
            ("the instruction rounds up", up, 0x1f80, NEXT, Ok(0x1f80)),
            ("the instruction rounds down", down, 0x5f80, ONE, Ok(0x5f80)),
            ("precision unmasked", plain, 0x0f80, 0, Err(XM)),
            ("and suppressed", up, 0x0f80, NEXT, Ok(0x0f80)),
        ] {
            let mut b = machine(vectors);
            b.state(|s| {
                s.cr4.set_osxmmexcpt(true);
                s.fpu.mxcsr = mxcsr;
                (s.fpu.xmm[1], s.fpu.xmm[2], s.fpu.xmm[3]) = (0, ONE, TINY);
            });
            let result = b.one(code);
            let fpu = b.cpu.state().fpu;
            assert_eq!(result.map(|()| fpu.mxcsr), after, "{why}");
            assert_eq!(fpu.xmm[1], sum, "{why}");
        }
    }
}

// covers: cpu/avx512-rounding
#[test]
fn an_element_that_the_mask_leaves_out_raises_nothing() {
    for vectors in WAYS {
        let divide: Code = |a| a.vdivps(zmm1.k1(), zmm2, zmm3);
        for (k, expected) in [(0xfffe_u64, Ok(())), (0xffff, Err(XM))] {
            let mut b = machine(vectors);
            b.state(|s| {
                s.cr4.set_osxmmexcpt(true);
                s.fpu.mxcsr = 0x1f80 & !(1 << 9);
                let ones = 0x3f80_0000_3f80_0000_3f80_0000_3f80_0000;
                s.fpu.set_zmm(2, [ones; 4]);
                s.fpu.set_zmm(3, [ones & !0xffff_ffff, ones, ones, ones]);
                s.fpu.avx512.k[1] = k;
            });
            assert_eq!(b.one(divide), expected, "{k:x}");
            assert_eq!(
                b.cpu.state().fpu.mxcsr & 0x3f,
                if expected.is_ok() { 0 } else { 4 },
                "{k:x}"
            );
        }
    }
}

/// Words in four quarters.
fn words(of: impl Fn(usize) -> u16) -> [u128; 4] {
    [0, 1, 2, 3].map(|q| (0..8).map(|i| u128::from(of(8 * q + i)) << (16 * i)).sum())
}

// covers: cpu/avx512-rounding
#[test]
fn of_half_precision_each_mask_bit_is_a_word_and_of_complex_numbers_two() {
    const ONE: u16 = 0x3c00;
    let zero = |at: usize| words(move |i| if i == at { 0 } else { ONE });
    for vectors in WAYS {
        let divide: Code = |a| a.vdivph(zmm1.k1(), zmm2, zmm3);
        let product: Code = |a| a.vfmulcph(zmm1.k1().z(), zmm2, zmm3);
        for (k, expected) in [(!(1_u64 << 21), Ok(())), (1 << 21, Err(XM))] {
            let mut b = machine(vectors);
            b.state(|s| {
                s.cr4.set_osxmmexcpt(true);
                s.fpu.mxcsr = 0x1f80 & !(1 << 9);
                s.fpu.set_zmm(2, zero(32));
                s.fpu.set_zmm(3, zero(21));
                s.fpu.avx512.k[1] = k;
            });
            assert_eq!(b.one(divide), expected, "{k:x}");
            let raised = if expected.is_ok() { 0 } else { 4 };
            assert_eq!(b.cpu.state().fpu.mxcsr & 0x3f, raised, "{k:x}");
        }
        // Element 10 has words 20 and 21: (1 + i) times 1 is 1 + i, and times 1 + i is 2i.
        let mut b = machine(vectors);
        b.state(|s| {
            s.fpu.set_zmm(2, zero(32));
            s.fpu.set_zmm(3, zero(21));
            s.fpu.avx512.k[1] = 0x0c00;
        });
        assert_eq!(b.one(product), Ok(()));
        let expected = words(|i| match i {
            20 | 21 => ONE,
            23 => 0x4000,
            _ => 0,
        });
        assert_eq!(b.cpu.state().fpu.zmm(1), expected);
    }
}

// covers: portable/half-precision
#[test]
fn half_precision_is_converted_as_the_hosts_f16c_does() {
    if !std::arch::is_x86_feature_detected!("f16c") {
        skipped(
            "half_precision_is_converted_as_the_hosts_f16c_does",
            "this host's CPU has no F16C",
        );
        return;
    }
    let (mut host, mut tables) = (machine(Vectors::Host), machine(Vectors::Portable));
    let mut both = |theirs: Code, ours: Code, operand: [u128; 2], mxcsr: u32| {
        [(&mut host, theirs), (&mut tables, ours)].map(|(b, code)| {
            b.state(|s| {
                s.fpu.mxcsr = mxcsr;
                s.fpu.set_zmm(2, [operand[0], operand[1], 0, 0]);
            });
            assert_eq!(b.one(code), Ok(()));
            let fpu = b.cpu.state().fpu;
            (fpu.zmm(1), fpu.mxcsr & 0x3f)
        })
    };
    let flushes = [0, 1 << 6, 1 << 15, 1 << 6 | 1 << 15];
    // All halves. Other than F16C's instruction this one flags denormals, whatever DAZ says.
    for at in (0..0x2000_u16).map(|n| 8 * n) {
        let operand = [words(|i| at + i as u16 % 8)[0], 0];
        let mxcsr = MASKED | flushes[usize::from(at >> 3) % 4];
        let [theirs, ours] = both(
            |a| a.vcvtph2ps(ymm1, xmm2),
            |a| a.vcvtph2psx(ymm1, xmm2),
            operand,
            mxcsr,
        );
        let denormal = (at..=at + 7).any(|half| half & 0x7c00 == 0 && half & 0x3ff != 0);
        let flags = theirs.1 | if denormal { DE } else { 0 };
        assert_eq!(ours, (theirs.0, flags), "{at:x}");
    }
    // Singles at each half, in the middle of it and the next one, and next to these; rounded in each direction.
    for half in (0..=0x7c00_u32).step_by(5) {
        let single = match half >> 10 {
            0 => (half as f32 * 2f32.powi(-24)).to_bits(),
            exponent => (exponent + 112) << 23 | (half & 0x3ff) << 13,
        };
        let step = match half {
            0..0x400 => (2f32.powi(-25)).to_bits(),
            _ => 0x1000,
        };
        let middle = if half < 0x400 {
            (f32::from_bits(single) + f32::from_bits(step)).to_bits()
        } else {
            single + step
        };
        let next = |bits: u32, by: i32| bits.wrapping_add_signed(by) ^ (half & 1) << 31;
        let singles = [
            next(single, 0),
            next(single, 1),
            next(single, -1),
            next(middle, 0),
            next(middle, 1),
            next(middle, -1),
            half << 16 | 0x7f80_0001,
            half * 3,
        ];
        let operand = [lanes([singles[0], singles[1], singles[2], singles[3]]), 0];
        let other = [lanes([singles[4], singles[5], singles[6], singles[7]]), 0];
        let mxcsr = MASKED | flushes[half as usize >> 2 & 3] | (half & 3) << 13;
        for operand in [operand, other] {
            let [theirs, ours] = both(
                |a| a.vcvtps2ph(xmm1, xmm2, 4),
                |a| a.vcvtps2phx(xmm1, xmm2),
                operand,
                mxcsr,
            );
            assert_eq!(ours, theirs, "{half:x}: {operand:x?}, MXCSR {mxcsr:x}");
        }
    }
}

// covers: cpu/avx512-approximations
#[test]
fn approximations_are_those_that_intel_published() {
    for vectors in WAYS {
        // Each of 64 segments of the fraction, at four places, with four exponents and both signs: a checksum (FNV-1a, a result a round) of
        // what the functions RCP14S of Intel's "Reference Implementations for IA Approximation Instructions VRCP14, VRSQRT14, VRCP28,
        // VRSQRT28, and VEXP2" give.
        let approximate: Code = |a| a.vrcp14ss(xmm1, xmm2, xmm3);
        let mut b = machine(vectors);
        b.state(|s| s.fpu.mxcsr = 0x1f80);
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        b.code(approximate);
        let before = b.cpu.state();
        for sign in [0_u32, 1] {
            for exponent in [1_u32, 127, 253, 254] {
                for segment in 0..64_u32 {
                    for tail in [0_u32, 1, 0xffff, 0x1_ffff] {
                        let value = sign << 31 | exponent << 23 | segment << 17 | tail;
                        b.again(&before);
                        b.state(|s| s.fpu.xmm[3] = value.into());
                        b.run(1);
                        let result = b.cpu.state().fpu.xmm[1] as u32;
                        hash = (hash ^ u64::from(result)).wrapping_mul(0x100_0000_01b3);
                    }
                }
            }
        }
        assert_eq!(hash, 0x3458_3ff8_e41e_dd25);
    }
}

// covers: cpu/avx512-state
#[test]
fn vex_instructions_clear_a_register_to_its_end_and_legacy_ones_do_not() {
    for vectors in WAYS {
        let rows: [(&str, Code, bool); 7] = [
            ("vpaddd ymm", |a| a.vpaddd(ymm1, ymm2, ymm3), true),
            ("vmovd", |a| a.vmovd(xmm1, eax), true),
            ("vmovups", |a| a.vmovups(xmm1, xmmword_ptr(rbx)), true),
            ("vzeroupper", |a| a.vzeroupper(), true),
            ("paddd", |a| a.paddd(xmm1, xmm2), false),
            ("vptest", |a| a.vptest(xmm1, xmm2), false),
            ("vpaddd xmm, EVEX", |a| a.evex().vpaddd(xmm1.k1(), xmm2, xmm3), true),
        ];
        for (why, code, clears) in rows {
            for translated in [false, true] {
                let mut b = machine(vectors);
                b.state(|s| {
                    for n in 0..32 {
                        s.fpu.set_zmm(n, counted(n as u32));
                    }
                });
                let times = if translated { 300 } else { 1 };
                for _ in 0..times {
                    b.state(|s| s.fpu.set_zmm(1, counted(1)));
                    assert_eq!(b.one(code), Ok(()), "{why}");
                }
                let fpu = b.cpu.state().fpu;
                let upper = if clears { [0, 0] } else { [counted(1)[2], counted(1)[3]] };
                assert_eq!(fpu.zmm(1)[2..], upper, "{why}");
                assert_eq!(fpu.zmm(17), counted(17), "{why}: registers from 16 up");
            }
        }
    }
}

/// Where the components are in the standard format of the model, which is that of the part.
const OPMASK_AT: u64 = 1088;
const HI256_AT: u64 = 1152;
const HI16_AT: u64 = 1664;

// covers: cpu/avx512-xsave
#[test]
fn xsave_areas_have_the_state_and_xrstor_takes_it_back() {
    for vectors in WAYS {
        let (save, restore): (Code, Code) = (|a| a.xsave64(ptr(rbx)), |a| a.xrstor64(ptr(rbx)));
        let (compact, optimised): (Code, Code) = (|a| a.xsavec64(ptr(rbx)), |a| a.xsaveopt64(ptr(rbx)));
        // Compacted, the components follow AVX's: SDM Vol. 1 13.4.3 "Extended Region of an XSAVE Area".
        for (why, code, places) in [
            ("standard", save, [OPMASK_AT, HI256_AT, HI16_AT]),
            ("optimised", optimised, [OPMASK_AT, HI256_AT, HI16_AT]),
            ("compacted", compact, [832, 896, 1408]),
        ] {
            let mut b = machine(vectors);
            b.write(DATA, &[0; 4096]);
            b.state(|s| {
                (s.gpr[0], s.gpr[2]) = (0xffff_ffff, 0);
                for n in 0..32 {
                    s.fpu.set_zmm(n, counted(n as u32 * 0x100));
                }
                s.fpu.avx512.k = core::array::from_fn(|n| 0xabcd_0000 + n as u64);
            });
            let before = b.cpu.state().fpu;
            assert_eq!(b.one(code), Ok(()), "{why}");
            assert_eq!(
                u64::from_le_bytes(b.read::<8>(DATA + 512)) & ALL,
                ALL & !1 | 1,
                "{why}: XSTATE_BV"
            );
            let read = |at: u64| u128::from_le_bytes(b.read::<16>(DATA + at));
            assert_eq!(
                u64::from_le_bytes(b.read::<8>(DATA + places[0] + 8 * 3)),
                0xabcd_0003,
                "{why}: k3"
            );
            assert_eq!(
                read(places[1] + 32 * 5),
                counted(0x500)[2],
                "{why}: ZMM5's bits 383:256"
            );
            assert_eq!(
                read(places[1] + 32 * 5 + 16),
                counted(0x500)[3],
                "{why}: ZMM5's bits 511:384"
            );
            assert_eq!(
                read(places[2] + 64 * 4 + 32),
                counted(0x1400)[2],
                "{why}: ZMM20's bits 383:256"
            );
            b.state(|s| s.fpu.avx512 = engine::fpu::state::Avx512State::INITIAL);
            assert_eq!(b.one(restore), Ok(()), "{why}");
            assert_eq!(b.cpu.state().fpu.avx512, before.avx512, "{why}");
            // Without its bits in XSTATE_BV the state is initialised.
            b.write(DATA + 512, &[7]);
            assert_eq!(b.one(restore), Ok(()), "{why}");
            let initial = b.cpu.state().fpu;
            assert_eq!(initial.avx512, engine::fpu::state::Avx512State::INITIAL, "{why}");
            assert_eq!(initial.xmm, before.xmm, "{why}");
        }
    }
}

// covers: cpu/avx512-xsave
#[test]
fn state_in_its_initial_configuration_is_left_out() {
    for vectors in WAYS {
        let optimised: Code = |a| a.xsaveopt64(ptr(rbx));
        for (why, k, upper, high, bits) in [
            ("nothing", 0, 0, 0, 0),
            ("opmasks", 1, 0, 0, 1 << 5),
            ("upper halves", 0, 1, 0, 1 << 6),
            ("registers from 16 up", 0, 0, 1, 1 << 7),
        ] {
            let mut b = machine(vectors);
            b.write(DATA, &[0xee; 4096]);
            b.write(DATA + 512, &[0; 64]);
            b.state(|s| {
                (s.gpr[0], s.gpr[2]) = (0xffff_ffff, 0);
                s.fpu.avx512.k[7] = k;
                s.fpu.set_zmm(15, [0, 0, 0, upper]);
                s.fpu.set_zmm(31, [high, 0, 0, 0]);
            });
            assert_eq!(b.one(optimised), Ok(()), "{why}");
            let bv = u64::from_le_bytes(b.read::<8>(DATA + 512));
            assert_eq!(bv & 0xe0, bits, "{why}");
            for (bit, at) in [(5, OPMASK_AT), (6, HI256_AT), (7, HI16_AT)] {
                let written = b.read::<1>(DATA + at) != [0xee];
                assert_eq!(written, bits >> bit & 1 != 0, "{why}: component {bit}");
            }
        }
    }
}

// covers: cpu/avx512-xsave
#[test]
fn outside_64_bit_mode_there_are_eight_registers() {
    for vectors in WAYS {
        let (save, restore): (Code, Code) = (|a| a.xsave(ptr(ebx)), |a| a.xrstor(ptr(ebx)));
        let mut b = protected(vectors);
        b.write(DATA, &[0xee; 4096]);
        b.write(DATA + 512, &[0; 64]);
        b.state(|s| {
            (s.gpr[0], s.gpr[2]) = (0xffff_ffff, 0);
            for n in 0..32 {
                s.fpu.set_zmm(n, counted(n as u32));
            }
        });
        assert_eq!(b.one(save), Ok(()));
        assert_ne!(b.read::<32>(DATA + HI256_AT + 7 * 32), [0xee; 32], "ZMM7");
        assert_eq!(b.read::<32>(DATA + HI256_AT + 8 * 32), [0xee; 32], "ZMM8");
        assert_eq!(b.read::<64>(DATA + HI16_AT), [0xee; 64], "ZMM16");
        b.write(DATA + 512, &[0; 1]);
        assert_eq!(b.one(restore), Ok(()));
        let fpu = b.cpu.state().fpu;
        assert_eq!(fpu.zmm(7), [0; 4], "ZMM7 is initialised");
        assert_eq!(fpu.zmm(8), counted(8), "ZMM8 is not");
        assert_eq!(fpu.zmm(16), counted(16), "nor is ZMM16");
    }
}

// covers: cpu/avx512-xsave
#[test]
fn xcr0_has_the_state_as_a_whole() {
    for vectors in WAYS {
        let set: Code = |a| a.xsetbv();
        for (value, sound) in [
            (0xe7, true),
            (0x07, true),
            (0x01, true),
            (0xe3, false),
            (0xe1, false),
            (0x27, false),
            (0xa7, false),
            (0xc7, false),
            (0x2e7, true),
        ] {
            let mut b = machine(vectors);
            b.state(|s| (s.gpr[0], s.gpr[1], s.gpr[2]) = (value, 0, 0));
            assert_eq!(b.one(set), if sound { Ok(()) } else { Err(GP) }, "{value:#x}");
            assert_eq!(b.cpu.state().xcr0, if sound { value } else { ALL }, "{value:#x}");
        }
    }
}

/// Lanes of single precision or doublewords, the lowest first.
fn lanes(v: [u32; 4]) -> u128 {
    v.iter().rev().fold(0, |all, &lane| all << 32 | u128::from(lane))
}

/// XMM1 and MXCSR's flags after an instruction on XMM1 to XMM3.
fn after(vectors: Vectors, code: Code, operands: [[u32; 4]; 3], mxcsr: u32) -> (u128, u32) {
    let mut b = machine(vectors);
    b.state(|s| {
        s.fpu.mxcsr = mxcsr;
        for (n, operand) in operands.into_iter().enumerate() {
            s.fpu.set_zmm(n + 1, [lanes(operand), 0, 0, 0]);
        }
    });
    assert_eq!(b.one(code), Ok(()));
    let fpu = b.cpu.state().fpu;
    (fpu.xmm[1], fpu.mxcsr & 0x3f)
}

const NONE: [u32; 4] = [0; 4];
const MASKED: u32 = 0x1f80;
const IE: u32 = 1;
const DE: u32 = 2;
const ZE: u32 = 4;
const PE: u32 = 32;
const INDEFINITE: u32 = 0xffc0_0000;

// covers: cpu/avx512-values
#[test]
fn bfloat16_is_as_in_the_manual() {
    for vectors in WAYS {
        // SDM Vol. 2C "VCVTNEPS2BF16": to nearest even, denormals to zero, NaNs quiet; "VCVTNE2PS2BF16": the second source is the lower half.
        let one: Code = |a| a.evex().vcvtneps2bf16(xmm1, xmm2);
        let two: Code = |a| a.evex().vcvtne2ps2bf16(xmm1, xmm2, xmm3);
        let a = [0x3f80_0000, 0x3f80_8000, 0x3f81_8000, 0x7f80_0001];
        let b = [0x0040_0000, 0x807f_ffff, 0x7f7f_ffff, 0xff80_0000];
        let (of_a, of_b) = ([0x3f80_3f80, 0x7fc0_3f82], [0x8000_0000, 0xff80_7f80]);
        // Neither consults MXCSR nor updates it.
        for mxcsr in [MASKED, MASKED | 3 << 13, 0] {
            let alone = lanes([of_a[0], of_a[1], 0, 0]);
            assert_eq!(after(vectors, one, [NONE, a, NONE], mxcsr), (alone, 0));
            let both = lanes([of_b[0], of_b[1], of_a[0], of_a[1]]);
            assert_eq!(after(vectors, two, [NONE, a, b], mxcsr), (both, 0));
        }
        // SDM Vol. 2C "VDPBF16PS": the upper product, then the lower one, with a rounding each; NaNs of the lower ones come first.
        let dot: Code = |a| a.evex().vdpbf16ps(xmm1, xmm2, xmm3);
        let c = [0x3f80_0000, 0x4b80_0000, 0, 0];
        let a = [0x4000_3f80, 0x3f80_3f80, 0x7fc2_7fc1, 0x0000_0080];
        let b = [0x4040_4000, 0x3f80_3f80, 0x3f80_3f80, 0x0000_3f00];
        let sums = lanes([0x4110_0000, 0x4b80_0000, 0x7fc1_0000, 0]);
        assert_eq!(after(vectors, dot, [c, a, b], MASKED | 2 << 13), (sums, 0));
    }
}

// covers: cpu/avx512-values
#[test]
fn values_are_those_of_the_manuals_operations() {
    // Instruction; XMM1, XMM2 and XMM3; the result; MXCSR's flags. The sections are those of SDM Vol. 2C by the instruction's name.
    type Row = (&'static str, Code, [[u32; 4]; 3], [u32; 4], u32);
    let rows: [Row; 17] = [
        (
            "VSCALEFPS: 3 * 2^floor(2.7), 3 * 2^floor(-0.5), infinity by minus infinity, zero by infinity",
            |a| a.vscalefps(xmm1, xmm2, xmm3),
            [
                NONE,
                [0x4040_0000, 0x4040_0000, 0x7f80_0000, 0],
                [0x402c_cccd, 0xbf00_0000, 0xff80_0000, 0x7f80_0000],
            ],
            [0x4140_0000, 0x3fc0_0000, INDEFINITE, INDEFINITE],
            IE,
        ),
        (
            "VGETEXPPS: of 8.5, zero, the least denormal, minus infinity",
            |a| a.vgetexpps(xmm1, xmm2),
            [NONE, [0x4108_0000, 0, 1, 0xff80_0000], NONE],
            [0x4040_0000, 0xff80_0000, 0xc315_0000, 0x7f80_0000],
            DE,
        ),
        (
            "VGETMANTPS: interval from 1 to 2 of 12, -12, zero, minus infinity",
            |a| a.vgetmantps(xmm1, xmm2, 0),
            [NONE, [0x4140_0000, 0xc140_0000, 0, 0xff80_0000], NONE],
            [0x3fc0_0000, 0xbfc0_0000, 0x3f80_0000, 0xbf80_0000],
            0,
        ),
        (
            "VGETMANTPS: interval from 1/2 to 2, NaN where negative, of 12 (an odd exponent), 6, -12, -0",
            |a| a.vgetmantps(xmm1, xmm2, 9),
            [NONE, [0x4140_0000, 0x40c0_0000, 0xc140_0000, 0x8000_0000], NONE],
            [0x3f40_0000, 0x3fc0_0000, INDEFINITE, 0xbf80_0000],
            IE,
        ),
        (
            "VGETMANTPS: interval from 3/4 to 3/2 of 12 and 10",
            |a| a.vgetmantps(xmm1, xmm2, 3),
            [NONE, [0x4140_0000, 0x4120_0000, 0x3f80_0000, 0x3fc0_0000], NONE],
            [0x3f40_0000, 0x3fa0_0000, 0x3f80_0000, 0x3f40_0000],
            0,
        ),
        (
            "VRANGEPS: the lesser magnitude with the sign of the first, the manual's example with 150",
            |a| a.vrangeps(xmm1, xmm2, xmm3, 2),
            [
                NONE,
                [0xc040_0000, 0x4348_0000, 0xc348_0000, 0x7fc0_0001],
                [0x4316_0000, 0x4316_0000, 0x4316_0000, 0x4316_0000],
            ],
            [0xc040_0000, 0x4316_0000, 0xc316_0000, 0x4316_0000],
            0,
        ),
        (
            "VRANGEPS: the lesser with its own sign, of zeros of two signs and of a signaling NaN",
            |a| a.vrangeps(xmm1, xmm2, xmm3, 4),
            [
                NONE,
                [0, 0x8000_0000, 0x3f80_0000, 0xbf80_0000],
                [0x8000_0000, 0, 0x7f80_0001, 0x3f80_0000],
            ],
            [0x8000_0000, 0x8000_0000, 0x7fc0_0001, 0xbf80_0000],
            IE,
        ),
        (
            "VREDUCEPS: of 1.3 what halves leave to nearest, of 1.5, infinity, -0.25",
            |a| a.vreduceps(xmm1, xmm2, 0x10),
            [NONE, [0x3fa6_6666, 0x3fc0_0000, 0x7f80_0000, 0xbe80_0000], NONE],
            [0xbe4c_ccd0, 0, 0, 0xbe80_0000],
            // The differences are exact, so that an Intel CPU (Cascade Lake) flags nothing.
            0,
        ),
        (
            "VREDUCEPS: of 2^-30, 1.5, zero and -0.25 what whole numbers leave upwards; one difference is inexact",
            |a| a.vreduceps(xmm1, xmm2, 2),
            [NONE, [0x3080_0000, 0x3fc0_0000, 0, 0xbe80_0000], NONE],
            [0xbf7f_ffff, 0xbf00_0000, 0, 0xbe80_0000],
            PE,
        ),
        (
            "VRNDSCALEPS: to halves, down",
            |a| a.vrndscaleps(xmm1, xmm2, 0x11),
            [NONE, [0x3fa6_6666, 0xbfa6_6666, 0x7f80_0001, 0x0000_0001], NONE],
            [0x3f80_0000, 0xbfc0_0000, 0x7fc0_0001, 0],
            IE | PE,
        ),
        (
            "VFIXUPIMMPS: a table's responses to zero, one, minus infinity and a positive value, zero raising ZE",
            |a| a.vfixupimmps(xmm1, xmm2, xmm3, 1),
            [
                [0x1234_5678, 0x1234_5678, 0x1234_5678, 0x1234_5678],
                [0, 0x3f80_0000, 0xff80_0000, 0x4000_0000],
                [0x0000_0c00, 0x0000_d000, 0x0006_0000, 0],
            ],
            [0x42b4_0000, 0x3fc9_0fdb, 0xff80_0000, 0x1234_5678],
            ZE,
        ),
        (
            "VCVTPS2UDQ: 2.5 to even, above 2^32, negative, -0.25",
            |a| a.vcvtps2udq(xmm1, xmm2),
            [NONE, [0x4020_0000, 0x4f80_0000, 0xbf80_0000, 0xbe80_0000], NONE],
            [2, u32::MAX, u32::MAX, 0],
            IE | PE,
        ),
        (
            "VCVTUDQ2PS: 2^32 - 1 and 2^24 + 1",
            |a| a.vcvtudq2ps(xmm1, xmm2),
            [NONE, [u32::MAX, 0x0100_0001, 7, 0], NONE],
            [0x4f80_0000, 0x4b80_0000, 0x40e0_0000, 0],
            PE,
        ),
        (
            "VPTERNLOGD: the majority of three",
            |a| a.vpternlogd(xmm1, xmm2, xmm3, 0xe8),
            [[0xff00_ff00; 4], [0xf0f0_f0f0; 4], [0xcccc_cccc; 4]],
            [0xfcc0_fcc0; 4],
            0,
        ),
        (
            "VPERMT2D: of the destination's doublewords, then the third operand's",
            |a| a.vpermt2d(xmm1, xmm2, xmm3),
            [[10, 11, 12, 13], [7, 0, 5, 10], [20, 21, 22, 23]],
            [23, 10, 21, 12],
            0,
        ),
        (
            "VPCONFLICTD",
            |a| a.vpconflictd(xmm1, xmm2),
            [NONE, [5, 6, 5, 5], NONE],
            [0, 0, 1, 5],
            0,
        ),
        (
            "VPSHRDVD: from two doublewords, by counts modulo 32",
            |a| a.vpshrdvd(xmm1, xmm2, xmm3),
            [
                [0x8765_4321, 0x8765_4321, 0x8765_4321, 0x8765_4321],
                [0x0000_00ab, 0x0000_00ab, 0x0000_00ab, 0x0000_00ab],
                [0, 8, 32, 0x0000_0124],
            ],
            [0x8765_4321, 0xab87_6543, 0x8765_4321, 0xb876_5432],
            0,
        ),
    ];
    for vectors in WAYS {
        for (why, code, operands, expected, flags) in rows {
            let (result, raised) = after(vectors, code, operands, MASKED);
            assert_eq!((result, raised), (lanes(expected), flags), "{why}: {result:#x}");
        }
    }
}

/// The instruction of a form on registers 1 to 3 in the order of its operands.
fn on_registers(code: iced_x86::Code, first: Register, immediate: u8) -> Instruction {
    let mut i = Instruction::new();
    i.set_code(code);
    for (n, kind) in code.op_code().op_kinds().iter().enumerate() {
        let n = n as u32;
        if *kind == OpCodeOperandKind::imm8 {
            i.set_op_kind(n, OpKind::Immediate8);
            i.set_immediate8(immediate);
        } else {
            // The count of a shift is in an XMM register.
            let bank = if *kind == OpCodeOperandKind::xmm_or_mem {
                Register::XMM0
            } else {
                first
            };
            i.set_op_kind(n, OpKind::Register);
            i.set_op_register(n, bank + (n + 1));
        }
    }
    i
}

/// Forms of AVX2, FMA, VAES and VPCLMULQDQ on 256 bits that work on each 128 bits alike, and the forms of AVX-512 on 512 bits of the same name.
fn twins() -> Vec<(iced_x86::Code, iced_x86::Code)> {
    use OpCodeOperandKind as K;
    use iced_x86::{Code, CpuidFeature as F, EncodingKind, Mnemonic as M};
    // Lanes that cross blocks, and immediates of which each lane has a bit of its own.
    let otherwise = |mnemonic: M| {
        matches!(
            mnemonic,
            M::Vpermq | M::Vpermpd | M::Vpermd | M::Vpermps | M::Vshufpd | M::Vpermilpd
        )
    };
    let here = |code: &Code| {
        code.cpuid_features().iter().all(|feature| match feature {
            F::AVX | F::AVX2 => std::is_x86_feature_detected!("avx2"),
            F::FMA => std::is_x86_feature_detected!("fma"),
            F::VAES => std::is_x86_feature_detected!("vaes"),
            F::VPCLMULQDQ => std::is_x86_feature_detected!("vpclmulqdq"),
            _ => false,
        })
    };
    let kinds = |code: Code| {
        let vector = |kind: &K| match kind {
            K::ymm_reg | K::ymm_vvvv | K::ymm_or_mem => Some(32),
            K::zmm_reg | K::zmm_vvvv | K::zmm_or_mem => Some(64),
            K::xmm_or_mem => Some(16),
            K::imm8 => Some(0),
            _ => None,
        };
        code.op_code().op_kinds().iter().map(vector).collect::<Option<Vec<_>>>()
    };
    let half = |size: &usize| if *size == 64 { 32 } else { *size };
    let mut twins = Vec::new();
    for wide in Code::values().filter(|code| code.op_code().encoding() == EncodingKind::EVEX) {
        let Some(operands) = kinds(wide).filter(|operands| operands[0] == 64 && operands[1] == 64) else {
            continue;
        };
        let halves: Vec<usize> = operands.iter().map(half).collect();
        let twin = Code::values().find(|code| {
            code.op_code().encoding() == EncodingKind::VEX
                && code.mnemonic() == wide.mnemonic()
                && kinds(*code).as_ref() == Some(&halves)
        });
        twins.extend(
            twin.filter(here)
                .filter(|code| !otherwise(code.mnemonic()))
                .map(|twin| (wide, twin)),
        );
    }
    twins
}

// covers: cpu/avx512-halves
#[test]
fn halves_are_what_avx2_makes_of_them() {
    let twins = twins();
    assert!(
        twins.len() > 150 || !std::is_x86_feature_detected!("avx2"),
        "{} forms",
        twins.len()
    );
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut wide = machine(Vectors::Portable);
    let mut short = machine(Vectors::Host);
    let (wide_start, short_start) = (wide.cpu.state(), short.cpu.state());
    for (code, twin) in twins {
        for round in 0..6 {
            // Integers of all kinds, and values near one in single and in double precision.
            let mut vector = || {
                [0; 4].map(|_: u128| {
                    let bits = u128::from(next()) << 64 | u128::from(next());
                    match round % 3 {
                        0 => bits,
                        1 => {
                            bits & 0x83ff_ffff_83ff_ffff_83ff_ffff_83ff_ffff | 0x3c00_0000_3c00_0000_3c00_0000_3c00_0000
                        }
                        _ => {
                            bits & 0x803f_ffff_ffff_ffff_803f_ffff_ffff_ffff | 0x3fc0_0000_0000_0000_3fc0_0000_0000_0000
                        }
                    }
                })
            };
            let operands = [vector(), vector(), vector()];
            let immediate = next() as u8;
            wide.again(&wide_start);
            wide.state(|s| {
                for (n, value) in operands.iter().enumerate() {
                    s.fpu.set_zmm(n + 1, *value);
                }
            });
            assert_eq!(
                wide.one(|a| a.add_instruction(on_registers(code, Register::ZMM0, immediate))),
                Ok(())
            );
            let (result, flags) = (wide.cpu.state().fpu.zmm(1), wide.cpu.state().fpu.mxcsr);
            let mut expected = [0; 4];
            let mut raised = 0;
            for half in [0, 2] {
                short.again(&short_start);
                short.state(|s| {
                    for (n, value) in operands.iter().enumerate() {
                        // A count of a shift is in the lowest 128 bits, whichever half it is for.
                        let count = twin.op_code().op_kinds().get(n) == Some(&OpCodeOperandKind::xmm_or_mem);
                        let from = if count { 0 } else { half };
                        s.fpu.set_zmm(n + 1, [value[from], value[from + 1], 0, 0]);
                    }
                });
                let instruction = on_registers(twin, Register::YMM0, immediate);
                assert_eq!(short.one(|a| a.add_instruction(instruction)), Ok(()));
                let fpu = short.cpu.state().fpu;
                let quarters = fpu.zmm(1);
                (expected[half], expected[half + 1]) = (quarters[0], quarters[1]);
                raised |= fpu.mxcsr;
            }
            assert_eq!(
                (result, flags),
                (expected, raised),
                "{code:?} of {operands:x?}, {immediate:#x}"
            );
        }
    }
}
