use super::image::place;
use super::*;

pub(super) fn boot(kernel: &[u8]) -> Boot<'_> {
    Boot {
        kernel,
        kernel_name: b"kernel",
        modules: &[],
        cmdline: None,
        rsdp: 0xe0000,
    }
}

pub(super) fn module(bytes: &[u8]) -> Module<'_> {
    Module {
        bytes,
        name: b"initrd",
        words: b"",
    }
}

// covers: bad-input/empty-kernel
// covers: bad-input/foreign-kernel
// covers: bad-input/empty-initrd
#[test]
fn what_is_no_kernel_says_why() {
    let memory = Memory::new(2 << 20).unwrap();
    let elf = [&b"\x7fELF"[..], &[0; 100]].concat();
    for (kernel, says) in [
        (&b""[..], "empty"),
        (b"#!/bin/sh\n", "neither a Linux bzImage nor"),
        (b"MZ and no more", "truncated"),
        (b"\x7fELF", "truncated"),
        (&elf, "without a multiboot header"),
        (b"\x1f\x8b\x08", "unpack"),
        (&[0; 20000], "neither"),
    ] {
        let (input, error) = load(&memory, &boot(kernel)).unwrap_err();
        assert_eq!(input, Input::Kernel);
        assert!(error.to_string().contains(says), "{error}");
    }
    let (input, error) = load(
        &memory,
        &Boot {
            modules: &[module(b"a"), module(b"")],
            ..boot(b"x")
        },
    )
    .unwrap_err();
    assert_eq!((input, error), (Input::Module(1), LoadError::Empty));
    let (input, error) = load(
        &memory,
        &Boot {
            cmdline: Some(b"a\0b"),
            ..boot(b"x")
        },
    )
    .unwrap_err();
    assert_eq!((input, error), (Input::Cmdline, LoadError::CmdlineNul));
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]
fn place_finds_the_lowest_gap() {
    let usable = [0..0x9000, 0x10000..0x20000];
    for (len, from, taken, found) in [
        (0x1000, 0, &[][..], Some(0)),
        (0x1000, 1, &[], Some(0x1000)),
        (0x1000, 0, &[0..1], Some(0x1000)),
        (0x1000, 0, &[0x1fff..0x8001, 0..0x1000], Some(0x10000)),
        (0xa000, 0, &[], Some(0x10000)),
        (0x10000, 0, &[0x10000..0x10001], None),
        (u64::MAX, 0, &[], None),
        (1, u64::MAX, &[], None),
        (1, 0, &[0..u64::MAX], None),
    ] {
        assert_eq!(
            place(len, 0x1000, from, &usable, taken),
            found,
            "{len:#x} from {from:#x} around {taken:x?}"
        );
    }
}
