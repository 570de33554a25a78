//! Multiboot 1 (the Multiboot Specification 0.6.96): ELF32 images, and flat ones whose header has addresses.

use std::ops::Range;

use super::{
    e820,
    image::{Boot, Entry, Input, LoadError, Module, le16, le32, place, too_big},
};
use crate::memory::Memory;

/// What the header starts with.
const HEADER_MAGIC: u32 = 0x1bad_b002;
/// What EAX holds at entry.
pub const LOADER_MAGIC: u32 = 0x2bad_b002;
/// The header lies within so many bytes of the file's start.
const HEADER_SPAN: usize = 8192;

/// Header flag: modules are to start at page boundaries. They always do.
const PAGE_ALIGN: u32 = 1 << 0;
/// Header flag: memory information is wanted. It is always there.
const MEMORY_INFO: u32 = 1 << 1;
/// Header flag: a video mode is wanted. There is no video, and the specification lets a loader say so by leaving it out.
const VIDEO_MODE: u32 = 1 << 2;
/// Header flag: load by the addresses in the header.
const ADDRESSES: u32 = 1 << 16;
/// A loader has to know all of these flags or give up.
const MANDATORY: u32 = 0xffff;

/// Information flags: `mem_lower` and `mem_upper`, command line, modules, memory map, loader name.
const INFO_FLAGS: u32 = 1 << 0 | 1 << 2 | INFO_MODULES | 1 << 6 | 1 << 9;
const INFO_MODULES: u32 = 1 << 3;
/// The information block up to its VBE part.
const INFO_SIZE: usize = 72;
const MMAP_ENTRY: usize = 24;
const MODULE_ENTRY: usize = 16;
const LOADER_NAME: &[u8] = b"minivmm";
/// The information block is kept out of the first 64 KiB, where kernels put their trampolines, if there is room.
const INFO_FROM: u64 = 0x1_0000;

const ELF_HEADER: usize = 52;
const PROGRAM_HEADER: usize = 32;
const ET_EXEC: u16 = 2;
const EM_386: u16 = 3;
const PT_LOAD: u32 = 1;

/// Where the multiboot header is in the file.
pub fn find_header(kernel: &[u8]) -> Option<usize> {
    let span = kernel.len().min(HEADER_SPAN);
    (0..span.saturating_sub(11)).step_by(4).find(|at| {
        let field = |n: usize| le32(kernel, at + n * 4);
        match (field(0), field(1), field(2)) {
            (Some(HEADER_MAGIC), Some(flags), Some(checksum)) => {
                HEADER_MAGIC.wrapping_add(flags).wrapping_add(checksum) == 0
            }
            _ => false,
        }
    })
}

/// A part of the image: bytes of the file, then zeroes, at a physical address.
#[derive(Clone, Debug)]
struct Segment {
    file: Range<usize>,
    memory: Range<u64>,
}

/// An image ready to be copied.
#[derive(Clone, Debug)]
struct Image {
    segments: Vec<Segment>,
    entry: u32,
}

fn damaged(text: impl Into<String>) -> LoadError {
    LoadError::DamagedKernel(text.into())
}

impl Image {
    fn parse(kernel: &[u8]) -> Result<Self, LoadError> {
        let have = kernel.len() as u64;
        let header = find_header(kernel).ok_or(LoadError::ForeignKernel)?;
        let flags = le32(kernel, header + 4).unwrap_or(0);
        let unknown = flags & MANDATORY & !(PAGE_ALIGN | MEMORY_INFO | VIDEO_MODE);
        if unknown != 0 {
            let text = format!("its multiboot header needs a loader that knows the flags {unknown:#x}");
            return Err(LoadError::UnusableKernel(text));
        }
        if flags & ADDRESSES != 0 {
            return Self::parse_flat(kernel, header);
        }
        if !kernel.starts_with(b"\x7fELF") {
            let text = "a multiboot header, but neither ELF nor load addresses in the header";
            return Err(LoadError::UnusableKernel(text.into()));
        }
        if kernel.len() < ELF_HEADER {
            return Err(LoadError::Truncated {
                what: "the ELF header",
                need: ELF_HEADER as u64,
                have,
            });
        }
        // EI_CLASS 1 is 32-bit, EI_DATA 1 is little-endian.
        if kernel[4..6] != [1, 1] || le16(kernel, 18) != Some(EM_386) {
            let text = "multiboot takes ELF32 for the i386; convert it with `objcopy -O elf32-i386`";
            return Err(LoadError::UnusableKernel(text.into()));
        }
        if le16(kernel, 16) != Some(ET_EXEC) {
            return Err(LoadError::UnusableKernel(
                "an ELF file that is not an executable".into(),
            ));
        }
        Self::parse_elf(kernel)
    }

