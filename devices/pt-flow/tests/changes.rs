//! Code that changes at any instruction, beside packets of every kind: what is found is what ran, with the code that it was then.
//!
//! A small program has every kind of instruction that a packet tells of, and is interrupted. Packets stand where SDM Vol. 3C
//! 33.4.2 "Packet Definitions" has them generated. The program runs once for each of its instructions: in front of that one the
//! code of both address spaces is replaced, and packets of time or a PSB may come with the change.

use iced_x86::{Decoder as Instructions, DecoderOptions};
use pt_flow::{Block, Change, Chunk, Context, Decoder, Event, EventKind, ExecMode, Image, Position, Timing, Visitor};
use pt_packet::{ItemSize, LastIp, MAX_LEN, Packet, Tnt, encode};

const BASE: u64 = 0x40_1000;

/// Page tables, one of two.
const CR3: [u64; 2] = [0x1000, 0x2000];

/// Four bytes of NOPs in front of every instruction: by address space, before the change and after it. What is executed of them
/// can be distinguished, and a change may come at any of their instructions.
const NOPS: [[[u8; 4]; 2]; 2] = [
    [[0x90, 0x90, 0x90, 0x90], [0x66, 0x66, 0x66, 0x90]],
    [[0x66, 0x90, 0x66, 0x90], [0x90, 0x66, 0x66, 0x90]],
];

