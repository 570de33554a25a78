//! Integer instructions, row by row.

use crate::{bench, rig};
use bench::Bench;
use engine::{CpuState, EngineOptions, Exit, undefined};
use rig::{CODE, Rig};

const CF: u64 = 1;
const PF: u64 = 4;
const AF: u64 = 0x10;
const ZF: u64 = 0x40;
const SF: u64 = 0x80;
const OF: u64 = 0x800;
const STATUS: u64 = CF | PF | AF | ZF | SF | OF;

/// Operands in memory stand here.
const DATA: u64 = 0x30_0000;

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RBX: usize = 3;
const RDI: usize = 7;

/// A rig with `code` and the registers given; the rest of the registers are as `Rig::new` leaves them.
fn machine(code: &[u8], regs: &[(usize, u64)], flags: u64) -> Rig {
    let mut rig = Rig::new();
    load(&mut rig, code, regs, flags);
    rig
}

fn load(rig: &mut Rig, code: &[u8], regs: &[(usize, u64)], flags: u64) {
    rig.write(CODE, code);
    let mut s = rig.cpu.state();
    s.rip = CODE;
    for &(r, v) in regs {
        s.gpr[r] = v;
    }
    s.rflags = (2 | flags).into();
    rig.cpu.set_state(&s);
}

/// Runs one instruction, which must retire.
fn one(code: &[u8], regs: &[(usize, u64)], flags: u64) -> CpuState {
    let mut rig = machine(code, regs, flags);
    step(&mut rig, code.len() as u64)
}

fn step(rig: &mut Rig, len: u64) -> CpuState {
    let before = rig.cpu.state().rip;
    assert_eq!(rig.run(1), Exit::Budget);
    let s = rig.cpu.state();
    assert_eq!(s.rip, before + len, "the instruction did not retire");
    s
}

// covers: cpu/int-shift, cpu/undefined
#[test]
fn shifts_and_rotations_agree_with_the_table_of_pins() {
    let mut rig = Rig::new();
    use undefined::Shift::*;
    // Group 2 of the opcode map: ModR/M's reg field.
    for (reg, op) in [
        (0, Rol),
        (1, Ror),
        (2, Rcl),
        (3, Rcr),
        (4, Shl),
        (5, Shr),
        (6, Shl),
        (7, Sar),
    ] {
        for bits in [8u32, 16, 32, 64] {
            let prefix: &[u8] = match bits {
                16 => &[0x66],
                64 => &[0x48],
                _ => &[],
            };
            let wide = (bits != 8) as u8;
            let forms = [
                (0xc0 | wide, 0xc0 | reg << 3 | 3, true),  // register, imm8
                (0xd2 | wide, 0xc0 | reg << 3 | 3, false), // register, CL
                (0xd0 | wide, 0xc0 | reg << 3 | 3, false), // register, 1
                (0xc0 | wide, reg << 3 | 7, true),         // memory, imm8
                (0xd2 | wide, reg << 3 | 7, false),        // memory, CL
                (0xd0 | wide, reg << 3 | 7, false),        // memory, 1
            ];
            let mask = u64::MAX >> (64 - bits);
            for (opcode, modrm, imm) in forms {
                for value in [
                    0x8000_0000_8000_8081,
                    0x0123_4567_89ab_cdef,
                    u64::MAX,
                    0x4000_0000_4000_4040,
                ] {
                    for count in [0u8, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 255] {
                        let by_one = opcode & 0xfe == 0xd0;
                        if by_one && count != 1 {
                            continue;
                        }
                        for flags in [0, STATUS] {
                            let mut code = prefix.to_vec();
                            code.extend([opcode, modrm]);
                            if imm {
                                code.push(count);
                            }
                            load(
                                &mut rig,
                                &code,
                                &[(RBX, value), (RCX, 0xffff_ff00 | count as u64), (RDI, DATA)],
                                flags,
                            );
                            rig.write(DATA, &value.to_le_bytes());
                            let s = step(&mut rig, code.len() as u64);
                            let (r, mut f) = undefined::shift(op, bits, value, 0, count, flags);
                            // The one form that leaves OF alone.
                            let masked = count & if bits == 64 { 63 } else { 31 };
                            if matches!(op, Rol | Ror) && imm && modrm >= 0xc0 && masked != 1 {
                                f = f & !OF | flags & OF;
                            }
                            let expected = match (modrm >= 0xc0, bits) {
                                (true, 32) => r,
                                _ => value & !mask | r,
                            };
                            let got = if modrm >= 0xc0 {
                                s.gpr[RBX]
                            } else {
                                u64::from_le_bytes(rig.read(DATA))
                            };
                            let what = format!(
                                "{op:?} {bits} {value:x} by {count}, flags {flags:x}, form {opcode:x} {modrm:x}"
                            );
                            assert_eq!(got, expected, "{what}");
                            assert_eq!(s.rflags.into_bits() & STATUS, f, "flags of {what}");
                        }
                    }
                }
            }
        }
    }
}

// covers: cpu/int-shift, cpu/undefined
#[test]
fn double_shifts_agree_with_the_table_of_pins() {
    let mut rig = Rig::new();
    use undefined::Shift::*;
    for (op, opcode) in [(Shld, 0xa4u8), (Shrd, 0xac)] {
        for bits in [16u32, 32, 64] {
            let prefix: &[u8] = match bits {
                16 => &[0x66],
                64 => &[0x48],
                _ => &[],
            };
            let mask = u64::MAX >> (64 - bits);
            let (a, b) = (0x8123_4567_89ab_cdef_u64, 0xfedc_ba98_7654_3211_u64);
            for modrm in [0xd3u8, 0x17] {
                for by_cl in [false, true] {
                    for count in 0..=70u8 {
                        let mut code = prefix.to_vec();
                        code.extend([0x0f, opcode + by_cl as u8, modrm]);
                        if !by_cl {
                            code.push(count);
                        }
                        load(
                            &mut rig,
                            &code,
                            &[(RBX, a), (RDX, b), (RCX, count as u64), (RDI, DATA)],
                            STATUS,
                        );
                        rig.write(DATA, &a.to_le_bytes());
                        let s = step(&mut rig, code.len() as u64);
                        let (r, f) = undefined::shift(op, bits, a, b, count, STATUS);
                        let in_register = modrm >= 0xc0;
                        let expected = if in_register && bits == 32 { r } else { a & !mask | r };
                        let got = if in_register {
                            s.gpr[RBX]
                        } else {
                            u64::from_le_bytes(rig.read(DATA))
                        };
                        assert_eq!(
                            (got, s.rflags.into_bits() & STATUS),
                            (expected, f),
                            "{op:?} {bits} by {count}, {modrm:x}"
                        );
                    }
                }
            }
        }
    }
}

// covers: cpu/int-shift
#[test]
fn shifts_by_hand() {
    for (code, rbx, flags, expected, after, why) in [
        (
            &[0xd1, 0xe3][..],
            0xffff_ffff_8000_0001,
            0,
            2,
            CF | OF,
            "SHL EBX, 1: the upper half is cleared",
        ),
        (&[0xd1, 0xeb], 3, 0, 1, CF, "SHR EBX, 1"),
        (&[0xd1, 0xfb], 0x8000_0000, 0, 0xc000_0000, SF | PF, "SAR EBX, 1"),
        (
            &[0xc1, 0xe3, 0x20],
            0xffff_ffff_0000_0001,
            STATUS,
            1,
            STATUS,
            "by 32: no flag, but the upper half is cleared",
        ),
        (
            &[0x66, 0xc1, 0xe3, 0x20],
            0xffff_ffff_0000_0001,
            ZF,
            0xffff_ffff_0000_0001,
            ZF,
            "16 bits: nothing",
        ),
        (
            &[0xd0, 0xd7],
            0x8000,
            CF,
            0x0100,
            CF | OF,
            "RCL BH, 1: CF comes in, the highest bit goes out",
        ),
        (
            &[0xd0, 0xdb],
            1,
            CF,
            0x80,
            CF | OF,
            "RCR BL, 1: OF is CF and the highest bit before",
        ),
    ] {
        let s = one(code, &[(RBX, rbx)], flags);
        assert_eq!((s.gpr[RBX], s.rflags.into_bits() & STATUS), (expected, after), "{why}");
    }
}

