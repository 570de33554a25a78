//! VEX instructions by SSE2, for hosts without AVX: thunks of the legacy instruction on each 128 bits.
//!
//! AVX and AVX2 compute each 128 bits of their vectors as the legacy instruction of the same name does (SDM Vol. 1 14.1.2 "Instruction
//! Syntax Enhancement", 14.3 "AVX Instruction Detail"), and a YMM register is kept in two halves. What the legacy form is without is
//! around it: its destination begins as a copy of the first source, a memory operand of 16 bytes is loaded first, since it need not be
//! aligned, and the upper half of a register that a 128-bit instruction writes becomes zero. MXCSR collects the flags of both halves, and
//! nothing is stored before both are computed. What AVX has of its own is a table's ([`crate::fpu::portable`]), but for what moves elements
//! and is a move or a shuffle of SSE2 on each half ([`moved`]).

use std::collections::HashMap;
use std::sync::OnceLock;

use super::assemble::{self, Parts, UPPER, instruction};
use super::forms;
use super::recipe::POINTERS;
use super::{MemoryUse, NoThunk, Slot, Thunk, Traits};
use iced_x86::{
    Code, EncodingKind, Instruction, InstructionInfoFactory, MemoryOperand, Mnemonic, OpAccess,
    OpCodeOperandKind as Kind, OpKind, Register,
};

/// A legacy form that computes 128 bits of a VEX form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Twin {
    code: Code,
    /// The VEX form has an operand more: its first source, with which the destination begins.
    copies: bool,
    /// It has 256 bits, and so two halves.
    wide: bool,
    /// The last source is the same for both halves: a shift's count.
    shared: bool,
}

/// The twins of VEX forms, by `Code`.
fn twins() -> &'static HashMap<Code, Twin> {
    static TWINS: OnceLock<HashMap<Code, Twin>> = OnceLock::new();
    TWINS.get_or_init(|| {
        let mut legacy: HashMap<Mnemonic, Vec<Code>> = HashMap::new();
        for code in Code::values().filter(|code| code.encoding() == EncodingKind::Legacy) {
            let features = code.cpuid_features();
            if forms::everywhere(features) && !features.is_empty() {
                legacy.entry(code.mnemonic()).or_default().push(code);
            }
        }
        let of = |code: Code| {
            let candidates = legacy.get(&forms::legacy(code.mnemonic())?)?;
            candidates.iter().find_map(|&twin| matching(code, twin))
        };
        Code::values()
            .filter(|code| code.encoding() == EncodingKind::VEX)
            .filter_map(|code| Some((code, of(code)?)))
            .collect()
    })
}

/// Whether `legacy` computes each 128 bits of what `vex` computes, going by the operands that they have.
fn matching(vex: Code, legacy: Code) -> Option<Twin> {
    let (full, short) = (vex.op_code().op_kinds(), legacy.op_code().op_kinds());
    let copies = match full.len().checked_sub(short.len())? {
        0 => false,
        1 => true,
        _ => return None,
    };
    // What has the destination's vvvv, of shifts by an immediate, has the source behind it.
    let named: Vec<Kind> = match copies {
        true => [&full[..1], &full[2..]].concat(),
        false => full.to_vec(),
    };
    let wide = full.iter().any(|&kind| width(kind) == Some(32));
    let count = matches!(
        legacy.mnemonic(),
        Mnemonic::Psllw
            | Mnemonic::Pslld
            | Mnemonic::Psllq
            | Mnemonic::Psrlw
            | Mnemonic::Psrld
            | Mnemonic::Psrlq
            | Mnemonic::Psraw
            | Mnemonic::Psrad
    );
    let mut shared = false;
    for (position, (&ours, &theirs)) in named.iter().zip(short).enumerate() {
        let same = match (width(ours), width(theirs)) {
            (Some(32), Some(16)) => position > 0 || !in_memory(ours) && !in_memory(theirs),
            // A vector of another length beside 256 bits: a conversion that widens or narrows, or a count.
            (Some(16), Some(16)) if wide => {
                shared = true;
                count && position == 1
            }
            (Some(16), Some(16)) => true,
            (None, None) => ours == theirs,
            _ => false,
        };
        // Of two halves neither can have its part of a general register, nor of a memory operand that is no vector.
        if !same || wide && width(ours).is_none() && ours != Kind::imm8 {
            return None;
        }
    }
    Some(Twin {
        code: legacy,
        copies,
        wide,
        shared,
    })
}

