//! A perf.data directory that carries the code it is of: what perf 6.1 reads with `perf script -i DIR --itrace=...`.
//!
//! # How code gets to perf
//!
//! perf takes the kernel's code from `kcore_dir/kcore`, a core file; here it has each page as it was when it was first executed in the
//! window, and PERF_RECORD_TEXT_POKE tells each change at its time, which is that of a PSB. A process's code is in files of its own, one for
//! each program and library, with the names of their functions, which MMAP2 maps, page by page again where it changes; PERF_RECORD_SWITCH tells at each change of CR3 whose turn it is, at the time that
//! a TSC packet in front of it tells.
//!
//! # Guests of a hypervisor
//!
//! The Linux in a guest is to perf a machine of its own, as `perf inject --guest-data` makes it since Linux 6.0: the number of the machine is that of
//! the process that is its VMM, `kcore_dir__PID` has its kernel, and its records come with an event of their own, which
//! PERF_RECORD_ID_INDEX says is that machine's. perf takes the guest to run where packets say so (the NR bit of PIP) and the VMM's process has the
//! turn.
//!
//! # What is left out
//!
//! Guests with several virtual CPUs, of which perf is told one. Changes of a guest's code within the window: perf takes PERF_RECORD_TEXT_POKE
//! of the machine's own kernel alone. Of two guests that a process runs one after the other, the second.
//!
//! perf decodes all code as 64-bit code, so there are errors where a CPU is in another mode, as one that starts up is.

mod code;
mod data;
mod guests;
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
use guests::Machines;
use maps::{Level, Maps};
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

/// Takes down the turns, and with `GUESTS` those of guests of a hypervisor, and their code.
struct Turns<'a, const GUESTS: bool> {
    names: &'a Names,
    cache: ProcessCache,
    now: Option<Process>,
    found: Vec<Turn>,
    machines: &'a mut Machines,
}

impl<const GUESTS: bool> Turns<'_, GUESTS> {
    /// The process that is the VMM of the guest that runs.
    fn vmm(&self, here: &Here) -> Option<u32> {
        Some(self.names.task(self.now?, here.step)?.tgid)
    }

    fn at(&mut self, here: &Here, cr3: Option<u64>) {
        if let Some(process) = self.cache.get(self.names, cr3) {
            self.has_the_turn(here, process);
        }
    }

    fn has_the_turn(&mut self, here: &Here, process: Process) {
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

impl<const GUESTS: bool> Viewer for Turns<'_, GUESTS> {
    const CODE: bool = GUESTS;

    fn block(&mut self, here: &Here, block: &Block, code: &[u8]) {
        if GUESTS && here.state.non_root {
            // Where the part begins in a guest, the thread tells whose.
            if self.now.is_none()
                && let Some(process) = self.names.vmm_process(here)
            {
                self.has_the_turn(here, process);
            }
            if let Some(pid) = self.vmm(here) {
                self.machines.block(pid, self.names.of(here), here, block.ip, code);
            }
        }
        if self.now.is_none() && !here.state.non_root {
            self.at(here, here.state.cr3);
        }
    }

    fn event(&mut self, here: &Here, event: &Event) {
        match event.kind {
            EventKind::Paging { cr3, non_root: false } => self.at(here, Some(cr3)),
            EventKind::Paging { cr3, non_root: true } if GUESTS => {
                if let Some(pid) = self.vmm(here) {
                    self.machines.turn(pid, self.names.of(here), here, cr3);
                }
            }
            _ => {}
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
    let mut machines = Machines::default();
    for &cpu in job.cpus {
        let clock = job.trace.clock(cpu);
        let range = range(job, cpu, &clock, totals.steps);
        code.add(job.trace, cpu, &range, &clock)?;
        let at = |offset: u64| clock.syncs().iter().find(|sync| sync.psb && sync.offset >= offset);
        let guests = job.names.vmcs_count() > 0;
        // What code guests have is seen where it is executed, which must not begin behind what perf decodes.
        let before = |offset: u64| clock.syncs().iter().rfind(|sync| sync.psb && sync.offset < offset);
        let from = before(range.start).filter(|_| guests).or_else(|| at(range.start));
        let window = Window {
            from: from.map(|sync| Bound::Step(sync.step)),
            to: at(range.end).map(|sync| Bound::Step(sync.step)),
            threads: job.window.threads,
        };
        let mut report = |done, total| progress("processes", done, total);
        turns.extend(match guests {
            false => turns_of::<false>(job, cpu, &window, &mut machines, &mut report)?,
            true => turns_of::<true>(job, cpu, &window, &mut machines, &mut report)?,
        });
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
        let place = (folder.work(), job.path, "code");
        let mut maps = Maps::new(Level::MACHINE, job.names, (pages, &first), scale, place)?;
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
        let mut records = maps.records;
        let pids = machines.write(job.names, scale, (folder.work(), job.path), &mut records)?;
        records.sort_by_key(|(time, _)| *time);
        let mut packets = |done, total| progress("packets", done, total);
        let data = folder.work().join("data");
        data::write(&data, job.trace, scale, (&parts, &pids), &records, &mut packets)
    };
    let written: std::io::Result<()> = { write }();
    written.map_err(|error| folder.error(error))?;
    folder.finish()?;
    Ok(totals)
}

/// Whose turn it is on a vCPU in a window.
fn turns_of<const GUESTS: bool>(
    job: &Job<'_>,
    cpu: usize,
    window: &Window,
    machines: &mut Machines,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Turn>, ExportError> {
    let mut found = Turns::<GUESTS> {
        names: job.names,
        cache: ProcessCache::default(),
        now: None,
        found: Vec::new(),
        machines,
    };
    view(job.trace, &[cpu], window, &mut found, progress)?;
    Ok(found.found)
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
