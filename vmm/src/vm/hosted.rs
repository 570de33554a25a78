//! A run on KVM: natively as long as nothing needs the software engine, and in the engine as long as something does.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use devices::virtio::Taken;
use engine::{Cpu, CpuState, Exit};
use kvm::{NativeEnd, Running, UNTIL_PORTABLE, vcpu_state::portable};
use log::debug;

use super::{
    end::End,
    hosted_state::{Hosted, stays},
    outside::{Inlet, Leave, Outside},
    pace::Pace,
    parts::Vm,
    rdpmc,
    report::report,
    stop_reason::{StopReason, Until},
};
use crate::{debug, error::Error};

/// So long nothing has to need the engine before the machine goes back to KVM: turning a unit off and on again is common, and
/// a handover costs more than the engine does in this time.
const HYSTERESIS: Duration = Duration::from_millis(10);
/// And so many steps, or so long, where the engine is slow: a handler of an interrupt turns counters off, reads them, and turns
/// them on.
const STEPS: u64 = 200_000;
const SLOW_HYSTERESIS: Duration = Duration::from_millis(100);
/// The longest that the outside is not looked at.
const LOOK: Duration = Duration::from_millis(5);
/// The longest that it is not looked at while all CPUs are halted and input wakes the look.
const IDLE_LOOK: Duration = Duration::from_millis(500);

/// Why a machine on KVM is in the software engine.
enum Stay {
    /// It is not.
    Native,
    /// This CPU's next instruction is for the engine.
    Step(usize),
    /// A unit of a CPU has to see instructions.
    Watched,
}

impl Vm {
    /// [`Vm::advance`] of a machine on KVM.
    pub(super) fn run_hosted(
        &mut self,
        mut hosted: Hosted,
        until: &Until,
        outside: &mut dyn Outside,
        started: Instant,
    ) -> Result<StopReason, Leave> {
        hosted.hypervisor.set_limit(until.exits);
        let reason = self.hosted_until(&mut hosted, until, outside, started);
        hosted.hypervisor.set_limit(None);
        // Until the next run, if there is one.
        let stood = hosted.hypervisor.stop_timers();
        let reason = match (&reason, stood) {
            (Ok(StopReason::Ended(End::Kvm(_))) | Err(_), _) | (_, Ok(())) => reason,
            (_, Err(what)) => Ok(StopReason::Ended(End::Kvm(what.to_string()))),
        };
        self.hosted = Some(hosted);
        reason
    }

    fn hosted_until(
        &mut self,
        hosted: &mut Hosted,
        until: &Until,
        outside: &mut dyn Outside,
        started: Instant,
    ) -> Result<StopReason, Leave> {
        if !std::mem::replace(&mut hosted.listened, true) {
            let wake = hosted.wake.try_clone().map_err(|source| Error::System {
                what: "waiting for CPUs",
                source,
            })?;
            outside.listen(wake)?;
        }
        let mut pace = Pace::new(self.now(), started, until.deadline);
        let mut stay = match self.needs_engine() {
            true => Stay::Watched,
            false => Stay::Native,
        };
        loop {
            let since = Instant::now();
            let reason = match stay {
                Stay::Native => None,
                Stay::Step(cpu) => {
                    hosted.counts.emulated.fetch_add(1, Ordering::Relaxed);
                    self.step_for_kvm(cpu, until)
                }
                Stay::Watched if hosted.hypervisor.has_controllers() => Some(StopReason::Ended(stays(
                    &self.report(),
                    "what was asked for is the software engine's to see",
                ))),
                Stay::Watched => {
                    hosted.watched += 1;
                    self.watch_for_kvm(until, outside, &mut pace)?
                }
            };
            if !matches!(stay, Stay::Native) {
                hosted.counts.add_in_engine(since.elapsed());
            }
            if let Some(reason) = reason {
                return Ok(reason);
            }
            let here = self.moment();
            if outside.is_requested() || outside.comes_back(here) {
                return Ok(StopReason::Outside);
            }
            if let Some(clock) = self.host_clock
                && clock != hosted.hypervisor.clock()
            {
                hosted.hypervisor.set_clock(clock);
            }
            stay = match self.native(hosted, until, outside, &mut pace)? {
                Ok(reason) => return Ok(reason),
                Err(stay) => stay,
            };
        }
    }

    /// Whether there is something that only the engine does: a unit or an observer that has to see instructions, something
    /// that a debugger wants to stop for, CPUs that are to stand still.
    fn needs_engine(&mut self) -> bool {
        let Ok(points) = self.points() else { return true };
        self.soft.runs_only() || self.machine.is_observed() || {
            let times = self.rdpmc_handlers(points.len()).is_some();
            self.soft.needs_instructions(times, &mut self.machine).is_some()
        }
    }

