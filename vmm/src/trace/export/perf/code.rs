//! The code of a window: each page as it was at first, and every change with its time.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
};

use crate::trace::{
    Clock, Trace,
    format::{Kind, Mark, PAGE, Record},
    image::{Next, Side},
    packets::Damage,
};

/// An address space and a page in it, as [`crate::trace::format`] has them; space 0 is the kernel's.
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

/// The code of a window.
#[derive(Debug, Default)]
pub struct Code {
    /// As it was first.
    pub first: BTreeMap<Key, At>,
    /// What changed, by vCPU and in order for each.
    pub changes: Vec<Changed>,
}

impl Code {
    /// Adds what a vCPU has executed in a part of its packets.
    pub fn add(&mut self, trace: &Trace, cpu: usize, range: &Range<u64>, clock: &Clock) {
        let damage = Damage::default();
        let mut side = Side::new(trace.folder(), cpu, trace.segments(cpu));
        let (mut segment, mut contents, mut at) = (0, Vec::new(), 0);
        // What others have is theirs to tell, but for changes that only this vCPU has seen.
        let others: HashSet<Key> = self.first.keys().copied().collect();
        let mut own = HashSet::new();
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
            let now = (cpu, segment, place);
            let known = !own.insert(key);
            if others.contains(&key) {
                if at <= range.start {
                    continue;
                }
            } else if !known || at <= range.start {
                // A page that was not executed before: it is as it always was.
                self.first.insert(key, now);
                continue;
            }
            self.changes.push(Changed {
                ticks: ticks(clock, at.max(range.start)),
                key,
                now,
            });
        }
    }
}

/// When the PSB at an offset was sent.
fn ticks(clock: &Clock, offset: u64) -> u64 {
    let psbs = clock.syncs().iter().filter(|sync| sync.psb);
    psbs.clone()
        .rfind(|sync| sync.offset <= offset)
        .map_or(0, |sync| sync.tick)
}

/// Contents of pages.
#[derive(Debug)]
pub struct Pages<'a> {
    trace: &'a Trace,
    files: HashMap<(usize, u32), File>,
}

impl<'a> Pages<'a> {
    /// Those of a trace.
    pub fn new(trace: &'a Trace) -> Pages<'a> {
        Pages {
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
        let file = match self.files.entry((at.0, at.1)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(File::open(self.trace.folder().join(Kind::Side.file(at.0, at.1)))?),
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
mod tests {
    use super::*;

    // covers: 5/export-perf
    #[test]
    fn changes_are_told_as_far_as_they_go() {
        let was = [0; PAGE];
        let mut now = was;
        (now[0], now[10], now[100], now[PAGE - 1]) = (1, 1, 1, 1);
        assert_eq!(differences(&was, &now), [0..11, 100..101, PAGE - 1..PAGE]);
        assert_eq!(differences(&was, &now), differences(&now, &was));
        assert_eq!(differences(&was, &was), []);
    }

    #[test]
    fn pages_that_lie_together_are_a_run() {
        let at = (0, 0, 0);
        let pages = [0x1000, 0x2000, 0x4000].map(|page| (page, at));
        assert_eq!(runs(&pages, 0).iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(runs(&pages, 0x1000).len(), 1);
    }
}
