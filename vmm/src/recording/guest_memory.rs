//! A machine's memory as [`trace::linux`] reads it.

use std::{ops::Range, time::Instant};

use machine::memory::Memory;
use x86::watch::Processor;

use crate::signals;

/// The guest-physical memory of a machine, at a moment when it stands still.
#[derive(Clone, Copy, Debug)]
pub struct GuestMemory<'a> {
    memory: &'a Memory,
    /// When nobody waits for it any more.
    deadline: Option<Instant>,
    /// A signal that ends the process has come before.
    ending: bool,
}

impl<'a> GuestMemory<'a> {
    /// Read until it is finished, or a signal is to end the process.
    pub fn new(memory: &'a Memory) -> GuestMemory<'a> {
        GuestMemory {
            memory,
            deadline: None,
            ending: false,
        }
    }

    /// The same, but no longer than until then.
    #[must_use]
    pub fn until(self, deadline: Option<Instant>) -> GuestMemory<'a> {
        GuestMemory { deadline, ..self }
    }

    /// The same, also while the process ends by a signal that has come already.
    #[must_use]
    pub fn at_the_end(self) -> GuestMemory<'a> {
        GuestMemory {
            ending: signals::pending().is_some(),
            ..self
        }
    }
}

impl trace::linux::Memory for GuestMemory<'_> {
    fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.memory.read(gpa, bytes).is_ok()
    }

    fn ram(&self) -> Vec<Range<u64>> {
        self.memory.touched()
    }

    fn is_awaited(&self) -> bool {
        let signalled = !self.ending && signals::pending().is_some();
        !signalled && self.deadline.is_none_or(|deadline| Instant::now() < deadline)
    }
}

/// Guest memory as a processor reaches it.
pub(super) struct Physical<'a>(pub &'a mut dyn Processor);

impl trace::linux::Memory for Physical<'_> {
    fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.0.read_phys(gpa, bytes).is_ok()
    }

    /// The kernel is looked for elsewhere.
    fn ram(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use trace::linux::{Kernel, Memory as _};

    use super::*;

    // covers: trace/hostile-linux
    #[test]
    fn nobody_waits_after_the_deadline() {
        let memory = Memory::new(4 << 20).unwrap();
        let now = Instant::now();
        assert!(GuestMemory::new(&memory).is_awaited());
        assert!(
            GuestMemory::new(&memory)
                .until(Some(now + Duration::from_secs(3600)))
                .is_awaited()
        );
        let mut late = GuestMemory::new(&memory).until(Some(now));
        assert!(!late.is_awaited());
        assert!(Kernel::find(&mut late).is_none());
        assert_eq!(late.ram(), [], "what nobody has touched");
        memory.write(0x1000, &[1]).unwrap();
        assert!(late.ram().iter().any(|range| range.contains(&0x1000)));
    }
}
