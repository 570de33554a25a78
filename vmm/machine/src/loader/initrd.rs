//! Is this an initial RAM disk that Linux would take, and is it whole?
//!
//! Linux takes a concatenation of cpio archives ("newc" format), plain or compressed, with zeroes between them
//! (Documentation/driver-api/early-userspace/buffer-format.rst), or the image of a file system. A damaged one shows up in the
//! guest as a panic many seconds later, so we look at the structure first: archives are walked to their trailers, gzip
//! is inflated, the frames of zstd, xz and lz4 are walked. bzip2, lzma and lzo are taken at their first bytes' word.

use miniz_oxide::inflate::{
    TINFLStatus,
    core::{DecompressorOxide, decompress, inflate_flags},
};

use super::image::{Input, LoadError, Module, le16, le32};
use crate::memory::{Memory, NotRam};

/// The header of one file in a newc archive: a magic and 13 numbers of eight hexadecimal digits.
const NEWC_HEADER: usize = 110;
/// The name that ends an archive.
const TRAILER: &[u8] = b"TRAILER!!!\0";

/// Checks a whole initial RAM disk.
pub fn check(bytes: &[u8]) -> Result<(), LoadError> {
    if bytes.is_empty() {
        return Err(LoadError::Empty);
    }
    if is_file_system(bytes) {
        return Ok(());
    }
    let mut at = 0;
    let mut parts = 0;
    loop {
        // Zeroes pad archives, up to whatever alignment their maker liked.
        at += bytes[at..].iter().take_while(|b| **b == 0).count();
        let rest = &bytes[at..];
        if rest.is_empty() {
            break;
        }
        let part = part(rest).map_err(|problem| match problem {
            Problem::Cut(what, need) => LoadError::Truncated {
                what,
                need: (at as u64).saturating_add(need),
                have: bytes.len() as u64,
            },
            Problem::Foreign(text) if parts == 0 => LoadError::ForeignInitrd(text.into()),
            Problem::Foreign(text) => LoadError::ForeignInitrd(format!("from byte {at} on {text}")),
        })?;
        parts += 1;
        match part {
            // Every kind has a magic, so a part has a length and the loop an end.
            Some(len) => at += len,
            None => break,
        }
    }
    if parts == 0 {
        return Err(LoadError::ForeignInitrd("nothing but zeroes".into()));
    }
    Ok(())
}

/// Several archives are one initial RAM disk, each from a multiple of four on; the zeroes between them are skipped. Linux,
/// Documentation/driver-api/early-userspace/buffer-format.rst.
const ARCHIVE_ALIGN: u64 = 4;

