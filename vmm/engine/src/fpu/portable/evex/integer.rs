//! The tables of integer instructions, moves and shuffles that came with AVX-512.
//!
//! Of an instruction with three sources `c` is the destination as it was. SDM Vol. 2, each instruction's "Operation".

use iced_x86::Mnemonic as M;

use crate::fpu::portable::lanes::{Inputs, Lane, Vector, binary, shift, shift_each, unary};
use crate::fpu::portable::row::{Compute, Outcome, Row};

fn value(compute: Compute) -> Option<Row> {
    Some(Row::new(compute))
}

/// `value!(|i| vector)`, or a shape with the function of its lanes.
macro_rules! value {
    (|$i:ident| $v:expr) => {
        value(|$i, _| Outcome::value($v))
    };
    ($shape:ident::<$($t:ty),+>, $f:expr) => {
        value(|i, _| Outcome::value($shape::<$($t),+>(i, $f)))
    };
}

/// A vector from the numbers of its lanes.
macro_rules! lanes {
    ($t:ty, |$i:ident, $k:ident| $v:expr) => {
        value(|$i, _| Outcome::value(Vector::from_lanes::<$t>($i.bytes, |$k| $v)))
    };
}

/// A mask from the numbers of its lanes.
fn mask<T: Lane>(i: &Inputs, f: impl Fn(usize) -> bool) -> Outcome {
    let bits = (0..i.bytes / T::BYTES).fold(0, |bits, k| bits | u64::from(f(k)) << k);
    Outcome::value(Vector::from_u64(bits))
}

macro_rules! mask {
    ($t:ty, |$i:ident, $k:ident| $v:expr) => {
        value(|$i, _| mask::<$t>($i, |$k| $v))
    };
}

/// The comparison that bits 2:0 of an immediate name.
fn compares<T: Lane + PartialOrd>(i: &Inputs, k: usize) -> bool {
    let (a, b) = (i.a.get::<T>(k), i.b.get::<T>(k));
    let holds = match i.imm & 3 {
        0 => a == b,
        1 => a < b,
        2 => a <= b,
        _ => false,
    };
    holds != (i.imm & 4 != 0)
}

#[rustfmt::skip] // A table.
fn masks(mnemonic: M) -> Option<Row> {
    macro_rules! compare {
        ($t:ty) => { mask!($t, |i, k| compares::<$t>(i, k)) };
    }
    macro_rules! holds {
        ($t:ty, $op:tt) => { mask!($t, |i, k| i.a.get::<$t>(k) $op i.b.get::<$t>(k)) };
    }
    macro_rules! test {
        ($t:ty, $op:tt) => { mask!($t, |i, k| i.a.get::<$t>(k) & i.b.get::<$t>(k) $op 0) };
    }
    macro_rules! sign {
        ($t:ty) => { mask!($t, |i, k| i.b.get::<$t>(k) < 0) };
    }
    macro_rules! spread {
        ($t:ty) => { lanes!($t, |i, k| if i.b.get::<u64>(0) >> k & 1 != 0 { !0 } else { 0 }) };
    }
    match mnemonic {
        M::Vpcmpb => compare!(i8),
        M::Vpcmpw => compare!(i16),
        M::Vpcmpd => compare!(i32),
        M::Vpcmpq => compare!(i64),
        M::Vpcmpub => compare!(u8),
        M::Vpcmpuw => compare!(u16),
        M::Vpcmpud => compare!(u32),
        M::Vpcmpuq => compare!(u64),
        M::Vpcmpeqb => holds!(u8, ==),
        M::Vpcmpeqw => holds!(u16, ==),
        M::Vpcmpeqd => holds!(u32, ==),
        M::Vpcmpeqq => holds!(u64, ==),
        M::Vpcmpgtb => holds!(i8, >),
        M::Vpcmpgtw => holds!(i16, >),
        M::Vpcmpgtd => holds!(i32, >),
        M::Vpcmpgtq => holds!(i64, >),
        M::Vptestmb => test!(u8, !=),
        M::Vptestmw => test!(u16, !=),
        M::Vptestmd => test!(u32, !=),
        M::Vptestmq => test!(u64, !=),
        M::Vptestnmb => test!(u8, ==),
        M::Vptestnmw => test!(u16, ==),
        M::Vptestnmd => test!(u32, ==),
        M::Vptestnmq => test!(u64, ==),
        M::Vpmovb2m => sign!(i8),
        M::Vpmovw2m => sign!(i16),
        M::Vpmovd2m => sign!(i32),
        M::Vpmovq2m => sign!(i64),
        M::Vpmovm2b => spread!(u8),
        M::Vpmovm2w => spread!(u16),
        M::Vpmovm2d => spread!(u32),
        M::Vpmovm2q => spread!(u64),
        M::Vpbroadcastmb2q => lanes!(u64, |i, _k| i.b.get::<u64>(0) & 0xff),
        M::Vpbroadcastmw2d => lanes!(u32, |i, _k| i.b.get::<u32>(0) & 0xffff),
        M::Vpshufbitqmb => mask!(u8, |i, k| i.a.get::<u64>(k / 8) >> (i.b.0[k] & 63) & 1 != 0),
        _ => None,
    }
}

