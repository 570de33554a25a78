//! Names of addresses, and of whose they are.

use std::{collections::HashMap, ops::Range};

use super::{user_code::UserCode, window::Here};
use crate::{
    linux::{Recorded, RecordedGuests, Task, VmcsSeen},
    reader::{MappedFile, Mapping, Mappings, Thread, ThreadId, ThreadSwitches},
    symbols::{GuestFiles, NamedAddress, Symbol, SymbolTable},
};

/// Whose frames are those of the kernel's own threads and of what ran before there were processes.
const KERNEL: &str = "[kernel]";

/// What a second-level guest is called in stacks.
fn vmcs_label(pointer: u64) -> String {
    format!("VMX non-root, VMCS {pointer:#x}")
}

/// A function, as a number that stays the same as long as the [`Names`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Function(u32);

impl Function {
    /// Code of a user's program, of which nothing is known.
    pub const USER: Function = Function(u32::MAX);
    /// Other code of which nothing is known.
    pub const UNKNOWN: Function = Function(u32::MAX - 1);
    /// Code below the kernel's addresses that ran before there were processes: what unpacks the kernel, and its first instructions.
    pub const BOOT: Function = Function(u32::MAX - 2);
    /// A guest of a hypervisor in the machine, or a process of it, which has no label of its own.
    const GUEST: Function = Function(u32::MAX - 3);
    /// Below this, and above the numbers of functions, are those of files of which no function is known.
    const FILES: u32 = u32::MAX - 3;
    const FIRST_FILE: u32 = Function::FILES - (1 << 21);
    /// And below those the labels of guests and their processes, which stand in stacks where a function would.
    const FIRST_LABEL: u32 = Function::FIRST_FILE - (1 << 21);

    /// Code of a user's program whose file is known, but not the function.
    fn of_file(file: usize) -> Function {
        let file = u32::try_from(file).unwrap_or(u32::MAX);
        match Function::FILES.checked_sub(file.saturating_add(1)) {
            Some(n) if n >= Function::FIRST_FILE => Function(n),
            _ => Function::USER,
        }
    }

    /// That file.
    fn file(self) -> Option<usize> {
        let n = (Function::FIRST_FILE..Function::FILES).contains(&self.0);
        n.then(|| (Function::FILES - 1 - self.0) as usize)
    }

    /// It has a name.
    pub fn known(self) -> bool {
        self.0 < Function::FIRST_LABEL
    }

    /// It is no function: it stands below those of a second-level guest, and says whose they are.
    pub fn is_label(self) -> bool {
        self == Function::GUEST || (Function::FIRST_LABEL..Function::FIRST_FILE).contains(&self.0)
    }
}

/// A process: whose lower half of the addresses it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Process(pub u64);

/// Whose frames they are, as far as that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The process. Threads of the kernel have none.
    pub process: Option<Process>,
    /// The thread, where the trace tells threads.
    pub thread: Option<ThreadId>,
}

/// The functions of a user's program, where it has them in memory.
#[derive(Debug)]
pub struct Program {
    /// What Linux calls a process that runs it: the file's name, at most 15 bytes of it.
    pub comm: String,
    /// Its functions.
    pub symbols: SymbolTable,
}

/// What is known by name.
#[derive(Debug, Default)]
pub struct Names {
    symbols: SymbolTable,
    recorded: Recorded,
    programs: Vec<Program>,
    /// The numbers of functions begin here.
    first: u32,
    /// How many functions the kernel and these have.
    before_user: usize,
    /// The numbers of files of user code begin here.
    first_file: usize,
    user: UserCode,
    /// Where a thread's CPU goes over to another's stack.
    switch: Option<(u64, u64)>,
    /// The same as a function.
    switch_function: Option<u32>,
    /// Where Linux has a new thread run for the first time.
    new_thread: Option<u32>,
    switches: ThreadSwitches,
    /// The step at which the first process was there, if one was.
    processes_from: Option<u64>,
    /// What is known of the guests of a hypervisor in the machine; the last is for those of which nothing is.
    guests: Vec<Names>,
    /// Whose each VMCS was, with the steps.
    vmcs: HashMap<u64, Vec<(u64, Option<usize>)>>,
    /// Labels of guests and their processes.
    labels: Vec<String>,
    label_numbers: HashMap<String, u32>,
}

