//! Single x87 operations on the host's x87 unit.
//!
//! Each function takes 80-bit operands from memory, runs one instruction under a given control word, and gives back the result
//! and the status word. The control word may unmask exceptions: an unmasked exception is only signalled by the next waiting
//! instruction, and between the operation and the store there are none but FNSTSW and FNCLEX. So the architecture's response
//! to an unmasked exception (operands unchanged, or a result with its exponent wrapped) is the host's own. Rust's calling
//! convention has the registers empty and the control word as FNINIT sets it, before and after; flags may be left over, and
//! condition codes too, so callers take only those that the instruction writes.
#![allow(unsafe_code)] // Inline assembly is what this file is for.

use std::arch::asm;

/// The control word that FNINIT sets.
const USUAL: u16 = 0x37f;

macro_rules! x87_asm {
    ($($line:expr),+; $($operand:tt)+) => {
        asm!(
            $($line),+,
            $($operand)+,
            out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
            out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
            options(nostack),
        )
    };
}

/// `a` and `b` in ST0 and ST1, the result in ST0.
macro_rules! registers {
    ($($name:ident => $insn:literal;)+) => { $(
        #[doc = concat!("`", $insn, "` with `a` in ST0 and `b` in ST1; the result, in ST0, goes to `a`. Returns the status word.")]
        pub(crate) fn $name(cw: u16, a: &mut u128, b: u128) -> u16 {
            let sw: u16;
            // SAFETY: `a`, `b` and `cw` are live, 10 bytes are read and written at most; the x87 registers are clobbered and left
            // empty, the control word is the one found on entry.
            unsafe {
                x87_asm!(
                    "fnclex",
                    "fld tbyte ptr [{b}]",
                    "fld tbyte ptr [{a}]",
                    "fldcw word ptr [{cw}]",
                    $insn,
                    "fnstsw ax",
                    "fnclex",
                    "fstp tbyte ptr [{a}]",
                    "fstp st(0)",
                    "fldcw word ptr [{usual}]";
                    a = in(reg) a as *mut u128, b = in(reg) &b, cw = in(reg) &cw, usual = in(reg) &USUAL, out("ax") sw
                );
            }
            *a &= (1 << 80) - 1;
            sw
        }
    )+ };
}

registers! {
    add => "fadd st(0), st(1)";
    sub => "fsub st(0), st(1)";
    subr => "fsubr st(0), st(1)";
    mul => "fmul st(0), st(1)";
    div => "fdiv st(0), st(1)";
    divr => "fdivr st(0), st(1)";
    com => "fcom st(1)";
    ucom => "fucom st(1)";
    sqrt => "fsqrt";
    rndint => "frndint";
    prem => "fprem";
    prem1 => "fprem1";
    scale => "fscale";
}

/// `a` in ST0, the other operand in memory, the result in ST0.
macro_rules! with_memory {
    ($($name:ident => $insn:literal;)+) => { $(
        #[doc = concat!("`", $insn, "` with `a` in ST0; the result goes to `a`. Returns the status word.")]
        pub(crate) fn $name(cw: u16, a: &mut u128, m: &[u8; 16]) -> u16 {
            let sw: u16;
            // SAFETY: As in `registers`; the memory operand has at most 8 bytes.
            unsafe {
                x87_asm!(
                    "fnclex",
                    "fld tbyte ptr [{a}]",
                    "fldcw word ptr [{cw}]",
                    concat!($insn, " ptr [{m}]"),
                    "fnstsw ax",
                    "fnclex",
                    "fstp tbyte ptr [{a}]",
                    "fldcw word ptr [{usual}]";
                    a = in(reg) a as *mut u128, m = in(reg) m.as_ptr(), cw = in(reg) &cw, usual = in(reg) &USUAL,
                    out("ax") sw
                );
            }
            *a &= (1 << 80) - 1;
            sw
        }
    )+ };
}

with_memory! {
    add_m32 => "fadd dword";
    sub_m32 => "fsub dword";
    subr_m32 => "fsubr dword";
    mul_m32 => "fmul dword";
    div_m32 => "fdiv dword";
    divr_m32 => "fdivr dword";
    com_m32 => "fcom dword";
    add_m64 => "fadd qword";
    sub_m64 => "fsub qword";
    subr_m64 => "fsubr qword";
    mul_m64 => "fmul qword";
    div_m64 => "fdiv qword";
    divr_m64 => "fdivr qword";
    com_m64 => "fcom qword";
    add_i16 => "fiadd word";
    sub_i16 => "fisub word";
    subr_i16 => "fisubr word";
    mul_i16 => "fimul word";
    div_i16 => "fidiv word";
    divr_i16 => "fidivr word";
    com_i16 => "ficom word";
    add_i32 => "fiadd dword";
    sub_i32 => "fisub dword";
    subr_i32 => "fisubr dword";
    mul_i32 => "fimul dword";
    div_i32 => "fidiv dword";
    divr_i32 => "fidivr dword";
    com_i32 => "ficom dword";
}

/// A load that converts.
macro_rules! loads {
    ($($name:ident => $insn:literal;)+) => { $(
        #[doc = concat!("`", $insn, "` with everything masked: value and status word.")]
        pub(crate) fn $name(m: &[u8; 16]) -> (u128, u16) {
            let mut a = 0u128;
            let sw: u16;
            // SAFETY: As in `registers`; the memory operand has at most 8 bytes.
            unsafe {
                x87_asm!(
                    "fnclex",
                    concat!($insn, " ptr [{m}]"),
                    "fnstsw ax",
                    "fstp tbyte ptr [{a}]";
                    a = in(reg) &raw mut a, m = in(reg) m.as_ptr(), out("ax") sw
                );
            }
            (a, sw)
        }
    )+ };
}

loads! {
    ld_m32 => "fld dword";
    ld_m64 => "fld qword";
}

/// A store that converts, and what pops the operand if it does not. `m` is written unless an unmasked exception prevents it.
macro_rules! stores {
    ($($name:ident => $insn:literal, $clean:literal;)+) => { $(
        #[doc = concat!("`", $insn, "` of `a`: memory is written unless an unmasked exception prevents it. Returns the status word.")]
        pub(crate) fn $name(cw: u16, a: u128, m: &mut [u8; 16]) -> u16 {
            let sw: u16;
            // SAFETY: As in `registers`; the memory operand has at most 10 bytes.
            unsafe {
                x87_asm!(
                    "fnclex",
                    "fld tbyte ptr [{a}]",
                    "fldcw word ptr [{cw}]",
                    concat!($insn, " ptr [{m}]"),
                    "fnstsw ax",
                    "fnclex",
                    $clean,
                    "fldcw word ptr [{usual}]";
                    a = in(reg) &a, m = in(reg) m.as_mut_ptr(), cw = in(reg) &cw, usual = in(reg) &USUAL, out("ax") sw
                );
            }
            sw
        }
    )+ };
}

stores! {
    st_m32 => "fst dword", "fstp st(0)";
    st_m64 => "fst qword", "fstp st(0)";
    ist_i16 => "fist word", "fstp st(0)";
    ist_i32 => "fist dword", "fstp st(0)";
    // The rest pop, which an unmasked exception would prevent: they are called with everything masked.
    ist_i64 => "fistp qword", "";
    bst => "fbstp tbyte", "";
}
