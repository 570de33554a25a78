//! MMX, SSE to SSE4.2, AES, PCLMULQDQ, SHA, GFNI, AVX, AVX2, FMA, F16C and AVX-512 without the host's vector unit.
//!
//! # Theory
//! What the thunks ([`super::thunk`]) leave to the host's own instruction is said here in tables: a row is the width of a lane, a
//! function of lanes and a shape ([`integer`], [`arith`]). The results are the same to the bit, MXCSR's flags, NaNs and unmasked
//! exceptions with them; so a run, its snapshots and its recordings do not depend on which of the two it has, and a model needs of its
//! host what every x86-64 processor has. Approximations, dot products of AVX-VNNI, gathers and masked moves are computed by the engine
//! either way ([`super::approx`], `exec/avx.rs`).
//!
//! # Practice
//! [`prepare`] makes of an instruction a [`Form`], which fits into an op: the number of its row (iced's `Code`), where its operands are,
//! its immediate. An encoding decides where sources and destination are and what becomes of the bits that are not written, and nothing
//! else; VEX's rows are those of the legacy encoding that they are twins of. A row computes whole vectors from whole vectors; AVX-512's
//! writemasks, broadcasts and embedded rounding are around it ([`evex`]).
//!
//! # What is left to the host
//! x87 ([`super::x87`]), and on the quick way of [`float`] the scalar arithmetic that Rust itself is compiled to.

mod arith;
mod crypto;
mod evex;
mod float;
mod integer;
mod lanes;
mod row;
mod strings;

use std::sync::OnceLock;

use iced_x86::{Code, EncodingKind, Instruction, Mnemonic as M, OpKind, Register};

pub(crate) use self::evex::{Table, complex};
use self::float::Environment;
use self::lanes::Inputs;
pub(crate) use self::lanes::Vector;
use self::row::{Outcome, Row};
use super::state::mxcsr;
use super::thunk::{self, MemoryUse, NoThunk, PRE_COMPUTATION, SimdException};

/// The rows, by `Code`.
fn rows() -> &'static [Option<Row>] {
    static ROWS: OnceLock<Vec<Option<Row>>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let row = |code: Code| {
            let mnemonic = thunk::legacy(code.mnemonic()).unwrap_or(code.mnemonic());
            integer::row(mnemonic).or_else(|| arith::row(mnemonic))
        };
        Code::values().map(row).collect()
    })
}

/// Where an operand is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere.
    None,
    /// In an MMX register.
    Mm(u8),
    /// In an XMM register.
    Xmm(u8),
    /// In a YMM register.
    Ymm(u8),
    /// In a general register, 32 bits of it.
    General32(u8),
    /// All of it.
    General64(u8),
    /// In memory.
    Memory,
}

impl Place {
    /// In a byte: what it is in the upper three bits, its number below.
    pub fn to_bits(self) -> u8 {
        let of = |kind: u8, number: u8| kind << 5 | number & 31;
        match self {
            Place::None => 0,
            Place::Mm(n) => of(1, n),
            Place::Xmm(n) => of(2, n),
            Place::Ymm(n) => of(3, n),
            Place::General32(n) => of(4, n),
            Place::General64(n) => of(5, n),
            Place::Memory => of(6, 0),
        }
    }

    /// The opposite.
    pub fn from_bits(bits: u8) -> Place {
        let number = bits & 31;
        match bits >> 5 {
            1 => Place::Mm(number),
            2 => Place::Xmm(number),
            3 => Place::Ymm(number),
            4 => Place::General32(number),
            5 => Place::General64(number),
            6 => Place::Memory,
            _ => Place::None,
        }
    }

    fn of_register(register: Register) -> Option<Place> {
        let number = register.number() as u8;
        Some(match register {
            r if r.is_mm() => Place::Mm(number),
            r if r.is_xmm() => Place::Xmm(number),
            r if r.is_ymm() => Place::Ymm(number),
            r if r.is_gpr32() => Place::General32(number),
            r if r.is_gpr64() => Place::General64(number),
            _ => return None,
        })
    }

    fn bytes(self, memory: usize) -> usize {
        match self {
            Place::None => 0,
            Place::Mm(_) | Place::General64(_) => 8,
            Place::Xmm(_) => 16,
            Place::Ymm(_) => 32,
            Place::General32(_) => 4,
            Place::Memory => memory,
        }
    }
}

