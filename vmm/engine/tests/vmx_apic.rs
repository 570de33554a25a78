//! APIC virtualization: what accesses to the guest's local APIC lead to, and virtual interrupts. What is expected comes from SDM Vol. 3C
//! chapter 30 "APIC Virtualization and Virtual Interrupts"; rows name its sections.

use crate::vmm;
use engine::{Activity, Exit};
use iced_x86::code_asm::*;
use vmm::{BITMAPS, Code, DATA, EXIT, GUEST, GUEST_STACK, HANDLERS, LIST, PIN, POINTERS, Vmm, assembled};
use x86::model::{BROADWELL, CORE2, HASWELL};
use x86::vmx::fields::Field;

/// The virtual-APIC page, the APIC-access page, the posted-interrupt descriptor.
const PAGE: u64 = BITMAPS;
const ACCESS: u64 = DATA;
const DESCRIPTOR: u64 = LIST;
/// MSR bitmaps that let everything be.
const NO_EXITS: u64 = 0x53_0000;
/// What the guest's code is given: an address, a value.
const PARAMETERS: u64 = 0x54_0000;
/// No RAM, within the physical-address width.
const NOWHERE: u64 = 0x4000_0000;

/// "Use TPR shadow", among the primary controls.
const SHADOW: u64 = 1 << 21;
const INTERRUPT_WINDOW: u64 = 1 << 2;
const MSR_BITMAPS: u64 = 1 << 28;
/// Secondary controls: virtualize APIC accesses, virtualize x2APIC mode, APIC-register virtualization, virtual-interrupt delivery.
const ACCESSES: u64 = 1;
const X2APIC: u64 = 1 << 4;
const REGISTERS: u64 = 1 << 8;
const DELIVERY: u64 = 1 << 9;
/// Pin-based: process posted interrupts.
const POSTED: u64 = 1 << 7;
/// VM exits: acknowledge interrupt.
const ACKNOWLEDGE: u64 = 1 << 15;

const IF: u64 = 1 << 9;
const TF: u64 = 1 << 8;

/// A VMM whose guest has a virtual APIC.
fn virtual_apic(secondary: u64, guest: Code) -> Vmm {
    let mut vmm = Vmm::on(&BROADWELL, guest);
    vmm.primary(SHADOW | MSR_BITMAPS);
    vmm.secondary(secondary);
    vmm.set(&[
        (Field::PIN_CONTROLS, PIN | 1),
        (Field::VIRTUAL_APIC, PAGE),
        (Field::MSR_BITMAP, NO_EXITS),
    ]);
    if secondary & ACCESSES != 0 {
        vmm.set(&[(Field::APIC_ACCESS, ACCESS)]);
    }
    vmm
}

fn parameters(vmm: &mut Vmm, address: u64, value: u64) {
    vmm.rig.write(PARAMETERS, &address.to_le_bytes());
    vmm.rig.write(PARAMETERS + 8, &value.to_le_bytes());
}

fn word(vmm: &Vmm, offset: u64) -> u32 {
    u32::from_le_bytes(vmm.rig.read::<4>(PAGE + offset))
}

/// The bit of a vector in VISR (100H) or VIRR (200H).
fn bit(vmm: &Vmm, register: u64, vector: u64) -> bool {
    word(vmm, register | (vector & 0xe0) >> 1) >> (vector & 31) & 1 != 0
}

fn request(vmm: &mut Vmm, vector: u64) {
    let at = PAGE + (0x200 | (vector & 0xe0) >> 1);
    let value = u32::from_le_bytes(vmm.rig.read::<4>(at)) | 1 << (vector & 31);
    vmm.rig.write(at, &value.to_le_bytes());
}

macro_rules! accesses {
    ($($name:ident: |$a:ident| $access:expr;)*) => { $(
        /// RCX: the address. What follows the access is a VMCALL.
        const $name: Code = |$a| {
            $a.mov(rcx, qword_ptr(PARAMETERS))?;
            $a.mov(rax, qword_ptr(PARAMETERS + 8))?;
            $access?;
            $a.vmcall()
        };
    )* };
}

accesses! {
    READ1: |a| a.mov(al, byte_ptr(rcx));
    READ2: |a| a.mov(ax, word_ptr(rcx));
    READ4: |a| a.mov(eax, dword_ptr(rcx));
    READ8: |a| a.mov(rax, qword_ptr(rcx));
    WRITE1: |a| a.mov(byte_ptr(rcx), al);
    WRITE4: |a| a.mov(dword_ptr(rcx), eax);
    WRITE8: |a| a.mov(qword_ptr(rcx), rax);
    MODIFY4: |a| a.or(dword_ptr(rcx), eax);
    EXCHANGE4: |a| a.xchg(dword_ptr(rcx), eax);
    FLUSH: |a| a.clflush(byte_ptr(rcx));
    VECTOR: |a| a.movdqu(xmm0, xmmword_ptr(rcx));
    JUMP: |a| a.jmp(rcx);
}

/// Bytes of guest code before the access.
const BEFORE: u64 = 18;

