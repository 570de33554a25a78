//! What a debugger has the machine stop for: breakpoints, watchpoints, exceptions, single steps, the triple fault.
//!
//! # Theory
//! The host's breakpoints are not the guest's. None of them is in guest memory or in a debug register of its, so their number has no
//! limit and the guest cannot find them: they are addresses that the engine announces ([`x86::watch::Watch`]), and the
//! answer to that word is that the run is to [stop](Effects::stop). The guest's own breakpoints go on working beside them. On KVM the
//! processor may hold them while the guest runs natively ([`guestdbg`](kvm::guest_debug)).
//!
//! A breakpoint stops before its instruction, a watchpoint after the access, an exception once it has been delivered. Going on
//! does not stop at the same place again, so that nobody has to take a breakpoint away to get past it. On the virtual clock
//! the guest does the same whether it is stopped or not.
//!
//! # Practice
//! [`Debugger`] is what the owner of a machine holds ([`Vm::debugger`](crate::Vm::debugger)); each CPU has a watcher that
//! knows the same set, and copies it when it has changed. Nothing here knows of a protocol.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range as Span;
use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};

use x86::watch::{Access, AccessKind, Change, Effects, EventRecord, Interest, Processor, Range, Watch};

/// What an access does that a watchpoint stops at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchKind {
    /// It writes.
    Write,
    /// It reads.
    Read,
    /// Either.
    Access,
}

impl WatchKind {
    fn reads(self) -> bool {
        self != WatchKind::Write
    }

    fn writes(self) -> bool {
        self != WatchKind::Read
    }
}

/// A range of linear addresses whose accesses stop the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watchpoint {
    first: u64,
    last: u64,
    kind: WatchKind,
}

impl Watchpoint {
    /// `len` bytes from `first` on; `None` where there are none, or some beyond the end of the address space.
    pub fn new(first: u64, len: u64, kind: WatchKind) -> Option<Self> {
        let last = first.checked_add(len.checked_sub(1)?)?;
        Some(Watchpoint { first, last, kind })
    }

    /// The first address.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// The last address, inclusive.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// What it stops at.
    pub fn kind(&self) -> WatchKind {
        self.kind
    }

    /// The first byte of an access that it stops at.
    fn met(&self, access: &Access) -> Option<u64> {
        let kind = match access.kind {
            AccessKind::Read => self.kind.reads(),
            AccessKind::Write => self.kind.writes(),
            AccessKind::ReadWrite => true,
            AccessKind::PortRead | AccessKind::PortWrite => false,
        };
        // An access may wrap.
        let ahead = self.first.wrapping_sub(access.address);
        let first = if ahead < u64::from(access.size) {
            self.first
        } else {
            access.address
        };
        (kind && (self.first..=self.last).contains(&first)).then_some(first)
    }
}

/// Why the machine stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCause {
    /// It is before the instruction at this linear address.
    Breakpoint(u64),
    /// An instruction has made an access.
    Watch {
        /// What was watched.
        watchpoint: Watchpoint,
        /// The first byte of it that was accessed.
        address: u64,
        /// Linear address of the instruction; `None` where the processor's debug registers watched, which do not say.
        ip: Option<u64>,
    },
    /// An exception or interrupt that was to be caught has been delivered: the CPU is at its handler.
    Exception {
        /// The vector.
        vector: u8,
        /// The error code, where one was pushed.
        error: Option<u32>,
        /// CR2, for a page fault.
        address: Option<u64>,
    },
    /// A VM exit that was to be caught has been made: the CPU is at the first instruction of the VMM.
    VmExit {
        /// The basic exit reason.
        reason: u16,
    },
    /// The CPU that was to make a step has made one, or an event came in its place.
    Step,
    /// The CPU has shut down after a triple fault. It stands where the first fault was.
    TripleFault,
    /// Somebody asked.
    Asked,
}

/// Where the machine stopped, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DebugStop {
    /// The CPU whose doing it was.
    pub cpu: usize,
    /// Why.
    pub why: StopCause,
}

/// What is to be stopped for.
#[derive(Clone, Debug, Default)]
struct Set {
    /// Linear addresses, and how many want each.
    breakpoints: BTreeMap<u64, u32>,
    watchpoints: Vec<Watchpoint>,
    catches: BTreeSet<u8>,
    /// Basic exit reasons of VM exits.
    exits: BTreeSet<u16>,
    /// The CPU that is to make a single step.
    step: Option<usize>,
    /// It makes more of them as long as its instruction pointer is here.
    within: Option<Span<u64>>,
    /// Nothing stops for now.
    suspended: bool,
}

