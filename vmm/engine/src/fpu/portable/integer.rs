//! The tables of integer instructions, moves and shuffles.
//!
//! A row is the width of a lane, a function of lanes and a shape ([`super::lanes`]). SDM Vol. 2, each instruction's "Operation".

use iced_x86::Mnemonic as M;

use super::crypto;
use super::lanes::{
    Block, Inputs, Lane, Vector, binary, choose, horizontal, interleave, pack, pairs, rearrange, shift, shift_each,
    unary, widen,
};
use super::row::flag::{CF, ZF};
use super::row::{Compute, Outcome, Row};

/// A row whose result is a vector, from a function of the inputs.
fn value(compute: Compute) -> Option<Row> {
    Some(Row::new(compute))
}

/// `value!(shape::<T>, function)`: the shape with the function of its lanes.
macro_rules! value {
    (|$i:ident| $v:expr) => {
        value(|$i, _| Outcome::value($v))
    };
    ($shape:ident::<$($t:ty),+>, $f:expr) => {
        value(|i, _| Outcome::value($shape::<$($t),+>(i, $f)))
    };
}

/// All ones, where a comparison is true.
macro_rules! truth {
    ($t:ty, $op:tt) => {
        value!(binary::<$t>, |a, b| if a $op b { !0 } else { 0 })
    };
}

/// Both blocks of `a` and `b` through a function of 128 bits.
fn blocks(i: &Inputs, f: impl Fn(Block, Block) -> Block) -> Outcome {
    let mut out = Vector::ZERO;
    for k in 0..i.bytes.div_ceil(16) {
        out.set_block(k, f(i.a.block(k), i.b.block(k)));
    }
    Outcome::value(out)
}

