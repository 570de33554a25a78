//! The software TLB: linear page to host page, in one set per address space and privilege, and in VMX operation per VPID and EPT.
//!
//! An entry carries one tag each for reading, writing and fetching. A handler computes `x = address ^ tag`; `x` is the offset
//! in the page if the tag matches, and `x <= 4096 - size` says hit and no page crossing at once. Pages that hold decoded code
//! or are not yet dirty have a write tag that never matches, so that stores to them take the slow path and nobody else pays.
//!
//! A translation that may be stored through, but of whose stores the engine has to hear (of code, of a monitored line, the
//! first one to a page since RAM was last copied), keeps its write tag in a form that matches nothing, *held back*: the slow
//! path goes on without walking the page tables. Fetches from a page whose code the units have yet to hear of are held back, too. So
//! what the guest sees of its TLB does not depend on what the engine keeps, nor on who watches.
#![allow(unsafe_code)]

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_big_array::BigArray;
use x86::watch::Range;

use crate::mmu::Page;

/// Entries in a set.
pub(crate) const ENTRIES: usize = 4096;
/// Regions of 1 GiB remembered.
const HUGE: usize = 64;
/// Address spaces kept at a time, user and supervisor counted apart.
const SETS: usize = 16;
/// Entries of a set that are remembered one by one as filled: beyond so many the whole set is cleared.
const REMEMBERED: usize = ENTRIES / 4;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Entry {
    pub read: u64,
    pub write: u64,
    pub exec: u64,
    /// The host's address of the page.
    pub host: u64,
}

/// Whether stores, or fetches, may go through a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grant {
    /// Not at all, or not before the page tables have been walked again.
    No,
    /// By the slow path.
    HeldBack,
    /// At once.
    Yes,
}

/// Whose accesses a set of translations answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Privilege {
    /// User without alignment checks.
    User,
    /// User with alignment checks: data accesses never match, so that each takes the slow path, which checks.
    Aligned,
    /// Supervisor, user pages allowed (no SMAP, or EFLAGS.AC).
    Supervisor,
    /// Supervisor under SMAP.
    Guarded,
    /// User in a transaction: stores never match, so that each takes the slow path, which keeps what was there.
    UserTransaction,
    /// Supervisor in a transaction.
    SupervisorTransaction,
    /// Supervisor under SMAP in a transaction.
    GuardedTransaction,
}

impl Privilege {
    /// The same in a transaction.
    pub(crate) fn in_transaction(self) -> Privilege {
        match self {
            Privilege::User => Privilege::UserTransaction,
            Privilege::Supervisor => Privilege::SupervisorTransaction,
            Privilege::Guarded => Privilege::GuardedTransaction,
            other => other,
        }
    }

    /// Whether loads and stores may match.
    fn grants(self) -> (bool, bool) {
        use Privilege::{Aligned, GuardedTransaction, SupervisorTransaction, UserTransaction};
        let aligned = self == Aligned;
        let transaction = matches!(self, UserTransaction | SupervisorTransaction | GuardedTransaction);
        (!aligned, !aligned && !transaction)
    }
}

/// What tells translations apart in VMX operation, beside the PCID. SDM Vol. 3C 29.4.1 "Information That May Be Cached".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmxTag {
    /// The VPID: 0 in root operation, outside VMX operation, and for guests without one.
    pub vpid: u16,
    /// The EPT pointer under which they were made; 0 without EPT.
    pub ept: u64,
}

/// The page frame of the EPT PML4 table: what INVEPT tells EPT pointers apart by.
const EP4TA: u64 = 0x000f_ffff_ffff_f000;

struct Set {
    tag: VmxTag,
    pcid: u16,
    /// CR3 when the set was last chosen, where [`Tlb::root`] is given it.
    root: Option<u64>,
    privilege: Privilege,
    valid: bool,
    used: u64,
    entries: Box<[Entry; ENTRIES]>,
    /// Indices of the entries that were filled since the set was cleared, an index more than once if its entry was forgotten
    /// meanwhile. At [`REMEMBERED`] it is full, and others may be filled, too: clearing 128 KiB costs more than most address spaces fill.
    filled: Vec<u16>,
}

impl Set {
    /// Does something with each entry that is not empty, more than once perhaps, and with some that are.
    fn for_each(&mut self, mut f: impl FnMut(usize, &mut Entry)) {
        if self.filled.len() < REMEMBERED {
            for i in self.filled.iter().map(|&i| usize::from(i)) {
                f(i, &mut self.entries[i]);
            }
        } else {
            for (i, e) in self.entries.iter_mut().enumerate() {
                f(i, e);
            }
        }
    }

