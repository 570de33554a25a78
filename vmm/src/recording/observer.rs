//! The observer of a vCPU: what it hears becomes packets and sideband. [`super::recorder`] tells why and how.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use devices::unit::pt::Pt;
use x86::model::CpuModel;
use x86::msr::{IA32_RTIT_ADDR0_A, IA32_RTIT_CR3_MATCH, IA32_RTIT_STATUS};
use x86::pt::RtitCtl;
use x86::watch::{
    Access, BranchRecord, Change, Code, CodeSize, Effects, EventRecord, Interest, Processor, Range, TraceMem, Watch,
};

use trace::directory::sink::{PACKETS, Sink};
use trace::format::{COMM, Mark, PAGE, Record, space};

use super::host::{Host, Nobody, Physical};
use super::mapped::{Mapped, ReportedMappings};
use super::options::{Filter, RecordingOptions};
use super::state::{CHANGES, Content, RecordingState, lock};
use super::trigger::When;
use super::unit::{CTL, caps};
use super::wanted::WantedProcesses;

/// Mappings that are remembered of a vCPU; with more, a segment is begun and all is forgotten.
const MAPPINGS: usize = 1 << 18;

/// Keys are addresses, which are spread well enough by a multiplication; who chooses them badly slows down nobody else.
#[derive(Clone, Copy, Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

type Map<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

/// A page at an address.
type Key = (u64, u64);

/// What an address leads to.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    /// The physical page.
    gpa: u64,
    /// The content that was reported.
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
    /// The machine's step, which its time packets tell.
    step: u64,
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
    cpu: usize,
    shared: Arc<RecordingState>,
    pt: Pt<Vec<u8>>,
    ctl: RtitCtl,
    sink: Sink,
    state: ObserverState,
    maps: Map<Key, Mapping>,
    /// Which addresses lead to a physical page.
    by_gpa: Map<u64, Vec<Key>>,
    /// [`Interest::code`].
    code: u64,
    /// How many of the pool's changes are reported.
    seen: u64,
    anchor: Option<Anchor>,
    /// Where the last PSB was that is reported.
    psb: Option<u64>,
    tsc_offset: u64,
    tsc_moved: bool,
    /// Which beginning it is.
    epoch: u32,
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    generation: u64,
    page_table: u64,
    /// Nobody has said yet whose it is.
    nameless: bool,
    /// A record has said which thread runs.
    thread_is_known: bool,
    mapped: ReportedMappings,
    /// Which processes are recorded; `None`: all.
    wanted: Option<WantedProcesses>,
    /// User code was reported before the kernel was found that knows whose file it is.
    has_unknown_code: bool,
}

impl Observer {
    pub(super) fn new(
        cpu: usize,
        options: &RecordingOptions,
        shared: Arc<RecordingState>,
        model: &CpuModel,
    ) -> io::Result<Observer> {
        let mut pt = Pt::with_output(caps(model), Vec::new());
        pt.tell_cr3();
        pt.follow_edges();
        Ok(Observer {
            cpu,
            pt,
            ctl: CTL,
            sink: Sink::new(&options.folder, cpu, options.buffer, shared.room.clone())?,
            shared,
            state: ObserverState::Idle,
            maps: Map::default(),
            by_gpa: Map::default(),
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
            nameless: false,
            thread_is_known: false,
            mapped: ReportedMappings::default(),
            wanted: None,
            has_unknown_code: false,
        }
        .with_filters(&options.filters))
    }

