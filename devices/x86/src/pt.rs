//! Intel Processor Trace. SDM Vol. 3C ch. 34 "Intel Processor Trace".

/// What a model's processor trace can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PtCaps {
    /// CPUID.14H.0:EBX.
    pub ebx: u32,
    /// CPUID.14H.0:ECX.
    pub ecx: u32,
}
