//! Functions of users' programs, by what the processes had mapped.

use std::collections::HashMap;

use crate::{
    reader::{MappedFile, Mapping, Mappings},
    symbols::{GuestFiles, NamedAddress, ProgramFile, Symbol, SymbolTable, short},
};

/// Parts of address spaces that are kept, with all that was mapped there: what is beyond them has no names.
const MOST: usize = 1 << 22;
/// Lists of functions that just-in-time compilers have left.
const MOST_JITS: usize = 256;

/// A file, and what is known of its functions.
#[derive(Debug)]
struct File {
    /// `[libc.so.6]`: what code of it without a name is called.
    name: String,
    /// The number of its first function.
    first: usize,
    functions: Functions,
}

#[derive(Debug)]
enum Functions {
    Unknown,
    /// At the addresses that the file is linked to.
    Program(Box<ProgramFile>),
    /// At the addresses of the process.
    Process(Box<SymbolTable>),
}

impl Functions {
    fn table(&self) -> Option<&SymbolTable> {
        match self {
            Functions::Unknown => None,
            Functions::Program(program) => Some(&program.symbols),
            Functions::Process(table) => Some(table),
        }
    }
}

/// An address space, cut wherever a mapping begins or ends.
#[derive(Debug, Default)]
struct Space {
    cuts: Vec<u64>,
    /// Behind each cut: since which step there is which mapping.
    pieces: Vec<Vec<(u64, u32)>>,
}

/// The functions of all mapped files, as numbers from 0 on.
#[derive(Debug, Default)]
pub struct UserCode {
    files: Vec<File>,
    mappings: Vec<Mapping>,
    spaces: HashMap<u64, Space>,
    functions: usize,
}

/// What is at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserPlace {
    /// The file.
    pub file: usize,
    /// The function, by its number.
    pub function: Option<usize>,
    /// Where what was found begins.
    pub start: u64,
    /// And where it ends.
    pub end: u64,
}

impl UserCode {
    /// Of these mappings, with the functions of files that are found. `table` tells which page table a process
    /// goes by, of the two that it may have; `pid` the number of
    /// a process at a step.
    pub fn new(
        mappings: Mappings,
        table: &mut dyn FnMut(u64) -> Option<u64>,
        pid: &dyn Fn(u64, u64) -> Option<u32>,
        vdsos: &[Vec<u8>],
        places: &mut GuestFiles,
    ) -> UserCode {
        let Mappings { files, mut all } = mappings;
        let mut code = UserCode::default();
        // Where code of each file begins in it: the first of the mappings that have some.
        let mut begins = vec![u64::MAX; files.len()];
        for mapping in &all {
            if let Some(file) = mapping.file {
                begins[file] = begins[file].min(mapping.offset);
            }
        }
        for (file, begin) in files.iter().zip(begins) {
            let functions = match file.path.as_str() {
                "[vdso]" => vdso(file, vdsos),
                _ => places.program(file, begin),
            };
            let name = short(&file.path);
            code.add(
                name,
                functions.map_or(Functions::Unknown, |file| Functions::Program(Box::new(file))),
            );
        }
        let mut jits: HashMap<u32, Option<usize>> = HashMap::new();
        for mapping in &mut all {
            mapping.cr3 = table(mapping.cr3).unwrap_or(mapping.cr3);
            // What a compiler makes as it goes has no file, or one without a name in any folder.
            let made = |file: usize| {
                ["/memfd:", "/dev/zero"]
                    .iter()
                    .any(|path| files[file].path.starts_with(path))
            };
            if mapping.file.is_none_or(made)
                && let Some(pid) = pid(mapping.cr3, mapping.step)
            {
                let room = jits.len() < MOST_JITS;
                let jit = *jits.entry(pid).or_insert_with(|| {
                    let table = jit_table(&places.jit_map(pid).filter(|_| room)?, pid)?;
                    Some(code.add(&format!("perf-{pid}.map"), Functions::Process(Box::new(table))))
                });
                mapping.file = jit.or(mapping.file);
            }
        }
        code.mappings = all;
        code.cut();
        code
    }

    fn add(&mut self, name: &str, functions: Functions) -> usize {
        let first = self.functions;
        self.functions += functions.table().map_or(0, SymbolTable::functions);
        let name = format!("[{}]", name.trim_matches(['[', ']']));
        self.files.push(File { name, first, functions });
        self.files.len() - 1
    }

    /// Puts the mappings in order.
    fn cut(&mut self) {
        let mut of: HashMap<u64, Vec<u32>> = HashMap::new();
        for (n, mapping) in self.mappings.iter().enumerate() {
            of.entry(mapping.cr3).or_default().push(n as u32);
        }
        let mut room = MOST;
        for (table, numbers) in of {
            let mut space = Space::default();
            for n in &numbers {
                let mapping = &self.mappings[*n as usize];
                space.cuts.extend([mapping.start, mapping.end]);
            }
            space.cuts.sort_unstable();
            space.cuts.dedup();
            space.pieces = vec![Vec::new(); space.cuts.len()];
            for n in numbers {
                let mapping = &self.mappings[n as usize];
                let at = |address| space.cuts.partition_point(|cut| *cut < address);
                let pieces = at(mapping.start)..at(mapping.end);
                let Some(left) = room.checked_sub(pieces.len()) else {
                    break;
                };
                room = left;
                for piece in &mut space.pieces[pieces] {
                    piece.push((mapping.step, n));
                }
            }
            self.spaces.insert(table, space);
        }
    }

