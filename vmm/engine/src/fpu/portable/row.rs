//! A row of the tables, and what it comes to.

use super::float::Environment;
use super::lanes::{Inputs, Vector};

/// Arithmetic bits of RFLAGS.
pub mod flag {
    /// Carry.
    pub const CF: u32 = 1 << 0;
    /// Parity.
    pub const PF: u32 = 1 << 2;
    /// Zero.
    pub const ZF: u32 = 1 << 6;
    /// Sign.
    pub const SF: u32 = 1 << 7;
    /// Overflow.
    pub const OF: u32 = 1 << 11;
}

/// What a row comes to: a vector (of which a general register is the low part), or flags.
pub struct Outcome {
    /// The vector.
    pub value: Vector,
    /// The arithmetic flags, of rows that write them.
    pub flags: u32,
}

impl Outcome {
    /// A vector.
    pub fn value(value: Vector) -> Outcome {
        Outcome { value, flags: 0 }
    }

    /// Flags.
    pub fn flags(flags: u32) -> Outcome {
        Outcome {
            value: Vector::ZERO,
            flags,
        }
    }
}

/// How a row computes.
pub type Compute = fn(&Inputs, &mut Environment) -> Outcome;

/// What an instruction does with its operands.
#[derive(Clone, Copy)]
pub struct Row {
    /// The function.
    pub compute: Compute,
    /// Its parameter.
    pub param: u8,
}

impl Row {
    /// A row without a parameter.
    pub fn new(compute: Compute) -> Row {
        Row { compute, param: 0 }
    }

    /// With one.
    pub fn with(self, param: u8) -> Row {
        Row { param, ..self }
    }
}
