//! The calls from the engine to the debug and trace units ([`x86::watch`]).
//!
//! # Theory
//! Nobody pays for watching that is off. What must be known of every branch is written by forms of the branch handlers
//! that only blocks of a mode of their own hold ([`mode::RECORD`]); what ends a block anyway looks at a flag; accesses are
//! seen because the TLB never leads to a watched page; boundaries end blocks, which then begin with a check.
//!
//! # Practice
//! Near branches go to a buffer in [`Cpu`], in the order they retire. Everything else that the units hear is said by the run
//! loop between two chains, after that buffer has been handed over. An instruction that would speak, or that changes what a
//! record means (CPL, CR3, a unit's register), therefore first [asks for that](Cpu::drain_records_first): while records wait it leaves for the
//! run loop without having done anything, and is run again.
//!
//! Who can do with it gets runs ([`Interest::run`], [`mode::RUNS`]): a conditional branch is then a bit in [`Hot`](crate::state::Hot),
//! which goes into the next record that is written, and a direct jump nothing. A translation does so itself; the interpreter writes the
//! record as ever and [packs](Cpu::pack) it. What the record of a full run says of its last branch, the target, is kept relative to the
//! page: so it costs a store of a constant, and an addition where the page changes.
//!
//! Who needs no branch that is not taken ([`Recorded::Taken`], [`mode::TAKEN`]) gets no record of one. A translation has no code for
//! it then, and the interpreter takes back what it has written.
// The engine core is one of the rooms where `unsafe` is allowed: records are written by raw pointer.
#![allow(unsafe_code)]

use std::rc::Rc;

use x86::fault::PageFaultCode;
use x86::rflags::flag as rf;
use x86::watch::{
    Access, AccessKind, BadPhys, BranchRecord, Change, Code, CodeSize, Context, Effects, EventRecord, Far, Flow,
    Interest, PageFault, Processor, Range, Recorded, TraceMem, Watch,
};

use crate::bus::{Bus, MsrFault};
use crate::cpu::{CS, Cpu, Event, Source, mode};
use crate::mmu;
use crate::op::{Done, Op, Reason, Stop, Template};
use crate::tlb::Grant;

/// Branch records that wait at most: 64 KiB of them, which the host's second-level cache has to spare.
const ROOM: usize = 2048;

/// Beside the DR6 bits that wait: the delivery of an event has met a data breakpoint, and the debug exception comes at the
/// handler's first instruction.
pub(crate) const DUE: u64 = 1 << 63;

/// What a processor knows of its watchers.
pub(crate) struct Watched {
    records: Box<[BranchRecord]>,
    pub interest: Interest,
    /// Far transfers, events and changes are to be announced.
    pub tell: bool,
    /// Changes of RFLAGS.IF are, too.
    pub tell_interrupts: bool,
    /// The interest may have changed: an MSR or debug register was written.
    pub ask: bool,
    /// What the instruction that ended the chain has to say.
    pub far: Option<BranchRecord>,
    pub event: Option<EventRecord>,
    pub changes: Vec<Change>,
    /// A task switch has loaded CR3, which its branch or event has to say.
    pub loads_cr3: bool,
    pub accesses: Vec<Access>,
    /// Accesses to watched ranges that the processor has made for itself.
    pub implicit: Vec<Access>,
    /// The units' generation that `boundaries` and `ranges` belong to; `None` before the first.
    pub generation: Option<u64>,
    pub boundaries: Rc<[u64]>,
    pub ranges: Vec<Range>,
    /// Mode bits that watching asks for.
    pub mode: u32,
    /// The step at which the next tick is due.
    pub tick_at: u64,
    /// Step count and linear address of the instruction that `before` was said of last.
    pub observed: (u64, u64),
    /// The instruction that runs takes a bus lock that is to end in a debug exception.
    pub bus_lock: bool,
    /// DR6 bits of traps that wait until the instruction after a load of SS has retired; with [`DUE`], of one that comes before
    /// the next instruction.
    pub pending: u64,
    /// The host wants to look.
    pub stop: bool,
    /// What there was of a run, and where its record would have gone, before the last branch that the interpreter has packed.
    unpacked: Unpacked,
}

/// See [`Watched::unpacked`].
#[derive(Clone, Copy)]
struct Unpacked {
    at: *mut BranchRecord,
    run: u64,
    to: u64,
    limit: u64,
}

/// Whether a span and a range have a byte in common; spans may wrap.
fn overlap(range: &Range, address: u64, size: u64) -> bool {
    range.first.wrapping_sub(address) < size
        || address.wrapping_sub(range.first) <= range.last.wrapping_sub(range.first)
}

