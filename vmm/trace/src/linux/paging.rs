//! The kernel's own page tables, `init_top_pgt`: its half of the addresses, without any CPU's state. SDM Vol. 3A 4.5 "4-Level Paging and
//! 5-Level Paging".

use x86::paging::{Mapped, Mode, Paging};

use super::budget::Look;
use crate::symbols::SymbolTable;

/// Where the tables are; `None` where the kernel has no symbol for them.
#[derive(Debug)]
pub struct KernelTables(Option<Paging>);

impl KernelTables {
    /// `delta` takes an address of the image to where it is.
    pub fn new(memory: &mut Look<'_>, symbols: &SymbolTable, delta: u64) -> KernelTables {
        let mut five = [0; 4];
        let flag = symbols.address("__pgtable_l5_enabled");
        let known = flag.is_some_and(|at| memory.read_physical(at.wrapping_add(delta), &mut five));
        let mode = Mode::Long(if known && five != [0; 4] { 5 } else { 4 });
        let top = symbols.address("init_top_pgt").map(|at| at.wrapping_add(delta));
        KernelTables(top.map(|top| Paging { mode, top }))
    }

    /// The physical address, and how many bytes of the page are from there on.
    pub fn translate(&self, memory: &mut Look<'_>, address: u64) -> Option<(u64, u64)> {
        let mapped = self
            .0?
            .translate(&mut |at, bytes| memory.read_physical(at, bytes), address)?;
        let Mapped { physical, rest } = mapped;
        Some((physical, rest))
    }

    /// Reads at a virtual address.
    pub fn read(&self, memory: &mut Look<'_>, mut address: u64, mut bytes: &mut [u8]) -> bool {
        while !bytes.is_empty() {
            let Some((at, rest)) = self.translate(memory, address) else {
                return false;
            };
            let (part, behind) = bytes.split_at_mut(rest.min(bytes.len() as u64) as usize);
            if !memory.read_physical(at, part) {
                return false;
            }
            address = address.wrapping_add(part.len() as u64);
            bytes = behind;
        }
        true
    }
}
