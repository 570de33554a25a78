//! Last-branch records. SDM Vol. 3B 19.4 "Last Branch, Interrupt, and Exception Recording Overview", Vol. 3B ch. 20
//! "Last Branch Records".

/// What a model's last-branch record stack is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LbrCaps {
    /// Entries.
    pub depth: u8,
}
