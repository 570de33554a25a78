//! System instructions against what the manual's tables say.

use crate::{bench, rig};
use bench::{Bench, GDT, KCODE, KDATA, TSS, UCODE, UCODE32, UDATA, handler};
use engine::{CS, Exit, FS, GS, SS};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, STACK};
use x86::model::WESTMERE;

type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
const GP0: Result<(), (u8, Option<u32>)> = Err((13, Some(0)));
const UD: Result<(), (u8, Option<u32>)> = Err((6, None));
const FAR_OUT: u64 = 0x0000_8000_0000_0000;

fn star(b: &mut Bench) {
    b.msr(0xc000_0081, 0x1b << 48 | (KCODE as u64) << 32);
    b.msr(0xc000_0082, 0x10_8000);
    b.msr(0xc000_0084, 0x700);
}

// covers: cpu/syscall
#[test]
fn syscall_and_sysret_go_there_and_back() {
    let mut b = Bench::long();
    star(&mut b);
    b.at(0x10_8000, |a| {
        a.mov(rax, rcx)?;
        a.sysretq()
    });
    b.user();
    b.code(|a| {
        a.syscall()?;
        a.mov(ebx, ss)?;
        a.syscall()
    });
    b.state(|s| s.rflags = 0x3202.into());
    assert_eq!(b.run(1), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.gpr[1], s.gpr[11], s.cpl), (0x10_8000, CODE + 2, 0x3202, 0));
    assert_eq!(
        (s.rflags.into_bits(), s.segments[1].selector, s.segments[2].selector),
        (0x3002, KCODE, KDATA)
    );
    assert_eq!(b.run(4), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.gpr[0], s.gpr[3], s.rip), (CODE + 2, UDATA as u64 | 3, 0x10_8000));
    b.run(2);
    let s = b.cpu.state();
    assert_eq!(
        (s.segments[1].selector, s.rflags.into_bits(), s.cpl),
        (UCODE | 3, 0x3202, 3)
    );
}

// covers: cpu/syscall
#[test]
fn syscall_and_sysret_fault_as_the_manual_says() {
    // SDM Vol. 2B "SYSCALL", "SYSRET", 64-bit mode exceptions.
    let syscall: Code = |a| a.syscall();
    let sysret: Code = |a| a.sysretq();
    let sysret32: Code = |a| a.sysret();
    for (name, sce, user, target, code, expected) in [
        ("SYSCALL without SCE", false, true, 0, syscall, UD),
        ("SYSRET without SCE", false, false, 0, sysret, UD),
        ("SYSRET at CPL 3", true, true, CODE, sysret, GP0),
        (
            "SYSRET to an address that is not canonical",
            true,
            false,
            FAR_OUT,
            sysret,
            GP0,
        ),
        (
            "SYSRET to 32-bit code cuts RCX",
            true,
            false,
            FAR_OUT | CODE,
            sysret32,
            Ok(()),
        ),
        ("SYSRET", true, false, CODE, sysret, Ok(())),
    ] {
        let mut b = Bench::long();
        star(&mut b);
        if user {
            b.user();
        }
        b.state(|s| {
            s.efer = (s.efer.into_bits() & !1 | sce as u64).into();
            s.gpr[1] = target;
        });
        assert_eq!(b.one(code), expected, "{name}");
        if expected == GP0 && !user {
            assert_eq!(
                b.arrived().cs,
                KCODE,
                "{name}: Intel parts fault before they leave CPL 0"
            );
        }
    }
    let mut b = Bench::long();
    star(&mut b);
    b.state(|s| (s.gpr[1], s.gpr[11]) = (CODE, 0xffff_feff));
    b.one(sysret32).unwrap();
    let s = b.cpu.state();
    assert_eq!(s.segments[CS].selector, UCODE32 | 3);
    assert_eq!(s.segments[CS].attributes, 0xc0fb, "32-bit code");
    assert_eq!(s.segments[SS].selector, UDATA | 3);
    assert_eq!(s.rflags.into_bits(), 0x3c_7ed7, "RF and VM stay clear");
    // Compatibility mode has no SYSCALL on Intel parts.
    b.state(|s| s.rflags = 2.into());
    assert_eq!(b.one(syscall), UD);
}

