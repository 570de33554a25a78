//! The front ends of a machine: what turns a person's or a program's requests into stops, and stops into answers.

pub mod btrace;
mod clients;
pub mod console;
pub mod control;
pub mod controls;
pub mod gdb;
mod guest_panic;
mod human_monitor;
mod location;
pub mod monitor;
pub mod names;
mod panic_dump;
mod qmp;
pub mod query;
pub mod query_part;
mod query_pass;
pub mod requests;
pub mod serve;
mod socket;
