//! System control ports 61H and 92H, the reset control register at CF9H and the diagnostic port 80H: the board's own bits.
//! 82371SB (PIIX3) data sheet "NMI Status and Control Register", "Reset Control Register"; ICH data sheets "PORT92".

use serde::{Deserialize, Serialize};

/// NMI status and control, with the gate of PIT channel 2.
pub const PORT61: u16 = 0x61;
/// Fast A20 and fast reset.
pub const PORT92: u16 = 0x92;
/// Reset control register.
pub const CF9: u16 = 0xcf9;
/// Where firmware shows how far it has come, and where drivers write to pass the time.
pub const DIAGNOSTIC: u16 = 0x80;

const GATE2: u8 = 0x01;
const REFRESH: u8 = 0x10;
const OUT2: u8 = 0x20;
/// Bits 3:0 of port 61H: gate, speaker data, parity and channel-check enables.
const PORT61_WRITABLE: u8 = 0x0f;

const INIT_NOW: u8 = 0x01;
const A20: u8 = 0x02;
/// Reset control register: a hard reset starts when this bit goes from 0 to 1.
const RESET_CPU: u8 = 0x04;
/// Reset control register: system reset, reset CPU, full reset.
const CF9_WRITABLE: u8 = 0x0e;

/// The board's bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemControl {
    port61: u8,
    port92: u8,
    cf9: u8,
    diagnostic: u8,
    reset: bool,
}

impl Default for SystemControl {
    fn default() -> Self {
        SystemControl::new()
    }
}

impl SystemControl {
    /// As the firmware leaves it: A20 on, gate of channel 2 off.
    pub fn new() -> SystemControl {
        SystemControl {
            port61: 0,
            port92: A20,
            cf9: 0,
            diagnostic: 0,
            reset: false,
        }
    }

    /// Reads port 61H, given PIT channel 2's output and the refresh toggle.
    pub fn read_61(&self, out2: bool, refresh: bool) -> u8 {
        self.port61 | if refresh { REFRESH } else { 0 } | if out2 { OUT2 } else { 0 }
    }

    /// Writes port 61H.
    pub fn write_61(&mut self, value: u8) {
        self.port61 = value & PORT61_WRITABLE;
    }

    /// The gate of PIT channel 2.
    pub fn gate2(&self) -> bool {
        self.port61 & GATE2 != 0
    }

    /// Reads port 92H.
    pub fn read_92(&self) -> u8 {
        self.port92
    }

    /// Writes port 92H.
    pub fn write_92(&mut self, value: u8) {
        self.reset |= value & !self.port92 & INIT_NOW != 0;
        self.port92 = value & (INIT_NOW | A20);
    }

    /// Reads the reset control register.
    pub fn read_cf9(&self) -> u8 {
        self.cf9
    }

    /// Writes the reset control register.
    pub fn write_cf9(&mut self, value: u8) {
        self.reset |= value & !self.cf9 & RESET_CPU != 0;
        self.cf9 = value & CF9_WRITABLE;
    }

    /// The last byte written to the diagnostic port.
    pub fn diagnostic(&self) -> u8 {
        self.diagnostic
    }

    /// Writes the diagnostic port.
    pub fn write_diagnostic(&mut self, value: u8) {
        self.diagnostic = value;
    }

    /// Whether a reset was asked for since the last call.
    pub fn take_reset(&mut self) -> bool {
        std::mem::take(&mut self.reset)
    }

    /// The whole state: bits only.
    pub fn state(&self) -> SystemControl {
        self.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &SystemControl) {
        self.clone_from(state);
    }
}

#[cfg(test)]
#[path = "system_control_test.rs"]
mod tests;
