//! SHL, SHR, SAR, ROL, ROR, RCL, RCR, SHLD, SHRD.

use iced_x86::{Mnemonic as M, OpKind};

use crate::Undefined;
use crate::cpu::{Cpu, slot};
use crate::exec::host;
use crate::exec::mov::MovRr;
use crate::flags::{self, CF, LEFT, OF, RIGHT, RIGHT_SIGNED, TEST, alu, from_rflags, to_rflags};
use crate::lower::{End, Lower, body, sized, sized_wide};
use crate::op::Handler;
use crate::translate::Form;
use crate::undefined::{self, Shift};

// The operations as ModR/M encodes them; 6 is SHL's other name.
const ROL: u8 = 0;
const ROR: u8 = 1;
const RCL: u8 = 2;
const RCR: u8 = 3;
const SHL: u8 = 4;
const SHR: u8 = 5;
const SAR: u8 = 7;

const fn named(op: u8) -> Shift {
    match op {
        ROL => Shift::Rol,
        ROR => Shift::Ror,
        RCL => Shift::Rcl,
        RCR => Shift::Rcr,
        SHL => Shift::Shl,
        SHR => Shift::Shr,
        _ => Shift::Sar,
    }
}

/// The count as the processor takes it (SDM Vol. 2B "SAL/SAR/SHL/SHR", Operation).
const fn masked<const S: u8>(count: u64) -> u64 {
    count & if S == 8 { 63 } else { 31 }
}

/// Shifts or rotates by 1 to 31 (63) bits: the result (bits above the size undefined) and the flags.
#[inline(always)]
fn shift<const O: u8, const S: u8>(a: u64, n: u64, nf: u64) -> (u64, u64) {
    let bits = 8 * S as u64;
    if S >= 4 && matches!(O, SHL | SHR | SAR) {
        let (r, nf) = match O {
            SHL => flags::shift::<LEFT, S>(a, n),
            SHR => flags::shift::<RIGHT, S>(a, n),
            _ => flags::shift::<RIGHT_SIGNED, S>(a, n),
        };
        let of = match O {
            SHL => (a ^ a << 1) >> (bits - 1) & 1,
            SHR => a >> (bits - 1),
            _ => 0,
        };
        return (r, nf | of);
    }
    // CF is the last bit out; OF is as after the first of the one-bit shifts (`undefined::PINS`).
    let top = a >> (bits - 1);
    let (r, cf, of) = match O {
        ROL => {
            let r = match S {
                1 => (a as u8).rotate_left(n as u32) as u64,
                2 => (a as u16).rotate_left(n as u32) as u64,
                4 => (a as u32).rotate_left(n as u32) as u64,
                _ => a.rotate_left(n as u32),
            };
            (r, r, top ^ a >> (bits - 2))
        }
        ROR => {
            let r = match S {
                1 => (a as u8).rotate_right(n as u32) as u64,
                2 => (a as u16).rotate_right(n as u32) as u64,
                4 => (a as u32).rotate_right(n as u32) as u64,
                _ => a.rotate_right(n as u32),
            };
            (r, r >> (bits - 1), top ^ a)
        }
        SHL => (a << n, a << n >> bits, top ^ a >> (bits - 2)),
        SHR => (a >> n, a >> (n - 1), top),
        SAR => {
            let wide = match S {
                1 => a as i8 as i64,
                2 => a as i16 as i64,
                4 => a as i32 as i64,
                _ => a as i64,
            };
            ((wide >> n) as u64, (wide >> (n - 1)) as u64, 0)
        }
        _ => return through_carry::<O, S>(a, n, nf),
    };
    let out = (cf & 1) << 8 | of & 1;
    let kept = if matches!(O, ROL | ROR) {
        nf & !(CF | OF)
    } else {
        // TEST clears CF, OF and AF.
        alu::<TEST, S>(r, r, 0).1
    };
    (r, kept | out)
}

#[inline(never)]
fn through_carry<const O: u8, const S: u8>(a: u64, n: u64, nf: u64) -> (u64, u64) {
    let (r, flags) = undefined::shift(named(O), 8 * S as u32, a, 0, n as u8, to_rflags(nf));
    (r, from_rflags(flags))
}

/// `shift` for any count: 0 changes no flag, but a 32-bit destination is still zero-extended.
#[inline(always)]
fn shift_any<const O: u8, const S: u8>(c: &mut Cpu, a: u64, count: u64) -> u64 {
    let n = masked::<S>(count);
    if n == 0 {
        return a;
    }
    let (r, nf) = shift::<O, S>(a, n, c.nf);
    c.nf = nf;
    r
}

