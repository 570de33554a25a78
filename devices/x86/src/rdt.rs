//! Resource Director Technology. SDM Vol. 3B 18.18, 18.19.

/// What a model monitors and allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdtCaps {
    /// The highest RMID: CPUID.0FH.0:EBX.
    pub max_rmid: u32,
}
