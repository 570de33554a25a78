//! The x87 instructions, on [`FpuState`] alone.
//!
//! # Theory
//! An x87 instruction checks the stack, then its operands (invalid, denormal, zero divide), then computes and rounds (overflow,
//! underflow, precision). A masked exception has a default response; an unmasked one of the first kind leaves operands and
//! stack as they were, one of the second delivers a result with a wrapped exponent to a register and none at all to memory.
//! Either way the flag is set, and an unmasked one makes ES pending for the next waiting instruction. SDM Vol. 1 8.4 "x87 FPU
//! Floating-Point Exception Handling", 8.5 "x87 FPU Floating-Point Exception Conditions".
//!
//! # Practice
//! Arithmetic, comparisons and conversions run on the host's unit ([`super::host`]); stack, tags, condition codes and what
//! differs between vendors are here, the transcendental functions in [`super::transcendental`].
//!
//! # Left to the caller
//! #NM, the pending #MF, the memory operand's address and faults, FIP, FDP and FOP, and the control instructions (FNINIT,
//! FLDCW, FSTENV and their like), which are methods of [`FpuState`].

use iced_x86::{Code, Instruction, MemorySize, Mnemonic, OpKind, Register};

use super::host;
use super::state::{FpuState, sw};
use super::transcendental as math;
use super::wide::Wide;

/// What an instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // They are the manual's names without their F.
#[repr(u8)]
pub enum X87Op {
    Add,
    Mul,
    Sub,
    Subr,
    Div,
    Divr,
    Com,
    Ucom,
    Comi,
    Ucomi,
    Tst,
    Xam,
    Ld,
    /// FLD1 and the other constants; `aux` says which.
    Constant,
    St,
    Istt,
    Xch,
    /// FCMOVcc; `aux` is the condition.
    Cmov,
    Chs,
    Abs,
    Sqrt,
    Rndint,
    Prem,
    Prem1,
    Scale,
    Xtract,
    F2xm1,
    Yl2x,
    Yl2xp1,
    Ptan,
    Patan,
    Sin,
    Cos,
    Sincos,
    Free,
    Incstp,
    Decstp,
    Nop,
}

const OPS: [X87Op; 38] = {
    use X87Op::*;
    [
        Add, Mul, Sub, Subr, Div, Divr, Com, Ucom, Comi, Ucomi, Tst, Xam, Ld, Constant, St, Istt, Xch, Cmov, Chs, Abs,
        Sqrt, Rndint, Prem, Prem1, Scale, Xtract, F2xm1, Yl2x, Yl2xp1, Ptan, Patan, Sin, Cos, Sincos, Free, Incstp,
        Decstp, Nop,
    ]
};

/// A memory operand's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Floating point, integer, packed decimal; and the length in bits.
#[repr(u8)]
pub enum X87Memory {
    None,
    F32,
    F64,
    F80,
    I16,
    I32,
    I64,
    Bcd,
}

const MEMORY: [X87Memory; 8] = {
    use X87Memory::*;
    [None, F32, F64, F80, I16, I32, I64, Bcd]
};

impl X87Memory {
    /// Its length in bytes.
    pub const fn size(self) -> usize {
        match self {
            X87Memory::None => 0,
            X87Memory::F32 | X87Memory::I32 => 4,
            X87Memory::F64 | X87Memory::I64 => 8,
            X87Memory::F80 | X87Memory::Bcd => 10,
            X87Memory::I16 => 2,
        }
    }
}

/// One instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct X87Insn {
    /// What it does.
    pub op: X87Op,
    /// Its operand in memory.
    pub memory: X87Memory,
    /// The i of its operand ST(i).
    pub i: u8,
    /// ST(i) is the destination, not ST(0).
    pub to_sti: bool,
    /// How often the stack is popped at the end.
    pub pops: u8,
    /// Which constant, or which condition.
    pub aux: u8,
}

/// What an instruction leaves to do for the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct X87Effect {
    /// The memory operand is to be written.
    pub store: bool,
    /// The arithmetic flags, all six, where the instruction writes them.
    pub flags: Option<u32>,
}

impl X87Insn {
    const fn new(op: X87Op) -> X87Insn {
        X87Insn {
            op,
            memory: X87Memory::None,
            i: 0,
            to_sti: false,
            pops: 0,
            aux: 0,
        }
    }

    /// The instruction as a number, for an op to hold.
    pub fn to_bits(self) -> u64 {
        self.op as u64
            | (self.memory as u64) << 8
            | (self.i as u64) << 16
            | (self.to_sti as u64) << 24
            | (self.pops as u64) << 32
            | (self.aux as u64) << 40
    }

