//! The stream of retired instruction pointers, as a hash for each window of them.
//!
//! One observer hears of branches and events alone; what lies between them it reads from guest memory. That this is what
//! retires, instruction for instruction, is `tests/stream.rs`'s to show.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};
use x86::watch::{BranchRecord, Context, Effects, EventRecord, Far, Flow, Interest, Processor, Recorded, Watch};

/// Hears of every instruction, and tells those that have retired.
pub struct Each<F> {
    tell: F,
    /// Number and address of the instruction that is about to run; it may fault, or be an iteration of a REP.
    next: Option<(u64, u64)>,
}

impl<F: FnMut(u64)> Each<F> {
    /// Tells the address of each. `next`: how many have retired, and the address of the one that comes, if that is known.
    pub fn new(next: Option<(u64, u64)>, tell: F) -> Self {
        Each { tell, next }
    }
}

impl<F: FnMut(u64)> Watch for Each<F> {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            every_instruction: true,
            ..Interest::NOTHING
        }
    }

    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        let now = cpu.retired();
        if let Some((number, ip)) = self.next
            && number != now
        {
            (self.tell)(ip);
        }
        self.next = Some((now, address));
        Effects::NONE
    }
}

/// Instructions in a window, which has one hash, unless said otherwise.
pub const WINDOW_LEN: u64 = 100_000;

/// What the hash of a stream is multiplied by for each instruction.
const FACTOR: u64 = 0xD6E8_FEB8_6659_FD93;

/// Spreads an address over all bits.
fn spread(ip: u64) -> u64 {
    let product = (ip ^ ip >> 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    product ^ product >> 29
}

/// What some instructions in a row do to the hash of a stream, whatever was before them.
#[derive(Clone, Copy, Debug)]
pub struct Sum {
    /// How many there are.
    pub count: u64,
    factor: u64,
    addend: u64,
}

impl Default for Sum {
    fn default() -> Self {
        Sum {
            count: 0,
            factor: 1,
            addend: 0,
        }
    }
}

impl Sum {
    /// One more.
    pub fn push(&mut self, ip: u64) {
        self.count += 1;
        self.factor = self.factor.wrapping_mul(FACTOR);
        self.addend = self.addend.wrapping_mul(FACTOR).wrapping_add(spread(ip));
    }
}

/// A rolling hash of instruction pointers, kept at the end of each window of so many.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stream<const WINDOW: u64 = WINDOW_LEN> {
    hash: u64,
    /// How many there were.
    pub count: u64,
    /// The hash after each window.
    pub windows: Vec<u64>,
    /// Instructions in these ranges do not count. Set it before the first.
    pub skip: Vec<Range<u64>>,
    /// Instructions of these numbers are kept as they are. Set it before the first.
    pub keep: Range<u64>,
    /// Those.
    pub kept: Vec<u64>,
    /// Hashes after the last instructions, each at the place of its number.
    recent: Vec<u64>,
    /// From this number on they are kept.
    recent_from: u64,
}

/// So many hashes of single instructions are kept.
const RECENT: u64 = 8192;

impl<const WINDOW: u64> Stream<WINDOW> {
    /// The next one.
    pub fn push(&mut self, ip: u64) {
        if self.skip.iter().any(|range| range.contains(&ip)) {
            return;
        }
        if self.recent.is_empty() {
            self.recent = vec![0; RECENT as usize];
        }
        self.recent[(self.count % RECENT) as usize] = self.hash;
        if self.keep.contains(&self.count) {
            self.kept.push(ip);
        }
        self.hash = self.hash.wrapping_mul(FACTOR).wrapping_add(spread(ip));
        self.count += 1;
        if self.count.is_multiple_of(WINDOW) {
            self.windows.push(self.hash);
        }
    }

    /// The next ones at once. False, and nothing done, where a window would end among them, or some may have to be left out: they
    /// are to be pushed one by one.
    pub fn add(&mut self, sum: &Sum) -> bool {
        let fits = self.count % WINDOW + sum.count < WINDOW && self.skip.is_empty() && self.keep.is_empty();
        if fits {
            self.hash = self.hash.wrapping_mul(sum.factor).wrapping_add(sum.addend);
            self.count += sum.count;
            self.recent_from = self.count;
        }
        fits
    }

