//! What the threads of a machine on KVM share: one lock for the machine, and what is known of each CPU.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use devices::platform::Effect;
use engine::bus::Bus;
use engine::{CpuState, Event};
use kvm_ioctls::VcpuFd;
use machine::{Machine, exits::Exits};
use vmm_sys_util::eventfd::EventFd;

use crate::error::KvmError;
use crate::guest_debug::Hit;
use crate::hypervisor::Hypervisor;
use crate::sys::lock;
use crate::view::View;

/// Why the CPUs came back from KVM.
#[derive(Debug)]
pub enum NativeEnd {
    /// The calling thread wanted it.
    Asked,
    /// Devices, or other CPUs, want something of the machine: [`Native::effects`].
    Effects,
    /// A unit of this CPU has to see instructions.
    Instructions(usize),
    /// KVM cannot execute this CPU's next instruction.
    Emulation(usize),
    /// Triple fault of this CPU.
    Shutdown(usize),
    /// This CPU has met a debug exception, [`Native::hits`].
    Debug(usize),
    /// All CPUs are halted, and nothing is there to wake one.
    Halted,
    /// They have come to their [`Limit`](crate::hypervisor::Limit).
    Limit,
    /// A fault of ours, while the engine executed an instruction of this CPU: what went wrong.
    Defect(usize, String),
    /// KVM failed with this CPU.
    Failed(usize, KvmError),
}

/// How a run in KVM went.
#[derive(Debug)]
pub struct Native<T> {
    /// Why it ended.
    pub why: NativeEnd,
    /// What is wanted of the machine.
    pub effects: Vec<Effect>,
    /// CPUs that met debug exceptions while breakpoints of the host's were [set](Hypervisor::arm).
    pub hits: Vec<(usize, Hit)>,
    /// What the calling thread has to say.
    pub outcome: T,
}

impl Counts {
    /// The same as plain numbers.
    pub fn exits(&self) -> Exits {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Exits {
            budget: read(&self.kicks),
            bus: read(&self.bus),
            window: read(&self.window),
            halt: read(&self.halt),
            pause: 0,
            interrupts: read(&self.interrupts),
            nmis: read(&self.nmis),
            debug: read(&self.debug),
        }
    }

