//! The guests of a hypervisor that runs in the machine: whose VMCS is whose, and the Linux in each.
//!
//! A guest's kernel is found through EPT as the machine's own is found in RAM. A guest may have several VMCSs, one for each of its processors, and
//! in its life several EPTs; a VMCS may become another guest's. So a guest is known by where its kernel lies in the machine's memory.

use std::{
    collections::{BTreeSet, HashMap},
    fmt::Write,
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
};

use x86::vmx::{
    Field,
    controls::{Primary, Secondary},
    ept::{self, EptAccess, EptPaging, EptPointer},
};

use super::{
    kernel::Kernel,
    mappings::Mapping,
    memory::Memory,
    recording::{Recorded, Recording},
};
use crate::regular;

/// The file that says which VMCSs there were.
pub(super) const GUESTS: &str = "guests";
/// The longest of it that is read.
const LONGEST: u64 = 1 << 30;
/// Guests that are told apart.
const MOST_GUESTS: usize = 64;
/// VMCSs that are followed, and changes of them that are kept.
const MOST_VMCS: usize = 1 << 14;
const MOST_SEEN: usize = 1 << 20;
/// Memory that a table of pages of 4 KiB maps, and tables that are read beyond those that all of RAM takes.
const TABLE: u64 = 2 << 20;
const MORE_TABLES: u64 = 512;
/// Looks after which a kernel is looked for less often: a guest may have none.
const PATIENCE: u32 = 16;

/// The folder of a guest's Linux.
pub(super) fn guest_folder(number: usize) -> String {
    format!("guest-{number}")
}

/// A guest's memory, by guest-physical addresses. SDM Vol. 3C 29.3.2 "EPT Translation Mechanism".
pub struct GuestPhysical<'a> {
    memory: &'a mut dyn Memory,
    paging: EptPaging,
    /// The last page that was translated.
    last: Option<(u64, u64)>,
    ram: Vec<Range<u64>>,
}

impl<'a> GuestPhysical<'a> {
    /// Through the EPT of this pointer.
    pub fn new(memory: &'a mut dyn Memory, pointer: u64) -> GuestPhysical<'a> {
        let paging = EptPaging {
            pointer: EptPointer::from_bits(pointer),
            // What a look is for is where an address leads, not what the part would refuse.
            execute_only: true,
            huge: true,
            mode_based: false,
            physical_bits: 52,
        };
        GuestPhysical {
            memory,
            paging,
            last: None,
            ram: Vec::new(),
        }
    }

    /// The same, with all that is mapped as its RAM, to be searched. A guest has no more than the machine, however often it is mapped.
    fn with_ram(mut self) -> GuestPhysical<'a> {
        let mut size: u64 = self.memory.ram().iter().map(|range| range.end - range.start).sum();
        let mut left = size / TABLE + MORE_TABLES;
        let mut ram = Vec::new();
        self.collect(self.paging.pointer.table(), 4, 0, &mut left, &mut ram);
        for range in ram {
            let len = (range.end - range.start).min(size);
            size -= len;
            if len > 0 {
                self.ram.push(range.start..range.start + len);
            }
        }
        self
    }

    /// What a table of EPT maps, in ascending order.
    fn collect(&mut self, table: u64, level: u32, from: u64, left: &mut u64, ram: &mut Vec<Range<u64>>) {
        let mut bytes = [0; 4096];
        if *left == 0 || !self.memory.read_physical(table, &mut bytes) {
            return;
        }
        *left -= 1;
        let shift = 12 + 9 * (level - 1);
        for (n, entry) in (0..).zip(bytes.chunks_exact(8)) {
            let entry = u64::from_le_bytes([
                entry[0], entry[1], entry[2], entry[3], entry[4], entry[5], entry[6], entry[7],
            ]);
            if entry & 7 == 0 || self.paging.misconfigured(entry, level) {
                continue;
            }
            let start = from | n << shift;
            if level > 1 && entry & ept::LARGE == 0 {
                self.collect(ept::address(entry, 12), level - 1, start, left, ram);
                continue;
            }
            let end = start + (1 << shift);
            match ram.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ram.push(start..end),
            }
        }
    }

    /// Where a guest-physical address is in the machine's memory.
    fn translate(&mut self, gpa: u64) -> Option<u64> {
        let page = gpa & !0xfff;
        if let Some((known, at)) = self.last
            && known == page
        {
            return Some(at | gpa & 0xfff);
        }
        let memory = &mut *self.memory;
        let mut read = |at: u64| {
            let mut bytes = [0; 8];
            if memory.read_physical(at, &mut bytes) {
                u64::from_le_bytes(bytes)
            } else {
                0
            }
        };
        let found = ept::walk(&self.paging, page, EptAccess::Read, &mut read, &mut |_, _| ());
        let at = found.ok()?.physical;
        self.last = Some((page, at));
        Some(at | gpa & 0xfff)
    }
}

