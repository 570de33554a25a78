//! Paging: the page-fault error code of each kind of access to each kind of entry, accessed and dirty bits, what the TLB may
//! and may not remember, canonical addresses.

use crate::{bench, rig};
use bench::{Bench, EVERYTHING, IDT, KERNEL_STACK, handler};
use engine::{Exit, FS};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, STACK, TABLES};

const FAR_OUT: u64 = 0x0000_8000_0000_0000;
/// Tables of the tested address, from the root's entry down to the page.
const LEVELS: u64 = 0x50_0000;
const PAGE: u64 = 0x51_0000;
/// Code that user mode may execute.
const USER_CODE: u64 = 0x40_0000;

const P: u64 = 1;
const RW: u64 = 2;
const US: u64 = 4;
const A: u64 = 0x20;
const D: u64 = 0x40;
const PS: u64 = 0x80;
const G: u64 = 0x100;
const NX: u64 = 1 << 63;
const ALL: u64 = P | RW | US;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Do {
    Read,
    Write,
    Fetch,
}
use Do::{Fetch, Read, Write};

/// A kind of paging, with the tested linear address and the entries that lead there.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Two,
    Three,
    Four,
}

impl Kind {
    fn linear(self) -> u64 {
        match self {
            Kind::Four => 0xffff_8012_3456_7000,
            _ => 0x9234_5000,
        }
    }

    fn levels(self) -> usize {
        match self {
            Kind::Two => 2,
            Kind::Three => 3,
            Kind::Four => 4,
        }
    }

    /// Where entry `level` (1 is the PTE) of the tested address stands.
    fn entry(self, level: usize) -> u64 {
        let table = if level == self.levels() {
            TABLES
        } else {
            LEVELS + level as u64 * 0x1000
        };
        let (bits, size) = if self == Kind::Two { (10, 4) } else { (9, 8) };
        let index = self.linear() >> (12 + bits * (level - 1)) & ((1 << bits) - 1);
        table + index * size
    }

    /// What entry `level` points at.
    fn target(self, level: usize) -> u64 {
        if level == 1 {
            PAGE
        } else {
            LEVELS + (level as u64 - 1) * 0x1000
        }
    }

    /// A machine with this paging on: everything below 8 MiB mapped to itself, the kernel's part for the supervisor only.
    fn bench(self) -> Bench {
        let mut b = if self == Kind::Four {
            Bench::long()
        } else {
            Bench::protected()
        };
        match self {
            Kind::Four => {}
            Kind::Three => {
                // Four PDPTEs at the root; the first leads to a directory of 2-MiB pages.
                b.write(TABLES, &[0; 32]);
                b.put(TABLES, TABLES + 0x2001);
            }
            Kind::Two => {
                b.write(TABLES, &[0; 4096]);
                for i in 0..2u32 {
                    b.write(TABLES + i as u64 * 4, &(i << 22 | 0x83).to_le_bytes());
                }
            }
        }
        if self != Kind::Two {
            for i in [0u64, 1, 3] {
                b.put(TABLES + 0x2000 + i * 8, i << 21 | 0x83);
            }
        } else {
            b.write(TABLES + 4, &(1u32 << 22 | 0x87).to_le_bytes());
        }
        if self != Kind::Four {
            b.state(|s| {
                s.cr0 = 0x8001_0011.into();
                s.cr3 = TABLES;
                s.cr4 = (if self == Kind::Three { 0xb0 } else { 0x90 }).into();
                s.efer = (if self == Kind::Three { 0x800 } else { 0 }).into();
            });
        }
        for level in 1..=self.levels() {
            self.set(&mut b, level, self.all(level));
        }
        b.write(PAGE, &[0x0f, 0x0b]);
        b
    }

    /// An entry that allows everything: PDPTEs of PAE paging have no rights.
    fn all(self, level: usize) -> u64 {
        if self == Kind::Three && level == 3 { P } else { ALL }
    }

    fn set(self, b: &mut Bench, level: usize, flags: u64) {
        let value = self.target(level) | flags;
        let at = self.entry(level);
        if self == Kind::Two {
            b.write(at, &(value as u32).to_le_bytes());
        } else {
            b.put(at, value);
        }
    }

