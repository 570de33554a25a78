//! Vector instructions by the tables of [`crate::fpu::portable`], where thunks would have the host execute them.
//!
//! Who may execute them, where their operands are and in which order things go wrong is as in [`super::simd`] and [`super::avx`].
// The engine core is one of the rooms where `unsafe` is allowed: operands are read from guest RAM by pointer.
#![allow(unsafe_code)]

use crate::cpu::{Cpu, slot};
use crate::fpu::portable::{self, Length, Packed, Place, Strings, Vector};
use crate::fpu::thunk;
use crate::lower::{End, Lower, body};
use crate::op::{Done, Op, chain};
use iced_x86::Mnemonic as M;

/// Bits of an op's `aux`; the size of the memory operand stands above them.
mod aux {
    /// The operand must be aligned, to 16 bytes or with VEX to its size.
    pub const ALIGNED: u16 = 1 << 0;
    /// The segment of the operand, of VCVTPS2PH, is still to be checked; and the address has 16 bits.
    pub const SEGMENTED: u16 = 1 << 1;
    pub const SHORT: u16 = 1 << 2;
    /// MMX registers are involved.
    pub const MMX: u16 = 1 << 3;
    /// XMM registers are.
    pub const SSE: u16 = 1 << 4;
    /// The arithmetic flags are written.
    pub const FLAGS: u16 = 1 << 5;
    pub const WRITE: u16 = 1 << 7;
    pub const SIZE_SHIFT: u16 = 8;
}

/// What a string compare needs beyond the bits of its form.
mod string {
    pub const MASK: u64 = 1 << 48;
    pub const LENGTHS: u64 = 1 << 49;
    pub const WIDE: u64 = 1 << 50;
}

impl Cpu {
    /// An operand: memory as it was read, or a register, which is copied to `own`, whose bytes are zeros.
    #[inline(always)]
    fn operand<'a>(&self, place: Place, memory: &'a Vector, own: &'a mut Vector) -> &'a Vector {
        let number = |n: u8| usize::from(n & 15);
        match place {
            Place::None => {}
            Place::Mm(n) => own.set(0, self.fpu.mm(n.into())),
            Place::Xmm(n) => own.set(0, self.fpu.xmm[number(n)]),
            Place::Ymm(n) => {
                own.set(0, self.fpu.xmm[number(n)]);
                own.set(1, self.fpu.ymm_hi[number(n)]);
            }
            Place::General32(n) => own.set(0, self.get::<4>(n * 8)),
            Place::General64(n) => own.set(0, self.get::<8>(n * 8)),
            Place::Memory => return memory,
        }
        own
    }

    /// Writes a result to a register.
    fn set_operand(&mut self, place: Place, vex: bool, value: &Vector) {
        let number = |n: u8| usize::from(n & 15);
        match place {
            Place::None | Place::Memory => {}
            Place::Mm(n) => self.fpu.set_mm(n.into(), value.get(0)),
            Place::Xmm(n) | Place::Ymm(n) => {
                self.fpu.xmm[number(n)] = value.u128(0);
                if vex {
                    let wide = matches!(place, Place::Ymm(_));
                    self.fpu.ymm_hi[number(n)] = if wide { value.u128(1) } else { 0 };
                }
            }
            Place::General32(n) => self.set::<4>(n * 8, value.get(0)),
            Place::General64(n) => self.set::<8>(n * 8, value.get(0)),
        }
    }

    /// The memory operand, of `size` bytes.
    fn vector_from_memory(&mut self, o: &Op, linear: u64, size: usize) -> Done<Vector> {
        let mut v = Vector::ZERO;
        let size = size.min(Vector::BYTES);
        let e = self.tlb.entry(linear);
        let x = linear ^ e.read;
        if x <= 0x1000 - size as u64 {
            let p = (e.host + x) as *const u8;
            // SAFETY: A matching tag means `host` is a page of guest RAM, and the access ends within it; `size` is at most `v`'s.
            unsafe { p.copy_to_nonoverlapping(v.0.as_mut_ptr(), size) };
            return Ok(v);
        }
        self.read_bytes(o, linear, &mut v.0[..size])?;
        Ok(v)
    }

    /// Computes what `o` says, and writes what is a register.
    fn compute(&mut self, o: &Op, memory: &Vector) -> Done<Vector> {
        let form = Packed::new(o.imm, o.dst, o.src);
        if o.aux & aux::MMX != 0 {
            self.fpu.enter_mmx();
        }
        let [a, b, c] = form.sources();
        let (mut own_a, mut own_b, mut own_c) = (Vector::ZERO, Vector::ZERO, Vector::ZERO);
        let sources = [
            self.operand(a, memory, &mut own_a),
            self.operand(b, memory, &mut own_b),
            self.operand(c, memory, &mut own_c),
        ];
        let size = usize::from(o.aux >> aux::SIZE_SHIFT);
        let Some((outcome, raised)) = form.compute(sources, size, self.fpu.mxcsr) else {
            return Err(self.ud());
        };
        if raised != 0 && portable::finish(&mut self.fpu.mxcsr, raised).is_err() {
            return Err(self.simd_exception());
        }
        self.set_operand(form.destination, form.vex(), &outcome.value);
        if o.aux & aux::FLAGS != 0 {
            self.nf = crate::flags::from_rflags(outcome.flags.into());
        }
        Ok(outcome.value)
    }

