//! BMI1, BMI2, ADX: general registers, most of them in VEX encoding.

use iced_x86::Mnemonic as M;

use super::avx;
use crate::Undefined;
use crate::cpu::slot;
use crate::exec::host;
use crate::exec::mov::extend;
use crate::flags::{CF, OF, SF, ZF, from_rflags, of_result, to_rflags};
use crate::lower::{End, Lower, body};
use crate::op::chain;
use crate::translate::Form;
use crate::undefined::Bmi;

/// Picks the instantiation for 4 or 8 bytes.
macro_rules! by_size {
    ($size:expr, $t:ident $(, $c:expr)*) => {
        if $size == 8 {
            chain::<$t<$({ $c },)* 8>>()
        } else {
            chain::<$t<$({ $c },)* 4>>()
        }
    };
}

pub(crate) const SARX: u8 = 0;
pub(crate) const SHLX: u8 = 1;
const SHRX: u8 = 2;

pub(crate) const ANDN: u8 = Bmi::Andn as u8;
const BEXTR: u8 = Bmi::Bextr as u8;
pub(crate) const BLSI: u8 = Bmi::Blsi as u8;
pub(crate) const BLSMSK: u8 = Bmi::Blsmsk as u8;
pub(crate) const BLSR: u8 = Bmi::Blsr as u8;
const BZHI: u8 = Bmi::Bzhi as u8;

/// The result of `K` and the flags: AF, PF and, of BEXTR, SF as `undefined::PINS` has them.
#[inline(always)]
fn extract<const K: u8, const S: u8>(a: u64, b: u64) -> (u64, u64) {
    let bits = 8 * S as u64;
    let carry = |set: bool| if set { CF } else { 0 };
    let (r, cf) = match K {
        ANDN => (!a & b, 0),
        BEXTR => {
            let (start, len) = (b & 0xff, b >> 8 & 0xff);
            let r = if start >= bits { 0 } else { a >> start };
            (if len >= bits { r } else { r & !(!0 << len) }, 0)
        }
        BLSI => (a & a.wrapping_neg(), carry(a != 0)),
        BLSMSK => (a ^ a.wrapping_sub(1), carry(a == 0)),
        BLSR => (a & a.wrapping_sub(1), carry(a == 0)),
        _ => {
            let n = b & 0xff;
            (if n >= bits { a } else { a & !(!0 << n) }, carry(n >= bits))
        }
    };
    let r = r & u64::MAX >> (64 - bits);
    let kept = if K == BEXTR { ZF } else { SF | ZF };
    (r, of_result::<S>(r) & kept | cf)
}

/// Flags that come from the host are the interpreter's.
const fn form<const H: u8>(form: Form) -> Form {
    if H == 0 { form } else { Form::Other }
}

