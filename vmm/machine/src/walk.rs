//! A look through the guest's page tables that leaves no trace: for reports, not for execution.
//! SDM Vol. 3A chapter 4 "Paging".

use engine::CpuState;

use crate::memory::Memory;

const PRESENT: u64 = 1 << 0;
const LARGE: u64 = 1 << 7;
/// The address in an entry of eight bytes.
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

const CR0_PG: u64 = 1 << 31;
const CR4_PSE: u64 = 1 << 4;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;

/// An entry on the way to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Which table it is in, by the name of its entries.
    pub table: &'static str,
    /// Where it is, physically.
    pub at: u64,
    /// The entry; `None` where there is no RAM.
    pub entry: Option<u64>,
}

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
    if cpu.cr0 & CR0_PG == 0 {
        return Some(linear & 0xffff_ffff);
    }
    if cpu.cr4 & CR4_PAE == 0 {
        return walk_32(memory, cpu, linear as u32, tell);
    }
    // Four or five levels in long mode, else the last three, of which the first has four entries.
    let long = cpu.efer & EFER_LMA != 0;
    let (mut table, levels) = if long {
        let levels = if cpu.cr4 & CR4_LA57 != 0 { 5 } else { 4 };
        // Not canonical: nothing can be mapped there.
        let unused = 64 - (12 + 9 * levels);
        if (linear as i64) << unused >> unused != linear as i64 {
            return None;
        }
        (cpu.cr3 & ADDRESS, levels)
    } else {
        (cpu.cr3 & 0xffff_ffe0, 3)
    };
    for level in (0..levels).rev() {
        let shift = 12 + 9 * level;
        let at = table + (linear >> shift & if !long && level == 2 { 3 } else { 511 }) * 8;
        let entry = entry_64(memory, at);
        tell(Step {
            table: ["PTE", "PDE", "PDPTE", "PML4E", "PML5E"][level],
            at,
            entry,
        });
        let entry = entry.filter(|entry| entry & PRESENT != 0)?;
        let last = level == 0 || entry & LARGE != 0 && (level == 1 || level == 2 && long);
        if last {
            let offset = (1 << shift) - 1;
            return Some(entry & ADDRESS & !offset | linear & offset);
        }
        table = entry & ADDRESS;
    }
    None
}

fn walk_32(memory: &Memory, cpu: &CpuState, linear: u32, tell: &mut dyn FnMut(Step)) -> Option<u64> {
    let mut entry = |table, at| {
        let entry = entry_32(memory, at);
        tell(Step { table, at, entry });
        entry.filter(|entry| entry & PRESENT != 0)
    };
    let pde = entry("PDE", (cpu.cr3 & 0xffff_f000) + u64::from(linear >> 22) * 4)?;
    if pde & LARGE != 0 && cpu.cr4 & CR4_PSE != 0 {
        // 4.3, table 4-4: bits 20:13 of the entry are bits 39:32 of the address.
        let high = (pde >> 13 & 0xff) << 32;
        return Some(high | pde & 0xffc0_0000 | u64::from(linear) & 0x3f_ffff);
    }
    let pte = entry("PTE", (pde & 0xffff_f000) + u64::from(linear >> 12 & 0x3ff) * 4)?;
    Some(pte & 0xffff_f000 | u64::from(linear) & 0xfff)
}

fn entry_64(memory: &Memory, gpa: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    memory.read(gpa, &mut bytes).ok()?;
    Some(u64::from_le_bytes(bytes))
}

fn entry_32(memory: &Memory, gpa: u64) -> Option<u64> {
    let mut bytes = [0; 4];
    memory.read(gpa, &mut bytes).ok()?;
    Some(u32::from_le_bytes(bytes).into())
}

/// One byte at a linear address.
pub fn read_byte(memory: &Memory, cpu: &CpuState, linear: u64) -> Option<u8> {
    let mut byte = [0];
    memory.read(translate(memory, cpu, linear)?, &mut byte).ok()?;
    Some(byte[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_paging_modes() {
        let memory = Memory::new(2 << 20).unwrap();
        let put = |at: u64, entry: u64| memory.write(at, &entry.to_le_bytes()).unwrap();
        // 4-level: PML4 at 1000H, PDPT 2000H, PD 3000H, PT 4000H.
        put(0x1000 + 511 * 8, 0x2000 | PRESENT);
        put(0x2000, 0x3000 | PRESENT);
        put(0x2008, 0x4000_0000 | PRESENT | LARGE);
        put(0x3000, 0x4000 | PRESENT);
        put(0x3008, 0x60_0000 | PRESENT | LARGE);
        put(0x4008, (1 << 63) | 0x12_3000 | PRESENT);
        // 32-bit: directory at 5000H, table 6000H.
        put(0x5000, 0x6000 | PRESENT | (0x1_0040_0000 | PRESENT | LARGE) << 32);
        put(0x6000, (0x7000 | PRESENT) << 32);

        let state = |cr0, cr3, cr4, efer| CpuState {
            cr0,
            cr3,
            cr4,
            efer,
            ..CpuState::default()
        };
        let off = state(0, 0, 0, 0);
        let legacy = state(CR0_PG, 0x5000, CR4_PSE, 0);
        let pae = state(CR0_PG, 0x2000, CR4_PAE, 0);
        let long = state(CR0_PG, 0x1000, CR4_PAE, EFER_LMA);
        // PML5 at 8000H.
        put(0x8000 + 511 * 8, 0x1000 | PRESENT);
        let five = state(CR0_PG, 0x8000, CR4_PAE | CR4_LA57, EFER_LMA);
        let top = 0xffff_ff80_0000_0000;
        for (cpu, linear, physical, what) in [
            (&off, 0x1234, Some(0x1234), "no paging"),
            (&legacy, 0x1abc, Some(0x7abc), "32-bit, 4 KiB"),
            (&legacy, 0x40_0abc, Some(0x40_0abc), "32-bit, 4 MiB"),
            (&legacy, 0x2000, None, "32-bit, not present"),
            (&pae, 0x1abc, Some(0x12_3abc), "PAE, 4 KiB"),
            (&pae, 0x20_0abc, Some(0x60_0abc), "PAE, 2 MiB"),
            (&long, top + 0x1abc, Some(0x12_3abc), "4-level, 4 KiB"),
            (&long, top + 0x20_0abc, Some(0x60_0abc), "4-level, 2 MiB"),
            (&long, top + 0x4012_3456, Some(0x4012_3456), "4-level, 1 GiB"),
            (&long, 0x1000, None, "4-level, not present"),
            (&long, top + 0x1abc & !(1 << 63), None, "4-level, not canonical"),
            (&five, top + 0x1abc, Some(0x12_3abc), "5-level, 4 KiB"),
            (&five, 0xff00_0000_0000_0000, None, "5-level, not present"),
        ] {
            assert_eq!(translate(&memory, cpu, linear), physical, "{what}");
            let (steps, same) = steps(&memory, cpu, linear);
            let none = cpu.cr0 == 0 || what.ends_with("not canonical");
            assert_eq!((same, steps.is_empty()), (physical, none), "{what}");
            assert!(steps.iter().all(|step| step.entry.is_some()), "{what}");
        }
    }
}
