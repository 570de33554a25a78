//! The recorder: an observer of each vCPU that writes what a decoder needs.
//!
//! # Theory
//! The observer's own trace unit makes the packets; the guest's is another one and may do what it likes. Packets tell the way
//! through the code, so the code has to be there, too, as it was when it was executed. The engine says which pages it
//! translates for fetching and which bytes it decodes. A page that was never seen at its address is told as soon as it is
//! fetched from: that is true for all time before, since nothing was executed there. A page whose bytes, when they are decoded
//! or translated anew, are not those that were told last has changed: that is true from this instruction on. So before a
//! change is told the pending TNT bits are sent and a PSB with the whole state; the change stands at that PSB, where any
//! decoder can change its image.
//!
//! # Practice
//! vCPUs share memory, so the last contents of each physical page are shared ([`Pool`]); a vCPU that gets its turn hears which
//! of them changed while others had theirs, and tells its own stream before it executes anything. Where a translation leads to
//! another page than before, the TLB forgets the old one in all its address spaces, so that addresses above bit 63 can count as
//! one space for all CR3s, as operating systems have it, and stay exact for guests that do otherwise.
//!
//! Packets carry virtual time instead of the guest's TSC.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::unit::pt::Pt;
use x86::model::CpuModel;
use x86::msr::{IA32_RTIT_ADDR0_A, IA32_RTIT_CR3_MATCH, IA32_RTIT_STATUS};
use x86::pt::{PtCaps, RtitCtl};
use x86::seam::{
    Access, Appetite, BranchRecord, Change, Code, CodeSize, Effects, EventRecord, Processor, Range, TraceMem, Watch,
};

use super::format::{Header, HeaderEnd, Mark, PAGE, Record, space};
use super::host::{Host, Nobody};
use super::options::{Filter, OnError, Options};
use super::sink::{Hashing, PACKETS, Sink};
use super::trigger::When;
use crate::linux::Recording;
use crate::machine::memory::Memory;

/// PSBs every 16 KiB.
const PSB_FREQ: u8 = 3;
/// An MTC packet every 32768 steps.
const MTC_FREQ: u8 = 15;

/// Mappings that are remembered of a vCPU; with more, a segment is begun and all is forgotten.
const MAPPINGS: usize = 1 << 18;
/// Changed pages that are remembered for vCPUs that have not run since.
const CHANGES: usize = 1 << 16;

/// What the observers' trace units can do, whatever the model: everything that a decoder is better off with.
pub fn caps(model: &CpuModel) -> PtCaps {
    PtCaps {
        // CR3 filter; PSBFreq and CYC; IP filters; MTC.
        ebx: 0xf,
        // Single range; linear addresses.
        ecx: 1 << 31 | 1 << 2,
        // Four ranges; all values of MTCFreq.
        encodings: 0xffff_0004,
        // All values of PSBFreq and CycThresh.
        frequencies: 0xffff_ffff,
        crystal: (1, 1),
        ratio: u8::try_from(model.tsc_khz / 100_000).unwrap_or(u8::MAX),
        physical_bits: 52,
        linear_bits: 64,
        excludes_lbr: false,
    }
}

/// The control register without filters and TraceEn.
pub const CTL: RtitCtl = RtitCtl::new()
    .with_branch_en(true)
    .with_tsc_en(true)
    .with_mtc_en(true)
    .with_mtc_freq(MTC_FREQ)
    .with_psb_freq(PSB_FREQ);

/// The last contents of physical pages that code was executed from.
#[derive(Debug, Default)]
struct Pool {
    pages: HashMap<u64, Arc<Content>>,
    /// Pages that changed, in order, and how many were dropped before the first.
    changes: VecDeque<u64>,
    dropped: u64,
}

/// A page's bytes.
#[derive(Debug)]
struct Content {
    bytes: [u8; PAGE],
    hash: u128,
}

