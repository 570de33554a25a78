//! Floating point and SIMD: the state, its memory images, and the instructions.
//!
//! Vector instructions are executed by the host's own copy of the same instruction ([`thunk`]), or by tables of our own, which ask
//! nothing of the host (`portable`); x87 arithmetic, which IEEE 754
//! and the manual define to the last bit, runs on the host's x87 unit with the guest's control word ([`x87`]); what differs
//! between vendors (the transcendental functions, RCPPS and RSQRTPS) is computed here in integers, so that a run does not
//! depend on the host.

pub mod approx;
mod host;
pub(crate) mod portable;
pub mod state;
pub mod thunk;
mod transcendental;
mod wide;
pub mod x87;

pub use state::FpuState;