/// Lane-wise arithmetic and logic.
#[rustfmt::skip] // A table.
fn arithmetic(mnemonic: M) -> Option<Row> {
    match mnemonic {
        M::Paddb => value!(binary::<u8>, u8::wrapping_add),
        M::Paddw => value!(binary::<u16>, u16::wrapping_add),
        M::Paddd => value!(binary::<u32>, u32::wrapping_add),
        M::Paddq => value!(binary::<u64>, u64::wrapping_add),
        M::Psubb => value!(binary::<u8>, u8::wrapping_sub),
        M::Psubw => value!(binary::<u16>, u16::wrapping_sub),
        M::Psubd => value!(binary::<u32>, u32::wrapping_sub),
        M::Psubq => value!(binary::<u64>, u64::wrapping_sub),
        M::Paddsb => value!(binary::<i8>, i8::saturating_add),
        M::Paddsw => value!(binary::<i16>, i16::saturating_add),
        M::Paddusb => value!(binary::<u8>, u8::saturating_add),
        M::Paddusw => value!(binary::<u16>, u16::saturating_add),
        M::Psubsb => value!(binary::<i8>, i8::saturating_sub),
        M::Psubsw => value!(binary::<i16>, i16::saturating_sub),
        M::Psubusb => value!(binary::<u8>, u8::saturating_sub),
        M::Psubusw => value!(binary::<u16>, u16::saturating_sub),
        M::Pmullw => value!(binary::<i16>, i16::wrapping_mul),
        M::Pmulld => value!(binary::<i32>, i32::wrapping_mul),
        M::Pmulhw => value!(binary::<i16>, |a, b| (i32::from(a) * i32::from(b) >> 16) as i16),
        M::Pmulhuw => value!(binary::<u16>, |a, b| (u32::from(a) * u32::from(b) >> 16) as u16),
        M::Pmulhrsw => value!(binary::<i16>, |a, b| ((i32::from(a) * i32::from(b) >> 14) + 1 >> 1) as i16),
        M::Pmuludq => value!(binary::<u64>, |a, b| u64::from(a as u32) * u64::from(b as u32)),
        M::Pmuldq => value!(binary::<i64>, |a, b| i64::from(a as i32) * i64::from(b as i32)),
        M::Pavgb => value!(binary::<u8>, |a, b| (u16::from(a) + u16::from(b) + 1 >> 1) as u8),
        M::Pavgw => value!(binary::<u16>, |a, b| (u32::from(a) + u32::from(b) + 1 >> 1) as u16),
        M::Pmaxub => value!(binary::<u8>, u8::max),
        M::Pmaxuw => value!(binary::<u16>, u16::max),
        M::Pmaxud => value!(binary::<u32>, u32::max),
        M::Pmaxsb => value!(binary::<i8>, i8::max),
        M::Pmaxsw => value!(binary::<i16>, i16::max),
        M::Pmaxsd => value!(binary::<i32>, i32::max),
        M::Pminub => value!(binary::<u8>, u8::min),
        M::Pminuw => value!(binary::<u16>, u16::min),
        M::Pminud => value!(binary::<u32>, u32::min),
        M::Pminsb => value!(binary::<i8>, i8::min),
        M::Pminsw => value!(binary::<i16>, i16::min),
        M::Pminsd => value!(binary::<i32>, i32::min),
        M::Pabsb => value!(unary::<i8>, i8::wrapping_abs),
        M::Pabsw => value!(unary::<i16>, i16::wrapping_abs),
        M::Pabsd => value!(unary::<i32>, i32::wrapping_abs),
        M::Psignb => value!(binary::<i8>, |a, b| a.wrapping_mul(b.signum())),
        M::Psignw => value!(binary::<i16>, |a, b| a.wrapping_mul(b.signum())),
        M::Psignd => value!(binary::<i32>, |a, b| a.wrapping_mul(b.signum())),
        M::Pcmpeqb => truth!(u8, ==),
        M::Pcmpeqw => truth!(u16, ==),
        M::Pcmpeqd => truth!(u32, ==),
        M::Pcmpeqq => truth!(u64, ==),
        M::Pcmpgtb => truth!(i8, >),
        M::Pcmpgtw => truth!(i16, >),
        M::Pcmpgtd => truth!(i32, >),
        M::Pcmpgtq => truth!(i64, >),
        M::Pand | M::Andps | M::Andpd => value!(binary::<u64>, |a, b| a & b),
        M::Pandn | M::Andnps | M::Andnpd => value!(binary::<u64>, |a, b| !a & b),
        M::Por | M::Orps | M::Orpd => value!(binary::<u64>, |a, b| a | b),
        M::Pxor | M::Xorps | M::Xorpd => value!(binary::<u64>, |a, b| a ^ b),
        M::Psllw => value!(shift::<u16>, |a, n| a.checked_shl(n).unwrap_or(0)),
        M::Pslld => value!(shift::<u32>, |a, n| a.checked_shl(n).unwrap_or(0)),
        M::Psllq => value!(shift::<u64>, |a, n| a.checked_shl(n).unwrap_or(0)),
        M::Psrlw => value!(shift::<u16>, |a, n| a.checked_shr(n).unwrap_or(0)),
        M::Psrld => value!(shift::<u32>, |a, n| a.checked_shr(n).unwrap_or(0)),
        M::Psrlq => value!(shift::<u64>, |a, n| a.checked_shr(n).unwrap_or(0)),
        M::Psraw => value!(shift::<i16>, |a, n| a >> n.min(15)),
        M::Psrad => value!(shift::<i32>, |a, n| a >> n.min(31)),
        M::Vpsllvd => value!(shift_each::<u32>, |a, n| a.checked_shl(n).unwrap_or(0)),
        M::Vpsllvq => value!(shift_each::<u64>, |a, n| a.checked_shl(n).unwrap_or(0)),
        M::Vpsrlvd => value!(shift_each::<u32>, |a, n| a.checked_shr(n).unwrap_or(0)),
        M::Vpsrlvq => value!(shift_each::<u64>, |a, n| a.checked_shr(n).unwrap_or(0)),
        M::Vpsravd => value!(shift_each::<i32>, |a, n| a >> n.min(31)),
        _ => None,
    }
}

