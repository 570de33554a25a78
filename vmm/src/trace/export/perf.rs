//! A perf.data directory that carries the code it is of: what perf 6.1 reads with `perf script -i DIR --itrace=...`.
//!
//! Layout: tools/perf/Documentation/perf.data-file-format.txt of Linux; records: include/uapi/linux/perf_event.h and
//! tools/lib/perf/include/perf/event.h; what an Intel PT event says of itself: tools/perf/util/intel-pt.h.
//!
//! # How code gets to perf
//!
//! perf takes the kernel's code from `kcore_dir/kcore`, a core file; here it has each page as it was when it was first executed in the
//! window, and PERF_RECORD_TEXT_POKE tells each change at its time, which is that of a PSB. A process's code is a file of its own that
//! MMAP2 maps; PERF_RECORD_SWITCH_CPU_WIDE tells at each change of CR3 whose turn it is. perf has no word for changes of user code: those
//! are counted, and decode in windows between them.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
    path::Path,
};

use pt_flow::{Block, Event, EventKind};

use crate::{
    error::Error,
    trace::{
        Clock, Trace,
        format::{Kind, Mark, PAGE, Record},
        frames::Frames,
        image::{Next, Side},
        packets::{Damage, Packets},
        view::{Bound, Here, Names, Process, ProcessCache, Totals, Viewer, Window, view},
    },
};

use super::Folder;

/// What is wanted.
#[derive(Debug)]
pub struct Job<'a> {
    /// The trace.
    pub trace: &'a Trace,
    /// Its names.
    pub names: &'a Names,
    /// The part.
    pub window: Window,
    /// The vCPUs.
    pub cpus: &'a [usize],
    /// The directory.
    pub path: &'a Path,
    /// Replace it.
    pub force: bool,
}

// Types of records.
const MMAP: u32 = 1;
const COMM: u32 = 3;
const MMAP2: u32 = 10;
const AUX: u32 = 11;
const ITRACE_START: u32 = 12;
const SWITCH_CPU_WIDE: u32 = 15;
const TEXT_POKE: u32 = 20;
const FINISHED_ROUND: u32 = 68;
const AUXTRACE_INFO: u32 = 70;
const AUXTRACE: u32 = 71;
// And what stands beside them.
const MISC_KERNEL: u16 = 1;
const MISC_USER: u16 = 2;
const MISC_SWITCH_OUT: u16 = 1 << 13;
const MISC_COMM_EXEC: u16 = 1 << 13;

/// The type of the event: a PMU's number, which is any number that is not another's.
const PMU: u32 = 8;
const ID_PT: u64 = 11;
const ID_DUMMY: u64 = 12;
/// PERF_SAMPLE_IP, TID, TIME, CPU, IDENTIFIER: perf shows no addresses without the first.
const SAMPLE: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 7 | 1 << 16;
const ATTR: usize = 112;
/// sample_id_all.
const ID_ALL: u64 = 1 << 18;
/// The attribute's bits of the event that the rest comes with: mmap, comm, mmap2, sample_id_all, comm_exec, context_switch, text_poke.
const DUMMY_BITS: u64 = 1 << 8 | 1 << 9 | 1 << 13 | ID_ALL | 1 << 23 | 1 << 24 | 1 << 26 | 1 << 31;
/// exclude_hv, sample_id_all.
const PT_BITS: u64 = 1 | 1 << 6 | ID_ALL;
/// HEADER_ARCH, HEADER_DIR_FORMAT.
const FEATURE_ARCH: usize = 6;
const FEATURE_DIR: usize = 24;

/// A record under way.
struct Rec(Vec<u8>);

impl Rec {
    fn new(kind: u32, misc: u16) -> Rec {
        let mut rec = Rec(Vec::new());
        rec.u32(kind);
        rec.u16(misc);
        rec.u16(0);
        rec
    }
    fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn text(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
        self.0.push(0);
        self.pad();
    }
    fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
    }
    /// What follows every record that is not perf's own: SAMPLE's fields.
    fn id(mut self, pid: u32, time: u64, cpu: u32, id: u64) -> Vec<u8> {
        self.u32(pid);
        self.u32(pid);
        self.u64(time);
        self.u32(cpu);
        self.u32(0);
        self.u64(id);
        self.done()
    }
    fn done(mut self) -> Vec<u8> {
        let len = self.0.len() as u16;
        self.0[6..8].copy_from_slice(&len.to_le_bytes());
        self.0
    }
}

