//! What tells one decoded block from another: where it begins, and the mode that it was decoded for. Of the mode two parts are too
//! long for a key, the code segment and the set of boundaries; small numbers stand for them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A block's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// Guest-physical address of the first instruction.
    pub gpa: u64,
    /// See [`crate::cpu::mode`].
    pub mode: u32,
}

/// Multiplicative hashing: keys are page addresses and mode bits, and nobody attacks them.
#[derive(Default, Clone, Copy)]
pub(crate) struct PlainHasher(u64);

impl Hasher for PlainHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64(*b as u64);
        }
    }
    fn write_u32(&mut self, v: u32) {
        self.write_u64(v as u64);
    }
    fn write_u64(&mut self, v: u64) {
        self.0 = (self.0 ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

pub(crate) type Map<K, V> = HashMap<K, V, BuildHasherDefault<PlainHasher>>;

/// Code segments that are distinguished at a time.
const RECENT_CODES: usize = 64;
/// Numbers given to code segments before the blocks are dropped: they must fit in the blocks' keys, with room for those that
/// are given before the run loop gets to look.
const MAX_CODES: u32 = 0x4000;
/// Sets of boundaries that are distinguished, for the same reason.
const MAX_BOUNDARY_SETS: usize = 255;

/// The numbers that stand for code segments and sets of boundaries in the keys of blocks. All processors share them, as they share
/// the blocks.
pub(crate) struct KeyNumbers {
    /// Base, limit and number of the code segments met last; the flat one stays first.
    codes: Vec<(u64, u32, u32)>,
    next_code: u32,
    /// Sets of boundaries that blocks were decoded for.
    boundaries: Vec<Box<[u64]>>,
}

impl KeyNumbers {
    pub fn new() -> KeyNumbers {
        KeyNumbers {
            codes: vec![(0, u32::MAX, 0)],
            next_code: 1,
            boundaries: Vec::new(),
        }
    }

    /// A small number that stands for a code segment's base and limit; 0 is the flat one.
    pub fn code(&mut self, base: u64, limit: u32) -> u32 {
        if let Some(&(_, _, i)) = self.codes.iter().find(|c| (c.0, c.1) == (base, limit)) {
            return i;
        }
        let i = self.next_code;
        self.next_code += 1;
        if self.codes.len() == RECENT_CODES {
            // The oldest but the flat one: should it come back it gets a new number, and its blocks are decoded again.
            self.codes.remove(1);
        }
        self.codes.push((base, limit, i));
        i
    }

    /// A small number, never 0, that stands for a set of boundaries; `None`: the numbers are used up.
    pub fn boundaries(&mut self, set: &[u64]) -> Option<u32> {
        let known = self.boundaries.iter().position(|known| known[..] == *set);
        if known.is_none() {
            if self.boundaries.len() == MAX_BOUNDARY_SETS {
                return None;
            }
            self.boundaries.push(set.into());
        }
        Some(known.map_or(self.boundaries.len(), |i| i + 1) as u32)
    }

    /// Numbers of code segments are running out.
    pub fn used_up(&self) -> bool {
        self.next_code > MAX_CODES
    }

    /// Takes all numbers back: no block has one any more.
    pub fn clear(&mut self) {
        self.codes.truncate(1);
        self.next_code = 1;
        self.boundaries.clear();
    }
}
