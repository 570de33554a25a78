//! VMX operation: what a VMM of a few instructions and its guest meet. What is expected comes from SDM Vol. 3C chapters 26 to 28 and 31.

use crate::{rig, vmm};
use engine::{Activity, Exit, Vectors};
use iced_x86::code_asm::*;
use rig::{CODE, Rig, TABLES};
use vmm::{
    BITMAPS, Code, DATA, ENTRY, EPT, EXIT, ExitFields, GDT, GUEST, GUEST_STACK, HANDLERS, IDT, LIST, PIN, Vmm,
    assembled,
};
use x86::model::WESTMERE;
use x86::vmx::fields::Field;

// covers: vmx/exits, vmx/vmread-vmwrite
#[test]
fn instructions_cause_the_exits_that_the_controls_ask_for() {
    // Bits of the primary and secondary controls; the guest; reason, qualification, length, where.
    #[rustfmt::skip]
    let rows: [(&str, u64, u64, Code, ExitFields); 27] = [
        ("CPUID", 0, 0, |a| a.cpuid(), (10, 0, 2, 0)),
        ("HLT", 1 << 7, 0, |a| { a.nop()?; a.hlt() }, (12, 0, 1, 1)),
        ("INVD", 0, 0, |a| a.invd(), (13, 0, 2, 0)),
        ("INVLPG", 1 << 9, 0, |a| { a.mov(ecx, 0x1234)?; a.invlpg(ptr(rcx)) }, (14, 0x1234, 3, 5)),
        ("RDPMC", 1 << 11, 0, |a| a.rdpmc(), (15, 0, 2, 0)),
        ("RDTSC", 1 << 12, 0, |a| a.rdtsc(), (16, 0, 2, 0)),
        ("VMCALL", 0, 0, |a| a.vmcall(), (18, 0, 3, 0)),
        ("VMCLEAR", 0, 0, |a| a.vmclear(qword_ptr(rax + 0x40)), (19, 0x40, 5, 0)),
        ("VMLAUNCH", 0, 0, |a| a.vmlaunch(), (20, 0, 3, 0)),
        ("VMPTRST", 0, 0, |a| a.vmptrst(qword_ptr(rbx)), (22, 0, 3, 0)),
        ("VMREAD", 0, 0, |a| a.vmread(rax, rbx), (23, 0, 3, 0)),
        ("VMXOFF", 0, 0, |a| a.vmxoff(), (26, 0, 3, 0)),
        ("MOV to CR3", 1 << 15, 0, |a| a.mov(cr3, rdx), (28, 0x203, 3, 0)),
        ("MOV from CR3", 1 << 16, 0, |a| a.mov(r9, cr3), (28, 0x913, 4, 0)),
        ("MOV to CR8", 1 << 19, 0, |a| a.mov(cr8, rax), (28, 0x8, 4, 0)),
        ("MOV from DR7", 1 << 23, 0, |a| a.mov(rdx, dr7), (29, 0x217, 3, 0)),
        ("OUT imm8", 1 << 24, 0, |a| a.out(0x80, eax), (30, 0x80_0043, 2, 0)),
        ("IN DX", 1 << 24, 0, |a| { a.mov(edx, 0x3f8)?; a.in_(al, dx) }, (30, 0x3f8_0008, 1, 5)),
        ("RDMSR", 0, 0, |a| a.rdmsr(), (31, 0, 2, 0)),
        ("WRMSR", 0, 0, |a| a.wrmsr(), (32, 0, 2, 0)),
        ("MWAIT", 1 << 10, 0, |a| { a.xor(ecx, ecx)?; a.mwait() }, (36, 0, 3, 2)),
        ("MONITOR", 1 << 29, 0, |a| { a.xor(ecx, ecx)?; a.monitor() }, (39, 0, 3, 2)),
        ("PAUSE", 1 << 30, 0, |a| a.pause(), (40, 0, 2, 0)),
        ("LIDT", 0, 1 << 2, |a| a.lidt(ptr(rbx + 8)), (46, 8, 4, 0)),
        ("STR", 0, 1 << 2, |a| a.str(eax), (47, 0, 3, 0)),
        ("RDTSCP", 1 << 12, 1 << 3, |a| a.rdtscp(), (51, 0, 3, 0)),
        ("WBINVD", 0, 1 << 6, |a| a.wbinvd(), (54, 0, 2, 0)),
    ];
    for (name, primary, secondary, guest, expected) in rows {
        let mut vmm = Vmm::new(guest);
        vmm.primary(primary);
        if secondary != 0 {
            vmm.secondary(secondary);
        }
        assert_eq!(vmm.exit(), expected, "{name}: reason, qualification, length, where");
        // SDM Vol. 3C 28.5 "Loading Host State".
        let state = vmm.rig.cpu.state();
        assert_eq!(
            (state.segments[4].base, state.rflags.into_bits() & 0x200),
            (0x1_0000, 0),
            "{name}"
        );
    }
}

