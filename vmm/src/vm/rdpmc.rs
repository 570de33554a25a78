//! RDPMC of a guest in KVM, whose counters are ours.
//!
//! KVM answers it with #GP. Where KVM delivers breakpoints to the host, one before the guest's handler catches that
//! ([`fault`]), the engine executes the instruction, and counters that count nothing but time go on counting in KVM. Elsewhere a
//! guest whose counters count stays in the engine.
//!
//! The handler is looked up whenever the guest goes to KVM. One that changes its IDT and executes RDPMC before it comes out the
//! next time takes the fault itself.

use engine::Activity;

use super::parts::Vm;
use super::points::{is_armed, linear};
use kvm::{
    fault,
    guest_debug::{self, Hit, ROOM},
};

impl Vm {
    /// Where #GP takes the CPUs, if breakpoints there can catch it beside so many others; `None`: RDPMC is the engine's affair.
    pub(super) fn rdpmc_handlers(&mut self, others: usize) -> Option<Vec<u64>> {
        if !self.machine.has_counters() {
            return None;
        }
        let kinds = self.kinds();
        if !kinds.serves_breakpoints() {
            return None;
        }
        let mut handlers = Vec::new();
        for cpu in self.soft.cpus() {
            let state = cpu.state();
            if state.activity == Activity::WaitForSipi {
                continue;
            }
            if !kinds.beside && is_armed(&state) {
                return None;
            }
            handlers.push(fault::handler(self.machine.memory(), &state)?);
        }
        handlers.sort_unstable();
        handlers.dedup();
        (handlers.len() + others <= ROOM).then_some(handlers)
    }

    /// A CPU that is before such a handler's first instruction, which the engine executes.
    pub(super) fn before_handler(&self, handlers: &[u64]) -> Option<usize> {
        let at = |cpu: usize| {
            self.cpu_state(cpu)
                .is_some_and(|state| handlers.contains(&linear(&state)))
        };
        (0..self.cpu_count()).find(|&cpu| at(cpu))
    }

    /// Takes CPUs that have met a breakpoint behind the first `others` back to their RDPMC, if that is what it was. The first of
    /// them.
    pub(super) fn take_back_rdpmc(&mut self, hits: &[(usize, Hit)], others: usize) -> Option<usize> {
        let mut first = None;
        for &(cpu, hit) in hits {
            if hit.points >> others == 0 {
                continue;
            }
            first.get_or_insert(cpu);
            let before = self
                .cpu_state(cpu)
                .and_then(|state| fault::before_rdpmc(self.machine.memory(), &state));
            if let Some(before) = before {
                self.soft.put(cpu, &before);
            }
        }
        first
    }
}

/// Breakpoints there.
pub(super) fn breakpoints(handlers: &[u64]) -> impl Iterator<Item = x86::debug::Breakpoint> {
    handlers.iter().copied().map(guest_debug::execution)
}
