//! The code of a window: each page as it was at first, and every change with its time.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
};

use crate::{
    StepClock, Trace, TraceError,
    directory::format::{Kind, Mark, PAGE, Record},
    directory::packets::Damage,
    reader::image::{Next, Side},
};

/// An address space and a page in it, as [`crate::format`] has them; space 0 is the kernel's.
pub type Key = (u64, u64);

/// Where a page's content is: vCPU, segment and place in its file.
pub type At = (usize, u32, u64);

/// A page has another content from here on.
#[derive(Clone, Copy, Debug)]
pub struct Changed {
    /// Virtual ticks of a PSB.
    pub ticks: u64,
    pub key: Key,
    pub now: At,
}

/// A page has another content from a PSB on.
#[derive(Clone, Copy, Debug)]
struct Turn {
    step: u64,
    ticks: u64,
    was: At,
    now: At,
}

/// What the vCPUs tell of a page.
#[derive(Debug, Default)]
struct Reported {
    /// As a vCPU has it that tells of no change.
    content: Option<At>,
    turns: Vec<Turn>,
}

/// What the vCPUs have executed.
///
/// All execute what is in memory, so that there is one content of a page at a time: that of the last change that any of them tells.
/// The one that notices a change tells it where it is, the others before they go on.
#[derive(Debug)]
pub struct Code {
    pages: BTreeMap<Key, Reported>,
    /// The machine's step at which the first part begins.
    begin: u64,
}

impl Code {
    /// Of no vCPU yet.
    pub fn new() -> Code {
        Code {
            pages: BTreeMap::new(),
            begin: u64::MAX,
        }
    }

    /// Adds what a vCPU has executed in a part of its packets.
    ///
    /// # Errors
    /// The system does not let a file be read.
    pub fn add(&mut self, trace: &Trace, cpu: usize, range: &Range<u64>, clock: &StepClock) -> Result<(), TraceError> {
        self.begin = self.begin.min(moment(clock, range.start).0);
        let damage = Damage::default();
        let mut side = Side::new(trace.folder(), cpu, trace.segments(cpu));
        let (mut segment, mut contents, mut at) = (0, Vec::new(), 0);
        let mut now: HashMap<Key, At> = HashMap::new();
        while let Some(next) = side.next(&damage) {
            let Next::Record(record, place) = next else {
                if let Next::Segment(number) = next {
                    segment = number;
                    contents.clear();
                }
                continue;
            };
            let (key, content) = match record {
                Record::Content { .. } => {
                    contents.push(place);
                    continue;
                }
                Record::Page { space, page, content } => ((space, page), content),
                Record::Change {
                    offset,
                    space,
                    page,
                    content,
                    ..
                } => {
                    at = offset;
                    ((space, page), content)
                }
                Record::Mark {
                    mark: Mark::Segment,
                    offset,
                    ..
                } => {
                    at = offset;
                    continue;
                }
                _ => continue,
            };
            if at >= range.end {
                break;
            }
            let Some(&place) = contents.get(content as usize) else {
                continue;
            };
            let place = (cpu, segment, place);
            let reported = self.pages.entry(key).or_default();
            match now.insert(key, place) {
                // It was not executed before: it is as it always was.
                None => drop(reported.content.get_or_insert(place)),
                Some(was) => {
                    let (step, ticks) = moment(clock, at);
                    reported.turns.push(Turn {
                        step,
                        ticks,
                        was,
                        now: place,
                    });
                }
            }
        }
        match damage.unread() {
            Some(reason) => Err(TraceError {
                folder: trace.folder().into(),
                reason,
            }),
            None => Ok(()),
        }
    }

    /// Each page as it is at the beginning, and every change behind it, in the order of their times.
    pub fn in_order(self) -> (BTreeMap<Key, At>, Vec<Changed>) {
        let (mut first, mut changes) = (BTreeMap::new(), Vec::new());
        for (key, mut reported) in self.pages {
            reported.turns.sort_by_key(|turn| turn.step);
            let (before, behind) = reported
                .turns
                .split_at(reported.turns.partition_point(|turn| turn.step <= self.begin));
            let at_first = before.last().map(|turn| turn.now);
            let at_first = at_first.or(behind.first().map(|turn| turn.was)).or(reported.content);
            first.extend(at_first.map(|at| (key, at)));
            changes.extend(behind.iter().map(|turn| Changed {
                ticks: turn.ticks,
                key,
                now: turn.now,
            }));
        }
        changes.sort_by_key(|change| change.ticks);
        (first, changes)
    }
}

/// The machine's step and the ticks when the PSB at an offset was sent, or the one before it.
fn moment(clock: &StepClock, offset: u64) -> (u64, u64) {
    let psbs = clock.syncs().iter().filter(|sync| sync.psb);
    psbs.clone()
        .rfind(|sync| sync.offset <= offset)
        .map_or((0, 0), |sync| (sync.step, sync.tick))
}

/// Contents of pages.
#[derive(Debug)]
pub enum Pages<'a> {
    /// Those of a trace, in its files.
    Recorded {
        /// The trace.
        trace: &'a Trace,
        /// Files that are open.
        files: HashMap<(usize, u32), File>,
    },
    /// What was seen of each to be executed, by the last number of [`At`].
    Executed(Vec<Box<[u8; PAGE]>>),
}

impl<'a> Pages<'a> {
    /// Those of a trace.
    pub fn new(trace: &'a Trace) -> Pages<'a> {
        Pages::Recorded {
            trace,
            files: HashMap::new(),
        }
    }

    /// A content.
    ///
    /// # Errors
    /// Its file cannot be read.
    pub fn read(&mut self, at: At) -> io::Result<[u8; PAGE]> {
        use std::collections::hash_map::Entry;
        let (trace, files) = match self {
            Pages::Recorded { trace, files } => (trace, files),
            Pages::Executed(pages) => {
                let page = usize::try_from(at.2).ok().and_then(|n| pages.get(n));
                return Ok(page.map_or([0; PAGE], |page| **page));
            }
        };
        let file = match files.entry((at.0, at.1)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(crate::regular::open_inside(
                &trace.folder().join(Kind::Side.file(at.0, at.1)),
            )?),
        };
        let mut bytes = [0; PAGE];
        file.read_exact_at(&mut bytes, at.2)?;
        Ok(bytes)
    }
}

/// Pages that lie together, or no further apart than `near`.
pub fn runs(pages: &[(u64, At)], near: u64) -> Vec<Vec<(u64, At)>> {
    let mut runs: Vec<Vec<(u64, At)>> = Vec::new();
    for page in pages {
        match runs.last_mut().and_then(|run| Some((run.last()?.0, run))) {
            Some((last, run)) if page.0 - last <= near + PAGE as u64 => run.push(*page),
            _ => runs.push(vec![*page]),
        }
    }
    runs
}

/// Where two contents differ. What lies close together is one.
pub fn differences(was: &[u8; PAGE], now: &[u8; PAGE]) -> Vec<Range<usize>> {
    const NEAR: usize = 16;
    let mut found: Vec<Range<usize>> = Vec::new();
    for at in (0..PAGE).filter(|at| was[*at] != now[*at]) {
        match found.last_mut() {
            Some(last) if at - last.end <= NEAR => last.end = at + 1,
            _ => found.push(at..at + 1),
        }
    }
    found
}

#[cfg(test)]
#[path = "code_test.rs"]
mod tests;
