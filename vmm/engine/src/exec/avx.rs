//! AVX, AVX2, FMA, F16C and the VEX forms of AES, PCLMULQDQ and GFNI.
//!
//! As in [`super::simd`], what compilers use most has handlers of its own and thunks do the rest; gathers and masked moves, whose
//! elements fault one by one, are done here.
// The engine core is one of the rooms where `unsafe` is allowed: thunks are called with pointers into guest RAM.
#![allow(unsafe_code)]

use iced_x86::{Code, Mnemonic as M, OpKind, Register};

use super::simd::{AND, ANDN, Buffer, OR, XOR};
use x86::rflags::flag as rf;

use crate::Vectors;
use crate::cpu::Cpu;
use crate::fpu::approx;
use crate::fpu::state::{BadImage, FpuState, mxcsr, xstate};
use crate::fpu::thunk::{self, Entry, NoThunk, Slot, Thunk, Traits};
use crate::lower::{End, Lower, body};
use crate::op::{Done, Handler, Op, Stop, chain};
use crate::translate::Form;

pub(crate) const ENABLED: u64 = xstate::SSE | xstate::AVX;

/// Bits of a thunk op's `aux`; the size of the memory operand stands above them.
pub(crate) mod aux {
    pub const ALIGNED: u16 = 1 << 0;
    /// The segment of the operand, of VCVTPS2PH, is still to be checked; and the address has 16 bits.
    pub const SEGMENTED: u16 = 1 << 1;
    pub const SHORT: u16 = 1 << 6;
    pub const MXCSR: u16 = 1 << 2;
    pub const FLAGS: u16 = 1 << 3;
    /// VCVTPS2PH, of four elements or eight.
    pub const HALF: u16 = 1 << 4;
    pub const HALF_WIDE: u16 = 1 << 5;
    pub const WRITE: u16 = 1 << 7;
    pub const SIZE_SHIFT: u16 = 8;
}

/// A thunk op's `imm`: the entry, and above it the slots of operands 2 and 3.
pub(crate) const ENTRY: u64 = (1 << 48) - 1;

/// Bits of the `aux` of gathers and masked moves.
mod element {
    /// Elements have 8 bytes rather than 4.
    pub const WIDE: u16 = 1 << 0;
    /// Indices have.
    pub const WIDE_INDEX: u16 = 1 << 1;
    pub const STORE: u16 = 1 << 2;
    /// Four bits: how many there are.
    pub const COUNT_SHIFT: u16 = 4;
    /// Two bits: the scale of the indices.
    pub const SCALE_SHIFT: u16 = 8;
    /// Four bits: the register of the indices.
    pub const INDEX_SHIFT: u16 = 10;
    /// Two bits: how many times 16 bytes the longest of a gather's registers has.
    pub const LENGTH_SHIFT: u16 = 14;
}