/// Operands of the string compares that are not named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strings {
    /// It is none of them.
    No,
    /// Whether the result is a mask, in XMM0, or an index, in RCX; and the lengths, in RAX and RDX, of 32 bits or 64.
    Compare { mask: bool, lengths: Option<Length> },
}

/// How long the registers are that have a string's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    Bits32,
    Bits64,
}

/// An instruction ready to be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    /// The row.
    code: u16,
    pub destination: Place,
    /// The sources, as [`Inputs`] has them.
    pub sources: [Place; 3],
    pub imm: Option<u8>,
    /// The length of the vectors in bytes.
    bytes: u8,
    /// VEX: what a register has beyond the result becomes zero.
    pub vex: bool,
    /// The memory operand, where there is one.
    pub memory: Option<MemoryUse>,
    /// The arithmetic flags are written.
    pub flags: bool,
    /// MMX registers are involved: the x87 unit is taken to MMX use, and a pending x87 exception comes first.
    pub mmx: bool,
}

/// An instruction's form.
///
/// # Errors
/// [`NoThunk::Unsupported`] for whatever has no thunk either.
pub(crate) fn prepare(insn: &Instruction) -> Result<Form, NoThunk> {
    if !thunk::supported(insn) {
        return Err(NoThunk::Unsupported);
    }
    let mnemonic = thunk::legacy(insn.mnemonic()).unwrap_or(insn.mnemonic());
    let vex = insn.encoding() == EncodingKind::VEX;
    let mut places = Vec::new();
    let mut memory = None;
    let mut imm = None;
    for n in 0..insn.op_count() {
        match insn.op_kind(n) {
            OpKind::Register => {
                places.push(Place::of_register(insn.op_register(n)).ok_or(NoThunk::Unsupported)?);
            }
            OpKind::Memory => {
                let write = n == 0 && insn.op_count() > 1 && !thunk::writes_flags(mnemonic);
                memory = Some(MemoryUse {
                    size: insn.memory_size().size() as u8,
                    alignment: thunk::needs_alignment(insn),
                    read: !write,
                    write,
                });
                places.push(Place::Memory);
            }
            OpKind::Immediate8 => imm = Some(insn.immediate8()),
            _ => return Err(NoThunk::Unsupported),
        }
    }
    let memory_bytes = memory.map_or(0, |m| usize::from(m.size));
    let vectors = |place: &Place| !matches!(place, Place::General32(_) | Place::General64(_) | Place::Memory);
    let mmx = places.iter().any(|p| matches!(p, Place::Mm(_)));
    let only_mmx = !places.iter().any(|p| matches!(p, Place::Xmm(_) | Place::Ymm(_)));
    // CVTPD2PS of 256 bits has half of them for its result, and its source may be memory.
    let longest = places
        .iter()
        .filter(|p| vectors(p))
        .map(|p| p.bytes(0))
        .max()
        .unwrap_or(0);
    let bytes = if mmx && only_mmx {
        8
    } else {
        longest.max(memory_bytes).max(16)
    };
    let reads_both = thunk::writes_flags(mnemonic);
    let destination = if reads_both { Place::None } else { places[0] };
    // FMA's destination is a source as well, as that of every legacy instruction.
    let first = usize::from(!(reads_both || !vex || fused(mnemonic)));
    let mut sources: Vec<Place> = places[first.min(places.len() - 1)..].to_vec();
    // What has one source has it as the last, and what it leaves of the destination comes from the destination.
    if sources.len() == 1 {
        sources.insert(0, sources[0]);
    }
    if matches!(mnemonic, M::Blendvps | M::Blendvpd | M::Pblendvb | M::Sha256rnds2) && !vex {
        sources.push(Place::Xmm(0));
    }
    sources.resize(3, Place::None);
    if matches!(mnemonic, M::Cmpps | M::Cmppd | M::Cmpss | M::Cmpsd) && !vex {
        imm = imm.map(|control| control & 7);
    }
    Ok(Form {
        code: insn.code() as u16,
        destination,
        sources: [sources[0], sources[1], sources[2]],
        imm,
        bytes: bytes as u8,
        vex,
        memory,
        flags: reads_both,
        mmx,
    })
}

/// A fused multiply-add.
fn fused(mnemonic: M) -> bool {
    let name = format!("{mnemonic:?}");
    let ordered = ["132", "213", "231"].iter().any(|order| name.contains(order));
    ordered && (name.starts_with("Vfm") || name.starts_with("Vfnm"))
}

