//! A debugger's breakpoints and watchpoints while the guest runs in KVM: in the processor's debug registers where they fit, or
//! else by handover to the software engine.

use engine::CpuState;
use log::info;
use x86::debug::{Breakpoint, Dr7, Watched};

use super::parts::Vm;
use crate::debug::{self, Debugger, WatchKind, Watchpoint};
use kvm::{
    Host,
    guest_debug::{self, Hit, Kinds, ROOM},
};

/// A breakpoint of the processor's, and what the machine stops for there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub register: Breakpoint,
    why: debug::StopCause,
}

impl Point {
    fn breakpoint(address: u64) -> Point {
        Point {
            register: guest_debug::execution(address),
            why: debug::StopCause::Breakpoint(address),
        }
    }

    /// `None`: no debug register watches this.
    fn watchpoint(watchpoint: Watchpoint) -> Option<Point> {
        let (first, len) = (watchpoint.first(), watchpoint.last() - watchpoint.first() + 1);
        let watched = match watchpoint.kind() {
            WatchKind::Write => Watched::Write,
            WatchKind::Access => Watched::ReadWrite,
            WatchKind::Read => return None,
        };
        let fits = matches!(len, 1 | 2 | 4 | 8) && first.is_multiple_of(len);
        fits.then_some(Point {
            register: Breakpoint {
                watched,
                first,
                len,
                enabled: true,
            },
            why: debug::StopCause::Watch {
                watchpoint,
                address: first,
                ip: None,
            },
        })
    }
}

/// What a debugger wants to stop for, as debug registers; or why it takes the engine.
fn plan(debugger: &Debugger, kinds: Kinds) -> Result<Vec<Point>, &'static str> {
    let Some((breakpoints, watchpoints)) = debugger.places() else {
        return Err("a step or a caught exception shows between instructions only");
    };
    if breakpoints.is_empty() && watchpoints.is_empty() {
        return Ok(Vec::new());
    }
    if !kinds.serves_breakpoints() {
        return Err("this KVM delivers none to a debugger outside");
    }
    if !watchpoints.is_empty() && !kinds.serves_watchpoints() {
        return Err("this KVM delivers no watchpoints to a debugger outside");
    }
    let mut points: Vec<Point> = breakpoints.into_iter().map(Point::breakpoint).collect();
    for watchpoint in watchpoints {
        let point = Point::watchpoint(watchpoint)
            .ok_or("a debug register watches 1, 2, 4 or 8 aligned bytes, for writes or for all accesses")?;
        if !points.contains(&point) {
            points.push(point);
        }
    }
    match points.len() {
        ..=ROOM => Ok(points),
        _ => Err("there are more than the processor's four"),
    }
}

/// The guest has debug exceptions of its own coming: a breakpoint, or each access to a debug register.
pub(super) fn is_armed(state: &CpuState) -> bool {
    let dr7 = Dr7::from_bits(state.dr[7]);
    dr7.enables() != 0 || dr7.general_detect()
}

/// Linear address of a CPU's next instruction.
pub(super) fn linear(state: &CpuState) -> u64 {
    state.linear_rip()
}

/// A breakpoint of the guest's own is to be delivered before a CPU's next instruction.
fn breaks_here(state: &CpuState) -> bool {
    let dr7 = Dr7::from_bits(state.dr[7]);
    let own = |n: u8| dr7.breakpoint(n, state.dr[usize::from(n)], false);
    let here = |point: Breakpoint| point.enabled && point.watched == Watched::Execute && point.first == linear(state);
    !state.rflags.rf() && (0..ROOM as u8).filter_map(own).any(here)
}

impl Vm {
    /// Jails this thread and those that run the guest's CPUs, all with `enter`. What a debugger and counters will ask of KVM is found out
    /// before, while it can be opened. `enter` is told whether the host's tracer will be opened, which cannot be done before the guest traces itself.
    pub(crate) fn jail<T: Send, E: Send>(
        &mut self,
        debugger: bool,
        enter: impl Fn(bool) -> Result<T, E> + Sync,
    ) -> Result<T, E> {
        if self.hosted.is_some() && (debugger || self.machine.has_counters()) {
            self.kinds();
        }
        let Some(hosted) = &self.hosted else {
            return enter(false);
        };
        let traces = hosted.hypervisor.has_traces();
        let entered = hosted.hypervisor.on_each_thread(|| enter(traces));
        entered.into_iter().collect::<Result<Vec<_>, _>>()?;
        enter(traces)
    }

