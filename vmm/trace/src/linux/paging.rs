//! The kernel's own page tables, `init_top_pgt`: its half of the addresses, without any CPU's state. SDM Vol. 3A 4.5 "4-Level Paging and
//! 5-Level Paging".

use x86::paging::{Mapped, Mode, Paging};

use super::{budget::Look, image::Image};
use crate::symbols::SymbolTable;

/// What of a 32-bit kernel's addresses is memory as it lies, less what is kept for other maps: `MAXMEM` of
/// arch/x86/include/asm/pgtable_32_areas.h with the default `VMALLOC_RESERVE`.
const LOW_MEMORY: u64 = 896 << 20;

/// How the kernel's addresses are mapped.
#[derive(Debug)]
pub enum KernelTables {
    /// By tables.
    Tables(Paging),
    /// A 32-bit kernel's low memory: the physical address less the virtual one.
    Low(u64),
    /// The kernel has no symbol for its tables.
    Unknown,
}

impl KernelTables {
    /// Those of a kernel whose image lies there.
    pub fn new(memory: &mut Look<'_>, symbols: &SymbolTable, image: Image) -> KernelTables {
        if image.width == 4 {
            return KernelTables::Low(image.delta);
        }
        let mut five = [0; 4];
        let flag = symbols.address("__pgtable_l5_enabled");
        let known = flag.is_some_and(|at| memory.read_physical(at.wrapping_add(image.delta), &mut five));
        let mode = Mode::Long(if known && five != [0; 4] { 5 } else { 4 });
        match symbols.address("init_top_pgt") {
            Some(top) => KernelTables::Tables(Paging {
                mode,
                top: top.wrapping_add(image.delta),
            }),
            None => KernelTables::Unknown,
        }
    }

    /// The physical address, and how many bytes of the page are from there on.
    pub fn translate(&self, memory: &mut Look<'_>, address: u64) -> Option<(u64, u64)> {
        match *self {
            KernelTables::Tables(paging) => {
                let Mapped { physical, rest } =
                    paging.translate(&mut |at, bytes| memory.read_physical(at, bytes), address)?;
                Some((physical, rest))
            }
            KernelTables::Low(delta) => {
                let physical = address.wrapping_add(delta);
                (physical < LOW_MEMORY).then_some((physical, 4096 - physical % 4096))
            }
            KernelTables::Unknown => None,
        }
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
