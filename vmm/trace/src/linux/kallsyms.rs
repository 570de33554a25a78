//! The kernel's table of its own symbols. Layouts: scripts/kallsyms.c of Linux, `write_src`.
//!
//! Names are compressed: each of their bytes stands for a token. The index of the 256 tokens, 256 ascending numbers of 16 bits
//! that begin with 0, is what a scan can recognise. Before it are, in all versions, the number of symbols, the names, the markers
//! (where each 256th name begins) and the token table, each aligned to eight bytes, in 32-bit kernels and in all since 7.3 to four. The rest
//! has moved:
//!
//! | Linux | before the number of symbols | before the token table | behind the index |
//! |---|---|---|---|
//! | up to 6.1 | offsets, relative base | | |
//! | later 6.1, 6.2, 6.3 | offsets, relative base | order of names | |
//! | 6.4 to 7.2 | | | offsets, relative base, order of names |
//! | 7.3 | | | place-relative offsets, order of names |
//!
//! The order of names has a number of three bytes for each symbol, each number once, which no other memory has.

use std::ops::Range;

use super::{
    budget::{Budget, Look},
    text::LONGEST_NAME,
};
use crate::symbols::SymbolTable;

/// No kernel has more: Debian's have 200 thousand.
const MOST_SYMBOLS: usize = 2 << 20;
/// All names without their compression: Debian's are 5 megabytes.
const MOST_NAMES: usize = 64 << 20;
/// The tables before the token index, at most: 4 bytes of offset and about 12 of name for each symbol.
const MOST_BYTES: u64 = 64 << 20;
/// Tokens are short strings.
const MOST_TOKENS: usize = 8 << 10;
const INDEX: usize = 512;
const CHUNK: usize = 1 << 16;
/// Bytes that are looked at together.
const BLOCK: usize = 64;
const _: () = assert!(BLOCK < INDEX && CHUNK.is_multiple_of(BLOCK));
/// Names at whose first character it is told whether names begin somewhere.
const FIRST_NAMES: usize = 16;

/// A look through all of RAM, and at a few places in it that look as if the tables were before them.
pub fn budget(ram: &[Range<u64>]) -> Budget {
    let size: u64 = ram.iter().map(|range| range.end.saturating_sub(range.start)).sum();
    Budget {
        bytes: (size + size / 8).saturating_add(16 * MOST_BYTES),
        steps: (size / 4).saturating_add(384 << 20),
    }
}

/// What was found.
pub struct Tables {
    /// Sorted as in the kernel.
    pub symbols: SymbolTable,
    /// The token index, physically.
    pub at: u64,
    /// Bytes of a pointer: 8 or 4.
    pub width: usize,
    /// Addresses of symbols are physical: the tables tell only how far they are from the tables.
    pub physical: bool,
}

/// Looks for tables until `accept` takes some.
///
/// # Errors
/// There are none that could be read: whether there is a token table without the other tables, as kernels of a newer kind have it.
pub fn find<T>(memory: &mut Look<'_>, mut accept: impl FnMut(&mut Look<'_>, Tables) -> Option<T>) -> Result<T, bool> {
    let mut unknown = false;
    // Each chunk is read with the length of an index behind it.
    let mut bytes = vec![0; CHUNK + INDEX];
    for range in memory.ram() {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(bytes.len() as u64) as usize;
            if memory.is_over() || !memory.spend(len as u64 / 4) || !memory.read_physical(at, &mut bytes[..len]) {
                break;
            }
            for place in places(&bytes[..len]) {
                let index = at + place as u64;
                match read(memory, index, range.start) {
                    Found::Tables(tables) => {
                        if let Some(found) = accept(memory, tables) {
                            return Ok(found);
                        }
                    }
                    Found::Tokens => unknown = true,
                    Found::Nothing => {}
                }
            }
            at += CHUNK as u64;
        }
    }
    Err(unknown)
}