impl Watched {
    pub fn new() -> Watched {
        Watched {
            // One more: the end of a run may follow the last that there is room for.
            records: vec![BranchRecord::default(); ROOM + 1].into_boxed_slice(),
            interest: Interest::NOTHING,
            tell: false,
            tell_interrupts: false,
            ask: false,
            far: None,
            event: None,
            changes: Vec::new(),
            loads_cr3: false,
            accesses: Vec::new(),
            implicit: Vec::new(),
            generation: None,
            boundaries: Rc::from([]),
            ranges: Vec::new(),
            mode: 0,
            tick_at: u64::MAX,
            observed: (u64::MAX, 0),
            bus_lock: false,
            pending: 0,
            stop: false,
            unpacked: Unpacked {
                at: core::ptr::null_mut(),
                run: 1,
                to: 0,
                limit: 0,
            },
        }
    }

    /// Something waits to be said by the run loop, records aside.
    pub fn speaks(&self) -> bool {
        self.far.is_some()
            || self.event.is_some()
            || !self.changes.is_empty()
            || !self.accesses.is_empty()
            || !self.implicit.is_empty()
    }
}

/// Where an event finds the processor.
#[derive(Clone, Copy)]
pub(crate) struct EventOrigin {
    from: u64,
    cpl: u8,
    length: u8,
    step: u64,
}

impl EventOrigin {
    /// At INT n and its like.
    pub fn of_instruction(c: &Cpu, o: &Op) -> EventOrigin {
        EventOrigin {
            from: c.linear(c.ip(o)),
            cpl: c.cpl,
            length: o.len,
            step: c.step_after(o),
        }
    }

    /// Between two instructions.
    pub fn of_processor(c: &Cpu) -> EventOrigin {
        EventOrigin {
            from: c.linear(c.rip),
            cpl: c.cpl,
            length: 0,
            step: c.clock.wrapping_add((c.granted - c.budget) as u64),
        }
    }

    /// Between two instructions, or where a VM entry injects an event whose instruction stands elsewhere than RIP does by now.
    pub fn of_event(c: &Cpu) -> EventOrigin {
        let here = EventOrigin::of_processor(c);
        match c.injecting {
            Some((vectoring, stands)) => EventOrigin {
                from: c.linear(stands),
                length: vectoring.length,
                ..here
            },
            None => here,
        }
    }

    /// The machine's step clock there.
    pub fn step(self) -> u64 {
        self.step
    }

    /// What is said of an event that has been delivered.
    pub fn record(self, c: &mut Cpu, event: Event) -> EventRecord {
        let far = match event.source {
            Source::Exception => Far::Exception,
            Source::Software | Source::PrivilegedSoftware => Far::SoftwareInterrupt,
            Source::External | Source::Nmi => Far::Interrupt,
        };
        EventRecord {
            branch: BranchRecord {
                from: self.from,
                to: c.linear(c.rip),
                step: self.step,
                flow: Flow::Far(far).code(),
                length: self.length,
                from_cpl: self.cpl,
                to_cpl: c.cpl,
                loads_cr3: core::mem::take(&mut c.watched.loads_cr3),
                run: [0; 3],
            },
            vector: event.vector,
            debug: event.debug(),
            error: event.error,
            address: (far == Far::Exception && event.vector == 14).then_some(c.cr2),
        }
    }
}

/// Source and step of a branch that has not yet been recorded.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    from: u64,
    step: u64,
}

impl Cpu {
    /// The linear address of an instruction pointer.
    #[inline(always)]
    pub(crate) fn linear(&self, ip: u64) -> u64 {
        // Outside 64-bit mode both sums wrap at 4 GiB; within it the base is 0 and the mask all ones.
        (ip & self.ip_mask).wrapping_add(self.cs_base) & self.ip_mask
    }

    /// The linear address of the page after that of a linear address.
    pub(crate) fn next_page(&self, linear: u64) -> u64 {
        (linear & !0xfff).wrapping_add(0x1000) & self.ip_mask
    }

    /// Steps of the machine once the instruction of `o` has retired.
    #[inline(always)]
    fn step_after(&self, o: &Op) -> u64 {
        self.clock
            .wrapping_add((self.granted - self.budget - o.rem as i64 + 1) as u64)
    }

    /// Appends the record of a near branch: its linear addresses, and the record's last word without the privilege level:
    /// [`Flow::code`], and the length in bits 15:8. Whether the buffer is full now, which ends the chain. The branch op is the
    /// last of its block, so that all of the block's steps have been made.
    #[inline(always)]
    pub(crate) fn record(&mut self, from: u64, to: u64, rest: u64) -> bool {
        let step = self.record_rest[0].wrapping_sub(self.budget as u64);
        let rest = rest | self.record_rest[1];
        let p = self.record_at;
        // SAFETY: Chains of recording blocks are entered with room for a record, and end when it is used up.
        unsafe {
            p.cast::<[u64; 4]>().write([from, to, step, rest]);
            self.record_at = p.add(1);
        }
        self.recorded()
    }