impl Names {
    /// Symbols, and what the trace has of its Linux.
    pub fn new(symbols: SymbolTable, recorded: Recorded) -> Names {
        let switch = symbols.address("__switch_to").and_then(|at| {
            let end = symbols.end(symbols.find(at)?);
            Some((at, end))
        });
        let function = |name| {
            let n = symbols.find(symbols.address(name)?)?;
            Some(n as u32)
        };
        let (switch_function, new_thread) = (function("__switch_to"), function("wake_up_new_task"));
        let processes = recorded.tasks.iter().filter(|seen| seen.task.page_table.is_some());
        Names {
            before_user: symbols.functions(),
            processes_from: processes.map(|seen| seen.steps).min(),
            symbols,
            recorded,
            programs: Vec::new(),
            user: UserCode::default(),
            switch,
            switch_function,
            new_thread,
            switches: ThreadSwitches::default(),
            first: 0,
            first_file: 0,
            guests: Vec::new(),
            vmcs: HashMap::new(),
            labels: Vec::new(),
            label_numbers: HashMap::new(),
        }
    }

    /// Takes on what is known of the guests of a hypervisor in the machine. `symbols` are those of guests of which nothing else is known.
    #[must_use]
    pub fn with_guests(mut self, recorded: RecordedGuests, symbols: SymbolTable) -> Names {
        let RecordedGuests { guests, seen } = recorded;
        let mut label = |text: &str| {
            let number = self.labels.len() as u32;
            let room = number < Function::FIRST_FILE - Function::FIRST_LABEL;
            if room && !self.label_numbers.contains_key(text) {
                self.label_numbers.insert(text.into(), number);
                self.labels.push(text.into());
            }
        };
        label(KERNEL);
        for VmcsSeen { steps, pointer, guest } in seen {
            label(&vmcs_label(pointer));
            self.vmcs.entry(pointer).or_default().push((steps, guest));
        }
        for seen in guests.iter().flat_map(|guest| &guest.tasks) {
            label(&seen.task.comm);
        }
        for mut recorded in guests {
            let symbols = std::mem::take(&mut recorded.symbols);
            self.guests.push(Names::new(symbols, recorded));
        }
        self.guests.push(Names::new(symbols, Recorded::default()));
        self.renumber();
        self
    }

    /// Gives the functions of each guest numbers of their own, and its files.
    fn renumber(&mut self) {
        let (mut next, mut file) = (self.last(), self.user.files());
        for guest in &mut self.guests {
            (guest.first, guest.first_file) = (next, file);
            (next, file) = (guest.last(), file + guest.user.files());
        }
    }

    /// The number of its first function, which tells a guest's names from others.
    pub fn first_number(&self) -> u32 {
        self.first
    }

    /// The number behind those of its own functions.
    fn last(&self) -> u32 {
        self.first + (self.before_user + self.user.functions()) as u32
    }

    /// The names of a second-level guest's code: those of the guest that a VMCS is of at a step.
    pub fn guest(&self, vmcs: Option<u64>, step: Option<u64>) -> &Names {
        let number = vmcs.and_then(|vmcs| self.guest_number(vmcs, step));
        let unknown = self.guests.len().saturating_sub(1);
        self.guests.get(number.unwrap_or(unknown)).unwrap_or(self)
    }

    /// Which of the guests a VMCS is of at a step.
    fn guest_number(&self, vmcs: u64, step: Option<u64>) -> Option<usize> {
        let seen = self.vmcs.get(&vmcs)?;
        let after = seen.partition_point(|(since, _)| step.is_some_and(|step| *since <= step));
        let before = after.checked_sub(1).and_then(|last| seen[last].1);
        before.or_else(|| seen[after..].iter().find_map(|(_, guest)| *guest))
    }