/// The bit of [`Form::to_bits`] that says that there is an immediate.
const IMMEDIATE: u64 = 1 << 24;

impl Form {
    /// Row, immediate, length and the last two sources, in the bits of an op's immediate; the first source and the destination have
    /// bytes of their own.
    pub fn to_bits(self) -> u64 {
        u64::from(self.code)
            | u64::from(self.imm.unwrap_or(0)) << 16
            | if self.imm.is_some() { IMMEDIATE } else { 0 }
            | u64::from(self.vex) << 25
            | u64::from(self.bytes / 8) << 28
            | u64::from(self.sources[1].to_bits()) << 32
            | u64::from(self.sources[2].to_bits()) << 40
    }
}

/// A form as an op has it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packed {
    bits: u64,
    /// Where the result goes.
    pub destination: Place,
    first: Place,
}

impl Packed {
    /// From the bits of [`Form::to_bits`], the destination's and the first source's.
    #[inline]
    pub fn new(bits: u64, destination: u8, first: u8) -> Packed {
        Packed {
            bits,
            destination: Place::from_bits(destination),
            first: Place::from_bits(first),
        }
    }

    /// Where the sources are.
    #[inline]
    pub fn sources(&self) -> [Place; 3] {
        [
            self.first,
            Place::from_bits((self.bits >> 32) as u8),
            Place::from_bits((self.bits >> 40) as u8),
        ]
    }

    /// The registers have their other bits cleared.
    #[inline]
    pub fn vex(&self) -> bool {
        self.bits >> 25 & 1 != 0
    }

    /// The immediate, or zero.
    #[inline]
    pub fn imm(&self) -> u8 {
        (self.bits >> 16) as u8
    }

    /// Computes, under MXCSR's controls. With the result come the flags that MXCSR gets.
    pub fn compute(&self, sources: [&Vector; 3], memory: usize, mxcsr: u32) -> Option<(Outcome, u32)> {
        let row = rows().get((self.bits & 0xffff) as usize)?.as_ref()?;
        let last = self.sources()[1];
        let [a, b, c] = sources;
        let inputs = Inputs {
            a,
            b,
            c,
            imm: self.imm(),
            immediate: self.bits & IMMEDIATE != 0,
            bytes: (self.bits >> 28 & 15) as usize * 8,
            source: last.bytes(memory),
            destination: self.destination.bytes(memory),
            from_memory: last == Place::Memory,
            to_memory: self.destination == Place::Memory,
            param: row.param,
            mask: u64::MAX,
        };
        let mut environment = Environment::new(mxcsr);
        let outcome = (row.compute)(&inputs, &mut environment);
        Some((outcome, environment.raised))
    }
}

/// MXCSR after an instruction that raised these flags.
///
/// # Errors
/// With an unmasked exception among them: the flags are set, the destination is not written. As in a thunk, an unmasked exception that is
/// found before anything is computed keeps those of results from being reported ([`super::thunk`]).
pub(crate) fn finish(controls: &mut u32, raised: u32) -> Result<(), SimdException> {
    let unmasked = !*controls >> 7 & mxcsr::FLAGS;
    let mut raised = raised & mxcsr::FLAGS;
    if raised & unmasked & PRE_COMPUTATION != 0 {
        raised &= PRE_COMPUTATION;
    }
    *controls |= raised;
    if raised & unmasked != 0 {
        Err(SimdException)
    } else {
        Ok(())
    }
}

/// The string compares: which of them a row's instruction is.
pub(crate) fn strings(insn: &Instruction) -> Strings {
    let of = |mask, lengths| Strings::Compare { mask, lengths };
    match thunk::legacy(insn.mnemonic()).unwrap_or(insn.mnemonic()) {
        M::Pcmpistri => of(false, None),
        M::Pcmpistrm => of(true, None),
        M::Pcmpestri => of(false, Some(Length::Bits32)),
        M::Pcmpestrm => of(true, Some(Length::Bits32)),
        M::Pcmpestri64 => of(false, Some(Length::Bits64)),
        M::Pcmpestrm64 => of(true, Some(Length::Bits64)),
        _ => Strings::No,
    }
}

pub(crate) use strings::compare as compare_strings;

#[cfg(test)]
#[path = "portable_test.rs"]
mod tests;
