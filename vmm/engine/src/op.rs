//! Decoded operations and how one leads to the next.
//!
//! An instruction becomes one or more [`Op`]s, each 32 bytes: a handler and its operands, registers given as byte offsets
//! into the register file. Handlers are written as safe [`Body`] or [`Flow`] types; [`chain`] and [`chain_flow`] wrap them in
//! the dispatch, which has two expansions: handlers that call the next one as their last act (a sibling call, so the stack
//! does not grow), and a plain loop that asks each handler for the next op.
//!
//! What an op *is* stands beside it and not in it: a handler comes with an [`OpKind`], which names the body that it was made
//! from. Blocks keep the kinds of their ops for whoever reads ops instead of running them; the interpreter never looks.
// The engine core is one of the rooms where `unsafe` is allowed: ops are followed by raw pointer, because a bounds check per
// op would cost more than the op.
#![allow(unsafe_code)]

use core::any::TypeId;

use crate::cpu::Cpu;
use crate::translate::Form;

/// The handler was not able to go on; [`Cpu`]'s `stop` says why.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop;

/// What a body comes to.
pub(crate) type Done<T = ()> = Result<T, Stop>;

/// Why the chain of handlers ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Reason {
    /// `rip` is where to go on, and no decoded block was at hand.
    Resolve,
    /// The block at `rip` is longer than the budget that is left.
    Budget,
    /// The instruction raised the exception in `Cpu::event`; `rip` is the instruction.
    Fault,
    /// The instruction must run in a block of its own (a device access, a store to code); `rip` is the instruction.
    Replay,
    /// Branch records must be handed over before the instruction runs; `rip` is the instruction.
    Drain,
    /// The units want [`Watch::before`](x86::watch::Watch::before) called before the instruction; `rip` is the instruction.
    Observe,
    /// The instruction aborts the transaction that is open; `rip` is the instruction.
    Abort,
    /// The instruction causes the VM exit in `Cpu::exit`; `rip` is the instruction.
    VmExit,
    /// The instruction retired, and something changed that the run loop must look at: mode, interrupt window, HLT.
    Look,
}

/// Whether this build's handlers lead to each other by sibling calls, or a loop asks each for the next.
pub const CHAINED: bool = cfg!(chained);

#[cfg(chained)]
pub(crate) type Next = ();
#[cfg(not(chained))]
pub(crate) type Next = *const Op;

/// Runs one op and what follows it.
pub(crate) type Run = unsafe fn(&mut Cpu, *const Op) -> Next;

/// What an op is: its [`Body`] or [`Flow`] with all parameters.
pub(crate) struct OpKind {
    id: fn() -> TypeId,
    name: fn() -> &'static str,
    /// What the translator makes of it.
    pub form: Form,
}

impl OpKind {
    /// Whether it is the op that a body or flow defines.
    pub fn is<T: 'static>(&self) -> bool {
        (self.id)() == TypeId::of::<T>()
    }

    /// The body's path and parameters.
    pub fn name(&self) -> &'static str {
        (self.name)()
    }
}

impl core::fmt::Debug for OpKind {
    fn fmt(&self, f: &mut core::fmt::Formatter) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// How an op is carried out, and what it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handler {
    pub run: Run,
    pub kind: &'static OpKind,
}

/// One decoded operation.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Op {
    pub f: Run,
    /// Destination, as a byte offset into the register file.
    pub dst: u8,
    /// Source, likewise.
    pub src: u8,
    /// Base register of a memory operand, likewise.
    pub base: u8,
    /// Index register of a memory operand, likewise.
    pub idx: u8,
    /// log2 of the index's scale.
    pub scale: u8,
    /// Segment register number of a memory operand: it decides between #SS and #GP.
    pub seg: u8,
    /// Instructions of the block from this one to its end, this one included: what the budget gets back when the block ends
    /// here without retiring it.
    pub rem: u8,
    /// The instruction's length.
    pub len: u8,
    /// Page offset of the instruction's first byte.
    pub off: u16,
    /// Free for the handler.
    pub aux: u16,
    /// Displacement of a memory operand.
    pub disp: i32,
    /// Immediate, or a branch target relative to the block's page.
    pub imm: u64,
}

/// Where a flow op leads, in the slot of the op after it. Null: not known yet.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Link {
    pub taken: *const Op,
    pub next: *const Op,
    /// Host page of each target: a link to another page holds only while that page is mapped where it was.
    pub taken_host: u64,
    pub next_host: u64,
}

