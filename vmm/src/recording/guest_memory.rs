//! A machine's memory as [`trace::linux`] reads it.

use std::ops::Range;

use machine::memory::Memory;

/// The guest-physical memory of a machine, at a moment when it stands still.
#[derive(Clone, Copy, Debug)]
pub struct GuestMemory<'a>(pub &'a Memory);

impl trace::linux::Memory for GuestMemory<'_> {
    fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.0.read(gpa, bytes).is_ok()
    }

    fn ram(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.0.low_end()).chain(self.0.high()).collect()
    }
}
