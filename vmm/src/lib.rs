//! The VMM as a library.