    /// After a record has been written: whether the buffer is full.
    #[inline(always)]
    fn recorded(&mut self) -> bool {
        if self.mode & mode::SPARSE != 0 {
            self.pack();
        }
        self.record_at == self.record_end
    }

    /// Makes of the record that was just written what it is in a run, or nothing where only taken branches have one.
    #[inline(never)]
    fn pack(&mut self) {
        // SAFETY: Only called after a record was written, in front of `record_at`.
        let (p, record) = unsafe {
            let p = self.record_at.sub(1);
            (p, &mut *p)
        };
        self.watched.unpacked = Unpacked {
            at: p,
            run: self.run,
            to: self.run_to,
            limit: self.run_limit,
        };
        const NOT_TAKEN: u8 = Flow::Cond { taken: false }.code();
        const TAKEN: u8 = Flow::Cond { taken: true }.code();
        const JUMP: u8 = Flow::Jump.code();
        if self.mode & mode::TAKEN != 0 {
            if record.flow == NOT_TAKEN {
                self.record_at = p;
            }
            return;
        }
        match record.flow {
            flow @ (NOT_TAKEN | TAKEN) => {
                self.run = self.run << 1 | u64::from(flow);
                self.run_to = record.to.wrapping_sub(self.page_ip());
                if self.run < self.run_limit {
                    self.record_at = p;
                    return;
                }
                (record.from, record.flow, record.length) = (0, BranchRecord::RUN, 0);
                record.run = run_bytes(self.run);
                self.run = 1;
                self.run_limit = self.run_next;
            }
            JUMP => self.record_at = p,
            _ => {
                record.run = run_bytes(self.run);
                self.run = 1;
            }
        }
    }

    /// Ends a run with a record of its own, between two instructions.
    fn end_run(&mut self) {
        if self.run == 1 {
            return;
        }
        let record = BranchRecord {
            from: 0,
            to: self.page_ip().wrapping_add(self.run_to) & self.ip_mask,
            step: self.clock.wrapping_add((self.granted - self.budget) as u64),
            flow: BranchRecord::RUN,
            length: 0,
            from_cpl: self.cpl,
            to_cpl: self.cpl,
            loads_cr3: false,
            run: run_bytes(self.run),
        };
        self.run = 1;
        // SAFETY: Behind the end there is room for one more, and whoever comes here empties the buffer next.
        unsafe {
            self.record_at.write(record);
            self.record_at = self.record_at.add(1);
        }
    }

    /// `record` for a direct branch in flat code; `WRAP`: the target may be beyond the end of the address space, from where it
    /// wraps.
    #[inline(always)]
    pub(crate) fn record_direct<const WRAP: bool>(&mut self, template: &Template) -> bool {
        self.record_made::<WRAP>(template, self.page_ip())
    }

    /// `record` by a template, to whose target `to` is added: two additions of two words each.
    #[inline(always)]
    fn record_made<const WRAP: bool>(&mut self, template: &Template, to: u64) -> bool {
        use core::arch::x86_64::{
            _mm_add_epi64, _mm_and_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_set_epi64x, _mm_set1_epi64x,
            _mm_storeu_si128, _mm_sub_epi64,
        };
        let p = self.record_at;
        // SAFETY: Every x86-64 CPU has SSE2; the loads are of two words, or one, that live as long as the references to them.
        // For the stores, as in `record`.
        unsafe {
            let (places, rest) = (template.places.as_ptr().cast(), template.rest.as_ptr().cast());
            let base = _mm_set_epi64x(to as i64, self.page_ip() as i64);
            let mut places = _mm_add_epi64(_mm_loadu_si128(places), base);
            if WRAP {
                places = _mm_and_si128(places, _mm_set1_epi64x(self.ip_mask as i64));
            }
            let now = _mm_sub_epi64(
                _mm_loadu_si128(self.record_rest.as_ptr().cast()),
                _mm_loadl_epi64((&raw const self.budget).cast()),
            );
            _mm_storeu_si128(p.cast(), places);
            _mm_storeu_si128(p.byte_add(16).cast(), _mm_add_epi64(_mm_loadu_si128(rest), now));
            self.record_at = p.add(1);
        }
        self.recorded()
    }

    /// `record` for a branch op that goes to the instruction pointer `to`: in flat code if `R` is 2, else in whatever code
    /// segment.
    #[inline(always)]
    pub(crate) fn record_to<const R: u8>(&mut self, o: &Op, code: u8, to: u64) -> bool {
        if R == 2 {
            return self.record_made::<false>(o.template(true), to);
        }
        let from = self.linear(self.ip(o));
        let to = self.linear(to);
        self.record(from, to, code as u64 | (o.len as u64) << 8)
    }