/// What the observers share.
#[derive(Debug)]
struct Shared {
    pool: Mutex<Pool>,
    /// Changes ever, as a number that can be looked at for little.
    changed: AtomicU64,
    hashing: Hashing,
    /// The recording is to end.
    finish: AtomicBool,
    /// Writing failed.
    failed: AtomicBool,
    error: Mutex<Option<io::Error>>,
    on_error: OnError,
    /// Something is recorded now.
    on: AtomicBool,
    start: Option<When>,
    stop: Option<When>,
    /// Conditions that hold once have held.
    spent: [AtomicBool; 2],
    /// Instructions that each vCPU has retired, as far as it has said.
    retired: Vec<AtomicU64>,
    linux: Mutex<Linux>,
}

/// What is found out about the Linux in the guest, and when it was last looked for.
#[derive(Debug, Default)]
struct Linux {
    recording: Recording,
    looked: u64,
    /// There is something new to write.
    new: bool,
}

/// Steps between two looks for symbols, modules and processes of a Linux guest.
const LOOK: u64 = 64 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn fail(&self, error: io::Error) {
        lock(&self.error).get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// What is waited for now.
    fn trigger(&self) -> Option<&When> {
        let on = self.on.load(Ordering::Relaxed);
        let when = if on { &self.stop } else { &self.start };
        when.as_ref()
            .filter(|_| !self.spent[usize::from(on)].load(Ordering::Relaxed))
    }

    /// It has happened.
    fn pull(&self, when: &When) {
        let on = self.on.load(Ordering::Relaxed);
        if matches!(when, When::Instructions(_)) {
            self.spent[usize::from(on)].store(true, Ordering::Relaxed);
        }
        if !on {
            // What was executed meanwhile was not announced.
            lock(&self.pool).pages.clear();
        }
        self.on.store(!on, Ordering::Relaxed);
    }

    fn retired(&self) -> u64 {
        self.retired.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Records a machine.
#[derive(Debug)]
pub struct Recorder {
    folder: std::path::PathBuf,
    header: Header,
    shared: Arc<Shared>,
}

impl Recorder {
    /// Makes the directory and its files, and the observers, one for each vCPU.
    ///
    /// # Errors
    /// The directory is there already, or something cannot be made.
    pub fn new(options: &Options, header: Header, model: &CpuModel) -> io::Result<(Recorder, Vec<Observer>)> {
        super::folder::prepare(&options.folder, options.force)?;
        let shared = Arc::new(Shared {
            pool: Mutex::default(),
            changed: AtomicU64::new(0),
            hashing: Hashing::default(),
            finish: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            on_error: options.on_error,
            on: AtomicBool::new(options.start.is_none()),
            start: options.start.clone(),
            stop: options.stop.clone(),
            spent: Default::default(),
            retired: (0..header.cpus).map(|_| AtomicU64::new(0)).collect(),
            linux: Mutex::default(),
        });
        let observers = (0..header.cpus)
            .map(|cpu| Observer::new(cpu, options, shared.clone(), model))
            .collect::<io::Result<Vec<Observer>>>()?;
        let recorder = Recorder {
            folder: options.folder.clone(),
            header,
            shared,
        };
        recorder.write_header()?;
        Ok((recorder, observers))
    }

    fn write_header(&self) -> io::Result<()> {
        super::folder::write_header(&self.folder, &self.header)
    }

    /// The directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether writing has failed and the run is to stop for that.
    pub fn stops(&self) -> bool {
        self.shared.failed.load(Ordering::Relaxed) && self.shared.on_error == OnError::Stop
    }

    /// Looks for what is new of a Linux in the guest, if it is time for that.
    pub fn look(&self, memory: &Memory, steps: u64) {
        let mut linux = lock(&self.shared.linux);
        if steps - linux.looked >= LOOK {
            linux.looked = steps;
            self.look_now(&mut linux, memory, steps);
        }
    }

    fn look_now(&self, linux: &mut Linux, mut memory: &Memory, steps: u64) {
        linux.new |= linux.recording.look(&mut memory, steps);
        if std::mem::take(&mut linux.new)
            && let Err(error) = linux.recording.write(&self.folder.join(super::folder::LINUX))
        {
            self.shared.fail(error);
        }
    }

    /// From the next time that the observers are asked what they want, the recording is over.
    pub fn finish(&self) {
        self.shared.finish.store(true, Ordering::Relaxed);
    }

    /// Once all observers have finished: says in the header how it ended.
    ///
    /// # Errors
    /// What went wrong first while recording.
    pub fn close(mut self, reason: &str, memory: &Memory, steps: u64, ticks: u64) -> io::Result<()> {
        self.look_now(&mut lock(&self.shared.linux), memory, steps);
        let error = lock(&self.shared.error).take();
        self.header.end = Some(HeaderEnd {
            reason: reason.into(),
            steps,
            ticks,
            complete: error.is_none(),
        });
        let written = self.write_header();
        match error {
            Some(error) => Err(error),
            None => written,
        }
    }
}

/// A page at an address.
type Key = (u64, u64);

/// What an address leads to.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    /// The physical page.
    gpa: u64,
    /// The content that was told.
    hash: u128,
    /// Since which beginning that is certain.
    epoch: u32,
}

/// A PSB at which code may change: nothing was executed since.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    begin: u64,
    end: u64,
    ip: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not begun yet, or stopped.
    Idle,
    Tracing,
    /// Over.
    Done,
}