    fn parse_elf(kernel: &[u8]) -> Result<Self, LoadError> {
        let have = kernel.len() as u64;
        let (Some(entry), Some(table), Some(stride), Some(count)) =
            (le32(kernel, 24), le32(kernel, 28), le16(kernel, 42), le16(kernel, 44))
        else {
            return Err(LoadError::Truncated {
                what: "the ELF header",
                need: ELF_HEADER as u64,
                have,
            });
        };
        if count > 0 && usize::from(stride) < PROGRAM_HEADER {
            return Err(damaged(format!("ELF program headers of {stride} bytes")));
        }
        let table_end = u64::from(table) + u64::from(stride) * u64::from(count);
        if table_end > have {
            return Err(LoadError::Truncated {
                what: "the table of ELF program headers",
                need: table_end,
                have,
            });
        }
        let (mut segments, mut physical_entry) = (Vec::new(), entry);
        for n in 0..usize::from(count) {
            let at = table as usize + n * usize::from(stride);
            // In the table's range, which is in the file.
            let field = |index: usize| le32(kernel, at + index * 4).unwrap_or(0);
            let (kind, offset, virtual_start, start, file_size, size) =
                (field(0), field(1), field(2), field(3), field(4), field(5));
            if kind != PT_LOAD || size == 0 {
                continue;
            }
            if file_size > size {
                return Err(damaged(format!(
                    "ELF segment {n} has more bytes in the file than in memory"
                )));
            }
            let file_end = u64::from(offset) + u64::from(file_size);
            if file_end > have {
                return Err(LoadError::Truncated {
                    what: "an ELF segment",
                    need: file_end,
                    have,
                });
            }
            segments.push(Segment {
                file: offset as usize..file_end as usize,
                memory: u64::from(start)..u64::from(start) + u64::from(size),
            });
            // Kernels linked to run at virtual addresses give their entry point as one.
            if (virtual_start..virtual_start.saturating_add(size)).contains(&entry) {
                physical_entry = start.wrapping_add(entry - virtual_start);
            }
        }
        Ok(Image {
            segments,
            entry: physical_entry,
        })
    }

    /// Multiboot 3.1.3 "The address fields of Multiboot header".
    fn parse_flat(kernel: &[u8], header: usize) -> Result<Self, LoadError> {
        let have = kernel.len() as u64;
        let field = |n: usize| {
            let need = (header + 32) as u64;
            le32(kernel, header + n * 4).ok_or(LoadError::Truncated {
                what: "the multiboot header",
                need,
                have,
            })
        };
        let (header_address, load, load_end, bss_end, entry) = (field(3)?, field(4)?, field(5)?, field(6)?, field(7)?);
        let before = header_address
            .checked_sub(load)
            .map(|n| n as usize)
            .filter(|n| *n <= header);
        let start = header - before.ok_or_else(|| damaged("its multiboot header lies before its load address"))?;
        let file_end = match load_end {
            0 => kernel.len(),
            end => {
                start
                    + end
                        .checked_sub(load)
                        .ok_or_else(|| damaged("its load addresses run backwards"))? as usize
            }
        };
        if file_end > kernel.len() {
            return Err(LoadError::Truncated {
                what: "the image",
                need: file_end as u64,
                have,
            });
        }
        let loaded_end = u64::from(load) + (file_end - start) as u64;
        let end = match bss_end {
            0 => loaded_end,
            end if u64::from(end) >= loaded_end => end.into(),
            _ => return Err(damaged("its bss ends before it begins")),
        };
        let segments = vec![Segment {
            file: start..file_end,
            memory: load.into()..end,
        }];
        Ok(Image { segments, entry })
    }