    fn get(self, b: &Bench, level: usize) -> u64 {
        let bytes: [u8; 8] = b.read(self.entry(level));
        let v = u64::from_le_bytes(bytes);
        if self == Kind::Two { v & 0xffff_ffff } else { v }
    }
}

/// Makes one access; the page fault's error code, if one came.
fn access(b: &mut Bench, linear: u64, what: Do, user: bool) -> Result<(), u32> {
    let at = if user { USER_CODE } else { CODE };
    b.state(|s| {
        s.activity = engine::Activity::Running;
        s.rip = at;
        (s.gpr[3], s.gpr[4]) = (linear, STACK);
    });
    let code: &[u8] = match what {
        Read => &[0x8b, 0x03],
        Write => &[0x89, 0x03],
        Fetch => &[0xff, 0xe3],
    };
    b.write(at, code);
    if user && b.cpu.state().cpl == 0 {
        b.user();
    }
    // Memory beyond RAM is the bus's.
    let exit = b.run(1);
    assert!(matches!(exit, Exit::Budget | Exit::Bus), "{:x?}", b.cpu.state());
    let s = b.cpu.state();
    if s.rip == at + 2 {
        return Ok(());
    }
    if s.rip == linear && what == Fetch {
        // The jump went there; the page holds UD2.
        b.state(|s| s.cr2 = 0);
        assert_eq!(b.run(1), Exit::Budget);
        let s = b.cpu.state();
        if s.rip == handler(6) + 2 {
            return Ok(());
        }
    }
    let s = b.cpu.state();
    assert_eq!((s.rip, s.cr2), (handler(14) + 2, linear), "{s:x?}");
    let bytes: [u8; 4] = b.read(s.gpr[4]);
    Err(u32::from_le_bytes(bytes))
}

/// Handlers that a test can tell from HLT: `jmp $` with a step to take.
fn handlers(b: &mut Bench) {
    for v in [6, 14] {
        b.write(handler(v), &[0xeb, 0x00, 0xeb, 0xfe]);
    }
}

struct Row {
    name: &'static str,
    /// Level and flags of the one entry that is not as permissive as can be.
    entry: (usize, u64),
    what: Do,
    user: bool,
    cr0: u64,
    cr4: u64,
    efer: u64,
    rflags: u64,
    expected: Result<(), u32>,
}

fn row(name: &'static str, entry: (usize, u64), what: Do, user: bool, expected: Result<(), u32>) -> Row {
    Row {
        name,
        entry,
        what,
        user,
        cr0: 0,
        cr4: 0,
        efer: 0,
        rflags: 0,
        expected,
    }
}

/// Runs rows; the bits of CR0, CR4 and EFER given are flipped.
fn check(kind: Kind, rows: Vec<Row>) {
    for r in rows {
        let mut b = kind.bench();
        handlers(&mut b);
        kind.set(&mut b, r.entry.0, r.entry.1);
        b.state(|s| {
            s.cr0 = (s.cr0.into_bits() ^ r.cr0).into();
            s.cr4 = (s.cr4.into_bits() ^ r.cr4).into();
            s.efer = (s.efer.into_bits() ^ r.efer).into();
            s.rflags = (s.rflags.into_bits() | r.rflags).into();
        });
        let got = access(&mut b, kind.linear(), r.what, r.user);
        assert_eq!(
            got, r.expected,
            "{kind:?}: {} at level {}, {:?}, user {}",
            r.name, r.entry.0, r.what, r.user
        );
    }
}

const WP: u64 = 1 << 16;
const SMEP: u64 = 1 << 20;
const SMAP: u64 = 1 << 21;
const NXE: u64 = 0x800;