// covers: cpu/int-muldiv
#[test]
fn multiplication() {
    for (code, rax, rbx, rdx, low, high, after, why) in [
        (&[0xf6, 0xe3][..], 0x55ff, 2, 7, 0x01fe, 7, CF | OF | SF, "MUL BL: AX"),
        (&[0xf6, 0xe3], 0x5503, 2, 7, 0x0006, 7, PF, "MUL BL: no carry"),
        (&[0xf6, 0xeb], 0x00ff, 2, 7, 0xfffe, 7, SF, "IMUL BL: -1 by 2"),
        (
            &[0xf6, 0xeb],
            0x0080,
            0x80,
            7,
            0x4000,
            7,
            CF | OF | PF,
            "IMUL BL: -128 by -128",
        ),
        (
            &[0x66, 0xf7, 0xe3],
            0x1_8000,
            2,
            0xaaaa_0000,
            0x1_0000,
            0xaaaa_0001,
            CF | OF | PF,
            "MUL BX: DX:AX",
        ),
        (
            &[0xf7, 0xe3],
            0xffff_ffff,
            0xffff_ffff,
            0,
            1,
            0xffff_fffe,
            CF | OF,
            "MUL EBX",
        ),
        (
            &[0xf7, 0xeb],
            0xffff_ffff,
            0xffff_ffff,
            9,
            1,
            0,
            0,
            "IMUL EBX: -1 by -1",
        ),
        (
            &[0x48, 0xf7, 0xe3],
            u64::MAX,
            u64::MAX,
            0,
            1,
            u64::MAX - 1,
            CF | OF,
            "MUL RBX",
        ),
        (
            &[0x48, 0xf7, 0xeb],
            1 << 63,
            u64::MAX,
            0,
            1 << 63,
            0,
            CF | OF | SF | PF,
            "IMUL RBX: the most negative by -1",
        ),
        (
            &[0x48, 0xf7, 0xeb],
            u64::MAX,
            3,
            0,
            (-3i64) as u64,
            u64::MAX,
            SF,
            "IMUL RBX: -1 by 3",
        ),
        (
            &[0x48, 0x0f, 0xaf, 0xc3],
            1 << 62,
            2,
            7,
            1 << 63,
            7,
            CF | OF | SF | PF,
            "IMUL RAX, RBX overflows",
        ),
        (
            &[0x0f, 0xaf, 0xc3],
            0x1_0000,
            0x1_0000,
            7,
            0,
            7,
            CF | OF | PF,
            "IMUL EAX, EBX: ZF stays clear",
        ),
        (
            &[0x6b, 0xc3, 0xfe],
            0,
            3,
            7,
            0xffff_fffa,
            7,
            SF | PF,
            "IMUL EAX, EBX, -2",
        ),
        (
            &[0x66, 0x69, 0xc3, 0x00, 0x80],
            0xffff_0000,
            2,
            7,
            0xffff_0000,
            7,
            CF | OF | PF,
            "IMUL AX, BX, 8000",
        ),
        (
            &[0x48, 0x69, 0xc3, 0, 0, 0, 0x80],
            0,
            2,
            7,
            0xffff_ffff_0000_0000,
            7,
            SF | PF,
            "IMUL RAX, RBX, -80000000",
        ),
    ] {
        let s = one(code, &[(RAX, rax), (RBX, rbx), (RDX, rdx)], STATUS);
        assert_eq!((s.gpr[RAX], s.gpr[RDX]), (low, high), "{why}");
        assert_eq!(s.rflags.into_bits() & STATUS, after, "flags: {why}");
    }
}

// covers: cpu/int-muldiv
#[test]
fn division() {
    for (code, rax, rdx, rbx, expected, why) in [
        (
            &[0xf6, 0xf3][..],
            0x0107,
            0,
            2,
            Some((0x0183, 0)),
            "DIV BL: AL quotient, AH remainder",
        ),
        (&[0xf6, 0xf3], 0x0200, 0, 2, None, "DIV BL: 256 does not fit"),
        (&[0xf6, 0xf3], 0x01ff, 0, 2, Some((0x01ff, 0)), "DIV BL: 255 does"),
        (&[0xf6, 0xf3], 0, 0, 0, None, "by 0"),
        (&[0xf6, 0xfb], 0xff80, 0, 1, Some((0x0080, 0)), "IDIV BL: -128 fits"),
        (&[0xf6, 0xfb], 0xff80, 0, 0xff, None, "IDIV BL: 128 does not"),
        (
            &[0xf6, 0xfb],
            0xfff9,
            0,
            2,
            Some((0xfffd, 0)),
            "IDIV BL: -7 by 2 is -3, -1 left",
        ),
        (
            &[0x66, 0xf7, 0xf3],
            0x5_0001,
            0x7_0001,
            2,
            Some((0x5_8000, 0x7_0001)),
            "DIV BX: DX:AX",
        ),
        (
            &[0xf7, 0xf3],
            0x9_0000_0001,
            1,
            2,
            Some((0x8000_0000, 1)),
            "DIV EBX: EDX:EAX",
        ),
        (&[0xf7, 0xf3], 0, 2, 2, None, "DIV EBX: too big"),
        (
            &[0xf7, 0xfb],
            0,
            0x8000_0000,
            0xffff_ffff,
            None,
            "IDIV EBX: the most negative by -1",
        ),
        (
            &[0xf7, 0xfb],
            (-7i32) as u32 as u64,
            0xffff_ffff,
            (-2i32) as u32 as u64,
            Some((3, 0xffff_ffff)),
            "IDIV EBX: -7 by -2",
        ),
        (
            &[0x48, 0xf7, 0xf3],
            5,
            1,
            2,
            Some(((1 << 63) + 2, 1)),
            "DIV RBX: 128 bits",
        ),
        (&[0x48, 0xf7, 0xf3], 0, 2, 2, None, "DIV RBX: too big"),
        (&[0x48, 0xf7, 0xf3], 0, 0, 0, None, "DIV RBX: by 0"),
        (
            &[0x48, 0xf7, 0xfb],
            (-7i64) as u64,
            u64::MAX,
            2,
            Some(((-3i64) as u64, u64::MAX)),
            "IDIV RBX: -7 by 2",
        ),
        (
            &[0x48, 0xf7, 0xfb],
            1 << 63,
            u64::MAX,
            u64::MAX,
            None,
            "IDIV RBX: 2^63 does not fit",
        ),
        (
            &[0x48, 0xf7, 0xfb],
            1 << 63,
            u64::MAX,
            1,
            Some((1 << 63, 0)),
            "IDIV RBX: -2^63 does",
        ),
        (&[0x48, 0xf7, 0xfb], 0, 0, 0, None, "IDIV RBX: by 0"),
        (
            &[0x48, 0xf7, 0xfb],
            0,
            1 << 63,
            u64::MAX,
            None,
            "IDIV RBX: the most negative",
        ),
    ] {
        let regs = [(RAX, rax), (RDX, rdx), (RBX, rbx)];
        match expected {
            Some(pair) => {
                let s = one(code, &regs, STATUS);
                assert_eq!((s.gpr[RAX], s.gpr[RDX]), pair, "{why}");
                assert_eq!(s.rflags.into_bits() & STATUS, STATUS, "flags keep their values: {why}");
            }
            None => {
                let mut rig = machine(code, &regs, STATUS);
                let before = rig.cpu.state();
                // There are no gates: any exception ends in shutdown.
                assert_eq!(rig.run(1), Exit::Shutdown, "{why}");
                let s = rig.cpu.state();
                assert_eq!(
                    (s.gpr[RAX], s.gpr[RDX], s.rflags.into_bits() & STATUS),
                    (before.gpr[RAX], before.gpr[RDX], STATUS),
                    "{why}"
                );
            }
        }
    }
}