/// Turns ticks into nanoseconds as perf does.
#[derive(Clone, Copy)]
struct Scale {
    shift: u16,
    mult: u64,
}

impl Scale {
    fn new(khz: u32) -> Scale {
        let khz = u64::from(khz.max(1));
        let mult = |shift: u16| ((1_000_000u64 << shift) + khz / 2) / khz;
        let shift = (0..=31)
            .rev()
            .find(|shift| mult(*shift) <= u64::from(u32::MAX))
            .unwrap_or(0);
        Scale {
            shift,
            mult: mult(shift),
        }
    }

    fn ns(self, ticks: u64) -> u64 {
        let (quotient, rest) = (ticks >> self.shift, ticks & ((1 << self.shift) - 1));
        quotient * self.mult + (rest * self.mult >> self.shift)
    }
}

type Key = (u64, u64);
/// A page's content: segment and place of its file.
type At = (usize, u32, u64);

/// The code of a window.
#[derive(Default)]
struct Code {
    /// As it was first.
    first: BTreeMap<Key, At>,
    /// As it is at the end.
    last: HashMap<Key, At>,
    /// Changes in the window: when, where, from, to.
    pokes: Vec<(u64, u64, At, At)>,
    /// Changes of user code: from, to.
    user: Vec<(At, At)>,
}

/// When a vCPU went over to another process.
struct Switches<'a> {
    names: &'a Names,
    cache: ProcessCache,
    now: Option<Process>,
    found: Vec<(u64, Process)>,
    steps: HashMap<Process, u64>,
}

impl Switches<'_> {
    fn at(&mut self, ticks: u64, here: &Here, cr3: Option<u64>) {
        let Some(process) = self.cache.get(self.names, cr3) else {
            return;
        };
        if self.now != Some(process) {
            self.now = Some(process);
            self.found.push((ticks, process));
            self.steps.entry(process).or_insert(here.step.unwrap_or(0));
        }
    }
}

impl Viewer for Switches<'_> {
    fn block(&mut self, here: &Here, _: &Block, _: &[u8]) {
        // Whoever runs when the window begins has run before it, as far as perf sees.
        if self.now.is_none() {
            self.at(0, here, here.state.cr3);
        }
    }

    fn event(&mut self, here: &Here, event: &Event) {
        if let EventKind::Paging { cr3, .. } = event.kind {
            let ticks = if self.now.is_none() { 0 } else { here.ticks.unwrap_or(0) };
            self.at(ticks, here, Some(cr3));
        }
    }
}

/// Writes the directory.
///
/// # Errors
/// The trace cannot be read or the directory not be written; the trace has no symbols of a kernel.
pub fn export(job: &Job<'_>, progress: &mut dyn FnMut(&str, u64, u64)) -> Result<Totals, Error> {
    if job.names.symbols().address("_text").is_none() {
        return Err(Error::Usage(format!(
            "--perf {}: perf needs the symbols of a Linux kernel, and the trace has none: give some with --symbols",
            job.path.display()
        )));
    }
    let folder = Folder::create("--perf", job.path, job.force, "data")?;
    let mut totals = Totals::default();
    let mut switches = Vec::new();
    let mut names_at: HashMap<Process, u64> = HashMap::new();
    for &cpu in job.cpus {
        let mut found = Switches {
            names: job.names,
            cache: ProcessCache::default(),
            now: None,
            found: Vec::new(),
            steps: HashMap::new(),
        };
        totals.add(&view(job.trace, cpu, &job.window, &mut found, &mut |done, total| {
            progress("processes", done, total)
        })?);
        names_at.extend(found.steps);
        switches.push(found.found);
    }
    let written = Writer {
        job,
        folder: &folder,
        scale: Scale::new(job.trace.header().tsc_khz),
        steps: totals.steps,
    }
    .write(&switches, &names_at, progress);
    let user_changes = written.map_err(|error| folder.error(error))?;
    folder.finish()?;
    if user_changes > 0 {
        totals.damage.push(format!(
            "{}: user code changed {user_changes} times in this window, of which perf cannot be told: it may report errors there",
            job.path.display()
        ));
    }
    Ok(totals)
}

struct Writer<'a> {
    job: &'a Job<'a>,
    folder: &'a Folder,
    scale: Scale,
    steps: Option<(u64, u64)>,
}

