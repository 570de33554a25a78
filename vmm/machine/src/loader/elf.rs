//! ELF64 kernels: a vmlinux, or another kernel with a PVH note, uncompressed.
//!
//! A kernel that has the PVH note (`XEN_ELFNOTE_PHYS32_ENTRY`) is entered as that asks: flat 32-bit mode, EBX at a
//! `struct hvm_start_info` (Xen docs/misc/pvh.pandoc, "x86/HVM direct boot ABI"; xen/include/public/arch-x86/hvm/start_info.h,
//! version 1). A Linux kernel without it is entered at the file's entry point by the 64-bit Linux boot protocol.
//!
//! ```text
//! 06000  PVH: hvm_start_info, hvm_modlist_entry, hvm_memmap_table
//! 07000  and so on: as for a bzImage
//! ```

use std::ops::Range;

use linux_loader::loader::{
    bootparam::setup_header,
    start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info},
};

use super::{
    e820,
    image::{Boot, Entry, Input, LoadError, RAISE, le16, le32, size_text, too_big},
    initrd::{check_parts, joined_len, last_module, write_joined},
    linux,
};
use crate::{
    loader::image::DEFAULT_LINUX_CMDLINE,
    memory::{Memory, NotRam},
};

/// Where the PVH information is.
const START_INFO: u64 = 0x6000;
const MEMORY_MAP: u64 = START_INFO + size_of::<hvm_start_info>() as u64;

/// `XEN_HVM_START_MAGIC_VALUE`: "xEn3" with the 0x80 bit of the "E" set.
const START_MAGIC: u32 = 0x336e_c578;
/// `XEN_ELFNOTE_PHYS32_ENTRY`.
const PHYS32_ENTRY: u32 = 18;
const NOTE_OWNER: &[u8] = b"Xen\0";

/// What every Linux kernel has in it, once it is unpacked.
const LINUX_BANNER: &[u8] = b"Linux version ";
/// COMMAND_LINE_SIZE of Linux on x86, less the NUL.
const LINUX_CMDLINE_MAX: u64 = 2047;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const ET_EXEC: u16 = 2;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;

/// True if the file is ELF with 64-bit structures.
pub fn is_elf64(kernel: &[u8]) -> bool {
    kernel.starts_with(b"\x7fELF\x02")
}

/// True if it can be entered in one of the ways that are known here.
pub fn is_loadable(kernel: &[u8]) -> bool {
    Image::parse(kernel).is_ok()
}

/// A part of the image: bytes of the file, then zeroes, at a physical address.
#[derive(Clone, Debug)]
struct Segment {
    file: Range<usize>,
    memory: Range<u64>,
}

/// How an image is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// In 32-bit mode, by the note.
    Pvh(u32),
    /// In 64-bit mode, by the Linux boot protocol.
    Linux64(u64),
}

#[derive(Clone, Debug)]
struct Image {
    segments: Vec<Segment>,
    way: Way,
    linux: bool,
}

fn damaged(text: impl Into<String>) -> LoadError {
    LoadError::DamagedKernel(text.into())
}

fn le64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

