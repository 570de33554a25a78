//! Random programs and walks through them.

use crate::Random;
use crate::tracer::{Style, Tracer};
use crate::vmx::Host;
use pt_packet::{ExecMode, ItemSize, Packet};

/// A run of code of one mode, which begins at `base`.
#[derive(Debug)]
pub struct Region {
    /// Its first address.
    pub base: u64,
    /// Its mode.
    pub mode: ExecMode,
    /// Its bytes.
    pub code: Vec<u8>,
    /// Outside of what is traced.
    pub hidden: bool,
    blocks: Vec<Block>,
}

#[derive(Debug)]
struct Block {
    instructions: Vec<(u64, Special)>,
    end: Term,
}

/// An instruction that has packets of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Special {
    No,
    MovCr3,
    PtWrite,
}

/// Where a block is: its region and its number there.
type Place = (usize, usize);

/// How a block ends.
#[derive(Clone, Copy, Debug)]
enum Term {
    Fall,
    Conditional(Place),
    Jump(Place),
    Call(Place),
    /// To the next instruction.
    CallNext,
    IndirectJump,
    IndirectCall,
    Return,
    Far,
}

/// A program.
#[derive(Debug)]
pub struct Program {
    /// Its code.
    pub regions: Vec<Region>,
}

/// What a walk is like.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How it is traced.
    pub style: Style,
    /// Instructions, about.
    pub length: usize,
    /// Interrupts, overflows and all else that comes from outside: about once in twenty times so many instructions.
    pub events: Option<usize>,
    /// PTWRITE sends its IP.
    pub ptwrite_ip: bool,
}

impl Plan {
    /// Twenty thousand instructions, traced in one of the ways that there are and with events as the number has it: 64 numbers have
    /// every combination of what is on or off.
    pub fn of(seed: u64) -> Self {
        Plan {
            style: Style {
                compress_returns: seed & 1 != 0,
                long_tnt: seed & 2 != 0,
                defer: seed & 4 != 0,
                psb_period: [64, 256, 4096][seed as usize % 3],
                timing: seed & 8 != 0,
            },
            length: 20_000,
            events: (seed & 16 == 0).then_some(1 + seed as usize % 3),
            ptwrite_ip: seed & 32 != 0,
        }
    }
}

/// What a walk leaves behind.
#[derive(Debug)]
pub struct Walk {
    /// The trace.
    pub trace: Vec<u8>,
    /// The addresses of all instructions that it tells of, in their order.
    pub log: Vec<u64>,
    /// How many overflows there were.
    pub overflows: u64,
}

/// CR3 at the start of a walk.
const CR3: u64 = 0x1000;

const USER: usize = 0;
const HIDDEN: usize = 1;
const KERNEL: usize = 2;

/// Bases, modes, and whether hidden. Direct branches lead within a region, and between the first two.
const REGIONS: [(u64, ExecMode, bool); 5] = [
    (0x0000_5555_0040_0000, ExecMode::Bits64, false),
    (0x0000_5555_4040_0000, ExecMode::Bits64, true),
    (0xffff_ffff_8100_0000, ExecMode::Bits64, false),
    (0x0804_8000, ExecMode::Bits32, false),
    (0x0001_0000, ExecMode::Bits16, false),
];

fn filler(mode: ExecMode, random: &mut Random) -> Vec<u8> {
    let common: &[&[u8]] = &[
        &[0x90],
        &[0x01, 0xd8],
        &[0x50],
        &[0x58],
        &[0x31, 0xc0],
        &[0x8b, 0x40, 0x10],
        &[0x0f, 0xb6, 0xc0],
        &[0xf3, 0x90],
        &[0xf4],
        &[0xf3, 0xa4],
    ];
    let own: &[&[u8]] = match mode {
        ExecMode::Bits16 => &[
            &[0x40],
            &[0xb8, 1, 2],
            &[0x66, 0xb8, 1, 2, 3, 4],
            &[0x67, 0x8b, 0x04, 0x58],
        ],
        ExecMode::Bits32 => &[
            &[0x40],
            &[0xb8, 1, 2, 3, 4],
            &[0x66, 0xb8, 1, 2],
            &[0x8b, 0x04, 0x85, 1, 2, 3, 4],
        ],
        ExecMode::Bits64 => &[
            &[0x48, 0xb8, 1, 2, 3, 4, 5, 6, 7, 8],
            &[0x48, 0x8b, 0x05, 1, 2, 3, 4],
            &[0x0f, 0x10, 0x00],
            &[0xc5, 0xf8, 0x10, 0x00],
            &[0x66, 0x0f, 0x38, 0x00, 0xc1],
            &[0xf0, 0x48, 0x0f, 0xb1, 0x0c, 0x24],
            &[0x49, 0x81, 0x84, 0x24, 1, 2, 3, 4, 5, 6, 7, 8],
        ],
    };
    let bytes = if random.one_in(2) {
        random.of(common)
    } else {
        random.of(own)
    };
    bytes.to_vec()
}

