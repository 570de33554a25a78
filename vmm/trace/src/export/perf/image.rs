//! Files of a process's code, as perf reads code and names from: ELF files whose addresses are the places in the file.
//!
//! A page that changes is a page more of the file, and the functions in it have symbols there, too.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Seek, SeekFrom, Write},
    path::PathBuf,
};

use super::record::Rec;
use crate::directory::format::PAGE;

// Of the ELF-64 object file format.
const FILE_HEADER: u16 = 64;
const PROGRAM_HEADER: u16 = 56;
const SECTION_HEADER: u16 = 64;
const SYMBOL: u64 = 24;
const PT_LOAD: u32 = 1;
const READ_EXECUTE: u32 = 5;
const SECTIONS: u16 = 5;
/// `.text`, which all symbols are in.
const TEXT: u16 = 1;
const STRINGS: u32 = 3;
const NAMES: u16 = 4;
/// Symbols that a file has at most, and the bytes of their names.
const MOST: usize = 1 << 22;
const MOST_TEXT: usize = 256 << 20;

/// A file under way.
#[derive(Debug)]
pub struct Image {
    path: PathBuf,
    /// Pages, with the one of the headers.
    pages: u64,
    symbols: Vec<u8>,
    strings: Vec<u8>,
}

impl Image {
    /// Begins one.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn create(path: PathBuf) -> io::Result<Image> {
        let file = File::create_new(&path)?;
        file.set_len(PAGE as u64)?;
        Ok(Image {
            path,
            pages: 1,
            // The first symbol and the first string are those of nothing.
            symbols: vec![0; SYMBOL as usize],
            strings: vec![0],
        })
    }

    /// Appends pages; gives where they begin in the file.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn append(&mut self, pages: &[[u8; PAGE]]) -> io::Result<u64> {
        let at = self.pages * PAGE as u64;
        let mut file = BufWriter::new(OpenOptions::new().append(true).open(&self.path)?);
        for page in pages {
            file.write_all(page)?;
        }
        file.flush()?;
        self.pages += pages.len() as u64;
        Ok(at)
    }

    /// Names a part of the file.
    pub fn name(&mut self, at: u64, size: u64, name: &str) {
        // STT_FUNC, STB_GLOBAL.
        const FUNCTION: u8 = 0x12;
        let name = name.split('\0').next().unwrap_or_default();
        if self.symbols.len() >= MOST * SYMBOL as usize || self.strings.len() + name.len() >= MOST_TEXT {
            return;
        }
        let mut symbol = Rec(Vec::new());
        symbol.u32(self.strings.len() as u32);
        symbol.0.extend([FUNCTION, 0]);
        symbol.u16(TEXT);
        symbol.u64(at);
        symbol.u64(size);
        self.symbols.extend(symbol.0);
        self.strings.extend(name.bytes());
        self.strings.push(0);
    }

    /// Writes the symbols and the headers.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn finish(self) -> io::Result<()> {
        let names = b"\0.text\0.symtab\0.strtab\0.shstrtab\0";
        let end = self.pages * PAGE as u64;
        let (symbols, strings) = (self.symbols.len() as u64, self.strings.len() as u64);
        let names_at = end + symbols + strings;
        let headers_at = (names_at + names.len() as u64).next_multiple_of(8);

        let mut sections = Rec(vec![0; SECTION_HEADER.into()]);
        let mut section = |name: u32, kind: u32, flags: u64, at: u64, len: u64, link: u32, info: u32, entry: u64| {
            let address = if flags == 0 { 0 } else { at };
            sections.u32(name);
            sections.u32(kind);
            for value in [flags, address, at, len] {
                sections.u64(value);
            }
            sections.u32(link);
            sections.u32(info);
            sections.u64(8);
            sections.u64(entry);
        };
        // SHT_PROGBITS with SHF_ALLOC and SHF_EXECINSTR, SHT_SYMTAB, SHT_STRTAB twice.
        section(1, 1, 6, PAGE as u64, end - PAGE as u64, 0, 0, 0);
        section(7, 2, 0, end, symbols, STRINGS, 1, SYMBOL);
        section(15, 3, 0, end + symbols, strings, 0, 0, 0);
        section(23, 3, 0, names_at, names.len() as u64, 0, 0, 0);

        let mut head = Rec(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec());
        // ET_DYN for x86-64.
        head.u16(3);
        head.u16(62);
        head.u32(1);
        for value in [0, u64::from(FILE_HEADER), headers_at] {
            head.u64(value);
        }
        head.u32(0);
        for value in [FILE_HEADER, PROGRAM_HEADER, 1, SECTION_HEADER, SECTIONS, NAMES] {
            head.u16(value);
        }
        head.u32(PT_LOAD);
        head.u32(READ_EXECUTE);
        for value in [0, 0, 0, end, end, PAGE as u64] {
            head.u64(value);
        }

        let mut file = OpenOptions::new().write(true).open(&self.path)?;
        file.write_all(&head.0)?;
        file.seek(SeekFrom::Start(end))?;
        let mut file = BufWriter::new(file);
        file.write_all(&self.symbols)?;
        file.write_all(&self.strings)?;
        file.write_all(names)?;
        let pad = headers_at - names_at - names.len() as u64;
        file.write_all(&[0; 8][..pad as usize])?;
        file.write_all(&sections.0)?;
        file.flush()
    }
}

#[cfg(test)]
#[path = "image_test.rs"]
mod tests;