    /// The inverse of [`X87Insn::to_bits`].
    pub fn from_bits(bits: u64) -> X87Insn {
        let byte = |n: u32| (bits >> (8 * n)) as u8;
        X87Insn {
            op: OPS[byte(0) as usize % OPS.len()],
            memory: MEMORY[byte(1) as usize % MEMORY.len()],
            i: byte(2) & 7,
            to_sti: byte(3) != 0,
            pops: byte(4),
            aux: byte(5),
        }
    }

    /// Whether the memory operand is written (perhaps) rather than read.
    pub fn writes_memory(self) -> bool {
        self.memory != X87Memory::None && matches!(self.op, X87Op::St | X87Op::Istt)
    }

    /// From the decoder. `None`: not an x87 instruction, or a control instruction.
    pub fn decode(insn: &Instruction) -> Option<X87Insn> {
        use Mnemonic as M;
        use X87Op::*;
        let (op, pops, aux) = match insn.mnemonic() {
            M::Fadd | M::Fiadd => (Add, 0, 0),
            M::Faddp => (Add, 1, 0),
            M::Fmul | M::Fimul => (Mul, 0, 0),
            M::Fmulp => (Mul, 1, 0),
            M::Fsub | M::Fisub => (Sub, 0, 0),
            M::Fsubp => (Sub, 1, 0),
            M::Fsubr | M::Fisubr => (Subr, 0, 0),
            M::Fsubrp => (Subr, 1, 0),
            M::Fdiv | M::Fidiv => (Div, 0, 0),
            M::Fdivp => (Div, 1, 0),
            M::Fdivr | M::Fidivr => (Divr, 0, 0),
            M::Fdivrp => (Divr, 1, 0),
            M::Fcom | M::Ficom => (Com, 0, 0),
            M::Fcomp | M::Ficomp => (Com, 1, 0),
            M::Fcompp => (Com, 2, 0),
            M::Fucom => (Ucom, 0, 0),
            M::Fucomp => (Ucom, 1, 0),
            M::Fucompp => (Ucom, 2, 0),
            M::Fcomi => (Comi, 0, 0),
            M::Fcomip => (Comi, 1, 0),
            M::Fucomi => (Ucomi, 0, 0),
            M::Fucomip => (Ucomi, 1, 0),
            M::Ftst => (Tst, 0, 0),
            M::Fxam => (Xam, 0, 0),
            M::Fld | M::Fild | M::Fbld => (Ld, 0, 0),
            M::Fld1 => (Constant, 0, 0),
            M::Fldl2t => (Constant, 0, 1),
            M::Fldl2e => (Constant, 0, 2),
            M::Fldpi => (Constant, 0, 3),
            M::Fldlg2 => (Constant, 0, 4),
            M::Fldln2 => (Constant, 0, 5),
            M::Fldz => (Constant, 0, 6),
            M::Fst | M::Fist => (St, 0, 0),
            M::Fstp | M::Fistp | M::Fbstp => (St, 1, 0),
            // The undocumented FSTP ST(i) that does not look at its source's tag ("no check for empty").
            M::Fstpnce => (St, 1, 1),
            M::Fisttp => (Istt, 1, 0),
            M::Fxch => (Xch, 0, 0),
            M::Fcmovb => (Cmov, 0, 0),
            M::Fcmove => (Cmov, 0, 1),
            M::Fcmovbe => (Cmov, 0, 2),
            M::Fcmovu => (Cmov, 0, 3),
            M::Fcmovnb => (Cmov, 0, 4),
            M::Fcmovne => (Cmov, 0, 5),
            M::Fcmovnbe => (Cmov, 0, 6),
            M::Fcmovnu => (Cmov, 0, 7),
            M::Fchs => (Chs, 0, 0),
            M::Fabs => (Abs, 0, 0),
            M::Fsqrt => (Sqrt, 0, 0),
            M::Frndint => (Rndint, 0, 0),
            M::Fprem => (Prem, 0, 0),
            M::Fprem1 => (Prem1, 0, 0),
            M::Fscale => (Scale, 0, 0),
            M::Fxtract => (Xtract, 0, 0),
            M::F2xm1 => (F2xm1, 0, 0),
            M::Fyl2x => (Yl2x, 1, 0),
            M::Fyl2xp1 => (Yl2xp1, 1, 0),
            M::Fptan => (Ptan, 0, 0),
            M::Fpatan => (Patan, 1, 0),
            M::Fsin => (Sin, 0, 0),
            M::Fcos => (Cos, 0, 0),
            M::Fsincos => (Sincos, 0, 0),
            M::Ffree => (Free, 0, 0),
            M::Ffreep => (Free, 1, 0),
            M::Fincstp => (Incstp, 0, 0),
            M::Fdecstp => (Decstp, 0, 0),
            M::Fnop => (Nop, 0, 0),
            _ => return None,
        };
        let mut this = X87Insn {
            pops,
            aux,
            ..X87Insn::new(op)
        };
        for n in 0..insn.op_count() {
            match insn.op_kind(n) {
                OpKind::Memory => {
                    this.memory = match insn.memory_size() {
                        MemorySize::Float32 => X87Memory::F32,
                        MemorySize::Float64 => X87Memory::F64,
                        MemorySize::Float80 => X87Memory::F80,
                        MemorySize::Int16 => X87Memory::I16,
                        MemorySize::Int32 => X87Memory::I32,
                        MemorySize::Int64 => X87Memory::I64,
                        MemorySize::Bcd => X87Memory::Bcd,
                        _ => return None,
                    };
                }
                OpKind::Register => {
                    let i = insn.op_register(n).number() as u8 & 7;
                    if insn.op_register(n) != Register::ST0 || insn.op_count() == 1 {
                        this.i = i;
                        this.to_sti = n == 0;
                    }
                }
                _ => return None,
            }
        }
        // FCOMPP and FUCOMPP compare with ST(1) whether or not the decoder says so.
        if matches!(insn.code(), Code::Fcompp | Code::Fucompp) {
            this.i = 1;
        }
        Some(this)
    }
}

