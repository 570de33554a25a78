//! MMX, SSE, AES and PCLMULQDQ, and the instructions that load and store their state.
//!
//! The moves that compilers use most have handlers of their own; everything else is executed by [`crate::fpu::thunk`].
// The engine core is one of the rooms where `unsafe` is allowed: thunks are called with pointers into guest RAM.
#![allow(unsafe_code)]

use iced_x86::{Instruction, Mnemonic as M, OpKind, Register};

use super::mov::{MovMr, Nop};
use crate::Vectors;
use crate::cpu::{Cpu, slot};
use crate::fpu::approx;
use crate::fpu::state::{BadImage, fxsave_len};
use crate::fpu::thunk::{self, Entry, Slot, Thunk, Traits};
use crate::lower::{End, Lower, body, sized};
use crate::mmu::Access;
use crate::op::{Done, Handler, Op, Stop, chain};
use crate::translate::Form;

/// Bits of a thunk op's `aux`; the size of the memory operand stands above them.
pub(crate) mod aux {
    pub const ALIGNED: u16 = 1 << 0;
    pub const MMX: u16 = 1 << 1;
    pub const MXCSR: u16 = 1 << 2;
    pub const FLAGS: u16 = 1 << 3;
    pub const WRITES_MM: u16 = 1 << 4;
    pub const SSE: u16 = 1 << 5;
    pub const GPRS: u16 = 1 << 6;
    pub const WRITE: u16 = 1 << 7;
    pub const SIZE_SHIFT: u16 = 8;
}

/// A copy of a memory operand that is not reached by pointer: it straddles pages or is not RAM.
#[repr(align(64))]
pub(super) struct Buffer(pub [u8; 64]);

