//! Where the operands of an instruction with an EVEX prefix are.

use iced_x86::Register;

use crate::fpu::state::{HIGH, OPMASKS};

/// Where one of a thunk's pointers points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(pub u8);

impl Place {
    /// ZMM0 to ZMM31 are 0 to 31.
    const OPMASKS: u8 = 32;
    const GENERAL: u8 = 64;
    /// The memory operand.
    pub const MEMORY: Place = Place(128);
    /// No operand.
    pub const NONE: Place = Place(255);

    /// Where a register is.
    pub fn of(register: Register) -> Place {
        let number = register.number() as u8;
        Place(if register.is_k() {
            Place::OPMASKS + number
        } else if register.is_gpr() {
            Place::GENERAL + number
        } else {
            number
        })
    }

    /// The number of an opmask register, where it points at one.
    pub fn opmask(self) -> Option<usize> {
        (Place::OPMASKS..Place::OPMASKS + 8)
            .contains(&self.0)
            .then(|| usize::from(self.0 - Place::OPMASKS))
    }

    /// The number of a vector register.
    pub fn vector(self) -> usize {
        usize::from(self.0 & 31)
    }

    /// The number of a general register, where it points at one.
    pub fn general(self) -> Option<usize> {
        (Place::GENERAL..Place::GENERAL + 16)
            .contains(&self.0)
            .then(|| usize::from(self.0 - Place::GENERAL))
    }

    /// The address, from those of the state, of the general registers and of the operand in memory.
    #[inline(always)]
    pub fn pointer(self, fpu: *mut u8, general: *mut u8, memory: *mut u8) -> *mut u8 {
        let n = self.0 as usize;
        match self.0 {
            0..16 => fpu.wrapping_add(n * 16),
            16..32 => fpu.wrapping_add(HIGH + (n - 16) * 16),
            32..40 => fpu.wrapping_add(OPMASKS + (n - 32) * 8),
            64..80 => general.wrapping_add((n - 64) * 8),
            // What is absent is not used.
            _ => memory,
        }
    }
}
