//! The debug and trace units that have an option each: what each is called, and which backend provides it.
//!
//! [`UNITS`] names every unit once. The option, the line of `minivmm probe`, the monitor's command, the choice of a backend, what the
//! guest's CPUID shows and which registers stay in KVM all come from its row.

use std::ops::{Index, IndexMut};

use serde::Serialize;
use x86::cpuid::Feature::{self, *};
use x86::model::UnitCaps;
use x86::msr::*;

use crate::host_units::Traits;

/// A debug or trace unit that has an option of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // `UNITS` says what each is.
pub enum Unit {
    Dr,
    Lbr,
    Bts,
    Pebs,
    Pmu,
    Pt,
    Tsc,
    Rdt,
}

/// What the user asks for a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum UnitRequest {
    /// The host's hardware, as KVM gives it to guests.
    Host,
    /// Our unit, fed by the software engine.
    Emulated,
    /// The guest has none.
    Off,
}

impl UnitRequest {
    /// As it is written behind the option.
    pub fn name(self) -> &'static str {
        match self {
            UnitRequest::Host => "host",
            UnitRequest::Emulated => "emulated",
            UnitRequest::Off => "off",
        }
    }
}

/// Which backend provides a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// The host's hardware.
    Host,
    /// Our unit.
    Emulated,
    /// None: the guest has no such unit.
    #[default]
    Absent,
}

/// What becomes of a CPUID feature that belongs to a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shown {
    /// The guest does not see it.
    Never,
    /// The guest sees it.
    Always,
    /// The guest sees it if KVM supports it.
    AsKvm,
}

/// What becomes of a feature by the backend of its unit: the host's, ours, none.
type Shows = [Shown; 3];

const UNLESS_ABSENT: Shows = [Shown::Always, Shown::Always, Shown::Never];
/// Where the hardware is the guest's, KVM says what it has of it.
const HOST_AS_KVM: Shows = [Shown::AsKvm, Shown::Always, Shown::Never];
/// No KVM gives it to guests.
const OURS_ALONE: Shows = [Shown::Never, Shown::Always, Shown::Never];
/// The processor's own, which is of use with our unit alone.
const KVMS_WITH_OURS: Shows = [Shown::Never, Shown::AsKvm, Shown::Never];

/// What is said of a unit, and what follows from its backend.
#[derive(Debug)]
pub struct UnitRow {
    /// Which.
    pub unit: Unit,
    /// What its option, its line of `minivmm probe` and its command in the monitor are called.
    pub name: &'static str,
    /// The option's help.
    pub option: &'static str,
    /// What the monitor's command takes.
    pub monitor_arguments: &'static str,
    /// What the monitor's command shows.
    pub monitor: &'static str,
    /// The backend on KVM where nothing is asked for.
    pub on_kvm: Backend,
    /// Why the host's cannot be had, if it cannot.
    pub lacks_host: fn(&Traits) -> Option<String>,
    /// Why ours cannot be had beside KVM, if it cannot.
    pub lacks_emulated: Option<&'static str>,
    /// Why no guest can be without it.
    pub never_off: Option<&'static str>,
    /// What `--UNIT=host` has to go along with.
    pub host_with: &'static str,
    /// Whether a guest whose CPU is of another family and model than the host's cannot have the host's.
    pub host_of_own_model: bool,
    /// Which requests need the same of the performance counters, and why.
    pub with_counters: &'static [(UnitRequest, &'static str)],
    /// What a KVM that interprets the guest lacks of it.
    pub interpreted: Option<&'static str>,
    /// What ours lacks beside KVM, without and with execution breakpoints that KVM delivers.
    pub limits: [&'static str; 2],
    /// CPUID features that go with it.
    pub features: &'static [(Feature, Shows)],
    /// Takes our unit out of a model's capabilities.
    pub remove: fn(&mut UnitCaps),
    /// MSRs that stay in KVM where the host's unit is the guest's: the first, and how many.
    pub passed: &'static [(u32, u32)],
}

/// What most units have.
const ROW: UnitRow = UnitRow {
    unit: Unit::Dr,
    name: "",
    option: "",
    monitor_arguments: "",
    monitor: "",
    on_kvm: Backend::Absent,
    lacks_host: |_| None,
    lacks_emulated: None,
    never_off: None,
    host_with: "--irqchip kvm, which that implies",
    host_of_own_model: false,
    with_counters: &[],
    interpreted: None,
    limits: [""; 2],
    features: &[],
    remove: |_| {},
    passed: &[],
};