// covers: cpu/paging-4-level
// covers: cpu/paging-nx
// covers: cpu/paging-wp
// covers: cpu/paging-reserved
// covers: differential/tables
#[test]
fn four_level_paging_gives_the_error_codes_of_the_manual() {
    // SDM Vol. 3A 5.7 "Page-Fault Exceptions": P 1, W 2, U 4, RSVD 8, I 16.
    let mut rows = Vec::new();
    for level in 1..=4 {
        let with = |flags| (level, flags);
        rows.extend([
            row("all rights", with(ALL), Read, true, Ok(())),
            row("all rights", with(ALL), Write, true, Ok(())),
            row("all rights", with(ALL), Fetch, true, Ok(())),
            row("all rights", with(ALL), Fetch, false, Ok(())),
            row("not present", with(RW | US), Read, false, Err(0)),
            row("not present", with(RW | US), Write, false, Err(2)),
            row("not present", with(RW | US), Read, true, Err(4)),
            row("not present", with(RW | US), Write, true, Err(6)),
            row("not present", with(RW | US), Fetch, true, Err(0x14)),
            row("not present", with(RW | US), Fetch, false, Err(0x10)),
            row("not present, reserved bits set", with(1 << 51), Read, false, Err(0)),
            row("supervisor", with(P | RW), Read, true, Err(5)),
            row("supervisor", with(P | RW), Write, true, Err(7)),
            row("supervisor", with(P | RW), Fetch, true, Err(0x15)),
            row("supervisor", with(P | RW), Read, false, Ok(())),
            row("read-only", with(P | US), Read, true, Ok(())),
            row("read-only", with(P | US), Write, true, Err(7)),
            row("read-only with WP", with(P | US), Write, false, Err(3)),
            Row {
                cr0: WP,
                ..row("read-only without WP", with(P | US), Write, false, Ok(()))
            },
            Row {
                cr0: WP,
                ..row("read-only without WP", with(P | US), Write, true, Err(7))
            },
            row("NX", with(ALL | NX), Read, true, Ok(())),
            row("NX", with(ALL | NX), Fetch, true, Err(0x15)),
            row("NX", with(ALL | NX), Fetch, false, Err(0x11)),
            Row {
                efer: NXE,
                ..row("NX without NXE", with(ALL | NX), Read, false, Err(9))
            },
            Row {
                efer: NXE,
                ..row("NX without NXE", with(ALL | NX), Fetch, true, Err(0xd))
            },
            row("bit 40 of 40", with(ALL | 1 << 40), Read, false, Err(9)),
            row("bit 51", with(ALL | 1 << 51), Write, true, Err(0xf)),
            row("bit 52 is the system's", with(ALL | 1 << 52), Read, true, Ok(())),
        ]);
    }
    let sup = (1, P | RW);
    rows.extend([
        row("PS in a PML4E", (4, ALL | PS), Read, false, Err(9)),
        // 1-GByte and 2-MByte pages with address bits that must be 0: the tables' own addresses are such bits.
        row("a 1-GByte page that is not aligned", (3, ALL | PS), Read, false, Err(9)),
        row(
            "a 2-MByte page that is not aligned",
            (2, ALL | PS),
            Read,
            true,
            Err(0xd),
        ),
        Row {
            cr4: SMEP,
            ..row("SMEP, user page", (1, ALL), Fetch, false, Err(0x11))
        },
        Row {
            cr4: SMEP,
            ..row("SMEP, user page", (1, ALL), Read, false, Ok(()))
        },
        Row {
            cr4: SMEP,
            ..row("SMEP, supervisor page", sup, Fetch, false, Ok(()))
        },
        Row {
            cr4: SMEP,
            efer: NXE,
            ..row("SMEP without NXE sets I too", (1, ALL), Fetch, false, Err(0x11))
        },
        Row {
            cr4: SMAP,
            ..row("SMAP, user page", (1, ALL), Read, false, Err(1))
        },
        Row {
            cr4: SMAP,
            ..row("SMAP, user page", (1, ALL), Write, false, Err(3))
        },
        Row {
            cr4: SMAP,
            ..row("SMAP, supervisor page", sup, Write, false, Ok(()))
        },
        Row {
            cr4: SMAP,
            ..row("SMAP is nothing to user mode", (1, ALL), Write, true, Ok(()))
        },
        Row {
            cr4: SMAP,
            rflags: 1 << 18,
            ..row("AC lifts SMAP", (1, ALL), Write, false, Ok(()))
        },
    ]);
    check(Kind::Four, rows);
}