// covers: cpu/sysenter
#[test]
fn sysenter_and_sysexit_take_their_selectors_from_one_register() {
    let mut b = Bench::long();
    for (msr, value) in [(0x174, KCODE as u64), (0x175, 0x30_0000), (0x176, 0x10_8000)] {
        b.msr(msr, value);
    }
    b.at(0x10_8000, |a| a.sysexitq());
    b.user();
    b.state(|s| {
        s.rflags = 0x202.into();
        (s.gpr[2], s.gpr[1]) = (CODE + 0x10, STACK);
    });
    b.one(|a| a.sysenter()).unwrap();
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.gpr[4], s.cpl, s.rflags.into_bits()),
        (0x10_8000, 0x30_0000, 0, 2)
    );
    assert_eq!((s.segments[CS].selector, s.segments[CS].attributes), (KCODE, 0xa09b));
    assert_eq!((s.segments[SS].selector, s.segments[SS].attributes), (KDATA, 0xc093));
    b.run(1);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.gpr[4], s.cpl), (CODE + 0x10, STACK, 3));
    assert_eq!(
        (s.segments[CS].selector, s.segments[SS].selector),
        ((KCODE + 32) | 3, (KCODE + 40) | 3)
    );
    assert_eq!(b.one(|a| a.sysexit()), GP0, "CPL is not 0");
    b.state(|s| s.msrs.sysenter_cs = 3);
    assert_eq!(b.one(|a| a.sysenter()), GP0, "a null selector");
    // In protected mode, and back to 32-bit code.
    let mut b = Bench::protected();
    for (msr, value) in [(0x174, KCODE as u64), (0x175, 0x30_0000), (0x176, 0x10_8000)] {
        b.msr(msr, value);
    }
    b.at(0x10_8000, |a| a.sysexit());
    b.user();
    b.state(|s| (s.gpr[2], s.gpr[1]) = (CODE + 0x10, STACK));
    b.one(|a| a.sysenter()).unwrap();
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.gpr[4], s.cpl, s.segments[CS].attributes),
        (0x10_8000, 0x30_0000, 0, 0xc09b)
    );
    b.run(1);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.gpr[4], s.cpl), (CODE + 0x10, STACK, 3));
    assert_eq!(s.segments[CS].selector, (KCODE + 16) | 3);
}

// covers: cpu/exceptions-privileged
// covers: differential/tables
#[test]
fn privileged_instructions_are_gp_in_ring_3() {
    let rows: [(&str, Code); 24] = [
        ("HLT", |a| a.hlt()),
        ("CLI", |a| a.cli()),
        ("STI", |a| a.sti()),
        ("IN", |a| a.in_(al, 0x60)),
        ("OUT", |a| a.out(dx, eax)),
        ("INSB", |a| a.insb()),
        ("OUTSD", |a| a.outsd()),
        ("MOV from CR0", |a| a.mov(rax, cr0)),
        ("MOV to CR3", |a| a.mov(cr3, rax)),
        ("MOV to CR8", |a| a.mov(cr8, rax)),
        ("MOV from DR7", |a| a.mov(rax, dr7)),
        ("MOV to DR0", |a| a.mov(dr0, rax)),
        ("CLTS", |a| a.clts()),
        ("LMSW", |a| a.lmsw(ax)),
        ("LGDT", |a| a.lgdt(ptr(STACK))),
        ("LIDT", |a| a.lidt(ptr(STACK))),
        ("LLDT", |a| a.lldt(ax)),
        ("LTR", |a| a.ltr(ax)),
        ("INVLPG", |a| a.invlpg(ptr(STACK))),
        ("INVPCID", |a| a.invpcid(rax, xmmword_ptr(STACK))),
        ("WBINVD", |a| a.wbinvd()),
        ("RDMSR", |a| a.rdmsr()),
        ("WRMSR", |a| a.wrmsr()),
        ("SWAPGS", |a| a.swapgs()),
    ];
    for (name, code) in rows {
        let mut b = Bench::long();
        b.user();
        assert_eq!(b.one(code), GP0, "{name}");
    }
    // With IOPL 3 the I/O instructions, CLI and STI are the user's.
    for (name, code) in &rows[1..5] {
        let mut b = Bench::long();
        b.user();
        b.state(|s| s.rflags = (s.rflags.into_bits() | 0x3000).into());
        assert_eq!(b.one(*code), Ok(()), "{name}");
    }
    // CR4.TSD and CR4.UMIP take more away.
    for (name, bits, code) in [
        ("RDTSC", 4u64, (|a| a.rdtsc()) as Code),
        ("RDTSCP", 4, |a| a.rdtscp()),
        ("SGDT", 0x800, |a| a.sgdt(ptr(STACK))),
        ("SIDT", 0x800, |a| a.sidt(ptr(STACK))),
        ("SLDT", 0x800, |a| a.sldt(eax)),
        ("STR", 0x800, |a| a.str(eax)),
        ("SMSW", 0x800, |a| a.smsw(eax)),
    ] {
        let mut b = Bench::long();
        b.user();
        assert_eq!(b.one(code), Ok(()), "{name}");
        let mut b = Bench::long();
        b.user();
        b.state(|s| s.cr4 = (s.cr4.into_bits() | bits).into());
        assert_eq!(b.one(code), GP0, "{name}");
    }
}

