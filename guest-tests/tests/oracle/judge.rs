//! Watches a machine beside a set of units and judges what they tell by what the engine's log of branches tells.
//!
//! The log is branches, interrupts and exceptions; what lies between them is read from the bytes of the code, and so is what
//! kind of branch each is and where a direct one leads. `tests/stream.rs` shows that this is the stream of retired instructions.
//!
//! Branch trace store is compared record by record as it is written, the last-branch stack and the counters now and then. The
//! processor trace is decoded as it comes: before code changes, and when there is enough of it, the unit sends what it keeps
//! back and a PSB, so that each chunk is decoded with the code as it was when it was executed, by libipt and by our decoder.

use std::collections::VecDeque;
use std::ops;
use std::sync::{Arc, Mutex};

use guest_tests::observer::{Observer, Unit};
use guest_tests::retired::Stream;
use pt_flow::{Chunks, Decoder, Event, EventKind, Timing, Visitor};
use pt_oracle::libipt;
use x86::model::CpuModel;
use x86::msr::{IA32_FIXED_CTR0, IA32_PMC0};
use x86::watch::{
    Access, BranchRecord, Change, Code as CodeWord, Context, Effects, EventRecord, Far, Flow, Interest, Processor,
    Range, Recorded, Watch,
};

use crate::code::{Code, Kind, Line, Shared, Until};

/// Instructions in a window, which has one hash.
pub const WINDOW: u64 = 1_000_000;

/// Bytes of packets that are decoded at a time.
const CHUNK: usize = 128 << 10;

/// The longest stack of last branches.
const DEPTH: usize = 32;

/// Once in so many words the stack and the counters are compared.
const SELDOM: u32 = 64;

/// When all has been heard.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// This port is written.
    Port(u16),
    /// HLT.
    Halt,
}

/// A stream of instructions, and those of them that are wanted one by one.
#[derive(Default)]
struct Reported {
    stream: Stream<WINDOW>,
    wanted: ops::Range<u64>,
    ips: Vec<u64>,
    /// Instructions at other addresses are left out.
    only: Option<ops::RangeInclusive<u64>>,
}

impl Reported {
    fn push(&mut self, ip: u64) {
        if self.only.as_ref().is_some_and(|only| !only.contains(&ip)) {
            return;
        }
        if self.wanted.contains(&self.stream.count) {
            self.ips.push(ip);
        }
        self.stream.push(ip);
    }

    /// Straight-line code, up to so many instructions in all.
    fn line(&mut self, code: &mut Code, at: (u64, u32), ip: u64, until: Until, limit: u64) -> Option<Line> {
        let line = code.line(at.0, at.1, ip, until)?;
        let end = self.stream.count + line.sum.count;
        let wanted = self.stream.count < self.wanted.end && end > self.wanted.start;
        if wanted || self.only.is_some() || end > limit || !self.stream.add(&line.sum) {
            code.each(at.0, at.1, ip, until, |ip| {
                if self.stream.count < limit {
                    self.push(ip);
                }
            })?;
        }
        Some(line)
    }
}

/// What was found.
#[derive(Debug, Default)]
pub struct Verdict {
    /// What is not as it has to be, if anything is.
    pub wrong: Option<String>,
    /// The first instruction of the window in which streams differ.
    pub differ: Option<u64>,
    /// The end was heard.
    pub ended: bool,
    /// The packets, where they are kept.
    pub kept: Vec<u8>,
    /// Instructions, branches among them, and those taken with interrupts and exceptions.
    pub instructions: u64,
    pub branches: u64,
    pub taken: u64,
    /// Bytes of packets, chunks of them, and changes of code.
    pub packets: u64,
    pub chunks: u64,
    pub changes: u64,
    /// How often the stack and the counters were compared.
    pub stacks: u64,
    pub counts: u64,
    /// The hashes at the end: the log's, our decoder's and libipt's.
    pub hashes: [u64; 3],
    /// The instructions that were wanted: the log's, our decoder's and libipt's.
    pub ips: [Vec<u64>; 3],
}

