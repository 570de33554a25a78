//! The XSAVE family: formats, headers, which component is written, loaded, initialised or left alone, and what is refused.

use crate::{bench, rig};
use std::sync::OnceLock;

use bench::{Bench, EVERYTHING};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use x86::model::{CpuModel, CpuidRow};
use x86::msr::IA32_XSS;

const DATA: u64 = 0x30_0000;
const OSXSAVE: u64 = 1 << 18;
const COMPACTED: u64 = 1 << 63;
/// Bits of XCR0 and IA32_XSS that the part has, and where the components lie in the standard format.
const ALL: u64 = 0x8307;
const PKRU_AT: u64 = 0xa80;

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
type Fault = (u8, Option<u32>);
const UD: Fault = (6, None);
const NM: Fault = (7, None);
const GP: Fault = (13, Some(0));

/// The processor of the other tests with the whole family: x87, SSE, AVX, PKRU; processor trace (8) and last-branch records (15).
fn part() -> &'static CpuModel {
    static MODEL: OnceLock<CpuModel> = OnceLock::new();
    MODEL.get_or_init(|| {
        let row = |subleaf, regs| CpuidRow {
            leaf: 0xd,
            subleaf: Some(subleaf),
            regs,
        };
        let mut rows = EVERYTHING.cpuid.to_vec();
        rows.retain(|row| row.leaf != 0xd);
        for row in &mut rows {
            match (row.leaf, row.subleaf) {
                (1, _) => row.regs[2] |= 1 << 28,
                (7, Some(0)) => row.regs[2] |= 1 << 3,
                _ => {}
            }
        }
        rows.extend([
            row(0, [0x207, 0x240, 0xa88, 0]),
            row(1, [0xf, 0x240, 0x8100, 0]),
            row(2, [0x100, 0x240, 0, 0]),
            row(8, [0x80, 0, 1, 0]),
            row(9, [8, PKRU_AT as u32, 0, 0]),
            row(15, [0x328, 0, 3, 0]),
        ]);
        rows.sort_by_key(|row| (row.leaf, row.subleaf));
        CpuModel {
            cpuid: rows.leak(),
            ..EVERYTHING
        }
    })
}

/// 64-bit mode with every component enabled and in use, RBX pointing at an area of EEH, EDX:EAX asking for all.
fn machine() -> Bench {
    let mut b = Bench::long_with(part());
    b.state(|s| {
        s.cr4.set_osxsave(true);
        s.xcr0 = 0x207;
        s.msrs.xss = 0x8100;
        s.pkru = 0x5555_0000;
        (s.gpr[0], s.gpr[2], s.gpr[3]) = (0xffff_ffff, 0x7fff_ffff, DATA);
        s.fpu.fninit();
        s.fpu.cw = 0x27f;
        s.fpu.r[7] = 0x3fff_8000_0000_0000_0000;
        s.fpu.xmm = core::array::from_fn(|i| 0x100 + i as u128);
        s.fpu.ymm_hi = core::array::from_fn(|i| 0x200 + i as u128);
        s.fpu.mxcsr = 0x1fa0;
    });
    b.world.components.insert(8, vec![0x88; 128]);
    b.world.components.insert(15, vec![0x15; 0x328]);
    b.write(DATA, &[0xee; 4096]);
    b.write(DATA + 512, &[0; 64]);
    b
}

fn word(b: &Bench, at: u64) -> u64 {
    u64::from_le_bytes(b.read::<8>(at))
}

