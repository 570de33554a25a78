//! Extended page tables. SDM Vol. 3C 29.3 "The Extended Page Table Mechanism (EPT)".

use bitfield_struct::bitfield;

/// The EPT pointer. SDM Vol. 3C Table 25-9 "Format of Extended-Page-Table Pointer".
#[bitfield(u64)]
#[derive(PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct EptPointer {
    /// Memory type: 0 uncacheable, 6 write-back.
    #[bits(3)]
    pub memory_type: u8,
    /// The length of the page walk less 1.
    #[bits(3)]
    pub walk: u8,
    /// Accessed and dirty flags.
    pub accessed_dirty: bool,
    #[bits(5)]
    pub reserved: u8,
    /// The page frame of the EPT PML4 table.
    #[bits(52)]
    pub frame: u64,
}

impl EptPointer {
    /// The physical address of the EPT PML4 table.
    pub const fn table(self) -> u64 {
        self.frame() << 12
    }
}

/// What an access to a guest-physical address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EptAccess {
    /// A read.
    Read,
    /// A write; with accessed and dirty flags, each access to a guest paging-structure entry is one.
    Write,
    /// A fetch from a supervisor-mode linear address.
    Fetch,
    /// A fetch from a user-mode linear address, which mode-based execute control tells apart. SDM Vol. 3C 29.3.2 "EPT Translation
    /// Mechanism".
    UserFetch,
}

/// What the walk depends on beside the entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EptPaging {
    /// The EPT pointer.
    pub pointer: EptPointer,
    /// The part has execute-only translations.
    pub execute_only: bool,
    /// The part has 1-GByte pages.
    pub huge: bool,
    /// Mode-based execute control: bit 10 of an entry is the right of fetches from user-mode linear addresses.
    pub mode_based: bool,
    /// The physical-address width.
    pub physical_bits: u32,
}

/// Rights of an EPT entry: bits 2:0, and bit 10 as bit 3.
pub mod rights {
    /// Reads.
    pub const READ: u64 = 1;
    /// Writes.
    pub const WRITE: u64 = 2;
    /// Fetches; with mode-based execute control, from supervisor-mode linear addresses.
    pub const EXECUTE: u64 = 4;
    /// With mode-based execute control: fetches from user-mode linear addresses.
    pub const USER_EXECUTE: u64 = 8;
}

/// The accessed flag.
pub const ACCESSED: u64 = 1 << 8;
/// The dirty flag of an entry that maps a page.
pub const DIRTY: u64 = 1 << 9;
/// Violations that the entry causes do not become virtualization exceptions. SDM Vol. 3C 26.5.7.1 "Convertible EPT Violations".
pub const SUPPRESS: u64 = 1 << 63;
/// The entry maps a large page.
pub const LARGE: u64 = 1 << 7;

/// Bits of the exit qualification of an EPT violation. SDM Vol. 3C Table 28-7 "Exit Qualification for EPT Violations".
pub mod qualification {
    /// A data read.
    pub const READ: u64 = 1;
    /// A data write.
    pub const WRITE: u64 = 1 << 1;
    /// An instruction fetch.
    pub const FETCH: u64 = 1 << 2;
    /// First bit of the AND of the rights of the entries that were used.
    pub const RIGHTS_SHIFT: u32 = 3;
    /// The guest-linear address field is valid.
    pub const LINEAR_VALID: u64 = 1 << 7;
    /// The access is to the page that the linear address translates to, not to a paging-structure entry.
    pub const FINAL: u64 = 1 << 8;
    /// NMI unblocking due to IRET.
    pub const NMI_UNBLOCKING: u64 = 1 << 12;
    /// The access was asynchronous to instructions: Intel PT's.
    pub const ASYNCHRONOUS: u64 = 1 << 16;
}

/// Why a guest-physical address has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EptFault {
    /// The rights do not allow the access.
    Violation {
        /// The AND of the rights of the entries that were used, 0 where one is not present.
        rights: u64,
        /// The entry lets the violation become a virtualization exception: [`SUPPRESS`] is clear.
        convertible: bool,
    },
    /// An entry has a setting that is reserved.
    Misconfiguration,
    /// A dirty flag is to be set, and the page-modification log is full. SDM Vol. 3C 29.3.6 "Page-Modification Logging".
    LogFull,
}

/// A translated guest-physical address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EptPage {
    /// Physical address of the 4-KByte page.
    pub physical: u64,
    /// The AND of the rights of all entries.
    pub rights: u64,
    /// Writes need not set a dirty flag: there are none, or it is set.
    pub dirty: bool,
    /// The entry whose dirty flag a write would set, with its address; see `dirty`.
    pub last: u64,
}

