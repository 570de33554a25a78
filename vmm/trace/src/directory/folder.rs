//! The directory itself: making it, and never harming another.

use std::fs;
use std::io;
use std::path::Path;

use super::format::{HEADER, Header};
use crate::regular;

/// Whether a name is one of ours.
pub(crate) fn is_ours(name: &str) -> bool {
    let segment = || {
        let (cpu, rest) = name.strip_prefix("cpu")?.split_once('-')?;
        let (number, suffix) = rest.split_once('.')?;
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        Some(digits(cpu) && digits(number) && matches!(suffix, "pt" | "side"))
    };
    name == HEADER || name == TEMPORARY || name == LINUX || segment().unwrap_or(false)
}

const TEMPORARY: &str = "trace.json.new";

/// What is known of the Linux in the guest, a folder of [`crate::linux::Recording`].
pub const LINUX: &str = "linux";

/// Makes the directory. One that is there may be empty; with `force`, also a trace, which is removed.
///
/// # Errors
/// It has anything else in it, or the system does not want to.
pub fn prepare(folder: &Path, force: bool) -> io::Result<()> {
    match regular::create_private_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        // As below /proc, where only the system makes any.
        Err(error) if error.kind() == io::ErrorKind::NotFound && folder.parent().is_some_and(Path::is_dir) => {
            return Err(io::Error::other("no directory can be made there"));
        }
        result => return result,
    }
    let names = fs::read_dir(folder)?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<io::Result<Vec<_>>>()?;
    if names.is_empty() {
        return Ok(());
    }
    if !force {
        return Err(io::Error::other(
            "is there already; give another directory, or --force to replace the trace in it",
        ));
    }
    let foreign = names.iter().find(|name| !name.to_str().is_some_and(is_ours));
    if let Some(name) = foreign {
        let text = format!("holds {name:?}, which is no part of a trace; --force replaces nothing but traces");
        return Err(io::Error::other(text));
    }
    // The header goes first: without it nothing that is left counts as a trace.
    let (header, rest): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| name == HEADER);
    for name in header.into_iter().chain(rest) {
        let path = folder.join(&name);
        if name == LINUX {
            fs::remove_dir_all(path)?;
        } else {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Writes the header, whole or not at all.
///
/// # Errors
/// What the system says.
pub fn write_header(folder: &Path, header: &Header) -> io::Result<()> {
    let temporary = folder.join(TEMPORARY);
    let written = regular::write_private(&temporary, header.text().as_bytes())
        .and_then(|()| fs::rename(&temporary, folder.join(HEADER)));
    if written.is_err() {
        // On a full disk the one before stays, which says less.
        let _ = fs::remove_file(&temporary);
    }
    written
}