// covers: vmx/apic-access
#[test]
fn an_access_to_the_apic_access_page_is_virtualized_or_exits() {
    const NOTHING: u64 = ACCESSES;
    const ALL: u64 = ACCESSES | REGISTERS | DELIVERY;
    /// The access is virtualized.
    const DONE: (u64, u64) = (18, 0);
    // TPR shadow, secondary controls, offset, the access; reason and qualification.
    #[rustfmt::skip]
    let rows = [
        (0, NOTHING, 0x080, READ4, (44, 0x0080), "30.4.2: no TPR shadow"),
        (0, NOTHING, 0x080, WRITE4, (44, 0x1080), "30.4.3.1: no TPR shadow"),
        (1, NOTHING, 0x080, READ4, DONE, "30.4.2: 080H"),
        (1, NOTHING, 0x080, READ1, DONE, "30.4.2: a byte of it"),
        (1, NOTHING, 0x081, READ1, (44, 0x0081), "30.4.2: at its offset"),
        (1, NOTHING, 0x080, READ8, (44, 0x0080), "30.4.2: 32 bits at most"),
        (1, NOTHING, 0x084, READ4, (44, 0x0084), "30.4.2: the low four bytes of 16"),
        (1, NOTHING, 0x020, READ4, (44, 0x0020), "30.4.2: nothing else"),
        (1, REGISTERS | ACCESSES, 0x020, READ4, DONE, "30.4.2: local APIC ID"),
        (1, REGISTERS | ACCESSES, 0x081, READ1, DONE, "30.4.2: within 080H to 083H"),
        (1, REGISTERS | ACCESSES, 0x083, READ2, (44, 0x0083), "30.4.2: entirely within"),
        (1, REGISTERS | ACCESSES, 0x0a0, READ4, (44, 0x00a0), "30.4.2: the PPR is not among them"),
        (1, REGISTERS | ACCESSES, 0x170, READ4, DONE, "30.4.2: in service"),
        (1, REGISTERS | ACCESSES, 0x1f0, READ4, DONE, "30.4.2: trigger mode"),
        (1, REGISTERS | ACCESSES, 0x270, READ4, DONE, "30.4.2: interrupt request"),
        (1, REGISTERS | ACCESSES, 0x290, READ4, (44, 0x0290), "30.4.2: reserved"),
        (1, REGISTERS | ACCESSES, 0x370, READ4, DONE, "30.4.2: LVT"),
        (1, REGISTERS | ACCESSES, 0x390, READ4, (44, 0x0390), "30.4.2: the current count is not among them"),
        (1, REGISTERS | ACCESSES, 0x3e0, READ4, DONE, "30.4.2: divide configuration"),
        (1, NOTHING, 0x080, WRITE4, DONE, "30.4.3.1: 080H"),
        (1, NOTHING, 0x081, WRITE1, (44, 0x1081), "30.4.3.1: at its offset"),
        (1, NOTHING, 0x080, WRITE8, (44, 0x1080), "30.4.3.1: 32 bits at most"),
        (1, NOTHING, 0x0b0, WRITE4, (44, 0x10b0), "30.4.3.1: EOI without virtual-interrupt delivery"),
        (1, DELIVERY | ACCESSES, 0x0b0, WRITE4, DONE, "30.4.3.1: EOI with it"),
        (1, DELIVERY | ACCESSES, 0x0b0, READ4, (44, 0x00b0), "30.4.2: which nobody reads"),
        (1, DELIVERY | ACCESSES, 0x300, WRITE4, (56, 0x0300), "30.4.3.2: an ICR that is no self-IPI's"),
        (1, DELIVERY | ACCESSES, 0x310, WRITE4, (44, 0x1310), "30.4.3.1: ICR, high"),
        (1, ALL, 0x310, WRITE4, DONE, "30.4.3.2: no VM exit"),
        (1, ALL, 0x030, WRITE4, (44, 0x1030), "30.4.3.1: the version is read-only"),
        (1, ALL, 0x0f0, WRITE4, (56, 0x00f0), "30.4.3.3: spurious-interrupt vector"),
        (1, ALL, 0x0f1, WRITE1, (56, 0x00f1), "30.4.3.3: the offset of the write"),
        (1, REGISTERS | ACCESSES, 0x0b0, WRITE4, (56, 0x00b0), "30.4.3.2: EOI without virtual-interrupt delivery"),
        (1, NOTHING, 0x080, MODIFY4, DONE, "30.4.3: a read, then a write"),
        (1, DELIVERY | ACCESSES, 0x0b0, MODIFY4, (44, 0x10b0), "30.4.2: its read is not virtualized"),
        (1, ALL, 0x080, EXCHANGE4, DONE, "30.4.4: XCHG"),
        (1, NOTHING, 0x020, FLUSH, (44, 0x0020), "28.2.1: CLFLUSH reads"),
        (1, ALL, 0x080, VECTOR, (44, 0x0080), "30.4.2: 128 bits"),
        (1, ALL, 0x080, JUMP, (44, 0x2080), "30.4.2: an instruction fetch"),
    ];
    for (shadow, secondary, offset, access, expected, why) in rows {
        let mut vmm = virtual_apic(secondary, access);
        if shadow == 0 {
            let primary = vmm.value(Field::PRIMARY_CONTROLS);
            vmm.set(&[(Field::PRIMARY_CONTROLS, primary & !SHADOW)]);
        }
        // What is on the APIC-access page nobody sees.
        vmm.rig.write(ACCESS, &[0x5a; 0x1000]);
        vmm.rig.write(PAGE + (offset & !15), &[0x77, 0x11, 0, 0, 0x33, 0, 0, 0]);
        parameters(&mut vmm, ACCESS + offset, 0x2_0045);
        let (reason, qualification, length, at) = vmm.exit();
        assert_eq!((reason, qualification), expected, "{why}");
        let written = vmm.rig.read::<0x1000>(ACCESS);
        assert_eq!(written, [0x5a; 0x1000], "{why}: the page itself is never reached");
        // A VM exit of the access is fault-like, one of the emulation trap-like.
        match reason {
            44 if qualification >> 12 < 2 => assert_eq!((at, length > 0), (BEFORE, true), "{why}"),
            44 => assert_eq!(at, ACCESS + offset - GUEST, "{why}"),
            _ => assert!(at > BEFORE, "{why}"),
        }
    }
}

