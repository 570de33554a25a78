//! The line from a machine's first serial port to whoever writes its output out.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard},
};

/// What the serial port has sent and nobody has written yet. Clones are the same line.
#[derive(Clone, Debug, Default)]
pub struct SerialLine(Arc<Mutex<Vec<u8>>>);

impl SerialLine {
    /// What has been sent and not been written or taken yet.
    pub fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.bytes())
    }

    /// The bytes themselves.
    pub(crate) fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Write for SerialLine {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
