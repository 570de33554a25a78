//! One pass over a part of a run that remembers the last write to a range, and the last call of a function: what lies in the past of a
//! part need not be met backwards, piece by piece, where the whole part has to be run anyway.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use x86::watch::{Access, AccessKind, Effects, Interest, Processor, Range, Watch};

use crate::{debug::Watchpoint, timeline::run::Run};

/// A write: before which step, by which CPU and instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hit {
    pub step: u64,
    pub cpu: usize,
    pub ip: u64,
}

/// What was seen last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Last {
    /// The last write.
    pub write: Option<Hit>,
    /// The step of the last call, and the last write before it.
    pub call: Option<(u64, Option<Hit>)>,
}

/// What a pass remembers.
#[derive(Clone, Debug, Default)]
pub(super) struct Pass(Arc<Mutex<Last>>);

impl Pass {
    /// Watches a run from here on for writes to a range and for calls of a function.
    pub fn begin(run: &mut Run, written: Option<Watchpoint>, function: Option<u64>) -> Pass {
        let pass = Pass::default();
        for cpu in 0..run.cpu_count() {
            let range = |watchpoint: Watchpoint| Range {
                first: watchpoint.first(),
                last: watchpoint.last(),
                ports: false,
                reads: false,
                writes: true,
            };
            let watcher = Watcher {
                cpu,
                ranges: written.map(range).into_iter().collect(),
                function: function.into_iter().collect(),
                pass: pass.clone(),
            };
            run.machine().observe(cpu, Some(Box::new(watcher)));
        }
        pass
    }

    /// Ends it: what was seen last.
    pub fn end(self, run: &mut Run) -> Last {
        for cpu in 0..run.cpu_count() {
            run.machine().observe(cpu, None);
        }
        *self.last()
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Watcher {
    cpu: usize,
    ranges: Vec<Range>,
    function: Vec<u64>,
    pass: Pass,
}

impl Watch for Watcher {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            ranges: !self.ranges.is_empty(),
            ..Interest::NOTHING
        }
    }

    fn boundaries(&self) -> &[u64] {
        &self.function
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    fn generation(&self) -> u64 {
        1
    }

    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        if self.function.contains(&address) {
            let mut last = self.pass.last();
            last.call = Some((cpu.step(), last.write));
        }
        Effects::NONE
    }

    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        let ahead = |range: &Range| range.first.wrapping_sub(access.address) < u64::from(access.size);
        let within = |range: &Range| (range.first..=range.last).contains(&access.address);
        let writes = matches!(access.kind, AccessKind::Write | AccessKind::ReadWrite);
        if writes && self.ranges.iter().any(|range| ahead(range) || within(range)) {
            self.pass.last().write = Some(Hit {
                // It has retired.
                step: cpu.step().saturating_sub(1),
                cpu: self.cpu,
                ip: access.ip,
            });
        }
        Effects::NONE
    }
}