    /// Programs the filters.
    fn with_filters(mut self, filters: &[Filter]) -> Observer {
        let rings = |ring: Filter| filters.contains(&ring);
        self.wanted = WantedProcesses::of(filters);
        let (os, user) = (rings(Filter::Kernel), rings(Filter::User));
        self.ctl.set_os(os || !user);
        self.ctl.set_user(user || !os);
        let mut range = 0;
        for filter in filters {
            let registers = match *filter {
                Filter::Kernel | Filter::User | Filter::Comm(_) | Filter::Pid(_) => continue,
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
        self.state = ObserverState::Tracing;
        self.thread_is_known = false;
        self.seen = self.shared.changed.load(Ordering::Relaxed);
        self.epoch += 1;
        self.code += 1;
        self.anchor = None;
        if self.epoch == 1 {
            self.mark(Mark::Segment, cpu);
        }
        self.mark(Mark::Start, cpu);
        self.admit_current(cpu);
        // A decoder begins anew, so there has to be a PSB: PacketByteCnt is 0.
        let cleared = self.pt.write_msr(IA32_RTIT_STATUS, 0, cpu);
        debug_assert!(cleared.is_ok());
        let ctl = self.ctl.with_trace_en(true);
        // Whatever `CTL` and the filters are, `caps` has it.
        let programmed = self.pt.program(ctl, cpu);
        debug_assert!(programmed.is_ok(), "{ctl:?}");
        self.write_due(cpu);
    }

    fn stop(&mut self, mark: Mark, cpu: &mut Host<'_>) {
        if self.state == ObserverState::Tracing {
            let programmed = self.pt.program(self.ctl, cpu);
            debug_assert!(programmed.is_ok());
            self.write_due(cpu);
        }
        self.mark(mark, cpu);
        self.write();
        self.state = if mark == Mark::Stop {
            ObserverState::Idle
        } else {
            ObserverState::Done
        };
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
    fn wants(&mut self) -> Interest {
        let mut interest = Interest::NOTHING;
        let tracing = self.state == ObserverState::Tracing;
        if tracing {
            interest = Interest {
                code: self.code,
                ..self.pt.interest()
            };
        }
        let when = self.shared.trigger().filter(|_| self.state != ObserverState::Done);
        if let Some(when) = when {
            interest = interest.and(when.interest(self.shared.retired()));
        }
        // Asked after every system call: mostly nothing has to be put together to see that they are the same.
        let of_unit: &[u64] = if tracing { self.pt.boundaries() } else { &[] };
        let switch = self.shared.thread_switch().filter(|_| tracing);
        let exec = self.shared.exec().filter(|_| tracing && self.wanted.is_some());
        let own = [switch, exec];
        let others = self.boundaries.iter().filter(|at| !own.contains(&Some(**at)));
        let has_switch = own.iter().flatten().all(|at| self.boundaries.contains(at));
        if when.is_none() && self.ranges.is_empty() && has_switch && others.eq(of_unit) {
            return interest;
        }
        let mut boundaries = of_unit.to_vec();
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

    fn write(&mut self) {
        if let Err(error) = self.sink.write(self.pt.output()) {
            self.shared.fail(error);
        }
    }

    /// After a callback: syncs are reported, and what waits is written when it is much.
    fn write_due(&mut self, cpu: &mut Host<'_>) {
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
            if self.shared.failed.load(Ordering::Relaxed) && self.state == ObserverState::Tracing {
                self.state = ObserverState::Done;
            }
        }
    }

    /// Begins the next segment where it is time for it, and where the engine asks next what is to be announced: all code is.
    fn turn_page(&mut self, cpu: &mut Host<'_>) {
        let waiting = self.pt.output().len();
        let room = self.state == ObserverState::Tracing && !self.pt.place().restarts;
        if room && (self.sink.is_full(waiting) || self.maps.len() > MAPPINGS) {
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
        self.mapped = ReportedMappings::default();
        self.anchor = None;
        self.code += 1;
        self.mark(Mark::Segment, cpu);
        self.tsc_moved = true;
        self.pt.synchronize(cpu);
        self.psb = None;
        self.write_due(cpu);
    }

    /// A PSB in front of the next instruction.
    fn anchor(&mut self, cpu: &mut Host<'_>) -> Anchor {
        let (ip, step) = (next_ip(cpu), cpu.step());
        let place = self.pt.place();
        let total = self.total();
        if let Some(anchor) = self.anchor
            && (anchor.end, anchor.step, place.bits) == (total, step, 0)
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
            step,
        };
        self.anchor = Some(anchor);
        anchor
    }

    /// A mapping that was reported before has another content.
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
                // A reader that has one memory for all vCPUs, as perf has, orders what they executed by time. So this vCPU
                // tells the time behind the changes even where it has executed none of the pages.
                self.anchor(cpu);
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
        self.write_due(cpu);
    }

    /// Says what the process has mapped where it begins to execute a page, if that was not said yet.
    fn tell_mapping(&mut self, key: Key, linear: u64, cpu: &mut Host<'_>) {
        let context = cpu.context();
        if key.0 == 0 {
            return;
        }
        let found = {
            let mut linux = lock(&self.shared.linux);
            self.has_unknown_code |= context.cpl == 3 && linux.recording.kernel().is_none();
            let found = linux
                .recording
                .mapping(&mut Physical(cpu.cpu), self.cpu, context.cr3, linear);
            linux.new |= found.as_ref().is_some_and(|(_, new)| *new);
            found
        };
        let Some((mapping, _)) = found else { return };
        let file = (!mapping.path.is_empty()).then(|| self.mapped.file(mapping.path, mapping.build_id, &mut self.sink));
        let mapped = Mapped {
            first: mapping.start >> 12,
            end: mapping.end >> 12,
            at: mapping.offset >> 12,
            file,
        };
        if !self.mapped.add(key.0, key.1, mapped) {
            return;
        }
        let offset = self.anchor(cpu).begin;
        self.sink.record(&Record::Mapping {
            offset,
            step: cpu.step(),
            space: key.0,
            page: mapped.first,
            pages: mapped.end - mapped.first,
            first: mapped.at,
            file,
        });
    }

    /// Once the kernel is found, user code that was reported before is reported anew, with what it is of.
    fn tell_unknown_code(&mut self) {
        if !self.has_unknown_code || self.shared.thread_switch().is_none() {
            return;
        }
        self.has_unknown_code = false;
        self.maps.retain(|key, _| key.0 == 0);
        self.by_gpa.values_mut().for_each(|keys| keys.retain(|key| key.0 == 0));
        self.code += 1;
    }

    fn key(code: &Code, cpu: &dyn Processor) -> Key {
        (space(cpu.context().cr3, code.linear), code.linear >> 12)
    }

    /// The content of a page as executed now, and what it was, where others have to hear that it is new.
    fn content(&mut self, code: &Code, cpu: &mut Host<'_>) -> Option<(Arc<Content>, Option<Arc<Content>>)> {
        let gpa = code.physical & !0xfff;
        let shared = self.shared.clone();
        let mut pool = lock(&shared.pool);
        if let Some(content) = pool.pages.get(&gpa)
            && same(content, code, cpu)
        {
            return Some((content.clone(), None));
        }
        let mut bytes = [0; PAGE];
        cpu.read_phys(gpa, &mut bytes).ok()?;
        let hash = shared.hashing.of(&bytes);
        let content = Arc::new(Content { bytes, hash });
        let before = pool.pages.insert(gpa, content.clone());
        if before.is_some() {
            pool.changes.push_back(gpa);
            if pool.changes.len() > CHANGES {
                pool.changes.pop_front();
                pool.dropped += 1;
            }
            let changed = pool.dropped + pool.changes.len() as u64;
            shared.changed.store(changed, Ordering::Relaxed);
            // This vCPU knows the others: it was notified of them before it got its turn.
            self.seen = changed;
        }
        Some((content, before))
    }

    /// A Linux guest goes to another page table: the one that it comes from has a name.
    fn name_process(&mut self, cpu: &mut dyn Processor) {
        // Of the two page tables of a process the kernel's is the first.
        let table = cpu.context().cr3 & !0x1fff;
        let before = std::mem::replace(&mut self.page_table, table);
        if before != table {
            self.names(before, cpu);
            self.nameless = true;
        }
    }

    /// The same of a process that begins to run a program: it may have ended, and its name with it, before it goes anywhere else.
    fn name_program(&mut self, cpu: &mut dyn Processor) {
        if self.nameless && cpu.context().cpl == 3 {
            self.nameless = false;
            self.names(self.page_table, cpu);
        }
    }

    /// Linux is about to go over to another thread. The `task_struct` of the one that ran is the first argument, that of the other the
    /// second: RDI and RSI, or EAX and EDX of 32-bit kernels (`-mregparm=3`).
    fn name_thread(&mut self, cpu: &mut dyn Processor) {
        let (before, next) = match cpu.context().code {
            CodeSize::Bits64 => (cpu.gpr(7), cpu.gpr(6)),
            CodeSize::Bits16 | CodeSize::Bits32 => (cpu.gpr(0) & 0xffff_ffff, cpu.gpr(2) & 0xffff_ffff),
        };
        // Where recording has begun under way, nobody has said which thread ran.
        let first = !std::mem::replace(&mut self.thread_is_known, true);
        for at in first.then_some(before).into_iter().chain([next]) {
            self.tell_thread(at, cpu);
        }
    }

    fn tell_thread(&mut self, task_struct: u64, cpu: &mut dyn Processor) {
        let step = cpu.step();
        let task = {
            let mut linux = lock(&self.shared.linux);
            let Some((task, new)) = linux.recording.thread(&mut Physical(cpu), task_struct, step) else {
                return;
            };
            linux.new |= new;
            task
        };
        let wanted = self.wanted.as_ref().map(|wanted| wanted.has(&task));
        let mut name = [0; COMM];
        let mut len = task.comm.len().min(COMM - 1);
        while !task.comm.is_char_boundary(len) {
            len -= 1;
        }
        name[..len].copy_from_slice(&task.comm.as_bytes()[..len]);
        let mut host = Host {
            cpu,
            offset: self.tsc_offset,
        };
        let offset = self.anchor(&mut host).begin;
        self.sink.record(&Record::Thread {
            offset,
            step,
            tid: task.pid,
            tgid: task.tgid,
            comm: name,
        });
        if let Some(wanted) = wanted {
            self.pt.admit(wanted, &mut host);
        }
        self.write_due(&mut host);
    }

    /// Where processes are chosen, the one that runs is recorded if it is one of them.
    fn admit_current(&mut self, cpu: &mut Host<'_>) {
        let Some(wanted) = &self.wanted else { return };
        let task = {
            let linux = lock(&self.shared.linux);
            let kernel = linux.recording.kernel();
            kernel.and_then(|kernel| kernel.current(&mut Physical(cpu.cpu), self.cpu))
        };
        // Where nobody knows who runs, it is nobody who was asked for.
        let wanted = task.is_some_and(|task| wanted.has(&task));
        self.pt.admit(wanted, cpu);
    }

    fn names(&self, page_table: u64, cpu: &mut dyn Processor) {
        let steps = cpu.step();
        let mut linux = lock(&self.shared.linux);
        linux.new |= linux
            .recording
            .switched(&mut Physical(cpu), self.cpu, page_table, steps);
    }

    /// Calls the unit.
    fn word(&mut self, cpu: &mut dyn Processor, say: impl FnOnce(&mut Pt<Vec<u8>>, &mut Host<'_>) -> Effects) {
        if self.state != ObserverState::Tracing {
            return;
        }
        let mut host = Host {
            cpu,
            offset: self.tsc_offset,
        };
        let _ = say(&mut self.pt, &mut host);
        self.write_due(&mut host);
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
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        let mut host = Host {
            cpu,
            offset: self.tsc_offset,
        };
        let finish = self.shared.finish.load(Ordering::Relaxed);
        self.count(host.cpu);
        let on = self.shared.on.load(Ordering::Relaxed);
        match self.state {
            ObserverState::Done => {}
            _ if finish => self.stop(Mark::End, &mut host),
            ObserverState::Idle if on => self.start(&mut host),
            ObserverState::Tracing if !on => self.stop(Mark::Stop, &mut host),
            // Nothing is executed before the start-up IPI.
            ObserverState::Tracing if self.pt.place().restarts => {}
            ObserverState::Tracing => {
                self.catch_up(&mut host);
                self.tell_unknown_code();
            }
            ObserverState::Idle => {}
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
        if self.state == ObserverState::Tracing && self.shared.thread_switch() == Some(address) {
            self.name_thread(cpu);
        }
        if self.state == ObserverState::Tracing && self.shared.exec() == Some(address) {
            self.names(self.page_table, cpu);
            let mut host = Host {
                cpu,
                offset: self.tsc_offset,
            };
            self.admit_current(&mut host);
            self.write_due(&mut host);
        }
        Effects::NONE
    }

    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        self.name_program(cpu);
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
        if self.state != ObserverState::Tracing {
            return Effects::NONE;
        }
        if change == Change::Cr3 {
            self.name_process(cpu);
        }
        let mark = match change {
            Change::Init { .. } => Some(Mark::Init),
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
        self.word(cpu, |pt, cpu| pt.change(change, cpu));
        if matches!(change, Change::Wake { .. }) {
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
        if self.state != ObserverState::Tracing {
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
        if self.state != ObserverState::Tracing {
            return false;
        }
        let mut host = Host {
            cpu,
            offset: self.tsc_offset,
        };
        let gpa = code.physical & !0xfff;
        let Some((content, was)) = self.content(code, &mut host) else {
            return false;
        };
        if was.is_some() {
            self.tell_page(gpa, &content, &mut host);
        }
        let key = Self::key(code, host.cpu);
        let mapping = Mapping {
            gpa,
            hash: content.hash,
            epoch: self.epoch,
        };
        let before = self.maps.insert(key, mapping);
        let elsewhere = before.is_none_or(|before| before.gpa != gpa);
        if elsewhere {
            self.by_gpa.entry(gpa).or_default().push(key);
        }
        let mut moved = false;
        match before {
            None => {
                // Another vCPU may have executed it as it was before: then the change is reported, for its moment.
                let was = was.filter(|_| self.shared.retired.len() > 1);
                let first = was.as_ref().unwrap_or(&content);
                let number = self.sink.content(first.hash, &first.bytes);
                self.sink.record(&Record::Page {
                    space: key.0,
                    page: key.1,
                    content: number,
                });
                if was.is_some() {
                    self.tell_change(key, &content, &mut host);
                }
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
        if elsewhere {
            self.tell_mapping(key, code.linear, &mut host);
        }
        self.write_due(&mut host);
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
        if self.state == ObserverState::Tracing {
            self.write();
        }
    }
}
