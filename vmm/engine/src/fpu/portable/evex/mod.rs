//! AVX-512 by tables: instructions with an EVEX prefix, and those on opmask registers.
//!
//! # Theory
//! A row computes whole vectors from whole vectors, as everywhere in [`super`]; most are those of the VEX form. What an EVEX prefix adds is
//! the same for all and done here: sources that are broadcast, embedded rounding and the suppression of exceptions ahead of the row, the
//! writemask after it. Elements that the mask leaves out must raise nothing, so rows of floating-point instructions ask
//! [`Inputs::chosen`] before they compute one. SDM Vol. 1 15.6.1 "Opmask Register to Predicate Vector Data Processing".
//!
//! # Practice
//! [`Table::prepare`] takes from an instruction what does not depend on its registers, [`Table::run`] executes it. Where the memory operand is and
//! which of its elements are accessed is `exec/evex.rs`'s, for thunks and tables alike.

mod approximate;
mod float;
mod half;
mod integer;
mod opmask;

use std::sync::OnceLock;

use iced_x86::{Code, EncodingKind, Instruction, Mnemonic as M, OpKind, RoundingControl};

use super::float::{Environment, Rounding};
use super::lanes::{Inputs, Vector};
use super::row::Row;
use super::{arith, finish, fused};
use crate::fpu::state::{FpuState, mxcsr};
use crate::fpu::thunk::{self, NoThunk, Place, SimdException, Traits};

/// A row, and what its masks stand for.
#[derive(Clone, Copy)]
struct EvexRow {
    row: Row,
    /// Bytes of an element of the result, for which the mask has a bit.
    lane: u8,
    /// Bytes of the widest element of result and source: it says how many elements there are.
    widest: u8,
    /// One element alone is computed.
    scalar: bool,
}

/// The rows, by `Code`.
fn rows() -> &'static [Option<EvexRow>] {
    static ROWS: OnceLock<Vec<Option<EvexRow>>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let row = |code: Code| {
            let mnemonic = code.mnemonic();
            match code.op_code().encoding() {
                EncodingKind::VEX => opmask::row(mnemonic).map(|row| EvexRow {
                    row,
                    lane: 8,
                    widest: 8,
                    scalar: true,
                }),
                EncodingKind::EVEX => {
                    let twin = thunk::legacy(mnemonic).unwrap_or(mnemonic);
                    let row = integer::row(mnemonic)
                        .or_else(|| float::row(mnemonic))
                        .or_else(|| half::row(mnemonic))
                        .or_else(|| super::integer::row(twin))
                        .or_else(|| arith::row(twin))?;
                    let (lane, widest, scalar) = elements(mnemonic);
                    Some(EvexRow {
                        row,
                        lane,
                        widest,
                        scalar,
                    })
                }
                _ => None,
            }
        };
        Code::values().map(row).collect()
    })
}