    /// How many functions all files have.
    pub fn functions(&self) -> usize {
        self.functions
    }

    /// How many files there are.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Nothing is known of any program.
    pub fn is_empty(&self) -> bool {
        self.mappings.is_empty()
    }

    /// What the process of a page table had mapped at an address at a step: the last of what was there until then, or the first.
    fn mapping(&self, table: u64, ip: u64, step: u64) -> Option<&Mapping> {
        let space = self.spaces.get(&table)?;
        let piece = space.cuts.partition_point(|cut| *cut <= ip).checked_sub(1)?;
        let there = space.pieces.get(piece)?;
        let after = there.partition_point(|(since, _)| *since <= step);
        let (_, n) = there.get(after.saturating_sub(1))?;
        self.mappings.get(*n as usize)
    }

    /// What is at an address of the process of a page table at a step.
    pub fn find(&self, table: u64, ip: u64, step: u64) -> Option<UserPlace> {
        let mapping = self.mapping(table, ip, step)?;
        let number = mapping.file?;
        let file = self.files.get(number)?;
        let nameless = UserPlace {
            file: number,
            function: None,
            start: ip,
            end: ip,
        };
        let (table, shift) = match &file.functions {
            Functions::Unknown => {
                let Mapping { start, end, .. } = *mapping;
                return Some(UserPlace { start, end, ..nameless });
            }
            Functions::Process(table) => (&**table, 0),
            Functions::Program(program) => {
                let offset = (ip - mapping.start).wrapping_add(mapping.offset);
                let Some((address, _)) = program.address(offset) else {
                    return Some(nameless);
                };
                (&program.symbols, ip.wrapping_sub(address))
            }
        };
        let Some((n, symbol)) = table
            .find(ip.wrapping_sub(shift))
            .and_then(|n| Some((n, table.function(n)?)))
        else {
            let next = table.next_function(ip.wrapping_sub(shift));
            let end = next.map_or(mapping.end, |next| next.wrapping_add(shift).min(mapping.end));
            return Some(UserPlace { end, ..nameless });
        };
        Some(UserPlace {
            file: number,
            function: Some(file.first + n),
            start: symbol.address.wrapping_add(shift),
            end: table.end(n).wrapping_add(shift),
        })
    }

    /// The same with its name; `None`: it has none.
    pub fn place(&self, table: u64, ip: u64, step: u64) -> Option<NamedAddress<'_>> {
        let found = self.find(table, ip, step)?;
        let symbol = self.symbol(found.function?)?;
        Some(NamedAddress {
            symbol: Symbol {
                address: found.start,
                ..symbol
            },
            offset: ip.wrapping_sub(found.start),
        })
    }

    /// A function by its number. Its address is that of its file.
    pub fn symbol(&self, function: usize) -> Option<Symbol<'_>> {
        // Files without functions have the number of the one behind them.
        let file = self
            .files
            .partition_point(|file| file.first <= function)
            .checked_sub(1)?;
        let file = &self.files[file];
        file.functions.table()?.function(function - file.first)
    }

    /// What code of a file is called that has no name.
    pub fn file_name(&self, file: usize) -> Option<&str> {
        Some(&self.files.get(file)?.name)
    }

    /// Where a function of some file is first mapped.
    pub fn address(&self, name: &str) -> Option<u64> {
        self.files.iter().enumerate().find_map(|(number, file)| {
            let address = file.functions.table()?.address(name)?;
            let Functions::Program(program) = &file.functions else {
                return Some(address);
            };
            let offset = program.offset(address)?;
            let of = |mapping: &&Mapping| {
                let len = mapping.end - mapping.start;
                mapping.file == Some(number) && offset.checked_sub(mapping.offset).is_some_and(|at| at < len)
            };
            let mapping = self.mappings.iter().find(of)?;
            Some(mapping.start + (offset - mapping.offset))
        })
    }
}

/// The kernel's code in user mode, of which the trace has the file.
fn vdso(file: &MappedFile, all: &[Vec<u8>]) -> Option<ProgramFile> {
    let parsed = all.iter().filter_map(|bytes| ProgramFile::parse(bytes, "vdso").ok());
    let mut parsed: Vec<_> = parsed.collect();
    let of = |program: &ProgramFile| program.build_id.as_deref() == Some(file.build_id.as_str());
    match parsed.iter().position(of) {
        Some(n) => Some(parsed.swap_remove(n)),
        // Where the process's page with the build ID was not in memory.
        None if file.build_id.is_empty() && parsed.len() == 1 => parsed.pop(),
        None => None,
    }
}

/// Lines of an address, a size and a name: tools/perf/Documentation/jit-interface.txt of Linux.
fn jit_table(text: &str, pid: u32) -> Option<SymbolTable> {
    let module = format!("perf-{pid}.map");
    let mut table = SymbolTable::new();
    for line in text.lines() {
        let mut words = line.splitn(3, ' ');
        let mut number = || u64::from_str_radix(words.next()?.trim_start_matches("0x"), 16).ok();
        let (Some(address), Some(size)) = (number(), number()) else {
            continue;
        };
        if let Some(name) = words.next().map(str::trim).filter(|name| !name.is_empty()) {
            table.add_sized(address, size, b'T', name, Some(&module));
        }
    }
    (!table.is_empty()).then(|| table.sorted())
}

#[cfg(test)]
#[path = "user_code_test.rs"]
mod tests;
