//! A part of a trace, block by block. Several vCPUs are shown in the order of the machine's steps, so that a thread that moves from one to
//! another is shown in the order in which it ran.

use std::sync::mpsc::{Receiver, sync_channel};

use pt_flow::{Block, Event, EventKind, GapKind, Visitor};

use crate::error::plain;
use crate::{At, Decode, Progress, Start, State, StepClock, Trace, TraceError};

/// Packets that are decoded to one piece. Its blocks are some fifty times as large, and there are a few pieces for each thread.
const CHUNK: usize = 1 << 16;
/// With the code of each block a piece is larger again.
const CHUNK_WITH_CODE: usize = 1 << 14;

/// A moment to begin or to end at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A step of the machine.
    Step(u64),
    /// Virtual time in nanoseconds.
    Time(u64),
    /// When this address is executed for the first time.
    Address(u64),
}

/// What part of a trace is wanted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Window {
    /// From here on, else from the beginning.
    pub from: Option<Bound>,
    /// Up to here, else to the end. An address that is executed is not part of it.
    pub to: Option<Bound>,
    /// Threads that decode; 0: one for each CPU of the host.
    pub threads: usize,
}

/// Where a viewer is.
#[derive(Clone, Debug)]
pub struct Here {
    /// The vCPU.
    pub cpu: usize,
    /// Instructions of the vCPU since the window began.
    pub instructions: u64,
    /// Virtual ticks: exact where a packet tells the time, and later by an instruction each. `None` before the first.
    pub ticks: Option<u64>,
    /// The machine's step, in the same way.
    pub step: Option<u64>,
    /// CR3, mode and so on.
    pub state: State,
    clock: StepClock,
    tsc_khz: u64,
}

impl Here {
    fn new(start: &Start, tsc_khz: u32, instructions: u64) -> Here {
        Here {
            cpu: start.cpu,
            instructions,
            ticks: None,
            step: None,
            state: State::new(start),
            clock: start.clock.clone(),
            tsc_khz: u64::from(tsc_khz).max(1),
        }
    }

    fn event(&mut self, event: &Event) {
        self.state.event(event);
        if let EventKind::Time(_) = event.kind {
            // A clock does not go back because a packet came late.
            self.ticks = self.state.ticks.max(self.ticks);
            self.step = self.ticks.and_then(|ticks| self.clock.step(ticks)).max(self.step);
        }
    }

    fn ran(&mut self, count: u64) {
        self.instructions += count;
        self.ticks = self.ticks.map(|ticks| ticks.saturating_add(count));
        self.step = self.step.map(|step| step.saturating_add(count));
    }

    /// Virtual time in nanoseconds.
    pub fn ns(&self) -> Option<u64> {
        self.ticks
            .map(|ticks| (u128::from(ticks) * 1_000_000 / u128::from(self.tsc_khz)) as u64)
    }
}

/// Takes what is in a window, in order.
pub trait Viewer {
    /// The bytes of blocks are wanted.
    const CODE: bool = false;

    /// Instructions are executed; `here` is the moment before the first. `code` is empty unless it is asked for.
    fn block(&mut self, here: &Here, block: &Block, code: &[u8]);

    /// Something else happens.
    fn event(&mut self, here: &Here, event: &Event);

    /// The window is over.
    fn end(&mut self, here: &Here) {
        let _ = here;
    }
}

/// What was in a window.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Blocks.
    pub blocks: u64,
    /// Instructions.
    pub instructions: u64,
    /// Places where the processor lost packets.
    pub overflows: u64,
    /// Places where instructions are missing.
    pub gaps: u64,
    /// Bytes of packets that are damaged or gone.
    pub lost: u64,
    /// What is damaged, a line each.
    pub damage: Vec<String>,
    /// Steps of the machine at the beginning and the end.
    pub steps: Option<(u64, u64)>,
    /// Virtual time then, in nanoseconds.
    pub time: Option<(u64, u64)>,
}