impl Image {
    fn parse(kernel: &[u8]) -> Result<Self, LoadError> {
        let have = kernel.len() as u64;
        let cut = |what, need| LoadError::Truncated { what, need, have };
        let header = || cut("the ELF header", HEADER as u64);
        if kernel.len() < HEADER {
            return Err(header());
        }
        // EI_DATA 1 is little-endian.
        if kernel[5] != 1 || le16(kernel, 18) != Some(EM_X86_64) {
            return Err(LoadError::UnusableKernel("an ELF64 file, but not for x86-64".into()));
        }
        if le16(kernel, 16) != Some(ET_EXEC) {
            return Err(LoadError::UnusableKernel(
                "an ELF file that is not an executable".into(),
            ));
        }
        let entry = le64(kernel, 24).ok_or_else(header)?;
        let table = le64(kernel, 32).ok_or_else(header)?;
        let stride = le16(kernel, 54).ok_or_else(header)?;
        let count = le16(kernel, 56).ok_or_else(header)?;
        if count > 0 && usize::from(stride) < PROGRAM_HEADER {
            return Err(damaged(format!("ELF program headers of {stride} bytes")));
        }
        let end = table.saturating_add(u64::from(stride) * u64::from(count));
        if end > have {
            return Err(cut("the table of ELF program headers", end));
        }
        let (mut segments, mut note, mut physical) = (Vec::new(), None, entry);
        for n in 0..usize::from(count) {
            // In the table's range, which is in the file.
            let at = table as usize + n * usize::from(stride);
            let field = |offset: usize| le64(kernel, at + offset).unwrap_or(0);
            let kind = le32(kernel, at).unwrap_or(0);
            let (offset, virtual_start, start, file_size, size) =
                (field(8), field(16), field(24), field(32), field(40));
            if kind != PT_NOTE && (kind != PT_LOAD || size == 0) {
                continue;
            }
            let file_end = offset.saturating_add(file_size);
            if file_end > have {
                let what = if kind == PT_NOTE {
                    "an ELF note"
                } else {
                    "an ELF segment"
                };
                return Err(cut(what, file_end));
            }
            let file = offset as usize..file_end as usize;
            if kind == PT_NOTE {
                note = note.or(pvh_note(&kernel[file])?);
                continue;
            }
            if file_size > size {
                return Err(damaged(format!(
                    "ELF segment {n} has more bytes in the file than in memory"
                )));
            }
            let Some(memory_end) = start.checked_add(size) else {
                return Err(damaged(format!("ELF segment {n} ends beyond 64 bits")));
            };
            segments.push(Segment {
                file,
                memory: start..memory_end,
            });
            // A kernel may give its entry point as the virtual address that it is linked to run at.
            if entry.checked_sub(virtual_start).is_some_and(|offset| offset < size) {
                physical = start + (entry - virtual_start);
            }
        }
        if segments.is_empty() {
            return Err(damaged("an ELF file without a segment to load"));
        }
        let has_banner = |segment: &Segment| {
            let mut windows = kernel[segment.file.clone()].windows(LINUX_BANNER.len());
            windows.any(|window| window == LINUX_BANNER)
        };
        let linux = segments.iter().any(has_banner);
        let way = match note {
            Some(entry) => Way::Pvh(entry),
            None if linux => Way::Linux64(physical),
            None => {
                return Err(LoadError::UnusableKernel(
                    "an ELF64 file without a PVH note, and no Linux kernel; multiboot takes ELF32".into(),
                ));
            }
        };
        Ok(Image { segments, way, linux })
    }

    /// All segments lie in extended memory below 4 GiB and apart from each other, and the entry point lies in one of them.
    fn check(&self, memory: &Memory) -> Result<u64, LoadError> {
        let mut ranges: Vec<_> = self.segments.iter().map(|s| s.memory.clone()).collect();
        ranges.sort_by_key(|range| range.start);
        for range in &ranges {
            if range.start < e820::EXTENDED_START {
                let text = format!("it loads to {:#x}, below 1 MiB", range.start);
                return Err(LoadError::UnusableKernel(text));
            }
            if range.end > memory.low_end() {
                return Err(too_big("the kernel", range.end, memory));
            }
        }
        if ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return Err(damaged("its segments overlap in memory"));
        }
        let entry = match self.way {
            Way::Pvh(entry) => entry.into(),
            Way::Linux64(entry) => entry,
        };
        if !ranges.iter().any(|range| range.contains(&entry)) {
            return Err(damaged(format!(
                "its entry point {entry:#x} is in none of its segments"
            )));
        }
        Ok(ranges.last().map_or(0, |range| range.end))
    }
}

/// The PVH entry point, if it is among these notes: sizes of name and contents, type, name and contents, each padded to 4 bytes.
fn pvh_note(notes: &[u8]) -> Result<Option<u32>, LoadError> {
    let cut = || damaged("an ELF note runs over the end of its segment");
    let mut at = 0;
    while at + 12 <= notes.len() {
        let field = |n: usize| le32(notes, at + n * 4).map(|value| value as usize).ok_or_else(cut);
        let (name_size, size, kind) = (field(0)?, field(1)?, field(2)?);
        let name = at + 12;
        let contents = name + name_size.next_multiple_of(4);
        let end = contents + size;
        if contents > notes.len() || end > notes.len() {
            return Err(cut());
        }
        if kind == PHYS32_ENTRY as usize && &notes[name..name + name_size] == NOTE_OWNER {
            let entry = match size {
                4 => le32(notes, contents),
                // Linux has it as wide as its own pointers.
                8 => le64(notes, contents).and_then(|entry| u32::try_from(entry).ok()),
                _ => None,
            };
            return match entry {
                Some(entry) => Ok(Some(entry)),
                None => Err(damaged("its PVH note is no 32-bit address")),
            };
        }
        at = end.next_multiple_of(4);
    }
    Ok(None)
}

