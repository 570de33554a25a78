//! What CR4 protects: 57-bit addresses, SMAP, UMIP, and what this processor has not got (CET, MPX).

use crate::{bench, rig};
use bench::{Bench, EVERYTHING, FREE, descriptor, handler};
use engine::{CpuState, Exit};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, STACK, TABLES};
use x86::model::{CpuModel, CpuidRow};

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
type Outcome = Result<(), (u8, Option<u32>)>;

const UD: Outcome = Err((6, None));
const GP: Outcome = Err((13, Some(0)));

const LA57: u64 = 1 << 12;
const AC: u64 = 1 << 18;

/// The rows of `EVERYTHING` with LA57 and 57 linear bits.
const ROWS: &[CpuidRow] = &{
    let mut rows = [CpuidRow {
        leaf: 0,
        subleaf: None,
        regs: [0; 4],
    }; EVERYTHING.cpuid.len()];
    let mut i = 0;
    while i < rows.len() {
        rows[i] = EVERYTHING.cpuid[i];
        match rows[i].leaf {
            7 => rows[i].regs[2] |= 1 << 16,
            0x8000_0008 => rows[i].regs[0] = 0x3928,
            _ => {}
        }
        i += 1;
    }
    rows
};

/// A part with 5-level paging.
static WIDE: CpuModel = CpuModel {
    cpuid: ROWS,
    ..EVERYTHING
};

const PML5: u64 = 0x52_0000;
/// An address that only 57 bits reach, and the tables that lead there.
const LINEAR: u64 = 0xff12_3456_789a_b000;
const LEVELS: u64 = 0x50_0000;
const PAGE: u64 = 0x51_0000;
const CANONICAL_48: u64 = 0x0000_8000_0000_0000;
const CANONICAL_57: u64 = 0x0100_0000_0000_0000;

fn entry(level: u64) -> u64 {
    let table = if level == 5 { PML5 } else { LEVELS + level * 0x1000 };
    table + (LINEAR >> (12 + 9 * (level - 1)) & 0x1ff) * 8
}

fn target(level: u64) -> u64 {
    if level == 1 {
        PAGE
    } else {
        LEVELS + (level - 1) * 0x1000
    }
}

/// 64-bit mode with five levels of tables.
fn five() -> Bench {
    let mut b = Bench::long_with(&WIDE);
    b.put(PML5, TABLES | 7);
    for level in 1..=5 {
        b.put(entry(level), target(level) | 7);
    }
    b.write(handler(14), &[0xeb, 0xfe]);
    b.state(|s| {
        s.cr3 = PML5;
        s.cr4.set_la57(true);
    });
    b
}

// covers: cpu/la57
#[test]
fn five_level_paging_walks_five_levels_and_faults_at_each() {
    let (p, rw, us, accessed, dirty) = (1u64, 2u64, 4u64, 0x20u64, 0x40u64);
    for level in 1..=5u64 {
        for (name, flags, write, user, expected) in [
            ("all rights", p | rw | us, false, true, Ok(())),
            ("all rights", p | rw | us, true, true, Ok(())),
            ("not present", rw | us, false, false, Err(0)),
            ("not present", rw | us, true, true, Err(6)),
            ("supervisor", p | rw, false, true, Err(5)),
            ("read-only", p | us, true, true, Err(7)),
            ("bit 40 of 40", p | rw | us | 1 << 40, false, false, Err(9)),
            ("NX", p | rw | us | 1 << 63, false, true, Ok(())),
        ] {
            let mut b = five();
            b.put(entry(level), target(level) | flags);
            if user {
                b.user();
            }
            b.write(CODE, if write { &[0x89, 0x03] } else { &[0x8b, 0x03] });
            b.state(|s| s.gpr[3] = LINEAR);
            assert_eq!(b.run(1), Exit::Budget);
            let s = b.cpu.state();
            let got = if s.rip == CODE + 2 {
                Ok(())
            } else {
                assert_eq!((s.rip, s.cr2), (handler(14), LINEAR), "{name}");
                Err(u32::from_le_bytes(b.read(s.gpr[4])))
            };
            assert_eq!(got, expected, "{name} at level {level}, write {write}, user {user}");
            for at in 1..=5u64 {
                let now = u64::from_le_bytes(b.read(entry(at)));
                let d = if at == 1 && write { dirty } else { 0 };
                let set = if expected.is_ok() { accessed | d } else { 0 };
                assert_eq!(now & (accessed | dirty), set, "{name}: level {at}");
            }
        }
    }
    // PS is reserved in both upper levels.
    for level in [4, 5] {
        let mut b = five();
        b.put(entry(level), target(level) | 0x87);
        b.code(|a| a.mov(eax, dword_ptr(rbx)));
        b.state(|s| s.gpr[3] = LINEAR);
        b.run(1);
        let s = b.cpu.state();
        assert_eq!(
            (s.rip, u32::from_le_bytes(b.read(s.gpr[4]))),
            (handler(14), 9),
            "level {level}"
        );
    }
}

