//! Where things are in the working tree.

use std::path::{Path, PathBuf};

/// The workspace's root folder.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("this crate lives two folders below the root")
}

/// Cargo's output folder, which `CARGO_TARGET_DIR` may have moved.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}
