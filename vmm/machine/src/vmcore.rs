//! A machine's memory and registers as an ELF core file, in the form that QEMU's `dump-guest-memory` writes and that crash and
//! drgn read.
//!
//! # Form
//! One `PT_NOTE` segment, then a `PT_LOAD` segment for each region of RAM whose `p_paddr` is its guest-physical address; `p_vaddr`
//! is 0, as no page tables are looked at. The notes are, in this order:
//!
//! | name | type | of | what is in it |
//! |---|---|---|---|
//! | `CORE` | 1, NT_PRSTATUS | each CPU | its number from 1 on as the process's, and `struct user_regs_struct` of Linux |
//! | `QEMU` | 0 | each CPU | `QEMUCPUState` of QEMU's target/i386/arch_dump.c: also segments, descriptor tables and control registers |
//! | `VMCOREINFO` | 0 | the guest | what its Linux says of itself: Linux, Documentation/admin-guide/kdump/vmcoreinfo.rst |
//!
//! Pages that are all zero become holes of the file.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt};

use engine::{CS, CpuState, DS, ES, FS, GS, SS, Segment, Table};

use crate::memory::Memory;

/// ELF64 header and program header, in bytes: System V ABI, "ELF Header" and "Program Header".
const HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const EM_X86_64: u16 = 62;
const ET_CORE: u16 = 4;
const NT_PRSTATUS: u32 = 1;
/// `struct elf_prstatus` of x86-64: where the process's number and the registers are in it, and how long it is.
const PRSTATUS_PID: usize = 32;
const PRSTATUS_REGS: usize = 112;
const PRSTATUS_LEN: usize = 336;
/// The version of `QEMUCPUState`.
const QEMU_VERSION: u32 = 1;
const PAGE: usize = 4096;
/// Bytes of RAM that are looked at at once.
const CHUNK: u64 = 1 << 20;
/// Where segments begin in the file.
const ALIGN: u64 = PAGE as u64;

/// A dump that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum VmcoreError {
    /// A pipe, a socket or a device, for which the machine would wait.
    #[error("not a regular file: a dump has holes, and is written to a file alone")]
    NotAFile,
    /// The range that was asked for begins beyond RAM.
    #[error("no RAM is at guest-physical address {0:#x}")]
    NoRam(u64),
    /// The system's: a full disk, most often. The file is empty then.
    #[error("{}; the file is empty", crate::plain(.0))]
    Write(#[from] io::Error),
}

/// Writes a core file in place of what `file` holds: of all RAM, or of as much of `part` as is RAM. `vmcoreinfo` is the text that the guest's
/// Linux has for debuggers. Gives the file's size in bytes, holes included.
///
/// # Errors
/// See [`VmcoreError`].
pub fn write(
    memory: &Memory,
    cpus: &[CpuState],
    vmcoreinfo: Option<&[u8]>,
    part: Option<Range<u64>>,
    file: &File,
) -> Result<u64, VmcoreError> {
    if !file.metadata()?.is_file() {
        return Err(VmcoreError::NotAFile);
    }
    let ram = std::iter::once(0..memory.low_end()).chain(memory.high());
    let regions: Vec<Range<u64>> = match &part {
        None => ram.collect(),
        Some(part) => ram
            .map(|region| region.start.max(part.start)..region.end.min(part.end))
            .filter(|region| !region.is_empty())
            .collect(),
    };
    if regions.is_empty() {
        return Err(VmcoreError::NoRam(part.map_or(0, |part| part.start)));
    }
    let written = file
        .set_len(0)
        .and_then(|()| write_regions(memory, &regions, &notes(cpus, vmcoreinfo), file));
    if written.is_err() {
        // Half of a dump looks like a whole one.
        let _ = file.set_len(0);
    }
    Ok(written?)
}

fn write_regions(memory: &Memory, regions: &[Range<u64>], notes: &[u8], file: &File) -> io::Result<u64> {
    let headers = HEADER + PROGRAM_HEADER * (1 + regions.len() as u64);
    let mut head = elf_header(1 + regions.len() as u16);
    head.extend(program_header(PT_NOTE, headers, 0, notes.len() as u64));
    let mut end = (headers + notes.len() as u64).next_multiple_of(ALIGN);
    let mut starts = Vec::new();
    for region in regions {
        let len = region.end - region.start;
        head.extend(program_header(PT_LOAD, end, region.start, len));
        starts.push(end);
        end += len;
    }
    head.extend_from_slice(notes);
    // The size comes first: what nobody writes to is a hole.
    file.set_len(end)?;
    let touched = memory.touched();
    for (region, start) in regions.iter().zip(starts) {
        for range in &touched {
            let range = range.start.max(region.start)..range.end.min(region.end);
            write_pages(memory, &range, file, start + range.start.saturating_sub(region.start))?;
        }
    }
    // The head comes last: without it what a kill leaves is no core file to anybody.
    file.write_all_at(&head, 0)?;
    Ok(end)
}

