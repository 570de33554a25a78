//! Symbols in ELF files: read from a vmlinux, and written for gdb and perf.

use std::collections::HashMap;

use object::{
    Endianness, Object, ObjectKind, ObjectSegment, ObjectSymbol, SectionKind, SymbolKind, elf,
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

fn read_symbols(file: &object::File<'_>, slide: u64, module: Option<&str>) -> SymbolTable {
    let kinds: HashMap<usize, u8> = file
        .sections()
        .map(|section| {
            let kind = match section.kind() {
                SectionKind::Text => b't',
                SectionKind::ReadOnlyData | SectionKind::ReadOnlyString => b'r',
                SectionKind::UninitializedData => b'b',
                _ => b'd',
            };
            (section.index().0, kind)
        })
        .collect();
    let mut symbols = SymbolTable::new();
    for symbol in file.symbols() {
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
    symbols
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
