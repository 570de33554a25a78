//! The developer loop.
fn main() {}
