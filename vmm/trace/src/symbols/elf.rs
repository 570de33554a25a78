//! Symbols in ELF files: read from a vmlinux, and written for gdb and perf.

use std::collections::{HashMap, HashSet};

use object::{
    Endianness, Object, ObjectKind, ObjectSegment, ObjectSymbol, ObjectSymbolTable, SectionFlags, SectionKind,
    SegmentFlags, SymbolIndex, SymbolKind, elf,
    read::{self, ObjectSection},
    write::elf::{FileHeader, SectionHeader, Sym, Writer},
};

use super::{Symbol, SymbolTable, error::SymbolsError};

/// What is taken from an ELF file.
#[derive(Debug)]
pub struct ElfFile {
    /// At the addresses of the file.
    pub symbols: SymbolTable,
    /// The build ID, hexadecimal.
    pub build_id: Option<String>,
}

fn damaged(error: read::Error) -> SymbolsError {
    SymbolsError::Elf(format!("a damaged ELF file: {error}"))
}

impl ElfFile {
    /// Reads the symbol table.
    ///
    /// # Errors
    /// The file is damaged, or has no symbols.
    pub fn parse(bytes: &[u8]) -> Result<ElfFile, SymbolsError> {
        let file = object::File::parse(bytes).map_err(damaged)?;
        let symbols = read_symbols(&file, 0, None);
        if symbols.is_empty() {
            let hint = " (stripped; a vmlinux with symbols is in the kernel's debug package)";
            return Err(SymbolsError::Empty { hint });
        }
        let build_id = file.build_id().map_err(damaged)?;
        let hex = |id: &[u8]| id.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(ElfFile {
            symbols: symbols.sorted(),
            build_id: build_id.map(hex),
        })
    }

    /// Reads the symbols of a program whose first page is at an address, or where the file says; they are said to be of `name`.
    ///
    /// # Errors
    /// The file is damaged, or has no symbols; nobody says where it is.
    pub fn program(bytes: &[u8], at: Option<u64>, name: &str) -> Result<SymbolTable, SymbolsError> {
        if !bytes.starts_with(b"\x7fELF") {
            return Err(SymbolsError::Elf("no ELF file".into()));
        }
        let file = object::File::parse(bytes).map_err(damaged)?;
        let first = file.segments().map(|segment| segment.address()).min().unwrap_or(0) & !0xfff;
        let slide = match (at, file.kind()) {
            (Some(at), _) => at.wrapping_sub(first),
            (None, ObjectKind::Executable) => 0,
            (None, _) => {
                let why = "position-independent: say where its first mapping is, as /proc/PID/maps in the guest does, with ,at=ADDRESS";
                return Err(SymbolsError::Elf(why.into()));
            }
        };
        let symbols = read_symbols(&file, slide, Some(name));
        if symbols.is_empty() {
            let hint = " (stripped; take the file before it was)";
            return Err(SymbolsError::Empty { hint });
        }
        Ok(symbols.sorted())
    }
}

/// A program or a shared library, as processes map it.
#[derive(Debug)]
pub struct ProgramFile {
    /// Its functions, at the addresses that it is linked to.
    pub symbols: SymbolTable,
    /// The build ID, hexadecimal.
    pub build_id: Option<String>,
    /// It has more than the symbols for linking.
    pub is_whole: bool,
    segments: Vec<Segment>,
}

/// What is loaded of a file.
#[derive(Clone, Copy, Debug)]
struct Segment {
    offset: u64,
    len: u64,
    address: u64,
    code: bool,
}

impl ProgramFile {
    /// Reads the functions of a file, which are said to be of `name`: its symbol table, or else the symbols for linking; and the entries of its
    /// procedure linkage table as `puts@plt`.
    ///
    /// # Errors
    /// The file is damaged, or is no ELF file.
    pub fn parse(bytes: &[u8], name: &str) -> Result<ProgramFile, SymbolsError> {
        if !bytes.starts_with(b"\x7fELF") {
            return Err(SymbolsError::Elf("no ELF file".into()));
        }
        let file = object::File::parse(bytes).map_err(damaged)?;
        let mut symbols = read_symbols(&file, 0, Some(name));
        let is_whole = !symbols.is_empty();
        if !is_whole {
            add_symbols(&mut symbols, &file, file.dynamic_symbols(), 0, Some(name));
        }
        add_linkage_table(&mut symbols, &file, name);
        let segments = file.segments().map(|segment| {
            let (offset, len) = segment.file_range();
            let code = match segment.flags() {
                SegmentFlags::Elf { p_flags, .. } => p_flags.0 & elf::PF_X.0 != 0,
                _ => false,
            };
            Segment {
                offset,
                len,
                address: segment.address(),
                code,
            }
        });
        let hex = |id: &[u8]| id.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(ProgramFile {
            segments: segments.collect(),
            build_id: file.build_id().map_err(damaged)?.map(hex),
            symbols: symbols.sorted(),
            is_whole,
        })
    }