    /// One instruction of a CPU, and what it takes until KVM can go on from there.
    fn step_for_kvm(&mut self, cpu: usize, until: &Until) -> Option<StopReason> {
        self.soft.take_turn(cpu);
        self.machine.platform().take_missed();
        for _ in 0..UNTIL_PORTABLE {
            let steps = self.soft.steps();
            if let Some(clock) = self.host_clock {
                self.machine.clock().follow(clock.ticks(), steps);
            }
            let exit = self.soft.run(&mut self.machine, 1);
            if let Some(stop) = self.stop(cpu, &exit, false) {
                return Some(StopReason::Debugger(stop));
            }
            let steps = self.soft.steps();
            let effects = self.machine.advance(steps);
            if let Some(reason) = self.take_effects(effects, until) {
                return Some(reason);
            }
            if self.machine.platform().take_missed() {
                let end = stays(&self.report(), "it cannot execute an instruction that reaches for them");
                return Some(StopReason::Ended(end));
            }
            match exit {
                Exit::Shutdown => return Some(StopReason::Ended(End::TripleFault(self.report()))),
                Exit::Defect(what) => {
                    return Some(StopReason::Ended(End::Defect(format!("{what}\n{}", self.report()))));
                }
                _ => {}
            }
            if self.cpu_state(cpu).is_none_or(|state| portable(&state)) {
                break;
            }
        }
        None
    }

    /// The whole machine in the engine, until no unit has needed it for a while.
    fn watch_for_kvm(
        &mut self,
        until: &Until,
        outside: &mut dyn Outside,
        pace: &mut Pace,
    ) -> Result<Option<StopReason>, Leave> {
        debug!("in the engine from step {}", self.soft.steps());
        let mut needed = (Instant::now(), self.soft.steps());
        let reason = self.software(until, outside, pace, &mut |vm| {
            if vm.needs_engine() {
                needed = (Instant::now(), vm.soft.steps());
            }
            let portable = |cpu: &Cpu| portable(&cpu.state());
            let (time, steps) = (needed.0.elapsed(), vm.soft.steps() - needed.1);
            let long = time >= HYSTERESIS && steps >= STEPS || time >= SLOW_HYSTERESIS;
            long && vm.soft.cpus().all(portable)
        })?;
        debug!("back to KVM at step {}", self.soft.steps());
        Ok(reason)
    }

