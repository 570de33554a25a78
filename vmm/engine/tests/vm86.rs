//! Virtual-8086 mode and its extensions (SDM Vol. 3B chapter 22 "8086 Emulation").

use crate::{bench, rig};
use bench::{Bench, GDT, IDT, KCODE32, KDATA, KERNEL_STACK, TSS, UCODE32, descriptor, gate, handler};
use engine::{CS, CpuState, DS, ES, Exit, FS, GS, SS, Segment};
use iced_x86::code_asm::{dword_ptr, eax, esp};
use rig::CODE;
use x86::rflags::flag::{IF, TF};

const NT: u64 = 1 << 14;
const VM: u64 = 1 << 17;
const VIF: u64 = 1 << 19;
const VIP: u64 = 1 << 20;
const IOPL: u64 = 3 << 12;

const VME: u64 = 1;
const PVI: u64 = 2;
const UMIP: u64 = 1 << 11;

/// The program's segments, and where it begins.
const V_CS: u16 = 0x1001;
const V_SS: u16 = 0x2003;
const V_DS: u16 = 0x3000;
const IP: u64 = 0x100;
const SP: u64 = 0x1000;

fn stack(sp: u64) -> u64 {
    ((V_SS as u64) << 4) + sp
}

/// The I/O permission bitmap, with the redirection bitmap below it.
const IO_MAP: u64 = 0x88;

/// A machine in virtual-8086 mode.
fn program(flags: u64, cr4: u64) -> Bench {
    let mut b = Bench::protected();
    b.write(TSS, &[0; 0x1000]);
    b.put(TSS + 4, KERNEL_STACK | (KDATA as u64) << 32);
    b.write(TSS + 0x66, &(IO_MAP as u16).to_le_bytes());
    b.state(|s| {
        s.tr.limit = 0x200;
        s.cr4 = (s.cr4.into_bits() | cr4).into();
        s.rflags = (VM | flags | 2).into();
        s.cpl = 3;
        for (seg, selector) in [
            (CS, V_CS),
            (SS, V_SS),
            (DS, V_DS),
            (ES, 0x3100),
            (FS, 0x3200),
            (GS, 0x3300),
        ] {
            s.segments[seg] = Segment {
                attributes: if seg == CS { 0xfb } else { 0xf3 },
                ..Segment::real(selector)
            };
        }
        s.rip = IP;
        s.gpr[4] = SP;
    });
    b
}

fn words<const N: usize>(b: &Bench, at: u64) -> [u32; N] {
    core::array::from_fn(|i| u32::from_le_bytes(b.read(at + i as u64 * 4)))
}

fn halves<const N: usize>(b: &Bench, at: u64) -> [u16; N] {
    core::array::from_fn(|i| u16::from_le_bytes(b.read(at + i as u64 * 2)))
}