/// Loads an ELF64 kernel, its command line and its module or initial RAM disk.
pub fn load(memory: &Memory, boot: &Boot) -> Result<Entry, (Input, LoadError)> {
    let kernel_error = |e| (Input::Kernel, e);
    let image = Image::parse(boot.kernel).map_err(kernel_error)?;
    let end = image.check(memory).map_err(kernel_error)?;

    let cmdline = match boot.cmdline {
        Some(cmdline) => cmdline,
        None if image.linux => DEFAULT_LINUX_CMDLINE.as_bytes(),
        None => b"",
    };
    let max = if image.linux {
        LINUX_CMDLINE_MAX
    } else {
        linux::CMDLINE_ROOM - 1
    };
    if cmdline.len() as u64 > max {
        let have = cmdline.len() as u64;
        return Err((Input::Cmdline, LoadError::CmdlineTooLong { have, max }));
    }
    // Linux has one initial RAM disk, of all the parts; any other kernel has its modules one by one.
    let mut modules = ModuleList::default();
    let mut initrd = None;
    if image.linux {
        check_parts(boot.modules)?;
        initrd = joined_len(boot.modules);
        modules.push(initrd, Vec::new());
    } else {
        for module in boot.modules {
            modules.push(Some(module.bytes.len() as u64), module.string());
        }
    }
    // As high as there is RAM below 4 GiB: out of the kernel's way.
    let len = modules.len();
    let at = memory.low_end().checked_sub(len).map(|start| start & !4095);
    let at = at.filter(|at| len == 0 || *at >= end).ok_or_else(|| {
        let error = LoadError::TooBig {
            what: "the initial RAM disk",
            need: size_text(len),
            have: format!("{}M above the kernel", memory.low_end().saturating_sub(end) >> 20),
            advice: RAISE,
        };
        (last_module(boot.modules), error)
    })?;

    let not_ram = |e| kernel_error(LoadError::from(e));
    for segment in &image.segments {
        let bytes = &boot.kernel[segment.file.clone()];
        memory.write(segment.memory.start, bytes).map_err(not_ram)?;
        let bss = segment.memory.start + bytes.len() as u64;
        memory.zero(bss, segment.memory.end - bss).map_err(not_ram)?;
    }
    memory.write(linux::CMDLINE, cmdline).map_err(not_ram)?;
    memory
        .write(linux::CMDLINE + cmdline.len() as u64, &[0])
        .map_err(not_ram)?;
    if image.linux {
        write_joined(memory, at, boot.modules).map_err(not_ram)?;
    } else {
        for (module, start) in boot.modules.iter().zip(modules.starts()) {
            memory.write(at + start, module.bytes).map_err(not_ram)?;
        }
    }
    match image.way {
        Way::Pvh(eip) => {
            let list = modules.write(memory, at).map_err(not_ram)?;
            write_start_info(memory, list, boot.rsdp).map_err(kernel_error)?;
            Ok(Entry::Pvh {
                eip,
                start_info: START_INFO as u32,
            })
        }
        Way::Linux64(rip) => {
            // What a bzImage brings along. "HdrS" is what says that the fields are there.
            let setup = setup_header {
                boot_flag: 0xaa55,
                header: u32::from_le_bytes(*b"HdrS"),
                version: 0x20c,
                loadflags: 1,
                kernel_alignment: 0x20_0000,
                initrd_addr_max: 0x7fff_ffff,
                cmdline_size: LINUX_CMDLINE_MAX as u32,
                ..Default::default()
            };
            linux::write_zero_page(memory, setup, linux::HEADER_END, initrd.map(|len| (at, len)), boot.rsdp)
                .map_err(kernel_error)?;
            linux::write_tables(memory).map_err(kernel_error)?;
            Ok(linux::entry_64(rip))
        }
    }
}

/// Modules as PVH passes them, in one stretch of memory: their contents, each from a page on, then the list of them, then their
/// strings.
#[derive(Debug, Default)]
struct ModuleList {
    modules: Vec<(u64, Vec<u8>)>,
}

impl ModuleList {
    /// One more, if it has a length, with its string.
    fn push(&mut self, len: Option<u64>, string: Vec<u8>) {
        self.modules.extend(len.map(|len| (len, string)));
    }

