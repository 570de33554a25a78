//! From instructions to ops.
//!
//! Each instruction becomes one or more ops ([`Lower::emit`]); the families in [`crate::exec`] pick them. This module is what they
//! share: operands as offsets into the register file, memory operands with what their segment asks for (`memory`), and the ops
//! that are no instructions but hold a block together ([`control`]).

pub(crate) mod control;
mod memory;

use iced_x86::{Instruction, OpKind as Operand, Register};
use x86::cpuid::Features;
use x86::watch::Flow::Cond;

use crate::cpu::{mode, slot};
use crate::exec::{self, fuse::Compare};
use crate::frontend::Shown;
use crate::op::{Handler, Link, Op, OpKind, Run, Template, chain_flow};

use control::Undefined;
pub(crate) use memory::Mem;

/// Picks the instantiation of a body for an operand size known at decode time: `sized!(size, AluRr, ADD)` is
/// `AluRr<ADD, size>`.
macro_rules! sized {
    ($size:expr, $t:ident $(, $c:expr)*) => {
        match $size {
            1 => $crate::op::chain::<$t<$({ $c },)* 1>>(),
            2 => $crate::op::chain::<$t<$({ $c },)* 2>>(),
            4 => $crate::op::chain::<$t<$({ $c },)* 4>>(),
            _ => $crate::op::chain::<$t<$({ $c },)* 8>>(),
        }
    };
}
pub(crate) use sized;

/// The same for bodies that exist for 2, 4 and 8 bytes only.
macro_rules! sized_wide {
    ($size:expr, $t:ident $(, $c:expr)*) => {
        match $size {
            2 => $crate::op::chain::<$t<$({ $c },)* 2>>(),
            4 => $crate::op::chain::<$t<$({ $c },)* 4>>(),
            _ => $crate::op::chain::<$t<$({ $c },)* 8>>(),
        }
    };
}
pub(crate) use sized_wide;

