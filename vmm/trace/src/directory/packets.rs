//! A vCPU's packets as one stream, whose offsets go on over segments. What is missing is filled with bytes that are no packet,
//! so that every offset stays what it is and a decoder counts a gap there.

use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};

use super::frames::{Frames, Item};

/// No packet begins with it, and no PSB holds it.
const HOLE: u8 = 0xff;

/// What was found damaged, and how much is missing for that.
#[derive(Clone, Debug, Default)]
pub struct Damage(Arc<Mutex<Damaged>>);

#[derive(Debug, Default)]
struct Damaged {
    bytes: u64,
    says: Vec<String>,
    unread: Option<String>,
}

/// So many findings are kept in words.
const SAYS: usize = 100;

impl Damage {
    /// Adds a finding, once.
    pub fn add(&self, bytes: u64, says: String) {
        let mut damaged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        damaged.bytes += bytes;
        if damaged.says.len() < SAYS && !damaged.says.contains(&says) {
            damaged.says.push(says);
        }
    }

    /// Notes what the system did not let be read: no finding, since the file may be whole.
    pub fn fail(&self, says: String) {
        let mut damaged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        damaged.unread.get_or_insert(says);
    }

    /// What the system did not let be read, if anything.
    pub fn unread(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).unread.clone()
    }

    /// Bytes that are missing, and the findings in words.
    pub fn take(&self) -> (u64, Vec<String>) {
        let mut damaged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (std::mem::take(&mut damaged.bytes), std::mem::take(&mut damaged.says))
    }
}

/// The stream.
#[derive(Debug)]
pub struct Packets {
    frames: Frames,
    damage: Damage,
    /// The offset of the next byte.
    at: u64,
    /// The stream ends here.
    end: u64,
    /// A frame's payload and where in it the next byte is.
    payload: Vec<u8>,
    used: usize,
    /// Bytes of the hole before it.
    hole: u64,
}

impl Packets {
    /// The stream from `start` to `end`, which may lie behind the last byte. The first frame must begin at `start` or before.
    pub fn new(frames: Frames, start: u64, end: u64, damage: Damage) -> Packets {
        Packets {
            frames,
            damage,
            at: start,
            end,
            payload: Vec::new(),
            used: 0,
            hole: 0,
        }
    }

    /// Goes on to a frame that has bytes which have not been read. False at the end.
    fn frame(&mut self) -> io::Result<bool> {
        while self.used == self.payload.len() {
            match self.frames.next().transpose()? {
                None => return Ok(false),
                Some(Item::Segment(_)) => {}
                Some(Item::Damage { file, at, len }) => {
                    let text = format!("{file}: {len} bytes at {at:#x} are damaged");
                    self.damage.add(0, text);
                }
                Some(Item::Frame { offset, payload, .. }) => {
                    let end = offset.saturating_add(payload.len() as u64);
                    // A frame that overlaps what was read is a copy of an old one.
                    if end <= self.at {
                        continue;
                    }
                    self.used = self.at.saturating_sub(offset) as usize;
                    self.hole = offset.saturating_sub(self.at).min(self.end.saturating_sub(self.at));
                    if self.hole > 0 {
                        let text = format!("{} bytes of packets are missing at offset {:#x}", self.hole, self.at);
                        self.damage.add(self.hole, text);
                    }
                    self.payload = payload;
                }
            }
        }
        Ok(true)
    }
}

impl Read for Packets {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_sub(self.at);
        if left == 0 || out.is_empty() || !self.frame()? {
            return Ok(0);
        }
        let room = out.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let len = if self.hole > 0 {
            let len = room.min(usize::try_from(self.hole).unwrap_or(usize::MAX));
            out[..len].fill(HOLE);
            self.hole -= len as u64;
            len
        } else {
            let rest = &self.payload[self.used..];
            let len = room.min(rest.len());
            out[..len].copy_from_slice(&rest[..len]);
            self.used += len;
            len
        };
        self.at += len as u64;
        Ok(len)
    }
}
