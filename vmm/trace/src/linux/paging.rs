//! The kernel's own page tables, `init_top_pgt`: its half of the addresses, without any CPU's state. SDM Vol. 3A 4.5 "4-Level Paging and
//! 5-Level Paging".

use super::memory::Memory;
use crate::symbols::SymbolTable;

const PRESENT: u64 = 1 << 0;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Where the tables are.
#[derive(Debug)]
pub struct Paging {
    top: Option<u64>,
    levels: u32,
}

impl Paging {
    /// `delta` takes an address of the image to where it is.
    pub fn new(memory: &mut dyn Memory, symbols: &SymbolTable, delta: u64) -> Paging {
        let mut five = [0; 4];
        let flag = symbols.address("__pgtable_l5_enabled");
        let known = flag.is_some_and(|at| memory.read_physical(at.wrapping_add(delta), &mut five));
        Paging {
            top: symbols.address("init_top_pgt").map(|at| at.wrapping_add(delta)),
            levels: if known && five != [0; 4] { 5 } else { 4 },
        }
    }

    /// The physical address, and how many bytes of the page are from there on.
    pub fn translate(&self, memory: &mut dyn Memory, address: u64) -> Option<(u64, u64)> {
        let mut table = self.top?;
        for level in (0..self.levels).rev() {
            let shift = 12 + 9 * level;
            let mut entry = [0; 8];
            if !memory.read_physical(table + (address >> shift & 511) * 8, &mut entry) {
                return None;
            }
            let entry = u64::from_le_bytes(entry);
            if entry & PRESENT == 0 {
                return None;
            }
            if level == 0 || entry & LARGE != 0 && level <= 2 {
                let offset = address & ((1 << shift) - 1);
                return Some(((entry & ADDRESS & !((1 << shift) - 1)) | offset, (1 << shift) - offset));
            }
            table = entry & ADDRESS;
        }
        None
    }

    /// Reads at a virtual address.
    pub fn read(&self, memory: &mut dyn Memory, mut address: u64, mut bytes: &mut [u8]) -> bool {
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