// covers: cpu/vm86
#[test]
fn iretd_enters_and_an_interrupt_leaves_with_all_segments_on_the_stack() {
    let mut b = Bench::protected();
    let image = VM | IF | 0x3000 | 2;
    b.code(|a| {
        for item in [
            0x3300u32,
            0x3200,
            0x3000,
            0x3100,
            V_SS as u32,
            0x1_1000,
            image as u32,
            V_CS as u32,
            IP as u32,
        ] {
            a.push(item as i32)?;
        }
        a.iretd()
    });
    // MOV AX, DS; MOV [2], AX; PUSH GS
    b.write(((V_CS as u64) << 4) + IP, &[0x8c, 0xd8, 0xa3, 2, 0, 0x0f, 0xa8]);
    assert_eq!(b.run(10), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.cpl, s.rflags.into_bits() & VM), (IP, 3, VM));
    let selectors: [u16; 6] = core::array::from_fn(|i| s.segments[i].selector);
    assert_eq!(selectors, [0x3100, V_CS, V_SS, 0x3000, 0x3200, 0x3300]);
    for seg in s.segments {
        assert_eq!((seg.base, seg.limit), ((seg.selector as u64) << 4, 0xffff));
    }
    b.run(3);
    let s = b.cpu.state();
    assert_eq!(halves(&b, 0x30002), [0x3000]);
    // ESP was loaded whole; the stack is 16 bits wide.
    assert_eq!((s.gpr[4], halves(&b, stack(0xffe))), (0x1_0ffe, [0x3300]));

    b.interrupt(0x40);
    let s = b.cpu.state();
    assert_eq!((s.rip, s.cpl, s.rflags.into_bits() & (VM | IF)), (handler(0x40), 0, 0));
    assert_eq!((s.segments[CS].selector, s.segments[SS].selector), (KCODE32, KDATA));
    assert_eq!(s.gpr[4], KERNEL_STACK - 36);
    assert_eq!(
        words(&b, s.gpr[4]),
        [
            IP as u32 + 7,
            V_CS as u32,
            image as u32,
            0x1_0ffe,
            V_SS as u32,
            0x3100,
            0x3000,
            0x3200,
            0x3300
        ]
    );
    for seg in [ES, DS, FS, GS] {
        assert_eq!(
            s.segments[seg],
            Segment::default(),
            "segment {seg} is null in the handler"
        );
    }
    // And back.
    b.at(handler(0x40), |a| a.iretd());
    b.run(1);
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.cpl, s.rflags.into_bits(), s.gpr[4]),
        (IP + 7, 3, image, 0x1_0ffe)
    );
    assert_eq!(s.segments[DS].base, 0x30000);
}

/// One instruction of the program: the exception, or the state after it.
fn step(b: &mut Bench, code: &[u8]) -> Result<CpuState, (u8, Option<u32>)> {
    b.one(|a| a.db(code))?;
    Ok(b.cpu.state())
}

const GP: Result<u64, (u8, Option<u32>)> = Err((13, Some(0)));

