//! What a trace keeps of the Linux in it: symbols and names, gathered while the machine runs, and read back.
//!
//! Four text files, each of which is whole or absent: `kallsyms` and `modules` in the forms of `/proc`, `kernel` with a line for each
//! fact, and `tasks` with a line for each name that a page table had: steps, page table, pid, tgid, name. Of each vdso that a process
//! executed there is the ELF file that the kernel has of it: `vdso-0.so` and so on.

use std::{collections::HashMap, fmt::Write, fs, io, path::Path};

use super::{
    kernel::{Kernel, NotFound},
    mappings::Mapping,
    memory::Memory,
    modules::{Module, kallsyms_text, modules_text},
    tasks::Task,
};
use crate::{regular, symbols::SymbolTable};

/// Names that are kept of page tables. With more, no new ones are.
const MOST_NAMES: usize = 1 << 20;
/// Modules that are kept.
const MOST_MODULES: usize = 1 << 14;
/// And what is kept of all of them, in bytes.
const MOST_OF_MODULES: u64 = 256 << 20;

/// CPUs of a kernel that are asked what they run.
const MOST_CPUS: usize = 8;

/// A kernel has vdsos for 64-bit code, for 32-bit code, and for x32.
pub(super) const MOST_VDSOS: usize = 4;

/// The file of a vdso.
pub(super) fn vdso_file(number: usize) -> String {
    format!("vdso-{number}.so")
}

/// The longest of the files that is read.
const LONGEST: u64 = 1 << 30;

/// A page table got a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskSeen {
    /// When it was seen, in steps of the machine. The name may be older, back to the last look.
    pub steps: u64,
    /// Whose it is.
    pub task: Task,
}

/// What is gathered.
#[derive(Debug, Default)]
pub struct Recording {
    kernel: Option<Kernel>,
    /// What a Linux says it is whose symbols cannot be read.
    unknown: Option<String>,
    /// By base and name. What was unloaded stays: traces of it do.
    modules: Vec<Module>,
    tasks: Vec<TaskSeen>,
    /// The last name of each page table.
    names: HashMap<u64, (u32, String)>,
    /// Where the kernel has vdsos that were executed, and their files.
    vdsos: Vec<((u64, u64), Vec<u8>)>,
    /// The size of all modules that are kept.
    size: u64,
    /// There was more than is kept.
    cut: bool,
}

impl Recording {
    /// Of a kernel that was found.
    pub(super) fn of(kernel: Kernel) -> Recording {
        Recording {
            kernel: Some(kernel),
            ..Recording::default()
        }
    }

    /// The kernel, once it was found.
    pub fn kernel(&self) -> Option<&Kernel> {
        self.kernel.as_ref()
    }