/// Watches a vCPU.
#[derive(Debug)]
pub struct Observer {
    cpu: usize,
    shared: Arc<Shared>,
    pt: Pt<Vec<u8>>,
    ctl: RtitCtl,
    sink: Sink,
    state: State,
    /// Words since tracing began.
    words: u64,
    maps: HashMap<Key, Mapping>,
    /// Which addresses lead to a physical page.
    by_gpa: HashMap<u64, Vec<Key>>,
    /// [`Appetite::code`].
    code: u64,
    /// How many of the pool's changes are told.
    seen: u64,
    anchor: Option<Anchor>,
    /// Where the last PSB was that is told.
    psb: Option<u64>,
    tsc_offset: u64,
    tsc_moved: bool,
    /// Which beginning it is.
    epoch: u32,
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    generation: u64,
    page_table: u64,
}

impl Observer {
    fn new(cpu: usize, options: &Options, shared: Arc<Shared>, model: &CpuModel) -> io::Result<Observer> {
        let mut pt = Pt::with_output(caps(model), Vec::new());
        pt.tell_cr3();
        Ok(Observer {
            cpu,
            shared,
            pt,
            ctl: CTL,
            sink: Sink::new(&options.folder, cpu, options.buffer)?,
            state: State::Idle,
            words: 0,
            maps: HashMap::new(),
            by_gpa: HashMap::new(),
            code: 1,
            seen: 0,
            anchor: None,
            psb: None,
            tsc_offset: 0,
            tsc_moved: true,
            epoch: 0,
            boundaries: Vec::new(),
            ranges: Vec::new(),
            generation: 0,
            page_table: 0,
        }
        .with_filters(&options.filters))
    }

    /// Programs the filters.
    fn with_filters(mut self, filters: &[Filter]) -> Observer {
        let rings = |ring: Filter| filters.contains(&ring);
        let (os, user) = (rings(Filter::Kernel), rings(Filter::User));
        self.ctl.set_os(os || !user);
        self.ctl.set_user(user || !os);
        let mut range = 0;
        for filter in filters {
            let registers = match *filter {
                Filter::Kernel | Filter::User => continue,
                Filter::Cr3(cr3) => {
                    self.ctl.set_cr3_filter(true);
                    vec![(IA32_RTIT_CR3_MATCH, cr3 & !0x1f)]
                }
                Filter::Ip(first, last) => {
                    let register = IA32_RTIT_ADDR0_A + 2 * range;
                    self.ctl.set_addr_cfg(self.ctl.addr_cfg() | 1 << (4 * range));
                    range += 1;
                    vec![(register, first), (register + 1, last)]
                }
            };
            for (msr, value) in registers {
                // Options are checked before, so that the unit takes whatever comes here.
                let taken = self.pt.write_msr(msr, value, &mut Nobody);
                debug_assert!(taken.is_ok(), "{msr:x} {value:x}");
            }
        }
        self
    }