/// Where an index may begin in a chunk that is followed by the length of one.
fn places(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let end = bytes.len().saturating_sub(INDEX - 1).min(CHUNK);
    let blocks = (0..end).step_by(BLOCK);
    blocks
        .filter(move |block| may_begin(&bytes[*block..*block + BLOCK]))
        .flat_map(move |block| (block..(block + BLOCK).min(end)).step_by(4))
        .filter(move |place| <&[u8; INDEX]>::try_from(&bytes[*place..*place + INDEX]).is_ok_and(is_index))
}

/// Whether an index may begin with one of these words: the first token is at 0, and has a character and its NUL. Most memory fails here, so
/// this is a loop that the compiler makes vector instructions of.
fn may_begin(block: &[u8]) -> bool {
    block.chunks_exact(4).fold(false, |any, word| {
        let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        any | (word & 0xffff == 0) & (word >= 2 << 16)
    })
}

fn half(bytes: &[u8], n: usize) -> usize {
    u16::from_le_bytes([bytes[2 * n], bytes[2 * n + 1]]).into()
}

/// Every token has at least one character and its NUL.
#[inline]
fn is_index(bytes: &[u8; INDEX]) -> bool {
    half(bytes, 0) == 0 && (1..256).all(|n| half(bytes, n) >= half(bytes, n - 1) + 2) && half(bytes, 255) < MOST_TOKENS
}

/// What is around what looks like an index.
enum Found {
    Tables(Tables),
    /// Tokens, but no symbols that could be read.
    Tokens,
    Nothing,
}

/// Reads the tables around the index at `at`; RAM begins at `floor`.
fn read(memory: &mut Look<'_>, at: u64, floor: u64) -> Found {
    let mut index = [0; INDEX];
    if !memory.read_physical(at, &mut index) || !memory.spend(MOST_TOKENS as u64) {
        return Found::Nothing;
    }
    let mut before = |len: u64| {
        let start = at.saturating_sub(len).max(floor);
        let mut bytes = vec![0; (at - start) as usize];
        memory.read_physical(start, &mut bytes).then_some(bytes)
    };
    // First the tokens, with what is before them as far as it fits, then all.
    let near = before(MOST_TOKENS as u64 + 64);
    if near.and_then(|near| tokens(&near, &index)).is_none() {
        return Found::Nothing;
    }
    let tables = before(MOST_BYTES).and_then(|bytes| decode(&bytes, &index, at, memory));
    tables.map_or(Found::Tokens, Found::Tables)
}