// covers: cpu/vm86, cpu/vme
#[test]
fn flag_instructions_ask_iopl_and_then_vme() {
    const CLI: &[u8] = &[0xfa];
    const STI: &[u8] = &[0xfb];
    const POPF: &[u8] = &[0x9d];
    const POPFD: &[u8] = &[0x66, 0x9d];
    const IRET: &[u8] = &[0xcf];
    const IRETD: &[u8] = &[0x66, 0xcf];
    // `image` is what POPF and IRET find; the result is the flags above the arithmetic ones, VM left out.
    for (name, code, flags, cr4, image, expected) in [
        ("CLI, IOPL 3", CLI, IOPL | IF, 0, 0, Ok(IOPL)),
        ("CLI, IOPL 2", CLI, 0x2000 | IF, 0, 0, GP),
        ("CLI, IOPL 0, VME", CLI, IF | VIF, VME, 0, Ok(IF)),
        ("CLI, IOPL 0, VME, VIP", CLI, IF | VIP, VME, 0, Ok(IF | VIP)),
        ("CLI, IOPL 3, VME", CLI, IOPL | IF, VME, 0, Ok(IOPL)),
        ("CLI, PVI is nothing here", CLI, IF, PVI, 0, GP),
        ("STI, IOPL 3", STI, IOPL, 0, 0, Ok(IOPL | IF)),
        ("STI, IOPL 0", STI, 0, 0, 0, GP),
        ("STI, IOPL 0, VME", STI, 0, VME, 0, Ok(VIF)),
        ("STI, IOPL 0, VME, VIP", STI, VIP, VME, 0, GP),
        ("STI, IOPL 3, VME, VIP", STI, IOPL | VIP, VME, 0, Ok(IOPL | IF | VIP)),
        ("POPF, IOPL 3", POPF, IOPL, 0, IF | NT, Ok(IOPL | IF | NT)),
        ("POPF, IOPL 3, IOPL stays", POPF, IOPL | IF, 0, 0x1000, Ok(IOPL)),
        ("POPF, IOPL 0", POPF, 0, 0, 0, GP),
        ("POPF, IOPL 0, VME, IF", POPF, 0, VME, IF | NT | IOPL, Ok(VIF | NT)),
        ("POPF, IOPL 0, VME, no IF", POPF, IF | VIF, VME, 0, Ok(IF)),
        ("POPF, IOPL 0, VME, VIP, IF", POPF, VIP, VME, IF, GP),
        ("POPF, IOPL 0, VME, VIP, no IF", POPF, VIP, VME, 0, Ok(VIP)),
        ("POPF, IOPL 0, VME, TF", POPF, 0, VME, TF, GP),
        (
            "POPFD, IOPL 3, VIF and VIP stay",
            POPFD,
            IOPL | VIP,
            0,
            IF,
            Ok(IOPL | VIP | IF),
        ),
        ("POPFD, IOPL 0, VME", POPFD, 0, VME, 0, GP),
        ("IRET, IOPL 3", IRET, IOPL, 0, IF, Ok(IOPL | IF)),
        ("IRET, IOPL 0", IRET, 0, 0, 0, GP),
        ("IRET, IOPL 0, VME, IF", IRET, 0, VME, IF | IOPL, Ok(VIF)),
        ("IRET, IOPL 0, VME, no IF", IRET, VIF, VME, NT, Ok(NT)),
        ("IRET, IOPL 0, VME, VIP, IF", IRET, VIP, VME, IF, GP),
        ("IRET, IOPL 0, VME, TF", IRET, 0, VME, TF, GP),
        ("IRETD, IOPL 3", IRETD, IOPL, 0, IF, Ok(IOPL | IF)),
        ("IRETD, IOPL 0, VME", IRETD, 0, VME, IF, GP),
    ] {
        let mut b = program(flags, cr4);
        let wide = code.len() == 2;
        let size = if wide { 4u64 } else { 2 };
        let image = image | 0x81;
        let returns = code.last() == Some(&0xcf);
        let items: &[u64] = if returns { &[0x500, 0x1234, image] } else { &[image] };
        for (i, item) in items.iter().enumerate() {
            b.write(stack(SP) + i as u64 * size, &item.to_le_bytes()[..size as usize]);
        }
        let got = step(&mut b, code);
        assert_eq!(
            got.as_ref()
                .map(|s| s.rflags.into_bits() & !(VM | 0xff))
                .map_err(|e| *e),
            expected,
            "{name}"
        );
        let Ok(s) = got else { continue };
        if code == CLI || code == STI {
            assert_eq!((s.rip, s.gpr[4]), (IP + 1, SP), "{name}");
            continue;
        }
        assert_eq!(s.rflags.into_bits() & 0xff, 0x83, "{name}: arithmetic flags");
        assert_eq!(s.gpr[4], SP + items.len() as u64 * size, "{name}");
        if returns {
            assert_eq!((s.rip, s.segments[CS].selector), (0x500, 0x1234), "{name}");
        }
    }
}

// covers: cpu/vm86, cpu/vme
#[test]
fn pushf_shows_what_the_program_may_believe() {
    for (name, wide, flags, cr4, expected) in [
        ("PUSHF, IOPL 3", false, IOPL | IF | VIF, 0, Some(IOPL | IF)),
        ("PUSHFD, IOPL 3", true, IOPL | IF | VIF, 0, Some(IOPL | IF | VIF)),
        ("PUSHF, IOPL 0", false, IF, 0, None),
        ("PUSHF, IOPL 0, VME, VIF", false, VIF, VME, Some(IOPL | IF)),
        ("PUSHF, IOPL 1, VME, no VIF", false, IF | 0x1000, VME, Some(IOPL)),
        ("PUSHFD, IOPL 0, VME", true, 0, VME, None),
    ] {
        let mut b = program(flags, cr4);
        let code: &[u8] = if wide { &[0x66, 0x9c] } else { &[0x9c] };
        let got = step(&mut b, code).map(|s| {
            assert_eq!(s.rflags.into_bits(), flags | VM | 2, "{name}: the flags stay");
            let image = words::<1>(&b, stack(SP - if wide { 4 } else { 2 }))[0] as u64;
            if wide { image } else { image & 0xffff }
        });
        assert_eq!(got.ok(), expected.map(|e| e | 2), "{name}");
    }
}

