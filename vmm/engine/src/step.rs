//! The run loop: finds or decodes the block at RIP, runs the chain that begins there, and sees to what ended it.
// The engine core is one of the rooms where `unsafe` is allowed: see `op`.
#![allow(unsafe_code)]

use core::ptr::NonNull;

use x86::model::CpuModel;
use x86::rflags::flag as rf;
use x86::vmx::ExitReason;
use x86::vmx::exits::apic_access;
use x86::watch::{Abort, BranchRecord, Change, Effects, Far, Flow};

use crate::block::BlockCache;
use crate::bus::{Bus, Processor};
use crate::cpu::{Activity, CS, Cpu, Event, Source as EventSource};
use crate::flags;
use crate::frontend::{self, MAX, Shown, Source, Trouble};
use crate::key::Key;
use crate::lower::{Lowered, control::Stale};
use crate::mmu::{self, Access};
use crate::op::{Done, Op, Reason, Stop, chain_flow, enter_chain};
use crate::ram::RamRegion;
use crate::shared::SharedState;
use crate::tlb::Grant;
use crate::translate::{Listing, Statistics, Translator, Why};
use crate::vmx::{Delivered, ExitInformation, Vectoring};
use crate::watch::{DUE, EventOrigin, View};
use crate::{EngineOptions, Exit, HostLacks};

/// The software CPU: memory map, code cache, instruction set. Processors ([`Cpu`]) run on it in turn.
pub struct Engine {
    pub(crate) shared: Box<SharedState>,
    shown: Shown,
    options: EngineOptions,
    /// Ops of the block being decoded, and of blocks that are run once.
    scratch: Lowered,
}

/// #DB.
pub(crate) const DEBUG: Event = Event {
    vector: 1,
    error: None,
    source: EventSource::Exception,
};

/// Events in a row without a step after which [`Engine::run`] returns.
const MAX_EVENTS: u64 = 1000;
/// Rounds of the run loop without a step or an event after which it has a defect. An instruction that first hands records over,
/// asks the units and wants a block of its own takes less than ten.
const MAX_IDLE: u32 = 1000;

/// Whether the run loop gets on: steps and events show it.
struct Progress {
    steps: u64,
    /// Events delivered when the last step was made.
    events: u64,
    /// Events delivered so far.
    delivered: u64,
    /// Rounds since either grew.
    idle: u32,
}

impl Progress {
    fn new(cpu: &Cpu) -> Progress {
        Progress {
            steps: cpu.steps_now(),
            events: cpu.deliveries,
            delivered: cpu.deliveries,
            idle: 0,
        }
    }

    /// One more round begins: why it must not, if so. A guest whose exceptions never end makes no steps, and must not keep the
    /// caller from looking at its own limits; rounds in which not even an exception is delivered are the engine's own fault or
    /// that of a unit.
    #[inline]
    fn round(&mut self, cpu: &Cpu, blocks: &BlockCache) -> Option<Exit> {
        let steps = cpu.steps_now();
        if steps != self.steps {
            (self.steps, self.idle) = (steps, 0);
            (self.events, self.delivered) = (cpu.deliveries, cpu.deliveries);
            return None;
        }
        self.stalled(cpu, blocks)
    }

    #[cold]
    fn stalled(&mut self, cpu: &Cpu, blocks: &BlockCache) -> Option<Exit> {
        if cpu.deliveries != self.delivered {
            (self.delivered, self.idle) = (cpu.deliveries, 0);
            return (self.delivered - self.events >= MAX_EVENTS).then_some(Exit::Bus);
        }
        self.idle += 1;
        (self.idle > MAX_IDLE).then(|| {
            let mut what = format!(
                "the engine makes no progress at {:#x} (RIP {:#x}, {:?})",
                cpu.linear(cpu.rip),
                cpu.rip,
                cpu.stop
            );
            if let Some(block) = blocks.newest() {
                what += &format!("; decoded last: {block}");
            }
            Exit::Defect(what)
        })
    }
}

/// How long the block at RIP may be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Length {
    /// Whole, and kept.
    Whole,
    /// At most so many instructions, then pause; not kept.
    Cut(usize),
}

impl Engine {
    /// An engine for one machine.
    ///
    /// # Errors
    /// [`HostLacks`] when the model has instructions that run on the host's own vector unit and the host has not got them.
    ///
    /// # Safety
    /// Each region's `len` bytes at `host` must stay mapped, readable and writable, for as long as the engine lives, and
    /// `host` and `gpa` must be 4-KiB aligned. Nobody may hold Rust references into them while [`Engine::run`] runs.
    pub unsafe fn new(
        ram: Vec<RamRegion>,
        model: &'static CpuModel,
        options: EngineOptions,
    ) -> Result<Engine, HostLacks> {
        crate::host_can(model, options)?;
        Ok(Engine {
            shared: Box::new(SharedState::new(
                &ram,
                chain_flow::<Stale>().run,
                options
                    .translate_after
                    .and_then(|after| Translator::new(after, options.translated_bytes)),
            )),
            shown: Shown::new(model, options),
            options,
            scratch: Lowered::default(),
        })
    }

    /// What has been translated so far; `None`: nothing is, since it is not wanted or this host gives no executable memory.
    pub fn translated(&self) -> Option<Statistics> {
        self.shared.blocks.translated()
    }