    /// Bytes of packets so far.
    fn total(&mut self) -> u64 {
        self.sink.written() + self.pt.output().len() as u64
    }

    fn mark(&mut self, mark: Mark, cpu: &mut Host<'_>) {
        let offset = self.total();
        let (step, tick) = (cpu.step(), cpu.tsc());
        let ip = self.pt.place().packet_en.then(|| next_ip(cpu));
        self.sink.record(&Record::Mark {
            mark,
            offset,
            step,
            tick,
            ip,
        });
    }

    fn start(&mut self, cpu: &mut Host<'_>) {
        self.state = State::Tracing;
        self.words = 0;
        self.seen = self.shared.changed.load(Ordering::Relaxed);
        self.epoch += 1;
        self.code += 1;
        self.anchor = None;
        if self.epoch == 1 {
            self.mark(Mark::Segment, cpu);
        }
        self.mark(Mark::Start, cpu);
        // A decoder begins anew, so there has to be a PSB: PacketByteCnt is 0.
        let cleared = self.pt.write_msr(IA32_RTIT_STATUS, 0, cpu);
        debug_assert!(cleared.is_ok());
        let ctl = self.ctl.with_trace_en(true);
        // Whatever `CTL` and the filters are, `caps` has it.
        let programmed = self.pt.program(ctl, cpu);
        debug_assert!(programmed.is_ok(), "{ctl:?}");
        self.settle(cpu);
    }

