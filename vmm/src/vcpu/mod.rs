//! The ways to run a machine's CPUs.

mod exit;
pub mod fault;
pub mod handover;
pub mod kvm;
mod soft;

pub use exit::{Exit, Exits};
pub use soft::{Soft, SoftState};
