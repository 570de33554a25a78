//! AVX-512: instructions with an EVEX prefix, and those on opmask registers, which have VEX prefixes.
//!
//! Thunks do the work, as for AVX ([`super::avx`]), or tables where the host has not got the instruction or the run is not to use it.
//! What is done here is what a writemask leaves out of memory: an element whose bit
//! is clear is not accessed, cannot fault and meets no data breakpoint. Where all of the operand is in one page of RAM the thunk or
//! the table leaves it out; elsewhere elements that are next to each other are accessed together, those between them not. Gathers
//! and scatters, whose elements fault one by one, are done here altogether.
// The engine core is one of the rooms where `unsafe` is allowed: thunks are called with pointers into guest RAM.
#![allow(unsafe_code)]

use iced_x86::{EncodingKind, Instruction, Mnemonic as M, OpKind};
use x86::rflags::flag as rf;

use super::avx::{ENABLED, is_tiny_half};
use super::simd::Buffer;
use crate::cpu::Cpu;
use crate::fpu::state::xstate;
use crate::fpu::thunk::{self, EvexForm, EvexThunk, Lanes, Place};
use crate::lower::{End, Lower, body};
use crate::op::{Done, Op, chain};

/// Bits of the `aux` of gathers and scatters.
mod element {
    /// Elements have 8 bytes rather than 4.
    pub const WIDE: u16 = 1 << 0;
    /// Indices have.
    pub const WIDE_INDEX: u16 = 1 << 1;
    pub const SCATTER: u16 = 1 << 2;
    /// The addresses have 8 bytes rather than 4.
    pub const WIDE_ADDRESS: u16 = 1 << 3;
    /// Five bits: how many there are.
    pub const COUNT_SHIFT: u16 = 4;
    /// Two bits: the scale of the indices.
    pub const SCALE_SHIFT: u16 = 9;
    /// Five bits: the register of the indices.
    pub const INDEX_SHIFT: u16 = 11;
}

type Zmm = [u8; 64];

impl Cpu {
    /// An instruction of AVX-512 may run: #UD in real-address and virtual-8086 mode and without OSXSAVE or XCR0's bits 7 to 5, 2 and 1,
    /// #NM with TS. SDM Vol. 2A 2.8 "Exception Classifications of EVEX-Encoded Instructions".
    #[inline(always)]
    fn evex_ready(&mut self) -> Done {
        const NEEDED: u64 = ENABLED | xstate::AVX512;
        let (cr0, cr4) = (self.cr0, self.cr4);
        let never = !cr4.osxsave() | (!self.xcr0 & NEEDED != 0) | !cr0.pe() | (self.rflags & rf::VM != 0);
        if never | cr0.ts() {
            return Err(self.avx_unready(never));
        }
        Ok(())
    }

    fn zmm_bytes(&self, number: usize) -> Zmm {
        let mut bytes = [0; 64];
        for (part, quarter) in bytes.chunks_exact_mut(16).zip(self.fpu.zmm(number)) {
            part.copy_from_slice(&quarter.to_le_bytes());
        }
        bytes
    }

    fn set_zmm_bytes(&mut self, number: usize, bytes: &Zmm) {
        let quarter = |q: usize| u128::from_le_bytes(core::array::from_fn(|i| bytes[16 * q + i]));
        self.fpu.set_zmm(number, core::array::from_fn(quarter));
    }

    /// Executes the thunk of `o`.
    #[inline(never)]
    fn evex(&mut self, o: &Op) -> Done {
        self.evex_ready()?;
        let thunk = thunk_of(o);
        let Some(memory) = thunk.form.memory else {
            return self.call_evex(&thunk, core::ptr::null_mut());
        };
        if let Some(lanes) = thunk.form.lanes {
            return self.evex_masked(o, &thunk, lanes);
        }
        let size = memory.size as usize;
        let linear = self.ea(o);
        if memory.alignment > 1 {
            self.aligned(linear, memory.alignment.into())?;
        }
        let e = self.tlb.entry(linear);
        let x = linear ^ if memory.write { e.write } else { e.read };
        if x <= 0x1000 - size as u64 {
            return self.call_evex(&thunk, (e.host + x) as *mut u8);
        }
        let mut buffer = Buffer([0; 64]);
        if memory.write {
            // VCVTPS2PH converts, and raises its exceptions, before its operand faults; the others have none.
            self.call_evex(&thunk, buffer.0.as_mut_ptr())?;
            return self.write_bytes(o, linear, &buffer.0[..size]);
        }
        self.read_bytes(o, linear, &mut buffer.0[..size])?;
        self.call_evex(&thunk, buffer.0.as_mut_ptr())
    }

