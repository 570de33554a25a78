//! Hand-written branches for the tests of the units that record them.

use x86::watch::{BadPhys, BranchRecord, CodeSize, Context, EventRecord, Far, Flow, PageFault, Processor, TraceMem};

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
        debug: vector == 1 && branch.flow != Flow::Far(Far::SoftwareInterrupt).code(),
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

/// A processor that stands still in 64-bit code of ring 0, with one page of memory at [`Still::AREA`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Still {
    page: Vec<u8>,
}

impl Still {
    /// Where its page is: a management area, and the buffer behind it.
    pub const AREA: u64 = 0x8000;

    /// With a management area for four records of 24 bytes.
    pub fn with_buffer() -> Self {
        let mut page = vec![0; 4096];
        let start = Self::AREA + 0x100;
        for (at, value) in [(0, start), (8, start), (16, start + 96), (24, start + 96)] {
            page[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        Self { page }
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.page[at..at + 8].try_into().unwrap())
    }

    /// From and to of the records up to the index.
    pub fn stored(&self) -> Vec<[u64; 2]> {
        let index = self.word(8) - Self::AREA;
        (0x100..index as usize)
            .step_by(24)
            .map(|at| [self.word(at), self.word(at + 8)])
            .collect()
    }

    fn range(&self, la: u64, len: u64, write: bool) -> Result<std::ops::Range<usize>, PageFault> {
        let start = la.wrapping_sub(Self::AREA);
        if start.saturating_add(len) <= self.page.len() as u64 {
            Ok(start as usize..(start + len) as usize)
        } else {
            Err(PageFault {
                address: la,
                code: x86::fault::PageFaultCode::new().with_write(write),
            })
        }
    }
}

impl TraceMem for Still {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        let range = self.range(la, bytes.len() as u64, false)?;
        bytes.copy_from_slice(&self.page[range]);
        Ok(())
    }

    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault> {
        self.range(la, len, true).map(drop)
    }

    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault> {
        let range = self.range(la, bytes.len() as u64, true)?;
        self.page[range].copy_from_slice(bytes);
        Ok(())
    }

    fn read_phys(&mut self, pa: u64, _: &mut [u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }

    fn write_phys(&mut self, pa: u64, _: &[u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }
}

impl Processor for Still {
    fn gpr(&self, _: u8) -> u64 {
        0
    }

    fn xmm(&self, _: u8) -> u128 {
        0
    }

    fn rip(&self) -> u64 {
        0
    }

    fn rflags(&self) -> u64 {
        2
    }

    fn context(&self) -> Context {
        long(0)
    }

    fn retired(&self) -> u64 {
        0
    }

    fn step(&self) -> u64 {
        0
    }

    fn tsc(&mut self) -> u64 {
        0
    }
}