    /// All segments lie in usable memory and apart from each other, and the entry point lies in one of them.
    fn check(&self, memory: &Memory, usable: &[Range<u64>]) -> Result<(), LoadError> {
        let mut ranges: Vec<_> = self.segments.iter().map(|s| s.memory.clone()).collect();
        ranges.sort_by_key(|r| r.start);
        if ranges.is_empty() {
            return Err(damaged("an ELF file without a segment to load"));
        }
        for range in &ranges {
            if range.end > memory.low_end() {
                return Err(too_big("the kernel", range.end, memory));
            }
            if !usable.iter().any(|u| u.start <= range.start && range.end <= u.end) {
                let text = format!(
                    "it loads to {:#x}-{:#x}, which is not all RAM on a PC",
                    range.start, range.end
                );
                return Err(LoadError::UnusableKernel(text));
            }
        }
        if ranges.windows(2).any(|w| w[0].end > w[1].start) {
            return Err(damaged("its segments overlap in memory"));
        }
        if !ranges.iter().any(|r| r.contains(&u64::from(self.entry))) {
            return Err(damaged(format!(
                "its entry point {:#x} is in none of its segments",
                self.entry
            )));
        }
        Ok(())
    }
}

/// Loads a multiboot image and its modules, and writes the information block.
pub fn load(memory: &Memory, boot: &Boot) -> Result<Entry, (Input, LoadError)> {
    let kernel_error = |e| (Input::Kernel, e);
    let usable = e820::usable_low(memory);
    let image = Image::parse(boot.kernel).map_err(kernel_error)?;
    image.check(memory, &usable).map_err(kernel_error)?;

    // Neither the first page nor the image may be touched.
    let mut taken: Vec<_> = image.segments.iter().map(|s| s.memory.clone()).collect();
    taken.push(0..0x1000);
    let image_end = image.segments.iter().map(|s| s.memory.end).max().unwrap_or(0);
    let mut modules = Vec::new();
    for (n, module) in boot.modules.iter().enumerate() {
        let len = module.bytes.len() as u64;
        let from = image_end.max(e820::EXTENDED_START);
        // Most kernels have their modules behind themselves; one that sits at the end of memory has them before.
        let start = place(len, 0x1000, from, &usable, &taken).or_else(|| place(len, 0x1000, 0, &usable, &taken));
        let start = start.ok_or_else(|| {
            let all: u64 = boot.modules.iter().map(|module| module.bytes.len() as u64).sum();
            let need = image_end.saturating_add(all);
            (Input::Module(n), too_big("the kernel with its modules", need, memory))
        })?;
        taken.push(start..start + len);
        modules.push(start as u32..(start + len) as u32);
    }

    let info = Info::new(memory, boot, modules.clone());
    let len = info.len() as u64;
    let at = place(len, 0x1000, INFO_FROM, &usable, &taken).or_else(|| place(len, 16, 0, &usable, &taken));
    let at = at.ok_or_else(|| {
        let need = image_end.saturating_add(len);
        (
            Input::Cmdline,
            too_big("the multiboot information with the command line", need, memory),
        )
    })?;

    let not_ram = |e| kernel_error(LoadError::from(e));
    for segment in &image.segments {
        let bytes = &boot.kernel[segment.file.clone()];
        memory.write(segment.memory.start, bytes).map_err(not_ram)?;
        let bss = segment.memory.start + bytes.len() as u64;
        memory.zero(bss, segment.memory.end - bss).map_err(not_ram)?;
    }
    for (module, at) in boot.modules.iter().zip(&modules) {
        memory.write(at.start.into(), module.bytes).map_err(not_ram)?;
    }
    // Everything was placed in usable memory below 4 GiB.
    memory.write(at, &info.bytes(at as u32)).map_err(not_ram)?;
    Ok(Entry::Multiboot {
        eip: image.entry,
        info: at as u32,
    })
}

/// The information block and what it points at, but for the module: block, memory map, module list, strings.
struct Info {
    mem_lower: u32,
    mem_upper: u32,
    map: Vec<e820::E820Entry>,
    cmdline: Vec<u8>,
    /// Where each module is, and its string.
    modules: Vec<(Range<u32>, Vec<u8>)>,
}

