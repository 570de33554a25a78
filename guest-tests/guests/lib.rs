#![no_std]
//! Guests that check the debug and trace features as software sees them: a module a feature, a function a test. What a test
//! needs stands in the table at the end of its module. `rt` boots, reports and puts things back.

extern crate alloc;

pub mod apic;
pub mod arch_lbr;
pub mod bts;
pub mod cpuid_msrs;
pub mod debugctl;
pub mod dr;
pub mod dr_delivery;
pub mod lbr;
pub mod legacy;
pub mod pattern;
pub mod pebs;
pub mod pmu;
pub mod pt_filters;
pub mod pt_packets;
pub mod pt_topa;
pub mod rdt;
pub mod sampling;
pub mod smm;
pub mod smp;
pub mod task_switch;
pub mod trace;
pub mod tsc;
pub mod vmm;
pub mod vmx;
