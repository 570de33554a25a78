use super::*;

// covers: suite/demo
#[test]
fn the_initramfs_has_what_the_kernel_and_the_scripts_need() {
    let bytes = pack(
        b"the program",
        ["busybox", "sh", "mount"].into_iter(),
        &[("virtio.ko", b"the module".to_vec())],
    );
    let has = |name: &str| bytes.windows(name.len()).any(|window| window == name.as_bytes());
    for name in [
        "init\0",
        "dev/console\0",
        "bin/busybox\0",
        "bin/sh\0",
        "scripts/demo\0",
        "the program",
        "modules/virtio.ko\0",
        "the module",
        "modules/order\0",
        "TRAILER!!!\0",
    ] {
        assert!(has(name), "{name}");
    }
    assert_eq!(
        pack(b"x", ["sh"].into_iter(), &[]),
        pack(b"x", ["sh"].into_iter(), &[]),
        "the same bytes each time"
    );
}

#[test]
fn the_init_script_says_the_words_that_the_harness_waits_for() {
    assert!(INIT.starts_with("#!/bin/sh\n"));
    for word in [
        "minivmm-guest: init",
        "minivmm.script=",
        "setsid cttyhack",
        "poweroff -f",
    ] {
        assert!(INIT.contains(word), "{word}");
    }
}

#[test]
fn the_sample_is_fixed() {
    let bytes = sample();
    assert_eq!((bytes.len(), &bytes[8..16]), (256 << 10, &b"minivmm\n"[..]));
    assert_eq!(bytes, sample());
}
