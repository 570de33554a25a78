//! Protection keys: PKRU for user pages, IA32_PKRS for supervisor pages (SDM Vol. 3A 5.6.2 "Protection Keys").

use crate::{bench, rig};
use bench::{Bench, handler};
use engine::Exit;
use iced_x86::code_asm::{dword_ptr, eax, ecx, edi, edx, rbx};
use rig::{CODE, STACK, TABLES};

/// The tested address and the tables that lead to it.
const LINEAR: u64 = 0xffff_8012_3456_7000;
const LEVELS: u64 = 0x50_0000;
const PAGE: u64 = 0x51_0000;
/// Code that user mode may execute.
const USER_CODE: u64 = 0x40_0000;

const RW: u64 = 2;
const US: u64 = 4;
const KEY5: u64 = 5 << 59;

const WP: u64 = 1 << 16;
const SMAP: u64 = 1 << 21;
const PKE: u64 = 1 << 22;
const PKS: u64 = 1 << 24;

/// Access disable and write disable of key 5.
const AD: u32 = 1 << 10;
const WD: u32 = 2 << 10;

const IA32_PKRS: u32 = 0x6e1;

/// 64-bit mode with the tested page mapped by an entry with these flags.
fn bench(flags: u64, cr4: u64) -> Bench {
    let mut b = Bench::long();
    // The kernel's part of the low memory is for the supervisor only.
    for i in [0u64, 1, 3] {
        b.put(TABLES + 0x2000 + i * 8, i << 21 | 0x83);
    }
    for level in 1..=4u64 {
        let table = if level == 4 { TABLES } else { LEVELS + level * 0x1000 };
        let index = LINEAR >> (12 + 9 * (level - 1)) & 0x1ff;
        let entry = if level == 1 {
            PAGE | 1 | flags
        } else {
            LEVELS + (level - 1) * 0x1000 | 7
        };
        b.put(table + index * 8, entry);
    }
    b.write(PAGE, &[0xeb, 0xfe]);
    b.write(handler(14), &[0xeb, 0xfe]);
    b.state(|s| s.cr4 = (s.cr4.into_bits() | cr4).into());
    b
}

#[derive(Clone, Copy, Debug)]
enum Do {
    Read,
    Write,
    Fetch,
}
use Do::{Fetch, Read, Write};

/// Makes one access; the page fault's error code, if one came.
fn access(b: &mut Bench, what: Do, user: bool) -> Result<(), u32> {
    let at = if user { USER_CODE } else { CODE };
    if user && b.cpu.state().cpl == 0 {
        b.user();
    }
    b.state(|s| {
        s.rip = at;
        (s.gpr[3], s.gpr[4], s.cr2) = (LINEAR, STACK, 0);
    });
    let code: &[u8] = match what {
        Read => &[0x8b, 0x03],
        Write => &[0x89, 0x03],
        Fetch => &[0xff, 0xe3],
    };
    b.write(at, code);
    assert_eq!(b.run(1), Exit::Budget);
    if matches!(what, Fetch) && b.cpu.rip() == LINEAR {
        b.run(1);
    }
    let s = b.cpu.state();
    if s.rip == at + 2 || s.rip == LINEAR {
        return Ok(());
    }
    assert_eq!((s.rip, s.cr2), (handler(14), LINEAR), "{s:x?}");
    Err(u32::from_le_bytes(b.read(s.gpr[4])))
}