// covers: cpu/int-muldiv, cpu/int-move
#[test]
fn sign_extensions_of_the_accumulator() {
    for (code, rax, rdx, after, why) in [
        (&[0x66, 0x98][..], 0x1111_0080, 5, (0x1111_ff80, 5), "CBW"),
        (&[0x98], 0x1111_1111_0000_8000, 5, (0xffff_8000, 5), "CWDE"),
        (&[0x48, 0x98], 0x8000_0000, 5, (0xffff_ffff_8000_0000, 5), "CDQE"),
        (&[0x66, 0x99], 0x8000, 0x1_0000, (0x8000, 0x1_ffff), "CWD"),
        (&[0x99], 0x8000_0000, u64::MAX, (0x8000_0000, 0xffff_ffff), "CDQ"),
        (
            &[0x99],
            0x7fff_ffff,
            u64::MAX,
            (0x7fff_ffff, 0),
            "CDQ of what is not negative",
        ),
        (&[0x48, 0x99], 1 << 63, 0, (1 << 63, u64::MAX), "CQO"),
    ] {
        let s = one(code, &[(RAX, rax), (RDX, rdx)], STATUS);
        assert_eq!((s.gpr[RAX], s.gpr[RDX]), after, "{why}");
        assert_eq!(s.rflags.into_bits() & STATUS, STATUS, "{why}");
    }
}

/// Memory operands of the tables below, at DATA.
fn with_memory(code: &[u8], regs: &[(usize, u64)], flags: u64, memory: u64) -> (CpuState, u64) {
    let mut rig = machine(code, regs, flags);
    rig.write(DATA, &memory.to_le_bytes());
    let s = step(&mut rig, code.len() as u64);
    (s, u64::from_le_bytes(rig.read(DATA)))
}

// covers: cpu/int-logic, cpu/undefined
#[test]
fn bit_tests() {
    for (code, rbx, rcx, flags, after, carry, why) in [
        (
            &[0x0f, 0xa3, 0xcb][..],
            0x8000_0000,
            63,
            0,
            0x8000_0000,
            true,
            "BT EBX, ECX: the offset modulo 32",
        ),
        (
            &[0x48, 0x0f, 0xa3, 0xcb],
            0x8000_0000,
            63,
            CF,
            0x8000_0000,
            false,
            "BT RBX, RCX",
        ),
        (
            &[0x0f, 0xab, 0xcb],
            0xffff_ffff_0000_0000,
            4,
            0,
            0x10,
            false,
            "BTS EBX, ECX",
        ),
        (
            &[0x66, 0x0f, 0xab, 0xcb],
            0xffff_0000,
            15,
            0,
            0xffff_8000,
            false,
            "BTS BX, CX",
        ),
        (
            &[0x48, 0x0f, 0xb3, 0xcb],
            u64::MAX,
            63,
            0,
            u64::MAX >> 1,
            true,
            "BTR RBX, RCX",
        ),
        (&[0x48, 0x0f, 0xbb, 0xcb], 5, 2, 0, 1, true, "BTC RBX, RCX"),
        (&[0x0f, 0xba, 0xe3, 0x21], 2, 0, 0, 2, true, "BT EBX, 33"),
        (&[0x48, 0x0f, 0xba, 0xeb, 0x3f], 0, 0, 0, 1 << 63, false, "BTS RBX, 63"),
        (&[0x0f, 0xba, 0xf3, 0x00], 3, 0, 0, 2, true, "BTR EBX, 0"),
        (
            &[0x66, 0x0f, 0xba, 0xfb, 0x10],
            0x1_0000,
            0,
            0,
            0x1_0001,
            false,
            "BTC BX, 16: the offset modulo 16",
        ),
    ] {
        for other in [0, OF | SF | ZF | AF | PF] {
            let s = one(code, &[(RBX, rbx), (RCX, rcx)], flags | other);
            assert_eq!(s.gpr[RBX], after, "{why}");
            assert_eq!(
                s.rflags.into_bits() & STATUS,
                other | carry as u64,
                "{why}: only CF changes"
            );
        }
    }
}

// covers: cpu/int-logic, cpu/int-atomic
#[test]
fn bit_tests_reach_outside_their_operand() {
    // The offset in RCX counts from RDI, in operands of the instruction's size, in both directions.
    for (code, rcx, at, bit, why) in [
        (&[0x0f, 0xab, 0x0f][..], 100, 12, 4, "BTS [RDI], ECX"),
        (&[0x48, 0x0f, 0xab, 0x0f], (-1i64) as u64, -8, 63, "BTS [RDI], RCX: -1"),
        (
            &[0x0f, 0xab, 0x0f],
            0x1_ffff_ffff,
            -4,
            31,
            "BTS [RDI], ECX: only 32 bits of the offset count",
        ),
        (
            &[0x66, 0x0f, 0xab, 0x0f],
            0x7_8000,
            -4096,
            0,
            "BTS [RDI], CX: 16 bits of it, signed",
        ),
        (&[0xf0, 0x0f, 0xab, 0x0f], 32 * 5 + 3, 20, 3, "LOCK BTS [RDI], ECX"),
        (
            &[0x0f, 0xba, 0x2f, 0x25],
            0,
            0,
            5,
            "BTS [RDI], 37: an immediate stays inside",
        ),
        (&[0x0f, 0xbb, 0x4f, 0x08], 33, 12, 1, "BTC [RDI+8], ECX"),
    ] {
        let mut rig = machine(code, &[(RCX, rcx), (RDI, DATA)], 0);
        let place = DATA.wrapping_add(at as i64 as u64);
        let s = step(&mut rig, code.len() as u64);
        assert_eq!(u64::from_le_bytes(rig.read(place)), 1 << bit, "{why}");
        assert_eq!(s.rflags.into_bits() & CF, 0, "{why}");
        // The bit is set now; BTS finds it so.
        load(&mut rig, code, &[(RCX, rcx), (RDI, DATA)], 0);
        let s = step(&mut rig, code.len() as u64);
        assert_eq!(s.rflags.into_bits() & CF, CF, "{why}: again");
    }
    // BT only reads: a bit far away, and BTR takes it away.
    let (s, _) = with_memory(&[0x48, 0x0f, 0xa3, 0x0f], &[(RCX, 64 * 10 + 1), (RDI, DATA - 80)], 0, 2);
    assert_eq!(s.rflags.into_bits() & CF, CF);
    let (s, left) = with_memory(&[0x48, 0x0f, 0xb3, 0x0f], &[(RCX, 64 * 10 + 1), (RDI, DATA - 80)], 0, 3);
    assert_eq!((s.rflags.into_bits() & CF, left), (CF, 1));
}

