//! Observers: programs that see what a guest does, from outside, while it runs.
//!
//! # Theory
//! [`Watch`] is the engine's own word for this: complete, and close to the processor. What most programs want to see is less and
//! further up: branches, writes to a range of memory, events, system calls, the process that a CPU goes over to, modules that a Linux loads.
//!
//! # Practice
//! Whoever implements [`Observer`] says once what is wanted ([`Wanted`]) and hears that and nothing else; nobody pays for the rest.
//! [`Vm::observe`] has all CPUs observed, and gives back a handle for the time after. The guest notices nothing: its run is the
//! same to the bit.
//!
//! Processes by name and modules are a Linux's, which is looked for in memory as the machine runs, each time after twice as many steps as before.
//! An observer sits where `--trace` does, so the two are not had together.

use std::{
    collections::BTreeSet,
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use machine::memory::Memory;
use trace::linux::{Kernel, Module, Task};
use x86::watch::{
    Access, AccessKind, BranchRecord, Change, CodeSize, Effects, EventRecord, Far, Flow, Interest, Processor, Range,
    Recorded, Watch,
};

use crate::{recording::GuestMemory, vm::Vm};

/// Branches that are handed over at once.
const ROOM: u32 = 4096;
/// A Linux is looked for first after so many steps.
const FIRST_LOOK: u64 = 1 << 24;
/// The vector of system calls of 32 bits: arch/x86/include/asm/irq_vectors.h, `IA32_SYSCALL_VECTOR`.
const SYSTEM_CALL: u8 = 0x80;

/// What an observer wants to hear.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// [`Observer::branch`].
    pub branches: bool,
    /// [`Observer::event`].
    pub events: bool,
    /// [`Observer::system_call`].
    pub system_calls: bool,
    /// [`Observer::process_switch`].
    pub process_switches: bool,
    /// [`Observer::module_load`].
    pub module_loads: bool,
    /// [`Observer::write`], of these linear addresses.
    pub writes: Vec<RangeInclusive<u64>>,
}

impl Wanted {
    /// Writes to these ranges alone.
    pub fn writes(ranges: impl Into<Vec<RangeInclusive<u64>>>) -> Wanted {
        Wanted {
            writes: ranges.into(),
            ..Wanted::default()
        }
    }

    /// Branches alone.
    pub fn branches() -> Wanted {
        Wanted {
            branches: true,
            ..Wanted::default()
        }
    }
}

/// Where something was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The CPU.
    pub cpu: usize,
    /// The machine's steps so far.
    pub step: u64,
    /// The page table, as CR3 has it.
    pub cr3: u64,
    /// The privilege level.
    pub cpl: u8,
}

/// A write to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// The first linear address.
    pub address: u64,
    /// Bytes.
    pub size: u32,
    /// Linear address of the instruction.
    pub ip: u64,
}

/// A system call, as it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemCall {
    /// Its number.
    pub number: u64,
    /// Its arguments, in the order of Linux's functions.
    pub arguments: [u64; 6],
    /// By INT 80H or SYSENTER, so that number and arguments are those of 32-bit programs.
    pub compat: bool,
}

/// Sees what a guest does. All methods but the first have defaults that do nothing.
pub trait Observer: Send {
    /// What is to be heard. Asked once.
    fn wanted(&self) -> Wanted;

    /// A branch has retired, taken or not; an interrupt, exception or system call is one, too.
    fn branch(&mut self, _place: &Place, _branch: &BranchRecord) {}

    /// An instruction has written to memory.
    fn write(&mut self, _place: &Place, _write: &Write) {}

    /// An interrupt or exception has been delivered.
    fn event(&mut self, _place: &Place, _event: &EventRecord) {}

    /// A program calls its kernel.
    fn system_call(&mut self, _place: &Place, _call: &SystemCall) {}

    /// A CPU goes over to another page table, or in a Linux that was found, to this thread, or this thread begins another program.
    fn process_switch(&mut self, _place: &Place, _task: Option<&Task>) {}

    /// A Linux begins to initialise a module. Those that are there when the Linux is found are said then.
    fn module_load(&mut self, _place: &Place, _module: &Module) {}
}

/// An observer that is observing.
#[derive(Debug)]
pub struct Observed<O>(Arc<Mutex<O>>);

