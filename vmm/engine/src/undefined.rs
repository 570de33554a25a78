//! What the manual leaves undefined, pinned.
//!
//! # Theory
//! The SDM leaves flags and results of some instructions undefined; silicon does not. Guests see what their part does, and
//! some look (to tell emulators from hardware), and a run must not depend on the host's vendor. So each such result is
//! pinned to what Intel parts do.
//!
//! # Practice
//! [`PINS`] says it in words, one row an instruction, each with its source: the manual where another page of it settles the
//! matter; a public source that compared with real parts; or [`CHOSEN`] where neither was found. The functions below the
//! table say the same for flags that need arithmetic; handlers are compared with them.
//!
//! # Left out
//! Differences among Intel parts. The measurements are of Skylake and later ("10980XE" is Cascade Lake, "6700K" Skylake, and the
//! differential test holds every flag here against an Intel host, which was an Emerald Rapids); older parts are said to differ in 16-bit SHLD and SHRD by more than 16.

/// Where undefined results come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Undefined {
    /// From [`PINS`]: the same on every host.
    #[default]
    Model,
    /// From the host CPU, for comparisons with it.
    Host,
}

/// One undefined result and what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The mnemonics, as the manual writes them, separated by spaces.
    pub instruction: &'static str,
    /// What the manual leaves undefined; flags by their names.
    pub what: &'static str,
    /// What happens instead.
    pub rule: &'static str,
    /// Who says that Intel parts do so, or [`CHOSEN`].
    pub source: &'static str,
}

/// No source was found; the rule is the simplest that is compatible with the manual.
pub const CHOSEN: &str = "chosen";

const IEM: &str = "VirtualBox, IEMAllAImplC.cpp: Intel variants, compared with a 10980XE (MUL, DIV, SHLD: and a 6700K)";
const SEEN: &str = "the differential test on a Xeon (Emerald Rapids)";
const IEM_BOTH: &str = "VirtualBox, IEMAllAImplC.cpp: one form for both vendors";
const IEM_BT: &str = "VirtualBox, IEMAllAImplC.cpp: seen on a Core i9-9980HK (BT, BTC)";
const IEM_BCD: &str = "VirtualBox, IEMAllCImpl.cpp: Intel branches of AAA to DAS";
const BSWAP: &str = "Bochs, bit.cc; miasm issue 1236 (six parts); VirtualBox, tstIEMAImpl.cpp";

