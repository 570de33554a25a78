//! Calls over time, as ui.perfetto.dev and Chrome's about:tracing show them: the JSON array of the Trace Event Format, duration events
//! `B` and `E`, a thread for each vCPU and one for whose process it runs.

use std::io::{self, Write};

use pt_flow::{Block, Event, EventKind};

use super::{calls::Export, error::ExportError, file::OutFile};
use crate::view::{Frame, Here, Names, Process};

/// The number of a frame whose beginning was not written yet.
const UNWRITTEN: u64 = 0;
const WRITTEN: u64 = 1;
/// Part of what called it.
const HIDDEN: u64 = 2;

/// Writes events as they come.
#[derive(Debug)]
pub struct Perfetto {
    file: OutFile,
    title: String,
    /// Where frames keep whether they were written.
    tag: usize,
    failed: Option<io::Error>,
    /// Calls of fewer instructions are left out.
    least: u64,
    cpu: usize,
    first: bool,
    process: Option<(Option<Process>, String)>,
    /// Of the last event: a viewer takes none that go back.
    last: u64,
    /// Calls that were written.
    calls: u64,
    /// Calls that were left out.
    left_out: u64,
}

/// Microseconds with all digits of a nanosecond.
fn micros(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl Perfetto {
    /// Begins the file. Calls of fewer instructions than `least` are left out.
    pub fn new(file: OutFile, title: &str, least: u64) -> Perfetto {
        let mut events = Perfetto {
            file,
            title: title.into(),
            tag: 0,
            failed: None,
            least,
            cpu: 0,
            first: true,
            process: None,
            last: 0,
            calls: 0,
            left_out: 0,
        };
        events.put("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n");
        events
    }

    fn put(&mut self, text: &str) {
        if self.failed.is_none()
            && let Err(error) = self.file.write_all(text.as_bytes())
        {
            self.failed = Some(error);
        }
    }

    fn line(&mut self, text: &str) {
        if !std::mem::replace(&mut self.first, false) {
            self.put(",\n");
        }
        self.put(text);
    }

    fn time(&mut self, ns: Option<u64>) -> u64 {
        self.last = ns.unwrap_or(0).max(self.last);
        self.last
    }

    fn begin(&mut self, names: &Names, frame: &Frame) {
        let ts = micros(self.time(frame.since_ns));
        let name = match names.module(frame.function) {
            Some(module) => quoted(&format!("{} [{module}]", names.name(frame.function))),
            None => quoted(names.name(frame.function)),
        };
        let (tid, ip) = (2 * self.cpu + 1, frame.ip);
        self.line(&format!(
            "{{\"ph\":\"B\",\"pid\":1,\"tid\":{tid},\"ts\":{ts},\"name\":{name},\"args\":{{\"ip\":\"{ip:#x}\"}}}}"
        ));
        self.calls += 1;
    }

    /// Writes the beginnings that were put off, as what is inside is to be seen.
    fn begin_all(&mut self, names: &Names, stack: &mut [Frame]) {
        let tag = self.tag;
        for frame in stack.iter_mut().filter(|frame| frame.tags[tag] == UNWRITTEN) {
            frame.tags[tag] = WRITTEN;
            self.begin(names, frame);
        }
    }
}

impl Export for Perfetto {
    fn begin(&mut self, tag: usize) {
        self.tag = tag;
    }

    fn cpu(&mut self, cpu: usize) {
        (self.cpu, self.process, self.last) = (cpu, None, 0);
        for (tid, name) in [
            (2 * cpu + 1, format!("vCPU {cpu}")),
            (2 * cpu + 2, format!("vCPU {cpu}: process")),
        ] {
            self.line(&format!(
                "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":{tid},\"args\":{{\"name\":\"{name}\"}}}},\n{{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":1,\"tid\":{tid},\"args\":{{\"sort_index\":{tid}}}}}"
            ));
        }
    }

    fn cpu_over(&mut self) {
        if self.process.take().is_some() {
            let (ts, tid) = (micros(self.last), 2 * self.cpu + 2);
            self.line(&format!("{{\"ph\":\"E\",\"pid\":1,\"tid\":{tid},\"ts\":{ts}}}"));
        }
    }

    fn enter(&mut self, names: &Names, here: &Here, process: Option<Process>, stack: &mut [Frame], _: bool) {
        let known = self.process.as_ref().is_some_and(|(known, _)| *known == process);
        if !known {
            let name = names.process_name(process, here.step).to_string();
            let same = self.process.as_ref().is_some_and(|(_, known)| *known == name);
            if !same {
                let (ts, tid) = (micros(self.time(here.ns())), 2 * self.cpu + 2);
                if self.process.is_some() {
                    self.line(&format!("{{\"ph\":\"E\",\"pid\":1,\"tid\":{tid},\"ts\":{ts}}}"));
                }
                let quoted = quoted(&name);
                self.line(&format!(
                    "{{\"ph\":\"B\",\"pid\":1,\"tid\":{tid},\"ts\":{ts},\"name\":{quoted}}}"
                ));
            }
            self.process = Some((process, name));
        }
        if let [.., below, top] = stack
            && below.function == top.function
            && !top.function.known()
        {
            top.tags[self.tag] = HIDDEN;
        } else if let Some(top) = stack.last_mut() {
            top.tags[self.tag] = UNWRITTEN;
        }
        if self.least == 0 {
            self.begin_all(names, stack);
        }
    }

    fn leave(&mut self, names: &Names, here: &Here, stack: &mut [Frame]) {
        let Some(top) = stack.last() else { return };
        if top.tags[self.tag] == HIDDEN {
            return;
        }
        if top.tags[self.tag] == UNWRITTEN && top.own + top.below < self.least {
            self.left_out += 1;
            return;
        }
        self.begin_all(names, stack);
        let (ts, tid) = (micros(self.time(here.ns())), 2 * self.cpu + 1);
        self.line(&format!("{{\"ph\":\"E\",\"pid\":1,\"tid\":{tid},\"ts\":{ts}}}"));
    }

    fn run(&mut self, _: &[Frame], _: &Block) {}

    fn event(&mut self, here: &Here, event: &Event) {
        let name = match event.kind {
            EventKind::Gap(gap) => format!("gap: {gap}"),
            EventKind::Overflow => "overflow".into(),
            _ => return,
        };
        let (ts, tid, name) = (micros(self.time(here.ns())), 2 * self.cpu + 1, quoted(&name));
        self.line(&format!(
            "{{\"ph\":\"i\",\"s\":\"t\",\"pid\":1,\"tid\":{tid},\"ts\":{ts},\"name\":{name}}}"
        ));
    }

    fn finish(mut self: Box<Self>, _: &Names) -> Result<Option<String>, ExportError> {
        let name = quoted(&self.title);
        self.line(&format!(
            "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":1,\"tid\":0,\"args\":{{\"name\":{name}}}}}"
        ));
        self.put("\n]}\n");
        if let Some(error) = self.failed {
            return Err(self.file.error(error));
        }
        let said = (self.left_out > 0).then(|| {
            let calls = if self.calls == 1 { "call" } else { "calls" };
            format!(
                "{}: {} {calls}, {} shorter ones left out",
                self.file.path().display(),
                self.calls,
                self.left_out
            )
        });
        self.file.finish().map(|()| said)
    }
}
