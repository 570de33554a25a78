//! MUL, IMUL, DIV, IDIV, CBW, CWDE, CDQE, CWD, CDQ, CQO.

use iced_x86::Mnemonic as M;

use crate::Undefined;
use crate::cpu::{Cpu, slot};
use crate::exec::host;
use crate::exec::mov::extend;
use crate::flags::{CF, OF, TEST, ZF, alu, from_rflags, to_rflags};
use crate::lower::{End, Lower, body, sized, sized_wide};
use crate::op::{Done, Op, chain};
use crate::translate::Form;

/// The flags after a multiplication (`undefined::multiply`).
#[inline(always)]
fn flags<const S: u8>(low: u64, carry: bool) -> u64 {
    alu::<TEST, S>(low, low, 0).1 & !(ZF | CF | OF) | if carry { CF | OF } else { 0 }
}

/// The product of RAX's lower part and `b`: low and high half. `G` 1: signed.
#[inline(always)]
fn product<const G: u8, const S: u8>(a: u64, b: u64) -> (u64, u64) {
    if S == 8 {
        let p = if G != 0 {
            (a as i64 as i128 * b as i64 as i128) as u128
        } else {
            a as u128 * b as u128
        };
        return (p as u64, (p >> 64) as u64);
    }
    let p = if G != 0 {
        (extend::<S>(a) as i64).wrapping_mul(extend::<S>(b) as i64) as u64
    } else {
        a.wrapping_mul(b)
    };
    let bits = 8 * S as u32;
    let mask = u64::MAX >> (64 - bits);
    (p & mask, p >> bits & mask)
}

/// Whether the lower half does not stand for the whole product.
#[inline(always)]
fn carries<const G: u8, const S: u8>(low: u64, high: u64) -> bool {
    if G == 0 {
        high != 0
    } else {
        high != ((extend::<S>(low) as i64) >> 63) as u64 & u64::MAX >> (64 - 8 * S as u32)
    }
}

