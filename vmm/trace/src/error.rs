//! What the system says of a failed call, as people read it.

use std::io;

/// The system's sentence without Rust's "(os error N)".
pub fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error") {
        Some((sentence, _)) => sentence.to_lowercase(),
        None => text,
    }
}