    /// Takes back the record of a branch that did not retire after all.
    #[cold]
    pub(crate) fn unrecord(&mut self) {
        if self.mode & mode::SPARSE != 0 {
            let before = self.watched.unpacked;
            self.record_at = before.at;
            (self.run, self.run_to, self.run_limit) = (before.run, before.to, before.limit);
            return;
        }
        // SAFETY: Only called after `record` by the same handler, so there is one.
        self.record_at = unsafe { self.record_at.sub(1) };
    }

    /// What the record of the branch op `o` will say of it, to be kept while the op goes a slow way.
    #[inline(always)]
    pub(crate) fn mark(&self, o: &Op) -> Mark {
        Mark {
            from: self.linear(self.ip(o)),
            step: self.step_after(o),
        }
    }

    /// After a flow op that went a slow way and led to `next`: its record, if it has retired.
    #[cold]
    #[inline(never)]
    pub(crate) fn record_after(&mut self, o: &Op, mark: Mark, code: u8, next: *const Op) -> *const Op {
        if next.is_null() && !matches!(self.stop, Reason::Resolve | Reason::Budget | Reason::Look) {
            return next;
        }
        let to = if next.is_null() {
            self.rip
        } else {
            // SAFETY: Flow ops return first ops of live blocks only.
            self.page_ip().wrapping_add(unsafe { (*next).off } as u64) & self.ip_mask
        };
        let rest = code as u64 | (o.len as u64) << 8 | self.record_rest[1];
        let p = self.record_at;
        // SAFETY: As in `record`.
        unsafe {
            p.cast::<[u64; 4]>()
                .write([mark.from, self.linear(to), mark.step, rest]);
            self.record_at = p.add(1);
        }
        if !self.recorded() {
            return next;
        }
        if !next.is_null() {
            // SAFETY: As above. The steps of the block that is not entered go back.
            self.budget += unsafe { (*next).rem } as i64;
        }
        self.end(to, Reason::Look)
    }

    /// Leaves for the run loop while branch records wait: what the instruction is about to do must come after them.
    #[inline]
    pub(crate) fn drain_records_first(&mut self) -> Done {
        if self.record_at == self.record_start() && self.run == 1 {
            return Ok(());
        }
        self.stop = Reason::Drain;
        Err(Stop)
    }

    /// The rights that the TLB may grant on a page: none that would let a watched access pass unseen.
    pub(crate) fn unwatched_rights(&self, linear: u64, read: bool, write: bool) -> (bool, bool) {
        let w = &self.watched;
        if w.interest.every_access {
            return (false, false);
        }
        if !w.interest.ranges {
            return (read, write);
        }
        let page = linear & !0xfff;
        let here = |r: &&Range| !r.ports && overlap(r, page, 0x1000);
        let near = w.ranges.iter().filter(here);
        near.fold((read, write), |(read, write), r| (read && !r.reads, write && !r.writes))
    }

    /// What the TLB may grant of fetches from a page that was translated for data. Where code is announced they are held back, unless
    /// it grants them already: what is fetched goes by way of `announce` first.
    pub(crate) fn silent_fetches(&self, known: crate::tlb::Entry, linear: u64, host: u64, exec: bool) -> Grant {
        let announced = known.exec == linear & !0xfff && known.host == host;
        match exec {
            false => Grant::No,
            true if self.watched.interest.code == 0 || announced => Grant::Yes,
            true => Grant::HeldBack,
        }
    }

    /// Before code is executed: the units hear of it if they do not know it, after all that has retired.
    #[inline]
    pub(crate) fn announce(&mut self, linear: u64, physical: u64, len: u64) -> Done {
        if self.watched.interest.code == 0 {
            return Ok(());
        }
        self.announce_now(&Code {
            linear,
            physical,
            len: len as u32,
        })
    }

    #[inline(never)]
    fn announce_now(&mut self, code: &Code) -> Done {
        let tsc = self.tsc_now();
        let bus = self.bus_pointer();
        // SAFETY: As in `ask`.
        let Some(watch) = (unsafe { &mut *bus }).watch() else {
            return Ok(());
        };
        if watch.knows(code, &mut View::between(self, tsc)) {
            return Ok(());
        }
        self.drain_records_first()?;
        if watch.code(code, &mut View::between(self, tsc)) {
            self.tlb.flush_page(code.linear);
        }
        Ok(())
    }

    /// Whether the units want to hear of an access.
    fn wanted(&self, address: u64, size: usize, kind: AccessKind) -> bool {
        let w = &self.watched;
        let (ports, reads, writes) = match kind {
            AccessKind::Read => (false, true, false),
            AccessKind::Write => (false, false, true),
            AccessKind::ReadWrite => (false, true, true),
            AccessKind::PortRead => (true, true, false),
            AccessKind::PortWrite => (true, false, true),
        };
        if w.interest.every_access && !ports {
            return true;
        }
        let wants = |r: &Range| {
            r.ports == ports && (r.reads && reads || r.writes && writes) && overlap(r, address, size as u64)
        };
        w.interest.ranges && w.ranges.iter().any(wants)
    }