// covers: cpu/pku, cpu/pks
#[test]
fn keys_take_rights_from_data_accesses_and_say_so_in_the_error_code() {
    // PK is 32, I 16, U 4, W 2, P 1.
    let user_page = RW | US | KEY5;
    let kernel_page = RW | KEY5;
    for (name, flags, cr4, wp, pkru, pkrs, what, user, expected) in [
        ("no key register is on", user_page, 0, true, AD, AD, Read, true, Ok(())),
        ("all rights", user_page, PKE, true, 0, 0, Write, true, Ok(())),
        (
            "other keys' rights",
            user_page,
            PKE,
            true,
            !(AD | WD),
            0,
            Write,
            true,
            Ok(()),
        ),
        ("access disabled", user_page, PKE, true, AD, 0, Read, true, Err(0x25)),
        ("access disabled", user_page, PKE, true, AD, 0, Write, true, Err(0x27)),
        ("not for fetches", user_page, PKE, true, AD | WD, 0, Fetch, true, Ok(())),
        ("write disabled", user_page, PKE, true, WD, 0, Read, true, Ok(())),
        ("write disabled", user_page, PKE, true, WD, 0, Write, true, Err(0x27)),
        (
            "supervisor to a user page",
            user_page,
            PKE,
            true,
            AD,
            0,
            Read,
            false,
            Err(0x21),
        ),
        (
            "supervisor to a user page",
            user_page,
            PKE,
            true,
            WD,
            0,
            Write,
            false,
            Err(0x23),
        ),
        (
            "the same without WP",
            user_page,
            PKE,
            false,
            WD,
            0,
            Write,
            false,
            Ok(()),
        ),
        (
            "access, without WP",
            user_page,
            PKE,
            false,
            AD,
            0,
            Write,
            false,
            Err(0x23),
        ),
        (
            "user mode, without WP",
            user_page,
            PKE,
            false,
            WD,
            0,
            Write,
            true,
            Err(0x27),
        ),
        (
            "PKRS is not for user pages",
            user_page,
            PKE | PKS,
            true,
            0,
            AD,
            Write,
            true,
            Ok(()),
        ),
        (
            "PKRU is not for supervisor pages",
            kernel_page,
            PKE | PKS,
            true,
            AD,
            0,
            Write,
            false,
            Ok(()),
        ),
        ("supervisor page", kernel_page, PKS, true, 0, AD, Read, false, Err(0x21)),
        ("supervisor page", kernel_page, PKS, true, 0, WD, Read, false, Ok(())),
        (
            "supervisor page",
            kernel_page,
            PKS,
            true,
            0,
            WD,
            Write,
            false,
            Err(0x23),
        ),
        (
            "supervisor page, without WP",
            kernel_page,
            PKS,
            false,
            0,
            WD,
            Write,
            false,
            Ok(()),
        ),
        (
            "a supervisor page for user mode",
            kernel_page,
            PKE | PKS,
            true,
            AD,
            AD,
            Read,
            true,
            Err(0x25),
        ),
        ("both reasons", US | KEY5, PKE, true, WD, 0, Write, true, Err(0x27)),
        (
            "the page is read-only, the key is not",
            US | KEY5,
            PKE,
            true,
            0,
            0,
            Write,
            true,
            Err(7),
        ),
        (
            "SMAP and the key",
            user_page,
            PKE | SMAP,
            true,
            AD,
            0,
            Read,
            false,
            Err(0x21),
        ),
        ("SMAP alone", user_page, PKE | SMAP, true, 0, 0, Read, false, Err(1)),
    ] {
        let mut b = bench(flags, cr4);
        b.state(|s| {
            s.cr0 = (if wp {
                s.cr0.into_bits() | WP
            } else {
                s.cr0.into_bits() & !WP
            })
            .into();
            s.pkru = pkru;
            s.msrs.pkrs = pkrs as u64;
        });
        assert_eq!(access(&mut b, what, user), expected, "{name}, {what:?}, user {user}");
    }
}

// covers: cpu/pku
#[test]
fn wrpkru_is_seen_by_the_next_access() {
    let mut b = bench(RW | US | KEY5, PKE);
    b.state(|s| s.cr0.set_wp(true));
    b.write(handler(14), &[0xeb, 0xfe]);
    b.code(|a| {
        a.mov(dword_ptr(rbx), 1)?; // Allowed: the translation is remembered.
        a.xor(ecx, ecx)?;
        a.xor(edx, edx)?;
        a.mov(eax, WD)?;
        a.wrpkru()?;
        a.mov(edi, dword_ptr(rbx))?;
        a.mov(dword_ptr(rbx), 2)?; // #PF
        a.nop()
    });
    b.state(|s| s.gpr[3] = LINEAR);
    b.run(7);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.cr2, s.gpr[7], s.pkru), (handler(14), LINEAR, 1, WD));
    assert_eq!(u32::from_le_bytes(b.read(PAGE)), 1);
}

