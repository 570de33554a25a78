//! Blocks as host code.
//!
//! A block that has run often is translated: its ops, one after another, become host code that keeps ten of the guest's registers
//! in registers of the host's and its arithmetic flags in RAX, in the form of [`crate::flags`]. The interpreter stays complete and
//! goes on wherever the translation ends.
//!
//! *Leaving.* A translation leaves at an op: with everything of the guest's where the interpreter has it, as it was before that op,
//! which then runs there. So whatever is rare (a TLB miss, a device, a store to code, a fault, a branch whose target is not known)
//! is the interpreter's, and exact without a word about it here. An op of a form that is not known ([`Form::Other`]) is called:
//! a copy of it is run by its own handler, and behind the copy stands an op that returns.
//!
//! *Going on.* A translation begins with taking the block's steps off the budget, as the interpreter does, and ends with a branch to
//! the next block. While that has a translation, and the link to it holds, the branch is a host branch to the beginning of the
//! translation, with the registers as they are; else it leads to code that looks at the link ([`Translator::chain`]).
//!
//! *What is assumed.* A translation belongs to its block: it goes when the block goes, and holds addresses of its ops and links. It
//! holds none of a processor, which it finds by RBP, so that all processors of a machine share it.
// The engine core is one of the rooms where `unsafe` is allowed: code that was made here is entered, and reaches the processor by
// the offsets that `state` asserts.
#![allow(unsafe_code)]

mod asm;
mod emit;
pub(crate) mod form;
mod listing;

pub(crate) use form::Form;
pub use listing::Listing;

use crate::block::Block;
use crate::code_memory::CodeMemory;
use crate::cpu::{Cpu, mode};
use crate::key::Map;
use crate::op::{Next, Op, Run};
use asm::{Asm, Rm, host, reg};
use core::sync::atomic::{AtomicU64, Ordering};
use iced_x86::{Code, Instruction, Mnemonic};
use std::collections::BTreeMap;

/// Where a translation begins, with the guest's registers in the host's: it takes its steps off the budget first.
pub(crate) type Entry = *const u8;

/// Bytes of a translation that take the steps off the budget: whoever has done that enters behind them.
pub(crate) const PROLOGUE: usize = 17;

/// Enters a translation from the interpreter. The answer is the op to go on with and what is to be done with it, see [`left`].
pub(crate) type Enter = unsafe extern "sysv64" fn(*mut Cpu, Entry) -> usize;

/// What a translation says in the low bits of the op that it leaves with.
pub(crate) mod left {
    /// The op runs as the dispatch has it; null: the chain has ended.
    pub const RUN: usize = 0;
    /// The op runs by the interpreter's handler, whether its block is translated or not.
    pub const INTERPRET: usize = 1;
    /// The budget does not cover the block that begins with the op, whose steps have been taken off it.
    pub const BUDGET: usize = 2;
    pub const MASK: usize = 3;
}

/// The guest's registers that are in registers of the host's: number of each.
const MAPPED: [(u8, u8); 10] = [
    (0, host::RBX),
    (1, host::RDI),
    (2, 8),
    (3, 9),
    (4, 10),
    (5, 11),
    (6, 12),
    (7, 13),
    (8, 14),
    (12, 15),
];

/// Code that all translations share.
#[derive(Clone, Copy)]
struct Stubs {
    enter: Enter,
    /// Registers go back to the processor, RDX is the answer.
    leave: u64,
    /// The same where they are there already.
    leave_stored: u64,
    /// The chain has ended: the answer is null.
    end: u64,
    end_stored: u64,
    /// RDX is a block that the budget does not cover.
    budget: u64,
    /// RDX is a link to a block in the page that slot PAGE names, and RCX the offset from that page to it: the chain goes on there.
    follow: u64,
    /// RDX is a block without a translation: it is interpreted.
    interpret: u64,
    /// To be called: the conditional branches that wait become a record. ZF: it was the last that there is room for.
    end_run: u64,
}

/// A branch to another block, whose distance is replaced as links come and go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    /// The link that it stands for: in the slot behind the block's flow op.
    pub link: *mut *const Op,
    /// Where its distance is, and where the code is that looks at the link: in the translation, later in the memory of all.
    at: usize,
    slow: usize,
}

/// What makes translations, and keeps them.
pub(crate) struct Translator {
    memory: CodeMemory,
    stubs: Stubs,
    /// What translations do not do themselves.
    rows: Vec<Row>,
    /// How often the interpreter did what, of rows that are gone.
    past: BTreeMap<(Mnemonic, Why), u64>,
    /// The branches between blocks, by the links that they stand for.
    sites: Map<usize, Site>,
    /// What returns to a translation.
    returns: Run,
    full: bool,
    /// How often a block runs before it is translated.
    pub after: u32,
    statistics: Statistics,
    /// A test's: the block at this guest-physical address gets a wrong translation.
    pub wrong: Option<u64>,
}

