//! Integer instructions, row by row.

mod rig;

use engine::{CpuState, Exit, undefined};
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
    s.rflags = 2 | flags;
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

// covers: 2/cpu-int-shift, 2/cpu-undefined
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
                            let (r, f) = undefined::shift(op, bits, value, 0, count, flags);
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
                            assert_eq!(s.rflags & STATUS, f, "flags of {what}");
                        }
                    }
                }
            }
        }
    }
}

// covers: 2/cpu-int-shift, 2/cpu-undefined
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
                        let mut rig = machine(&code, &[(RBX, a), (RDX, b), (RCX, count as u64), (RDI, DATA)], STATUS);
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
                            (got, s.rflags & STATUS),
                            (expected, f),
                            "{op:?} {bits} by {count}, {modrm:x}"
                        );
                    }
                }
            }
        }
    }
}

// covers: 2/cpu-int-shift
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
        assert_eq!((s.gpr[RBX], s.rflags & STATUS), (expected, after), "{why}");
    }
}

// covers: 2/cpu-int-muldiv
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
        assert_eq!(s.rflags & STATUS, after, "flags: {why}");
    }
}

// covers: 2/cpu-int-muldiv
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
                assert_eq!(s.rflags & STATUS, STATUS, "flags keep their values: {why}");
            }
            None => {
                let mut rig = machine(code, &regs, STATUS);
                let before = rig.cpu.state();
                // There are no gates: any exception ends in shutdown.
                assert_eq!(rig.run(1), Exit::Shutdown, "{why}");
                let s = rig.cpu.state();
                assert_eq!(
                    (s.gpr[RAX], s.gpr[RDX], s.rflags & STATUS),
                    (before.gpr[RAX], before.gpr[RDX], STATUS),
                    "{why}"
                );
            }
        }
    }
}

// covers: 2/cpu-int-muldiv, 2/cpu-int-move
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
        assert_eq!(s.rflags & STATUS, STATUS, "{why}");
    }
}
