//! System-management mode (SDM Vol. 3C chapter 32), as the processor alone has it: guest tests do the rest.

use crate::{bench, rig};
use bench::{Bench, handler};
use engine::{Activity, CS, CpuState, Exit};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::CODE;
use x86::model::by_name;
use x86::msr::{IA32_SMRR_PHYSBASE, IA32_SMRR_PHYSMASK};
use x86::rflags::RFlags;

/// Where the area's offsets begin: SMBASE + 8000H.
const AREA: u64 = 0x3_8000;

/// The handler at the first SMBASE: 16-bit code.
fn install(b: &mut Bench, f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) {
    let mut a = CodeAssembler::new(16).unwrap();
    f(&mut a).unwrap();
    a.rsm().unwrap();
    b.write(AREA, &a.assemble(0x8000).unwrap());
}

fn smi(b: &mut Bench) {
    b.cpu.request_smi();
    assert!(b.cpu.smi_due());
    let (rig, world) = b.parts();
    rig.engine.smi(&mut rig.cpu, world);
}

/// All of a state but what time and SMIs move.
fn comparable(s: &CpuState) -> CpuState {
    CpuState {
        steps: 0,
        observed: None,
        io: None,
        smm: engine::Smm {
            count: 0,
            ..s.smm.clone()
        },
        ..s.clone()
    }
}

fn there_and_back(mut b: Bench, what: &str) {
    install(&mut b, |a| {
        a.mov(eax, 0x1234)?;
        a.mov(ebx, eax)?;
        a.mov(esp, eax)
    });
    b.state(|s| {
        s.gpr[2] = 0x8877_6655;
        s.rflags = RFlags::from_bits(s.rflags.into_bits() | 0x8d5);
        s.dr[6] = 0xffff_0ff1;
        s.dr[7] = 0x455;
    });
    let before = b.cpu.state();
    smi(&mut b);
    let inside = b.cpu.state();
    assert_eq!((inside.rip, inside.segments[CS].base), (0x8000, 0x3_0000), "{what}");
    assert_eq!((inside.cr4.into_bits(), inside.efer.into_bits()), (0, 0), "{what}");
    assert_eq!(inside.cr0.into_bits() & 0x8000_000d, 0, "{what}");
    assert_eq!((inside.dr[7], inside.rflags.into_bits()), (0x400, 2), "{what}");
    assert!(inside.nmi_blocked && b.cpu.in_smm(), "{what}");
    b.run(4);
    assert!(!b.cpu.in_smm(), "{what}");
    assert_eq!(comparable(&b.cpu.state()), comparable(&before), "{what}");
    assert_eq!(b.cpu.state().smm.count, 1);
}

// covers: smm/state
#[test]
fn rsm_brings_every_mode_back() {
    there_and_back(Bench::long(), "64-bit mode");
    there_and_back(Bench::protected(), "protected mode");
    there_and_back(Bench::real(), "real-address mode");
    there_and_back(
        Bench::protected_with(by_name("p6").unwrap()),
        "a part without long mode",
    );
    let mut b = Bench::long();
    b.user();
    there_and_back(b, "ring 3");
}

// covers: smm/save-area
#[test]
fn a_part_without_long_mode_has_the_32_bit_map() {
    let mut b = Bench::protected_with(by_name("p6").unwrap());
    install(&mut b, |_| Ok(()));
    b.state(|s| s.gpr[0] = 0xabcd_1234);
    let s = b.cpu.state();
    smi(&mut b);
    let word = |offset| u32::from_le_bytes(b.read(AREA + offset));
    for (offset, value, what) in [
        (0x7ffc, s.cr0.into_bits() as u32, "CR0"),
        (0x7ff0, s.rip as u32, "EIP"),
        (0x7fd0, 0xabcd_1234, "EAX"),
        (0x7fac, s.segments[CS].selector.into(), "CS"),
        (0x7ef8, 0x3_0000, "SMBASE"),
        (0x7efc, 0x3_0007, "revision"),
    ] {
        assert_eq!(word(offset), value, "{what}");
    }
}

