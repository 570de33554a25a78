//! x87 and vectors.
pub mod state;
pub use state::FpuState;
