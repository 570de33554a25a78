//! The observer of a vCPU: what it hears becomes packets and sideband. [`super::recorder`] tells why and how.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use devices::unit::pt::Pt;
use trace::format::Mark;
use x86::model::CpuModel;
use x86::pt::RtitCtl;
use x86::watch::{Access, BranchRecord, Change, Code, Effects, EventRecord, Interest, Processor, Range, Watch};

use super::code_map::CodeMap;
use super::encoder::Job;
use super::mapped::ReportedMappings;
use super::options::{Part, RecordingOptions};
use super::queue::Queue;
use super::standing::Standing;
use super::state::{RecordingState, lock};
use super::trigger::When;
use super::unit;
use super::wanted::WantedProcesses;

/// Mappings that are remembered of a vCPU; with more, a segment is begun and all is forgotten.
const MAPPINGS: usize = 1 << 18;

/// Steps from PSB to PSB: as many as make 16 to 32 KiB of packets of most code. Counted in steps and not in bytes they are where nobody has to
/// know what the encoder has made so far.
const PSB_STEPS: u64 = 1 << 20;

/// The step of the first PSB after a step.
fn next_psb(step: u64) -> u64 {
    (step / PSB_STEPS + 1).saturating_mul(PSB_STEPS)
}

/// The page table that a guest of a hypervisor in the machine runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GuestTable {
    pub page_table: u64,
    /// Nobody has said yet whose it is.
    pub nameless: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObserverState {
    /// Not begun yet, or stopped.
    Idle,
    Tracing,
    /// Over.
    Done,
}

/// Watches a vCPU.
#[derive(Debug)]
pub struct Observer {
    pub(super) cpu: usize,
    pub(super) shared: Arc<RecordingState>,
    queue: Arc<Mutex<Queue>>,
    /// Without filters: a unit that is programmed as the encoder's is and makes no packets. What it wants announced depends on steps alone.
    plain: Option<Pt<Vec<u8>>>,
    ctl: RtitCtl,
    state: ObserverState,
    pub(super) code_map: CodeMap,
    /// [`Interest::code`].
    pub(super) code: u64,
    /// How many of the pool's changes are reported.
    pub(super) seen: u64,
    tsc_offset: u64,
    /// After INIT nothing is executed before the start-up IPI.
    restarts: bool,
    /// The step of the next PSB, at least.
    psb_at: u64,
    /// Which beginning it is.
    pub(super) epoch: u32,
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    generation: u64,
    /// Branches change nothing of what it wants.
    steady: bool,
    pub(super) page_table: u64,
    /// Nobody has said yet whose it is.
    pub(super) nameless: bool,
    /// The same of the guests of a hypervisor in the machine, by their VMCSs.
    pub(super) guest_tables: HashMap<u64, GuestTable>,
    /// A record has said which thread runs.
    pub(super) thread_is_known: bool,
    pub(super) mapped: ReportedMappings,
    /// Which processes are recorded; `None`: all.
    pub(super) wanted: Option<WantedProcesses>,
    /// User code was reported before the kernel was found that knows whose file it is.
    pub(super) has_unknown_code: bool,
    /// The same of a hypervisor's guest: how many Linuxes had been found in guests then.
    pub(super) unknown_code_of_guest: Option<u64>,
    /// Which part of a recording it is.
    part: Part,
    /// How many cuts it has made.
    cuts: usize,
    /// The vCPU sleeps where the recording goes on.
    asleep: bool,
}

