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

    /// A stop that has not been told, of a watchpoint that is still there.
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
mod tests {
    use super::*;

    const ALL: Kinds = Kinds {
        single_step: true,
        software: false,
        execution: true,
        data: true,
        register_access: true,
        beside: false,
    };

    fn debugger(breakpoints: &[u64], watchpoints: &[(u64, u64, WatchKind)]) -> Debugger {
        let mut debugger = Debugger::new();
        breakpoints.iter().for_each(|&address| debugger.add_breakpoint(address));
        for &(first, len, kind) in watchpoints {
            debugger.add_watchpoint(Watchpoint::new(first, len, kind).unwrap());
        }
        debugger
    }

    // covers: kvm/points
    #[test]
    fn up_to_four_points_that_the_processor_has_are_its_own() {
        use WatchKind::*;
        for (breakpoints, watchpoints, count, why) in [
            (&[][..], &[][..], Some(0), "nothing to stop for"),
            (&[1, 2, 3, 4], &[], Some(4), "four breakpoints"),
            (&[1, 2, 3, 4, 5], &[], None, "five"),
            (
                &[1],
                &[(8, 8, Write), (16, 4, Access), (2, 2, Write)],
                Some(4),
                "both kinds",
            ),
            (
                &[1, 2],
                &[(8, 8, Write), (16, 4, Access), (2, 2, Write)],
                None,
                "both kinds, five",
            ),
            (
                &[],
                &[(8, 8, Write), (8, 8, Write)],
                Some(1),
                "one that is wanted twice",
            ),
            (&[], &[(8, 8, Write), (8, 8, Access)], Some(2), "two at a place"),
            (&[], &[(4, 8, Write)], None, "not aligned"),
            (&[], &[(8, 3, Write)], None, "of no length that there is"),
            (&[], &[(16, 16, Write)], None, "too long"),
            (&[], &[(8, 8, Read)], None, "reads alone"),
            (
                &[u64::MAX],
                &[(u64::MAX, 1, Access)],
                Some(2),
                "at the end of the address space",
            ),
        ] {
            let points = plan(&debugger(breakpoints, watchpoints), ALL);
            assert_eq!(points.ok().map(|points| points.len()), count, "{why}");
        }
        let mut steps = debugger(&[1], &[]);
        steps.step(Some(0));
        assert!(plan(&steps, ALL).is_err());
        let mut catches = debugger(&[1], &[]);
        catches.catch(14, true);
        assert!(plan(&catches, ALL).is_err());
        catches.suspend(true);
        assert_eq!(plan(&catches, ALL), Ok(Vec::new()));
    }

    // covers: kvm/points
    #[test]
    fn what_a_kvm_does_not_deliver_is_the_engines() {
        let data = debugger(&[1], &[(8, 8, WatchKind::Write)]);
        let code = debugger(&[1], &[]);
        for (kinds, serves_code, serves_data, why) in [
            (ALL, true, true, "kvm-intel"),
            (Kinds::default(), false, false, "kvm-amd in QEMU"),
            (Kinds { data: false, ..ALL }, true, false, "no watchpoints"),
            (
                Kinds {
                    register_access: false,
                    ..ALL
                },
                false,
                false,
                "what the guest does to its own would not be seen",
            ),
            (
                Kinds {
                    register_access: false,
                    beside: true,
                    data: false,
                    ..ALL
                },
                true,
                false,
                "one that interprets, and looks at both",
            ),
        ] {
            assert_eq!(plan(&code, kinds).is_ok(), serves_code, "{why}");
            assert_eq!(plan(&data, kinds).is_ok(), serves_data, "{why}");
        }
    }

    /// A machine of two CPUs, in which nothing runs.
    fn machine() -> crate::Run {
        let flags = 1u32 << 16;
        let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
        let words = [
            0x1bad_b002,
            flags,
            checksum,
            0x10_0000,
            0x10_0000,
            0,
            0,
            0x10_0020,
            0xf4,
        ];
        let image: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let name = format!(
            "minivmm-points-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        );
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, image).unwrap();
        let vm = crate::Run::new(&crate::MachineConfig {
            memory: 4 << 20,
            cpus: 2,
            ..crate::MachineConfig::new(&path)
        });
        std::fs::remove_file(&path).unwrap();
        vm.unwrap()
    }

