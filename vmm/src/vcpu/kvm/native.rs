//! The guest on KVM: one thread a CPU, one lock for what they share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use devices::platform::{Effect, Platform};
use engine::bus::Bus;
use engine::{Activity, CpuState, Event};
use kvm_ioctls::VcpuFd;
use log::trace;
use vmm_sys_util::eventfd::EventFd;
use x86::debug::Dr6;
use x86::msr::{IA32_BIOS_SIGN_ID, IA32_TSC_DEADLINE, IA32_X2APIC_BASE};

use super::super::{Exits, Soft};
use super::asleep::Asleep;
use super::guestdbg::{self, Hit};
use super::loan::Loan;
use super::room::{self, Reason, lock};
use super::state;
use super::traced;
use super::view::View;
use super::{Hypervisor, Limit, Processor, irqchip, refused};
use machine::Machine;

/// Why the CPUs came back from KVM.
#[derive(Debug)]
pub enum Why {
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
    /// They have come to their [`Limit`].
    Limit,
    /// A fault of ours, while the engine executed an instruction of this CPU: what went wrong.
    Defect(usize, String),
    /// KVM failed with this CPU: its words.
    Failed(usize, String),
}

/// What a CPU's thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// It enters the guest.
    Enter,
    /// It completes an instruction, to let an interrupt in at its end.
    Complete,
    /// It was halted and has waited for a while: it looks again.
    Look,
}

/// How a run in KVM went.
#[derive(Debug)]
pub struct Native<T> {
    /// Why it ended.
    pub why: Why,
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
pub struct Shared<'a> {
    pub(super) hypervisor: &'a Hypervisor,
    machine: Mutex<&'a mut Machine>,
    /// Notified, with `machine` locked, when something may wake a halted CPU.
    pub(super) changed: Condvar,
    why: Mutex<Option<Why>>,
    effects: Mutex<Vec<Effect>>,
    hits: Mutex<Vec<(usize, Hit)>>,
    over: AtomicBool,
    /// Wakes the calling thread.
    pub(super) wake: &'a EventFd,
    /// When the calling thread looks at the machine next, in nanoseconds of its clock.
    deadline: AtomicU64,
    /// The step at which the engine left off, which the clock counts on from.
    pub(super) steps: AtomicU64,
    pub(super) cpus: Vec<Local>,
    pub(super) counts: &'a Counts,
    /// So often CPUs still come out of KVM until the run is over.
    left: AtomicU64,
    pub(super) asleep: Asleep,
    pub(super) loan: Mutex<Loan>,
    /// The calling thread has to execute something.
    pub(super) lent: AtomicBool,
}

/// What the threads know of each CPU.
pub(super) struct Local {
    pub(super) halted: AtomicBool,
    /// The CPU is in a wait for its start-up IPI, and no thread runs it.
    waits: bool,
    /// It knows that an interrupt waits, or is about to look.
    told: AtomicBool,
    /// The same of an NMI.
    told_nmi: AtomicBool,
    /// HLT with interrupts off: only an NMI ends that.
    pub(super) deaf: AtomicBool,
    /// It is halted in KVM, and a timer that its own APIC has there will wake it.
    pub(super) armed: AtomicBool,
    /// The instructions that the engine has retired for it.
    pub(super) retired: AtomicU64,
    /// Its next instruction is for the engine.
    emulates: AtomicBool,
    /// Up to this tick of the clock its counters have counted, if it has been running since.
    counted: AtomicU64,
    /// When one of them overflows if it goes on running, in nanoseconds of the clock.
    overflow: AtomicU64,
    /// Its state at the beginning.
    before: CpuState,
    /// `None`: it has not been there.
    after: Mutex<Option<After>>,
}

/// A CPU's state after its visit to KVM and the event that KVM was in the middle of delivering; or what KVM refused.
type After = Result<(CpuState, Option<Event>), String>;

/// Ends the run if its thread panics, for which the others would wait; the caller is handed the panic.
struct EndsWithThread<'a, 'b>(&'a Shared<'b>);

impl Drop for EndsWithThread<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop(Why::Asked);
        }
    }
}

