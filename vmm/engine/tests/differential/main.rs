//! The engine against the CPU that runs the test: the same instruction from the same state on both, then registers, flags,
//! memory and exceptions compared.

mod arena;
mod compare;
mod families;
mod forms;
mod generate;
mod guest;
mod host;
mod host_tables;
mod rng;
mod sequences;
#[path = "../skip.rs"]
mod skip;
mod state;
mod vendor;