const EVERY_CPU: &str = "every processor has it";
const NOT_IN_KVM: fn(&Traits) -> Option<String> = |_| Some("no KVM virtualizes it".into());
const WITH_KVMS_COUNTERS: (UnitRequest, &str) = (UnitRequest::Host, "KVM has it with its counters");

/// First register and how many: counters of all widths, their selectors, the fixed ones and the global controls. What a guest
/// has not of these KVM refuses, as the part would.
const PMU: [(u32, u32); 7] = [
    (IA32_PMC0, 8),
    (IA32_PERFEVTSEL0, 8),
    // OFFCORE_RSP.
    (0x1a6, 2),
    (IA32_FIXED_CTR0, 4),
    (IA32_PERF_CAPABILITIES, 1),
    (IA32_FIXED_CTR_CTRL, 5),
    (IA32_A_PMC0, 8),
];
/// Last-branch records of the processor.
const LBR: [(u32, u32); 5] = [
    (MSR_LBR_SELECT, 2),
    (IA32_DEBUGCTL, 1),
    (MSR_LASTBRANCH_0_FROM_IP, 32),
    (MSR_LASTBRANCH_0_TO_IP, 32),
    (MSR_LBR_INFO_0, 32),
];
/// PEBS.
const PEBS: [(u32, u32); 3] = [(IA32_PEBS_ENABLE, 1), (MSR_PEBS_DATA_CFG, 1), (IA32_DS_AREA, 1)];

/// Every unit, in the order in which they are listed.
pub const UNITS: [UnitRow; 8] = [
    UnitRow {
        unit: Unit::Dr,
        name: "dr",
        option: "Debug registers: on KVM the host's",
        monitor: "Debug registers: what each breakpoint watches, DR6, DR7",
        on_kvm: Backend::Host,
        lacks_emulated: Some("KVM has the debug registers itself"),
        never_off: Some(EVERY_CPU),
        interpreted: Some("as far as a KVM that interprets has them: no data and I/O breakpoints"),
        ..ROW
    },
    UnitRow {
        unit: Unit::Lbr,
        name: "lbr",
        option: "Last-branch records; the values are as for --pt",
        monitor_arguments: "[COUNT]",
        monitor: "Last-branch records, the newest first",
        lacks_host: |host| host.pmu.lacks_lbr(),
        host_of_own_model: true,
        with_counters: &[WITH_KVMS_COUNTERS],
        // DR6's bit for bus locks is the processor's, and IA32_DEBUGCTL switches it.
        features: &[(ArchLbr, OURS_ALONE), (BusLockDetect, KVMS_WITH_OURS)],
        remove: |caps| caps.lbr = None,
        passed: &LBR,
        ..ROW
    },
    UnitRow {
        unit: Unit::Bts,
        name: "bts",
        option: "Branch trace store; the values are as for --pt",
        monitor_arguments: "[COUNT]",
        monitor: "Branch trace store: the buffer and its newest records (16)",
        lacks_host: NOT_IN_KVM,
        features: &[
            (Ds, UNLESS_ABSENT),
            (Dtes64, UNLESS_ABSENT),
            (DsCpl, UNLESS_ABSENT),
            (BusLockDetect, KVMS_WITH_OURS),
        ],
        remove: |caps| {
            if let Some(ds) = &mut caps.ds {
                ds.bts = false;
            }
        },
        ..ROW
    },
    UnitRow {
        unit: Unit::Pebs,
        name: "pebs",
        option: "Processor event-based sampling (PEBS); the values are as for --pt",
        monitor_arguments: "[COUNT]",
        monitor: "PEBS: enables, the buffer and its newest records (8)",
        lacks_host: |host| host.pmu.lacks_pebs(),
        host_of_own_model: true,
        with_counters: &[(UnitRequest::Emulated, "samples are of counters"), WITH_KVMS_COUNTERS],
        features: &[(Ds, HOST_AS_KVM), (Dtes64, HOST_AS_KVM), (DsCpl, HOST_AS_KVM)],
        remove: |caps| {
            if let Some(ds) = &mut caps.ds {
                ds.pebs = None;
            }
        },
        passed: &PEBS,
        ..ROW
    },
    UnitRow {
        unit: Unit::Pmu,
        name: "pmu",
        option: "Performance counters; the values are as for --pt",
        monitor: "Performance counters: what each counts, and how far it is",
        lacks_host: |host| host.pmu.lacks(),
        // KVM answers RDPMC without asking anybody. A fault is better than a count of something else.
        limits: [
            "; RDPMC is #GP from 10 ms after all counters are off and none is written any more",
            ", and counters of cycles alone without: RDPMC is caught by a breakpoint",
        ],
        // IA32_PERF_CAPABILITIES is a register of the counters.
        features: &[(Pdcm, HOST_AS_KVM)],
        remove: |caps| caps.pmu = None,
        passed: &PMU,
        ..ROW
    },
    UnitRow {
        unit: Unit::Pt,
        name: "pt",
        option: "Give the guest Intel PT: without --cpu-model that is sapphirerapids, otherwise the model must have it. On KVM \
                 `emulated` (as `--pt` alone) is this program's unit; `host` the host's hardware; `off` takes it away",
        monitor_arguments: "[COUNT]",
        monitor: "Intel PT: control, status, output, and the newest packets (16)",
        lacks_host: |host| host.pt.lacks(),
        host_with: "--experimental",
        features: &[(IntelPt, UNLESS_ABSENT)],
        ..ROW
    },
    UnitRow {
        unit: Unit::Tsc,
        name: "tsc",
        option: "Time-stamp counter: on KVM the host's, with an offset",
        monitor: "Time-stamp counter: value, offset, adjustment, deadline",
        on_kvm: Backend::Host,
        lacks_emulated: Some("RDTSC does not come out of KVM"),
        never_off: Some(EVERY_CPU),
        ..ROW
    },
    UnitRow {
        unit: Unit::Rdt,
        name: "rdt",
        option: "Resource Director Technology: allocation and monitoring; the values are as for --pt",
        monitor: "Resource director: association, masks, delays, monitoring",
        lacks_host: NOT_IN_KVM,
        features: &[(RdtM, UNLESS_ABSENT), (RdtA, UNLESS_ABSENT)],
        ..ROW
    },
];

