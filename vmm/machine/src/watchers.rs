//! Who watches a CPU: the guest's debug and trace units, and beside them observers of the host's.
//!
//! All hear the same words, from one buffer of branches. What an observer wants of the machine is dropped: the guest
//! cannot tell whether it is there. One of them, the debugger, may say that the machine is to stop for a look, which no guest
//! notices either.

use devices::unit::Units;
use x86::model::CpuModel;
use x86::watch::{Access, BranchRecord, Change, Code, Effects, EventRecord, Interest, Processor, Range, Watch};

/// A place for an observer of the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seat {
    /// What records a trace, or checks one.
    Trace,
    /// A debugger's history of branches.
    Branches,
    /// The debugger: the only one whose [`Effects::stop`] counts.
    Debugger,
}

/// How many seats there are.
const SEATS: usize = 3;

/// The watchers of one CPU.
pub struct Watchers {
    /// The guest's units.
    pub units: Units,
    /// What the units wanted when they were asked last.
    wanted: Interest,
    /// By [`Seat`].
    observers: [Option<Box<dyn Watch + Send>>; SEATS],
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    /// Generations of the units and the observers that `boundaries` and `ranges` are made of, and what ours is.
    parts: [u64; SEATS + 1],
    generation: u64,
}

impl std::fmt::Debug for Watchers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watchers")
            .field("units", &self.units)
            .field("observers", &self.observers.iter().flatten().count())
            .finish()
    }
}

impl Watchers {
    /// The units of a CPU of this model at reset, unobserved.
    pub fn new(model: &'static CpuModel) -> Self {
        Watchers {
            units: Units::new(model),
            wanted: Interest::NOTHING,
            observers: [const { None }; SEATS],
            boundaries: Vec::new(),
            ranges: Vec::new(),
            parts: [0; SEATS + 1],
            generation: 0,
        }
    }

    /// Has the host watch from this seat, too, or no longer.
    pub fn observe(&mut self, seat: Seat, observer: Option<Box<dyn Watch + Send>>) {
        self.observers[seat as usize] = observer;
        self.parts = [u64::MAX; SEATS + 1];
    }

    /// Whether somebody of the host's watches who has to see whatever is executed.
    pub fn is_observed(&self) -> bool {
        [Seat::Trace, Seat::Branches]
            .iter()
            .any(|seat| self.observers[*seat as usize].is_some())
    }

    /// Puts together what all want watched.
    fn merge(&mut self) {
        let mut parts = [self.units.generation(); SEATS + 1];
        for (part, observer) in parts[1..].iter_mut().zip(&self.observers) {
            *part = observer.as_ref().map_or(0, |observer| observer.generation());
        }
        if parts == self.parts {
            return;
        }
        self.parts = parts;
        self.generation += 1;
        self.boundaries.clear();
        self.boundaries.extend_from_slice(self.units.boundaries());
        self.ranges.clear();
        self.ranges.extend_from_slice(self.units.ranges());
        for observer in self.observers.iter().flatten() {
            self.boundaries.extend_from_slice(observer.boundaries());
            self.ranges.extend_from_slice(observer.ranges());
        }
        self.boundaries.sort_unstable();
        self.boundaries.dedup();
    }

    /// Calls the observers, who have no say but for one: whether the debugger wants to stop.
    fn tell(&mut self, mut word: impl FnMut(&mut dyn Watch) -> Effects) -> bool {
        let mut stop = false;
        for (seat, observer) in self.observers.iter_mut().enumerate() {
            if let Some(observer) = observer {
                let effects = word(&mut **observer);
                stop |= seat == Seat::Debugger as usize && effects.stop;
            }
        }
        stop
    }
}

/// What the units want, and whether the debugger wants to stop.
fn with(effects: Effects, stop: bool) -> Effects {
    Effects { stop, ..effects }
}

impl Watch for Watchers {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        let mut interest = self.units.interest(cpu);
        self.wanted = interest;
        for observer in self.observers.iter_mut().flatten() {
            interest = interest.and(observer.interest(cpu));
        }
        self.merge();
        interest
    }

    fn is_steady(&self) -> bool {
        self.units.is_steady() && self.observers.iter().flatten().all(|observer| observer.is_steady())
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

    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        let effects = self.units.before(address, cpu);
        if effects.debug.is_none() {
            let stop = self.tell(|observer| observer.before(address, cpu));
            return with(effects, stop);
        }
        // An instruction that faults instead is not about to run. Whether it does is for the processor to say (RFLAGS.RF):
        // it drops one of the two.
        let debugger = self.observers[Seat::Debugger as usize].as_mut();
        let stop = debugger.is_some_and(|debugger| debugger.before(address, cpu).stop);
        with(effects, stop)
    }

    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        let stop = self.tell(|observer| observer.access(access, cpu));
        with(self.units.access(access, cpu), stop)
    }

    fn implicit_access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        self.units.implicit_access(access, cpu)
    }

    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        let stop = self.tell(|observer| observer.branches(records, cpu));
        // What the executor would not have recorded for them is none of the units' business.
        let Interest {
            branches,
            transfers,
            step_on_branches,
            ..
        } = self.wanted;
        match branches.any() || transfers || step_on_branches {
            true => with(self.units.branches(records, cpu), stop),
            false => with(Effects::NONE, stop),
        }
    }

    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        let stop = self.tell(|observer| observer.event(event, cpu));
        with(self.units.event(event, cpu), stop)
    }

    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        let stop = self.tell(|observer| observer.state(change, cpu));
        if change == Change::Interrupts && !self.wanted.interrupts {
            return with(Effects::NONE, stop);
        }
        with(Watch::state(&mut self.units, change, cpu), stop)
    }

    fn knows(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        self.observers
            .iter_mut()
            .flatten()
            .all(|observer| observer.knows(code, cpu))
    }

    fn code(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        let mut forget = false;
        for observer in self.observers.iter_mut().flatten() {
            forget |= observer.code(code, cpu);
        }
        forget
    }

    fn tsc_offset(&mut self, offset: u64) {
        for observer in self.observers.iter_mut().flatten() {
            observer.tsc_offset(offset);
        }
    }

    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        let stop = self.tell(|observer| observer.tick(cpu));
        with(self.units.tick(cpu), stop)
    }
}
