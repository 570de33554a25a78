#![no_std]
//! The shared x86 vocabulary: register types, MSR names, memory layouts and CPU models. Depends on nothing of ours.

extern crate alloc;

pub mod cpuid;
pub mod cr;
pub mod debug;
pub mod debugctl;
pub mod ds;
pub mod fault;
pub mod lbr;
pub mod model;
pub mod msr;
pub mod paging;
pub mod pmu;
pub mod pt;
pub mod rdt;
pub mod rflags;
pub mod smm;
pub mod vmx;
pub mod watch;
