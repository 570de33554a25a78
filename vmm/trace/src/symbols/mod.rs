//! Names of addresses: from `kallsyms`, a System.map, or an ELF file.

mod archive;
mod elf;
mod error;
mod file;
mod guest_files;

use std::fmt::Write;

pub use self::{
    archive::Archive,
    elf::{ElfFile, ProgramFile, write_elf},
    error::SymbolsError,
    file::{Origin, SymbolFile},
    guest_files::{GuestFiles, short},
};

/// A symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// Where it is.
    pub address: u64,
    /// Its length in bytes, 0 where that is not reported.
    pub size: u64,
    /// Its type, as `nm` and `/proc/kallsyms` have it.
    pub kind: u8,
    /// Its name.
    pub name: &'a str,
    /// The kernel module that it is of.
    pub module: Option<&'a str>,
}

/// What is at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedAddress<'a> {
    /// The symbol.
    pub symbol: Symbol<'a>,
    /// Bytes from its beginning.
    pub offset: u64,
}

impl std::fmt::Display for NamedAddress<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.symbol.name)?;
        if self.offset != 0 {
            write!(f, "+{:#x}", self.offset)?;
        }
        match self.symbol.module {
            Some(module) => write!(f, " [{module}]"),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    address: u64,
    size: u64,
    /// In the text of all names.
    name: u32,
    len: u16,
    kind: u8,
    /// One more than the module's index.
    module: u16,
}

/// Names of addresses, sorted by address once [`SymbolTable::sorted`].
#[derive(Clone, Debug, Default)]
pub struct SymbolTable {
    names: String,
    entries: Vec<Entry>,
    modules: Vec<Module>,
    /// Code: what addresses are looked up in. One entry for each address.
    code: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Module {
    name: String,
    /// Where it ends, if that is known.
    end: u64,
}

/// Behind the last symbol before a hole nothing is named: no function is longer.
const FARTHEST: u64 = 1 << 20;

impl SymbolTable {
    /// Without symbols.
    pub fn new() -> SymbolTable {
        SymbolTable::default()
    }

    /// Adds a symbol. Names longer than a table can hold are cut.
    pub fn add(&mut self, address: u64, kind: u8, name: &str, module: Option<&str>) {
        self.add_sized(address, 0, kind, name, module);
    }

    /// Adds a symbol whose size is known.
    pub fn add_sized(&mut self, address: u64, size: u64, kind: u8, name: &str, module: Option<&str>) {
        let module = module.map_or(0, |module| self.module(module) + 1);
        let Ok(at) = u32::try_from(self.names.len()) else {
            return;
        };
        let len = name.len().min(u16::MAX.into());
        let name = name.get(..len).unwrap_or("");
        self.names.push_str(name);
        let len = name.len() as u16;
        self.entries.push(Entry {
            address,
            size,
            name: at,
            len,
            kind,
            module,
        });
    }

    fn module(&mut self, name: &str) -> u16 {
        // Symbols come module by module.
        if let Some(last) = self.modules.iter().rposition(|module| module.name == name) {
            return last as u16;
        }
        if self.modules.len() < usize::from(u16::MAX) - 1 {
            let name = name.to_string();
            self.modules.push(Module { name, end: u64::MAX });
        }
        (self.modules.len() - 1) as u16
    }

    /// Says where a module's code ends.
    pub fn set_module_end(&mut self, module: &str, end: u64) {
        if let Some(module) = self.modules.iter_mut().find(|known| known.name == module) {
            module.end = end;
        }
    }

    /// Makes lookups possible. Symbols of the same address stay in their order.
    pub fn sorted(mut self) -> SymbolTable {
        self.entries.sort_by_key(|entry| entry.address);
        let code = |entry: &Entry| matches!(entry.kind, b't' | b'T' | b'w' | b'W' | b'i');
        self.code.clear();
        for (n, entry) in self.entries.iter().enumerate().filter(|(_, entry)| code(entry)) {
            let n = n as u32;
            match self.code.last_mut() {
                Some(last) if self.entries[*last as usize].address == entry.address => {
                    // Of several names the one that others see, then the one with the fewest underscores in front; of a program's, then
                    // the longest, as perf does.
                    let rank = |n: u32| {
                        let entry = &self.entries[n as usize];
                        let name = &self.names[entry.name as usize..][..entry.len.into()];
                        let kind = match entry.kind {
                            b'T' => 0,
                            b't' | b'i' => 1,
                            _ => 2,
                        };
                        let longest = if entry.module > 0 { usize::MAX - name.len() } else { 0 };
                        let underscores = name.len() - name.trim_start_matches('_').len();
                        (entry.size == 0, kind, underscores, longest)
                    };
                    if rank(n) < rank(*last) {
                        *last = n;
                    }
                }
                _ => self.code.push(n),
            }
        }
        self
    }

    fn symbol(&self, entry: &Entry) -> Symbol<'_> {
        Symbol {
            address: entry.address,
            size: entry.size,
            kind: entry.kind,
            name: &self.names[entry.name as usize..][..entry.len.into()],
            module: (entry.module > 0).then(|| self.modules[usize::from(entry.module) - 1].name.as_str()),
        }
    }

    /// All symbols by their addresses.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Symbol<'_>> {
        self.entries.iter().map(|entry| self.symbol(entry))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The address of the first symbol of this name.
    pub fn address(&self, name: &str) -> Option<u64> {
        self.iter()
            .find(|symbol| symbol.name == name)
            .map(|symbol| symbol.address)
    }

    /// The function that an address is in, as a number that stays the same and that [`SymbolTable::function`] takes.
    pub fn find(&self, address: u64) -> Option<usize> {
        let n = self
            .code
            .partition_point(|n| self.entries[*n as usize].address <= address)
            .checked_sub(1)?;
        (address < self.end(n)).then_some(n)
    }

    /// Where the next function begins behind an address.
    pub fn next_function(&self, address: u64) -> Option<u64> {
        let n = self
            .code
            .partition_point(|n| self.entries[*n as usize].address <= address);
        Some(self.entries[*self.code.get(n)? as usize].address)
    }

    /// How many functions have a number.
    pub fn functions(&self) -> usize {
        self.code.len()
    }

    /// A function by its number.
    pub fn function(&self, n: usize) -> Option<Symbol<'_>> {
        Some(self.symbol(&self.entries[*self.code.get(n)? as usize]))
    }

    /// Where a function ends: with its size, or else at the next symbol of any kind.
    pub fn end(&self, n: usize) -> u64 {
        let Some(at) = self.code.get(n) else { return 0 };
        let entry = &self.entries[*at as usize];
        if entry.size != 0 {
            return entry.address.saturating_add(entry.size);
        }
        let next = self.entries[*at as usize..]
            .iter()
            .find(|next| next.address > entry.address);
        let far = entry.address.saturating_add(FARTHEST);
        let module = match entry.module {
            0 => u64::MAX,
            n => self.modules[usize::from(n) - 1].end,
        };
        next.map_or(far, |next| next.address.min(far)).min(module)
    }

    /// What is at an address of code.
    pub fn lookup(&self, address: u64) -> Option<NamedAddress<'_>> {
        let symbol = self.function(self.find(address)?)?;
        let offset = address - symbol.address;
        Some(NamedAddress { symbol, offset })
    }

    /// The address as a number, with its name if it has one.
    pub fn describe(&self, address: u64) -> String {
        let mut text = format!("{address:#x}");
        if let Some(place) = self.lookup(address) {
            let _ = write!(text, " {place}");
        }
        text
    }
}

#[cfg(test)]
#[path = "symbols_test.rs"]
mod tests;
