//! What KVM refused.

use std::io;

/// A refusal of KVM as one line: the call and the system's words.
pub(crate) fn refused(what: &'static str) -> impl Fn(io::Error) -> String {
    move |error| format!("{what}: {}", machine::plain(&error))
}
