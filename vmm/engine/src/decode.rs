//! From instruction bytes to ops.
//!
//! A block is a run of instructions within one page, at most [`MAX`] of them, that ends with the first instruction that may
//! go elsewhere. Blocks hold page-relative addresses only (base [`slot::PAGE`]), so that they are keyed by physical address
//! and serve every mapping of the page. An instruction that straddles two pages has a block of its own, which checks first
//! that the second page is still mapped where it was.

use iced_x86::{CpuidFeature, Decoder, DecoderError, DecoderOptions, Instruction, OpKind, Register};
use x86::cpuid::Features;
use x86::model::CpuModel;
use x86::seam::Flow::Cond;

use crate::cpu::{Cpu, SS, mode, slot};
use crate::exec::{self, fuse::Compare};
use crate::op::{Done, Handler, Link, Op, Reason, Stop, Template, chain, chain_flow};

/// Bytes of the longest instruction.
const LONGEST: usize = 15;

/// Instructions in a block at most.
pub(crate) const MAX: usize = 64;

/// Picks the instantiation of a body for an operand size known at decode time: `sized!(size, AluRr, ADD)` is
/// `AluRr<ADD, size>`.
macro_rules! sized {
    ($size:expr, $t:ident $(, $c:expr)*) => {
        match $size {
            1 => $crate::op::chain::<$t<$({ $c },)* 1>> as $crate::op::Handler,
            2 => $crate::op::chain::<$t<$({ $c },)* 2>>,
            4 => $crate::op::chain::<$t<$({ $c },)* 4>>,
            _ => $crate::op::chain::<$t<$({ $c },)* 8>>,
        }
    };
}
pub(crate) use sized;

/// The same for bodies that exist for 2, 4 and 8 bytes only.
macro_rules! sized_wide {
    ($size:expr, $t:ident $(, $c:expr)*) => {
        match $size {
            2 => $crate::op::chain::<$t<$({ $c },)* 2>> as $crate::op::Handler,
            4 => $crate::op::chain::<$t<$({ $c },)* 4>>,
            _ => $crate::op::chain::<$t<$({ $c },)* 8>>,
        }
    };
}
pub(crate) use sized_wide;