/// The bits of three operands, by the eight bits of the immediate.
fn ternary(i: &Inputs) -> Vector {
    Vector::from_lanes::<u64>(i.bytes, |k| {
        let (a, b, c) = (i.c.get::<u64>(k), i.a.get::<u64>(k), i.b.get::<u64>(k));
        let chosen = |bit: u8, v: u64| if bit != 0 { v } else { !v };
        (0..8u8)
            .filter(|n| i.imm >> n & 1 != 0)
            .fold(0, |all, n| all | chosen(n & 4, a) & chosen(n & 2, b) & chosen(n & 1, c))
    })
}

/// The upper half of `high` and `low` together, shifted left.
macro_rules! concat_left {
    ($t:ty, $high:expr, $low:expr, $n:expr) => {{
        let n = u32::from($n as u8) % <$t>::BITS;
        let (high, low): ($t, $t) = ($high, $low);
        if n == 0 {
            high
        } else {
            high << n | low >> (<$t>::BITS - n)
        }
    }};
}

/// The lower half of `high` and `low` together, shifted right.
macro_rules! concat_right {
    ($t:ty, $high:expr, $low:expr, $n:expr) => {{
        let n = u32::from($n as u8) % <$t>::BITS;
        let (high, low): ($t, $t) = ($high, $low);
        if n == 0 {
            low
        } else {
            low >> n | high << (<$t>::BITS - n)
        }
    }};
}

/// The lower (`param` 0) or the upper 52 bits of a product of 52 bits each, added to the destination.
fn multiply_add_52(i: &Inputs) -> Vector {
    const ONES: u64 = (1 << 52) - 1;
    Vector::from_lanes::<u64>(i.bytes, |k| {
        let product = u128::from(i.a.get::<u64>(k) & ONES) * u128::from(i.b.get::<u64>(k) & ONES);
        let part = (product >> (52 * u32::from(i.param))) as u64 & ONES;
        i.c.get::<u64>(k).wrapping_add(part)
    })
}

/// Products of bytes, unsigned and signed, or of signed words, summed onto doublewords.
fn dot_product(i: &Inputs, words: bool, saturates: bool) -> Vector {
    Vector::from_lanes::<i32>(i.bytes, |k| {
        let sum: i64 = if words {
            (2 * k..2 * k + 2)
                .map(|n| i64::from(i.a.get::<i16>(n)) * i64::from(i.b.get::<i16>(n)))
                .sum()
        } else {
            (4 * k..4 * k + 4)
                .map(|n| i64::from(i.a.get::<u8>(n)) * i64::from(i.b.get::<i8>(n)))
                .sum()
        };
        let total = i64::from(i.c.get::<i32>(k)) + sum;
        if saturates {
            total.clamp(i32::MIN.into(), i32::MAX.into()) as i32
        } else {
            total as i32
        }
    })
}

