//! From an instruction to the machine code of its thunk.

use super::forms::{self, Implicit};
use super::kept;
use super::recipe::{POINTERS, Recipe};
use super::{Entry, Env, MemoryUse, NoThunk, Slot, Thunk, Traits};
use crate::fpu::state::{FpuState, mxcsr};
use iced_x86::{
    Code, Encoder, EncodingKind, IcedError, Instruction, InstructionInfoFactory, MandatoryPrefix, MemoryOperand,
    OpAccess, OpKind, Register,
};
use std::mem::offset_of;

const XMM: [Register; 4] = [Register::XMM1, Register::XMM2, Register::XMM3, Register::XMM4];
const YMM: [Register; 4] = [Register::YMM1, Register::YMM2, Register::YMM3, Register::YMM4];
const MM: [Register; 4] = [Register::MM0, Register::MM1, Register::MM2, Register::MM3];

/// How far behind the lower half of a YMM register its upper half lies.
pub(super) const UPPER: i64 = (offset_of!(FpuState, ymm_hi) - offset_of!(FpuState, xmm)) as i64;

/// Prepares `insn` for execution.
///
/// # Errors
/// [`NoThunk::Unsupported`] for an instruction outside the families that thunks serve; for RCPPS and RSQRTPS, masked moves,
/// gathers, LDMXCSR and STMXCSR in either encoding; and for those that have no vector operand.
pub fn prepare(insn: &Instruction) -> Result<Thunk, NoThunk> {
    if !forms::supported(insn) {
        return Err(NoThunk::Unsupported);
    }
    let vex = insn.encoding() == EncodingKind::VEX;
    let mnemonic = insn.mnemonic();
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(insn);
    let written = |i: u32| {
        matches!(
            info.op_access(i),
            OpAccess::Write | OpAccess::ReadWrite | OpAccess::CondWrite | OpAccess::ReadCondWrite
        )
    };
    let read = |i: u32| {
        matches!(
            info.op_access(i),
            OpAccess::Read | OpAccess::ReadWrite | OpAccess::CondRead | OpAccess::ReadCondWrite
        )
    };

    let mut renamed = *insn;
    renamed.set_has_lock_prefix(false);
    if !matches!(insn.code().op_code().mandatory_prefix(), MandatoryPrefix::PF2) {
        renamed.set_has_repne_prefix(false);
    }
    if !matches!(insn.code().op_code().mandatory_prefix(), MandatoryPrefix::PF3) {
        renamed.set_has_rep_prefix(false);
    }
    renamed.set_segment_prefix(Register::None);

    let mut slots = [Slot::NONE; 4];
    let mut memory = None;
    let mut traits = Traits {
        flags: forms::writes_flags(mnemonic),
        mxcsr: forms::uses_mxcsr(mnemonic),
        ..Traits::default()
    };
    let mut parts = Parts::default();

    for i in 0..insn.op_count() {
        let n = i as usize;
        match insn.op_kind(i) {
            OpKind::Register if n < 4 => {
                let register = insn.op_register(i);
                let number = register.number();
                let name = if register.is_ymm() && vex {
                    slots[n] = Slot::xmm(number);
                    parts.wide = true;
                    YMM[n]
                } else if register.is_xmm() {
                    slots[n] = Slot::xmm(number);
                    XMM[n]
                } else if register.is_mm() {
                    slots[n] = Slot::mm(number);
                    traits.mmx = true;
                    traits.writes_mm |= written(i);
                    MM[n]
                } else if register.is_gpr32() || register.is_gpr64() {
                    slots[n] = Slot::gpr(number);
                    // A write to EAX clears the upper half, as the guest's register wants it.
                    if register.is_gpr64() {
                        Register::RAX
                    } else {
                        Register::EAX
                    }
                } else {
                    return Err(NoThunk::Unsupported);
                };
                renamed.set_op_register(i, name);
                // All but what is only written: an idiom like VPSUBB of a register and itself reads nothing, says the decoder.
                if !vex || info.op_access(i) != OpAccess::Write {
                    load(&mut parts.before, vex, name, POINTERS[n])?;
                }
                if written(i) {
                    store(&mut parts.after, vex, name, POINTERS[n])?;
                }
            }
            OpKind::Memory if n < 4 => {
                renamed.set_memory_base(POINTERS[n]);
                renamed.set_memory_index(Register::None);
                renamed.set_memory_index_scale(1);
                renamed.set_memory_displacement64(0);
                renamed.set_memory_displ_size(0);
                slots[n] = Slot::MEMORY;
                memory = Some(MemoryUse {
                    size: insn.memory_size().size() as u8,
                    alignment: forms::needs_alignment(insn),
                    read: read(i),
                    write: written(i),
                });
            }
            OpKind::Immediate8 | OpKind::Immediate8_2nd => {}
            _ => return Err(NoThunk::Unsupported),
        }
    }

    // From memory neither CVTPI2PD (SDM Vol. 2A) nor CVTPI2PS takes the x87 unit to MMX use, whatever the manual says of the latter.
    let implicit = Implicit::of(mnemonic);
    parts.implicit(&implicit, vex)?;
    if implicit.lengths || implicit.index {
        // Operand 2 is the immediate, so its pointer is free for the general registers.
        slots[2] = Slot::GPRS;
    }
    Ok(Thunk {
        entry: parts.keep(vec![renamed], traits)?,
        slots,
        memory,
        traits,
    })
}

