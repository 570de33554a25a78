//! The debug registers: what they have the executor watch, and what of it is a debug exception. SDM Vol. 3B 18.2 "Debug
//! Registers", 18.3.1 "Debug Exception (#DB)—Interrupt Vector 1".
//!
//! # Theory
//! Four addresses, each with what is watched there. An instruction breakpoint is a fault, before the instruction; a data or
//! I/O breakpoint is a trap, after it. RF, single-stepping, general detection, the task-switch trap and the order of traps
//! belong to the instructions, and so to the executor.
//!
//! # Practice
//! The registers themselves are the processor's: [`Dr`] only knows what follows from them. Addresses of instruction
//! breakpoints are [boundaries](Dr::boundaries), those of data and ports [ranges](Dr::ranges); DR6 gets its bits through
//! [`Effects::debug`]. Once one enabled breakpoint is met, DR6 shows every breakpoint whose condition is met, enabled or
//! not (18.2.3 "Debug Status Register (DR6)").

use x86::debug::{Breakpoint, Dr7, Watched};
use x86::watch::{Access, AccessKind, Effects, Interest, Processor, Range};

/// CR4.DE.
const DE: u64 = 1 << 3;

/// The four breakpoints of one logical processor.
#[derive(Clone, Debug, Default)]
pub struct Dr {
    /// DR0 to DR3, DR7 and CR4.DE that the rest follows from.
    seen: ([u64; 4], u64, bool),
    breakpoints: [Option<Breakpoint>; 4],
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    generation: u64,
}

impl Dr {
    /// As after power-up: nothing is watched.
    pub fn new() -> Self {
        Self::default()
    }

    /// What the executor has to say. To be asked after every write of a debug register or CR4.
    pub fn interest(&mut self, cpu: &dyn Processor) -> Interest {
        let addresses = [0, 1, 2, 3].map(|n| cpu.debug_register(n));
        let now = (addresses, cpu.debug_register(7), cpu.cr4() & DE != 0);
        if now != self.seen {
            self.seen = now;
            self.plan();
        }
        Interest {
            ranges: !self.ranges.is_empty(),
            ..Interest::NOTHING
        }
    }

    /// Linear addresses of instruction breakpoints.
    pub fn boundaries(&self) -> &[u64] {
        &self.boundaries
    }

    /// What data and I/O breakpoints watch.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Moves with `boundaries` and `ranges`.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    fn plan(&mut self) {
        let (addresses, dr7, extensions) = self.seen;
        let dr7 = Dr7::from_bits(dr7);
        self.breakpoints = [0, 1, 2, 3].map(|n| dr7.breakpoint(n, addresses[usize::from(n)], extensions));
        let (mut boundaries, mut ranges) = (Vec::new(), Vec::new());
        for b in self.breakpoints.iter().flatten().filter(|b| b.enabled) {
            if b.watched == Watched::Execute {
                boundaries.push(b.first);
                continue;
            }
            ranges.push(Range {
                first: b.first,
                last: b.first.wrapping_add(b.len - 1),
                ports: b.watched == Watched::Port,
                reads: b.watched != Watched::Write,
                writes: true,
            });
        }
        boundaries.sort_unstable();
        boundaries.dedup();
        if (&boundaries, &ranges) != (&self.boundaries, &self.ranges) {
            (self.boundaries, self.ranges) = (boundaries, ranges);
            self.generation += 1;
        }
    }

    /// `Watch` callback: the instruction at this address is about to run.
    pub fn before(&self, address: u64) -> Effects {
        self.met(|b| b.watched == Watched::Execute && b.first == address)
    }

    /// `Watch` callback: an instruction that has retired made this access.
    pub fn access(&self, access: &Access) -> Effects {
        let size = u64::from(access.size);
        self.met(|b| {
            let kind = match access.kind {
                AccessKind::Read => b.watched == Watched::ReadWrite,
                AccessKind::Write | AccessKind::ReadWrite => matches!(b.watched, Watched::Write | Watched::ReadWrite),
                AccessKind::PortRead | AccessKind::PortWrite => b.watched == Watched::Port,
            };
            kind && b.touches(access.address, size)
        })
    }

    fn met(&self, met: impl Fn(&Breakpoint) -> bool) -> Effects {
        let (mut bits, mut enabled) = (0, false);
        for (n, b) in self.breakpoints.iter().enumerate() {
            if let Some(b) = b
                && met(b)
            {
                bits |= 1 << n;
                enabled |= b.enabled;
            }
        }
        Effects {
            debug: enabled.then_some(bits),
            ..Effects::NONE
        }
    }
}
