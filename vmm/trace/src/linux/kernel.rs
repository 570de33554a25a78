//! A kernel that was found: where its image is, what it is called, how it maps memory.

use std::ops::Range;

use super::{
    btf::{self, Btf},
    budget::{Budget, Look},
    image::{self, Image},
    kallsyms::{self, Tables},
    layouts::{ModuleLayout, TaskLayout},
    map_layout::MapLayout,
    memory::Memory,
    paging::KernelTables,
    text::{build_id, until_nul},
};
use crate::symbols::SymbolTable;

/// A word of memory, and the page tables on the way to it.
const ONE: Budget = Budget { bytes: 4096, steps: 0 };
/// Notes and banners are shorter.
const SMALL: u64 = 4096;
/// What a banner begins with: `linux_banner` of init/version.c.
const BANNER: &[u8] = b"Linux version ";
/// No image is longer.
const LONGEST_IMAGE: u64 = 256 << 20;
/// What is read at a time where a banner is looked for.
const CHUNK: u64 = 1 << 20;

/// Why no kernel was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotFound {
    /// Nothing in memory looks like one.
    #[error("no Linux kernel is found in memory: it is there once it is decompressed")]
    Nothing,
    /// There is a Linux, but its table of symbols cannot be read.
    #[error(
        "the symbol table of {banner} is of a newer kind than is known here, or left out: give its symbols with --symbols (a copy of \
         its /proc/kallsyms, a System.map or a vmlinux)"
    )]
    UnknownTable {
        /// What Linux says it is, if that is found.
        banner: String,
    },
}

/// A kernel that was found.
#[derive(Debug)]
pub struct Kernel {
    pub(super) symbols: SymbolTable,
    pub(super) image: Image,
    slide: u64,
    banner: String,
    /// Where the banner is, physically.
    banner_at: u64,
    build_id: Option<String>,
    pub(super) paging: KernelTables,
    pub(super) types: Types,
}

/// Offsets that lists are walked with; `None` where the kernel does not tell them.
#[derive(Debug, Default)]
pub(super) struct Types {
    pub(super) tasks: Option<TaskLayout>,
    pub(super) modules: Option<ModuleLayout>,
    pub(super) maps: Option<MapLayout>,
}

impl Kernel {
    /// Looks for a kernel in all of RAM. There is one from its decompression on.
    pub fn find(memory: &mut dyn Memory) -> Option<Kernel> {
        Kernel::search(memory).ok()
    }

    /// The same, and says what is there where none is found.
    ///
    /// # Errors
    /// There is none, or one whose symbols cannot be read.
    pub fn look_for(memory: &mut dyn Memory) -> Result<Kernel, NotFound> {
        Kernel::search(memory).map_err(|tokens| {
            let ranges = memory.ram();
            let look = &mut Look::new(memory, kallsyms::budget(&ranges));
            let mut banners = ranges.into_iter().filter_map(|range| find_banner(look, range));
            match banners.next() {
                Some((_, banner)) => {
                    let banner = banner.split(' ').take(3).collect::<Vec<_>>().join(" ");
                    NotFound::UnknownTable { banner }
                }
                None if tokens => NotFound::UnknownTable {
                    banner: "this Linux".into(),
                },
                None => NotFound::Nothing,
            }
        })
    }

    fn search(memory: &mut dyn Memory) -> Result<Kernel, bool> {
        let budget = kallsyms::budget(&memory.ram());
        kallsyms::find(&mut Look::new(memory, budget), |memory, tables| {
            Kernel::verify(memory, tables)
        })
    }

    fn verify(memory: &mut Look<'_>, tables: Tables) -> Option<Kernel> {
        let (image, symbols) = Image::locate(memory, tables)?;
        let text = symbols.address("_text")?;
        let physical = |at: u64| at.wrapping_add(image.delta);
        let mut text_of = |at: u64| {
            let mut bytes = vec![0; SMALL as usize];
            memory.read_physical(at, &mut bytes).then_some(bytes)
        };
        let named = symbols.address("linux_banner").map(physical);
        let banner = named.and_then(|at| Some((at, banner(&text_of(at)?)?)));
        let build_id = symbols
            .address("__start_notes")
            .and_then(|at| build_id(&text_of(physical(at))?));
        let (banner_at, banner) = banner.or_else(|| {
            let start = physical(text);
            find_banner(memory, start..start.saturating_add(LONGEST_IMAGE))
        })?;
        let mut kernel = Kernel {
            paging: KernelTables::new(memory, &symbols, image),
            slide: text.wrapping_sub(image.text),
            banner,
            banner_at,
            build_id,
            symbols,
            image,
            types: Types::default(),
        };
        kernel.learn(memory);
        Some(kernel)
    }

