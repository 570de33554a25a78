//! Why a run ended.

use std::time::Duration;

use libc::c_int;

use super::outside::Leave;
use crate::{
    error::{Error, Status},
    signals,
};

/// Why a run ended.
#[derive(Clone, Debug)]
pub enum End {
    /// The guest switched itself off.
    PowerOff,
    /// The guest reset itself.
    Reset,
    /// The guest wrote this to the debug-exit port.
    DebugExit(u32),
    /// The user typed Ctrl-A x.
    Quit,
    /// A signal came.
    Signal(c_int),
    /// Nobody reads standard output any more.
    OutputClosed,
    /// Triple fault; a report of several lines.
    TripleFault(String),
    /// The guest halted, and nothing can wake it; where and why.
    Halted(String),
    /// `--max-instructions`
    Instructions(u64),
    /// `--timeout`
    Timeout(Duration),
    /// The trace could not be written any more, and `--trace-on-error` says to stop.
    Trace,
    /// The guest's Linux has panicked, and `--on-panic` says to end.
    Panicked,
    /// A recorded session ended here, from outside.
    Replayed {
        /// The step.
        steps: u64,
        /// What ended it.
        reason: String,
        /// Nobody did: the recorder was killed.
        broken: bool,
    },
    /// A replay went another way than the session, before this step.
    Diverged(u64),
    /// KVM failed while the guest ran: its words, and a report.
    Kvm(String),
    /// A fault of ours.
    Defect(String),
}

impl End {
    /// How a run ended that the world outside ended.
    ///
    /// # Errors
    /// It failed.
    pub(crate) fn of(leave: Leave) -> Result<Self, Error> {
        match leave {
            Leave::Quit => Ok(End::Quit),
            Leave::Signal(signal) => Ok(End::Signal(signal)),
            Leave::OutputClosed => Ok(End::OutputClosed),
            Leave::Failed(error) => Err(error),
        }
    }

    /// The exit status that goes with it.
    pub fn status(&self) -> Status {
        match self {
            End::PowerOff | End::Reset | End::Quit | End::Replayed { broken: false, .. } => Status::Done,
            End::DebugExit(value) => Status::DebugExit(*value),
            End::Panicked => Status::Panicked,
            End::Signal(_) | End::OutputClosed | End::Trace | End::Kvm(_) | End::Diverged(_) | End::Replayed { .. } => {
                Status::Usage
            }
            End::TripleFault(_) | End::Halted(_) => Status::Crash,
            End::Instructions(_) | End::Timeout(_) => Status::Limit,
            End::Defect(_) => Status::Internal,
        }
    }

    /// The guest itself has ended the run, as it will whenever it runs so far.
    pub fn is_the_guests(&self) -> bool {
        match self {
            End::PowerOff | End::Reset | End::DebugExit(_) | End::TripleFault(_) | End::Halted(_) | End::Defect(_) => {
                true
            }
            End::Quit
            | End::Signal(_)
            | End::OutputClosed
            | End::Instructions(_)
            | End::Timeout(_)
            | End::Trace
            | End::Panicked
            | End::Replayed { .. }
            | End::Diverged(_)
            | End::Kvm(_) => false,
        }
    }

    /// What to tell the operator; nothing where the guest or the user meant it.
    pub fn message(&self) -> Option<String> {
        match self {
            // What went wrong with the trace is said when it is closed.
            End::PowerOff | End::Reset | End::Quit | End::DebugExit(_) | End::Trace | End::Panicked => None,
            End::Signal(signal) => Some(format!("ended by {}", signals::name(*signal))),
            End::OutputClosed => Some("--serial stdio: nobody reads standard output any more".into()),
            End::TripleFault(report) => Some(format!("guest crashed: triple fault\n{report}")),
            End::Halted(where_why) => Some(format!("guest halted for good: {where_why}")),
            End::Instructions(limit) => Some(format!("--max-instructions {limit}: reached")),
            End::Timeout(limit) => Some(format!("--timeout {}: reached", limit.as_secs_f64())),
            End::Replayed { steps, reason, .. } => Some(format!("replay: the session ends at step {steps}: {reason}")),
            End::Diverged(steps) => Some(format!(
                "replay: at step {steps} it has gone another way than the session: a file it starts from has changed, or this \
                 is another build of minivmm"
            )),
            End::Kvm(what) => Some(format!(
                "--engine kvm: the host's KVM failed; --engine soft does without it: {what}"
            )),
            End::Defect(what) => Some(format!("internal error: {what}")),
        }
    }

    /// Why, in a line, for what is kept of the run.
    pub fn reason(&self) -> String {
        match self {
            End::PowerOff => "the guest powered off".into(),
            End::Reset => "the guest reset itself".into(),
            End::DebugExit(value) => format!("the guest wrote {value} to the debug-exit port"),
            End::Quit => "Ctrl-A x".into(),
            End::Panicked => "the guest's Linux has panicked".into(),
            End::Trace => "the trace could not be written any more".into(),
            _ => {
                let message = self.message().unwrap_or_default();
                message.lines().next().unwrap_or_default().into()
            }
        }
    }
}

/// The panic of a guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panic {
    /// The CPU on which it was, where the kernel's symbols tell.
    pub cpu: Option<u32>,
}

impl std::fmt::Display for Panic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.cpu {
            Some(cpu) => write!(f, "the guest's Linux has panicked, on CPU {cpu}"),
            None => f.write_str("the guest's kernel has panicked"),
        }
    }
}

/// How the program's run ended.
#[derive(Debug)]
pub struct Ended {
    /// How.
    pub end: End,
    /// Where the CPUs were, if the guest did not end by itself.
    pub place: Option<String>,
    /// The guest had panicked.
    pub panicked: Option<Panic>,
    /// The last messages of a kernel whose guest runs a command.
    pub messages: Vec<u8>,
}

impl Ended {
    /// What to tell the operator, as [`End::message`], and where it was.
    pub fn message(&self) -> Option<String> {
        let message = self.end.message().map(|message| match &self.place {
            Some(place) => format!("{message}, {place}"),
            None => message,
        });
        match (message, self.panicked) {
            (message, None) => message,
            (None, Some(panic)) => Some(panic.to_string()),
            (Some(message), Some(panic)) => Some(format!("{panic}; {message}")),
        }
    }

    /// The exit status that goes with it.
    pub fn status(&self) -> Status {
        match self.panicked {
            Some(_) => Status::Panicked,
            None => self.end.status(),
        }
    }
}

#[cfg(test)]
#[path = "end_test.rs"]
mod tests;
