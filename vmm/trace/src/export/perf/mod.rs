//! A perf.data directory that carries the code it is of: what perf 6.1 reads with `perf script -i DIR --itrace=...`.
//!
//! # How code gets to perf
//!
//! perf takes the kernel's code from `kcore_dir/kcore`, a core file; here it has each page as it was when it was first executed in the
//! window, and PERF_RECORD_TEXT_POKE tells each change at its time, which is that of a PSB. A process's code is in files of its own, one for
//! each program and library, with the names of their functions, which MMAP2 maps, page by page again where it changes; PERF_RECORD_SWITCH tells at each change of CR3 whose turn it is, at the time that
//! a TSC packet in front of it tells.
//!
//! # What is left out
//!
//! perf decodes all code as 64-bit code, so there are errors where a CPU is in another mode, as one that starts up is.

mod code;
mod data;
mod image;
mod maps;
mod record;
mod turn;

use std::path::Path;

use pt_flow::{Block, Event, EventKind};

use crate::{
    reader::{At, StepClock, Trace},
    view::{Bound, Here, Names, Process, ProcessCache, Totals, Viewer, Window, view},
};

use super::{Folder, error::ExportError};
use code::{Code, Pages};
use maps::Maps;
use record::Scale;
use turn::Turn;

/// What is wanted.
#[derive(Debug)]
pub struct Job<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// Its names.
    pub names: &'a Names,
    /// The part.
    pub window: Window,
    /// The vCPUs.
    pub cpus: &'a [usize],
    /// The directory.
    pub path: &'a Path,
    /// Replace it.
    pub force: bool,
    /// What of the window was decoded, if it was already.
    pub totals: Option<&'a Totals>,
}

/// Takes down the turns.
struct Turns<'a> {
    names: &'a Names,
    cache: ProcessCache,
    now: Option<Process>,
    found: Vec<Turn>,
}

impl Turns<'_> {
    fn at(&mut self, here: &Here, cr3: Option<u64>) {
        let Some(process) = self.cache.get(self.names, cr3) else {
            return;
        };
        // Whoever runs when the part begins has run before it, as far as perf sees.
        let ticks = if self.now.is_none() { 0 } else { here.ticks.unwrap_or(0) };
        if self.now != Some(process) {
            self.now = Some(process);
            self.found.push(Turn {
                ticks,
                step: here.step,
                cpu: here.cpu as u32,
                process,
            });
        }
    }
}

impl Viewer for Turns<'_> {
    fn block(&mut self, here: &Here, _: &Block, _: &[u8]) {
        if self.now.is_none() && !here.state.non_root {
            self.at(here, here.state.cr3);
        }
    }

    fn event(&mut self, here: &Here, event: &Event) {
        // perf is told of the machine's own processes alone.
        if let EventKind::Paging { cr3, non_root: false } = event.kind {
            self.at(here, Some(cr3));
        }
    }
}

/// Wants to see nothing.
struct Nothing;

impl Viewer for Nothing {
    fn block(&mut self, _: &Here, _: &Block, _: &[u8]) {}
    fn event(&mut self, _: &Here, _: &Event) {}
}

/// Writes the directory. It has whole stretches from PSB to PSB, a little more than the window.
///
/// # Errors
/// The trace cannot be read or the directory not be written; the trace has no symbols of a kernel.
pub fn export(job: &Job<'_>, progress: &mut dyn FnMut(&str, u64, u64)) -> Result<Totals, ExportError> {
    if job.names.symbols().address("_text").is_none() {
        return Err(ExportError::NoKernelSymbols(job.path.into()));
    }
    let folder = Folder::create(job.path, job.force, "data")?;
    let totals = match job.totals {
        Some(totals) => totals.clone(),
        None => view(job.trace, job.cpus, &job.window, &mut Nothing, &mut |done, total| {
            progress("window", done, total)
        })?,
    };
    let (mut turns, mut parts, mut code) = (Vec::new(), Vec::new(), Code::new());
    for &cpu in job.cpus {
        let clock = job.trace.clock(cpu);
        let range = range(job, cpu, &clock, totals.steps);
        code.add(job.trace, cpu, &range, &clock)?;
        let at = |offset: u64| clock.syncs().iter().find(|sync| sync.psb && sync.offset >= offset);
        let window = Window {
            from: at(range.start).map(|sync| Bound::Step(sync.step)),
            to: at(range.end).map(|sync| Bound::Step(sync.step)),
            threads: job.window.threads,
        };
        let mut found = Turns {
            names: job.names,
            cache: ProcessCache::default(),
            now: None,
            found: Vec::new(),
        };
        view(job.trace, &[cpu], &window, &mut found, &mut |done, total| {
            progress("processes", done, total)
        })?;
        turns.extend(found.found);
        parts.push(data::Part {
            cpu,
            at_zero: at(range.start).is_none_or(|sync| sync.tick == 0),
            range,
        });
    }
    let write = || {
        let scale = Scale::new(job.trace.header().tsc_khz);
        let pages = Pages::new(job.trace);
        let (first, changes) = code.in_order();
        let mut maps = Maps::new(job.names, pages, scale, &first, folder.work(), job.path)?;
        maps.write_kernel(&folder.work().join("kcore_dir"))?;
        // In the order of their times; a vCPU's own stay in theirs, and whose turn it is comes before what changes.
        turns.sort_by_key(|turn| turn.ticks);
        let mut turns = turns.iter().peekable();
        for change in &changes {
            while let Some(turn) = turns.next_if(|turn| turn.ticks <= change.ticks) {
                maps.turn(turn)?;
            }
            maps.change(change)?;
        }
        turns.try_for_each(|turn| maps.turn(turn))?;
        maps.finish()?;
        let mut packets = |done, total| progress("packets", done, total);
        let data = folder.work().join("data");
        data::write(&data, job.trace, scale, &parts, &maps.records, &mut packets)
    };
    let written: std::io::Result<()> = { write }();
    written.map_err(|error| folder.error(error))?;
    folder.finish()?;
    Ok(totals)
}

/// The packets of the window: from a PSB to one, or to the end. `steps` are those that the window was found to have.
fn range(job: &Job<'_>, cpu: usize, clock: &StepClock, steps: Option<(u64, u64)>) -> std::ops::Range<u64> {
    let step = |bound: Option<Bound>, step: Option<u64>| match (bound, step) {
        (None, _) | (_, None) => At::Whole,
        (Some(Bound::Step(step)), _) | (Some(_), Some(step)) => At::Step(step),
    };
    let from = step(job.window.from, steps.map(|steps| steps.0));
    let to = step(job.window.to, steps.map(|steps| steps.1));
    job.trace.range(cpu, from, to, clock)
}
