//! The I/O APIC. Intel 82093AA data sheet (290566), with the EOI register of version 20H (ICH and later).

use crate::unit::apic_message::{ApicMessage, Delivery, Destination};
use serde::{Deserialize, Serialize};

/// Where the registers are; the claim is one page.
pub const IOAPIC: u64 = 0xfec0_0000;
/// Number of input pins.
pub const PINS: usize = 24;

/// Version 20H, last redirection entry 23.
const VERSION: u32 = 0x20 | ((PINS as u32 - 1) << 16);

const DELIVERY_STATUS: u64 = 1 << 12;
const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
/// Vector, delivery mode, destination mode, polarity, trigger mode, mask, destination.
const WRITABLE: u64 = 0xff00_0000_0001_afff;

/// 24 pins with a redirection entry each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ioapic {
    id: u32,
    select: u8,
    entries: [u64; PINS],
    /// The pins that are asserted.
    lines: u32,
}

impl Default for Ioapic {
    fn default() -> Self {
        Ioapic::new()
    }
}

impl Ioapic {
    /// All pins masked.
    pub fn new() -> Ioapic {
        Ioapic {
            id: 0,
            select: 0,
            entries: [MASKED; PINS],
            lines: 0,
        }
    }

    /// Asserts or negates a pin. The polarity bit is kept for the guest to read, but no sense is inverted: a device here says
    /// what it means, and there is no wire on which it could be upside down.
    #[must_use]
    pub fn set_pin(&mut self, pin: usize, asserted: bool) -> Option<ApicMessage> {
        let entry = *self.entries.get(pin)?;
        let was = self.lines & (1 << pin) != 0;
        if !asserted {
            self.lines &= !(1 << pin);
            return None;
        }
        self.lines |= 1 << pin;
        if entry & LEVEL != 0 {
            self.offer_level(pin)
        } else if !was && entry & MASKED == 0 {
            // "Edge-sensitive interrupts signaled on a masked interrupt pin are ignored."
            message(entry)
        } else {
            None
        }
    }

    /// Sends a level-triggered pin's message if it is asserted, unmasked and not yet taken.
    fn offer_level(&mut self, pin: usize) -> Option<ApicMessage> {
        let entry = *self.entries.get(pin)?;
        if entry & LEVEL == 0 || entry & (MASKED | REMOTE_IRR) != 0 || self.lines & (1 << pin) == 0 {
            return None;
        }
        let message = message(entry)?;
        if message.level {
            self.entries[pin] |= REMOTE_IRR;
        }
        Some(message)
    }

    /// An EOI for `vector`, broadcast by a local APIC or written to the EOI register: level-triggered pins with that vector are
    /// open again, and those still asserted fire.
    #[must_use]
    pub fn eoi(&mut self, vector: u8) -> Vec<ApicMessage> {
        let mut again = Vec::new();
        for pin in 0..PINS {
            let entry = self.entries[pin];
            if entry & (LEVEL | REMOTE_IRR) == LEVEL | REMOTE_IRR && entry as u8 == vector {
                self.entries[pin] &= !REMOTE_IRR;
                again.extend(self.offer_level(pin));
            }
        }
        again
    }

    /// Reads the 32-bit register at `offset` (a multiple of 4) of the page.
    pub fn read(&self, offset: u64) -> u32 {
        match offset {
            0x00 => u32::from(self.select),
            0x10 => self.register(),
            _ => 0,
        }
    }

    fn register(&self) -> u32 {
        match self.select {
            // The arbitration ID follows the ID.
            0 | 2 => self.id << 24,
            1 => VERSION,
            0x10..=0x3f => {
                let entry = self.entries[usize::from(self.select - 0x10) / 2];
                if self.select & 1 == 0 {
                    entry as u32
                } else {
                    (entry >> 32) as u32
                }
            }
            _ => 0,
        }
    }

    /// Writes the 32-bit register at `offset` (a multiple of 4) of the page.
    #[must_use]
    pub fn write(&mut self, offset: u64, value: u32) -> Vec<ApicMessage> {
        match offset {
            0x00 => self.select = value as u8,
            0x10 => return self.write_register(value).into_iter().collect(),
            0x40 => return self.eoi(value as u8),
            _ => {}
        }
        Vec::new()
    }

    fn write_register(&mut self, value: u32) -> Option<ApicMessage> {
        match self.select {
            0 => self.id = (value >> 24) & 0xf,
            0x10..=0x3f => {
                let pin = usize::from(self.select - 0x10) / 2;
                let shift = u32::from(self.select & 1) * 32;
                let writable = WRITABLE & (0xffff_ffff << shift);
                let mut entry = (self.entries[pin] & !writable) | ((u64::from(value) << shift) & writable);
                if entry & LEVEL == 0 {
                    // An edge has nobody to wait for. Drivers of parts without an EOI register count on this.
                    entry &= !REMOTE_IRR;
                }
                self.entries[pin] = entry;
                return self.offer_level(pin);
            }
            _ => {}
        }
        None
    }

    /// The redirection entry of a pin, as the guest would read it.
    pub fn entry(&self, pin: usize) -> Option<u64> {
        self.entries.get(pin).copied()
    }

    /// The whole state: the controller is registers only.
    pub fn state(&self) -> Ioapic {
        self.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &Ioapic) {
        self.clone_from(state);
    }
}

/// The message of a redirection entry; `None` for a reserved delivery mode, or start-up, which an IOAPIC does not have.
fn message(entry: u64) -> Option<ApicMessage> {
    debug_assert_eq!(entry & DELIVERY_STATUS, 0, "a message goes out at once");
    let delivery = Delivery::from_bits((entry >> 8) as u32).filter(|d| *d != Delivery::StartUp)?;
    Some(ApicMessage {
        destination: Destination::from_u8((entry >> 56) as u8, entry & (1 << 11) != 0),
        delivery,
        vector: entry as u8,
        // SMI, NMI, INIT and ExtINT are edges whatever the entry says.
        level: entry & LEVEL != 0 && matches!(delivery, Delivery::Fixed | Delivery::LowestPriority),
    })
}

#[cfg(test)]
#[path = "ioapic_test.rs"]
mod tests;
