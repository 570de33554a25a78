//! IA32_DS_AREA (600H): where the management area is. SDM Vol. 3B 18.4.9.2 "Setting Up the DS Save Area".

use x86::cpuid::Features;
use x86::msr::{IA32_DS_AREA, MsrFault};
use x86::watch::Change;

use crate::unit::lbr::is_canonical;

/// The register. There is one where CPUID shows DS.
#[derive(Clone, Debug)]
pub struct DsArea {
    present: bool,
    linear_bits: u32,
    base: u64,
}

impl DsArea {
    /// The register of a part that shows these features; `linear_bits` is the width of linear addresses.
    pub fn new(features: Features, linear_bits: u32) -> Self {
        Self {
            present: features.ds(),
            linear_bits,
            base: 0,
        }
    }

    /// Linear address of the management area.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// RDMSR.
    ///
    /// # Errors
    /// [`MsrFault::Unclaimed`] for any other register, and where there is none.
    pub fn read_msr(&self, msr: u32) -> Result<u64, MsrFault> {
        match msr {
            IA32_DS_AREA if self.present => Ok(self.base),
            _ => Err(MsrFault::Unclaimed),
        }
    }

    /// WRMSR.
    ///
    /// # Errors
    /// [`MsrFault::GeneralProtection`] for an address that is not canonical, on a 32-bit part for one above 4 GiB;
    /// [`MsrFault::Unclaimed`] for any other register, and where there is none.
    pub fn write_msr(&mut self, msr: u32, value: u64) -> Result<(), MsrFault> {
        match msr {
            IA32_DS_AREA if !self.present => Err(MsrFault::Unclaimed),
            IA32_DS_AREA if !is_canonical(value, self.linear_bits) => Err(MsrFault::GeneralProtection),
            IA32_DS_AREA => {
                self.base = value;
                Ok(())
            }
            _ => Err(MsrFault::Unclaimed),
        }
    }

    /// `Watch` callback: power-up clears the register, INIT leaves it.
    pub fn state_changed(&mut self, change: Change) {
        if change == Change::Reset {
            self.base = 0;
        }
    }

    /// The whole state.
    pub fn state(&self) -> u64 {
        self.base
    }

    /// Takes a whole state back.
    pub fn set_state(&mut self, base: u64) {
        if is_canonical(base, self.linear_bits) {
            self.base = base;
        }
    }
}

#[cfg(test)]
#[path = "area_test.rs"]
mod tests;