impl Writer<'_> {
    /// The packets of the window: from a PSB to one, or to the end.
    fn range(&self, cpu: usize, clock: &Clock) -> std::ops::Range<u64> {
        let extent = self.job.trace.extent(cpu);
        let syncs = clock.syncs();
        let steps = self.steps;
        let from = match (self.job.window.from, steps) {
            (Some(Bound::Step(step)), _) | (Some(_), Some((step, _))) => {
                let after = syncs.partition_point(|sync| sync.step <= step);
                syncs
                    .get(after.saturating_sub(1))
                    .map_or(extent.start, |sync| sync.offset)
            }
            _ => extent.start,
        };
        let to = match (self.job.window.to, steps) {
            (Some(Bound::Step(step)), _) | (Some(_), Some((_, step))) => {
                let after = syncs.partition_point(|sync| sync.step <= step);
                syncs.get(after).map_or(extent.end, |sync| sync.offset)
            }
            _ => extent.end,
        };
        from.max(extent.start)..to.min(extent.end)
    }

    /// What code there is, and how it changes.
    fn code(&self, cpu: usize, range: &std::ops::Range<u64>, clock: &Clock, code: &mut Code) {
        let damage = Damage::default();
        let mut side = Side::new(self.job.trace.folder(), cpu, self.job.trace.segments(cpu));
        let (mut segment, mut contents, mut at) = (0, Vec::new(), 0);
        let own = code.first.is_empty();
        while let Some(next) = side.next(&damage) {
            let Next::Record(record, place) = next else {
                if let Next::Segment(number) = next {
                    segment = number;
                    contents.clear();
                }
                continue;
            };
            let (key, content) = match record {
                Record::Content { .. } => {
                    contents.push(place);
                    continue;
                }
                Record::Page { space, page, content } => ((space, page), content),
                Record::Change {
                    offset,
                    space,
                    page,
                    content,
                    ..
                } => {
                    at = offset;
                    ((space, page), content)
                }
                Record::Mark {
                    mark: Mark::Segment,
                    offset,
                    ..
                } => {
                    at = offset;
                    continue;
                }
                _ => continue,
            };
            if at >= range.end {
                break;
            }
            let Some(&place) = contents.get(content as usize) else {
                continue;
            };
            let now = (cpu, segment, place);
            if at <= range.start {
                // The first vCPU's code holds; what another one has as well is the same, or is told when it changes.
                if own {
                    code.first.insert(key, now);
                    code.last.insert(key, now);
                } else {
                    code.first.entry(key).or_insert(now);
                    code.last.entry(key).or_insert(now);
                }
                continue;
            }
            self.changed(code, key, now, at, clock);
        }
    }

    fn changed(&self, code: &mut Code, key: Key, now: At, offset: u64, clock: &Clock) {
        let was = code.last.insert(key, now);
        let Some(was) = was else {
            code.first.entry(key).or_insert(now);
            return;
        };
        if was == now {
            return;
        }
        if key.0 != 0 {
            code.user.push((was, now));
            return;
        }
        let after = clock.syncs().partition_point(|sync| sync.offset <= offset);
        let ticks = clock.syncs().get(after.saturating_sub(1)).map_or(0, |sync| sync.tick);
        code.pokes.push((ticks, key.1, was, now));
    }

    fn page(&self, files: &mut HashMap<(usize, u32), File>, at: At) -> io::Result<[u8; PAGE]> {
        let file = match files.entry((at.0, at.1)) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(File::open(self.job.trace.folder().join(Kind::Side.file(at.0, at.1)))?)
            }
        };
        let mut bytes = [0; PAGE];
        file.read_exact_at(&mut bytes, at.2)?;
        Ok(bytes)
    }

    fn write(
        &self,
        switches: &[Vec<(u64, Process)>],
        names_at: &HashMap<Process, u64>,
        progress: &mut dyn FnMut(&str, u64, u64),
    ) -> io::Result<u64> {
        let mut code = Code::default();
        let mut ranges = Vec::new();
        for &cpu in self.job.cpus {
            let clock = self.job.trace.clock(cpu);
            let range = self.range(cpu, &clock);
            self.code(cpu, &range, &clock, &mut code);
            ranges.push(range);
        }
        let mut files = HashMap::new();
        let kcore = self.folder.work().join("kcore_dir");
        fs::create_dir(&kcore)?;
        let kernel = |key: &&Key| key.0 == 0;
        let upper: Vec<(u64, At)> = code
            .first
            .iter()
            .filter(|(key, _)| kernel(key))
            .map(|(key, at)| (key.1 << 12, *at))
            .collect();
        self.kcore(&kcore.join("kcore"), &upper, &mut files)?;
        let kallsyms = crate::linux::kallsyms_text(self.job.names.symbols(), []);
        fs::write(kcore.join("kallsyms"), kallsyms)?;
        let modules: String = self
            .job
            .names
            .linux()
            .modules
            .iter()
            .map(|(name, base, size)| format!("{name} {size} 0 - Live 0x{base:016x}\n"))
            .collect();
        fs::write(kcore.join("modules"), modules)?;

        let mut records: Vec<(u64, Vec<u8>)> = Vec::new();
        let pids = self.processes(&mut code, names_at, &mut files, &mut records)?;
        self.kernel_map(&mut records);
        for (&cpu, switches) in self.job.cpus.iter().zip(switches) {
            let mut old = 0;
            for (ticks, process) in switches {
                let Some(&pid) = pids.get(process) else { continue };
                let time = self.scale.ns(*ticks);
                let mut rec = Rec::new(SWITCH_CPU_WIDE, MISC_SWITCH_OUT);
                rec.u32(pid);
                rec.u32(pid);
                records.push((time, rec.id(old, time.max(3), cpu as u32, ID_DUMMY)));
                old = pid;
            }
        }
        for (ticks, page, was, now) in std::mem::take(&mut code.pokes) {
            let (was, now) = (self.page(&mut files, was)?, self.page(&mut files, now)?);
            let time = self.scale.ns(ticks);
            for range in differences(&was, &now) {
                let mut rec = Rec::new(TEXT_POKE, MISC_KERNEL);
                rec.u64((page << 12) + range.start as u64);
                rec.u16(range.len() as u16);
                rec.u16(range.len() as u16);
                rec.0.extend_from_slice(&was[range.clone()]);
                rec.0.extend_from_slice(&now[range]);
                rec.pad();
                records.push((time, rec.id(0, time, 0, ID_DUMMY)));
            }
        }
        records.sort_by_key(|(time, _)| *time);
        self.data(&ranges, &records, progress)?;
        let mut changes = 0;
        for (was, now) in code.user {
            changes += u64::from(self.page(&mut files, was)? != self.page(&mut files, now)?);
        }
        Ok(changes)
    }

    /// Maps the kernel, as perf finds it by `_text`.
    fn kernel_map(&self, records: &mut Vec<(u64, Vec<u8>)>) {
        let symbols = self.job.names.symbols();
        let text = symbols.address("_text").unwrap_or(0);
        let end = symbols.address("_etext").unwrap_or(text);
        let mut rec = Rec::new(MMAP, MISC_KERNEL);
        rec.u32(u32::MAX);
        rec.u32(0);
        rec.u64(text);
        rec.u64(end.saturating_sub(text));
        rec.u64(text);
        rec.text("[kernel.kallsyms]_text");
        records.insert(0, (0, rec.id(0, 0, 0, ID_DUMMY)));
    }

    /// A file of code for each process, and its maps. Gives the numbers that perf knows processes by.
    fn processes(
        &self,
        code: &mut Code,
        names_at: &HashMap<Process, u64>,
        files: &mut HashMap<(usize, u32), File>,
        records: &mut Vec<(u64, Vec<u8>)>,
    ) -> io::Result<HashMap<Process, u32>> {
        let mut of: BTreeMap<Process, BTreeMap<u64, At>> =
            names_at.keys().map(|process| (*process, BTreeMap::new())).collect();
        for (key, at) in code.first.iter().filter(|(key, _)| key.0 != 0) {
            let Some(process) = self.job.names.process(Some((key.0 - 1) << 5)) else {
                continue;
            };
            of.entry(process).or_default().entry(key.1 << 12).or_insert(*at);
        }
        let dir = self.folder.work().join("code");
        fs::create_dir(&dir)?;
        // Where it will be.
        let parent = self
            .job
            .path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let base = fs::canonicalize(parent)?
            .join(self.job.path.file_name().unwrap_or_default())
            .join("code");
        let mut pids = HashMap::new();
        for (n, (process, pages)) in of.into_iter().enumerate() {
            let step = names_at.get(&process).copied();
            let task = self.job.names.task(process, step);
            let used = |pid: u32| pids.values().any(|known| *known == pid);
            // Before and after an exec a process has two page tables.
            let pid = task
                .map(|task| task.tgid)
                .filter(|pid| *pid != 0 && !used(*pid))
                .unwrap_or(100_000 + n as u32);
            pids.insert(process, pid);
            let name = task.map_or("kernel", |task| &task.comm);
            let mut rec = Rec::new(COMM, MISC_COMM_EXEC);
            rec.u32(pid);
            rec.u32(pid);
            rec.text(name);
            records.push((0, rec.id(pid, 0, 0, ID_DUMMY)));
            if pages.is_empty() {
                continue;
            }
            let file = format!("{pid}-{}", name.replace(|c: char| !c.is_ascii_alphanumeric(), "_"));
            let mut out = BufWriter::new(File::create_new(dir.join(&file))?);
            let path = base.join(&file);
            let mut offset = 0u64;
            for run in runs(&pages.into_iter().collect::<Vec<_>>(), 0) {
                let len = (run.len() * PAGE) as u64;
                for (_, at) in &run {
                    out.write_all(&self.page(files, *at)?)?;
                }
                let mut rec = Rec::new(MMAP2, MISC_USER);
                rec.u32(pid);
                rec.u32(pid);
                for value in [run[0].0, len, offset] {
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
                rec.text(&path.to_string_lossy());
                records.push((0, rec.id(pid, 0, 0, ID_DUMMY)));
                offset += len;
            }
            out.flush()?;
        }
        Ok(pids)
    }

    /// A core file of the kernel's pages. What was not executed is a hole.
    fn kcore(&self, path: &Path, pages: &[(u64, At)], files: &mut HashMap<(usize, u32), File>) -> io::Result<()> {
        const NEAR: u64 = 4 << 20;
        let mut file = File::create_new(path)?;
        let runs = runs(pages, NEAR);
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
                file.write_all(&self.page(files, *at)?)?;
            }
            offset += len;
        }
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&head.0)?;
        file.set_len(offset)
    }

    /// The file with the header, the records and the packets.
    fn data(
        &self,
        ranges: &[std::ops::Range<u64>],
        records: &[(u64, Vec<u8>)],
        progress: &mut dyn FnMut(&str, u64, u64),
    ) -> io::Result<()> {
        const HEADER: u64 = 104;
        let file = File::create_new(self.folder.work().join("data"))?;
        let mut out = BufWriter::with_capacity(1 << 18, file);
        let attrs = HEADER + 16;
        let attr_len = (ATTR + 16) as u64;
        let data = attrs + 2 * attr_len;
        out.write_all(&vec![0; data as usize])?;
        let mut len = 0u64;
        let mut put = |out: &mut BufWriter<File>, bytes: &[u8]| {
            len += bytes.len() as u64;
            out.write_all(bytes)
        };
        let mtc = self.job.trace.timing().mtc_shift;
        let config: u64 = 1 | 1 << 9 | 1 << 10 | u64::from(mtc) << 14 | 1 << 13;
        let mut info = Rec::new(AUXTRACE_INFO, 0);
        info.u32(1);
        info.u32(0);
        // As enum in intel-pt.h: PMU, time conversion, cap_user_time_zero, bits of the configuration, have_sched_switch (3: by
        // CPU-wide switches), snapshot mode, per-CPU maps, MTC, crystal ratio, CYC, highest non-turbo ratio, filter.
        for value in [
            u64::from(PMU),
            self.scale.shift.into(),
            self.scale.mult,
            0,
            1,
            1 << 10,
            1 << 11,
            3,
            0,
            1,
            1 << 9,
            0x3_c000,
            1,
            1,
            2,
            u64::from(self.job.trace.timing().nominal_ratio),
            0,
            0,
        ] {
            info.u64(value);
        }
        put(&mut out, &info.done())?;
        for (_, record) in records.iter().take_while(|(time, _)| *time == 0) {
            put(&mut out, record)?;
        }
        let total: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let mut done = 0;
        for (&cpu, range) in self.job.cpus.iter().zip(ranges) {
            let size = range.end.saturating_sub(range.start);
            let mut start = Rec::new(ITRACE_START, 0);
            start.u32(0);
            start.u32(0);
            put(&mut out, &start.id(0, 1, cpu as u32, ID_PT))?;
            let mut aux = Rec::new(AUX, 0);
            for value in [0, size, 0] {
                aux.u64(value);
            }
            put(&mut out, &aux.id(0, 2, cpu as u32, ID_PT))?;
            // The size is a multiple of eight bytes; PAD packets are zeroes.
            let padded = size.next_multiple_of(8);
            let mut rec = Rec::new(AUXTRACE, 0);
            for value in [padded, 0, 0x1000 + cpu as u64] {
                rec.u64(value);
            }
            rec.u32(cpu as u32);
            rec.u32(u32::MAX);
            rec.u32(cpu as u32);
            rec.u32(0);
            put(&mut out, &rec.done())?;
            let frames = Frames::new(
                self.job.trace.folder(),
                Kind::Packets,
                cpu,
                self.job.trace.segments(cpu),
            );
            let mut packets = Packets::new(frames, range.start, range.end, Damage::default());
            let (mut buffer, mut copied) = (vec![0; 1 << 18], 0);
            loop {
                let read = packets.read(&mut buffer)?;
                if read == 0 {
                    break;
                }
                put(&mut out, &buffer[..read])?;
                copied += read as u64;
                done += read as u64;
                progress("packets", done, total);
            }
            put(&mut out, &vec![0; (padded - copied.min(padded)) as usize])?;
        }
        for (_, record) in records.iter().skip_while(|(time, _)| *time == 0) {
            put(&mut out, record)?;
        }
        put(&mut out, &Rec::new(FINISHED_ROUND, 0).done())?;

        // Features: the architecture, and that this is a directory. Their sections are described right behind the data.
        let behind = data + len;
        let arch = {
            let mut arch = Rec(Vec::new());
            arch.u32(8);
            arch.0.extend_from_slice(b"x86_64\0\0");
            arch.0
        };
        let mut tail = Rec(Vec::new());
        let sections = behind + 32;
        for value in [sections, arch.len() as u64, sections + arch.len() as u64, 8] {
            tail.u64(value);
        }
        tail.0.extend_from_slice(&arch);
        tail.u64(0);
        out.write_all(&tail.0)?;

        let mut head = Rec(b"PERFILE2".to_vec());
        for value in [HEADER, attr_len, attrs, 2 * attr_len, data, len, 0, 0] {
            head.u64(value);
        }
        let mut features = [0u8; 32];
        for feature in [FEATURE_ARCH, FEATURE_DIR] {
            features[feature / 8] |= 1 << (feature % 8);
        }
        head.0.extend_from_slice(&features);
        head.u64(ID_PT);
        head.u64(ID_DUMMY);
        for (kind, config, bits, ids) in [(PMU, config, PT_BITS, HEADER), (1, 9, DUMMY_BITS, HEADER + 8)] {
            let from = head.0.len();
            head.u32(kind);
            head.u32(ATTR as u32);
            for value in [config, 1, SAMPLE, 4, bits] {
                head.u64(value);
            }
            head.0.resize(from + ATTR, 0);
            head.u64(ids);
            head.u64(8);
        }
        out.seek(SeekFrom::Start(0))?;
        out.write_all(&head.0)?;
        out.flush()
    }
}

