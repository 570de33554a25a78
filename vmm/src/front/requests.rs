//! What clients of a running machine ask for, whatever language they ask in, and what they are answered.

use std::{
    fs::File,
    ops::Range,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
};

use serde::{Deserialize, Serialize};

/// What a client can ask for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Command {
    /// Stop the guest.
    Pause,
    /// Let it go on.
    Resume,
    /// Say how it is.
    Status,
    /// End the machine.
    Quit,
    /// Carry out a command of the monitor's.
    Monitor {
        /// The command and what it takes.
        line: String,
        /// The CPU that it looks at.
        #[serde(default)]
        cpu: usize,
    },
    /// Write memory and registers as an ELF core file to the file that comes with the command.
    Dump {
        /// Guest-physical addresses; all of RAM where there are none.
        #[serde(skip)]
        part: Option<Range<u64>>,
    },
    /// Write the machine's state to the file that comes with the command, for `--restore`.
    Snapshot,
    /// Carry out a command of QEMU's human monitor, which comes over QMP alone.
    #[serde(skip)]
    HumanMonitor {
        /// The command and what it takes.
        line: String,
    },
}

/// What comes of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It was carried out, and this is how the machine is.
    Status(Status),
    /// It was carried out, and this is what it says.
    Text(String),
    /// It was not, for this reason.
    Refused(String),
}

/// What the machine says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Status {
    /// `running` or `paused`.
    pub state: &'static str,
    /// Instructions and REP iterations so far, over all CPUs.
    pub steps: u64,
    /// Instructions so far.
    pub instructions: u64,
    /// Virtual time in nanoseconds.
    pub virtual_ns: u64,
    /// The CPUs.
    pub cpus: Vec<CpuStatus>,
}

/// What the machine says of a CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CpuStatus {
    /// The instruction pointer, in hexadecimal.
    pub rip: String,
    /// `running`, `halted`, `waiting` (after MWAIT), `wait-for-sipi` (until another CPU starts it) or `shutdown`.
    pub activity: &'static str,
    /// Instructions and REP iterations so far.
    pub steps: u64,
}

/// A command whose client waits.
#[derive(Debug)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// The file that came with it, open for writing.
    pub file: Option<File>,
    answer: SyncSender<Reply>,
}

impl Request {
    /// A command, and where its answer will come from.
    pub fn new(command: Command, file: Option<File>) -> (Self, Receiver<Reply>) {
        let (answer, reply) = sync_channel(1);
        (Request { command, file, answer }, reply)
    }

    /// Answers it. A client that has gone away does not mind.
    pub fn answer(self, reply: Reply) {
        let _ = self.answer.try_send(reply);
    }
}
