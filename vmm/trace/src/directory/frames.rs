//! Reads the frames of a vCPU's segments, one after the other, and finds its way past those that are damaged.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::format::{FRAME, FrameHeader, Kind};
use crate::regular;

/// A frame that is whole, or what is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// The next segment begins.
    Segment(u32),
    /// A frame.
    Frame {
        /// The offset that it carries.
        offset: u64,
        /// Where in the file the payload begins.
        at: u64,
        /// The payload.
        payload: Vec<u8>,
    },
    /// Bytes that are no frame, or not the one that its CRC is of. Frames behind them may have been lost with them.
    Damage {
        /// The file.
        file: String,
        /// Where in the file.
        at: u64,
        /// How many bytes.
        len: u64,
    },
}

/// Frames of one kind, from a segment on.
#[derive(Debug)]
pub struct Frames {
    folder: PathBuf,
    kind: Kind,
    cpu: usize,
    segments: Vec<u32>,
    next: usize,
    file: Option<File>,
    /// Where in the file the next frame begins.
    at: u64,
    /// Bytes that were read, from `at` on.
    buffer: Vec<u8>,
    used: usize,
    plausible: Plausible,
}

const READ: usize = 1 << 16;

/// Packets that a segment which is not there may have had.
const MISSING: u64 = 1 << 31;
/// And all that are not there, for each byte that is there and one more of this: segments of a trace are about as long as one another.
const MISSING_MOST: u64 = 16;
const MISSING_LEAST: u64 = 1 << 20;

/// Which offsets a frame of packets can have: those behind it by no more than what is missing in front of it can have held. Else
/// a few bytes could make a reader believe in any number of lost packets.
#[derive(Debug, Default)]
struct Plausible {
    /// Where the last frame ended.
    end: Option<u64>,
    /// What may be missing since.
    missing: u64,
    segment: Option<u32>,
    /// So much of segments that are not there is believed yet.
    left: u64,
}

impl Plausible {
    fn segment(&mut self, segment: u32, there: bool) {
        let between = self
            .segment
            .map_or(0, |last| segment.saturating_sub(last).saturating_sub(1));
        let gone = u64::from(between) + u64::from(!there);
        let gone = gone.saturating_mul(MISSING).min(self.left);
        self.missing = self.missing.saturating_add(gone);
        self.segment = Some(segment);
    }

    fn damage(&mut self, bytes: u64) {
        self.missing = self.missing.saturating_add(bytes);
    }

    fn frame(&mut self, offset: u64, len: u64) -> bool {
        let Some(end) = offset.checked_add(len) else {
            return false;
        };
        if self.end.is_some_and(|last| offset > last.saturating_add(self.missing)) {
            return false;
        }
        let skipped = self.end.map_or(0, |last| offset.saturating_sub(last));
        self.left = self.left.saturating_sub(skipped);
        self.end = self.end.max(Some(end));
        self.missing = 0;
        true
    }
}

impl Frames {
    /// The frames of these segments.
    pub fn new(folder: &Path, kind: Kind, cpu: usize, segments: &[u32]) -> Frames {
        let size =
            |segment: &u32| fs::symlink_metadata(folder.join(kind.file(cpu, *segment))).map_or(0, |file| file.len());
        let there: u64 = segments.iter().map(size).fold(0, u64::saturating_add);
        Frames {
            folder: folder.into(),
            kind,
            cpu,
            segments: segments.into(),
            next: 0,
            file: None,
            at: 0,
            buffer: Vec::new(),
            used: 0,
            plausible: Plausible {
                left: there.saturating_mul(MISSING_MOST).saturating_add(MISSING_LEAST),
                ..Plausible::default()
            },
        }
    }

    /// The file of the present segment.
    fn name(&self) -> String {
        let segment = self.next.checked_sub(1).and_then(|index| self.segments.get(index));
        self.kind.file(self.cpu, segment.copied().unwrap_or(0))
    }

    /// So many bytes from `at` on, or as many as there are.
    fn fill(&mut self, len: usize) -> io::Result<&[u8]> {
        let have = self.buffer.len() - self.used;
        if have < len
            && let Some(file) = &mut self.file
        {
            self.buffer.drain(..self.used);
            self.used = 0;
            let wanted = (len - have).max(READ) as u64;
            file.take(wanted).read_to_end(&mut self.buffer)?;
        }
        let have = self.buffer.len() - self.used;
        Ok(&self.buffer[self.used..self.used + have.min(len)])
    }

