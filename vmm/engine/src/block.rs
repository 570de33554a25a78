//! Decoded blocks: kept, found again, linked, and dropped when their bytes change.
//!
//! A [`Block`] is what is known of a run of instructions: where it is from, which op belongs to which instruction, what each op is,
//! and who leads to it. Its ops stand in an arena, which the interpreter walks by pointer without a look at the block; a header in
//! the slot before the first op leads from there to the block.
// The engine core is one of the rooms where `unsafe` is allowed: ops are followed by raw pointer, see `op`.
#![allow(unsafe_code)]

use core::fmt;
use core::ops::Range;

use crate::frontend::Placed;
use crate::key::{Key, Map};
use crate::lower::{Lowered, control};
use crate::op::{Link, Op, OpKind, Run};

/// Ops kept before the cache is emptied: 64 MiB of them.
const MAX_OPS: usize = 2 << 20;
/// Ops in a piece of the arena.
const PIECE: usize = 16384;

/// Where a translation of a block is entered.
pub(crate) type NativeEntry = unsafe extern "sysv64" fn(*mut crate::cpu::Cpu);

/// What stands in the slot before a block's first op.
#[derive(Clone, Copy)]
#[repr(C)]
struct Header {
    /// The block's translation, if it has one.
    native: Option<NativeEntry>,
    /// Its index in [`BlockCache`].
    block: u32,
    unused: [u32; 5],
}

const _: () = assert!(size_of::<Header>() == size_of::<Op>() && align_of::<Header>() <= align_of::<Op>());

/// A decoded block.
pub(crate) struct Block {
    pub key: Key,
    /// Bytes of the first page that it was decoded from.
    pub bytes: u64,
    /// The page that its last instruction runs into, and how far.
    pub second: Option<(u64, u64)>,
    /// Where its instructions are.
    pub instructions: Box<[Placed]>,
    /// What its ops are; of a slot that is no op, nothing.
    pub kinds: Box<[Option<&'static OpKind>]>,
    first: *mut Op,
    /// Links of other blocks that lead here.
    incoming: Vec<*mut *const Op>,
}

impl Block {
    /// Its ops, and the slots among them that are none (see `kinds`).
    pub fn ops(&self) -> &[Op] {
        // SAFETY: `BlockCache::insert` put as many ops there as there are kinds. They stay until the cache is emptied, blocks and all,
        // which takes the cache exclusively. Nobody writes ops while somebody reads a block: chains and invalidations need the
        // cache's owner exclusively, too.
        unsafe { core::slice::from_raw_parts(self.first, self.kinds.len()) }
    }

    /// The ops of an instruction. None: it was joined to the one before.
    pub fn ops_of(&self, instruction: usize) -> Range<usize> {
        let end = match self.instructions.get(instruction + 1) {
            Some(next) => next.first_op.into(),
            None => self.end_of_instructions(),
        };
        self.instructions[instruction].first_op as usize..end
    }

    /// The index of the op that leads to the next block and is no instruction, or of the first slot that is no op.
    fn end_of_instructions(&self) -> usize {
        let slots = self.kinds.iter().position(Option::is_none).unwrap_or(self.kinds.len());
        let last = self.kinds[..slots].last().copied().flatten();
        slots - last.is_some_and(control::leads_on) as usize
    }

    /// Where its translation is entered, if it has one.
    pub fn native(&self) -> Option<NativeEntry> {
        // SAFETY: A header stands before each block's first op, as long as the block is there.
        unsafe { (*self.first.sub(1).cast::<Header>()).native }
    }

