//! ACPI fixed hardware: the PM1a event and control blocks and the power-management timer. ACPI Specification 4.8.3 "PM1 Event
//! Grouping", "PM1 Control Grouping", "Power Management Timer (PM_TMR)".
//!
//! There is no SMI command port in the tables, so the machine is always in ACPI mode and SCI_EN always reads 1.

use serde::{Deserialize, Serialize};

/// PM1a event block: status and enable, 16 bits each. FADT "PM1a_EVT_BLK", length 4.
pub const PM1A_EVENT: u16 = 0x600;
/// PM1a control block, 16 bits. FADT "PM1a_CNT_BLK", length 2.
pub const PM1A_CONTROL: u16 = 0x604;
/// Power-management timer, 32 bits. FADT "PM_TMR_BLK", length 4, flag TMR_VAL_EXT.
pub const PM_TIMER: u16 = 0x608;
/// The interrupt of all this. FADT "SCI_INT"; level-triggered.
pub const SCI: u8 = 9;
/// SLP_TYP of S5 (soft off), for the DSDT's `_S5`.
pub const S5: u8 = 5;
/// The timer's frequency in Hz.
pub const PM_TIMER_HZ: u64 = 3_579_545;

/// TMR, GBL, PWRBTN, SLPBTN, RTC and WAK status bits.
const STATUS_BITS: u16 = 0x8721;
const ENABLE_BITS: u16 = 0x0721;
const TIMER: u16 = 0x0001;
/// The power button's status bit.
const POWER_BUTTON: u16 = 0x0100;
const SCI_EN: u16 = 0x0001;
const SLP_EN: u16 = 0x2000;
/// BM_RLD, and SLP_TYP in bits 12:10.
const CONTROL_WRITABLE: u16 = 0x1c02;
/// TMR_STS is set whenever the timer's highest bit changes.
const HALF: u64 = 1 << 31;

const NS: u128 = 1_000_000_000;

fn ticks(now: u64) -> u64 {
    (u128::from(now) * u128::from(PM_TIMER_HZ) / NS) as u64
}

/// The power-management registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcpiPm {
    status: u16,
    enable: u16,
    control: u16,
    power_off: bool,
    now: u64,
}

impl Default for AcpiPm {
    fn default() -> Self {
        AcpiPm::new()
    }
}

impl AcpiPm {
    /// Nothing pending, nothing enabled.
    pub fn new() -> AcpiPm {
        AcpiPm {
            status: 0,
            enable: 0,
            control: 0,
            power_off: false,
            now: 0,
        }
    }

    /// Moves to `now` ns.
    pub fn advance(&mut self, now: u64) {
        if now > self.now {
            if ticks(now) / HALF != ticks(self.now) / HALF {
                self.status |= TIMER;
            }
            self.now = now;
        }
    }

    /// The ns at which the SCI will rise by itself: only the timer can make it.
    pub fn next_event(&self) -> Option<u64> {
        if self.enable & TIMER == 0 || self.irq() {
            return None;
        }
        let tick = (ticks(self.now) / HALF + 1) * HALF;
        Some(
            (u128::from(tick) * NS)
                .div_ceil(u128::from(PM_TIMER_HZ))
                .try_into()
                .unwrap_or(u64::MAX),
        )
    }

    /// The level of the SCI.
    pub fn irq(&self) -> bool {
        self.status & self.enable != 0
    }

    /// Somebody presses the power button.
    pub fn press_power_button(&mut self) {
        self.status |= POWER_BUTTON;
    }

    /// Whether the guest has switched the machine off since the last call.
    pub fn take_power_off(&mut self) -> bool {
        std::mem::take(&mut self.power_off)
    }

    /// Reads byte `offset` (0 to 3) of the event block.
    pub fn read_event(&mut self, offset: u64, now: u64) -> u8 {
        self.advance(now);
        match offset {
            0..=1 => self.status.to_le_bytes()[offset as usize],
            2..=3 => self.enable.to_le_bytes()[offset as usize - 2],
            _ => 0xff,
        }
    }

    /// Writes byte `offset` (0 to 3) of the event block; a status bit is cleared by writing 1.
    pub fn write_event(&mut self, offset: u64, value: u8, now: u64) {
        self.advance(now);
        let word = u16::from(value) << (8 * (offset & 1));
        let byte = 0xff << (8 * (offset & 1));
        match offset {
            0..=1 => self.status &= !(word & STATUS_BITS),
            2..=3 => self.enable = (self.enable & !byte) | (word & byte & ENABLE_BITS),
            _ => {}
        }
    }

    /// Reads byte `offset` (0 or 1) of the control block. SLP_EN reads 0.
    pub fn read_control(&self, offset: u64) -> u8 {
        (self.control | SCI_EN).to_le_bytes()[(offset & 1) as usize]
    }

    /// Writes byte `offset` (0 or 1) of the control block.
    pub fn write_control(&mut self, offset: u64, value: u8) {
        let shift = 8 * (offset & 1);
        let word = u16::from(value) << shift;
        let byte = CONTROL_WRITABLE & (0xff << shift);
        self.control = (self.control & !byte) | (word & byte);
        // S5 is the only sleep that the tables offer; SLP_EN with another type does nothing.
        if word & SLP_EN != 0 && (self.control >> 10) & 7 == u16::from(S5) {
            self.power_off = true;
        }
    }

    /// The power-management timer.
    pub fn read_timer(&mut self, now: u64) -> u32 {
        self.advance(now);
        ticks(self.now) as u32
    }

    /// The whole state: registers only.
    pub fn state(&self) -> AcpiPm {
        self.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &AcpiPm) {
        self.clone_from(state);
    }
}

#[cfg(test)]
#[path = "acpi_pm_test.rs"]
mod tests;