    /// What the interpreter did in blocks that are translated, as the manual names the instructions, and how often: what it did most
    /// comes first.
    pub fn not_translated(&self) -> Vec<(String, Why, u64)> {
        self.shared.blocks.not_translated()
    }

    /// The translation of the block that a processor is about to run, if there is one.
    pub fn translation(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus) -> Option<Listing> {
        cpu.attach(NonNull::from(&mut *self.shared), bus);
        self.catch_up(cpu);
        let linear = cpu.linear(cpu.rip);
        let paging = cpu.paging(cpu.cpl == 3);
        cpu.detach();
        let page = mmu::probe(&mut self.shared.ram, &paging, linear, Access::Fetch).ok()?;
        let key = Key {
            gpa: page.gpa | linear & 0xfff,
            mode: cpu.mode,
        };
        let ram = &self.shared.ram;
        self.shared.blocks.listing(key, |gpa, bytes| {
            // What is decoded is in RAM.
            let _ = ram.read(gpa, bytes);
        })
    }

    /// For tests of what compares translations with the interpreter: the block at a guest-physical address gets a wrong one, if it
    /// has none yet.
    #[doc(hidden)]
    pub fn translate_wrongly(&mut self, gpa: u64) {
        self.shared.blocks.translate_wrongly(gpa);
    }

    /// Somebody other than a processor of this engine wrote guest RAM: drops code decoded from it.
    ///
    /// An open transaction is aborted: what it reads is not followed, so that any write may be one that it must not miss.
    pub fn written(&mut self, gpa: u64, len: u64) {
        self.shared.undo(Abort::Conflict, Some((gpa, len)));
        self.shared.written(gpa, len);
    }

    /// Has the units look at a processor between two runs: they are asked what they want to hear.
    pub fn ask(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus) {
        cpu.attach(NonNull::from(&mut *self.shared), bus);
        self.question(cpu);
        cpu.detach();
    }

    /// Looks at a processor between two runs, as its units see it.
    pub fn look<B: Bus, T>(
        &mut self,
        cpu: &mut Cpu,
        bus: &mut B,
        f: impl FnOnce(&mut B, &mut dyn Processor) -> T,
    ) -> T {
        cpu.attach(NonNull::from(&mut *self.shared), bus);
        let tsc = bus.tsc(cpu.clock);
        let seen = f(bus, &mut View::between(cpu, tsc));
        cpu.detach();
        seen
    }

    /// Runs a processor for at most `budget` steps (instructions and REP iterations).
    pub fn run(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, budget: u64) -> Exit {
        let budget = budget.min(i64::MAX as u64 / 2) as i64;
        cpu.undefined = self.options.undefined;
        self.attach(cpu, bus);
        cpu.budget = budget;
        cpu.granted = budget;
        cpu.bus_used = false;
        // RIP may have been moved since the link was asked for, and what it is in may be gone.
        cpu.link = core::ptr::null_mut();
        cpu.asked_window = cpu.want_window;
        cpu.want_window |= cpu.window_wanted();
        self.question(cpu);
        // An interrupt that the units ask for comes before the next instruction.
        let exit = if cpu.bus_used {
            Exit::Budget
        } else {
            self.run_attached(cpu)
        };
        let exit = match self.close(cpu, exit) {
            Exit::Defect(what) => Exit::Defect(what),
            exit if core::mem::take(&mut cpu.watched.stop) => Exit::Stop {
                pause: exit == Exit::Pause,
            },
            exit => exit,
        };
        // What VMX operation wanted to hear of is no wish of the caller's.
        cpu.want_window = cpu.asked_window;
        let used = (cpu.granted - cpu.budget) as u64;
        cpu.budget = 0;
        cpu.granted = 0;
        cpu.steps += used;
        cpu.clock = cpu.clock.wrapping_add(used);
        cpu.detach();
        exit
    }

    /// Somebody else has run the guest for a while, and may have written any of its memory: drops all decoded code, and counts
    /// every page as written.
    pub fn forget_code(&mut self) {
        self.shared.flush();
        self.shared.ram.all_dirty = true;
    }

    /// Delivers an event that another processor had begun to deliver in this one's place: `cpu` is at the instruction that it
    /// interrupts.
    pub fn raise(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, event: Event) {
        self.inject(cpu, bus, event);
    }

    /// Delivers an external interrupt; only while [`Cpu::interruptible`].
    pub fn interrupt(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, vector: u8) {
        self.inject(
            cpu,
            bus,
            Event {
                vector,
                error: None,
                source: EventSource::External,
            },
        );
    }

    /// Delivers a non-maskable interrupt; only while [`Cpu::nmi_deliverable`].
    pub fn nmi(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus) {
        self.inject(
            cpu,
            bus,
            Event {
                vector: 2,
                error: None,
                source: EventSource::Nmi,
            },
        );
        cpu.nmi_blocked = true;
    }

    /// Lends a processor its surroundings. The transaction of another one that is open ends: there is somebody to see it.
    fn attach(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus) {
        self.shared.part(cpu.transaction.as_ref());
        cpu.attach(NonNull::from(&mut *self.shared), bus);
    }

    /// A processor's turn is over: its transaction, if one is open, is undone, and aborts when the processor runs next. To be
    /// called before memory is looked at on behalf of anybody else.
    pub fn end_turn(&mut self, cpu: &Cpu) {
        self.shared.part(cpu.transaction.as_ref());
        self.shared.part(None);
    }

