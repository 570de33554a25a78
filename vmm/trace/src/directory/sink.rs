//! Writes a vCPU's segments.

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::format::{Encoder, FRAME, FrameHeader, Kind, MAX_PAYLOAD, PAGE, Record};
use crate::regular;

/// Packets that wait at most.
pub const PACKETS: usize = 1 << 18;
/// Sideband that waits at most, so that a record always fits behind it.
const SIDE: usize = MAX_PAYLOAD / 2;

/// Packets of a segment, where there is no ring. A segment costs the code that it needs once more.
const SEGMENT: u64 = 1 << 30;
/// Segments of a ring.
const RING: u64 = 8;
/// The shortest segment of a ring.
const RING_SEGMENT: u64 = 1 << 16;
/// The smallest ring.
pub const RING_LEAST: u64 = RING * RING_SEGMENT;

/// Hashes of contents are kept up to this many; more are written again.
const HASHES: usize = 1 << 18;

/// A content's hash: two of 64 bits with keys of their own, so that no guest can make two contents that share it.
#[derive(Clone, Debug, Default)]
pub struct Hashing([RandomState; 2]);

impl Hashing {
    /// The hash of a page.
    pub fn of(&self, page: &[u8; PAGE]) -> u128 {
        let [high, low] = self.0.each_ref().map(|state| u128::from(state.hash_one(page)));
        high << 64 | low
    }
}

/// What all vCPUs of a trace may write yet, in bytes: packets, code and everything else that is in their files.
#[derive(Clone, Debug)]
pub struct Room {
    left: Arc<AtomicU64>,
    limit: Option<u64>,
}

impl Room {
    /// Room for so many bytes, or for any number.
    pub fn new(limit: Option<u64>) -> Room {
        Room {
            left: Arc::new(AtomicU64::new(limit.unwrap_or(u64::MAX))),
            limit,
        }
    }

    fn take(&self, bytes: u64) -> io::Result<()> {
        let Some(limit) = self.limit else { return Ok(()) };
        let less = |left: u64| left.checked_sub(bytes);
        let taken = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        taken.map(drop).map_err(|_| {
            let text = format!("--trace-limit is reached: no more than {limit} bytes of packets, code and sideband");
            io::Error::new(io::ErrorKind::QuotaExceeded, text)
        })
    }