// covers: vmx/apic-access
#[test]
fn what_is_read_and_written_is_on_the_virtual_apic_page() {
    let mut vmm = virtual_apic(ACCESSES | REGISTERS, READ4);
    vmm.rig.write(PAGE + 0x20, &[0xd, 0xc, 0xb, 0xa]);
    parameters(&mut vmm, ACCESS + 0x20, 0);
    assert_eq!(vmm.exit().0, 18);
    assert_eq!(vmm.rig.cpu.state().gpr[0], 0x0a0b_0c0d);
    // Secondary controls, offset, value written; value that is there then. 30.4.3.2 "APIC-Write Emulation".
    for (secondary, offset, written, stored) in [
        (ACCESSES, 0x80, 0x1234_5678u64, 0x78),
        (ACCESSES | REGISTERS | DELIVERY, 0xb0, 0x55, 0),
        (ACCESSES | REGISTERS, 0xb0, 0x55, 0x55),
        (ACCESSES | REGISTERS, 0x310, 0x1234_5678, 0x1200_0000),
        (ACCESSES | REGISTERS, 0x370, 0x1_00ff, 0x1_00ff),
    ] {
        let mut vmm = virtual_apic(secondary, WRITE4);
        parameters(&mut vmm, ACCESS + offset, written);
        vmm.exit();
        assert_eq!(word(&vmm, offset), stored, "{offset:#x}");
    }
    // XCHG, and a read-modify-write.
    let mut vmm = virtual_apic(ACCESSES, EXCHANGE4);
    vmm.rig.write(PAGE + 0x80, &[0x20]);
    parameters(&mut vmm, ACCESS + 0x80, 0x40);
    assert_eq!(vmm.exit().0, 18);
    assert_eq!((vmm.rig.cpu.state().gpr[0], word(&vmm, 0x80)), (0x20, 0x40));
    let mut vmm = virtual_apic(ACCESSES, MODIFY4);
    vmm.rig.write(PAGE + 0x80, &[0x20]);
    parameters(&mut vmm, ACCESS + 0x80, 0x13);
    assert_eq!(vmm.exit().0, 18);
    assert_eq!(word(&vmm, 0x80), 0x33);
}

// covers: vmx/apic-access
#[test]
fn each_iteration_of_a_repeated_instruction_is_an_operation() {
    const REPEATED: Code = |a| {
        a.mov(rdi, qword_ptr(PARAMETERS))?;
        a.mov(ecx, 2)?;
        a.mov(eax, 0x66)?;
        a.rep().stosd()
    };
    let reads = [Field::EXIT_REASON, Field::EXIT_QUALIFICATION, Field::GUEST_RIP];
    // Offset 084H, where the second one goes, is not virtualized.
    let mut vmm = virtual_apic(ACCESSES | REGISTERS, REPEATED);
    parameters(&mut vmm, ACCESS + 0x80, 0);
    assert_eq!(vmm.run(&reads).unwrap(), [44, 0x1084, GUEST + 18]);
    assert_eq!(word(&vmm, 0x80), 0x66, "the first iteration is complete");
    // The VM exit of the first one comes before the second.
    let mut vmm = virtual_apic(ACCESSES | REGISTERS, REPEATED);
    parameters(&mut vmm, ACCESS + 0xf0, 0);
    assert_eq!(vmm.run(&reads).unwrap(), [56, 0xf0, GUEST + 18]);
    assert_eq!((word(&vmm, 0xf0), word(&vmm, 0xf4)), (0x66, 0));
}

// covers: vmx/tpr-shadow
#[test]
fn each_way_to_the_virtual_tpr_looks_at_the_threshold() {
    const CR8: Code = |a| {
        a.mov(r8d, 2)?;
        a.mov(cr8, r8)?;
        a.vmcall()
    };
    const WRMSR: Code = |a| {
        a.mov(ecx, 0x808)?;
        a.xor(edx, edx)?;
        a.mov(eax, 0x20)?;
        a.wrmsr()?;
        a.vmcall()
    };
    // 30.1.2 "TPR Virtualization": the three operations that lead to it. With virtual-interrupt delivery there is no threshold.
    for (secondary, guest, reason, at) in [
        (0, CR8, 43, 10),
        (X2APIC, WRMSR, 43, 14),
        (ACCESSES, WRITE4, 43, BEFORE + 2),
        (DELIVERY, CR8, 18, 10),
        (DELIVERY | X2APIC, WRMSR, 18, 14),
        (DELIVERY | ACCESSES, WRITE4, 18, BEFORE + 2),
    ] {
        let mut vmm = virtual_apic(secondary, guest);
        parameters(&mut vmm, ACCESS + 0x80, 0x20);
        vmm.rig.write(PAGE + 0x80, &[0x70]);
        vmm.set(&[(Field::TPR_THRESHOLD, 3)]);
        let exit = vmm.exit();
        assert_eq!((exit.0, exit.3), (reason, at), "controls {secondary:#x}");
        assert_eq!(word(&vmm, 0x80), 0x20);
        // 30.1.3 "PPR Virtualization".
        assert_eq!(word(&vmm, 0xa0), if secondary & DELIVERY != 0 { 0x20 } else { 0 });
    }
    // 27.7.7 "VM Exits Induced by the TPR Threshold": with virtualized APIC accesses VM entry does not fail, it is followed by the VM exit.
    let mut vmm = virtual_apic(ACCESSES, |a| a.nop());
    vmm.set(&[(Field::TPR_THRESHOLD, 3)]);
    let exit = vmm.exit();
    assert_eq!((exit.0, exit.3), (43, 0));
    let mut vmm = virtual_apic(0, |a| a.nop());
    vmm.set(&[(Field::TPR_THRESHOLD, 3)]);
    assert_eq!(vmm.run(&[]), Err((0x40, 7)), "27.2.1.1");
}