// covers: cpu/paging-3-level
// covers: cpu/paging-nx
// covers: cpu/paging-reserved
#[test]
fn three_level_paging_gives_the_error_codes_of_the_manual() {
    let mut rows = Vec::new();
    for level in 1..=2 {
        let with = |flags| (level, flags);
        rows.extend([
            row("all rights", with(ALL), Write, true, Ok(())),
            row("not present", with(RW | US), Write, true, Err(6)),
            row("supervisor", with(P | RW), Read, true, Err(5)),
            row("read-only with WP", with(P | US), Write, false, Err(3)),
            Row {
                cr0: WP,
                ..row("read-only without WP", with(P | US), Write, false, Ok(()))
            },
            row("NX", with(ALL | NX), Fetch, true, Err(0x15)),
            row("NX", with(ALL | NX), Read, true, Ok(())),
            Row {
                efer: NXE,
                ..row("NX without NXE", with(ALL | NX), Read, true, Err(0xd))
            },
            row("bit 40 of 40", with(ALL | 1 << 40), Read, false, Err(9)),
            row(
                "bit 62 is reserved outside IA-32e mode",
                with(ALL | 1 << 62),
                Read,
                false,
                Err(9),
            ),
        ]);
    }
    rows.extend([
        row("PDPTE not present", (3, 0), Read, true, Err(4)),
        row(
            "a 2-MByte page that is not aligned",
            (2, ALL | PS),
            Read,
            true,
            Err(0xd),
        ),
    ]);
    check(Kind::Three, rows);
}

// covers: cpu/paging-2-level
// covers: cpu/paging-wp
// covers: cpu/paging-reserved
#[test]
fn two_level_paging_gives_the_error_codes_of_the_manual() {
    let mut rows = Vec::new();
    for level in 1..=2 {
        let with = |flags| (level, flags);
        rows.extend([
            row("all rights", with(ALL), Write, true, Ok(())),
            row("all rights", with(ALL), Fetch, true, Ok(())),
            row("not present", with(RW | US), Read, false, Err(0)),
            row("not present", with(RW | US), Write, true, Err(6)),
            row("a fetch shows as a read", with(RW | US), Fetch, true, Err(4)),
            row("supervisor", with(P | RW), Read, true, Err(5)),
            row("supervisor", with(P | RW), Write, false, Ok(())),
            row("read-only", with(P | US), Write, true, Err(7)),
            row("read-only with WP", with(P | US), Write, false, Err(3)),
            Row {
                cr0: WP,
                ..row("read-only without WP", with(P | US), Write, false, Ok(()))
            },
        ]);
    }
    rows.extend([
        // The table's address has bit 21 clear and bits 20:13 set somewhere: with 40 physical bits only bit 21 is reserved.
        row(
            "bit 21 of a 4-MByte page",
            (2, ALL | PS | 1 << 21),
            Read,
            true,
            Err(0xd),
        ),
    ]);
    check(Kind::Two, rows);
    // Without PSE the PS bit is ignored.
    let mut b = Kind::Two.bench();
    handlers(&mut b);
    // Everything else is mapped by 4-MByte pages, so a table for the low 8 MiB first.
    for i in 0..2048u32 {
        b.write(0x60_0000 + i as u64 * 4, &(i << 12 | 7).to_le_bytes());
    }
    for i in 0..2u32 {
        b.write(TABLES + i as u64 * 4, &(0x60_0007 + i * 0x1000).to_le_bytes());
    }
    Kind::Two.set(&mut b, 2, ALL | PS);
    b.state(|s| s.cr4 = 0.into());
    assert_eq!(access(&mut b, Kind::Two.linear(), Read, false), Ok(()));
    // PSE-36: bits 20:13 of the entry are bits 39:32 of the address, which is beyond RAM here and reads all ones.
    let mut b = Kind::Two.bench();
    handlers(&mut b);
    b.write(Kind::Two.entry(2), &(0x40_0000u32 | 1 << 13 | 0x87).to_le_bytes());
    assert_eq!(access(&mut b, Kind::Two.linear(), Read, false), Ok(()));
    assert_eq!(b.cpu.state().gpr[0], 0xffff_ffff);
}

// covers: cpu/paging-4-level
// covers: cpu/paging-3-level
// covers: cpu/paging-2-level
#[test]
fn large_pages_map_their_whole_range() {
    for (kind, level, shift) in [
        (Kind::Four, 3, 30),
        (Kind::Four, 2, 21),
        (Kind::Three, 2, 21),
        (Kind::Two, 2, 22),
    ] {
        let mut b = kind.bench();
        handlers(&mut b);
        let at = kind.entry(level);
        let bytes = (ALL | PS).to_le_bytes();
        b.write(at, &bytes[..if kind == Kind::Two { 4 } else { 8 }]);
        let base = kind.linear() >> shift << shift;
        for offset in [0x3000u64, 0x1f_f000] {
            b.write(offset + 8, &(offset as u32 + 1).to_le_bytes());
            assert_eq!(access(&mut b, base + offset + 8, Read, true), Ok(()), "{kind:?}");
            assert_eq!(b.cpu.state().gpr[0], offset + 1, "{kind:?} {level}");
            b.user();
        }
    }
}