    /// Where each begins, from the start of the stretch; the last one is where the list is.
    fn starts(&self) -> Vec<u64> {
        let mut starts = vec![0];
        let mut at = 0u64;
        for (n, (len, _)) in self.modules.iter().enumerate() {
            let align = if n + 1 < self.modules.len() { 4096 } else { 8 };
            at = (at + len).next_multiple_of(align);
            starts.push(at);
        }
        starts
    }

    /// How much memory it takes.
    fn len(&self) -> u64 {
        let list = self.starts().last().copied().unwrap_or(0);
        let entry = |(_, string): &(u64, Vec<u8>)| (size_of::<hvm_modlist_entry>() + string.len() + 1) as u64;
        list + self.modules.iter().map(entry).sum::<u64>()
    }

    /// Writes the list and the strings of a stretch that begins at `at`, and gives the list's address and how many it has.
    fn write(&self, memory: &Memory, at: u64) -> Result<Option<(u64, u32)>, NotRam> {
        let starts = self.starts();
        let list = at + starts.last().copied().unwrap_or(0);
        let mut string_at = list + (self.modules.len() * size_of::<hvm_modlist_entry>()) as u64;
        let (mut entries, mut strings) = (Vec::new(), Vec::new());
        for ((size, string), start) in self.modules.iter().zip(starts) {
            let entry = hvm_modlist_entry {
                paddr: at + start,
                size: *size,
                cmdline_paddr: if string.is_empty() { 0 } else { string_at },
                reserved: 0,
            };
            for quad in [entry.paddr, entry.size, entry.cmdline_paddr, entry.reserved] {
                entries.extend(quad.to_le_bytes());
            }
            strings.extend_from_slice(string);
            strings.push(0);
            string_at += string.len() as u64 + 1;
        }
        entries.append(&mut strings);
        memory.write(list, &entries)?;
        Ok((!self.modules.is_empty()).then_some((list, self.modules.len() as u32)))
    }
}

