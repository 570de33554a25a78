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
    /// `None`: what is new since then cannot be told.
    told: Option<(u64, u64)>,
}

impl Blocks {
    /// Room for so many blocks.
    pub fn new(room: usize) -> Self {
        Blocks {
            ring: VecDeque::new(),
            room: room.max(1),
            dropped: 0,
            begin: 0,
            told: None,
        }
    }

    /// Begins anew at this instruction.
    pub fn start(&mut self, ip: u64) {
        self.dropped = self.next() + 1;
        self.ring.clear();
        self.begin = ip;
        // gdb takes the instruction where it began for what it has read.
        self.told = Some((self.next(), ip));
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
        // Whoever has read that the instruction comes next cannot be told that it did not.
        if let Some((block, next)) = self.told
            && block == self.next()
            && last.is_none_or(|last| last < next)
        {
            self.told = None;
        }
        if let Some(last) = last {
            self.push(last);
        }
        self.begin = to;
    }

    /// The newest blocks first; `next` is the instruction that comes next. `None`: nothing is new.
    pub fn read(&mut self, annex: Annex, next: u64) -> Result<Option<Vec<Block>>, Unread> {
        let told = self.told;
        let from = match annex {
            Annex::New if told == Some((self.next(), next)) => return Ok(None),
            Annex::All | Annex::New => 0,
            Annex::Delta => {
                let (block, _) = told.ok_or(Unread::Gap)?;
                // What was dropped was not read.
                block.checked_sub(self.dropped).ok_or(Unread::Gap)? as usize
            }
        };
        self.told = Some((self.next(), next));
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
mod tests {
    use super::*;

    fn read(blocks: &mut Blocks, annex: Annex, next: u64) -> Result<Option<Vec<(u64, u64)>>, Unread> {
        let pairs = |blocks: Vec<Block>| blocks.iter().map(|block| (block.begin, block.end)).collect();
        Ok(blocks.read(annex, next)?.map(pairs))
    }

    // covers: btrace/delta
    #[test]
    fn a_delta_goes_on_where_the_last_read_ended() {
        use Annex::*;
        let mut blocks = Blocks::new(4);
        blocks.start(0x10);
        assert_eq!(
            read(&mut blocks, All, 0x10),
            Ok(Some(vec![(0x10, 0x10)])),
            "never empty"
        );
        assert_eq!(read(&mut blocks, New, 0x10), Ok(None));
        assert_eq!(read(&mut blocks, Delta, 0x10), Ok(Some(vec![(0, 0x10)])), "no progress");
        // In the same block, and then by two branches.
        assert_eq!(read(&mut blocks, Delta, 0x14), Ok(Some(vec![(0, 0x14)])));
        blocks.branch(0x18, 0x40);
        blocks.branch(0x44, 0x10);
        assert_eq!(
            read(&mut blocks, Delta, 0x14),
            Ok(Some(vec![(0x10, 0x14), (0x40, 0x44), (0, 0x18)]))
        );
        assert_eq!(
            read(&mut blocks, All, 0x14),
            Ok(Some(vec![(0x10, 0x14), (0x40, 0x44), (0x10, 0x18)]))
        );
        // More than there is room for.
        for _ in 0..5 {
            blocks.branch(0x18, 0x10);
        }
        assert_eq!(read(&mut blocks, Delta, 0x10), Err(Unread::Gap));
        let all = read(&mut blocks, New, 0x10).unwrap().unwrap();
        assert_eq!(
            all,
            [(0x10, 0x10), (0x10, 0x18), (0x10, 0x18), (0x10, 0x18), (0x10, 0x18)]
        );
        assert_eq!(read(&mut blocks, Delta, 0x10), Ok(Some(vec![(0, 0x10)])));
    }

    // covers: btrace/events
    #[test]
    fn what_was_interrupted_has_not_run() {
        use Annex::*;
        let mut blocks = Blocks::new(8);
        blocks.start(0x10);
        // A fault at 0x18; its handler's first instruction faults, too.
        blocks.interrupted(Some(0x14), 0x100);
        blocks.interrupted(None, 0x200);
        assert_eq!(
            read(&mut blocks, Delta, 0x204),
            Ok(Some(vec![(0x200, 0x204), (0, 0x14)]))
        );
        // The instruction that was said to come next faults: gdb has it, and it did not run.
        blocks.interrupted(Some(0x200), 0x100);
        assert_eq!(read(&mut blocks, Delta, 0x100), Err(Unread::Gap));
        assert_eq!(
            read(&mut blocks, New, 0x100),
            Ok(Some(vec![(0x100, 0x100), (0x200, 0x200), (0x10, 0x14)]))
        );
        // The same with nothing before it in its block.
        blocks.interrupted(None, 0x300);
        assert_eq!(read(&mut blocks, Delta, 0x300), Err(Unread::Gap));
        // One that ran, and another one behind it that did not.
        read(&mut blocks, All, 0x300).unwrap();
        blocks.interrupted(Some(0x304), 0x100);
        assert_eq!(
            read(&mut blocks, Delta, 0x100),
            Ok(Some(vec![(0x100, 0x100), (0, 0x304)]))
        );
        // In another time nothing goes on.
        blocks.start(0x500);
        assert_eq!(read(&mut blocks, All, 0x504), Ok(Some(vec![(0x500, 0x504)])));
    }
}