impl Info {
    fn new(memory: &Memory, boot: &Boot, modules: Vec<Range<u32>>) -> Self {
        let mut cmdline = boot.kernel_name.to_vec();
        if let Some(arguments) = boot.cmdline.filter(|arguments| !arguments.is_empty()) {
            cmdline.push(b' ');
            cmdline.extend(arguments);
        }
        Info {
            mem_lower: (e820::EBDA_START >> 10) as u32,
            mem_upper: ((memory.low_end() - e820::EXTENDED_START) >> 10) as u32,
            map: e820::map(memory),
            cmdline,
            modules: modules
                .into_iter()
                .zip(boot.modules.iter().map(Module::string))
                .collect(),
        }
    }

    fn map_at(&self) -> usize {
        INFO_SIZE
    }

    fn modules_at(&self) -> usize {
        self.map_at() + self.map.len() * MMAP_ENTRY
    }

    fn cmdline_at(&self) -> usize {
        self.modules_at() + self.modules.len() * MODULE_ENTRY
    }

    fn loader_name_at(&self) -> usize {
        self.cmdline_at() + self.cmdline.len() + 1
    }

    fn strings_at(&self) -> usize {
        self.loader_name_at() + LOADER_NAME.len() + 1
    }

    fn len(&self) -> usize {
        let strings = self.modules.iter().map(|(_, string)| string.len() + 1);
        self.strings_at() + strings.sum::<usize>()
    }

