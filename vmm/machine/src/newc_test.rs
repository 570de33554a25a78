use super::*;

/// Name, mode, device, contents.
type Entry = (String, u32, (u32, u32), Vec<u8>);

/// Reads an archive back by the format's description.
fn read(bytes: &[u8]) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut at = 0;
    loop {
        assert_eq!(&bytes[at..at + 6], b"070701");
        let field = |index: usize| {
            let start = at + 6 + index * 8;
            u32::from_str_radix(std::str::from_utf8(&bytes[start..start + 8]).unwrap(), 16).unwrap()
        };
        let (size, name) = (field(6) as usize, field(11) as usize);
        let text = &bytes[at + 110..at + 110 + name];
        assert_eq!(text.last(), Some(&0));
        let path = String::from_utf8(text[..name - 1].to_vec()).unwrap();
        let start = (at + 110 + name).next_multiple_of(4);
        if path == "TRAILER!!!" {
            assert!(bytes[start..].iter().all(|byte| *byte == 0));
            return entries;
        }
        entries.push((
            path,
            field(1),
            (field(9), field(10)),
            bytes[start..start + size].to_vec(),
        ));
        at = (start + size).next_multiple_of(4);
    }
}

fn sample() -> Archive {
    let mut archive = Archive::default();
    archive.folder("dev");
    archive.device("dev/console", 5, 1);
    archive.file("init", 0o755, b"#!/bin/sh\n");
    archive.link("bin", "usr/bin");
    archive.file("empty", 0o644, b"");
    archive
}

// covers: suite/demo
#[test]
fn entries_come_back_as_they_went_in() {
    let bytes = sample().finish();
    assert_eq!(bytes.len() % 512, 0);
    let expected = [
        ("dev", 0o40755, (0, 0), &b""[..]),
        ("dev/console", 0o20600, (5, 1), b""),
        ("init", 0o100755, (0, 0), b"#!/bin/sh\n"),
        ("bin", 0o120777, (0, 0), b"usr/bin"),
        ("empty", 0o100644, (0, 0), b""),
    ];
    let expected = expected.map(|(path, mode, device, data)| (path.to_string(), mode, device, data.to_vec()));
    assert_eq!(read(&bytes), expected);
}

#[test]
fn a_header_is_what_the_format_says() {
    let mut archive = Archive::default();
    archive.file("a", 0o644, b"xyz");
    let text = String::from_utf8(archive.finish()).unwrap();
    let expected = concat!(
        "070701",
        "00000001000081A4000000000000000000000001000000000000000300000000000000000000000000000000",
        "0000000200000000a\0xyz\0070701"
    );
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn the_same_contents_give_the_same_bytes() {
    assert_eq!(sample().finish(), sample().finish());
}