/// What works on several lanes of a part together.
#[rustfmt::skip] // A table.
fn across(mnemonic: M) -> Option<Row> {
    match mnemonic {
        M::Phaddw => value!(horizontal::<u16>, u16::wrapping_add),
        M::Phaddd => value!(horizontal::<u32>, u32::wrapping_add),
        M::Phaddsw => value!(horizontal::<i16>, i16::saturating_add),
        M::Phsubw => value!(horizontal::<u16>, u16::wrapping_sub),
        M::Phsubd => value!(horizontal::<u32>, u32::wrapping_sub),
        M::Phsubsw => value!(horizontal::<i16>, i16::saturating_sub),
        M::Pmaddwd => value!(pairs::<i16, i16, i32>, |a, b| {
            let product = |k: usize| i32::from(a[k]) * i32::from(b[k]);
            product(0).wrapping_add(product(1))
        }),
        M::Pmaddubsw => value!(pairs::<u8, i8, i16>, |a, b| {
            let product = |k: usize| i32::from(a[k]) * i32::from(b[k]);
            (product(0) + product(1)).clamp(i16::MIN.into(), i16::MAX.into()) as i16
        }),
        M::Psadbw => value!(|i| Vector::from_lanes::<u64>(i.bytes, |k| {
            (8 * k..8 * k + 8).map(|at| u64::from(i.a.0[at].abs_diff(i.b.0[at]))).sum()
        })),
        M::Mpsadbw => value(|i, _| Outcome::value(sums_of_differences(i))),
        M::Phminposuw => value(|i, _| {
            let least = (0..8).map(|k| (i.b.get::<u16>(k), k)).min().unwrap_or_default();
            Outcome::value(Vector::from_u64(u64::from(least.0) | (least.1 as u64) << 16))
        }),
        M::Packsswb => value!(pack::<i16, i8>, |v| v.clamp(i8::MIN.into(), i8::MAX.into()) as i8),
        M::Packssdw => value!(pack::<i32, i16>, |v| v.clamp(i16::MIN.into(), i16::MAX.into()) as i16),
        M::Packuswb => value!(pack::<i16, u8>, |v| v.clamp(0, u8::MAX.into()) as u8),
        M::Packusdw => value!(pack::<i32, u16>, |v| v.clamp(0, u16::MAX.into()) as u16),
        M::Pmovsxbw => value!(widen::<i8, i16>, i16::from),
        M::Pmovsxbd => value!(widen::<i8, i32>, i32::from),
        M::Pmovsxbq => value!(widen::<i8, i64>, i64::from),
        M::Pmovsxwd => value!(widen::<i16, i32>, i32::from),
        M::Pmovsxwq => value!(widen::<i16, i64>, i64::from),
        M::Pmovsxdq => value!(widen::<i32, i64>, i64::from),
        M::Pmovzxbw => value!(widen::<u8, u16>, u16::from),
        M::Pmovzxbd => value!(widen::<u8, u32>, u32::from),
        M::Pmovzxbq => value!(widen::<u8, u64>, u64::from),
        M::Pmovzxwd => value!(widen::<u16, u32>, u32::from),
        M::Pmovzxwq => value!(widen::<u16, u64>, u64::from),
        M::Pmovzxdq => value!(widen::<u32, u64>, u64::from),
        _ => None,
    }
}

/// MPSADBW: eight sums of four differences, of bytes that three bits of the immediate choose for each block.
fn sums_of_differences(i: &Inputs) -> Vector {
    Vector::from_lanes::<u16>(i.bytes, |k| {
        let (block, at) = (k / 8, k % 8);
        let control = i.imm >> (3 * block);
        let (a, b) = (i.a.block(block), i.b.block(block));
        let (first, second) = (usize::from(control >> 2 & 1) * 4 + at, usize::from(control & 3) * 4);
        (0..4).map(|n| u16::from(a[first + n].abs_diff(b[second + n]))).sum()
    })
}

const LOWER: u8 = 0;
const UPPER: u8 = 1;

