//! The CPUs of a machine on Linux KVM.
//!
//! # Theory
//! KVM runs the guest's instructions on the host's processor. What an instruction reaches for that is neither RAM nor a
//! register of the core comes out of KVM_RUN as an exit, and is served by the same machine that the software engine uses: KVM
//! has no interrupt controller, no clock and no MSRs here but those of the core.
//!
//! # Practice
//! A CPU's state is either in the software engine or in KVM. [`Hypervisor::run`] begins with all states handed to KVM, runs
//! each CPU on a thread of its own until something asks for the software engine, for another CPU's state, or for an end
//! ([`NativeEnd`]), and ends with all of them handed back. While the threads run they share the machine under one lock; the calling
//! thread sees to timers and to the outside.

pub mod clock;
pub mod cpuid;
mod cpus;
mod error;
pub mod fault;
pub mod guest_debug;
mod host;
mod host_traced;
pub mod host_units;
mod hypervisor;
mod inline_emulation;
pub mod irqchip;
mod kernel_halt;
pub mod kernel_irqchip;
mod measure;
mod msr_filter;
mod msrs;
mod passed;
mod perf;
pub mod probe;
pub mod resolve;
mod run;
mod shared;
mod state;
mod sys;
mod timers;
pub mod tracer;
pub mod trial;
pub mod units;
pub mod vcpu_state;
mod view;

pub use clock::HostClock;
pub use cpus::Cpus;
pub use error::KvmError;
pub use host::Host;
pub use hypervisor::{Hypervisor, Limit};
pub use inline_emulation::UNTIL_PORTABLE;
pub use passed::Passed;
pub use shared::{Counts, Native, NativeEnd, Running};
