//! Modules: `struct module` and its symbols. kernel/module/ of Linux.

use std::fmt::Write;

use super::{
    budget::{Budget, Look},
    kernel::Kernel,
    layouts::ModuleLayout,
    memory::Memory,
    text,
};
use crate::symbols::SymbolTable;

/// More would be a list that does not close.
const MOST: usize = 4096;
const MOST_SYMBOLS: u64 = 1 << 20;
const MOST_STRINGS: usize = 16 << 20;
/// `MODULE_NAME_LEN` of include/linux/moduleparam.h.
const NAME: usize = 64 - size_of::<u64>();
/// A symbol without its name, in steps: what is kept of it.
const STEPS: u64 = size_of::<(u64, u8, String)>() as u64 + 24;
/// All modules of a guest: a million symbols.
const LIST: Budget = Budget {
    bytes: 256 << 20,
    steps: STEPS << 20,
};
/// `struct elf64_sym`.
const SYMBOL: u64 = 24;

/// A module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Its name.
    pub name: String,
    /// Where its code is, up to Linux 6.3 with its data behind it.
    pub base: u64,
    /// How long that is.
    pub size: u64,
    /// Where its initialisation's code is until that has ended; 0 then.
    pub init: u64,
    /// How long that is.
    pub init_size: u64,
    /// `Live`, `Loading` or `Unloading`.
    pub state: &'static str,
    /// Address, type as in `/proc/kallsyms` and name, in the module's order.
    pub symbols: Vec<(u64, u8, String)>,
}

impl Module {
    /// What is kept of it, in bytes.
    pub(super) fn size_of(&self) -> u64 {
        let symbols = self.symbols.iter().map(|(.., name)| STEPS + name.len() as u64);
        size_of::<Module>() as u64 + self.name.len() as u64 + symbols.sum::<u64>()
    }
}

impl Kernel {
    /// The modules that are loaded, the newest first, as `/proc/modules` has them.
    pub fn modules(&self, memory: &mut dyn Memory) -> Vec<Module> {
        self.modules_within(&mut Look::new(memory, LIST))
    }

    fn modules_within(&self, memory: &mut Look<'_>) -> Vec<Module> {
        let mut found = Vec::new();
        let (Some(layout), Some(head)) = (&self.types.modules, self.symbols.address("modules")) else {
            return found;
        };
        let mut at = self.image_word(memory, head);
        for _ in 0..MOST {
            let Some(link) = at.filter(|link| *link != head) else {
                break;
            };
            let Some(module) = self.module(memory, layout, link.wrapping_sub(layout.list)) else {
                break;
            };
            found.extend(module);
            at = self.word(memory, link);
        }
        found
    }

    /// `Some(None)`: it is being made, and tells nothing yet.
    fn module(&self, memory: &mut Look<'_>, layout: &ModuleLayout, at: u64) -> Option<Option<Module>> {
        let state = match self.half(memory, at.wrapping_add(layout.state))? {
            0 => "Live",
            1 => "Loading",
            2 => "Unloading",
            _ => return Some(None),
        };
        let mut name = [0; NAME];
        if !self.read_within(memory, at.wrapping_add(layout.name), &mut name) {
            return None;
        }
        let symbols = self.word(memory, at.wrapping_add(layout.kallsyms))?;
        Some(Some(Module {
            name: text::name(&name)?,
            base: self.word(memory, at.wrapping_add(layout.base))?,
            size: self.half(memory, at.wrapping_add(layout.size))?.into(),
            init: self.word(memory, at.wrapping_add(layout.init))?,
            init_size: self.half(memory, at.wrapping_add(layout.init_size))?.into(),
            state,
            symbols: self.module_symbols(memory, layout, symbols).unwrap_or_default(),
        }))
    }

    fn module_symbols(&self, memory: &mut Look<'_>, layout: &ModuleLayout, at: u64) -> Option<Vec<(u64, u8, String)>> {
        let count = u64::from(self.half(memory, at.wrapping_add(layout.num_symtab))?);
        let (table, names, kinds) = (
            self.word(memory, at.wrapping_add(layout.symtab))?,
            self.word(memory, at.wrapping_add(layout.strtab))?,
            self.word(memory, at.wrapping_add(layout.typetab))?,
        );
        if count > MOST_SYMBOLS {
            return None;
        }
        let mut symbols = Vec::new();
        let (mut entries, mut types) = (vec![0; (count * SYMBOL) as usize], vec![0; count as usize]);
        if !self.read_within(memory, table, &mut entries) || !self.read_within(memory, kinds, &mut types) {
            return None;
        }
        let mut strings = Strings {
            base: names,
            bytes: Vec::new(),
        };
        for (entry, kind) in entries.chunks_exact(SYMBOL as usize).zip(types) {
            let name = u32::from_le_bytes(entry[..4].try_into().ok()?);
            let value = u64::from_le_bytes(entry[8..16].try_into().ok()?);
            if let Some(name) = strings.get(self, memory, name as usize).filter(|name| !name.is_empty()) {
                if !memory.spend(STEPS + name.len() as u64) {
                    break;
                }
                // It is written as a character of a line.
                let kind = if kind.is_ascii_graphic() { kind } else { b'?' };
                symbols.push((value, kind, name));
            }
        }
        Some(symbols)
    }
}

/// A string table that is read as far as it is asked for.
struct Strings {
    base: u64,
    bytes: Vec<u8>,
}

impl Strings {
    fn get(&mut self, kernel: &Kernel, memory: &mut Look<'_>, offset: usize) -> Option<String> {
        loop {
            if let Some(rest) = self.bytes.get(offset..)
                && (rest.len() >= text::LONGEST_NAME || rest.contains(&0))
            {
                return text::name(rest);
            }
            let at = self.base.wrapping_add(self.bytes.len() as u64);
            if self.bytes.len() > MOST_STRINGS {
                return None;
            }
            // To the end of the page, behind which there may be nothing.
            let len = 4096 - (at & 4095) as usize;
            let from = self.bytes.len();
            self.bytes.resize(from + len, 0);
            if !kernel.read_within(memory, at, &mut self.bytes[from..]) {
                self.bytes.truncate(from);
                return None;
            }
        }
    }
}

/// All symbols in the form of `/proc/kallsyms`, but that a module's exported symbols are not distinguished from its others.
pub fn kallsyms_text<'a>(kernel: &SymbolTable, modules: impl IntoIterator<Item = &'a Module>) -> String {
    let mut text = String::new();
    let mut line = |address: u64, kind: u8, name: &str, module: Option<&str>| {
        let _ = write!(text, "{address:016x} {} {name}", char::from(kind));
        if let Some(module) = module {
            let _ = write!(text, "\t[{module}]");
        }
        text.push('\n');
    };
    for symbol in kernel.iter() {
        line(symbol.address, symbol.kind, symbol.name, None);
    }
    for module in modules {
        for (address, kind, name) in &module.symbols {
            line(*address, *kind, name, Some(&module.name));
        }
    }
    text
}

/// Modules in the form of `/proc/modules`; who uses them is not reported. The size is that of what is at the address: of kernels since 6.4
/// without the data, which are elsewhere.
pub fn modules_text<'a>(modules: impl IntoIterator<Item = &'a Module>) -> String {
    let line = |module: &Module| {
        let Module {
            name,
            size,
            init_size,
            state,
            base,
            ..
        } = module;
        format!("{name} {} 0 - {state} 0x{base:016x}\n", size.saturating_add(*init_size))
    };
    modules.into_iter().map(line).collect()
}