#[rustfmt::skip] // A table.
fn arithmetic(mnemonic: M) -> Option<Row> {
    match mnemonic {
        M::Vpandd | M::Vpandq => value!(binary::<u64>, |a, b| a & b),
        M::Vpandnd | M::Vpandnq => value!(binary::<u64>, |a, b| !a & b),
        M::Vpord | M::Vporq => value!(binary::<u64>, |a, b| a | b),
        M::Vpxord | M::Vpxorq => value!(binary::<u64>, |a, b| a ^ b),
        M::Vpternlogd | M::Vpternlogq => value!(|i| ternary(i)),
        M::Vpabsq => value!(unary::<i64>, i64::wrapping_abs),
        M::Vpmaxsq => value!(binary::<i64>, i64::max),
        M::Vpmaxuq => value!(binary::<u64>, u64::max),
        M::Vpminsq => value!(binary::<i64>, i64::min),
        M::Vpminuq => value!(binary::<u64>, u64::min),
        M::Vpmullq => value!(binary::<u64>, u64::wrapping_mul),
        M::Vpsraq => value!(shift::<i64>, |a, n| a >> n.min(63)),
        M::Vpsllvw => value!(shift_each::<u16>, |a, n| a.checked_shl(n).unwrap_or(0)),
        M::Vpsrlvw => value!(shift_each::<u16>, |a, n| a.checked_shr(n).unwrap_or(0)),
        M::Vpsravw => value!(shift_each::<i16>, |a, n| a >> n.min(15)),
        M::Vpsravq => value!(shift_each::<i64>, |a, n| a >> n.min(63)),
        M::Vprold => lanes!(u32, |i, k| i.b.get::<u32>(k).rotate_left(i.imm.into())),
        M::Vprolq => lanes!(u64, |i, k| i.b.get::<u64>(k).rotate_left(i.imm.into())),
        M::Vprord => lanes!(u32, |i, k| i.b.get::<u32>(k).rotate_right(i.imm.into())),
        M::Vprorq => lanes!(u64, |i, k| i.b.get::<u64>(k).rotate_right(i.imm.into())),
        M::Vprolvd => value!(binary::<u32>, |a, b| a.rotate_left(b & 31)),
        M::Vprolvq => value!(binary::<u64>, |a, b| a.rotate_left(b as u32 & 63)),
        M::Vprorvd => value!(binary::<u32>, |a, b| a.rotate_right(b & 31)),
        M::Vprorvq => value!(binary::<u64>, |a, b| a.rotate_right(b as u32 & 63)),
        M::Vpshldw => lanes!(u16, |i, k| concat_left!(u16, i.a.get(k), i.b.get(k), i.imm)),
        M::Vpshldd => lanes!(u32, |i, k| concat_left!(u32, i.a.get(k), i.b.get(k), i.imm)),
        M::Vpshldq => lanes!(u64, |i, k| concat_left!(u64, i.a.get(k), i.b.get(k), i.imm)),
        M::Vpshrdw => lanes!(u16, |i, k| concat_right!(u16, i.b.get(k), i.a.get(k), i.imm)),
        M::Vpshrdd => lanes!(u32, |i, k| concat_right!(u32, i.b.get(k), i.a.get(k), i.imm)),
        M::Vpshrdq => lanes!(u64, |i, k| concat_right!(u64, i.b.get(k), i.a.get(k), i.imm)),
        M::Vpshldvw => lanes!(u16, |i, k| concat_left!(u16, i.c.get(k), i.a.get(k), i.b.get::<u16>(k))),
        M::Vpshldvd => lanes!(u32, |i, k| concat_left!(u32, i.c.get(k), i.a.get(k), i.b.get::<u32>(k))),
        M::Vpshldvq => lanes!(u64, |i, k| concat_left!(u64, i.c.get(k), i.a.get(k), i.b.get::<u64>(k))),
        M::Vpshrdvw => lanes!(u16, |i, k| concat_right!(u16, i.a.get(k), i.c.get(k), i.b.get::<u16>(k))),
        M::Vpshrdvd => lanes!(u32, |i, k| concat_right!(u32, i.a.get(k), i.c.get(k), i.b.get::<u32>(k))),
        M::Vpshrdvq => lanes!(u64, |i, k| concat_right!(u64, i.a.get(k), i.c.get(k), i.b.get::<u64>(k))),
        M::Vplzcntd => value!(unary::<u32>, |a| a.leading_zeros()),
        M::Vplzcntq => value!(unary::<u64>, |a| a.leading_zeros().into()),
        M::Vpopcntb => value!(unary::<u8>, |a| a.count_ones() as u8),
        M::Vpopcntw => value!(unary::<u16>, |a| a.count_ones() as u16),
        M::Vpopcntd => value!(unary::<u32>, |a| a.count_ones()),
        M::Vpopcntq => value!(unary::<u64>, |a| a.count_ones().into()),
        M::Vpconflictd => lanes!(u32, |i, k| {
            let equal = |n: &usize| i.b.get::<u32>(*n) == i.b.get::<u32>(k);
            (0..k).filter(equal).fold(0, |bits, n| bits | 1 << n)
        }),
        M::Vpconflictq => lanes!(u64, |i, k| {
            let equal = |n: &usize| i.b.get::<u64>(*n) == i.b.get::<u64>(k);
            (0..k).filter(equal).fold(0, |bits, n| bits | 1 << n)
        }),
        M::Vpmadd52luq => value!(|i| multiply_add_52(i)),
        M::Vpmadd52huq => value!(|i| multiply_add_52(i)).map(|row| row.with(1)),
        M::Vpdpbusd => value!(|i| dot_product(i, false, false)),
        M::Vpdpbusds => value!(|i| dot_product(i, false, true)),
        M::Vpdpwssd => value!(|i| dot_product(i, true, false)),
        M::Vpdpwssds => value!(|i| dot_product(i, true, true)),
        // Bytes of the second source, as the immediate has its doublewords, at four places against four of the first.
        M::Vdbpsadbw => lanes!(u16, |i, k| {
            let (part, at) = (k / 8 * 16, k % 8 * 2);
            let shuffled = |n: usize| i.b.0[part + usize::from(i.imm >> (n / 4 * 2) & 3) * 4 + n % 4];
            let (first, second) = (at / 4 * 4, at / 8 * 8 + at / 2 % 4);
            (0..4).map(|n| u16::from(i.a.0[part + first + n].abs_diff(shuffled(second + n)))).sum()
        }),
        M::Vpmultishiftqb => lanes!(u8, |i, k| {
            let control = u32::from(i.a.0[k] & 63);
            i.b.get::<u64>(k / 8).rotate_right(control) as u8
        }),
        _ => None,
    }
}