/// Every undefined result of x86-64-v2 that the engine produces.
pub const PINS: &[Pin] = &[
    Pin {
        instruction: "AND OR XOR TEST",
        what: "AF",
        rule: "cleared",
        source: IEM_BOTH,
    },
    Pin {
        instruction: "SHL SAL",
        what: "AF; OF for counts other than 1; CF for counts of the size and more",
        rule: "AF cleared; OF as after the first of the one-bit shifts, so the exclusive-or of the operand's two highest bits; \
               CF the last bit shifted out, so 0 beyond the size",
        source: IEM,
    },
    Pin {
        instruction: "SHR",
        what: "AF; OF for counts other than 1; CF for counts of the size and more",
        rule: "AF cleared; OF as after the first of the one-bit shifts, so the operand's highest bit; CF the last bit shifted \
               out, so 0 beyond the size",
        source: IEM,
    },
    Pin {
        instruction: "SAR",
        what: "AF; OF for counts other than 1",
        rule: "AF cleared; OF cleared: the sign never changes",
        source: IEM,
    },
    Pin {
        instruction: "ROL",
        what: "OF for counts other than 1",
        rule: "unchanged for a register and an immediate; else as after the first of the one-bit rotations, so the \
               exclusive-or of the operand's two highest bits",
        source: SEEN,
    },
    Pin {
        instruction: "RCL",
        what: "OF for counts other than 1",
        rule: "as after the first of the one-bit rotations, so the exclusive-or of the operand's two highest bits; by a \
               multiple of its size plus one (8- and 16-bit) leaves CF and OF alone",
        source: IEM,
    },
    Pin {
        instruction: "ROR",
        what: "OF for counts other than 1",
        rule: "unchanged for a register and an immediate; else as after the first of the one-bit rotations, so the \
               exclusive-or of the operand's highest and lowest bits",
        source: SEEN,
    },
    Pin {
        instruction: "RCR",
        what: "OF for counts other than 1",
        rule: "as after the first of the one-bit rotations, so the exclusive-or of CF before and the operand's highest bit; by a \
               multiple of its size plus one (8- and 16-bit) leaves CF and OF alone",
        source: IEM,
    },
    Pin {
        instruction: "SHLD",
        what: "AF; OF for counts other than 1; OF SF ZF AF PF CF and the result for 16-bit operands and counts above 16",
        rule: "AF cleared; OF as after the first of the one-bit shifts, so the exclusive-or of the destination's two highest \
               bits; above 16 the bits shifted in after the source are the destination's own; CF the last bit shifted out; SF, \
               ZF and PF of the result",
        source: IEM,
    },
    Pin {
        instruction: "SHRD",
        what: "AF; OF for counts other than 1; OF SF ZF AF PF CF and the result for 16-bit operands and counts above 16",
        rule: "AF cleared; OF as after the first of the one-bit shifts, so the exclusive-or of the destination's highest and \
               the source's lowest bit; above 16 the bits shifted in after the source are the destination's own; CF the last \
               bit shifted out; SF, ZF and PF of the result",
        source: IEM,
    },
    Pin {
        instruction: "MUL IMUL",
        what: "SF ZF AF PF",
        rule: "SF and PF of the lower half of the product (of the truncated product where there is only that); ZF and AF cleared",
        source: IEM,
    },
    Pin {
        instruction: "DIV IDIV",
        what: "CF OF SF ZF AF PF",
        rule: "unchanged",
        source: IEM,
    },
    Pin {
        instruction: "BSF BSR",
        what: "CF OF SF AF PF; the destination when the source is 0",
        rule: "CF, OF, SF and AF cleared; PF of the bit index, set when the source is 0; the destination then keeps its value, \
               all 64 bits of it",
        source: IEM,
    },
    Pin {
        instruction: "ANDN BLSI BLSMSK BLSR BZHI BEXTR",
        what: "AF PF; SF of BEXTR",
        rule: "cleared",
        source: SEEN,
    },
    Pin {
        instruction: "TZCNT LZCNT",
        what: "OF SF AF PF",
        rule: "cleared",
        source: SEEN,
    },
    Pin {
        instruction: "BT BTS BTR BTC",
        what: "OF SF AF PF",
        rule: "unchanged",
        source: IEM_BT,
    },
    Pin {
        instruction: "AAA AAS",
        what: "OF SF ZF PF",
        rule: "OF cleared; SF, ZF and PF of AL after the adjustment",
        source: IEM_BCD,
    },
    Pin {
        instruction: "DAA DAS",
        what: "OF",
        rule: "cleared",
        source: IEM_BCD,
    },
    Pin {
        instruction: "AAM",
        what: "OF AF CF",
        rule: "cleared",
        source: IEM_BCD,
    },
    Pin {
        instruction: "AAD",
        what: "OF AF CF",
        rule: "those of the addition of AL and the lower byte of the product",
        source: SEEN,
    },
    Pin {
        instruction: "BSWAP",
        what: "the result with a 16-bit register",
        rule: "0 in bits 15:0",
        source: BSWAP,
    },
    Pin {
        instruction: "MOV",
        what: "OF SF ZF AF PF CF after a move to or from a control or debug register",
        rule: "unchanged",
        source: CHOSEN,
    },
    Pin {
        instruction: "PUSH",
        what: "bits 31:16 of the stack slot of a segment register, with a 32-bit operand size",
        rule: "memory keeps what it had: a 16-bit write at the new stack pointer",
        source: "SDM Vol. 2B \"PUSH\": recent Core and Atom parts write 16 bits",
    },
    Pin {
        instruction: "SMSW",
        what: "bits 31:16 of a 32-bit register outside 64-bit mode",
        rule: "those of CR0, as in 64-bit mode",
        source: "Bochs, crregs.cc; SDM Vol. 2B \"SMSW\" for 64-bit mode",
    },
    Pin {
        instruction: "SLDT",
        what: "bits 31:16 of a 32-bit register",
        rule: "cleared",
        source: "SDM Vol. 2B \"SLDT\": so since the P6 family",
    },
    Pin {
        instruction: "LAR",
        what: "bits 19:16 of the result, the part of the limit",
        rule: "cleared",
        source: CHOSEN,
    },
    Pin {
        instruction: "SGDT SIDT",
        what: "the sixth byte of the operand, with a 16-bit operand size: the manual has zeros, parts differ",
        rule: "bits 31:24 of the base",
        source: "Bochs, protect_ctrl.cc: 32-bit processors always write 32 bits of base",
    },
    Pin {
        instruction: "RCPPS RCPSS",
        what: "the result within a relative error of 1.5 * 2^-12",
        rule: "the reciprocal of the middle of the operand's interval (2048 for each power of two), to 12 bits after the \
               leading one, rounded to nearest; tiny results are 0",
        source: "Bochs, sse_rcp.cc: states this rule; every interval was compared with a Xeon (Emerald Rapids)",
    },
    Pin {
        instruction: "RSQRTPS RSQRTSS",
        what: "the result within a relative error of 1.5 * 2^-12",
        rule: "the same scheme with 1024 intervals for each power of two",
        source: "Bochs, sse_rcp.cc: 184 entries of its tables were compared, and every interval with a Xeon (Emerald Rapids)",
    },
    Pin {
        instruction: "FSIN FCOS FSINCOS FPTAN",
        what: "the last bits of the result",
        rule: "the argument reduced by a pi of 66 bits, the function of what is left rounded correctly; sine and tangent of \
               less than 2^-68 are the operand, however it is rounded",
        source: "SDM Vol. 1 8.3.8 \"Approximation of Pi\" for the reduction, a Xeon (Emerald Rapids) for what is tiny; the \
                 rest is chosen",
    },
    Pin {
        instruction: "F2XM1 FYL2X FYL2XP1 FPATAN",
        what: "the last bits of the result; the result of F2XM1 and FYL2XP1 outside their range",
        rule: "rounded correctly; F2XM1 beyond 1 and -1 gives its operand, FYL2XP1 goes on to -1, its pole",
        source: CHOSEN,
    },
    Pin {
        instruction: "FCMOVB FCMOVE FCMOVBE FCMOVU FCMOVNB FCMOVNE FCMOVNBE FCMOVNU",
        what: "C0 C2 C3",
        rule: "unchanged, and C1 too unless the stack underflows",
        source: CHOSEN,
    },
    Pin {
        instruction: "FCOM FCOMP FCOMPP FUCOM FUCOMP FUCOMPP FTST FICOM FICOMP",
        what: "C0 C2 C3 with an unmasked exception",
        rule: "as with a masked one",
        source: SEEN,
    },
    Pin {
        instruction: "FPREM FPREM1",
        what: "C0 C1 C3 when the result is a NaN",
        rule: "C0 and C3 unchanged, C1 and C2 cleared",
        source: CHOSEN,
    },
    Pin {
        instruction: "MASKMOVQ MASKMOVDQU",
        what: "faults for bytes whose mask is clear",
        rule: "as for a store of all bytes, whatever the mask is, the upper eight of sixteen first",
        source: SEEN,
    },
    Pin {
        instruction: "FLD FLD1 FLDL2E FLDL2T FLDLG2 FLDLN2 FLDPI FLDZ",
        what: "C0 C2 C3",
        rule: "unchanged",
        source: "VirtualBox, IEMAllAImplC.cpp: compared with a 10980XE (FLD1 and its kin)",
    },
    Pin {
        instruction: "FADD FSUB FSUBR FMUL FDIV FDIVR FSQRT FABS FCHS FRNDINT FSCALE FXTRACT FXCH FST FSTP FIST FISTP FBSTP FILD",
        what: "C0 C2 C3",
        rule: "unchanged",
        source: CHOSEN,
    },
    Pin {
        instruction: "FBLD",
        what: "the value of digits above 9; C0 C2 C3",
        rule: "ten to fifteen; the codes unchanged",
        source: CHOSEN,
    },
    Pin {
        instruction: "FXSAVE FSAVE FSTENV",
        what: "FOP, FIP and FDP when no exception is pending",
        rule: "those of the last x87 instruction that is not a control instruction, always stored",
        source: "SDM Vol. 1 8.1.8 \"x87 FPU Instruction and Data (Operand) Pointers\"; other vendors store them with ES only",
    },
];

