//! Kernels into guest memory: bzImage by the Linux boot protocol, ELF64 by a PVH note or as a Linux kernel, ELF32 (and flat)
//! images by multiboot 1.
//!
//! Everything here works on untrusted bytes: a kernel, an initial RAM disk, a command line. What does not fit is a
//! [`LoadError`] that names it.

pub mod e820;
pub mod elf;
pub mod initrd;
pub mod linux;
pub mod multiboot;

mod image;

pub use image::{Boot, DEFAULT_LINUX_CMDLINE, Entry, Input, LoadError, Module, size_text, too_big_file};

use crate::memory::Memory;

/// Loads a kernel of any kind and what goes with it.
pub fn load(memory: &Memory, boot: &Boot) -> Result<Entry, (Input, LoadError)> {
    if boot.kernel.is_empty() {
        return Err((Input::Kernel, LoadError::Empty));
    }
    if let Some(empty) = boot.modules.iter().position(|module| module.bytes.is_empty()) {
        return Err((Input::Module(empty), LoadError::Empty));
    }
    if boot.cmdline.is_some_and(|cmdline| cmdline.contains(&0)) {
        return Err((Input::Cmdline, LoadError::CmdlineNul));
    }
    e820::write_bios_data(memory).map_err(|error| (Input::Kernel, error.into()))?;
    if linux::is_bzimage(boot.kernel) {
        return linux::load(memory, boot);
    }
    let multiboot = multiboot::find_header(boot.kernel).is_some();
    if elf::is_elf64(boot.kernel) && (!multiboot || elf::is_loadable(boot.kernel)) {
        return elf::load(memory, boot);
    }
    if multiboot {
        return multiboot::load(memory, boot);
    }
    Err((Input::Kernel, why_foreign(boot.kernel)))
}

/// Whether a file is of a kind that [`load`] takes.
///
/// # Errors
/// It is not, with the most likely reason.
pub fn check_kind(kernel: &[u8]) -> Result<(), LoadError> {
    if kernel.is_empty() {
        return Err(LoadError::Empty);
    }
    let known = linux::is_bzimage(kernel) || elf::is_elf64(kernel) || multiboot::find_header(kernel).is_some();
    if known { Ok(()) } else { Err(why_foreign(kernel)) }
}

/// A file that is no kernel we know: say the most likely reason.
fn why_foreign(kernel: &[u8]) -> LoadError {
    let have = kernel.len() as u64;
    match kernel {
        [0x7f, b'E', b'L', b'F', ..] if kernel.len() < 52 => LoadError::Truncated {
            what: "the ELF header",
            need: 52,
            have,
        },
        [0x7f, b'E', b'L', b'F', ..] => LoadError::UnusableKernel(
            "an ELF file without a multiboot header in its first 8192 bytes; of a Linux kernel, give the bzImage"
                .into(),
        ),
        // A bzImage that can boot by EFI starts like a PE file.
        [b'M', b'Z', ..] if kernel.len() < linux::HEADER_END => LoadError::Truncated {
            what: "the bzImage header",
            need: linux::HEADER_END as u64,
            have,
        },
        [0x1f, 0x8b, ..] | [0x28, 0xb5, 0x2f, 0xfd, ..] | [0xfd, b'7', b'z', b'X', b'Z', ..] => {
            LoadError::UnusableKernel("a compressed file; unpack it first".into())
        }
        _ => LoadError::ForeignKernel,
    }
}

#[cfg(test)]
mod tests {
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
}