    /// The software engine has had the machine for so long.
    pub fn add_in_engine(&self, time: Duration) {
        self.in_engine.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// How often the CPUs came out of the guest.
#[derive(Debug, Default)]
pub struct Counts {
    /// Accesses to devices and MSRs.
    pub bus: AtomicU64,
    /// Interrupts became deliverable.
    pub window: AtomicU64,
    /// HLT.
    pub halt: AtomicU64,
    /// Kicks.
    pub kicks: AtomicU64,
    /// Interrupts delivered.
    pub interrupts: AtomicU64,
    /// NMIs delivered.
    pub nmis: AtomicU64,
    /// Debug exceptions while the host has breakpoints.
    pub debug: AtomicU64,
    /// Instructions that the software engine executed since KVM cannot.
    pub emulated: AtomicU64,
    /// Nanoseconds of wall time in the software engine.
    pub in_engine: AtomicU64,
}

/// What the threads of a running machine share.
pub struct Running<'a> {
    pub(crate) hypervisor: &'a Hypervisor,
    pub(crate) machine: Mutex<&'a mut Machine>,
    /// Notified, with `machine` locked, when something may wake a halted CPU.
    pub(crate) changed: Condvar,
    pub(crate) why: Mutex<Option<NativeEnd>>,
    pub(crate) effects: Mutex<Vec<Effect>>,
    pub(crate) hits: Mutex<Vec<(usize, Hit)>>,
    pub(crate) over: AtomicBool,
    /// Wakes the calling thread.
    pub(crate) wake: &'a EventFd,
    /// When the calling thread looks at the machine next, in nanoseconds of its clock.
    pub(crate) deadline: AtomicU64,
    /// The step at which the engine left off, which the clock counts on from.
    pub(crate) steps: AtomicU64,
    pub(crate) cpus: Vec<Local>,
    pub(crate) counts: &'a Counts,
    /// So often CPUs still come out of KVM until the run is over.
    pub(crate) left: AtomicU64,
    pub(crate) asleep: Asleep,
    pub(crate) lent: Mutex<LentState>,
    /// The calling thread has to execute something.
    pub(crate) is_lent: AtomicBool,
}

/// What the threads know of each CPU.
pub(crate) struct Local {
    pub(crate) halted: AtomicBool,
    /// The CPU is in a wait for its start-up IPI, and no thread runs it.
    pub(crate) waits: bool,
    /// It knows that an interrupt waits, or is about to look.
    pub(crate) irq_notified: AtomicBool,
    /// The same of an NMI.
    pub(crate) nmi_notified: AtomicBool,
    /// HLT with interrupts off: only an NMI ends that.
    pub(crate) interrupts_masked: AtomicBool,
    /// It is halted in KVM, and a timer that its own APIC has there will wake it.
    pub(crate) armed: AtomicBool,
    /// The instructions that the engine has retired for it.
    pub(crate) retired: AtomicU64,
    /// Its next instruction is for the engine.
    pub(crate) emulates: AtomicBool,
    /// Up to this tick of the clock its counters have counted, if it has been running since.
    pub(crate) counted: AtomicU64,
    /// When one of them overflows if it goes on running, in nanoseconds of the clock.
    pub(crate) overflow: AtomicU64,
    /// Its state at the beginning.
    pub(crate) before: CpuState,
    /// `None`: it has not been there.
    pub(crate) after: Mutex<Option<After>>,
}

/// A CPU's state after its visit to KVM and the event that KVM was in the middle of delivering; or what KVM refused.
pub(crate) type After = Result<(CpuState, Option<Event>), KvmError>;

/// What is known of CPUs that KVM halts.
#[derive(Debug, Default)]
pub struct Asleep {
    /// The calling thread looks rarely, and wants to hear of the next access.
    pub(crate) quiet: AtomicBool,
    /// Accesses when it looked last.
    pub(crate) accesses: AtomicU64,
    /// They have been asked since the last access.
    pub(crate) asked: AtomicBool,
    /// How often in a row all were found halted for good.
    pub(crate) found: AtomicU64,
}

/// Where a CPU's state is, as far as it is lent.
#[derive(Debug, Default)]
pub(crate) enum LentState {
    /// With its own thread.
    #[default]
    None,
    /// With the calling thread, from this state on, and with an event that KVM was in the middle of delivering.
    Lent(Box<CpuState>, Option<Event>),
    /// On its way back.
    Returned(Box<CpuState>),
}

impl<'a> Running<'a> {
    /// The machine, with its clock at the present.
    pub fn machine(&self) -> MutexGuard<'_, &'a mut Machine> {
        let mut machine = lock(&self.machine);
        machine.clock().follow(self.hypervisor.clock.ticks(), self.steps());
        machine
    }

    /// The step that the clock counts from.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::SeqCst)
    }

    /// Ends the run, for this reason unless there is one already.
    pub fn stop(&self, why: NativeEnd) {
        // Under the lock, so that nobody is between looking and waiting.
        let machine = lock(&self.machine);
        self.stop_locked(why);
        drop(machine);
    }

    /// The same, of whoever holds the machine.
    pub(super) fn stop_locked(&self, why: NativeEnd) {
        lock(&self.why).get_or_insert(why);
        self.over.store(true, Ordering::SeqCst);
        for cpu in &self.hypervisor.cpus {
            cpu.kick.kick();
        }
        self.changed.notify_all();
        let _ = self.wake.write(1);
    }

