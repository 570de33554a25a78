//! Which instructions are x87 and which MMX or SSE: what the PEBS events C1H and C7H of the Core microarchitecture count.

use serde::{Deserialize, Serialize};
use x86::watch::{CodeSize, Processor};

/// A class of instructions that events count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Class {
    /// x87: the opcodes D8H to DFH.
    X87,
    /// MMX, SSE, AVX.
    Simd,
    /// All others.
    Other,
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
        loop {
            match rest {
                [
                    0x66 | 0xF2 | 0xF3 | 0x2E | 0x36 | 0x3E | 0x26 | 0x64 | 0x65 | 0x67 | 0xF0,
                    tail @ ..,
                ] => rest = tail,
                [0x40..=0x4F, tail @ ..] if long => rest = tail,
                _ => break,
            }
        }
        match *rest {
            [0xD8..=0xDF, ..] => Class::X87,
            // VEX and EVEX; LES, LDS and BOUND outside 64-bit mode have a memory operand.
            [0xC4 | 0xC5 | 0x62, modrm, ..] if long || modrm >= 0xC0 => Class::Simd,
            [0x0F, opcode, ..] => match opcode {
                0x10..=0x17 | 0x28..=0x2F | 0x50..=0x7F | 0xC2 | 0xC4..=0xC6 | 0xD0..=0xFE => Class::Simd,
                0x38 if matches!(rest.get(2), Some(0x00..=0x41 | 0xC8..=0xDF)) => Class::Simd,
                0x3A => Class::Simd,
                _ => Class::Other,
            },
            _ => Class::Other,
        }
    }
}

#[cfg(test)]
#[path = "classify_test.rs"]
mod tests;
