//! A ring of blocks.

use std::collections::VecDeque;

use super::types::{Annex, Unread};

/// A stretch of code that ran without a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Linear address of its first instruction.
    pub begin: u64,
    /// Linear address of its last one.
    pub end: u64,
}

/// The last blocks of a CPU.
#[derive(Debug)]
pub(super) struct Blocks {
    ring: VecDeque<Block>,
    room: usize,
    /// How many blocks were dropped before the first.
    dropped: u64,
    /// Where the block that is being executed began.
    begin: u64,
    /// The number of the block that was being executed when the history was read last, and the instruction that was next then.
    /// `None`: what is new since then cannot be reported.
    reported: Option<(u64, u64)>,
}

impl Blocks {
    /// Room for so many blocks.
    pub fn new(room: usize) -> Self {
        Blocks {
            ring: VecDeque::new(),
            room: room.max(1),
            dropped: 0,
            begin: 0,
            reported: None,
        }
    }

    /// Begins anew at this instruction.
    pub fn start(&mut self, ip: u64) {
        self.dropped = self.next() + 1;
        self.ring.clear();
        self.begin = ip;
        // gdb takes the instruction where it began for what it has read.
        self.reported = Some((self.next(), ip));
    }

    /// The number of the block that is being executed.
    fn next(&self) -> u64 {
        self.dropped + self.ring.len() as u64
    }

    fn push(&mut self, end: u64) {
        if self.ring.len() == self.room {
            self.ring.pop_front();
            self.dropped += 1;
        }
        let begin = self.begin;
        self.ring.push_back(Block { begin, end });
    }

    /// Where the block that is being executed began.
    pub fn begin(&self) -> u64 {
        self.begin
    }

    /// The block ends with a branch that has retired.
    pub fn branch(&mut self, from: u64, to: u64) {
        self.push(from);
        self.begin = to;
    }

    /// The block ends with this instruction, since the next one has not retired: control went elsewhere. `None`: not one has
    /// retired in it.
    pub fn interrupted(&mut self, last: Option<u64>, to: u64) {
        // Whoever has read that the instruction comes next cannot be given the opposite afterwards.
        if let Some((block, next)) = self.reported
            && block == self.next()
            && last.is_none_or(|last| last < next)
        {
            self.reported = None;
        }
        if let Some(last) = last {
            self.push(last);
        }
        self.begin = to;
    }

    /// The newest blocks first; `next` is the instruction that comes next. `None`: nothing is new.
    pub fn read(&mut self, annex: Annex, next: u64) -> Result<Option<Vec<Block>>, Unread> {
        let reported = self.reported;
        let from = match annex {
            Annex::New if reported == Some((self.next(), next)) => return Ok(None),
            Annex::All | Annex::New => 0,
            Annex::Delta => {
                let (block, _) = reported.ok_or(Unread::Gap)?;
                // What was dropped was not read.
                block.checked_sub(self.dropped).ok_or(Unread::Gap)? as usize
            }
        };
        self.reported = Some((self.next(), next));
        let mut blocks = vec![Block {
            begin: self.begin,
            end: next,
        }];
        blocks.extend(self.ring.range(from..).rev());
        if annex == Annex::Delta
            && let Some(oldest) = blocks.last_mut()
        {
            // It begins where gdb has stopped reading.
            oldest.begin = 0;
        }
        Ok(Some(blocks))
    }
}

/// What a client reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// Nothing is new.
    Nothing,
    /// Blocks, the newest first. The newest ends with the instruction that comes next; the oldest of a delta begins at 0.
    Blocks(Vec<Block>),
    /// Packets.
    Packets(Vec<u8>),
}

#[cfg(test)]
#[path = "blocks_test.rs"]
mod tests;