// covers: cpu/la57
#[test]
fn la57_moves_the_end_of_canonical_addresses() {
    let load: Code = |a| a.mov(eax, dword_ptr(rbx));
    let push: Code = |a| a.push(rax);
    let jump: Code = |a| a.jmp(rbx);
    for (name, code, la57, address, expected) in [
        ("load, four levels", load, false, CANONICAL_48, GP),
        (
            "load, five levels: not mapped",
            load,
            true,
            CANONICAL_48,
            Err((14, Some(0))),
        ),
        ("load, five levels", load, true, LINEAR, Ok(())),
        ("load, four levels", load, false, LINEAR, GP),
        ("load, five levels", load, true, CANONICAL_57, GP),
        ("load, five levels, across the end", load, true, CANONICAL_57 - 2, GP),
        ("push, four levels", push, false, LINEAR + 0x10, Err((12, Some(0)))),
        ("push, five levels", push, true, LINEAR + 0x10, Ok(())),
        ("push, five levels", push, true, CANONICAL_57 + 8, Err((12, Some(0)))),
        ("jump, four levels", jump, false, LINEAR, GP),
        ("jump, five levels", jump, true, LINEAR, Ok(())),
        ("jump, five levels", jump, true, CANONICAL_57, GP),
    ] {
        let mut b = five();
        b.write(handler(14), &[0xf4]);
        // #SS and #PF come on another stack.
        for v in [12, 14] {
            b.gate64(v, bench::KCODE, handler(v), 14, 0, 1);
        }
        b.put(bench::TSS + 0x24, bench::KERNEL_STACK);
        b.state(|s| {
            if !la57 {
                s.cr3 = TABLES;
                s.cr4.set_la57(false);
            }
            s.gpr[3] = address;
            if name.starts_with("push") {
                s.gpr[4] = address;
            }
        });
        assert_eq!(b.one(code), expected, "{name}, {address:x}");
    }
}

// covers: cpu/la57
#[test]
fn registers_take_what_the_part_s_widest_mode_takes() {
    // Whatever CR4.LA57 says. EBX holds the address of a descriptor, or the address itself.
    let lgdt: Code = |a| a.lgdt(ptr(rsi));
    let wrfsbase: Code = |a| a.wrfsbase(rbx);
    let wrmsr: Code = |a| a.wrmsr();
    for la57 in [false, true] {
        for (name, code) in [("LGDT", lgdt), ("WRFSBASE", wrfsbase), ("WRMSR", wrmsr)] {
            for (address, expected) in [
                (CANONICAL_48 - 1, Ok(())),
                (CANONICAL_48, Ok(())),
                (CANONICAL_57 - 1, Ok(())),
                (CANONICAL_57, GP),
                (0xfeff_ffff_ffff_ffff, GP),
            ] {
                let mut b = five();
                b.write(STACK, &[0xff, 0x07]);
                b.put(STACK + 2, address);
                b.state(|s| {
                    if !la57 {
                        s.cr3 = TABLES;
                        s.cr4.set_la57(false);
                    }
                    s.cr4.set_fsgsbase(true);
                    (s.gpr[3], s.gpr[6]) = (address, STACK);
                    // KERNEL_GS_BASE.
                    (s.gpr[0], s.gpr[1], s.gpr[2]) = (address & 0xffff_ffff, 0xc000_0102, address >> 32);
                    s.gpr[4] = STACK - 0x100;
                });
                assert_eq!(b.one(code), expected, "{name} {address:x}, LA57 {la57}");
            }
        }
    }
    // A part without LA57 has 48 bits everywhere.
    let mut b = Bench::long();
    b.state(|s| {
        s.cr4.set_fsgsbase(true);
        s.gpr[3] = CANONICAL_48;
    });
    assert_eq!(b.one(wrfsbase), GP);
}

