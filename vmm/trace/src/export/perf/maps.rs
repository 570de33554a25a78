//! Where perf finds code: the kernel's core file, a file of code for each process, and records of all that changes.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    fs::{self, File},
    io::{self, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use crate::{
    directory::format::PAGE,
    view::{Names, Process, ProcessCache},
};

use super::{
    code::{At, Changed, Key, Pages, differences, runs},
    image::Image,
    record::*,
    turn::Turn,
};

/// Page tables that no process ever had are the kernel's, also those with which it is unpacked and moved: code at low addresses,
/// which goes on where CR3 changes. To perf they are one process, of this number.
const KERNEL: Process = Process(0);
const KERNEL_PID: u32 = 100_000;

/// Records with their times, in nanoseconds.
pub type Records = Vec<(u64, Vec<u8>)>;

/// A process that has run.
#[derive(Debug)]
struct Running {
    process: Process,
    /// The folder of its files.
    folder: String,
    /// At which step it ran last.
    step: Option<u64>,
    /// Its files, by the name of the program or library.
    files: HashMap<String, Image>,
}

/// What is not of a file that is known by name.
const NAMELESS: &str = "code";

/// A name as a file can have it.
fn file_name(name: &str) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
    let name: String = name.chars().map(|c| if good(c) { c } else { '_' }).take(128).collect();
    match name.trim_matches('.') {
        "" => NAMELESS.into(),
        _ => name,
    }
}

/// Whose the records are.
#[derive(Clone, Copy, Debug)]
pub struct Level {
    /// The event that they come with.
    pub id: u64,
    /// Of records about the kernel: whose kernel.
    pub kernel: u16,
    /// Of records about code of users.
    pub user: u16,
    /// Of all others.
    pub other: u16,
}

impl Level {
    /// The machine's own.
    pub const MACHINE: Level = Level {
        id: ID_DUMMY,
        kernel: MISC_KERNEL,
        user: MISC_USER,
        other: 0,
    };

    /// A guest's of a hypervisor in the machine, by its number.
    pub fn guest(number: usize) -> Level {
        Level {
            id: ID_GUEST + number as u64,
            kernel: MISC_GUEST_KERNEL,
            user: MISC_GUEST_USER,
            other: MISC_GUEST_USER,
        }
    }
}

/// Tells perf of code, moment by moment.
#[derive(Debug)]
pub struct Maps<'a> {
    level: Level,
    names: &'a Names,
    pages: Pages<'a>,
    scale: Scale,
    /// Where files of code are written, and where they will be.
    dir: PathBuf,
    path: PathBuf,
    cache: ProcessCache,
    /// The kernel's code now.
    kernel: BTreeMap<u64, At>,
    /// Each address space's code now, by address.
    users: HashMap<Process, BTreeMap<u64, At>>,
    /// Whose code a process number has.
    running: HashMap<u32, Running>,
    /// Files of code that have no more pages.
    finished: Vec<Image>,
    /// What has been written so far.
    pub records: Records,
}

impl<'a> Maps<'a> {
    /// Begins with the code as it was first. `work` is the directory now, `path` where it will be; files of code are in a folder of it.
    ///
    /// # Errors
    /// A directory cannot be made.
    pub fn new(
        level: Level,
        names: &'a Names,
        (pages, first): (Pages<'a>, &BTreeMap<Key, At>),
        scale: Scale,
        (work, path, folder): (&Path, &Path, &str),
    ) -> io::Result<Maps<'a>> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = fs::canonicalize(parent.unwrap_or(Path::new(".")))?;
        let dir = work.join(folder);
        fs::create_dir(&dir)?;
        let mut maps = Maps {
            level,
            names,
            pages,
            scale,
            dir,
            path: parent.join(path.file_name().unwrap_or_default()).join(folder),
            cache: ProcessCache::default(),
            kernel: BTreeMap::new(),
            users: HashMap::new(),
            running: HashMap::new(),
            finished: Vec::new(),
            records: Vec::new(),
        };
        for (&(space, page), &at) in first {
            match maps.process(space) {
                None => drop(maps.kernel.insert(page << 12, at)),
                Some(process) => drop(maps.users.entry(process).or_default().entry(page << 12).or_insert(at)),
            }
        }
        Ok(maps)
    }

    /// Whose space it is; `None`: the addresses that all have.
    fn process(&mut self, space: u64) -> Option<Process> {
        let process = self.cache.get(self.names, space.checked_sub(1).map(|cr3| cr3 << 5))?;
        Some(self.known(process))
    }

