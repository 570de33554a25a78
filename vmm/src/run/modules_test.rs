//! Modules as distributions pack them.

use std::{fs, path::PathBuf};

use super::{ModuleError, Modules};

/// A folder of modules of a test's own.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("minivmm-modules-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("kernel/fs/deep")).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, bytes: &[u8]) {
        fs::write(self.0.join("kernel/fs").join(name), bytes).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn module(text: &str, depends: &str) -> Vec<u8> {
    format!("\x7fELF{text}\0license=GPL\0depends={depends}\0retpoline=Y\0").into_bytes()
}

/// What `sign-file` of the kernel puts behind a module.
fn signed(module: &[u8]) -> Vec<u8> {
    let mut bytes = module.to_vec();
    bytes.extend([0x30; 300]);
    bytes.extend([0, 0, 2, 0, 0, 0, 0, 0]);
    bytes.extend(300u32.to_be_bytes());
    bytes.extend(b"~Module signature appended~\n");
    bytes
}

fn packed(program: &str, bytes: &[u8]) -> Vec<u8> {
    use std::{
        io::Write,
        process::{Command, Stdio},
    };
    let command = Command::new(program)
        .arg("-c")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = command.unwrap_or_else(|e| panic!("{program}: {e}"));
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    child.wait_with_output().unwrap().stdout
}

// covers: run/modules
#[test]
fn modules_come_after_those_that_they_need_unpacked_and_without_signatures() {
    let folder = Folder::new("order");
    let parts = [
        module("virtio_fs", "fuse,virtio-ring"),
        module("fuse", ""),
        module("virtio_ring", "base"),
    ];
    folder.file("virtiofs.ko", &signed(&parts[0]));
    folder.file("fuse.ko.xz", &packed("xz", &signed(&parts[1])));
    folder.file("deep/virtio-ring.ko.gz", &packed("gzip", &parts[2]));
    fs::write(
        folder.0.join("modules.builtin"),
        "kernel/lib/base.ko\nkernel/fs/over-lay.ko\n",
    )
    .unwrap();
    let modules = Modules::of(&folder.0).unwrap();
    let loaded = modules
        .load(&[("over_lay", "CONFIG_OVER_LAY"), ("virtiofs", "CONFIG_VIRTIO_FS")])
        .unwrap();
    let names: Vec<_> = loaded.iter().map(|module| module.name.as_str()).collect();
    assert_eq!(names, ["fuse", "virtio_ring", "virtiofs"]);
    assert!(loaded[0].bytes == parts[1] && loaded[1].bytes == parts[2] && loaded[2].bytes == parts[0]);

    let missing = modules.load(&[("other", "CONFIG_OTHER")]).unwrap_err();
    assert!(
        missing.to_string().ends_with("it takes a kernel with CONFIG_OTHER"),
        "{missing}"
    );
    folder.file("lost.ko", &module("lost", "nowhere"));
    let lost = Modules::of(&folder.0)
        .unwrap()
        .load(&[("lost", "CONFIG_LOST")])
        .unwrap_err();
    assert!(
        matches!(&lost, ModuleError::Depends { name, .. } if name == "nowhere"),
        "{lost}"
    );
}

// covers: run/modules
#[test]
fn where_nobody_says_what_is_built_in_what_is_no_file_may_be() {
    let folder = Folder::new("unsaid");
    folder.file("virtiofs.ko", &module("virtio_fs", "fuse,base"));
    folder.file("fuse.ko", &module("fuse", ""));
    let modules = Modules::of(&folder.0).unwrap();
    let loaded = modules.load(&[("over_lay", "CONFIG_OVER_LAY"), ("virtiofs", "CONFIG_VIRTIO_FS")]);
    let loaded = loaded.unwrap();
    let names: Vec<_> = loaded.iter().map(|module| module.name.as_str()).collect();
    assert_eq!(names, ["fuse", "virtiofs"]);
    assert!(modules.has("fuse") && !modules.has("over_lay"));
}

// covers: run/modules
#[test]
fn a_module_that_is_damaged_is_an_error() {
    let folder = Folder::new("damaged");
    let whole = packed("xz", &module("a", ""));
    folder.file("a.ko.xz", &whole[..whole.len() / 2]);
    folder.file("b.ko.gz", b"\x1f\x8b\x08\xff garbage that is long enough");
    folder.file("c.ko.zst", b"no zstd");
    folder.file("d.ko", b"short\xff\xff\xff\xff~Module signature appended~\n");
    let modules = Modules::of(&folder.0).unwrap();
    for name in ["a", "b", "c", "d"] {
        let error = modules.load(&[(name, "CONFIG")]).unwrap_err();
        assert!(matches!(error, ModuleError::File { .. }), "{name}: {error}");
    }
    // One that needs itself, by way of another, is loaded once.
    folder.file("e.ko", &module("e", "f"));
    folder.file("f.ko", &module("f", "e"));
    let modules = Modules::of(&folder.0).unwrap();
    assert_eq!(modules.load(&[("e", "CONFIG")]).unwrap().len(), 2);
}
