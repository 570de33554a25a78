//! The front ends of a machine: what turns a person's or a program's requests into stops, and stops into answers.

pub mod btrace;
pub mod console;
pub mod control;
pub mod controls;
pub mod gdb;
mod guest_panic;
mod location;
pub mod monitor;
pub mod names;
pub mod serve;
mod socket;
