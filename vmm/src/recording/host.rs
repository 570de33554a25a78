//! The processor as the observer's unit sees it.

use x86::watch::{BadPhys, Context, PageFault, Processor, TraceMem};

/// The processor with virtual ticks in place of its TSC.
pub(super) struct Host<'a> {
    pub cpu: &'a mut dyn Processor,
    /// How far its TSC is ahead of them.
    pub offset: u64,
}

impl TraceMem for Host<'_> {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        self.cpu.read_linear(la, bytes)
    }
    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault> {
        self.cpu.probe_linear(la, len)
    }
    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault> {
        self.cpu.write_linear(la, bytes)
    }
    fn read_phys(&mut self, pa: u64, bytes: &mut [u8]) -> Result<(), BadPhys> {
        self.cpu.read_phys(pa, bytes)
    }
    fn write_phys(&mut self, pa: u64, bytes: &[u8]) -> Result<(), BadPhys> {
        self.cpu.write_phys(pa, bytes)
    }
}

impl Processor for Host<'_> {
    fn gpr(&self, number: u8) -> u64 {
        self.cpu.gpr(number)
    }
    fn xmm(&self, number: u8) -> u128 {
        self.cpu.xmm(number)
    }
    fn rip(&self) -> u64 {
        self.cpu.rip()
    }
    fn rflags(&self) -> u64 {
        self.cpu.rflags()
    }
    fn context(&self) -> Context {
        self.cpu.context()
    }
    fn physical(&mut self, linear: u64) -> Option<u64> {
        self.cpu.physical(linear)
    }
    fn retired(&self) -> u64 {
        self.cpu.retired()
    }
    fn step(&self) -> u64 {
        self.cpu.step()
    }
    fn tsc(&mut self) -> u64 {
        self.cpu.tsc().wrapping_sub(self.offset)
    }
}

/// Guest memory as a processor reaches it.
pub(super) struct Physical<'a>(pub &'a mut dyn Processor);

impl trace::linux::Memory for Physical<'_> {
    fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.0.read_phys(gpa, bytes).is_ok()
    }

    /// The kernel is looked for elsewhere.
    fn ram(&self) -> Vec<std::ops::Range<u64>> {
        Vec::new()
    }
}

/// No processor at all: registers are written before there is one.
pub(super) struct Nobody;

impl TraceMem for Nobody {
    fn read_linear(&mut self, address: u64, _: &mut [u8]) -> Result<(), PageFault> {
        self.probe_linear(address, 0)
    }
    fn probe_linear(&mut self, address: u64, _: u64) -> Result<(), PageFault> {
        Err(PageFault {
            address,
            code: x86::fault::PageFaultCode::from_bits(0),
        })
    }
    fn write_linear(&mut self, address: u64, _: &[u8]) -> Result<(), PageFault> {
        self.probe_linear(address, 0)
    }
    fn read_phys(&mut self, address: u64, _: &mut [u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address })
    }
    fn write_phys(&mut self, address: u64, _: &[u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address })
    }
}

impl Processor for Nobody {
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
        0
    }
    fn context(&self) -> Context {
        Context::default()
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