/// What the debugger and its watchers share.
#[derive(Debug, Default)]
struct WatchedPoints {
    /// Moves when `set` does.
    generation: AtomicU64,
    set: Mutex<Set>,
    /// What a watcher has stopped for last.
    stop: Mutex<Option<DebugStop>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// What stops a machine, and what has stopped it.
#[derive(Debug, Default)]
pub struct Debugger {
    shared: Arc<WatchedPoints>,
    /// A triple fault has been shown.
    shutdown: bool,
}

impl Debugger {
    /// Nothing to stop for yet.
    pub fn new() -> Self {
        Debugger::default()
    }

    /// What is to watch a CPU, for [`Seat::Debugger`](machine::watchers::Seat::Debugger).
    pub fn watcher(&self, cpu: usize) -> Box<dyn Watch + Send> {
        Box::new(Watcher {
            cpu,
            shared: Arc::clone(&self.shared),
            set: Set::default(),
            generation: 0,
            boundaries: Vec::new(),
            ranges: Vec::new(),
        })
    }

    fn change<T>(&mut self, f: impl FnOnce(&mut Set) -> T) -> T {
        let changed = f(&mut lock(&self.shared.set));
        self.shared.generation.fetch_add(1, Ordering::Release);
        changed
    }

    /// Stops before the instruction at a linear address. Adding one twice takes removing it twice.
    pub fn add_breakpoint(&mut self, address: u64) {
        self.change(|set| *set.breakpoints.entry(address).or_default() += 1);
    }

    /// No longer; `false` where there was none.
    pub fn remove_breakpoint(&mut self, address: u64) -> bool {
        self.change(|set| match set.breakpoints.get_mut(&address) {
            None => false,
            Some(1) => set.breakpoints.remove(&address).is_some(),
            Some(count) => {
                *count -= 1;
                true
            }
        })
    }

    /// Whether the machine stops before the instruction at a linear address.
    pub fn has_breakpoint(&self, address: u64) -> bool {
        lock(&self.shared.set).breakpoints.contains_key(&address)
    }

    /// Stops after accesses to a range of memory.
    pub fn add_watchpoint(&mut self, watchpoint: Watchpoint) {
        self.change(|set| set.watchpoints.push(watchpoint));
    }

    /// No longer; `false` where there was none.
    pub fn remove_watchpoint(&mut self, watchpoint: &Watchpoint) -> bool {
        self.change(|set| {
            let found = set.watchpoints.iter().position(|known| known == watchpoint);
            found.map(|index| set.watchpoints.remove(index)).is_some()
        })
    }

    /// Stops once an exception or interrupt of this vector has been delivered, or no longer. Says whether that is new.
    pub fn catch(&mut self, vector: u8, wanted: bool) -> bool {
        self.change(|set| {
            if wanted {
                set.catches.insert(vector)
            } else {
                set.catches.remove(&vector)
            }
        })
    }

    /// The vectors that are caught, in order.
    pub fn catches(&self) -> Vec<u8> {
        lock(&self.shared.set).catches.iter().copied().collect()
    }

    /// Stops once a VM exit with this basic exit reason has been made, or no longer. Says whether that is new.
    pub fn catch_exit(&mut self, reason: u16, wanted: bool) -> bool {
        self.change(|set| {
            if wanted {
                set.exits.insert(reason)
            } else {
                set.exits.remove(&reason)
            }
        })
    }

    /// The exit reasons that are caught, in order.
    pub fn exits(&self) -> Vec<u16> {
        lock(&self.shared.set).exits.iter().copied().collect()
    }

    /// Stops once this CPU has made one step (an instruction, or an iteration of a REP), or an event was delivered in its
    /// place. It lasts until it is taken back.
    pub fn step(&mut self, cpu: Option<usize>) {
        self.change(|set| (set.step, set.within) = (cpu, None));
    }

    /// The same once this CPU has made a step that led out of a range of instruction pointers, or an event was delivered.
    pub fn step_out_of(&mut self, cpu: usize, range: Span<u64>) {
        self.change(|set| (set.step, set.within) = (Some(cpu), Some(range)));
    }

    /// Whether a CPU that has made a step is to make another one, since its instruction pointer is here.
    pub(crate) fn steps_on(&self, rip: u64) -> bool {
        let set = lock(&self.shared.set);
        set.within.as_ref().is_some_and(|range| range.contains(&rip))
    }

