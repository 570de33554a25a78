//! Where a kernel's image lies: its physical and its virtual addresses, from what of its symbols is known.
//!
//! The image is in one piece, so that one distance takes every virtual address of it to a physical one. A 64-bit kernel keeps it in
//! `phys_base`. Where that has no symbol (`CONFIG_KALLSYMS_ALL` is off, and data have none), the distance is the one with which
//! calls lead to functions, or with which pointers in the image point to functions.

use std::collections::HashSet;

use super::{budget::Look, kallsyms::Tables};
use crate::symbols::SymbolTable;

/// Where a 64-bit kernel's image is linked to: `__START_KERNEL_map` of arch/x86/include/asm/page_64_types.h.
pub const START_KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// And `_text` in it, or from where the kernel's part of a 32-bit kernel's addresses begins: `CONFIG_PHYSICAL_START`, 16 MiB in every
/// configuration in use.
const PHYSICAL_START: u64 = 0x100_0000;
/// Where the kernel's part of a 32-bit kernel's addresses begins (`CONFIG_PAGE_OFFSET`, arch/x86/Kconfig "Memory split").
const PAGE_OFFSETS: [u64; 5] = [0xc000_0000, 0xb000_0000, 0x8000_0000, 0x7800_0000, 0x4000_0000];
/// The image is aligned to 2 MiB, physically and virtually (`CONFIG_PHYSICAL_ALIGN` and the page tables).
const ALIGN: u64 = 2 << 20;
/// No image is longer.
const LONGEST: u64 = 256 << 20;
/// KASLR moves a kernel within the first GiB of its map (`KERNEL_IMAGE_SIZE`).
const FARTHEST: u64 = 1 << 30;
/// Functions that are looked at.
const SAMPLE: usize = 256;
/// Bytes of constants in which pointers to functions are looked for, and how many of those are looked at.
const CONSTANTS: u64 = 32 << 20;
const POINTERS: usize = 16384;
/// Bytes that are looked at of each of them.
const CODE: usize = 256;
/// What calls or pointers must agree.
const ENOUGH: usize = 64;

/// Where an image lies.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// Physical less virtual address.
    pub delta: u64,
    /// Virtual address of `_text` without KASLR.
    pub text: u64,
    /// Bytes of a pointer.
    pub width: usize,
}

impl Image {
    /// Finds out, and gives the symbols with their virtual addresses; `None` where memory does not agree with the symbols.
    pub fn locate(memory: &mut Look<'_>, tables: Tables) -> Option<(Image, SymbolTable)> {
        let Tables {
            symbols,
            at,
            width,
            physical,
        } = tables;
        let delta = match (symbols.address("phys_base"), physical) {
            _ if width == 4 && physical => {
                by_pointers(memory, &symbols, at, width, PAGE_OFFSETS.into_iter().map(minus))
            }
            _ if width == 4 => by_calls(memory, &symbols, PAGE_OFFSETS.into_iter().map(minus)),
            // What is there is the distance itself.
            // What is there is the distance itself, once the image is where it stays: pointers agree with it.
            (Some(base), true) => {
                phys_base(memory, base).and_then(|delta| by_pointers(memory, &symbols, at, width, [delta].into_iter()))
            }
            (None, true) => {
                let text = symbols.address("_text")?;
                let slides =
                    (0..FARTHEST / ALIGN).map(|n| text.wrapping_sub(START_KERNEL_MAP + PHYSICAL_START + n * ALIGN));
                by_pointers(memory, &symbols, at, width, slides)
            }
            (Some(base), false) => {
                candidates(&symbols, at).find(|delta| phys_base(memory, base.wrapping_add(*delta)) == Some(*delta))
            }
            (None, false) => {
                let end = symbols.address("_etext")?;
                let first = at.saturating_sub(LONGEST).wrapping_sub(end).next_multiple_of(ALIGN);
                by_calls(
                    memory,
                    &symbols,
                    (0..LONGEST / ALIGN).map(|n| first.wrapping_add(n * ALIGN)),
                )
            }
        }?;
        let symbols = if physical {
            symbols.shifted(minus(delta))
        } else {
            symbols
        };
        let text = match width {
            4 => minus(delta) + PHYSICAL_START,
            _ => START_KERNEL_MAP + PHYSICAL_START,
        };
        Some((Image { delta, text, width }, symbols))
    }
}

/// The distance back.
fn minus(distance: u64) -> u64 {
    distance.wrapping_neg()
}

