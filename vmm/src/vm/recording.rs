//! Recordings of what a machine executes, from its start or begun under way.

use engine::{Activity, Cpu};
use machine::Machine;
use x86::model::CpuModel;

use super::{parts::Vm, soft::Soft};
use crate::{
    error::Error,
    recording::{Recorder, RecordingOptions},
};

impl Vm {
    /// Ends the recording, if there is one: what was executed so far is in the directory, whole.
    ///
    /// # Errors
    /// What went wrong first while it was written. What was written before that can be read.
    pub fn end_trace(&mut self, reason: &str) -> Result<(), Error> {
        let Some(recorder) = self.recorder.take() else {
            return Ok(());
        };
        self.recorder_is_late = false;
        recorder.finish();
        for cpu in 0..self.soft.count() {
            self.soft.ask(cpu, &mut self.machine);
            self.machine.observe(cpu, None);
        }
        let steps = self.soft.steps();
        let ticks = self.machine.clock().ticks(steps);
        let path = recorder.folder().to_path_buf();
        let memory = self.machine.memory();
        recorder
            .close(reason, memory, steps, ticks)
            .map_err(|source| Error::File {
                option: "--trace",
                path,
                source,
            })
    }

    /// Begins a recording here and now.
    ///
    /// # Errors
    /// There is one already, or the directory cannot be made; KVM executes what nobody sees.
    pub fn begin_trace(&mut self, options: &RecordingOptions) -> Result<(), Error> {
        let refused = |why: &str| Err(Error::Usage(format!("trace start: {why}")));
        if self.host_clock.is_some() {
            return refused("what runs in KVM is not seen: `--engine soft` is");
        }
        if self.recorder.is_some() {
            return refused("there is a recording already");
        }
        let model = self.machine.model();
        let header = options.header(model, self.soft.count(), &self.kernel, &self.files);
        self.recorder = Some(record(options, header, model, &self.soft, &mut self.machine)?);
        self.recorder_is_late = true;
        Ok(())
    }

    /// Begins the recording that a machine has from its start on.
    pub(crate) fn record_from_the_start(&mut self, options: &RecordingOptions) -> Result<(), Error> {
        let model = self.machine.model();
        let header = options.header(model, self.soft.count(), &self.kernel, &self.files);
        self.recorder = Some(record(options, header, model, &self.soft, &mut self.machine)?);
        Ok(())
    }

    /// Has the recording go on where another part of it has ended: as there, Linux is looked for before its observers begin.
    pub(crate) fn go_on_recording(&mut self) {
        if let Some(recorder) = &self.recorder {
            recorder.look(self.machine.memory(), self.soft.steps(), None);
        }
        self.ask_watchers();
    }

    /// Asks the watchers of all CPUs that have run what they want to hear, before anything else happens to them.
    pub(crate) fn ask_watchers(&mut self) {
        for cpu in 0..self.soft.count() {
            if self.soft.cpu(cpu).is_some_and(|cpu| cpu.retired() > 0) {
                self.soft.ask(cpu, &mut self.machine);
            }
        }
    }

    /// Whether the recording, if there is one, was begun by [`Vm::begin_trace`].
    pub(crate) fn recorder_is_late(&self) -> bool {
        self.recorder_is_late
    }
}

/// Begins a recording of all CPUs.
fn record(
    options: &RecordingOptions,
    header: trace::Header,
    model: &CpuModel,
    soft: &Soft,
    machine: &mut Machine,
) -> Result<Recorder, Error> {
    let (recorder, observers) = Recorder::new(options, header, model).map_err(|source| Error::File {
        option: "--trace",
        path: options.folder.clone(),
        source,
    })?;
    for (cpu, mut observer) in observers.into_iter().enumerate() {
        // UMWAIT and TPAUSE wait in C0, of which nobody is told.
        let asleep = |cpu: &Cpu| match cpu.activity() {
            Activity::Halted => true,
            Activity::Waiting => cpu.waits_until().is_none(),
            _ => false,
        };
        if soft.cpu(cpu).is_some_and(asleep) {
            observer.finds_asleep();
        }
        machine.observe(cpu, Some(Box::new(observer)));
    }
    Ok(recorder)
}