// covers: cpu/la57
#[test]
fn la57_changes_outside_ia_32e_mode_only() {
    let write: Code = |a| a.mov(cr4, rax);
    for (name, model, from, to, expected) in [
        ("set in 64-bit mode", &WIDE, 0, LA57, GP),
        ("cleared in 64-bit mode", &WIDE, LA57, 0, GP),
        ("kept", &WIDE, LA57, LA57, Ok(())),
        ("a part without it", &EVERYTHING, 0, LA57, GP),
    ] {
        let mut b = if from == LA57 { five() } else { Bench::long_with(model) };
        b.state(|s| s.gpr[0] = s.cr4.into_bits() & !LA57 | to);
        assert_eq!(b.one(write), expected, "{name}");
    }
}

// covers: cpu/smap
#[test]
fn clac_and_stac_decide_about_user_pages() {
    // 2 MiB to 4 MiB are the user's here, with STACK in them.
    let mut b = Bench::long();
    for i in [0u64, 3] {
        b.put(TABLES + 0x2000 + i * 8, i << 21 | 0x83);
    }
    b.put(bench::TSS + 0x24, CODE - 0x1000);
    b.gate64(14, bench::KCODE, handler(14), 14, 0, 1);
    b.state(|s| {
        s.cr4.set_smap(true);
        (s.gpr[3], s.gpr[4]) = (STACK, CODE - 0x100);
    });
    let start = b.cpu.state();
    let read: Code = |a| a.mov(eax, dword_ptr(rbx));
    assert_eq!(b.one(read), Err((14, Some(1))));
    b.again(&start);
    assert_eq!(b.one(|a| a.stac()), Ok(()));
    assert_eq!(b.cpu.state().rflags.into_bits() & AC, AC);
    assert_eq!(b.one(read), Ok(()));
    assert_eq!(b.one(|a| a.clac()), Ok(()));
    assert_eq!(b.cpu.state().rflags.into_bits() & AC, 0);
    assert_eq!(b.one(read), Err((14, Some(1))));
    // POPF sets AC as well.
    b.again(&start);
    b.put(CODE - 0x108, AC | 2);
    b.state(|s| s.gpr[4] -= 8);
    assert_eq!(b.one(|a| a.popfq()), Ok(()));
    assert_eq!(b.one(read), Ok(()));
    // Implicit accesses ask SMAP whatever AC says: a descriptor in a user page.
    b.again(&start);
    b.put(STACK + FREE as u64, descriptor(0, u32::MAX, 0xc093));
    b.state(|s| {
        s.rflags.set_ac(true);
        s.gdtr.base = STACK;
        s.gpr[0] = FREE as u64;
    });
    b.write(CODE, &[0x8e, 0xe0]);
    b.run(1);
    // The handler's own code descriptor is there too: no way out but shutdown.
    assert_eq!(b.run(1), Exit::Shutdown);
    assert_eq!(b.cpu.state().cr2, STACK + bench::KCODE as u64);
    // Above CPL 0 there is neither.
    for code in [(|a| a.clac()) as Code, |a| a.stac()] {
        let mut b = Bench::long();
        b.user();
        assert_eq!(b.one(code), UD);
    }
    // Nor without SMAP.
    static NONE: CpuModel = CpuModel {
        cpuid: x86::model::WESTMERE.cpuid,
        ..EVERYTHING
    };
    let mut b = Bench::long_with(&NONE);
    assert_eq!(b.one(|a| a.stac()), UD);
}

