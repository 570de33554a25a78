//! The form in which a machine's state is written down, RAM aside: one sequence of bytes in the wire format of postcard, behind a
//! number that grows whenever a type in it changes.
//!
//! Hashes of a machine, which recorded sessions keep and replays compare, are of these bytes. What CPUs remember of page tables
//! is not in it: that depends on who watches, too, which is nothing that a guest can see.

use engine::CpuState;
use machine::{MachineState, memory::Digest};
use serde::{Deserialize, Serialize};

/// The form's number.
pub(super) const FORMAT: u32 = 2;

/// What is written, in this order.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Stored {
    /// [`FORMAT`].
    pub format: u32,
    /// The CPU model's name.
    pub model: String,
    /// Size of RAM in bytes.
    pub memory: u64,
    /// The CPUs.
    pub cpus: Vec<CpuState>,
    /// Steps so far, over all of them.
    pub steps: u64,
    /// The CPU whose turn it is, and the step at which that ends.
    pub turn: (usize, u64),
    /// What is around them.
    pub machine: MachineState,
}

impl Stored {
    /// The bytes.
    pub fn bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("all lengths are known, and a vector takes any number of bytes")
    }

    /// A hash of them: equal for equal states, on every host.
    pub fn hash(&self) -> Digest {
        let mut digest = Digest::default();
        digest.add(&self.bytes());
        digest
    }
}

#[cfg(test)]
#[path = "stored_test.rs"]
mod tests;