/// SDM Vol. 3C 24.8 "Restrictions on VMX Operation", 26.2 "Other Causes of VM Exits".
// covers: vmx/init
#[test]
fn init_waits_in_root_operation_and_is_an_exit_of_the_guest() {
    let init = |vmm: &mut Vmm| vmm.rig.engine.init(&mut vmm.rig.cpu, &mut vmm.platform, false);
    // In the guest: a VM exit, and nothing of INIT.
    let mut vmm = Vmm::new(|a| {
        a.mov(ebx, 5)?;
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.jmp(here)
    });
    let reads = [Field::EXIT_REASON, Field::EXIT_QUALIFICATION, Field::GUEST_RIP];
    vmm.table(&reads);
    while vmm.rig.cpu.rip() != GUEST + 5 {
        vmm.step(1);
    }
    assert!(!init(&mut vmm));
    let read = vmm.go_on(3).unwrap();
    assert_eq!(read, [3, 0, GUEST + 5]);
    assert_eq!(vmm.rig.cpu.state().gpr[3], 5, "registers stay");
    // In the VMM: it waits for the VM entry, and is an exit before the guest's first instruction.
    let mut state = vmm.rig.cpu.state();
    state.activity = Activity::Running;
    state.gpr[3] = 6;
    vmm.rig.cpu.set_state(&state);
    assert!(!init(&mut vmm));
    assert!(vmm.rig.cpu.init_blocked() && !vmm.rig.cpu.init_due());
    while !vmm.rig.cpu.init_due() {
        vmm.step(1);
    }
    assert_eq!(vmm.rig.cpu.rip(), GUEST + 5);
    assert!(!init(&mut vmm));
    assert_eq!(vmm.go_on(3).unwrap(), [3, 0, GUEST + 5]);
    // Or for VMXOFF.
    let mut state = vmm.rig.cpu.state();
    state.activity = Activity::Running;
    state.rip = GUEST + 0x800;
    vmm.rig.write(
        GUEST + 0x800,
        &assembled(64, GUEST + 0x800, |a| {
            a.vmxoff()?;
            a.nop()
        }),
    );
    vmm.rig.cpu.set_state(&state);
    assert!(!init(&mut vmm));
    assert_eq!(vmm.step(10), Exit::Bus, "right behind VMXOFF");
    assert!(vmm.rig.cpu.init_due());
    assert!(init(&mut vmm));
    assert_eq!(vmm.rig.cpu.activity(), Activity::WaitForSipi);
}

// covers: vmx/no-exits
#[test]
fn without_the_controls_the_guest_executes_them_itself() {
    let mut vmm = Vmm::new(|a| {
        a.rdtsc()?;
        a.mov(rcx, cr3)?;
        a.mov(cr3, rcx)?;
        a.mov(rdx, dr7)?;
        a.out(0x80, al)?;
        a.invlpg(ptr(rcx))?;
        a.pause()?;
        a.mov(r8, cr8)?;
        a.vmcall()
    });
    assert_eq!(vmm.exit().0, 18);
    let state = vmm.rig.cpu.state();
    assert_eq!((state.gpr[8], vmm.platform.ports.len()), (3, 1));
    // RDTSCP is there if "enable RDTSCP" says so.
    let mut vmm = Vmm::new(|a| a.rdtscp());
    vmm.set(&[(Field::EXCEPTION_BITMAP, 1 << 6)]);
    assert_eq!(vmm.exit(), (0, 0, 0, 0));
}