// covers: cpu/control-registers
#[test]
fn control_registers_take_what_the_mode_allows() {
    let (to_cr0, to_cr3, to_cr4, to_cr8): (Code, Code, Code, Code) = (
        |a| a.mov(cr0, rax),
        |a| a.mov(cr3, rax),
        |a| a.mov(cr4, rax),
        |a| a.mov(cr8, rax),
    );
    for (name, code, value, expected) in [
        ("CR0 as it is", to_cr0, 0x8001_0033u64, Ok(())),
        ("PG without PE", to_cr0, 0x8000_0030, GP0),
        ("NW without CD", to_cr0, 0xa001_0033, GP0),
        ("bit 32 of CR0", to_cr0, 0x1_8001_0033, GP0),
        ("PG off in 64-bit mode", to_cr0, 0x1_0033 & 0xffff_ffff, GP0),
        ("TS", to_cr0, 0x8001_003b, Ok(())),
        ("CR3 above the physical width", to_cr3, 1 << 40, GP0),
        ("CR3 bit 63 without PCIDE", to_cr3, 1 << 63 | rig::TABLES, GP0),
        ("CR3", to_cr3, rig::TABLES, Ok(())),
        ("CR4 as it is", to_cr4, 0x6a0, Ok(())),
        ("PAE off in IA-32e mode", to_cr4, 0x680, GP0),
        ("VMXE on a model without VMX", to_cr4, 0x26a0, GP0),
        ("bit 40 of CR4", to_cr4, 1 << 40 | 0x6a0, GP0),
        ("PCIDE with PCID 0", to_cr4, 0x206a0, Ok(())),
        ("CR8", to_cr8, 15, Ok(())),
        ("CR8 above 15", to_cr8, 16, GP0),
    ] {
        let mut b = Bench::long();
        b.state(|s| s.gpr[0] = value);
        assert_eq!(b.one(code), expected, "{name}");
    }
    let mut b = Bench::long();
    b.state(|s| (s.cr3, s.gpr[0]) = (rig::TABLES | 5, 0x206a0));
    assert_eq!(b.one(to_cr4), GP0, "PCIDE only from PCID 0");
    b.state(|s| (s.rip, s.gpr[0]) = (CODE, 9));
    b.one(to_cr8).unwrap();
    assert_eq!(b.world.cr8, 9);
    b.one(|a| a.mov(rcx, cr8)).unwrap();
    assert_eq!(b.cpu.state().gpr[1], 9);
    // CR1 and the like do not exist: 0F 20 C8 is MOV EAX, CR1.
    let rip = b.cpu.rip();
    b.write(rip, &[0x0f, 0x20, 0xc8]);
    assert_eq!(b.faults(), (6, None));
    // LMSW sets PE and the three bits above, and never clears PE. SMSW and CLTS.
    let mut b = Bench::long();
    b.state(|s| s.gpr[0] = 0xe);
    b.one(|a| a.lmsw(ax)).unwrap();
    assert_eq!(b.cpu.state().cr0.into_bits(), 0x8001_003f);
    b.one(|a| a.smsw(ebx)).unwrap();
    assert_eq!(b.cpu.state().gpr[3], 0x8001_003f);
    b.one(|a| a.clts()).unwrap();
    assert_eq!(b.cpu.state().cr0.into_bits(), 0x8001_0037);
}

