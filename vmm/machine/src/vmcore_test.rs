use std::{
    fs::File,
    io::Read,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::PathBuf,
};

use super::*;

/// A new file without a name in the end.
fn scratch(name: &str) -> (File, PathBuf) {
    let path = std::env::temp_dir().join(format!("minivmm-vmcore-{}-{name}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    (file, path)
}

fn bytes_of(path: &PathBuf) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Type, offset, physical address and length of each program header.
fn segments(bytes: &[u8]) -> Vec<(u32, usize, u64, usize)> {
    assert_eq!(&bytes[..7], b"\x7fELF\x02\x01\x01");
    assert_eq!(half(bytes, 16), 4 | 62 << 16, "ET_CORE, EM_X86_64");
    let count = usize::from(u16::from_le_bytes([bytes[56], bytes[57]]));
    let at = |n: usize| 64 + n * 56;
    (0..count)
        .map(|n| {
            let header = at(n);
            let len = word(bytes, header + 32) as usize;
            (
                half(bytes, header),
                word(bytes, header + 8) as usize,
                word(bytes, header + 24),
                len,
            )
        })
        .collect()
}

/// Name, type and contents of each note.
fn notes_of(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
    let mut notes = Vec::new();
    while !bytes.is_empty() {
        let (name, len) = (half(bytes, 0) as usize, half(bytes, 4) as usize);
        let contents = 12 + name.next_multiple_of(4);
        let text = String::from_utf8(bytes[12..12 + name - 1].to_vec()).unwrap();
        notes.push((text, half(bytes, 8), bytes[contents..contents + len].to_vec()));
        bytes = &bytes[contents + len.next_multiple_of(4)..];
    }
    notes
}

fn cpu(seed: u64) -> CpuState {
    let mut cpu = CpuState {
        rip: seed + 16,
        cr2: seed + 20,
        cr3: seed + 30,
        ..CpuState::default()
    };
    for (number, register) in (0..).zip(&mut cpu.gpr) {
        *register = seed + number;
    }
    for (number, segment) in (0..).zip(&mut cpu.segments) {
        segment.selector = number + 1;
        segment.base = seed + 100 + u64::from(number);
        segment.attributes = 0xa09b;
    }
    cpu.idtr.base = seed + 200;
    cpu.msrs.kernel_gs_base = seed + 300;
    cpu
}

// covers: dump/memory
#[test]
fn memory_is_as_it_is_and_zeroes_are_holes() {
    let memory = Memory::new(64 << 20).unwrap();
    memory.write(0x1ffe, &[1, 2, 3, 4]).unwrap();
    memory.write(0x20_0000, &[0; 8192]).unwrap();
    memory.write((64 << 20) - 1, &[9]).unwrap();
    let (file, path) = scratch("memory");
    let size = write(&memory, &[cpu(0)], None, None, &file).unwrap();
    let bytes = bytes_of(&path);
    assert_eq!(bytes.len() as u64, size);
    let segments = segments(&bytes);
    let [(PT_NOTE, ..), (PT_LOAD, offset, 0, len)] = segments[..] else {
        panic!("{segments:x?}");
    };
    assert_eq!((len, offset % PAGE), (64 << 20, 0));
    let mut ram = vec![0; len];
    memory.read(0, &mut ram).unwrap();
    assert!(bytes[offset..] == ram[..], "RAM and file differ");
    let kept = file.metadata().unwrap().blocks() * 512;
    assert!(kept < 64 << 10, "{kept} bytes of disk for three pages");
    std::fs::remove_file(path).unwrap();
}

// covers: dump/memory
#[test]
fn memory_above_4_gib_has_a_segment_of_its_own_and_a_part_is_a_part() {
    let memory = Memory::new((3 << 30) + (8 << 20)).unwrap();
    memory.write((4 << 30) + 0x1234, &[7]).unwrap();
    let (file, path) = scratch("part");
    write(&memory, &[], None, None, &file).unwrap();
    let mut head = vec![0; 4096];
    file.read_exact_at(&mut head, 0).unwrap();
    let [_, (PT_LOAD, _, 0, low), (PT_LOAD, high_at, high, high_len)] = segments(&head)[..] else {
        panic!("{:x?}", segments(&head));
    };
    assert_eq!((low, high, high_len), (3 << 30, 4 << 30, 8 << 20));
    let mut byte = [0];
    file.read_exact_at(&mut byte, high_at as u64 + 0x1234).unwrap();
    assert_eq!(byte, [7]);
    // In place of what was there, and no longer.
    write(&memory, &[], None, Some((4 << 30) + 0x1234..(4 << 30) + 0x1235), &file).unwrap();
    let bytes = bytes_of(&path);
    let [_, (PT_LOAD, at, gpa, 1)] = segments(&bytes)[..] else {
        panic!("{:x?}", segments(&bytes));
    };
    assert_eq!((gpa, &bytes[at..]), ((4 << 30) + 0x1234, &[7][..]));
    let beyond = write(&memory, &[], None, Some(3 << 30..4 << 30), &file).unwrap_err();
    assert_eq!(beyond.to_string(), "no RAM is at guest-physical address 0xc0000000");
    std::fs::remove_file(path).unwrap();
}

// covers: dump/registers
#[test]
fn registers_are_where_linux_and_qemu_have_them() {
    let memory = Memory::new(2 << 20).unwrap();
    let (file, path) = scratch("registers");
    write(
        &memory,
        &[cpu(0x1000), cpu(0x2000)],
        Some(b"OSRELEASE=x\n"),
        None,
        &file,
    )
    .unwrap();
    let bytes = bytes_of(&path);
    let (_, at, _, len) = segments(&bytes)[0];
    let notes = notes_of(&bytes[at..at + len]);
    let names: Vec<(&str, u32, usize)> = notes
        .iter()
        .map(|(name, kind, contents)| (name.as_str(), *kind, contents.len()))
        .collect();
    // The lengths: `sizeof(struct elf_prstatus)` of x86-64 and `sizeof(QEMUCPUState)`.
    let expected = [
        ("CORE", 1, 336),
        ("CORE", 1, 336),
        ("QEMU", 0, 440),
        ("QEMU", 0, 440),
        ("VMCOREINFO", 0, 12),
    ];
    assert_eq!(names, expected);
    for (number, seed) in [(0, 0x1000), (1, 0x2000)] {
        let status = &notes[number].2;
        assert_eq!(half(status, 32), number as u32 + 1, "pr_pid");
        let register = |n: usize| word(status, 112 + 8 * n);
        // r15 first; rax the 11th, rip the 17th, rsp the 20th, fs_base the 22nd: <sys/user.h>.
        assert_eq!(
            [0, 10, 16, 19, 21].map(register),
            [seed + 15, seed, seed + 16, seed + 4, seed + 104]
        );
        let qemu = &notes[2 + number].2;
        assert_eq!([half(qemu, 0), half(qemu, 4)], [1, 440]);
        // RAX, RBX; RIP; CS; CR3 and KERNEL_GS_BASE at the end: QEMU's struct, its fields counted.
        assert_eq!([8, 16].map(|at| word(qemu, at)), [seed, seed + 3]);
        assert_eq!(word(qemu, 8 + 16 * 8), seed + 16);
        let cs = 8 + 18 * 8;
        assert_eq!((half(qemu, cs), half(qemu, cs + 8)), (2, 0xa0_9b00));
        assert_eq!(word(qemu, cs + 16), seed + 101);
        let idt = cs + 9 * 24;
        assert_eq!(word(qemu, idt + 16), seed + 200);
        assert_eq!(word(qemu, 440 - 24), seed + 30, "CR3");
        assert_eq!(word(qemu, 440 - 8), seed + 300);
    }
    assert_eq!(notes[4].2, b"OSRELEASE=x\n");
    std::fs::remove_file(path).unwrap();
}

// covers: dump/bad-file
#[test]
fn what_is_no_file_is_refused_and_what_cannot_be_written_leaves_nothing() {
    let memory = Memory::new(2 << 20).unwrap();
    memory.write(0, &[1]).unwrap();
    let (_, pipe) = io::pipe().unwrap();
    let pipe = File::from(OwnedFd::from(pipe));
    let refused = write(&memory, &[], None, None, &pipe).unwrap_err();
    assert!(matches!(refused, VmcoreError::NotAFile), "{refused}");
    let (file, path) = scratch("read-only");
    file.write_all_at(b"before", 0).unwrap();
    let reader = File::open(&path).unwrap();
    let refused = write(&memory, &[], None, None, &reader).unwrap_err();
    assert!(
        refused.to_string().contains("invalid argument") || refused.to_string().contains("bad file"),
        "{refused}"
    );
    assert_eq!(bytes_of(&path), b"before");
    std::fs::remove_file(path).unwrap();
}
