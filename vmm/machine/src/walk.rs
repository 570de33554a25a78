//! A look through the guest's page tables that leaves no trace: for reports, not for execution. SDM Vol. 3A chapter 5 "Paging".

use engine::CpuState;
pub use x86::paging::{ADDRESS, Step};
use x86::paging::{Mapped, Paging};
use x86::vmx::controls::Secondary;
use x86::vmx::ept::{self, EptAccess, EptPaging};

use crate::memory::Memory;

/// The physical address of a linear one, as the CPU's paging mode has it, and the EPT of the guest that it runs in VMX non-root operation;
/// `None` if nothing is mapped there.
pub fn translate(memory: &Memory, cpu: &CpuState, linear: u64) -> Option<u64> {
    host_physical(memory, cpu, walk(memory, cpu, linear, &mut |_| ())?)
}

/// The same, with every entry on the way; none without paging. In VMX non-root operation both are guest-physical: see [`host_physical`].
pub fn steps(memory: &Memory, cpu: &CpuState, linear: u64) -> (Vec<Step>, Option<u64>) {
    let mut steps = Vec::new();
    let physical = walk(memory, cpu, linear, &mut |step| steps.push(step));
    (steps, physical)
}

fn walk(memory: &Memory, cpu: &CpuState, linear: u64, tell: &mut dyn FnMut(Step)) -> Option<u64> {
    let paging = Paging::new(cpu.cr0, cpu.cr3, cpu.cr4, cpu.efer);
    let mut read = |at: u64, bytes: &mut [u8]| {
        // An entry does not cross a page.
        host_physical(memory, cpu, at).is_some_and(|at| memory.read(at, bytes).is_ok())
    };
    let mapped = paging.walk(&mut read, linear, tell);
    mapped.map(|Mapped { physical, .. }| physical)
}

/// The physical address of a guest-physical one in VMX non-root operation; elsewhere they are the same. `None`: no entry of EPT maps it.
/// SDM Vol. 3C 29.3.2 "EPT Translation Mechanism".
pub fn host_physical(memory: &Memory, cpu: &CpuState, gpa: u64) -> Option<u64> {
    ept_steps(memory, cpu, gpa).map_or(Some(gpa), |(_, physical)| physical)
}

/// Entries of EPT, each with its address, and the physical address that they lead to, if they do.
pub type EptSteps = (Vec<(u64, u64)>, Option<u64>);

/// The entries of EPT on the way to a guest-physical address, each with its address, and the physical address that they lead to; `None` where
/// there is no EPT.
pub fn ept_steps(memory: &Memory, cpu: &CpuState, gpa: u64) -> Option<EptSteps> {
    let guest = cpu.vmx.as_ref()?.guest.as_ref()?;
    let paging = EptPaging {
        pointer: guest.ept?,
        // What a look is for is where an address leads; what the part would refuse shows in the entries.
        execute_only: true,
        huge: true,
        mode_based: guest.secondary.contains(Secondary::MODE_BASED_EXECUTE),
        physical_bits: 52,
    };
    let walk = |access| {
        let mut entries = Vec::new();
        let mut read = |at: u64| {
            let mut bytes = [0; 8];
            let entry = memory.read(at, &mut bytes).map_or(0, |()| u64::from_le_bytes(bytes));
            entries.push((at, entry));
            entry
        };
        let page = ept::walk(&paging, gpa, access, &mut read, &mut |_, _| ());
        (entries, page.ok().map(|page| page.physical | gpa & 0xfff))
    };
    // A page that can be fetched from and not be read is mapped, too.
    match walk(EptAccess::Read) {
        (_, None) => Some(walk(EptAccess::Fetch)),
        read => Some(read),
    }
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

#[cfg(test)]
#[path = "walk_test.rs"]
mod tests;