// covers: cpu/int-logic, cpu/undefined, cpu/int-v2
#[test]
fn bit_scans_and_counts() {
    for (code, rbx, rax, after, flags, why) in [
        (&[0x0f, 0xbc, 0xc3][..], 0x8000_0000, u64::MAX, 31, 0, "BSF EAX, EBX"),
        (&[0x0f, 0xbc, 0xc3], 1, u64::MAX, 0, PF, "BSF: index 0 is not ZF"),
        (
            &[0x0f, 0xbc, 0xc3],
            1 << 32,
            0x5555_5555_5555_5555,
            0x5555_5555_5555_5555,
            ZF | PF,
            "BSF of 0: all 64 bits stay",
        ),
        (&[0x48, 0x0f, 0xbc, 0xc3], 1 << 63, 0, 63, PF, "BSF RAX, RBX"),
        (&[0x66, 0x0f, 0xbc, 0xc3], 0x1_0000, 7, 7, ZF | PF, "BSF AX, BX"),
        (
            &[0x66, 0x0f, 0xbd, 0xc3],
            0x1_4001,
            0xffff_ffff,
            0xffff_000e,
            0,
            "BSR AX, BX",
        ),
        (&[0x48, 0x0f, 0xbd, 0xc3], 0x1_4001, 0, 16, 0, "BSR RAX, RBX"),
        (&[0x48, 0x0f, 0xbd, 0xc3], 0, 9, 9, ZF | PF, "BSR of 0"),
        (&[0xf3, 0x0f, 0xbc, 0xc3], 0, 9, 9, ZF | PF, "TZCNT without BMI1 is BSF"),
        (
            &[0xf3, 0x0f, 0xbd, 0xc3],
            0x80,
            u64::MAX,
            7,
            0,
            "LZCNT without its feature is BSR",
        ),
        (&[0xf3, 0x0f, 0xb8, 0xc3], u64::MAX, u64::MAX, 32, 0, "POPCNT EAX, EBX"),
        (&[0xf3, 0x48, 0x0f, 0xb8, 0xc3], u64::MAX, 0, 64, 0, "POPCNT RAX, RBX"),
        (&[0xf3, 0x0f, 0xb8, 0xc3], 1 << 40, u64::MAX, 0, ZF, "POPCNT of 0"),
    ] {
        let s = one(code, &[(RBX, rbx), (RAX, rax)], STATUS);
        assert_eq!((s.gpr[RAX], s.rflags.into_bits() & STATUS), (after, flags), "{why}");
    }
}

// covers: cpu/int-v2, cpu/int-move, cpu/undefined
#[test]
fn byte_swaps() {
    for (code, rbx, after, why) in [
        (&[0x0f, 0xcb][..], 0x5555_5555_1234_5678, 0x7856_3412, "BSWAP EBX"),
        (
            &[0x48, 0x0f, 0xcb],
            0x0123_4567_89ab_cdef,
            0xefcd_ab89_6745_2301,
            "BSWAP RBX",
        ),
        (&[0x66, 0x0f, 0xcb], 0x1234_5678, 0x1234_0000, "BSWAP BX"),
    ] {
        let s = one(code, &[(RBX, rbx)], STATUS);
        assert_eq!((s.gpr[RBX], s.rflags.into_bits() & STATUS), (after, STATUS), "{why}");
    }
}

// covers: cpu/int-v2
#[test]
fn crc32_has_the_values_of_the_castagnoli_polynomial() {
    // CRC-32C of "123456789" is E3069283, with ones before and after.
    let mut crc = u32::MAX as u64;
    for b in b"123456789" {
        let s = one(
            &[0xf2, 0x0f, 0x38, 0xf0, 0xc3],
            &[(RAX, crc | 7 << 40), (RBX, *b as u64)],
            STATUS,
        );
        assert_eq!(s.rflags.into_bits() & STATUS, STATUS);
        crc = s.gpr[RAX];
    }
    assert_eq!(crc, !0xe306_9283u32 as u64);
    let s = one(
        &[0xf2, 0x48, 0x0f, 0x38, 0xf1, 0xc3],
        &[(RAX, u64::MAX), (RBX, u64::from_le_bytes(*b"12345678"))],
        0,
    );
    let s = one(
        &[0xf2, 0x0f, 0x38, 0xf0, 0xc3],
        &[(RAX, s.gpr[RAX]), (RBX, b'9' as u64)],
        0,
    );
    assert_eq!(s.gpr[RAX], !0xe306_9283u32 as u64);
    let s = one(
        &[0xf2, 0x0f, 0x38, 0xf1, 0xc3],
        &[(RAX, 0xffff_ffff), (RBX, 0x3433_3231)],
        0,
    );
    let s = one(
        &[0x66, 0xf2, 0x0f, 0x38, 0xf1, 0xc3],
        &[(RAX, s.gpr[RAX]), (RBX, 0x3635)],
        0,
    );
    let s = one(
        &[0x66, 0xf2, 0x0f, 0x38, 0xf1, 0xc3],
        &[(RAX, s.gpr[RAX]), (RBX, 0x3837)],
        0,
    );
    let s = one(&[0xf2, 0x0f, 0x38, 0xf0, 0xc7], &[(RAX, s.gpr[RAX]), (RBX, 0x3900)], 0);
    assert_eq!(s.gpr[RAX], !0xe306_9283u32 as u64, "the last byte from BH");
}

/// Condition `k` on flags, in the words of SDM Vol. 1 App. B.
fn holds(k: u8, f: u64) -> bool {
    let (cf, pf, zf, sf, of) = (f & CF != 0, f & PF != 0, f & ZF != 0, f & SF != 0, f & OF != 0);
    match k {
        0 => of,
        1 => !of,
        2 => cf,
        3 => !cf,
        4 => zf,
        5 => !zf,
        6 => cf || zf,
        7 => !cf && !zf,
        8 => sf,
        9 => !sf,
        10 => pf,
        11 => !pf,
        12 => sf != of,
        13 => sf == of,
        14 => zf || sf != of,
        _ => !zf && sf == of,
    }
}

// covers: cpu/int-move
#[test]
fn conditions_move_and_set() {
    let mut rig = Rig::new();
    for k in 0..16u8 {
        for bits in 0..32u64 {
            let f = [CF, PF, ZF, SF, OF]
                .iter()
                .enumerate()
                .map(|(i, b)| if bits >> i & 1 != 0 { *b } else { 0 })
                .sum();
            let regs = [(RAX, 0x1111_2222_3333_4444), (RBX, 0x5555_6666_7777_8888), (RDI, DATA)];
            let yes = holds(k, f);
            for (code, if_so, if_not, why) in [
                (
                    &[0x48, 0x0f, 0x40 | k, 0xc3][..],
                    0x5555_6666_7777_8888,
                    0x1111_2222_3333_4444,
                    "CMOV RAX, RBX",
                ),
                (
                    &[0x0f, 0x40 | k, 0xc3],
                    0x7777_8888,
                    0x3333_4444,
                    "CMOV EAX, EBX: clears the upper half either way",
                ),
                (
                    &[0x66, 0x0f, 0x40 | k, 0xc3],
                    0x1111_2222_3333_8888,
                    0x1111_2222_3333_4444,
                    "CMOV AX, BX",
                ),
                (&[0x0f, 0x40 | k, 0x07], 0xabcd_ef01, 0x3333_4444, "CMOV EAX, [RDI]"),
                (
                    &[0x0f, 0x90 | k, 0xc4],
                    0x1111_2222_3333_0144,
                    0x1111_2222_3333_0044,
                    "SET AH",
                ),
            ] {
                load(&mut rig, code, &regs, f);
                rig.write(DATA, &0xabcd_ef01u64.to_le_bytes());
                let s = step(&mut rig, code.len() as u64);
                assert_eq!(
                    s.gpr[RAX],
                    if yes { if_so } else { if_not },
                    "{why}: condition {k:x}, flags {f:x}"
                );
                assert_eq!(s.rflags.into_bits() & STATUS, f, "{why}");
            }
            load(&mut rig, &[0x0f, 0x90 | k, 0x07], &regs, f);
            rig.write(DATA, &[0xaa, 0xbb]);
            step(&mut rig, 3);
            assert_eq!(rig.read(DATA), [yes as u8, 0xbb], "SET [RDI]");
        }
    }
    // The operand is read whether or not it is wanted.
    let mut rig = machine(&[0x0f, 0x44, 0x07], &[(RDI, 0x8000_0000_0000_0000)], 0);
    assert_eq!(rig.run(1), Exit::Shutdown);
}