    /// The guest in KVM, until something ends that.
    fn native(
        &mut self,
        hosted: &mut Hosted,
        until: &Until,
        outside: &mut dyn Outside,
        pace: &mut Pace,
    ) -> Result<Result<StopReason, Stay>, Leave> {
        let over = |end: End| Ok(Ok(StopReason::Ended(end)));
        if hosted.hypervisor.is_at_limit() {
            return Ok(Ok(StopReason::Reached));
        }
        if let Some(cpu) =
            (0..self.soft.count()).find(|&cpu| self.cpu_state(cpu).is_some_and(|state| !portable(&state)))
        {
            return Ok(Err(Stay::Step(cpu)));
        }
        if let Some(stop) = self.waiting_stop() {
            return Ok(Ok(StopReason::Debugger(stop)));
        }
        let points = match self.points() {
            // Steps have KVM's guest debugging to themselves.
            Ok(points) if points.is_empty() || !hosted.hypervisor.single_steps() => points,
            _ => return Ok(Err(Stay::Watched)),
        };
        if let Some(cpu) = self.passes(&points) {
            return Ok(Err(Stay::Step(cpu)));
        }
        // Steps have KVM's guest debugging to themselves here, too.
        let handlers = match hosted.hypervisor.single_steps() {
            true => None,
            false => self.rdpmc_handlers(points.len()),
        };
        if let Some(cpu) = handlers.as_ref().and_then(|handlers| self.before_handler(handlers)) {
            return Ok(Err(Stay::Step(cpu)));
        }
        let registers = points.iter().map(|point| point.register);
        let catching = rdpmc::breakpoints(handlers.as_deref().unwrap_or_default());
        hosted
            .hypervisor
            .arm(registers.chain(catching).collect(), handlers.is_some());
        let here = self.moment();
        let paced_wait = |wanted: Duration| pace.time_left(Some(wanted)).unwrap_or(wanted);
        let meanwhile = |shared: &Running, soft: &mut dyn kvm::Cpus| -> Result<Option<StopReason>, Leave> {
            while !shared.over() {
                shared.execute_lent(soft, LOOK);
                let wait = {
                    let mut machine = shared.machine();
                    let steps = shared.steps();
                    outside.enter(here, &mut |inlet, bytes| match inlet {
                        Inlet::Serial => Taken::Bytes(machine.platform().serial_enqueue(bytes)),
                        Inlet::Virtio { device, port } => machine.virtio_input(device.into(), port, bytes, steps),
                    })?;
                    let next = shared.run_due_events(&mut machine, None);
                    let now = machine.clock().ns(shared.steps());
                    let (idle, listening) = shared.idle(&mut machine);
                    if idle && next.is_none() && !(listening && outside.input_open()) && outside.input().is_empty() {
                        drop(machine);
                        shared.stop(NativeEnd::Halted);
                        break;
                    }
                    shared.look_at(next);
                    let most = if idle || shared.is_quiet() { IDLE_LOOK } else { LOOK };
                    next.map_or(most, |next| Duration::from_nanos(next.saturating_sub(now)).min(most))
                };
                outside.flush()?;
                outside.wait(Some(paced_wait(wait)))?;
                if pace.time_is_up() {
                    return Ok(Some(StopReason::Deadline));
                }
                // KVM counts no steps, so the moment is that of its entry.
                if outside.is_requested() || outside.comes_back(here) {
                    break;
                }
            }
            Ok(None)
        };
        let native = hosted.hypervisor.run(
            &mut self.soft,
            &mut self.machine,
            &hosted.wake,
            &hosted.counts,
            meanwhile,
        );
        let native = match native {
            Ok(native) => native,
            Err(what) => return over(End::Kvm(format!("{what}\n{}", self.report()))),
        };
        let rdpmc = self.take_back_rdpmc(&native.hits, points.len());
        let met = self.met(&points, &native.hits);
        let asked = match self.take_effects(native.effects, until) {
            Some(end @ StopReason::Ended(_)) => return Ok(Ok(end)),
            asked => asked,
        };
        if let Some(reason) = native.outcome? {
            return Ok(Ok(reason));
        }
        if let Some(stop) = met {
            return Ok(Ok(StopReason::Debugger(stop)));
        }
        if let Some(reason) = asked {
            return Ok(Ok(reason));
        }
        if native.hits.iter().any(|(_, hit)| hit.guest_steps) {
            return Ok(Err(Stay::Watched));
        }
        if let Some(cpu) = rdpmc {
            return Ok(Err(Stay::Step(cpu)));
        }
        Ok(match native.why {
            // A unit may have asked at the same time.
            NativeEnd::Asked | NativeEnd::Effects => Err(match self.needs_engine() {
                true => Stay::Watched,
                false => Stay::Native,
            }),
            NativeEnd::Instructions(cpu) => {
                // A guest that had no handler when it came to KVM may have one by now.
                if self.rdpmc_handlers(points.len()).is_some() && !self.needs_engine() {
                    return Ok(Err(Stay::Native));
                }
                debug!("a unit of CPU {cpu} has to see instructions");
                Err(Stay::Watched)
            }
            NativeEnd::Emulation(cpu) if hosted.hypervisor.has_controllers() && self.is_at_reset(cpu) => {
                Ok(StopReason::Ended(End::Reset))
            }
            NativeEnd::Emulation(cpu) => Err(Stay::Step(cpu)),
            NativeEnd::Shutdown(cpu) => {
                let mut debugger = self.debugger.as_mut().filter(|debugger| !debugger.is_suspended());
                let why = debug::StopCause::TripleFault;
                Ok(match debugger.as_mut().is_some_and(|debugger| debugger.shutdown()) {
                    true => StopReason::Debugger(debug::DebugStop { cpu, why }),
                    false => StopReason::Ended(End::TripleFault(self.report_of(cpu))),
                })
            }
            // MOV DR, or INT1.
            NativeEnd::Debug(cpu) => Err(Stay::Step(cpu)),
            NativeEnd::Limit => Ok(StopReason::Reached),
            NativeEnd::Defect(cpu, what) => Ok(StopReason::Ended(End::Defect(format!(
                "{what}\n{}",
                self.report_of(cpu)
            )))),
            NativeEnd::Halted => {
                let listening = self.soft.cpus().any(Cpu::interrupt_wakes);
                Ok(StopReason::Ended(End::Halted(self.halted(listening))))
            }
            NativeEnd::Failed(cpu, what) => Ok(StopReason::Ended(End::Kvm(format!("{what}\n{}", self.report_of(cpu))))),
        })
    }

    /// A CPU is where an INIT puts the boot CPU. KVM with its own interrupt controllers does that itself, and there is no firmware:
    /// for us it is a reset.
    fn is_at_reset(&self, cpu: usize) -> bool {
        let at_reset =
            |state: CpuState| state.rip == 0xfff0 && state.segments[engine::CS].base == 0xffff_0000 && !state.cr0.pe();
        cpu == 0 && self.cpu_state(cpu).is_some_and(at_reset)
    }

    /// Registers and code of a CPU.
    fn report_of(&self, cpu: usize) -> String {
        let state = self.cpu_state(cpu).unwrap_or_default();
        let text = report(self.machine.memory(), &state);
        match self.soft.count() {
            1 => text,
            count => format!("CPU {cpu} of {count}\n{text}"),
        }
    }
}