pub(super) fn instruction(made: Result<Instruction, IcedError>) -> Result<Instruction, NoThunk> {
    made.map_err(|_| NoThunk::Unsupported)
}

/// Loads a host register from where a pointer says: all of it, of EAX's family 64 bits.
pub(super) fn load(
    code: &mut Vec<Instruction>,
    vex: bool,
    register: Register,
    pointer: Register,
) -> Result<(), NoThunk> {
    let at = MemoryOperand::with_base(pointer);
    let low = Register::XMM0 + register.number() as u32;
    let opcode = match (register, vex) {
        (r, true) if r.is_xmm() || r.is_ymm() => Code::VEX_Vmovups_xmm_xmmm128,
        (r, false) if r.is_xmm() => Code::Movups_xmm_xmmm128,
        (r, _) if r.is_mm() => Code::Movq_mm_mmm64,
        _ => Code::Mov_r64_rm64,
    };
    let whole = match opcode {
        Code::Movq_mm_mmm64 => register,
        Code::Mov_r64_rm64 => Register::RAX,
        _ => low,
    };
    code.push(instruction(Instruction::with2(opcode, whole, at))?);
    if register.is_ymm() {
        let upper = MemoryOperand::with_base_displ(pointer, UPPER);
        let insert = Code::VEX_Vinsertf128_ymm_ymm_xmmm128_imm8;
        code.push(instruction(Instruction::with4(insert, register, register, upper, 1))?);
    }
    Ok(())
}

/// The opposite of `load`; with VEX always both halves of a vector register.
pub(super) fn store(
    code: &mut Vec<Instruction>,
    vex: bool,
    register: Register,
    pointer: Register,
) -> Result<(), NoThunk> {
    let at = MemoryOperand::with_base(pointer);
    let number = register.number() as u32;
    let vector = register.is_xmm() || register.is_ymm();
    let (opcode, whole) = match (vex, vector) {
        (true, true) => (Code::VEX_Vmovups_xmmm128_xmm, Register::XMM0 + number),
        (false, true) => (Code::Movups_xmmm128_xmm, register),
        _ if register.is_mm() => (Code::Movq_mmm64_mm, register),
        _ => (Code::Mov_rm64_r64, Register::RAX),
    };
    code.push(instruction(Instruction::with2(opcode, at, whole))?);
    if vex && vector {
        let upper = MemoryOperand::with_base_displ(pointer, UPPER);
        let extract = Code::VEX_Vextractf128_xmmm128_ymm_imm8;
        let from = Register::YMM0 + number;
        code.push(instruction(Instruction::with3(extract, upper, from, 1))?);
    }
    Ok(())
}

/// Appends machine code.
fn encode(code: &mut Vec<u8>, insns: &[Instruction]) -> Result<(), NoThunk> {
    let mut encoder = Encoder::new(64);
    for insn in insns {
        encoder.encode(insn, 0).map_err(|_| NoThunk::Unsupported)?;
    }
    code.extend(encoder.take_buffer());
    Ok(())
}