/// The bytes of a vector operand.
fn width(kind: Kind) -> Option<usize> {
    match kind {
        Kind::xmm_reg | Kind::xmm_rm | Kind::xmm_vvvv | Kind::xmm_or_mem => Some(16),
        Kind::ymm_reg | Kind::ymm_rm | Kind::ymm_vvvv | Kind::ymm_or_mem => Some(32),
        _ => None,
    }
}

fn in_memory(kind: Kind) -> bool {
    matches!(kind, Kind::xmm_or_mem | Kind::ymm_or_mem | Kind::mem)
}

/// The host's register for an operand of one half.
fn register(operand: usize, half: usize) -> Register {
    Register::XMM1 + (4 * half + operand) as u32
}

/// Whether SSE2 executes this VEX instruction by halves.
pub(crate) fn halved(insn: &Instruction) -> bool {
    // CMPPS of legacy encoding has eight predicates. SDM Vol. 2A "CMPPS".
    let comparison = matches!(
        insn.mnemonic(),
        Mnemonic::Vcmpps | Mnemonic::Vcmppd | Mnemonic::Vcmpss | Mnemonic::Vcmpsd
    );
    let twin = twins().contains_key(&insn.code()) && !(comparison && insn.immediate8() >= 8);
    forms::supported(insn) && (twin || moved(insn).is_some())
}

/// Prepares a VEX instruction for execution by SSE2.
///
/// # Errors
/// [`NoThunk::Unsupported`] for what is not [`halved`].
pub(crate) fn prepare_halved(insn: &Instruction) -> Result<Thunk, NoThunk> {
    if let Some(how) = moved(insn) {
        return prepare_moved(insn, how);
    }
    let twin = *twins().get(&insn.code()).ok_or(NoThunk::Unsupported)?;
    let mut legacy = Instruction::default();
    legacy.set_code(twin.code);
    let copied = u32::from(twin.copies);
    let mut slots = [Slot::NONE; 4];
    let mut memory = None;
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(insn);
    let mut parts = Parts::default();
    let mut bodies = vec![legacy; if twin.wide { 2 } else { 1 }];
    for operand in 0..insn.op_count() - copied {
        let n = operand as usize;
        // Where the value comes from.
        let from = operand + copied;
        let pointer = POINTERS[from as usize];
        // The same part of the operand for both halves, or the other part.
        let other = |half: usize, distance: i64| match half == 1 && (operand == 0 || !twin.shared) {
            true => distance,
            false => 0,
        };
        match insn.op_kind(from) {
            OpKind::Register => {
                let source = insn.op_register(from);
                slots[from as usize] = slot(source)?;
                let written = operand == 0 && info.op_access(0) != OpAccess::Read;
                if written && twin.copies {
                    slots[0] = slot(insn.op_register(0))?;
                }
                let reads = !written || twin.copies;
                let general = source.is_gpr32() || source.is_gpr64();
                for (half, body) in bodies.iter_mut().enumerate() {
                    let name = match general {
                        true if source.is_gpr64() => Register::RAX,
                        true => Register::EAX,
                        false => register(n, half),
                    };
                    body.set_op_kind(operand, OpKind::Register);
                    body.set_op_register(operand, name);
                    if reads && general {
                        assemble::load(&mut parts.before, false, name, pointer)?;
                    } else if reads {
                        parts.before.push(load(name, pointer, other(half, UPPER))?);
                    }
                }
                if written && general {
                    assemble::store(&mut parts.after, false, Register::RAX, POINTERS[0])?;
                } else if written {
                    parts.after = stores([register(n, 0), register(n, 1)], twin.wide)?;
                }
            }
            OpKind::Memory => {
                let used = memory_use(insn, operand == 0);
                slots[from as usize] = Slot::MEMORY;
                memory = Some(used);
                // A store of a vector's half, a scalar's operand: as they are. Vectors may be anywhere in memory.
                let vector = used.size >= 16;
                if used.write && vector {
                    return Err(NoThunk::Unsupported);
                }
                for (half, body) in bodies.iter_mut().enumerate() {
                    if vector {
                        let name = register(n, half);
                        parts.before.push(load(name, pointer, other(half, 16))?);
                        body.set_op_kind(operand, OpKind::Register);
                        body.set_op_register(operand, name);
                    } else {
                        body.set_op_kind(operand, OpKind::Memory);
                        body.set_memory_base(pointer);
                    }
                }
            }
            OpKind::Immediate8 => {
                for (half, body) in bodies.iter_mut().enumerate() {
                    // VSHUFPD's has two bits for each half. SDM Vol. 2B "SHUFPD".
                    let pairs = insn.mnemonic() == Mnemonic::Vshufpd;
                    let control = insn.immediate8() >> if pairs { 2 * half } else { 0 };
                    body.set_op_kind(operand, OpKind::Immediate8);
                    body.set_immediate8(control);
                }
            }
            _ => return Err(NoThunk::Unsupported),
        }
    }
    let traits = Traits {
        flags: forms::writes_flags(insn.mnemonic()),
        mxcsr: forms::uses_mxcsr(insn.mnemonic()),
        ..Traits::default()
    };
    Ok(Thunk {
        entry: parts.keep(bodies, traits)?,
        slots,
        memory,
        traits,
    })
}