/// 32.10: HLT is gone on with, unless the handler clears the field.
// covers: smm/halt
#[test]
fn hlt_is_restarted_unless_the_handler_says_otherwise() {
    for clears in [false, true] {
        let mut b = Bench::long();
        install(&mut b, |a| {
            if clears {
                a.mov(edi, AREA as u32 + 0x7f02)?;
                a.mov(word_ptr(edi), 0)?;
            }
            Ok(())
        });
        b.code(|a| {
            a.hlt()?;
            a.nop()?;
            a.nop()
        });
        assert_eq!(b.run(9), Exit::Halt);
        smi(&mut b);
        assert_eq!(u16::from_le_bytes(b.read(AREA + 0x7f02)), 1, "the field");
        assert_eq!(b.cpu.activity(), Activity::Running);
        let exit = b.run(if clears { 4 } else { 9 });
        assert_eq!(exit == Exit::Halt, !clears);
        assert_eq!(b.cpu.rip(), CODE + if clears { 2 } else { 1 });
    }
}

/// 32.8: NMIs are held off until RSM, or until an IRET in the handler; one that was blocked before stays so.
// covers: smm/nmi
#[test]
fn nmis_are_held_off_in_smm_and_as_before_behind_it() {
    for blocked in [false, true] {
        let mut b = Bench::long();
        install(&mut b, |a| a.nop());
        b.state(|s| s.nmi_blocked = blocked);
        smi(&mut b);
        assert!(!b.cpu.nmi_deliverable(), "in SMM");
        b.run(1);
        assert!(!b.cpu.nmi_deliverable());
        b.cpu.want_nmi = true;
        // Whoever waits hears of RSM.
        assert_eq!(b.run(9), Exit::Bus);
        assert_eq!(b.cpu.rip(), CODE);
        assert_eq!(b.cpu.nmi_deliverable(), !blocked, "behind RSM");
    }
    let mut b = Bench::long();
    install(&mut b, |a| {
        // A frame for IRET: IP, CS, FLAGS.
        a.mov(esp, 0x2_0000)?;
        a.iret()
    });
    for (n, word) in [0x8100u16, 0x3000, 2].into_iter().enumerate() {
        b.write(0x2_0000 + 2 * n as u64, &word.to_le_bytes());
    }
    smi(&mut b);
    b.run(2);
    assert!(b.cpu.in_smm() && b.cpu.nmi_deliverable(), "IRET ends the blocking");
}

/// 32.3.1: one SMI is remembered in SMM, and taken right behind RSM.
// covers: smm/latched
#[test]
fn an_smi_in_smm_waits_for_rsm() {
    let mut b = Bench::long();
    install(&mut b, |a| a.nop());
    b.code(|a| {
        a.nop()?;
        a.nop()
    });
    smi(&mut b);
    b.cpu.request_smi();
    b.cpu.request_smi();
    assert!(!b.cpu.smi_due() && !b.cpu.smi_pending());
    assert_eq!(b.run(9), Exit::Bus, "RSM");
    assert_eq!(b.cpu.rip(), CODE);
    assert!(b.cpu.smi_due());
    let (rig, world) = b.parts();
    rig.engine.smi(&mut rig.cpu, world);
    assert_eq!(b.cpu.state().smm.count, 2);
    b.run(4);
    assert!(!b.cpu.in_smm() && !b.cpu.smi_due());
    assert_eq!(b.cpu.rip(), CODE + 2);
}

/// 32.3.1: INIT is held off in SMM, and taken right behind RSM.
// covers: smm/init
#[test]
fn an_init_in_smm_waits_for_rsm() {
    let mut b = Bench::long();
    install(&mut b, |a| a.nop());
    b.code(|a| a.nop());
    smi(&mut b);
    let (rig, world) = b.parts();
    assert!(!rig.engine.init(&mut rig.cpu, world, false));
    assert!(b.cpu.in_smm() && !b.cpu.init_due());
    assert_eq!(b.run(9), Exit::Bus, "RSM");
    assert!(b.cpu.init_due() && b.cpu.rip() == CODE);
    let (rig, world) = b.parts();
    assert!(rig.engine.init(&mut rig.cpu, world, false));
    let s = b.cpu.state();
    assert_eq!((s.activity, s.rip), (Activity::WaitForSipi, 0xfff0));
    assert!(!b.cpu.init_due());
}