// covers: cpu/vme
#[test]
fn software_interrupts_go_by_the_redirection_bitmap() {
    // SDM Vol. 3B Table 22-2 "Software Interrupt Handling Methods While in Virtual-8086 Mode".
    #[derive(Debug, PartialEq)]
    enum To {
        /// The IDT's handler.
        Kernel,
        /// #GP.
        Monitor,
        /// The program's own vector table; FLAGS on the stack, and the flags after.
        Program(u64, u64),
    }
    for (method, cr4, flags, intercepted, expected) in [
        (1, 0, IOPL | IF, false, To::Kernel),
        (2, 0, 0x2000 | IF, false, To::Monitor),
        (3, VME, 0x2000, true, To::Monitor),
        (4, VME, IOPL | IF, true, To::Kernel),
        (5, VME, IOPL | IF | TF, false, To::Program(IOPL | IF | TF, IOPL)),
        (6, VME, IF | VIF | NT, false, To::Program(IOPL | IF | NT, IF | NT)),
        (6, VME, IF | 0x1000, false, To::Program(IOPL, IF | 0x1000)),
    ] {
        let mut b = program(flags, cr4);
        b.put(IDT + 0x35 * 8, gate(KCODE32, handler(0x35), 14, 3, 0));
        b.write(0x35 * 4, &[0x78, 0x56, 0x21, 0x43]);
        if intercepted {
            b.write(TSS + IO_MAP - 32 + 0x35 / 8, &[1 << (0x35 % 8)]);
        }
        let got = match step(&mut b, &[0xcd, 0x35]) {
            Err(e) => {
                assert_eq!(e, (13, Some(0)), "method {method}");
                To::Monitor
            }
            Ok(s) if s.rip == handler(0x35) => {
                assert_eq!((s.cpl, s.rflags.into_bits() & VM), (0, 0), "method {method}");
                To::Kernel
            }
            Ok(s) => {
                assert_eq!((s.rip, s.segments[CS].selector), (0x5678, 0x4321), "method {method}");
                assert_eq!(
                    (s.segments[CS].base, s.gpr[4], s.cpl),
                    (0x43210, SP - 6, 3),
                    "method {method}"
                );
                let [ip, cs, image] = halves(&b, stack(SP - 6));
                assert_eq!((ip as u64, cs), (IP + 2, V_CS), "method {method}");
                To::Program(image as u64 & !2, s.rflags.into_bits() & !(VM | 2))
            }
        };
        assert_eq!(got, expected, "method {method}");
    }
    // INT3 and INTO ask neither IOPL nor the bitmap.
    for (code, vector) in [(0xcc, 3u8), (0xce, 4)] {
        let mut b = program(0x800, VME);
        b.put(IDT + vector as u64 * 8, gate(KCODE32, handler(vector), 14, 3, 0));
        let s = step(&mut b, &[code]).expect("no exception");
        assert_eq!((s.rip, s.cpl), (handler(vector), 0), "{code:x}");
    }
    // A TSS too short for the bitmap, and a 16-bit one.
    for (limit, attributes) in [(0x66, 0x8b), (0x67, 0x8b), (0x200, 0x83)] {
        let mut b = program(IOPL, VME);
        b.state(|s| (s.tr.limit, s.tr.attributes) = (limit, attributes));
        if attributes == 0x83 {
            // Its stack for CPL 0 stands elsewhere.
            b.write(TSS + 2, &[0, 0xf0, KDATA as u8, 0]);
        }
        assert_eq!(
            step(&mut b, &[0xcd, 0xff]).err(),
            Some((13, Some(0))),
            "limit {limit:x}"
        );
    }
}

