//! The guest's page walk (SDM Vol. 3A chapter 5 "Paging").

use x86::cr::{Cr0, Cr4, Efer};

use crate::ram::Ram;
use crate::vmx::nested::{Nested, NestedFault};

/// What is being done to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A data read.
    Read,
    /// A data write.
    Write,
    /// An instruction fetch.
    Fetch,
}

/// What of the processor's state the walk depends on.
#[derive(Clone, Copy, Debug)]
pub struct Paging {
    /// CR0.
    pub cr0: Cr0,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: Cr4,
    /// IA32_EFER.
    pub efer: Efer,
    /// A user-mode access: CPL 3, and not an implicit supervisor access.
    pub user: bool,
    /// SMAP applies: supervisor-mode data accesses to user pages fault.
    pub smap: bool,
    /// Physical-address width in bits.
    pub maxphyaddr: u32,
    /// The model has 1-GByte pages.
    pub huge: bool,
    /// PKRU: rights to user pages by protection key.
    pub pkru: u32,
    /// IA32_PKRS: rights to supervisor pages by protection key.
    pub pkrs: u32,
    /// The EPT of VMX non-root operation.
    pub nested: Option<Nested>,
}

/// Why a walk has found no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPage {
    /// A page fault, with its error code.
    Fault(u32),
    /// A VM exit.
    Nested(NestedFault),
}

impl From<NestedFault> for NoPage {
    fn from(fault: NestedFault) -> NoPage {
        NoPage::Nested(fault)
    }
}

/// A translation, with what the TLB may grant later without another walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Guest-physical address of the 4-KiB page.
    pub gpa: u64,
    /// Data writes are allowed (the dirty bit may still have to be set).
    pub write: bool,
    /// Data reads are allowed.
    pub read: bool,
    /// Fetches are allowed.
    pub exec: bool,
    /// The dirty bit stands: writes need no walk.
    pub dirty: bool,
    /// log2 of the guest page's size: 12, 21, 22 or 30.
    pub shift: u32,
    /// The protection key; `None` where the page is of a kind that no key register speaks of now.
    pub key: Option<u8>,
}

/// Page-fault error code bits (SDM Vol. 3A 5.7 "Page-Fault Exceptions").
pub mod code {
    /// Protection violation rather than a page that is not present.
    pub const PRESENT: u32 = 1;
    /// A write.
    pub const WRITE: u32 = 2;
    /// A user-mode access.
    pub const USER: u32 = 4;
    /// A reserved bit was set.
    pub const RSVD: u32 = 8;
    /// An instruction fetch.
    pub const FETCH: u32 = 16;
    /// A protection key denies it.
    pub const KEY: u32 = 32;
}

const P: u64 = 1;
const RW: u64 = 2;
const US: u64 = 4;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const PS: u64 = 1 << 7;
const NX: u64 = 1 << 63;

/// Walks the paging structures for one access, setting accessed and dirty bits.
pub(crate) fn walk(core: &mut Ram, p: &Paging, linear: u64, access: Access) -> Result<Page, NoPage> {
    walk_structures(core, p, linear, access, true)
}

/// Finds out what `walk` would answer, and changes nothing.
pub(crate) fn probe(core: &mut Ram, p: &Paging, linear: u64, access: Access) -> Result<Page, NoPage> {
    walk_structures(core, p, linear, access, false)
}

