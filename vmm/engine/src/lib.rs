//! The software x86-64 CPU, exact to the retired instruction.

pub mod bus;
pub mod undefined;

pub use undefined::Undefined;