/// The structures of the PVH protocol, all of little-endian integers without gaps.
fn write_start_info(memory: &Memory, modules: Option<(u64, u32)>, rsdp: u64) -> Result<(), LoadError> {
    let map = e820::map(memory);
    let info = hvm_start_info {
        magic: START_MAGIC,
        version: 1,
        flags: 0,
        nr_modules: modules.map_or(0, |(_, count)| count),
        modlist_paddr: modules.map_or(0, |(list, _)| list),
        cmdline_paddr: linux::CMDLINE,
        rsdp_paddr: rsdp,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: map.len() as u32,
        reserved: 0,
    };
    let mut bytes = Vec::new();
    for word in [info.magic, info.version, info.flags, info.nr_modules] {
        bytes.extend(word.to_le_bytes());
    }
    for quad in [
        info.modlist_paddr,
        info.cmdline_paddr,
        info.rsdp_paddr,
        info.memmap_paddr,
    ] {
        bytes.extend(quad.to_le_bytes());
    }
    for word in [info.memmap_entries, info.reserved] {
        bytes.extend(word.to_le_bytes());
    }
    for entry in &map {
        // XEN_HVM_MEMMAP_TYPE_RAM and _RESERVED are E820's numbers.
        let entry = hvm_memmap_table_entry {
            addr: entry.range.start,
            size: entry.range.end - entry.range.start,
            type_: entry.kind as u32,
            reserved: 0,
        };
        bytes.extend(entry.addr.to_le_bytes());
        bytes.extend(entry.size.to_le_bytes());
        bytes.extend(entry.type_.to_le_bytes());
        bytes.extend(entry.reserved.to_le_bytes());
    }
    Ok(memory.write(START_INFO, &bytes)?)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::loader::{
        Module,
        tests::{boot, module},
    };

    const BASE: u64 = 0x10_0000;

    /// An ELF64 file with program headers of (type, virtual, physical, bytes in the file, bytes in memory).
    pub(crate) fn elf(entry: u64, headers: &[(u32, u64, u64, &[u8], u64)]) -> Vec<u8> {
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(HEADER, 0);
        let mut put = |at: usize, data: &[u8]| file[at..at + data.len()].copy_from_slice(data);
        put(16, &ET_EXEC.to_le_bytes());
        put(18, &EM_X86_64.to_le_bytes());
        put(24, &entry.to_le_bytes());
        put(32, &(HEADER as u64).to_le_bytes());
        put(54, &(PROGRAM_HEADER as u16).to_le_bytes());
        put(56, &(headers.len() as u16).to_le_bytes());
        let mut offset = (HEADER + headers.len() * PROGRAM_HEADER) as u64;
        for (kind, virtual_start, start, bytes, size) in headers {
            file.extend(kind.to_le_bytes());
            file.extend(7u32.to_le_bytes());
            for field in [offset, *virtual_start, *start, bytes.len() as u64, *size, 4] {
                file.extend(field.to_le_bytes());
            }
            offset += bytes.len() as u64;
        }
        file.extend(headers.iter().flat_map(|header| header.3.iter().copied()));
        file
    }

    /// A note: owner, type, contents.
    pub(crate) fn note(owner: &[u8], kind: u32, contents: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [owner.len() as u32, contents.len() as u32, kind] {
            bytes.extend(word.to_le_bytes());
        }
        for part in [owner, contents] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    /// A kernel that is entered by its PVH note.
    pub(crate) fn pvh() -> Vec<u8> {
        let notes = [
            note(b"GNU\0", 3, &[7; 20]),
            note(b"Xen\0", 6, b"odd"),
            note(b"Xen\0", 18, &0x10_0002u64.to_le_bytes()),
        ];
        elf(
            0xffff_8000_0000_0000,
            &[
                (PT_LOAD, 0xffff_8000_0000_0000, BASE, b"\x90\x90\xf4", 0x3000),
                (PT_NOTE, 0, 0, &notes.concat(), 0),
            ],
        )
    }

    fn read<const N: usize>(memory: &Memory, gpa: u64) -> [u8; N] {
        let mut bytes = [0; N];
        memory.read(gpa, &mut bytes).unwrap();
        bytes
    }

    // covers: loader/pvh
    #[test]
    fn a_pvh_kernel_gets_its_start_info() {
        let memory = Memory::new(8 << 20).unwrap();
        memory.write(BASE + 3, &[0xff; 16]).unwrap();
        let kernel = pvh();
        let request = Boot {
            modules: &[module(b"any module")],
            cmdline: Some(b"one two"),
            ..boot(&kernel)
        };
        let entry = load(&memory, &request).unwrap();
        assert_eq!(
            entry,
            Entry::Pvh {
                eip: 0x10_0002,
                start_info: 0x6000
            }
        );
        assert_eq!(read::<5>(&memory, BASE), [0x90, 0x90, 0xf4, 0, 0], "bss is zero");
        let word = |at: u64| u32::from_le_bytes(read(&memory, START_INFO + at));
        let quad = |at: u64| u64::from_le_bytes(read(&memory, START_INFO + at));
        assert_eq!(
            (word(0), word(4), word(12)),
            (0x336e_c578, 1, 1),
            "magic, version, modules"
        );
        assert_eq!((quad(24), quad(32)), (linux::CMDLINE, 0xe0000), "command line, RSDP");
        assert_eq!(&read::<8>(&memory, quad(24)), b"one two\0");
        let list = quad(16) - START_INFO;
        assert_eq!((quad(list), quad(list + 8)), ((8 << 20) - 4096, 10));
        assert_eq!(&read::<10>(&memory, quad(list)), b"any module");
        let map = quad(40) - START_INFO;
        assert_eq!(word(48), 4);
        assert_eq!((quad(map), quad(map + 8), word(map + 16)), (0, e820::EBDA_START, 1));
        assert_eq!((quad(map + 72), quad(map + 80), word(map + 88)), (1 << 20, 7 << 20, 1));

        let named = |bytes, name, words| Module { bytes, name, words };
        let request = Boot {
            modules: &[named(b"one", b"a", b"b c"), named(&[7; 9000], b"d", b"")],
            ..boot(&kernel)
        };
        load(&memory, &request).unwrap();
        assert_eq!(word(12), 2, "modules");
        let list = quad(16) - START_INFO;
        let (first, second) = (quad(list), quad(list + 32));
        assert_eq!((quad(list + 8), quad(list + 40)), (3, 9000));
        assert_eq!((first % 4096, second % 4096), (0, 0));
        assert_eq!(&read::<3>(&memory, first), b"one");
        assert_eq!(read::<9000>(&memory, second), [7; 9000]);
        assert_eq!(&read::<6>(&memory, quad(list + 16)), b"a b c\0");
        assert_eq!(&read::<2>(&memory, quad(list + 48)), b"d\0");

        let alone = load(&memory, &boot(&kernel)).unwrap();
        assert_eq!((alone, word(12), quad(16)), (entry, 0, 0), "no module");
        assert_eq!(
            &read::<1>(&memory, linux::CMDLINE),
            b"\0",
            "no default for what is no Linux"
        );
    }

    // covers: loader/elf64
    #[test]
    fn a_linux_kernel_without_the_note_is_entered_in_64_bit_mode() {
        let memory = Memory::new(8 << 20).unwrap();
        let text = b"\xf4 Linux version 7.0";
        for (entry, found) in [(BASE + 1, BASE + 1), (0xffff_8000_0000_0010, BASE + 0x10)] {
            let kernel = elf(entry, &[(PT_LOAD, 0xffff_8000_0000_0000, BASE, text, 0x1000)]);
            let Ok(Entry::Linux64 { rip, boot_params, .. }) = load(&memory, &boot(&kernel)) else {
                panic!("{entry:#x}");
            };
            assert_eq!(rip, found);
            assert_eq!(&read::<4>(&memory, boot_params + 0x202), b"HdrS");
            assert_eq!(read::<1>(&memory, boot_params + 0x1e8), [4], "lines of the memory map");
            assert_eq!(&read::<14>(&memory, linux::CMDLINE), b"console=ttyS0\0");
        }
    }

    // covers: loader/bad-elf
    #[test]
    fn bad_elf_files_are_refused_with_the_reason() {
        let memory = Memory::new(8 << 20).unwrap();
        let good = pvh();
        load(&memory, &boot(&good)).unwrap();
        let patched = |at: usize, bytes: &[u8]| {
            let mut file = good.clone();
            file[at..at + bytes.len()].copy_from_slice(bytes);
            file
        };
        let hlt = &b"\xf4"[..];
        let load_at = |start, size| (PT_LOAD, start, start, hlt, size);
        let with_note = |contents: &[u8], kind| {
            let notes = note(b"Xen\0", kind, contents);
            elf(BASE, &[load_at(BASE, 1), (PT_NOTE, 0, 0, &notes, 0)])
        };
        let segment = HEADER;
        for (kernel, says) in [
            (good[..63].to_vec(), "truncated: the ELF header"),
            (good[..100].to_vec(), "truncated: the table"),
            (good[..good.len() - 1].to_vec(), "truncated: an ELF note"),
            (patched(5, &[2]), "not for x86-64"),
            (patched(18, &[3]), "not for x86-64"),
            (patched(16, &[3]), "not an executable"),
            (patched(32, &u64::MAX.to_le_bytes()), "truncated: the table"),
            (patched(54, &[8]), "program headers of 8 bytes"),
            (
                patched(segment + 8, &u64::MAX.to_le_bytes()),
                "truncated: an ELF segment",
            ),
            (patched(segment + 40, &[1, 0]), "more bytes in the file"),
            (patched(segment + 24, &[0xff; 8]), "beyond 64 bits"),
            (patched(segment + 24, &[0, 0, 0, 0, 1]), "memory up to 4097M"),
            (patched(segment + 24, &0x8_0000u64.to_le_bytes()), "below 1 MiB"),
            (patched(segment + 40, &(9u64 << 20).to_le_bytes()), "memory up to 10M"),
            (elf(BASE, &[]), "without a segment"),
            (elf(BASE, &[load_at(BASE, 1)]), "without a PVH note"),
            (with_note(&0x10_0000u32.to_le_bytes(), 17), "without a PVH note"),
            (with_note(&0x20_0000u32.to_le_bytes(), 18), "in none of its segments"),
            (with_note(&u64::MAX.to_le_bytes(), 18), "no 32-bit address"),
            (with_note(&[1, 2], 18), "no 32-bit address"),
            (
                elf(BASE, &[load_at(BASE, 1), (PT_NOTE, 0, 0, &[0xff; 12], 0)]),
                "runs over the end",
            ),
            (
                elf(
                    BASE,
                    &[
                        load_at(BASE, 0x2000),
                        load_at(BASE + 0x1fff, 1),
                        (PT_NOTE, 0, 0, &note(b"Xen\0", 18, &[0, 0, 0x10, 0]), 0),
                    ],
                ),
                "overlap",
            ),
        ] {
            let (input, error) = load(&memory, &boot(&kernel)).unwrap_err();
            assert_eq!(input, Input::Kernel);
            assert!(error.to_string().contains(says), "{says}: {error}");
        }
        let big = vec![0; 8 << 20];
        let request = Boot {
            modules: &[module(&big)],
            ..boot(&good)
        };
        assert_eq!(load(&memory, &request).unwrap_err().0, Input::Module(0));
    }
}