/// What an instruction does with its memory operand, which is its destination or not.
fn memory_use(insn: &Instruction, write: bool) -> MemoryUse {
    MemoryUse {
        size: insn.memory_size().size() as u8,
        alignment: forms::needs_alignment(insn),
        read: !write,
        write,
    }
}

/// Loads 128 bits.
fn load(to: Register, pointer: Register, displacement: i64) -> Result<Instruction, NoThunk> {
    let at = MemoryOperand::with_base_displ(pointer, displacement);
    instruction(Instruction::with2(Code::Movups_xmm_xmmm128, to, at))
}

/// Stores 128 bits of the destination.
fn store(displacement: i64, from: Register) -> Result<Instruction, NoThunk> {
    let at = MemoryOperand::with_base_displ(POINTERS[0], displacement);
    instruction(Instruction::with2(Code::Movups_xmmm128_xmm, at, from))
}

/// Stores a register's halves; of one that has 128 bits written the upper becomes zero.
fn stores([low, high]: [Register; 2], wide: bool) -> Result<Vec<Instruction>, NoThunk> {
    let mut code = vec![store(0, low)?];
    if wide {
        code.push(store(UPPER, high)?);
    } else {
        let zero = register(3, 0);
        let clear = Instruction::with2(Code::Pxor_xmm_xmmm128, zero, zero);
        code.extend([instruction(clear)?, store(UPPER, zero)?]);
    }
    Ok(code)
}

/// What AVX's own instructions that move elements do to each half of their destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Move {
    /// The lowest element of the source, of so many bytes, everywhere.
    Broadcast(usize),
    /// The first source, and 128 bits of the last in one half of it.
    Insert,
    /// One half of the source, to XMM or memory.
    Extract,
    /// Elements of each half by the immediate: of 32 bits, of 64.
    Permute32,
    Permute64,
}

/// Which of these an instruction is.
fn moved(insn: &Instruction) -> Option<Move> {
    use Mnemonic::*;
    Some(match insn.mnemonic() {
        Vbroadcastss | Vpbroadcastd => Move::Broadcast(4),
        Vbroadcastsd | Vpbroadcastq => Move::Broadcast(8),
        Vbroadcastf128 | Vbroadcasti128 => Move::Broadcast(16),
        Vinsertf128 | Vinserti128 => Move::Insert,
        Vextractf128 | Vextracti128 => Move::Extract,
        // Others have their control in a register.
        Vpermilps if insn.op2_kind() == OpKind::Immediate8 => Move::Permute32,
        Vpermilpd if insn.op2_kind() == OpKind::Immediate8 => Move::Permute64,
        _ => return None,
    })
}