    fn skip(&mut self, len: usize) {
        self.used += len;
        self.at += len as u64;
    }

    /// Goes to a place in the present file.
    fn seek(&mut self, at: u64) -> io::Result<()> {
        if let Some(file) = &mut self.file {
            file.seek(SeekFrom::Start(at))?;
            self.at = at;
            self.buffer.clear();
            self.used = 0;
        }
        Ok(())
    }

    /// The header at the present place.
    fn header(&mut self) -> io::Result<Option<FrameHeader>> {
        let kind = self.kind;
        let bytes = self.fill(FRAME)?;
        Ok(bytes.try_into().ok().and_then(|bytes| FrameHeader::parse(bytes, kind)))
    }

    /// Passes bytes that are no frame: how many.
    fn resynchronize(&mut self) -> io::Result<u64> {
        let from = self.at;
        loop {
            if !self.fill(1)?.is_empty() {
                self.skip(1);
            }
            if self.fill(1)?.is_empty() || self.header()?.is_some() {
                return Ok(self.at - from);
            }
        }
    }

    /// Where the packets of these segments end, by the headers of their frames alone.
    ///
    /// # Errors
    /// What the system says.
    pub fn end(mut self) -> io::Result<u64> {
        let mut end = 0;
        for segment in std::mem::take(&mut self.segments) {
            let file = match regular::open_inside(&self.folder.join(self.kind.file(self.cpu, segment))) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    self.plausible.segment(segment, false);
                    continue;
                }
                Err(error) => return Err(error),
            };
            self.plausible.segment(segment, true);
            let len = file.metadata()?.len();
            let mut at = 0;
            self.file = Some(file);
            while let Some(file) = &self.file
                && at + FRAME as u64 <= len
            {
                let mut bytes = [0; FRAME];
                file.read_exact_at(&mut bytes, at)?;
                if let Some(header) = FrameHeader::parse(&bytes, self.kind) {
                    let next = at + FRAME as u64 + u64::from(header.len);
                    if next > len || !self.plausible.frame(header.offset, header.len.into()) {
                        self.plausible.damage(next - at);
                    } else {
                        end = end.max(header.offset.saturating_add(u64::from(header.len)));
                    }
                    at = next;
                } else {
                    self.seek(at)?;
                    let damaged = self.resynchronize()?;
                    self.plausible.damage(damaged);
                    at = self.at;
                }
            }
        }
        Ok(end)
    }

    fn next_item(&mut self) -> io::Result<Option<Item>> {
        if self.fill(1)?.is_empty() {
            let Some(&segment) = self.segments.get(self.next) else {
                return Ok(None);
            };
            self.next += 1;
            self.file = match regular::open_inside(&self.folder.join(self.kind.file(self.cpu, segment))) {
                Ok(file) => Some(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
            self.plausible.segment(segment, self.file.is_some());
            self.seek(0)?;
            return Ok(Some(Item::Segment(segment)));
        }
        let begin = self.at;
        if let Some(header) = self.header()? {
            let len = header.len as usize;
            let payload = self.fill(FRAME + len)?.get(FRAME..).unwrap_or(&[]);
            if payload.len() == len && crc32fast::hash(payload) == header.crc {
                let payload = payload.to_vec();
                self.skip(FRAME + len);
                if self.kind == Kind::Packets && !self.plausible.frame(header.offset, len as u64) {
                    return Ok(Some(self.damage(begin, (FRAME + len) as u64)));
                }
                return Ok(Some(Item::Frame {
                    offset: header.offset,
                    at: begin + FRAME as u64,
                    payload,
                }));
            }
            // Only the payload is wrong where a frame follows it.
            if payload.len() == len {
                self.skip(FRAME + len);
                if self.fill(1)?.is_empty() || self.header()?.is_some() {
                    return Ok(Some(self.damage(begin, self.at - begin)));
                }
                self.seek(begin)?;
            }
        }
        let len = self.resynchronize()?;
        Ok(Some(self.damage(begin, len)))
    }

    fn damage(&mut self, at: u64, len: u64) -> Item {
        self.plausible.damage(len);
        Item::Damage {
            file: self.name(),
            at,
            len,
        }
    }
}

impl Iterator for Frames {
    type Item = io::Result<Item>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_item().transpose()
    }
}