/// The QNaN floating-point indefinite.
const INDEFINITE: u128 = 0xffff_c000_0000_0000_0000;
const ONE: u128 = 0x3fff_8000_0000_0000_0000;
const INFINITY: u128 = 0x7fff_8000_0000_0000_0000;
const SIGN: u128 = 1 << 79;
/// Rounding control, in the control word.
const RC: u16 = 3 << 10;
const CONDITION: u16 = sw::C0 | sw::C2 | sw::C3;
const PRE_COMPUTATION: u16 = sw::IE | sw::DE | sw::ZE;

/// FLDL2T, FLDL2E, FLDPI, FLDLG2, FLDLN2: rounded to nearest, down (and towards zero), up. SDM Vol. 2A "FLD1/FLDL2T/...".
const CONSTANTS: [[u128; 3]; 5] = [
    // log2(10)
    [
        0x4000_d49a_784b_cd1b_8afe,
        0x4000_d49a_784b_cd1b_8afe,
        0x4000_d49a_784b_cd1b_8aff,
    ],
    // log2(e)
    [
        0x3fff_b8aa_3b29_5c17_f0bc,
        0x3fff_b8aa_3b29_5c17_f0bb,
        0x3fff_b8aa_3b29_5c17_f0bc,
    ],
    // pi
    [
        0x4000_c90f_daa2_2168_c235,
        0x4000_c90f_daa2_2168_c234,
        0x4000_c90f_daa2_2168_c235,
    ],
    // log10(2)
    [
        0x3ffd_9a20_9a84_fbcf_f799,
        0x3ffd_9a20_9a84_fbcf_f798,
        0x3ffd_9a20_9a84_fbcf_f799,
    ],
    // ln 2
    [
        0x3ffe_b172_17f7_d1cf_79ac,
        0x3ffe_b172_17f7_d1cf_79ab,
        0x3ffe_b172_17f7_d1cf_79ac,
    ],
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Zero,
    Denormal,
    Normal,
    Infinity,
    Nan,
    /// Encodings that the 387 and later do not know: the integer bit is clear though the exponent is not zero.
    Unsupported,
}

fn class(x: u128) -> Class {
    let (significand, exponent) = (x as u64, (x >> 64) as u16 & 0x7fff);
    match exponent {
        0 if significand == 0 => Class::Zero,
        0 => Class::Denormal,
        _ if significand >> 63 == 0 => Class::Unsupported,
        0x7fff if significand << 1 == 0 => Class::Infinity,
        0x7fff => Class::Nan,
        _ => Class::Normal,
    }
}

fn negative(x: u128) -> bool {
    x & SIGN != 0
}

/// Carries out an instruction. `mem` holds the memory operand, or receives it. `rflags` is what FCMOVcc looks at.
pub fn execute(fpu: &mut FpuState, insn: X87Insn, mem: &mut [u8; 16], rflags: u64) -> X87Effect {
    let mut unit = Unit {
        f: fpu,
        effect: X87Effect::default(),
    };
    unit.run(insn, mem, rflags);
    unit.effect
}

struct Unit<'a> {
    f: &'a mut FpuState,
    effect: X87Effect,
}

/// An unmasked exception stops the instruction: nothing more is written.
struct Blocked;

type Step<T = ()> = Result<T, Blocked>;