/// Prepares an instruction that moves elements.
fn prepare_moved(insn: &Instruction, how: Move) -> Result<Thunk, NoThunk> {
    let mut slots = [Slot::NONE; 4];
    let mut memory = None;
    for operand in 0..insn.op_count() {
        match insn.op_kind(operand) {
            OpKind::Register => slots[operand as usize] = slot(insn.op_register(operand))?,
            OpKind::Memory => {
                slots[operand as usize] = Slot::MEMORY;
                memory = Some(memory_use(insn, operand == 0));
            }
            OpKind::Immediate8 => {}
            _ => return Err(NoThunk::Unsupported),
        }
    }
    let wide = insn.op0_register().is_ymm();
    let control = insn.immediate8();
    let halves = [register(0, 0), register(0, 1)];
    let mut parts = Parts::default();
    let mut body = Vec::new();
    let mut stored = [halves[0]; 2];
    match how {
        Move::Broadcast(size) => {
            let to = halves[0];
            let at = MemoryOperand::with_base(POINTERS[1]);
            parts.before.push(match size {
                4 if memory.is_some() => instruction(Instruction::with2(Code::Movss_xmm_xmmm32, to, at))?,
                8 if memory.is_some() => instruction(Instruction::with2(Code::Movsd_xmm_xmmm64, to, at))?,
                _ => load(to, POINTERS[1], 0)?,
            });
            match size {
                4 => body.push(instruction(Instruction::with3(
                    Code::Pshufd_xmm_xmmm128_imm8,
                    to,
                    to,
                    0,
                ))?),
                8 => body.push(instruction(Instruction::with2(Code::Punpcklqdq_xmm_xmmm128, to, to))?),
                _ => {}
            }
        }
        Move::Insert => {
            stored = halves;
            for (half, &name) in halves.iter().enumerate() {
                let inserted = half == usize::from(control & 1);
                let (from, displacement) = match (inserted, half) {
                    (true, _) => (2, 0),
                    (false, 0) => (1, 0),
                    (false, _) => (1, UPPER),
                };
                parts.before.push(load(name, POINTERS[from], displacement)?);
            }
        }
        Move::Extract => {
            let displacement = if control & 1 != 0 { UPPER } else { 0 };
            parts.before.push(load(halves[0], POINTERS[1], displacement)?);
        }
        Move::Permute32 | Move::Permute64 => {
            let number = if wide { 2 } else { 1 };
            let distance = if memory.is_some() { 16 } else { UPPER };
            stored = halves;
            for (half, &name) in halves.iter().enumerate().take(number) {
                parts.before.push(load(name, POINTERS[1], half as i64 * distance)?);
                body.push(instruction(if how == Move::Permute32 {
                    Instruction::with3(Code::Pshufd_xmm_xmmm128_imm8, name, name, u32::from(control))
                } else {
                    let pair = u32::from(control >> (2 * half));
                    Instruction::with3(Code::Shufpd_xmm_xmmm128_imm8, name, name, pair)
                })?);
            }
        }
    }
    parts.after = match slots[0].is_memory() {
        true => vec![store(0, stored[0])?],
        false => stores(stored, wide)?,
    };
    let traits = Traits::default();
    Ok(Thunk {
        entry: parts.keep(body, traits)?,
        slots,
        memory,
        traits,
    })
}

fn slot(register: Register) -> Result<Slot, NoThunk> {
    let number = register.number();
    match register {
        r if r.is_xmm() || r.is_ymm() => Ok(Slot::xmm(number)),
        r if r.is_gpr32() || r.is_gpr64() => Ok(Slot::gpr(number)),
        _ => Err(NoThunk::Unsupported),
    }
}

#[cfg(test)]
#[path = "halves_test.rs"]
mod tests;