// covers: cpu/vme
#[test]
fn a_pending_virtual_interrupt_is_gp_before_the_next_instruction() {
    for (name, cr4, flags, due) in [
        ("VIF and VIP", VME, VIF | VIP, true),
        ("VIF alone", VME, VIF, false),
        ("VIP alone", VME, VIP, false),
        ("without VME", 0, VIF | VIP, false),
        ("at IOPL 3 too", VME, VIF | VIP | IOPL, true),
    ] {
        let mut b = Bench::protected();
        b.state(|s| s.cr4 = cr4.into());
        let image = (VM | flags) as i32;
        b.code(|a| {
            for item in [0, 0, 0, 0, V_SS as i32, 0x1000, image, V_CS as i32, IP as i32] {
                a.push(item)?;
            }
            a.iretd()
        });
        b.write(((V_CS as u64) << 4) + IP, &[0x90, 0x90]);
        b.run(10);
        assert_eq!(b.cpu.rip(), IP, "{name}: IRETD itself goes through");
        b.run(1);
        if due {
            let t = b.arrived();
            assert_eq!((t.vector, t.error, t.rip), (13, Some(0), IP), "{name}");
        } else {
            assert_eq!(b.cpu.rip(), IP + 1, "{name}");
        }
    }
}

// covers: cpu/vme
#[test]
fn protected_mode_virtual_interrupts_are_for_cli_and_sti_at_cpl_3() {
    for (name, code, cpl3, flags, cr4, expected) in [
        ("CLI at CPL 3", 0xfau8, true, IF | VIF, PVI, Ok(IF)),
        ("STI at CPL 3", 0xfb, true, 0, PVI, Ok(VIF)),
        ("STI at CPL 3, VIP", 0xfb, true, VIP, PVI, GP),
        ("STI at CPL 3, VME alone", 0xfb, true, 0, VME, GP),
        ("STI at CPL 3, IOPL 3", 0xfb, true, IOPL | VIP, PVI, Ok(IOPL | VIP | IF)),
        ("CLI at CPL 0", 0xfa, false, IF | VIF, PVI, Ok(VIF)),
    ] {
        let mut b = Bench::protected();
        b.state(|s| (s.cr4, s.rflags) = (cr4.into(), (flags | 2).into()));
        if cpl3 {
            b.user();
        }
        let got = step(&mut b, &[code]).map(|s| s.rflags.into_bits() & !2);
        assert_eq!(got, expected, "{name}");
    }
    // PUSHF shows IF as it is, with PVI too; and the pending interrupt is noticed on the way in.
    let mut b = Bench::protected();
    b.state(|s| (s.cr4, s.rflags) = (PVI.into(), (VIF | 2).into()));
    b.user();
    b.one(|a| a.pushfd()).expect("PUSHFD is anybody's");
    let s = b.cpu.state();
    assert_eq!(words(&b, s.gpr[4]), [(VIF | 2) as u32]);
    b.state(|s| s.rflags.set_vip(true));
    b.code(|a| a.nop());
    assert_eq!(b.faults(), (13, Some(0)));
}

// covers: cpu/vm86
#[test]
fn what_virtual_8086_mode_lacks_is_undefined_or_protected() {
    let (ud, gp) = ((6, None), (13, Some(0)));
    for (name, code, expected) in [
        ("SLDT", &[0x0f, 0x00, 0xc0][..], ud),
        ("STR beyond its segment", &[0x0f, 0x00, 0x0e, 0xff, 0xff], ud),
        ("LLDT", &[0x0f, 0x00, 0xd0], ud),
        ("LTR", &[0x0f, 0x00, 0xd8], ud),
        ("VERR", &[0x0f, 0x00, 0xe0], ud),
        ("VERW", &[0x0f, 0x00, 0xe8], ud),
        ("LAR", &[0x0f, 0x02, 0xc0], ud),
        ("LSL", &[0x0f, 0x03, 0xc0], ud),
        ("ARPL", &[0x63, 0xc0], ud),
        ("HLT", &[0xf4], gp),
        ("CLTS", &[0x0f, 0x06], gp),
        ("LGDT", &[0x0f, 0x01, 0x16, 0, 0], gp),
        ("LMSW", &[0x0f, 0x01, 0xf0], gp),
        ("MOV EAX, CR0", &[0x0f, 0x20, 0xc0], gp),
        ("MOV DR0, EAX", &[0x0f, 0x23, 0xc0], gp),
        ("INVD", &[0x0f, 0x08], gp),
        ("RDMSR", &[0x0f, 0x32], gp),
        ("SYSEXIT", &[0x0f, 0x35], gp),
        ("MOV AX, [FFFFH]", &[0xa1, 0xff, 0xff], gp),
        ("PUSH AX with SP 1", &[0x50], (12, Some(0))),
        ("SMSW with UMIP", &[0x0f, 0x01, 0xe0], gp),
        ("a jump beyond the segment", &[0x66, 0xe9, 0, 0, 1, 0], gp),
    ] {
        let mut b = program(IOPL, if name.contains("UMIP") { UMIP } else { 0 });
        b.state(|s| s.gpr[4] = if name.contains("SP 1") { 1 } else { SP });
        assert_eq!(step(&mut b, code).err(), Some(expected), "{name}");
    }
    // What is there for everybody.
    let mut b = program(IOPL, 0);
    assert!(step(&mut b, &[0x0f, 0x01, 0xe0]).is_ok(), "SMSW");
}

