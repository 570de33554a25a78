//! The run loop: time, turns, interrupts, idleness, limits.
//!
//! One round of the loop is: take what comes from outside, let the devices do what is due, deliver an interrupt if there is one,
//! and let the CPU whose turn it is run until the next thing that is due. On the virtual clock everything in a round is a function
//! of the steps so far and of the input, so a run repeats; wall time decides only how often the outside is looked at. Time is
//! skipped only when all CPUs are halted.

use std::time::Duration;

use devices::{platform::Effect, virtio::Taken};
use engine::{Cpu, Exit};
use log::{debug, info, trace};

use super::{
    end::End,
    outside::{Inlet, Leave, Outside},
    pace::Pace,
    parts::Vm,
    stop_reason::{StopReason, Until},
};
use crate::{
    config::ClockMode,
    debug::{self, StopCause},
};

/// Steps between two looks outside, on the virtual clock: a millisecond or two.
const SLICE: u64 = 1 << 18;
/// The same when paced, where a slice is also how finely virtual time follows wall time.
const PACED_SLICE: u64 = 1 << 14;
/// Time that a warp over idle time counts for the slice, in steps, so that a guest that only sleeps is interrupted, too.
const WARP: u64 = 1 << 12;
/// Bytes that the disks move in the time of a step.
const MOVED: u64 = 16;
/// The furthest that virtual time jumps at once when paced.
const JUMP_NS: u64 = 10_000_000;
/// The same while an interrupt waits until the guest lets it in: a tick that fires twice before it is served is lost.
const PENDING_JUMP_NS: u64 = 100_000;
/// So much virtual time a CPU may be halted with interrupts off before it counts as halted for good. Only an NMI could end
/// that, and none takes this long.
const DEAD_HALT_NS: u64 = 10_000_000_000;

/// The run is over.
fn ended(end: End) -> Result<Option<StopReason>, Leave> {
    Ok(Some(StopReason::Ended(end)))
}

