//! The debug-store area: BTS and PEBS. SDM Vol. 3B 19.4.9 "BTS and DS Save Area".

/// What a model stores in the debug-store area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DsCaps {
    /// IA32_MISC_ENABLE[11] clear: branch trace store is there.
    pub bts: bool,
    /// IA32_MISC_ENABLE[12] clear: processor-event-based sampling is there.
    pub pebs: bool,
}