impl Cpu {
    /// An AVX instruction may run: #UD in real-address and virtual-8086 mode and without OSXSAVE or XCR0's bits 2 and 1, #NM
    /// with TS. SDM Vol. 2A 2.4 "AVX and SSE Instruction Exception Classification".
    #[inline(always)]
    pub(super) fn avx_ready(&mut self) -> Done {
        let (cr0, cr4) = (self.cr0, self.cr4);
        let never = !cr4.osxsave() | (!self.xcr0 & ENABLED != 0) | !cr0.pe() | (self.rflags & rf::VM != 0);
        if never | cr0.ts() {
            return Err(self.avx_unready(never));
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    pub(super) fn avx_unready(&mut self, never: bool) -> Stop {
        if never {
            return self.ud();
        }
        self.fault(7, None)
    }

    #[inline(always)]
    fn set_ymm(&mut self, at: u8, low: u128, high: u128) {
        let n = (at & 15) as usize;
        (self.fpu.xmm[n], self.fpu.ymm_hi[n]) = (low, high);
    }

    fn ymm_bytes(&self, at: u8) -> [u8; 32] {
        let n = (at & 15) as usize;
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&self.fpu.xmm[n].to_le_bytes());
        bytes[16..].copy_from_slice(&self.fpu.ymm_hi[n].to_le_bytes());
        bytes
    }

    fn set_ymm_bytes(&mut self, at: u8, bytes: &[u8; 32]) {
        let half = |from: usize| u128::from_le_bytes(core::array::from_fn(|i| bytes[from + i]));
        self.set_ymm(at, half(0), half(16));
    }

    /// `S` bytes, 16 or 32, from memory to register `o.dst`.
    #[inline(always)]
    fn load_ymm<const S: u8>(&mut self, o: &Op, linear: u64) -> Done {
        let e = self.tlb.entry(linear);
        let x = linear ^ e.read;
        if x <= 0x1000 - S as u64 {
            let p = (e.host + x) as *const u128;
            // SAFETY: A matching tag means `host` is a page of guest RAM, and the access ends within it.
            let (low, high) = unsafe {
                let low = p.read_unaligned();
                (low, if S == 32 { p.add(1).read_unaligned() } else { 0 })
            };
            self.set_ymm(o.dst, low, high);
            return Ok(());
        }
        self.load_ymm_slow(o, linear, S)
    }

    #[cold]
    #[inline(never)]
    fn load_ymm_slow(&mut self, o: &Op, linear: u64, size: u8) -> Done {
        let mut bytes = [0; 32];
        self.read_bytes(o, linear, &mut bytes[..size as usize])?;
        self.set_ymm_bytes(o.dst, &bytes);
        Ok(())
    }

    /// `S` bytes, 16 or 32, from register `o.src` to memory.
    #[inline(always)]
    fn store_ymm<const S: u8>(&mut self, o: &Op, linear: u64) -> Done {
        let e = self.tlb.entry(linear);
        let x = linear ^ e.write;
        if x <= 0x1000 - S as u64 {
            let p = (e.host + x) as *mut u128;
            let n = (o.src & 15) as usize;
            // SAFETY: As in `load_ymm`.
            unsafe {
                p.write_unaligned(self.fpu.xmm[n]);
                if S == 32 {
                    p.add(1).write_unaligned(self.fpu.ymm_hi[n]);
                }
            }
            return Ok(());
        }
        self.store_ymm_slow(o, linear, S)
    }

    #[cold]
    #[inline(never)]
    fn store_ymm_slow(&mut self, o: &Op, linear: u64, size: u8) -> Done {
        let bytes = self.ymm_bytes(o.src);
        self.write_bytes(o, linear, &bytes[..size as usize])
    }

    /// Executes the thunk of `o`.
    #[inline(never)]
    fn vex(&mut self, o: &Op) -> Done {
        self.avx_ready()?;
        let size = (o.aux >> aux::SIZE_SHIFT) as usize;
        if size == 0 {
            return self.call_vex(o, core::ptr::null_mut());
        }
        let linear = self.ea(o);
        let mut buffer = Buffer([0; 64]);
        if o.aux & aux::SEGMENTED != 0 {
            self.call_vex(o, buffer.0.as_mut_ptr())?;
            let mask = if o.aux & aux::SHORT != 0 { 0xffff } else { 0xffff_ffff };
            let linear = self.segmented(o.seg as usize, linear & mask, size as u64, true)?;
            return self.write_bytes(o, linear, &buffer.0[..size]);
        }
        if o.aux & aux::ALIGNED != 0 {
            self.aligned(linear, size as u64)?;
        }
        let write = o.aux & aux::WRITE != 0;
        let e = self.tlb.entry(linear);
        let x = linear ^ if write { e.write } else { e.read };
        if x <= 0x1000 - size as u64 {
            return self.call_vex(o, (e.host + x) as *mut u8);
        }
        if write {
            // VCVTPS2PH converts, and raises its exceptions, before its operand faults; the others have none.
            self.call_vex(o, buffer.0.as_mut_ptr())?;
            return self.write_bytes(o, linear, &buffer.0[..size]);
        }
        self.read_bytes(o, linear, &mut buffer.0[..size])?;
        self.call_vex(o, buffer.0.as_mut_ptr())
    }

    #[inline(always)]
    fn call_vex(&mut self, o: &Op, memory: *mut u8) -> Done {
        let thunk = Thunk {
            // SAFETY: `lower_thunk` put a thunk's entry there.
            entry: unsafe { core::mem::transmute::<usize, Entry>((o.imm & ENTRY) as usize) },
            slots: [
                Slot(o.dst),
                Slot(o.src),
                Slot((o.imm >> 48) as u8),
                Slot((o.imm >> 56) as u8),
            ],
            memory: None,
            traits: Traits {
                flags: o.aux & aux::FLAGS != 0,
                mxcsr: o.aux & aux::MXCSR != 0,
                ..Traits::default()
            },
        };
        if o.aux & aux::HALF != 0 {
            self.tiny_half(o, &thunk)?;
        }
        let gprs = self.gprs();
        // SAFETY: State and registers are this processor's own; `memory` is guest RAM or a buffer, as long and as aligned as
        // the instruction wants it (`vex` checked).
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

    /// VCVTPS2PH ignores FTZ, so a thunk's way to find tiny results that are exact does not work for it: with underflow
    /// unmasked they are looked for here.
    #[inline(never)]
    fn tiny_half(&mut self, o: &Op, thunk: &Thunk) -> Done {
        let source = self.ymm_bytes(o.src & 0x3f);
        let elements = if o.aux & aux::HALF_WIDE != 0 { 8 } else { 4 };
        if !self.unmasks_underflow() || !(0..elements).any(|i| is_tiny_half(&source, i)) {
            return Ok(());
        }
        self.tiny_halves_underflow(|fpu, gprs, memory| {
            // SAFETY: As `tiny_halves_underflow` says.
            let _ = unsafe { thunk.run(fpu, gprs, memory) };
        })
    }

    pub(super) fn unmasks_underflow(&self) -> bool {
        self.fpu.mxcsr & mxcsr::UM == 0
    }

    /// VCVTPS2PH with results that are tiny and exact, and underflow unmasked: #XM. What else the instruction would flag is found by `run`,
    /// which has it run on a copy of the state, with these general registers and a buffer that is longer than any operand.
    pub(super) fn tiny_halves_underflow(&mut self, run: impl FnOnce(*mut FpuState, *mut u64, *mut u8)) -> Done {
        const UE: u32 = 1 << 4;
        let unmasked = !self.fpu.mxcsr >> 7 & mxcsr::FLAGS;
        let mut copy = self.fpu.clone();
        copy.mxcsr &= !mxcsr::FLAGS;
        let mut buffer = Buffer([0; 64]);
        run(&raw mut copy, self.gprs(), buffer.0.as_mut_ptr());
        let raised = copy.mxcsr & mxcsr::FLAGS;
        // Invalid operands and denormals come first.
        let first = raised & unmasked & 7 != 0;
        self.fpu.mxcsr |= raised | if first { 0 } else { UE };
        Err(self.simd_exception())
    }

    /// VRCPPS, VRCPSS, VRSQRTPS, VRSQRTSS: `aux` bit 0 for the square root, bit 1 for the scalar forms, bit 2 for memory, bit 3
    /// for 256 bits. The source is `src`; what a scalar form keeps comes from register `imm`.
    #[inline(never)]
    fn vex_approximate(&mut self, o: &Op) -> Done {
        self.avx_ready()?;
        let (scalar, wide) = (o.aux & 2 != 0, o.aux & 8 != 0);
        let size = match (scalar, wide) {
            (true, _) => 4,
            (false, false) => 16,
            (false, true) => 32,
        };
        let mut source = [0; 32];
        if o.aux & 4 != 0 {
            let linear = self.ea(o);
            self.read_bytes(o, linear, &mut source[..size])?;
        } else {
            source = self.ymm_bytes(o.src);
        }
        let f = if o.aux & 1 != 0 { approx::rsqrt } else { approx::rcp };
        let mut result = [0; 32];
        if scalar {
            result[..16].copy_from_slice(&self.ymm_bytes(o.imm as u8)[..16]);
        }
        for at in (0..size).step_by(4) {
            let value = u32::from_le_bytes([source[at], source[at + 1], source[at + 2], source[at + 3]]);
            result[at..at + 4].copy_from_slice(&f(value).to_le_bytes());
        }
        self.set_ymm_bytes(o.dst, &result);
        Ok(())
    }

    /// VPDPBUSD, VPDPWSSD and their saturating forms, which not every host with AVX2 has: `dst` plus the dot products of register
    /// `aux` bits 11:8 (bytes: unsigned) and `src`, or memory. `aux` bit 0 for words, bit 1 for saturation, bit 2 for memory, bit 3
    /// for 256 bits. SDM Vol. 2C "VPDPBUSD".
    #[inline(never)]
    fn dot_product(&mut self, o: &Op) -> Done {
        self.avx_ready()?;
        let size = if o.aux & 8 != 0 { 32 } else { 16 };
        let mut b = [0; 32];
        if o.aux & 4 != 0 {
            let linear = self.ea(o);
            self.read_bytes(o, linear, &mut b[..size])?;
        } else {
            b = self.ymm_bytes(o.src);
        }
        let a = self.ymm_bytes((o.aux >> 8) as u8);
        let old = self.ymm_bytes(o.dst);
        let mut result = [0; 32];
        for at in (0..size).step_by(4) {
            let products: i64 = if o.aux & 1 != 0 {
                let word = |v: &[u8; 32], k: usize| i16::from_le_bytes([v[k], v[k + 1]]) as i64;
                word(&a, at) * word(&b, at) + word(&a, at + 2) * word(&b, at + 2)
            } else {
                (at..at + 4).map(|k| a[k] as i64 * b[k] as i8 as i64).sum()
            };
            let sum = i32::from_le_bytes([old[at], old[at + 1], old[at + 2], old[at + 3]]) as i64 + products;
            let sum = if o.aux & 2 != 0 {
                sum.clamp(i32::MIN as i64, i32::MAX as i64)
            } else {
                sum
            };
            result[at..at + 4].copy_from_slice(&(sum as i32).to_le_bytes());
        }
        self.set_ymm_bytes(o.dst, &result);
        Ok(())
    }

    /// The linear address of an element at an offset in the operand's segment; `imm` is the address size.
    fn element(&mut self, o: &Op, offset: u64, size: usize, write: bool) -> Done<u64> {
        let offset = offset & u64::MAX >> (64 - 8 * o.imm as u32);
        self.segmented(o.seg as usize, offset, size as u64, write)
    }

    /// VMASKMOVPS and its like, of register `dst` under the mask in `src`: elements whose mask has its top bit clear are neither
    /// read nor written, and cannot fault. None has an alignment that #AC would check (SDM Vol. 2C "VMASKMOV").
    #[inline(never)]
    fn masked_move(&mut self, o: &Op) -> Done {
        self.avx_ready()?;
        let size = if o.aux & element::WIDE != 0 { 8 } else { 4 };
        let count = (o.aux >> element::COUNT_SHIFT & 15) as usize;
        let mask = self.ymm_bytes(o.src);
        let chosen = |i: usize| mask[size * i + size - 1] & 0x80 != 0;
        // The operand's own address wraps at its size, those of its elements at 32 bits outside 64-bit mode.
        let at = self.ea(o) & u64::MAX >> (64 - 8 * o.imm as u32);
        let reach = if self.is64() { u64::MAX } else { 0xffff_ffff };
        let mut places = [0; 8];
        for i in (0..count).filter(|&i| chosen(i)) {
            let offset = at.wrapping_add((size * i) as u64) & reach;
            places[i] = self.segmented(o.seg as usize, offset, size as u64, o.aux & element::STORE != 0)?;
        }
        if o.aux & element::STORE != 0 {
            let bytes = self.ymm_bytes(o.dst);
            let first = (0..count).find(|&i| chosen(i)).unwrap_or(0);
            let last = (0..count).rev().find(|&i| chosen(i)).unwrap_or(0);
            for i in (0..count).filter(|&i| chosen(i)) {
                let probed = self.probe_aligned(o, places[i], size, 1);
                if probed.is_err() {
                    self.masked_store_fault(places[first], places[last].wrapping_add(size as u64 - 1));
                    return probed;
                }
            }
            for i in (0..count).filter(|&i| chosen(i)) {
                self.write_aligned(o, places[i], &bytes[size * i..size * (i + 1)], 1)?;
            }
            return Ok(());
        }
        let mut bytes = [0; 32];
        for i in (0..count).filter(|&i| chosen(i)) {
            self.read_aligned(o, places[i], &mut bytes[size * i..size * (i + 1)], 1)?;
        }
        self.set_ymm_bytes(o.dst, &bytes);
        Ok(())
    }

    /// A masked store has faulted: where the page is not that of the first byte to be written, CR2 is the address of the last one.
    /// So Intel's processors; the manual does not say which address of the operand it is.
    #[cold]
    pub(super) fn masked_store_fault(&mut self, first: u64, last: u64) {
        let page_fault = self.event.is_some_and(|event| event.vector == 14);
        if page_fault && (self.cr2 ^ first) >> 12 != 0 {
            self.cr2 = last;
        }
    }

    /// VGATHERDPS and its like, into `dst` under the mask in `src`: from the first element to the last, each with its mask
    /// cleared when it is there, so that a fault in between leaves what a restart goes on from (SDM Vol. 2C "VGATHERDPS"): the rest
    /// of the mask, each element all ones or zero, and of a short register an upper half that its first element has cleared; of bits
    /// 511:256 those of the mask, and with the first element those of `dst` (so an Intel CPU, Cascade Lake).
    #[inline(never)]
    fn gather(&mut self, o: &Op) -> Done {
        self.avx_ready()?;
        let size = if o.aux & element::WIDE != 0 { 8 } else { 4 };
        let index_size = if o.aux & element::WIDE_INDEX != 0 { 8 } else { 4 };
        let count = (o.aux >> element::COUNT_SHIFT & 15) as usize;
        let scale = o.aux >> element::SCALE_SHIFT & 3;
        let indices = self.ymm_bytes((o.aux >> element::INDEX_SHIFT & 15) as u8);
        let base = self.ea(o);
        let old = self.ymm_bytes(o.src);
        // All of the registers, of which wide indices of narrow elements leave a part unused.
        let all = (o.aux >> element::LENGTH_SHIFT) as usize * 16;
        let mut mask = [0; 32];
        for i in 0..all / size {
            let all = (old[size * i + size - 1] as i8 >> 7) as u8;
            mask[size * i..size * (i + 1)].fill(all);
        }
        let mut result = self.ymm_bytes(o.dst);
        let mut any = false;
        for i in 0..count {
            if mask[size * i] == 0 {
                continue;
            }
            let at = index_size * i;
            let index = if index_size == 8 {
                i64::from_le_bytes(core::array::from_fn(|k| indices[at + k]))
            } else {
                i32::from_le_bytes(core::array::from_fn(|k| indices[at + k])) as i64
            };
            let offset = base.wrapping_add((index << scale) as u64);
            let mut bytes = [0; 8];
            let read = match self.element(o, offset, size, false) {
                Ok(linear) => self.read_bytes(o, linear, &mut bytes[..size]),
                Err(stop) => Err(stop),
            };
            if let Err(stop) = read {
                self.set_ymm_bytes(o.src, &mask);
                self.set_ymm_bytes(o.dst, &result);
                self.fpu.clear_zmm_upper((o.src & 15) as usize);
                if any {
                    self.fpu.clear_zmm_upper((o.dst & 15) as usize);
                }
                return Err(stop);
            }
            any = true;
            result[size * i..size * (i + 1)].copy_from_slice(&bytes[..size]);
            result[all..].fill(0);
            mask[size * i..size * (i + 1)].fill(0);
        }
        result[size * count..].fill(0);
        self.set_ymm(o.src, 0, 0);
        self.set_ymm_bytes(o.dst, &result);
        Ok(())
    }

    /// How many registers VZEROALL and VZEROUPPER clear: outside 64-bit mode there are eight.
    pub(super) fn vector_registers(&self) -> usize {
        if self.is64() { 16 } else { 8 }
    }
}

/// Whether single-precision element `i` of a source is tiny and exact as a half: below 2^-14, and a multiple of 2^-24.
pub(super) fn is_tiny_half(source: &[u8], i: usize) -> bool {
    let value = f32::from_le_bytes(core::array::from_fn(|k| source[4 * i + k])).abs();
    value != 0.0 && value < 6.103_515_6e-5 && (value * 16_777_216.0).fract() == 0.0
}

body! {
    /// The checks of an AVX instruction ahead of its operand's segment checks.
    Ready(c, _o) {
        c.avx_ready()
    }
    /// VEX in real-address and virtual-8086 mode, for instructions on general registers.
    ReadyVex(c, _o) {
        if c.protected() {
            return Ok(());
        }
        Err(c.ud())
    }
    /// A thunk.
    Vex(c, o) [Form::Vex] {
        c.vex(o)
    }
    /// Between registers, of `S` bytes.
    Move<S>(c, o) [Form::MoveYmm(S)] {
        c.avx_ready()?;
        let n = (o.src & 15) as usize;
        let (low, high) = (c.fpu.xmm[n], c.fpu.ymm_hi[n]);
        c.set_ymm(o.dst, low, if S == 32 { high } else { 0 });
        Ok(())
    }
    /// `S` bytes, with `A` aligned.
    Load<A, S>(c, o) [Form::LoadYmm(A != 0, S)] {
        c.avx_ready()?;
        let linear = c.ea(o);
        if A != 0 {
            c.aligned(linear, S as u64)?;
        }
        c.load_ymm::<S>(o, linear)
    }
    Store<A, S>(c, o) [Form::StoreYmm(A != 0, S)] {
        c.avx_ready()?;
        let linear = c.ea(o);
        if A != 0 {
            c.aligned(linear, S as u64)?;
        }
        c.store_ymm::<S>(o, linear)
    }
    /// VMOVD, VMOVQ, VMOVSS, VMOVSD: `S` bytes, the rest of the register becomes zero.
    LoadLow<S>(c, o) [Form::LoadLowYmm(S)] {
        c.avx_ready()?;
        let linear = c.ea(o);
        let v = c.load::<S>(o, linear)?;
        c.set_ymm(o.dst, v as u128, 0);
        Ok(())
    }
    StoreLow<S>(c, o) [Form::StoreLowYmm(S)] {
        c.avx_ready()?;
        let linear = c.ea(o);
        let v = c.fpu.xmm[(o.src & 15) as usize] as u64;
        c.store::<S>(o, linear, v)
    }
    FromGpr<S>(c, o) [Form::YmmFromReg(S)] {
        c.avx_ready()?;
        let v = c.get::<S>(o.src) as u128;
        c.set_ymm(o.dst, v, 0);
        Ok(())
    }
    ToGpr<S>(c, o) [Form::RegFromYmm(S)] {
        c.avx_ready()?;
        let v = c.fpu.xmm[(o.src & 15) as usize] as u64;
        c.set::<S>(o.dst, v);
        Ok(())
    }
    /// VPAND, VPANDN, VPOR, VPXOR and their twins between registers `src` and `base`.
    Logic<OP, S>(c, o) [Form::LogicYmm(OP, S)] {
        c.avx_ready()?;
        let (n, m) = ((o.src & 15) as usize, (o.base & 15) as usize);
        let f = |a: u128, b: u128| match OP { AND => a & b, ANDN => !a & b, OR => a | b, _ => a ^ b };
        let low = f(c.fpu.xmm[n], c.fpu.xmm[m]);
        let high = if S == 32 { f(c.fpu.ymm_hi[n], c.fpu.ymm_hi[m]) } else { 0 };
        c.set_ymm(o.dst, low, high);
        Ok(())
    }
    ZeroUpper(c, _o) [Form::ZeroUpper] {
        c.avx_ready()?;
        let n = c.vector_registers();
        c.fpu.ymm_hi[..n].fill(0);
        Ok(())
    }
    ZeroAll(c, _o) {
        c.avx_ready()?;
        let n = c.vector_registers();
        c.fpu.xmm[..n].fill(0);
        c.fpu.ymm_hi[..n].fill(0);
        Ok(())
    }
    /// Bits 511:256 of register `dst`.
    ClearZmmUpper(c, o) [Form::ClearZmmUpper] {
        c.fpu.clear_zmm_upper((o.dst & 15) as usize);
        Ok(())
    }
    /// Those of all registers that VZEROALL and VZEROUPPER reach.
    ClearAllZmmUpper(c, _o) {
        let n = c.vector_registers();
        c.fpu.load_zmm_hi256(None, n);
        Ok(())
    }
    Approximate(c, o) {
        c.vex_approximate(o)
    }
    DotProduct(c, o) {
        c.dot_product(o)
    }
    MaskedMove(c, o) {
        c.masked_move(o)
    }
    Gather(c, o) {
        c.gather(o)
    }
    /// VMASKMOVDQU.
    MaskedStore(c, o) {
        c.avx_ready()?;
        c.masked_store(o)
    }
    Ldmxcsr(c, o) {
        c.avx_ready()?;
        let linear = c.ea(o);
        let v = c.load::<4>(o, linear)?;
        match c.fpu.ldmxcsr(v as u32) {
            Ok(()) => Ok(()),
            Err(BadImage) => Err(c.gp(0)),
        }
    }
    Stmxcsr(c, o) {
        c.avx_ready()?;
        let linear = c.ea(o);
        let v = c.fpu.mxcsr as u64;
        c.store::<4>(o, linear, v)
    }
}

fn number(r: Register) -> u8 {
    r.number() as u8
}

/// Lowers an instruction with a VEX prefix; on a model with AVX-512 what it writes ends at bit 511 of its register.
pub(crate) fn lower(l: &mut Lower) -> End {
    let end = lower_ymm(l);
    if !l.features.avx512f() || end == End::Closed {
        return end;
    }
    let i = l.i;
    let all = matches!(i.mnemonic(), M::Vzeroupper | M::Vzeroall);
    if all {
        l.emit(chain::<ClearAllZmmUpper>(), |_| ());
    } else if i.op_count() > 0 && l.is_reg(0) && is_vector(i.op0_register()) && writes_first(i) {
        let dst = number(i.op0_register());
        l.emit(chain::<ClearZmmUpper>(), |o| o.dst = dst);
        if i.is_vsib() {
            let mask = number(i.op2_register());
            l.emit(chain::<ClearZmmUpper>(), |o| o.dst = mask);
        }
    } else if matches!(i.mnemonic(), M::Vpcmpestrm | M::Vpcmpestrm64 | M::Vpcmpistrm) {
        // The mask goes to XMM0.
        l.emit(chain::<ClearZmmUpper>(), |o| o.dst = 0);
    }
    End::Open
}

fn is_vector(r: Register) -> bool {
    r.is_xmm() || r.is_ymm()
}

/// The compares that set flags have a vector register as operand 0 and leave it alone.
fn writes_first(i: &iced_x86::Instruction) -> bool {
    !matches!(
        i.mnemonic(),
        M::Vptest
            | M::Vtestps
            | M::Vtestpd
            | M::Vcomiss
            | M::Vcomisd
            | M::Vucomiss
            | M::Vucomisd
            | M::Vpcmpestri
            | M::Vpcmpestri64
            | M::Vpcmpestrm
            | M::Vpcmpestrm64
            | M::Vpcmpistri
            | M::Vpcmpistrm
            | M::Vmaskmovdqu
    )
}

fn lower_ymm(l: &mut Lower) -> End {
    let i = l.i;
    // Where an address can fault by its segment, #UD and #NM come first.
    if l.segment_checks() {
        l.emit(chain::<Ready>(), |_| ());
    }
    match i.mnemonic() {
        M::Vzeroupper => l.emit(chain::<ZeroUpper>(), |_| ()),
        M::Vzeroall => l.emit(chain::<ZeroAll>(), |_| ()),
        M::Vldmxcsr => {
            let m = l.mem(4, false);
            l.emit_mem(chain::<Ldmxcsr>(), m, |_| ());
        }
        M::Vstmxcsr => {
            let m = l.mem(4, true);
            l.emit_mem(chain::<Stmxcsr>(), m, |_| ());
        }
        M::Vmaskmovdqu => {
            let (dst, src) = (number(i.op_register(1)), number(i.op_register(2)));
            let (seg, size) = (l.segment(), l.address_size());
            l.emit(chain::<MaskedStore>(), |o| {
                (o.dst, o.src, o.seg, o.imm) = (dst, src, seg, size as u64);
            });
        }
        M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq => lower_masked(l),
        M::Vrcpps | M::Vrcpss | M::Vrsqrtps | M::Vrsqrtss => lower_approximate(l),
        M::Vpdpbusd | M::Vpdpbusds | M::Vpdpwssd | M::Vpdpwssds => lower_dot_product(l),
        _ if i.is_vsib() => lower_gather(l),
        _ => {
            if !lower_move(l) {
                return match l.vectors {
                    Vectors::Host if thunk::host_executes(i) => lower_thunk(l, thunk::prepare(i)),
                    Vectors::Host | Vectors::Portable if thunk::halved(i) => lower_thunk(l, thunk::prepare_halved(i)),
                    _ => super::portable::lower(l),
                };
            }
        }
    }
    End::Open
}

/// The operands of gathers and masked moves: elements are found in the segment one by one.
fn elements(l: &mut Lower, f: Handler, set: impl FnOnce(&mut Op)) {
    let (seg, size) = (l.segment(), l.address_size());
    let m = l.sum();
    l.emit_mem(f, m, |o| {
        (o.seg, o.imm) = (seg, size as u64);
        set(o);
    });
}

fn lower_masked(l: &mut Lower) {
    let i = l.i;
    let wide = matches!(i.mnemonic(), M::Vmaskmovpd | M::Vpmaskmovq);
    let store = l.is_mem(0);
    let (data, mask) = (i.op_register(if store { 2 } else { 0 }), i.op_register(1));
    let count = data.size() / if wide { 8 } else { 4 };
    let aux = count_bits(count, wide) | if store { element::STORE } else { 0 };
    elements(l, chain::<MaskedMove>(), |o| {
        (o.dst, o.src, o.aux) = (number(data), number(mask), aux);
    });
}

fn count_bits(count: usize, wide: bool) -> u16 {
    (count as u16) << element::COUNT_SHIFT | if wide { element::WIDE } else { 0 }
}

fn lower_gather(l: &mut Lower) {
    let i = l.i;
    let (dst, mask, index) = (i.op_register(0), i.op_register(2), i.memory_index());
    let wide = matches!(
        i.mnemonic(),
        M::Vgatherdpd | M::Vgatherqpd | M::Vpgatherdq | M::Vpgatherqq
    );
    let wide_index = matches!(
        i.mnemonic(),
        M::Vgatherqps | M::Vgatherqpd | M::Vpgatherqd | M::Vpgatherqq
    );
    let count = (dst.size() / if wide { 8 } else { 4 }).min(index.size() / if wide_index { 8 } else { 4 });
    let scale = i.memory_index_scale().trailing_zeros() as u16;
    let aux = count_bits(count, wide)
        | if wide_index { element::WIDE_INDEX } else { 0 }
        | scale << element::SCALE_SHIFT
        | (number(index) as u16) << element::INDEX_SHIFT
        | (dst.size().max(index.size()) as u16 / 16) << element::LENGTH_SHIFT;
    elements(l, chain::<Gather>(), |o| {
        (o.dst, o.src, o.aux) = (number(dst), number(mask), aux);
    });
}

fn lower_approximate(l: &mut Lower) {
    let i = l.i;
    let scalar = matches!(i.mnemonic(), M::Vrcpss | M::Vrsqrtss);
    let root = matches!(i.mnemonic(), M::Vrsqrtps | M::Vrsqrtss);
    let dst = i.op_register(0);
    let source = if scalar { 2 } else { 1 };
    let keeps = number(i.op_register(1)) as u64;
    let aux = root as u16 | (scalar as u16) << 1 | (dst.is_ymm() as u16) << 3;
    if l.is_mem(source) {
        let size = i.memory_size().size() as u8;
        let m = l.mem(size, false);
        l.emit_mem(chain::<Approximate>(), m, |o| {
            (o.dst, o.aux, o.imm) = (number(dst), aux | 4, keeps);
        });
    } else {
        let src = number(i.op_register(source));
        l.emit(chain::<Approximate>(), |o| {
            (o.dst, o.src, o.aux, o.imm) = (number(dst), src, aux, keeps);
        });
    }
}

fn lower_dot_product(l: &mut Lower) {
    let i = l.i;
    let words = matches!(i.mnemonic(), M::Vpdpwssd | M::Vpdpwssds);
    let saturates = matches!(i.mnemonic(), M::Vpdpbusds | M::Vpdpwssds);
    let (dst, wide) = (number(i.op_register(0)), i.op_register(0).is_ymm());
    let first = number(i.op_register(1)) as u16;
    let aux = words as u16 | (saturates as u16) << 1 | (wide as u16) << 3 | first << 8;
    if l.is_mem(2) {
        let m = l.mem(if wide { 32 } else { 16 }, false);
        l.emit_mem(chain::<DotProduct>(), m, |o| (o.dst, o.aux) = (dst, aux | 4));
    } else {
        let src = number(i.op_register(2));
        l.emit(chain::<DotProduct>(), |o| (o.dst, o.src, o.aux) = (dst, src, aux));
    }
}

/// The moves and the logic that have handlers of their own.
fn lower_move(l: &mut Lower) -> bool {
    let i = l.i;
    let wide = i.op0_register().is_ymm() || i.op1_register().is_ymm();
    macro_rules! by_width {
        ($t:ident $(, $c:expr)*) => {
            if wide {
                chain::<$t<$({ $c },)* 32>>()
            } else {
                chain::<$t<$({ $c },)* 16>>()
            }
        };
    }
    let (load, store, size): (Handler, Handler, u8) = match i.mnemonic() {
        M::Vmovaps | M::Vmovapd | M::Vmovdqa | M::Vmovntdqa | M::Vmovntps | M::Vmovntpd | M::Vmovntdq => {
            (by_width!(Load, 1), by_width!(Store, 1), if wide { 32 } else { 16 })
        }
        M::Vmovups | M::Vmovupd | M::Vmovdqu | M::Vlddqu => {
            (by_width!(Load, 0), by_width!(Store, 0), if wide { 32 } else { 16 })
        }
        M::Vmovss | M::Vmovd => (chain::<LoadLow<4>>(), chain::<StoreLow<4>>(), 4),
        M::Vmovsd | M::Vmovq => (chain::<LoadLow<8>>(), chain::<StoreLow<8>>(), 8),
        M::Vpand | M::Vandps | M::Vandpd if l.is_reg(2) => return logic(l, by_width!(Logic, AND)),
        M::Vpandn | M::Vandnps | M::Vandnpd if l.is_reg(2) => return logic(l, by_width!(Logic, ANDN)),
        M::Vpor | M::Vorps | M::Vorpd if l.is_reg(2) => return logic(l, by_width!(Logic, OR)),
        M::Vpxor | M::Vxorps | M::Vxorpd if l.is_reg(2) => return logic(l, by_width!(Logic, XOR)),
        _ => return false,
    };
    let vector = |n: u32| {
        let r = i.op_register(n);
        i.op_kind(n) == OpKind::Register && (r.is_xmm() || r.is_ymm())
    };
    if size >= 16 && !matches!(i.mnemonic(), M::Vmovups | M::Vmovupd | M::Vmovdqu | M::Vlddqu) {
        l.alignment_first(size);
    }
    if l.is_mem(1) {
        let dst = number(i.op_register(0));
        let m = l.mem(size, false);
        l.emit_mem(load, m, |o| o.dst = dst);
    } else if l.is_mem(0) {
        let src = number(i.op_register(1));
        let m = l.mem(size, true);
        l.emit_mem(store, m, |o| o.src = src);
    } else if i.op_count() != 2 || matches!(i.mnemonic(), M::Vmovq) && vector(0) && vector(1) {
        // VMOVSS and VMOVSD between registers have three, VMOVQ takes half of one.
        return false;
    } else if !vector(0) {
        let (dst, src) = (l.reg(0), number(i.op_register(1)));
        let f: Handler = if size == 8 {
            chain::<ToGpr<8>>()
        } else {
            chain::<ToGpr<4>>()
        };
        l.emit(f, |o| (o.dst, o.src) = (dst, src));
    } else if !vector(1) {
        let (dst, src) = (number(i.op_register(0)), l.reg(1));
        let f: Handler = if size == 8 {
            chain::<FromGpr<8>>()
        } else {
            chain::<FromGpr<4>>()
        };
        l.emit(f, |o| (o.dst, o.src) = (dst, src));
    } else {
        let (dst, src) = (number(i.op_register(0)), number(i.op_register(1)));
        l.emit(by_width!(Move), |o| (o.dst, o.src) = (dst, src));
    }
    true
}

fn logic(l: &mut Lower, f: Handler) -> bool {
    let [dst, a, b] = [0, 1, 2].map(|n| number(l.i.op_register(n)));
    l.emit(f, |o| (o.dst, o.src, o.base) = (dst, a, b));
    true
}

fn lower_thunk(l: &mut Lower, thunk: Result<Thunk, NoThunk>) -> End {
    let Ok(thunk) = thunk else {
        return l.ud();
    };
    let entry = thunk.entry as usize as u64;
    if entry & !ENTRY != 0 {
        return l.ud();
    }
    let mut bits = 0;
    for (bit, set) in [
        (aux::MXCSR, thunk.traits.mxcsr),
        (aux::FLAGS, thunk.traits.flags),
        (aux::HALF, l.i.mnemonic() == M::Vcvtps2ph),
        (aux::HALF_WIDE, l.i.code() == Code::VEX_Vcvtps2ph_xmmm128_ymm_imm8),
    ] {
        if set {
            bits |= bit;
        }
    }
    let set = |o: &mut Op| {
        (o.dst, o.src) = (thunk.slots[0].0, thunk.slots[1].0);
        o.imm = entry | (thunk.slots[2].0 as u64) << 48 | (thunk.slots[3].0 as u64) << 56;
    };
    let Some(memory) = thunk.memory else {
        l.emit(chain::<Vex>(), |o| {
            set(o);
            o.aux = bits;
        });
        return End::Open;
    };
    bits |= (memory.size as u16) << aux::SIZE_SHIFT;
    if memory.alignment > 1 {
        bits |= aux::ALIGNED;
        l.alignment_first(memory.size);
    }
    if memory.write {
        bits |= aux::WRITE;
    }
    let m = if l.i.mnemonic() == M::Vcvtps2ph {
        let (m, address) = l.mem_checked_later(memory.size);
        bits |= match address {
            0 => 0,
            2 => aux::SEGMENTED | aux::SHORT,
            _ => aux::SEGMENTED,
        };
        m
    } else {
        l.mem(memory.size, memory.write)
    };
    l.emit_mem(chain::<Vex>(), m, |o| {
        set(o);
        o.aux = bits;
    });
    End::Open
}