impl Vm {
    /// Runs in the software engine until there is a reason to come back, or `leave` says so at the end of a slice.
    pub(super) fn software(
        &mut self,
        until: &Until,
        outside: &mut dyn Outside,
        pace: &mut Pace,
        leave: &mut dyn FnMut(&mut Vm) -> bool,
    ) -> Result<Option<StopReason>, Leave> {
        let slice = if self.clock == ClockMode::Paced {
            PACED_SLICE
        } else {
            SLICE
        };
        let mut look_at: u64 = 0;
        loop {
            // What the disks did took wall time, in which nobody looked outside.
            let worked = self.machine.take_work() / MOVED;
            if worked > 0 {
                look_at = look_at.saturating_sub(worked).max(1);
            }
            if self.soft.steps() >= look_at {
                if look_at > 0 && leave(self) {
                    return Ok(None);
                }
                look_at = self.soft.steps() + slice;
                if let Some(recorder) = &self.recorder {
                    if recorder.stops() {
                        return ended(End::Trace);
                    }
                    recorder.look(self.machine.memory(), self.soft.steps(), until.deadline);
                    let cuts = recorder.cut(self.soft.steps());
                    look_at = look_at.min(recorder.due());
                    if cuts {
                        self.ask_watchers();
                    }
                }
                if let Some(reason) = self.look_outside(outside, pace)? {
                    return Ok(Some(reason));
                }
            }
            let now = self.soft.steps();
            if self.closed_to_input != Some(now) {
                let here = self.moment();
                if outside.enter(here, &mut |inlet, bytes| self.hand_over(inlet, bytes))? {
                    return Ok(Some(StopReason::Outside));
                }
            }
            let effects = self.machine.advance(now);
            if let Some(reason) = self.take_effects(effects, until) {
                return Ok(Some(reason));
            }
            while let Some(cpu) = self.soft.init_due() {
                if let Some(end) = self.take_effect(Effect::Init { cpu }) {
                    return Ok(Some(StopReason::Ended(end)));
                }
            }
            self.soft.end_timed_waits(&mut self.machine);
            self.soft.deliver_nmis(&mut self.machine);
            if self.machine.platform().take_sent() || self.soft.turn_is_over(&mut self.machine) {
                self.soft.next_turn(&mut self.machine);
            }
            let before = self.soft.exits().delivered();
            let retry = self.soft.deliver(&mut self.machine);
            if self.soft.exits().delivered() != before {
                self.closed_to_input = Some(now);
            }

            let Some(left) = until.left(&self.soft) else {
                return Ok(Some(StopReason::Reached));
            };
            if outside.is_requested() {
                return Ok(Some(StopReason::Outside));
            }
            let here = self.moment();
            let Some(until_due) = outside.due(here) else {
                return Ok(Some(StopReason::Outside));
            };
            let until_event = match self.machine.next_event() {
                Some(ns) => self.machine.clock().steps_until(ns, now).max(1),
                None => u64::MAX,
            };
            // A step is a tick.
            let until_deadline = self.soft.ticks_to_deadline(&mut self.machine);
            let until_event = until_event.min(until_deadline.map_or(u64::MAX, |ticks| ticks.max(1)));
            let budget = (look_at - now).min(left).min(until_event).min(until_due).min(retry);
            for (gpa, len) in self.machine.take_written() {
                self.soft.written(gpa, len);
            }
            let cpu = self.soft.current();
            let stepping = self.debugger.as_ref().is_some_and(|d| d.stepping() == Some(cpu));
            let exit = self
                .soft
                .run(&mut self.machine, if stepping { budget.min(1) } else { budget });
            if self.soft.steps() == now && exit != Exit::Halt {
                self.closed_to_input = Some(now);
            }
            let stepped = stepping && self.soft.steps() > now;
            if let Some(stop) = self.stop(cpu, &exit, stepped) {
                if matches!(exit, Exit::Pause | Exit::Stop { pause: true }) {
                    self.soft.next_turn(&mut self.machine);
                }
                return Ok(Some(StopReason::Debugger(stop)));
            }
            match exit {
                Exit::Budget | Exit::Window | Exit::Stop { pause: false } => {}
                Exit::Bus => {
                    if self.soft.steps() == now {
                        // Exceptions without end: no step is made, so no time passes, and somebody has to look all the same.
                        look_at = look_at.saturating_sub(WARP);
                        self.soft.next_turn(&mut self.machine);
                    }
                }
                Exit::Pause | Exit::Stop { pause: true } => {
                    self.soft.next_turn(&mut self.machine);
                }
                Exit::Halt => {
                    // Looks outside do not depend on steps alone here, but only what they find can matter to the guest.
                    look_at = look_at.saturating_sub(WARP);
                    let here = self.moment();
                    if outside.comes_back(here) {
                        return Ok(Some(StopReason::Outside));
                    }
                    if !self.soft.next_turn(&mut self.machine)
                        && let Some(reason) = self.idle(outside, pace)?
                    {
                        return Ok(Some(reason));
                    }
                }
                Exit::Shutdown => return ended(End::TripleFault(self.report())),
                Exit::Defect(what) => return ended(End::Defect(format!("{what}\n{}", self.report()))),
            }
        }
    }

    /// Has nothing of the debugger's stop the machine for a while, and keeps what was wanted.
    pub(crate) fn ignore_stops(&mut self, ignored: bool) {
        if let Some(debugger) = &mut self.debugger {
            debugger.suspend(ignored);
        }
    }

    /// Whether a CPU's leaving the engine is a debugger's stop.
    pub(super) fn stop(&mut self, cpu: usize, exit: &Exit, stepped: bool) -> Option<debug::DebugStop> {
        let rip = self.soft.cpu(cpu).map_or(0, Cpu::rip);
        let debugger = self.debugger.as_mut()?;
        let stepped = stepped && !debugger.steps_on(rip);
        match exit {
            Exit::Stop { .. } => debugger.take_stop().map(|stop| stop.why),
            Exit::Shutdown if !debugger.is_suspended() && debugger.shutdown() => Some(StopCause::TripleFault),
            Exit::Shutdown | Exit::Defect(_) => None,
            _ => stepped.then_some(StopCause::Step),
        }
        .map(|why| debug::DebugStop { cpu, why })
    }

