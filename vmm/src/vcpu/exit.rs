//! Why a CPU stopped running, whatever ran it.

/// Why a CPU stopped running. Accesses to devices and MSRs have been served by then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The next event is due.
    Budget,
    /// An access to a device has retired, so interrupts and timers have to be looked at.
    Bus,
    /// Interrupts have become deliverable.
    Window,
    /// PAUSE, with other CPUs there.
    Pause,
    /// The CPU waits for an interrupt.
    Halt,
    /// Triple fault.
    Shutdown,
    /// A debugger wants to look.
    Stop {
        /// PAUSE has retired, with other CPUs there.
        pause: bool,
    },
    /// A fault of ours: what went wrong.
    Defect(String),
}

impl From<engine::Exit> for Exit {
    fn from(exit: engine::Exit) -> Self {
        match exit {
            engine::Exit::Budget => Exit::Budget,
            engine::Exit::Bus => Exit::Bus,
            engine::Exit::Window => Exit::Window,
            engine::Exit::Pause => Exit::Pause,
            engine::Exit::Halt => Exit::Halt,
            engine::Exit::Shutdown => Exit::Shutdown,
            engine::Exit::Stop { pause } => Exit::Stop { pause },
            engine::Exit::Defect(what) => Exit::Defect(what),
        }
    }
}

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
