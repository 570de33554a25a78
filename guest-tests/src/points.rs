//! A debugger's breakpoints and watchpoints in guests on KVM, on whatever KVM the host has: what is met, where the guest ran
//! meanwhile, and what it could see of it.

use std::path::{Path, PathBuf};

use iced_x86::code_asm::*;
use iced_x86::{BlockEncoderOptions, IcedError};
use minivmm::config::{EngineChoice, KvmDefects};
use minivmm::debug::{DebugStop, StopCause, WatchKind, Watchpoint};
use minivmm::kvm::{Host, guest_debug::Kinds};
use minivmm::vm::Native;
use minivmm::{Console, CpuState, End, MachineConfig, Run, StopReason};
use x86::model::HASWELL;

use crate::flat::{self, CODE, DATA};

/// Where the handler of #DB leaves DR6.
const STATUS: u64 = DATA + 0x10;
/// DR7 with L0 and what is always 1.
const OWN: u32 = 0x401;
/// Rounds of the loop that only has to take its time.
const SPIN: u32 = 50_000;

/// Places of the program.
#[derive(Clone, Copy, Debug)]
struct Places {
    /// Where it has a breakpoint of its own, if it is to have one.
    own: u64,
    /// Behind that: stores the round at [`DATA`].
    store: u64,
    /// Loads it.
    load: u64,
    /// Behind that.
    loaded: u64,
    /// After the spinning.
    end: u64,
    handler: u64,
}

/// What the program does with debug exceptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Own {
    Nothing,
    /// A breakpoint at [`Places::own`].
    Breakpoint,
    /// RFLAGS.TF for four instructions.
    Steps,
}

/// `rounds` times: RDX counts, the store, the load. Then R8, R9 and R10 are DR7, DR0 and RFLAGS, DR7 is cleared, and it spins. RSI
/// counts debug exceptions.
fn program(own: Own, rounds: u32, a: &mut CodeAssembler) -> Result<[CodeLabel; 6], IcedError> {
    let mut labels = [(); 6].map(|()| a.create_label());
    let [at_own, at_store, at_load, at_loaded, at_end, handler] = &mut labels;
    let (mut again, mut spin) = (a.create_label(), a.create_label());
    for register in [edx, esi, ebx, ebp] {
        a.xor(register, register)?;
    }
    if own == Own::Breakpoint {
        a.lea(rax, ptr(*at_own))?;
        a.mov(dr0, rax)?;
        a.mov(eax, OWN)?;
        a.mov(dr7, rax)?;
    }
    if own == Own::Steps {
        a.pushfq()?;
        a.or(dword_ptr(rsp), 0x100)?;
        a.popfq()?;
        a.inc(ebp)?;
        a.inc(ebp)?;
        a.pushfq()?;
        a.and(dword_ptr(rsp), !0x100)?;
        a.popfq()?;
    }
    a.mov(ecx, rounds)?;
    a.set_label(&mut again)?;
    a.inc(edx)?;
    a.set_label(at_own)?;
    a.inc(ebx)?;
    a.set_label(at_store)?;
    a.mov(qword_ptr(DATA), rdx)?;
    a.set_label(at_load)?;
    a.mov(rdi, qword_ptr(DATA))?;
    a.set_label(at_loaded)?;
    a.dec(ecx)?;
    a.jnz(again)?;
    a.mov(rax, dr7)?;
    a.mov(r8, rax)?;
    a.mov(rax, dr0)?;
    a.mov(r9, rax)?;
    a.pushfq()?;
    a.pop(r10)?;
    a.mov(eax, OWN & !1)?;
    a.mov(dr7, rax)?;
    a.mov(ecx, SPIN)?;
    a.set_label(&mut spin)?;
    a.inc(ebp)?;
    a.dec(ecx)?;
    a.jnz(spin)?;
    a.xor(eax, eax)?;
    a.set_label(at_end)?;
    a.out(0xf4, al)?;
    a.hlt()?;
    a.set_label(handler)?;
    a.inc(esi)?;
    a.push(rax)?;
    a.mov(rax, dr6)?;
    a.mov(qword_ptr(STATUS), rax)?;
    a.xor(eax, eax)?;
    a.mov(dr6, rax)?;
    a.pop(rax)?;
    a.or(dword_ptr(rsp + 16), 0x1_0000)?;
    a.iretq()?;
    Ok(labels)
}

