//! A guest that writes whatever registers, with whatever in the tables and buffers that they lead to.

use engine::Exit;
use iced_x86::code_asm::*;
use x86::model::MODELS;
use x86::msr::{IA32_DEBUGCTL, IA32_DS_AREA, IA32_PERF_GLOBAL_CTRL, IA32_PERFEVTSEL0, IA32_RTIT_CTL, NAMES};
use x86::msr::{IA32_PEBS_ENABLE, IA32_RTIT_OUTPUT_BASE};

use crate::flat::{DATA, Flat};

/// Bytes that are put where registers may lead: management areas, tables, buffers.
const TABLES: usize = 128;
/// The length of an operation: register, how far from it, value.
const OPERATION: usize = 10;
/// Steps that a guest may make. It makes far fewer, unless faults have no end.
const STEPS: u64 = 100_000;

/// A model, tables, and registers to write, each with some branches and stores behind it.
pub fn registers(bytes: &[u8]) {
    let Some((&[model], rest)) = bytes.split_first_chunk() else {
        return;
    };
    let Some((tables, operations)) = rest.split_at_checked(TABLES) else {
        return;
    };
    let wide = MODELS.iter().filter(|model| model.features().lm());
    let wide: Vec<_> = wide.collect();
    let model = wide[usize::from(model) % wide.len()];
    let mut flat = Flat::new(model, 0, |a| {
        for operation in operations.chunks_exact(OPERATION).take(200) {
            let (name, offset) = (operation[0], operation[1]);
            let value = u64::from_le_bytes(operation[2..].try_into().expect("eight bytes"));
            let (msr, _) = NAMES[usize::from(name) % NAMES.len()];
            a.mov(ecx, msr + u32::from(offset & 0x1F))?;
            a.mov(eax, value as u32)?;
            a.mov(edx, (value >> 32) as u32)?;
            a.wrmsr()?;
            a.rdmsr()?;
            let mut next = a.create_label();
            a.mov(qword_ptr(DATA + 0x800), rax)?;
            a.call(next)?;
            a.set_label(&mut next)?;
            a.pop(rax)?;
        }
        a.hlt()
    });
    // #GP: on behind WRMSR and RDMSR, which are of two bytes. ADD QWORD [RSP + 8], 2; ADD RSP, 8; IRETQ
    flat.handle(13, &[0x48, 0x83, 0x44, 0x24, 8, 2, 0x48, 0x83, 0xC4, 8, 0x48, 0xCF]);
    flat.write(DATA, tables);
    let exit = flat.run_for(STEPS);
    assert!(!matches!(exit, Exit::Defect(_)), "{}: {exit:?}", model.name);
}

/// A guest that traces, stores branches and samples.
pub fn writers() -> Vec<Vec<u8>> {
    let mut bytes = vec![3];
    let words = [
        DATA + 0x1000,
        DATA + 0x1000,
        DATA + 0x1180,
        DATA + 0x1100,
        DATA + 0x2000,
        DATA + 0x2000,
        DATA + 0x3000,
        DATA + 0x2800,
        u64::MAX << 4 & 0xFFFF_FFFF_FFFF,
        0,
        0,
        0,
        // A table of one region and its END.
        DATA + 0x4000,
        DATA | 0x60 | 1,
        0,
        0,
    ];
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    for (msr, offset, value) in [
        (IA32_DS_AREA, 0, DATA),
        (IA32_PERFEVTSEL0, 0, 0x43_00C4),
        (IA32_PEBS_ENABLE, 0, 1),
        (IA32_PERF_GLOBAL_CTRL, 0, 1),
        (IA32_RTIT_OUTPUT_BASE, 0, DATA + 0x60),
        (IA32_RTIT_OUTPUT_BASE, 1, 0x7F),
        (IA32_RTIT_CTL, 0, 0x2105),
        (IA32_DEBUGCTL, 0, 0x1C1),
        (IA32_DEBUGCTL, 0, 0xC1),
    ] {
        let name = NAMES.iter().position(|(number, _)| *number == msr).unwrap_or(0);
        bytes.extend([name as u8, offset]);
        bytes.extend(u64::to_le_bytes(value));
    }
    vec![bytes]
}
