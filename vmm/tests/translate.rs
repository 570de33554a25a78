//! Machines that translate against machines that interpret: code that a device writes under way, going back, snapshots, sessions.

use crate::common;
use std::path::Path;

use common::*;
use iced_x86::code_asm::*;
use minivmm::config::{DiskConfig, RecordOptions, ReverseOptions};
use minivmm::machine::disk::DiskMode;
use minivmm::{Console, End, MachineConfig, Run, StopReason};

/// With whatever has run once translated, and interpreted.
const WAYS: [Option<u32>; 2] = [Some(1), None];

fn open(config: &MachineConfig) -> (Run, Console) {
    let vm = Run::new(config).unwrap();
    let console = Console::open(&config.serial, &[], vm.line()).unwrap();
    (vm, console)
}

/// Sums numbers by a loop of several blocks, a thousand rounds for each of so many lines that it prints, and powers off.
fn summing(lines: u32) -> Vec<u8> {
    guest(|a| {
        let (mut line, mut round, mut over) = (a.create_label(), a.create_label(), a.create_label());
        a.mov(edi, lines).unwrap();
        a.set_label(&mut line).unwrap();
        a.mov(ecx, 1000).unwrap();
        a.set_label(&mut round).unwrap();
        a.imul_3(eax, eax, 0x0019_660d).unwrap();
        a.add(eax, ecx).unwrap();
        a.test(eax, 0x100).unwrap();
        a.jz(over).unwrap();
        a.add(dword_ptr(DATA), eax).unwrap();
        a.set_label(&mut over).unwrap();
        a.push(eax).unwrap();
        a.pop(ebx).unwrap();
        a.dec(ecx).unwrap();
        a.jnz(round).unwrap();
        a.mov(esi, eax).unwrap();
        out(a, 0x3f8, b'.');
        a.mov(eax, esi).unwrap();
        a.dec(edi).unwrap();
        a.jnz(line).unwrap();
        power_off(a);
    })
}

fn to_the_end(vm: &mut Run, console: &mut Console) -> (u64, u64, Vec<u8>) {
    let end = vm.run(console).unwrap();
    assert!(matches!(end, StopReason::Ended(_)), "{end:?}");
    (vm.steps(), vm.digest(), console.take_output())
}

fn has_translated(vm: &mut Run, after: Option<u32>) {
    let blocks = vm.stats().translated.map_or(0, |made| made.blocks);
    assert_eq!(blocks > 3, after.is_some(), "{blocks} blocks, {after:?}");
}

/// The code behind the store that has the device read is what the device reads: each of eight sectors adds another number. The block
/// that the store is in is the one that is written.
// covers: translate/device
#[test]
fn a_block_that_a_device_writes_as_it_runs_goes_on_as_it_was_written() {
    const BEHIND: u32 = 0x21_0000;
    let folder = Folder::new();
    // ADD EBX, imm32; RET.
    let sector = |n: u32| {
        let mut code = vec![0x81, 0xc3];
        code.extend((1u32 << n).to_le_bytes());
        code.push(0xc3);
        code.resize(512, 0xf4);
        code
    };
    let disk = folder.file("disk", (0..8u32).flat_map(sector).collect::<Vec<u8>>());
    let image = guest(|a| {
        read_sectors(a, BEHIND);
        let mut again = a.create_label();
        // The store and what is behind it are one block, which ends where the sector ends it: MOV DWORD [notify], 0 is ten bytes. What is
        // behind it first is a JMP to itself, which is never run.
        for (at, byte) in (BEHIND - 10..).zip([0xc7u32, 0x05]) {
            a.mov(byte_ptr(at), byte).unwrap();
        }
        a.mov(dword_ptr(BEHIND - 8), DISK + 0x50).unwrap();
        a.mov(dword_ptr(BEHIND - 4), 0).unwrap();
        a.mov(word_ptr(BEHIND), 0xfeeb).unwrap();
        a.xor(ebx, ebx).unwrap();
        a.xor(esi, esi).unwrap();
        a.mov(edi, BEHIND - 10).unwrap();
        a.set_label(&mut again).unwrap();
        a.mov(ecx, esi).unwrap();
        a.and(ecx, 7).unwrap();
        a.mov(dword_ptr(SECTOR_NUMBER), ecx).unwrap();
        a.inc(word_ptr(AVAILABLE + 2)).unwrap();
        a.call(edi).unwrap();
        a.inc(esi).unwrap();
        a.cmp(esi, 80).unwrap();
        a.jne(again).unwrap();
        a.mov(dword_ptr(DATA), ebx).unwrap();
        debug_exit(a, 1);
    });
    let kernel = folder.file("guest", image);
    let came = WAYS.map(|after| {
        let config = MachineConfig {
            memory: 4 << 20,
            translate_after: after,
            max_instructions: Some(1_000_000),
            disks: vec![DiskConfig {
                path: disk.clone(),
                mode: DiskMode::ReadOnly,
                format: None,
            }],
            ..MachineConfig::new(&kernel)
        };
        let (mut vm, mut console) = open(&config);
        let came = to_the_end(&mut vm, &mut console);
        has_translated(&mut vm, after);
        let mut sum = [0; 4];
        vm.read_physical(DATA.into(), &mut sum).unwrap();
        // Ten times each of the eight.
        assert_eq!(u32::from_le_bytes(sum), 10 * 0xff, "{after:?}");
        came
    });
    assert_eq!(came[0], came[1]);
}