// covers: vmx/entry-instruction-errors
#[test]
fn entries_that_fail_as_instructions_say_why() {
    const ZF: u64 = 0x40;
    for (why, fields, error) in [
        ("a reserved control", (Field::PIN_CONTROLS, 0), 7),
        ("a host TR that is null", (Field::HOST_TR, 0), 8),
        ("a VMWRITE to what the part has not got", (Field::TSC_MULTIPLIER, 1), 12),
        ("a VMWRITE to exit information", (Field::EXIT_REASON, 1), 13),
    ] {
        let mut vmm = Vmm::new(|a| a.vmcall());
        vmm.set(&[fields]);
        assert_eq!(vmm.run(&[]), Err((ZF, error)), "{why}");
    }
}

// covers: vmx/launch-state, vmx/entry-instruction-errors
#[test]
fn a_vmcs_is_launched_once_and_resumed_after_that() {
    let mut vmm = Vmm::new(|a| {
        a.vmcall()?;
        a.mov(ebx, 5)?;
        a.vmcall()
    });
    assert_eq!(vmm.exit().3, 0);
    // The VMM's HLT ends; it executes VMRESUME with RIP where it was: the same VMCALL again.
    let mut state = vmm.rig.cpu.state();
    state.activity = Activity::Running;
    vmm.rig.cpu.set_state(&state);
    assert_eq!(vmm.go_on(4).unwrap()[3], GUEST);
    // VMLAUNCH of a launched VMCS fails with 4.
    let mut state = vmm.rig.cpu.state();
    state.activity = Activity::Running;
    state.rip = GUEST + 0x800;
    vmm.rig.write(
        GUEST + 0x800,
        &assembled(64, GUEST + 0x800, |a| {
            a.vmlaunch()?;
            a.mov(ecx, 0x4400)?;
            a.vmread(rdx, rcx)?;
            a.hlt()
        }),
    );
    vmm.rig.cpu.set_state(&state);
    while vmm.step(1000) != Exit::Halt {}
    assert_eq!(vmm.rig.cpu.state().gpr[2], 4);
}

// covers: vmx/entry-failure
#[test]
fn invalid_guest_state_fails_the_entry_with_its_qualification() {
    for (field, value, reason, qualification) in [
        (Field::GUEST_RFLAGS, 0, 0x8000_0021, 0),
        (Field::LINK_POINTER, 0x8000, 0x8000_0021, 4),
        (Field::ENTRY_MSR_LOAD_COUNT, 2, 0x8000_0022, 2),
    ] {
        let mut vmm = Vmm::new(|a| a.vmcall());
        // The first entry loads IA32_STAR, the second a register that a list must not load.
        vmm.rig.write(LIST, &0xc000_0081u64.to_le_bytes());
        vmm.rig.write(LIST + 8, &7u64.to_le_bytes());
        vmm.rig.write(LIST + 16, &0xc000_0100u64.to_le_bytes());
        vmm.set(&[(Field::ENTRY_MSR_LOAD, LIST), (field, value)]);
        let exit = vmm.exit();
        assert_eq!((exit.0, exit.1), (reason, qualification), "{field:x?}");
    }
}

// covers: vmx/cr-shadows
#[test]
fn bits_of_cr0_and_cr4_that_the_vmm_owns_are_shadowed() {
    let mut vmm = Vmm::new(|a| {
        a.mov(rax, cr0)?;
        a.mov(rbx, cr4)?;
        // TS is the VMM's and 1 in the shadow; MP is the guest's.
        a.xor(rax, 2)?;
        a.mov(cr0, rax)?;
        a.clts()
    });
    let begins = vmm.value(Field::GUEST_CR0);
    vmm.set(&[
        (Field::CR0_MASK, 8),
        (Field::CR0_SHADOW, 8),
        (Field::CR4_MASK, 1 << 13),
        (Field::CR4_SHADOW, 0),
    ]);
    let v = vmm
        .run(&[Field::EXIT_REASON, Field::EXIT_QUALIFICATION, Field::GUEST_CR0])
        .unwrap();
    assert_eq!(v, [28, 0x20, begins ^ 2], "CLTS exits, MOV to CR0 did not");
    let state = vmm.rig.cpu.state();
    assert_eq!(state.gpr[0], begins ^ 2 | 8);
    assert_eq!(state.gpr[3] >> 13 & 1, 0, "VMXE is hidden");
}