impl Observer {
    pub(super) fn new(
        cpu: usize,
        options: &RecordingOptions,
        shared: Arc<RecordingState>,
        queue: Arc<Mutex<Queue>>,
        model: &CpuModel,
    ) -> Observer {
        let (plain, ctl) = unit::with_filters(model, &options.filters);
        Observer {
            cpu,
            plain: options.filters.is_empty().then_some(plain),
            ctl,
            queue,
            shared,
            state: ObserverState::Idle,
            code_map: CodeMap::default(),
            code: 1,
            seen: 0,
            tsc_offset: 0,
            restarts: false,
            psb_at: 0,
            epoch: 0,
            boundaries: Vec::new(),
            ranges: Vec::new(),
            generation: 0,
            steady: false,
            page_table: 0,
            nameless: false,
            guest_tables: HashMap::new(),
            thread_is_known: false,
            mapped: ReportedMappings::default(),
            wanted: WantedProcesses::of(&options.filters),
            has_unknown_code: false,
            unknown_code_of_guest: None,
            part: options.part,
            cuts: 0,
            asleep: false,
        }
    }

    /// The vCPU sleeps where the recording goes on.
    pub fn finds_asleep(&mut self) {
        self.asleep = true;
    }

    /// Has the encoder do something about this moment.
    pub(super) fn post(&mut self, job: Job, cpu: &mut dyn Processor) {
        let at = Standing::of(cpu, self.tsc_offset);
        self.with_queue(|queue| queue.post(job, at));
    }

    fn with_queue(&mut self, f: impl FnOnce(&mut Queue)) {
        let mut queue = lock(&self.queue);
        f(&mut queue);
        if let Some(error) = queue.take_error() {
            self.shared.fail(error);
        }
        drop(queue);
        if self.shared.failed.load(Ordering::Relaxed) && self.state == ObserverState::Tracing {
            self.state = ObserverState::Done;
            self.steady = false;
        }
    }

    /// Programs the unit that stands for the encoder's.
    fn program(&mut self, ctl: RtitCtl, cpu: &mut dyn Processor) {
        let mut at = Standing::of(cpu, self.tsc_offset);
        if let Some(plain) = &mut self.plain {
            unit::program(plain, ctl, &mut at);
            plain.output().clear();
        }
    }

    fn start(&mut self, cpu: &mut dyn Processor) {
        self.state = ObserverState::Tracing;
        self.thread_is_known = false;
        self.seen = self.shared.changed.load(Ordering::Relaxed);
        self.epoch += 1;
        self.code += 1;
        self.restarts = false;
        self.psb_at = next_psb(cpu.step());
        self.program(self.ctl.with_trace_en(true), cpu);
        self.name_guest(cpu);
        let admits = self.admits_current(cpu);
        let first = self.epoch == 1;
        // One that has not run yet begins as in a recording of the whole.
        if first && self.part.continues && cpu.retired() > 0 {
            self.page_table = cpu.context().cr3 & !0x1fff;
            let asleep = self.asleep;
            self.post(Job::GoOn { asleep, admits }, cpu);
        } else {
            self.post(Job::Start { first, admits }, cpu);
        }
    }

    fn stop(&mut self, mark: Mark, cpu: &mut dyn Processor) {
        let tracing = self.state == ObserverState::Tracing;
        let job = match mark == Mark::End && self.part.goes_on {
            true => Job::EndPart { tracing },
            false => Job::Stop { mark, tracing },
        };
        self.post(job, cpu);
        if tracing {
            self.program(self.ctl, cpu);
        }
        self.state = match mark {
            Mark::Stop => ObserverState::Idle,
            _ => ObserverState::Done,
        };
        if mark == Mark::End {
            self.with_queue(Queue::settle);
        }
    }

    /// Whether recording is to begin or stop at what has just happened; the executor asks next what is wanted now.
    fn pull(&mut self, happened: impl FnOnce(&When) -> bool) {
        if let Some(when) = self.shared.trigger()
            && happened(when)
        {
            self.shared.pull(when);
        }
    }

    /// Instructions so far.
    fn count(&mut self, cpu: &dyn Processor) {
        self.shared.retired[self.cpu].store(cpu.retired(), Ordering::Relaxed);
        let retired = self.shared.retired();
        self.pull(|when| matches!(when, When::Instructions(count) if retired >= *count));
    }