impl<'a> Shared<'a> {
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
    pub fn stop(&self, why: Why) {
        // Under the lock, so that nobody is between looking and waiting.
        let machine = lock(&self.machine);
        self.stop_locked(why);
        drop(machine);
    }

    /// The same, of whoever holds the machine.
    pub(super) fn stop_locked(&self, why: Why) {
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
    pub fn settle(&self, machine: &mut Machine, own: Option<usize>) -> Option<u64> {
        let effects = machine.advance(self.steps());
        // Nothing of the engine is running that would have to hear of it; it forgets all code when it does.
        machine.take_written();
        machine.platform().take_sent();
        if !effects.is_empty() {
            lock(&self.effects).extend(effects);
            self.stop_locked(Why::Effects);
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
                    &local.told_nmi
                } else {
                    &local.told
                };
                if !flag.swap(true, Ordering::SeqCst) {
                    self.hypervisor.cpus[index].kick.kick();
                }
            }
        }
        if woken {
            self.changed.notify_all();
        }
        let mut next = machine.platform().next_event();
        if let Some((index, overflow)) = self.next_overflow() {
            if overflow <= machine.clock().ns(self.steps()) {
                self.stop_locked(Why::Instructions(index));
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
    fn begins(&self, index: usize, machine: &mut Machine) {
        let local = &self.cpus[index];
        let clock = machine.clock();
        let (ticks, left) = (clock.ticks(self.steps()), machine.cycles_left(index));
        let overflow = left.map_or(u64::MAX, |left| machine.clock().ns_of(ticks.saturating_add(left)));
        local.counted.store(ticks, Ordering::SeqCst);
        local.overflow.store(overflow, Ordering::SeqCst);
    }

    /// A CPU, which the machine's bus answers and which has been running, halts, leaves, or is about to say what its counters hold,
    /// and begins anew.
    fn has_run(&self, index: usize, halted: bool, machine: &mut Machine, view: &mut View<'_>) {
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

    /// All CPUs are halted, and none of them has anything pending that it lets in. Second: one of them listens to interrupts.
    pub fn idle(&self, machine: &mut Machine) -> (bool, bool) {
        if self.hypervisor.has_controllers() {
            return self.sleeps_for_good();
        }
        let mut listening = false;
        for (index, local) in self.cpus.iter().enumerate() {
            if local.waits {
                continue;
            }
            let deaf = local.deaf.load(Ordering::SeqCst);
            let platform = machine.platform();
            if !local.halted.load(Ordering::SeqCst)
                || platform.nmi_pending(index)
                || !deaf && platform.interrupt_pending(index)
            {
                return (false, true);
            }
            listening |= !deaf;
        }
        (true, listening)
    }

    /// A CPU's part of the run.
    fn thread(&self, index: usize) {
        let _ends = EndsWithThread(self);
        let cpu = &self.hypervisor.cpus[index];
        let mut vcpu = lock(&cpu.vcpu);
        cpu.kick.enter();
        let after = self.visit(index, cpu, &mut vcpu);
        if after.is_err() {
            self.stop(Why::Asked);
        }
        *lock(&self.cpus[index].after) = Some(after);
        cpu.kick.leave();
    }

    /// Takes a CPU into KVM and out again, as often as it is lent in between, until the run is over.
    fn visit(&self, index: usize, cpu: &Processor, vcpu: &mut VcpuFd) -> After {
        let local = &self.cpus[index];
        let (mut state, mut event) = self.stay(index, cpu, vcpu, &local.before)?;
        while local.emulates.swap(false, Ordering::SeqCst) && !self.over() {
            (state, event) = self.lend(state, event);
            if !self.over() {
                (state, event) = self.stay(index, cpu, vcpu, &state)?;
            }
        }
        Ok((state, event))
    }

    /// Takes a CPU into KVM from this state, lets it run, and takes it out again.
    fn stay(&self, index: usize, cpu: &Processor, vcpu: &mut VcpuFd, before: &CpuState) -> After {
        let local = &self.cpus[index];
        let mut machine = self.machine();
        self.hypervisor.enter(index, vcpu, before, &mut machine)?;
        if !local.halted.load(Ordering::SeqCst) {
            self.begins(index, &mut machine);
        }
        self.trace_begins(index, cpu, vcpu, &mut machine);
        drop(machine);
        self.turns(index, cpu, vcpu);
        // Before the registers come: an INIT or a start-up IPI that is there takes effect in this.
        let activity = match self.hypervisor.has_controllers() {
            true => Some(irqchip::activity(vcpu)?),
            false => None,
        };
        state::want(vcpu, true);
        while self.complete(index, cpu, vcpu) {}
        state::want(vcpu, false);
        if self.hypervisor.single_steps() {
            room::debug(vcpu, false).map_err(refused("KVM_SET_GUEST_DEBUG"))?;
        }
        let halted = local.halted.load(Ordering::SeqCst);
        let mut machine = self.machine();
        if self.hypervisor.has_rdpmc && !halted {
            let mut view = self.view(index, vcpu, &mut machine);
            self.has_run(index, halted, &mut machine, &mut view);
        }
        self.trace_ends(index, cpu, vcpu, &mut machine);
        let doing = (activity, halted);
        self.hypervisor.leave(index, vcpu, before, doing, &mut machine)
    }

    /// Lets a CPU run until the run is over. An instruction may be waiting to be completed then.
    fn turns(&self, index: usize, cpu: &Processor, vcpu: &mut VcpuFd) {
        let mut unfinished = false;
        loop {
            cpu.kick.taken();
            if self.over() || self.cpus[index].emulates.load(Ordering::SeqCst) {
                return;
            }
            self.trace_goes_on(index, cpu, vcpu);
            match self.prepare(index, vcpu, unfinished) {
                Next::Look => continue,
                Next::Complete => {
                    unfinished = self.complete(index, cpu, vcpu);
                    continue;
                }
                Next::Enter => {}
            }
            if self.hypervisor.single_steps()
                && let Err(error) = room::debug(vcpu, true)
            {
                // It is lost at POPF and at some exits.
                self.stop(Why::Failed(index, refused("KVM_SET_GUEST_DEBUG")(error)));
                return;
            }
            let reason = room::run(vcpu);
            unfinished = self.exit(index, cpu, vcpu, reason);
            let less = |left: u64| left.checked_sub(1);
            if reason != Reason::Kicked && self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) == Ok(1) {
                self.stop(Why::Limit);
            }
        }
    }

    /// What an instruction asked for has been answered: has KVM finish it. It may ask for more, which is what this says.
    fn complete(&self, index: usize, cpu: &Processor, vcpu: &mut VcpuFd) -> bool {
        cpu.kick.complete_only();
        let reason = room::run(vcpu);
        trace!("CPU {index} completes: {reason:?}");
        reason != Reason::Kicked && self.exit(index, cpu, vcpu, reason)
    }

    /// Does what an exit is for. Says whether an instruction is waiting to be completed.
    fn exit(&self, index: usize, cpu: &Processor, vcpu: &mut VcpuFd, reason: Reason) -> bool {
        let local = &self.cpus[index];
        let count = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        match reason {
            Reason::Port { .. } | Reason::Mmio { .. } | Reason::ReadMsr(_) | Reason::WriteMsr(..) => {
                count(&self.counts.bus);
                let mut machine = self.machine();
                take_cr8(machine.platform(), index, vcpu);
                let traces = self.hypervisor.traces.is_some() && traced::is_of_trace(reason);
                if traces {
                    self.trace_ends(index, cpu, vcpu, &mut machine);
                }
                let mut watched = self.serve(index, cpu, vcpu, &mut machine, reason);
                if traces {
                    watched |= !self.trace_resumes(index, cpu, vcpu, &mut machine);
                }
                vcpu.get_kvm_run().cr8 = machine.platform().cr8(index).into();
                self.settle(&mut machine, Some(index));
                drop(machine);
                self.has_asked();
                if watched {
                    self.stop(Why::Instructions(index));
                }
                return true;
            }
            Reason::Halt => {
                count(&self.counts.halt);
                if self.hypervisor.has_rdpmc {
                    let mut machine = self.machine();
                    let mut view = self.view(index, vcpu, &mut machine);
                    self.has_run(index, true, &mut machine, &mut view);
                }
                let deaf = vcpu.get_kvm_run().if_flag == 0;
                local.deaf.store(deaf, Ordering::SeqCst);
                local.halted.store(true, Ordering::SeqCst);
                // Somebody has to see when all are.
                let _ = self.wake.write(1);
            }
            Reason::Window => count(&self.counts.window),
            Reason::Kicked => {
                count(&self.counts.kicks);
                if self.hypervisor.has_controllers() {
                    self.notice(index, vcpu);
                }
            }
            Reason::Debug { dr6, .. } if !self.hypervisor.points.is_empty() => {
                count(&self.counts.debug);
                lock(&self.hits).push((index, Hit::of(dr6, self.hypervisor.points.len())));
                self.stop(Why::Debug(index));
            }
            // A step.
            Reason::Debug { .. } => {}
            Reason::Emulation if self.lends() => local.emulates.store(true, Ordering::SeqCst),
            Reason::Emulation => self.stop(Why::Emulation(index)),
            Reason::Shutdown => self.stop(Why::Shutdown(index)),
            Reason::Failure { reason, detail } => {
                let text = format!("KVM_RUN: {}", room::failure(reason, detail));
                self.stop(Why::Failed(index, text));
            }
            Reason::Refused(errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                self.stop(Why::Failed(index, refused("KVM_RUN")(error)));
            }
        }
        false
    }

    /// Hands interrupts to a CPU that is about to run. `unfinished`: KVM has an instruction of it to complete.
    fn prepare(&self, index: usize, vcpu: &mut VcpuFd, unfinished: bool) -> Next {
        if self.hypervisor.has_controllers() {
            // KVM does.
            return Next::Enter;
        }
        let local = &self.cpus[index];
        let mut machine = self.machine();
        local.told.store(false, Ordering::SeqCst);
        local.told_nmi.store(false, Ordering::SeqCst);
        let platform = machine.platform();
        take_cr8(platform, index, vcpu);
        let halted = local.halted.load(Ordering::SeqCst);
        let deaf = local.deaf.load(Ordering::SeqCst);
        let nmi = platform.nmi_pending(index);
        let pending = platform.interrupt_pending(index);
        if halted && !nmi && (deaf || !pending) {
            let now = machine.clock().ns(self.steps());
            let next = self.settle(&mut machine, None);
            let time = next.map_or(Duration::MAX, |next| Duration::from_nanos(next.saturating_sub(now)));
            if !self.over() {
                let time = time.min(Duration::from_secs(1));
                drop(self.changed.wait_timeout(machine, time));
            }
            return Next::Look;
        }
        if local.halted.swap(false, Ordering::SeqCst) {
            self.begins(index, &mut machine);
        }
        if nmi && vcpu.nmi().is_ok() {
            machine.platform().take_nmi(index);
            self.counts.nmis.fetch_add(1, Ordering::Relaxed);
        }
        let run = vcpu.get_kvm_run();
        // A halted CPU that listens lets an interrupt in: HLT has retired.
        let open = run.ready_for_interrupt_injection != 0 && run.if_flag != 0;
        run.request_interrupt_window = 0;
        // KVM has one place for what it injects: an exception that the instruction ends in would have the interrupt forgotten.
        if pending && open && unfinished {
            return Next::Complete;
        }
        if pending && open {
            let vector = machine.platform().acknowledge(index);
            if let Err(error) = room::interrupt(vcpu, vector) {
                drop(machine);
                self.stop(Why::Failed(index, refused("KVM_INTERRUPT")(error)));
                return Next::Look;
            }
            self.counts.interrupts.fetch_add(1, Ordering::Relaxed);
            // It is not ready for another one before it has run.
            let more = machine.platform().interrupt_pending(index);
            let run = vcpu.get_kvm_run();
            run.ready_for_interrupt_injection = 0;
            run.request_interrupt_window = u8::from(more);
            local.told.store(more, Ordering::SeqCst);
        } else if pending {
            run.request_interrupt_window = 1;
            local.told.store(true, Ordering::SeqCst);
        }
        vcpu.get_kvm_run().cr8 = machine.platform().cr8(index).into();
        Next::Enter
    }

    /// Does what an exit asks for. Says whether a unit has to see instructions from now on.
    fn serve(&self, index: usize, cpu: &Processor, vcpu: &mut VcpuFd, machine: &mut Machine, reason: Reason) -> bool {
        let now = self.steps();
        match reason {
            Reason::Port { port, size, write } => {
                for data in room::port_data(vcpu).chunks_exact_mut(size.max(1).into()) {
                    if write {
                        machine.cpu(index).port_write(port, size, value(data) as u32, now);
                    } else {
                        let value = machine.cpu(index).port_read(port, size, now);
                        data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
                    }
                }
                false
            }
            Reason::Mmio { gpa, len, write } => {
                let data = &mut room::mmio_data(vcpu)[..len.into()];
                // Of a size that no instruction has, as a page's end makes them, byte by byte.
                let size = if len.is_power_of_two() { len } else { 1 };
                for (data, gpa) in data.chunks_exact_mut(size.into()).zip((gpa..).step_by(size.into())) {
                    if write {
                        machine.cpu(index).write(gpa, size, value(data), now);
                    } else {
                        let value = machine.cpu(index).read(gpa, size, now);
                        data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
                    }
                }
                false
            }
            Reason::ReadMsr(msr) => {
                if msr == IA32_BIOS_SIGN_ID {
                    // CPUID, which loads it, does not come here.
                    machine.cpu(index).cpuid(1, 0);
                }
                let mut view = self.view(index, vcpu, machine);
                if machine.cpu(index).precedes_rdpmc(msr) {
                    self.has_run(index, false, machine, &mut view);
                    self.begins(index, machine);
                }
                let answer = machine.cpu(index).read_msr(msr, &mut view).ok();
                room::set_msr(vcpu, answer);
                false
            }
            Reason::WriteMsr(msr, value) => {
                let (hypervisor, counters) = (self.hypervisor, machine.cpu(index).precedes_rdpmc(msr));
                let mut view = self.view(index, vcpu, machine);
                if counters {
                    self.has_run(index, false, machine, &mut view);
                }
                let written = machine.cpu(index).write_msr(msr, value, &mut view);
                // Asking fetches registers, and the timer's deadline is what guests write most.
                let units = !(msr == IA32_TSC_DEADLINE || x2apic(msr));
                // KVM answers RDPMC itself, with #GP. Zeros are clearing up.
                let reads = !hypervisor.has_rdpmc && value != 0 && written.is_ok() && counters;
                let watched = units
                    && hypervisor.watches
                    && (reads || machine.cpu(index).needs_instructions(hypervisor.has_rdpmc, &mut view));
                if counters {
                    self.begins(index, machine);
                }
                room::set_msr(vcpu, written.ok().map(|()| 0));
                let offset = machine.tsc_offset(index);
                cpu.set_tsc_offset(vcpu, offset, self.hypervisor.clock);
                watched
            }
            _ => false,
        }
    }
}

/// What KVM says of CR8. The task priority's low four bits, which CR8 has not, stay where that is nothing new.
fn take_cr8(platform: &mut Platform, index: usize, vcpu: &mut VcpuFd) {
    let class = vcpu.get_kvm_run().cr8 as u8;
    if class != platform.cr8(index) {
        platform.set_cr8(index, class);
    }
}

/// A register of the local APIC in x2APIC mode. SDM Vol. 3A 11.12.1.2 "x2APIC Register Address Space".
fn x2apic(msr: u32) -> bool {
    msr & !0xff == IA32_X2APIC_BASE
}

/// A number of up to eight bytes, least significant first.
fn value(data: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..data.len()].copy_from_slice(data);
    u64::from_le_bytes(bytes)
}

impl Hypervisor {
    /// Runs all CPUs of a machine in KVM until something ends that. `outside` is what the calling thread does meanwhile: it
    /// executes what is [lent](Shared::execute_lent), and returns when [`Shared::over`].
    ///
    /// # Errors
    /// One line: KVM refused a CPU's state.
    pub fn run<T>(
        &mut self,
        soft: &mut Soft,
        machine: &mut Machine,
        wake: &EventFd,
        counts: &Counts,
        outside: impl FnOnce(&Shared, &mut Soft) -> T,
    ) -> Result<Native<T>, String> {
        let states: Vec<CpuState> = soft.cpus().map(|cpu| cpu.state()).collect();
        machine.clock().follow(self.clock.ticks(), soft.steps());
        // With its own interrupt controllers KVM starts the CPUs.
        let waits = |state: &CpuState| state.activity == Activity::WaitForSipi && !self.has_controllers();
        if let Some(timers) = &self.timers {
            timers.go_on_with_intervals(&self.vm)?;
        }
        let retired: Vec<u64> = soft.cpus().map(engine::Cpu::retired).collect();
        let cpus = states.into_iter().zip(retired).map(|(state, retired)| Local {
            halted: AtomicBool::new(state.activity == Activity::Halted),
            waits: waits(&state),
            told: AtomicBool::new(false),
            told_nmi: AtomicBool::new(false),
            deaf: AtomicBool::new(state.rflags & 1 << 9 == 0),
            armed: AtomicBool::new(false),
            retired: AtomicU64::new(retired),
            emulates: AtomicBool::new(false),
            counted: AtomicU64::new(0),
            overflow: AtomicU64::new(u64::MAX),
            before: state,
            after: Mutex::new(None),
        });
        let shared = Shared {
            hypervisor: self,
            cpus: cpus.collect(),
            changed: Condvar::new(),
            why: Mutex::new(None),
            effects: Mutex::new(Vec::new()),
            hits: Mutex::new(Vec::new()),
            over: AtomicBool::new(false),
            wake,
            deadline: AtomicU64::new(0),
            steps: AtomicU64::new(soft.steps()),
            machine: Mutex::new(machine),
            counts,
            left: AtomicU64::new(match self.limit {
                Some(Limit::Exits(left) | Limit::Steps(left)) => left,
                None => u64::MAX,
            }),
            asleep: Asleep::default(),
            loan: Mutex::new(Loan::None),
            lent: AtomicBool::new(false),
        };
        let outcome = self.threads.in_place_scope(|scope| {
            scope.spawn_broadcast(|_, context| {
                if !shared.cpus[context.index()].waits {
                    shared.thread(context.index());
                }
            });
            let _ends = EndsWithThread(&shared);
            let outcome = outside(&shared, soft);
            if !shared.over() {
                shared.stop(Why::Asked);
            }
            outcome
        });
        let why = lock(&shared.why).take().unwrap_or(Why::Asked);
        let effects = std::mem::take(&mut *lock(&shared.effects));
        let hits = std::mem::take(&mut *lock(&shared.hits));
        // What the guest has read of it last.
        drop(shared.machine());
        let left = shared.left.load(Ordering::SeqCst);
        let cpus: Vec<_> = shared.cpus.into_iter().map(|cpu| lock(&cpu.after).take()).collect();
        self.timers = None;
        // The bus has answered whichever CPU came last.
        self.limit = self.limit.map(|limit| match limit {
            Limit::Exits(_) => Limit::Exits(left),
            Limit::Steps(_) => Limit::Steps(left),
        });
        let mut events = Vec::new();
        for (index, after) in cpus.into_iter().enumerate() {
            let Some(after) = after else { continue };
            let (mut state, pending) = after?;
            if hits.iter().any(|(cpu, hit)| *cpu == index && hit.guest_steps) {
                state.dr[6] |= Dr6::new().with_single_step(true).into_bits();
                events.push((index, guestdbg::EXCEPTION));
            }
            soft.put(index, &state);
            events.extend(pending.map(|event| (index, event)));
        }
        soft.forget_code();
        for (index, event) in events {
            soft.raise(index, event, machine);
        }
        Ok(Native {
            why,
            effects,
            hits,
            outcome,
        })
    }
}