    /// Before a memory access: one that is announced needs a block of its own, so that the callback comes right after the
    /// instruction.
    #[inline]
    pub(crate) fn heard(&mut self, linear: u64, size: usize, kind: AccessKind) -> Done {
        let a = &self.watched.interest;
        if (a.ranges || a.every_access) && self.wanted(linear, size, kind) {
            self.need_solo()?;
        }
        Ok(())
    }

    /// Notes an access that the units want to hear of, by the instruction of `o`.
    #[inline]
    pub(crate) fn note_access(&mut self, o: &Op, address: u64, size: usize, kind: AccessKind) {
        let a = &self.watched.interest;
        if (a.ranges || a.every_access) && self.wanted(address, size, kind) {
            let ip = self.linear(self.ip(o));
            self.watched.accesses.push(Access {
                address,
                size: size as u32,
                kind,
                ip,
            });
        }
    }

    /// An access that the processor makes for itself, as to a descriptor table, a TSS or the stack of a handler. Data breakpoints
    /// meet these like an instruction's own: Xen's advisory 156 ("CPU lockup during exception delivery") and Linux, which
    /// refuses breakpoints in its descriptor tables, TSS and entry stacks, tell it of the parts.
    #[inline]
    pub(crate) fn note_implicit(&mut self, linear: u64, size: usize, kind: AccessKind) -> Done {
        if self.heard_implicit(linear, size, kind)? {
            let ip = self.linear(self.rip);
            self.watched.implicit.push(Access {
                address: self.implicit_address(linear),
                size: size as u32,
                kind,
                ip,
            });
        }
        Ok(())
    }

    /// Whether the units hear of it: then the instruction has a block of its own. Where events are delivered between two
    /// instructions `solo` is set.
    #[inline]
    pub(crate) fn heard_implicit(&mut self, linear: u64, size: usize, kind: AccessKind) -> Done<bool> {
        if !self.watched.interest.ranges || !self.meets_range(linear, size, kind) {
            return Ok(false);
        }
        self.need_solo()?;
        Ok(true)
    }

    #[cold]
    fn meets_range(&self, linear: u64, size: usize, kind: AccessKind) -> bool {
        let (linear, writes) = (self.implicit_address(linear), kind != AccessKind::Read);
        let met = |r: &Range| !r.ports && (if writes { r.writes } else { r.reads }) && overlap(r, linear, size as u64);
        self.watched.ranges.iter().any(met)
    }

    /// Outside IA-32e mode sums wrap at 4 GiB.
    fn implicit_address(&self, linear: u64) -> u64 {
        if self.efer.lma() { linear } else { linear & 0xffff_ffff }
    }

    /// Before an instruction that does not end its block and changes what the units hold: records are handed over, and the
    /// run loop asks them again right after it.
    pub(crate) fn units_change(&mut self) -> Done {
        self.drain_records_first()?;
        self.need_solo()?;
        self.watched.ask = true;
        Ok(())
    }

    fn record_start(&self) -> *mut BranchRecord {
        self.watched.records.as_ptr().cast_mut()
    }

    /// A change that the units may want to hear of; the instruction ends its chain.
    pub(crate) fn change(&mut self, change: Change) {
        if self.watched.tell {
            self.watched.changes.push(change);
        }
    }

    /// A change that units must hear of however little they want: they keep in step with it.
    pub(crate) fn change_always(&mut self, change: Change) {
        if self.watched.generation.is_some() {
            self.watched.changes.push(change);
        }
    }

    /// Notes a far transfer from the instruction of `o`, which stood at `from` with privilege `cpl`.
    pub(crate) fn note_far(&mut self, o: &Op, from: u64, cpl: u8, far: Far, rip: u64) {
        self.watched.far = Some(BranchRecord {
            from,
            to: self.linear(rip),
            step: self.step_after(o),
            flow: Flow::Far(far).code(),
            length: o.len,
            from_cpl: cpl,
            to_cpl: self.cpl,
            loads_cr3: core::mem::take(&mut self.watched.loads_cr3),
            run: [0; 3],
        });
    }

    /// The buffer as it is now, empty, with the room that the interest leaves.
    pub(crate) fn reset_records(&mut self) {
        let room = (self.watched.interest.branch_room as usize).clamp(1, ROOM);
        self.record_at = self.watched.records.as_mut_ptr();
        self.run = 1;
        // The first has a record of its own.
        self.run_limit = 2;
        self.run_next = 1 << self.watched.interest.run.clamp(1, BranchRecord::RUN_BITS);
        // SAFETY: At most the buffer's length.
        self.record_end = unsafe { self.record_at.add(room) };
    }