    /// Takes the functions of another file of the same program, which has been kept apart from its code. Those that have a name already keep it:
    /// it is the one that the program offers to others.
    #[must_use]
    pub fn with_symbols_of(mut self, other: &ProgramFile) -> ProgramFile {
        let known: HashSet<u64> = (0..self.symbols.functions())
            .filter_map(|n| Some(self.symbols.function(n)?.address))
            .collect();
        for symbol in other.symbols.iter().filter(|symbol| !known.contains(&symbol.address)) {
            let Symbol {
                address,
                size,
                kind,
                name,
                module,
            } = symbol;
            self.symbols.add_sized(address, size, kind, name, module);
        }
        self.symbols = self.symbols.sorted();
        self.is_whole = other.is_whole;
        self
    }

    /// A file of symbols alone does not tell where in the program's file its code is. A program has one segment of code, and `offset` is
    /// where the first mapping of it begins in the file.
    #[must_use]
    pub fn with_code_at(mut self, offset: u64) -> ProgramFile {
        let first = self.segments.iter().find(|segment| segment.code);
        self.segments = first
            .map(|segment| Segment {
                offset,
                len: u64::MAX - offset,
                address: segment.address & !0xfff,
                code: true,
            })
            .into_iter()
            .collect();
        self
    }

    /// The address to which a byte of the file is linked, and from where to where in the file that holds.
    pub fn address(&self, offset: u64) -> Option<(u64, std::ops::Range<u64>)> {
        let inside = |segment: &&Segment| offset.checked_sub(segment.offset).is_some_and(|at| at < segment.len);
        // Pages at the border of two segments are mapped twice: what is executed is code.
        let found = self.segments.iter().filter(inside).max_by_key(|segment| segment.code)?;
        let address = found.address.wrapping_add(offset - found.offset);
        Some((address, found.offset..found.offset.saturating_add(found.len)))
    }

    /// Where in the file an address is.
    pub fn offset(&self, address: u64) -> Option<u64> {
        let inside = |segment: &&Segment| address.checked_sub(segment.address).is_some_and(|at| at < segment.len);
        let found = self.segments.iter().filter(inside).max_by_key(|segment| segment.code)?;
        Some(found.offset.wrapping_add(address - found.address))
    }
}

/// Adds `name@plt` for each entry of the procedure linkage table. System V ABI, AMD64 supplement, 5.2.5 "Procedure Linkage Table": entries
/// of 16 bytes behind a first one of the same size, in the order of the relocations of their slots.
fn add_linkage_table(symbols: &mut SymbolTable, file: &object::File<'_>, module: &str) {
    const ENTRY: u64 = 16;
    const MOST: usize = 1 << 16;
    let section = |name| {
        file.section_by_name(name)
            .map(|section| (section.address(), section.size()))
    };
    // With indirect-branch tracking, calls go to a table of its own, which has no first entry.
    let (mut at, end) = match (section(".plt.sec"), section(".plt")) {
        (Some((at, len)), _) => (at, at.saturating_add(len)),
        (None, Some((at, len))) => (at.saturating_add(ENTRY), at.saturating_add(len)),
        (None, None) => return,
    };
    let slots = file
        .section_by_name(".rela.plt")
        .and_then(|section| section.data().ok());
    let Some((slots, table)) = slots.zip(file.dynamic_symbol_table()) else {
        return;
    };
    // `Elf64_Rela`: the slot's address, its symbol and kind, an addend.
    for slot in slots.chunks_exact(24).take(MOST) {
        let word = |at: usize| {
            slot[at..at + 8]
                .iter()
                .rev()
                .fold(0, |value, byte| value << 8 | u64::from(*byte))
        };
        if at >= end {
            break;
        }
        let symbol = table.symbol_by_index(SymbolIndex((word(8) >> 32) as usize));
        let name = symbol.as_ref().ok().and_then(|symbol| symbol.name().ok());
        let name = match name {
            Some(name) if !name.is_empty() => format!("{name}@plt"),
            // Of a function that is chosen when the program is loaded.
            _ => format!("*ABS*+{:#x}@plt", word(16)),
        };
        symbols.add_sized(at, ENTRY, b't', &name, Some(module));
        at += ENTRY;
    }
}

