//! CPUs whose HLT is KVM's, as it is where KVM has the interrupt controllers: whether anything will ever wake them.
//!
//! HLT is no exit there, so nobody here sees a CPU halt. While CPUs come out of KVM something happens; once none has for a while
//! all are asked what they are doing, by a kick. One that lets interrupts in sleeps for good if its APIC's timer is not armed, if
//! the interval timer is not or leads nowhere, and if no device of ours has something to come.

use std::sync::atomic::Ordering;

use engine::Activity;
use kvm_ioctls::VcpuFd;

use crate::kernel_irqchip;
use crate::shared::{Local, NativeEnd, Running};
use crate::timers;

/// So often in a row all have to be found halted for good: between two answers one may have woken another by an NMI.
const TIMES: u64 = 2;

impl Running<'_> {
    /// Whether no CPU has come to us since the calling thread looked last. It may sleep for longer then: it is woken.
    pub fn is_quiet(&self) -> bool {
        self.asleep.quiet.load(Ordering::SeqCst)
    }

    /// A CPU has come to us with an access.
    pub(crate) fn has_asked(&self) {
        if self.asleep.quiet.swap(false, Ordering::SeqCst) {
            let _ = self.wake.write(1);
        }
    }

    /// A CPU that was kicked says what it is doing.
    pub(crate) fn notice(&self, index: usize, vcpu: &mut VcpuFd) {
        let local = &self.cpus[index];
        let listens = vcpu.get_kvm_run().if_flag != 0;
        let (halted, interrupts_masked, armed) = match kernel_irqchip::activity(vcpu) {
            Ok(Activity::Running) => (false, false, false),
            Ok(Activity::Halted) if listens => match timers::is_armed(vcpu) {
                Ok(armed) => (true, false, armed),
                Err(what) => return self.stop(NativeEnd::Failed(index, what)),
            },
            // Only another CPU can end that.
            Ok(_) => (true, true, false),
            Err(what) => return self.stop(NativeEnd::Failed(index, what)),
        };
        local.armed.store(armed, Ordering::SeqCst);
        local.interrupts_masked.store(interrupts_masked, Ordering::SeqCst);
        local.halted.store(halted, Ordering::SeqCst);
    }

    /// Whether all CPUs are halted, or wait for a start-up IPI, and neither one of them nor a timer of KVM's could wake one. Second:
    /// one of them listens to interrupts.
    pub(crate) fn sleeps_for_good(&self) -> (bool, bool) {
        let asleep = &self.asleep;
        let accesses = || self.counts.bus.load(Ordering::SeqCst);
        let now = accesses();
        asleep.quiet.store(true, Ordering::SeqCst);
        if asleep.accesses.swap(now, Ordering::SeqCst) != now || accesses() != now {
            asleep.quiet.store(false, Ordering::SeqCst);
            asleep.asked.store(false, Ordering::SeqCst);
            asleep.found.store(0, Ordering::SeqCst);
            return (false, true);
        }
        let for_good = |local: &Local| local.halted.load(Ordering::SeqCst) && !local.armed.load(Ordering::SeqCst);
        let listening = !self
            .cpus
            .iter()
            .all(|local| local.interrupts_masked.load(Ordering::SeqCst));
        let all = asleep.asked.swap(true, Ordering::SeqCst)
            && self.cpus.iter().all(for_good)
            && !(listening && timers::interval_timer_wakes(&self.hypervisor.vm));
        let found = match all {
            true => asleep.found.fetch_add(1, Ordering::SeqCst) + 1,
            false => {
                asleep.found.store(0, Ordering::SeqCst);
                0
            }
        };
        if found < TIMES {
            for (local, cpu) in self.cpus.iter().zip(&self.hypervisor.cpus) {
                local.halted.store(false, Ordering::SeqCst);
                cpu.kick.kick();
            }
        }
        (found >= TIMES, listening)
    }
}