    fn hit(points: u8) -> Hit {
        Hit {
            points,
            guest_steps: false,
        }
    }

    // covers: kvm/points
    #[test]
    fn what_several_cpus_meet_at_once_is_told_one_by_one() {
        let mut vm = machine();
        let here = linear(&vm.cpu_state(0).unwrap());
        let watchpoint = Watchpoint::new(0x20_0000, 8, WatchKind::Write).unwrap();
        vm.debugger().add_breakpoint(here);
        vm.debugger().add_watchpoint(watchpoint);
        let points = plan(vm.debugger(), ALL).unwrap();
        let watched = |cpu| {
            let why = debug::StopCause::Watch {
                watchpoint,
                address: 0x20_0000,
                ip: None,
            };
            Some(debug::DebugStop { cpu, why })
        };
        let broken = Some(debug::DebugStop {
            cpu: 0,
            why: debug::StopCause::Breakpoint(here),
        });
        // The accesses have been made; the breakpoint is met again.
        assert_eq!(vm.met(&points, &[(0, hit(1)), (1, hit(2)), (0, hit(3))]), watched(1));
        assert_eq!(vm.passes(&points), None);
        vm.run_only(Some(1));
        assert_eq!(
            vm.waiting_stop(),
            None,
            "one CPU is to run, and none other's stop is told"
        );
        vm.run_only(None);
        assert_eq!((vm.waiting_stop(), vm.waiting_stop()), (watched(0), None));
        assert_eq!(vm.met(&points, &[(0, hit(1))]), broken);
        assert_eq!(vm.passes(&points), Some(0));
        // Of one that is gone nothing is told.
        vm.met(&points, &[(0, hit(2)), (1, hit(2))]);
        vm.debugger().remove_watchpoint(&watchpoint);
        assert_eq!(vm.waiting_stop(), None);
        assert_eq!(vm.met(&points, &[]), None);
    }

    // covers: kvm/points-own
    #[test]
    fn the_guests_own_breakpoint_comes_before_the_hosts() {
        let mut vm = machine();
        let mut state = vm.cpu_state(0).unwrap();
        let here = linear(&state);
        vm.debugger().add_breakpoint(here);
        let points = plan(vm.debugger(), ALL).unwrap();
        let mut meets = |dr7: u64, rflags: u64| {
            (state.dr[0], state.dr[7], state.rflags, state.observed) = (here, dr7, rflags.into(), None);
            vm.set_cpu_state(0, &state).unwrap();
            vm.met(&points, &[(0, hit(1))]).is_some()
        };
        assert!(meets(0x400, 2), "it has none");
        assert!(!meets(0x401, 2));
        assert!(meets(0x401, 2 | x86::rflags::flag::RF), "its handler has returned");
        assert!(meets(0x1_0401, 2), "its own watches stores");
    }

    // covers: kvm/points-own
    #[test]
    fn a_guest_with_breakpoints_of_its_own_is_the_engines_unless_kvm_looks_at_both() {
        let mut vm = machine();
        vm.debugger().add_breakpoint(1);
        for (dr7, kinds, native) in [
            (0x400, ALL, true),
            (0x401, ALL, false),
            (0x480, ALL, false),
            (0x2400, ALL, false),
            (0x401, Kinds { beside: true, ..ALL }, true),
        ] {
            let mut state = vm.cpu_state(1).unwrap();
            state.dr[7] = dr7;
            vm.set_cpu_state(1, &state).unwrap();
            vm.points.kinds = Some(kinds);
            assert_eq!(vm.points().is_ok(), native, "{dr7:x}");
            assert_eq!(vm.how_points_are_served().unwrap().contains("1 of 4"), native);
        }
        vm.debugger().remove_breakpoint(1);
        assert!(vm.points().is_ok(), "there is nothing to stop for");
    }
}
