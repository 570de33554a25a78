//! What is loaded, where it is entered, and what may be wrong with it.

use std::ops::Range;

use crate::memory::{Memory, NotRam};

/// What is wrong with a kernel, an initial RAM disk or a command line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The file has no bytes.
    #[error("the file is empty")]
    Empty,
    /// The file ends before what its own headers promise.
    #[error("truncated: {what} ends at byte {need}, the file at byte {have}")]
    Truncated {
        /// The part that is cut off.
        what: &'static str,
        /// Where that part ends.
        need: u64,
        /// The file's length.
        have: u64,
    },
    /// Not a kernel of any kind that can be loaded.
    #[error("not a kernel for this machine: neither a Linux bzImage nor an ELF64 kernel or ELF32 multiboot image")]
    ForeignKernel,
    /// A kernel, but one that cannot be entered.
    #[error("not a kernel for this machine: {0}")]
    UnusableKernel(String),
    /// A multiboot or boot-protocol header with values that contradict each other.
    #[error("damaged kernel: {0}")]
    DamagedKernel(String),
    /// Not an initial RAM disk that Linux knows.
    #[error("not an initial RAM disk: {0}")]
    ForeignInitrd(String),
    /// Words for a part of an initial RAM disk.
    #[error(
        "{0:?} stands behind its name, and Linux is told nothing of an initial RAM disk: words are for multiboot and PVH modules"
    )]
    ModuleWords(String),
    /// More than RAM holds.
    #[error("does not fit: {what} needs {need}, and there are {have}; {advice}")]
    TooBig {
        /// What does not fit.
        what: &'static str,
        /// Memory it needs, as text.
        need: String,
        /// Memory there is, as text.
        have: String,
        /// What to do about it.
        advice: &'static str,
    },
    /// A command line longer than the kernel takes.
    #[error("{have} bytes, and this kernel takes {max} at most")]
    CmdlineTooLong {
        /// Its length.
        have: u64,
        /// The kernel's limit.
        max: u64,
    },
    /// A command line that cannot be a C string.
    #[error("has a NUL byte inside")]
    CmdlineNul,
}

impl From<NotRam> for LoadError {
    fn from(error: NotRam) -> Self {
        LoadError::DamagedKernel(error.to_string())
    }
}

/// Bytes as people say them: rounded up to the next KiB, and from 1 MiB on to the next MiB.
pub fn size_text(bytes: u64) -> String {
    match bytes {
        0..0x10_0000 => format!("{}K", bytes.div_ceil(1 << 10)),
        _ if bytes % (1 << 40) == 0 => format!("{}T", bytes >> 40),
        _ if bytes % (1 << 30) == 0 => format!("{}G", bytes >> 30),
        _ => format!("{}M", bytes.div_ceil(1 << 20)),
    }
}

/// What `--cmdline` is when it is not given and the kernel is a Linux one: the only console this machine has.
pub const DEFAULT_LINUX_CMDLINE: &str = "console=ttyS0";

pub(super) const RAISE: &str = "raise --memory";

/// Something that reaches up to the address `end`.
pub(super) fn too_big(what: &'static str, end: u64, memory: &Memory) -> LoadError {
    let need = format!("memory up to {}", size_text(end));
    LoadError::TooBig {
        what,
        need,
        have: size_text(memory.low_end()),
        advice: RAISE,
    }
}

/// A file of more than `limit` bytes, which is all the memory that a kernel can be loaded into; its length if it is known.
pub fn too_big_file(what: &'static str, len: Option<u64>, limit: u64) -> LoadError {
    let need = len.map_or_else(|| "more".into(), size_text);
    LoadError::TooBig {
        what,
        need,
        have: size_text(limit),
        advice: RAISE,
    }
}

/// A file that is loaded beside the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Module<'a> {
    /// Its contents.
    pub bytes: &'a [u8],
    /// Its name.
    pub name: &'a [u8],
    /// The words that the kernel gets behind the name.
    pub words: &'a [u8],
}

impl Module<'_> {
    /// The string that goes with a module: its name, and behind a space its words.
    pub(super) fn string(&self) -> Vec<u8> {
        match self.words {
            [] => self.name.to_vec(),
            words => [self.name, b" ", words].concat(),
        }
    }
}

/// What to boot.
#[derive(Clone, Copy, Debug)]
pub struct Boot<'a> {
    /// The kernel file's contents.
    pub kernel: &'a [u8],
    /// The kernel file's name, which multiboot puts first on the command line.
    pub kernel_name: &'a [u8],
    /// What is loaded beside the kernel, in order: multiboot and PVH modules, or the parts of Linux's initial RAM disk.
    pub modules: &'a [Module<'a>],
    /// The command line; `None` for the default of the kernel's kind.
    pub cmdline: Option<&'a [u8]>,
    /// Where the ACPI root pointer is.
    pub rsdp: u64,
}

/// Which of the user's inputs a [`LoadError`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// `--kernel`
    Kernel,
    /// One of the files of `--initrd`, by its place among them.
    Module(usize),
    /// `--cmdline`
    Cmdline,
}

/// Where the boot CPU starts, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit mode: Linux boot protocol, "64-bit Boot Protocol".
    Linux64 {
        /// The entry point, 0x200 into the loaded image.
        rip: u64,
        /// The address of `struct boot_params`.
        boot_params: u64,
        /// The page tables, which map the first 4 GiB one to one.
        cr3: u64,
        /// The GDT.
        gdt: u64,
        /// Its limit.
        gdt_limit: u16,
    },
    /// Flat 32-bit protected mode: Linux boot protocol, "32-bit Boot Protocol".
    Linux32 {
        /// The entry point, the start of the loaded image.
        eip: u32,
        /// The address of `struct boot_params`.
        boot_params: u32,
        /// The GDT.
        gdt: u64,
        /// Its limit.
        gdt_limit: u16,
    },
    /// Flat 32-bit protected mode: Xen's "x86/HVM direct boot ABI".
    Pvh {
        /// The entry point, from the note.
        eip: u32,
        /// The address of `struct hvm_start_info`.
        start_info: u32,
    },
    /// Flat 32-bit protected mode: multiboot 0.6.96, 3.2 "Machine state".
    Multiboot {
        /// The entry point.
        eip: u32,
        /// The address of the information block.
        info: u32,
    },
}

/// The lowest address from `from` up, aligned to `align` (a power of two), where `len` bytes fit into one of the `usable`
/// ranges (in rising order) without touching a `taken` one.
pub(super) fn place(len: u64, align: u64, from: u64, usable: &[Range<u64>], taken: &[Range<u64>]) -> Option<u64> {
    for range in usable {
        let mut start = range.start.max(from).checked_next_multiple_of(align)?;
        while start.checked_add(len).is_some_and(|end| end <= range.end) {
            match taken.iter().find(|t| t.start < start + len && start < t.end) {
                Some(obstacle) => start = obstacle.end.checked_next_multiple_of(align)?,
                None => return Some(start),
            }
        }
    }
    None
}

pub(super) fn le32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

pub(super) fn le16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}
