//! A CPU in KVM as the units see it, in an access to one of their registers.
//!
//! Registers are fetched when a unit asks for them, and most never do.

use std::cell::OnceCell;

use engine::CpuState;
use kvm_bindings::{kvm_debugregs, kvm_regs, kvm_sregs, kvm_xsave};
use kvm_ioctls::VcpuFd;
use x86::fault::PageFaultCode;
use x86::watch::{BadPhys, CodeSize, Context, PageFault, Processor, TraceMem};

use machine::{memory::Memory, walk};

/// Length of RDMSR and WRMSR.
const ACCESS: u64 = 2;

/// A CPU that has come out of KVM_RUN at RDMSR or WRMSR.
pub struct View<'a> {
    vcpu: &'a VcpuFd,
    memory: &'a Memory,
    tsc: u64,
    counts: [u64; 2],
    regs: OnceCell<kvm_regs>,
    sregs: OnceCell<kvm_sregs>,
    debug: OnceCell<kvm_debugregs>,
    xsave: OnceCell<Box<kvm_xsave>>,
}

impl<'a> View<'a> {
    /// The CPU, when RDTSC would read `tsc`. `counts`: the instructions that the engine has retired for it, and where the
    /// machine's step clock is.
    pub fn new(vcpu: &'a VcpuFd, memory: &'a Memory, tsc: u64, counts: [u64; 2]) -> Self {
        View {
            vcpu,
            memory,
            tsc,
            counts,
            regs: OnceCell::new(),
            sregs: OnceCell::new(),
            debug: OnceCell::new(),
            xsave: OnceCell::new(),
        }
    }

    // These ioctls fail for a vCPU that another thread runs, and this thread is the one that runs it.
    fn regs(&self) -> &kvm_regs {
        self.regs.get_or_init(|| self.vcpu.get_regs().unwrap_or_default())
    }

    fn sregs(&self) -> &kvm_sregs {
        self.sregs.get_or_init(|| self.vcpu.get_sregs().unwrap_or_default())
    }

    fn debug(&self) -> &kvm_debugregs {
        self.debug
            .get_or_init(|| self.vcpu.get_debug_regs().unwrap_or_default())
    }

    /// Where a byte at a linear address is.
    fn translate(&self, linear: u64) -> Option<u64> {
        let s = self.sregs();
        let state = CpuState {
            cr0: s.cr0.into(),
            cr3: s.cr3,
            cr4: s.cr4.into(),
            efer: s.efer.into(),
            ..CpuState::default()
        };
        walk::translate(self.memory, &state, linear)
    }
}

fn fault(address: u64) -> PageFault {
    PageFault {
        address,
        code: PageFaultCode::from_bits(0),
    }
}

impl TraceMem for View<'_> {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        for (byte, at) in bytes.iter_mut().zip((0..).map(|n| la.wrapping_add(n))) {
            let pa = self.translate(at).ok_or(fault(at))?;
            let mut one = [0xff];
            let _ = self.memory.read(pa, &mut one);
            *byte = one[0];
        }
        Ok(())
    }

    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault> {
        for at in (0..len).map(|n| la.wrapping_add(n)) {
            self.translate(at).ok_or(fault(at))?;
        }
        Ok(())
    }

    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault> {
        self.probe_linear(la, bytes.len() as u64)?;
        for (byte, at) in bytes.iter().zip((0..).map(|n| la.wrapping_add(n))) {
            if let Some(pa) = self.translate(at) {
                // Where there is no RAM the bytes are lost.
                let _ = self.memory.write(pa, &[*byte]);
            }
        }
        Ok(())
    }

    fn read_phys(&mut self, pa: u64, bytes: &mut [u8]) -> Result<(), BadPhys> {
        self.memory.read(pa, bytes).map_err(|_| BadPhys { address: pa })
    }

    fn write_phys(&mut self, pa: u64, bytes: &[u8]) -> Result<(), BadPhys> {
        self.memory.write(pa, bytes).map_err(|_| BadPhys { address: pa })
    }
}

impl Processor for View<'_> {
    fn gpr(&self, number: u8) -> u64 {
        let r = self.regs();
        [
            r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14,
            r.r15,
        ][usize::from(number & 15)]
    }

    fn xmm(&self, number: u8) -> u128 {
        let area = self
            .xsave
            .get_or_init(|| Box::new(self.vcpu.get_xsave().unwrap_or_default()));
        let first = 40 + 4 * usize::from(number & 15);
        let words = area.region[first..first + 4].iter().rev();
        words.fold(0, |value, word| value << 32 | u128::from(*word))
    }

    fn rip(&self) -> u64 {
        self.regs().rip.wrapping_add(ACCESS)
    }

    fn rflags(&self) -> u64 {
        self.regs().rflags
    }

    fn context(&self) -> Context {
        let s = self.sregs();
        let (long_mode, paging) = (s.efer & 1 << 10 != 0, s.cr0 & 1 << 31 != 0);
        Context {
            // RDMSR and WRMSR run nowhere else.
            cpl: 0,
            code: match (long_mode && s.cs.l != 0, s.cs.db != 0) {
                (true, _) => CodeSize::Bits64,
                (false, true) => CodeSize::Bits32,
                (false, false) => CodeSize::Bits16,
            },
            long_mode,
            paging,
            cr3: s.cr3,
            interrupts: self.regs().rflags & 1 << 9 != 0,
            cs_base: s.cs.base,
            ..Context::default()
        }
    }

    fn debug_register(&self, number: u8) -> u64 {
        let debug = self.debug();
        match number & 7 {
            n @ 0..=3 => debug.db[usize::from(n)],
            4 | 6 => debug.dr6,
            _ => debug.dr7,
        }
    }

    fn cr4(&self) -> u64 {
        self.sregs().cr4
    }

    fn retired(&self) -> u64 {
        // Where the engine counts on from, this access is an instruction that has retired.
        self.counts[0].wrapping_sub(1)
    }

    fn step(&self) -> u64 {
        self.counts[1]
    }

    fn tsc(&mut self) -> u64 {
        self.tsc
    }
}
