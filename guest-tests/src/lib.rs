//! Host side of the guest tests.