    /// Takes on what the units want.
    fn set_interest(&mut self, interest: Interest, watch: &dyn Watch) {
        let w = &mut self.watched;
        w.ask = false;
        let moved = (interest.ranges || w.interest.ranges) && w.ranges != watch.ranges();
        let kinds = |a: &Interest| (a.ranges, a.every_access);
        let rights = moved || kinds(&interest) != kinds(&w.interest);
        let code = interest.code != w.interest.code;
        w.interest = interest;
        if code {
            self.tlb.hold_fetches_back();
        }
        if rights {
            self.tlb.flush_all();
            self.select_tlb();
        }
        let w = &mut self.watched;
        let wanted = interest.branches.max(Recorded::Taken.when(interest.step_on_branches));
        w.tell = wanted.any() || interest.transfers;
        w.tell_interrupts = w.tell && interest.interrupts;
        let runs = interest.run != 0 && !interest.step_on_branches;
        w.mode = w.mode & !mode::WATCHING
            | match wanted {
                Recorded::None => 0,
                _ if runs => mode::RECORD | mode::RUNS,
                Recorded::All => mode::RECORD,
                Recorded::Taken => mode::RECORD | mode::TAKEN,
            };
        let generation = watch.generation();
        let anew = w.generation != Some(generation);
        if anew {
            w.generation = Some(generation);
            w.boundaries = watch.boundaries().into();
            w.ranges.clear();
            w.ranges.extend_from_slice(watch.ranges());
            self.bind_boundaries();
        }
        self.reset_records();
        self.watched.tick_at = self.steps_now().saturating_add(interest.instructions);
    }

    /// Has blocks decoded for the present boundaries.
    pub(crate) fn bind_boundaries(&mut self) {
        let set = self.watched.boundaries.clone();
        let number = if set.is_empty() {
            0
        } else {
            self.shared().boundary_number(&set)
        };
        let w = &mut self.watched;
        w.mode = w.mode & mode::WATCHING | number << mode::BOUNDARY_SHIFT;
        self.mode = u32::MAX;
    }

    /// Whether [`Watch::before`] is wanted at a linear address.
    pub(crate) fn is_boundary(&self, linear: u64) -> bool {
        self.watched.boundaries.binary_search(&linear).is_ok()
    }

    /// The branch that just retired, if any did in a chain of one instruction, was taken.
    pub(crate) fn branched(&self) -> bool {
        if self.watched.far.is_some() || self.watched.event.is_some() {
            return true;
        }
        // SAFETY: Records from the buffer's start to `record_at` have been written.
        self.record_at != self.record_start() && unsafe { (*self.record_at.sub(1)).flow } != 0
    }

    /// Records must be handed over before another chain is entered.
    pub(crate) fn records_full(&self) -> bool {
        self.record_at == self.record_end
    }

    /// Nobody watches.
    fn unwatched(&mut self) {
        let w = &mut self.watched;
        if w.generation.is_some() || w.mode != 0 {
            *w = Watched::new();
            self.tlb.flush_all();
        }
        self.watched.ask = false;
        self.reset_records();
    }

    /// Asks the units what they want to hear. Only between chains, with nothing waiting to be handed over.
    pub(crate) fn ask(&mut self) {
        let before = self.watched.mode;
        let tsc = self.tsc_now();
        let bus = self.bus_pointer();
        // SAFETY: The bus is lent for the run and nobody else uses it while the units have it: `View` never does.
        match unsafe { &mut *bus }.watch() {
            None => self.unwatched(),
            Some(watch) => {
                let interest = watch.interest(&mut View::between(self, tsc));
                self.set_interest(interest, watch);
            }
        }
        if self.watched.mode != before {
            self.mode = u32::MAX;
        }
    }

    /// The time-stamp counter between two instructions.
    pub(crate) fn tsc_now(&mut self) -> u64 {
        let now = self.clock.wrapping_add((self.granted - self.budget) as u64);
        self.bus().tsc(now)
    }

    /// An access that the bus answers with the processor at hand, by the instruction of `o`.
    pub(crate) fn with_view<T>(&mut self, o: &Op, f: impl FnOnce(&mut dyn Bus, &mut View) -> T) -> T {
        let now = self.now(o);
        let tsc = self.bus().tsc(now);
        let bus = self.bus_pointer();
        // SAFETY: The bus is lent for the run; `View` does not reach for it.
        f(unsafe { &mut *bus }, &mut View::within(self, o, tsc))
    }

    /// Reads a register of a unit between two instructions.
    pub(crate) fn read_unit(&mut self, msr: u32) -> Result<u64, MsrFault> {
        let tsc = self.tsc_now();
        let bus = self.bus_pointer();
        // SAFETY: As in `with_view`.
        unsafe { &mut *bus }.read_msr(msr, &mut View::between(self, tsc))
    }

