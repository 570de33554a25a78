//! What a shared folder lets a guest do, without a guest: the calls are those that Linux's driver makes.

use std::{
    fs,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, symlink},
    },
    path::{Path, PathBuf},
};

use devices::virtio::fs::file_system::{Caller, Changes, Entry, Errno, FileSystem, New, ROOT, kind};

use super::{Host, ShareMode};

/// A folder of a test's own, with `shared` in it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("minivmm-share-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("shared")).unwrap();
        fs::write(path.join("secret"), "secret").unwrap();
        Folder(path)
    }

    fn shared(&self) -> PathBuf {
        self.0.join("shared")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const CALLER: Caller = Caller { uid: 0, gid: 0, now: 0 };

fn names(host: &mut Host, node: u64) -> Vec<Vec<u8>> {
    let handle = host.open_folder(node).unwrap();
    let mut names = Vec::new();
    let mut take = |entry: Entry<'_>| {
        names.push(entry.name.to_vec());
        true
    };
    host.list(node, handle, 0, &mut take).unwrap();
    host.close_folder(handle);
    names
}

fn read(host: &mut Host, node: u64) -> Result<Vec<u8>, Errno> {
    let handle = match host.open(node, 0) {
        Ok(opened) => opened.handle,
        Err(Errno::NOT_IMPLEMENTED) => 0,
        Err(error) => return Err(error),
    };
    let mut bytes = vec![0; 1 << 16];
    let len = host.read(node, handle, 0, &mut bytes)?;
    bytes.truncate(len);
    Ok(bytes)
}

fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

// covers: share/confined
#[test]
fn nothing_leads_out_of_the_folder() {
    let folder = Folder::new("confined");
    symlink("../secret", folder.shared().join("out")).unwrap();
    symlink("..", folder.shared().join("up")).unwrap();
    fs::create_dir(folder.shared().join("sub")).unwrap();
    let mut host = Host::open(&folder.shared(), ShareMode::ReadWrite).unwrap();
    let link = host.lookup(ROOT, b"out").unwrap();
    // Links are the guest's to follow.
    assert_eq!(link.attributes.mode & kind::MASK, kind::LINK);
    assert_eq!(host.target(link.node).unwrap(), b"../secret");
    assert!(host.open(link.node, 0).is_err());
    let up = host.lookup(ROOT, b"up").unwrap();
    assert_eq!(host.lookup(up.node, b"secret").unwrap_err(), Errno::NOT_A_FOLDER);
    assert!(host.make(&CALLER, up.node, b"made", New::Folder(0o755)).is_err());

    // What was a folder as the guest looked is a link when it is used: the host has changed it, or another guest that shares it.
    let sub = host.lookup(ROOT, b"sub").unwrap();
    fs::remove_dir(folder.shared().join("sub")).unwrap();
    symlink("..", folder.shared().join("sub")).unwrap();
    assert!(host.lookup(sub.node, b"secret").is_err());
    assert!(host.create(&CALLER, sub.node, b"made", 0o644).is_err());
    assert!(host.remove(&CALLER, sub.node, b"secret", false).is_err());
    assert!(exists(&folder.0.join("secret")) && !exists(&folder.0.join("made")));
}

// covers: share/stale
#[test]
fn what_the_host_has_replaced_is_stale_and_found_anew() {
    let folder = Folder::new("stale");
    let path = folder.shared().join("file");
    fs::write(&path, "old").unwrap();
    let mut host = Host::open(&folder.shared(), ShareMode::ReadWrite).unwrap();
    let old = host.lookup(ROOT, b"file").unwrap();
    // The old file lives on under another name, so that the new one has another inode.
    fs::hard_link(&path, folder.0.join("kept")).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, "newer").unwrap();
    assert_eq!(host.open(old.node, 0).unwrap_err(), Errno::STALE);
    assert_eq!(host.attributes(old.node, None).unwrap_err(), Errno::STALE);
    let new = host.lookup(ROOT, b"file").unwrap();
    assert_ne!(new.node, old.node);
    assert_eq!(read(&mut host, new.node).unwrap(), b"newer");
    // The folder vanishes altogether.
    fs::remove_dir_all(folder.shared()).unwrap();
    assert!(host.lookup(ROOT, b"file").is_err());
    assert!(names(&mut host, ROOT).len() <= 2);
}

// covers: share/read-only
#[test]
fn a_folder_that_is_shared_for_reading_stays_as_it_is() {
    let folder = Folder::new("read-only");
    let path = folder.shared().join("file");
    fs::write(&path, "text").unwrap();
    let mut host = Host::open(&folder.shared(), ShareMode::ReadOnly).unwrap();
    let file = host.lookup(ROOT, b"file").unwrap().node;
    assert_eq!(read(&mut host, file).unwrap(), b"text");
    let changes = Changes {
        size: Some(0),
        mode: Some(0),
        ..Changes::default()
    };
    let refused = [
        host.change(&CALLER, file, None, &changes).err(),
        host.make(&CALLER, ROOT, b"new", New::File(kind::FILE | 0o644)).err(),
        host.make(&CALLER, ROOT, b"new", New::Folder(0o755)).err(),
        host.make(&CALLER, ROOT, b"new", New::Link(b"file")).err(),
        host.create(&CALLER, ROOT, b"new", 0o644).err(),
        host.remove(&CALLER, ROOT, b"file", false).err(),
        host.rename(&CALLER, (ROOT, b"file"), (ROOT, b"new"), 0).err(),
        host.link(&CALLER, file, ROOT, b"new").err(),
        host.write(&CALLER, file, 0, 0, b"x").err(),
        host.allocate(&CALLER, file, 0, 0, (0, 1)).err(),
    ];
    assert_eq!(refused, [Some(Errno::READ_ONLY); 10]);
    assert_eq!(names(&mut host, ROOT), [&b"."[..], b"..", b"file"]);
    assert_eq!(fs::read(&path).unwrap(), b"text");
}