impl Program {
    /// A random program with so many blocks in each region.
    pub fn new(random: &mut Random, blocks: usize) -> Program {
        let mut program = Program { regions: Vec::new() };
        // Displacements to be filled in: region, offset behind them, target.
        let mut fixups: Vec<(usize, usize, Place)> = Vec::new();
        for (number, (base, mode, hidden)) in REGIONS.into_iter().enumerate() {
            // A segment of 64 KiB does not hold more.
            let blocks = if mode == ExecMode::Bits16 {
                blocks.min(800)
            } else {
                blocks
            };
            let mut region = Region {
                base,
                mode,
                code: Vec::new(),
                hidden,
                blocks: Vec::new(),
            };
            for block in 0..blocks {
                let fresh = region.block(number, block, blocks, random, &mut fixups);
                region.blocks.push(fresh);
            }
            program.regions.push(region);
        }
        for (number, at, (to, block)) in fixups {
            let target = program.start((to, block));
            let region = &mut program.regions[number];
            let displacement = target.wrapping_sub(region.base + at as u64);
            let wide = if region.mode == ExecMode::Bits16 { 2 } else { 4 };
            region.code[at - wide..at].copy_from_slice(&displacement.to_le_bytes()[..wide]);
        }
        program
    }

    /// The sections for an image.
    pub fn sections(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.regions.iter().map(|region| (region.base, region.code.as_slice()))
    }

    fn start(&self, (region, block): Place) -> u64 {
        self.regions[region].blocks[block].instructions[0].0
    }

    /// A block somewhere that is traced.
    fn anywhere(&self, random: &mut Random, modes: bool) -> Place {
        let region = *random.of(if modes { &[USER, KERNEL, 3, 4] } else { &[USER, KERNEL] });
        (region, random.below(self.regions[region].blocks.len()))
    }

    /// Where the indirect branch of a block leads: each has a few targets, of which one is frequent.
    fn indirect(&self, from: Place, random: &mut Random) -> Place {
        let region = match from.0 {
            USER if random.one_in(8) => HIDDEN,
            HIDDEN if random.one_in(3) => USER,
            region => region,
        };
        let choice = if random.one_in(4) { random.below(6) } else { 0 };
        let target = Random((from.1 * 8 + choice) as u64).draw();
        (region, target as usize % self.regions[region].blocks.len())
    }

    /// Walks it and traces that.
    pub fn walk(&self, random: &mut Random, plan: &Plan) -> Walk {
        self.trace(random, plan, None)
    }

    /// Walks it as a guest, and traces that together with its host: [`Walk::trace`] is of both. Before it the guest stands at
    /// [`Program::entry`], in 64-bit code and with CR3 1000H.
    pub fn walk_hosted(&self, random: &mut Random, plan: &Plan) -> Walk {
        let host = Host::new(random.draw(), CR3, plan.style.timing);
        self.trace(random, plan, Some(host))
    }

    /// The first instruction of a walk.
    pub fn entry(&self) -> u64 {
        self.start((USER, 0))
    }

    fn trace(&self, random: &mut Random, plan: &Plan, host: Option<Host>) -> Walk {
        let hosted = host.is_some();
        let mut walker = Walker {
            program: self,
            tracer: Tracer::new(plan.style),
            plan: *plan,
            log: Vec::new(),
            confirmed: 0,
            stack: Vec::new(),
            on: false,
            mode: ExecMode::Bits64,
            cr3: CR3,
            overflows: 0,
        };
        walker.tracer.host = host;
        let mut place = (USER, 0);
        if !hosted {
            walker.tracer.psb(None, ExecMode::Bits64, walker.cr3);
        }
        let mut steps = 0;
        while steps < plan.length {
            place = walker.block(place, random);
            steps += 4;
        }
        // The end of the trace tells of all that was executed.
        if walker.on {
            let ip = self.start(place);
            walker.tracer.packet(Packet::Fup(Some(ip)));
            walker.tracer.disable(None);
        }
        walker.tracer.flush();
        if hosted {
            walker.tracer.vm_exit(None, walker.mode, walker.cr3);
        }
        let host = walker.tracer.host;
        Walk {
            trace: host.map_or(walker.tracer.out, |host| host.out),
            log: walker.log,
            overflows: walker.overflows,
        }
    }
}

