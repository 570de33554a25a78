//! The front ends of a machine: what turns a person's or a program's requests into stops, and stops into answers.

pub mod console;
pub mod control;
pub mod gdb;
pub mod monitor;
pub(crate) mod place;
