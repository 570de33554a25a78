//! The code of a vCPU, by position: what a decoder asks.
//!
//! The sideband is read ahead up to the next change, so that pages which are reported late are there in time. Memory is bounded:
//! an image keeps which content a page has, and the contents that were asked for lately.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pt_flow::{Change, Context, Image, Position};

use crate::directory::format::{Kind, Mark, PAGE, Record, Records, space};
use crate::directory::frames::{Frames, Item};
use crate::directory::packets::Damage;
use crate::regular;

/// Contents that are kept in memory.
const KEPT: usize = 1 << 10;

/// A change that lies ahead.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    position: Position,
    /// Space and page, and the content's place in the segment's file; `None`: everything changes, a segment begins.
    page: Option<(u64, u64, u64)>,
}

/// The sideband of a vCPU, read from its beginning on.
#[derive(Debug)]
pub struct Side {
    frames: Frames,
    /// A frame's records.
    pending: VecDeque<Next>,
    /// The sideband is complete for packets before this offset.
    complete: u64,
    damaged: bool,
    segment: u32,
}

/// A file of which a process maps code.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MappedFile {
    /// Its path in the guest, `[vdso]`, or nothing for memory without a file. What is no UTF-8 is replaced.
    pub path: String,
    /// Its build ID, hexadecimal; empty where that is not known.
    pub build_id: String,
}

/// What comes next in the sideband.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// A segment's file begins.
    Segment(u32),
    /// A record; contents stand at this place in the file.
    Record(Record, u64),
    /// A file of which a process maps code.
    File(MappedFile),
    /// Something is missing until the next segment.
    Damage,
}

impl Side {
    /// The sideband of these segments.
    pub fn new(folder: &Path, cpu: usize, segments: &[u32]) -> Side {
        Side {
            frames: Frames::new(folder, Kind::Side, cpu, segments),
            pending: VecDeque::new(),
            complete: 0,
            damaged: false,
            segment: 0,
        }
    }

    /// The sideband has been read for all packets before this offset, once everything that was given has been seen.
    pub fn complete(&self) -> u64 {
        self.complete
    }

    /// What comes next; `None` at the end.
    pub fn next(&mut self, damage: &Damage) -> Option<Next> {
        loop {
            if let Some(next) = self.pending.pop_front() {
                return Some(next);
            }
            match self.frames.next()? {
                Ok(Item::Segment(segment)) => {
                    self.segment = segment;
                    self.damaged = false;
                    return Some(Next::Segment(segment));
                }
                // Behind damage nothing in the segment can be trusted: a change may be missing.
                Ok(Item::Frame { .. }) if self.damaged => {}
                Ok(Item::Frame { offset, at, payload }) => {
                    for record in Records::new(&payload) {
                        match record {
                            Ok(record) => self.pending.push_back(match record {
                                Record::Content { at: within } => Next::Record(record, at + within as u64),
                                Record::File { at, path, build_id } => {
                                    let (path, build_id) = payload[at..at + path + build_id].split_at(path);
                                    Next::File(MappedFile {
                                        path: String::from_utf8_lossy(path).into_owned(),
                                        build_id: build_id.iter().map(|byte| format!("{byte:02x}")).collect(),
                                    })
                                }
                                _ => Next::Record(record, 0),
                            }),
                            Err(_) => {
                                damage.add(0, format!("{}: no record", Kind::Side.file(0, self.segment)));
                                self.damaged = true;
                            }
                        }
                    }
                    if !self.damaged {
                        self.complete = self.complete.max(offset);
                    }
                }
                Ok(Item::Damage { file, at, len }) => {
                    damage.add(0, format!("{file}: {len} bytes at {at:#x} are damaged"));
                    if !std::mem::replace(&mut self.damaged, true) {
                        return Some(Next::Damage);
                    }
                }
                Err(error) => {
                    let says = format!("{}: {}", Kind::Side.file(0, self.segment), crate::error::plain(&error));
                    damage.fail(says.clone());
                    damage.add(0, says);
                    return None;
                }
            }
        }
    }
}

/// Where a content is: the segment, and the place in its file.
type ContentAt = (u32, u64);

/// The code as a vCPU executed it.
#[derive(Debug)]
pub struct TraceImage {
    folder: PathBuf,
    cpu: usize,
    side: Side,
    damage: Damage,
    /// The segment that is read ahead, and places of its contents.
    reading: u32,
    contents: Vec<u64>,
    /// What each page holds now: by space and page.
    pages: HashMap<(u64, u64), ContentAt>,
    next: Option<Ahead>,
    /// Nothing is known from the next change on.
    ended: bool,
    /// The recording was ended, and all of it is there.
    whole: bool,
    /// Numbers that the decoder knows spaces by.
    spaces: HashMap<u64, u32>,
    numbers: Vec<u64>,
    file: Option<(u32, File)>,
    kept: HashMap<ContentAt, Arc<[u8; PAGE]>>,
}

impl TraceImage {
    /// The image at the beginning of these segments.
    pub fn new(folder: &Path, cpu: usize, segments: &[u32], damage: Damage) -> TraceImage {
        let mut image = TraceImage {
            folder: folder.into(),
            cpu,
            side: Side::new(folder, cpu, segments),
            damage,
            reading: 0,
            contents: Vec::new(),
            pages: HashMap::new(),
            next: None,
            ended: false,
            whole: false,
            spaces: HashMap::from([(0, 0)]),
            numbers: vec![0],
            file: None,
            kept: HashMap::new(),
        };
        image.read_ahead();
        image
    }

