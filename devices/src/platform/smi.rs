//! What of an ICH9 raises system-management interrupts on request: ports B2H and B3H, and the register that enables them. ICH9 data
//! sheet "APM_CNT", "APM_STS", "SMI_EN".
//!
//! Nothing is enabled after a reset, and the ACPI tables name no command port, so that nobody gets an SMI who has not asked for one.

use serde::{Deserialize, Serialize};

/// APM_CNT: a write is a request. APM_STS, behind it, is storage for what the handler is to know.
pub const APM: u16 = 0xb2;
/// SMI_EN, 32 bits: 30H above the ACPI registers.
pub const SMI_EN: u16 = super::acpi_pm::PM1A_EVENT + 0x30;

/// SMI_EN: SMIs at all, and those of APM_CNT.
const GBL_SMI_EN: u32 = 1;
const APMC_EN: u32 = 1 << 5;
/// What of SMI_EN is storage: those two, and EOS, which acknowledges an SMI and holds none back here.
const WRITABLE: u32 = GBL_SMI_EN | 1 << 1 | APMC_EN;

/// The registers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmiControl {
    apm: [u8; 2],
    enable: u32,
}

impl SmiControl {
    /// Reads APM_CNT (0) or APM_STS (1).
    pub fn read_apm(&self, offset: u64) -> u8 {
        self.apm[(offset & 1) as usize]
    }

    /// Writes APM_CNT (0) or APM_STS (1): whether every CPU gets an SMI.
    pub fn write_apm(&mut self, offset: u64, value: u8) -> bool {
        self.apm[(offset & 1) as usize] = value;
        let both = GBL_SMI_EN | APMC_EN;
        offset & 1 == 0 && self.enable & both == both
    }

    /// Reads a byte of SMI_EN.
    pub fn read_enable(&self, offset: u64) -> u8 {
        self.enable.to_le_bytes()[(offset & 3) as usize]
    }

    /// Writes a byte of SMI_EN.
    pub fn write_enable(&mut self, offset: u64, value: u8) {
        let mut bytes = self.enable.to_le_bytes();
        bytes[(offset & 3) as usize] = value;
        self.enable = u32::from_le_bytes(bytes) & WRITABLE;
    }

    /// The whole state: registers only.
    pub fn state(&self) -> SmiControl {
        self.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &SmiControl) {
        self.apm = state.apm;
        self.enable = state.enable & WRITABLE;
    }
}

#[cfg(test)]
#[path = "smi_test.rs"]
mod tests;