    /// The same with a memory operand of which the writemask decides what is accessed.
    fn evex_masked(&mut self, o: &Op, thunk: &EvexThunk, lanes: Lanes) -> Done {
        let form = thunk.form;
        let Some(memory) = form.memory else {
            return Err(self.ud());
        };
        let offset = self.ea(o) & u64::MAX >> (64 - 8 * u32::from(form.address));
        let (size, write) = (memory.size as usize, memory.write);
        let chosen = lanes.chosen(thunk.mask(&self.fpu));
        // Chosen: where the mask leaves out everything, the alignment does not count either (an AMD host has it so; the manual does not
        // say).
        let alignment = if chosen == 0 { 1 } else { u64::from(memory.alignment) };
        if self.is64() {
            let base = if o.seg >= 4 {
                self.seg[(o.seg as usize).min(5)].base
            } else {
                0
            };
            let linear = offset.wrapping_add(base);
            if alignment > 1 {
                self.aligned(linear, alignment)?;
            }
            let e = self.tlb.entry(linear);
            let x = linear ^ if write { e.write } else { e.read };
            // What raises exceptions must not have stored anything by then.
            if x <= 0x1000 - size as u64 && !(write && form.traits.mxcsr) {
                return self.call_evex(thunk, (e.host + x) as *mut u8);
            }
        } else if alignment > 1 {
            let linear = self.segmented(o.seg as usize, offset, size as u64, write)?;
            self.aligned(linear, alignment)?;
        }
        let each = lanes.size as usize;
        // A single element is aligned or not, a vector of them has no alignment that #AC would check.
        let align = if lanes.count == 1 && matches!(each, 2 | 4 | 8) {
            each as u64
        } else {
            1
        };
        let mut buffer = Buffer([0; 64]);
        if !write {
            for (first, len) in runs(chosen, each) {
                let linear = self.run_of(o, offset, first, len, false)?;
                self.read_aligned(o, linear, &mut buffer.0[first..first + len], align)?;
            }
            return self.call_evex(thunk, buffer.0.as_mut_ptr());
        }
        self.call_evex(thunk, buffer.0.as_mut_ptr())?;
        if lanes.probes_all {
            let linear = self.run_of(o, offset, 0, size, true)?;
            self.probe_aligned(o, linear, size, 1)?;
        }
        // What is wrong with the segment of any element comes before every page fault.
        let (mut begin, mut end) = (None, 0);
        for (first, len) in runs(chosen, each) {
            let linear = self.run_of(o, offset, first, len, true)?;
            begin = begin.or(Some(linear));
            end = linear.wrapping_add(len as u64 - 1);
        }
        for (first, len) in runs(chosen, each) {
            let linear = self.run_of(o, offset, first, len, true)?;
            let probed = self.probe_aligned(o, linear, len, align);
            if probed.is_err() {
                if let Some(begin) = begin.filter(|_| lanes.count > 1 && thunk.is_masked()) {
                    self.masked_store_fault(begin, end);
                }
                return probed;
            }
        }
        for (first, len) in runs(chosen, each) {
            let linear = self.run_of(o, offset, first, len, true)?;
            self.write_aligned(o, linear, &buffer.0[first..first + len], align)?;
        }
        Ok(())
    }

    /// The linear address of `len` bytes, `first` bytes from the beginning of an operand at `offset`.
    fn run_of(&mut self, o: &Op, offset: u64, first: usize, len: usize, write: bool) -> Done<u64> {
        // The operand's own address wraps at its size, those of its elements at 32 bits outside 64-bit mode.
        let reach = if self.is64() { u64::MAX } else { 0xffff_ffff };
        let offset = offset.wrapping_add(first as u64) & reach;
        self.segmented(o.seg as usize, offset, len as u64, write)
    }

