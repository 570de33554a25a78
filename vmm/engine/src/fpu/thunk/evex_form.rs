//! What the instructions of a form with an EVEX prefix have in common, their operands apart.

use super::{MemoryUse, Traits};
use crate::fpu::portable::Table;

/// How a writemask chooses among the elements of a memory operand. SDM Vol. 1 15.6.1 "Opmask Register to Predicate Vector Data
/// Processing".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lanes {
    /// Bytes of an element in memory.
    pub size: u8,
    /// How many the operand has.
    pub count: u8,
    /// How many bits of the mask count. Bit `i` chooses element `i` modulo `count`: there are more bits where elements are broadcast.
    pub bits: u8,
    /// Compress and expand: as many elements as bits are set, from the first one.
    pub packed: bool,
    /// All of the operand is accessed as far as faults go, whatever the mask says.
    pub probes_all: bool,
}

impl Lanes {
    /// The elements that are accessed under a mask: one bit each.
    pub fn chosen(self, mask: u64) -> u64 {
        let mask = mask & u64::MAX >> (64 - u32::from(self.bits));
        if self.packed {
            return match mask.count_ones() {
                0 => 0,
                n => u64::MAX >> (64 - n),
            };
        }
        let mut chosen = 0;
        let all = u64::MAX >> (64 - u32::from(self.count));
        for at in (0..self.bits).step_by(usize::from(self.count)) {
            chosen |= mask >> at & all;
        }
        chosen
    }
}

/// How a form is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Execution {
    /// By the host's own copy of the instruction: where the thunk is entered.
    Host(usize),
    /// The same, but by a table where MXCSR unmasks underflow: with results of half precision, of which the host's instruction would
    /// not flag a tiny one that is exact.
    HostUnlessUnderflow(usize, Table),
    /// By a table of ours.
    Table(Table),
}

/// All that a form's execution has to know; one for all instructions of the form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct EvexForm {
    pub execution: Execution,
    pub traits: Traits,
    pub memory: Option<MemoryUse>,
    /// Which elements of the memory operand are accessed, where the mask decides.
    pub lanes: Option<Lanes>,
    /// VCVTPS2PH by the host: how many elements it has.
    pub halves: u8,
    /// The address size in bytes, where the caller finds elements in their segment.
    pub address: u8,
}