    /// The bytes of a block that lies at `base` (multiboot 3.3 "Boot information format").
    fn bytes(&self, base: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        let mut field = |at: usize, value: u32| put(at, &value.to_le_bytes());
        let address = |at: usize| base + at as u32;

        field(
            0,
            INFO_FLAGS
                & if self.modules.is_empty() {
                    !INFO_MODULES
                } else {
                    u32::MAX
                },
        );
        field(4, self.mem_lower);
        field(8, self.mem_upper);
        field(16, address(self.cmdline_at()));
        if !self.modules.is_empty() {
            field(20, self.modules.len() as u32);
            field(24, address(self.modules_at()));
        }
        let mut string_at = self.strings_at();
        for (n, (module, string)) in self.modules.iter().enumerate() {
            let at = self.modules_at() + n * MODULE_ENTRY;
            field(at, module.start);
            field(at + 4, module.end);
            field(at + 8, address(string_at));
            string_at += string.len() + 1;
        }
        field(44, (self.map.len() * MMAP_ENTRY) as u32);
        field(48, address(self.map_at()));
        field(64, address(self.loader_name_at()));
        for (n, entry) in self.map.iter().enumerate() {
            let at = self.map_at() + n * MMAP_ENTRY;
            // The size field does not count itself.
            put(at, &(MMAP_ENTRY as u32 - 4).to_le_bytes());
            put(at + 4, &entry.range.start.to_le_bytes());
            put(at + 12, &(entry.range.end - entry.range.start).to_le_bytes());
            put(at + 20, &(entry.kind as u32).to_le_bytes());
        }
        put(self.cmdline_at(), &self.cmdline);
        put(self.loader_name_at(), LOADER_NAME);
        let mut string_at = self.strings_at();
        for (_, string) in &self.modules {
            put(string_at, string);
            string_at += string.len() + 1;
        }
        bytes
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::loader::tests::{boot, module as named};

    const BASE: u32 = 0x10_0000;

    pub(crate) fn header(flags: u32) -> Vec<u8> {
        let checksum = 0u32.wrapping_sub(HEADER_MAGIC).wrapping_sub(flags);
        [HEADER_MAGIC, flags, checksum]
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .collect()
    }

    /// An ELF32 file with a multiboot header and segments of (virtual, physical, bytes in the file, bytes in memory).
    pub(crate) fn elf(entry: u32, flags: u32, segments: &[(u32, u32, &[u8], u32)]) -> Vec<u8> {
        let mut file = b"\x7fELF\x01\x01\x01".to_vec();
        file.resize(ELF_HEADER, 0);
        let mut put = |at: usize, data: &[u8]| file[at..at + data.len()].copy_from_slice(data);
        put(16, &ET_EXEC.to_le_bytes());
        put(18, &EM_386.to_le_bytes());
        put(24, &entry.to_le_bytes());
        put(28, &(ELF_HEADER as u32).to_le_bytes());
        put(42, &(PROGRAM_HEADER as u16).to_le_bytes());
        put(44, &(segments.len() as u16).to_le_bytes());
        let mut offset = ELF_HEADER + segments.len() * PROGRAM_HEADER + 12;
        for (virtual_start, start, bytes, size) in segments {
            for word in [
                PT_LOAD,
                offset as u32,
                *virtual_start,
                *start,
                bytes.len() as u32,
                *size,
                5,
                0x1000,
            ] {
                file.extend(word.to_le_bytes());
            }
            offset += bytes.len();
        }
        file.extend(header(flags));
        file.extend(segments.iter().flat_map(|s| s.2));
        file
    }

    fn memory_bytes(memory: &Memory, at: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        memory.read(at.into(), &mut bytes).unwrap();
        bytes
    }

    fn c_string(memory: &Memory, at: u32) -> Vec<u8> {
        memory_bytes(memory, at, 256)
            .split(|b| *b == 0)
            .next()
            .unwrap()
            .to_vec()
    }

    // covers: loader/multiboot
    #[test]
    fn an_elf32_image_is_copied_its_bss_zeroed_and_the_block_describes_the_machine() {
        let memory = Memory::new(5 << 30).unwrap();
        memory.write(0x10_0000, &[0xff; 64]).unwrap();
        let image = elf(
            BASE + 2,
            3,
            &[(BASE, BASE, b"code", 32), (0x20_0000, 0x20_0000, b"data", 4)],
        );
        let module = b"a module".as_slice();
        let request = Boot {
            cmdline: Some(b"a=1 b"),
            modules: &[named(module)],
            ..boot(&image)
        };
        let Ok(Entry::Multiboot { eip, info }) = load(&memory, &request) else {
            panic!("not loaded")
        };
        assert_eq!(eip, BASE + 2);
        assert_eq!(
            memory_bytes(&memory, BASE, 33),
            [&b"code"[..], &[0; 28], &[0xff]].concat(),
            "bss, and no more"
        );
        assert_eq!(memory_bytes(&memory, 0x20_0000, 4), b"data");

        let block = memory_bytes(&memory, info, INFO_SIZE);
        let field = |at| le32(&block, at).unwrap();
        assert_eq!(field(0), 0b10_0100_1101, "mem, cmdline, mods, mmap, loader name");
        assert_eq!(
            (field(4), field(8)),
            (639, (3 << 20) - 1024),
            "mem_lower and mem_upper in KiB"
        );
        assert_eq!(c_string(&memory, field(16)), b"kernel a=1 b");
        assert_eq!(c_string(&memory, field(64)), b"minivmm");

        assert_eq!(field(20), 1, "mods_count");
        let entry = memory_bytes(&memory, field(24), MODULE_ENTRY);
        let (start, end) = (le32(&entry, 0).unwrap(), le32(&entry, 4).unwrap());
        assert_eq!(start % 4096, 0);
        assert!(start >= 0x20_0004, "clear of the image");
        assert_eq!(memory_bytes(&memory, start, (end - start) as usize), module);
        assert_eq!(c_string(&memory, le32(&entry, 8).unwrap()), b"initrd");

        let map = e820::map(&memory);
        assert_eq!(field(44) as usize, map.len() * MMAP_ENTRY);
        let lines = memory_bytes(&memory, field(48), field(44) as usize);
        for (line, entry) in lines.chunks(MMAP_ENTRY).zip(map) {
            let quad = |at: usize| u64::from_le_bytes(line[at..at + 8].try_into().unwrap());
            assert_eq!(le32(line, 0), Some(20));
            assert_eq!(quad(4)..quad(4) + quad(12), entry.range);
            assert_eq!(le32(line, 20), Some(entry.kind as u32));
        }
    }

    // covers: loader/multiboot-modules
    #[test]
    fn each_module_has_its_own_words() {
        let memory = Memory::new(8 << 20).unwrap();
        let image = elf(BASE, 3, &[(BASE, BASE, b"code", 32)]);
        let modules = [
            Module {
                bytes: b"first",
                name: b"vmlinuz",
                words: b"console=hvc0",
            },
            Module {
                bytes: &[2; 5000],
                name: b"dir/initrd",
                words: b"",
            },
            Module {
                bytes: b"third",
                name: b"x",
                words: b"y z",
            },
        ];
        let request = Boot {
            modules: &modules,
            ..boot(&image)
        };
        let Ok(Entry::Multiboot { info, .. }) = load(&memory, &request) else {
            panic!("not loaded")
        };
        let block = memory_bytes(&memory, info, INFO_SIZE);
        let field = |at| le32(&block, at).unwrap();
        assert_eq!(field(20), 3, "mods_count");
        let list = memory_bytes(&memory, field(24), 3 * MODULE_ENTRY);
        let mut before = BASE + 32;
        for ((entry, module), string) in
            list.chunks(MODULE_ENTRY)
                .zip(&modules)
                .zip([&b"vmlinuz console=hvc0"[..], b"dir/initrd", b"x y z"])
        {
            let (start, end) = (le32(entry, 0).unwrap(), le32(entry, 4).unwrap());
            assert!(start >= before && start % 4096 == 0, "{start:#x}");
            assert_eq!(memory_bytes(&memory, start, (end - start) as usize), module.bytes);
            assert_eq!(c_string(&memory, le32(entry, 8).unwrap()), string);
            before = end;
        }
        assert_eq!(c_string(&memory, field(64)), b"minivmm");
    }

    // covers: loader/multiboot-info-placement
    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "a list that may grow is meant")]
    fn block_and_module_keep_clear_of_the_first_page_and_of_the_image() {
        let memory = Memory::new(4 << 20).unwrap();
        let big = 3 << 20;
        for segments in [
            vec![(BASE, BASE, &b"x"[..], 16)],
            vec![(BASE, BASE, &b"x"[..], big - 0x1000)],
            vec![(0x1000, 0x1000, &b"x"[..], 0x9_0000), (BASE, BASE, b"y", 16)],
            vec![(0x1_0000, 0x1_0000, &b"x"[..], 16)],
            vec![(0x1000, 0x1000, &b"x"[..], 0x9_dc00), (BASE, BASE, b"y", big - 0x1000)],
        ] {
            let image = elf(segments[0].0, 0, &segments);
            for module in [None, Some(&[9u8; 100][..])] {
                let request = Boot {
                    modules: &module.map(named).into_iter().collect::<Vec<_>>(),
                    ..boot(&image)
                };
                let Ok(Entry::Multiboot { info, .. }) = load(&memory, &request) else {
                    panic!("{segments:x?}")
                };
                let block = memory_bytes(&memory, info, INFO_SIZE);
                let mut placed = vec![u64::from(info)..u64::from(info) + 400];
                if module.is_some() {
                    let entry = memory_bytes(&memory, le32(&block, 24).unwrap(), 8);
                    placed.push(le32(&entry, 0).unwrap().into()..le32(&entry, 4).unwrap().into());
                    assert_eq!(placed[1].end - placed[1].start, 100);
                } else {
                    assert_eq!(le32(&block, 0).unwrap() & INFO_MODULES, 0);
                }
                for range in &placed {
                    assert!(range.start >= 0x1000, "{range:x?}");
                    assert!(
                        e820::usable_low(&memory)
                            .iter()
                            .any(|u| u.start <= range.start && range.end <= u.end)
                    );
                    for (_, start, _, size) in &segments {
                        let (start, end) = (u64::from(*start), u64::from(start + size));
                        assert!(
                            range.end <= start || end <= range.start,
                            "{range:x?} in {start:x}-{end:x}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn the_entry_point_may_be_virtual() {
        let memory = Memory::new(4 << 20).unwrap();
        let image = elf(0xc010_0004, 0, &[(0xc010_0000, BASE, b"0123456789", 10)]);
        let entry = load(&memory, &boot(&image)).unwrap();
        assert!(matches!(entry, Entry::Multiboot { eip: 0x10_0004, .. }), "{entry:x?}");
    }

    // covers: loader/multiboot-flat
    #[test]
    fn a_flat_image_is_loaded_by_the_addresses_in_its_header() {
        let memory = Memory::new(4 << 20).unwrap();
        memory.write(0x20_0000, &[0xff; 64]).unwrap();
        let mut image = vec![1, 2, 3, 4, 5, 6, 7, 8];
        image.extend(header(ADDRESSES));
        for word in [0x20_0004u32, 0x20_0000, 0x20_0000 + 36, 0x20_0000 + 40, 0x20_0020] {
            image.extend(word.to_le_bytes());
        }
        image.extend([0xaa; 20]);
        let entry = load(&memory, &boot(&image)).unwrap();
        assert!(matches!(entry, Entry::Multiboot { eip: 0x20_0020, .. }), "{entry:x?}");
        let expected = [&image[4..40], &[0; 4], &[0xff; 4]].concat();
        assert_eq!(memory_bytes(&memory, 0x20_0000, 44), expected);
    }

    // covers: bad-input/multiboot
    #[test]
    fn images_that_cannot_be_loaded_say_why() {
        let memory = Memory::new(4 << 20).unwrap();
        let good = elf(BASE, 3, &[(BASE, BASE, b"code", 32)]);
        let patched = |at: usize, bytes: &[u8]| {
            let mut image = good.clone();
            image[at..at + bytes.len()].copy_from_slice(bytes);
            image
        };
        let program_header = |n: usize, value: u32| patched(ELF_HEADER + n * 4, &value.to_le_bytes());
        let flat = |words: [u32; 5]| {
            let mut image = header(ADDRESSES);
            image.extend(words.iter().flat_map(|w| w.to_le_bytes()));
            image
        };
        for (image, says) in [
            (patched(4, &[2]), "ELF32"),
            (patched(5, &[2]), "ELF32"),
            (patched(18, &[62]), "ELF32"),
            (patched(16, &[3]), "not an executable"),
            (patched(42, &[8]), "program headers of 8 bytes"),
            (patched(44, &[0xff, 0xff]), "truncated"),
            (patched(44, &[0, 0]), "without a segment"),
            (patched(28, &[0xff; 4]), "truncated"),
            (program_header(0, 2), "without a segment"),
            (program_header(1, 0xffff_fff0), "truncated"),
            (program_header(3, 0xffff_fff0), "--memory"),
            (program_header(3, 0x40_0000), "--memory"),
            (program_header(3, 0xf_fff0), "not all RAM"),
            (program_header(4, 33), "more bytes in the file"),
            (program_header(5, 0x30_0001), "--memory"),
            (patched(24, &[0; 4]), "entry point"),
            (elf(BASE, 8, &[(BASE, BASE, b"code", 32)]), "flags 0x8"),
            (
                elf(BASE, 0, &[(BASE, BASE, b"code", 32), (BASE, BASE + 31, b"x", 1)]),
                "overlap",
            ),
            (header(0), "neither ELF nor load addresses"),
            (header(ADDRESSES), "truncated"),
            (flat([0x20_0000, 0x20_0001, 0, 0, 0x20_0000]), "before its load address"),
            (flat([0x20_0001, 0x20_0000, 0, 0, 0x20_0000]), "before its load address"),
            (flat([0x20_0000, 0x20_0000, 0x10_0000, 0, 0x20_0000]), "backwards"),
            (flat([0x20_0000, 0x20_0000, 0x30_0000, 0, 0x20_0000]), "truncated"),
            (flat([0x20_0000, 0x20_0000, 0, 0x10_0000, 0x20_0000]), "bss"),
        ] {
            let (input, error) = load(&memory, &boot(&image)).unwrap_err();
            assert_eq!(input, Input::Kernel);
            assert!(error.to_string().contains(says), "{says}: {error}");
        }
        load(&memory, &boot(&good)).unwrap();
        for len in 0..good.len() {
            crate::loader::load(&memory, &boot(&good[..len])).unwrap_err();
        }
        let module = vec![1; 3 << 20];
        let (input, error) = load(
            &memory,
            &Boot {
                modules: &[named(&module)],
                ..boot(&good)
            },
        )
        .unwrap_err();
        assert_eq!(input, Input::Module(0));
        assert!(error.to_string().contains("--memory"), "{error}");
    }

    #[test]
    fn the_header_is_found_in_the_first_8192_bytes_alone() {
        for (at, found) in [
            (0, true),
            (4, true),
            (2, false),
            (8180, true),
            (8184, false),
            (8192, false),
        ] {
            let mut image = vec![0; at];
            image.extend(header(0));
            image.resize(9000, 0);
            assert_eq!(find_header(&image), found.then_some(at), "{at}");
        }
    }
}