    /// What the unit and the trigger want announced.
    fn wants(&mut self, step: u64) -> Interest {
        let mut interest = Interest::NOTHING;
        let mut of_unit = Vec::new();
        let tracing = self.state == ObserverState::Tracing;
        if tracing {
            interest = match &self.plain {
                Some(unit) => unit.interest(step),
                None => {
                    let (interest, boundaries) = lock(&self.queue).wants(step);
                    of_unit = boundaries;
                    interest
                }
            };
            interest.code = self.code;
            interest.instructions = interest.instructions.min(self.psb_at.saturating_sub(step).max(1));
        }
        let when = self.shared.trigger().filter(|_| self.state != ObserverState::Done);
        if let Some(when) = when {
            interest = interest.and(when.interest(self.shared.retired()));
        }
        self.steady = tracing && self.plain.is_some() && when.is_none();
        // Asked after every system call: mostly nothing has to be put together to see that they are the same.
        let switch = self.shared.thread_switch().filter(|_| tracing);
        let exec = self.shared.exec().filter(|_| tracing && self.wanted.is_some());
        let own = [switch, exec];
        let others = self.boundaries.iter().filter(|at| !own.contains(&Some(**at)));
        let has_switch = own.iter().flatten().all(|at| self.boundaries.contains(at));
        if when.is_none() && self.ranges.is_empty() && has_switch && others.eq(&of_unit) {
            return interest;
        }
        let mut boundaries = of_unit;
        boundaries.extend(own.iter().flatten());
        let mut ranges = Vec::new();
        if let Some(when) = when {
            boundaries.extend(when.boundary());
            ranges.extend(when.range());
        }
        boundaries.sort_unstable();
        boundaries.dedup();
        if (&boundaries, &ranges) != (&self.boundaries, &self.ranges) {
            (self.boundaries, self.ranges) = (boundaries, ranges);
            self.generation += 1;
        }
        interest
    }

    /// Begins the next segment where it is time for it, and where the engine asks next what is to be announced: all code is.
    fn turn_page(&mut self, cpu: &mut dyn Processor) {
        if self.state != ObserverState::Tracing || self.restarts {
            return;
        }
        let mut full = false;
        self.with_queue(|queue| full = queue.is_full());
        if full || self.code_map.addresses.len() > MAPPINGS {
            self.next_segment(cpu);
        }
    }

    /// Begins a segment; the engine is to tell all code again.
    pub(super) fn next_segment(&mut self, cpu: &mut dyn Processor) {
        self.code_map.clear();
        self.mapped = ReportedMappings::default();
        self.has_unknown_code = false;
        self.unknown_code_of_guest = None;
        self.code += 1;
        self.steady = false;
        self.post(Job::Segment, cpu);
    }

    /// A PSB where it is time for one: a decoder can begin there.
    fn synchronize(&mut self, cpu: &mut dyn Processor) {
        let step = cpu.step();
        if step >= self.psb_at {
            self.psb_at = next_psb(step);
            self.post(Job::Anchor, cpu);
            self.post(Job::Due, cpu);
        }
    }

    /// Tells the unit.
    fn word(&mut self, job: Job, cpu: &mut dyn Processor) {
        if self.state == ObserverState::Tracing {
            self.post(job, cpu);
            self.turn_page(cpu);
        }
    }
}