// covers: cpu/paging-3-level
#[test]
fn pdptes_are_checked_when_cr3_is_loaded() {
    for (name, pdpte, expected) in [
        ("present", P, Ok(())),
        ("R/W is reserved", P | RW, Err((13, Some(0)))),
        ("U/S is reserved", P | US, Err((13, Some(0)))),
        ("bit 40 is above the physical width", P | 1 << 40, Err((13, Some(0)))),
        ("NX is reserved", P | NX, Err((13, Some(0)))),
        ("not present: the rest is ignored", NX | RW, Ok(())),
    ] {
        let mut b = Kind::Three.bench();
        b.put(TABLES + 24, pdpte);
        b.state(|s| s.gpr[0] = TABLES);
        assert_eq!(b.one(|a| a.mov(cr3, eax)), expected, "{name}");
    }
}

// covers: cpu/paging-ad-bits
#[test]
fn accessed_and_dirty_bits_are_set_by_what_happens_and_by_nothing_else() {
    for kind in [Kind::Two, Kind::Three, Kind::Four] {
        let levels = kind.levels();
        // PDPTEs of PAE paging have no accessed bit.
        let has_a = |level| !(kind == Kind::Three && level == 3);
        for (what, fails, leaf) in [
            (Read, false, A),
            (Fetch, false, A),
            (Write, false, A | D),
            (Write, true, 0),
        ] {
            let mut b = kind.bench();
            handlers(&mut b);
            if fails {
                kind.set(&mut b, 1, P | US);
            }
            assert_eq!(access(&mut b, kind.linear(), what, true).is_err(), fails);
            for level in 1..=levels {
                let bits = kind.get(&b, level) & (A | D);
                let expected = match level {
                    1 => leaf,
                    _ if fails => bits & A,
                    level if has_a(level) => A,
                    _ => 0,
                };
                assert_eq!(bits, expected, "{kind:?} {what:?} level {level}, fails {fails}");
            }
        }
        // A page that the TLB knows from a read gets its dirty bit with the first write.
        let mut b = kind.bench();
        handlers(&mut b);
        access(&mut b, kind.linear(), Read, false).unwrap();
        assert_eq!(kind.get(&b, 1) & (A | D), A);
        access(&mut b, kind.linear(), Write, false).unwrap();
        assert_eq!(kind.get(&b, 1) & (A | D), A | D);
    }
    // 2-MByte pages have theirs in the PDE.
    let mut b = Kind::Four.bench();
    handlers(&mut b);
    let at = Kind::Four.entry(2);
    b.put(at, ALL | PS);
    access(&mut b, Kind::Four.linear(), Write, true).unwrap();
    assert_eq!(u64::from_le_bytes(b.read(at)), ALL | PS | A | D);
}

