//! The arithmetic flags, held as LAHF and SETO leave them: bit 0 OF, bits 8 to 15 the low byte of RFLAGS.
//!
//! Keeping them in that form costs one LAHF and one SETO for each instruction that writes flags, and a shift or two for each
//! that reads them; a conversion to RFLAGS happens only at PUSHF and the like.
#![allow(unsafe_code)]

pub(crate) const CF: u64 = 1 << 8;
pub(crate) const PF: u64 = 1 << 10;
pub(crate) const AF: u64 = 1 << 12;
pub(crate) const ZF: u64 = 1 << 14;
pub(crate) const SF: u64 = 1 << 15;
pub(crate) const OF: u64 = 1;
#[allow(dead_code)] // The test masks with it.
pub(crate) const ALL: u64 = CF | PF | AF | ZF | SF | OF;

/// The arithmetic bits of RFLAGS: OF, SF, ZF, AF, PF, CF.
pub(crate) const RFLAGS_ARITH: u64 = 0x8d5;

/// From this module's form to RFLAGS bits.
#[inline(always)]
pub(crate) fn to_rflags(nf: u64) -> u64 {
    ((nf >> 8) & 0xd5) | ((nf & 1) << 11)
}

/// From RFLAGS bits to this module's form.
#[inline(always)]
pub(crate) fn from_rflags(rflags: u64) -> u64 {
    ((rflags & 0xd5) << 8) | ((rflags >> 11) & 1)
}

/// Condition `K` as opcodes encode it (SDM Vol. 1 App. B "EFLAGS Condition Codes").
#[inline(always)]
pub(crate) fn condition<const K: u8>(nf: u64) -> bool {
    let sign_differs = ((nf >> 15) ^ nf) & 1 != 0;
    let holds = match K >> 1 {
        0 => nf & OF != 0,
        1 => nf & CF != 0,
        2 => nf & ZF != 0,
        3 => nf & (CF | ZF) != 0,
        4 => nf & SF != 0,
        5 => nf & PF != 0,
        6 => sign_differs,
        _ => sign_differs || nf & ZF != 0,
    };
    holds ^ (K & 1 != 0)
}

/// SF, ZF and PF of an `S`-byte result.
#[inline(always)]
pub(crate) fn of_result<const S: u8>(r: u64) -> u64 {
    let bits = 8 * S as u32;
    let top = r << (64 - bits);
    let parity = ((r as u8).count_ones() & 1) as u64 ^ 1;
    ((top >> 63) << 15) | (((top == 0) as u64) << 14) | (parity << 10)
}

pub(crate) const ADD: u8 = 0;
pub(crate) const OR: u8 = 1;
pub(crate) const ADC: u8 = 2;
pub(crate) const SBB: u8 = 3;
pub(crate) const AND: u8 = 4;
pub(crate) const SUB: u8 = 5;
pub(crate) const XOR: u8 = 6;
pub(crate) const CMP: u8 = 7;
pub(crate) const TEST: u8 = 8;
pub(crate) const INC: u8 = 9;
pub(crate) const DEC: u8 = 10;
pub(crate) const NEG: u8 = 11;

/// Two-operand arithmetic in portable code: the result, and the flags.
#[allow(dead_code)] // Used under Miri and by the test that compares it with `alu`.
#[inline]
pub(crate) fn alu_portable<const O: u8, const S: u8>(a: u64, b: u64, nf: u64) -> (u64, u64) {
    let bits = 8 * S as u32;
    let mask = u64::MAX >> (64 - bits);
    let (a, b) = (a & mask, b & mask);
    let cin = if matches!(O, ADC | SBB) { (nf & CF) >> 8 } else { 0 };
    let (a, b) = match O {
        INC | DEC => (a, 1),
        NEG => (0, a),
        _ => (a, b),
    };
    let r = match O {
        ADD | ADC | INC => a.wrapping_add(b).wrapping_add(cin),
        SUB | SBB | CMP | DEC | NEG => a.wrapping_sub(b).wrapping_sub(cin),
        AND | TEST => a & b,
        OR => a | b,
        _ => a ^ b,
    } & mask;
    // Bit n of `carries` is the carry (borrow) out of bit n.
    let carries = match O {
        ADD | ADC | INC => (a & b) | ((a | b) & !r),
        SUB | SBB | CMP | DEC | NEG => (!a & b) | ((!a | b) & r),
        _ => 0,
    };
    let cf = (carries >> (bits - 1)) & 1;
    let of = cf ^ ((carries >> (bits - 2)) & 1);
    let af = (carries >> 3) & 1;
    let mut flags = of_result::<S>(r) | cf << 8 | of | af << 12;
    if matches!(O, INC | DEC) {
        flags = (flags & !CF) | (nf & CF);
    }
    (r, flags)
}

