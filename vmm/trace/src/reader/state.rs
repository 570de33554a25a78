//! Where a visitor stands in a trace: whose code it is, in which mode, and when.

use std::sync::Arc;

use pt_flow::{Event, EventKind, ExecMode};

/// A moment of a recording: where it is, and what the clocks showed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sync {
    /// A PSB is there.
    pub psb: bool,
    /// Offset in the packets.
    pub offset: u64,
    /// The machine's step.
    pub step: u64,
    /// Virtual ticks.
    pub tick: u64,
}

/// Moments are kept up to this many; then every second one is dropped.
const KEPT: usize = 1 << 20;

/// Turns virtual ticks into the machine's steps.
#[derive(Clone, Debug, Default)]
pub struct StepClock(Arc<Vec<Sync>>);

impl StepClock {
    /// A clock of moments in their order.
    pub(super) fn new(syncs: Vec<Sync>) -> StepClock {
        StepClock(Arc::new(syncs))
    }

    /// Adds a moment; a long list becomes a coarse one.
    pub(super) fn push(syncs: &mut Vec<Sync>, sync: Sync) {
        if syncs.len() == KEPT {
            let mut number = 0usize;
            syncs.retain(|_| {
                number += 1;
                number % 2 == 1
            });
        }
        syncs.push(sync);
    }

    /// The machine's step at a time that a packet reported: exact at syncs, and between them as far as the clocks ran evenly, which
    /// they do but for accesses to ports. `None` before the first.
    pub fn step(&self, ticks: u64) -> Option<u64> {
        let after = self.0.partition_point(|sync| sync.tick <= ticks);
        let last = self.0.get(after.checked_sub(1)?)?;
        let step = last.step.saturating_add(ticks - last.tick);
        Some(self.0.get(after).map_or(step, |next| step.min(next.step)))
    }

    /// The moments.
    pub fn syncs(&self) -> &[Sync] {
        &self.0
    }
}

/// What is known where a chunk begins.
#[derive(Clone, Debug)]
pub struct Start {
    /// The vCPU.
    pub cpu: usize,
    /// Offset in its packets.
    pub offset: u64,
    /// For steps.
    pub clock: StepClock,
}

/// Follows what events say: feed it every event, ask it at every block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct State {
    /// CR3 without bits 4:0.
    pub cr3: Option<u64>,
    /// In VMX non-root operation: the code is that of a second-level guest.
    pub non_root: bool,
    /// The current-VMCS pointer, where a packet has told one.
    pub vmcs: Option<u64>,
    /// The width of code.
    pub mode: ExecMode,
    /// Virtual ticks at the last packet that reported them.
    pub ticks: Option<u64>,
    /// In a transaction.
    pub in_tx: bool,
    /// Execution is traced.
    pub enabled: bool,
}

impl State {
    /// At the beginning of a chunk, whose PSB tells everything.
    pub fn new(_: &Start) -> State {
        State {
            cr3: None,
            non_root: false,
            vmcs: None,
            mode: ExecMode::Bits64,
            ticks: None,
            in_tx: false,
            enabled: false,
        }
    }

    /// Takes in an event.
    pub fn event(&mut self, event: &Event) {
        match event.kind {
            EventKind::Paging { cr3, non_root } => (self.cr3, self.non_root) = (Some(cr3), non_root),
            EventKind::Vmcs { pointer } => self.vmcs = Some(pointer),
            EventKind::Mode { mode, .. } => self.mode = mode,
            EventKind::Time(time) => self.ticks = time.tsc.or(self.ticks),
            EventKind::Transaction { in_tx, .. } => self.in_tx = in_tx,
            EventKind::Sync { .. } | EventKind::Enabled { .. } | EventKind::Resumed { .. } => self.enabled = true,
            EventKind::Disabled { .. } | EventKind::TraceStop | EventKind::Overflow | EventKind::Gap(_) => {
                self.enabled = false;
            }
            _ => {}
        }
    }
}