impl Unit {
    /// Its row of [`UNITS`].
    pub fn row(self) -> &'static UnitRow {
        &UNITS[self as usize]
    }

    /// What its option is called.
    pub fn name(self) -> &'static str {
        self.row().name
    }
}

/// A value for each unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerUnit<T>([T; UNITS.len()]);

/// What the user asks for.
pub type UnitRequests = PerUnit<Option<UnitRequest>>;
/// Which backend provides each unit.
pub type Backends = PerUnit<Backend>;

impl<T> Index<Unit> for PerUnit<T> {
    type Output = T;

    fn index(&self, unit: Unit) -> &T {
        &self.0[unit as usize]
    }
}

impl<T> IndexMut<Unit> for PerUnit<T> {
    fn index_mut(&mut self, unit: Unit) -> &mut T {
        &mut self.0[unit as usize]
    }
}

impl<T: Copy> PerUnit<T> {
    /// The same with another value for one unit.
    pub fn with(mut self, unit: Unit, value: T) -> Self {
        self[unit] = value;
        self
    }

    /// Every unit's value.
    pub fn each(&self) -> impl Iterator<Item = (&'static UnitRow, T)> + use<T> {
        UNITS.iter().zip(self.0)
    }

    /// Another value for every unit, by its row and what it has now.
    ///
    /// # Errors
    /// The first of `f`'s.
    pub fn try_map<U: Copy + Default, E>(
        &self,
        mut f: impl FnMut(&'static UnitRow, T) -> Result<U, E>,
    ) -> Result<PerUnit<U>, E> {
        let mut mapped = PerUnit::default();
        for (row, value) in self.each() {
            mapped[row.unit] = f(row, value)?;
        }
        Ok(mapped)
    }
}

impl Backends {
    /// What a guest sees of a feature, if that is a matter of units. Where several units have it, any of them is enough.
    pub fn shown(&self, feature: Feature) -> Option<Shown> {
        let all = self.each().flat_map(|(row, backend)| {
            let own = row.features.iter().filter(move |(of, _)| *of == feature);
            own.map(move |(_, shows)| shows[backend as usize])
        });
        all.max()
    }

    /// Whether a unit of ours is there that IA32_DEBUGCTL switches.
    pub fn has_branches(&self) -> bool {
        [self[Unit::Lbr], self[Unit::Bts]].contains(&Backend::Emulated)
    }
}

#[cfg(test)]
#[path = "units_test.rs"]
mod tests;