    /// Forgets what the processor knows of blocks that are gone, and recomputes its mode if that is out of date.
    pub(crate) fn catch_up(&mut self, cpu: &mut Cpu) {
        if cpu.generation != self.shared.blocks.generation {
            cpu.generation = self.shared.blocks.generation;
            cpu.jumps.clear();
            cpu.bind_boundaries();
        }
        if cpu.mode == u32::MAX {
            cpu.refresh_mode();
        }
        cpu.hold_stores_back();
    }

    /// Ends a processor's MWAIT or UMWAIT if the line that it monitors has been stored to, UMWAIT and TPAUSE at their deadline; says
    /// whether it runs now.
    pub fn wake(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus) -> bool {
        if cpu.activity != Activity::Waiting {
            return cpu.activity == Activity::Running;
        }
        cpu.attach(NonNull::from(&mut *self.shared), bus);
        if cpu.watched.generation.is_none() {
            // After another state has been taken on, nobody knows yet whether the units want to hear of the end.
            cpu.ask();
        }
        self.catch_up(cpu);
        self.end_wait(cpu);
        cpu.detach();
        cpu.activity == Activity::Running
    }

    /// The same within a run, where a masked interrupt that is pending shows in `want_window`.
    fn end_wait(&mut self, cpu: &mut Cpu) {
        cpu.look_at_line();
        let interrupted = cpu.monitor.masked && cpu.want_window;
        if let Some(wait) = cpu.monitor.timed {
            let stored = wait.line && cpu.monitor.line.is_none();
            let now = cpu.clock_now();
            let over = cpu.bus().tsc(now) >= wait.deadline;
            if stored || over || interrupted {
                // SDM Vol. 2B "TPAUSE", "UMWAIT": CF says that it was the operating system's limit.
                if over && wait.limited && !stored {
                    cpu.nf = flags::CF;
                }
                cpu.end_timed_wait();
                cpu.activity = Activity::Running;
            }
            return;
        }
        if cpu.monitor.line.is_some() && !interrupted {
            return;
        }
        let store = cpu.monitor.line.take().is_none();
        cpu.activity = Activity::Running;
        if cpu.watched.tell {
            let effects = cpu.say(|watch, view| watch.state(Change::Wake { store }, view));
            self.follow(cpu, effects);
        }
    }

    /// INIT: see [`Cpu::init`]. It waits where it is held off ([`Cpu::init_blocked`]), and of a guest it causes a VM exit. Says whether the
    /// processor was initialized.
    pub fn init(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, bootstrap: bool) -> bool {
        cpu.init_pending = cpu.init_blocked();
        if cpu.init_pending {
            return false;
        }
        if cpu.non_root() {
            self.between(cpu, bus, |engine, cpu| {
                engine.abort(cpu, Abort::Event, None);
                engine.make_vm_exit(cpu, ExitInformation::new(ExitReason::Init));
            });
            return false;
        }
        self.drop_transaction(cpu);
        self.tell(cpu, bus, |cpu| {
            let at = cpu.linear(cpu.rip);
            cpu.init(bootstrap);
            Change::Init { at }
        });
        true
    }

    /// A start-up IPI: see [`Cpu::start`].
    pub fn start(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, vector: u8) {
        if cpu.activity == Activity::WaitForSipi {
            self.tell(cpu, bus, |cpu| {
                cpu.start(vector);
                Change::StartUp(vector)
            });
        }
    }

    /// Makes a change that comes from outside, and tells the units. They are asked what they want to hear while the processor is
    /// still as it was: what they do then is about the instruction that it would have executed next.
    fn tell(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, make: impl FnOnce(&mut Cpu) -> Change) {
        self.attach(cpu, bus);
        cpu.ask();
        self.catch_up(cpu);
        let change = make(cpu);
        self.catch_up(cpu);
        if cpu.watched.tell {
            let effects = cpu.say(|watch, view| watch.state(change, view));
            self.follow(cpu, effects);
        }
        cpu.detach();
    }

    fn inject(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, event: Event) {
        self.between(cpu, bus, |engine, cpu| {
            // It comes at the fallback address (SDM Vol. 1 16.3.8.2 "Runtime Considerations").
            engine.abort(cpu, Abort::Event, None);
            engine.deliver(cpu, event);
        });
    }

    /// The units hear of a transfer that is no delivery of an event: a VM entry or exit, an SMI or RSM, of so many bytes. The processor
    /// is where it has led; `cr3`: Intel PT tells that CR3 has changed.
    pub(crate) fn transition(&mut self, cpu: &mut Cpu, from: u64, from_cpl: u8, far: Far, length: u8, cr3: bool) {
        if !cpu.watched.tell {
            return;
        }
        let branch = BranchRecord {
            from,
            to: cpu.linear(cpu.rip),
            step: EventOrigin::of_processor(cpu).step(),
            flow: Flow::Far(far).code(),
            length,
            from_cpl,
            to_cpl: cpu.cpl,
            loads_cr3: cr3,
            run: [0; 3],
        };
        let effects = cpu.say(|watch, view| watch.branches(&[branch], view));
        self.follow(cpu, effects);
    }