/// Writes what is not zero of a range of RAM, from `at` in the file on.
fn write_pages(memory: &Memory, range: &Range<u64>, file: &File, at: u64) -> io::Result<()> {
    let mut bytes = vec![0; CHUNK.min(range.end.saturating_sub(range.start)) as usize];
    let mut gpa = range.start;
    while gpa < range.end {
        let bytes = &mut bytes[..CHUNK.min(range.end - gpa) as usize];
        memory.read(gpa, bytes).map_err(io::Error::other)?;
        let (mut place, chunk) = (0, at + (gpa - range.start));
        for run in runs_of_pages(bytes) {
            if run.iter().any(|byte| *byte != 0) {
                file.write_all_at(run, chunk + place)?;
            }
            place += run.len() as u64;
        }
        gpa += bytes.len() as u64;
    }
    Ok(())
}

/// Runs of pages of which all are zero or none is.
fn runs_of_pages(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let mut pages = rest.chunks(PAGE);
        let first = pages.next()?;
        let zero = is_zero(first);
        let same = pages.take_while(|page| is_zero(page) == zero);
        let len = first.len() + same.map(<[u8]>::len).sum::<usize>();
        let (run, behind) = rest.split_at(len);
        rest = behind;
        Some(run)
    })
}

fn elf_header(program_headers: u16) -> Vec<u8> {
    // Class 64, little-endian, version 1, System V.
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    bytes.extend(ET_CORE.to_le_bytes());
    bytes.extend(EM_X86_64.to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    // Entry, program headers, section headers, flags.
    for word in [0, HEADER, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(0u32.to_le_bytes());
    for half in [HEADER as u16, PROGRAM_HEADER as u16, program_headers, 0, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    bytes
}

fn program_header(kind: u32, offset: u64, physical: u64, len: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(0u32.to_le_bytes());
    let in_memory = if kind == PT_LOAD { len } else { 0 };
    for word in [offset, 0, physical, len, in_memory, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// All notes.
fn notes(cpus: &[CpuState], vmcoreinfo: Option<&[u8]>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, cpu) in (1..).zip(cpus) {
        note(&mut bytes, b"CORE\0", NT_PRSTATUS, &prstatus(cpu, number));
    }
    for cpu in cpus {
        note(&mut bytes, b"QEMU\0", 0, &qemu_state(cpu));
    }
    if let Some(text) = vmcoreinfo {
        note(&mut bytes, b"VMCOREINFO\0", 0, text);
    }
    bytes
}

/// Lengths, type, name and contents, each of the latter two padded to four bytes.
fn note(bytes: &mut Vec<u8>, name: &[u8], kind: u32, contents: &[u8]) {
    for word in [name.len() as u32, contents.len() as u32, kind] {
        bytes.extend(word.to_le_bytes());
    }
    for part in [name, contents] {
        bytes.extend_from_slice(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
}

fn prstatus(cpu: &CpuState, number: u32) -> Vec<u8> {
    let [
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
    ] = cpu.gpr;
    let selector = |segment: usize| u64::from(cpu.segments[segment].selector);
    // `struct user_regs_struct`: Linux, arch/x86/include/asm/user_64.h. No system call: orig_rax is -1.
    let registers = [
        r15,
        r14,
        r13,
        r12,
        rbp,
        rbx,
        r11,
        r10,
        r9,
        r8,
        rax,
        rcx,
        rdx,
        rsi,
        rdi,
        u64::MAX,
        cpu.rip,
        selector(CS),
        cpu.rflags.into(),
        rsp,
        selector(SS),
        cpu.segments[FS].base,
        cpu.segments[GS].base,
        selector(DS),
        selector(ES),
        selector(FS),
        selector(GS),
    ];
    let mut bytes = vec![0; PRSTATUS_LEN];
    bytes[PRSTATUS_PID..PRSTATUS_PID + 4].copy_from_slice(&number.to_le_bytes());
    for (place, register) in bytes[PRSTATUS_REGS..].chunks_exact_mut(8).zip(registers) {
        place.copy_from_slice(&register.to_le_bytes());
    }
    bytes
}

fn qemu_state(cpu: &CpuState) -> Vec<u8> {
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, rest @ ..] = cpu.gpr;
    let mut words: Vec<u64> = vec![rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp];
    words.extend(rest);
    words.extend([cpu.rip, cpu.rflags.into()]);
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let segments = [CS, DS, ES, FS, GS, SS].map(|segment| cpu.segments[segment]);
    for segment in segments.iter().chain([&cpu.ldtr, &cpu.tr]) {
        qemu_segment(&mut bytes, segment);
    }
    for Table { base, limit } in [cpu.gdtr, cpu.idtr] {
        let segment = Segment {
            base,
            limit: limit.into(),
            selector: 0,
            attributes: 0,
        };
        qemu_segment(&mut bytes, &segment);
    }
    for word in [
        cpu.cr0.into(),
        0,
        cpu.cr2,
        cpu.cr3,
        cpu.cr4.into(),
        cpu.msrs.kernel_gs_base,
    ] {
        bytes.extend(u64::to_le_bytes(word));
    }
    let mut state = QEMU_VERSION.to_le_bytes().to_vec();
    state.extend((bytes.len() as u32 + 8).to_le_bytes());
    state.extend(bytes);
    state
}

/// `QEMUCPUSegment`: its flags are the descriptor's second word, without the parts of base and limit.
fn qemu_segment(bytes: &mut Vec<u8>, segment: &Segment) {
    for word in [
        u32::from(segment.selector),
        segment.limit,
        u32::from(segment.attributes) << 8,
        0,
    ] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(segment.base.to_le_bytes());
}

#[cfg(test)]
#[path = "vmcore_test.rs"]
mod tests;