// covers: vmx/virtual-x2apic
#[test]
fn msrs_of_the_local_apic_are_those_of_the_virtual_apic_page() {
    const RDMSR: Code = |a| {
        a.mov(ecx, dword_ptr(PARAMETERS))?;
        a.rdmsr()?;
        a.vmcall()
    };
    const WRMSR: Code = |a| {
        a.mov(ecx, dword_ptr(PARAMETERS))?;
        a.mov(eax, dword_ptr(PARAMETERS + 8))?;
        a.mov(edx, dword_ptr(PARAMETERS + 12))?;
        a.wrmsr()?;
        a.vmcall()
    };
    const GP: (u64, u64) = (0, 0);
    const DONE: (u64, u64) = (18, 0);
    // Controls, MSR, the instruction, the value; reason and qualification. This VMM's own local APIC has no MSRs: where nothing is
    // virtualized there is #GP. 30.5 "Virtualizing MSR-Based APIC Accesses".
    #[rustfmt::skip]
    let rows = [
        (0, 0x808, RDMSR, 0, GP, "x2APIC mode is not virtualized"),
        (X2APIC, 0x808, RDMSR, 0, DONE, "808H"),
        (X2APIC, 0x802, RDMSR, 0, GP, "only 808H without APIC-register virtualization"),
        (X2APIC | REGISTERS, 0x802, RDMSR, 0, DONE, "any with it"),
        (X2APIC | REGISTERS, 0x8ff, RDMSR, 0, DONE, "up to 8FFH"),
        (X2APIC | REGISTERS, 0x900, RDMSR, 0, GP, "and no further"),
        (X2APIC, 0x808, WRMSR, 0x55, DONE, "808H"),
        (X2APIC, 0x808, WRMSR, 0x100, GP, "EAX[31:8] is not 0"),
        (X2APIC, 0x808, WRMSR, 1 << 32, GP, "EDX is not 0"),
        (X2APIC | REGISTERS, 0x80b, WRMSR, 0, GP, "EOI without virtual-interrupt delivery"),
        (X2APIC | DELIVERY, 0x80b, WRMSR, 0, DONE, "EOI with it"),
        (X2APIC | DELIVERY, 0x80b, WRMSR, 1, GP, "EAX is not 0"),
        (X2APIC | DELIVERY, 0x83f, WRMSR, 0x45, DONE, "self-IPI"),
        (X2APIC | DELIVERY, 0x83f, WRMSR, 0x145, GP, "EAX[31:8] is not 0"),
        (X2APIC | DELIVERY, 0x83f, WRMSR, 0x0f, (56, 0x3f0), "EAX[7:4] is 0"),
        (X2APIC | REGISTERS, 0x83f, WRMSR, 0x45, GP, "self-IPI without virtual-interrupt delivery"),
        (X2APIC | REGISTERS | DELIVERY, 0x830, WRMSR, 0x45, GP, "the ICR is not virtualized"),
        (X2APIC | REGISTERS | DELIVERY, 0x80f, WRMSR, 0x1ff, GP, "nor is the spurious-interrupt vector"),
    ];
    for (secondary, msr, instruction, value, expected, why) in rows {
        let mut vmm = virtual_apic(secondary, instruction);
        vmm.set(&[(Field::EXCEPTION_BITMAP, 1 << 13)]);
        vmm.rig.write(PAGE, &[0x11; 0x1000]);
        vmm.rig.write(PAGE + 0x80, &[0; 0x30]);
        parameters(&mut vmm, msr, value);
        let exit = vmm.exit();
        assert_eq!((exit.0, exit.1), expected, "{why}");
        let register = PAGE + ((msr & 0xff) << 4);
        let there = u64::from_le_bytes(vmm.rig.read::<8>(register));
        if expected == DONE {
            let gpr = vmm.rig.cpu.state().gpr;
            assert_eq!(gpr[0] | gpr[2] << 32, there, "{why}: eight bytes, read or written");
        }
    }
}

/// Handlers of the guest: each leaves its vector in RBX.
fn handlers(vmm: &mut Vmm) {
    vmm.handler(0x51, |a| {
        a.mov(ebx, 0x51)?;
        a.vmcall()
    });
    vmm.handler(0x61, |a| {
        a.mov(ebx, 0x61)?;
        a.vmcall()
    });
}

/// The vector whose handler has run, if one has: RBX is a multiple of 100H before.
fn handled(vmm: &Vmm) -> u64 {
    vmm.rig.cpu.state().gpr[3] & 0xff
}

// covers: vmx/virtual-interrupts
#[test]
fn a_virtual_interrupt_comes_as_soon_as_nothing_holds_it_off() {
    // Bytes of the guest: NOP; STI; NOP; NOP; VMCALL.
    const STI: Code = |a| {
        a.nop()?;
        a.sti()?;
        a.nop()?;
        a.nop()?;
        a.vmcall()
    };
    const HALT: Code = |a| {
        a.sti()?;
        a.hlt()?;
        a.vmcall()
    };
    const TPR: Code = |a| {
        a.mov(r8d, 4)?;
        a.mov(cr8, r8)?;
        a.vmcall()
    };
    // The guest, RFLAGS, blocking, VTPR, SVI, RVI; RBX, RIP that is pushed.
    #[rustfmt::skip]
    let rows = [
        (STI, IF | 2, 0, 0, 0, 0x51, (0x51, 0), "30.2.2: at once"),
        (STI, 2, 0, 0, 0, 0x51, (0x51, 3), "30.2.2: IF, and blocking by STI"),
        (STI, IF | 2, 1, 0, 0, 0x51, (0x51, 1), "30.2.2: blocking by STI at VM entry"),
        (STI, IF | 2, 2, 0, 0, 0x51, (0x51, 1), "30.2.2: blocking by MOV SS"),
        (STI, IF | 2, 0, 0x4f, 0, 0x51, (0x51, 0), "30.2.1: VPPR[7:4] is lower"),
        (STI, IF | 2, 0, 0x50, 0, 0x51, (0, 0), "30.2.1: VPPR[7:4] is as high"),
        (STI, IF | 2, 0, 0, 0x5f, 0x51, (0, 0), "30.1.3: SVI counts, too"),
        (STI, IF | 2, 0, 0, 0x41, 0x51, (0x51, 0), "30.1.3: and is lower"),
        (STI, IF | 2, 0, 0, 0, 0x0f, (0, 0), "30.2.1: a class of 0 is no higher"),
        (HALT, 2, 0, 0, 0, 0x51, (0x51, 2), "30.2.2: HLT ends"),
        (TPR, IF | 2, 0, 0x70, 0, 0x51, (0x51, 10), "30.1.2: TPR virtualization evaluates"),
    ];
    for (guest, flags, blocking, tpr, servicing, requesting, (vector, pushed), why) in rows {
        let mut vmm = virtual_apic(DELIVERY, guest);
        handlers(&mut vmm);
        vmm.rig.write(PAGE + 0x80, &[tpr]);
        request(&mut vmm, requesting);
        request(&mut vmm, 0x31);
        vmm.set(&[
            (Field::GUEST_RFLAGS, flags),
            (Field::GUEST_INTERRUPTIBILITY, blocking),
            (Field::GUEST_INTERRUPT_STATUS, servicing << 8 | requesting),
        ]);
        let v = vmm
            .run(&[
                Field::EXIT_REASON,
                Field::GUEST_INTERRUPT_STATUS,
                Field::GUEST_RSP,
                Field::IDT_VECTORING,
            ])
            .unwrap();
        assert_eq!((v[0], handled(&vmm), v[3]), (18, vector, 0), "{why}");
        if vector == 0 {
            assert_eq!(v[1], servicing << 8 | requesting, "{why}");
            assert!(bit(&vmm, 0x200, requesting), "{why}");
            continue;
        }
        let rip = u64::from_le_bytes(vmm.rig.read::<8>(v[2]));
        assert_eq!((v[2], rip), (GUEST_STACK - 40, GUEST + pushed), "{why}");
        // 30.2.2: VISR, SVI, VPPR, VIRR, RVI.
        assert!(bit(&vmm, 0x100, vector) && !bit(&vmm, 0x200, vector), "{why}");
        assert_eq!(v[1], vector << 8 | 0x31, "{why}");
        assert_eq!(word(&vmm, 0xa0), 0x50, "{why}");
    }
    // 30.2.1: with interrupt-window exiting nothing is recognized.
    let mut vmm = virtual_apic(DELIVERY, STI);
    vmm.primary(INTERRUPT_WINDOW);
    request(&mut vmm, 0x51);
    vmm.set(&[(Field::GUEST_RFLAGS, IF | 2), (Field::GUEST_INTERRUPT_STATUS, 0x51)]);
    let v = vmm.run(&[Field::EXIT_REASON, Field::GUEST_INTERRUPT_STATUS]).unwrap();
    assert_eq!(v, [7, 0x51]);
    // An inactive state that it ends: VM entry to HLT.
    let mut vmm = virtual_apic(DELIVERY, STI);
    handlers(&mut vmm);
    request(&mut vmm, 0x51);
    vmm.set(&[
        (Field::GUEST_RFLAGS, IF | 2),
        (Field::GUEST_INTERRUPT_STATUS, 0x51),
        (Field::GUEST_ACTIVITY, 1),
    ]);
    let v = vmm.run(&[Field::EXIT_REASON, Field::GUEST_ACTIVITY]).unwrap();
    assert_eq!((v[0], v[1], handled(&vmm)), (18, 0, 0x51));
}