impl Region {
    fn put(&mut self, bytes: &[u8]) -> u64 {
        let ip = self.base + self.code.len() as u64;
        self.code.extend(bytes);
        ip
    }

    fn block(
        &mut self,
        number: usize,
        block: usize,
        blocks: usize,
        random: &mut Random,
        fixups: &mut Vec<(usize, usize, Place)>,
    ) -> Block {
        let long = self.mode == ExecMode::Bits64;
        let mut instructions = Vec::new();
        let start = self.code.len();
        for _ in 0..random.below(7) {
            let special = match random.below(60) {
                0 if number == KERNEL => Special::MovCr3,
                1 if long => Special::PtWrite,
                _ => Special::No,
            };
            let ip = match special {
                Special::MovCr3 => self.put(&[0x0f, 0x22, 0xd8]),
                Special::PtWrite if random.one_in(2) => self.put(&[0xf3, 0x48, 0x0f, 0xae, 0xe0]),
                Special::PtWrite => self.put(&[0xf3, 0x0f, 0xae, 0xe0]),
                Special::No => self.put(&filler(self.mode, random)),
            };
            instructions.push((ip, special));
        }
        let direct = match number {
            USER if random.one_in(10) => HIDDEN,
            HIDDEN if random.one_in(3) => USER,
            region => region,
        };
        let target = (direct, random.below(blocks));
        let choice = if block + 1 == blocks { 15 } else { random.below(16) };
        // Jumps and calls lead forward: how often a loop of them was run before an interrupt, no trace tells.
        let target = match choice {
            6..=8 if direct == number => (number, block + 1 + random.below(blocks - block - 1)),
            _ => target,
        };
        let near = |region: &mut Region, opcode: &[u8], fixups: &mut Vec<_>| {
            let ip = region.put(opcode);
            region.code.extend(if region.mode == ExecMode::Bits16 {
                &[0; 2][..]
            } else {
                &[0; 4][..]
            });
            fixups.push((number, region.code.len(), target));
            ip
        };
        let (ip, end) = match choice {
            0 => (self.put(&[0x90]), Term::Fall),
            1..=4 => {
                let opcode = [0x0f, 0x80 | random.below(16) as u8];
                (near(self, &opcode, fixups), Term::Conditional(target))
            }
            5 => {
                // A loop over this block, by one of the short forms.
                let opcode = *random.of(&[0xe0, 0xe1, 0xe2, 0xe3, 0x74, 0x7f]);
                let displacement = start as i64 - (self.code.len() as i64 + 2);
                (
                    self.put(&[opcode, displacement as i8 as u8]),
                    Term::Conditional((number, block)),
                )
            }
            6 => (near(self, &[0xe9], fixups), Term::Jump(target)),
            7 | 8 => (near(self, &[0xe8], fixups), Term::Call(target)),
            9 if random.one_in(4) => {
                let bytes: &[u8] = if self.mode == ExecMode::Bits16 {
                    &[0xe8, 0, 0]
                } else {
                    &[0xe8, 0, 0, 0, 0]
                };
                (self.put(bytes), Term::CallNext)
            }
            9 | 10 => (
                self.put(random.of::<&[u8]>(&[&[0xff, 0xe0], &[0xff, 0x60, 0x10]])),
                Term::IndirectJump,
            ),
            11 => (
                self.put(random.of::<&[u8]>(&[&[0xff, 0xd0], &[0xff, 0x50, 0x10]])),
                Term::IndirectCall,
            ),
            12 if random.one_in(3) => {
                let bytes: &[u8] = match (self.mode, random.below(3)) {
                    (_, 0) => &[0xcf],
                    (ExecMode::Bits64, 1) => &[0x0f, 0x05],
                    (ExecMode::Bits64, _) => &[0x48, 0xff, 0x68, 0x10],
                    (ExecMode::Bits32, 1) => &[0xea, 1, 2, 3, 4, 5, 6],
                    (ExecMode::Bits32, _) => &[0xff, 0x58, 0x10],
                    (ExecMode::Bits16, 1) => &[0xea, 1, 2, 3, 4],
                    (ExecMode::Bits16, _) => &[0xcb],
                };
                (self.put(bytes), Term::Far)
            }
            _ => (
                self.put(random.of::<&[u8]>(&[&[0xc3], &[0xc2, 8, 0], &[0xf3, 0xc3]])),
                Term::Return,
            ),
        };
        instructions.push((ip, Special::No));
        Block { instructions, end }
    }
}