impl Memory for GuestPhysical<'_> {
    fn read_physical(&mut self, mut gpa: u64, mut bytes: &mut [u8]) -> bool {
        while !bytes.is_empty() {
            let Some(at) = self.translate(gpa) else { return false };
            let rest = (0x1000 - (gpa & 0xfff)).min(bytes.len() as u64);
            let (part, behind) = bytes.split_at_mut(rest as usize);
            if !self.memory.read_physical(at, part) {
                return false;
            }
            gpa = gpa.wrapping_add(rest);
            bytes = behind;
        }
        true
    }

    fn ram(&self) -> Vec<Range<u64>> {
        self.ram.clone()
    }

    fn is_awaited(&self) -> bool {
        self.memory.is_awaited()
    }
}

/// The EPT pointer of a VMCS in memory; `None`: its guest has no EPT.
fn ept_pointer(memory: &mut dyn Memory, vmcs: u64) -> Option<u64> {
    let mut field = |field: Field| {
        let mut bytes = [0; 8];
        let read = memory.read_physical(vmcs.wrapping_add(8 * field.slot() as u64), &mut bytes);
        read.then(|| u64::from_le_bytes(bytes))
    };
    let (primary, secondary) = (field(Field::PRIMARY_CONTROLS)?, field(Field::SECONDARY_CONTROLS)?);
    let uses =
        Primary(primary as u32).contains(Primary::SECONDARY) && Secondary(secondary as u32).contains(Secondary::EPT);
    field(Field::EPT_POINTER).filter(|_| uses)
}

/// What is known of a VMCS.
#[derive(Debug)]
struct Followed {
    ept: Option<u64>,
    guest: Option<usize>,
    /// It was entered since the last look.
    active: bool,
}

/// A VMCS was another guest's from here on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmcsSeen {
    /// Since which step of the machine.
    pub steps: u64,
    /// The VMCS pointer.
    pub pointer: u64,
    /// Whose it is, by its number; `None`: no Linux was found in the guest yet.
    pub guest: Option<usize>,
}

/// A guest in which a Linux was found.
#[derive(Debug)]
struct Guest {
    recording: Recording,
    /// Where its kernel's image is in the machine's memory.
    at: u64,
    new: bool,
}

/// What is gathered of all guests.
#[derive(Debug, Default)]
pub struct Guests {
    followed: HashMap<u64, Followed>,
    found: Vec<Guest>,
    seen: Vec<VmcsSeen>,
    /// How often a kernel was looked for in vain through an EPT.
    vain: HashMap<u64, u32>,
    /// How often a Linux was found through an EPT.
    finds: u64,
    new: bool,
}

impl Guests {
    /// A processor is about to run a guest: its VMCS, and the machine's memory. This is cheap.
    pub fn entered(&mut self, memory: &mut dyn Memory, vmcs: u64, steps: u64) {
        let ept = ept_pointer(memory, vmcs);
        if let Some(followed) = self.followed.get_mut(&vmcs)
            && followed.ept == ept
        {
            followed.active = true;
            return;
        }
        if self.followed.len() >= MOST_VMCS && !self.followed.contains_key(&vmcs) {
            return;
        }
        // Another processor of a guest that is known, or another guest's.
        let other = self.followed.values().find(|other| other.ept == ept && ept.is_some());
        let guest = other.and_then(|other| other.guest);
        let active = true;
        self.followed.insert(vmcs, Followed { ept, guest, active });
        self.tell(vmcs, guest, steps);
    }

    fn tell(&mut self, pointer: u64, guest: Option<usize>, steps: u64) {
        if self.seen.len() < MOST_SEEN {
            self.seen.push(VmcsSeen { steps, pointer, guest });
            self.new = true;
        }
    }

    /// Looks for the kernels of guests that ran since the last look, and what is new in those that are known. Says whether there is something
    /// new to write.
    pub fn look(&mut self, memory: &mut dyn Memory, steps: u64) -> bool {
        let ran = self.followed.values_mut().filter(|followed| followed.active);
        let epts: BTreeSet<u64> = ran
            .filter_map(|followed| {
                followed.active = false;
                followed.ept
            })
            .collect();
        for pointer in epts {
            self.look_through(memory, pointer, steps);
        }
        self.new || self.found.iter().any(|guest| guest.new)
    }