// covers: cpu/xsave-format
#[test]
fn each_instruction_has_its_format() {
    let (xsave, opt): (Code, Code) = (|a| a.xsave64(ptr(rbx)), |a| a.xsaveopt64(ptr(rbx)));
    let (compact, supervisor): (Code, Code) = (|a| a.xsavec64(ptr(rbx)), |a| a.xsaves64(ptr(rbx)));
    // Instruction; EDX:EAX; XSTATE_BV and XCOMP_BV; where AVX's, PKRU's, PT's and LBR's components are, 0 for nowhere.
    for (why, code, mask, bv, comp, places) in [
        ("xsave", xsave, !0, 0x207, 0, [576, PKRU_AT, 0, 0]),
        ("xsave of x87 and PKRU", xsave, 0x201, 0x201, 0, [0, PKRU_AT, 0, 0]),
        ("xsaveopt", opt, !0, 0x207, 0, [576, PKRU_AT, 0, 0]),
        ("xsavec", compact, !0, 0x207, COMPACTED | 0x207, [576, 832, 0, 0]),
        (
            "xsavec without AVX",
            compact,
            0x203,
            0x203,
            COMPACTED | 0x203,
            [0, 576, 0, 0],
        ),
        (
            "xsaves",
            supervisor,
            !0,
            ALL,
            COMPACTED | ALL,
            [576, 832 + 128, 832, 1024],
        ),
        (
            "xsaves of LBR, which is aligned",
            supervisor,
            0x8200,
            0x8200,
            COMPACTED | 0x8200,
            [0, 576, 0, 640],
        ),
        ("xsaves of nothing", supervisor, 0, 0, COMPACTED, [0; 4]),
    ] {
        let mut b = machine();
        b.state(|s| (s.gpr[0], s.gpr[2]) = (mask & 0xffff_ffff, mask >> 32));
        b.one(code).unwrap();
        assert_eq!(
            (word(&b, DATA + 512), word(&b, DATA + 520)),
            (bv, comp),
            "{why}: header"
        );
        assert_eq!(b.read::<48>(DATA + 528), [0; 48], "{why}: the rest of the header");
        assert_eq!(b.read::<96>(DATA + 416), [0xee; 96], "{why}: bytes 511:416");
        let mut expected = vec![0xee; 4096 - 576];
        let mut put = |at: u64, bytes: &[u8]| {
            if at != 0 {
                expected[at as usize - 576..][..bytes.len()].copy_from_slice(bytes);
            }
        };
        let avx: Vec<u8> = (0..16).flat_map(|i| (0x200 + i as u128).to_le_bytes()).collect();
        put(places[0], &avx);
        put(places[1], &0x5555_0000u64.to_le_bytes());
        put(places[2], &[0x88; 128]);
        put(places[3], &[0x15; 0x328]);
        assert!(b.read::<3520>(DATA + 576) == expected[..], "{why}: the extended region");
        let legacy = mask & 1 != 0;
        assert_eq!(
            b.read::<2>(DATA),
            if legacy { [0x7f, 2] } else { [0xee; 2] },
            "{why}: FCW"
        );
        let sse = mask & 2 != 0;
        assert_eq!(
            word(&b, DATA + 160),
            if sse { 0x100 } else { 0xeeee_eeee_eeee_eeee },
            "{why}: XMM0"
        );
    }
}

// covers: cpu/xsave-init
#[test]
fn what_is_in_its_initial_state_is_not_written() {
    let (xsave, opt): (Code, Code) = (|a| a.xsave(ptr(rbx)), |a| a.xsaveopt(ptr(rbx)));
    let (compact, supervisor): (Code, Code) = (|a| a.xsavec(ptr(rbx)), |a| a.xsaves(ptr(rbx)));
    // Instruction, the old XSTATE_BV; the new one; whether XMM0 and MXCSR are written.
    for (why, code, mxcsr, old, bv, xmm, control) in [
        ("xsave writes all the same", xsave, 0x1f80, !0, !0x207, true, true),
        ("xsaveopt", opt, 0x1f80, 0x207 | 1 << 10, 1 << 10, false, true),
        ("xsavec", compact, 0x1f80, !0, 0, false, false),
        ("xsaves", supervisor, 0x1f80, !0, 0, false, false),
        (
            "MXCSR is no part of it in the standard format",
            opt,
            0x1fa0,
            0,
            0,
            false,
            true,
        ),
        ("but in the compacted one", compact, 0x1fa0, 0, 2, true, true),
    ] {
        let mut b = machine();
        b.state(|s| {
            s.fpu.fninit();
            s.fpu.r = [0; 8];
            (s.fpu.xmm, s.fpu.ymm_hi, s.pkru) = ([0; 16], [0; 16], 0);
            s.fpu.mxcsr = mxcsr;
        });
        b.world.components.clear();
        b.put(DATA + 512, old);
        b.one(code).unwrap();
        assert_eq!(word(&b, DATA + 512), bv, "{why}: XSTATE_BV");
        let untouched = 0xeeee_eeee_eeee_eeee;
        assert_eq!(word(&b, DATA + 160) != untouched, xmm, "{why}: XMM0");
        assert_eq!(word(&b, DATA + 24) != untouched, control, "{why}: MXCSR");
        assert_eq!(word(&b, DATA + 832), untouched, "{why}: beyond");
    }
    // XGETBV with ECX = 1 tells which components are in use: not MXCSR.
    for (why, change, expected) in [
        ("all", (|_| ()) as fn(&mut engine::CpuState), 0x207u64),
        (
            "x87 alone",
            |s| (s.fpu.xmm, s.fpu.ymm_hi, s.pkru) = ([0; 16], [0; 16], 0),
            1,
        ),
        (
            "AVX alone",
            |s| {
                s.fpu.fninit();
                (s.fpu.r, s.fpu.xmm, s.pkru) = ([0; 8], [0; 16], 0);
            },
            4,
        ),
        ("what XCR0 enables", |s| s.xcr0 = 3, 3),
    ] {
        let mut b = machine();
        b.state(|s| {
            change(s);
            s.gpr[1] = 1;
        });
        b.one(|a| a.xgetbv()).unwrap();
        let s = b.cpu.state();
        assert_eq!(s.gpr[2] << 32 | s.gpr[0], expected, "{why}");
    }
}

