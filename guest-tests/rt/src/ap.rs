//! The other CPUs: started one by one, then waiting for work.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use crate::{apic, boot, cpu, exception, time};

/// The most CPUs that an image uses.
pub const MAX_CPUS: usize = 8;

const STACK: usize = 32768;

static mut STACKS: [[u8; STACK]; MAX_CPUS] = [[0; STACK]; MAX_CPUS];
static STARTED: AtomicUsize = AtomicUsize::new(1);
/// The others have been looked for.
static LOOKED: AtomicBool = AtomicBool::new(false);
/// The routine that a CPU is to run, 0 while it has none.
static WORK: [AtomicUsize; MAX_CPUS] = [const { AtomicUsize::new(0) }; MAX_CPUS];
static IDS: [AtomicU32; MAX_CPUS] = [const { AtomicU32::new(0) }; MAX_CPUS];

/// The vector that wakes a CPU without work. Its interrupt is acknowledged, and that is all.
pub(crate) const WAKE: u8 = 0xFD;

/// All CPUs of the machine, started.
pub struct Cpus(());

impl Cpus {
    /// Starts the others by INIT and start-up IPIs to the APIC IDs above the boot CPU's. SDM Vol. 3A 9.4.4.1 "Typical BSP
    /// Initialization Sequence".
    pub fn start() -> Self {
        apic::enable();
        if LOOKED.swap(true, Ordering::SeqCst) {
            return Self(());
        }
        IDS[0].store(apic::id(), Ordering::SeqCst);
        (1..MAX_CPUS).find(|id| !start(*id, *id as u32));
        Self(())
    }

    /// Resets a CPU by INIT, whatever it is doing, and starts it again.
    pub fn restart(&self, cpu: usize) {
        let count = STARTED.swap(cpu, Ordering::SeqCst);
        WORK[cpu].store(0, Ordering::SeqCst);
        assert!(start(cpu, self.id(cpu)), "CPU {cpu} starts again");
        STARTED.store(count, Ordering::SeqCst);
    }

    /// How many there are, the boot CPU included.
    pub fn count(&self) -> usize {
        STARTED.load(Ordering::SeqCst)
    }

    /// The APIC ID of a CPU.
    pub fn id(&self, cpu: usize) -> u32 {
        IDS[cpu].load(Ordering::SeqCst)
    }

    /// Has a CPU run this while the caller goes on.
    pub fn begin(&self, cpu: usize, work: fn()) {
        self.wait(cpu);
        WORK[cpu].store(work as usize, Ordering::SeqCst);
        apic::send(u32::from(WAKE), self.id(cpu));
    }

    /// Waits until a CPU has nothing to do.
    pub fn wait(&self, cpu: usize) {
        while WORK[cpu].load(Ordering::SeqCst) != 0 {
            cpu::pause();
        }
    }

    /// Has a CPU run this and waits for it.
    pub fn run(&self, cpu: usize, work: fn()) {
        self.begin(cpu, work);
        self.wait(cpu);
    }
}

/// Starts the CPU with this APIC ID, which is the one after those that are counted as started; whether it arrived.
fn start(this: usize, id: u32) -> bool {
    let stack = core::ptr::addr_of!(STACKS) as u64 + (STACK * (this + 1)) as u64;
    boot::prepare_start(stack);
    apic::send(apic::ICR_INIT, id);
    time::wait(200);
    apic::send(apic::ICR_STARTUP | (boot::TRAMPOLINE >> 12) as u32, id);
    let end = time::Deadline::after(if cfg!(debug_assertions) { 20_000 } else { 5_000 });
    while STARTED.load(Ordering::SeqCst) == this && !end.passed() {
        cpu::pause();
    }
    STARTED.load(Ordering::SeqCst) != this
}

/// Where another CPU arrives in 64-bit mode, on a stack of its own.
#[unsafe(no_mangle)]
extern "C" fn other_cpu() -> ! {
    let this = STARTED.load(Ordering::SeqCst);
    exception::load(this);
    apic::enable();
    IDS[this].store(apic::id(), Ordering::SeqCst);
    STARTED.store(this + 1, Ordering::SeqCst);
    loop {
        let work = WORK[this].load(Ordering::SeqCst);
        if work != 0 {
            // SAFETY: only `begin` stores there, and it stores a routine of this type.
            let work: fn() = unsafe { core::mem::transmute(work) };
            work();
            WORK[this].store(0, Ordering::SeqCst);
            continue;
        }
        // Interrupts are open in HLT alone, so that a wake-up between the look and the halt is not lost.
        cpu::halt();
    }
}