impl<O> Observed<O> {
    /// The observer, between two runs.
    pub fn get(&self) -> MutexGuard<'_, O> {
        lock(&self.0)
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Vm {
    /// Has all CPUs observed from here on, in place of another observer.
    pub fn observe<O: Observer + 'static>(&mut self, observer: O) -> Observed<O> {
        let wanted = observer.wanted();
        let observer = Arc::new(Mutex::new(observer));
        let linux = Arc::new(Mutex::new(Linux {
            memory: self.machine().memory().clone(),
            kernel: None,
            due: self.steps().saturating_add(FIRST_LOOK),
            points: Vec::new(),
            generation: 1,
            modules: BTreeSet::new(),
        }));
        for cpu in 0..self.cpu_count() {
            let watcher = Watcher {
                cpu,
                observer: observer.clone(),
                linux: Arc::clone(&linux),
                ranges: wanted.writes.iter().map(range).collect(),
                wanted: wanted.clone(),
                points: Vec::new(),
                generation: 1,
                cr3: None,
            };
            self.machine().observe(cpu, Some(Box::new(watcher)));
        }
        Observed(observer)
    }
}

fn range(range: &RangeInclusive<u64>) -> Range {
    Range {
        first: *range.start(),
        last: *range.end(),
        ports: false,
        reads: false,
        writes: true,
    }
}

/// What is known of the Linux in the guest.
struct Linux {
    memory: Memory,
    kernel: Option<Kernel>,
    /// The step of the next look for it.
    due: u64,
    /// Where it goes over to a thread, and where it initialises a module, in order.
    points: Vec<(u64, Point)>,
    /// Moves when they are known.
    generation: u64,
    modules: BTreeSet<(u64, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    Switch,
    Program,
    Module,
}

impl Linux {
    fn look(&mut self, step: u64, wanted: &Wanted) {
        self.due = step.saturating_mul(2).max(FIRST_LOOK);
        let Some(kernel) = Kernel::find(&mut GuestMemory::new(&self.memory)) else {
            return;
        };
        let wants = [
            (wanted.process_switches, "__switch_to", Point::Switch),
            (wanted.process_switches, "finalize_exec", Point::Program),
            (wanted.module_loads, "do_init_module", Point::Module),
        ];
        let wants = wants.into_iter().filter(|(wanted, ..)| *wanted);
        self.points = wants
            .filter_map(|(_, name, point)| Some((kernel.symbols().address(name)?, point)))
            .collect();
        self.points.sort_unstable_by_key(|(address, _)| *address);
        self.kernel = Some(kernel);
        self.generation += 1;
    }

    /// The modules that were not there before.
    fn new_modules(&mut self) -> Vec<Module> {
        let Some(kernel) = &self.kernel else { return Vec::new() };
        let mut modules = kernel.modules(&mut GuestMemory::new(&self.memory));
        modules.retain(|module| self.modules.insert((module.base, module.name.clone())));
        modules
    }
}

/// Watches a CPU for an observer.
struct Watcher<O> {
    cpu: usize,
    observer: Arc<Mutex<O>>,
    linux: Arc<Mutex<Linux>>,
    wanted: Wanted,
    ranges: Vec<Range>,
    points: Vec<u64>,
    generation: u64,
    /// The page table that was said last.
    cr3: Option<u64>,
}

fn place(number: usize, cpu: &dyn Processor) -> Place {
    let context = cpu.context();
    Place {
        cpu: number,
        step: cpu.step(),
        cr3: context.cr3,
        cpl: context.cpl,
    }
}

impl<O: Observer> Watcher<O> {
    /// Somebody wants to hear what only a Linux tells.
    fn wants_linux(&self) -> bool {
        self.wanted.process_switches || self.wanted.module_loads
    }

    fn system_call(&mut self, compat: bool, cpu: &dyn Processor) {
        let registers = match compat {
            true => [3, 1, 2, 6, 7, 5],
            false => [7, 6, 2, 10, 8, 9],
        };
        let mask = if compat { u64::from(u32::MAX) } else { u64::MAX };
        let call = SystemCall {
            number: cpu.gpr(0) & mask,
            arguments: registers.map(|number| cpu.gpr(number) & mask),
            compat,
        };
        lock(&self.observer).system_call(&place(self.cpu, cpu), &call);
    }