// covers: share/owners
#[test]
fn what_the_guest_makes_is_this_users_without_set_id_bits_and_no_device() {
    let folder = Folder::new("owners");
    let mut host = Host::open(&folder.shared(), ShareMode::ReadWrite).unwrap();
    let other = Caller {
        uid: 4711,
        gid: 4711,
        now: 0,
    };
    let (made, opened) = host.create(&other, ROOT, b"program", 0o4777).unwrap();
    host.write(&other, made.node, opened.handle, 0, b"text").unwrap();
    let path = folder.shared().join("program");
    let found = path.metadata().unwrap();
    let us = folder.shared().metadata().unwrap().uid();
    assert_eq!((found.uid(), found.permissions().mode() & 0o7777), (us, 0o777));
    let set_id = Changes {
        mode: Some(0o6755),
        ..Changes::default()
    };
    let attributes = host.change(&other, made.node, None, &set_id).unwrap();
    assert_eq!(attributes.mode & 0o7777, 0o755);
    let given_away = Changes {
        uid: Some(us + 1),
        ..Changes::default()
    };
    let error = host.change(&other, made.node, None, &given_away).unwrap_err();
    assert_eq!(error, Errno::NOT_PERMITTED);
    for device in [0o020_644, 0o060_644] {
        let made = host.make(&other, ROOT, b"device", New::File(device));
        assert_eq!(made.unwrap_err(), Errno::NOT_PERMITTED);
    }
    assert!(!exists(&folder.shared().join("device")));
}

// covers: share/special-files
#[test]
fn special_files_of_the_host_are_not_opened() {
    let folder = Folder::new("special");
    let mut host = Host::open(&folder.shared(), ShareMode::ReadWrite).unwrap();
    let fifo = host
        .make(&CALLER, ROOT, b"fifo", New::File(kind::FIFO | 0o644))
        .unwrap();
    // To open it would wait for a writer for ever.
    assert_eq!(host.open(fifo.node, 0).unwrap_err(), Errno::INVALID);
    // Device nodes are not there.
    let mut dev = Host::open(Path::new("/dev"), ShareMode::ReadOnly).unwrap();
    assert_eq!(dev.lookup(ROOT, b"null").unwrap_err(), Errno::NO_ENTRY);
    assert!(!names(&mut dev, ROOT).contains(&b"null".to_vec()));
    // Nor are the files that the kernel makes for this process.
    let mut root = Host::open(Path::new("/"), ShareMode::ReadOnly).unwrap();
    let proc = root.lookup(ROOT, b"proc").unwrap().node;
    assert_eq!(root.lookup(proc, b"self").unwrap_err(), Errno::NO_ENTRY);
    assert_eq!(names(&mut root, proc), [&b"."[..], b".."]);
    let mut proc = Host::open(Path::new("/proc"), ShareMode::ReadOnly).unwrap();
    assert_eq!(proc.lookup(ROOT, b"self").unwrap_err(), Errno::NO_ENTRY);
}

// covers: share/names
#[test]
fn names_are_bytes_and_come_in_one_order() {
    let folder = Folder::new("names");
    for name in [&b"b"[..], b"\xff\xfe", b"a b", b"A"] {
        fs::write(folder.shared().join(std::ffi::OsStr::from_bytes(name)), "").unwrap();
    }
    let mut host = Host::open(&folder.shared(), ShareMode::ReadOnly).unwrap();
    assert_eq!(
        names(&mut host, ROOT),
        [&b"."[..], b"..", b"A", b"a b", b"b", b"\xff\xfe"]
    );
    assert!(host.lookup(ROOT, b"\xff\xfe").is_ok());
}

// covers: share/removed
#[test]
fn a_file_that_is_removed_while_it_is_open_stays_until_it_is_forgotten() {
    let folder = Folder::new("removed");
    let mut host = Host::open(&folder.shared(), ShareMode::ReadWrite).unwrap();
    let (made, opened) = host.create(&CALLER, ROOT, b"file", 0o400).unwrap();
    host.write(&CALLER, made.node, opened.handle, 0, b"one").unwrap();
    host.remove(&CALLER, ROOT, b"file", false).unwrap();
    host.write(&CALLER, made.node, opened.handle, 3, b"two").unwrap();
    assert_eq!(host.attributes(made.node, None).unwrap().size, 6);
    assert_eq!(host.attributes(made.node, Some(opened.handle)).unwrap().links, 0);
    let mut bytes = [0; 9];
    assert_eq!(host.read(made.node, opened.handle, 0, &mut bytes).unwrap(), 6);
    assert_eq!(&bytes[..6], b"onetwo");
    host.close(opened.handle);
    host.forget(made.node, 1);
    assert_eq!(host.attributes(made.node, None).unwrap_err(), Errno::STALE);
}

