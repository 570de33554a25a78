//! What is read of a kernel's file, and of what a guest says.

use super::{RunError, complaint, last_lines, release};

// covers: run/kernel
#[test]
fn a_kernels_release_is_in_its_boot_header() {
    let path = std::env::temp_dir().join(format!("minivmm-release-{}", std::process::id()));
    let with = |version: &[u8], at: u16| {
        let mut head = vec![0; 0x4000];
        head[0x202..0x206].copy_from_slice(b"HdrS");
        head[0x20e..0x210].copy_from_slice(&at.to_le_bytes());
        let start = usize::from(at) + 0x200;
        if let Some(place) = head.get_mut(start..start + version.len()) {
            place.copy_from_slice(version);
        }
        std::fs::write(&path, head).unwrap();
        release(&path)
    };
    assert_eq!(
        with(b"6.1.0-48-cloud-amd64 (debian) #1\0", 0x3000).unwrap(),
        "6.1.0-48-cloud-amd64"
    );
    for (version, at) in [
        (&b"../../etc \0"[..], 0x3000),
        (b" 6.1\0", 0x3000),
        (b"6.1\0", 0xffff),
        (&[b'x'; 300], 0x3000),
    ] {
        assert!(
            matches!(with(version, at), Err(RunError::NotLinux { .. })),
            "{version:?}"
        );
    }
    std::fs::write(&path, b"no kernel").unwrap();
    assert!(matches!(release(&path), Err(RunError::NotLinux { .. })));
    std::fs::remove_file(path).unwrap();
}

// covers: run/failures
#[test]
fn what_a_kernel_lacks_is_named_by_its_option() {
    let said = |line: &str| complaint(&format!("[ 0.1] booting\n\nminivmm-init: {line}\n[ 0.2] off\n")).unwrap();
    let lacks = said("cannot mount overlay on /new: errno 19");
    assert!(lacks.contains("CONFIG_OVERLAY_FS"), "{lacks}");
    assert_eq!(
        said("cannot mount overlay on /new: errno 22"),
        "cannot mount overlay on /new: errno 22"
    );
    assert_eq!(complaint("a boot without a word of it"), None);
    let many: String = (0..30).map(|line| format!("{line}\r\n")).collect();
    assert_eq!(last_lines(&many).lines().count(), 20);
    assert!(last_lines(&many).ends_with("\n29"));
}
