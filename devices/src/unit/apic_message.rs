//! The words that IOAPIC and local APICs speak to each other. SDM Vol. 3A 11.11.2 "Message Data Register Format" and
//! 11.6.1 "Interrupt Command Register (ICR)" name the same fields.

/// What a message asks of the CPU that takes it: the delivery-mode field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// 000: the vector, to every addressed APIC.
    Fixed,
    /// 001: the vector, to the one addressed APIC that runs at the lowest priority.
    LowestPriority,
    /// 010: a system-management interrupt.
    Smi,
    /// 100: a non-maskable interrupt; the vector is ignored.
    Nmi,
    /// 101: an INIT; the vector is ignored.
    Init,
    /// 110: a start-up IPI; the vector names the page at which the CPU starts.
    StartUp,
    /// 111: an interrupt whose vector the external controller (the 8259) supplies.
    ExtInt,
}

impl Delivery {
    /// Decodes the three-bit field; 011 is reserved.
    pub fn from_bits(bits: u32) -> Option<Delivery> {
        Some(match bits & 7 {
            0 => Delivery::Fixed,
            1 => Delivery::LowestPriority,
            2 => Delivery::Smi,
            4 => Delivery::Nmi,
            5 => Delivery::Init,
            6 => Delivery::StartUp,
            7 => Delivery::ExtInt,
            _ => return None,
        })
    }
}

/// Whom a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The APIC with this ID.
    Physical(u32),
    /// The APICs whose logical ID matches this message destination address.
    Logical(u32),
    /// Every APIC.
    All,
}

impl Destination {
    /// A destination of eight bits, as the IOAPIC and an xAPIC write it: physical FFH is everybody.
    pub fn from_u8(id: u8, logical: bool) -> Destination {
        match (logical, id) {
            (true, _) => Destination::Logical(u32::from(id)),
            (false, 0xff) => Destination::All,
            (false, _) => Destination::Physical(u32::from(id)),
        }
    }

    /// A destination of 32 bits, as an x2APIC writes it: FFFF_FFFFH is everybody in either mode.
    /// SDM Vol. 3A 11.12.9 "ICR Operation in x2APIC Mode".
    pub fn from_u32(id: u32, logical: bool) -> Destination {
        match (logical, id) {
            (_, u32::MAX) => Destination::All,
            (true, _) => Destination::Logical(id),
            (false, _) => Destination::Physical(id),
        }
    }
}

/// An interrupt on its way to one or more local APICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApicMessage {
    /// Whom it is for.
    pub destination: Destination,
    /// What it asks.
    pub delivery: Delivery,
    /// The vector, where the delivery mode has one.
    pub vector: u8,
    /// Level-triggered: the EOI goes back to the IOAPIC.
    pub level: bool,
}