    /// The run is over.
    pub fn over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Does what is due, tells CPUs of their interrupts, and says when the next thing is due, in nanoseconds of the clock.
    /// Called by whoever has changed something.
    pub fn run_due_events(&self, machine: &mut Machine, own: Option<usize>) -> Option<u64> {
        let effects = machine.advance(self.steps());
        // Nothing of the engine is running that would have to hear of it; it forgets all code when it does.
        machine.take_written();
        machine.platform().take_sent();
        if !effects.is_empty() {
            lock(&self.effects).extend(effects);
            self.stop_locked(NativeEnd::Effects);
        }
        let mut woken = false;
        for (index, local) in self.cpus.iter().enumerate() {
            let platform = machine.platform();
            if Some(index) == own || !(platform.interrupt_pending(index) || platform.nmi_pending(index)) {
                continue;
            }
            if local.halted.load(Ordering::SeqCst) {
                woken = true;
            } else if !local.waits {
                // One that knows of an interrupt that it lets in later knows nothing of an NMI.
                let flag = if platform.nmi_pending(index) {
                    &local.nmi_notified
                } else {
                    &local.irq_notified
                };
                if !flag.swap(true, Ordering::SeqCst) {
                    self.hypervisor.cpus[index].kick.kick();
                }
            }
        }
        if woken {
            self.changed.notify_all();
        }
        let mut next = machine.next_event();
        if let Some((index, overflow)) = self.next_overflow() {
            if overflow <= machine.clock().ns(self.steps()) {
                self.stop_locked(NativeEnd::Instructions(index));
            }
            next = Some(next.map_or(overflow, |next| next.min(overflow)));
        }
        if next.unwrap_or(u64::MAX) < self.deadline.load(Ordering::SeqCst) && own.is_some() {
            let _ = self.wake.write(1);
        }
        next
    }

    /// The running CPU whose counters overflow first, and when.
    fn next_overflow(&self) -> Option<(usize, u64)> {
        if !self.hypervisor.has_rdpmc {
            return None;
        }
        let all = self
            .cpus
            .iter()
            .map(|local| local.overflow.load(Ordering::SeqCst))
            .enumerate();
        all.filter(|(_, at)| *at != u64::MAX).min_by_key(|(_, at)| *at)
    }

    /// A CPU, which the machine's bus answers, begins to run.
    pub(crate) fn begins(&self, index: usize, machine: &mut Machine) {
        let local = &self.cpus[index];
        let clock = machine.clock();
        let (ticks, left) = (clock.ticks(self.steps()), machine.cycles_left(index));
        let overflow = left.map_or(u64::MAX, |left| machine.clock().ns_of(ticks.saturating_add(left)));
        local.counted.store(ticks, Ordering::SeqCst);
        local.overflow.store(overflow, Ordering::SeqCst);
    }

    /// A CPU, which the machine's bus answers and which has been running, halts, leaves, or is about to say what its counters hold,
    /// and begins anew.
    pub(crate) fn has_run(&self, index: usize, halted: bool, machine: &mut Machine, view: &mut View<'_>) {
        let local = &self.cpus[index];
        let ticks = machine.clock().ticks(self.steps());
        machine
            .cpu(index)
            .elapsed(ticks.saturating_sub(local.counted.load(Ordering::SeqCst)), halted, view);
        if halted {
            local.overflow.store(u64::MAX, Ordering::SeqCst);
        }
    }

    /// The CPU whose exit is being served.
    pub(super) fn view<'v>(&'v self, index: usize, vcpu: &'v VcpuFd, machine: &mut Machine) -> View<'v> {
        let counts = [self.cpus[index].retired.load(Ordering::SeqCst), self.steps()];
        View::new(
            vcpu,
            &self.hypervisor.memory,
            machine.cpu(index).tsc(self.steps()),
            counts,
        )
    }

    /// Says when the calling thread is going to look again.
    pub fn look_at(&self, deadline: Option<u64>) {
        self.deadline.store(deadline.unwrap_or(u64::MAX), Ordering::SeqCst);
    }
}