// covers: vmx/msr-bitmaps, vmx/io-bitmaps
#[test]
fn bitmaps_choose_among_msrs_and_ports() {
    let guest: Code = |a| {
        a.mov(ecx, 0xc000_0082u32)?;
        a.rdmsr()?;
        a.mov(ecx, 0x174)?;
        a.rdmsr()?;
        a.in_(al, 0x61)?;
        a.wrmsr()?;
        a.vmcall()
    };
    for (bit, reason) in [
        (None, 18),
        (Some(0x400 * 8 + 0x82), 31),
        (Some(0x174), 31),
        (Some(0x800 * 8 + 0x174), 32),
        (Some(0x1000 * 8 + 0x61), 30),
    ] {
        let mut vmm = Vmm::new(guest);
        vmm.primary(1 << 25 | 1 << 28);
        vmm.set(&[
            (Field::MSR_BITMAP, BITMAPS),
            (Field::IO_BITMAP_A, BITMAPS + 0x1000),
            (Field::IO_BITMAP_B, BITMAPS + 0x2000),
        ]);
        if let Some(bit) = bit {
            vmm.rig.write(BITMAPS + bit / 8, &[1 << (bit & 7)]);
        }
        assert_eq!(vmm.exit().0, reason, "{bit:?}");
    }
}

// covers: vmx/exceptions
#[test]
fn exceptions_exit_by_bitmap_and_page_faults_by_their_code_too() {
    let reads = [
        Field::EXIT_REASON,
        Field::EXIT_INTERRUPTION,
        Field::EXIT_ERROR_CODE,
        Field::EXIT_QUALIFICATION,
        Field::EXIT_INSTRUCTION_LENGTH,
    ];
    let mut vmm = Vmm::new(|a| a.ud2());
    vmm.set(&[(Field::EXCEPTION_BITMAP, 1 << 6)]);
    assert_eq!(vmm.run(&reads).unwrap()[..2], [0, 0x8000_0306]);
    let mut vmm = Vmm::new(|a| a.int3());
    vmm.set(&[(Field::EXCEPTION_BITMAP, 1 << 3)]);
    assert_eq!(vmm.run(&reads).unwrap(), [0, 0x8000_0603, 0, 0, 1]);
    // A read of what is not mapped: error code 0. The bit, with mask and match that fit, and with such as do not.
    let far = 0x4000_0000u64;
    let touch: Code = |a| {
        a.mov(rax, 0x4000_0000u64)?;
        a.mov(rax, qword_ptr(rax))?;
        a.vmcall()
    };
    for (bitmap, mask, matched, exits) in [(1, 0, 0, true), (1, 2, 2, false), (0, 2, 2, true), (0, 0, 0, false)] {
        let mut vmm = Vmm::new(touch);
        vmm.handler(14, |a| a.vmcall());
        vmm.set(&[
            (Field::EXCEPTION_BITMAP, bitmap << 14),
            (Field::PAGE_FAULT_MASK, mask),
            (Field::PAGE_FAULT_MATCH, matched),
        ]);
        let v = vmm.run(&reads).unwrap();
        if exits {
            assert_eq!(v[..4], [0, 0x8000_0b0e, 0, far]);
            assert_eq!(vmm.rig.cpu.state().cr2, 0, "CR2 stays as it was");
        } else {
            assert_eq!(v[0], 18);
            assert_eq!(vmm.rig.cpu.state().cr2, far);
        }
    }
}