    fn look_through(&mut self, memory: &mut dyn Memory, pointer: u64, steps: u64) {
        let of = |followed: &&Followed| followed.ept == Some(pointer);
        let known = self.followed.values().find(of).and_then(|followed| followed.guest);
        let mut through = GuestPhysical::new(memory, pointer);
        if let Some(guest) = known.and_then(|known| self.found.get_mut(known)) {
            let recording = &mut guest.recording;
            if recording.kernel().is_some_and(|kernel| kernel.is_there(&mut through)) {
                guest.new |= recording.look(&mut through, steps);
            }
            return;
        }
        // All of its memory is read for it.
        let vain = self.vain.entry(pointer).or_default();
        *vain += 1;
        if *vain > PATIENCE && !vain.is_power_of_two() {
            return;
        }
        let mut through = through.with_ram();
        let Some(kernel) = Kernel::find(&mut through) else {
            return;
        };
        let Some(at) = through.translate(kernel.physical_base()) else {
            return;
        };
        self.vain.remove(&pointer);
        self.finds += 1;
        let same = |guest: &Guest| {
            let slide = guest.recording.kernel().map(Kernel::slide);
            guest.at == at && slide == Some(kernel.slide())
        };
        let number = match self.found.iter().position(same) {
            Some(number) => number,
            None if self.found.len() >= MOST_GUESTS => return,
            None => {
                let recording = Recording::of(kernel);
                self.found.push(Guest {
                    recording,
                    at,
                    new: true,
                });
                self.found.len() - 1
            }
        };
        let guest = &mut self.found[number];
        guest.new |= guest.recording.look(&mut through, steps);
        let mut pointers = Vec::new();
        for (vmcs, followed) in &mut self.followed {
            if followed.ept == Some(pointer) {
                followed.guest = Some(number);
                pointers.push(*vmcs);
            }
        }
        pointers.sort_unstable();
        for vmcs in pointers {
            self.tell(vmcs, Some(number), steps);
        }
    }

    /// A guest's processor has run on a page table, `page_table` as its CR3 has it: names whose it is.
    pub fn switched(&mut self, memory: &mut dyn Memory, vmcs: u64, page_table: u64, steps: u64) -> bool {
        let Some(Followed {
            ept: Some(ept),
            guest: Some(number),
            ..
        }) = self.followed.get(&vmcs)
        else {
            return false;
        };
        let mut through = GuestPhysical::new(memory, *ept);
        let Some(guest) = self.found.get_mut(*number) else {
            return false;
        };
        let new = guest.recording.switched_anywhere(&mut through, page_table, steps);
        guest.new |= new;
        new
    }

    /// How often a Linux was found in a guest of which nothing was known: then there are names for what came before.
    pub fn finds(&self) -> u64 {
        self.finds
    }

    /// Whether the Linux is known of the guest that a VMCS is of.
    pub fn knows(&self, vmcs: u64) -> bool {
        self.followed
            .get(&vmcs)
            .is_some_and(|followed| followed.guest.is_some())
    }

    /// What the process that a guest's processor runs has mapped at an address, with `cr3` as its page table; and whether there is something new to
    /// write.
    pub fn mapping(&mut self, memory: &mut dyn Memory, vmcs: u64, cr3: u64, at: u64) -> Option<(Mapping, bool)> {
        let Followed { ept, guest, .. } = self.followed.get(&vmcs)?;
        let mut through = GuestPhysical::new(memory, (*ept)?);
        let guest = self.found.get_mut((*guest)?)?;
        let found = guest.recording.mapping_anywhere(&mut through, cr3, at)?;
        guest.new |= found.1;
        Some(found)
    }

    /// Writes what is new, beside the machine's own Linux.
    ///
    /// # Errors
    /// The system's.
    pub fn write(&mut self, dir: &Path) -> io::Result<()> {
        if self.seen.is_empty() {
            return Ok(());
        }
        match regular::create_private_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made?,
        }
        for (number, guest) in self.found.iter_mut().enumerate() {
            if std::mem::take(&mut guest.new) {
                guest.recording.write(&dir.join(guest_folder(number)))?;
            }
        }
        if std::mem::take(&mut self.new) {
            let places = self.found.iter().map(|guest| guest.at);
            write_list(dir, places, &self.seen)?;
        }
        Ok(())
    }
}

/// The file: a line for each guest with the address of its kernel in the machine's memory, and one for each change of a VMCS.
fn write_list(dir: &Path, places: impl Iterator<Item = u64>, seen: &[VmcsSeen]) -> io::Result<()> {
    let mut text = String::new();
    for (number, at) in places.enumerate() {
        let _ = writeln!(text, "guest {number} {at:#x}");
    }
    for VmcsSeen { steps, pointer, guest } in seen {
        let guest = guest.map_or("-".into(), |guest| guest.to_string());
        let _ = writeln!(text, "vmcs {steps} {pointer:#x} {guest}");
    }
    let new = dir.join(format!("{GUESTS}.new"));
    regular::write_private(&new, text.as_bytes())?;
    fs::rename(new, dir.join(GUESTS))
}

