//! PCMPESTRI, PCMPESTRM, PCMPISTRI and PCMPISTRM. SDM Vol. 1 12.10.3 "String and Text Processing Instructions" and Vol. 2B 4.1 "Imm8 Control Byte
//! Operation for PCMPESTRI / PCMPESTRM / PCMPISTRI / PCMPISTRM".

use super::lanes::{Block, Vector};
use super::row::flag::{CF, OF, SF, ZF};

/// What a comparison comes to.
pub struct Comparison {
    /// One bit an element: IntRes2.
    pub result: u32,
    /// CF, ZF, SF and OF.
    pub flags: u32,
    elements: u32,
    control: u8,
}

impl Comparison {
    /// The index of the least or the most significant bit that is set: what the forms with I leave in ECX.
    pub fn index(&self) -> u32 {
        match self.result {
            0 => self.elements,
            bits if self.control & 0x40 != 0 => 31 - bits.leading_zeros(),
            bits => bits.trailing_zeros(),
        }
    }

    /// A bit or an element for each: what the forms with M leave in XMM0.
    pub fn mask(&self) -> Vector {
        if self.control & 0x40 == 0 {
            return Vector::from_u64(self.result.into());
        }
        let bytes = 16 / self.elements;
        let mut mask = Vector::ZERO;
        for i in 0..16 {
            if self.result >> (i / bytes) & 1 != 0 {
                mask.0[i as usize] = 0xff;
            }
        }
        mask
    }
}

/// The elements of an operand, widened as their format says, and how many are valid: up to its length, or up to the first zero.
fn elements(block: Block, control: u8, length: Option<u64>) -> ([i32; 16], usize) {
    let (words, signed) = (control & 1 != 0, control & 2 != 0);
    let count = if words { 8 } else { 16 };
    let at = |i: usize| match (words, signed) {
        (false, false) => i32::from(block[i]),
        (false, true) => i32::from(block[i] as i8),
        (true, signed) => {
            let word = u16::from_le_bytes([block[2 * i], block[2 * i + 1]]);
            if signed {
                i32::from(word as i16)
            } else {
                i32::from(word)
            }
        }
    };
    let values = std::array::from_fn(|i| if i < count { at(i) } else { 0 });
    let valid = match length {
        Some(length) => length.min(count as u64) as usize,
        None => values[..count].iter().position(|&v| v == 0).unwrap_or(count),
    };
    (values, valid)
}

/// Compares `a` with `b` as the control byte says; the lengths are absolute values, none of the implicit forms.
pub fn compare(a: Block, b: Block, control: u8, lengths: Option<[u64; 2]>) -> Comparison {
    let (x, m) = elements(a, control, lengths.map(|l| l[0]));
    let (y, n) = elements(b, control, lengths.map(|l| l[1]));
    let count = if control & 1 != 0 { 8 } else { 16 };
    let found = |j: usize| match control >> 2 & 3 {
        // Equal any, ranges, equal each, equal ordered.
        0 => j < n && x[..m].contains(&y[j]),
        1 => j < n && (0..m / 2).any(|i| x[2 * i] <= y[j] && y[j] <= x[2 * i + 1]),
        2 if j < m && j < n => x[j] == y[j],
        2 => j >= m && j >= n,
        _ => (0..m.min(count - j)).all(|i| j + i < n && x[i] == y[j + i]),
    };
    let first = (0..count).fold(0u32, |bits, j| bits | u32::from(found(j)) << j);
    let ones = |count: usize| (1u32 << count) - 1;
    let result = match control >> 4 & 3 {
        1 => first ^ ones(count),
        3 => first ^ ones(n),
        _ => first,
    };
    let bit = |set: bool, flag: u32| if set { flag } else { 0 };
    Comparison {
        result,
        flags: bit(result != 0, CF) | bit(n < count, ZF) | bit(m < count, SF) | bit(result & 1 != 0, OF),
        elements: count as u32,
        control,
    }
}
