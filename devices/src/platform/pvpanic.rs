//! The paravirtual panic device: a guest's kernel that panics writes to its port, so that nobody has to look for it.
//! QEMU, docs/specs/pvpanic.rst "ISA Interface"; Linux, drivers/misc/pvpanic.

use serde::{Deserialize, Serialize};

/// The port, which QEMU has by default.
pub const PVPANIC: u16 = 0x505;

/// "A guest panic has happened and should be processed by the host."
const PANICKED: u8 = 1 << 0;
/// "A guest panic has happened and will be handled by the guest": it has a kernel for that.
const CRASH_LOADED: u8 = 1 << 1;
/// What the device understands, which a read says.
const EVENTS: u8 = PANICKED | CRASH_LOADED;

/// What a guest has said of its panics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pvpanic {
    /// All events so far.
    events: u8,
    /// A panic for the host that nobody has taken.
    waiting: bool,
}

impl Pvpanic {
    /// A device that nobody has written to.
    pub fn new() -> Pvpanic {
        Pvpanic::default()
    }

    /// IN from the port: the events that the device understands.
    pub fn read(&self) -> u8 {
        EVENTS
    }

    /// OUT to the port; events that the device does not understand are ignored.
    pub fn write(&mut self, value: u8) {
        self.events |= value & EVENTS;
        self.waiting |= value & PANICKED != 0;
    }

    /// Whether the guest has panicked since the last call, and leaves the rest to the host.
    pub fn take(&mut self) -> bool {
        std::mem::take(&mut self.waiting)
    }

    /// Whether the guest has ever said that it has panicked, whoever was to deal with it.
    pub fn has_panicked(&self) -> bool {
        self.events != 0
    }

    /// The whole state.
    pub fn state(&self) -> Pvpanic {
        self.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &Pvpanic) {
        self.clone_from(state);
    }
}
