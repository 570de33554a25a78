//! Decoded blocks: kept, found again, linked, and dropped when their bytes change.
//!
//! A [`Block`] is what is known of a run of instructions: where it is from, which op belongs to which instruction, what each op is,
//! and who leads to it. Its ops stand in an arena, which the interpreter walks by pointer without a look at the block; a header in
//! the slot before the first op leads from there to the block.
// The engine core is one of the rooms where `unsafe` is allowed: ops are followed by raw pointer, see `op`.
#![allow(unsafe_code)]

use core::fmt;
use core::ops::Range;

use crate::cpu::Cpu;
use crate::frontend::Placed;
use crate::key::{Key, Map};
use crate::lower::{Lowered, control};
use crate::op::{Link, Next, Op, OpKind, Run};
use crate::translate::{Enter, Entry, Listing, PROLOGUE, Statistics, Translator, Why, left};

/// Ops kept before the cache is emptied: 64 MiB of them.
const MAX_OPS: usize = 2 << 20;
/// Ops in a piece of the arena.
const PIECE: usize = 16384;

/// What stands in the slot before a block's first op.
#[derive(Clone, Copy)]
#[repr(C)]
struct Header {
    /// The block's translation, or null.
    native: Entry,
    /// The first op's own handler, where [`count`] or [`run_translation`] stands in its place.
    run: Run,
    /// What enters translations.
    enter: Option<Enter>,
    /// Its index in [`BlockCache`].
    block: u32,
    /// How often it is interpreted before it is translated.
    left: u32,
}

/// From a block's first op to the address of its translation.
pub(crate) const fn native_of() -> i32 {
    core::mem::offset_of!(Header, native) as i32 - size_of::<Op>() as i32
}

/// The header before a block's first op.
fn header(first: *const Op) -> *mut Header {
    first.wrapping_sub(1).cast_mut().cast()
}

/// In the place of the first op of a block that may be translated once it has run often enough.
unsafe fn count(c: &mut Cpu, o: *const Op) -> Next {
    let header = header(o);
    // SAFETY: A header stands before each block's first op; only the processor that runs has it.
    let run = unsafe {
        (*header).left -= 1;
        match (*header).left {
            0 => translate(c, o),
            _ => (*header).run,
        }
    };
    // SAFETY: It is the op's own handler, or enters the translation.
    unsafe { run(c, o) }
}

/// Translates the block that runs: the handler that its first op has from now on.
#[cold]
#[inline(never)]
fn translate(c: &mut Cpu, o: *const Op) -> Run {
    c.shared().blocks.translate(o);
    // SAFETY: The op is there as it was, but for its handler.
    unsafe { (*o).f }
}

