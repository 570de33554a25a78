//! The ways to run a machine's CPUs.

mod exit;
mod soft;

pub use exit::{Exit, Exits};
pub use soft::{Soft, SoftState};