    /// All so far, in one number.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// All up to this many, if they were among the last.
    pub fn hash_at(&self, count: u64) -> Option<u64> {
        if count == self.count {
            return Some(self.hash);
        }
        let kept = count < self.count && self.count - count <= RECENT && count >= self.recent_from;
        kept.then(|| self.recent[(count % RECENT) as usize])
    }

    /// The numbers of the instructions of the first window that differs from another stream's.
    pub fn differs(&self, other: &Self) -> Option<Range<u64>> {
        let window = self.windows.iter().zip(&other.windows).position(|(a, b)| a != b)? as u64;
        Some(window * WINDOW..(window + 1) * WINDOW)
    }

    /// Says where another stream is a different one.
    pub fn compare(&self, other: &Self) -> Result<(), String> {
        if let Some(differing) = self.differs(other) {
            return Err(format!(
                "they differ in window {} of {} and {}",
                differing.start / WINDOW,
                self.windows.len(),
                other.windows.len()
            ));
        }
        if (self.count, self.hash) != (other.count, other.hash) {
            return Err(format!(
                "they differ behind the last whole window: {} and {} instructions",
                self.count, other.count
            ));
        }
        Ok(())
    }
}

/// Straight-line code that was met: its bytes, and where its instructions begin.
#[derive(Debug)]
struct Line {
    bytes: Vec<u8>,
    starts: Vec<u16>,
}

/// Lengths of the instructions of straight-line code, remembered by address and bytes.
#[derive(Debug, Default)]
pub struct Lines(HashMap<(u64, u32), Line>);

impl Lines {
    /// Gives the address of each instruction of `bytes`, which begin at `ip`, to `f`. False where they are not whole
    /// instructions. Where there is a branch among them, they cannot have run: code that has patched its own beginning, as a
    /// kernel's `memcpy` does, ran with the bytes `before`, which it began with when it was entered.
    pub fn each(&mut self, ip: u64, bits: u32, bytes: &[u8], before: &[u8], mut f: impl FnMut(u64)) -> bool {
        let line = self.0.entry((ip, bits)).or_insert(Line {
            bytes: Vec::new(),
            starts: Vec::new(),
        });
        if line.bytes != bytes {
            let (mut starts, branches) = match starts(ip, bits, bytes) {
                Some(found) => found,
                None => return false,
            };
            if branches {
                let mut entered = bytes.to_vec();
                entered
                    .iter_mut()
                    .zip(before)
                    .for_each(|(byte, before)| *byte = *before);
                starts = match self::starts(ip, bits, &entered) {
                    Some((starts, false)) => starts,
                    _ => return false,
                };
            }
            // With the bytes that come next time.
            (line.bytes, line.starts) = (if branches { Vec::new() } else { bytes.to_vec() }, starts);
        }
        line.starts
            .iter()
            .for_each(|start| f(ip.wrapping_add(u64::from(*start))));
        true
    }
}

/// Where the instructions of `bytes` begin, and whether one before the last is a branch that is always taken; `None` where they
/// are not whole instructions.
fn starts(ip: u64, bits: u32, bytes: &[u8]) -> Option<(Vec<u16>, bool)> {
    let (mut starts, mut branches) = (Vec::new(), false);
    let mut decoder = Decoder::with_ip(bits, bytes, ip, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        starts.push(decoder.position() as u16);
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            return None;
        }
        branches |= decoder.can_decode() && instruction.flow_control() == FlowControl::UnconditionalBranch;
    }
    Some((starts, branches))
}

/// Where loops of STI, HLT and JMP are in an ELF32 file. No packet tells that one was gone through before the interrupt that finds
/// it where it was: neither hardware's packets do.
///
/// # Panics
/// It is no such file.
pub fn idle_loops(image: &Path) -> Vec<Range<u64>> {
    let bytes = fs::read(image).expect("the image");
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]) as usize;
    // Program headers of an ELF32 file: offset and address of each segment, and its length in the file.
    let (table, count) = (word(0x1c), word(0x2c) & 0xffff);
    let segments = (0..count)
        .map(|n| table + n * 32)
        .map(|at| (word(at + 4), word(at + 8), word(at + 16)));
    let loops = |(offset, address, len): (usize, usize, usize)| {
        let code = &bytes[offset..offset + len];
        let found = code
            .windows(4)
            .enumerate()
            .filter(|(_, code)| *code == [0xfb, 0xf4, 0xeb, 0xfc]);
        found
            .map(|(at, _)| (address + at) as u64..(address + at + 4) as u64)
            .collect::<Vec<_>>()
    };
    segments.flat_map(loops).collect()
}