    #[inline(always)]
    fn call_evex(&mut self, thunk: &EvexThunk, memory: *mut u8) -> Done {
        if thunk.form.halves != 0 {
            self.tiny_halves(thunk)?;
        }
        let gprs = self.gprs();
        // SAFETY: State and registers are this processor's own; `memory` is guest RAM or a buffer, as long and as aligned as
        // the instruction wants it (the callers checked).
        match unsafe { thunk.run(&raw mut self.fpu, gprs, memory) } {
            Ok(flags) => {
                if thunk.form.traits.flags {
                    self.nf = crate::flags::from_rflags(flags as u64);
                }
                Ok(())
            }
            Err(_) => Err(self.simd_exception()),
        }
    }

    /// VCVTPS2PH, of which the mask leaves out elements: as `Cpu::tiny_half` of [`super::avx`].
    #[inline(never)]
    fn tiny_halves(&mut self, thunk: &EvexThunk) -> Done {
        let source = self.zmm_bytes(usize::from(thunk.places[1].0 & 31));
        let mask = thunk.mask(&self.fpu);
        let tiny = |i: usize| mask >> i & 1 != 0 && is_tiny_half(&source, i);
        if !self.unmasks_underflow() || !(0..thunk.form.halves.into()).any(tiny) {
            return Ok(());
        }
        self.tiny_halves_underflow(|fpu, gprs, memory| {
            // SAFETY: As `tiny_halves_underflow` says.
            let _ = unsafe { thunk.run(fpu, gprs, memory) };
        })
    }

    /// VGATHERDPS, VSCATTERDPS and their like, of register `dst` under opmask `src`: from the first element to the last, each with its
    /// bit of the mask cleared when it is done, so that a fault in between leaves what a restart goes on from (SDM Vol. 2C "VGATHERDPS",
    /// "VPSCATTERDD").
    #[inline(never)]
    fn gather_or_scatter(&mut self, o: &Op) -> Done {
        self.evex_ready()?;
        let size = if o.aux & element::WIDE != 0 { 8 } else { 4 };
        let index_size = if o.aux & element::WIDE_INDEX != 0 { 8 } else { 4 };
        let scatter = o.aux & element::SCATTER != 0;
        let count = usize::from(o.aux >> element::COUNT_SHIFT & 31);
        let scale = o.aux >> element::SCALE_SHIFT & 3;
        let indices = self.zmm_bytes(usize::from(o.aux >> element::INDEX_SHIFT & 31));
        let cut = if o.aux & element::WIDE_ADDRESS != 0 {
            u64::MAX
        } else {
            0xffff_ffff
        };
        let base = self.ea(o);
        let (dst, mask) = (usize::from(o.dst & 31), usize::from(o.src & 7));
        let mut data = self.zmm_bytes(dst);
        // Bits of the mask beyond the elements become zero at the end.
        let mut k = self.fpu.avx512.k[mask];
        let mut done = false;
        let mut result = Ok(());
        for i in 0..count {
            if k >> i & 1 == 0 {
                continue;
            }
            let at = index_size * i;
            let index = if index_size == 8 {
                i64::from_le_bytes(core::array::from_fn(|n| indices[at + n]))
            } else {
                i32::from_le_bytes(core::array::from_fn(|n| indices[at + n])) as i64
            };
            let offset = base.wrapping_add((index << scale) as u64) & cut;
            let element = size * i..size * (i + 1);
            result = match self.segmented(o.seg as usize, offset, size as u64, scatter) {
                Ok(linear) if scatter => self.write_bytes(o, linear, &data[element]),
                Ok(linear) => self.read_bytes(o, linear, &mut data[element]),
                Err(stop) => Err(stop),
            };
            if result.is_err() {
                break;
            }
            k &= !(1 << i);
            done = true;
        }
        if result.is_ok() {
            k = 0;
        }
        if result.is_ok() || done {
            self.fpu.avx512.k[mask] = k;
            if !scatter {
                // Of a register shorter than the vector of indices a fault leaves the rest of that length (so an Intel CPU, Cascade
                // Lake).
                let element = if result.is_ok() { size } else { size.max(index_size) };
                data[element * count..].fill(0);
                self.set_zmm_bytes(dst, &data);
            }
        }
        result
    }
}

/// The instruction of `o`.
#[inline(always)]
fn thunk_of(o: &Op) -> EvexThunk {
    EvexThunk {
        // SAFETY: `lower_thunk` put the address of a form there, and forms are kept for the life of the process.
        form: unsafe { &*(o.imm as usize as *const EvexForm) },
        places: [
            Place(o.dst),
            Place(o.src),
            Place(o.aux as u8),
            Place((o.aux >> 8) as u8),
        ],
    }
}