    fn say_modules(&mut self, cpu: &dyn Processor) {
        let modules = lock(&self.linux).new_modules();
        for module in &modules {
            lock(&self.observer).module_load(&place(self.cpu, cpu), module);
        }
    }
}

impl<O: Observer> Watch for Watcher<O> {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        let mut looks = u64::MAX;
        if self.wants_linux() {
            let linux = lock(&self.linux);
            if self.generation != linux.generation {
                self.generation = linux.generation;
                self.points = linux.points.iter().map(|(address, _)| *address).collect();
            }
            if linux.kernel.is_none() {
                looks = linux.due.saturating_sub(cpu.step()).max(1);
            }
        }
        let wanted = &self.wanted;
        Interest {
            branches: Recorded::All.when(wanted.branches),
            branch_room: ROOM,
            transfers: wanted.events || wanted.system_calls || wanted.process_switches,
            ranges: !self.ranges.is_empty(),
            instructions: looks,
            ..Interest::NOTHING
        }
    }

    fn boundaries(&self) -> &[u64] {
        &self.points
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        let task = {
            let linux = lock(&self.linux);
            let point = linux
                .points
                .iter()
                .find(|(at, _)| *at == address)
                .map(|(_, point)| *point);
            match (point, &linux.kernel) {
                // The second argument is the thread that is to run: RSI, or EDX of 32-bit kernels (`-mregparm=3`).
                (Some(Point::Switch), Some(kernel)) => {
                    let next = match cpu.context().code {
                        CodeSize::Bits64 => cpu.gpr(6),
                        CodeSize::Bits16 | CodeSize::Bits32 => cpu.gpr(2) & u64::from(u32::MAX),
                    };
                    Some(kernel.task_at(&mut GuestMemory::new(&linux.memory), next))
                }
                (Some(Point::Program), Some(kernel)) => {
                    Some(kernel.current(&mut GuestMemory::new(&linux.memory), self.cpu))
                }
                (Some(Point::Module), _) => None,
                _ => return Effects::NONE,
            }
        };
        match task {
            Some(task) => lock(&self.observer).process_switch(&place(self.cpu, cpu), task.as_ref()),
            None => self.say_modules(cpu),
        }
        Effects::NONE
    }

    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        let last = access.address.wrapping_add(u64::from(access.size).saturating_sub(1));
        let met = |range: &Range| access.address <= range.last && last >= range.first;
        if matches!(access.kind, AccessKind::Write | AccessKind::ReadWrite) && self.ranges.iter().any(met) {
            let write = Write {
                address: access.address,
                size: access.size,
                ip: access.ip,
            };
            lock(&self.observer).write(&place(self.cpu, cpu), &write);
        }
        Effects::NONE
    }

    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        if self.wanted.branches {
            let mut place = place(self.cpu, cpu);
            let mut observer = lock(&self.observer);
            for record in records {
                (place.step, place.cpl) = (record.step, record.from_cpl);
                observer.branch(&place, record);
            }
        }
        if self.wanted.system_calls {
            // They come alone.
            match records.first().and_then(|record| Flow::from_code(record.flow)) {
                Some(Flow::Far(Far::Syscall)) => self.system_call(false, cpu),
                Some(Flow::Far(Far::Sysenter)) => self.system_call(true, cpu),
                _ => {}
            }
        }
        Effects::NONE
    }

    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        if self.wanted.branches {
            lock(&self.observer).branch(&place(self.cpu, cpu), &event.branch);
        }
        if self.wanted.events {
            lock(&self.observer).event(&place(self.cpu, cpu), event);
        }
        let software = Flow::from_code(event.branch.flow) == Some(Flow::Far(Far::SoftwareInterrupt));
        if self.wanted.system_calls && software && event.vector == SYSTEM_CALL {
            self.system_call(true, cpu);
        }
        Effects::NONE
    }

    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        if !self.wanted.process_switches || change != Change::Cr3 || lock(&self.linux).kernel.is_some() {
            return Effects::NONE;
        }
        let cr3 = cpu.context().cr3;
        if self.cr3.replace(cr3) != Some(cr3) {
            lock(&self.observer).process_switch(&place(self.cpu, cpu), None);
        }
        Effects::NONE
    }

    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        let found = {
            let mut linux = lock(&self.linux);
            if !self.wants_linux() || linux.kernel.is_some() || cpu.step() < linux.due {
                return Effects::NONE;
            }
            linux.look(cpu.step(), &self.wanted);
            linux.kernel.is_some()
        };
        if found && self.wanted.module_loads {
            self.say_modules(cpu);
        }
        Effects::NONE
    }
}