    fn stop(&mut self, mark: Mark, cpu: &mut Host<'_>) {
        if self.state == State::Tracing {
            let programmed = self.pt.program(self.ctl, cpu);
            debug_assert!(programmed.is_ok());
            self.settle(cpu);
        }
        self.mark(mark, cpu);
        self.write();
        self.state = if mark == Mark::Stop { State::Idle } else { State::Done };
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
    fn wants(&mut self) -> Appetite {
        let mut appetite = Appetite::NOTHING;
        let (mut boundaries, mut ranges) = (Vec::new(), Vec::new());
        if self.state == State::Tracing {
            appetite = Appetite {
                code: self.code,
                ..self.pt.appetite()
            };
            boundaries.extend_from_slice(self.pt.boundaries());
        }
        if self.state != State::Done
            && let Some(when) = self.shared.trigger()
        {
            appetite = appetite.and(when.appetite(self.shared.retired()));
            boundaries.extend(when.boundary());
            ranges.extend(when.range());
            boundaries.sort_unstable();
            boundaries.dedup();
        }
        if (&boundaries, &ranges) != (&self.boundaries, &self.ranges) {
            (self.boundaries, self.ranges) = (boundaries, ranges);
            self.generation += 1;
        }
        appetite
    }

    fn write(&mut self) {
        if let Err(error) = self.sink.write(self.pt.output()) {
            self.shared.fail(error);
        }
    }

    /// After a word: syncs are told, and what waits is written when it is much.
    fn settle(&mut self, cpu: &mut Host<'_>) {
        let place = self.pt.place();
        let psb = self.total().checked_sub(u64::from(place.since_psb));
        if psb.is_some() && psb != self.psb {
            self.psb = psb;
            self.sink.record(&Record::Sync {
                offset: psb.unwrap_or(0),
                step: place.psb_step,
                tick: place.psb_tsc,
            });
        }
        if std::mem::take(&mut self.tsc_moved) {
            let offset = self.total();
            self.sink.record(&Record::Tsc {
                offset,
                step: cpu.step(),
                value: self.tsc_offset,
            });
        }
        if self.pt.output().len() >= PACKETS || self.sink.is_due() {
            self.write();
            if self.shared.failed.load(Ordering::Relaxed) && self.state == State::Tracing {
                self.state = State::Done;
            }
        }
    }

    /// Begins the next segment where it is time for it, and where the engine asks next what is to be announced: all code is.
    fn turn_page(&mut self, cpu: &mut Host<'_>) {
        let waiting = self.pt.output().len();
        if self.state == State::Tracing && (self.sink.is_full(waiting) || self.maps.len() > MAPPINGS) {
            self.next_segment(cpu);
        }
    }

    /// Begins a segment with a PSB; the engine is to tell all code again.
    fn next_segment(&mut self, cpu: &mut Host<'_>) {
        self.pt.flush(cpu);
        self.write();
        if let Err(error) = self.sink.next_segment() {
            self.shared.fail(error);
        }
        self.maps.clear();
        self.by_gpa.clear();
        self.anchor = None;
        self.code += 1;
        self.mark(Mark::Segment, cpu);
        self.tsc_moved = true;
        self.pt.synchronize(cpu);
        self.psb = None;
        self.settle(cpu);
    }

    /// A PSB in front of the next instruction.
    fn anchor(&mut self, cpu: &mut Host<'_>) -> Anchor {
        let ip = next_ip(cpu);
        let place = self.pt.place();
        let total = self.total();
        if let Some(anchor) = self.anchor
            && (anchor.end, place.bits) == (total, 0)
            && (anchor.ip == ip || !place.packet_en)
        {
            return anchor;
        }
        self.pt.flush(cpu);
        let begin = self.total();
        self.pt.synchronize(cpu);
        let anchor = Anchor {
            begin,
            end: self.total(),
            ip,
        };
        self.anchor = Some(anchor);
        anchor
    }

    /// A mapping that was told before has another content.
    fn tell_change(&mut self, key: Key, content: &Content, cpu: &mut Host<'_>) {
        let anchor = self.anchor(cpu);
        let number = self.sink.content(content.hash, &content.bytes);
        let ip = self.pt.place().packet_en.then_some(anchor.ip);
        self.sink.record(&Record::Change {
            offset: anchor.begin,
            ip,
            step: cpu.step(),
            space: key.0,
            page: key.1,
            content: number,
        });
    }

    /// A physical page has another content: so have all addresses that lead to it.
    fn tell_page(&mut self, gpa: u64, content: &Content, cpu: &mut Host<'_>) {
        let keys = self.by_gpa.get(&gpa).cloned().unwrap_or_default();
        for key in keys {
            if let Some(mapping) = self.maps.get_mut(&key)
                && mapping.hash != content.hash
            {
                mapping.hash = content.hash;
                self.tell_change(key, content, cpu);
            }
        }
    }

    /// What changed while other vCPUs had their turns.
    fn catch_up(&mut self, cpu: &mut Host<'_>) {
        let changed = self.shared.changed.load(Ordering::Relaxed);
        if changed == self.seen {
            return;
        }
        let shared = self.shared.clone();
        let pool = lock(&shared.pool);
        match self.seen.checked_sub(pool.dropped) {
            Some(from) => {
                let pages: Vec<u64> = pool.changes.iter().skip(from as usize).copied().collect();
                for gpa in pages {
                    if let Some(content) = pool.pages.get(&gpa) {
                        self.tell_page(gpa, content, cpu);
                    }
                }
            }
            // Too many to be remembered.
            None => self.next_segment(cpu),
        }
        self.seen = changed;
        drop(pool);
        self.settle(cpu);
    }

    fn key(code: &Code, cpu: &dyn Processor) -> Key {
        (space(cpu.context().cr3, code.linear), code.linear >> 12)
    }

    /// The content of a page as executed now, and whether others have to hear that it is new.
    fn content(&mut self, code: &Code, cpu: &mut Host<'_>) -> Option<(Arc<Content>, bool)> {
        let gpa = code.physical & !0xfff;
        let shared = self.shared.clone();
        let mut pool = lock(&shared.pool);
        if let Some(content) = pool.pages.get(&gpa)
            && same(content, code, cpu)
        {
            return Some((content.clone(), false));
        }
        let mut bytes = [0; PAGE];
        cpu.read_phys(gpa, &mut bytes).ok()?;
        let hash = shared.hashing.of(&bytes);
        let content = Arc::new(Content { bytes, hash });
        let known = pool.pages.insert(gpa, content.clone()).is_some();
        if known {
            pool.changes.push_back(gpa);
            if pool.changes.len() > CHANGES {
                pool.changes.pop_front();
                pool.dropped += 1;
            }
            let changed = pool.dropped + pool.changes.len() as u64;
            shared.changed.store(changed, Ordering::Relaxed);
            // This vCPU knows the others: it was told of them before it got its turn.
            self.seen = changed;
        }
        Some((content, known))
    }

    /// A Linux guest goes to another page table: the one that it comes from has a name.
    fn name_process(&mut self, cpu: &mut dyn Processor) {
        // Of the two page tables of a process the kernel's is the first.
        let table = cpu.context().cr3 & !0x1fff;
        let before = std::mem::replace(&mut self.page_table, table);
        if before != table {
            let steps = cpu.step();
            let mut linux = lock(&self.shared.linux);
            linux.new |= linux
                .recording
                .switched(&mut super::host::Physical(cpu), self.cpu, before, steps);
        }
    }

    /// Says a word to the unit.
    fn word(&mut self, cpu: &mut dyn Processor, say: impl FnOnce(&mut Pt<Vec<u8>>, &mut Host<'_>) -> Effects) {
        if self.state != State::Tracing {
            return;
        }
        self.words += 1;
        let mut host = Host {
            cpu,
            offset: self.tsc_offset,
        };
        let _ = say(&mut self.pt, &mut host);
        self.settle(&mut host);
        self.turn_page(&mut host);
    }
}

/// The linear address of the next instruction.
fn next_ip(cpu: &dyn Processor) -> u64 {
    let context = cpu.context();
    match context.code {
        CodeSize::Bits64 => cpu.rip(),
        CodeSize::Bits16 | CodeSize::Bits32 => cpu.rip().wrapping_add(context.cs_base) & 0xffff_ffff,
    }
}

/// Whether the bytes of the code are those of the content.
fn same(content: &Content, code: &Code, cpu: &mut Host<'_>) -> bool {
    let from = (code.physical & 0xfff) as usize;
    let mut at = 0;
    let mut part = [0; 256];
    while at < code.len as usize {
        let len = (code.len as usize - at).min(part.len());
        let Some(known) = content.bytes.get(from + at..from + at + len) else {
            return false;
        };
        let here = code.physical + at as u64;
        if cpu.read_phys(here, &mut part[..len]).is_err() || known != &part[..len] {
            return false;
        }
        at += len;
    }
    true
}

impl Watch for Observer {
    fn appetite(&mut self, cpu: &mut dyn Processor) -> Appetite {
        let mut host = Host {
            cpu,
            offset: self.tsc_offset,
        };
        let finish = self.shared.finish.load(Ordering::Relaxed);
        self.count(host.cpu);
        let on = self.shared.on.load(Ordering::Relaxed);
        match self.state {
            State::Done => {}
            _ if finish => self.stop(Mark::End, &mut host),
            State::Idle if on => self.start(&mut host),
            State::Tracing if !on => self.stop(Mark::Stop, &mut host),
            State::Tracing => self.catch_up(&mut host),
            State::Idle => {}
        }
        self.wants()
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
        self.word(cpu, |pt, cpu| pt.before(address, cpu));
        Effects::NONE
    }

    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        self.word(cpu, |pt, cpu| pt.branches(records, cpu));
        Effects::NONE
    }

    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        self.word(cpu, |pt, cpu| pt.event(event, cpu));
        Effects::NONE
    }

    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        if let Change::Hypercall { function } = change {
            let on = self.shared.on.load(Ordering::Relaxed);
            self.pull(|when| *when == When::Hypercall && function == u32::from(!on));
        }
        if self.state != State::Tracing {
            return Effects::NONE;
        }
        if change == Change::Cr3 {
            self.name_process(cpu);
        }
        let mark = match change {
            Change::Init => Some(Mark::Init),
            Change::StartUp(_) => Some(Mark::StartUp),
            Change::Shutdown => Some(Mark::Shutdown),
            _ => None,
        };
        if let Some(mark) = mark {
            let mut host = Host {
                cpu,
                offset: self.tsc_offset,
            };
            self.mark(mark, &mut host);
        }
        // Where tracing began just now, it began where the start-up IPI led.
        if matches!(change, Change::StartUp(_)) && self.words == 0 {
            return Effects::NONE;
        }
        self.word(cpu, |pt, cpu| pt.change(change, cpu));
        if change == Change::Wake {
            let mut host = Host {
                cpu,
                offset: self.tsc_offset,
            };
            let offset = self.total();
            let (step, tick) = (host.step(), host.tsc());
            self.sink.record(&Record::Time { offset, step, tick });
        }
        Effects::NONE
    }

    fn knows(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        if self.state != State::Tracing {
            return true;
        }
        if code.len == 0 {
            let known = self.maps.get(&Self::key(code, cpu));
            return known.is_some_and(|mapping| mapping.gpa == code.physical && mapping.epoch == self.epoch);
        }
        let mut host = Host {
            cpu,
            offset: self.tsc_offset,
        };
        let pool = lock(&self.shared.pool);
        pool.pages
            .get(&(code.physical & !0xfff))
            .is_some_and(|content| same(content, code, &mut host))
    }

    fn code(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        if self.state != State::Tracing {
            return false;
        }
        let mut host = Host {
            cpu,
            offset: self.tsc_offset,
        };
        let gpa = code.physical & !0xfff;
        let Some((content, changed)) = self.content(code, &mut host) else {
            return false;
        };
        if changed {
            self.tell_page(gpa, &content, &mut host);
        }
        let key = Self::key(code, host.cpu);
        let mapping = Mapping {
            gpa,
            hash: content.hash,
            epoch: self.epoch,
        };
        let before = self.maps.insert(key, mapping);
        if before.is_none_or(|before| before.gpa != gpa) {
            self.by_gpa.entry(gpa).or_default().push(key);
        }
        let mut moved = false;
        match before {
            None => {
                let number = self.sink.content(content.hash, &content.bytes);
                self.sink.record(&Record::Page {
                    space: key.0,
                    page: key.1,
                    content: number,
                });
            }
            Some(before) => {
                if before.gpa != gpa {
                    moved = true;
                    if let Some(keys) = self.by_gpa.get_mut(&before.gpa) {
                        keys.retain(|other| *other != key);
                    }
                }
                if before.hash != content.hash {
                    self.tell_change(key, &content, &mut host);
                }
            }
        }
        self.settle(&mut host);
        moved
    }

    fn tsc_offset(&mut self, offset: u64) {
        self.tsc_moved |= self.tsc_offset != offset;
        self.tsc_offset = offset;
    }

    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        self.pull(|when| when.is_access(access, cpu));
        Effects::NONE
    }

    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        self.count(cpu);
        self.word(cpu, |pt, cpu| pt.tick(cpu));
        Effects::NONE
    }
}

impl Drop for Observer {
    /// A machine that goes away unfinished leaves what there is.
    fn drop(&mut self) {
        if self.state == State::Tracing {
            self.write();
        }
    }
}