/// The distance that `phys_base` at a physical address tells.
pub fn phys_base(memory: &mut Look<'_>, at: u64) -> Option<u64> {
    let mut word = [0; 8];
    let read = memory.read_physical(at, &mut word);
    read.then(|| u64::from_le_bytes(word).wrapping_sub(START_KERNEL_MAP))
}

/// Distances with which the tables are in the image's constants.
fn candidates(symbols: &SymbolTable, tables: u64) -> impl Iterator<Item = u64> {
    let bounds = symbols
        .address("__start_rodata")
        .zip(symbols.address("__end_rodata"))
        .unwrap_or((0, 0));
    let first = tables.wrapping_sub(bounds.1).div_ceil(ALIGN).wrapping_mul(ALIGN);
    let count = bounds.1.saturating_sub(bounds.0).min(1 << 30) / ALIGN + 2;
    (0..count).map(move |n| first.wrapping_add(n * ALIGN))
}

/// Of these distances the one with which most near calls and jumps (E8H and E9H with a displacement of 32 bits) in a sample of the code
/// lead to where a function begins. With a wrong one, other code is there, and what it calls is elsewhere.
fn by_calls(memory: &mut Look<'_>, symbols: &SymbolTable, deltas: impl Iterator<Item = u64>) -> Option<u64> {
    let functions = functions(symbols)?;
    let sample: Vec<u64> = functions
        .iter()
        .copied()
        .step_by(functions.len() / SAMPLE + 1)
        .collect();
    let functions: HashSet<u64> = functions.into_iter().collect();
    let mut code = [0; CODE];
    let mut score = |delta: u64| {
        let mut hits = 0;
        for at in &sample {
            if !memory.spend(CODE as u64) || !memory.read_physical(at.wrapping_add(delta), &mut code) {
                continue;
            }
            let targets = code.windows(5).enumerate().filter_map(|(n, bytes)| match *bytes {
                [0xe8 | 0xe9, a, b, c, d] => {
                    let next = at + n as u64 + 5;
                    Some(next.wrapping_add(i32::from_le_bytes([a, b, c, d]) as i64 as u64))
                }
                _ => None,
            });
            hits += targets.filter(|target| functions.contains(target)).count();
        }
        hits
    };
    let best = deltas
        .map(|delta| (score(delta), delta))
        .max_by_key(|(score, _)| *score)?;
    (best.0 >= ENOUGH).then_some(best.1)
}

/// Of these distances the one with which most words before the tables are addresses of functions, whose symbols are physical.
fn by_pointers(
    memory: &mut Look<'_>,
    symbols: &SymbolTable,
    tables: u64,
    width: usize,
    deltas: impl Iterator<Item = u64>,
) -> Option<u64> {
    let functions = functions(symbols)?;
    let (first, last) = (*functions.first()?, *functions.last()?);
    let functions: HashSet<u64> = functions.into_iter().collect();
    // The constants are behind the code, and the tables are among the last of them.
    let text_end = symbols.address("_etext").unwrap_or(first);
    let start = text_end.next_multiple_of(4096).min(tables);
    let bytes = memory.bytes(start, CONSTANTS.min(tables - start))?;
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..width].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    let words: Vec<u64> = bytes.chunks_exact(width).map(word).collect();
    let words: Vec<u64> = match width {
        4 => words.into_iter().filter(|word| *word >= 1 << 30).collect(),
        _ => words.into_iter().filter(|word| *word >= START_KERNEL_MAP).collect(),
    };
    let words: Vec<u64> = words.iter().copied().step_by(words.len() / POINTERS + 1).collect();
    let mut score = |delta: u64| {
        if !memory.spend(words.len() as u64) {
            return 0;
        }
        let of = |word: &&u64| {
            let at = word.wrapping_add(delta);
            (first..=last).contains(&at) && functions.contains(&at)
        };
        words.iter().filter(of).count()
    };
    let best = deltas
        .map(|delta| (score(delta), delta))
        .max_by_key(|(score, _)| *score)?;
    (best.0 >= ENOUGH).then_some(best.1)
}

/// Addresses of functions of the code that stays, ascending; `None` where there are too few to tell anything.
fn functions(symbols: &SymbolTable) -> Option<Vec<u64>> {
    let (text, end) = (
        symbols.address("_text").or(symbols.address("_stext"))?,
        symbols.address("_etext")?,
    );
    let all = (0..symbols.functions()).filter_map(|n| Some(symbols.function(n)?.address));
    let all: Vec<u64> = all.filter(|at| (text + 4096..end).contains(at)).collect();
    (all.len() > SAMPLE).then_some(all)
}