/// What the file says: where each guest's kernel is, and which VMCS was whose.
type List = (Vec<u64>, Vec<VmcsSeen>);

fn read_list(dir: &Path) -> io::Result<Option<List>> {
    let opened = regular::open_inside(&dir.join(GUESTS)).and_then(|file| regular::read(file, LONGEST));
    let bytes = match opened {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io::Error::new(error.kind(), format!("{GUESTS}: {error}"))),
    };
    let (mut places, mut seen) = (Vec::new(), Vec::new());
    let address = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    for (n, line) in String::from_utf8_lossy(&bytes).lines().enumerate() {
        let words: Vec<&str> = line.split(' ').collect();
        let known = match words[..] {
            ["guest", number, at] if places.len() < MOST_GUESTS && number.parse() == Ok(places.len()) => {
                address(at).map(|at| places.push(at))
            }
            ["vmcs", steps, pointer, guest] => (|| {
                let guest = match guest {
                    "-" => None,
                    number => Some(number.parse().ok().filter(|number| *number < places.len())?),
                };
                let (steps, pointer) = (steps.parse().ok()?, address(pointer)?);
                seen.push(VmcsSeen { steps, pointer, guest });
                Some(())
            })(),
            _ => None,
        };
        known.ok_or_else(|| {
            let text = format!("{GUESTS}: line {}: neither a guest nor a VMCS", n + 1);
            io::Error::new(io::ErrorKind::InvalidData, text)
        })?;
    }
    Ok(Some((places, seen)))
}

/// What a trace has of the guests.
#[derive(Debug, Default)]
pub struct RecordedGuests {
    /// The Linux of each.
    pub guests: Vec<Recorded>,
    /// Whose each VMCS was, in the order of steps.
    pub seen: Vec<VmcsSeen>,
}

impl RecordedGuests {
    /// Reads what [`Guests::write`] wrote; nothing where the machine has run no guests.
    ///
    /// # Errors
    /// The system's, or a file that is not as it was written.
    pub fn read(dir: &Path) -> io::Result<RecordedGuests> {
        let Some((places, seen)) = read_list(dir)? else {
            return Ok(RecordedGuests::default());
        };
        let guests = (0..places.len()).map(|number| {
            let name = guest_folder(number);
            let read = Recorded::read(&dir.join(&name));
            let read = read.map_err(|error| io::Error::new(error.kind(), format!("{name}/{error}")));
            Ok(read?.unwrap_or_default())
        });
        Ok(RecordedGuests {
            guests: guests.collect::<io::Result<_>>()?,
            seen,
        })
    }

    /// Whose a VMCS is at a step: what was said last until then, or, where that was not known yet, next.
    pub fn of(&self, pointer: u64, steps: u64) -> Option<usize> {
        let mut of = self.seen.iter().filter(|seen| seen.pointer == pointer).peekable();
        let mut found = None;
        while let Some(seen) = of.next_if(|seen| seen.steps <= steps) {
            found = seen.guest;
        }
        found.or_else(|| of.find_map(|seen| seen.guest))
    }
}

/// Joins what the parts of a recording have: a guest whose kernel is at the same place is the same.
pub(super) fn join(
    parts: &[PathBuf],
    into: &Path,
    join_linux: &dyn Fn(&[PathBuf], &Path) -> io::Result<()>,
) -> io::Result<()> {
    let (mut places, mut folders): (Vec<u64>, Vec<Vec<PathBuf>>) = (Vec::new(), Vec::new());
    let (mut all, mut last) = (Vec::new(), HashMap::new());
    for part in parts {
        let Some((of_part, seen)) = read_list(part)? else {
            continue;
        };
        let mut numbers = Vec::new();
        for (number, at) in of_part.into_iter().enumerate() {
            let joined = places.iter().position(|place| *place == at).unwrap_or(places.len());
            if joined == places.len() {
                places.push(at);
                folders.push(Vec::new());
            }
            folders[joined].push(part.join(guest_folder(number)));
            numbers.push(joined);
        }
        for seen in seen {
            let guest = seen.guest.and_then(|number| numbers.get(number).copied());
            // A part does not know what one before it knew.
            let before = last.get(&seen.pointer).copied();
            if before != Some(guest) && (guest.is_some() || before.is_none()) {
                last.insert(seen.pointer, guest);
                all.push(VmcsSeen { guest, ..seen });
            }
        }
    }
    if all.is_empty() {
        return Ok(());
    }
    for (number, folders) in folders.iter().enumerate() {
        join_linux(folders, &into.join(guest_folder(number)))?;
    }
    write_list(into, places.into_iter(), &all)
}

#[cfg(test)]
#[path = "guests_test.rs"]
mod tests;