// covers: cpu/int-atomic
#[test]
fn exchanges_with_a_sum() {
    for (code, rax, rbx, after, sum, flags, why) in [
        (
            &[0x0f, 0xc1, 0xd8][..],
            0xffff_ffff,
            1,
            0xffff_ffff,
            0,
            CF | PF | AF | ZF,
            "XADD EAX, EBX",
        ),
        (
            &[0x0f, 0xc0, 0xd8],
            0x17f,
            0x201,
            0x27f,
            0x180,
            OF | SF | AF,
            "XADD AL, BL",
        ),
        (
            &[0x48, 0x0f, 0xc1, 0xc0],
            5,
            7,
            7,
            10,
            PF,
            "XADD RAX, RAX: the sum wins",
        ),
    ] {
        let s = one(code, &[(RAX, rax), (RBX, rbx)], STATUS);
        assert_eq!(
            (s.gpr[RBX], s.gpr[RAX], s.rflags.into_bits() & STATUS),
            (after, sum, flags),
            "{why}"
        );
    }
    for lock in [false, true] {
        let mut code = if lock { vec![0xf0] } else { vec![] };
        code.extend([0x66, 0x0f, 0xc1, 0x1f]);
        let (s, memory) = with_memory(&code, &[(RBX, 0x11_0003), (RDI, DATA)], 0, 0x5_fffe);
        assert_eq!(
            (s.gpr[RBX], memory, s.rflags.into_bits() & STATUS),
            (0x11_fffe, 0x5_0001, CF | AF),
            "XADD [RDI], BX"
        );
    }
}

// covers: cpu/int-atomic
#[test]
fn compare_and_exchange() {
    for (code, rax, rbx, rcx, after, flags, why) in [
        (
            &[0x0f, 0xb1, 0xcb][..],
            0xaaaa_aaaa_0000_0005,
            0xbbbb_bbbb_0000_0005,
            0xcccc_cccc_1234_5678,
            (0xaaaa_aaaa_0000_0005, 0x1234_5678),
            ZF | PF,
            "equal: the destination is written, the accumulator is not",
        ),
        (
            &[0x0f, 0xb1, 0xcb],
            0xaaaa_aaaa_0000_0005,
            0xbbbb_bbbb_0000_0006,
            1,
            (6, 0xbbbb_bbbb_0000_0006),
            CF | SF | AF | PF,
            "different: the accumulator is written, the destination is not",
        ),
        (
            &[0x0f, 0xb0, 0xcf],
            0x77,
            0x7700,
            0x99,
            (0x77, 0x9900),
            ZF | PF,
            "CMPXCHG BH, CL",
        ),
    ] {
        let s = one(code, &[(RAX, rax), (RBX, rbx), (RCX, rcx)], 0);
        assert_eq!(
            ((s.gpr[RAX], s.gpr[RBX]), s.rflags.into_bits() & STATUS),
            (after, flags),
            "{why}"
        );
    }
    for lock in [false, true] {
        for (rax, memory, after, flags) in [
            (0x1_0005u64, 0x7_0005u64, (0x1_0005u64, 0x7_9999u64), ZF | PF),
            (0x1_0005, 0x7_0004, (0x1_0004, 0x7_0004), 0),
        ] {
            let mut code = if lock { vec![0xf0] } else { vec![] };
            code.extend([0x66, 0x0f, 0xb1, 0x1f]);
            let (s, left) = with_memory(&code, &[(RAX, rax), (RBX, 0x9999), (RDI, DATA)], 0, memory);
            assert_eq!(
                ((s.gpr[RAX], left), s.rflags.into_bits() & STATUS),
                (after, flags),
                "CMPXCHG [RDI], BX, lock {lock}"
            );
        }
    }
}

// covers: cpu/int-atomic, cpu/int-v2
#[test]
fn compare_and_exchange_of_double_words() {
    for lock in [&[][..], &[0xf0]] {
        let mut code = lock.to_vec();
        code.extend([0x0f, 0xc7, 0x0f]);
        let regs = [
            (RAX, 0x1_0000_0001),
            (RDX, 0x1_0000_0002),
            (RBX, 7),
            (RCX, 8),
            (RDI, DATA),
        ];
        let (s, left) = with_memory(&code, &regs, STATUS & !ZF, 0x2_0000_0001);
        assert_eq!(
            (left, s.gpr[RAX], s.gpr[RDX]),
            (0x8_0000_0007, 0x1_0000_0001, 0x1_0000_0002)
        );
        assert_eq!(s.rflags.into_bits() & STATUS, STATUS, "only ZF changes");
        let (s, left) = with_memory(&code, &regs, STATUS, 0x3_0000_0001);
        assert_eq!((left, s.gpr[RAX], s.gpr[RDX]), (0x3_0000_0001, 1, 3));
        assert_eq!(s.rflags.into_bits() & STATUS, STATUS & !ZF);

        let mut code = lock.to_vec();
        code.extend([0x48, 0x0f, 0xc7, 0x0f]);
        for (high, equal) in [(2u64, true), (3, false)] {
            let regs = [(RAX, 1), (RDX, 2), (RBX, 7), (RCX, 8), (RDI, DATA)];
            let mut rig = machine(&code, &regs, STATUS ^ if equal { ZF } else { 0 });
            rig.write(DATA, &(1 | (high as u128) << 64).to_le_bytes());
            let s = step(&mut rig, code.len() as u64);
            let memory = u128::from_le_bytes(rig.read(DATA));
            assert_eq!(memory, if equal { 7 | 8 << 64 } else { 1 | 3 << 64 });
            assert_eq!((s.gpr[RAX], s.gpr[RDX]), if equal { (1, 2) } else { (1, 3) });
            assert_eq!(s.rflags.into_bits() & STATUS, STATUS ^ if equal { 0 } else { ZF });
        }
    }
    // 16 bytes must be aligned.
    let mut rig = machine(&[0x48, 0x0f, 0xc7, 0x0f], &[(RDI, DATA + 8)], 0);
    assert_eq!(rig.run(1), Exit::Shutdown);
    // 8 bytes need not, not even within a page.
    let mut rig = machine(
        &[0x0f, 0xc7, 0x0f],
        &[(RDI, DATA + 0xffd), (RDX, 0), (RBX, 0x0403_0201), (RCX, 0x0807_0605)],
        0,
    );
    step(&mut rig, 3);
    assert_eq!(rig.read(DATA + 0xffd), [1, 2, 3, 4, 5, 6, 7, 8]);
}