/// In the place of the first op of a block that is translated.
unsafe fn run_translation(c: &mut Cpu, o: *const Op) -> Next {
    // SAFETY: As in `count`; whoever puts this handler there has put the rest into the header.
    let next = unsafe {
        let header = &*header(o);
        match header.enter {
            Some(enter) => enter(c, header.native.wrapping_add(PROLOGUE)),
            None => o as usize | left::INTERPRET,
        }
    };
    let op = (next & !left::MASK) as *const Op;
    match next & left::MASK {
        left::BUDGET => {
            c.out_of_budget(op);
            #[cfg(not(chained))]
            core::ptr::null()
        }
        // SAFETY: It is the first op of its block.
        left::INTERPRET => unsafe { ((*header(op)).run)(c, op) },
        _ => {
            #[cfg(chained)]
            if !op.is_null() {
                // SAFETY: A translation leaves at an op of a live block.
                unsafe { ((*op).f)(c, op) }
            }
            #[cfg(not(chained))]
            op
        }
    }
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
    /// Bytes of host code of its translation.
    host: u32,
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

    /// Whether it has a translation.
    pub fn is_translated(&self) -> bool {
        // SAFETY: A header stands before each block's first op, as long as the block is there.
        unsafe { !(*header(self.first)).native.is_null() }
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
        if self.is_translated() {
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
    /// What makes host code of blocks, where that is wanted and possible.
    translator: Option<Translator>,
    /// Grows by one whenever the whole cache is emptied.
    pub generation: u64,
}

impl BlockCache {
    pub fn new(stale: Run, translator: Option<Translator>) -> BlockCache {
        BlockCache {
            by_key: Map::default(),
            pages: Map::default(),
            blocks: Vec::new(),
            arena: Vec::new(),
            len: 0,
            stale,
            translator,
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
            let first = header.add(1);
            let translator = self.translator.as_ref().filter(|_| Translator::takes(key.mode));
            header.cast::<Header>().write(Header {
                native: core::ptr::null(),
                run: (*first).f,
                enter: translator.map(Translator::enter),
                block: index,
                left: translator.map_or(0, |t| t.after),
            });
            if translator.is_some() {
                (*first).f = count;
            }
            first
        };
        self.len += slots;
        self.blocks.push(Block {
            key,
            bytes,
            second,
            instructions: instructions.into(),
            kinds: lowered.kinds.as_slice().into(),
            first,
            host: 0,
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
        self.chain(link);
    }

    /// The translated branch that stands for a link, if there is one, leads where the link does.
    fn chain(&mut self, link: *mut *const Op) {
        let Some(translator) = &mut self.translator else {
            return;
        };
        // SAFETY: As in `link`: what is not null is the first op of a block, with a header before it.
        let native = unsafe {
            let to = link.read();
            if to.is_null() {
                core::ptr::null()
            } else {
                (*header(to)).native
            }
        };
        translator.chain(link, (!native.is_null()).then_some(native));
    }

    /// Nobody is linked to a block any more.
    fn unlink(&mut self, block: u32) {
        for link in core::mem::take(&mut self.blocks[block as usize].incoming) {
            // SAFETY: Links stay allocated as long as their blocks, which is until the cache is emptied.
            unsafe { link.write(core::ptr::null()) };
            self.chain(link);
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
            unsafe {
                (*first).f = self.stale;
                let header = &mut *header(first);
                (header.native, header.run) = (core::ptr::null(), self.stale);
            }
        }
    }

    /// Drops one block: it will be decoded anew.
    pub fn forget(&mut self, key: Key) {
        if let Some(first) = self.by_key.remove(&key) {
            // SAFETY: It was in the cache.
            self.unlink(unsafe { Self::index(first) } as u32);
        }
    }

    /// Translates the block that begins with an op, which has run often.
    fn translate(&mut self, first: *const Op) {
        // SAFETY: The block runs now.
        let index = unsafe { Self::index(first) };
        let block = &self.blocks[index];
        // SAFETY: A header stands before it.
        let run = unsafe { (*header(first)).run };
        let translation = self.translator.as_mut().and_then(|t| t.translate(block, first, run));
        // SAFETY: As above; whoever runs it is between its ops.
        unsafe {
            let header = &mut *header(first);
            let f = &raw mut (*first.cast_mut()).f;
            match &translation {
                Some((entry, ..)) => {
                    header.native = *entry;
                    f.write(run_translation);
                }
                None => f.write(header.run),
            }
        }
        let Some((_, len, outgoing)) = translation else { return };
        let block = &mut self.blocks[index];
        block.host = len as u32;
        // Whoever was linked to the block before goes straight there from now on, and so do its own branches.
        let incoming = block.incoming.clone();
        for link in incoming.into_iter().chain(outgoing) {
            self.chain(link);
        }
    }

    /// What was translated, if anything is.
    pub fn translated(&self) -> Option<Statistics> {
        self.translator.as_ref().map(Translator::statistics)
    }

    /// The translation of the block of a key, if it has one; guest code is read by `read` from guest-physical memory.
    pub fn listing(&self, key: Key, read: impl Fn(u64, &mut [u8])) -> Option<Listing> {
        let first = self.find(key)?;
        // SAFETY: `find` gave it; a header stands before it.
        let (block, native, steps) =
            unsafe { (&self.blocks[Self::index(first)], (*header(first)).native, (*first).rem) };
        let translator = self.translator.as_ref().filter(|_| !native.is_null())?;
        let mut code = vec![0; block.bytes as usize];
        read(key.gpa, &mut code);
        if let Some((gpa, bytes)) = block.second {
            let mut rest = vec![0; bytes as usize];
            read(gpa & !0xfff, &mut rest);
            code.extend(rest);
        }
        Some(Listing {
            block: block.to_string(),
            steps: steps.into(),
            code,
            host: translator.code(native, block.host as usize),
            host_at: native as u64,
        })
    }

    /// See [`crate::Engine::translate_wrongly`].
    pub fn translate_wrongly(&mut self, gpa: u64) {
        if let Some(translator) = &mut self.translator {
            translator.wrong = Some(gpa);
        }
    }

    /// What the interpreter did for translations, as the manual names the instructions, and how often: what it did most comes first.
    pub fn not_translated(&self) -> Vec<(String, Why, u64)> {
        let all = self
            .translator
            .as_ref()
            .map(Translator::not_translated)
            .unwrap_or_default();
        let name = |mnemonic| format!("{mnemonic:?}").to_uppercase();
        let mut all: Vec<_> = all.into_iter().map(|((m, why), times)| (name(m), why, times)).collect();
        all.sort_by_key(|(_, _, times)| core::cmp::Reverse(*times));
        all
    }

    /// The cache is as large as it may get.
    pub fn full(&self) -> bool {
        self.len > MAX_OPS || self.translator.as_ref().is_some_and(Translator::full)
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
        if let Some(translator) = &mut self.translator {
            translator.clear();
        }
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