impl Unit<'_> {
    fn run(&mut self, insn: X87Insn, mem: &mut [u8; 16], rflags: u64) {
        let Ok(()) = self.step(insn, mem, rflags) else { return };
        for _ in 0..insn.pops {
            self.pop();
        }
    }

    fn step(&mut self, insn: X87Insn, mem: &mut [u8; 16], rflags: u64) -> Step {
        use X87Op::*;
        let i = insn.i as usize;
        match insn.op {
            Add | Mul | Sub | Subr | Div | Divr => self.arithmetic(insn, mem),
            Com | Ucom | Comi | Ucomi | Tst => self.compare(insn, mem),
            Xam => {
                self.examine();
                Ok(())
            }
            Ld => self.load(insn, mem),
            Constant => {
                let rounding = match self.f.cw >> 10 & 3 {
                    0 => 0,
                    2 => 2,
                    _ => 1,
                };
                self.push_value(match insn.aux {
                    0 => ONE,
                    n @ 1..=5 => CONSTANTS[n as usize - 1][rounding],
                    _ => 0,
                })
            }
            St if insn.memory == X87Memory::None => {
                self.c1(false);
                if !self.empty(0) {
                    self.set(i, self.f.st(0));
                } else if insn.aux == 0 {
                    self.underflow()?;
                    self.set(i, INDEFINITE);
                }
                Ok(())
            }
            St | Istt => self.store(insn, mem),
            Xch => {
                self.c1(false);
                if self.empty(0) || self.empty(i) {
                    self.underflow()?;
                }
                let value = |unit: &Self, n| if unit.empty(n) { INDEFINITE } else { unit.f.st(n) };
                let (a, b) = (value(self, 0), value(self, i));
                self.set(0, b);
                self.set(i, a);
                Ok(())
            }
            Cmov => {
                if self.empty(0) || self.empty(i) {
                    self.underflow()?;
                    self.set(0, INDEFINITE);
                } else {
                    let (cf, pf, zf) = (rflags & 1 != 0, rflags & 4 != 0, rflags & 0x40 != 0);
                    let condition = [cf, zf, cf || zf, pf][insn.aux as usize & 3];
                    if condition != (insn.aux & 4 != 0) {
                        self.set(0, self.f.st(i));
                    }
                }
                Ok(())
            }
            Chs | Abs => {
                self.c1(false);
                if self.empty(0) {
                    self.underflow()?;
                    self.set(0, INDEFINITE);
                } else {
                    let x = self.f.st(0);
                    self.set(0, if insn.op == Chs { x ^ SIGN } else { x & !SIGN });
                }
                Ok(())
            }
            Sqrt => self.unary_host(host::sqrt),
            Rndint => self.unary_host(host::rndint),
            Scale => self.binary_host(host::scale, 0),
            Prem => self.binary_host(host::prem, CONDITION),
            Prem1 => self.binary_host(host::prem1, CONDITION),
            Xtract => self.extract(),
            F2xm1 => self.unary(f2xm1),
            Yl2x => self.binary(yl2x),
            Yl2xp1 => self.binary(yl2xp1),
            Patan => self.binary(patan),
            Sin | Cos | Sincos | Ptan => self.trigonometric(insn.op),
            Free => {
                self.c1(false);
                let r = (self.f.top() + i) & 7;
                self.f.tag &= !(1 << r);
                Ok(())
            }
            Incstp | Decstp => {
                self.c1(false);
                let by = if insn.op == Incstp { 1 } else { 7 };
                self.f.set_top(self.f.top() + by);
                Ok(())
            }
            Nop => Ok(()),
        }
    }

    fn empty(&self, i: usize) -> bool {
        self.f.tag >> ((self.f.top() + i) & 7) & 1 == 0
    }

    /// Writes ST(i), which is not empty then.
    fn set(&mut self, i: usize, value: u128) {
        let r = (self.f.top() + i) & 7;
        self.f.r[r] = value & ((1 << 80) - 1);
        self.f.tag |= 1 << r;
    }

    fn pop(&mut self) {
        let top = self.f.top();
        self.f.tag &= !(1 << top);
        self.f.set_top(top + 1);
    }

    fn push(&mut self, value: u128) {
        self.f.set_top(self.f.top() + 7);
        self.set(0, value);
    }

    fn c1(&mut self, set: bool) {
        self.f.sw = self.f.sw & !sw::C1 | if set { sw::C1 } else { 0 };
    }

    fn conditions(&mut self, value: u16) {
        self.f.sw = self.f.sw & !CONDITION | value & CONDITION;
    }

    /// Flags exceptions; true if one of them is unmasked.
    fn signal(&mut self, flags: u16) -> bool {
        self.f.sw |= flags & (sw::EXCEPTIONS | sw::SF);
        let unmasked = flags & !self.f.cw & sw::EXCEPTIONS != 0;
        if unmasked {
            self.f.sw |= sw::ES | sw::B;
        }
        unmasked
    }

    /// Takes over C1 and the exceptions of a status word; blocked by an unmasked one of `blocking`.
    fn accept(&mut self, status: u16, blocking: u16) -> Step {
        self.c1(status & sw::C1 != 0);
        self.signal(status & sw::EXCEPTIONS);
        if status & !self.f.cw & blocking & sw::EXCEPTIONS != 0 {
            Err(Blocked)
        } else {
            Ok(())
        }
    }

    /// An operand is an empty register. Goes on if that is masked, for the default response.
    fn underflow(&mut self) -> Step {
        self.c1(false);
        if self.signal(sw::IE | sw::SF) {
            Err(Blocked)
        } else {
            Ok(())
        }
    }

    /// The register to be pushed on is not empty.
    fn overflow(&mut self) -> Step {
        self.c1(true);
        if self.signal(sw::IE | sw::SF) {
            Err(Blocked)
        } else {
            Ok(())
        }
    }

    fn push_value(&mut self, value: u128) -> Step {
        if !self.empty(7) {
            self.overflow()?;
            self.push(INDEFINITE);
        } else {
            self.c1(false);
            self.push(value);
        }
        Ok(())
    }

    fn arithmetic(&mut self, insn: X87Insn, mem: &[u8; 16]) -> Step {
        use X87Op::*;
        let i = insn.i as usize;
        let (to, from) = if insn.to_sti { (i, 0) } else { (0, i) };
        let in_memory = insn.memory != X87Memory::None;
        if self.empty(0) || !in_memory && self.empty(i) {
            self.underflow()?;
            self.set(to, INDEFINITE);
            return Ok(());
        }
        let mut a = self.f.st(to);
        let b = self.f.st(from);
        let (cw, a_mut) = (self.f.cw, &mut a);
        let status = if in_memory {
            let f = match insn.memory {
                X87Memory::F32 => [
                    host::add_m32,
                    host::mul_m32,
                    host::sub_m32,
                    host::subr_m32,
                    host::div_m32,
                    host::divr_m32,
                ],
                X87Memory::F64 => [
                    host::add_m64,
                    host::mul_m64,
                    host::sub_m64,
                    host::subr_m64,
                    host::div_m64,
                    host::divr_m64,
                ],
                X87Memory::I16 => [
                    host::add_i16,
                    host::mul_i16,
                    host::sub_i16,
                    host::subr_i16,
                    host::div_i16,
                    host::divr_i16,
                ],
                _ => [
                    host::add_i32,
                    host::mul_i32,
                    host::sub_i32,
                    host::subr_i32,
                    host::div_i32,
                    host::divr_i32,
                ],
            };
            f[insn.op as usize % 6](cw, a_mut, mem)
        } else {
            match insn.op {
                Add => host::add(cw, a_mut, b),
                Mul => host::mul(cw, a_mut, b),
                Sub => host::sub(cw, a_mut, b),
                Subr => host::subr(cw, a_mut, b),
                Div => host::div(cw, a_mut, b),
                _ => host::divr(cw, a_mut, b),
            }
        };
        self.accept(status, PRE_COMPUTATION)?;
        self.set(to, a);
        Ok(())
    }

    fn compare(&mut self, insn: X87Insn, mem: &[u8; 16]) -> Step {
        use X87Op::*;
        let i = insn.i as usize;
        let to_flags = matches!(insn.op, Comi | Ucomi);
        let with_register = insn.op != Tst && insn.memory == X87Memory::None;
        let (codes, done) = if self.empty(0) || with_register && self.empty(i) {
            (CONDITION, self.underflow())
        } else {
            let mut a = self.f.st(0);
            let cw = self.f.cw | sw::EXCEPTIONS;
            let status = match (insn.op, insn.memory) {
                (Tst, _) => host::com(cw, &mut a, 0),
                (Ucom | Ucomi, _) => host::ucom(cw, &mut a, self.f.st(i)),
                (_, X87Memory::None) => host::com(cw, &mut a, self.f.st(i)),
                (_, X87Memory::F32) => host::com_m32(cw, &mut a, mem),
                (_, X87Memory::F64) => host::com_m64(cw, &mut a, mem),
                (_, X87Memory::I16) => host::com_i16(cw, &mut a, mem),
                _ => host::com_i32(cw, &mut a, mem),
            };
            // The comparisons that set RFLAGS leave C1 alone.
            let c1 = if to_flags { self.f.sw & sw::C1 } else { 0 };
            (status, self.accept(status & !sw::C1 | c1, PRE_COMPUTATION))
        };
        // The result is there even where an unmasked exception keeps the stack from being popped.
        if to_flags {
            let flag = |code: u16, flag: u32| if codes & code != 0 { flag } else { 0 };
            self.effect.flags = Some(flag(sw::C0, 1) | flag(sw::C2, 1 << 2) | flag(sw::C3, 1 << 6));
        } else {
            self.conditions(codes);
        }
        done
    }

    fn examine(&mut self) {
        let x = self.f.st(0);
        self.c1(negative(x));
        self.conditions(if self.empty(0) {
            sw::C3 | sw::C0
        } else {
            match class(x) {
                Class::Unsupported => 0,
                Class::Nan => sw::C0,
                Class::Normal => sw::C2,
                Class::Infinity => sw::C2 | sw::C0,
                Class::Zero => sw::C3,
                Class::Denormal => sw::C3 | sw::C2,
            }
        });
    }

    fn load(&mut self, insn: X87Insn, mem: &[u8; 16]) -> Step {
        let bytes = u128::from_le_bytes(*mem);
        let value = match insn.memory {
            X87Memory::None if self.empty(insn.i as usize) => {
                // Empty source or full stack: the source is looked at first.
                self.underflow()?;
                self.push(INDEFINITE);
                return Ok(());
            }
            X87Memory::None => self.f.st(insn.i as usize),
            X87Memory::F80 => bytes,
            X87Memory::I16 => from_integer(bytes as i16 as i64),
            X87Memory::I32 => from_integer(bytes as i32 as i64),
            X87Memory::I64 => from_integer(bytes as i64),
            X87Memory::Bcd => from_decimal(bytes),
            X87Memory::F32 | X87Memory::F64 => {
                if !self.empty(7) {
                    return self.push_value(0);
                }
                let wide = insn.memory == X87Memory::F64;
                let (value, status) = if wide { host::ld_m64(mem) } else { host::ld_m32(mem) };
                // A denormal is loaded even where it raises an unmasked exception.
                self.accept(status & !sw::C1, sw::IE)?;
                value
            }
        };
        self.push_value(value)
    }

    fn store(&mut self, insn: X87Insn, mem: &mut [u8; 16]) -> Step {
        let empty = self.empty(0);
        let x = if empty { INDEFINITE } else { self.f.st(0) };
        if empty {
            self.underflow()?;
        }
        *mem = [0; 16];
        let cw = self.f.cw;
        // Conversions to integers find nothing after the computation that could keep the result from memory.
        let masked = cw | sw::EXCEPTIONS;
        let status = match (insn.op, insn.memory) {
            (_, X87Memory::F80) => {
                *mem = x.to_le_bytes();
                0
            }
            (_, X87Memory::F32) => host::st_m32(if empty { masked } else { cw }, x, mem),
            (_, X87Memory::F64) => host::st_m64(if empty { masked } else { cw }, x, mem),
            (_, X87Memory::Bcd) => host::bst(masked, x, mem),
            (X87Op::St, X87Memory::I16) => host::ist_i16(masked, x, mem),
            (X87Op::St, X87Memory::I32) => host::ist_i32(masked, x, mem),
            (X87Op::St, _) => host::ist_i64(masked, x, mem),
            // FISTTP came with SSE3, which a host may lack: it is FISTP that rounds towards zero.
            (_, X87Memory::I16) => host::ist_i16(masked | RC, x, mem),
            (_, X87Memory::I32) => host::ist_i32(masked | RC, x, mem),
            _ => host::ist_i64(masked | RC, x, mem),
        };
        if !empty {
            self.accept(status, sw::IE | sw::OE | sw::UE)?;
        }
        self.effect.store = true;
        Ok(())
    }

    fn unary_host(&mut self, f: fn(u16, &mut u128, u128) -> u16) -> Step {
        if self.empty(0) {
            self.underflow()?;
            self.set(0, INDEFINITE);
            return Ok(());
        }
        let mut a = self.f.st(0);
        let status = f(self.f.cw, &mut a, 0);
        self.accept(status, PRE_COMPUTATION)?;
        self.set(0, a);
        Ok(())
    }

    /// ST0 by ST1, result in ST0; `codes` are the condition codes to take over.
    fn binary_host(&mut self, f: fn(u16, &mut u128, u128) -> u16, codes: u16) -> Step {
        if self.empty(0) || self.empty(1) {
            self.f.sw &= !(codes & sw::C2);
            self.underflow()?;
            self.set(0, INDEFINITE);
            return Ok(());
        }
        let mut a = self.f.st(0);
        let status = f(self.f.cw, &mut a, self.f.st(1));
        self.f.sw &= !(codes & sw::C2);
        self.accept(status, PRE_COMPUTATION)?;
        // Without a quotient only C2, "incomplete", is cleared.
        let quotient = matches!(class(a), Class::Zero | Class::Denormal | Class::Normal);
        let codes = if quotient { codes } else { codes & sw::C2 };
        self.set(0, a);
        self.f.sw = self.f.sw & !codes | status & codes;
        Ok(())
    }

    /// A NaN or an unsupported encoding among the operands: the response of an addition, which is every instruction's.
    fn not_a_number(&mut self, a: u128, b: u128) -> Step<Option<u128>> {
        let strange = |x| matches!(class(x), Class::Nan | Class::Unsupported);
        if !strange(a) && !strange(b) {
            return Ok(None);
        }
        let mut result = a;
        let status = host::add(self.f.cw, &mut result, b);
        self.accept(status & !sw::C1, PRE_COMPUTATION)?;
        Ok(Some(result))
    }

    fn denormal(&mut self, x: u128) -> Step {
        if class(x) == Class::Denormal && self.signal(sw::DE) {
            Err(Blocked)
        } else {
            Ok(())
        }
    }

    fn extract(&mut self) -> Step {
        if self.empty(0) || !self.empty(7) {
            if self.empty(0) {
                self.underflow()?;
            } else {
                self.overflow()?;
            }
            self.set(0, INDEFINITE);
            self.push(INDEFINITE);
            return Ok(());
        }
        self.c1(false);
        let x = self.f.st(0);
        let (exponent, significand) = if let Some(nan) = self.not_a_number(x, x)? {
            (nan, nan)
        } else {
            match class(x) {
                Class::Infinity => (INFINITY, x),
                Class::Zero => {
                    self.accept(sw::ZE, PRE_COMPUTATION)?;
                    (INFINITY | SIGN, x)
                }
                _ => {
                    self.denormal(x)?;
                    let wide = Wide::from_f80(x);
                    let (significand, _) = wide.scaled(-wide.exponent).round(self.f.cw, true);
                    (from_integer(wide.exponent as i64), significand)
                }
            }
        };
        self.set(0, exponent);
        self.push(significand);
        Ok(())
    }

    fn unary(&mut self, f: impl FnOnce(u128, u16) -> (u128, u16)) -> Step {
        if self.empty(0) {
            self.underflow()?;
            self.set(0, INDEFINITE);
            return Ok(());
        }
        self.c1(false);
        let x = self.f.st(0);
        let result = if let Some(nan) = self.not_a_number(x, x)? {
            nan
        } else {
            self.denormal(x)?;
            let (value, status) = f(x, self.f.cw);
            self.accept(status, PRE_COMPUTATION)?;
            value
        };
        self.set(0, result);
        Ok(())
    }

    /// A function of ST1 and ST0 whose result replaces ST1; the caller pops.
    fn binary(&mut self, f: impl FnOnce(u128, u128, u16) -> (u128, u16)) -> Step {
        if self.empty(0) || self.empty(1) {
            self.underflow()?;
            self.set(1, INDEFINITE);
            return Ok(());
        }
        self.c1(false);
        let (x, y) = (self.f.st(0), self.f.st(1));
        let result = if let Some(nan) = self.not_a_number(x, y)? {
            nan
        } else {
            let (value, status) = f(y, x, self.f.cw);
            // Both come before a denormal operand (SDM Vol. 1 4.9.2 "Floating-Point Exception Priority").
            if status & (sw::IE | sw::ZE) == 0 {
                self.denormal(x)?;
                self.denormal(y)?;
            }
            self.accept(status, PRE_COMPUTATION)?;
            value
        };
        self.set(1, result);
        Ok(())
    }

    fn trigonometric(&mut self, op: X87Op) -> Step {
        let pushes = matches!(op, X87Op::Sincos | X87Op::Ptan);
        let full = pushes && !self.empty(7);
        // "Outside range" is answered by C2 in any case.
        self.f.sw &= !sw::C2;
        if self.empty(0) || full {
            if self.empty(0) {
                self.underflow()?;
            } else {
                self.overflow()?;
            }
            self.set(0, INDEFINITE);
            if pushes {
                self.push(INDEFINITE);
            }
            return Ok(());
        }
        self.f.sw &= !sw::C1;
        let x = self.f.st(0);
        let cw = self.f.cw;
        let (first, second) = if let Some(nan) = self.not_a_number(x, x)? {
            (nan, nan)
        } else {
            match class(x) {
                Class::Infinity => {
                    self.accept(sw::IE, PRE_COMPUTATION)?;
                    (INDEFINITE, INDEFINITE)
                }
                Class::Zero => (if op == X87Op::Cos { ONE } else { x }, ONE),
                _ if (x >> 64) as u16 & 0x7fff >= 0x3fff + 63 => {
                    self.f.sw |= sw::C2;
                    return Ok(());
                }
                _ => {
                    self.denormal(x)?;
                    let angle = math::reduce(x);
                    // Sine and tangent of less than 2^-68 are the operand, however it is rounded: so Intel's processors.
                    let tiny = op != X87Op::Cos && (x >> 64) as u16 & 0x7fff < 0x3fff - 68;
                    let nearest = if tiny { cw & !RC } else { cw };
                    let (first, mut status) = match op {
                        X87Op::Cos => angle.cos(),
                        X87Op::Ptan => angle.tan(),
                        _ => angle.sin(),
                    }
                    .round(nearest, false);
                    if tiny {
                        status &= !sw::C1;
                    }
                    let (second, more) = match op {
                        X87Op::Sincos => angle.cos().round(cw, false),
                        _ => (ONE, status & sw::C1),
                    };
                    // C1 is that of the value on top.
                    self.accept(status & !sw::C1 | more, PRE_COMPUTATION)?;
                    (first, second)
                }
            }
        };
        self.set(0, first);
        if pushes {
            self.push(second);
        }
        Ok(())
    }
}