    /// Forgets all entries.
    fn clear(&mut self) {
        self.for_each(|i, e| *e = empty(i));
        self.filled.clear();
    }
}

#[repr(C)]
pub(crate) struct Tlb {
    current: *mut Entry,
    now: usize,
    clock: u64,
    sets: Vec<Set>,
    /// Regions of 4 MiB that large pages were entered from, hashed: INVLPG must forget the whole page.
    large: [u64; 64],
    /// Regions of 1 GiB that pages of that size were entered from.
    huge: Vec<u64>,
    /// Protection keys that translations were entered under: a change of the rights of others forgets nothing.
    keys: u16,
    /// Which sets can be chosen now.
    tag: VmxTag,
    /// By VPID, what the rights in its sets depend on, as it was when the VPID was left.
    left: BTreeMap<u16, u64>,
}

/// A tag that no address which is looked up at this index can match: it belongs to the neighbouring index.
const fn never(index: usize) -> u64 {
    ((index ^ 1) as u64) << 12
}

/// What matches nothing at an index.
const fn empty(index: usize) -> Entry {
    let tag = never(index);
    Entry {
        read: tag,
        write: tag,
        exec: tag,
        host: 0,
    }
}

/// The tag of a page that is held back: that of another index, and not the one that stands for nothing.
const fn held_back(page: u64) -> u64 {
    page ^ 0x3000
}

impl Entry {
    /// Whether stores to the page of an address may go through the entry, at once or by the slow path.
    pub fn stores_to(&self, linear: u64) -> bool {
        let page = linear & !0xfff;
        self.write == page || self.write == held_back(page)
    }

    /// Whether fetches from the page of an address are held back.
    pub fn holds_fetches_back(&self, linear: u64) -> bool {
        self.exec == held_back(linear & !0xfff)
    }
}

impl Tlb {
    /// Where the pointer to the entries in use is.
    pub const CURRENT: usize = core::mem::offset_of!(Tlb, current);

    pub fn new() -> Tlb {
        let mut sets: Vec<Set> = (0..SETS)
            .map(|_| {
                let entries: Box<[Entry; ENTRIES]> = (0..ENTRIES)
                    .map(empty)
                    .collect::<Box<[Entry]>>()
                    .try_into()
                    .ok()
                    .expect("length is ENTRIES");
                Set {
                    tag: VmxTag::default(),
                    pcid: 0,
                    root: None,
                    privilege: Privilege::Supervisor,
                    valid: false,
                    used: 0,
                    entries,
                    filled: Vec::with_capacity(REMEMBERED),
                }
            })
            .collect();
        let current = sets[0].entries.as_mut_ptr();
        sets[0].valid = true;
        Tlb {
            current,
            now: 0,
            clock: 0,
            sets,
            large: [0; 64],
            huge: Vec::new(),
            keys: 0,
            tag: VmxTag::default(),
            left: BTreeMap::new(),
        }
    }

    fn index(linear: u64) -> usize {
        (linear >> 12) as usize & (ENTRIES - 1)
    }

    /// The entry that a linear address maps to.
    #[inline(always)]
    pub fn entry(&self, linear: u64) -> &Entry {
        // SAFETY: `current` points at ENTRIES entries of a boxed set that lives as long as `self`; the index is masked.
        unsafe { &*self.current.add(Self::index(linear)) }
    }

    /// Enters a translation: the page's host address, and which tags may match.
    pub fn fill(&mut self, linear: u64, host: u64, read: bool, write: Grant, exec: Grant) {
        self.fill_in(self.now, linear, host, read, write, exec);
    }

    /// The same in a set that `find` gave.
    pub fn fill_in(&mut self, set: usize, linear: u64, host: u64, read: bool, write: Grant, exec: Grant) {
        let (i, page) = (Self::index(linear), linear & !0xfff);
        let tag = |on| if on { page } else { never(i) };
        let set = &mut self.sets[set];
        let (loads, stores) = set.privilege.grants();
        // No page of guest RAM is at the host's address 0, which is that of an empty entry.
        if set.entries[i].host == 0 && set.filled.len() < REMEMBERED {
            set.filled.push(i as u16);
        }
        set.entries[i] = Entry {
            read: tag(read && loads),
            write: match write {
                Grant::HeldBack if stores => held_back(page),
                write => tag(write == Grant::Yes && stores),
            },
            exec: match exec {
                Grant::HeldBack => held_back(page),
                exec => tag(exec == Grant::Yes),
            },
            host,
        };
    }