fn places(own: Own, rounds: u32) -> Places {
    let mut a = CodeAssembler::new(64).expect("64 is a width");
    let labels = program(own, rounds, &mut a).expect("it assembles");
    let laid_out = a
        .assemble_options(CODE, BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)
        .expect("it assembles");
    let [own, store, load, loaded, end, handler] = labels.map(|label| laid_out.label_ip(&label).expect("it is set"));
    Places {
        own,
        store,
        load,
        loaded,
        end,
        handler,
    }
}

/// A guest on KVM.
struct Guest {
    vm: Run,
    console: Console,
    places: Places,
}

impl Guest {
    /// Of this program. `kernel` is any file that loads: the program takes its place.
    fn new(kernel: &Path, own: Own, rounds: u32) -> Guest {
        let places = places(own, rounds);
        let config = MachineConfig {
            engine: EngineChoice::Kvm,
            kvm_defects: KvmDefects::Accept,
            kernel: kernel.into(),
            // The statistics hash it.
            memory: 4 << 20,
            ..flat::config(&HASWELL)
        };
        let jumps = [(1, (places.handler - CODE) as u32)];
        let (vm, console) = flat::whole_of(&config, 0, &jumps, |a| program(own, rounds, a).map(drop));
        Guest { vm, console, places }
    }

    fn break_at(&mut self, address: u64) {
        self.vm.debugger().add_breakpoint(address);
    }

    fn watch(&mut self, kind: WatchKind, len: u64) -> Watchpoint {
        let watchpoint = Watchpoint::new(DATA, len, kind).expect("it does not wrap");
        self.vm.debugger().add_watchpoint(watchpoint);
        watchpoint
    }

    /// Goes on to the next stop; `None`: to the end.
    fn go(&mut self) -> Option<StopCause> {
        match self.vm.run(&mut self.console).expect("it runs") {
            StopReason::Debugger(DebugStop { cpu: 0, why }) => Some(why),
            StopReason::Ended(End::DebugExit(0)) => None,
            end => panic!("{end:?}"),
        }
    }

    fn state(&self) -> CpuState {
        self.vm.cpu_state(0).expect("there is a CPU")
    }

    fn native(&mut self) -> Native {
        self.vm.stats().native.expect("it is on KVM")
    }

    /// So often in KVM, and never in the engine but for one instruction each.
    #[track_caller]
    fn ran_natively(&mut self, stops: u64) {
        let stats = self.vm.stats();
        let (native, steps) = (stats.native.expect("it is on KVM"), stats.steps);
        assert_eq!((native.exits.debug, native.watched), (stops, 0), "{native:?}");
        assert!(steps <= 2 * stops + 8, "{steps} steps in the engine");
    }
}

/// What happens on a KVM that delivers this.
pub struct Checks {
    /// A file that loads.
    pub kernel: PathBuf,
    /// What the host's KVM delivers.
    pub kinds: Kinds,
}

impl Checks {
    /// For this host's KVM.
    ///
    /// # Panics
    /// There is none.
    pub fn new(kernel: impl Into<PathBuf>) -> Self {
        let kinds = Host::open().and_then(|host| host.guest_debug());
        Checks {
            kernel: kernel.into(),
            kinds: kinds.unwrap_or_else(|why| panic!("{why}")),
        }
    }