    /// What devices, or other CPUs, ask of the machine; the answer is why it has to come back.
    pub(super) fn take_effects(&mut self, effects: Vec<Effect>, until: &Until) -> Option<StopReason> {
        let panicked = until.panic && effects.contains(&Effect::Panicked);
        for effect in effects {
            if let Some(end) = self.take_effect(effect) {
                return Some(StopReason::Ended(end));
            }
        }
        // All the others have been seen to by then: the machine can run on.
        panicked.then_some(StopReason::Panicked)
    }

    fn take_effect(&mut self, effect: Effect) -> Option<End> {
        match effect {
            Effect::PowerOff => return Some(End::PowerOff),
            Effect::Reset => return Some(End::Reset),
            Effect::DebugExit(value) => return Some(End::DebugExit(value)),
            Effect::Init { cpu } => {
                if self.soft.init(cpu, &mut self.machine) {
                    self.machine.platform().init_apic(cpu);
                    // The boot CPU would go on in firmware, which is a reset.
                    return (cpu == 0).then_some(End::Reset);
                }
            }
            Effect::StartUp { cpu, vector } => self.soft.start(cpu, vector, &mut self.machine),
            Effect::Panicked => info!(
                "step {}: the guest's kernel says that it has panicked",
                self.soft.steps()
            ),
            // KVM has no handler to give it to.
            Effect::Smi { cpu } if self.host_clock.is_none() => self.soft.request_smi(cpu),
            Effect::Smi { .. } => debug!("nobody there for {effect:?}"),
        }
        None
    }

    /// A slice boundary: requests, input, output, signals, the time limit, and wall time.
    fn look_outside(&mut self, outside: &mut dyn Outside, pace: &mut Pace) -> Result<Option<StopReason>, Leave> {
        let here = self.moment();
        if outside.comes_back(here) {
            return Ok(Some(StopReason::Outside));
        }
        if self.clock == ClockMode::Paced {
            let wall = self.wall(pace);
            self.catch_up(wall);
            // The clock is looked at far more often than the outside has to be.
            if !pace.outside_is_due() {
                return Ok(None);
            }
        }
        outside.flush()?;
        outside.poll()?;
        Ok(pace.time_is_up().then_some(StopReason::Deadline))
    }

    /// What virtual time would be if it had followed wall time, or the clock that the guest has in KVM.
    fn wall(&mut self, pace: &Pace) -> u64 {
        match self.host_clock {
            Some(clock) => self.machine.clock().ns_of(clock.ticks()),
            None => pace.now(),
        }
    }

    /// Lets virtual time jump towards wall time, if it lags, but never over an event: guests count the ticks of their timers.
    fn catch_up(&mut self, wall: u64) {
        let (now, steps) = (self.now(), self.soft.steps());
        let count = self.soft.count();
        let platform = self.machine.platform();
        let furthest = if (0..count).any(|cpu| platform.interrupt_pending(cpu)) {
            PENDING_JUMP_NS
        } else {
            JUMP_NS
        };
        let event = self.next_wake().unwrap_or(u64::MAX);
        let target = wall.min(now.saturating_add(furthest)).min(event);
        self.machine.clock().skip_to(target, steps);
    }

    /// All CPUs are halted, and nothing is pending that one of them lets in: lets time pass until the next event.
    fn idle(&mut self, outside: &mut dyn Outside, pace: &mut Pace) -> Result<Option<StopReason>, Leave> {
        let steps = self.soft.steps();
        let here = self.moment();
        if outside.enters(here) {
            return Ok(None);
        }
        // An enabled interrupt wakes a CPU; else only an NMI can, and nothing typed is one.
        let enabled = self.soft.cpus().any(Cpu::interrupt_wakes);
        let next = self.next_wake();
        if let Some(ticks) = outside.enters_at(here)
            && next.is_none_or(|ns| self.machine.clock().tick_at(ns) > ticks)
        {
            self.machine.clock().skip_to_tick(ticks, steps);
            return Ok(None);
        }
        if enabled && self.clock == ClockMode::Virtual && outside.follows_wall() {
            return self.idle_with_wall(next, outside, pace);
        }
        let waiting = !outside.input().is_empty() && self.machine.platform().serial_capacity() > 0;
        let input = enabled && (waiting || outside.input_open());
        match next {
            None if !input => ended(End::Halted(self.halted(enabled))),
            None => {
                outside.flush()?;
                outside.wait(pace.time_left(None))?;
                if self.clock == ClockMode::Paced {
                    let wall = self.wall(pace);
                    self.machine.clock().skip_to(wall, steps);
                }
                Ok(pace.time_is_up().then_some(StopReason::Deadline))
            }
            Some(ns) => {
                if !enabled {
                    let since = pace.dead_since(steps, self.machine.clock().ns(steps));
                    if ns.saturating_sub(since) > DEAD_HALT_NS {
                        return ended(End::Halted(self.halted(enabled)));
                    }
                }
                let wall = self.wall(pace);
                if self.clock == ClockMode::Virtual || ns <= wall {
                    self.machine.clock().skip_to(ns, steps);
                    return Ok(None);
                }
                outside.flush()?;
                outside.wait(pace.time_left(Some(Duration::from_nanos(ns - wall))))?;
                let wall = self.wall(pace);
                self.machine.clock().skip_to(wall.min(ns), steps);
                Ok(pace.time_is_up().then_some(StopReason::Deadline))
            }
        }
    }