// covers: smm/blocked
#[test]
fn sti_and_a_wait_for_a_start_up_hold_smis_off() {
    let mut b = Bench::long();
    b.code(|a| {
        a.sti()?;
        a.nop()
    });
    b.run(1);
    b.cpu.request_smi();
    assert!(!b.cpu.smi_due() && b.cpu.smi_pending(), "behind STI");
    b.run(1);
    assert!(b.cpu.smi_due());
    b.cpu.init(false);
    assert!(b.cpu.smi_pending() && !b.cpu.smi_due(), "before a start-up IPI");
}

/// 32.3.2: what a processor cannot have shuts it down.
// covers: smm/shutdown
#[test]
fn rsm_to_a_state_that_cannot_be_shuts_down() {
    for (what, offset, value) in [
        ("a reserved bit of CR4", 0x7e40, 1u64 << 31),
        ("CR4.VMXE", 0x7e40, 0x620 | 1 << 13),
        ("PG without PE", 0x7ff8, 0x8000_0010),
        ("NW without CD", 0x7ff8, 0x2000_0011),
        ("a reserved bit of EFER", 0x7fe0, 1 << 20 | 0x500),
        ("LMA without LME", 0x7fe0, 0x400),
        ("long mode without PAE", 0x7e40, 0),
        ("CR3 beyond physical addresses", 0x7ff0, 1 << 60),
    ] {
        let mut b = Bench::long();
        install(&mut b, |a| a.nop());
        smi(&mut b);
        b.put(AREA + offset, value);
        assert_eq!(b.run(9), Exit::Shutdown, "{what}");
    }
    // Outside RAM everything reads as ones.
    let mut b = Bench::long();
    install(&mut b, |_| Ok(()));
    smi(&mut b);
    b.state(|s| s.smm.base = 0xf000_0000);
    assert_eq!(b.run(9), Exit::Shutdown);
}

// covers: smm/rsm-undefined
#[test]
fn rsm_is_undefined_outside_smm() {
    let mut b = Bench::long();
    assert_eq!(b.one(|a| a.rsm()), Err((6, None)));
    let mut b = Bench::real();
    b.put(handler(6), 0);
    assert!(!b.cpu.in_smm());
}

/// Debug exceptions that wait come behind RSM.
// covers: smm/pending-debug
#[test]
fn pending_debug_exceptions_survive() {
    let mut b = Bench::long();
    install(&mut b, |a| a.nop());
    b.state(|s| s.pending_debug = 1 << 63 | 2);
    smi(&mut b);
    b.run(2);
    assert!(!b.cpu.in_smm());
    assert_eq!(b.cpu.state().pending_debug, 1 << 63 | 2);
    b.run(1);
    assert_eq!(b.cpu.rip() & !31, handler(1));
    assert_eq!(b.cpu.state().dr[6] & 15, 2);
}

/// What SMRR keeps in these tests: four pages.
const RANGE: u64 = 0x4_0000;

/// A part with SMRR, where an SMI has just made the range valid.
fn with_range(f: impl FnOnce(&mut Bench)) -> Bench {
    let mut b = Bench::long_with(by_name("westmere").unwrap());
    f(&mut b);
    install(&mut b, |a| {
        for (msr, value) in [
            (IA32_SMRR_PHYSBASE, RANGE as u32 | 6),
            (IA32_SMRR_PHYSMASK, 0xffff_c800),
        ] {
            a.mov(ecx, msr)?;
            a.mov(eax, value)?;
            a.xor(edx, edx)?;
            a.wrmsr()?;
        }
        // What SMM has translated is of no use behind it.
        a.mov(esi, RANGE as u32)?;
        a.inc(dword_ptr(esi))
    });
    smi(&mut b);
    b.run(99);
    assert!(!b.cpu.in_smm());
    b
}