    fn known(&self, process: Process) -> Process {
        self.names.task(process, None).map_or(KERNEL, |_| process)
    }

    /// What perf takes a kernel's code and names from: `kcore`, `kallsyms` and `modules`.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn write_kernel(&mut self, dir: &Path) -> io::Result<()> {
        fs::create_dir(dir)?;
        let symbols = self.names.symbols();
        fs::write(dir.join("kallsyms"), crate::linux::kallsyms_text(symbols, []))?;
        let modules = self.names.linux().modules.iter();
        let modules: String = modules
            .map(|(name, base, size)| format!("{name} {size} 0 - Live 0x{base:016x}\n"))
            .collect();
        fs::write(dir.join("modules"), modules)?;
        // The kernel's map, as perf finds it by `_text`.
        let text = symbols.address("_text").unwrap_or(0);
        let end = symbols.address("_etext").unwrap_or(text);
        let mut rec = Rec::new(MMAP, self.level.kernel);
        rec.u32(u32::MAX);
        rec.u32(0);
        rec.u64(text);
        rec.u64(end.saturating_sub(text));
        rec.u64(text);
        rec.text("[kernel.kallsyms]_text");
        self.records.push((0, rec.id(0, 0, 0, self.level.id)));
        self.kcore(&dir.join("kcore"))
    }

    /// A core file of the kernel's pages. What was not executed is a hole.
    fn kcore(&mut self, path: &Path) -> io::Result<()> {
        const NEAR: u64 = 4 << 20;
        let mut file = File::create_new(path)?;
        let pages: Vec<(u64, At)> = self.kernel.iter().map(|(address, at)| (*address, *at)).collect();
        let runs = runs(&pages, NEAR);
        let header = (64 + 56 * runs.len() as u64).next_multiple_of(PAGE as u64);
        let mut head = Rec(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec());
        // ET_CORE for x86-64, with the program headers right behind.
        head.u16(4);
        head.u16(62);
        head.u32(1);
        head.u64(0);
        head.u64(64);
        head.u64(0);
        head.u32(0);
        for value in [64, 56, runs.len() as u16, 0, 0, 0] {
            head.u16(value);
        }
        let mut offset = header;
        for run in &runs {
            let (start, last) = (run[0].0, run[run.len() - 1].0);
            let len = last - start + PAGE as u64;
            // PT_LOAD, readable and executable.
            head.u32(1);
            head.u32(5);
            for value in [offset, start, start & 0x7fff_ffff, len, len, PAGE as u64] {
                head.u64(value);
            }
            for (address, at) in run {
                file.seek(SeekFrom::Start(offset + address - start))?;
                file.write_all(&self.pages.read(*at)?)?;
            }
            offset += len;
        }
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&head.0)?;
        file.set_len(offset)
    }

    /// Code changes.
    ///
    /// # Errors
    /// Pages cannot be read, or their files not be written.
    pub fn change(&mut self, change: &Changed) -> io::Result<()> {
        let time = self.scale.ns(change.ticks);
        let address = change.key.1 << 12;
        let process = self.process(change.key.0);
        let pages = match process {
            None => &mut self.kernel,
            Some(process) => self.users.entry(process).or_default(),
        };
        let was = pages.insert(address, change.now);
        let now = self.pages.read(change.now)?;
        let was = was.map(|was| self.pages.read(was)).transpose()?;
        if was == Some(now) {
            return Ok(());
        }
        let Some(process) = process else {
            let was = was.unwrap_or([0; PAGE]);
            for range in differences(&was, &now) {
                let mut rec = Rec::new(TEXT_POKE, self.level.kernel);
                rec.u64(address + range.start as u64);
                rec.u16(range.len() as u16);
                rec.u16(range.len() as u16);
                rec.0.extend_from_slice(&was[range.clone()]);
                rec.0.extend_from_slice(&now[range]);
                rec.pad();
                self.records.push((time, rec.id(0, time, 0, self.level.id)));
            }
            return Ok(());
        };
        // The page is mapped anew, for those who have it now; others hear of it when it is their turn.
        let have = self.running.iter().filter(|(_, running)| running.process == process);
        for pid in have.map(|(pid, _)| *pid).collect::<Vec<_>>() {
            self.map(pid, &[(address, change.now)], time)?;
        }
        Ok(())
    }

    /// A vCPU goes over to another process.
    ///
    /// # Errors
    /// Pages cannot be read, or their files not be written.
    pub fn turn(&mut self, turn: &Turn) -> io::Result<()> {
        let time = self.scale.ns(turn.ticks);
        let process = self.known(turn.process);
        let task = self.names.task(process, turn.step);
        let pid = task.map_or(KERNEL_PID, |task| task.tgid);
        // With an exec a process gets another address space, and a name.
        if let Some(running) = self.running.get_mut(&pid).filter(|running| running.process == process) {
            running.step = turn.step;
        } else {
            let name = task.map_or("kernel", |task| &task.comm);
            let mut rec = Rec::new(COMM, MISC_COMM_EXEC | self.level.other);
            rec.u32(pid);
            rec.u32(pid);
            rec.text(name);
            self.records.push((time, rec.id(pid, time, turn.cpu, self.level.id)));
            let name = name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
            let (mut folder, mut times) = (format!("{pid}-{name}"), 1);
            while self.dir.join(&folder).exists() {
                times += 1;
                folder = format!("{pid}-{name}-{times}");
            }
            fs::create_dir(self.dir.join(&folder))?;
            let running = Running {
                process,
                folder,
                step: turn.step,
                files: HashMap::new(),
            };
            let before = self.running.insert(pid, running);
            self.finished
                .extend(before.into_iter().flat_map(|before| before.files.into_values()));
            let pages = self.users.get(&process);
            let pages: Vec<(u64, At)> = pages
                .into_iter()
                .flatten()
                .map(|(address, at)| (*address, *at))
                .collect();
            for run in runs(&pages, 0) {
                self.map(pid, &run, time)?;
            }
        }
        let rec = Rec::new(SWITCH, self.level.other);
        self.records.push((time, rec.id(pid, time, turn.cpu, self.level.id)));
        Ok(())
    }

    /// Maps pages that lie together, those of each program and library from its file.
    fn map(&mut self, pid: u32, run: &[(u64, At)], time: u64) -> io::Result<()> {
        let Some(running) = self.running.get(&pid) else {
            return Ok(());
        };
        let (process, step) = (running.process, running.step);
        let whose = |page: u64| {
            self.names
                .file_at(page..page + PAGE as u64, process, step)
                .unwrap_or(NAMELESS)
        };
        let parts: Vec<(String, &[(u64, At)])> = run
            .chunk_by(|a, b| whose(a.0) == whose(b.0))
            .map(|part| (whose(part[0].0).to_string(), part))
            .collect();
        for (name, part) in parts {
            self.map_part(pid, &file_name(&name), part, time)?;
        }
        Ok(())
    }

    fn map_part(&mut self, pid: u32, name: &str, part: &[(u64, At)], time: u64) -> io::Result<()> {
        let (Some(running), Some(first)) = (self.running.get_mut(&pid), part.first()) else {
            return Ok(());
        };
        let (process, step) = (running.process, running.step);
        let file = match running.files.entry(name.to_string()) {
            Entry::Occupied(file) => file.into_mut(),
            Entry::Vacant(place) => place.insert(Image::create(self.dir.join(&running.folder).join(name))?),
        };
        let pages: io::Result<Vec<_>> = part.iter().map(|(_, at)| self.pages.read(*at)).collect();
        let offset = file.append(&pages?)?;
        let len = (part.len() * PAGE) as u64;
        self.names
            .each_function(first.0..first.0 + len, process, step, &mut |range, name| {
                file.name(offset + (range.start - first.0), range.end - range.start, name);
            });
        let mut rec = Rec::new(MMAP2, self.level.user);
        rec.u32(pid);
        rec.u32(pid);
        for value in [first.0, len, offset] {
            rec.u64(value);
        }
        // Device, inode and its generation; PROT_READ | PROT_EXEC, MAP_PRIVATE.
        for value in [0, 0] {
            rec.u32(value);
        }
        rec.u64(0);
        rec.u64(0);
        rec.u32(5);
        rec.u32(2);
        let path = self.path.join(&running.folder).join(name);
        rec.text(&path.to_string_lossy());
        self.records.push((time, rec.id(pid, time, 0, self.level.id)));
        Ok(())
    }

    /// Gives all files their names of functions.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn finish(&mut self) -> io::Result<()> {
        let last = self
            .running
            .drain()
            .flat_map(|(_, running)| running.files.into_values());
        self.finished.drain(..).chain(last).try_for_each(Image::finish)
    }
}
