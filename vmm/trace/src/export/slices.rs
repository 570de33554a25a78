//! Calls over time as slices on tracks: a track for each thread, and one for each vCPU that shows whose thread it runs.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

use pt_flow::{Event, EventKind};

use super::{error::ExportError, file::OutFile};
use crate::view::{Frame, Function, Here, Names, Owner};

/// The number of a frame whose beginning was not written yet.
const UNWRITTEN: u64 = 0;
const WRITTEN: u64 = 1;
/// Part of what called it.
const HIDDEN: u64 = 2;

/// What a track shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Track {
    /// Which thread a vCPU runs.
    Cpu(usize),
    /// The calls of a thread of Linux.
    Thread {
        /// Its process's number.
        pid: u32,
        /// Its number.
        tid: u32,
    },
    /// The calls of a vCPU's idle thread, whose number others have, too.
    Idle(usize),
    /// The calls of a vCPU, where the trace does not tell threads.
    Calls(usize),
}

/// Something on a track, at a time in nanoseconds. Tracks have numbers, from 0 on.
#[derive(Clone, Copy, Debug)]
pub enum Mark<'a> {
    /// A slice begins.
    Begin {
        /// What it is called.
        name: &'a str,
        /// Which function it is, and at which address it was entered, if it is one.
        function: Option<(Function, u64)>,
    },
    /// The slice that began last ends.
    End,
    /// Something happens.
    Instant(&'a str),
}

/// A file that slices are written to.
pub trait Writer: fmt::Debug {
    /// Writes what is on a track at a time.
    ///
    /// # Errors
    /// The file cannot be written, or would be too large.
    fn mark(&mut self, track: u32, ns: u64, mark: Mark<'_>) -> Result<(), ExportError>;
    /// A track has this name from now on. Each track has had one before anything is on it.
    ///
    /// # Errors
    /// As [`Writer::mark`].
    fn name(&mut self, track: u32, what: Track, name: &str) -> Result<(), ExportError>;
    /// Finishes the file.
    ///
    /// # Errors
    /// As [`Writer::mark`].
    fn finish(self: Box<Self>) -> Result<OutFile, ExportError>;
}

#[derive(Debug)]
struct Line {
    what: Track,
    name: String,
    /// Of the last event: a viewer takes none that go back.
    last: u64,
}

/// Makes slices of calls.
#[derive(Debug)]
pub struct Slices {
    writer: Box<dyn Writer>,
    /// Where frames keep whether they were written.
    tag: usize,
    /// Calls of fewer instructions are left out.
    least: u64,
    tracks: HashMap<Track, u32>,
    lines: Vec<Line>,
    /// Whose thread each vCPU runs.
    runs: BTreeMap<usize, Owner>,
    failed: Option<ExportError>,
    /// Calls that were written.
    calls: u64,
    /// Calls that were left out.
    left_out: u64,
}

/// A function's name, with the module's.
fn title(names: &Names, function: Function) -> String {
    match names.module(function) {
        Some(module) => format!("{} [{module}]", names.name(function)),
        None => names.name(function).into(),
    }
}

impl Slices {
    /// To this file. Calls of fewer instructions than `least` are left out.
    pub fn new(writer: Box<dyn Writer>, least: u64) -> Slices {
        Slices {
            writer,
            tag: 0,
            least,
            tracks: HashMap::new(),
            lines: Vec::new(),
            runs: BTreeMap::new(),
            failed: None,
            calls: 0,
            left_out: 0,
        }
    }

    /// Where frames keep whether they were written.
    pub fn set_tag(&mut self, tag: usize) {
        self.tag = tag;
    }

    fn check(&mut self, written: Result<(), ExportError>) {
        if let Err(error) = written {
            self.failed.get_or_insert(error);
        }
    }

    /// The number of a track, which has this name now.
    fn track(&mut self, what: Track, name: &str) -> u32 {
        let fresh = self.lines.len() as u32;
        let track = *self.tracks.entry(what).or_insert(fresh);
        if track == fresh {
            self.lines.push(Line {
                what,
                name: String::new(),
                last: 0,
            });
        }
        let line = &mut self.lines[track as usize];
        if line.name != name && self.failed.is_none() {
            line.name = name.into();
            let named = self.writer.name(track, what, name);
            self.check(named);
        }
        track
    }

    fn mark(&mut self, track: u32, ns: Option<u64>, mark: Mark<'_>) {
        let last = &mut self.lines[track as usize].last;
        *last = ns.unwrap_or(0).max(*last);
        let ns = *last;
        if self.failed.is_none() {
            let written = self.writer.mark(track, ns, mark);
            self.check(written);
        }
    }