    /// Reads the layouts of structures, once.
    fn learn(&mut self, memory: &mut Look<'_>) {
        // Structures are read with pointers of eight bytes.
        if self.image.width != 8 {
            return;
        }
        let bounds = self
            .symbols
            .address("__start_BTF")
            .zip(self.symbols.address("__stop_BTF"));
        let Some((start, stop)) = bounds else { return };
        let btf = stop
            .checked_sub(start)
            .filter(|len| *len <= btf::LIMIT)
            .and_then(|len| memory.bytes(start.wrapping_add(self.image.delta), len))
            .and_then(Btf::parse);
        if let Some(btf) = btf {
            self.types = Types {
                tasks: TaskLayout::of(&btf, &self.symbols),
                modules: ModuleLayout::of(&btf),
                maps: MapLayout::of(&btf),
            };
        }
    }

    /// A word of the image.
    pub(super) fn image_word(&self, memory: &mut Look<'_>, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        memory
            .read_physical(address.wrapping_add(self.image.delta), &mut bytes)
            .then(|| u64::from_le_bytes(bytes))
    }

    /// Whether it still is where it was found: memory may be another machine's time by now.
    pub fn is_there(&self, memory: &mut dyn Memory) -> bool {
        let memory = &mut Look::new(memory, ONE);
        if let Some(base) = self.symbols.address("phys_base") {
            return image::phys_base(memory, base.wrapping_add(self.image.delta)) == Some(self.image.delta);
        }
        let mut bytes = vec![0; self.banner.len()];
        memory.read_physical(self.banner_at, &mut bytes) && bytes == self.banner.as_bytes()
    }

    /// The CPU on which the kernel has panicked: `panic_cpu` of kernel/panic.c, which is -1 until then. `None` also where that has no
    /// symbol.
    pub fn panic_cpu(&self, memory: &mut dyn Memory) -> Option<u32> {
        /// More CPUs than any kernel is built for.
        const MOST_CPUS: u32 = 1 << 16;
        let at = self.symbols.address("panic_cpu")?.wrapping_add(self.image.delta);
        let mut bytes = [0; 4];
        let read = memory.read_physical(at, &mut bytes);
        Some(u32::from_le_bytes(bytes)).filter(|cpu| read && *cpu < MOST_CPUS)
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
        self.image.text.wrapping_add(self.slide).wrapping_add(self.image.delta)
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

/// A banner at the beginning of these bytes, without the end of its line. Since 6.1 an image may have another one in front, weak and of
/// nobody's use, that was made before the build had its number.
fn banner(bytes: &[u8]) -> Option<String> {
    let text = bytes.starts_with(BANNER).then(|| until_nul(bytes)).flatten()?;
    let version = text.as_bytes().get(BANNER.len()).is_some_and(u8::is_ascii_digit);
    let build = text
        .split_once(" #")
        .is_some_and(|(_, build)| build.starts_with(|c: char| c.is_ascii_digit()));
    (version && build && text.ends_with('\n')).then(|| text.trim_end().to_string())
}

/// The first banner in a part of physical memory, and where it is.
fn find_banner(memory: &mut Look<'_>, range: Range<u64>) -> Option<(u64, String)> {
    let mut at = range.start;
    while at < range.end {
        // The longest part that is RAM: the image ends somewhere.
        let len = (CHUNK + SMALL).min(range.end - at);
        let bytes = memory.bytes(at, len).or_else(|| memory.bytes(at, SMALL.min(len)))?;
        memory.spend(len / 8).then_some(())?;
        let found = (0..bytes.len().saturating_sub(BANNER.len()))
            .filter(|n| bytes[*n] == BANNER[0])
            .find_map(|n| Some((at + n as u64, banner(&bytes[n..])?)));
        if found.is_some() {
            return found;
        }
        at += (bytes.len() as u64).saturating_sub(SMALL).max(SMALL);
    }
    None
}
