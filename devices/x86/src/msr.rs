//! MSR numbers under their manual names (SDM Vol. 4 "Model-Specific Registers"), and what an access can come to.

/// Why RDMSR or WRMSR did not go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsrFault {
    /// Some other unit owns this number, or none does.
    Unclaimed,
    /// The guest gets #GP(0).
    GeneralProtection,
}