/// Watches and judges.
pub struct Judge {
    observer: Observer,
    on: Vec<Unit>,
    end: End,
    ranges: Vec<Range>,
    /// libipt is asked, too.
    asks_libipt: bool,
    /// The verdict has the packets.
    keeps: bool,
    found: Verdict,
    verdict: Arc<Mutex<Verdict>>,
    code: Code,
    decoder: Decoder<Shared>,
    log: Reported,
    ours: Reported,
    libipt: Reported,
    /// Where the log is, in which mode.
    ip: Option<u64>,
    context: Context,
    /// Software interrupts, of which a decoder sees the event alone.
    software: u64,
    /// Taken branches of this word, and the last ones.
    fresh: Vec<[u64; 2]>,
    tail: VecDeque<[u64; 2]>,
    /// Packets from this offset of the trace on, and the CR3 there.
    packets: Vec<u8>,
    offset: u64,
    cr3: u64,
    /// The first step, steps asleep, and since when.
    start: u64,
    slept: u64,
    asleep: Option<u64>,
    words: u32,
}

impl Judge {
    /// With these units on, from the next instruction to the end. The instructions `wanted`, by number, are kept.
    pub fn new(
        model: &'static CpuModel,
        on: &[Unit],
        end: End,
        wanted: ops::Range<u64>,
    ) -> (Judge, Arc<Mutex<Verdict>>) {
        let verdict = Arc::<Mutex<Verdict>>::default();
        let code = Code::new();
        let reported = || Reported {
            wanted: wanted.clone(),
            ..Reported::default()
        };
        let judge = Judge {
            observer: Observer::new(model, on),
            on: on.to_vec(),
            end,
            ranges: match end {
                End::Port(port) => vec![Range {
                    first: port.into(),
                    last: port.into(),
                    ports: true,
                    reads: false,
                    writes: true,
                }],
                End::Halt => Vec::new(),
            },
            asks_libipt: true,
            keeps: false,
            found: Verdict::default(),
            verdict: verdict.clone(),
            decoder: Decoder::new(Shared(code.pages.clone()), Timing::default()),
            code,
            log: reported(),
            ours: reported(),
            libipt: reported(),
            ip: None,
            context: Context::default(),
            software: 0,
            fresh: Vec::new(),
            tail: VecDeque::new(),
            packets: Vec::new(),
            offset: 0,
            cr3: 0,
            start: 0,
            slept: 0,
            asleep: None,
            words: 0,
        };
        (judge, verdict)
    }

    /// Has the trace unit trace these addresses alone. Where straight-line code leaves them libipt does not know where that was,
    /// and is not to be asked.
    pub fn filter(&mut self, range: ops::RangeInclusive<u64>, asks_libipt: bool) {
        self.observer.filter(*range.start(), *range.end());
        self.log.only = Some(range);
        self.asks_libipt = asks_libipt;
    }

    /// Keeps the packets for the verdict.
    pub fn keep_packets(&mut self) {
        self.keeps = true;
    }

    fn has(&self, unit: Unit) -> bool {
        self.on.contains(&unit)
    }

    fn wrong(&mut self, what: String) {
        if self.found.wrong.is_none() {
            let count = self.log.stream.count;
            self.found.wrong = Some(format!("at instruction {count}: {what}"));
            self.publish();
        }
    }

    fn publish(&mut self) {
        let streams = [&self.log, &self.ours, &self.libipt];
        self.found.hashes = streams.map(|reported| reported.stream.hash());
        self.found.instructions = self.log.stream.count;
        self.found.ips =
            [&mut self.log, &mut self.ours, &mut self.libipt].map(|reported| std::mem::take(&mut reported.ips));
        *self.verdict.lock().unwrap() = std::mem::take(&mut self.found);
        // Nothing more is heard.
        self.found.wrong = Some("it is over".into());
    }

    fn over(&self) -> bool {
        self.found.wrong.is_some()
    }

    /// The log goes straight on to here.
    fn straight(&mut self, to: u64) {
        let from = self.ip.replace(to).unwrap_or(to);
        if from == to {
            return;
        }
        let at = (self.context.cr3, self.context.code.bits());
        match self.log.line(&mut self.code, at, from, Until::Before(to), u64::MAX) {
            Some(line) if line.kind == Kind::Straight => {}
            line => self.wrong(format!("from {from:x} straight to {to:x}: {line:x?}")),
        }
    }

    /// The log goes straight on to the processor's next instruction.
    fn rest(&mut self, cpu: &dyn Processor) {
        self.straight(next_ip(cpu));
    }

