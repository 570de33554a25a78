//! 64-bit guests: page tables, an IDT whose handlers count and go on, and room for what a test stores.

use super::BASE;
use iced_x86::code_asm::*;

/// Page tables, the IDT, what is counted, the stack's end, and room for what the test stores.
pub const TABLES: u32 = 0x20_0000;
pub const IDT: u32 = 0x21_0000;
pub const COUNTS: u32 = 0x22_0000;
pub const STACK: u32 = 0x24_0000;
pub const STRINGS: u32 = 0x25_0000;
/// Where 64-bit code begins.
const LONG: u32 = BASE + 0x200;

pub type Result<T = ()> = std::result::Result<T, IcedError>;

/// 32-bit code that identity-maps the first 16 MiB and goes to [`LONG`] in 64-bit mode.
fn enter(a: &mut CodeAssembler) -> Result {
    const GDT: u32 = IDT + 0x1000;
    for (at, value) in [
        (TABLES, TABLES + 0x1003),
        (TABLES + 0x1000, TABLES + 0x2003),
        // Null, 64-bit code, data; and what LGDT reads.
        (GDT + 12, 0x0020_9b00),
        (GDT + 20, 0x00cf_9300),
        (GDT + 16, 0x0000_ffff),
        (GDT + 32, 23 | GDT << 16),
        (GDT + 36, GDT >> 16),
    ] {
        a.mov(dword_ptr(at), value)?;
    }
    a.mov(ecx, 7)?;
    let mut page = a.create_label();
    a.set_label(&mut page)?;
    a.mov(eax, ecx)?;
    a.shl(eax, 21)?;
    a.or(eax, 0x83)?;
    a.mov(dword_ptr(ecx * 8 + (TABLES + 0x2000)), eax)?;
    a.dec(ecx)?;
    a.jns(page)?;
    a.mov(eax, TABLES)?;
    a.mov(cr3, eax)?;
    // PAE, OSFXSR, OSXMMEXCPT.
    a.mov(eax, 0x620)?;
    a.mov(cr4, eax)?;
    a.mov(ecx, 0xc000_0080u32)?;
    a.mov(eax, 0x901)?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    a.mov(eax, 0x8001_0033u32)?;
    a.mov(cr0, eax)?;
    a.lgdt(ptr(GDT + 32))?;
    a.push(8)?;
    a.push(LONG as i32)?;
    a.retf()
}

/// Exceptions that the program makes, and whether they push an error code.
pub const VECTORS: [(u32, bool); 6] = [
    (0, false),
    (3, false),
    (6, false),
    (13, true),
    (14, true),
    (0x40, false),
];

/// An IDT whose handlers count, add up what they are told, and go on at R15.
fn handlers(a: &mut CodeAssembler) -> Result {
    let mut begin = a.create_label();
    a.jmp(begin)?;
    let mut labels = Vec::new();
    for (vector, error) in VECTORS {
        let mut label = a.create_label();
        a.set_label(&mut label)?;
        labels.push((vector, label));
        if error {
            a.add(r14, qword_ptr(rsp))?;
            a.add(rsp, 8)?;
        }
        a.inc(qword_ptr(COUNTS + vector * 8))?;
        // KVM's single steps leave TF in what is pushed.
        a.and(qword_ptr(rsp + 16), !0x100)?;
        // RIP and flags but for RF.
        a.rol(r14, 5)?;
        a.add(r14, qword_ptr(rsp))?;
        a.mov(r13d, dword_ptr(rsp + 16))?;
        a.and(r13d, 0xffff)?;
        a.xor(r14, r13)?;
        if vector == 14 {
            a.mov(r13, cr2)?;
            a.add(r14, r13)?;
        }
        a.mov(qword_ptr(rsp), r15)?;
        a.iretq()?;
    }
    a.set_label(&mut begin)?;
    for (vector, label) in labels {
        let gate = IDT + vector * 16;
        a.lea(rax, ptr(label))?;
        a.mov(word_ptr(gate), ax)?;
        a.mov(dword_ptr(gate + 2), 0x8e00_0008u32 as i32)?;
        a.shr(rax, 16)?;
        a.mov(word_ptr(gate + 6), ax)?;
    }
    a.mov(word_ptr(IDT + 0x2000), 0xfff)?;
    a.mov(qword_ptr(IDT + 0x2002), IDT as i32)?;
    a.lidt(ptr(IDT + 0x2000))
}

/// Does what faults, or traps, and goes on behind it.
pub fn raise(a: &mut CodeAssembler, what: impl FnOnce(&mut CodeAssembler) -> Result) -> Result {
    let mut behind = a.create_label();
    a.lea(r15, ptr(behind))?;
    what(a)?;
    a.set_label(&mut behind)
}

/// Segments, the stack and the handlers.
fn begin(a: &mut CodeAssembler) -> Result {
    a.mov(ax, 16)?;
    for segment in [ds, es, fs, gs, ss] {
        a.mov(segment, ax)?;
    }
    a.mov(esp, STACK)?;
    handlers(a)?;
    a.xor(r14d, r14d)
}

/// An image of this code, which runs in 64-bit mode with the handlers of [`VECTORS`] in place, R14 zero and a stack.
pub fn guest(program: impl FnOnce(&mut CodeAssembler) -> Result) -> Vec<u8> {
    let mut long = CodeAssembler::new(64).unwrap();
    begin(&mut long).unwrap();
    program(&mut long).unwrap();
    let long = long.assemble(LONG.into()).unwrap();
    let mut image = super::guest(|a| enter(a).unwrap());
    assert!(image.len() <= (LONG - BASE) as usize);
    image.resize((LONG - BASE) as usize, 0);
    image.extend(long);
    assert!(image.len() < 0x2000);
    image
}