/// The length of the initial RAM disk that Linux gets of these parts; `None` where there are none.
pub(super) fn joined_len(parts: &[Module<'_>]) -> Option<u64> {
    let [before @ .., last] = parts else { return None };
    let aligned = |part: &Module<'_>| (part.bytes.len() as u64).next_multiple_of(ARCHIVE_ALIGN);
    Some(before.iter().map(aligned).sum::<u64>() + last.bytes.len() as u64)
}

/// Writes the initial RAM disk of these parts.
pub(super) fn write_joined(memory: &Memory, mut at: u64, parts: &[Module<'_>]) -> Result<(), NotRam> {
    for (n, part) in parts.iter().enumerate() {
        memory.write(at, part.bytes)?;
        at += part.bytes.len() as u64;
        if n + 1 < parts.len() {
            let next = at.next_multiple_of(ARCHIVE_ALIGN);
            memory.zero(at, next - at)?;
            at = next;
        }
    }
    Ok(())
}

/// Checks the parts of an initial RAM disk.
pub(super) fn check_parts(parts: &[Module<'_>]) -> Result<(), (Input, LoadError)> {
    for (n, part) in parts.iter().enumerate() {
        let wrong = |error| (Input::Module(n), error);
        if !part.words.is_empty() {
            let words = String::from_utf8_lossy(part.words).into_owned();
            return Err(wrong(LoadError::ModuleWords(words)));
        }
        check(part.bytes).map_err(wrong)?;
    }
    Ok(())
}

/// What is wrong with all modules together is said of the last of them.
pub(super) fn last_module(modules: &[Module<'_>]) -> Input {
    Input::Module(modules.len().saturating_sub(1))
}

/// What is wrong with a part.
#[derive(Debug)]
enum Problem {
    /// It is cut off; the part's name and where it would end, as far as one can tell, counted from its start.
    Cut(&'static str, u64),
    /// It is not what it should be.
    Foreign(&'static str),
}

/// The length of the archive that `bytes` starts with; `None` for kinds whose end we do not look for.
fn part(bytes: &[u8]) -> Result<Option<usize>, Problem> {
    match bytes {
        [b'0', b'7', b'0', b'7', b'0', b'1' | b'2', ..] => newc(bytes).map(Some),
        [b'0', b'7', b'0', b'7', b'0', b'7', ..] => Err(Problem::Foreign(
            "an old-style cpio archive; make it with `cpio -H newc`",
        )),
        [0x1f, 0x8b, ..] => gzip(bytes).map(Some),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => zstd(bytes).map(Some),
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => xz(bytes).map(Some),
        [0x02, 0x21, 0x4c, 0x18, ..] => lz4_legacy(bytes).map(Some),
        [b'B', b'Z', b'h', ..] | [0x5d, 0, 0, ..] | [0x89, b'L', b'Z', b'O', ..] => Ok(None),
        _ => Err(Problem::Foreign(
            "neither a cpio archive, nor a compressed one, nor a file system that Linux boots from",
        )),
    }
}

/// ext2 to ext4, minix, romfs, cramfs and squashfs, which `root=/dev/ram0` takes as they are.
pub fn is_file_system(bytes: &[u8]) -> bool {
    let minix = matches!(le16(bytes, 0x410), Some(0x137f | 0x138f | 0x2468 | 0x2478));
    let ext = le16(bytes, 0x438) == Some(0xef53);
    let signed = [&b"-rom1fs-"[..], b"hsqs", &[0x45, 0x3d, 0xcd, 0x28]]
        .iter()
        .any(|magic| bytes.starts_with(magic));
    minix || ext || signed
}

/// Walks an archive to its trailer.
fn newc(bytes: &[u8]) -> Result<usize, Problem> {
    const WHAT: &str = "the cpio archive";
    let have = bytes.len() as u64;
    let mut at = 0;
    loop {
        let need = at + NEWC_HEADER as u64;
        let Some(header) = slice(bytes, at, NEWC_HEADER as u64) else {
            return Err(Problem::Cut(WHAT, need));
        };
        if !matches!(&header[..6], b"070701" | b"070702") {
            return Err(Problem::Foreign("a cpio archive with a damaged file header"));
        }
        let number = |n: usize| {
            let digits = &header[6 + n * 8..14 + n * 8];
            // The parser of the standard library would take a sign, too.
            let hex = digits
                .iter()
                .all(u8::is_ascii_hexdigit)
                .then(|| std::str::from_utf8(digits).ok())
                .flatten();
            let number = hex.and_then(|digits| u64::from_str_radix(digits, 16).ok());
            number.ok_or(Problem::Foreign("a cpio archive with a damaged file header"))
        };
        let (file_size, name_size) = (number(6)?, number(11)?);
        let name_at = at + NEWC_HEADER as u64;
        let data_at = (name_at + name_size).next_multiple_of(4);
        let next = (data_at + file_size).next_multiple_of(4);
        let Some(name) = slice(bytes, name_at, name_size) else {
            return Err(Problem::Cut(WHAT, name_at + name_size));
        };
        if name == TRAILER {
            // Less than the padding of a trailer may follow it.
            return Ok(next.min(have) as usize);
        }
        if data_at + file_size > have {
            return Err(Problem::Cut(WHAT, data_at + file_size));
        }
        at = next;
    }
}

/// Inflates a gzip member (RFC 1952) for its length.
fn gzip(bytes: &[u8]) -> Result<usize, Problem> {
    const WHAT: &str = "the gzip stream";
    let cut = || Problem::Cut(WHAT, bytes.len() as u64 + 1);
    let flags = *bytes.get(3).ok_or_else(cut)?;
    let mut at = 10;
    // FEXTRA, FNAME, FCOMMENT, FHCRC, in this order.
    if flags & 1 << 2 != 0 {
        at += 2 + usize::from(le16(bytes, at).ok_or_else(cut)?);
    }
    for flag in [1 << 3, 1 << 4] {
        if flags & flag != 0 {
            at += 1 + bytes
                .get(at..)
                .and_then(|rest| rest.iter().position(|b| *b == 0))
                .ok_or_else(cut)?;
        }
    }
    if flags & 1 << 1 != 0 {
        at += 2;
    }

    // A ring of the 32 KiB that matches may reach back.
    let mut window = vec![0; 1 << 15];
    let (mut inflate, mut out) = (Box::<DecompressorOxide>::default(), 0);
    loop {
        let input = bytes.get(at..).ok_or_else(cut)?;
        let (status, read, written) = decompress(
            &mut inflate,
            input,
            &mut window,
            out,
            inflate_flags::TINFL_FLAG_IGNORE_ADLER32,
        );
        at += read;
        out = (out + written) % window.len();
        match status {
            TINFLStatus::Done => break,
            TINFLStatus::HasMoreOutput => {}
            TINFLStatus::FailedCannotMakeProgress | TINFLStatus::NeedsMoreInput => return Err(cut()),
            _ => return Err(Problem::Foreign("a damaged gzip stream")),
        }
    }
    // CRC-32 and length.
    match at + 8 {
        end if end <= bytes.len() => Ok(end),
        end => Err(Problem::Cut(WHAT, end as u64)),
    }
}

/// Walks the blocks of a zstd frame (RFC 8878, 3.1.1 "Zstandard Frames").
fn zstd(bytes: &[u8]) -> Result<usize, Problem> {
    const WHAT: &str = "the zstd frame";
    let cut = || Problem::Cut(WHAT, bytes.len() as u64 + 1);
    let descriptor = *bytes.get(4).ok_or_else(cut)?;
    let single_segment = descriptor >> 5 & 1 != 0;
    let window = usize::from(!single_segment);
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let content_size = [usize::from(single_segment), 2, 4, 8][usize::from(descriptor >> 6)];
    let mut at = 5 + window + dictionary + content_size;
    loop {
        let header = bytes.get(at..at + 3).ok_or_else(cut)?;
        let header = u32::from_le_bytes([header[0], header[1], header[2], 0]);
        let (last, kind, size) = (header & 1 != 0, header >> 1 & 3, (header >> 3) as usize);
        at += 3 + match kind {
            0 | 2 => size,
            1 => 1,
            _ => return Err(Problem::Foreign("a damaged zstd frame")),
        };
        if at > bytes.len() {
            return Err(Problem::Cut(WHAT, at as u64));
        }
        if last {
            break;
        }
    }
    let checksum = if descriptor >> 2 & 1 != 0 { 4 } else { 0 };
    match at + checksum {
        end if end <= bytes.len() => Ok(end),
        end => Err(Problem::Cut(WHAT, end as u64)),
    }
}

/// Looks for the footer of an xz stream (The .xz File Format 1.1, 2.1.2 "Stream Footer"): it has the header's flags, a CRC-32
/// of its own, and lies at a multiple of four bytes.
fn xz(bytes: &[u8]) -> Result<usize, Problem> {
    const HEADER: usize = 12;
    let cut = || Problem::Cut("the xz stream", bytes.len() as u64 + 1);
    let flags = bytes.get(6..8).ok_or_else(cut)?;
    for start in (HEADER..bytes.len()).step_by(4) {
        let Some(footer) = bytes.get(start..start + 12) else {
            break;
        };
        if footer[10..] == *b"YZ" && footer[8..10] == *flags && le32(footer, 0) == Some(crc32(&footer[4..10])) {
            return Ok(start + 12);
        }
    }
    Err(cut())
}

/// Walks the blocks of the legacy lz4 format, which is the one Linux takes: lengths and blocks up to the end of the file.
fn lz4_legacy(bytes: &[u8]) -> Result<usize, Problem> {
    const WHAT: &str = "the lz4 stream";
    let have = bytes.len() as u64;
    let mut at = 4;
    while at < have {
        let Some(size) = slice(bytes, at, 4).and_then(|s| le32(s, 0)) else {
            return Err(Problem::Cut(WHAT, at + 4));
        };
        match size {
            // Padding, or the next stream.
            0 => break,
            0x184c_2102 => break,
            _ => at += 4 + u64::from(size),
        }
        if at > have {
            return Err(Problem::Cut(WHAT, at));
        }
    }
    Ok(at.min(have) as usize)
}

/// CRC-32 as zlib and xz have it. A dozen bytes at a time, so no table.
fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { 0xedb8_8320 } else { 0 };
        }
    }
    !crc
}

fn slice(bytes: &[u8], at: u64, len: u64) -> Option<&[u8]> {
    bytes.get(usize::try_from(at).ok()?..usize::try_from(at.checked_add(len)?).ok()?)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use miniz_oxide::deflate::compress_to_vec;

    /// One file of a newc archive.
    pub(crate) fn newc(name: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = b"070701".to_vec();
        for number in [1, 0o100644, 0, 0, 1, 0, data.len(), 0, 0, 0, 0, name.len() + 1, 0] {
            bytes.extend(format!("{number:08x}").bytes());
        }
        bytes.extend(name.bytes());
        bytes.push(0);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn archive() -> Vec<u8> {
        [
            newc("init", &[7; 10_001]),
            newc("etc/motd", b"hi"),
            newc("TRAILER!!!", b""),
        ]
        .concat()
    }

    fn gzipped(data: &[u8], flags: u8, extra: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x1f, 0x8b, 8, flags, 0, 0, 0, 0, 0, 3];
        bytes.extend(extra);
        bytes.extend(compress_to_vec(data, 6));
        bytes.extend(crc32(data).to_le_bytes());
        bytes.extend((data.len() as u32).to_le_bytes());
        bytes
    }

    /// A raw block of `len` bytes as the only one of a zstd frame with a checksum.
    fn zstd_frame(len: u32) -> Vec<u8> {
        let mut bytes = vec![0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x50];
        bytes.extend(&(len << 3 | 1).to_le_bytes()[..3]);
        bytes.resize(bytes.len() + len as usize + 4, 0x11);
        bytes
    }

    fn xz_stream(len: usize) -> Vec<u8> {
        let mut bytes = vec![0xfd, b'7', b'z', b'X', b'Z', 0, 0, 4, 1, 2, 3, 4];
        bytes.resize(12 + len, 0x22);
        let tail = [9, 0, 0, 0, 0, 4];
        bytes.extend(crc32(&tail).to_le_bytes());
        bytes.extend(tail);
        bytes.extend(b"YZ");
        bytes
    }

    fn lz4_stream(len: u32) -> Vec<u8> {
        let mut bytes = vec![0x02, 0x21, 0x4c, 0x18];
        bytes.extend(len.to_le_bytes());
        bytes.resize(8 + len as usize, 0x33);
        bytes
    }

    // covers: loader/initrd-formats
    #[test]
    fn what_linux_takes_passes() {
        let ext2 = {
            let mut bytes = vec![0; 4096];
            bytes[0x438..0x43a].copy_from_slice(&[0x53, 0xef]);
            bytes
        };
        let noise: Vec<u8> = (0..200_000u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        for (bytes, what) in [
            (archive(), "an archive"),
            ([archive(), vec![0; 509], archive()].concat(), "two, padded"),
            (gzipped(&archive(), 0, b""), "gzip"),
            (gzipped(&noise, 0, b""), "gzip, longer than its window"),
            (
                gzipped(&archive(), 0x1e, b"\x02\0xxname\0comment\0cr"),
                "gzip with every optional field",
            ),
            (
                [archive(), gzipped(&archive(), 0, b"")].concat(),
                "microcode first, as Debian packs it",
            ),
            (zstd_frame(100), "zstd"),
            (
                [zstd_frame(100), vec![0; 16], zstd_frame(5)].concat(),
                "two zstd frames",
            ),
            (xz_stream(400), "xz"),
            ([xz_stream(400), vec![0; 8], archive()].concat(), "xz and an archive"),
            (lz4_stream(50), "lz4"),
            ([lz4_stream(50), lz4_stream(3)].concat(), "two lz4 streams"),
            (b"BZh91AY and so on".to_vec(), "bzip2"),
            (ext2, "ext2"),
            (b"hsqs and so on".to_vec(), "squashfs"),
        ] {
            assert_eq!(check(&bytes), Ok(()), "{what}");
        }
    }

    // covers: bad-input/truncated-initrd
    #[test]
    fn every_truncation_of_a_walked_format_is_an_error() {
        for (whole, first, what) in [
            (archive(), 6, "cpio"),
            (gzipped(&archive(), 0x08, b"name\0"), 2, "gzip"),
            (zstd_frame(100), 4, "zstd"),
            (xz_stream(100), 6, "xz"),
            (lz4_stream(50), 5, "lz4"),
        ] {
            assert_eq!(check(&whole), Ok(()), "{what}");
            // What may be missing is the padding after the trailer's name.
            let tail = if what == "cpio" { 3 } else { 0 };
            for len in first..whole.len() - tail {
                let error = check(&whole[..len]).unwrap_err();
                assert!(
                    matches!(error, LoadError::Truncated { .. }),
                    "{what} cut at {len}: {error}"
                );
            }
        }
    }

    // covers: bad-input/foreign-initrd
    #[test]
    fn what_linux_does_not_take_is_refused() {
        let mut damaged = archive();
        damaged[200] = b'z';
        damaged[54] = b'+';
        let mut bad_gzip = gzipped(&archive(), 0, b"");
        bad_gzip[10] = 0xff;
        for (bytes, says) in [
            (b"hello, world".to_vec(), "neither a cpio archive"),
            (vec![0; 8192], "nothing but zeroes"),
            (b"070707000000".to_vec(), "-H newc"),
            (b"\x7fELF and so on".to_vec(), "neither a cpio archive"),
            ([archive(), b"junk".to_vec()].concat(), "from byte"),
            (damaged, "damaged file header"),
            (bad_gzip, "damaged gzip"),
        ] {
            let error = check(&bytes).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
        assert_eq!(check(b""), Err(LoadError::Empty));
    }

    #[test]
    fn crc32_is_the_usual_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }
}