// covers: cpu/control-registers
#[test]
fn debug_registers_keep_their_fixed_bits_and_aliases() {
    let mut b = Bench::long();
    for (name, code, value, expected, number, holds) in [
        ("DR0", (|a| a.mov(dr0, rax)) as Code, u64::MAX, Ok(()), 0, u64::MAX),
        ("DR6", |a| a.mov(dr6, rax), 0xffff_ffff, Ok(()), 6, 0xffff_eeef | 0x110),
        ("DR6 above 31", |a| a.mov(dr6, rax), 1 << 32, GP0, 6, 0xffff_0ff0),
        ("DR7", |a| a.mov(dr7, rax), 0xffff_d0ff, Ok(()), 7, 0xffff_04ff),
        ("DR7 above 31", |a| a.mov(dr7, rax), 1 << 63, GP0, 7, 0x400),
        ("DR4 is DR6", |a| a.mov(dr4, rax), 0, Ok(()), 6, 0xffff_0ff0),
        ("DR5 is DR7", |a| a.mov(dr5, rax), 0, Ok(()), 7, 0x400),
    ] {
        b = Bench::long();
        b.state(|s| s.gpr[0] = value);
        assert_eq!(b.one(code), expected, "{name}");
        let held = b.cpu.state().dr[number];
        assert_eq!(
            held,
            if number == 6 {
                holds & 0xffff_eff0 | holds & 0xf | 0xff0
            } else {
                holds
            },
            "{name}"
        );
    }
    b.state(|s| s.cr4.set_de(true));
    assert_eq!(b.one(|a| a.mov(rax, dr4)), UD, "CR4.DE takes the aliases away");
    // General detection: #DB before the access, with DR6.BD, and off in the handler.
    let mut b = Bench::long();
    b.state(|s| s.dr[7] = 0x2400);
    assert_eq!(b.one(|a| a.mov(rax, dr0)), Err((1, None)));
    let s = b.cpu.state();
    assert_eq!((s.dr[6], s.dr[7]), (0xffff_2ff0, 0x400));
    assert_eq!(
        b.arrived().flags & 0x1_0000,
        0x1_0000,
        "a fault: RF is set in the frame"
    );
}

// covers: cpu/msr
#[test]
fn msrs_of_the_core_check_their_values() {
    let write: Code = |a| a.wrmsr();
    for (name, msr, value, expected) in [
        ("EFER as it is", 0xc000_0080u32, 0xd01u64, Ok(())),
        ("LME off while paging", 0xc000_0080, 0x801, GP0),
        ("LMA is not written", 0xc000_0080, 0x901, Ok(())),
        ("a reserved bit of EFER", 0xc000_0080, 0xd03, GP0),
        ("STAR", 0xc000_0081, u64::MAX, Ok(())),
        ("LSTAR", 0xc000_0082, 0x7fff_ffff_ffff, Ok(())),
        ("LSTAR not canonical", 0xc000_0082, FAR_OUT, GP0),
        ("CSTAR not canonical", 0xc000_0083, FAR_OUT, GP0),
        ("FMASK", 0xc000_0084, 0xffff_ffff, Ok(())),
        ("FMASK above 31", 0xc000_0084, 1 << 32, GP0),
        ("FS base not canonical", 0xc000_0100, FAR_OUT, GP0),
        ("GS base not canonical", 0xc000_0101, FAR_OUT, GP0),
        ("KERNEL_GS base not canonical", 0xc000_0102, FAR_OUT, GP0),
        ("TSC_AUX", 0xc000_0103, 0xffff_ffff, Ok(())),
        ("TSC_AUX above 31", 0xc000_0103, 1 << 32, GP0),
        ("SYSENTER_ESP not canonical", 0x175, FAR_OUT, GP0),
        ("SYSENTER_EIP not canonical", 0x176, FAR_OUT, GP0),
        ("nobody's", 0x1234, 0, GP0),
        ("the bus's", 0x277, 5, Ok(())),
        ("the bus's, refused", 0x277, u64::MAX, GP0),
    ] {
        let mut b = Bench::long();
        b.world.msrs.insert(0x277, 7);
        b.state(|s| (s.gpr[0], s.gpr[1], s.gpr[2]) = (value & 0xffff_ffff, msr as u64, value >> 32));
        assert_eq!(b.one(write), expected, "{name}");
        if expected.is_ok() && msr != 0xc000_0080 {
            b.state(|s| (s.gpr[0], s.gpr[2]) = (u64::MAX, u64::MAX));
            b.one(|a| a.rdmsr()).unwrap();
            let s = b.cpu.state();
            assert_eq!(s.gpr[2] << 32 | s.gpr[0], value, "{name}");
        }
    }
    let mut b = Bench::long();
    b.state(|s| s.gpr[1] = 0x1234);
    assert_eq!(b.one(|a| a.rdmsr()), GP0);
    // An access to the bus's registers ends the run, so that the machine looks at its lines.
    let mut b = Bench::long();
    b.world.msrs.insert(0x277, 7);
    b.state(|s| s.gpr[1] = 0x277);
    b.code(|a| {
        a.wrmsr()?;
        a.nop()
    });
    assert_eq!((b.run(100), b.cpu.rip()), (Exit::Bus, CODE + 2));
}

