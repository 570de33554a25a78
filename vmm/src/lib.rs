//! The VMM as a library.

pub mod cli;
pub mod config;
pub mod console;
pub mod error;
pub mod loader;
pub mod machine;
