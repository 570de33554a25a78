//! A Linux kernel as it lies in a machine's memory: its symbols, its modules, its processes.
//!
//! # How it is found
//!
//! The kernel's own symbol table (`kallsyms`, kernel/kallsyms.c and scripts/kallsyms.c of Linux) is constant data with a shape
//! of its own, so a look through physical memory finds it wherever KASLR has put the kernel. The symbols lead to everything
//! else: `init_top_pgt` to the page tables, `__start_BTF` to the layouts of structures, `modules` and `init_task` to the lists.
//! So nothing has to be known of the CPUs' state, and a copy of memory serves as well as a running machine.
//!
//! # What is checked
//!
//! Memory of a running machine may be anything. What is read is believed only as far as it is consistent: tables whose parts
//! agree, a `phys_base` that says where the kernel was found, lists that close. All else is `None`, or ends a list early. Each look
//! has a budget, and what is kept of all looks has limits, so that no memory makes either of them endless.
//!
//! # What is left out
//!
//! Kernels whose tables are laid out in another way than up to 6.3 (6.4 moved them), kernels without
//! `CONFIG_KALLSYMS_ALL`, and, for modules and processes, without `CONFIG_DEBUG_INFO_BTF`. Debian's have both.

mod btf;
mod budget;
mod kallsyms;
mod kernel;
mod layouts;
mod memory;
mod modules;
mod paging;
mod recording;
mod tasks;
mod text;

#[cfg(test)]
mod hostile_test;

pub use self::{
    kernel::Kernel,
    memory::Memory,
    modules::{Module, kallsyms_text, modules_text},
    recording::{Recorded, Recording, TaskSeen},
    tasks::Task,
};