    /// What KVM's debug registers can serve a debugger with. Found out once.
    pub(super) fn kinds(&mut self) -> Kinds {
        *self.points.kinds.get_or_insert_with(|| {
            let kinds = Host::open().and_then(|host| host.guest_debug());
            match &kinds {
                Ok(kinds) => info!("KVM_SET_GUEST_DEBUG: {kinds}"),
                Err(why) => info!("{why}; the software engine serves breakpoints"),
            }
            kinds.unwrap_or_default()
        })
    }

    /// What of the debugger's goes into debug registers while the guest runs in KVM; or why the guest has to be in the engine.
    pub(super) fn points(&mut self) -> Result<Vec<Point>, &'static str> {
        if self.debugger.is_none() {
            return Ok(Vec::new());
        }
        let kinds = self.kinds();
        let points = self.debugger.as_ref().map_or(Ok(Vec::new()), |d| plan(d, kinds))?;
        let armed = |cpu: usize| self.cpu_state(cpu).is_some_and(|state| is_armed(&state));
        if !points.is_empty() && !kinds.beside && (0..self.cpu_count()).any(armed) {
            return Err("the guest has breakpoints of its own, and the processor holds either");
        }
        Ok(points)
    }

    /// The CPU whose next instruction is to be executed without another stop at its breakpoint.
    pub(super) fn passes(&self, points: &[Point]) -> Option<usize> {
        let at = |address: u64| {
            points
                .iter()
                .any(|point| point.register == guest_debug::execution(address))
        };
        (0..self.cpu_count()).find(|&cpu| {
            let state = self.cpu_state(cpu).unwrap_or_default();
            state.observed == Some(linear(&state)) && at(linear(&state))
        })
    }

    /// Takes in which CPUs met which of the points.
    pub(super) fn met(&mut self, points: &[Point], hits: &[(usize, Hit)]) -> Option<debug::DebugStop> {
        for &(cpu, hit) in hits {
            let met = points.iter().enumerate().filter(|(n, _)| hit.points >> n & 1 != 0);
            let mut data = met.filter(|(_, point)| point.register.watched != Watched::Execute);
            if let Some((_, point)) = data.next() {
                self.points.waiting.push_back(debug::DebugStop { cpu, why: point.why });
            }
        }
        if let Some(stop) = self.waiting_stop() {
            // Whoever is before a breakpoint meets it again.
            return Some(stop);
        }
        let (cpu, address) = hits.iter().find_map(|&(cpu, hit)| {
            let (_, point) = points.iter().enumerate().find(|(n, _)| hit.points >> n & 1 != 0)?;
            // Its own comes first: the engine delivers it, and the handler comes back here with RF set.
            let own = self.cpu_state(cpu).is_some_and(|state| breaks_here(&state));
            (!own).then_some((cpu, point.register.first))
        })?;
        let mut state = self.cpu_state(cpu)?;
        state.observed = Some(linear(&state));
        self.soft.put(cpu, &state);
        Some(debug::DebugStop {
            cpu,
            why: debug::StopCause::Breakpoint(address),
        })
    }

    /// A stop that has not been reported, of a watchpoint that is still there.
    pub(super) fn waiting_stop(&mut self) -> Option<debug::DebugStop> {
        if self.soft.runs_only() {
            return None;
        }
        let debugger = self.debugger.as_ref()?;
        let (_, watchpoints) = debugger.places()?;
        while let Some(stop) = self.points.waiting.pop_front() {
            let there = |watchpoint: &Watchpoint| matches!(stop.why, debug::StopCause::Watch { watchpoint: met, .. } if met == *watchpoint);
            if watchpoints.iter().any(there) {
                return Some(stop);
            }
        }
        None
    }

    /// The machine is in another state than it was.
    pub(super) fn forget_stops(&mut self) {
        self.points.waiting.clear();
    }

    /// What KVM delivers to a debugger, and how breakpoints and watchpoints are served on KVM, in a line; `None` in a machine that is not on KVM, or that nobody
    /// debugs.
    pub(crate) fn how_points_are_served(&mut self) -> Option<String> {
        let kinds = match self.points.kinds {
            Some(kinds) => kinds,
            // The first question may come before the guest has run.
            None if self.is_hosted() && self.debugger.is_some() => self.kinds(),
            None => return None,
        };
        let plan = plan(self.debugger.as_ref()?, kinds);
        let how = match (plan, self.points()) {
            (Ok(points), Ok(_)) => format!("{} of {ROOM} debug registers in use", points.len()),
            (Err(why), _) | (_, Err(why)) => format!("the software engine has the guest: {why}"),
        };
        Some(format!("debugger: KVM delivers {kinds}; {how}"))
    }
}

#[cfg(test)]
#[path = "points_test.rs"]
mod tests;