/// Lanes of twice or four or eight times the width, made narrow.
fn narrow<S: Lane, D: Lane>(i: &Inputs, f: impl Fn(S) -> D) -> Vector {
    let mut out = Vector::ZERO;
    for k in 0..i.bytes / S::BYTES {
        out.set(k, f(i.b.get(k)));
    }
    out
}

#[rustfmt::skip] // A table.
fn narrowing(mnemonic: M) -> Option<Row> {
    macro_rules! cut {
        ($s:ty, $d:ty) => { value!(narrow::<$s, $d>, |v| v as $d) };
    }
    macro_rules! clamp {
        ($s:ty, $d:ty) => { value!(narrow::<$s, $d>, |v| v.clamp(<$d>::MIN.into(), <$d>::MAX.into()) as $d) };
    }
    match mnemonic {
        M::Vpmovwb => cut!(u16, u8),
        M::Vpmovdb => cut!(u32, u8),
        M::Vpmovdw => cut!(u32, u16),
        M::Vpmovqb => cut!(u64, u8),
        M::Vpmovqw => cut!(u64, u16),
        M::Vpmovqd => cut!(u64, u32),
        M::Vpmovswb => clamp!(i16, i8),
        M::Vpmovsdb => clamp!(i32, i8),
        M::Vpmovsdw => clamp!(i32, i16),
        M::Vpmovsqb => clamp!(i64, i8),
        M::Vpmovsqw => clamp!(i64, i16),
        M::Vpmovsqd => clamp!(i64, i32),
        M::Vpmovuswb => clamp!(u16, u8),
        M::Vpmovusdb => clamp!(u32, u8),
        M::Vpmovusdw => clamp!(u32, u16),
        M::Vpmovusqb => clamp!(u64, u8),
        M::Vpmovusqw => clamp!(u64, u16),
        M::Vpmovusqd => clamp!(u64, u32),
        _ => None,
    }
}