// covers: cpu/pks
#[test]
fn ia32_pkrs_is_seen_by_the_next_access() {
    let mut b = bench(RW | KEY5, PKS);
    b.state(|s| s.cr0.set_wp(true));
    assert_eq!(access(&mut b, Write, false), Ok(()));
    b.msr(IA32_PKRS, AD as u64);
    assert_eq!(access(&mut b, Write, false), Err(0x23));
    b.msr(IA32_PKRS, 0);
    assert_eq!(access(&mut b, Write, false), Ok(()));
}

// covers: cpu/pku, cpu/pks
#[test]
fn the_registers_check_their_operands() {
    const UD: Result<(), (u8, Option<u32>)> = Err((6, None));
    const GP: Result<(), (u8, Option<u32>)> = Err((13, Some(0)));
    for (name, write, cr4, index, high, expected) in [
        ("RDPKRU", false, PKE, 0, 7, Ok(())),
        ("RDPKRU, CR4.PKE clear", false, 0, 0, 0, UD),
        ("RDPKRU, ECX not 0", false, PKE, 1, 0, GP),
        ("WRPKRU", true, PKE, 0, 0, Ok(())),
        ("WRPKRU, CR4.PKE clear", true, 0, 1, 0, UD),
        ("WRPKRU, ECX not 0", true, PKE, 1, 0, GP),
        ("WRPKRU, EDX not 0", true, PKE, 0, 1, GP),
    ] {
        let mut b = Bench::long();
        b.state(|s| {
            s.cr4 = (s.cr4.into_bits() | cr4).into();
            s.pkru = 0x5555_5554;
            (s.gpr[0], s.gpr[1], s.gpr[2]) = (0xffff_ffff_0000_0ff0, index, high);
        });
        let got = b.one(|a| if write { a.wrpkru() } else { a.rdpkru() });
        assert_eq!(got, expected, "{name}");
        if expected == Ok(()) {
            let s = b.cpu.state();
            let (low, high, pkru) = if write {
                (0xffff_ffff_0000_0ff0, 0, 0xff0)
            } else {
                (0x5555_5554, 0, 0x5555_5554)
            };
            assert_eq!((s.gpr[0], s.gpr[2], s.pkru), (low, high, pkru), "{name}");
        }
    }
    // RDPKRU and WRPKRU are for every privilege level.
    let mut b = bench(RW | US, PKE);
    b.user();
    b.state(|s| {
        s.rip = USER_CODE;
        (s.gpr[0], s.gpr[1], s.gpr[2]) = (AD as u64, 0, 0);
    });
    assert_eq!(b.one(|a| a.wrpkru()), Ok(()));
    assert_eq!(b.cpu.state().pkru, AD);
    // IA32_PKRS has 32 bits.
    let mut b = Bench::long();
    b.state(|s| (s.gpr[0], s.gpr[1], s.gpr[2]) = (0, IA32_PKRS as u64, 1));
    assert_eq!(b.one(|a| a.wrmsr()), GP);
    // CPUID shows CR4.PKE as OSPKE.
    for (cr4, shown) in [(0, 0), (PKE, 1 << 4)] {
        let mut b = Bench::long();
        b.state(|s| {
            s.cr4 = (s.cr4.into_bits() | cr4).into();
            (s.gpr[0], s.gpr[1]) = (7, 0);
        });
        assert_eq!(b.one(|a| a.cpuid()), Ok(()));
        assert_eq!(b.cpu.state().gpr[1] & 1 << 4, shown);
    }
}