fn read_symbols(file: &object::File<'_>, slide: u64, module: Option<&str>) -> SymbolTable {
    let mut symbols = SymbolTable::new();
    add_symbols(&mut symbols, file, file.symbols(), slide, module);
    symbols
}

fn add_symbols<'a>(
    symbols: &mut SymbolTable,
    file: &object::File<'a>,
    found: impl Iterator<Item = impl ObjectSymbol<'a>>,
    slide: u64,
    module: Option<&str>,
) {
    let kinds: HashMap<usize, u8> = file
        .sections()
        .map(|section| {
            // A file of symbols alone has sections of code without their bytes.
            let executable = match section.flags() {
                SectionFlags::Elf { sh_flags, .. } => sh_flags.0 & elf::SHF_EXECINSTR.0 != 0,
                _ => false,
            };
            let kind = match section.kind() {
                _ if executable => b't',
                SectionKind::Text => b't',
                SectionKind::ReadOnlyData | SectionKind::ReadOnlyString => b'r',
                SectionKind::UninitializedData => b'b',
                _ => b'd',
            };
            (section.index().0, kind)
        })
        .collect();
    for symbol in found {
        let (Ok(name), Some(section)) = (symbol.name(), symbol.section_index()) else {
            continue;
        };
        if name.is_empty() || matches!(symbol.kind(), SymbolKind::Section | SymbolKind::File) {
            continue;
        }
        let kind = kinds.get(&section.0).copied().unwrap_or(b'd');
        let kind = match symbol {
            ref weak if weak.is_weak() => b'W',
            ref global if global.is_global() => kind.to_ascii_uppercase(),
            _ => kind,
        };
        symbols.add_sized(symbol.address().wrapping_add(slide), symbol.size(), kind, name, module);
    }
}

/// A section of the file that is written: addresses of one kind that lie together.
struct Part {
    name: String,
    start: u64,
    end: u64,
    code: bool,
}

/// The table is one of a kernel for 64-bit CPUs: those live in the upper half.
fn is_64(table: &SymbolTable) -> bool {
    table.iter().any(|symbol| symbol.address >> 63 == 1)
}

/// Sections for what the symbols are of: the kernel's code and data, each module's.
fn parts(table: &SymbolTable) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    // The lowest that a 32-bit kernel can be configured to live at is 1 GiB.
    let lowest = if is_64(table) { 1 << 63 } else { 1 << 30 };
    for symbol in table.iter().filter(|symbol| symbol.address >= lowest) {
        let code = matches!(symbol.kind.to_ascii_lowercase(), b't' | b'w' | b'i');
        let end = symbol.address.saturating_add(symbol.size.max(1));
        let name = match symbol.module {
            None => if code { ".text" } else { ".data" }.to_string(),
            Some(module) => format!(".{}.{module}", if code { "text" } else { "data" }),
        };
        match parts.last_mut() {
            Some(last) if last.name == name && symbol.address - last.start < 1 << 30 => last.end = last.end.max(end),
            _ => parts.push(Part {
                name,
                start: symbol.address,
                end,
                code,
            }),
        }
    }
    // The last symbol of a part has no size: it goes on to the next part, but not far.
    for n in 0..parts.len() {
        let next = parts.get(n + 1).map_or(u64::MAX, |next| next.start);
        let round = parts[n].end.saturating_add(0xfff) & !0xfff;
        parts[n].end = parts[n].end.max(round.min(next));
    }
    parts
}

/// A name up to a zero: what a list of symbols has behind it cannot be written.
fn until_nul(name: &str) -> &[u8] {
    name.split('\0').next().unwrap_or_default().as_bytes()
}

