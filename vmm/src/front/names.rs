//! Names of addresses in a guest: of `--symbols` or of the kernel's file where that has symbols, else of the Linux in memory.

use std::path::{Path, PathBuf};

use log::warn;
use machine::memory::Memory;
use trace::{
    linux::{Kernel, Task, kallsyms_text},
    symbols::{Origin, SymbolFile, SymbolTable},
};

use crate::recording::GuestMemory;

/// What is known by name. Looked for when it is asked for first, and again once it is no longer true.
#[derive(Debug, Default)]
pub struct GuestNames {
    file: PathBuf,
    /// The file is not the kernel's own: what it tells is moved to where the kernel is.
    given: bool,
    /// The symbols of the file, once that was read.
    own: Option<SymbolTable>,
    build_id: Option<String>,
    linux: Option<Kernel>,
    /// The step at which no Linux was found.
    missed: Option<u64>,
    /// Symbols of its modules, as of a step.
    modules: Option<(u64, SymbolTable)>,
}

impl GuestNames {
    /// Of a guest with this kernel, and with this file of its symbols.
    pub fn of(kernel: &Path, symbols: Option<&Path>) -> GuestNames {
        GuestNames {
            file: symbols.unwrap_or(kernel).into(),
            given: symbols.is_some(),
            ..GuestNames::default()
        }
    }

    /// Brings itself up to date with the guest at a step.
    pub fn look(&mut self, memory: &Memory, steps: u64) {
        let own = self.own.get_or_insert_with(|| match SymbolFile::read(&self.file) {
            Ok(file) => {
                self.build_id = file.build_id;
                file.symbols
            }
            Err(_) => SymbolTable::new(),
        });
        if !own.is_empty() && !self.given {
            return;
        }
        if self
            .linux
            .as_ref()
            .is_some_and(|linux| !linux.is_there(&mut GuestMemory::new(memory)))
        {
            self.linux = None;
            self.modules = None;
        }
        if self.linux.is_none() && self.missed != Some(steps) {
            self.linux = Kernel::find(&mut GuestMemory::new(memory));
            self.missed = self.linux.is_none().then_some(steps);
            self.resolve();
        }
    }

    /// Moves what the file tells to where the kernel is that was found.
    fn resolve(&mut self) {
        let (Some(linux), Some(own)) = (&self.linux, &mut self.own) else {
            return;
        };
        if own.is_empty() {
            return;
        }
        let file = SymbolFile {
            symbols: std::mem::take(own),
            build_id: self.build_id.clone(),
        };
        let origin = Origin {
            build_id: linux.build_id(),
            slide: Some(linux.slide()),
            symbols: Some(linux.symbols()),
        };
        match file.resolve(origin) {
            Ok(symbols) => *own = symbols,
            Err(error) => warn!("--symbols {}: {error}: the kernel's own are used", self.file.display()),
        }
    }

    /// The Linux, if there is one.
    pub fn linux(&self) -> Option<&Kernel> {
        self.linux.as_ref()
    }

    /// All symbols of the Linux that was found and of its modules, as `/proc/kallsyms` has them; `None` without one.
    pub fn kallsyms(&self, memory: &Memory) -> Option<String> {
        let linux = self.linux.as_ref()?;
        Some(kallsyms_text(
            linux.symbols(),
            &linux.modules(&mut GuestMemory::new(memory)),
        ))
    }

    /// The process that a CPU runs.
    pub fn task(&self, memory: &Memory, cpu: usize) -> Option<Task> {
        self.linux.as_ref()?.current(&mut GuestMemory::new(memory), cpu)
    }

    /// The address as a number, with its name if it has one.
    pub fn describe(&mut self, memory: &Memory, steps: u64, address: u64) -> String {
        let tables = [self.own.as_ref(), self.linux.as_ref().map(Kernel::symbols)];
        let place = tables.into_iter().flatten().find_map(|table| table.lookup(address));
        if let Some(place) = place {
            return format!("{address:#x} {place}");
        }
        match self.modules(memory, steps) {
            Some(modules) => modules.describe(address),
            None => format!("{address:#x}"),
        }
    }

    /// The address of a symbol.
    pub fn address(&mut self, memory: &Memory, steps: u64, name: &str) -> Option<u64> {
        let tables = [self.own.as_ref(), self.linux.as_ref().map(Kernel::symbols)];
        let found = tables.into_iter().flatten().find_map(|table| table.address(name));
        found.or_else(|| self.modules(memory, steps)?.address(name))
    }

    fn modules(&mut self, memory: &Memory, steps: u64) -> Option<&SymbolTable> {
        let linux = self.linux.as_ref()?;
        if self.modules.as_ref().is_none_or(|(then, _)| *then != steps) {
            let mut table = SymbolTable::new();
            for module in linux.modules(&mut GuestMemory::new(memory)) {
                for (address, kind, name) in &module.symbols {
                    table.add(*address, *kind, name, Some(&module.name));
                }
                table.set_module_end(&module.name, module.base.saturating_add(module.size));
            }
            self.modules = Some((steps, table.sorted()));
        }
        self.modules.as_ref().map(|(_, table)| table)
    }
}
