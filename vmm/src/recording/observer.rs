//! The observer of a vCPU: what it hears becomes packets and sideband. [`super::recorder`] tells why and how.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use devices::unit::pt::Pt;
use x86::model::CpuModel;
use x86::msr::{IA32_RTIT_ADDR0_A, IA32_RTIT_CR3_MATCH, IA32_RTIT_STATUS};
use x86::pt::RtitCtl;
use x86::watch::{
    Access, BranchRecord, Change, Code, CodeSize, Effects, EventRecord, Interest, Processor, Range, Watch,
};

use trace::directory::sink::{PACKETS, Sink};
use trace::format::{Mark, Record};

use super::code_map::CodeMap;
use super::host::{Host, Nobody};
use super::mapped::ReportedMappings;
use super::options::{Filter, Part, RecordingOptions};
use super::state::RecordingState;
use super::trigger::When;
use super::unit::{CTL, caps};
use super::wanted::WantedProcesses;

/// Mappings that are remembered of a vCPU; with more, a segment is begun and all is forgotten.
const MAPPINGS: usize = 1 << 18;

/// A PSB at which code may change: nothing was executed since.
#[derive(Clone, Copy, Debug)]
pub(super) struct Anchor {
    pub begin: u64,
    end: u64,
    pub ip: u64,
    /// The machine's step, which its time packets tell.
    step: u64,
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
    pub(super) pt: Pt<Vec<u8>>,
    ctl: RtitCtl,
    pub(super) sink: Sink,
    state: ObserverState,
    pub(super) code_map: CodeMap,
    /// [`Interest::code`].
    pub(super) code: u64,
    /// How many of the pool's changes are reported.
    pub(super) seen: u64,
    anchor: Option<Anchor>,
    /// Where the last PSB was that is reported.
    psb: Option<u64>,
    pub(super) tsc_offset: u64,
    tsc_moved: bool,
    /// Which beginning it is.
    pub(super) epoch: u32,
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    generation: u64,
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
            code_map: CodeMap::default(),
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
            guest_tables: HashMap::new(),
            thread_is_known: false,
            mapped: ReportedMappings::default(),
            wanted: None,
            has_unknown_code: false,
            unknown_code_of_guest: None,
            part: options.part,
            cuts: 0,
            asleep: false,
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

    /// The vCPU sleeps where the recording goes on.
    pub fn finds_asleep(&mut self) {
        self.asleep = true;
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
        // One that has not run yet begins as in a recording of the whole.
        if self.epoch == 1 && self.part.continues && cpu.retired() > 0 {
            self.go_on(cpu);
            return;
        }
        if self.epoch == 1 {
            self.mark(Mark::Segment, cpu);
        }
        self.mark(Mark::Start, cpu);
        self.name_guest(cpu);
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

    /// Goes on where another part of the recording has ended, as [`Observer::next_segment`] does within one: what is said where
    /// tracing begins has been said there.
    fn go_on(&mut self, cpu: &mut Host<'_>) {
        self.name_guest(cpu);
        self.admit_current(cpu);
        let ctl = self.ctl.with_trace_en(true);
        let programmed = self.pt.program(ctl, cpu);
        debug_assert!(programmed.is_ok(), "{ctl:?}");
        self.pt.output().clear();
        if self.asleep {
            self.pt.sleeps();
        }
        self.page_table = cpu.context().cr3 & !0x1fff;
        self.mark(Mark::Segment, cpu);
        self.pt.synchronize(cpu);
        self.write_due(cpu);
    }

    fn stop(&mut self, mark: Mark, cpu: &mut Host<'_>) {
        if mark == Mark::End && self.part.goes_on {
            if self.state == ObserverState::Tracing {
                self.pt.flush(cpu);
                self.write_due(cpu);
            }
            self.write();
            self.state = ObserverState::Done;
            return;
        }
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
    fn wants(&mut self, step: u64) -> Interest {
        let mut interest = Interest::NOTHING;
        let tracing = self.state == ObserverState::Tracing;
        if tracing {
            interest = Interest {
                code: self.code,
                ..self.pt.interest(step)
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
    pub(super) fn write_due(&mut self, cpu: &mut Host<'_>) {
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
        if room && (self.sink.is_full(waiting) || self.code_map.addresses.len() > MAPPINGS) {
            self.next_segment(cpu);
        }
    }

    /// Begins a segment with a PSB; the engine is to tell all code again.
    pub(super) fn next_segment(&mut self, cpu: &mut Host<'_>) {
        self.pt.flush(cpu);
        self.write();
        if let Err(error) = self.sink.next_segment() {
            self.shared.fail(error);
        }
        self.code_map.clear();
        self.mapped = ReportedMappings::default();
        self.has_unknown_code = false;
        self.unknown_code_of_guest = None;
        self.anchor = None;
        self.code += 1;
        self.mark(Mark::Segment, cpu);
        self.tsc_moved = true;
        self.pt.synchronize(cpu);
        self.psb = None;
        self.write_due(cpu);
    }

    /// A PSB in front of the next instruction.
    pub(super) fn anchor(&mut self, cpu: &mut Host<'_>) -> Anchor {
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
                let cuts = self.shared.cuts.load(Ordering::Relaxed);
                if std::mem::replace(&mut self.cuts, cuts) == cuts {
                    self.catch_up(&mut host);
                } else {
                    // What changed before is reported anew.
                    self.seen = self.shared.changed.load(Ordering::Relaxed);
                    self.next_segment(&mut host);
                }
                self.tell_unknown_code();
            }
            ObserverState::Idle => {}
        }
        self.wants(cpu.step())
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
        // A guest of a hypervisor may have other code at these addresses.
        let own = self.state == ObserverState::Tracing && !cpu.context().non_root;
        if own && self.shared.thread_switch() == Some(address) {
            self.name_thread(cpu);
        }
        if own && self.shared.exec() == Some(address) {
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
            let mut host = Host {
                cpu,
                offset: self.tsc_offset,
            };
            self.mark(mark, &mut host);
        }
        // The guest's trace stops in system-management mode; what is recorded from outside goes on.
        if !matches!(change, Change::Smi { .. } | Change::Rsm) {
            self.word(cpu, |pt, cpu| pt.change(change, cpu));
        }
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
        self.state != ObserverState::Tracing || self.knows_code(code, cpu)
    }

    fn code(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        self.state == ObserverState::Tracing && self.tell_code(code, cpu)
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