// covers: vmx/virtual-interrupts
#[test]
fn a_vm_exit_during_the_delivery_of_a_virtual_interrupt_tells_of_it() {
    let mut vmm = virtual_apic(DELIVERY, |a| a.nop());
    vmm.ept(&[(GUEST_STACK - 0x1000, 0)]);
    handlers(&mut vmm);
    request(&mut vmm, 0x51);
    vmm.set(&[(Field::GUEST_RFLAGS, IF | 2), (Field::GUEST_INTERRUPT_STATUS, 0x51)]);
    let v = vmm
        .run(&[Field::EXIT_REASON, Field::IDT_VECTORING, Field::GUEST_RIP])
        .unwrap();
    assert_eq!(v, [48, 0x8000_0051, GUEST]);
}

// covers: vmx/virtual-interrupts
#[test]
fn an_eoi_goes_to_the_next_interrupt_or_to_the_vmm() {
    const EOI_MSR: Code = |a| {
        a.mov(ecx, 0x80b)?;
        a.xor(eax, eax)?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
        a.nop()?;
        a.vmcall()
    };
    const EOI_PAGE: Code = |a| {
        a.mov(rcx, qword_ptr(PARAMETERS))?;
        a.mov(dword_ptr(rcx), eax)?;
        a.nop()?;
        a.vmcall()
    };
    // 30.1.4 "EOI Virtualization". Whether the bit of the vector in the EOI-exit bitmap is set.
    for (secondary, guest, after) in [(X2APIC, EOI_MSR, 11), (ACCESSES, EOI_PAGE, 10)] {
        for exits in [false, true] {
            let mut vmm = virtual_apic(DELIVERY | secondary, guest);
            handlers(&mut vmm);
            parameters(&mut vmm, ACCESS + 0xb0, 0);
            for (register, vector) in [(0x150, 0xb1u32), (0x120, 0x41)] {
                vmm.rig.write(PAGE + register, &(1u32 << (vector & 31)).to_le_bytes());
            }
            request(&mut vmm, 0x61);
            vmm.set(&[
                (Field::GUEST_RFLAGS, IF | 2),
                (Field::GUEST_INTERRUPT_STATUS, 0xb161),
                (Field::EOI_EXIT_2, u64::from(exits) << (0xb1 - 0x80)),
            ]);
            let v = vmm
                .run(&[
                    Field::EXIT_REASON,
                    Field::EXIT_QUALIFICATION,
                    Field::GUEST_INTERRUPT_STATUS,
                    Field::GUEST_RIP,
                    Field::GUEST_RSP,
                ])
                .unwrap();
            assert!(!bit(&vmm, 0x100, 0xb1) && bit(&vmm, 0x100, 0x41));
            if exits {
                assert_eq!(v[..3], [45, 0xb1, 0x4161], "SVI is the highest of VISR");
                assert_eq!(v[3], GUEST + after, "trap-like");
                assert_eq!(word(&vmm, 0xa0), 0x40, "30.1.3");
                continue;
            }
            assert_eq!((v[0], v[2]), (18, 0x6100), "the pending one comes");
            let rip = u64::from_le_bytes(vmm.rig.read::<8>(v[4]));
            assert_eq!((rip, handled(&vmm)), (GUEST + after, 0x61));
        }
    }
}