const CF: u64 = 1 << 0;
const PF: u64 = 1 << 2;
const AF: u64 = 1 << 4;
const ZF: u64 = 1 << 6;
const SF: u64 = 1 << 7;
const OF: u64 = 1 << 11;
const STATUS: u64 = CF | PF | AF | ZF | SF | OF;

/// The instructions of BMI1 and BMI2 that leave flags undefined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)] // They are the manual's names.
pub enum Bmi {
    Andn,
    Bextr,
    Blsi,
    Blsmsk,
    Blsr,
    Bzhi,
}

/// The shifts and rotations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shift {
    /// ROL.
    Rol,
    /// ROR.
    Ror,
    /// RCL.
    Rcl,
    /// RCR.
    Rcr,
    /// SHL and its other name, SAL.
    Shl,
    /// SHR.
    Shr,
    /// SAR.
    Sar,
    /// SHLD: 16 bits and more.
    Shld,
    /// SHRD: 16 bits and more.
    Shrd,
}

/// The result of a shift or rotation, and RFLAGS after it: defined flags as the manual has them, the others as pinned.
///
/// `bits` is the operand size (8, 16, 32, 64), `src` the second operand of SHLD and SHRD, `count` the count as the
/// instruction gives it. `flags` is RFLAGS before. Bits of the operands above the size do not count. ROL and ROR are those of
/// memory or by CL: by an immediate they leave OF of a register's rotation alone, which is the handler's business.
pub fn shift(op: Shift, bits: u32, dst: u64, src: u64, count: u8, flags: u64) -> (u64, u64) {
    let mask = u64::MAX >> (64 - bits);
    let (dst, src) = (dst & mask, src & mask);
    let count = u32::from(count) & if bits == 64 { 63 } else { 31 };
    let carry = flags & CF;
    let top = |value: u64| value >> (bits - 1) & 1;
    let second = |value: u64| value >> (bits - 2) & 1;
    // RCL and RCR rotate through CF, so come round after one bit more.
    let turns = if matches!(op, Shift::Rcl | Shift::Rcr) {
        count % (bits + 1)
    } else {
        count
    };
    if turns == 0 {
        return (dst, flags);
    }

    let (result, out) = match op {
        Shift::Rol => {
            let n = turns % bits;
            let result = (dst << n | dst.checked_shr(bits - n).unwrap_or(0)) & mask;
            (result, result & 1)
        }
        Shift::Ror => {
            let n = turns % bits;
            let result = (dst >> n | dst.checked_shl(bits - n).unwrap_or(0)) & mask;
            (result, top(result))
        }
        Shift::Rcl => {
            let ring = u128::from(carry) << bits | u128::from(dst);
            let ring = ring << turns | ring >> (bits + 1 - turns);
            (ring as u64 & mask, (ring >> bits) as u64 & 1)
        }
        Shift::Rcr => {
            let ring = u128::from(carry) << bits | u128::from(dst);
            let ring = ring >> turns | ring << (bits + 1 - turns);
            (ring as u64 & mask, (ring >> bits) as u64 & 1)
        }
        Shift::Shl => {
            let value = u128::from(dst) << turns;
            (value as u64 & mask, (value >> bits) as u64 & 1)
        }
        Shift::Shr => (dst >> turns, dst >> (turns - 1) & 1),
        Shift::Sar => {
            let value = i128::from((dst << (64 - bits)) as i64 >> (64 - bits));
            ((value >> turns) as u64 & mask, (value >> (turns - 1)) as u64 & 1)
        }
        // Only 16-bit operands have counts above the size.
        Shift::Shld if bits == 16 => {
            let value = dst << 32 | src << 16 | dst;
            (value << turns >> 32 & mask, value >> (48 - turns) & 1)
        }
        Shift::Shrd if bits == 16 => {
            let value = dst << 32 | src << 16 | dst;
            (value >> turns & mask, value >> (turns - 1) & 1)
        }
        Shift::Shld => {
            let value = u128::from(dst) << bits | u128::from(src);
            ((value << turns >> bits) as u64 & mask, dst >> (bits - turns) & 1)
        }
        Shift::Shrd => {
            let value = u128::from(src) << bits | u128::from(dst);
            ((value >> turns) as u64 & mask, dst >> (turns - 1) & 1)
        }
    };
    let overflow = match op {
        Shift::Rol | Shift::Rcl | Shift::Shl | Shift::Shld => top(dst) ^ second(dst),
        Shift::Ror => top(dst) ^ dst & 1,
        Shift::Rcr => carry ^ top(dst),
        Shift::Shr => top(dst),
        Shift::Sar => 0,
        Shift::Shrd => top(dst) ^ src & 1,
    };
    let kept = match op {
        Shift::Rol | Shift::Ror | Shift::Rcl | Shift::Rcr => flags & !(CF | OF),
        _ => flags & !STATUS | of_result(bits, result),
    };
    (result, kept | out | if overflow != 0 { OF } else { 0 })
}

