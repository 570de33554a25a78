//! A guest's writes above files that stay as they are, and what is asked of the host.

use std::{
    fs::{self, File},
    path::PathBuf,
};

use devices::virtio::fs::file_system::{
    Caller, Changes, Entry, Errno, FileSystem, New, Node, ROOT, SetTime, Time, kind,
};

use super::{
    super::lower::{Answers, Lower},
    Overlay,
};

/// A folder of a test's own, with `shared` in it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("minivmm-overlay-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("shared/sub")).unwrap();
        Folder(path)
    }

    fn answers(&self) -> Answers {
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        Answers::new(options.open(self.0.join("answers")).unwrap())
    }

    fn overlay(&self, answers: Answers) -> Overlay {
        Overlay::new(Lower::new(&self.0.join("shared"), 0, answers).unwrap(), 1000, false)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const CALLER: Caller = Caller {
    uid: 5,
    gid: 6,
    now: 7_000_000_009,
};

fn node(files: &mut Overlay, folder: Node, name: &[u8]) -> Result<Node, Errno> {
    Ok(files.lookup(folder, name)?.node)
}

fn read(files: &mut Overlay, file: Node) -> Vec<u8> {
    let size = files.attributes(file, None).unwrap().size;
    let mut bytes = vec![0; size as usize + 10];
    let len = files.read(file, 0, 0, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

fn names(files: &mut Overlay, folder: Node, from: u64, most: usize) -> Vec<(String, u64)> {
    let mut names = Vec::new();
    let mut take = |entry: Entry<'_>| {
        if names.len() == most {
            return false;
        }
        names.push((String::from_utf8_lossy(entry.name).into_owned(), entry.next));
        true
    };
    files.list(folder, 0, from, &mut take).unwrap();
    names
}

// covers: share/overlay
#[test]
fn what_is_written_is_above_the_hosts_files_which_stay_as_they_are() {
    let folder = Folder::new("writes");
    let big: Vec<u8> = (0..200_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(folder.0.join("shared/big"), &big).unwrap();
    fs::write(folder.0.join("shared/sub/file"), "text").unwrap();
    let files = &mut folder.overlay(folder.answers());
    let file = node(files, ROOT, b"big").unwrap();
    let mut expected = big.clone();
    for (offset, bytes) in [
        (70_000usize, &b"across"[..]),
        (4094, b"a border"),
        (800_000, b"behind the end"),
    ] {
        files.write(&CALLER, file, 0, offset as u64, bytes).unwrap();
        expected.resize(expected.len().max(offset + bytes.len()), 0);
        expected[offset..offset + bytes.len()].copy_from_slice(bytes);
        assert!(read(files, file) == expected, "{offset}");
    }
    // Shorter and longer again: what was cut off reads zeros.
    for size in [5000, 300_000] {
        let changes = Changes {
            size: Some(size),
            ..Changes::default()
        };
        let attributes = files.change(&CALLER, file, None, &changes).unwrap();
        expected.resize(size as usize, 0);
        let now = Time {
            seconds: 1007,
            nanoseconds: 9,
        };
        assert_eq!((attributes.size, attributes.modified), (size, now));
        assert!(read(files, file) == expected, "{size}");
    }
    assert!(fs::read(folder.0.join("shared/big")).unwrap() == big);

    // Names: made, renamed over another, linked, removed.
    let sub = node(files, ROOT, b"sub").unwrap();
    let made = files.make(&CALLER, sub, b"new", New::File(kind::FILE | 0o640)).unwrap();
    let attributes = made.attributes;
    assert_eq!((attributes.uid, attributes.gid, attributes.mode), (5, 6, 0o100_640));
    files.write(&CALLER, made.node, 0, 0, b"newer").unwrap();
    files.rename(&CALLER, (sub, b"new"), (sub, b"file"), 0).unwrap();
    let file = node(files, sub, b"file").unwrap();
    assert_eq!((file, read(files, file)), (made.node, b"newer".to_vec()));
    assert_eq!(node(files, sub, b"new").unwrap_err(), Errno::NO_ENTRY);
    assert_eq!(files.link(&CALLER, file, ROOT, b"linked").unwrap().attributes.links, 2);
    let full = files.remove(&CALLER, ROOT, b"sub", true);
    assert_eq!(full.unwrap_err(), Errno::NOT_EMPTY);
    files.remove(&CALLER, sub, b"file", false).unwrap();
    files.remove(&CALLER, ROOT, b"sub", true).unwrap();
    let linked = node(files, ROOT, b"linked").unwrap();
    assert_eq!(read(files, linked), b"newer");
    assert_eq!(fs::read(folder.0.join("shared/sub/file")).unwrap(), b"text");
    let set = Changes {
        modified: Some(SetTime::At(Time::default())),
        uid: Some(9),
        ..Changes::default()
    };
    let attributes = files.change(&CALLER, linked, None, &set).unwrap();
    assert_eq!((attributes.uid, attributes.modified), (9, Time::default()));
    // Too much is too much.
    let far = files.write(&CALLER, linked, 0, u64::MAX - 1, b"xx");
    assert_eq!(far.unwrap_err(), Errno::TOO_BIG);
}

// covers: share/overlay
#[test]
fn a_listing_goes_on_where_it_was_whatever_comes_and_goes() {
    let folder = Folder::new("lists");
    for name in ["a", "b", "c"] {
        fs::write(folder.0.join("shared").join(name), "").unwrap();
    }
    let files = &mut folder.overlay(folder.answers());
    let first = names(files, ROOT, 0, 4);
    let only: Vec<_> = first.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(only, [".", "..", "a", "b"]);
    files.remove(&CALLER, ROOT, b"a", false).unwrap();
    files.make(&CALLER, ROOT, b"0", New::Folder(0o755)).unwrap();
    let rest = names(files, ROOT, first[3].1, 10);
    let only: Vec<_> = rest.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(only, ["c", "sub", "0"]);
}

// covers: share/overlay, share/recorded
#[test]
fn going_back_and_replays_see_what_was_seen_whatever_has_become_of_the_files() {
    let folder = Folder::new("back");
    fs::write(folder.0.join("shared/file"), vec![b'x'; 100_000]).unwrap();
    fs::write(folder.0.join("shared/copy"), vec![b'x'; 100_000]).unwrap();
    let answers = folder.answers();
    let look = |files: &mut Overlay| {
        let mut seen = Vec::new();
        for name in [&b"file"[..], b"copy", b"sub"] {
            let found = files.lookup(ROOT, name).unwrap();
            seen.push(format!("{found:?}"));
        }
        for name in [&b"file"[..], b"copy"] {
            let file = node(files, ROOT, name).unwrap();
            seen.push(String::from_utf8(read(files, file)).unwrap());
        }
        seen.push(format!("{:?}", names(files, ROOT, 0, 10)));
        seen
    };
    let mut files = folder.overlay(answers.clone());
    let start = files.upper().save();
    let seen = look(&mut files);
    let print = files.fingerprint();
    // Both files' contents are kept once.
    assert!((100_000..104_000).contains(&answers.size()), "{}", answers.size());
    let file = node(&mut files, ROOT, b"file").unwrap();
    files.write(&CALLER, file, 0, 0, b"later").unwrap();
    assert_ne!(files.fingerprint(), print);
    fs::write(folder.0.join("shared/file"), "changed").unwrap();
    fs::remove_file(folder.0.join("shared/copy")).unwrap();
    files.upper().restore(&start);
    assert!(look(&mut files) == seen);
    assert_eq!(files.fingerprint(), print);

    // In another process, without the files.
    fs::remove_dir_all(folder.0.join("shared")).unwrap();
    let again = Answers::of(File::open(folder.0.join("answers")).unwrap()).unwrap();
    let mut files = folder.overlay(again);
    assert!(look(&mut files) == seen);
    // What was never asked for is an error.
    let sub = node(&mut files, ROOT, b"sub").unwrap();
    assert_eq!(files.lookup(sub, b"any").unwrap_err(), Errno::IO);
}

// covers: bad-input/share-changes, share/recorded
#[test]
fn a_file_that_changes_while_it_is_read_is_the_same_in_a_replay() {
    let folder = Folder::new("changes");
    let path = folder.0.join("shared/file");
    fs::write(&path, vec![b'a'; 200_000]).unwrap();
    let files = &mut folder.overlay(folder.answers());
    let file = node(files, ROOT, b"file").unwrap();
    let piece = |files: &mut Overlay, file: Node, offset: u64| {
        let mut bytes = vec![0xee; 65_536];
        let len = files.read(file, 0, offset, &mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    };
    let first = piece(files, file, 0);
    assert_eq!(first, vec![b'a'; 65_536]);
    // What has been read stays, what has not is as the host has it now; a shorter file has zeroes where the guest was told of more.
    fs::write(&path, vec![b'b'; 100_000]).unwrap();
    let seen: Vec<_> = [0, 65_536, 131_072].map(|offset| piece(files, file, offset)).into();
    assert_eq!(seen[0], first);
    assert!(seen[1].starts_with(&[b'b'; 100_000 - 65_536]));
    assert!(
        seen[1][100_000 - 65_536..]
            .iter()
            .chain(&seen[2])
            .all(|byte| *byte == 0)
    );
    fs::remove_file(&path).unwrap();
    let again = Answers::of(File::open(folder.0.join("answers")).unwrap()).unwrap();
    let files = &mut folder.overlay(again);
    let file = node(files, ROOT, b"file").unwrap();
    assert_eq!(
        [0, 65_536, 131_072].map(|offset| piece(files, file, offset)).to_vec(),
        seen
    );
}

// covers: share/recorded
#[test]
fn a_file_of_answers_that_is_torn_or_damaged_is_no_harm() {
    let folder = Folder::new("torn");
    fs::write(folder.0.join("shared/file"), "text").unwrap();
    let files = &mut folder.overlay(folder.answers());
    let file = node(files, ROOT, b"file").unwrap();
    read(files, file);
    let bytes = fs::read(folder.0.join("answers")).unwrap();
    let path = folder.0.join("other");
    for len in 0..bytes.len() {
        fs::write(&path, &bytes[..len]).unwrap();
        Answers::of(File::open(&path).unwrap()).unwrap();
    }
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0xff;
        fs::write(&path, &damaged).unwrap();
        // It may still be some answers: then they are used as they are.
        if let Ok(answers) = Answers::of(File::open(&path).unwrap()) {
            let files = &mut folder.overlay(answers);
            if let Ok(file) = node(files, ROOT, b"file") {
                // It may be an error, but no panic.
                let _ = files.read(file, 0, 0, &mut [0; 100]);
            }
        }
    }
}
