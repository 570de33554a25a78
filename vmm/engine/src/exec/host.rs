//! The host's own instructions: for undefined results as the host has them, and for a division that the language lacks.
// Inline assembly is the only way to run a chosen instruction. What runs here touches registers and flags alone.
#![allow(unsafe_code)]

use core::arch::asm;

use crate::undefined::{Bmi, Shift};

/// The arithmetic bits of RFLAGS, and the bit that is always set.
const STATUS: u64 = 0x8d5;

/// Runs `$body` with RFLAGS's arithmetic bits set from `$flags`, and reads RFLAGS afterwards into `$after`.
macro_rules! flagged {
    ($flags:expr, $after:ident, $body:expr, $($operands:tt)*) => {{
        let $after: u64;
        // SAFETY: The instruction works on the operands declared and on the arithmetic flags; the stack is balanced.
        unsafe {
            asm!("push {fin}", "popfq", $body, "pushfq", "pop {fout}",
                 fin = in(reg) $flags & STATUS | 0x202, fout = lateout(reg) $after, $($operands)*)
        };
        $after & STATUS
    }};
}

macro_rules! by_cl {
    ($i:literal, $bits:expr, $dst:ident, $n:expr, $flags:expr) => {
        match $bits {
            8 => {
                let mut r = $dst as u8;
                let f = flagged!($flags, after, concat!($i, " {r}, cl"), r = inout(reg_byte) r, in("cl") $n);
                (r as u64, f)
            }
            16 => {
                let mut r = $dst;
                let f = flagged!($flags, after, concat!($i, " {r:x}, cl"), r = inout(reg) r, in("cl") $n);
                (r as u16 as u64, f)
            }
            32 => {
                let mut r = $dst;
                let f = flagged!($flags, after, concat!($i, " {r:e}, cl"), r = inout(reg) r, in("cl") $n);
                (r as u32 as u64, f)
            }
            _ => {
                let mut r = $dst;
                let f = flagged!($flags, after, concat!($i, " {r}, cl"), r = inout(reg) r, in("cl") $n);
                (r, f)
            }
        }
    };
}

macro_rules! double {
    ($i:literal, $bits:expr, $dst:ident, $src:expr, $n:expr, $flags:expr) => {{
        let mut r = $dst;
        let f = match $bits {
            16 => flagged!($flags, after, concat!($i, " {r:x}, {s:x}, cl"), r = inout(reg) r, s = in(reg) $src, in("cl") $n),
            32 => flagged!($flags, after, concat!($i, " {r:e}, {s:e}, cl"), r = inout(reg) r, s = in(reg) $src, in("cl") $n),
            _ => flagged!($flags, after, concat!($i, " {r}, {s}, cl"), r = inout(reg) r, s = in(reg) $src, in("cl") $n),
        };
        (r & u64::MAX >> (64 - $bits), f)
    }};
}

/// As [`crate::undefined::shift`], but by the host.
pub(crate) fn shift(op: Shift, bits: u32, dst: u64, src: u64, count: u8, flags: u64) -> (u64, u64) {
    match op {
        Shift::Rol => by_cl!("rol", bits, dst, count, flags),
        Shift::Ror => by_cl!("ror", bits, dst, count, flags),
        Shift::Rcl => by_cl!("rcl", bits, dst, count, flags),
        Shift::Rcr => by_cl!("rcr", bits, dst, count, flags),
        Shift::Shl => by_cl!("shl", bits, dst, count, flags),
        Shift::Shr => by_cl!("shr", bits, dst, count, flags),
        Shift::Sar => by_cl!("sar", bits, dst, count, flags),
        Shift::Shld => double!("shld", bits, dst, src, count, flags),
        Shift::Shrd => double!("shrd", bits, dst, src, count, flags),
    }
}