/// The bytes of an element of an instruction's result, those of the wider one of it and the source's, and whether there is one alone, as
/// the mnemonic says.
fn elements(mnemonic: M) -> (u8, u8, bool) {
    let name = format!("{mnemonic:?}").to_lowercase();
    let ends = |suffix: &str| name.ends_with(suffix);
    let starts = |prefix: &str| name.starts_with(prefix);
    // VPMINSD and VPCMPD are integer instructions, VPERMPD is not.
    let real = !starts("vp") || starts("vperm");
    let scalar = real && !starts("vbroadcast") && (ends("ss") || ends("sd") || ends("sh"));
    let lane = match mnemonic {
        // Elements of the sources' width, next to each other.
        M::Vpunpckhbw | M::Vpunpcklbw => 1,
        M::Vpunpckhwd | M::Vpunpcklwd => 2,
        M::Vpunpckhdq | M::Vpunpckldq | M::Vpdpbusds | M::Vpdpwssds | M::Vmovshdup | M::Vmovsldup => 4,
        M::Vmovddup => 8,
        M::Vcvtps2phx | M::Vcvtneps2bf16 | M::Vcvtne2ps2bf16 => 2,
        M::Vcvtph2psx => 4,
        _ if complex(mnemonic) => 4,
        M::Vpalignr => 1,
        _ if starts("vcvt") && (ends("2dq") || ends("2udq")) => 4,
        _ if real && (ends("ps") || ends("ss")) => 4,
        _ if real && (ends("pd") || ends("sd")) => 8,
        _ if real && (ends("ph") || ends("sh")) => 2,
        _ if ends("d") || name.contains("32") => 4,
        _ if ends("q") || name.contains("64") => 8,
        _ if ends("w") || ends("16") => 2,
        _ if ends("b") || ends("8") => 1,
        // What has no mask.
        _ => 4,
    };
    let source = if let Some(kinds) = name.strip_prefix("vpmov") {
        match kinds.trim_start_matches('u').trim_start_matches('s').as_bytes() {
            [b'q', ..] => 8,
            [b'd', ..] => 4,
            [b'w', ..] => 2,
            _ => 1,
        }
    } else if ["vcvtpd2", "vcvttpd2", "vcvtqq2", "vcvtuqq2"].into_iter().any(starts) {
        8
    } else if starts("vcvtps2ph") || ["vcvtdq2", "vcvtudq2", "vcvtneps2"].into_iter().any(starts) {
        4
    } else {
        1
    };
    (lane, lane.max(source), scalar)
}

/// Complex multiplication, whose elements are pairs.
pub(crate) fn complex(mnemonic: M) -> bool {
    matches!(
        mnemonic,
        M::Vfmulcph
            | M::Vfmulcsh
            | M::Vfcmulcph
            | M::Vfcmulcsh
            | M::Vfmaddcph
            | M::Vfmaddcsh
            | M::Vfcmaddcph
            | M::Vfcmaddcsh
    )
}

/// What kind of thing an operand is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Operand {
    None,
    /// A vector register of that many bytes.
    Vector(u8),
    Opmask,
    /// A general register of that many bytes.
    General(u8),
    /// So many bytes of memory.
    Memory(u8),
}

impl Operand {
    fn bytes(self) -> usize {
        match self {
            Operand::None => 0,
            Operand::Opmask => 8,
            Operand::Vector(bytes) | Operand::General(bytes) | Operand::Memory(bytes) => bytes.into(),
        }
    }
}

/// Which operands are a row's three sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Sources {
    /// Those after the destination, the only one twice; the third is the destination as it was.
    Following,
    /// All three in their order: fused multiply-add.
    All,
    /// The first two: what writes flags alone.
    FirstTwo,
}

/// What stands where the mask leaves out an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Merge {
    /// What was there.
    Destination,
    /// The first source's element: the blends.
    First,
    /// As `Destination`, but behind as many elements as the mask has bits set: the compressions.
    Packed,
}

/// An instruction apart from its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Table {
    code: u16,
    imm: Option<u8>,
    operands: [Operand; 3],
    sources: Sources,
    merge: Merge,
    zeroes: bool,
    /// The length of the vectors, in bytes.
    bytes: u8,
    /// How many bytes are repeated, of a source that is broadcast.
    broadcast: Option<u8>,
    /// Embedded rounding.
    rounding: Option<Rounding>,
    /// Exceptions are suppressed.
    suppressed: bool,
    /// What the instruction is for a thunk.
    traits: Traits,
}

/// What an instruction leaves besides registers.
pub(crate) struct Finished {
    /// The arithmetic flags, where it writes them.
    pub flags: u32,
    /// What goes to memory, where it does.
    pub value: Vector,
    /// The bytes of an element of it.
    pub lane: usize,
    /// Which of its elements do.
    pub chosen: u64,
}

