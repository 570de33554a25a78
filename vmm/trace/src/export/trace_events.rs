//! Calls over time as JSON, in the array form of the Trace Event Format, which Chrome's about:tracing and ui.perfetto.dev show: duration
//! events `B` and `E`. A hundred bytes a slice; [`super::Perfetto`] takes a tenth of that.

use std::io::{self, Write};

use pt_flow::{Block, Event};

use super::{
    calls::Export,
    error::ExportError,
    file::OutFile,
    slices::{Mark, Slices, Track, Writer, of_slices},
};
use crate::view::{Frame, Here, Names, Owner};

/// A process that no thread of Linux is of: numbers go up to `PID_MAX_LIMIT` of include/linux/threads.h.
const MACHINE: u32 = 1 << 22;

/// A file of trace events.
#[derive(Debug)]
pub struct TraceEvents {
    slices: Slices,
}

impl TraceEvents {
    /// To this file, of at most `limit` bytes. Calls of fewer instructions than `least` are left out.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(file: OutFile, title: &str, least: u64, limit: u64) -> Result<TraceEvents, ExportError> {
        let mut json = Json {
            file,
            written: 0,
            limit,
            first: true,
            ids: Vec::new(),
        };
        json.put("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")?;
        json.metadata("process_name", MACHINE, 0, title)?;
        Ok(TraceEvents {
            slices: Slices::new(Box::new(json), least),
        })
    }
}

impl Export for TraceEvents {
    of_slices!();
}

#[derive(Debug)]
struct Json {
    file: OutFile,
    written: u64,
    limit: u64,
    first: bool,
    /// Of each track, the numbers of its process and thread.
    ids: Vec<(u32, u32)>,
}

/// Microseconds with all digits of a nanosecond.
fn micros(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl Json {
    fn put(&mut self, text: &str) -> Result<(), ExportError> {
        self.written += text.len() as u64;
        if self.written > self.limit {
            return Err(ExportError::TooLarge {
                path: self.file.path().into(),
                limit: self.limit,
            });
        }
        let written: io::Result<()> = self.file.write_all(text.as_bytes());
        written.map_err(|source| self.file.error(source))
    }

    fn line(&mut self, text: &str) -> Result<(), ExportError> {
        if !std::mem::replace(&mut self.first, false) {
            self.put(",\n")?;
        }
        self.put(text)
    }

    fn metadata(&mut self, what: &str, pid: u32, tid: u32, name: &str) -> Result<(), ExportError> {
        let name = quoted(name);
        self.line(&format!(
            "{{\"ph\":\"M\",\"name\":\"{what}\",\"pid\":{pid},\"tid\":{tid},\"args\":{{\"name\":{name}}}}}"
        ))
    }
}

impl Writer for Json {
    fn mark(&mut self, track: u32, ns: u64, mark: Mark<'_>) -> Result<(), ExportError> {
        let (pid, tid) = self.ids[track as usize];
        let place = format!("\"pid\":{pid},\"tid\":{tid},\"ts\":{}", micros(ns));
        self.line(&match mark {
            Mark::Begin { name, function } => {
                let args = function.map_or(String::new(), |(_, ip)| format!(",\"args\":{{\"ip\":\"{ip:#x}\"}}"));
                format!("{{\"ph\":\"B\",{place},\"name\":{}{args}}}", quoted(name))
            }
            Mark::End => format!("{{\"ph\":\"E\",{place}}}"),
            Mark::Instant(name) => format!("{{\"ph\":\"i\",\"s\":\"t\",{place},\"name\":{}}}", quoted(name)),
        })
    }

    fn name(&mut self, track: u32, what: Track, name: &str) -> Result<(), ExportError> {
        let (pid, tid) = match what {
            Track::Cpu(cpu) => (MACHINE, 3 * cpu as u32 + 1),
            Track::Calls(cpu) => (MACHINE, 3 * cpu as u32 + 2),
            Track::Idle(cpu) => (MACHINE, 3 * cpu as u32 + 3),
            Track::Thread { pid, tid } => (pid, tid),
        };
        if track as usize == self.ids.len() {
            self.ids.push((pid, tid));
        }
        if pid == tid {
            self.metadata("process_name", pid, tid, name)?;
        }
        self.metadata("thread_name", pid, tid, name)
    }

    fn finish(mut self: Box<Self>) -> Result<OutFile, ExportError> {
        self.put("\n]}\n")?;
        Ok(self.file)
    }
}
