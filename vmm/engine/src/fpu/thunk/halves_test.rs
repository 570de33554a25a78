use super::*;
use crate::fpu::thunk::recipe_of;
use iced_x86::CpuidFeature as F;

/// An instruction of a VEX form between registers, or from memory.
fn example(code: Code, memory: bool) -> Option<Instruction> {
    let mut insn = Instruction::default();
    insn.set_code(code);
    let mut in_memory = false;
    for (i, &kind) in code.op_code().op_kinds().iter().enumerate() {
        let i = i as u32;
        let register = match kind {
            Kind::xmm_or_mem | Kind::ymm_or_mem | Kind::r32_or_mem | Kind::r64_or_mem if memory => None,
            Kind::mem if memory => None,
            Kind::xmm_reg | Kind::xmm_rm | Kind::xmm_or_mem => Some(Register::XMM5),
            Kind::xmm_vvvv => Some(Register::XMM7),
            Kind::ymm_reg | Kind::ymm_rm | Kind::ymm_or_mem => Some(Register::YMM5),
            Kind::ymm_vvvv => Some(Register::YMM7),
            Kind::r32_reg | Kind::r32_rm | Kind::r32_or_mem => Some(Register::EBX),
            Kind::r64_reg | Kind::r64_rm | Kind::r64_or_mem => Some(Register::RBX),
            Kind::imm8 => {
                insn.set_op_kind(i, OpKind::Immediate8);
                insn.set_immediate8(1);
                continue;
            }
            _ => return None,
        };
        match register {
            Some(register) => {
                insn.set_op_kind(i, OpKind::Register);
                insn.set_op_register(i, register);
            }
            None => {
                in_memory = true;
                insn.set_op_kind(i, OpKind::Memory);
                insn.set_memory_base(Register::RAX);
            }
        }
    }
    (in_memory == memory).then_some(insn)
}

/// Whatever is composed is made of instructions that every x86-64 host has, and AVX and AVX2 mostly are.
// covers: portable/halves
#[test]
fn halves_ask_for_no_more_than_sse2() {
    let (mut made, mut all) = (0, 0);
    for code in Code::values().filter(|code| code.encoding() == EncodingKind::VEX) {
        for insn in [false, true].into_iter().filter_map(|memory| example(code, memory)) {
            all += usize::from(forms::supported(&insn));
            if !halved(&insn) {
                continue;
            }
            // A vector is not stored by a legacy instruction, which wants it aligned: moves have handlers of their own.
            let Ok(thunk) = prepare_halved(&insn) else {
                assert!(insn.op0_kind() == OpKind::Memory, "{code:?}");
                continue;
            };
            made += 1;
            let recipe = recipe_of(thunk.entry as usize).expect("a thunk's recipe");
            assert!(!recipe.wide);
            for part in recipe.before.iter().chain(&recipe.body).chain(&recipe.after) {
                let everywhere = part
                    .cpuid_features()
                    .iter()
                    .all(|f| matches!(f, F::SSE | F::SSE2 | F::X64 | F::INTEL386 | F::INTEL8086));
                assert!(everywhere, "{code:?}: {part}");
                // Memory that is read or written whole may be anywhere.
                let in_memory = (0..part.op_count()).any(|n| part.op_kind(n) == OpKind::Memory);
                let aligned = in_memory && part.memory_size().size() == 16 && part.mnemonic() != Mnemonic::Movups;
                assert!(!aligned, "{code:?}: {part}");
            }
        }
    }
    assert!(made > 500, "{made} of {all}");
}