/// An ELF file, of the kernel's own class, with the kernel's symbols at the addresses they have, without its code: what gdb takes with `symbol-file` and perf
/// with `--vmlinux`. Symbols below the kernel's half (per-CPU offsets) are absolute.
///
/// # Errors
/// The table is too large for the format.
pub fn write_elf(table: &SymbolTable, build_id: Option<&str>) -> Result<Vec<u8>, object::write::Error> {
    let mut buffer = Vec::new();
    let wide = is_64(table);
    let mut writer = Writer::new(Endianness::Little, wide, &mut buffer);
    let parts = parts(table);
    let note = build_id.and_then(note);
    // First everything is counted, then it is written in the same order.
    writer.reserve_file_header();
    let note_at = note.as_ref().map(|note| writer.reserve(note.len() as u64, 4));
    writer.reserve_null_section_index();
    let note_name = note.as_ref().map(|_| {
        writer.reserve_section_index();
        writer.add_section_name(b".note.gnu.build-id")
    });
    let sections: Vec<_> = parts
        .iter()
        .map(|part| {
            (
                writer.add_section_name(until_nul(&part.name)),
                writer.reserve_section_index(),
            )
        })
        .collect();
    writer.reserve_symtab_section_index();
    writer.reserve_strtab_section_index();
    writer.reserve_shstrtab_section_index();
    writer.reserve_null_symbol_index();
    // Local symbols come first.
    let local = |symbol: &Symbol<'_>| symbol.kind.is_ascii_lowercase() && !matches!(symbol.kind, b'w' | b'v');
    let (locals, globals): (Vec<_>, Vec<_>) = table.iter().partition(local);
    let mut symbols = Vec::with_capacity(table.len());
    for symbol in locals.iter().chain(&globals) {
        symbols.push((symbol, writer.add_string(until_nul(symbol.name))));
        writer.reserve_symbol_index(None);
    }
    writer.reserve_symtab();
    writer.reserve_strtab()?;
    writer.reserve_shstrtab()?;
    writer.reserve_section_headers();

    writer.write_file_header(&FileHeader {
        os_abi: elf::ELFOSABI_NONE,
        abi_version: 0,
        e_type: elf::ET_EXEC,
        e_machine: if wide { elf::EM_X86_64 } else { elf::EM_386 },
        e_entry: table.address("_text").unwrap_or(0),
        e_flags: elf::FileFlags(0),
    })?;
    if let Some(note) = &note {
        writer.write_align(4);
        writer.write(note);
    }
    writer.write_null_symbol();
    for (symbol, name) in symbols {
        let code = matches!(symbol.kind.to_ascii_lowercase(), b't' | b'w' | b'i');
        let binding = match symbol.kind {
            b'w' | b'W' | b'v' | b'V' => elf::STB_WEAK,
            kind if kind.is_ascii_uppercase() => elf::STB_GLOBAL,
            _ => elf::STB_LOCAL,
        };
        let kind = if code { elf::STT_FUNC } else { elf::STT_OBJECT };
        let part = parts
            .partition_point(|part| part.start <= symbol.address)
            .checked_sub(1);
        let section = part.filter(|n| symbol.address < parts[*n].end).map(|n| sections[n].1);
        let st_name = writer.string_offset(Some(name));
        writer.write_symbol(&Sym {
            st_name,
            section: section.map(|index| index.0),
            st_info: elf::SymbolInfo::new(binding, kind),
            st_other: elf::STV_DEFAULT.into(),
            st_shndx: if section.is_none() {
                elf::SHN_ABS
            } else {
                elf::SHN_UNDEF
            },
            st_value: symbol.address,
            st_size: symbol.size,
        });
    }
    writer.write_strtab();
    writer.write_shstrtab();
    writer.write_null_section_header();
    if let (Some(note), Some(at), Some(name)) = (&note, note_at, note_name) {
        let sh_name = writer.section_name_offset(Some(name));
        writer.write_section_header(&SectionHeader {
            sh_name,
            sh_type: elf::SHT_NOTE,
            sh_flags: elf::SectionFlags(0),
            sh_addr: 0,
            sh_offset: at,
            sh_size: note.len() as u64,
            sh_link: 0,
            sh_info: 0,
            sh_addralign: 4,
            sh_entsize: 0,
        });
    }
    for (part, (name, _)) in parts.iter().zip(&sections) {
        let sh_name = writer.section_name_offset(Some(*name));
        let access = if part.code { elf::SHF_EXECINSTR } else { elf::SHF_WRITE };
        writer.write_section_header(&SectionHeader {
            sh_name,
            sh_type: elf::SHT_NOBITS,
            sh_flags: elf::SHF_ALLOC | access,
            sh_addr: part.start,
            sh_offset: 0,
            sh_size: part.end - part.start,
            sh_link: 0,
            sh_info: 0,
            sh_addralign: 1,
            sh_entsize: 0,
        });
    }
    writer.write_symtab_section_header(locals.len() as u32 + 1);
    writer.write_strtab_section_header();
    writer.write_shstrtab_section_header();
    drop(writer);
    Ok(buffer)
}

/// An ELF note of type `NT_GNU_BUILD_ID`.
fn note(build_id: &str) -> Option<Vec<u8>> {
    let bytes: Option<Vec<u8>> = (0..build_id.len() / 2)
        .map(|n| u8::from_str_radix(build_id.get(2 * n..2 * n + 2)?, 16).ok())
        .collect();
    let bytes = bytes?;
    let mut note = Vec::new();
    for word in [4, bytes.len() as u32, elf::NT_GNU_BUILD_ID.0] {
        note.extend_from_slice(&word.to_le_bytes());
    }
    note.extend_from_slice(b"GNU\0");
    note.extend_from_slice(&bytes);
    Some(note)
}