// covers: cpu/vm86
#[test]
fn ports_go_by_the_bitmap_alone() {
    // IN AL, 64H. IOPL says nothing about ports here.
    for (iopl, bit, expected) in [
        (IOPL, 0, None),
        (IOPL, 1, Some((13, Some(0)))),
        (0, 0, None),
        (0, 1, Some((13, Some(0)))),
    ] {
        let mut b = program(iopl, 0);
        b.write(TSS + IO_MAP + 0x64 / 8, &[bit << 4]);
        b.state(|s| s.tr.limit = IO_MAP as u32 + 0x64 / 8 + 1);
        let got = b.code_in(&[0xe4, 0x64]);
        assert_eq!(got, expected, "IOPL {iopl:x}, bit {bit}");
        assert_eq!(b.world.input.len(), expected.is_none() as usize);
    }
}

/// IN leaves the run loop, so `Bench::one` will not do.
trait CodeIn {
    fn code_in(&mut self, code: &[u8]) -> Option<(u8, Option<u32>)>;
}

impl CodeIn for Bench {
    fn code_in(&mut self, code: &[u8]) -> Option<(u8, Option<u32>)> {
        self.code(|a| a.db(code));
        match self.run(1) {
            Exit::Halt => {
                let t = self.arrived();
                Some((t.vector, t.error))
            }
            _ => None,
        }
    }
}

// covers: cpu/vm86
#[test]
fn only_a_gate_to_ring_0_leads_out() {
    for (name, selector, attributes, expected) in [
        ("ring 0", KCODE32, 0xc09b, None),
        ("ring 1", 0x80, 0xc0bb, Some((13, Some(0x80)))),
        ("ring 3", UCODE32 | 3, 0xc0fb, Some((13, Some(UCODE32 as u32)))),
        ("conforming", 0x80, 0xc09f, Some((13, Some(0x80)))),
    ] {
        let mut b = program(IOPL, 0);
        if selector == 0x80 {
            b.put(GDT + 0x80, descriptor(0, u32::MAX, attributes));
        }
        b.put(IDT + 0x35 * 8, gate(selector, handler(0x35), 14, 3, 0));
        assert_eq!(step(&mut b, &[0xcd, 0x35]).err(), expected, "{name}");
    }
    // The gate's own level counts as ever.
    let mut b = program(IOPL, 0);
    assert_eq!(step(&mut b, &[0xcd, 0x35]).err(), Some((13, Some(0x35 * 8 + 2))));
    // A return to virtual-8086 mode is CPL 0's: elsewhere the VM in the image is not loaded.
    let mut b = Bench::protected();
    b.user();
    b.code(|a| {
        a.mov(dword_ptr(esp), CODE as u32 + 0x40)?;
        a.mov(dword_ptr(esp + 4), UCODE32 as u32 | 3)?;
        a.mov(dword_ptr(esp + 8), VM as u32 | 2)?;
        a.iretd()
    });
    b.at(CODE + 0x40, |a| a.mov(eax, 1));
    b.run(5);
    let s = b.cpu.state();
    assert_eq!((s.gpr[0], s.rflags.into_bits() & VM, s.cpl), (1, 0, 3));
}
