//! The code of the guest as it is executed: pages by address space, from what the engine announces, with bytes from guest memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use guest_tests::retired::Sum;
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction};
use pt_flow::{Change, Context, Image, Position};
use pt_oracle::libipt;
use trace::format::space;
use x86::watch;

const PAGE: usize = 4096;
type Page = [u8; PAGE];
/// Address space, as traces name it, and linear page.
type Key = (u64, u64);

/// Pages of code.
#[derive(Default)]
pub struct Pages {
    bytes: HashMap<Key, Arc<Page>>,
    /// Spaces by the numbers that the decoder knows.
    spaces: Vec<u64>,
    /// Pages that have other contents since the decoder looked last.
    changed: Vec<Key>,
}

impl Pages {
    /// Code at an address; gives how many bytes there are.
    fn read(&self, space: u64, ip: u64, out: &mut [u8]) -> usize {
        let mut filled = 0;
        while filled < out.len() {
            let at = ip.wrapping_add(filled as u64);
            let Some(page) = self.bytes.get(&(space, at >> 12)) else {
                break;
            };
            let rest = &page[(at & 0xFFF) as usize..];
            let len = rest.len().min(out.len() - filled);
            out[filled..filled + len].copy_from_slice(&rest[..len]);
            filled += len;
        }
        filled
    }

    fn number(&mut self, space: u64) -> u32 {
        let found = self.spaces.iter().position(|other| *other == space);
        found.unwrap_or_else(|| {
            self.spaces.push(space);
            self.spaces.len() - 1
        }) as u32
    }
}

/// The pages as our decoder wants them. All chunks that it gets are from after the last change.
pub struct Shared(pub Arc<Mutex<Pages>>);

impl Image for Shared {
    fn space(&mut self, context: &Context, upper: bool) -> u32 {
        let linear = if upper { 1 << 63 } else { 0 };
        let space = space(context.cr3.expect("every PSB is followed by a PIP"), linear);
        self.0.lock().unwrap().number(space)
    }
    fn code(&mut self, number: u32, ip: u64, out: &mut [u8]) -> usize {
        let pages = self.0.lock().unwrap();
        pages.read(pages.spaces[number as usize], ip, out)
    }
    fn next_change(&mut self) -> Option<Position> {
        let pages = self.0.lock().unwrap();
        (!pages.changed.is_empty()).then(Position::default)
    }
    fn advance(&mut self, _: Position, changed: &mut dyn FnMut(Change)) {
        let mut pages = self.0.lock().unwrap();
        for (space, page) in std::mem::take(&mut pages.changed) {
            let space = pages.number(space);
            changed(Change {
                space,
                page: page << 12,
            });
        }
    }
}

/// How straight-line code ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Not with a branch.
    Straight,
    Conditional,
    Jump,
    Call,
    JumpIndirect,
    CallIndirect,
    Return,
    /// Far transfers, software interrupts, and what else is no near branch but may lead elsewhere.
    Far,
}

/// Straight-line code, what it does to a hash, and what its last instruction is.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    pub sum: Sum,
    pub kind: Kind,
    /// Length of the last instruction.
    pub last: u8,
    /// Where a direct branch leads.
    pub target: u64,
}

/// Where straight-line code ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// In front of this address.
    Before(u64),
    /// With the instruction at this address.
    With(u64),
}

#[derive(Clone, Copy)]
struct Slot {
    space: u64,
    ip: u64,
    until: Until,
    bits: u32,
    generation: u64,
    line: Line,
}

/// Lines that were met lately.
const SLOTS: usize = 1 << 15;

/// The code of one CPU.
pub struct Code {
    pub pages: Arc<Mutex<Pages>>,
    /// The physical page behind an address, and the addresses of a physical page.
    mapped: HashMap<Key, u64>,
    keys: HashMap<u64, Vec<Key>>,
    /// Contents of physical pages.
    contents: HashMap<u64, Arc<Page>>,
    generation: u64,
    slots: Vec<Option<Slot>>,
    /// The same for libipt.
    pub image: libipt::Image,
}

fn key(code: &watch::Code, cr3: u64) -> Key {
    (space(cr3, code.linear), code.linear >> 12)
}

impl Code {
    pub fn new() -> Code {
        Code {
            pages: Arc::default(),
            mapped: HashMap::new(),
            keys: HashMap::new(),
            contents: HashMap::new(),
            generation: 0,
            slots: vec![None; SLOTS],
            image: libipt::Image::new([]),
        }
    }

    /// Whether this is known, as [`watch::Watch::knows`] asks.
    pub fn knows(&self, code: &watch::Code, cpu: &mut dyn watch::Processor) -> bool {
        let gpa = code.physical & !0xFFF;
        if code.len == 0 {
            return self.mapped.get(&key(code, cpu.context().cr3)) == Some(&gpa);
        }
        let from = (code.physical & 0xFFF) as usize;
        let mut bytes = [0; PAGE];
        let bytes = &mut bytes[..code.len as usize];
        let known = self
            .contents
            .get(&gpa)
            .and_then(|page| page.get(from..from + bytes.len()));
        known.is_some_and(|known| cpu.read_phys(code.physical, bytes).is_ok() && known == bytes)
    }