    /// The log goes straight on to a branch, and then along it.
    fn transfer(&mut self, record: &BranchRecord) {
        let flow = Flow::from_code(record.flow).expect("a code that exists");
        if flow.taken() {
            self.fresh.push([record.from, record.to]);
        }
        let software = flow == Flow::Far(Far::SoftwareInterrupt);
        if record.length == 0 || software {
            self.straight(record.from);
        }
        if record.length != 0 {
            self.found.branches += 1;
            let at = (self.context.cr3, self.context.code.bits());
            let until = Until::With(record.from);
            let line = if software {
                self.software += 1;
                self.code.line(at.0, at.1, record.from, until)
            } else {
                let ip = self.ip.unwrap_or(record.from);
                self.log.line(&mut self.code, at, ip, until, u64::MAX)
            };
            let fits = line.is_some_and(|line| {
                let kind = match flow {
                    Flow::Cond { .. } => Kind::Conditional,
                    Flow::Jump => Kind::Jump,
                    Flow::JumpInd => Kind::JumpIndirect,
                    Flow::Call => Kind::Call,
                    Flow::CallInd => Kind::CallIndirect,
                    Flow::Ret => Kind::Return,
                    Flow::Far(_) => Kind::Far,
                };
                let leads = match flow {
                    Flow::Cond { taken: false } => record.to == record.from + u64::from(record.length),
                    // In 16-bit code the target is an offset in the segment.
                    Flow::Cond { .. } | Flow::Jump | Flow::Call if at.1 != 16 => record.to == line.target,
                    _ => true,
                };
                kind == line.kind && leads && line.last == record.length
            });
            if !fits {
                self.wrong(format!("{record:x?} is {line:x?}"));
            }
        }
        self.ip = Some(record.to);
    }

    /// Branches, an event or a change: the log hears of it, then the units, which are compared.
    fn word(
        &mut self,
        records: &[BranchRecord],
        cpu: &mut dyn Processor,
        tell: impl FnOnce(&mut Observer, &mut dyn Processor) -> Effects,
    ) {
        if self.over() {
            return;
        }
        for record in records {
            self.transfer(record);
        }
        let _ = tell(&mut self.observer, cpu);
        self.context = cpu.context();
        self.take_branches();
        self.words += 1;
        if self.has(Unit::Pt) {
            self.observer.take_packets(cpu, &mut self.packets);
            if self.packets.len() > CHUNK {
                self.cut(cpu);
            }
        }
        if self.words.is_multiple_of(SELDOM) {
            self.checkpoint(cpu);
        }
    }

    /// What branch trace store has stored of this word.
    fn take_branches(&mut self) {
        if self.has(Unit::Bts) {
            let mut stored = self.fresh.iter();
            let mut wrong = None;
            self.observer.take_branches(|pair| {
                let logged = stored.next();
                if logged != Some(&pair) {
                    wrong.get_or_insert(format!("stored {pair:x?}, logged {logged:x?}"));
                }
            });
            if let Some(logged) = stored.next() {
                wrong.get_or_insert(format!("not stored: {logged:x?}"));
            }
            if let Some(wrong) = wrong {
                self.wrong(wrong);
            }
        }
        self.found.taken += self.fresh.len() as u64;
        let new = self.fresh.len().saturating_sub(DEPTH);
        for pair in self.fresh.drain(..).skip(new) {
            if self.tail.len() == DEPTH {
                self.tail.pop_front();
            }
            self.tail.push_back(pair);
        }
    }

    /// Compares the stack and the counters.
    fn checkpoint(&mut self, cpu: &mut dyn Processor) {
        self.rest(cpu);
        if self.has(Unit::Lbr) {
            self.compare_stack();
        }
        if self.has(Unit::Counters) || self.has(Unit::BranchCounter) {
            self.compare_counts(cpu);
        }
    }

    fn compare_stack(&mut self) {
        let units = &self.observer.units;
        let entries: Vec<_> = match (&units.lbr, &units.arch_lbr) {
            (Some(unit), _) => unit.newest().collect(),
            (_, Some(unit)) => unit.newest().collect(),
            _ => Vec::new(),
        };
        // Flags stand in the highest bits of some.
        let mut same = entries.iter().zip(self.tail.iter().rev());
        let same = same.all(|(entry, pair)| (entry.from ^ pair[0]) << 3 == 0 && entry.to == pair[1]);
        if entries.is_empty() || !same {
            self.wrong(format!("the stack {entries:x?} is not {:x?}", self.tail));
        }
        self.found.stacks += 1;
    }