// covers: cpu/paging-pcid
// covers: cpu/paging-global
#[test]
fn what_invalidates_makes_new_translations_seen() {
    const OTHER: u64 = 0x52_0000;
    const CR4: u64 = 0x6a0;
    const PCIDE: u64 = 1 << 17;
    let kind = Kind::Four;
    type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
    // All in one program, since setting the state from outside empties the TLB. INVPCID's descriptor: PCID 5, the address.
    let rows: [(&str, u64, u64, Code, bool); 14] = [
        ("nothing: the TLB holds what it read", 0, 0, |a| a.nop(), false),
        (
            "MOV to CR3 with bit 63",
            5,
            0,
            |a| {
                a.mov(rax, 1 << 63 | TABLES | 5)?;
                a.mov(cr3, rax)
            },
            false,
        ),
        ("INVLPG", 0, 0, |a| a.invlpg(ptr(rbx)), true),
        ("INVLPG of a global page", 0, G, |a| a.invlpg(ptr(rbx)), true),
        (
            "MOV to CR3",
            0,
            0,
            |a| {
                a.mov(rax, TABLES)?;
                a.mov(cr3, rax)
            },
            true,
        ),
        (
            "MOV to CR3 of the same PCID",
            5,
            0,
            |a| {
                a.mov(rax, TABLES | 5)?;
                a.mov(cr3, rax)
            },
            true,
        ),
        (
            "CR4.PGE off",
            0,
            G,
            |a| {
                a.mov(eax, CR4 as u32 & !0x80)?;
                a.mov(cr4, rax)
            },
            true,
        ),
        (
            "CR4.SMEP on",
            0,
            G,
            |a| {
                a.mov(eax, (CR4 | SMEP) as u32)?;
                a.mov(cr4, rax)
            },
            true,
        ),
        (
            "CR4.PCIDE off",
            5,
            0,
            |a| {
                a.mov(eax, CR4 as u32)?;
                a.mov(cr4, rax)
            },
            true,
        ),
        (
            "CR0.WP off",
            0,
            0,
            |a| {
                a.mov(eax, 0x8000_0033u32)?;
                a.mov(cr0, rax)
            },
            true,
        ),
        (
            "INVPCID, one address",
            5,
            0,
            |a| {
                a.mov(eax, 0)?;
                a.invpcid(rax, xmmword_ptr(STACK))
            },
            true,
        ),
        (
            "INVPCID, one PCID",
            5,
            0,
            |a| {
                a.mov(eax, 1)?;
                a.invpcid(rax, xmmword_ptr(STACK))
            },
            true,
        ),
        (
            "INVPCID, everything",
            5,
            G,
            |a| {
                a.mov(eax, 2)?;
                a.invpcid(rax, xmmword_ptr(STACK + 16))
            },
            true,
        ),
        (
            "INVPCID, all but global pages",
            5,
            0,
            |a| {
                a.mov(eax, 3)?;
                a.invpcid(rax, xmmword_ptr(STACK + 16))
            },
            true,
        ),
    ];
    for (name, pcid, flags, flush, seen) in rows {
        let mut b = kind.bench();
        kind.set(&mut b, 1, ALL | flags);
        b.write(PAGE, &[1, 0, 0, 0]);
        b.write(OTHER, &[2, 0, 0, 0]);
        b.put(STACK, 5);
        b.put(STACK + 8, kind.linear());
        b.code(|a| {
            a.mov(r8d, dword_ptr(rbx))?;
            a.mov(qword_ptr(rsi), rdi)?;
            flush(a)?;
            a.mov(r9d, dword_ptr(rbx))?;
            a.hlt()
        });
        b.state(|s| {
            s.cr4 = (CR4 | if pcid != 0 { PCIDE } else { 0 }).into();
            s.cr3 = TABLES | pcid;
            (s.gpr[3], s.gpr[6], s.gpr[7]) = (kind.linear(), kind.entry(1), OTHER | ALL | flags);
        });
        assert_eq!(b.run(100), Exit::Halt, "{name}");
        let s = b.cpu.state();
        assert_eq!((s.rip, s.gpr[8], s.gpr[9]), (s.rip, 1, 1 + seen as u64), "{name}");
        assert!(s.rip > CODE && s.rip < CODE + 0x100, "{name}");
    }
}

// covers: cpu/paging-pcid
#[test]
fn two_pcids_keep_their_own_translations() {
    // Two address spaces differ in one page; the code switches between them without flushing, again and again.
    let mut b = Bench::long();
    let second = 0x54_0000u64;
    for i in 0..512u64 {
        b.put(second + i * 8, u64::from_le_bytes(b.read(TABLES + i * 8)));
    }
    // Linear 1 << 39 through PML4E 1: LEVELS for the first, second + 0x1000 for the other.
    for (root, tables, page) in [(TABLES, LEVELS, PAGE), (second, second + 0x1000, PAGE + 0x1000)] {
        b.put(root + 8, tables | ALL);
        b.put(tables, (tables + 0x1000) | ALL);
        b.put(tables + 0x1000, (tables + 0x2000) | ALL);
        b.put(tables + 0x2000, page | ALL);
    }
    b.put(PAGE, 10);
    b.put(PAGE + 0x1000, 1000);
    b.state(|s| {
        s.cr4.set_pcide(true);
        s.cr3 = TABLES | 1;
        s.gpr[3] = 1 << 39;
        s.gpr[6] = 1 << 63 | TABLES | 1;
        s.gpr[7] = 1 << 63 | second | 2;
        s.gpr[1] = 50;
    });
    b.code(|a| {
        let mut top = a.create_label();
        a.set_label(&mut top)?;
        a.mov(cr3, rdi)?;
        a.add(rax, qword_ptr(rbx))?;
        a.mov(cr3, rsi)?;
        a.add(rax, qword_ptr(rbx))?;
        a.dec(rcx)?;
        a.jnz(top)?;
        a.hlt()
    });
    assert_eq!(b.run(1000), Exit::Halt);
    let s = b.cpu.state();
    assert_eq!((s.gpr[0], s.cr3), (50 * 1010, TABLES | 1), "bit 63 of CR3 is not kept");
}

