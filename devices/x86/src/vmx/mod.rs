//! Virtual-machine extensions: the vocabulary of SDM Vol. 3C chapters 24 to 31 as data and pure functions.
//!
//! - [`fields`]: the fields of a VMCS by encoding, and the region in memory that holds them.
//! - [`controls`]: the VM-execution, VM-exit and VM-entry controls.
//! - [`caps`]: what a part can do, and the MSRs that say so.
//! - [`exits`]: exit reasons, interruption information, VM-instruction errors.
//! - [`check`]: what VM entry checks, a row a rule, in the manual's order.
//! - [`ept`]: extended page tables.

pub mod caps;
pub mod check;
pub mod controls;
pub mod ept;
pub mod exits;
pub mod fields;

pub use caps::VmxCaps;
pub use exits::{ExitReason, InstructionError, Interruption};
pub use fields::{Field, Vmcs};

/// IA32_FEATURE_CONTROL: the lock bit, and VMX outside SMX operation. SDM Vol. 3C 24.7 "Enabling and Entering VMX Operation".
pub const FEATURE_CONTROL_LOCKED: u64 = 1;
/// See [`FEATURE_CONTROL_LOCKED`].
pub const FEATURE_CONTROL_VMX: u64 = 1 << 2;