    /// Does something between two runs that comes from outside; the units have been asked what they want to hear.
    pub(crate) fn between(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus, f: impl FnOnce(&mut Engine, &mut Cpu)) {
        self.attach(cpu, bus);
        cpu.ask();
        self.catch_up(cpu);
        cpu.asked_window = cpu.want_window;
        f(self, cpu);
        cpu.want_window = cpu.asked_window;
        cpu.detach();
    }

    /// Delivers an event and lets the units hear of it. Records have been handed over.
    pub(crate) fn deliver(&mut self, cpu: &mut Cpu, event: Event) {
        let effects = self.deliver_told(cpu, event);
        self.follow(cpu, effects);
    }

    pub(crate) fn deliver_told(&mut self, cpu: &mut Cpu, event: Event) -> Effects {
        if cpu.injecting.is_none() && cpu.notifies(event) {
            self.process_posted_interrupts(cpu);
            return Effects::NONE;
        }
        cpu.deliveries += 1;
        if cpu.injecting.is_none()
            && let Some(mut exit) = cpu.event_exit(event)
        {
            // The activity state that is saved is the one that the event has met.
            exit.vectoring = cpu.vectoring.take();
            self.make_vm_exit(cpu, exit);
            return Effects::NONE;
        }
        self.resume(cpu);
        let origin = EventOrigin::of_event(cpu);
        let solo = core::mem::replace(&mut cpu.solo, true);
        let delivered = self.deliver_whole(cpu, event);
        cpu.solo = solo;
        let mut effects = Effects::NONE;
        if cpu.watched.tell {
            effects = match delivered {
                Delivered::Event(event) => {
                    let record = origin.record(cpu, event);
                    cpu.say(|watch, view| watch.event(&record, view))
                }
                Delivered::VmExit => Effects::NONE,
                Delivered::Shutdown => {
                    cpu.watched.loads_cr3 = false;
                    cpu.say(|watch, view| watch.state(Change::Shutdown, view))
                }
            };
        }
        for access in core::mem::take(&mut cpu.watched.implicit) {
            let met = cpu.say(|watch, view| watch.implicit_access(&access, view));
            if let Some(bits) = met.debug
                && matches!(delivered, Delivered::Event(_))
            {
                cpu.watched.pending |= bits | DUE;
            }
        }
        effects
    }

    /// Before an event: a debug exception ends HLT and MWAIT as an interrupt does (SDM Vol. 2A "HLT", Vol. 2B "MWAIT").
    pub(crate) fn resume(&mut self, cpu: &mut Cpu) {
        if !matches!(cpu.activity, Activity::Halted | Activity::Waiting) {
            return;
        }
        cpu.activity = Activity::Running;
        if cpu.end_timed_wait() {
            return;
        }
        if cpu.watched.tell {
            let effects = cpu.say(|watch, view| watch.state(Change::Wake { store: false }, view));
            self.follow(cpu, effects);
        }
    }

    /// Does what the units want after a callback that is not `before`.
    pub(crate) fn follow(&mut self, cpu: &mut Cpu, effects: Effects) {
        if cpu.transaction.is_some() && (effects.debug.is_some() || effects.fault.is_some() || effects.abort) {
            let cause = match effects {
                Effects { debug: Some(_), .. } => Abort::Debug,
                Effects { fault: Some(_), .. } => Abort::Exception,
                _ => Abort::Event,
            };
            self.abort(cpu, cause, effects.debug);
            return;
        }
        if let Some(bits) = effects.debug {
            cpu.set_debug_status(bits);
            // What the units want of a #DB or #PF of their own making ends here, so that they cannot raise them for ever.
            let _ = self.deliver_told(cpu, DEBUG);
        }
        if let Some(fault) = effects.fault {
            cpu.cr2_before = cpu.cr2;
            cpu.cr2 = fault.address;
            let _ = self.deliver_told(
                cpu,
                Event {
                    vector: 14,
                    error: Some(fault.code.into_bits()),
                    source: EventSource::Exception,
                },
            );
        }
    }

    /// Delivers an event and whatever exceptions its delivery raises, up to the triple fault
    /// (SDM Vol. 3A 7.15 "Exception and Interrupt Reference", "Interrupt 8—Double Fault Exception"): what was delivered in the
    /// end. In VMX non-root operation a VM exit may come in its place, or in that of an exception that its delivery raises.
    fn deliver_whole(&mut self, cpu: &mut Cpu, first: Event) -> Delivered {
        // Where the branch leads that ended the last block is not where execution goes on.
        cpu.link = core::ptr::null_mut();
        let mut event = first;
        // The event in whose delivery this one was raised.
        let mut vectoring = cpu.vectoring.take();
        loop {
            if cpu.injecting.is_none()
                && let Some(mut exit) = cpu.event_exit(event)
            {
                exit.vectoring = vectoring;
                self.make_vm_exit(cpu, exit);
                return Delivered::VmExit;
            }
            cpu.event = None;
            cpu.watched.implicit.clear();
            if cpu.deliver(event).is_ok() && !core::mem::take(&mut cpu.late_fault) {
                cpu.event = None;
                cpu.injecting = None;
                cpu.trap_by_monitor();
                if !core::mem::take(&mut cpu.task_trap) {
                    return Delivered::Event(event);
                }
                event = cpu.task_switch_trap(0);
                continue;
            }
            let mut under_way = Vectoring::of(event);
            if let Some((injected, stands)) = cpu.injecting.take() {
                (under_way, cpu.rip) = (injected, stands);
            }
            if let Some(mut exit) = cpu.exit.take() {
                exit.vectoring = Some(under_way);
                self.make_vm_exit(cpu, *exit);
                return Delivered::VmExit;
            }
            let Some(next) = cpu.event.take() else {
                return Delivered::Shutdown;
            };
            if let Some(mut exit) = cpu.event_exit(next) {
                exit.vectoring = Some(under_way);
                self.make_vm_exit(cpu, exit);
                return Delivered::VmExit;
            }
            vectoring = Some(under_way);
            if event.vector == 8 && event.source == EventSource::Exception {
                if cpu.non_root() {
                    self.make_vm_exit(cpu, triple_fault());
                    return Delivered::VmExit;
                }
                cpu.activity = Activity::Shutdown;
                return Delivered::Shutdown;
            }
            event = match (class(event), class(next)) {
                (Class::Contributory, Class::Contributory)
                | (Class::PageFault, Class::Contributory | Class::PageFault) => Event {
                    vector: 8,
                    error: Some(0),
                    source: EventSource::Exception,
                },
                _ => next,
            };
        }
    }