    /// What [`watch::Watch::code`] says: the addresses that have other bytes from now on. Nothing of it has been taken over.
    pub fn changes(&self, code: &watch::Code, cpu: &mut dyn watch::Processor) -> Reported {
        let gpa = code.physical & !0xFFF;
        let key = key(code, cpu.context().cr3);
        let mut page = [0; PAGE];
        cpu.read_phys(gpa, &mut page).expect("code is in RAM");
        let before = self.contents.get(&gpa);
        let same = before.is_some_and(|before| **before == page);
        let mut changed = Vec::new();
        if !same {
            changed.extend(self.keys.get(&gpa).into_iter().flatten().copied());
        }
        let was = self.mapped.get(&key).copied();
        if let Some(was) = was.filter(|was| *was != gpa)
            && *self.contents[&was] != page
        {
            changed.push(key);
        }
        Reported {
            key,
            gpa,
            page: match before {
                Some(before) if same => before.clone(),
                _ => Arc::new(page),
            },
            new: was.is_none(),
            moved: was.is_some_and(|was| was != gpa),
            changed,
        }
    }

    /// Takes it over.
    pub fn take(&mut self, reported: Reported) {
        let Reported {
            key,
            gpa,
            page,
            new,
            moved,
            changed,
        } = reported;
        self.contents.insert(gpa, page.clone());
        if moved && let Some(was) = self.mapped.get(&key) {
            let was = self.keys.get_mut(was).expect("it is mapped");
            was.retain(|other| *other != key);
        }
        if new || moved {
            self.mapped.insert(key, gpa);
            self.keys.entry(gpa).or_default().push(key);
        }
        if !changed.is_empty() {
            self.generation += 1;
        }
        let mut pages = self.pages.lock().unwrap();
        pages.changed.extend(&changed);
        for key in changed.into_iter().chain(new.then_some(key)) {
            pages.bytes.insert(key, page.clone());
            let cr3 = key.0.checked_sub(1).map(|space| space << 5);
            self.image.add(key.1 << 12, &*page, cr3);
        }
    }

    /// Straight-line code from `ip` on. `None` where it is not there or is not straight.
    pub fn line(&mut self, cr3: u64, bits: u32, ip: u64, until: Until) -> Option<Line> {
        let (Until::Before(end) | Until::With(end)) = until;
        let space = space(cr3, ip);
        let mixed = (ip ^ end.rotate_left(21) ^ space << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let slot = (mixed >> 49) as usize;
        if let Some(known) = &self.slots[slot]
            && (known.space, known.ip, known.until) == (space, ip, until)
            && (known.bits, known.generation) == (bits, self.generation)
        {
            return Some(known.line);
        }
        let mut sum = Sum::default();
        let last = self.each(cr3, bits, ip, until, |ip| sum.push(ip))?;
        let line = Line {
            sum,
            kind: kind(&last),
            last: last.len() as u8,
            target: last.near_branch_target(),
        };
        self.slots[slot] = Some(Slot {
            space,
            ip,
            until,
            bits,
            generation: self.generation,
            line,
        });
        Some(line)
    }

    /// The addresses of its instructions, one by one; gives the last.
    pub fn each(&self, cr3: u64, bits: u32, ip: u64, until: Until, mut f: impl FnMut(u64)) -> Option<Instruction> {
        let len = match until {
            Until::Before(end) => end.wrapping_sub(ip),
            Until::With(last) => last.wrapping_sub(ip).checked_add(15)?,
        };
        if len > 1 << 16 {
            return None;
        }
        let mut bytes = vec![0; len as usize];
        let there = self.pages.lock().unwrap().read(space(cr3, ip), ip, &mut bytes);
        let mut decoder = Decoder::with_ip(bits, &bytes[..there], ip, DecoderOptions::NONE);
        let mut last = Instruction::default();
        let mut before = Kind::Straight;
        let done = |at: u64| match until {
            Until::Before(end) => at == end,
            Until::With(last) => at > last,
        };
        while !done(decoder.ip()) {
            if before != Kind::Straight || !decoder.can_decode() {
                return None;
            }
            decoder.decode_out(&mut last);
            if last.is_invalid() || matches!(until, Until::With(end) if last.ip() > end) {
                return None;
            }
            f(last.ip());
            before = kind(&last);
        }
        Some(last)
    }
}

/// Code that was not known.
pub struct Reported {
    key: Key,
    gpa: u64,
    page: Arc<Page>,
    new: bool,
    /// The address led to another page before.
    pub moved: bool,
    /// Addresses that have other bytes now.
    pub changed: Vec<Key>,
}

/// What an instruction is, by its bytes.
fn kind(instruction: &Instruction) -> Kind {
    match instruction.flow_control() {
        // UD2 and the like never retire: where one is in front of a fault, nothing follows it.
        FlowControl::Next | FlowControl::Exception | FlowControl::XbeginXabortXend => Kind::Straight,
        FlowControl::ConditionalBranch => Kind::Conditional,
        FlowControl::UnconditionalBranch if instruction.is_jmp_far() => Kind::Far,
        FlowControl::UnconditionalBranch => Kind::Jump,
        FlowControl::Call if instruction.is_call_near() => Kind::Call,
        FlowControl::IndirectBranch if instruction.is_jmp_near_indirect() => Kind::JumpIndirect,
        FlowControl::IndirectCall if instruction.is_call_near_indirect() => Kind::CallIndirect,
        FlowControl::Return if instruction.code().mnemonic() == iced_x86::Mnemonic::Ret => Kind::Return,
        _ => Kind::Far,
    }
}