// covers: cpu/umip
#[test]
fn umip_keeps_tables_and_tasks_from_user_mode() {
    for (name, code) in [
        ("SGDT", (|a| a.sgdt(ptr(rbx))) as Code),
        ("SIDT", |a| a.sidt(ptr(rbx))),
        ("SLDT", |a| a.sldt(eax)),
        ("STR", |a| a.str(eax)),
        ("STR to memory", |a| a.str(word_ptr(rbx))),
        ("SMSW", |a| a.smsw(eax)),
        ("SMSW to memory", |a| a.smsw(word_ptr(rbx))),
        ("SGDT to nowhere", |a| a.sgdt(ptr(rdi))),
    ] {
        for (user, on, expected) in [
            (true, true, GP),
            (true, false, Ok(())),
            (false, true, Ok(())),
            (false, false, Ok(())),
        ] {
            let mut b = Bench::long();
            b.state(|s| {
                s.cr4.set_umip(on);
                (s.gpr[3], s.gpr[7]) = (STACK + 0x100, 0x7000_0000_0000);
            });
            if user {
                b.user();
            }
            // UMIP goes before the operand.
            let expected = match expected {
                Ok(()) if name == "SGDT to nowhere" => Err((14, Some(if user { 6 } else { 2 }))),
                other => other,
            };
            assert_eq!(b.one(code), expected, "{name}, user {user}, UMIP {on}");
        }
    }
}

// covers: cpu/cet-mpx-absent
#[test]
fn cet_and_mpx_are_absent() {
    let rdmsr: Code = |a| a.rdmsr();
    let set_cr4: Code = |a| a.mov(cr4, rax);
    let xsetbv: Code = |a| a.xsetbv();
    for (name, code, rax_value, rcx_value, expected) in [
        ("CR4.CET", set_cr4, 0x80_06a0u64, 0u64, GP),
        ("IA32_U_CET", rdmsr, 0, 0x6a0, GP),
        ("IA32_S_CET", rdmsr, 0, 0x6a2, GP),
        ("IA32_PL0_SSP", rdmsr, 0, 0x6a4, GP),
        ("IA32_INTERRUPT_SSP_TABLE_ADDR", rdmsr, 0, 0x6a8, GP),
        ("IA32_BNDCFGS", rdmsr, 0, 0xd90, GP),
        ("XCR0.BNDREGS and BNDCSR", xsetbv, 0x1b, 0, GP),
        (
            "RDSSPQ is a NOP",
            |a| a.db(&[0xf3, 0x48, 0x0f, 0x1e, 0xc8]),
            7,
            0,
            Ok(()),
        ),
        ("ENDBR64 is a NOP", |a| a.endbr64(), 7, 0, Ok(())),
        ("BNDMK is a NOP", |a| a.db(&[0xf3, 0x0f, 0x1b, 0x03]), 7, 0, Ok(())),
        ("INCSSPQ", |a| a.db(&[0xf3, 0x48, 0x0f, 0xae, 0xe8]), 7, 0, UD),
        ("WRSSQ", |a| a.db(&[0x48, 0x0f, 0x38, 0xf6, 0x03]), 7, 0, UD),
        ("SETSSBSY", |a| a.db(&[0xf3, 0x0f, 0x01, 0xe8]), 7, 0, UD),
    ] {
        let mut b = Bench::long();
        b.state(|s: &mut CpuState| {
            s.cr4.set_osxsave(true);
            (s.gpr[0], s.gpr[1], s.gpr[2], s.gpr[3]) = (rax_value, rcx_value, 0, STACK + 0x100);
        });
        assert_eq!(b.one(code), expected, "{name}");
        if expected.is_ok() {
            assert_eq!(b.cpu.state().gpr[0], 7, "{name}");
        }
    }
}
