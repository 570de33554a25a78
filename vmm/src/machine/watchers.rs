//! Who watches a CPU: the guest's debug and trace units, and beside them an observer of the host's.
//!
//! Both hear the same words, from one buffer of branches. What the observer wants of the machine is dropped: the guest
//! cannot tell whether it is there.

use devices::unit::{Units, rdt::Probe};
use x86::model::CpuModel;
use x86::seam::{Access, Appetite, BranchRecord, Change, Code, Effects, EventRecord, Processor, Range, Watch};

/// The watchers of one CPU.
pub struct Watchers {
    /// The guest's units.
    pub units: Units,
    /// What feeds the resource director's model of the caches, while there is one.
    pub probe: Option<Probe>,
    observer: Option<Box<dyn Watch + Send>>,
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    /// Generations of both that `boundaries` and `ranges` are made of, and what ours is.
    parts: [u64; 2],
    generation: u64,
}

impl std::fmt::Debug for Watchers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watchers")
            .field("units", &self.units)
            .field("observed", &self.observer.is_some())
            .finish()
    }
}

impl Watchers {
    /// The units of a CPU of this model at reset, unobserved.
    pub fn new(model: &'static CpuModel) -> Self {
        Watchers {
            units: Units::new(model),
            probe: None,
            observer: None,
            boundaries: Vec::new(),
            ranges: Vec::new(),
            parts: [0; 2],
            generation: 0,
        }
    }

    /// Has the host watch, too, or no longer.
    pub fn observe(&mut self, observer: Option<Box<dyn Watch + Send>>) {
        self.observer = observer;
        self.parts = [u64::MAX; 2];
    }

    /// Puts together what both want watched.
    fn merge(&mut self) {
        let observed = self.observer.as_ref().map_or(0, |observer| observer.generation());
        let parts = [self.units.generation(), observed];
        if parts == self.parts {
            return;
        }
        self.parts = parts;
        self.generation += 1;
        self.boundaries.clear();
        self.boundaries.extend_from_slice(self.units.boundaries());
        self.ranges.clear();
        self.ranges.extend_from_slice(self.units.ranges());
        if let Some(observer) = &self.observer {
            self.boundaries.extend_from_slice(observer.boundaries());
            self.boundaries.sort_unstable();
            self.boundaries.dedup();
            self.ranges.extend_from_slice(observer.ranges());
        }
    }

    /// Says a word to the observer, who has no say.
    fn tell(&mut self, word: impl FnOnce(&mut dyn Watch) -> Effects) {
        if let Some(observer) = &mut self.observer {
            let _ = word(&mut **observer);
        }
    }
}

impl Watch for Watchers {
    fn appetite(&mut self, cpu: &mut dyn Processor) -> Appetite {
        let mut appetite = self.units.appetite(cpu);
        if let Some(observer) = &mut self.observer {
            appetite = appetite.and(observer.appetite(cpu));
        }
        appetite.every_access |= self.probe.is_some();
        self.merge();
        appetite
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
        // An instruction that faults instead is not about to run.
        if effects.debug.is_none() {
            self.tell(|observer| observer.before(address, cpu));
        }
        effects
    }

    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        self.tell(|observer| observer.access(access, cpu));
        if let Some(probe) = &mut self.probe {
            probe.access(access, |linear| cpu.physical(linear));
        }
        self.units.access(access, cpu)
    }

    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        self.tell(|observer| observer.branches(records, cpu));
        self.units.branches(records, cpu)
    }

    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        self.tell(|observer| observer.event(event, cpu));
        self.units.event(event, cpu)
    }

    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        self.tell(|observer| observer.state(change, cpu));
        Watch::state(&mut self.units, change, cpu)
    }

    fn knows(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        self.observer.as_mut().is_none_or(|observer| observer.knows(code, cpu))
    }

    fn code(&mut self, code: &Code, cpu: &mut dyn Processor) -> bool {
        self.observer.as_mut().is_some_and(|observer| observer.code(code, cpu))
    }

    fn tsc_offset(&mut self, offset: u64) {
        if let Some(observer) = &mut self.observer {
            observer.tsc_offset(offset);
        }
    }

    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        self.tell(|observer| observer.tick(cpu));
        self.units.tick(cpu)
    }
}