    #[allow(dead_code)] // As `native`.
    pub fn set_native(&mut self, native: Option<NativeEntry>) {
        // SAFETY: As in `native`; exclusive, since the block is.
        unsafe { (*self.first.sub(1).cast::<Header>()).native = native };
    }
}

/// Where it is from, and each instruction's offset in its page with what its ops are: for the reports of defects.
impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Key { gpa, mode } = self.key;
        write!(f, "{} bytes at guest-physical {gpa:#x}", self.bytes)?;
        if let Some((gpa, bytes)) = self.second {
            write!(f, " and {bytes} at {gpa:#x}")?;
        }
        write!(f, ", mode {mode:#x}")?;
        if self.native().is_some() {
            f.write_str(", translated")?;
        }
        for (i, placed) in self.instructions.iter().enumerate() {
            write!(f, "; {:03x}:", placed.offset)?;
            let ops = self.ops_of(i);
            for (op, kind) in self.ops()[ops.clone()].iter().zip(&self.kinds[ops]) {
                write!(f, " {}({:#x})", kind.map_or("?", OpKind::name), op.imm)?;
            }
        }
        Ok(())
    }
}

/// Decoded code of one guest page.
#[derive(Default)]
struct CodePage {
    /// One bit for each 64 bytes that blocks were decoded from.
    chunks: u64,
    blocks: Vec<u32>,
}

/// The 64-byte chunks of its page that a span touches.
fn chunks(gpa: u64, len: u64) -> core::ops::RangeInclusive<u64> {
    let from = gpa & 0xfff;
    from >> 6..=(from + len.max(1) - 1).min(0xfff) >> 6
}

/// The blocks of a machine, which its processors share.
pub(crate) struct BlockCache {
    by_key: Map<Key, *mut Op>,
    pages: Map<u64, CodePage>,
    blocks: Vec<Block>,
    /// Where headers and ops live; each piece keeps its address.
    arena: Vec<Vec<Op>>,
    /// Ops in the arena.
    len: usize,
    /// What stands in the first op of a block whose bytes have changed: it leaves for the run loop.
    stale: Run,
    /// Grows by one whenever the whole cache is emptied.
    pub generation: u64,
}

impl BlockCache {
    pub fn new(stale: Run) -> BlockCache {
        BlockCache {
            by_key: Map::default(),
            pages: Map::default(),
            blocks: Vec::new(),
            arena: Vec::new(),
            len: 0,
            stale,
            generation: 0,
        }
    }

    /// The first op of the block of a key.
    #[inline]
    pub fn find(&self, key: Key) -> Option<*mut Op> {
        self.by_key.get(&key).copied()
    }

    /// The block that was decoded last.
    pub fn newest(&self) -> Option<&Block> {
        self.blocks.last()
    }

    /// The index of the block that begins with an op.
    ///
    /// # Safety
    /// `first` was given by `find` or `insert`, and the cache has not been emptied since.
    unsafe fn index(first: *const Op) -> usize {
        // SAFETY: `insert` put a header before the op.
        unsafe { (*first.sub(1).cast::<Header>()).block as usize }
    }

    /// Keeps a block. `bytes` is the length of its code within the first page; `second` the guest-physical address of the page
    /// that its last instruction runs into, and how far.
    pub fn insert(
        &mut self,
        key: Key,
        lowered: &Lowered,
        instructions: &[Placed],
        bytes: u64,
        second: Option<(u64, u64)>,
    ) -> *mut Op {
        let index = self.blocks.len() as u32;
        let slots = lowered.ops.len() + 1;
        if self.arena.last().is_none_or(|a| a.capacity() - a.len() < slots) {
            self.arena.push(Vec::with_capacity(slots.max(PIECE)));
        }
        let piece = self.arena.last_mut().expect("just pushed");
        let at = piece.len();
        // The header's slot is written as an op first, so that what the piece holds are ops.
        piece.push(lowered.ops[0]);
        piece.extend_from_slice(&lowered.ops);
        // SAFETY: `at` is within the piece, whose capacity was enough, so it never moves. A header is as large as an op.
        let first = unsafe {
            let header = piece.as_mut_ptr().add(at);
            header.cast::<Header>().write(Header {
                native: None,
                block: index,
                unused: [0; 5],
            });
            header.add(1)
        };
        self.len += slots;
        self.blocks.push(Block {
            key,
            bytes,
            second,
            instructions: instructions.into(),
            kinds: lowered.kinds.as_slice().into(),
            first,
            incoming: Vec::new(),
        });
        self.by_key.insert(key, first);
        self.cover(key.gpa, bytes).blocks.push(index);
        if let Some((gpa, bytes)) = second {
            self.cover(gpa & !0xfff, bytes).blocks.push(index);
        }
        first
    }