    /// Whether processes have names: the kernel is found, and tells its types.
    pub fn names_processes(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| kernel.types.tasks.is_some())
    }

    /// Looks for the kernel until it is found, and for modules and processes that are new. Says whether there is something new to write.
    pub fn look(&mut self, memory: &mut dyn Memory, steps: u64) -> bool {
        let mut new = false;
        if self.kernel.is_none() {
            self.kernel = Kernel::find(memory);
            new = self.kernel.is_some();
        }
        let Some(kernel) = &self.kernel else { return false };
        for module in kernel
            .modules(memory)
            .into_iter()
            .filter(|module| module.state == "Live" || module.init != 0)
        {
            let count = self.modules.len();
            let known = self
                .modules
                .iter_mut()
                .find(|known| (known.base, &known.name) == (module.base, &module.name));
            let before = known.as_ref().map_or(0, |known| known.size_of());
            let all = self.size - before + module.size_of();
            match known {
                // While it is loaded, it has more symbols: those of its initialisation.
                Some(known) if known.symbols.len() >= module.symbols.len() => {}
                _ if all > MOST_OF_MODULES || count >= MOST_MODULES => self.cut = true,
                Some(known) => {
                    self.size = all;
                    *known = module;
                    new = true;
                }
                None => {
                    self.size = all;
                    self.modules.push(module);
                    new = true;
                }
            }
        }
        for task in kernel.tasks(memory) {
            new |= self.saw(task, steps);
        }
        new
    }

    /// The last look: where no kernel is found, a Linux whose symbols cannot be read is named.
    pub fn last_look(&mut self, memory: &mut dyn Memory, steps: u64) -> bool {
        if self.kernel.is_some() {
            return self.look(memory, steps);
        }
        match Kernel::look_for(memory) {
            Ok(kernel) => {
                self.kernel = Some(kernel);
                self.look(memory, steps);
            }
            Err(NotFound::UnknownTable { banner }) => self.unknown = Some(banner),
            Err(NotFound::Nothing) => return false,
        }
        true
    }

    /// A CPU has run on a page table, `page_table` as CR3 has it: names whose it is. This is cheap.
    pub fn switched(&mut self, memory: &mut dyn Memory, cpu: usize, page_table: u64, steps: u64) -> bool {
        let Some(kernel) = &self.kernel else { return false };
        let Some(task) = kernel.current(memory, cpu) else {
            return false;
        };
        // A kernel thread borrows page tables, and between processes the new one's may be in use already.
        let own = task.page_table.is_some_and(|own| same(own, page_table));
        own && self.saw(task, steps)
    }

    /// The same where nobody knows which of the kernel's CPUs it was.
    pub(super) fn switched_anywhere(&mut self, memory: &mut dyn Memory, page_table: u64, steps: u64) -> bool {
        let Some(kernel) = &self.kernel else { return false };
        let mut tasks = (0..MOST_CPUS).map_while(|cpu| kernel.current(memory, cpu));
        let task = tasks.find(|task| task.page_table.is_some_and(|own| same(own, page_table)));
        task.is_some_and(|task| self.saw(task, steps))
    }

    /// Where a CPU goes over to another thread, with that thread's `task_struct` as the second argument.
    pub fn switch_address(&self) -> Option<u64> {
        self.kernel.as_ref()?.symbols().address("__switch_to")
    }

    /// Where a process has got the name of the program that it begins to run, and is about to run it: since Linux 4.17, fs/exec.c.
    pub fn exec_address(&self) -> Option<u64> {
        self.kernel.as_ref()?.symbols().address("finalize_exec")
    }

    /// A CPU goes over to the thread whose `task_struct` is at this address: who that is, and whether its process has got a new name.
    pub fn thread(&mut self, memory: &mut dyn Memory, at: u64, steps: u64) -> Option<(Task, bool)> {
        let task = self.kernel.as_ref()?.task_at(memory, at)?;
        // A process goes by the name of its first thread.
        let new = task.pid == task.tgid && self.saw(task.clone(), steps);
        Some((task, new))
    }

    /// What the process that a CPU runs has mapped at an address, with `cr3` as its page table; and whether there is something new to write.
    pub fn mapping(&mut self, memory: &mut dyn Memory, cpu: usize, cr3: u64, at: u64) -> Option<(Mapping, bool)> {
        let kernel = self.kernel.as_ref()?;
        let mapping = kernel.mapping(memory, cpu, cr3, at)?;
        let mut new = false;
        if let Some(place) = mapping.vdso
            && self.vdsos.len() < MOST_VDSOS
            && self.vdsos.iter().all(|(known, _)| *known != place)
            && let Some(bytes) = kernel.vdso(memory, place)
        {
            self.vdsos.push((place, bytes));
            new = true;
        }
        Some((mapping, new))
    }

    /// The same where nobody knows which of the kernel's CPUs it is.
    pub(super) fn mapping_anywhere(&mut self, memory: &mut dyn Memory, cr3: u64, at: u64) -> Option<(Mapping, bool)> {
        (0..MOST_CPUS).find_map(|cpu| self.mapping(memory, cpu, cr3, at))
    }

    fn saw(&mut self, task: Task, steps: u64) -> bool {
        let Some(table) = task.page_table else { return false };
        let name = (task.tgid, task.comm.clone());
        if self.names.get(&table) == Some(&name) {
            return false;
        }
        if self.tasks.len() >= MOST_NAMES {
            self.cut = true;
            return false;
        }
        self.names.insert(table, name);
        self.tasks.push(TaskSeen { steps, task });
        true
    }

    /// Writes the four files, or none where no kernel was found, or the last of them where its symbols cannot be read. Each replaces the one before in one step.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        if self.kernel.is_none() && self.unknown.is_none() {
            return Ok(());
        }
        match regular::create_private_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
        let replace = |name: &str, bytes: &[u8]| {
            let new = dir.join(format!("{name}.new"));
            regular::write_private(&new, bytes)?;
            fs::rename(new, dir.join(name))
        };
        let Some(kernel) = &self.kernel else {
            let banner = self.unknown.as_deref().unwrap_or_default();
            return replace("kernel", format!("unknown {banner}\n").as_bytes());
        };
        let mut facts = format!("banner {}\n", kernel.banner());
        if let Some(id) = kernel.build_id() {
            let _ = writeln!(facts, "build-id {id}");
        }
        let _ = writeln!(
            facts,
            "slide {:#x}\nphysical-base {:#x}",
            kernel.slide(),
            kernel.physical_base()
        );
        if self.cut {
            facts += "cut\n";
        }
        let mut tasks = String::new();
        for TaskSeen { steps, task } in &self.tasks {
            let table = task.page_table.unwrap_or(0);
            // The name is the rest of the line, and may hold anything but its end.
            let comm = task.comm.replace(char::is_control, "?");
            let _ = writeln!(tasks, "{steps} {table:#x} {} {} {comm}", task.pid, task.tgid);
        }
        for (n, (_, bytes)) in self.vdsos.iter().enumerate() {
            replace(&vdso_file(n), bytes)?;
        }
        replace("kallsyms", kallsyms_text(kernel.symbols(), &self.modules).as_bytes())?;
        replace("modules", modules_text(&self.modules).as_bytes())?;
        replace("tasks", tasks.as_bytes())?;
        replace("kernel", facts.as_bytes())
    }
}