    /// Stores to the page of an address in a set need not be heard of any more.
    pub fn let_stores(&mut self, set: usize, linear: u64) {
        self.sets[set].entries[Self::index(linear)].write = linear & !0xfff;
    }

    /// The code of the page of an address has been announced.
    pub fn let_fetches(&mut self, linear: u64) {
        let page = linear & !0xfff;
        self.sets[self.now].entries[Self::index(linear)].exec = page;
    }

    /// The present set, if it is that of an address space and privilege.
    pub fn is_now(&self, pcid: u16, privilege: Privilege) -> Option<usize> {
        let set = &self.sets[self.now];
        (set.pcid == pcid && set.privilege == privilege).then_some(self.now)
    }

    /// The set of an address space and privilege, if it has one.
    #[inline]
    pub fn find(&self, pcid: u16, privilege: Privilege) -> Option<usize> {
        let is = |s: &Set| s.valid && s.pcid == pcid && s.privilege == privilege && s.tag == self.tag;
        if is(&self.sets[self.now]) {
            return Some(self.now);
        }
        self.sets.iter().position(is)
    }

    /// The entry of a set that `find` gave.
    #[inline]
    pub fn entry_of(&self, set: usize, linear: u64) -> Entry {
        self.sets[set].entries[Self::index(linear)]
    }

    /// Makes the set of an address space the current one, emptying the least recently used if it has none.
    pub fn select(&mut self, pcid: u16, privilege: Privilege) {
        self.clock += 1;
        let i = self.find(pcid, privilege).unwrap_or_else(|| {
            let i = (0..SETS)
                .min_by_key(|&i| if self.sets[i].valid { self.sets[i].used + 1 } else { 0 })
                .unwrap_or(0);
            let s = &mut self.sets[i];
            s.clear();
            (s.tag, s.pcid, s.root, s.privilege, s.valid) = (self.tag, pcid, None, privilege, true);
            i
        });
        self.sets[i].used = self.clock;
        self.now = i;
        self.current = self.sets[i].entries.as_mut_ptr();
    }

    /// The present set is that of this CR3: what it holds of another one is forgotten.
    pub fn root(&mut self, cr3: u64) {
        let set = &mut self.sets[self.now];
        if set.root != Some(cr3) {
            if set.root.is_some() {
                set.clear();
            }
            set.root = Some(cr3);
        }
    }

    /// Forgets everything.
    pub fn flush_all(&mut self) {
        for s in &mut self.sets {
            s.valid = false;
        }
        self.large = [0; 64];
        self.huge.clear();
        self.keys = 0;
        self.sets[self.now].clear();
        self.sets[self.now].valid = true;
    }

    fn flush_if(&mut self, is: impl Fn(&Set) -> bool) {
        for (i, s) in self.sets.iter_mut().enumerate() {
            if s.valid && is(s) {
                if i == self.now {
                    s.clear();
                } else {
                    s.valid = false;
                }
            }
        }
    }

    /// Forgets an address space of the present VPID.
    pub fn flush_pcid(&mut self, pcid: u16) {
        let vpid = self.tag.vpid;
        self.flush_if(|s| s.pcid == pcid && s.tag.vpid == vpid);
    }

    /// Forgets everything of a VPID.
    pub fn flush_vpid(&mut self, vpid: u16) {
        if self.sets.iter().any(|s| s.valid && s.tag.vpid != vpid) {
            self.flush_if(|s| s.tag.vpid == vpid);
        } else {
            self.flush_all();
        }
    }

    /// Forgets everything of the present VPID, as changes of control registers do.
    pub fn flush_present(&mut self) {
        self.flush_vpid(self.tag.vpid);
    }

    /// Forgets everything of all VPIDs but 0.
    pub fn flush_guests(&mut self) {
        self.flush_if(|s| s.tag.vpid != 0);
    }

    /// Forgets what was made under an EPT pointer, or under any.
    pub fn flush_ept(&mut self, pointer: Option<u64>) {
        self.flush_if(|s| s.tag.ept != 0 && pointer.is_none_or(|pointer| (s.tag.ept ^ pointer) & EP4TA == 0));
    }

    /// Notes what rights depend on, before a VM entry or a VM exit changes it.
    pub fn leave(&mut self, rights: u64) {
        self.left.insert(self.tag.vpid, rights);
    }