impl Totals {
    /// Adds what was found on another vCPU.
    pub fn add(&mut self, other: &Totals) {
        let join = |a: Option<(u64, u64)>, b: Option<(u64, u64)>| match (a, b) {
            (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
        self.blocks += other.blocks;
        self.instructions += other.instructions;
        self.overflows += other.overflows;
        self.gaps += other.gaps;
        self.lost += other.lost;
        self.damage.extend(other.damage.iter().cloned());
        self.steps = join(self.steps, other.steps);
        self.time = join(self.time, other.time);
    }

    /// Nothing is missing.
    pub fn whole(&self) -> bool {
        self.gaps == 0 && self.overflows == 0 && self.damage.is_empty()
    }
}

/// What a thread found in a chunk.
struct Pile<const CODE: bool> {
    here: Here,
    blocks: Vec<Block>,
    /// With the number of blocks before each.
    events: Vec<(u32, Event)>,
    code: Vec<u8>,
}

impl<const CODE: bool> Visitor for Pile<CODE> {
    const CODE: bool = CODE;

    #[inline]
    fn block(&mut self, block: &Block) {
        self.blocks.push(*block);
    }

    fn event(&mut self, event: &Event) {
        self.events.push((self.blocks.len() as u32, *event));
    }

    fn code(&mut self, _: &Block, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }
}

/// Cuts a vCPU's stream of blocks to the window and keeps the moment.
struct Cut {
    window: Window,
    here: Option<Here>,
    totals: Totals,
    begun: bool,
    over: bool,
}

impl Cut {
    fn new(window: Window) -> Cut {
        Cut {
            window,
            here: None,
            totals: Totals::default(),
            begun: false,
            over: false,
        }
    }

    fn reached(bound: Bound, here: &Here, block: Option<&Block>) -> bool {
        match bound {
            Bound::Step(step) => here.step.is_some_and(|now| now >= step),
            Bound::Time(ns) => here.ns().is_some_and(|now| now >= ns),
            Bound::Address(address) => block.is_some_and(|block| address.wrapping_sub(block.ip) < u64::from(block.len)),
        }
    }

    /// Whether what comes next is in the window.
    fn inside(&mut self, viewer: &mut impl Viewer, block: Option<&Block>) -> bool {
        let Some(here) = &mut self.here else { return false };
        if self.over {
            return false;
        }
        if !self.begun {
            if self.window.from.is_some_and(|from| !Cut::reached(from, here, block)) {
                return false;
            }
            self.begun = true;
            here.instructions = 0;
            self.totals.steps = here.step.map(|step| (step, step));
            self.totals.time = here.ns().map(|ns| (ns, ns));
        } else if self.window.to.is_some_and(|to| Cut::reached(to, here, block)) {
            self.end(viewer);
        }
        !self.over
    }

    fn end(&mut self, viewer: &mut impl Viewer) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        if let Some(here) = &self.here {
            let end = |range: Option<(u64, u64)>, now: Option<u64>| {
                range.map(|(from, to)| (from, now.map_or(to, |now| now.max(to))))
            };
            self.totals.steps = end(self.totals.steps, here.step);
            self.totals.time = end(self.totals.time, here.ns());
            viewer.end(here);
        }
    }

    fn event(&mut self, viewer: &mut impl Viewer, event: &Event) {
        if let Some(here) = &mut self.here {
            here.event(event);
        }
        if !self.inside(viewer, None) {
            return;
        }
        match event.kind {
            EventKind::Gap(_) => self.totals.gaps += 1,
            EventKind::Overflow => self.totals.overflows += 1,
            _ => {}
        }
        if let Some(here) = &self.here {
            let totals = &mut self.totals;
            totals.steps = totals.steps.or(here.step.map(|step| (step, step)));
            totals.time = totals.time.or(here.ns().map(|ns| (ns, ns)));
            viewer.event(here, event);
        }
    }

    fn block(&mut self, viewer: &mut impl Viewer, block: &Block, code: &[u8]) {
        let inside = self.inside(viewer, Some(block));
        let Some(here) = &mut self.here else { return };
        if inside {
            self.totals.blocks += 1;
            self.totals.instructions += u64::from(block.count);
            viewer.block(here, block, code);
        }
        here.ran(block.count.into());
    }
}

/// Shows the parts of vCPUs that are in a window, in the order of the machine's steps. `progress` hears how many bytes of packets of
/// how many are done.
///
/// # Errors
/// There is no such vCPU, or its files cannot be read. What cannot be decoded is counted, and shown as an event.
pub fn view<V: Viewer>(
    trace: &Trace,
    cpus: &[usize],
    window: &Window,
    viewer: &mut V,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Totals, TraceError> {
    if V::CODE {
        run::<V, true>(trace, cpus, window, viewer, progress)
    } else {
        run::<V, false>(trace, cpus, window, viewer, progress)
    }
}

/// What a decoder gives: a pile, and how many bytes of packets of how many are done.
type Delivery<const CODE: bool> = (Pile<CODE>, u64, u64);

/// What a vCPU's decoder has found and nobody has been shown yet.
struct Feed<const CODE: bool> {
    from: Receiver<Delivery<CODE>>,
    pile: Option<Pile<CODE>>,
    /// Blocks, events and bytes of code of the pile that have been shown.
    blocks: usize,
    events: usize,
    code: usize,
    cut: Cut,
    done: u64,
    total: u64,
    over: bool,
}

impl<const CODE: bool> Feed<CODE> {
    /// The step up to which all was shown.
    fn step(&self) -> u64 {
        self.cut.here.as_ref().and_then(|here| here.step).unwrap_or(0)
    }

    /// Shows what there is up to a step and a little further, or to the end of the pile.
    fn show(&mut self, viewer: &mut impl Viewer, to: u64) {
        let Some(pile) = &self.pile else {
            match self.from.recv() {
                Ok((pile, done, total)) => {
                    (self.done, self.total) = (done, total);
                    (self.blocks, self.events, self.code) = (0, 0, 0);
                    let here = self.cut.here.get_or_insert_with(|| pile.here.clone());
                    here.state.enabled = false;
                    self.pile = Some(pile);
                }
                Err(_) => {
                    self.cut.end(viewer);
                    self.over = true;
                }
            }
            return;
        };
        while self.cut.here.as_ref().and_then(|here| here.step).unwrap_or(0) <= to {
            if let Some((before, event)) = pile.events.get(self.events)
                && *before as usize <= self.blocks
            {
                self.events += 1;
                self.cut.event(viewer, event);
            } else if let Some(block) = pile.blocks.get(self.blocks) {
                self.blocks += 1;
                let end = (self.code + block.len as usize).min(pile.code.len());
                let code = &pile.code[self.code..end];
                self.code = end;
                self.cut.block(viewer, block, code);
            } else {
                self.pile = None;
                return;
            }
        }
    }
}

fn run<V: Viewer, const CODE: bool>(
    trace: &Trace,
    cpus: &[usize],
    window: &Window,
    viewer: &mut V,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Totals, TraceError> {
    let khz = trace.header().tsc_khz;
    let at = |bound: Option<Bound>| match bound {
        Some(Bound::Step(step)) => At::Step(step),
        Some(Bound::Time(ns)) => At::Ticks((u128::from(ns) * u128::from(khz) / 1_000_000) as u64),
        Some(Bound::Address(_)) | None => At::Whole,
    };
    let mut options = Decode {
        from: at(window.from),
        to: at(window.to),
        chunk: if CODE { CHUNK_WITH_CODE } else { CHUNK },
        ..Decode::default()
    };
    if window.threads > 0 {
        options.threads = window.threads;
    }
    // The decoders of all vCPUs share them.
    options.threads = options.threads.div_ceil(cpus.len().max(1));
    let make = |start: &Start| Pile::<CODE> {
        here: Here::new(start, khz, 0),
        blocks: Vec::new(),
        events: Vec::new(),
        code: Vec::new(),
    };
    std::thread::scope(|scope| {
        let (mut feeds, mut decoders) = (Vec::new(), Vec::new());
        for &cpu in cpus {
            let (to, from) = sync_channel(1);
            feeds.push(Feed {
                from,
                pile: None,
                blocks: 0,
                events: 0,
                code: 0,
                cut: Cut::new(*window),
                done: 0,
                total: 0,
                over: false,
            });
            let work = move || {
                trace.decode(cpu, &options, make, |pile, done: &Progress| {
                    // Nobody listens where another thread has panicked.
                    let _ = to.send((pile, done.done, done.total));
                })
            };
            // Where it has no thread, the feeds of those that have begun are dropped, and they end.
            let decoder = std::thread::Builder::new().spawn_scoped(scope, work);
            let decoder =
                decoder.map_err(|error| trace.error(format!("no thread to decode with: {}", plain(&error))))?;
            decoders.push(decoder);
        }
        loop {
            // The one that is furthest behind goes on until it is ahead of the next.
            let behind = (0..feeds.len())
                .filter(|n| !feeds[*n].over)
                .min_by_key(|n| feeds[*n].step());
            let Some(behind) = behind else { break };
            let others = (0..feeds.len()).filter(|n| !feeds[*n].over && *n != behind);
            let to = others.map(|n| feeds[n].step()).min().unwrap_or(u64::MAX);
            let fetched = feeds[behind].pile.is_none();
            feeds[behind].show(viewer, to);
            if fetched {
                let sum = |of: fn(&Feed<CODE>) -> u64| feeds.iter().map(of).sum();
                progress(sum(|feed| feed.done), sum(|feed| feed.total));
            }
        }
        let mut all = Totals::default();
        for (feed, decoder) in feeds.into_iter().zip(decoders) {
            let summary = decoder
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            let mut totals = feed.cut.totals;
            totals.lost = summary.lost;
            totals.damage = summary.damage;
            all.add(&totals);
        }
        Ok(all)
    })
}

/// Whether instructions may be missing behind an event, so that calls are no longer known.
pub fn loses(event: &Event) -> bool {
    match event.kind {
        EventKind::Gap(GapKind::ChangeUnreached { .. }) => false,
        EventKind::Gap(_) | EventKind::Overflow => true,
        _ => false,
    }
}