    /// Counts bytes as decoded.
    fn cover(&mut self, gpa: u64, bytes: u64) -> &mut CodePage {
        let page = self.pages.entry(gpa & !0xfff).or_default();
        for chunk in chunks(gpa, bytes) {
            page.chunks |= 1 << chunk;
        }
        page
    }

    /// Counts bytes as decoded that no block here was decoded from.
    pub fn mark_bytes(&mut self, gpa: u64, bytes: u64) {
        self.cover(gpa, bytes);
    }

    /// Whether a span touches bytes that blocks were decoded from.
    pub fn covers(&self, gpa: u64, len: u64) -> bool {
        let Some(page) = self.pages.get(&(gpa & !0xfff)) else {
            return false;
        };
        chunks(gpa, len).any(|chunk| page.chunks >> chunk & 1 != 0)
    }

    /// Makes one entry of a block's link slot. The cache has not been emptied since the link was asked for.
    pub fn link(&mut self, link: *mut *const Op, to: *const Op, host: u64) {
        // SAFETY: `link` points at `taken` or `next` of a `Link` in the arena; the host page is two words further. What it holds if not
        // null is the first op of a block, and so is `to`.
        unsafe {
            let old = link.read();
            link.write(to);
            link.byte_add(LINK_HOST).cast::<u64>().write(host);
            if old == to {
                return;
            }
            if !old.is_null() {
                let incoming = &mut self.blocks[Self::index(old)].incoming;
                if let Some(at) = incoming.iter().rposition(|&known| known == link) {
                    incoming.swap_remove(at);
                }
            }
            self.blocks[Self::index(to)].incoming.push(link);
        }
    }

    /// Nobody is linked to a block any more.
    fn unlink(&mut self, block: u32) {
        for link in core::mem::take(&mut self.blocks[block as usize].incoming) {
            // SAFETY: Links stay allocated as long as their blocks, which is until the cache is emptied.
            unsafe { link.write(core::ptr::null()) };
        }
    }

    /// Drops the blocks of a page: whoever still leads to one of them finds its first op replaced.
    pub fn invalidate_page(&mut self, gpa: u64) {
        let Some(page) = self.pages.remove(&(gpa & !0xfff)) else {
            return;
        };
        for block in page.blocks {
            self.unlink(block);
            let Block { key, first, .. } = self.blocks[block as usize];
            if self.by_key.get(&key) == Some(&first) {
                self.by_key.remove(&key);
            }
            // SAFETY: Blocks stay allocated until `clear`, which empties the pages' lists too.
            unsafe { (*first).f = self.stale };
        }
    }

    /// Drops one block: it will be decoded anew.
    pub fn forget(&mut self, key: Key) {
        if let Some(first) = self.by_key.remove(&key) {
            // SAFETY: It was in the cache.
            self.unlink(unsafe { Self::index(first) } as u32);
        }
    }

    /// The cache is as large as it may get.
    pub fn full(&self) -> bool {
        self.len > MAX_OPS
    }

    /// Pages that hold code.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        self.pages.keys().copied()
    }

    /// Frees all blocks. Only between chains.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.by_key.clear();
        self.blocks.clear();
        self.arena.clear();
        self.len = 0;
        self.generation += 1;
    }
}

/// From an entry of a link to its host page.
const LINK_HOST: usize = core::mem::offset_of!(Link, taken_host) - core::mem::offset_of!(Link, taken);
const _: () = assert!(LINK_HOST == core::mem::offset_of!(Link, next_host) - core::mem::offset_of!(Link, next));

#[cfg(test)]
#[path = "block_test.rs"]
mod tests;