// covers: cpu/xsave-restore
#[test]
fn each_component_is_loaded_initialised_or_left_alone() {
    for (name, save, load, all) in [
        (
            "standard",
            (|a| a.xsave64(ptr(rbx))) as Code,
            (|a| a.xrstor64(ptr(rbx))) as Code,
            0x207u64,
        ),
        ("compacted", |a| a.xsavec64(ptr(rbx)), |a| a.xrstor64(ptr(rbx)), 0x207),
        ("supervisor", |a| a.xsaves64(ptr(rbx)), |a| a.xrstors64(ptr(rbx)), ALL),
    ] {
        for bv in [0, 1, 2, 4, 6, 0x200, 0x100, 0x8000, ALL] {
            for rfbm in [0, 1, 2, 4, 6, 0x200, 0x100, 0x8000, ALL] {
                let mut b = machine();
                b.one(save).unwrap();
                let saved = b.cpu.state();
                b.put(DATA + 512, bv & all);
                b.state(|s| {
                    s.fpu.cw = 0x37e;
                    s.fpu.r = [7; 8];
                    (s.fpu.xmm, s.fpu.ymm_hi, s.pkru, s.fpu.mxcsr) = ([1; 16], [2; 16], 3, 0x1f81);
                    (s.gpr[0], s.gpr[2]) = (rfbm, 0);
                });
                b.world.components.insert(8, vec![1]);
                b.world.components.insert(15, vec![2]);
                b.one(load).unwrap();
                let s = b.cpu.state();
                let pick = |bit: u64| match (rfbm & all & bit != 0, bv & bit != 0) {
                    (false, _) => 0,
                    (true, true) => 1,
                    (true, false) => 2,
                };
                let why = format!("{name}: XSTATE_BV {bv:x}, asked for {rfbm:x}");
                assert_eq!(
                    (s.fpu.cw, s.fpu.r[7]),
                    [(0x37e, 7), (0x27f, saved.fpu.r[7]), (0x37f, 0)][pick(1)],
                    "{why}: x87"
                );
                assert_eq!(s.fpu.xmm[3], [1, 0x103, 0][pick(2)], "{why}: XMM3");
                assert_eq!(s.fpu.ymm_hi[3], [2, 0x203, 0][pick(4)], "{why}: YMM3");
                assert_eq!(s.pkru, [3, 0x5555_0000, 0][pick(0x200)], "{why}: PKRU");
                let mxcsr = match (name, pick(2)) {
                    ("standard", _) => {
                        if rfbm & 6 != 0 {
                            0x1fa0
                        } else {
                            0x1f81
                        }
                    }
                    (_, loaded) => [0x1f81, 0x1fa0, 0x1f80][loaded],
                };
                assert_eq!(s.fpu.mxcsr, mxcsr, "{why}: MXCSR");
                let unit = |n: u32| b.world.components.get(&n).map(|state| state[0]);
                assert_eq!(unit(8), [Some(1), Some(0x88), None][pick(0x100)], "{why}: PT");
                assert_eq!(unit(15), [Some(2), Some(0x15), None][pick(0x8000)], "{why}: LBR");
            }
        }
    }
}