/// Where the token table begins in the bytes before the index.
fn tokens(bytes: &[u8], index: &[u8; INDEX]) -> Option<usize> {
    let last = half(index, 255);
    // Behind the last token's NUL there are at most seven bytes up to the index.
    (1..=32usize)
        .map_while(|words| bytes.len().checked_sub((last + 2).next_multiple_of(4) + words * 4 - 4))
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

/// Names, and what is told of them before the token table.
struct Names {
    /// Where they begin and end.
    bytes: Range<usize>,
    count: usize,
    width: usize,
    /// The order of names is behind the markers.
    ordered: bool,
}

impl Names {
    /// Looks before the token table for a number of symbols with that many names behind it, of which the markers agree.
    fn find(bytes: &[u8], names: &SymbolNames<'_>, look: &mut Look<'_>) -> Option<Names> {
        let table = bytes.len();
        [8, 4].into_iter().find_map(|width| {
            (2..table / width).find_map(|back| {
                if back % 1024 == 0 && !look.spend(1024) {
                    return None;
                }
                let start = table - back * width;
                let count = word(bytes, start.checked_sub(width)?)? as usize;
                let fits = (1..=MOST_SYMBOLS).contains(&count) && (width == 4 || word(bytes, start - 4)? == 0);
                if !fits || !names.begin(&bytes[start..], count, look) {
                    return None;
                }
                let (len, ordered) = extent(&bytes[start..], count, width, look)?;
                Some(Names {
                    bytes: start..start + len,
                    count,
                    width,
                    ordered,
                })
            })
        })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// The length of `count` names, if markers follow that agree, and then nothing or the order of names, which is `true`.
fn extent(bytes: &[u8], count: usize, width: usize, look: &mut Look<'_>) -> Option<(usize, bool)> {
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
    let markers = at.next_multiple_of(width);
    // Markers have been words of 32 bits since Linux 5.0, and were as long as pointers before.
    [4, width].into_iter().find_map(|size| {
        let behind = markers + marks.len() * size;
        let agree = bytes
            .get(markers..behind)?
            .chunks_exact(size)
            .zip(&marks)
            .all(|(found, mark)| found[..4] == mark.to_le_bytes() && found[4..].iter().all(|byte| *byte == 0));
        let behind = behind.next_multiple_of(width);
        let ordered = (behind + count * 3).next_multiple_of(width) == bytes.len();
        (agree && (ordered || behind == bytes.len())).then_some((at, ordered))
    })
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
    tokens: &'a [u8],
    index: &'a [u8; INDEX],
}

impl SymbolNames<'_> {
    /// Whether names could begin here: each begins with a letter for what kind of symbol it is.
    fn begin(&self, bytes: &[u8], count: usize, look: &mut Look<'_>) -> bool {
        let mut at = 0;
        look.spend(1)
            && (0..count.min(FIRST_NAMES)).all(|_| {
                let Some((next, coded)) = name_at(bytes, at) else {
                    return false;
                };
                at = next;
                let token = coded.first().map_or(0, |token| half(self.index, usize::from(*token)));
                let kind = self.tokens.get(token);
                kind.is_some_and(|kind| kind.is_ascii_alphabetic() || *kind == b'?')
            })
    }

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

/// Where symbols are.
struct Addresses {
    offsets: Vec<u8>,
    kind: Kind,
}

#[derive(Clone, Copy)]
enum Kind {
    /// From this address on.
    Base(u64),
    /// What is negative is from this address on, downwards, and what is not is an address itself, of per-CPU data
    /// (`CONFIG_KALLSYMS_ABSOLUTE_PERCPU`).
    BaseOrAbsolute(u64),
    /// From each offset's own place on, which is this physical address and 4 for each.
    Place(u64),
    /// Addresses of 32 bits.
    Absolute,
}

impl Addresses {
    /// Before the number of symbols, or behind the token index, which ends at the physical address `behind`.
    fn find(bytes: &[u8], names: &Names, behind: u64, look: &mut Look<'_>) -> Option<Addresses> {
        // Kernels since 6.4 have the order of names last.
        let found = if names.ordered {
            None
        } else {
            Addresses::behind(names, behind, look)
        };
        found.or_else(|| Addresses::before(bytes, names))
    }

    fn base(bytes: &[u8], width: usize) -> Option<u64> {
        let low = u64::from(word(bytes, 0)?);
        match width {
            8 => (word(bytes, 4)? == u32::MAX).then_some(low | 0xffff_ffff << 32),
            // The kernel's part of the addresses begins at 1 GiB or more (CONFIG_PAGE_OFFSET).
            _ => (low >= 1 << 30).then_some(low),
        }
    }

    fn before(bytes: &[u8], names: &Names) -> Option<Addresses> {
        let Names { count, width, .. } = *names;
        let base = names.bytes.start.checked_sub(2 * width)?;
        let offsets = base.checked_sub((count * 4).next_multiple_of(width))?;
        let base = Addresses::base(&bytes[base..], width)?;
        Some(Addresses::relative(&bytes[offsets..offsets + count * 4], base, width))
    }

    fn relative(offsets: &[u8], base: u64, width: usize) -> Addresses {
        let offsets = offsets.to_vec();
        let negative = offsets.chunks_exact(4).filter(|word| word[3] & 0x80 != 0).count();
        let kind = if width == 8 && negative > offsets.len() / 8 {
            Kind::BaseOrAbsolute(base)
        } else {
            Kind::Base(base)
        };
        Addresses { offsets, kind }
    }

    fn behind(names: &Names, at: u64, look: &mut Look<'_>) -> Option<Addresses> {
        let Names { count, width, .. } = *names;
        let end = (count * 4).next_multiple_of(width);
        let bytes = look.bytes(at, (end + width + count * 3) as u64)?;
        let (offsets, rest) = (&bytes[..count * 4], &bytes[end..]);
        look.spend(2 * count as u64).then_some(())?;
        if is_order(&rest[width..], count) {
            return Some(Addresses::relative(offsets, Addresses::base(rest, width)?, width));
        }
        if !is_order(rest, count) {
            return None;
        }
        // A 32-bit kernel that cannot be moved has addresses instead: all in the kernel's part, from 1 GiB on and in the first
        // half GiB of it. No place is that far from another one.
        let absolute = width == 4 && offsets.chunks_exact(4).all(|word| (0x40..0xe0).contains(&word[3]));
        let kind = if absolute { Kind::Absolute } else { Kind::Place(at) };
        let offsets = offsets.to_vec();
        Some(Addresses { offsets, kind })
    }

    fn of(&self, n: usize) -> u64 {
        let offset = word(&self.offsets, n * 4).unwrap_or(0);
        match self.kind {
            Kind::Base(base) => base.wrapping_add(offset.into()),
            Kind::BaseOrAbsolute(base) if (offset as i32) < 0 => {
                base.wrapping_sub(1).wrapping_sub(offset as i32 as i64 as u64)
            }
            Kind::Absolute | Kind::BaseOrAbsolute(_) => offset.into(),
            Kind::Place(at) => at.wrapping_add(n as u64 * 4).wrapping_add(offset as i32 as i64 as u64),
        }
    }
}

/// Whether these are `count` numbers of three bytes, each of those below `count` once.
fn is_order(bytes: &[u8], count: usize) -> bool {
    let mut seen = vec![false; count];
    bytes.len() >= count * 3
        && bytes[..count * 3].chunks_exact(3).all(|word| {
            let n = usize::from(word[0]) << 16 | usize::from(word[1]) << 8 | usize::from(word[2]);
            seen.get_mut(n).is_some_and(|seen| !std::mem::replace(seen, true))
        })
}

/// The symbols of the tables around the index at `at`, before which is `bytes`.
fn decode(bytes: &[u8], index: &[u8; INDEX], at: u64, look: &mut Look<'_>) -> Option<Tables> {
    let table = tokens(bytes, index)?;
    let expand = SymbolNames {
        tokens: &bytes[table..],
        index,
    };
    let found = Names::find(&bytes[..table], &expand, look)?;
    let addresses = Addresses::find(bytes, &found, at + INDEX as u64, look)?;
    let names = &bytes[found.bytes];
    let (mut next, mut name, mut symbols) = (0, Vec::new(), SymbolTable::new());
    let mut room = MOST_NAMES;
    for n in 0..found.count {
        let (behind, coded) = name_at(names, next)?;
        expand.expand(coded, &mut name)?;
        look.spend(32 + name.len() as u64).then_some(())?;
        room = room.checked_sub(name.len())?;
        next = behind;
        let (kind, text) = name.split_first()?;
        symbols.add(addresses.of(n), *kind, std::str::from_utf8(text).ok()?, None);
    }
    let symbols = symbols.sorted();
    let physical = matches!(addresses.kind, Kind::Place(_));
    // Without a base nothing is as long as a pointer, but each kernel has where its own kind of CPU enters it.
    let long = ["startup_64", "entry_SYSCALL_64"]
        .iter()
        .any(|name| symbols.address(name).is_some());
    Some(Tables {
        at,
        width: if physical && long { 8 } else { found.width },
        symbols,
        physical,
    })
}