// covers: vmx/triple-fault
#[test]
fn a_triple_fault_of_the_guest_is_an_exit() {
    let mut vmm = Vmm::new(|a| a.ud2());
    vmm.set(&[(Field::GUEST_IDTR_LIMIT, 0)]);
    assert_eq!(vmm.exit(), (2, 0, 0, 0));
}

// covers: vmx/injection
#[test]
fn an_event_is_injected_before_the_first_instruction() {
    for (information, error, length, pushed, why) in [
        (0x8000_0020u64, 0, 0, GUEST, "an external interrupt"),
        (0x8000_0b0d, 0x18, 0, GUEST, "#GP with its error code"),
        (
            0x8000_0430,
            0,
            2,
            GUEST + 2,
            "INT 30H: the frame has the next instruction",
        ),
    ] {
        let mut vmm = Vmm::new(|a| a.hlt());
        let vector = information & 0xff;
        vmm.handler(vector, |a| a.vmcall());
        vmm.set(&[
            (Field::ENTRY_INTERRUPTION, information),
            (Field::ENTRY_ERROR_CODE, error),
            (Field::ENTRY_INSTRUCTION_LENGTH, length),
            (Field::GUEST_RFLAGS, 0x202),
            // Neither bitmap nor external-interrupt exiting has a say.
            (Field::EXCEPTION_BITMAP, 0xffff_ffff),
            (Field::PIN_CONTROLS, PIN | 1),
        ]);
        let v = vmm
            .run(&[
                Field::EXIT_REASON,
                Field::GUEST_RIP,
                Field::GUEST_RSP,
                Field::ENTRY_INTERRUPTION,
            ])
            .unwrap();
        assert_eq!(v[..2], [18, HANDLERS + 16 * vector], "{why}");
        let error_code = information >> 11 & 1;
        let frame = GUEST_STACK - 40 - 8 * error_code;
        assert_eq!(v[2], frame, "{why}");
        let rip = u64::from_le_bytes(vmm.rig.read::<8>(frame + 8 * error_code));
        assert_eq!(rip, pushed, "{why}");
        assert_eq!(v[3] >> 31, 0, "the information is no longer valid");
    }
}

// covers: vmx/external-interrupts
#[test]
fn external_interrupts_exit_whatever_if_says() {
    for (exit_controls, information) in [(EXIT, 0), (EXIT | 1 << 15, 0x8000_0031)] {
        let mut vmm = Vmm::new(|a| {
            let mut here = a.create_label();
            a.set_label(&mut here)?;
            a.inc(rax)?;
            a.jmp(here)
        });
        vmm.set(&[(Field::PIN_CONTROLS, PIN | 1), (Field::EXIT_CONTROLS, exit_controls)]);
        vmm.table(&[Field::EXIT_REASON, Field::EXIT_INTERRUPTION]);
        vmm.step(2000);
        assert!(
            vmm.rig.cpu.interruptible(),
            "IF is clear, and it is the VMM's interrupt"
        );
        assert_eq!(vmm.rig.cpu.exits_unacknowledged(), exit_controls == EXIT);
        if exit_controls == EXIT {
            vmm.rig.engine.interrupt_exit(&mut vmm.rig.cpu, &mut vmm.platform);
        } else {
            vmm.rig.engine.interrupt(&mut vmm.rig.cpu, &mut vmm.platform, 0x31);
        }
        assert_eq!(vmm.go_on(2).unwrap(), [1, information]);
    }
}

// covers: vmx/interrupt-window
#[test]
fn the_interrupt_window_opens_after_the_shadow_of_sti() {
    let mut vmm = Vmm::new(|a| {
        a.nop()?;
        a.sti()?;
        a.nop()?;
        a.nop()
    });
    vmm.primary(1 << 2);
    assert_eq!(vmm.exit(), (7, 0, 0, 3), "STI, and one instruction");
}