    /// Asks the units what they want to hear from here on.
    fn question(&mut self, cpu: &mut Cpu) {
        // Something may have to be said at once; what that leads to waits for an instruction.
        for _ in 0..2 {
            let effects = self.speak(cpu);
            self.follow(cpu, effects);
            cpu.ask();
            self.catch_up(cpu);
            if cpu.watched.interest.instructions != 0 {
                return;
            }
            let effects = cpu.say(|watch, view| watch.tick(view));
            self.follow(cpu, effects);
        }
        cpu.ask();
        self.catch_up(cpu);
    }

    /// Hands over what waits, in the order of the program: branches, then what the last instruction had to say.
    fn speak(&mut self, cpu: &mut Cpu) -> Effects {
        let mut effects = cpu.hand_over();
        if let Some(far) = cpu.watched.far.take() {
            effects = effects.and(cpu.say_branches(&[far]));
        }
        if let Some(event) = cpu.watched.event.take() {
            effects = effects.and(cpu.say(|watch, view| watch.event(&event, view)));
        }
        for access in core::mem::take(&mut cpu.watched.accesses) {
            effects = effects.and(cpu.say(|watch, view| watch.access(&access, view)));
        }
        for access in core::mem::take(&mut cpu.watched.implicit) {
            effects = effects.and(cpu.say(|watch, view| watch.implicit_access(&access, view)));
        }
        for change in core::mem::take(&mut cpu.watched.changes) {
            effects = effects.and(cpu.say(|watch, view| watch.state(change, view)));
        }
        effects
    }

    /// The end of a run: everything is handed over, and counters are brought up to date.
    fn close(&mut self, cpu: &mut Cpu, exit: Exit) -> Exit {
        let mut effects = self.speak(cpu);
        if cpu.watched.interest.instructions != u64::MAX {
            effects = effects.and(cpu.say(|watch, view| watch.tick(view)));
        }
        self.follow(cpu, effects);
        match exit {
            Exit::Budget if core::mem::take(&mut cpu.bus_used) => Exit::Bus,
            exit => exit,
        }
    }