// covers: cpu/paging-pcid
#[test]
fn invpcid_checks_its_descriptor() {
    for (name, kind, pcid, linear, pcide, expected) in [
        ("one address", 0u64, 5u64, 0x1000u64, true, Ok(())),
        (
            "one address that is not canonical",
            0,
            5,
            FAR_OUT,
            true,
            Err((13, Some(0))),
        ),
        ("a PCID without CR4.PCIDE", 0, 5, 0x1000, false, Err((13, Some(0)))),
        ("PCID 0 without CR4.PCIDE", 1, 0, 0, false, Ok(())),
        ("a PCID above 12 bits", 1, 0x1000, 0, true, Err((13, Some(0)))),
        ("type 4", 4, 0, 0, true, Err((13, Some(0)))),
        ("everything", 2, 0, 0, false, Ok(())),
    ] {
        let mut b = Bench::long();
        b.put(STACK, pcid);
        b.put(STACK + 8, linear);
        b.state(|s| {
            s.cr4 = (s.cr4.into_bits() | ((pcide as u64) << 17)).into();
            s.gpr[0] = kind;
        });
        assert_eq!(b.one(|a| a.invpcid(rax, xmmword_ptr(STACK))), expected, "{name}");
    }
}

// covers: cpu/paging-4-level
#[test]
fn invlpg_forgets_the_whole_of_a_large_page() {
    let mut b = Kind::Four.bench();
    handlers(&mut b);
    let (kind, at) = (Kind::Four, Kind::Four.entry(2));
    let base = kind.linear() >> 21 << 21;
    b.put(at, ALL | PS);
    b.put(0x9_3000, 1);
    b.put(0x29_3000, 2);
    b.code(|a| {
        a.mov(rax, qword_ptr(rbx))?;
        a.mov(rcx, qword_ptr(rbx))?;
        a.invlpg(ptr(rsi))?;
        a.mov(rdx, qword_ptr(rbx))
    });
    b.state(|s| (s.gpr[3], s.gpr[6]) = (base + 0x9_3000, base + 0x1000));
    b.run(1);
    // The page moves up by 2 MiB; INVLPG names another address in it.
    b.put(at, 0x20_0000 | ALL | PS);
    b.run(3);
    let s = b.cpu.state();
    assert_eq!((s.gpr[0], s.gpr[1], s.gpr[2]), (1, 1, 2));
}