body! {
    /// MUL and IMUL of the accumulator. `H` 1: flags from the host.
    Wide<G, H, S>(c, o) [if H == 0 { Form::Multiply(G != 0, S) } else { Form::Other }] {
        let (a, b) = (c.get::<S>(slot::RAX), c.get::<S>(o.src));
        let (low, high) = product::<G, S>(a, b);
        c.nf = if H != 0 {
            from_rflags(host::multiply(G != 0, 8 * S as u32, a, b, to_rflags(c.nf)))
        } else {
            flags::<S>(low, carries::<G, S>(low, high))
        };
        if S == 1 {
            c.set::<2>(slot::RAX, high << 8 | low);
        } else {
            c.set::<S>(slot::RAX, low);
            c.set::<S>(slot::RDX, high);
        }
        Ok(())
    }
    /// IMUL with two operands.
    Truncated<H, S>(c, o) [if H == 0 { Form::Product(S) } else { Form::Other }] {
        let (a, b) = (c.get::<S>(o.dst), c.get::<S>(o.src));
        let r = truncated::<H, S>(c, a, b);
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// IMUL with an immediate.
    TruncatedImm<H, S>(c, o) [if H == 0 { Form::ProductImm(S) } else { Form::Other }] {
        let a = c.get::<S>(o.src);
        let r = truncated::<H, S>(c, a, o.imm);
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// DIV and IDIV.
    Div<G, S>(c, o) {
        divide::<G, S>(c, o)
    }
    /// CBW, CWDE, CDQE: the accumulator's lower half to `S` bytes.
    ExtendA<S>(c, _o) [Form::ExtendA(S)] {
        let v = match S {
            2 => extend::<1>(c.get::<1>(slot::RAX)),
            4 => extend::<2>(c.get::<2>(slot::RAX)),
            _ => extend::<4>(c.get::<4>(slot::RAX)),
        };
        c.set::<S>(slot::RAX, v);
        Ok(())
    }
    /// CWD, CDQ, CQO: the accumulator's sign to all of rDX.
    SignToD<S>(c, _o) [Form::SignToD(S)] {
        let v = extend::<S>(c.get::<S>(slot::RAX));
        c.set::<S>(slot::RDX, ((v as i64) >> 63) as u64);
        Ok(())
    }
}

#[inline(always)]
fn truncated<const H: u8, const S: u8>(c: &mut Cpu, a: u64, b: u64) -> u64 {
    let (low, carry) = if S == 8 {
        let (low, carry) = (a as i64).overflowing_mul(b as i64);
        (low as u64, carry)
    } else {
        let p = (extend::<S>(a) as i64).wrapping_mul(extend::<S>(b) as i64) as u64;
        (p, extend::<S>(p) != p)
    };
    c.nf = if H != 0 {
        from_rflags(host::multiply_truncated(8 * S as u32, a, b, to_rflags(c.nf)))
    } else {
        flags::<S>(low, carry)
    };
    low
}

/// Divides the double-size accumulator; #DE for a divisor of 0 or a quotient that does not fit (SDM Vol. 2A "DIV", "IDIV").
#[inline(never)]
fn divide<const G: u8, const S: u8>(c: &mut Cpu, o: &Op) -> Done {
    let bits = 8 * S as u32;
    let mask = u64::MAX >> (64 - bits);
    let (low, high) = if S == 1 {
        let ax = c.get::<2>(slot::RAX);
        (ax & 0xff, ax >> 8)
    } else {
        (c.get::<S>(slot::RAX), c.get::<S>(slot::RDX))
    };
    let divisor = c.get::<S>(o.src);
    let parts = if G == 0 {
        if S == 8 {
            host::divide_wide(high, low, divisor)
        } else {
            let dividend = high << bits | low;
            dividend
                .checked_div(divisor)
                .filter(|&q| q <= mask)
                .map(|q| (q, dividend % divisor))
        }
    } else if S == 8 {
        divide_signed_wide(high, low, divisor as i64)
    } else {
        let dividend = extend_wide(high << bits | low, 2 * bits);
        let divisor = extend::<S>(divisor) as i64;
        // Of 64-bit dividends the most negative by -1 overflows even here: `checked_div`.
        dividend
            .checked_div(divisor)
            .filter(|&q| extend::<S>(q as u64) as i64 == q)
            .map(|q| (q as u64, (dividend % divisor) as u64))
    };
    let Some((quotient, remainder)) = parts else {
        return Err(c.fault(0, None));
    };
    if c.undefined == Undefined::Host {
        c.nf = from_rflags(host::divide(G != 0, bits, high, low, divisor, to_rflags(c.nf)));
    }
    if S == 1 {
        c.set::<2>(slot::RAX, (remainder & 0xff) << 8 | quotient & 0xff);
    } else {
        c.set::<S>(slot::RAX, quotient);
        c.set::<S>(slot::RDX, remainder);
    }
    Ok(())
}

fn extend_wide(v: u64, bits: u32) -> i64 {
    (v << (64 - bits)) as i64 >> (64 - bits)
}

/// 128 by 64 bits, signed: by magnitudes.
fn divide_signed_wide(high: u64, low: u64, divisor: i64) -> Option<(u64, u64)> {
    let dividend = (high as u128) << 64 | low as u128;
    let negative = (high as i64) < 0;
    let magnitude = if negative { dividend.wrapping_neg() } else { dividend };
    let (q, r) = host::divide_wide((magnitude >> 64) as u64, magnitude as u64, divisor.unsigned_abs())?;
    let quotient_negative = negative != (divisor < 0);
    let limit = (1u64 << 63) - !quotient_negative as u64;
    if q > limit {
        return None;
    }
    Some((
        if quotient_negative { q.wrapping_neg() } else { q },
        if negative { r.wrapping_neg() } else { r },
    ))
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let host = l.undefined == Undefined::Host;
    match l.i.mnemonic() {
        M::Cbw => l.emit(chain::<ExtendA<2>>(), |_| ()),
        M::Cwde => l.emit(chain::<ExtendA<4>>(), |_| ()),
        M::Cdqe => l.emit(chain::<ExtendA<8>>(), |_| ()),
        M::Cwd => l.emit(chain::<SignToD<2>>(), |_| ()),
        M::Cdq => l.emit(chain::<SignToD<4>>(), |_| ()),
        M::Cqo => l.emit(chain::<SignToD<8>>(), |_| ()),
        M::Imul if l.i.op_count() > 1 => {
            let (size, dst) = (l.size(0), l.reg(0));
            let src = l.read(1, size);
            if l.i.op_count() == 3 {
                let imm = l.imm(2);
                let f = match host {
                    false => sized_wide!(size, TruncatedImm, 0),
                    true => sized_wide!(size, TruncatedImm, 1),
                };
                l.emit(f, |o| (o.dst, o.src, o.imm) = (dst, src, imm));
            } else {
                let f = match host {
                    false => sized_wide!(size, Truncated, 0),
                    true => sized_wide!(size, Truncated, 1),
                };
                l.emit(f, |o| (o.dst, o.src) = (dst, src));
            }
        }
        m => {
            let size = l.size(0);
            let src = l.read(0, size);
            let f = match (m, host) {
                (M::Mul, false) => sized!(size, Wide, 0, 0),
                (M::Mul, true) => sized!(size, Wide, 0, 1),
                (M::Imul, false) => sized!(size, Wide, 1, 0),
                (M::Imul, true) => sized!(size, Wide, 1, 1),
                (M::Div, _) => sized!(size, Div, 0),
                _ => sized!(size, Div, 1),
            };
            l.emit(f, |o| o.src = src);
        }
    }
    End::Open
}
