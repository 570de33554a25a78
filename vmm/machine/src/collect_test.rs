use super::*;
use crate::newc::Archive;
use std::os::unix::fs::symlink;

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("minivmm-collect-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn collector(&self) -> Collector {
        Collector::open(&self.0.join("in"), LIMITS).unwrap()
    }

    fn receive(&self, bytes: &[u8]) {
        self.collector().write_all(bytes).unwrap();
    }

    /// All files below the folder, with their contents.
    fn files(&self) -> Vec<(String, String)> {
        fn walk(root: &Path, at: &Path, found: &mut Vec<(String, String)>) {
            for entry in fs::read_dir(at).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() && !path.is_symlink() {
                    walk(root, &path, found);
                } else {
                    let name = path.strip_prefix(root).unwrap().display().to_string();
                    found.push((name, fs::read_to_string(&path).unwrap_or_default()));
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.0, &self.0, &mut found);
        found.sort();
        found
    }

    fn has(&self, expected: &[(&str, &str)]) {
        let expected: Vec<_> = expected.iter().map(|(n, c)| (n.to_string(), c.to_string())).collect();
        assert_eq!(self.files(), expected);
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn archive(files: &[(&str, &str)]) -> Vec<u8> {
    let mut archive = Archive::default();
    for (name, contents) in files {
        archive.file(name, 0o644, contents.as_bytes());
    }
    archive.finish()
}

/// One entry with all its numbers.
fn entry(magic: &str, inode: u32, mode: u32, links: u32, sum: u32, name: &str, contents: &[u8]) -> Vec<u8> {
    let (size, length) = (contents.len() as u32, name.len() as u32 + 1);
    let fields = [inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, length, sum];
    let mut bytes = magic.as_bytes().to_vec();
    fields
        .iter()
        .for_each(|field| bytes.extend(format!("{field:08x}").bytes()));
    bytes.extend(name.bytes().chain([0]));
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(contents);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

// covers: cli/collect-machine
#[test]
fn an_archive_becomes_files() {
    let folder = Folder::new("files");
    let mut tree = Archive::default();
    tree.folder(".");
    tree.folder_with("sub", 0o500);
    tree.file("sub/empty", 0o644, b"");
    tree.file("./sub/run", 0o4755, b"#!/bin/sh\n");
    tree.file("made/on/the/way", 0o600, b"x");
    let tree = tree.finish();
    let mut collector = folder.collector();
    // Byte by byte, as a serial port sends it, and a second archive behind the first.
    tree.iter().for_each(|byte| collector.write_all(&[*byte]).unwrap());
    collector.write_all(&archive(&[("later", "1")])).unwrap();
    folder.has(&[
        ("in/later", "1"),
        ("in/made/on/the/way", "x"),
        ("in/sub/empty", ""),
        ("in/sub/run", "#!/bin/sh\n"),
    ]);
    let mode = |name: &str| fs::metadata(folder.0.join(name)).unwrap().permissions().mode() & 0o7777;
    assert_eq!(
        (mode("in/sub/run"), mode("in/made/on/the/way"), mode("in/sub")),
        (0o755, 0o600, 0o700)
    );
}

// covers: cli/collect-machine
#[test]
fn names_that_share_their_contents_get_them() {
    let folder = Folder::new("links");
    let mut bytes = entry("070701", 5, 0o100644, 3, 0, "a", b"");
    bytes.extend(entry("070701", 5, 0o100644, 3, 0, "b", b""));
    bytes.extend(entry("070701", 5, 0o100644, 3, 0, "c", b"shared"));
    bytes.extend(entry("070702", 6, 0o100644, 1, 3 * 0x61, "summed", b"aaa"));
    bytes.extend(entry("070702", 7, 0o100644, 1, 0, "wrong", b"aaa"));
    folder.receive(&bytes);
    folder.has(&[
        ("in/a", "shared"),
        ("in/b", "shared"),
        ("in/c", "shared"),
        ("in/summed", "aaa"),
    ]);
}

// covers: bad-input/collect-escape
#[test]
fn nothing_reaches_beyond_the_folder() {
    let folder = Folder::new("escape");
    fs::create_dir(folder.0.join("in")).unwrap();
    fs::create_dir(folder.0.join("outside")).unwrap();
    symlink("../outside", folder.0.join("in/link")).unwrap();
    symlink("../outside/new", folder.0.join("in/dangling")).unwrap();
    let mut bytes = archive(&[
        ("../up", "1"),
        ("a/../../up", "1"),
        ("/absolute", "1"),
        ("link/inside", "1"),
        ("link", "1"),
        ("dangling", "1"),
        ("..", "1"),
        ("", "1"),
        (".", "1"),
        ("a/", "1"),
        ("good", "2"),
    ]);
    let mut more = Archive::default();
    more.link("made-link", "../outside");
    more.file("made-link/inside", 0o644, b"3");
    more.device("device", 1, 3);
    more.folder("link");
    more.folder("good");
    bytes.extend(more.finish());
    bytes.extend(entry("070701", 1, 0o100644, 1, 0, "nul\0inside", b"4"));
    folder.receive(&bytes);
    // What "made-link" names is a plain folder here, since no link was made. "a/" is a file called "a".
    folder.has(&[
        ("in/a", "1"),
        ("in/dangling", ""),
        ("in/good", "2"),
        ("in/link", ""),
        ("in/made-link/inside", "3"),
    ]);
    assert!(folder.0.join("in/link").is_symlink() && folder.0.join("in/dangling").is_symlink());
}

// covers: cli/collect-machine
#[test]
fn a_file_of_the_hosts_is_never_replaced() {
    let folder = Folder::new("replace");
    fs::create_dir(folder.0.join("in")).unwrap();
    fs::write(folder.0.join("in/mine"), "precious").unwrap();
    let mut collector = folder.collector();
    collector
        .write_all(&archive(&[("mine", "1"), ("mine/below", "2"), ("theirs", "3")]))
        .unwrap();
    collector.write_all(&archive(&[("theirs", "4")])).unwrap();
    // Not even one that came between its header and its end.
    let late = archive(&[("late", "5555")]);
    let (front, back) = late.split_at(118);
    collector.write_all(front).unwrap();
    fs::write(folder.0.join("in/late"), "precious").unwrap();
    collector.write_all(back).unwrap();
    drop(collector);
    folder.has(&[("in/late", "precious"), ("in/mine", "precious"), ("in/theirs", "4")]);
    folder.receive(&archive(&[("theirs", "of another run")]));
    folder.has(&[("in/late", "precious"), ("in/mine", "precious"), ("in/theirs", "4")]);
}

// covers: cli/collect-machine
#[test]
fn a_stream_that_ends_early_leaves_what_was_whole() {
    let whole = archive(&[("first", "1111"), ("second", "2222")]);
    for cut in 0..whole.len() {
        let folder = Folder::new("cut");
        folder.receive(&whole[..cut]);
        let files = folder.files();
        // A header with its name is 116 or 120 bytes here, the contents are 4.
        let expected = usize::from(cut >= 120) + usize::from(cut >= 120 + 124);
        assert_eq!(files.len(), expected, "{cut}: {files:?}");
        assert!(
            files.iter().all(|(_, contents)| contents.len() == 4),
            "{cut}: {files:?}"
        );
    }
}

// covers: bad-input/collect-flood
#[test]
fn a_flood_is_bounded() {
    let folder = Folder::new("flood");
    let limits = Limits { bytes: 10, entries: 4 };
    let receive = |name: &str, bytes: &[u8]| {
        let path = folder.0.join(name);
        Collector::open(&path, limits).unwrap().write_all(bytes).unwrap();
        fs::read_dir(path).unwrap().count()
    };
    assert_eq!(
        receive("bytes", &archive(&[("a", "12345"), ("b", "123456"), ("c", "1")])),
        1
    );
    assert_eq!(
        receive(
            "entries",
            &archive(&[("a", ""), ("b", ""), ("c", ""), ("d", ""), ("e", "")])
        ),
        4
    );
    assert_eq!(receive("folders", &archive(&[("a/b/c/d/e/f/g", "")])), 1);
    // Noise of any length, and a header that promises 4 GiB.
    assert_eq!(receive("noise", &[b'x'; 100_000]), 0);
    let mut huge = entry("070701", 1, 0o100644, 1, 0, "huge", b"");
    huge[6 + 6 * 8..14 + 6 * 8].copy_from_slice(b"ffffffff");
    assert_eq!(receive("huge", &huge), 0);
}

// covers: bad-input/collect-damaged
#[test]
fn after_damage_the_next_archive_counts() {
    let good = archive(&[("good", "1")]);
    let names: [fn(&mut Vec<u8>); 5] = [
        |b| b[10] = b'x',
        |b| b[5] = b'7',
        |b| b[6 + 11 * 8..14 + 11 * 8].copy_from_slice(b"00000000"),
        |b| b[6 + 11 * 8..14 + 11 * 8].copy_from_slice(b"ffffffff"),
        |b| b[110 + 3] = b'y',
    ];
    for damage in names {
        let folder = Folder::new("damage");
        let mut bad = archive(&[("bad", "1")]);
        damage(&mut bad);
        let mut collector = folder.collector();
        collector.write_all(&bad).unwrap();
        collector.write_all(&good).unwrap();
        drop(collector);
        folder.has(&[("in/good", "1")]);
    }
    // Line feeds that a terminal has expanded.
    let folder = Folder::new("damage");
    let text = archive(&[("text", "a\nb\nc\n"), ("more", "x")]);
    let expanded: Vec<u8> = text
        .iter()
        .flat_map(|b| if *b == b'\n' { vec![13, 10] } else { vec![*b] })
        .collect();
    folder.receive(&expanded);
    assert!(folder.files().iter().all(|(name, _)| name == "in/text"));
}

// covers: bad-input/collect-folder
#[test]
fn a_folder_that_cannot_be_used_is_refused() {
    let folder = Folder::new("open");
    fs::write(folder.0.join("file"), "").unwrap();
    let open = |name: &str| Collector::open(&folder.0.join(name), LIMITS).unwrap_err();
    for (name, says) in [("file", "is not a directory"), ("no/such", "No such file")] {
        let error = open(name);
        assert!(error.to_string().contains(says), "{error}");
    }
    assert!(folder.0.join("file").is_file());
    Collector::open(&folder.0.join("new"), LIMITS).unwrap();
    assert!(folder.0.join("new").is_dir());
}
