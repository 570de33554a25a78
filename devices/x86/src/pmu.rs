//! Performance monitoring. SDM Vol. 3B ch. 21 "Performance Monitoring".

/// What a model counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmuCaps {
    /// Architectural version: CPUID.0AH:EAX[7:0]; 0 for the P6 family.
    pub version: u8,
}