/// From any step to any other, as the two went before.
// covers: translate/reverse
#[test]
fn a_machine_that_translates_goes_back_to_the_same_states() {
    let folder = Folder::new();
    let kernel = folder.file("guest", summing(6));
    let seen = WAYS.map(|after| {
        let config = MachineConfig {
            memory: 2 << 20,
            translate_after: after,
            reverse: Some(ReverseOptions {
                spacing: 5000,
                ..ReverseOptions::default()
            }),
            ..MachineConfig::new(&kernel)
        };
        let (mut vm, mut console) = open(&config);
        let end = to_the_end(&mut vm, &mut console);
        has_translated(&mut vm, after);
        let mut seen = vec![(end.0, end.1)];
        // Steps in no order, in the middle of blocks mostly.
        let mut step = 1;
        for _ in 0..60 {
            step = step * 48_271 % 2_147_483_647;
            vm.seek(&mut console, step % end.0).unwrap();
            seen.push((vm.steps(), vm.digest()));
        }
        assert!(matches!(
            vm.run(&mut console).unwrap(),
            StopReason::Ended(End::PowerOff)
        ));
        seen.push((vm.steps(), vm.digest()));
        assert_eq!(seen[0], seen[61]);
        (seen, end.2)
    });
    assert_eq!(seen[0], seen[1]);
}

/// A state that the one has given, the other goes on from.
// covers: translate/snapshots
#[test]
fn states_of_machines_that_translate_are_those_of_machines_that_do_not() {
    let folder = Folder::new();
    let kernel = folder.file("guest", summing(4));
    let config = |after| MachineConfig {
        memory: 2 << 20,
        translate_after: after,
        ..MachineConfig::new(&kernel)
    };
    let (mut plain, mut console) = open(&config(None));
    let end = to_the_end(&mut plain, &mut console);
    for [from, to] in [[WAYS[0], WAYS[1]], [WAYS[1], WAYS[0]], [WAYS[0], WAYS[0]]] {
        let (mut vm, mut console) = open(&config(from));
        let (mut other, mut heard) = open(&config(to));
        // It has run before, and has translations of its own.
        to_the_end(&mut other, &mut heard);
        for steps in [1, 777, 5000, 12_345] {
            assert!(vm.run_for(&mut console, steps).unwrap().is_none());
            other.set_state(&vm.save()).unwrap();
            assert_eq!((other.steps(), other.digest()), (vm.steps(), vm.digest()));
            let (steps, digest, _) = to_the_end(&mut other, &mut heard);
            assert_eq!((steps, digest), (end.0, end.1), "{from:?} to {to:?}");
        }
    }
}

/// A session that was recorded by the one is run again by the other: the checks in the log hold, and the end is the same.
// covers: translate/replay
#[test]
fn a_session_is_replayed_with_translation_and_without() {
    let folder = Folder::new();
    // Long enough for checks: they come every sixteen million steps.
    let kernel = folder.file("guest", summing(5000));
    for [recorded, replayed] in [[WAYS[0], WAYS[1]], [WAYS[1], WAYS[0]]] {
        let session = folder.path().join(format!("session-{recorded:?}"));
        let config = |after: Option<u32>, record: bool, at: &Path| MachineConfig {
            memory: 2 << 20,
            translate_after: after,
            record: record.then(|| RecordOptions {
                folder: at.into(),
                arguments: vec!["--kernel".into(), kernel.clone().into()],
            }),
            replay: (!record).then(|| at.into()),
            ..MachineConfig::new(&kernel)
        };
        let (mut first, mut console) = open(&config(recorded, true, &session));
        let end = to_the_end(&mut first, &mut console);
        has_translated(&mut first, recorded);
        first.end_recording(&Ok(End::PowerOff)).unwrap();
        assert!(end.0 > 2 << 24, "{} steps", end.0);
        drop((first, console));
        let (mut again, mut console) = open(&config(replayed, false, &session));
        assert_eq!(
            to_the_end(&mut again, &mut console),
            end,
            "{recorded:?} by {replayed:?}"
        );
        has_translated(&mut again, replayed);
    }
}