/// Instructions of a block that the interpreter does for the translation.
struct Row {
    /// Copies of their ops, and the op that returns; none where the translation ends and the interpreter goes on.
    _ops: Box<[Op]>,
    /// How often it did. The op that returns has the address.
    times: Box<AtomicU64>,
    instructions: Vec<(Mnemonic, Why)>,
}

/// Why an instruction is not translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// There is no translation of it.
    Instruction,
    /// There is none with such operands.
    Operands,
    /// It ends the block, and the interpreter goes on there.
    Leaves,
}

/// What has been translated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Blocks.
    pub blocks: u64,
    /// Bytes of host code.
    pub bytes: u64,
    /// Ops that became host code.
    pub ops: u64,
    /// Ops that are called.
    pub called: u64,
    /// Blocks that are left to the interpreter, since most of their ops would be called.
    pub left: u64,
    /// Bytes of host code that are there now, those of dropped blocks and of what all translations share included.
    pub held: u64,
    /// How often all of it was forgotten, to make room.
    pub forgotten: u64,
}

impl Translator {
    /// `bytes` of host code at most. `None`: this host gives no executable memory.
    pub fn new(after: u32, bytes: usize) -> Option<Translator> {
        let mut memory = CodeMemory::map(c"engine-translations", bytes)?;
        let stubs = put_stubs(&mut memory)?;
        Some(Translator {
            memory,
            stubs,
            rows: Vec::new(),
            past: BTreeMap::new(),
            sites: Map::default(),
            returns: return_to_translation,
            full: false,
            after: after.max(1),
            statistics: Statistics::default(),
            wrong: None,
        })
    }

    pub fn enter(&self) -> Enter {
        self.stubs.enter
    }

    /// There is no room for more.
    pub fn full(&self) -> bool {
        self.full
    }

    pub fn statistics(&self) -> Statistics {
        Statistics {
            held: self.memory.used() as u64,
            ..self.statistics
        }
    }

    /// So many bytes of host code, from where a translation begins on.
    pub fn code(&self, entry: Entry, len: usize) -> Vec<u8> {
        self.memory.read(self.memory.offset_of(entry), len)
    }

    /// How often the interpreter did what for translations.
    pub fn not_translated(&self) -> BTreeMap<(Mnemonic, Why), u64> {
        let mut all = self.past.clone();
        for row in &self.rows {
            let times = row.times.load(Ordering::Relaxed);
            for what in row.instructions.iter().filter(|_| times > 0) {
                *all.entry(*what).or_default() += times;
            }
        }
        all
    }

    /// Forgets all translations. Only between chains.
    pub fn clear(&mut self) {
        self.past = self.not_translated();
        self.rows.clear();
        self.sites.clear();
        self.full = false;
        self.statistics.forgotten += 1;
        self.memory.clear();
        if let Some(stubs) = put_stubs(&mut self.memory) {
            self.stubs = stubs;
        }
    }

    /// Blocks of this mode are translated: 64-bit code, and 32-bit code with flat segments, outside transactions.
    pub fn takes(mode: u32) -> bool {
        let flat = mode::SIZE32 | mode::STACK32 | mode::FLAT;
        let known = mode & mode::SIZE == mode::SIZE64 || mode & (mode::SIZE | flat | mode::CODE) == flat;
        known && mode & mode::TRANSACTION == 0 && i32::try_from(mode).is_ok()
    }

    /// The branch that stands for a link leads to a translation from now on, or, without one, to the code that looks at the link.
    pub fn chain(&mut self, link: *mut *const Op, to: Option<Entry>) {
        if let Some(site) = self.sites.get(&(link as usize)) {
            let to = to.map_or(site.slow, |entry| self.memory.offset_of(entry));
            self.memory.patch(site.at, (to as i64 - (site.at as i64 + 4)) as i32);
        }
    }

    /// Translates a block, whose first op has a handler of its own that is not in it now: its translation, the bytes that it takes,
    /// and the links that branches of it stand for, which all lead to the code that looks at the link yet. `None`: it is left to the
    /// interpreter.
    pub fn translate(
        &mut self,
        block: &Block,
        first: *const Op,
        run: Run,
    ) -> Option<(Entry, usize, Vec<*mut *const Op>)> {
        let mut emitted = emit::Emit::new(block, first, &self.stubs, self.memory.next(), [run, self.returns]);
        emitted.wrong = self.wrong == Some(block.key.gpa);
        let (code, native, calls) = emitted.block()?;
        if native <= calls {
            self.statistics.left += 1;
            return None;
        }
        let Some(entry) = self.memory.put(&code) else {
            self.full = true;
            return None;
        };
        self.rows.append(&mut emitted.rows);
        let base = self.memory.offset_of(entry);
        let sites = core::mem::take(&mut emitted.sites);
        for site in &sites {
            let (at, slow) = (base + site.at, base + site.slow);
            self.sites.insert(site.link as usize, Site { at, slow, ..*site });
        }
        self.statistics.blocks += 1;
        self.statistics.bytes += code.len() as u64;
        self.statistics.ops += native as u64;
        self.statistics.called += calls as u64;
        Some((entry, code.len(), sites.iter().map(|site| site.link).collect()))
    }
}