// covers: vmx/ept
#[test]
fn ept_violations_and_misconfigurations_say_what_was_accessed() {
    let read: Code = |a| {
        a.mov(ecx, DATA as u32 + 8)?;
        a.mov(rax, qword_ptr(rcx))?;
        a.vmcall()
    };
    let write: Code = |a| {
        a.mov(ecx, DATA as u32 + 8)?;
        a.mov(qword_ptr(rcx), rax)?;
        a.vmcall()
    };
    let fetch: Code = |a| {
        a.mov(ecx, DATA as u32 + 8)?;
        a.jmp(rcx)
    };
    let at = DATA | 6 << 3;
    // Qualification: access, rights at 5:3, linear address valid (7), to the page itself (8).
    for (guest, entry, reason, qualification, why) in [
        (read, at | 7, 18, 0, "allowed"),
        (read, 0, 48, 0x181, "a read of what is not there"),
        (read, at | 4, 48, 0x1a1, "a read where there is execute alone"),
        (write, at | 5, 48, 0x1aa, "a write where there is read and execute"),
        (fetch, at | 3, 48, 0x19c, "a fetch where there is read and write"),
        (write, at | 2, 49, 0, "write without read"),
        (read, DATA | 2 << 3 | 7, 49, 0, "memory type 2"),
    ] {
        let mut vmm = Vmm::new(guest);
        vmm.ept(&[(DATA, entry)]);
        let v = vmm
            .run(&[
                Field::EXIT_REASON,
                Field::EXIT_QUALIFICATION,
                Field::GUEST_PHYSICAL_ADDRESS,
                Field::GUEST_LINEAR_ADDRESS,
            ])
            .unwrap();
        assert_eq!((v[0], v[1]), (reason, qualification), "{why}");
        if reason != 18 {
            assert_eq!(v[2], DATA + 8, "{why}");
        }
        if reason == 48 {
            assert_eq!(v[3], DATA + 8, "{why}");
        }
    }
}

// covers: vmx/ept-tables
#[test]
fn the_guests_page_tables_are_guest_physical_too() {
    let guest: Code = |a| {
        a.mov(rax, qword_ptr(DATA as u32))?;
        a.vmcall()
    };
    // Another page stands where the guest's data is.
    let mut vmm = Vmm::new(guest);
    vmm.rig.write(LIST, &0x1234_5678u64.to_le_bytes());
    vmm.ept(&[(DATA, LIST | 6 << 3 | 7)]);
    assert_eq!(vmm.exit().0, 18);
    assert_eq!(vmm.rig.cpu.state().gpr[0], 0x1234_5678);
    // The page table is gone: the violation is of a read, of an entry, and has the linear address that was translated.
    let mut vmm = Vmm::new(guest);
    vmm.ept(&[(TABLES + 0x1000, 0)]);
    let v = vmm
        .run(&[
            Field::EXIT_REASON,
            Field::EXIT_QUALIFICATION,
            Field::GUEST_PHYSICAL_ADDRESS,
        ])
        .unwrap();
    assert_eq!(v, [48, 0x81, TABLES + 0x1000]);
}

// covers: vmx/idt-vectoring
#[test]
fn an_exit_during_delivery_tells_of_the_event() {
    let mut vmm = Vmm::new(|a| {
        a.nop()?;
        a.int(0x30)
    });
    vmm.handler(0x30, |a| a.vmcall());
    vmm.ept(&[(GUEST_STACK - 0x1000, 0)]);
    let v = vmm
        .run(&[
            Field::EXIT_REASON,
            Field::IDT_VECTORING,
            Field::EXIT_INSTRUCTION_LENGTH,
            Field::GUEST_RIP,
            Field::GUEST_RSP,
        ])
        .unwrap();
    assert_eq!(v, [48, 0x8000_0430, 2, GUEST + 1, GUEST_STACK]);
}

