//! What the front ends of a machine share: the run, what is known by name, and whether somebody holds the guest stopped.

use engine::{Activity, Cpu};

use super::names::GuestNames;
use super::requests::{CpuStatus, Status};
use crate::timeline::run::Run;

/// The run as front ends drive it.
#[derive(Debug)]
pub struct Controls<'r> {
    /// The run.
    pub run: &'r mut Run,
    /// What the monitor knows by name.
    pub names: GuestNames,
    /// The guest is held stopped until somebody resumes it.
    pub paused: bool,
    /// A debugger's client looks at the guest, which is stopped for as long.
    pub held: bool,
    /// The step that somebody wants the run to go to.
    pub go_to: Option<u64>,
}

impl From<&Cpu> for CpuStatus {
    fn from(cpu: &Cpu) -> Self {
        CpuStatus {
            rip: format!("{:#x}", cpu.rip()),
            activity: match cpu.activity() {
                Activity::Running => "running",
                Activity::Halted => "halted",
                Activity::Waiting => "waiting",
                Activity::WaitForSipi => "wait-for-sipi",
                Activity::Shutdown => "shutdown",
            },
            steps: cpu.steps(),
        }
    }
}

impl<'r> Controls<'r> {
    /// Of a run that nobody holds.
    pub fn new(run: &'r mut Run) -> Self {
        let names = GuestNames::of(run.kernel(), run.symbols());
        Controls {
            run,
            names,
            paused: false,
            held: false,
            go_to: None,
        }
    }

    /// What the control socket says of the machine.
    pub fn status(&mut self) -> Status {
        let run = &mut *self.run;
        Status {
            state: if self.paused || self.held { "paused" } else { "running" },
            steps: run.steps(),
            instructions: run.instructions(),
            virtual_ns: run.virtual_ns(),
            cpus: (0..run.cpu_count())
                .filter_map(|cpu| run.cpu(cpu))
                .map(CpuStatus::from)
                .collect(),
        }
    }
}
