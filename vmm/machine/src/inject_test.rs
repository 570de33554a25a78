use super::*;
use std::os::unix::fs::symlink;

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("minivmm-inject-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, contents: &str, mode: u32) {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, contents).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const LIMIT: u64 = 1 << 20;

fn refusal(folder: &Path, limit: u64) -> String {
    let error = pack(folder, limit).unwrap_err();
    error.to_string()
}

// covers: cli/inject-machine
#[test]
fn a_tree_is_packed_in_the_order_of_its_names() {
    let folder = Folder::new("order");
    folder.file("z", "last", 0o644);
    folder.file("a/b", "inner", 0o600);
    folder.file("run", "#!/bin/sh\n", 0o755);
    symlink("../elsewhere", folder.0.join("link")).unwrap();
    let mut expected = Archive::default();
    expected.folder("inject");
    expected.folder_with(
        "inject/a",
        fs::metadata(folder.0.join("a")).unwrap().permissions().mode() & 0o7777,
    );
    expected.file("inject/a/b", 0o600, b"inner");
    expected.link("inject/link", "../elsewhere");
    expected.file("inject/run", 0o755, b"#!/bin/sh\n");
    expected.file("inject/z", 0o644, b"last");
    let injection = pack(&folder.0, LIMIT).unwrap();
    assert!(injection.archive == expected.finish() && injection.hook.is_none());
    loader::initrd::check(&injection.archive).unwrap();
}

// covers: cli/inject-machine
#[test]
fn an_init_at_the_top_is_run_first() {
    let folder = Folder::new("hook");
    folder.file("init", "#!/bin/sh\nexec /init\n", 0o755);
    let hook = pack(&folder.0, LIMIT).unwrap().hook;
    let with = |words: Option<&str>| {
        let words = hooked(words.map(|w| w.as_bytes().to_vec()), hook);
        String::from_utf8(words.unwrap()).unwrap()
    };
    assert_eq!(with(None), "console=ttyS0 rdinit=/inject/init");
    assert_eq!(with(Some("quiet")), "quiet rdinit=/inject/init");
    assert_eq!(with(Some("quiet rdinit=/bin/sh")), "quiet rdinit=/bin/sh");
    assert_eq!(with(Some("quiet -- single")), "quiet rdinit=/inject/init -- single");
    assert_eq!(hooked(None, None), None);
    folder.file("init", "", 0o644);
    assert!(refusal(&folder.0, LIMIT).contains("init: is not executable"));
}

// covers: bad-input/inject
#[test]
fn what_cannot_be_injected_is_refused() {
    let folder = Folder::new("bad");
    assert!(refusal(&folder.0.join("missing"), LIMIT).contains("missing: no such file"));
    folder.file("file", "0123456789", 0o644);
    assert!(refusal(&folder.0.join("file"), LIMIT).contains("is not a directory"));
    assert!(refusal(&folder.0, 100).contains("does not fit"));
    let _socket = std::os::unix::net::UnixListener::bind(folder.0.join("socket")).unwrap();
    assert!(refusal(&folder.0, LIMIT).contains("socket: is a socket"));
}
