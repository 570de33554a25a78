//! What the processors of a machine share: RAM, the lines that they monitor, decoded blocks with the numbers in their keys, and the
//! transaction that is open.
//!
//! Each part has a file of its own; here are the verbs that concern more than one of them. Processors take turns: who runs has all of
//! it for as long.

use crate::block::BlockCache;
use crate::frontend::Decoded;
use crate::key::{Key, KeyNumbers};
use crate::lines::MonitoredLines;
use crate::lower::Lowered;
use crate::op::{Op, Run};
use crate::ram::{Ram, RamRegion};
use crate::transaction::OpenTransaction;
use crate::translate::Translator;

pub(crate) struct SharedState {
    pub ram: Ram,
    pub lines: MonitoredLines,
    pub blocks: BlockCache,
    pub keys: KeyNumbers,
    /// The transaction that is open: of the processor that ran last.
    pub transaction: Option<OpenTransaction>,
}

impl SharedState {
    /// `stale` is the op that takes the place of the first one of a block whose bytes have changed.
    pub fn new(ram: &[RamRegion], stale: Run, translator: Option<Translator>) -> SharedState {
        SharedState {
            ram: Ram::new(ram),
            lines: MonitoredLines::default(),
            blocks: BlockCache::new(stale, translator),
            keys: KeyNumbers::new(),
            transaction: None,
        }
    }

    /// Writes RAM on behalf of a unit, all of it or nothing; code decoded from it is dropped, and an open transaction keeps what is
    /// written. Errors: the first address that is no RAM.
    pub fn write_ram(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), u64> {
        self.ram.write(gpa, bytes)?;
        self.keep_written(gpa, bytes);
        self.written(gpa, bytes.len() as u64);
        Ok(())
    }

    /// A small number, never 0, that stands for a set of boundaries. Only between chains: the blocks are dropped when the numbers are
    /// used up.
    pub fn boundary_number(&mut self, set: &[u64]) -> u32 {
        if let Some(number) = self.keys.boundaries(set) {
            return number;
        }
        self.flush();
        self.keys.boundaries(set).unwrap_or(0)
    }

    /// Keeps a block. `second` is the guest-physical address of the page that its last instruction runs into.
    pub fn insert(&mut self, key: Key, lowered: &Lowered, decoded: &Decoded, second: Option<u64>) -> *mut Op {
        let second = second.map(|gpa| (gpa, decoded.second));
        self.ram.mark_code(key.gpa);
        if let Some((gpa, _)) = second {
            self.ram.mark_code(gpa);
        }
        self.blocks
            .insert(key, lowered, &decoded.instructions, decoded.bytes, second)
    }

    /// Has stores to these bytes take the slow path, which asks for a block of their own: they are about to be executed.
    pub fn mark_bytes(&mut self, gpa: u64, bytes: u64) {
        self.blocks.mark_bytes(gpa, bytes);
        self.ram.mark_code(gpa);
    }

    /// Counts stores to a line from now on: how many there have been, in a count that never says the same for two of them.
    pub fn watch_line(&mut self, line: u64) -> u64 {
        if let Some(stores) = self.lines.known(line) {
            return stores;
        }
        self.ram.mark_watched(line);
        self.lines.add(line)
    }

    /// Somebody stores to guest memory by the slow path.
    pub fn stored(&mut self, gpa: u64, len: u64) {
        self.ram.soil(gpa, len);
        self.lines.stored(gpa, len);
    }

    /// Drops the blocks of a page.
    pub fn invalidate_page(&mut self, gpa: u64) {
        self.blocks.invalidate_page(gpa);
        self.ram.clear_code(gpa);
    }

    /// Somebody outside wrote guest memory.
    pub fn written(&mut self, gpa: u64, len: u64) {
        self.stored(gpa, len);
        let mut page = gpa & !0xfff;
        let end = gpa.saturating_add(len);
        while page < end {
            let from = page.max(gpa);
            if self.blocks.covers(from, (page + 0x1000).min(end) - from) {
                self.invalidate_page(page);
            }
            page += 0x1000;
        }
    }

    /// The blocks are as many as they may get.
    pub fn full(&self) -> bool {
        self.blocks.full() || self.keys.used_up()
    }

    /// Frees all blocks. Only between chains.
    pub fn flush(&mut self) {
        for gpa in self.blocks.pages() {
            self.ram.clear_code(gpa);
        }
        self.blocks.clear();
        self.keys.clear();
    }
}
