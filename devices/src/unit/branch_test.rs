//! Hand-written branches for the tests of the units that record them.

use x86::seam::{BranchRecord, CodeSize, Context, EventRecord, Far, Flow};

/// Where 64-bit code runs, in this ring.
pub fn long(cpl: u8) -> Context {
    Context {
        cpl,
        code: CodeSize::Bits64,
        long_mode: true,
        paging: true,
        ..Context::default()
    }
}

/// Where 32-bit code runs whose segment has this base.
pub fn segment(cs_base: u64) -> Context {
    Context {
        code: CodeSize::Bits32,
        cs_base,
        ..Context::default()
    }
}

/// A branch of two bytes within a ring.
pub fn branch(flow: Flow, from: u64, to: u64, cpl: u8) -> BranchRecord {
    BranchRecord {
        from,
        to,
        flow: flow.code(),
        length: 2,
        from_cpl: cpl,
        to_cpl: cpl,
        ..BranchRecord::default()
    }
}

/// The same at a step of the clock.
pub fn at(step: u64, record: BranchRecord) -> BranchRecord {
    BranchRecord { step, ..record }
}

/// A far transfer between rings.
pub fn far(kind: Far, from: u64, to: u64, from_cpl: u8, to_cpl: u8) -> BranchRecord {
    BranchRecord {
        from_cpl,
        to_cpl,
        ..branch(Flow::Far(kind), from, to, 0)
    }
}

/// The delivery of a vector.
pub fn event(vector: u8, branch: BranchRecord) -> EventRecord {
    EventRecord {
        branch,
        vector,
        error: None,
        address: None,
    }
}

/// A generator of numbers for tests: xorshift.
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }

    /// Near branches in ring `cpl`, some of them not taken, as a small program would make them.
    pub fn near(&mut self, count: usize, cpl: u8, step: &mut u64) -> Vec<BranchRecord> {
        (0..count)
            .map(|_| {
                *step += 1 + self.below(40);
                let flow = Flow::ALL[self.below(7) as usize];
                let from = 0x40_0000 + self.below(32) * 0x10;
                // A call to the next instruction now and then.
                let to = if self.below(8) == 0 {
                    from + 2
                } else {
                    0x40_0000 + self.below(32) * 0x10
                };
                at(*step, branch(flow, from, to, cpl))
            })
            .collect()
    }
}
