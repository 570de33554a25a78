//! A program that executes instructions of AVX-512 on tables of operands and prints what they leave, for two CPUs to be compared.
//!
//! It starts as a multiboot kernel or, behind a boot sector of its own, from a disk. A case is an instruction on fixed registers, in a slot
//! with a RET behind it; each is executed on every set of operands: ZMM1 to ZMM3, k1 to k3, RAX, memory at RBX and MXCSR. Exceptions
//! have gates, so that one is a result like others.

use iced_x86::code_asm::*;
use iced_x86::{IcedError, Instruction};

/// Where a multiboot loader puts the image.
const IMAGE: u64 = 0x10_0000;
const START: u64 = IMAGE + 0x20;
const GDT: u64 = IMAGE + 0x400;
const GDTR: u64 = IMAGE + 0x420;
const IDTR: u64 = IMAGE + 0x430;
const LONG: u64 = IMAGE + 0x800;
const IDT: u64 = IMAGE + 0x2000;
const STUBS: u64 = IMAGE + 0x2400;
const SETS: u64 = IMAGE + 0x3000;
const SLOTS: u64 = IMAGE + 0x8000;
/// Bytes of a slot.
const SLOT: usize = 16;
/// Bytes of a set of operands.
const SET: usize = 320;
/// Page tables, the stack, a memory operand, what is kept.
const PAGES: u64 = 0x40_0000;
const STACK: u64 = 0x4f_0000;
const MEMORY: u64 = 0x50_0000;
const KEPT: u64 = 0x51_0000;
/// What a case leaves: ZMM1, memory, k1 to k3, RAX, MXCSR and flags, the vector of an exception.
const RESULT: u64 = 0x51_0100;
/// Bytes of it.
pub const RESULT_BYTES: usize = 192;
/// Where the boot sector loads what it then copies to [`IMAGE`].
const LOADED: u32 = 0x1_0000;
const SERIAL: i32 = 0x3f8;

/// What an instruction is executed on.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// ZMM1, which is the destination, ZMM2 and ZMM3.
    pub vectors: [[u8; 64]; 3],
    /// The operand in memory.
    pub memory: [u8; 64],
    /// k1, which is the writemask, k2 and k3.
    pub masks: [u64; 3],
    /// RAX.
    pub rax: u64,
    /// MXCSR.
    pub mxcsr: u32,
}

impl Operands {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.vectors.concat();
        bytes.extend(self.memory);
        for word in self.masks.into_iter().chain([self.rax, self.mxcsr.into()]) {
            bytes.extend(word.to_le_bytes());
        }
        bytes.resize(SET, 0);
        bytes
    }
}

/// What is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// A line for each case: a CRC of what it leaves for all sets of operands.
    Digests,
    /// A line for each case and set: all that it leaves.
    Everything,
}

