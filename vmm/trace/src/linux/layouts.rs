//! Where structures of the kernel have their fields, as its BTF says.

use super::btf::Btf;
use crate::symbols::SymbolTable;

/// Offsets in `struct module` and `struct mod_kallsyms`.
#[derive(Debug)]
pub struct ModuleLayout {
    pub state: u64,
    pub list: u64,
    pub name: u64,
    pub base: u64,
    pub size: u64,
    pub init: u64,
    pub init_size: u64,
    pub kallsyms: u64,
    pub symtab: u64,
    pub num_symtab: u64,
    pub strtab: u64,
    pub typetab: u64,
}

impl ModuleLayout {
    /// As the kernel's types say.
    pub fn of(btf: &Btf) -> Option<ModuleLayout> {
        let of = |path| btf.offset("module", path);
        let symbols = |path| btf.offset("mod_kallsyms", path);
        Some(ModuleLayout {
            state: of("state")?,
            list: of("list")?,
            name: of("name")?,
            base: of("core_layout.base")?,
            size: of("core_layout.size")?,
            init: of("init_layout.base")?,
            init_size: of("init_layout.size")?,
            kallsyms: of("kallsyms")?,
            symtab: symbols("symtab")?,
            num_symtab: symbols("num_symtab")?,
            strtab: symbols("strtab")?,
            typetab: symbols("typetab")?,
        })
    }
}

/// Offsets in `struct task_struct`, and in `struct mm_struct`.
#[derive(Debug)]
pub struct TaskLayout {
    pub tasks: u64,
    pub pid: u64,
    pub tgid: u64,
    pub comm: u64,
    pub mm: u64,
    pub pgd: u64,
    /// Addresses of `__per_cpu_offset`, and of `current_task` in a CPU's part: they are asked for often, and looked up once.
    pub current: Option<(u64, u64)>,
}

impl TaskLayout {
    /// As the kernel's types say.
    pub fn of(btf: &Btf, symbols: &SymbolTable) -> Option<TaskLayout> {
        let of = |path| btf.offset("task_struct", path);
        Some(TaskLayout {
            tasks: of("tasks")?,
            pid: of("pid")?,
            tgid: of("tgid")?,
            comm: of("comm")?,
            mm: of("mm")?,
            pgd: btf.offset("mm_struct", "pgd")?,
            current: symbols.address("__per_cpu_offset").zip(symbols.address("current_task")),
        })
    }
}
