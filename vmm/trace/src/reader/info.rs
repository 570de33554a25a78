//! What `trace info` says: what was recorded, how long, how much, and what is missing.

use std::ops::Range;

use pt_flow::{Block, End, Event, EventKind, Visitor};

use super::image::{Next, Side};
use super::trace::{Decode, Progress, Summary, Trace, TraceError};
use crate::directory::format::{Mark, Record};
use crate::directory::packets::Damage;

/// What the sideband of a vCPU tells, without decoding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuInfo {
    /// The packets that are there, as offsets; what is before them a ring has dropped.
    pub packets: Range<u64>,
    /// Segments.
    pub segments: usize,
    /// Machine steps from the first moment that is reported to the last.
    pub steps: Range<u64>,
    /// Virtual ticks, likewise.
    pub ticks: Range<u64>,
    /// PSBs.
    pub syncs: u64,
    /// Contents of pages of code.
    pub contents: u64,
    /// Pages at their addresses.
    pub pages: u64,
    /// Changes of code.
    pub changes: u64,
    /// How often the vCPU went over to another thread of Linux.
    pub thread_switches: u64,
    /// Mappings of files with code of users' programs.
    pub mappings: u64,
    /// How often the guest moved its TSC.
    pub tsc_moves: u64,
    /// INITs and start-up IPIs.
    pub resets: u64,
    /// How often recording began.
    pub starts: u64,
    /// The recording came to its end, and the sideband is there up to it: so many packets there were.
    pub ended: Option<u64>,
    /// What is damaged, in words.
    pub damage: Vec<String>,
}

/// What decoding counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Conditional branches.
    pub conditional: u64,
    /// Direct jumps.
    pub jumps: u64,
    /// Calls, direct and indirect.
    pub calls: u64,
    /// Near returns.
    pub returns: u64,
    /// Indirect jumps.
    pub indirect: u64,
    /// Far transfers by instructions.
    pub far: u64,
    /// Interrupts, exceptions and the like.
    pub events: u64,
    /// Changes of CR3.
    pub switches: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.conditional += other.conditional;
        self.jumps += other.jumps;
        self.calls += other.calls;
        self.returns += other.returns;
        self.indirect += other.indirect;
        self.far += other.far;
        self.events += other.events;
        self.switches += other.switches;
    }
}

impl Visitor for Counts {
    fn block(&mut self, block: &Block) {
        match block.end {
            End::Conditional => self.conditional += 1,
            End::Jump => self.jumps += 1,
            End::Call | End::IndirectCall => self.calls += 1,
            End::Return => self.returns += 1,
            End::IndirectJump => self.indirect += 1,
            End::Far => self.far += 1,
            _ => {}
        }
    }

    fn event(&mut self, event: &Event) {
        match event.kind {
            EventKind::Async { .. } => self.events += 1,
            EventKind::Paging { .. } => self.switches += 1,
            _ => {}
        }
    }
}

impl Trace {
    /// What the sideband of a vCPU tells.
    pub fn info(&self, cpu: usize) -> CpuInfo {
        let damage = Damage::default();
        let mut info = CpuInfo {
            packets: self.extent(cpu),
            segments: self.segments(cpu).len(),
            ..CpuInfo::default()
        };
        let mut side = Side::new(self.folder(), cpu, self.segments(cpu));
        let mut begun = false;
        let mut moment = |info: &mut CpuInfo, step: u64, tick: u64| {
            if !std::mem::replace(&mut begun, true) {
                (info.steps.start, info.ticks.start) = (step, tick);
            }
            info.steps.end = info.steps.end.max(step);
            info.ticks.end = info.ticks.end.max(tick);
        };
        while let Some(next) = side.next(&damage) {
            let Next::Record(record, _) = next else { continue };
            match record {
                Record::Content { .. } => info.contents += 1,
                Record::Page { .. } => info.pages += 1,
                Record::Change { .. } => info.changes += 1,
                Record::Sync { step, tick, .. } => {
                    info.syncs += 1;
                    moment(&mut info, step, tick);
                }
                Record::Time { step, tick, .. } => moment(&mut info, step, tick),
                Record::Thread { .. } => info.thread_switches += 1,
                Record::Mapping { .. } => info.mappings += 1,
                Record::File { .. } => {}
                Record::Tsc { .. } => info.tsc_moves += 1,
                Record::Mark {
                    mark,
                    offset,
                    step,
                    tick,
                    ..
                } => {
                    match mark {
                        Mark::Start => info.starts += 1,
                        Mark::Init | Mark::StartUp => info.resets += 1,
                        Mark::End => info.ended = Some(offset),
                        Mark::Segment | Mark::Stop | Mark::Shutdown => {}
                    }
                    moment(&mut info, step, tick);
                }
            }
        }
        info.damage = damage.take().1;
        info
    }

    /// What a vCPU executed, by decoding all of it.
    ///
    /// # Errors
    /// As [`Trace::decode`].
    pub fn count(
        &self,
        cpu: usize,
        options: &Decode,
        mut progress: impl FnMut(&Progress),
    ) -> Result<(Counts, Summary), TraceError> {
        let mut counts = Counts::default();
        let summary = self.decode(
            cpu,
            options,
            |_| Counts::default(),
            |found, at| {
                counts += found;
                progress(at);
            },
        )?;
        Ok((counts, summary))
    }
}
