#![no_std]
//! What a guest test stands on. An image starts as multiboot 1 leaves it (SDM Vol. 3A 10.8.5 "Initializing IA-32e Mode"),
//! goes to 64-bit mode with the first 4 GiB mapped one to one, runs a table of tests, reports each in TAP 14 on the first
//! serial port, and ends through the debug-exit port.
//!
//! # Practice
//! A test is a plain function that panics where something is not as the manual says. The table names what it needs
//! ([`Need`]): where the CPU lacks it, the test is not run; instead the need checks that the feature is absent as the manual
//! says, and the report is a skip with the reason. After each test, panicked or not, the state of the CPU that tests change
//! is put back.
//!
//! Every vector has a stack of its own kind through the IST, for two reasons: a test may break its stack, and the
//! precompiled `core` uses the red zone.
//!
//! # Left out
//! Locks: other CPUs run only what a test starts on them, and only the boot CPU reports.

extern crate alloc;

mod ap;
pub mod apic;
mod boot;
pub mod cpu;
pub mod debug;
pub mod exception;
#[cfg(feature = "bare")]
mod image;
pub mod monitor;
pub mod need;
pub mod paging;
pub mod report;
pub mod serial;
pub mod time;
pub mod user;

pub use ap::{Cpus, MAX_CPUS};
pub use boot::TRAMPOLINE as START_PAGE;
pub use need::Need;
pub use report::Test;

/// The address of a label of `global_asm!`.
#[macro_export]
macro_rules! label {
    ($name:ident) => {{
        unsafe extern "C" {
            static $name: u8;
        }
        core::ptr::addr_of!($name) as u64
    }};
}

/// The image's table of tests for the 32-bit monitor, under the symbol that is linked as `guest_tests32`.
#[macro_export]
macro_rules! tests32 {
    ($symbol:literal; $($name:ident { $($op:expr),* $(,)? })*) => {
        // SAFETY: the symbol is the image's alone.
        #[unsafe(export_name = $symbol)]
        static TABLE: $crate::monitor::Table = $crate::monitor::Table::new(const {
            &[$($crate::monitor::Test::new(stringify!($name), const { &[$($op),*] }),)*]
        });
    };
}

/// Calls a routine of `global_asm!` that keeps the C convention, with up to six words.
#[macro_export]
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        $crate::user::call($crate::label!($name), &[$($argument as u64),*])
    }};
}

/// The image's table of tests, under the symbol that `guest-tests/build.rs` links as `guest_tests`: `name` or `name: NEED, NEED`.
///
/// A table and not an attribute of each test, for three reasons. All guests are one library, so that an attribute, which sees its
/// function alone, could not say which image a test is of without it being named at each of them. What collected them would be a
/// section of the linker's, whose order is its own, where tests run and are reported in the order of the table. And a model's
/// skips can be read off a table at a glance.
#[macro_export]
macro_rules! tests {
    ($symbol:literal; $($name:ident $(: $($need:expr),+)?;)*) => {
        /// The tests of this image, in the order in which they run.
        pub const TESTS: &[$crate::Test] = &[$($crate::Test {
            name: stringify!($name),
            needs: &[$($($need),+)?],
            run: $name,
        },)*];

        // SAFETY: the symbol is the image's alone.
        #[unsafe(export_name = $symbol)]
        fn table() -> &'static [$crate::Test] {
            TESTS
        }
    };
}