// covers: vmx/unrestricted
#[test]
fn an_unrestricted_guest_runs_in_real_address_mode() {
    let mut vmm = Vmm::new(|a| a.nop());
    let code = assembled(16, 0x10, |a| {
        a.mov(ax, 0x1000)?;
        a.mov(ds, ax)?;
        a.mov(bl, byte_ptr(0x20))?;
        a.mov(eax, cr0)?;
        a.hlt()
    });
    vmm.rig.write(0x1_0020, &[0x5a]);
    vmm.real_mode(&code);
    vmm.primary(1 << 7);
    let v = vmm
        .run(&[
            Field::EXIT_REASON,
            Field::GUEST_RIP,
            Field::GUEST_DS_BASE,
            Field::GUEST_CS_RIGHTS,
            Field::ENTRY_CONTROLS,
        ])
        .unwrap();
    assert_eq!(v, [12, 0x10 + code.len() as u64 - 1, 0x1_0000, 0x9b, ENTRY & !(1 << 9)]);
    let state = vmm.rig.cpu.state();
    assert_eq!((state.gpr[3] & 0xff, state.gpr[0] & 0x8000_0031), (0x5a, 0x30));
}

// covers: vmx/tsc-offset
#[test]
fn the_guests_time_stamp_counter_is_offset() {
    let mut vmm = Vmm::new(|a| {
        a.rdtsc()?;
        a.vmcall()
    });
    vmm.primary(1 << 3);
    vmm.set(&[(Field::TSC_OFFSET, 0x55_0000_0000)]);
    assert_eq!(vmm.exit().0, 18);
    let state = vmm.rig.cpu.state();
    assert_eq!(state.gpr[2], 0x55);
}

// covers: vmx/invalidation
#[test]
fn invept_and_invvpid_check_their_operands() {
    // Type, descriptor; VM-instruction error, 0 for success. SDM Vol. 3C 31.3 "INVEPT", "INVVPID".
    for (vpid, kind, low, high, error) in [
        (false, 1u64, EPT | 0x1e, 0u64, 0),
        (false, 2, 0, 0, 0),
        (false, 1, EPT | 0x1f, 0, 28),
        (false, 3, 0, 0, 28),
        (true, 0, 5, 0x1234, 0),
        (true, 0, 5, 1 << 60, 28),
        (true, 1, 0, 0, 28),
        (true, 2, 0, 0, 0),
        (true, 2, 1 << 16, 0, 28),
        (true, 3, 7, 0, 0),
        (true, 4, 7, 0, 28),
    ] {
        let mut vmm = Vmm::new(|a| a.vmcall());
        vmm.exit();
        vmm.rig.write(LIST, &low.to_le_bytes());
        vmm.rig.write(LIST + 8, &high.to_le_bytes());
        let code = assembled(64, CODE, |a| {
            a.mov(ebx, LIST as u32)?;
            a.mov(eax, kind as u32)?;
            if vpid {
                a.invvpid(rax, ptr(rbx))?;
            } else {
                a.invept(rax, ptr(rbx))?;
            }
            a.pushfq()?;
            a.pop(rdi)?;
            a.mov(ecx, 0x4400)?;
            a.vmread(rdx, rcx)?;
            a.hlt()
        });
        vmm.rig.write(CODE, &code);
        let mut state = vmm.rig.cpu.state();
        (state.activity, state.rip) = (Activity::Running, CODE);
        vmm.rig.cpu.set_state(&state);
        while vmm.step(1000) != Exit::Halt {}
        let state = vmm.rig.cpu.state();
        let flags = state.gpr[7] & 0x41;
        assert_eq!(
            (flags, if flags == 0 { 0 } else { state.gpr[2] }),
            (if error == 0 { 0 } else { 0x40 }, error)
        );
    }
}

// covers: vmx/nmis
#[test]
fn nmis_exit_and_virtual_ones_open_a_window() {
    // NMI exiting: the exit blocks NMIs for the VMM.
    let mut vmm = Vmm::new(|a| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.jmp(here)
    });
    vmm.set(&[(Field::PIN_CONTROLS, PIN | 8)]);
    vmm.table(&[Field::EXIT_REASON, Field::EXIT_INTERRUPTION]);
    vmm.step(2000);
    assert!(vmm.rig.cpu.nmi_deliverable());
    vmm.rig.engine.nmi(&mut vmm.rig.cpu, &mut vmm.platform);
    assert!(vmm.rig.cpu.nmi_blocked());
    assert_eq!(vmm.go_on(2).unwrap(), [0, 0x8000_0202]);
    // An injected virtual NMI blocks virtual ones until IRET; then the window is open.
    let mut vmm = Vmm::new(|a| {
        a.nop()?;
        a.nop()
    });
    vmm.handler(2, |a| {
        a.nop()?;
        a.iretq()
    });
    vmm.primary(1 << 22);
    vmm.set(&[
        (Field::PIN_CONTROLS, PIN | 8 | 32),
        (Field::ENTRY_INTERRUPTION, 0x8000_0202),
    ]);
    let v = vmm
        .run(&[Field::EXIT_REASON, Field::GUEST_RIP, Field::GUEST_INTERRUPTIBILITY])
        .unwrap();
    assert_eq!(v, [8, GUEST, 0]);
}