/// Defines a [`Body`]: `body! { /// Doc. Name<A, B>(c, o) { ... } }`, all parameters `u8`.
macro_rules! body {
    ($($(#[$meta:meta])* $name:ident $(<$($p:ident),+>)? ($c:ident, $o:ident) $block:block)+) => { $(
        $(#[$meta])*
        pub(crate) struct $name $(<$(const $p: u8),+>)?;
        impl $(<$(const $p: u8),+>)? $crate::op::Body for $name $(<$($p),+>)? {
            #[inline(always)]
            fn run($c: &mut $crate::cpu::Cpu, $o: &$crate::op::Op) -> $crate::op::Done $block
        }
    )+ };
}
pub(crate) use body;

/// Defines a [`Flow`], like `body!`; the block returns the next op.
macro_rules! flow {
    ($($(#[$meta:meta])* $name:ident $(<$($p:ident),+>)? ($c:ident, $o:ident) $block:block)+) => { $(
        $(#[$meta])*
        pub(crate) struct $name $(<$(const $p: u8),+>)?;
        impl $(<$(const $p: u8),+>)? $crate::op::Flow for $name $(<$($p),+>)? {
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

/// A memory operand ready for an op: whatever the decoder could not fold in has been computed by an op before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mem {
    pub base: u8,
    pub idx: u8,
    pub scale: u8,
    pub seg: u8,
    pub disp: i32,
}

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
    ops: &'a mut Vec<Op>,
    off: u16,
    len: u8,
    /// Added to a memory operand's displacement: POP's.
    sp_bias: u8,
    /// The instruction before, if it was a compare and this one may be joined to it.
    compared: Option<Compare>,
    /// This one, for the next.
    pub compare: Option<Compare>,
    /// Slots behind the last link, which are templates.
    tail: usize,
}

fn blank(f: Handler) -> Op {
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

impl Lower<'_> {
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
        let mut op = blank(f);
        (op.off, op.len) = (self.off, self.len);
        set(&mut op);
        self.ops.push(op);
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
        self.ops.push(link_slot(NO_LINK));
        End::Closed
    }

    /// Joins a branch within the page, on condition `k`, to the compare before it.
    pub fn fuse(&mut self, k: u8) -> Option<End> {
        let f = exec::fuse::handler(self.compared?, k, self.recorded())?;
        let target = self.target() as u16;
        let op = self.ops.last_mut()?;
        op.f = f;
        op.aux = target | (self.len as u16) << 12;
        self.ops.push(link_slot(NO_LINK));
        self.templates(Cond { taken: true }, target.into());
        Some(End::Closed)
    }

    /// Behind a direct branch's link: what its record says where it jumps, which is `flow`, and where it does not.
    pub fn templates(&mut self, flow: x86::seam::Flow, target: u64) {
        if !self.recorded() {
            return;
        }
        let ways = [(flow, target), (Cond { taken: false }, self.next())];
        let (from, length) = (self.off.into(), u64::from(self.len) << 8);
        let slots = ways.map(|(flow, to)| {
            template_slot(Template {
                places: [from, to],
                rest: [0, u64::from(flow.code()) | length],
            })
        });
        self.ops.extend(slots);
        self.tail = 2;
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
        self.flow(chain_flow::<Undefined>, |_| ())
    }

    pub fn is_reg(&self, n: u32) -> bool {
        self.i.op_kind(n) == OpKind::Register
    }

    pub fn is_mem(&self, n: u32) -> bool {
        self.i.op_kind(n) == OpKind::Memory
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
                    OpKind::Memory => {
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
                    OpKind::MemorySegSI | OpKind::MemorySegDI | OpKind::MemoryESDI => return 2,
                    OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI => return 4,
                    OpKind::MemorySegRSI | OpKind::MemorySegRDI | OpKind::MemoryESRDI => return 8,
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

    /// The memory operand's segment. In 64-bit mode the prefixes for ES, CS, SS and DS are ignored, so that there, too, what
    /// RSP and RBP point to is the stack.
    pub fn segment(&self) -> u8 {
        let stack = matches!(
            self.i.memory_base(),
            Register::RSP | Register::RBP | Register::ESP | Register::EBP
        );
        match self.i.memory_segment() {
            Register::ES | Register::CS | Register::SS | Register::DS if self.is64() => {
                if stack {
                    2
                } else {
                    3
                }
            }
            segment => segment.number() as u8,
        }
    }

    /// The memory operand: its address sum, with an op before it where segment or address size ask for more.
    /// `size` and `write` are what the segment check needs to know.
    pub fn mem(&mut self, size: u8, write: bool) -> Mem {
        self.mem_span(size as u16, write)
    }

    /// `mem` for operands of any length: state images.
    pub fn mem_span(&mut self, size: u16, write: bool) -> Mem {
        let raw = self.sum();
        self.place(raw, size, write)
    }

    /// Whether there is a memory operand whose segment has a limit or rights that an access may violate.
    pub fn segment_checks(&self) -> bool {
        let seg = self.i.memory_segment().number();
        (0..self.i.op_count()).any(|n| self.is_mem(n))
            && !self.is64()
            && !(self.mode & mode::FLAT != 0 && matches!(seg, 0 | 2 | 3))
    }

    /// For handlers that check the operand's segment themselves, since something comes before its faults: the address sum and the
    /// size of the addresses where there is anything to check, else `mem` and 0.
    pub fn mem_checked_later(&mut self, size: u8) -> (Mem, u8) {
        if !self.segment_checks() {
            return (self.mem(size, true), 0);
        }
        let seg = self.segment();
        let m = self.sum();
        (Mem { seg, ..m }, self.address_size())
    }

    /// `mem_span` for an address sum that an op of the instruction has made out of more than `sum` knows of.
    pub fn place(&mut self, raw: Mem, size: u16, write: bool) -> Mem {
        let seg = self.segment();
        let address = self.address_size();
        let m = if self.is64() {
            let segmented = seg >= 4;
            match (address, segmented) {
                (8, false) => return Mem { seg, ..raw },
                (8, true) => self.emit_ea(chain::<EaBased<8>>, raw, seg, 0),
                (_, false) => self.emit_ea(chain::<EaFlat<4>>, raw, seg, 0),
                (_, true) => self.emit_ea(chain::<EaBased<4>>, raw, seg, 0),
            }
        } else if self.mode & mode::FLAT != 0 && matches!(seg, 0 | 2 | 3) {
            match address {
                2 => self.emit_ea(chain::<EaFlat<2>>, raw, seg, 0),
                _ => self.emit_ea(chain::<EaFlat<4>>, raw, seg, 0),
            }
        } else {
            let aux = size | (write as u16) << 15;
            match address {
                2 => self.emit_ea(chain::<EaChecked<2>>, raw, seg, aux),
                _ => self.emit_ea(chain::<EaChecked<4>>, raw, seg, aux),
            }
        };
        Mem { seg, ..m }
    }

    /// For an operand that must be aligned, ahead of `mem`: #GP for its alignment comes before #SS for the stack segment's limit.
    pub fn alignment_first(&mut self, alignment: u8) {
        if !self.segment_checks() || self.segment() != SS as u8 {
            return;
        }
        let m = self.sum();
        let f = match self.address_size() {
            2 => chain::<EaAligned<2>> as Handler,
            _ => chain::<EaAligned<4>>,
        };
        self.emit_mem(f, m, |op| op.aux = alignment as u16);
    }

    /// The memory operand's linear address without any check: INVLPG's.
    pub fn unchecked(&mut self) -> Mem {
        let seg = self.segment();
        let raw = self.sum();
        let plain = self.is64() && seg < 4;
        match (plain, self.address_size()) {
            (true, 8) => Mem { seg, ..raw },
            (true, _) => self.emit_ea(chain::<EaFlat<4>>, raw, seg, 0),
            (false, 8) => self.emit_ea(chain::<EaBased<8>>, raw, seg, 0),
            (false, 4) => self.emit_ea(chain::<EaBased<4>>, raw, seg, 0),
            (false, _) => self.emit_ea(chain::<EaBased<2>>, raw, seg, 0),
        }
    }

    /// The memory operand's address sum alone, without its segment: LEA and INVLPG's like.
    pub fn sum(&mut self) -> Mem {
        let displacement = self.i.memory_displacement64().wrapping_add(self.sp_bias as u64);
        // A vector of indices is the handler's business.
        let index = if self.i.is_vsib() {
            Register::None
        } else {
            self.i.memory_index()
        };
        let (base, idx) = (gpr(self.i.memory_base()), gpr(index));
        let scale = self.i.memory_index_scale().trailing_zeros() as u8;
        let mut m = Mem {
            base,
            idx,
            scale,
            seg: 3,
            disp: displacement as i32,
        };
        // Addresses below 64 bits are cut to size later, so only 64-bit ones can have a displacement that does not fit.
        if self.is64()
            && displacement as i32 as i64 as u64 != displacement
            && (self.address_size() == 8 || base == slot::PAGE)
        {
            self.emit_mem(chain::<EaWide>, m, |op| {
                op.disp = 0;
                op.imm = displacement;
            });
            m = Mem {
                base: slot::EA,
                idx: slot::ZERO,
                scale: 0,
                seg: 3,
                disp: 0,
            };
        }
        m
    }

    fn emit_ea(&mut self, f: Handler, raw: Mem, seg: u8, aux: u16) -> Mem {
        self.emit_mem(f, raw, |op| {
            op.seg = seg;
            op.aux = aux;
        });
        Mem {
            base: slot::EA,
            idx: slot::ZERO,
            scale: 0,
            seg,
            disp: 0,
        }
    }

    /// Operand `n`, a register or memory of `size` bytes that is only read, as a register slot.
    pub fn read(&mut self, n: u32, size: u8) -> u8 {
        if self.is_reg(n) {
            return self.reg(n);
        }
        let m = self.mem(size, false);
        self.load_t0(size, m);
        slot::T0
    }

    /// Loads memory into T0.
    pub fn load_t0(&mut self, size: u8, m: Mem) {
        self.emit_mem(sized!(size, LoadT0), m, |_| ());
    }

    /// Operand `n`, a register or memory of `size` bytes that is read and written: `f` emits ops on the slot it is given.
    /// With LOCK the write is a compare and exchange that starts over when somebody else was faster.
    pub fn modify(&mut self, n: u32, size: u8, f: impl FnOnce(&mut Self, u8)) {
        if self.is_reg(n) {
            let slot = self.reg(n);
            return f(self, slot);
        }
        let m = self.mem(size, true);
        self.modify_at(m, size, f);
    }

    /// `modify` of a memory operand whose address has been seen to.
    pub fn modify_at(&mut self, m: Mem, size: u8, f: impl FnOnce(&mut Self, u8)) {
        if self.i.has_lock_prefix() {
            self.lock(m, size);
        }
        self.emit_mem(sized!(size, ModifyBegin), m, |_| ());
        f(self, slot::T0);
        if self.i.has_lock_prefix() {
            self.emit(sized!(size, ModifyEndLocked), |_| ());
        } else {
            self.emit(sized!(size, ModifyEnd), |_| ());
        }
    }

    /// Before a locked access to memory: it may be one that the guest wants to hear of, on parts that can tell.
    pub fn lock(&mut self, m: Mem, size: u8) {
        if self.features.bus_lock_detect() {
            self.emit_mem(chain::<BusLock>, m, |o| o.aux = size.into());
        }
    }

    /// `modify` of memory, locked whether or not there is a prefix.
    pub fn modify_locked(&mut self, n: u32, size: u8, f: impl FnOnce(&mut Self)) {
        debug_assert!(self.is_mem(n));
        let m = self.mem(size, true);
        self.lock(m, size);
        self.emit_mem(sized!(size, ModifyBegin), m, |_| ());
        f(self);
        self.emit(sized!(size, ModifyEndLocked), |_| ());
    }

    /// Stores T0 to operand 0 as POP does: an address based on the stack pointer counts from after the pop.
    pub fn pop_store(&mut self, size: u8) {
        let by_stack = self.i.memory_base().full_register() == Register::RSP;
        self.sp_bias = if by_stack { size } else { 0 };
        let m = self.mem(size, true);
        self.sp_bias = 0;
        self.emit_mem(sized!(size, StoreT0), m, |_| ());
    }

    /// Operand `n`, a register or memory of `size` bytes that is only written: `f` emits ops on the slot it is given, none of
    /// which may change anything else before the store has succeeded unless the instruction allows it.
    pub fn write(&mut self, n: u32, size: u8, f: impl FnOnce(&mut Self, u8)) {
        if self.is_reg(n) {
            let slot = self.reg(n);
            return f(self, slot);
        }
        let m = self.mem(size, true);
        f(self, slot::T0);
        self.emit_mem(sized!(size, StoreT0), m, |_| ());
    }

    /// A branch target relative to the block's page.
    pub fn target(&self) -> u64 {
        let next = self.off as u64 + self.len as u64;
        if self.is64() {
            return self.i.near_branch_target();
        }
        // The decoder cut target and next address to the operand size: their distance, sign-extended from it, is exact.
        let distance = self.i.near_branch_target().wrapping_sub(next);
        let wide = matches!(self.i.op_kind(0), OpKind::NearBranch32);
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
    let mut op = blank(chain_flow::<Undefined>);
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
    let mut op = blank(chain_flow::<Undefined>);
    // SAFETY: As in `write_link`. Templates are a block's last slots, counted in `Lower::tail`, so that nobody takes one for an op.
    unsafe { (&raw mut op).cast::<Template>().write(template) }
    op
}

body! {
    /// `address sum + 64-bit displacement`.
    EaWide(c, o) {
        let ea = c.ea(o).wrapping_add(o.imm);
        c.set::<8>(slot::EA, ea);
        Ok(())
    }
    /// Address sum cut to the address size, in a flat segment.
    EaFlat<A>(c, o) {
        let ea = c.ea(o) & if A == 2 { 0xffff } else { 0xffff_ffff };
        c.set::<8>(slot::EA, ea);
        Ok(())
    }
    /// FS or GS in 64-bit mode: a base, no limit.
    EaBased<A>(c, o) {
        let ea = c.ea(o) & match A { 2 => 0xffff, 4 => 0xffff_ffff, _ => u64::MAX };
        let base = c.seg[(o.seg as usize).min(5)].base;
        c.set::<8>(slot::EA, ea.wrapping_add(base));
        Ok(())
    }
    /// A segment with base, limit and rights.
    EaChecked<A>(c, o) {
        let offset = c.ea(o) & if A == 2 { 0xffff } else { 0xffff_ffff };
        let linear = c.segmented(o.seg as usize, offset, (o.aux & 0x7fff) as u64, o.aux >> 15 != 0)?;
        c.set::<8>(slot::EA, linear);
        Ok(())
    }
    /// Whether the address in the stack segment is a multiple of `aux`.
    EaAligned<A>(c, o) {
        let offset = c.ea(o) & if A == 2 { 0xffff } else { 0xffff_ffff };
        let linear = c.seg[SS].base.wrapping_add(offset) & 0xffff_ffff;
        c.aligned(linear, o.aux as u64)
    }
    /// Loads a memory operand into T0.
    LoadT0<S>(c, o) {
        let ea = c.ea(o);
        let v = c.load::<S>(o, ea)?;
        c.set::<8>(slot::T0, v);
        Ok(())
    }
    /// Stores T0.
    StoreT0<S>(c, o) {
        let ea = c.ea(o);
        let v = c.get::<S>(slot::T0);
        c.store::<S>(o, ea, v)
    }
    /// Loads an operand that will be written back, into T0 and T1.
    ModifyBegin<S>(c, o) {
        let ea = c.ea(o);
        let v = c.begin::<S>(o, ea)?;
        c.set::<8>(slot::T0, v);
        c.set::<8>(slot::T1, v);
        Ok(())
    }
    /// Writes T0 back.
    ModifyEnd<S>(c, o) {
        c.finish::<S>(o);
        Ok(())
    }
    /// Before a locked access of `aux` bytes.
    BusLock(c, o) {
        if !c.watched.appetite.bus_locks || c.cpl == 0 {
            return Ok(());
        }
        c.note_bus_lock(o)
    }
    /// Writes T0 back if memory still holds T1; else the instruction runs again.
    ModifyEndLocked<S>(c, o) {
        if c.finish_locked::<S>(o) {
            return Ok(());
        }
        c.stop = Reason::Resolve;
        Err(Stop)
    }
}

flow! {
    /// #UD.
    Undefined(c, o) {
        let Stop = c.ud();
        c.abandon(o)
    }
    /// The block goes on in the next one, in the same page: not an instruction.
    Continue(c, o) {
        c.follow(o.link(), true, o.imm)
    }
    /// The block goes on in the next page: not an instruction.
    ContinueFar(c, o) {
        c.follow_far::<0>(o, true, o.imm)
    }
    /// The block goes on in a code segment that is not flat: not an instruction.
    ContinueSlow(c, o) {
        let rip = c.page_ip().wrapping_add(o.imm) & c.ip_mask;
        c.jump(rip)
    }
    /// Stops after what came before: the end of a block that was cut short.
    Pause(c, o) {
        let rip = c.page_ip().wrapping_add(o.imm);
        c.end(rip, Reason::Look)
    }
}

body! {
    /// The units want a word before the instruction at this place in the page, if it is the page they mean.
    Observe(c, o) {
        let linear = c.linear(c.ip(o));
        if !c.is_boundary(linear) || c.watched.observed == (c.steps_after(o).wrapping_sub(1), linear) {
            return Ok(());
        }
        c.stop = Reason::Observe;
        Err(Stop)
    }
    /// The second page of a straddling instruction is still mapped where it was decoded from.
    CheckSecond(c, o) {
        let linear = c.linear(c.page_ip().wrapping_add(0x1000));
        let e = c.tlb.entry(linear);
        if e.exec == linear && e.host == o.imm {
            return Ok(());
        }
        c.stop = Reason::Resolve;
        c.second_page_moved = true;
        Err(Stop)
    }
}

impl Cpu {
    /// The instruction pointer at the start of the running page.
    #[inline(always)]
    pub(crate) fn page_ip(&self) -> u64 {
        self.get::<8>(slot::PAGE)
    }

    /// The linear address of an access through a segment, checked (SDM Vol. 3A 6.3 "Limit Checking", 6.4 "Type Checking").
    pub(crate) fn segmented(&mut self, seg: usize, offset: u64, size: u64, write: bool) -> Done<u64> {
        let linear = self.within(seg, offset, size, write);
        linear.ok_or_else(|| self.segment_fault(seg))
    }

    /// What an access raises that its segment does not allow: #SS for the stack's, #GP for another.
    pub(crate) fn segment_fault(&mut self, seg: usize) -> Stop {
        if seg == SS { self.fault(12, Some(0)) } else { self.gp(0) }
    }

    /// Whether accesses through a segment are checked, as [`Lower::segment_checks`] tells of an instruction.
    fn checks_segment(&self, seg: usize) -> bool {
        !self.is64() && (self.mode & mode::FLAT == 0 || !matches!(seg, 0 | 2 | 3))
    }

    /// The linear address `at` bytes into an operand of which only the first part's segment check was made: for the `len` bytes
    /// there; `None` where the segment does not allow the access.
    pub(crate) fn later_part(&self, o: &Op, linear: u64, at: u64, len: u64) -> Option<u64> {
        let seg = o.seg as usize;
        if self.is64() {
            return Some(linear.wrapping_add(at));
        }
        if !self.checks_segment(seg) {
            return Some(linear.wrapping_add(at) & 0xffff_ffff);
        }
        let offset = linear.wrapping_sub(self.seg[seg.min(5)].base) & 0xffff_ffff;
        self.within(seg, offset + at, len, false)
    }

    /// The same without the fault: `None` where the segment does not allow the access.
    pub(crate) fn within(&self, seg: usize, offset: u64, size: u64, write: bool) -> Option<u64> {
        let s = self.seg[seg.min(5)];
        if self.is64() {
            return Some(if seg >= 4 { s.base.wrapping_add(offset) } else { offset });
        }
        let code = s.attributes & 8 != 0;
        let rights = s.present()
            && if write {
                !code && s.attributes & 2 != 0
            } else {
                !code || s.attributes & 2 != 0
            };
        let last = offset + size.max(1) - 1;
        let expand_down = s.attributes & 0xc == 4;
        let within = if expand_down {
            let top = if s.big() { 0xffff_ffff } else { 0xffff };
            offset > s.limit as u64 && last <= top
        } else {
            last <= s.limit as u64
        };
        (rights && within).then(|| s.base.wrapping_add(offset) & 0xffff_ffff)
    }
}

/// A decoded block, not yet in the cache.
pub(crate) struct Decoded {
    /// Bytes of the first page that it was decoded from.
    pub bytes: u64,
    /// Bytes of the page after it.
    pub second: u64,
}

/// Where a block is decoded from.
pub(crate) struct Source<'a> {
    /// The page's bytes.
    pub page: &'a [u8],
    /// The first bytes of the page after it, if it can be fetched.
    pub next: Option<&'a [u8]>,
    /// Its host address.
    pub next_host: u64,
    /// Offset of the first instruction.
    pub offset: usize,
    /// Bytes of the code segment that are left from there.
    pub limit: u64,
    pub mode: u32,
    /// Instructions at most.
    pub max: usize,
    /// Stop after them rather than go on in the next block.
    pub pause: bool,
    /// Linear addresses that only a block's first instruction may have.
    pub boundaries: &'a [u64],
}

/// Why nothing could be decoded.
pub(crate) enum Trouble {
    /// The instruction runs into the next page, which was not given.
    NeedsSecondPage,
    /// It runs past the code segment's limit, or is longer than 15 bytes.
    Protection,
}

/// Decodes a block into `ops`, which is emptied first.
pub(crate) fn decode(shown: &Shown, s: &Source, ops: &mut Vec<Op>) -> Result<Decoded, Trouble> {
    ops.clear();
    let bits = match s.mode & mode::SIZE {
        mode::SIZE64 => 64,
        mode::SIZE32 => 32,
        _ => 16,
    };
    let mut at = s.offset;
    // The first op of each instruction.
    let mut firsts: Vec<usize> = Vec::with_capacity(s.max);
    let mut i = Instruction::default();
    let mut joined = [0u8; 32];
    let mut closed = false;
    let (mut compared, mut tail) = (None, 0);
    while !closed && firsts.len() < s.max && at < s.page.len() {
        // Blocks serve every mapping of the page, so that the place in the page decides here and the op looks closer.
        let boundary = s.boundaries.iter().any(|b| b & 0xfff == at as u64);
        if boundary && !firsts.is_empty() {
            break;
        }
        let left = s.limit.saturating_sub((at - s.offset) as u64).min(15) as usize;
        let here = &s.page[at..];
        let whole = here.len() >= left;
        let mut decoder = Decoder::with_ip(bits, &here[..here.len().min(left)], at as u64, DecoderOptions::NONE);
        decoder.decode_out(&mut i);
        let mut straddles = false;
        if i.is_invalid() && wants_more(&decoder, bits, here) {
            // A block with something in it ends here; the next one looks into the matter.
            if !firsts.is_empty() {
                break;
            }
            if whole {
                return Err(Trouble::Protection);
            }
            let Some(next) = s.next else {
                return Err(Trouble::NeedsSecondPage);
            };
            let take = (left - here.len()).min(next.len());
            joined[..here.len()].copy_from_slice(here);
            joined[here.len()..here.len() + take].copy_from_slice(&next[..take]);
            let mut decoder = Decoder::with_ip(bits, &joined[..here.len() + take], at as u64, DecoderOptions::NONE);
            decoder.decode_out(&mut i);
            if i.is_invalid() && wants_more(&decoder, bits, &joined[..here.len() + take]) {
                return Err(Trouble::Protection);
            }
            straddles = true;
        }
        firsts.push(ops.len());
        let len = i.len().max(1) as u8;
        let mut lower = Lower {
            i: &i,
            mode: s.mode,
            features: shown.features,
            undefined: shown.undefined,
            ops,
            off: at as u16,
            len,
            sp_bias: 0,
            compared: compared.take(),
            compare: None,
            tail: 0,
        };
        if straddles {
            lower.emit(chain::<CheckSecond>, |op| op.imm = s.next_host);
        }
        if boundary {
            lower.emit(chain::<Observe>, |_| ());
        }
        let end = if i.is_invalid() || !shown.has(&i) {
            lower.ud()
        } else if s.mode & mode::TRANSACTION != 0
            && let Some(cause) = exec::transaction::aborts(&i)
        {
            exec::transaction::lower_abort(&mut lower, cause)
        } else {
            exec::lower(&mut lower)
        };
        closed = end == End::Closed;
        (compared, tail) = (lower.compare, lower.tail);
        at += len as usize;
    }
    if !closed {
        let mut lower = Lower {
            i: &i,
            mode: s.mode,
            features: shown.features,
            undefined: shown.undefined,
            ops,
            off: at as u16,
            len: 0,
            sp_bias: 0,
            compared: None,
            compare: None,
            tail: 0,
        };
        let f = if s.pause {
            chain_flow::<Pause>
        } else if !lower.flat_code() {
            chain_flow::<ContinueSlow>
        } else if at >= s.page.len() {
            chain_flow::<ContinueFar>
        } else {
            chain_flow::<Continue>
        };
        lower.flow(f, |op| op.imm = at as u64);
    }
    let n = firsts.len();
    for (k, &first) in firsts.iter().enumerate() {
        let end = firsts.get(k + 1).map_or(ops.len() - 1 - tail, |&next| next);
        for op in ops[first..end].iter_mut().filter(|op| op.len != 0) {
            op.rem = (n - k) as u8;
        }
    }
    Ok(Decoded {
        bytes: (at.min(s.page.len()) - s.offset) as u64,
        second: at.saturating_sub(s.page.len()) as u64,
    })
}

/// The bytes given ended before the instruction did. Of fifteen bytes iced says only that they are no instruction: one more
/// was wanted, which is #GP and not #UD (SDM Vol. 3A 7.15, "Interrupt 13—General Protection Exception (#GP)"), unless they
/// are one but for a prefix that it must not have.
fn wants_more(decoder: &Decoder, bits: u32, bytes: &[u8]) -> bool {
    decoder.last_error() == DecoderError::NoMoreBytes
        || decoder.position() == LONGEST
            && Decoder::new(bits, bytes, DecoderOptions::NO_INVALID_CHECK)
                .decode()
                .is_invalid()
}

/// Which instructions the model has.
pub(crate) struct Shown {
    pub features: Features,
    pub undefined: crate::Undefined,
    known: [bool; 256],
}

impl Shown {
    pub fn new(model: &CpuModel, undefined: crate::Undefined) -> Shown {
        let f = model.features();
        let mut known = [false; 256];
        for feature in CpuidFeature::values() {
            use CpuidFeature as F;
            known[feature as usize] = match feature {
                F::INTEL8086
                | F::INTEL186
                | F::INTEL286
                | F::INTEL386
                | F::INTEL486
                | F::CPUID
                | F::MULTIBYTENOP
                | F::PAUSE => true,
                F::INTEL8086_ONLY | F::INTEL286_ONLY | F::INTEL386_ONLY | F::INTEL386_A0_ONLY | F::INTEL486_A_ONLY => {
                    false
                }
                F::X64 => f.lm(),
                F::RDPMC => true,
                F::FPU | F::FPU287 | F::FPU387 => f.fpu(),
                F::ADX => f.adx(),
                F::AES => f.aesni(),
                F::AVX => f.avx(),
                F::AVX2 => f.avx2(),
                F::AVX_VNNI => f.avx_vnni(),
                F::BMI1 => f.bmi1(),
                F::BMI2 => f.bmi2(),
                F::CLFLUSHOPT => f.clflushopt(),
                F::CLFSH => f.clfsh(),
                F::CLWB => f.clwb(),
                F::CMOV => f.cmov(),
                F::CMPXCHG16B => f.cmpxchg16b(),
                F::CX8 => f.cx8(),
                F::F16C => f.f16c(),
                F::FMA => f.fma(),
                F::FSGSBASE => f.fsgsbase(),
                F::FXSR => f.fxsr(),
                F::GFNI => f.gfni(),
                F::INVPCID => f.invpcid(),
                F::LZCNT => f.lzcnt(),
                F::MMX => f.mmx(),
                F::MONITOR => f.monitor(),
                F::MOVBE => f.movbe(),
                F::MOVDIR64B => f.movdir64b(),
                F::MOVDIRI => f.movdiri(),
                F::MSR => f.msr(),
                F::PCLMULQDQ => f.pclmulqdq(),
                F::PKU => f.pku(),
                F::POPCNT => f.popcnt(),
                F::PREFETCHW => true,
                // A feature of the trace unit's leaf, which is empty where the unit is hidden.
                F::PTWRITE => model.cpuid(0x14, 0)[1] >> 4 & 1 != 0,
                F::RDPID => f.rdpid(),
                F::RDRAND => f.rdrand(),
                F::RDSEED => f.rdseed(),
                F::RDTSCP => f.rdtscp(),
                // A part whose transactions always abort has the instructions, shown or not.
                F::RTM => f.rtm() || f.rtm_always_abort(),
                F::HLE_or_RTM => f.hle() || f.rtm() || f.rtm_always_abort(),
                F::SEP => f.sep(),
                F::SERIALIZE => f.serialize(),
                F::SHA => f.sha(),
                F::SMAP => f.smap(),
                F::SSE => f.sse(),
                F::SSE2 => f.sse2(),
                F::SSE3 => f.sse3(),
                F::SSSE3 => f.ssse3(),
                F::SSE4_1 => f.sse41(),
                F::SSE4_2 => f.sse42(),
                F::SYSCALL => f.syscall(),
                F::TSC => f.tsc(),
                F::VAES => f.vaes(),
                // VMCALL alone, which whoever records the guest listens to.
                F::VMX => true,
                F::VPCLMULQDQ => f.vpclmulqdq(),
                F::XSAVE => f.xsave(),
                F::XSAVEC => f.xsavec(),
                F::XSAVEOPT => f.xsaveopt(),
                F::XSAVES => f.xsaves(),
                _ => false,
            };
        }
        Shown {
            features: f,
            undefined,
            known,
        }
    }

    fn has(&self, i: &Instruction) -> bool {
        // TZCNT and LZCNT without their features are BSF and BSR; `exec::bit` sees to that.
        if matches!(i.mnemonic(), iced_x86::Mnemonic::Tzcnt | iced_x86::Mnemonic::Lzcnt) {
            return true;
        }
        use iced_x86::Mnemonic as M;
        // Encodings that were NOPs before they got a meaning, and still are on parts without it; WBNOINVD was WBINVD.
        if matches!(
            i.mnemonic(),
            M::Endbr32
                | M::Endbr64
                | M::Rdsspd
                | M::Rdsspq
                | M::Cldemote
                | M::Bndmk
                | M::Bndcl
                | M::Bndcu
                | M::Bndcn
                | M::Bndmov
                | M::Bndldx
                | M::Bndstx
                | M::Prefetchit0
                | M::Prefetchit1
                | M::Prefetchwt1
                | M::Reservednop
                | M::Wbnoinvd
        ) {
            return true;
        }
        i.cpuid_features().iter().all(|&f| self.known[f as usize])
    }
}