    /// An instruction of legacy encoding.
    #[inline(never)]
    fn portable(&mut self, o: &Op) -> Done {
        if o.aux & aux::SSE != 0 {
            self.sse_ready()?;
        }
        if o.aux & aux::MMX != 0 {
            self.mmx_ready()?;
        }
        let size = usize::from(o.aux >> aux::SIZE_SHIFT);
        if size == 0 {
            return self.compute(o, &Vector::ZERO).map(|_| ());
        }
        let linear = self.ea(o);
        if o.aux & aux::ALIGNED != 0 {
            self.aligned(linear, 16)?;
        }
        if o.aux & aux::WRITE != 0 {
            self.probe_write(o, linear, size)?;
            let value = self.compute(o, &Vector::ZERO)?;
            return self.write_bytes(o, linear, &value.0[..size]);
        }
        let memory = self.vector_from_memory(o, linear, size)?;
        self.compute(o, &memory).map(|_| ())
    }

    /// An instruction of VEX encoding.
    #[inline(never)]
    fn portable_vex(&mut self, o: &Op) -> Done {
        self.avx_ready()?;
        let size = usize::from(o.aux >> aux::SIZE_SHIFT);
        if size == 0 {
            return self.compute(o, &Vector::ZERO).map(|_| ());
        }
        let linear = self.ea(o);
        if o.aux & aux::WRITE != 0 {
            // VCVTPS2PH converts, and raises its exceptions, before its operand faults; the others have none.
            let value = self.compute(o, &Vector::ZERO)?;
            let linear = if o.aux & aux::SEGMENTED != 0 {
                let mask = if o.aux & aux::SHORT != 0 { 0xffff } else { 0xffff_ffff };
                self.segmented(o.seg as usize, linear & mask, size as u64, true)?
            } else {
                linear
            };
            return self.write_bytes(o, linear, &value.0[..size]);
        }
        let memory = self.vector_from_memory(o, linear, size)?;
        self.compute(o, &memory).map(|_| ())
    }

    /// PCMPESTRI and its like, with `vex` or without.
    #[inline(never)]
    fn portable_strings(&mut self, o: &Op, vex: bool) -> Done {
        if vex {
            self.avx_ready()?;
        } else {
            self.sse_ready()?;
        }
        let size = usize::from(o.aux >> aux::SIZE_SHIFT);
        let memory = if size != 0 {
            let linear = self.ea(o);
            self.vector_from_memory(o, linear, size)?
        } else {
            Vector::ZERO
        };
        let form = Packed::new(o.imm, o.dst, o.src);
        let (mut own_a, mut own_b) = (Vector::ZERO, Vector::ZERO);
        let [a, b, _] = form.sources();
        let a = self.operand(a, &memory, &mut own_a).block(0);
        let b = self.operand(b, &memory, &mut own_b).block(0);
        let lengths = (o.imm & string::LENGTHS != 0).then(|| {
            [slot::RAX, slot::RDX].map(|register| {
                let whole = self.get::<8>(register);
                if o.imm & string::WIDE != 0 {
                    (whole as i64).unsigned_abs()
                } else {
                    u64::from((whole as i32).unsigned_abs())
                }
            })
        });
        let found = portable::compare_strings(a, b, form.imm(), lengths);
        if o.imm & string::MASK != 0 {
            self.set_operand(Place::Xmm(0), vex, &found.mask());
        } else {
            self.set::<8>(slot::RCX, found.index().into());
        }
        self.nf = crate::flags::from_rflags(found.flags.into());
        Ok(())
    }
}

body! {
    /// An instruction of the tables, of legacy encoding.
    Portable(c, o) {
        c.portable(o)
    }
    /// Of VEX encoding.
    PortableVex(c, o) {
        c.portable_vex(o)
    }
    /// A string compare, of either (`VEX` 1).
    PortableStrings<VEX>(c, o) {
        c.portable_strings(o, VEX != 0)
    }
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let Ok(form) = portable::prepare(l.i) else {
        return l.ud();
    };
    let sse = (0..l.i.op_count()).any(|n| l.is_reg(n) && l.i.op_register(n).is_xmm())
        || thunk::scalar_to_integer(l.i.mnemonic());
    let mut bits = 0;
    for (bit, set) in [(aux::MMX, form.mmx), (aux::FLAGS, form.flags), (aux::SSE, sse)] {
        if set {
            bits |= bit;
        }
    }
    let mut imm = form.to_bits();
    let handler = match portable::strings(l.i) {
        Strings::Compare { mask, lengths } => {
            imm |= if mask { string::MASK } else { 0 };
            imm |= match lengths {
                None => 0,
                Some(Length::Bits32) => string::LENGTHS,
                Some(Length::Bits64) => string::LENGTHS | string::WIDE,
            };
            if form.vex {
                chain::<PortableStrings<1>>()
            } else {
                chain::<PortableStrings<0>>()
            }
        }
        Strings::No if form.vex => chain::<PortableVex>(),
        Strings::No => chain::<Portable>(),
    };
    let set = |o: &mut Op| {
        (o.dst, o.src) = (form.destination.to_bits(), form.sources[0].to_bits());
        o.imm = imm;
    };
    let Some(memory) = form.memory else {
        l.emit(handler, |o| {
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
    l.emit_mem(handler, m, |o| {
        set(o);
        o.aux = bits;
    });
    End::Open
}
