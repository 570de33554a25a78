//! What the operator is shown of a CPU that crashed.

use engine::CpuState;

use machine::{memory::Memory, walk};

/// All registers, and the code around RIP with the byte at RIP in brackets.
pub(super) fn report(memory: &Memory, state: &CpuState) -> String {
    const NAMES: [&str; 16] = [
        "RAX", "RCX", "RDX", "RBX", "RSP", "RBP", "RSI", "RDI", "R8 ", "R9 ", "R10", "R11", "R12", "R13", "R14", "R15",
    ];
    const SEGMENTS: [&str; 6] = ["ES", "CS", "SS", "DS", "FS", "GS"];
    let mut text = format!(
        "RIP {:016x}  RFLAGS {:08x}  CPL {}\n",
        state.rip,
        state.rflags.into_bits(),
        state.cpl
    );
    for (names, values) in NAMES.chunks(4).zip(state.gpr.chunks(4)) {
        let line: Vec<String> = names
            .iter()
            .zip(values)
            .map(|(name, value)| format!("{name} {value:016x}"))
            .collect();
        text += &format!("{}\n", line.join("  "));
    }
    for (name, s) in SEGMENTS
        .iter()
        .copied()
        .zip(&state.segments)
        .chain([("LDTR", &state.ldtr), ("TR", &state.tr)])
    {
        text += &format!(
            "{name:4} {:04x}  base {:016x}  limit {:08x}  attributes {:04x}\n",
            s.selector, s.base, s.limit, s.attributes
        );
    }
    let (gdtr, idtr) = (&state.gdtr, &state.idtr);
    text += &format!(
        "GDTR {:016x} limit {:04x}  IDTR {:016x} limit {:04x}\n",
        gdtr.base, gdtr.limit, idtr.base, idtr.limit
    );
    text += &format!(
        "CR0 {:08x}  CR2 {:016x}  CR3 {:016x}  CR4 {:08x}\n",
        state.cr0.into_bits(),
        state.cr2,
        state.cr3,
        state.cr4.into_bits()
    );
    text += &format!(
        "EFER {:08x}  DR6 {:08x}  DR7 {:08x}\n",
        state.efer.into_bits(),
        state.dr[6],
        state.dr[7]
    );
    text += "code";
    let at = state.linear_rip();
    for offset in -16i64..16 {
        let byte = walk::read_byte(memory, state, at.wrapping_add_signed(offset));
        let byte = byte.map_or("--".into(), |byte| format!("{byte:02x}"));
        text += &if offset == 0 {
            format!(" [{byte}]")
        } else {
            format!(" {byte}")
        };
    }
    text
}

#[cfg(test)]
#[path = "report_test.rs"]
mod tests;