// covers: vmx/tpr-shadow
#[test]
fn the_virtual_tpr_is_in_the_virtual_apic_page_and_has_a_threshold() {
    let mut vmm = Vmm::new(|a| {
        a.mov(r8d, 5)?;
        a.mov(cr8, r8)?;
        a.mov(rbx, cr8)?;
        a.mov(r8d, 2)?;
        a.mov(cr8, r8)?;
        a.nop()
    });
    vmm.primary(1 << 21);
    vmm.set(&[(Field::VIRTUAL_APIC, BITMAPS), (Field::TPR_THRESHOLD, 3)]);
    vmm.rig.write(BITMAPS + 0x80, &[0x70]);
    assert_eq!(vmm.exit().0, 43);
    assert_eq!(vmm.rig.cpu.state().gpr[3], 5);
    assert_eq!(vmm.rig.read::<4>(BITMAPS + 0x80), [0x20, 0, 0, 0]);
}

// covers: vmx/task-switch
#[test]
fn a_task_switch_of_the_guest_is_an_exit() {
    // A 32-bit guest jumps to a TSS selector.
    let mut vmm = Vmm::new(|a| a.nop());
    let code = assembled(32, GUEST, |a| a.db(&[0xea, 0, 0, 0, 0, 0x10, 0]));
    vmm.rig.write(GUEST, &code);
    vmm.rig.write(GDT + 0x10, &0x0000_8900_0000_0067u64.to_le_bytes());
    vmm.ept(&[]);
    vmm.secondary(1 << 7);
    vmm.set(&[
        (Field::ENTRY_CONTROLS, ENTRY & !(1 << 9)),
        (Field::GUEST_CR0, 0x31),
        (Field::GUEST_CR4, 0x2000),
        (Field::GUEST_CS_RIGHTS, 0xc09b),
    ]);
    assert_eq!(vmm.exit(), (9, 2 << 30 | 0x10, 7, 0));
}

// covers: vmx/hidden
#[test]
fn without_the_feature_there_are_no_instructions() {
    let mut rig = Rig::by(WESTMERE.with_toggles("-vmx").unwrap(), Vectors::default());
    rig.write(CODE, &assembled(64, CODE, |a| a.vmxoff()));
    // No IDT: #UD ends in shutdown at once.
    assert_eq!(rig.run(10), Exit::Shutdown);
}

// covers: vmx/outside
#[test]
fn outside_vmx_operation_the_instructions_are_undefined_and_vmxon_asks_for_its_registers() {
    // Without CR4.VMXE VMXON is #UD; with it, and without CR0.NE, #GP: the processor shuts down without an IDT in any case, and
    // with an IDT the vector tells.
    for (with4, with0, vector) in [(0x6a0u64, 0x8001_0033u64, 6), (0x26a0, 0x8001_0013, 13)] {
        let mut vmm = Vmm::new(|a| a.nop());
        vmm.handler(vector, |a| a.hlt());
        let mut state = vmm.rig.cpu.state();
        (state.cr4, state.cr0) = (with4.into(), with0.into());
        state.idtr.base = IDT;
        state.idtr.limit = 0xfff;
        state.gdtr.base = GDT;
        vmm.rig.cpu.set_state(&state);
        vmm.table(&[]);
        while vmm.step(1000) != Exit::Halt {}
        assert_eq!(vmm.rig.cpu.rip() & !15, HANDLERS + 16 * vector);
    }
}