/// Whether ROL and ROR of a register by an immediate other than 1 leave OF alone on this host, as on Intel's processors. It is
/// tried with operands whose sign the first, the second, both or none of two rotations by one bit change.
pub(crate) fn rotations_keep_of() -> bool {
    static ANSWER: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *ANSWER.get_or_init(|| {
        const OF: u64 = 1 << 11;
        [0, OF].into_iter().all(|before| {
            let rotated = |value: u32| flagged!(before, after, "rol {r:e}, 2", r = inout(reg) value => _);
            [0x4000_0000, 0x6000_0000, 0x2000_0000, 0]
                .into_iter()
                .all(|value| rotated(value) & OF == before)
        })
    })
}

/// RFLAGS after MUL (`signed`: IMUL) of two operands of `bits`; the result is the same on every host.
pub(crate) fn multiply(signed: bool, bits: u32, a: u64, b: u64, flags: u64) -> u64 {
    macro_rules! run {
        ($i:literal) => {
            match bits {
                8 => flagged!(flags, after, concat!($i, " {b}"), b = in(reg_byte) b as u8, inout("ax") a as u16 => _),
                16 => flagged!(flags, after, concat!($i, " {b:x}"), b = in(reg) b, inout("rax") a => _, out("rdx") _),
                32 => flagged!(flags, after, concat!($i, " {b:e}"), b = in(reg) b, inout("rax") a => _, out("rdx") _),
                _ => flagged!(flags, after, concat!($i, " {b}"), b = in(reg) b, inout("rax") a => _, out("rdx") _),
            }
        };
    }
    if signed { run!("imul") } else { run!("mul") }
}

/// RFLAGS after an IMUL of two operands with a result of their size: the host may set them otherwise than after the
/// one-operand form.
pub(crate) fn multiply_truncated(bits: u32, a: u64, b: u64, flags: u64) -> u64 {
    match bits {
        16 => flagged!(flags, after, "imul {a:x}, {b:x}", a = inout(reg) a => _, b = in(reg) b),
        32 => flagged!(flags, after, "imul {a:e}, {b:e}", a = inout(reg) a => _, b = in(reg) b),
        _ => flagged!(flags, after, "imul {a}, {b}", a = inout(reg) a => _, b = in(reg) b),
    }
}

/// RFLAGS after a division by the host that does not raise #DE: the divisor is not 0 and the quotient fits. `high` and `low`
/// are the halves of the dividend, of `bits` each.
pub(crate) fn divide(signed: bool, bits: u32, high: u64, low: u64, divisor: u64, flags: u64) -> u64 {
    macro_rules! run {
        ($i:literal) => {
            match bits {
                8 => {
                    let ax = (high as u8 as u16) << 8 | low as u8 as u16;
                    flagged!(flags, after, concat!($i, " {b}"), b = in(reg_byte) divisor as u8, inout("ax") ax => _)
                }
                16 => {
                    flagged!(flags, after, concat!($i, " {b:x}"), b = in(reg) divisor, inout("rax") low => _, inout("rdx") high => _)
                }
                32 => {
                    flagged!(flags, after, concat!($i, " {b:e}"), b = in(reg) divisor, inout("rax") low => _, inout("rdx") high => _)
                }
                _ => flagged!(flags, after, concat!($i, " {b}"), b = in(reg) divisor, inout("rax") low => _, inout("rdx") high => _),
            }
        };
    }
    if signed { run!("idiv") } else { run!("div") }
}

/// The destination's 64 bits and RFLAGS after BSF (`forward`) or BSR of `bits` (16, 32, 64) into a register that holds `dst`.
pub(crate) fn bit_scan(forward: bool, bits: u32, dst: u64, src: u64, flags: u64) -> (u64, u64) {
    let mut r = dst;
    macro_rules! run {
        ($i:literal) => {
            match bits {
                16 => flagged!(flags, after, concat!($i, " {r:x}, {s:x}"), r = inout(reg) r, s = in(reg) src),
                32 => flagged!(flags, after, concat!($i, " {r:e}, {s:e}"), r = inout(reg) r, s = in(reg) src),
                _ => flagged!(flags, after, concat!($i, " {r}, {s}"), r = inout(reg) r, s = in(reg) src),
            }
        };
    }
    let f = if forward { run!("bsf") } else { run!("bsr") };
    (r, f)
}

