//! The memory that a kernel is read from.

use std::ops::Range;

/// Physical memory of a machine, running or not.
pub trait Memory {
    /// Reads guest-physical memory; `false` if not all of it is RAM.
    fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool;
    /// Where RAM is, ascending. What nobody has ever written to may be left out.
    fn ram(&self) -> Vec<Range<u64>>;
    /// Whether somebody still waits for what is looked for. Once it is not so, what is found is not to be relied on.
    fn is_awaited(&self) -> bool {
        true
    }
}