    fn give_back(&self, bytes: u64) {
        self.left.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A vCPU's files.
#[derive(Debug)]
pub struct Sink {
    folder: PathBuf,
    cpu: usize,
    ring: Option<u64>,
    room: Room,
    limit: u64,
    segment: u32,
    /// Offsets at which the segments that are there begin.
    begins: VecDeque<u64>,
    packets: File,
    side: File,
    records: Encoder,
    /// Packets that have been written.
    written: u64,
    contents: HashMap<u128, u64>,
    /// Contents of this segment.
    count: u64,
    failed: bool,
    /// What went wrong where nobody could be told.
    error: Option<io::Error>,
}

fn create(folder: &Path, kind: Kind, cpu: usize, segment: u32) -> io::Result<File> {
    let path = folder.join(kind.file(cpu, segment));
    regular::create_private(&path)
}

impl Sink {
    /// Begins the first segment. `ring`: so many bytes of packets are kept. `room`: what may be written yet.
    ///
    /// # Errors
    /// The files cannot be made.
    pub fn new(folder: &Path, cpu: usize, ring: Option<u64>, room: Room) -> io::Result<Sink> {
        Ok(Sink {
            folder: folder.into(),
            cpu,
            ring,
            room,
            limit: ring.map_or(SEGMENT, |size| (size / RING).max(RING_SEGMENT)),
            segment: 0,
            begins: VecDeque::from([0]),
            packets: create(folder, Kind::Packets, cpu, 0)?,
            side: create(folder, Kind::Side, cpu, 0)?,
            records: Encoder::default(),
            written: 0,
            contents: HashMap::new(),
            count: 0,
            failed: false,
            error: None,
        })
    }

    /// Packets that have been written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Bytes of packets until the segment has as many as it should; `waiting` are not yet written.
    pub fn left(&self, waiting: usize) -> u64 {
        let begin = self.begins.back().copied().unwrap_or(0);
        self.limit.saturating_sub(self.written + waiting as u64 - begin)
    }

    /// How many it should have.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether sideband should be written.
    pub fn is_due(&self) -> bool {
        self.records.bytes.len() >= SIDE
    }

    /// The number of a content in this segment.
    pub fn content(&mut self, hash: u128, bytes: &[u8; PAGE]) -> u64 {
        if let Some(number) = self.contents.get(&hash) {
            return *number;
        }
        if self.contents.len() == HASHES {
            self.contents.clear();
        }
        let number = self.count;
        self.make_room();
        self.records.content(bytes);
        self.count += 1;
        self.contents.insert(hash, number);
        number
    }

    /// Takes a file.
    pub fn file(&mut self, path: &str, build_id: &[u8]) {
        self.make_room();
        self.records.file(path, build_id);
    }

    /// Takes a record.
    pub fn record(&mut self, record: &Record) {
        self.make_room();
        self.records.record(record);
    }

    /// Records that are too many for a frame go ahead of the packets that they are about.
    fn make_room(&mut self) {
        // A page or a path is the longest.
        if self.records.bytes.len() < MAX_PAYLOAD - 2 * PAGE {
            return;
        }
        if !self.failed
            && let Err(error) = frame(
                &self.room,
                &mut self.side,
                Kind::Side,
                &self.records.bytes,
                self.written,
            )
        {
            self.failed = true;
            self.error = Some(error);
        }
        self.records.clear();
    }

    /// Writes what waits: the sideband, which is complete up to the end of `packets`, then those. `packets` is emptied. Once
    /// writing has failed nothing is written any more.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&mut self, packets: &mut Vec<u8>) -> io::Result<()> {
        let result = match self.error.take() {
            Some(error) => Err(error),
            None if self.failed => Ok(()),
            None => self.try_write(packets),
        };
        self.failed |= result.is_err();
        self.written += packets.len() as u64;
        packets.clear();
        self.records.clear();
        result
    }

    fn try_write(&mut self, packets: &[u8]) -> io::Result<()> {
        let end = self.written + packets.len() as u64;
        frame(&self.room, &mut self.side, Kind::Side, &self.records.bytes, end)?;
        for (number, part) in packets.chunks(MAX_PAYLOAD).enumerate() {
            let offset = self.written + (number * MAX_PAYLOAD) as u64;
            frame(&self.room, &mut self.packets, Kind::Packets, part, offset)?;
        }
        Ok(())
    }

    /// Begins the next segment; everything has been written. A ring drops those that it has no room for.
    ///
    /// # Errors
    /// As [`Sink::write`].
    pub fn next_segment(&mut self) -> io::Result<()> {
        self.contents.clear();
        self.count = 0;
        self.begins.push_back(self.written);
        if self.failed {
            return Ok(());
        }
        let result = self.try_next();
        self.failed |= result.is_err();
        result
    }

    fn try_next(&mut self) -> io::Result<()> {
        // The oldest go first, so that a full disk has room again.
        if let Some(size) = self.ring {
            while self.begins.len() > 2 && self.written + self.limit - self.begins[0] > size {
                self.begins.pop_front();
                let oldest = self.segment + 1 - self.begins.len() as u32;
                for kind in [Kind::Packets, Kind::Side] {
                    let path = self.folder.join(kind.file(self.cpu, oldest));
                    let size = fs::symlink_metadata(&path)?.len();
                    fs::remove_file(path)?;
                    self.room.give_back(size);
                }
            }
        }
        self.segment += 1;
        self.side = create(&self.folder, Kind::Side, self.cpu, self.segment)?;
        self.packets = create(&self.folder, Kind::Packets, self.cpu, self.segment)?;
        Ok(())
    }
}

/// Writes a frame, if there is room for it.
fn frame(room: &Room, file: &mut File, kind: Kind, payload: &[u8], offset: u64) -> io::Result<()> {
    if payload.is_empty() && kind == Kind::Packets {
        return Ok(());
    }
    room.take((FRAME + payload.len()) as u64)?;
    file.write_all(&FrameHeader::of(payload, offset).bytes(kind))?;
    file.write_all(payload)
}