/// The elements that are accessed, those next to each other together: offsets and lengths in bytes.
fn runs(chosen: u64, size: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    core::iter::from_fn(move || {
        let rest = chosen.checked_shr(at)?;
        if rest == 0 {
            return None;
        }
        let first = at + rest.trailing_zeros();
        let len = (chosen >> first).trailing_ones();
        at = first + len;
        Some((first as usize * size, len as usize * size))
    })
}

body! {
    /// The checks of an instruction of AVX-512 ahead of its operand's segment checks.
    Ready(c, _o) {
        c.evex_ready()
    }
    /// A thunk.
    Evex(c, o) {
        c.evex(o)
    }
    GatherOrScatter(c, o) {
        c.gather_or_scatter(o)
    }
}

/// Whether the instruction belongs to this file.
pub(crate) fn handles(i: &Instruction) -> bool {
    let opmask = |n: u32| i.op_kind(n) == OpKind::Register && i.op_register(n).is_k();
    i.encoding() == EncodingKind::EVEX || i.encoding() == EncodingKind::VEX && (0..i.op_count()).any(opmask)
}

pub(crate) fn lower(l: &mut Lower) -> End {
    // Where an address can fault by its segment, #UD and #NM come first.
    if l.segment_checks() {
        l.emit(chain::<Ready>(), |_| ());
    }
    if l.i.is_vsib() {
        lower_elements(l);
        return End::Open;
    }
    lower_thunk(l)
}

fn lower_elements(l: &mut Lower) {
    let i = l.i;
    let scatter = l.is_mem(0);
    let (data, index) = (i.op_register(if scatter { 1 } else { 0 }), i.memory_index());
    let (mask, dst) = (i.op_mask().number() as u8, data.number() as u8);
    let wide = i.memory_size().element_size() == 8;
    let wide_index = matches!(
        i.mnemonic(),
        M::Vgatherqps
            | M::Vgatherqpd
            | M::Vpgatherqd
            | M::Vpgatherqq
            | M::Vscatterqps
            | M::Vscatterqpd
            | M::Vpscatterqd
            | M::Vpscatterqq
    );
    let count = (data.size() / if wide { 8 } else { 4 }).min(index.size() / if wide_index { 8 } else { 4 });
    let aux = if wide { element::WIDE } else { 0 }
        | if wide_index { element::WIDE_INDEX } else { 0 }
        | if scatter { element::SCATTER } else { 0 }
        | if l.address_size() == 8 {
            element::WIDE_ADDRESS
        } else {
            0
        }
        | (count as u16) << element::COUNT_SHIFT
        | (i.memory_index_scale().trailing_zeros() as u16) << element::SCALE_SHIFT
        | (index.number() as u16) << element::INDEX_SHIFT;
    let seg = l.segment();
    let m = l.sum();
    l.emit_mem(chain::<GatherOrScatter>(), m, |o| {
        (o.seg, o.dst, o.src, o.aux) = (seg, dst, mask, aux);
    });
}

fn lower_thunk(l: &mut Lower) -> End {
    let Ok(thunk) = thunk::prepare_evex(l.i, l.address_size(), l.vectors) else {
        return l.ud();
    };
    let [dst, src, third, mask] = thunk.places.map(|place| place.0);
    let set = |o: &mut Op| {
        (o.dst, o.src) = (dst, src);
        o.aux = u16::from(third) | u16::from(mask) << 8;
        o.imm = core::ptr::from_ref(thunk.form) as usize as u64;
    };
    let Some(memory) = thunk.form.memory else {
        l.emit(chain::<Evex>(), set);
        return End::Open;
    };
    if memory.alignment > 1 {
        l.alignment_first(memory.alignment);
    }
    if thunk.form.lanes.is_some() {
        let seg = l.segment();
        let m = l.sum();
        l.emit_mem(chain::<Evex>(), m, |o| {
            o.seg = seg;
            set(o);
        });
        return End::Open;
    }
    let m = l.mem(memory.size, memory.write);
    l.emit_mem(chain::<Evex>(), m, set);
    End::Open
}

#[cfg(test)]
#[path = "evex_test.rs"]
mod tests;
