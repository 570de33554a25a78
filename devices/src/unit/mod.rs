//! What each virtual CPU has for itself.

pub mod apic_message;
pub mod debugctl;
pub mod lapic;
pub mod rdt;
