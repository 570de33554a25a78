//! Looking at a CPU between two steps without leaving a trace in it, and writing its MSRs.

use x86::{
    msr::MsrFault,
    watch::{BadPhys, Context, PageFault, Processor, TraceMem},
};

use super::parts::Vm;

/// A processor of which nothing is changed: no accessed bit is set by reading its memory, and nothing is written.
struct Glance<'a>(&'a mut dyn Processor);

fn missing(address: u64) -> PageFault {
    PageFault {
        address,
        code: x86::fault::PageFaultCode::from_bits(0),
    }
}

impl TraceMem for Glance<'_> {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        for (byte, at) in bytes.iter_mut().zip(0..) {
            let la = la.wrapping_add(at);
            let physical = self.0.physical(la).ok_or(missing(la))?;
            let read = self.0.read_phys(physical, std::slice::from_mut(byte));
            // As the bus answers where nobody is.
            if read.is_err() {
                *byte = 0xff;
            }
        }
        Ok(())
    }

    fn probe_linear(&mut self, la: u64, _: u64) -> Result<(), PageFault> {
        Err(missing(la))
    }

    fn write_linear(&mut self, la: u64, _: &[u8]) -> Result<(), PageFault> {
        Err(missing(la))
    }

    fn read_phys(&mut self, pa: u64, bytes: &mut [u8]) -> Result<(), BadPhys> {
        self.0.read_phys(pa, bytes)
    }

    fn write_phys(&mut self, pa: u64, _: &[u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }
}

impl Processor for Glance<'_> {
    fn gpr(&self, number: u8) -> u64 {
        self.0.gpr(number)
    }
    fn xmm(&self, number: u8) -> u128 {
        self.0.xmm(number)
    }
    fn rip(&self) -> u64 {
        self.0.rip()
    }
    fn rflags(&self) -> u64 {
        self.0.rflags()
    }
    fn context(&self) -> Context {
        self.0.context()
    }
    fn debug_register(&self, number: u8) -> u64 {
        self.0.debug_register(number)
    }
    fn cr4(&self) -> u64 {
        self.0.cr4()
    }
    fn physical(&mut self, linear: u64) -> Option<u64> {
        self.0.physical(linear)
    }
    fn retired(&self) -> u64 {
        self.0.retired()
    }
    fn step(&self) -> u64 {
        self.0.step()
    }
    fn tsc(&mut self) -> u64 {
        self.0.tsc()
    }
}

impl Vm {
    /// Looks at a CPU as its watchers see it, without changing it; `None` if there is no such CPU.
    pub(crate) fn look<T>(&mut self, cpu: usize, f: impl FnOnce(&mut dyn Processor) -> T) -> Option<T> {
        self.soft
            .look(cpu, &mut self.machine, |_, processor| f(&mut Glance(processor)))
    }

    /// What RDMSR would read on a CPU now. Nothing in the guest changes by it.
    ///
    /// # Errors
    /// The instruction would be #GP, or there is no such CPU.
    pub fn peek_msr(&mut self, cpu: usize, msr: u32) -> Result<u64, MsrFault> {
        if let Some(value) = self.soft.cpu(cpu).and_then(|cpu| cpu.held_msr(msr)) {
            return Ok(value);
        }
        self.soft
            .look(cpu, &mut self.machine, |bus, processor| {
                bus.peek_msr(msr, &mut Glance(processor))
            })
            .unwrap_or(Err(MsrFault::GeneralProtection))
    }

    /// WRMSR on a CPU.
    ///
    /// # Errors
    /// The instruction would be #GP, and nothing is written; or there is no such CPU.
    pub fn write_msr(&mut self, cpu: usize, msr: u32, value: u64) -> Result<(), MsrFault> {
        let written = self.soft.write_msr(cpu, msr, value, &mut self.machine);
        self.changed = true;
        written
    }

    /// What CPUID would show on a CPU now; zeroes if there is no such CPU.
    pub fn peek_cpuid(&self, cpu: usize, leaf: u32, subleaf: u32) -> [u32; 4] {
        match self.soft.cpu(cpu) {
            Some(core) => core.cpuid_now(leaf, subleaf, self.machine.peek_cpuid(cpu, leaf, subleaf)),
            None => [0; 4],
        }
    }
}