/// What a unit of the program ends with.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    /// NOP.
    Nop,
    /// NOP in front of which an interrupt comes.
    Interrupted,
    /// The same, with packets of Event Trace.
    InterruptedTold,
    /// NOP in a transaction, in front of which an interrupt aborts it; execution goes on at the fallback address.
    Aborted(&'static str),
    /// NOP behind which a PEBS record goes into the trace.
    Sampled,
    /// NOP behind which packets are lost, in front of the next unit.
    Lost,
    /// MOV to CR3 of the other address space.
    MovCr3,
    /// PTWRITE, with a FUP or without.
    PtWrite(bool),
    /// PTWRITE, after which its packet is the last before some are lost.
    PtWriteLost,
    /// JNE, taken.
    Jne(&'static str),
    /// JNE, not taken.
    NotTaken,
    /// JMP to itself's beginning until it has come by so often.
    Again(&'static str, u32),
    Call(&'static str),
    Ret,
    /// JMP RAX.
    Jump(&'static str),
    Xbegin,
    Xend,
    Sti,
    Cli,
    Hlt,
    Mwait,
    /// IRET to where the interrupt came.
    Iret,
    /// Far jump by memory, into code of another size.
    Far(&'static str, ExecMode),
    /// A far transfer that changes the address space, too, as VM entries and task switches do.
    FarPaging(&'static str),
    /// Direct JMP out of the filter's range; outside, CR3 changes, and a branch leads back in to the unit.
    Leave(&'static str),
    /// A far transfer into a context that is not traced, and back.
    FarOut,
    /// MOV to CR3 of a context that is not traced, and back.
    MovCr3Out,
    /// MOV to CR3, right behind which the filter's range ends; a branch leads back in.
    MovCr3Leaves,
    /// NOP behind which tracing ends from outside.
    Stop,
}

impl Op {
    fn bytes(self, next: u64, target: impl Fn(&str) -> u64) -> Vec<u8> {
        let near = |opcode: &[u8], label: &str| {
            let displacement = target(label).wrapping_sub(next) as u32;
            [opcode, &displacement.to_le_bytes()].concat()
        };
        match self {
            Op::Nop | Op::Interrupted | Op::InterruptedTold | Op::Aborted(_) | Op::Sampled | Op::Lost | Op::Stop => {
                vec![0x90]
            }
            Op::MovCr3 | Op::MovCr3Out | Op::MovCr3Leaves => vec![0x0f, 0x22, 0xd8],
            Op::PtWrite(_) | Op::PtWriteLost => vec![0xf3, 0x0f, 0xae, 0xe0],
            Op::Jne(label) => near(&[0x0f, 0x85], label),
            Op::NotTaken => vec![0x75, 0x00],
            Op::Again(label, _) | Op::Leave(label) => near(&[0xe9], label),
            Op::Call(label) => near(&[0xe8], label),
            Op::Ret => vec![0xc3],
            Op::Jump(_) => vec![0xff, 0xe0],
            Op::Xbegin => vec![0xc7, 0xf8, 0, 0, 0, 0],
            Op::Xend => vec![0x0f, 0x01, 0xd5],
            Op::Sti => vec![0xfb],
            Op::Cli => vec![0xfa],
            Op::Hlt => vec![0xf4],
            Op::Mwait => vec![0x0f, 0x01, 0xc9],
            Op::Iret => vec![0xcf],
            Op::Far(..) | Op::FarPaging(_) | Op::FarOut => vec![0xff, 0x28],
        }
    }
}

/// Labels and instructions; each is the next one's neighbour.
const PROGRAM: &[(&str, Op)] = &[
    ("", Op::Nop),
    // One address space after another, with nothing between that a packet tells of.
    ("", Op::MovCr3),
    ("", Op::Nop),
    ("", Op::MovCr3),
    ("", Op::MovCr3),
    ("", Op::Jne("behind")),
    ("", Op::Nop),
    ("behind", Op::MovCr3),
    ("", Op::Call("function")),
    ("", Op::NotTaken),
    ("", Op::MovCr3),
    ("", Op::Jump("written")),
    ("", Op::Nop),
    ("written", Op::PtWrite(false)),
    ("", Op::PtWrite(true)),
    ("", Op::PtWrite(false)),
    ("", Op::MovCr3),
    ("", Op::PtWrite(false)),
    ("", Op::PtWrite(true)),
    ("", Op::MovCr3),
    ("", Op::Interrupted),
    ("", Op::InterruptedTold),
    ("", Op::PtWrite(false)),
    ("", Op::Interrupted),
    ("", Op::MovCr3),
    ("", Op::Xbegin),
    ("", Op::MovCr3),
    ("", Op::Xend),
    ("", Op::NotTaken),
    ("", Op::Xbegin),
    ("", Op::Aborted("fallback")),
    ("", Op::Nop),
    ("fallback", Op::MovCr3),
    ("", Op::Sti),
    ("", Op::Nop),
    ("", Op::Cli),
    ("", Op::MovCr3),
    ("", Op::Hlt),
    ("", Op::MovCr3),
    ("", Op::Mwait),
    ("", Op::Sampled),
    ("", Op::MovCr3),
    ("", Op::Sampled),
    ("", Op::PtWriteLost),
    ("", Op::NotTaken),
    ("", Op::Lost),
    ("", Op::MovCr3),
    ("", Op::FarPaging("paged")),
    ("", Op::Nop),
    ("paged", Op::MovCr3),
    ("", Op::Far("narrow", ExecMode::Bits32)),
    ("", Op::Nop),
    ("narrow", Op::MovCr3),
    ("", Op::Interrupted),
    ("", Op::NotTaken),
    ("", Op::Far("wide", ExecMode::Bits64)),
    ("", Op::Nop),
    ("wide", Op::MovCr3),
    ("", Op::Leave("outside")),
    ("inside", Op::MovCr3),
    ("", Op::FarOut),
    ("", Op::MovCr3),
    ("", Op::MovCr3),
    ("", Op::FarOut),
    ("", Op::MovCr3),
    ("", Op::MovCr3Out),
    ("", Op::MovCr3),
    ("", Op::MovCr3Leaves),
    ("", Op::MovCr3),
    // The same instructions again, with no branch between that a packet tells of.
    ("loop", Op::MovCr3),
    ("", Op::Again("loop", 3)),
    ("", Op::PtWrite(false)),
    ("", Op::Stop),
    ("function", Op::MovCr3),
    ("", Op::Ret),
    ("handler", Op::Nop),
    ("", Op::MovCr3),
    ("", Op::MovCr3),
    ("", Op::Iret),
    ("outside", Op::Nop),
];

/// Where each unit begins, and the code of an address space as it is before and after the change.
fn assemble() -> (Vec<u64>, [[Vec<u8>; 2]; 2]) {
    let mut places = vec![BASE];
    for (_, op) in PROGRAM {
        let last = places[places.len() - 1];
        places.push(last + 4 + op.bytes(0, |_| 0).len() as u64);
    }
    let target = |wanted: &str| {
        let unit = PROGRAM.iter().position(|(label, _)| *label == wanted);
        places[unit.unwrap_or_else(|| panic!("there is no {wanted}"))]
    };
    let code = NOPS.map(|nops| {
        nops.map(|nops| {
            let units = PROGRAM.iter().zip(&places[1..]);
            units
                .flat_map(|((_, op), next)| [&nops[..], &op.bytes(*next, target)].concat())
                .collect()
        })
    });
    (places, code)
}

/// A packet, or some that belong together, without a place of its own in the program.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Beside {
    Nothing,
    Pad,
    Mtc,
    Tsc,
    Cyc,
    Cbr,
    Mnt,
    /// PSB and its state.
    Psb,
}

const BESIDE: [Beside; 8] = [
    Beside::Nothing,
    Beside::Pad,
    Beside::Mtc,
    Beside::Tsc,
    Beside::Cyc,
    Beside::Cbr,
    Beside::Mnt,
    Beside::Psb,
];

/// An instruction that ran: its address, CR3 and its bytes.
type Ran = (u64, u64, Vec<u8>);

/// How the program runs: at which point code changes, and which packets stand there.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// The number of the point.
    at: usize,
    /// These packets come right before the change, or right behind it.
    before: Beside,
    behind: Beside,
}

/// A run of the program.
struct Run {
    plan: Plan,
    places: Vec<u64>,
    code: [[Vec<u8>; 2]; 2],
    // What is found out.
    trace: Vec<u8>,
    ran: Vec<Ran>,
    written: Vec<u64>,
    change: Option<Position>,
    points: usize,
    // The processor.
    space: usize,
    mode: ExecMode,
    in_tx: bool,
    changed: bool,
    rounds: u32,
    returns: Vec<u64>,
    // The stream.
    last_ip: LastIp,
    tnt: Tnt,
}

impl Run {
    fn new(plan: Plan) -> Run {
        let (places, code) = assemble();
        let mut run = Run {
            plan,
            places,
            code,
            trace: Vec::new(),
            ran: Vec::new(),
            written: Vec::new(),
            change: None,
            points: 0,
            space: 0,
            mode: ExecMode::Bits64,
            in_tx: false,
            changed: false,
            rounds: 0,
            returns: Vec::new(),
            last_ip: LastIp::new(),
            tnt: Tnt::EMPTY,
        };
        run.psb(Some(BASE));
        run.go();
        run
    }

    fn flush(&mut self) {
        let tnt = std::mem::replace(&mut self.tnt, Tnt::EMPTY);
        if !tnt.is_empty() {
            self.put(Packet::ShortTnt(tnt));
        }
    }

    fn put(&mut self, packet: Packet) {
        let mut out = [0; MAX_LEN];
        let len = encode(&packet, &mut self.last_ip, &mut out);
        self.trace.extend(&out[..len]);
    }

    /// Sends packets, behind the bits that wait.
    fn send(&mut self, packets: &[Packet]) {
        self.flush();
        packets.iter().for_each(|packet| self.put(*packet));
    }

    fn bit(&mut self, taken: bool) {
        self.tnt.push(taken);
        if self.tnt.len() == Tnt::SHORT {
            self.flush();
        }
    }

    fn pip(&self) -> Packet {
        Packet::Pip {
            cr3: CR3[self.space],
            non_root: false,
        }
    }

    fn mode_exec(&self) -> Packet {
        let (mode, interrupts) = (self.mode, false);
        Packet::ModeExec { mode, interrupts }
    }

    /// SDM Vol. 3C 33.3.7 "Decoder Synchronization (PSB+)".
    fn psb(&mut self, ip: Option<u64>) {
        let state = [
            Packet::Psb,
            self.pip(),
            Packet::Tsc(5),
            Packet::Tma { ctc: 1, fast: 1 },
            Packet::Cbr(21),
            self.mode_exec(),
            Packet::ModeTsx {
                in_tx: self.in_tx,
                abort: false,
            },
        ];
        self.send(&state);
        if ip.is_some() {
            self.put(Packet::Fup(ip));
        }
        self.put(Packet::PsbEnd);
        // Returns to calls before it are not compressed: SDM Vol. 3C 33.4.2.2 "Target IP (TIP) Packet".
        self.returns.iter_mut().for_each(|to| *to |= 1 << 63);
    }

    fn beside(&mut self, what: Beside, ip: Option<u64>) {
        match what {
            Beside::Nothing => {}
            Beside::Pad => self.send(&[Packet::Pad]),
            Beside::Mtc => self.send(&[Packet::Mtc(7)]),
            Beside::Tsc => self.send(&[Packet::Tsc(9), Packet::Tma { ctc: 2, fast: 3 }]),
            Beside::Cyc => self.send(&[Packet::Cyc(12)]),
            Beside::Cbr => self.send(&[Packet::Cbr(8)]),
            Beside::Mnt => self.send(&[Packet::Mnt(1)]),
            Beside::Psb => self.psb(ip),
        }
    }

    /// A point at which code may change: `ip` is next.
    fn point(&mut self, ip: Option<u64>) {
        if self.points == self.plan.at {
            let Plan { before, behind, .. } = self.plan;
            self.beside(before, ip);
            // A PSB that stands behind the change is preceded by the bits that wait, so that a recorder can name the place.
            if behind == Beside::Psb {
                self.flush();
            }
            let (offset, bits) = (self.trace.len() as u64, self.tnt.len());
            self.change = Some(Position { offset, bits, ip });
            self.changed = true;
            self.beside(behind, ip);
        }
        self.points += 1;
    }

    /// The instruction at `ip` runs.
    fn step(&mut self, ip: u64) -> u64 {
        self.point(Some(ip));
        let code = &self.code[self.space][usize::from(self.changed)][(ip - BASE) as usize..];
        let options = DecoderOptions::NONE;
        let len = Instructions::with_ip(self.mode.bits(), code, ip, options)
            .decode()
            .len();
        self.ran.push((ip, CR3[self.space], code[..len].to_vec()));
        ip + len as u64
    }

    fn unit(&self, wanted: &str) -> usize {
        let unit = PROGRAM.iter().position(|(label, _)| *label == wanted);
        unit.expect("assembling has found it")
    }

    /// An interrupt in front of `ip`, up to its return.
    fn interrupt(&mut self, ip: u64, reported: bool) {
        self.point(Some(ip));
        if reported {
            let (kind, vector, ip) = (1, 0x20, true);
            self.send(&[Packet::Cfe { kind, vector, ip }]);
        }
        let handler = self.unit("handler");
        let mode = self.mode;
        self.send(&[Packet::Fup(Some(ip))]);
        if mode != ExecMode::Bits64 {
            self.mode = ExecMode::Bits64;
            self.send(&[self.mode_exec()]);
        }
        self.send(&[Packet::Tip(Some(self.places[handler]))]);
        let mut unit = handler;
        while PROGRAM[unit].1 != Op::Iret {
            unit = self.execute(unit).expect("the handler goes on");
        }
        let mut at = self.nops(unit);
        at = self.step(at);
        if reported {
            let (kind, vector) = (2, 0);
            let from = at - 1;
            self.send(&[Packet::Cfe { kind, vector, ip: true }, Packet::Fup(Some(from))]);
        }
        if mode != self.mode {
            self.mode = mode;
            self.send(&[self.mode_exec()]);
        }
        self.send(&[Packet::Tip(Some(ip))]);
    }

    /// The NOPs of a unit run; where its instruction is.
    fn nops(&mut self, unit: usize) -> u64 {
        let mut ip = self.places[unit];
        while ip < self.places[unit] + 4 {
            ip = self.step(ip);
        }
        ip
    }

    /// A branch with a TIP.
    fn tip(&mut self, unit: usize) -> usize {
        self.send(&[Packet::Tip(Some(self.places[unit]))]);
        unit
    }

    /// Runs a unit; the one that follows.
    fn execute(&mut self, unit: usize) -> Option<usize> {
        let op = PROGRAM[unit].1;
        let at = self.nops(unit);
        match op {
            Op::Interrupted => self.interrupt(at, false),
            Op::InterruptedTold => self.interrupt(at, true),
            Op::Aborted(fallback) => {
                self.point(Some(at));
                self.in_tx = false;
                let (in_tx, abort) = (false, true);
                self.send(&[Packet::ModeTsx { in_tx, abort }, Packet::Fup(Some(at))]);
                return Some(self.tip(self.unit(fallback)));
            }
            _ => {}
        }
        let next = self.step(at);
        let size = ItemSize::Four;
        let unit = unit + 1;
        match op {
            Op::Nop | Op::Interrupted | Op::InterruptedTold | Op::Aborted(_) => {}
            Op::Sampled => {
                let (kind, id, value) = (4, 1, 6);
                self.send(&[
                    Packet::Bbp { size, kind },
                    Packet::Bip { id, size, value },
                    Packet::Bep { ip: true },
                    Packet::Fup(Some(next)),
                ]);
            }
            // Tracing ends and begins anew in front of it, so that nothing that ran is lost with the packets.
            Op::Lost => {
                self.send(&[
                    Packet::Fup(Some(next)),
                    Packet::TipPgd(None),
                    Packet::TipPge(Some(next)),
                ]);
                self.send(&[Packet::Ovf, Packet::Fup(Some(next))]);
            }
            Op::MovCr3 => {
                self.space ^= 1;
                // An observer's unit tells the time beside it.
                self.send(&[Packet::Tsc(10), Packet::Tma { ctc: 4, fast: 5 }, self.pip()]);
            }
            Op::PtWrite(ip) => {
                self.written.push(at);
                self.send(&[Packet::Ptw { value: at, size, ip }]);
                if ip {
                    self.send(&[Packet::Fup(Some(at))]);
                }
            }
            Op::PtWriteLost => {
                self.written.push(at);
                let (value, ip) = (at, false);
                self.send(&[Packet::Ptw { value, size, ip }, Packet::Ovf, Packet::Fup(Some(next))]);
                self.returns.clear();
            }
            Op::Jne(label) => {
                self.bit(true);
                return Some(self.unit(label));
            }
            Op::NotTaken => self.bit(false),
            Op::Again(label, rounds) => {
                self.rounds += 1;
                if self.rounds < rounds {
                    return Some(self.unit(label));
                }
                // An interrupt finds it back at the beginning, and its handler goes on behind the loop.
                let back = self.places[self.unit(label)];
                self.point(Some(back));
                self.send(&[Packet::Fup(Some(back))]);
                return Some(self.tip(unit));
            }
            Op::Call(label) => {
                self.returns.push(next);
                return Some(self.unit(label));
            }
            Op::Ret => {
                let to = self.returns.pop().expect("it was called");
                let ip = to & !(1 << 63);
                if ip == to {
                    self.bit(true);
                } else {
                    self.send(&[Packet::Tip(Some(ip))]);
                }
                return self.places.iter().position(|place| *place == ip);
            }
            Op::Jump(label) => return Some(self.tip(self.unit(label))),
            Op::Xbegin | Op::Xend => {
                self.in_tx = op == Op::Xbegin;
                let (in_tx, abort) = (self.in_tx, false);
                self.send(&[Packet::ModeTsx { in_tx, abort }, Packet::Fup(Some(at))]);
            }
            Op::Sti | Op::Cli => {
                let (mode, interrupts) = (self.mode, op == Op::Sti);
                self.send(&[Packet::ModeExec { mode, interrupts }, Packet::Fup(Some(next))]);
            }
            Op::Hlt | Op::Mwait => {
                if op == Op::Mwait {
                    let (hints, extensions) = (0x20, 0);
                    self.send(&[Packet::Mwait { hints, extensions }]);
                }
                let (hardware, state, sub_state, reason) = (false, 1, 0, 1);
                let sleeps = Packet::Pwre {
                    hardware,
                    state,
                    sub_state,
                };
                self.send(&[sleeps, Packet::ExStop { ip: true }, Packet::Fup(Some(at))]);
                self.point(Some(next));
                let (last, deepest) = (state, state);
                self.send(&[Packet::Tsc(20), Packet::Tma { ctc: 6, fast: 0 }, Packet::Cbr(21)]);
                self.send(&[Packet::Pwrx { last, deepest, reason }]);
            }
            Op::Far(label, mode) => {
                self.mode = mode;
                self.send(&[self.mode_exec()]);
                return Some(self.tip(self.unit(label)));
            }
            Op::FarPaging(label) => {
                self.space ^= 1;
                self.send(&[Packet::Vmcs(0x7000), self.pip()]);
                return Some(self.tip(self.unit(label)));
            }
            Op::Leave(label) => {
                let outside = self.places[self.unit(label)];
                self.send(&[Packet::TipPgd(Some(outside))]);
                self.point(None);
                self.space ^= 1;
                self.send(&[self.pip()]);
                self.point(None);
                self.send(&[self.mode_exec(), Packet::TipPge(Some(self.places[unit]))]);
                self.returns.clear();
            }
            // SDM Vol. 3C Table "Packet Generation under Different Enable Conditions": 5c has no PIP, 5e has one.
            Op::FarOut | Op::MovCr3Out => {
                self.send(&[Packet::TipPgd(None)]);
                self.point(None);
                self.space ^= 1;
                self.send(&[self.pip(), self.mode_exec(), Packet::TipPge(Some(next))]);
                self.returns.clear();
            }
            Op::MovCr3Leaves => {
                self.space ^= 1;
                self.send(&[self.pip(), Packet::TipPgd(Some(next))]);
                self.point(None);
                self.send(&[self.mode_exec(), Packet::TipPge(Some(next))]);
                self.returns.clear();
            }
            Op::Stop => {
                self.send(&[Packet::Fup(Some(next)), Packet::TipPgd(None)]);
                return None;
            }
            Op::Iret => unreachable!("an interrupt's business"),
        }
        Some(unit)
    }

    fn go(&mut self) {
        let mut unit = 0;
        while let Some(next) = self.execute(unit) {
            unit = next;
        }
    }
}

/// The program's code, which is another from a position on.
struct Code {
    code: [[Vec<u8>; 2]; 2],
    change: Option<Position>,
    now: usize,
}

impl Image for Code {
    fn space(&mut self, context: &Context, _: bool) -> u32 {
        let cr3 = context.cr3.expect("the first PSB tells it");
        CR3.iter().position(|known| *known == cr3).expect("one of two") as u32
    }
    fn code(&mut self, space: u32, ip: u64, out: &mut [u8]) -> usize {
        let code = &self.code[space as usize][self.now];
        let Some(rest) = ip.checked_sub(BASE).and_then(|at| code.get(at as usize..)) else {
            return 0;
        };
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        len
    }
    fn next_change(&mut self) -> Option<Position> {
        self.change
    }
    fn advance(&mut self, position: Position, changed: &mut dyn FnMut(Change)) {
        if self.change.take_if(|change| *change <= position).is_some() {
            self.now = 1;
            for space in 0..2 {
                changed(Change { space, page: BASE });
            }
        }
    }
}

/// What a decoder finds.
#[derive(Default)]
struct Found {
    ran: Vec<Ran>,
    written: Vec<Option<u64>>,
    gaps: Vec<Event>,
    cr3: u64,
}

impl Visitor for Found {
    const CODE: bool = true;

    fn block(&mut self, _: &Block) {}
    fn code(&mut self, block: &Block, bytes: &[u8]) {
        let mut instructions = Instructions::with_ip(block.mode.bits(), bytes, block.ip, DecoderOptions::NONE);
        let mut count = 0;
        while instructions.can_decode() {
            let at = instructions.position();
            let len = instructions.decode().len();
            self.ran
                .push((block.ip + at as u64, self.cr3, bytes[at..at + len].to_vec()));
            count += 1;
        }
        assert_eq!(count, block.count, "{block:x?}");
    }
    fn event(&mut self, event: &Event) {
        match event.kind {
            EventKind::Paging { cr3, .. } => self.cr3 = cr3,
            EventKind::PtWrite { ip, .. } => self.written.push(ip),
            EventKind::Gap(_) => self.gaps.push(*event),
            _ => {}
        }
    }
}

fn check(run: Run) {
    let plan = run.plan;
    let image = Code {
        code: run.code,
        change: run.change,
        now: 0,
    };
    let mut found = Found::default();
    Decoder::new(image, Timing::default()).decode(&Chunk::whole(&run.trace), &mut found);
    assert_eq!(found.gaps, [], "{plan:?}: {:x?}", run.change);
    let same = found.ran.iter().zip(&run.ran).take_while(|(a, b)| a == b).count();
    assert!(
        found.ran == run.ran,
        "{plan:?}: {:x?}: {same} instructions of {} and {} are the same, then {:x?} instead of {:x?}",
        run.change,
        found.ran.len(),
        run.ran.len(),
        found.ran.get(same),
        run.ran.get(same)
    );
    let written: Vec<Option<u64>> = run.written.into_iter().map(Some).collect();
    assert_eq!(found.written, written, "{plan:?}: {:x?}", run.change);
}

// covers: decoder/changes-packets
#[test]
fn code_changes_at_any_instruction_beside_any_packet() {
    let never = Plan {
        at: usize::MAX,
        before: Beside::Nothing,
        behind: Beside::Nothing,
    };
    let run = Run::new(never);
    let points = run.points;
    assert!(points > 300 && run.ran.len() > 300, "{points} {}", run.ran.len());
    check(run);
    for at in 0..points {
        for before in BESIDE {
            for behind in BESIDE {
                let plan = Plan { at, before, behind };
                let run = Run::new(plan);
                assert!(run.change.is_some(), "{plan:?}");
                check(run);
            }
        }
    }
}
