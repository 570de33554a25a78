//! Symbols from a file of the user's: a vmlinux or any other ELF, a System.map, a copy of `/proc/kallsyms`.

use std::path::Path;

use super::{ElfFile, SymbolTable, error::SymbolsError};
use crate::regular;

/// A kernel with all that a debugger wants has some gigabyte.
const LONGEST: u64 = 4 << 30;

/// What the kernel that was traced is known by.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origin<'a> {
    /// The build ID, hexadecimal.
    pub build_id: Option<&'a str>,
    /// KASLR's slide.
    pub slide: Option<u64>,
    /// The symbols of its own.
    pub symbols: Option<&'a SymbolTable>,
}

/// Symbols as a file has them.
#[derive(Debug)]
pub struct SymbolFile {
    /// Not moved.
    pub symbols: SymbolTable,
    /// The build ID, hexadecimal.
    pub build_id: Option<String>,
}

impl SymbolFile {
    /// Reads a file of any of the kinds.
    ///
    /// # Errors
    /// It cannot be read, or is of no kind that is known.
    pub fn read(path: &Path) -> Result<SymbolFile, SymbolsError> {
        let bytes = regular::read(regular::open(path)?, LONGEST)?;
        if bytes.starts_with(b"\x7fELF") {
            let ElfFile { symbols, build_id } = ElfFile::parse(&bytes)?;
            return Ok(SymbolFile { symbols, build_id });
        }
        let symbols = SymbolTable::parse(&String::from_utf8_lossy(&bytes))?;
        Ok(SymbolFile {
            symbols,
            build_id: None,
        })
    }

    /// The functions of a user's program, an ELF file, whose first mapping is at an address, or where the file itself says.
    ///
    /// # Errors
    /// It cannot be read, is no ELF file, has no symbols, or does not say itself where it is.
    pub fn read_program(path: &Path, at: Option<u64>, name: &str) -> Result<SymbolTable, SymbolsError> {
        ElfFile::program(&regular::read(regular::open(path)?, LONGEST)?, at, name)
    }

    /// The symbols where the traced kernel has them.
    ///
    /// The slide is the trace's, or is found by comparing with the symbols that the trace has of its own.
    ///
    /// # Errors
    /// They are another kernel's.
    pub fn resolve(self, origin: Origin<'_>) -> Result<SymbolTable, SymbolsError> {
        if let (Some(file), Some(trace)) = (&self.build_id, origin.build_id)
            && file != trace
        {
            return Err(SymbolsError::OtherKernel {
                file: format!("build ID {file}"),
                trace: format!("build ID {trace}"),
            });
        }
        let Some(own) = origin.symbols.filter(|own| !own.is_empty()) else {
            return Ok(self.symbols.moved(origin.slide.unwrap_or(0)));
        };
        let of = |table: &SymbolTable| table.address("_text").or(table.address("_stext"));
        let slide = match (of(own), of(&self.symbols)) {
            (Some(own), Some(file)) => own.wrapping_sub(file),
            _ => origin.slide.unwrap_or(0),
        };
        let moved = self.symbols.moved(slide);
        // Another build may have the same first symbols, but not all of them at the same places.
        let known: std::collections::HashSet<(u64, &str)> =
            own.iter().map(|symbol| (symbol.address, symbol.name)).collect();
        let code: Vec<_> = moved
            .iter()
            .filter(|symbol| matches!(symbol.kind, b't' | b'T'))
            .collect();
        let agree = code
            .iter()
            .filter(|symbol| known.contains(&(symbol.address, symbol.name)))
            .count();
        // Symbols that kallsyms leaves out (of .exit, with dots and the like) are few.
        if agree * 10 < code.len() * 8 {
            return Err(SymbolsError::OtherKernel {
                file: format!(
                    "{agree} of its {} functions are where the traced kernel has them",
                    code.len()
                ),
                trace: format!("a kernel with {} symbols of its own", own.len()),
            });
        }
        Ok(moved)
    }
}

impl SymbolTable {
    /// Reads lines of an address, a type and a name, with `[module]` behind the name where it is a module's.
    ///
    /// # Errors
    /// A line that is not of this form; no symbols.
    pub fn parse(text: &str) -> Result<SymbolTable, SymbolsError> {
        let mut table = SymbolTable::new();
        let mut known = 0;
        for (n, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let mut words = line.split_whitespace();
            let symbol = (|| {
                let address = u64::from_str_radix(words.next()?, 16).ok()?;
                let &[kind] = words.next()?.as_bytes() else { return None };
                let name = words.next()?;
                let module = words.next();
                Some((
                    address,
                    kind,
                    name,
                    module.and_then(|word| word.strip_prefix('[')?.strip_suffix(']')),
                ))
            })();
            let Some((address, kind, name, module)) = symbol else {
                let text = line.chars().take(40).collect();
                return Err(SymbolsError::Format { line: n + 1, text });
            };
            table.add(address, kind, name, module);
            known |= address;
        }
        if table.is_empty() {
            return Err(SymbolsError::Empty { hint: "" });
        }
        // What a user without rights reads from /proc/kallsyms.
        if known == 0 {
            let hint = ": every address is 0 (read /proc/kallsyms as root, with kernel.kptr_restrict at 1 or less)";
            return Err(SymbolsError::Empty { hint });
        }
        Ok(table.sorted())
    }

    /// All addresses moved.
    pub(crate) fn shifted(mut self, by: u64) -> SymbolTable {
        for entry in &mut self.entries {
            entry.address = entry.address.wrapping_add(by);
        }
        self.sorted()
    }

    /// The kernel's addresses moved by KASLR's slide. Per-CPU offsets and other small values stay.
    pub fn moved(mut self, slide: u64) -> SymbolTable {
        for entry in self.entries.iter_mut().filter(|entry| entry.address >> 63 == 1) {
            entry.address = entry.address.wrapping_add(slide);
        }
        self.sorted()
    }
}

#[cfg(test)]
#[path = "file_test.rs"]
mod tests;
