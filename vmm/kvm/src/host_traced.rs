//! CPUs in KVM that the host's Intel PT traces for the guest.
//!
//! The unit of the CPU begins and ends the guest's trace itself, as it does in the software engine; in between it takes what the
//! host's tracer has. PebsInputs every access to one of its registers the tracer is stopped, so that the guest finds them as after
//! its last instruction.

use kvm_ioctls::VcpuFd;
use log::{info, trace};
use x86::msr::{IA32_RTIT_ADDR0_A, IA32_RTIT_ADDR3_B, IA32_RTIT_OUTPUT_BASE, IA32_RTIT_OUTPUT_MASK_PTRS};
use x86::watch::Effects;

use crate::hypervisor::Processor;
use crate::shared::{NativeEnd, Running};
use crate::sys::{self, Reason, lock};
use machine::Machine;

/// A [`View`](crate::view::View) stands behind the instruction at RIP, which is RDMSR or WRMSR for it.
const ACCESS: u64 = 2;

/// Whether an exit is for a register of the processor trace.
pub(crate) fn is_of_trace(reason: Reason) -> bool {
    let (Reason::ReadMsr(msr) | Reason::WriteMsr(msr, _)) = reason else {
        return false;
    };
    (IA32_RTIT_OUTPUT_BASE..=IA32_RTIT_OUTPUT_MASK_PTRS).contains(&msr)
        // With the control and status registers before them.
        || (IA32_RTIT_ADDR0_A - 16..=IA32_RTIT_ADDR3_B).contains(&msr)
}

impl Running<'_> {
    /// The CPU is about to run in KVM.
    pub(crate) fn trace_begins(&self, index: usize, cpu: &Processor, vcpu: &mut VcpuFd, machine: &mut Machine) {
        if !self.offers(index, machine) {
            return;
        }
        // What it is put into goes in with a KVM_RUN.
        cpu.kick.complete_only();
        sys::run(vcpu);
        if !self.trace_starts(index, cpu, vcpu, machine, ACCESS) {
            self.stop_locked(NativeEnd::Instructions(index));
        }
    }

    /// Says to the unit what the host's tracer can do, and whether that is asked for.
    fn offers(&self, index: usize, machine: &mut Machine) -> bool {
        let (Some(traces), Some(pt)) = (&self.hypervisor.traces, machine.processor_trace(index)) else {
            return false;
        };
        let served = traces.served(pt.caps());
        machine.cpu(index).serve_trace(Some(served));
        machine.processor_trace(index).is_some_and(|pt| pt.is_served())
    }

    /// The access has been served, and the CPU goes on behind it. `false`: the host's tracer was to record and does not. Whether a
    /// unit of ours has to see instructions is asked after each WRMSR.
    pub(crate) fn trace_resumes(&self, index: usize, cpu: &Processor, vcpu: &VcpuFd, machine: &mut Machine) -> bool {
        !self.offers(index, machine) || self.trace_starts(index, cpu, vcpu, machine, 0)
    }

    /// Has the host's tracer record. `false`: it cannot be had.
    fn trace_starts(&self, index: usize, cpu: &Processor, vcpu: &VcpuFd, machine: &mut Machine, back: u64) -> bool {
        let (Some(traces), Some(pt)) = (&self.hypervisor.traces, machine.processor_trace(index)) else {
            return true;
        };
        match traces.start(pt.control(), &pt.filter()) {
            Ok(tracer) => {
                trace!("CPU {index} is traced by the host: {:?}", pt.control());
                *lock(&cpu.tracer) = Some(tracer);
                let ahead = machine.tsc_offset(index).wrapping_sub(self.hypervisor.clock().base);
                let mut view = self.view(index, vcpu, machine);
                machine.cpu(index).host_trace(&mut view, |pt, cpu| {
                    pt.host_begins(back, ahead, cpu);
                    Effects::NONE
                });
                true
            }
            Err(error) => {
                let why = machine::plain(&error);
                info!("the host does not trace CPU {index}, the software engine does: {why}");
                machine.cpu(index).serve_trace(None);
                false
            }
        }
    }

    /// Gives the guest what has been recorded of it, as far as that can be had while it is.
    pub(crate) fn trace_goes_on(&self, index: usize, cpu: &Processor, vcpu: &VcpuFd) {
        if self.hypervisor.traces.is_none() || lock(&cpu.tracer).is_none() {
            return;
        }
        let mut machine = self.machine();
        self.drain(index, cpu, vcpu, &mut machine);
        // The guest's buffers may be full.
        if !machine.processor_trace(index).is_some_and(|pt| pt.is_served()) {
            self.trace_ends(index, cpu, vcpu, &mut machine);
        }
    }

    fn drain(&self, index: usize, cpu: &Processor, vcpu: &VcpuFd, machine: &mut Machine) {
        let mut bytes = Vec::new();
        let Some(taken) = lock(&cpu.tracer).as_mut().map(|tracer| tracer.take(&mut bytes)) else {
            return;
        };
        if bytes.is_empty() && !taken.lost {
            return;
        }
        let mut view = self.view(index, vcpu, machine);
        machine.cpu(index).host_trace(&mut view, |pt, cpu| {
            let effects = pt.host_bytes(&bytes, cpu);
            if taken.lost {
                pt.host_lost();
            }
            effects
        });
    }

    /// The CPU goes on in the software engine, or an access to a register of the trace is about to be served: the rest of what
    /// has been recorded is the guest's.
    pub(crate) fn trace_ends(&self, index: usize, cpu: &Processor, vcpu: &VcpuFd, machine: &mut Machine) {
        let stopped = lock(&cpu.tracer).as_mut().map(|tracer| tracer.stop());
        let Some(stopped) = stopped else { return };
        if let Err(error) = stopped {
            info!("stopping the host's trace of CPU {index}: {}", machine::plain(&error));
        }
        self.drain(index, cpu, vcpu, machine);
        *lock(&cpu.tracer) = None;
        let mut view = self.view(index, vcpu, machine);
        machine
            .cpu(index)
            .host_trace(&mut view, |pt, cpu| pt.host_ends(ACCESS, cpu));
    }
}