// covers: cpu/xsave-header
#[test]
fn what_an_area_may_not_say() {
    let (user, supervisor): (Code, Code) = (|a| a.xrstor(ptr(rbx)), |a| a.xrstors(ptr(rbx)));
    let compacted = |bits: u64| COMPACTED | bits;
    // XSTATE_BV, XCOMP_BV, a byte of the area and its value.
    for (why, code, bv, comp, byte, expected) in [
        ("standard", user, 7, 0, None, Ok(())),
        ("a component that XCR0 does not enable", user, 0xf, 0, None, Err(GP)),
        ("one of IA32_XSS", user, 0x100, 0, None, Err(GP)),
        ("XCOMP_BV without bit 63", user, 7, 7, None, Err(GP)),
        ("bytes 23:16", user, 7, 0, Some((535, 1)), Err(GP)),
        ("bytes 63:24 are not looked at", user, 7, 0, Some((536, 1)), Ok(())),
        ("a reserved bit of MXCSR", user, 7, 0, Some((26, 1)), Err(GP)),
        ("also if SSE is initialised", user, 0, 0, Some((26, 1)), Err(GP)),
        ("compacted", user, 7, compacted(7), None, Ok(())),
        (
            "compacted, less than the format has",
            user,
            1,
            compacted(7),
            None,
            Ok(()),
        ),
        (
            "compacted, more than the format has",
            user,
            7,
            compacted(3),
            None,
            Err(GP),
        ),
        ("compacted, a format beyond XCR0", user, 0, compacted(8), None, Err(GP)),
        (
            "compacted, a format with IA32_XSS",
            user,
            0,
            compacted(0x100),
            None,
            Err(GP),
        ),
        (
            "compacted, bit 63 of XSTATE_BV",
            user,
            COMPACTED,
            compacted(7),
            None,
            Err(GP),
        ),
        ("compacted, bytes 63:16", user, 7, compacted(7), Some((575, 1)), Err(GP)),
        (
            "compacted, MXCSR of a component that is not loaded",
            user,
            1,
            compacted(7),
            Some((26, 1)),
            Ok(()),
        ),
        (
            "compacted, MXCSR of one that is",
            user,
            2,
            compacted(7),
            Some((26, 1)),
            Err(GP),
        ),
        ("XRSTORS of the standard format", supervisor, 7, 0, None, Err(GP)),
        ("XRSTORS", supervisor, 0x107, compacted(0x107), None, Ok(())),
        (
            "XRSTORS, a format beyond both",
            supervisor,
            0,
            compacted(0x400),
            None,
            Err(GP),
        ),
        (
            "XRSTORS, a state that its unit refuses",
            supervisor,
            0x100,
            compacted(0x107),
            Some((832, 0xff)),
            Err(GP),
        ),
    ] {
        let mut b = machine();
        b.write(DATA, &[0; 4096]);
        b.write(DATA + 24, &[0x80, 0x1f]);
        b.put(DATA + 512, bv);
        b.put(DATA + 520, comp);
        if let Some((at, value)) = byte {
            b.write(DATA + at, &[value]);
        }
        let (before, units) = (b.cpu.state(), b.world.components.clone());
        assert_eq!(b.one(code), expected, "{why}");
        if expected.is_err() {
            let after = b.cpu.state();
            // MXCSR of the compacted format is found wanting only after x87 and SSE state, as on Intel's processors.
            if why == "compacted, MXCSR of one that is" {
                assert_eq!(after.fpu.mxcsr, before.fpu.mxcsr, "{why}");
                assert_eq!((after.fpu.xmm, after.fpu.cw), ([0; 16], 0x37f), "{why}");
            } else {
                assert_eq!(
                    (after.fpu, after.pkru),
                    (before.fpu, before.pkru),
                    "{why}: nothing is loaded"
                );
            }
            // Last-branch records are loaded before processor trace, and stay so when that is refused, which SDM Vol. 1 13.12
            // "Operation of XRSTORS" allows.
            let trace = |components: &std::collections::BTreeMap<u32, Vec<u8>>| components.get(&8).cloned();
            assert_eq!(
                trace(&b.world.components),
                trace(&units),
                "{why}: nor into the trace unit"
            );
        }
    }
    // A part without XSAVEC knows no compacted format.
    let mut b = Bench::long();
    b.state(|s| {
        s.cr4.set_osxsave(true);
        (s.xcr0, s.gpr[3], s.gpr[0]) = (7, DATA, 7);
    });
    b.put(DATA + 520, compacted(7));
    b.put(DATA + 24, 0x1f80);
    assert_eq!(b.one(user), Err(GP));
}

