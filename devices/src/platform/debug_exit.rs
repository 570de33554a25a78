//! The debug-exit port: a guest that writes a value to it ends the run with that value.

use serde::{Deserialize, Serialize};

/// The port; there are four, so that an access of any size is one value.
pub const DEBUG_EXIT: u16 = 0xf4;

/// Keeps the first value until somebody takes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DebugExit {
    value: Option<u32>,
}

impl DebugExit {
    /// A port that nobody has written to.
    pub fn new() -> DebugExit {
        DebugExit::default()
    }

    /// OUT to the port.
    pub fn write(&mut self, value: u32) {
        self.value.get_or_insert(value);
    }

    /// The value written since the last call.
    pub fn take(&mut self) -> Option<u32> {
        self.value.take()
    }

    /// The whole state.
    pub fn state(&self) -> DebugExit {
        self.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &DebugExit) {
        self.clone_from(state);
    }
}