/// What only moves lanes.
#[rustfmt::skip] // A table.
fn moves(mnemonic: M) -> Option<Row> {
    macro_rules! interleaved {
        ($t:ty, $half:expr) => { value(|i, _| Outcome::value(interleave::<$t>(i))).map(|row| row.with($half)) };
    }
    match mnemonic {
        M::Punpcklbw => interleaved!(u8, LOWER),
        M::Punpcklwd => interleaved!(u16, LOWER),
        M::Punpckldq | M::Unpcklps => interleaved!(u32, LOWER),
        M::Punpcklqdq | M::Unpcklpd => interleaved!(u64, LOWER),
        M::Punpckhbw => interleaved!(u8, UPPER),
        M::Punpckhwd => interleaved!(u16, UPPER),
        M::Punpckhdq | M::Unpckhps => interleaved!(u32, UPPER),
        M::Punpckhqdq | M::Unpckhpd => interleaved!(u64, UPPER),
        M::Pshufb => value!(|i| {
            let part = i.part();
            Vector::from_lanes::<u8>(i.bytes, |k| match i.b.0[k] {
                0x80.. => 0,
                from => i.a.0[k / part * part + usize::from(from) % part],
            })
        }),
        M::Pshufd => value!(|i| rearrange::<u32>(i, |k| two_bits(i.imm, k))),
        M::Pshufw => value!(|i| rearrange::<u16>(i, |k| two_bits(i.imm, k))),
        M::Pshuflw => value!(|i| rearrange::<u16>(i, |k| if k < 4 { two_bits(i.imm, k) } else { k })),
        M::Pshufhw => value!(|i| rearrange::<u16>(i, |k| if k < 4 { k } else { 4 + two_bits(i.imm, k - 4) })),
        M::Shufps => value!(|i| Vector::from_lanes::<u32>(i.bytes, |k| {
            let from = if k % 4 < 2 { i.a } else { i.b };
            from.get(k / 4 * 4 + two_bits(i.imm, k % 4))
        })),
        M::Shufpd => value!(|i| Vector::from_lanes::<u64>(i.bytes, |k| {
            let from = if k % 2 == 0 { i.a } else { i.b };
            from.get(k / 2 * 2 + usize::from(i.imm >> k & 1))
        })),
        M::Palignr => value!(|i| {
            let part = i.part();
            Vector::from_lanes::<u8>(i.bytes, |k| {
                let (at, from) = (k / part * part, k % part + usize::from(i.imm));
                match from / part {
                    0 => i.b.0[at + from],
                    1 => i.a.0[at + from - part],
                    _ => 0,
                }
            })
        }),
        M::Pslldq => value!(|i| Vector::from_lanes::<u128>(i.bytes, |k| match i.imm {
            0..16 => i.a.u128(k) << (8 * i.imm),
            _ => 0,
        })),
        M::Psrldq => value!(|i| Vector::from_lanes::<u128>(i.bytes, |k| match i.imm {
            0..16 => i.a.u128(k) >> (8 * i.imm),
            _ => 0,
        })),
        M::Pblendw => value!(|i| choose::<u16>(i, |k| i.imm >> (k % 8) & 1 != 0)),
        M::Blendps | M::Vpblendd => value!(|i| choose::<u32>(i, |k| i.imm >> k & 1 != 0)),
        M::Blendpd => value!(|i| choose::<u64>(i, |k| i.imm >> k & 1 != 0)),
        M::Pblendvb => value!(|i| choose::<u8>(i, |k| i.c.get::<i8>(k) < 0)),
        M::Blendvps => value!(|i| choose::<u32>(i, |k| i.c.get::<i32>(k) < 0)),
        M::Blendvpd => value!(|i| choose::<u64>(i, |k| i.c.get::<i64>(k) < 0)),
        M::Movss => value!(|i| replaced::<u32>(i, 0, i.b.get(0))),
        M::Movsd => value!(|i| replaced::<u64>(i, 0, i.b.get(0))),
        M::Movd => value!(|i| Vector::from_u64(i.b.get::<u32>(0).into())),
        M::Movq | M::Movntq | M::Movq2dq | M::Movdq2q => value!(|i| Vector::from_u64(i.b.get(0))),
        // Stores are of the half that loads fill.
        M::Movlps | M::Movlpd => value!(|i| replaced::<u64>(i, 0, i.b.get(0))),
        M::Movhps | M::Movhpd => value!(|i| if i.to_memory {
            Vector::from_u64(i.b.get(1))
        } else {
            replaced::<u64>(i, 1, i.b.get(0))
        }),
        M::Movhlps => value!(|i| replaced::<u64>(i, 0, i.b.get(1))),
        M::Movlhps => value!(|i| replaced::<u64>(i, 1, i.b.get(0))),
        M::Movddup => value!(|i| rearrange::<u64>(i, |_| 0)),
        M::Movshdup => value!(|i| rearrange::<u32>(i, |k| k | 1)),
        M::Movsldup => value!(|i| rearrange::<u32>(i, |k| k & !1)),
        _ => None,
    }
}

/// Bits 2 k + 1 to 2 k of a control byte.
fn two_bits(control: u8, k: usize) -> usize {
    usize::from(control >> (2 * k) & 3)
}