// covers: vmx/virtual-interrupts
#[test]
fn a_self_ipi_needs_no_vmm() {
    // 30.1.5 "Self-IPI Virtualization", 30.4.3.2: the value of ICR, low; whether it is virtualized.
    #[rustfmt::skip]
    let rows = [
        (0x4_0051, true, "self, fixed, edge"),
        (0x4_4051, true, "assert"),
        (0x4_0851, true, "the destination mode does not count"),
        (0x0_0051, false, "no shorthand"),
        (0x8_0051, false, "all including self"),
        (0x4_8051, false, "level"),
        (0x4_0151, false, "lowest priority"),
        (0x4_1051, false, "delivery status"),
        (0x4_000f, false, "the upper half of the vector is 0"),
        (0x14_0051, false, "a reserved bit, 20"),
        (0x4_2051, false, "a reserved bit, 13"),
    ];
    for (value, virtualized, why) in rows {
        let mut vmm = virtual_apic(ACCESSES | DELIVERY, WRITE4);
        handlers(&mut vmm);
        parameters(&mut vmm, ACCESS + 0x300, value);
        vmm.set(&[(Field::GUEST_RFLAGS, IF | 2)]);
        let v = vmm.run(&[Field::EXIT_REASON, Field::EXIT_QUALIFICATION]).unwrap();
        let vector = handled(&vmm);
        let expected = if virtualized { (18, 0, 0x51) } else { (56, 0x300, 0) };
        assert_eq!((v[0], v[1], vector), expected, "{why}");
    }
    // RVI becomes no lower.
    let mut vmm = virtual_apic(X2APIC | DELIVERY, |a| {
        a.mov(ecx, 0x83f)?;
        a.mov(eax, 0x51)?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
        a.vmcall()
    });
    vmm.set(&[(Field::GUEST_INTERRUPT_STATUS, 0x61)]);
    let v = vmm.run(&[Field::EXIT_REASON, Field::GUEST_INTERRUPT_STATUS]).unwrap();
    assert_eq!((v[0], v[1], bit(&vmm, 0x200, 0x51)), (18, 0x61, true));
}

// covers: vmx/posted-interrupts
#[test]
fn a_notification_takes_over_what_has_been_posted() {
    const SPIN: Code = |a| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.inc(rax)?;
        a.jmp(here)
    };
    const HALT: Code = |a| a.hlt();
    // 30.6 "Posted-Interrupt Processing". Whether the guest halts, RFLAGS, the vector that comes, RVI before; whether a virtual interrupt is
    // delivered.
    for (halts, flags, vector, requesting, taken, why) in [
        (false, IF | 2, 0xf2, 0, true, "delivered"),
        (true, IF | 2, 0xf2, 0, true, "HLT ends"),
        (
            false,
            2,
            0xf2,
            0,
            false,
            "IF is clear, and the notification is taken all the same",
        ),
        (true, 2, 0xf2, 0, false, "and the guest stays halted"),
        (false, 2, 0xf2, 0x71, false, "RVI becomes no lower"),
        (false, IF | 2, 0xf3, 0, false, "another vector is a VM exit"),
    ] {
        let mut vmm = virtual_apic(DELIVERY, if halts { HALT } else { SPIN });
        handlers(&mut vmm);
        vmm.set(&[
            (Field::PIN_CONTROLS, PIN | 1 | POSTED),
            (Field::EXIT_CONTROLS, EXIT | ACKNOWLEDGE),
            (Field::POSTED_INTERRUPT_VECTOR, 0xf2),
            (Field::POSTED_INTERRUPT_DESCRIPTOR, DESCRIPTOR),
            (Field::GUEST_RFLAGS, flags),
            (Field::GUEST_INTERRUPT_STATUS, requesting),
        ]);
        let mut descriptor = [0u8; 64];
        descriptor[0x61 / 8] = 1 << (0x61 & 7);
        descriptor[0x51 / 8] = 1 << (0x51 & 7);
        // ON, SN, and what else is software's.
        descriptor[32] = 3;
        descriptor[40] = 0x5a;
        vmm.rig.write(DESCRIPTOR, &descriptor);
        let reads = [
            Field::EXIT_REASON,
            Field::EXIT_INTERRUPTION,
            Field::GUEST_INTERRUPT_STATUS,
        ];
        vmm.table(&reads);
        while !(GUEST..GUEST + 16).contains(&vmm.rig.cpu.rip()) {
            vmm.step(1);
        }
        vmm.step(10);
        assert!(vmm.rig.cpu.interruptible() && !vmm.rig.cpu.exits_unacknowledged());
        vmm.rig.engine.interrupt(&mut vmm.rig.cpu, &mut vmm.platform, vector);
        if vector == 0xf3 {
            assert_eq!(vmm.go_on(3).unwrap(), [1, 0x8000_00f3, 0], "{why}");
            assert_eq!((vmm.rig.read::<64>(DESCRIPTOR), vmm.platform.eois), (descriptor, 0));
            continue;
        }
        assert_eq!(vmm.platform.eois, 1, "{why}: the local APIC's interrupt is dismissed");
        let mut after = [0u8; 64];
        (after[32], after[40]) = (2, 0x5a);
        assert_eq!(vmm.rig.read::<64>(DESCRIPTOR), after, "{why}");
        if taken {
            assert!(vmm.rig.cpu.takes_virtual_interrupt(), "{why}");
            assert_eq!(vmm.go_on(3).unwrap(), [18, 0, 0x6151], "{why}");
            assert_eq!(handled(&vmm), 0x61, "{why}");
            continue;
        }
        assert!(bit(&vmm, 0x200, 0x61) && bit(&vmm, 0x200, 0x51), "{why}");
        assert!(!vmm.rig.cpu.takes_virtual_interrupt(), "{why}");
        let exit = vmm.step(10);
        assert_eq!(exit == Exit::Halt, halts, "{why}");
        let activity = vmm.rig.cpu.activity() == Activity::Halted;
        assert_eq!(activity, halts, "{why}");
        // The next notification of another vector tells what RVI is.
        vmm.rig.engine.interrupt(&mut vmm.rig.cpu, &mut vmm.platform, 0xf3);
        assert_eq!(vmm.go_on(3).unwrap()[2], requesting.max(0x61), "{why}");
    }
}

// covers: vmx/apic-access
#[test]
fn event_delivery_and_page_walks_that_meet_the_page_exit() {
    // 30.4, Table 28-6: a linear access during event delivery.
    let mut vmm = virtual_apic(ACCESSES | REGISTERS, |a| {
        a.mov(esp, (ACCESS + 0x800) as u32)?;
        a.int(0x51)
    });
    handlers(&mut vmm);
    let v = vmm
        .run(&[
            Field::EXIT_REASON,
            Field::EXIT_QUALIFICATION,
            Field::IDT_VECTORING,
            Field::GUEST_RIP,
        ])
        .unwrap();
    assert_eq!((v[0], v[1] >> 12, v[2]), (44, 3, 0x8000_0451));
    assert_eq!(v[3], GUEST + 5, "the instruction is to be executed again");
    // 30.4.6.1: a paging-structure entry that is there, for the first fetch; nothing is virtualized then.
    let mut vmm = virtual_apic(ACCESSES | REGISTERS, |a| a.nop());
    vmm.ept(&[]);
    vmm.set(&[(Field::APIC_ACCESS, crate::rig::TABLES + 0x2000)]);
    let exit = vmm.exit();
    assert_eq!((exit.0, exit.1 >> 12, exit.3), (44, 15, 0));
    // A descriptor table that is there.
    let mut vmm = virtual_apic(ACCESSES | REGISTERS, |a| {
        a.mov(ax, 16u32)?;
        a.mov(ds, ax)
    });
    vmm.set(&[(Field::GUEST_GDTR_BASE, ACCESS)]);
    let exit = vmm.exit();
    assert_eq!((exit.0, exit.1), (44, 16));
}

