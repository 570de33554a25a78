//! The VMM as a library: [`cli`] makes a [`config::MachineConfig`], [`run::Vm`] makes a machine of it and runs it.

pub mod cli;
pub mod collect;
pub mod config;
pub mod console;
pub mod disk;
pub mod error;
pub mod inject;
pub mod loader;
pub mod logger;
pub mod machine;
pub mod model;
pub mod newc;
pub mod run;