impl Watch for Observer {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        let finish = self.shared.finish.load(Ordering::Relaxed);
        self.count(cpu);
        let on = self.shared.on.load(Ordering::Relaxed);
        match self.state {
            ObserverState::Done => {}
            _ if finish => self.stop(Mark::End, cpu),
            ObserverState::Idle if on => self.start(cpu),
            ObserverState::Tracing if !on => self.stop(Mark::Stop, cpu),
            ObserverState::Tracing if self.restarts => {}
            ObserverState::Tracing => {
                let cuts = self.shared.cuts.load(Ordering::Relaxed);
                if std::mem::replace(&mut self.cuts, cuts) == cuts {
                    self.catch_up(cpu);
                } else {
                    // What changed before is reported anew.
                    self.seen = self.shared.changed.load(Ordering::Relaxed);
                    self.next_segment(cpu);
                }
                self.synchronize(cpu);
                self.tell_unknown_code();
            }
            ObserverState::Idle => {}
        }
        self.wants(cpu.step())
    }

    fn is_steady(&self) -> bool {
        self.steady
    }

    fn boundaries(&self) -> &[u64] {
        &self.boundaries
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        self.pull(|when| when.boundary() == Some(address));
        if self.plain.is_none() {
            self.word(Job::Before(address), cpu);
        }
        // A guest of a hypervisor may have other code at these addresses.
        let own = self.state == ObserverState::Tracing && !cpu.context().non_root;
        if own && self.shared.thread_switch() == Some(address) {
            self.name_thread(cpu);
        }
        if own && self.shared.exec() == Some(address) {
            self.names(self.page_table, cpu);
            if let Some(admits) = self.admits_current(cpu) {
                self.post(Job::Admit(admits), cpu);
            }
            self.post(Job::Due, cpu);
        }
        Effects::NONE
    }

    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        self.name_program(cpu);
        if self.state == ObserverState::Tracing {
            self.restarts &= records.is_empty();
            let at = Standing::of(cpu, self.tsc_offset);
            self.with_queue(|queue| queue.branches(records, at));
            self.turn_page(cpu);
        }
        Effects::NONE
    }

    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        self.word(Job::Event(*event), cpu);
        Effects::NONE
    }

    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        if let Change::Hypercall { function } = change {
            let on = self.shared.on.load(Ordering::Relaxed);
            self.pull(|when| *when == When::Hypercall && function == u32::from(!on));
        }
        if self.state != ObserverState::Tracing {
            return Effects::NONE;
        }
        if matches!(change, Change::Cr3 | Change::Vmx { .. }) {
            self.name_process(cpu);
        }
        let mark = match change {
            Change::Init { .. } => Some(Mark::Init),
            Change::StartUp(_) => Some(Mark::StartUp),
            Change::Shutdown => Some(Mark::Shutdown),
            _ => None,
        };
        if let Some(mark) = mark {
            self.post(Job::Mark(mark), cpu);
        }
        match change {
            // The guest's trace stops in system-management mode; what is recorded from outside goes on.
            Change::Smi { .. } | Change::Rsm => return Effects::NONE,
            Change::Init { .. } => self.restarts = true,
            Change::StartUp(_) => self.restarts = false,
            Change::Reset => {
                self.restarts = false;
                if let Some(unit) = &mut self.plain {
                    let _ = unit.change(change, &mut Standing::default());
                }
            }
            _ => {}
        }
        self.word(Job::Change(change), cpu);
        if matches!(change, Change::Wake { .. }) {
            self.post(Job::Time, cpu);
        }
        Effects::NONE
    }

    fn knows(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        self.state != ObserverState::Tracing || self.knows_code(code, cpu)
    }

    fn code(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        self.state == ObserverState::Tracing && self.tell_code(code, cpu)
    }

    fn tsc_offset(&mut self, offset: u64) {
        if self.tsc_offset != offset {
            self.tsc_offset = offset;
            self.with_queue(|queue| queue.post(Job::TscOffset(offset), Standing::default()));
        }
    }

    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        self.pull(|when| when.is_access(access, cpu));
        Effects::NONE
    }

    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        self.count(cpu);
        self.word(Job::Tick, cpu);
        Effects::NONE
    }
}

impl Drop for Observer {
    /// A machine that goes away unfinished leaves what there is.
    fn drop(&mut self) {
        let tracing = self.state == ObserverState::Tracing;
        self.with_queue(|queue| {
            if tracing {
                queue.post(Job::Write, Standing::default());
            }
            queue.settle();
        });
    }
}