    /// Writes a register that is not the core's between two instructions.
    pub(crate) fn write_unit(&mut self, msr: u32, value: u64) -> Result<(), MsrFault> {
        let tsc = self.tsc_now();
        let bus = self.bus_pointer();
        // SAFETY: As in `with_view`.
        unsafe { &mut *bus }.write_msr(msr, value, &mut View::between(self, tsc))
    }

    /// Calls the units and asks again what they want.
    pub(crate) fn say(&mut self, word: impl FnOnce(&mut dyn Watch, &mut View) -> Effects) -> Effects {
        self.watched.ask = true;
        let (effects, _) = self.call(word);
        effects
    }

    /// The same for branches, after which not everybody has to be asked.
    pub(crate) fn say_branches(&mut self, records: &[BranchRecord]) -> Effects {
        let (effects, steady) = self.call(|watch, cpu| watch.branches(records, cpu));
        self.watched.ask |= !steady || effects != Effects::NONE;
        effects
    }

    /// Calls the units, and says whether what they want moves with branches.
    fn call(&mut self, word: impl FnOnce(&mut dyn Watch, &mut View) -> Effects) -> (Effects, bool) {
        let tsc = self.tsc_now();
        let bus = self.bus_pointer();
        // SAFETY: As in `ask`.
        let Some(watch) = (unsafe { &mut *bus }).watch() else {
            return (Effects::NONE, false);
        };
        let effects = word(watch, &mut View::between(self, tsc));
        let steady = watch.is_steady();
        if effects.pmi {
            self.bus().pmi();
            self.bus_used = true;
        }
        self.watched.stop |= effects.stop;
        (effects, steady)
    }

    /// Hands over the branch records that wait.
    pub(crate) fn hand_over(&mut self) -> Effects {
        let start = self.record_start();
        self.end_run();
        // SAFETY: Both point into the buffer.
        let n = unsafe { self.record_at.offset_from(start) } as usize;
        if n == 0 {
            return Effects::NONE;
        }
        self.record_at = start;
        let records = core::mem::take(&mut self.watched.records);
        let effects = self.say_branches(&records[..n]);
        self.watched.records = records;
        self.reset_records();
        effects
    }
}

/// A run as a record has it.
fn run_bytes(run: u64) -> [u8; 3] {
    let [low, middle, high, ..] = run.to_le_bytes();
    [low, middle, high]
}

/// The processor as the units see it. It never reaches for the bus: the units are part of it.
pub(crate) struct View<'a> {
    cpu: &'a mut Cpu,
    rip: u64,
    steps: u64,
    tsc: u64,
}

impl View<'_> {
    /// Between two instructions.
    pub fn between(cpu: &mut Cpu, tsc: u64) -> View<'_> {
        let (rip, steps) = (cpu.rip, cpu.steps_now());
        View { cpu, rip, steps, tsc }
    }

    /// While the instruction of `o` runs.
    pub fn within<'a>(cpu: &'a mut Cpu, o: &Op, tsc: u64) -> View<'a> {
        let (rip, steps) = (cpu.next_ip(o), cpu.steps_after(o).wrapping_sub(1));
        View { cpu, rip, steps, tsc }
    }

    /// The linear address of a page with the rights of the supervisor, as the debug-store area is reached; `commit` sets
    /// accessed and dirty bits.
    fn page(&mut self, la: u64, access: mmu::Access, commit: bool) -> Result<u64, PageFault> {
        // An implicit supervisor access ignores EFLAGS.AC.
        let smap = self.cpu.cr4.smap();
        self.translate(la, access, commit, smap)
    }

    fn translate(&mut self, la: u64, access: mmu::Access, commit: bool, smap: bool) -> Result<u64, PageFault> {
        let cpu = &mut *self.cpu;
        let long = cpu.efer.lma();
        let la = if long { la } else { la & 0xffff_ffff };
        let fault = |code| PageFault {
            address: la,
            code: PageFaultCode::from_bits(code),
        };
        if long && !cpu.canonical(la) {
            return Err(fault(if access == mmu::Access::Write {
                mmu::code::WRITE
            } else {
                0
            }));
        }
        let mut paging = cpu.paging(false);
        paging.smap = smap;
        let walk = if commit { mmu::walk } else { mmu::probe };
        match walk(&mut cpu.shared().ram, &paging, la, access) {
            Ok(page) => Ok(page.gpa | la & 0xfff),
            Err(mmu::NoPage::Fault(code)) => Err(fault(code)),
            // The units' own accesses cause no VM exits: they find no page.
            Err(mmu::NoPage::Nested(_)) => Err(fault(0)),
        }
    }

    /// Does `f(processor, physical address, span of the bytes)` for each page of a linear span.
    fn pages<E>(
        &mut self,
        address: u64,
        len: u64,
        mut f: impl FnMut(&mut Self, u64, core::ops::Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = 0;
        while at < len {
            let here = address.wrapping_add(at);
            let part = (0x1000 - (here & 0xfff)).min(len - at);
            f(self, here, at as usize..(at + part) as usize)?;
            at += part;
        }
        Ok(())
    }
}