/// Lanes of two vectors, by indices.
fn permuted<T: Lane>(i: &Inputs, k: usize, index: u64, first: &Vector, second: &Vector) -> T {
    let count = i.bytes / T::BYTES;
    debug_assert!(k < count);
    let at = index as usize & (count - 1);
    if index as usize & count != 0 {
        second.get(at)
    } else {
        first.get(at)
    }
}

/// The lanes that the mask chooses, next to each other.
fn compress<T: Lane>(i: &Inputs) -> Vector {
    let mut out = Vector::ZERO;
    for (at, k) in (0..i.bytes / T::BYTES).filter(|&k| i.chosen(k)).enumerate() {
        out.set(at, i.b.get::<T>(k));
    }
    out
}

/// Lanes from the lowest, to the places that the mask chooses.
fn expand<T: Lane>(i: &Inputs) -> Vector {
    let mut out = Vector::ZERO;
    for (at, k) in (0..i.bytes / T::BYTES).filter(|&k| i.chosen(k)).enumerate() {
        out.set(k, i.b.get::<T>(at));
    }
    out
}

/// `param` bytes of a longer vector: those that the immediate names, to the bottom.
fn extract(i: &Inputs) -> Vector {
    let size = usize::from(i.param);
    let at = usize::from(i.imm) % (i.bytes / size) * size;
    let mut out = Vector::ZERO;
    out.0[..size].copy_from_slice(&i.b.0[at..at + size]);
    out
}

/// The opposite.
fn insert(i: &Inputs) -> Vector {
    let size = usize::from(i.param);
    let at = usize::from(i.imm) % (i.bytes / size) * size;
    let mut out = *i.a;
    out.0[at..at + size].copy_from_slice(&i.b.0[..size]);
    out
}

/// `param` bytes, again and again.
fn repeat(i: &Inputs) -> Vector {
    let size = usize::from(i.param);
    Vector::from_lanes::<u8>(i.bytes, |k| i.b.0[k % size])
}

/// Blocks of 128 bits: the lower half of the result from the first source, the upper from the second.
fn shuffle_blocks(i: &Inputs) -> Vector {
    let count = i.bytes / 16;
    let width = count.trailing_zeros() as usize;
    Vector::from_lanes::<u128>(i.bytes, |k| {
        let from = if k < count / 2 { i.a } else { i.b };
        from.get(usize::from(i.imm) >> (k * width) & (count - 1))
    })
}