/// RFLAGS after TZCNT (`forward`) or LZCNT of `bits` (16, 32, 64). The host has it wherever the model does: see `host_can`.
pub(crate) fn bit_count(forward: bool, bits: u32, src: u64, flags: u64) -> u64 {
    macro_rules! run {
        ($i:literal) => {
            match bits {
                16 => flagged!(flags, after, concat!($i, " {r:x}, {s:x}"), r = out(reg) _, s = in(reg) src),
                32 => flagged!(flags, after, concat!($i, " {r:e}, {s:e}"), r = out(reg) _, s = in(reg) src),
                _ => flagged!(flags, after, concat!($i, " {r}, {s}"), r = out(reg) _, s = in(reg) src),
            }
        };
    }
    if forward { run!("tzcnt") } else { run!("lzcnt") }
}

/// RFLAGS after BT of `bits` (16, 32, 64).
pub(crate) fn bit_test(bits: u32, value: u64, index: u64, flags: u64) -> u64 {
    match bits {
        16 => flagged!(flags, after, "bt {v:x}, {i:x}", v = in(reg) value, i = in(reg) index),
        32 => flagged!(flags, after, "bt {v:e}, {i:e}", v = in(reg) value, i = in(reg) index),
        _ => flagged!(flags, after, "bt {v}, {i}", v = in(reg) value, i = in(reg) index),
    }
}

/// BSWAP of a 16-bit register.
pub(crate) fn swap16(value: u64) -> u64 {
    let mut r = value;
    // SAFETY: Registers only.
    unsafe { asm!(".byte 0x66", "bswap {r:e}", r = inout(reg) r, options(pure, nomem, nostack, preserves_flags)) };
    r & 0xffff
}

/// `high:low` divided by `divisor`: quotient and remainder. `None` if the divisor is 0 or the quotient has more than 64 bits.
pub(crate) fn divide_wide(high: u64, low: u64, divisor: u64) -> Option<(u64, u64)> {
    if high >= divisor {
        return None;
    }
    let (mut low, mut high) = (low, high);
    // SAFETY: Registers and flags only; `high < divisor`, so the quotient fits and there is no #DE.
    unsafe { asm!("div {d}", d = in(reg) divisor, inout("rax") low, inout("rdx") high, options(pure, nomem, nostack)) };
    Some((low, high))
}

/// RFLAGS after the instruction of BMI1 or BMI2 whose number is `op`, of 64 bits if `wide` and else of 32. The host has it
/// wherever the model does: see `host_can`.
pub(crate) fn bmi(op: u8, wide: bool, a: u64, b: u64, flags: u64) -> u64 {
    macro_rules! three {
        ($i:literal, $a:ident, $b:ident) => {
            if wide {
                flagged!(flags, after, concat!($i, " {r}, {x}, {y}"), r = out(reg) _, x = in(reg) $a, y = in(reg) $b)
            } else {
                flagged!(flags, after, concat!($i, " {r:e}, {x:e}, {y:e}"), r = out(reg) _, x = in(reg) $a, y = in(reg) $b)
            }
        };
    }
    macro_rules! two {
        ($i:literal) => {
            if wide {
                flagged!(flags, after, concat!($i, " {r}, {x}"), r = out(reg) _, x = in(reg) a)
            } else {
                flagged!(flags, after, concat!($i, " {r:e}, {x:e}"), r = out(reg) _, x = in(reg) a)
            }
        };
    }
    const ANDN: u8 = Bmi::Andn as u8;
    const BEXTR: u8 = Bmi::Bextr as u8;
    const BLSI: u8 = Bmi::Blsi as u8;
    const BLSMSK: u8 = Bmi::Blsmsk as u8;
    const BLSR: u8 = Bmi::Blsr as u8;
    match op {
        ANDN => three!("andn", a, b),
        BEXTR => three!("bextr", a, b),
        BLSI => two!("blsi"),
        BLSMSK => two!("blsmsk"),
        BLSR => two!("blsr"),
        _ => three!("bzhi", a, b),
    }
}