    /// The names of the code that runs: the machine's own, or, in VMX non-root operation, those of the guest.
    pub fn of(&self, here: &Here) -> &Names {
        match here.state.non_root {
            true => self.guest(here.state.vmcs, here.step),
            false => self,
        }
    }

    /// The program that is a second-level guest's VMM: the process of the machine's Linux that runs it, or its thread, if only that has a name.
    pub fn vmm(&self, here: &Here) -> Option<&str> {
        let thread = self.thread(self.thread_at(here.cpu, here.step)?);
        let is_its = |task: &Task| task.pid == thread.tgid && task.tgid == thread.tgid;
        let seen = self.recorded.tasks.iter().rev();
        let process = seen.map(|seen| &seen.task).find(|task| is_its(task));
        Some(process.map_or(&thread.comm, |task| &task.comm))
    }

    /// The process of that program.
    pub fn vmm_process(&self, here: &Here) -> Option<Process> {
        let tgid = self.thread(self.thread_at(here.cpu, here.step)?).tgid;
        let seen = self.recorded.tasks.iter().rev();
        let mut of_thread = seen.filter(|seen| seen.task.tgid == tgid);
        of_thread.find_map(|seen| seen.task.page_table.map(Process))
    }

    /// The label of a guest, by its VMCS pointer.
    pub(super) fn vmcs_label(&self, vmcs: Option<u64>) -> Function {
        vmcs.map_or(Function::GUEST, |vmcs| self.label(&vmcs_label(vmcs)))
    }

    /// The label of a process of a guest.
    pub(super) fn label(&self, text: &str) -> Function {
        let number = self.label_numbers.get(text);
        number.map_or(Function::GUEST, |number| Function(Function::FIRST_LABEL + number))
    }

    /// The guest that a function is of.
    fn guest_of(&self, function: Function) -> Option<&Names> {
        let of = |guest: &&Names| (guest.first..guest.last()).contains(&function.0);
        self.guests.iter().find(of)
    }

    /// The function is of a second-level guest: of its kernel or its modules, or of a program.
    pub fn is_guests(&self, function: Function) -> bool {
        self.guest_of(function).is_some()
    }

    /// The Linux of each second-level guest that was found.
    pub fn guests(&self) -> impl Iterator<Item = &Names> {
        self.guests.iter().filter(|guest| !guest.recorded.banner.is_empty())
    }

    /// VMCSs that were run.
    pub fn vmcs_count(&self) -> usize {
        self.vmcs.len()
    }

    /// Takes on which threads the vCPUs ran.
    #[must_use]
    pub fn with_threads(mut self, switches: ThreadSwitches) -> Names {
        self.switches = switches;
        self
    }

    /// Takes on the functions of programs.
    #[must_use]
    pub fn with_programs(mut self, programs: Vec<Program>) -> Names {
        self.programs = programs;
        self.before_user = self.all_tables().map(SymbolTable::functions).sum();
        self.renumber();
        self
    }

    /// Takes on what the processes had mapped, those of guests of a hypervisor, too, which have to be known before ([`Names::with_guests`]).
    /// Functions of the files are looked for where the guest's files are.
    #[must_use]
    pub fn with_mappings(mut self, mappings: Mappings, files: &mut GuestFiles) -> Names {
        let Mappings { files: mapped, all } = mappings;
        let mut own = Vec::new();
        let mut of_guests: Vec<Vec<Mapping>> = self.guests.iter().map(|_| Vec::new()).collect();
        for mapping in all {
            let guest = mapping.vmcs.map(|vmcs| self.guest_number(vmcs, Some(mapping.step)));
            match guest {
                None => own.push(mapping),
                Some(guest) => of_guests
                    .get_mut(guest.unwrap_or(usize::MAX))
                    .into_iter()
                    .for_each(|of| of.push(mapping)),
            }
        }
        for (guest, all) in self.guests.iter_mut().zip(of_guests) {
            let files_of = files_of(&mapped, all);
            guest.map(files_of, false, files);
        }
        self.map(
            Mappings {
                files: mapped,
                all: own,
            },
            true,
            files,
        );
        self.renumber();
        self
    }