    /// The CPU that is to make a single step.
    pub fn stepping(&self) -> Option<usize> {
        let set = lock(&self.shared.set);
        set.step.filter(|_| !set.suspended)
    }

    /// The breakpoints and watchpoints, if nothing else is to be stopped for.
    pub(crate) fn places(&self) -> Option<(Vec<u64>, Vec<Watchpoint>)> {
        let set = lock(&self.shared.set);
        if set.suspended {
            return Some(Default::default());
        }
        let only = set.catches.is_empty() && set.exits.is_empty() && set.step.is_none();
        only.then(|| (set.breakpoints.keys().copied().collect(), set.watchpoints.clone()))
    }

    /// Has nothing stop for a while, and keeps what was wanted.
    pub(crate) fn suspend(&mut self, suspended: bool) {
        self.change(|set| set.suspended = suspended);
    }

    /// Whether nothing stops for now.
    pub(crate) fn is_suspended(&self) -> bool {
        lock(&self.shared.set).suspended
    }

    /// Stops for nothing any more.
    pub fn clear(&mut self) {
        self.change(|set| *set = Set::default());
    }

    /// What a watcher stopped for.
    pub(crate) fn take_stop(&mut self) -> Option<DebugStop> {
        lock(&self.shared.stop).take()
    }

    /// A CPU has shut down; `true` the first time.
    pub(crate) fn shutdown(&mut self) -> bool {
        !std::mem::replace(&mut self.shutdown, true)
    }

    /// The machine is in another state than it was.
    pub(crate) fn moved(&mut self) {
        self.shutdown = false;
        self.take_stop();
    }
}

/// A CPU's part of it.
struct Watcher {
    cpu: usize,
    shared: Arc<WatchedPoints>,
    /// As it was at this generation.
    set: Set,
    generation: u64,
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
}

impl Watcher {
    fn stepping(&self) -> bool {
        self.set.step == Some(self.cpu)
    }

    fn stop(&self, why: StopCause) -> Effects {
        *lock(&self.shared.stop) = Some(DebugStop { cpu: self.cpu, why });
        Effects {
            stop: true,
            ..Effects::NONE
        }
    }

    fn catch_up(&mut self) {
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        self.set = lock(&self.shared.set).clone();
        if self.set.suspended {
            self.set = Set::default();
        }
        self.boundaries = self.set.breakpoints.keys().copied().collect();
        self.ranges = self
            .set
            .watchpoints
            .iter()
            .map(|watchpoint| Range {
                first: watchpoint.first,
                last: watchpoint.last,
                ports: false,
                reads: watchpoint.kind.reads(),
                // Instructions that read and write go by the right to write.
                writes: true,
            })
            .collect();
    }
}

impl Watch for Watcher {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        self.catch_up();
        Interest {
            ranges: !self.ranges.is_empty(),
            transfers: !self.set.catches.is_empty() || !self.set.exits.is_empty() || self.stepping(),
            ..Interest::NOTHING
        }
    }

    fn boundaries(&self) -> &[u64] {
        &self.boundaries
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn before(&mut self, address: u64, _: &mut dyn Processor) -> Effects {
        if self.boundaries.binary_search(&address).is_err() {
            // The units', or another observer's.
            return Effects::NONE;
        }
        self.stop(StopCause::Breakpoint(address))
    }

    fn access(&mut self, access: &Access, _: &mut dyn Processor) -> Effects {
        let met = |watchpoint: &Watchpoint| {
            let address = watchpoint.met(access)?;
            Some(StopCause::Watch {
                watchpoint: *watchpoint,
                address,
                ip: Some(access.ip),
            })
        };
        match self.set.watchpoints.iter().find_map(met) {
            Some(why) => self.stop(why),
            None => Effects::NONE,
        }
    }

    fn event(&mut self, event: &EventRecord, _: &mut dyn Processor) -> Effects {
        if self.set.catches.contains(&event.vector) {
            return self.stop(StopCause::Exception {
                vector: event.vector,
                error: event.error,
                address: event.address,
            });
        }
        if self.stepping() {
            return self.stop(StopCause::Step);
        }
        Effects::NONE
    }

    fn state(&mut self, change: Change, _: &mut dyn Processor) -> Effects {
        match change {
            Change::Vmx { exit: Some(reason) } if self.set.exits.contains(&reason) => {
                self.stop(StopCause::VmExit { reason })
            }
            _ => Effects::NONE,
        }
    }
}

#[cfg(test)]
#[path = "debug_test.rs"]
mod tests;