impl Cpu {
    /// An SSE instruction may run. SDM Vol. 3A 2.5 "Control Registers": EM or no OSFXSR is #UD, TS #NM.
    #[inline(always)]
    pub(super) fn sse_ready(&mut self) -> Done {
        if self.cr0.em() || self.cr0.ts() || !self.cr4.osfxsr() {
            return Err(self.sse_unready());
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn sse_unready(&mut self) -> Stop {
        if self.cr0.em() || !self.cr4.osfxsr() {
            return self.ud();
        }
        self.fault(7, None)
    }

    /// An MMX instruction may run: EM is #UD, TS #NM, a pending x87 exception #MF.
    pub(super) fn mmx_ready(&mut self) -> Done {
        if self.cr0.em() {
            return Err(self.ud());
        }
        if self.cr0.ts() {
            return Err(self.fault(7, None));
        }
        self.no_math_fault()
    }

    /// A pending x87 exception is #MF at every waiting instruction. With CR0.NE clear it would go to the FERR# pin: there is
    /// none on this machine, and execution goes on as on a PC whose IGNNE# is asserted.
    pub(crate) fn no_math_fault(&mut self) -> Done {
        if self.fpu.pending() && self.cr0.ne() {
            return Err(self.fault(16, None));
        }
        Ok(())
    }

    /// #GP(0) for an address that is not a multiple of `alignment`.
    #[inline(always)]
    pub(crate) fn aligned(&mut self, linear: u64, alignment: u64) -> Done {
        if linear & (alignment - 1) != 0 {
            return Err(self.gp(0));
        }
        Ok(())
    }

    #[inline(always)]
    fn xmm(&mut self, at: u8) -> &mut u128 {
        &mut self.fpu.xmm[(at & 15) as usize]
    }

    /// Sixteen bytes from memory to XMM register `o.dst`.
    #[inline(always)]
    fn load_xmm(&mut self, o: &Op, linear: u64) -> Done {
        let e = self.tlb.entry(linear);
        let x = linear ^ e.read;
        if x <= 0x1000 - 16 {
            let p = (e.host + x) as *const u128;
            // SAFETY: A matching tag means `host` is a page of guest RAM, and the access ends within it.
            *self.xmm(o.dst) = unsafe { p.read_unaligned() };
            return Ok(());
        }
        self.load_xmm_slow(o, linear)
    }

    #[cold]
    #[inline(never)]
    fn load_xmm_slow(&mut self, o: &Op, linear: u64) -> Done {
        let mut bytes = [0; 16];
        self.read_bytes(o, linear, &mut bytes)?;
        *self.xmm(o.dst) = u128::from_le_bytes(bytes);
        Ok(())
    }

    /// Sixteen bytes from XMM register `o.src` to memory.
    #[inline(always)]
    fn store_xmm(&mut self, o: &Op, linear: u64) -> Done {
        let e = self.tlb.entry(linear);
        let x = linear ^ e.write;
        if x <= 0x1000 - 16 {
            let p = (e.host + x) as *mut u128;
            // SAFETY: As in `load_xmm`.
            unsafe { p.write_unaligned(*self.xmm(o.src)) };
            return Ok(());
        }
        self.store_xmm_slow(o, linear)
    }

    #[cold]
    #[inline(never)]
    fn store_xmm_slow(&mut self, o: &Op, linear: u64) -> Done {
        let bytes = self.xmm(o.src).to_le_bytes();
        self.write_bytes(o, linear, &bytes)
    }

    /// Executes the thunk of `o`.
    #[inline(never)]
    fn vector(&mut self, o: &Op) -> Done {
        if o.aux & aux::SSE != 0 {
            self.sse_ready()?;
        }
        if o.aux & aux::MMX != 0 {
            self.mmx_ready()?;
        }
        let size = (o.aux >> aux::SIZE_SHIFT) as usize;
        if size == 0 {
            return self.call_thunk(o, core::ptr::null_mut());
        }
        let linear = self.ea(o);
        if o.aux & aux::ALIGNED != 0 {
            self.aligned(linear, 16)?;
        }
        let write = o.aux & aux::WRITE != 0;
        let e = self.tlb.entry(linear);
        let x = linear ^ if write { e.write } else { e.read };
        if x <= 0x1000 - size as u64 {
            return self.call_thunk(o, (e.host + x) as *mut u8);
        }
        let mut buffer = Buffer([0; 64]);
        if write {
            self.probe_write(o, linear, size)?;
            self.call_thunk(o, buffer.0.as_mut_ptr())?;
            return self.write_bytes(o, linear, &buffer.0[..size]);
        }
        self.read_bytes(o, linear, &mut buffer.0[..size])?;
        self.call_thunk(o, buffer.0.as_mut_ptr())
    }

    #[inline(always)]
    fn call_thunk(&mut self, o: &Op, memory: *mut u8) -> Done {
        let thunk = Thunk {
            // SAFETY: `lower_thunk` put a thunk's entry there.
            entry: unsafe { core::mem::transmute::<usize, Entry>(o.imm as usize) },
            slots: [
                Slot(o.dst),
                Slot(o.src),
                if o.aux & aux::GPRS != 0 { Slot::GPRS } else { Slot::NONE },
                Slot::NONE,
            ],
            memory: None,
            traits: Traits {
                flags: o.aux & aux::FLAGS != 0,
                mxcsr: o.aux & aux::MXCSR != 0,
                mmx: o.aux & aux::MMX != 0,
                writes_mm: o.aux & aux::WRITES_MM != 0,
                ..Traits::default()
            },
        };
        let gprs = self.gprs();
        // SAFETY: State and registers are this processor's own; `memory` is guest RAM or a buffer, as long and as aligned as
        // the instruction wants it (`vector` checked).
        match unsafe { thunk.run(&raw mut self.fpu, gprs, memory) } {
            Ok(flags) => {
                if thunk.traits.flags {
                    self.nf = crate::flags::from_rflags(flags as u64);
                }
                Ok(())
            }
            Err(_) => Err(self.simd_exception()),
        }
    }

    /// An unmasked SIMD floating-point exception: #XM, or #UD without OSXMMEXCPT.
    #[cold]
    pub(super) fn simd_exception(&mut self) -> Stop {
        if self.cr4.osxmmexcpt() {
            self.fault(19, None)
        } else {
            self.ud()
        }
    }

    /// RCPPS, RCPSS, RSQRTPS, RSQRTSS: `aux` bit 0 for the square root, bit 1 for the scalar forms, bit 2 for memory.
    #[inline(never)]
    fn approximate(&mut self, o: &Op) -> Done {
        self.sse_ready()?;
        let scalar = o.aux & 2 != 0;
        let source = if o.aux & 4 != 0 {
            let linear = self.ea(o);
            let mut bytes = [0; 16];
            if !scalar {
                self.aligned(linear, 16)?;
            }
            self.read_bytes(o, linear, &mut bytes[..if scalar { 4 } else { 16 }])?;
            u128::from_le_bytes(bytes)
        } else {
            *self.xmm(o.src)
        };
        let f = if o.aux & 1 != 0 { approx::rsqrt } else { approx::rcp };
        let mut result = if scalar { *self.xmm(o.dst) } else { 0 };
        for i in 0..if scalar { 1 } else { 4 } {
            let shift = i * 32;
            result = result & !(0xffff_ffff << shift) | (f((source >> shift) as u32) as u128) << shift;
        }
        *self.xmm(o.dst) = result;
        Ok(())
    }

    /// MASKMOVDQU and MASKMOVQ: the bytes of `dst` whose mask in `src` has its top bit set go to DS:rDI. Whatever the mask is,
    /// all bytes are checked, the upper eight of sixteen first. `aux` bit 0 for the MMX form; `imm` is the address size.
    #[inline(never)]
    pub(super) fn masked_store(&mut self, o: &Op) -> Done {
        let mmx = o.aux & 1 != 0;
        let (data, mask) = if mmx {
            // The transition to MMX state comes before the operand's faults.
            self.fpu.enter_mmx();
            (self.fpu.mm(o.dst as usize) as u128, self.fpu.mm(o.src as usize) as u128)
        } else {
            (*self.xmm(o.dst), *self.xmm(o.src))
        };
        let (data, mask) = (data.to_le_bytes(), mask.to_le_bytes());
        let halves: &[usize] = if mmx { &[0] } else { &[8, 0] };
        let mut places = [0; 2];
        for (place, &half) in places.iter_mut().zip(halves) {
            let offset = self.get::<8>(slot::RDI).wrapping_add(half as u64) & u64::MAX >> (64 - 8 * o.imm as u32);
            *place = self.segmented(o.seg as usize, offset, 8, true)?;
            self.probe_aligned(o, *place, 8, 1)?;
        }
        for (place, &half) in places.iter().zip(halves) {
            for i in (0..8).filter(|i| mask[half + i] & 0x80 != 0) {
                self.write_bytes(o, place.wrapping_add(i as u64), &data[half + i..half + i + 1])?;
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn fxsave(&mut self, o: &Op) -> Done {
        self.fx_ready()?;
        let linear = self.ea(o);
        self.reach_canonical(o, linear, 512)?;
        self.aligned(linear, 16)?;
        let (long, rex_w) = (o.aux & 1 != 0, o.aux & 2 != 0);
        let image = self.fpu.fxsave(long, rex_w);
        self.reach_last(o, linear, 512, Access::Write)?;
        self.probe_write(o, linear, 512)?;
        self.write_bytes(o, linear, &image[..fxsave_len(long)])
    }

    #[inline(never)]
    fn fxrstor(&mut self, o: &Op) -> Done {
        self.fx_ready()?;
        let linear = self.ea(o);
        self.reach_canonical(o, linear, 512)?;
        self.aligned(linear, 16)?;
        let mut image = [0; 512];
        self.reach_last(o, linear, image.len(), Access::Read)?;
        self.read_bytes(o, linear, &mut image)?;
        let mut head = [0; 416];
        head.copy_from_slice(&image[..416]);
        match self.fpu.fxrstor(&head, o.aux & 1 != 0, o.aux & 2 != 0) {
            Ok(()) => Ok(()),
            Err(BadImage) => Err(self.gp(0)),
        }
    }

    /// EM or TS is #NM for FXSAVE and FXRSTOR, which are no waiting instructions.
    fn fx_ready(&mut self) -> Done {
        if self.cr0.em() || self.cr0.ts() {
            return Err(self.fault(7, None));
        }
        Ok(())
    }
}

pub(crate) const AND: u8 = 0;
pub(crate) const ANDN: u8 = 1;
pub(crate) const OR: u8 = 2;
pub(crate) const XOR: u8 = 3;

body! {
    /// The checks of an SSE (`MMX` 0) or MMX instruction ahead of its operand's segment checks.
    Ready<MMX>(c, _o) {
        if MMX != 0 {
            return c.mmx_ready();
        }
        c.sse_ready()
    }
    /// Ahead of the operand of an MMX store: the transition to MMX state clears TOP before the operand can fault, and makes the
    /// registers valid only afterwards. So Intel's processors; the manual does not say.
    MmxStore(c, _o) {
        c.mmx_ready()?;
        c.fpu.set_top(0);
        Ok(())
    }
    /// A thunk.
    Vector(c, o) [Form::Vector] {
        c.vector(o)
    }
    MovXmm(c, o) [Form::MoveXmm] {
        c.sse_ready()?;
        *c.xmm(o.dst) = *c.xmm(o.src);
        Ok(())
    }
    /// Sixteen bytes, with `A` aligned.
    LoadXmm<A>(c, o) [Form::LoadXmm(A != 0)] {
        c.sse_ready()?;
        let linear = c.ea(o);
        if A != 0 {
            c.aligned(linear, 16)?;
        }
        c.load_xmm(o, linear)
    }
    StoreXmm<A>(c, o) [Form::StoreXmm(A != 0)] {
        c.sse_ready()?;
        let linear = c.ea(o);
        if A != 0 {
            c.aligned(linear, 16)?;
        }
        c.store_xmm(o, linear)
    }
    /// `S` bytes, the rest of the register becomes zero.
    LoadLow<S>(c, o) [Form::LoadLow(S)] {
        c.sse_ready()?;
        let linear = c.ea(o);
        let v = c.load::<S>(o, linear)?;
        *c.xmm(o.dst) = v as u128;
        Ok(())
    }
    StoreLow<S>(c, o) [Form::StoreLow(S)] {
        c.sse_ready()?;
        let linear = c.ea(o);
        let v = *c.xmm(o.src) as u64;
        c.store::<S>(o, linear, v)
    }
    /// MOVD and MOVQ from a general register.
    FromGpr<S>(c, o) [Form::XmmFromReg(S)] {
        c.sse_ready()?;
        *c.xmm(o.dst) = c.get::<S>(o.src) as u128;
        Ok(())
    }
    /// MOVD and MOVQ to a general register.
    ToGpr<S>(c, o) [Form::RegFromXmm(S)] {
        c.sse_ready()?;
        let v = *c.xmm(o.src) as u64;
        c.set::<S>(o.dst, v);
        Ok(())
    }
    /// MOVQ between registers.
    MovLow(c, o) [Form::MoveLowXmm] {
        c.sse_ready()?;
        *c.xmm(o.dst) = *c.xmm(o.src) as u64 as u128;
        Ok(())
    }
    Logic<OP>(c, o) [Form::LogicXmm(OP)] {
        c.sse_ready()?;
        let (a, b) = (*c.xmm(o.dst), *c.xmm(o.src));
        *c.xmm(o.dst) = match OP { AND => a & b, ANDN => !a & b, OR => a | b, _ => a ^ b };
        Ok(())
    }
    Approximate(c, o) {
        c.approximate(o)
    }
    MaskedStore(c, o) {
        if o.aux & 1 != 0 {
            c.mmx_ready()?;
        } else {
            c.sse_ready()?;
        }
        c.masked_store(o)
    }
    Emms(c, o) {
        c.mmx_ready()?;
        c.fpu.emms();
        let _ = o;
        Ok(())
    }
    Ldmxcsr(c, o) {
        c.sse_ready()?;
        let linear = c.ea(o);
        let v = c.load::<4>(o, linear)?;
        match c.fpu.ldmxcsr(v as u32) {
            Ok(()) => Ok(()),
            Err(BadImage) => Err(c.gp(0)),
        }
    }
    Stmxcsr(c, o) {
        c.sse_ready()?;
        let linear = c.ea(o);
        let v = c.fpu.mxcsr as u64;
        c.store::<4>(o, linear, v)
    }
    Fxsave(c, o) {
        c.fxsave(o)
    }
    Fxrstor(c, o) {
        c.fxrstor(o)
    }
}

fn is_vector(i: &Instruction, n: u32) -> bool {
    i.op_kind(n) == OpKind::Register && (i.op_register(n).is_xmm() || i.op_register(n).is_mm())
}

/// Whether the instruction belongs to this file.
pub(crate) fn handles(i: &Instruction) -> bool {
    (0..i.op_count()).any(|n| is_vector(i, n))
        || thunk::scalar_to_integer(i.mnemonic())
        || matches!(
            i.mnemonic(),
            M::Emms
                | M::Ldmxcsr
                | M::Stmxcsr
                | M::Fxsave
                | M::Fxsave64
                | M::Fxrstor
                | M::Fxrstor64
                | M::Movnti
                | M::Movdiri
                | M::Prefetcht0
                | M::Prefetcht1
                | M::Prefetcht2
                | M::Prefetchnta
                | M::Prefetchw
                | M::Prefetchwt1
                | M::Sfence
                | M::Lfence
                | M::Mfence
        )
}

fn number(r: Register) -> u8 {
    r.number() as u8
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let i = l.i;
    // Where an address can fault by its segment, #UD, #NM and #MF come first.
    if l.segment_checks() {
        if (0..i.op_count()).any(|n| l.is_reg(n) && i.op_register(n).is_xmm())
            || matches!(i.mnemonic(), M::Ldmxcsr | M::Stmxcsr)
            || thunk::scalar_to_integer(i.mnemonic())
        {
            l.emit(chain::<Ready<0>>(), |_| ());
        } else if (0..i.op_count()).any(|n| is_vector(i, n)) {
            l.emit(chain::<Ready<1>>(), |_| ());
        }
    }
    if l.is_mem(0) && l.is_reg(1) && i.op1_register().is_mm() {
        l.emit(chain::<MmxStore>(), |_| ());
    }
    match i.mnemonic() {
        M::Prefetcht0 | M::Prefetcht1 | M::Prefetcht2 | M::Prefetchnta | M::Prefetchw | M::Prefetchwt1 => {
            l.emit(chain::<Nop>(), |_| ());
        }
        // Processors take turns, and a store is made when its instruction is: every order is the program's.
        M::Sfence | M::Lfence | M::Mfence => l.emit(chain::<Nop>(), |_| ()),
        M::Movnti | M::Movdiri => {
            let (src, size) = (l.reg(1), l.size(1));
            let m = l.mem(size, true);
            l.emit_mem(sized!(size, MovMr, 1), m, |o| o.src = src);
        }
        M::Emms => l.emit(chain::<Emms>(), |_| ()),
        M::Ldmxcsr => memory(l, chain::<Ldmxcsr>(), 4, false, 0),
        M::Stmxcsr => memory(l, chain::<Stmxcsr>(), 4, true, 0),
        M::Fxsave | M::Fxsave64 | M::Fxrstor | M::Fxrstor64 => {
            let save = matches!(i.mnemonic(), M::Fxsave | M::Fxsave64);
            let f = if save { chain::<Fxsave>() } else { chain::<Fxrstor>() };
            let rex_w = matches!(i.mnemonic(), M::Fxsave64 | M::Fxrstor64);
            let aux = l.is64() as u16 | (rex_w as u16) << 1;
            // Alignment comes after the limit for the first bytes, and before that for the rest.
            if l.segment_checks() {
                l.mem_span(4, save);
            }
            l.alignment_first(16);
            memory(l, f, 512, save, aux);
        }
        M::Maskmovdqu | M::Maskmovq => {
            let (dst, src) = (number(i.op_register(1)), number(i.op_register(2)));
            let mmx = i.mnemonic() == M::Maskmovq;
            let (seg, size) = (l.segment(), l.address_size());
            l.emit(chain::<MaskedStore>(), |o| {
                (o.dst, o.src, o.seg, o.aux, o.imm) = (dst, src, seg, mmx as u16, size as u64);
            });
        }
        M::Rcpps | M::Rcpss | M::Rsqrtps | M::Rsqrtss => {
            let scalar = matches!(i.mnemonic(), M::Rcpss | M::Rsqrtss);
            let root = matches!(i.mnemonic(), M::Rsqrtps | M::Rsqrtss);
            let dst = number(i.op_register(0));
            let aux = root as u16 | (scalar as u16) << 1;
            if l.is_mem(1) {
                if !scalar {
                    l.alignment_first(16);
                }
                let m = l.mem(if scalar { 4 } else { 16 }, false);
                l.emit_mem(chain::<Approximate>(), m, |o| (o.dst, o.aux) = (dst, aux | 4));
            } else {
                let src = number(i.op_register(1));
                l.emit(chain::<Approximate>(), |o| (o.dst, o.src, o.aux) = (dst, src, aux));
            }
        }
        _ => {
            if !lower_move(l) {
                let host = match l.vectors {
                    Vectors::Host => thunk::host_executes(i),
                    Vectors::Portable => thunk::every_host_executes(i),
                    Vectors::Tables => false,
                };
                return if host {
                    lower_thunk(l)
                } else {
                    super::portable::lower(l)
                };
            }
        }
    }
    End::Open
}

fn memory(l: &mut Lower, f: Handler, size: u16, write: bool, aux: u16) {
    let m = l.mem_span(size, write);
    l.emit_mem(f, m, |o| o.aux = aux);
}

/// The moves and the logic that have handlers of their own.
fn lower_move(l: &mut Lower) -> bool {
    let i = l.i;
    let xmm = |n: u32| i.op_kind(n) == OpKind::Register && i.op_register(n).is_xmm();
    if i.op_count() != 2 || i.op0_register().is_mm() || i.op1_register().is_mm() {
        return false;
    }
    let number = |n: u32| number(i.op_register(n));
    // The handlers for a load and a store, and their size.
    let (load, store, size): (Handler, Handler, u8) = match i.mnemonic() {
        M::Movaps | M::Movapd | M::Movdqa | M::Movntdqa | M::Movntps | M::Movntpd | M::Movntdq => {
            (chain::<LoadXmm<1>>(), chain::<StoreXmm<1>>(), 16)
        }
        M::Movups | M::Movupd | M::Movdqu | M::Lddqu => (chain::<LoadXmm<0>>(), chain::<StoreXmm<0>>(), 16),
        M::Movss | M::Movd => (chain::<LoadLow<4>>(), chain::<StoreLow<4>>(), 4),
        M::Movsd | M::Movq => (chain::<LoadLow<8>>(), chain::<StoreLow<8>>(), 8),
        M::Pand | M::Andps | M::Andpd if xmm(1) => return logic(l, chain::<Logic<AND>>()),
        M::Pandn | M::Andnps | M::Andnpd if xmm(1) => return logic(l, chain::<Logic<ANDN>>()),
        M::Por | M::Orps | M::Orpd if xmm(1) => return logic(l, chain::<Logic<OR>>()),
        M::Pxor | M::Xorps | M::Xorpd if xmm(1) => return logic(l, chain::<Logic<XOR>>()),
        _ => return false,
    };
    if size == 16 && !matches!(i.mnemonic(), M::Movups | M::Movupd | M::Movdqu | M::Lddqu) {
        l.alignment_first(16);
    }
    if l.is_mem(1) {
        let dst = number(0);
        let m = l.mem(size, false);
        l.emit_mem(load, m, |o| o.dst = dst);
    } else if l.is_mem(0) {
        let src = number(1);
        let m = l.mem(size, true);
        l.emit_mem(store, m, |o| o.src = src);
    } else if !xmm(0) {
        let (dst, src) = (l.reg(0), number(1));
        let f: Handler = if size == 8 {
            chain::<ToGpr<8>>()
        } else {
            chain::<ToGpr<4>>()
        };
        l.emit(f, |o| (o.dst, o.src) = (dst, src));
    } else if !xmm(1) {
        let (dst, src) = (number(0), l.reg(1));
        let f: Handler = if size == 8 {
            chain::<FromGpr<8>>()
        } else {
            chain::<FromGpr<4>>()
        };
        l.emit(f, |o| (o.dst, o.src) = (dst, src));
    } else {
        let f: Handler = match i.mnemonic() {
            // MOVSS and MOVSD between registers keep the rest of the destination.
            M::Movss | M::Movsd => return false,
            M::Movq => chain::<MovLow>(),
            _ => chain::<MovXmm>(),
        };
        let (dst, src) = (number(0), number(1));
        l.emit(f, |o| (o.dst, o.src) = (dst, src));
    }
    true
}

fn logic(l: &mut Lower, f: Handler) -> bool {
    let (dst, src) = (number(l.i.op_register(0)), number(l.i.op_register(1)));
    l.emit(f, |o| (o.dst, o.src) = (dst, src));
    true
}

fn lower_thunk(l: &mut Lower) -> End {
    let Ok(thunk) = thunk::prepare(l.i) else {
        return l.ud();
    };
    let sse = (0..l.i.op_count()).any(|n| l.is_reg(n) && l.i.op_register(n).is_xmm())
        || thunk::scalar_to_integer(l.i.mnemonic());
    let mut bits = 0;
    for (bit, set) in [
        (aux::MMX, thunk.traits.mmx),
        (aux::MXCSR, thunk.traits.mxcsr),
        (aux::FLAGS, thunk.traits.flags),
        (aux::WRITES_MM, thunk.traits.writes_mm),
        (aux::SSE, sse),
        (aux::GPRS, thunk.slots[2] == Slot::GPRS),
    ] {
        if set {
            bits |= bit;
        }
    }
    let set = |o: &mut Op| {
        (o.dst, o.src) = (thunk.slots[0].0, thunk.slots[1].0);
        o.imm = thunk.entry as usize as u64;
    };
    let Some(memory) = thunk.memory else {
        l.emit(chain::<Vector>(), |o| {
            set(o);
            o.aux = bits;
        });
        return End::Open;
    };
    bits |= (memory.size as u16) << aux::SIZE_SHIFT;
    if memory.alignment > 1 {
        bits |= aux::ALIGNED;
        l.alignment_first(16);
    }
    if memory.write {
        bits |= aux::WRITE;
    }
    let m = l.mem(memory.size, memory.write);
    l.emit_mem(chain::<Vector>(), m, |o| {
        set(o);
        o.aux = bits;
    });
    End::Open
}
