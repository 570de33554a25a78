//! The kernel's table of its own symbols. Layout: scripts/kallsyms.c of Linux 6.1, `write_src`: offsets, relative base, number
//! of symbols, names, markers, in later 6.1 the order of names, token table, token index, each aligned to eight bytes.
//!
//! Names are compressed: each of their bytes stands for a token. The index of the 256 tokens, 256 ascending numbers of 16 bits
//! that begin with 0, is what a scan can recognise; the rest lies before it.

use std::ops::Range;

use super::{
    budget::{Budget, Look},
    text::LONGEST_NAME,
};
use crate::symbols::SymbolTable;

/// No kernel has more: Debian's have 150 thousand.
const MOST_SYMBOLS: usize = 2 << 20;
/// All names without their compression: Debian's are 4 megabytes.
const MOST_NAMES: usize = 64 << 20;
/// The tables before the token index, at most: 4 bytes of offset and about 12 of name for each symbol.
const MOST_BYTES: u64 = 64 << 20;
/// Tokens are short strings.
const MOST_TOKENS: usize = 8 << 10;
const INDEX: usize = 512;
const CHUNK: usize = 1 << 16;

/// A look through all of RAM, and at a few places in it that look as if the tables were before them.
pub fn budget(ram: &[Range<u64>]) -> Budget {
    let size: u64 = ram.iter().map(|range| range.end.saturating_sub(range.start)).sum();
    Budget {
        bytes: (size + size / 8).saturating_add(16 * MOST_BYTES),
        steps: (size / 8).saturating_add(256 << 20),
    }
}

/// What was found.
pub struct Tables {
    /// Sorted as in the kernel.
    pub symbols: SymbolTable,
    /// The token index, physically.
    pub at: u64,
}

/// Looks for tables until `accept` likes some.
pub fn find<T>(memory: &mut Look<'_>, mut accept: impl FnMut(&mut Look<'_>, Tables) -> Option<T>) -> Option<T> {
    // Each chunk is read with the length of an index behind it.
    let mut bytes = vec![0; CHUNK + INDEX];
    for range in memory.ram() {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(bytes.len() as u64) as usize;
            if memory.is_over() || !memory.spend(len as u64 / 8) || !memory.read_physical(at, &mut bytes[..len]) {
                break;
            }
            for place in 0..len.saturating_sub(INDEX - 1).div_ceil(8) {
                let place = place * 8;
                let Ok(index) = bytes[place..place + INDEX].try_into() else {
                    break;
                };
                if !is_index(index) {
                    continue;
                }
                let index = at + place as u64;
                if let Some(found) = read(memory, index, range.start).and_then(|tables| accept(memory, tables)) {
                    return Some(found);
                }
            }
            at += CHUNK as u64;
        }
    }
    None
}

fn half(bytes: &[u8], n: usize) -> usize {
    u16::from_le_bytes([bytes[2 * n], bytes[2 * n + 1]]).into()
}

/// Every token has at least one character and its NUL.
#[inline]
fn is_index(bytes: &[u8; INDEX]) -> bool {
    // Most memory fails here.
    let head = u64::from_le_bytes([
        bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
    ]);
    if head & 0xffff != 0 || head >> 16 & 0xffff < 2 {
        return false;
    }
    (1..256).all(|n| half(bytes, n) >= half(bytes, n - 1) + 2) && half(bytes, 255) < MOST_TOKENS
}

/// Reads the tables that end with the index at `at`; RAM begins at `floor`.
fn read(memory: &mut Look<'_>, at: u64, floor: u64) -> Option<Tables> {
    let mut index = [0; INDEX];
    let read = memory.read_physical(at, &mut index);
    // First the tokens, with what is before them as far as it fits, then all.
    let mut before = |len: u64| {
        let start = at.saturating_sub(len).max(floor);
        let mut bytes = vec![0; (at - start) as usize];
        memory.read_physical(start, &mut bytes).then_some(bytes)
    };
    if !read {
        return None;
    }
    let near = before(MOST_TOKENS as u64 + 64)?;
    let table = tokens(&near, &index);
    let bytes = table.and_then(|_| before(MOST_BYTES));
    // At most this is looked at for tokens.
    if !memory.spend(MOST_TOKENS as u64) {
        return None;
    }
    let symbols = decode(&bytes?, &index, memory)?;
    Some(Tables { symbols, at })
}

/// Where the token table begins in the bytes before the index.
fn tokens(bytes: &[u8], index: &[u8; INDEX]) -> Option<usize> {
    let last = half(index, 255);
    // Behind the last token's NUL there are at most seven bytes up to the index.
    (1..=16usize)
        .map_while(|words| bytes.len().checked_sub((last + 2).next_multiple_of(8) + words * 8 - 8))
        .find(|start| {
            let table = &bytes[*start..];
            let ends = (1..256).all(|n| table[half(index, n) - 1] == 0);
            let tail = &table[last..];
            let end = tail.iter().position(|byte| *byte == 0);
            // Tokens are of what names are of, and a digit stands for itself in nearly all kernels.
            ends && end
                .is_some_and(|end| end > 0 && tail[end..].len() <= 8 && tail[end..].iter().all(|byte| *byte == 0))
                && table[..last].iter().all(|byte| *byte == 0 || byte.is_ascii_graphic())
        })
}

