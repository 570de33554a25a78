//! The files of an initial RAM disk: cpio archives ("newc" format), one after the other, plain or compressed by gzip, zstd or xz
//! (Documentation/driver-api/early-userspace/buffer-format.rst of Linux).

use std::{
    collections::HashMap,
    io::{self, Read},
    ops::Range,
    path::Path,
};

use crate::regular;

/// The longest one that is read, packed and unpacked.
const LONGEST: u64 = 1 << 30;
/// Files that are kept.
const MOST: usize = 1 << 20;
const HEADER: usize = 110;
const KIND: u64 = 0o170_000;
const KIND_FILE: u64 = 0o100_000;

/// The files of an archive, by their paths.
#[derive(Debug, Default)]
pub struct Archive {
    /// Each part, unpacked.
    parts: Vec<Vec<u8>>,
    /// Which part, and where in it.
    files: HashMap<String, (usize, Range<usize>)>,
}

impl Archive {
    /// Reads one. A part that is damaged, or of a kind that is not known, ends it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(path: &Path) -> io::Result<Archive> {
        let bytes = regular::read(regular::open(path)?, LONGEST)?;
        let mut archive = Archive::default();
        archive.add(bytes, LONGEST);
        Ok(archive)
    }

    /// The contents of a file, by its path from the root.
    pub fn get(&self, path: &str) -> Option<&[u8]> {
        let (part, range) = self.files.get(path.trim_start_matches('/'))?;
        self.parts.get(*part)?.get(range.clone())
    }

    fn add(&mut self, bytes: Vec<u8>, room: u64) {
        let mut at = 0;
        loop {
            at += bytes[at..].iter().take_while(|byte| **byte == 0).count();
            match &bytes[at..] {
                [b'0', b'7', b'0', b'7', b'0', b'1' | b'2', ..] => match self.newc(&bytes, at) {
                    Some(end) => at = end,
                    None => break,
                },
                [] => break,
                packed => {
                    // What is behind a packed part is packed with it, or none of ours.
                    if let Some(plain) = unpack(packed, room)
                        && self.parts.len() < 16
                    {
                        let left = room - plain.len() as u64;
                        self.parts.push(bytes);
                        return self.add(plain, left);
                    }
                    break;
                }
            }
        }
        self.parts.push(bytes);
    }

    /// Takes the files of an archive that begins there, up to its trailer; gives its end.
    fn newc(&mut self, bytes: &[u8], mut at: usize) -> Option<usize> {
        let part = self.parts.len();
        // Names of files that have their contents at the last of them.
        let mut links: HashMap<[u64; 3], Vec<String>> = HashMap::new();
        loop {
            let header = bytes.get(at..at.checked_add(HEADER)?)?;
            let number = |n: usize| {
                let digits = std::str::from_utf8(&header[6 + n * 8..14 + n * 8]).ok()?;
                u64::from_str_radix(digits, 16).ok()
            };
            let (inode, mode, count) = (number(0)?, number(1)?, number(4)?);
            let (len, name_len) = (usize::try_from(number(6)?).ok()?, usize::try_from(number(11)?).ok()?);
            let name_at = at + HEADER;
            let data = (name_at + name_len).next_multiple_of(4);
            let name = bytes
                .get(name_at..name_at + name_len)?
                .split(|byte| *byte == 0)
                .next()?;
            let end = data + len;
            bytes.get(..end)?;
            at = end.next_multiple_of(4).min(bytes.len());
            if name == b"TRAILER!!!" {
                return Some(at);
            }
            if mode & KIND != KIND_FILE || self.files.len() >= MOST {
                continue;
            }
            let name = String::from_utf8_lossy(name);
            let name = name.trim_start_matches("./").trim_start_matches('/').to_string();
            let key = [number(7)?, number(8)?, inode];
            if count > 1 {
                links.entry(key).or_default().push(name.clone());
                if len == 0 {
                    continue;
                }
                for linked in links.remove(&key).into_iter().flatten() {
                    self.files.insert(linked, (part, data..end));
                }
            }
            self.files.insert(name, (part, data..end));
        }
    }
}

/// The plain bytes of what is packed, as far as there is room for them.
fn unpack(packed: &[u8], room: u64) -> Option<Vec<u8>> {
    let mut plain = Vec::new();
    let read = |mut reader: Box<dyn Read + '_>, plain: &mut Vec<u8>| {
        // What was unpacked before damage is good: each file has its length.
        let _ = reader.by_ref().take(room).read_to_end(plain);
    };
    match packed {
        [0x1f, 0x8b, ..] => {
            let start = gzip_header(packed)?;
            let room = usize::try_from(room).ok()?;
            plain = miniz_oxide::inflate::decompress_to_vec_with_limit(&packed[start..], room).ok()?;
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let reader = ruzstd::decoding::StreamingDecoder::new(packed).ok()?;
            read(Box::new(reader), &mut plain);
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => read(Box::new(lzma_rust2::XzReader::new(packed, true)), &mut plain),
        _ => return None,
    }
    (!plain.is_empty()).then_some(plain)
}

/// The length of a gzip member's header (RFC 1952, 2.3 "Member format").
fn gzip_header(bytes: &[u8]) -> Option<usize> {
    let flags = *bytes.get(3)?;
    let mut at = 10;
    if flags & 1 << 2 != 0 {
        at += 2 + usize::from(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    }
    for flag in [1 << 3, 1 << 4] {
        if flags & flag != 0 {
            at += 1 + bytes.get(at..)?.iter().position(|byte| *byte == 0)?;
        }
    }
    at += if flags & 1 << 1 != 0 { 2 } else { 0 };
    (at <= bytes.len()).then_some(at)
}

#[cfg(test)]
#[path = "archive_test.rs"]
mod tests;