/// The status flags after MUL or IMUL: `low` is the lower half of the product, `carry` whether it lost anything.
pub fn multiply(bits: u32, low: u64, carry: bool) -> u64 {
    of_result(bits, low) & !ZF | if carry { CF | OF } else { 0 }
}

/// The status flags after BSF or BSR: `index` is the bit that was found.
pub fn bit_scan(index: Option<u32>) -> u64 {
    match index {
        Some(index) => of_result(8, u64::from(index)) & PF,
        None => ZF | PF,
    }
}

/// The decimal adjustments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adjust {
    /// AAA.
    Aaa,
    /// AAS.
    Aas,
    /// DAA.
    Daa,
    /// DAS.
    Das,
    /// AAM with its base, which is not 0: that is #DE.
    Aam(core::num::NonZeroU8),
    /// AAD with its base.
    Aad(u8),
}

/// AX and RFLAGS after a decimal adjustment.
pub fn adjust(op: Adjust, ax: u16, flags: u64) -> (u16, u64) {
    let [al, ah] = ax.to_le_bytes();
    let low = al & 0xF > 9 || flags & AF != 0;
    let high = al > 0x99 || flags & CF != 0;
    let (ax, carries) = match op {
        Adjust::Aaa => (
            if low { ax.wrapping_add(0x106) } else { ax } & 0xFF0F,
            if low { AF | CF } else { 0 },
        ),
        Adjust::Aas => (
            if low { ax.wrapping_sub(0x106) } else { ax } & 0xFF0F,
            if low { AF | CF } else { 0 },
        ),
        Adjust::Daa => {
            let al = al
                .wrapping_add(if low { 6 } else { 0 })
                .wrapping_add(if high { 0x60 } else { 0 });
            (
                u16::from_le_bytes([al, ah]),
                if low { AF } else { 0 } | if high { CF } else { 0 },
            )
        }
        Adjust::Das => {
            let borrow = high || low && al < 6;
            let al = al
                .wrapping_sub(if low { 6 } else { 0 })
                .wrapping_sub(if high { 0x60 } else { 0 });
            (
                u16::from_le_bytes([al, ah]),
                if low { AF } else { 0 } | if borrow { CF } else { 0 },
            )
        }
        Adjust::Aam(base) => (u16::from_le_bytes([al % base, al / base]), 0),
        Adjust::Aad(base) => {
            let (tens, sum) = (ah.wrapping_mul(base), al.wrapping_add(ah.wrapping_mul(base)));
            let carry = if sum < al { CF } else { 0 };
            let half = if (al ^ tens ^ sum) & 0x10 != 0 { AF } else { 0 };
            let overflow = if (al ^ sum) & (tens ^ sum) & 0x80 != 0 { OF } else { 0 };
            (u16::from(sum), carry | half | overflow)
        }
    };
    (ax, flags & !STATUS | of_result(8, u64::from(ax)) | carries)
}

/// SF, ZF and PF of a result of this size.
fn of_result(bits: u32, result: u64) -> u64 {
    let result = result << (64 - bits);
    let lowest = (result >> (64 - bits)) as u8;
    let sign = if result >> 63 != 0 { SF } else { 0 };
    let zero = if result == 0 { ZF } else { 0 };
    let parity = if lowest.count_ones().is_multiple_of(2) { PF } else { 0 };
    sign | zero | parity
}

#[cfg(test)]
#[path = "undefined_test.rs"]
mod tests;
