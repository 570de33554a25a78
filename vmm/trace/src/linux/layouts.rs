//! Where structures of the kernel have their fields, as its BTF says.
//!
//! `struct module` has had `core_layout` and `init_layout` up to Linux 6.3, and an array `mem` with a part for each kind of
//! memory since. The running task is in the per-CPU variable `current_task`, from 6.2 to 6.14 in `pcpu_hot`.

use super::btf::Btf;
use crate::symbols::SymbolTable;

/// `MOD_TEXT` and `MOD_INIT_TEXT` of `enum mod_mem_type` of include/linux/module.h, since Linux 6.4.
const TEXT: u64 = 0;
const INIT_TEXT: u64 = 4;

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
        let of = |path: &str| btf.offset("module", path);
        let symbols = |path| btf.offset("mod_kallsyms", path);
        let part = |old: &str, n: u64| {
            let old = |name| of(&format!("{old}.{name}"));
            let new = |name| Some(of("mem")? + n * btf.size("module_memory")? + btf.offset("module_memory", name)?);
            Some((
                old("base").or_else(|| new("base"))?,
                old("size").or_else(|| new("size"))?,
            ))
        };
        let (base, size) = part("core_layout", TEXT)?;
        let (init, init_size) = part("init_layout", INIT_TEXT)?;
        Some(ModuleLayout {
            state: of("state")?,
            list: of("list")?,
            name: of("name")?,
            base,
            size,
            init,
            init_size,
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
    /// Addresses of `__per_cpu_offset`, and of the running task in a CPU's part: they are asked for often, and looked up once.
    pub current: Option<(u64, u64)>,
}

impl TaskLayout {
    /// As the kernel's types say.
    pub fn of(btf: &Btf, symbols: &SymbolTable) -> Option<TaskLayout> {
        let of = |path| btf.offset("task_struct", path);
        let hot = || Some(symbols.address("pcpu_hot")? + btf.offset("pcpu_hot", "current_task")?);
        let current = symbols.address("current_task").or_else(hot);
        Some(TaskLayout {
            tasks: of("tasks")?,
            pid: of("pid")?,
            tgid: of("tgid")?,
            comm: of("comm")?,
            mm: of("mm")?,
            pgd: btf.offset("mm_struct", "pgd")?,
            current: symbols.address("__per_cpu_offset").zip(current),
        })
    }
}
