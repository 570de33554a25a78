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
#[path = "loader_test.rs"]
mod tests;