    /// A VM entry or a VM exit, after [`Tlb::leave`]: from now on sets of this tag are chosen. Without VPIDs nothing of before holds (SDM
    /// Vol. 3C 29.4.3.1 "Operations that Invalidate Cached Mappings"), and what a VPID has is forgotten where rights, which entries have
    /// worked in, depend on something else than they did. Follow with [`Tlb::select`].
    pub fn enter(&mut self, tag: VmxTag, rights: u64) {
        if self.tag.vpid == tag.vpid || self.left.get(&tag.vpid).is_some_and(|left| *left != rights) {
            self.flush_vpid(tag.vpid);
        }
        self.tag = tag;
    }

    /// VMFUNC has switched to another EPT pointer, which forgets nothing. Follow with [`Tlb::select`].
    pub fn switch(&mut self, tag: VmxTag) {
        self.tag = tag;
    }

    /// The tag of the sets that are chosen now.
    pub fn tag(&self) -> VmxTag {
        self.tag
    }

    /// Takes on a tag, with nothing to be remembered.
    pub fn set_tag(&mut self, tag: VmxTag) {
        self.flush_all();
        self.left.clear();
        self.tag = tag;
        self.sets[self.now].tag = tag;
    }

    /// The rights that go with protection keys change from one register value to another.
    pub fn rights_change(&mut self, from: u32, to: u32) {
        let changed = from ^ to;
        if (0..16).any(|key| self.keys >> key & 1 != 0 && changed >> (2 * key) & 3 != 0) {
            self.flush_all();
        }
    }

    /// Notes the size and the protection key of a guest page that a translation was entered from.
    pub fn note(&mut self, linear: u64, page: &Page) {
        if let Some(key) = page.key {
            self.keys |= 1 << key;
        }
        self.note_size(linear, page.shift);
    }

    fn note_size(&mut self, linear: u64, shift: u32) {
        if shift > 22 {
            if self.huge.contains(&(linear >> 30)) {
                return;
            }
            if self.huge.len() == HUGE {
                self.flush_all();
            }
            self.huge.push(linear >> 30);
        } else if shift > 12 {
            let (word, bit) = Self::region(linear);
            self.large[word] |= 1 << bit;
        }
    }

    fn region(linear: u64) -> (usize, u32) {
        let hash = (linear >> 22).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52;
        ((hash >> 6) as usize, (hash & 63) as u32)
    }

    /// Forgets the page of an address, whatever its size, in every address space: more than INVLPG must, never less.
    pub fn flush_page(&mut self, linear: u64) {
        if self.huge.contains(&(linear >> 30)) {
            self.flush_region(30, linear >> 30);
        }
        let (word, bit) = Self::region(linear);
        if self.large[word] >> bit & 1 != 0 {
            self.flush_region(22, linear >> 22);
        }
        let i = Self::index(linear);
        for s in &mut self.sets {
            s.entries[i] = empty(i);
        }
    }

    /// Forgets the addresses that agree above `shift`.
    fn flush_region(&mut self, shift: u32, region: u64) {
        for s in self.sets.iter_mut().filter(|s| s.valid) {
            s.for_each(|i, e| {
                if [e.read, e.write, e.exec].iter().any(|tag| tag >> shift == region) {
                    *e = empty(i);
                }
            });
        }
    }

    /// Holds the write tags of a host page back, wherever it is mapped.
    pub fn hold_back(&mut self, host: u64) {
        self.hold_back_if(|e| e.host == host);
    }

    /// Holds all write tags back.
    pub fn hold_all_back(&mut self) {
        self.hold_back_if(|_| true);
    }

    /// Holds all fetches back.
    pub fn hold_fetches_back(&mut self) {
        for s in self.sets.iter_mut().filter(|s| s.valid) {
            s.for_each(|i, e| {
                if Self::index(e.exec) == i {
                    e.exec = held_back(e.exec);
                }
            });
        }
    }

    fn hold_back_if(&mut self, is: impl Fn(&Entry) -> bool) {
        for s in self.sets.iter_mut().filter(|s| s.valid) {
            s.for_each(|i, e| {
                // A tag that can match is one of its own index.
                if Self::index(e.write) == i && is(e) {
                    e.write = held_back(e.write);
                }
            });
        }
    }