    fn compare_counts(&mut self, cpu: &mut dyn Processor) {
        let awake = cpu.step() - self.start - self.slept - self.asleep.map_or(0, |since| cpu.step() - since);
        let mut read = |msr| self.observer.read_msr(msr, cpu).unwrap_or(u64::MAX);
        let mut counters = vec![read(IA32_FIXED_CTR0), read(IA32_FIXED_CTR0 + 1)];
        let mut counted = vec![self.log.stream.count + self.software, awake];
        if self.has(Unit::BranchCounter) {
            counters.push(self.observer.read_msr(IA32_PMC0, cpu).unwrap_or(u64::MAX));
            counted.push(self.found.branches);
        }
        if counters != counted {
            self.wrong(format!("counters {counters:?}, counted {counted:?}"));
        }
        self.found.counts += 1;
    }

    /// Has what has been traced decoded, up to the processor's next instruction.
    fn cut(&mut self, cpu: &mut dyn Processor) {
        self.rest(cpu);
        let mut packets = std::mem::take(&mut self.packets);
        let mut len = 0;
        self.observer.synchronize(cpu, |observer, cpu| {
            observer.take_packets(cpu, &mut packets);
            len = packets.len();
        });
        self.observer.take_packets(cpu, &mut packets);
        if len > 0 && !self.over() {
            self.decode(&packets, len);
            self.compare_streams();
            self.offset += len as u64;
            self.cr3 = cpu.context().cr3;
            self.found.packets += len as u64;
            self.found.chunks += 1;
            if self.keeps {
                self.found.kept.extend_from_slice(&packets[..len]);
            }
        }
        packets.drain(..len);
        self.packets = packets;
    }

    /// Decodes so many bytes; behind them there is a PSB.
    fn decode(&mut self, packets: &[u8], len: usize) {
        let chunk = Chunks::new(packets, len, 1 << 30).starting_at(self.offset).next();
        let chunk = chunk.expect("there is a PSB").expect("memory can be read");
        let limit = self.log.stream.count;
        let mut ours = Ours {
            reported: &mut self.ours,
            code: &mut self.code,
            cr3: self.cr3,
            wrong: None,
        };
        self.decoder.decode(&chunk, &mut ours);
        let mut wrong = ours.wrong;
        if chunk.len() != len || chunk.skipped() != 0 {
            wrong = Some(format!("a chunk of {}, not {len} bytes", chunk.len()));
        }
        if let Some(wrong) = wrong {
            return self.wrong(format!("our decoder: {wrong}"));
        }
        if !self.asks_libipt {
            return;
        }
        let mut cr3 = self.cr3;
        // The image is lent to the decoder, and the code to what it calls.
        let image = std::mem::replace(&mut self.code.image, libipt::Image::new([]));
        let mut bad = None;
        let decoded = libipt::straight(packets, &image, |part| match part {
            libipt::Part::Block(block) => {
                let at = (cr3, block.bits);
                if self.libipt.stream.count < limit {
                    let until = Until::With(block.last);
                    let line = self.libipt.line(&mut self.code, at, block.ip, until, limit);
                    if line.is_none_or(|line| line.sum.count != u64::from(block.count)) {
                        bad.get_or_insert(format!("{block:x?} is {line:x?}"));
                    }
                }
            }
            libipt::Part::Event(libipt::Event::Paging { cr3: new }) => cr3 = new,
            libipt::Part::Event(libipt::Event::Other(6)) => {
                bad.get_or_insert("an overflow".into());
            }
            libipt::Part::Event(_) => {}
        });
        self.code.image = image;
        if let Some(bad) = bad {
            return self.wrong(format!("libipt: {bad}"));
        }
        // Behind the last packet it walks on, where code may not have been known yet.
        if let Err(error) = decoded
            && self.libipt.stream.count < limit
        {
            self.wrong(format!("{error} in the chunk at {:#x}", self.offset));
        }
    }

    fn compare_streams(&mut self) {
        let others = [("our decoder", &self.ours), ("libipt", &self.libipt)];
        let asked = if self.asks_libipt { &others[..] } else { &others[..1] };
        let differ = asked.iter().find_map(|(name, reported)| {
            let why = self.log.stream.compare(&reported.stream).err()?;
            let same = self.log.stream.windows.iter().zip(&reported.stream.windows);
            Some((
                format!("{name}: {why}"),
                same.take_while(|(a, b)| a == b).count() as u64,
            ))
        });
        if let Some((why, window)) = differ {
            self.found.differ = Some(window * WINDOW);
            self.wrong(why);
        }
    }

