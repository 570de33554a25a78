//! What each virtual CPU has for itself.

pub mod apic_message;
pub mod arch_lbr;
pub mod branch_ring;
#[cfg(test)]
mod branch_test;
pub mod branches;
pub mod cache;
pub mod debugctl;
pub mod ds;
pub mod lapic;
pub mod lbr;
pub mod pmu;
pub mod predictor;
pub mod pt;
pub mod rdt;
