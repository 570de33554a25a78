use super::*;

#[test]
fn debian_is_told_from_its_relatives() {
    for (text, debian) in [
        ("NAME=\"Debian GNU/Linux\"\nID=debian\n", true),
        ("ID=\"debian\"", true),
        ("ID=ubuntu\nID_LIKE=debian\n", false),
        ("", false),
    ] {
        assert_eq!(is_debian(text), debian, "{text}");
    }
}

// covers: suite/test, suite/demo
#[test]
fn what_cannot_be_installed_is_listed_by_package() {
    let here = list(&[QEMU, GCC], true);
    assert!(here.contains("apt-get install qemu-system-x86 gcc"), "{here}");
    let elsewhere = list(&[QEMU], false);
    assert!(
        elsewhere.contains("not Debian") && elsewhere.contains("qemu-system-x86_64"),
        "{elsewhere}"
    );
    let nothing = Need {
        package: "nothing",
        program: "no-such-program-here",
        why: "",
    };
    let stage = Stage::start("test");
    let error = ensure_installed(&stage, &[nothing], false).unwrap_err().to_string();
    assert!(error.contains("no-such-program-here"), "{error}");
    let shell = Need {
        package: "dash",
        program: "sh",
        why: "",
    };
    ensure_installed(&stage, &[shell], false).unwrap();
    // A file by its whole path is one with that path, and none below a folder of programs.
    assert_eq!(find_program("/bin/sh"), Some("/bin/sh".into()));
    assert_eq!(find_program("/no/such/file"), None);
}

#[test]
fn one_package_in_the_way_leaves_the_others() {
    let mut asked = Vec::new();
    let refused = each(&["qemu-system-x86", "libipt-dev", "qemu-user"], |name| {
        asked.push(name.to_string());
        Ok(name != "qemu-system-x86")
    })
    .unwrap();
    assert_eq!(refused, ["qemu-system-x86"]);
    assert_eq!(asked, ["qemu-system-x86", "libipt-dev", "qemu-user"]);
    assert!(each(&["gcc"], |_| bail!("no root")).is_err());
}

#[test]
fn a_static_program_is_one_without_an_interpreter() {
    let image = |kind: u8, count: u8| {
        let mut image = vec![0u8; 0x40 + 0x38 * usize::from(count)];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        (image[0x20], image[0x36], image[0x38]) = (0x40, 0x38, count);
        if count > 1 {
            image[0x40 + 0x38] = kind;
        }
        image
    };
    for (image, expected, why) in [
        (image(1, 2), true, "two segments"),
        (image(3, 2), false, "PT_INTERP"),
        (image(0, 0), false, "no segments"),
        (image(1, 2)[..0x50].to_vec(), false, "truncated"),
        (b"#!/bin/sh\n".to_vec(), false, "a script"),
    ] {
        assert_eq!(has_no_interpreter(&image), expected, "{why}");
    }
}