    /// The track that shows an owner's calls.
    fn of(&mut self, names: &Names, here: &Here, owner: Owner) -> u32 {
        let Some(thread) = owner.thread.map(|id| names.thread(id)) else {
            return self.track(Track::Calls(here.cpu), &format!("vCPU {}: calls", here.cpu));
        };
        let what = match (thread.tgid, thread.tid) {
            (_, 0) => Track::Idle(here.cpu),
            (pid, tid) => Track::Thread { pid, tid },
        };
        // Names change seldom, and are looked up where a thread is gone over to.
        match self.tracks.get(&what) {
            Some(track) => *track,
            None => self.track(what, names.owner_name(owner, here.step)),
        }
    }

    /// Whose thread a vCPU runs.
    fn runs(&mut self, names: &Names, here: &Here, owner: Owner) {
        let before = self.runs.insert(here.cpu, owner);
        if before == Some(owner) {
            return;
        }
        let name = names.owner_name(owner, here.step).to_string();
        if owner.thread.is_some() {
            let track = self.of(names, here, owner);
            let what = self.lines[track as usize].what;
            self.track(what, &name);
        }
        let track = self.track(Track::Cpu(here.cpu), &format!("vCPU {}", here.cpu));
        if before.is_some() {
            self.mark(track, here.ns(), Mark::End);
        }
        let begin = Mark::Begin {
            name: &name,
            function: None,
        };
        self.mark(track, here.ns(), begin);
    }

    /// Writes the beginnings that were put off.
    fn begin_all(&mut self, names: &Names, track: u32, stack: &mut [Frame]) {
        let tag = self.tag;
        let first = stack
            .iter()
            .rposition(|frame| frame.tags[tag] == WRITTEN)
            .map_or(0, |at| at + 1);
        for frame in &mut stack[first..] {
            if frame.tags[tag] == UNWRITTEN && !frame.inner {
                frame.tags[tag] = WRITTEN;
                self.calls += 1;
                let begin = Mark::Begin {
                    name: &title(names, frame.function),
                    function: Some((frame.function, frame.ip)),
                };
                self.mark(track, frame.since_ns, begin);
            }
        }
    }

    /// The last frame was entered, or came back with its thread.
    pub fn enter(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame]) {
        self.runs(names, here, owner);
        let tag = self.tag;
        if let [.., below, top] = stack
            && below.function == top.function
            && !top.function.known()
        {
            top.tags[tag] = HIDDEN;
        } else if let Some(top) = stack.last_mut() {
            top.tags[tag] = UNWRITTEN;
        }
        if self.least == 0 {
            let track = self.of(names, here, owner);
            self.begin_all(names, track, stack);
        }
    }

    /// The last frame is left, or goes away with its thread.
    pub fn leave(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame]) {
        let Some(top) = stack.last() else { return };
        if top.tags[self.tag] == HIDDEN {
            return;
        }
        if top.tags[self.tag] == UNWRITTEN && top.own + top.below < self.least {
            self.left_out += 1;
            return;
        }
        let track = self.of(names, here, owner);
        self.begin_all(names, track, stack);
        self.mark(track, here.ns(), Mark::End);
    }

    /// Something else happens.
    pub fn event(&mut self, here: &Here, event: &Event) {
        let name = match event.kind {
            EventKind::Gap(gap) => format!("gap: {gap}"),
            EventKind::Overflow => "overflow".into(),
            _ => return,
        };
        let track = self.track(Track::Cpu(here.cpu), &format!("vCPU {}", here.cpu));
        self.mark(track, here.ns(), Mark::Instant(&name));
    }

    /// Finishes the file; returns what is to be printed beside it, if anything is.
    ///
    /// # Errors
    /// What went wrong first.
    pub fn finish(mut self) -> Result<Option<String>, ExportError> {
        // The end is where the last thing on any track is.
        let end = self.lines.iter().map(|line| line.last).max();
        for cpu in std::mem::take(&mut self.runs).into_keys() {
            if let Some(&track) = self.tracks.get(&Track::Cpu(cpu)) {
                self.mark(track, end, Mark::End);
            }
        }
        if let Some(error) = self.failed {
            return Err(error);
        }
        let file = self.writer.finish()?;
        let said = (self.left_out > 0).then(|| {
            let calls = if self.calls == 1 { "call" } else { "calls" };
            format!(
                "{}: {} {calls}, {} shorter ones left out",
                file.path().display(),
                self.calls,
                self.left_out
            )
        });
        file.finish().map(|()| said)
    }
}

/// An [`super::Export`] by a `slices` field.
macro_rules! of_slices {
    () => {
        fn begin(&mut self, tag: usize) {
            self.slices.set_tag(tag);
        }

        fn enter(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], _: bool) {
            self.slices.enter(names, here, owner, stack);
        }

        fn leave(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame]) {
            self.slices.leave(names, here, owner, stack);
        }

        fn run(&mut self, _: &Here, _: &[Frame], _: &Block) {}

        fn event(&mut self, here: &Here, event: &Event) {
            self.slices.event(here, event);
        }

        fn finish(self: Box<Self>, _: &Names) -> Result<Option<String>, ExportError> {
            self.slices.finish()
        }
    };
}
pub(super) use of_slices;