/// `a` with another lane.
fn replaced<T: Lane>(i: &Inputs, lane: usize, value: T) -> Vector {
    let mut out = *i.a;
    out.set(lane, value);
    out
}

/// The lanes' signs as a number.
fn sign_bits<T: Lane + PartialOrd>(v: &Vector, bytes: usize) -> u64 {
    let zero = T::default();
    (0..bytes / T::BYTES).fold(0, |bits, k| bits | u64::from(v.get::<T>(k) < zero) << k)
}

macro_rules! signs {
    ($t:ty) => {
        value!(|i| Vector::from_u64(sign_bits::<$t>(i.b, i.bytes)))
    };
}

/// What moves lanes to, from and by immediates: one of them.
#[rustfmt::skip] // A table.
fn single(mnemonic: M) -> Option<Row> {
    macro_rules! insert {
        ($t:ty) => {
            value!(|i| {
                let lanes = 16 / size_of::<$t>();
                replaced::<$t>(i, usize::from(i.imm) % lanes, i.b.get(0))
            })
        };
    }
    macro_rules! extract {
        ($t:ty) => {
            value!(|i| {
                // PEXTRW has a form of MMX.
                let lanes = i.part() / size_of::<$t>();
                Vector::from_u64(i.b.get::<$t>(usize::from(i.imm) % lanes).into())
            })
        };
    }
    match mnemonic {
        M::Pinsrb => insert!(u8),
        M::Pinsrd => insert!(u32),
        M::Pinsrq => insert!(u64),
        M::Pinsrw => value!(|i| {
            let lanes = i.part() / 2;
            replaced::<u16>(i, usize::from(i.imm) % lanes, i.b.get(0))
        }),
        M::Pextrb => extract!(u8),
        M::Pextrw => extract!(u16),
        M::Pextrd | M::Extractps => extract!(u32),
        M::Pextrq => extract!(u64),
        M::Insertps => value!(|i| {
            let from = if i.from_memory { 0 } else { two_bits(i.imm, 3) };
            let mut out = replaced::<u32>(i, two_bits(i.imm, 2), i.b.get(from));
            for k in (0..4).filter(|k| i.imm >> k & 1 != 0) {
                out.set(k, 0u32);
            }
            out
        }),
        M::Pmovmskb => signs!(i8),
        M::Movmskps => signs!(i32),
        M::Movmskpd => signs!(i64),
        _ => None,
    }
}

/// What came with AVX and crosses blocks.
#[rustfmt::skip] // A table.
fn wide(mnemonic: M) -> Option<Row> {
    macro_rules! broadcast {
        ($t:ty) => { value!(|i| Vector::from_lanes::<$t>(i.bytes, |_| i.b.get(0))) };
    }
    match mnemonic {
        M::Vpbroadcastb => broadcast!(u8),
        M::Vpbroadcastw => broadcast!(u16),
        M::Vbroadcastss | M::Vpbroadcastd => broadcast!(u32),
        M::Vbroadcastsd | M::Vpbroadcastq => broadcast!(u64),
        M::Vbroadcastf128 | M::Vbroadcasti128 => broadcast!(u128),
        M::Vextractf128 | M::Vextracti128 => value!(|i| Vector::from_u128(i.b.u128(usize::from(i.imm & 1)))),
        M::Vinsertf128 | M::Vinserti128 => value!(|i| replaced::<u128>(i, usize::from(i.imm & 1), i.b.get(0))),
        M::Vperm2f128 | M::Vperm2i128 => value!(|i| Vector::from_lanes::<u128>(i.bytes, |k| {
            let control = i.imm >> (4 * k);
            let from = if control & 2 == 0 { i.a } else { i.b };
            if control & 8 != 0 { 0 } else { from.u128(usize::from(control & 1)) }
        })),
        M::Vpermq | M::Vpermpd => value!(|i| Vector::from_lanes::<u64>(i.bytes, |k| i.b.get(two_bits(i.imm, k)))),
        M::Vpermd | M::Vpermps => value!(|i| Vector::from_lanes::<u32>(i.bytes, |k| {
            i.b.get((i.a.get::<u32>(k) & 7) as usize)
        })),
        M::Vpermilps => value!(|i| Vector::from_lanes::<u32>(i.bytes, |k| {
            let (from, control) = permuted(i);
            let choice = if i.immediate { two_bits(i.imm, k % 4) } else { (control.get::<u32>(k) & 3) as usize };
            from.get(k / 4 * 4 + choice)
        })),
        M::Vpermilpd => value!(|i| Vector::from_lanes::<u64>(i.bytes, |k| {
            let (from, control) = permuted(i);
            let choice = if i.immediate { i.imm >> k & 1 } else { (control.get::<u64>(k) >> 1 & 1) as u8 };
            from.get(k / 2 * 2 + usize::from(choice))
        })),
        _ => None,
    }
}