#[rustfmt::skip] // A table.
fn moves(mnemonic: M) -> Option<Row> {
    macro_rules! two_tables {
        ($t:ty) => { lanes!($t, |i, k| permuted::<$t>(i, k, i.a.get::<$t>(k).into(), i.c, i.b)) };
    }
    macro_rules! two_sources {
        ($t:ty) => { lanes!($t, |i, k| permuted::<$t>(i, k, i.c.get::<$t>(k).into(), i.a, i.b)) };
    }
    macro_rules! one_table {
        ($t:ty) => { lanes!($t, |i, k| permuted::<$t>(i, k, i.a.get::<$t>(k).into(), i.b, i.b)) };
    }
    // Four quadwords each by an immediate, or all of them by indices.
    macro_rules! quadwords {
        () => { lanes!(u64, |i, k| if i.immediate {
            i.b.get(k / 4 * 4 + usize::from(i.imm >> (2 * (k % 4)) & 3))
        } else {
            permuted::<u64>(i, k, i.a.get(k), i.b, i.b)
        }) };
    }
    macro_rules! aligned {
        ($t:ty) => { lanes!($t, |i, k| {
            let count = i.bytes / size_of::<$t>();
            let at = k + (usize::from(i.imm) & (count - 1));
            if at < count { i.b.get(at) } else { i.a.get(at - count) }
        }) };
    }
    let sized = |compute: Compute, bytes: u8| Some(Row::new(compute).with(bytes));
    match mnemonic {
        M::Vmovaps | M::Vmovapd | M::Vmovups | M::Vmovupd | M::Vmovdqa32 | M::Vmovdqa64 | M::Vmovdqu8 | M::Vmovdqu16 | M::Vmovdqu32
        | M::Vmovdqu64 | M::Vmovntps | M::Vmovntpd | M::Vmovntdq | M::Vmovntdqa => value!(|i| *i.b),
        M::Vpblendmb | M::Vpblendmw | M::Vpblendmd | M::Vpblendmq | M::Vblendmps | M::Vblendmpd => value!(|i| *i.b),
        M::Vpermb => one_table!(u8),
        M::Vpermw => one_table!(u16),
        M::Vpermd | M::Vpermps => one_table!(u32),
        M::Vpermq | M::Vpermpd => quadwords!(),
        M::Vpermt2b => two_tables!(u8),
        M::Vpermt2w => two_tables!(u16),
        M::Vpermt2d | M::Vpermt2ps => two_tables!(u32),
        M::Vpermt2q | M::Vpermt2pd => two_tables!(u64),
        M::Vpermi2b => two_sources!(u8),
        M::Vpermi2w => two_sources!(u16),
        M::Vpermi2d | M::Vpermi2ps => two_sources!(u32),
        M::Vpermi2q | M::Vpermi2pd => two_sources!(u64),
        M::Valignd => aligned!(u32),
        M::Valignq => aligned!(u64),
        M::Vshuff32x4 | M::Vshuff64x2 | M::Vshufi32x4 | M::Vshufi64x2 => value!(|i| shuffle_blocks(i)),
        M::Vpcompressb => value!(|i| compress::<u8>(i)),
        M::Vpcompressw => value!(|i| compress::<u16>(i)),
        M::Vpcompressd | M::Vcompressps => value!(|i| compress::<u32>(i)),
        M::Vpcompressq | M::Vcompresspd => value!(|i| compress::<u64>(i)),
        M::Vpexpandb => value!(|i| expand::<u8>(i)),
        M::Vpexpandw => value!(|i| expand::<u16>(i)),
        M::Vpexpandd | M::Vexpandps => value!(|i| expand::<u32>(i)),
        M::Vpexpandq | M::Vexpandpd => value!(|i| expand::<u64>(i)),
        M::Vextractf32x4 | M::Vextractf64x2 | M::Vextracti32x4 | M::Vextracti64x2 => sized(|i, _| Outcome::value(extract(i)), 16),
        M::Vextractf32x8 | M::Vextractf64x4 | M::Vextracti32x8 | M::Vextracti64x4 => sized(|i, _| Outcome::value(extract(i)), 32),
        M::Vinsertf32x4 | M::Vinsertf64x2 | M::Vinserti32x4 | M::Vinserti64x2 => sized(|i, _| Outcome::value(insert(i)), 16),
        M::Vinsertf32x8 | M::Vinsertf64x4 | M::Vinserti32x8 | M::Vinserti64x4 => sized(|i, _| Outcome::value(insert(i)), 32),
        M::Vbroadcastf32x2 | M::Vbroadcasti32x2 => sized(|i, _| Outcome::value(repeat(i)), 8),
        M::Vbroadcastf32x4 | M::Vbroadcastf64x2 | M::Vbroadcasti32x4 | M::Vbroadcasti64x2 => sized(|i, _| Outcome::value(repeat(i)), 16),
        M::Vbroadcastf32x8 | M::Vbroadcastf64x4 | M::Vbroadcasti32x8 | M::Vbroadcasti64x4 => sized(|i, _| Outcome::value(repeat(i)), 32),
        _ => None,
    }
}

/// The row of an integer instruction or a move whose VEX form, where there is one, does something else.
pub fn row(mnemonic: M) -> Option<Row> {
    [masks, arithmetic, narrowing, moves]
        .into_iter()
        .find_map(|table| table(mnemonic))
}
