use super::*;

fn file(path: &str, build_id: &str) -> MappedFile {
    MappedFile {
        path: path.into(),
        build_id: build_id.into(),
    }
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("minivmm-files-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn put(&self, path: &str, bytes: &[u8]) -> String {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().into()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The C library of this process, and its build ID.
fn library() -> (Vec<u8>, String) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps
        .lines()
        .find(|line| line.contains("/libc.so") || line.contains("/libc-"));
    let bytes = fs::read(line.unwrap().split_ascii_whitespace().nth(5).unwrap()).unwrap();
    let id = ProgramFile::parse(&bytes, "libc").unwrap().build_id.unwrap();
    (bytes, id)
}

// covers: symbols/files
#[test]
fn files_are_found_in_roots_injections_shares_and_by_build_id() {
    let folder = Folder::new("found");
    let (bytes, id) = library();
    let dir = |name: &str| folder.0.join(name).to_str().unwrap().to_string();
    folder.put("root/usr/lib/libc.so.6", &bytes);
    folder.put("in/x/lib", &bytes);
    let share = dir("share");
    folder.put("share/deep/lib", &bytes);
    folder.put(&format!("debug/.build-id/{}/{}/elf", &id[..2], &id[2..]), &bytes);
    let sources = GuestSources {
        initrd: Vec::new(),
        inject: Some(dir("in")),
        shares: vec![share.clone()],
    };
    let mut files = GuestFiles::of(&sources)
        .with_root(&folder.0.join("root"))
        .with_build_ids(&folder.0.join("debug"));
    let other = "00".repeat(20);
    for (path, build_id, found, why) in [
        ("/usr/lib/libc.so.6", &id[..], true, "in the root"),
        ("/usr/lib/libc.so.6", "", true, "in the root, whatever it is"),
        ("/usr/lib/libc.so.6", &other, false, "another one"),
        ("/inject/x/lib", "", true, "injected"),
        ("/deep/lib", "", true, "the root is shared"),
        (
            &format!("{share}/deep/lib"),
            "",
            true,
            "mounted where it is on the host",
        ),
        ("/mnt/deep/lib", &id, true, "mounted somewhere, and surely it"),
        ("/elsewhere/lib", &id, true, "by build ID"),
        ("/elsewhere/lib", "", false, "nowhere"),
        ("/../usr/lib/libc.so.6", &other, false, "a path that leads out"),
        ("relative", &other, false, "no path"),
        ("", "", false, "nothing"),
        ("/elsewhere", "../../../etc", false, "a build ID that is none"),
    ] {
        let program = files.program(&file(path, build_id), 0);
        assert_eq!(program.is_some(), found, "{why}: {path}");
        if let Some(program) = program {
            assert!(program.symbols.address("getppid").is_some(), "{why}");
        }
    }
    assert!(
        files.complaints[0].contains("another libc.so.6"),
        "{:?}",
        files.complaints
    );
}

// covers: symbols/files
#[test]
fn what_is_no_program_is_a_line_and_hostile_files_are_not_waited_for() {
    let folder = Folder::new("bad");
    folder.put("root/bin/text", b"#!/bin/sh\n");
    let (bytes, _) = library();
    folder.put("root/bin/cut", &bytes[..bytes.len() / 2]);
    let fifo = folder.0.join("root/bin/fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let mut files = GuestFiles::default()
        .with_root(&folder.0.join("root"))
        .with_initrd(&folder.0.join("nothing"));
    for path in ["/bin/text", "/bin/fifo", "/bin", "/bin/text/more"] {
        assert!(files.program(&file(path, ""), 0).is_none(), "{path}");
    }
    let _ = files.program(&file("/bin/cut", ""), 0);
    let all = files.complaints.join("\n");
    assert!(
        all.contains("no ELF file") && all.contains("FIFO") && all.contains("nothing"),
        "{all}"
    );
    assert!(files.complaints.iter().all(|line| !line.contains('\n')));
}