    fn run_attached(&mut self, cpu: &mut Cpu) -> Exit {
        let mut progress = Progress::new(cpu);
        loop {
            if let Some(exit) = progress.round(cpu, &self.shared.blocks) {
                return exit;
            }
            // Whatever it was that the host heard, it was before anything that follows.
            if cpu.watched.stop {
                return Exit::Budget;
            }
            if cpu.entry_under_way() {
                self.inject_entry_event(cpu);
                continue;
            }
            if cpu.non_root()
                && let Some(exit) = cpu.boundary_exit()
            {
                // The units hear of the guest's branches before the exit, which may load what they count.
                let effects = self.speak(cpu);
                self.follow(cpu, effects);
                self.make_vm_exit(cpu, exit);
                continue;
            }
            if cpu.takes_virtual_interrupt() {
                let effects = self.speak(cpu);
                self.follow(cpu, effects);
                self.deliver_virtual_interrupt(cpu);
                continue;
            }
            if cpu.activity == Activity::Waiting {
                self.end_wait(cpu);
            }
            match cpu.activity {
                Activity::Running => {}
                Activity::Waiting => return Exit::Halt,
                Activity::Halted | Activity::WaitForSipi => return Exit::Halt,
                Activity::Shutdown if cpu.preemption_timer().is_some() => return Exit::Halt,
                Activity::Shutdown => return Exit::Shutdown,
            }
            if let Some(cause) = cpu.doomed() {
                let effects = self.speak(cpu);
                self.follow(cpu, effects);
                self.abort(cpu, cause, None);
                continue;
            }
            if cpu.budget <= 0 {
                return Exit::Budget;
            }
            if cpu.debug_due() {
                let bits = core::mem::take(&mut cpu.watched.pending) & !DUE;
                cpu.set_debug_status(bits);
                self.deliver(cpu, DEBUG);
                continue;
            }
            if cpu.asked_window
                && cpu.interrupts_enabled()
                && cpu.shadow_at != cpu.steps + (cpu.granted - cpu.budget) as u64
            {
                return Exit::Window;
            }
            if cpu.watched.ask {
                self.question(cpu);
                if core::mem::take(&mut cpu.bus_used) {
                    return Exit::Bus;
                }
                continue;
            }
            if cpu.watched.interest.every_instruction && (self.observe(cpu) || cpu.watched.stop) {
                continue;
            }
            let stepping = cpu.rflags & rf::TF != 0;
            // A shadow lasts one instruction; whoever waits for the window wants to hear right after it.
            let shadowed = cpu.want_window && cpu.rflags & rf::IF != 0 || cpu.asked_window && cpu.interrupts_enabled();
            let trapped = cpu.monitor_trap();
            let single =
                stepping || shadowed || trapped || cpu.watched.interest.every_instruction || cpu.watched.pending != 0;
            let length = if single { Length::Cut(1) } else { Length::Whole };
            // No further than the next tick.
            let tick = cpu.watched.tick_at.saturating_sub(cpu.steps_now()).max(1);
            let tick = cpu.timer_left().map_or(tick, |left| tick.min(left.max(1)));
            let aside = cpu.budget.saturating_sub_unsigned(tick).max(0);
            cpu.granted -= aside;
            cpu.budget -= aside;
            let begins = cpu.steps_now();
            let mut reason = if cpu.virtual_interrupt_due() {
                let Stop = cpu.gp(0);
                Reason::Fault
            } else {
                self.chain(cpu, length)
            };
            if reason == Reason::Budget && length == Length::Whole {
                reason = self.chain(cpu, Length::Cut(cpu.budget.max(1) as usize));
            }
            if reason == Reason::Replay && cpu.budget > 0 {
                reason = self.chain(cpu, Length::Cut(1));
            }
            cpu.granted += aside;
            cpu.budget += aside;
            let branched = stepping && (!cpu.watched.interest.step_on_branches || cpu.branched());
            if !matches!(reason, Reason::Resolve | Reason::Budget | Reason::Look) {
                // Of an instruction that did not retire.
                cpu.watched.accesses.clear();
                cpu.watched.implicit.clear();
            }
            let bus_lock = core::mem::take(&mut cpu.watched.bus_lock);
            let mut effects = Effects::NONE;
            if matches!(reason, Reason::Drain | Reason::Fault | Reason::Abort | Reason::VmExit)
                || cpu.records_full()
                || cpu.watched.speaks()
                || branched
            {
                effects = self.speak(cpu);
            }
            match reason {
                Reason::Abort => {
                    let cause = cpu.abort_cause;
                    self.follow(cpu, effects);
                    self.abort(cpu, cause, (cause == Abort::Debug).then_some(0));
                }
                Reason::Fault if cpu.transaction.is_some() => {
                    // The transaction has never been, and neither has its fault.
                    self.follow(cpu, effects);
                    self.abort(cpu, Abort::Exception, None);
                }
                Reason::Fault => {
                    let event = cpu.event.take().unwrap_or(Event {
                        vector: 6,
                        error: None,
                        source: EventSource::Exception,
                    });
                    // A data breakpoint that a load of SS holds off is lost.
                    cpu.watched.pending = 0;
                    self.follow(cpu, effects);
                    self.deliver(cpu, event);
                }
                Reason::VmExit if cpu.transaction.is_some() => {
                    (cpu.exit, cpu.vectoring) = (None, None);
                    self.follow(cpu, effects);
                    self.abort(cpu, Abort::Exception, None);
                }
                Reason::VmExit => {
                    cpu.watched.pending = 0;
                    self.follow(cpu, effects);
                    if let Some(mut exit) = cpu.exit.take() {
                        exit.vectoring = cpu.vectoring.take();
                        match cpu.virtualization_exception(&exit) {
                            Some(event) => self.deliver(cpu, event),
                            None => self.make_vm_exit(cpu, *exit),
                        }
                    }
                }
                Reason::Replay if cpu.budget <= 0 => return Exit::Budget,
                Reason::Replay => {
                    return Exit::Defect(format!(
                        "the instruction at {:#x} (RIP {:#x}) asks for a block of its own within one",
                        cpu.linear(cpu.rip),
                        cpu.rip
                    ));
                }
                Reason::Drain => self.follow(cpu, effects),
                Reason::Observe => {
                    self.observe(cpu);
                }
                Reason::Resolve | Reason::Budget | Reason::Look => {
                    // Traps, after the instruction. Single-step: SDM Vol. 3B 19.3.1.4 "Single-Step Exception Condition".
                    let step = branched && !cpu.skip_step || cpu.trap_now;
                    let bits = core::mem::take(&mut cpu.watched.pending)
                        | effects.debug.unwrap_or(0)
                        | if step { 1 << 14 } else { 0 }
                        | if bus_lock { crate::cpu::BUS_LOCK } else { 0 };
                    if core::mem::take(&mut cpu.task_trap) {
                        effects.debug = None;
                        let event = cpu.task_switch_trap(bits);
                        self.deliver(cpu, event);
                    } else if cpu.stack_shadow_at == cpu.steps_now() {
                        cpu.watched.pending = bits;
                        effects.debug = None;
                    } else if (trapped || cpu.transition_due()) && bits != 0 {
                        // VM exits of the monitor trap flag and of APIC virtualization come first, and save what is pending.
                        cpu.watched.pending = bits | DUE;
                        effects.debug = None;
                    } else {
                        effects.debug = (bits != 0).then_some(bits);
                    }
                    if trapped && cpu.steps_now() != begins {
                        cpu.trap_by_monitor();
                    }
                    self.follow(cpu, effects);
                }
            }
            cpu.emulate_apic_write();
            cpu.skip_step = false;
            cpu.trap_now = false;
            if let Some(launch) = cpu.entry.take() {
                self.enter_guest(cpu, launch);
            }
            if core::mem::take(&mut cpu.resumes) {
                self.leave_smm(cpu);
            }
            if cpu.steps_now() >= cpu.watched.tick_at {
                let effects = self.speak(cpu).and(cpu.say(|watch, view| watch.tick(view)));
                self.follow(cpu, effects);
            }
            let paused = core::mem::take(&mut cpu.paused);
            if cpu.watched.stop {
                return if paused { Exit::Pause } else { Exit::Budget };
            }
            if core::mem::take(&mut cpu.bus_used) {
                return Exit::Bus;
            }
            if paused {
                return Exit::Pause;
            }
        }
    }

