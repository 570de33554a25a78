//! Memory: pages of the heap, whose physical address is their linear one, and page tables to play with.

use crate::{boot, cpu};
use alloc::alloc::{Layout, alloc_zeroed};

/// Present.
pub const P: u64 = 1;
/// Writable.
pub const W: u64 = 2;
/// For ring 3, too.
pub const U: u64 = 4;

/// Where [`map`] has nothing else: beyond the 4 GiB that are mapped one to one.
pub const FREE: u64 = 0x80_0000_0000;

/// Zeroed pages, aligned to their size's next power of two. Nothing frees them.
pub fn pages(count: usize) -> u64 {
    let size = count * 4096;
    let layout = Layout::from_size_align(size, size.next_power_of_two()).expect("a size in bounds");
    // SAFETY: the layout has a size.
    let address = unsafe { alloc_zeroed(layout) };
    assert!(!address.is_null(), "no memory for {count} pages");
    address as u64
}

/// Reads a word of any memory.
pub fn peek(address: u64) -> u64 {
    // SAFETY: the caller names memory of the guest.
    unsafe { (address as *const u64).read_unaligned() }
}

/// Writes a word of any memory.
pub fn poke(address: u64, value: u64) {
    // SAFETY: the caller names memory of the guest.
    unsafe { (address as *mut u64).write_unaligned(value) };
}

/// Reads 32 bits of any memory.
pub fn peek32(address: u64) -> u32 {
    // SAFETY: the caller names memory of the guest.
    unsafe { (address as *const u32).read_unaligned() }
}

fn entry(table: u64, index: u64) -> u64 {
    let at = table + 8 * (index & 511);
    if peek(at) & P == 0 {
        poke(at, pages(1) | P | W | U);
    }
    peek(at) & !0xFFF
}

/// Maps a page of 4 KiB at a linear address from [`FREE`] on; without [`P`] it is unmapped.
pub fn map(linear: u64, physical: u64, flags: u64) {
    let pdpt = entry(cpu::cr3() & !0xFFF, linear >> 39);
    let directory = entry(pdpt, linear >> 30);
    let table = entry(directory, linear >> 21);
    poke(table + 8 * (linear >> 12 & 511), physical | flags);
    invalidate(linear);
}

/// INVLPG.
pub fn invalidate(linear: u64) {
    // SAFETY: it drops a translation.
    unsafe { core::arch::asm!("invlpg [{}]", in(reg) linear) };
}

/// Another CR3 with the same mappings.
pub fn another_space() -> u64 {
    let copy = pages(1);
    for index in 0..512 {
        poke(copy + 8 * index, peek(boot::pml4() + 8 * index));
    }
    copy
}