/// The length of `count` names, if markers (where each 256th name begins) follow that agree, and then nothing, or three bytes for
/// each symbol (the order of names, since 6.2 and in later 6.1).
fn extent(bytes: &[u8], count: usize, look: &mut Look<'_>) -> Option<usize> {
    let mut at = 0;
    // A name has a length and a token.
    if bytes.len() / 2 < count {
        return None;
    }
    let mut marks = Vec::with_capacity(count / 256 + 1);
    for n in 0..count {
        if n % 256 == 0 {
            look.spend(256).then_some(())?;
            marks.push(at as u32);
        }
        at = name_at(bytes, at)?.0;
    }
    let markers = at.next_multiple_of(8);
    let behind = (markers + marks.len() * 4).next_multiple_of(8);
    let agree = bytes
        .get(markers..markers + marks.len() * 4)?
        .chunks_exact(4)
        .zip(&marks)
        .all(|(word, mark)| word == mark.to_le_bytes());
    let whole = [behind, (behind + count * 3).next_multiple_of(8)].contains(&bytes.len());
    (agree && whole).then_some(at)
}

/// The place of the name behind the one at `at`, and the tokens of that.
fn name_at(bytes: &[u8], at: usize) -> Option<(usize, &[u8])> {
    let first = usize::from(*bytes.get(at)?);
    let (start, len) = if first & 0x80 == 0 {
        (at + 1, first)
    } else {
        (at + 2, first & 0x7f | usize::from(*bytes.get(at + 1)?) << 7)
    };
    Some((start + len, bytes.get(start..start + len)?))
}

struct SymbolNames<'a> {
    bytes: &'a [u8],
    tokens: &'a [u8],
    index: &'a [u8; INDEX],
}

impl SymbolNames<'_> {
    /// `None`: it is longer than a name can be, or of what no name is of.
    fn expand(&self, coded: &[u8], name: &mut Vec<u8>) -> Option<()> {
        name.clear();
        for token in coded {
            let token = self.tokens.get(half(self.index, usize::from(*token))..)?;
            let token = &token[..token.len().min(LONGEST_NAME)];
            let len = token.iter().position(|byte| *byte == 0)?;
            if name.len() + len > LONGEST_NAME {
                return None;
            }
            name.extend_from_slice(&token[..len]);
        }
        name.iter().all(u8::is_ascii_graphic).then_some(())
    }
}

/// The symbols of the tables that end where `bytes` does.
fn decode(bytes: &[u8], index: &[u8; INDEX], look: &mut Look<'_>) -> Option<SymbolTable> {
    let table = tokens(bytes, index)?;
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    // The base and the number, and behind them names that lead to where the tokens are.
    let (count, names, end) = (2..table / 8).find_map(|back| {
        if back % 1024 == 0 && !look.spend(1024) {
            return None;
        }
        let names = table - back * 8;
        let count = word(names.checked_sub(8)?)? as usize;
        let base = u64::from(word(names.checked_sub(12)?)?);
        let fits = base == 0xffff_ffff && word(names - 4)? == 0 && (1..=MOST_SYMBOLS).contains(&count);
        let end = fits.then(|| extent(&bytes[names..table], count, look)).flatten()?;
        Some((count, names, names + end))
    })?;
    let base = u64::from(word(names.checked_sub(16)?)?) | 0xffff_ffff << 32;
    let offsets = (names - 16).checked_sub((count * 4).next_multiple_of(8))?;
    let offset = |n: usize| word(offsets + n * 4).map_or(0, |word| word as i32);
    // CONFIG_KALLSYMS_ABSOLUTE_PERCPU, as all SMP kernels have it: what is not negative is an address, of per-CPU data.
    let absolute = (0..count).filter(|n| offset(*n) < 0).count() > count / 2;
    let names = SymbolNames {
        bytes: &bytes[names..end],
        tokens: &bytes[table..],
        index,
    };
    let (mut at, mut name, mut symbols) = (0, Vec::new(), SymbolTable::new());
    let mut room = MOST_NAMES;
    for n in 0..count {
        let (next, coded) = name_at(names.bytes, at)?;
        names.expand(coded, &mut name)?;
        look.spend(32 + name.len() as u64).then_some(())?;
        room = room.checked_sub(name.len())?;
        at = next;
        let address = match offset(n) {
            value if absolute && value >= 0 => value as u64,
            value if absolute => base.wrapping_sub(1).wrapping_sub(value as i64 as u64),
            value => base.wrapping_add(u64::from(value as u32)),
        };
        let (kind, text) = name.split_first()?;
        symbols.add(address, *kind, std::str::from_utf8(text).ok()?, None);
    }
    Some(symbols.sorted())
}
