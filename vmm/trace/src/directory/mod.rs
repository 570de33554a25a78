//! The directory that a recording is: its bytes, written and read.

pub mod folder;
pub mod format;
pub mod frames;
pub mod packets;
pub mod sink;
