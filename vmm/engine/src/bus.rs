//! The engine's whole outside world.

pub use x86::msr::MsrFault;
pub use x86::watch::{Processor, Watch};

/// Everything that is not a register of the core, RAM or an instruction.
///
/// `now` is the machine's step clock (instructions retired plus REP iterations, over all CPUs, see [`crate::Cpu::clock`]) at
/// the instruction that makes the access; for an MSR it is [`Processor::step`]. A method must not depend on anything else that varies from run to run.
///
/// Every access that may have a side effect (all but [`Bus::cpuid`], [`Bus::tsc`], [`Bus::read_msr`], [`Bus::random`]) makes
/// [`crate::Engine::run`] return [`crate::Exit::Bus`] once the instruction has retired, so that the caller can look at
/// interrupt lines and timers again.
pub trait Bus {
    /// Reads `size` (1, 2, 4 or 8) bytes of a guest-physical address that is not RAM. Unclaimed addresses read all ones.
    fn read(&mut self, gpa: u64, size: u8, now: u64) -> u64;
    /// Writes `size` (1, 2, 4 or 8) bytes to a guest-physical address that is not RAM.
    fn write(&mut self, gpa: u64, size: u8, value: u64, now: u64);
    /// IN: `size` is 1, 2 or 4. Unclaimed ports read all ones.
    fn port_read(&mut self, port: u16, size: u8, now: u64) -> u32;
    /// OUT: `size` is 1, 2 or 4.
    fn port_write(&mut self, port: u16, size: u8, value: u32, now: u64);
    /// RDMSR of a register that the core does not hold itself.
    fn read_msr(&mut self, msr: u32, cpu: &mut dyn Processor) -> Result<u64, MsrFault>;
    /// WRMSR of a register that the core does not hold itself.
    fn write_msr(&mut self, msr: u32, value: u64, cpu: &mut dyn Processor) -> Result<(), MsrFault>;
    /// RDPMC with this index in ECX, which the processor may execute at its privilege level.
    ///
    /// # Errors
    /// #GP(0): there is no such counter.
    fn read_counter(&mut self, _index: u32, _cpu: &mut dyn Processor) -> Result<u64, MsrFault> {
        Err(MsrFault::GeneralProtection)
    }
    /// CPUID as the model has it, `[eax, ebx, ecx, edx]`. The engine itself fills in what depends on the core's state
    /// (OSXSAVE, the XSAVE area's sizes).
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> [u32; 4];
    /// MONITOR and MWAIT are on (IA32_MISC_ENABLE\[18\]); else they are #UD.
    fn monitor_enabled(&mut self) -> bool {
        true
    }
    /// IA32_UMWAIT_CONTROL: bits 31:2 are the longest wait of UMWAIT and TPAUSE, in ticks of the time-stamp counter whose two lowest bits
    /// are 0; 0 for no limit.
    fn user_wait_control(&mut self) -> u64 {
        0
    }
    /// The time-stamp counter.
    fn tsc(&mut self, now: u64) -> u64;
    /// CR8, the task-priority class of the local APIC (0 to 15).
    fn cr8(&mut self) -> u64;
    /// MOV to CR8.
    fn set_cr8(&mut self, value: u64);
    /// The processor itself writes 0 to the EOI register of its local APIC, in whichever mode that is: posted-interrupt processing.
    fn end_of_interrupt(&mut self) {}
    /// RDRAND and RDSEED.
    fn random(&mut self) -> u64;
    /// XSAVES of a supervisor state component that a unit holds, by its bit in IA32_XSS (8 processor trace, 15 last-branch
    /// records): fills in the image, which is zero, and says whether the component is in use, that is, differs from its
    /// initial configuration. The image's length is the one in CPUID leaf 0DH, `length` the instruction's in bytes.
    fn save_component(&mut self, _component: u32, _image: &mut [u8], _length: u8, _cpu: &mut dyn Processor) -> bool {
        false
    }
    /// XRSTORS of such a component; `None` for its initial configuration.
    ///
    /// # Errors
    /// The image cannot be loaded: #GP(0), and nothing was.
    fn load_component(
        &mut self,
        _component: u32,
        _image: Option<&[u8]>,
        _length: u8,
        _cpu: &mut dyn Processor,
    ) -> Result<(), MsrFault> {
        Ok(())
    }
    /// The units of the processor that runs; `None` where nothing watches.
    fn watch(&mut self) -> Option<&mut dyn Watch> {
        None
    }
    /// The units ask for a performance-monitoring interrupt. The run ends with [`crate::Exit::Bus`].
    fn pmi(&mut self) {}
}
