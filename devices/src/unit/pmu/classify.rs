//! Which instructions are x87 and which MMX or SSE, and of what kind: what the PEBS events C1H and C7H of the Core microarchitecture
//! count, and the events of the Pentium 4's execution units.

use serde::{Deserialize, Serialize};
use x86::pmu::netburst::Operation;
use x86::watch::{CodeSize, Processor};

/// A class of instructions that events count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Class {
    /// x87: the opcodes D8H to DFH, but for the next ones.
    X87,
    /// x87 loads, stores and exchanges.
    X87Move,
    /// SSE, packed single precision.
    PackedSingle,
    /// SSE2, packed double precision.
    PackedDouble,
    /// SSE, scalar single precision.
    ScalarSingle,
    /// SSE2, scalar double precision.
    ScalarDouble,
    /// Integers in MMX registers.
    Mmx,
    /// Integers in XMM registers.
    Integer,
    /// Loads, stores and moves of MMX, SSE and SSE2.
    SimdMove,
    /// All other MMX, SSE, AVX.
    Simd,
    /// All others.
    Other,
}

/// Some of the classes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Classes(u16);

impl Classes {
    /// All of x87.
    pub const X87: Self = Self::of(Class::X87).or(Self::of(Class::X87Move));
    /// All of MMX, SSE and AVX.
    pub const SIMD: Self = Self((1 << Class::Other as u16) - 1 & !Self::X87.0);

    /// This one.
    pub const fn of(class: Class) -> Self {
        Self(1 << class as u16)
    }

    /// Those of both.
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether the class is among them.
    pub const fn has(self, class: Class) -> bool {
        self.0 >> class as u16 & 1 != 0
    }

    /// The instructions that have such operations: a micro-operation each.
    pub const fn with(operation: Operation) -> Self {
        match operation {
            Operation::PackedSingle => Self::of(Class::PackedSingle),
            Operation::PackedDouble => Self::of(Class::PackedDouble),
            Operation::ScalarSingle => Self::of(Class::ScalarSingle),
            Operation::ScalarDouble => Self::of(Class::ScalarDouble),
            Operation::Mmx => Self::of(Class::Mmx),
            Operation::Integer => Self::of(Class::Integer),
            Operation::X87 => Self::of(Class::X87),
            Operation::Move => Self::of(Class::X87Move).or(Self::of(Class::SimdMove)),
        }
    }
}

/// The longest instruction.
const LONGEST: usize = 15;

impl Class {
    /// The class of the instruction at a linear address. What cannot be read is of no class: it will not retire either.
    pub(super) fn of(address: u64, cpu: &mut dyn Processor) -> Self {
        let mut bytes = [0; LONGEST];
        let mut len = LONGEST;
        // The end of a page may be the end of memory.
        let in_page = 0x1000 - (address & 0xFFF) as usize;
        if cpu.read_linear(address, &mut bytes).is_err() {
            len = in_page.min(LONGEST);
            if cpu.read_linear(address, &mut bytes[..len]).is_err() {
                return Class::Other;
            }
        }
        Self::of_bytes(&bytes[..len], cpu.context().code == CodeSize::Bits64)
    }

    /// The class of the instruction that begins with these bytes.
    fn of_bytes(bytes: &[u8], long: bool) -> Self {
        let mut rest = bytes;
        // 66H, F2H and F3H choose among instructions.
        let (mut operand_size, mut repeat) = (false, None);
        loop {
            match rest {
                [0x66, tail @ ..] => (operand_size, rest) = (true, tail),
                [prefix @ (0xF2 | 0xF3), tail @ ..] => (repeat, rest) = (Some(*prefix), tail),
                [0x2E | 0x36 | 0x3E | 0x26 | 0x64 | 0x65 | 0x67 | 0xF0, tail @ ..] => rest = tail,
                [0x40..=0x4F, tail @ ..] if long => rest = tail,
                _ => break,
            }
        }
        match *rest {
            [opcode @ 0xD8..=0xDF, modrm, ..] if moves_x87(opcode, modrm) => Class::X87Move,
            [0xD8..=0xDF, ..] => Class::X87,
            // VEX and EVEX; LES, LDS and BOUND outside 64-bit mode have a memory operand.
            [0xC4 | 0xC5 | 0x62, modrm, ..] if long || modrm >= 0xC0 => Class::Simd,
            [0x0F, opcode, ..] => match opcode {
                0x10..=0x17 | 0x28..=0x2F | 0x50..=0x7F | 0xC2 | 0xC4..=0xC6 | 0xD0..=0xFE => {
                    Self::of_sse(opcode, operand_size, repeat)
                }
                0x38 if matches!(rest.get(2), Some(0x00..=0x41 | 0xC8..=0xDF)) => Class::Simd,
                0x3A => Class::Simd,
                _ => Class::Other,
            },
            _ => Class::Other,
        }
    }

    /// The class of an MMX, SSE or SSE2 instruction with this second opcode byte.
    fn of_sse(opcode: u8, operand_size: bool, repeat: Option<u8>) -> Self {
        let float = match (repeat, operand_size) {
            (Some(0xF3), _) => Class::ScalarSingle,
            (Some(_), _) => Class::ScalarDouble,
            (None, true) => Class::PackedDouble,
            (None, false) => Class::PackedSingle,
        };
        match opcode {
            // UCOMISS and COMISS, and those of double precision.
            0x2E | 0x2F if operand_size => Class::ScalarDouble,
            0x2E | 0x2F => Class::ScalarSingle,
            // UNPCKLPS and UNPCKHPS; conversions from and to integers; arithmetic and logic; CMPPS; SHUFPS.
            0x14 | 0x15 | 0x2A | 0x2C | 0x2D | 0x51..=0x5F | 0xC2 | 0xC6 => float,
            // MOVUPS to MOVHPS, MOVAPS, MOVNTPS, MOVMSKPS, MOVD, MOVQ, MOVDQA, MOVNTQ, PMOVMSKB, MASKMOVQ.
            0x10..=0x17 | 0x28 | 0x29 | 0x2B | 0x50 | 0x6E | 0x6F | 0x7E | 0x7F | 0xD6 | 0xD7 | 0xE7 | 0xF7 => {
                Class::SimdMove
            }
            // EMMS; what came after SSE2: HADDPD, ADDSUBPS, LDDQU. CVTDQ2PD and its like.
            0x77 | 0x78 | 0x79 | 0x7C | 0x7D | 0xD0 | 0xF0 => Class::Simd,
            0xE6 => float,
            // PSHUFD, PSHUFHW and PSHUFLW are of XMM registers.
            _ if operand_size || repeat.is_some() => Class::Integer,
            _ => Class::Mmx,
        }
    }
}

/// FLD, FST, FSTP, FILD, FIST, FISTP, FBLD, FBSTP, FXCH, FCMOVcc, and the constants.
fn moves_x87(opcode: u8, modrm: u8) -> bool {
    let (register, operation) = (modrm >= 0xC0, modrm >> 3 & 7);
    match (opcode, register) {
        (0xD9 | 0xDD, false) => operation == 0 || operation == 2 || operation == 3,
        (0xDB, false) => matches!(operation, 0 | 2 | 3 | 5 | 7),
        (0xDF, false) => matches!(operation, 0 | 2..=7),
        (0xD9, true) => operation <= 1 || (0xE8..=0xEE).contains(&modrm),
        (0xDA | 0xDB, true) => operation <= 3,
        (0xDD, true) => operation == 2 || operation == 3,
        _ => false,
    }
}

#[cfg(test)]
#[path = "classify_test.rs"]
mod tests;
