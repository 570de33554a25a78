//! The machine around the CPUs: guest memory, a [bus for each CPU](CpuBus), the devices behind it, ACPI tables, disks, the
//! loaders and the boot CPU's state at entry.
//!
//! There is no way to run a CPU here: the software engine and KVM, which do that, are handed the bus of a CPU.

pub mod acpi;
pub mod boot;
pub mod bus;
pub mod clock;
pub mod collect;
pub mod cpu;
pub mod descriptor;
pub mod disk;
mod error;
pub mod exits;
pub mod images;
pub mod inject;
pub mod loader;
mod machine;
pub mod memory;
pub mod newc;
pub mod pci;
pub mod share;
pub mod sparse;
pub mod virtio;
pub mod vmcore;
pub mod walk;
pub mod watchers;

pub use bus::CpuBus;
pub use error::{StateError, plain};
pub use machine::{Accesses, HARDWARE, Machine, MachineState};
pub use memory::{Memory, MemoryError};