    /// Says `before` of the instruction at RIP, once. Whether the units made it fault.
    fn observe(&mut self, cpu: &mut Cpu) -> bool {
        let linear = cpu.linear(cpu.rip);
        if cpu.watched.observed == (cpu.steps_now(), linear) {
            return false;
        }
        let effects = self.speak(cpu);
        if effects.debug.is_some() || effects.fault.is_some() {
            self.follow(cpu, effects);
            return true;
        }
        cpu.watched.observed = (cpu.steps_now(), linear);
        let stop = cpu.watched.stop;
        let mut effects = cpu.say(|watch, view| watch.before(linear, view));
        // RF and a load of SS let one instruction pass (SDM Vol. 3B 19.3.1.1 "Instruction-Breakpoint Exception Condition").
        if cpu.rf_at == cpu.steps_now() || cpu.stack_shadow_at == cpu.steps_now() {
            effects.debug = None;
        }
        if effects.debug.is_some() {
            // The one fault whose frame has RF clear: its handler sets it, or else meets the breakpoint again.
            cpu.watched.observed = (u64::MAX, 0);
            cpu.watched.pending = 0;
        }
        let faults = effects.debug.is_some() || effects.fault.is_some();
        if faults {
            // It is not this instruction that runs next: `before` is said again when it is.
            cpu.watched.stop = stop;
        }
        self.follow(cpu, effects);
        faults
    }

    /// Runs the chain that begins at RIP, and says what ended it.
    fn chain(&mut self, cpu: &mut Cpu, length: Length) -> Reason {
        let link = core::mem::replace(&mut cpu.link, core::ptr::null_mut());
        let generation = self.shared.blocks.generation;
        let (first, host) = match self.find(cpu, length) {
            Ok(found) => found,
            Err(Stop) => return cpu.stop,
        };
        if !link.is_null() && length == Length::Whole && generation == self.shared.blocks.generation {
            self.shared.blocks.link(link, first, host);
        }
        // SAFETY: `find` returns the first op of a live block.
        let n = unsafe { (*first).rem } as i64;
        if n > cpu.budget {
            return Reason::Budget;
        }
        // What is cut short must not run on into blocks it jumps to: the rest of the budget is put aside.
        let rest = if length == Length::Whole { 0 } else { cpu.budget - n };
        cpu.granted -= rest;
        cpu.budget -= n + rest;
        cpu.solo = length == Length::Cut(1);
        cpu.stop = Reason::Resolve;
        cpu.second_page_moved = false;
        cpu.record_rest[0] = cpu.clock.wrapping_add(cpu.granted as u64);
        // SAFETY: As above.
        unsafe { enter_chain(cpu, first) };
        if length != Length::Whole {
            // The block is gone when the next one is decoded.
            cpu.link = core::ptr::null_mut();
        }
        cpu.solo = false;
        cpu.granted += rest;
        cpu.budget += rest;
        if cpu.second_page_moved {
            let linear = cpu.linear(cpu.rip);
            let next = cpu.next_page(linear);
            let Ok((_, now)) = self.fetch(cpu, next) else {
                return cpu.stop;
            };
            // SAFETY: As above; a straddling block begins with the check that failed, and the check names the page.
            let moved = unsafe { (*first).imm } != now as u64;
            if moved && let Ok((gpa, _)) = self.fetch(cpu, linear) {
                let gpa = gpa | linear & 0xfff;
                self.shared.blocks.forget(Key { gpa, mode: cpu.mode });
            }
        }
        cpu.stop
    }