/// Pages that lie together, or no further apart than `near`.
fn runs(pages: &[(u64, At)], near: u64) -> Vec<Vec<(u64, At)>> {
    let mut runs: Vec<Vec<(u64, At)>> = Vec::new();
    for page in pages {
        match runs.last_mut().and_then(|run| Some((run.last()?.0, run))) {
            Some((last, run)) if page.0 - last <= near + PAGE as u64 => run.push(*page),
            _ => runs.push(vec![*page]),
        }
    }
    runs
}

/// Where two contents differ. What lies close together is one.
fn differences(was: &[u8; PAGE], now: &[u8; PAGE]) -> Vec<std::ops::Range<usize>> {
    const NEAR: usize = 16;
    let mut found: Vec<std::ops::Range<usize>> = Vec::new();
    for at in (0..PAGE).filter(|at| was[*at] != now[*at]) {
        match found.last_mut() {
            Some(last) if at - last.end <= NEAR => last.end = at + 1,
            _ => found.push(at..at + 1),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    // covers: 5/export-perf
    #[test]
    fn changes_are_told_as_far_as_they_go_and_time_scales_as_perf_has_it() {
        let was = [0; PAGE];
        let mut now = was;
        (now[0], now[10], now[100], now[PAGE - 1]) = (1, 1, 1, 1);
        assert_eq!(differences(&was, &now), [0..11, 100..101, PAGE - 1..PAGE]);
        assert_eq!(differences(&was, &was), []);
        for khz in [2_100_000, 2_666_660, 733_000, 1_000_000] {
            let scale = Scale::new(khz);
            for ticks in [0, 1, 1000, u64::from(khz) * 1000, u64::from(khz) * 86_400_000] {
                let exact = u128::from(ticks) * 1_000_000 / u128::from(khz);
                let off = u128::from(scale.ns(ticks)).abs_diff(exact);
                assert!(
                    off <= 1 + exact / 1_000_000_000,
                    "{khz} kHz: {ticks} ticks: off by {off} ns"
                );
            }
        }
    }
}
