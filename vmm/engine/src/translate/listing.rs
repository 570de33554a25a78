//! A translation, to be looked at.

/// A block that is translated, with its code on both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// Where it is from, and what its ops are, in one line.
    pub block: String,
    /// Steps that all of it makes.
    pub steps: u64,
    /// The guest's code.
    pub code: Vec<u8>,
    /// The host's code: first it takes the steps off the budget, and behind the last branch stands what is seldom run.
    pub host: Vec<u8>,
    /// Where that is run from.
    pub host_at: u64,
}