    /// Takes on what this Linux's processes had mapped. `jits`: lists of functions that just-in-time compilers have left are its own.
    fn map(&mut self, mappings: Mappings, jits: bool, files: &mut GuestFiles) {
        let mut cache = ProcessCache::default();
        let pid = |table, step| {
            let task = self.task(Process(table), Some(step)).filter(|_| jits);
            task.map(|task| task.tgid)
        };
        let mut table = |cr3| cache.get(self, Some(cr3)).map(|process| process.0);
        self.user = UserCode::new(mappings, &mut table, &pid, &self.recorded.vdsos, files);
    }

    /// The symbols.
    pub fn symbols(&self) -> &SymbolTable {
        &self.symbols
    }

    /// What the trace has of its Linux.
    pub fn linux(&self) -> &Recorded {
        &self.recorded
    }

    /// The tables that an address is looked up in, and how many functions are in those before: the kernel's, in its half, or else
    /// those of programs that are the process's.
    fn tables(
        &self,
        ip: u64,
        process: Option<Process>,
        step: Option<u64>,
    ) -> impl Iterator<Item = (usize, &SymbolTable)> {
        let upper = self.upper(ip);
        let comm = (!upper && !self.programs.is_empty()).then(|| self.process_name(process, step));
        let mut before = self.symbols.functions();
        let programs = self.programs.iter().filter_map(move |program| {
            let first = before;
            before += program.symbols.functions();
            (comm == Some(program.comm.as_str())).then_some((first, &program.symbols))
        });
        std::iter::once((0, &self.symbols)).chain(programs)
    }

    /// The function at an address of a process at a step, and from where to where that holds.
    pub fn function(&self, ip: u64, process: Option<Process>, step: Option<u64>) -> (Function, u64, u64) {
        for (first, symbols) in self.tables(ip, process, step) {
            if let Some(n) = symbols.find(ip) {
                let start = symbols.function(n).map_or(ip, |symbol| symbol.address);
                return (Function(self.first + (first + n) as u32), start, symbols.end(n));
            }
        }
        if self.upper(ip) {
            return (Function::UNKNOWN, 0, 0);
        }
        let found = process.and_then(|process| self.user.find(process.0, ip, step.unwrap_or(0)));
        if let Some(found) = found {
            let function = match found.function {
                Some(n) => Function(self.first + (self.before_user + n) as u32),
                None => Function::of_file(self.first_file + found.file),
            };
            return (function, found.start, found.end);
        }
        if self.processes_from.zip(step).is_some_and(|(first, step)| step < first) {
            return (Function::BOOT, 0, 1 << 63);
        }
        if self.programs.is_empty() && self.user.is_empty() {
            (Function::USER, 0, 1 << 63)
        } else {
            // What is beside it may have a name.
            (Function::USER, ip, ip)
        }
    }

