//! A kernel that was found: where its image is, what it is called, how it maps memory.

use super::{
    btf::{self, Btf},
    budget::{Budget, Look},
    kallsyms::{self, Tables},
    layouts::{ModuleLayout, TaskLayout},
    memory::Memory,
    paging::KernelTables,
    text::{build_id, until_nul},
};
use crate::symbols::SymbolTable;

/// Where the kernel's image is linked to: `__START_KERNEL_map` of arch/x86/include/asm/page_64_types.h.
const START_KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// And `_text` in it: `CONFIG_PHYSICAL_START`, 16 MiB in every configuration in use.
const TEXT: u64 = START_KERNEL_MAP + 0x100_0000;
/// A word of memory, and the page tables on the way to it.
const ONE: Budget = Budget { bytes: 4096, steps: 0 };
/// Notes and banners are shorter.
const SMALL: u64 = 4096;

/// A kernel that was found.
#[derive(Debug)]
pub struct Kernel {
    pub(super) symbols: SymbolTable,
    /// Physical less virtual address of the image.
    delta: u64,
    slide: u64,
    banner: String,
    build_id: Option<String>,
    pub(super) paging: KernelTables,
    pub(super) types: Types,
}

/// Offsets that lists are walked with; `None` where the kernel does not tell them.
#[derive(Debug, Default)]
pub(super) struct Types {
    pub(super) tasks: Option<TaskLayout>,
    pub(super) modules: Option<ModuleLayout>,
}

impl Kernel {
    /// Looks for a kernel in all of RAM. There is one from its decompression on.
    pub fn find(memory: &mut dyn Memory) -> Option<Kernel> {
        let budget = kallsyms::budget(&memory.ram());
        kallsyms::find(&mut Look::new(memory, budget), |memory, tables| {
            Kernel::verify(memory, tables)
        })
    }

    fn verify(memory: &mut Look<'_>, tables: Tables) -> Option<Kernel> {
        let symbols = tables.symbols;
        let (text, base, banner) = (
            symbols.address("_text")?,
            symbols.address("phys_base")?,
            symbols.address("linux_banner")?,
        );
        // The tables are constants of the image, and the image is in one piece: it is where `phys_base` says.
        let delta = candidates(&symbols, tables.at).find(|delta| {
            let mut word = [0; 8];
            memory.read_physical(base.wrapping_add(*delta), &mut word)
                && u64::from_le_bytes(word) == delta.wrapping_add(START_KERNEL_MAP)
        })?;
        let mut text_of = |at: u64| {
            let mut bytes = vec![0; SMALL as usize];
            memory
                .read_physical(at.wrapping_add(delta), &mut bytes)
                .then_some(bytes)
        };
        let banner = until_nul(&text_of(banner)?)?;
        if !banner.starts_with("Linux version ") {
            return None;
        }
        let build_id = symbols
            .address("__start_notes")
            .and_then(&mut text_of)
            .and_then(|notes| build_id(&notes));
        let mut kernel = Kernel {
            paging: KernelTables::new(memory, &symbols, delta),
            slide: text.wrapping_sub(TEXT),
            banner: banner.trim_end().to_string(),
            build_id,
            symbols,
            delta,
            types: Types::default(),
        };
        kernel.learn(memory);
        Some(kernel)
    }

    /// Reads the layouts of structures, once.
    fn learn(&mut self, memory: &mut Look<'_>) {
        let bounds = self
            .symbols
            .address("__start_BTF")
            .zip(self.symbols.address("__stop_BTF"));
        let Some((start, stop)) = bounds else { return };
        let btf = stop
            .checked_sub(start)
            .filter(|len| *len <= btf::LIMIT)
            .and_then(|len| memory.bytes(start.wrapping_add(self.delta), len))
            .and_then(Btf::parse);
        if let Some(btf) = btf {
            self.types = Types {
                tasks: TaskLayout::of(&btf, &self.symbols),
                modules: ModuleLayout::of(&btf),
            };
        }
    }

    /// A word of the image.
    pub(super) fn image_word(&self, memory: &mut Look<'_>, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        memory
            .read_physical(address.wrapping_add(self.delta), &mut bytes)
            .then(|| u64::from_le_bytes(bytes))
    }

    /// Whether it still is where it was found: memory may be another machine's time by now.
    pub fn is_there(&self, memory: &mut dyn Memory) -> bool {
        let memory = &mut Look::new(memory, ONE);
        let base = self.symbols.address("phys_base");
        let word = base.and_then(|at| self.image_word(memory, at));
        word == Some(self.delta.wrapping_add(START_KERNEL_MAP))
    }

    /// What `/proc/version` begins with.
    pub fn banner(&self) -> &str {
        &self.banner
    }

    /// The GNU build ID in hexadecimal digits, where the kernel has one.
    pub fn build_id(&self) -> Option<&str> {
        self.build_id.as_deref()
    }

    /// How far KASLR has moved the kernel in virtual addresses.
    pub fn slide(&self) -> u64 {
        self.slide
    }

    /// The physical address of `_text`.
    pub fn physical_base(&self) -> u64 {
        TEXT.wrapping_add(self.slide).wrapping_add(self.delta)
    }

    /// The symbols of the kernel's image, without modules'.
    pub fn symbols(&self) -> &SymbolTable {
        &self.symbols
    }

    /// Reads at a kernel's virtual address; `false` if not all of it is mapped.
    pub fn read(&self, memory: &mut dyn Memory, address: u64, bytes: &mut [u8]) -> bool {
        // Each page of it costs a walk of at most five levels, of entries of eight bytes.
        let len = bytes.len() as u64;
        let budget = Budget {
            bytes: len.saturating_add((len / 4096 + 2) * 40),
            steps: 0,
        };
        self.read_within(&mut Look::new(memory, budget), address, bytes)
    }

    pub(super) fn read_within(&self, memory: &mut Look<'_>, address: u64, bytes: &mut [u8]) -> bool {
        self.paging.read(memory, address, bytes)
    }

    pub(super) fn word(&self, memory: &mut Look<'_>, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read_within(memory, address, &mut bytes)
            .then(|| u64::from_le_bytes(bytes))
    }

    pub(super) fn half(&self, memory: &mut Look<'_>, address: u64) -> Option<u32> {
        let mut bytes = [0; 4];
        self.read_within(memory, address, &mut bytes)
            .then(|| u32::from_le_bytes(bytes))
    }
}

/// Where the image may be: `delta`s for which the tables are in its constant data. The kernel is aligned to 2 MiB, physically
/// and virtually (`CONFIG_PHYSICAL_ALIGN` and the page tables).
fn candidates(symbols: &SymbolTable, tables: u64) -> impl Iterator<Item = u64> {
    const ALIGN: u64 = 2 << 20;
    let bounds = symbols
        .address("__start_rodata")
        .zip(symbols.address("__end_rodata"))
        .unwrap_or((0, 0));
    let first = tables.wrapping_sub(bounds.1).div_ceil(ALIGN).wrapping_mul(ALIGN);
    let count = bounds.1.saturating_sub(bounds.0).min(1 << 30) / ALIGN + 2;
    (0..count).map(move |n| first.wrapping_add(n * ALIGN))
}