body! {
    /// Register by an immediate that is not 0 and already masked.
    Ri<O, S>(c, o) [Form::ShiftImm(O, S)] {
        let a = c.get::<S>(o.dst);
        let (r, nf) = shift::<O, S>(a, o.imm, c.nf);
        // These forms, and they alone, leave OF as it was (`undefined::PINS`).
        let kept = if matches!(O, ROL | ROR) && o.imm != 1 { OF } else { 0 };
        c.nf = nf & !kept | c.nf & kept;
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// Register by CL.
    Rc<O, S>(c, o) [Form::ShiftByCl(O, S)] {
        let a = c.get::<S>(o.dst);
        let n = c.get::<1>(slot::RCX);
        let r = shift_any::<O, S>(c, a, n);
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// Memory by an immediate.
    Mi<O, S>(c, o) {
        let ea = c.ea(o);
        let n = o.imm;
        c.modify::<S>(o, ea, |c, a| shift_any::<O, S>(c, a, n))
    }
    /// Memory by CL.
    Mc<O, S>(c, o) {
        let ea = c.ea(o);
        let n = c.get::<1>(slot::RCX);
        c.modify::<S>(o, ea, |c, a| shift_any::<O, S>(c, a, n))
    }
    /// SHLD (`O` 0) and SHRD (1) of a slot; `imm` is the count, CL's if it is above 255.
    Double<O, S>(c, o) {
        let n = if o.imm > 0xff { c.get::<1>(slot::RCX) } else { o.imm };
        let (a, b) = (c.get::<S>(o.dst), c.get::<S>(o.src));
        let n = masked::<S>(n);
        if n == 0 {
            c.set::<S>(o.dst, a);
            return Ok(());
        }
        if S == 2 {
            let (r, nf) = double16::<O>(a, b, n, c.nf);
            c.nf = nf;
            c.set::<S>(o.dst, r);
            return Ok(());
        }
        let bits = 8 * S as u64;
        let (r, cf, of) = if O == 0 {
            (a << n | b >> (bits - n), a >> (bits - n), a >> (bits - 1) ^ a >> (bits - 2))
        } else {
            (a >> n | b << (bits - n), a >> (n - 1), a >> (bits - 1) ^ b)
        };
        c.nf = alu::<TEST, S>(r, r, 0).1 | (cf & 1) << 8 | of & 1;
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// Any of them on a slot by the host's own instruction; `aux` says which, with `KEEPS_OF` for a rotation that may leave OF
    /// alone, `imm` as in `Double`.
    Host<S>(c, o) {
        host_shift::<S>(c, o);
        Ok(())
    }
}

#[inline(never)]
fn double16<const O: u8>(a: u64, b: u64, n: u64, nf: u64) -> (u64, u64) {
    let op = if O == 0 { Shift::Shld } else { Shift::Shrd };
    let (r, flags) = undefined::shift(op, 16, a, b, n as u8, to_rflags(nf));
    (r, from_rflags(flags))
}

const SHLD: u8 = 8;
const SHRD: u8 = 9;
/// In the `aux` of `Host`: ROL or ROR of a register by an immediate other than 1.
const KEEPS_OF: u16 = 0x100;

#[inline(never)]
fn host_shift<const S: u8>(c: &mut Cpu, o: &crate::op::Op) {
    let n = if o.imm > 0xff { c.get::<1>(slot::RCX) } else { o.imm };
    let (a, b) = (c.get::<S>(o.dst), c.get::<S>(o.src));
    let op = match o.aux as u8 {
        SHLD => Shift::Shld,
        SHRD => Shift::Shrd,
        op => named(op),
    };
    let (r, flags) = host::shift(op, 8 * S as u32, a, b, n as u8, to_rflags(c.nf));
    let kept = if o.aux & KEEPS_OF != 0 && host::rotations_keep_of() {
        OF
    } else {
        0
    };
    c.nf = from_rflags(flags) & !kept | c.nf & kept;
    c.set::<S>(o.dst, r);
}

macro_rules! by_operation {
    ($op:expr, $size:expr, $t:ident) => {
        match $op {
            ROL => sized!($size, $t, ROL),
            ROR => sized!($size, $t, ROR),
            RCL => sized!($size, $t, RCL),
            RCR => sized!($size, $t, RCR),
            SHL => sized!($size, $t, SHL),
            SHR => sized!($size, $t, SHR),
            _ => sized!($size, $t, SAR),
        }
    };
}

/// Stands for CL in `imm`.
const BY_CL: u64 = 0x100;

pub(crate) fn lower(l: &mut Lower) -> End {
    let op = match l.i.mnemonic() {
        M::Rol => ROL,
        M::Ror => ROR,
        M::Rcl => RCL,
        M::Rcr => RCR,
        M::Shr => SHR,
        M::Sar => SAR,
        M::Shld => SHLD,
        M::Shrd => SHRD,
        _ => SHL,
    };
    let size = l.size(0);
    let last = l.i.op_count() - 1;
    // What is no register is an immediate; the one-bit forms have one, too.
    let imm = match l.i.op_kind(last) {
        OpKind::Register => BY_CL,
        _ => l.imm(last) & if size == 8 { 63 } else { 31 },
    };
    let src = if last == 2 { l.reg(1) } else { slot::ZERO };
    if l.undefined == Undefined::Host {
        let by_immediate = matches!(op, ROL | ROR) && l.is_reg(0) && imm != 1 && imm != BY_CL;
        let aux = op as u16 | if by_immediate { KEEPS_OF } else { 0 };
        l.modify(0, size, |l, slot| {
            l.emit(sized!(size, Host), |o| {
                (o.dst, o.src, o.imm, o.aux) = (slot, src, imm, aux)
            })
        });
        return End::Open;
    }
    if last == 2 {
        let f = match op {
            SHLD => sized_wide!(size, Double, 0),
            _ => sized_wide!(size, Double, 1),
        };
        l.modify(0, size, |l, slot| {
            l.emit(f, |o| (o.dst, o.src, o.imm) = (slot, src, imm))
        });
        return End::Open;
    }
    if l.is_mem(0) {
        let m = l.mem(size, true);
        let f: Handler = if imm == BY_CL {
            by_operation!(op, size, Mc)
        } else {
            by_operation!(op, size, Mi)
        };
        l.emit_mem(f, m, |o| o.imm = imm);
        return End::Open;
    }
    let dst = l.reg(0);
    match imm {
        0 => l.emit(sized!(size, MovRr), |o| (o.dst, o.src) = (dst, dst)),
        BY_CL => l.emit(by_operation!(op, size, Rc), |o| o.dst = dst),
        _ => l.emit(by_operation!(op, size, Ri), |o| (o.dst, o.imm) = (dst, imm)),
    }
    End::Open
}