/// 30.4: an operation may be the "delivery of an event through the IDT", whose accesses are virtualized as any. In real-address mode an entry of the
/// table has four bytes.
// covers: vmx/apic-access
#[test]
fn what_event_delivery_reads_is_virtualized_where_an_instruction_would_read_it() {
    const VECTOR: u64 = 0x51;
    let code = assembled(16, 0x10, |a| a.int(VECTOR as i32));
    const GATE: u32 = 0x2000_0080;
    // TPR shadow, secondary controls, where the entry is; the exit qualification, or where the handler is.
    for (shadow, controls, offset, expected, why) in [
        (SHADOW, ACCESSES | REGISTERS, 0x080, (12, 0, 0x80), "VTPR"),
        (SHADOW, ACCESSES | REGISTERS, 0x320, (12, 0, 0x80), "LVT timer"),
        (
            SHADOW,
            ACCESSES,
            0x080,
            (12, 0, 0x80),
            "VTPR, which is enough without APIC registers",
        ),
        (SHADOW, ACCESSES, 0x320, (44, 0x3320, 0x10), "nothing but VTPR"),
        (0, ACCESSES, 0x080, (44, 0x3080, 0x10), "no TPR shadow"),
        (
            SHADOW,
            ACCESSES | REGISTERS,
            0x082,
            (44, 0x3082, 0x10),
            "beyond the low four bytes of 16",
        ),
        (
            SHADOW,
            ACCESSES | REGISTERS,
            0x390,
            (44, 0x3390, 0x10),
            "the current count",
        ),
    ] {
        let mut vmm = virtual_apic(controls, |a| a.nop());
        vmm.real_mode(&code);
        // HLT at 2000H:0080H.
        vmm.rig.write(0x2_0080, &[0xf4]);
        vmm.rig.write(PAGE + offset, &GATE.to_le_bytes());
        let primary = vmm.value(Field::PRIMARY_CONTROLS) & !SHADOW | shadow | 1 << 7;
        vmm.set(&[
            (Field::PRIMARY_CONTROLS, primary),
            (Field::GUEST_IDTR_BASE, ACCESS + offset - 4 * VECTOR),
            (Field::GUEST_RSP, 0x8000),
        ]);
        let v = vmm
            .run(&[Field::EXIT_REASON, Field::EXIT_QUALIFICATION, Field::GUEST_RIP])
            .unwrap();
        assert_eq!((v[0], v[1], v[2]), expected, "{why}");
    }
}

// covers: vmx/apic-access
#[test]
fn a_trap_waits_for_the_emulation_of_the_write_before_it() {
    // 30.4.3.2: APIC-write emulation has a higher priority than debug traps, which the VM exit saves as pending.
    let mut vmm = virtual_apic(ACCESSES | REGISTERS, WRITE4);
    parameters(&mut vmm, ACCESS + 0xf0, 0x1ff);
    vmm.handler(1, |a| a.iretq());
    vmm.set(&[(Field::GUEST_RFLAGS, TF | 2)]);
    let v = vmm
        .run(&[
            Field::EXIT_REASON,
            Field::GUEST_PENDING_DEBUG,
            Field::GUEST_RIP,
            Field::GUEST_RSP,
        ])
        .unwrap();
    assert_eq!(v, [56, 1 << 14, GUEST + BEFORE + 2, GUEST_STACK]);
    // Where the emulation causes none, the trap is delivered.
    let mut vmm = virtual_apic(ACCESSES, WRITE4);
    parameters(&mut vmm, ACCESS + 0x80, 0x20);
    vmm.set(&[(Field::GUEST_RFLAGS, TF | 2)]);
    vmm.handler(1, |a| {
        a.inc(rbx)?;
        a.iretq()
    });
    let v = vmm.run(&[Field::EXIT_REASON, Field::GUEST_RIP]).unwrap();
    assert_eq!(v, [18, GUEST + BEFORE + 2]);
    assert_eq!(vmm.rig.cpu.state().gpr[3], POINTERS + 3, "three instructions");
}