/// CR3 is of this page table: the kernel's or, with page-table isolation, the user's, which is in the next page.
fn same(table: u64, cr3: u64) -> bool {
    table == cr3 & !0xfff || table == cr3 & !0x1fff
}

/// What a trace has of its Linux.
#[derive(Debug, Default)]
pub struct Recorded {
    /// Its banner.
    pub banner: String,
    /// What a Linux says it is whose symbols could not be read. There is nothing else then.
    pub unknown: Option<String>,
    /// Its build ID.
    pub build_id: Option<String>,
    /// KASLR's slide.
    pub slide: u64,
    /// Where `_text` is physically.
    pub physical_base: u64,
    /// There were more modules or names of processes than are kept.
    pub cut: bool,
    /// All symbols.
    pub symbols: SymbolTable,
    /// Name, base and size of each module.
    pub modules: Vec<(String, u64, u64)>,
    /// Names by the time they were seen.
    pub tasks: Vec<TaskSeen>,
    /// The ELF files of vdsos.
    pub vdsos: Vec<Vec<u8>>,
}

impl Recorded {
    /// Reads what [`Recording::write`] wrote; `None` if there was no Linux.
    ///
    /// # Errors
    /// The system's, or a file that is not as it was written.
    pub fn read(dir: &Path) -> io::Result<Option<Recorded>> {
        // The directory may come from somebody else: a link could lead anywhere.
        if fs::symlink_metadata(dir).is_ok_and(|found| !found.is_dir()) {
            return Err(io::Error::other("is no directory"));
        }
        let open = |name: &str| regular::open_inside(&dir.join(name)).and_then(|file| regular::read(file, LONGEST));
        let text = |name: &str| match open(name) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io::Error::new(error.kind(), format!("{name}: {error}"))),
        };
        let Some(kallsyms) = text("kallsyms")? else {
            let kernel = text("kernel")?;
            let unknown = kernel
                .as_deref()
                .and_then(|text| text.trim_end().strip_prefix("unknown "));
            return Ok(unknown.map(|banner| Recorded {
                unknown: Some(banner.into()),
                ..Recorded::default()
            }));
        };
        let damaged = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        let mut recorded = Recorded {
            symbols: SymbolTable::parse(&kallsyms).map_err(|error| damaged(format!("kallsyms: {error}")))?,
            ..Recorded::default()
        };
        for line in text("kernel")?.unwrap_or_default().lines() {
            let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap_or(0);
            match line.split_once(' ') {
                Some(("banner", value)) => recorded.banner = value.into(),
                Some(("build-id", value)) => recorded.build_id = Some(value.into()),
                Some(("slide", value)) => recorded.slide = number(value),
                Some(("physical-base", value)) => recorded.physical_base = number(value),
                None => recorded.cut |= line == "cut",
                _ => {}
            }
        }
        for n in 0..MOST_VDSOS {
            match open(&vdso_file(n)) {
                Ok(bytes) => recorded.vdsos.push(bytes),
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", vdso_file(n)))),
            }
        }
        for (n, line) in text("modules")?.unwrap_or_default().lines().enumerate() {
            let words: Vec<_> = line.split(' ').collect();
            let module = (|| {
                let base = u64::from_str_radix(words.get(5)?.strip_prefix("0x")?, 16).ok()?;
                Some((words[0].to_string(), base, words[1].parse().ok()?))
            })();
            let module = module.ok_or_else(|| damaged(format!("modules: line {}: not a module", n + 1)))?;
            recorded
                .symbols
                .set_module_end(&module.0, module.1.saturating_add(module.2));
            recorded.modules.push(module);
        }
        for (n, line) in text("tasks")?.unwrap_or_default().lines().enumerate() {
            let task = (|| {
                let mut words = line.splitn(5, ' ');
                let mut word = || words.next();
                Some(TaskSeen {
                    steps: word()?.parse().ok()?,
                    task: Task {
                        page_table: Some(u64::from_str_radix(word()?.strip_prefix("0x")?, 16).ok()?),
                        pid: word()?.parse().ok()?,
                        tgid: word()?.parse().ok()?,
                        comm: word()?.into(),
                    },
                })
            })();
            recorded
                .tasks
                .push(task.ok_or_else(|| damaged(format!("tasks: line {}: not a process", n + 1)))?);
        }
        Ok(Some(recorded))
    }

    /// Whose page table `cr3` is, as of a step: the last name until then, or the first one after, as a name is seen after it was given.
    pub fn task(&self, cr3: u64, steps: u64) -> Option<&Task> {
        let of = |table: u64| {
            let mut all = self
                .tasks
                .iter()
                .filter(|seen| seen.task.page_table == Some(table))
                .peekable();
            let mut found = all.peek().map(|seen| &seen.task);
            for seen in all {
                if seen.steps <= steps {
                    found = Some(&seen.task);
                }
            }
            found
        };
        of(cr3 & !0xfff).or_else(|| of(cr3 & !0x1fff))
    }
}
