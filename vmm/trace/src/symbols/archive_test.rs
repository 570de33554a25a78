use super::*;

/// A file of an archive: its inode, its links, its name, its contents.
fn file(inode: u32, links: u32, name: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"070701".to_vec();
    let numbers = [
        inode,
        0o100_755,
        0,
        0,
        links,
        0,
        data.len() as u32,
        0,
        0,
        0,
        0,
        name.len() as u32 + 1,
        0,
    ];
    for number in numbers {
        bytes.extend(format!("{number:08x}").bytes());
    }
    bytes.extend(name.bytes());
    bytes.push(0);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn read(bytes: Vec<u8>) -> Archive {
    let mut archive = Archive::default();
    archive.add(bytes, LONGEST);
    archive
}

fn two() -> Vec<u8> {
    let first = [file(1, 1, "./bin/one", b"1"), file(0, 1, "TRAILER!!!", b"")].concat();
    let second = [
        file(2, 2, "usr/lib/a", b""),
        file(2, 2, "usr/lib/b", b"both"),
        file(3, 1, "bin/one", b"later"),
        file(0, 1, "TRAILER!!!", b""),
    ]
    .concat();
    [first, vec![0; 512], second].concat()
}

// covers: symbols/files
#[test]
fn files_of_archives_one_behind_the_other_and_their_links() {
    let archive = read(two());
    assert_eq!(
        archive.get("/bin/one"),
        Some(&b"later"[..]),
        "the last one holds, as in Linux"
    );
    assert_eq!(archive.get("/usr/lib/a"), Some(&b"both"[..]));
    assert_eq!(archive.get("usr/lib/b"), Some(&b"both"[..]));
    assert_eq!(archive.get("/usr/lib/c"), None);
}

// covers: symbols/files
#[test]
fn packed_archives_behind_plain_ones() {
    let plain = [file(9, 1, "kernel/x86/microcode", b"m"), file(0, 1, "TRAILER!!!", b"")].concat();
    let deflated = miniz_oxide::deflate::compress_to_vec(&two(), 6);
    let mut gzip = vec![0x1f, 0x8b, 8, 1 << 3, 0, 0, 0, 0, 0, 3];
    gzip.extend(b"name\0");
    gzip.extend(deflated);
    let zstd = ruzstd::encoding::compress_to_vec(&two()[..], ruzstd::encoding::CompressionLevel::Fastest);
    for packed in [gzip, zstd] {
        let archive = read([plain.clone(), packed].concat());
        assert_eq!(archive.get("kernel/x86/microcode"), Some(&b"m"[..]));
        assert_eq!(archive.get("usr/lib/b"), Some(&b"both"[..]));
    }
}

// covers: symbols/files
#[test]
fn damaged_archives_end_where_they_are_damaged() {
    let whole = two();
    for len in 0..whole.len() {
        let archive = read(whole[..len].to_vec());
        if let Some(found) = archive.get("usr/lib/b") {
            assert_eq!(found, b"both");
        }
    }
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        read(bytes);
    }
    // Lengths of all ones.
    let mut bytes = whole;
    bytes[6 + 6 * 8..14 + 6 * 8].fill(b'f');
    assert!(read(bytes).files.is_empty());
}