impl EptPaging {
    /// The rights of an entry; it is present if there are any.
    const fn rights(&self, entry: u64) -> u64 {
        entry & 7 | if self.mode_based { (entry >> 10 & 1) << 3 } else { 0 }
    }

    /// An entry that can neither be used nor is "not present": SDM Vol. 3C 29.3.3.1 "EPT Misconfigurations". `level` is 4 for a PML4
    /// entry.
    pub const fn misconfigured(&self, entry: u64, level: u32) -> bool {
        let rights = self.rights(entry);
        if rights == 0 {
            return false;
        }
        // Writable and not readable; or execute-only where the part has not got that.
        if rights & 1 == 0 && (rights & 2 != 0 || !self.execute_only) {
            return true;
        }
        let large = entry & LARGE != 0;
        let leaf = level == 1 || large && (level == 2 || level == 3 && self.huge);
        let above = !0u64 << self.physical_bits & 0x000f_ffff_ffff_f000;
        let reserved = match level {
            4 => 0xf8,
            3 | 2 if !leaf => 0x78 | if large { LARGE } else { 0 },
            3 => 0x3fff_f000,
            2 => 0x1f_f000,
            _ => 0,
        };
        if entry & (reserved | above) != 0 {
            return true;
        }
        // Memory types 2, 3 and 7 are reserved.
        leaf && matches!(entry >> 3 & 7, 2 | 3 | 7)
    }
}

/// The physical address that an entry holds: of the next structure, or, with `shift` above 12, of a large page.
pub const fn address(entry: u64, shift: u32) -> u64 {
    entry & 0x000f_ffff_ffff_f000 & !((1u64 << shift) - 1)
}

/// Walks the EPT paging structures for one access. `read` reads eight bytes of physical memory; `set` sets flags in an entry, and is
/// asked for only where the pointer has accessed and dirty flags and the access is allowed.
///
/// # Errors
/// The access causes a VM exit, or a virtualization exception.
pub fn walk(
    paging: &EptPaging,
    gpa: u64,
    access: EptAccess,
    read: &mut dyn FnMut(u64) -> u64,
    set: &mut dyn FnMut(u64, u64),
) -> Result<EptPage, EptFault> {
    // A walk of four levels translates 48 bits.
    if gpa >> 48 != 0 {
        return Err(EptFault::Violation {
            rights: 0,
            convertible: false,
        });
    }
    let pointer = paging.pointer;
    let mut table = pointer.table();
    let mut rights = if paging.mode_based { 15 } else { 7 };
    let mut path = [(0u64, 0u64); 4];
    let mut level = 4;
    loop {
        let shift = 12 + 9 * (level - 1);
        let at = table + (gpa >> shift & 0x1ff) * 8;
        let entry = read(at);
        let violation = |rights| {
            Err(EptFault::Violation {
                rights,
                convertible: entry & SUPPRESS == 0,
            })
        };
        let own = paging.rights(entry);
        if own == 0 {
            return violation(0);
        }
        if paging.misconfigured(entry, level) {
            return Err(EptFault::Misconfiguration);
        }
        rights &= own;
        path[4 - level as usize] = (at, entry);
        let leaf = level == 1 || entry & LARGE != 0;
        if !leaf {
            table = address(entry, 12);
            level -= 1;
            continue;
        }
        let wanted = match access {
            EptAccess::Read => rights::READ,
            EptAccess::Write => rights::WRITE,
            EptAccess::UserFetch if paging.mode_based => rights::USER_EXECUTE,
            EptAccess::Fetch | EptAccess::UserFetch => rights::EXECUTE,
        };
        if rights & wanted == 0 {
            return violation(rights);
        }
        let used = 5 - level as usize;
        if pointer.accessed_dirty() {
            for (n, &(at, entry)) in path[..used].iter().enumerate() {
                let last = n + 1 == used;
                let want = ACCESSED | if last && access == EptAccess::Write { DIRTY } else { 0 };
                if entry & want != want {
                    set(at, want & !entry);
                }
            }
        }
        return Ok(EptPage {
            physical: address(entry, shift) | gpa & ((1u64 << shift) - 1) & !0xfff,
            rights,
            dirty: !pointer.accessed_dirty() || entry & DIRTY != 0 || access == EptAccess::Write,
            last: at,
        });
    }
}

#[cfg(test)]
#[path = "ept_test.rs"]
mod tests;
