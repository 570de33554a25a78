//! What thunks are made from, so that the translator can put the same instructions where it wants them.

use super::Slot;
use iced_x86::{Instruction, OpKind, Register};

/// The pointers to the operands, in order.
pub(super) const POINTERS: [Register; 4] = [Register::RDI, Register::RSI, Register::RDX, Register::RCX];

/// What a thunk was made from: the loads, the instruction (of halves two) and the stores, with the pointers as bases. MXCSR, the flags and
/// the clean upper halves that Rust expects are the caller's affair.
#[derive(Debug)]
pub(crate) struct Recipe {
    pub before: Vec<Instruction>,
    pub body: Vec<Instruction>,
    pub after: Vec<Instruction>,
    /// A YMM register is used.
    pub wide: bool,
}

/// An instruction of a recipe where it is to stand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Placed {
    /// As it is.
    Instruction(Instruction),
    /// A general register of the guest's goes to the temporary one.
    Get(u8),
    /// It comes from there.
    Set(u8),
}

impl Recipe {
    /// The loads and the instruction, and the stores, for these slots, where the state is `fpu` bytes from a base, memory is at another
    /// and a general register goes through a third. None: there are operands that no slot names.
    pub fn placed(
        &self,
        slots: [Slot; 4],
        (base, fpu): (Register, i64),
        memory: Register,
        general: Register,
    ) -> Option<(Vec<Placed>, Vec<Placed>)> {
        let place = |instruction: &Instruction| {
            let mut instruction = *instruction;
            let mut slot = Slot::NONE;
            if (0..instruction.op_count()).any(|n| instruction.op_kind(n) == OpKind::Memory) {
                let pointer = instruction.memory_base();
                slot = slots[POINTERS.iter().position(|&p| p == pointer)?];
                if let Some(offset) = slot.vector() {
                    let displacement = fpu + offset as i64 + instruction.memory_displacement64() as i64;
                    instruction.set_memory_base(base);
                    instruction.set_memory_displacement64(displacement as u64);
                    instruction.set_memory_displ_size(1);
                } else if slot.is_memory() {
                    instruction.set_memory_base(memory);
                }
            }
            if let Some(number) = slot.general() {
                let loads = instruction.op_kind(0) == OpKind::Register;
                return Some(if loads {
                    Placed::Get(number)
                } else {
                    Placed::Set(number)
                });
            }
            for n in 0..instruction.op_count() {
                if instruction.op_kind(n) == OpKind::Register {
                    match instruction.op_register(n) {
                        Register::RAX => instruction.set_op_register(n, general.full_register()),
                        Register::EAX => instruction.set_op_register(n, general.full_register32()),
                        register if register.is_gpr() || register == Register::XMM0 => return None,
                        _ => {}
                    }
                }
            }
            Some(Placed::Instruction(instruction))
        };
        let before: Option<Vec<Placed>> = self.before.iter().chain(&self.body).map(place).collect();
        let after: Option<Vec<Placed>> = self.after.iter().map(place).collect();
        Some((before?, after?))
    }
}
