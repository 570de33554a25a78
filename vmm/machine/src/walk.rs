//! A look through the guest's page tables that leaves no trace: for reports, not for execution. SDM Vol. 3A chapter 5 "Paging".

use engine::CpuState;
pub use x86::paging::{ADDRESS, Step};
use x86::paging::{Mapped, Paging};

use crate::memory::Memory;

/// The physical address of a linear one, as the CPU's paging mode has it; `None` if nothing is mapped there.
pub fn translate(memory: &Memory, cpu: &CpuState, linear: u64) -> Option<u64> {
    walk(memory, cpu, linear, &mut |_| ())
}

/// The same, with every entry on the way; none without paging.
pub fn steps(memory: &Memory, cpu: &CpuState, linear: u64) -> (Vec<Step>, Option<u64>) {
    let mut steps = Vec::new();
    let physical = walk(memory, cpu, linear, &mut |step| steps.push(step));
    (steps, physical)
}

fn walk(memory: &Memory, cpu: &CpuState, linear: u64, tell: &mut dyn FnMut(Step)) -> Option<u64> {
    let paging = Paging::new(cpu.cr0, cpu.cr3, cpu.cr4, cpu.efer);
    let mapped = paging.walk(&mut |at, bytes| memory.read(at, bytes).is_ok(), linear, tell);
    mapped.map(|Mapped { physical, .. }| physical)
}

/// The CPU with the page tables that Linux has in the kernel, where it has those of user mode: with page-table isolation they are in the page
/// before (`PTI_USER_PGTABLE_BIT` of arch/x86/entry/calling.h), and those of user mode lack the kernel's half of the addresses.
pub fn with_kernel_tables(cpu: &CpuState) -> Option<CpuState> {
    const USER_TABLES: u64 = 1 << 12;
    let isolated = cpu.efer.lma() && cpu.cr3 & USER_TABLES != 0;
    isolated.then(|| CpuState {
        cr3: cpu.cr3 & !USER_TABLES,
        ..cpu.clone()
    })
}

/// One byte at a linear address.
pub fn read_byte(memory: &Memory, cpu: &CpuState, linear: u64) -> Option<u8> {
    let mut byte = [0];
    memory.read(translate(memory, cpu, linear)?, &mut byte).ok()?;
    Some(byte[0])
}
