//! IA32_DEBUGCTL. SDM Vol. 3B 19.4.1 "IA32_DEBUGCTL MSR".

/// Which bits of IA32_DEBUGCTL a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DebugCtlCaps {
    /// The bits that WRMSR accepts; any other is #GP(0).
    pub writable: u64,
}
