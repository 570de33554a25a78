//! Guests of a hypervisor in the machine, as perf has them: code that was seen to be executed, and whose turn it was.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    path::Path,
};

use crate::{
    directory::format::{PAGE, space},
    view::{Here, Names, Process, ProcessCache},
};

use super::{
    code::{At, Key, Pages},
    maps::{Level, Maps, Records},
    record::Scale,
    turn::Turn,
};

/// Blocks that are remembered to have been taken down.
const SEEN: usize = 1 << 14;
/// Pages of code that are kept of all guests.
const MOST_PAGES: usize = 1 << 18;

/// What was executed of a page.
#[derive(Debug)]
struct Page {
    bytes: Box<[u8; PAGE]>,
    /// Which bytes are known: the first that were executed there hold.
    known: Box<[u64; PAGE / 64]>,
}

impl Page {
    fn new() -> Page {
        Page {
            bytes: Box::new([0; PAGE]),
            known: Box::new([0; PAGE / 64]),
        }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        for (at, byte) in (at..).zip(bytes) {
            let (word, bit) = (&mut self.known[at / 64], 1 << (at % 64));
            if *word & bit == 0 {
                *word |= bit;
                self.bytes[at] = *byte;
            }
        }
    }
}

/// The Linux in a guest.
#[derive(Debug)]
struct Machine {
    /// Of its names: which guest it is.
    first_number: u32,
    /// A moment at which it ran: its VMCS and the step.
    moment: (Option<u64>, Option<u64>),
    pages: BTreeMap<Key, Page>,
    cache: ProcessCache,
    now: Option<Process>,
    turns: Vec<Turn>,
}

/// All of them, by the numbers of the processes that are their VMMs.
#[derive(Debug, Default)]
pub struct Machines {
    found: BTreeMap<u32, Machine>,
    /// Address, space and machine of blocks that were taken down.
    seen: HashMap<usize, (u64, u64, u32)>,
    pages: usize,
}

impl Machines {
    /// The guest that a VMM runs; `None` where no Linux was found in it, or it is not the first of that process.
    fn machine(&mut self, pid: u32, names: &Names, here: &Here) -> Option<&mut Machine> {
        if names.linux().banner.is_empty() {
            return None;
        }
        let first_number = names.first_number();
        let machine = self.found.entry(pid).or_insert_with(|| Machine {
            first_number,
            moment: (here.state.vmcs, here.step),
            pages: BTreeMap::new(),
            cache: ProcessCache::default(),
            now: None,
            turns: Vec::new(),
        });
        Some(machine).filter(|machine| machine.first_number == first_number)
    }

    /// A guest executes code.
    pub fn block(&mut self, pid: u32, names: &Names, here: &Here, ip: u64, code: &[u8]) {
        let space = space(here.state.cr3.unwrap_or(0) & !0xfff, ip);
        let slot = (ip ^ ip >> 14 ^ space.wrapping_mul(0x9e37)) as usize % SEEN;
        let block = (ip, space, pid);
        if self.seen.insert(slot, block) == Some(block) {
            return;
        }
        let room = self.pages < MOST_PAGES;
        let Some(machine) = self.machine(pid, names, here) else {
            return;
        };
        if machine.now.is_none()
            && let Some(cr3) = here.state.cr3
        {
            machine.turn(names, here, cr3);
        }
        let (mut ip, mut code, mut new) = (ip, code, 0);
        while !code.is_empty() {
            let at = (ip & (PAGE as u64 - 1)) as usize;
            let (here, behind) = code.split_at(code.len().min(PAGE - at));
            let key = (space, ip >> 12);
            if room || machine.pages.contains_key(&key) {
                let before = machine.pages.len();
                machine.pages.entry(key).or_insert_with(Page::new).put(at, here);
                new += machine.pages.len() - before;
            }
            ip = ip.wrapping_add(here.len() as u64);
            code = behind;
        }
        self.pages += new;
    }

    /// A guest goes to another page table.
    pub fn turn(&mut self, pid: u32, names: &Names, here: &Here, cr3: u64) {
        if let Some(machine) = self.machine(pid, names, here) {
            machine.turn(names, here, cr3);
        }
    }

    /// Writes what perf wants of each in `work`, which will be `path`, and adds the records; gives the numbers of the machines.
    ///
    /// # Errors
    /// Something cannot be written.
    pub fn write(
        self,
        names: &Names,
        scale: Scale,
        (work, path): (&Path, &Path),
        records: &mut Records,
    ) -> io::Result<Vec<u32>> {
        let mut pids = Vec::new();
        for (pid, machine) in self.found {
            let names = names.guest(machine.moment.0, machine.moment.1);
            let (mut bytes, mut first): (Vec<_>, BTreeMap<Key, At>) = Default::default();
            for (key, page) in machine.pages {
                first.insert(key, (0, 0, bytes.len() as u64));
                bytes.push(page.bytes);
            }
            let (folder, pages) = (format!("code-{pid}"), Pages::Executed(bytes));
            let level = Level::guest(pids.len());
            let mut maps = Maps::new(level, names, (pages, &first), scale, (work, path, &folder))?;
            maps.write_kernel(&work.join(format!("kcore_dir__{pid}")))?;
            machine.turns.iter().try_for_each(|turn| maps.turn(turn))?;
            maps.finish()?;
            records.append(&mut maps.records);
            pids.push(pid);
        }
        Ok(pids)
    }
}

impl Machine {
    fn turn(&mut self, names: &Names, here: &Here, cr3: u64) {
        let Some(process) = self.cache.get(names, Some(cr3)) else {
            return;
        };
        // As with the machine's own: whoever runs first has run before.
        let ticks = if self.now.is_none() { 0 } else { here.ticks.unwrap_or(0) };
        if self.now != Some(process) {
            self.now = Some(process);
            self.turns.push(Turn {
                ticks,
                step: here.step,
                cpu: here.cpu as u32,
                process,
            });
        }
    }
}