fn from_integer(value: i64) -> u128 {
    if value == 0 {
        return 0;
    }
    let magnitude = value.unsigned_abs();
    let shift = magnitude.leading_zeros();
    let sign = if value < 0 { SIGN } else { 0 };
    sign | ((16383 + 63 - shift) as u128) << 64 | (magnitude << shift) as u128
}

/// Packed decimal: 18 digits and a sign. Digits above 9 count as what they are (undefined by the manual; chosen).
fn from_decimal(bytes: u128) -> u128 {
    let magnitude = (0..18)
        .rev()
        .fold(0u64, |all, digit| all * 10 + (bytes >> (4 * digit) & 0xf) as u64);
    from_integer(magnitude as i64) | bytes & SIGN
}

/// F2XM1. Outside -1 to 1 the manual leaves the result undefined; chosen: the operand, but the limits of the function for
/// the infinities.
fn f2xm1(x: u128, cw: u16) -> (u128, u16) {
    match class(x) {
        Class::Zero => (x, 0),
        Class::Infinity => (if negative(x) { ONE | SIGN } else { x }, 0),
        _ if x & !SIGN == ONE => (if negative(x) { 0xbffe_8000_0000_0000_0000 } else { x }, 0),
        _ if x & !SIGN > ONE => (x, 0),
        _ => math::exp2m1(Wide::from_f80(x)).round(cw, false),
    }
}