    /// The block at RIP, with its host page; decodes it if need be. `Err`: the fetch faults.
    fn find(&mut self, cpu: &mut Cpu, length: Length) -> Done<(*const Op, u64)> {
        let linear = cpu.linear(cpu.rip);
        let limit = if cpu.is64() {
            u64::MAX
        } else {
            (cpu.seg[CS].limit as u64 + 1).saturating_sub(cpu.rip)
        };
        // A breakpoint comes before what is wrong with the fetch.
        if cpu.is_boundary(linear) && cpu.watched.observed != (cpu.steps_now(), linear) {
            cpu.stop = Reason::Observe;
            return Err(Stop);
        }
        // The limit is checked before the address is translated, here and for the second page.
        if limit == 0 {
            return Err(cpu.gp(0));
        }
        let (gpa, host) = self.fetch(cpu, linear)?;
        cpu.set_page(cpu.rip.wrapping_sub(linear & 0xfff));
        let at = gpa | linear & 0xfff;
        let key = Key {
            gpa: at,
            mode: cpu.mode,
        };
        if length == Length::Whole
            && let Some(first) = self.shared.blocks.find(key)
        {
            let mode = cpu.mode;
            cpu.jumps.set(linear, host as u64, first, mode);
            return Ok((first, host as u64));
        }
        if self.shared.full() {
            self.shared.flush();
            self.catch_up(cpu);
        }
        // SAFETY: `fetch` gave a page of guest RAM. Nothing writes it while this borrow lives: the processor is not running.
        let page = unsafe { core::slice::from_raw_parts(host.cast_const(), 0x1000) };
        let boundaries = cpu.watched.boundaries.clone();
        let mut source = Source {
            page,
            next: None,
            next_host: 0,
            offset: (linear & 0xfff) as usize,
            limit,
            mode: cpu.mode,
            max: match length {
                Length::Whole => MAX,
                Length::Cut(n) => n.min(MAX),
            },
            pause: length != Length::Whole,
            boundaries: &boundaries,
        };
        let mut second = None;
        let mut result = frontend::decode(&self.shown, &source, &mut self.scratch);
        if matches!(result, Err(Trouble::NeedsSecondPage)) {
            if limit <= 0x1000 - (linear & 0xfff) {
                return Err(cpu.gp(0));
            }
            let (gpa, host) = self.fetch(cpu, cpu.next_page(linear))?;
            // SAFETY: As for the first page.
            source.next = Some(unsafe { core::slice::from_raw_parts(host.cast_const(), 16) });
            source.next_host = host as u64;
            second = Some(gpa);
            result = frontend::decode(&self.shown, &source, &mut self.scratch);
            // The first page must still be in the TLB beside it: they differ in their lowest page bit, so it is.
        }
        let decoded = match result {
            Ok(decoded) => decoded,
            Err(_) => return Err(cpu.gp(0)),
        };
        cpu.announce(linear, at, decoded.bytes)?;
        if let Some(gpa) = second {
            cpu.announce(cpu.next_page(linear), gpa & !0xfff, decoded.second)?;
        }
        if length != Length::Whole {
            if length != Length::Cut(1) {
                self.shared.mark_bytes(at, decoded.bytes);
                cpu.hold_stores_back();
            }
            return Ok((self.scratch.ops.as_ptr(), host as u64));
        }
        let first = self.shared.insert(key, &self.scratch, &decoded, second);
        cpu.hold_stores_back();
        let mode = cpu.mode;
        cpu.jumps.set(linear, host as u64, first, mode);
        Ok((first, host as u64))
    }

    /// Translates a fetch: the page's guest-physical and host addresses.
    fn fetch(&mut self, cpu: &mut Cpu, linear: u64) -> Done<(u64, *mut u8)> {
        if cpu.is64() && !cpu.canonical(linear) {
            return Err(cpu.gp(0));
        }
        let e = *cpu.tlb.entry(linear);
        if e.exec == linear & !0xfff
            && let Some(gpa) = self.shared.ram.gpa(e.host)
        {
            return Ok((gpa, e.host as *mut u8));
        }
        if e.holds_fetches_back(linear)
            && let Some(gpa) = self.shared.ram.gpa(e.host)
        {
            let host = e.host;
            cpu.announce(linear & !0xfff, gpa & !0xfff, 0)?;
            cpu.tlb.let_fetches(linear);
            return Ok((gpa, host as *mut u8));
        }
        let paging = cpu.paging(cpu.cpl == 3);
        match mmu::walk(&mut self.shared.ram, &paging, linear, Access::Fetch) {
            Ok(page) if page.gpa == cpu.apic_access_page() => {
                Err(cpu.apic_access_exit(linear & 0xfff, apic_access::FETCH, 0))
            }
            Ok(page) => {
                // Code outside RAM: what is not there reads all ones, which is no instruction.
                let Some(host) = self.shared.ram.host(page.gpa) else {
                    return Err(cpu.ud());
                };
                cpu.announce(linear & !0xfff, page.gpa & !0xfff, 0)?;
                let (read, write) = cpu.unwatched_rights(linear, page.read, page.write && page.dirty);
                let write = self.shared.ram.stores(page.gpa, write);
                let exec = if page.exec { Grant::Yes } else { Grant::No };
                cpu.tlb.fill(linear, host as u64, read, write, exec);
                cpu.tlb.note(linear, &page);
                Ok((page.gpa, host))
            }
            Err(none) => Err(cpu.no_page(linear, none)),
        }
    }
}

fn triple_fault() -> ExitInformation {
    ExitInformation::new(ExitReason::TripleFault)
}

#[derive(PartialEq, Eq)]
enum Class {
    Benign,
    Contributory,
    PageFault,
}

/// SDM Vol. 3A Table 7-4 "Interrupt and Exception Classes".
fn class(e: Event) -> Class {
    match (e.source, e.vector) {
        (EventSource::Exception, 0 | 10..=13) => Class::Contributory,
        (EventSource::Exception, 14 | 20) => Class::PageFault,
        _ => Class::Benign,
    }
}