// covers: cpu/int-atomic, cpu/self-modifying-code
#[test]
fn a_locked_write_to_code_is_seen() {
    // MOV EAX, 1; LOCK INC BYTE [RDI]; JMP back
    let code = [0xb8, 1, 0, 0, 0, 0xf0, 0xfe, 0x07, 0xeb, 0xf6];
    let mut rig = machine(&code, &[(RDI, CODE + 1)], 0);
    assert_eq!(rig.run(3 * 3 + 1), Exit::Budget);
    assert_eq!(rig.cpu.state().gpr[RAX], 4);
}

// covers: cpu/int-move
#[test]
fn table_look_up() {
    let mut rig = machine(&[0xd7], &[(RAX, 0xffff_ff05), (RBX, DATA)], STATUS);
    rig.write(DATA + 5, &[0x99]);
    let s = step(&mut rig, 1);
    assert_eq!((s.gpr[RAX], s.rflags.into_bits() & STATUS), (0xffff_ff99, STATUS));
    // 32-bit addresses: the sum wraps.
    load(&mut rig, &[0x67, 0xd7], &[(RAX, 0xff), (RBX, 0x5_ffff_ff02)], 0);
    rig.write(1, &[0x77]);
    assert_eq!(step(&mut rig, 2).gpr[RAX], 0x77);
}

/// 32-bit protected mode without paging; the stack's segment has 16-bit pointers if `small`.
fn protected(rig: &mut Rig, small: bool) {
    let mut s = rig.cpu.state();
    (s.cr0, s.cr4, s.efer) = (0x33.into(), 0.into(), 0.into());
    s.segments[engine::CS] = rig::code_segment(0xc09b);
    for i in [engine::SS, engine::DS, engine::ES] {
        s.segments[i] = engine::Segment {
            selector: 16,
            base: 0,
            limit: u32::MAX,
            attributes: 0xc093,
        };
    }
    if small {
        s.segments[engine::SS].attributes = 0x8093;
    }
    rig.cpu.set_state(&s);
}

// covers: cpu/int-bcd
#[test]
fn decimal_adjustments() {
    use undefined::Adjust::*;
    let ten = std::num::NonZeroU8::new(10).unwrap();
    let mut rig = Rig::new();
    protected(&mut rig, false);
    for (code, op) in [
        (&[0x37][..], Aaa),
        (&[0x3f], Aas),
        (&[0x27], Daa),
        (&[0x2f], Das),
        (&[0xd4, 10], Aam(ten)),
        (&[0xd5, 10], Aad(10)),
        (&[0xd5, 3], Aad(3)),
    ] {
        for ax in [0u16, 5, 0x000a, 0x0105, 0x00ff, 0x0f9a, 0x0199, 0x1203, 0xff79] {
            for flags in [0, CF, AF, STATUS] {
                load(&mut rig, code, &[(RAX, 0x5555_0000 | ax as u64)], flags);
                let s = step(&mut rig, code.len() as u64);
                let (expected, after) = undefined::adjust(op, ax, flags);
                assert_eq!(s.gpr[RAX], 0x5555_0000 | expected as u64, "{op:?} {ax:x} {flags:x}");
                assert_eq!(s.rflags.into_bits() & STATUS, after, "{op:?} {ax:x} {flags:x}");
            }
        }
    }
    // By hand: 15 + 27 in packed decimal is 42, 12 in unpacked decimal is C, and back.
    for (code, rax, flags, after, why) in [
        (&[0x27][..], 0x3c, 0, 0x42, "DAA"),
        (&[0xd5, 10], 0x0102, 0, 0x000c, "AAD"),
        (&[0xd4, 10], 0x000c, 0, 0x0102, "AAM"),
        (&[0xd6], 0x1234, CF, 0x12ff, "SALC with CF"),
        (&[0xd6], 0x1234, 0, 0x1200, "SALC without"),
    ] {
        load(&mut rig, code, &[(RAX, rax)], flags);
        assert_eq!(step(&mut rig, code.len() as u64).gpr[RAX], after, "{why}");
    }
    load(&mut rig, &[0xd4, 0], &[], 0);
    assert_eq!(rig.run(1), Exit::Shutdown, "AAM 0 is #DE");
    // None of them in 64-bit mode.
    for code in [
        [0x37, 0],
        [0x3f, 0],
        [0x27, 0],
        [0x2f, 0],
        [0xd4, 10],
        [0xd5, 10],
        [0xd6, 0],
        [0x60, 0],
        [0x61, 0],
    ] {
        assert_eq!(machine(&code, &[], 0).run(1), Exit::Shutdown, "{code:x?}");
    }
}

const RSP: usize = 4;
const RBP: usize = 5;

// covers: cpu/int-stack
#[test]
fn all_registers_go_on_the_stack_and_come_back() {
    for (code, size, sp, small, why) in [
        (&[0x60][..], 4u64, 0x20_0000u64, false, "PUSHAD"),
        (&[0x66, 0x60], 2, 0x20_0000, false, "PUSHA"),
        (&[0x60], 4, 0xabcd_0008, true, "PUSHAD on a 16-bit stack wraps"),
    ] {
        let mut rig = Rig::new();
        protected(&mut rig, small);
        let values: Vec<(usize, u64)> = (0..8).map(|i| (i, 0x1111_1111 * (i as u64 + 1))).collect();
        load(&mut rig, code, &values, 0);
        let mut s = rig.cpu.state();
        s.gpr[RSP] = sp;
        rig.cpu.set_state(&s);
        let s = step(&mut rig, code.len() as u64);
        let cut = |v: u64| if size == 2 { v & 0xffff } else { v };
        let new = if small {
            sp & !0xffff | sp.wrapping_sub(8 * size) & 0xffff
        } else {
            sp - 8 * size
        };
        assert_eq!(s.gpr[RSP], new, "{why}");
        for (i, v) in &values {
            let at = (sp.wrapping_sub((*i as u64 + 1) * size)) & if small { 0xffff } else { u64::MAX };
            let memory = u32::from_le_bytes(rig.read(at)) as u64;
            assert_eq!(cut(memory), cut(if *i == RSP { sp } else { *v }), "{why}: register {i}");
        }
        // Other values in the registers; POPA brings all back but the stack pointer, which moves past.
        let back = if code.len() == 2 { &[0x66, 0x61][..] } else { &[0x61] };
        let others: Vec<(usize, u64)> = (0..8).filter(|i| *i != RSP).map(|i| (i, 0xeeee_eeee)).collect();
        load(&mut rig, back, &others, 0);
        let s = step(&mut rig, back.len() as u64);
        for (i, v) in values {
            let expected = match (i == RSP, size) {
                (true, _) => sp,
                (_, 2) => 0xeeee_0000 | v & 0xffff,
                _ => v,
            };
            assert_eq!(s.gpr[i], expected, "{why} and back: register {i}");
        }
    }
}