/// FYL2X: the table of SDM Vol. 2A "FYL2X".
fn yl2x(y: u128, x: u128, cw: u16) -> (u128, u16) {
    let sign = y & SIGN;
    if class(x) == Class::Zero {
        return match class(y) {
            Class::Zero => (INDEFINITE, sw::IE),
            Class::Infinity => (INFINITY | (sign ^ SIGN), 0),
            _ => (INFINITY | (sign ^ SIGN), sw::ZE),
        };
    }
    if negative(x) {
        return (INDEFINITE, sw::IE);
    }
    // The sign of the logarithm.
    let below_one = x < ONE;
    if class(y) == Class::Infinity {
        return if x == ONE {
            (INDEFINITE, sw::IE)
        } else {
            (y ^ if below_one { SIGN } else { 0 }, 0)
        };
    }
    if class(x) == Class::Infinity {
        return if class(y) == Class::Zero {
            (INDEFINITE, sw::IE)
        } else {
            (INFINITY | sign, 0)
        };
    }
    if x == ONE || class(y) == Class::Zero {
        return (sign ^ if below_one { SIGN } else { 0 }, 0);
    }
    let (log, exact) = math::log2(Wide::from_f80(x));
    log.mul(Wide::from_f80(y)).round(cw, exact)
}

/// FYL2XP1: the table of SDM Vol. 2A "FYL2XP1". The manual leaves operands outside -(1 - sqrt(2)/2) to sqrt(2)/2 undefined;
/// chosen: the function goes on, with a zero divide at -1 and invalid below.
fn yl2xp1(y: u128, x: u128, cw: u16) -> (u128, u16) {
    let sign = (x ^ y) & SIGN;
    match (class(x), class(y)) {
        (Class::Zero, Class::Infinity) => return (INDEFINITE, sw::IE),
        (Class::Zero, _) => return (sign, 0),
        _ if negative(x) && x & !SIGN > ONE => return (INDEFINITE, sw::IE),
        (Class::Infinity, Class::Zero) => return (INDEFINITE, sw::IE),
        (Class::Infinity, _) | (_, Class::Infinity) => return (INFINITY | sign, 0),
        (_, Class::Zero) => return (sign, 0),
        _ if x == ONE | SIGN => return (INFINITY | sign, sw::ZE),
        _ => {}
    }
    let (log, exact) = math::log2_1p(Wide::from_f80(x));
    log.mul(Wide::from_f80(y)).round(cw, exact)
}

/// FPATAN: the table of SDM Vol. 2A "FPATAN".
fn patan(y: u128, x: u128, cw: u16) -> (u128, u16) {
    let sign = negative(y);
    let quarter_turns = |eighths: u64| {
        let angle = math::PI.mul(Wide::from_integer(sign, eighths as u128, -2));
        angle.round(cw, false)
    };
    match (class(y), class(x)) {
        (Class::Infinity, Class::Infinity) => quarter_turns(if negative(x) { 3 } else { 1 }),
        (Class::Infinity, _) => quarter_turns(2),
        (Class::Zero, _) | (_, Class::Infinity) => {
            if negative(x) {
                quarter_turns(4)
            } else {
                (y & SIGN, 0)
            }
        }
        (_, Class::Zero) => quarter_turns(2),
        _ => {
            let (y, x) = (Wide::from_f80(y), Wide::from_f80(x));
            math::atan2(y, x).round(cw, false)
        }
    }
}
