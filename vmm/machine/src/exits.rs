//! How often CPUs stopped running, whatever ran them.

use engine::Exit;

/// How often CPUs stopped running, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exits {
    /// The next event was due.
    pub budget: u64,
    /// An access to a device.
    pub bus: u64,
    /// Interrupts became deliverable.
    pub window: u64,
    /// HLT.
    pub halt: u64,
    /// PAUSE, with other CPUs there.
    pub pause: u64,
    /// Interrupts delivered.
    pub interrupts: u64,
    /// NMIs delivered.
    pub nmis: u64,
    /// In KVM: debug exceptions while a debugger has breakpoints.
    pub debug: u64,
}

impl Exits {
    /// Counts one.
    pub fn count(&mut self, exit: &Exit) {
        match exit {
            Exit::Budget => self.budget += 1,
            Exit::Bus => self.bus += 1,
            Exit::Window => self.window += 1,
            Exit::Halt => self.halt += 1,
            Exit::Pause => self.pause += 1,
            Exit::Shutdown | Exit::Stop { .. } | Exit::Defect(_) => {}
        }
    }

    /// Interrupts of both kinds delivered.
    pub fn delivered(&self) -> u64 {
        self.interrupts + self.nmis
    }

    /// How often a CPU stopped.
    pub fn all(&self) -> u64 {
        self.budget + self.bus + self.window + self.halt + self.pause + self.debug
    }
}