// covers: cpu/int-stack
#[test]
fn frames_with_their_displays() {
    const SP: u64 = 0x20_0000;
    const BP: u64 = 0x20_1000;
    // ENTER 20, level: the old RBP, level - 1 of the old display, the new frame pointer.
    for (level, pushed, why) in [
        (0u8, vec![BP], "no display"),
        (1, vec![BP, SP - 8], "its own frame only"),
        (3, vec![BP, 0xa1, 0xa2, SP - 8], "two frames of the display copied"),
        (35, vec![BP, 0xa1, 0xa2, SP - 8], "the level modulo 32"),
    ] {
        let mut rig = machine(&[0xc8, 0x20, 0, level], &[(RBP, BP)], 0);
        rig.write(BP - 16, &0xa2u64.to_le_bytes());
        rig.write(BP - 8, &0xa1u64.to_le_bytes());
        let s = step(&mut rig, 4);
        assert_eq!(
            (s.gpr[RBP], s.gpr[RSP]),
            (SP - 8, SP - 8 * pushed.len() as u64 - 0x20),
            "{why}"
        );
        for (i, v) in pushed.iter().enumerate() {
            assert_eq!(u64::from_le_bytes(rig.read(SP - 8 * (i as u64 + 1))), *v, "{why}: {i}");
        }
        // LEAVE undoes it.
        load(&mut rig, &[0xc9], &[], 0);
        let s = step(&mut rig, 1);
        assert_eq!((s.gpr[RBP], s.gpr[RSP]), (BP, SP), "{why}: LEAVE");
    }
    // 16-bit operands in 64-bit mode: BP alone changes.
    let mut rig = machine(&[0x66, 0xc8, 4, 0, 0], &[(RBP, 0x7777_1234)], 0);
    let s = step(&mut rig, 5);
    assert_eq!(
        (s.gpr[RBP], s.gpr[RSP], rig.read(SP - 2)),
        (0x7777_fffe, SP - 6, [0x34, 0x12])
    );
    // A write at the final stack pointer would fault: so does ENTER, and nothing has changed.
    let mut rig = machine(&[0xc8, 0, 0x10, 0], &[(RSP, 0x40_0800), (RBP, 5)], 0);
    rig.write(rig::TABLES + 0x2000 + 8, &0u64.to_le_bytes());
    let s = rig.cpu.state();
    let mut moved = s.clone();
    moved.rip = 0x50_0000;
    rig.write(0x50_0000, &[0xc8, 0, 0x10, 0]);
    rig.cpu.set_state(&moved);
    assert_eq!(rig.run(1), Exit::Shutdown);
    let s = rig.cpu.state();
    assert_eq!((s.gpr[RSP], s.gpr[RBP], s.cr2), (0x40_0800, 5, 0x3f_f7f8));
    assert_eq!(rig.read(0x40_07f8), [0u8; 8]);
}

// covers: cpu/int-muldiv, cpu/int-bcd, cpu/int-atomic, cpu/exceptions
#[test]
fn what_faults_and_how() {
    for (code, bits, fault, why) in [
        (&[0xf7, 0xf3][..], 64, (0, None), "DIV by 0"),
        (&[0xf7, 0xfb], 64, (0, None), "IDIV by 0"),
        (&[0xd4, 0], 32, (0, None), "AAM 0"),
        (
            &[0x48, 0x0f, 0xc7, 0x0f],
            64,
            (13, Some(0)),
            "CMPXCHG16B of an unaligned operand",
        ),
        (&[0x0f, 0xc7, 0xcf], 64, (6, None), "CMPXCHG8B of a register"),
        (&[0xf0, 0x0f, 0xa3, 0x0f], 64, (6, None), "LOCK BT"),
        (&[0xf0, 0x0f, 0xab, 0xc8], 64, (6, None), "LOCK BTS of a register"),
        (&[0xf0, 0xd1, 0x27], 64, (6, None), "LOCK SHL"),
        (&[0xf0, 0x0f, 0xc1, 0xc8], 64, (6, None), "LOCK XADD of a register"),
        (
            &[0x0f, 0x38, 0xf0, 0x07],
            64,
            (6, None),
            "MOVBE, which the model has not",
        ),
        (&[0x37], 64, (6, None), "AAA in 64-bit mode"),
        (&[0x60], 64, (6, None), "PUSHA in 64-bit mode"),
    ] {
        let mut b = if bits == 64 {
            Bench::long_with(&x86::model::WESTMERE)
        } else {
            Bench::protected()
        };
        b.write(CODE, code);
        b.state(|s| (s.gpr[RAX], s.gpr[RBX], s.gpr[RDX], s.gpr[RDI]) = (7, 0, 0, DATA + 4));
        let before = b.cpu.state();
        assert_eq!(b.faults(), fault, "{why}");
        let after = b.cpu.state();
        assert_eq!(
            (&after.gpr[..4], &after.gpr[5..]),
            (&before.gpr[..4], &before.gpr[5..]),
            "{why}"
        );
    }
}

// covers: cpu/int-atomic, cpu/int-shift, cpu/int-logic
#[test]
fn a_write_that_is_not_allowed_changes_nothing() {
    // A page that can only be read: every read-modify-write faults as a write, flags and registers untouched.
    for (code, why) in [
        (&[0xd1, 0x27][..], "SHL [RDI], 1"),
        (&[0x0f, 0xa5, 0x07], "SHLD [RDI], EAX, CL"),
        (&[0x0f, 0xab, 0x07], "BTS [RDI], EAX"),
        (&[0xf0, 0x0f, 0xab, 0x07], "LOCK BTS [RDI], EAX"),
        (&[0x0f, 0xc1, 0x07], "XADD [RDI], EAX"),
        (&[0x0f, 0xb1, 0x0f], "CMPXCHG [RDI], ECX: even if they differ"),
        (&[0x0f, 0xc7, 0x0f], "CMPXCHG8B [RDI]"),
        (&[0x48, 0x0f, 0xc7, 0x0f], "CMPXCHG16B [RDI]"),
        (&[0x0f, 0x94, 0x07], "SETE [RDI]"),
        (&[0xaa], "STOSB"),
    ] {
        let mut b = Bench::long();
        b.write(rig::TABLES + 0x2010, &0x40_0085u64.to_le_bytes());
        b.write(CODE, code);
        b.write(0x40_0000, &[0x5a; 16]);
        b.state(|s| {
            (s.gpr[RAX], s.gpr[RCX], s.gpr[RDI]) = (5, 3, 0x40_0000);
            s.rflags = (2 | STATUS).into();
        });
        let before = b.cpu.state();
        assert_eq!(b.faults(), (14, Some(3)), "{why}");
        let after = b.cpu.state();
        assert_eq!(
            (after.cr2, after.rflags.into_bits() & STATUS),
            (0x40_0000, STATUS),
            "{why}"
        );
        assert_eq!(
            (&after.gpr[..4], &after.gpr[5..]),
            (&before.gpr[..4], &before.gpr[5..]),
            "{why}"
        );
        assert_eq!(b.read(0x40_0000), [0x5a; 16], "{why}");
    }
}

/// Westmere with MOVBE, BMI1 and LZCNT.
fn with_more() -> &'static x86::model::CpuModel {
    use x86::model::WESTMERE;
    let mut rows = WESTMERE.cpuid.to_vec();
    for row in &mut rows {
        match row.leaf {
            0 => row.regs[0] = row.regs[0].max(7),
            1 => row.regs[2] |= 1 << 22,
            0x8000_0001 => row.regs[2] |= 1 << 5,
            _ => {}
        }
    }
    let seven = x86::model::CpuidRow {
        leaf: 7,
        subleaf: Some(0),
        regs: [0, 1 << 3, 0, 0],
    };
    rows.retain(|row| row.leaf != 7);
    let at = rows.partition_point(|row| row.leaf < 7);
    rows.insert(at, seven);
    Box::leak(Box::new(x86::model::CpuModel {
        cpuid: rows.leak(),
        ..WESTMERE
    }))
}

