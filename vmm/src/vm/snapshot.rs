//! All of a machine's state as plain data, taken out between two instructions and put back into a machine of the same make.
//!
//! In it are RAM, every CPU with what it remembers of page tables, and what [`Machine::state`](machine::Machine::state)
//! holds: units, local APICs, virtual clock, devices. Not in it are what belongs to the host: what disks hold, input that the
//! guest has not taken and output that the console has not, observers (whoever has one keeps its state), and the figures of
//! `--stats`.
//!
//! Pages of RAM are shared among snapshots. Taking one copies those that were written since the one before, and putting one
//! back writes those that are others.

use std::sync::Arc;

use super::soft::SoftState;
use machine::MachineState;
use machine::sparse::Sparse;

pub(super) const PAGE: usize = 4096;
type Page = [u8; PAGE];

/// A machine's state.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// The CPU model's name.
    pub model: &'static str,
    /// The CPUs.
    pub soft: SoftState,
    /// What is around them, RAM aside.
    pub machine: MachineState,
    /// Size of RAM in bytes.
    pub memory: u64,
    /// What RAM holds.
    pub pages: Pages,
}

impl Snapshot {
    /// About how many bytes it takes beside the pages of RAM.
    pub fn bytes_beside_pages(&self) -> u64 {
        let spaces = self.soft.translations.iter().flat_map(|known| &known.spaces);
        let entries: usize = spaces.map(|space| space.pages.len()).sum();
        let caches = self.machine.caches.as_ref().map_or(0, |(last, own)| {
            last.iter().map(|last| last.bytes()).sum::<usize>() + own.iter().map(|core| core.bytes()).sum::<usize>()
        });
        (entries * size_of::<engine::Translation>() + caches + size_of_val(&*self.soft.cpus)) as u64
    }
}

/// The contents of RAM. A copy shares the pages.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Pages {
    /// Those that are not all zero, by guest-physical address divided by a page's length.
    pages: Sparse<Page>,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pages", self.iter().count())
    }
}

impl Pages {
    /// The page at a guest-physical address; `None` where all of it is zero.
    pub fn get(&self, gpa: u64) -> Option<&Page> {
        self.pages.get(gpa / PAGE as u64).map(Arc::as_ref)
    }

    /// The pages that are not all zero, by guest-physical address.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Page)> {
        self.pages.iter().map(|(number, page)| (number * PAGE as u64, page))
    }

    pub(super) fn set(&mut self, gpa: u64, bytes: &Page) {
        let should = (*bytes != [0; PAGE]).then_some(bytes);
        if self.get(gpa) != should {
            self.pages.set(gpa / PAGE as u64, should.map(|bytes| Arc::new(*bytes)));
        }
    }

    /// The addresses of the pages that the two do not share.
    pub fn apart<'a>(&'a self, other: &'a Pages) -> impl Iterator<Item = u64> + 'a {
        self.pages.apart(&other.pages).map(|number| number * PAGE as u64)
    }

    /// How many bytes the pages take that are not shared with another state's.
    pub fn beside(&self, other: &Pages) -> u64 {
        let own = self.apart(other).filter(|gpa| self.get(*gpa).is_some());
        own.count() as u64 * PAGE as u64
    }
}

#[cfg(test)]
#[path = "snapshot_test.rs"]
mod tests;