// covers: share/renamed
#[test]
fn nodes_keep_their_numbers_over_renames_and_links() {
    let folder = Folder::new("renamed");
    let mut host = Host::open(&folder.shared(), ShareMode::ReadWrite).unwrap();
    let sub = host.make(&CALLER, ROOT, b"sub", New::Folder(0o755)).unwrap().node;
    let (made, _) = host.create(&CALLER, sub, b"file", 0o644).unwrap();
    host.rename(&CALLER, (ROOT, b"sub"), (ROOT, b"moved"), 0).unwrap();
    // By its folder, which is called otherwise now.
    assert_eq!(host.attributes(made.node, None).unwrap().ino, made.attributes.ino);
    let linked = host.link(&CALLER, made.node, ROOT, b"other").unwrap();
    assert_eq!((linked.node, linked.attributes.links), (made.node, 2));
    host.remove(&CALLER, sub, b"file", false).unwrap();
    assert_eq!(host.lookup(ROOT, b"other").unwrap().node, made.node);
    host.make(&CALLER, ROOT, b"first", New::Folder(0o755)).unwrap();
    const EXCHANGE: u32 = 2;
    host.rename(&CALLER, (ROOT, b"first"), (ROOT, b"moved"), EXCHANGE)
        .unwrap();
    assert_eq!(host.lookup(ROOT, b"first").unwrap().node, sub);
    const WHITEOUT: u32 = 4;
    let error = host.rename(&CALLER, (ROOT, b"first"), (ROOT, b"moved"), WHITEOUT);
    assert_eq!(error.unwrap_err(), Errno::INVALID);
}

// covers: bad-input/share-changes
#[test]
fn a_file_that_changes_while_it_is_read_is_read_as_far_as_it_is_there() {
    let folder = Folder::new("changes");
    let path = folder.shared().join("file");
    fs::write(&path, vec![b'a'; 100_000]).unwrap();
    let mut host = Host::open(&folder.shared(), ShareMode::ReadWrite).unwrap();
    let file = host.lookup(ROOT, b"file").unwrap().node;
    let handle = match host.open(file, 0) {
        Ok(opened) => opened.handle,
        Err(error) => {
            assert_eq!(error, Errno::NOT_IMPLEMENTED);
            0
        }
    };
    let mut piece = |offset: u64| {
        let mut bytes = vec![0xee; 50_000];
        let len = host.read(file, handle, offset, &mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    };
    assert_eq!(piece(0), vec![b'a'; 50_000]);
    // Cut short in the middle of a reader, and grown again with something else.
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(60_000)
        .unwrap();
    assert_eq!(piece(50_000), vec![b'a'; 10_000]);
    assert_eq!(piece(100_000), b"");
    fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    assert_eq!(piece(0), b"");
    fs::write(&path, vec![b'b'; 70_000]).unwrap();
    assert_eq!(piece(40_000), vec![b'b'; 30_000]);
}

// covers: bad-input/share-many
#[test]
fn a_folder_of_very_many_files_is_listed_once_and_leaves_no_descriptors_open() {
    // A million take a minute to make.
    let count = match std::env::var_os("MINIVMM_FULL") {
        Some(_) => 1_000_000,
        None => 20_000,
    };
    let folder = Folder::new("many");
    for number in 0..count {
        fs::File::create(folder.shared().join(format!("file{number}"))).unwrap();
    }
    let mut host = Host::open(&folder.shared(), ShareMode::ReadOnly).unwrap();
    let handle = host.open_folder(ROOT).unwrap();
    // The guest's kernel takes some hundred names at once, and asks for what comes behind them.
    let (mut listed, mut offset) = (0u32, 0);
    loop {
        let (mut taken, from) = (0, offset);
        let mut take = |entry: Entry<'_>| {
            offset = entry.next;
            taken += 1;
            taken < 200
        };
        host.list(ROOT, handle, from, &mut take).unwrap();
        if taken == 0 {
            break;
        }
        listed += taken;
    }
    host.close_folder(handle);
    assert!((count..=count + 2).contains(&listed), "{listed}");
    let open = || fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for number in 0..count {
        let file = host.lookup(ROOT, format!("file{number}").as_bytes()).unwrap().node;
        assert_eq!(read(&mut host, file).unwrap(), b"");
    }
    // Of the files that the guest knows some are kept open, and it forgets all of them.
    let (limit, after) = (rustix::process::getrlimit(rustix::process::Resource::Nofile), open());
    assert!(
        limit.current.is_none_or(|limit| ((after - before) as u64) < limit / 2),
        "{before} {after} {limit:?}"
    );
    host.reset();
    assert!(open() <= before + 64, "{before} {}", open());
}