/// What a thunk is made of, around the instruction itself.
#[derive(Default)]
pub(super) struct Parts {
    pub before: Vec<Instruction>,
    pub after: Vec<Instruction>,
    /// A YMM register is used.
    pub wide: bool,
}

impl Parts {
    /// The implicit operands, which come last: RDX is a pointer until the lengths are loaded.
    fn implicit(&mut self, implicit: &Implicit, vex: bool) -> Result<(), NoThunk> {
        if implicit.reads_xmm0 {
            load(&mut self.before, vex, Register::XMM0, Register::R9)?;
        }
        if implicit.writes_xmm0 {
            store(&mut self.after, vex, Register::XMM0, Register::R9)?;
        }
        let gpr = |number: i64| MemoryOperand::with_base_displ(Register::R10, number * 8);
        if implicit.lengths || implicit.index {
            let keep = Instruction::with2(Code::Mov_r64_rm64, Register::R10, Register::RDX);
            self.before.push(instruction(keep)?);
        }
        if implicit.lengths {
            for (register, number) in [(Register::RAX, 0), (Register::RDX, 2)] {
                let length = Instruction::with2(Code::Mov_r64_rm64, register, gpr(number));
                self.before.push(instruction(length)?);
            }
        }
        if implicit.index {
            let index = Instruction::with2(Code::Mov_rm64_r64, gpr(1), Register::RCX);
            self.after.push(instruction(index)?);
        }
        Ok(())
    }

    /// Where a thunk of these parts is entered, with `body` for the instruction; it is kept with what it was made from.
    pub fn keep(self, body: Vec<Instruction>, traits: Traits) -> Result<Entry, NoThunk> {
        let code = self.assemble(&body, traits)?;
        let Parts { before, after, wide } = self;
        let recipe = Recipe {
            before,
            body,
            after,
            wide,
        };
        kept::entry(&code, recipe)
    }

    /// The machine code, with `body` for the instruction.
    fn assemble(&self, body: &[Instruction], traits: Traits) -> Result<Vec<u8>, NoThunk> {
        let env = |at: usize| MemoryOperand::with_base_displ(Register::R8, at as i64);
        let mut code = Vec::new();
        encode(&mut code, &self.before)?;
        if traits.mxcsr {
            let run = instruction(Instruction::with1(Code::Ldmxcsr_m32, env(offset_of!(Env, run))))?;
            encode(&mut code, &[run])?;
        }
        encode(&mut code, body)?;
        if traits.flags {
            let seto = instruction(Instruction::with1(Code::Seto_rm8, Register::AL))?;
            encode(&mut code, &[Instruction::with(Code::Lahf), seto])?;
        }
        let mut stores = Vec::new();
        encode(&mut stores, &self.after)?;
        if traits.mxcsr {
            let after = env(offset_of!(Env, after));
            let mut restore = Vec::new();
            let host = instruction(Instruction::with1(Code::Ldmxcsr_m32, env(offset_of!(Env, host))))?;
            encode(&mut restore, &[host])?;
            let (run, reset) = (env(offset_of!(Env, run)), mxcsr::RESET as i32);
            encode(
                &mut code,
                &[
                    instruction(Instruction::with1(Code::Stmxcsr_m32, after))?,
                    instruction(Instruction::with2(Code::Cmp_rm32_imm32, run, reset))?,
                ],
            )?;
            // JE over the restoring: the controls were Rust's own, and its flags nobody looks at.
            code.extend([0x74, restore.len() as u8]);
            code.extend(restore);
            let unmasked = env(offset_of!(Env, unmasked));
            encode(
                &mut code,
                &[
                    instruction(Instruction::with2(Code::Mov_r32_rm32, Register::R11D, unmasked))?,
                    instruction(Instruction::with2(Code::Test_rm32_r32, after, Register::R11D))?,
                ],
            )?;
            // JNZ over the stores.
            code.extend([0x75, stores.len() as u8]);
        }
        code.extend(stores);
        if traits.mmx {
            code.extend([0x0f, 0x77]); // EMMS: the host's x87 registers are to be found empty.
        }
        if self.wide {
            encode(&mut code, &[Instruction::with(Code::VEX_Vzeroupper)])?;
        }
        code.push(0xc3);
        Ok(code)
    }
}
