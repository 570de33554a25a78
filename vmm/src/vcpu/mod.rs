//! The software engine's CPUs.

mod soft;

pub use soft::{Soft, SoftState};