    fn conclude(&mut self, cpu: &mut dyn Processor) {
        if self.over() {
            return;
        }
        self.rest(cpu);
        if self.has(Unit::Pt) {
            self.observer.take_packets(cpu, &mut self.packets);
            self.cut(cpu);
        }
        self.checkpoint(cpu);
        if !self.over() {
            self.found.ended = true;
            self.publish();
        }
    }
}

/// The linear address of the next instruction.
fn next_ip(cpu: &dyn Processor) -> u64 {
    let context = cpu.context();
    let ip = cpu.rip().wrapping_add(context.cs_base);
    if context.code.bits() == 64 {
        ip
    } else {
        ip & 0xFFFF_FFFF
    }
}

/// What our decoder says.
struct Ours<'a> {
    reported: &'a mut Reported,
    code: &'a mut Code,
    cr3: u64,
    wrong: Option<String>,
}

impl Visitor for Ours<'_> {
    fn block(&mut self, block: &pt_flow::Block) {
        let at = (self.cr3, block.mode.bits());
        let until = Until::Before(block.ip + u64::from(block.len));
        let line = self.reported.line(self.code, at, block.ip, until, u64::MAX);
        if line.is_none_or(|line| line.sum.count != u64::from(block.count)) {
            self.wrong.get_or_insert(format!("{block:x?} is {line:x?}"));
        }
    }

    fn event(&mut self, event: &Event) {
        match event.kind {
            EventKind::Paging { cr3, .. } => self.cr3 = cr3,
            EventKind::Gap(_) | EventKind::Overflow => {
                self.wrong.get_or_insert(format!("{event:x?}"));
            }
            _ => {}
        }
    }
}

impl Watch for Judge {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        if self.over() {
            return Interest::NOTHING;
        }
        let interest = self.observer.interest(cpu);
        if self.ip.is_none() {
            self.context = cpu.context();
            self.ip = Some(next_ip(cpu));
            self.cr3 = self.context.cr3;
            self.start = cpu.step();
        }
        Interest {
            branches: Recorded::All,
            code: 1,
            ranges: !self.ranges.is_empty(),
            ..interest
        }
    }
    fn boundaries(&self) -> &[u64] {
        self.observer.boundaries()
    }
    fn ranges(&self) -> &[Range] {
        &self.ranges
    }
    fn generation(&self) -> u64 {
        self.observer.generation() + 1
    }
    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        self.word(&[], cpu, |observer, cpu| observer.before(address, cpu));
        Effects::NONE
    }
    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        self.word(records, cpu, |observer, cpu| observer.branches(records, cpu));
        Effects::NONE
    }
    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        self.word(&[event.branch], cpu, |observer, cpu| observer.event(event, cpu));
        Effects::NONE
    }
    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        if self.over() {
            return Effects::NONE;
        }
        match change {
            // Behind it the same address may lead to other bytes.
            Change::Cr3 | Change::Mode => self.rest(cpu),
            Change::Halt | Change::Mwait { .. } => self.asleep = Some(cpu.step()),
            Change::Wake { .. } => self.slept += self.asleep.take().map_or(0, |since| cpu.step() - since),
            Change::TransactionAbort { from, .. } => {
                self.straight(from);
                let to = next_ip(cpu);
                self.fresh.push([from, to]);
                self.ip = Some(to);
            }
            _ => {}
        }
        self.word(&[], cpu, |observer, cpu| observer.state(change, cpu));
        if change == Change::Halt && matches!(self.end, End::Halt) {
            self.conclude(cpu);
        }
        Effects::NONE
    }
    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        if matches!(self.end, End::Port(port) if u64::from(port) == access.address) {
            self.conclude(cpu);
        }
        Effects::NONE
    }
    fn knows(&mut self, code: &CodeWord, cpu: &mut dyn Processor) -> bool {
        self.over() || self.code.knows(code, cpu)
    }
    fn code(&mut self, code: &CodeWord, cpu: &mut dyn Processor) -> bool {
        if self.over() {
            return false;
        }
        let reported = self.code.changes(code, cpu);
        if !reported.changed.is_empty() {
            self.found.changes += 1;
            self.rest(cpu);
            if self.has(Unit::Pt) {
                self.cut(cpu);
            }
        }
        let moved = reported.moved;
        self.code.take(reported);
        moved
    }
    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        self.word(&[], cpu, |observer, cpu| observer.tick(cpu));
        Effects::NONE
    }
}
