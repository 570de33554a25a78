//! What a machine on KVM has besides: its CPUs there, and how KVM serves a debugger.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvm::{Counts, Hypervisor, guest_debug::Kinds};
use vmm_sys_util::eventfd::EventFd;

use super::{end::End, stats::Native};
use crate::{debug, error::Error};

/// The KVM side of a machine.
#[derive(Debug)]
pub(crate) struct Hosted {
    pub hypervisor: Hypervisor,
    pub(super) wake: EventFd,
    /// The world outside listens to it.
    pub(super) listened: bool,
    pub(super) counts: Counts,
    /// Handovers to the engine because of a unit.
    pub watched: u64,
}

impl Hosted {
    /// The CPUs of a machine in KVM.
    ///
    /// # Errors
    /// The system has no more events.
    pub fn new(hypervisor: Hypervisor) -> Result<Self, Error> {
        let wake = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(|source| Error::System {
            what: "creating an event",
            source,
        })?;
        Ok(Hosted {
            hypervisor,
            wake,
            listened: false,
            counts: Counts::default(),
            watched: 0,
        })
    }

    /// Figures for `--stats`.
    pub fn stats(&self) -> Native {
        Native {
            exits: self.counts.exits(),
            emulated: self.counts.emulated.load(Ordering::Relaxed),
            watched: self.watched,
            in_engine: Duration::from_nanos(self.counts.in_engine.load(Ordering::Relaxed)),
        }
    }
}

/// What a machine on KVM knows of it.
#[derive(Debug, Default)]
pub(crate) struct Served {
    /// What this host's KVM delivers, once somebody debugs.
    pub(super) kinds: Option<Kinds>,
    /// CPUs that met watchpoints while another one's stop was reported.
    pub(super) waiting: VecDeque<debug::DebugStop>,
}

/// The end of a machine that cannot leave KVM, whose interrupt controllers it has, and would have to.
pub(super) fn stays(report: &str, why: &str) -> End {
    End::Kvm(format!(
        "the interrupt controllers are KVM's, and {why}: use --irqchip minivmm\n{}",
        report
    ))
}