/// SDM Vol. 3A 12.11.2.4 "System-Management Range Register Interface": the registers are written in SMM alone.
// covers: smm/smrr
#[test]
fn smrr_is_written_in_smm_alone() {
    let mut b = Bench::long_with(by_name("westmere").unwrap());
    install(&mut b, |a| a.nop());
    for inside in [false, true] {
        if inside {
            smi(&mut b);
        }
        let (rig, world) = b.parts();
        for (msr, value) in [(IA32_SMRR_PHYSBASE, 0x4_0006), (IA32_SMRR_PHYSMASK, 0xffff_f800)] {
            let written = rig.engine.write_msr(&mut rig.cpu, world, msr, value);
            assert_eq!(written.is_ok(), inside, "{msr:X}");
            assert_eq!(rig.cpu.held_msr(msr), Some(if inside { value } else { 0 }));
        }
    }
    b.run(9);
    assert!(!b.cpu.in_smm());
    for msr in [IA32_SMRR_PHYSBASE, IA32_SMRR_PHYSMASK] {
        b.state(|s| (s.gpr[0], s.gpr[1], s.gpr[2]) = (0, msr.into(), 0));
        assert_eq!(b.one(|a| a.wrmsr()), Err((13, Some(0))), "{msr:X}");
        b.state(|s| s.rip = CODE);
    }
    b.cpu.init(true);
    assert_eq!(b.cpu.held_msr(IA32_SMRR_PHYSBASE), Some(0x4_0006), "INIT leaves them");
    let core2 = Bench::long_with(by_name("core2").unwrap());
    assert_eq!(core2.cpu.held_msr(IA32_SMRR_PHYSBASE), None, "a part without");
}

/// Outside SMM reads give a fixed value and writes are ignored, of whatever had been translated before; in SMM memory is memory.
// covers: smm/smrr
#[test]
fn smrr_hides_its_range_from_everybody_but_smm() {
    let mut b = with_range(|b| {
        b.put(RANGE, 0x1122_3344_5566_7788);
        b.state(|s| s.gpr[7] = RANGE);
        b.one(|a| {
            a.mov(rax, qword_ptr(rdi))?;
            a.mov(qword_ptr(rdi + 8), rax)
        })
        .unwrap();
    });
    let read = |b: &mut Bench, at: u64| {
        b.state(|s| s.gpr[7] = at);
        b.one(|a| a.mov(rax, qword_ptr(rdi))).unwrap();
        b.cpu.state().gpr[0]
    };
    b.put(RANGE + 0x4000, 5);
    b.put(RANGE - 8, 4);
    for (at, value) in [
        (RANGE, u64::MAX),
        (RANGE + 0x3ff8, u64::MAX),
        (RANGE + 0x4000, 5),
        (RANGE - 8, 4),
        // A page of each kind.
        (RANGE + 0x3ffc, 5 << 32 | 0xffff_ffff),
    ] {
        assert_eq!(read(&mut b, at), value, "{at:X}");
    }
    b.state(|s| (s.gpr[0], s.gpr[7]) = (0, RANGE + 16));
    for n in 0..3 {
        b.one(|a| match n {
            0 => a.mov(qword_ptr(rdi), rax),
            1 => a.lock().add(dword_ptr(rdi), 1),
            _ => a.stosb(),
        })
        .unwrap();
    }
    assert_eq!(
        u64::from_le_bytes(b.read(RANGE)),
        0x1122_3344_5566_7789,
        "as the handler left it"
    );
    assert_eq!(u64::from_le_bytes(b.read(RANGE + 16)), 0, "what was written is lost");
    // All ones are no instruction.
    b.state(|s| s.gpr[7] = RANGE);
    b.one(|a| a.jmp(rdi)).unwrap();
    b.run(1);
    assert_eq!(b.cpu.rip() & !31, handler(6));
    // The handler reaches it again, by translations of its own.
    b.state(|s| (s.rip, s.activity) = (CODE, Activity::Running));
    smi(&mut b);
    b.run(99);
    assert_eq!(u64::from_le_bytes(b.read(RANGE)), 0x1122_3344_5566_778a);
    assert_eq!(read(&mut b, RANGE), u64::MAX);
}

/// The processor's own accesses are accesses: an entry of all ones has reserved bits set, and a stack there takes nothing.
// covers: smm/smrr
#[test]
fn smrr_hides_its_range_from_the_processors_own_accesses() {
    let mut b = with_range(|_| ());
    let table = b.cpu.state().cr3;
    let entries: [u8; 4096] = b.read(table);
    b.write(RANGE, &entries);
    b.state(|s| s.cr3 = RANGE);
    b.run(1);
    assert_eq!(b.run(9), Exit::Shutdown, "no page for any handler");

    let mut b = with_range(|_| ());
    b.put(bench::TSS + 4, RANGE + 0x1000);
    b.write(RANGE, &[0; 0x1000]);
    b.user();
    b.code(|a| a.ud2());
    b.run(2);
    assert_eq!(b.cpu.rip() & !31, handler(6));
    assert_eq!(b.read::<64>(RANGE + 0x1000 - 64), [0; 64], "the frame is lost");
}
