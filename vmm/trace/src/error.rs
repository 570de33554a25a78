//! What the system says of a failed call, as people read it.

use std::{io, path::Path};

/// The system's sentence without Rust's "(os error N)".
pub fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error") {
        Some((sentence, _)) => sentence.to_lowercase(),
        None => text,
    }
}

/// The same of a file that could not be opened or made, with the folder that is missing, if that is the reason.
pub fn plain_of(error: &io::Error, path: &Path) -> String {
    let missing = |folder: &&Path| {
        let looked = std::fs::metadata(folder);
        looked.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    let folders = path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty());
    match folders.take_while(missing).last() {
        Some(folder) if error.kind() == io::ErrorKind::NotFound => {
            format!("{}: there is no folder {}", plain(error), folder.display())
        }
        _ => plain(error),
    }
}
