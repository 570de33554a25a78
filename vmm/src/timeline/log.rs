//! What came from outside, and when.

use super::session::Writer;
use crate::{error::Error, vm::Moment};

/// What came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Bytes that the first serial port took.
    Input(Vec<u8>),
    /// Nothing: what the CPUs' state is, by its hash.
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

/// All that came, in order, and how far the run has got in it.
#[derive(Debug, Default)]
pub struct Log {
    entries: Vec<Entry>,
    next: usize,
    writer: Option<Writer>,
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
    pub fn write_to(&mut self, writer: Writer) {
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
