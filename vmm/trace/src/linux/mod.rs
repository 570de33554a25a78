//! A Linux kernel as it lies in a machine's memory: its symbols, its modules, its processes.
//!
//! # How it is found
//!
//! The kernel's own symbol table (`kallsyms`, kernel/kallsyms.c and scripts/kallsyms.c of Linux) is constant data with a shape
//! of its own, so a look through physical memory finds it wherever KASLR has put the kernel. The symbols lead to everything
//! else: `phys_base` to where the image is, `init_top_pgt` to the page tables, `__start_BTF` to the layouts of structures, `modules` and `init_task` to the lists.
//! So nothing has to be known of the CPUs' state, and a copy of memory serves as well as a running machine.
//!
//! A hypervisor in the machine has guests, and a Linux in one of those is found in the same way, through EPT ([`Guests`]).
//!
//! # What is checked
//!
//! Memory of a running machine may be anything. What is read is believed only as far as it is consistent: tables whose parts
//! agree, a `phys_base` that says where the kernel was found, lists that close. All else is `None`, or ends a list early. Each look
//! has a budget, and what is kept of all looks has limits, so that no memory makes either of them endless.
//!
//! # What is left out
//!
//! Without `CONFIG_KALLSYMS_ALL` data have no symbols, so that there are neither modules nor processes; nor are there without
//! `CONFIG_DEBUG_INFO_BTF`, nor of 32-bit kernels. Debian's 64-bit kernels have both, its 32-bit ones neither. Kernels with
//! `CONFIG_KALLSYMS` off have no symbols of their own.

mod btf;
mod budget;
mod guests;
mod image;
pub mod join;
mod kallsyms;
mod kernel;
mod layouts;
mod map_layout;
mod mappings;
mod memory;
mod modules;
mod paging;
mod recording;
mod tasks;
mod text;

#[cfg(test)]
mod hostile_test;
#[cfg(test)]
mod layouts_test;
#[cfg(test)]
mod mappings_test;

pub use self::{
    guests::{GuestPhysical, Guests, RecordedGuests, VmcsSeen},
    kernel::{Kernel, NotFound},
    mappings::Mapping,
    memory::Memory,
    modules::{Module, kallsyms_text, modules_text},
    recording::{Recorded, Recording, TaskSeen},
    tasks::Task,
};
