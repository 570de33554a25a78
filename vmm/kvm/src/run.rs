//! The guest on KVM: one thread a CPU, one lock for what they share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use devices::platform::Platform;
use engine::bus::Bus;
use engine::{Activity, CpuState};
use kvm_ioctls::VcpuFd;
use log::trace;
use machine::Machine;
use vmm_sys_util::eventfd::EventFd;
use x86::debug::Dr6;
use x86::msr::{IA32_BIOS_SIGN_ID, IA32_TSC_DEADLINE, IA32_X2APIC_BASE};

use crate::cpus::Cpus;
use crate::error::{KvmError, refused};
use crate::guest_debug::{self, Hit};
use crate::host_traced;
use crate::hypervisor::{Hypervisor, Limit, Processor};
use crate::kernel_irqchip;
use crate::shared::{After, Asleep, Counts, LentState, Local, Native, NativeEnd, Running};
use crate::state;
use crate::sys::{self, Reason, lock};

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

/// Ends the run if its thread panics, for which the others would wait; the caller is handed the panic.
struct EndsWithThread<'a, 'b>(&'a Running<'b>);

impl Drop for EndsWithThread<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop(NativeEnd::Asked);
        }
    }
}

impl Running<'_> {
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
            let interrupts_masked = local.interrupts_masked.load(Ordering::SeqCst);
            let platform = machine.platform();
            if !local.halted.load(Ordering::SeqCst)
                || platform.nmi_pending(index)
                || !interrupts_masked && platform.interrupt_pending(index)
            {
                return (false, true);
            }
            listening |= !interrupts_masked;
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
            self.stop(NativeEnd::Asked);
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
            true => Some(kernel_irqchip::activity(vcpu)?),
            false => None,
        };
        state::want(vcpu, true);
        while self.complete(index, cpu, vcpu) {}
        state::want(vcpu, false);
        if self.hypervisor.single_steps() {
            sys::debug(vcpu, false).map_err(refused("KVM_SET_GUEST_DEBUG"))?;
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
                && let Err(error) = sys::debug(vcpu, true)
            {
                // It is lost at POPF and at some exits.
                self.stop(NativeEnd::Failed(index, refused("KVM_SET_GUEST_DEBUG")(error)));
                return;
            }
            let reason = sys::run(vcpu);
            unfinished = self.exit(index, cpu, vcpu, reason);
            let less = |left: u64| left.checked_sub(1);
            if reason != Reason::Kicked && self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) == Ok(1) {
                self.stop(NativeEnd::Limit);
            }
        }
    }

    /// What an instruction asked for has been answered: has KVM finish it. It may ask for more, which is what this says.
    fn complete(&self, index: usize, cpu: &Processor, vcpu: &mut VcpuFd) -> bool {
        cpu.kick.complete_only();
        let reason = sys::run(vcpu);
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
                let traces = self.hypervisor.traces.is_some() && host_traced::is_of_trace(reason);
                if traces {
                    self.trace_ends(index, cpu, vcpu, &mut machine);
                }
                let mut watched = self.serve(index, cpu, vcpu, &mut machine, reason);
                if traces {
                    watched |= !self.trace_resumes(index, cpu, vcpu, &mut machine);
                }
                vcpu.get_kvm_run().cr8 = machine.platform().cr8(index).into();
                self.run_due_events(&mut machine, Some(index));
                drop(machine);
                self.has_asked();
                if watched {
                    self.stop(NativeEnd::Instructions(index));
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
                let interrupts_masked = vcpu.get_kvm_run().if_flag == 0;
                local.interrupts_masked.store(interrupts_masked, Ordering::SeqCst);
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
                self.stop(NativeEnd::Debug(index));
            }
            // A step.
            Reason::Debug { .. } => {}
            Reason::Emulation if self.lends() => local.emulates.store(true, Ordering::SeqCst),
            Reason::Emulation => self.stop(NativeEnd::Emulation(index)),
            Reason::Shutdown => self.stop(NativeEnd::Shutdown(index)),
            Reason::Failure { reason, detail } => {
                let exit = KvmError::Exit(sys::failure(reason, detail));
                self.stop(NativeEnd::Failed(index, exit));
            }
            Reason::Refused(errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                self.stop(NativeEnd::Failed(index, refused("KVM_RUN")(error)));
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
        local.irq_notified.store(false, Ordering::SeqCst);
        local.nmi_notified.store(false, Ordering::SeqCst);
        let platform = machine.platform();
        take_cr8(platform, index, vcpu);
        let halted = local.halted.load(Ordering::SeqCst);
        let interrupts_masked = local.interrupts_masked.load(Ordering::SeqCst);
        let nmi = platform.nmi_pending(index);
        let pending = platform.interrupt_pending(index);
        if halted && !nmi && (interrupts_masked || !pending) {
            let now = machine.clock().ns(self.steps());
            let next = self.run_due_events(&mut machine, None);
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
            if let Err(error) = sys::interrupt(vcpu, vector) {
                drop(machine);
                self.stop(NativeEnd::Failed(index, refused("KVM_INTERRUPT")(error)));
                return Next::Look;
            }
            self.counts.interrupts.fetch_add(1, Ordering::Relaxed);
            // It is not ready for another one before it has run.
            let more = machine.platform().interrupt_pending(index);
            let run = vcpu.get_kvm_run();
            run.ready_for_interrupt_injection = 0;
            run.request_interrupt_window = u8::from(more);
            local.irq_notified.store(more, Ordering::SeqCst);
        } else if pending {
            run.request_interrupt_window = 1;
            local.irq_notified.store(true, Ordering::SeqCst);
        }
        vcpu.get_kvm_run().cr8 = machine.platform().cr8(index).into();
        Next::Enter
    }

    /// Does what an exit asks for. Says whether a unit has to see instructions from now on.
    fn serve(&self, index: usize, cpu: &Processor, vcpu: &mut VcpuFd, machine: &mut Machine, reason: Reason) -> bool {
        let now = self.steps();
        match reason {
            Reason::Port { port, size, write } => {
                for data in sys::port_data(vcpu).chunks_exact_mut(size.max(1).into()) {
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
                let data = &mut sys::mmio_data(vcpu)[..len.into()];
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
                sys::set_msr(vcpu, answer);
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
                sys::set_msr(vcpu, written.ok().map(|()| 0));
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
    /// executes what is [lent](Running::execute_lent), and returns when [`Running::over`].
    ///
    /// # Errors
    /// One line: KVM refused a CPU's state.
    pub fn run<T>(
        &mut self,
        soft: &mut dyn Cpus,
        machine: &mut Machine,
        wake: &EventFd,
        counts: &Counts,
        outside: impl FnOnce(&Running, &mut dyn Cpus) -> T,
    ) -> Result<Native<T>, KvmError> {
        let cpus = (0..soft.count()).filter_map(|cpu| soft.cpu(cpu));
        let (states, retired): (Vec<CpuState>, Vec<u64>) = cpus.map(|cpu| (cpu.state(), cpu.retired())).unzip();
        machine.clock().follow(self.clock.ticks(), soft.steps());
        // With its own interrupt controllers KVM starts the CPUs.
        let waits = |state: &CpuState| state.activity == Activity::WaitForSipi && !self.has_controllers();
        if let Some(timers) = &self.timers {
            timers.go_on_with_intervals(&self.vm)?;
        }
        let cpus = states.into_iter().zip(retired).map(|(state, retired)| Local {
            halted: AtomicBool::new(state.activity == Activity::Halted),
            waits: waits(&state),
            irq_notified: AtomicBool::new(false),
            nmi_notified: AtomicBool::new(false),
            interrupts_masked: AtomicBool::new(!state.rflags.interrupt()),
            armed: AtomicBool::new(false),
            retired: AtomicU64::new(retired),
            emulates: AtomicBool::new(false),
            counted: AtomicU64::new(0),
            overflow: AtomicU64::new(u64::MAX),
            before: state,
            after: Mutex::new(None),
        });
        let shared = Running {
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
            lent: Mutex::new(LentState::None),
            is_lent: AtomicBool::new(false),
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
                shared.stop(NativeEnd::Asked);
            }
            outcome
        });
        let why = lock(&shared.why).take().unwrap_or(NativeEnd::Asked);
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
                // B0 to B3 are those of the last debug exception.
                let before = Dr6::from_bits(state.dr[6]).with_breakpoints(0);
                state.dr[6] = before.with_single_step(true).into_bits();
                events.push((index, guest_debug::EXCEPTION));
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