    /// A breakpoint behind a long loop: met, not seen, and passed.
    ///
    /// # Panics
    /// It is not so.
    pub fn a_breakpoint_is_met(&self) {
        let mut guest = Guest::new(&self.kernel, Own::Nothing, 1);
        let end = guest.places.end;
        let mut before = [0; 8];
        guest.vm.read_linear(0, end, &mut before).expect("RAM");
        guest.break_at(end);
        assert_eq!(guest.go(), Some(StopCause::Breakpoint(end)));
        let state = guest.state();
        assert_eq!((state.rip, state.gpr[5]), (end, SPIN.into()));
        assert_eq!(
            (state.dr[6], state.dr[7], state.rflags.rf()),
            (0xffff_0ff0, 0x400, false)
        );
        let mut now = [0; 8];
        guest.vm.read_linear(0, end, &mut now).expect("RAM");
        assert_eq!(now, before);
        assert_eq!(guest.go(), None);
        if self.kinds.serves_breakpoints() {
            // On KVMs that show them: DR7, DR0 are read, and DR7 is written.
            guest.ran_natively(1 + 3 * u64::from(self.kinds.register_access));
        } else {
            assert!(guest.native().watched > 0);
        }
    }

    /// A breakpoint in a loop: each round once.
    ///
    /// # Panics
    /// It is not so.
    pub fn a_breakpoint_is_met_each_time(&self) {
        let mut guest = Guest::new(&self.kernel, Own::Nothing, 5);
        let places = guest.places;
        guest.break_at(places.store);
        for round in 1..=5 {
            assert_eq!(guest.go(), Some(StopCause::Breakpoint(places.store)));
            assert_eq!(guest.state().gpr[2], round);
        }
        assert_eq!(guest.go(), None);
        let state = guest.state();
        assert_eq!((state.gpr[6], state.gpr[8], state.gpr[9]), (0, 0x400, 0));
        assert_eq!(state.gpr[10] & 0x1_0100, 0, "neither RF nor TF");
        if self.kinds.serves_breakpoints() {
            guest.ran_natively(5 + 3 * u64::from(self.kinds.register_access));
        }
    }

    /// Watchpoints for stores, for all accesses, and for reads, which no debug register watches.
    ///
    /// # Panics
    /// It is not so.
    pub fn watchpoints_are_met(&self) {
        for (kind, len, behind_store, behind_load, fits) in [
            (WatchKind::Write, 8, true, false, true),
            (WatchKind::Access, 4, true, true, true),
            (WatchKind::Read, 8, false, true, false),
            (WatchKind::Write, 3, true, false, false),
        ] {
            let mut guest = Guest::new(&self.kernel, Own::Nothing, 3);
            let places = guest.places;
            let watchpoint = guest.watch(kind, len);
            for round in 1..=3 {
                let behind = [(places.load, behind_store), (places.loaded, behind_load)];
                for (rip, _) in behind.iter().filter(|(_, stops)| *stops) {
                    let stop = guest.go();
                    assert!(
                        matches!(stop, Some(StopCause::Watch { watchpoint: met, address: DATA, .. }) if met == watchpoint),
                        "{kind:?}: {stop:x?}"
                    );
                    let state = guest.state();
                    assert_eq!((state.rip, state.gpr[2]), (*rip, round), "{kind:?}");
                }
            }
            assert_eq!(guest.go(), None);
            assert_eq!((guest.state().gpr[6], guest.state().gpr[8]), (0, 0x400));
            if fits && self.kinds.serves_watchpoints() {
                let stops = 3 * (u64::from(behind_store) + u64::from(behind_load));
                guest.ran_natively(stops + 3);
            } else {
                assert!(guest.native().watched > 0, "{kind:?}");
            }
        }
    }

    /// A fifth breakpoint: the engine has them all, until it is gone.
    ///
    /// # Panics
    /// It is not so.
    pub fn a_fifth_is_met_by_handover(&self) {
        let mut guest = Guest::new(&self.kernel, Own::Nothing, 2);
        let places = guest.places;
        for address in [places.own, places.store, places.load, places.end, places.handler] {
            guest.break_at(address);
        }
        for _ in 0..2 {
            for address in [places.own, places.store, places.load] {
                assert_eq!(guest.go(), Some(StopCause::Breakpoint(address)));
            }
        }
        let before = guest.native();
        assert!(before.watched > 0 && before.exits.debug == 0, "{before:?}");
        guest.vm.debugger().remove_breakpoint(places.own);
        assert_eq!(guest.go(), Some(StopCause::Breakpoint(places.end)));
        let after = guest.native();
        if self.kinds.serves_breakpoints() {
            assert!(after.exits.debug > 0 && after.watched == before.watched, "{after:?}");
        }
        assert_eq!(guest.go(), None);
    }

