//! What came from outside, and when.

use crate::{
    error::Error,
    vm::{Inlet, Moment},
};

/// What came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// What a device took.
    Input(Inlet, Vec<u8>),
    /// Nothing: what the machine's state is, by its hash.
    Check(u64),
    /// A debugger has changed the guest: the state from here on is kept elsewhere.
    Changed,
}

/// What came, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// When: before anything else that happens then.
    pub at: Moment,
    /// What.
    pub what: What,
}

/// How a recorded session ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    /// From outside, with these words; `None`: the guest ended it, and will again.
    pub reason: Option<String>,
    /// The recording breaks off: nobody has ended it.
    pub broken: bool,
}

/// Where a log is written to as it grows, so that the session can be run again.
pub trait LogWriter: std::fmt::Debug + Send {
    /// Another entry has come.
    ///
    /// # Errors
    /// It cannot be written.
    fn entry(&mut self, entry: &Entry) -> Result<(), Error>;

    /// Of what was written only the first `count` entries are true.
    ///
    /// # Errors
    /// It cannot be written.
    fn keep(&mut self, count: usize) -> Result<(), Error>;

    /// The last line: why the run ended.
    ///
    /// # Errors
    /// It cannot be written.
    fn end(&mut self, at: Moment, by_guest: bool, reason: &str) -> Result<(), Error>;
}

/// All that came, in order, and how far the run has got in it.
#[derive(Debug, Default)]
pub struct Log {
    entries: Vec<Entry>,
    next: usize,
    writer: Option<Box<dyn LogWriter>>,
}

impl Log {
    /// A log of a session that was recorded.
    pub fn of(entries: Vec<Entry>) -> Self {
        Log {
            entries,
            ..Log::default()
        }
    }

    /// Writes what comes from now on to a folder, too.
    pub fn write_to(&mut self, writer: Box<dyn LogWriter>) {
        self.writer = Some(writer);
    }

    /// Whether it is written to a folder.
    pub fn is_written(&self) -> bool {
        self.writer.is_some()
    }

    /// The next entry, if there is one.
    pub fn next(&self) -> Option<&Entry> {
        self.entries.get(self.next)
    }

    /// The next entry has come to pass.
    pub fn pass(&mut self) {
        self.next += 1;
    }

    /// How many entries have come to pass.
    pub fn position(&self) -> usize {
        self.next
    }

    /// The run is where so many entries have come to pass.
    pub fn go_to(&mut self, position: usize) {
        self.next = position.min(self.entries.len());
    }

    /// Something comes, after everything that is known.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn push(&mut self, entry: Entry) -> Result<(), Error> {
        if let Some(writer) = &mut self.writer {
            writer.entry(&entry)?;
        }
        self.entries.push(entry);
        self.next = self.entries.len();
        Ok(())
    }

    /// What has not come to pass never will.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn forget_future(&mut self) -> Result<(), Error> {
        self.entries.truncate(self.next);
        match &mut self.writer {
            Some(writer) => writer.keep(self.next),
            None => Ok(()),
        }
    }

    /// The folder's last line: why the run ended.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn end(&mut self, at: Moment, by_guest: bool, reason: &str) -> Result<(), Error> {
        match &mut self.writer {
            Some(writer) => writer.end(at, by_guest, reason),
            None => Ok(()),
        }
    }
}