/// Defines a [`Body`](crate::op::Body): `body! { /// Doc. Name<A, B>(c, o) { ... } }`, all parameters `u8`. In brackets before the block stands the
/// [`Form`](crate::translate::Form) of what is translated.
macro_rules! body {
    ($($(#[$meta:meta])* $name:ident $(<$($p:ident),+>)? ($c:ident, $o:ident) $([$form:expr])? $block:block)+) => { $(
        $(#[$meta])*
        pub(crate) struct $name $(<$(const $p: u8),+>)?;
        impl $(<$(const $p: u8),+>)? $crate::op::Body for $name $(<$($p),+>)? {
            $(const FORM: $crate::translate::Form = $form;)?

            #[inline(always)]
            fn run($c: &mut $crate::cpu::Cpu, $o: &$crate::op::Op) -> $crate::op::Done $block
        }
    )+ };
}
pub(crate) use body;

/// Defines a [`Flow`](crate::op::Flow), like `body!`; the block returns the next op.
macro_rules! flow {
    ($($(#[$meta:meta])* $name:ident $(<$($p:ident),+>)? ($c:ident, $o:ident) $([$form:expr])? $block:block)+) => { $(
        $(#[$meta])*
        pub(crate) struct $name $(<$(const $p: u8),+>)?;
        impl $(<$(const $p: u8),+>)? $crate::op::Flow for $name $(<$($p),+>)? {
            $(const FORM: $crate::translate::Form = $form;)?

            #[inline(always)]
            fn run($c: &mut $crate::cpu::Cpu, $o: &$crate::op::Op) -> *const $crate::op::Op $block
        }
    )+ };
}
pub(crate) use flow;

/// In a `Flow`: the value of a `Done`, or leave with the instruction not retired.
macro_rules! attempt {
    ($c:ident, $o:ident, $e:expr) => {
        match $e {
            Ok(v) => v,
            Err($crate::op::Stop) => return $c.abandon($o),
        }
    };
}
pub(crate) use attempt;

/// Whether the block ends with the instruction that was lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The next instruction belongs to the block.
    Open,
    /// A flow op was emitted.
    Closed,
}

/// One instruction being lowered.
pub(crate) struct Lower<'a> {
    pub i: &'a Instruction,
    /// Mode bits of the block.
    pub mode: u32,
    pub features: Features,
    /// Where undefined results come from.
    pub undefined: crate::Undefined,
    /// How vector instructions are executed.
    pub vectors: crate::Vectors,
    out: &'a mut Lowered,
    off: u16,
    len: u8,
    /// Added to a memory operand's displacement: POP's.
    sp_bias: u8,
    /// The instruction before, if it was a compare and this one may be joined to it.
    compared: Option<Compare>,
    /// This one, for the next.
    pub compare: Option<Compare>,
}

/// The ops of a block that is being made.
#[derive(Default)]
pub(crate) struct Lowered {
    /// Ops, and behind a flow op its link slot and templates.
    pub ops: Vec<Op>,
    /// What each of `ops` is; of a slot that is no op, nothing.
    pub kinds: Vec<Option<&'static OpKind>>,
    /// Slots behind the last link, which are templates.
    pub templates: usize,
}

impl Lowered {
    pub fn clear(&mut self) {
        self.ops.clear();
        self.kinds.clear();
        self.templates = 0;
    }

    fn push(&mut self, op: Op, kind: &'static OpKind) {
        self.ops.push(op);
        self.kinds.push(Some(kind));
    }

    fn push_slot(&mut self, slot: Op) {
        self.ops.push(slot);
        self.kinds.push(None);
    }
}

fn blank(f: Run) -> Op {
    Op {
        f,
        dst: slot::ZERO,
        src: slot::ZERO,
        base: slot::ZERO,
        idx: slot::ZERO,
        scale: 0,
        seg: 3,
        rem: 0,
        len: 0,
        off: 0,
        aux: 0,
        disp: 0,
        imm: 0,
    }
}

/// The file offset of a general register; AH, CH, DH and BH are the second bytes of their registers.
fn gpr(r: Register) -> u8 {
    match r {
        Register::None => slot::ZERO,
        Register::EIP | Register::RIP => slot::PAGE,
        Register::AH | Register::CH | Register::DH | Register::BH => r.full_register().number() as u8 * 8 + 1,
        _ => r.full_register().number() as u8 * 8,
    }
}

impl<'a> Lower<'a> {
    /// For an instruction `len` bytes long at `off` of its page, in a block of `mode`.
    pub fn new(shown: &Shown, i: &'a Instruction, mode: u32, off: u16, len: u8, out: &'a mut Lowered) -> Lower<'a> {
        Lower {
            i,
            mode,
            features: shown.features,
            undefined: shown.undefined,
            vectors: shown.vectors,
            out,
            off,
            len,
            sp_bias: 0,
            compared: None,
            compare: None,
        }
    }

    /// The instruction before was a compare that this one may be joined to.
    pub fn after(mut self, compared: Option<Compare>) -> Lower<'a> {
        self.compared = compared;
        self
    }

    /// 64-bit mode.
    pub fn is64(&self) -> bool {
        self.mode & mode::SIZE == mode::SIZE64
    }

    /// The code segment is flat, or has no base and limit at all.
    pub fn flat_code(&self) -> bool {
        self.is64() || self.mode & mode::CODE == 0
    }

    /// The block's branches are recorded.
    pub fn recorded(&self) -> bool {
        self.mode & mode::RECORD != 0
    }

    /// Emits an op.
    pub fn emit(&mut self, f: Handler, set: impl FnOnce(&mut Op)) {
        let mut op = blank(f.run);
        (op.off, op.len) = (self.off, self.len);
        set(&mut op);
        self.out.push(op, f.kind);
    }

    /// Emits an op with a memory operand.
    pub fn emit_mem(&mut self, f: Handler, m: Mem, set: impl FnOnce(&mut Op)) {
        self.emit(f, |op| {
            (op.base, op.idx, op.scale, op.seg, op.disp) = (m.base, m.idx, m.scale, m.seg, m.disp);
            set(op);
        });
    }

    /// Emits an op that ends the block, and its link slot.
    pub fn flow(&mut self, f: Handler, set: impl FnOnce(&mut Op)) -> End {
        self.emit(f, set);
        self.out.push_slot(link_slot(NO_LINK));
        End::Closed
    }

    /// Joins a branch within the page, on condition `k`, to the compare before it.
    pub fn fuse(&mut self, k: u8) -> Option<End> {
        let f = exec::fuse::handler(self.compared?, k, self.recorded())?;
        let target = self.target() as u16;
        let op = self.out.ops.last_mut()?;
        op.f = f.run;
        op.aux = target | (self.len as u16) << 12;
        *self.out.kinds.last_mut()? = Some(f.kind);
        self.out.push_slot(link_slot(NO_LINK));
        self.templates(Cond { taken: true }, target.into());
        Some(End::Closed)
    }

    /// Behind a direct branch's link: what its record says where it jumps, which is `flow`, and where it does not.
    pub fn templates(&mut self, flow: x86::watch::Flow, target: u64) {
        if !self.recorded() {
            return;
        }
        let ways = [(flow, target), (Cond { taken: false }, self.next())];
        let (from, length) = (self.off.into(), u64::from(self.len) << 8);
        for (flow, to) in ways {
            self.out.push_slot(template_slot(Template {
                places: [from, to],
                rest: [0, u64::from(flow.code()) | length],
            }));
        }
        self.out.templates = ways.len();
    }

    /// Emits a flow op with a memory operand.
    pub fn flow_mem(&mut self, f: Handler, m: Mem, set: impl FnOnce(&mut Op)) -> End {
        self.flow(f, |op| {
            (op.base, op.idx, op.scale, op.seg, op.disp) = (m.base, m.idx, m.scale, m.seg, m.disp);
            set(op);
        })
    }

    /// #UD.
    pub fn ud(&mut self) -> End {
        self.flow(chain_flow::<Undefined>(), |_| ())
    }

    pub fn is_reg(&self, n: u32) -> bool {
        self.i.op_kind(n) == Operand::Register
    }

    pub fn is_mem(&self, n: u32) -> bool {
        self.i.op_kind(n) == Operand::Memory
    }

    /// The register operand `n` as an offset into the register file.
    pub fn reg(&self, n: u32) -> u8 {
        gpr(self.i.op_register(n))
    }

    /// Operand `n`'s size in bytes.
    pub fn size(&self, n: u32) -> u8 {
        if self.is_reg(n) {
            self.i.op_register(n).size() as u8
        } else {
            self.i.memory_size().size() as u8
        }
    }

    /// The immediate operand `n`, sign-extended as the instruction does.
    pub fn imm(&self, n: u32) -> u64 {
        self.i.immediate(n)
    }

    /// The address size in bytes.
    pub fn address_size(&self) -> u8 {
        if self.i.op_count() > 0 {
            for n in 0..self.i.op_count() {
                match self.i.op_kind(n) {
                    Operand::Memory => {
                        let r = match self.i.memory_base() {
                            Register::None if !self.i.is_vsib() => self.i.memory_index(),
                            base => base,
                        };
                        if r != Register::None {
                            return r.size() as u8;
                        }
                        return match self.i.memory_displ_size() {
                            2 => 2,
                            4 if !self.is64() => 4,
                            4 => 4,
                            _ => 8,
                        };
                    }
                    Operand::MemorySegSI | Operand::MemorySegDI | Operand::MemoryESDI => return 2,
                    Operand::MemorySegESI | Operand::MemorySegEDI | Operand::MemoryESEDI => return 4,
                    Operand::MemorySegRSI | Operand::MemorySegRDI | Operand::MemoryESRDI => return 8,
                    _ => {}
                }
            }
        }
        if self.is64() {
            8
        } else if self.mode & mode::SIZE == mode::SIZE32 {
            4
        } else {
            2
        }
    }

    /// A branch target relative to the block's page.
    pub fn target(&self) -> u64 {
        let next = self.off as u64 + self.len as u64;
        if self.is64() {
            return self.i.near_branch_target();
        }
        // The decoder cut target and next address to the operand size: their distance, sign-extended from it, is exact.
        let distance = self.i.near_branch_target().wrapping_sub(next);
        let wide = matches!(self.i.op_kind(0), Operand::NearBranch32);
        next.wrapping_add(if wide {
            distance as i32 as i64 as u64
        } else {
            distance as i16 as i64 as u64
        })
    }

    /// The page-relative address of the next instruction.
    pub fn next(&self) -> u64 {
        self.off as u64 + self.len as u64
    }
}

const NO_LINK: Link = Link {
    taken: core::ptr::null(),
    next: core::ptr::null(),
    taken_host: 0,
    next_host: 0,
};

fn link_slot(link: Link) -> Op {
    // The slot is only ever read as a `Link`; an `Op` whose handler is valid carries the bytes until they are replaced.
    let mut op = blank(chain_flow::<Undefined>().run);
    write_link(&mut op, link);
    op
}

#[allow(unsafe_code)]
fn write_link(op: &mut Op, link: Link) {
    // SAFETY: Same size and alignment (asserted in `op`), and no one calls the handler of a link slot.
    unsafe { (op as *mut Op).cast::<Link>().write(link) }
}

#[allow(unsafe_code)]
fn template_slot(template: Template) -> Op {
    let mut op = blank(chain_flow::<Undefined>().run);
    // SAFETY: As in `write_link`. Templates are a block's last slots, counted in `Lowered::templates`, so that nobody takes one for an op.
    unsafe { (&raw mut op).cast::<Template>().write(template) }
    op
}