impl Table {
    /// An instruction's table.
    ///
    /// # Errors
    /// [`NoThunk::Unsupported`] where no table has it.
    pub fn prepare(insn: &Instruction, traits: Traits) -> Result<Table, NoThunk> {
        let row = rows()[insn.code() as usize].as_ref().ok_or(NoThunk::Unsupported)?;
        let mut operands = [Operand::None; 3];
        let mut imm = None;
        let mut longest = 16;
        let mut broadcast = None;
        for n in 0..insn.op_count() {
            let operand = match insn.op_kind(n) {
                OpKind::Register => {
                    let register = insn.op_register(n);
                    if register.is_vector_register() {
                        longest = longest.max(register.size());
                        Operand::Vector(register.size() as u8)
                    } else if register.is_k() {
                        Operand::Opmask
                    } else if register.is_gpr32() || register.is_gpr64() {
                        Operand::General(register.size() as u8)
                    } else {
                        return Err(NoThunk::Unsupported);
                    }
                }
                OpKind::Memory => {
                    let size = insn.memory_size().size();
                    if insn.is_broadcast() {
                        broadcast = Some(size as u8);
                    }
                    longest = longest.max(insn.code().op_code().memory_size().size());
                    Operand::Memory(size as u8)
                }
                OpKind::Immediate8 => {
                    imm = Some(insn.immediate8());
                    continue;
                }
                _ => return Err(NoThunk::Unsupported),
            };
            *operands.get_mut(n as usize).ok_or(NoThunk::Unsupported)? = operand;
        }
        let mnemonic = insn.mnemonic();
        let rounding = match insn.rounding_control() {
            RoundingControl::None => None,
            RoundingControl::RoundToNearest => Some(Rounding::Nearest),
            RoundingControl::RoundDown => Some(Rounding::Down),
            RoundingControl::RoundUp => Some(Rounding::Up),
            RoundingControl::RoundTowardZero => Some(Rounding::Zero),
        };
        let merge = match mnemonic {
            M::Vpblendmb | M::Vpblendmw | M::Vpblendmd | M::Vpblendmq | M::Vblendmps | M::Vblendmpd => Merge::First,
            M::Vpcompressb | M::Vpcompressw | M::Vpcompressd | M::Vpcompressq | M::Vcompressps | M::Vcompresspd => {
                Merge::Packed
            }
            _ => Merge::Destination,
        };
        debug_assert!(row.widest >= row.lane);
        Ok(Table {
            code: insn.code() as u16,
            imm,
            operands,
            sources: match mnemonic {
                _ if traits.flags => Sources::FirstTwo,
                _ if fused(mnemonic) => Sources::All,
                _ => Sources::Following,
            },
            merge,
            zeroes: insn.zeroing_masking(),
            bytes: longest.min(Vector::BYTES) as u8,
            broadcast,
            rounding,
            suppressed: rounding.is_some() || insn.suppress_all_exceptions(),
            traits,
        })
    }