// covers: cpu/xsave-faults
#[test]
fn who_may_and_where() {
    let saves: [Code; 6] = [
        |a| a.xsave(ptr(rbx)),
        |a| a.xsaveopt(ptr(rbx)),
        |a| a.xsavec(ptr(rbx)),
        |a| a.xsaves(ptr(rbx)),
        |a| a.xrstor(ptr(rbx)),
        |a| a.xrstors(ptr(rbx)),
    ];
    for (i, code) in saves.into_iter().enumerate() {
        let privileged = matches!(i, 3 | 5);
        let write = if i < 4 { 2 } else { 0 };
        type Change = fn(&mut Bench);
        let rows: [(&str, Change, Result<(), Fault>); 8] = [
            ("as it is", |_| (), Ok(())),
            ("without OSXSAVE", |b| b.state(|s| s.cr4.set_osxsave(false)), Err(UD)),
            ("TS", |b| b.state(|s| s.cr0.set_ts(true)), Err(NM)),
            (
                "an address that is no multiple of 64",
                |b| b.state(|s| s.gpr[3] += 32),
                Err(GP),
            ),
            ("no memory", |b| b.state(|s| s.gpr[3] = 1 << 39), Err((14, Some(write)))),
            ("a non-canonical address", |b| b.state(|s| s.gpr[3] = 1 << 62), Err(GP)),
            ("ring 3", |b| b.user(), if privileged { Err(GP) } else { Ok(()) }),
            (
                "nothing asked for",
                |b| b.state(|s| (s.gpr[0], s.gpr[2]) = (0, 0)),
                Ok(()),
            ),
        ];
        for (why, change, expected) in rows {
            let mut b = machine();
            if i == 5 {
                b.put(DATA + 520, COMPACTED | ALL);
            }
            b.write(DATA + 24, &[0x80, 0x1f, 0, 0]);
            change(&mut b);
            let expected = match expected {
                Err((14, Some(code))) if b.cpu.state().cpl == 3 => Err((14, Some(code | 4))),
                other => other,
            };
            assert_eq!(b.one(code), expected, "instruction {i}: {why}");
        }
    }
    // A component behind the end of memory faults when it is asked for, and then nothing is written.
    let mut b = machine();
    let edge = 0x60_0000u64;
    b.put(rig::TABLES + 0x2000 + (edge >> 21) * 8, 0);
    b.write(edge - 576, &[0xee; 512]);
    b.state(|s| s.gpr[3] = edge - 576);
    assert_eq!(b.one(|a| a.xsave(ptr(rbx))), Err((14, Some(2))));
    // The last byte of what is asked for, PKRU's, is looked at first.
    let last = edge - 576 + 2695;
    assert_eq!((b.cpu.state().cr2, b.read::<512>(edge - 576)), (last, [0xee; 512]));
    b.state(|s| s.gpr[0] = 3);
    b.one(|a| a.xsave(ptr(rbx))).unwrap();
}