impl TraceMem for View<'_> {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        self.pages(la, bytes.len() as u64, |view, here, span| {
            let gpa = view.page(here, mmu::Access::Read, true)?;
            let part = &mut bytes[span];
            if view.cpu.shared().ram.read(gpa, part).is_err() {
                part.fill(0xff);
            }
            Ok(())
        })
    }

    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault> {
        self.pages(la, len, |view, here, _| {
            view.page(here, mmu::Access::Write, false).map(|_| ())
        })
    }

    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault> {
        self.probe_linear(la, bytes.len() as u64)?;
        self.pages(la, bytes.len() as u64, |view, here, span| {
            let gpa = view.page(here, mmu::Access::Write, true)?;
            // Where there is no RAM the bytes are lost.
            let _ = view.cpu.shared().write_ram(gpa, &bytes[span]);
            Ok(())
        })
    }

    fn read_phys(&mut self, pa: u64, bytes: &mut [u8]) -> Result<(), BadPhys> {
        let bad = |address| BadPhys { address };
        if !self.cpu.trace_translates() {
            return self.cpu.shared().ram.read(pa, bytes).map_err(bad);
        }
        self.pages(pa, bytes.len() as u64, |view, here, span| {
            let pa = view.cpu.trace_address(here, false).ok_or(bad(here))?;
            view.cpu.shared().ram.read(pa, &mut bytes[span]).map_err(bad)
        })
    }

    fn write_phys(&mut self, pa: u64, bytes: &[u8]) -> Result<(), BadPhys> {
        let bad = |address| BadPhys { address };
        if !self.cpu.trace_translates() {
            return self.cpu.shared().write_ram(pa, bytes).map_err(bad);
        }
        // All of it, or nothing.
        self.pages(pa, bytes.len() as u64, |view, here, _| {
            view.cpu.trace_address(here, true).map(drop).ok_or(bad(here))
        })?;
        self.pages(pa, bytes.len() as u64, |view, here, span| {
            let pa = view.cpu.trace_address(here, true).ok_or(bad(here))?;
            view.cpu.shared().write_ram(pa, &bytes[span]).map_err(bad)
        })
    }

    fn unmapped(&mut self) -> bool {
        self.cpu.guest().is_some_and(|guest| guest.trace_fault.is_some())
    }
}

impl Processor for View<'_> {
    fn gpr(&self, number: u8) -> u64 {
        self.cpu.get::<8>((number & 15) * 8)
    }

    fn xmm(&self, number: u8) -> u128 {
        self.cpu.fpu.xmm[(number & 15) as usize]
    }

    fn rip(&self) -> u64 {
        self.rip
    }

    fn rflags(&self) -> u64 {
        self.cpu.rflags()
    }

    fn context(&self) -> Context {
        let c = &*self.cpu;
        let cs = c.seg[CS];
        let long_mode = c.efer.lma();
        let wide = long_mode && cs.long();
        Context {
            cpl: c.cpl,
            code: match (wide, cs.big()) {
                (true, _) => CodeSize::Bits64,
                (false, true) => CodeSize::Bits32,
                (false, false) => CodeSize::Bits16,
            },
            long_mode,
            paging: c.cr0.pg(),
            cr3: c.cr3,
            interrupts: c.rflags & rf::IF != 0,
            cs_base: if wide { 0 } else { cs.base },
            non_root: c.non_root(),
            vmcs: c.vmx.as_ref().and_then(|vmx| vmx.current),
            concealed: c.concealed(),
        }
    }

    fn debug_register(&self, number: u8) -> u64 {
        self.cpu.dr[(number & 7) as usize]
    }

    fn cr4(&self) -> u64 {
        self.cpu.cr4.into_bits()
    }

    fn physical(&mut self, linear: u64) -> Option<u64> {
        self.translate(linear, mmu::Access::Read, false, false).ok()
    }
    fn retired(&self) -> u64 {
        self.steps - self.cpu.iterations
    }

    fn step(&self) -> u64 {
        self.cpu.clock.wrapping_add(self.steps.wrapping_sub(self.cpu.steps))
    }

    fn tsc(&mut self) -> u64 {
        self.tsc
    }

    fn recorded(&self) -> Recorded {
        match self.cpu.watched.mode & mode::TAKEN {
            0 => Recorded::All,
            _ => Recorded::Taken,
        }
    }
}

#[cfg(test)]
#[path = "watch_test.rs"]
mod tests;