/// VPERMILPS has its control in the last source or in an immediate.
fn permuted<'a>(i: &Inputs<'a>) -> (&'a Vector, &'a Vector) {
    if i.immediate { (i.b, i.b) } else { (i.a, i.b) }
}

/// PTEST and its like: ZF and CF where no bit of `b` that counts is in `a`, or out of it.
fn test(i: &Inputs, mask: u64) -> Outcome {
    let all = |f: fn(u64, u64) -> u64| (0..i.bytes / 8).all(|k| f(i.a.get(k), i.b.get(k)) & mask == 0);
    let zero = if all(|a, b| a & b) { ZF } else { 0 };
    let carry = if all(|a, b| !a & b) { CF } else { 0 };
    Outcome::flags(zero | carry)
}

#[rustfmt::skip] // A table.
fn tests(mnemonic: M) -> Option<Row> {
    match mnemonic {
        M::Ptest => value(|i, _| test(i, u64::MAX)),
        M::Vtestps => value(|i, _| test(i, 0x8000_0000_8000_0000)),
        M::Vtestpd => value(|i, _| test(i, 1 << 63)),
        _ => None,
    }
}

/// AES, SHA and their like.
#[rustfmt::skip] // A table.
fn cryptography(mnemonic: M) -> Option<Row> {
    match mnemonic {
        M::Aesenc => value(|i, _| blocks(i, |a, b| crypto::aes_encrypt(a, b, false))),
        M::Aesenclast => value(|i, _| blocks(i, |a, b| crypto::aes_encrypt(a, b, true))),
        M::Aesdec => value(|i, _| blocks(i, |a, b| crypto::aes_decrypt(a, b, false))),
        M::Aesdeclast => value(|i, _| blocks(i, |a, b| crypto::aes_decrypt(a, b, true))),
        M::Aesimc => value(|i, _| blocks(i, |_, b| crypto::mix_columns(b, true))),
        M::Aeskeygenassist => value(|i, _| blocks(i, |_, b| crypto::aes_key(b, i.imm))),
        M::Pclmulqdq => value!(|i| Vector::from_lanes::<u128>(i.bytes, |k| {
            let (a, b) = (usize::from(i.imm & 1), usize::from(i.imm >> 4 & 1));
            crypto::carryless_product(i.a.get(2 * k + a), i.b.get(2 * k + b))
        })),
        M::Gf2p8mulb => value!(binary::<u8>, crypto::field_product),
        M::Gf2p8affineqb => value(|i, _| blocks(i, |a, b| crypto::affine(a, b, i.imm, false))),
        M::Gf2p8affineinvqb => value(|i, _| blocks(i, |a, b| crypto::affine(a, b, i.imm, true))),
        M::Sha1rnds4 => value(|i, _| blocks(i, |a, b| crypto::sha1_rounds(a, b, i.imm))),
        M::Sha1nexte => value(|i, _| blocks(i, crypto::sha1_next)),
        M::Sha1msg1 => value(|i, _| blocks(i, crypto::sha1_message1)),
        M::Sha1msg2 => value(|i, _| blocks(i, crypto::sha1_message2)),
        M::Sha256rnds2 => value(|i, _| blocks(i, |a, b| crypto::sha256_rounds(a, b, i.c.block(0)))),
        M::Sha256msg1 => value(|i, _| blocks(i, crypto::sha256_message1)),
        M::Sha256msg2 => value(|i, _| blocks(i, crypto::sha256_message2)),
        _ => None,
    }
}

/// The row of an instruction that has nothing to do with MXCSR, by its legacy name where it has one.
pub fn row(mnemonic: M) -> Option<Row> {
    [arithmetic, across, moves, single, wide, tests, cryptography]
        .into_iter()
        .find_map(|table| table(mnemonic))
}