// covers: vmx/apic-entry-checks
#[test]
fn vm_entry_checks_what_belongs_to_the_virtual_apic() {
    // 27.2.1.1 "VM-Execution Control Fields": each makes VM entry fail with error 7.
    #[rustfmt::skip]
    let rows = [
        (Field::VIRTUAL_APIC, PAGE + 8, "bits 11:0 of the virtual-APIC address"),
        (Field::VIRTUAL_APIC, 1 << 52, "its width"),
        (Field::APIC_ACCESS, ACCESS + 8, "bits 11:0 of the APIC-access address"),
        (Field::APIC_ACCESS, 1 << 52, "its width"),
        (Field::PIN_CONTROLS, PIN | POSTED, "virtual-interrupt delivery without external-interrupt exiting"),
        (Field::EXIT_CONTROLS, EXIT, "posted interrupts without acknowledgement"),
        (Field::POSTED_INTERRUPT_VECTOR, 0x1f2, "bits 15:8 of the vector"),
        (Field::POSTED_INTERRUPT_DESCRIPTOR, DESCRIPTOR + 32, "bits 5:0 of the descriptor address"),
        (Field::POSTED_INTERRUPT_DESCRIPTOR, 1 << 52, "its width"),
        (Field::SECONDARY_CONTROLS, ACCESSES | X2APIC | REGISTERS | DELIVERY, "both ways to the local APIC"),
    ];
    let entry = |rows: &[(Field, u64)]| {
        let mut vmm = virtual_apic(ACCESSES | REGISTERS | DELIVERY, |a| a.vmcall());
        vmm.set(&[
            (Field::PIN_CONTROLS, PIN | 1 | POSTED),
            (Field::EXIT_CONTROLS, EXIT | ACKNOWLEDGE),
            (Field::POSTED_INTERRUPT_VECTOR, 0xf2),
            (Field::POSTED_INTERRUPT_DESCRIPTOR, DESCRIPTOR),
        ]);
        vmm.set(rows);
        vmm.run(&[Field::EXIT_REASON])
    };
    assert_eq!(entry(&[]), Ok(vec![18]));
    for (field, value, why) in rows {
        assert_eq!(entry(&[(field, value)]), Err((0x40, 7)), "{why}");
    }
    // Without the TPR shadow.
    for secondary in [X2APIC, REGISTERS, DELIVERY] {
        let mut vmm = virtual_apic(secondary, |a| a.vmcall());
        let primary = vmm.value(Field::PRIMARY_CONTROLS);
        vmm.set(&[(Field::PRIMARY_CONTROLS, primary & !SHADOW)]);
        assert_eq!(vmm.run(&[]), Err((0x40, 7)), "{secondary:#x}");
    }
    // Which parts have what.
    for (model, control, can) in [
        (&CORE2, ACCESSES, true),
        (&CORE2, X2APIC, false),
        (&HASWELL, X2APIC, true),
        (&HASWELL, REGISTERS, false),
        (&HASWELL, DELIVERY, false),
        (&BROADWELL, REGISTERS | DELIVERY, true),
    ] {
        let caps = model.shown_vmx().unwrap();
        let has = u64::from(caps.secondary.0) & control == control;
        assert_eq!(has, can, "{} {control:#x}", model.name);
        let posts = caps.pin.0 & POSTED as u32 != 0;
        assert_eq!(posts, model.name == "broadwell", "{}", model.name);
    }
}

/// A guest that goes every way to its local APIC, as often as it is let.
const BUSY: Code = |a| {
    let mut here = a.create_label();
    a.sti()?;
    a.set_label(&mut here)?;
    a.mov(rcx, qword_ptr(PARAMETERS))?;
    a.mov(eax, dword_ptr(rcx + 0x80))?;
    a.mov(dword_ptr(rcx + 0x80), eax)?;
    a.mov(dword_ptr(rcx + 0xb0), eax)?;
    a.mov(eax, 0x4_0051)?;
    a.mov(dword_ptr(rcx + 0x300), eax)?;
    a.mov(ecx, 0x808)?;
    a.xor(edx, edx)?;
    a.xor(eax, eax)?;
    a.wrmsr()?;
    a.rdmsr()?;
    a.mov(ecx, 0x83f)?;
    a.mov(eax, 0x51)?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    a.mov(r8, cr8)?;
    a.mov(cr8, r8)?;
    a.mov(ecx, 0x80b)?;
    a.xor(eax, eax)?;
    a.wrmsr()?;
    a.jmp(here)
};

// covers: vmx/apic-fuzz
#[test]
fn no_pointer_and_no_combination_of_the_controls_harms_us() {
    let mut seed = 0x1234_5678_9abc_def1u64;
    let mut draw = |n: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % n
    };
    let places = [
        PAGE,
        ACCESS,
        DESCRIPTOR,
        NOWHERE,
        0xfee0_0000,
        (1 << 46) - 0x1000,
        HANDLERS,
        GUEST,
    ];
    let (mut entered, mut exits) = (0, [0u32; 65]);
    for _ in 0..200 {
        let mut vmm = virtual_apic(0, BUSY);
        handlers(&mut vmm);
        // Handlers that go on, behind RDMSR and WRMSR where those are #GP.
        vmm.handler(0x51, |a| a.iretq());
        vmm.handler(13, |a| {
            a.add(rsp, 8)?;
            a.add(qword_ptr(rsp), 2)?;
            a.iretq()
        });
        let secondary: u64 = [ACCESSES, X2APIC, REGISTERS, DELIVERY]
            .into_iter()
            .map(|control| control * draw(2))
            .sum();
        vmm.secondary(secondary);
        let posts = POSTED * draw(2);
        let mut place = || places[draw(places.len() as u64) as usize];
        let (page, access, descriptor) = (place(), place(), place());
        // The guest's page tables map the first GByte.
        parameters(&mut vmm, if access < NOWHERE { access } else { ACCESS }, 0);
        vmm.set(&[
            (Field::PIN_CONTROLS, PIN | 1 | posts),
            (Field::EXIT_CONTROLS, EXIT | ACKNOWLEDGE),
            (Field::VIRTUAL_APIC, page),
            (Field::APIC_ACCESS, access),
            (Field::POSTED_INTERRUPT_VECTOR, 0xf2),
            (Field::POSTED_INTERRUPT_DESCRIPTOR, descriptor),
            (Field::TPR_THRESHOLD, draw(2) * draw(16)),
            (Field::GUEST_INTERRUPT_STATUS, draw(0x1_0000)),
            (Field::EOI_EXIT_1, draw(u64::MAX)),
        ]);
        vmm.table(&[Field::EXIT_REASON]);
        for _ in 0..50 {
            let exit = vmm.step(40);
            assert!(
                !matches!(exit, Exit::Defect(_)),
                "{exit:?}: {secondary:#x}, {page:#x}, {access:#x}, {descriptor:#x}"
            );
            let state = vmm.rig.cpu.state();
            let guest = state.vmx.as_ref().is_some_and(|vmx| vmx.guest.is_some());
            entered += u32::from(guest);
            if guest && vmm.rig.cpu.interruptible() && draw(3) == 0 {
                vmm.rig.engine.interrupt(&mut vmm.rig.cpu, &mut vmm.platform, 0xf2);
            } else if exit == Exit::Halt {
                let reason = u64::from_le_bytes(vmm.rig.read::<8>(vmm::OUT));
                exits[(reason & 63) as usize] += 1;
                break;
            }
        }
    }
    assert!(entered > 100, "{entered}");
    for reason in [1, 43, 44, 45, 56] {
        assert!(exits[reason] > 0, "no VM exit {reason}: {exits:?}");
    }
}
