//! The machine: memory, tables, devices, CPUs.

pub mod acpi;
pub mod memory;