    /// What is at an address of a process at a step.
    pub fn place(&self, ip: u64, process: Option<Process>, step: Option<u64>) -> Option<NamedAddress<'_>> {
        let named = self
            .tables(ip, process, step)
            .find_map(|(_, symbols)| symbols.lookup(ip));
        named.or_else(|| {
            self.user
                .place(process?.0, ip, step.unwrap_or(0))
                .filter(|_| !self.upper(ip))
        })
    }

    /// The name of the file that code in a range of addresses of a user's program is of.
    pub fn file_at(&self, range: Range<u64>, process: Process, step: Option<u64>) -> Option<&str> {
        let (mut at, end) = (range.start, range.end);
        while at < end && !self.upper(at) {
            let (function, _, next) = self.function(at, Some(process), step);
            if let Some(name) = self.module(function).or_else(|| self.file_of(function)) {
                return Some(name.trim_matches(['[', ']']));
            }
            at = next.max(at + 1);
        }
        None
    }

    /// The functions in a range of addresses of a user's program, each with the part of the range that it has.
    pub fn each_function(
        &self,
        range: Range<u64>,
        process: Process,
        step: Option<u64>,
        each: &mut dyn FnMut(Range<u64>, &str),
    ) {
        let mut at = range.start;
        while at < range.end && !self.upper(at) {
            let (function, _, next) = self.function(at, Some(process), step);
            let next = next.max(at + 1).min(range.end);
            if function.known() {
                each(at..next, self.name(function));
            }
            at = next;
        }
    }

    /// The address of a function, of the kernel or else of a program, or else of the kernel of a second-level guest.
    pub fn address(&self, name: &str) -> Option<u64> {
        let found = self.all_tables().find_map(|symbols| symbols.address(name));
        let found = found.or_else(|| self.user.address(name));
        found.or_else(|| self.guests.iter().find_map(|guest| guest.address(name)))
    }

    /// The kernel's, and those of programs, as functions are numbered.
    fn all_tables(&self) -> impl Iterator<Item = &SymbolTable> {
        let programs = self.programs.iter().map(|program| &program.symbols);
        std::iter::once(&self.symbols).chain(programs)
    }

    fn symbol(&self, function: Function) -> Option<Symbol<'_>> {
        if let Some(guest) = self.guest_of(function) {
            return guest.symbol(function);
        }
        let mut n = function.0.checked_sub(self.first)? as usize;
        if let Some(user) = n.checked_sub(self.before_user) {
            return self.user.symbol(user).filter(|_| function.known());
        }
        for symbols in self.all_tables() {
            match n.checked_sub(symbols.functions()) {
                None => return symbols.function(n),
                Some(rest) => n = rest,
            }
        }
        None
    }

    /// The address is in the kernel's half. Where no Linux is, nobody knows: then all code is the kernel's.
    pub fn upper(&self, ip: u64) -> bool {
        ip >> 63 == 1 || self.recorded.banner.is_empty()
    }

    /// A function's name.
    pub fn name(&self, function: Function) -> &str {
        match function {
            Function::USER => "[user]",
            Function::BOOT => "[boot]",
            Function::UNKNOWN => "[unknown]",
            Function::GUEST => "[guest]",
            function if function.is_label() => {
                let label = self.labels.get((function.0 - Function::FIRST_LABEL) as usize);
                label.map_or("[guest]", String::as_str)
            }
            function => match self.file_of(function) {
                Some(file) => file,
                None => self.symbol(function).map_or("[unknown]", |symbol| symbol.name),
            },
        }
    }

    /// The module or program that a function is of.
    pub fn module(&self, function: Function) -> Option<&str> {
        self.symbol(function)?.module
    }

    /// `[libc.so.6]`, for code of that file of which no function is known.
    pub fn file_of(&self, function: Function) -> Option<&str> {
        let n = function.file()?;
        let mut all = std::iter::once(self).chain(&self.guests);
        all.find_map(|names| names.user.file_name(n.checked_sub(names.first_file)?))
    }

    /// Part of whatever jumps to it: what the compiler has put elsewhere, and the thunks that Linux's returns go through.
    pub fn is_part(&self, function: Function) -> bool {
        let part = |name: &str| {
            name.ends_with(".cold") || matches!(name, "__x86_return_thunk" | "its_return_thunk" | "srso_return_thunk")
        };
        function.known() && part(self.name(function))
    }

    /// The function in which Linux goes from one thread to another.
    pub fn switches(&self, ip: u64) -> bool {
        self.switch.is_some_and(|(start, end)| (start..end).contains(&ip))
    }

    /// It is the function in which Linux goes from one thread to another.
    pub fn is_switch(&self, function: Function) -> bool {
        self.switch_function.is_some_and(|n| self.first + n == function.0)
    }

    /// It is the function in which Linux has a new thread run for the first time.
    pub fn makes_thread(&self, function: Function) -> bool {
        self.new_thread.is_some_and(|n| self.first + n == function.0)
    }

    /// The thread that a vCPU runs, or is about to, at a step.
    pub fn thread_at(&self, cpu: usize, step: Option<u64>) -> Option<ThreadId> {
        self.switches.at(cpu, step?)
    }

    /// The thread that a vCPU ran before the one that it goes over to at a step.
    pub fn thread_before(&self, cpu: usize, step: u64) -> Option<ThreadId> {
        self.switches.before(cpu, step)
    }

    /// Whether a thread ran on another vCPU behind step `from`, up to `to`.
    pub fn ran_elsewhere(&self, tid: u32, cpu: usize, from: u64, to: u64) -> bool {
        self.switches.ran_elsewhere(tid, cpu, from, to)
    }

    /// A thread.
    pub fn thread(&self, id: ThreadId) -> &Thread {
        self.switches.thread(id)
    }

    /// The name of whose frames they are at a step: the thread's, or else the process's as [`Names::process_name`] has it. A process's first
    /// thread may have got another by exec since it was gone over to.
    pub fn owner_name(&self, owner: Owner, step: Option<u64>) -> &str {
        let Some(thread) = owner.thread.map(|id| self.thread(id)) else {
            return self.process_name(owner.process, step);
        };
        let task = owner.process.and_then(|process| self.task(process, step));
        match task {
            Some(task) if task.tgid == thread.tgid && thread.tid == thread.tgid => &task.comm,
            _ => &thread.comm,
        }
    }

    /// Whose addresses CR3 shows. With page-table isolation there are two tables for each: they are one.
    pub fn process(&self, cr3: Option<u64>) -> Option<Process> {
        let cr3 = cr3? & !0xfff;
        let other = cr3 & !0x1fff;
        let known = |table| {
            self.recorded
                .tasks
                .iter()
                .any(|seen| seen.task.page_table == Some(table))
        };
        Some(Process(if cr3 != other && !known(cr3) && known(other) {
            other
        } else {
            cr3
        }))
    }

    /// The process's name and numbers at a step.
    pub fn task(&self, process: Process, step: Option<u64>) -> Option<&Task> {
        self.recorded.task(process.0, step.unwrap_or(0))
    }

    /// The process's name; `[kernel]` for the kernel's own threads and for what ran before there were processes.
    pub fn process_name(&self, process: Option<Process>, step: Option<u64>) -> &str {
        match process.and_then(|process| self.task(process, step)) {
            Some(task) => &task.comm,
            None if self.recorded.banner.is_empty() => "guest",
            None => KERNEL,
        }
    }
}

/// These mappings, with those of the files that they are of.
fn files_of(files: &[MappedFile], mut all: Vec<Mapping>) -> Mappings {
    let mut numbers: HashMap<usize, usize> = HashMap::new();
    let mut of = Vec::new();
    for file in all.iter_mut().filter_map(|mapping| mapping.file.as_mut()) {
        *file = *numbers.entry(*file).or_insert_with(|| {
            of.push(files[*file].clone());
            of.len() - 1
        });
    }
    Mappings { files: of, all }
}

/// Remembers whose CR3 is whose: it is asked at each event.
#[derive(Debug, Default)]
pub struct ProcessCache(HashMap<u64, Option<Process>>);

impl ProcessCache {
    /// As [`Names::process`].
    pub fn get(&mut self, names: &Names, cr3: Option<u64>) -> Option<Process> {
        let cr3 = cr3?;
        *self.0.entry(cr3).or_insert_with(|| names.process(Some(cr3)))
    }
}

#[cfg(test)]
#[path = "names_test.rs"]
mod tests;