// covers: cpu/cpuid
#[test]
fn cpuid_comes_from_the_model_and_shows_the_state() {
    for (name, leaf, subleaf, bits, xcr0, register, mask, expected) in [
        ("OSXSAVE off", 1u64, 0u64, 0u64, 1u64, 1usize, 1u64 << 27, 0u64),
        ("OSXSAVE on", 1, 0, 1 << 18, 1, 1, 1 << 27, 1 << 27),
        ("XSAVE area for x87", 0xd, 0, 1 << 18, 1, 3, u64::MAX, 576),
        ("XSAVE area for AVX", 0xd, 0, 1 << 18, 7, 3, u64::MAX, 0x340),
        ("SYSCALL in 64-bit mode", 0x8000_0001, 0, 0, 1, 2, 1 << 11, 1 << 11),
    ] {
        let mut b = Bench::long();
        b.state(|s| {
            s.cr4 = (s.cr4.into_bits() | bits).into();
            s.xcr0 = xcr0;
            (s.gpr[0], s.gpr[1]) = (leaf | 0xffff_ffff << 32, subleaf);
        });
        b.one(|a| a.cpuid()).unwrap();
        assert_eq!(b.cpu.state().gpr[register] & mask, expected, "{name}");
    }
    let mut b = Bench::protected();
    b.state(|s| s.gpr[0] = 0x8000_0001);
    b.one(|a| a.cpuid()).unwrap();
    assert_eq!(b.cpu.state().gpr[2] & 1 << 11, 0, "SYSCALL outside 64-bit mode");
    let mut b = Bench::long_with(&WESTMERE);
    b.state(|s| s.gpr[0] = 1);
    b.one(|a| a.cpuid()).unwrap();
    let s = b.cpu.state();
    assert_eq!(
        [s.gpr[0], s.gpr[3], s.gpr[1], s.gpr[2]],
        WESTMERE.cpuid(1, 0).map(u64::from)
    );
}

// covers: cpu/cpuid
#[test]
fn what_the_model_does_not_show_is_undefined() {
    for (name, code) in [
        ("RDFSBASE", (|a| a.rdfsbase(rax)) as Code),
        ("INVPCID", |a| a.invpcid(rax, xmmword_ptr(STACK))),
        ("RDRAND", |a| a.rdrand(rax)),
        ("RDSEED", |a| a.rdseed(rax)),
        ("XGETBV", |a| a.xgetbv()),
        ("XSETBV", |a| a.xsetbv()),
        ("RDPID", |a| a.rdpid(rax)),
        ("CLFLUSHOPT", |a| a.clflushopt(ptr(STACK))),
    ] {
        let mut b = Bench::long_with(&WESTMERE);
        assert_eq!(b.one(code), UD, "{name}");
    }
    for (name, code) in [
        ("ENDBR64", (|a| a.endbr64()) as Code),
        ("RDSSPQ", |a| a.rdsspq(rax)),
        ("PREFETCHNTA", |a| a.prefetchnta(ptr(rbx))),
        ("PAUSE", |a| a.pause()),
        ("MFENCE", |a| a.mfence()),
        ("CLDEMOTE", |a| a.cldemote(ptr(rbx))),
    ] {
        let mut b = Bench::long_with(&WESTMERE);
        b.state(|s| (s.gpr[0], s.gpr[3]) = (5, FAR_OUT));
        assert_eq!(b.one(code), Ok(()), "{name}");
        assert_eq!(b.cpu.state().gpr[0], 5, "{name}");
    }
    for code in [
        (|a| a.ud2()) as Code,
        |a| a.ud1(eax, ebx),
        |a| a.db(&[0x0f, 0xff, 0xc0]),
    ] {
        assert_eq!(Bench::long().one(code), UD);
    }
}

// covers: cpu/fsgsbase
#[test]
fn fsgsbase_needs_its_bit_and_a_canonical_base() {
    let mut b = Bench::long();
    assert_eq!(b.one(|a| a.rdgsbase(rax)), UD);
    let mut b = Bench::long();
    b.user();
    b.state(|s| {
        s.cr4.set_fsgsbase(true);
        (s.gpr[0], s.gpr[3]) = (0xffff_8000_1234_5678, FAR_OUT);
    });
    b.one(|a| a.wrfsbase(rax)).unwrap();
    b.one(|a| a.wrgsbase(eax)).unwrap();
    b.one(|a| a.rdfsbase(rcx)).unwrap();
    b.one(|a| a.rdfsbase(edx)).unwrap();
    let s = b.cpu.state();
    assert_eq!(
        (s.segments[FS].base, s.segments[GS].base),
        (0xffff_8000_1234_5678, 0x1234_5678)
    );
    assert_eq!((s.gpr[1], s.gpr[2]), (0xffff_8000_1234_5678, 0x1234_5678));
    assert_eq!(b.one(|a| a.wrgsbase(rbx)), GP0);
}