/// The record of a direct branch but for what only the moment knows, in the slots after the branch's link: one where it
/// jumps, one where it does not. Present in blocks that record.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Template {
    /// Source and target, relative to the block's page.
    pub places: [u64; 2],
    /// Zero, and the record's last word without the privilege level: [`x86::watch::Flow::code`], and the length in bits 15:8.
    pub rest: [u64; 2],
}

const _: () = assert!(size_of::<Op>() == 32 && size_of::<Link>() == 32 && size_of::<Template>() == 32);

/// What an op does when it leads to the op after it.
pub(crate) trait Body: 'static {
    /// What the translator makes of it.
    const FORM: Form = Form::Other;
    /// Carries out the op. On `Err` nothing the guest can see has changed.
    fn run(c: &mut Cpu, o: &Op) -> Done;
}

/// What an op does that ends a block.
pub(crate) trait Flow: 'static {
    /// What the translator makes of it.
    const FORM: Form = Form::Other;
    /// Carries out the op and says which op is next; null leaves the chain with `Cpu::stop` and `Cpu::rip` set.
    fn run(c: &mut Cpu, o: &Op) -> *const Op;
}

/// The handler for a body.
pub(crate) const fn chain<B: Body>() -> Handler {
    Handler {
        run: run_body::<B>,
        kind: const {
            &OpKind {
                id: TypeId::of::<B>,
                name: core::any::type_name::<B>,
                form: B::FORM,
            }
        },
    }
}

/// The handler for a flow op.
pub(crate) const fn chain_flow<F: Flow>() -> Handler {
    Handler {
        run: run_flow::<F>,
        kind: const {
            &OpKind {
                id: TypeId::of::<F>,
                name: core::any::type_name::<F>,
                form: F::FORM,
            }
        },
    }
}

unsafe fn run_body<B: Body>(c: &mut Cpu, o: *const Op) -> Next {
    // SAFETY: `o` is an op of a block that stays allocated while the chain runs (blocks are freed between chains only).
    match B::run(c, unsafe { &*o }) {
        Ok(()) => {
            // SAFETY: A body is never the last op of a block, so there is one after it.
            let next = unsafe { o.add(1) };
            #[cfg(chained)]
            // SAFETY: As above; the handler belongs to this op.
            unsafe {
                ((*next).f)(c, next)
            }
            #[cfg(not(chained))]
            next
        }
        Err(Stop) => {
            // SAFETY: As above.
            c.leave(unsafe { &*o });
            done()
        }
    }
}

unsafe fn run_flow<F: Flow>(c: &mut Cpu, o: *const Op) -> Next {
    // SAFETY: As in `run_body`.
    let next = F::run(c, unsafe { &*o });
    #[cfg(chained)]
    if !next.is_null() {
        // SAFETY: Flow bodies return only ops that begin a live block.
        unsafe { ((*next).f)(c, next) }
    }
    #[cfg(not(chained))]
    next
}

#[inline(always)]
fn done() -> Next {
    #[cfg(not(chained))]
    core::ptr::null()
}

/// Runs the chain that begins with `o`, a block's first op.
///
/// # Safety
/// `o` begins a live block.
pub(crate) unsafe fn enter_chain(c: &mut Cpu, o: *const Op) {
    #[cfg(chained)]
    // SAFETY: The caller's promise.
    unsafe {
        ((*o).f)(c, o)
    }
    #[cfg(not(chained))]
    {
        let mut o = o;
        while !o.is_null() {
            // SAFETY: The caller's promise, and each handler returns an op of a live block.
            o = unsafe { ((*o).f)(c, o) };
        }
    }
}

impl Op {
    /// The link slot behind a flow op.
    #[inline(always)]
    pub fn link(&self) -> &Link {
        // SAFETY: Every flow op that asks is followed by a link slot, laid out by `Lower::flow`.
        unsafe { &*(self as *const Op).add(1).cast::<Link>() }
    }

    /// The record of a direct branch in a block that records, where it jumps and where it does not.
    #[inline(always)]
    pub fn template(&self, taken: bool) -> &Template {
        // SAFETY: Every recording form of a direct branch is followed by a link slot and both templates, laid out by
        // `Lower::templates`.
        unsafe { &*(self as *const Op).add(3 - taken as usize).cast::<Template>() }
    }
}