/// The handler of the op behind those that a translation calls.
#[cfg(chained)]
unsafe fn return_to_translation(c: &mut Cpu, o: *const Op) -> Next {
    // SAFETY: `o` is the last op of a row.
    unsafe { came_through(c, o) };
}

#[cfg(not(chained))]
unsafe fn return_to_translation(c: &mut Cpu, o: *const Op) -> Next {
    // SAFETY: `o` is the last op of a row.
    unsafe { came_through(c, o) };
    core::ptr::null()
}

/// # Safety
/// `o` is the last op of a [`Row`], which is there as long as the translation that calls it.
#[inline(always)]
unsafe fn came_through(c: &mut Cpu, o: *const Op) {
    c.came_through = true;
    // SAFETY: By the contract; the row has the counter, too.
    let times = unsafe { &*((*o).imm as *const AtomicU64) };
    // Two processors at once may lose one: it is a statistic, and a locked instruction would cost more than all the rest.
    times.store(times.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// Runs ops that a translation calls: whether it goes on. If not, the chain has ended as the handlers say.
unsafe extern "sysv64" fn call(c: *mut Cpu, first: *const Op) -> bool {
    // SAFETY: The translation runs in a chain that has the processor exclusively and does not touch it meanwhile.
    let c = unsafe { &mut *c };
    c.came_through = false;
    // SAFETY: `first` begins a row of ops that stays allocated as long as the translation, and ends with one that returns.
    unsafe { crate::op::enter_chain(c, first) };
    c.came_through
}

/// The offset of a guest register, or of a slot, in the processor.
const fn slot_at(slot: u8) -> i32 {
    slot as i32
}

fn put_stubs(memory: &mut CodeMemory) -> Option<Stubs> {
    let mut a = Asm::new(memory.next());
    let saved = [host::RBX, host::RBP, 12, 13, 14, 15];
    let push = |n: u8| Instruction::with1(Code::Push_r64, reg(n, 8));
    let pop = |n: u8| Instruction::with1(Code::Pop_r64, reg(n, 8));
    // Six registers and the return address: eight more bytes keep the stack aligned for what translations call.
    let enter = a.here();
    for n in saved {
        a.emit(push(n));
    }
    a.rm_i(Code::Sub_rm64_imm8, Rm::Reg(host::RSP), 8, 8);
    a.rm_r(Code::Mov_rm64_r64, Rm::Reg(host::RBP), host::RDI, 8);
    emit::load_registers(&mut a);
    a.rm(Code::Jmp_rm64, Rm::Reg(host::RSI), 8);
    let budget = a.here();
    a.rm_i(Code::Or_rm64_imm8, Rm::Reg(host::RDX), 8, left::BUDGET as i32);
    let leave = a.here();
    emit::store_registers(&mut a, u16::MAX);
    let leave_stored = a.here();
    a.rm_r(Code::Mov_rm64_r64, Rm::Reg(host::RAX), host::RDX, 8);
    a.rm_i(Code::Add_rm64_imm8, Rm::Reg(host::RSP), 8, 8);
    for n in saved.into_iter().rev() {
        a.emit(pop(n));
    }
    a.op0(Code::Retnq);
    let end = a.here();
    a.rm_r(Code::Xor_rm32_r32, Rm::Reg(host::RDX), host::RDX, 4);
    a.branch_to(Code::Jmp_rel32_64, leave);
    let end_stored = a.here();
    a.rm_r(Code::Xor_rm32_r32, Rm::Reg(host::RDX), host::RDX, 4);
    a.branch_to(Code::Jmp_rel32_64, leave_stored);
    let unlinked = a.label();
    let follow = a.here();
    a.r_rm(Code::Mov_r64_rm64, host::RSI, 8, Rm::Mem(asm::at(host::RDX, 0)), 8);
    a.rm_r(Code::Test_rm64_r64, Rm::Reg(host::RSI), host::RSI, 8);
    a.branch(Code::Je_rel32_64, unlinked);
    a.rm_r(Code::Mov_rm64_r64, Rm::Reg(host::RDX), host::RSI, 8);
    emit::enter(&mut a, None);
    let interpret = a.here();
    emit::interpret(&mut a, budget, leave);
    // As `Cpu::unlinked`.
    a.bind(unlinked);
    emit::resolve(&mut a, end);
    let end_run = a.here();
    emit::end_run(&mut a);
    let code = a.finish()?;
    let start = memory.put(&code)?;
    debug_assert_eq!(start as u64, enter);
    Some(Stubs {
        // SAFETY: Complete code of this signature stands there, as long as `memory` is.
        enter: unsafe { core::mem::transmute::<*const u8, Enter>(start) },
        leave,
        leave_stored,
        end,
        end_stored,
        budget,
        follow,
        interpret,
        end_run,
    })
}