    /// Executes the instruction whose operands are at these places, the last of which is the writemask's; `memory` is what was read of a
    /// source in memory.
    ///
    /// # Errors
    /// An unmasked SIMD floating-point exception.
    pub fn run(
        &self,
        fpu: &mut FpuState,
        general: &mut [u64; 16],
        places: [Place; 4],
        memory: &Vector,
    ) -> Result<Finished, SimdException> {
        // `prepare` found the row.
        let Some(row) = rows()[usize::from(self.code)].as_ref() else {
            return Err(SimdException);
        };
        let operand = |n: usize| self.read(n, fpu, general, places[n], memory);
        let values = [operand(0), operand(1), operand(2)];
        let [a, b, c] = match self.sources {
            Sources::All => [0, 1, 2],
            Sources::FirstTwo => [0, 1, 1],
            Sources::Following if self.operands[2] == Operand::None => [1, 1, 0],
            Sources::Following => [1, 2, 0],
        };
        let masked = places[3].opmask();
        let mask = masked.map_or(u64::MAX, |n| fpu.avx512.k[n]);
        let (destination, last) = (self.operands[0], self.operands[b]);
        let bytes = usize::from(self.bytes);
        let inputs = Inputs {
            a: &values[a],
            b: &values[b],
            c: &values[c],
            imm: self.imm.unwrap_or(0),
            immediate: self.imm.is_some(),
            bytes,
            source: last.bytes(),
            destination: destination.bytes(),
            from_memory: matches!(last, Operand::Memory(_)),
            to_memory: matches!(destination, Operand::Memory(_)),
            param: row.row.param,
            mask,
        };
        let mut environment = self.environment(fpu.mxcsr);
        let outcome = (row.row.compute)(&inputs, &mut environment);
        if environment.raised != 0 && !self.suppressed {
            if self.traits.masked {
                fpu.mxcsr |= environment.raised & mxcsr::FLAGS;
            } else {
                finish(&mut fpu.mxcsr, environment.raised)?;
            }
        }
        let lane = usize::from(row.lane);
        let count = if row.scalar { 1 } else { bytes / usize::from(row.widest) };
        let mut finished = Finished {
            flags: outcome.flags,
            value: outcome.value,
            lane,
            chosen: u64::MAX >> (64 - count.clamp(1, 64)),
        };
        if self.traits.flags {
            return Ok(finished);
        }
        finished.chosen &= match self.merge {
            Merge::Packed => match (mask & finished.chosen).count_ones() {
                0 => 0,
                n => u64::MAX >> (64 - n),
            },
            _ => mask,
        };
        let value = &mut finished.value;
        match destination {
            Operand::None => {}
            Operand::Memory(size) => {
                if masked.is_none() {
                    (finished.lane, finished.chosen) = (usize::from(size), 1);
                }
            }
            Operand::Opmask => {
                if let Some(k) = places[0].opmask() {
                    fpu.avx512.k[k] = value.get::<u64>(0) & mask;
                }
            }
            Operand::General(size) => {
                if let Some(register) = places[0].general() {
                    let value = value.get::<u64>(0);
                    general[register] = if size == 4 { value & 0xffff_ffff } else { value };
                }
            }
            Operand::Vector(size) => {
                let size = usize::from(size);
                if masked.is_some() {
                    let other = match self.merge {
                        Merge::First => &values[a],
                        _ => &values[0],
                    };
                    for k in (0..count.min(size / lane)).filter(|k| finished.chosen >> k & 1 == 0) {
                        let at = k * lane..(k + 1) * lane;
                        if self.zeroes {
                            value.0[at].fill(0);
                        } else {
                            value.0[at.clone()].copy_from_slice(&other.0[at]);
                        }
                    }
                }
                value.0[size..].fill(0);
                fpu.set_zmm(places[0].vector(), [0, 1, 2, 3].map(|n| value.u128(n)));
            }
        }
        Ok(finished)
    }

    fn environment(&self, controls: u32) -> Environment {
        let mut environment = if self.suppressed || self.traits.masked {
            Environment::new(controls | mxcsr::MASKS)
        } else if self.traits.no_underflow {
            Environment::without_underflow(controls)
        } else {
            Environment::new(controls)
        };
        if let Some(rounding) = self.rounding {
            environment.rounding = rounding;
        }
        environment
    }

    /// Operand `n`. A destination in memory is not read.
    fn read(&self, n: usize, fpu: &FpuState, general: &[u64; 16], place: Place, memory: &Vector) -> Vector {
        match self.operands[n] {
            Operand::None => Vector::ZERO,
            Operand::Vector(size) => {
                let mut v = Vector::ZERO;
                let quarters = fpu.zmm(place.vector());
                for (q, quarter) in quarters.into_iter().enumerate().take(usize::from(size) / 16) {
                    v.set(q, quarter);
                }
                v
            }
            Operand::Opmask => Vector::from_u64(place.opmask().map_or(0, |k| fpu.avx512.k[k])),
            Operand::General(size) => {
                let value = place.general().map_or(0, |register| general[register]);
                Vector::from_u64(if size == 4 { value & 0xffff_ffff } else { value })
            }
            Operand::Memory(_) => match self.broadcast.map(usize::from) {
                None => *memory,
                Some(size) => {
                    let mut v = Vector::ZERO;
                    for part in v.0.chunks_exact_mut(size) {
                        part.copy_from_slice(&memory.0[..size]);
                    }
                    v
                }
            },
        }
    }
}

#[cfg(test)]
#[path = "evex_test.rs"]
mod tests;