struct Walker<'a> {
    program: &'a Program,
    tracer: Tracer,
    plan: Plan,
    log: Vec<u64>,
    /// So many of them follow from the packets up to now, with what waits.
    confirmed: usize,
    stack: Vec<Place>,
    /// Packets are generated.
    on: bool,
    /// As the last MODE.Exec said.
    mode: ExecMode,
    cr3: u64,
    overflows: u64,
}

impl Walker<'_> {
    fn region_mode(&self, place: Place) -> ExecMode {
        self.program.regions[place.0].mode
    }

    fn is_hidden(&self, place: Place) -> bool {
        self.program.regions[place.0].hidden
    }

    /// The mode to tell on the way to a place.
    fn mode_change(&mut self, to: Place) -> Option<ExecMode> {
        let mode = self.region_mode(to);
        (std::mem::replace(&mut self.mode, mode) != mode).then_some(mode)
    }

    /// Executes a block and gives the next.
    fn block(&mut self, place: Place, random: &mut Random) -> Place {
        let program = self.program;
        let block = &program.regions[place.0].blocks[place.1];
        if !self.on && !self.is_hidden(place) {
            self.on = true;
            self.mode = self.region_mode(place);
            self.tracer.enable(program.start(place), self.mode);
            self.confirmed = self.log.len();
        }
        for &(ip, special) in &block.instructions {
            if self.tracer.psb_is_due() {
                let here = self.on.then_some(ip);
                self.tracer.psb(here, self.mode, self.cr3);
                self.confirmed = self.log.len();
            }
            if self.tracer.host.is_some() && random.one_in(20) {
                // It does not show in the guest's part: what leads up to it may still be lost.
                self.tracer.vm_exit(self.on.then_some(ip), self.mode, self.cr3);
            }
            if self.on
                && let Some(pause) = self.plan.events
                && random.one_in(pause)
                && let Some(next) = self.outside(ip, random)
            {
                return next;
            }
            if self.on {
                self.special(ip, special, random);
                self.log.push(ip);
                if special != Special::No {
                    self.confirmed = self.log.len();
                }
            }
        }
        let next = self.end(place, &block.end, random);
        // What leads on without a packet may still be lost.
        if !matches!(block.end, Term::Fall | Term::Jump(_) | Term::Call(_) | Term::CallNext) || !self.on {
            self.confirmed = self.log.len();
        }
        next
    }

    fn special(&mut self, ip: u64, special: Special, random: &mut Random) {
        match special {
            Special::No => {}
            Special::MovCr3 => {
                self.cr3 = (random.draw() & 0xf_ffff) << 12;
                let (cr3, non_root) = (self.cr3, false);
                self.tracer.packet(Packet::Pip { cr3, non_root });
            }
            Special::PtWrite => {
                let size = *random.of(&[ItemSize::Four, ItemSize::Eight]);
                let value = random.draw()
                    & if size == ItemSize::Four {
                        u32::MAX as u64
                    } else {
                        u64::MAX
                    };
                let with_ip = self.plan.ptwrite_ip;
                self.tracer.packet(Packet::Ptw {
                    value,
                    size,
                    ip: with_ip,
                });
                if with_ip {
                    self.tracer.packet(Packet::Fup(Some(ip)));
                    self.confirmed = self.log.len();
                }
            }
        }
    }

    /// What comes from outside in front of an instruction; the place where execution goes on, if that is elsewhere.
    fn outside(&mut self, ip: u64, random: &mut Random) -> Option<Place> {
        match random.below(800) {
            0..=9 => {
                let to = self.program.anywhere(random, true);
                let mode = self.mode_change(to);
                self.tracer.event(ip, self.program.start(to), mode);
                self.confirmed = self.log.len();
                Some(to)
            }
            10 | 11 => {
                self.tracer.packet(Packet::Fup(Some(ip)));
                self.tracer.disable(None);
                self.on = false;
                Some(self.program.anywhere(random, true))
            }
            12 => {
                if self.tracer.host.is_some() {
                    // Whether a PSB at an exit has reported them depends on who strips the host's part. An event does.
                    let to = self.program.anywhere(random, true);
                    let mode = self.mode_change(to);
                    self.tracer.event(ip, self.program.start(to), mode);
                    self.confirmed = self.log.len();
                }
                // What was executed since the last branch is lost.
                self.log.truncate(self.confirmed);
                self.overflows += 1;
                let to = self.program.anywhere(random, true);
                // Between OVF and FUP there is no place for a mode.
                if self.region_mode(to) == self.mode {
                    let ip = self.program.start(to);
                    self.tracer.overflow(ip);
                    self.tracer.told_again(Some(ip), self.mode, self.cr3);
                } else {
                    self.tracer.packet(Packet::Ovf);
                    self.tracer.told_again(None, self.mode, self.cr3);
                    self.on = false;
                }
                Some(to)
            }
            13 | 14 => {
                let (in_tx, abort) = (random.one_in(2), false);
                self.tracer.packet(Packet::ModeTsx { in_tx, abort });
                self.tracer.packet(Packet::Fup(Some(ip)));
                self.confirmed = self.log.len();
                None
            }
            15 => {
                let (in_tx, abort) = (false, true);
                self.tracer.packet(Packet::ModeTsx { in_tx, abort });
                let to = self.program.anywhere(random, true);
                let mode = self.mode_change(to);
                self.tracer.event(ip, self.program.start(to), mode);
                self.confirmed = self.log.len();
                Some(to)
            }
            16 => {
                let (hints, extensions) = (0x20, 1);
                self.tracer.packet(Packet::Mwait { hints, extensions });
                self.tracer.packet(Packet::ExStop { ip: true });
                self.tracer.packet(Packet::Fup(Some(ip)));
                self.confirmed = self.log.len();
                self.tracer.packet(Packet::Pwre {
                    hardware: false,
                    state: 2,
                    sub_state: 0,
                });
                self.tracer.packet(Packet::Pwrx {
                    last: 2,
                    deepest: 2,
                    reason: 1,
                });
                None
            }
            17 => {
                self.tracer.packet(Packet::Fup(Some(ip)));
                self.tracer.disable(None);
                self.tracer.packet(Packet::TraceStop);
                self.on = false;
                Some(self.program.anywhere(random, true))
            }
            18..=40 if self.plan.style.timing => {
                self.tracer
                    .aside(*random.of(&[Packet::Cyc(33), Packet::Cbr(21), Packet::Pad, Packet::Cyc(1000)]));
                None
            }
            _ => None,
        }
    }

    /// A near branch whose target the code does not tell: to another region, or filtered.
    fn leaves(&mut self, to: Place) -> bool {
        if self.on && self.is_hidden(to) {
            self.tracer.disable(Some(self.program.start(to)));
            self.on = false;
            return true;
        }
        false
    }

    fn end(&mut self, place: Place, end: &Term, random: &mut Random) -> Place {
        let program = self.program;
        let behind = (place.0, place.1 + 1);
        let on = self.on;
        match *end {
            Term::Fall => behind,
            Term::Jump(to) => {
                self.leaves(to);
                to
            }
            Term::Call(to) => {
                self.stack.push(behind);
                if on && !self.leaves(to) {
                    let after = program.start(behind);
                    // A call of the next instruction is not remembered.
                    if program.start(to) != after {
                        self.tracer.call(after);
                    }
                }
                to
            }
            Term::CallNext => behind,
            Term::Conditional(to) => {
                // Most branches nearly always go the same way.
                let taken = match program.start(place) >> 2 & 3 {
                    0 => random.one_in(20),
                    1 | 2 => !random.one_in(20),
                    _ => !random.one_in(3),
                };
                if !taken {
                    if on {
                        self.tracer.conditional(false);
                    }
                    return behind;
                }
                if on && !self.leaves(to) {
                    self.tracer.conditional(true);
                }
                to
            }
            Term::IndirectJump | Term::IndirectCall => {
                let to = program.indirect(place, random);
                let call = matches!(end, Term::IndirectCall);
                if call {
                    self.stack.push(behind);
                }
                if on && !self.leaves(to) {
                    if call {
                        self.tracer.call(program.start(behind));
                    }
                    self.tracer.indirect(program.start(to));
                }
                to
            }
            Term::Return => {
                let mut to = program.indirect(place, random);
                while let Some(back) = self.stack.pop() {
                    // Near returns stay within their mode.
                    if self.region_mode(back) == self.region_mode(place) && !random.one_in(30) {
                        to = back;
                        break;
                    }
                }
                if on && !self.leaves(to) {
                    self.tracer.ret(program.start(to));
                }
                to
            }
            Term::Far => {
                let to = program.anywhere(random, true);
                if on {
                    // Behind a MOV to CR3 it would not be clear which of the two ended tracing.
                    if self.plan.events.is_some() && place.0 != KERNEL && random.one_in(4) {
                        self.tracer.disable(None);
                        self.on = false;
                    } else {
                        let mode = self.mode_change(to);
                        self.tracer.far(program.start(to), mode);
                    }
                }
                to
            }
        }
    }
}