// covers: cpu/int-v2
#[test]
fn instructions_of_models_that_have_them() {
    let model = with_more();
    for (code, rbx, after, memory, flags, why) in [
        (
            &[0x0f, 0x38, 0xf0, 0x07][..],
            0,
            0x4433_2211,
            [0x44, 0x33, 0x22, 0x11],
            STATUS,
            "MOVBE EAX, [RDI]",
        ),
        (
            &[0x66, 0x0f, 0x38, 0xf0, 0x07],
            0,
            0x9999_4433,
            [0x44, 0x33, 0x22, 0x11],
            STATUS,
            "MOVBE AX, [RDI]",
        ),
        (
            &[0x0f, 0x38, 0xf1, 0x1f],
            0x0102_0304,
            0x9999_9999,
            [1, 2, 3, 4],
            STATUS,
            "MOVBE [RDI], EBX",
        ),
        (
            &[0x66, 0x0f, 0x38, 0xf1, 0x1f],
            0x0304,
            0x9999_9999,
            [3, 4, 0x22, 0x11],
            STATUS,
            "MOVBE [RDI], BX",
        ),
        (&[0xf3, 0x0f, 0xbc, 0xc3], 8, 3, [0x44, 0x33, 0x22, 0x11], 0, "TZCNT"),
        (
            &[0xf3, 0x0f, 0xbc, 0xc3],
            0,
            32,
            [0x44, 0x33, 0x22, 0x11],
            CF,
            "TZCNT of 0",
        ),
        (
            &[0xf3, 0x0f, 0xbc, 0xc3],
            1,
            0,
            [0x44, 0x33, 0x22, 0x11],
            ZF,
            "TZCNT of an odd number",
        ),
        (
            &[0x66, 0xf3, 0x0f, 0xbd, 0xc3],
            0x1_0001,
            0x9999_000f,
            [0x44, 0x33, 0x22, 0x11],
            0,
            "LZCNT of 16 bits",
        ),
        (
            &[0xf3, 0x48, 0x0f, 0xbd, 0xc3],
            0,
            64,
            [0x44, 0x33, 0x22, 0x11],
            CF,
            "LZCNT of 0",
        ),
        (
            &[0xf3, 0x48, 0x0f, 0xbd, 0xc3],
            1 << 63,
            0,
            [0x44, 0x33, 0x22, 0x11],
            ZF,
            "LZCNT of the highest",
        ),
    ] {
        let mut rig = Rig::with(model);
        load(&mut rig, code, &[(RAX, 0x9999_9999), (RBX, rbx), (RDI, DATA)], STATUS);
        rig.write(DATA, &[0x44, 0x33, 0x22, 0x11]);
        let s = step(&mut rig, code.len() as u64);
        assert_eq!(
            (s.gpr[RAX], rig.read(DATA), s.rflags.into_bits() & STATUS),
            (after, memory, flags),
            "{why}"
        );
    }
}

// covers: cpu/undefined
#[test]
fn model_and_host_agree_on_all_that_the_manual_defines() {
    use iced_x86::{Decoder, DecoderOptions, RflagsBits};
    let mut codes: Vec<Vec<u8>> = Vec::new();
    for prefix in [&[][..], &[0x66], &[0x48]] {
        let mut add = |bytes: &[u8]| codes.push([prefix, bytes].concat());
        for op in 0..8u8 {
            for n in [0, 1, 5, 31] {
                add(&[0xc1, 0xc3 | op << 3, n]);
            }
            add(&[0xd3, 0xc3 | op << 3]);
        }
        for op in 4..8u8 {
            add(&[0xf7, 0xc3 | op << 3]);
            add(&[0x0f, 0xba, 0xc3 | op << 3, 9]);
        }
        for op in [0xa3u8, 0xab, 0xb3, 0xbb, 0xaf, 0xbc, 0xbd] {
            add(&[0x0f, op, 0xd3]);
        }
        add(&[0x6b, 0xd3, 0x7f]);
        add(&[0x0f, 0xa4, 0xd3, 5]);
        add(&[0x0f, 0xad, 0xd3]);
    }
    for op in 0..8u8 {
        codes.push(vec![0xc0, 0xc3 | op << 3, 3]);
    }
    for op in 4..8u8 {
        codes.push(vec![0xf6, 0xc3 | op << 3]);
    }
    let host = EngineOptions {
        undefined: undefined::Undefined::Host,
        translate_after: rig::translate_after(),
        ..EngineOptions::default()
    };
    let (mut ours, mut theirs) = (Rig::new(), Rig::with_options(&x86::model::WESTMERE, host));
    for code in &codes {
        let i = Decoder::new(64, code, DecoderOptions::NONE).decode();
        for (rax, rbx, rcx, rdx) in [
            (5u64, 0x1234_5678_9abc_def0u64, 1u64, 0u64),
            (0x7fff, u64::MAX, 7, 0),
            (0x8000_0000_0000_0000, 0x8000_0000_8000_8080, 31, 0x7f),
            (1, 1, 0, 0),
        ] {
            for flags in [0, STATUS] {
                let regs = [(RAX, rax), (RBX, rbx), (RCX, rcx), (RDX, rdx)];
                let run = |rig: &mut Rig| {
                    load(rig, code, &regs, flags);
                    let exit = rig.run(1);
                    (exit, rig.cpu.state())
                };
                let (exit, mut a) = run(&mut ours);
                let (other, mut b) = run(&mut theirs);
                assert_eq!(exit, other, "{i} {rbx:x}");
                if exit == Exit::Shutdown {
                    for rig in [&mut ours, &mut theirs] {
                        let mut s = rig.cpu.state();
                        s.activity = engine::Activity::Running;
                        rig.cpu.set_state(&s);
                    }
                    continue;
                }
                // The count decides on OF: it is defined for 1 alone.
                let counted = if code.len() > 2 && i.op_count() > 1 && !i.op_kind(1).eq(&iced_x86::OpKind::Register) {
                    i.immediate(i.op_count() - 1)
                } else {
                    rcx
                };
                let mut undefined = 0;
                for (bit, ours) in [
                    (RflagsBits::OF, OF),
                    (RflagsBits::SF, SF),
                    (RflagsBits::ZF, ZF),
                    (RflagsBits::AF, AF),
                    (RflagsBits::CF, CF),
                    (RflagsBits::PF, PF),
                ] {
                    if i.rflags_undefined() & bit != 0 {
                        undefined |= ours;
                    }
                }
                // Shifts by a count of the size or more leave CF undefined, which the decoder's table does not say.
                if matches!(code.iter().find(|b| **b >= 0x80), Some(0xc0 | 0xc1 | 0xd3)) && counted != 1 {
                    undefined |= OF | AF | CF;
                }
                // 16 bits by more than 16: all is undefined, the result too.
                let double = matches!(i.mnemonic(), iced_x86::Mnemonic::Shld | iced_x86::Mnemonic::Shrd);
                if double && code[0] == 0x66 && counted & 31 > 16 {
                    continue;
                }
                (a.rflags, b.rflags) = (
                    (a.rflags.into_bits() & !undefined).into(),
                    (b.rflags.into_bits() & !undefined).into(),
                );
                (a.steps, b.steps) = (0, 0);
                assert_eq!(a.rflags, b.rflags, "{i} of {rax:x} {rbx:x} {rcx:x} {rdx:x}");
                assert!(
                    a.gpr == b.gpr,
                    "{i} of {rax:x} {rbx:x} {rcx:x} {rdx:x}: {:x?} {:x?}",
                    a.gpr,
                    b.gpr
                );
            }
        }
    }
}