    /// What it holds, host addresses replaced by what `physical` makes of them. What the units watch is left open.
    pub fn state(&self, physical: impl Fn(u64) -> Option<u64>) -> Translations {
        let mut sets: Vec<&Set> = self.sets.iter().filter(|set| set.valid).collect();
        sets.sort_by_key(|set| set.used);
        let space = |set: &Set| AddressSpace {
            tag: set.tag,
            pcid: set.pcid,
            root: set.root,
            privilege: set.privilege,
            pages: (0..)
                .zip(set.entries.iter())
                .filter_map(|(i, e)| {
                    let tags = [e.read, e.exec, e.write, held_back(e.write), held_back(e.exec)];
                    let linear = tags.into_iter().find(|tag| Self::index(*tag) == i)?;
                    Some(Translation {
                        linear,
                        physical: physical(e.host)?,
                        reads: e.read == linear,
                        writes: e.stores_to(linear),
                        fetches: e.exec == linear || e.holds_fetches_back(linear),
                        announced: e.exec == linear,
                    })
                })
                .collect(),
        };
        let spaces = sets.into_iter().map(space).collect();
        Translations {
            spaces,
            large: self.large,
            huge: self.huge.clone(),
            keys: self.keys,
            left: self.left.clone(),
            ..Translations::default()
        }
    }

    /// Holds this instead of what it held, physical addresses replaced by what `host` makes of them. All stores are held
    /// back.
    pub fn set_state(&mut self, state: &Translations, host: impl Fn(u64) -> Option<u64>) {
        for set in &mut self.sets {
            (set.valid, set.used) = (false, 0);
        }
        let last = state.spaces.len().saturating_sub(SETS);
        for (i, space) in state.spaces[last..].iter().enumerate() {
            let set = &mut self.sets[i];
            set.clear();
            (set.pcid, set.root, set.privilege, set.valid) = (space.pcid, space.root, space.privilege, true);
            set.tag = space.tag;
            set.used = i as u64 + 1;
            self.now = i;
            for page in &space.pages {
                if let Some(host) = host(page.physical) {
                    let write = if page.writes { Grant::HeldBack } else { Grant::No };
                    let exec = match (page.fetches, page.announced) {
                        (false, _) => Grant::No,
                        (true, false) => Grant::HeldBack,
                        (true, true) => Grant::Yes,
                    };
                    self.fill_in(i, page.linear, host, page.reads, write, exec);
                }
            }
        }
        self.clock = SETS as u64;
        self.current = self.sets[self.now].entries.as_mut_ptr();
        self.large = state.large;
        self.huge.clone_from(&state.huge);
        self.keys = state.keys;
        self.left.clone_from(&state.left);
    }
}

/// What a processor remembers of page tables, as plain data. A guest that changes its page tables and invalidates nothing
/// sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Translations {
    /// By address space and privilege, that used last at the end.
    pub spaces: Vec<AddressSpace>,
    /// Regions of 4 MiB that large pages were entered from, hashed: INVLPG forgets all of such a region.
    #[serde(with = "BigArray")]
    pub large: [u64; 64],
    /// Regions of 1 GiB that pages of that size were entered from.
    pub huge: Vec<u64>,
    /// Protection keys that translations were entered under.
    pub keys: u16,
    /// By VPID, what rights depended on when it was left by VM entry or VM exit.
    pub left: BTreeMap<u16, u64>,
    /// Ranges that the units watched when they were entered, if they watched any: no access to these goes through a
    /// translation.
    pub ranges: Option<Vec<Range>>,
    /// The units watched every access.
    pub every_access: bool,
    /// How closely they followed the code that is executed.
    pub code: u64,
}

impl Default for Translations {
    fn default() -> Translations {
        Translations {
            spaces: Vec::new(),
            large: [0; 64],
            huge: Vec::new(),
            keys: 0,
            left: BTreeMap::new(),
            ranges: None,
            every_access: false,
            code: 0,
        }
    }
}

/// The translations of an address space at a privilege.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressSpace {
    /// VPID and EPT.
    pub tag: VmxTag,
    /// Process-context identifier.
    pub pcid: u16,
    /// CR3 when it was last chosen, where somebody follows code by address space.
    pub root: Option<u64>,
    /// Whose accesses they answer.
    pub privilege: Privilege,
    /// Each of another page.
    pub pages: Vec<Translation>,
}

/// The translation of a page of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Translation {
    /// Linear address.
    pub linear: u64,
    /// Guest-physical address.
    pub physical: u64,
    /// Loads go through it.
    pub reads: bool,
    /// Stores go through it.
    pub writes: bool,
    /// Fetches go through it.
    pub fetches: bool,
    /// Its code has been announced to the units, as far as they want to hear of any.
    pub announced: bool,
}

#[cfg(test)]
#[path = "tlb_test.rs"]
mod tests;