#[inline(always)]
fn walk_structures(core: &mut Ram, p: &Paging, linear: u64, access: Access, commit: bool) -> Result<Page, NoPage> {
    if !p.cr0.pg() {
        let gpa = linear & 0xffff_f000;
        let page = Page {
            gpa,
            write: true,
            read: true,
            exec: true,
            dirty: true,
            shift: 12,
            key: None,
        };
        // Without paging every linear address is a user-mode one.
        return under(core, p, page, linear, access, true, commit);
    }
    let nxe = p.efer.nxe();
    let mut code = 0;
    if access == Access::Write {
        code |= code::WRITE;
    }
    if p.user {
        code |= code::USER;
    }
    if access == Access::Fetch && (nxe && p.cr4.pae() || p.cr4.smep()) {
        code |= code::FETCH;
    }
    let physical = (1u64 << p.maxphyaddr) - 1;
    let pae = p.cr4.pae();
    let long = p.efer.lma();
    let size = if pae { 8 } else { 4 };
    let (mut level, mut table) = match (long, pae) {
        (true, _) => (if p.cr4.la57() { 5 } else { 4 }, p.cr3 & physical & !0xfff),
        (false, true) => (3, p.cr3 & 0xffff_ffe0),
        (false, false) => (2, p.cr3 & 0xffff_f000),
    };
    let linear = if long { linear } else { linear & 0xffff_ffff };
    let (mut write, mut user, mut exec) = (true, true, true);
    // Entries whose accessed bit must be set once the walk is known to succeed.
    let mut path = [(0u64, 0u64); 5];
    let mut depth = 0;
    loop {
        let (shift, index_bits) = if pae {
            (12 + 9 * (level - 1), 9)
        } else {
            (12 + 10 * (level - 1), 10)
        };
        let index = (linear >> shift) & ((1 << index_bits) - 1);
        let at = table + index * size as u64;
        let at = match &p.nested {
            None => at,
            Some(nested) => nested.structure(core, at, false, commit)?,
        };
        let mut entry = core.read_phys(at, size);
        if !pae {
            entry &= 0xffff_ffff;
        }
        if entry & P == 0 {
            return Err(NoPage::Fault(code));
        }
        let pdpte_of_pae = pae && !long && level == 3;
        // A page: the last level, or PS at a level that can map one.
        let leaf =
            level == 1 || entry & PS != 0 && (level == 2 && (pae || p.cr4.pse()) || level == 3 && long && p.huge);
        let mut reserved = 0;
        if pae {
            reserved |= !physical & 0x000f_ffff_ffff_f000;
            if !nxe {
                reserved |= NX;
            }
            if !long {
                reserved |= 0x7ff0_0000_0000_0000;
            }
            if pdpte_of_pae {
                reserved |= 0x1e6 | NX;
            }
            if level >= 4 || level == 3 && long && !p.huge {
                reserved |= PS;
            }
            if leaf && level > 1 {
                reserved |= ((1 << shift) - 1) & !0x1fff;
            }
        } else if leaf && level == 2 {
            // PSE-36: bits 20:13 extend the address, bit 21 is reserved (SDM Vol. 3A 5.3 "32-Bit Paging").
            let extra = p.maxphyaddr.min(40) - 32;
            reserved |= 0x3f_e000 & !(((1u64 << extra) - 1) << 13);
        }
        if entry & reserved != 0 {
            return Err(NoPage::Fault(code | code::PRESENT | code::RSVD));
        }
        if !pdpte_of_pae {
            write &= entry & RW != 0;
            user &= entry & US != 0;
            exec &= !(nxe && entry & NX != 0);
            path[depth] = (at, entry);
            depth += 1;
        }
        if !leaf {
            table = if pae {
                entry & 0x000f_ffff_ffff_f000
            } else {
                entry & 0xffff_f000
            };
            level -= 1;
            continue;
        }

        let supervisor = !p.user;
        let key = (long && if user { p.cr4.pke() } else { p.cr4.pks() }).then_some((entry >> 59 & 0xf) as u8);
        let (key_read, key_write) = key.map_or((true, true), |key| {
            let rights = if user { p.pkru } else { p.pkrs } >> (2 * key);
            let read = rights & 1 == 0;
            (read, read && (rights & 2 == 0 || supervisor && !p.cr0.wp()))
        });
        let read_ok = if supervisor { !(p.smap && user) } else { user };
        let write_ok = read_ok && if supervisor { write || !p.cr0.wp() } else { write };
        let exec_ok = exec && if supervisor { !(p.cr4.smep() && user) } else { user };
        // Protection keys speak of data accesses only (SDM Vol. 3A 5.6.2 "Protection Keys").
        let (allowed, by_key) = match access {
            Access::Read => (read_ok, key_read),
            Access::Write => (write_ok, key_write),
            Access::Fetch => (exec_ok, true),
        };
        if !allowed || !by_key {
            return Err(NoPage::Fault(code | code::PRESENT | if by_key { 0 } else { code::KEY }));
        }
        let (read_ok, write_ok) = (read_ok && key_read, write_ok && key_write);
        for (i, &(at, entry)) in path[..depth].iter().enumerate() {
            let mut bits = 0;
            if entry & A == 0 {
                bits |= A;
            }
            if i + 1 == depth && access == Access::Write && entry & D == 0 {
                bits |= D;
            }
            if bits != 0 && commit {
                core.or_phys(at, size, bits);
            }
        }
        let base = if pae {
            entry & 0x000f_ffff_ffff_f000 & !((1u64 << shift) - 1)
        } else if level == 2 {
            (entry & 0xffc0_0000) | (entry & 0x1f_e000) << 19
        } else {
            entry & 0xffff_f000
        };
        let gpa = base | (linear & ((1u64 << shift) - 1) & !0xfff);
        let dirty = entry & D != 0 || access == Access::Write;
        let page = Page {
            gpa,
            write: write_ok,
            read: read_ok,
            exec: exec_ok,
            dirty,
            shift,
            key,
        };
        return under(core, p, page, linear, access, user, commit);
    }
}

/// Translates the page that the guest's page tables lead to by EPT, if there is one: the rights are what both allow.
#[inline(always)]
fn under(
    core: &mut Ram,
    p: &Paging,
    page: Page,
    linear: u64,
    access: Access,
    user: bool,
    commit: bool,
) -> Result<Page, NoPage> {
    let Some(nested) = &p.nested else { return Ok(page) };
    let below = nested.page(core, page.gpa | linear & 0xfff, access, user, commit)?;
    Ok(Page {
        gpa: below.physical,
        write: page.write && below.rights & 2 != 0,
        read: page.read && below.rights & 1 != 0,
        exec: page.exec && nested.executes(below.rights, user),
        dirty: page.dirty && below.dirty,
        ..page
    })
}