/// What an observer has heard.
#[derive(Debug, Default)]
pub struct Heard<const WINDOW: u64 = WINDOW_LEN> {
    /// The stream.
    pub stream: Stream<WINDOW>,
    /// What cannot be, if anything has been.
    pub wrong: Option<String>,
}

/// Hears of branches, and walks the code between them.
pub struct Retired {
    heard: Arc<Mutex<Heard>>,
    lines: Lines,
    ip: Option<u64>,
    /// The bytes there when it was entered, as many as a kernel patches at once; none where they cannot be read.
    entered: Option<[u8; 8]>,
    context: Context,
}

impl Retired {
    /// An observer, and what it will have heard.
    pub fn new() -> (Retired, Arc<Mutex<Heard>>) {
        let heard = Arc::<Mutex<Heard>>::default();
        let observer = Retired {
            heard: heard.clone(),
            lines: Lines::default(),
            ip: None,
            entered: None,
            context: Context::default(),
        };
        (observer, heard)
    }

    /// Straight on up to the transfer, then along it.
    fn transfer(&mut self, record: &BranchRecord, cpu: &mut dyn Processor) {
        let heard = self.heard.clone();
        let mut heard = heard.lock().expect("nobody panicked with it");
        if heard.wrong.is_some() {
            return;
        }
        let flow = Flow::from_code(record.flow).expect("a flow");
        // A decoder sees of INT n the event alone.
        let retired = record.length != 0 && flow != Flow::Far(Far::SoftwareInterrupt);
        let ip = self.ip.unwrap_or(record.from);
        let len = record.from.wrapping_sub(ip) + if retired { u64::from(record.length) } else { 0 };
        let mut bytes = vec![0; len.min(1 << 16) as usize];
        let there = len <= 1 << 16 && cpu.read_linear(ip, &mut bytes).is_ok();
        let stream = &mut heard.stream;
        let entered = self.entered.as_ref().map_or(&[][..], |entered| entered);
        if !there
            || !self
                .lines
                .each(ip, self.context.code.bits(), &bytes, entered, |ip| stream.push(ip))
        {
            heard.wrong = Some(format!("from {ip:x} to {record:x?}"));
        }
        self.ip = Some(record.to);
        let mut entered = [0; 8];
        self.entered = cpu.read_linear(record.to, &mut entered).is_ok().then_some(entered);
    }

    /// Up to the instruction that is next, at the end of a run.
    fn rest(&mut self, cpu: &mut dyn Processor) {
        let Some(ip) = self.ip else { return };
        let to = cpu.rip().wrapping_add(self.context.cs_base);
        let record = BranchRecord {
            from: to,
            to,
            flow: Flow::Jump.code(),
            ..BranchRecord::default()
        };
        if to.wrapping_sub(ip) <= 1 << 16 {
            self.transfer(&record, cpu);
        }
    }
}

impl Watch for Retired {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        if self.ip.is_none() {
            self.context = cpu.context();
            self.ip = Some(cpu.rip().wrapping_add(self.context.cs_base));
        }
        Interest {
            branches: Recorded::All,
            // The code must still be what ran, also where a guest patches it soon behind.
            branch_room: 1,
            ..Interest::NOTHING
        }
    }
    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        for record in records {
            self.transfer(record, cpu);
        }
        self.context = cpu.context();
        Effects::NONE
    }
    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        self.transfer(&event.branch, cpu);
        self.context = cpu.context();
        Effects::NONE
    }
    fn state(&mut self, change: x86::watch::Change, cpu: &mut dyn Processor) -> Effects {
        use x86::watch::Change;
        match change {
            // Execution goes on somewhere else.
            Change::Init { .. } | Change::StartUp(_) => {
                self.context = cpu.context();
                self.ip = Some(cpu.rip().wrapping_add(self.context.cs_base));
            }
            // Behind it the same address may lead to other bytes.
            Change::Cr3 | Change::Mode => {
                self.rest(cpu);
                self.context = cpu.context();
            }
            _ => {}
        }
        Effects::NONE
    }
}

#[cfg(test)]
#[path = "retired_test.rs"]
mod tests;