// covers: cpu/msr
#[test]
fn swapgs_exchanges_the_bases() {
    let mut b = Bench::long();
    b.state(|s| {
        s.segments[GS].base = 0x1000;
        s.msrs.kernel_gs_base = 0xffff_8000_0000_0000;
    });
    b.one(|a| a.swapgs()).unwrap();
    let s = b.cpu.state();
    assert_eq!(
        (s.segments[GS].base, s.msrs.kernel_gs_base),
        (0xffff_8000_0000_0000, 0x1000)
    );
    b.put(0x1010, 77);
    b.one(|a| a.swapgs()).unwrap();
    b.one(|a| a.mov(rax, qword_ptr(0x10).gs())).unwrap();
    assert_eq!(b.cpu.state().gpr[0], 77);
}

// covers: cpu/rdrand
#[test]
fn rdrand_and_rdseed_come_from_the_bus() {
    let mut b = Bench::long();
    b.state(|s| (s.rflags, s.gpr[0], s.gpr[3]) = (0x8d6.into(), u64::MAX, u64::MAX));
    b.one(|a| a.rdrand(ax)).unwrap();
    let s = b.cpu.state();
    assert_eq!(
        (s.gpr[0], s.rflags.into_bits()),
        (0xffff_ffff_ffff_cdef, 3),
        "CF set, the other flags clear"
    );
    b.one(|a| a.rdrand(eax)).unwrap();
    b.one(|a| a.rdseed(rbx)).unwrap();
    let s = b.cpu.state();
    assert_eq!((s.gpr[0], s.gpr[3]), (0x89ab_cdef, 0x0123_4567_89ab_cdef));
}

// covers: cpu/clflush
#[test]
fn clflush_checks_its_address_as_a_load() {
    for (name, address, expected) in [
        ("memory", STACK, Ok(())),
        ("not canonical", FAR_OUT, GP0),
        ("not mapped", 1 << 40, Err((14, Some(0)))),
    ] {
        let mut b = Bench::long();
        b.state(|s| s.gpr[3] = address);
        assert_eq!(b.one(|a| a.clflush(ptr(rbx))), expected, "CLFLUSH {name}");
        let mut b = Bench::long();
        b.state(|s| s.gpr[3] = address);
        assert_eq!(b.one(|a| a.clflushopt(ptr(rbx))), expected, "CLFLUSHOPT {name}");
    }
}

// covers: cpu/msr
#[test]
fn the_time_stamp_counter_is_the_bus_s_at_the_instruction() {
    let mut b = Bench::long();
    b.state(|s| s.msrs.tsc_aux = 0x55);
    b.code(|a| {
        a.nop()?;
        a.nop()?;
        a.rdtsc()?;
        a.mov(rsi, rax)?;
        a.rdtscp()?;
        a.rdpid(rdi)
    });
    b.run(6);
    let s = b.cpu.state();
    assert_eq!(
        (s.gpr[6], s.gpr[0], s.gpr[2], s.gpr[1], s.gpr[7]),
        (2, 4, 1, 0x55, 0x55)
    );
    assert_eq!(b.one(|a| a.rdpmc()), GP0, "there are no counters");
}

// covers: cpu/control-registers
#[test]
fn xsetbv_takes_what_leaf_d_offers() {
    let set: Code = |a| a.xsetbv();
    for (name, osxsave, index, value, user, expected) in [
        ("without OSXSAVE", false, 0u64, 1u64, false, UD),
        ("x87", true, 0, 1, false, Ok(())),
        ("SSE", true, 0, 3, false, Ok(())),
        ("AVX", true, 0, 7, false, Ok(())),
        ("AVX without SSE", true, 0, 5, false, GP0),
        ("without x87", true, 0, 2, false, GP0),
        ("what the part lacks", true, 0, 0x1f, false, GP0),
        ("XCR1", true, 1, 1, false, GP0),
        ("in ring 3", true, 0, 1, true, GP0),
    ] {
        let mut b = Bench::long();
        if user {
            b.user();
        }
        b.state(|s| {
            s.cr4 = (s.cr4.into_bits() | ((osxsave as u64) << 18)).into();
            (s.gpr[0], s.gpr[1], s.gpr[2]) = (value, index, 0);
        });
        assert_eq!(b.one(set), expected, "{name}");
        if expected.is_ok() {
            b.state(|s| s.gpr[0] = 0);
            b.one(|a| a.xgetbv()).unwrap();
            assert_eq!(b.cpu.state().gpr[0], value, "{name}");
        }
    }
}

