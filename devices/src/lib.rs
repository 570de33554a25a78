//! Everything a guest programs through a register. Knows no KVM, no decoder, no threads.