/// Two-operand arithmetic on the host's own ALU: the result (bits above the size undefined), and the flags.
///
/// AF after AND, OR, XOR and TEST is undefined; Intel and AMD parts both clear it, and so does this.
#[cfg(not(miri))]
#[inline(always)]
pub(crate) fn alu<const O: u8, const S: u8>(a: u64, b: u64, nf: u64) -> (u64, u64) {
    use core::arch::asm;
    let mut ax: u64;
    let mut r = a;
    macro_rules! two {
        ($i:literal, $m:literal) => {
            // SAFETY: Registers and flags only; both are declared.
            unsafe {
                asm!(concat!($i, " {r:", $m, "}, {b:", $m, "}"), "lahf", "seto al",
                     r = inout(reg) r, b = in(reg) b, out("rax") ax, options(pure, nomem, nostack))
            }
        };
    }
    macro_rules! two8 {
        ($i:literal) => {{
            let mut r8 = a as u8;
            // SAFETY: As above.
            unsafe {
                asm!(concat!($i, " {r}, {b}"), "lahf", "seto al",
                     r = inout(reg_byte) r8, b = in(reg_byte) b as u8, out("rax") ax, options(pure, nomem, nostack))
            };
            r = r8 as u64;
        }};
    }
    macro_rules! carry {
        ($i:literal, $m:literal) => {{
            let cin = (nf >> 8) as u8 & 1;
            // SAFETY: As above.
            unsafe {
                asm!("add {c}, 255", concat!($i, " {r:", $m, "}, {b:", $m, "}"), "lahf", "seto al",
                     c = inout(reg_byte) cin => _, r = inout(reg) r, b = in(reg) b, out("rax") ax, options(pure, nomem, nostack))
            }
        }};
    }
    macro_rules! carry8 {
        ($i:literal) => {{
            let cin = (nf >> 8) as u8 & 1;
            let mut r8 = a as u8;
            // SAFETY: As above.
            unsafe {
                asm!("add {c}, 255", concat!($i, " {r}, {b}"), "lahf", "seto al",
                     c = inout(reg_byte) cin => _, r = inout(reg_byte) r8, b = in(reg_byte) b as u8, out("rax") ax,
                     options(pure, nomem, nostack))
            };
            r = r8 as u64;
        }};
    }
    macro_rules! one {
        ($i:literal) => {{
            match S {
                1 => {
                    let mut r8 = a as u8;
                    // SAFETY: As above.
                    unsafe {
                        asm!(concat!($i, " {r}"), "lahf", "seto al", r = inout(reg_byte) r8, out("rax") ax, options(pure, nomem, nostack))
                    };
                    r = r8 as u64;
                }
                // SAFETY: As above.
                2 => unsafe {
                    asm!(concat!($i, " {r:x}"), "lahf", "seto al", r = inout(reg) r, out("rax") ax, options(pure, nomem, nostack))
                },
                // SAFETY: As above.
                4 => unsafe {
                    asm!(concat!($i, " {r:e}"), "lahf", "seto al", r = inout(reg) r, out("rax") ax, options(pure, nomem, nostack))
                },
                // SAFETY: As above.
                _ => unsafe {
                    asm!(concat!($i, " {r:r}"), "lahf", "seto al", r = inout(reg) r, out("rax") ax, options(pure, nomem, nostack))
                },
            }
        }};
    }
    macro_rules! sized {
        ($i:literal) => {
            match S {
                1 => two8!($i),
                2 => two!($i, "x"),
                4 => two!($i, "e"),
                _ => two!($i, "r"),
            }
        };
    }
    macro_rules! sized_carry {
        ($i:literal) => {
            match S {
                1 => carry8!($i),
                2 => carry!($i, "x"),
                4 => carry!($i, "e"),
                _ => carry!($i, "r"),
            }
        };
    }
    match O {
        ADD => sized!("add"),
        OR => sized!("or"),
        ADC => sized_carry!("adc"),
        SBB => sized_carry!("sbb"),
        AND => sized!("and"),
        SUB => sized!("sub"),
        XOR => sized!("xor"),
        CMP => sized!("cmp"),
        TEST => sized!("test"),
        INC => one!("inc"),
        DEC => one!("dec"),
        _ => one!("neg"),
    }
    // Bits that are no flag hold leftovers here; whoever reads the flags picks the bits it wants.
    let mut flags = ax;
    if matches!(O, INC | DEC) {
        flags = (flags & !CF) | (nf & CF);
    }
    (r, flags)
}

pub(crate) const LEFT: u8 = 0;
pub(crate) const RIGHT: u8 = 1;
pub(crate) const RIGHT_SIGNED: u8 = 2;

/// Shifts 4 or 8 bytes by 1 to 31 (63) on the host's own ALU: the result, and CF, PF, ZF and SF; AF and OF, which hosts differ
/// in, are clear.
#[cfg(not(miri))]
#[inline(always)]
pub(crate) fn shift<const O: u8, const S: u8>(a: u64, n: u64) -> (u64, u64) {
    use core::arch::asm;
    let mut r = a;
    let ax: u64;
    macro_rules! by_cl {
        ($i:literal, $m:literal) => {
            // SAFETY: Registers and flags only; both are declared.
            unsafe {
                asm!(concat!($i, " {r:", $m, "}, cl"), "lahf", r = inout(reg) r, in("cl") n as u8, lateout("rax") ax,
                     options(pure, nomem, nostack))
            }
        };
    }
    match (O, S) {
        (LEFT, 4) => by_cl!("shl", "e"),
        (LEFT, _) => by_cl!("shl", "r"),
        (RIGHT, 4) => by_cl!("shr", "e"),
        (RIGHT, _) => by_cl!("shr", "r"),
        (_, 4) => by_cl!("sar", "e"),
        _ => by_cl!("sar", "r"),
    }
    (r, ax & (CF | PF | ZF | SF))
}

#[cfg(miri)]
pub(crate) fn shift<const O: u8, const S: u8>(a: u64, n: u64) -> (u64, u64) {
    let bits = 8 * S as u32;
    let (r, out) = match O {
        LEFT => (a << n, a << (n - 1) >> (bits - 1)),
        RIGHT => (a >> n, a >> (n - 1)),
        _ => {
            let wide = (a << (64 - bits)) as i64 >> (64 - bits);
            ((wide >> n) as u64, (wide >> (n - 1)) as u64)
        }
    };
    (r, of_result::<S>(r) | (out & 1) << 8)
}

#[cfg(miri)]
pub(crate) fn alu<const O: u8, const S: u8>(a: u64, b: u64, nf: u64) -> (u64, u64) {
    alu_portable::<O, S>(a, b, nf)
}

#[cfg(test)]
#[path = "flags_test.rs"]
mod tests;