    /// The nanosecond of virtual time at which the machine goes on by itself: the next event, or a CPU's own deadline.
    fn next_wake(&mut self) -> Option<u64> {
        let steps = self.soft.steps();
        let ticks = self.soft.ticks_to_deadline(&mut self.machine);
        let clock = self.machine.clock();
        let deadline = ticks.map(|ticks| clock.ns_at(clock.ticks(steps).saturating_add(ticks)));
        // Whoever waits for the end of time waits for an interrupt.
        let deadline = deadline.filter(|ns| *ns < u64::MAX);
        self.machine.next_event().into_iter().chain(deadline).min()
    }

    /// The same on the virtual clock with somebody outside who answers in wall time: idle time passes as fast as there, since else every
    /// time-out would be over before the answer. Time passes up to what enters, or whole: what else ends a wait leaves no trace.
    fn idle_with_wall(
        &mut self,
        next: Option<u64>,
        outside: &mut dyn Outside,
        pace: &mut Pace,
    ) -> Result<Option<StopReason>, Leave> {
        let (steps, here) = (self.soft.steps(), self.moment());
        let now = self.now();
        let mut wall = pace.idle_now(steps, now);
        let next = next.unwrap_or(u64::MAX);
        if wall < next && !outside.arrived(here) {
            outside.flush()?;
            let left = (next != u64::MAX).then(|| Duration::from_nanos(next - wall));
            outside.wait(pace.time_left(left))?;
            wall = pace.idle_now(steps, now);
        }
        let serial = !outside.input().is_empty() && self.machine.platform().serial_capacity() > 0;
        if wall >= next || serial || outside.arrived(here) {
            self.machine.clock().skip_to(wall.min(next), steps);
        }
        Ok(pace.time_is_up().then_some(StopReason::Deadline))
    }

    pub(super) fn halted(&self, enabled: bool) -> String {
        let mut cpus = self.soft.cpus();
        let count = cpus.len();
        let index = cpus.position(Cpu::interrupt_wakes).unwrap_or(self.soft.current());
        let rip = self.soft.cpu(index).map_or(0, Cpu::rip);
        let name = match count {
            1 => String::new(),
            count => format!("CPU {index}, the last of {count}: "),
        };
        match enabled {
            true => format!("{name}HLT before {rip:#x}, with no timer armed and no more input"),
            false => format!("{name}HLT before {rip:#x} with interrupts disabled"),
        }
    }

    /// Hands input to a device.
    pub(super) fn hand_over(&mut self, inlet: Inlet, bytes: &[u8]) -> Taken {
        let now = self.now();
        if let Inlet::Virtio { device, port } = inlet {
            let steps = self.soft.steps();
            return self.machine.virtio_input(device.into(), port, bytes, steps);
        }
        self.machine.platform().advance(now);
        let taken = self.machine.platform().serial_enqueue(bytes);
        if taken > 0 {
            trace!("{taken} bytes of input at step {}", self.soft.steps());
        }
        Taken::Bytes(taken)
    }
}

#[cfg(test)]
#[path = "software_test.rs"]
mod tests;