// covers: cpu/exceptions-privileged
#[test]
fn the_io_permission_bitmap_decides_below_iopl() {
    for (name, port, clear, limit, expected) in [
        ("allowed", 0x60u16, 0x60..0x61u16, 0x2067u32, Ok(())),
        ("denied", 0x61, 0x60..0x61, 0x2067, GP0),
        (
            "the last byte that the limit covers",
            0x70,
            0x70..0x71,
            0x68 + 0xe + 1,
            Ok(()),
        ),
        (
            "the byte after it is beyond the limit",
            0x70,
            0x70..0x71,
            0x68 + 0xe,
            GP0,
        ),
        ("no room for a bitmap", 0x60, 0x60..0x61, 0x67, GP0),
    ] {
        let mut b = Bench::long();
        b.write(TSS + 0x66, &0x68u16.to_le_bytes());
        let mut map = [0xffu8; 64];
        for p in clear {
            map[p as usize / 8] &= !(1 << (p % 8));
        }
        b.write(TSS + 0x68, &map);
        b.user();
        b.state(|s| {
            s.tr.limit = limit;
            s.gpr[2] = port as u64;
        });
        assert_eq!(b.one(|a| a.out(dx, al)), expected, "{name}");
        assert_eq!(b.world.out.len(), expected.is_ok() as usize, "{name}");
    }
    // All bits of a wide access are looked at, across a byte of the map.
    let mut b = Bench::long();
    b.write(TSS + 0x66, &0x68u16.to_le_bytes());
    b.write(TSS + 0x68, &[0xff, 0x3f, 0xfe]);
    b.user();
    b.state(|s| (s.tr.limit, s.gpr[2]) = (0x168, 14));
    assert_eq!(b.one(|a| a.out(dx, ax)), Ok(()));
    b.state(|s| s.gpr[2] = 14);
    assert_eq!(b.one(|a| a.out(dx, eax)), GP0);
}

// covers: cpu/int-string
#[test]
fn ins_and_outs_move_one_element_a_step() {
    let mut b = Bench::long();
    b.write(STACK, b"abcdef");
    b.state(|s| (s.gpr[1], s.gpr[2], s.gpr[6], s.gpr[7]) = (3, 0x3f8, STACK, STACK + 0x100));
    b.code(|a| {
        a.rep().outsb()?;
        a.mov(ecx, 2)?;
        a.rep().insd()?;
        a.hlt()
    });
    let mut steps = Vec::new();
    loop {
        let exit = b.run(100);
        let s = b.cpu.state();
        steps.push((s.rip - CODE, s.gpr[1], s.steps, s.iterations));
        if exit == Exit::Halt {
            break;
        }
        assert_eq!(exit, Exit::Bus);
    }
    assert_eq!(
        steps,
        [
            (0, 2, 1, 1),
            (0, 1, 2, 2),
            (2, 0, 3, 2),
            (7, 1, 5, 3),
            (9, 0, 6, 3),
            (10, 0, 7, 3)
        ]
    );
    assert_eq!(b.world.out, [(0x3f8, 1, 0x61), (0x3f8, 1, 0x62), (0x3f8, 1, 0x63)]);
    assert_eq!(
        b.read::<8>(STACK + 0x100),
        [0x11, 0x22, 0x33, 0x44, 0x12, 0x22, 0x33, 0x44]
    );
    assert_eq!(b.cpu.state().gpr[7], STACK + 0x108);
    // A count of 0 does nothing, and a fault comes before the port is read.
    let mut b = Bench::long();
    b.state(|s| (s.gpr[1], s.gpr[7]) = (0, FAR_OUT));
    assert_eq!(b.one(|a| a.rep().insb()), Ok(()));
    b.state(|s| s.gpr[1] = 1);
    assert_eq!(b.one(|a| a.rep().insb()), GP0);
    assert!(b.world.input.is_empty());
    // Backwards.
    let mut b = Bench::long();
    b.write(STACK, &[1, 2, 3, 4]);
    b.state(|s| (s.gpr[6], s.gpr[2], s.rflags) = (STACK + 2, 0x80, 0x402.into()));
    b.one(|a| a.outsw()).unwrap();
    assert_eq!(
        (b.cpu.state().gpr[6], b.world.out.clone()),
        (STACK, vec![(0x80, 2, 0x403)])
    );
}