    /// Reads up to the next change. What is reported of pages that were not known holds already.
    fn read_ahead(&mut self) {
        self.next = None;
        while !self.ended {
            match self.side.next(&self.damage) {
                Some(Next::Segment(segment)) => {
                    self.reading = segment;
                    self.contents.clear();
                }
                Some(Next::Record(record, at)) => match record {
                    Record::Content { .. } => self.contents.push(at),
                    Record::Page { space, page, content } => {
                        if let Some(at) = self.place(content) {
                            self.pages.insert((space, page), (self.reading, at));
                        }
                    }
                    Record::Change {
                        offset,
                        ip,
                        space,
                        page,
                        content,
                        ..
                    } => {
                        let Some(at) = self.place(content) else { continue };
                        let position = Position { offset, bits: 0, ip };
                        let page = Some((space, page, at));
                        self.next = Some(Ahead { position, page });
                        return;
                    }
                    Record::Mark {
                        mark: Mark::Segment,
                        offset,
                        ip,
                        ..
                    } if !self.pages.is_empty() => return self.forget_at(offset, ip),
                    Record::Mark { mark: Mark::End, .. } => self.whole = true,
                    _ => {}
                },
                Some(Next::File(_)) => {}
                // Nothing is known of what was executed behind it.
                Some(Next::Damage) => return self.forget_at(self.side.complete(), None),
                None => {
                    self.ended = true;
                    if !self.whole {
                        self.forget_at(self.side.complete(), None);
                    }
                }
            }
        }
    }

    fn forget_at(&mut self, offset: u64, ip: Option<u64>) {
        let position = Position { offset, bits: 0, ip };
        self.next = Some(Ahead { position, page: None });
    }

    fn place(&self, content: u64) -> Option<u64> {
        self.contents.get(usize::try_from(content).ok()?).copied()
    }

    fn number(&mut self, space: u64) -> u32 {
        let next = self.numbers.len() as u32;
        let number = *self.spaces.entry(space).or_insert(next);
        if number == next {
            self.numbers.push(space);
        }
        number
    }

    /// Notes that a segment of the sideband cannot be read. One that is gone, or cut off, is damage, and tells that elsewhere.
    fn unread(&self, segment: u32, error: &io::Error) {
        if !matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound) {
            let file = Kind::Side.file(self.cpu, segment);
            self.damage.fail(format!("{file}: {}", crate::error::plain(error)));
        }
    }

    /// The bytes of a content.
    fn content(&mut self, place: ContentAt) -> Option<Arc<[u8; PAGE]>> {
        if let Some(bytes) = self.kept.get(&place) {
            return Some(bytes.clone());
        }
        if self.file.as_ref().is_none_or(|(segment, _)| *segment != place.0) {
            let path = self.folder.join(Kind::Side.file(self.cpu, place.0));
            let file = regular::open_inside(&path).map_err(|error| self.unread(place.0, &error));
            self.file = Some((place.0, file.ok()?));
        }
        let mut bytes = [0; PAGE];
        let (_, file) = self.file.as_ref()?;
        let read = file.read_exact_at(&mut bytes, place.1);
        read.map_err(|error| self.unread(place.0, &error)).ok()?;
        if self.kept.len() == KEPT {
            self.kept.clear();
        }
        let bytes = Arc::new(bytes);
        self.kept.insert(place, bytes.clone());
        Some(bytes)
    }

    /// Code at an address of an address space.
    pub fn read(&mut self, cr3: u64, ip: u64, out: &mut [u8]) -> usize {
        let number = self.number(space(cr3, ip));
        self.code(number, ip, out)
    }

    /// All pages that are known now, with their space (see [`crate::directory::format`]) and contents.
    pub fn each_page(&mut self, mut f: impl FnMut(u64, u64, &[u8; PAGE])) {
        let mut pages: Vec<_> = self.pages.iter().map(|(key, place)| (*key, *place)).collect();
        pages.sort_unstable();
        for ((space, page), place) in pages {
            if let Some(bytes) = self.content(place) {
                f(space, page << 12, &bytes);
            }
        }
    }
}

impl Image for TraceImage {
    fn space(&mut self, context: &Context, upper: bool) -> u32 {
        let linear = if upper { 1 << 63 } else { 0 };
        match context.cr3 {
            Some(cr3) => self.number(space(cr3, linear)),
            None if upper => 0,
            // Whose code it is was not reported.
            None => self.number(u64::MAX),
        }
    }

    fn code(&mut self, number: u32, ip: u64, out: &mut [u8]) -> usize {
        let Some(&space) = self.numbers.get(number as usize) else {
            return 0;
        };
        let mut filled = 0;
        while filled < out.len() {
            let at = ip.wrapping_add(filled as u64);
            let Some(&place) = self.pages.get(&(space, at >> 12)) else {
                break;
            };
            let Some(bytes) = self.content(place) else { break };
            let rest = &bytes[(at & 0xfff) as usize..];
            let len = rest.len().min(out.len() - filled);
            out[filled..filled + len].copy_from_slice(&rest[..len]);
            filled += len;
        }
        filled
    }

    fn next_change(&mut self) -> Option<Position> {
        self.next.map(|ahead| ahead.position)
    }

    fn advance(&mut self, position: Position, changed: &mut dyn FnMut(Change)) {
        while let Some(ahead) = self.next.filter(|ahead| ahead.position <= position) {
            match ahead.page {
                Some((space, page, at)) => {
                    self.pages.insert((space, page), (self.reading, at));
                    let space = self.number(space);
                    changed(Change {
                        space,
                        page: page << 12,
                    });
                }
                None => {
                    for ((space, page), _) in std::mem::take(&mut self.pages) {
                        let space = self.number(space);
                        changed(Change {
                            space,
                            page: page << 12,
                        });
                    }
                }
            }
            self.read_ahead();
        }
    }
}