    /// The guest has a breakpoint of its own: it meets it, and the host its own, and both where it is the same place.
    ///
    /// # Panics
    /// It is not so.
    pub fn both_meet_their_own(&self) {
        for (same, stops_at_store) in [(false, true), (true, true), (true, false)] {
            let mut guest = Guest::new(&self.kernel, Own::Breakpoint, 4);
            let places = guest.places;
            let wanted: Vec<u64> = [(places.own, same), (places.store, stops_at_store)]
                .iter()
                .filter_map(|(address, wanted)| wanted.then_some(*address))
                .collect();
            wanted.iter().for_each(|address| guest.break_at(*address));
            for round in 1..=4 {
                for &address in &wanted {
                    assert_eq!(guest.go(), Some(StopCause::Breakpoint(address)));
                    let state = guest.state();
                    // Its handler has run before the host's breakpoint is reported.
                    assert_eq!((state.gpr[2], state.gpr[6]), (round, round), "{same}");
                    let mut status = [0; 8];
                    guest.vm.read_linear(0, STATUS, &mut status).expect("RAM");
                    assert_eq!(u64::from_le_bytes(status), 0xffff_0ff1);
                    assert_eq!((state.dr[0], state.dr[7]), (places.own, OWN.into()));
                }
            }
            guest.break_at(places.end);
            assert_eq!(guest.go(), Some(StopCause::Breakpoint(places.end)));
            let state = guest.state();
            assert_eq!((state.gpr[6], state.gpr[8], state.gpr[9]), (4, OWN.into(), places.own));
            assert_eq!(guest.go(), None);
            let native = guest.native();
            match (self.kinds.serves_breakpoints(), self.kinds.beside) {
                (true, true) => assert!(native.watched == 0 && native.exits.debug > 4, "{native:?}"),
                // MOV DR has shown that it has one.
                (true, false) => assert!(native.watched > 0 && native.exits.debug > 0, "{native:?}"),
                (false, _) => assert!(native.watched > 0),
            }
        }
    }

    /// The guest steps itself beside a breakpoint of the host's.
    ///
    /// # Panics
    /// It is not so.
    pub fn the_guest_steps_itself(&self) {
        let steps = |breaks: bool| {
            let mut guest = Guest::new(&self.kernel, Own::Steps, 1);
            let end = guest.places.end;
            if breaks {
                guest.break_at(end);
                assert_eq!(guest.go(), Some(StopCause::Breakpoint(end)));
            }
            assert_eq!(guest.go(), None);
            let mut status = [0; 8];
            guest.vm.read_linear(0, STATUS, &mut status).expect("RAM");
            (guest.state().gpr[6], u64::from_le_bytes(status), guest.state().gpr[10])
        };
        let alone = steps(false);
        // Two INCs, PUSHFQ, AND, and POPFQ, behind which TF is clear but which began with it.
        assert_eq!((alone.0, alone.1), (5, 0xffff_4ff0));
        assert_eq!(steps(true), alone);
    }

    /// All of them, and what KVM delivers, on standard output.
    ///
    /// # Panics
    /// One does not hold.
    pub fn all(&self) {
        println!("KVM delivers {}", self.kinds);
        self.a_breakpoint_is_met();
        self.a_breakpoint_is_met_each_time();
        self.watchpoints_are_met();
        self.a_fifth_is_met_by_handover();
        self.both_meet_their_own();
        self.the_guest_steps_itself();
        println!("all hold");
    }
}