// covers: cpu/canonical
#[test]
fn addresses_that_are_not_canonical_are_gp_or_ss() {
    type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
    let gp = Err((13, Some(0)));
    let ss_fault = Err((12, Some(0)));
    for (name, address, code, expected) in [
        ("a load", FAR_OUT, (|a| a.mov(rax, qword_ptr(rbx))) as Code, gp),
        ("a load through RBP", FAR_OUT, |a| a.mov(rax, qword_ptr(rbp)), ss_fault),
        (
            "a load through RBP with DS",
            FAR_OUT,
            |a| a.mov(rax, qword_ptr(rbp).ds()),
            ss_fault,
        ),
        ("a load through FS", FAR_OUT, |a| a.mov(rax, qword_ptr(rbx).fs()), gp),
        (
            "the last canonical byte",
            FAR_OUT - 1,
            |a| a.mov(al, byte_ptr(rbx)),
            Err((14, Some(0))),
        ),
        (
            "across the last canonical byte",
            FAR_OUT - 1,
            |a| a.mov(ax, word_ptr(rbx)),
            gp,
        ),
        (
            "the first canonical byte above",
            0xffff_8000_0000_0000,
            |a| a.mov(al, byte_ptr(rbx)),
            Err((14, Some(0))),
        ),
        ("one below it", 0xffff_7fff_ffff_ffff, |a| a.mov(al, byte_ptr(rbx)), gp),
        ("a store", FAR_OUT, |a| a.mov(qword_ptr(rbx), rax), gp),
        (
            "PUSH",
            FAR_OUT + 8,
            |a| {
                a.db(&[0x48, 0x89, 0xdc])?;
                a.push(rax)
            },
            ss_fault,
        ),
        (
            "POP",
            FAR_OUT,
            |a| {
                a.db(&[0x48, 0x89, 0xdc])?;
                a.pop(rax)
            },
            ss_fault,
        ),
        ("JMP", FAR_OUT, |a| a.jmp(rbx), gp),
        ("CALL", FAR_OUT, |a| a.call(rbx), gp),
        ("LGDT", FAR_OUT, |a| a.lgdt(ptr(rbx)), gp),
    ] {
        let mut b = Bench::long();
        let stack = matches!(name, "PUSH" | "POP");
        b.gate64(12, bench::KCODE, handler(12), 14, 0, 1);
        b.put(bench::TSS + 0x24, KERNEL_STACK);
        b.state(|s| (s.gpr[3], s.gpr[5]) = (address, address));
        if stack {
            // MOV RSP, RBX goes first.
            b.code(code);
            b.run(1);
            let t = b.trap();
            assert_eq!((Err((t.vector, t.error)), t.rip), (expected, CODE + 3), "{name}");
            continue;
        }
        assert_eq!(b.one(code), expected, "{name}");
    }
    // RET faults before RSP moves, and a base that is not canonical cannot be loaded.
    let mut b = Bench::long();
    b.put(STACK - 8, FAR_OUT);
    b.state(|s| s.gpr[4] = STACK - 8);
    assert_eq!(b.one(|a| a.ret()), Err((13, Some(0))));
    assert_eq!(b.arrived().rsp, STACK - 8);
    let mut b = Bench::long();
    b.write(STACK, &[0xff, 0, 0, 0, 0, 0, 0, 0x80, 0, 0]);
    b.state(|s| s.gpr[3] = STACK);
    assert_eq!(b.one(|a| a.lidt(ptr(rbx))), Err((13, Some(0))));
    assert_eq!(b.cpu.state().idtr.base, IDT);
    // FS adds its base before the check.
    let mut b = Bench::long();
    b.state(|s| (s.segments[FS].base, s.gpr[3]) = (0u64.wrapping_sub(FAR_OUT), FAR_OUT + STACK));
    b.put(STACK, 99);
    b.one(|a| a.mov(rax, qword_ptr(rbx).fs())).unwrap();
    assert_eq!(b.cpu.state().gpr[0], 99);
    // Running off the end of the lower half: #GP at the address after the last instruction.
    let mut b = Bench::long();
    let top = 0x7fff_ffff_f000u64;
    for (i, at) in [
        (511u64, TABLES + 255 * 8),
        (510, LEVELS + 511 * 8),
        (509, LEVELS + 0x1ff8),
        (0, LEVELS + 0x2ff8),
    ] {
        let next = match i {
            511 => LEVELS,
            510 => LEVELS + 0x1000,
            509 => LEVELS + 0x2000,
            _ => PAGE,
        };
        b.put(at, next | ALL);
    }
    b.write(PAGE + 0xffe, &[0x90, 0x90]);
    b.state(|s| s.rip = top + 0xffe);
    let t = b.trap();
    assert_eq!((t.vector, t.error, t.rip), (13, Some(0), FAR_OUT));
}

// covers: cpu/exceptions
#[test]
fn accesses_that_cross_pages_fault_before_anything_changes() {
    let kind = Kind::Four;
    let mut b = kind.bench();
    handlers(&mut b);
    // The page after the tested one is not mapped.
    b.state(|s| (s.gpr[0], s.gpr[3]) = (u64::MAX, kind.linear() + 0xffc));
    b.code(|a| a.mov(qword_ptr(rbx), rax));
    b.run(1);
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.cr2),
        (handler(14) + 2, kind.linear() + 0x1000),
        "CR2 is the first byte that faults"
    );
    assert_eq!(b.read::<4>(PAGE + 0xffc), [0; 4], "the first page keeps its bytes");
    assert_eq!(EVERYTHING.physical_bits(), 40);
}
