//! Where a processor stands: what packets are made of, kept for the time when they are made.

use x86::fault::PageFaultCode;
use x86::watch::{BadPhys, CodeSize, Context, PageFault, Processor, TraceMem};

/// A processor at the moment of a callback, with virtual ticks in place of its TSC. The observer's unit asks for nothing else: its packets
/// do not go to the guest's memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Standing {
    context: Context,
    rip: u64,
    step: u64,
    tick: u64,
}

impl Standing {
    /// Where it stands now; `offset`: how far its TSC is ahead of virtual ticks.
    pub fn of(cpu: &mut dyn Processor, offset: u64) -> Standing {
        Standing {
            context: cpu.context(),
            rip: cpu.rip(),
            step: cpu.step(),
            tick: cpu.tsc().wrapping_sub(offset),
        }
    }

    /// The linear address of the next instruction.
    pub fn next_ip(&self) -> u64 {
        match self.context.code {
            CodeSize::Bits64 => self.rip,
            CodeSize::Bits16 | CodeSize::Bits32 => self.rip.wrapping_add(self.context.cs_base) & 0xffff_ffff,
        }
    }

    /// Virtual ticks.
    pub fn tick(&self) -> u64 {
        self.tick
    }
}

impl TraceMem for Standing {
    fn read_linear(&mut self, address: u64, _: &mut [u8]) -> Result<(), PageFault> {
        self.probe_linear(address, 0)
    }
    fn probe_linear(&mut self, address: u64, _: u64) -> Result<(), PageFault> {
        Err(PageFault {
            address,
            code: PageFaultCode::from_bits(0),
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

impl Processor for Standing {
    fn gpr(&self, _: u8) -> u64 {
        0
    }
    fn xmm(&self, _: u8) -> u128 {
        0
    }
    fn rip(&self) -> u64 {
        self.rip
    }
    fn rflags(&self) -> u64 {
        0
    }
    fn context(&self) -> Context {
        self.context
    }
    fn retired(&self) -> u64 {
        0
    }
    fn step(&self) -> u64 {
        self.step
    }
    fn tsc(&mut self) -> u64 {
        self.tick
    }
}