// covers: cpu/exceptions
#[test]
fn bound_and_into_ask_their_operands() {
    for (value, expected) in [
        (0u64, Ok(())),
        (9, Ok(())),
        (10, Err((5, None))),
        (0xffff_ffff, Err((5, None))),
    ] {
        let mut b = Bench::protected();
        b.write(STACK, &[0, 0, 0, 0, 9, 0, 0, 0]);
        b.state(|s| s.gpr[0] = value);
        assert_eq!(b.one(|a| a.bound(eax, qword_ptr(STACK as u32))), expected, "{value:x}");
    }
    let mut b = Bench::protected();
    b.code(|a| a.into());
    assert_eq!((b.run(1), b.cpu.rip()), (Exit::Budget, CODE + 1));
    b.state(|s| (s.rip, s.rflags) = (CODE, 0x802.into()));
    let t = b.trap();
    assert_eq!(
        (t.vector, t.rip),
        (4, CODE + 1),
        "a trap: the frame holds the next instruction"
    );
}

// covers: cpu/int-flags
#[test]
fn popf_changes_what_the_privilege_level_may() {
    // SDM Vol. 2B Table 4-16. The image has every bit set but TF; the flags begin with the given IOPL.
    for (cpl, iopl, expected) in [(0u64, 0u64, 0x24_7ed7u64), (3, 3, 0x24_7ed7), (3, 0, 0x24_4cd7)] {
        let mut b = Bench::long();
        if cpl == 3 {
            b.user();
        }
        b.put(STACK - 8, 0xffff_ffff & !0x100);
        b.state(|s| (s.rflags, s.gpr[4]) = ((2 | iopl << 12).into(), STACK - 8));
        b.one(|a| a.popfq()).unwrap();
        assert_eq!(b.cpu.state().rflags.into_bits(), expected, "CPL {cpl}, IOPL {iopl}");
        b.one(|a| a.pushfq()).unwrap();
        assert_eq!(u64::from_le_bytes(b.read(STACK - 8)), expected);
    }
    let mut b = Bench::long();
    b.write(STACK - 8, &[0xff, 0xfe]);
    b.state(|s| (s.rflags, s.gpr[4]) = (0x24_0002.into(), STACK - 8));
    b.one(|a| a.popf()).unwrap();
    assert_eq!(
        (b.cpu.state().rflags.into_bits(), b.cpu.state().gpr[4]),
        (0x24_7ed7, STACK - 6),
        "16 bits leave the upper ones"
    );
}

// covers: cpu/int-flags
#[test]
fn flag_instructions_change_their_flag() {
    for (name, code, before, after) in [
        ("CLC", (|a| a.clc()) as Code, 0x8d7u64, 0x8d6u64),
        ("STC", |a| a.stc(), 2, 3),
        ("CMC", |a| a.cmc(), 3, 2),
        ("CLD", |a| a.cld(), 0x402, 2),
        ("STD", |a| a.std(), 2, 0x402),
        ("CLI", |a| a.cli(), 0x202, 2),
        ("STI", |a| a.sti(), 2, 0x202),
        ("SAHF", |a| a.sahf(), 0x802, 0x8d7),
    ] {
        let mut b = Bench::long();
        b.state(|s| (s.rflags, s.gpr[0]) = (before.into(), 0xff00));
        b.one(code).unwrap();
        assert_eq!(b.cpu.state().rflags.into_bits(), after, "{name}");
    }
    let mut b = Bench::long();
    b.state(|s| s.rflags = 0x8d7.into());
    b.one(|a| a.lahf()).unwrap();
    assert_eq!(b.cpu.state().gpr[0], 0xd700);
}

// covers: cpu/hlt
#[test]
fn hlt_waits_for_an_interrupt_and_goes_on_after_it() {
    let mut b = Bench::long();
    b.at(handler(0x40), |a| a.iretq());
    b.code(|a| {
        a.sti()?;
        a.hlt()?;
        a.inc(eax)
    });
    assert_eq!(b.run(100), Exit::Halt);
    assert_eq!((b.cpu.rip(), b.cpu.steps()), (CODE + 2, 2));
    assert!(b.cpu.interruptible());
    assert_eq!(b.run(100), Exit::Halt, "it stays there");
    assert_eq!(b.cpu.steps(), 2);
    b.interrupt(0x40);
    assert_eq!(b.run(2), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.gpr[0], s.rip), (1, CODE + 4));
    assert_eq!(b.read::<1>(GDT + KCODE as u64 + 5), [0x9b]);
}