/// The program: a multiboot image.
///
/// # Errors
/// An instruction that cannot be encoded.
pub fn image(cases: &[Instruction], sets: &[Operands], output: Output) -> Result<Vec<u8>, IcedError> {
    let mut image = vec![0; (SLOTS - IMAGE) as usize + cases.len() * SLOT];
    let end = IMAGE + image.len() as u64;
    let mut put = |at: u64, bytes: &[u8]| image[(at - IMAGE) as usize..][..bytes.len()].copy_from_slice(bytes);
    let flags = 1_u32 << 16;
    let checksum = 0_u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let header = [
        0x1bad_b002,
        flags,
        checksum,
        IMAGE as u32,
        IMAGE as u32,
        0,
        0,
        START as u32,
    ];
    put(IMAGE, &header.map(u32::to_le_bytes).concat());
    put(START, &protected()?);
    let descriptors = [0_u64, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
    put(GDT, &descriptors.map(u64::to_le_bytes).concat());
    put(GDTR, &[&23_u16.to_le_bytes()[..], &GDT.to_le_bytes()].concat());
    put(IDTR, &[&511_u16.to_le_bytes()[..], &IDT.to_le_bytes()].concat());
    let (long, after) = long(cases.len(), sets.len(), output)?;
    put(LONG, &long);
    for vector in 0..32 {
        let stub = STUBS + vector * 32;
        let gate = stub & 0xffff | 8 << 16 | 0x8e00 << 32 | (stub >> 16 & 0xffff) << 48;
        put(IDT + vector * 16, &[gate, stub >> 32].map(u64::to_le_bytes).concat());
        put(stub, &stub_of(vector, after)?);
    }
    assert!(sets.len() * SET <= (SLOTS - SETS) as usize, "too many sets of operands");
    for (n, set) in sets.iter().enumerate() {
        put(SETS + (n * SET) as u64, &set.bytes());
    }
    let mut encoder = iced_x86::Encoder::new(64);
    for (n, case) in cases.iter().enumerate() {
        encoder.encode(case, 0)?;
        let mut code = encoder.take_buffer();
        code.push(0xc3);
        assert!(code.len() <= SLOT, "{case}");
        put(SLOTS + (n * SLOT) as u64, &code);
    }
    debug_assert_eq!(end, SLOTS + (cases.len() * SLOT) as u64);
    Ok(image)
}

/// A disk that boots it.
///
/// # Errors
/// As for [`image`].
pub fn disk(image: &[u8]) -> Result<Vec<u8>, IcedError> {
    let sectors = image.len().div_ceil(512);
    let mut disk = boot_sector(sectors)?;
    assert!(
        disk.len() <= 510 && sectors * 512 <= 0x8_0000,
        "more than real mode reaches"
    );
    disk.resize(510, 0);
    disk.extend([0x55, 0xaa]);
    disk.extend(image);
    // The geometry that the machine is told: 20 cylinders of 16 heads and 63 sectors.
    disk.resize(20 * 16 * 63 * 512, 0);
    Ok(disk)
}

/// Loads the image with the BIOS, enters protected mode, and moves it to where a multiboot loader would have put it.
fn boot_sector(sectors: usize) -> Result<Vec<u8>, IcedError> {
    const PACKET: u32 = 0x600;
    const TABLE: u32 = 0x620;
    const AT_ONCE: u32 = 64;
    let mut a = CodeAssembler::new(16)?;
    a.cli()?;
    a.xor(ax, ax)?;
    a.mov(ds, ax)?;
    a.mov(es, ax)?;
    a.mov(ss, ax)?;
    a.mov(sp, 0x7c00)?;
    a.mov(word_ptr(PACKET), 16)?;
    a.mov(word_ptr(PACKET + 2), AT_ONCE)?;
    a.mov(word_ptr(PACKET + 4), 0)?;
    a.mov(word_ptr(PACKET + 6), LOADED / 16)?;
    a.mov(dword_ptr(PACKET + 8), 1)?;
    a.mov(dword_ptr(PACKET + 12), 0)?;
    a.mov(bp, sectors.div_ceil(AT_ONCE as usize) as i32)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.mov(ah, 0x42)?;
    a.mov(dl, 0x80)?;
    a.mov(si, PACKET as i32)?;
    a.int(0x13)?;
    a.add(word_ptr(PACKET + 6), AT_ONCE * 512 / 16)?;
    a.add(dword_ptr(PACKET + 8), AT_ONCE)?;
    a.dec(bp)?;
    a.jnz(again)?;
    // Gate A20.
    a.in_(al, 0x92)?;
    a.or(al, 2)?;
    a.out(0x92, al)?;
    // A GDT of flat segments, at 8 and 10H.
    for (at, word) in [
        (0, 0_u32),
        (4, 0),
        (8, 0xffff),
        (12, 0xcf_9b00),
        (16, 0xffff),
        (20, 0xcf_9300),
    ] {
        a.mov(dword_ptr(TABLE + 8 + at), word)?;
    }
    a.mov(word_ptr(TABLE), 23)?;
    a.mov(dword_ptr(TABLE + 2), TABLE + 8)?;
    a.lgdt(fword_ptr(TABLE))?;
    a.mov(eax, cr0)?;
    a.or(eax, 1)?;
    a.mov(cr0, eax)?;
    let mut code = a.assemble(0x7c00)?;
    // A far jump to what follows, in 32 bits.
    let next = 0x7c00 + code.len() as u32 + 8;
    code.extend([0x66, 0xea]);
    code.extend(next.to_le_bytes());
    code.extend(8_u16.to_le_bytes());
    let mut a = CodeAssembler::new(32)?;
    a.mov(eax, 0x10)?;
    a.mov(ds, eax)?;
    a.mov(es, eax)?;
    a.mov(ss, eax)?;
    a.mov(esi, LOADED)?;
    a.mov(edi, IMAGE as u32)?;
    a.mov(ecx, (sectors * 512 / 4) as u32)?;
    a.cld()?;
    a.rep().movsd()?;
    a.mov(eax, START as u32)?;
    a.jmp(eax)?;
    code.extend(a.assemble(next.into())?);
    Ok(code)
}

/// From protected mode to 64-bit mode.
fn protected() -> Result<Vec<u8>, IcedError> {
    let pages = PAGES as u32;
    let mut a = CodeAssembler::new(32)?;
    a.cli()?;
    a.cld()?;
    a.mov(edi, pages)?;
    a.xor(eax, eax)?;
    a.mov(ecx, 0x3000 / 4)?;
    a.rep().stosd()?;
    a.mov(dword_ptr(pages), pages + 0x1003)?;
    a.mov(dword_ptr(pages + 0x1000), pages + 0x2003)?;
    a.mov(eax, 0x83)?;
    a.mov(edi, pages + 0x2000)?;
    let mut next = a.create_label();
    a.set_label(&mut next)?;
    a.mov(dword_ptr(edi), eax)?;
    a.add(edi, 8)?;
    a.add(eax, 0x20_0000)?;
    a.cmp(eax, 0x400_0083)?;
    a.jb(next)?;
    // PAE, OSFXSR, OSXMMEXCPT, OSXSAVE.
    a.mov(eax, 0x4_0620)?;
    a.mov(cr4, eax)?;
    a.mov(eax, pages)?;
    a.mov(cr3, eax)?;
    a.mov(ecx, 0xc000_0080_u32)?;
    a.rdmsr()?;
    a.or(eax, 0x100)?;
    a.wrmsr()?;
    a.mov(eax, 0x8000_0033_u32)?;
    a.mov(cr0, eax)?;
    a.lgdt(fword_ptr(GDTR as u32))?;
    let mut code = a.assemble(START)?;
    code.push(0xea);
    code.extend((LONG as u32).to_le_bytes());
    code.extend(8_u16.to_le_bytes());
    assert!(code.len() <= (GDT - START) as usize);
    Ok(code)
}

/// The loop over all cases and sets; and where the handlers of exceptions go on.
fn long(cases: usize, sets: usize, output: Output) -> Result<(Vec<u8>, u64), IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let (mut case, mut set, mut after, mut word, mut end) = (
        a.create_label(),
        a.create_label(),
        a.create_label(),
        a.create_label(),
        a.create_label(),
    );
    let (mut print, mut digit, mut wait, mut character) =
        (a.create_label(), a.create_label(), a.create_label(), a.create_label());
    a.mov(eax, 0x10)?;
    a.mov(ds, eax)?;
    a.mov(es, eax)?;
    a.mov(ss, eax)?;
    a.mov(rsp, STACK)?;
    a.lidt(tbyte_ptr(IDTR))?;
    a.xor(ecx, ecx)?;
    a.xor(edx, edx)?;
    a.mov(eax, 0xe7)?;
    a.xsetbv()?;
    // The port without interrupts, at eight bits.
    a.mov(edx, SERIAL + 1)?;
    a.xor(eax, eax)?;
    a.out(dx, al)?;
    a.mov(edx, SERIAL + 3)?;
    a.mov(al, 3)?;
    a.out(dx, al)?;
    a.mov(r12, SLOTS)?;
    a.mov(r13d, cases as u32)?;
    a.set_label(&mut case)?;
    a.mov(r14, SETS)?;
    a.mov(r15d, sets as u32)?;
    a.xor(ebp, ebp)?;
    a.set_label(&mut set)?;
    // The operands.
    a.vmovups(zmm0, zmmword_ptr(r14 + 192))?;
    a.mov(rbx, MEMORY)?;
    a.vmovups(zmmword_ptr(rbx), zmm0)?;
    a.vmovups(zmm1, zmmword_ptr(r14))?;
    a.vmovups(zmm2, zmmword_ptr(r14 + 64))?;
    a.vmovups(zmm3, zmmword_ptr(r14 + 128))?;
    a.kmovq(k1, qword_ptr(r14 + 256))?;
    a.kmovq(k2, qword_ptr(r14 + 264))?;
    a.kmovq(k3, qword_ptr(r14 + 272))?;
    a.mov(rax, qword_ptr(r14 + 280))?;
    a.ldmxcsr(dword_ptr(r14 + 288))?;
    a.mov(r11d, 0xff)?;
    a.mov(qword_ptr(KEPT), rsp)?;
    a.push(2)?;
    a.popfq()?;
    a.call(r12)?;
    a.set_label(&mut after)?;
    a.pushfq()?;
    a.pop(rdx)?;
    // An exception's handler has flags of its own.
    a.and(edx, 0x8d5)?;
    a.xor(ecx, ecx)?;
    a.cmp(r11d, 0xff)?;
    a.cmovne(edx, ecx)?;
    a.mov(rdi, RESULT)?;
    a.vmovups(zmmword_ptr(rdi), zmm1)?;
    a.vmovups(zmm0, zmmword_ptr(rbx))?;
    a.vmovups(zmmword_ptr(rdi + 64), zmm0)?;
    a.kmovq(qword_ptr(rdi + 128), k1)?;
    a.kmovq(qword_ptr(rdi + 136), k2)?;
    a.kmovq(qword_ptr(rdi + 144), k3)?;
    a.mov(qword_ptr(rdi + 152), rax)?;
    a.stmxcsr(dword_ptr(rdi + 160))?;
    a.mov(dword_ptr(rdi + 164), edx)?;
    a.mov(qword_ptr(rdi + 168), r11)?;
    a.xor(eax, eax)?;
    a.mov(qword_ptr(rdi + 176), rax)?;
    a.mov(qword_ptr(rdi + 184), rax)?;
    a.mov(esi, RESULT_BYTES as u32 / 8)?;
    a.set_label(&mut word)?;
    match output {
        Output::Digests => a.crc32(rbp, qword_ptr(rdi))?,
        Output::Everything => {
            a.mov(rbp, qword_ptr(rdi))?;
            a.mov(r8d, 16)?;
            a.call(print)?;
        }
    }
    a.add(rdi, 8)?;
    a.dec(esi)?;
    a.jnz(word)?;
    if output == Output::Everything {
        a.mov(al, 10)?;
        a.call(character)?;
    }
    a.add(r14, SET as i32)?;
    a.dec(r15d)?;
    a.jnz(set)?;
    if output == Output::Digests {
        a.shl(rbp, 32)?;
        a.mov(r8d, 8)?;
        a.call(print)?;
        a.mov(al, 10)?;
        a.call(character)?;
    }
    a.add(r12, SLOT as i32)?;
    a.dec(r13d)?;
    a.jnz(case)?;
    for byte in b"end\n" {
        a.mov(al, i32::from(*byte))?;
        a.call(character)?;
    }
    // minivmm's and QEMU's way to end, then Bochs's, which wants the port's last character out before.
    a.mov(ecx, 100_000)?;
    a.set_label(&mut end)?;
    a.pause()?;
    a.dec(ecx)?;
    a.jnz(end)?;
    a.xor(eax, eax)?;
    a.out(0xf4, eax)?;
    a.mov(edx, 0x8900)?;
    for byte in b"Shutdown" {
        a.mov(al, i32::from(*byte))?;
        a.out(dx, al)?;
    }
    let mut halt = a.create_label();
    a.set_label(&mut halt)?;
    a.hlt()?;
    a.jmp(halt)?;
    // The upper R8 digits of RBP.
    a.set_label(&mut print)?;
    a.rol(rbp, 4)?;
    a.mov(eax, ebp)?;
    a.and(eax, 15)?;
    a.cmp(al, 10)?;
    a.jb(digit)?;
    a.add(al, 39)?;
    a.set_label(&mut digit)?;
    a.add(al, 48)?;
    a.call(character)?;
    a.dec(r8d)?;
    a.jnz(print)?;
    a.ret()?;
    // AL to the serial port.
    a.set_label(&mut character)?;
    a.mov(ecx, eax)?;
    a.set_label(&mut wait)?;
    a.mov(edx, SERIAL + 5)?;
    a.in_(al, dx)?;
    a.test(al, 0x20)?;
    a.jz(wait)?;
    a.mov(eax, ecx)?;
    a.mov(edx, SERIAL)?;
    a.out(dx, al)?;
    a.ret()?;
    let result = a.assemble_options(LONG, iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)?;
    let after = result.label_ip(&after)?;
    let code = result.inner.code_buffer;
    assert!(code.len() <= (IDT - LONG) as usize);
    Ok((code, after))
}

/// The handler of an exception: it leaves the case with the vector.
fn stub_of(vector: u64, after: u64) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    a.mov(r11d, vector as u32)?;
    a.mov(rsp, qword_ptr(KEPT))?;
    a.jmp(after)?;
    let code = a.assemble(STUBS + vector * 32)?;
    assert!(code.len() <= 32);
    Ok(code)
}
