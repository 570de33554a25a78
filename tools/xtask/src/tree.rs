//! Where things are in the working tree.

use std::path::Path;

/// The workspace's root folder.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("this crate lives two folders below the root")
}