// covers: cpu/xsave-registers
#[test]
fn xcr0_and_xss_take_what_the_part_has() {
    for (why, value, expected) in [
        ("x87", 1u64, Ok(())),
        ("SSE, AVX", 7, Ok(())),
        ("PKRU", 0x201, Ok(())),
        ("without x87", 6, Err(GP)),
        ("AVX without SSE", 5, Err(GP)),
        ("MPX", 0x1f, Err(GP)),
        ("AVX-512", 0xe7, Err(GP)),
        ("a component of IA32_XSS", 0x101, Err(GP)),
        ("bit 63", 1 << 63 | 1, Err(GP)),
    ] {
        let mut b = machine();
        b.state(|s| (s.gpr[0], s.gpr[1], s.gpr[2]) = (value & 0xffff_ffff, 0, value >> 32));
        assert_eq!(b.one(|a| a.xsetbv()), expected, "{why}");
        assert_eq!(
            b.cpu.state().xcr0,
            if expected.is_ok() { value } else { 0x207 },
            "{why}"
        );
    }
    for (why, value, expected) in [
        ("nothing", 0u64, Ok(())),
        ("PT and LBR", 0x8100, Ok(())),
        ("a component of XCR0", 1, Err(GP)),
        ("CET", 0x1800, Err(GP)),
        ("bit 63", 1 << 63, Err(GP)),
    ] {
        let mut b = machine();
        b.state(|s| (s.gpr[0], s.gpr[1], s.gpr[2]) = (value & 0xffff_ffff, IA32_XSS as u64, value >> 32));
        assert_eq!(b.one(|a| a.wrmsr()), expected, "{why}");
        assert_eq!(
            b.cpu.state().msrs.xss,
            if expected.is_ok() { value } else { 0x8100 },
            "{why}"
        );
        b.state(|s| s.gpr[1] = IA32_XSS as u64);
        b.one(|a| a.rdmsr()).unwrap();
        assert_eq!(b.cpu.state().gpr[0], b.cpu.state().msrs.xss, "{why}");
    }
    // Only a part with XSAVES has the register.
    let mut b = Bench::long();
    b.state(|s| s.gpr[1] = IA32_XSS as u64);
    assert_eq!(b.one(|a| a.rdmsr()), Err(GP));
    // XGETBV knows XCR0, and XINUSE where the part says so.
    for (model, index, expected) in [(part(), 2, Err(GP)), (&EVERYTHING, 1, Err(GP)), (part(), 1, Ok(()))] {
        let mut b = Bench::long_with(model);
        b.state(|s| (s.cr4, s.gpr[1]) = ((s.cr4.into_bits() | OSXSAVE).into(), index));
        assert_eq!(b.one(|a| a.xgetbv()), expected, "XCR{index}");
    }
}

// covers: cpu/xsave-cpuid
#[test]
fn leaf_0dh_tells_the_sizes_of_what_is_enabled() {
    // XCR0, IA32_XSS; EBX of subleaf 0: standard; of subleaf 1: compacted, of both registers' components.
    for (xcr0, xss, standard, compacted) in [
        (1, 0, 576, 576),
        (3, 0, 576, 576),
        (7, 0, 832, 832),
        (0x201, 0, 0xa88, 584),
        (0x207, 0, 0xa88, 840),
        (7, 0x100, 832, 832 + 128),
        (0x203, 0x8000, 0xa88, 640 + 0x328),
        (0x207, 0x8100, 0xa88, 1024 + 0x328),
    ] {
        let mut b = machine();
        for (subleaf, expected) in [(0, standard), (1, compacted)] {
            b.state(|s| {
                (s.xcr0, s.msrs.xss) = (xcr0, xss);
                (s.gpr[0], s.gpr[1]) = (0xd, subleaf);
            });
            b.one(|a| a.cpuid()).unwrap();
            assert_eq!(
                b.cpu.state().gpr[3],
                expected,
                "XCR0 {xcr0:x}, IA32_XSS {xss:x}, subleaf {subleaf}"
            );
        }
    }
}

// covers: cpu/xsave-format
#[test]
fn outside_64_bit_mode_there_are_eight_registers() {
    let mut b = Bench::protected_with(part());
    b.state(|s| {
        s.cr4.set_osxsave(true);
        s.xcr0 = 7;
        (s.gpr[0], s.gpr[2], s.gpr[3]) = (7, 0, DATA);
        s.fpu.xmm = [1; 16];
        s.fpu.ymm_hi = [2; 16];
    });
    b.write(DATA, &[0xee; 832]);
    b.write(DATA + 512, &[0; 64]);
    b.one(|a| a.xsave(ptr(ebx))).unwrap();
    let word = |at: u64| u64::from_le_bytes(b.read::<8>(DATA + at));
    assert_eq!((word(160 + 7 * 16), word(160 + 8 * 16)), (1, 0xeeee_eeee_eeee_eeee));
    assert_eq!((word(576 + 7 * 16), word(576 + 8 * 16)), (2, 0xeeee_eeee_eeee_eeee));
    b.write(DATA + 160, &[3; 256]);
    b.write(DATA + 576, &[4; 256]);
    b.one(|a| a.xrstor(ptr(ebx))).unwrap();
    let f = b.cpu.state().fpu;
    assert_eq!((f.xmm[7] as u8, f.xmm[8]), (3, 1));
    assert_eq!((f.ymm_hi[7] as u8, f.ymm_hi[8]), (4, 2));
}