body! {
    /// ANDN, BEXTR, BLSI, BLSMSK, BLSR, BZHI of `src` and `base`; `H` 1: flags from the host.
    Extract<K, H, S>(c, o) [form::<H>(Form::Extract(K, S))] {
        let (a, b) = (c.get::<S>(o.src), c.get::<S>(o.base));
        let (r, nf) = extract::<K, S>(a, b);
        c.nf = if H != 0 { from_rflags(host::bmi(K, S == 8, a, b, to_rflags(c.nf))) } else { nf };
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// MULX: RDX by `src`, the high half to `dst` and the low half to `base`, which comes first if they are one.
    Mulx<S>(c, o) [Form::Mulx(S)] {
        let (a, b) = (c.get::<S>(slot::RDX), c.get::<S>(o.src));
        let p = a as u128 * b as u128;
        c.set::<S>(o.base, p as u64);
        c.set::<S>(o.dst, (p >> (8 * S as u32)) as u64);
        Ok(())
    }
    /// PDEP of `src` under the mask in `base`.
    Pdep<S>(c, o) {
        let (mut v, mut mask) = (c.get::<S>(o.src), c.get::<S>(o.base));
        let mut r = 0;
        while mask != 0 {
            let bit = mask & mask.wrapping_neg();
            r |= bit & (v & 1).wrapping_neg();
            v >>= 1;
            mask ^= bit;
        }
        c.set::<S>(o.dst, r);
        Ok(())
    }
    Pext<S>(c, o) {
        let (v, mut mask) = (c.get::<S>(o.src), c.get::<S>(o.base));
        let (mut r, mut n) = (0, 0);
        while mask != 0 {
            let bit = mask & mask.wrapping_neg();
            r |= ((v & bit != 0) as u64) << n;
            n += 1;
            mask ^= bit;
        }
        c.set::<S>(o.dst, r);
        Ok(())
    }
    Rorx<S>(c, o) [Form::Rorx(S)] {
        let v = c.get::<S>(o.src);
        let n = o.imm as u32;
        let r = if S == 8 { v.rotate_right(n & 63) } else { (v as u32).rotate_right(n & 31) as u64 };
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// SARX, SHLX, SHRX of `src` by the count in `base`.
    Shift<K, S>(c, o) [Form::ShiftX(K, S)] {
        let (v, n) = (c.get::<S>(o.src), c.get::<S>(o.base) & (8 * S as u64 - 1));
        let r = match K {
            SARX => (extend::<S>(v) as i64 >> n) as u64,
            SHLX => v << n,
            _ => v >> n,
        };
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// ADCX (`F` 0) carries through CF alone, ADOX (1) through OF.
    Adx<F, S>(c, o) [Form::Adx(F, S)] {
        let carry = if F == 0 { c.nf & CF != 0 } else { c.nf & OF != 0 };
        let sum = c.get::<S>(o.dst) as u128 + c.get::<S>(o.src) as u128 + carry as u128;
        let out = (sum >> (8 * S as u32)) as u64;
        c.nf = if F == 0 { c.nf & !CF | out << 8 } else { c.nf & !OF | out };
        c.set::<S>(o.dst, sum as u64);
        Ok(())
    }
}

/// ADCX and ADOX.
pub(crate) fn lower_adx(l: &mut Lower) -> End {
    let (dst, size) = (l.reg(0), l.size(0));
    let src = l.read(1, size);
    let f = if l.i.mnemonic() == M::Adcx {
        by_size!(size, Adx, 0)
    } else {
        by_size!(size, Adx, 1)
    };
    l.emit(f, |o| (o.dst, o.src) = (dst, src));
    End::Open
}

/// Everything in VEX encoding: vectors are [`avx`]'s.
pub(crate) fn lower_vex(l: &mut Lower) -> End {
    let host = l.undefined == Undefined::Host;
    macro_rules! extract {
        ($k:expr, $size:expr) => {
            if host {
                by_size!($size, Extract, $k, 1)
            } else {
                by_size!($size, Extract, $k, 0)
            }
        };
    }
    let m = l.i.mnemonic();
    let size = if l.is_reg(0) { l.size(0) } else { 0 };
    // Which operand may be memory, which register is the other source, and the handler.
    let (memory, other, f) = match m {
        M::Andn => (2, Some(1), extract!(ANDN, size)),
        M::Bextr => (1, Some(2), extract!(BEXTR, size)),
        M::Blsi => (1, None, extract!(BLSI, size)),
        M::Blsmsk => (1, None, extract!(BLSMSK, size)),
        M::Blsr => (1, None, extract!(BLSR, size)),
        M::Bzhi => (1, Some(2), extract!(BZHI, size)),
        M::Mulx => (2, Some(1), by_size!(size, Mulx)),
        M::Pdep => (2, Some(1), by_size!(size, Pdep)),
        M::Pext => (2, Some(1), by_size!(size, Pext)),
        M::Rorx => (1, None, by_size!(size, Rorx)),
        M::Sarx => (1, Some(2), by_size!(size, Shift, SARX)),
        M::Shlx => (1, Some(2), by_size!(size, Shift, SHLX)),
        M::Shrx => (1, Some(2), by_size!(size, Shift, SHRX)),
        _ => return avx::lower(l),
    };
    if !l.is64() {
        l.emit(chain::<avx::ReadyVex>(), |_| ());
    }
    let dst = l.reg(0);
    let source = l.read(memory, size);
    let other = other.map_or(slot::ZERO, |n| l.reg(n));
    let imm = if m == M::Rorx { l.imm(2) } else { 0 };
    // ANDN, PDEP and PEXT have the operand that may be memory second.
    let (src, base) = if matches!(m, M::Andn | M::Pdep | M::Pext) {
        (other, source)
    } else {
        (source, other)
    };
    l.emit(f, |o| (o.dst, o.src, o.base, o.imm) = (dst, src, base, imm));
    End::Open
}
